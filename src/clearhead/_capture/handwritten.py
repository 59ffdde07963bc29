"""Attention written as matmul, softmax, matmul: recognised from the calls themselves."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from clearhead._capture.call import Call
from clearhead._capture.provenance import Origin, Softmax, tensors

if TYPE_CHECKING:
    from clearhead._capture.intercept import Interceptor

__all__ = ["division", "exponential", "product", "softmax"]


@dataclass(frozen=True)
class Layout:
    """How the axes of weights, values and context of one product lie."""

    weights: tuple[int, ...]  # the permutation to (lead..., query, source)
    context: tuple[int, ...]  # the permutation to (lead..., query, value_dim)
    value: Tensor  # already (lead or 1..., source, value_dim)


def softmax(
    seer: Interceptor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Origin
) -> Tensor:
    """Run a softmax of scores, and remember it until its weights meet a value."""
    scores = args[0] if args else kwargs["input"]
    dim = kwargs["dim"] if "dim" in kwargs else (args[1] if len(args) > 1 else None)
    dim = -1 if dim is None else dim
    scores = _altered(seer, origin, scores) if dim in (-1, scores.ndim - 1) else scores
    args, kwargs = (scores, *args[1:]), {k: v for k, v in kwargs.items() if k != "input"}
    weights = func(*args, **kwargs)
    _remember(seer, origin, scores, weights, dim % scores.ndim)
    return weights


def exponential(
    seer: Interceptor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Origin
) -> Tensor:
    """Run the exponential of scores; with a division by the sum it makes a softmax."""
    scores = _altered(seer, origin, args[0])
    kept = scores.clone() if func is torch.Tensor.exp_ else scores
    out = func(scores, *args[1:], **kwargs)
    seer.trace.mark(out, replace(origin, exp=kept))
    return out


def division(seer: Interceptor, origin: Origin, total: Tensor, weights: Tensor) -> None:
    """Take the quotient of an exponential and its sum over the last axis for a softmax."""
    scores = origin.exp
    assert scores is not None
    if total.shape != (*scores.shape[:-1], 1) or weights.shape != scores.shape:
        return
    with torch._C.DisableTorchFunction():
        # a factor of 0 after the exponential is a mask as well
        scores = scores.masked_fill(weights == 0, -math.inf)
    _remember(seer, origin, scores, weights, scores.ndim - 1)


def _altered(seer: Interceptor, origin: Origin, scores: Tensor) -> Tensor:
    """Let the handler answer other scores."""
    lead = _lead(scores.shape[:-2], _heads(seer, origin, scores), False)
    seen = seer.place(Call(None, None, None, how="by hand"), origin.product, count=False)
    with torch._C.DisableTorchFunction():
        four = scores.reshape(*lead, *scores.shape[-2:])
        changed = seer.handler.scores(seen.but(scores=four))
    return scores if changed is None else changed.reshape(scores.shape)


def _remember(seer: Interceptor, origin: Origin, scores: Tensor, weights: Tensor, dim: int) -> None:
    assert origin.product is not None
    found = Softmax(scores, weights, dim, origin.product, _heads(seer, origin, scores))
    found.module, found.scale = seer.running, origin.scale
    seer.pending[id(found)] = found.module
    seer.trace.mark(weights, Origin(origin.root, softmax=found))


def _heads(seer: Interceptor, origin: Origin, scores: Tensor) -> int | None:
    """How many heads were folded into the batch of three-dimensional scores."""
    return origin.heads or seer.folded if scores.ndim == 3 else None


def product(seer: Interceptor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a matrix product; the second one of an attention is told to the handler."""
    out = func(*args, **kwargs)
    operands = [x for x in tensors((args, kwargs))][-2:]
    if len(operands) < 2 or not seer.listening or not out.is_floating_point():
        seer.trace.follow(func, args, kwargs, out)
        return out
    for at, weights in enumerate(operands):
        origin = seer.trace.origin(weights)
        if origin is not None and origin.softmax is not None and not origin.softmax.taken:
            return _attention(seer, func, args, origin, weights, operands[1 - at], at, out)
        if origin is not None and origin.softmax is not None:
            seer.handler.unseen(origin.softmax.module, "its weights meet values in several pieces")
    if any(_fixed(x) for x in operands):
        seer.trace.follow(func, args, kwargs, out)
        return out
    origins = [seer.trace.origin(x) for x in operands]
    roots = [
        origin.root if origin else seer.trace.root(x)
        for origin, x in zip(origins, operands, strict=True)
    ]
    known = [origin for origin in origins if origin]
    heads = next((origin.heads for origin in known if origin.heads), None)
    scale = math.prod(origin.scale for origin in known)
    alpha = kwargs.get("alpha", 1.0)
    pair = (roots[0], roots[1])
    seer.trace.mark(out, Origin(roots[0], product=pair, heads=heads, scale=scale * alpha))
    return out


