"""The problems of `bits`: calls of `attend`, layers, and models that are watched and cut.

Each yields its outputs one after the other, so that what came before an error counts too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from clearhead import masks
from draws import Draw, Sizes, edges_of, leaf, read, sizes, tensors

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
Outputs = Iterator[tuple[str, Any]]


def named(name: str, value: Any) -> Outputs:
    """The tensors of a value, by name; other things as they are."""
    if hasattr(value, "_fields"):
        value = value._asdict()
    elif isinstance(value, (tuple, list)):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield name, value
        return
    for key, part in value.items():
        yield from named(f"{name}.{key}", part)


def gradients(draw: Draw, outputs: list[Tensor], leaves: dict[str, Tensor]) -> Outputs:
    """The gradients through some of the outputs, and sometimes those of the gradients."""
    outputs = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    outputs = draw.dice.sample(outputs, draw.dice.randint(1, len(outputs))) if outputs else []
    if not outputs:
        return
    given, twice = tuple(leaves.values()), draw.chance(0.15, "backward twice")
    shares = [draw.tensor(*x.shape, dtype=x.dtype) for x in outputs]
    found = torch.autograd.grad(outputs, given, shares, allow_unused=True, create_graph=twice)
    yield from named("gradient", dict(zip(leaves, found, strict=True)))
    again = [x for x in found if x is not None and x.requires_grad]
    if twice and again:
        ones = [torch.ones_like(x) for x in again]
        found = torch.autograd.grad(again, given, ones, allow_unused=True)
        yield from named("second gradient", dict(zip(leaves, found, strict=True)))


def attend(draw: Draw) -> Outputs:
    """One call of `attend`, its gradients, and the edges of its mask."""
    s, dtype = sizes(draw), draw.pick("in", *DTYPES)
    draw.words.append(str(s.whole))
    given, edges, wanted = tensors(draw, s, dtype), edges_of(draw, s), read(draw, s)
    others = ("tiled", "tiled") if "long" in draw.words else ("native", "reference")
    impl = draw.pick("by", None, "native", "tiled", *others)
    if isinstance(edges, masks.Mask):
        yield "edges", edges.dense(s.query, s.source)
        yield "counts", edges.counts(s.query, s.source)
    function = functools.partial(ch.attend, mask=edges, impl=impl, **numbers(draw))
    if draw.chance(0.05, "under"):
        yield from transformed(draw, function, given)
    else:
        yield from called(draw, function, given, wanted)


def numbers(draw: Draw) -> dict[str, float]:
    """Some of the numbers that `attend` takes."""
    options = {
        "scale": (0.2, 0.0, -0.5, 1.0, 30.0),
        "softcap": (0.15, 0.5, 5.0, 50.0),
        "dropout": (0.12, 0.1, 0.5, 0.9),
    }
    return {
        name: draw.pick("of", *some)
        for name, (share, *some) in options.items()
        if draw.chance(share, name)
    }


def called(draw: Draw, function: Any, given: dict[str, Tensor], wanted: dict[str, Any]) -> Outputs:
    """The context and the readings, and the gradients of some of the tensors."""
    if draw.chance(0.5, "gradients"):
        some = [n for n in given if draw.chance(0.8, f"of {n}")]
        given |= {n: given[n].requires_grad_() for n in some}
    read = tuple(wanted.values())
    torch.manual_seed(draw.dice.getrandbits(30))
    autocast = draw.chance(0.03, "autocast")
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        answer = function(**given, read=read if len(read) > 1 else read[0] if read else None)
    context, values = answer if read else (answer, ())
    values = values if len(read) != 1 else (values,)
    found = dict(named("value", dict(zip(wanted, values, strict=True))), context=context)
    yield from found.items()
    leaves = {n: x for n, x in given.items() if x.requires_grad}
    if leaves:
        yield from gradients(draw, [*found.values()], leaves)


def transformed(draw: Draw, function: Any, given: dict[str, Tensor]) -> Outputs:
    """The context under a transformation of torch."""
    how = draw.pick("transform", "jvp", "vmap", "compile")
    names = ("query", "key", "value")
    three = tuple(given[n].clone() for n in names)
    rest = {n: x for n, x in given.items() if n not in names}

    def plain(*three: Tensor) -> Tensor:
        return function(*three, **rest)

    torch.manual_seed(draw.dice.getrandbits(30))
    if how == "jvp":
        tangents = tuple(draw.tensor(*x.shape, dtype=x.dtype) for x in three)
        yield from named("jvp", torch.func.jvp(plain, three, tangents))
    elif how == "vmap":
        stacked = tuple(torch.stack([x, 2 * x]) for x in three)
        yield "vmap", torch.func.vmap(plain, randomness="same")(*stacked)
    else:
        torch._dynamo.reset()
        yield "compiled", torch.compile(plain, backend="aot_eager")(*three)


def multihead(draw: Draw) -> Outputs:
    """A layer with drawn options and masks, its outputs and all of its gradients."""
    own = draw.chance(0.5, "self-attention")
    query, source = draw.pick("query", 1, 5, 17, 64), draw.pick("source", 5, 7, 65)
    lead, heads = (draw.pick("batch", 1, 2, 3),), (draw.pick("heads", 1, 2, 3),)
    s = Sizes(lead, heads, source if own else query, source)
    other = 0 if own or not draw.chance(0.3, "kdim") else 1
    torch.manual_seed(draw.dice.getrandbits(30))
    layer = layer_of(draw, s, other)
    three = sequences(draw, s, layer, own)
    answer = layer(*three, **layer_masks(draw, s), **looks(draw, s, layer))
    found = dict(named("answer", answer))
    yield from found.items()
    leaves = dict(zip(("query", "key", "value"), three, strict=True))
    yield from gradients(draw, [*found.values()], leaves | dict(layer.named_parameters()))


def layer_of(draw: Draw, s: Sizes, other: int) -> ch.MultiheadAttention:
    """A layer; its keys are `other` features wider than the rest."""
    width = s.heads[0] * draw.pick("head_dim", 1, 5, 16)
    options: dict[str, Any] = {n: draw.chance(0.3, n) for n in ("add_bias_kv", "add_zero_attn")}
    options |= {n: draw.chance(0.7, n) for n in ("bias", "batch_first")}
    options["dtype"] = draw.pick("in", torch.float32, torch.float64)
    dropout, kdim = 0.5 * draw.chance(0.2, "dropout"), width + other if other else None
    layer = ch.MultiheadAttention(width, s.heads[0], dropout, kdim=kdim, **options)
    return layer.train(draw.chance(0.5, "training"))


def sequences(draw: Draw, s: Sizes, layer: Any, own: bool) -> list[Tensor]:
    """Query, key and value as the layer takes them; in self-attention they are one tensor."""
    shapes = ((s.query, layer.embed_dim), (s.source, layer.kdim), (s.source, layer.vdim))
    dtype = layer.out_proj.weight.dtype
    made = [
        draw.tensor(*s.lead, *x, dtype=dtype).requires_grad_() for x in shapes[: 1 if own else 3]
    ]
    turned = made if layer.batch_first else [x.transpose(0, 1) for x in made]
    return 3 * turned if own else turned


def layer_masks(draw: Draw, s: Sizes) -> dict[str, Any]:
    """Some of the masks that a layer composes."""
    found: dict[str, Any] = {"is_causal": draw.chance(0.3, "causal")}
    if draw.chance(0.4, "padding"):
        found["key_padding_mask"] = draw.bools(0.3, s.batch, s.source)
    if draw.chance(0.5, "attn_mask"):
        rows = draw.pick("for", (), (s.batch * s.heads[0],))
        blocked = draw.bools(0.3, *rows, s.query, s.source)
        floats = draw.chance(0.5, "of floats") or "key_padding_mask" in found
        bias = draw.tensor(*blocked.shape)
        found["attn_mask"] = blocked if not floats else bias.masked_fill(blocked, -torch.inf)
    if draw.chance(0.4, "mask"):
        found["mask"] = leaf(draw, s)
    return found


def looks(draw: Draw, s: Sizes, layer: Any) -> dict[str, Any]:
    """What to ask the layer for; it may append sources of its own."""
    if draw.chance(0.5, "reads"):
        appended = (layer.bias_k is not None) + layer.add_zero_attn
        s = replace(s, source=s.source + appended)
        return {"read": tuple(read(draw, s).values())}
    return {n: draw.chance(0.5, n) for n in ("need_weights", "average_attn_weights")}
