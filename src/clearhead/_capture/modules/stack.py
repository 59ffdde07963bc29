"""Which module of a model is running, in the thread that watches it."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from clearhead._capture.modules.inventory import Inventory, outermost
from clearhead._capture.provenance import tensors
from clearhead._capture.transformers import called_positions

__all__ = ["Modules"]

# The watched models, by a token each, that the running context has entered.
_entered: contextvars.ContextVar[frozenset[object]] = contextvars.ContextVar(
    "entered", default=frozenset()
)
# Every module asks for it; a global name is found faster than an attribute.
_thread = threading.get_ident
_CHECKPOINTS = torch.utils.checkpoint.__file__
_FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


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


class Modules:
    """The stack of running modules of one model, in the thread that watches it.

    For a plain function there are no modules: every call counts, under the empty name.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.inventory, self.model, self.names = inventory, inventory.model, inventory.names
        self.ran: set[str] = set()
        self.elsewhere: set[str] = set()
        self.fast = False
        self.eager = inventory.eager  # before the block sets aside what is compiled
        self._learning = True
        self.notify_nobody()
        self._stack: list[str] = []
        self._given: list[Any] = []
        self._thread, self._task, self._token = _thread(), _current_task(), object()

    def notify_nobody(self) -> None:
        """Forget who is notified: after a block, a cycle would keep what was recorded in it."""
        self.on_start: Callable[[str], None] | None = None
        self.on_end: Callable[[str, Callable[[], int | None]], None] | None = None
        self.on_inputs: Callable[[Any], None] = lambda given: None

    @property
    def here(self) -> bool:
        """Whether the code runs in the thread that watches, and in its task or one that it made.

        A block that a task entered, and outlived, is watched by the whole thread.
        """
        if _thread() != self._thread:
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
    def active(self) -> bool:
        """Whether a call made now is the model's."""
        return bool(self._stack) or not self.inventory.by_name

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

    def overlooked(self, seen: set[str]) -> list[str]:
        """Name the modules called attention that ran without a call that was seen."""
        return self.inventory.attending(self.ran, seen)

    def recurrent(self, seen: set[str]) -> list[tuple[str, str]]:
        """Name the modules that ran and mix positions by other means, with their classes."""
        return self.inventory.recurrent(self.ran, seen)

    def in_threads(self) -> list[str]:
        """Name the outermost modules that ran in other threads only."""
        return outermost(sorted(self.elsewhere - self.ran)) if self.elsewhere else []

    def mixers(self) -> list[str]:
        """Name the classes of the modules that ran and may mix positions without attention."""
        return self.inventory.mixers(self.ran)

    def takes_fast_path(self, module: nn.Module, inputs: tuple[Any, ...]) -> bool:
        """Whether torch would run one of its modules through its fused encoder path."""
        if module.training:
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
        entered = self._enter(module, args, kwargs)
        if entered is None:
            return own(module, *args, **kwargs)
        name, stack, given = entered
        try:
            answer = own(module, *args, **kwargs)
        finally:
            self._stack[:], self._given[:] = stack, given
        if self.on_end is not None:
            self.on_end(name, partial(called_positions, args, kwargs))
        return answer

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Put a module on the stack, and give the stacks as they were; None in another thread."""
        name = self.names[id(module)]
        if _thread() != self._thread:
            self.elsewhere.add(name)
            return None
        if self._task is not None and not self.here:
            return None
        self.ran.add(name)
        if not self._stack:
            self._learning = torch.is_grad_enabled()
        if not self.fast and isinstance(module, _FAST):
            self.fast = self.takes_fast_path(module, args)
        before, given = list(self._stack), list(self._given)
        if not before:
            self.on_inputs((args, kwargs))
        self._stack.append(name)
        self._given.append((args, kwargs))
        if self.on_start is not None:
            self.on_start(name)
        return name, before, given

    def _leave(self, entered: Any, args: Any, kwargs: Any, done: bool) -> None:
        """Restore the stacks, and notify of a module that has not failed."""
        if entered is None:
            return
        name, self._stack[:], self._given[:] = entered
        if done and self.on_end is not None:
            self.on_end(name, partial(called_positions, args, kwargs))
