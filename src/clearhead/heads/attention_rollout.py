"""Attention rollout for chosen rows, as a chain of row-weighted sums over strips."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead._capture import (
    Call,
    EagerCall,
    Handler,
    Interceptor,
    attached,
    call_strip,
    call_with,
    context_difference,
    moves_positions,
    rounding_bound,
)
from clearhead._core import value_error

__all__ = ["Rollout", "rollout"]

# Numbers in one strip of weights: 4 MiB of float32.
_STRIP = 1 << 20
# Rows of a fused call whose context is recomputed.
_SAMPLED = 4
# The bit of the first function that moves positions, behind those of all inputs and calls.
_MOVERS = 4096


class Rollout(NamedTuple):
    """The value of `rollout`, with the choices that it depends on."""

    weights: Tensor  # (batch, chosen, source)
    queries: tuple[int, ...]
    residual: float
    heads: str
    layers: int
    notes: tuple[str, ...] = ()  # layers that mix positions and are not in the product


@torch.no_grad()
def rollout(
    model: nn.Module,
    inputs: Any,
    queries: Sequence[int] | int = -1,
    *,
    residual: float = 0.5,
    heads: Literal["mean", "max"] = "mean",
) -> Rollout:
    """Follow the attention of chosen positions through all layers down to the input.

    >>> from clearhead import models
    >>> model = models.load()
    >>> rolled = rollout(model, model.vocabulary.encode("hell")[None])
    >>> rolled.weights.shape, rolled.residual, rolled.heads
    (torch.Size([1, 1, 4]), 0.5, 'mean')

    R = A_L ... A_1, where A_l = residual * I + (1 - residual) * mean_h W_l,h with its rows
    normalised to one (Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", who
    take residual 0.5). Only the chosen rows of R are made, from the last layer down: one weighted
    sum of rows a layer, no (query, source) matrix. The queries and keys of all layers are kept
    meanwhile; handwritten attention computes whole maps, and these are kept too.

    The model is one residual stream: each layer makes one call of self-attention over all
    positions, and reads what the layer before it wrote. Anything else is a ValueError: two calls a
    layer, cross attention, two stacks, heads that are modules, windows, weights that are changed
    after the softmax. What a layer reads is followed through functions of torch; TorchScript and
    numpy hide it. `notes` names layers that mix positions and were not seen, and
    functions between two layers that do: convolutions, flips, rolls, running sums.

    `inputs` is a tensor, a tuple of arguments, or keywords: a dict, or what a tokenizer returns.
    `heads="max"` takes the largest weight over the heads. Rollout mixes heads and leaves out values
    and the layers between: it says where information may have come from, not what made a
    difference.
    """
    if not 0 <= residual < 1:
        raise value_error("residual", "is a share, 0 <= residual < 1", got=residual)
    if heads not in ("mean", "max"):
        raise value_error("heads", "is 'mean' or 'max'", got=repr(heads))
    calls, notes = _calls(model, inputs)
    batch, _, position, _ = calls[-1].sizes
    chosen = _chosen(queries, position)
    rows = torch.zeros(batch, len(chosen), position, dtype=torch.float64)
    rows[:, torch.arange(len(chosen)), list(chosen)] = 1
    for call in reversed(calls):
        rows = _step(call, rows, residual, heads)
    return Rollout(rows.float(), chosen, residual, heads, len(calls), notes)


def _chosen(queries: Sequence[int] | int, position: int) -> tuple[int, ...]:
    given = (queries,) if isinstance(queries, int) else tuple(queries)
    for query in given:
        if not -position <= query < position:
            raise value_error("queries", f"lie in 0..{position - 1}", got=query)
    return tuple(query % position for query in given)


class _Keeper(Handler):
    """Keeps every call, as the last one is needed first, and what was not seen."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.missed: dict[str, str] = {}

    def after(self, call: Call, context: Tensor) -> None:
        """Keep a call whose weights times values are its context."""
        if call.ranks:
            got = f"heads {call.heads.start} to {call.heads.stop - 1} of {call.all_heads}"
            raise value_error("model", "has all heads of a layer in this process", got=got)
        _check_weights(call, context)
        self.calls.append(call)

    def unseen(self, module: str, reason: str) -> None:
        """Keep the reason why an attention is not seen."""
        self.missed[module] = reason

    def elsewhere(self, module: str, reason: str) -> None:
        """Leave out products with further values: they have the weights of the call."""