def _fixed(x: Tensor) -> bool:
    """Whether an operand is a parameter: then the product is a projection."""
    return isinstance(x, Parameter) or (isinstance(x._base, Parameter) and x.ndim <= 2)


def _attention(
    seer: Interceptor,
    func: Any,
    args: tuple[Any, ...],
    origin: Origin,
    weights: Tensor,
    value: Tensor,
    at: int,
    out: Tensor,
) -> Tensor:
    found = origin.softmax
    assert found is not None
    layout = _layout(func, args, origin, weights, value, at, out)
    if not isinstance(layout, str) and not _broadcasts(layout, weights):
        layout = "its weights meet a value of other axes"
    if isinstance(layout, str):
        seer.handler.unseen(found.module, layout)
        seer.pending.pop(id(found), None)
        return out
    found.taken = True
    seer.pending.pop(id(found), None)
    folded = [x.permute(layout.weights) for x in _unfolded(found, weights)]
    sources = layout.value.shape[-2]
    lead = folded[0].shape[:-2]
    heads = found.heads or (found.scores.shape[-3] if weights.ndim < found.scores.ndim else None)
    four = _lead(lead, heads, _groups(layout.value, lead))
    scores, made = (x.reshape(*four, *x.shape[-2:]) for x in folded)
    with torch.no_grad():
        lse = torch.logsumexp(scores.float() if scores.dtype != torch.float64 else scores, -1)
    spread = layout.value.expand(*lead, *layout.value.shape[-2:])
    call = Call(
        None,
        seer.frames[-1].key if seer.frames else None,
        spread.reshape(*four, *spread.shape[-2:]),
        scores=scores[..., :sources],
        weights=made[..., :sources],
        lse=lse,
        rest=scores[..., sources:] if sources < scores.shape[-1] else None,
        dropped=_met(weights, layout, four, sources) if origin.dropped else None,
        scale=found.scale,
        dropout=float(origin.dropped),
        how="eager" if seer.frames else "by hand",
    )
    call = seer.place(call, found.roots)
    there = out.permute(layout.context)
    context = there.reshape(*four, *there.shape[-2:])
    with torch._C.DisableTorchFunction():
        changed = seer.handler.after(call, context)
    if changed is not None:
        back = [layout.context.index(axis) for axis in range(out.ndim)]
        out = changed.reshape(there.shape).permute(back)
    found.scores = found.weights = out.new_empty(0)
    seer.saw()
    seer.trace.mark(out, Origin(origin.root))
    return out


def _broadcasts(layout: Layout, weights: Tensor) -> bool:
    """Whether the value has the axes before (source, value_dim) that the weights have."""
    lead = [weights.shape[axis] for axis in layout.weights[:-2]]
    given = layout.value.shape[:-2]
    pairs = zip(reversed(given), reversed(lead), strict=False)
    return len(given) <= len(lead) and all(size in (1, other) for size, other in pairs)


def _kept(weights: Tensor, found: Softmax, swapped: bool) -> bool:
    """Whether weights have the shape that they had, but for sources cut off: sinks by hand."""
    now, then = list(weights.shape), list(found.weights.shape)
    if swapped:
        now[-2:] = now[:-3:-1]
    if len(now) != len(then) or now[found.dim] > then[found.dim]:
        return False
    return now[: found.dim] + now[found.dim + 1 :] == then[: found.dim] + then[found.dim + 1 :]


def _met(weights: Tensor, layout: Layout, four: tuple[int, int], sources: int) -> Tensor:
    """Give the weights as they met the value, with a batch and a head axis."""
    met = weights.permute(layout.weights)
    return met.reshape(*four, *met.shape[-2:])[..., :sources]


