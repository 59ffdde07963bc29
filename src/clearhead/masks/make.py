"""The functions that make masks from data, and what they refuse."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead._core import type_error, value_error
from clearhead.masks.data import Dense, Keep, Lengths, Repeats, Same
from clearhead.masks.function import Where
from clearhead.masks.mask import Mask, readable

Numbers = Tensor | Sequence[int] | Sequence[Sequence[int]]


def lengths(
    source: Tensor | Sequence[int] | int, *, query: Tensor | Sequence[int] | int | None = None
) -> Mask:
    """The first `source` sources of every sample are real, the rest is padding on the right.

    >>> print(lengths([3, 1]).picture(3, sample=1))
    sample 1
      0 1 2
    0 ■ · ·
    1 ■ · ·
    2 ■ · ·

    One length for all samples, or one a sample, (batch,). `query` also empties the rows of
    padded queries.
    """
    if source is None:
        raise type_error("source", "takes lengths, as integers", got="None")
    sides = {"source": source, "query": query}
    found = {name: _lengths(name, side) for name, side in sides.items() if side is not None}
    counts = {len(side) for side in found.values() if side.dim() and len(side) != 1}
    if len(counts) > 1:
        raise value_error("query", "has one length a sample, as source does", shapes=found)
    return Lengths(found["source"], found.get("query"))


def keep(real: Tensor | Sequence[bool] | Sequence[Sequence[bool]]) -> Mask:
    """Real sources may be read, padding on any side may not: True = real.

    >>> print(keep([False, True, True]).picture(3))
      0 1 2
    0 · ■ ■
    1 · ■ ■
    2 · ■ ■

    (source,) for all samples, or (batch, source). Padded queries still read the real sources;
    `keep(real) & same(real, real)` empties their rows too.
    """
    tensor = _tensor("real", real)
    if tensor.dtype != torch.bool:
        hint = (
            "tokens != pad_id makes it; masks.from_huggingface(mask) takes a mask of ones and zeros"
        )
        raise type_error("real", "takes bools, True = real", got=str(tensor.dtype), hint=hint)
    return Keep(_ranked("real", tensor))


def document(ids: Numbers) -> Mask:
    """A query may read the sources of its own document: ids[j] == ids[i].

    >>> print(document([0, 0, 1]).picture(3))
      0 1 2
    0 ■ ■ ·
    1 ■ ■ ·
    2 · · ■

    `ids` (source,) for all samples, or (batch, source), number the sources' documents in any
    order; with fewer queries than sources the queries are the last ones.
    """
    return Same("document", None, _ids("ids", ids))


def same(query_ids: Numbers, source_ids: Numbers) -> Mask:
    """A query may read the sources with its own id: source_ids[j] == query_ids[i].

    >>> print(same([0, 1], [1, 1, 0]).picture(2, 3))
      0 1 2
    0 · · ■
    1 ■ ■ ·

    Each (position,) for all samples, or (batch, position).
    """
    queries, sources = _ids("query_ids", query_ids), _ids("source_ids", source_ids)
    counts = {len(ids) for ids in (queries, sources) if ids.dim() == 2 and len(ids) != 1}
    if len(counts) > 1:
        raise value_error(
            "query_ids",
            "needs as many samples as source_ids",
            shapes={"query_ids": queries, "source_ids": sources},
        )
    return Same("same", queries, sources)


def induction(tokens: Numbers) -> Mask:
    """The sources that follow an earlier occurrence of the query's token: induction's edges.

    >>> print(induction([7, 8, 7, 8]).picture(4))
      0 1 2 3
    0 · · · ·
    1 · · · ·
    2 · ■ · ·
    3 · · ■ ·

    tokens[j - 1] == tokens[i] and j - 1 < i, every earlier occurrence. `tokens` (source,) or
    (batch, source). `readings.Mass(induction(tokens))` is the induction score (Olsson et al. 2022,
    "In-context Learning and Induction Heads").
    """
    return Repeats("induction", _ids("tokens", tokens), 1)


def duplicate(tokens: Numbers) -> Mask:
    """The earlier occurrences of the query's token: tokens[j] == tokens[i] and j < i.

    >>> print(duplicate([7, 8, 7, 8]).picture(4))
      0 1 2 3
    0 · · · ·
    1 · · · ·
    2 ■ · · ·
    3 · ■ · ·

    `tokens` (source,) or (batch, source). `readings.Mass(duplicate(tokens))` finds duplicate-token
    heads (Wang et al. 2022, "Interpretability in the Wild").
    """
    return Repeats("duplicate", _ids("tokens", tokens), 0)


def dense(tensor: Tensor | Sequence[Sequence[bool]]) -> Mask:
    """The edges that are True in a bool tensor, (query, source) or (batch, head, query, source).

    >>> print(dense([[True, False], [False, True]]).picture(2))
      0 1
    0 ■ ·
    1 · ■

    Axes of size 1 fit every size. The tensor is not copied. Masks of other polarity or dtype have
    their own ways in: `from_multihead`, `from_additive`, `from_huggingface`.
    """
    tensor = require_bool("tensor", _tensor("tensor", tensor, copy=False))
    if tensor.dim() not in (2, 4):
        raise value_error(
            "tensor",
            "is (query, source) or (batch, head, query, source); "
            "other ranks can be read in two ways",
            shapes={"tensor": tensor},
            hint="tensor[None] adds a batch axis to (head, query, source), tensor[:, None] a head "
            "axis to (batch, query, source); keep(real) takes (batch, source)",
        )
    return Dense(tensor)


def where(function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mask:
    """The edges for which `function(batch, head, query, source)` is True: a FlexAttention mask_mod.

    >>> print(where(lambda b, h, q, k: (q - k) % 2 == 0).picture(3))
      0 1 2
    0 ■ · ■
    1 · ■ ·
    2 ■ · ■

    It is asked about one edge at a time (through `torch.vmap`), with 0-dimensional int64 tensors,
    and returns a bool tensor. It is never asked about positions out of range, nor, in
    `other & where(function)`, about edges that `other` blocks.
    """
    if not callable(function):
        raise type_error(
            "function", "takes a function of four positions", got=type(function).__name__
        )
    if not torch.compiler.is_compiling():
        _takes_four(function)
    return Where(function)


def _takes_four(function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind(0, 0, 0, 0)
    except TypeError as error:
        rule = f"takes (batch, head, query, source), as a mask_mod does ({error})"
        raise type_error("function", rule) from None
    except ValueError:
        pass  # some built-in functions have no signature


MAY_ATTEND = "is a Mask or a bool tensor (True = may attend)"


def no_mask(name: str, given: Any, rule: str = MAY_ATTEND) -> TypeError:
    """Refuse what is neither a mask nor a tensor, with the way to say what it means."""
    hint = "for example masks.causal(), or a bool tensor with True where a query may attend"
    got = type(given).__name__
    if isinstance(given, str):
        hint = f"masks.parse({given!r}) reads an expression, such as that of masks.causal()"
    elif isinstance(given, list | tuple):
        hint = "masks.edges(pairs) takes (query, source) pairs, masks.dense(rows) rows of bools; "
        hint += "most masks have a name, as masks.causal()"
    elif callable(given):
        got = f"the {got} {getattr(given, '__name__', '')}".rstrip()
        ours = str(getattr(given, "__module__", "")).startswith("clearhead.masks")
        hint = f"add (): masks.{given.__name__}()" if ours else "masks.where takes such functions"
    return type_error(name, rule, got=got, hint=hint)


def require_bool(name: str, tensor: Tensor) -> Tensor:
    """Refuse masks that are not bool, each kind with the way to say what it means."""
    if tensor.dtype == torch.bool:
        return tensor
    if only_ones_and_zeros(tensor):
        raise type_error(
            name,
            "a mask of ones and zeros is nearly always a bool mask in disguise",
            got=str(tensor.dtype),
            hint=f"{name}.bool() if 1 means may attend, ~{name}.bool() if 1 means blocked; "
            "masks.from_huggingface takes (batch, source)",
        )
    if tensor.is_floating_point():
        raise type_error(
            name,
            "takes a bool tensor, True = may attend",
            got=str(tensor.dtype),
            hint="pass numbers that are added to the scores as bias=; masks.from_additive takes "
            "0 and -inf",
        )
    raise type_error(
        name,
        "takes a bool tensor, True = may attend",
        got=str(tensor.dtype),
        hint=f"compare first, as in {name} != 0",
    )


def only_ones_and_zeros(tensor: Tensor) -> bool:
    """Whether every value is 0 or 1, with a 1 among them; False where that cannot be known."""
    if not readable(tensor) or tensor.is_complex() or not tensor.numel():
        return False
    return bool(((tensor == 0) | (tensor == 1)).all() and (tensor == 1).any())


def _tensor(name: str, values: Any, *, copy: bool = True) -> Tensor:
    if isinstance(values, Tensor):
        # A mask never changes, also where the caller's tensor does.
        return values.detach().clone() if copy else values.detach()
    try:
        tensor = torch.tensor(values)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise value_error(name, f"is a tensor or lists of equal lengths ({error})") from None
    return tensor.to(torch.int64) if not tensor.numel() else tensor


def _ids(name: str, values: Any) -> Tensor:
    tensor = _tensor(name, values)
    if tensor.is_floating_point() or tensor.is_complex():
        raise type_error(name, "takes integers", got=str(tensor.dtype))
    return _ranked(name, tensor if tensor.dtype == torch.int64 else tensor.to(torch.int64))


def _ranked(name: str, tensor: Tensor) -> Tensor:
    if tensor.dim() not in (1, 2):
        raise value_error(
            name,
            "is (position,), the same for every sample, or (batch, position)",
            shapes={name: tensor},
        )
    return tensor


def _lengths(name: str, values: Any) -> Tensor:
    tensor = _tensor(name, values)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        hint = "keep(real) takes one bool for each position" if tensor.dtype == torch.bool else None
        raise type_error(name, "takes lengths, as integers", got=str(tensor.dtype), hint=hint)
    if tensor.dim() > 1:
        raise value_error(name, "is one length, or one a sample (batch,)", shapes={name: tensor})
    if readable(tensor) and (tensor < 0).any():
        raise value_error(name, "lengths are 0 or more", got=tensor.min().item())
    return tensor.to(torch.int64)