class _Ancestors(TorchFunctionMode):
    """Follows which inputs and calls each tensor is computed from, as the bits of a number."""

    def __init__(self, calls: list[Call], inputs: list[Tensor]) -> None:
        super().__init__()
        self.crossed: set[int] = set()  # calls whose arguments differ in what they come from
        self.unread: set[int] = set()  # calls whose arguments do not come from the call before
        self.moved: dict[str, str] = {}  # what moves positions between two calls, by its module
        self.running: Callable[[], str] = str  # names the module that runs
        self._calls, self._first = calls, len(inputs)
        self._known, self._movers = WeakTensorKeyDictionary(), list[tuple[str, str]]()
        for at, x in enumerate(inputs):
            self._add(x, 1 << at)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and mark what it returns and what it writes to."""
        given = {} if kwargs is None else kwargs
        each = {self._of(x) for x in _tensors((args, given))} - {0}
        before = len(self._calls)
        out = func(*args, **given)
        known = functools.reduce(int.__or__, each, 0)
        if before and known:
            known |= self._mover(func, args, given)
        for at in range(before, len(self._calls)):
            known |= self._place(at, each)
        if known:
            for x in _tensors(out):
                self._known[x] = self._known.get(x, 0) | known  # pyright: ignore[reportOptionalOperand]
            for x in _tensors((given.get("out"), _written(func, args))):
                self._add(x, known)
        return out

    def _mover(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Give a bit to a function that moves positions after a call."""
        if not moves_positions(func, args, kwargs, self._calls[-1].sizes.query):
            return 0
        self._movers.append((self.running(), func.__name__))
        return 1 << (_MOVERS + len(self._movers) - 1)

    def _place(self, at: int, each: set[int]) -> int:
        """Compare what the arguments of a call come from; give the bit of the call."""
        met = functools.reduce(int.__or__, each, 0) >> _MOVERS
        self.moved |= {m: by for bit, (m, by) in enumerate(self._movers) if met >> bit & 1}
        each = {known & (1 << _MOVERS) - 1 for known in each} - {0}
        if len(each) > 1:
            self.crossed.add(at)
        if at and not any(known >> (self._first + at - 1) & 1 for known in each):
            self.unread.add(at)
        return 1 << (self._first + at)

    def _of(self, x: Tensor) -> int:
        own = self._known.get(x, 0)
        return own if x._base is None else own | self._known.get(x._base, 0)  # pyright: ignore[reportOptionalOperand, reportReturnType]

    def _add(self, x: Tensor, known: int) -> None:
        for one in (x, x._base):
            if one is not None:
                self._known[one] = self._known.get(one, 0) | known  # pyright: ignore[reportOptionalOperand]


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(tree) if isinstance(x, Tensor))


