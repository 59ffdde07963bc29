"""Every class of transformers, tiny: it builds, runs, and builds again from what was written."""

from __future__ import annotations

import collections
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.dependence.library.making import Built, NotBuilt, build, recipe
from clearhead.dependence.library.subjects import Subject, catalogue

transformers = pytest.importorskip("transformers")

# Of every kind: windows, experts, compressors, recurrences, cross-attention, audio, variants.
SAMPLE = [
    "AfmoeForCausalLM",
    "DeepseekV4ForCausalLM",
    "FalconForCausalLM",
    "FalconForCausalLM:alibi",
    "GptOssForCausalLM",
    "MoshiForCausalLM",
    "RecurrentGemmaForCausalLM",
    "BertForMaskedLM",
    "FSMTForConditionalGeneration",
    "ProphetNetForConditionalGeneration",
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def logits(built: Built, **changed: Tensor) -> Tensor:
    with torch.no_grad():
        output = built.model(**{**built.inputs, **changed})
    return output.logits if "logits" in output else output[0]


def weights(built: Built) -> Iterator[Tensor]:
    yield from built.model.state_dict().values()


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.filterwarnings("ignore")
def test_logits_are_finite_and_depend_on_the_inputs(name: str) -> None:
    built = build(name)
    tokens = built.inputs[built.stream]
    assert tokens.shape == (2, 24)
    assert not built.model.training
    assert int(tokens.max()) < built.vocabulary <= 96
    was = logits(built)
    assert torch.isfinite(was).all()
    assert 0.05 < was.std() < 50
    moved = logits(built, **{built.stream: (tokens + 1) % built.vocabulary})
    assert (moved - was).abs().amax() > 1e-3
    assert sum(p.numel() for p in built.model.parameters()) < 400_000


@pytest.mark.parametrize("name", ["DeepseekV4ForCausalLM", "RwkvForCausalLM", "BartForCausalLM"])
@pytest.mark.filterwarnings("ignore")
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    state = torch.get_rng_state()
    one, two, other = build(name), build(name), build(name, seed=1)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers moved"
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(two), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))
    assert torch.equal(one.inputs["input_ids"], two.inputs["input_ids"])


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.filterwarnings("ignore")
def test_the_recipe_builds_the_same_model_without_clearhead(name: str) -> None:
    built = build(name)
    lines = recipe(built)
    assert len(lines) <= 4
    assert "clearhead" not in "".join(lines)
    names: dict[str, Any] = {"torch": torch, "transformers": transformers}
    with torch.random.fork_rng(devices=[]):
        exec("\n".join(lines), names)
    again = names["model"].state_dict()
    assert all(torch.equal(value, again[key]) for key, value in built.model.state_dict().items())


@pytest.mark.filterwarnings("ignore")
def test_dtype_and_backend_are_those_asked_for() -> None:
    built = build("FalconForCausalLM", "sdpa", dtype=torch.float64)
    assert logits(built).dtype == torch.float64
    assert built.model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


def test_a_class_of_no_mapping_is_refused() -> None:
    with pytest.raises(ValueError, match="classes: must be in transformers' causal, masked"):
        build("NoSuchForCausalLM")


def test_the_reason_of_what_is_not_built() -> None:
    with pytest.raises(NotBuilt, match=r"transformers .* has no NoSuchForCausalLM"):
        build(Subject("NoSuchForCausalLM", "causal", "no_such"))


def test_the_catalogue_lists_every_class_once() -> None:
    from transformers.models.auto import modeling_auto

    subjects = catalogue()
    assert subjects == catalogue()
    assert len(set(subjects)) == len(subjects)
    names = {s.name for s in subjects if s.mapping == "causal" and ":" not in s.name}
    assert names == set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert Subject("LlamaForCausalLM", "causal", "llama") in subjects


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_how_many_classes_are_built_and_run() -> None:
    ran: dict[str, set[str]] = collections.defaultdict(set)
    for subject in catalogue():
        with contextlib.suppress(NotBuilt):
            built = build(subject)
            assert torch.isfinite(logits(built)).all(), subject.name
            ran[subject.mapping].add(subject.class_name)
    counts = {mapping: len(names) for mapping, names in ran.items()}
    assert counts["causal"] >= 180
    assert counts["masked"] >= 40
    assert counts["encoder-decoder"] >= 24
