"""What the general rules of shrinking get wrong, by type of model and by class."""

from __future__ import annotations

from typing import Any

__all__ = ["CAUSAL", "CONFIGS", "UNBUILDABLE", "VARIANTS", "WHOLE"]

_TWO = ["sliding_attention", "full_attention"]
_SLIDING = {"sliding_window": 8, "layer_types": _TWO}
# The last two layers read the keys of the first two.
_GEMMA4 = {"num_hidden_layers": 4, "layer_types": _TWO * 2, "num_kv_shared_layers": 2} | {
    "global_head_dim": 8
}

_INKLING2 = {"d_rel": 4, "rel_extent": 12, "log_scaling_n_floor": 8} | {
    "unpadded_vocab_size": 96,
    "n_layers_per_attn_res_block": 1,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Scores of heads of 8 that have the usual scale.
_SCALED = {"attention_multiplier": 8**-0.5}

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
            "full_attention": _ROPE | {"mrope_section": [1, 1, 2]},
            "sliding_attention": _ROPE | {"mrope_section": [1, 1, 2]},
        }
    },
    "cpmant": {"init_std": 0.02, "position_bias_num_buckets": 16, "position_bias_max_distance": 64},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
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
    "doge": {"sliding_window": 8},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 1}
    | {"num_hidden_layers": 3, "layer_types": [*_TWO, "full_attention"]},
    "dots1": _SLIDING | {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
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
    "gemma4_text": _GEMMA4
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
    | {"moe_intermediate_size": 32},
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite": _SCALED,
    "granite_swa": _SCALED,
    "granitemoe": _SCALED,
    "granitemoe_swa": _SCALED,
    "granitemoehybrid": _SCALED | {"layer_types": ["mamba", "attention"]},
    "granitemoeshared": _SCALED,
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "inkling2_loop_text": _INKLING2
    | {
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    "inkling2_text": _INKLING2,
    "inkling_text": {"d_rel": 4, "rel_extent": 12, "log_scaling_n_floor": 8},
    "laguna": _SLIDING,
    "led": {"attention_window": [8, 8]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"moe_layers": [1], "floor_scale": 4},
    "longcat_flash": {"zero_expert_num": 2, "head_dim": 4, "qk_head_dim": 12},
    "longformer": {"attention_window": [8, 8]},
    "longt5": {"local_radius": 3, "global_block_size": 4},
    "mamba2": {"num_heads": 8},
    "mellum": _SLIDING | {"mlp_layer_types": ["dense", "sparse"]},
    "minimax": {"sliding_window": 8},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2}
    | {"layer_types": ["full_attention", "minimax_m3_sparse"]}
    | {"mlp_layer_types": ["dense", "sparse"]},
    "ministral": _SLIDING | {"head_dim": 8},
    "ministral3": {"sliding_window": 8},
    "mixtral": {"sliding_window": 8},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mobilebert": {"intra_bottleneck_size": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe"]},
    "neomme": {
        "rope_parameters": {
            "full_attention": _ROPE | {"partial_rotary_factor": 0.5},
            "sliding_attention": _ROPE,
        }
    },
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "perceiver": {"num_latents": 16, "max_position_embeddings": 24}
    | {"qk_channels": 32, "v_channels": 32},
    "phi3": {"sliding_window": 8},
    "phi4_multimodal": {"sliding_window": 8},
    "phimoe": {"sliding_window": 8},
    "qwen4_exp_text": {
        "ple_layer_ids": [1],
        "eos_token_id": 95,
        "ngram_vocab_size_base": 96,
        "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": 8,
        "heads_per_ngram": 2,
        "indexer_n_heads": 32,
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
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "starcoder2": {"sliding_window": 8},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "xlnet": {"d_inner": 64, "d_head": 8},
    "xlstm": {"num_blocks": 2, "hidden_size": 128, "embedding_dim": 128}
    | {"autocast_kernel_dtype": "float32"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "num_hidden_layers": 4}
    | {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"adapter_rank": 8},
    "zaya": {"router_hidden_size": 16, "sliding_window": 8}
    | {"layer_types": ["hybrid_sliding", "hybrid"]},
}
# The same in the causal mapping alone: what makes a model of both kinds causal.
CAUSAL: dict[str, dict[str, Any]] = {"xlm": {"causal": True}, "xlnet": {"attn_type": "uni"}}
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
    "DogeForCausalLM": {"moe": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}},
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
