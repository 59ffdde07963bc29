"""Masks as sets of edges: every leaf against a formula, every method against the whole set."""

# Wrong types are passed on purpose.
# pyright: reportArgumentType=false
from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_mask

from clearhead import masks
from clearhead._core.sizes import Sizes
from clearhead.masks import EMPTY, FULL, Mask

IDS = [0, 0, 1, 1, 1, 0, 2]
TOKENS = [7, 8, 9, 7, 8, 7, 7]
REAL = [False, True, True, True, True, True, False]


def table(text: str) -> list[list[bool]]:
    return [[sign == "1" for sign in line] for line in text.split()]


def rule(query: int, source: int, edge: Callable[[int, int], bool]) -> Tensor:
    rows = [[bool(edge(i, j)) for j in range(source)] for i in range(query)]
    return torch.tensor(rows, dtype=torch.bool).reshape(query, source)


def standing(align: str | int, query: int, source: int) -> int:
    """The position of the first query among the sources."""
    return align if isinstance(align, int) else source - query if align == "end" else 0


HAND = {
    "causal()": "1000 1100 1110 1111",
    "window(2)": "1000 1100 0110 0011",
    "band(1, 0)": "1000 1100 0110 0011",
    "band(0, 2)": "1110 0111 0011 0001",
    "diagonal(1)": "0000 1000 0100 0010",
    "diagonal(-1)": "0100 0010 0001 0000",
    "diagonal(0)": "1000 0100 0010 0001",
    "first(2)": "1100 1100 1100 1100",
    "prefix(2)": "1100 1100 1100 1100",
    "prefix(0)": "0000 0000 0000 0000",
    "everything()": "1111 1111 1111 1111",
    "nothing()": "0000 0000 0000 0000",
    "lengths(3)": "1110 1110 1110 1110",
    "lengths(3, query=2)": "1110 1110 0000 0000",
    "keep([0, 1, 1, 0])": "0110 0110 0110 0110",
    "document([0, 0, 1, 1])": "1100 1100 0011 0011",
    "document([5, 3, 5, 3])": "1010 0101 1010 0101",
    "same([0, 1, 1, 2], [1, 0, 0, 2])": "0110 1000 1000 0001",
    "induction([7, 8, 7, 8])": "0000 0000 0100 0010",
    "induction([7, 7, 7, 7])": "0000 0100 0110 0111",
    "duplicate([7, 8, 7, 8])": "0000 0000 1000 0100",
    "dense([[1, 0, 0, 1]])": "1001 1001 1001 1001",
    "edges([(3, 0), (1, 2), (3, 0), (0, 3)])": "0001 0010 0000 1000",
    "edges([[2, 1]])": "0000 0000 0100 0000",
    "causal() - edges([(3, 0), (3, 2)])": "1000 1100 1110 0101",
    "causal() & window(2) | first(1)": "1000 1100 1110 1011",
    "causal() - diagonal(0)": "0000 1000 1100 1110",
    "~causal()": "0111 0011 0001 0000",
    "(prefix(2) | causal()) & keep([0, 1, 1, 1])": "0100 0100 0110 0111",
}


@pytest.mark.parametrize("expression", HAND)
def test_by_hand(expression: str) -> None:
    mask = masks.parse(expression)
    assert mask.dense(4).reshape(4, 4).tolist() == table(HAND[expression])
    assert eval(repr(mask), vars(masks) | {"true": True}) is not None
    assert masks.parse(repr(mask)).dense(4).tolist() == mask.dense(4).tolist()
    assert repr(masks.parse(repr(mask))) == repr(mask)


