"""Cutting attention: against the same model under another mask, or with its weights edited."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead import masks, readings
from clearhead.models import GPT
from tests.architectures import ALL
from tests.test_watching import WAYS, Head, functional, sdpa

BY_NAME = {architecture.name: architecture for architecture in ALL}
LENGTH = 11


def near(got: Tensor, want: Tensor, atol: float = 2e-6) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=atol)


def some_edges(query: int = LENGTH, source: int | None = None) -> Tensor:
    """About half of all edges, but never those of a position to itself."""
    draw = torch.Generator().manual_seed(7)
    edges = torch.rand(query, source or query, generator=draw) < 0.5
    return edges & ~torch.eye(query, source or query, dtype=torch.bool)


def first_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else next(iter(output.values()))


def gpt(**options: Any) -> Any:
    torch.manual_seed(0)
    model = GPT(31, layers=2, heads=3, width=24, length=32, **options).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def made(one: Any, backend: str) -> Any:
    return one.make(backend)


def tokens(batch: int = 2, length: int = LENGTH, vocabulary: int = 31) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary, (batch, length), generator=draw)


class TestEveryWayToAttend:
    @staticmethod
    def by_hand(model: Head, x: Tensor, cut: Tensor, zeroed: Tensor, source: Tensor) -> Tensor:
        """The lesson's equation in float64, with edges cut before and after the softmax."""
        q, k, v = (
            layer(y).double().unflatten(-1, (model.heads, -1)).transpose(1, 2)
            for layer, y in ((model.query, x), (model.key, source), (model.value, source))
        )
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(cut, -math.inf)
        weights = scores.softmax(-1).nan_to_num(0.0).masked_fill(zeroed, 0.0)
        context = weights @ v
        return context if model.heads > 1 else context[:, 0]

    @pytest.mark.parametrize("heads", [1, 3])
    @pytest.mark.parametrize("mix", WAYS)
    def test_edges(self, mix, heads):
        torch.manual_seed(0)
        model, x, y = Head(mix, heads), torch.randn(2, 5, 6), torch.randn(2, 7, 6)
        some, no = some_edges(5, 7), torch.zeros(5, 7, dtype=torch.bool)
        some[2] = True
        with ch.knockout(model, some):
            near(model(x, y), self.by_hand(model, x, some, no, y))
        with ch.zero_weights(model, some):
            near(model(x, y), self.by_hand(model, x, no, some, y))

    @pytest.mark.parametrize("mix", WAYS)
    @pytest.mark.parametrize("verb", [ch.knockout, ch.zero_weights])
    def test_a_list_of_pairs(self, mix, verb):
        torch.manual_seed(0)
        model, x, y = Head(mix, 3), torch.randn(2, 5, 6), torch.randn(2, 7, 6)
        for other in (x, y):
            one = torch.zeros(5, other.shape[1], dtype=torch.bool)
            one[3, 1] = one[4, 4] = True
            with verb(model, one):
                want = model(x, other)
            pairs = [(3, 1), (4, 4)]
            for given in (pairs, {*pairs}, iter(pairs), torch.tensor(pairs), torch.argwhere(one)):
                with verb(model, given):
                    near(model(x, other), want)
        one[4, 4] = False
        with verb(model, one):
            want = model(x, y)
        with verb(model, (3, 1)):
            near(model(x, y), want)

    @pytest.mark.parametrize("mix", WAYS)
    def test_one_head_of_three(self, mix):
        torch.manual_seed(0)
        model, x = Head(mix, 3), torch.randn(2, 5, 6)
        own = model(x)
        with ch.knockout(model, some_edges(5), heads=1) as cut:
            changed = model(x)
        want = torch.zeros(3, 5, 5, dtype=torch.bool)
        want[1] = some_edges(5)
        near(changed, self.by_hand(model, x, want, torch.zeros_like(want), x))
        assert torch.equal(changed[:, [0, 2]], own[:, [0, 2]])
        assert set(cut.moved) == {(0, 1)}
        assert cut.moved[0, 1] == pytest.approx((changed - own).abs().max().item())

    @pytest.mark.parametrize("mix", WAYS)
    def test_rows_without_a_cut_keep_their_bits(self, mix):
        torch.manual_seed(0)
        model, x = Head(mix, 3), torch.randn(2, 5, 6)
        one = torch.zeros(5, 5, dtype=torch.bool)
        one[3, 1] = True
        with ch.knockout(model, one):
            changed = model(x)
        same = (changed == model(x)).all(-1).all(0).all(0)
        assert same.tolist() == [True, True, True, False, True]

    @pytest.mark.parametrize("mix", WAYS)
    def test_nothing_left_is_zero_with_gradient_zero(self, mix):
        torch.manual_seed(0)
        model, x = Head(mix, 3), torch.randn(2, 5, 6, requires_grad=True)
        with ch.knockout(model, masks.everything()):
            changed = model(x)
        changed.sum().backward()
        assert changed.abs().max() == 0
        assert x.grad is not None
        assert x.grad.abs().max() == 0
        with ch.ablate(model):
            assert torch.equal(model(x), changed)

    @pytest.mark.parametrize("mix", WAYS)
    def test_gradients(self, mix):
        torch.manual_seed(0)
        model, x = Head(mix, 3).double(), torch.randn(2, 5, 6, dtype=torch.float64)
        some, no = some_edges(5), torch.zeros(5, 5, dtype=torch.bool)

        def run(cut: Any, expected: Tensor) -> None:
            left = x.clone().requires_grad_()
            with cut:
                (got,) = torch.autograd.grad(model(left).square().sum(), left)
            # one of the ways to mix takes its softmax in float32
            near(got, expected, atol=1e-6 if mix is functional else 1e-10)

        right = x.clone().requires_grad_()
        for cut, pair in ((ch.knockout, (some, no)), (ch.zero_weights, (no, some))):
            want = self.by_hand(model, right, *pair, right).square().sum()
            run(cut(model, some), torch.autograd.grad(want, right)[0])

    def test_a_sink_by_hand_keeps_its_share(self):
        torch.manual_seed(0)
        q, sink = torch.randn(2, 3, 5, 4), torch.randn(3, 1, 1)
        cut = some_edges(5)

        def mix() -> Tensor:
            logits = torch.cat([q @ q.mT / 2, sink.expand(2, 3, 5, 1)], -1)
            return logits.softmax(-1)[..., :-1] @ q

        with ch.knockout(mix, cut):
            near(mix(), expected_with_sink(q, sink, cut))

    def test_softcap_bias_and_sinks_of_attend(self):
        torch.manual_seed(0)
        q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 2)
        bias, sinks, cut = torch.randn(6, 5, 7), torch.randn(6), some_edges(5, 7)
        options: dict[str, Any] = {"scale": 0.3, "softcap": 2.0, "bias": bias, "sinks": sinks}
        with ch.knockout(ch.attend, cut, heads=[1, 4]):
            got = ch.attend(q, k, v, **options)
        blocked = bias.clone()
        blocked[[1, 4]] = blocked[[1, 4]].masked_fill(cut, -math.inf)
        near(got, ch.attend(q, k, v, **{**options, "bias": blocked}))


