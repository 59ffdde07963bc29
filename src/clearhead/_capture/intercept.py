"""The mode that sees every attention call of a model, and lets a handler look or answer."""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, overrides
from torch.overrides import TorchFunctionMode

from clearhead._capture import call as calls
from clearhead._capture import handwritten
from clearhead._capture.call import Additive, Call
from clearhead._capture.modules import Modules
from clearhead._capture.provenance import (
    DIVISIONS,
    EXPONENTIALS,
    PRODUCTS,
    SOFTMAXES,
    Origin,
    Trace,
)
from clearhead._core import value_error
from clearhead.attention import attend

__all__ = ["Handler", "Interceptor", "Loop"]


class Handler:
    """What is done with a call: look only, or answer in its place.

    `scores` is asked of attention written by hand, before the softmax; `before` of every other
    call, before its kernel. Both may answer None: the model goes its own way. `after` sees the
    context, and may answer another one. All tensors are `(batch, head, position, ...)`.
    """

    values = True  # whether it looks at values, and not at shapes alone

    def scores(self, call: Call) -> Tensor | None:
        """Answer other scores for attention written by hand."""

    def before(self, call: Call) -> Tensor | None:
        """Answer the context in the place of the model's own kernel."""

    def after(self, call: Call, context: Tensor) -> Tensor | None:
        """Look at the context that was made, and answer another one or None."""

    def unseen(self, module: str, reason: str) -> None:
        """Hear of a call that looks like attention and cannot be seen."""

    def begins(self, name: str) -> None:
        """Hear that a module of the model begins to run."""

    def ends(self, name: str, count: int | None) -> None:
        """Hear that a module, which was called on `count` positions, has run."""

    def generate(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's own `generate`."""
        return run(*args, **kwargs)

    def loop_begins(self, loop: Loop) -> None:
        """Hear that a loop of `generate` begins."""

    def loop_ends(self, sequences: Tensor, rows: Tensor | None) -> None:
        """Hear of the sequences that a loop made, and of beams of the rows they came from."""


@dataclass(frozen=True)
class Loop:
    """A loop of `generate()` of `transformers`, which calls one module step by step."""

    module: str
    tokens: Tensor  # (row, position) that it begins with
    beams: bool
    cache: Any

    @property
    def cached(self) -> int | None:
        """How many positions the cache holds now; None where there is none that says so."""
        size = getattr(self.cache, "get_seq_length", None)
        try:
            return None if size is None else int(size())
        except (ValueError, TypeError):  # no layer of it has a length
            return None


class Interceptor(TorchFunctionMode):
    """Watches the torch calls of one thread inside a `with` block and tells the handler."""

    def __init__(self, handler: Handler, modules: Modules) -> None:
        self.handler = handler
        self.modules = modules
        self.trace = Trace()
        self.frames: list[Frame] = []
        self._thread = threading.get_ident()
        self.pending: dict[int, str] = {}
        self._layers: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._kinds: dict[str, str] = {}
        self._split: dict[int, tuple[weakref.ref[Tensor], int, Additive]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SPECIAL:
            return _SPECIAL[func](self, func, args, kwargs)
        if type(func).__name__ == "FlexAttentionHOP":
            return self.flex(func, args, kwargs)
        out = func(*args, **kwargs)
        self.trace.follow(func, args, kwargs, out)
        return out

    def sdpa(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle `F.scaled_dot_product_attention`."""
        if not self.listening:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = given["query"], given["key"], given["value"]
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
        shape = (*lead, *query.shape[-3:-1], value.shape[-1])
        with quiet():
            call = calls.from_sdpa(**self._unpacked(given), split=self.split)
        call = self.place(call, self.roots(query, key))
        return self.fused(call, lambda: func(*args, **kwargs), shape, query)

    def fused(
        self, call: Call, run: Callable[[], Tensor], shape: tuple[int, ...], query: Tensor
    ) -> Tensor:
        """Run a call whose weights are never made, and whose context has the given shape."""
        with quiet():
            other = self.handler.before(call)
        if other is None:
            context = run()
        else:
            if self._beneath():
                run()  # so that blocks around this one see the model's own call
            context = other.reshape(shape)
        assert call.query is not None
        assert call.value is not None
        four = (*call.query.shape[:3], call.value.shape[-1])
        with quiet():
            changed = self.handler.after(call, context.reshape(four))
        if changed is not None:
            context = changed.reshape(shape)
        self.saw()
        self.trace.mark(context, Origin(self.trace.root(query)))
        return context

    def own(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle `clearhead.attend`."""
        if not self.listening:
            return func(*args, **kwargs)
        query, key = args[:2]
        rest: list[Any] = []

        def run() -> Tensor:
            answer = func(*args, **kwargs)
            context, *values = answer if kwargs.get("read") is not None else (answer,)
            rest.extend(values)
            return context

        with quiet():
            call = calls.from_attend(*args, **kwargs)
        shape = (*query.shape[:-1], args[2].shape[-1])
        call = self.place(call, self.roots(query, key))
        context = self.fused(call, run, shape, query)
        if kwargs.get("read") is None:
            return context
        if not rest:
            # another context was made in the place of attend's: its readings are still wanted
            with quiet():
                rest.append(func(*args, **kwargs)[1])
        return context, rest[0]

    def flex(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the operator below `flex_attention`, which answers context, lse and max."""
        if not self.listening:
            return func(*args, **kwargs)
        query, key, value = args[:3]
        rest: list[Any] = []

        def run() -> Tensor:
            context, *others = func(*args, **kwargs)
            rest.extend(others)
            return context

        with quiet():
            call = calls.from_flex(*args[:6])
        call = self.place(call, self.roots(query, key))
        context = self.fused(call, run, (*query.shape[:-1], value.shape[-1]), query)
        if not rest:
            with quiet():
                rest.extend(func(*args, **kwargs)[1:])
        return (context, *rest)

    def multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle `F.multi_head_attention_forward`: run its body, so that its calls are seen."""
        before = self.folded
        _folded.heads = kwargs["num_heads"] if "num_heads" in kwargs else args[4]
        try:
            with self:
                return _body(func)(*args, **kwargs)
        finally:
            _folded.heads = before

    def __exit__(self, *_: Any) -> None:
        # Blocks of generators and of tasks that take turns need not be left in order.
        above = []
        while torch._C._len_torch_function_stack():
            mode = overrides._pop_mode()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            overrides._push_mode(mode)

    def softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a softmax: of a product of two activations it may be attention by hand."""
        scores = args[0] if args else kwargs["input"]
        origin = self.trace.origin(scores)
        if origin is None or origin.product is None or not self.listening:
            return self.other(func, args, kwargs)
        return handwritten.softmax(self, func, args, kwargs, origin)

    def exponential(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle exp: of a product of two activations it may begin a softmax by hand."""
        origin = self.trace.origin(args[0]) if args else None
        if origin is None or origin.product is None or not self.listening:
            return self.other(func, args, kwargs)
        return handwritten.exponential(self, func, args, kwargs, origin)

    def division(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a division: of an exponential by its sum it ends a softmax by hand."""
        out = self.other(func, args, kwargs)
        origin = self.trace.origin(args[0]) if len(args) == 2 else None
        if origin is not None and origin.exp is not None and isinstance(args[1], Tensor):
            handwritten.division(self, origin, args[1], out)
        return out

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run any other call, and follow where its result comes from."""
        out = func(*args, **kwargs)
        self.trace.follow(func, args, kwargs, out)
        return out

    def product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a matrix product: the first or the second one of attention by hand."""
        return handwritten.product(self, func, args, kwargs)

    def _beneath(self) -> bool:
        """Whether a block around this one looks at calls as well; this one is off its stack."""
        modes = overrides._get_current_function_mode_stack()
        return any(isinstance(mode, Interceptor) for mode in modes)

    @property
    def here(self) -> bool:
        """Whether the code runs in the thread that watches."""
        return threading.get_ident() == self._thread

    @property
    def listening(self) -> bool:
        """Whether a call made now belongs to the model, and is no second run of a checkpoint."""
        return self.modules.active and torch._C._current_graph_task_id() == -1

    @property
    def running(self) -> str:
        """The dotted name of the module that makes a call now."""
        return self.frames[-1].name if self.frames else self.modules.current

    @property
    def folded(self) -> int | None:
        """How many heads torch's own multi-head function folds into the batch, inside it."""
        return getattr(_folded, "heads", None)

    def saw(self) -> None:
        """Note that the call in progress of an attention interface has been seen."""
        if self.frames:
            self.frames[-1].seen = True

    def place(
        self, call: Call, roots: tuple[int, int] | None = None, *, count: bool = True
    ) -> Call:
        """Give the call its module, layer, number and kind."""
        if self.handler.values and any(
            x is not None and x.is_meta for x in (call.value, call.scores)
        ):
            rule = "is on the meta device, where tensors have no values to look at"
            raise value_error("model", rule, hint="clearhead.estimate asks for shapes only")
        module = self.running
        layer = self._layers.get(module, len(self._layers))
        number = self._calls.get(module, -1) + 1
        if count:
            self._layers[module], self._calls[module] = layer, number
        kind = self._kind(module, roots)
        return call.but(module=module, layer=layer, call=number, kind=kind)

    def roots(self, query: Tensor, key: Tensor) -> tuple[int, int] | None:
        """Give what query and key descend from, where both are known."""
        left, right = self.trace.origin(query), self.trace.origin(key)
        return (left.root, right.root) if left and right else None

    def _kind(self, module: str, roots: tuple[int, int] | None) -> str:
        """Tell self from cross attention by whether query and key descend from one input."""
        named = self.modules.says_cross(module)
        if named is not None:
            return "cross" if named else "self"
        if roots is None:
            return self._kinds.get(module, "self")
        return self._kinds.setdefault(module, "self" if roots[0] == roots[1] else "cross")

    def _unpacked(self, given: dict[str, Any]) -> dict[str, Any]:
        """Undo what `transformers` does to grouped heads: keys repeated, or queries packed."""
        frame = self.frames[-1] if self.frames else None
        query, key, mask = given["query"], given["key"], given.get("attn_mask")
        if frame is None or not frame.own or frame.key.shape[1] == frame.query.shape[1]:
            return given
        if query.shape != frame.query.shape:
            # one query a head, the heads of a group laid along the query axis
            query = frame.query
            if mask is not None and mask.shape[1] != 1:
                mask = mask.reshape(mask.shape[0], query.shape[1], 1, mask.shape[-1])
        key, value = (x[:, :, : key.shape[2]] for x in (frame.key, frame.value))
        changes = {"query": query, "key": key, "value": value, "attn_mask": mask}
        return {**given, **changes, "enable_gqa": True}

    def split(self, mask: Tensor) -> Additive:
        """Tell blocked entries from a bias, once for a mask that many layers share."""
        if torch._C._len_torch_dispatch_stack():
            # shapes alone are asked for: there are no values to look at
            return Additive(None, None, None)
        found = self._split.get(id(mask))
        if found is None or found[0]() is not mask or found[1] != mask._version:
            found = (weakref.ref(mask), mask._version, calls.split_additive(mask))
            self._split[id(mask)] = found
        return found[2]


class Frame:
    """One call through the attention interface of `transformers`: its tensors before any repeat."""

    def __init__(self, name: str, own: bool, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.name = name
        self.own = own
        self.query, self.key, self.value = query, key, value
        self.seen = False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Compute outside the watched world: no modes."""
    with torch._C.DisableTorchFunction():
        yield


def _body(func: Any) -> Any:
    """Copy a function of torch so that it asks for no override: its body runs under the mode."""
    world = {**func.__globals__, "has_torch_function": lambda tensors: False}
    copy = types.FunctionType(func.__code__, world, func.__name__, func.__defaults__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


# How many heads torch's own function, where it runs now in this thread, folds into the batch.
_folded = threading.local()

_SPECIAL: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: Interceptor.sdpa,
    F.multi_head_attention_forward: Interceptor.multi_head,
    attend: Interceptor.own,
    **dict.fromkeys(SOFTMAXES, Interceptor.softmax),
    **dict.fromkeys(PRODUCTS, Interceptor.product),
    **dict.fromkeys(EXPONENTIALS, Interceptor.exponential),
    **dict.fromkeys(DIVISIONS, Interceptor.division),
}
