"""attend over ranks: each passes its share of the positions, and gets the same rows back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from clearhead._core import type_error, value_error
from clearhead.attention import (
    check_inputs,
    make_problem,
    wanted,
    without_head,
)
from clearhead.distributed.agreement import describe, shares_of
from clearhead.distributed.link import Link
from clearhead.distributed.parts import values_of
from clearhead.distributed.plan import Shares, make_plan
from clearhead.distributed.ring import Call, over_ranks
from clearhead.masks import Mask
from clearhead.readings import LogSumExp, Reading

__all__ = ["attend"]

PLAIN = (Tensor, torch.nn.Parameter)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    read: Reading | Sequence[Reading] | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    group: ProcessGroup | None = None,
) -> Any:
    """Attend over positions that are split over the ranks of a group: `clearhead.attend` on all.

    Each rank passes its share of the queries, keys and values, consecutive positions of any number
    (`distributed.shard(x)` cuts equal ones), and gets the context of its queries. `mask` and `bias`
    are those of the whole map, equal on all ranks, and so are all other arguments. The results are
    those of one process on the whole, up to rounding; dropout drops the same weights as one process
    with the random state of rank 0.

    Readings with numbers for each query (`LogSumExp`, `Entropy`, `TopK`, `Mass`, ..., and the rows
    of `Weights` and `Scores`) come as this rank's rows. `Rows`, `Received`, `BlockMap` and
    `Overlap` come whole, the same on every rank.

    The ranks compare their arguments first. Of a function in `masks.where` only the name is
    compared: what it reads has to be the same on all ranks.

    The backward pass is another walk round the ring: all ranks run it. The gradients of bias and
    sinks are this rank's part; they add up over the ranks, as those of a parameter do. Readings
    other than `LogSumExp` have no gradient.

    A rank that ends, stalls or calls with other arguments raises an error on every rank, within the
    timeout of the group. The group has the gloo backend, and the tensors are on the CPU.

    Keys and values travel round a ring (Liu et al. 2023, "Ring Attention with Blockwise
    Transformers"); ranks with less work, as under a causal mask, take over heads or rows of others
    (as in Li et al. 2023, "DISTFLASHATTN").
    """
    link = Link(group, "distributed.attend")
    options: Any = {"scale": scale, "softcap": softcap, "sinks": sinks, "dropout": dropout}
    try:
        read_all = _checked(query, key, value, read)
        tensors = {"query": query, "key": key, "value": value}
        said = describe(tensors, mask, read_all, {"bias": bias, **options})
    except (ValueError, TypeError) as error:
        link.gather({"refused": str(error)})
        raise
    told = link.gather(said)
    shares = shares_of(link, told)
    for reading in read_all:
        reading.check(shares.sizes)
    call = _call(link, shares, (query, key, value), mask, bias, options, told[0]["seed"])
    context, values = _run(call, read_all)
    if query.ndim < 4:
        context, axis = context.squeeze(-3), query.ndim - 2
        values = [without_head(r, v, axis) for r, v in zip(read_all, values, strict=True)]
    if read is None:
        return context
    return context, (values[0] if isinstance(read, Reading) else tuple(values))


def _checked(query: Any, key: Any, value: Any, read: Any) -> tuple[Reading, ...]:
    """Check this rank's tensors; the sizes of the whole are not known yet."""
    if torch.is_autocast_enabled("cpu"):
        hint = (
            "convert query, key and value, and call it under torch.autocast('cpu', enabled=False)"
        )
        raise value_error("query", "is not converted by torch.autocast here", hint=hint)
    check_inputs(query, key, value)
    others = [type(x).__name__ for x in (query, key, value) if type(x) not in PLAIN]
    if others:
        hint = "pass this rank's share as a plain tensor; x.to_local() is that of a DTensor"
        raise type_error("query, key, value", "are plain tensors", got=others[0], hint=hint)
    if not query.is_cpu:
        hint = "move the shares to the CPU; the group has the gloo backend"
        raise value_error("query", "is on the CPU", got=str(query.device), hint=hint)
    found = wanted(read)
    differentiable = any(x.requires_grad for x in (query, key, value)) and torch.is_grad_enabled()
    lost = [r for r in found if type(r) is not LogSumExp] if differentiable else []
    if lost:
        hint = "read it under torch.no_grad(), or detach query, key and value"
        raise value_error(
            "read", "has no gradient over ranks, except LogSumExp()", got=repr(lost[0]), hint=hint
        )
    return found


def _call(
    link: Link, shares: Shares, tensors: tuple[Tensor, Tensor, Tensor], mask: Any, bias: Any,
    options: Any, seed: Tensor,
) -> Call:  # fmt: skip
    """Check mask, bias and options against the sizes of the whole map, and make the plan."""
    lengths = (shares.sizes.query, shares.sizes.source, shares.sizes.source)
    # These take no memory: only their shapes count.
    query, key, value = (x.new_zeros(()).expand(*x.shape[:-2], n, x.shape[-1])
                         for x, n in zip(tensors, lengths, strict=True))  # fmt: skip
    problem = make_problem(query, key, value, mask, bias=bias, **options)
    query, key, value = (x.unsqueeze(-3) if x.ndim < 4 else x for x in tensors)
    problem = replace(problem, query=query, key=key, value=value)
    if problem.dropout:
        problem = replace(problem, seed=seed)
    return Call(link, problem, make_plan(problem.mask, shares))


def _run(call: Call, read: tuple[Reading, ...]) -> tuple[Tensor, list[Any]]:
    context, lse = over_ranks(call)
    others = tuple(r for r in read if type(r) is not LogSumExp)
    found = dict(zip(others, values_of(call, others, lse.detach()), strict=True)) if others else {}
    return context, [found.get(reading, lse) for reading in read]
