"""A batch that is padded on one side, and each of its samples alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.dependence.subject import Key, ModelInputs

__all__ = ["PaddedBatch"]


class PaddedBatch:
    """The real content of each sample, padded on one side in a batch, and alone."""

    def __init__(
        self, read: ModelInputs, real: Tensor, mask: str, side: str, amount: int, pad: int
    ) -> None:
        self.side, self._read = side, read
        self.rows = [row.nonzero().flatten() for row in real]
        self.size = max(map(len, self.rows)) + amount
        main, along = read.main.key, self._along()
        self.batch = self._inputs(
            {name: self._padded(value, pad if name == main else 0) for name, value in along}
            | {mask: self.real().long()}
        )
        self.alone = [
            self._inputs(
                self._others(sample)
                | {name: self._taken(value, sample) for name, value in along}
                | {mask: torch.ones(1, len(rows), dtype=torch.long)}
            )
            for sample, rows in enumerate(self.rows)
        ]

    def start(self, sample: int) -> int:
        """The first real position of a sample."""
        return self.size - len(self.rows[sample]) if self.side == "left" else 0

    def real(self) -> Tensor:
        """Which positions are real, bool (batch, position)."""
        real = torch.zeros(len(self.rows), self.size, dtype=torch.bool)
        for sample, rows in enumerate(self.rows):
            real[sample, self.start(sample) :][: len(rows)] = True
        return real

    def _along(self) -> list[tuple[str, Tensor]]:
        """List the arguments that have one entry a position, in every sample."""
        batch, positions = self._read.batch, self._read.positions
        return [
            (name, value.expand(batch, *value.shape[1:]))
            for name, value in self._read.kwargs.items()
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == positions
        ]

    def _others(self, sample: int) -> dict[str, Tensor]:
        """Take a sample of the other arguments that have one entry a sample."""
        batch = self._read.batch
        return {
            name: value[sample][None]
            for name, value in self._read.kwargs.items()
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == batch
        }

    def _inputs(self, tensors: dict[str, Tensor]) -> ModelInputs:
        kwargs = {**self._read.kwargs, **tensors}
        kwargs.pop("labels", None)
        key: Key = self._read.main.key
        batch, positions = kwargs[str(key)].shape[:2]
        return replace(self._read, args=(), kwargs=kwargs, positions=positions, batch=batch)

    def _taken(self, value: Tensor, sample: int) -> Tensor:
        return value[sample, self.rows[sample].to(value.device)][None]

    def _padded(self, value: Tensor, fill: int) -> Tensor:
        shape = (len(self.rows), self.size, *value.shape[2:])
        padded = torch.full(shape, fill, dtype=value.dtype, device=value.device)
        for sample, rows in enumerate(self.rows):
            padded[sample, self.start(sample) :][: len(rows)] = self._taken(value, sample)[0]
        return padded
