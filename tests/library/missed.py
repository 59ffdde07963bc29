"""Search for what the audit missed: change every future by hand, in plain torch.

    python -m tests.library.missed DIR [--classes NAME ...] [--processes N]

DIR is the folder of a sweep. For every "ok" of its causal form the class is built again with two
seeds, and for each position t all tokens after t are replaced; the logits up to t are compared in
the model's own dtype and in float64. Of the library, the maker of tiny models alone is used.
Each line names a class that reads the future and was said to be ok; the exit code is their number.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

SEEDS = (0, 1)
# What must not be moved by the future, and differs by no more than this, relative to the largest
# logit, was moved by rounding: in float64 (code inside of a model may compute in float32), and in
# float32.
FLOORS = {torch.float64: 1e-6, torch.float32: 1e-4}


class Reading(NamedTuple):
    """The largest change of a logit by tokens that come after it."""

    dtype: torch.dtype
    size: float
    largest: float  # of the logits
    time: int  # the last position that kept its token

    @property
    def leaks(self) -> bool:
        """Whether this is more than rounding."""
        return not self.size <= FLOORS[self.dtype] * max(self.largest, 1e-30)


def futures(built: Any, more: dict[str, Any] | None = None) -> list[Reading]:
    """Replace all tokens after each position in turn; one reading for each dtype that runs."""
    readings, failed = [], None
    for dtype in FLOORS:
        try:
            readings.append(_futures(built, dtype, more or {}))
        except Exception as error:
            # Some classes compute with constants that only their own dtype can hold.
            failed = error
    if not readings and failed is not None:
        raise failed
    return readings


def _futures(built: Any, dtype: torch.dtype, more: dict[str, Any]) -> Reading:
    model = copy.deepcopy(built.model).to(dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    inputs = {
        name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in {**built.inputs, **more}.items()
    }
    cases = list(_changes(built, inputs[built.stream]))
    try:
        # All cases as one batch are fast; what they show is looked at one by one.
        together = _worst(model, _stacked(inputs, built.stream, cases), dtype, cases)
        if not together.leaks:
            return together
    except Exception as error:
        print(f"{type(model).__name__}: one by one ({type(error).__name__})", file=sys.stderr)
    alone = [_worst(model, _stacked(inputs, built.stream, [case]), dtype, [case]) for case in cases]
    return max(alone, key=lambda reading: reading.size)


def _changes(built: Any, ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each position and the ids with other tokens after it."""
    lowest, number = built.lowest, built.vocabulary - built.lowest
    for time in range(ids.shape[1] - 1):
        for shift in (1, number // 3):
            changed = ids.clone()
            changed[:, time + 1 :] = lowest + (changed[:, time + 1 :] - lowest + shift) % number
            yield time, changed


def _stacked(
    inputs: dict[str, Any], stream: str, cases: list[tuple[int, torch.Tensor]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Repeat the inputs for each case, without and with its change."""
    batch = len(inputs[stream])
    same = {
        name: torch.cat([value] * len(cases))
        if torch.is_tensor(value) and value.ndim and len(value) == batch
        else value
        for name, value in inputs.items()
    }
    return same, {**same, stream: torch.cat([changed for _, changed in cases])}


def _worst(
    model: Any,
    both: tuple[dict[str, Any], dict[str, Any]],
    dtype: torch.dtype,
    cases: list[tuple[int, torch.Tensor]],
) -> Reading:
    before, after = (_logits(model, inputs) for inputs in both)
    if not before.isfinite().all():
        raise ValueError("the model itself gives NaN or inf")
    worst = Reading(dtype, 0.0, float(before.abs().max()), -1)
    pairs = zip(cases, before.chunk(len(cases)), after.chunk(len(cases)), strict=True)
    for (time, _), old, new in pairs:
        moved = (new[:, : time + 1] - old[:, : time + 1]).abs().max()
        size = float("inf") if moved.isnan() else float(moved)
        if size > worst.size:
            worst = worst._replace(size=size, time=time)
    return worst


def _logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        # A fresh copy: some classes keep their state in the model.
        return copy.deepcopy(model)(**inputs).logits


def _questions(folder: Path, names: list[str]) -> list[tuple[str, str, str, dict[str, Any]]]:
    """List the answers "ok" of the causal form."""
    asked = []
    for file in sorted((folder / "rows").glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        for row in found["rows"] if isinstance(found, dict) else found:
            is_ok = row["form"] == "causal" and row["verdict"] == "ok"
            if is_ok and (not names or row["name"] in names):
                asked.append((row["name"], row["mapping"], row["backend"], row["call"]))
    return asked


def _ask(question: tuple[str, str, str, dict[str, Any]]) -> str:
    """Check one answer with both seeds; a line of text where it does not hold."""
    torch.set_num_threads(1)
    from clearhead.dependence.library.making import build
    from clearhead.dependence.library.subjects import catalogue

    name, mapping, backend, more = question
    subject = next(s for s in catalogue() if (s.name, s.mapping) == (name, mapping))
    head, lines = f"{name} {mapping} {backend} {more}", []
    for seed in SEEDS:
        try:
            readings = futures(build(subject, backend, seed=seed), more)
        except Exception as error:  # one class that fails must not end the others
            lines.append(f"{head} seed {seed}: fails: {type(error).__name__}: {str(error)[:200]}")
            continue
        lines += [f"{head} seed {seed}: {r}" for r in readings if r.leaks]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Check a folder; the number of answers that do not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", nargs="*", default=[])
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    asked, wrong = _questions(options.folder, options.classes), 0
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for number, answer in enumerate(pool.imap_unordered(_ask, asked, chunksize=4), 1):
            wrong += bool(answer)
            if number % 100 == 0:
                print(f"{number} of {len(asked)}", file=sys.stderr)
            print(answer, end="\n" if answer else "", flush=True)
    print(f"{len(asked)} answers checked with seeds {SEEDS}, {wrong} do not hold")
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
