"""The audited model in float64, where rounding hardly shows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clearhead.dependence.subject.inputs import ModelInputs, call
from clearhead.dependence.subject.outputs import OutputRows, outputs_of
from clearhead.dependence.subject.perturbation import Replacement
from clearhead.dependence.subject.rounding import LOWER, recorded_dtypes
from clearhead.dependence.subject.runner import Runner
from clearhead.dependence.subject.state import untouched

__all__ = ["Measured", "float64_copy"]


class Measured(NamedTuple):
    """The model in the precision in which its outputs are measured."""

    model: Any
    dtype: torch.dtype | None = None  # of the float inputs; None leaves them as they are
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    table_eps: float = 0.0  # the precision of tables that were computed before the conversion

    def runner(
        self,
        inputs: ModelInputs,
        replacements: Sequence[Replacement] = (),
        restore: Callable[[], list[str]] | None = None,
    ) -> Runner:
        """Make a runner on inputs and replacements, converted."""
        if self.dtype is None:
            return Runner(self.model, inputs, replacements, restore)
        double = [
            {
                key: value.double() if value.is_floating_point() else value
                for key, value in one.items()
            }
            for one in replacements
        ]
        runner = Runner(self.model, inputs.to(self.dtype), double, restore, self.context)
        runner.table_eps = self.table_eps
        return runner


def float64_copy(model: Any, inputs: ModelInputs) -> Measured | None:
    """Copy the model to float64, if it then answers in float64 and is finite where it was."""
    if not isinstance(model, nn.Module):
        return None
    try:
        double: Any = copy.deepcopy(model).double()
        if hasattr(double, "set_experts_implementation"):
            double.set_experts_implementation("eager")  # the grouped one does not support float64
        with untouched(model):
            native = outputs_of(call(model, inputs), inputs)
    except Exception:  # a model that cannot be copied has no float64 copy
        return None
    with recorded_dtypes() as dtypes:
        plain = _answers(double, inputs, native, nullcontext)
    if (not plain or dtypes & LOWER) and _answers(double, inputs, native, _upcast):
        return Measured(double, torch.float64, _upcast, _table_eps(model))
    return Measured(double, torch.float64, nullcontext, _table_eps(model)) if plain else None


def _answers(
    double: Any, inputs: ModelInputs, native: Sequence[OutputRows], context: Callable[[], Any]
) -> bool:
    """Whether the copy answers in float64, and is finite where the model itself is."""
    try:
        with untouched(double), context():
            outputs = outputs_of(call(double, inputs.to(torch.float64)), inputs)
        pairs = list(zip(native, outputs, strict=True))
    except Exception:  # code that needs its own dtype
        return False
    # Some models overflow in float64 only: a mask of finfo.min that is added to something.
    sane = all(torch.equal(one.rows.isfinite(), two.rows.isfinite()) for one, two in pairs)
    return sane and any(output.rows.dtype == torch.float64 for output in outputs)


@contextmanager
def _upcast() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _UpcastMode():
            yield
    finally:
        torch.set_default_dtype(default)


_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class _UpcastMode(TorchFunctionMode):
    """Computes in float64 where the code of the model names a lower float dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A view in another dtype reinterprets bits; anything else rounds.
        if func is not Tensor.view:
            args = tuple(map(_raised, args))
            kwargs = {name: _raised(value) for name, value in kwargs.items()}
        return (Tensor.double if func in _CASTS else func)(*args, **kwargs)


def _raised(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in LOWER else value


def _table_eps(model: nn.Module) -> float:
    """The coarsest precision of constant tables, as those of rotary phases by position.

    Rounding once, before the conversion, it differs from position to position, so it shows where
    the same content stands at other positions.
    """
    parameters = list(model.parameters())
    trained = any(parameter.requires_grad for parameter in parameters)
    constants = [p for p in parameters if trained and not p.requires_grad]
    tables = [t for t in (*constants, *model.buffers()) if t.ndim > 1 and t.is_floating_point()]
    return max(
        (torch.finfo(t.dtype).eps for t in tables if bool((t != t.round()).any())), default=0.0
    )
