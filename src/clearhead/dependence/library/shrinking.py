"""A configuration of a few thousand weights from the default one of any class of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clearhead.dependence.library.exceptions import CONFIGS

__all__ = ["VOCABULARY", "merged", "shrunk"]

# All embeddings have 96 rows; special ids take the last of them, the audit draws from the others.
VOCAB, VOCABULARY = 96, 80
# Positions that a learned table holds. Some models count from behind the id of padding.
POSITIONS = 160
# At most this many layers are kept: two, and more where there are more types of layer.
MOST_LAYERS = 4

DEPTHS = (
    "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth "
    "num_encoder_layers num_decoder_layers speech_encoder_layers t2u_encoder_layers "
    "t2u_decoder_layers conf_num_hidden_layers num_self_attends_per_block"
)
SIZES = {
    1: "topk_group num_shared_experts n_shared_experts moe_num_shared_experts "
    "first_k_dense_replace num_dense_layers num_hash_layers num_mtp_layers "
    "num_nextn_predict_layers attn_layer_offset expert_layer_offset num_kv_shared_layers",
    2: "num_experts_per_tok moe_topk moe_top_k moe_k top_k_experts n_group o_groups "
    "mamba_n_groups mamba_ngroups n_groups linear_num_key_heads attn_layer_period "
    "expert_layer_period global_attn_every_n_layers num_codebooks hc_mult num_random_blocks "
    "lsh_num_hashes num_channels_multiplier moe_layer_interval n_mamba_heads",
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads attention_heads "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "t2u_encoder_attention_heads t2u_decoder_attention_heads speech_encoder_attention_heads "
    "num_self_attention_heads num_cross_attention_heads swa_num_attention_heads "
    "conf_num_attention_heads linear_num_value_heads linear_num_heads qk_rope_head_dim "
    "num_experts n_routed_experts num_local_experts moe_num_experts rotary_dim "
    "mamba_dt_rank time_step_rank index_topk block_size",
    8: "head_dim v_head_dim qk_nope_head_dim d_kv dim_head attention_head_size kv_channels d_head "
    "attention_head_dim swa_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
    "mamba_d_state state_size ssm_state_size mamba_d_head mamba_head_dim mamba_n_heads "
    "mamba_num_heads conv_dim index_head_dim indexer_head_dim hidden_size_per_layer_input "
    "sliding_window sliding_window_size window_size local_attention attention_window "
    "attention_window_size attention_chunk_size chunk_size mamba_chunk_size "
    "query_pre_attn_scalar laurel_rank gated_norm_rank lsh_attn_chunk_length "
    "local_attn_chunk_length keep_window_size embedding_rank prompt_length prompt_types "
    "segment_types",
    16: "q_lora_rank kv_lora_rank o_lora_rank moe_latent_size num_conv_pos_embeddings "
    "moe_layer_size num_mel_bins image_size prompt_mid_dim num_position_embeddings",
    # Indexers add up ReLUs over their heads: with few heads many scores are 0, and ties are broken
    # by the length of the row.
    32: "index_n_heads indexer_n_heads "
    "hidden_size d_model n_embd dim emb_dim embedding_size embed_dim word_embed_proj_dim "
    "cross_attention_hidden_size text_hidden_size lru_width hidden_size_global hidden_dim "
    "attention_hidden_size backbone_hidden_size output_hidden_size moe_intermediate_size "
    "shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "out_hidden_size moe_shared_expert_intermediate_size input_embedding_size projection_dim "
    "output_dim d_latents audio_hidden_size nemo_conv_channels ext_pw_out_channel "
    "output_channels depthwise_separable_out_channel downsample_hidden_size encoder_hidden_size "
    "embedding_dim context_size entity_emb_size input_size",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner dim_ff dff "
    "ffn_hidden_size dense_intermediate_size intermediate_size_mlp feed_forward_size "
    "t2u_encoder_ffn_dim t2u_decoder_ffn_dim speech_encoder_intermediate_size mamba_d_ssm "
    "mlp_dim prefix_dense_intermediate_size shared_experts_intermediate_size "
    "mamba_intermediate_size",
    POSITIONS: "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions "
    "max_target_positions max_encoder_position_embeddings max_decoder_position_embeddings "
    "t2u_max_position_embeddings max_2d_position_embeddings",
    VOCAB: "entity_vocab_size encoder_hash_byte_group_vocab",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}


def shrunk(config: Any, ids: dict[str, int] | None = None) -> dict[str, Any]:
    """Give the arguments that make the class of a configuration tiny, sub-configurations too.

    Special tokens get the ids behind the vocabulary that the audit draws from; `ids` holds those
    that are taken.
    """
    ids = {} if ids is None else ids
    kept = kept_layers(config)
    # What encloses a configuration may give it other values than its class does.
    plain = dict(_fields(type(config)()))
    values = {
        name: small
        for name, value in _fields(config)
        if (small := _smaller(name, value, kept, config, ids)) != plain.get(name)
    }
    for name, kind in _sub_kinds(config).items():
        if (inner := getattr(config, name, None)) is not None and not isinstance(inner, dict):
            values[name] = shrunk(inner, ids)
            if kind.__name__ == "AutoConfig":
                values[name]["model_type"] = inner.model_type
    if {"use_sliding_window", "layer_types"} <= vars(config).keys():
        values |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
        values["layer_types"] = ["full_attention", "sliding_attention"]
    if "scale_embedding" in vars(config):
        # Beside positions of another scale, tokens would hardly count.
        values["scale_embedding"] = True
    return merged(values, CONFIGS.get(config.model_type, {}))


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Give the values with changes; a dict among the changes is merged into the one it changes."""
    result = dict(values)
    for name, change in changes.items():
        old = result.get(name)
        both = isinstance(old, dict) and isinstance(change, dict)
        result[name] = merged(old, change) if both else change  # type: ignore[arg-type]
    return result