ALIGNED = {
    "causal": (lambda a: masks.causal(a), lambda p, j: j <= p),
    "window": (lambda a: masks.window(3, a), lambda p, j: p - 3 < j <= p),
    "band": (lambda a: masks.band(2, 1, a), lambda p, j: -2 <= j - p <= 1),
    "diagonal": (lambda a: masks.diagonal(2, a), lambda p, j: j == p - 2),
}
PAIRS = [(0, 0), (2, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize(("query", "source"), [(7, 7), (3, 7), (7, 3), (1, 7), (0, 3), (3, 0)])
@pytest.mark.parametrize("align", ["end", "start", 2, -1, 9])
@pytest.mark.parametrize("name", ALIGNED)
def test_alignment(name: str, align: Any, query: int, source: int) -> None:
    make, edge = ALIGNED[name]
    offset = standing(align, query, source)
    want = rule(query, source, lambda i, j: edge(i + offset, j))
    assert torch.equal(make(align).dense(query, source), want)
    assert (f'align="{align}"' if isinstance(align, str) else f"align={align}") in repr(make(align))


@pytest.mark.parametrize("align", ["end", "start", 0, 2])
def test_edges_stand_at_positions_of_the_whole_sequence(align: Any) -> None:
    for query, source in ((7, 7), (3, 7), (1, 3), (5, 4)):
        offset = standing(align, query, source)
        if query + offset < 3:
            continue  # they lie beyond the call, which is refused
        want = rule(query, source, lambda i, j, at=offset: (i + at, j) in PAIRS)
        assert torch.equal(masks.edges(PAIRS, align).dense(query, source), want)
        found = masks.edges(PAIRS, align).intervals(query, source)
        assert found is not None
        assert torch.equal(found[1] - found[0], want.sum(-1))


def test_edges_are_found_again_in_the_steps_of_a_cache() -> None:
    whole = masks.edges(PAIRS).dense(4)
    steps = [masks.edges(PAIRS).dense(1, source)[0] for source in (3, 4)]
    assert steps[0].tolist() == whole[2, :3].tolist()
    assert steps[1].tolist() == whole[3].tolist()


def test_edges_are_a_set() -> None:
    given = torch.tensor(PAIRS[::-1] + PAIRS[:1])
    assert repr(masks.edges(given)) == repr(masks.edges(iter(PAIRS)))
    assert masks.edges(given).count(9) == len(PAIRS)
    import numpy

    assert repr(masks.edges([(numpy.int64(3), numpy.int32(0))])) == repr(masks.edges([(3, 0)]))
    many = masks.edges([(i, i) for i in range(40)])
    assert repr(many) == 'edges(<40 pairs>, align="end")'
    assert torch.equal(many.dense(40), torch.eye(40) > 0)


def test_causal_corners_are_those_of_torch() -> None:
    lower, upper = causal_lower_right(3, 5), causal_upper_left(3, 5)
    assert torch.equal(masks.causal().dense(3, 5), lower._materialize())
    assert torch.equal(masks.causal(align="start").dense(3, 5), upper._materialize())


def test_one_query_at_the_end_of_a_cache_reads_everything() -> None:
    assert masks.causal().row(0, query=1, source=16) == list(range(16))
    assert masks.causal(align="start").row(0, query=1, source=16) == [0]


def test_window_counts_the_own_position() -> None:
    assert masks.window(4).counts(12).tolist() == [1, 2, 3] + [4] * 9
    assert masks.window(4).row(7, source=12) == [4, 5, 6, 7]


def test_data_masks_take_the_last_queries() -> None:
    for query in (7, 4, 1, 0):
        at = 7 - query
        documents = rule(query, 7, lambda i, j, at=at: IDS[i + at] == IDS[j])
        assert torch.equal(masks.document(IDS).dense(query, 7), documents)
        copies = rule(query, 7, lambda i, j, at=at: TOKENS[j] == TOKENS[i + at] and j < i + at)
        assert torch.equal(masks.duplicate(TOKENS).dense(query, 7), copies)
        follow = rule(
            query,
            7,
            lambda i, j, at=at: j > 0 and TOKENS[j - 1] == TOKENS[i + at] and j - 1 < i + at,
        )
        assert torch.equal(masks.induction(TOKENS).dense(query, 7), follow)


def test_masks_of_samples() -> None:
    ids, other = torch.tensor([IDS, TOKENS]), torch.tensor([[0, 1, 2], [7, 7, 0]])
    assert masks.document(ids).dense(7).shape == (2, 1, 7, 7)
    assert torch.equal(masks.document(ids).dense(7)[1, 0], masks.document(TOKENS).dense(7))
    together = masks.same(other, ids).dense(3, 7)
    assert torch.equal(together[1, 0], masks.same([7, 7, 0], TOKENS).dense(3, 7))
    mixed = masks.same([7, 8], ids).dense(2, 7)
    assert torch.equal(mixed[1, 0], masks.same([7, 8], TOKENS).dense(2, 7))
    padded = masks.lengths([5, 3], query=[2, 7]).dense(7)
    assert torch.equal(padded[0, 0], rule(7, 7, lambda i, j: i < 2 and j < 5))
    assert torch.equal(padded[1, 0], rule(7, 7, lambda i, j: i < 7 and j < 3))
    real = torch.tensor([REAL, REAL[::-1]])
    assert torch.equal(masks.keep(real).dense(2, 7)[1, 0, 1], real[1])
    assert torch.equal(masks.keep(torch.tensor([REAL])).dense(2, 7)[0, 0, 1], torch.tensor(REAL))


def test_where_sees_single_positions() -> None:
    rows = torch.tensor([[1, 2, 3, 4], [1, 2, 9, 9]])

    def common(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert b.dim() == h.dim() == q.dim() == k.dim() == 0
        return ((rows[:, q] - rows[:, k]).abs().max() < 3) & (h >= 0)

    want = rule(4, 4, lambda i, j: max(abs(int(r[i]) - int(r[j])) for r in rows) < 3)
    assert torch.equal(masks.where(common).dense(4, head=2)[0, 0], want)


@pytest.mark.parametrize(
    ("function", "lead"),
    [
        (lambda b, h, q, k: q >= k, ()),
        (lambda b, h, q, k: q >= k + b, (3, 1)),
        (lambda b, h, q, k: q >= k + h, (1, 2)),
        (lambda b, h, q, k: q >= k + b - h, (3, 2)),
        (lambda b, h, q, k: True, ()),
    ],
)
def test_where_varies_only_as_its_function_does(function: Any, lead: tuple[int, ...]) -> None:
    dense = masks.where(function).dense(4, 5, batch=3, head=2)
    assert dense.shape == (*lead, 4, 5)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.as_tensor(function(b, h, q, k))

    want = create_mask(mod, 3, 2, 4, 5, device="cpu")
    assert torch.equal(dense.expand(3, 2, 4, 5), want)


def test_where_is_not_asked_about_blocked_edges() -> None:
    short = torch.tensor([True, False, True])  # one less than there are sources

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return short[k]

    strict = masks.causal() - masks.diagonal(0)
    want = rule(4, 4, lambda i, j: j < i and bool(short[j]))
    for mask in (strict & masks.where(mod), masks.where(mod) & strict, strict - ~masks.where(mod)):
        assert torch.equal(mask.dense(4), want)
        assert mask.count(4) == int(want.sum())
        assert "not" in mask.why(1, 3, source=4)
    either = masks.where(mod) | ~strict
    assert torch.equal(either.dense(4), want | ~strict.dense(4))
    by_sample = masks.keep(torch.tensor([[True, True, True, False], [False] * 4]))
    assert torch.equal(
        (by_sample & masks.where(mod)).dense(2, 4)[0, 0, 0], torch.tensor([1, 0, 1, 0]) > 0
    )
    assert not (masks.nothing() & masks.where(mod)).dense(4).any()
    with pytest.raises(ValueError, match="reads beyond its own data") as caught:
        masks.where(mod).dense(4)
    assert "causal() & where(function)" in str(caught.value)


# Random trees: every method against the formula of the whole set.

Tree = tuple[Mask, Tensor]


def leaf_trees(query: int, source: int, batch: int) -> st.SearchStrategy[Tree]:
    def number(name: str, n: int, m: int, align: Any) -> Tree:
        p = standing(align, query, source)
        found: dict[str, tuple[Callable[[], Mask], Callable[[int, int], bool]]] = {
            "causal": (lambda: masks.causal(align), lambda i, j: j <= i + p),
            "window": (lambda: masks.window(n + 1, align), lambda i, j: i + p - n <= j <= i + p),
            "band": (lambda: masks.band(n, m, align), lambda i, j: -n <= j - i - p <= m),
            "diagonal": (lambda: masks.diagonal(n - 2, align), lambda i, j: j == i + p - n + 2),
            "first": (lambda: masks.first(n + 1), lambda i, j: j <= n),
            "prefix": (lambda: masks.prefix(n), lambda i, j: j < n),
            "everything": (masks.everything, lambda i, j: True),
            "nothing": (masks.nothing, lambda i, j: False),
            "where": (
                lambda: masks.where(lambda b, h, q, k: (q * 5 + k * 3) % (n + 2) < 2),
                lambda i, j: (i * 5 + j * 3) % (n + 2) < 2,
            ),
        }
        if name == "edges":
            rows = range(max(p - 2, 0), max(query + p, 0))
            pairs = [
                (i, j) for i in rows for j in range(source) if (i * 5 + j * 3 + n) % (m + 2) < 1
            ]
            mask = masks.edges(pairs, align) if pairs else masks.nothing()
            return mask, rule(query, source, lambda i, j: (i + p, j) in pairs)
        make, edge = found[name]
        return make(), rule(query, source, edge)

    def data(name: str, values: list[list[int]], one: bool) -> Tree:
        values = values[:1] if one else values
        ids = torch.tensor(values, dtype=torch.int64).reshape(len(values), source)
        at = source - query

        def edge(row: list[int], i: int, j: int) -> bool:
            if name == "document":
                return row[i + at] == row[j]
            if name == "duplicate":
                return row[j] == row[i + at] and j < i + at
            if name == "induction":
                return j > 0 and row[j - 1] == row[i + at] and j - 1 < i + at
            if name == "same":
                return row[j] == row[i % max(source, 1)]
            if name == "keep":
                return row[j] > 0
            if name == "lengths":
                return j < min(sum(row), source)
            return (row[j] + i) % 2 == 0

        whole = torch.stack(
            [rule(query, source, lambda i, j, r=row: edge(r, i, j)) for row in values]
        )[:, None]
        flat = whole[0, 0] if one else whole
        if name == "same":
            wanted = ids[:, [i % max(source, 1) for i in range(query)]]
            mask = masks.same(wanted[0] if one else wanted, ids[0] if one else ids)
        elif name == "keep":
            mask = masks.keep(ids[0] > 0 if one else ids > 0)
        elif name == "lengths":
            filled = ids.sum(-1).clamp(max=source)
            mask = masks.lengths(filled[0] if one else filled)
        elif name == "dense":
            mask = masks.dense(flat)
        else:
            mask = getattr(masks, name)(ids[0] if one else ids)
        return mask, flat

    numbers = st.builds(
        number,
        st.sampled_from(
            ["causal", "window", "band", "diagonal", "first", "prefix", "where", "nothing", "edges"]
        ),
        st.integers(0, 5),
        st.integers(0, 3),
        st.sampled_from(["end", "start", 0, 2, -3]),
    )
    names = ["keep", "lengths", "dense"] + (["same"] if source else [])
    names += ["document", "duplicate", "induction"] if query <= source else []
    samples = st.lists(
        st.lists(st.integers(0, 2), min_size=source, max_size=source),
        min_size=batch,
        max_size=batch,
    )
    return numbers | st.builds(data, st.sampled_from(names), samples, st.booleans())


def join(sign: str, left: Tree, right: Tree) -> Tree:
    a, b = left[0], right[0]
    if sign == "&":
        return a & b, left[1] & right[1]
    if sign == "|":
        return a | b, left[1] | right[1]
    return a - b, left[1] & ~right[1]


@st.composite
def trees(draw: st.DrawFn) -> tuple[Mask, Tensor, int, int]:
    query, source = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    leaves = leaf_trees(query, source, draw(st.integers(1, 3)))
    tree = st.recursive(
        leaves,
        lambda inner: (
            st.builds(join, st.sampled_from("&|-"), inner, inner)
            | inner.map(lambda tree: (~tree[0], ~tree[1]))
        ),
        max_leaves=5,
    )
    mask, want = draw(tree)
    return mask, want, query, source


def four(edges: Tensor) -> Tensor:
    """(query, ...) with a batch and a head axis."""
    return edges if edges.dim() == 4 else edges[None, None]


def tile_rows(edges: Tensor, top: int, bottom: int) -> Tensor:
    return edges[..., top:bottom, :]


@given(trees(), st.data())
@settings(max_examples=120, deadline=None)
def test_every_method_agrees_with_the_formula(tree: Any, data: st.DataObject) -> None:
    mask, want, query, source = tree
    dense = mask.dense(query, source)
    assert torch.equal(*torch.broadcast_tensors(four(dense), four(want)))
    assert (mask.own.batch in (None, 1)) or dense.shape[0] == mask.own.batch

    # block is never wrong
    top, left = data.draw(st.integers(0, query)), data.draw(st.integers(0, source))
    bottom, right = data.draw(st.integers(top, query)), data.draw(st.integers(left, source))
    block = mask.block(range(top, bottom), range(left, right), query, source)
    tile = want[..., top:bottom, left:right]
    assert block != EMPTY or not tile.any()
    assert block != FULL or tile.all()

    # intervals, where promised, are the rows
    found = mask.intervals(query, source)
    if found is not None:
        start, stop = (x[..., None] for x in found)
        assert (start <= stop).all()
        assert ((start >= 0) & (stop <= source)).all()
        at = torch.arange(source)
        inside = (start <= at) & (at < stop)
        assert torch.equal(*torch.broadcast_tensors(four(inside), four(want)))

    # ranges, where promised, and strips are the rows
    union = mask.ranges(query, source)
    if union is not None:
        assert union.start.dtype == union.stop.dtype == torch.int32
        assert len(union.start) <= 4
        start, stop = union.start[..., None], union.stop[..., None]
        inside = ((start <= torch.arange(source)) & (torch.arange(source) < stop)).any(0)
        assert torch.equal(*torch.broadcast_tensors(inside, four(want)))
    sizes = Sizes(mask.own.batch or 1, 1, query, source)
    strip, part = torch.broadcast_tensors(
        mask.strip(range(top, bottom), sizes), four(want)[..., top:bottom, :]
    )
    assert torch.equal(strip, part)

    # sources, where promised, leave out none that a query may read
    listed = mask.sources(range(top, bottom), sizes) if bottom > top else None
    if listed is not None:
        assert (listed[1:] > listed[:-1]).all()
        assert torch.isin(four(tile_rows(want, top, bottom)).nonzero()[:, -1], listed).all()

    # counts, rows and any tile
    assert torch.equal(*torch.broadcast_tensors(mask.counts(query, source), dense.sum(-1)))
    assert mask.count(query, source) == int(dense.sum())
    rows = torch.tensor(data.draw(st.lists(st.integers(0, query - 1), max_size=4)) if query else [])
    columns = torch.tensor(
        data.draw(st.lists(st.integers(0, source - 1), max_size=4)) if source else []
    )
    tile = mask.tile(rows.long(), columns.long(), sizes)
    assert torch.equal(tile, dense[..., rows.long(), :][..., columns.long()])
    sample = (mask.own.batch or 1) - 1
    for i in range(min(query, 2)):
        assert mask.row(i, source, query=query, sample=sample) == [
            j for j in range(source) if four(dense)[-1, 0, i, j]
        ]
        for j in range(min(source, 3)):
            said = mask.why(i, j, query=query, source=source, sample=sample).split("\n")
            allowed = bool(four(dense)[-1, 0, i, j])
            assert said[0] == f"query {i} may {'' if allowed else 'not '}read source {j}"
            assert said[1].startswith("- allowed by " if allowed else "- blocked by ")


@given(trees())
@settings(max_examples=40, deadline=None)
def test_laws_of_sets(one: Any) -> None:
    mask, _, query, source = one
    other = masks.causal() | masks.first(1)
    assert torch.equal((~~mask).dense(query, source), mask.dense(query, source))
    left, right = ~(mask & other), ~mask | ~other
    assert torch.equal(left.dense(query, source), right.dense(query, source))
    left, right = ~(mask | other), ~mask & ~other
    assert torch.equal(left.dense(query, source), right.dense(query, source))
    assert torch.equal((mask - other).dense(query, source), (mask & ~other).dense(query, source))
    assert not (mask & ~mask).dense(query, source).any()
    assert (mask | ~mask).dense(query, source).all()


def test_expressions_keep_their_meaning_as_text() -> None:
    a, b, c = masks.causal(), masks.window(2), masks.first(1)
    for mask in (
        a & (b | c),
        (a & b) | c,
        a - (b - c),
        (a - b) - c,
        ~(a | b),
        ~a & b,
        ~(a - b),
        a & (b & c),
    ):
        again = masks.parse(repr(mask))
        assert torch.equal(again.dense(5), mask.dense(5))
        assert repr(again) == repr(mask)
    assert repr(~(a | b)) == '~(causal(align="end") | window(2, align="end"))'


# Blocks and intervals are as sharp as they can be where it counts.


def blocks(mask: Mask, size: int, tile: int) -> list[str]:
    starts = range(0, size, tile)
    return [
        " ".join(".-#"[mask.block(range(i, i + tile), range(j, j + tile), size)] for j in starts)
        for i in starts
    ]


def test_blocks_by_hand() -> None:
    assert blocks(masks.causal(), 16, 4) == ["- . . .", "# - . .", "# # - .", "# # # -"]
    assert blocks(masks.window(4), 16, 4) == ["- . . .", "- - . .", ". - - .", ". . - -"]
    assert blocks(masks.causal() - masks.window(8), 16, 4)[3] == "# - . -"
    assert blocks(masks.lengths([5, 9]), 16, 4)[0] == "# - - ."
    assert blocks(masks.keep([False] * 4 + [True] * 12), 16, 4)[0] == ". # # #"
    packed = masks.document([0] * 8 + [1] * 8)
    assert blocks(packed, 16, 4) == ["# # . .", "# # . .", ". . # #", ". . # #"]
    assert blocks(packed & masks.causal(), 16, 4) == ["- . . .", "# - . .", ". . - .", ". . # -"]
    assert blocks(masks.dense(torch.eye(16) > 0), 16, 4)[1] == ". - . ."
    assert blocks(masks.induction([1] * 16), 16, 4)[0] == "- . . ."
    square = masks.edges([(i, j) for i in range(4, 8) for j in range(8, 12)] + [(15, 0)])
    assert blocks(square, 16, 4) == [". . . .", ". . # .", ". . . .", "- . . ."]


def test_intervals_where_rows_are_one() -> None:
    promised = [
        "causal",
        "window(3)",
        "first(2)",
        "causal & window(3)",
        "causal | prefix(3)",
        "~causal",
        "lengths([5, 3])",
        "causal & lengths([5, 3])",
        "keep([0, 1, 1, 1, 1, 0])",
        "everything - causal",
        "document([0, 0, 1, 1, 1, 2])",
        "~prefix(2)",
        "document([0, 0, 1, 1, 1, 2]) & causal & window(2)",
        "band(2, 1) | diagonal(2)",
        "dense([[1, 1, 0, 0, 0, 0]])",
        "edges([(0, 0), (3, 1), (3, 2)])",
    ]
    for expression in promised:
        assert masks.parse(expression).intervals(6) is not None, expression
    unpromised = [
        "causal & window(2) | first(1)",
        "keep([1, 0, 1, 0, 0, 0])",
        "~window(2)",
        "document([0, 1, 0, 1, 0, 1])",
        "dense([[1, 0, 1, 0, 0, 0]])",
        "induction([1, 1, 1, 1, 1, 1])",
        "edges([(3, 0), (3, 2)])",
    ]
    for expression in unpromised:
        assert masks.parse(expression).intervals(6) is None, expression


@pytest.mark.parametrize(
    ("expression", "count"),
    [
        ("causal", 1),
        ("causal & window(2) | first(1)", 2),
        ("~window(2)", 2),
        ("document([0, 0, 1, 1, 1, 2]) - diagonal(0)", 2),
        ("~band(1, 1) & ~prefix(2)", 4),
        ("first(1) | diagonal(0) | diagonal(2) | diagonal(4)", 4),
        ("first(1) | diagonal(0) | diagonal(2) | diagonal(4) | diagonal(-2)", None),
        ("~(window(2) | first(1))", None),
        ("induction([1, 1, 1, 1, 1, 1])", None),
        ("causal & dense([[1, 1, 0, 0, 0, 0]])", 1),
        ("dense([[1, 0], [1, 1]])", None),
    ],
)
def test_ranges_where_rows_are_a_few(expression: str, count: int | None) -> None:
    found = masks.parse(expression).ranges(2 if "[1, 0]," in expression else 6)
    assert (None if found is None else len(found.start)) == count


def test_fewer_ranges_may_be_asked_for() -> None:
    mask = masks.window(2) | masks.first(1)
    assert mask.ranges(6, most=1) is None
    found = mask.ranges(6, 6, 2)
    assert found is not None
    assert found.start[:, 0, 0].tolist() == [[0, 0, 1, 2, 3, 4], [0] * 6]
    assert found.stop[:, 0, 0].tolist() == [[1, 2, 3, 4, 5, 6], [1] * 6]


def test_ranges_say_where_they_lie() -> None:
    found = (masks.causal() & masks.lengths([2, 3]) | masks.first(1)).ranges(4)
    assert found is not None
    assert found.address[2:] == (1, 8, 4, 0)
    start = found.start.data_ptr()
    assert found.address_from(3)[0] == start + 12
    heads = masks.lengths([2, 3]) & masks.dense(torch.ones(1, 3, 1, 4, dtype=torch.bool))
    found = heads.ranges(4)
    assert found is not None
    assert found.address[2:] == (1, 24, 12, 4)


def test_ranges_of_relative_masks_are_looked_up() -> None:
    assert masks.window(3).relative
    assert masks.window(3).ranges(5, 7) is masks.window(3).ranges(5, 7)
    assert masks.window(3).ranges(5, 7) is not masks.window(2).ranges(5, 7)


def test_a_stored_mask_is_not_copied() -> None:
    edges = torch.rand(3, 1, 5, 7) < 0.5
    mask = masks.dense(edges)
    assert mask.stored
    strip = mask.strip(range(2, 4), Sizes(3, 2, 5, 7))
    assert strip.data_ptr() == edges[:, :, 2].data_ptr()
    assert torch.equal(strip, edges[:, :, 2:4])


def test_a_mask_tells_the_truth_about_its_type() -> None:
    for mask in (masks.causal(), masks.causal() & masks.first(1), masks.lengths([2])):
        kind = type(mask)
        assert kind.__name__ == kind.__qualname__ != "Mask"


def test_large_masks_are_counted_without_testing_every_edge() -> None:
    n = 100_000
    assert masks.causal().count(n) == n * (n + 1) // 2
    assert masks.window(3).count(n) == 3 * n - 3
    mask = masks.causal() & masks.window(3) | masks.first(1)
    assert mask.count(n) == 3 * n - 3 + n - 3
    with pytest.raises(ValueError, match="tested one by one"):
        masks.where(lambda b, h, q, k: q > k).counts(1 << 20)


# Sizes that disagree.


def test_sizes_that_disagree_raise_with_both() -> None:
    with pytest.raises(ValueError, match="made for 20 sources, the call has 10"):
        masks.document([0] * 20).dense(10)
    with pytest.raises(
        ValueError, match=r"lengths: sample 1 has 9 source positions, the call has 5"
    ):
        masks.lengths([5, 9]).dense(5)
    with pytest.raises(ValueError, match="made for 2 samples, the call has 3"):
        masks.lengths([5, 4]).dense(5, batch=3)
    with pytest.raises(ValueError, match=r"keep.* is made for 3 sources, document.* for 4"):
        _ = masks.keep([True] * 3) & masks.document([0] * 4)
    with pytest.raises(ValueError, match=r"is made for 2 samples, .* for 3"):
        _ = masks.lengths([1, 2]) | masks.lengths([1, 2, 3])
    with pytest.raises(ValueError, match="at most as many"):
        masks.document([0, 1]).dense(3, 2)
    with pytest.raises(ValueError, match="made for 2 queries, the call has 3"):
        (masks.causal() & masks.dense(torch.ones(2, 3) > 0)).dense(3)
    for pair, sizes in (((3, 0), (3,)), ((0, 3), (3,)), ((4, 0), (2, 4)), ((2, 4), (1, 4))):
        with pytest.raises(ValueError, match=rf"\({pair[0]}, {pair[1]}\) lies beyond"):
            masks.edges([pair]).dense(*sizes)
    with pytest.raises(ValueError, match="needs as many samples"):
        masks.same([[0], [1]], [[0], [1], [2]])
    with pytest.raises(ValueError, match="one length a sample"):
        masks.lengths([1, 2], query=[1, 2, 3])


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: masks.window(0), ValueError, "at least 1; got 0"),
        (lambda: masks.window(-3), ValueError, r"nothing\(\) allows no edge"),
        (lambda: masks.window(True), TypeError, "takes an integer"),
        (lambda: masks.window(2.0), TypeError, "takes an integer"),
        (lambda: masks.window(10**30), ValueError, "positions"),
        (lambda: masks.band(-1, 0), ValueError, "before: .* 0 or more"),
        (lambda: masks.first(0), ValueError, "at least 1"),
        (lambda: masks.prefix(-1), ValueError, "0 or more"),
        (lambda: masks.causal("left"), ValueError, "align: is .*got 'left'"),
        (lambda: masks.causal(None), ValueError, "align"),
        (lambda: masks.lengths([3, -1]), ValueError, "0 or more; got -1"),
        (lambda: masks.lengths([[3]]), ValueError, "one a sample"),
        (lambda: masks.lengths(None), TypeError, "as integers"),
        (lambda: masks.lengths([1.5]), TypeError, "as integers"),
        (lambda: masks.lengths([True]), TypeError, "keep"),
        (lambda: masks.keep([1, 0]), TypeError, "from_huggingface"),
        (lambda: masks.keep(True), ValueError, "batch, position"),
        (lambda: masks.document([[0, 1], [0]]), ValueError, "equal lengths"),
        (lambda: masks.document([0.5]), TypeError, "takes integers"),
        (lambda: masks.document(torch.tensor(3)), ValueError, "position"),
        (lambda: masks.dense(torch.ones(3, 3)), TypeError, "bool mask in disguise"),
        (lambda: masks.dense(torch.ones(3, 3, dtype=torch.int64)), TypeError, "in disguise"),
        (lambda: masks.dense(torch.full((3, 3), -1e4)), TypeError, "bias="),
        (lambda: masks.dense(torch.ones(2, 3, 3) > 0), ValueError, "read in two ways"),
        (lambda: masks.edges([]), ValueError, r"nothing\(\)"),
        (lambda: masks.edges([(3, -1)]), ValueError, "from 0, .*3, -1"),
        (lambda: masks.edges([(1 << 31, 0)]), ValueError, "2147483647"),
        (lambda: masks.edges([(3, 0.0)]), TypeError, "as integers; got .3, 0.0"),
        (lambda: masks.edges([(3, True)]), TypeError, "as integers"),
        (lambda: masks.edges((3, 0)), TypeError, r"pairs; got 3(?s:.)*edges\(\[\(3, 0\)\]\)"),
        (lambda: masks.edges([(3, 0, 1)]), TypeError, "query, source"),
        (lambda: masks.edges("3, 0"), TypeError, "query, source"),
        (lambda: masks.edges(torch.tensor([3, 0])), TypeError, r"shape \(2,\)"),
        (lambda: masks.edges(torch.eye(2) > 0), TypeError, "as integers"),
        (lambda: masks.edges(3), TypeError, "query, source"),
        (lambda: masks.edges([(3, 0)], "left"), ValueError, "align"),
        (lambda: masks.where(3), TypeError, "function of four"),
        (lambda: masks.where(lambda q, k: q > k), TypeError, "batch, head, query, source"),
        (lambda: masks.where(lambda b, h, q, k: q - k).dense(2), TypeError, "True or False"),
        (lambda: masks.causal().dense(-1), ValueError, "0 or more"),
        (lambda: masks.causal().dense(2.0), TypeError, "as an integer"),
        (lambda: masks.causal().dense(None), TypeError, "query"),
        (lambda: masks.causal().row(4, source=4), ValueError, r"lies in 0\.\.3"),
        (lambda: masks.causal().row("a", source=4), TypeError, "position"),
        (lambda: masks.lengths([1, 2]).row(0, source=4), ValueError, "sample: must be given"),
        (lambda: masks.lengths([1, 2]).row(0, source=4, sample=2), ValueError, "sample: lies in"),
        (lambda: masks.causal().picture(4, cells=0), ValueError, "cells"),
        (lambda: bool(masks.causal()), TypeError, "compose with"),
        (lambda: masks.causal() and masks.window(2), TypeError, "compose with"),
    ],
)
def test_refused(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_composition_with_other_things() -> None:
    eye = torch.eye(3) > 0
    for mask in (masks.causal() & eye, eye & masks.causal()):
        assert torch.equal(mask.dense(3), eye)
    assert torch.equal((eye - masks.causal()).dense(3), torch.zeros(3, 3) > 0)
    assert torch.equal((~eye | masks.causal()).dense(3), ~eye | masks.causal().dense(3))
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = masks.causal() & 3  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(TypeError):
        _ = masks.causal() & torch.ones(3, 3)


def test_no_samples_and_no_positions() -> None:
    assert masks.lengths([]).dense(3).shape == (0, 1, 3, 3)
    assert masks.lengths([]).counts(3).shape == (0, 1, 3)
    for real in (torch.zeros(0, 3), torch.zeros(2, 0), torch.zeros(0, 0)):
        size = real.shape[1]
        for mask in (
            masks.keep(real > 0),
            masks.document(real.long()),
            masks.induction(real.long()),
        ):
            assert mask.dense(size).shape == (len(real), 1, size, size)
            assert mask.count(size) == mask.dense(size).sum()
            assert (mask & masks.causal()).block(range(size), range(size), size) in masks.Block
            assert isinstance(mask.picture(size), str)
    assert "no edges" in str(masks.document([]))


# Words and pictures.


def test_why_names_the_part_that_decides() -> None:
    mask = masks.causal() & masks.window(3) | masks.first(1)
    assert mask.why(5, 0).split("\n") == [
        "query 5 may read source 0",
        "- allowed by first(1): source 0 is among the first 1",
        "- although window(3) blocks it: source 0 lies 5 before query 5",
    ]
    assert mask.why(5, 1).split("\n") == [
        "query 5 may not read source 1",
        "- blocked by window(3): source 1 lies 4 before query 5",
        "- blocked by first(1): source 1 is not among the first 1",
        "- although causal() allows it: source 1 lies 4 before query 5",
    ]
    hole = masks.causal() - masks.diagonal(0)
    assert hole.why(2, 2).split("\n") == [
        "query 2 may not read source 2",
        "- blocked by ~diagonal(0): source 2 is the position of query 2",
        "- although causal() allows it: source 2 is the position of query 2",
    ]


@pytest.mark.parametrize(
    ("mask", "edge", "text"),
    [
        (masks.causal(), (1, 3), "blocked by causal(): source 3 lies 2 after query 1"),
        (masks.everything(), (1, 3), "allowed by everything(): it has every edge"),
        (masks.nothing(), (1, 3), "blocked by nothing(): it has no edge"),
        (masks.keep(REAL), (1, 0), "source 0 is padding"),
        (masks.keep(torch.tensor([REAL])), (1, 1), "source 1 is real in sample 0"),
        (masks.lengths([3]), (1, 4), "source 4 is padding: sample 0 has 3 sources"),
        (masks.lengths(3, query=1), (1, 0), "query 1 is padding: the sequence has 1 queries"),
        (masks.lengths(3), (1, 0), "source 0 is one of the 3 sources of the sequence"),
        (masks.document(IDS), (1, 2), "query 1 has document 0, source 2 has document 1"),
        (masks.document(IDS), (0, 1), "query 0 and source 1 both have document 0"),
        (masks.induction(TOKENS), (3, 1), "source 1 follows token 7, query 3 is token 7"),
        (masks.induction(TOKENS), (3, 0), "no token comes before source 0"),
        (masks.induction(TOKENS), (3, 6), "source 6 follows no token before query 3"),
        (masks.duplicate(TOKENS), (3, 1), "source 1 is token 8, query 3 is token 7"),
        (masks.dense([[True, False]]), (0, 1), "the tensor is False there"),
        (masks.edges([(3, 0)]), (3, 0), "(3, 0) is among its 1 edge"),
        (masks.edges([(3, 0), (3, 1)]), (3, 2), "(3, 2) is not among its 2 edges"),
        (masks.where(lambda b, h, q, k: q > k), (1, 0), "the function returns True"),
    ],
)
def test_reasons(mask: Mask, edge: tuple[int, int], text: str) -> None:
    assert text in mask.why(*edge)


def test_why_says_where_queries_stand() -> None:
    assert "source 3 lies 1 after query 0 (at position 2)" in masks.causal().why(
        0, 3, query=3, source=5
    )


def test_pictures() -> None:
    assert masks.causal().picture(3, 12) == (
        "                      1\n"
        "  0 1 2 3 4 5 6 7 8 9 0 1\n"
        "0 ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ · ·\n"
        "1 ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ·\n"
        "2 ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■"
    )
    assert masks.causal().picture(8, cells=2) == (
        "  0 7\n0 ▒ ·\n4 ■ ▒\n"
        "· none  ░ under 1/3  ▒ under 2/3  ▓ more  ■ all  (of up to 4 x 4 edges)"
    )
    assert masks.causal().picture(0) == "no edges: 0 queries, 0 sources"
    many = masks.lengths([1, 2, 1, 2, 1, 2]).picture(2)
    assert many.count("sample") == 5
    assert many.endswith("and 2 more: choose with sample= and head=")
    assert str(masks.causal()).startswith("causal()\n  0 1 2 3 4 5 6 7\n0 ■")
    assert str(masks.lengths([12])).count("\n") == 14
    assert str(masks.where(lambda b, h, q, k: q > k)) == "where(<lambda>)"
    assert masks.causal().maps(4, cells=2)[0].edges == 10


def test_repr_of_large_data_is_short() -> None:
    assert repr(masks.document(torch.zeros(8, 4096).long())) == "document(<int64 (8, 4096)>)"


# Masks are values.


def test_masks_never_change() -> None:
    ids = torch.tensor(IDS)
    mask = masks.document(ids)
    before = mask.dense(7)
    ids.zero_()
    assert torch.equal(mask.dense(7), before)


def test_masks_can_be_copied_and_hashed() -> None:
    mask = masks.causal() & masks.document(IDS) - masks.lengths([5, 3]) | ~masks.keep(REAL)
    for again in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.to("cpu")):
        assert torch.equal(again.dense(7), mask.dense(7))
        assert again == mask
        assert again in {mask}


