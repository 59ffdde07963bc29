"""Generation step by step, put together: one call for each layer, over the whole sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clearhead._capture import Call, Loop, recompute
from clearhead._core import Sizes
from clearhead.masks import Mask

__all__ = ["Stitcher", "Track", "join"]


@dataclass(frozen=True)
class Beams:
    """Which row of each step's batch the new tokens of the returned sequences came from."""

    rows: int  # of the batch of every step
    prompt: int
    indices: Tensor  # (sequence, step); -1 where the sequence had ended

    def step(self, end: int) -> int:
        """Say which step made the rows that end at this position; the prompt is the first."""
        return max(end - self.prompt, 0)

    def pick(self, x: Tensor, end: int) -> Tensor:
        """Give the rows of the returned sequences, of a tensor that has those of the batch."""
        if x.shape[0] != self.rows:
            return x
        return x[self.indices[:, self.step(end)].clamp(min=0).to(x.device)]

    def ended(self, end: int) -> Tensor:
        """Say which sequences have ended before these rows, (sequence,)."""
        return self.indices[:, self.step(end)] < 0


@dataclass(frozen=True, eq=False)
class Piece:
    """New rows of one step: the call they come from, their positions and those of its sources."""

    call: Call  # of these rows; without keys, which the track has
    rows: range  # of the call's own queries
    sizes: Sizes  # of the call
    at: int  # position of the first row in the whole sequence
    shift: int  # position of the call's source 0

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.at + len(self.rows)

    def upto(self, end: int) -> Piece:
        """Keep the rows before a position."""
        rows = self.rows[: max(end - self.at, 0)]
        return replace(self, rows=rows, call=_of_rows(self.call, slice(0, len(rows))))


@dataclass(eq=False)
class Track:
    """All steps of one attention module."""

    pieces: list[Piece] = field(default_factory=list)
    # (batch, source_head, some, head_dim) and the position after them
    keys: list[tuple[int, Tensor]] = field(default_factory=list)
    covered: int = 0
    check: float | None = 0.0
    beams: Beams | None = None
    text: bool = False  # its queries are the tokens that the model is called on

    def crop(self, end: int) -> None:
        """Forget the rows and sources from a position on."""
        cross = self.pieces[0].call.kind == "cross"
        self.pieces = [piece.upto(end) for piece in self.pieces if piece.at < end]
        self.covered = end
        if cross:
            return
        pairs = [(last - keys.shape[2], last, keys) for last, keys in self.keys]
        self.keys = [
            (min(last, end), keys[:, :, : end - first])
            for first, last, keys in pairs if first < end
        ]  # fmt: skip

    def remember(self, keys: Tensor, end: int, apart: bool) -> None:
        """Keep new sources; pieces of about one size grow together, unless they stay apart."""
        # a cache is written to again, and holding a view would hold all of it
        keys = keys.clone()
        while not apart and self.keys and self.keys[-1][1].shape[2] <= keys.shape[2]:
            keys = torch.cat([self.keys.pop()[1], keys], 2)
        self.keys.append((end, keys))

    def goes_on(self, keys: Tensor, shift: int) -> bool:
        """Whether the sources of a call begin with those that were there before."""
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

    def loop_begins(self, loop: Loop) -> None:
        """Start new sequences."""
        self._loops += 1
        self.loop = loop
        self._prompt = loop.tokens.shape[1] or self._given

    def loop_ends(self, sequences: Tensor, rows: Tensor | None) -> None:
        """Cut off what was not accepted, or learn which rows the sequences come from."""
        assert self.loop is not None
        length, batch = sequences.shape[1] - 1, self.loop.tokens.shape[0]
        if self._prompt and length < self._prompt:
            length += self._prompt  # embeddings went in: only the new tokens come out
        for key, track in self.tracks.items():
            if key[0] != self._loops or not track.pieces:
                continue
            if rows is None:
                if track.text and track.covered > length:
                    track.crop(length)
            elif track.pieces[0].sizes.batch == batch:
                prompt = self._prompt_of(track) if track.text else track.covered
                track.beams = Beams(batch, prompt, rows)

    def begins(self, name: str) -> None:
        """Start a step, after what the cache holds."""
        if name == self.module:
            self._start, self._nth = self.loop.cached if self.loop else None, {}

    def ends(self, name: str, count: int | None) -> None:
        """End a step, and tell which of its calls were on the tokens it was called on."""
        if name == self.module:
            for track, query in self._new:
                track.text = query == count
            self._new.clear()

    def prompt(self, track: Track) -> int | None:
        """How many positions of a track were not generated; None where nothing was."""
        return None if len(track.pieces) == 1 and not track.text else self._prompt_of(track)

    @property
    def _beaming(self) -> bool:
        return self.loop is not None and self.loop.beams

    def _prompt_of(self, track: Track) -> int:
        first = track.pieces[0]
        return self._prompt or first.end

    def add(self, call: Call, check: float | None, stepping: bool) -> None:
        """Take the rows of a step that were not there before."""
        track = self._track(call, stepping)
        if check is None or track.check is None:
            track.check = None
        else:
            track.check = max(track.check, check)
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
        sizes = Sizes(*call.sizes[:2], query, source)
        track.pieces.append(Piece(_lean(call, rows), rows, sizes, at, shift))
        track.covered = whole
        self._new.append((track, query))
        if call.key is not None and (call.kind == "self" or not track.keys):
            end = whole if call.kind == "self" else source
            # the first step has all sources, also those of a cache that was there before
            first = max(at, shift) if track.keys else shift
            track.remember(call.key[:, :, first - shift : end - shift], end, apart=self._beaming)

    def _track(self, call: Call, stepping: bool) -> Track:
        """Find the track of a module; what runs outside of the steps has one for each call."""
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
        """Give the position of the first new row of a call, and that after the last."""
        query, source = call.sizes[2:]
        alone = call.kind == "self" and query == source
        if self._start is not None and stepping and not (alone and self._start):
            return self._start, self._start + query
        if alone or (call.kind == "cross" and query > track.covered):
            # no cache: all rows come again
            if query < track.covered:
                self.broken.add(call.module)
            return min(track.covered, query), query
        return track.covered, track.covered + query

    def _follows(self, call: Call, track: Track, at: int, shift: int) -> bool:
        """Check that a call goes on from the step before, with the same rows of the batch."""
        if not track.pieces:
            return True
        if at > track.covered:
            return False
        query, source = call.sizes[2:]
        if self._beaming or call.key is None or call.kind == "cross" or query == source:
            return True
        return track.goes_on(call.key, shift)


