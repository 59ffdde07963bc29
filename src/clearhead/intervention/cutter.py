"""The handler that cuts: it follows a model's attention calls and answers other contexts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from clearhead import masks
from clearhead._capture import Call, Handler, Loop, Modules, attach, joined, nothing_seen, recompute
from clearhead._core import Sizes, value_error
from clearhead.intervention import edits
from clearhead.intervention.choosing import Chosen
from clearhead.masks import Mask

__all__ = ["Cut", "Cutter", "Edges", "OtherBatch", "Place", "Weights", "cutting"]

# Rows of the first call of a layer that are made again, and how far they may be off.
_SAMPLED = 4
_SLACK = 4.0


@dataclass(frozen=True)
class Place:
    """Where a call stands in the whole sequence: the positions of its first query and source."""

    query: int
    source: int
    generating: bool

    def edges(self, edges: Mask, call: Call) -> Mask:
        """Give the edges, which are said in positions of the whole sequence, for this call."""
        batch, heads, query, source = call.sizes
        start = self.query == self.source == 0
        if not self.generating and (start or edges.own.query == query):
            return edges
        if call.kind == "cross":
            last, width = self.query + query, source
        else:
            last = width = max(self.query + query, self.source + source)
        # Positions past the sizes that the edges were made for are cut nowhere; those that they
        # name may still come.
        own, least = edges.own, edges._least()
        last = own.query or max(last, least)
        width = own.source or (width if call.kind == "cross" else max(width, least))
        device = call.value.device if call.value is not None else None
        rows = torch.arange(self.query, self.query + query, device=device)
        columns = torch.arange(self.source, self.source + source, device=device)
        inside = (rows < last)[:, None] & (columns < width)
        sizes = Sizes(batch, heads, last, width)
        tile = edges.tile(rows.clamp(max=last - 1), columns.clamp(max=width - 1), sizes)
        return masks.dense(tile & inside)


class Cut:
    """One thing that is done to some heads, in the whole batch or in some samples of it."""

    reason = "the outputs of the heads are what they were before"

    def __init__(self, chosen: Chosen, samples: slice = slice(None)) -> None:
        self.chosen = chosen
        self.samples = samples
        self.moved: dict[tuple[int, int], float] = {}

    def context(self, context: Tensor, call: Call, heads: list[int], place: Place) -> Tensor:
        """Answer another context; a cut of edges is asked for `edges` instead."""
        return context

    def edges(self, call: Call, heads: list[int]) -> Mask:
        """Give the edges that are cut."""
        raise NotImplementedError


def key(call: Call) -> tuple[str, str]:
    """Say which attention a call belongs to."""
    return call.module, call.kind


class OtherBatch(Exception):
    """A call has not the batch that was given to the model, so that its samples are not known."""


class Cutter(Handler):
    """Cuts, in every attention call of a model, what its cuts ask for."""

    def __init__(self, model: Any) -> None:
        self.seen: Modules
        self.model = model
        self.cuts: list[Cut] = []
        self.modules: dict[int, str] = {}
        self.totals: dict[int, int] = {}
        self.notes: list[str] = []
        self.slices = [slice(None)]
        self.batch: int | None = None
        self.on_call: Callable[[Call, Place], None] | None = None
        self._checked: set[int] = set()
        self._generating = False
        self._loop: Loop | None = None
        self._start: int | None = None
        self._covered: dict[tuple[str, str], int] = {}
        self._places: dict[tuple[str, str], Place] = {}

    def after(self, call: Call, context: Tensor) -> Tensor | None:
        """Answer the context with what was cut, or None where nothing of this call is."""
        self.modules[call.layer], self.totals[call.layer] = call.module, call.sizes[1]
        if not context.numel():
            return None
        place = self._places[key(call)] = self._place(call)
        if self._generating:
            self._covered[key(call)] = place.query + call.sizes[2]
        if self.batch is not None and call.sizes[0] != self.batch:
            raise OtherBatch
        with torch.autocast(context.device.type, enabled=False):
            if self.on_call is not None:
                self.on_call(call, place)
            changed = context
            for samples in self.slices:
                for cuts, heads in self._groups(call, samples):
                    part, own = edits.narrow(call, samples, heads), context[samples][:, heads]
                    self._check(cuts, part, own)
                    new = _made_again(cuts, part, own, heads, place)
                    changed = context.clone() if changed is context else changed
                    rows = range(*samples.indices(len(context)))
                    changed[rows.start : rows.stop, heads] = new
        return None if changed is context else changed

    def _groups(self, call: Call, samples: slice) -> list[tuple[list[Cut], list[int]]]:
        """Put the heads of a call together that the same cuts are made in."""
        total = call.sizes[1]
        cuts = [cut for cut in self.cuts if cut.samples in (slice(None), samples)]

        def which(head: int) -> list[int]:
            held = enumerate(cut.chosen.holds(call.layer, head, total) for cut in cuts)
            return [number for number, holds in held if holds]

        heads = sorted(range(total), key=which)
        grouped = [(key, list(some)) for key, some in groupby(heads, key=which)]
        return [([cuts[n] for n in key], some) for key, some in grouped if key]

    def left(self, call: Call, over: bool) -> tuple[Call, bool]:
        """Give what a watch sees of a call, `over` or still to be made, and whether it is cut.

        Edges that are cut are blocked. Weights that are zeroed after the softmax, and outputs that
        are replaced, have the weights of the softmax.
        """
        groups = list(self._groups(call, slice(None)))
        place = self._places[key(call)] if over else self._place(call)
        taken = [(cuts, heads) for cuts, heads in groups if any(type(cut) is Edges for cut in cuts)]
        if taken:
            batch, total, query, source = call.sizes
            blocked = torch.zeros(batch, total, query, source, dtype=torch.bool)
            for cuts, heads in taken:
                part = edits.narrow(call, slice(None), heads)
                for cut in cuts:
                    if type(cut) is Edges:
                        there = place.edges(cut.edges(part, heads), part)
                        blocked[:, heads] |= edits.dense(there, part).cpu()
            call = edits.left(call, masks.dense(blocked.to(edits.device_of(call))))
        return call, bool(groups)

    def _check(self, cuts: list[Cut], call: Call, own: Tensor) -> None:
        """Make sure, once for each layer, that the call is understood: only then it can be cut."""
        if call.layer in self._checked or not any(isinstance(cut, Edges) for cut in cuts):
            return
        self._checked.add(call.layer)
        with torch.no_grad():
            off = recompute.difference(call, own, range(min(own.shape[2], _SAMPLED)))
            size = own.abs().nan_to_num(0.0).amax().item() if own.numel() else 0.0
        if off is not None and off > _SLACK * torch.finfo(own.dtype).eps ** 0.5 * (1 + size):
            where = f"layer {call.layer} ({call.module or 'the model'})"
            raise RuntimeError(
                f"{where}: its edges cannot be cut: between softmax and value it does more than "
                f"mix; the context made again is off by {off:.2g}"
            )

    def _place(self, call: Call) -> Place:
        _, _, query, source = call.sizes
        if not self._generating:
            start = source - query if call.kind == "self" and source > query else 0
            return Place(start, 0, False)
        whole = query == source and call.kind == "self"
        known = self._covered.get(key(call), 0) if self._start is None else self._start
        start = 0 if whole else known
        shift = 0 if call.kind == "cross" else max(start + query - source, 0)
        return Place(start, shift, True)

    def generate(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Count the positions of one `generate()` from its start."""
        if self._generating:
            return run(*args, **kwargs)
        self._generating = True
        self._covered.clear()
        try:
            return run(*args, **kwargs)
        finally:
            self._generating, self._loop, self._start = False, None, None

    def loop_begins(self, loop: Loop) -> None:
        """Follow the cache of a generation, from which tokens may be taken back."""
        self._loop = loop

    def begins(self, name: str) -> None:
        """Hear of a step of a generation."""
        if self._loop is not None and name == self._loop.module:
            self._start = self._loop.cached

    def finish(self, name: str, cut: Cut) -> None:
        """Raise where the cut reached nothing, or moved nothing."""
        self.reached(name, cut)
        if any(moved > 0 for moved in cut.moved.values()):
            return
        heads = sorted(cut.moved)
        some = ", ".join(map(str, heads[:6])) + (", ..." if heads[6:] else "")
        lines = [
            f"{name}: the cut moved nothing",
            f"  {cut.reason}",
            f"  (layer, head) reached: {some}",
        ]
        raise RuntimeError("\n".join(lines + [f"  {note}" for note in self.notes]))

    def reached(self, name: str, cut: Cut) -> None:
        """Raise where no call was seen, or not the layers and heads that were chosen."""
        if not self.totals:
            raise RuntimeError(nothing_seen(self.seen, self.notes).replace("watch:", f"{name}:", 1))
        cut.chosen.check(self.totals, self.modules)

    def unseen(self, module: str, reason: str) -> None:
        """Note an attention that cannot be cut."""
        self.notes.append(f"{module or 'the model'}: not seen, {reason}")