def even(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q + k) % 2 == 0


def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k < 2


# Each is made twice; no two of them are the same expression of the same data.
WRITTEN = (
    lambda: masks.everything(),
    lambda: masks.nothing(),
    lambda: masks.causal(),
    lambda: masks.causal(align="start"),
    lambda: masks.causal(align=0),
    lambda: masks.window(3),
    lambda: masks.window(4),
    lambda: masks.band(2, 0),
    lambda: masks.diagonal(0),
    lambda: masks.first(2),
    lambda: masks.prefix(2),
    lambda: masks.lengths([5, 3]),
    lambda: masks.lengths([5, 3], query=[5, 3]),
    lambda: masks.lengths([5, 2]),
    lambda: masks.keep(REAL),
    lambda: masks.document(IDS),
    lambda: masks.same(IDS, IDS),
    lambda: masks.induction(IDS),
    lambda: masks.duplicate(IDS),
    lambda: masks.duplicate([IDS]),
    lambda: masks.duplicate([IDS, TOKENS]),
    lambda: masks.dense([[True, False]]),
    lambda: masks.dense([[True], [False]]),
    lambda: masks.dense([[True, True]]),
    lambda: masks.edges([(3, 0)]),
    lambda: masks.edges([(3, 0), (3, 1)]),
    lambda: masks.where(even),
    lambda: masks.where(near),
    lambda: ~masks.causal(),
    lambda: masks.causal() & masks.keep(REAL),
    lambda: masks.keep(REAL) & masks.causal(),
    lambda: masks.causal() | masks.keep(REAL),
    lambda: masks.causal() - masks.keep(REAL),
)


