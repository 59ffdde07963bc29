"""The function mode that intercepts every attention call of a model for a handler."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, overrides
from torch.overrides import TorchFunctionMode

from clearhead._capture import describe
from clearhead._capture.axes import Fold, Place, fold_of, parted, place_of, scores_of
from clearhead._capture.call import Call
from clearhead._capture.describe import Additive
from clearhead._capture.handler import Handler, in_short
from clearhead._capture.handwritten import HANDWRITTEN, Handwritten, folding
from clearhead._capture.modules import Modules, Sites
from clearhead._capture.provenance import Origin, Provenance
from clearhead._capture.transformers import ungrouped
from clearhead._core import has_values, is_refusal, unobserved
from clearhead.attention import attend

__all__ = ["FusedInterceptor", "Interceptor", "NamedInterceptor", "intercept_calls"]

# The arguments of `F.scaled_dot_product_attention`, in their order.
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


class Interceptor(TorchFunctionMode):
    """Intercepts the torch calls of one thread inside a `with` block, and notifies the handler."""

    def __init__(self, handler: Handler, modules: Modules) -> None:
        self.handler = handler
        self.modules = modules
        self.provenance = Provenance()
        self.sites = Sites(modules, self.provenance, handler.reads_values)
        self.handwritten = Handwritten(handler, self.provenance, self.sites)
        modules.on_inputs = self.provenance.mark_inputs
        self.provenance.on_error = self.sites.not_followed(handler)
        if handler.edits:
            self.provenance.on_other_use = self.handwritten.other_use
        # Whether every call of a kernel had batch, heads and positions where the kernel has them.
        self.plain = True
        # How many calls of kernels there were, and how many by the name of torch's own.
        self.kernels = self.named = 0
        self._split: dict[int, tuple[weakref.ref[Tensor], int, Additive]] = {}

    @property
    def here(self) -> bool:
        """Whether the code runs in the thread, and the task, that is watched."""
        return self.modules.here

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.modules.here:
            return func(*args, **kwargs)
        if func in HANDWRITTEN:
            return HANDWRITTEN[func](self.handwritten, func, args, kwargs)
        if func in _FUSED:
            return _FUSED[func](self, func, args, kwargs)
        if type(func).__name__ == "FlexAttentionHOP":
            return self.flex(func, args, kwargs)
        out = func(*args, **kwargs)
        self.provenance.follow(func, args, kwargs, out)
        return out

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

    def sdpa(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle `F.scaled_dot_product_attention`."""
        if not self.sites.listening:
            return func(*args, **kwargs)
        given = {**dict(zip(_SDPA, args, strict=False)), **kwargs}
        inputs: list[Any] = [given.get(name) for name in _SDPA[:4]]
        query, key, value, _ = inputs
        fold: Fold | None = None

        def described() -> Call:
            nonlocal fold
            place, found = self._place(query, key)
            fold, split = (None, given) if found is None else _unfolded(found, given)
            self.plain &= place is None and fold is None and query.ndim == 4
            call = describe.from_sdpa(**ungrouped(self.sites.interface, split), split=self.split)
            return call if place is None else replace(call, place=place)

        call = self.described(described, inputs, query, key)
        if call is None:
            return func(*args, **kwargs)
        shape = (*describe.lead_of(query, key, value), *query.shape[-3:-1], value.shape[-1])
        return self.run_call(call, lambda: func(*args, **kwargs), shape, query, fold)

    def _place(self, query: Tensor, key: Tensor) -> tuple[Place | None, Fold | None]:
        """Tell batch, heads and positions of a call of a kernel from the axes of its inputs."""
        layouts = self.provenance.layouts
        known = layouts.of(query) or layouts.of(key)
        layout = known and scores_of(layouts.begun(query), layouts.begun(key))
        if layout is None:
            return None, None
        lead, *positions = parted(layout.axes)
        return place_of(layout, lead, *positions), fold_of(lead)

    def _placed(
        self, describes: Callable[[], Call], query: Tensor, key: Tensor
    ) -> Callable[[], Call]:
        """Describe a call with its place; heads that are no axis of their own are named there."""

        def described() -> Call:
            place, fold = self._place(query, key)
            self.plain &= place is None and fold is None and query.ndim == 4
            if fold is not None and not (query.ndim == 4 and fold.sizes is None):
                place = replace(place or Place(), turned=True)
            call = describes()
            return call if call.place is not None else replace(call, place=place)

        return described

    def attend(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        describes: Callable[..., Call] = describe.from_attend,
    ) -> Any:
        """Handle `clearhead.attend`, or a function with its arguments and another description."""
        run = functools.partial(func, *args, **kwargs)
        if not self.sites.listening:
            return run()
        query, key, value = args[:3]
        described = self._placed(functools.partial(describes, *args, **kwargs), query, key)
        call = self.described(described, (args, kwargs), query, key)
        if call is None:
            return run()
        shape = (*query.shape[:-1], value.shape[-1])
        if kwargs.get("read") is None:
            return self.run_call(call, run, shape, query)
        return self._with_others(call, run, shape, query)

    def flex(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the operator below `flex_attention`, which returns context, lse and max."""
        run = functools.partial(func, *args, **kwargs)
        if not self.sites.listening:
            return run()
        query, key, value = args[:3]
        describes = functools.partial(describe.from_flex, *args[:6])
        call = self.described(self._placed(describes, query, key), args[:3], query, key)
        if call is None:
            return run()
        return self._with_others(call, run, (*query.shape[:-1], value.shape[-1]), query)

    def described(
        self, describes: Callable[[], Call], given: Any, query: Any, key: Any
    ) -> Call | None:
        """Describe and locate a call; report one that cannot be read, and give None."""
        reason = self.sites.unreadable(given)
        if reason is None:
            try:
                with torch._C.DisableTorchFunction():
                    call = describes()
                return self.sites.locate(call, self.sites.roots(query, key))
            except Exception as error:
                if is_refusal(error):
                    raise
                reason = f"its call could not be read ({in_short(error)})"
        self.handler.failed(self.sites.running, reason)
        self.sites.seen()
        return None

    def _with_others(
        self, call: Call, run: Callable[[], Any], shape: tuple[int, ...], query: Tensor
    ) -> tuple[Any, ...]:
        """Run a call of a kernel that returns more than the context."""
        others: list[Any] = []

        def context() -> Tensor:
            made, *more = run()
            others.extend(more)
            return made

        made = self.run_call(call, context, shape, query)
        if not others:
            # Another context took the place of the kernel's: its other results are still needed.
            with torch._C.DisableTorchFunction():
                others.extend(run()[1:])
        return (made, *others)

    def multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle `F.multi_head_attention_forward`: run its body, so that its calls are seen."""
        heads = kwargs["num_heads"] if "num_heads" in kwargs else args[4]
        with folding(heads), self:
            return _body(func)(*args, **kwargs)

    def run_call(
        self,
        call: Call,
        run: Callable[[], Tensor],
        shape: tuple[int, ...],
        query: Tensor,
        fold: Fold | None = None,
    ) -> Tensor:
        """Run a call of a kernel between `before` and `after` of the handler.

        `shape` is that of the context that the model expects, `fold` how its first axes are batch
        and heads where they come in another order or as one.
        """
        self.kernels += 1
        with torch._C.DisableTorchFunction():
            other = self.handler.before(call)
        if other is None:
            context = run()
        else:
            if _intercepted():
                run()  # so that blocks around this one see the model's own call
            context = other.reshape(shape) if fold is None else fold.join(other, shape[:-2])
        four = (*call.sizes[:3], call.value.shape[-1])
        with torch._C.DisableTorchFunction():
            whole = context.reshape(four) if fold is None else fold.split(context)
            changed = self.handler.after(call, whole)
        if changed is not None:
            context = changed.reshape(shape) if fold is None else fold.join(changed, shape[:-2])
        self.sites.seen()
        made = call.module if call.sizes.head == 1 else ""
        self.provenance.mark(context, Origin(self.provenance.root(query), made=made))
        return context

    def split(self, mask: Tensor) -> Additive:
        """Separate blocked entries from a bias, once for a mask that many layers share."""
        if not has_values(mask):
            return Additive(None, None, None)  # only shapes are needed
        with unobserved(mask):
            return self._split_once(mask)

    def _split_once(self, mask: Tensor) -> Additive:
        if mask.is_inference():  # its edits in place are not counted
            return describe.split_additive(mask)
        found = self._split.get(id(mask))
        if found is None or found[0]() is not mask or found[1] != mask._version:
            found = (weakref.ref(mask), mask._version, describe.split_additive(mask))
            self._split[id(mask)] = found
        return found[2]

    @staticmethod
    @contextlib.contextmanager
    def suspended() -> Iterator[None]:
        """Let compiled kernels run as they would outside the block.

        They are compiled anew where a mode, or even a flag that turns modes off, is not as it was;
        so the modes are taken off their stack, and the forced eager stance is lifted.
        """
        with contextlib.ExitStack() as stack:
            while isinstance(overrides._get_current_function_mode(), Interceptor):
                stack.enter_context(overrides._pop_mode_temporarily())
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("default"))
            yield


