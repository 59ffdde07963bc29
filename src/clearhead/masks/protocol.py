"""What every kind of mask answers, and what implementations and readings ask of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead._core import Sizes, position, type_error, value_error
from clearhead.masks.ranges import Interval, Ranges, hull, tidy

# More edges than this are not tested one by one to count or draw them (about ten seconds).
MAX_TESTED = 1 << 32
# The number of characters of an expression inside an error.
BRIEF = 48
# A composite of more leaves than this asks its distinct parts one after another.
MANY = 64
# Composites of more leaves than this are not written out, nor nested around a user's function.
WRITTEN, NESTED = 5_000, 300
# The axes as an error names them.
AXES = "(batch, head, query, source)"


class Block(IntEnum):
    """What a mask allows in a tile: nothing, some edges or every edge."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


class Own(NamedTuple):
    """The sizes that a mask's own data fixes; None (and 1 for batch and head) fits every size."""

    batch: int | None = None
    head: int | None = None
    query: int | None = None
    source: int | None = None


class Tile(NamedTuple):
    """A rectangle of the map, rows top..bottom-1 and columns left..right-1, and the map's sizes."""

    top: int
    bottom: int
    left: int
    right: int
    query: int
    source: int


class Edge(NamedTuple):
    """One edge of one sample and head, and the sizes of the map."""

    i: int
    j: int
    sizes: Sizes
    sample: int | None = None
    head: int | None = None


class Clause(NamedTuple):
    """What one leaf of a composed mask says about an edge."""

    text: str
    reason: str
    allows: bool


class Verdict(NamedTuple):
    """Whether a mask allows an edge, and the leaves for and against that."""

    allowed: bool
    deciding: list[Clause]
    contrary: list[Clause]


