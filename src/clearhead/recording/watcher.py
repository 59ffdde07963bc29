"""The handler that turns captured calls into records: at once, or at the end of a generation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead._capture import (
    Call,
    EagerCall,
    FusedCall,
    Handler,
    Interceptor,
    Loop,
    Modules,
    active_handlers,
    call_mask,
    context_difference,
    in_short,
    nothing_seen,
    plain_call,
    prompt_length,
    read_call,
    rounding_bound,
    softmax_difference,
)
from clearhead._core import is_refusal, plain, unobserved, value_error
from clearhead.attention import choose
from clearhead.masks import Mask
from clearhead.recording import packed
from clearhead.recording.records import Record, Seen
from clearhead.recording.request import Numbers, Request
from clearhead.recording.shares import in_the_whole, note_of, splits_batch
from clearhead.recording.stitch import Stitcher, stitched

__all__ = ["Watcher"]

# Rows of each call that are recomputed, to compare with the model's own output.
_SAMPLED = 4


class Watcher(Handler):
    """Turns captured calls into records."""

    def __init__(
        self,
        model: Any,
        request: Request,
        through: bool,
        on_call: Callable[[Record], None] | None,
    ) -> None:
        self.model = model
        self.modules: Modules
        self.request = request
        self.through = through
        self.on_call = on_call
        self.seen = Seen()
        self.known: dict[int, str] = {}
        self.head_counts: dict[int, int] = {}
        self.call_counts: dict[int, int] = {}
        self._most_queries = 0
        self._outer = active_handlers(model)
        self._splits_batch = splits_batch(model)
        self._made: list[Any] | None = None
        self._run: Stitcher | None = None
        self._looping = self._drafts = False
        self._masks: list[tuple[Tensor, Mask]] = []
        self._runs: dict[str, int] = {}
        self._unseen: set[str] = set()
        self._sliced: set[str] = set()
        self._held: list[tuple[Call, float | None]] = []
        self._of_callback: Exception | None = None

    @contextlib.contextmanager
    def _noting(self, module: str) -> Iterator[None]:
        """Let the model run where a call of it cannot be read; arguments are refused as ever."""
        try:
            yield
        except Exception as error:
            if is_refusal(error) or error is self._of_callback:
                raise
            self.failed(module, f"reading it failed ({in_short(error)})")

    def before(self, call: Call) -> Tensor | None:
        """Compute the context in clearhead's own kernel under `through`."""
        self._made = None
        with self._noting(call.module):
            return self._context_through(call)

    def _context_through(self, call: Call) -> Tensor | None:
        if not self.through or call.dropout or self._drafts or not self._wanted(call):
            return None
        if not isinstance(call, FusedCall) or any(x.edits for x in active_handlers(self.model)):
            return None
        if call.spread is not None:
            return None
        if self.modules.recomputed:  # by the model's own kernel, which saves other tensors
            return None
        request = self.request
        late = self._run is not None or request.waits or request.heads or request.queries
        problem, read = call.problem, () if late else request.read
        context, made = choose(problem, read).attend(problem, read)
        self._made = None if late else made
        return context

    def after(self, call: Call, context: Tensor) -> None:
        """Record a call; under `generate()`, or for layers counted from the end, later."""
        if self._drafts:
            return
        self.known[call.layer] = call.module
        self.head_counts[call.layer] = call.all_heads
        if self._run is None:
            self._count(call)
        if not self._wanted(call):
            return
        off = torch.autocast(context.device.type, enabled=False)
        with self._noting(call.module), torch.no_grad(), off, unobserved(context):
            self._after(plain_call(call), plain(context))

    def _after(self, call: Call, context: Tensor) -> None:
        whole = call
        call, edited = self._remaining(call)
        check = self._check(call, context, edited)
        self._note_slices(whole)
        if self._run is not None:
            self._run.add(call, check, self.modules.runs(self._run.module))
        elif self.request.waits:
            self._held.append((call, check))
            self._drop_held()
        else:
            self._keep(call, check)

    def _remaining(self, call: Call) -> tuple[Call, bool]:
        """Give a call as other handlers leave it, and whether any of them edits it."""
        edited = False
        for handler in active_handlers(self.model):
            left = handler.remaining(call, edited=handler in self._outer)
            if left is not None:
                call, edited = left, True
                self.note("heads are cut: readings are without the edges cut before the softmax")
        return call, edited

    def _check(self, call: Call, context: Tensor, edited: bool) -> float | None:
        """Compare sampled rows, recomputed, with the context of the model."""
        if call.dropout:
            self.note("dropout was on: readings are of the weights before it, without a check")
        if edited:
            return None
        rows = self._checked_rows(call)
        check = context_difference(call, context, rows)
        if check is not None and not check <= rounding_bound(context):
            self.note(
                f"{call.module or 'the model'}: its output differs by {check:.2g} from what "
                "the weights seen give"
            )
        return check

    def _note_slices(self, call: Call) -> None:
        """Note where heads, samples or positions of a record are not those of the layer."""
        if of_ranks := note_of(call):
            self.note(of_ranks)
        if isinstance(call, FusedCall) and call.spread is not None:
            return
        text = call.place.note(*call.sizes[2:]) if call.place else ""
        if text and call.module not in self._sliced:
            self._sliced.add(call.module)
            self.note(f"{call.module or 'the model'}: {text}")

    def _checked_rows(self, call: Call) -> list[int]:
        """Check the weights of rows against their scores, and give these rows.

        Some rows are enough, except where the model may have edited its weights.
        """
        total = call.sizes.query
        if not isinstance(call, EagerCall):
            return _sample(total)
        rows = _sample(total) if call.proven else list(range(total))
        off = softmax_difference(call, rows)
        if off is not None:
            self.note(
                f"{call.module or 'the model'}: its weights differ by {off:.2g} from the softmax "
                "of its scores: Scores and LogSumExp do not give Weights"
            )
        return rows

    def _count(self, call: Call) -> None:
        self.call_counts[call.layer] = max(self.call_counts.get(call.layer, 0), call.call + 1)

    def _wanted(self, call: Call) -> bool:
        """Whether a record may be made of this call; of a generation, calls count once stitched."""
        requested = self._run is not None or self.request.holds_call(call)
        return requested and self.request.holds_layer(call.layer)

    def _drop_held(self) -> None:
        """Of layers counted from the end, hold only as many as may still be the last."""
        layers = self.request.layers or ()
        recent = list(dict.fromkeys(call.layer for call, _ in reversed(self._held)))
        may = {*recent[: -min(layers)], *layers}
        self._held = [pair for pair in self._held if pair[0].layer in may]

    def _forward_over(self) -> None:
        """Make the records that had to wait for the number of layers."""
        held, self._held = self._held, []
        wanted = self.request.layers_of(len(self.known))
        with torch.no_grad():
            for call, check in held:
                if call.layer in wanted:
                    with self._noting(call.module):
                        self._keep(call, check)

    def generate(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Collect the steps of one `generate()`, and record each layer once at its end."""
        if self._run is not None:
            return self._drafted(run, args, kwargs) if self._looping else run(*args, **kwargs)
        self._run = Stitcher(prompt_length(self.model, args, kwargs))
        try:
            made = run(*args, **kwargs)
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._record_generation(self._run)
            return made
        finally:
            self._run, self._looping = None, False

    def _drafted(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a `generate` within the loop of another: the model drafts for itself."""
        self.note("the model drafts tokens in generate(): its drafting steps are not seen")
        self._drafts = True
        try:
            return run(*args, **kwargs)
        finally:
            self._drafts = False

    @property
    def _steps(self) -> Stitcher | None:
        """The generation that follows the steps now: none while the model drafts for itself."""
        return None if self._drafts else self._run

    def loop_starts(self, loop: Loop) -> None:
        """Start new sequences of a generation."""
        if (run := self._steps) is not None:
            self._looping = True
            run.loop_starts(loop)

    def loop_ends(self, sequences: Tensor, rows: Tensor | None) -> None:
        """Record which sequences a generation returned."""
        if (run := self._steps) is not None:
            self._looping = False
            run.loop_ends(sequences, rows)

    def module_starts(self, name: str) -> None:
        """Notify a generation, where a step may start."""
        if (run := self._steps) is not None:
            run.module_starts(name)

    def module_ends(self, name: str, positions: Callable[[], int | None]) -> None:
        """Notify a generation; after the outermost module make the records that waited."""
        if (run := self._steps) is not None:
            run.module_ends(name, positions)
        if self.modules.over:
            self._forward_over()

    def _record_generation(self, run: Stitcher) -> None:
        wanted = self.request.layers_of(len(self.known))
        for module in sorted(run.broken):
            self.note(f"{module}: its cache does not continue the last step; rows may be wrong")
        for track in run.tracks.values():
            if not track.steps:
                continue
            with self._noting(track.steps[0].call.module):
                call = stitched(track, self._masks)
                number = self._runs[call.module] = self._runs.get(call.module, -1) + 1
                call = replace(call, call=number)
                self._count(call)
                if call.layer in wanted:
                    self._keep(call, track.check, run.prompt(track))

    def _keep(self, call: Call, check: float | None, prompt: int | None = None) -> None:
        """Read a call, and append its record to `seen` or pass it to `on_call`."""
        chosen = self.request.heads_in(call)
        queries = self.request.queries_of(call.sizes.query)
        self._most_queries = max(self._most_queries, call.sizes.query)
        if not chosen or queries == () or not self.request.holds_call(call):
            return
        part = call if self.request.heads is None else call.with_heads(chosen)
        values, self._made = self._made, None
        if values is None:
            values = read_call(part, self.request.read, queries)
        value = _detached(values[0] if self.request.single else tuple(values))
        if self.on_call is None:
            self.seen._records.append(self._record(call, packed.pack(value), check, prompt))
            return
        record = self._record(call, value, check, prompt)
        try:
            self.on_call(record)
        except Exception as error:
            self._of_callback = error
            raise

    def _record(self, call: Call, value: Any, check: float | None, prompt: int | None) -> Record:
        queries = self.request.queries_of(call.sizes.query)
        mask = call_mask(call, self._masks)
        return Record(
            value=value,
            layer=call.layer,
            module=call.module,
            call=call.call,
            kind=call.kind,
            scale=call.score_scale,
            check=check,
            how=call.how,
            heads=tuple(call.heads[head] for head in self.request.heads_in(call)),
            prompt=prompt,
            read=self.request.read[0] if self.request.single else self.request.read,
            **in_the_whole(call, mask, queries, self._splits_batch),
        )

    def unseen(self, module: str, reason: str) -> None:
        """Note an attention that cannot be seen."""
        self._unseen.add(module)
        self.note(f"{module or 'the model'}: not seen, {reason}")

    def joined(self, modules: list[str]) -> None:
        """Note layers that are heads of one layer."""
        self.note(
            f"{', '.join(modules)}: their outputs are joined: each may be one head of a layer, "
            "and is a layer of its own here"
        )

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.seen.notes:
            self.seen.notes.append(text)

    def finish(self, interceptor: Interceptor) -> None:
        """Note what was missed; raise where nothing was seen, or not all that was requested."""
        self._note_missed(interceptor)
        if not self.known:
            raise RuntimeError(nothing_seen(interceptor.modules, self.seen.notes))
        total = len(self.known)
        layers = [f"{n} ({name})" if name else str(n) for n, name in self.known.items()]
        _check_seen("layers", self.request.layers, range(-total, total), ", ".join(layers))
        most = max(self.head_counts.values())
        _check_seen("heads", self.request.heads, range(-most, most), f"0..{most - 1}")
        if most := self._most_queries:
            there = range(-most, most)
            _check_seen("queries", self.request.queries, there, f"0..{most - 1}, or from -{most}")
        times = max(self.call_counts.values(), default=0)
        _check_seen("calls", self.request.calls, range(times), f"0..{times - 1}")

    def _note_missed(self, interceptor: Interceptor) -> None:
        modules, seen = interceptor.modules, set(self.known.values())
        if modules.fast:
            self.note("torch's encoder fast path hides its calls: it is off inside the block")
        for module in sorted(modules.inventory.scripted):
            self.unseen(module, "it is TorchScript")
        for module in sorted(interceptor.handwritten.unmet - seen):
            self.unseen(module, "its softmax of a product met no value in a product that is seen")
        for module, reason in interceptor.handwritten.mixing.items():
            if module not in seen:
                self.unseen(module, reason)
        for module in modules.in_threads():
            self.unseen(module, "it ran in another thread than the watch")
        for module in modules.overlooked(seen | self._unseen):
            self.unseen(module, "none of its calls was recognised as attention")
        for module, of in modules.recurrent(seen | self._unseen):
            self.unseen(module, f"{of} mixes positions without attention")


def _check_seen(name: str, wanted: Numbers, there: range, choice: str) -> None:
    missing = [number for number in wanted or () if number not in there]
    if missing:
        rule, hint = "were not all seen in the block", f"choose among {choice}"
        raise value_error(name, rule, got=missing, hint=hint)


def _sample(total: int) -> list[int]:
    """Choose rows from the first to the last, evenly."""
    if total <= _SAMPLED:
        return list(range(total))
    return sorted({round(at * (total - 1) / (_SAMPLED - 1)) for at in range(_SAMPLED)})


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return plain(value.detach())
    parts = [_detached(part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
