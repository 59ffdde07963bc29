"""peft: each kind of adapter around a sound causal model."""

from __future__ import annotations

from clearhead.dependence.library.friends.building import Friend

__all__ = ["catalogue"]

BASE = (
    "tf.LlamaForCausalLM._from_config(tf.LlamaConfig(vocab_size=80, hidden_size=32, "
    "intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, "
    "pad_token_id=None), attn_implementation='{backend}')"
)
TARGETS = "target_modules=['q_proj', 'v_proj', 'down_proj']"
SQUARE = "target_modules=['q_proj', 'o_proj']"
# Adapters of weights, by name: the class of their configuration and its arguments.
ADAPTERS = {
    "LoRA": ("Lora", f"r=4, {TARGETS}"),
    "LoRA:rslora, bias": ("Lora", f"r=4, use_rslora=True, bias='all', {TARGETS}"),
    "LoRA:dora": ("Lora", f"r=4, use_dora=True, {TARGETS}"),
    "LoRA:embedding": ("Lora", "r=4, target_modules=['embed_tokens', 'q_proj', 'lm_head']"),
    "LoRA:modules_to_save": ("Lora", f"r=4, modules_to_save=['lm_head'], {TARGETS}"),
    "LoRA:trainable tokens": ("Lora", f"r=4, trainable_token_indices=[1, 2], {TARGETS}"),
    "aLoRA": ("Lora", f"r=4, alora_invocation_tokens=[5], {TARGETS}"),
    "AdaLoRA": ("AdaLora", f"init_r=4, target_r=2, total_step=10, {TARGETS}"),
    "IA3": ("IA3", f"feedforward_modules=['down_proj'], {TARGETS}"),
    "LoHa": ("LoHa", f"r=4, {TARGETS}"),
    "LoKr": ("LoKr", f"r=4, {TARGETS}"),
    "OFT": ("OFT", f"oft_block_size=4, {TARGETS}"),
    "BOFT": ("BOFT", f"boft_block_size=4, {TARGETS}"),
    "VeRA": ("Vera", f"r=4, {SQUARE}"),
    "VB-LoRA": ("VBLoRA", f"r=4, num_vectors=8, vector_length=8, topk=2, {SQUARE}"),
    "FourierFT": ("FourierFT", f"n_frequency=16, {TARGETS}"),
    "HRA": ("HRA", f"r=4, {TARGETS}"),
    "MiSS": ("Miss", f"r=4, {TARGETS}"),
    "RandLoRA": ("RandLora", f"r=4, {SQUARE}"),
    "SHiRA": ("Shira", f"r=4, {TARGETS}"),
    "C3A": ("C3A", f"block_size=8, {TARGETS}"),
    "RoAd": ("Road", f"group_size=8, {TARGETS}"),
    "LN tuning": ("LNTuning", ""),
    "trainable tokens": ("TrainableTokens", "token_indices=[1, 2]"),
    "adaption prompt": ("AdaptionPrompt", "adapter_len=4, adapter_layers=2"),
}
# Adapters that put virtual tokens before the others; they ignore position_ids, and say so.
PROMPTS = {
    "prefix tuning": ("PrefixTuning", "num_virtual_tokens=4"),
    "prefix tuning:projection": (
        "PrefixTuning",
        "num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=16",
    ),
    "prompt tuning": ("PromptTuning", "num_virtual_tokens=4"),
    "p-tuning": ("PromptEncoder", "num_virtual_tokens=4, encoder_hidden_size=16"),
    "p-tuning:LSTM": (
        "PromptEncoder",
        "num_virtual_tokens=4, encoder_hidden_size=16, encoder_reparameterization_type='LSTM'",
    ),
}


def catalogue() -> tuple[Friend, ...]:
    """List the adapters."""
    weights = [_weights(name, *words) for name, words in ADAPTERS.items()]
    return (*weights, *(_prompt(name, *words) for name, words in PROMPTS.items()))


def _weights(name: str, kind: str, words: str) -> Friend:
    lines = (
        "class Model(nn.ModuleDict):",
        "    def forward(self, input_ids, attention_mask=None, position_ids=None, "
        "cache=None, use_cache=False):",
        "        return self.inner(input_ids, attention_mask=attention_mask, "
        "position_ids=position_ids, cache=cache, use_cache=use_cache)",
        _made(kind, words),
    )
    return _friend(name, name if name == "aLoRA" else kind, lines)


def _prompt(name: str, kind: str, words: str) -> Friend:
    lines = (
        "class Model(nn.ModuleDict):",
        "    def forward(self, input_ids, attention_mask=None):",
        "        return {'logits': self.inner(input_ids, attention_mask=attention_mask).logits"
        "[:, -input_ids.shape[1]:]}",
        _made(kind, words),
    )
    return _friend(name, kind, lines)


def _made(kind: str, words: str) -> str:
    config = f"peft.{kind}Config(task_type='CAUSAL_LM'{f', {words}' if words else ''})"
    return f"model = Model({{'inner': peft.get_peft_model({BASE}, {config})}})"


def _friend(name: str, kind: str, lines: tuple[str, ...]) -> Friend:
    return Friend(name, "causal", kind, "peft", lines, ", transformers as tf, peft")
