"""Faults of `attend` that use has shown: drift over many sources, ties, memory and inputs."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import clearhead as ch
from clearhead import masks, readings
from clearhead.attention import batches

IMPLEMENTATIONS = ("native", "tiled", "reference")
# A few roundings of float32.
ROUNDINGS = 8 * 2**-24


def off(got: Tensor, right: Tensor) -> float:
    """The largest relative error."""
    return ((got.double() - right) / right).abs().max().item()


@pytest.mark.parametrize("queries", [3, 7])
def test_sums_over_many_sources_are_exact(queries: int) -> None:
    torch.manual_seed(0)
    sources = 300_000
    q, k = torch.randn(1, 1, queries, 4), torch.randn(1, 1, sources, 4)
    v = torch.rand(1, 1, sources, 3) + 1 / 3
    read = (
        readings.Mass(masks.window(sources // 3)),
        readings.Distance(),
        readings.Entropy(),
        readings.BlockMap(1),
    )
    context, found = ch.attend(q, k, v, read=read, impl="native")
    w = (q.double() @ k.double().mT / 2).softmax(-1)
    back = torch.arange(queries)[:, None] + sources - queries - torch.arange(sources)
    assert off(context, w @ v.double()) < ROUNDINGS
    assert off(found[0], (w * ((back >= 0) & (back < sources // 3))).sum(-1)) < ROUNDINGS
    assert off(found[1], (w * back.abs()).sum(-1)) < ROUNDINGS
    assert off(found[2], -(w * w.log()).sum(-1)) < ROUNDINGS
    assert off(found[3].mean, torch.full((), 1 / sources).double()) < ROUNDINGS


def test_sums_over_many_queries_are_exact() -> None:
    q, k = torch.zeros(1, 70, 40_000, 1), torch.zeros(1, 70, 3, 1)
    read = (readings.Received(), readings.BlockMap(2))
    _, (received, cells) = ch.attend(q, k, k, read=read, impl="native")
    assert off(received, torch.tensor(40_000 / 3).double()) < ROUNDINGS
    assert off(cells.mean, torch.tensor(1 / 3).double()) < ROUNDINGS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folded_sums_keep_sinks_and_blocked_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 4).to(dtype) for n in (37, 2500, 2500))
    mask = masks.dense(torch.rand(37, 2500) < 0.4) - masks.diagonal(0)
    call: dict[str, Any] = {"sinks": torch.tensor([1.0, 8.0]), "read": readings.Entropy()}
    context, entropy = ch.attend(q, k, v, mask, impl="native", **call)
    right, right_entropy = ch.attend(*(x.double() for x in (q, k, v)), mask, **call)  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(entropy.double(), right_entropy, atol=2e-6, rtol=2e-6)
    # Weights are rounded to bfloat16 beside it, as torch does.
    atol = 2e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(context.double(), right, atol=atol, rtol=0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("normalized", [False, True])
def test_entropy_is_never_negative(impl: str, normalized: bool) -> None:
    torch.manual_seed(0)
    q, k = 9 * torch.randn(2, 3, 67, 5), torch.randn(2, 3, 67, 5)
    read = readings.Entropy(normalized=normalized)
    entropy = ch.attend(q, k, k, masks.window(2), read=read, impl=impl)[1]
    assert not torch.signbit(entropy).any()
    q[0, 0, 5] = torch.nan
    nan = ch.attend(q, k, k, masks.window(2), read=read, impl=impl)[1].isnan()
    assert nan[0, 0, 5]
    assert nan.sum() == 1


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_entropy_has_its_gradient_where_it_is_clamped(impl: str) -> None:
    torch.manual_seed(0)
    k = torch.randn(1, 1, 9, 4)
    grads = []
    for dtype in (torch.float32, torch.float64):
        q = (30 * torch.randn(1, 1, 40, 4, generator=torch.Generator().manual_seed(1))).to(dtype)
        q.requires_grad_()
        call = impl if dtype == torch.float32 else "reference"
        read = readings.Entropy()
        ch.attend(q, k.to(dtype), k.to(dtype), read=read, impl=call)[1].sum().backward()
        grads.append(q.grad.double())  # type: ignore[union-attr]
    torch.testing.assert_close(grads[0], grads[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale", [1.0, -0.7, 0.0])
@pytest.mark.parametrize("k", [3, 20, 70])
def test_top_is_ordered_by_scores(impl: str, scale: float, k: int) -> None:
    g = torch.Generator().manual_seed(k)
    q = torch.randint(-3, 4, (2, 4, 67, 2), generator=g).float()
    key = torch.randint(-3, 4, (2, 2, 67, 2), generator=g).float() / 8
    found = ch.attend(q, key, key, masks.causal(), scale=scale, read=readings.TopK(k), impl=impl)[1]
    scores = (q.double() @ key.double().repeat_interleave(2, 1).mT) * scale
    scores.masked_fill_(torch.ones(67, 67).triu(1).bool(), -torch.inf)
    order = scores.sort(dim=-1, descending=True, stable=True)
    right = order.indices.masked_fill(order.values == -torch.inf, -1)[..., :k]
    right = torch.nn.functional.pad(right, (0, k - right.shape[-1]), value=-1)
    assert torch.equal(found.sources, right)


def test_equal_scores_in_parts_go_to_the_lower_source() -> None:
    scores = torch.tensor([[0.3, 0.7, 0.7, 0.7, 0.1]])
    lse, top = scores.logsumexp(-1), readings.TopK(2)
    strip = readings.Strip.of
    parts = [
        top.part(strip(scores[:, at], lse=lse, sources=at, query=1, source=5))
        for at in ([3, 4], [0, 1], [2])
    ]
    found = top.finish(top.merge(top.merge(parts[0], parts[1]), parts[2]))
    assert found.sources.tolist() == [[1, 2]]


@pytest.mark.parametrize("order", ["rising", "random", "equal"])
def test_long_lists_are_right_in_every_order(order: str) -> None:
    sources, k = 3000, 300
    score = {
        "rising": torch.arange(sources).float(),
        "random": torch.randn(sources, generator=torch.Generator().manual_seed(0)),
        "equal": torch.zeros(sources),
    }[order]
    q, key = torch.ones(1, 1, 5, 1), score.view(1, 1, -1, 1)
    call = ch.attend(q, key, key, scale=0.01, read=readings.TopK(k), impl="native")
    right = score.sort(descending=True, stable=True).indices[:k]
    assert torch.equal(call[1].sources, right.expand(1, 1, 5, k))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_rows(impl: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 4, 8, requires_grad=True)
    rows = ch.attend(x, x, x, read=readings.Rows([]), impl=impl)[1]
    rows.sum().backward()
    assert rows.shape == (1, 1, 0, 4)
    assert x.grad is not None
    assert not x.grad.any()


@pytest.mark.parametrize("impl", ["native", "tiled"])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_freed_storage_is_named(impl: str, name: str) -> None:
    inputs = {n: torch.randn(1, 2, 6, 8, requires_grad=True) for n in ("query", "key", "value")}
    context = ch.attend(**inputs, impl=impl)  # pyright: ignore[reportArgumentType]
    inputs[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"storage of {name} was resized to 0 bytes"):
        context.sum().backward()


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("k", readings.TopK(10**10)),
        ("cells", readings.BlockMap(10**6)),
        ("queries", readings.Rows(range(300_000))),
        ("read", readings.Weights()),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(name: str, read: Any) -> None:
    x = torch.zeros(1, 1, 1, 1).expand(8, 8, 300_000, 1)
    with pytest.raises(ValueError, match=rf"^{name}: .*fit in memory; got [\d,]+ bytes"):
        ch.attend(x, x, x, read=read)


MEMORY = """
import sys, torch, clearhead as ch
from clearhead import masks, readings
from resource import RUSAGE_SELF, getrusage
q = torch.randn(1, 4, 2048, 16)
{setup}
before = getrusage(RUSAGE_SELF).ru_maxrss
ch.attend(q, q, q, {call})
print((getrusage(RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
WARM = "ch.attend(q, q, q, masks.causal(), impl='tiled', read=readings.Entropy())"


@pytest.mark.parametrize(
    ("setup", "call", "most"),
    [
        (
            f"m = torch.ones(2048, 2048).tril().bool().expand(1, 4, -1, -1); {WARM}",
            "m, impl='tiled'",
            32,
        ),
        (
            f"m = torch.rand(1, 4, 2048, 2048) < 0.5; {WARM}",
            "m, read=readings.Entropy(normalized=True)",
            32,
        ),
        (f"m = torch.arange(2048).view(1, 1, 1, -1) < 2045; {WARM}", "m, impl='tiled'", 8),
        (f"m = torch.rand(1, 1, 1, 2048) < 0.9; {WARM}", "m, impl='tiled'", 8),
        (f"m = torch.rand(2048, 2048) < 0.5; {WARM}", "m, impl='tiled'", 14),
        (f"q = torch.randn(1, 1, 4096, 8); {WARM}", "read=readings.BlockMap(1024)", 64),
        (
            "q = torch.randn(2, 64, 1, 512, 8); b = torch.randn(2, 1, 1, 512, 512); "
            "ch.attend(q, q, q, bias=b[:, :, :, :1])",
            "bias=b",
            24,
        ),
    ],
)
def test_memory(setup: str, call: str, most: float) -> None:
    code = MEMORY.format(setup=setup, call=call)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(run.stdout) <= most


@pytest.mark.parametrize("shape", [(2, 1, 1, 5, 5), (1, 3, 1, 5, 5), (2, 1, 2, 5, 5), (3, 1, 1, 5)])
def test_batches_that_broadcast_in_part(monkeypatch: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 2, 5, 4, dtype=torch.float64) for _ in range(3)]
    mask = torch.rand(2, 1, 1, 5, 5) < 0.8
    bias = torch.randn(shape, dtype=torch.float64)

    def results(*, small: int) -> list[Tensor]:
        monkeypatch.setattr(batches, "SMALL", small)
        given = [x.clone().requires_grad_() for x in (*inputs, bias)]
        read = (readings.TopK(2), readings.Overlap())
        context, (top, overlap) = ch.attend(*given[:3], mask, bias=given[3], read=read)  # pyright: ignore[reportCallIssue]
        loss = context.pow(2).sum() + top.weights.pow(2).sum() + overlap.pow(2).sum()
        return [context, *top, overlap, *torch.autograd.grad(loss, given)]

    for ours, right in zip(results(small=0), results(small=1 << 40), strict=True):
        torch.testing.assert_close(ours, right)


def test_func_transforms_under_compile() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)

    def loss(q: Tensor) -> Tensor:
        context, entropy = ch.attend(q, q, q, masks.causal(), read=readings.Entropy())
        return context.pow(2).sum() + entropy.sum()

    grad = torch.func.grad(loss)
    for call in (grad, torch.vmap(grad), torch.func.jacrev(loss)):
        assert torch.equal(torch.compile(call, backend="eager")(x), call(x))


class Named(Tensor):
    """A subclass that adds nothing."""


class NamedParameter(nn.Parameter):
    """A subclass of Parameter that adds nothing."""


@pytest.mark.parametrize("kind", [Named, NamedParameter])
def test_a_subclass_that_adds_nothing_is_plain(kind: Any) -> None:
    torch.manual_seed(0)
    plain = torch.randn(2, 4, 6, 8)
    x = plain.as_subclass(Named) if kind is Named else NamedParameter(plain)
    read = (readings.TopK(2), readings.Entropy())
    context, (top, entropy) = ch.attend(x, x, x, read=read, impl="native")
    right, (right_top, right_entropy) = ch.attend(plain, plain, plain, read=read)
    pairs = ((context, right), (top.weights, right_top.weights), (entropy, right_entropy))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(top.sources, right_top.sources)
    assert type(context) is (Named if kind is Named else Tensor)


class Passing(Tensor):
    """A subclass that overrides the protocol, and passes every call on."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "read", [readings.TopK(2), readings.BlockMap(3), (readings.TopK(1), readings.Entropy())]
)
def test_a_subclass_that_overrides_the_protocol_gets_named_values(read: Any) -> None:
    torch.manual_seed(0)
    plain = torch.randn(2, 4, 6, 8)
    x = plain.as_subclass(Passing)
    (_, values), (_, right) = (ch.attend(y, y, y, masks.causal(), read=read) for y in (x, plain))
    assert type(values) is type(right)
    first, wanted = (v if hasattr(v, "_fields") else v[0] for v in (values, right))
    assert first._fields == wanted._fields
    for ours, theirs in zip(pytree.tree_leaves(values), pytree.tree_leaves(right), strict=True):
        torch.testing.assert_close(ours.as_subclass(Tensor), theirs)


def test_a_subclass_has_gradients_and_is_watched() -> None:
    plain = torch.randn(2, 4, 6, 8, requires_grad=True)
    x = plain.as_subclass(Named)
    ch.attend(x, x, x, bias=torch.zeros(6, 6).as_subclass(Named)).pow(2).sum().backward()
    assert plain.grad is not None
    assert plain.grad.any()


@pytest.mark.parametrize("impl", [None, *IMPLEMENTATIONS])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("first", [0.0, 0.5, 1.0])
def test_float8_is_refused_by_name(impl: Any, dtype: torch.dtype, first: float) -> None:
    x = torch.full((1, 2, 4, 8), first)
    small = torch.full((4, 4), first).to(dtype)
    match = r"float64, float32, bfloat16 or float16\); got (torch\.)?float8"
    with pytest.raises(TypeError, match=match):
        ch.attend(x.to(dtype), x.to(dtype), x.to(dtype), impl=impl)
    with pytest.raises(TypeError, match="bias: .*" + match):
        ch.attend(x, x, x, bias=small, impl=impl)
    with pytest.raises(TypeError, match="sinks: .*" + match):
        ch.attend(x, x, x, sinks=small[0, :2], impl=impl)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("number", [0.0, 1.0, 0.5])
def test_float8_is_refused_by_the_layer(name: Any, dtype: torch.dtype, number: float) -> None:
    layer, x = ch.MultiheadAttention(8, 2, batch_first=True), torch.zeros(1, 4, 8)
    mask = torch.full((4, 4) if name == "attn_mask" else (1, 4), number).to(dtype)
    with pytest.raises(TypeError, match=name + r": .*got torch\.float8"):
        layer(x, x, x, **{name: mask})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(2) | masks.first(1)])
def test_onnx_from_torchscript(mask: Any) -> None:
    import onnx
    from onnx.reference import ReferenceEvaluator

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ch.attend(x, x, x, mask, softcap=3.0)

    x, file = torch.randn(1, 2, 5, 8), io.BytesIO()
    torch.onnx.export(Net(), (x,), file, dynamo=False, opset_version=17)  # pyright: ignore[reportArgumentType]
    model = onnx.load_from_string(file.getvalue())
    (got,) = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.tensor(got), Net()(x))
