"""The compiled kernel on every instruction set of the machine, and that the one asked for ran."""

# Lists of tensors are spread over arguments of other types too.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import clearhead as ch
from clearhead import masks, readings
from clearhead._core.sizes import Sizes
from clearhead.attention.impl import NATIVE, dropout
from clearhead.attention.impl.native import call as calls
from clearhead.attention.impl.native import kernel as module
from clearhead.attention.problem import Problem
from tests import fuzz_native, oracle
from tests.cases import CASES, Case, naive

kernel: Any = module._native
ISAS = kernel.available() if kernel else []
if kernel is None:
    pytest.skip(module.MISSING, allow_module_level=True)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    kernel.choose(request.param)
    assert kernel.isa() == request.param
    yield request.param
    kernel.choose("")


def attend(*args: Any, **kwargs: Any) -> Any:
    return ch.attend(*args, impl="native", **kwargs)


def tensors(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).to(dtype) for _ in range(3)]


READ = (
    readings.LogSumExp(), readings.Entropy(), readings.TopK(3), readings.Received(),
    readings.BlockMap(3), readings.Mass(masks.first(2)), readings.Distance(),
    readings.Rows([0, -1]), readings.Weights(), readings.MaxScore(),
)  # fmt: skip


def served(case: Case) -> bool:
    sizes = (*case.batch, case.head, case.query, case.sources, case.head_dim)
    return 0 not in (*sizes[:-4], *sizes[-3:]) and case.value_dim != 0


SERVED = [case for case in CASES if served(case)]


class TestEveryCase:
    @pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
    def test_context_and_log_sum_exp(self, isa: str, case: Case) -> None:
        given = case.inputs()
        context, lse = attend(**given, read=readings.LogSumExp())
        right, (plain, plain_lse) = case.right(given), naive(case, given)
        f32 = torch.float32
        # Without a fused multiply-add every product is rounded once more.
        slack = 1.5 if isa == "baseline" else 1
        assert oracle.error(context, right.context) <= slack * oracle.budget(
            plain, right.context, f32
        )
        assert oracle.error(lse, right.lse) <= oracle.budget(plain_lse, right.lse, f32)

    @pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
    def test_gradients(self, isa: str, case: Case) -> None:
        found = []
        for impl, dtype in (("native", None), ("reference", None), ("reference", torch.float64)):
            given = case.inputs()
            leaves = {n: given[n] for n in ("query", "key", "value", "sinks") if n in given}
            leaves = {n: x.to(dtype or x.dtype).clone().requires_grad_() for n, x in leaves.items()}
            context, lse = ch.attend(**{**given, **leaves}, read=readings.LogSumExp(), impl=impl)
            lse = torch.where(lse.isinf(), 0, lse)
            (context.square().sum() + lse.sum()).backward()
            found.append([x.grad for x in leaves.values()])
        size = self.terms(leaves, context, given)
        for ours, theirs, right in zip(*found, strict=True):
            rounding = torch.finfo(torch.float32).eps * (right.abs().max() + size)
            assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + rounding

    @staticmethod
    def terms(leaves: dict[str, Tensor], context: Tensor, given: dict[str, Any]) -> float:
        """The size of the terms whose difference is a gradient: grad . v - grad . context."""
        query, key, value = (leaves[name].detach().abs() for name in ("query", "key", "value"))
        scale = given.get("scale", query.shape[-1] ** -0.5)
        dots = 2 * context.detach().abs().sum(-1).max() * value.max()
        return float(abs(scale) * dots * max(query.max(), key.max()))