def test_masks_are_equal_where_the_same_expression_made_them_of_equal_data() -> None:
    made, again = ([make() for make in WRITTEN] for _ in range(2))
    for at, one in enumerate(made):
        for number, other in enumerate(again):
            assert (one == other) == (at == number), (one, other)
            assert (one != other) == (at != number)
        assert hash(one) == hash(again[at])
    assert len({*made, *again}) == len(WRITTEN)
    assert masks.causal() != "causal()"
    assert masks.dense(torch.ones(2, 2).bool()) != torch.ones(2, 2).bool()


def test_masks_whose_numbers_are_not_known_are_equal_to_themselves_alone() -> None:
    mask = masks.keep(torch.ones(3, dtype=torch.bool, device="meta"))
    assert mask == mask
    assert mask != masks.keep(torch.ones(3, dtype=torch.bool, device="meta"))
    assert hash(mask) == hash(masks.keep(torch.ones(3, dtype=torch.bool, device="meta")))


def test_torch_is_told_what_to_make_of_a_mask() -> None:
    x, mask = torch.randn(2, 5, 8), masks.causal()
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    decoder = torch.nn.TransformerDecoderLayer(8, 2, batch_first=True)
    for wrong in (
        lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=mask),  # pyright: ignore
        lambda: layer(x, x, x, attn_mask=mask),
        lambda: layer(x, x, x, key_padding_mask=mask),
        lambda: decoder(x, x, tgt_mask=mask),
        lambda: x.masked_fill(mask, 0),  # pyright: ignore
    ):
        with pytest.raises(TypeError, match=r"^mask: torch takes a tensor(.|\n)*mask.to_multihead"):
            wrong()
    with pytest.raises(TypeError, match="unsupported operand"):
        x + mask  # pyright: ignore
    right = mask.dense(5)
    both = F.scaled_dot_product_attention(x, x, x, attn_mask=mask.to_sdpa(5))
    assert torch.equal(both, F.scaled_dot_product_attention(x, x, x, attn_mask=right))
    heard, _ = layer(x, x, x, attn_mask=mask.to_multihead(5))
    assert torch.equal(heard, layer(x, x, x, attn_mask=~right)[0])


