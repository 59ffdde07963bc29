"""Random small problems for the compiled kernel, against a float64 oracle of its own.

    python -m tests.fuzz_native 100000 [seed]

Shapes, strides, dtypes, masks, readings and hostile values (NaN and inf where the mask forbids to
look, numbers near the largest, denormals) are drawn; a mismatch prints the seed that repeats it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from clearhead import masks, readings
from clearhead._core.sizes import Sizes
from clearhead.attention.impl import dropout

SIZES = (1, 2, 3, 5, 7, 13, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 97, 130)
WIDTHS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 32, 33, 48, 64, 65)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Drawn:
    """One problem: what goes in, and the edges that the oracle knows."""

    query: Tensor
    key: Tensor
    value: Tensor
    allowed: Tensor  # bool, (batch, head, query, source)
    mask: Any = None
    more: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def attend(self, read: Any, **given: Any) -> tuple[Tensor, Any]:
        """The kernel's answer, which drops the weights that `factors` says."""
        torch.manual_seed(self.seed)
        return ch.attend(**given, mask=self.mask, read=read, impl="native")

    def factors(self) -> Tensor:
        """What dropout multiplies each weight by."""
        p = self.more.get("dropout", 0.0)
        torch.manual_seed(self.seed)
        rows, columns = map(torch.arange, self.allowed.shape[2:])
        sizes = Sizes(self.allowed.shape[0], self.allowed.shape[1], len(rows), len(columns))
        kept = dropout.keep(
            torch.randint(2**63 - 1, ()), p, self.allowed.shape[:2], rows, columns, sizes
        )
        return kept.double() / (1 - p)


def draw(seed: int) -> Drawn:
    """Draw a problem; the same seed gives the same one."""
    dice, torch_dice = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, source_head, group = dice.choice((1, 1, 2)), dice.choice((1, 2)), dice.choice((1, 1, 3))
    query, source = dice.choice(SIZES), dice.choice(SIZES)
    if dice.random() < 0.1:
        query, source = dice.choice((1, 2, 3, 4)), dice.choice((128, 131, 300))
    head_dim, value_dim = dice.choice(WIDTHS), dice.choice(WIDTHS)
    dtype, head = dice.choice(DTYPES), source_head * group

    def tensor(heads: int, positions: int, width: int) -> Tensor:
        shape = (batch, heads, positions, width)
        kind = dice.randrange(5)
        size = dice.choice((1, 1, 1, 4, 1e-3))

        def numbers(*shape: int) -> Tensor:
            # Before the view is taken: an operation on a view gives a tensor without its gaps.
            return torch.randn(shape, generator=torch_dice).to(dtype) * size

        if kind == 0:
            return numbers(batch, positions, heads, width).transpose(1, 2)
        if kind in (1, 2):  # odd and even strides of rows, from an odd offset on
            return numbers(*shape[:3], 2 * width + kind)[..., 1 : width + 1]
        if kind == 3:
            return numbers(*shape[:2], width, positions).mT
        return numbers(*shape)

    drawn = Drawn(
        tensor(head, query, head_dim),
        tensor(source_head, source, head_dim),
        tensor(source_head, source, value_dim),
        torch.ones(batch, head, query, source, dtype=torch.bool),
        seed=seed,
    )
    _draw_mask(drawn, dice, torch_dice)
    _draw_more(drawn, dice, torch_dice)
    _poison(drawn, dice)
    return drawn


def _draw_mask(drawn: Drawn, dice: random.Random, torch_dice: torch.Generator) -> None:
    batch, head, query, source = drawn.allowed.shape
    i = torch.arange(query)[:, None] + source - query
    j = torch.arange(source)
    n = dice.choice((1, 3, 16, 50))
    kind = dice.choice(
        ("none", "causal", "window", "lengths", "document", "sinks", "edges", "bytes", "rows")
    )
    edges: Tensor = drawn.allowed
    if kind == "causal":
        drawn.mask, edges = masks.causal(), j <= i
    elif kind == "window":
        drawn.mask, edges = masks.window(n), (j <= i) & (j > i - n)
    elif kind == "lengths":
        lengths = [dice.randrange(source + 1) for _ in range(batch)]
        drawn.mask = masks.lengths(lengths)
        edges = j < torch.tensor(lengths)[:, None, None, None]
    elif kind == "document" and query <= source:
        ids = torch.arange(source) // n
        drawn.mask = masks.document(ids) & masks.causal()
        edges = (ids[i.clamp(min=0)] == ids) & (j <= i)
    elif kind == "sinks":
        drawn.mask = masks.causal() & (masks.window(n) | masks.first(2))
        edges = (j <= i) & ((j > i - n) | (j < 2))
    elif kind == "edges" and query <= source:
        pairs = [(source - 1 - k % query, k * 7 % source) for k in range(n)]
        drawn.mask = masks.edges(pairs)
        at, to = torch.tensor(pairs).T
        edges = torch.zeros(query, source, dtype=torch.bool)
        edges[at - (source - query), to] = True
    elif kind in ("bytes", "rows"):
        shape = dice.choice(((query, source), (batch, 1, query, source), (head, query, source)))
        shape = (batch, 1, 1, source) if kind == "rows" else shape
        edges = torch.rand(shape, generator=torch_dice) < dice.choice((0.02, 0.4, 0.9))
        drawn.mask = edges
    drawn.allowed = edges.expand(drawn.allowed.shape).clone()


