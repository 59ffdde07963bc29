"""Prove a large model part by part, in the time of a few forwards instead of one per position.

A black box needs as many runs as there are positions (see `plan`). A model whose only path between
positions is `F.scaled_dot_product_attention` (or `attend`) needs far fewer, because its parts can
be tested separately:

1. Two ordinary runs, of the inputs and of replaced content, record what enters and leaves every
   `F.linear`, `torch.addmm` and `F.scaled_dot_product_attention`.
2. One-hot values show the edges of each attention call: the output is then the weights, once with
   the call's own queries, once with zero queries, where no weight can underflow.
3. Everything else must work position by position. For each bit of the position's number, one run
   replaces the content where that bit is set; the recorded results replace the linear layers
   (independent by row, by definition) and the attention (its edges are known), so such a run costs
   next to nothing. Two positions differ in some bit, so the runs together cover every pair, and
   each row must equal, bit for bit, the row of the run that its content is from.
4. The edges, composed from call to call, give everything that can reach an output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clearhead._capture import from_sdpa
from clearhead.attention import attend
from clearhead.dependence.subject import ModelInputs, OutputRows, Perturbation, Runner
from clearhead.masks import Mask

__all__ = ["NotSeparable", "reachable"]

ROW_WISE = (F.linear, torch.addmm)
ATTENTION = (F.scaled_dot_product_attention, attend)
OTHER_CALLS = "it makes other calls for other content"
# What a replayed run costs beside an ordinary one.
_REPLAY_COST = 0.05


class NotSeparable(Exception):
    """The model has another path between positions, or other calls for other content."""


@dataclass
class RecordedCall:
    """One recorded call: its inputs with positions, its other arguments, and its output."""

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    fixed: tuple[Any, ...]
    output: Tensor
    edges: Tensor | None = None


def reachable(runner: Runner) -> Tensor:
    """Find what can reach what through the model, bool (batch, query, source)."""
    inputs = runner.inputs
    everything = torch.ones(inputs.batch, inputs.positions, dtype=torch.bool)
    plain = _RecordMode(inputs)
    before = _run(runner, plain, inputs)
    edges = [call.edges for call in plain.calls]
    for number in range(len(runner.replacements)):
        other = _RecordMode(inputs)
        after = _run(runner, other, runner.perturbed(Perturbation(everything, number)))
        for bit in range((inputs.positions - 1).bit_length()):
            set_there = (torch.arange(inputs.positions) >> bit) & 1 == 1
            sources = set_there.expand_as(everything)
            replay = _ReplayMode(inputs, plain.calls, other.calls, sources)
            mixed = runner.perturbed(Perturbation(sources, number))
            results = _run(runner, replay, mixed, cost=_REPLAY_COST)
            replay.check_finished()
            for old, new, result in zip(before, after, results, strict=True):
                _expect_rows(result.rows, torch.where(sources[..., None], new.rows, old.rows))
        edges = _united(edges, other.calls)
    return _composed(edges, inputs)


def _united(edges: Sequence[Tensor | None], calls: list[RecordedCall]) -> list[Tensor | None]:
    return [
        None if old is None or call.edges is None else old | call.edges
        for old, call in zip(edges, calls, strict=True)
    ]


def _composed(edges: Sequence[Tensor | None], inputs: ModelInputs) -> Tensor:
    reached = torch.eye(inputs.positions, dtype=torch.bool).expand(inputs.batch, -1, -1)
    for call_edges in edges:
        if call_edges is not None:
            reached = reached | ((call_edges.float() @ reached.float()) > 0)
    return reached


def _run(
    runner: Runner, mode: TorchFunctionMode, inputs: ModelInputs, cost: float = 1
) -> list[OutputRows]:
    with mode:
        outputs = runner.outputs(inputs)
    runner.forwards += cost - 1
    return outputs


class _RecordMode(TorchFunctionMode):
    """Records the calls with positions, and the edges of the attention calls."""

    def __init__(self, inputs: ModelInputs):
        super().__init__()
        self.inputs, self.calls = inputs, list[RecordedCall]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        sorted_arguments = _sort_arguments(func, args, kwargs, self.inputs)
        if sorted_arguments is not None:
            inputs, fixed = sorted_arguments
            edges = _edges(func, *args, **kwargs) if func in ATTENTION else None
            kept = tuple(tensor.detach().clone() for tensor in inputs)
            self.calls.append(RecordedCall(func, kept, fixed, output.detach().clone(), edges))
        return output


class _ReplayMode(TorchFunctionMode):
    """Replaces the recorded calls: rows at `sources` from the other run, others from the plain."""

    def __init__(
        self,
        inputs: ModelInputs,
        plain: list[RecordedCall],
        other: list[RecordedCall],
        sources: Tensor,
    ):
        super().__init__()
        if len(plain) != len(other):
            raise NotSeparable(OTHER_CALLS)
        self.inputs, self.sources = inputs, sources
        self.calls = list(zip(plain, other, strict=True))
        self.next = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sorted_arguments = _sort_arguments(func, args, kwargs, self.inputs)
        if sorted_arguments is None:
            return func(*args, **kwargs)
        plain, other = self._next_calls(func)
        inputs, fixed = sorted_arguments
        _expect_arguments(plain.fixed, other.fixed)
        _expect_arguments(plain.fixed, fixed)
        for tensor, old, new in zip(inputs, plain.inputs, other.inputs, strict=True):
            _expect_rows(tensor, self._mixed(old, new))
        return self._mixed(plain.output, other.output)

    def _next_calls(self, func: Any) -> tuple[RecordedCall, RecordedCall]:
        if self.next == len(self.calls):
            raise NotSeparable(OTHER_CALLS)
        plain, other = self.calls[self.next]
        self.next += 1
        if not (plain.function is other.function is func):
            raise NotSeparable(OTHER_CALLS)
        return plain, other

    def _mixed(self, old: Tensor, new: Tensor) -> Tensor:
        where = _aligned(old, self.inputs, self.sources)
        if old.shape != new.shape or where is None:
            raise NotSeparable(OTHER_CALLS)
        return torch.where(where.to(old.device), new, old)

    def check_finished(self) -> None:
        """Check that every recorded call was replayed."""
        if self.next != len(self.calls):
            raise NotSeparable(OTHER_CALLS)


def _sort_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: ModelInputs
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]] | None:
    """Sort a call's arguments into those with positions and those that must stay as they are."""
    if func in ATTENTION:
        return _attention_arguments(func, args, kwargs, inputs)
    if func not in ROW_WISE:
        return None
    place = 0 if func is F.linear else 1
    if len(args) <= place or not _has_rows(args[place], inputs):
        return None
    # The weights are the module's own; their identity is enough.
    others = tuple(id(a) for n, a in enumerate(args) if n != place and isinstance(a, Tensor))
    return (args[place],), others


