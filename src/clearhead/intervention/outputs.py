"""What replaces the output of a head: zero, a mean, or the output of another position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead._capture import Call, Handler, attached, call_with
from clearhead._core import value_error
from clearhead.intervention.cuts import Cut, Offsets
from clearhead.intervention.selection import HeadSelection

__all__ = ["HOW", "Ablation", "contexts"]

HOW = ("zero", "mean", "resample")
Contexts = dict[int, list[Tensor]]


class Ablation(Cut):
    """Replaces the outputs of heads."""

    def __init__(
        self,
        how: str,
        reference: Contexts | None,
        seed: int,
        selection: HeadSelection,
        samples: slice = slice(None),
    ) -> None:
        super().__init__(selection, samples)
        self.how, self.reference, self.seed = how, reference, seed

    def context(self, context: Tensor, call: Call, heads: list[int], offsets: Offsets) -> Tensor:
        """Return zeros, the mean over positions, or the output of positions drawn at random."""
        if self.how == "zero":
            return torch.zeros_like(context)
        others = self._others(context, call, heads, offsets)
        if self.how == "mean":
            return others.mean(2, keepdim=True).expand_as(context)
        return self._drawn(others, context, call)

    def _others(self, context: Tensor, call: Call, heads: list[int], offsets: Offsets) -> Tensor:
        """Give the outputs to draw from, (batch or 1, head, any, value_dim)."""
        if self.reference is None:
            if offsets.query > 0:
                raise value_error(
                    "reference",
                    f"is needed for how={self.how!r} with a cache: a step has too few positions",
                    hint="give inputs of the model; the outputs of a run on them are taken",
                )
            return context
        runs = self.reference.get(call.layer)
        if runs is None:
            raise value_error("reference", f"has no call of layer {call.layer} ({call.module})")
        kept = runs[call.call % len(runs)][:, heads]
        return kept.transpose(0, 1).flatten(1, 2)[None].to(context)

    def _drawn(self, others: Tensor, context: Tensor, call: Call) -> Tensor:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + call.layer)
        batch, heads, query, width = context.shape
        at = torch.randint(others.shape[2], (batch, 1, query, 1), generator=draw)
        at = at.to(context.device).expand(batch, heads, query, width)
        return others.expand(batch, -1, -1, -1).gather(2, at)


class _Collector(Handler):
    """Keeps every context that a run makes."""

    def __init__(self) -> None:
        self.found: Contexts = {}

    def after(self, call: Call, context: Tensor) -> None:
        """Keep a context."""
        self.found.setdefault(call.layer, []).append(context.detach().clone())


def contexts(model: Any, inputs: Any) -> Contexts:
    """Run the model once, and give the contexts of each layer in the order of its calls."""
    collector = _Collector()
    with attached(model, collector), torch.no_grad():
        call_with(model, inputs)
    return collector.found
