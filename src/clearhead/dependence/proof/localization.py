"""Localize a leak: the deepest module that moved an output which its inputs had not moved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.dependence.subject import (
    ModelInputs,
    Perturbation,
    Runner,
    modules_in,
    name_of,
    rows_of,
    tensors_in,
)

__all__ = ["ModuleCall", "first_difference", "first_moved", "trace_modules"]


@dataclass
class ModuleCall:
    """One call of a module: the rows of one query in its inputs and in its output."""

    name: str
    number: int  # which call of that module
    inputs: list[Tensor]
    output: list[Tensor] = field(default_factory=list)


def first_moved(runner: Runner, perturbation: Perturbation, sample: int, query: int) -> str:
    """Name the first module, in execution order, through which a perturbation reached the query."""
    if not list(modules_in(runner.model)):
        return name_of(runner.model)
    before = trace_modules(runner, runner.inputs, sample, query)
    after = trace_modules(runner, runner.perturbed(perturbation), sample, query)
    return first_difference(before, after) or f"{name_of(runner.model)} (its own forward)"


def first_difference(before: list[ModuleCall], after: list[ModuleCall]) -> str:
    """Name the first module whose output differs though its inputs are the same, or nothing."""
    again = {(one.name, one.number): one for one in after}
    pairs = [
        (old, again[old.name, old.number]) for old in before if (old.name, old.number) in again
    ]
    for tolerance in (1e-12, 0.0) if _is_float64(before) else (1e-6, 0.0):
        for old, new in pairs:
            moved_here = _moved(old.output, new.output, tolerance)
            if moved_here and not _moved(old.inputs, new.inputs, tolerance):
                return old.name
    return ""


def trace_modules(runner: Runner, inputs: ModelInputs, sample: int, query: int) -> list[ModuleCall]:
    """Run once and list the module calls in the order in which they end: the deepest first."""
    tracer = _Tracer(inputs, sample, query)
    with ExitStack() as stack:
        seen: set[int] = set()
        for prefix, root in modules_in(runner.model):
            for name, module in root.named_modules(prefix=prefix):
                if id(module) not in seen:
                    seen.add(id(module))
                    before = module.register_forward_pre_hook(tracer.enter(name), with_kwargs=True)
                    stack.callback(before.remove)
                    stack.callback(module.register_forward_hook(tracer.leave).remove)
        runner.outputs(inputs)
    return tracer.done


class _Tracer:
    """The hooks of `trace_modules`, and the calls that have ended and that are still running."""

    def __init__(self, inputs: ModelInputs, sample: int, query: int):
        self.inputs, self.sample, self.query = inputs, sample, query
        self.done: list[ModuleCall] = []
        self.running: list[ModuleCall] = []
        self.counts: dict[str, int] = {}

    def enter(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            number = self.counts[name] = self.counts.get(name, -1) + 1
            self.running.append(ModuleCall(name, number, self.rows([list(args), kwargs])))

        return hook

    def leave(self, _module: nn.Module, _args: Any, value: Any) -> None:
        ended = self.running.pop()
        ended.output = self.rows(value)
        self.done.append(ended)

    def rows(self, value: Any) -> list[Tensor]:
        found = [rows_of(tensor, self.inputs) for _, tensor in tensors_in(value)]
        return [
            # A sample axis of size one stands for every sample.
            r[min(self.sample, len(r) - 1), self.query].detach().clone()
            for r in found
            if r is not None and len(r)
        ]


def _moved(old: list[Tensor], new: list[Tensor], tolerance: float) -> bool:
    return any(
        before.shape == after.shape
        and not torch.equal(before, after)
        and _is_beyond(before, after, tolerance)
        for before, after in zip(old, new, strict=False)
    )


def _is_beyond(before: Tensor, after: Tensor, tolerance: float) -> bool:
    """Whether unequal rows differ by more than the tolerance, relative to the largest value."""
    if not before.is_floating_point():
        return True
    size = (after - before).abs().nan_to_num(torch.inf, torch.inf).max()
    largest = before.abs().nan_to_num(0.0, 0.0, 0.0).max()
    same = (before == after) | (before.isnan() & after.isnan())
    return not bool(same.all()) and bool(size > tolerance * largest)


def _is_float64(calls: list[ModuleCall]) -> bool:
    return any(tensor.dtype == torch.float64 for call in calls for tensor in call.output)
