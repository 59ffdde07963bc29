"""Gradients of random small problems by the compiled kernel, against float64 and autograd.

    python -m tests.fuzz_gradients 20000 [seed]

The problems are those of `fuzz_native`; the equation is written down once more, so that autograd
can go through it: what is blocked is selected away before anything is computed with it.
"""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead import masks, readings
from tests import fuzz_native
from tests.fuzz_native import Drawn, draw

READ = (
    readings.LogSumExp(), readings.Entropy(), readings.Entropy(normalized=True), readings.TopK(3),
    readings.Received(), readings.Distance(), readings.Mass(masks.first(2)),
    readings.Mass(masks.causal() & (masks.window(3) | masks.first(1))), readings.BlockMap(4),
    readings.Rows([-1, 0, -1]), readings.TopK(11), readings.Weights(), readings.Overlap(),
    readings.Scores(), readings.Mass(masks.window(5)), readings.Mass(masks.diagonal(1)),
)  # fmt: skip
NAMES = ("query", "key", "value", "bias", "sinks")


class Softmax(NamedTuple):
    """The softmax of one problem in float64, through which autograd goes."""

    weights: Tensor  # (batch, head, query, source), 0 where blocked
    logs: Tensor  # of the weights, 0 where blocked
    lse: Tensor  # 0 for an empty row
    sink: Tensor  # the weight of the sink, 0 where there is none
    slope: Tensor  # of the softcap
    scores: Tensor  # 0 where blocked


def softmax(drawn: Drawn, leaves: dict[str, Tensor]) -> tuple[Softmax, Tensor, Tensor, Tensor]:
    """Weights of a problem, with query, key and value as they entered."""
    q, k, v = (leaves[name] for name in NAMES[:3])
    group, allowed = q.shape[1] // k.shape[1], drawn.allowed
    read = allowed.any(2)[..., None]
    k, v = (torch.where(read, x.repeat_interleave(group, 1), 0) for x in (k, v))
    scores = q @ k.mT * drawn.more.get("scale", q.shape[-1] ** -0.5)
    slope = torch.ones_like(scores)
    if cap := drawn.more.get("softcap"):
        slope = 1 - torch.tanh(scores / cap).detach() ** 2
        scores = cap * torch.tanh(scores / cap)
    if "bias" in leaves:
        scores = scores + leaves["bias"].clamp(min=-1e30)
    most = torch.where(allowed, scores, -torch.inf).detach().amax(-1)
    if "sinks" in leaves:
        most = torch.maximum(most, leaves["sinks"].detach()[:, None])
    most = torch.where(most.isinf(), 0, most)
    shifted = torch.where(allowed, scores - most[..., None], 0)
    shares = torch.where(allowed, shifted.exp(), 0)
    sink = torch.zeros_like(most)
    if "sinks" in leaves:
        sink = (leaves["sinks"][:, None] - most).exp()
    total = shares.sum(-1) + sink
    empty = total == 0
    log_sum = torch.where(empty, 1, total).log()
    logs = torch.where(allowed, shifted - log_sum[..., None], 0)
    weights = shares / torch.where(empty, 1, total)[..., None]
    lse = torch.where(empty, 0, most + log_sum)
    sink = sink / torch.where(empty, 1, total)
    shown = torch.where(allowed, scores, 0)
    return Softmax(weights, logs, lse, sink, slope, shown), q, k, v


def readings_of(read: Any, s: Softmax, drawn: Drawn, values: Any) -> list[tuple[Tensor, Tensor]]:
    """Each reading's value that has a gradient, and |d value / d weight| as a function's share.

    The second is a tensor of the shape of the weights: how much a unit of gradient in all of the
    value weighs on each weight, for the tolerance.
    """
    query, source = s.weights.shape[-2:]
    w, found = s.weights, []
    for reading, value in zip(read, values, strict=True):
        name = type(reading).__name__
        if name == "LogSumExp":
            found.append(s.lse)
        elif name == "Entropy":
            entropy = -(w * s.logs).sum(-1)
            count = drawn.allowed.sum(-1)
            most = torch.where(count > 1, count, 2).double().log()
            found.append(
                torch.where(count > 1, entropy / most, 0) if reading.normalized else entropy
            )
        elif name == "Received":
            found.append(w.sum(-2))
        elif name == "Distance":
            far = (torch.arange(query)[:, None] + source - query - torch.arange(source)).abs()
            found.append((w * far).sum(-1))
        elif name == "Mass":
            found.append((w * reading.edges.dense(query, source)).sum(-1))
        elif name == "Rows":
            found.append(w[..., list(reading.queries), :])
        elif name == "Weights":
            found.append(w)
        elif name == "Scores":
            found.append(s.scores)
        elif name == "BlockMap":
            found.append(_means(w))
        elif name == "TopK":
            picked = w.gather(-1, value.sources.clamp(min=0))
            found.append(torch.where(value.sources >= 0, picked, 0))
        elif name == "Overlap":
            flat = w.flatten(-2)
            length = flat.square().sum(-1)
            length = torch.where(length == 0, 1, length).sqrt()
            found.append(flat @ flat.mT / length[..., :, None] / length[..., None, :])
    return found


