"""monitor(): every number against its plain definition on the full weights, and what a step is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead import masks
from clearhead.monitoring import STATISTICS


class Attends(nn.Module):
    """One call of attention in which query, key and value come from one tensor."""

    def __init__(self, attend: Any = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor, heads: int, query: int, *args: Any, **given: Any) -> Tensor:
        q, k, v = parts(x, heads, query)
        return self.attend(q, k, v, *args, **given)


def parts(x: Tensor, heads: int, query: int) -> tuple[Tensor, ...]:
    """Query heads, source heads, and as many of values; the queries are the last positions."""
    shared = (x.shape[1] - heads) // 2
    q, k, v = x.split([heads, shared, shared], 1)
    return q[:, :, x.shape[2] - query :], k, v


class Handwritten(nn.Module):
    """Matmul, softmax, matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.mT / 2
        if real is not None:
            scores = scores.masked_fill(~real[:, None, None], -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def plain(
    q: Tensor, k: Tensor, context: Tensor, allowed: Tensor | None = None, real: Any = None,
    sinks: int = 4, scale: float | None = None, softcap: float | None = None,
    sink_logits: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The statistics of one call on the full weights in float64, (head, statistic)."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias.double()
    allowed = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed
    allowed = allowed.expand_as(scores)
    scores = scores.masked_fill(~allowed, -math.inf)
    logits = scores
    if sink_logits is not None:
        column = sink_logits.double()[:, None, None].expand(*scores.shape[:-1], 1)
        logits = torch.cat([scores, column], -1)
    weights = logits.softmax(-1)[..., : k.shape[-2]].nan_to_num(0)
    counts = allowed.sum(-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    offset = k.shape[-2] - q.shape[-2]
    own = torch.zeros_like(entropy)
    for i in range(q.shape[-2]):
        if i + offset >= 0:
            own[..., i] = weights[..., i, i + offset]
    real = (counts > 0) if real is None else real.expand_as(counts) & (counts > 0)
    found = []
    for head in range(q.shape[1]):
        rows = real[:, head]
        each = (
            entropy, torch.where(counts > 1, entropy / counts.clamp(min=2).double().log(), 0),
            weights[..., :sinks].sum(-1), weights.amax(-1), own, context.double().norm(dim=-1),
        )  # fmt: skip
        most = scores.amax(-1)[:, head][rows].max()
        means = [x[:, head][rows].mean() for x in each]
        found.append(torch.stack([most, *means, rows.sum().double()]))
    return torch.stack(found)


def draw(batch: int, heads: int, shared: int, source: int, width: int, dtype: Any = torch.float64):
    """The tensor that `Attends` splits."""
    draw = torch.Generator().manual_seed(0)
    shape = (batch, heads + 2 * shared, source, width)
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)


def read(model: nn.Module, x: Tensor, heads: int, *args: Any, query: int = 0, **given: Any) -> Any:
    """What a monitor reads of one call, (head, statistic), and query, key and context."""
    options = {name: given.pop(name) for name in ("sinks", "through") if name in given}
    query = query or x.shape[2]
    with ch.monitor(model, alarms=False, **options) as seen:
        context = model(x, heads, query, *args, **given)
    ((_, values),) = seen.history
    return values[0], (*parts(x, heads, query)[:2], context)


def close(found: Tensor, right: Tensor, eps: float = 2.0**-52) -> None:
    """Equal to the roundings of sums of about a hundred terms."""
    gap = (found - right).abs() / (1 + right.abs())
    assert gap.max() <= 256 * eps, dict(zip(STATISTICS, gap.amax(0).tolist(), strict=True))


REAL = torch.tensor([[True] * 13, [False] * 3 + [True] * 10, [True] * 6 + [False] * 7])
CAUSAL = torch.ones(13, 13, dtype=torch.bool).tril()
PACKED = torch.tensor([0] * 5 + [1] * 3 + [2] * 5)


class TestNumbers:
    @pytest.mark.parametrize("through", [False, True])
    @pytest.mark.parametrize(
        ("dtype", "eps"), [(torch.float64, 2.0**-52), (torch.float32, 2.0**-23)], ids=str
    )
    @pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
    def test_causal(self, heads: Any, dtype: torch.dtype, eps: float, through: bool) -> None:
        x = draw(3, *heads, 13, 8, dtype)
        found, call = read(Attends(), x, heads[0], is_causal=True, enable_gqa=True, through=through)
        close(found, plain(*call, CAUSAL), eps)

    @pytest.mark.parametrize("sinks", [1, 4, 50])
    def test_everything(self, sinks: int) -> None:
        found, call = read(Attends(), draw(2, 3, 3, 11, 4), 3, sinks=sinks)
        close(found, plain(*call, sinks=sinks))

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("form", ["bool", "float"])
    def test_padded(self, causal: bool, form: str) -> None:
        """Positions that no query may read are padding, and do not count as queries."""
        allowed = REAL[:, None, None].expand(3, 1, 13, 13)
        allowed = allowed & CAUSAL if causal else allowed
        given = allowed
        if form == "float":
            given = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -math.inf)
        found, (q, k, context) = read(Attends(), draw(3, 4, 4, 13, 8), 4, attn_mask=given)
        close(found, plain(q, k, context.nan_to_num(), allowed, REAL[:, None]))
        assert found[:, -1].tolist() == [REAL.sum().item()] * 4

    @pytest.mark.parametrize("ours", [False, True])
    def test_packed(self, ours: bool) -> None:
        allowed = (PACKED[:, None] == PACKED) & CAUSAL
        mask = masks.causal() & masks.document(PACKED)
        given = {"mask": mask} if ours else {"attn_mask": allowed}
        model = Attends(ch.attend) if ours else Attends()
        found, call = read(model, draw(2, 3, 3, 13, 8), 3, **given)
        close(found, plain(*call, allowed))

    @pytest.mark.parametrize("query", [7, 13])
    def test_what_attend_takes(self, query: int) -> None:
        bias, logits = torch.randn(4, query, 13).double(), torch.randn(4).double()
        bias[:, :, 2] = -math.inf
        given: dict[str, Any] = {"softcap": 3.0, "bias": bias, "scale": 0.7}
        model = Attends(lambda *args, **more: ch.attend(*args, **more, sinks=logits))
        found, call = read(model, draw(2, 4, 2, 13, 8), 4, masks.causal(), query=query, **given)
        allowed = CAUSAL[-query:] & (bias != -math.inf)
        # Source 2 is read by nobody: where queries stand for sources it is padding.
        real = torch.arange(13) != 2 if query == 13 else torch.ones(7, dtype=torch.bool)
        close(found, plain(*call, allowed, real, sink_logits=logits, **given))

    def test_more_queries_than_sources(self) -> None:
        class Longer(Attends):
            def forward(
                self, x: Tensor, heads: int, query: int, *args: Any, **given: Any
            ) -> Tensor:
                q, k, v = parts(x, heads, query)
                return self.attend(q, k[:, :, :5], v[:, :, :5])

        x = draw(2, 3, 3, 9, 4)
        found, (q, k, context) = read(Longer(), x, 3)
        close(found, plain(q, k[:, :, :5], context))

    def test_queries_without_sources_do_not_count(self) -> None:
        x, strictly = draw(1, 2, 2, 5, 4), torch.ones(5, 5, dtype=torch.bool).tril(-1)
        found, _ = read(Attends(ch.attend), x, 2, masks.dense(strictly))
        # The first may read nothing, and nothing may read the last one.
        assert found[:, -1].tolist() == [3, 3]
        found, _ = read(Attends(ch.attend), x, 2, masks.diagonal(1))
        assert found[:, -1].tolist() == [4, 4]

    def test_dropout(self) -> None:
        """Readings are those of the weights before dropout; the context is the model's own."""
        x = draw(2, 3, 3, 13, 8)
        torch.manual_seed(3)
        found, call = read(Attends(), x, 3, dropout_p=0.5)
        close(found, plain(*call))
        torch.manual_seed(3)
        assert torch.equal(call[2], Attends()(x, 3, 13, dropout_p=0.5))

    def test_bf16_autocast(self) -> None:
        torch.manual_seed(0)
        layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 13, 32)
        seen: list[tuple[Tensor, ...]] = []
        real = F.scaled_dot_product_attention

        class Spy(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                if func is real:
                    seen.append((args[0], args[1], out))
                return out

        with torch.autocast("cpu", torch.bfloat16), ch.monitor(layer) as monitor, Spy():
            layer(x, x, x, need_weights=False)
        q, k, context = seen[-1]
        assert q.dtype == torch.bfloat16
        (_, values), = monitor.history  # fmt: skip
        close(values[0], plain(q, k, context), 2.0**-23)

    def test_handwritten(self) -> None:
        torch.manual_seed(0)
        model, x = Handwritten().double(), torch.randn(3, 13, 8, dtype=torch.float64)
        with ch.monitor(model, sinks=2) as monitor:
            model(x, REAL)
        q, k = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (model.q, model.k))
        context = model(x, REAL).unflatten(-1, (2, 4)).transpose(1, 2)
        right = plain(q, k, context, REAL[:, None, None], REAL[:, None], sinks=2)
        close(monitor.history[0][1][0], right)

    def test_cross_attention_has_no_own_position(self) -> None:
        layer = nn.MultiheadAttention(8, 2, batch_first=True)
        with ch.monitor(layer) as monitor:
            layer(torch.randn(2, 5, 8), x := torch.randn(2, 7, 8), x)
        assert all(math.isnan(row["self"]) and row["rows"] == 10 for row in monitor.table())
        assert not monitor.alarms
