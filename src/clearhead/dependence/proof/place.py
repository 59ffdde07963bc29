"""The place of a leak: the deepest module that moved an output which its inputs had not moved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.dependence.proof.runner import Change, Runner
from clearhead.dependence.proof.state import modules_in
from clearhead.dependence.proof.subject import Inputs, rows_of, tensors_in

__all__ = ["Step", "first_difference", "first_moved", "name_of", "trace"]


@dataclass
class Step:
    """One call of a module: the rows of one query in what it was given and in what it gave."""

    name: str
    turn: int  # which call of that module
    given: list[Tensor]
    gave: list[Tensor] = field(default_factory=list)


def name_of(model: object) -> str:
    """Name a model or function for a person."""
    if isinstance(model, nn.Module):
        return type(model).__name__
    return getattr(model, "__qualname__", None) or type(model).__name__


def first_moved(runner: Runner, change: Change, sample: int, query: int) -> str:
    """Name the first module, in execution order, through which the change reached the query."""
    roots = list(modules_in(runner.model))
    whole = f"{name_of(runner.model)} (its own forward)" if roots else name_of(runner.model)
    if not roots:
        return whole
    before = trace(runner, runner.inputs, sample, query)
    after = trace(runner, runner.changed(change), sample, query)
    return first_difference(before, after) or whole


def first_difference(before: list[Step], after: list[Step]) -> str:
    """Name the first step that gave something else though it was given the same, or nothing."""
    again = {(step.name, step.turn): step for step in after}
    pairs = [(step, again.get((step.name, step.turn))) for step in before]
    for slack in (1e-12, 0.0) if _double(before) else (1e-6, 0.0):
        for old, new in pairs:
            if (
                new
                and _moved(old.gave, new.gave, slack)
                and not _moved(old.given, new.given, slack)
            ):
                return old.name
    return ""


def trace(runner: Runner, inputs: Inputs, sample: int, query: int) -> list[Step]:
    """Run once and list the module calls in the order in which they end: the deepest first."""
    done: list[Step] = []
    open_steps: list[Step] = []
    turns: dict[str, int] = {}

    def rows(value: Any) -> list[Tensor]:
        found = [rows_of(tensor, inputs) for _, tensor in tensors_in(value)]
        return [
            # A sample axis of size one stands for every sample.
            r[min(sample, len(r) - 1), query].detach().clone()
            for r in found
            if r is not None and len(r)
        ]

    def enter(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            turns[name] = turns.get(name, -1) + 1
            open_steps.append(Step(name, turns[name], rows([list(args), kwargs])))

        return hook

    def leave(_module: nn.Module, _args: Any, value: Any) -> None:
        step = open_steps.pop()
        step.gave = rows(value)
        done.append(step)

    with ExitStack() as stack:
        seen: set[int] = set()
        for prefix, root in modules_in(runner.model):
            for name, module in root.named_modules(prefix=prefix):
                if id(module) not in seen:
                    seen.add(id(module))
                    before = module.register_forward_pre_hook(enter(name), with_kwargs=True)
                    stack.callback(before.remove)
                    stack.callback(module.register_forward_hook(leave).remove)
        runner.outputs(inputs)
    return done


def _moved(old: list[Tensor], new: list[Tensor], slack: float) -> bool:
    for before, after in zip(old, new, strict=False):
        if before.shape != after.shape or torch.equal(before, after):
            continue
        if not before.is_floating_point():
            return True
        size = (after - before).abs().nan_to_num(torch.inf, torch.inf).max()
        largest = before.abs().nan_to_num(0.0, 0.0, 0.0).max()
        same = (before == after) | (before.isnan() & after.isnan())
        if not bool(same.all()) and size > slack * largest:
            return True
    return False


def _double(steps: list[Step]) -> bool:
    return any(t.dtype == torch.float64 for step in steps for t in step.gave)
