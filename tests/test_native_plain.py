"""The fast path for calls that pass the fast checks: what it serves, and what it must not."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead as ch
from clearhead import masks, readings
from clearhead.attention.impl import NATIVE
from clearhead.attention.impl.native import kernel as module
from clearhead.cli.info import collect

kernel: Any = module._native
if kernel is None:
    pytest.skip(module.MISSING, allow_module_level=True)

F = torch.nn.functional


def tensors(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).to(dtype) for _ in range(3)]


def negative(x: Tensor) -> Tensor:
    """The numbers of `x` with a flag that says: of the other sign."""
    return torch._neg_view(x)  # pyright: ignore


class Served(list):
    """Whether the fast path returned a context, call by call."""

    fast = NATIVE.plain

    def plain(self, *args: Any) -> Tensor | None:
        answer = Served.fast(*args)
        self.append(answer is not None)
        return answer


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    seen = Served()
    monkeypatch.setattr(NATIVE, "plain", seen.plain)
    return seen


def fully_checked(*args: Any, **kwargs: Any) -> Tensor:
    """The same call without the fast path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NATIVE, "plain", lambda *_: None)
        return ch.attend(*args, **kwargs)


def equal(ours: Tensor, right: Tensor) -> bool:
    same = torch.equal(ours, right) and ours.stride() == right.stride()
    return same and (ours.dtype, ours.requires_grad) == (right.dtype, right.requires_grad)


class TestServed:
    @pytest.mark.parametrize("isa", kernel.available())
    @pytest.mark.parametrize("dtype", module.TYPES)
    @pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (2, 3, 70, 16), (1, 1, 1, 1)])
    def test_every_bit_is_that_of_the_full_checks(
        self, served: Served, isa: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        kernel.choose(isa)
        try:
            q, k, v = tensors(*shape, dtype=dtype)
            for mask in (None, masks.causal(), masks.window(2), masks.band(1, 3, "start")):
                for scale in (None, 0.3):
                    right = fully_checked(q, k, v, mask, scale=scale)
                    assert equal(ch.attend(q, k, v, mask, scale=scale), right)
        finally:
            kernel.choose("")
        assert served == [True] * 8

    def test_other_sizes_and_strides(self, served: Served) -> None:
        q, k, v = tensors(2, 7, 4, 16)
        q, k, v = q.transpose(1, 2), k[:, :5, :2].transpose(1, 2), v[:, :5, 2:, :6].transpose(1, 2)
        for given in ((q, k, v), (q[..., :3, :], k, v), (q[:, :, ::2], k, v.expand(2, 2, 5, 6))):
            assert equal(ch.attend(*given), fully_checked(*given))
            theirs = F.scaled_dot_product_attention(*given, enable_gqa=True)
            torch.testing.assert_close(ch.attend(*given), theirs)
            for fewer in ([x[:, 0] for x in given], [x[0, 0] for x in given]):
                assert equal(ch.attend(*fewer), fully_checked(*fewer))
        assert all(served)

    def test_a_parameter(self, served: Served) -> None:
        q, k, v = tensors(1, 1, 4, 3)
        with torch.no_grad():
            context = ch.attend(torch.nn.Parameter(q), k, torch.nn.Parameter(v))
        assert type(context) is Tensor
        assert equal(context, fully_checked(q, k, v))
        assert served == [True]

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_without_gradients(self, served: Served, mode: Any) -> None:
        q, k, v = (x.requires_grad_() for x in tensors(1, 2, 4, 3))
        with mode():
            context = ch.attend(q, k, v)
            assert context.is_inference() is torch.is_inference_mode_enabled()
        assert not context.requires_grad
        assert torch.equal(context, fully_checked(q, k, v).detach())
        assert served == [True]

    def test_numbers_out_of_range_go_on(self, served: Served) -> None:
        for shape in ((1, 2, 70, 8), (70, 8)):
            q, k, v = tensors(*shape)
            k[..., -2, :] = torch.nan
            context = ch.attend(q, k, v, masks.causal())
            right = fully_checked(q, k, v, masks.causal())
            assert context[..., :-2, :].isfinite().all()
            assert context[..., -2:, :].isnan().all()
            assert torch.equal(context.nan_to_num(5), right.nan_to_num(5))
        assert served == [True, False]


class TestNothingIsRemembered:
    """What changes between two calls that look alike shows in the second."""

    def test_a_mask(self, served: Served) -> None:
        q, k, v = tensors(1, 2, 9, 4)
        mask = masks.causal()
        for high in (0, 2, -1):
            mask.high = high  # type: ignore[attr-defined]
            right = ch.attend(q, k, v, mask.dense(9), impl="reference")
            torch.testing.assert_close(ch.attend(q, k, v, mask), right)
        assert served == [True] * 3

    def test_instruction_sets_and_threads(self, served: Served) -> None:
        q, k, v = tensors(1, 4, 200, 16)
        ch.attend(q, k, v)
        try:
            for isa in kernel.available():
                kernel.choose(isa)
                for threads in (2, 1):
                    torch.set_num_threads(threads)
                    assert equal(ch.attend(q, k, v), fully_checked(q, k, v))
        finally:
            torch.set_num_threads(1)
            kernel.choose("")
        assert all(served)

    @pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
    def test_the_default_dtype(self, served: Served, default: torch.dtype) -> None:
        q, k, v = tensors(1, 2, 9, 4)
        right = ch.attend(q, k, v[..., :3], masks.causal())
        torch.set_default_dtype(default)
        try:
            assert equal(ch.attend(q, k, v[..., :3], masks.causal()), right)
        finally:
            torch.set_default_dtype(torch.float32)
        assert served == [True, True]

    def test_ranges_of_more_masks_than_are_kept(self, served: Served) -> None:
        q, k, v = tensors(1, 1, 9, 4)
        for n in [*range(1, 100), *range(1, 100)]:
            wanted = fully_checked(q, k, v, masks.window(n).dense(9))
            torch.testing.assert_close(ch.attend(q, k, v, masks.window(n)), wanted)
        assert all(served)


class Same(Tensor):
    """A subclass that changes nothing."""


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), given: Any = None):
        answer = function(*args, **(given or {}))
        return answer * 2 if function is ch.attend else answer


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), given: Any = None):
        self.products += "mm" in str(function) or "attention" in str(function)
        return function(*args, **(given or {}))


