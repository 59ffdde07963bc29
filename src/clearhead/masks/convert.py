"""Masks from other APIs: each function is named after the one whose polarity and ranks it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead._core import readable, type_error, value_error
from clearhead.masks import positional
from clearhead.masks.data import (
    Dense,
    as_tensor,
    dense,
    keep,
    only_ones_and_zeros,
    require_bool,
    show,
)
from clearhead.masks.edgewise import Packed, Tiles, where
from clearhead.masks.mask import Mask
from clearhead.masks.positional import everything
from clearhead.masks.protocol import Own

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def from_sdpa(attn_mask: Tensor | None, *, is_causal: bool = False) -> Mask:
    """Take the mask of `F.scaled_dot_product_attention`: bool True = may attend, float is added.

    >>> import torch
    >>> print(from_sdpa(torch.tensor([[True, False], [True, True]])).picture(2))
      0 1
    0 ■ ·
    1 ■ ■

    (query, source) or (batch, head, query, source). `is_causal` is aligned to source 0, as in
    torch, and composes with the mask.
    """
    mask = everything() if attn_mask is None else _either("attn_mask", attn_mask)
    if not is_causal:
        return mask
    causal = positional.causal(align="start")
    return causal if attn_mask is None else mask & causal


def from_additive(mask: Tensor) -> Mask:
    """Take a float mask that is added to the scores: 0 = may attend, -inf or finfo.min = blocked.

    >>> import torch
    >>> print(from_additive(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])).picture(2))
      0 1
    0 ■ ·
    1 ■ ■

    The lowest finite value of any float dtype is blocked. Other finite values are refused: they
    belong in `bias=`. (query, source) or (batch, head, query, source).
    """
    if not isinstance(mask, Tensor):
        raise type_error("mask", "takes a float tensor", got=type(mask).__name__)
    if not mask.is_floating_point():
        hint = "from_sdpa takes True = may attend, from_multihead True = blocked"
        raise type_error("mask", "takes a float tensor", got=str(mask.dtype), hint=hint)
    return dense(_allowed_by_addition("mask", mask))


def from_multihead(
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    *,
    heads: int | None = None,
) -> Mask:
    """Take the masks of `nn.MultiheadAttention`: bool True = blocked, float is added.

    >>> import torch
    >>> future = torch.ones(2, 2, dtype=torch.bool).triu(1)
    >>> print(from_multihead(future).picture(2))
      0 1
    0 ■ ·
    1 ■ ■

    `attn_mask` is (query, source) or (batch * heads, query, source), which needs `heads`;
    `key_padding_mask` is (source,) or (batch, source). Both together block what either blocks.
    """
    mask = None
    if attn_mask is not None:
        mask = Dense(_split_heads(_allowed("attn_mask", attn_mask), heads))
    if key_padding_mask is None:
        return everything() if mask is None else mask
    real = _allowed("key_padding_mask", key_padding_mask)
    if real.dim() not in (1, 2):
        raise value_error(
            "key_padding_mask",
            "is (source,) or (batch, source)",
            shapes={"key_padding_mask": key_padding_mask, "attn_mask": attn_mask},
        )
    return keep(real) if mask is None else mask & keep(real)


def from_huggingface(attention_mask: Tensor, *, batch: int | None = None) -> Mask:
    """Take the `attention_mask` of transformers, (batch, source): 1 or True = real token.

    >>> import torch
    >>> print(from_huggingface(torch.tensor([[0, 1, 1]])).picture(3))
      0 1 2
    0 · ■ ■
    1 · ■ ■
    2 · ■ ■

    A square one could also be (query, source), so it needs `batch`. Masks of rank 4 go through
    `from_sdpa` (bool) or `from_additive` (float).
    """
    _check_rows(attention_mask, batch)
    if attention_mask.dtype != torch.bool and readable(attention_mask):
        _check_ones_and_zeros(attention_mask)
    return keep(attention_mask != 0)


def from_cu_seqlens(
    query: Tensor | Sequence[int], source: Tensor | Sequence[int] | None = None, *,
    causal: bool = False,
) -> Mask:  # fmt: skip
    """Take the cumulative lengths of packed sequences (`cu_seqlens` of FlashAttention's varlen).

    >>> print(from_cu_seqlens([0, 2, 3], [0, 3, 5], causal=True).picture(3, 5))
      0 1 2 3 4
    0 ■ ■ · · ·
    1 ■ ■ ■ · ·
    2 · · · ■ ■

    Each is (sequences + 1,), from 0 to the number of packed positions; without `source` that of
    the queries. A query may read the sources of its own sequence, with `causal` those up to its
    own position, where the last query of each sequence stands at its last source, also where the
    lengths differ. (`& masks.causal()` would align the last query of the whole pack instead.)
    """
    queries = _cumulative("query", query)
    sources = queries if source is None else _cumulative("source", source)
    if len(queries) != len(sources):
        raise value_error(
            "source",
            "counts as many sequences as query",
            shapes={"query (sequences + 1,)": queries, "source (sequences + 1,)": sources},
        )
    lengths = queries.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    start, stop = sources[sequence], sources[sequence + 1]
    if causal:
        left = queries[sequence + 1] - torch.arange(len(sequence))  # queries up to the last one
        stop = torch.maximum(start, stop - left + 1)
    given = "" if source is None else f", {show(sources)}"
    given += ", causal=True" if causal else ""
    text = f"from_cu_seqlens({show(queries)}{given})"
    return Packed(text, start, stop, int(sources[-1]))


def _cumulative(name: str, values: Tensor | Sequence[int]) -> Tensor:
    """Return cumulative lengths as int64 on the CPU; refuse what does not count up from 0."""
    tensor = as_tensor(name, values).cpu()
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if tensor.dim() != 1 or not len(tensor) or not whole:
        raise value_error(
            name,
            "is (sequences + 1,) cumulative lengths, as integers",
            shapes={name: tensor},
            hint="lengths of padded samples go through masks.lengths",
        )
    tensor = tensor.long()
    if tensor[0] != 0 or (tensor.diff() < 0).any():
        hint = "torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) makes it of lengths"
        raise value_error(name, "starts at 0 and never falls", got=tensor.tolist(), hint=hint)
    return tensor


def from_flex(block_mask: Any) -> Mask:
    """Take a `BlockMask` of FlexAttention: its tiles, and its `mask_mod` inside of partial tiles.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> block_mask = create_block_mask(lambda b, h, q, k: k <= q, 1, 1, 4, 4, device="cpu")
    >>> print(from_flex(block_mask).picture(4))
      0 1 2 3
    0 ■ · · ·
    1 ■ ■ · ·
    2 ■ ■ ■ ·
    3 ■ ■ ■ ■

    The edges are those that `flex_attention` computes, also where the tiles were listed by hand.
    """
    names = ("kv_num_blocks", "kv_indices", "mask_mod", "BLOCK_SIZE", "seq_lengths")
    if not all(hasattr(block_mask, name) for name in names):
        hint = "masks.where(function) takes a mask_mod, masks.dense(tensor) a bool tensor"
        raise type_error("block_mask", "is a BlockMask", got=type(block_mask).__name__, hint=hint)
    partial = _tiles(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices)
    mask: Mask = partial & where(block_mask.mask_mod)
    if block_mask.full_kv_num_blocks is not None:
        full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        mask = _tiles(block_mask, *full) | mask
    return mask


def _tiles(block_mask: Any, counts: Tensor, indices: Tensor) -> Tiles:
    """The tiles that a BlockMask lists: the first `counts` of the indices of each row."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    query, source = block_mask.seq_lengths
    height, width = block_mask.BLOCK_SIZE
    columns = -(-source // width)
    tiles = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    # What is not listed goes to a column of its own, which is cut off.
    tiles.scatter_(-1, torch.where(listed, indices, columns).long(), True)
    tiles = tiles[..., :columns]
    if tiles.shape[:2] == (1, 1):
        return Tiles(tiles[0, 0], (height, width), Own(None, None, query, source))
    return Tiles(tiles, (height, width), Own(tiles.shape[0], tiles.shape[1], query, source))


def _check_rows(attention_mask: Tensor, batch: int | None) -> None:
    """Refuse what is not (batch, source), or could be read otherwise."""
    if not isinstance(attention_mask, Tensor):
        raise type_error("attention_mask", "takes a tensor", got=type(attention_mask).__name__)
    if attention_mask.dim() != 2:
        raise value_error(
            "attention_mask",
            "is (batch, source)",
            shapes={"attention_mask": attention_mask},
            hint="from_sdpa takes bool masks of (batch, head, query, source), from_additive float",
        )
    many, source = attention_mask.shape
    if batch is None and many == source and many > 1:
        raise value_error(
            "attention_mask",
            "could be (batch, source) or (query, source)",
            shapes={"attention_mask": attention_mask},
            hint=f"from_huggingface(mask, batch={many}) if rows are samples, "
            "from_sdpa(mask.bool()) if they are queries",
        )
    if batch is not None and batch != many:
        shapes = {"attention_mask": attention_mask, "(batch, source)": (batch, source)}
        raise value_error("attention_mask", "needs one row a sample", shapes=shapes)


def _either(name: str, mask: Tensor) -> Mask:
    if not isinstance(mask, Tensor):
        raise type_error(name, "takes a tensor", got=type(mask).__name__)
    if mask.is_floating_point():
        return dense(_allowed_by_addition(name, mask))
    return dense(require_bool(name, mask))


def _allowed(name: str, mask: Tensor) -> Tensor:
    """Convert nn.MultiheadAttention's polarity to ours."""
    if not isinstance(mask, Tensor):
        raise type_error(name, "takes a tensor", got=type(mask).__name__)
    if mask.dtype == torch.bool:
        return ~mask
    if mask.is_floating_point():
        return _allowed_by_addition(name, mask)
    raise type_error(
        name,
        "takes bools, True = blocked, or floats that are added to the scores",
        got=str(mask.dtype),
        hint=f"{name} == 0 if 1 means real, {name} != 0 if 1 means blocked",
    )


def _split_heads(allowed: Tensor, heads: int | None) -> Tensor:
    """(batch * heads, query, source) as (batch, heads, query, source); rank 2 as it is."""
    if allowed.dim() == 2:
        return allowed
    if allowed.dim() != 3:
        raise value_error(
            "attn_mask",
            "is (query, source) or (batch * heads, query, source)",
            shapes={"attn_mask": allowed},
        )
    if heads is None or heads < 1 or allowed.shape[0] % heads:
        raise value_error(
            "heads",
            "must be given and divide the first axis of an attn_mask of rank 3, "
            "(batch * heads, query, source)",
            got=heads,
            shapes={"attn_mask": allowed},
            hint="from_multihead(attn_mask, heads=module.num_heads)",
        )
    return allowed.reshape(-1, heads, *allowed.shape[-2:])


def _allowed_by_addition(name: str, mask: Tensor) -> Tensor:
    """Where an additive mask is 0; refuses values that neither allow nor block."""
    if not readable(mask):
        return mask > torch.finfo(mask.dtype).min
    if only_ones_and_zeros(mask):
        raise value_error(
            name,
            "a float mask of zeros and ones is nearly always a bool mask in disguise",
            got=str(mask.dtype),
            hint=f"{name}.bool() if 1 means may attend, ~{name}.bool() if 1 means blocked; "
            "pass it as bias= if 1 is really added to the scores",
        )
    blocked = mask == -torch.inf
    for dtype in FLOATS:
        blocked |= mask == torch.tensor(torch.finfo(dtype).min, dtype=torch.float64).to(mask.dtype)
    other = ~(blocked | (mask == 0))
    if other.any():
        raise _wrong_value(name, mask[other][0].item())
    return ~blocked


def _wrong_value(name: str, value: float) -> ValueError:
    if value != value:
        return value_error(name, "has NaN, which neither allows nor blocks", got="nan")
    return value_error(
        name,
        "has 0 where attention is allowed and -inf where it is blocked",
        got=value,
        hint="pass numbers that are added to the scores as bias= of attend",
    )


def _check_ones_and_zeros(mask: Tensor) -> None:
    other = ~((mask == 0) | (mask == 1))
    if other.any():
        raise value_error(
            "attention_mask",
            "has 1 for real tokens and 0 for padding",
            got=mask[other][0].item(),
            hint="from_additive takes 0 and -inf",
        )
