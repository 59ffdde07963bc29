"""The models among the problems of `bits`: small ones that are watched, and the shipped one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead import masks, models, readings
from draws import READ, Draw, Sizes
from problems import Outputs, named

WIDTH, HEADS, TOKENS = 16, 2, 11


class Fused(nn.Module):
    """Attention by torch's own function."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


class Handwritten(nn.Module):
    """Attention as matmul, softmax, matmul."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        weights = (q @ q.mT / q.shape[-1] ** 0.5).softmax(-1)
        return (weights @ q).transpose(1, 2).flatten(2)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


SMALL = {"layers": 2, "heads": HEADS, "width": WIDTH, "length": 64}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": encoder,
    "converted encoder": lambda: ch.convert(encoder()),
    "fused": Fused,
    "handwritten": Handwritten,
    "GPT": lambda: models.GPT(TOKENS, **SMALL),
    "BERT": lambda: models.BERT(TOKENS, **SMALL),
}


def watched(draw: Draw) -> Outputs:
    """A small model inside `watch`: its output, and all that the records hold."""
    name = draw.pick("watch", *MODELS)
    torch.manual_seed(draw.dice.getrandbits(30))
    model = MODELS[name]().train(draw.chance(0.2, "training"))
    batch, length = draw.pick("batch", 1, 3), draw.pick("length", 1, 5, 17, 33)
    tokens = name in ("GPT", "BERT")
    shape = (batch, length) if tokens else (batch, length, WIDTH)
    inputs = draw.integers(TOKENS, *shape) if tokens else draw.tensor(*shape)
    yield from seen(draw, model, inputs, Sizes((batch,), (HEADS,), length, length))


def seen(draw: Draw, model: Any, inputs: Tensor, s: Sizes) -> Outputs:
    wanted = {name: READ[name](draw, s) for name in draw.dice.sample(sorted(READ), 3)}
    draw.words += wanted
    some: dict[str, Any] = {n: [0] for n in ("layers", "heads") if draw.chance(0.2, f"some {n}")}
    through = draw.chance(0.4, "through")
    torch.manual_seed(draw.dice.getrandbits(30))
    with (
        torch.no_grad(),
        ch.watch(model, read=(*wanted.values(),), through=through, **some) as found,
    ):
        output = model(inputs)
    yield "output", output
    for at, record in enumerate(found):
        yield from named(f"record {at}", dict(zip(wanted, record.value, strict=True)))
        facts = (record.layer, record.module, record.call, record.kind, record.scale)
        yield f"record {at}.facts", str((*facts, *record.sizes))
        yield f"record {at}.check", record.check
        if record.mask is not None:
            yield f"record {at}.mask", record.mask.dense(*record.sizes[2:])


def shipped(draw: Draw) -> Outputs:
    """The GPT that ships with the library: run, trained on, watched, cut and explained."""
    model: Any = ch.models.load()
    how = draw.pick("shipped", *ACTIONS)
    batch, length = draw.pick("batch", 1, 2), draw.pick("length", 2, 7, 31)
    tokens = draw.integers(len(model.vocabulary), batch, length)
    torch.manual_seed(draw.dice.getrandbits(30))
    yield from named(how, ACTIONS[how](draw, model, tokens))


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def trained(draw: Draw, model: Any, tokens: Tensor) -> Any:
    loss(model(tokens), tokens).backward()
    return {name: x.grad for name, x in model.named_parameters()}


def watching(draw: Draw, model: Any, tokens: Tensor) -> Any:
    batch, length = tokens.shape
    return dict(seen(draw, model, tokens, Sizes((batch,), (4,), length, length)))


def inside(block: Callable[[Draw, Any], Any]) -> Callable[[Draw, Any, Tensor], Any]:
    """The logits inside of a block, and how far each head moved."""

    def run(draw: Draw, model: Any, tokens: Tensor) -> Any:
        with torch.no_grad(), block(draw, model) as cut:
            logits = model(tokens)
        return {"logits": logits, "moved": str(sorted(cut.moved.items()))}

    return run


ACTIONS: dict[str, Callable[[Draw, Any, Tensor], Any]] = {
    "logits": lambda d, m, t: m(t, read=readings.Entropy()),
    "trained": trained,
    "watched": watching,
    "knockout": inside(lambda d, m: ch.knockout(m, masks.diagonal(1), heads=[(0, 2), (1, 1)])),
    "zero_weights": inside(lambda d, m: ch.zero_weights(m, masks.first(1))),
    "ablate": inside(
        lambda d, m: ch.ablate(m, [(0, 2), (1, 0)], how=d.pick("how", "zero", "mean", "resample"))
    ),
    "head_importance": lambda d, m, t: ch.head_importance(m, t, lambda logits: loss(logits, t)),
    "influence": lambda d, m, t: ch.influence(m, t, how=d.pick("how", "jacobian", "swap")),
    "effects": lambda d, m, t: [(e.weight, e.effect) for e in ch.effects(m, t, layers=[0])],
    "measure": lambda d, m, t: str([(r.mean, r.variance) for r in ch.heads.measure(m, t).rows()]),
    "audit": lambda d, m, t: ch.audit(m, t, allowed=masks.causal()).ok,
    "generate": lambda d, m, t: models.generate(m, "hell", 12, seed=1),
    "parameters": lambda d, m, t: m.state_dict(),
}