def _draw_more(drawn: Drawn, dice: random.Random, torch_dice: torch.Generator) -> None:
    batch, head, query, source = drawn.allowed.shape
    if dice.random() < 0.2:
        drawn.more["scale"] = dice.choice((0.0, -0.5, 1.0, 3.0))
    if dice.random() < 0.15:
        drawn.more["softcap"] = dice.choice((0.5, 5.0, 50.0))
    if dice.random() < 0.15:
        drawn.more["sinks"] = torch.randn(head, generator=torch_dice)
    if dice.random() < 0.25:
        shape = dice.choice(
            ((query, source), (head, 1, source), (batch, 1, query, source), (source,))
        )
        bias = torch.randn(shape, generator=torch_dice)
        if dice.random() < 0.5:
            bias[torch.rand(shape, generator=torch_dice) < 0.3] = -torch.inf
        drawn.more["bias"] = bias
        drawn.allowed &= bias != -torch.inf
    if dice.random() < 0.1:
        drawn.more["dropout"] = dice.choice((0.1, 0.5, 0.9))


def _poison(drawn: Drawn, dice: random.Random) -> None:
    """Put non-finite numbers where no query reads, large and denormal ones where one does."""
    group = drawn.allowed.shape[1] // drawn.key.shape[1]
    read = drawn.allowed.unflatten(1, (-1, group)).any(2).any(2)  # (batch, source_head, source)
    for name in ("key", "value"):
        if dice.random() < 0.3:
            non_finite = dice.choice((torch.nan, torch.inf, -torch.inf))
            x = getattr(drawn, name)
            setattr(
                drawn,
                name,
                torch.where(read[..., None], x, torch.tensor(non_finite, dtype=x.dtype)),
            )
    if dice.random() < 0.05 and drawn.value.dtype == torch.float32:
        drawn.value = drawn.value.clone()
        drawn.value[..., 0, :] *= dice.choice((1e-40, 1e36))
    if dice.random() < 0.05 and drawn.key.dtype == torch.float32:
        drawn.key, drawn.query = drawn.key * 1e-36, drawn.query * 1e36


@dataclass
class Right:
    """The oracle's answer in float64, and how far fp32 arithmetic may be from it."""

    context: Tensor
    weights: Tensor
    scores: Tensor
    lse: Tensor
    context_error: Tensor
    weight_error: Tensor
    score_error: Tensor  # of the largest score of each row


def right(drawn: Drawn) -> Right:
    """Answer in float64, selecting before multiplying, with bounds from the sizes of the terms."""
    group = drawn.query.shape[1] // drawn.key.shape[1]
    q = drawn.query.double()
    k, v = (x.double().repeat_interleave(group, 1) for x in (drawn.key, drawn.value))
    read = drawn.allowed.any(2)[..., None]
    k, v = torch.where(read, k, 0), torch.where(read, v, 0)
    scale = drawn.more.get("scale", q.shape[-1] ** -0.5)
    scores, terms = q @ k.mT * scale, q.abs() @ k.abs().mT * abs(scale)
    if cap := drawn.more.get("softcap"):
        scores, terms = cap * torch.tanh(scores / cap), terms + scores.abs()
    if (bias := drawn.more.get("bias")) is not None:
        scores = scores + bias.double().clamp(min=-1e30)
    scores = torch.where(drawn.allowed, scores, -torch.inf)
    logits = scores
    if (sinks := drawn.more.get("sinks")) is not None:
        column = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
        logits = torch.cat([scores, column], -1)
    lse = logits.logsumexp(-1)
    weights = torch.where(drawn.allowed, (scores - lse[..., None]).exp(), 0)
    eps = torch.finfo(torch.float32).eps
    spread = torch.where(drawn.allowed, terms + scores.abs(), 0).amax(-1, keepdim=True)
    relative = eps * (
        8 + 2 * q.shape[-1] ** 0.5 + spread * (2 + q.shape[-1] ** 0.5) + k.shape[2] ** 0.5
    )
    weight_error = relative.clamp(max=1) * weights + 1e-38
    own = torch.finfo(drawn.query.dtype).eps
    rough = 0 if drawn.query.dtype == torch.float32 else own
    mixed = weights * drawn.factors()
    context = mixed @ v
    tiny = 1e-37 * (1 + v.abs().amax())  # bf16 dot products take denormals for zeros
    error = (relative + rough) * (mixed @ v.abs()) + own * context.abs() + tiny
    if drawn.query.dtype == torch.float16:
        error = error + 6e-8
    score_error = eps * (8 + 2 * q.shape[-1] ** 0.5) * spread[..., 0]
    return Right(context, weights, scores, lse, error, weight_error, score_error)


