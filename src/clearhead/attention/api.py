"""attend(): check the call once, choose an implementation and run it. q, k, v -> context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from clearhead.attention import batches, checks, edges, subclasses
from clearhead.attention.impl import NATIVE, choose
from clearhead.attention.impl.dropout import draw_seed
from clearhead.attention.memory import check_readings
from clearhead.attention.problem import Problem, default_scale
from clearhead.masks import Mask
from clearhead.readings import Reading

__all__ = ["attend", "make_problem", "without_head"]


class _NoSuch:
    """The type of unknown arguments: no value has it, so that type checkers refuse them too."""


def attend(
    query: Float[Tensor, "*batch query head_dim"],
    key: Float[Tensor, "*source_batch source head_dim"],
    value: Float[Tensor, "*source_batch source value_dim"],
    mask: Mask | Tensor | None = None,
    *,
    read: Reading | Sequence[Reading] | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    impl: str | None = None,
    **unknown: _NoSuch,
) -> Any:
    """Mix the values of the sources that each query may attend to, by the softmax of their scores.

    >>> import torch, clearhead as ch
    >>> from clearhead import masks, readings
    >>> x = torch.eye(3)
    >>> ch.attend(x, x, x, masks.causal(), scale=0.0)
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    >>> context, entropy = ch.attend(x, x, x, masks.causal(), scale=0.0, read=readings.Entropy())
    >>> entropy
    tensor([0.0000, 0.6931, 1.0986])

    query, key and value are `(*batch, head, position, head_dim)`; without a head axis they are
    `(batch, position, head_dim)` or `(position, head_dim)`, and the results have no head axis
    either. Query heads may be a multiple of source heads: consecutive query heads share one.

    The result mirrors `read`: None gives the context, one reading gives (context, its value), a
    tuple gives (context, tuple of values). Readings are of the weights before dropout, in float32
    (float64 for float64 inputs). Clone a result that has a gradient before editing it in place:
    torch raises a RuntimeError at the edit or in the backward pass, except for some edits with
    "reference".

    - `mask`: a `Mask`, or a bool tensor, True where a query may attend, that broadcasts to
      `(*batch, head, query, source)`. A query that may attend to nothing gets context 0.
    - `scale`: multiplies query @ key.T; 1/sqrt(head_dim) unless given.
    - `softcap`: bounds the scaled scores s smoothly, softcap * tanh(s / softcap) (Gemma 2).
    - `bias`: a float tensor added to the scores; broadcasts as a mask does. -inf blocks the edge.
    - `sinks`: one logit for each head that joins the softmax as a source without a value (gpt-oss).
    - `dropout`: the probability that a weight is dropped between weights and context; which ones
      are dropped depends only on torch's RNG state, not on the implementation.
    - `impl`: "native", "tiled" or "reference" instead of the first one that can serve the call.

    A wrong shape raises a ValueError and a wrong type a TypeError, with the rule and all shapes.

    The equation is that of Vaswani et al. 2017, "Attention Is All You Need".
    """
    if unknown:
        raise checks.unknown(unknown)
    if has_torch_function((query, key, value)):
        inputs = subclasses.as_plain(query, key, value)
        if inputs is not None and not has_torch_function(inputs):
            found = attend(*inputs, mask, read=read, scale=scale, bias=bias, softcap=softcap,  # pyright: ignore[reportCallIssue]
                           sinks=sinks, dropout=dropout, impl=impl)  # fmt: skip
            return subclasses.as_subclass(found, query, key, value)
        # A mode intercepts the call as it intercepts torch's own: `watch` relies on it.
        return handle_torch_function(
            attend, (query, key, value), query, key, value, mask, read=read, scale=scale,
            bias=bias, softcap=softcap, sinks=sinks, dropout=dropout, impl=impl,
        )  # fmt: skip
    if (
        read is None
        and bias is None
        and softcap is None
        and sinks is None
        and (impl is None or impl == NATIVE.name)
        and (type(dropout) is float and dropout == 0)
    ):
        context = NATIVE.plain(query, key, value, mask, scale)
        if context is not None:
            return context
    kind = query.device.type if isinstance(query, Tensor) else "meta"
    if kind != "meta" and torch.is_autocast_enabled(kind):
        # As F.scaled_dot_product_attention does; inside, float32 must stay float32.
        query, key, value = (_cast(x, torch.get_autocast_dtype(kind)) for x in (query, key, value))
        with torch.autocast(kind, enabled=False):
            return attend(query, key, value, mask, read=read, scale=scale, bias=bias,
                          softcap=softcap, sinks=sinks, dropout=dropout, impl=impl)  # fmt: skip
    query, key, value, mask, bias, sinks = map(
        subclasses.bare, (query, key, value, mask, bias, sinks)
    )
    checks.inputs(query, key, value)
    wanted = checks.wanted(read)
    options: Any = {"scale": scale, "softcap": softcap, "sinks": sinks, "dropout": dropout}
    if query.ndim > 4 and (axes := batches.split_axes(query, (mask, bias), wanted)):
        context, values = _run_each(axes, (query, key, value, mask, bias), options, wanted, impl)
    else:
        problem = make_problem(query, key, value, mask, bias=bias, **options)
        context, values = _run(problem, wanted, impl)
    if query.ndim < 4:
        context, axis = context.squeeze(-3), query.ndim - 2
        values = [without_head(r, v, axis) for r, v in zip(wanted, values, strict=True)]
    if read is None:
        return context
    return context, (values[0] if isinstance(read, Reading) else tuple(values))


def _run(problem: Problem, read: tuple[Reading, ...], impl: str | None) -> tuple[Tensor, list[Any]]:
    if read:
        check_readings(read, problem)
    chosen = choose(problem, read, impl)
    if problem.dropout:
        # Only now: a call that is refused leaves torch's RNG state alone.
        problem = replace(problem, seed=draw_seed(problem.query.device))
    return chosen.attend(problem, read)


def _run_each(
    axes: tuple[int, ...], tensors: Any, options: Any, read: tuple[Reading, ...], impl: str | None
) -> tuple[Tensor, tuple[Any, ...]]:
    """Run a call that is split over some of its batch axes."""
    query, key, _, *extras = tensors
    for name, extra in zip(("mask", "bias"), extras, strict=True):
        if isinstance(extra, Tensor):
            edges.check_shape(name, extra, query, key)
    batch = query.shape[:-3]
    pieces = zip(*(batches.split(x, axes, batch) for x in tensors), strict=True)
    return batches.join(
        [attend(*piece[:4], bias=piece[4], read=read, impl=impl, **options) for piece in pieces],
        axes, batch,
    )  # fmt: skip


def make_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Problem:
    """Check the optional arguments of a call, give every tensor a head axis, and fill in the scale.

    The shapes of query, key and value have been checked.
    """
    passed = query
    if query.ndim < 4:
        query, key, value = query.unsqueeze(-3), key.unsqueeze(-3), value.unsqueeze(-3)
    scale = _scale(scale, query.shape[-1])
    return Problem(
        query,
        key,
        value,
        None if mask is None else edges.mask(mask, passed, query, key),
        scale,
        None if bias is None else edges.bias(bias, passed, key),
        None if softcap is None else checks.softcap(softcap),
        None if sinks is None else checks.sinks(sinks, query),
        checks.dropout(dropout) if dropout else 0.0,
    )


def _scale(given: float | None, head_dim: int) -> float:
    if given is None:
        return default_scale(head_dim)
    return checks.number("scale", given, "multiply query by a tensor before the call")


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(x, Tensor) or x.dtype not in checks.FLOATS or x.dtype == torch.float64:
        return x
    return x.to(dtype)


def without_head(reading: Reading, value: Any, axis: int) -> Any:
    """Remove the head axes from a value, or from each tensor of a named tuple."""
    if isinstance(value, Tensor):
        for _ in range(reading.head_axes):
            value = value.squeeze(axis)
        return value
    return type(value)(*(without_head(reading, part, axis) for part in value))
