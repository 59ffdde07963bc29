"""Statistics per head against their plain definitions on whole weight maps, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead import heads, masks, models, readings
from clearhead.heads.batch import Batch
from clearhead.heads.edge_sets import LOCAL
from clearhead.heads.map_summary import CORNER, MapSummary
from clearhead.heads.moments import Moments

HEADS, WIDTH, WORDS = 3, 15, 7


class Block(nn.Module):
    """Attention in float64 with a mask that a test chooses, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, mask: masks.Mask | None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return x + ch.attend(q, k, v, mask).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two blocks over embedded tokens, positions included, so that padding on the left is seen."""

    def __init__(self, mask: masks.Mask | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.mask = mask
        self.double()
        for name, parameter in self.named_parameters():  # sharp enough for heads to differ
            if name.endswith("query.weight"):
                nn.init.normal_(parameter, std=0.7)

    def forward(self, tokens: Tensor, mask: masks.Mask | None = None) -> Tensor:
        both = [m for m in (self.mask, mask) if m is not None]
        whole = both[0] & both[1] if len(both) == 2 else (both or [None])[0]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, whole)
        return x


def maps(model: nn.Module, tokens: Tensor) -> list[np.ndarray]:
    """The weights of every layer for one sequence: (head, query, source)."""
    with ch.watch(model, read=readings.Weights()) as seen, torch.no_grad():
        model(tokens[None])
    return [record.value[0].double().numpy() for record in seen]


def plain(weights: np.ndarray, tokens: list[int]) -> dict[str, list[float]]:
    """All values of all statistics for one head of one sequence, by their definitions."""
    found: dict[str, list[float]] = {name: [] for name in heads.STATISTICS}
    size = len(tokens)
    full = [i for i in range(size) if weights[i].sum() > 0]
    for i in full:
        row = weights[i]
        positive = row[row > 0]
        entropy = -float((positive * np.log(positive)).sum())
        allowed = len(positive)
        found["entropy"].append(entropy)
        found["entropy_normalized"].append(entropy / math.log(allowed) if allowed > 1 else 0.0)
        found["confidence"].append(row.max())
        found["distance"].append(sum(row[j] * abs(i - j) for j in range(size)))
        found["self"].append(row[i])
        found["sink"].append(row[0])
        found["local"].append(sum(row[j] for j in range(size) if abs(i - j) <= LOCAL))
        if i:
            found["previous"].append(row[i - 1])
        same = [j for j in range(i) if tokens[j] == tokens[i]]
        if same:
            found["duplicate"].append(sum(row[j] for j in same))
            found["induction"].append(sum(row[j + 1] for j in same))
        if [j for j in same if j >= 1]:
            found["precursor"].append(sum(row[j - 1] for j in same if j >= 1))
    if full:
        found["sink_rate"].append(float(np.mean(found["sink"]) > 0.3))
        received = weights.sum(0)
        found["received"].append(received.max() / received.sum())
        found["coverage"].append(float(np.minimum(received, 1).mean()))
    return found


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    return float((left * right).sum() / math.sqrt((left**2).sum() * (right**2).sum()))


LENGTHS = (23, 13, 31, 1)


def sequences() -> list[Tensor]:
    some = torch.Generator().manual_seed(5)
    return [torch.randint(WORDS, (length,), generator=some) for length in LENGTHS]


def padded(texts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    longest = max(map(len, texts))
    tokens = torch.full((len(texts), longest), 2)  # a token that is also a real one
    real = torch.zeros_like(tokens, dtype=torch.bool)
    for row, mask, text in zip(tokens, real, texts, strict=True):
        at = slice(0, len(text)) if side == "right" else slice(longest - len(text), longest)
        row[at], mask[at] = text, True
    return tokens, real


MASKS = {
    "causal": masks.causal(),
    "both ways": None,
    "window": masks.window(5),
    # The first rows may read nothing.
    "empty rows": masks.causal() - masks.window(3),
}


@pytest.fixture(params=["whole", "strips"])
def looked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at whole maps, as at short sequences, or at strips of seven rows, as at long ones."""
    if request.param == "strips":
        monkeypatch.setattr("clearhead.heads.statistics.WHOLE", 0)
        monkeypatch.setattr("clearhead.attention.impl.tiled.tiled.ELEMENTS", 1)
        monkeypatch.setattr("clearhead.attention.impl.tiled.tiled.ROWS", 7)