def expected_with_sink(q: Tensor, sink: Tensor, cut: Tensor) -> Tensor:
    powers = (q.double() @ q.double().mT / 2).exp().masked_fill(cut, 0.0)
    return powers / (powers.sum(-1, keepdim=True) + sink.double().exp()) @ q.double()


DECODERS = ["Llama", "Mistral", "Qwen3-MoE", "Gemma 3", "GPT-2", "GPT-NeoX", "DeepSeek-V3"]
EAGER = ["Llama", "Gemma 2", "GPT-OSS", "GPT-J", "GPT-2", "BERT", "GPT-Neo"]


def masked(model: Any, allowed: Tensor, batch: int = 2) -> Any:
    """A mask as these models hand it to their attention: one, or one for each kind of layer."""
    low = torch.finfo(torch.float32).min
    window = getattr(model.config, "sliding_window", None)
    near_by = allowed if window is None else allowed & masks.window(window).dense(len(allowed))
    full, sliding = (
        torch.zeros(x.shape).masked_fill(~x, low).expand(batch, 1, -1, -1)
        for x in (allowed, near_by)
    )
    if set(getattr(model.config, "layer_types", None) or ()) >= {
        "full_attention",
        "sliding_attention",
    }:
        return {"full_attention": full, "sliding_attention": sliding}
    return sliding


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "sdpa") for name in [*DECODERS, "BERT"]), *((name, "eager") for name in EAGER)],
)
def test_all_layers_against_a_mask_given_to_the_model(name, backend):
    one = BY_NAME[name]
    model, inputs = made(one, backend), one.read()
    cut = some_edges()
    with ch.knockout(model, cut):
        got = first_of(model(**inputs))
    allowed = ~cut if one.family == "encoder" else ~cut & masks.causal().dense(LENGTH)
    near(got, first_of(model(**inputs, attention_mask=masked(model, allowed))), atol=1e-5)
    assert (got - first_of(model(**inputs))).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["T5", "BART", "BERT", "DistilBERT", "MPNet"])
