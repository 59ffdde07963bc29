"""Faults of transformers that were traced by hand: found, classified, reproduced alone."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from clearhead.dependence.library.classify import settled
from clearhead.dependence.library.making import build
from clearhead.dependence.library.questions import Question, answers
from clearhead.dependence.library.rerun import confirm
from clearhead.dependence.library.rows import FAULT, Row
from clearhead.dependence.library.subjects import subject_named

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
LINES = 15


class Named(NamedTuple):
    """A fault: where it is asked for, what it is, and the function that causes it."""

    name: str
    question: Question
    kind: str
    function: str
    detail: str
    backend: str = "eager"


NAMED = (
    Named(
        "FalconForCausalLM",
        Question("causal", "output_attentions=True"),
        "leak",
        "FalconAttention.forward",
        "leak",
        "sdpa",
    ),
    Named(
        "ProphetNetForCausalLM",
        Question("causal"),
        "leak",
        "ProphetNetNgramSelfAttention.get_predict_relative_pos_embeddings",
        "leak",
    ),
    Named(
        "FSMTForConditionalGeneration",
        Question("causal"),
        "cache mask",
        "FSMTModel.forward",
        "leak",
    ),
    Named(
        "RecurrentGemmaForCausalLM",
        Question("padding", "left"),
        "padding content",
        "RecurrentGemmaRecurrentBlock.forward",
        "content of the left padding",
    ),
    Named(
        "DeepseekV4ForCausalLM",
        Question("padding", "left"),
        "padding content",
        "DeepseekV4CSACompressor.forward",
        "content of the left padding",
    ),
    Named("AfmoeForCausalLM", Question("documents"), "documents", "AfmoeModel.forward", "leak"),
    Named("GptOssForCausalLM", Question("documents"), "documents", "GptOssModel.forward", "leak"),
    Named(
        "MoshiForCausalLM",
        Question("generation"),
        "cache mask",
        "MoshiModel.forward",
        "token by token",
    ),
    Named(
        "CpmAntForCausalLM",
        Question("causal"),
        "leak",
        "CpmAntModel._prepare_attention_mask",
        "leak",
    ),
)


@pytest.mark.parametrize("named", NAMED, ids=lambda named: f"{named.name}-{named.question.form}")
def test_a_named_fault_is_found_classified_and_reproduced_alone(
    named: Named, tmp_path: Path
) -> None:
    subject = subject_named(named.name)
    make = functools.partial(build, subject, named.backend)
    question = Row(named.name, subject.mapping, named.backend, named.question.form)
    found = [row for row in answers(question, named.question, make()) if row.verdict == FAULT]
    row = next(row for row in found if row.detail == named.detail)
    proof = confirm(row, make)
    row = settled(row, proof)
    assert (row.verdict, row.kind, row.confirmed) == (FAULT, named.kind, True)
    assert named.function in row.place
    assert row.reason
    assert row.size > 1e-3 * row.logits
    assert 0 < len(proof.script.splitlines()) <= LINES
    assert "clearhead" not in proof.script
    ran = _ran(proof.script, tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert f"differ by {row.size:.3g}" in ran.stdout


@pytest.mark.parametrize(
    ("name", "question", "backend"),
    [
        # The neighbours of the faults above, which are sound.
        ("FalconForCausalLM", Question("causal", "output_attentions=True"), "eager"),
        ("FalconForCausalLM", Question("causal"), "sdpa"),
        ("FSMTForConditionalGeneration", Question("causal", "use_cache=False"), "eager"),
        ("DeepseekV4ForCausalLM", Question("padding", "right"), "eager"),
        ("LlamaForCausalLM", Question("documents"), "eager"),
        ("MistralForCausalLM", Question("generation"), "eager"),
    ],
)
def test_a_sound_neighbour_is_ok(name: str, question: Question, backend: str) -> None:
    subject = subject_named(name)
    row = Row(name, subject.mapping, backend, question.form)
    assert [one.verdict for one in answers(row, question, build(subject, backend))] == ["ok"]


def test_what_is_not_there_is_not_confirmed() -> None:
    # A lie: position 3 of a Llama is said to read position 20.
    make = functools.partial(build, "LlamaForCausalLM", "eager")
    row = Row(
        *("LlamaForCausalLM", "causal", "eager", "causal"),
        verdict=FAULT,
        detail="leak",
        source=20,
        query=3,
    )
    proof = confirm(row, make)
    assert not proof.confirmed
    assert not proof.script
    settled_row = settled(row, proof)
    assert (settled_row.verdict, settled_row.confirmed) == ("not tested", False)
    assert "not confirmed" in settled_row.reason


def _ran(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(script, encoding="utf-8")
    # Without the path of this checkout, so that the library cannot be imported.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, env=environment, cwd=folder
    )