@pytest.mark.usefixtures("looked")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", MASKS)
def test_statistics_are_their_definitions(name: str, side: str) -> None:
    model, texts = Model(MASKS[name]), sequences()
    survey = heads.measure(model, padded(texts, side)[0], real=padded(texts, side)[1])
    assert survey.sequences == len(LENGTHS)
    assert survey.tokens == sum(LENGTHS)
    assert len(survey.layers) == 2
    rows = {(row.layer, row.head, row.statistic): row for row in survey.rows()}
    whole = [maps(model, text) for text in texts]
    for layer in range(2):
        for head in range(HEADS):
            each = [plain(whole[n][layer][head], text.tolist()) for n, text in enumerate(texts)]
            for statistic in heads.STATISTICS:
                values = [value for found in each for value in found[statistic]]
                row = rows[layer, head, statistic]
                assert row.count == len(values), statistic
                assert row.mean == pytest.approx(np.mean(values), abs=1e-9), statistic
                assert row.variance == pytest.approx(np.var(values), abs=1e-9), statistic


@pytest.mark.usefixtures("looked")
@pytest.mark.parametrize("side", ["right", "left"])
def test_overlap_and_variability_are_their_definitions(side: str) -> None:
    model, texts = Model(masks.causal()), sequences()
    tokens, real = padded(texts, side)
    survey = heads.measure(model, tokens, real=real)
    whole = [maps(model, text) for text in texts]
    for layer in range(2):
        for a in range(HEADS):
            for b in range(HEADS):
                each = [cosine(maps_[layer][a], maps_[layer][b]) for maps_ in whole]
                assert survey.overlap[layer][a, b] == pytest.approx(np.mean(each), abs=1e-9)
            total = squares = 0.0
            for i in range(CORNER):
                for j in range(CORNER):
                    values = [m[layer][a, i, j] for m in whole if max(i, j) < m[layer].shape[1]]
                    if len(values) > 1:
                        total += float(np.mean(values)) ** 2 * len(values)
                        squares += float(np.square(values).sum())
            assert survey.variability[layer][a] == pytest.approx(1 - total / squares, abs=1e-9)


