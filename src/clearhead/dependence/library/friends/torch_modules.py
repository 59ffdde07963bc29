"""The attention of torch: `nn.MultiheadAttention` and `nn.Transformer*`, in their options."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from clearhead.dependence.library.friends.building import Friend

__all__ = ["catalogue"]

# How the mask of the future is given. torch's bool masks are True at what may not be read, and
# its float masks are added; padding is given in the same type.
FLOAT = "float mask"
MASKS = ("bool mask", FLOAT, "mask and is_causal")
FORMATS = ("", "batch_first=False")
NORMS = ("", "norm_first")
BIASES = {"": "", "add_bias_kv": ", add_bias_kv=True", "add_zero_attn": ", add_zero_attn=True"}
SILU = "activation=silu"  # torch has a fast path for relu and gelu
SINGLE = "enable_nested_tensor=False"
DTYPE = "self.head.weight.dtype"
MODEL = "model = Model({{'embed': nn.Embedding(80, 32), 'inner': {0}, 'head': nn.Linear(32, 80)}})"


def catalogue() -> tuple[Friend, ...]:
    """List the modules of torch that attend, each in its options."""
    return (*_attention(), *_encoders(), *_decoders())


def _attention() -> Iterator[Friend]:
    """Make the plain module, which returns its weights where `output_attentions` is True."""
    for masked, form, bias in product(("", *MASKS), FORMATS, BIASES):
        if bias and form:
            continue
        inner = f"nn.MultiheadAttention(32, 4{_first(form)}{BIASES[bias]})"
        call = (
            f"(x := {_embedded('input_ids', form)}) + self.inner(x, x, x, "
            f"key_padding_mask={_padding('attention_mask', masked)}, "
            f"attn_mask={_future('input_ids', masked)}, need_weights=output_attentions"
            f"{', is_causal=True' if 'is_causal' in masked else ''})[0]"
        )
        arguments = "input_ids, attention_mask=None, output_attentions=False"
        options = (masked, form, bias)
        yield _friend("MultiheadAttention", _mapping(masked), options, arguments, inner, call)


def _encoders() -> Iterator[Friend]:
    for masked, norm, form in product(("", *MASKS), NORMS, FORMATS):
        x, arguments = _embedded("input_ids", form), "input_ids, attention_mask=None"
        hint = ", is_causal=True" if "is_causal" in masked else ""
        rest = f"src_key_padding_mask={_padding('attention_mask', masked)}{hint})"
        for more in ("", SILU):
            options = (masked, norm, form, more)
            layer = _layer("Encoder", norm, form, more)
            call = f"self.inner({x}, src_mask={_future('input_ids', masked)}, {rest}"
            kind = "TransformerEncoderLayer"
            yield _friend(kind, _mapping(masked), options, arguments, layer, call)
        for more in ("", SINGLE):
            options = (masked, norm, form, more)
            inner = f"nn.TransformerEncoder({_layer('Encoder', norm, form)}, 2{_then(more)})"
            call = f"self.inner({x}, mask={_future('input_ids', masked)}, {rest}"
            kind = "TransformerEncoder"
            yield _friend(kind, _mapping(masked), options, arguments, inner, call)


def _decoders() -> Iterator[Friend]:
    for masked, norm, form in product(MASKS, NORMS, FORMATS):
        layer = _layer("Decoder", norm, form)
        whole = f"nn.Transformer(32, 4, 2, 2, 64, norm_first={bool(norm)}{_first(form)})"
        x, y = _embedded("input_ids", form), _embedded("decoder_input_ids", form)
        source = f"src_key_padding_mask={_padding('attention_mask', masked)}, "
        kinds = {
            "TransformerDecoderLayer": (layer, f"{y}, {x}, "),
            "TransformerDecoder": (f"nn.TransformerDecoder({layer}, 2)", f"{y}, {x}, "),
            "Transformer": (whole, f"{x}, {y}, {source}"),
        }
        for kind, (inner, given) in kinds.items():
            hint = ", tgt_is_causal=True" if "is_causal" in masked else ""
            call = (
                f"self.inner({given}tgt_mask={_future('decoder_input_ids', masked)}, "
                f"tgt_key_padding_mask={_padding('decoder_attention_mask', masked)}, "
                f"memory_key_padding_mask={_padding('attention_mask', masked)}{hint})"
            )
            arguments = (
                "input_ids, decoder_input_ids, attention_mask=None, decoder_attention_mask=None"
            )
            options = (masked, norm, form)
            yield _friend(kind, "encoder-decoder", options, arguments, inner, call)


def _friend(
    kind: str, mapping: str, options: tuple[str, ...], arguments: str, inner: str, call: str
) -> Friend:
    back = ".transpose(0, 1)" if FORMATS[1] in options else ""
    lines = (
        "class Model(nn.ModuleDict):",
        f"    def forward(self, {arguments}):",
        f"        return {{'logits': self.head({call}){back}}}",
        MODEL.format(inner),
    )
    chosen = ", ".join(option for option in options if option)
    return Friend(f"{kind}:{chosen}" if chosen else kind, mapping, kind, "torch", lines)


def _mapping(masked: str) -> str:
    return "causal" if masked else "masked"


def _layer(kind: str, norm: str, form: str, more: str = "") -> str:
    given = ", activation=nn.functional.silu" if more else ""
    return f"nn.Transformer{kind}Layer(32, 4, 64, norm_first={bool(norm)}{_first(form)}{given})"


def _first(form: str) -> str:
    return "" if form else ", batch_first=True"


def _then(option: str) -> str:
    return f", {option}" if option else ""


def _embedded(ids: str, form: str) -> str:
    return f"self.embed({ids}{'.T' if form else ''})"


def _future(ids: str, masked: str) -> str:
    size = f"{ids}.shape[1]"
    if not masked:
        return "None"
    if masked == FLOAT:
        return f"nn.Transformer.generate_square_subsequent_mask({size}, dtype={DTYPE})"
    return f"torch.ones({size}, {size}).triu(1).bool()"


def _padding(mask: str, masked: str) -> str:
    given = f"{mask}.to({DTYPE}).log()" if masked == FLOAT else f"{mask} == 0"
    return f"None if {mask} is None else {given}"
