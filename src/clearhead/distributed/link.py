"""Messages between the ranks of a group; where one is lost, an error that names the rank."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from clearhead._core import value_error

__all__ = ["Link", "Message"]

# A message waits for this share of the group's timeout; what is left serves to find the lost rank.
PATIENCE = 0.75
# How long ranks whose connection breaks wait for the others to tell whom they have lost.
GRACE = 1.0


class Message:
    """A tensor under way to or from a peer."""

    def __init__(self, link: Link, begin: Callable[[], Any], x: Tensor, peer: int, step: str):
        self.link, self.x, self.peer, self.step, self.work = link, x, peer, step, None
        try:
            self.work = begin() if x.numel() else None
        except RuntimeError as error:
            raise link.lost(peer, step) from error

    def wait(self) -> Tensor:
        """Return the tensor when it has arrived, or may be changed again."""
        try:
            if self.work is not None:
                self.work.wait(timedelta(seconds=self.link.timeout * PATIENCE))
        except RuntimeError as error:
            late = "imed out" in str(error)
            raise self.link.lost(self.peer, self.step, late) from error
        return self.x

    def release(self) -> None:
        """Wait, and let go of the tensor."""
        self.wait()
        self.x, self.work = torch.empty(0), None


class Link:
    """This rank's connections to the other ranks of a group."""

    def __init__(self, group: ProcessGroup | None, call: str):
        if not (dist.is_available() and dist.is_initialized()):
            raise value_error(
                "group",
                f"{call} needs an initialized torch.distributed",
                hint="start the ranks with torchrun, and call "
                "torch.distributed.init_process_group('gloo') in each",
            )
        self.group: Any = dist.group.WORLD if group is None else group
        self.call = call
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            hint = f"call {call} on the ranks of the group only"
            raise value_error("group", "has this rank as a member", hint=hint)
        self.timeout = _timeout(self.group)

    def send(self, x: Tensor, peer: int, tag: int, step: str) -> Message:
        """Begin to send a contiguous tensor."""

        def begin() -> Any:
            return dist.isend(_bytes(x), group=self.group, group_dst=peer, tag=tag)

        return Message(self, begin, x, peer, step)

    def receive(self, x: Tensor, peer: int, tag: int, step: str) -> Message:
        """Begin to receive into a contiguous tensor."""

        def begin() -> Any:
            return dist.irecv(_bytes(x), group=self.group, group_src=peer, tag=tag)

        return Message(self, begin, x, peer, step)

    def gather(self, given: Any, step: str = "the exchange of arguments") -> list[Any]:
        """Return the objects of all ranks, in the order of the ranks."""
        packed = _packed((f"{step} of {self.call}", given))
        size = torch.tensor([len(packed)])
        peers = [(self.rank + i) % self.world for i in range(1, self.world)]
        sent = [
            self.send(x, peer, tag, step) for peer in peers for tag, x in enumerate((size, packed))
        ]
        sizes = [self.receive(torch.zeros_like(size), peer, 0, step) for peer in peers]
        coming = [
            self.receive(packed.new_empty(int(many.wait())), many.peer, 1, step) for many in sizes
        ]
        found = {message.peer: _unpacked(message.wait()) for message in coming}
        for message in sent:
            message.wait()
        for rank, (other, _) in sorted(found.items()):
            if other != f"{step} of {self.call}":
                raise self._elsewhere(rank, other, step)
        return [given if rank == self.rank else found[rank][1] for rank in range(self.world)]

    def _elsewhere(self, rank: int, other: str, step: str) -> RuntimeError:
        return RuntimeError(
            f"rank {self.name(rank)} is in {other}, and rank {self.name(self.rank)} in {step} of "
            f"{self.call}\n"
            "  to do: make the same calls on all ranks of the group, in the same order"
        )

    def fold(self, given: Any, merge: Callable[[Any, Any], Any], step: str) -> Any:
        """Return the merged objects of all ranks, merged in their order, on every rank.

        Each rank holds and sends two objects at most, however many ranks there are.
        """
        last = self.world - 1
        if self.rank > 0:
            given = merge(self._get(self.rank - 1, step), given)
        if self.rank < last:
            self._put(given, self.rank + 1, step)
            given = self._get((self.rank - 1) % self.world, step)
        if self.world > 1 and self.rank != last - 1:
            self._put(given, (self.rank + 1) % self.world, step)
        return given

    def _put(self, given: Any, peer: int, step: str) -> None:
        packed = _packed(given)
        for tag, x in enumerate((torch.tensor([len(packed)]), packed)):
            self.send(x, peer, tag, step).wait()

    def _get(self, peer: int, step: str) -> Any:
        size = self.receive(torch.zeros(1, dtype=torch.int64), peer, 0, step).wait()
        packed = torch.empty(int(size), dtype=torch.uint8)
        return _unpacked(self.receive(packed, peer, 1, step).wait())

    def agree(self, name: str, values: Sequence[Any]) -> None:
        """Raise on every rank where the ranks have different values."""
        for rank, value in enumerate(values):
            if value != values[0]:
                raise value_error(
                    name,
                    f"is the same on all ranks of {self.call}",
                    got=f"{values[0]} on rank {self.name(0)}, {value} on rank {self.name(rank)}",
                    hint="pass the same arguments on all ranks, and only the positions split",
                )

    def name(self, rank: int) -> int:
        """The number of a rank among all ranks, which torchrun gave it."""
        return dist.get_global_rank(self.group, rank)

    def lost(self, peer: int, step: str, late: bool = False) -> RuntimeError:
        """Build the error for a peer that does not answer: it may itself wait for another rank."""
        rest = self.timeout * (1 - PATIENCE)
        culprit = _blame(self, peer, rest if late else min(rest, GRACE))
        said = f"rank {self.name(culprit)} did not answer in {step} of {self.call}"
        if culprit != peer:
            said += f" (rank {self.name(peer)} waited for it, rank {self.name(self.rank)} for that)"
        return RuntimeError(
            f"{said}: it has ended, stalled or failed, or makes another call\n"
            f"  timeout  {self.timeout:g} s\n"
            "  to do: see the log of that rank, and start all ranks again"
        )


def _blame(link: Link, peer: int, seconds: float) -> int:
    """Follow who waits for whom, from a peer to the rank that waits for nobody."""
    try:
        store = dist.distributed_c10d._get_process_group_store(link.group)
        store.set(f"clearhead/{link.rank}", str(peer))
        end, seen = time.monotonic() + seconds, {link.rank}
        while time.monotonic() < end and peer not in seen:
            if store.check([f"clearhead/{peer}"]):
                seen.add(peer)
                peer = int(store.get(f"clearhead/{peer}"))
            time.sleep(0.02)
    except (RuntimeError, ValueError):
        # The store is lost with the rank that holds it.
        pass
    return peer


def _timeout(group: Any) -> float:
    """The timeout of the group in seconds."""
    options = group._get_backend(torch.device("cpu")).options
    return options._timeout.total_seconds()


def _bytes(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).view(torch.uint8)


def _packed(given: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(given, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _unpacked(x: Tensor) -> Any:
    return torch.load(io.BytesIO(x.numpy().tobytes()), weights_only=False)
