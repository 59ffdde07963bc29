"""The mask function: float masks in the form of "eager", which remember the edges they stand for.

Float masks, because a model may add them to scores of its own; a bool mask would add 1 to them,
silently. What `attend` gets is the mask that the tensor stands for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead import masks
from clearhead._core import type_error, value_error
from clearhead.integrations.hugging_face.source import refuse
from clearhead.masks import Mask

__all__ = ["Edges", "additive_mask", "edges_of"]

# The attribute of a mask tensor that holds its version and its edges.
_NOTE = "_clearhead_edges"


class Edges(NamedTuple):
    """What a mask tensor stands for: the edges it allows, and what it adds to their scores."""

    mask: Mask | None
    bias: Tensor | None


def additive_mask(
    *,
    config: Any = None,
    dtype: torch.dtype = torch.float32,
    allow_is_causal_skip: bool = True,
    **given: Any,
) -> Tensor | None:
    """Make the mask of a model: 0 where a query may attend, the lowest number where not.

    None, which blocks nothing, where the caller allows that for a bidirectional mask.
    """
    from transformers.masking_utils import sdpa_mask

    compiling = torch.compiler.is_compiling()
    if not compiling:
        refuse(type(config).__module__.rpartition(".")[0])
    edges = sdpa_mask(**given, allow_is_causal_skip=False)
    if edges is None:
        return None
    lowest = torch.finfo(dtype).min
    mask = torch.where(edges, torch.zeros((), device=edges.device, dtype=dtype), lowest)
    if not compiling:
        causal = allow_is_causal_skip and sdpa_mask(**given, allow_is_causal_skip=True) is None
        _remember(mask, Edges(_causal(edges) if causal else masks.dense(edges), None))
    return mask


def _causal(edges: Tensor) -> Mask:
    """Give the mask of edges that transformers leaves to the `is_causal` of SDPA."""
    query, source = edges.shape[-2:]
    # One query is the last position of a cache; more of them fill an empty one from its start.
    return masks.dense(edges) if query == 1 else (
        masks.causal() if query == source else masks.causal(align="start")
    )  # fmt: skip


def edges_of(mask: Any, source: int) -> Edges:
    """Give what a mask stands for: one made here, or any float or bool tensor of four axes."""
    if mask is None:
        return Edges(None, None)
    _check(mask)
    if mask.dtype == torch.bool:
        return Edges(masks.dense(mask[..., :source]), None)
    if torch.compiler.is_compiling():
        return Edges(None, _blocking(mask[..., :source]))
    version, known = getattr(mask, _NOTE, (None, None))
    if known is None or version != _version(mask) or mask.shape[-1] != source:
        mask = mask[..., :source] if mask.shape[-1] > source else mask
        known = _split(mask)
        _remember(mask, known)
    return known


def _check(mask: Any) -> None:
    if not isinstance(mask, Tensor):
        got = type(mask).__name__
        raise type_error("attention_mask", "is a tensor or None", got=got)
    if mask.ndim != 4:
        rule = "has the axes (batch, head or 1, query, source)"
        raise value_error("attention_mask", rule, shapes={"attention_mask": mask})
    if mask.dtype != torch.bool and not mask.is_floating_point():
        rule = "is a bool tensor, or a float tensor that is added to the scores"
        raise type_error("attention_mask", rule, got=str(mask.dtype))


def _split(mask: Tensor) -> Edges:
    """Separate the lowest number, which blocks, from what is added."""
    blocked = mask <= torch.finfo(mask.dtype).min
    added = mask.masked_fill(blocked, 0)
    bias = added if mask.requires_grad or bool((added != 0).any()) else None
    return Edges(masks.dense(~blocked) if bool(blocked.any()) else None, bias)


def _blocking(mask: Tensor) -> Tensor:
    """Replace the lowest number by -inf, which blocks an edge in a bias too."""
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)


def _remember(mask: Tensor, edges: Edges) -> None:
    # Edits in place of a tensor made in inference mode are not counted.
    if not mask.is_inference() and not mask.requires_grad:
        setattr(mask, _NOTE, (mask._version, edges))


def _version(mask: Tensor) -> int | None:
    return None if mask.is_inference() else mask._version
