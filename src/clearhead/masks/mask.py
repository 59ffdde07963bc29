"""The set of edges that users hold: what it can be asked, converted to and composed with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from clearhead._core import position, readable, type_error, value_error
from clearhead._display import mimebundle
from clearhead.masks import text
from clearhead.masks.protocol import MAX_TESTED, EdgeSet

# A tile that is tested edge by edge holds at most this many of them at a time.
CHUNK = 1 << 22


class Mask(EdgeSet):
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
    bool tensors. They are immutable. Two masks are equal, and hash alike, where the same expression
    made them from equal data; `dense` tells whether two expressions have the same edges. torch 2.13
    cannot compile `~mask`: inside a compiled function, write `masks.everything() - mask`.
    """

    # What the operators make, by sign. The classes are masks themselves, so they register here.
    _composites: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, sign: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if sign is not None:
            cls._sign = sign
            Mask._composites[sign] = cls

    def to(self, device: torch.device | str) -> Mask:
        """Return the mask with its tensors on another device; a mask of numbers is its own copy."""
        return self

    # Questions.

    def dense(
        self, query: int, source: int | None = None, *, batch: int | None = None,
        head: int | None = None, device: torch.device | str | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the whole set as a bool tensor, True = may attend.

        >>> from clearhead import masks
        >>> masks.causal().dense(2)
        tensor([[ True, False],
                [ True,  True]])
        >>> masks.lengths([3, 2]).dense(3).shape
        torch.Size([2, 1, 3, 3])

        (query, source), or (batch or 1, head or 1, query, source) where the mask varies. `source`
        defaults to `query`; `batch` and `head` default to the mask's own.
        """
        sizes = self._sizes(query, source, batch, head)
        rows = torch.arange(sizes.query, device=device)
        return self.tile(rows, torch.arange(sizes.source, device=device), sizes).contiguous()

    def row(
        self, i: int, source: int | None = None, *, query: int | None = None,
        sample: int | None = None, head: int | None = None,
    ) -> list[int]:  # fmt: skip
        """List the sources that query `i` may read.

        >>> from clearhead import masks
        >>> masks.causal().row(1, source=4)
        [0, 1]

        There are as many queries as sources unless `query` is given; a mask that varies needs
        `sample` (and `head`).
        """
        sizes = self._sizes_for(query, source, at=i)
        i = position("i", i, sizes.query)
        tile = self.tile(torch.tensor([i]), torch.arange(sizes.source), sizes)
        return self._pick(tile, sample, head)[0].nonzero()[:, 0].tolist()

    def counts(
        self, query: int, source: int | None = None, *, batch: int | None = None,
        head: int | None = None,
    ) -> Tensor:  # fmt: skip
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
        if sizes.query * sizes.source * sizes.batch * sizes.head > MAX_TESTED:
            raise self._too_many(sizes)
        columns = torch.arange(sizes.source)
        step = max(1, CHUNK // max(sizes.source * sizes.batch * sizes.head, 1))
        rows = torch.arange(sizes.query).split(step)
        return torch.cat([self._tile(some, columns, sizes).sum(-1) for some in rows], -1)

    def count(
        self, query: int, source: int | None = None, *, batch: int | None = None,
        head: int | None = None,
    ) -> int:  # fmt: skip
        """Count the edges; of a mask that varies, those of all samples and heads together.

        >>> from clearhead import masks
        >>> masks.causal().count(4)
        10
        """
        sizes = self._sizes(query, source, batch, head)
        self.check(sizes)
        counter = text.EdgeCounter(self, sizes)
        counted = counter.count(0, sizes.query, 0, sizes.source)
        return int(torch.as_tensor(counted).expand(counter.lead).sum())

    def why(
        self, i: int, j: int, *, query: int | None = None, source: int | None = None,
        sample: int | None = None, head: int | None = None,
    ) -> str:  # fmt: skip
        """Name the part of the mask that allows or blocks the edge, in words.

        >>> from clearhead import masks
        >>> mask = masks.causal() & masks.window(3) | masks.first(1)
        >>> print(mask.why(1, 3))
        query 1 may not read source 3
        - blocked by causal(): source 3 lies 2 after query 1
        - blocked by window(3): source 3 lies 2 after query 1
        - blocked by first(1): source 3 is not among the first 1

        Sizes default to the mask's own, or to as many positions as the edge needs.
        """
        return text.why(self, i, j, self._sizes_for(query, source, at=max(i, j)), sample, head)

    def picture(
        self, query: int, source: int | None = None, *, sample: int | None = None,
        head: int | None = None, cells: int = 32,
    ) -> str:  # fmt: skip
        """Draw the set as text: ■ may attend, · may not; queries go down, sources to the right.

        >>> from clearhead import masks
        >>> print(masks.band(1, 1).picture(3, 4))
          0 1 2 3
        0 ■ ■ ■ ·
        1 · ■ ■ ■
        2 · · ■ ■

        More than `cells` positions a side are drawn in shades, with a legend. Of a mask that
        varies, the first four samples are drawn, or the one asked for.
        """
        return text.picture(self.maps(query, source, sample=sample, head=head, cells=cells))

    def maps(
        self, query: int, source: int | None = None, *, sample: int | None = None,
        head: int | None = None, cells: int = 32,
    ) -> list[text.Map]:  # fmt: skip
        """Return the numbers of the picture: the share of allowed edges in every tile of a grid.

        >>> from clearhead import masks
        >>> masks.causal().maps(4, cells=2)[0].shares
        [[0.75, 0.0], [1.0, 0.75]]

        One map, or one for each sample and head where the mask varies.
        """
        return text.maps(self, self._sizes(query, source), sample, head, cells)

    # Conversions: each names the API whose polarity and shape it follows.

    def to_sdpa(self, query: int, source: int | None = None, **where: Any) -> Tensor:
        """Return the bool `attn_mask` of `F.scaled_dot_product_attention`: True = may attend.

        >>> from clearhead import masks
        >>> masks.causal().to_sdpa(2)
        tensor([[ True, False],
                [ True,  True]])

        Keywords as in `dense`. A row without True gives 0 here, and NaN in some of torch's kernels.
        """
        return self.dense(query, source, **where)

    def to_additive(
        self, query: int, source: int | None = None, *, dtype: torch.dtype = torch.float32,
        **where: Any,
    ) -> Tensor:  # fmt: skip
        """Return the mask that is added to the scores: 0 = may attend, -inf = blocked.

        >>> from clearhead import masks
        >>> masks.causal().to_additive(2)
        tensor([[0., -inf],
                [0., 0.]])
        """
        allowed = self.dense(query, source, **where)
        zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return zeros.masked_fill_(~allowed, -torch.inf)

    def to_multihead(
        self, query: int, source: int | None = None, *, batch: int | None = None,
        head: int | None = None, device: torch.device | str | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the bool `attn_mask` of `nn.MultiheadAttention`: True = blocked.

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
            raise _needs_heads()
        return blocked.expand(sizes.batch, sizes.head, -1, -1).flatten(0, 1)

    def to_flex(
        self, query: int, source: int | None = None, *, batch: int | None = None,
        head: int | None = None, device: torch.device | str = "cpu",
        block_size: int | tuple[int, int] = 128,
    ) -> Any:  # fmt: skip
        """Return the `BlockMask` of FlexAttention; its `mask_mod` decides every edge exactly.

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

    # Composition.

    def __and__(self, other: Mask | Tensor) -> Mask:
        return self._composites["&"].of(self, other)

    def __or__(self, other: Mask | Tensor) -> Mask:
        return self._composites["|"].of(self, other)

    def __sub__(self, other: Mask | Tensor) -> Mask:
        return self._composites["-"].of(self, other)

    def __rand__(self, other: Mask | Tensor) -> Mask:
        return self._composites["&"].of(other, self)

    def __ror__(self, other: Mask | Tensor) -> Mask:
        return self._composites["|"].of(other, self)

    def __rsub__(self, other: Mask | Tensor) -> Mask:
        return self._composites["-"].of(other, self)

    def __invert__(self) -> Mask:
        return self._composites["~"](self)

    def appended(self, extra: int) -> Mask:
        """Return the mask for `extra` more sources at the end, open to every query.

        >>> from clearhead import masks
        >>> print(masks.causal().appended(1).picture(2, 3))
          0 1 2
        0 ■ · ■
        1 ■ ■ ■
        """
        return self._composites["+"](self, extra)

    # As a Python object.

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

    def __bool__(self) -> bool:
        raise type_error(
            "mask",
            "is a set of edges, not True or False",
            hint="compose with & | - ~ in place of and, or, not",
        )

    def __repr__(self) -> str:
        return self._text(full=True)

    def __str__(self) -> str:
        return text.summary(self)

    _repr_mimebundle_ = mimebundle

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Users know every kind as a Mask.
            raise AttributeError(f"'Mask' object has no attribute {name!r}", name=name, obj=self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse torch functions, which take tensors, and name the conversions to one.

        For an operator such as `tensor & mask`, torch turns the error into NotImplemented.
        """
        name = getattr(function, "__name__", "function")
        raise type_error(
            "mask",
            "torch takes a tensor here",
            got=f"a Mask in torch's {name}",
            hint="mask.to_multihead(query, source) for nn.MultiheadAttention and nn.Transformer's "
            "layers, mask.to_sdpa(query, source) for F.scaled_dot_product_attention; clearhead's "
            "own attend and MultiheadAttention take the mask itself, as mask=",
        )


def _needs_heads() -> ValueError:
    return value_error(
        "head",
        "must be given, because nn.MultiheadAttention takes (batch * head, query, source) of a "
        "mask that varies",
        hint="to_multihead(query, source, head=module.num_heads)",
    )


def _alike(one: Any, other: Any) -> bool:
    """Whether two parts of masks are equal; unreadable tensors are equal to themselves alone."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and one == other
    if one is other or not (readable(one) and readable(other)):
        return one is other
    return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)


def _hashable(part: Any) -> Any:
    """What equal parts of masks have in common, without reading the numbers of a tensor."""
    return (part.dtype, part.shape) if isinstance(part, Tensor) else part