class TestSizes:
    """Edges of tiles, lanes and blocks, with every reading, in every dtype."""

    @pytest.mark.parametrize("query", [1, 4, 5, 15, 16, 17, 47, 48, 49, 64, 97])
    @pytest.mark.parametrize("source", [1, 63, 64, 65, 131])
    def test_readings(self, isa: str, query: int, source: int) -> None:
        q, _, _ = tensors(1, 2, query, 7)
        k, v, _ = tensors(1, 2, source, 7, seed=1)
        mask = masks.window(50)
        context, values = attend(q, k, v, mask, read=READ)
        theirs, right = ch.attend(q, k, v, mask, read=READ, impl="reference")
        torch.testing.assert_close(context, theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values, right, rtol=2e-5, atol=2e-5)
        assert torch.equal(context, attend(q, k, v, mask))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("width", [1, 7, 16, 33, 64])
    def test_half_precision(self, isa: str, dtype: torch.dtype, width: int) -> None:
        q, k, v = tensors(1, 2, 65, width, dtype=dtype)
        context = attend(q, k, v, masks.causal())
        wide = [x.double() for x in (q, k, v)]
        right = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        eps = torch.finfo(dtype).eps
        assert (context - right).abs().max() <= 2 * (theirs - right).abs().max() + eps

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_gradients(self, isa: str, dtype: torch.dtype) -> None:
        found = []
        for attention, kind in (
            (attend, dtype),
            (torch.nn.functional.scaled_dot_product_attention, dtype),
            (torch.nn.functional.scaled_dot_product_attention, torch.float64),
        ):
            leaves = [x.to(kind).requires_grad_() for x in tensors(1, 2, 67, 32, dtype=dtype)]
            context = attention(*leaves)
            found.append(torch.autograd.grad(context, leaves, torch.ones_like(context) / 3))
        for ours, theirs, right in zip(*found, strict=True):
            rounding = torch.finfo(dtype).eps * right.abs().max()
            assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + rounding


class TestDropout:
    """The weights that are dropped are those of the hash, in every lane and tile."""

    P = 0.3

    def kept(self, seed: int, *sizes: int) -> Tensor:
        batch, head, query, source = sizes
        torch.manual_seed(seed)
        rows, columns = torch.arange(query), torch.arange(source)
        drawn = torch.randint(2**63 - 1, ())
        shape = Sizes(batch, head, query, source)
        return dropout.keep(drawn, self.P, (batch, head), rows, columns, shape)

    def dropped(self, seed: int, *inputs: Any, **given: Any) -> Any:
        torch.manual_seed(seed)
        return attend(*inputs, dropout=self.P, **given)

    @pytest.mark.parametrize("query", [1, 16, 49, 65, 97])
    @pytest.mark.parametrize("source", [1, 64, 131, 300])
    def test_exactly_these_are_dropped(self, isa: str, query: int, source: int) -> None:
        """The values are the identity, so that the context is the weights that are left."""
        q, k = torch.randn(2, 4, query, 8), torch.randn(2, 2, source, 8)
        eye = torch.eye(min(source, 256)).expand(2, 2, -1, -1)
        value = torch.zeros(2, 2, source, 256)
        value[..., : eye.shape[-2], : eye.shape[-1]] = eye
        kept = self.kept(3, 2, 4, query, source)
        for seed, mask in ((3, None), (3, masks.window(50))):
            mixed = self.dropped(seed, q, k, value, mask=mask)[..., : eye.shape[-1]]
            _, weights = attend(q, k, value, mask=mask, read=readings.Weights())
            right = torch.where(kept, weights.double() / (1 - self.P), 0)[..., : eye.shape[-1]]
            assert torch.equal(mixed != 0, right != 0)
            # The sum of the weights and their scale are rounded in one order or the other.
            torch.testing.assert_close(mixed.double(), right, rtol=4 * 2.0**-23, atol=0)

    def test_looking_changes_nothing(self, isa: str) -> None:
        q, k, v = tensors(2, 3, 97, 16)
        plain = self.dropped(5, q, k, v, mask=masks.causal())
        seen, values = self.dropped(5, q, k, v, mask=masks.causal(), read=READ)
        assert torch.equal(plain, seen)
        _, right = attend(q, k, v, mask=masks.causal(), read=READ)
        assert all(map(torch.equal, tree_leaves(values), tree_leaves(right)))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_gradients(self, isa: str, dtype: torch.dtype) -> None:
        found = []
        kept = self.kept(7, 2, 3, 67, 67) / (1 - self.P)
        for wide in (False, True):
            leaves = [x.to(torch.float64 if wide else dtype) for x in tensors(2, 3, 67, 32)]
            leaves = [x.to(dtype).to(x.dtype).requires_grad_() for x in leaves]
            q, k, v = leaves
            if wide:
                blocked = masks.causal().dense(67, 67).logical_not()
                scores = (q @ k.mT / 32**0.5).masked_fill(blocked, -torch.inf)
                context = (scores.softmax(-1) * kept) @ v
            else:
                context = self.dropped(7, q, k, v, mask=masks.causal())
            found.append(torch.autograd.grad(context, leaves, torch.ones_like(context) / 3))
        for ours, right in zip(*found, strict=True):
            # Gradients are sums of at most 67 terms, of numbers rounded to the dtype.
            eps = torch.finfo(dtype).eps
            assert (ours - right).abs().max() <= 67**0.5 * eps * right.abs().max()

    def test_the_binding_refuses_a_hash_out_of_range(self) -> None:
        q = torch.zeros(1, 1, 2, 2)
        call = calls.Inputs(Problem(q, q, q, None, 1.0)).call(torch.empty(1, 1, 2, 2))
        with pytest.raises(ValueError, match="53 bits"):
            call.set_dropout(1, 2**53 + 1, 1.0)


