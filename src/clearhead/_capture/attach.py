"""Put a handler on a model; and what of torch and `transformers` is switched for that meanwhile.

`attached` is the one way in: it is left without a trace, in whatever order blocks, tasks and
threads leave it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn, overrides

from clearhead import masks
from clearhead._capture.call import Call, from_sdpa
from clearhead._capture.intercept import Frame, Handler, Interceptor, Loop
from clearhead._capture.modules import Modules
from clearhead._core import type_error, value_error

__all__ = ["attached", "watchable"]


@contextlib.contextmanager
def attached(
    model: Any, handler: Handler, seer: type[Interceptor] = Interceptor
) -> Iterator[Interceptor]:
    """Tell the handler of every attention call that the model makes inside the block.

    What is compiled runs eagerly meanwhile; the model's own backend makes the output.
    """
    modules = Modules(watchable(model))
    modules.on_begin, modules.on_end = handler.begins, handler.ends
    there = seer(handler, modules)
    _switch.enter(there)
    try:
        with there:
            yield there
    finally:
        _switch.leave(there)


def watchable(model: Any) -> Any:
    """Give the model itself, without what compiled it; refuse what cannot be seen."""
    if not callable(model):
        raise type_error("model", "is a module or a function", got=type(model).__name__)
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise value_error(
            "model",
            "runs its replicas in threads, which one watch cannot see",
            got="torch.nn.DataParallel",
            hint="watch(model.module) and call model.module inside the block",
        )
    return getattr(model, "_orig_mod", model)


class _Switch:
    """What is shared by the whole process: set by the first block, put back by the last."""

    def __init__(self) -> None:
        self.seers: tuple[Interceptor, ...] = ()
        self._lock = threading.Lock()
        self._owns: dict[tuple[Any, str], Any] = {}
        self._stance: Any = None

    def enter(self, seer: Interceptor) -> None:
        """Let a seer hear of what goes through the functions that are replaced."""
        with self._lock:
            for owner, name, make in _places(seer.modules):
                if (owner, name) not in self._owns:
                    self._owns[owner, name] = vars(owner).get(name)
                    setattr(owner, name, make(getattr(owner, name)))
            if self._stance is None and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")
            self.seers += (seer,)

    def leave(self, seer: Interceptor) -> None:
        """Let it hear no more, and put everything back after the last."""
        with self._lock:
            self.seers = tuple(other for other in self.seers if other is not seer)
            if self.seers:
                return
            for (owner, name), own in self._owns.items():
                delattr(owner, name) if own is None else setattr(owner, name, own)
            self._owns.clear()
            if self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None

    def here(self, module: Any) -> list[Interceptor]:
        """Give the seers of this thread in whose model a module is, innermost last."""
        return [one for one in self.seers if one.here and id(module) in one.modules.names]


_switch = _Switch()


def _places(modules: Modules) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Name what is replaced: calls of modules, `generate`, and functions of `transformers`.

    Nothing is written on the model itself, so that it can be copied and saved inside the block;
    what `module.compile()` wrote there, which copies leave out as well, is set aside.
    """
    yield nn.Module, "_call_impl", _running
    for module in modules.compiled:
        yield module, "_compiled_call_impl", lambda own: None
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    if interface is not None:
        yield interface, "get_interface", _asked
    mixin = getattr(sys.modules.get("transformers.generation.utils"), "GenerationMixin", None)
    for name in ("_sample", "_beam_search", "_assisted_decoding"):
        if hasattr(mixin, name):
            yield mixin, name, functools.partial(_looping, name == "_beam_search")
    model = modules.model
    if isinstance(model, nn.Module) and callable(getattr(model, "generate", None)):
        if "generate" in vars(model):
            yield model, "generate", functools.partial(_generating, model)
        else:
            yield type(model), "generate", functools.partial(_generating, None)


def _running(own: Callable[..., Any]) -> Callable[..., Any]:
    """Let the models that a module is part of hear that it runs."""

    @functools.wraps(own)
    def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = [seer.modules for seer in _switch.seers if id(self) in seer.modules.names]
        if not known:
            return own(self, *args, **kwargs)
        with contextlib.ExitStack() as stack:
            for modules in known:
                stack.enter_context(modules.running(self, args, kwargs))
            return own(self, *args, **kwargs)

    return _call_impl


