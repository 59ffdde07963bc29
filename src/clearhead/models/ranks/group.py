"""The processes of one training: each takes some rows of every batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead._core import value_error
from clearhead.models.ranks.dropout import RowsOfDropout
from clearhead.models.ranks.lost import naming_lost

__all__ = ["ALONE", "Group", "RefusedByFirst", "process_group"]

Batch = tuple[Tensor, Tensor, Any]  # tokens, targets, mask or None


class RefusedByFirst(RuntimeError):
    """The first process, which reports it, has refused to begin."""


@dataclass(frozen=True)
class Group:
    """This process among those of a training: its number, how many there are, their process group.

    They are all of the default group unless `of` is another one.
    """

    rank: int = 0
    world: int = 1
    of: Any = None

    @property
    def first(self) -> bool:
        """Whether this is the process that prints, and writes what is not sharded."""
        return self.rank == 0

    def parallel(self, model: nn.Module) -> Any:
        """Return the model, whose gradients are averaged over the processes."""
        if self.world == 1:
            return model
        return nn.parallel.DistributedDataParallel(model, process_group=self.of)

    @contextmanager
    def rows(self, batch: Batch) -> Iterator[Batch]:
        """Give this process's rows of a batch; dropout inside drops what it drops in the whole."""
        tokens, targets, mask = batch
        many = len(tokens)
        if many < self.world:
            rule = f"has a row for each of {self.world} processes"
            raise value_error(
                "batch", rule, got=many, hint="take a larger batch, or fewer processes"
            )
        mine = range(many)[self.rank * many // self.world : (self.rank + 1) * many // self.world]
        at = slice(mine.start, mine.stop)
        if mask is not None:
            edges = mask.dense(tokens.shape[1], tokens.shape[1], batch=many)
            mask = masks.dense(edges[at] if edges.ndim == 4 and len(edges) == many else edges)
        with RowsOfDropout(at, many):
            yield tokens[at], targets[at], mask

    def sums(self, *numbers: float) -> list[float]:
        """Add numbers up over the processes."""
        if self.world == 1:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.float64)
        torch.distributed.all_reduce(found, group=self.of)
        return found.tolist()

    def told(self, given: Any) -> Any:
        """Return what the first process gives."""
        if self.world == 1:
            return given
        told = [given]
        torch.distributed.broadcast_object_list(told, group=self.of, group_src=0)
        return told[0]

    def naming_lost(self, step: str) -> AbstractContextManager[None]:
        """Inside the block a process that is lost is an error that names it and the step."""
        if self.world == 1:
            return nullcontext()
        return naming_lost(self.of or torch.distributed.group.WORLD, step)

    @contextmanager
    def only_first(self, block: AbstractContextManager[Any]) -> Iterator[None]:
        """Enter a block in the first process; where that fails, no other goes on."""
        with ExitStack() as stack:
            failure = None
            try:
                if self.first:
                    stack.enter_context(block)
            except Exception as error:
                failure = error
            refused = self.told(failure is not None)
            if failure is not None:
                raise failure
            if refused:
                raise RefusedByFirst("the first process has refused to begin")
            yield


ALONE = Group()


@contextmanager
def process_group(rank: tuple[int, int] | None) -> Iterator[Group]:
    """Join the group of a process, (its number, how many there are); None is alone."""
    if rank is None:
        yield ALONE
        return
    torch.distributed.init_process_group("gloo")
    group = Group(*rank)
    try:
        with group.naming_lost("the start or the end of the training"):
            yield group
    finally:
        torch.distributed.destroy_process_group()
