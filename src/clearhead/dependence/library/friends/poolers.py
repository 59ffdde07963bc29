"""sentence-transformers: does padding change the embedding of a sentence?"""

from __future__ import annotations

from clearhead.dependence.library.friends.building import Friend

__all__ = ["catalogue"]

# How the embeddings of tokens become one: a name, and the modules in their order.
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
MODULES = {
    **{f"Pooling:{mode}": f"st.Pooling(32, '{mode}')" for mode in MODES},
    "Pooling:all of them": f"st.Pooling(32, {MODES})",
    "CNN": "st.CNN(32, 32, [1, 3]), st.Pooling(64, 'mean')",
    "LSTM": "st.LSTM(32, 16), st.Pooling(32, 'mean')",
    "WordWeights": "st.WordWeights([*map(str, range(80))], {str(n): n / 40 for n in range(80)}), "
    "st.Pooling(32, 'mean')",
}
SPLADE = {
    f"SpladePooling:{one}": f"sparse.SpladePooling('{one}', chunk_size={size})"
    for one, size in (("max", None), ("sum", 5))
}
# Whole encoders before the pooling: a bidirectional one, and a causal one as in LLM embedders.
SIZES = "hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4"
ENCODERS = {
    "BertModel, mean": (f"tf.BertModel(tf.BertConfig(vocab_size=80, {SIZES}))", "mean"),
    "BertModel, cls": (f"tf.BertModel(tf.BertConfig(vocab_size=80, {SIZES}))", "cls"),
    "LlamaModel, lasttoken": (
        f"tf.LlamaModel(tf.LlamaConfig(vocab_size=80, {SIZES}))",
        "lasttoken",
    ),
    "LlamaModel, weightedmean": (
        f"tf.LlamaModel(tf.LlamaConfig(vocab_size=80, {SIZES}))",
        "weightedmean",
    ),
}
EMBED = "nn.Embedding(80, 32)"
MASK = (
    "'attention_mask': (m := torch.ones_like(input_ids) if attention_mask is None else"
    " attention_mask)"
)
REST = "'input_ids': input_ids, 'sentence_lengths': m.sum(1)"


def catalogue() -> tuple[Friend, ...]:
    """List the modules that pool, alone and behind an encoder."""
    alone = [_friend(name, EMBED, words) for name, words in {**MODULES, **SPLADE}.items()]
    behind = [
        _friend(f"Pooling:{name}", encoder, f"st.Pooling(32, '{mode}')")
        for name, (encoder, mode) in ENCODERS.items()
    ]
    return (*alone, *behind)


def _friend(name: str, encoder: str, modules: str) -> Friend:
    call = "self[0](input_ids)"
    if encoder != EMBED:
        call = "self[0](input_ids, attention_mask=m).last_hidden_state"
    lines = (
        "class Model(nn.ModuleList):",
        "    def forward(self, input_ids, attention_mask=None):",
        f"        return {{'logits': nn.Sequential(*self[1:])({{{MASK}, 'token_embeddings': "
        f"{call}, {REST}}})['sentence_embedding'][:, None].expand(-1, m.shape[1], -1)}}",
        f"model = Model([{encoder}, {modules}])",
    )
    imports = (
        ", transformers as tf, sentence_transformers.sentence_transformer.modules as st"
        ", sentence_transformers.sparse_encoder.modules as sparse"
    )
    kind = name.partition(":")[0] if encoder == EMBED else encoder[3:].partition("(")[0]
    return Friend(name, "masked", kind, "sentence_transformers", lines, imports)
