"""attend(): check the call once, choose an implementation, run it. q, k, v -> context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from clearhead.attention import checks
from clearhead.attention.impl import choose
from clearhead.attention.impl.dropout import draw_seed
from clearhead.attention.impl.native import native
from clearhead.attention.problem import Problem, default_scale
from clearhead.masks import Mask
from clearhead.readings import Overlap, Reading

__all__ = ["attend"]


class _NoSuch:
    """The type of arguments by other names: no value has it, so type checkers refuse them too."""


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
    """Mix the values of the sources that each query may attend to, by how well their keys match.

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
    `(batch, position, head_dim)` or `(position, head_dim)`, and so is all that comes back. Query
    heads may be a multiple of source heads: consecutive query heads share a source head.

    The answer mirrors `read`: None gives the context, one reading gives (context, its value), a
    tuple gives (context, tuple of values). Readings are of the weights before dropout, in float32
    (float64 for float64 inputs). Before an edit in place, clone() what has a gradient: torch raises
    a RuntimeError at the edit or in the backward pass, and only "reference" stands some edits.

    - `mask`: a `Mask`, or a bool tensor, True where a query may attend, that broadcasts to
      `(*batch, head, query, source)`. A query that may attend to nothing gets context 0.
    - `scale`: multiplies query @ key.T; 1/sqrt(head_dim) unless given.
    - `softcap`: bounds the scaled scores s smoothly, softcap * tanh(s / softcap) (Gemma 2).
    - `bias`: a float tensor added to the scores; broadcasts as a mask does. -inf blocks the edge.
    - `sinks`: one logit for each head that joins the softmax as a source without a value (gpt-oss).
    - `dropout`: the probability that a weight is dropped between weights and context; which ones
      hangs on torch's seed alone, not on the implementation.
    - `impl`: "native", "tiled" or "reference" instead of the first of them that can serve.

    A wrong shape is a ValueError and a wrong type a TypeError, with the rule and all shapes.

    The equation is that of Vaswani et al. 2017, "Attention Is All You Need".
    """
    if unknown:
        raise checks.unknown(unknown)
    if has_torch_function((query, key, value)):
        # A mode sees the call as it sees torch's own: this is how `watch` does.
        return handle_torch_function(
            attend, (query, key, value), query, key, value, mask, read=read, scale=scale,
            bias=bias, softcap=softcap, sinks=sinks, dropout=dropout, impl=impl,
        )  # fmt: skip
    if (
        read is None
        and bias is None
        and softcap is None
        and sinks is None
        and (impl is None or impl == native.NAME)
        and (type(dropout) is float and dropout == 0)
    ):
        context = native.plain(query, key, value, mask, scale)
        if context is not None:
            return context
    kind = query.device.type if isinstance(query, Tensor) else "meta"
    if kind != "meta" and torch.is_autocast_enabled(kind):
        # As F.scaled_dot_product_attention does; inside, float32 must stay float32.
        query, key, value = (_cast(x, torch.get_autocast_dtype(kind)) for x in (query, key, value))
        with torch.autocast(kind, enabled=False):
            return attend(query, key, value, mask, read=read, scale=scale, bias=bias,
                          softcap=softcap, sinks=sinks, dropout=dropout, impl=impl)  # fmt: skip
    checks.inputs(query, key, value)
    wanted = checks.wanted(read)
    problem = _problem(query, key, value, mask, scale, bias, softcap, sinks, dropout)
    if wanted:
        checks.readings(wanted, problem)
    chosen = choose(problem, wanted, impl)
    if dropout:
        # A call that is refused draws nothing.
        problem.seed = draw_seed(query.device)
    context, values = chosen.attend(problem, wanted)

    if query.ndim < 4:
        context, axis = context.squeeze(-3), query.ndim - 2
        values = [_without_head(r, v, axis) for r, v in zip(wanted, values, strict=True)]
    if read is None:
        return context
    return context, (values[0] if isinstance(read, Reading) else tuple(values))


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    scale: float | None,
    bias: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Problem:
    """Check what is optional, give every tensor a head axis, fill in the scale."""
    given = query
    if query.ndim < 4:
        query, key, value = query.unsqueeze(-3), key.unsqueeze(-3), value.unsqueeze(-3)
    if scale is None:
        scale = default_scale(query.shape[-1])
    else:
        checks.number("scale", scale, "multiply query by a tensor before the call")
        # torch multiplies by no whole number that takes more than 64 bits.
        scale = float(scale) if type(scale) is int else scale
    problem = Problem(query, key, value, None, scale)
    if mask is not None:
        problem.mask = checks.mask(mask, given, problem)
    if bias is not None:
        problem.bias = checks.bias(bias, given, problem)
    if softcap is not None:
        problem.softcap = checks.softcap(softcap)
    if sinks is not None:
        problem.sinks = checks.sinks(sinks, problem)
    if dropout:
        problem.dropout = checks.dropout(dropout)
    return problem


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(dtype)


def _without_head(reading: Reading, value: Any, axis: int) -> Any:
    """Take the head axis out of a value, or out of each tensor of a named tuple."""
    if isinstance(value, Tensor):
        value = value.squeeze(axis)
        return value.squeeze(axis) if isinstance(reading, Overlap) else value
    return type(value)(*(_without_head(reading, part, axis) for part in value))
