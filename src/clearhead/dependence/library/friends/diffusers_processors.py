"""diffusers: its attention layer with each processor that takes a mask, within and across."""

from __future__ import annotations

from clearhead.dependence.library.friends.building import Friend

__all__ = ["catalogue"]

# Processors, and what the layer needs for them.
PROCESSORS = {
    "AttnProcessor": "",
    "AttnProcessor2_0": "",
    "SlicedAttnProcessor": "",
    "FusedAttnProcessor2_0": "",
    "HunyuanAttnProcessor2_0": "qk_norm='layer_norm'",
    "StableAudioAttnProcessor2_0": "",
    "JointAttnProcessor2_0": "",
}
ARGUMENTS = {"SlicedAttnProcessor": "2"}
# In diffusers a mask is added to the scores, -10000 where a source may not be read.
PADDING = "(0 if attention_mask is None else (attention_mask[:, None] - 1) * 1e4)"
NOTHING = "torch.zeros(len(input_ids), 1, input_ids.shape[1])"
FUTURE = "torch.ones(len(input_ids), n := input_ids.shape[1], n).triu(1) * -1e4"
DTYPE = "self.head.weight.dtype"
PARTS = "model = Model({{'embed': nn.Embedding(80, 32), 'inner': {0}, 'head': nn.Linear(32, 80)}})"


def catalogue() -> tuple[Friend, ...]:
    """List the processors, each with a mask of padding, a causal mask, and between two streams."""
    friends = []
    for name, words in PROCESSORS.items():
        friends += [
            _within(name, words, NOTHING, "masked"), _within(name, words, FUTURE, "causal"),
        ]  # fmt: skip
        if name != "JointAttnProcessor2_0":
            friends.append(_between(name, words))
    return tuple(friends)


def _within(name: str, words: str, blocked: str, mapping: str) -> Friend:
    call = f"attention_mask=({blocked} + {PADDING}).to({DTYPE})"
    lines = (
        "class Model(nn.ModuleDict):",
        "    def forward(self, input_ids, attention_mask=None):",
        "        return {'logits': self.head((x := self.embed(input_ids)) + self.inner(x, "
        f"{call}))}}",
        PARTS.format(_layer(name, words, "")),
    )
    variant = ":causal" if mapping == "causal" else ""
    return _friend(f"{name}{variant}", mapping, name, lines)


def _between(name: str, words: str) -> Friend:
    call = f"attention_mask=({NOTHING} + {PADDING}).to({DTYPE})"
    lines = (
        "class Model(nn.ModuleDict):",
        "    def forward(self, input_ids, decoder_input_ids, attention_mask=None):",
        "        return {'logits': self.head((x := self.embed(decoder_input_ids)) + self.inner(x, "
        f"self.embed(input_ids), {call}))}}",
        PARTS.format(_layer(name, words, ", cross_attention_dim=32")),
    )
    return _friend(f"{name}:cross", "encoder-decoder", name, lines)


def _layer(name: str, words: str, more: str) -> str:
    given = f", {words}" if words else ""
    processor = f"processing.{name}({ARGUMENTS.get(name, '')})"
    layer = f"processing.Attention(32, heads=4, dim_head=8{more}{given}, processor={processor})"
    return f"(a := {layer}, a.fuse_projections())[0]" if name.startswith("Fused") else layer


def _friend(name: str, mapping: str, kind: str, lines: tuple[str, ...]) -> Friend:
    imports = ", diffusers.models.attention_processor as processing"
    return Friend(name, mapping, kind, "diffusers", lines, imports)
