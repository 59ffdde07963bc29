"""The modules of a model by name, and what their classes and attributes say of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from clearhead._capture.transformers import declares_cross

__all__ = ["Inventory", "outermost"]

_ATTENDS = re.compile(r"attention|attn", re.IGNORECASE)
_MIXES = re.compile(r"mamba|ssm|rwkv|lstm|gru|rnn|hyena|retention|conv|fourier|fnet|mixer", re.I)
_RECURS = re.compile(
    r"mamba|mixer|ssm|rwkv|lstm|gru|rnn|hyena|retention|recurrent|deltanet|linearattention"
    r"|shortconv|fourier",
    re.IGNORECASE,
)
_HEADS = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "heads", "h")


def _within(name: str, other: str) -> bool:
    """Whether a module is another one, or inside it."""
    return not other or name == other or name.startswith(other + ".")


def _plain(name: str) -> str:
    """Leave out of a dotted name what `torch.compile` put in."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def outermost(names: list[str]) -> list[str]:
    """Leave out the modules that lie inside of others."""
    return [name for name in names if not any(_within(name, o) for o in names if o != name)]


class Inventory:
    """The modules of a model; of a plain function there are none."""

    def __init__(self, model: Any) -> None:
        self.model = model
        named = list(model.named_modules()) if isinstance(model, nn.Module) else []
        self.by_name = {_plain(name): module for name, module in named}
        self.names: dict[int, str] = {}
        self.scripted: set[str] = set()
        for name, module in self.by_name.items():
            if isinstance(module, torch.jit.ScriptModule):
                self.scripted.add(name)
            else:
                self.names[id(module)] = name
        self._wrapped = len(named) != len(self.by_name)
        self._children = [(x, tuple(x._modules.values())) for x in self.by_name.values()]

    def is_of(self, model: Any) -> bool:
        """Whether a model is this one, with the modules that it had."""
        same = model is self.model and not self.scripted
        return same and all(tuple(x._modules.values()) == had for x, had in self._children)

    @property
    def compiled(self) -> list[nn.Module]:
        """The modules that `module.compile()` was called on."""
        return [module for module in self.by_name.values() if module._compiled_call_impl]

    @property
    def eager(self) -> bool:
        """Whether nothing of it is compiled."""
        return not self._wrapped and not self.compiled

    def declares_cross(self, name: str) -> bool | None:
        """Whether a module is cross attention by its own attribute or name, where either says."""
        return declares_cross(self.by_name.get(name), name)

    def declared_heads(self, name: str) -> int:
        """Give how many heads a module says that it has; 0 where it does not say."""
        module = self.by_name.get(name)
        found = [getattr(module, name, None) for name in _HEADS]
        return next((x for x in found if isinstance(x, int)), 0)

    def attending(self, ran: Iterable[str], seen: set[str]) -> list[str]:
        """Name the modules called attention that ran without a call that was seen."""
        found = []
        for name in sorted(ran):
            if not _ATTENDS.search(type(self.by_name[name]).__name__) or not name:
                continue
            if not any(_within(name, other) or _within(other, name) for other in seen):
                found.append(name)
        return outermost(found)

    def recurrent(self, ran: set[str], seen: set[str]) -> list[tuple[str, str]]:
        """Name the modules that ran and mix positions by other means, with their classes."""
        whole, found = type(self.model).__name__, {}
        for name in sorted(ran - {""}):
            of = type(self.by_name[name]).__name__
            # Of RecurrentGemmaMLP in RecurrentGemma only MLP names what the module does.
            same = sum(1 for _ in takewhile(lambda x: x[0] == x[1], zip(of, whole, strict=False)))
            if _RECURS.search(of[same:]) and not any(_within(other, name) for other in seen):
                found[name] = of
        return [(name, found[name]) for name in outermost(list(found))]

    def mixers(self, ran: Iterable[str]) -> list[str]:
        """Name the classes of the modules that ran and may mix positions without attention."""
        classes = {type(self.by_name[name]).__name__ for name in ran}
        return sorted(name for name in classes if _MIXES.search(name) or _ATTENDS.search(name))
