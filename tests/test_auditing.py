"""The audit finds every kind of leak at its place, and lets sound models pass."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead import masks
from clearhead.dependence import assert_causal, audit
from clearhead.dependence.proof import suspects
from clearhead.dependence.proof.plan import make_plan
from clearhead.models import BERT, GPT, RNN
from tests import leaky

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# Often given in place of a mask.
WORDS: Any = ["causal"]
MAKERS: Any = [masks.causal]


def check_leak(kind: str, report: Any) -> None:
    case = leaky.CASES[kind]
    assert not report.ok, report
    for finding in report.findings:
        assert finding.source > finding.query
        assert case.leaks(finding.query, finding.source), (finding, report)
        assert finding.module == case.module, report
        assert finding.size > finding.floor
    assert report.covered == 1


def really_leaks(model: Any, x: Tensor, finding: Any) -> bool:
    """Decide without the library: change that source alone, and look at that output."""
    changed = x.clone()
    changed[:, finding.source] += 1 if not x.is_floating_point() else 3 * torch.randn_like(x[:, 0])
    changed = changed % leaky.VOCAB if not x.is_floating_point() else changed
    with torch.no_grad():
        gap = model(changed.clone())[:, finding.query] - model(x.clone())[:, finding.query]
    return bool(gap.abs().max() > 0)


@pytest.mark.parametrize("kind", leaky.CASES)
def test_every_leaky_module_is_found_at_its_place(kind):
    model, x = leaky.make(kind, leaky=True)
    report = audit(model, x)
    check_leak(kind, report)
    assert any(really_leaks(model, x, finding) for finding in report.findings)


@pytest.mark.parametrize("kind", leaky.CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_mended_twin_passes(kind, dtype):
    if dtype == torch.bfloat16 and kind == "circular long convolution":
        dtype = torch.float32  # torch has no FFT in bfloat16
    model, x = leaky.make(kind, leaky=False, dtype=dtype)
    report = audit(model, x)
    assert report.ok, report
    assert report.covered == 1


@pytest.mark.parametrize("leaks", [True, False])
@pytest.mark.parametrize("kind", leaky.CASES)
def test_proving_by_parts_agrees_with_runs(kind, leaks, monkeypatch):
    monkeypatch.setattr(suspects, "LONG", 0)
    model, x = leaky.make(kind, leaks)
    report = audit(model, x)
    if leaks:
        check_leak(kind, report)
    else:
        assert report.ok, report
        assert report.covered == 1


def test_enough_kinds():
    assert len(leaky.CASES) >= 25


@pytest.mark.parametrize("positions", [1, 2, 5, 13, 32])
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(), masks.window(3), masks.band(1, 2), masks.diagonal(0), masks.nothing(),
        masks.everything(), masks.prefix(2) | masks.causal(), masks.causal() & masks.window(4),
    ],
    ids=repr,
)  # fmt: skip
def test_a_plan_covers_every_forbidden_pair_and_changes_nothing_allowed(mask, positions):
    forbidden = ~mask.dense(positions, positions).numpy()
    left = forbidden.copy()
    probes = make_plan(forbidden)
    for probe in probes:
        for query in probe.queries.nonzero()[0]:
            assert not (probe.sources & ~forbidden[query]).any()
            left[query] &= ~probe.sources
    assert not left.any()
    assert len(probes) <= len(forbidden)


def test_documents_take_few_runs():
    ids = torch.arange(64) // 8
    assert len(make_plan(~masks.document(ids).dense(64, 64).numpy())) <= 8


# --- models


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_our_own_models(dtype):
    ids = torch.randint(29, (2, 11))
    for make in (GPT, RNN):
        assert audit(make(29).eval().to(dtype), ids).ok
    report = audit(BERT(29).eval().to(dtype), ids)
    assert not report.ok
    assert "attention" in report.findings[0].module


SMALL = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
OLD = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
SOUND: dict[str, dict[str, Any]] = {
    "Llama": SMALL, "Qwen2": SMALL, "Qwen3": SMALL, "Gemma": SMALL, "Phi": SMALL, "Phi3": SMALL,
    "Mistral": SMALL | dict(sliding_window=4), "Gemma2": SMALL | dict(sliding_window=4),
    "GPT2": OLD | dict(n_positions=64), "Bloom": SMALL | dict(n_layer=2, n_head=4),
    "OPT": SMALL | dict(ffn_dim=48, word_embed_proj_dim=32), "Olmo2": SMALL, "Cohere": SMALL,
    "Granite": SMALL, "GPTNeoX": SMALL,
    "StableLm": SMALL, "Mixtral": SMALL | dict(num_local_experts=4),
    "Falcon": dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "RoFormer": SMALL | dict(is_decoder=True), "MegatronBert": SMALL | dict(is_decoder=True),
    "RemBert": SMALL | dict(is_decoder=True, input_embedding_size=32, output_embedding_size=32),
}  # fmt: skip


def library_model(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SOUND[name])
    return transformers.AutoModelForCausalLM.from_config(config, **options).eval().to(dtype)


def ids_for(batch: int = 2, positions: int = 12) -> Tensor:
    return torch.randint(3, 61, (batch, positions), generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SOUND)
def test_sound_library_models_pass(name, dtype):
    if name == "Mixtral" and dtype == torch.float64:
        pytest.skip("its grouped experts have no float64")
    report = audit(library_model(name, dtype), {"input_ids": ids_for()})
    assert report.ok, report
    assert report.covered == 1


@pytest.mark.filterwarnings("ignore")
def test_packed_documents_of_llama():
    """A74: with an all-ones mask, or a cache, packed documents mix; without either they do not."""
    model = library_model("Llama")
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    packed = {"input_ids": ids_for(1, 8), "position_ids": places}
    assert audit.documents(model, packed | {"use_cache": False}).ok
    for more in ({}, {"use_cache": False, "attention_mask": torch.ones(1, 8, dtype=torch.long)}):
        report = audit.documents(model, packed | more)
        assert not report.ok
        for finding in report.findings:
            assert finding.query >= 4 > finding.source
            assert finding.module == "model.layers.0.self_attn"


def test_a_range_of_ids_is_all_that_may_replace_others():
    given = set[int]()

    def running(ids):
        given.update(ids.flatten().tolist())
        return ids.double().cumsum(1)

    ids = torch.full((2, 9), 40)
    assert audit(running, ids, vocab=range(7, 12)).ok
    assert given <= {40, *range(7, 12)}
    assert len(given) == 6
    given.clear()
    assert audit.batch(running, ids, vocab=range(7, 12)).ok
    assert given <= {40, *range(7, 12)}
    with pytest.raises(ValueError, match="no other token"):
        audit(running, ids, vocab=range(7, 8))


@pytest.mark.filterwarnings("ignore")
def test_left_padding_without_position_ids():
    """A89: GPT-2 counts its positions over the padding; a rotary model does not care."""
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 6:] = mask[2, 4:] = 0
    inputs = {"input_ids": ids_for(3, 9), "attention_mask": mask}
    assert audit.padding(library_model("Llama"), inputs).ok
    report = audit.padding(library_model("GPT2"), inputs)
    assert not report.ok
    assert {finding.kind for finding in report.findings} == {"amount of left padding"}
    assert audit.padding(library_model("GPT2"), inputs, sides=["right"]).ok
    places = torch.arange(9).expand(3, -1)
    assert audit.padding(library_model("GPT2"), inputs | {"position_ids": places}).ok


def test_padding_of_a_decoder_goes_with_the_encoder_of_its_sample():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=61, d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=40)
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.randint(3, 50, (2, 11), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    report = audit.padding(model, inputs, mask="decoder_attention_mask")
    assert report.ok, report


def test_padding_that_is_attended_to():
    """A91: a mask that is taken and never used."""

    class Unused(leaky.Tokens):
        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            x = self.token(ids)
            return self.head(x + x.mean(1, keepdim=True))

    class Used(Unused):
        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            assert attention_mask is not None
            x, real = self.token(ids), attention_mask[..., None].to(self.head.weight.dtype)
            return self.head(x + (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True))

    inputs = {"ids": ids_for(2, 7) % leaky.VOCAB}
    report = audit.padding(Unused().eval(), inputs)
    assert {finding.kind for finding in report.findings} >= {"content of the left padding"}
    assert audit.padding(Used().eval(), inputs).ok


def test_attention_across_the_batch():
    """A49: batch_first forgotten."""
    x = torch.randn(3, 7, leaky.WIDTH)
    report = audit.batch(leaky.Across(True).eval(), x)
    assert not report.ok
    assert all(finding.source != finding.query for finding in report.findings)
    assert all(finding.module == "attention" for finding in report.findings)
    assert audit.batch(leaky.Across(False).eval(), x).ok
    assert audit.batch(leaky.Across(False).eval(), x[:1]).ok
    assert not audit.batch(nn.BatchNorm1d(7), x).ok


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mistral"])
def test_generation_and_modes_of_library_models(name):
    model = library_model(name)
    assert audit.generation(model, {"input_ids": ids_for(1, 9)}).ok
    report = audit.modes(model, {"input_ids": ids_for(2, 9)})
    assert report.ok, report
    assert "eager" in report.notes[-1]


def test_generation_of_our_model_and_of_one_that_drops_its_mask():
    model = GPT(29).eval()
    ids = torch.randint(29, (2, 11))
    assert audit.generation(model, ids).ok

    def without_places(model: Any, arguments: dict[str, Any], cache: Any) -> Any:
        cache = model.new_cache() if cache is None else cache
        # the step forgets what came before the last token
        held = [{k: v[..., -1:, :] for k, v in layer.items()} for layer in cache]
        return model(**arguments, cache=held), held

    report = audit.generation(model, ids, step=without_places)
    assert not report.ok
    assert all(finding.query >= finding.source > 0 for finding in report.findings)


def test_modes_of_a_model_that_contradicts_itself():
    class TwoFaced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = leaky.Block(leaky.Attention())
            self.outer = leaky.Block(leaky.Attention("missing"))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if self.training else self.outer(x)

    report = audit.modes(TwoFaced().eval(), torch.randn(2, 5, leaky.WIDTH))
    assert {finding.kind for finding in report.findings} == {"train"}
    assert audit.modes(leaky.Across(False), torch.randn(2, 5, leaky.WIDTH)).ok


# --- windows, depth, several outputs, axes, budget


class Windowed(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.mask, self.inner = masks.window(size), nn.Linear(leaky.WIDTH, leaky.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        may = self.mask.dense(x.shape[1], x.shape[1])
        return x + F.scaled_dot_product_attention(self.inner(x), x, x, may)


def test_a_window_reaches_further_with_every_layer():
    model, x = nn.Sequential(Windowed(3), Windowed(3)), torch.randn(1, 11, leaky.WIDTH)
    assert audit(model, x, masks.window(3), depth=2).ok
    report = audit(model, x, masks.window(3))
    assert not report.ok
    assert {f.query - f.source for f in report.findings} <= {3, 4}


def test_a_window_that_was_lost():
    """A70: perturb the source just outside the window."""
    report = audit(Windowed(4), torch.randn(1, 9, leaky.WIDTH), masks.window(3))
    assert {f.query - f.source for f in report.findings} == {3}
    assert {f.module for f in report.findings} == {"Windowed (its own forward)"}


def test_several_outputs_and_other_axes():
    x = torch.randn(3, 5, 4)
    assert audit(lambda x: {"a": x.cumsum(1), "b": (x, x.sum())}, x).ok
    assert not audit(lambda x: {"a": x.cumsum(1), "b": (x - x.mean(1, keepdim=True),)}, x).ok
    assert audit(lambda x: x.cumsum(0), x, axis=0).ok
    assert not audit(lambda x: x.flip(0).cumsum(0).flip(0), x, axis=0).ok
    assert not audit(nn.Conv1d(5, 2, 3, padding=1), x, axis=2).ok
    assert audit(lambda x: x.cumsum(0), torch.randn(7, 4)).ok
    assert audit(lambda ids: ids.double().cumsum(0), torch.arange(7)).ok


@pytest.mark.parametrize("shape", [(8, 8, 8), (5, 5, 8), (8, 3, 8), (1, 8, 8)])
def test_equal_sizes_are_not_confused(shape):
    for wrong in ("missing", ""):
        report = audit(leaky.Block(leaky.Attention(wrong)).eval(), torch.randn(shape))
        assert report.ok == (not wrong), report
        assert {finding.module for finding in report.findings} <= {"mixer"}
    model = GPT(7, layers=1, heads=1, width=8).eval()
    for form in (audit, audit.batch, audit.generation):
        assert form(model, torch.randint(7, (7, 7))).ok


def test_a_budget_is_kept_and_told():
    runs = []

    def model(x: Tensor) -> Tensor:
        runs.append(len(x))
        return x.cumsum(1)

    report = audit(model, torch.randn(1, 33, 2), budget=4)
    assert not report.findings
    assert not report.ok  # what was left untested may leak
    assert report.exit_code == 3
    assert 0.5 < report.covered < 1
    with pytest.raises(AssertionError, match=r"covered \d\d\.\d%"):
        assert_causal(model, torch.randn(1, 33, 2), budget=4)


# --- trouble that is no leak


def test_trouble_is_named_and_is_no_leak():
    x = torch.randn(2, 7, leaky.WIDTH)

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    class Editing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.abs().max() > 8:
                raise ArithmeticError("too large")
            return x.cumsum(1)

    for model, word in (
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), "random"),
        (Stateful(), "keeps state"),
        (Editing(), "in place"),
        (Fragile(), "too large"),
    ):
        report = audit(model, x)
        assert report.ok, report
        assert word in " ".join(report.trouble)
    noisy = audit(lambda x: x + int.from_bytes(os.urandom(2), "big"), x)
    assert not noisy.findings
    assert not noisy.ok
    assert "not deterministic" in str(noisy)


def test_the_model_is_left_as_it_was():
    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls, self.seen = nn.BatchNorm1d(8), 0, [1]
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            if self.calls > 1:
                raise RuntimeError("no more")
            self.norm.weight.data.mul_(2)
            return self.drop(self.norm(x.mT).mT) + torch.rand(())

    model, x = Raising(), torch.randn(2, 7, 8)
    handle = model.norm.register_forward_hook(lambda *_: None)
    torch.manual_seed(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, given = torch.get_rng_state(), x.clone()
    for form in (audit, audit.batch, audit.modes):
        form(model, x)
    with pytest.raises(ValueError, match="must give an output"):
        audit(lambda x: model(x).sum(), x)
    with pytest.raises(ZeroDivisionError):
        audit(lambda x: 1 / 0, x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert (model.calls, model.seen, model.training) == (0, [1], True)
    assert model.norm._forward_hooks == {handle.id: model.norm._forward_hooks[handle.id]}
    assert not model._forward_hooks
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, given)


# --- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: audit(lambda x: x.mean(1), x), r"each of the 9 positions.*\(2, 8\)"),
        (lambda x: audit(lambda x: torch.cat([x, x], 1), x), r"\(2, 18, 8\)"),
        (lambda x: audit(lambda x: None, x), "without tensors"),
        (lambda x: audit(lambda i: i * 1.0, torch.ones(2, 5).long()), "no other token.*vocab="),
        (lambda x: audit(nn.Embedding(1, 4), torch.zeros(2, 5).long()), "1 token in"),
        (lambda x: audit(nn.Identity(), torch.ones(2, 3, dtype=torch.bool)), "nothing can"),
        (lambda x: audit(nn.Identity(), torch.ones(2, 0, 3)), "at least one position"),
        (lambda x: audit(nn.Identity(), x, masks.document([0, 0, 1])), "3"),
        (lambda x: audit(nn.Identity(), x, torch.ones(3, 3).bool()), "one row and one column"),
        (lambda x: audit(nn.Identity(), x, budget=0), "at least 1"),
        (lambda x: audit(nn.Identity(), x, axis=5), "axis"),
        (lambda x: audit.batch(nn.Identity(), x[0]), "batch axis"),
        (lambda x: audit.documents(nn.Identity(), x), "ids"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_audited_says_what_to_pass(call, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call(torch.randn(2, 9, 8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: audit(3, x), "model"),  # type: ignore[arg-type]
        (lambda x: audit(nn.Identity(), "abc"), "inputs"),
        (lambda x: audit(nn.Identity(), x, torch.ones(9, 9)), "bool"),
        (lambda x: audit(nn.Identity(), x, *WORDS), r"allowed: .*\n.*masks.parse\('causal'\)"),
        (lambda x: audit(nn.Identity(), x, *MAKERS), r"allowed: .*\n.*add \(\): masks.causal"),
        (lambda x: audit.modes(lambda x: x, x), "module"),
        (lambda x: audit.generation(lambda x: x, x), "step="),
        (lambda x: audit.padding(nn.Identity(), x), "dict"),
    ],
)
def test_a_wrong_type_says_what_to_pass(call, message):
    with pytest.raises(TypeError, match=message):
        call(torch.randn(2, 9, 8))


def test_the_edges_of_what_can_be_audited():
    x = torch.randn(2, 9, 8)
    single = audit(lambda x: x, x[:, :1])
    assert single.ok
    assert "nothing is forbidden" in str(single)
    assert audit(lambda x: x.cumsum(1), x * 1e37).ok
    assert not audit(lambda x: x - x.mean(1, keepdim=True), x * 1e37).ok
    assert audit(lambda x: x.cumsum(1), x.half()).ok
    assert not audit(lambda x: x - x.mean(1, keepdim=True), x.half()).ok
    for dtype in (torch.float16, torch.bfloat16):
        assert audit(GPT(29).eval().to(dtype), torch.randint(29, (1, 8))).ok


def test_the_message_is_good_enough_to_mend_the_model_from():
    model, x = leaky.make("mask off by one", leaky=True)
    with pytest.raises(AssertionError) as caught:
        assert_causal(model, x)
    text = str(caught.value)
    assert "output 0 depends on input 1" in text
    assert "first in mixer" in text
    assert "off-by-one" in text
    assert_causal(*leaky.make("mask off by one", leaky=False))


def test_a_model_that_reads_both_sides_is_asked_about():
    torch.manual_seed(0)
    model, ids = BERT(29, layers=1, heads=2, width=8).eval(), torch.randint(2, 29, (2, 12))
    report = audit(model, ids)
    text = str(report)
    assert text.count("masks.everything()") == text.count("--allowed everything") == 1
    assert "off-by-one" not in text
    assert report.moved == 2 * 11
    assert f"and {22 - len(report.findings)} more, not narrowed down" in text
    text = str(audit(model, ids, masks.everything()))
    assert "covered" not in text
    assert "nothing is forbidden" in text
    for leak in ("mask off by one", "inverted mask", "one row forgot the mask"):
        assert "both sides" not in str(audit(*leaky.make(leak, leaky=True)))
    assert "both sides" in str(audit(*leaky.make("missing mask", leaky=True)))
    assert "both sides" not in str(audit(lambda x: x.flip(1), torch.randn(1, 6, 2)))


def test_a_hint_that_several_share_stands_once():
    text = str(audit(*leaky.make("mask off by one", leaky=True)))
    assert text.count("off-by-one") == 1
    assert re.search(r"outputs 0, .*: it reads the very next position", text)
    assert text.index("off-by-one") > text.rindex("depends on input")


def test_a_mask_of_each_layer_is_asked_about():
    torch.manual_seed(0)
    model, ids = GPT(29, layers=2, heads=2, width=8).eval(), torch.randint(29, (1, 9))
    window = masks.causal() & masks.window(5)
    notes = "\n".join(audit(model, ids, window).notes)
    assert "over 2 layers, each by this mask, what was found is allowed: depth=2" in notes
    assert "`allowed` forbids:" in notes
    deeper = audit(model, ids, window, depth=2)
    assert deeper.ok
    assert "`allowed` forbids to one layer:" in "\n".join(deeper.notes)
    assert "depth=" not in str(audit(lambda x: x - x.mean(1, keepdim=True), torch.randn(1, 9, 2)))


def test_ids_without_a_batch():
    class Needs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(9, 4)

        def forward(self, ids):
            return self.embedding(ids).cumsum(1) * ids.shape[1]

    with pytest.raises(ValueError, match=r"IndexError: .*(?s:.)*\(5,\)(?s:.)*ids\[None\]"):
        audit(Needs(), torch.arange(5))
    assert audit(torch.nn.Embedding(9, 4), torch.arange(5)).ok


def test_inverted_polarity_is_named():
    """A14: the query reads only what it must not read."""
    report = audit(leaky.Fused("nn polarity").eval(), torch.randn(1, 7, leaky.WIDTH))
    assert any("inverted" in finding.hint for finding in report.findings)


# --- what the weights say


class ByHand(leaky.Attention):
    """Attention whose scale, mask constant and number of softmaxes can be set."""

    def __init__(
        self, scale: float = leaky.WIDTH**-0.5, blocked: float = -torch.inf, more: int = 0
    ):
        super().__init__()
        self.scale, self.blocked, self.more = scale, blocked, more

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT * self.scale
        late = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(late, self.blocked).softmax(-1)
        for _ in range(self.more):
            weights = weights.softmax(-1)
        return weights @ v


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (ByHand(), ""),
        (ByHand(scale=8.0), r"scale is not 1/sqrt\(head_dim\): 8, and 1/sqrt\(8\) is 0.3536"),
        (ByHand(blocked=-1e4), "finite constant.*-1e.04"),
        (ByHand(more=1), "a second softmax"),
        (leaky.Attention("softmax axis"), "softmax runs over axis 1"),
        (leaky.Attention("missing"), "weight on edges that `allowed` forbids"),
        (leaky.Attention("inverted"), "polarity is inverted"),
        (leaky.Fused("nn polarity"), "polarity is inverted"),
    ],
)
def test_the_weights_say_what_is_odd(model, words):
    notes = "\n".join(audit(model.eval(), torch.randn(2, 7, leaky.WIDTH)).notes)
    assert re.search(words, notes), notes
    if not words:
        assert "weights" not in notes


# --- large models, part by part


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mistral"])
def test_a_sound_model_is_proven_part_by_part_in_few_forwards(name, monkeypatch):
    monkeypatch.setattr(suspects, "LONG", 0)
    report = audit(library_model(name, attn_implementation="sdpa"), {"input_ids": ids_for(2, 33)})
    assert report.ok, report
    assert report.covered == 1
    assert "part by part" in str(report)
    assert report.forwards < 12


@pytest.mark.filterwarnings("ignore")
def test_a_leak_is_found_part_by_part(monkeypatch):
    """A lie for the proof: one call of one layer loses its mask."""
    monkeypatch.setattr(suspects, "LONG", 0)
    model = library_model("Llama", attn_implementation="sdpa")
    model.model.layers[1].self_attn.is_causal = False
    own = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *a, **k: own(
        *a, **(k | {"attention_mask": None})
    )
    report = audit(model, {"input_ids": ids_for(2, 33)})
    assert not report.ok
    assert {finding.module for finding in report.findings} == {"model.layers.1.self_attn"}
    assert all(finding.source > finding.query for finding in report.findings)


def test_our_gpt_is_proven_part_by_part():
    report = audit(GPT(29).eval(), torch.randint(29, (1, 128)))
    assert report.ok, report
    assert report.covered == 1
    assert report.forwards < 12


class Unswitchable(nn.Module):
    """Warns instead of switching its backend, as some classes of transformers do."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="eager")
        self.embed = nn.Embedding(17, 5)

    def set_attn_implementation(self, name):
        pass

    def forward(self, ids):
        return self.embed(ids).cumsum(1)


def test_a_backend_that_is_not_taken_is_not_said_to_be_compared():
    report = audit.modes(Unswitchable().eval(), torch.arange(7)[None])
    assert report.ok
    assert any(note.startswith("compared: train, gradients") for note in report.notes)
    assert not any("sdpa" in note for note in report.notes)