class EdgeSet:
    """The protocol of a mask. A kind gives `_at` and `_text`, and the rest where it is faster."""

    own = Own()
    # Only the distance between query and source counts; `ranges` is a cached lookup.
    relative = False
    # The edges are in memory already; `strip` copies nothing.
    stored = False

    # The attributes that tell it from others of its kind; None: it is equal to itself alone.
    _made_of: tuple[str, ...] | None = None
    _rank = 4  # how tightly the expression binds: | 0, & 1, - 2, ~ 3, a call 4
    _calls = False  # whether a user's function is called, which constrains the positions
    weight = 1  # how many leaves its expression has, those of shared parts once for each use
    depth = 0  # how many composites lie around a user's function
    children: tuple[EdgeSet, ...] = ()

    # What a kind of mask answers.

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        """Return whether edges are in the set, for index tensors that broadcast."""
        raise NotImplementedError

    def _text(self, full: bool) -> str:
        """The expression that makes this mask; `full` spells out the default alignment."""
        raise NotImplementedError

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        """The tile; the answer for edges outside `within` is not used."""
        b, h = (
            torch.arange(1 if size is None else size, device=rows.device) for size in self.own[:2]
        )
        edges = self._at(
            b[:, None, None, None], h[:, None, None], rows[:, None], columns[None, :], sizes
        )
        return edges.expand(*edges.shape[:-2], rows.shape[0], columns.shape[0])

    def _block(self, tile: Tile) -> Block:
        """EMPTY or FULL where that is known without a test of each edge."""
        return Block.PARTIAL

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        """Start and stop, which may lie outside the sources or be crossed in empty rows."""
        return None

    def _ranges(self, i: Tensor, sizes: Sizes, most: int) -> list[Interval] | None:
        """The sources of these queries as a union of intervals that lie inside the sources."""
        found = self._intervals(i, sizes)
        return None if found is None else [tidy(*found, sizes.source)]

    def sources(self, queries: range, sizes: Sizes) -> Tensor | None:
        """All sources that these queries may read, ascending, and maybe more; None: not known."""
        found = self._intervals(torch.arange(queries.start, queries.stop), sizes)
        return None if found is None else hull(found, sizes.source)

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        """Why the edge is in the set or not, in words."""
        return f"it decides about source {j} of query {i}"

    def _least(self) -> int:
        """How many positions its data needs at least."""
        return max(self.own.query or 0, self.own.source or 0)

    def _explain(self, edge: Edge, negated: bool) -> Verdict:
        """The verdict of the (negated) mask on an edge; a leaf is its only clause."""
        i, j, sizes, sample, head = edge
        tile = self._tile(torch.tensor([i]), torch.tensor([j]), sizes)
        allows = bool(self._pick(tile, sample, head)) != negated
        reason = self._reason(sample or 0, head or 0, i, j, sizes)
        text = f"~{self._short()}" if negated else self._short()
        return Verdict(allows, [Clause(text, reason, allows)], [])

    # What implementations and readings ask.

    def check(self, sizes: Sizes) -> None:
        """Raise ValueError where the mask is made for other sizes than these."""
        for name, own, size in zip(Own._fields, self.own, sizes, strict=True):
            if own is not None and own != size and not (own == 1 and name in ("batch", "head")):
                raise value_error(
                    "mask",
                    f"{self._brief()} is made for {how_many(own, name)}, the call has {size}",
                    shapes={f"mask {AXES}": self.own, "call": tuple(sizes)},
                    hint="make the mask from the data of this call",
                )

    def tile(self, rows: Tensor, columns: Tensor, sizes: Sizes) -> Tensor:
        """Return which of these queries may attend to which of these sources.

        `rows` (r,) and `columns` (c,) are int64 positions; the answer is bool, (r, c), or
        (batch or 1, head or 1, r, c) where the mask varies. No larger tensor is allocated.
        """
        self.check(sizes)
        return self._tile(rows, columns, sizes)

    def strip(self, queries: range, sizes: Sizes) -> Tensor:
        """Return the edges of some queries to all sources as bools.

        (batch or 1, head or 1, queries or 1, source or 1), with any strides.
        """
        rows = torch.arange(queries.start, queries.stop)
        edges = self.tile(rows, torch.arange(sizes.source), sizes)
        return edges if edges.ndim == 4 else edges[None, None]

    def block(self, rows: range, columns: range, query: int, source: int | None = None) -> Block:
        """Return whether a tile is EMPTY or FULL, or PARTIAL where it is neither or not known.

        >>> from clearhead import masks
        >>> masks.causal().block(range(0, 4), range(4, 8), query=8).name
        'EMPTY'

        The answer holds for all samples and heads together. A tile without edges is EMPTY.
        """
        if not (rows and columns):
            return Block.EMPTY
        source = query if source is None else source
        return self._block(Tile(rows[0], rows[-1] + 1, columns[0], columns[-1] + 1, query, source))

    def intervals(
        self, query: int, source: int | None = None, device: torch.device | str | None = None
    ) -> Interval | None:
        """Return start and stop of each query's sources where every row is one interval, else None.

        >>> from clearhead import masks
        >>> masks.window(2).intervals(4)
        (tensor([0, 0, 1, 2]), tensor([1, 2, 3, 4]))
        >>> (masks.window(2) | masks.first(1)).intervals(4) is None
        True

        int64, each (query,), or (batch or 1, head or 1, query) where the mask varies; stop ==
        start is an empty row. Also None where the values cannot be read, as while tracing.
        """
        sizes = self._sizes(query, source)
        self.check(sizes)
        found = self._intervals(torch.arange(query, device=device), sizes)
        return None if found is None else tidy(*found, sizes.source)

    def ranges(self, query: int, source: int | None = None, most: int = 4) -> Ranges | None:
        """Return up to `most` ranges of sources for each query; None where more are needed.

        >>> from clearhead import masks
        >>> (masks.window(2) | masks.first(1)).ranges(4).start[:, 0, 0]
        tensor([[0, 0, 1, 2],
                [0, 0, 0, 0]], dtype=torch.int32)

        Also None where finding them would cost more than reading the whole map.
        """
        sizes = self._sizes(query, source)
        self.check(sizes)
        found = self._ranges(torch.arange(query), sizes, most)
        return None if found is None else Ranges.of(found)

    def tensors(self) -> list[Tensor]:
        """Return the caller's tensors that the mask reads whenever it is asked, not copies."""
        return []

    # Names and sizes.

    def _short(self) -> str:
        return self._text(full=False)

    def _brief(self) -> str:
        """The expression as an error shows it: cut where it is long."""
        text = self._short()
        return text if len(text) <= BRIEF else f"{text[:BRIEF].rstrip(' ,')} …"

    def _pick(self, edges: Tensor, sample: int | None, head: int | None) -> Tensor:
        """The (rows, columns) of one sample and head of a tile."""
        if edges.dim() == 2:
            return edges
        for name, chosen in (("sample", sample), ("head", head)):
            size = edges.shape[0]
            if chosen is None and size > 1:
                rule = f"must be given, because {self._short()} differs between {size} {name}s"
                raise value_error(name, rule, hint=f"add {name}=0")
            edges = edges[0 if size == 1 else position(name, chosen or 0, size)]
        return edges

    def _sizes(
        self,
        query: int | None,
        source: int | None = None,
        batch: int | None = None,
        head: int | None = None,
    ) -> Sizes:
        """The sizes of a question; what is not given is the mask's own."""
        query = self.own.query if query is None else query
        source = query if source is None else source
        batch = (1 if self.own.batch is None else self.own.batch) if batch is None else batch
        head = (1 if self.own.head is None else self.own.head) if head is None else head
        named = {"query": query, "source": source, "batch": batch, "head": head}
        return Sizes(**{name: _size(name, size) for name, size in named.items()})

    def _sizes_for(self, query: int | None, source: int | None, at: int) -> Sizes:
        """The sizes of a question about one row or edge, which the mask may know itself."""
        source = self.own.source if source is None else source
        if source is None:
            source = query if query is not None else max(at + 1, 1, self._least())
        return self._sizes((self.own.query or source) if query is None else query, source)

    def _too_many(self, sizes: Sizes) -> ValueError:
        return value_error(
            "query",
            f"{self._short()} has more than {MAX_TESTED:,} edges that have to be tested one by one",
            shapes={AXES: tuple(sizes)},
            hint="ask about fewer positions, or about one row with row(i, source)",
        )


