"""Does the model answer alike in train and eval, on every backend, with and without weights?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from clearhead._core import type_error
from clearhead.dependence.proof import Comparison, RowGap, compare, trace_modules
from clearhead.dependence.report import Outcome, Report
from clearhead.dependence.subject import (
    Measured,
    ModelInputs,
    Runner,
    comparison_floor,
    difference,
    float64_copy,
    name_of,
    paired,
    read_inputs,
    recorded_dtypes,
    untouched,
)

__all__ = ["audit_modes"]

_RATES = ("p", "dropout", "dropout_p", "attention_dropout", "attn_dropout", "hidden_dropout")
_HINTS = {
    "train": "training (with dropout off) gives another output: batch statistics, or a mask that "
    "only one of the two modes applies?",
    "gradients": "with gradients on, torch takes its slow path: the fast path answers otherwise",
    "weights requested": "requesting the weights changes the output",
}


def audit_modes(
    model: Any, inputs: Any, *, axis: int | None = None, float64: bool = True
) -> Report:
    """Run a copy of the model in each mode that it has, and compare with the mode it is in.

    Modes: train against eval (dropout off), gradients on (torch's slow path), weights requested,
    and, for Hugging Face models, every attention implementation of "eager" and "sdpa".
    """
    if not isinstance(model, nn.Module):
        raise type_error("model", "must be a module, to be put in other modes", got=name_of(model))
    read = read_inputs(inputs, axis=axis)
    with untouched(model):
        own = Measured(copy.deepcopy(model).eval())
        exact = float64_copy(own.model, read) if float64 else None
        stages = _comparison(exact, own, read)
    return Report.of(name_of(model), "all modes give the same outputs", stages)


class _ModeResult(NamedTuple):
    """A mode that ran: its gaps from the plain one; or why it could not be compared."""

    runner: Runner
    gaps: list[RowGap]
    outcome: Outcome


def _comparison(exact: Measured | None, own: Measured, read: ModelInputs) -> list[Outcome]:
    results, compared = _compare_modes(exact or own, read)
    in_own = None if exact is None else _compare_modes(own, read)[1]
    names = ", ".join(kind for kind, result in results.items() if result.gaps)
    return [
        *[result.outcome for result in results.values()],
        *compare(compared, in_own),
        Outcome(notes=(f"compared: {names}",)),
    ]


def _compare_modes(
    measured: Measured, read: ModelInputs
) -> tuple[dict[str, _ModeResult], Comparison]:
    base = measured.runner(read)
    modes = [*_torch_modes(measured.model), *_library_modes(measured.model)]
    with recorded_dtypes() as seen:
        results = {
            kind: _compare_mode(base, kind, measured._replace(model=model).runner(read))
            for kind, model in modes
        }

    def trace(gap: RowGap) -> Any:
        runners = (base, results[gap.kind].runner)
        return tuple(trace_modules(r, r.inputs, gap.sample, gap.query) for r in runners)

    gaps = [gap for result in results.values() for gap in result.gaps]
    return results, Comparison(base, gaps, comparison_floor(base, seen), trace)


def _compare_mode(base: Runner, kind: str, runner: Runner) -> _ModeResult:
    rows = base.inputs.batch * base.inputs.positions
    try:
        both = paired(base.base(), runner.base())
        found = difference([(one.rows.flatten(0, 1), two.rows.flatten(0, 1)) for one, two in both])
    except Exception as error:
        trouble = f"{kind}: the model fails with {type(error).__name__}: {error}"
        return _ModeResult(runner, [], Outcome(pairs=rows, untested=rows, trouble=(trouble,)))
    if runner.draws and kind == "train":
        note = "train: still random with every dropout rate at 0; not compared"
        return _ModeResult(runner, [], Outcome(notes=(note,)))
    hint, gaps = _HINTS.get(kind, f"{kind} differs"), []
    sizes, undefined = found.sizes.tolist(), found.undefined.tolist()
    for number, (size, unknown) in enumerate(zip(sizes, undefined, strict=True)):
        sample, position = divmod(number, base.inputs.positions)
        gaps.append(RowGap(position, position, size, kind, sample, hint, unknown))
    return _ModeResult(runner, gaps, Outcome(forwards=1))


def _torch_modes(plain: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "train", _without_dropout(copy.deepcopy(plain).train())
    yield "gradients", _CalledWith(plain, gradients=True)
    if hasattr(getattr(plain, "config", None), "output_attentions"):
        yield "weights requested", _CalledWith(plain, output_attentions=True)
    elif any(isinstance(module, nn.MultiheadAttention) for module in plain.modules()):
        yield "weights requested", _requesting_weights(copy.deepcopy(plain))


def _library_modes(plain: Any) -> Iterator[tuple[str, nn.Module]]:
    current = getattr(getattr(plain, "config", None), "_attn_implementation", None)
    for name in ("eager", "sdpa"):
        if not hasattr(plain, "set_attn_implementation") or name == current:
            continue
        twin = copy.deepcopy(plain)
        try:
            twin.set_attn_implementation(name)
        except Exception:  # the model has no such implementation
            continue
        # Some classes only warn that they cannot be switched, and stay as they are.
        if getattr(twin.config, "_attn_implementation", name) == name:
            yield name, twin


class _CalledWith:
    """The model, called with other options; `__self__` is the module for a trace to hook."""

    def __init__(self, model: nn.Module, *, gradients: bool = False, **options: Any):
        self.__self__, self.gradients, self.options = model, gradients, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Callable[..., Any] = self.__self__
        with torch.set_grad_enabled(self.gradients):
            return model(*args, **{**kwargs, **self.options})


def _without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout rate to zero."""
    for module in model.modules():
        for name in _RATES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _requesting_weights(model: nn.Module) -> nn.Module:
    def request(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "need_weights": True}

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(request, with_kwargs=True)
    return model
