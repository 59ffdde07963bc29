"""The one way into a model: attach a handler to it for a block.

Here, and only here, functions of other modules are replaced at run time. `setattr` puts in place
what `transformers.patches` and `_patches` give, when the first block is entered, and restores the
originals when the last one is left, in whatever order blocks, tasks and threads leave. What is
replaced is process-wide and does nothing but call the original in threads and for models that no
block watches.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from clearhead._capture import transformers
from clearhead._capture.calling import watchable
from clearhead._capture.handler import Handler
from clearhead._capture.intercept import FusedInterceptor, Interceptor, NamedInterceptor
from clearhead._capture.modules import Inventory, Modules

__all__ = ["active_handlers", "attached"]


@contextlib.contextmanager
def attached(
    model: Any,
    handler: Handler,
    interceptor: type[Interceptor] = Interceptor,
    known: Inventory | None = None,
) -> Iterator[Interceptor]:
    """Notify the handler of every attention call that the model makes inside the block.

    What is compiled runs eagerly meanwhile; the model's own backend makes the output. `known` are
    the modules of an earlier block, which are listed again only where they changed.
    """
    model = watchable(model)
    known = known if known is not None and known.is_of(model) else Inventory(model)
    modules = Modules(known)
    # What nobody wants to hear of takes time to tell.
    if type(handler).module_starts is not Handler.module_starts:
        modules.on_start = handler.module_starts
    if type(handler).module_ends is not Handler.module_ends:
        modules.on_end = handler.module_ends
    if interceptor is NamedInterceptor and _patched.names_a_kernel:
        interceptor = FusedInterceptor  # each of these expects to be the only one
    entered = interceptor(handler, modules)
    _patched.enter(entered)
    try:
        with modules.entered(), entered:
            yield entered
    finally:
        _patched.leave(entered)
        modules.notify_nobody()
        entered.provenance.notify_nobody()


def active_handlers(model: Any) -> list[Handler]:
    """Give the handlers that are attached to a model in this thread, innermost last."""
    return [one.handler for one in _patched.here() if one.modules.model is model]


class _Patched:
    """What is replaced in the whole process: by the first block, restored by the last one."""

    def __init__(self) -> None:
        self.interceptors: tuple[Interceptor, ...] = ()
        self._lock = threading.Lock()
        self._originals: dict[tuple[Any, str], Any] = {}
        self._stance: Any = None

    def enter(self, interceptor: Interceptor) -> None:
        """Replace what is not replaced yet, and notify this interceptor too."""
        with self._lock:
            for owner, name, make in _patches(interceptor):
                if (owner, name) not in self._originals:
                    self._originals[owner, name] = vars(owner).get(name)
                    setattr(owner, name, make(getattr(owner, name)))
            if self._stance is None and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")
            self.interceptors += (interceptor,)

    def leave(self, interceptor: Interceptor) -> None:
        """Notify it no more, and restore everything after the last one."""
        with self._lock:
            self.interceptors = tuple(x for x in self.interceptors if x is not interceptor)
            if self.interceptors:
                return
            for (owner, name), own in self._originals.items():
                delattr(owner, name) if own is None else setattr(owner, name, own)
            self._originals.clear()
            if self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None

    @property
    def names_a_kernel(self) -> bool:
        """Whether a block intercepts a kernel by its name."""
        return any(isinstance(one, NamedInterceptor) for one in self.interceptors)

    def here(self, module: Any = None) -> list[Interceptor]:
        """Give the interceptors of this thread, or those that a module is watched by."""
        found = [one for one in self.interceptors if one.here]
        return found if module is None else [x for x in found if id(module) in x.modules.names]


_patched = _Patched()


def _patches(interceptor: Interceptor) -> Iterator[transformers.Patch]:
    """Give what is replaced: calls of modules and of kernels, and what `transformers` adds.

    Nothing is written on the model itself, so that it can be copied and saved inside the block;
    what `module.compile()` wrote there, which copies leave out as well, is set aside.
    """
    modules = interceptor.modules
    yield nn.Module, "_call_impl", _notifying
    if interceptor.handler.names_kernels:
        yield F, "scaled_dot_product_attention", _naming
    for module in modules.inventory.compiled:
        yield module, "_compiled_call_impl", lambda own: None
    yield from transformers.patches(modules.model, _patched.here)


def _notifying(own: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the stacks of running modules of all models that a module is part of."""

    @functools.wraps(own)
    def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        interceptors = _patched.interceptors
        if len(interceptors) == 1:
            modules = interceptors[0].modules
            if id(self) in modules.names:
                return modules.run(own, self, *args, **kwargs)
            return own(self, *args, **kwargs)
        known = [x.modules for x in interceptors if id(self) in x.modules.names]
        run = own
        # The last block is the innermost one.
        for modules in reversed(known):
            run = functools.partial(modules.run, run)
        return run(self, *args, **kwargs)

    return _call_impl


def _naming(own: Callable[..., Any]) -> Callable[..., Any]:
    """Let interceptors learn of calls of a kernel by its name, or intercept them there."""

    @functools.wraps(own)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        alone = None
        for one in _patched.here():
            one.named += one.sites.listening
            alone = one if isinstance(one, NamedInterceptor) else alone
        return own(*args, **kwargs) if alone is None else alone.sdpa(own, args, kwargs)

    return scaled_dot_product_attention
