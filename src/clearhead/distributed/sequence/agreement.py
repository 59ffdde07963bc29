"""What the ranks of a call tell each other first, so that a difference is an error, not a hang."""

from __future__ import annotations

import hashlib
import socket
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any

import torch
from torch import Tensor

from clearhead._core import Sizes
from clearhead.attention import check_fit, draw_seed, free_bytes
from clearhead.distributed.link import Link
from clearhead.distributed.sequence.plan import Shares
from clearhead.masks import Mask
from clearhead.readings import Reading

__all__ = ["check_memory", "describe", "shares_of"]

# The form of the messages between ranks and of the parts of readings; it changes with them.
SCHEMA = 1
# Values below this are allocated without a look at the free memory.
SMALL = 1 << 26


def describe(
    tensors: dict[str, Tensor], mask: Any, read: tuple[Reading, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Describe a rank's call: its own sizes, and what has to be equal on all ranks."""
    query, key, _ = tensors.values()
    lead = query.shape[:-2] if query.ndim > 3 else (*query.shape[:-2], 1)
    equal = {"version of clearhead": f"{_version()}, messages of version {SCHEMA}"}
    equal |= {name: _tensor(x) for name, x in tensors.items()}
    equal |= {"mask": _fingerprint(mask), "read": f"({', '.join(map(_reading, read))})"}
    equal |= {name: _fingerprint(x) for name, x in options.items()}
    equal["torch.is_grad_enabled()"] = str(torch.is_grad_enabled())
    return {
        "positions": (query.shape[-2], key.shape[-2]),
        "lead": (prod(lead[:-1]), lead[-1], key.shape[-3] if key.ndim > 3 else 1),
        "seed": draw_seed(query.device) if options["dropout"] else None,
        "equal": equal,
    }


def shares_of(link: Link, told: list[dict[str, Any]]) -> Shares:
    """Compare what the ranks told, and return the sizes of the whole map."""
    for rank, said in enumerate(told):
        if "refused" in said:
            raise RuntimeError(
                f"rank {link.name(rank)} refuses its arguments of {link.call}: {said['refused']}"
            )
    for name in told[0]["equal"]:
        link.agree(name, [said["equal"].get(name) for said in told])
    queries, sources = zip(*(said["positions"] for said in told), strict=True)
    batch, head, source_heads = told[0]["lead"]
    return Shares(Sizes(batch, head, sum(queries), sum(sources)), source_heads, queries, sources)


def check_memory(link: Link, read: tuple[Reading, ...], shares: Shares, itemsize: int) -> None:
    """Raise on all ranks where the values of some rank do not fit beside those of its neighbours.

    Ranks on one machine share its memory.
    """
    sizes = [shares.sizes._replace(query=queries) for queries in shares.queries]
    if max(sum(r.nbytes(own, itemsize) for r in read) for own in sizes) < SMALL:
        return
    given = socket.gethostname(), free_bytes(torch.device("cpu"))
    told = link.gather(given, "the check of the memory")
    ranks = Counter(host for host, _ in told)
    for rank, (host, free) in enumerate(told):
        if free is not None:
            own, many = sizes[rank], ranks[host]
            have = f"{free:,} free for {many} ranks on the machine of rank {link.name(rank)}"
            check_fit(read, own, itemsize, free // many, have, own)


def _tensor(x: Tensor) -> str:
    """What is equal of the shares of a tensor: all but the positions."""
    shape = ", ".join(map(str, (*x.shape[:-2], "positions", x.shape[-1])))
    gradient = " with a gradient" if x.requires_grad else ""
    return f"({shape}) {str(x.dtype).removeprefix('torch.')}{gradient}"


def _reading(reading: Reading) -> str:
    held = [_fingerprint(x) for x in vars(reading).values() if isinstance(x, Mask)]
    return " ".join([repr(reading), *held])


def _fingerprint(x: Any) -> str:
    """The text of an argument and a digest of its tensors; a user's function is its name."""
    tensors = list(_tensors(x))
    text = f"{_tensor(x)}" if isinstance(x, Tensor) and x.ndim > 1 else _text(x)
    if not tensors:
        return text
    digest = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return f"{text} with data {digest.hexdigest()}"


def _text(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" + (
            " with a gradient" if x.requires_grad else ""
        )
    return repr(x)


def _tensors(x: Any) -> Iterator[Tensor]:
    """The tensors that an argument holds, in an order that all ranks share."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mask):
        parts = x.children or [value for _, value in sorted(vars(x).items())]
        for part in parts:
            yield from _tensors(part)


def _version() -> str:
    try:
        return version("clearhead")
    except PackageNotFoundError:
        return "not installed"
