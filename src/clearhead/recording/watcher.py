"""From the calls that are seen to records: at once, or at the end of a generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead._capture import (
    Call,
    Handler,
    Interceptor,
    Loop,
    Modules,
    joined,
    nothing_seen,
    recompute,
    two_sided,
)
from clearhead._core import numbers, type_error, value_error
from clearhead.attention import impl
from clearhead.masks import Mask
from clearhead.readings import Reading
from clearhead.recording import packed
from clearhead.recording.records import Record, Seen
from clearhead.recording.stitch import Stitcher, join

__all__ = ["Watcher"]

# Rows of each call that are computed again, to compare with the model's own output.
_SAMPLED = 4


class Watcher(Handler):
    """Turns captured calls into records."""

    def __init__(
        self,
        model: Any,
        read: Reading | Sequence[Reading],
        layers: Any,
        heads: Any,
        queries: Any,
        calls: Any,
        through: bool,
        on_call: Callable[[Record], None] | None,
    ) -> None:
        self.model = model
        self.seer: Interceptor
        self.inside = joined.running(model) is not None
        self.single = isinstance(read, Reading)
        self.read = (read,) if isinstance(read, Reading) else tuple(read)
        for reading in self.read:
            if not isinstance(reading, Reading):
                raise type_error("read", "takes readings", got=type(reading).__name__)
        self.layers, self.heads = numbers("layers", layers), numbers("heads", heads)
        self.queries, self.calls = numbers("queries", queries), numbers("calls", calls)
        self.through = through
        self.on_call = on_call
        self.seen = Seen()
        self.known: dict[int, str] = {}
        self.head_counts: dict[int, int] = {}
        self.call_counts: dict[int, int] = {}
        self.count = 0
        self._made: list[Any] | None = None
        self._run: Stitcher | None = None
        self._looping = self._drafts = False
        self._masks: list[tuple[Tensor, Mask]] = []
        self._runs: dict[str, int] = {}
        self._unseen: set[str] = set()
        self._held: list[tuple[Call, float | None]] = []

    def before(self, call: Call) -> Tensor | None:
        """Make the context in clearhead's own kernel, where that was asked for."""
        self._made = None
        if not self.through or call.dropout or self._drafts or not self._wanted(call):
            return None
        if joined.running(self.model):
            return None
        late = self._run is not None or self._waits or self.heads or self.queries
        problem, read = call.problem, () if late else self.read
        context, made = impl.choose(problem, read, None).attend(problem, read)
        self._made = None if late else made
        return context

    def after(self, call: Call, context: Tensor) -> None:
        """Record a call; under `generate()`, or for layers counted from the end, later."""
        if self._drafts:
            return
        self.known[call.layer] = call.module
        self.head_counts[call.layer] = call.sizes[1]
        self.count += 1
        if self._run is None:
            self._times(call)
        if not self._wanted(call):
            return
        with torch.no_grad(), _full_precision(context):
            call, cut = self._left(call)
            check = None if cut else recompute.difference(call, context, _sample(call.sizes[2]))
            if call.dropout:
                self.note("dropout was on: readings are of the weights before it, without a check")
            elif check is not None and not check <= recompute.tolerance(context):
                self.note(
                    f"{call.module or 'the model'}: its output differs by {check:.2g} from what "
                    "the weights seen would make"
                )
            if self._run is not None:
                self._run.add(call, check, self.seer.modules.runs(self._run.module))
            elif self._waits:
                self._held.append((call, check))
                self._drop_held()
            else:
                self._keep(call, check)

    def _left(self, call: Call) -> tuple[Call, bool]:
        """Take off the call what `knockout` cuts in it, and say whether anything is cut."""
        cutter = joined.running(self.model)
        if cutter is None:
            return call, False
        left, cut = cutter.left(call, over=self.inside)
        if cut:
            self.note("heads are cut: readings are without the edges cut before the softmax")
        return left, cut

    @property
    def _waits(self) -> bool:
        """Whether records wait for the number of layers."""
        return self.layers is not None and min(self.layers) < 0

    def _times(self, call: Call) -> None:
        self.call_counts[call.layer] = max(self.call_counts.get(call.layer, 0), call.call + 1)

    def _wanted(self, call: Call) -> bool:
        """Whether a record may be made of this call."""
        if self._run is None and self.calls is not None and call.call not in self.calls:
            return False
        return self.layers is None or call.layer in self.layers or self._waits

    def _drop_held(self) -> None:
        """Of layers counted from the end, hold only as many as may still be the last."""
        assert self.layers is not None
        recent = list(dict.fromkeys(call.layer for call, _ in reversed(self._held)))
        may = {*recent[: -min(self.layers)], *self.layers}
        self._held = [pair for pair in self._held if pair[0].layer in may]

    def _forward_over(self) -> None:
        """Make the records that had to wait for the number of layers."""
        held, self._held = self._held, []
        total = len(self.known)
        wanted = {layer % total for layer in self.layers or () if -total <= layer < total}
        with torch.no_grad():
            for call, check in held:
                if call.layer in wanted:
                    self._keep(call, check)

    def generate(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Collect the steps of one `generate()`, and record each layer once at its end."""
        if self._run is not None:
            return self._drafted(run, args, kwargs) if self._looping else run(*args, **kwargs)
        self._run = Stitcher(self._prompt(args, kwargs))
        try:
            made = run(*args, **kwargs)
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._stitched(self._run)
            return made
        finally:
            self._run, self._looping = None, False

    def _drafted(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a `generate` within the loop of another: the model drafts for itself."""
        self.note("the model drafts tokens for itself in generate(): those steps are not seen")
        self._drafts = True
        try:
            return run(*args, **kwargs)
        finally:
            self._drafts = False

    @property
    def _steps(self) -> Stitcher | None:
        """The generation that hears of steps now: none while the model drafts for itself."""
        return None if self._drafts else self._run

    def loop_begins(self, loop: Loop) -> None:
        """Start new sequences of a generation."""
        if (run := self._steps) is not None:
            self._looping = True
            run.loop_begins(loop)

    def loop_ends(self, sequences: Tensor, rows: Tensor | None) -> None:
        """Learn which sequences came out of a generation."""
        if (run := self._steps) is not None:
            self._looping = False
            run.loop_ends(sequences, rows)

    def begins(self, name: str) -> None:
        """Let a generation know that a step may begin."""
        if (run := self._steps) is not None:
            run.begins(name)

    def ends(self, name: str, count: int | None) -> None:
        """Let a generation know of a step's end; make the records that wait for the model's."""
        if (run := self._steps) is not None:
            run.ends(name, count)
        if self.seer.modules.over:
            self._forward_over()

    def _prompt(self, args: Any, kwargs: Any) -> int | None:
        """Find how many positions the prompt of `generate()` has, where they are the decoder's."""
        if two_sided(self.model):
            given = [kwargs.get("decoder_input_ids")]
        else:
            given = [kwargs.get(name) for name in ("input_ids", "inputs", "inputs_embeds")]
            given += args[:1]
        sizes = [x.shape[1] for x in given if isinstance(x, Tensor) and x.ndim in (2, 3)]
        return sizes[0] if sizes else None

    def _stitched(self, run: Stitcher) -> None:
        total = len(self.known)
        wanted = None if self.layers is None else {layer % total for layer in self.layers}
        for module in sorted(run.broken):
            self.note(f"{module}: the cache did not go on from the last step; rows may be mixed up")
        for track in run.tracks.values():
            if not track.pieces:
                continue
            call = join(track, self._masks)
            number = self._runs[call.module] = self._runs.get(call.module, -1) + 1
            self._times(call.but(call=number))
            if wanted is None or call.layer in wanted:
                self._keep(call.but(call=number), track.check, run.prompt(track))

    def _name(self, layer: int) -> str:
        return f"{layer} ({self.known[layer]})" if self.known[layer] else str(layer)

    def unseen(self, module: str, reason: str) -> None:
        """Note an attention that cannot be seen."""
        self._unseen.add(module)
        self.note(f"{module or 'the model'}: not seen, {reason}")

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.seen.notes:
            self.seen.notes.append(text)

    def _keep(self, call: Call, check: float | None, prompt: int | None = None) -> None:
        if self.calls is not None and call.call not in self.calls:
            return
        total = call.sizes[1]
        chosen = tuple(range(total)) if self.heads is None else self.heads
        chosen = tuple(head for head in chosen if -total <= head < total)
        if not chosen:
            return
        part = call if self.heads is None else recompute.choose_heads(call, chosen)
        values, self._made = self._made, None
        values = recompute.read(part, self.read, self.queries) if values is None else values
        value = _detached(values[0] if self.single else tuple(values))
        if self.on_call is None:
            value = packed.keep(value)
        record = Record(
            value=value,
            layer=call.layer,
            module=call.module,
            call=call.call,
            kind=call.kind,
            mask=recompute.mask_of(call, self._masks),
            scale=call.scale if call.query is None else call.problem.scale,
            check=check,
            how=call.how,
            heads=tuple(head % total for head in chosen),
            queries=self.queries,
            sizes=call.sizes,
            prompt=prompt,
            source_heads=None if call.key is None else call.key.shape[1],
        )
        if self.on_call is None:
            self.seen._records.append(record)
        else:
            self.on_call(record)

    def finish(self, modules: Modules, seer: Interceptor) -> None:
        """Say what was missed; raise where nothing was seen, or nothing of what was asked for."""
        if modules.fast:
            self.note("torch's encoder fast path hides its calls: it is off inside the block")
        seen = set(self.known.values())
        for module in sorted(modules.scripted):
            self.unseen(module, "it is TorchScript")
        for module in sorted(set(seer.pending.values()) - seen):
            self.unseen(module, "its softmax of a product never met a value")
        for module in modules.in_threads():
            self.unseen(module, "it ran in another thread than the one that watches")
        for module in modules.overlooked(seen | self._unseen):
            self.unseen(module, "it made no call that attention is known by")
        for module, of in modules.recurrent(seen | self._unseen):
            self.unseen(module, f"{of} mixes positions without attention")
        if not self.count:
            raise RuntimeError(nothing_seen(modules, self.seen.notes))
        total = len(self.known)
        _known("layers", self.layers, range(-total, total), lambda n: self._name(n % total))
        most = max(self.head_counts.values())
        _known("heads", self.heads, range(-most, most), lambda n: f"0..{most - 1}")
        times = max(self.call_counts.values(), default=0)
        _known("calls", self.calls, range(times), lambda n: f"0..{times - 1}")


def _known(name: str, wanted: Any, there: Any, say: Callable[[int], str]) -> None:
    missing = [number for number in wanted or () if number not in there]
    if missing:
        known = dict.fromkeys(say(number) for number in there)
        raise value_error(
            name,
            "were not all seen in the block",
            got=missing,
            hint="choose among " + ", ".join(known),
        )


def _sample(total: int) -> list[int]:
    """Choose rows from the first to the last, evenly."""
    if total <= _SAMPLED:
        return list(range(total))
    return sorted({round(at * (total - 1) / (_SAMPLED - 1)) for at in range(_SAMPLED)})


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    parts = [_detached(part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _full_precision(like: Tensor) -> Any:
    return torch.autocast(like.device.type, enabled=False)
