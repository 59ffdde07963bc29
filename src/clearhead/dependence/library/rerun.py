"""Run a finding again without the audit: change the one input, and compare the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from clearhead.dependence.library.runs.contrasts import (
    TRIED,
    Contrast,
    contrasts,
    given,
    reading_the_future,
    with_output,
)
from clearhead.dependence.library.runs.evidence import FUTURE, evidence_of, with_future
from clearhead.dependence.library.runs.measuring import Compared, compared, other_outputs
from clearhead.dependence.library.runs.scripts import reproduces, written

if TYPE_CHECKING:
    from clearhead.dependence.library.making import Built
    from clearhead.dependence.library.rows import Row

__all__ = ["Proof", "confirm"]


class Proof(NamedTuple):
    """What the second run showed of a finding."""

    confirmed: bool
    sizes: Compared | None = None
    evidence: frozenset[str] = frozenset()
    model_types: tuple[str, ...] = ()  # of the configuration, and of the one of its text
    script: str = ""  # shows the finding with torch and transformers alone
    trouble: str = ""  # why it could not be run
    query: int | None = None  # where it was seen

    @property
    def size(self) -> float:
        """The difference of the logits in the model's own dtype."""
        return self.sizes.size if self.sizes else 0.0


def confirm(row: Row, make: Callable[[], Built]) -> Proof:
    """Build the model of a finding anew, and run what the finding compares."""
    try:
        built = make()
        found = _shown(row, built)
        return Proof(False) if found is None else _proof(row, built, *found)
    except Exception as error:  # the model fails on what it is given here
        return Proof(False, trouble=f"{type(error).__name__}: {error}")


def _shown(row: Row, built: Built) -> tuple[Contrast, Compared] | None:
    """Find a pair of runs whose logits differ, or else another output."""
    best = _most(built, contrasts(row, built))
    if best is None or best[1].real or row.form == "generation":
        return best
    inputs = given(row, built)
    for name, axis in other_outputs(built.model, inputs, inputs[built.stream].shape[1]):
        other = _most(built, (with_output(one, name, axis) for one in contrasts(row, built)))
        if other is not None and other[1].real:
            return other
    return _elsewhere(row, built) or best


def _elsewhere(row: Row, built: Built) -> tuple[Contrast, Compared] | None:
    """Read the other outputs before the source: in other digits a hash moves another one."""
    if row.form != "causal":
        return None
    pairs = (
        pair
        for query in range(row.source or 0)
        for pair in islice(contrasts(replace(row, query=query), built), TRIED)
    )
    found = ((pair, compared(built.model, pair)) for pair in pairs)
    return next((one for one in found if one[1].real), None)


def _most(built: Built, pairs: Iterator[Contrast]) -> tuple[Contrast, Compared] | None:
    """Take the pair that differs most of the first, or else the first that differs at all."""
    found = [(pair, compared(built.model, pair)) for pair in islice(pairs, TRIED)]
    best = max(found, key=lambda one: (one[1].real, one[1].size), default=None)
    if best is None or best[1].real:
        return best
    others = ((pair, compared(built.model, pair)) for pair in pairs)
    return next((one for one in others if one[1].real), best)


def _proof(row: Row, built: Built, contrast: Contrast, sizes: Compared) -> Proof:
    if not sizes.real:
        return Proof(False, sizes)
    read = contrast.two.position
    row = replace(row, query=read) if row.form == "causal" and isinstance(read, int) else row
    seen = frozenset(evidence_of(row, built, contrast))
    if FUTURE in seen:
        contrast = reading_the_future(with_future(row, built), built, row.detail)
        sizes = compared(built.model, contrast)
    script = written(row, built, contrast, sizes, _says(row, seen, contrast))
    types = _model_types(built)
    return Proof(True, sizes, seen, types, script if reproduces(script) else "", query=row.query)


def _model_types(built: Any) -> tuple[str, ...]:
    """The types of a model: what its maker calls it; or its own, and that of its text model."""
    config = getattr(built.model, "config", None)
    own = (config, getattr(config, "text_config", None))
    named = (built,) if hasattr(built, "model_type") else own
    found = [getattr(one, "model_type", "") for one in named]
    return tuple(dict.fromkeys(str(one) for one in found if one))


def _says(row: Row, seen: frozenset[str], contrast: Contrast) -> str:
    """Say in a line what the script shows."""
    options = "".join(f", {name}={value}" for name, value in row.call.items())
    if FUTURE in seen:
        return f"the logits read the future ({row.detail})"
    if row.form == "batch":
        return f"the logits of sample {row.query} read sample {row.source}"
    where = f"the {contrast.two.output} at position {row.query} of sample {row.sample}"
    if row.form in ("generation", "modes") or "amount" in row.detail:
        return f"{where} differ ({row.form}: {row.detail})"
    return f"{where} read position {row.source} ({row.form}: {row.detail}{options})"
