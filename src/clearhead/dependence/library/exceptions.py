"""What the general rules of shrinking get wrong, by type of model and by class."""

from __future__ import annotations

from typing import Any

__all__ = ["CAUSAL", "CONFIGS", "OF_CLASS", "UNBUILDABLE", "VARIANTS", "WHOLE"]

_TWO = ["sliding_attention", "full_attention"]
_SLIDING = {"sliding_window": 8, "layer_types": _TWO}
# The last two layers read the keys of the first two.
_GEMMA4 = {"num_hidden_layers": 4, "layer_types": _TWO * 2, "num_kv_shared_layers": 2} | {
    "global_head_dim": 8
}

# Arguments of a configuration by its model_type, over what shrinking gave.
CONFIGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"block_size": 2, "num_random_blocks": 1},
    "bigbird_pegasus": {"block_size": 2, "num_random_blocks": 1},
    "blt": {"num_hidden_layers": 2, "local_attention_window_len": 8, "patching_threshold": 3.6}
    | {"encoder_hash_byte_group_size": [3, 4]},
    "cohere_compass_text": _SLIDING
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": _SLIDING | {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4_text": _GEMMA4
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
    | {"moe_intermediate_size": 32},
    "gemma4_unified_text": _GEMMA4,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": _SLIDING | {"head_dim": 8},
    "neomme": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0}
            | {"partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "nemotron": {"num_key_value_heads": 2},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"router_hidden_size": 16},
    "cpmant": {"position_bias_num_buckets": 16, "position_bias_max_distance": 64},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "partial_rotary_factor": 0.5,
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 1}
    | {"num_hidden_layers": 3, "layer_types": [*_TWO, "full_attention"]},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "esm": {"vocab_size": 96, "mask_token_id": 94, "pad_token_id": 95},
    "funnel": {"block_sizes": [1, 1, 1], "d_inner": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": _TWO * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "inkling2_text": {"d_rel": 4, "rel_extent": 12, "log_scaling_n_floor": 8}
    | {"unpadded_vocab_size": 96},
    "inkling_text": {"d_rel": 4, "rel_extent": 12, "log_scaling_n_floor": 8},
    "led": {"attention_window": [8, 8]},
    "llama4_text": {"moe_layers": [1], "floor_scale": 4},
    "longformer": {"attention_window": [8, 8]},
    "longt5": {"local_radius": 3, "global_block_size": 4},
    "longcat_flash": {"zero_expert_num": 2, "head_dim": 4, "qk_head_dim": 12},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mobilebert": {"intra_bottleneck_size": 16},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe"]},
    "perceiver": {"num_latents": 16, "max_position_embeddings": 24}
    | {"qk_channels": 32, "v_channels": 32},
    "qwen4_exp_text": {
        "ple_layer_ids": [1],
        "eos_token_id": 95,
        "ngram_vocab_size_base": 96,
        "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": 8,
        "heads_per_ngram": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
        "hc_count": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "hash_seed": 0,
        "axial_pos_shape": [8, 6],
        "axial_pos_embds_dim": [8, 24],
        "num_buckets": 4,
    },
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "xlnet": {"d_inner": 64, "d_head": 8},
    "xlstm": {"num_blocks": 2, "hidden_size": 128, "embedding_dim": 128}
    | {"autocast_kernel_dtype": "float32"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "num_hidden_layers": 4}
    | {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"adapter_rank": 8},
}
# The same in the causal mapping alone: what makes a model of both kinds causal.
CAUSAL: dict[str, dict[str, Any]] = {"xlm": {"causal": True}, "xlnet": {"attn_type": "uni"}}
# The same for one class.
OF_CLASS: dict[str, dict[str, Any]] = {}
_BERT = {"model_type": "bert", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 160,
}
# All arguments of configurations that have no default.
WHOLE: dict[str, dict[str, Any]] = {
    "EncoderDecoderModel": {
        "encoder": _BERT,
        "decoder": _BERT | {"is_decoder": True, "add_cross_attention": True},
    },
}
# Further configurations of a class that reach other branches.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "FalconForCausalLM": {
        "alibi": {"alibi": True},
        "new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    },
    "LongT5ForConditionalGeneration": {"global": {"encoder_attention_type": "transient-global"}},
}
# Classes that cannot be built here, with the reason.
_DRAFTER = "it reads the hidden states and the keys of another model, not tokens"
UNBUILDABLE: dict[str, str] = {
    "Gemma4AssistantForCausalLM": _DRAFTER,
    "Gemma4UnifiedAssistantForCausalLM": _DRAFTER,
    "VoxtralRealtimeForConditionalGeneration": "it adds audio to every token",
    "MraForMaskedLM": "its attention is a CUDA kernel, and returns zeros without one",
}
