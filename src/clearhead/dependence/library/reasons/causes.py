"""Where the faults that were traced by hand come from: file, function, and what it does."""

from __future__ import annotations

from clearhead.dependence.library.reasons.design import Cause
from clearhead.dependence.library.reasons.friends import CAUSES_OF_FRIENDS

__all__ = ["CAUSES", "cause_of"]


def _cause(folder: str, function: str, reason: str) -> Cause:
    return Cause(f"transformers/models/{folder}/modeling_{folder}.py, {function}", reason)


_WITHOUT_POSITIONS = "the mask is made without position_ids, so packed documents are not seen"
_MASKS = "_create_attention_masks"
_EMPTY_STATE = (
    "a chunk of several tokens starts from an empty state: the state of the cache is read for"
    " single tokens alone"
)
_ALL_CACHED = "the masks of the decoder are made only where nothing is cached (use_cache=False)"

# (model_type, form, kind) -> cause.
CAUSES: dict[tuple[str, str, str], Cause] = {
    **{
        ("falcon", form, "leak"): _cause(
            "falcon",
            "FalconAttention.forward",
            "with sdpa the mask is bool; where weights are requested it is added to the scores,"
            " which masks nothing",
        )
        for form in ("causal", "modes")
    },
    ("falcon", "modes", "modes"): _cause(
        "falcon",
        "FalconAttention.forward",
        "ALiBi is in the mask that FalconModel makes; without sdpa, or where weights are requested,"
        " it is added to the scores once more",
    ),
    **{
        ("prophetnet", form, kind): _cause(
            "prophetnet",
            "ProphetNetNgramSelfAttention.get_predict_relative_pos_embeddings",
            "position embeddings that are laid out as (sequence, ngram, head) are gathered as"
            " (ngram, head, sequence): a position gets those of others, later ones among them",
        )
        for form, kind in (
            ("causal", "leak"),
            ("padding", "padding amount"),
            ("generation", "cache mask"),
        )
    },
    ("fsmt", "causal", "cache mask"): _cause("fsmt", "FSMTModel.forward", _ALL_CACHED),
    ("fsmt", "generation", "cache mask"): _cause("fsmt", "FSMTModel.forward", _ALL_CACHED),
    ("fsmt", "padding", "padding content"): _cause("fsmt", "FSMTModel.forward", _ALL_CACHED),
    ("fsmt", "padding", "padding amount"): _cause("fsmt", "FSMTModel.forward", _ALL_CACHED),
    ("cpmant", "causal", "leak"): _cause(
        "cpmant",
        "CpmAntModel._prepare_attention_mask",
        "every position counts as context, and all positions may attend to context",
    ),
    **{
        ("big_bird", form, kind): _cause(
            "big_bird",
            "BigBirdModel.forward",
            "block-sparse attention is bidirectional and is used in a decoder, too",
        )
        for form, kind in (
            ("causal", "leak"),
            ("documents", "documents"),
            ("generation", "cache mask"),
        )
    },
    ("recurrent_gemma", "padding", "padding content"): _cause(
        "recurrent_gemma",
        "RecurrentGemmaRecurrentBlock.forward",
        "the convolution and the recurrence do not read the padding mask",
    ),
    ("recurrent_gemma", "padding", "padding amount"): _cause(
        "recurrent_gemma",
        "RecurrentGemmaRecurrentBlock.forward",
        "the convolution and the recurrence do not read the padding mask",
    ),
    ("recurrent_gemma", "documents", "carried state"): _cause(
        "recurrent_gemma",
        "RecurrentGemmaRecurrentBlock.forward",
        "the recurrence starts anew where position_ids are 0, the convolution before it does not",
    ),
    ("deepseek_v4", "padding", "padding content"): _cause(
        "deepseek_v4",
        "DeepseekV4CSACompressor.forward (and DeepseekV4HCACompressor, DeepseekV4Indexer)",
        "windows of tokens are pooled from the first one on, padding among them; they take no mask",
    ),
    ("deepseek_v4", "padding", "padding amount"): _cause(
        "deepseek_v4",
        "DeepseekV4CSACompressor.forward (and DeepseekV4HCACompressor, DeepseekV4Indexer)",
        "windows of tokens are pooled from the first one on, padding among them; they take no mask",
    ),
    ("deepseek_v4", "documents", "documents"): _cause(
        "deepseek_v4",
        "DeepseekV4CSACompressor.forward (and DeepseekV4HCACompressor, DeepseekV4Indexer)",
        "the entries that a query may read are counted by position_ids, from the start of the row:"
        " they are those of the first document",
    ),
    # Mended since 5.17.0.
    **{
        ("moshi", form, "leak"): _cause(
            "moshi",
            "MoshiModel.forward",
            "the causal mask is made only where a padding mask is given; eager attention has no"
            " other",
        )
        for form in ("causal", "modes")
    },
    **{
        (model, form, kind): _cause(
            model.replace("-", "_"),
            f"{name}.forward",
            "a decoder is given the mask of an encoder, which is not causal",
        )
        for model, name in (
            ("megatron-bert", "MegatronBertModel"),
            ("rembert", "RemBertModel"),
            ("roformer", "RoFormerModel"),
        )
        for form, kind in (("causal", "leak"), ("generation", "cache mask"))
    },
    **{
        ("doge", form, kind): _cause(
            "doge",
            "DogeCDMoE.forward",
            "router logits (token, 2 * key) are viewed as (2, token, key), which mixes those of"
            " different tokens and samples, as a comment there says",
        )
        for form, kind in (
            ("causal", "leak"),
            ("padding", "padding content"),
            ("padding", "padding amount"),
            ("documents", "documents"),
            ("generation", "cache mask"),
            ("batch", "batch"),
        )
    },
    **{
        ("minimax_m3_vl_text", form, kind): _cause(
            "minimax_m3_vl",
            "MiniMaxM3VLIndexer.forward",
            "blocks of keys are counted from the start of the row, padding and other documents"
            " among them, as its docstring says of padding",
        )
        for form, kind in (
            ("padding", "padding content"),
            ("padding", "padding amount"),
            ("documents", "documents"),
        )
    },
    ("moshi", "generation", "cache mask"): _cause(
        "moshi",
        "MoshiModel.forward",
        "one pass attends to all tokens; the cache, made by the sliding_window of the"
        " configuration, keeps the last ones alone",
    ),
    ("bamba", "generation", "cache mask"): _cause(
        "bamba",
        "BambaModel.forward",
        "position_ids that are not given begin at 0 in every call, whatever is cached",
    ),
    ("blt", "generation", "cache mask"): _cause(
        "blt",
        "BltModel.forward",
        "the patcher and the global transformer take no cache: they read the new tokens alone",
    ),
    **{
        ("blt", form, kind): _cause(
            "blt",
            "BltModel.forward",
            "the patcher and the global transformer take neither the padding mask nor position_ids",
        )
        for form, kind in (
            ("padding", "padding content"),
            ("padding", "padding amount"),
            ("documents", "documents"),
        )
    },
    **{
        (kind, "generation", "cache mask"): _cause(
            kind,
            f"{name}.forward",
            "a pass keeps time steps above time_step_min, the step of a single token does not",
        )
        for kind, name in (
            ("nemotron_h", "NemotronHMamba2Mixer"),
            ("zamba2", "Zamba2MambaMixer"),
        )
    },
    ("rwkv", "generation", "cache mask"): _cause(
        "rwkv",
        "RwkvSelfAttention.extract_key_value",
        "for a single token the state (batch, hidden) is broadcast against (batch, 1, hidden):"
        " the samples of a batch are mixed",
    ),
    ("llama4_text", "padding", "padding amount"): _cause(
        "llama4",
        "Llama4TextAttention.forward",
        "the temperature of the layers without rotary positions is counted from the first token,"
        " not from position_ids",
    ),
    ("inkling_text", "padding", "padding amount"): _cause(
        "inkling",
        "InklingAttention.forward",
        "the logarithmic scale of the queries is counted from the first token, not from"
        " position_ids",
    ),
    **{
        (model, "padding", kind): _cause(model, function, reason)
        for kind in ("padding content", "padding amount")
        for model, function, reason in (
            (
                "convbert",
                "ConvBertSelfAttention.forward",
                "the convolutions read the tokens beside each, padding among them, without a mask",
            ),
            (
                "funnel",
                "FunnelAttentionStructure.pool_tensor",
                "hidden states are pooled in pairs, of real tokens and of padding, without a mask",
            ),
            (
                "nystromformer",
                "NystromformerSelfAttention.forward",
                "landmarks are means over segments, padding among them, and the convolution of the"
                " values has no mask",
            ),
            (
                "yoso",
                "YosoSelfAttention.forward",
                "a mask of 0 and -10000 is expected, and one of 1 and 0 is passed: after"
                " (1 + mask / 10000).int() it is 1 everywhere",
            ),
        )
    },
    ("xlm", "padding", "padding amount"): _cause(
        "xlm",
        "get_masks",
        "the causal mask does not have the padding mask in it",
    ),
    **{
        (kind, "generation", "cache mask"): _cause(kind, f"{name}.forward", _EMPTY_STATE)
        for kind, name in (
            ("mamba", "MambaMixer"),
            ("falcon_mamba", "FalconMambaMixer"),
            ("jamba", "JambaMambaMixer"),
            ("zamba", "ZambaMambaMixer"),
        )
    },
    ("data2vec-text", "documents", "documents"): Cause(
        f"transformers/models/data2vec/modeling_data2vec_text.py, Data2VecTextModel.{_MASKS}",
        _WITHOUT_POSITIONS,
    ),
    **{
        (kind, "documents", "documents"): _cause(
            kind.replace("-", "_"), function, _WITHOUT_POSITIONS
        )
        for kind, function in (
            ("afmoe", "AfmoeModel.forward"),
            ("bert", f"BertModel.{_MASKS}"),
            ("bert-generation", f"BertGenerationEncoder.{_MASKS}"),
            ("biogpt", "BioGptModel.forward"),
            ("camembert", f"CamembertModel.{_MASKS}"),
            ("electra", f"ElectraModel.{_MASKS}"),
            ("ernie", f"ErnieModel.{_MASKS}"),
            ("gpt_oss", "GptOssModel.forward"),
            ("megatron-bert", "MegatronBertModel.forward"),
            ("opt", "OPTDecoder.forward"),
            ("rembert", "RemBertModel.forward"),
            ("roberta", f"RobertaModel.{_MASKS}"),
            ("roberta-prelayernorm", f"RobertaPreLayerNormModel.{_MASKS}"),
            ("roc_bert", f"RoCBertModel.{_MASKS}"),
            ("xglm", "XGLMModel.forward"),
            ("xlm-roberta", f"XLMRobertaModel.{_MASKS}"),
            ("xlm-roberta-xl", f"XLMRobertaXLModel.{_MASKS}"),
            ("xmod", f"XmodModel.{_MASKS}"),
        )
    },
}


def cause_of(form: str, kind: str, types: tuple[str, ...]) -> Cause | None:
    """The cause of a fault of a class of these types of model, if it was traced."""
    known = CAUSES | CAUSES_OF_FRIENDS
    return next((known[one, form, kind] for one in types if (one, form, kind) in known), None)
