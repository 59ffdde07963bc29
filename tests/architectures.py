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
    family: str  # decoder, hybrid, encoder, encoder-decoder, vision
    model: str  # the class in transformers
    config: str
    options: dict[str, Any]
    inputs: str = "tokens"
    backends: tuple[str, ...] = ("sdpa", "eager")
    note: str = ""
    beside: str = "$^"  # modules whose maps the model makes, and eager does not hand out
    unseen: str = "$^"  # modules that mix positions without attention

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
        if parameter.ndim > 1 < parameter.numel() and 0 < float(parameter.std()) < 0.05:
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


def pictured(batch: int, length: int, patches: int = 4) -> dict[str, Tensor]:
    """Text with places for the patches of one image a sample."""
    ids = tokens(batch, length)["input_ids"] % 40 + 3
    ids[:, 1 : 1 + patches] = 52
    return {"input_ids": ids, **image(batch, length)}


def prefixed(batch: int, length: int) -> dict[str, Tensor]:
    """The same, all of it a prefix; without that the model's own backends disagree."""
    given = pictured(batch, 21, 16)
    return {**given, "token_type_ids": torch.zeros_like(given["input_ids"])}


def grid(batch: int, length: int) -> dict[str, Tensor]:
    """The same for models that take all patches of all images in one row."""
    ids = pictured(batch, length)["input_ids"]
    patches = torch.rand(batch * 16, 48, generator=torch.Generator().manual_seed(6))
    sizes = torch.tensor([[1, 4, 4]] * batch)
    kinds = (ids == 52).int()
    return {"input_ids": ids, "pixel_values": patches, "image_grid_thw": sizes,
            "mm_token_type_ids": kinds}  # fmt: skip


def tiles(batch: int, length: int) -> dict[str, Tensor]:
    """The same for models that take several tiles of each image."""
    given = pictured(batch, length)
    return {**given, "pixel_values": given["pixel_values"][:, None]}


def array(batch: int, length: int) -> dict[str, Tensor]:
    return {"inputs": torch.rand(batch, length, 24, generator=torch.Generator().manual_seed(7))}


def text_image(batch: int, length: int) -> dict[str, Tensor]:
    return {**tokens(batch, length), **image(batch, length)}


_INPUTS: dict[str, Callable[[int, int], dict[str, Tensor]]] = {
    "tokens": tokens,
    "pair": pair,
    "image": image,
    "sound": sound,
    "wave": wave,
    "text_image": text_image,
    "pictured": pictured,
    "sixteen": lambda batch, length: pictured(batch, 21, 16),
    "prefixed": prefixed,
    "grid": grid,
    "tiles": tiles,
    "array": array,
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
        beside=r"layers\.0\.blocks\.0\b",  # the last map of each stage is handed out
    ),
    Architecture(
        "CLIP", "vision", "CLIPModel", "CLIPConfig",
        dict(text_config={**_BERT, "eos_token_id": 2}, vision_config=_VIT, projection_dim=12),
        "text_image", note="text and image towers",
    ),
    Architecture("SigLIP", "vision", "SiglipVisionModel", "SiglipVisionConfig", _VIT, "image",
                 note="attention pooling", beside=r"head\.attention"),
]
# More of each kind, of which one backend is tested in full.
_HYBRID = dict(mamba_n_heads=6, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
               mamba_chunk_size=8)


def _hybrid(name: str, prefix: str, unseen: str, note: str, **options: Any) -> Architecture:
    return Architecture(name, "hybrid", f"{prefix}ForCausalLM", f"{prefix}Config",
                        {**_MODERN, **options}, note=note, unseen=unseen)