class TestExp2:
    def test_units_in_the_last_place(self, isa: str) -> None:
        x = torch.cat([torch.linspace(-126, 126, 2_000_003), torch.linspace(-1, 1, 100_003)])
        y = torch.empty_like(x)
        kernel.exp2(x.data_ptr(), y.data_ptr(), len(x))
        right = np.exp2(x.numpy().astype(np.float64))
        ulp = np.spacing(right.astype(np.float32)).astype(np.float64)
        assert (np.abs(y.numpy() - right) / ulp).max() <= (2.0 if isa == "baseline" else 1.0)

    def test_ends(self, isa: str) -> None:
        x = torch.tensor([0.0, -0.0, -torch.inf, -1e30, -3e38, -200.0, torch.nan, 1.0])
        y = torch.empty_like(x)
        kernel.exp2(x.data_ptr(), y.data_ptr(), len(x))
        assert y[:6].tolist() == [1, 1, 0, 0, 0, 0]
        assert y[6].isnan()
        assert y[7] == 2


class TestFuzz:
    def test_some(self, isa: str) -> None:
        for seed in range(150):
            fuzz_native.check(seed)

    def test_a_lie_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fuzz_native, "draw", fuzz_native.shifted(fuzz_native.draw))
        assert sum(fuzz_native.fails(fuzz_native.check, seed) for seed in range(60)) > 15