def _made_again(cuts: list[Cut], call: Call, own: Tensor, heads: list[int], place: Place) -> Tensor:
    """Give the context after all cuts, and let each cut know how far it moved it."""
    context = own
    for number, cut in enumerate(cuts):
        before, context = context, _cut(cuts[: number + 1], call, own, heads, place)
        with torch.no_grad():
            moved = (context - before).abs().nan_to_num(0.0).amax((0, 2, 3)).float()
            size = own.abs().nan_to_num(0.0).amax()
            if isinstance(cut, Edges) and 0 < moved.max() < 1e-3 * size:
                # This may be rounding alone: it counts where there was weight to cut.
                there = place.edges(cut.edges(call, heads), call)
                moved = moved * (edits.weight_on(call, there).amax((0, 2)) > 0)
        for head, value in zip(heads, moved.tolist(), strict=True):
            key = (call.layer, head)
            cut.moved[key] = max(cut.moved.get(key, 0.0), value)
    return context


def _cut(cuts: list[Cut], call: Call, own: Tensor, heads: list[int], place: Place) -> Tensor:
    """Make the context of some heads again: first without edges, then weights, then outputs."""
    taken, zeroed = (
        [place.edges(cut.edges(call, heads), call) for cut in cuts if type(cut) is kind]
        for kind in (Edges, Weights)
    )
    context = own
    if taken or zeroed:
        rows = edits.touched(call, _union(taken + zeroed))
        part = edits.left(call, _union(taken)) if taken else call
        new = edits.context_of(part, _union(zeroed) if zeroed else None)
        context = torch.where(rows, new.to(own.dtype), own)
    for cut in cuts:
        context = cut.context(context, call, heads, place)
    return context


