"""The kernel's gradients on every instruction set: bias, sinks, readings, transforms, fuzz."""

# Lists of tensors are spread over arguments of other types too.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportCallIssue=false
from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import clearhead as ch
from clearhead import masks, readings
from clearhead.attention.impl import NATIVE
from clearhead.attention.impl.native import call as calls
from clearhead.attention.impl.native import entry, maps
from clearhead.attention.impl.native import kernel as module
from clearhead.attention.impl.tiled import tiled as strips
from tests import fuzz_gradients, fuzz_native

kernel: Any = module._native
ISAS = kernel.available() if kernel else []
if kernel is None:
    pytest.skip(module.MISSING, allow_module_level=True)

HALF = masks.causal() & (masks.window(9) | masks.first(3))
READ = {
    "log-sum-exp": readings.LogSumExp(),
    "entropy": readings.Entropy(),
    "normalized entropy": readings.Entropy(normalized=True),
    "mass": readings.Mass(masks.first(2)),
    "distance": readings.Distance(),
    "received": readings.Received(),
    "rows": readings.Rows([0, -1, 0]),
    "weights": readings.Weights(),
    "top": readings.TopK(3),
    "block map": readings.BlockMap(4),
    "scores": readings.Scores(),
    "overlap": readings.Overlap(),
}
MORE = {
    "scores": (readings.Scores(), readings.Scores()),
    "overlap": (readings.Overlap(), readings.Weights()),
    "masses": (
        readings.Mass(masks.first(2)), readings.Mass(HALF), readings.Mass(masks.nothing()),
        readings.Mass(masks.diagonal(1)), READ["mass"], READ["mass"],
    ),
}  # fmt: skip
MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(9),
    "lengths": masks.lengths([50, 0]),
    "ranges": HALF,
    "documents": masks.document(torch.arange(70) // 16) & masks.causal(),
    "edges": masks.edges([(k, 3 + k * 7 % 70) for k in range(3, 67)]),
    "bytes": torch.rand(2, 4, 67, 70, generator=torch.Generator().manual_seed(5)) < 0.4,
}
BIASES = [
    (67, 70), (4, 67, 70), (2, 1, 67, 70), (2, 4, 67, 70), (70,), (67, 1), (4, 1, 1), (1,),
    (2, 1, 1, 70), (4, 1, 70), (1, 4, 67, 1),
]  # fmt: skip


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    kernel.choose(request.param)
    assert kernel.isa() == request.param
    yield request.param
    kernel.choose("")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient comes from the fallback."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("the kernel has this gradient itself")

    monkeypatch.setattr(NATIVE, "fallback_gradient", refuse)


def given(seed: int = 0, query: int = 67, source: int = 70, **more: tuple[int, ...]) -> dict:
    """Leaves of a small problem with grouped heads, and whatever else is named by its shape."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"query": (2, 4, query, 16), "key": (2, 2, source, 16), "value": (2, 2, source, 12)}
    return {name: torch.randn(shape, generator=draw) for name, shape in {**shapes, **more}.items()}


def gradients(impl: str, inputs: dict, dtype: Any = None, **call: Any) -> list[Tensor]:
    """Of a weighted sum of everything that comes out and has a gradient."""
    leaves = {n: x.to(dtype or x.dtype).clone().requires_grad_() for n, x in inputs.items()}
    context, values = ch.attend(**leaves, impl=impl, **{"read": (), **call})
    draw = torch.Generator().manual_seed(1)
    outputs = [context, *(v[0] if isinstance(v, tuple) else v for v in values)]
    pulls = [torch.randn(x.shape, generator=draw).to(x.dtype) for x in outputs]
    return list(torch.autograd.grad(outputs, [*leaves.values()], pulls))


def agree(inputs: dict, **call: Any) -> None:
    """At most twice the error of the reference in fp32, and what the terms round to."""
    ours, theirs = (gradients(impl, inputs, **call) for impl in ("native", "reference"))
    right = gradients("reference", inputs, torch.float64, **call)
    for a, b, c in zip(ours, theirs, right, strict=True):
        # Sums over a row, and of a bias over many rows: their terms are as large as a gradient.
        rounding = torch.finfo(torch.float32).eps * 70 * (1 + c.abs().max())
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + rounding


class Largest(readings.Reading):
    """The largest weight of each head: its gradient belongs to one strip alone."""

    def part(self, strip: readings.Strip) -> Tensor:
        return strip.weights.amax((-2, -1))

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.maximum(left, right)

    def finish(self, part: Tensor) -> Tensor:
        return part


class TestLargestScores:
    """Their gradient is the fallback's."""

    @pytest.mark.parametrize("name", ["none", "causal", "lengths", "edges"])
    def test_equals_the_references(self, isa: str, name: str) -> None:
        agree(given(), mask=MASKS[name], read=(readings.MaxScore(), readings.Entropy()))

    def test_equal_scores_share_it(self, isa: str) -> None:
        query, key = torch.ones(1, 1, 3, 2), torch.ones(1, 1, 4, 2, requires_grad=True)
        mask = masks.lengths([3]) & masks.causal()
        _, largest = ch.attend(query, key, key, mask, read=readings.MaxScore(), impl="native")
        (found,) = torch.autograd.grad(largest.sum(), key)
        # Query 0 stands at source 1: 2, 3 and 3 sources are open.
        share = torch.tensor([1 / 2 + 2 / 3, 1 / 2 + 2 / 3, 2 / 3, 0]) / 2**0.5
        assert torch.allclose(found[0, 0], share[:, None].expand(4, 2))