def _means(w: Tensor) -> Tensor:
    rows = [x.mean(-2) for x in w.tensor_split(min(4, w.shape[-2]), -2)]
    across = torch.stack(rows, -2).tensor_split(min(4, w.shape[-1]), -1)
    return torch.stack([x.mean(-1) for x in across], -1)


def _shown(value: Any) -> Tensor:
    """The part of a value that has a gradient."""
    return value[0] if isinstance(value, tuple) else value


def check(seed: int) -> None:
    """Compare one problem; raises AssertionError."""
    drawn, dice = draw(seed), random.Random(~seed)
    read = tuple(dice.sample(READ, dice.choice((0, 0, 1, 1, 2, 4, 6))))
    shares = torch.Generator().manual_seed(seed)
    own = {**vars(drawn), **drawn.more}
    given = {name: own[name] for name in NAMES if own.get(name) is not None}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    options = {name: x for name, x in drawn.more.items() if name not in NAMES}
    context, values = drawn.attend(read, **leaves, **options)
    outputs = [context, *map(_shown, values)]
    size = 1e-3 if drawn.value.abs().nan_to_num(0, 0, 0).max() > 1e30 else 1.0
    pulls = [
        torch.randn(x.shape, generator=shares).to(x.dtype) * (0 if dice.random() < 0.2 else size)
        for x in outputs
    ]
    wanted = list(leaves.values())
    answer = right(drawn, read, values, given, pulls)
    if any(max(x.abs().max(), slack.max()) > 1e36 for x, slack in answer.values()):
        return  # float32 has no such numbers, or not on the way
    found = torch.autograd.grad(outputs, wanted, pulls, retain_graph=True)
    again = torch.autograd.grad(outputs, wanted, pulls)
    for name, a, b in zip(leaves, found, again, strict=True):
        assert torch.equal(a, b), f"the gradient of {name} changes from run to run"
    for (name, (gradient, slack)), ours in zip(answer.items(), found, strict=True):
        fuzz_native._close(f"gradient of {name}", ours, gradient, slack)