def _lean(call: Call, rows: range) -> Call:
    """Keep of some rows of a call only what stitching needs."""
    call = call.but(key=None, value=None, rest=None, dropped=None)
    return _of_rows(call, slice(rows.start, rows.stop))


def _of_rows(call: Call, at: slice) -> Call:
    if call.scores is None:
        assert call.query is not None
        return call.but(query=call.query[:, :, at])
    assert call.weights is not None
    assert call.lse is not None
    return call.but(
        scores=call.scores[:, :, at], weights=call.weights[:, :, at], lse=call.lse[:, :, at]
    )


def join(track: Track, known: list[tuple[Tensor, Mask]]) -> Call:
    """Make one call of all steps; equal masks are shared through `known`."""
    if track.beams is not None:
        steps = track.beams.indices.shape[1]
        track.crop(max(p.end for p in track.pieces if track.beams.step(p.end) < steps))
    first = track.pieces[0].call
    source = track.pieces[0].sizes.source if first.kind == "cross" else track.covered
    if first.scores is not None:
        return _join_scores(track, first, source)
    queries = torch.cat([_picked(track, piece, piece.call.query) for piece in track.pieces], 2)
    key = _keys(track, source)
    mask = recompute.shared(_join_masks(track, source), known)
    bias = None
    if any(piece.call.bias is not None for piece in track.pieces):
        bias = _placed(track, source, 0.0, _bias_rows)
    return first.but(query=queries, key=key, value=key, mask=mask, bias=bias)


def _keys(track: Track, source: int) -> Tensor:
    """Give the sources of all positions; those that a window had left behind are zeros."""
    beams, parts = track.beams, track.keys
    if beams is not None and len(parts) == 1:
        parts = [(0, parts[0][1])]
    keys = [keys if beams is None else beams.pick(keys, end) for end, keys in parts]
    whole = torch.cat(keys, 2)[:, :, :source]
    return torch.nn.functional.pad(whole, (0, 0, source - whole.shape[2], 0))


def _join_scores(track: Track, first: Call, source: int) -> Call:
    low = torch.finfo(first.scores.dtype).min if first.scores is not None else -math.inf
    scores = _placed(track, source, -math.inf, lambda piece: _open(piece.call.scores, low))
    weights = _placed(track, source, 0.0, lambda piece: piece.call.weights)
    lse = torch.cat([_picked(track, p, p.call.lse, -math.inf) for p in track.pieces], 2)
    # of the keys no more than how many heads they have
    key = track.keys[0][1][:, :, :0] if track.keys else None
    return first.but(scores=scores, weights=weights, lse=lse, key=key)


def _open(scores: Any, low: float) -> Tensor:
    return scores.masked_fill(scores <= low / 2, -math.inf) if scores.shape[-1] else scores


def _join_masks(track: Track, source: int) -> Tensor:
    def edges(piece: Piece) -> Tensor:
        device = track.keys[0][1].device
        rows = torch.tensor(list(piece.rows), dtype=torch.int64, device=device)
        columns = torch.arange(piece.sizes.source, device=device)
        if piece.call.mask is None:
            shape = (1, 1, len(rows), len(columns))
            return torch.ones(shape, dtype=torch.bool, device=device)
        tile = piece.call.mask.tile(rows, columns, piece.sizes)
        return tile.reshape((1,) * (4 - tile.ndim) + tuple(tile.shape))

    return _placed(track, source, False, edges)


def _placed(track: Track, source: int, blank: Any, part: Any) -> Tensor:
    """Put the rows of all steps below each other, each at the positions of its sources."""
    laid = []
    for piece in track.pieces:
        rows = _picked(track, piece, part(piece), blank)
        width = min(rows.shape[-1], source - piece.shift)
        whole = rows.new_full((*rows.shape[:-1], source), blank)
        whole[..., piece.shift : piece.shift + width] = rows[..., :width]
        laid.append(whole)
    lead = torch.broadcast_shapes(*(x.shape[:2] for x in laid))
    return torch.cat([x.expand(*lead, *x.shape[2:]) for x in laid], 2)


def _bias_rows(piece: Piece) -> Tensor:
    bias = piece.call.bias
    if bias is None:
        assert piece.call.query is not None
        bias = piece.call.query.new_zeros(1, 1, 1, 1)
    if bias.shape[2] != 1:
        bias = bias[:, :, piece.rows.start : piece.rows.stop]
    return bias.expand(*bias.shape[:2], len(piece.rows), piece.sizes.source)


def _picked(track: Track, piece: Piece, x: Any, blank: Any = None) -> Tensor:
    """Give the rows of the returned sequences; blank where a sequence had ended."""
    if track.beams is None:
        return x
    x, ended = track.beams.pick(x, piece.end), track.beams.ended(piece.end)
    if blank is None or not bool(ended.any()):
        return x
    ended = ended.to(x.device).reshape(-1, *(1,) * (x.ndim - 1))
    return torch.where(ended, x.new_full((), blank), x)
