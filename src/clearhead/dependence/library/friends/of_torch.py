"""The attention of torch itself: `nn.MultiheadAttention` and `nn.Transformer*`, in their options."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from clearhead.dependence.library.friends.building import Friend

__all__ = ["catalogue"]

# How the mask of the future is given. torch's bool masks are True at what may not be read, and
# its float masks are added; padding is given in the same type.
MASKS = ("bool mask", "float mask", "mask and is_causal")
FORMATS = ("", "batch_first=False")
NORMS = ("", "norm_first")
BIAS = {"": "", "add_bias_kv": ", add_bias_kv=True", "add_zero_attn": ", add_zero_attn=True"}
WEIGHTS = {
    "": "need_weights=False",
    "need_weights": "need_weights=True",
    "weights of each head": "need_weights=True, average_attn_weights=False",
}
MODEL = "model = Model({{'embed': nn.Embedding(80, 32), 'inner': {inner}, 'head': nn.Linear(32, 80)}})"


def catalogue() -> tuple[Friend, ...]:
    """List the modules of torch that attend, each in its options."""
    return (*_attention(), *_encoders(), *_decoders())


def _attention() -> Iterator[Friend]:
    for masked, weights, form, bias in product(("", *MASKS), WEIGHTS, FORMATS, BIAS):
        if bias and (form or weights == "need_weights"):
            continue
        inner = f"nn.MultiheadAttention(32, 4{_first(form)}{BIAS[bias]})"
        hint = ", is_causal=True" if "is_causal" in masked else ""
        call = (
            f"x + self.inner(x, x, x, key_padding_mask={_padding('attention_mask', masked)}, "
            f"attn_mask={_future('input_ids', masked)}, {WEIGHTS[weights]}{hint})[0]"
        )
        yield _encodes("MultiheadAttention", (masked, form, weights, bias), inner, call)


def _encoders() -> Iterator[Friend]:
    for masked, norm, form in product(("", *MASKS), NORMS, FORMATS):
        hint = ", is_causal=True" if "is_causal" in masked else ""
        padding, future = _padding("attention_mask", masked), _future("input_ids", masked)
        rest = f"src_key_padding_mask={padding}{hint})"
        for activation in ("", "silu"):  # torch has a fast path for relu and gelu
            layer, options = _layer("Encoder", norm, form, activation), (masked, norm, form, activation)
            call = f"self.inner(x, src_mask={future}, {rest}"
            yield _encodes("TransformerEncoderLayer", options, layer, call)
        for nested in ("", "enable_nested_tensor=False"):
            words = f", {nested}" if nested else ""
            inner = f"nn.TransformerEncoder({_layer('Encoder', norm, form)}, 2{words})"
            call = f"self.inner(x, mask={future}, {rest}"
            yield _encodes("TransformerEncoder", (masked, norm, form, nested), inner, call)


def _decoders() -> Iterator[Friend]:
    for masked, norm, form in product(MASKS, NORMS, FORMATS):
        options = (masked, norm, form)
        layer = _layer("Decoder", norm, form)
        yield _decodes("TransformerDecoderLayer", options, layer, "", "y, x")
        yield _decodes("TransformerDecoder", options, f"nn.TransformerDecoder({layer}, 2)", "", "y, x")
        sizes = "32, 4, 2, 2, 64"
        whole = f"nn.Transformer({sizes}, norm_first={bool(norm)}{_first(form)})"
        source = f"src_key_padding_mask={_padding('attention_mask', masked)}, "
        yield _decodes("Transformer", options, whole, source, "x, y")


def _encodes(kind: str, options: tuple[str, ...], inner: str, call: str) -> Friend:
    swapped = "batch_first=False" in options
    lines = (
        "class Model(nn.ModuleDict):",
        "    def forward(self, input_ids, attention_mask=None):",
        f"        x = self.embed(input_ids{'.T' if swapped else ''})",
        f"        return {{'logits': self.head({call}){'.transpose(0, 1)' if swapped else ''}}}",
        MODEL.format(inner=inner),
    )
    mapping = "causal" if any(options[0] == one for one in MASKS) else "masked"
    return Friend(_name(kind, options), mapping, "torch", "torch", lines)


def _decodes(kind: str, options: tuple[str, ...], inner: str, source: str, order: str) -> Friend:
    masked, swap = options[0], ".T" if "batch_first=False" in options else ""
    hint = "tgt_is_causal=True, " if "is_causal" in masked else ""
    call = (
        f"self.inner({order}, {source}{hint}tgt_mask={_future('decoder_input_ids', masked)}, "
        f"tgt_key_padding_mask={_padding('decoder_attention_mask', masked)}, "
        f"memory_key_padding_mask={_padding('attention_mask', masked)})"
    )
    arguments = "input_ids, decoder_input_ids, attention_mask=None, decoder_attention_mask=None"
    lines = (
        "class Model(nn.ModuleDict):",
        f"    def forward(self, {arguments}):",
        f"        x, y = self.embed(input_ids{swap}), self.embed(decoder_input_ids{swap})",
        f"        return {{'logits': self.head({call}){'.transpose(0, 1)' if swap else ''}}}",
        MODEL.format(inner=inner),
    )
    return Friend(_name(kind, options), "encoder-decoder", "torch", "torch", lines)


def _layer(kind: str, norm: str, form: str, activation: str = "") -> str:
    given = ", activation=nn.functional.silu" if activation else ""
    return f"nn.Transformer{kind}Layer(32, 4, 64, norm_first={bool(norm)}{_first(form)}{given})"


def _first(form: str) -> str:
    return "" if form else ", batch_first=True"


def _future(ids: str, masked: str) -> str:
    size = f"{ids}.shape[1]"
    if not masked:
        return "None"
    if masked == "float mask":
        return f"nn.Transformer.generate_square_subsequent_mask({size}, dtype=x.dtype)"
    return f"torch.ones({size}, {size}).triu(1).bool()"


def _padding(mask: str, masked: str) -> str:
    given = f"{mask}.to(x.dtype).log()" if masked == "float mask" else f"{mask} == 0"
    return f"None if {mask} is None else {given}"


def _name(kind: str, options: tuple[str, ...]) -> str:
    chosen = ", ".join(option for option in options if option)
    return f"{kind}:{chosen}" if chosen else kind