class TestMasks:
    def test_bytes_in_parts_are_the_whole(self, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = tensors(2, 2, 131, 8)
        mask = masks.causal() & (masks.window(9) | masks.first(3))
        assert mask.intervals(131) is None
        monkeypatch.setattr(calls, "RANGES", 1)
        whole = attend(q, k, v, mask, read=READ)
        monkeypatch.setattr(calls, "EDGES", 131 * 60)
        parts = attend(q, k, v, mask, read=READ)
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
        assert torch.equal(parts[0], whole[0])

    def test_intervals_equal_bytes(self, isa: str) -> None:
        q, k, v = tensors(2, 2, 131, 8)
        window = masks.window(20)
        context = attend(q, k, v, window.dense(131))
        torch.testing.assert_close(attend(q, k, v, window), context, rtol=1e-6, atol=1e-6)

    def test_gradients_of_bytes_in_parts(self, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calls, "EDGES", 131 * 60)
        mask = masks.causal() & (masks.window(9) | masks.first(3))
        found = []
        for impl in ("native", "reference"):
            leaves = [x.requires_grad_() for x in tensors(2, 2, 131, 8)]
            ch.attend(*leaves, mask, impl=impl).square().sum().backward()
            found.append([x.grad for x in leaves])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class TestBits:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "shape", [(1, 1, 300, 16), (2, 3, 131, 32), (1, 2, 2, 300), (1, 5, 1, 1300)]
    )
    def test_threads_and_runs_do_not_show(
        self, isa: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        batch, head, query, source = shape
        q, _, _ = tensors(batch, head, query, 16, dtype=dtype)
        k, v, _ = tensors(batch, head, max(query, source), 16, dtype=dtype)

        def answer(threads: int) -> list[Tensor]:
            torch.set_num_threads(threads)
            try:
                context, values = attend(q, k, v, masks.causal(), read=READ[:5])
            finally:
                torch.set_num_threads(1)
            return [context, values[0], values[1], *values[2], values[3], *values[4]]

        first = answer(1)
        for threads in (1, 2, 2, 3):
            assert all(torch.equal(a, b) for a, b in zip(answer(threads), first, strict=True))

    def test_gradients_at_one_thread_count(self, isa: str) -> None:
        def gradients() -> tuple[Tensor, ...]:
            leaves = [x.requires_grad_() for x in tensors(1, 1, 300, 16)]
            return torch.autograd.grad(attend(*leaves).square().sum(), leaves)

        torch.set_num_threads(2)
        try:
            first, second = gradients(), gradients()
        finally:
            torch.set_num_threads(1)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_python_threads_at_once(self, isa: str) -> None:
        q, k, v = tensors(1, 4, 200, 32)
        right, wrong = attend(q, k, v, masks.causal()), []

        def work() -> None:
            for _ in range(20):
                if not torch.equal(attend(q, k, v, masks.causal()), right):
                    wrong.append(1)

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not wrong


class TestOutOfRange:
    """The fallback computes numbers that fp32 cannot tell apart, or that are not finite."""

    QUERIES = (2, 70)

    @pytest.mark.parametrize("query", QUERIES)
    @pytest.mark.parametrize("scale", [1e10, 1e30, -1e30])
    def test_a_huge_scale_picks_the_largest_score(self, isa: str, query: int, scale: float) -> None:
        q, k, v = (x[:, :, -query:] if i == 0 else x for i, x in enumerate(tensors(1, 2, 200, 8)))
        context, top = attend(q, k, v, scale=scale, read=readings.TopK(1))
        best = (q.double() @ k.double().mT * scale).argmax(-1)
        assert torch.equal(context, v.gather(2, best[..., None].expand(-1, -1, -1, 8)))
        assert torch.equal(top.sources[..., 0], best)
        assert torch.equal(context, attend(q, k, v, scale=scale))

    @pytest.mark.parametrize("query", QUERIES)
    def test_huge_values_do_not_overflow(self, isa: str, query: int) -> None:
        q, k, _ = tensors(1, 2, 200, 8)
        context = attend(q[:, :, :query], k, torch.full_like(k, 3e38), masks.causal())
        torch.testing.assert_close(context, torch.full_like(context, 3e38))

    @pytest.mark.parametrize("query", QUERIES)
    @pytest.mark.parametrize("logit", [torch.nan, torch.inf])
    def test_a_sink_that_is_no_number_shows(self, isa: str, query: int, logit: float) -> None:
        q, k, v = tensors(1, 2, 200, 8)
        sinks = torch.tensor([logit, 0.5])
        context, lse = attend(q[:, :, :query], k, v, sinks=sinks, read=readings.LogSumExp())
        assert not lse[:, 0].isfinite().any()
        assert context[:, 1].isfinite().all()
        assert context[:, 0].isnan().all()

    @pytest.mark.parametrize("query", QUERIES)
    @pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30, -1e30])
    def test_other_rows_keep_their_bits(self, isa: str, query: int, number: float) -> None:
        q, k, v = tensors(1, 2, 200, 8)
        q, mask = q[:, :, -query:], masks.causal()
        clean = attend(q, k, v, mask)
        for at in (1, 2):
            given = [q, k.clone(), v.clone()]
            given[at][:, :, -2] = number
            context, values = attend(*given, mask, read=READ)
            assert torch.equal(context[:, :, :-2], clean[:, :, :-2])
            again, right = ch.attend(*given, mask, read=READ, impl="reference")
            torch.testing.assert_close(context, again, equal_nan=True)
            torch.testing.assert_close(values[0], right[0], equal_nan=True)
            assert torch.equal(context.nan_to_num(5), attend(*given, mask).nan_to_num(5))

    def test_gradients(self, isa: str) -> None:
        leaves = [x.requires_grad_() for x in tensors(1, 2, 70, 8)]
        attend(*leaves, scale=1e12).sum().backward()
        # Each query has the one source of its largest score: no score matters, all values count.
        assert not leaves[0].grad.any()
        picks = (leaves[0].double() @ leaves[1].double().mT).argmax(-1)
        counts = torch.zeros(1, 2, 70).scatter_add_(-1, picks, torch.ones(1, 2, 70))
        assert torch.equal(leaves[2].grad, counts[..., None].expand(-1, -1, -1, 8))