class TestNotServed:
    """What needs the full checks has them, also after a fast call of the same sizes."""

    @pytest.fixture(autouse=True)
    def warm(self, served: Served) -> list[Tensor]:
        inputs = tensors(1, 2, 5, 4)
        for mask in (None, masks.causal()):
            ch.attend(*inputs, mask)
        assert served == [True, True]
        served.clear()
        return inputs

    @pytest.fixture
    def right(self, warm: list[Tensor]) -> Tensor:
        return F.scaled_dot_product_attention(*warm)

    def test_gradients(self, served: Served, warm: list[Tensor], right: Tensor) -> None:
        for i in range(3):
            given = [x.clone().requires_grad_(i == at) for at, x in enumerate(warm)]
            context = ch.attend(*given)
            torch.testing.assert_close(context.detach(), right)
            assert torch.autograd.grad(context.sum(), given[i])[0].isfinite().all()
        assert served == [False] * 3

    def test_subclasses(self, served: Served, warm: list[Tensor], right: Tensor) -> None:
        for i in range(3):
            given = [x.as_subclass(Same) if i == at else x for at, x in enumerate(warm)]
            torch.testing.assert_close(ch.attend(*given).as_subclass(Tensor), right)
            with torch._C.DisableTorchFunctionSubclass():
                torch.testing.assert_close(ch.attend(*given).as_subclass(Tensor), right)
        # One that adds nothing is served as a plain tensor is, where torch lets it be seen.
        assert served == [True, False] * 3

    def test_function_modes(self, warm: list[Tensor], right: Tensor) -> None:
        with Doubled():
            torch.testing.assert_close(ch.attend(*warm), 2 * right)

    def test_watch_sees_it(self, warm: list[Tensor]) -> None:
        class Model(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return ch.attend(x, x, x)

        with ch.watch(model := Model(), read=readings.Entropy()) as seen:
            model(warm[0])
        assert len(seen) == 1

    def test_dispatch_modes(self, served: Served, warm: list[Tensor], right: Tensor) -> None:
        with Counting() as mode:
            torch.testing.assert_close(ch.attend(*warm), right)
        assert mode.products
        assert served == [False]

    def test_fake_and_meta_tensors(self, served: Served, warm: list[Tensor]) -> None:
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in warm]
            assert type(ch.attend(*fakes)) is type(fakes[0])
        assert ch.attend(*(x.to("meta") for x in warm)).is_meta
        assert not any(served)

    def test_make_fx(self, warm: list[Tensor]) -> None:
        graph = make_fx(lambda q, k, v: ch.attend(q, k, v))(*warm)
        other = tensors(1, 2, 5, 4, seed=1)
        torch.testing.assert_close(graph(*other), F.scaled_dot_product_attention(*other))

    @pytest.mark.parametrize("mask", [None, masks.causal()])
    def test_transforms(self, served: Served, warm: list[Tensor], mask: Any) -> None:
        q, k, v = warm
        stacked = torch.stack([q, q.flip(-2)])
        ours = torch.vmap(lambda x: ch.attend(x, k, v, mask))(stacked)
        for got, x in zip(ours, stacked, strict=True):
            torch.testing.assert_close(got, fully_checked(x, k, v, mask))
        slope = torch.func.grad(lambda x: ch.attend(x, k, v, mask).square().sum())(q)
        leaf = q.clone().requires_grad_()
        (theirs,) = torch.autograd.grad(fully_checked(leaf, k, v, mask).square().sum(), leaf)
        torch.testing.assert_close(slope, theirs)
        change = torch.func.jvp(lambda x: ch.attend(x, k, v, mask), (q,), (q.flip(-1),))[1]
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, q.flip(-1))
            tangent = forward_ad.unpack_dual(ch.attend(dual, k, v, mask)).tangent
        torch.testing.assert_close(tangent, change)
        assert not any(served)

    def test_autocast(self, served: Served, warm: list[Tensor], right: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            context = ch.attend(*warm)
        assert context.dtype == torch.bfloat16
        torch.testing.assert_close(context.float(), right, rtol=2**-6, atol=2**-6)

    def test_jit_trace(self, warm: list[Tensor]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of every shape that is looked at, and of itself
            traced = torch.jit.trace(lambda *given: ch.attend(*given, masks.causal()), tuple(warm))
        other = tensors(1, 2, 5, 4, seed=1)
        torch.testing.assert_close(traced(*other), fully_checked(*other, masks.causal()))

    def test_compile_and_export(self, warm: list[Tensor]) -> None:
        class Model(torch.nn.Module):
            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return ch.attend(q, k, v, masks.causal())

        other = tensors(1, 2, 5, 4, seed=1)
        right = fully_checked(*other, masks.causal())
        compiled = torch.compile(Model(), backend="aot_eager", fullgraph=True)
        exported = torch.export.export(Model(), tuple(warm)).module()
        for found in (compiled, exported):
            found(*warm)
            torch.testing.assert_close(found(*other), right)

    def test_views_of_the_other_sign(self, served: Served, warm: list[Tensor]) -> None:
        """torch keeps the imaginary part of a conjugate as it lies, with a flag."""
        q, k, v = warm
        turned = torch.complex(torch.zeros_like(v[..., :1]), v[..., :1]).conj().imag
        assert turned.is_neg()
        for given in ((q, k, turned), (q, k, negative(v)), (negative(q), k, v)):
            real = [x.clone() for x in given]
            assert not any(x.is_neg() for x in real)
            torch.testing.assert_close(ch.attend(*given), F.scaled_dot_product_attention(*real))
        bias, sinks = negative(torch.ones(5)), negative(torch.ones(2))
        torch.testing.assert_close(
            ch.attend(q, k, v, bias=bias, sinks=sinks),
            ch.attend(q, k, v, bias=-torch.ones(5), sinks=-torch.ones(2), impl="reference"),
        )
        assert not any(served)

    @pytest.mark.parametrize("at", range(3))
    def test_numbers_at_odd_addresses(self, served: Served, warm: list[Tensor], at: int) -> None:
        """As of a file that begins with some bytes of its own."""
        odd = torch.frombuffer(bytearray(161), dtype=torch.float32, offset=1).view(1, 2, 5, 4)
        assert odd.data_ptr() % 4
        given = [odd.copy_(x) if i == at else x for i, x in enumerate(warm)]
        torch.testing.assert_close(ch.attend(*given), F.scaled_dot_product_attention(*warm))
        leaves = [x.detach().requires_grad_() for x in given]
        assert all(
            x.isfinite().all() for x in torch.autograd.grad(ch.attend(*leaves).sum(), leaves)
        )
        with pytest.raises(ValueError, match="no memory with its values"):
            ch.attend(*given, impl="native")
        assert not any(served)

    @pytest.mark.parametrize("at", range(3))
    def test_zeros_that_take_no_memory(self, served: Served, warm: list[Tensor], at: int) -> None:
        """torch makes them where it knows that a derivative is 0."""
        zeros = torch._efficientzerotensor((1, 2, 5, 4))  # pyright: ignore
        given, right = list(warm), list(warm)
        given[at], right[at] = zeros, torch.zeros(1, 2, 5, 4)
        torch.testing.assert_close(ch.attend(*given), fully_checked(*right))
        assert not any(served)

    def test_a_tensor_that_outlived_its_transform(self, served: Served, warm: list[Tensor]) -> None:
        kept = []
        torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(warm[0])
        torch.testing.assert_close(ch.attend(kept[0], *warm[1:]), fully_checked(*warm))
        assert not any(served)

    @pytest.mark.parametrize(
        "given",
        [
            {"mask": masks.lengths([3])},
            {"mask": torch.ones(5, 5, dtype=torch.bool)},
            {"scale": 1},
            {"bias": torch.zeros(5)},
            {"softcap": 2.0},
            {"sinks": torch.zeros(2)},
            {"dropout": 1.0},
            {"read": ()},
            {"read": readings.LogSumExp()},
            {"impl": "tiled"},
            {"impl": "reference"},
        ],
        ids=str,
    )
    def test_whatever_else_is_asked(
        self, served: Served, warm: list[Tensor], given: dict[str, Any]
    ) -> None:
        ours, right = ch.attend(*warm, **given), fully_checked(*warm, **given)
        pairs = [(x[0] if isinstance(x, tuple) else x) for x in (ours, right)]
        assert equal(*pairs)
        assert not any(served)

    @pytest.mark.parametrize(
        "change",
        [
            lambda x: x.double(),
            lambda x: x.long(),
            lambda x: x.to("meta"),
            lambda x: x.to_sparse(),
            lambda x: x.to_mkldnn(),
            lambda x: x[..., :2],
            lambda x: x[..., :3, :],
            lambda x: x[:, :0],
            lambda x: x[:, [0, 1, 0]],
            lambda x: x[0],
            lambda x: x[None],
            lambda x: x[0, 0, 0, 0],
            lambda x: x.numpy(),
            lambda x: None,
            lambda x: "query",
        ],
    )
    @pytest.mark.parametrize("at", range(3))
    def test_what_is_refused_is_refused_in_the_same_words(
        self, warm: list[Tensor], change: Any, at: int
    ) -> None:
        given: list[Any] = [*warm]
        given[at] = change(given[at])
        ours, right = (outcome(call, given) for call in (ch.attend, fully_checked))
        assert equal(ours, right) if isinstance(right, Tensor) else ours == right


def outcome(call: Any, given: list[Any]) -> Any:
    try:
        return call(*given)
    except (ValueError, TypeError) as error:
        return type(error), str(error)


class TestContract:
    """A compiled module of other sources would give wrong numbers without a word."""

    def test_this_one_keeps_it(self) -> None:
        assert kernel.contract == module.CONTRACT

    @pytest.mark.parametrize("other", [{}, {"contract": module.CONTRACT - 1}])
    def test_another_version_is_named_and_not_used(
        self, monkeypatch: pytest.MonkeyPatch, other: dict[str, int]
    ) -> None:
        foreign = types.SimpleNamespace(**other)
        monkeypatch.setattr(module, "import_module", lambda name: foreign)
        found, missing = module._load()
        assert found is None
        assert "built from another version" in missing
        monkeypatch.setattr(module, "_native", found)
        monkeypatch.setattr(module, "MISSING", missing)
        assert "install clearhead again" in collect()["implementations"]["native"]
        x = torch.ones(2, 3)
        torch.testing.assert_close(ch.attend(x, x, x), x)

    def test_one_that_does_not_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(name: str) -> None:
            raise ImportError("undefined symbol: omp_in_space")

        monkeypatch.setattr(module, "import_module", fail)
        assert "does not load: undefined symbol" in module._load()[1]
