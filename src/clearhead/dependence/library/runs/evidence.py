"""What tells the causes of a finding apart: does it vanish under another, equal call?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from clearhead.dependence.library.runs.caches import switches, takes
from clearhead.dependence.library.runs.contrasts import (
    PADS,
    Contrast,
    given,
    reading_the_future,
    with_calls,
)
from clearhead.dependence.library.runs.measuring import compared

if TYPE_CHECKING:
    from clearhead.dependence.library.making import Built
    from clearhead.dependence.library.rows import Row

__all__ = ["CACHE", "FUTURE", "POSITIONS", "RECURRENT", "evidence_of", "with_future"]

CACHE = "equal without a cache"
POSITIONS = "equal where position_ids are given"
FUTURE = "reads the future in this mode alone"
RECURRENT = "first in a convolution or a recurrence"
# The parameters, buffers and modules of layers that carry a state along the positions.
STATES = ("A_log", "dt_bias", "time_decay", "time_mix_key", "recurrent_param", "slope_rate")
CARRIERS = (nn.Conv1d, nn.RNNBase)


def evidence_of(row: Row, built: Built, contrast: Contrast) -> Iterator[str]:
    """Try what applies to a finding that the contrast has confirmed."""
    model, (_, off) = built.model, switches(built.model)
    if row.form == "causal" and off and not row.call.keys() & off.keys():
        everywhere = _at(contrast, slice(0, row.source), slice(0, row.source))
        if not _differs(model, with_calls(everywhere, lambda call: {**call, **off})):
            yield CACHE
    inner = "decoder_" if built.stream.startswith("decoder_") else ""
    if row.variant in ("left", "right") and f"{inner}position_ids" in takes(model):
        everywhere = _at(contrast, *_real(row, built))
        if not _differs(model, with_calls(everywhere, partial(_with_positions, inner))):
            yield POSITIONS
    if row.form == "modes":
        asked = with_future(row, built)
        here, plain = (reading_the_future(asked, built, mode) for mode in (row.detail, ""))
        if _differs(model, here) and not _differs(model, plain):
            yield FUTURE
    if row.form == "documents" and _carries_state(model, row.module):
        yield RECURRENT


def with_future(row: Row, built: Built) -> Row:
    """The same row, at a position that has others behind it."""
    length = given(row, built)[built.stream].shape[1]
    return replace(row, query=min(row.query or 0, length // 2))


def _at(contrast: Contrast, one: slice, two: slice) -> Contrast:
    """The same contrast at many positions."""
    return contrast._replace(
        one=contrast.one._replace(position=one), two=contrast.two._replace(position=two)
    )


def _real(row: Row, built: Built) -> tuple[slice, slice]:
    """The real positions of both runs of a question about padding."""
    length = given(row, built)[built.stream].shape[1]
    start = PADS if "left" in row.variant else 0
    padded = slice(start, start + length)
    return (padded if row.detail.startswith("content") else slice(0, length)), padded


def _differs(model: nn.Module, contrast: Contrast) -> bool:
    try:
        return compared(model, contrast).real
    except Exception:  # a call that the model does not take says nothing
        return True


def _with_positions(inner: str, call: dict[str, Any]) -> dict[str, Any]:
    """Give the positions, counted over the real tokens."""
    places = (call[f"{inner}attention_mask"].cumsum(1) - 1).clamp(min=0)
    return {**call, f"{inner}position_ids": places}


def _carries_state(model: nn.Module, path: str) -> bool:
    """Whether a module, or one that it belongs to within its layer, carries a state along."""
    parts = path.split(" ")[0].split(".")
    for depth in range(len(parts), 0, -1):
        if parts[depth - 1].isdigit():
            return False
        try:
            module = model.get_submodule(".".join(parts[:depth]))
        except AttributeError:
            return False
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        held = module.modules() if depth == len(parts) else (module, *module.children())
        if {name for name, _ in tensors}.intersection(STATES) or any(map(_carries, held)):
            return True
    return False


def _carries(module: nn.Module) -> bool:
    return isinstance(module, CARRIERS) or "ShortConv" in type(module).__name__
