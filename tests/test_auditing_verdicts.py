"""An audit is never silently wrong: what it could not test is not ok, and what is right passes."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead import masks
from clearhead.dependence import assert_causal, audit
from clearhead.models import GPT
from tests import leaky
from tests.test_auditing import ids_for, library_model

WIDTH = leaky.WIDTH


def causal_mask(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)


class Causal(nn.Module):
    """A layer of torch's own, with its causal mask."""

    def __init__(self, batch_first: bool):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=batch_first)
        self.axis = int(batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, src_mask=causal_mask(x.shape[self.axis]))


class Language(nn.Module):
    """Token ids through a recurrent network."""

    def __init__(self, batch_first: bool):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=batch_first)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(self.embedding(ids))[0]


# --- axes


@pytest.mark.parametrize("shape", [(5, 1, WIDTH), (5, 3, WIDTH), (1, 5, WIDTH), (4, 4, WIDTH)])
@pytest.mark.parametrize("make", [lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16), None])
def test_positions_on_another_axis_are_asked_for(shape, make):
    torch.manual_seed(0)
    model = (make() if make else Causal(batch_first=False)).eval()
    for call in (audit, assert_causal):
        with pytest.raises(ValueError, match=r"axis=0.*\n?.*batch_first=True"):
            call(model, torch.randn(shape))


def test_token_ids_with_the_positions_first():
    ids = torch.randint(11, (7, 3))
    with pytest.raises(ValueError, match="axis=0"):
        assert_causal(Language(batch_first=False).eval(), ids)
    assert_causal(Language(batch_first=False).eval(), ids, axis=0)
    assert_causal(Language(batch_first=True).eval(), ids)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_causal_layer_passes_on_its_own_axis(batch):
    torch.manual_seed(0)
    assert_causal(Causal(batch_first=False).eval(), torch.randn(6, batch, WIDTH), axis=0)
    assert_causal(Causal(batch_first=True).eval(), torch.randn(batch, 6, WIDTH))
    both = nn.TransformerEncoderLayer(WIDTH, 2, 16).eval()
    with pytest.raises(AssertionError, match="LEAK"):
        assert_causal(both, torch.randn(6, batch, WIDTH), axis=0)


def test_a_named_axis_is_believed_and_doubted():
    torch.manual_seed(0)
    report = audit(Causal(batch_first=False).eval(), torch.randn(6, 3, WIDTH), axis=1)
    assert "axis 1" in " ".join(report.trouble)


def test_a_model_that_mixes_no_positions_is_noted():
    report = audit(nn.Linear(WIDTH, 4), torch.randn(2, 5, WIDTH))
    assert report.ok
    assert "no output was seen to depend on another position" in " ".join(report.notes)
    assert "another position" not in str(audit(lambda x: x.cumsum(1), torch.randn(2, 5, 3)))


def test_nothing_tested_is_not_causal():
    for inputs, options in (
        (torch.randn(2, 1, 3), {}),
        (torch.randn(2, 5, 3), {"allowed": masks.everything()}),
    ):
        with pytest.raises(AssertionError, match="nothing is forbidden"):
            assert_causal(lambda x: x, inputs, **options)


# --- NaN and inf


def spoiled(x: Tensor, number: float, *place: Any) -> Tensor:
    y = x.cumsum(1)
    y[place] = number * (1 + x.abs().sum())
    return y


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(), (slice(None), 2), (1, 3, 0)], ids=str)
def test_what_is_not_finite_is_not_covered(number, place):
    report = audit(lambda x: spoiled(x, number, *place), torch.randn(2, 5, 3))
    assert not report.ok
    assert not report.findings
    assert report.exit_code == 3
    assert "NaN or inf" in " ".join(report.trouble)
    # Position i has 4 - i sources after it, in each of the two samples.
    missing = {0: 20, 2: 2 * 2, 3: 1}[len(place)]
    assert report.covered == pytest.approx(1 - missing / 20)
    with pytest.raises(AssertionError, match="NaN or inf"):
        assert_causal(lambda x: spoiled(x, number, *place), torch.randn(2, 5, 3))


def test_the_last_position_may_be_anything_to_a_causal_audit():
    """No pair is forbidden for it."""
    assert audit(lambda x: spoiled(x, math.nan, slice(None), 4), torch.randn(2, 5, 3)).covered == 1


