"""What is known of other libraries: what they mean to do, and what causes a fault."""

from __future__ import annotations

from clearhead.dependence.library.reasons.design import Cause, Design

__all__ = ["CAUSES_OF_FRIENDS", "DESIGNS_OF_FRIENDS"]

_POOLERS = "sentence_transformers/sentence_transformer/modules"
_FAST = (
    "without gradients torch takes its fast path, in which a row that may read no source (padding"
    " on the left of a causal mask) is NaN; the next layer multiplies it by a weight of 0, and all"
    " rows of the sample are NaN; with gradients they are finite"
)
_KERNEL = Cause("torch/nn/modules/activation.py, MultiheadAttention.forward", _FAST)

DESIGNS_OF_FRIENDS = (
    *(
        Design(
            form,
            kind,
            "the processor takes attention_mask for the signature that all of them have, and never"
            " reads it: in the models that it is for every token reads every other, padding too",
            "diffusers/models/transformers/transformer_sd3.py, SD3Transformer2DModel.forward",
            types=("JointAttnProcessor2_0",),
        )
        for form, kind in (
            ("causal", "leak"),
            ("padding", "padding content"),
            ("padding", "padding amount"),
        )
    ),
    *(
        Design(
            "padding",
            kind,
            "it is given lengths, not a mask (pack_padded_sequence): padding is on the right",
            f"{_POOLERS}/lstm.py, LSTM.forward",
            types=("LSTM",),
            detail=detail,
        )
        for kind, detail in (
            ("padding content", "content of the left padding"),
            ("padding amount", "amount of left padding"),
        )
    ),
    *(
        Design(
            form,
            kind,
            "the adapter acts from the last place of its invocation tokens on, which is looked for"
            " in the ids of the call: a later one moves it, documents share it, and a call with a"
            " cache needs alora_offsets, which generate() passes",
            "peft/tuners/lora/variants.py, calculate_alora_offsets",
            types=("aLoRA",),
        )
        for form, kind in (
            ("causal", "leak"),
            ("documents", "documents"),
            ("generation", "cache mask"),
        )
    ),
    Design(
        "padding",
        "padding amount",
        "absolute positions, counted from the first token; with pos= or seq_start_pos= all logits"
        " are equal",
        "x_transformers/x_transformers.py, AbsolutePositionalEmbedding.forward",
        types=("learned positions", "sinusoidal"),
        detail="amount of left padding",
    ),
    Design(
        "padding",
        "padding amount",
        "queries turned by their absolute positions meet memory keys without one; with pos= all"
        " logits are equal",
        "x_transformers/x_transformers.py, Attention.forward",
        types=("memory keys",),
        detail="amount of left padding",
    ),
    Design(
        "padding",
        "padding amount",
        "absolute positions of the encoder: without position_ids they are counted from the first"
        " token, so padding on the left moves them",
        "transformers/models/bert/modeling_bert.py, BertEmbeddings.forward",
        types=("BertModel",),
        detail="amount of left padding",
    ),
)

_PROMPTS = Cause(
    "peft/peft_model.py, PeftModelForCausalLM.forward",
    "the virtual tokens are put before the padding, and positions are counted over it:"
    " position_ids are ignored, with a warning",
)

# (model_type, form, kind) -> cause.
CAUSES_OF_FRIENDS = {
    ("MultiheadAttention", "modes", "modes"): Cause(
        "torch/nn/functional.py, multi_head_attention_forward",
        "with is_causal and no weights requested the mask is dropped for that of"
        " scaled_dot_product_attention, which hides the key that add_bias_kv or add_zero_attn"
        " appends from all queries",
    ),
    ("TransformerEncoder", "padding", "padding amount"): Cause(
        "torch/nn/modules/transformer.py, TransformerEncoderLayer.forward", _FAST
    ),
    ("TransformerDecoder", "padding", "padding amount"): _KERNEL,
    ("Transformer", "padding", "padding amount"): _KERNEL,
    **{
        (kind, "padding", "padding amount"): _PROMPTS
        for kind in ("PrefixTuning", "PromptTuning", "PromptEncoder")
    },
    **{
        ("shift_tokens", "padding", kind): Cause(
            "x_transformers/x_transformers.py, AttentionLayers.forward",
            "the feedforward blocks are called without the mask, so that ShiftTokens moves the"
            " features of padding to the first real token",
        )
        for kind in ("padding content", "padding amount")
    },
    ("max_attend_past", "padding", "padding amount"): Cause(
        "x_transformers/x_transformers.py, Attention.forward",
        "the cross-attention has the limit, too, and counts from the end of what it reads: padding"
        " of either side moves which sources a query may read",
    ),
    **{
        ("CNN", "padding", kind): Cause(
            f"{_POOLERS}/cnn.py, CNN.forward",
            "the attention_mask is not used: the convolution reads the embeddings of padding, which"
            " are zero in WordEmbeddings of a text file alone",
        )
        for kind in ("padding content", "padding amount")
    },
}