def test_batches_of_any_size_add_up() -> None:
    model, texts = Model(masks.causal()), sequences()
    one = heads.Survey(model)
    for text in texts:
        one.add(text)
    tokens, real = padded(texts, "right")
    all_at_once = heads.measure(model, tokens, real=real)
    for left, right in zip(one.rows(), all_at_once.rows(), strict=True):
        assert (left.layer, left.head, left.count) == (right.layer, right.head, right.count)
        assert left.mean == pytest.approx(right.mean, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("length", [2, 5, 16, 33])
def test_a_map_is_looked_at_alike_beside_others(length: int) -> None:
    """To the last bit: sizes are odd, so that samples begin anywhere in a cache line."""
    some = torch.Generator().manual_seed(length)
    tokens = torch.randint(WORDS, (7, length), generator=some)
    maps_ = torch.rand(7, HEADS, length, length, generator=some).tril().softmax(-1)
    together = MapSummary(Batch(tokens)).of(maps_)
    for n in range(7):
        alone = MapSummary(Batch(tokens[n])).of(maps_[n : n + 1].clone())
        for name, value in alone._asdict().items():
            at = 1 if name == "masses" else 0
            assert torch.equal(getattr(together, name).narrow(at, n, 1), value), name


def test_a_known_head_is_found() -> None:
    """The patterns themselves as weights: each statistic is one for its own head."""
    tokens = torch.tensor([4, 5, 6, 4, 5, 6, 4])
    patterns = {
        "previous": masks.diagonal(1),
        "induction": masks.induction(tokens),
        "duplicate": masks.duplicate(tokens),
        "sink": masks.first(1),
        "self": masks.diagonal(0),
    }
    edges = torch.stack([mask.dense(7, 7).reshape(7, 7) for mask in patterns.values()])

    def model(tokens: Tensor) -> Tensor:
        x = torch.zeros(1, len(patterns), 7, 4)
        return ch.attend(x, x, x, masks.dense(edges[None]))

    survey = heads.measure(model, tokens)  # type: ignore[arg-type]
    for head, name in enumerate(patterns):
        assert survey.mean(name)[0, head] == pytest.approx(1)
    assert survey.mean("induction")[0, 2] == 0  # duplicate-token is no induction
    assert survey.mean("coverage")[0, 4] == 1  # every source is read once
    assert survey.mean("received")[0, 3] == 1  # all read the first


def test_induction_is_after_and_precursor_before() -> None:
    tokens = torch.tensor([1, 2, 3, 2])

    def looks(at: int) -> heads.Survey:
        edges = torch.zeros(4, 4, dtype=torch.bool)
        edges[:, 0] = True
        edges[3] = torch.arange(4) == at
        x = torch.zeros(1, 1, 4, 4)
        model = lambda tokens: ch.attend(x, x, x, masks.dense(edges))  # noqa: E731
        return heads.measure(model, tokens)  # type: ignore[arg-type]

    assert float(looks(2).mean("induction")) == 1
    assert float(looks(2).mean("precursor")) == 0
    assert float(looks(0).mean("precursor")) == 1
    assert float(looks(1).mean("duplicate")) == 1


def rolled(weights: list[np.ndarray], residual: float, how: str) -> np.ndarray:
    """Abnar and Zuidema's product of whole matrices."""
    product = np.eye(weights[0].shape[-1])
    for layer in weights:
        mixed = layer.mean(0) if how == "mean" else layer.max(0)
        matrix = residual * np.eye(len(product)) + (1 - residual) * mixed
        product = (matrix / matrix.sum(-1, keepdims=True)) @ product
    return product


@pytest.mark.parametrize("residual", [0.5, 0.2])
@pytest.mark.parametrize("how", ["mean", "max"])
def test_rollout_is_the_product_of_matrices(residual: float, how: str, monkeypatch) -> None:
    monkeypatch.setattr("clearhead.heads.attention_rollout._STRIP", 150)  # several strips
    model, text = Model(masks.causal()), sequences()[0]
    found = heads.rollout(model, text[None], [-1, 4], residual=residual, heads=how)  # type: ignore[arg-type]
    right = rolled(maps(model, text), residual, how)[[22, 4]]
    assert found.queries == (22, 4)
    assert (found.residual, found.heads, found.layers) == (residual, how, 2)
    np.testing.assert_allclose(found.weights[0].numpy(), right, atol=1e-6)
    assert found.weights.sum(-1).numpy() == pytest.approx(1, abs=1e-6)


def test_rollout_of_an_empty_row_stays_where_it_is() -> None:
    model = Model(masks.causal() - masks.window(3))
    found = heads.rollout(model, torch.tensor([[1, 2, 3, 4, 5]]), [0, 2])
    assert found.weights[0].tolist() == [[1, 0, 0, 0, 0], [0, 0, 1, 0, 0]]


def test_rollout_refuses() -> None:
    model = Model(None)
    with pytest.raises(ValueError, match=r"queries: lie in 0\.\.2; got 3"):
        heads.rollout(model, torch.tensor([[1, 2, 3]]), 3)
    with pytest.raises(ValueError, match="residual: is a share"):
        heads.rollout(model, torch.tensor([[1, 2, 3]]), residual=1)
    with pytest.raises(ValueError, match="heads: is 'mean' or 'max'"):
        heads.rollout(model, torch.tensor([[1, 2, 3]]), heads="sum")  # type: ignore[arg-type]


def test_groups_follow_chains() -> None:
    overlap = torch.eye(5)
    for a, b in ((0, 3), (3, 1)):
        overlap[a, b] = overlap[b, a] = 0.95
    assert heads.groups(overlap) == [[0, 1, 3]]
    assert heads.groups(overlap, 0.96) == []


def test_groups_are_of_one_layer() -> None:
    said = r"overlap: is a tensor, \(head, head\); got list\n.*groups\(survey\.overlap\[layer\]\)"
    with pytest.raises(TypeError, match=said):
        heads.groups([torch.eye(5)])  # type: ignore[arg-type]


def test_moments_merge_as_numpy_counts() -> None:
    numbers = 1e6 + torch.randn(3, 37, dtype=torch.float64)  # sums of squares would lose digits
    counted = torch.rand(3, 37) < 0.7
    merged = Moments.none((3,))
    for at in range(0, 37, 5):
        merged = merged.merge(Moments.of(numbers[:, at : at + 5], counted[:, at : at + 5]))
    for row, mask, mean, variance in zip(
        numbers, counted, merged.mean, merged.variance, strict=True
    ):
        assert float(mean) == pytest.approx(float(row[mask].mean()), rel=1e-14)
        assert float(variance) == pytest.approx(float(np.var(row[mask].numpy())), rel=1e-9)


def test_a_model_that_reads_padding_is_refused() -> None:
    class Blind(Model):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(tokens)

    tokens, real = padded(sequences(), "right")
    with pytest.raises(ValueError, match="real: the model attends to padding"):
        heads.measure(Blind(None), tokens, real=real)
    heads.measure(Blind(masks.causal()), tokens, real=real)  # padding lies in the future
    tokens, real = padded(sequences(), "left")
    with pytest.raises(ValueError, match="real: the model attends to padding"):
        heads.measure(Blind(masks.causal()), tokens, real=real)


def test_bad_input_is_refused() -> None:
    model = models.load()
    with pytest.raises(TypeError, match="tokens: are integers"):
        heads.measure(model, torch.zeros(1, 4))
    with pytest.raises(ValueError, match="real: needs one entry for each token"):
        heads.measure(model, torch.zeros(1, 4, dtype=torch.int64), real=torch.ones(1, 5))
    with pytest.raises(ValueError, match="statistic: is not known; got 'inductoin'"):
        heads.measure(model, torch.tensor([1, 2, 3])).mean("inductoin")
    with pytest.raises(RuntimeError, match="no attention call"):
        heads.measure(nn.Embedding(5, 3), torch.tensor([1, 2, 3]))


def test_padding_alone_counts_nothing_and_nan_shows() -> None:
    model, tokens = models.load(), torch.tensor([[5, 6, 7], [0, 0, 0]])
    survey = heads.measure(model, tokens, real=torch.tensor([[1, 1, 1], [0, 0, 0]]))
    assert (survey.sequences, survey.tokens) == (1, 3)
    nothing = heads.measure(model, tokens, real=torch.zeros(2, 3, dtype=torch.bool))
    assert (nothing.sequences, list(nothing.rows())) == (0, [])
    with pytest.raises(ValueError, match="held no real token"):
        nothing.mean("entropy")
    torch.nn.init.constant_(next(model.parameters()), torch.nan)
    poisoned = heads.measure(model, tokens[:1])
    for name in ("entropy", "sink_rate", "received", "coverage"):
        assert poisoned.mean(name).isnan().all(), name


def test_cross_attention_is_left_out_and_said() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 8)
            self.own = nn.MultiheadAttention(8, 2, batch_first=True)
            self.cross = nn.MultiheadAttention(8, 4, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            x = self.own(x, x, x)[0]
            memory = torch.ones(len(tokens), 3, 8)
            return self.cross(x, memory, memory)[0]

    survey = heads.measure(Both(), torch.tensor([[1, 2, 3, 4, 5]]))
    assert [layer.module for layer in survey.layers] == ["own"]
    assert any("left out" in note for note in survey.notes)


@pytest.mark.parametrize("family", ["T5", "Bart"])
def test_of_encoder_decoders_the_encoder_is_read(family: str) -> None:
    import transformers

    sizes = {
        "T5": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2},
        "Bart": {
            "d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 4,
        },
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=20, **sizes[family])
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}Model")(config).eval()
    tokens = torch.tensor([[3, 4, 5, 4, 6, 7, 5]])
    survey = heads.measure(model, tokens)
    assert [layer.heads for layer in survey.layers] == [2, 2]
    assert all(layer.module.startswith("encoder.") for layer in survey.layers)
    assert any("the encoder alone is read" in note for note in survey.notes)
    with torch.no_grad():
        found = model.get_encoder()(tokens, output_attentions=True).attentions
    for layer, weights in enumerate(found):
        previous = weights[0].diagonal(-1, -2, -1).mean(-1).double()
        torch.testing.assert_close(survey.mean("previous")[layer], previous, rtol=0, atol=1e-6)


def test_a_head_of_many_words_is_left_out() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config).eval()
    runs = []
    model.cls.register_forward_hook(lambda *given: runs.append(1))
    tokens = torch.tensor([[3, 4, 5, 4, 6, 7, 5]])
    survey = heads.measure(model, [tokens, tokens, tokens])
    assert len(runs) == 1  # at the first look
    assert [layer.module for layer in survey.layers] == [
        f"bert.encoder.layer.{n}.attention.self" for n in range(2)
    ]
    alone = heads.measure(model.bert, tokens)
    for name in heads.STATISTICS:
        torch.testing.assert_close(survey.mean(name), alone.mean(name), rtol=0, atol=1e-12)


def test_every_statistic_says_what_it_is() -> None:
    for name, statistic in heads.STATISTICS.items():
        assert statistic.name == name
        assert statistic.unit
        assert type(statistic).__doc__
