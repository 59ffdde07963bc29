"""Even work over the ranks for few bytes: which rows and heads of a rank another one computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

from clearhead.distributed.sequence.plan import Costs, Plan, Portion, Shares, at_home
from clearhead.distributed.sequence.work import CELLS, Cells, loads, work_of
from clearhead.masks import Mask
from clearhead.readings import cell_bounds

__all__ = ["make_plan"]

# A plan is even where no rank has more than EVEN times the mean; work is moved until no rank has
# more than one of TARGETS: less work is moved for fewer bytes.
EVEN, TARGETS = 1.08, (1.01, 1.07)
# A move is considered to so many ranks, those with the least work.
HELPERS = 16
# Beyond so many ranks fewer ways and fewer helpers are tried.
MANY, FEW = 32, 4
# Smaller moves than this share of the mean are left out.
LEAST = 0.01


def make_plan(mask: Mask | None, shares: Shares, costs: Costs, balance: bool = True) -> Plan:
    """Leave out pairs of ranks without edges, and even out the work of the ranks.

    Of several plans with even work it takes the one whose busiest rank sends the fewest bytes. The
    plans of masks of distances are kept; other masks may have changed, and are asked again.
    """
    kept = mask is None or mask.relative
    return (_kept if kept else _planned)(mask, shares, costs, balance)


@lru_cache(maxsize=64)
def _kept(mask: Mask | None, shares: Shares, costs: Costs, balance: bool) -> Plan:
    return _planned(mask, shares, costs, balance)


def _planned(mask: Mask | None, shares: Shares, costs: Costs, balance: bool) -> Plan:
    work = work_of(mask, shares)
    if balance and work:
        return _best(tuple(work.items()), shares, costs)
    return Plan(shares, tuple(at_home(work, shares)), costs)


@lru_cache(maxsize=64)
def _best(pairs: tuple, shares: Shares, costs: Costs) -> Plan:
    work: Cells = dict(pairs)
    home = Plan(shares, tuple(at_home(work, shares)), costs)
    plans, before = [home], loads(work, home)
    mean = sum(before) / len(before)
    if shares.source_heads >= len(before):
        plans.append(Plan(shares, tuple(_by_heads(home)), costs))
    if max(before) > EVEN * mean:
        ways = [*product(TARGETS, (False, True), (False, True))]
        for target, whole, heads in ways if len(before) <= MANY else ways[-3:-1]:
            moves = _Moves(work, home, target * mean, EVEN * mean, whole, heads, [*before])
            plans.append(Plan(shares, tuple(moves.run()), costs))
    return min(plans, key=lambda x: (max(EVEN * mean, *loads(work, x)), max(x.sent())))


def _by_heads(home: Plan) -> Iterator[Portion]:
    """Every rank computes some heads of all positions (Jacobs et al. 2023, "Ulysses")."""
    shares = home.shares
    cuts = [slice(*pair) for pair in pairwise(cell_bounds(shares.source_heads, len(shares.ranks)))]
    for portion, rank in product(home.portions, shares.ranks):
        yield portion._replace(at=rank, heads=cuts[rank])


class _Move(NamedTuple):
    """Some rows and heads that a rank gives to another one, with some sources, and the gain."""

    given: Portion
    amount: float  # work
    cost: float  # bytes, over all ranks


class _Offer(NamedTuple):
    """Some sources of a rank that has too much work, and a rank that could compute with them."""

    home: int
    at: int
    sources: tuple[int, ...]
    cells: list[float]  # work in each cell of rows, of one head
    new: float  # bytes of the sources that the rank does not have, of one head
    old: float  # bytes of the sources that the home would no longer need, of one head


@dataclass
class _Moves:
    """Move work from the rank with the most to one with less, for the fewest bytes, until even."""

    work: Cells
    home: Plan
    target: float
    most: float
    whole: bool  # whether rows are moved with all of their sources only
    by_heads: bool  # whether heads may be cut, beside rows
    loads: list[float]
    left: dict[int, Portion] = field(default_factory=dict)
    settled: list[Portion] = field(default_factory=list)
    # How many heads of the sources of a rank are known to another rank.
    known: dict[tuple[int, int], int] = field(default_factory=dict)

    def run(self) -> list[Portion]:
        """The portions after all moves."""
        self.left = {portion.home: portion for portion in self.home.portions}
        self.known = dict.fromkeys(self.work, self.home.shares.source_heads)
        for _ in range(4 * len(self.loads)):
            if max(self.loads) <= self.target:
                break
            least = LEAST * self.target
            options = [move for move in self._options() if move.amount > least]
            if not options:
                break
            self._apply(min(options, key=lambda move: (move.cost / move.amount, -move.amount)))
        return [*self.left.values(), *self.settled]

    def _options(self) -> Iterator[_Move]:
        home = self.loads.index(max(self.loads))
        if home not in self.left:
            return
        helpers = HELPERS if len(self.loads) <= MANY else FEW
        for at in sorted(self.home.shares.ranks, key=self.loads.__getitem__)[:helpers]:
            room = self.most - self.loads[at]
            want = min(self.loads[home] - self.target, room)
            if at == home or want <= 0:
                continue
            for offer in self._offers(home, at):
                yield from self._rows(offer, want)
                if self.by_heads:
                    yield from self._heads(offer, want, room)

    def _offers(self, home: int, at: int) -> Iterator[_Offer]:
        """The sources that the rank has, and then one more at a time."""
        shares, most = self.home.shares, self.home.shares.source_heads
        missing = {j: most - self.known.get((at, j), 0) for j in self.left[home].sources}
        missing.pop(at, None)
        order = sorted(self.left[home].sources, key=lambda j: (missing.get(j, 0), j))
        chosen, cells, new, old = [], [0.0] * CELLS, 0.0, 0.0
        counts = _counts(len(order), self.whole)
        for j in order:
            size = shares.sources[j] * self.home.costs.source
            chosen.append(j)
            cells = [a + b for a, b in zip(cells, self.work[home, j], strict=False)]
            new += size * missing.get(j, 0) / most
            old += size * (j != home)
            if len(chosen) in counts:
                yield _Offer(home, at, tuple(chosen), cells, new, old)

    def _heads(self, offer: _Offer, want: float, room: float) -> Iterator[_Move]:
        """Give the last heads."""
        left = self.left[offer.home]
        many, rows = left.heads.stop, left.rows
        each = sum(self._parts(offer, left))
        count = min(round(want / each) or 1, int(room / each), many) if each else 0
        if count:
            given = left._replace(heads=slice(many - count, many))
            saves = rows.stop == self.home.shares.queries[offer.home]
            yield self._move(offer, given, count * each, saves)

    def _rows(self, offer: _Offer, want: float) -> Iterator[_Move]:
        """Give the last rows: as many as have the work that is wanted."""
        left, amount = self.left[offer.home], 0.0
        bounds, parts = self._bounds(offer.home), self._parts(offer, left)
        heads, start = left.heads.stop, left.rows.stop
        for (low, high), each in reversed([*zip(pairwise(bounds), parts, strict=False)]):
            height, edges = min(high, left.rows.stop) - low, each * heads
            if height <= 0:
                continue
            taken = height if amount + edges <= want else int(height * (want - amount) / edges)
            start, amount = start - taken, amount + edges * taken / height
            if taken < height:
                break
        if amount:
            given = left._replace(rows=slice(start, left.rows.stop))
            saves = not start and left.rows.stop == self.home.shares.queries[offer.home]
            yield self._move(offer, given, amount, saves)

    def _bounds(self, home: int) -> list[int]:
        return cell_bounds(self.home.shares.queries[home], CELLS)

    def _parts(self, offer: _Offer, left: Portion) -> list[float]:
        """The work of one head in the rows of each cell that are left."""
        return [
            edges * max(min(high, left.rows.stop) - low, 0) / (high - low)
            for (low, high), edges in zip(
                pairwise(self._bounds(offer.home)), offer.cells, strict=False
            )
        ]

    def _move(self, offer: _Offer, given: Portion, amount: float, saves: bool) -> _Move:
        heads, rows, costs = _length(given.heads), _length(given.rows), self.home.costs
        cost = heads * rows * (costs.query + costs.result) + heads * offer.new
        given = given._replace(at=offer.at, sources=frozenset(offer.sources))
        return _Move(given, amount, cost - (heads * offer.old if saves else 0))

    def _apply(self, move: _Move) -> None:
        given, most = move.given, self.home.shares.source_heads
        left = self.left.pop(given.home)
        self.settled.append(given)
        if rest := left.sources - given.sources:
            self.settled.append(given._replace(at=given.home, sources=rest))
        if given.heads.start > 0:
            self.left[given.home] = left._replace(heads=slice(0, given.heads.start))
        elif given.rows.start > 0:
            self.left[given.home] = left._replace(rows=slice(0, given.rows.start))
        self.loads[given.home] -= move.amount
        self.loads[given.at] += move.amount
        for j in given.sources:
            known = self.known.get((given.at, j), 0) + _length(given.heads)
            self.known[given.at, j] = min(known, most)


def _counts(many: int, whole: bool) -> set[int]:
    """How many sources a move may take along."""
    if whole:
        return {many}
    return {*range(1, min(many, 8) + 1), *(1 << i for i in range(many.bit_length())), many}


def _length(part: slice) -> int:
    return part.stop - part.start