READ = (
    readings.LogSumExp(), readings.Entropy(), readings.TopK(3), readings.Received(),
    readings.Distance(), readings.Mass(masks.first(2)), readings.BlockMap(4),
    readings.Rows([-1, 0]), readings.TopK(11), readings.Weights(), readings.MaxScore(),
)  # fmt: skip


def check(seed: int) -> None:
    """Compare one problem; raises AssertionError."""
    drawn, dice = draw(seed), random.Random(~seed)
    answer = right(drawn)
    read = tuple(dice.sample(READ, dice.choice((0, 1, 3, len(READ)))))
    given = dict(query=drawn.query, key=drawn.key, value=drawn.value, **drawn.more)
    context, values = drawn.attend(read, **given)
    _close("context", context, answer.context, answer.context_error)
    if read:
        again, _ = drawn.attend((), **given)
        assert torch.equal(context, again), "looking changed the context"
    for reading, value in zip(read, values, strict=True):
        _check_reading(reading, value, answer)


def _check_reading(reading: Any, value: Any, answer: Right) -> None:
    w, e, name = answer.weights, answer.weight_error, type(reading).__name__
    query, source = w.shape[-2:]
    if name == "LogSumExp":
        _close(
            name,
            value,
            answer.lse,
            1e-5 + 2e-5 * answer.lse.abs().nan_to_num(0, 0, 0) + _relative(e, w),
        )
    elif name == "MaxScore":
        _close(name, value, answer.scores.amax(-1), answer.score_error + 1e-37)
    elif name == "Entropy":
        surprise = torch.where(w > 0, answer.lse[..., None] - answer.scores, 0)
        size = (w * surprise.abs()).sum(-1) + 1
        _close(name, value, (w * surprise).sum(-1), 1e-4 * size + 30 * _relative(e, w) * size)
    elif name == "Received":
        _close(name, value, w.sum(-2), e.sum(-2) + 1e-6 * w.sum(-2))
    elif name == "Distance":
        far = (torch.arange(query)[:, None] + source - query - torch.arange(source)).abs()
        _close(name, value, (w * far).sum(-1), (e * far).sum(-1) + 1e-5 * (w * far).sum(-1))
    elif name == "Mass":
        _close(name, value, w[..., :2].sum(-1), e.sum(-1) + 1e-6)
    elif name == "Rows":
        _close(name, value, w[..., [-1, 0], :], e[..., [-1, 0], :])
    elif name == "Weights":
        _close(name, value, w, e)
    elif name == "BlockMap":
        for a, rows in enumerate(torch.arange(query).tensor_split(min(4, query))):
            for b, columns in enumerate(torch.arange(source).tensor_split(min(4, source))):
                tile, slack = (x[..., rows[:, None], columns] for x in (w, e))
                _close(
                    name, value.mean[..., a, b], tile.mean((-1, -2)), slack.mean((-1, -2)) + 1e-6
                )
                _close(name, value.max[..., a, b], tile.amax((-1, -2)), slack.amax((-1, -2)))
    elif name == "TopK":
        best = w.sort(-1, descending=True).values[..., : reading.k]
        short = reading.k - best.shape[-1]
        best = torch.nn.functional.pad(best, (0, short))
        slack = e.amax(-1, keepdim=True)
        _close(name, value.weights, best, slack)
        some = value.sources >= 0
        counted = (answer.scores > -torch.inf).sum(-1, keepdim=True)
        assert torch.equal(some.sum(-1, keepdim=True), counted.clamp(max=reading.k)), "top count"
        theirs = w.gather(-1, value.sources.clamp(min=0))
        _close("TopK sources", torch.where(some, theirs, 0), best, slack)


def _relative(error: Tensor, weights: Tensor) -> Tensor:
    return torch.where(weights > 1e-30, error / weights, 0).amax(-1)


def _close(name: str, got: Tensor, want: Tensor, slack: Tensor) -> None:
    got = got.double()
    gap = torch.where(got == want, 0, (got - want).abs())
    assert bool((gap <= slack).all()), (
        f"{name}: off by {gap.max().item()}, allowed {slack.max().item()}"
    )


def shifted(draw: Callable[[int], Any]) -> Callable[[int], Any]:
    """A lie: problems whose mask stands one source beside the one that the call is given."""

    def lying(seed: int) -> Any:
        drawn = draw(seed)
        drawn.allowed = drawn.allowed.roll(1, -1)
        return drawn

    return lying


def fails(check: Callable[[int], None], seed: int) -> bool:
    """Whether the problem is answered wrongly."""
    try:
        check(seed)
    except AssertionError:
        return True
    return False


def main(count: int, first: int = 0, check: Callable[[int], None] = check) -> int:
    """Check so many problems; returns how many failed."""
    torch.set_num_threads(1)
    failed = 0
    for seed in range(first, first + count):
        try:
            check(seed)
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {error!r}"[:300], flush=True)
            if failed >= 20:
                break
    print(f"{count} problems from seed {first}: {failed} failed")
    return failed


if __name__ == "__main__":
    count, first = (*map(int, sys.argv[1:]), 0)[:2]
    sys.exit(1 if main(count, first) else 0)
