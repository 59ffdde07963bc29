"""Tiny, randomly initialised models of `transformers` and torch, for the tests of watching."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 53


@dataclass(frozen=True)
class Architecture:
    """One kind of model: how to make it small, and what it reads."""

    name: str
    family: str  # decoder, encoder, encoder-decoder, vision, torch
    model: str  # the class in transformers
    config: str
    options: dict[str, Any]
    inputs: str = "tokens"
    backends: tuple[str, ...] = ("sdpa", "eager")
    note: str = ""

    def make(self, backend: str) -> nn.Module:
        """Build the model with weights from a fixed seed."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        config._attn_implementation = backend
        model = getattr(transformers, self.model)(config)
        return sharpened(model).eval()

    def read(self, batch: int = 2, length: int = 11) -> dict[str, Tensor]:
        """Make the model's inputs."""
        return _INPUTS[self.inputs](batch, length)


@torch.no_grad()
def sharpened(model: nn.Module) -> nn.Module:
    """Enlarge weights drawn at the usual 0.02, whose attention is even and tells nothing apart."""
    for parameter in model.parameters():
        if parameter.ndim > 1 and 0 < float(parameter.std()) < 0.05:
            parameter *= 6
    return model


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    some = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(3, VOCAB, (batch, length), generator=some)}


def pair(batch: int, length: int) -> dict[str, Tensor]:
    some = torch.Generator().manual_seed(2)
    target = torch.randint(3, VOCAB, (batch, 7), generator=some)
    return {**tokens(batch, length), "decoder_input_ids": target}


def image(batch: int, length: int) -> dict[str, Tensor]:
    some = torch.Generator().manual_seed(3)
    return {"pixel_values": torch.rand(batch, 3, 16, 16, generator=some)}


def sound(batch: int, length: int) -> dict[str, Tensor]:
    some = torch.Generator().manual_seed(4)
    target = torch.randint(3, VOCAB, (batch, 7), generator=some)
    features = torch.rand(batch, 8, 26, generator=some)
    return {"input_features": features, "decoder_input_ids": target}


def wave(batch: int, length: int) -> dict[str, Tensor]:
    some = torch.Generator().manual_seed(5)
    return {"input_values": torch.rand(batch, 400, generator=some)}


def text_image(batch: int, length: int) -> dict[str, Tensor]:
    return {**tokens(batch, length), **image(batch, length)}


_INPUTS: dict[str, Callable[[int, int], dict[str, Tensor]]] = {
    "tokens": tokens,
    "pair": pair,
    "image": image,
    "sound": sound,
    "wave": wave,
    "text_image": text_image,
}

