"""All that is known of the `transformers` library; it is found in `sys.modules`, never imported.

Attention reaches a kernel through `AttentionInterface.get_interface`, which a model asks for the
function of its backend. Functions of torch are seen in any case; what is learned here is the
tensors before grouped keys are repeated, and the arguments of kernels that are opaque to torch
(flash, flex). `generate` calls a model step by step in a loop of `GenerationMixin`.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from clearhead import masks
from clearhead._capture.call import Call
from clearhead._capture.describe import from_sdpa

__all__ = [
    "InterfaceCall",
    "Loop",
    "Patch",
    "called_positions",
    "declares_cross",
    "last_query",
    "patches",
    "prompt_length",
    "two_sided",
    "ungrouped",
]

# An owner, the name of its attribute, and what makes the replacement of the attribute.
Patch = tuple[Any, str, Callable[[Any], Any]]

_CROSS = ("crossattention", "cross_attn", "cross_attention", "encdecattention", "encoder_attn")
_LOOPS = ("_sample", "_beam_search", "_assisted_decoding")
# Functions of the interface below which torch sees no matmul, softmax or attention function.
_OPAQUE = ("flash", "flex", "paged|flash")


class Listener(Protocol):
    """What this file needs of an interceptor, which in turn needs this file."""

    handler: Any
    modules: Any
    sites: Any

    @property
    def here(self) -> bool:
        """Whether the code runs in the thread that is watched."""
        ...

    def split(self, mask: Tensor) -> Any:
        """Split an additive mask into edges and a bias."""
        ...

    def suspended(self) -> Any:
        """Run a block without interception."""
        ...

    def described(self, describes: Any, given: Any, query: Any, key: Any) -> Any:
        """Describe and locate a call, or report that it cannot be read."""
        ...

    def run_call(self, call: Any, run: Any, shape: Any, query: Tensor) -> Tensor:
        """Run a call of a kernel between `before` and `after` of the handler."""
        ...


@dataclass
class InterfaceCall:
    """One call through the attention interface: its tensors before grouped keys are repeated."""

    module: str
    backend: str
    query: Tensor
    key: Tensor
    value: Tensor
    seen: bool = False  # whether a call of attention was recognised below it


@dataclass(frozen=True)
class Loop:
    """A loop of `generate()`, which calls one module step by step."""

    module: str
    tokens: Tensor  # (row, position) that it begins with
    beams: bool
    cache: Any
    drafts: bool = False  # whether tokens are drafted, of which some are not accepted

    @property
    def cached(self) -> int | None:
        """How many positions the cache holds now; None where there is no cache with a length."""
        size = getattr(self.cache, "get_seq_length", None)
        try:
            return None if size is None else int(size())
        except (ValueError, TypeError):  # no layer of it has a length
            return None


def two_sided(model: Any) -> bool:
    """Whether a model has an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def declares_cross(module: Any, name: str) -> bool | None:
    """Whether a module is cross attention by its own attribute or name; None where neither says."""
    flag = getattr(module, "is_cross_attention", None)
    if isinstance(flag, bool):
        return flag
    return True if _sounds_cross(name) else None


@functools.lru_cache(4096)
def _sounds_cross(name: str) -> bool:
    return any(word in name.lower() for word in _CROSS)


