"""Masks that hold data for every position: lengths, padding and whole bool tensors."""

# The methods are documented once, in EdgeSet and Mask.
# ruff: noqa: D102
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead._core import readable, type_error, value_error
from clearhead.masks.mask import Mask
from clearhead.masks.protocol import Block, Own, Tile
from clearhead.masks.ranges import Interval, Ranges, runs

if TYPE_CHECKING:
    from clearhead._core import Sizes

# A tensor with more numbers than this is shown by its shape.
SHOWN = 64


class Lengths(Mask):
    """Edges inside the filled part of every sample."""

    _made_of = ("source", "query")

    def __init__(self, source: Tensor, query: Tensor | None):
        self.source, self.query = source, query
        counts = [t.shape[0] for t in (source, query) if t is not None and t.dim()]
        self.own = Own(batch=many_samples(counts))
        self._known: list[tuple[int, int | None]] | None = None

    def to(self, device: torch.device | str) -> Mask:
        query = None if self.query is None else self.query.to(device)
        return Lengths(self.source.to(device), query)

    def check(self, sizes: Sizes) -> None:
        super().check(sizes)
        for b, (source, query) in enumerate(self._read() or ()):
            for name, length in (("source", source), ("query", query)):
                size = getattr(sizes, name)
                if length is not None and length > size:
                    raise value_error(
                        "mask",
                        f"lengths: sample {b} has {length} {name} positions, the call has {size}",
                        shapes={"call (query, source)": (sizes.query, sizes.source)},
                        hint="make the mask from the data of this call",
                    )

    def _least(self) -> int:
        return max((max(source, query or 0) for source, query in self._read() or ()), default=0)

    def _read(self) -> list[tuple[int, int | None]] | None:
        """The lengths of every sample as numbers, None where they cannot be read."""
        if self._known is None and all(t is None or readable(t) for t in (self.source, self.query)):
            many = 1 if self.own.batch is None else self.own.batch
            source = self.source.expand(many).tolist()
            query = [None] * many if self.query is None else self.query.expand(many).tolist()
            self._known = list(zip(source, query, strict=True))
        return self._known

    def _of(self, lengths: Tensor, b: Any, like: Any) -> Tensor:
        lengths = lengths.to(like.device)
        return lengths[b] if lengths.dim() and lengths.shape[0] != 1 else lengths.reshape(())

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        edges = (i == i) & (j < self._of(self.source, b, j))
        return edges if self.query is None else edges & (i < self._of(self.query, b, j))

    def _text(self, full: bool) -> str:
        query = "" if self.query is None else f", query={show(self.query)}"
        return f"lengths({show(self.source)}{query})"

    def _block(self, tile: Tile) -> Block:
        known = self._read()
        if known is None:
            return Block.PARTIAL
        if all(tile.left >= s or (q is not None and tile.top >= q) for s, q in known):
            return Block.EMPTY
        full = all(tile.right <= s and (q is None or tile.bottom <= q) for s, q in known)
        return Block.FULL if full else Block.PARTIAL

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        shape = () if self.own.batch is None else (-1, 1, 1)
        stop = self.source.to(i.device).reshape(shape) + torch.zeros_like(i)
        if self.query is not None:
            stop = torch.where(i < self.query.to(i.device).reshape(shape), stop, 0)
        return torch.zeros_like(stop), stop

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        source = int(self._of(self.source, b, self.source))
        sample = f"sample {b}" if self.own.batch else "the sequence"
        if self.query is not None and i >= (query := int(self._of(self.query, b, self.query))):
            return f"query {i} is padding: {sample} has {query} queries"
        if j >= source:
            return f"source {j} is padding: {sample} has {source} sources"
        return f"source {j} is one of the {source} sources of {sample}"


def lengths(
    source: Tensor | Sequence[int] | int, *, query: Tensor | Sequence[int] | int | None = None
) -> Mask:
    """The first `source` sources of every sample are real, the others are padding on the right.

    >>> print(lengths([3, 1]).picture(3, sample=1))
    sample 1
      0 1 2
    0 ■ · ·
    1 ■ · ·
    2 ■ · ·

    One length for all samples, or one a sample, (batch,). `query` also empties the rows of
    padded queries.
    """
    if source is None:
        raise type_error("source", "takes lengths, as integers", got="None")
    sides = {"source": source, "query": query}
    found = {name: _lengths(name, side) for name, side in sides.items() if side is not None}
    counts = {len(side) for side in found.values() if side.dim() and len(side) != 1}
    if len(counts) > 1:
        raise value_error("query", "has one length a sample, as source does", shapes=found)
    return Lengths(found["source"], found.get("query"))


def _lengths(name: str, values: Any) -> Tensor:
    tensor = as_tensor(name, values)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        hint = "keep(real) takes one bool for each position" if tensor.dtype == torch.bool else None
        raise type_error(name, "takes lengths, as integers", got=str(tensor.dtype), hint=hint)
    if tensor.dim() > 1:
        raise value_error(name, "is one length, or one a sample (batch,)", shapes={name: tensor})
    if readable(tensor) and (tensor < 0).any():
        raise value_error(name, "lengths are 0 or more", got=tensor.min().item())
    return tensor.to(torch.int64)


