"""Sequences of tokens that a model reads together, and which of their positions are real."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from clearhead._core import type_error, value_error

__all__ = ["Batch"]


class Batch:
    """Token numbers (batch, position) and which of them are real; padding may be on any side."""

    def __init__(self, tokens: Tensor, real: Tensor | None = None) -> None:
        if (
            not isinstance(tokens, Tensor)
            or tokens.is_floating_point()
            or tokens.ndim not in (1, 2)
        ):
            got = getattr(tokens, "shape", type(tokens).__name__)
            raise type_error("tokens", "are integers, (batch, position) or (position,)", got=got)
        self.tokens = tokens if tokens.ndim == 2 else tokens[None]
        if real is None:
            real = torch.ones_like(self.tokens, dtype=torch.bool)
        real = real if real.ndim == 2 else real[None]
        if real.shape != self.tokens.shape:
            shapes = {"tokens": self.tokens, "real": real}
            raise value_error("real", "needs one entry for each token", shapes=shapes)
        if real.dtype != torch.bool and not bool(((real == 0) | (real == 1)).all()):
            raise type_error("real", "is True (or 1) for real tokens", got=real.dtype)
        self.real = real.bool()
        self.padded = not bool(self.real.all())

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of sequences, and the number of positions."""
        batch, position = self.tokens.shape
        return batch, position

    @cached_property
    def start(self) -> Tensor:
        """(batch,): the first real position of each sequence."""
        return self.real.long().argmax(-1) if self.sizes[1] else self.real.new_zeros(self.sizes[0])

    @cached_property
    def ids(self) -> Tensor:
        """The tokens, with a unique number at each padded position."""
        own = self.tokens.min() - 1 - torch.arange(self.sizes[1], device=self.tokens.device)
        return torch.where(self.real, self.tokens.long(), own)

    @cached_property
    def before(self) -> Tensor:
        """(batch, position): the last earlier position with the same token; -1 if there is none."""
        order = self.ids.argsort(dim=-1, stable=True)
        sorted_ids = self.ids.gather(-1, order)
        last = torch.full_like(order, -1)
        last[:, 1:] = torch.where(sorted_ids[:, 1:] == sorted_ids[:, :-1], order[:, :-1], -1)
        return torch.empty_like(order).scatter_(-1, order, last)
