"""What is registered in transformers: the attention function, the mask function, the checks."""

from __future__ import annotations

from clearhead.integrations.hugging_face.function import attention_function
from clearhead.integrations.hugging_face.masking import additive_mask
from clearhead.integrations.hugging_face.source import NAMES, reasons_of
from clearhead.integrations.hugging_face.weights import AttentionOutput

__all__ = [
    "NAMES",
    "AttentionOutput",
    "additive_mask",
    "attention_function",
    "reasons_of",
]
