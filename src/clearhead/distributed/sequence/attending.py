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
from clearhead.distributed.link import Link
from clearhead.distributed.sequence.agreement import check_memory, describe, shares_of
from clearhead.distributed.sequence.balance import make_plan
from clearhead.distributed.sequence.dtensors import group_of, sharding_of
from clearhead.distributed.sequence.function import over_ranks
from clearhead.distributed.sequence.plan import Costs, Shares
from clearhead.distributed.sequence.ring import Call
from clearhead.masks import Mask
from clearhead.readings import LogSumExp, Reading

__all__ = ["attend"]

PLAIN = (Tensor, torch.nn.Parameter)
Three = tuple[Tensor, Tensor, Tensor]


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

    DTensors that are sharded over the positions, on a device mesh of one axis, are accepted, and
    the results are DTensors then.

    The ranks compare their arguments first. Of a function in `masks.where` only the name is
    compared: what it reads has to be the same on all ranks.

    The backward pass is another walk round the ring: all ranks run it. The gradients are those of
    the sum of the losses of all ranks. Those of bias and sinks are this rank's part; they add up
    over the ranks, as those of a parameter do. `MaxScore`, `TopK` and `Overlap` have no gradient.

    A rank that ends, stalls or calls with other arguments raises an error on every rank, within the
    timeout of the group. The group has the gloo backend, and the tensors are on the CPU.

    Keys and values travel round a ring (Liu et al. 2023, "Ring Attention with Blockwise
    Transformers"); ranks with less work, as under a causal mask, compute heads or rows of others
    (as in Li et al. 2023, "DISTFLASHATTN"), in the way that makes the busiest rank send least.
    """
    link = Link(group_of(group, query, key, value), "distributed.attend")
    options: Any = {"scale": scale, "softcap": softcap, "sinks": sinks, "dropout": dropout}
    try:
        sharding = sharding_of(group, query, key, value)
        if sharding is not None:
            query, key, value = (x.to_local() for x in (query, key, value))  # type: ignore[attr-defined]
        read_all = _checked((query, key, value), bias, sinks, read)
        tensors = {"query": query, "key": key, "value": value}
        said = describe(tensors, mask, read_all, {"bias": bias, **options})
        kind = "plain tensors" if sharding is None else f"DTensors, {sharding.queries} queries"
        said["equal"]["query, key, value"] = kind
    except (ValueError, TypeError) as error:
        link.gather({"refused": str(error)})
        raise
    told = link.gather(said)
    shares = shares_of(link, told)
    call = _call(link, shares, (query, key, value), mask, bias, options, told[0]["seed"])
    for reading in read_all:
        reading.check(shares.sizes)
    check_memory(link, read_all, shares, call.problem.dtype.itemsize)
    context, values = over_ranks(call, read_all)
    if query.ndim < 4:
        context, axis = context.squeeze(-3), query.ndim - 2
        values = [without_head(r, v, axis) for r, v in zip(read_all, values, strict=True)]
    if sharding is not None:
        context = sharding.wrap(context, -2)
        values = [sharding.wrap_value(r, v) for r, v in zip(read_all, values, strict=True)]
    if read is None:
        return context
    return context, (values[0] if isinstance(read, Reading) else tuple(values))


def _checked(tensors: Three, bias: Any, sinks: Any, read: Any) -> tuple[Reading, ...]:
    """Check this rank's tensors; the sizes of the whole are not known yet."""
    if torch.is_autocast_enabled("cpu"):
        hint = (
            "convert query, key and value, and call it under torch.autocast('cpu', enabled=False)"
        )
        raise value_error("query", "is not converted by torch.autocast here", hint=hint)
    check_inputs(*tensors)
    others = [type(x).__name__ for x in tensors if type(x) not in PLAIN]
    if others:
        hint = "pass this rank's share as a plain tensor"
        rule = "are plain tensors or DTensors"
        raise type_error("query, key, value", rule, got=others[0], hint=hint)
    if not tensors[0].is_cpu:
        hint = "move the shares to the CPU; the group has the gloo backend"
        raise value_error("query", "is on the CPU", got=str(tensors[0].device), hint=hint)
    found = wanted(read)
    inputs = [x for x in (*tensors, bias, sinks) if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        _check_gradients(found)
    return found


def _check_gradients(read: tuple[Reading, ...]) -> None:
    for reading in read:
        kind = type(reading)
        if kind is not LogSumExp and not (kind.splits_grad and kind.adds_up):
            hint = "read it under torch.no_grad(), or detach query, key and value"
            rule = f"has no gradient of {kind.__name__} over ranks"
            raise value_error("read", rule, got=repr(reading), hint=hint)


def _call(
    link: Link, shares: Shares, tensors: Three, mask: Any, bias: Any, options: Any, seed: Any
) -> Call:
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
    # The log-sum-exp of a row, in float64, comes with its context.
    size, lse, group = query.element_size(), 8, shares.group
    head_dim, value_dim = key.shape[-1] * size, value.shape[-1] * size
    costs = Costs(group * head_dim, group * (value_dim + lse), head_dim + value_dim)
    return Call(link, problem, make_plan(problem.mask, shares, costs))
