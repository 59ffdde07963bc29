"""Run changed copies of the inputs and measure what moves, and what moves by rounding alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.dependence.proof.changes import Content, splice
from clearhead.dependence.proof.state import Snapshot, random_state, restore_random, untouched
from clearhead.dependence.proof.subject import Inputs, Output, call, outputs_of

__all__ = ["Change", "Runner", "float64_copy", "in_float64", "movement"]

# Positions, and output numbers, that one forward over several copies may hold.
MOST_POSITIONS, MOST_NUMBERS = 1 << 13, 1 << 25


class Change(NamedTuple):
    """Put content number `content` at `sources`, bool (batch, position)."""

    sources: Tensor
    content: int


class Runner:
    """One model with one set of inputs, run again and again under equal conditions."""

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: Inputs,
        contents: Sequence[Content],
        restore: Callable[[], list[str]] | None = None,
    ):
        self.model, self.inputs, self.contents = model, inputs, list(contents)
        self._restore = restore or Snapshot(model).restore
        self._random = random_state()
        self._bases: dict[int, list[Output]] = {}
        self.forwards = 0.0
        self.failures: list[str] = []
        self.copies = 1
        # What the runs showed about the model: inputs edited, random numbers drawn, state changed.
        self.edits: set[str] = set()
        self.draws, self.state = False, list[str]()
        self.single = self.noisy = False

    def outputs(
        self, inputs: Inputs | None = None, *, seed: int | None = None, restore: bool = True
    ) -> list[Output]:
        """Run once, from the same random state and the same model state each time."""
        inputs = inputs or self.inputs
        restore_random(self._random)
        if seed is not None:
            torch.manual_seed(seed)
        before = torch.get_rng_state()
        self.forwards += inputs.batch / self.inputs.batch
        try:
            answer = call(self.model, inputs, self.edits)
            self.draws |= not torch.equal(before, torch.get_rng_state())
            return outputs_of(answer, inputs)
        finally:
            if restore:
                self.state = self._restore() or self.state

    def base(self, copies: int = 1) -> list[Output]:
        """Outputs for the unchanged inputs, `copies` times side by side."""
        if copies not in self._bases:
            if len(self._bases) > 2:
                self._bases.clear()
            self._bases[copies] = self.outputs(self.inputs.repeat(copies))
        return self._bases[copies]

    def scale(self) -> float:
        """The largest finite number among the outputs."""
        sizes = [finite.abs().max().item() for finite in map(_finite, self.base()) if len(finite)]
        return max(sizes, default=0.0)

    def move(self, changes: Sequence[Change]) -> Iterator[Tensor | None]:
        """For each change, how far each output (batch, position) moved; None where it failed."""
        # Chunks of one size, so that one run of the unchanged inputs serves them all.
        chunks = -(-len(changes) // self.copies)
        size = -(-len(changes) // max(chunks, 1))
        for start in range(0, len(changes), size or 1):
            chunk = list(changes[start : start + size])
            short = size - len(chunk)
            moves = self._move_together(chunk + chunk[-1:] * short)
            yield from islice(moves, len(chunk))

    def changed(self, change: Change) -> Inputs:
        """The inputs after a change."""
        return splice(self.inputs, self.contents[change.content], change.sources)

    def use_copies(self, wanted: int) -> bool:
        """Turn on several copies a forward, if the samples of a batch do not see each other."""
        numbers = sum(output.rows.numel() for output in self.base())
        positions = self.inputs.batch * self.inputs.positions
        copies = min(wanted, MOST_POSITIONS // positions, MOST_NUMBERS // max(numbers, 1))
        if self.single or self.inputs.leaves[0].batch_axis is None or copies < 2:
            return False
        everything = torch.ones(self.inputs.batch, self.inputs.positions, dtype=torch.bool)
        nothing = Change(torch.zeros_like(everything), 0)
        try:
            moved = self._together([nothing, Change(everything, 0), nothing])
            apart = bool((moved[0] == 0).all() and (moved[-1] == 0).all())
        except Exception:  # the model may take one batch size only; runs of one copy decide then
            apart = False
        self.copies = copies if apart else 1
        return apart

    def _move_together(self, changes: Sequence[Change]) -> Iterator[Tensor | None]:
        try:
            yield from self._together(changes)
            return
        except Exception as error:
            if len(changes) == 1:
                self.failures.append(f"{type(error).__name__}: {error}")
                yield None
                return
        for change in changes:
            yield from self._move_together([change])

    def _together(self, changes: Sequence[Change]) -> list[Tensor]:
        inputs = self.inputs.repeat(len(changes))
        content = {
            leaf.key: torch.cat([self.contents[c.content][leaf.key] for c in changes], axis)
            if len(changes) > 1 and (axis := leaf.batch_axis) is not None
            else self.contents[changes[0].content][leaf.key]
            for leaf in self.inputs.leaves
        }
        sources = torch.cat([change.sources for change in changes])
        outputs = self.outputs(splice(inputs, content, sources))
        moved = movement(self.base(len(changes)), outputs)
        return list(moved.reshape(len(changes), -1, moved.shape[-1]))

    def floor(self, *, other_shapes: bool = False) -> float:
        """Measure what rounding can do: jitter every module's output by one unit in the last place.

        In runs of other shapes any number in the model may be rounded anew, so the unit is that of
        the coarsest dtype that the model computes in (float32 for softmax and norms, as a rule).
        """
        dtypes = {out.rows.dtype for out in self.base() if out.rows.is_floating_point()}
        if other_shapes:
            with _Dtypes() as seen:
                self.outputs()
            dtypes |= seen.dtypes
        unit = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        # Where the model is noisy one repeat may happen to be close to the first run.
        repeats = 8 if self.noisy else 1
        sizes = [float(movement(self.base(), self.outputs()).max()) for _ in range(repeats)]
        if isinstance(self.model, nn.Module):
            for number in range(2):
                with _jittered(self.model, number, unit):
                    sizes.append(float(movement(self.base(), self.outputs()).max()))
        # Several roundings a module, and only two draws of them.
        return 8 * max(*sizes, unit * self.scale())


def in_float64(runner: Runner) -> Runner | None:
    """Make the same runner on a float64 copy of the model, or None where that cannot be."""
    double = float64_copy(runner.model, runner.inputs)
    if double is None:
        return None
    contents = [
        {k: v.double() if v.is_floating_point() else v for k, v in content.items()}
        for content in runner.contents
    ]
    twin = Runner(double, runner.inputs.to(torch.float64), contents)
    twin.single, twin.noisy = runner.single, runner.noisy
    return twin


def float64_copy(model: Any, inputs: Inputs) -> nn.Module | None:
    """Copy the model to float64, if it answers in float64 then."""
    if not isinstance(model, nn.Module):
        return None
    try:
        double: Any = copy.deepcopy(model).double()
        if hasattr(double, "set_experts_implementation"):
            double.set_experts_implementation("eager")  # the grouped one has no float64
        with untouched(model), untouched(double):
            native = outputs_of(call(model, inputs), inputs)
            outputs = outputs_of(call(double, inputs.to(torch.float64)), inputs)
    except Exception:  # any failure of a copy in another dtype says only that there is none
        return None
    pairs = list(zip(native, outputs, strict=True))
    # Some models overflow in float64 only: a mask of finfo.min that is added to something.
    sane = all(torch.equal(one.rows.isfinite(), two.rows.isfinite()) for one, two in pairs)
    return double if sane and any(o.rows.dtype == torch.float64 for o in outputs) else None


def movement(before: Sequence[Output], after: Sequence[Output]) -> Tensor:
    """Give the largest change over all outputs of each (batch, position); inf for a new NaN."""
    if [a.rows.shape for a in before] != [a.rows.shape for a in after]:
        shapes = [tuple(a.rows.shape) for a in before], [tuple(a.rows.shape) for a in after]
        raise RuntimeError(f"the outputs changed their shapes: {shapes[0]} became {shapes[1]}")
    moves = [_moved(old.rows, new.rows) for old, new in zip(before, after, strict=True)]
    return torch.stack(torch.broadcast_tensors(*moves)).amax(0).cpu()


def _moved(old: Tensor, new: Tensor) -> Tensor:
    if torch.equal(old, new):
        return torch.zeros(old.shape[:2], dtype=torch.float64)
    same = (old == new) | ((old != old) & (new != new))
    if old.is_complex() or old.dtype.itemsize > 4:
        size = (new - old).abs().double()
    else:
        size = (new.float() - old.float()).abs()
    size = torch.where(same, 0.0, size).nan_to_num(torch.inf, torch.inf)
    return size.amax(-1).double().cpu()


def _finite(output: Output) -> Tensor:
    rows = output.rows
    return rows[torch.isfinite(rows)] if rows.is_floating_point() else rows.flatten()[:0]


class _Dtypes(TorchDispatchMode):
    """Note the float dtypes that a run computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        # Tables made without inputs (rotary phases) are equal in both runs only at equal places.
        if isinstance(value, Tensor) and value.is_floating_point():
            self.dtypes.add(value.dtype)
        return value


@contextmanager
def _jittered(model: nn.Module, number: int, unit: float) -> Iterator[None]:
    generator = torch.Generator().manual_seed(number)

    def jitter(_module: nn.Module, _args: Any, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return None
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float32) * 2 - 1
        return value * (1 + max(unit, torch.finfo(value.dtype).eps) * noise.to(value))

    leaves = [module for module in model.modules() if not any(module.children())]
    handles = [module.register_forward_hook(jitter) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