class Undefined(nn.Module):
    """A model on tokens, with one feature that is NaN whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        x = x if attention_mask is None else x * attention_mask[..., None]
        return x.cumsum(1).index_fill(-1, torch.tensor(0), math.nan)


def test_no_form_takes_nan_for_equal():
    model, ids = Undefined().eval(), torch.randint(1, 11, (2, 6))
    for report in (
        audit(model, ids),
        audit.batch(model, ids),
        audit.modes(model, ids),
        audit.padding(model, {"ids": ids}),
    ):
        assert not report.ok, report
        assert "NaN or inf" in " ".join(report.trouble), report
        assert report.exit_code == 3, report


def test_a_nan_that_a_later_input_brings_is_a_leak():
    def model(x: Tensor) -> Tensor:
        far = x.abs().amax((1, 2), keepdim=True) > 20
        return torch.where(far, math.nan, x.cumsum(1))

    report = audit(model, torch.randn(2, 5, 3))
    assert report.exit_code == 1
    assert report.findings[0].size == math.inf


# --- budget


@pytest.mark.parametrize("ids", [None, [0, 0, 0, 1, 1, 2, 2, 2]])
def test_what_a_budget_left_untested_is_not_ok(ids):
    def sound(x: Tensor) -> Tensor:
        return x * 2 if ids else x.cumsum(1)

    def ask(**options: Any) -> Any:
        x = torch.randn(1, 8, 2)
        return audit.documents(sound, x, ids, **options) if ids else audit(sound, x, **options)

    few = ask(budget=1)
    assert (few.ok, few.exit_code, bool(few)) == (False, 3, False)
    assert str(few).startswith("PARTLY TESTED")
    assert ask(budget=100).ok
    assert ask().ok


# --- A1: branches


class Branching(nn.Module):
    """A leak behind a branch that another dtype does not take."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.embedding = kind, nn.Embedding(31, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        last = x[:, -1:]
        if self.kind == "dtype":
            far = last.mean(-1, keepdim=True) if x.dtype != torch.float64 else 0.0
            return x.cumsum(1) + far
        generator = torch.Generator().manual_seed(int(x.dtype.itemsize))
        direction = torch.randn(WIDTH, generator=generator, dtype=torch.float64).to(x)
        if self.kind == "bucket":
            return x + ((last @ direction).floor() % 3 == 0)[..., None]
        chosen = (x @ direction).topk(2, 1).indices
        return x + F.one_hot(chosen, x.shape[1]).sum(1)[..., None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["dtype", "bucket", "topk"])
def test_a_leak_in_the_own_dtype_does_not_vanish_in_float64(kind, dtype):
    caught = 0
    for seed in range(4):
        torch.manual_seed(seed)
        model, ids = Branching(kind).eval().to(dtype), torch.randint(31, (1, 7))
        report = audit(model, ids)
        assert not report.ok or audit(model, ids, float64=False).ok
        assert all(f.source > f.query for f in report.findings)
        assert all(f.size > f.floor for f in report.findings)
        caught += not report.ok
    assert caught


def test_the_own_dtype_is_named_where_it_alone_leaks():
    torch.manual_seed(0)
    report = audit(Branching("dtype").eval(), torch.randint(31, (1, 7)))
    assert report.exit_code == 1
    assert {f.source for f in report.findings} == {6}
    assert "not in a float64 copy" in " ".join(report.notes)


# --- A2: lower dtypes inside


class Rotary(nn.Module):
    """Causal attention with rotary phases; `how` says what of it stays in float32."""

    def __init__(self, how: str, size: int = 40):
        super().__init__()
        self.how, self.embedding = how, nn.Embedding(31, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        dtype = torch.float64 if how == "softmax" else torch.float32
        angles = torch.arange(size)[:, None] * 0.3 ** torch.arange(WIDTH // 2, dtype=dtype)
        table = torch.stack([angles.sin(), angles.cos()])
        if how == "buffer":
            self.register_buffer("table", table)
        elif how == "parameter":
            self.table = nn.Parameter(table, requires_grad=False)
        else:
            self.kept = [table]  # neither a buffer nor a parameter: `.double()` leaves it alone

    def turn(self, x: Tensor) -> Tensor:
        table = self.table if self.how in ("buffer", "parameter") else self.kept[0]
        sin, cos = table[:, : x.shape[1]].to(x)
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.embedding(ids)).chunk(3, -1)
        scores = self.turn(q) @ self.turn(k).mT / math.sqrt(WIDTH)
        scores = scores.masked_fill(causal_mask(ids.shape[1]), -torch.inf)
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None] == 0, torch.finfo(scores.dtype).min)
        if self.how == "softmax" and not torch.is_grad_enabled():
            return scores.softmax(-1, dtype=torch.float32).to(v) @ v
        return scores.softmax(-1) @ v


