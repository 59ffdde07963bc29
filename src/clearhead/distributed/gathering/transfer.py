"""gather(): the records of all ranks on one of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from clearhead._core import is_number, type_error, value_error
from clearhead.distributed.gathering.joining import AXES, joined, reported_axis
from clearhead.distributed.link import Link
from clearhead.recording import Seen, outlined, restored

__all__ = ["gather"]


def gather(
    seen: Seen, group: ProcessGroup | None = None, to: int = 0, along: str | None = None
) -> Seen | None:
    """Join what `clearhead.watch` saw on each rank of a group; other ranks than `to` get None.

    All ranks of the group call it, each with its own records:

        with clearhead.watch(model, read=readings.Entropy()) as seen:
            model(tokens)
        whole = distributed.gather(seen)

    The records of a call are joined along the axis on which the ranks say that they hold shares:
    heads (tensor parallelism), positions (models that call `distributed.attend`), else samples
    (DDP, FSDP), in the order of the ranks. A model that is split in two ways is gathered over the
    groups of one after the other.

    - `to`: the rank of the group that receives the whole.
    - `along`: "head", "batch" or "position", where the ranks do not say so: heads, samples or
      queries are then numbered in the order of the ranks.

    Records that do not fit together, and other versions of their schema, are a ValueError on every
    rank; a rank that does not call it is an error within the timeout of the group.
    """
    link = Link(group, "distributed.gather")
    document, tensors = _told(link, seen, to, along)
    documents = _agreed(link, document)
    shares = _sent(link, tensors, [said["tensors"] for said in documents], to)
    whole, failure = None, ""
    try:
        along = along or reported_axis([said["seen"] for said in documents])
        if link.rank == to:
            pairs = zip(documents, shares, strict=True)
            whole = joined([restored(said["seen"], x) for said, x in pairs], along)
    except ValueError as error:
        failure = str(error)
    for failed in link.gather(failure, "the end of the joining"):
        if failed:
            raise ValueError(failed)
    return whole


def _told(link: Link, seen: Any, to: Any, along: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Check the arguments, and describe this rank's records; other ranks hear of a refusal."""
    try:
        if not isinstance(seen, Seen):
            hint = "pass what `with watch(model) as seen` gives"
            raise type_error("seen", "is what watch saw", got=type(seen).__name__, hint=hint)
        if not is_number(to) or not 0 <= to < link.world:
            raise value_error("to", f"is a rank of the group, 0..{link.world - 1}", got=to)
        if along is not None and along not in AXES:
            raise value_error("along", f"is one of {', '.join(map(repr, AXES))}", got=repr(along))
        outline, tensors = outlined(seen)
    except (ValueError, TypeError) as error:
        link.gather({"refused": str(error)})
        raise
    kinds = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
    schema = f"{outline['schema']}, version {outline['version']}"
    equal = {"to": to, "along": repr(along), "schema of the records": schema}
    return {"seen": outline, "tensors": kinds, "equal": equal}, tensors


def _agreed(link: Link, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what all ranks told, if they called alike."""
    told = link.gather(document)
    for rank, said in enumerate(told):
        if "refused" in said:
            name = link.name(rank)
            raise RuntimeError(
                f"rank {name} refuses its arguments of {link.call}: {said['refused']}"
            )
    for name in told[0]["equal"]:
        link.agree(name, [said["equal"].get(name) for said in told])
    return told


def _sent(
    link: Link, tensors: dict[str, Tensor], kinds: list[dict[str, Any]], to: int
) -> list[dict[str, Tensor]]:
    """Send this rank's tensors to one rank, which returns those of all."""
    step = "the transfer of the values"
    if link.rank != to:
        sent = [link.send(x, to, tag, step) for tag, x in enumerate(tensors.values())]
        for message in sent:
            message.wait()
        return []
    coming = {
        rank: [link.receive(torch.empty(shape, dtype=dtype), rank, tag, step)
               for tag, (shape, dtype) in enumerate(their.values())]
        for rank, their in enumerate(kinds)
        if rank != to
    }  # fmt: skip
    found = {
        rank: dict(zip(kinds[rank], [x.wait() for x in messages], strict=True))
        for rank, messages in coming.items()
    }
    return [tensors if rank == to else found[rank] for rank in range(link.world)]
