"""The steps of a generation, stitched together: one call a layer, over the whole sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from clearhead._capture import Call, EagerCall, FusedCall, Loop, last_query, shared_mask
from clearhead._core import Sizes
from clearhead.masks import Mask

__all__ = ["Stitcher", "Track", "stitched"]

_Kind = TypeVar("_Kind", bound=Call)


@dataclass(frozen=True)
class Beams:
    """Which row of each step's batch the new tokens of the returned sequences came from."""

    rows: int  # of the batch of every step
    prompt: int
    indices: Tensor  # (sequence, step); -1 where the sequence had ended

    def step(self, end: int) -> int:
        """Give the step that made the rows that end at this position; the prompt is step 0."""
        return max(end - self.prompt, 0)

    def pick(self, x: Tensor, end: int) -> Tensor:
        """Select the rows of the returned sequences from a tensor over the batch."""
        if x.shape[0] != self.rows:
            return x
        return x[self.indices[:, self.step(end)].clamp(min=0).to(x.device)]

    def ended(self, end: int) -> Tensor:
        """Whether each sequence has ended before these rows, bool (sequence,)."""
        return self.indices[:, self.step(end)] < 0


@dataclass(frozen=True, eq=False)
class StepRows(Generic[_Kind]):
    """New rows of one step: their call, their positions, and those of the sources."""

    call: _Kind  # of these rows; without sources, as the track has the keys
    rows: range  # of the call's own queries
    sizes: Sizes  # of the call
    at: int  # position of the first row in the whole sequence
    shift: int  # position of the call's source 0

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.at + len(self.rows)

    def upto(self, end: int) -> StepRows[Any]:
        """Keep the rows before a position."""
        rows = self.rows[: max(end - self.at, 0)]
        return replace(self, rows=rows, call=self.call.with_queries(slice(0, len(rows))))


@dataclass(eq=False)
class Track:
    """All steps of one attention module."""

    steps: list[StepRows[Any]] = field(default_factory=list)
    # (batch, source_head, some, head_dim) and the position after them
    keys: list[tuple[int, Tensor]] = field(default_factory=list)
    covered: int = 0
    check: float | None = 0.0
    beams: Beams | None = None
    text: bool = False  # whether its queries are the tokens that the model is called on
    more: int = 0  # positions of the prompt that are no tokens: soft tokens, parts of an image

    def crop(self, end: int) -> None:
        """Forget the rows and sources from a position on."""
        cross = self.steps[0].call.kind == "cross"
        self.steps = [step.upto(end) for step in self.steps if step.at < end]
        self.covered = end
        if cross:
            return
        pairs = [(last - keys.shape[2], last, keys) for last, keys in self.keys]
        self.keys = [
            (min(last, end), keys[:, :, : end - first])
            for first, last, keys in pairs if first < end
        ]  # fmt: skip

    def remember(self, keys: Tensor, end: int, apart: bool) -> None:
        """Keep new sources; tensors of about one size are concatenated, unless they stay apart."""
        # The cache is written to again, and a view would hold all of it.
        keys = keys.clone()
        while not apart and self.keys and self.keys[-1][1].shape[2] <= keys.shape[2]:
            keys = torch.cat([self.keys.pop()[1], keys], 2)
        self.keys.append((end, keys))

    def continues(self, keys: Tensor, shift: int) -> bool:
        """Whether the sources of a call begin with those of the steps before."""
        for end, past in self.keys:
            first = max(end - past.shape[2], shift)
            past, now = past[:, :, past.shape[2] - (end - first) :], keys[:, :, first - shift :]
            if end > first and not torch.equal(past, now[:, :, : end - first]):
                return False
        return True


