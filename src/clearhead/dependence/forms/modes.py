"""Does the model answer alike in train and eval, on every backend, asked for weights or not?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from clearhead._core import type_error
from clearhead.dependence.proof.pairing import Row, compare, difference, exact
from clearhead.dependence.proof.place import Step, name_of, trace
from clearhead.dependence.proof.report import Report
from clearhead.dependence.proof.runner import Runner
from clearhead.dependence.proof.state import untouched
from clearhead.dependence.proof.subject import Inputs, read_inputs

__all__ = ["audit_modes"]

_RATES = ("p", "dropout", "dropout_p", "attention_dropout", "attn_dropout", "hidden_dropout")
_HINTS = {
    "train": "training (with dropout off) gives another output: batch statistics, or a mask that "
    "only one of the two ways applies?",
    "gradients": "with gradients on, torch takes its slow path: the fast one answers otherwise",
    "weights asked": "asking for the weights changes the output",
}


def audit_modes(
    model: Any, inputs: Any, *, axis: int | None = None, float64: bool = True
) -> Report:
    """Run a copy of the model in each mode that it has, and compare with the mode it is in.

    Modes: train against eval (dropout off), gradients on (torch's slow path), the weights asked
    for, and, for Hugging Face models, every attention implementation of "eager" and "sdpa".
    """
    if not isinstance(model, nn.Module):
        raise type_error("model", "must be a module, to be put in other modes", got=name_of(model))
    read = read_inputs(inputs, axis=axis, change=None)
    report = Report(name_of(model), "all modes give the same outputs")
    with untouched(model):
        plain, dtype = exact(copy.deepcopy(model).eval(), read, float64)
        read = read.to(dtype) if dtype else read
        base = Runner(plain, read, [])
        floor, rows, runners = base.floor(other_shapes=True), [], {}
        for kind, runner in _modes(plain, read):
            try:
                gaps = [
                    difference(one.rows.flatten(0, 1), two.rows.flatten(0, 1))
                    for one, two in zip(base.base(), runner.base(), strict=False)
                ]
            except Exception as error:
                report.trouble.append(f"{kind}: {type(error).__name__}: {error}")
                continue
            if runner.draws and kind == "train":
                report.notes.append(
                    "train: still random with every dropout rate at 0; not compared"
                )
                continue
            runners[kind] = runner
            gap = torch.stack(gaps).amax(0)
            for number, size in enumerate(gap.tolist()):
                sample, place = divmod(number, read.positions)
                rows.append(
                    Row(place, place, size, kind, sample, _HINTS.get(kind, f"{kind} differs"))
                )
            report.forwards += 1

        def place_of(row: Row) -> tuple[list[Step], list[Step]]:
            before = trace(base, read, row.sample, row.query)
            runner = runners[row.kind]
            return before, trace(runner, runner.inputs, row.sample, row.query)

        compare(report, base, rows, floor, place_of)
    report.pairs = len(rows)
    report.covered = 1.0 if rows else 0.0
    report.notes.append("compared: " + ", ".join(runners))
    return report


def _modes(plain: nn.Module, read: Inputs) -> list[tuple[str, Runner]]:
    runners = [("train", Runner(_quiet(copy.deepcopy(plain).train()), read, []))]
    runners.append(("gradients", Runner(_Way(plain, gradients=True), read, [])))
    config = getattr(plain, "config", None)
    attentions = [m for m in plain.modules() if isinstance(m, nn.MultiheadAttention)]
    if hasattr(config, "output_attentions"):
        runners.append(("weights asked", Runner(_Way(plain, output_attentions=True), read, [])))
    elif attentions:
        runners.append(("weights asked", Runner(_asked(copy.deepcopy(plain)), read, [])))
    if hasattr(plain, "set_attn_implementation"):
        for name in ("eager", "sdpa"):
            if name == getattr(config, "_attn_implementation", None):
                continue
            with suppress(Exception):  # the model has no such implementation
                twin: Any = copy.deepcopy(plain)
                twin.set_attn_implementation(name)
                runners.append((name, Runner(twin, read, [])))
    return runners


class _Way:
    """The model called in one way; `__self__` tells a trace what to hook."""

    def __init__(self, model: nn.Module, *, gradients: bool = False, **options: Any):
        self.__self__, self.gradients, self.options = model, gradients, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Callable[..., Any] = self.__self__
        with torch.set_grad_enabled(self.gradients):
            return model(*args, **{**kwargs, **self.options})


def _quiet(model: nn.Module) -> nn.Module:
    """Set every dropout rate to zero."""
    for module in model.modules():
        for name in _RATES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _asked(model: nn.Module) -> nn.Module:
    def ask(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "need_weights": True}

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(ask, with_kwargs=True)
    return model