class Keep(Mask):
    """Edges to real sources."""

    _made_of = ("real",)

    def __init__(self, real: Tensor):
        self.real = real
        self.own = Own(batch=samples(real), source=real.shape[-1])
        self._counts: tuple[list[int], ...] | None = None

    def to(self, device: torch.device | str) -> Mask:
        return Keep(self.real.to(device))

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        return (i == i) & at(self.real, b, j)

    def _text(self, full: bool) -> str:
        return f"keep({show(self.real)})"

    def _block(self, tile: Tile) -> Block:
        counts = self._counted()
        if counts is None:
            return Block.PARTIAL
        left, right = tile.left, tile.right
        some, every = (x[right] - x[left] for x in counts)
        if not some:
            return Block.EMPTY
        return Block.FULL if every == right - left else Block.PARTIAL

    def _counted(self) -> tuple[list[int], ...] | None:
        """How many sources up to each are real in some samples, and in all; None if unreadable."""
        if self._counts is None and readable(self.real):
            flat = torch.atleast_2d(self.real)
            self._counts = tuple([0, *x.cumsum(0).tolist()] for x in (flat.any(0), flat.all(0)))
        return self._counts

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        found = runs(self.real.to(i.device))
        if found is None:
            return None
        start, stop = (x if self.own.batch is None else x[:, None, None] for x in found)
        return start + torch.zeros_like(i), stop + torch.zeros_like(i)

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        real = bool(at(self.real, b, torch.tensor(j, device=self.real.device)))
        sample = f" in sample {b}" if self.own.batch else ""
        return f"source {j} is {'real' if real else 'padding'}{sample}"


def keep(real: Tensor | Sequence[bool] | Sequence[Sequence[bool]]) -> Mask:
    """Real sources may be read, padding on any side may not: True = real.

    >>> print(keep([False, True, True]).picture(3))
      0 1 2
    0 · ■ ■
    1 · ■ ■
    2 · ■ ■

    (source,) for all samples, or (*batch, source). Padded queries still read the real sources;
    `keep(real) & same(real, real)` empties their rows too.
    """
    tensor = as_tensor("real", real)
    if tensor.dtype != torch.bool:
        hint = (
            "tokens != pad_id makes it; masks.from_huggingface(mask) takes a mask of ones and zeros"
        )
        raise type_error("real", "takes bools, True = real", got=str(tensor.dtype), hint=hint)
    # Several batch axes count as their product, as in `attend`.
    return Keep(ranked("real", tensor.flatten(0, -2) if tensor.dim() > 2 else tensor))


class Dense(Mask):
    """The edges that are True in a tensor."""

    _made_of = ("tensor",)
    stored = True

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        batch, head = tensor.shape[:2] if tensor.dim() == 4 else (None, None)
        query, source = (None if size == 1 else size for size in tensor.shape[-2:])
        self.own = Own(batch, head, query, source)

    def to(self, device: torch.device | str) -> Mask:
        return Dense(self.tensor.to(device))

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        tensor = self.tensor.to(j.device)
        i, j = (
            x if own is not None else x * 0
            for x, own in ((i, self.own.query), (j, self.own.source))
        )
        if tensor.dim() == 2:
            return tensor[i, j]
        many, heads = tensor.shape[:2]
        return tensor[b if many > 1 else b * 0, h if heads > 1 else h * 0, i, j]

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        edges = self.tensor.to(rows.device)
        if self.own.query is not None:
            edges = edges.index_select(-2, rows)
        if self.own.source is not None:
            edges = edges.index_select(-1, columns)
        return edges.expand(*edges.shape[:-2], rows.shape[0], columns.shape[0])

    def _text(self, full: bool) -> str:
        return f"dense({show(self.tensor)})"

    def _block(self, tile: Tile) -> Block:
        # On an accelerator each answer would synchronize with the device.
        if not readable(self.tensor) or self.tensor.device.type != "cpu":
            return Block.PARTIAL
        rows = slice(tile.top, tile.bottom) if self.own.query is not None else slice(None)
        columns = slice(tile.left, tile.right) if self.own.source is not None else slice(None)
        part = self.tensor[..., rows, columns]
        if not part.any():
            return Block.EMPTY
        return Block.FULL if part.all() else Block.PARTIAL

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        tensor = self.tensor.to(i.device)
        tensor = tensor.expand(*tensor.shape[:-2], sizes.query, sizes.source)
        return runs(tensor if len(i) == sizes.query else tensor.index_select(-2, i))

    def _ranges(self, i: Tensor, sizes: Sizes, most: int) -> list[Interval] | None:
        # Looking for the runs of a whole map costs more than reading it as it is.
        return None if self.own.query is not None else super()._ranges(i, sizes, most)

    def ranges(self, query: int, source: int | None = None, most: int = 4) -> Ranges | None:
        # The same without the checks: `strip` is what a kernel reads.
        return None if self.own.query is not None else super().ranges(query, source, most)

    def strip(self, queries: range, sizes: Sizes) -> Tensor:
        tensor = self.tensor
        if self.own.query is not None:
            tensor = tensor[..., queries.start : queries.stop, :]
        return tensor if tensor.ndim == 4 else tensor[None, None]

    def tensors(self) -> list[Tensor]:
        return [self.tensor]

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        b_, h_, i_, j_ = (torch.tensor(x, device=self.tensor.device) for x in (b, h, i, j))
        return f"the tensor is {bool(self._at(b_, h_, i_, j_, sizes))} there"


