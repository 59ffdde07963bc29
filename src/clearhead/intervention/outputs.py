"""What is done to the output of a head: zero, a mean, that of another place, or a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead._capture import Call, Handler, attach, call_with
from clearhead._core import value_error
from clearhead.intervention.choosing import Chosen
from clearhead.intervention.cutter import Cut, Place

__all__ = ["HOW", "Ablated", "Gates", "contexts"]

HOW = ("zero", "mean", "resample")
Contexts = dict[int, list[Tensor]]


class Ablated(Cut):
    """The output of a head, replaced."""

    def __init__(
        self,
        how: str,
        reference: Contexts | None,
        seed: int,
        chosen: Chosen,
        samples: slice = slice(None),
    ) -> None:
        super().__init__(chosen, samples)
        self.how, self.reference, self.seed = how, reference, seed

    def context(self, context: Tensor, call: Call, heads: list[int], place: Place) -> Tensor:
        """Answer the output of nothing, of the mean position, or of a position drawn at random."""
        if self.how == "zero":
            return torch.zeros_like(context)
        others = self._others(context, call, heads, place)
        if self.how == "mean":
            return others.mean(2, keepdim=True).expand_as(context)
        return self._drawn(others, context, call)

    def _others(self, context: Tensor, call: Call, heads: list[int], place: Place) -> Tensor:
        """Give outputs to replace from, (batch or 1, head, any, value_dim)."""
        if self.reference is None:
            if place.query > 0:
                raise value_error(
                    "reference",
                    f"is needed for how={self.how!r} under a cache: a step has few positions",
                    hint="give inputs of the model, whose run is taken the outputs from",
                )
            return context
        runs = self.reference.get(call.layer)
        if runs is None:
            raise value_error("reference", f"made no call of layer {call.layer} ({call.module})")
        kept = runs[call.call % len(runs)][:, heads]
        return kept.transpose(0, 1).flatten(1, 2)[None].to(context)

    def _drawn(self, others: Tensor, context: Tensor, call: Call) -> Tensor:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + call.layer)
        batch, heads, query, width = context.shape
        at = torch.randint(others.shape[2], (batch, 1, query, 1), generator=draw)
        at = at.to(context.device).expand(batch, heads, query, width)
        return others.expand(batch, -1, -1, -1).gather(2, at)


class Gates(Cut):
    """A factor of one on each head's output of each sample, to take the gradient of."""

    def __init__(self, chosen: Chosen) -> None:
        super().__init__(chosen)
        self.gates: list[tuple[int, list[int], Tensor]] = []

    def context(self, context: Tensor, call: Call, heads: list[int], place: Place) -> Tensor:
        """Multiply by the gates, which changes no bit."""
        gate = context.new_ones(*context.shape[:2], 1, 1, requires_grad=True)
        self.gates.append((call.layer, heads, gate))
        return context * gate


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
    with attach.attached(model, collector), torch.no_grad():
        call_with(model, inputs)
    return collector.found