class Stitcher:
    """Collects the calls of one run of `generate()`."""

    def __init__(self, prompt: int | None) -> None:
        self.tracks: dict[tuple[Any, ...], Track] = {}
        self.broken: set[str] = set()
        self.loop: Loop | None = None
        self._given = self._prompt = prompt
        self._loops = 0
        self._start: int | None = None
        self._nth: dict[tuple[str, str], int] | None = None
        self._new: list[tuple[Track, int]] = []

    @property
    def module(self) -> str:
        """The name of the module that is called for each step."""
        return self.loop.module if self.loop else ""

    def loop_starts(self, loop: Loop) -> None:
        """Start new sequences."""
        self._loops += 1
        self.loop = loop
        self._prompt = loop.tokens.shape[1] or self._given

    def loop_ends(self, sequences: Tensor, rows: Tensor | None) -> None:
        """Remove what was not accepted, or record which rows the sequences come from."""
        assert self.loop is not None
        length, batch = last_query(sequences, self._prompt), self.loop.tokens.shape[0]
        for key, track in self.tracks.items():
            if key[0] != self._loops or not track.steps:
                continue
            if rows is None:
                if track.text and track.covered > length:
                    self._end(track, length)
            elif track.steps[0].sizes.batch == batch:
                if track.text and self.loop.tokens.shape[1]:
                    track.more = max(track.steps[0].end - self.loop.tokens.shape[1], 0)
                prompt = self._prompt_of(track) if track.text else track.covered
                track.beams = Beams(batch, prompt, rows)

    def _end(self, track: Track, length: int) -> None:
        """Remove drafted tokens that were not accepted; where none are drafted, the prompt of the
        model has more positions than it has tokens.
        """
        if self.loop is not None and self.loop.drafts:
            track.crop(length)
        else:
            track.more = track.covered - length

    def module_starts(self, name: str) -> None:
        """Start a step, at the position after those that the cache holds."""
        if name == self.module:
            self._start, self._nth = self.loop.cached if self.loop else None, {}

    def module_ends(self, name: str, positions: Callable[[], int | None]) -> None:
        """End a step: calls with as many queries as it has positions are on its tokens."""
        if name == self.module:
            count = positions()
            for track, query in self._new:
                track.text = query == count
            self._new.clear()

    def prompt(self, track: Track) -> int | None:
        """How many positions of a track were not generated; None where nothing was."""
        return None if len(track.steps) == 1 and not track.text else self._prompt_of(track)

    @property
    def _beaming(self) -> bool:
        return self.loop is not None and self.loop.beams

    def _prompt_of(self, track: Track) -> int:
        return self._prompt + track.more if self._prompt else track.steps[0].end

    def add(self, call: Call, check: float | None, stepping: bool) -> None:
        """Add the rows of a step that were not there before."""
        track = self._track(call, stepping)
        checks = [x for x in (track.check, check) if x is not None]
        track.check = max(checks) if len(checks) == 2 else None
        query, source = call.sizes[2:]
        at, whole = self._positions(call, track, stepping)
        if at == whole:
            return
        if at < track.covered:
            track.crop(at)
        shift = 0 if call.kind == "cross" else max(whole - source, 0)
        if not self._follows(call, track, at, shift):
            self.broken.add(call.module)
        rows = range(query - (whole - at), query)
        track.steps.append(StepRows(_lean(call, rows), rows, call.sizes, at, shift))
        track.covered = whole
        self._new.append((track, query))
        self._remember(call, track, at, whole, shift)

    def _remember(self, call: Call, track: Track, at: int, whole: int, shift: int) -> None:
        """Keep the sources of a call that are not kept yet."""
        if call.key is not None and (call.kind == "self" or not track.keys):
            end = whole if call.kind == "self" else call.sizes.source
            # The first step has all sources, also those of a cache that was there before.
            first = max(at, shift) if track.keys else shift
            track.remember(call.key[:, :, first - shift : end - shift], end, apart=self._beaming)

    def _track(self, call: Call, stepping: bool) -> Track:
        """Find the track of a module; a module that runs outside the steps has one a call."""
        place = (call.module, call.kind)
        if self._nth is None:
            key: tuple[Any, ...] = (self._loops, place, 0)
        elif stepping:
            number = self._nth[place] = self._nth.get(place, -1) + 1
            key = (self._loops, place, number)
        else:
            key = (None, place, len(self.tracks))
        return self.tracks.setdefault(key, Track())

    def _positions(self, call: Call, track: Track, stepping: bool) -> tuple[int, int]:
        """Give the position of the first new row of a call, and the position after the last."""
        query, source = call.sizes[2:]
        alone = call.kind == "self" and query == source
        if self._start is not None and stepping and not (alone and self._start):
            return self._start, self._start + query
        if alone or (call.kind == "cross" and query > track.covered):
            # Without a cache all rows are computed again.
            if query < track.covered:
                self.broken.add(call.module)
            return min(track.covered, query), query
        return track.covered, track.covered + query

    def _follows(self, call: Call, track: Track, at: int, shift: int) -> bool:
        """Whether a call continues the step before, with the same rows of the batch."""
        if not track.steps:
            return True
        if at > track.covered:
            return False
        query, source = call.sizes[2:]
        if self._beaming or call.key is None or call.kind == "cross" or query == source:
            return True
        return track.continues(call.key, shift)


def _lean(call: Call, rows: range) -> Call:
    """Keep some rows of a call, and no sources: a track keeps the keys, and checks are done."""
    part = call.with_queries(slice(rows.start, rows.stop))
    value = _no_sources(call.value)
    if isinstance(part, EagerCall):
        return replace(part, value=value, key=None, sink_scores=None, dropped=None)
    return replace(part, value=value, key=_no_sources(part.key))


def _no_sources(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:2], 0, x.shape[3]))