class TestChoice:
    @pytest.mark.parametrize("name", ISAS)
    def test_the_variable_takes_effect(self, name: str) -> None:
        assert _run(name, "print(_native.isa())").stdout.strip() == name

    def test_what_the_machine_lacks_is_an_error_that_lists_what_is_there(self) -> None:
        done = _run(
            "sve9", "import torch, clearhead; x = torch.ones(2, 3); clearhead.attend(x, x, x)"
        )
        assert done.returncode != 0
        assert "CLEARHEAD_ISA" in done.stderr
        assert all(name in done.stderr for name in ISAS)

    def test_state_says_what_runs(self, isa: str) -> None:
        assert NATIVE.state().startswith(isa)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"dtype": torch.float64}, "float64"),
            ({"width": 257}, "above 256"),
            ({"device": "meta"}, "not on the CPU"),
            ({"positions": 0}, "no elements"),
        ],
    )
    def test_reasons(self, change: dict[str, Any], reason: str) -> None:
        dtype, device = change.get("dtype", torch.float32), change.get("device", "cpu")
        shape = (1, change.get("positions", 3), change.get("width", 4))
        x = torch.ones(shape, dtype=dtype, device=device)
        with pytest.raises(ValueError, match=reason):
            attend(x, x, x)

    def test_without_the_kernel_others_serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_native", None)
        x = torch.ones(2, 3)
        torch.testing.assert_close(ch.attend(x, x, x), x)
        with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
            attend(x, x, x)
        assert "no C++ compiler" in NATIVE.state()