def test_names_that_are_not_there_are_answered() -> None:
    for name, meant in {
        "padding": "keep", "sliding": "window", "bidirectional": "everything", "pairs": "edges",
        "causel": "causal",
    }.items():  # fmt: skip
        with pytest.raises(AttributeError, match=f"{name}.*did you mean .*{meant}"):
            getattr(masks, name)
        with pytest.raises(ValueError, match=f"{name}.*did you mean .*{meant}"):
            masks.parse(name)
    with pytest.raises(AttributeError, match="'Mask' object has no attribute 'shape'"):
        masks.causal().shape  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(masks, "__path_hooks__")


def test_errors_say_sizes_in_one_order() -> None:
    with pytest.raises(ValueError) as caught:
        masks.lengths([5, 3]).dense(6, batch=3, head=4)
    lines = str(caught.value).splitlines()
    assert lines[1:3] == [
        "  mask (batch, head, query, source)  (2, any, any, any)",
        "  call                               (3, 4, 6, 6)",
    ]
    with pytest.raises(ValueError) as caught:
        masks.dense(torch.ones(7, 7) > 0).dense(5)
    assert len(str(caught.value).splitlines()[0]) < 120


def test_to_moves_every_tensor() -> None:
    mask = masks.causal() & masks.document(IDS) - masks.lengths([5, 3], query=[1, 2])
    mask = mask | ~masks.keep(REAL) & masks.same(IDS, IDS) & masks.dense(torch.ones(7, 7) > 0)
    mask = mask & masks.induction(TOKENS) | masks.edges([(3, 0)])
    moved = mask.to("meta")
    sizes = Sizes(2, 1, 7, 7)
    at = torch.arange(7, device="meta")
    assert moved.tile(at, at, sizes).is_meta
    assert moved.intervals(7, device="meta") is None
    assert moved.block(range(0, 4), range(0, 4), 7) in (EMPTY, masks.PARTIAL, FULL)
    assert masks.causal().dense(3, device="meta").is_meta


