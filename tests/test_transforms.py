"""attend() inside torch.compile, torch.export, torch.func, autocast, and on meta tensors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead import masks, readings
from tests.cases import BY_NAME

F = torch.nn.functional
EVERY = (
    *(readings.Weights(), readings.Scores(), readings.LogSumExp(), readings.Entropy(True)),
    *(readings.TopK(2), readings.Received(), readings.Rows([1])),
    *(readings.Distance(), readings.Overlap(), readings.Mass(masks.first(1))),
)
CAUSAL = functools.partial(ch.attend, mask=masks.causal())
CALLS: dict[str, Any] = {
    "plain": ch.attend,
    "causal": CAUSAL,
    "composed": lambda q, k, v: ch.attend(q, k, v, (masks.window(3) | masks.first(1))),
    "lengths": lambda q, k, v: ch.attend(q, k, v, masks.lengths([5, 2]) & masks.causal()),
    "documents": lambda q, k, v: ch.attend(q, k, v, masks.document(torch.tensor([0, 0, 1, 1, 1]))),
    "not": functools.partial(ch.attend, mask=~masks.diagonal(1)),
    "features": lambda q, k, v: ch.attend(
        q, k, v, masks.causal(), softcap=2.0, scale=0.3, sinks=q[0, :, 0, 0], bias=q @ k.mT
    ),
    "every reading": lambda q, k, v: CAUSAL(q, k, v, read=EVERY),
    "block map": lambda q, k, v: CAUSAL(q, k, v, read=readings.BlockMap(2)),
    "one head": lambda q, k, v: CAUSAL(q[:, 0], k[:, 0], v[:, 0], read=EVERY),
}
ALL = pytest.mark.parametrize("name", CALLS)


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, 5, 3, generator=draw, dtype=dtype) for _ in range(3)]


def same(ours: Any, right: Any) -> None:
    for got, want in zip(tree_leaves(ours), tree_leaves(right), strict=True):
        torch.testing.assert_close(got, want)


class TestFunc:
    @ALL
    def test_vmap(self, name: str) -> None:
        stacked = [torch.stack([x, x.flip(-2), x * 2]) for x in inputs(torch.float64)]
        ours = torch.vmap(CALLS[name])(*stacked)
        loop = [CALLS[name](*[x[n] for x in stacked]) for n in range(3)]
        same(ours, tree_map(lambda *parts: torch.stack(parts), *loop))

    def test_vmap_over_some_inputs_and_other_axes(self) -> None:
        q, k, v = inputs(torch.float64)
        ours = torch.vmap(CAUSAL, in_dims=(1, None, None), out_dims=1)(q, k[:, 0], v[:, 0])
        same(ours[:, 1], CAUSAL(q[:, 1], k[:, 0], v[:, 0]))

    def test_vmap_over_masks(self) -> None:
        q, k, v = inputs(torch.float64)
        tensors = torch.rand(4, 5, 5) < 0.6
        ours = torch.vmap(lambda m: ch.attend(q, k, v, m))(tensors)
        same(ours, torch.stack([ch.attend(q, k, v, m) for m in tensors]))

    @pytest.mark.parametrize("randomness", ["same", "different"])
    def test_vmap_of_dropout(self, randomness: str) -> None:
        x = torch.zeros(2, 4, 1, 7, 3)
        value = torch.eye(7).expand(2, 4, 1, 7, 7)
        drop = functools.partial(ch.attend, dropout=0.5)
        ours = torch.vmap(drop, randomness=randomness)(x, x, value)
        assert torch.equal(ours[0], ours[1]) is (randomness == "same")
        with pytest.raises(RuntimeError, match="randomness"):
            torch.vmap(drop)(x, x, value)

    # The largest weight of a tile is shown, not differentiated.
    @pytest.mark.parametrize("name", sorted(set(CALLS) - {"block map"}))
    def test_jvp_is_the_difference_quotient(self, name: str) -> None:
        at, along = inputs(torch.float64), [x.flip(-1) for x in inputs(torch.float64)]
        step = 1e-6
        ours = torch.func.jvp(CALLS[name], tuple(at), tuple(along))[1]
        ahead, behind = (
            CALLS[name](*[x + sign * step * d for x, d in zip(at, along, strict=True)])
            for sign in (1, -1)
        )
        for got, plus, minus in zip(*map(tree_leaves, (ours, ahead, behind)), strict=True):
            if plus.is_floating_point():
                quotient = torch.where(plus == minus, 0.0, (plus - minus) / (2 * step))
                torch.testing.assert_close(got, quotient, rtol=1e-6, atol=1e-7)

    def test_dual_tensors(self) -> None:
        at, along = inputs(torch.float64), [x.flip(-1) for x in inputs(torch.float64)]
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(*p) for p in zip(at, along, strict=True)]
            ours = torch.autograd.forward_ad.unpack_dual(CAUSAL(*duals)).tangent
        same(ours, torch.func.jvp(CAUSAL, tuple(at), tuple(along))[1])

    @ALL
    def test_grad_and_vjp_are_those_of_autograd(self, name: str) -> None:
        def loss(*tensors: Tensor) -> Tensor:
            context = CALLS[name](*tensors)
            return (context if isinstance(context, Tensor) else context[0]).square().sum()

        tensors = inputs(torch.float64)
        leaves = [x.clone().requires_grad_() for x in tensors]
        right = torch.autograd.grad(loss(*leaves), leaves)
        same(torch.func.grad(loss, argnums=(0, 1, 2))(*tensors), right)
        pull = torch.func.vjp(loss, *tensors)[1]
        same(pull(torch.ones((), dtype=torch.float64)), right)

    def test_hessian_is_the_jacobian_of_the_gradient(self) -> None:
        q, k, v = (x[:1, :1] for x in inputs(torch.float64))

        def loss(query: Tensor) -> Tensor:
            return CAUSAL(query, k, v).square().sum()

        hessian = torch.func.hessian(loss)(q)
        same(hessian, torch.func.jacrev(torch.func.grad(loss))(q))
        leaf = q.clone().requires_grad_()
        same(hessian, torch.autograd.functional.hessian(loss, leaf))
        assert hessian.abs().max() > 0.01

    def test_gradients_of_each_sample(self) -> None:
        q, k, v = inputs(torch.float64)

        def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return CAUSAL(query, key, value).square().sum()

        each = torch.vmap(torch.func.grad(loss))(q, k, v)
        same(each, torch.func.grad(loss)(q, k, v))


class TestManyGradients:
    """Where one tensor stands for several gradients, only plain operations can take it on."""

    @pytest.mark.parametrize("read", [None, readings.Entropy(), readings.Scores()], ids=str)
    @pytest.mark.parametrize("again", [False, True])
    def test_each_is_as_alone(self, implementation: Any, read: Any, again: bool) -> None:
        draw = torch.Generator().manual_seed(1)
        leaves = [x.requires_grad_() for x in inputs()]
        leaves += [torch.randn(s, generator=draw).requires_grad_() for s in ((5, 5), (2,))]
        answer = implementation(
            *leaves[:3], masks.causal(), read=read, bias=leaves[3], sinks=leaves[4], dropout=0.3
        )
        outputs = tree_leaves(answer)
        many = [torch.randn(3, *x.shape, generator=draw) for x in outputs]

        def pull(*given: Tensor, **how: Any) -> Any:
            return torch.autograd.grad(
                outputs, leaves, given, retain_graph=True, create_graph=again, **how
            )

        alone = [pull(*(x[n] for x in many)) for n in range(3)]
        right = [torch.stack(x) for x in zip(*alone, strict=True)]
        same(pull(*many, is_grads_batched=True), right)
        same(torch.vmap(pull)(*many), right)

    def test_a_jacobian_at_once(self, implementation: Any) -> None:
        query, key, value = inputs()
        jacobian = functools.partial(
            torch.autograd.functional.jacobian, lambda x: implementation(x, key, value), query
        )
        same(jacobian(vectorize=True), jacobian())


@pytest.mark.parametrize("read", [(), (readings.Entropy(), readings.TopK(2), readings.Overlap())])
def test_checkpoints(implementation: Any, read: Any) -> None:
    def gradients(again: bool) -> list[Tensor]:
        def call(*given: Tensor) -> list[Tensor]:
            answer = implementation(*given, masks.causal(), read=read, dropout=0.3)
            return [x for x in tree_leaves(answer) if x.is_floating_point()]

        torch.manual_seed(0)
        leaves = [x.requires_grad_() for x in inputs()]
        outputs = checkpoint(call, *leaves, use_reentrant=False) if again else call(*leaves)
        torch.stack([x.square().sum() for x in outputs]).sum().backward()
        return [x.grad for x in leaves if x.grad is not None]

    same(gradients(again=True), gradients(again=False))


class TestDoubleBackward:
    def test_it_works_whatever_implementation(self, implementation: Any) -> None:
        attend: Any
        tensors = [x.requires_grad_() for x in inputs(torch.float64)]
        second = []
        for attend in (implementation, functools.partial(ch.attend, impl="reference")):
            context = attend(*tensors, masks.causal())
            first = torch.autograd.grad(context.square().sum(), tensors, create_graph=True)
            penalty = torch.stack([x.square().sum() for x in first]).sum()
            second.append(torch.autograd.grad(penalty, tensors))
        same(*second)


class TestCompile:
    @pytest.fixture(autouse=True)
    def fresh(self) -> None:
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        ("name", "backend"),
        [*((name, "eager") for name in CALLS), ("causal", "aot_eager"), ("features", "aot_eager")],
    )
    def test_values_and_gradients(self, name: str, backend: str) -> None:
        compiled = torch.compile(CALLS[name], fullgraph=True, backend=backend)
        grads = []
        for call in (compiled, CALLS[name]):
            leaves = [x.requires_grad_() for x in inputs()]
            answer = call(*leaves)
            context = answer if isinstance(answer, Tensor) else answer[0]
            grads.append((answer, torch.autograd.grad(context.square().sum(), leaves)))
        same(*grads)

    def test_other_sizes_are_not_compiled_each(self) -> None:
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(CAUSAL, fullgraph=True, backend=counter, dynamic=True)
        for size in (5, 7, 11):
            tensors = [torch.randn(2, 2, size, 3) for _ in range(3)]
            same(compiled(*tensors), CAUSAL(*tensors))
        assert counter.frame_count == 1

    def test_a_mask_made_inside(self) -> None:
        def layer(x: Tensor, ids: Tensor) -> Tensor:
            mask = masks.document(ids) & masks.causal() | masks.first(1)
            return ch.attend(x, x, x, mask)

        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        for ids in ([0, 0, 1, 1, 1], [0, 1, 1, 2, 2]):
            x, ids = inputs()[0], torch.tensor(ids)
            same(compiled(x, ids), layer(x, ids))

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # of torch's compiler about itself
    def test_inductor(self, cpp_compiler: None) -> None:
        compiled = torch.compile(CAUSAL, fullgraph=True)
        same(compiled(*inputs()), CAUSAL(*inputs()))

    def test_dropout(self) -> None:
        x = torch.zeros(1, 1, 64, 3)
        value = torch.eye(64)[None, None]
        drop = functools.partial(ch.attend, dropout=0.25)
        compiled = torch.compile(drop, fullgraph=True, backend="eager")
        mixed = compiled(x, x, value) * 64
        kept = mixed[mixed != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.75))
        assert kept.numel() / 4096 == pytest.approx(0.75, abs=0.03)

    def test_gradients_under_dropout(self) -> None:
        drop = functools.partial(CAUSAL, dropout=0.25)
        compiled = torch.compile(drop, fullgraph=True, backend="eager")
        found = []
        for call in (compiled, functools.partial(drop, impl="reference")):
            leaves = [x.requires_grad_() for x in inputs()]
            torch.manual_seed(4)
            context = call(*leaves)
            found.append([context, *torch.autograd.grad(context.square().sum(), leaves)])
        for ours, right in zip(*found, strict=True):
            same(ours, right)

    def test_nan_in_a_blocked_source(self) -> None:
        q, k, v = inputs()
        right = CAUSAL(q, k, v)
        k[:, :, 3], v[:, :, 3] = torch.nan, torch.inf
        compiled = torch.compile(CAUSAL, fullgraph=True, backend="eager")
        leaves = [x.requires_grad_() for x in (q, k, v)]
        context = compiled(*leaves)
        same(context[:, :, :3], right[:, :, :3])
        assert not torch.isfinite(context[:, :, 3:]).any()
        context[:, :, :3].sum().backward()
        assert leaves[0].grad is not None
        assert torch.isfinite(leaves[0].grad[:, :, :3]).all()


class Attention(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return CAUSAL(query, key, value, read=(readings.Entropy(), readings.Received()))


class TestExport:
    def test_fixed_and_dynamic_sizes(self) -> None:
        fixed = torch.export.export(Attention(), tuple(inputs()))
        same(fixed.module()(*inputs()), Attention()(*inputs()))
        size = torch.export.Dim("position", min=2, max=4096)
        shapes = ({2: size},) * 3
        dynamic = torch.export.export(Attention(), tuple(inputs()), dynamic_shapes=shapes)
        longer = [torch.randn(2, 2, 17, 3) for _ in range(3)]
        same(dynamic.module()(*longer), Attention()(*longer))

    def test_make_fx(self) -> None:
        graph = make_fx(CAUSAL)(*inputs())
        other = [x * 2 for x in inputs()]
        same(graph(*other), CAUSAL(*other))


class TestShapesOnly:
    @pytest.mark.parametrize("name", ["plain", "every reading", "one head", "features"])
    def test_meta(self, name: str) -> None:
        ours = CALLS[name](*[x.to("meta") for x in inputs()])
        right = CALLS[name](*inputs())
        for got, want in zip(tree_leaves(ours), tree_leaves(right), strict=True):
            assert got.is_meta
            assert (got.shape, got.dtype) == (want.shape, want.dtype)

    def test_fake_tensors(self) -> None:
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in inputs()]
            context, _ = CAUSAL(*fakes, read=EVERY)
        assert context.shape == (2, 2, 5, 3)

    def test_a_size_that_no_memory_holds(self) -> None:
        x = torch.empty(1, 1, 1 << 30, 1, device="meta")
        assert ch.attend(x, x, x).shape == x.shape


class TestAutocast:
    def test_as_torch_does(self, implementation: Any) -> None:
        q, k, v = inputs()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            right = F.scaled_dot_product_attention(q, k, v)
            context, lse = implementation(q, k, v, read=readings.LogSumExp())
        assert context.dtype == right.dtype == torch.bfloat16
        assert lse.dtype == torch.float32
        low = [x.bfloat16() for x in (q, k, v)]
        exact, sums = implementation(*low, read=readings.LogSumExp())
        assert torch.equal(context, exact)
        assert torch.equal(lse, sums)

    def test_mixed_dtypes_are_fine_there(self) -> None:
        q, k, v = inputs()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert ch.attend(q.bfloat16(), k, v).dtype == torch.bfloat16

    def test_float64_stays(self) -> None:
        q, k, v = inputs(torch.float64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(ch.attend(q, k, v), ch.attend(q, k, v))
            assert ch.attend(q, k, v).dtype == torch.float64

    def test_gradients_reach_the_float32_inputs(self, implementation: Any) -> None:
        leaves = [x.requires_grad_() for x in inputs()]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            implementation(*leaves, masks.causal()).float().square().sum().backward()
        assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in leaves)


def test_all_features_survive_a_deep_copy_of_their_strides(implementation: Any) -> None:
    given = BY_NAME["heads_last"].inputs()
    dense = {n: x.contiguous() if isinstance(x, Tensor) else x for n, x in given.items()}
    same(implementation(**given), implementation(**dense))