def _run(isa: str, code: str) -> subprocess.CompletedProcess[str]:
    code = f"from clearhead.attention.impl.native import kernel; _native = kernel._native\n{code}"
    environment = {**os.environ, "CLEARHEAD_ISA": isa, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


class TestBinding:
    """Nothing unchecked gets past it, whatever the Python side would do."""

    GOOD: tuple[Any, ...] = (0, 64, (1, 1, 2, 4), (8, 8, 4, 1), 64, (1, 1, 3, 4), (12, 12, 4, 1),
                             64, (1, 1, 3, 4), (12, 12, 4, 1), 64, (8, 8, 4, 1), 0.5)  # fmt: skip

    @pytest.mark.parametrize(
        ("at", "value", "rule"),
        [
            (0, 3, "the type"),
            (1, 0, "missing"),
            (1, 66, "not aligned"),
            (2, (1, 1, 2, 5), "widths differ"),
            (2, (2, 1, 2, 4), "batch sizes"),
            (3, (8, 8, 1, 4), "side by side"),
            (3, (8, -8, 4, 1), "negative"),
            (3, (2**62, 8, 4, 1), "overflows"),
            (5, (1, 2, 3, 4), "differ"),
            (8, (1, 1, 5, 4), "sizes differ"),
        ],
    )
    def test_refusals(self, at: int, value: Any, rule: str) -> None:
        given = list(self.GOOD)
        given[at] = value
        kernel.Forward(*self.GOOD)
        with pytest.raises(ValueError, match=rule):
            kernel.Forward(*given)

    def test_more_refusals(self) -> None:
        call = kernel.Forward(*self.GOOD)
        with pytest.raises(ValueError, match="missing"):
            call.set_lse(0)
        with pytest.raises(ValueError, match="inside the whole"):
            call.set_part(1, 2)
        with pytest.raises(ValueError, match="positive"):
            call.set_slots(0)
        with pytest.raises(ValueError, match="maxima"):
            call.differentiate(*(64, (8, 8, 4, 1)) * 2, *(64, (12, 12, 4, 1)) * 2, False, 1)
        with pytest.raises(ValueError, match="no avx9 kernel"):
            kernel.choose("avx9")


class TestWhatIsLeftOut:
    """Parts of a tile that no query may read are not worked on; what is read must not show it."""

    @pytest.mark.parametrize("width", [33, 64])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_bits_do_not_hang_on_what_is_read(
        self, isa: str, width: int, dtype: torch.dtype
    ) -> None:
        draw = torch.Generator().manual_seed(2)
        ids = torch.randint(4, (300,), generator=draw).cumsum(0) // 40
        allowed = torch.rand(300, 300, generator=draw).repeat_interleave(6, 0)[:300] < 0.1
        allowed[100:170, 30:260] = False
        allowed[7] = False
        q, k, v = tensors(1, 2, 300, width, dtype=dtype)
        for mask in (masks.window(37), masks.document(ids) & masks.causal(), masks.dense(allowed)):
            context, values = attend(q, k, v, mask, read=READ)
            assert torch.equal(context, attend(q, k, v, mask))
            wide = [x.float() for x in (q, k, v)]
            right, theirs = ch.attend(*wide, mask, read=READ, impl="reference")
            rounding = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(context.float(), right, rtol=rounding, atol=rounding)
            torch.testing.assert_close(values[3:], theirs[3:], rtol=2e-5, atol=3e-5)

    @pytest.mark.parametrize("scale", [1e-3, -0.125, 3e4])
    def test_gradients_know_the_maximum_in_base_e(self, isa: str, scale: float) -> None:
        """The forward counts in powers of two; at scores of 1e5 its rounding must not show."""
        q, k, v = (x.requires_grad_() for x in tensors(1, 1, 70, 16))
        found = torch.autograd.grad(attend(q, k, v, scale=scale).square().sum(), (q, k, v))
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        context = ch.attend(*wide, scale=scale, impl="reference")
        right = torch.autograd.grad(context.square().sum(), wide)
        theirs = torch.autograd.grad(
            ch.attend(q, k, v, scale=scale, impl="reference").square().sum(), (q, k, v)
        )
        size = TestEveryCase.terms({"query": q, "key": k, "value": v}, context, {"scale": scale})
        for ours, other, exact in zip(found, theirs, right, strict=True):
            rounding = torch.finfo(torch.float32).eps * (exact.abs().max() + size)
            assert (ours - exact).abs().max() <= 2 * (other - exact).abs().max() + rounding


class TestLongCaches:
    """Few queries over many sources: the kernel of decoding, and its constant widths 64 and 128."""

    @pytest.mark.parametrize(
        ("source", "width"),
        [(511, 24), (512, 64), (513, 128), (1300, 64), (2100, 24), (1057, 144)],
    )
    @pytest.mark.parametrize("query", [1, 3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_every_edit(
        self, isa: str, source: int, width: int, query: int, dtype: torch.dtype
    ) -> None:
        q = tensors(1, 2, query, width, dtype=dtype)[0]
        k, v, _ = tensors(1, 2, source, width, dtype=dtype, seed=1)
        allowed = torch.rand(query, source, generator=torch.Generator().manual_seed(3)) < 0.7
        bias = torch.linspace(-3, 3, source).expand(2, query, source)
        mask = masks.window(source - 5) & masks.dense(allowed)
        for given in ({}, {"mask": mask}, {"mask": mask, "bias": bias, "softcap": 2.0}):
            context = attend(q, k, v, **given)
            right = ch.attend(*(x.float() for x in (q, k, v)), impl="reference", **given)
            rounding = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(context.float(), right, rtol=rounding, atol=rounding)

    @pytest.mark.parametrize("rises", [True, False])
    @pytest.mark.parametrize("head", [2, 6])
    def test_scores_that_rise_or_fall_all_the_way(self, isa: str, rises: bool, head: int) -> None:
        """Every source may have a new maximum, which shrinks what was summed before."""
        q, k = torch.zeros(1, head, 1, 64), torch.zeros(1, 2, 1300, 64)
        v = tensors(1, 2, 1300, 64)[0]
        scores = torch.linspace(-64, 64, 1300) * (1 if rises else -1)
        q[..., 5], k[..., 5] = 8, scores  # the scale is 1/8: the products are exact
        context, lse = attend(q, k, v, read=readings.LogSumExp())
        right = scores.double().softmax(0) @ v.double()
        ours, other = context.double(), scores.softmax(0) @ v
        bound = 2 * (other - right).abs().max() + torch.finfo(torch.float32).eps * right.abs().max()
        assert (ours - right.repeat_interleave(head // 2, 1)[:, :, None]).abs().max() <= bound
        torch.testing.assert_close(lse, scores.double().logsumexp(0).float().expand_as(lse))

    @pytest.mark.parametrize("head", [2, 6])
    def test_what_is_stored_in_blocked_sources_is_not_read(self, isa: str, head: int) -> None:
        q = tensors(1, head, 1, 64)[0]
        k, v, _ = tensors(1, 2, 1300, 64, seed=1)
        allowed = torch.rand(1, 1300, generator=torch.Generator().manual_seed(2)) < 0.7
        mask = masks.window(1203) & masks.lengths([1257]) & masks.dense(allowed)
        right = attend(q, k, v, mask)
        edges = mask.dense(1, 1300).reshape(-1)
        k[:, :, ~edges], v[:, :, ~edges] = torch.nan, torch.inf
        assert right.isfinite().all()
        assert torch.equal(attend(q, k, v, mask), right)


class TestLargestScores:
    def test_sinks_do_not_count(self, isa: str) -> None:
        q, k, v = tensors(2, 3, 7, 8)
        sinks = torch.tensor([50.0, -50.0, 0.0])
        mask = masks.causal() & ~masks.first(1)
        for source in (7, 300):  # blocks, and the kernel for decoding
            k, v = (torch.randn(2, 3, source, 8) for _ in range(2))
            for given in ({}, {"sinks": sinks}, {"softcap": 3.0}, {"scale": -0.5}):
                for rows in (7, 2):
                    args = (q[:, :, :rows], k, v, mask)
                    _, (most, scores) = attend(
                        *args, **given, read=(readings.MaxScore(), readings.Scores())
                    )
                    right = scores.double().amax(-1)
                    assert torch.equal(most.isinf(), right.isinf())
                    gap = (most - right).nan_to_num(0).abs().max()
                    assert gap <= 8 * torch.finfo(torch.float32).eps * (1 + scores.abs().nan_to_num(
                        posinf=0, neginf=0).max())  # fmt: skip

    def test_a_nan_shows_in_the_rows_that_read_it(self, isa: str) -> None:
        q, k, v = tensors(1, 1, 6, 8)
        k[0, 0, 3] = torch.nan
        _, most = attend(q, k, v, masks.causal(), read=readings.MaxScore())
        assert most.isnan().tolist() == [[[False] * 3 + [True] * 3]]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_readings_alone_have_the_bits_of_those_with_the_context(
        self, isa: str, dtype: torch.dtype
    ) -> None:
        q, k = torch.randn(2, 3, 67, 16).to(dtype), torch.randn(2, 3, 300, 16).to(dtype)
        mask = masks.dense(torch.rand(67, 300) < 0.7)
        problem = Problem(q, k, k, mask, 0.25)
        read = (readings.MaxScore(), readings.Entropy(), readings.Received(), readings.TopK(2))
        alone = NATIVE.readings_only(problem, read)
        _, beside = NATIVE.attend(problem, read)
        assert all(map(torch.equal, tree_leaves(alone), tree_leaves(beside)))


def ordered(order: str, source: int) -> torch.Tensor:
    """Whole numbers, which every dtype and product represents exactly, in an order of their own."""
    place = torch.arange(source)
    rising = place * 200 // source
    return {
        "rising": rising,
        "falling": rising.flip(0),
        "stairs that fall inside": place // 70 * 10 - place % 70 // 8,
        "up and down": torch.minimum(rising, rising.flip(0)),
        "equal": place * 0,
        "random": torch.randint(200, (source,), generator=torch.Generator().manual_seed(1)),
    }[order].float()


@pytest.mark.parametrize("k", [9, 16, 64, 65, 130, 257])
@pytest.mark.parametrize(
    "order", ["rising", "falling", "stairs that fall inside", "up and down", "equal", "random"]
)
def test_top_sources_in_every_order_of_the_scores(order: str, k: int) -> None:
    """A stable sort is the oracle: descending scores, and of equal ones the lower source first."""
    source = 1031
    key = ordered(order, source)[:, None]
    query = torch.tensor([[1.0], [-1.0], [0.0]]).repeat(24, 1)[:67]
    value = torch.zeros(source, 1)
    scores = (query * key.T).masked_fill(
        torch.ones(67, source).triu(source - 66).bool(), -torch.inf
    )
    read = readings.TopK(k)
    top = ch.attend(query, key, value, masks.causal(), scale=1.0, read=read, impl="native")[1]
    want = scores.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(top.sources, want[:, :k])
