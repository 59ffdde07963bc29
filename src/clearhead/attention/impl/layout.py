"""Tensors with any number of batch axes as tensors with exactly one."""

from __future__ import annotations

from torch import Tensor

from clearhead.attention.problem import Problem

__all__ = ["as_4d", "bias_as_4d"]


def as_4d(x: Tensor) -> Tensor:
    """The tensor as (batch, head, position, feature)."""
    return x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])


def bias_as_4d(bias: Tensor, problem: Problem) -> Tensor:
    """The bias as (batch or 1, head or 1, query or 1, source or 1)."""
    rank = problem.query.ndim
    if rank == bias.ndim == 4:
        return bias
    bias = bias[(None,) * (rank - bias.ndim)]
    if any(n > 1 for n in bias.shape[:-3]):
        bias = bias.expand(*problem.query.shape[:-3], *bias.shape[-3:])
    return bias.reshape(-1, *bias.shape[-3:])
