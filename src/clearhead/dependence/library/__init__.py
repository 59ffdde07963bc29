"""Every attention model of a library, audited: the sweep, its table, and the page about it."""

from __future__ import annotations

from clearhead.dependence.library.report import page, write_report
from clearhead.dependence.library.rows import FORMS, Row, counts, exit_code
from clearhead.dependence.library.sweep import (
    BACKENDS,
    LIBRARIES,
    Library,
    audit_library,
    read_header,
    read_run,
)

__all__ = [
    "BACKENDS",
    "FORMS",
    "LIBRARIES",
    "Library",
    "Row",
    "audit_library",
    "counts",
    "exit_code",
    "page",
    "read_header",
    "read_run",
    "write_report",
]