def stitched(track: Track, known: list[tuple[Tensor, Mask]]) -> Call:
    """Make one call of all steps; equal masks are shared through `known`."""
    if track.beams is not None:
        count = track.beams.indices.shape[1]
        track.crop(max(x.end for x in track.steps if track.beams.step(x.end) < count))
    first = track.steps[0].call
    source = track.steps[0].sizes.source if first.kind == "cross" else track.covered
    if isinstance(first, EagerCall):
        return _stitched_eager(track, first, source)
    return _stitched_fused(track, first, source, known)


def _stitched_fused(
    track: Track, first: FusedCall, source: int, known: list[tuple[Tensor, Mask]]
) -> FusedCall:
    steps: list[StepRows[FusedCall]] = track.steps
    query = torch.cat([_picked(track, x, x.call.query) for x in steps], 2)
    key = _keys(track, source)
    mask = shared_mask(_edges(track, source), known)
    bias = None
    if any(x.call.bias is not None for x in steps):
        bias = _placed(track, source, 0.0, _bias_rows)
    return replace(first, query=query, key=key, value=key, mask=mask, bias=bias)


def _keys(track: Track, source: int) -> Tensor:
    """Give the sources of all positions; those that a window had left behind are zeros."""
    beams, parts = track.beams, track.keys
    if beams is not None and len(parts) == 1:
        parts = [(0, parts[0][1])]
    keys = [keys if beams is None else beams.pick(keys, end) for end, keys in parts]
    whole = torch.cat(keys, 2)[:, :, :source]
    return torch.nn.functional.pad(whole, (0, 0, source - whole.shape[2], 0))


def _stitched_eager(track: Track, first: EagerCall, source: int) -> EagerCall:
    low = torch.finfo(first.scores.dtype).min
    scores = _placed(track, source, -math.inf, lambda x: _masked(x.call.scores, low))
    weights = _placed(track, source, 0.0, lambda x: x.call.weights)
    lse = torch.cat(
        [_picked(track, x, x.call.lse_of(slice(None)), -math.inf) for x in track.steps], 2
    )
    # Of the keys only the number of heads is needed.
    key = _no_sources(track.keys[0][1]) if track.keys else None
    return replace(first, scores=scores, weights=weights, lse=lse, key=key)


def _masked(scores: Tensor, low: float) -> Tensor:
    return scores.masked_fill(scores <= low / 2, -math.inf) if scores.shape[-1] else scores


def _edges(track: Track, source: int) -> Tensor:
    """Give the edges that all steps allow, (batch or 1, head or 1, query, source)."""
    device = track.keys[0][1].device

    def edges(step: StepRows[FusedCall]) -> Tensor:
        rows = torch.tensor(list(step.rows), dtype=torch.int64, device=device)
        columns = torch.arange(step.sizes.source, device=device)
        if step.call.mask is None:
            shape = (1, 1, len(rows), len(columns))
            return torch.ones(shape, dtype=torch.bool, device=device)
        tile = step.call.mask.tile(rows, columns, step.sizes)
        return tile.reshape((1,) * (4 - tile.ndim) + tuple(tile.shape))

    return _placed(track, source, False, edges)


def _placed(
    track: Track, source: int, blank: Any, part: Callable[[StepRows[Any]], Tensor]
) -> Tensor:
    """Concatenate the rows of all steps, each at the positions of its sources."""
    laid = []
    for step in track.steps:
        rows = _picked(track, step, part(step), blank)
        width = min(rows.shape[-1], source - step.shift)
        whole = rows.new_full((*rows.shape[:-1], source), blank)
        whole[..., step.shift : step.shift + width] = rows[..., :width]
        laid.append(whole)
    lead = torch.broadcast_shapes(*(x.shape[:2] for x in laid))
    return torch.cat([x.expand(*lead, *x.shape[2:]) for x in laid], 2)


def _bias_rows(step: StepRows[FusedCall]) -> Tensor:
    bias = step.call.bias
    if bias is None:
        bias = step.call.query.new_zeros(1, 1, 1, 1)
    if bias.shape[2] != 1:
        bias = bias[:, :, step.rows.start : step.rows.stop]
    return bias.expand(*bias.shape[:2], len(step.rows), step.sizes.source)


def _picked(track: Track, step: StepRows[Any], x: Tensor, blank: Any = None) -> Tensor:
    """Give the rows of the returned sequences; blank where a sequence had ended."""
    if track.beams is None:
        return x
    x, ended = track.beams.pick(x, step.end), track.beams.ended(step.end)
    if blank is None or not bool(ended.any()):
        return x
    ended = ended.to(x.device).reshape(-1, *(1,) * (x.ndim - 1))
    return torch.where(ended, x.new_full((), blank), x)
