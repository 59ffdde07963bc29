"""Prove a large model part by part, in the time of a few forwards instead of one per position.

A black box needs as many runs as there are positions (see `plan`). A model whose only way between
positions is `F.scaled_dot_product_attention` (or `attend`) needs far fewer, because its parts can
be tested apart:

1. Two ordinary runs, of the inputs and of other content, keep what enters and leaves every
   `F.linear`, `torch.addmm` and `F.scaled_dot_product_attention`.
2. The edges of each attention call are found by giving it one-hot values: what comes out is its
   weights, once with its own queries, once with zero queries, where no weight can underflow.
3. Everything else must work position by position. For each bit of the position's number, one run
   takes the other content where that bit is set; the kept results stand in for the linear layers
   (rows apart by definition) and the attention (its edges are known), so such a run costs
   next to nothing. Two positions differ in some bit, so the runs together cover every pair, and
   each row must come out bit for bit as in the run that its content is from.
4. Following the edges from call to call gives all that can reach an output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clearhead._capture import from_sdpa
from clearhead.attention import attend
from clearhead.dependence.proof.runner import Change, Runner
from clearhead.dependence.proof.subject import Inputs, Output
from clearhead.masks import Mask

__all__ = ["CannotPart", "reach"]

ROWS_APART = (F.linear, torch.addmm)
ATTENTION = (F.scaled_dot_product_attention, attend)


class CannotPart(Exception):
    """The model has another way between positions, or other calls for other content."""


@dataclass
class Call:
    """One kept call: what it was given, position by position, and what it gave."""

    function: Callable[..., Any]
    given: tuple[Tensor, ...]
    fixed: tuple[Any, ...]
    gave: Tensor
    edges: Tensor | None = None


def reach(runner: Runner) -> Tensor:
    """Give what can reach what through the model, bool (batch, query, source), or CannotPart."""
    inputs = runner.inputs
    everything = torch.ones(inputs.batch, inputs.positions, dtype=torch.bool)
    plain = _Keep(inputs)
    before = _run(runner, plain, inputs)
    reached = torch.eye(inputs.positions, dtype=torch.bool).expand(inputs.batch, -1, -1)
    edges = [call.edges for call in plain.calls]
    for number in range(len(runner.contents)):
        other = _Keep(inputs)
        after = _run(runner, other, runner.changed(Change(everything, number)))
        for bit in range((inputs.positions - 1).bit_length()):
            set_there = (torch.arange(inputs.positions) >> bit) & 1 == 1
            sources = set_there.expand_as(everything)
            mixed = _Mix(inputs, plain.calls, other.calls, sources)
            results = _run(runner, mixed, runner.changed(Change(sources, number)), cost=0.05)
            mixed.finish()
            for old, new, result in zip(before, after, results, strict=True):
                _expect(result.rows, torch.where(sources[..., None], new.rows, old.rows))
        edges = [
            None if old is None or call.edges is None else old | call.edges
            for old, call in zip(edges, other.calls, strict=True)
        ]
    for step in edges:
        if step is not None:
            reached = reached | ((step.float() @ reached.float()) > 0)
    return reached


def _run(runner: Runner, mode: TorchFunctionMode, inputs: Inputs, cost: float = 1) -> list[Output]:
    with mode:
        outputs = runner.outputs(inputs)
    runner.forwards += cost - 1
    return outputs


class _Keep(TorchFunctionMode):
    def __init__(self, inputs: Inputs):
        super().__init__()
        self.inputs, self.calls = inputs, list[Call]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        gave = func(*args, **kwargs)
        if (sorted_out := _sort(func, args, kwargs, self.inputs)) is not None:
            given, fixed = sorted_out
            edges = None
            if func in ATTENTION:
                edges = _edges(func, *args, **kwargs)
            kept = tuple(tensor.detach().clone() for tensor in given)
            self.calls.append(Call(func, kept, fixed, gave.detach().clone(), edges))
        return gave


class _Mix(TorchFunctionMode):
    """Stand in for the kept calls: rows at `sources` of the other run, else of the plain one."""

    def __init__(self, inputs: Inputs, plain: list[Call], other: list[Call], sources: Tensor):
        super().__init__()
        if len(plain) != len(other):
            raise CannotPart("it makes other calls for other content")
        self.inputs, self.sources = inputs, sources
        self.calls = list(zip(plain, other, strict=True))
        self.next = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sorted_out = _sort(func, args, kwargs, self.inputs)
        if sorted_out is None:
            return func(*args, **kwargs)
        if self.next == len(self.calls):
            raise CannotPart("it makes other calls for other content")
        given, fixed = sorted_out
        plain, other = self.calls[self.next]
        self.next += 1
        if not (plain.function is other.function is func):
            raise CannotPart("it makes other calls for other content")
        _expect_equal(plain.fixed, other.fixed)
        _expect_equal(plain.fixed, fixed)
        for tensor, old, new in zip(given, plain.given, other.given, strict=True):
            _expect(tensor, self._mixed(old, new))
        return self._mixed(plain.gave, other.gave)

    def _mixed(self, old: Tensor, new: Tensor) -> Tensor:
        if old.shape != new.shape:
            raise CannotPart("it makes other calls for other content")
        where = _where(old, self.inputs, self.sources)
        assert where is not None
        return torch.where(where.to(old.device), new, old)

    def finish(self) -> None:
        """Make sure that no kept call was left out."""
        if self.next != len(self.calls):
            raise CannotPart("it makes other calls for other content")


def _sort(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Inputs
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]] | None:
    """Sort a call's arguments into those with positions and those that must stay as they are."""
    if func in ATTENTION:
        # torch's builtin has no signature of its own; what describes its calls has the same.
        names = inspect.signature(attend if func is attend else from_sdpa).parameters
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        positions = tuple(given.pop(name) for name in ("query", "key", "value"))
        if any(_where(tensor, inputs, None) is None for tensor in positions):
            raise CannotPart("an attention call has other positions than the inputs")
        if given.get("dropout_p") or given.get("dropout") or given.get("read") is not None:
            raise CannotPart("an attention call drops weights or reads them")
        return positions, tuple(_plain(given[name], inputs) for name in sorted(given))
    if func not in ROWS_APART:
        return None
    place = 0 if func is F.linear else 1
    if len(args) <= place or not isinstance(args[place], Tensor):
        return None
    if _where(args[place], inputs, None) is None:
        return None
    # The weights are the module's own; their identity says enough.
    others = tuple(id(a) for n, a in enumerate(args) if n != place and isinstance(a, Tensor))
    return (args[place],), others