MORE = [
    _modern("Llama 4", "Llama4", "chunked layers", config="Llama4TextConfig", num_local_experts=2,
            num_experts_per_tok=1, intermediate_size_mlp=40, attention_chunk_size=5,
            no_rope_layers=[1, 0]),
    _modern("GLM-4", "Glm4"),
    _modern("OLMo 3", "Olmo3", "sliding layers", sliding_window=5),
    _modern("OLMoE", "Olmoe", "mixture of experts", num_experts=4, num_experts_per_tok=2),
    _modern("Cohere 2", "Cohere2", "sliding layers", sliding_window=5),
    _modern("EXAONE 4", "Exaone4", "sliding layers", sliding_window=5, sliding_window_pattern=2),
    _modern("ERNIE 4.5", "Ernie4_5"),
    _modern("Gemma 3n", "Gemma3n", "sliding layers", config="Gemma3nTextConfig",
            vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=4,
            num_kv_shared_layers=0, laurel_rank=4, altup_num_inputs=2, sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            activation_sparsity_pattern=[0.0, 0.0], intermediate_size=[40, 40]),
    _decoder("XGLM", "XGLMForCausalLM", "XGLMConfig", vocab_size=VOCAB, d_model=24, ffn_dim=40,
             num_layers=2, attention_heads=3, backends=("eager",)),
    _decoder("CodeGen", "CodeGenForCausalLM", "CodeGenConfig", vocab_size=VOCAB, n_embd=32,
             n_layer=2, n_head=4, n_positions=64, n_ctx=64, rotary_dim=4),
    _decoder("GPT-BigCode", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", "one key head",
             vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=3, n_positions=64),
    _decoder("CTRL", "CTRLLMHeadModel", "CTRLConfig", vocab_size=VOCAB, n_embd=24, n_layer=2,
             n_head=3, dff=40, n_positions=64),
    _hybrid("Jamba", "Jamba", r"layers\.0", "state space layers", attn_layer_period=2,
            attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=0, num_experts=2,
            num_experts_per_tok=1, use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4),
    _hybrid("Bamba", "Bamba", r"layers\.0\.mamba", "state space layers", attn_layer_indices=[1],
            mamba_expand=2, **_HYBRID),
    _hybrid("Zamba 2", "Zamba2", r"layers\.(0|2|1\.mamba_decoder)", "shared attention",
            num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "mamba"], mamba_d_state=8,
            mamba_headdim=8, n_mamba_heads=6, mamba_ngroups=1, chunk_size=8, num_mem_blocks=1,
            use_mem_rope=True, num_key_value_heads=6, adapter_rank=4),
    _hybrid("Falcon-H1", "FalconH1", r"layers\.[01]\.mamba", "state space beside attention",
            mamba_d_ssm=48, **_HYBRID),
    _hybrid("Nemotron-H", "NemotronH", r"layers\.0\.mixer", "state space layers",
            num_hidden_layers=3, hybrid_override_pattern="M*-", mamba_num_heads=6,
            mamba_head_dim=8, ssm_state_size=8, n_groups=1, chunk_size=8),
    _hybrid("Qwen3-Next", "Qwen3Next", r"layers\.0\.linear_attn", "linear attention layers",
            layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
            linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
            linear_conv_kernel_dim=2, shared_expert_intermediate_size=16,
            partial_rotary_factor=0.5, **_MOE),
    _hybrid("RecurrentGemma", "RecurrentGemma", r"layers\.[01]\.temporal_block",
            "recurrent layers", num_hidden_layers=3, lru_width=24, attention_window_size=5,
            block_types=["recurrent", "recurrent", "attention"], num_key_value_heads=1,
            conv1d_width=2),
    _hybrid("LFM2", "Lfm2", r"layers\.0\.conv", "convolution layers",
            layer_types=["conv", "full_attention"]),
    Architecture("XLNet", "encoder", "XLNetModel", "XLNetConfig",
                 dict(vocab_size=VOCAB, d_model=24, n_layer=2, n_head=3, d_inner=40),
                 backends=("eager",), note="relative positions, by einsum"),
    Architecture("DeBERTa", "encoder", "DebertaModel", "DebertaConfig",
                 {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
                 backends=("eager",), note="disentangled positions"),
    Architecture("RoFormer", "encoder", "RoFormerModel", "RoFormerConfig", _BERT,
                 backends=("eager",)),
    Architecture("Funnel", "encoder", "FunnelModel", "FunnelConfig",
                 dict(vocab_size=VOCAB, d_model=24, n_head=3, d_head=8, d_inner=40,
                      block_sizes=[1, 1], num_decoder_layers=1), backends=("eager",),
                 note="pooled queries"),
    Architecture("ESM", "encoder", "EsmModel", "EsmConfig",
                 {**_BERT, "position_embedding_type": "rotary"}),
    Architecture("BigBird", "encoder", "BigBirdModel", "BigBirdConfig",
                 {**_BERT, "attention_type": "original_full"}, backends=("eager",),
                 note="its sparse form is named, not seen"),
    Architecture(
        "HuBERT", "encoder", "HubertModel", "HubertConfig",
        dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
             conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2,
             num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2), inputs="wave",
    ),
    Architecture(
        "Perceiver", "encoder", "PerceiverModel", "PerceiverConfig",
        dict(d_model=24, d_latents=24, num_latents=5, num_blocks=1, num_self_attends_per_block=2,
             num_self_attention_heads=3, num_cross_attention_heads=3, qk_channels=24,
             v_channels=24), inputs="array", backends=("eager",), note="latent queries",
        beside="cross_attention",
    ),
    Architecture("mBART", "encoder-decoder", "MBartForConditionalGeneration", "MBartConfig", _BART,
                 "pair"),
    Architecture(
        "T5Gemma", "encoder-decoder", "T5GemmaForConditionalGeneration", "T5GemmaConfig",
        dict(encoder={**_MODERN, "sliding_window": 5, "query_pre_attn_scalar": 4},
             decoder={**_MODERN, "sliding_window": 5, "query_pre_attn_scalar": 4},
             vocab_size=VOCAB), "pair", backends=("eager",), note="sliding layers",
    ),
    Architecture("BEiT", "vision", "BeitModel", "BeitConfig",
                 {**_VIT, "use_relative_position_bias": True}, "image", note="relative bias"),
    Architecture("DINOv3", "vision", "DINOv3ViTModel", "DINOv3ViTConfig", _VIT, "image"),
    Architecture("YOLOS", "vision", "YolosModel", "YolosConfig",
                 {**_VIT, "image_size": [16, 16], "num_detection_tokens": 3}, "image"),
    Architecture(
        "SegFormer", "vision", "SegformerModel", "SegformerConfig",
        dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 12],
             patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[2, 3], mlp_ratios=[2, 2]),
        "image", note="fewer sources than queries",
    ),
    Architecture("ViTDet", "vision", "VitDetModel", "VitDetConfig",
                 {**_VIT, "window_size": 2, "window_block_indices": [0]}, "image",
                 backends=("eager",), note="windows; heads folded into the batch, as in SAM"),
    Architecture(
        "DETR", "vision", "DetrModel", "DetrConfig",
        dict(use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=dict(
            model_type="resnet", embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1],
            layer_type="basic", out_features=["stage4"]), d_model=24, encoder_layers=1,
            decoder_layers=1, encoder_attention_heads=3, decoder_attention_heads=3,
            encoder_ffn_dim=40, decoder_ffn_dim=40, num_queries=5), "image",
        backends=("eager",), note="object queries",
    ),
    Architecture(
        "Gemma 3, images", "vision", "Gemma3ForConditionalGeneration", "Gemma3Config",
        dict(text_config={**_MODERN, "sliding_window": 5, "query_pre_attn_scalar": 4,
                          "layer_types": ["sliding_attention", "full_attention"]},
             vision_config=_VIT, mm_tokens_per_image=4, image_token_index=52, boi_token_index=51,
             eoi_token_index=50), "pictured", note="image and text", beside="vision_tower",
    ),
    Architecture(
        "LLaVA", "vision", "LlavaForConditionalGeneration", "LlavaConfig",
        dict(text_config={**_MODERN, "model_type": "llama"}, image_token_index=52,
             vision_config={**_VIT, "model_type": "clip_vision_model"}, vision_feature_layer=-1),
        "sixteen", note="image and text", beside="vision_tower",
    ),
    Architecture(
        "PaliGemma", "vision", "PaliGemmaForConditionalGeneration", "PaliGemmaConfig",
        dict(text_config={**_MODERN, "model_type": "gemma"}, image_token_index=52,
             vision_config={**_VIT, "model_type": "siglip_vision_model"}, projection_dim=24),
        "prefixed", note="image and text", beside="vision_tower",
    ),
    Architecture(
        "Qwen2-VL", "vision", "Qwen2VLForConditionalGeneration", "Qwen2VLConfig",
        dict(text_config={**_MODERN, "rope_parameters": {
                 "rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}},
             vision_config=dict(depth=2, embed_dim=16, hidden_size=24, num_heads=2, mlp_ratio=2,
                                patch_size=4, spatial_merge_size=2, temporal_patch_size=1),
             image_token_id=52, vision_start_token_id=51), "grid", note="one call an image",
        beside="visual",
    ),
    Architecture(
        "Idefics 3", "vision", "Idefics3ForConditionalGeneration", "Idefics3Config",
        dict(text_config={**_MODERN, "model_type": "llama"}, vision_config=_VIT,
             image_token_id=52, scale_factor=2), "tiles", note="image and text",
        beside="vision_model",
    ),
]
# fmt: on
ALL = [*DECODERS, *ENCODERS, *PAIRS, *VISION, *MORE]