class FusedInterceptor(Interceptor):
    """Intercepts calls of kernels alone, at a fraction of the time.

    It follows no tensors: handwritten attention is not seen, nor is the kind of a call known. It is
    for models of which an `Interceptor` has seen `plain` calls of kernels and nothing else.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _FUSED or type(func).__name__ == "FlexAttentionHOP":
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)


class NamedInterceptor(FusedInterceptor):
    """Intercepts torch's kernel where it is called by its name, which takes no mode.

    A mode takes time in every call of torch. It is for models of which an `Interceptor` has seen
    that they call this kernel by its name, and no other; `attach` replaces the name.
    """

    def __enter__(self) -> NamedInterceptor:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def _unfolded(fold: Fold, given: dict[str, Any]) -> tuple[Fold | None, dict[str, Any]]:
    """Give inputs of a kernel batch and head axes in this order, where they have not got them."""
    names = ("query", "key", "value")
    lead = given["query"].shape[:-2]
    plain = len(lead) == 2 and fold.sizes is None
    if plain or any(given[x].shape[:-2] != lead for x in names):
        return None, given
    split = {name: fold.split(given[name]) for name in names}
    mask = given.get("attn_mask")
    if mask is not None and mask.ndim > 2:
        split["attn_mask"] = fold.split(mask.expand(*lead, *mask.shape[-2:]))
    return fold, {**given, **split}


def _intercepted() -> bool:
    """Whether a block around the current one intercepts calls; the current one is off the stack."""
    modes = overrides._get_current_function_mode_stack()
    return any(isinstance(mode, Interceptor) for mode in modes)


def _body(func: Any) -> Any:
    """Copy a function of torch so that it calls no override: its body runs under the mode."""
    world = {**func.__globals__, "has_torch_function": lambda tensors: False}
    copy = types.FunctionType(func.__code__, world, func.__name__, func.__defaults__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def intercept_calls(func: Any, describes: Callable[..., Call]) -> None:
    """Let calls of a function of a higher floor be seen, with the arguments of `attend`."""
    _FUSED[func] = functools.partial(Interceptor.attend, describes=describes)


_FUSED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: Interceptor.sdpa,
    F.multi_head_attention_forward: Interceptor.multi_head,
    attend: Interceptor.attend,
}
