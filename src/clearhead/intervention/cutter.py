"""The handler that cuts: it follows the attention calls of a model and replaces contexts."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from clearhead import masks
from clearhead._capture import (
    Call,
    EagerCall,
    Handler,
    Loop,
    Modules,
    active_handlers,
    attached,
    dense_edges,
    nothing_seen,
    watchable,
)
from clearhead.intervention import edits, proof
from clearhead.intervention.cuts import Cut, EdgeCut, Offsets
from clearhead.masks import Mask

__all__ = ["Cutter", "OtherBatch", "cutting"]


class OtherBatch(Exception):
    """A call has another batch than the model was given, so that its samples are not known."""


class Cutter(Handler):
    """Applies its cuts in every attention call of a model."""

    edits = True

    def __init__(self, model: Any) -> None:
        self.modules: Modules
        self.model = model
        self.cuts: list[Cut] = []
        self.names: dict[int, str] = {}
        self.totals: dict[int, int] = {}
        self.ranks = False  # whether other ranks hold other heads
        self.spread = False  # whether they have other queries
        self.notes: list[str] = []
        self.mixing: dict[str, str] = {}
        self.slices = [slice(None)]
        self.batch: int | None = None
        self.on_call: Callable[[Call, Offsets], None] | None = None
        self._proven: set[int] = set()
        self._acted: set[str] = set()
        self._generating = False
        self._loop: Loop | None = None
        self._start: int | None = None
        self._covered: dict[tuple[str, str], int] = {}
        self._offsets: dict[tuple[str, str], Offsets] = {}

    def after(self, call: Call, context: Tensor) -> Tensor | None:
        """Return the context after all cuts, or None where no cut acts on this call."""
        self.names[call.layer], self.totals[call.layer] = call.module, call.all_heads
        self.ranks = self.ranks or call.ranks
        self.spread = self.spread or proof.is_spread(call)
        if not context.numel():
            return None
        offsets = self._offsets[_module_of(call)] = self._locate(call)
        if self._generating:
            self._covered[_module_of(call)] = offsets.query + call.sizes.query
        if self.batch is not None and call.sizes.batch != self.batch:
            raise OtherBatch
        with torch.autocast(context.device.type, enabled=False):
            if self.on_call is not None:
                self.on_call(call, offsets)
            changed = context
            for samples in self.slices:
                for cuts, heads in self._groups(call, samples):
                    proof.prove_place(call, cuts)
                    proof.prove_alone(call)
                    if call.place and call.place.windowed and _edges_in(cuts):
                        proof.prove_order(call)
                    at = slice(None) if len(heads) == call.sizes.head else heads
                    part, own = edits.narrowed(call, samples, heads), context[samples][:, at]
                    new = _after_cuts(cuts, part, own, heads, offsets, self._prove)
                    changed = context.clone() if changed is context else changed
                    rows = range(*samples.indices(len(context)))
                    changed[rows.start : rows.stop, at] = new
        if changed is context:
            return None
        self._acted.add(call.module)
        self._refuse_recomputed(call)
        return changed

    def _refuse_recomputed(self, call: Call) -> None:
        """Refuse a call that backward makes again: it would then be one without cuts."""
        if self.modules.recomputed:
            raise RuntimeError(
                f"{proof.named(call)}: a model under activation checkpointing cannot be cut: "
                "backward makes its calls again, without the cut; turn checkpointing off, "
                "or run the model under torch.no_grad()"
            )

    def _groups(self, call: Call, samples: slice) -> list[tuple[list[Cut], list[int]]]:
        """Group the heads of a call by the cuts that act on them."""
        cuts = [cut for cut in self.cuts if cut.samples in (slice(None), samples)]

        def which(head: int) -> list[int]:
            name, total = call.heads[head], call.all_heads
            held = enumerate(cut.selection.holds(call.layer, name, total) for cut in cuts)
            return [number for number, holds in held if holds]

        heads = sorted(range(call.sizes.head), key=which)
        grouped = [(key, list(some)) for key, some in groupby(heads, key=which)]
        return [([cuts[n] for n in key], some) for key, some in grouped if key]

    def remaining(self, call: Call, *, edited: bool) -> Call | None:
        """Give a call without the edges that are cut before the softmax.

        Weights that are zeroed after the softmax, and outputs that are replaced, have the weights
        of the softmax.
        """
        groups = self._groups(call, slice(None))
        if not groups:
            return None
        offsets = self._offsets.get(_module_of(call)) if edited else None
        offsets = offsets or self._locate(call)
        blocked = None
        for cuts, heads in groups:
            part = edits.narrowed(call, slice(None), heads)
            for cut in cuts:
                if isinstance(cut, EdgeCut) and cut.before_softmax:
                    if blocked is None:
                        blocked = torch.zeros(call.sizes, dtype=torch.bool)
                    edges = cut.edges(part, heads, offsets)
                    blocked[:, heads] |= dense_edges(edges, part).cpu()
        if blocked is None:
            return call
        return edits.without(call, masks.dense(blocked.to(call.device)))

    def _prove(self, cuts: list[EdgeCut], call: Call, own: Tensor, rows: Tensor) -> None:
        """Prove that a call is what its cuts assume; of a kernel, once for each layer."""
        if call.layer in self._proven:
            return proof.prove_order(call)
        touched = rows.any(0).any(0).flatten().expand(own.shape[2]).nonzero().flatten().tolist()
        proof.prove(call, own, touched, softmax=any(cut.before_softmax for cut in cuts))
        proof.prove_order(call)
        if touched and not isinstance(call, EagerCall):
            self._proven.add(call.layer)

    def _locate(self, call: Call) -> Offsets:
        _, _, query, source = call.sizes
        if call.place is not None and call.place.query is not None:
            return _sliced(call, *call.place.query)
        if not self._generating:
            start = source - query if call.kind == "self" and source > query else 0
            return Offsets(start, 0, False)
        whole = query == source and call.kind == "self"
        known = self._covered.get(_module_of(call), 0) if self._start is None else self._start
        start = 0 if whole else known
        shift = 0 if call.kind == "cross" else max(start + query - source, 0)
        return Offsets(start, shift, True)

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

    def loop_starts(self, loop: Loop) -> None:
        """Follow the cache of a generation, from which tokens may be removed."""
        self._loop = loop

    def module_starts(self, name: str) -> None:
        """Read at the start of each step how many positions the cache holds."""
        if self._loop is not None and name == self._loop.module:
            self._start = self._loop.cached

    def finish(self, name: str, cut: Cut) -> None:
        """Raise where the cut reached nothing, or changed nothing."""
        self.reached(name, cut)
        if self.spread or any(moved > 0 for moved in cut.moved.values()):
            return
        if self.ranks and not cut.moved:
            return
        heads = sorted(cut.moved)
        some = ", ".join(map(str, heads[:6])) + (", ..." if heads[6:] else "")
        lines = [
            f"{name}: the cut changed nothing",
            f"  {cut.reason}",
            f"  (layer, head) reached: {some}",
        ]
        raise RuntimeError("\n".join(lines + [f"  {note}" for note in self.notes]))

    def reached(self, name: str, cut: Cut) -> None:
        """Raise where no call was seen, or not the layers and heads that were selected."""
        if not self.totals:
            for module, reason in self.mixing.items():
                self.unseen(module, reason)
            text = nothing_seen(self.modules, self.notes)
            raise RuntimeError(text.replace("watch:", f"{name}:", 1))
        cut.selection.check(self.totals, self.names)

    def failed(self, module: str, reason: str) -> None:
        """Refuse to run a call that cannot be cut."""
        raise RuntimeError(f"{module or 'the model'}: attention that cannot be cut: {reason}")

    def unseen(self, module: str, reason: str) -> None:
        """Note an attention that cannot be cut."""
        self.notes.append(f"{module or 'the model'}: not seen, {reason}")

    def elsewhere(self, module: str, reason: str) -> None:
        """Refuse a cut of weights that also act where they are not cut."""
        if module in self._acted:
            where = module or "the model"
            raise RuntimeError(f"{where}: cannot be cut: {reason}, and one product alone is seen")
        self.unseen(module, reason)


def _sliced(call: Call, first: int, queries: int) -> Offsets:
    """Give the offsets of a call on some of the queries of a longer one."""
    shift, sources = (call.place and call.place.source) or (0, call.sizes.source)
    cached = max(sources - queries, 0) if call.kind == "self" else 0
    return Offsets(first + cached, shift, False, (queries + cached, sources))


def _edges_in(cuts: list[Cut]) -> bool:
    return any(isinstance(cut, EdgeCut) for cut in cuts)


def _module_of(call: Call) -> tuple[str, str]:
    """Name the attention that a call belongs to."""
    return call.module, call.kind


def _after_cuts(
    cuts: list[Cut],
    call: Call,
    own: Tensor,
    heads: list[int],
    offsets: Offsets,
    prove: Callable[[list[EdgeCut], Call, Tensor, Tensor], None],
) -> Tensor:
    """Give the context after all cuts, and record in each cut how far it moved the context."""
    context = own
    for number, cut in enumerate(cuts):
        every = number + 1 == len(cuts)
        made = _cut(cuts[: number + 1], call, own, heads, offsets, prove if every else None)
        before, context = context, made
        with torch.no_grad():
            moved = (context - before).abs().nan_to_num(0.0).amax((0, 2, 3)).float()
            size = own.abs().nan_to_num(0.0).amax()
            if isinstance(cut, EdgeCut) and 0 < moved.max() < 1e-3 * size:
                # This may be rounding alone: it counts only where there was weight to cut.
                weight = edits.weight_on(call, cut.edges(call, heads, offsets))
                moved = moved * (weight.amax((0, 2)) > 0)
        for head, value in zip(heads, moved.tolist(), strict=True):
            key = (call.layer, call.heads.start + head)
            cut.moved[key] = max(cut.moved.get(key, 0.0), value)
    return context


def _cut(
    cuts: list[Cut],
    call: Call,
    own: Tensor,
    heads: list[int],
    offsets: Offsets,
    prove: Callable[[list[EdgeCut], Call, Tensor, Tensor], None] | None,
) -> Tensor:
    """Recompute the context of some heads: without edges, without weights, then replaced."""
    pairs = [(x, x.edges(call, heads, offsets)) for x in cuts if isinstance(x, EdgeCut)]
    removed = _union([edges for cut, edges in pairs if cut.before_softmax])
    zeroed = _union([edges for cut, edges in pairs if not cut.before_softmax])
    context = own
    if pairs:
        edit = edits.edit(call, removed, zeroed)
        rows = edit.rows
        if prove is not None:
            prove([cut for cut, _ in pairs], call, own, rows)
        context = torch.where(rows, edit.context().to(own.dtype), own)
    for cut in cuts:
        context = cut.context(context, call, heads, offsets)
    return context


def _union(edges: list[Mask]) -> Mask | None:
    return functools.reduce(operator.or_, edges) if edges else None


@contextlib.contextmanager
def cutting(model: Any, cuts: list[Cut], slices: list[slice] | None = None) -> Iterator[Cutter]:
    """Cut inside the block; a block within a block adds its cuts to those of the outer one."""
    model = watchable(model)
    outer = [one for one in active_handlers(model) if isinstance(one, Cutter)]
    with contextlib.ExitStack() as stack:
        cutter = outer[-1] if outer else stack.enter_context(_attached(model))
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
    with attached(model, cutter) as interceptor:
        cutter.modules, cutter.mixing = interceptor.modules, interceptor.handwritten.mixing
        yield cutter