class TestReadings:
    @pytest.mark.parametrize("name", READ)
    def test_one_asked_twice(self, isa: str, name: str) -> None:
        agree(given(), mask=masks.causal(), read=(READ[name], READ[name]))

    @pytest.mark.parametrize("name", READ)
    @pytest.mark.parametrize("mask", [None, masks.causal(), masks.lengths([50, 3])])
    def test_one_at_a_time(self, isa: str, alone: None, name: str, mask: Any) -> None:
        agree(given(), mask=mask, read=(READ[name],))

    def test_all_at_once_with_everything(self, isa: str, alone: None) -> None:
        read = tuple(r for r in READ.values() if getattr(r, "normalized", False) is False)
        inputs = given(sinks=(4,), bias=(4, 67, 70))
        agree(inputs, mask=HALF, read=read, softcap=3.0, scale=0.4)

    def test_only_a_reading_has_a_gradient(self, isa: str, alone: None) -> None:
        leaves = {n: x.requires_grad_() for n, x in given().items()}
        _, entropy = ch.attend(**leaves, read=readings.Entropy(), impl="native")
        entropy.sum().backward()
        assert leaves["query"].grad.any()
        assert not leaves["value"].grad.any()

    def test_gradients_at_blocked_edges_do_not_count(self, isa: str, alone: None) -> None:
        leaves = {n: x.requires_grad_() for n, x in given(query=70).items()}
        _, weights = ch.attend(**leaves, mask=HALF, read=readings.Weights(), impl="native")
        (weights * weights.log()).nan_to_num(0).sum().backward()
        assert all(x.grad.isfinite().all() for x in leaves.values())

    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("name", ["scores", "overlap", "masses"])
    def test_under_any_mask_with_everything(
        self, isa: str, alone: None, name: str, mask: str
    ) -> None:
        inputs = given(sinks=(4,), bias=(4, 67, 70))
        inputs["bias"][..., 60] = -torch.inf
        agree(inputs, mask=MASKS[mask], read=MORE[name], softcap=3.0, scale=-0.4)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["scores", "overlap", "masses"])
    def test_in_half_precision(self, isa: str, alone: None, name: str, dtype: torch.dtype) -> None:
        inputs = {n: x.to(dtype) for n, x in given().items()}
        read = MORE[name]
        ours = gradients("native", inputs, mask=masks.causal(), read=read)
        right = gradients("reference", inputs, torch.float64, mask=masks.causal(), read=read)
        for a, b in zip(ours, right, strict=True):
            assert a.dtype == dtype
            assert (a - b).abs().max() <= 8 * torch.finfo(dtype).eps * (1 + b.abs().max())

    def test_the_kernel_gives_them_once(self, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """One backward of the kernel has the context's gradient and all of the readings'."""
        ran, own = [], entry.backward
        monkeypatch.setattr(entry, "backward", lambda *given: ran.append(1) or own(*given))
        gradients("native", given(), read=(*MORE["masses"], *MORE["scores"], *MORE["overlap"]))
        assert ran == [1]

    def test_gradients_of_scores_at_blocked_edges_do_not_count(self, isa: str, alone: None) -> None:
        leaves = {n: x.requires_grad_() for n, x in given(query=70, bias=(70, 70)).items()}
        mask = HALF & masks.lengths([60, 0])
        _, scores = ch.attend(**leaves, mask=mask, read=readings.Scores(), impl="native")
        pull = torch.full(scores.shape, torch.nan).masked_fill(scores.detach() > -torch.inf, 1)
        scores.backward(pull)
        assert all(x.grad.isfinite().all() for x in leaves.values())
        assert not leaves["query"].grad[1].any()
        assert not leaves["key"].grad[1].any()
        allowed = (scores.detach()[0] > -torch.inf).float()
        torch.testing.assert_close(leaves["bias"].grad, allowed.sum(0))

    def test_overlap_in_parts(self, isa: str, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(maps, "WEIGHTS", 1)
        read = (readings.Overlap(), readings.Rows([3, 66, 3]), readings.Mass(HALF))
        agree(given(query=150, source=151), mask=HALF, read=read)

    @pytest.mark.parametrize("read", [readings.BlockMap(5), readings.Entropy(normalized=True)])
    def test_the_fallback_computes_what_the_kernel_does_not_support(
        self, isa: str, monkeypatch: pytest.MonkeyPatch, read: Any
    ) -> None:
        asked, through = [], NATIVE.fallback_gradient

        def spy(problem: Any, others: Any, *args: Any) -> Any:
            asked.append((others, args[0][0]))
            return through(problem, others, *args)

        monkeypatch.setattr(NATIVE, "fallback_gradient", spy)
        agree(given(bias=(67, 70)), read=(readings.BlockMap(4), read))
        assert asked == [((read,), None)]

    def test_a_gradient_that_does_not_split_comes_from_the_reference(
        self, isa: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(strips, "ELEMENTS", 1)
        monkeypatch.setattr(strips, "ROWS", 7)
        agree(given(), read=(Largest(), readings.Entropy()))

    def test_the_largest_weights_of_a_block_map_have_no_gradient(self, isa: str) -> None:
        leaves = {n: x.requires_grad_() for n, x in given().items()}
        _, value = ch.attend(**leaves, read=readings.BlockMap(3), impl="native")
        assert value.mean.requires_grad
        assert not value.max.requires_grad


class TestBias:
    @pytest.mark.parametrize("shape", BIASES)
    def test_any_broadcast(self, isa: str, alone: None, shape: tuple[int, ...]) -> None:
        agree(given(bias=shape), mask=masks.causal())

    def test_two_batch_axes(self, isa: str, alone: None) -> None:
        inputs = given(bias=(3, 1, 1, 67, 1))
        for name in ("query", "key", "value"):
            inputs[name] = inputs[name].expand(3, *inputs[name].shape)
        agree(inputs, read=(readings.Entropy(), readings.Received()))

    def test_blocked_edges_and_empty_rows_have_none(self, isa: str, alone: None) -> None:
        inputs = given(bias=(67, 70))
        inputs["bias"][:5], inputs["bias"][:, 60:] = -torch.inf, -torch.inf
        found = gradients("native", inputs)
        assert not found[3][:5].any()
        assert not found[3][:, 60:].any()
        assert not found[1][:, :, 60:].any()
        agree(inputs)

    def test_memory_is_that_of_the_bias(self, isa: str, alone: None) -> None:
        """The sums of a bias for all heads are as large as it, whatever the heads and samples."""
        from clearhead.attention.impl.native.backward import BiasSums
        from clearhead.attention.problem import Problem

        q = torch.ones(3, 5, 7, 2)
        for shape in ((7, 9), (9,), (5, 1, 9), (3, 1, 7, 1)):
            problem = Problem(q, q, q, None, 1.0, torch.ones(shape))
            assert BiasSums(problem).sums.numel() == problem.bias.numel()

    @pytest.mark.parametrize("threads", [1, 2, 3])
    def test_equal_bits(self, isa: str, threads: int) -> None:
        torch.set_num_threads(threads)
        try:
            for shape in ((67, 70), (67, 1)):
                inputs = given(bias=shape, sinks=(4,))
                call = {"mask": masks.causal(), "read": (readings.Received(), readings.TopK(2))}
                first, second = (gradients("native", inputs, **call) for _ in range(2))
                assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        finally:
            torch.set_num_threads(1)


class TestParts:
    def test_bytes_in_parts(self, isa: str, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calls, "RANGES", 1)
        monkeypatch.setattr(calls, "EDGES", 1)
        read = (readings.Mass(HALF), readings.Received(), readings.Rows([3]), readings.BlockMap(3))
        read += (readings.Scores(), readings.Mass(masks.first(2)), readings.Mass(HALF | HALF))
        agree(given(bias=(67, 70)), mask=HALF, read=read)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, isa: str, alone: None, dtype: torch.dtype) -> None:
        inputs = {n: x.to(dtype) for n, x in given(bias=(67, 70)).items()}
        read = (readings.Entropy(), readings.Received(), readings.Weights())
        ours = gradients("native", inputs, mask=masks.causal(), read=read)
        right = gradients("reference", inputs, torch.float64, mask=masks.causal(), read=read)
        for a, b in zip(ours, right, strict=True):
            assert a.dtype == dtype
            assert (a - b).abs().max() <= 8 * torch.finfo(dtype).eps * (1 + b.abs().max())


class TestTorch:
    def test_double_backward_comes_from_the_fallback(self, isa: str) -> None:
        found = []
        for impl in ("native", "reference"):
            leaves = {n: x.double() if impl == "reference" else x for n, x in given().items()}
            leaves = {n: x.requires_grad_() for n, x in leaves.items()}
            context, entropy = ch.attend(**leaves, read=readings.Entropy(), impl=impl)
            total = context.square().sum() + entropy.sum()
            first = torch.autograd.grad(total, [*leaves.values()], create_graph=True)
            found.append(
                torch.autograd.grad(sum(x.square().sum() for x in first), [*leaves.values()])
            )
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4 * b.abs().max().item())

    def test_forward_mode_is_refused_by_name_and_right_elsewhere(self, isa: str) -> None:
        inputs = given()
        with forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(x, torch.ones_like(x)) for n, x in inputs.items()}
            with pytest.raises(ValueError, match="forward-mode"):
                ch.attend(**duals, impl="native")
            tangent = forward_ad.unpack_dual(ch.attend(**duals)).tangent
            right = forward_ad.unpack_dual(ch.attend(**duals, impl="reference")).tangent
        torch.testing.assert_close(tangent, right)

    def test_autocast(self, isa: str, alone: None) -> None:
        leaves = {n: x.requires_grad_() for n, x in given(bias=(67, 70)).items()}
        with torch.autocast("cpu", torch.bfloat16):
            context, mass = ch.attend(**leaves, read=readings.Mass(masks.first(1)), impl="native")
        assert context.dtype == torch.bfloat16
        (context.float().square().sum() + mass.sum()).backward()
        wide = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
        context, mass = ch.attend(**wide, read=readings.Mass(masks.first(1)), impl="reference")
        (context.square().sum() + mass.sum()).backward()
        for ours, right in zip(leaves.values(), wide.values(), strict=True):
            assert ours.grad.dtype == torch.float32
            assert (ours.grad - right.grad).abs().max() <= 2**-5 * (1 + right.grad.abs().max())

    def test_compiled_gradients_of_bias_and_sinks(self) -> None:
        inputs = given(bias=(4, 1, 70), sinks=(4,))

        @torch.compile(fullgraph=True)
        def call(**leaves: Tensor) -> Tensor:
            return ch.attend(**leaves, mask=masks.causal(), impl="native")

        found = []
        for attend in (call, lambda **x: ch.attend(**x, mask=masks.causal(), impl="native")):
            leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attend(**leaves).square().sum().backward()
            found.append([x.grad for x in leaves.values()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        ("mask", "scale", "size"), [(masks.lengths([50, 0]), 1e30, 1.0), (HALF, 0.25, 3e38)]
    )
    def test_numbers_out_of_range_compiled(self, mask: Any, scale: float, size: float) -> None:
        inputs = given(query=70)
        inputs["value"] = inputs["value"].sign() * size

        def eager(**leaves: Tensor) -> Any:
            return ch.attend(**leaves, mask=mask, scale=scale, read=readings.LogSumExp())

        found = []
        for call in (eager, torch.compile(eager, backend="aot_eager")):
            leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
            context, lse = call(**leaves)
            (context / size).sum().backward()
            found.append([context, lse, *(x.grad for x in leaves.values())])
        for ours, right in zip(*found, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)


class TestFuzz:
    def test_some(self, isa: str) -> None:
        for seed in range(60):
            fuzz_gradients.check(seed)

    def test_a_lie_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fuzz_gradients, "draw", fuzz_native.shifted(fuzz_gradients.draw))
        assert sum(fuzz_native.fails(fuzz_gradients.check, seed) for seed in range(60)) > 15
