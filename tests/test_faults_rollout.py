"""Rollout is of one residual stream: what is not one is refused, what is not seen is noted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead import heads

IDS = torch.tensor([[3, 4, 5, 6, 7]])


def chain(maps: list[Tensor], residual: float = 0.5) -> Tensor:
    """Rollout by its definition, (batch, query, source), of maps that are averaged over heads."""
    eye = torch.eye(maps[0].shape[-1], dtype=maps[0].dtype)
    out = eye.expand_as(maps[0])
    for one in maps:
        out = (residual * eye + (1 - residual) * one) @ out
    return out


def soft(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1)


def refused(model: Any, inputs: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        heads.rollout(model, inputs)


def hugging(name: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=50, **options)
    return getattr(transformers, f"{name}Model")(config).eval()


class TestHandedCases:
    """80 to 86."""

    @pytest.mark.parametrize("backend", ["eager", "sdpa"])
    def test_two_calls_a_layer(self, backend):
        model = hugging(
            "DiffLlama", hidden_size=32, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, attn_implementation=backend,
        )  # fmt: skip
        refused(model, IDS, r"two calls in layers\.0\.self_attn that do not follow each other")

    def test_encoder_and_decoder_of_one_length(self):
        inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
        t5 = hugging("T5", d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=40)
        refused(t5, inputs, r"decoder\.block\.0\S+ does not read the output of encoder\.block\.1")
        bart = hugging(
            "Bart", d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
            max_position_embeddings=32,
        )  # fmt: skip
        refused(bart, inputs, r"decoder\.layers\.0\.self_attn does not read the output of encoder")

    def test_mask_after_the_softmax(self):
        def model(x: Tensor) -> Tensor:
            weights = soft(x, x) * torch.ones(5, 5).tril()
            return x + weights / weights.sum(-1, keepdim=True) @ x

        refused(model, torch.randn(1, 5, 8), "weights changed after the softmax in the model")

    def test_layers_that_are_not_seen(self):
        model = hugging(
            "RecurrentGemma", hidden_size=16, intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, lru_width=16, attention_window_size=16,
            block_types=("recurrent", "recurrent", "attention"),
        )  # fmt: skip
        found = heads.rollout(model, IDS)
        assert found.layers == 1
        assert [note.partition(":")[0] for note in found.notes] == [
            "layers.0.temporal_block",
            "layers.1.temporal_block",
        ]
        assert "layers.1.temporal_block: not in the product" in repr(found)


class Context(nn.Module):
    """One head of attention."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return soft(q, k) @ v