_MODERN = dict(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_BERT = dict(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=3,
    max_position_embeddings=64,
    pad_token_id=0,
)
_BART = dict(
    vocab_size=VOCAB,
    d_model=24,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=3,
    decoder_attention_heads=3,
    encoder_ffn_dim=40,
    decoder_ffn_dim=40,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
_T5 = dict(
    vocab_size=VOCAB,
    d_model=24,
    d_kv=8,
    d_ff=40,
    num_layers=2,
    num_heads=3,
    pad_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=0,
)
_VIT = dict(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=3,
    image_size=16,
    patch_size=4,
)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


def _decoder(name: str, model: str, config: str, note: str = "", **options: Any) -> Architecture:
    backends = options.pop("backends", ("sdpa", "eager"))
    return Architecture(name, "decoder", model, config, options, "tokens", backends, note)


def _modern(name: str, prefix: str, note: str = "", **options: Any) -> Architecture:
    model = f"{prefix}ForCausalLM"
    config = options.pop("config", f"{prefix}Config")
    return _decoder(name, model, config, note, **{**_MODERN, **options})


# fmt: off
DECODERS = [
    _modern("Llama", "Llama", "grouped heads"),
    _modern("Mistral", "Mistral", "sliding window", sliding_window=5),
    _modern("Mixtral", "Mixtral", "mixture of experts", num_local_experts=4, num_experts_per_tok=2),
    _modern("Qwen2", "Qwen2"),
    _modern("Qwen3", "Qwen3", "normed queries and keys"),
    _modern("Qwen3-MoE", "Qwen3Moe", "mixture of experts", **_MOE),
    _modern("Gemma", "Gemma"),
    _modern(
        "Gemma 2",
        "Gemma2",
        "softcap, sliding layers",
        sliding_window=5,
        query_pre_attn_scalar=4,
        attn_logit_softcapping=2.0,
        backends=("eager",),
    ),
    _modern(
        "Gemma 3", "Gemma3", "sliding layers", sliding_window=5, query_pre_attn_scalar=4,
        layer_types=["sliding_attention", "full_attention"], config="Gemma3TextConfig",
    ),
    _modern(
        "GPT-OSS", "GptOss", "sinks, sliding layers", sliding_window=5, num_local_experts=4,
        num_experts_per_tok=2, backends=("eager",),
    ),
    _modern("Phi", "Phi", num_key_value_heads=6),
    _modern("Phi-3", "Phi3", "fused projection", sliding_window=None),
    _modern("OLMo 2", "Olmo2"),
    _modern("StarCoder 2", "Starcoder2", "sliding window", sliding_window=5),
    _modern("StableLM", "StableLm"),
    _modern("Cohere", "Cohere"),
    _modern("Granite", "Granite", "own scale", attention_multiplier=0.3),
    _modern("SmolLM 3", "SmolLM3", "layers without positions"),
    _modern("Nemotron", "Nemotron"),
    _modern(
        "DeepSeek-V3", "DeepseekV3", "latent attention", num_key_value_heads=6, q_lora_rank=12,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=5, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, n_group=2, topk_group=1,
        first_k_dense_replace=1, n_shared_experts=1,
    ),
    _decoder("GPT-2", "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_embd=24, n_layer=2,
             n_head=3, n_positions=64, bos_token_id=1, eos_token_id=2),
    _decoder("GPT-Neo", "GPTNeoForCausalLM", "GPTNeoConfig", "local layers, no scale",
             vocab_size=VOCAB, hidden_size=24, num_layers=2,
             attention_types=[[["global", "local"], 1]], num_heads=3, window_size=5,
             max_position_embeddings=64, bos_token_id=1,
             eos_token_id=2, backends=("eager",)),
    _decoder("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", "", **_BERT),
    _decoder("GPT-J", "GPTJForCausalLM", "GPTJConfig", vocab_size=VOCAB, n_embd=24, n_layer=2,
             n_head=3, n_positions=64, rotary_dim=4, bos_token_id=1, eos_token_id=2,
             backends=("eager",)),
    _decoder("OPT", "OPTForCausalLM", "OPTConfig", vocab_size=VOCAB, hidden_size=24,
             word_embed_proj_dim=24, ffn_dim=40, num_hidden_layers=2, num_attention_heads=3,
             max_position_embeddings=64, pad_token_id=0),
    _decoder("Bloom", "BloomForCausalLM", "BloomConfig", "ALiBi", vocab_size=VOCAB, hidden_size=24,
             n_layer=2, n_head=3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
             backends=("eager",)),
    _decoder("Falcon", "FalconForCausalLM", "FalconConfig", "one key head", vocab_size=VOCAB,
             hidden_size=24, num_hidden_layers=2, num_attention_heads=3, multi_query=True,
             bos_token_id=1, eos_token_id=2, pad_token_id=0),
    _decoder("MPT", "MptForCausalLM", "MptConfig", "ALiBi", vocab_size=VOCAB, d_model=24,
             n_layers=2, n_heads=3, max_seq_len=64, bos_token_id=1, eos_token_id=2,
             pad_token_id=0, backends=("eager",)),
]

ENCODERS = [
    Architecture("BERT", "encoder", "BertModel", "BertConfig", _BERT),
    Architecture("RoBERTa", "encoder", "RobertaModel", "RobertaConfig", _BERT),
    Architecture(
        "ALBERT", "encoder", "AlbertModel", "AlbertConfig", {**_BERT, "embedding_size": 8},
        note="one module, called for every layer",
    ),
    Architecture(
        "DistilBERT", "encoder", "DistilBertModel", "DistilBertConfig",
        dict(vocab_size=VOCAB, dim=24, hidden_dim=40, n_layers=2, n_heads=3,
             max_position_embeddings=64),
    ),
    Architecture("ELECTRA", "encoder", "ElectraModel", "ElectraConfig",
                 {**_BERT, "embedding_size": 8}),
    Architecture("MPNet", "encoder", "MPNetModel", "MPNetConfig", _BERT, backends=("eager",),
                 note="relative bias"),
    Architecture(
        "DeBERTa v2", "encoder", "DebertaV2Model", "DebertaV2Config",
        {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        backends=("eager",), note="disentangled positions",
    ),
    Architecture(
        "ModernBERT", "encoder", "ModernBertModel", "ModernBertConfig",
        {**_BERT, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1,
         "eos_token_id": 2}, note="local layers",
    ),
    Architecture(
        "wav2vec 2", "encoder", "Wav2Vec2Model", "Wav2Vec2Config",
        dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
             conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2,
             num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2),
        inputs="wave",
    ),
]

PAIRS = [
    Architecture("T5", "encoder-decoder", "T5ForConditionalGeneration", "T5Config", _T5, "pair",
                 note="relative bias"),
    Architecture("UMT5", "encoder-decoder", "UMT5ForConditionalGeneration", "UMT5Config", _T5,
                 "pair", note="relative bias in every layer"),
    Architecture("BART", "encoder-decoder", "BartForConditionalGeneration", "BartConfig", _BART,
                 "pair"),
    Architecture("Marian", "encoder-decoder", "MarianMTModel", "MarianConfig", _BART, "pair"),
    Architecture("PEGASUS", "encoder-decoder", "PegasusForConditionalGeneration", "PegasusConfig",
                 _BART, "pair"),
    Architecture("M2M-100", "encoder-decoder", "M2M100ForConditionalGeneration", "M2M100Config",
                 _BART, "pair"),
    Architecture(
        "Whisper", "encoder-decoder", "WhisperForConditionalGeneration", "WhisperConfig",
        {**_BART, "num_mel_bins": 8, "max_source_positions": 13, "max_target_positions": 32},
        "sound",
    ),
]

VISION = [
    Architecture("ViT", "vision", "ViTModel", "ViTConfig", _VIT, "image"),
    Architecture("DeiT", "vision", "DeiTModel", "DeiTConfig", _VIT, "image"),
    Architecture("DINOv2", "vision", "Dinov2Model", "Dinov2Config", _VIT, "image"),
    Architecture(
        "Swin", "vision", "SwinModel", "SwinConfig",
        dict(image_size=16, patch_size=2, embed_dim=12, depths=[2, 1], num_heads=[2, 3],
             window_size=4), "image", backends=("eager",), note="shifted windows",
    ),
    Architecture(
        "CLIP", "vision", "CLIPModel", "CLIPConfig",
        dict(text_config={**_BERT, "eos_token_id": 2}, vision_config=_VIT, projection_dim=12),
        "text_image", note="text and image towers",
    ),
    Architecture("SigLIP", "vision", "SiglipVisionModel", "SiglipVisionConfig", _VIT, "image",
                 note="attention pooling"),
]
# fmt: on
ALL = [*DECODERS, *ENCODERS, *PAIRS, *VISION]