def test_a_source_cut_everywhere_is_a_source_of_padding(name, backend):
    one = BY_NAME[name]
    if backend not in one.backends:
        pytest.skip("one backend only")
    model, inputs = made(one, backend), one.read()
    with ch.watch(model) as seen:
        model(**inputs)
    layers = [record.layer for record in seen if record.sizes[3] == LENGTH]
    with ch.knockout(model, masks.first(5) - masks.first(4), layers=layers):
        got = first_of(model(**inputs))
    keep = torch.ones_like(inputs["input_ids"])
    keep[:, 4] = 0
    near(got, first_of(model(**inputs, attention_mask=keep)), atol=1e-5)


class TestTorchModules:
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("want_weights", [True, False])
    def test_multi_head(self, batch_first, want_weights):
        torch.manual_seed(0)
        layer, x = (
            nn.MultiheadAttention(12, 3, batch_first=batch_first).eval(),
            torch.randn(5, 5, 12),
        )
        cut = some_edges(5)
        with ch.knockout(layer, cut):
            got, _ = layer(x, x, x, need_weights=want_weights)
        near(got, layer(x, x, x, attn_mask=cut)[0])

    @torch.no_grad()
    def test_encoder(self):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        x, cut = torch.randn(2, 7, 12), some_edges(7)
        with ch.knockout(model, cut):
            got = model(x)
        near(got, model(x, mask=cut))

    @torch.no_grad()
    def test_decoder_cross(self):
        torch.manual_seed(0)
        model = nn.TransformerDecoderLayer(12, 3, 20, batch_first=True).eval()
        x, y, cut = torch.randn(2, 5, 12), torch.randn(2, 7, 12), some_edges(5, 7)
        with ch.knockout(model, cut, layers=1):
            got = model(x, y)
        near(got, model(x, y, memory_mask=cut))

    @torch.no_grad()
    def test_clearheads_own_layer(self):
        torch.manual_seed(0)
        layer, x, cut = (
            ch.MultiheadAttention(12, 3, batch_first=True),
            torch.randn(2, 5, 12),
            some_edges(5),
        )
        with ch.knockout(layer, cut):
            got, _ = layer(x, x, x)
        near(got, layer(x, x, x, attn_mask=cut)[0])


class TestGPT:
    @torch.no_grad()
    def test_edges(self):
        model, ids = gpt(), tokens()
        with ch.knockout(model, masks.diagonal(1) | masks.first(1)):
            got = model(ids)
        near(got, model(ids, mask=~(masks.diagonal(1) | masks.first(1))), atol=1e-5)

    @torch.no_grad()
    def test_edges_that_differ_by_sample_and_head(self):
        model, ids = gpt(), tokens()
        cut = torch.rand(2, 3, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.4
        with ch.knockout(model, cut, heads=[(1, 2), (1, 0)]):
            got = model(ids)
        for sample in range(2):
            with ch.knockout(model, cut[sample, 0], heads=[(1, 0)]):  # noqa: SIM117
                with ch.knockout(model, cut[sample, 2], heads=[(1, 2)]):
                    near(got[sample], model(ids[sample : sample + 1])[0], atol=1e-5)

    @torch.no_grad()
    @pytest.mark.parametrize("verb", [ch.knockout, ch.zero_weights])
    def test_steps_with_a_cache(self, verb):
        model, ids = gpt(), tokens()
        table = some_edges()
        cut = masks.where(lambda b, h, i, j: table[i, j])  # fits every size
        with verb(model, cut):
            whole, cache = model(ids), model.new_cache()
            steps = [model(part, cache=cache) for part in ids.split([4, 1, 1, 3, 2], 1)]
        near(torch.cat(steps, 1), whole, atol=1e-5)

    @torch.no_grad()
    @pytest.mark.parametrize("heads", [[(0, 1)], [(0, 0), (1, 1), (1, 2)], [(1, -1)]])
    def test_ablated_heads(self, heads):
        """Against edits of the heads' outputs just before they are joined."""
        model, ids = gpt(), tokens()
        other = tokens(3, 7)

        def edited(replace):
            handles = []
            for number, block in enumerate(model.blocks):
                mine = [head % 3 for layer, head in heads if layer == number]

                def edit(module, args, mine=mine, number=number):
                    x = args[0].clone()
                    for head in mine:
                        part = slice(8 * head, 8 * head + 8)
                        x[..., part] = replace(number, x[..., part], part)
                    return (x,)

                handles.append(block.attention.join.register_forward_pre_hook(edit))
            out = model(ids)
            for handle in handles:
                handle.remove()
            return out

        with ch.ablate(model, heads):
            assert torch.equal(model(ids), edited(lambda n, x, part: torch.zeros_like(x)))
        with ch.ablate(model, heads, how="mean"):
            near(model(ids), edited(lambda n, x, part: x.mean(1, keepdim=True).expand_as(x)), 1e-5)
        kept = {}
        handles = [
            block.attention.join.register_forward_pre_hook(
                lambda module, args, n=n: kept.update({n: args[0].mean((0, 1))})
            )
            for n, block in enumerate(model.blocks)
        ]
        model(other)
        for handle in handles:
            handle.remove()
        with ch.ablate(model, heads, how="mean", reference=other):
            near(model(ids), edited(lambda n, x, part: kept[n][part].expand_as(x)), 1e-5)

    @torch.no_grad()
    def test_resampled_heads(self):
        model, ids = gpt(), tokens()
        before = torch.get_rng_state()
        runs = []
        for seed in (0, 0, 1):
            with ch.ablate(model, [(1, 1)], how="resample", seed=seed):
                runs.append(model(ids))
        assert torch.equal(runs[0], runs[1])
        assert not torch.equal(runs[0], runs[2])
        assert torch.equal(before, torch.get_rng_state())
        taken = []
        handle = model.blocks[1].attention.join.register_forward_pre_hook(
            lambda module, args: taken.append(args[0])
        )
        model(ids)
        with ch.ablate(model, [(1, 1)], how="resample"):
            model(ids)
        with ch.ablate(model, [(1, 1)], how="resample", reference=tokens(3, 7)):
            model(ids)
        handle.remove()
        own, drawn, reference, other = taken
        for sample in range(2):
            rows = own[sample, :, 8:16]
            assert all((rows == row).all(-1).any() for row in drawn[sample, :, 8:16])
        rows = reference[..., 8:16].flatten(0, 1)
        assert all((rows == row).all(-1).any() for row in other[..., 8:16].flatten(0, 1))
        assert torch.equal(own[..., :8], drawn[..., :8])


PROJECTIONS = {
    "Llama": ("model.layers.1.self_attn.o_proj", 1, 4, 5),
    "GPT-2": ("transformer.h.1.attn.c_proj", 0, None, 2),
    "BERT": ("encoder.layer.1.attention.output.dense", 1, 8, 2),
    "OPT": ("model.decoder.layers.1.self_attn.out_proj", 1, None, 1),
    "T5": ("encoder.block.1.layer.0.SelfAttention.o", 1, 8, 2),
}


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_zeroing_a_head_is_zeroing_its_columns_of_the_projection(name, backend):
    one = BY_NAME[name]
    path, axis, width, head = PROJECTIONS[name]
    model, inputs = made(one, backend), one.read()
    with ch.ablate(model, [(1, head)]):
        got = first_of(model(**inputs))
    with ch.knockout(model, masks.everything(), heads=[(1, head)]):
        assert torch.equal(first_of(model(**inputs)), got)
    edited = copy.deepcopy(model)
    weight = edited.get_submodule(path).weight
    width = width or weight.shape[axis] // model.config.num_attention_heads
    weight.narrow(axis, head * width, width).zero_()
    near(got, first_of(edited(**inputs)), atol=1e-6)
    assert (got - first_of(model(**inputs))).abs().max() > 1e-4


CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 4},
    "none": {"use_cache": False},
}