class Layer(nn.Module):
    """The same, with the residual."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.context = Context(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.context(x)

    def weights(self, x: Tensor) -> Tensor:
        q, k, _ = self.context.qkv(x).chunk(3, -1)
        return soft(q, k).detach()


def layers(count: int) -> list[Layer]:
    torch.manual_seed(0)
    return [Layer() for _ in range(count)]


class Each(nn.Module):
    """Layers, run by a function."""

    def __init__(self, run: Any, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(count))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layers, x)


class TestOneStream:
    X = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1))

    def near(self, run: Any, count: int, order: list[int]) -> None:
        """The rollout is the chain of the maps of the layers, in the order of the stream."""
        model, x, maps = Each(run, count), self.X, []
        for at in order:
            maps.append(model.layers[at].weights(x))  # type: ignore[operator]
            x = model.layers[at](x).detach()
        found = heads.rollout(model, self.X, range(5))
        assert (found.layers, found.notes) == (len(order), ())
        torch.testing.assert_close(found.weights, chain(maps), rtol=0, atol=1e-6)

    def test_a_stack_is_followed(self):
        def run(layers: Any, x: Tensor) -> Tensor:
            for layer in layers:
                x = layer(x)
            return x

        self.near(run, 3, [0, 1, 2])

    def test_one_module_for_every_layer_is_a_stack(self):
        self.near(lambda layers, x: layers[0](layers[0](layers[0](x))), 1, [0, 0, 0])

    def test_written_in_place_and_into_a_buffer(self):
        def run(layers: Any, x: Tensor) -> Tensor:
            x = x.clone()
            x += layers[0].context(x)
            whole = torch.empty(2, *x.shape)
            whole[0] = x
            torch.add(whole[0], layers[1].context(x), out=whole[1])
            part = whole[1][:]
            part.add_(layers[2].context(whole[1]))
            return layers[3](whole[1])

        self.near(run, 4, [0, 1, 2, 3])

    @pytest.mark.parametrize("split", [0, 1, 2])
    def test_heads_as_modules(self, split):
        """In the first, a later, or the last layer."""

        def run(layers: Any, x: Tensor) -> Tensor:
            for at in range(3):
                if at == split:
                    x = x + layers[at].context(x) + layers[3].context(x)
                else:
                    x = layers[at](x)
            return x

        refused(Each(run, 4), self.X, rf"layers\.3\S+ does not read the output of layers\.{split}")

    def test_two_calls_on_one_stream(self):
        def run(layers: Any, x: Tensor) -> Tensor:
            x = layers[0](x)
            return x + layers[1].context(x) - 0.3 * layers[1].context(x.flip(-1))

        refused(Each(run, 2), self.X, r"two calls in layers\.1\.context that do not follow")

    def test_two_towers(self):
        def run(layers: Any, x: Tensor) -> Tensor:
            return layers[1](layers[0](x)) @ layers[3](layers[2](x.flip(1))).mT

        refused(Each(run, 4), self.X, r"layers\.2\S+ does not read the output of layers\.1")

    def test_two_streams_in_turn(self):
        def run(layers: Any, x: Tensor) -> Tensor:
            y = x.flip(1)
            for at in (0, 2):
                x, y = layers[at](x), layers[at + 1](y)
            return x + y

        refused(Each(run, 4), self.X, r"layers\.1\S+ does not read the output of layers\.0")

    def test_cross_attention_of_one_length(self):
        class Crossed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.own = nn.MultiheadAttention(6, 2, batch_first=True)
                self.other = nn.MultiheadAttention(6, 2, batch_first=True)

            def forward(self, x: Tensor, memory: Tensor) -> Tensor:
                x = x + self.own(x, x, x, need_weights=False)[0]
                return x + self.other(x, memory, memory, need_weights=False)[0]

        refused(Crossed(), (self.X, self.X.flip(1)), "cross attention in other")


class TestWindows:
    def windows(self, x: Tensor, size: int) -> Tensor:
        parts = x.unflatten(1, (-1, size)).flatten(0, 1)
        return (parts + F.scaled_dot_product_attention(*[parts[:, None]] * 3)[:, 0]).reshape(  # pyright: ignore[reportArgumentType]
            x.shape
        )

    @pytest.mark.parametrize("batch", [1, 2, 3])
    def test_in_the_batch(self, batch):
        def model(x: Tensor) -> Tensor:
            return self.windows(self.windows(x, 4).roll(2, 1), 4)

        refused(model, torch.randn(batch, 12, 6), "not in windows or folded heads")

    def test_in_a_loop(self):
        def model(x: Tensor) -> Tensor:
            parts = [p + soft(p, p) @ p for p in x.split(4, 1)]
            return torch.cat(parts, 1)

        refused(model, torch.randn(2, 12, 6), "two calls in the model")

    def test_chunks_of_queries(self):
        def model(x: Tensor) -> Tensor:
            return x + torch.cat([soft(q, x) @ x for q in x.split(4, 1)], 1)

        refused(model, torch.randn(2, 12, 6), "the same positions in every layer")

    def test_heads_in_the_batch(self):
        """They are told apart by the way that they were folded, and averaged."""

        def folded(x: Tensor) -> Tensor:
            return x.unflatten(-1, (2, 3)).transpose(1, 2).flatten(0, 1)

        def model(x: Tensor) -> Tensor:
            y = folded(x)
            return x + (soft(y, y) @ y).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)

        x = torch.randn(3, 5, 6)
        weights = soft(folded(x), folded(x)).unflatten(0, (-1, 2)).mean(1)
        found = heads.rollout(model, x, range(5))  # type: ignore[arg-type]
        torch.testing.assert_close(found.weights, chain([weights]), rtol=0, atol=1e-6)

    def test_positions_first_are_no_windows(self):
        layer = nn.MultiheadAttention(6, 2)
        x = torch.randn(5, 3, 6)

        def model(x: Tensor) -> Tensor:
            return x + layer(x, x, x, need_weights=False)[0]

        found = heads.rollout(model, x, range(5))  # type: ignore[arg-type]
        weights = layer(x, x, x)[1].detach()
        torch.testing.assert_close(found.weights, chain([weights]), rtol=0, atol=1e-6)


class TestWeightsThatChange:
    X = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(2))

    @pytest.mark.parametrize(
        "change",
        [
            lambda w: w * 1.5,
            lambda w: w.masked_fill(torch.ones(6, 6).triu(1).bool(), 0),
            lambda w: torch.cat([w[:, :5], w[:, 5:].flip(-1)], 1),  # in the last row only
            lambda w: w - 1 / 6,
        ],
        ids=["factor", "masked", "one row", "centered"],
    )
    def test_refused(self, change):
        def model(x: Tensor) -> Tensor:
            return x + change(soft(x, x)) @ x

        with pytest.raises(
            (ValueError, RuntimeError), match=r"after the softmax|no attention call"
        ):
            heads.rollout(model, self.X)  # type: ignore[arg-type]

    def test_a_bias_or_mask_before_it_is_right(self):
        mask = torch.ones(6, 6).tril().log()

        def model(x: Tensor) -> Tensor:
            return x + (x @ x.mT + mask).softmax(-1) @ x

        found = heads.rollout(model, self.X, range(6))  # type: ignore[arg-type]
        weights = (self.X @ self.X.mT + mask).softmax(-1)
        torch.testing.assert_close(found.weights, chain([weights]), rtol=0, atol=1e-6)


def test_an_attention_that_is_not_recognised_is_noted():
    class LinearAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + (F.elu(x) + 1) @ ((F.elu(x) + 1).mT @ x)

    model = nn.Sequential(Layer(), LinearAttention(), Layer())
    found = heads.rollout(model, torch.randn(2, 5, 6))
    assert found.layers == 2
    assert len(found.notes) == 1
    assert found.notes[0].startswith("1: not in the product")


class Between(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.between, self.last = Layer(), between, Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


MOVES: dict[str, Any] = {
    "conv1d": lambda x: F.conv1d(x.mT, torch.ones(6, 1, 3) / 3, padding=1, groups=6).mT,
    "avg_pool1d": lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "flip": lambda x: x.flip(1),
    "roll": lambda x: torch.roll(x, shifts=(1,), dims=(1,)),
    "cumsum": lambda x: x.cumsum(1),
    "fft_fft2": lambda x: torch.fft.fft2(x).real,
    "index_select": lambda x: x.index_select(1, torch.tensor([4, 3, 2, 1, 0])),
    "mean": lambda x: x - x.mean(1, keepdim=True),
}
# The same functions, along features, or of one position at a time.
STAYS: dict[str, Any] = {
    "conv1d": lambda x: F.conv1d(x.mT, torch.eye(6)[..., None]).mT,
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: torch.roll(x, 1, -1),
    "cumsum": lambda x: x.cumsum(dim=-1),
    "fft_fft": lambda x: torch.fft.fft(x).real,
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "amax": lambda x: x - x.amax(-1, True),
    "of a number": lambda x: x * x.new_tensor(0.5).cumsum(0),
}


class TestFunctionsBetweenLayers:
    @staticmethod
    def notes(function: Any) -> tuple[str, ...]:
        torch.manual_seed(0)
        return heads.rollout(Between(Applied(function)), torch.randn(2, 5, 6)).notes

    @pytest.mark.parametrize("name", MOVES)
    def test_that_move_positions_are_noted(self, name):
        said = f"between: not in the product, {name} moves numbers between positions"
        assert self.notes(MOVES[name]) == (said,)

    @pytest.mark.parametrize("name", STAYS)
    def test_along_features_are_not(self, name):
        assert self.notes(STAYS[name]) == ()

    def test_before_the_first_and_behind_the_last_layer_they_are_not(self):
        class Ends(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = Layer(), Layer()

            def forward(self, x: Tensor) -> Tensor:
                return self.last(self.first(x.flip(1))).cumsum(1)

        assert heads.rollout(Ends(), torch.randn(2, 5, 6)).notes == ()


def test_models_that_ship_have_no_notes():
    model: Any = ch.models.load()
    found = heads.rollout(model, model.vocabulary.encode("hello")[None])
    assert (found.layers, found.notes) == (4, ())