def _sub_kinds(config: Any) -> dict[str, Any]:
    return dict(getattr(type(config), "sub_configs", None) or {})


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    inner = _sub_kinds(config)
    # Not by getattr, which refuses what varies by layer.
    other, values = type(config).attribute_map, vars(config)
    for name in getattr(type(config), "__dataclass_fields__", {}):
        if name not in inner and other.get(name, name) in values:
            yield name, values[other.get(name, name)]


def kept_layers(config: Any) -> dict[int, list[int]]:
    """For each number of layers, which are kept: the first of every type, two at least."""
    depths = {value for name, value in _fields(config) if name in DEPTHS.split()}
    counts = {depth for depth in depths if type(depth) is int and depth > 0}
    return {count: _first_of_types(config, count) for count in counts}


def _first_of_types(config: Any, count: int) -> list[int]:
    lists = [v for _, v in _fields(config) if isinstance(v, (list, tuple)) and len(v) == count]
    kept: list[int] = []
    seen: set[str] = set()
    for layer in range(count):
        kinds = {f"{n} {values[layer]!r}" for n, values in enumerate(lists)}
        if kinds - seen and len(kept) < MOST_LAYERS:
            kept.append(layer)
            seen |= kinds
    rest = [layer for layer in range(count) if layer not in kept]
    return sorted(kept + rest[: max(0, 2 - len(kept))])


def _smaller(
    name: str, value: Any, kept: dict[int, list[int]], config: Any, ids: dict[str, int]
) -> Any:
    if isinstance(value, (list, tuple)) and len(value) in kept and len(value) > 1:
        return [_number(name, value[layer], config) for layer in kept[len(value)]]
    if name in DEPTHS.split() and value in kept:
        return len(kept[value])
    if name.endswith(("_token_id", "_token_index")) and _is_id(value):
        return ids.setdefault(name, max(VOCABULARY, VOCAB - 1 - len(ids)))
    if isinstance(value, (list, tuple)) and name in SMALL:
        return [_number(name, one, config) for one in value]
    return _number(name, value, config)


def _is_id(value: Any) -> bool:
    return isinstance(value, list) or (type(value) is int and value >= 0)


def _number(name: str, value: Any, config: Any) -> Any:
    """Make one number small by the name of its field."""
    if type(value) is not int:
        return value
    if name == "vocab_size" or ("vocab_size" in name and value > VOCAB):
        return VOCAB
    if name.endswith(("num_key_value_heads", "num_kv_heads", "kv_n_heads")):
        heads = vars(config).get(name.replace("key_value", "attention"))
        return 4 if value == heads else min(value, 2)
    if name == "head_dim" and value == vars(config).get("qk_rope_head_dim"):
        name = "qk_rope_head_dim"
    return min(value, SMALL.get(name, value))