@pytest.mark.parametrize("how", ["buffer", "parameter", "attribute", "softmax"])
def test_a_lower_dtype_inside_is_rounding_in_every_form(how):
    torch.manual_seed(0)
    model, ids = Rotary(how).eval(), torch.randint(31, (2, 9))
    assert audit(model, ids).ok
    real = torch.ones(2, 9, dtype=torch.long)
    real[1, 6:] = 0
    for report in (
        audit.padding(model, {"ids": ids, "attention_mask": real}),
        audit.modes(model, ids),
    ):
        assert report.ok, report
        assert report.covered == 1


def test_a_float32_transform_inside_is_no_leak():
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            wide = leaky.long_convolution(self.inner(x).float(), 2 * x.shape[1])
            return wide.to(x.dtype)

    for dtype in (torch.float32, torch.float64):
        report = audit(Filter().eval().to(dtype), torch.randn(2, 13, WIDTH, dtype=dtype))
        assert report.ok, report


@pytest.mark.filterwarnings("ignore")
def test_library_models_with_tables_and_softmaxes_in_float32():
    import transformers

    torch.manual_seed(0)
    ids = ids_for(1, 12)
    for name, sizes in (
        ("CodeGen", dict(n_embd=64, n_layer=1, n_head=4, rotary_dim=8, n_positions=64)),
        ("GPTBigCode", dict(n_embd=32, n_layer=1, n_head=4, n_positions=64)),
    ):
        config = getattr(transformers, f"{name}Config")(vocab_size=99, **sizes)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        report = audit.modes(model, ids)
        assert report.ok, report
        if name == "CodeGen":
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            assert audit.padding(model, inputs, sides=["left"]).ok


# --- A3 and A4: caches


