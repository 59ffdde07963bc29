"""head_importance(): how much a loss depends on each head, from one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead._capture import Call, call_with
from clearhead._core import value_error
from clearhead.intervention.cuts import Cut, Offsets
from clearhead.intervention.cutter import cutting
from clearhead.intervention.selection import Heads, HeadSelection, Model, select_heads

__all__ = ["head_importance"]


def head_importance(
    model: Model,
    inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    layers: int | Sequence[int] | None = None,
    heads: Heads = None,
) -> Tensor:
    """Estimate how much the loss depends on each head, from one backward pass.

    >>> import torch, clearhead as ch
    >>> model = ch.models.load()
    >>> tokens = model.vocabulary.encode("hello")[None]
    >>> loss = lambda logits: torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    >>> ch.head_importance(model, tokens, loss).shape
    torch.Size([4, 4])

    Each head's output is multiplied by a gate of one; its importance is the absolute gradient of
    the loss with respect to the gate, summed over the samples (Michel et al. 2019, "Are Sixteen
    Heads Really Better than One?", whose mean over samples this is for a loss that is a mean).
    The gates change no bit of the output, and the parameters get no gradient.

    - `inputs`: a tensor, a tuple of arguments or a dict of keywords.
    - `loss`: makes a scalar of the output; by default the output's own `loss`.

    The answer is (layer, head), NaN where a layer has fewer heads or was not chosen.
    """
    gates = GateCut(select_heads(layers, heads))
    with torch.enable_grad(), cutting(model, [gates]) as cutter:
        output = call_with(model, inputs)
        scalar = _loss(output, loss)
        cutter.reached("head_importance", gates)
        made = [gate for _, _, gate in gates.gates]
        gradients = torch.autograd.grad(scalar, made, allow_unused=True)
    table = scalar.new_full((max(cutter.totals) + 1, max(cutter.totals.values())), float("nan"))
    for (layer, some, gate), gradient in zip(gates.gates, gradients, strict=True):
        size = torch.zeros_like(gate) if gradient is None else gradient.abs()
        table[layer, some] = table[layer, some].detach().nan_to_num(0.0) + size.sum((0, 2, 3))
    return table


def _loss(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    scalar = getattr(output, "loss", None) if loss is None else loss(output)
    if scalar is None:
        hint = "head_importance(model, inputs, lambda output: ...)"
        raise value_error("loss", "is needed: the model's output has none of its own", hint=hint)
    if not isinstance(scalar, Tensor) or scalar.numel() != 1 or not scalar.requires_grad:
        got = tuple(scalar.shape) if isinstance(scalar, Tensor) else type(scalar).__name__
        raise value_error("loss", "gives one number that depends on the model's output", got=got)
    return scalar.reshape(())


class GateCut(Cut):
    """A factor of one on each head's output of each sample, to take the gradient of."""

    def __init__(self, selection: HeadSelection) -> None:
        super().__init__(selection)
        self.gates: list[tuple[int, list[int], Tensor]] = []

    @property
    def alike(self) -> bool:
        """Each head has its own gate."""
        return False

    def context(self, context: Tensor, call: Call, heads: list[int], offsets: Offsets) -> Tensor:
        """Multiply by the gates, which changes no bit."""
        gate = context.new_ones(*context.shape[:2], 1, 1, requires_grad=True)
        self.gates.append((call.layer, heads, gate))
        return context * gate
