"""`attn_implementation="clearhead"`: equal to "eager" in every model, or refused by name."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import readings
from tests import architectures
from tests.architectures import Architecture

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")

hf = ch.integrations.transformers
hf.register()

ALL = {
    one.name: one
    for name, table in vars(architectures).items()
    if name.isupper() and isinstance(table, list)
    for one in table
    if isinstance(one, Architecture)
}
EXTRA = [
    Architecture(
        "Gemma 4", "decoder", "Gemma4ForCausalLM", "Gemma4TextConfig",
        {**architectures._MODERN, "vocab_size_per_layer_input": 53, "sliding_window": 5,
         "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 1,
         "layer_types": ["sliding_attention", "full_attention", "full_attention"],
         "num_hidden_layers": 3}, note='compares the name with "sdpa"',
    ),
    Architecture(
        "GLM5-next", "decoder", "Glm5NextTextModel", "Glm5NextTextConfig",
        {**architectures._MODERN, "num_key_value_heads": 6, "head_dim": 0, "q_lora_rank": 12,
         "kv_lora_rank": 8, "v_head_dim": 5, "qk_nope_head_dim": 6, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 16, "index_topk": 4,
         "index_head_dim": 8, "index_n_heads": 2, "index_kpool": 2,
         "linear_head_dim": 8, "linear_num_heads": 2,
         "layer_types": ["linear_attention", "indexed_attention"], "indexer_types": ["full"] * 2,
         "mlp_layer_types": ["dense", "dense"]}, note='compares the name with "sdpa"',
    ),
    Architecture(
        "GPT-2, upcast", "decoder", "GPT2LMHeadModel", "GPT2Config",
        dict(vocab_size=53, n_embd=24, n_layer=2, n_head=3, n_positions=64, bos_token_id=1,
             eos_token_id=2, reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True),
        note='compares the name with "eager"',
    ),
]  # fmt: skip
ALL |= {one.name: one for one in EXTRA}

# The models that ask for a mask and then attend on their own.
REFUSED = {"Bloom", "MPT", "MPNet", "RoFormer", "BigBird", "Perceiver", "XGLM"}
# The models in which a table by name has no entry: transformers raises as they are built.
NOT_BUILT = {"GPT-Neo", "Falcon"}
# The models that ask for nothing at all, and compute their own attention under every name.
IGNORING = {"DeBERTa v2", "XLNet", "DeBERTa", "Funnel", "ViTDet"}
SERVED = [name for name in ALL if name not in REFUSED | NOT_BUILT | IGNORING]


def made(name: str, backend: str, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = ALL[name].make(backend)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other ones have no float64
    if dtype == torch.float64:
        plain_form(model)
    return model.to(dtype)


def plain_form(model: Any) -> None:
    """Let GPT-2 compute its equation in the form that has float64."""
    for module in model.modules():
        if hasattr(module, "reorder_and_upcast_attn"):
            module.reorder_and_upcast_attn = False


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Give the model's inputs; tokens with padding in one sample."""
    given = ALL[name].read()
    if ALL[name].inputs == "tokens":
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][0, -3:] = 0
    return {key: x.to(dtype) if x.is_floating_point() else x for key, x in given.items()}


def run(model: Any, given: dict[str, Tensor], **options: Any) -> Any:
    with torch.no_grad():
        return model(**given, **options)