def _folds(weights: Tensor, scores: Tensor) -> bool:
    """Whether heads were folded into the batch between softmax and value."""
    return weights.ndim == 3 and scores.ndim == 4 and weights.shape[-2] == scores.shape[-2]


def _unfolded(found: Softmax, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Give scores and weights the axes that the weights had when they met the value."""
    if weights.ndim == found.scores.ndim:
        return found.scores, found.weights
    return found.scores.flatten(0, 1), found.weights.flatten(0, 1)


def _lead(lead: torch.Size, heads: int | None, groups: bool) -> tuple[int, int]:
    """Turn the axes before (query, source) into exactly a batch and a head axis."""
    sizes = list(lead)
    if len(sizes) == 1:
        heads = heads if heads and sizes[0] % heads == 0 else 1
        return sizes[0] // heads, heads
    if not sizes:
        return 1, 1
    if groups:
        return math.prod(sizes[:-2]), sizes[-2] * sizes[-1]
    return math.prod(sizes[:-1]), sizes[-1]


def _groups(value: Tensor, lead: torch.Size) -> bool:
    """Whether the last of three lead axes is a group of heads that share one value."""
    if len(lead) < 3 or lead[-1] == 1 or value.ndim < 3:
        return False
    return value.shape[-3] == 1 or value.stride(-3) == 0


def _layout(
    func: Any,
    args: tuple[Any, ...],
    origin: Origin,
    weights: Tensor,
    value: Tensor,
    at: int,
    out: Tensor,
) -> Layout | str:
    """Find the axes, or say why the product is no attention that can be seen."""
    found = origin.softmax
    assert found is not None
    if not _folds(weights, found.scores) and not _kept(weights, found, origin.swapped):
        return "its weights were reshaped between softmax and value"
    if func is torch.einsum:
        return _einsum(args, found, weights, value, at, out)
    if weights.ndim < 2 or value.ndim < 2:
        return "its weights meet a vector"
    same = tuple(range(weights.ndim))
    last = found.dim == found.scores.ndim - 1
    if not last:
        return f"its softmax runs over axis {found.dim}, which is not that of the sources"
    if at == 0 and not origin.swapped:
        return Layout(same, tuple(range(out.ndim)), value)
    if at == 1 and origin.swapped:
        turned = (*range(out.ndim - 2), out.ndim - 1, out.ndim - 2)
        return Layout(same, turned, value.mT)
    return "its weights are multiplied from the other side than the softmax normalised"


def _einsum(
    args: tuple[Any, ...], found: Softmax, weights: Tensor, value: Tensor, at: int, out: Tensor
) -> Layout | str:
    equation = args[0]
    if not isinstance(equation, str) or len(list(tensors(args[1:]))) != 2:
        return "its einsum has other than two operands"
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    subs = inputs.split(",")
    ours, theirs = _spell(subs[at], weights.ndim), _spell(subs[1 - at], value.ndim)
    result = _spell(output, out.ndim) if arrow else ""
    source = [x for x in ours if x in theirs and x not in result]
    query = [x for x in ours if x in result and x not in theirs]
    width = [x for x in theirs if x in result and x not in ours]
    if not (len(source) == len(query) == len(width) == 1):
        return f"its einsum {equation!r} is no mixture of values by weights"
    if weights.ndim != found.scores.ndim or found.dim != ours.index(source[0]):
        return "its softmax does not run over the axis that is summed"
    lead = [x for x in ours if x not in (source[0], query[0])]
    order = [x for x in (*lead, source[0], width[0]) if x in theirs]
    placed = value.permute([theirs.index(x) for x in order])
    for axis, x in enumerate(lead):
        if x not in theirs:
            placed = placed.unsqueeze(axis)
    return Layout(
        tuple(ours.index(x) for x in (*lead, query[0], source[0])),
        tuple(result.index(x) for x in (*lead, query[0], width[0])),
        placed,
    )


def _spell(subscripts: str, ndim: int) -> str:
    """Write letters for an ellipsis, the same ones counted from the right."""
    if "..." not in subscripts:
        return subscripts
    missing = ndim - len(subscripts.replace("...", ""))
    letters = [x for x in reversed(string.ascii_letters)][:missing]
    return subscripts.replace("...", "".join(reversed(letters)))