class TestGeneration:
    @torch.no_grad()
    @pytest.mark.parametrize("cache", CACHES)
    @pytest.mark.parametrize(
        ("name", "backend"),
        [("Llama", "sdpa"), ("Llama", "eager"), ("Mistral", "sdpa"), ("Gemma 3", "eager")],
    )
    def test_edges_stand_in_the_whole_sequence(self, name, backend, cache):
        one = BY_NAME[name]
        model, inputs = made(one, backend), one.read()
        cut = some_edges(LENGTH + 4) | masks.diagonal(2).dense(LENGTH + 4)
        # The last of the pairs, and others, are positions that the first steps do not have yet.
        listed = [(1, 0), (2, 1), (LENGTH - 1, 3), (LENGTH, 0), (LENGTH + 3, LENGTH)]
        pairs = masks.edges(listed)
        for edges in (
            masks.dense(cut), masks.diagonal(1) | (masks.first(5) - masks.first(3)), pairs,
        ):  # fmt: skip
            with ch.knockout(model, listed if edges is pairs else edges):
                answer = model.generate(
                    **inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0,
                    return_dict_in_generate=True, output_logits=True, **CACHES[cache],
                )  # fmt: skip
            allowed = masks.causal().dense(LENGTH + 4) & ~edges.dense(LENGTH + 4)
            whole = model(answer.sequences[:, :-1], attention_mask=masked(model, allowed)).logits
            near(torch.stack(answer.logits, 1), whole[:, LENGTH - 1 :], atol=1e-5)

    @torch.no_grad()
    def test_edges_of_the_prompt_only(self):
        one = BY_NAME["Llama"]
        model, inputs = made(one, "sdpa"), one.read()
        cut = some_edges()
        with ch.knockout(model, cut):
            answer = model.generate(
                **inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        allowed = masks.causal().dense(LENGTH + 3)
        allowed[:LENGTH, :LENGTH] &= ~cut
        whole = model(answer.sequences[:, :-1], attention_mask=masked(model, allowed)).logits
        near(torch.stack(answer.logits, 1), whole[:, LENGTH - 1 :], atol=1e-5)

    @torch.no_grad()
    @pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 3"])
    @pytest.mark.parametrize("kind", ["drafts", "earlier cache"])
    def test_places_where_tokens_are_taken_back_or_were_there_before(self, name, kind):
        model: Any = made(BY_NAME[name], "sdpa")
        given: dict[str, Any] = {"input_ids": BY_NAME[name].read(batch=1)["input_ids"]}
        options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0,
                                   "return_dict_in_generate": True, "output_logits": True,
                                   "eos_token_id": None}  # fmt: skip
        edges = masks.diagonal(1) | (masks.first(5) - masks.first(3))
        with ch.knockout(model, edges):
            if kind == "drafts":
                given = {"input_ids": given["input_ids"][:, :6].repeat(1, 2)}
                answer = model.generate(**given, **options, prompt_lookup_num_tokens=3)
            else:
                first = model.generate(**given, **options)
                more = torch.cat([first.sequences, first.sequences[:, :3]], 1)
                answer = model.generate(more, **options, cache=first.cache)
        size = answer.sequences.shape[1] - 1
        allowed = masks.causal().dense(size) & ~edges.dense(size)
        mask = masked(model, allowed, batch=1)
        whole = model(answer.sequences[:, :-1], attention_mask=mask).logits
        near(torch.stack(answer.logits, 1), whole[:, -8:], atol=1e-5)

    def test_a_mean_over_one_step_is_refused(self):
        one = BY_NAME["Llama"]
        model, inputs = made(one, "sdpa"), one.read()
        with pytest.raises(ValueError, match="reference: is needed for how='mean' with a cache"):  # noqa: SIM117
            with ch.ablate(model, [(0, 1)], how="mean"):
                model.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0)
        with ch.ablate(model, [(0, 1)], how="mean", reference=inputs):
            model.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0)


