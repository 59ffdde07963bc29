"""The forms of an audit beside the plain one."""

from __future__ import annotations

from clearhead.dependence.forms.generation import audit_generation
from clearhead.dependence.forms.modes import audit_modes
from clearhead.dependence.forms.padding import audit_padding
from clearhead.dependence.forms.samples import audit_batch, document_ids
from clearhead.dependence.forms.weights import inspect_weights

__all__ = [
    "audit_batch",
    "audit_generation",
    "audit_modes",
    "audit_padding",
    "document_ids",
    "inspect_weights",
]
