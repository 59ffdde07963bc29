"""Run the model on perturbed copies of the inputs, and measure which outputs move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from clearhead.dependence.report import Outcome
from clearhead.dependence.subject.inputs import ModelInputs, call
from clearhead.dependence.subject.outputs import OutputRows, movement, outputs_of
from clearhead.dependence.subject.perturbation import Perturbation, Replacement, splice
from clearhead.dependence.subject.state import Snapshot, random_state, restore_random

__all__ = ["Runner"]

# Positions, and output numbers, that one forward over several copies may hold.
MOST_POSITIONS, MOST_NUMBERS = 1 << 13, 1 << 25


class Runner:
    """One model with one set of inputs, run again and again under equal conditions.

    `single` keeps it to one copy of the batch a forward, `noisy` says that equal runs differ.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: ModelInputs,
        replacements: Sequence[Replacement] = (),
        restore: Callable[[], list[str]] | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self.model, self.inputs, self.replacements = model, inputs, list(replacements)
        self._restore = restore or Snapshot(model).restore
        self._context = context
        self._random = random_state()
        self._bases: dict[int, list[OutputRows]] = {}
        self.forwards = 0.0
        self.failures: list[str] = []
        self.copies = 1
        # What the runs showed about the model: inputs edited, random numbers drawn, state changed.
        self.edits: set[str] = set()
        self.draws, self.state = False, list[str]()
        self.single = self.noisy = False
        # The precision of the constant tables of the model, where it is coarser than its outputs'.
        self.table_eps = 0.0

    @property
    def outcome(self) -> Outcome:
        """What the runs cost, and which of them failed."""
        failures = sorted({f"fails on changed inputs: {text}" for text in self.failures})
        return Outcome(trouble=tuple(failures), forwards=self.forwards)

    def outputs(
        self, inputs: ModelInputs | None = None, *, seed: int | None = None, restore: bool = True
    ) -> list[OutputRows]:
        """Run once, from the same random state and the same model state each time."""
        inputs = inputs or self.inputs
        restore_random(self._random)
        if seed is not None:
            torch.manual_seed(seed)
        before = torch.get_rng_state()
        self.forwards += inputs.batch / self.inputs.batch
        try:
            with self._context():
                answer = call(self.model, inputs, self.edits)
            self.draws |= not torch.equal(before, torch.get_rng_state())
            return outputs_of(answer, inputs)
        finally:
            if restore:
                self.state = self._restore() or self.state

    def base(self, copies: int = 1) -> list[OutputRows]:
        """Outputs for the unperturbed inputs, with `copies` of the batch concatenated."""
        if copies not in self._bases:
            if len(self._bases) > 2:
                self._bases.clear()
            self._bases[copies] = self.outputs(self.inputs.repeat(copies))
        return self._bases[copies]

    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the float outputs."""
        return {one.rows.dtype for one in self.base() if one.rows.is_floating_point()}

    def movements(self, perturbations: Sequence[Perturbation]) -> Iterator[Tensor | None]:
        """Yield how far each output (batch, position) moves; None where the model fails."""
        # Chunks of one size, so that one run of the unperturbed inputs serves them all.
        chunks = -(-len(perturbations) // self.copies)
        size = -(-len(perturbations) // max(chunks, 1))
        for start in range(0, len(perturbations), size or 1):
            chunk = list(perturbations[start : start + size])
            missing = size - len(chunk)
            yield from islice(self._movements(chunk + chunk[-1:] * missing), len(chunk))

    def perturbed(self, perturbation: Perturbation) -> ModelInputs:
        """The inputs after a perturbation."""
        replacement = self.replacements[perturbation.replacement]
        return splice(self.inputs, replacement, perturbation.sources)

    def enable_copies(self, wanted: int) -> bool:
        """Run several copies of the batch a forward, if its samples are independent."""
        numbers = sum(output.rows.numel() for output in self.base())
        positions = self.inputs.batch * self.inputs.positions
        copies = min(wanted, MOST_POSITIONS // positions, MOST_NUMBERS // max(numbers, 1))
        if self.single or self.inputs.main.batch_axis is None or copies < 2:
            return False
        everything = torch.ones(self.inputs.batch, self.inputs.positions, dtype=torch.bool)
        nothing = Perturbation(torch.zeros_like(everything), 0)
        try:
            moved = self._together([nothing, Perturbation(everything, 0), nothing])
            apart = bool((moved[0] == 0).all() and (moved[-1] == 0).all())
        except Exception:  # the model may accept one batch size only; runs of one copy serve then
            apart = False
        self.copies = copies if apart else 1
        return apart

    def _movements(self, perturbations: Sequence[Perturbation]) -> Iterator[Tensor | None]:
        try:
            yield from self._together(perturbations)
            return
        except Exception as error:
            if len(perturbations) == 1:
                self.failures.append(f"{type(error).__name__}: {error}")
                yield None
                return
        for perturbation in perturbations:
            yield from self._movements([perturbation])

    def _together(self, perturbations: Sequence[Perturbation]) -> list[Tensor]:
        numbers = [perturbation.replacement for perturbation in perturbations]
        sources = torch.cat([perturbation.sources for perturbation in perturbations])
        inputs = splice(
            self.inputs.repeat(len(perturbations)), self._concatenated(numbers), sources
        )
        moved = movement(self.base(len(perturbations)), self.outputs(inputs))
        return list(moved.reshape(len(perturbations), -1, moved.shape[-1]))

    def _concatenated(self, numbers: list[int]) -> Replacement:
        first = self.replacements[numbers[0]]
        if len(numbers) == 1:
            return first
        axes = {one.key: one.batch_axis for one in self.inputs.content}
        return {
            key: first[key]
            if axis is None
            else torch.cat([self.replacements[number][key] for number in numbers], axis)
            for key, axis in axes.items()
        }
