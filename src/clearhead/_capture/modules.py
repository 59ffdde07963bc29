"""Which module of a model is running, and the numbers of its attention calls."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from clearhead._capture.axes import Place, held_heads
from clearhead._capture.call import Call
from clearhead._capture.handler import Handler, in_short
from clearhead._capture.provenance import Provenance, tensors
from clearhead._capture.transformers import InterfaceCall, called_positions, declares_cross
from clearhead._core import is_mapped, value_error

__all__ = ["Modules", "Sites"]

_ATTENDS = re.compile(r"attention|attn", re.IGNORECASE)
_MIXES = re.compile(r"mamba|ssm|rwkv|lstm|gru|rnn|hyena|retention|conv|fourier|fnet|mixer", re.I)
_RECURS = re.compile(
    r"mamba|mixer|ssm|rwkv|lstm|gru|rnn|hyena|retention|recurrent|deltanet|linearattention"
    r"|shortconv|fourier",
    re.IGNORECASE,
)
# The watched models, by a token each, that the running context has entered.
_entered: contextvars.ContextVar[frozenset[object]] = contextvars.ContextVar(
    "entered", default=frozenset()
)
_HEADS = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "heads", "h")
_CHECKPOINTS = torch.utils.checkpoint.__file__
_FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def _within(name: str, other: str) -> bool:
    """Whether a module is another one, or inside it."""
    return not other or name == other or name.startswith(other + ".")


def _plain(name: str) -> str:
    """Leave out of a dotted name what `torch.compile` put in."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _current_task() -> Any:
    """Give the task of asyncio that runs now, if any."""
    asyncio = sys.modules.get("asyncio")
    try:
        return None if asyncio is None else asyncio.current_task()
    except RuntimeError:  # no loop runs
        return None


def _needs_gradient(context: Any) -> bool:
    """Whether this belongs to an autograd function, whose forward runs, with a gradient."""
    known = isinstance(context, torch.autograd.function.FunctionCtx)
    return known and any(getattr(context, "needs_input_grad", ()))


def _positions(x: Tensor) -> Iterator[int]:
    """Give the sizes of an input that may be a number of positions."""
    if x.ndim < 4:
        yield from x.shape[:-1] if x.is_floating_point() else x.shape[1:]
        return
    yield x.shape[-2]
    yield math.prod(x.shape[2:])
    yield math.prod(x.shape[1:-1])


def _outermost(names: list[str]) -> list[str]:
    return [name for name in names if not any(_within(name, o) for o in names if o != name)]


