"""`clearhead audit`: the exit code, the table, the document, and what is refused."""

from __future__ import annotations

import argparse
import json
import re

import pytest
import torch

from clearhead.cli import audit
from clearhead.models import GPT
from tests import leaky


def sound():
    return leaky.make("mask off by one", leaky=False)


def bad():
    return leaky.make("mask off by one", leaky=True)


def tokens_only():
    torch.manual_seed(0)
    return GPT(17, layers=1, width=16, heads=2).eval()


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    audit.add_arguments(parser)
    return audit.run(parser.parse_args(words))


HERE = "tests.test_cli_audit"


def test_a_sound_model_exits_with_0(capsys):
    assert command(f"{HERE}:sound") == 0
    assert capsys.readouterr().out.startswith("ok: Block")
    assert command(f"{HERE}:tokens_only", "--length", "9") == 0


def test_a_leak_exits_with_1_and_a_table(capsys):
    assert command(f"{HERE}:bad") == 1
    text = capsys.readouterr().out
    assert "LEAK in Block" in text
    assert "mixer" in text
    assert "off-by-one" in text
    shown = len([line for line in text.splitlines() if line[:1].isdigit()])
    found = re.search(r"(\d+) of its outputs", text)
    assert found is not None
    count = int(found[1])
    assert (f"and {count - shown} more" in text) == (count > shown)


def test_json_is_one_document(capsys):
    assert command(f"{HERE}:bad", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    first = report["findings"][0]
    assert (first["query"], first["source"], first["module"]) == (0, 1, "mixer")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--allowed", "causal & window(2)"], 1),
        (["--allowed", "everything"], 0),
        (["--batch"], 0),
        (["--generation"], 0),
        (["--modes"], 0),
        (["--documents", "0,0,0,1,1"], 1),
        (["--budget", "2"], 3),
    ],
)
def test_the_other_questions(words, code):
    assert command(f"{HERE}:tokens_only", "--length", "7", *words) == code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere:thing"], "can be imported"),
        (["nowhere"], r"SPEC: there is no such file(.|\n)*or package\.module:factory"),
        ([f"{HERE}:tokens_only", "--documents", "a,b"], "numbers with commas"),
        ([f"{HERE}:tokens_only", "--allowed", "casual"], "casual"),
        ([f"{HERE}:tokens_only", "--length", "0"], "at least 1"),
        ([f"{HERE}:tokens_only", "--modes", "--depth", "2"], "--depth: says nothing to --modes"),
        ([f"{HERE}:tokens_only", "--batch", "--budget", "0"], "--budget: says nothing to --batch"),
        (
            [f"{HERE}:tokens_only", "--padding"],
            "--padding: needs a model that takes attention_mask",
        ),
        ([HERE], "SPEC: is a Python module"),
        (["--text", ""], "--text: needs at least one token"),
        (["--text", "é"], "--text: the character 'é'"),
        (["--text", "a" * 200], r"--text: the model reads 128 positions(.|\n)*give at most 128"),
        (["--length", "200"], "--length: the model reads 128 positions"),
    ],
)
def test_misuse_is_a_clear_error(words, message):
    with pytest.raises(ValueError, match=message):
        command(*words)


def test_a_text_for_a_factory_is_refused():
    with pytest.raises(ValueError, match="--text: needs a model with a tokenizer"):
        command(f"{HERE}:tokens_only", "--text", "hello")
