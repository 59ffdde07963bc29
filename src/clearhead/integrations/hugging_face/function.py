"""The attention function that models of transformers call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clearhead import readings
from clearhead.attention import attend
from clearhead.integrations.hugging_face.masking import edges_of
from clearhead.integrations.hugging_face.verification import (
    InterfaceInputs,
    is_verified,
    verify,
)
from clearhead.integrations.hugging_face.weights import weights_wanted

__all__ = ["attention_function"]


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Give the context, (batch, query, head, value_dim), and the weights where they are wanted.

    `options` are those of the attention interface; what is neither known here nor changes the
    result of the module's own eager attention is ignored.
    """
    if not is_verified(module):
        verify(_attend, module, InterfaceInputs(query, key, value, attention_mask, options))
    dropout = dropout if module.training else 0.0
    read = readings.Weights() if weights_wanted(options) else None
    return _attend(query, key, value, attention_mask, dropout=dropout, read=read, **options)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    read: readings.Weights | None = None,
    scaling: float | Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    dtype = value.dtype
    query, key, value = _fitting(query, key, value)
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling, 1.0
    mask, bias = edges_of(attention_mask, key.shape[2])
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    found = attend(
        query, key, value, mask, bias=_floats(bias, query), scale=scaling, softcap=softcap,
        sinks=_floats(s_aux, query), dropout=dropout, read=read,
    )  # fmt: skip
    context, weights = (found, None) if read is None else found
    context = context.transpose(1, 2).contiguous().to(dtype)
    return context, None if weights is None else weights.to(dtype)


def _fitting(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bring the three to one dtype and one batch: learned queries have a batch of one."""
    if not query.dtype == key.dtype == value.dtype:
        dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if len(query) != len(key) and 1 in (len(query), len(key)):
        batch = max(len(query), len(key))
        query, key, value = (x.expand(batch, *x.shape[1:]) for x in (query, key, value))
    return query, key, value


def _floats(given: Tensor | None, query: Tensor) -> Tensor | None:
    """Keep a bias in float32 or wider: in a narrow dtype its lowest numbers overflow."""
    if given is None:
        return None
    wide = query.dtype if query.dtype == torch.float64 else torch.float32
    return given.to(wide)