def dense(tensor: Tensor | Sequence[Sequence[bool]]) -> Mask:
    """The edges that are True in a bool tensor, (query, source) or (batch, head, query, source).

    >>> print(dense([[True, False], [False, True]]).picture(2))
      0 1
    0 ■ ·
    1 · ■

    Axes of size 1 fit every size. The tensor is not copied: editing it in place edits the mask,
    and the backward pass of a call that used it raises a RuntimeError. Masks of other polarity or
    dtype have their own converters: `from_multihead`, `from_additive`, `from_huggingface`.
    """
    tensor = require_bool("tensor", as_tensor("tensor", tensor, copy=False))
    if tensor.dim() not in (2, 4):
        raise value_error(
            "tensor",
            "is (query, source) or (batch, head, query, source); "
            "other ranks can be read in two ways",
            shapes={"tensor": tensor},
            hint="tensor[None] adds a batch axis to (head, query, source), tensor[:, None] a head "
            "axis to (batch, query, source); keep(real) takes (batch, source)",
        )
    return Dense(tensor)


def require_bool(name: str, tensor: Tensor) -> Tensor:
    """Return a bool tensor; refuse other dtypes, each with how to express what it may mean."""
    if tensor.dtype == torch.bool:
        return tensor
    if only_ones_and_zeros(tensor):
        raise type_error(
            name,
            "a mask of ones and zeros is nearly always a bool mask in disguise",
            got=str(tensor.dtype),
            hint=f"{name}.bool() if 1 means may attend, ~{name}.bool() if 1 means blocked; "
            "masks.from_huggingface takes (batch, source)",
        )
    if tensor.is_floating_point():
        raise type_error(
            name,
            "takes a bool tensor, True = may attend",
            got=str(tensor.dtype),
            hint="pass numbers that are added to the scores as bias=; masks.from_additive takes "
            "0 and -inf",
        )
    raise type_error(
        name,
        "takes a bool tensor, True = may attend",
        got=str(tensor.dtype),
        hint=f"compare first, as in {name} != 0",
    )


def only_ones_and_zeros(tensor: Tensor) -> bool:
    """Whether every value is 0 or 1, with a 1 among them; False where they cannot be read."""
    if not readable(tensor) or tensor.is_complex() or not tensor.numel():
        return False
    return bool(((tensor == 0) | (tensor == 1)).all() and (tensor == 1).any())


def as_tensor(name: str, values: Any, *, copy: bool = True) -> Tensor:
    """Return the values as a tensor of their own, or a view without `copy`."""
    if isinstance(values, Tensor):
        # A mask is immutable, even where the caller's tensor changes.
        return values.detach().clone() if copy else values.detach()
    try:
        tensor = torch.tensor(values)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise value_error(name, f"is a tensor or lists of equal lengths ({error})") from None
    return tensor.to(torch.int64) if not tensor.numel() else tensor


def ranked(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of positions; refuse ranks other than 1 and 2."""
    if tensor.dim() not in (1, 2):
        raise value_error(
            name,
            "is (position,), the same for every sample, or (batch, position)",
            shapes={name: tensor},
        )
    return tensor


def at(values: Tensor, b: Any, i: Any) -> Tensor:
    """Values of (position,) or (batch, position) at index tensors that broadcast."""
    values = values.to(i.device)
    if values.dim() == 1:
        return values[i]
    if 0 in values.shape:  # torch refuses to index an empty axis, also by no index
        return values.new_zeros(torch.broadcast_shapes(b.shape, i.shape))
    return values[b if values.shape[0] != 1 else b * 0, i]


def show(values: Tensor) -> str:
    """A tensor inside an expression: its values where they are few."""
    if values.numel() > SHOWN or not readable(values):
        return f"<{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}>"
    return str(values.tolist())


def samples(values: Tensor) -> int | None:
    """The batch size of (batch, position), None for (position,)."""
    return values.shape[0] if values.dim() == 2 else None


def many_samples(counts: list[int]) -> int | None:
    """The batch size of several tensors, where a size of 1 broadcasts."""
    return next((count for count in counts if count != 1), counts[0] if counts else None)