def wrong() -> list[Any]:
    """Values that are refused as heads, as a model and as edges."""
    return [[(0, 1), 2], "all", 3, [(1, 2, 3)]]


class TestProof:
    def test_what_moves_nothing_raises(self):
        model, ids = gpt(), tokens()
        with pytest.raises(RuntimeError, match="knockout: the cut changed nothing"):  # noqa: SIM117
            with ch.knockout(model, ~masks.causal()):
                model(ids)
        with pytest.raises(RuntimeError, match="zero_weights: the cut changed nothing"):  # noqa: SIM117
            with ch.zero_weights(model, ~masks.causal(), heads=[(0, 1)]):
                model(ids)
        model.blocks[0].attention.value_layer.weight.data[:8] = 0
        for how in ("zero", "mean", "resample"):
            with pytest.raises(RuntimeError, match=r"ablate: the cut changed nothing[^$]*\(0, 0\)"):  # noqa: SIM117
                with ch.ablate(model, [(0, 0)], how=how):
                    model(ids)

    def test_weight_that_underflows_moves_nothing(self):
        q = torch.tensor([[[200.0]], [[1.0]]]).expand(2, 3, 1)[None]
        k = torch.tensor([1.0, 0.0, 0.9]).reshape(1, 1, 3, 1).expand(1, 2, 3, 1)
        v = torch.randn(1, 2, 3, 4)
        cut = torch.zeros(3, 3, dtype=torch.bool)
        cut[:, 1] = True
        with pytest.raises(RuntimeError, match="changed nothing"):  # noqa: SIM117
            with ch.knockout(F.scaled_dot_product_attention, cut, heads=0):
                F.scaled_dot_product_attention(q, k, v)
        with ch.knockout(F.scaled_dot_product_attention, cut, heads=1) as moved:
            F.scaled_dot_product_attention(q, k, v)
        assert moved.moved[0, 1] > 0.1

    def test_a_small_weight_counts(self):
        q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, -12.0]).reshape(1, 1, 2, 1)
        v = torch.tensor([1.0, -1.0]).reshape(1, 1, 2, 1)
        with ch.knockout(ch.attend, torch.tensor([[False, True]])) as cut:
            assert ch.attend(q, k, v) == 1
        assert 0 < cut.moved[0, 0] < 1e-4

    def test_unknown_layers_and_heads_are_named(self):
        model, ids = gpt(), tokens()
        cases = {
            r"layers: .*got \[5\][^$]*0 \(blocks.0.attention\), 1": {"layers": [0, 5]},
            r"heads: layer 1 has the heads 0..2; got head 3": {"heads": [(1, 3)]},
            r"heads: layer 0 has the heads 0..2; got head -4": {"heads": -4},
            r"layers: .*got \[7\]": {"heads": [(0, 1), (7, 0)]},
        }
        for message, where in cases.items():
            for verb in (
                lambda **w: ch.knockout(model, masks.causal(), **w),
                lambda **w: ch.ablate(model, **w),
            ):
                with pytest.raises(ValueError, match=message), verb(**where):
                    model(ids)

    def test_what_is_no_choice_is_refused_at_once(self):
        model, mixed, word, number, pairs = gpt(), *wrong()
        every = masks.everything()
        for error, message, make in [
            (ValueError, "layers: count from 0", lambda: ch.knockout(model, every, layers=-1)),
            (
                ValueError,
                "heads: name their layers themselves",
                lambda: ch.ablate(model, [(0, 1)], layers=0),
            ),
            (TypeError, "heads: takes head numbers or", lambda: ch.ablate(model, mixed)),
            (TypeError, "heads: takes numbers", lambda: ch.ablate(model, word)),
            (ValueError, "heads: needs at least one", lambda: ch.ablate(model, [])),
            (TypeError, "pairs: is a list of .query, source.", lambda: ch.knockout(model, pairs)),
            (TypeError, r"edges: is a Mask(?s:.)*masks\.parse", lambda: ch.knockout(model, word)),
            (TypeError, "edges: is a Mask.*got int", lambda: ch.zero_weights(model, number)),
            (TypeError, "edges: is a Mask.*float32", lambda: ch.knockout(model, torch.ones(3, 2))),
            (
                TypeError,
                r"edges: is a Mask.*got \(3, 3\) of torch.int64\n.*shape \(n, 2\)",
                lambda: ch.knockout(model, torch.ones(3, 3).long()),
            ),
            (ValueError, "how: is one of zero", lambda: ch.ablate(model, 0, how="max")),
            (
                ValueError,
                "reference: is not used",
                lambda: ch.ablate(model, 0, reference=tokens()),
            ),
            (TypeError, "model: is a module", lambda: ch.knockout(number, every)),
        ]:
            with pytest.raises(error, match=message), make():
                pass

    def test_edges_that_are_not_there(self):
        model, ids = gpt(), tokens()
        for pair in [(11, 3), (3, 11)]:
            with pytest.raises(ValueError, match="lies beyond the positions"):  # noqa: SIM117
                with ch.knockout(model, [(4, 2), pair]):
                    model(ids)
        with pytest.raises(RuntimeError, match="changed nothing"):  # noqa: SIM117
            with ch.knockout(model, [(0, 3)]):
                model(ids)

    def test_edges_of_other_sizes(self):
        model, ids = gpt(), tokens()
        with pytest.raises(ValueError, match="made for 5 queries, the call has 11"):  # noqa: SIM117
            with ch.knockout(model, some_edges(5)):
                model(ids)

    def test_edges_for_fewer_heads(self):
        model, ids = gpt(), tokens()
        edges = some_edges().expand(1, 2, -1, -1)
        with (
            pytest.raises(ValueError, match="edges: are made for 2 heads"),
            ch.knockout(model, edges),
        ):
            model(ids)

    def test_no_samples_move_nothing(self):
        model = gpt()
        with (
            pytest.raises(RuntimeError, match="changed nothing"),
            ch.knockout(model, masks.causal()),
        ):
            model(tokens()[:0])

    def test_heads_from_a_generator(self):
        model, ids = gpt(), tokens()
        with ch.ablate(model, heads=((layer, 1) for layer in range(2))) as cut:
            model(ids)
        assert set(cut.moved) == {(0, 1), (1, 1)}

    def test_no_run_and_no_attention(self):
        with pytest.raises(RuntimeError, match=r"knockout: no attention[^$]*was not called"):  # noqa: SIM117
            with ch.knockout(gpt(), masks.causal()):
                pass
        linear = nn.Sequential(nn.Linear(3, 3))
        with pytest.raises(RuntimeError, match="ablate: no attention call of the model was seen"):  # noqa: SIM117
            with ch.ablate(linear):
                linear(torch.ones(2, 3))

    def test_weights_that_are_changed_after_the_softmax_cannot_be_cut(self):
        q = torch.randn(1, 2, 5, 4)

        def mix():
            weights = (q @ q.mT).softmax(-1)
            return (weights * torch.linspace(0, 1, 5)) @ q

        with (
            pytest.raises(RuntimeError, match="its edges cannot be cut"),
            ch.knockout(mix, some_edges(5)),
        ):
            mix()