def _attention_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: ModelInputs
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    # torch's builtin has no signature of its own; that of `from_sdpa` has the same parameters.
    names = inspect.signature(attend if func is attend else from_sdpa).parameters
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    positions = tuple(given.pop(name) for name in ("query", "key", "value"))
    if not all(_has_rows(tensor, inputs) for tensor in positions):
        raise NotSeparable("an attention call has other positions than the inputs")
    if given.get("dropout_p") or given.get("dropout") or given.get("read") is not None:
        raise NotSeparable("an attention call drops weights or reads them")
    return positions, tuple(_plain(given[name], inputs) for name in sorted(given))


def _plain(value: Any, inputs: ModelInputs) -> Any:
    size = inputs.positions
    return value.dense(size, size, batch=inputs.batch) if isinstance(value, Mask) else value


def _has_rows(value: Any, inputs: ModelInputs) -> bool:
    nothing = torch.zeros(inputs.batch, inputs.positions, dtype=torch.bool)
    return isinstance(value, Tensor) and _aligned(value, inputs, nothing) is not None


def _aligned(tensor: Tensor, inputs: ModelInputs, sources: Tensor) -> Tensor | None:
    """Reshape (batch, position) to the axes of a tensor; None where it has no such axes."""
    size, shape = (inputs.batch, inputs.positions), tensor.shape
    if inputs.main.axis != 1 or inputs.main.batch_axis != 0:
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
    """Find which sources have weight for each query: (batch, query, source), over all heads."""
    size, width = key.shape[-2], max(value.shape[-1], 64)
    found = []
    for start in range(0, size, width):
        one_hot = torch.eye(size, dtype=value.dtype, device=value.device)
        one_hot = one_hot[:, start : start + width]
        one_hot = one_hot.expand(*value.shape[:-1], one_hot.shape[-1])
        edges = torch.zeros((), dtype=torch.bool, device=value.device)
        for queries in (query, torch.zeros_like(query)):
            weights = func(queries, key, one_hot, *rest, **options)
            edges = edges | ((weights != 0).any(1) if weights.ndim > 3 else weights != 0)
        found.append(edges)
    return torch.cat(found, -1).cpu()


def _expect_rows(got: Tensor, wanted: Tensor) -> None:
    same = got.shape == wanted.shape and (
        torch.equal(got, wanted)
        or bool(((got == wanted) | ((got != got) & (wanted != wanted))).all())
    )
    if not same:
        raise NotSeparable("positions interact outside of scaled_dot_product_attention")


def _expect_arguments(one: tuple[Any, ...], two: tuple[Any, ...]) -> None:
    if not all(_equal(left, right) for left, right in zip(one, two, strict=True)):
        raise NotSeparable("an attention mask depends on the content")


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and left == right