def right(
    drawn: Drawn, read: Any, values: Any, given: dict[str, Tensor], pulls: list[Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Each gradient in float64, and how far fp32 arithmetic may be from it."""
    wide = {name: x.double().requires_grad_() for name, x in given.items()}
    s, q, k, v = softmax(drawn, wide)
    outputs = [(s.weights * drawn.factors()) @ v, *readings_of(read, s, drawn, values)]
    pulls = [x.double() for x in pulls]
    found = torch.autograd.grad(
        outputs, [*wide.values()], pulls, retain_graph=True, allow_unused=True
    )
    slacks = _slacks(drawn, read, s, (q, k, v), outputs, pulls)
    own = torch.finfo(drawn.query.dtype).eps
    right = {
        n: torch.zeros_like(wide[n]) if x is None else x for n, x in zip(wide, found, strict=True)
    }
    return {name: (x, slacks[name] + own * x.abs()) for name, x in right.items()}


def _slacks(
    drawn: Drawn, read: Any, s: Softmax, inputs: Any, outputs: Any, pulls: Any
) -> dict[str, Tensor]:
    """First-order bounds, from the sizes of the terms.

    A gradient of a score is w (x - sum w x): `x` is off by roundings of its own terms, `w` by its
    relative error, and the sum by what the context was rounded to.
    """
    q, k, v = (x.detach().abs() for x in inputs)
    w, pull, factors = s.weights.detach(), pulls[0].abs(), drawn.factors()
    problem = fuzz_native.right(drawn)
    eps, own = 2.0**-23, torch.finfo(drawn.query.dtype).eps
    rough = 0.0 if drawn.query.dtype == torch.float32 else own
    off = (problem.weight_error - 1e-38) / w.clamp(min=1e-40)
    relative = torch.where(w > 1e-40, off, 0).amax(-1, keepdim=True) + rough
    terms = pull @ v.mT * factors + _weigh_on(read, s, drawn, outputs, pulls)
    x_error = eps * (8 + 2 * v.shape[-1] ** 0.5 + w.shape[-1] ** 0.5) * terms + 2 * rough * terms
    summed = (w * terms).sum(-1, keepdim=True)
    row_error = (w * (x_error + relative * terms)).sum(-1, keepdim=True)
    # Half precision has few small numbers: the context is off by as much, where it is small.
    small = 6e-8 if drawn.query.dtype == torch.float16 else 0.0
    rounded = own * outputs[0].detach().abs() + small
    row_error = row_error + (pull * rounded).sum(-1, keepdim=True)
    error = w * (4 * relative * (terms + summed) + x_error + 2 * row_error)
    long = eps * (w.shape[-2] * w.shape[0]) ** 0.5
    asked = _asked_of_scores(read, drawn, pulls)
    error = error + asked * (2 * relative + eps * (16 + w.shape[-1] ** 0.5) + long)
    # The gradients of log-sum-exp and of the entropy's logarithm.
    factor = abs(drawn.more.get("scale", q.shape[-1] ** -0.5))
    tiny = 1e-36 * (1 + v.amax() + k.amax() + q.amax())
    whole = factor * (error + 8 * eps * w * (terms + summed))
    group = q.shape[1] // drawn.key.shape[1]
    slacks = {
        "query": 2 * (whole @ k),
        "key": 2 * _grouped(whole.mT @ q, group),
        "value": 2 * _grouped((w * factors * (relative + 8 * eps)).mT @ pull, group),
    }
    if "bias" in drawn.more:
        each = 2 * error + long * (w * (terms + summed) + asked)
        slacks["bias"] = each.sum_to_size(
            (1,) * (4 - drawn.more["bias"].ndim) + tuple(drawn.more["bias"].shape)
        ).reshape(drawn.more["bias"].shape)
    if "sinks" in drawn.more:
        # These reach the sink without passing a weight, also in a row that has none.
        for reading, share in zip(read, pulls[1:], strict=True):
            if isinstance(reading, readings.LogSumExp | readings.Entropy):
                summed = summed + share.abs()[..., None]
        each = s.sink.detach()[..., None] * (row_error + 4 * (relative + long) * summed)
        slacks["sinks"] = 4 * each.sum((0, 2, 3))
    return {name: x + tiny + small for name, x in slacks.items()}


def _weigh_on(read: Any, s: Softmax, drawn: Drawn, outputs: Any, pulls: Any) -> Tensor:
    """How much the gradients of the readings weigh on each weight."""
    w = s.weights.detach()
    total = torch.zeros_like(w)
    for reading, output, pull in zip(read, outputs[1:], pulls[1:], strict=True):
        if not pull.any():
            continue
        if isinstance(reading, readings.Scores):
            continue
        if isinstance(reading, readings.LogSumExp):
            total = total + pull.abs()[..., None]
            continue
        (share,) = torch.autograd.grad(output, s.weights, pull, retain_graph=True)
        size = share.abs()
        if isinstance(reading, readings.Entropy):
            size = size + pull.abs()[..., None] * (1 + s.logs.detach().abs())
        elif isinstance(reading, readings.Overlap):
            size = size + 8 * pull.abs().amax()
        elif isinstance(reading, readings.Rows):
            size = size + 2 * pull.abs().amax()
        total = total + size
    return total


def _asked_of_scores(read: Any, drawn: Drawn, pulls: Any) -> Tensor:
    """How much the gradients of scores that are read weigh on each score."""
    total = torch.zeros(drawn.allowed.shape, dtype=torch.float64)
    for reading, pull in zip(read, pulls[1:], strict=True):
        if isinstance(reading, readings.Scores):
            total = total + torch.where(drawn.allowed, pull.abs(), 0)
    return total


def _grouped(x: Tensor, group: int) -> Tensor:
    return x.unflatten(1, (-1, group)).sum(2)


def main(count: int, first: int = 0) -> int:
    """Check so many problems; returns how many failed."""
    return fuzz_native.main(count, first, check)


if __name__ == "__main__":
    sys.exit(1 if main(*map(int, sys.argv[1:])) else 0)