class TestNothingIsLeftBehind:
    def state(self, model):
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        return hooks, sorted(model.__dict__), model.training, torch.get_rng_state().tolist()

    def test_after_a_run_and_after_an_exception(self):
        model, ids = gpt(), tokens()
        before, own = self.state(model), model(ids)
        with ch.knockout(model, masks.diagonal(1)):
            model(ids)
        assert self.state(model) == before
        handle = model.head.register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError), ch.knockout(model, masks.diagonal(1)):
            model(ids)
        handle.remove()
        with pytest.raises(ZeroDivisionError), ch.ablate(model, [(9, 9)]):
            raise ZeroDivisionError
        assert self.state(model) == before
        assert torch.equal(model(ids), own)

    def test_transformers_get_their_interface_back(self):
        from transformers.modeling_utils import AttentionInterface

        one = BY_NAME["Llama"]
        model, inputs, own = made(one, "sdpa"), one.read(), AttentionInterface.get_interface
        before = first_of(model(**inputs))
        with ch.knockout(model, masks.first(1), heads=[(0, 1)]):
            model(**inputs)
        assert AttentionInterface.get_interface is own
        assert torch.equal(first_of(model(**inputs)), before)


class TestTraining:
    def test_dropout_by_hand_drops_the_same(self):
        torch.manual_seed(0)
        q = torch.randn(2, 3, 5, 4)
        cut = some_edges(5)

        def mix(blocked=None):
            torch.manual_seed(1)
            scores = q @ q.mT / 2
            if blocked is not None:
                scores = scores.masked_fill(blocked, -math.inf)
            return F.dropout(scores.softmax(-1), 0.4) @ q

        with ch.knockout(mix, cut):
            near(mix(), mix(cut))

    def test_fused_dropout_drops_its_share(self):
        x = torch.ones(1, 1, 400, 4)
        with ch.knockout(F.scaled_dot_product_attention, masks.diagonal(0)):
            out = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        assert out.mean().item() == pytest.approx(1, abs=0.02)
        assert out.std() > 0.02

    def test_a_training_step_inside_the_block(self):
        model, ids = gpt(dropout=0.2).train(), tokens()
        with ch.knockout(model, masks.diagonal(0)):
            F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


