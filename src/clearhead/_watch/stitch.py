"""Generation step by step, put together: one call for each layer, over the whole sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clearhead._impl.problem import Sizes
from clearhead._watch import look
from clearhead._watch.call import Call
from clearhead.masks import Mask

__all__ = ["Stitcher", "Track", "join"]


@dataclass(eq=False)
class Piece:
    """New rows of one step: the call they come from, their positions and those of its sources."""

    call: Call  # of chosen rows; without keys, which the track has
    rows: range  # of the call's own queries
    sizes: Sizes  # of the call
    shift: int  # position of the call's source 0 in the whole sequence
    order: list[Tensor] = field(default_factory=list)  # reorderings of the batch since


@dataclass(eq=False)
class Track:
    """All steps of one attention module."""

    pieces: list[Piece] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)  # (batch, source_head, new, head_dim)
    covered: int = 0
    check: float | None = 0.0


class Stitcher:
    """Collects the calls of one run of `generate()`."""

    def __init__(self, prompt: int | None) -> None:
        self.tracks: dict[tuple[str, str], Track] = {}
        self.broken: set[str] = set()
        self._prompt = prompt
        self._order: Tensor | None = None

    def prompt(self, track: Track) -> int | None:
        """How many positions of a track were not generated; None where nothing was."""
        if len(track.pieces) == 1:
            return None
        return self._prompt or len(track.pieces[0].rows)

    def add(self, call: Call, check: float | None) -> None:
        """Take the rows of a step that were not there before."""
        track = self.tracks.setdefault((call.module, call.kind), Track())
        _, _, query, source = call.sizes
        if check is None or track.check is None:
            track.check = None
        else:
            track.check = max(track.check, check)
        again = query == source and track.covered > 0 and call.kind == "self"
        new = max(query - track.covered, 1) if again else query
        whole = track.covered + new
        shift = 0 if call.kind == "cross" else max(whole - source, 0)
        if track.pieces and not self._follows(track, call, shift, again):
            self.broken.add(call.module)
        rows = range(query - new, query)
        sizes = Sizes(query, source, *call.sizes[:2])
        track.pieces.append(Piece(_lean(call, rows), rows, sizes, shift))
        if call.key is not None and (call.kind == "self" or not track.keys):
            keys = call.key
            if call.kind == "self":
                keys = keys[:, :, whole - new - shift : whole - shift]
            # a cache is written to again, and holding a view would hold all of it
            track.keys.append(keys.clone())
        track.covered = whole

    def _follows(self, track: Track, call: Call, shift: int, again: bool) -> bool:
        """Check that the call's cache goes on from the last step's, up to an order of the batch."""
        if call.kind == "cross":
            if self._order is not None and len(self._order) == call.sizes[0]:
                _reorder(track, self._order)
            return True
        if call.key is None or again or not track.keys:
            return True
        past = torch.cat(track.keys, 2)[:, :, shift:]
        now = call.key[:, :, : past.shape[2]]
        if past.shape == now.shape and torch.equal(past, now):
            self._order = None
            return True
        order = _match(past, now)
        if order is None:
            return False
        self._order = order
        _reorder(track, order)
        return True


def _lean(call: Call, rows: range) -> Call:
    """Keep of a call only what stitching needs."""
    if call.scores is None:
        return call.but(query=_rows(call.query, rows), key=None, value=None)
    assert call.weights is not None
    assert call.lse is not None
    at = slice(rows.start, rows.stop)
    return call.but(
        key=None,
        value=None,
        scores=call.scores[:, :, at],
        weights=call.weights[:, :, at],
        lse=call.lse[:, :, at],
    )


def _match(past: Tensor, now: Tensor) -> Tensor | None:
    """Find for each sample the earlier one whose cache it goes on from."""
    if past.shape[1:] != now.shape[1:]:
        return None
    found = []
    for sample in now:
        same = [at for at, old in enumerate(past) if torch.equal(old, sample)]
        if not same:
            return None
        found.append(same[0])
    return torch.tensor(found, device=past.device)


def _reorder(track: Track, order: Tensor) -> None:
    for piece in track.pieces:
        piece.order.append(order)
    track.keys = [keys[order] if len(keys) > 1 else keys for keys in track.keys]


def join(track: Track, known: list[tuple[Tensor, Mask]]) -> Call:
    """Make one call of all steps; equal masks are shared through `known`."""
    first = track.pieces[0].call
    source = track.pieces[0].sizes.source if first.kind == "cross" else track.covered
    if first.scores is not None:
        return _join_scores(track, first, source)
    queries = [_picked(p.call.query, p.order) for p in track.pieces]
    key = torch.cat(track.keys, 2)
    mask = look.shared(_join_masks(track, source), known)
    bias = None
    if any(p.call.bias is not None for p in track.pieces):
        bias = _placed(track, source, 0.0, _bias_rows)
    return first.but(query=torch.cat(queries, 2), key=key, value=key, mask=mask, bias=bias)


def _join_scores(track: Track, first: Call, source: int) -> Call:
    low = torch.finfo(first.scores.dtype).min if first.scores is not None else -math.inf
    scores = _placed(track, source, -math.inf, lambda p: _open(p.call.scores, low))
    weights = _placed(track, source, 0.0, lambda p: p.call.weights)
    lse = torch.cat([_picked(p.call.lse, p.order) for p in track.pieces], 2)
    return first.but(scores=scores, weights=weights, lse=lse, key=None)


def _open(scores: Any, low: float) -> Tensor:
    return scores.masked_fill(scores <= low / 2, -math.inf) if scores.shape[-1] else scores


def _join_masks(track: Track, source: int) -> Tensor:
    def edges(piece: Piece) -> Tensor:
        device = track.keys[0].device
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
        rows = _picked(part(piece), piece.order)
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
    bias = bias if bias.shape[2] == 1 else _rows(bias, piece.rows)
    return bias.expand(*bias.shape[:2], len(piece.rows), piece.sizes.source)


def _rows(x: Any, rows: range) -> Tensor:
    return x[:, :, rows.start : rows.stop]


def _picked(x: Any, order: list[Tensor]) -> Tensor:
    for index in order:
        x = x[index] if x.shape[0] > 1 else x
    return x