def _generating(model: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """Let the handlers of a model run its `generate`."""

    @functools.wraps(own)
    def generate(*args: Any, **kwargs: Any) -> Any:
        called, run = args[0] if model is None else model, own
        for seer in _switch.here(called):
            if seer.modules.model is called:
                run = functools.partial(_run, seer, run, model is None)
        return run(*args, **kwargs)

    return generate


def _run(seer: Interceptor, run: Any, method: bool, *args: Any, **kwargs: Any) -> Any:
    if method:
        run, args = functools.partial(run, args[0]), args[1:]
    return seer.handler.generate(run, args, kwargs)


def _asked(own: Callable[..., Any]) -> Callable[..., Any]:
    """Let every attention function that a model looks up tell the seers first.

    The function itself stays the model's own, on the backend that it chose.
    """

    @functools.wraps(own)
    def get_interface(self: Any, name: Any, default: Any) -> Any:
        function = own(self, name, default)
        for seer in _switch.seers:
            if seer.here:
                function = _telling(seer, str(name), function)
        return function

    return get_interface


def _looping(beams: bool, own: Callable[..., Any]) -> Callable[..., Any]:
    """Let a loop of `generate` tell the seers what it made; of beams, also from which rows."""

    @functools.wraps(own)
    def loop(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        seers, config = _switch.here(self), kwargs.get("generation_config")
        if not seers or config is None:
            return own(self, input_ids, *args, **kwargs)
        asked = config.return_dict_in_generate
        if beams:
            config = kwargs["generation_config"] = copy.copy(config)
            config.return_dict_in_generate = True
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        for seer in seers:
            seer.handler.loop_begins(Loop(seer.modules.names[id(self)], input_ids, beams, cache))
        made = own(self, input_ids, *args, **kwargs)
        sequences = made if isinstance(made, Tensor) else made.sequences
        for seer in seers:
            seer.handler.loop_ends(sequences, getattr(made, "beam_indices", None))
        return made if asked else sequences

    return loop


def _telling(seer: Interceptor, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    opaque = name.startswith(("flash", "flex", "paged|flash"))

    @functools.wraps(function)
    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not seer.here or not seer.listening:
            return function(module, query, key, value, *args, **kwargs)
        frame = Frame(seer.modules.named(module), name == "sdpa", query, key, value)
        seer.frames.append(frame)
        try:
            if opaque:
                call = _described(seer, name, module, query, key, value, *args, **kwargs)
                return _opaque(
                    seer, call, lambda: function(module, query, key, value, *args, **kwargs)
                )
            answer = function(module, query, key, value, *args, **kwargs)
            if not frame.seen:
                seer.handler.unseen(frame.name, f"the attention function {name!r} hides its calls")
            return answer
        finally:
            seer.frames.pop()

    return attend


def _described(
    seer: Interceptor,
    name: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *_: Any,
    **kwargs: Any,
) -> Call:
    """Put a call of a kernel that says nothing of itself into clearhead's terms."""
    bias = kwargs.get("position_bias")
    scale, softcap = kwargs.get("scaling"), kwargs.get("softcap")
    tensor = attention_mask if isinstance(attention_mask, Tensor) else None
    if tensor is not None and tensor.ndim == 2:
        tensor = tensor.bool()[:, None, None, -key.shape[2] :]
    elif tensor is not None:
        tensor = tensor[..., : key.shape[2]]
    causal = name.startswith("flash") and kwargs.get(
        "is_causal", getattr(module, "is_causal", True)
    )
    call = from_sdpa(query, key, value, tensor, scale=scale, enable_gqa=True, split=seer.split)
    mask = call.mask
    for more in _more_masks(attention_mask, causal, kwargs.get("sliding_window"), name):
        mask = more if mask is None else mask & more
    if bias is not None:
        bias = bias[..., : key.shape[2]]
        bias = bias if call.bias is None else bias + call.bias
    call = call.but(
        mask=mask,
        bias=call.bias if bias is None else bias,
        softcap=softcap,
        sinks=kwargs.get("s_aux"),
        dropout=kwargs.get("dropout") or 0.0,
        how=name,
    )
    return seer.place(call, seer.roots(query, key))


def _more_masks(block: Any, causal: bool, window: int | None, name: str) -> Iterator[masks.Mask]:
    if hasattr(block, "mask_mod"):
        yield masks.where(block.mask_mod)
    if causal:
        yield masks.causal()
    if window is not None and name.startswith("flash"):
        yield masks.window(window)


def _opaque(seer: Interceptor, call: Call, run: Callable[[], Any]) -> Any:
    """Run a kernel outside the watched world; its context is (batch, query, head, value_dim)."""
    rest: list[Any] = []

    def context() -> Tensor:
        with _unwatched():
            mixed, *others = run()
        rest.extend(others)
        return mixed.transpose(1, 2)

    assert call.query is not None
    assert call.value is not None
    shape = (*call.query.shape[:3], call.value.shape[-1])
    mixed = seer.fused(call, context, shape, call.query)
    return (mixed.transpose(1, 2), *(rest or [None]))


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Let compiled kernels run as they would outside the block.

    They are compiled anew where a mode, or even a flag that turns modes off, is not as it was; so
    the modes are taken off their stack, and the forced eager stance is lifted.
    """
    with contextlib.ExitStack() as stack:
        while isinstance(overrides._get_current_function_mode(), Interceptor):
            stack.enter_context(overrides._pop_mode_temporarily())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("default"))
        yield