class TestTogether:
    @torch.no_grad()
    def test_blocks_in_blocks_cut_both(self):
        model, ids = gpt(), tokens()
        some, other = some_edges(), masks.diagonal(1)
        with ch.knockout(model, some), ch.knockout(model, other, heads=[(0, 1), (1, 0)]):
            got = model(ids)
        both = torch.zeros(2, 3, LENGTH, LENGTH, dtype=torch.bool) | some
        both[0, 1] |= other.dense(LENGTH)
        both[1, 0] |= other.dense(LENGTH)
        with (
            ch.knockout(model, both[0][None], layers=0),
            ch.knockout(model, both[1][None], layers=1),
        ):
            near(got, model(ids), 1e-5)
        with ch.zero_weights(model, some), ch.ablate(model, [(0, 1)]), ch.knockout(model, other):
            got = model(ids)
        with ch.knockout(model, other), ch.zero_weights(model, some), ch.ablate(model, [(0, 1)]):
            near(got, model(ids), 1e-5)

    @torch.no_grad()
    def test_an_inner_block_that_moves_nothing_is_found(self):
        model, ids = gpt(), tokens()
        with (
            pytest.raises(RuntimeError, match="changed nothing"),
            ch.knockout(model, masks.diagonal(1)),
            ch.knockout(model, ~masks.causal()),
        ):
            model(ids)

    @torch.no_grad()
    def test_part_of_a_model_in_a_block_of_its_own(self):
        model, ids = gpt(), tokens()
        with ch.knockout(model, masks.diagonal(1), layers=1):
            want = model(ids)
        with ch.knockout(model.blocks[1], masks.diagonal(1)):
            assert torch.equal(model(ids), want)

    @torch.no_grad()
    def test_compiled(self):
        model, ids = gpt(), tokens()
        with ch.knockout(model, masks.diagonal(1), heads=[(0, 1)]):
            want = model(ids)
        compiled = torch.compile(model, backend="eager")
        with ch.knockout(compiled, masks.diagonal(1), heads=[(0, 1)]):
            assert torch.equal(compiled(ids), want)

    @torch.no_grad()
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_dtypes(self, dtype):
        model, ids = gpt().to(dtype), tokens()
        with ch.knockout(model, masks.diagonal(1)):
            got = model(ids)
        assert got.dtype == dtype
        want = gpt().double()(ids, mask=~masks.diagonal(1))
        near(got, want, atol=60 * torch.finfo(dtype).eps)

    @torch.no_grad()
    def test_autocast(self):
        model, ids = gpt(), tokens()
        with torch.autocast("cpu", torch.bfloat16):
            with ch.knockout(model, masks.diagonal(1)):
                got = model(ids)
            want = model(ids, mask=~masks.diagonal(1))
        near(got, want, atol=0.2)