# Tracing.


def traced(q: Tensor, ids: Tensor, filled: Tensor, real: Tensor) -> Tensor:
    everything = masks.everything()
    mask = masks.causal() & masks.document(ids) - masks.window(2) | masks.lengths(filled)
    return (
        mask & masks.keep(real)
        | masks.induction(ids)
        | everything - masks.same(ids, ids)
        | masks.edges([(3, 5), (0, 6)])
    ).dense(len(q))


def test_masks_can_be_made_inside_of_a_compiled_function() -> None:
    given = (torch.ones(7), torch.tensor(IDS), torch.tensor([5, 3]), torch.tensor(REAL))
    compiled = torch.compile(traced, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*given), traced(*given))
    where = torch.compile(
        lambda q: (masks.causal() & masks.where(lambda b, h, i, j: (i - j) % 2 == 0)).dense(len(q)),
        backend="eager",
        fullgraph=True,
    )
    want = rule(7, 7, lambda i, j: j <= i and (i - j) % 2 == 0)
    assert torch.equal(where(torch.ones(7)).reshape(7, 7), want)


def test_masks_can_be_exported_with_any_length() -> None:
    class Tile(torch.nn.Module):
        def forward(self, x: Tensor, real: Tensor) -> Tensor:
            mask = masks.causal() & masks.window(3) & masks.keep(real) - masks.edges([(1, 0)])
            return mask.dense(x.shape[0])

    size = torch.export.Dim("size", min=2, max=64)
    example = (torch.ones(7), torch.tensor(REAL))
    program = torch.export.export(Tile(), example, dynamic_shapes=({0: size}, {0: size}))
    for n in (7, 12):
        given = (torch.ones(n), torch.arange(n) % 3 > 0)
        assert torch.equal(program.module()(*given), Tile()(*given))


def test_masks_can_be_made_inside_of_vmap() -> None:
    ids = torch.tensor([IDS, TOKENS])
    mapped = torch.vmap(lambda row: (masks.document(row) & masks.causal()).dense(7))(ids)
    assert torch.equal(mapped, (masks.document(ids) & masks.causal()).dense(7)[:, 0])
