"""Masks to and from other APIs: what those APIs do with them is the judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from transformers import BertConfig, BertModel

from clearhead import masks
from clearhead.masks import Mask

INF = float("inf")
MASKS = {
    "causal": masks.causal(),
    "window or first": masks.causal() & masks.window(3) | masks.first(1),
    "packed": masks.causal() & masks.document([0, 0, 1, 1, 1, 2, 2]),
    "padded": masks.lengths([7, 4]) & masks.causal(),
    "left padded": masks.keep(torch.arange(7) >= torch.tensor([[0], [3]])) | masks.diagonal(0),
    "by head": masks.dense(torch.rand(2, 3, 7, 7, generator=torch.manual_seed(0)) > 0.4)
    | masks.diagonal(0),
}


def sizes_of(mask: Mask) -> dict[str, int]:
    return {"batch": mask.own.batch or 1, "head": mask.own.head or 1}


def softmax_where(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, -INF)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("name", MASKS)
def test_to_sdpa_and_to_additive_act_alike(name: str) -> None:
    mask = MASKS[name]
    q, k, v = torch.randn(3, 2, 3, 7, 4, generator=torch.manual_seed(1), dtype=torch.float64)
    want = softmax_where(q, k, v, mask.dense(7))
    for given in (mask.to_sdpa(7), mask.to_additive(7, dtype=torch.float64)):
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=given)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", MASKS)
def test_polarity_of_multihead_and_sdpa_is_opposite(name: str) -> None:
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(6, 3, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    mask = MASKS[name]
    blocked = mask.to_multihead(7, batch=2, head=3)
    got, _ = layer(x, x, x, attn_mask=blocked, need_weights=False)
    q, k, v = (
        part.unflatten(-1, (3, 2)).transpose(1, 2)
        for part in F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    )
    context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to_sdpa(7))
    want = layer.out_proj(context.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(got, want)
    allowed = mask.dense(7)
    flat = allowed if allowed.dim() == 2 else allowed.expand(2, 3, 7, 7).flatten(0, 1)
    assert torch.equal(blocked, ~flat)


@pytest.mark.parametrize("name", MASKS)
def test_round_trips(name: str) -> None:
    mask = MASKS[name]
    want = mask.dense(7).expand(*sizes_of(mask).values(), 7, 7)
    back = [
        masks.from_sdpa(mask.to_sdpa(7)),
        masks.from_sdpa(mask.to_additive(7)),
        masks.from_additive(mask.to_additive(7, dtype=torch.bfloat16)),
        masks.from_multihead(mask.to_multihead(7, head=3), heads=3),
        masks.from_multihead(
            torch.zeros(mask.to_multihead(7, head=3).shape).masked_fill(
                mask.to_multihead(7, head=3), -INF
            ),
            heads=3,
        ),
    ]
    for again in back:
        got = again.dense(7)
        assert torch.equal(*torch.broadcast_tensors(got, want))


@pytest.mark.parametrize("size", [128, (16, 32)])
@pytest.mark.parametrize(("query", "source"), [(130, 130), (33, 70), (1, 130)])
def test_to_flex_is_exact_whatever_the_tiles(query: int, source: int, size: Any) -> None:
    ids = torch.arange(source) // 40
    mask = masks.causal() & masks.document(ids) & masks.lengths([source, source // 2])
    mask = mask | masks.window(5) - masks.where(lambda b, h, q, k: (q + k) % 3 == b)
    block = mask.to_flex(query, source, batch=2, block_size=size)
    assert block.shape == (2, 1, query, source)
    edges = create_mask(block.mask_mod, 2, 1, query, source, device="cpu")
    assert torch.equal(edges, mask.dense(query, source, batch=2))
    want = create_block_mask(
        lambda b, h, q, k: mask.dense(query, source, batch=2)[b, 0, q, k],
        2,
        None,
        query,
        source,
        device="cpu",
        BLOCK_SIZE=size,
    )
    assert torch.equal(block.to_dense(), want.to_dense())


def test_to_multihead_needs_the_heads_of_a_mask_that_varies() -> None:
    with pytest.raises(ValueError, match="head: must be given"):
        masks.lengths([2, 1]).to_multihead(2)


# From torch.


def test_from_multihead_in_all_ranks() -> None:
    attn = torch.rand(6, 5, 5, generator=torch.manual_seed(3)) > 0.5
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    for left in (attn, torch.zeros(6, 5, 5).masked_fill(attn, -INF)):
        for right in (padding, torch.zeros(2, 5).masked_fill(padding, -INF)):
            got = masks.from_multihead(left, right, heads=3).dense(5)
            want = ~(attn.reshape(2, 3, 5, 5) | padding[:, None, None])
            assert torch.equal(got, want)
    assert (
        masks.from_multihead(attn[0], padding[1]).dense(5).tolist()
        == (~(attn[0] | padding[1])).tolist()
    )
    assert masks.from_multihead().dense(2).all()
    assert masks.from_multihead(key_padding_mask=padding).dense(5).shape == (2, 1, 5, 5)


def test_from_sdpa_with_is_causal_composes_at_the_start() -> None:
    allowed = torch.ones(4, 6) > 0
    allowed[:, 0] = False
    got = masks.from_sdpa(allowed, is_causal=True).dense(4, 6)
    assert torch.equal(got, allowed & (torch.ones(4, 6).tril() > 0))
    assert torch.equal(
        masks.from_sdpa(None, is_causal=True).dense(2, 4), torch.ones(2, 4).tril() > 0
    )
    assert masks.from_sdpa(None).dense(2).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("of", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_least_number_of_every_dtype_blocks(dtype: torch.dtype, of: torch.dtype) -> None:
    least = torch.tensor(torch.finfo(of).min, dtype=torch.float64).to(dtype)
    mask = torch.zeros(2, 2, dtype=dtype)
    mask[0, 1] = least
    assert masks.from_additive(mask).dense(2).tolist() == [[True, False], [True, True]]


# From transformers.


def bert(implementation: str) -> Any:
    torch.manual_seed(0)
    options: Any = {"attn_implementation": implementation}
    config = BertConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        **options,
    )
    return BertModel(config).eval()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("side", ["left", "right"])
def test_from_huggingface_allows_what_a_real_model_attends_to(
    dtype: torch.dtype, side: str
) -> None:
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    real = (real.flip(-1) if side == "left" else real).to(dtype)
    tokens = torch.randint(11, (2, 5), generator=torch.manual_seed(1))
    shown = bert("eager")(tokens, attention_mask=real, output_attentions=True).attentions[0]
    want = (shown > 1e-30).expand(2, 2, 5, 5)
    got = masks.from_huggingface(real).dense(5)
    assert torch.equal(got.expand(2, 2, 5, 5), want)


def test_a_square_mask_needs_to_say_what_its_rows_are() -> None:
    square = torch.ones(3, 3, dtype=torch.int64).tril()
    with pytest.raises(
        ValueError, match=r"could be \(batch, source\) or \(query, source\)"
    ) as caught:
        masks.from_huggingface(square)
    assert "batch=3" in str(caught.value)
    assert "(3, 3)" in str(caught.value)
    got = masks.from_huggingface(square, batch=3).dense(3)
    assert torch.equal(got, (square > 0)[:, None, None].expand(3, 1, 3, 3))


# Refused values.


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: masks.from_additive(torch.ones(3, 3).tril()), ValueError, "bool mask in disguise"),
        (lambda: masks.from_sdpa(torch.ones(3, 3).tril()), ValueError, "in disguise"),
        (lambda: masks.from_multihead(torch.ones(3, 3).tril()), ValueError, "in disguise"),
        (
            lambda: masks.from_multihead(None, torch.ones(2, 3)),
            ValueError,
            "key_padding_mask.*disguise",
        ),
        (lambda: masks.from_additive(torch.full((2, 2), float("nan"))), ValueError, "NaN"),
        (
            lambda: masks.from_additive(torch.tensor([[0.0, -10.0]])),
            ValueError,
            r"got -10\.0\n.*bias=",
        ),
        (lambda: masks.from_additive(torch.tensor([[0.0, INF]])), ValueError, "got inf"),
        (lambda: masks.from_additive(torch.tensor([[0.0, -10000.0]])), ValueError, "bias="),
        (lambda: masks.from_additive(torch.ones(2, 2) > 0), TypeError, "from_sdpa"),
        (lambda: masks.from_additive([[0.0]]), TypeError, "float tensor"),  # pyright: ignore
        (lambda: masks.from_additive(torch.zeros(2, 3, 3)), ValueError, "read in two ways"),
        (lambda: masks.from_sdpa(torch.ones(2, 3, 3) > 0), ValueError, "read in two ways"),
        (lambda: masks.from_sdpa(torch.ones(3, 3, dtype=torch.int64)), TypeError, "in disguise"),
        (lambda: masks.from_sdpa(torch.full((3, 3), 7)), TypeError, "True = may attend"),
        (lambda: masks.from_sdpa("causal"), TypeError, "takes a tensor"),  # pyright: ignore
        (
            lambda: masks.from_multihead(torch.ones(3, 3, dtype=torch.int64)),
            TypeError,
            "attn_mask == 0",
        ),
        (lambda: masks.from_multihead(torch.ones(6, 3, 3) > 0), ValueError, "heads: must be given"),
        (lambda: masks.from_multihead(torch.ones(6, 3, 3) > 0, heads=4), ValueError, "divide"),
        (lambda: masks.from_multihead(torch.ones(3) > 0), ValueError, "attn_mask"),
        (
            lambda: masks.from_multihead(None, torch.ones(1, 2, 3) > 0),
            ValueError,
            "key_padding_mask",
        ),
        (
            lambda: masks.from_multihead(torch.ones(3, 4) > 0, torch.ones(2, 5) > 0),
            ValueError,
            "4 sources.*5",
        ),
        (lambda: masks.from_huggingface(torch.tensor([[1, 2, 0]])), ValueError, "got 2"),
        (
            lambda: masks.from_huggingface(torch.tensor([[0.0, -INF, 0.0]])),
            ValueError,
            "from_additive",
        ),
        (lambda: masks.from_huggingface(torch.ones(3)), ValueError, r"is \(batch, source\)"),
        (lambda: masks.from_huggingface(torch.ones(1, 1, 3, 3)), ValueError, "from_sdpa"),
        (lambda: masks.from_huggingface(torch.ones(2, 3), batch=4), ValueError, "one row a sample"),
        (lambda: masks.from_huggingface([[1, 1]]), TypeError, "takes a tensor"),  # pyright: ignore
    ],
)
def test_refused(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_all_zeros_allow_everything() -> None:
    assert masks.from_additive(torch.zeros(2, 3)).dense(2, 3).all()
    assert not masks.from_additive(torch.full((2, 3), -INF)).dense(2, 3).any()


def test_prefix_before_padding_does_not_show_pads() -> None:
    real = masks.from_huggingface(torch.tensor([[0, 0, 1, 1, 1]]))
    right = (masks.prefix(4) | masks.causal()) & real
    assert not right.dense(5)[..., :2].any()
    assert right.dense(5)[0, 0, 0].tolist() == [False, False, True, True, False]