def called_positions(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """On how many positions a model is called."""
    names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
    for tokens in (*(kwargs.get(name) for name in names), *args[:1]):
        if isinstance(tokens, Tensor) and tokens.ndim > 1:
            return tokens.shape[1]
    return None


def prompt_length(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """How many positions the prompt of `generate()` has, where they are the decoder's."""
    if two_sided(model):
        given = [kwargs.get("decoder_input_ids")]
    else:
        given = [kwargs.get(name) for name in ("input_ids", "inputs", "inputs_embeds")]
        given += args[:1]
    sizes = [x.shape[1] for x in given if isinstance(x, Tensor) and x.ndim in (2, 3)]
    return sizes[0] if sizes else None


def last_query(sequences: Tensor, prompt: int | None) -> int:
    """How many positions of the sequences that a loop returned were queries: all but the last."""
    length = sequences.shape[1] - 1
    if prompt and length < prompt:
        return length + prompt  # embeddings went in: only the new tokens come out
    return length


def ungrouped(call: InterfaceCall | None, given: dict[str, Any]) -> dict[str, Any]:
    """Undo what the SDPA backend does to grouped heads: keys repeated, or queries packed."""
    query, key, mask = given["query"], given["key"], given.get("attn_mask")
    if call is None or call.backend != "sdpa" or call.key.shape[1] == call.query.shape[1]:
        return given
    if query.shape != call.query.shape:
        # One query a head: the heads of a group lie along the query axis.
        query = call.query
        if mask is not None and mask.shape[1] != 1:
            mask = mask.reshape(mask.shape[0], query.shape[1], 1, mask.shape[-1])
    key, value = (x[:, :, : key.shape[2]] for x in (call.key, call.value))
    changes = {"query": query, "key": key, "value": value, "attn_mask": mask}
    return {**given, **changes, "enable_gqa": True}


def patches(model: Any, here: Callable[..., Sequence[Listener]]) -> Iterator[Patch]:
    """Give what is replaced while a model is watched.

    `here(module)` gives the interceptors of this thread in whose model a module is, innermost last;
    `here()` all of this thread.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    if interface is not None:
        yield interface, "get_interface", functools.partial(_interface, here)
    mixin = getattr(sys.modules.get("transformers.generation.utils"), "GenerationMixin", None)
    for name in _LOOPS:
        if hasattr(mixin, name):
            yield mixin, name, functools.partial(_loop, here, name == "_beam_search")
    if isinstance(model, nn.Module) and callable(getattr(model, "generate", None)):
        if "generate" in vars(model):
            yield model, "generate", functools.partial(_generate, here, model)
        else:
            yield type(model), "generate", functools.partial(_generate, here, None)


def _generate(here: Any, model: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """Let the handlers of a model run its `generate`: a method, or an attribute of the model."""

    @functools.wraps(own)
    def generate(*args: Any, **kwargs: Any) -> Any:
        called, run = args[0] if model is None else model, own
        for interceptor in here(called):
            if interceptor.modules.model is called:
                run = functools.partial(_run_generate, interceptor, run, model is None)
        return run(*args, **kwargs)

    return generate


def _run_generate(interceptor: Listener, run: Any, method: bool, *args: Any, **kwargs: Any) -> Any:
    if method:
        run, args = functools.partial(run, args[0]), args[1:]
    return interceptor.handler.generate(run, args, kwargs)


def _loop(here: Any, beams: bool, own: Callable[..., Any]) -> Callable[..., Any]:
    """Report a loop of `generate` and its sequences to the handlers; for beams, their rows too."""

    @functools.wraps(own)
    def loop(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        interceptors, config = here(self), kwargs.get("generation_config")
        if not interceptors or config is None:
            return own(self, input_ids, *args, **kwargs)
        as_dict = config.return_dict_in_generate
        if beams:
            config = kwargs["generation_config"] = copy.copy(config)
            config.return_dict_in_generate = True
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        drafts = own.__name__ == "_assisted_decoding"
        for one in interceptors:
            name = one.modules.names[id(self)]
            one.handler.loop_starts(Loop(name, input_ids, beams, cache, drafts))
        made = own(self, input_ids, *args, **kwargs)
        sequences = made if isinstance(made, Tensor) else made.sequences
        for one in interceptors:
            one.handler.loop_ends(sequences, getattr(made, "beam_indices", None))
        return made if as_dict else sequences

    return loop


def _interface(here: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap every attention function that a model looks up, so that interceptors see its arguments.

    The function itself stays the model's own, on the backend that it chose.
    """

    @functools.wraps(own)
    def get_interface(self: Any, name: Any, default: Any) -> Any:
        function = own(self, name, default)
        for interceptor in here():
            function = _observed(interceptor, str(name), function)
        return function

    return get_interface


def _observed(interceptor: Listener, name: str, function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not interceptor.here or not interceptor.sites.listening:
            return function(module, query, key, value, *args, **kwargs)
        run = functools.partial(function, module, query, key, value, *args, **kwargs)
        named = interceptor.modules.named(module)
        with interceptor.sites.through(InterfaceCall(named, name, query, key, value)) as call:
            if name.startswith(_OPAQUE):
                given = (query, key, value, *args)
                describes = functools.partial(
                    _described, name, interceptor, module, *given, **kwargs
                )
                described = interceptor.described(describes, given, query, key)
                if described is not None:
                    return _run_opaque(interceptor, described, query, run)
            answer = run()
        if not call.seen:
            interceptor.handler.unseen(named, f"the attention function {name!r} hides its calls")
        return answer

    return attend


def _described(
    name: str,
    interceptor: Listener,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *_: Any,
    **kwargs: Any,
) -> Call:
    """Describe a call of an opaque kernel from the arguments of the attention interface."""
    tensor = _rank4_mask(attention_mask, key.shape[2])
    split, scale = interceptor.split, kwargs.get("scaling")
    call = from_sdpa(query, key, value, tensor, scale=scale, enable_gqa=True, split=split)
    mask, bias = call.mask, kwargs.get("position_bias")
    for more in _more_masks(name, module, attention_mask, kwargs):
        mask = more if mask is None else mask & more
    if bias is not None:
        bias = bias[..., : key.shape[2]]
        bias = bias if call.bias is None else bias + call.bias
    return replace(
        call,
        mask=mask,
        bias=call.bias if bias is None else bias,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=kwargs.get("dropout") or 0.0,
        how=name,
    )


def _rank4_mask(mask: Any, source: int) -> Tensor | None:
    """Give a mask of real tokens, (batch, source), or of edges the four axes of scores."""
    if not isinstance(mask, Tensor):
        return None
    return mask.bool()[:, None, None, -source:] if mask.ndim == 2 else mask[..., :source]


def _more_masks(name: str, module: Any, block: Any, kwargs: Any) -> Iterator[masks.Mask]:
    flash = name.startswith("flash")
    if hasattr(block, "mask_mod"):
        yield masks.where(block.mask_mod)
    if flash and kwargs.get("is_causal", getattr(module, "is_causal", True)):
        yield masks.causal()
    if flash and kwargs.get("sliding_window") is not None:
        yield masks.window(kwargs["sliding_window"])


def _run_opaque(interceptor: Listener, call: Call, query: Tensor, run: Callable[[], Any]) -> Any:
    """Run a kernel without interception; its context is (batch, query, head, value_dim)."""
    others: list[Any] = []

    def context() -> Tensor:
        with interceptor.suspended():
            mixed, *more = run()
        others.extend(more)
        return mixed.transpose(1, 2)

    shape = (*call.sizes[:3], call.value.shape[-1])
    mixed = interceptor.run_call(call, context, shape, query)
    return (mixed.transpose(1, 2), *(others or [None]))
