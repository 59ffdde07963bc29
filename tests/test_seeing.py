"""What users asked of other viewers and tools, where no other test holds it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import clearhead as ch
from clearhead import heads, masks, models, readings
from clearhead.attention import memory
from clearhead.recording import load
from tests.architectures import ALL
from tests.test_watching import WAYS, WEIGHTS, Stack, plain
from tests.test_watching_models import attentions, generate, real

BY_NAME = {one.name: one for one in ALL}
GROUPED = ["Llama", "Falcon", "GPT-BigCode", "Gemma 3", "BERT"]


class TestSizes:
    @pytest.mark.parametrize("mix", WAYS[-2:])
    def test_maps_that_do_not_fit_are_refused_with_their_bytes(self, mix, monkeypatch):
        model, x = Stack(mix), torch.ones(1, 40, 6)
        monkeypatch.setattr(memory, "SMALL", 0)
        monkeypatch.setattr(memory, "free_bytes", lambda device: 3 * 40 * 40 * 4 - 1)
        refusal = pytest.raises(ValueError, match=r"19,200 bytes, with 19,199 free[\s\S]*TopK")
        with refusal, ch.watch(model, read=WEIGHTS):
            model(x)
        few = (readings.TopK(2), readings.Received(), readings.Entropy(), readings.BlockMap(4))
        with ch.watch(model, read=few) as seen:
            model(x)
        with ch.watch(model, read=WEIGHTS, queries=[0, -1]) as rows:
            model(x)
        with ch.watch(model, read=WEIGHTS, heads=1) as one:
            model(x)
        assert len(seen) == len(rows) == len(one) == 4

    def test_layers_keep_their_numbers(self):
        """Asking for one layer does not renumber it."""
        model, inputs = BY_NAME["BART"].make("sdpa"), BY_NAME["BART"].read()
        with ch.watch(model, read=WEIGHTS) as whole:
            model(**inputs)
        for layer in range(6):
            with ch.watch(model, read=WEIGHTS, layers=layer) as part:
                model(**inputs)
            (record,) = part
            assert (record.layer, record.module) == (layer, whole[layer].module)
            assert torch.equal(record.value, whole[layer].value)


class TestBackends:
    @pytest.mark.parametrize("name", ["Llama", "Mistral", "BERT", "BART"])
    @pytest.mark.parametrize("padded", [False, True])
    @torch.no_grad()
    def test_a_flash_kernel_gives_weights_too(self, name: str, padded: bool):
        """Its mask is a flag, a window, and which keys are real; it hands out nothing."""
        from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
        from transformers.modeling_utils import AttentionInterface

        AttentionInterface.register("flash_plain", flash_plain)
        AttentionMaskInterface.register("flash_plain", flash_attention_mask)
        try:
            one = BY_NAME[name]
            model: Any = one.make("sdpa")
            inputs = one.read()
            model.config._attn_implementation = "flash_plain"
            if padded:
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
                inputs["attention_mask"][0, :4] = 0
            before = model(**inputs)[0]
            with ch.watch(model, read=WEIGHTS) as seen:
                assert torch.equal(model(**inputs)[0], before)
        finally:
            for interface in (AttentionInterface, AttentionMaskInterface):
                del interface._global_mapping["flash_plain"]
        eager = attentions(one.make("eager")(**inputs, output_attentions=True))
        assert len(seen) == len(eager)
        for record, weights in zip(seen, eager, strict=True):
            torch.testing.assert_close(
                *(real(x) if padded else x for x in (record.value, weights)), rtol=0, atol=1e-5
            )
            assert record.how == "flash_plain"

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_the_log_sum_exp_is_our_own(self):
        """A kernel's own may be off, or of another base."""
        from torch.nn.attention import flex_attention as flex

        q, k = torch.randn(1, 2, 128, 16), torch.randn(1, 2, 128, 16)
        block = flex.create_block_mask(
            lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu"
        )

        def mix():
            return flex.flex_attention(q, k, k, block_mask=block)

        with ch.watch(mix, read=(readings.LogSumExp(), readings.Scores())) as seen:
            mix()
        scores = q.double() @ k.double().mT / 4
        scores = scores.masked_fill(~masks.causal().dense(128), -math.inf)
        lse, own = seen[0].value
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-5)
        torch.testing.assert_close(own.double(), scores, rtol=0, atol=1e-5)

    def test_a_model_in_training_says_that_dropout_was_on(self):
        layer = torch.nn.TransformerEncoderLayer(6, 3, 8, dropout=0.3, batch_first=True)
        with ch.watch(layer, read=WEIGHTS) as seen:
            layer(torch.ones(2, 5, 6))
        assert [note for note in seen.notes if "dropout was on" in note]
        torch.testing.assert_close(seen[0].value.sum(-1), torch.ones(2, 3, 5))


def flash_plain(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What a flash kernel computes, in plain torch."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    scores = query @ key.mT * (options.get("scaling") or query.shape[-1] ** -0.5)
    rows = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2]
    columns = torch.arange(key.shape[2])
    allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    if options.get("is_causal", getattr(module, "is_causal", True)):
        allowed = allowed & (columns <= rows)
    if options.get("sliding_window"):
        allowed = allowed & (columns > rows - options["sliding_window"])
    if attention_mask is not None:
        allowed = allowed & attention_mask.bool()[:, None, None]
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num()
    return (weights @ value).transpose(1, 2), None


