"""The handler that reads the attention calls of one forward."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead._capture import (
    Call,
    FusedCall,
    FusedInterceptor,
    Handler,
    Interceptor,
    NamedInterceptor,
    active_handlers,
    context_difference,
    in_short,
    nothing_seen,
    plain_call,
    rounding_bound,
)
from clearhead._core import is_refusal, plain, unobserved
from clearhead.attention import choose
from clearhead.monitoring.packs import Packs
from clearhead.monitoring.rows import KnownRows
from clearhead.monitoring.statistics import READ, of_handwritten, of_queries
from clearhead.monitoring.steps import HeadSums, Layers

__all__ = ["Follower"]

# Rows of each call of the first forward that are computed again, to compare with the model's own.
_CHECKED = 4


class Follower(Handler):
    """Turns the attention calls of a forward into a few numbers a head."""

    names_kernels = True

    def __init__(self, model: Any, sinks: int, through: bool, wanted: tuple[int, ...] | None):
        self.model, self.sinks, self.through, self.wanted = model, sinks, through, wanted
        self.layers, self.rows, self._packs = Layers(), KnownRows(sinks), Packs()
        self.notes: list[str] = []
        self._made: list[Any] | None = None
        self._interceptor: Interceptor | None = None
        self._met = self._checking = self._fused = self._named = False
        self._kinds: dict[tuple[str, int], str] = {}
        self._ran: set[str] = set()
        self._eager = False

    @property
    def interceptor(self) -> type[Interceptor]:
        """What intercepts the next forward: calls of kernels alone, where there are no others."""
        if not self._fused:
            return Interceptor
        return NamedInterceptor if self._named else FusedInterceptor

    def begin(self, interceptor: Interceptor) -> None:
        """Start a forward; only the first one is checked row by row."""
        self._interceptor, self._met = interceptor, False
        self._packs = Packs()
        self._checking = not self.layers.numbers
        self._seen: set[str] = set()
        if not self._fused:
            self._kinds.clear()
        self.rows.forget()

    def end(self) -> HeadSums | None:
        """Give the numbers of the forward, or None where no layer was read; raise if none ran."""
        interceptor, self._interceptor = self._interceptor, None
        assert interceptor is not None
        if not self._fused or interceptor.modules.ran != self._ran:
            self._note_missed(interceptor)
        self._note_threads(interceptor)
        self._choose(interceptor)
        if not self._met and not self.layers.numbers:
            raise RuntimeError(nothing_seen(interceptor.modules, self.notes, "monitor"))
        if not self._met:
            self._note("", "a later forward made no attention call that was seen")
        try:
            with torch.no_grad():
                return HeadSums.of(self._packs.take(), self.layers)
        except Exception as error:
            self._note("", f"its numbers could not be added up ({in_short(error)})")
            return None

    def _choose(self, interceptor: Interceptor) -> None:
        """Decide whether the next forward needs the interceptor that follows every tensor."""
        modules = interceptor.modules
        if not self._fused:
            kernels = interceptor.plain and not interceptor.handwritten.unmet
            self._fused = kernels and not self._eager
            self._named = interceptor.named == interceptor.kernels
            self._ran = set(modules.ran)
            return
        silent = {x.module for x in self.layers.numbers} & modules.ran - self._seen
        for module in sorted(silent):
            self._note(module, "its attention took another way at one step, which was not read")
        self._fused = not silent and modules.ran <= self._ran

    def before(self, call: Call) -> Tensor | None:
        """Compute the context in clearhead's own kernel under `through`."""
        self._made = None
        if not (self.through and isinstance(call, FusedCall)) or not self._serves(call):
            return None
        context, made = choose(call.problem, READ).attend(call.problem, READ)
        self._made = [x.detach() for x in made]
        return context

    def _serves(self, call: FusedCall) -> bool:
        assert self._interceptor is not None
        if (
            call.spread is not None
            or call.dropout
            or any(x.edits for x in active_handlers(self.model))
        ):
            return False
        # Backward runs a checkpointed block again by the model's own kernel.
        return self._wanted(call) and not self._interceptor.modules.recomputed

    def _wanted(self, call: Call) -> bool:
        """Whether a layer is read; layers that count from the end are known after a forward."""
        number = self.layers.number(call.module, call.all_heads)
        if self.wanted is None or (self._checking and min(self.wanted) < 0):
            return True
        total = len(self.layers.numbers)
        return number in {x % total for x in self.wanted if -total <= x < total}

    def after(self, call: Call, context: Tensor) -> None:
        """Read a call; a call that cannot be read is noted, and the model goes on."""
        self._met = True
        self._seen.add(call.module)
        self._eager |= not isinstance(call, FusedCall)
        if self._fused:
            kind = self._kinds.get((call.module, call.call), "self")
            call = call if kind == call.kind else replace(call, kind=kind)
        self._kinds[call.module, call.call] = call.kind
        made, self._made = self._made, None
        if not self._wanted(call):
            return
        try:
            with torch.no_grad(), _exact(context), unobserved(context):
                self._read(plain_call(call), plain(context), made)
        except Exception as error:
            if is_refusal(error):
                raise
            self.failed(call.module, f"reading it failed ({in_short(error)})")

    def _read(self, call: Call, context: Tensor, made: list[Any] | None) -> None:
        if self._checking:
            self._check(call, context)
        number = self.layers.number(call.module, call.all_heads)
        if isinstance(call, FusedCall):
            rows = self.rows.of(call)
            self._packs.add(number, call, of_queries(call, context, rows, made), rows)
        else:
            self._packs.add_sums(number, call.heads, *of_handwritten(call, context, self.sinks))

    def _check(self, call: Call, context: Tensor) -> None:
        total = call.sizes.query
        rows = sorted({round(at * (total - 1) / (_CHECKED - 1)) for at in range(_CHECKED)})
        off = context_difference(call, context, rows if total else [])
        if off is not None and off > rounding_bound(context):
            self._note(call.module, f"its output differs by {off:.2g} from what was read")

    def unseen(self, module: str, reason: str) -> None:
        """Warn of an attention that cannot be seen."""
        self._note(module, f"not seen, {reason}")

    def remark(self, text: str) -> None:
        """Note what is done otherwise than without a monitor."""
        self._note("", text)

    def _note(self, module: str, text: str) -> None:
        note = f"{module or 'the model'}: {text}"
        if note not in self.notes:
            self.notes.append(note)
            warnings.warn(f"monitor: {note}", UserWarning, stacklevel=2)

    def _note_missed(self, interceptor: Interceptor) -> None:
        modules, handwritten = interceptor.modules, interceptor.handwritten
        seen = {layer.module for layer in self.layers.numbers}
        for module in modules.inventory.scripted:
            self.unseen(module, "it is TorchScript")
        for module in sorted(handwritten.unmet - seen):
            self.unseen(module, "its softmax of a product met no value in a product that is seen")
        for module, reason in handwritten.mixing.items():
            if module not in seen:
                self.unseen(module, reason)
        for module in modules.overlooked(seen):
            self.unseen(module, "none of its calls was recognised as attention")

    def _note_threads(self, interceptor: Interceptor) -> None:
        for module in interceptor.modules.in_threads():
            self.unseen(module, "it ran in another thread than the model")


def _exact(context: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Turn autocast off, where it is on."""
    kind = context.device.type
    on = torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else contextlib.nullcontext()