class Modules:
    """The stack of running modules of one model, in the thread that watches it.

    For a plain function there are no modules: every call counts, under the empty name.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.names: dict[int, str] = {}
        self.ran: set[str] = set()
        self.elsewhere: set[str] = set()
        self.scripted: set[str] = set()
        self.fast = False
        self._learning = True
        self.notify_nobody()
        self._stack: list[str] = []
        self._given: list[Any] = []
        self._thread, self._task, self._token = threading.get_ident(), _current_task(), object()
        named = list(model.named_modules()) if isinstance(model, nn.Module) else []
        self.by_name = {_plain(name): module for name, module in named}
        for name, module in self.by_name.items():
            if isinstance(module, torch.jit.ScriptModule):
                self.scripted.add(name)
            else:
                self.names[id(module)] = name
        self.eager = len(named) == len(self.by_name) and not self.compiled

    def notify_nobody(self) -> None:
        """Forget who is notified: after a block, a cycle would keep what was recorded in it."""
        self.on_start: Callable[[str], None] = lambda name: None
        self.on_end: Callable[[str, int | None], None] | None = None
        self.on_inputs: Callable[[Any], None] = lambda given: None

    @property
    def here(self) -> bool:
        """Whether the code runs in the thread that watches, and in its task or one that it made.

        A block that a task entered, and outlived, is watched by the whole thread.
        """
        if threading.get_ident() != self._thread:
            return False
        return self._task is None or self._task.done() or self._token in _entered.get()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Mark what runs inside the block, and tasks that are made there."""
        _entered.set(_entered.get() | {self._token})
        try:
            yield
        finally:
            _entered.set(_entered.get() - {self._token})

    @property
    def compiled(self) -> list[nn.Module]:
        """The modules that `module.compile()` was called on."""
        return [module for module in self.by_name.values() if module._compiled_call_impl]

    @property
    def active(self) -> bool:
        """Whether a call made now is the model's."""
        return bool(self._stack) or not self.by_name

    def runs(self, name: str) -> bool:
        """Whether the module of this name, or one inside it, runs now."""
        return name in self._stack

    @property
    def recomputed(self) -> bool:
        """Whether backward will run again what runs now, as activation checkpointing does."""
        frame = inspect.currentframe() if self._learning else None
        while frame is not None:
            if frame.f_code.co_name == "checkpoint" and frame.f_code.co_filename == _CHECKPOINTS:
                if frame.f_locals.get("use_reentrant") is False and torch.is_grad_enabled():
                    return True
            elif frame.f_code.co_name == "forward" and _needs_gradient(frame.f_locals.get("ctx")):
                return True
            frame = frame.f_back
        return False

    @property
    def over(self) -> bool:
        """Whether no module of the model runs."""
        return not self._stack

    @property
    def current(self) -> str:
        """The dotted name of the innermost running module."""
        return self._stack[-1] if self._stack else ""

    @property
    def positions(self) -> set[int]:
        """The sizes that may be numbers of positions, of what the running modules were given."""
        sizes = {size for x in tensors(self._given) for size in _positions(x)}
        return sizes - {0, 1}

    def named(self, module: Any) -> str:
        """Give the dotted name of a module of the model."""
        return self.names.get(id(module), self.current)

    def declares_cross(self, name: str) -> bool | None:
        """Whether a module is cross attention by its own attribute or name, where either says."""
        return declares_cross(self.by_name.get(name), name)

    def declared_heads(self, name: str) -> int:
        """Give how many heads a module says that it has; 0 where it does not say."""
        module = self.by_name.get(name)
        found = [getattr(module, name, None) for name in _HEADS]
        return next((x for x in found if isinstance(x, int)), 0)

    def overlooked(self, seen: set[str]) -> list[str]:
        """Name the modules called attention that ran without a call that was seen."""
        found = []
        for name in sorted(self.ran):
            if not _ATTENDS.search(type(self.by_name[name]).__name__) or not name:
                continue
            if not any(_within(name, other) or _within(other, name) for other in seen):
                found.append(name)
        return _outermost(found)

    def recurrent(self, seen: set[str]) -> list[tuple[str, str]]:
        """Name the modules that ran and mix positions by other means, with their classes."""
        whole, found = type(self.model).__name__, {}
        for name in sorted(self.ran - {""}):
            of = type(self.by_name[name]).__name__
            # Of RecurrentGemmaMLP in RecurrentGemma only MLP names what the module does.
            same = sum(1 for _ in takewhile(lambda x: x[0] == x[1], zip(of, whole, strict=False)))
            if _RECURS.search(of[same:]) and not any(_within(other, name) for other in seen):
                found[name] = of
        return [(name, found[name]) for name in _outermost(list(found))]

    def in_threads(self) -> list[str]:
        """Name the outermost modules that ran in other threads only."""
        return _outermost(sorted(self.elsewhere - self.ran))

    def mixers(self) -> list[str]:
        """Name the classes of the modules that ran and may mix positions without attention."""
        classes = {type(self.by_name[name]).__name__ for name in self.ran}
        return sorted(name for name in classes if _MIXES.search(name) or _ATTENDS.search(name))

    def takes_fast_path(self, module: nn.Module, inputs: tuple[Any, ...]) -> bool:
        """Whether torch would run this module through its fused encoder path."""
        if module.training or not isinstance(module, _FAST):
            return False
        if isinstance(module, nn.MultiheadAttention) and len({*map(id, inputs[:3])}) > 1:
            return False
        if not torch.backends.mha.get_fastpath_enabled():
            return False
        learning = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        return not learning

    @contextlib.contextmanager
    def running(self, module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """Keep a module on the stack while the block runs; note one that runs in another thread."""
        before, done = self._enter(module, args, kwargs), False
        try:
            yield
            done = True
        finally:
            self._leave(before, args, kwargs, done)

    def run(self, own: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module in such a block, in less time."""
        before, done = self._enter(module, args, kwargs), False
        try:
            answer = own(module, *args, **kwargs)
            done = True
        finally:
            self._leave(before, args, kwargs, done)
        return answer

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Put a module on the stack, and give the stacks as they were; None in another thread."""
        name = self.names[id(module)]
        if not self.here:
            if threading.get_ident() != self._thread:
                self.elsewhere.add(name)
            return None
        self.ran.add(name)
        if not self._stack:
            self._learning = torch.is_grad_enabled()
        self.fast = self.fast or self.takes_fast_path(module, args)
        before, given = list(self._stack), list(self._given)
        if not before:
            self.on_inputs((args, kwargs))
        self._stack.append(name)
        self._given.append((args, kwargs))
        self.on_start(name)
        return name, before, given

    def _leave(self, entered: Any, args: Any, kwargs: Any, done: bool) -> None:
        """Restore the stacks, and notify of a module that has not failed."""
        if entered is None:
            return
        name, self._stack[:], self._given[:] = entered
        if done and self.on_end is not None:
            self.on_end(name, called_positions(args, kwargs))


class Sites:
    """Gives each call of one run its module, layer, number and kind."""

    def __init__(self, modules: Modules, provenance: Provenance, reads_values: bool) -> None:
        self._modules = modules
        self._provenance = provenance
        self._reads_values = reads_values
        self._through: list[InterfaceCall] = []
        self._layers: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._kinds: dict[str, str] = {}
        self._slices: dict[str, str] = {}

    @property
    def listening(self) -> bool:
        """Whether a call made now belongs to the model, and is not recomputed by a checkpoint."""
        return self._modules.active and torch._C._current_graph_task_id() == -1

    @property
    def positions(self) -> set[int]:
        """The sizes that may be numbers of positions."""
        return self._modules.positions

    @property
    def of_modules(self) -> bool:
        """Whether the model is a module, whose inputs are known."""
        return bool(self._modules.names)

    @property
    def running(self) -> str:
        """The dotted name of the module that makes a call now."""
        return self._through[-1].module if self._through else self._modules.current

    @property
    def interface(self) -> InterfaceCall | None:
        """The call of an attention interface that is in progress, if any."""
        return self._through[-1] if self._through else None

    @contextlib.contextmanager
    def through(self, call: InterfaceCall) -> Iterator[InterfaceCall]:
        """Run inside a call of an attention interface."""
        self._through.append(call)
        try:
            yield call
        finally:
            self._through.pop()

    def seen(self) -> None:
        """Note that the call in progress of an attention interface has been seen."""
        if self._through:
            self._through[-1].seen = True

    def unreadable(self, given: Any) -> str | None:
        """Say why nobody may read the tensors of a call, if so."""
        for tensor in tensors(given):
            if tensor.is_nested:
                return "its tensors are nested (jagged), and one weight map has no such lengths"
            if hasattr(tensor, "device_mesh"):
                return "its tensors are DTensors: let the projections give the local ones"
            if is_mapped(tensor):
                return "it runs inside of torch.vmap, where no values can be read"
        return None

    def not_followed(self, handler: Handler) -> Callable[[Any, Exception], None]:
        """Report to a handler a function whose result could not be followed."""

        def report(func: Any, error: Exception) -> None:
            name = getattr(func, "__name__", str(func))
            handler.unseen(
                self.running, f"the result of {name} could not be followed ({in_short(error)})"
            )

        return report

    def roots(self, query: Tensor, key: Tensor) -> tuple[int, int] | None:
        """Give what query and key descend from, where both are known."""
        left, right = self._provenance.origin(query), self._provenance.origin(key)
        return (left.root, right.root) if left and right else None

    def locate(self, call: Call, roots: tuple[int, int] | None) -> Call:
        """Give the call its module, layer, number and kind."""
        if self._reads_values and call.value.is_meta:
            rule = "is on the meta device, where tensors have no values"
            raise value_error("model", rule, hint="clearhead.estimate needs shapes only")
        module = self.running
        layer = self._layers.setdefault(module, len(self._layers))
        number = self._calls[module] = self._calls.get(module, -1) + 1
        kind, place = self._kind(module, roots), self._confirmed(module, call)
        held = held_heads(self._modules.by_name, module, call)
        place = place if held is None else replace(place or Place(), heads=held)
        return replace(call, module=module, layer=layer, call=number, kind=kind, place=place)

    def _confirmed(self, module: str, call: Call) -> Place | None:
        """Take a call for a slice of samples and heads once another call has other ones.

        The first of several projections that are packed into one looks like a slice as well.
        """
        place, batch = call.place, call.sizes.batch
        if place is not None and place.flat:
            heads = self._modules.declared_heads(module)
            if heads > 1 and batch % heads == 0:
                text = f"its {heads} heads lie in a batch of {batch}, in an order that is not known"
                return replace(place, rows=text)
        if place is not None and place.turned:
            return replace(place, rows="its heads come before the batch, or are one axis with it")
        if place is None or not place.rows:
            return place
        first = self._slices.setdefault(module, place.rows)
        return replace(place, rows="") if first == place.rows else place

    def _kind(self, module: str, roots: tuple[int, int] | None) -> str:
        """Tell self from cross attention by whether query and key descend from one input."""
        declared = self._modules.declares_cross(module)
        if declared is not None:
            return "cross" if declared else "self"
        if roots is None:
            return self._kinds.get(module, "self")
        return self._kinds.setdefault(module, "self" if roots[0] == roots[1] else "cross")