def how_many(number: int, name: str) -> str:
    """Return a number of samples, heads, queries or sources in words."""
    plural = {"batch": "samples", "head": "heads", "query": "queries", "source": "sources"}
    return f"{number} {name if number == 1 else plural[name]}"


def _size(name: str, size: Any) -> int:
    if not isinstance(size, int | torch.SymInt) or isinstance(size, bool):
        raise type_error(name, "takes a number of positions, as an integer", got=repr(size))
    if size < 0:
        raise value_error(name, "is a number of positions, 0 or more", got=size)
    return size  # pyright: ignore[reportReturnType]


class _Known(EdgeSet):
    """A part whose answer to the present question is known."""

    def __init__(self, part: EdgeSet, answer: Any):
        self.own, self._rank, self.weight, self.answer = part.own, part._rank, part.weight, answer
        self._at = self._tile = self._block = self._intervals = self._ranges = self._say
        self._text = self._least = self.check = self.tensors = self.to = self._say
        self.sources = self._say

    def _say(self, *question: Any, **more: Any) -> Any:
        return self.answer

    def _explain(self, edge: Edge, negated: bool) -> Verdict:
        return self.answer[negated]

    def __hash__(self) -> int:
        return self.answer


def by_parts(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a large composite ask each distinct part once, parts before wholes.

    So a part that is used again costs nothing again, and the depth of an expression is not that of
    Python's stack. A part that calls a user's function is asked by the whole, which tells it the
    edges that are already decided.
    """

    @functools.wraps(method)
    def ask(self: Any, *question: Any, **more: Any) -> Any:
        if self.weight <= MANY:
            return method(self, *question, **more)
        if self._calls and self.depth > NESTED:
            raise value_error(
                "mask",
                f"is composed at most {NESTED} deep around where(function)",
                got=f"{self.depth} deep",
                hint="compose the other masks first: (a & b & c) & where(function)",
            )
        answers: dict[int, Any] = {}
        waiting: dict[int, int] = {}
        order = list(_large_parts(self))
        for part in order:
            for child in part.children:
                waiting[id(child)] = waiting.get(id(child), 0) + 1
        for part in order:
            answers[id(part)] = _answer(method, part, answers, question, more)
            for child in part.children:
                waiting[id(child)] -= 1
                if not waiting[id(child)]:
                    answers.pop(id(child), None)
        answer = answers[id(self)]
        return answer[question[1]] if method.__name__ == "_explain" else answer

    return ask


def _large_parts(root: EdgeSet) -> Iterator[Any]:
    """The large composites below a mask that need no context, parts before wholes, and itself."""
    stack, done = [(root, False)], set()
    while stack:
        part, ready = stack.pop()
        if ready:
            yield part
        elif id(part) not in done:
            done.add(id(part))
            stack.append((part, True))
            large = (c for c in part.children if c.children and c.weight > MANY)
            stack += [(c, False) for c in large if not c._calls]


def _answer(method: Any, part: Any, answers: dict[int, Any], question: Any, more: Any) -> Any:
    """One part's answer from those of its parts."""
    explains = method.__name__ == "_explain"
    if explains:
        question = question[:1]
    known = [
        child if child._calls else _Known(child, _asked(method, child, answers, question, more))
        for child in part.children
    ]
    own = getattr(type(part), method.__name__).__wrapped__
    again = part.with_children(known)
    if not explains:
        return own(again, *question, **more)
    return [own(again, *question, negated) for negated in (False, True)]


def _asked(method: Any, child: Any, answers: dict[int, Any], question: Any, more: Any) -> Any:
    """A small part answers by itself, once."""
    if id(child) not in answers:
        ask = getattr(child, method.__name__)
        if method.__name__ == "_explain":
            answers[id(child)] = [ask(*question, negated) for negated in (False, True)]
        else:
            answers[id(child)] = ask(*question, **more)
    return answers[id(child)]