def _plain(value: Any, inputs: Inputs) -> Any:
    size = inputs.positions
    return value.dense(size, size, batch=inputs.batch) if isinstance(value, Mask) else value


def _where(tensor: Tensor, inputs: Inputs, sources: Tensor | None) -> Tensor | None:
    """Lay (batch, position) out along a tensor; None where it has no such axes."""
    size, shape = (inputs.batch, inputs.positions), tensor.shape
    sources = torch.zeros(size, dtype=torch.bool) if sources is None else sources
    if inputs.leaves[0].axis != 1 or inputs.leaves[0].batch_axis != 0:
        return None
    if tensor.ndim == 4 and (shape[0], shape[2]) == size:
        return sources[:, None, :, None]
    if tensor.ndim == 3 and tuple(shape[:2]) == size:
        return sources[:, :, None]
    if tensor.ndim == 2 and shape[0] == inputs.batch * inputs.positions:
        return sources.reshape(-1, 1)
    return None


def _edges(
    func: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """Find which sources each query weighs at all: (batch, query, source), over all heads."""
    size, step = key.shape[-2], max(value.shape[-1], 64)
    found = []
    for start in range(0, size, step):
        marks = torch.eye(size, dtype=value.dtype, device=value.device)[:, start : start + step]
        marks = marks.expand(*value.shape[:-1], marks.shape[-1])
        edges = torch.zeros((), dtype=torch.bool, device=value.device)
        for asked in (query, torch.zeros_like(query)):
            weights = func(asked, key, marks, *rest, **options)
            edges = edges | ((weights != 0).any(1) if weights.ndim > 3 else weights != 0)
        found.append(edges)
    return torch.cat(found, -1).cpu()


def _expect(got: Tensor, wanted: Tensor) -> None:
    same = got.shape == wanted.shape and (
        torch.equal(got, wanted)
        or bool(((got == wanted) | ((got != got) & (wanted != wanted))).all())
    )
    if not same:
        raise CannotPart("positions meet outside of scaled_dot_product_attention")


def _expect_equal(one: tuple[Any, ...], two: tuple[Any, ...]) -> None:
    for left, right in zip(one, two, strict=True):
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        if not (
            torch.equal(left, right)
            if both
            else left == right
            if type(left) is type(right)
            else False
        ):
            raise CannotPart("an attention mask depends on the content")
