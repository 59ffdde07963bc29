"""The set of edges itself: what every mask can be asked, and how masks compose."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from clearhead._core import type_error, value_error
from clearhead.masks.ranges import Interval, Ranges, tidy

if TYPE_CHECKING:
    from clearhead._core import Sizes
    from clearhead.masks.text import Map

# A tile that is tested edge by edge holds at most this many of them at a time.
CHUNK = 1 << 22
# More edges than this are not tested one by one to count or draw them (about ten seconds).
PATIENCE = 1 << 32
# Letters of an expression inside of an error.
BRIEF = 48


class Block(IntEnum):
    """What a mask allows in a tile: nothing, some or everything."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


class Own(NamedTuple):
    """The sizes that a mask's own data fixes; None (and 1 for batch and head) fits every size."""

    batch: int | None = None
    head: int | None = None
    query: int | None = None
    source: int | None = None


class Mask:
    """A set of edges (i, j): query i may read source j.

    >>> from clearhead import masks
    >>> mask = masks.causal() & masks.window(2) | masks.first(1)
    >>> print(mask.picture(4))
      0 1 2 3
    0 ■ · · ·
    1 ■ ■ · ·
    2 ■ ■ ■ ·
    3 ■ · ■ ■
    >>> mask.row(3, source=4)
    [0, 2, 3]

    Masks compose with `&` (both), `|` (either), `-` (without) and `~` (all other edges), also with
    bool tensors. They never change. Two are equal, and hash alike, where the same expression made
    them of equal data; whether two expressions have the same edges, `dense` tells. torch 2.13
    cannot compile `~mask`: inside of a compiled function, write `masks.everything() - mask`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # What Python's own errors say ("'Mask' object has no attribute ..."): every kind is a Mask
        # to those who use it. The qualified name, by which pickle finds it, stays.
        cls.__name__ = "Mask"

    own = Own()
    # The attributes that say which mask of its kind it is; None: it is equal to itself alone.
    _made_of: tuple[str, ...] | None = None
    _rank = 4  # how tightly the expression binds: | 0, & 1, - 2, ~ 3, a call 4
    _calls = False  # whether a function of the user is asked, which needs care with positions

    # What a kind of mask has to say: one formula, and what follows from it faster.

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        """Tell by the formula whether edges are in the set, for index tensors that broadcast."""
        raise NotImplementedError

    def _text(self, full: bool) -> str:
        """The expression that makes this mask; `full` spells out the default alignment."""
        raise NotImplementedError

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        """The tile; edges outside `within` are answered anyhow."""
        b = torch.arange(1 if self.own.batch is None else self.own.batch, device=rows.device)[
            :, None, None, None
        ]
        h = torch.arange(1 if self.own.head is None else self.own.head, device=rows.device)[
            :, None, None
        ]
        edges = self._at(b, h, rows[:, None], columns[None, :], sizes)
        return edges.expand(*edges.shape[:-2], rows.shape[0], columns.shape[0])

    def _least(self) -> int:
        """How many positions its data needs at least."""
        return max(self.own.query or 0, self.own.source or 0)

    def check(self, sizes: Sizes) -> None:
        """Raise ValueError where the mask is made for other sizes than these."""
        for name in Own._fields:
            own, size = getattr(self.own, name), getattr(sizes, name)
            if own is not None and own != size and not (own == 1 and name in ("batch", "head")):
                raise value_error(
                    "mask",
                    f"{self._brief()} is made for {how_many(own, name)}, the call has {size}",
                    shapes={
                        "mask (batch, head, query, source)": self.own,
                        "call": tuple(getattr(sizes, name) for name in Own._fields),
                    },
                    hint="make the mask from the data of this call",
                )

    # What can be asked.

    def tile(self, rows: Tensor, columns: Tensor, sizes: Sizes) -> Tensor:
        """Tell which of these queries may read which of these sources.

        `rows` (r,) and `columns` (c,) are int64 positions; the answer is bool, (r, c), or
        (batch or 1, head or 1, r, c) where the mask varies. Nothing larger is made on the way.
        """
        self.check(sizes)
        return self._tile(rows, columns, sizes)

    def dense(
        self,
        query: int,
        source: int | None = None,
        *,
        batch: int | None = None,
        head: int | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Give the whole set as a bool tensor, True = may attend.

        >>> from clearhead import masks
        >>> masks.causal().dense(2)
        tensor([[ True, False],
                [ True,  True]])
        >>> masks.lengths([3, 2]).dense(3).shape
        torch.Size([2, 1, 3, 3])

        (query, source), or (batch or 1, head or 1, query, source) where the mask varies. `source`
        is `query` unless given; `batch` and `head` are the mask's own.
        """
        sizes = self._sizes(query, source, batch, head)
        rows = torch.arange(sizes.query, device=device)
        return self.tile(rows, torch.arange(sizes.source, device=device), sizes).contiguous()

    def block(self, rows: range, columns: range, query: int, source: int | None = None) -> Block:
        """Tell whether a tile is EMPTY or FULL, or PARTIAL where it is neither or not known.

        >>> from clearhead import masks
        >>> masks.causal().block(range(0, 4), range(4, 8), query=8).name
        'EMPTY'

        It speaks for all samples and heads together. A tile without edges is EMPTY.
        """
        if not (rows and columns):
            return Block.EMPTY
        return self._block(
            rows[0],
            rows[-1] + 1,
            columns[0],
            columns[-1] + 1,
            query,
            query if source is None else source,
        )

    def _block(
        self, top: int, bottom: int, left: int, right: int, query: int, source: int
    ) -> Block:
        return Block.PARTIAL

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        """Say in words why the edge is in the set or not, with its numbers."""
        return f"it decides about source {j} of query {i}"

    def intervals(
        self,
        query: int,
        source: int | None = None,
        device: torch.device | str | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Give start and stop of each query's sources where every row is one interval, else None.

        >>> from clearhead import masks
        >>> masks.window(2).intervals(4)
        (tensor([0, 0, 1, 2]), tensor([1, 2, 3, 4]))
        >>> (masks.window(2) | masks.first(1)).intervals(4) is None
        True

        int64, each (query,), or (batch or 1, head or 1, query) where the mask varies; stop ==
        start is an empty row. None also where the values are not known, as while tracing.
        """
        sizes = self._sizes(query, source, None, None)
        self.check(sizes)
        found = self._intervals(torch.arange(query, device=device), sizes)
        return None if found is None else tidy(*found, sizes.source)

    def _intervals(self, i: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        """Start and stop, which may lie outside of the sources or be crossed in empty rows."""
        return None

    # What implementations ask.

    relative = False  # only the distance between query and source counts: `ranges` is a lookup
    stored = False  # the edges are in memory already: `strip` copies nothing

    def ranges(self, query: int, source: int | None = None, most: int = 4) -> Ranges | None:
        """Give at most `most` ranges of sources for each query, or None where it has more.

        None also where looking for them would cost more than the map itself.
        """
        sizes = self._sizes(query, source, None, None)
        self.check(sizes)
        found = self._ranges(torch.arange(query), sizes, most)
        return None if found is None else Ranges.of(found)

    def _ranges(self, i: Tensor, sizes: Sizes, most: int) -> list[Interval] | None:
        """The sources of these queries as a union of intervals that lie inside of the sources."""
        found = self._intervals(i, sizes)
        return None if found is None else [tidy(*found, sizes.source)]

    def strip(self, queries: range, sizes: Sizes) -> Tensor:
        """Give the edges of some queries to all sources, as bools.

        (batch or 1, head or 1, queries or 1, source or 1), in any strides.
        """
        rows = torch.arange(queries.start, queries.stop)
        edges = self.tile(rows, torch.arange(sizes.source), sizes)
        return edges if edges.ndim == 4 else edges[None, None]

    def row(
        self,
        i: int,
        source: int | None = None,
        *,
        query: int | None = None,
        sample: int | None = None,
        head: int | None = None,
    ) -> list[int]:
        """List the sources that query `i` may read.

        >>> from clearhead import masks
        >>> masks.causal().row(1, source=4)
        [0, 1]

        There are as many queries as sources unless `query` is given; a mask that varies needs to
        know which `sample` (and `head`).
        """
        sizes = self._sizes_for(query, source, at=i)
        i = position("i", i, sizes.query)
        rows = torch.tensor([i])
        edges = pick(self, self.tile(rows, torch.arange(sizes.source), sizes), sample, head)
        return edges[0].nonzero()[:, 0].tolist()

    def counts(
        self,
        query: int,
        source: int | None = None,
        *,
        batch: int | None = None,
        head: int | None = None,
    ) -> Tensor:
        """Count the sources of every query: (query,), or (batch or 1, head or 1, query).

        >>> from clearhead import masks
        >>> masks.window(3).counts(5)
        tensor([1, 2, 3, 3, 3])
        """
        sizes = self._sizes(query, source, batch, head)
        self.check(sizes)
        found = self.intervals(sizes.query, sizes.source)
        if found is not None:
            return found[1] - found[0]
        self._affordable(sizes)
        columns = torch.arange(sizes.source)
        step = max(1, CHUNK // max(sizes.source * sizes.batch * sizes.head, 1))
        rows = torch.arange(sizes.query).split(step)
        return torch.cat([self._tile(some, columns, sizes).sum(-1) for some in rows], -1)

    def count(
        self,
        query: int,
        source: int | None = None,
        *,
        batch: int | None = None,
        head: int | None = None,
    ) -> int:
        """Count the edges; of a mask that varies, those of all samples and heads together.

        >>> from clearhead import masks
        >>> masks.causal().count(4)
        10
        """
        sizes = self._sizes(query, source, batch, head)
        self.check(sizes)
        from clearhead.masks.tally import Tally

        tally = Tally(self, sizes)
        counted = tally.count(0, sizes.query, 0, sizes.source)
        return int(torch.as_tensor(counted).expand(tally.lead).sum())

    def why(
        self,
        i: int,
        j: int,
        *,
        query: int | None = None,
        source: int | None = None,
        sample: int | None = None,
        head: int | None = None,
    ) -> str:
        """Say which part of the mask allows or blocks the edge, in words.

        >>> from clearhead import masks
        >>> mask = masks.causal() & masks.window(3) | masks.first(1)
        >>> print(mask.why(1, 3))
        query 1 may not read source 3
        - blocked by causal(): source 3 lies 2 after query 1
        - blocked by window(3): source 3 lies 2 after query 1
        - blocked by first(1): source 3 is not among the first 1

        Without sizes, the mask's own count, or as many positions as it takes.
        """
        from clearhead.masks.text import why

        return why(self, i, j, self._sizes_for(query, source, at=max(i, j)), sample, head)

    def picture(
        self,
        query: int,
        source: int | None = None,
        *,
        sample: int | None = None,
        head: int | None = None,
        cells: int = 32,
    ) -> str:
        """Draw the set as text: ■ may attend, · may not; queries go down, sources to the right.

        >>> from clearhead import masks
        >>> print(masks.band(1, 1).picture(3, 4))
          0 1 2 3
        0 ■ ■ ■ ·
        1 · ■ ■ ■
        2 · · ■ ■

        More than `cells` positions a side are drawn in shades, with a legend. Of a mask that
        varies, every sample is drawn (the first four), or the one asked for.
        """
        from clearhead.masks.text import picture

        return picture(self.maps(query, source, sample=sample, head=head, cells=cells))

    def maps(
        self,
        query: int,
        source: int | None = None,
        *,
        sample: int | None = None,
        head: int | None = None,
        cells: int = 32,
    ) -> list[Map]:
        """Give the numbers of the picture: the share of allowed edges in every tile of a grid.

        >>> from clearhead import masks
        >>> masks.causal().maps(4, cells=2)[0].shares
        [[0.75, 0.0], [1.0, 0.75]]

        One map, or one for each sample and head where the mask varies.
        """
        from clearhead.masks.text import maps

        return maps(self, self._sizes(query, source, None, None), sample, head, cells)

    # Conversions: each names the API whose polarity and shape it speaks.

    def to_sdpa(self, query: int, source: int | None = None, **where: Any) -> Tensor:
        """Give the bool `attn_mask` of `F.scaled_dot_product_attention`: True = may attend.

        >>> from clearhead import masks
        >>> masks.causal().to_sdpa(2)
        tensor([[ True, False],
                [ True,  True]])

        Keywords as in `dense`. A row without True is 0 here, and NaN in some of torch's kernels.
        """
        return self.dense(query, source, **where)

    def to_additive(
        self,
        query: int,
        source: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        **where: Any,
    ) -> Tensor:
        """Give the mask that is added to the scores: 0 = may attend, -inf = blocked.

        >>> from clearhead import masks
        >>> masks.causal().to_additive(2)
        tensor([[0., -inf],
                [0., 0.]])
        """
        allowed = self.dense(query, source, **where)
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
            ~allowed, -torch.inf
        )

    def to_multihead(
        self,
        query: int,
        source: int | None = None,
        *,
        batch: int | None = None,
        head: int | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Give the bool `attn_mask` of `nn.MultiheadAttention`: True = blocked.

        >>> from clearhead import masks
        >>> masks.causal().to_multihead(2)
        tensor([[False,  True],
                [False, False]])
        >>> masks.lengths([2, 1]).to_multihead(2, head=4).shape
        torch.Size([8, 2, 2])

        (query, source), or (batch * head, query, source) where the mask varies; then the number of
        heads must be known.
        """
        sizes = self._sizes(query, source, batch, head)
        blocked = ~self.dense(query, source, batch=batch, head=head, device=device)
        if blocked.dim() == 2:
            return blocked
        if head is None and self.own.head in (None, 1):
            raise value_error(
                "head",
                "must be given, because nn.MultiheadAttention takes (batch * head, query, source) "
                "of a mask that varies",
                hint="to_multihead(query, source, head=module.num_heads)",
            )
        return blocked.expand(sizes.batch, sizes.head, -1, -1).flatten(0, 1)

    def to_flex(
        self,
        query: int,
        source: int | None = None,
        *,
        batch: int | None = None,
        head: int | None = None,
        device: torch.device | str = "cpu",
        block_size: int | tuple[int, int] = 128,
    ) -> Any:
        """Give the `BlockMask` of FlexAttention; its `mask_mod` decides every edge exactly.

        >>> from clearhead import masks
        >>> masks.causal().to_flex(256).shape
        (1, 1, 256, 256)
        """
        from torch.nn.attention.flex_attention import create_block_mask

        sizes = self._sizes(query, source, batch, head)
        self.check(sizes)
        moved = self.to(device)
        many = (sizes.batch if sizes.batch > 1 else None, sizes.head if sizes.head > 1 else None)

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return moved._at(b, h, q_idx, kv_idx, sizes)

        return create_block_mask(
            mask_mod, *many, sizes.query, sizes.source, device=str(device), BLOCK_SIZE=block_size
        )

    def to(self, device: torch.device | str) -> Mask:
        """Return the mask with its tensors on another device; a mask of numbers is its own copy."""
        return self

    # Composition.

    def __and__(self, other: Mask | Tensor) -> Mask:
        return _compose("And", self, other)

    def __or__(self, other: Mask | Tensor) -> Mask:
        return _compose("Or", self, other)

    def __sub__(self, other: Mask | Tensor) -> Mask:
        return _compose("Minus", self, other)

    def __rand__(self, other: Mask | Tensor) -> Mask:
        return _compose("And", other, self)

    def __ror__(self, other: Mask | Tensor) -> Mask:
        return _compose("Or", other, self)

    def __rsub__(self, other: Mask | Tensor) -> Mask:
        return _compose("Minus", other, self)

    def __invert__(self) -> Mask:
        from clearhead.masks.algebra import Not

        return Not(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        if self is other or self._made_of is None or type(self) is not type(other):
            return self is other
        return all(_alike(getattr(self, part), getattr(other, part)) for part in self._made_of)

    def __hash__(self) -> int:
        if self._made_of is None:
            return id(self)
        return hash((type(self), *(_hashable(getattr(self, part)) for part in self._made_of)))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer functions of torch, which take tensors, with the way to make one of a mask.

        Of an operator, `tensor & mask`, torch takes the error for "ask the other side".
        """
        raise type_error(
            "mask",
            "torch takes a tensor here",
            got=f"a Mask in torch's {getattr(function, '__name__', 'function')}",
            hint="mask.to_multihead(query, source) for nn.MultiheadAttention and nn.Transformer's "
            "layers, mask.to_sdpa(query, source) for F.scaled_dot_product_attention; clearhead's "
            "own attend and MultiheadAttention take the mask itself, as mask=",
        )

    def __bool__(self) -> bool:
        raise type_error(
            "mask",
            "is a set of edges, not True or False",
            hint="compose with & | - ~ in place of and, or, not",
        )

    def __repr__(self) -> str:
        return self._text(full=True)

    def __str__(self) -> str:
        from clearhead.masks.text import summary

        return summary(self)

    def _short(self) -> str:
        return self._text(full=False)

    def _brief(self) -> str:
        """The expression as an error has it: data is not poured out there."""
        text = self._short()
        return text if len(text) <= BRIEF else f"{text[:BRIEF].rstrip(' ,')} …"

    # Sizes.

    def _sizes(
        self, query: int | None, source: int | None, batch: int | None, head: int | None
    ) -> Sizes:
        # The package of the implementations imports the masks, hence not at the top.
        from clearhead._core import Sizes

        query = self.own.query if query is None else query
        source = query if source is None else source
        batch = (1 if self.own.batch is None else self.own.batch) if batch is None else batch
        head = (1 if self.own.head is None else self.own.head) if head is None else head
        for name, size in (("query", query), ("source", source), ("batch", batch), ("head", head)):
            if not isinstance(size, int | torch.SymInt) or isinstance(size, bool):
                raise type_error(name, "takes a number of positions, as an integer", got=repr(size))
            if size < 0:
                raise value_error(name, "is a number of positions, 0 or more", got=size)
        return Sizes(batch, head, query, source)  # pyright: ignore[reportArgumentType]

    def _sizes_for(self, query: int | None, source: int | None, at: int) -> Sizes:
        """Sizes for a question about one row or edge, where the mask may know them itself."""
        source = self.own.source if source is None else source
        if source is None:
            source = query if query is not None else max(at + 1, 1, self._least())
        query = (self.own.query or source) if query is None else query
        return self._sizes(query, source, None, None)

    def _affordable(self, sizes: Sizes) -> None:
        if sizes.query * sizes.source * sizes.batch * sizes.head > PATIENCE:
            raise self._too_many(sizes)

    def _too_many(self, sizes: Sizes) -> ValueError:
        return value_error(
            "query",
            f"{self._short()} has more than {PATIENCE:,} edges that have to be tested one by one",
            shapes={"(batch, head, query, source)": tuple(sizes)},
            hint="ask about fewer positions, or about one row with row(i, source)",
        )


def how_many(number: int, name: str) -> str:
    """Write a number of samples, heads, queries or sources in words."""
    plural = {"batch": "samples", "head": "heads", "query": "queries", "source": "sources"}
    return f"{number} {name if number == 1 else plural[name]}"


def readable(values: Tensor) -> bool:
    """Whether Python may look at the values now: not while they are traced, mapped or fake."""
    return (
        not torch.compiler.is_compiling()
        and type(values) in (Tensor, torch.nn.Parameter)
        and not values.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(values)  # pyright: ignore[reportAttributeAccessIssue]
        and not torch._C._len_torch_dispatch_stack()
    )


def _alike(one: Any, other: Any) -> bool:
    """Whether two parts of masks are equal; tensors that nobody may look at are if they are one."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and one == other
    if one is other or not (readable(one) and readable(other)):
        return one is other
    return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)


def _hashable(part: Any) -> Any:
    """What equal parts of masks have in common, without a look at the numbers of a tensor."""
    return (part.dtype, part.shape) if isinstance(part, Tensor) else part


def position(name: str, given: int, size: int) -> int:
    """A position, counted from the end where negative."""
    if not isinstance(given, int) or isinstance(given, bool):
        raise type_error(name, "takes a position, as an integer", got=repr(given))
    if not -size <= given < size:
        raise value_error(name, f"lies in 0..{size - 1}, or counts from the end", got=given)
    return given % size


def pick(mask: Mask, edges: Tensor, sample: int | None, head: int | None) -> Tensor:
    """The (rows, columns) of one sample and head."""
    if edges.dim() == 2:
        return edges
    for name, chosen, size in (("sample", sample, edges.shape[0]), ("head", head, edges.shape[1])):
        if chosen is None and size > 1:
            raise value_error(
                name,
                f"must be given, because {mask._short()} differs between {size} {name}s",
                hint=f"add {name}=0",
            )
    chosen = [
        0 if size == 1 else position(name, given or 0, size)
        for name, given, size in (
            ("sample", sample, edges.shape[0]),
            ("head", head, edges.shape[1]),
        )
    ]
    return edges[chosen[0], chosen[1]]


def _compose(kind: str, left: Mask | Tensor, right: Mask | Tensor) -> Any:
    # The compositions are masks themselves, hence not at the top.
    from clearhead.masks import algebra

    return algebra.compose(getattr(algebra, kind), left, right)
