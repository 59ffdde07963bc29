"""What a class does on purpose: a named reason, and where its code or documentation says so."""

from __future__ import annotations

from clearhead.dependence.library.reasons.design import Design
from clearhead.dependence.library.reasons.friends import DESIGNS_OF_FRIENDS
from clearhead.dependence.library.runs.evidence import POSITIONS

__all__ = ["DESIGNS", "design_of"]


_MODELS = "transformers/models"
_COUNTED = (
    "positions are counted from the token ids, where every id but that of padding is a token: other"
    " content moves the positions behind it; "
)
_LEFT_AMOUNT, _LEFT_CONTENT = "amount of left padding", "content of the left padding"

DESIGNS = (
    Design(
        "padding",
        "padding amount",
        "absolute positions: without position_ids they are counted from the first token, so padding"
        " on the left moves them; with position_ids counted from the mask all logits are equal",
        "transformers/generation/utils.py, GenerationMixin._prepare_position_ids_for_generation",
        evidence=POSITIONS,
        detail=_LEFT_AMOUNT,
    ),
    Design(
        "padding",
        "padding amount",
        "absolute positions: they are counted from the first token, and the class takes no"
        " position_ids; it is made for padding on the right",
        f"{_MODELS}/bart/modeling_bart.py, BartLearnedPositionalEmbedding.forward (and its like)",
        types=(
            *("bart", "mbart", "mvp", "plbart", "blenderbot", "blenderbot-small", "pegasus"),
            *("pegasus_x", "bigbird_pegasus", "marian", "led", "trocr", "whisper"),
            *("encoder-decoder", "ctrl"),
        ),
        detail=_LEFT_AMOUNT,
    ),
    Design(
        "padding",
        "padding content",
        f"{_COUNTED}with position_ids all logits are equal",
        f"{_MODELS}/roberta/modeling_roberta.py,"
        " RobertaEmbeddings.create_position_ids_from_input_ids (and its copies)",
        evidence=POSITIONS,
        detail=_LEFT_CONTENT,
    ),
    Design(
        "padding",
        "padding content",
        f"{_COUNTED}the class takes no position_ids",
        f"{_MODELS}/m2m_100/modeling_m2m_100.py,"
        " M2M100SinusoidalPositionalEmbedding.create_position_ids_from_input_ids (and its copies)",
        types=("m2m_100", "nllb-moe", "seamless_m4t", "seamless_m4t_v2"),
        detail=_LEFT_CONTENT,
    ),
    Design(
        "padding",
        "padding content",
        f"{_COUNTED}so it is in the encoder",
        f"{_MODELS}/fsmt/modeling_fsmt.py, SinusoidalPositionalEmbedding.make_positions",
        types=("fsmt",),
        detail=f"{_LEFT_CONTENT} of the encoder",
    ),
    *(
        Design(
            "padding",
            kind,
            "the class uses no padding mask, and warns: `attention_mask` was passed, but it is"
            " unused in this model",
            f"{_MODELS}/rwkv/modeling_rwkv.py, RwkvModel.forward",
            types=("rwkv",),
        )
        for kind in ("padding content", "padding amount")
    ),
    *(
        Design(
            "padding",
            kind,
            "the class uses no padding mask (its attention_mask is a dummy parameter for"
            " pipelines): padding is the token 0, on the left",
            f"{_MODELS}/cpmant/modeling_cpmant.py, CpmAntForCausalLM.forward",
            types=("cpmant",),
        )
        for kind in ("padding content", "padding amount")
    ),
    Design(
        "generation",
        "cache mask",
        "with a cache the class takes all input_ids and cuts off the cached ones itself: it is not"
        " called with new tokens alone",
        f"{_MODELS}/cpmant/modeling_cpmant.py, CpmAntForCausalLM.prepare_inputs_for_generation",
        types=("cpmant",),
    ),
    *(
        Design(
            "padding",
            kind,
            "trigram input: the embeddings of the tokens before and after are part of each token's",
            f"{_MODELS}/mobilebert/modeling_mobilebert.py, MobileBertEmbeddings.forward",
            types=("mobilebert",),
        )
        for kind in ("padding content", "padding amount")
    ),
    Design(
        "padding",
        "padding amount",
        "block-sparse attention: the global, the last and the random blocks of a row depend on its"
        " length, padding included",
        f"{_MODELS}/big_bird/modeling_big_bird.py,"
        " BigBirdBlockSparseAttention.bigbird_block_sparse_attention",
        types=("big_bird", "bigbird_pegasus"),
    ),
    Design(
        "padding",
        "padding amount",
        "absolute positions: the encoder counts them from the first token, and takes none",
        f"{_MODELS}/prophetnet/modeling_prophetnet.py, ProphetNetEncoder.forward",
        types=("prophetnet",),
        detail=f"{_LEFT_AMOUNT} of the encoder",
    ),
    Design(
        "padding",
        "padding amount",
        "global tokens are sums over fixed blocks of the row, which padding on the left shifts",
        f"{_MODELS}/longt5/modeling_longt5.py, _make_global_fixed_block_ids",
        types=("longt5",),
        detail=f"{_LEFT_AMOUNT} of the encoder",
    ),
    Design(
        "modes",
        "modes",
        "block-sparse attention draws its random blocks in training alone",
        f"{_MODELS}/big_bird/modeling_big_bird.py,"
        " BigBirdBlockSparseAttention._bigbird_block_rand_mask",
        types=("big_bird", "bigbird_pegasus"),
        detail="train",
    ),
    *(
        Design(
            form,
            kind,
            "LSH attention: tokens are sorted by the hash of their vectors and cut into chunks:"
            " which earlier tokens are in the chunk of a query depends on all tokens of the row",
            f"{_MODELS}/reformer/modeling_reformer.py,"
            " LSHSelfAttention._get_sorted_bucket_idx_and_undo_sorted_bucket_idx",
            types=("reformer",),
        )
        for form, kind in (
            ("causal", "leak"),
            ("padding", "padding content"),
            ("padding", "padding amount"),
            ("documents", "documents"),
            ("generation", "cache mask"),
        )
    ),
    Design(
        "batch",
        "batch",
        "the rows of input_ids are the codebooks of one sample",
        f"{_MODELS}/musicgen/modeling_musicgen.py, MusicgenDecoder.forward",
        types=("musicgen_decoder", "musicgen_melody_decoder"),
    ),
    Design(
        "documents",
        "carried state",
        "the convolution and the recurrence are told the documents by cu_seq_lens_q or seq_idx;"
        " position_ids tell the attention layers alone",
        "transformers/data/data_collator.py, DataCollatorWithFlattening (return_seq_idx)",
        types=(
            *("bamba", "falcon_h1", "granitemoehybrid", "inkling_text", "inkling2_text"),
            *("inkling2_loop_text", "lara_mini", "nemotron_h", "olmo_hybrid", "qwen3_5_text"),
            *("qwen3_5_moe_text", "qwen3_next", "zamba", "zamba2"),
        ),
    ),
    Design(
        "documents",
        "carried state",
        "a state runs over packed documents: the layer takes no argument that says where they"
        " begin; position_ids tell the attention layers alone",
        "transformers/masking_utils.py, create_recurrent_attention_mask (padding alone)",
        types=(
            *("bailing_hybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "minimax"),
            *("qwen4_exp_text", "zaya"),
        ),
    ),
    Design(
        "documents",
        "documents",
        "the class makes its masks itself: position_ids choose position embeddings and say nothing"
        " about documents",
        "transformers/masking_utils.py, find_packed_sequence_indices (used by create_causal_mask)",
        types=("openai-gpt", "xlm"),
    ),
    *DESIGNS_OF_FRIENDS,
)


def design_of(
    form: str, kind: str, detail: str, types: tuple[str, ...], evidence: frozenset[str]
) -> Design | None:
    """Find the reason for a finding of a class of these types of model, if it is meant to be."""
    known = (d for d in DESIGNS if d.explains(form, kind, detail, types, evidence))
    return next(known, None)