def _union(edges: list[Mask]) -> Mask:
    union, *more = edges
    for other in more:
        union = union | other
    return union


class Edges(Cut):
    """A cut of edges before the softmax."""

    reason = "no weight lies on these edges in the chosen heads, or they read values of zero"

    def __init__(self, edges: Mask, chosen: Chosen, samples: slice = slice(None)) -> None:
        super().__init__(chosen, samples)
        self._edges = edges

    def edges(self, call: Call, heads: list[int]) -> Mask:
        """Give the edges that are cut, of these heads where they vary."""
        own = self._edges.own.head
        if own in (None, 1):
            return self._edges
        if own <= max(heads):
            rule = f"are made for {own} heads; layer {call.layer} ({call.module}) has more"
            raise value_error("edges", rule, got=f"head {max(heads)}", hint="give as many, or one")
        batch, _, query, source = call.sizes
        query, source = self._edges.own.query or query, self._edges.own.source or source
        dense = self._edges.dense(query, source, batch=batch, head=own)
        return masks.dense(dense[:, heads])


class Weights(Edges):
    """A cut of weights after the softmax."""


@contextlib.contextmanager
def cutting(model: Any, cuts: list[Cut], slices: list[slice] | None = None) -> Iterator[Cutter]:
    """Cut inside the block; a block within a block adds its cuts to those of the outer one."""
    model = attach.watchable(model)
    outer = joined.running(model)
    with contextlib.ExitStack() as stack:
        cutter = outer or stack.enter_context(_attached(model))
        before = cutter.cuts, cutter.slices, cutter.batch, cutter.on_call
        cutter.cuts = [*cutter.cuts, *cuts]
        cutter.slices = slices or cutter.slices
        try:
            yield cutter
        finally:
            cutter.cuts, cutter.slices, cutter.batch, cutter.on_call = before


@contextlib.contextmanager
def _attached(model: Any) -> Iterator[Cutter]:
    cutter = Cutter(model)
    with attach.attached(model, cutter) as seer:
        cutter.seen = seer.modules
        joined.join(cutter)
        try:
            yield cutter
        finally:
            joined.leave(cutter)