def _written(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give the argument that a function writes to."""
    name = getattr(func, "__name__", "")
    writes = name in ("__setitem__", "__set__") or name.startswith("__i")
    return args[:1] if writes or (name.endswith("_") and not name.endswith("__")) else ()


def _calls(model: nn.Module, inputs: Any) -> tuple[list[Call], tuple[str, ...]]:
    """Give the calls of one residual stream, and notes on the layers that are not among them."""
    keeper, given = _Keeper(), _given(inputs)
    ancestors = _Ancestors(keeper.calls, given)
    with attached(model, keeper) as interceptor, ancestors:
        ancestors.running = lambda: interceptor.sites.running
        call_with(functools.partial(model, **_uncached(model)), inputs)
    if not keeper.calls:
        raise RuntimeError("rollout: no attention call of the model was seen")
    _check_sizes(keeper.calls, given)
    _check_stream(keeper.calls, ancestors)
    return keeper.calls, _notes(keeper, interceptor, ancestors.moved)


def _given(inputs: Any) -> list[Tensor]:
    return list(_tensors(dict(inputs) if hasattr(inputs, "keys") else inputs))


def _notes(keeper: _Keeper, interceptor: Interceptor, moved: dict[str, str]) -> tuple[str, ...]:
    """Name what mixes positions and is not among the calls."""
    modules, seen = interceptor.modules, {call.module for call in keeper.calls}
    missed = {module: reason for module, reason in interceptor.handwritten.mixing.items()}
    missed |= keeper.missed
    for module in sorted(interceptor.handwritten.unmet - seen):
        missed.setdefault(module, "its softmax of a product met no value in a product that is seen")
    for module in modules.overlooked(seen | set(missed)):
        missed[module] = "none of its calls was recognised as attention"
    for module, of in modules.recurrent(seen | set(missed)):
        missed[module] = f"{of} mixes positions without attention"
    for module, by in moved.items():
        missed.setdefault(module, f"{by} moves numbers between positions")
    return tuple(
        f"{module or 'the model'}: not in the product, {reason}"
        for module, reason in missed.items()
    )


def _check_weights(call: Call, context: Tensor) -> None:
    """Raise where the context is not weights times values, as after a mask on the weights."""
    total = call.sizes.query
    # The weights that a model makes itself may be changed in any row before they meet the values.
    count = total if isinstance(call, EagerCall) else min(total, _SAMPLED)
    step = max(1, _STRIP // max(1, math.prod(call.sizes) // max(1, total)))
    for start in range(0, count, step):
        rows = [at * total // count for at in range(start, min(start + step, count))]
        off = context_difference(call, context, rows)
        if off is not None and not off <= rounding_bound(context):
            raise value_error(
                "model",
                "multiplies the values by the softmax of its scores",
                got=f"weights changed after the softmax in {_name(call)}, by {off:.2g} of output",
            )


def _check_sizes(calls: list[Call], given: list[Tensor]) -> None:
    sizes = {(*call.sizes[::2], call.sizes[3]) for call in calls}
    if len(sizes) > 1 or any(query != source for _, query, source in sizes):
        raise value_error(
            "model",
            "needs self-attention over the same positions in every layer",
            got=f"(batch, query, source) of {', '.join(map(str, sorted(sizes)))}",
        )
    if not all(min(size) for size in sizes):
        raise value_error("inputs", "have a sample and a position", got="none of them")
    batch, position, _ = next(iter(sizes))
    if given and not any(_fits(x, batch, position) for x in given):
        raise value_error(
            "model",
            "attends over all positions of a sample in each call, not in windows or folded heads",
            got=f"a batch of {batch} in {_name(calls[0])}",
            shapes={"inputs": tuple(given[0].shape)},
        )


def _fits(x: Tensor, batch: int, position: int) -> bool:
    """Whether calls with this batch and so many positions may be on all of a tensor."""
    if batch == 1 or x.shape[:1] == (batch,):
        return True
    if x.is_floating_point():
        return x.shape[:2] == (position, batch)  # batch_first=False
    return x.shape == (position, batch) or (x.ndim > 2 and math.prod(x.shape[:-1]) == batch)


def _check_stream(calls: list[Call], ancestors: _Ancestors) -> None:
    """Raise unless each call reads what the one before it wrote."""
    rule = "is one residual stream, whose layers make one call of self-attention each"
    for at, call in enumerate(calls):
        if at in ancestors.unread:
            got = f"{_name(call)} does not read the output of {_name(calls[at - 1])}"
            if call.module == calls[at - 1].module:
                got = f"two calls in {_name(call)} that do not follow each other"
            raise value_error("model", rule, got=got)
        if at in ancestors.crossed and call.kind == "cross":
            raise value_error("model", rule, got=f"cross attention in {_name(call)}")


def _name(call: Call) -> str:
    return call.module or "the model"


def _uncached(model: nn.Module) -> dict[str, Any]:
    """Ask for no cache, which would write over keys that are still needed."""
    names = inspect.signature(getattr(model, "forward", model)).parameters
    return {"use_cache": False} if "use_cache" in names else {}


def _step(call: Call, rows: Tensor, residual: float, heads: str) -> Tensor:
    """Multiply (batch, chosen, query) by one layer's matrix, strip by strip of its queries."""
    batch, count, position, source = call.sizes
    step = max(1, _STRIP // max(1, batch * count * source))
    below = torch.zeros(batch, rows.shape[1], source, dtype=rows.dtype)
    mix: Callable[..., Tensor] = torch.mean if heads == "mean" else torch.amax
    for start in range(0, position, step):
        at = torch.arange(start, min(start + step, position))
        weights = call_strip(call, at.tolist()).weights
        mixed = mix(weights, dim=1).to(rows) * (1 - residual)
        mixed[:, torch.arange(len(at)), at] += residual
        total = mixed.sum(-1, keepdim=True)
        below += rows[..., at] @ (mixed / total.where(total > 0, 1))
    return below
