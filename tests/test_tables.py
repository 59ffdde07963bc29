"""Tables of weights, against softmaxes that are computed by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import clearhead as ch
from clearhead import masks, readings
from clearhead.recording import load

READ = {
    "TopK": readings.TopK(8),
    "Weights": readings.Weights(),
    "Rows": readings.Rows([0, 1, 2, 3, 4]),
    "several": (readings.Entropy(), readings.TopK(5), readings.Mass(masks.causal())),
}
LETTERS = "abcde"


def inputs(batch: int = 2, heads: int = 3, positions: int = 5) -> tuple[Tensor, ...]:
    some = torch.Generator().manual_seed(0)
    return tuple(torch.randn(batch, heads, positions, 7, generator=some) for _ in range(3))


def seen_of(mask: Any, read: Any, **options: Any) -> Any:
    q, k, v = inputs()
    with ch.watch(ch.attend, read=read, **options) as seen:
        ch.attend(q, k, v, mask)
    return seen


def by_hand(allowed: Tensor, top: int = 8) -> list[tuple[int, int, int, int, int, float]]:
    """(head, sample, query, rank, source, weight) of the softmax over allowed edges."""
    q, k, _ = (x.double() for x in inputs())
    rows = []
    for head in range(3):
        for sample in range(2):
            for query in range(5):
                scores = k[sample, head] @ q[sample, head, query] / 7**0.5
                there = [j for j in range(5) if bool(allowed[sample, query, j])]
                weights = dict(zip(there, scores[there].softmax(0).tolist(), strict=True))
                order = sorted(there, key=lambda j: -weights[j])[:top]
                rows += [(head, sample, query, r, j, weights[j]) for r, j in enumerate(order)]
    return rows


def matches(table: list[dict[str, Any]], rows: list[Any]) -> None:
    names = "head", "sample", "query", "rank", "source"
    assert [tuple(row[name] for name in names) for row in table] == [row[:5] for row in rows]
    for row, right in zip(table, rows, strict=True):
        assert row["weight"] == pytest.approx(right[5], abs=1e-6)


def causal() -> Tensor:
    return torch.ones(2, 5, 5).tril().bool()


@pytest.mark.parametrize("name", READ)
def test_the_table_is_the_softmax(name):
    seen = seen_of(masks.causal(), READ[name])
    table = seen.to_table()
    assert table == seen[0].to_table()
    keys = "layer", "module", "head", "sample", "query", "rank", "source", "weight"
    assert all(tuple(row) == keys for row in table)
    assert all((row["layer"], row["module"]) == (0, "") for row in table)
    matches(table, by_hand(causal()))


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("top", [1, 3])
def test_the_first_of_each_query(name, top):
    matches(seen_of(masks.causal(), READ[name]).to_table(top=top), by_hand(causal(), top))


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("left", [False, True])
def test_padding_is_left_out(name, left):
    """Of sample 1, whose first two or last two positions are padding."""
    real = torch.ones(2, 5, dtype=torch.bool)
    real[1, :2] = False
    real = real if left else real.flip(1)
    allowed = causal() & real[:, None]
    table = seen_of(masks.dense(allowed[:, None]), READ[name]).to_table()
    right = [row for row in by_hand(allowed) if bool(real[row[1], row[2]])]
    assert {row[2] for row in right if row[1] == 1} == ({2, 3, 4} if left else {0, 1, 2})
    matches(table, right)


@pytest.mark.parametrize(
    "mask", [masks.causal() - masks.diagonal(0), masks.causal() - masks.window(2)]
)
def test_the_last_query_of_a_strict_mask_is_no_padding(mask):
    allowed = mask.dense(5).expand(2, 5, 5)
    assert bool(allowed[0, 4].any())
    matches(seen_of(mask, READ["TopK"]).to_table(), by_hand(allowed))


def test_an_inner_source_that_is_cut_is_no_padding():
    mask = masks.everything() - masks.edges([(query, 2) for query in range(5)])
    matches(seen_of(mask, READ["TopK"]).to_table(), by_hand(mask.dense(5).expand(2, 5, 5)))


@pytest.mark.parametrize("low", [-math.inf, torch.finfo(torch.float32).min])
def test_padding_that_is_masked_by_the_lowest_number(low):
    """Its rows are uniform over all positions, as in the eager attention of transformers."""
    real = torch.ones(2, 5, dtype=torch.bool)
    real[1, :2] = False
    allowed = causal() & real[:, None]
    bias = torch.zeros(2, 1, 5, 5).masked_fill(~allowed[:, None], low)
    q, k, v = inputs()

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) / 7**0.5 + bias).softmax(-1).nan_to_num(0) @ v

    with ch.watch(model, read=READ["TopK"]) as seen:
        model(q, k, v)
    seen_of_kind = [dataclasses.replace(record, kind="self") for record in seen]
    right = [row for row in by_hand(allowed) if bool(real[row[1], row[2]])]
    matches(seen_of_kind[0].to_table(), right)


def test_a_prefix_that_all_may_read_is_no_padding():
    mask = masks.causal() | masks.first(2)
    matches(seen_of(mask, READ["TopK"]).to_table(), by_hand(mask.dense(5).expand(2, 5, 5)))


def test_tokens_of_each_sample():
    tokens = [list(LETTERS), list(LETTERS.upper())]
    table = seen_of(masks.causal(), READ["TopK"]).to_table(tokens)
    assert len(table) == 2 * 3 * 15
    for row in table:
        assert row["query_token"] == tokens[row["sample"]][row["query"]]
        assert row["source_token"] == tokens[row["sample"]][row["source"]]


def test_tokens_of_one_sample_and_of_a_step_with_a_cache():
    q, k, v = (x[:1] for x in inputs())
    with ch.watch(ch.attend, read=readings.TopK(1)) as seen:
        ch.attend(q[:, :, 3:], k, v, masks.causal())
    table = seen.to_table(list(LETTERS))
    assert {(row["query"], row["query_token"]) for row in table} == {(0, "d"), (1, "e")}
    assert all(row["source_token"] == LETTERS[row["source"]] for row in table)


def test_chosen_heads_and_queries_keep_their_numbers():
    seen = seen_of(masks.causal(), READ["Weights"], heads=[2, 0], queries=[-1, 1])
    right = by_hand(causal())
    wanted = [row for head in (2, 0) for row in right if row[0] == head and row[2] in (1, 4)]
    matches(seen.to_table(), wanted)


def test_rows_in_the_order_asked_for():
    seen = seen_of(masks.causal(), readings.Rows([-1, 2]))
    right = by_hand(causal())
    wanted = [
        row
        for head in range(3)
        for sample in range(2)
        for query in (4, 2)
        for row in right
        if row[:3] == (head, sample, query)
    ]
    matches(seen.to_table(), wanted)


def test_several_layers_and_a_row_of_nothing():
    model = nn.ModuleList(nn.MultiheadAttention(4, 2, batch_first=True) for _ in range(2))
    x = torch.randn(1, 3, 4)
    blocked = torch.tensor([[True, True, True], [False, True, True], [False, False, True]])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, x, x, attn_mask=blocked, need_weights=False)[0]
            return x

    both = Both()
    with torch.no_grad(), ch.watch(both) as seen:
        both(torch.zeros_like(x))
    names = [(row["layer"], row["module"], row["query"], row["weight"]) for row in seen.to_table()]
    layers = [(at, f"layers.{at}") for at in range(2)]
    rows = [(1, 1.0), (2, 0.5), (2, 0.5)]  # query 0 reads nothing
    assert names == [(*layer, *row) for layer in layers for _ in range(2) for row in rows]


class TestRefusals:
    @pytest.mark.parametrize("read", [readings.Entropy(), (readings.Entropy(), readings.Scores())])
    def test_what_was_read_has_no_weights(self, read):
        seen = seen_of(None, read)
        with pytest.raises(ValueError, match=r"read TopK\(k\), Weights\(\) or Rows(?s:.)*Entropy"):
            seen.to_table()

    @pytest.mark.parametrize(
        ("tokens", "error", "match"),
        [
            (list(LETTERS), ValueError, "5 strings for each of 2 samples; got 1 samples of 5"),
            ([list(LETTERS), list("abcd")], ValueError, "got 2 samples of 5, 4"),
            ([[1, 2, 3, 4, 5]] * 2, TypeError, "tokens: are strings"),
        ],
    )
    def test_tokens_that_do_not_fit(self, tokens, error, match):
        with pytest.raises(error, match=match):
            seen_of(None, READ["TopK"]).to_table(tokens)

    def test_tokens_of_cross_attention(self):
        layer, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(1, 5, 4)
        memory = torch.randn(1, 5, 4)
        with torch.no_grad(), ch.watch(layer) as seen:
            layer(x, memory, memory, need_weights=False)
        assert len(seen.to_table()) == 2 * 5 * 5
        with pytest.raises(ValueError, match="tokens: are of one sequence; got cross attention"):
            seen.to_table(list(LETTERS))

    @pytest.mark.parametrize("top", [0, -1, 1.5, True])
    def test_top(self, top):
        with pytest.raises(ValueError, match="top: is a number of sources"):
            seen_of(None, READ["TopK"]).to_table(top=top)


class TestSaved:
    @pytest.mark.parametrize("name", READ)
    def test_a_file_knows_what_was_read(self, name, tmp_path):
        seen = seen_of(masks.causal(), READ[name])
        seen.save(tmp_path / "seen")
        again = load(tmp_path / "seen")
        assert repr(again[0].read) == repr(READ[name])
        assert again.to_table() == seen.to_table()

    def test_a_file_from_before(self, tmp_path):
        seen_of(None, READ["TopK"]).save(tmp_path / "seen")
        with safe_open(tmp_path / "seen", framework="pt") as file:
            document = json.loads(file.metadata()["clearhead"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        del document["records"][0]["read"]
        save_file(tensors, tmp_path / "old", metadata={"clearhead": json.dumps(document)})
        again = load(tmp_path / "old")
        assert again[0].read is None
        with pytest.raises(ValueError, match="got a file that does not say what was read"):
            again.to_table()