class TestWatched:
    """A watch outside or inside the block sees the weights that are left."""

    @torch.no_grad()
    @pytest.mark.parametrize("outside", [True, False])
    @pytest.mark.parametrize("mix", WAYS)
    def test_weights_without_the_edges(self, mix, outside):
        torch.manual_seed(0)
        model, x, cut = Head(mix, 3), torch.randn(2, 5, 6), some_edges(5)
        watch, knock = ch.watch(model, read=readings.Weights()), ch.knockout(model, cut, heads=1)
        if outside:
            with watch as seen, knock:
                model(x)
        else:
            with knock, watch as seen:
                model(x)
        (record,) = seen
        want = model.expected(x)
        q, k = (
            y.double().unflatten(-1, (3, -1)).transpose(1, 2)[:, 1]
            for y in (model.query(x), model.key(x))
        )
        want[:, 1] = (q @ k.mT / math.sqrt(2)).masked_fill(cut, -math.inf).softmax(-1)
        near(record.value, want)
        assert record.check is None
        assert any("heads are cut" in note for note in seen.notes)

    @torch.no_grad()
    @pytest.mark.parametrize("outside", [True, False])
    @pytest.mark.parametrize("backend", ["sdpa", "eager"])
    def test_under_generate(self, outside, backend):
        one = BY_NAME["Llama"]
        model, inputs = made(one, backend), one.read()
        edges = masks.diagonal(1)
        watch, knock = ch.watch(model, read=readings.Weights()), ch.knockout(model, edges)
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        if outside:
            with watch as seen, knock:
                ids = model.generate(**inputs, **options)
        else:
            with knock, watch as seen:
                ids = model.generate(**inputs, **options)
        with ch.watch(model, read=readings.Weights()) as whole:
            allowed = masks.causal().dense(LENGTH + 3) & ~edges.dense(LENGTH + 3)
            model(ids[:, :-1], attention_mask=masked(model, allowed))
        for record, other in zip(seen, whole, strict=True):
            near(record.value, other.value, 1e-5)

    @torch.no_grad()
    def test_a_watch_across_two_blocks(self):
        torch.manual_seed(0)
        model, x = Head(sdpa, 3), torch.randn(2, 5, 6)
        first, second = masks.diagonal(1), masks.diagonal(2)
        stack = contextlib.ExitStack()
        with ch.knockout(model, first):
            seen = stack.enter_context(ch.watch(model, read=readings.Weights()))
            model(x)
        with stack, ch.knockout(model, second):
            model(x)
        assert len(seen) == 2
        for record, edges in zip(seen, (first, second), strict=True):
            weights = model.expected(x).masked_fill(edges.dense(5), 0)
            near(record.value, weights / weights.sum(-1, keepdim=True))

    @torch.no_grad()
    def test_through_clearheads_own_kernel(self):
        model, ids = gpt(), tokens()
        with ch.knockout(model, masks.diagonal(1)):
            want = model(ids)
            with ch.watch(model, through=True):
                assert torch.equal(model(ids), want)


class TestImportance:
    def test_against_finite_differences(self):
        model, ids = gpt().double(), tokens()

        def loss(logits):
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        with torch.no_grad():
            got = ch.head_importance(model, ids, loss)
        want = torch.zeros(2, 3, dtype=torch.float64)
        step = 1e-6
        for layer in range(2):
            for head in range(3):
                for sample in range(2):
                    found = []
                    for sign in (1, -1):

                        def gate(module, args, sign=sign, head=head, sample=sample):
                            x = args[0].clone()
                            x[sample, :, 8 * head : 8 * head + 8] *= 1 + sign * step
                            return (x,)

                        join = model.blocks[layer].attention.join
                        handle = join.register_forward_pre_hook(gate)
                        found.append(loss(model(ids)).item())
                        handle.remove()
                    want[layer, head] += abs(found[0] - found[1]) / (2 * step)
        near(got, want, atol=1e-7)
        assert all(p.grad is None for p in model.parameters())

    def test_loss_of_the_output_and_chosen_heads(self):
        one = BY_NAME["Llama"]
        model, inputs = made(one, "sdpa"), one.read()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        inputs["labels"] = inputs["input_ids"]
        table = ch.head_importance(model, inputs, heads=[(1, 2), (0, 5)])
        assert table.shape == (2, 6)
        assert table.isfinite().nonzero().tolist() == [[0, 5], [1, 2]]
        assert (table[table.isfinite()] > 0).all()

    def test_errors(self):
        model, ids = gpt(), tokens()
        with pytest.raises(ValueError, match="loss: is needed"):
            ch.head_importance(model, ids)
        with pytest.raises(ValueError, match="loss: gives one number"):
            ch.head_importance(model, ids, lambda logits: logits)
        with pytest.raises(ValueError, match="layers: were not all seen"):
            ch.head_importance(model, ids, lambda logits: logits.sum(), layers=4)
