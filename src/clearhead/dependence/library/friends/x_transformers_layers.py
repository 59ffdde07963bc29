"""x-transformers: decoder, encoder and both, in the options that change attention."""

from __future__ import annotations

from clearhead.dependence.library.friends.building import Friend

__all__ = ["catalogue"]

SIZES = "dim=32, depth=2, heads=4, attn_dim_head=8, attn_flash='{backend}' == 'sdpa', verbose=False"
# Arguments of the layers, by the name of the variant; those that do not place the tokens in
# another way have rotary positions.
ROTARY = "rotary_pos_emb=True"
LAYERS = {
    "": "",
    "alibi": "alibi_pos_bias=True",
    "relative bias": "rel_pos_bias=True, rel_pos_num_buckets=16, rel_pos_max_distance=32",
    "dynamic bias": "dynamic_pos_bias=True",
    "polar": "polar_pos_emb=True",
    "one_kv_head": "attn_one_kv_head=True",
    "kv_heads": "attn_kv_heads=2",
    "memory keys": "attn_num_mem_kv=3",
    "zero key": "attn_add_zero_kv=True",
    "learned sink": "attn_head_learned_sink=True",
    "talking heads": "attn_pre_talking_heads=True, attn_post_talking_heads=True",
    "sparse_topk": "attn_sparse_topk=5",
    "max_attend_past": "attn_max_attend_past=7",
    "gate_values": "attn_gate_values=True",
    "on_attn": "attn_on_attn=True",
    "qk_norm": "attn_qk_norm=True",
    "l2_distance": "attn_l2_distance=True",
    "sigmoid": "attn_sigmoid=True",
    "laser": "attn_laser=True",
    "softclamp": "attn_softclamp_logits=True",
    "inverted": "attn_inverted_attention=True",
    "residual_attn": "residual_attn=True",
    "value residual": "add_value_residual=True",
    "hyper connections": "num_residual_streams=2",
    "integrate_layers": "integrate_layers=True",
    "shift_tokens": "shift_tokens=1",
    "post norm": "pre_norm=False",
    "sandwich_norm": "sandwich_norm=True",
    "macaron": "macaron=True",
    "latent kv": "attn_use_latent_kv=True, attn_dim_latent_kv=16",
    "unet_skips": "unet_skips=True",
}
CAUSAL = {
    "rotary_xpos": "rotary_xpos=True",
    "cope": "attn_use_cope=True",
    "selective": "attn_selective=True",
    "data-dependent alibi": "attn_data_dependent_alibi=True",
    "shift_tokens of 2": "shift_tokens=2",
}
# Arguments of the wrapper around the layers.
WRAPPERS = {
    "memory tokens": "num_memory_tokens=2",
    "memory tokens between": "num_memory_tokens=2, memory_tokens_interspersed_every=6",
    "sinusoidal": "scaled_sinu_pos_emb=True",
    "l2norm_embed": "l2norm_embed=True",
    "learned positions": "use_abs_pos_emb=True",
    "mixture_of_softmax": "mixture_of_softmax=True",
}
# What else is told apart in encoders.
OF_BOTH = ("", "relative bias", "alibi", "memory keys", "max_attend_past", "shift_tokens", "laser")
# Variants with a reason or a cause of their own, in `reasons`.
TOLD_APART = (
    *("learned positions", "sinusoidal", "memory keys", "max_attend_past"),
    *("shift_tokens", "shift_tokens of 2"),
)
# With a cache it takes many tokens, and answers for the last one: it is asked for single ones.
SINGLE = (20, 1, 1, 1, 1)
MASK = "None if attention_mask is None else attention_mask.bool()"


def catalogue() -> tuple[Friend, ...]:
    """List the models, each in its options."""
    decoders = [("Decoder", one, words, "") for one, words in {**LAYERS, **CAUSAL}.items()]
    decoders += [("Decoder", one, "", words) for one, words in WRAPPERS.items()]
    encoders = [("Encoder", one, words, "") for one, words in LAYERS.items()]
    encoders += [
        ("Encoder", one, "", words) for one, words in WRAPPERS.items() if "every" not in words
    ]
    both = [_both(one, LAYERS[one]) for one in OF_BOTH]
    return (*(_alone(*one) for one in decoders), *(_alone(*one) for one in encoders), *both)


def _alone(kind: str, variant: str, layers: str, wrapper: str) -> Friend:
    causal = kind == "Decoder"
    given = _then(wrapper) + ("" if "pos_emb" in wrapper else ", use_abs_pos_emb=False")
    layers = layers if _placed(layers + wrapper) else f"{ROTARY}{_then(layers)}"
    cache = ", cache=None, use_mems=False" if causal else ""
    run = f"super().forward(input_ids, mask={MASK}"
    answer = (
        f"{{'logits': (y := {run}, cache=cache, input_not_include_cache=True, "
        "return_intermediates=True))[0], **({'cache': y[1]} if use_mems else {})}"
        if causal
        else f"{{'logits': {run})}}"
    )
    lines = (
        "class Model(x_transformers.TransformerWrapper):",
        f"    def forward(self, input_ids, attention_mask=None{cache}):",
        f"        return {answer}",
        f"model = Model(num_tokens=80, max_seq_len=64{given}, "
        f"attn_layers=x_transformers.{kind}({SIZES}{_then(layers)}))",
    )
    return _friend(kind, "causal" if causal else "masked", variant, lines)


def _both(variant: str, layers: str) -> Friend:
    layers = layers if _placed(layers) else f"{ROTARY}{_then(layers)}"

    def layer(kind: str, more: str = "") -> str:
        return (
            "x_transformers.TransformerWrapper(num_tokens=80, max_seq_len=64, use_abs_pos_emb=False"
            f", attn_layers=x_transformers.{kind}({SIZES}{_then(layers)}{more}))"
        )

    arguments = "input_ids, decoder_input_ids, attention_mask=None, decoder_attention_mask=None"
    encoded = f"self.encoder(input_ids, mask=(m := {MASK}), return_embeddings=True)"
    mask = MASK.replace("attention_mask", "decoder_attention_mask")
    lines = (
        "class Model(nn.ModuleDict):",
        f"    def forward(self, {arguments}):",
        f"        return {{'logits': self.decoder(decoder_input_ids, context={encoded}, "
        f"context_mask=m, mask={mask})}}",
        f"model = Model({{'encoder': {layer('Encoder')}, "
        f"'decoder': {layer('Decoder', ', cross_attend=True')}}})",
    )
    return _friend("EncoderDecoder", "encoder-decoder", variant, lines)


def _placed(words: str) -> bool:
    """Whether these arguments say how tokens are placed."""
    return any(one in words for one in ("rotary", "_pos_bias", "polar", "cope", "alibi", "pos_emb"))


def _then(words: str) -> str:
    return f", {words}" if words else ""


def _friend(kind: str, mapping: str, variant: str, lines: tuple[str, ...]) -> Friend:
    name = f"{kind}:{variant}" if variant else kind
    model_type = variant.removesuffix(" of 2") if variant in TOLD_APART else kind
    return Friend(name, mapping, model_type, "x_transformers", lines, ", x_transformers", SINGLE)
