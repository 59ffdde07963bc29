"""The leaks that transformers 5.17.0 shipped, found and placed (`make old`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from clearhead.dependence import audit

assert transformers.__version__ == "5.17.0", "run this by `make old`"
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, sep_token_id=3,
)  # fmt: skip
DECODER = SMALL | dict(is_decoder=True)
OLD = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
LEAKY = {
    "RoFormer": DECODER,
    "BigBird": DECODER | dict(attention_type="original_full"),
    "RemBert": DECODER | dict(input_embedding_size=32, output_embedding_size=32),
    "MegatronBert": DECODER,
}
PLACES = {
    "RoFormer": "roformer.encoder.layer.0.attention.self",
    "BigBird": "bert.encoder.layer.0.attention.self",
    "RemBert": "rembert.encoder.layer.0.attention.self",
    "MegatronBert": "bert.encoder.layer.0.attention.self",
}
SOUND: dict[str, dict[str, Any]] = {
    "Llama": SMALL, "Qwen2": SMALL, "Qwen3": SMALL, "Gemma": SMALL, "Phi": SMALL, "Phi3": SMALL,
    "Mistral": SMALL | dict(sliding_window=4), "Gemma2": SMALL | dict(sliding_window=4),
    "GPT2": OLD | dict(n_positions=64), "Bloom": SMALL | dict(n_layer=2, n_head=4),
    "OPT": SMALL | dict(ffn_dim=48, word_embed_proj_dim=32), "Olmo2": SMALL, "Cohere": SMALL,
    "Granite": SMALL, "GPTNeoX": SMALL,
    "StableLm": SMALL, "Mixtral": SMALL | dict(num_local_experts=4),
    "Qwen3Moe": SMALL | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def model(name: str, settings: dict[str, Any], dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    made = transformers.AutoModelForCausalLM.from_config(config, **options)
    return made.eval().to(dtype)


def inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(4, 61, (2, 12), generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LEAKY)
def test_decoders_that_see_the_future(name, dtype):
    report = audit(model(name, LEAKY[name], dtype), inputs())
    assert not report.ok
    assert {finding.module for finding in report.findings} == {PLACES[name]}
    assert all(finding.source > finding.query for finding in report.findings)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_doge_leaks_on_one_backend_only(backend, dtype):
    settings = SMALL | dict(keep_window_size=4)
    report = audit(model("Doge", settings, dtype, attn_implementation=backend), inputs())
    assert report.ok == (backend == "eager"), report
    assert {finding.module for finding in report.findings} <= {"model.layers.0.self_attn"}


def test_doge_contradicts_itself():
    settings = SMALL | dict(keep_window_size=4)
    doge = model("Doge", settings, torch.float32, attn_implementation="sdpa")
    report = audit.modes(doge, inputs())
    assert "eager" in {finding.kind for finding in report.findings}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SOUND)
def test_sound_models_pass(name, dtype):
    if name in ("Mixtral", "Qwen3Moe") and dtype == torch.float64:
        pytest.skip("grouped experts have no float64")
    report = audit(model(name, SOUND[name], dtype), inputs())
    assert report.ok, report
    assert report.covered == 1