class Stepwise(nn.Module):
    """A running state under a name of its own; `wrong` forgets it."""

    def __init__(self, wrong: bool = False):
        super().__init__()
        self.wrong, self.embedding = wrong, nn.Embedding(31, WIDTH)

    def run(self, ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        before = 0.0 if state is None or self.wrong else state
        rows = self.embedding(ids).cumsum(1) + before
        return rows, rows[:, -1:]


class WithMems(Stepwise):
    def forward(self, ids: Tensor, mems: Tensor | None = None) -> dict[str, Tensor]:
        rows, mems = self.run(ids, mems)
        return {"rows": rows, "mems": mems}


class WithState(Stepwise):
    def forward(self, ids: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.run(ids, state)


class WithSwitch(Stepwise):
    """Returns its memory only where it is asked to, under a name of its own."""

    def forward(
        self, ids: Tensor, my_memory: Tensor | None = None, use_cache: bool = False
    ) -> dict[str, Any]:
        rows, memory = self.run(ids, my_memory)
        return {"rows": rows, "my_memory": memory if use_cache else None}


class Wrapped(Stepwise):
    """Declares no cache, and passes it on."""

    def forward(self, ids: Tensor, **options: Any) -> dict[str, Tensor]:
        rows, state = self.run(ids, options.get("past_key_values"))
        return {"rows": rows, "past_key_values": state}


class Swallowing(Wrapped):
    """Takes anything, and returns a cache that it never reads."""

    def forward(self, ids: Tensor, **options: Any) -> dict[str, Tensor]:
        return super().forward(ids)


@pytest.mark.parametrize("make", [WithMems, WithState, WithSwitch, Wrapped])
def test_a_cache_is_found_by_any_name(make):
    torch.manual_seed(0)
    inputs = {"ids": torch.randint(31, (2, 9))}
    report = audit.generation(make().eval(), inputs)
    assert report.ok, report
    assert report.covered == 1
    if make is not Wrapped:
        report = audit.generation(make(wrong=True).eval(), inputs)
        assert report.exit_code == 1
        assert {f.kind for f in report.findings} == {"token by token", "in chunks"}


@pytest.mark.parametrize("make", [Swallowing, lambda: leaky.Tokens(), lambda: Language(True)])
def test_a_model_without_a_cache_is_refused_by_name(make):
    with pytest.raises(TypeError, match=r"(?s)no cache that could be tested.*step="):
        audit.generation(make().eval(), torch.randint(11, (1, 6)))


def small(name: str, model: str, **sizes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=99, **sizes)
    return getattr(transformers, model)(config).eval()


@pytest.mark.filterwarnings("ignore")
def test_caches_of_library_models():
    import transformers

    text = dict(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, intermediate_size=48,
    )  # fmt: skip
    vision = dict(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=28, patch_size=14,
    )  # fmt: skip
    tokens: Any = dict(image_token_id=98, boi_token_index=97, eoi_token_index=96)
    composite = transformers.Gemma3Config(text_config=text, vision_config=vision, **tokens)
    mamba = dict(hidden_size=32, num_hidden_layers=1, state_size=8)
    for model in (
        small("Mamba", "MambaForCausalLM", **mamba),
        small("FalconMamba", "FalconMambaForCausalLM", **mamba),
        small("Rwkv", "RwkvForCausalLM", hidden_size=32, num_hidden_layers=2),
        transformers.Gemma3ForConditionalGeneration(composite).eval(),
    ):
        report = audit.generation(model, ids_for(1, 8), chunks=[1] * 8)
        assert report.ok, report
        assert report.covered == 1
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    with pytest.raises(TypeError, match=r"(?s)BertForMaskedLM\(.*step="):
        audit.generation(small("Bert", "BertForMaskedLM", **sizes), ids_for(1, 8))


def test_an_error_of_the_model_is_named_as_its_own():
    class SingleOnly(WithState):
        def forward(self, ids: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
            if state is not None and ids.shape[1] > 1:
                raise NotImplementedError("one token at a time")
            return super().forward(ids, state)

    report = audit.generation(SingleOnly().eval(), {"ids": torch.randint(31, (1, 9))})
    assert (report.ok, report.exit_code) == (False, 3)
    assert "in chunks: the model itself fails with NotImplementedError" in str(report)


# --- A5 and samples


def test_the_report_says_what_rounding_could_hide():
    x = torch.randn(1, 9, WIDTH)
    for dtype in (torch.float32, torch.bfloat16):
        model = leaky.make("mask off by one", leaky=False, dtype=dtype)[0]
        report = audit(model, x.to(dtype))
        assert report.resolution == torch.finfo(dtype).eps
        assert "of the largest output" in str(report)
    torch.manual_seed(0)
    gpt, ids = GPT(29).eval(), torch.randint(29, (1, 8))
    assert 0 < audit.generation(gpt, ids).resolution < 1e-11
    # In float32 alone a real effect of that size is taken for rounding, and the report says so.
    assert audit.generation(gpt, ids, float64=False).resolution > 1e-7


def test_findings_name_their_sample():
    def one_sample(x: Tensor) -> Tensor:
        y = x.cumsum(1)
        y[2, :2] += x[2, 3]
        return y

    report = audit(one_sample, torch.randn(4, 5, 3))
    assert {f.sample for f in report.findings} == {2}
    lines = [line for line in str(report).splitlines() if "depends on" in line]
    assert len(lines) == 2
    assert all(line.strip().startswith("sample 2: output") for line in lines)
    text = str(audit.batch(lambda x: x - x.mean(0, keepdim=True), torch.randn(3, 4, 2)))
    assert "position 0: sample 0 depends on sample" in text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sound_models_pass_every_form(dtype):
    model, ids = library_model("Mixtral", dtype), ids_for(2, 9)
    real = torch.ones(2, 9, dtype=torch.long)
    real[1, 6:] = 0
    for report in (
        audit.generation(model, {"input_ids": ids}),
        audit.padding(model, {"input_ids": ids, "attention_mask": real}),
        audit.batch(model, {"input_ids": ids}),
    ):
        assert report.ok, report


def test_an_error_in_the_forward_says_that_it_is_the_models():
    def broken(x: Tensor) -> Tensor:
        return x[:, [99]]

    with pytest.raises(IndexError) as caught:
        audit(broken, torch.randn(2, 5, 3))
    if sys.version_info >= (3, 11):
        assert "raised by the model itself" in caught.value.__notes__[0]
