"""Attaching to a model: nothing is left behind, however and in whatever order blocks end."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import io
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead import heads, masks, readings
from clearhead._capture import active_handlers, attach
from tests.architectures import ALL
from tests.test_watching import WAYS, WEIGHTS, Stack, lesson, sdpa

LLAMA = next(one for one in ALL if one.name == "Llama")
TOKENS = LLAMA.read()["input_ids"]
X = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))


def identities(owner: Any) -> dict[str, int]:
    """Which object each attribute is; what Python itself counts there does not matter."""
    return {name: id(value) for name, value in vars(owner).items() if not name.startswith("__")}


def world(model: nn.Module) -> dict[str, Any]:
    """Everything that attaching to a model could change: the model, torch and transformers."""
    from transformers import masking_utils, modeling_utils
    from transformers.generation.utils import GenerationMixin

    dynamo = sys.modules.get("torch._dynamo")
    parts = dict(model.named_modules())
    config = getattr(model, "config", None)
    return {
        "attributes": {name: identities(part) for name, part in parts.items()},
        "hooks": {
            (name, key): len(value)
            for name, part in parts.items()
            for key, value in vars(part).items()
            if "hooks" in key and isinstance(value, dict)
        },
        "classes": {type(part): identities(type(part)) for part in parts.values()},
        "training": [part.training for part in parts.values()],
        "needs gradients": [x.requires_grad for x in model.parameters()],
        "gradients": [None if x.grad is None else x.grad.clone() for x in model.parameters()],
        "versions": [x._version for x in model.parameters()],
        "config": None if config is None else config.to_dict(),
        "backend": getattr(config, "_attn_implementation", None),
        "modules": identities(nn.Module),
        "global hooks": {
            name: len(value)
            for name, value in vars(nn.modules.module).items()
            if name.startswith("_global") and hasattr(value, "__len__")
        },
        "torch": identities(torch),
        "F": identities(F),
        "Tensor": identities(Tensor),
        "attention functions": dict(modeling_utils.AttentionInterface._global_mapping),
        "own attention functions": dict(modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping),
        "interface": identities(modeling_utils.AttentionInterface),
        "mask functions": dict(masking_utils.AttentionMaskInterface._global_mapping),
        "generation": identities(GenerationMixin),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "stance": dynamo.eval_frame._stance.stance if dynamo else "default",
        "gradients on": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "random": torch.get_rng_state().tolist(),
        "running": (
            active_handlers(model),
            attach._patched.interceptors,
            dict(attach._patched._originals),
        ),
    }


def watch(model: Any, inputs: Any) -> None:
    with ch.watch(model):
        model(inputs)


def through(model: Any, inputs: Any) -> None:
    with ch.watch(model, through=True, layers=-1):
        model(inputs)


def generating(model: Any, inputs: Any) -> None:
    with ch.watch(model):
        model.generate(inputs, max_new_tokens=3, num_beams=2, pad_token_id=0)


def knockout(model: Any, inputs: Any) -> None:
    with ch.knockout(model, masks.diagonal(1)):
        model(inputs)


def zero_weights(model: Any, inputs: Any) -> None:
    with ch.zero_weights(model, masks.first(1)):
        model(inputs)


def ablate(model: Any, inputs: Any) -> None:
    with ch.ablate(model, [(0, 1)], how="mean", reference=inputs):
        model(inputs)


def cut_and_watch(model: Any, inputs: Any) -> None:
    with ch.watch(model), ch.knockout(model, masks.diagonal(1)), ch.watch(model):
        model(inputs)


ALL_WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "watch": watch,
    "through": through,
    "generate": generating,
    "knockout": knockout,
    "zero_weights": zero_weights,
    "ablate": ablate,
    "cut and watch": cut_and_watch,
    "audit": lambda model, inputs: ch.audit(model, inputs, allowed=masks.causal()),
    "estimate": lambda model, inputs: ch.estimate(model, inputs),
    "measure": lambda model, inputs: heads.measure(model, inputs),
    "rollout": lambda model, inputs: heads.rollout(model, inputs),
    "importance": lambda model, inputs: ch.head_importance(
        model, inputs, lambda output: output.logits.sum()
    ),
    "influence": lambda model, inputs: ch.influence(model, inputs),
}


class Failing(nn.Module):
    """Raises in the middle of a forward, once attention has been called."""

    def forward(self, x: Any) -> Any:
        raise ZeroDivisionError


class TestNothingIsLeft:
    @pytest.mark.parametrize("grad", [True, False])
    @pytest.mark.parametrize("name", ALL_WAYS)
    def test_after_a_run(self, name: str, grad: bool):
        model = LLAMA.make("sdpa")
        with torch.set_grad_enabled(grad):
            before = world(model)
            ALL_WAYS[name](model, TOKENS)
            assert_same(before, world(model))

    @pytest.mark.parametrize("name", ALL_WAYS)
    def test_after_an_exception_of_the_model(self, name: str):
        model: Any = LLAMA.make("sdpa")
        model.model.layers[1].mlp = Failing()
        before = world(model)
        # audit says what its run came to; the others let the model's exception through
        with contextlib.suppress(ValueError, ZeroDivisionError):
            ALL_WAYS[name](model, TOKENS)
        assert_same(before, world(model))

    @pytest.mark.parametrize("stop", [ZeroDivisionError, KeyboardInterrupt, GeneratorExit])
    def test_after_an_exception_of_the_block(self, stop: type[BaseException]):
        model = LLAMA.make("sdpa")
        before = world(model)
        for block in (
            lambda: ch.watch(model),
            lambda: ch.knockout(model, masks.diagonal(1)),
            lambda: ch.ablate(model, [(0, 0)]),
            lambda: ch.zero_weights(model, masks.diagonal(1)),
        ):
            with contextlib.suppress(stop), block():
                model(TOKENS)
                raise stop
            assert_same(before, world(model))

    def test_the_test_notices_what_is_left(self):
        model = LLAMA.make("sdpa")
        before = world(model)
        for leave, undo in (
            (lambda: setattr(F, "softmax", torch.softmax), F.softmax),
            (lambda: setattr(nn.Module, "_call_impl", print), nn.Module._call_impl),
        ):
            own = undo
            leave()
            try:
                with pytest.raises(AssertionError):
                    assert_same(before, world(model))
            finally:
                if own.__name__ == "softmax":
                    F.softmax = own  # type: ignore[assignment]
                else:
                    nn.Module._call_impl = own  # type: ignore[method-assign]
        assert_same(before, world(model))

    def test_a_copy_made_inside_is_an_ordinary_model(self):
        model = LLAMA.make("sdpa")
        with ch.watch(model) as seen:
            twin = copy.deepcopy(model)
            file = io.BytesIO()
            torch.save(model, file)
            model(TOKENS)
            twin(TOKENS)
        assert len(seen) == 2
        file.seek(0)
        for one in (twin, torch.load(file, weights_only=False)):
            assert not [key for part in one.modules() for key in vars(part) if "generate" in key]
            assert not any(part._forward_hooks or part._forward_pre_hooks for part in one.modules())
            assert torch.equal(one(TOKENS).logits, model(TOKENS).logits)

    def test_a_generate_of_the_model_itself_stays(self):
        model: Any = LLAMA.make("sdpa")
        made = model.generate(TOKENS, max_new_tokens=2, pad_token_id=0)
        calls = []

        def generate(tokens: Tensor) -> Tensor:
            calls.append(tokens)
            return type(model).generate(model, tokens, max_new_tokens=2, pad_token_id=0)

        model.generate = generate
        with ch.watch(model) as seen:
            assert torch.equal(model.generate(TOKENS), made)
        assert {record.sizes[2] for record in seen} == {12}
        assert model.generate is generate
        assert len(calls) == 1


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for key, value in before.items():
        if key == "gradients":
            assert all(map(_equal, value, after[key]))
        elif key != "random":
            assert after[key] == value, key
    assert after["random"] == before["random"], "random numbers were drawn"


def _equal(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right or (left is not None and right is not None and torch.equal(left, right))


def counts(seen: Any) -> int:
    assert all(record.check < 1e-5 for record in seen)
    return len(seen)


class TestOrder:
    """Blocks in blocks, and blocks that are not left in the order they were entered."""

    @pytest.mark.parametrize("outer", WAYS)
    @pytest.mark.parametrize("inner", [sdpa, lesson])
    def test_two_models(self, outer, inner):
        one, two = Stack(outer), Stack(inner)
        with ch.watch(one) as first, ch.watch(two) as second, ch.watch(one) as third:
            one(X)
            two(X)
            two(X)
        assert (counts(first), counts(second), counts(third)) == (4, 8, 4)

    @pytest.mark.parametrize("mix", WAYS)
    @pytest.mark.parametrize("ways", [(True, False), (False, True), (True, True)])
    def test_through_in_one_of_two_blocks(self, mix, ways):
        model = Stack(mix)
        with ch.watch(model, read=WEIGHTS) as alone:
            model(X)
        with (
            ch.watch(model, read=WEIGHTS, through=ways[0]) as outer,
            ch.watch(model, read=WEIGHTS, through=ways[1]) as inner,
        ):
            model(X)
        for records in zip(alone, outer, inner, strict=True):
            for record in records:
                torch.testing.assert_close(record.value, records[0].value, rtol=0, atol=1e-5)

    def test_generators_that_take_turns(self):
        def steps(model):
            with ch.watch(model, read=WEIGHTS) as seen:
                for _ in range(3):
                    model(X)
                    yield seen

        one, two = Stack(), Stack(lesson)
        before = world(one)
        left, right = steps(one), steps(two)
        first, second = next(left), next(right)
        next(left)
        left.close()  # the first to be entered is left first
        assert torch._C._len_torch_function_stack() == before["function modes"] + 1
        next(right)
        one(X)
        right.close()
        assert (counts(first), counts(second)) == (8, 8)
        assert_same(before, world(one))

    def test_tasks_that_take_turns(self):
        async def look(model, runs):
            with ch.watch(model) as seen:
                for _ in range(runs):
                    model(X)
                    await asyncio.sleep(0)
            return counts(seen)

        async def all_of_them():
            models = Stack(), Stack(lesson), Stack()
            return await asyncio.gather(*(look(m, 2 * n + 1) for n, m in enumerate(models)))

        before = world(Stack())["function modes"], nn.Module._call_impl
        assert asyncio.run(all_of_them()) == [4, 12, 20]
        assert (torch._C._len_torch_function_stack(), nn.Module._call_impl) == before

    def test_a_generator_that_is_closed_raises_nothing(self):
        def look():
            with ch.watch(Stack()) as seen:
                yield seen

        block = look()
        assert len(next(block)) == 0
        block.close()  # nothing was seen, and nobody was left to tell


class TestThreads:
    def both(self, one: nn.Module, two: nn.Module, inputs: Any, runs: int = 10) -> list[int]:
        gate = threading.Barrier(2, timeout=60)

        def look(model: nn.Module) -> int:
            with ch.watch(model) as seen:
                gate.wait()
                for _ in range(runs):
                    model(inputs)
                gate.wait()
            return counts(seen)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(look, (one, two)))

    @pytest.mark.parametrize("mixes", [(sdpa, sdpa), (sdpa, lesson), (lesson, lesson)])
    def test_each_sees_its_own(self, mixes):
        one, two = map(Stack, mixes)
        assert self.both(one, two, X) == [40, 40]
        assert self.both(one, one, X) == [40, 40]

    def test_multihead_folds_its_own_heads(self):
        one, two = (Wrapped(nn.MultiheadAttention(12, n, batch_first=True)) for n in (2, 3))
        gate = threading.Barrier(2, timeout=60)

        def look(model):
            with ch.watch(model, read=WEIGHTS) as seen:
                gate.wait()
                for _ in range(20):
                    model(torch.ones(2, 5, 12))
            return {record.sizes[1] for record in seen}

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(look, (one, two))) == [{2}, {3}]

    def test_models_of_transformers(self):
        one, two = LLAMA.make("sdpa"), LLAMA.make("eager")
        before = world(one)
        with torch.no_grad():
            assert self.both(one, two, TOKENS, runs=3) == [6, 6]
        assert_same(before, world(one))

    def test_a_part_in_another_thread_is_named(self):
        class Split(nn.Module):
            def __init__(self):
                super().__init__()
                self.here, self.there = Stack(), Stack(lesson)

            def forward(self, x):
                with ThreadPoolExecutor(1) as pool:
                    x = pool.submit(self.there, x).result()
                return self.here(x)

        model = Split()
        with ch.watch(model) as seen:
            model(X)
        assert seen[0].module == "here.first"
        assert seen.notes == ["there: not seen, it ran in another thread than the watch"]

    def test_another_thread_is_left_alone(self):
        model, twin = Stack(), Stack()
        twin.load_state_dict(model.state_dict())
        with ch.watch(model, through=True) as seen:
            ours = model(X)
            with ThreadPoolExecutor(1) as pool:
                theirs = pool.submit(model, X).result()
        assert torch.equal(theirs, twin(X))
        assert len(seen) == 4
        assert ours.shape == theirs.shape


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=True)[0]


class TestModels:
    def test_data_parallel_without_devices_is_its_module(self):
        model = nn.DataParallel(Stack())
        with ch.watch(model) as seen:
            model(X)
        assert seen[0].module == "module.first"

    @pytest.mark.parametrize("mix", [sdpa, lesson])
    @pytest.mark.parametrize("options", [{}, {"through": True}, {"layers": [0]}])
    def test_a_model_without_values_is_refused(self, mix, options):
        model = Stack(mix).to("meta")
        before = world(model)
        refusal = pytest.raises(ValueError, match=r"model: is on the meta device[\s\S]*estimate")
        with refusal, ch.watch(model, **options):
            model(X.to("meta"))
        with refusal, ch.knockout(model, masks.diagonal(1)):
            model(X.to("meta"))
        assert_same(before, world(model))
        assert ch.estimate(model, X.to("meta")).calls == 4

    @pytest.mark.parametrize("options", [{}, {"through": True}])
    def test_inputs_on_another_device_are_torchs_to_refuse(self, options):
        model = Wrapped(nn.MultiheadAttention(6, 3, batch_first=True)).to("meta")
        before = world(model)
        with pytest.raises(RuntimeError, match="not on the expected device"):
            model(X)
        with (
            pytest.raises(RuntimeError, match="not on the expected device"),
            ch.watch(model, **options),
        ):
            model(X)
        assert_same(before, world(model))

    @pytest.mark.parametrize("how", ["wrapped", "in place", "part"])
    @torch.no_grad()
    def test_compiled(self, how):
        model = Stack()
        runs = []

        def backend(graph, inputs):
            runs.append(graph)
            return graph.forward

        plain = model(X)
        if how == "in place":
            model.compile(backend=backend)
            called: Any = model
        elif how == "part":
            model.middle = torch.compile(model.middle, backend=backend)  # type: ignore
            called = model
        else:
            called = torch.compile(model, backend=backend)
        with ch.watch(called, read=WEIGHTS) as seen:
            assert torch.equal(called(X), plain)
        assert [record.module for record in seen] == ["first", "middle", "middle", "last"]
        assert any("compiled" in note for note in seen.notes)
        assert not runs  # it ran eagerly
        assert torch.equal(called(X), plain)
        assert runs  # and is compiled again

    def test_a_model_that_is_deleted_inside(self):
        model = Stack()
        with ch.watch(model) as seen:
            model(X)
            del model
            gc.collect()
        assert len(seen) == 4

    def test_no_samples_and_no_positions(self):
        for mix in WAYS[:1] + WAYS[-2:]:
            with ch.watch(model := Stack(mix), read=(readings.Entropy(), WEIGHTS)) as seen:
                model(torch.ones(0, 5, 6))
                model(torch.ones(2, 0, 6))
            assert [record.sizes for record in seen] == [(0, 3, 5, 5)] * 4 + [(2, 3, 0, 0)] * 4

    def test_the_wrong_number_is_told_with_what_there_is(self):
        model = LLAMA.make("sdpa")
        layers = r"0 \(model\.layers\.0\.self_attn\), 1 \(model\.layers\.1\.self_attn\)"
        choices: list[tuple[dict[str, Any], str]] = [
            ({"layers": 7}, rf"layers: [\s\S]*\[7\][\s\S]*{layers}"),
            ({"layers": -3}, rf"layers: [\s\S]*\[-3\][\s\S]*{layers}"),
            ({"heads": [0, 6]}, r"heads: [\s\S]*\[6\][\s\S]*0\.\.5"),
            ({"calls": 1}, r"calls: [\s\S]*\[1\][\s\S]*0\.\.0"),
        ]
        for options, text in choices:
            with pytest.raises(ValueError, match=text), ch.watch(model, **options):
                model(TOKENS)
        for cut in (
            lambda: ch.knockout(model, masks.diagonal(1), layers=7),
            lambda: ch.zero_weights(model, masks.diagonal(1), layers=7),
            lambda: ch.ablate(model, [(7, 0)]),
        ):
            with pytest.raises(ValueError, match=rf"\[7\][\s\S]*{layers}"), cut():
                model(TOKENS)


def test_axes_are_worked_out_only_where_a_call_asks(monkeypatch):
    from clearhead._capture.axes.layout import AxisLayout

    worked, own = [], AxisLayout.reordered

    def counted(self, order):
        worked.append(order)
        return own(self, order)

    monkeypatch.setattr(AxisLayout, "reordered", counted)
    project = torch.nn.Linear(8, 8)

    def model(x):
        for _ in range(50):
            x = project(x).transpose(0, 1).transpose(0, 1)
        heads = x.view(1, 5, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads)

    with ch.watch(model, read=ch.readings.Entropy()) as seen:
        model(torch.randn(1, 5, 8))
    assert seen[0].value.shape == (1, 2, 5)
    # Two after the last projection, the heads, and the keys turned to meet the queries; not 100.
    assert len(worked) == 4
