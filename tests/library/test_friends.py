"""Other libraries than transformers: their subjects, against hand-written torch."""

from __future__ import annotations

import functools
import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from clearhead.dependence import audit
from clearhead.dependence.library import LIBRARIES, audit_library, friends
from clearhead.dependence.library.classify import settled
from clearhead.dependence.library.questions import Question, answers
from clearhead.dependence.library.rerun import confirm
from clearhead.dependence.library.rows import Row

# torch says which of its paths it does not take, and that nested tensors may change.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{said}")
    for said in ("enable_nested_tensor is True", "The PyTorch API of nested tensors")
]
LONGEST = 15
TORCH = {one.name: one for one in friends.of_torch()}
PACKAGES = {
    "x_transformers": friends.of_x_transformers,
    "diffusers": friends.of_diffusers,
    "sentence_transformers": friends.of_sentence_transformers,
    "peft": friends.of_peft,
}
# One of each: formats, norms, kinds of mask, and both ways through the decoder.
SOUND = (
    "MultiheadAttention:float mask",
    "MultiheadAttention:mask and is_causal, batch_first=False",
    "TransformerEncoderLayer:bool mask, norm_first, activation=silu",
    "TransformerEncoder:mask and is_causal, enable_nested_tensor=False",
    "TransformerDecoderLayer:float mask, batch_first=False",
    "Transformer:bool mask, norm_first",
)
BIASED = "MultiheadAttention:mask and is_causal, add_bias_kv"
ENCODER = "TransformerEncoder:bool mask"


def asked(name: str, form: str, variant: str = "") -> list[Row]:
    friend = TORCH[name]
    row = Row(name, friend.mapping, "sdpa", form)
    return answers(row, Question(form, variant), friends.build(friend))


def logits(built, **changes):
    with torch.no_grad():
        return built.model(**{**built.inputs, **changes})["logits"]


@pytest.mark.parametrize("name", SOUND)
def test_changed_futures_by_hand_agree_with_the_rows(name):
    assert [row.verdict for row in asked(name, "causal")] == ["ok"]
    built = friends.build(TORCH[name])
    ids = built.inputs[built.stream]
    before = logits(built)
    for cut in (1, 7, 23):
        changed = ids.clone()
        changed[:, cut:] = (changed[:, cut:] + 1) % built.vocabulary
        moved = (logits(built, **{built.stream: changed}) - before).abs().amax((0, 2))
        unit = torch.finfo(torch.float32).eps * before.abs().max().item()
        assert moved[:cut].max() <= 64 * unit
        assert moved[cut:].min() > 0.01


def test_a_module_without_a_mask_reads_both_sides():
    """The lie: what finds nothing in a causal module finds the future in this one."""
    built = friends.build(TORCH["TransformerEncoder"])
    report = audit(built.model, built.inputs)
    assert not report.ok
    assert report.moved == 2 * 23  # every position but the last, in both samples


def test_torch_hides_the_bias_key_where_no_weights_are_requested():
    """`is_causal` with `add_bias_kv`: the formula says that each query may read the bias key."""
    rows = {row.detail: row.verdict for row in asked(BIASED, "modes")}
    assert rows == {"weights requested": "fault"}
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 1, batch_first=True, add_bias_kv=True).double().eval()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    future = torch.ones(5, 5).triu(1).bool()
    q, k, v = (x @ layer.in_proj_weight.T).chunk(3, -1)
    assert layer.bias_k is not None
    assert layer.bias_v is not None
    k, v = torch.cat([k, layer.bias_k], 1), torch.cat([v, layer.bias_v], 1)
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(nn.functional.pad(future, (0, 1)), -math.inf)
    right = scores.softmax(-1) @ v @ layer.out_proj.weight.T
    with torch.no_grad():
        both = [
            layer(x, x, x, attn_mask=future, is_causal=True, need_weights=requested)[0]
            for requested in (True, False)
        ]
    assert (both[0] - right).abs().max() < 1e-12
    assert (both[1] - right).abs().max() > 0.01


def test_torch_gives_nan_for_padding_on_the_left_of_a_causal_encoder():
    (row,) = asked(ENCODER, "padding", "left")
    assert (row.verdict, row.detail, row.size) == ("fault", "amount of left padding", math.inf)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x, future = torch.randn(1, 5, 8), torch.ones(5, 5).triu(1).bool()
    padding = torch.tensor([[True, False, False, False, False]])
    slow = model(x, mask=future, src_key_padding_mask=padding)
    with torch.no_grad():
        fast = model(x, mask=future, src_key_padding_mask=padding)
    assert slow[:, 1:].isfinite().all()
    assert fast[:, 1:].isnan().all()


@pytest.mark.parametrize(
    ("name", "form", "variant"), [(BIASED, "modes", ""), (ENCODER, "padding", "left")]
)
def test_a_fault_has_a_script_that_reproduces_it(name, form, variant):
    (row,) = asked(name, form, variant)
    make: Any = functools.partial(friends.build, TORCH[name])
    proof = confirm(row, make)
    assert proof.confirmed
    assert settled(row, proof).verdict == "fault"
    lines = proof.script.splitlines()
    assert len(lines) <= LONGEST
    assert "clearhead" not in proof.script
    names = {"__name__": "__main__"}
    with pytest.raises(SystemExit) as ended, torch.enable_grad():
        exec(compile(proof.script, "script", "exec"), names)
    assert ended.value.code == 1


def test_padding_of_nested_tensors_can_be_audited():
    """torch packs the batch into a nested tensor between the layers of this module."""
    assert [row.verdict for row in asked("TransformerEncoder", "padding", "right")] == ["ok"]


def test_every_module_of_torch_builds_twice_alike():
    assert len(TORCH) == len(friends.of_torch())
    for friend in TORCH.values():
        state, grad = torch.get_rng_state(), torch.is_grad_enabled()
        one, two = friends.build(friend), friends.build(friend)
        assert torch.equal(state, torch.get_rng_state())
        assert torch.is_grad_enabled() == grad
        assert torch.equal(logits(one), logits(two))
        assert logits(one).abs().max() > 1


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.filterwarnings("ignore")
def test_the_subjects_of_a_package_run(package):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for friend in PACKAGES[package]():
        built = friends.build(friend, "eager")
        assert logits(built).shape[:2] == (2, 24), friend.name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_mean_over_padding_is_the_mean_of_the_tokens():
    if find_spec("sentence_transformers") is None:
        pytest.skip("sentence_transformers is not installed")
    subjects = {one.name: one for one in friends.of_sentence_transformers()}
    built = friends.build(subjects["Pooling:mean"])
    ids = built.inputs["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    embedded = built.model.get_submodule("0")(ids)[:, 3:].mean(1)
    assert torch.allclose(logits(built, attention_mask=mask)[:, 0], embedded, atol=1e-6)


def test_a_library_that_is_not_installed_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("clearhead.dependence.library.sweep.find_spec", lambda name: None)
    for name in set(LIBRARIES) - {"torch"}:
        with pytest.raises(ImportError, match=f"{name} is not installed|pip install .*{name}"):
            audit_library(name, tmp_path)


def test_a_backend_that_a_library_does_not_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match="backends: of torch are sdpa"):
        audit_library("torch", tmp_path, backends=["eager"])