class TestGroupedHeads:
    @pytest.mark.parametrize("name", GROUPED)
    @pytest.mark.parametrize("generated", [False, True])
    @torch.no_grad()
    def test_which_heads_share_keys(self, name: str, generated: bool):
        if generated and name == "BERT":
            name = "GPT-2"
        one = BY_NAME[name]
        for backend in one.backends:
            model, inputs = one.make(backend), one.read()
            with ch.watch(model, read=readings.Entropy()) as seen:
                generate(model, inputs) if generated else model(**inputs)
            config: Any = model.config
            total = seen[0].sizes[1]
            shared = getattr(config, "num_key_value_heads", None) or total
            shared = 1 if name in ("Falcon", "GPT-BigCode") else shared
            for record in seen:
                if record.how == "handwritten":  # the product does not say what its keys were
                    assert record.source_heads is None
                    continue
                assert record.source_heads == shared
                assert record.groups == tuple(
                    tuple(range(total // shared * at, total // shared * (at + 1)))
                    for at in range(shared)
                )

    def test_values_of_a_key_head(self, tmp_path):
        q, k = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4)

        def mix():
            return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

        with ch.watch(mix, read=readings.Received()) as seen:
            mix()
        weights = plain(q, k.repeat_interleave(3, 1))
        want = weights.sum(2).unflatten(1, (2, 3)).mean(2)
        torch.testing.assert_close(seen[0].by_group(seen[0].value).double(), want)
        with ch.watch(mix, read=readings.Received(), heads=[5, 1, 0]) as some:
            mix()
        chosen = torch.stack([weights[:, :2].sum(2).mean(1), weights[:, 5].sum(1)], 1)
        torch.testing.assert_close(some[0].by_group(some[0].value).double(), chosen)
        seen.save(tmp_path / "seen")
        again = load(tmp_path / "seen")
        assert (again[0].groups, again[0].source_heads) == (((0, 1, 2), (3, 4, 5)), 2)


class TestMeaning:
    @torch.no_grad()
    def test_how_much_each_segment_attends_to_each(self):
        """Segments A, B, C in all layers and heads: one mass a pair, which sum to one."""
        one = BY_NAME["Llama"]
        model, inputs = one.make("sdpa"), one.read()
        segment = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
        pairs = [(a, b) for a in range(3) for b in range(3)]
        read = tuple(
            readings.Mass(masks.dense((segment == a)[:, None] & (segment == b))) for a, b in pairs
        )
        with ch.watch(model, read=read) as seen:
            model(**inputs)
        eager = one.make("eager")(**inputs, output_attentions=True).attentions
        for record, weights in zip(seen, eager, strict=True):
            matrix = torch.zeros(2, 6, 3, 3)
            for (a, b), mass in zip(pairs, record.value, strict=True):
                matrix[..., a, b] = mass[..., segment == a].mean(-1)
                want = weights[:, :, segment == a][..., segment == b].sum(-1).mean(-1)
                torch.testing.assert_close(matrix[..., a, b], want, rtol=0, atol=1e-5)
            torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 6, 3))
            assert not matrix[..., 0, 1:].any()  # A stands before the others

    def test_a_model_whose_weights_were_not_loaded_looks_untrained(self):
        torch.manual_seed(0)
        trained: Any = models.load()
        fresh = models.GPT(trained.vocabulary, layers=4, heads=4, width=128, length=64)
        tokens = trained.vocabulary.encode("to be or not to be, that is the question: ")[None]
        assert heads.measure(fresh, tokens).looks_untrained
        assert not heads.measure(trained, tokens).looks_untrained

    def test_one_head_that_looks_somewhere_is_enough(self):
        even = torch.zeros(1, 3, 8, 4)
        sharp = even.clone()
        sharp[0, 2] = torch.eye(8)[:, :4] * 9

        def model(x: Tensor):
            return lambda tokens: ch.attend(x, x, x, masks.causal())

        tokens = torch.arange(8)
        assert heads.measure(model(even), tokens).looks_untrained  # type: ignore[arg-type]
        assert not heads.measure(model(sharp), tokens).looks_untrained  # type: ignore[arg-type]

    def test_rollout_says_its_residual_and_needs_it(self):
        """Without the identity for the residual another answer comes out."""
        model: Any = models.load()
        tokens = model.vocabulary.encode("hello")[None]
        half, none = (heads.rollout(model, tokens, residual=share) for share in (0.5, 0.0))
        assert (half.residual, none.residual, half.heads) == (0.5, 0.0, "mean")
        assert float((half.weights - none.weights).abs().max()) > 0.05
        assert "residual=0.5" in repr(half)


class TestRollout:
    @pytest.mark.parametrize("kind", ["dict", "BatchEncoding", "positional"])
    @torch.no_grad()
    def test_inputs_as_a_tokenizer_gives_them(self, kind: str):
        one = BY_NAME["Llama"]
        model, inputs = one.make("sdpa"), one.read()
        given: Any = {
            "dict": dict(inputs),
            "BatchEncoding": transformers.BatchEncoding(inputs),
            "positional": inputs["input_ids"],
        }[kind]
        found = heads.rollout(model, given, [3, -1])
        product = torch.eye(11, dtype=torch.float64)
        for weights in one.make("eager")(**inputs, output_attentions=True).attentions:
            product = (0.5 * torch.eye(11) + 0.5 * weights.double().mean(1)) @ product
        torch.testing.assert_close(found.weights.double(), product[:, [3, 10]], rtol=0, atol=1e-5)

    @pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
    def test_nothing_to_follow_is_refused(self, shape):
        x = torch.zeros(*shape, 8)

        def model(x: Tensor) -> Tensor:
            return ch.attend(x, x, x)

        with pytest.raises(ValueError, match="inputs: have a sample and a position"):
            heads.rollout(model, x)  # type: ignore[arg-type]