def outputs(answer: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """Give what a model returns, at real positions."""
    found = [x for x in answer.values() if isinstance(x, Tensor) and x.is_floating_point()]
    real = given.get("attention_mask")
    return [x if real is None or x.shape[:2] != real.shape else x[real.bool()] for x in found]


def largest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    errors = [float((x - y).abs().max()) for x, y in zip(ours, theirs, strict=True)]
    assert errors
    assert not any(map(math.isnan, errors))
    return max(errors)


class Counted:
    """Counts the calls of `attend` below the attention function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = sys.modules["clearhead.integrations.hugging_face.function"]
        self.own, self.calls = module.attend, 0
        monkeypatch.setattr(module, "attend", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.own(*args, **kwargs)


@pytest.mark.parametrize("name", SERVED)
def test_outputs_equal_eager_in_every_model(name, monkeypatch):
    given, exact_given = inputs_of(name), inputs_of(name, torch.float64)
    exact = outputs(run(made(name, "eager", torch.float64), exact_given), exact_given)
    model = made(name, "clearhead")
    counted = Counted(monkeypatch)
    ours = outputs(run(model, given), given)
    assert counted.calls > 0, "the name was ignored"
    theirs = outputs(run(made(name, "eager"), given), given)
    size = max(float(x.abs().max()) for x in exact)
    assert largest(ours, exact) <= 2 * largest(theirs, exact) + torch.finfo().eps * size
    assert hf.unsupported_reasons(model) == []


@pytest.mark.parametrize("name", sorted(set(SERVED) - {"CLIP"}))
def test_weights_come_without_eager(name):
    given = inputs_of(name)
    ours = run(made(name, "clearhead"), given, output_attentions=True)
    theirs = run(made(name, "eager"), given, output_attentions=True)
    names = [key for key in theirs if key.endswith("attentions") and theirs[key]]
    assert names
    real = given.get("attention_mask")
    for key in names:
        for x, y in zip(ours[key], theirs[key], strict=True):
            assert (x is None) == (y is None)
            if y is not None:
                # Eager weighs all sources of an empty row alike; those are rows of padding.
                rows = torch.ones(x.shape[:3], dtype=torch.bool)
                if real is not None and real.shape[1] == x.shape[2]:
                    rows &= real.bool()[:, None]
                torch.testing.assert_close(x[rows], y[rows], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_models_with_attention_of_their_own_are_refused(name):
    model = made(name, "clearhead")
    with pytest.raises(ValueError, match="has attention of its own and never asks"):
        run(model, inputs_of(name))
    assert "has attention of its own" in hf.unsupported_reasons(model)[0]


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_models_with_a_table_of_names_are_not_even_built(name):
    with pytest.raises(KeyError, match="clearhead"):
        made(name, "clearhead")
    kind = getattr(transformers, ALL[name].model)
    assert "has attention of its own" in hf.unsupported_reasons(kind)[0]


@pytest.mark.parametrize("name", sorted(IGNORING))
def test_models_that_ask_for_nothing_are_named(name, monkeypatch):
    model, given = made(name, "clearhead"), inputs_of(name)
    counted = Counted(monkeypatch)
    assert largest(outputs(run(model, given), given),
                   outputs(run(made(name, "eager"), given), given)) == 0  # fmt: skip
    assert counted.calls == 0
    assert "has attention of its own" in hf.unsupported_reasons(model)[0]


def test_sparse_attention_that_depends_on_the_name_is_refused():
    config = transformers.DeepseekV32Config(
        **{**architectures._MODERN, "num_key_value_heads": 6}, q_lora_rank=12, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=5, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, n_group=2, topk_group=1, index_topk=4,
        index_head_dim=8, index_n_heads=2, first_k_dense_replace=2,
    )  # fmt: skip
    config._attn_implementation = "clearhead"
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"treats .eager. unlike any other name: .*'sdpa'"):
        run(model, architectures.tokens(2, 11))


def test_decision_transformer_is_served():
    """It compares the name with "eager", and has two forms of one equation."""
    config = transformers.DecisionTransformerConfig(
        state_dim=3, act_dim=2, hidden_size=24, n_layer=2, n_head=3, max_ep_len=16,
        reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    given = {
        "states": torch.randn(2, 5, 3, generator=draw),
        "actions": torch.randn(2, 5, 2, generator=draw),
        "rewards": torch.randn(2, 5, 1, generator=draw),
        "returns_to_go": torch.randn(2, 5, 1, generator=draw),
        "timesteps": torch.arange(5).expand(2, 5),
        "attention_mask": torch.ones(2, 5),
    }
    answers = []
    for backend, dtype in (("clearhead", None), ("eager", None), ("eager", torch.float64)):
        config._attn_implementation = backend
        torch.manual_seed(0)
        model = architectures.sharpened(transformers.DecisionTransformerModel(config)).eval()
        if dtype:
            plain_form(model)
        wide = {k: x.to(dtype) if x.is_floating_point() and dtype else x for k, x in given.items()}
        answers.append(list(run(model.to(dtype) if dtype else model, wide).values()))
    ours, theirs, exact = answers
    size = max(float(x.abs().max()) for x in exact)
    assert largest(ours, exact) <= 2 * largest(theirs, exact) + torch.finfo().eps * size


def test_a_model_whose_eager_attention_does_more_is_refused(monkeypatch):
    """The lie: an attention that adds to the scores what it passes to nobody."""
    module = sys.modules["transformers.models.llama.modeling_llama"]
    own = module.eager_attention_forward

    def louder(module, query, *args, **kwargs):
        return own(module, query * 1.01, *args, **kwargs)

    given = inputs_of("Llama")
    with monkeypatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", louder)
        with pytest.raises(ValueError, match="LlamaAttention's eager attention computes something"):
            run(made("Llama", "clearhead"), given)
    run(made("Llama", "clearhead"), given)


def test_the_comparison_finds_a_lie_of_few_rows(monkeypatch):
    """Of a large map the last rows are compared."""
    module = sys.modules["clearhead.integrations.hugging_face.verification"]
    monkeypatch.setattr(module, "_SCORES", 10)
    given = architectures.tokens(2, 23)
    for name in ("Llama", "T5", "GPT-OSS"):
        more = (
            {"decoder_input_ids": architectures.tokens(2, 19)["input_ids"]} if name == "T5" else {}
        )
        run(made(name, "clearhead"), {**given, **more})
    monkeypatch.setattr(module, "_ROWS", 3)
    forgets = sys.modules["clearhead.integrations.hugging_face.function"]
    own = forgets.attend
    monkeypatch.setattr(forgets, "attend", lambda *a, **k: own(*a, **{**k, "sinks": None}))
    with pytest.raises(ValueError, match="GptOssAttention's eager attention computes something"):
        run(made("GPT-OSS", "clearhead"), given)


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 3", "GPT-OSS", "Gemma 4", "Llama 4"])
def test_generation_equals_eager(name, cache):
    given = architectures.tokens(2, 9)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["attention_mask"][0, :3] = 0
    options: Any = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, output_logits=True,
                        return_dict_in_generate=True, pad_token_id=0)  # fmt: skip
    options |= {"use_cache": False} if cache is None else {"cache_implementation": cache}
    if cache == "static":
        options["disable_compile"] = True
    found = [made(name, kind).generate(**given, **options) for kind in ("clearhead", "eager")]
    torch.testing.assert_close(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(
        torch.stack(found[0].logits), torch.stack(found[1].logits), rtol=1e-4, atol=2e-5
    )


@pytest.mark.parametrize("name", ["BART", "T5", "Whisper"])
def test_two_sided_models_generate_as_eager(name):
    given = ALL[name].read()
    given.pop("decoder_input_ids")
    options: Any = dict(max_new_tokens=6, min_new_tokens=6, num_beams=2, do_sample=False)
    found = [made(name, kind).generate(**given, **options) for kind in ("clearhead", "eager")]
    torch.testing.assert_close(found[0], found[1])


def test_weights_in_generation():
    given = architectures.tokens(1, 5)
    options: Any = dict(max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0,
                        output_attentions=True, return_dict_in_generate=True)  # fmt: skip
    ours, theirs = (made("Llama", kind).generate(**given, **options).attentions
                    for kind in ("clearhead", "eager"))  # fmt: skip
    for x, y in zip(sum(ours, ()), sum(theirs, ()), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-OSS", "T5", "BERT"])
def test_gradients_equal_eager(name, checkpointing):
    given, found = inputs_of(name, torch.float64), []
    for kind in ("clearhead", "eager"):
        model = made(name, kind, torch.float64)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for module in model.modules():
                for key in ("dropout", "p", "attention_dropout"):
                    if isinstance(vars(module).get(key), float):
                        setattr(module, key, 0.0)
            model.train()
        torch.stack([x.square().sum() for x in outputs(model(**given), given)]).sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for key, gradient in found[0].items():
        scale = float(found[1][key].abs().max())
        torch.testing.assert_close(gradient, found[1][key], rtol=1e-5, atol=1e-5 * scale + 1e-9)


def test_training_drops_weights_and_evaluation_does_not():
    model = made("BERT", "clearhead")
    given = inputs_of("BERT")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # all but the dropout of the weights, which is a number of the module
    still = [run(model, given).last_hidden_state for _ in range(2)]
    assert torch.equal(*still)
    model.train()
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.dropout = torch.nn.Dropout(0.5)
    torch.manual_seed(0)
    first, second = (run(model, given).last_hidden_state for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_at_least_as_exact_as_eager(dtype):
    given = inputs_of("Llama")
    exact = outputs(run(made("Llama", "eager", dtype).double(), given), given)
    ours, theirs = (outputs(run(made("Llama", kind, dtype), given), given)
                    for kind in ("clearhead", "eager"))  # fmt: skip
    size = max(float(x.abs().max()) for x in exact)
    bound = 2 * largest(theirs, exact) + torch.finfo(dtype).eps * size
    assert largest(ours, exact) <= bound


def test_autocast():
    given = inputs_of("Llama")
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (outputs(run(made("Llama", kind), given), given)
                        for kind in ("clearhead", "eager"))  # fmt: skip
    exact = outputs(run(made("Llama", "eager", torch.float64), given), given)
    assert largest(ours, exact) <= 2 * largest(theirs, exact) + torch.finfo(torch.bfloat16).eps


def test_packed_documents_by_position_ids():
    given = {
        "input_ids": architectures.tokens(1, 11)["input_ids"],
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]]),
    }
    model = made("Llama", "clearhead")
    ours, theirs = run(model, given, use_cache=False), run(made("Llama", "eager"), given,
                                                           use_cache=False)  # fmt: skip
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
    alone = run(model, {"input_ids": given["input_ids"][:, 4:9]})
    torch.testing.assert_close(ours.logits[:, 4:9], alone.logits, rtol=1e-4, atol=1e-5)


def test_a_mask_of_four_axes_with_a_bias_is_added():
    given = architectures.tokens(2, 7)
    bias = torch.randn(2, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    blocked = torch.ones(7, 7, dtype=torch.bool).triu(1)
    given["attention_mask"] = bias.masked_fill(blocked, torch.finfo().min)
    ours, theirs = (run(made("Llama", kind), given).logits for kind in ("clearhead", "eager"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    given["attention_mask"] = ~blocked[None, None].expand(2, 1, 7, 7)
    ours, theirs = (run(made("Llama", kind), given).logits for kind in ("clearhead", "sdpa"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_mask_that_is_edited_in_place_is_read_again():
    from clearhead.integrations.hugging_face.masking import additive_mask, edges_of

    mask = additive_mask(batch_size=1, q_length=4, kv_length=4)
    assert mask is not None
    assert repr(edges_of(mask, 4).mask) == repr(ch.masks.causal())
    mask[..., 0] = torch.finfo().min
    edges = edges_of(mask, 4).mask
    assert edges is not None
    expected = torch.ones(4, 4, dtype=torch.bool).tril()
    expected[:, 0] = False
    assert torch.equal(edges.dense(4, 4).squeeze(), expected)


@pytest.mark.parametrize("first", [True, False], ids=["verified before", "verified inside"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma 2"])
def test_compiled_models(name, first):
    """One graph after a first call; without one, the first run breaks the graph to verify."""
    model, given = made(name, "clearhead"), inputs_of(name)
    expected = run(made(name, "eager"), given).logits
    if first:
        run(model, given)
    graphs: list[str] = []

    def backend(graph, examples):
        graphs.append(graph.code)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=first)
    for _ in range(2):
        found = run(compiled, given, use_cache=False).logits
        torch.testing.assert_close(
            *(outputs({"logits": x}, {k: given[k] for k in ("attention_mask",)})[0]
              for x in (found, expected)), rtol=1e-4, atol=1e-5)  # fmt: skip
    assert any("clearhead" in code for code in graphs)
    assert not first or len(graphs) == 1


def test_inference_mode_equals_no_grad():
    model, given = made("Mistral", "clearhead"), inputs_of("Mistral")
    expected = run(model, given).logits
    with torch.inference_mode():
        found = model(**given).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_watch_sees_the_calls():
    model, given = made("Llama", "clearhead"), architectures.tokens(2, 7)
    with ch.watch(model, read=readings.Weights()) as seen:
        run(model, given)
    theirs = run(made("Llama", "eager"), given, output_attentions=True).attentions
    assert len(seen) == len(theirs) == 2
    for record, weights in zip(seen, theirs, strict=True):
        torch.testing.assert_close(record.value, weights, rtol=1e-4, atol=2e-6)


def test_output_attentions_for_every_forward():
    model, given = made("Llama", "clearhead"), architectures.tokens(1, 5)
    with pytest.raises(ValueError, match="not supported"):
        model.config.output_attentions = True  # what transformers says
    with hf.output_attentions(model):
        found = run(model, given).attentions
        assert run(model, given, output_attentions=False).attentions is None
    theirs = run(made("Llama", "eager"), given, output_attentions=True).attentions
    for x, y in zip(found, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-6)
    assert run(model, given).attentions is None
    handle = hf.output_attentions(model)
    assert run(model, given).attentions is not None
    handle.close()
    assert run(model, given).attentions is None


def test_a_model_can_be_switched_copied_and_saved(tmp_path):
    model, given = made("Llama", "eager"), architectures.tokens(1, 5)
    expected = run(model, given).logits
    model.set_attn_implementation("clearhead")
    torch.testing.assert_close(run(model, given).logits, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(run(copy.deepcopy(model), given).logits, run(model, given).logits)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="clearhead"
    )
    assert torch.equal(run(loaded, given).logits, run(model, given).logits)


def test_another_name_and_names_that_are_refused():
    hf.register("seen")
    hf.register("seen")
    given = architectures.tokens(1, 5)
    assert torch.equal(
        run(made("Llama", "seen"), given).logits, run(made("Llama", "clearhead"), given).logits
    )
    for name in ("sdpa", "eager", "my_flash", "paged|clearhead", "a/b", ""):
        with pytest.raises(ValueError, match=r"^name: is a word without"):
            hf.register(name)
    with pytest.raises(TypeError, match=r"^name: is a string"):
        hf.register(3)  # type: ignore[arg-type]
    transformers.AttentionInterface.register("somebodys", lambda *args: None)
    with pytest.raises(ValueError, match="is registered already"):
        hf.register("somebodys")


def test_misuse_is_a_clear_error():
    with pytest.raises(ValueError, match="needs an attn_implementation that returns weights"):
        hf.output_attentions(made("Llama", "sdpa"))
    with pytest.raises(TypeError, match=r"^model: is a module"):
        hf.output_attentions("llama")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^model: is a module or its class"):
        hf.unsupported_reasons("llama")  # type: ignore[arg-type]
    from clearhead.integrations.hugging_face.masking import edges_of

    with pytest.raises(ValueError, match=r"^attention_mask: has the axes"):
        edges_of(torch.ones(2, 5), 5)
    with pytest.raises(TypeError, match=r"^attention_mask: is a bool tensor"):
        edges_of(torch.ones(2, 1, 5, 5, dtype=torch.int64), 5)
    with pytest.raises(TypeError, match=r"^attention_mask: is a tensor or None"):
        edges_of([1], 5)
