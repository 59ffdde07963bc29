"""Packed sequences, chunks, FlexAttention's block masks, functions with an alignment."""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import clearhead as ch
from clearhead import masks, readings


def packed(query: list[int], source: list[int], causal: bool) -> Tensor:
    """By the definition: each pair of sequences is a block, causal from its lower right corner."""
    blocks = []
    for q, s in zip(np.diff(query), np.diff(source), strict=True):
        block = torch.ones(int(q), int(s), dtype=torch.bool)
        blocks.append(block.tril(int(s - q)) if causal else block)
    return torch.block_diag(*(b.to(torch.uint8) for b in blocks)).bool()


PACKS = [
    ([0, 4, 9], [0, 4, 9]),
    ([0, 2, 2, 7], [0, 3, 4, 9]),
    ([0, 5, 6], [0, 2, 9]),
    ([0, 1, 2, 3], [0, 7, 7, 40]),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("query", "source"), PACKS)
def test_packs_by_their_definition(query: list[int], source: list[int], causal: bool) -> None:
    want = packed(query, source, causal)
    mask = masks.from_cu_seqlens(torch.tensor(query, dtype=torch.int32), source, causal=causal)
    assert torch.equal(mask.dense(*want.shape), want)
    found = mask.intervals(want.shape[0], want.shape[1])
    assert found is not None
    start, stop = found
    columns = torch.arange(want.shape[1])
    assert torch.equal((start[:, None] <= columns) & (columns < stop[:, None]), want)
    for top in range(0, want.shape[0], 2):
        for left in range(0, want.shape[1], 3):
            rows = range(top, min(top + 2, want.shape[0]))
            across = range(left, min(left + 3, want.shape[1]))
            tile = want[top : rows.stop, left : across.stop]
            block = mask.block(rows, across, *want.shape)
            assert block == masks.FULL if tile.all() else block in (masks.EMPTY, masks.PARTIAL)
            assert block != masks.EMPTY or not tile.any()


@pytest.mark.parametrize("impl", ["reference", "tiled", "native"])
def test_a_pack_is_the_loop_over_its_sequences(impl: str) -> None:
    query, source = PACKS[1]
    q, k, v = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    ours = ch.attend(q, k, v, masks.from_cu_seqlens(query, source, causal=True), impl=impl)
    for a, b, c, d in zip(query, query[1:], source, source[1:], strict=False):
        alone = ch.attend(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], masks.causal())
        torch.testing.assert_close(ours[:, :, a:b], alone)


@pytest.mark.parametrize("n", [1, 3, 8, 100])
@pytest.mark.parametrize(("query", "source"), [(8, 8), (3, 11), (1, 9)])
@pytest.mark.parametrize("align", ["end", "start", 2])
def test_chunks(n: int, query: int, source: int, align: Any) -> None:
    offset: int = {"end": source - query, "start": 0, 2: 2}[align]
    rows, columns = torch.arange(query)[:, None] + offset, torch.arange(source)
    want = rows // n == columns // n
    mask = masks.chunk(n, align)
    assert torch.equal(mask.dense(query, source), want)
    x, y = torch.randn(query, 4), torch.randn(source, 4)
    torch.testing.assert_close(ch.attend(x, y, y, mask), ch.attend(x, y, y, want))
    assert mask.block(range(query), range(source), query, source) != masks.EMPTY or not want.any()
    assert masks.parse(repr(mask)) == mask


def causal_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (q - k < 7)


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k) % (h + 2) == b


@pytest.mark.parametrize("function", [causal_window, by_head])
@pytest.mark.parametrize("size", [4, (4, 16)])
def test_block_masks_of_flex_attention(function: Any, size: Any) -> None:
    block_mask = create_block_mask(function, 2, 3, 21, 34, device="cpu", BLOCK_SIZE=size)
    index = torch.meshgrid(*map(torch.arange, (2, 3, 21, 34)), indexing="ij")
    want = function(*index)
    mask = masks.from_flex(block_mask)
    assert torch.equal(mask.dense(21, 34).expand(2, 3, 21, 34), want)
    with pytest.raises(ValueError, match="made for 21 queries"):
        mask.dense(20, 34)


def test_tiles_listed_by_hand_count_as_they_are() -> None:
    """Partial tiles by the function, full ones whole, others not at all: as the kernel computes."""
    counts = torch.tensor([[[1, 1]]], dtype=torch.int32)
    partial = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    full_counts = torch.tensor([[[0, 1]]], dtype=torch.int32)
    full = torch.tensor([[[[0, 0], [0, 0]]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(
        counts, partial, full_counts, full, BLOCK_SIZE=4, mask_mod=causal_window
    )
    rows, columns = torch.arange(8)[:, None], torch.arange(8)
    want = causal_window(0, 0, rows, columns) & (rows // 4 == columns // 4)
    want[4:, :4] = True
    assert torch.equal(masks.from_flex(block_mask).dense(8), want)


def test_the_query_of_a_function_is_counted_where_align_says() -> None:
    for align, offset in {"start": 0, "end": 5, 2: 2}.items():
        mask = masks.where(lambda b, h, i, j: i == j, align=align)
        assert mask.row(0, query=1, source=6) == [offset]
    assert repr(masks.where(causal_window)) == "where(causal_window)"
    assert repr(masks.where(causal_window, "end")) == 'where(causal_window, align="end")'
    assert masks.where(causal_window) != masks.where(causal_window, "end")


def test_padding_over_several_batch_axes() -> None:
    x, real = torch.randn(2, 3, 4, 5, 8), torch.rand(2, 3, 5) > 0.4
    weights = ch.attend(x, x, x, masks.keep(real), read=readings.Weights())[1]
    assert torch.equal(weights > 0, real[:, :, None, None].expand_as(weights))
    with pytest.raises(ValueError, match="made for 6 samples"):
        ch.attend(x[0], x[0], x[0], masks.keep(real))


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.float16])
def test_numbers_of_numpy(kind: Any) -> None:
    x = torch.randn(2, 5, 8)
    for name, value in {"scale": 2, "softcap": 3, "dropout": 1}.items():
        torch.manual_seed(0)
        given: dict[str, Any] = {name: kind(value)}
        ours = ch.attend(x, x, x, **given)
        torch.manual_seed(0)
        given = {name: value}
        assert torch.equal(ours, ch.attend(x, x, x, **given))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: masks.from_cu_seqlens([1, 3]), "starts at 0 and never falls"),
        (lambda: masks.from_cu_seqlens([0, 3, 2]), "starts at 0 and never falls"),
        (
            lambda: masks.from_cu_seqlens(torch.tensor([0.0, 3.0])),
            "cumulative lengths, as integers",
        ),
        (lambda: masks.from_cu_seqlens([]), "cumulative lengths, as integers"),
        (lambda: masks.from_cu_seqlens([0, 2], [0, 1, 2]), "as many sequences as query"),
        (lambda: masks.from_cu_seqlens([0, 2]).dense(3), "made for 2 queries"),
        (lambda: masks.chunk(0), "at least 1"),
        (lambda: masks.from_flex(torch.ones(2, 2)), "is a BlockMask"),
        (lambda: masks.where(causal_window, align=cast("Any", "left")), 'is "end"'),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        call()
