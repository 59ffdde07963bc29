"""Which module of the model is running: forward hooks that are taken away again."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Modules", "cached"]

_ATTENDS = re.compile(r"attention|attn", re.IGNORECASE)
_MIXES = re.compile(r"mamba|ssm|rwkv|lstm|gru|rnn|hyena|retention|conv|fourier|fnet|mixer", re.I)
_CROSS = ("crossattention", "cross_attn", "cross_attention", "encdecattention", "encoder_attn")


_FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def _within(name: str, other: str) -> bool:
    """Whether a module is another one, or inside it."""
    return not other or name == other or name.startswith(other + ".")


def cached(kwargs: Mapping[str, Any]) -> int | None:
    """Say how many positions the cache holds that a model of `transformers` is called with."""
    for name in ("cache", "past_key_values"):
        size = getattr(kwargs.get(name), "get_seq_length", None)
        if size is not None:
            try:
                return int(size())
            except (ValueError, TypeError):  # a cache of no layer that has a length
                return None
    return None


def _count(inputs: Any, kwargs: Mapping[str, Any]) -> int | None:
    names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
    for tokens in (*(kwargs.get(name) for name in names), *inputs[:1]):
        if isinstance(tokens, Tensor) and tokens.ndim > 1:
            return tokens.shape[1]
    return None


def _generates(module: nn.Module) -> bool:
    return callable(getattr(module, "generate", None))


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
        self.on_generate: Callable[..., Any] = lambda run, args, kwargs: run(*args, **kwargs)
        self.on_forward: Callable[[], None] = lambda: None
        self.on_step: Callable[[str, int | None, int | None], None] = lambda *_: None
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self._thread = threading.get_ident()
        if isinstance(model, nn.Module):
            named = model.named_modules()
            self._modules = {name.replace("_orig_mod.", ""): module for name, module in named}
            self.names = {id(module): name for name, module in self._modules.items()}
        else:
            self._modules = {}

    @property
    def compiled(self) -> bool:
        """Whether some module of the model was compiled."""
        return any(
            hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
            for module in self._modules.values()
        )

    @property
    def active(self) -> bool:
        """Whether a call made now is the model's."""
        return bool(self._stack) or not self._modules

    def runs(self, name: str) -> bool:
        """Whether the module of this name, or one inside it, runs now."""
        return name in self._stack

    @property
    def current(self) -> str:
        """The dotted name of the innermost running module."""
        return self._stack[-1] if self._stack else ""

    def named(self, module: Any) -> str:
        """Give the dotted name of a module of the model."""
        return self.names.get(id(module), self.current)

    def says_cross(self, name: str) -> bool | None:
        """Say what the module's own name or attribute calls its attention, where it does."""
        module = self._modules.get(name)
        flag = getattr(module, "is_cross_attention", None)
        if isinstance(flag, bool):
            return flag
        leaf = name.lower()
        return True if any(word in leaf for word in _CROSS) else None

    def overlooked(self, seen: set[str]) -> list[str]:
        """Name the modules called attention that ran without a call that was seen."""
        found = []
        for name in sorted(self.ran):
            if not _ATTENDS.search(type(self._modules[name]).__name__) or not name:
                continue
            if not any(_within(name, other) or _within(other, name) for other in seen):
                found.append(name)
        return [name for name in found if not any(_within(name, o) for o in found if o != name)]

    def mixers(self) -> list[str]:
        """Name the classes of the modules that ran and may mix positions without attention."""
        classes = {type(self._modules[name]).__name__ for name in self.ran}
        return sorted(name for name in classes if _MIXES.search(name) or _ATTENDS.search(name))

    def takes_fast_path(self, module: nn.Module, inputs: tuple[Any, ...]) -> bool:
        """Whether torch would run this module through its fused encoder path."""
        if not isinstance(module, _FAST):
            return False
        if isinstance(module, nn.MultiheadAttention) and len({*map(id, inputs[:3])}) > 1:
            return False
        if module.training or not torch.backends.mha.get_fastpath_enabled():
            return False
        learning = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        return not learning

    def __enter__(self) -> Modules:
        if isinstance(self.model, nn.Module) and _generates(self.model):
            # set beside the module's parameters, past its __setattr__, and taken away on exit
            self.model.__dict__["generate"] = self._generating(self.model.generate)
        for name, module in self._modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                self.scripted.add(name)
                continue
            self._handles.append(module.register_forward_pre_hook(self._entering(name)))
            if _generates(module):
                step = module.register_forward_pre_hook(self._stepping(name), with_kwargs=True)
                self._handles.append(step)
            self._handles.append(
                module.register_forward_hook(self._leaving(name), always_call=True)
            )
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self.model, nn.Module):
            self._restore(self.model.__dict__)
        while self._handles:
            self._handles.pop().remove()
        self._stack.clear()

    def _generating(self, own: Any) -> Callable[..., Any]:
        @functools.wraps(own)
        def generate(*args: Any, **kwargs: Any) -> Any:
            run = generate.own  # pyright: ignore
            if threading.get_ident() != self._thread or not self._handles:
                return run(*args, **kwargs)
            return self.on_generate(run, args, kwargs)

        generate.own, generate.by = own, self  # pyright: ignore
        generate.replaced = self.model.__dict__.get("generate")  # pyright: ignore
        return generate

    def _restore(self, attributes: dict[str, Any]) -> None:
        """Take this watch's `generate` out of those that blocks have put over each other."""
        above, own = None, attributes.get("generate")
        while own is not None and getattr(own, "by", None) is not self:
            above, own = own, getattr(own, "replaced", None)
        if own is None:
            return
        if above is not None:
            above.own, above.replaced = own.own, own.replaced
        elif own.replaced is not None:
            attributes["generate"] = own.replaced
        else:
            del attributes["generate"]

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            if threading.get_ident() != self._thread:
                self.elsewhere.add(name)
                return
            self.ran.add(name)
            self.fast = self.fast or self.takes_fast_path(module, inputs)
            self._stack.append(name)

        return enter

    def _stepping(self, name: str) -> Callable[..., None]:
        def step(module: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == self._thread:
                self.on_step(name, cached(kwargs), _count(inputs, kwargs))

        return step

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if threading.get_ident() != self._thread or name not in self._stack:
                return
            while self._stack.pop() != name:
                pass
            if not self._stack:
                self.on_forward()

        return leave
