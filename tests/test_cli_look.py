"""`clearhead look` and `clearhead info`: the same data as text and as JSON, and clear refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead import models
from clearhead.cli import main


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def whole(text: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and weights as the model itself gives them, without any watching."""
    from clearhead.readings import Weights

    model: Any = models.load()
    with torch.no_grad():
        logits, weights = model(model.vocabulary.encode(text)[None], read=Weights())
    return logits[0], [layer[0] for layer in weights]


def test_hell_wants_an_o(capsys: pytest.CaptureFixture[str]) -> None:
    seen = document(capsys, "look", "hell")
    logits, _ = whole("hell")
    assert seen["predictions"][0]["label"] == "o"
    assert math.isclose(
        seen["predictions"][0]["probability"], logits[-1].softmax(-1).max().item(), rel_tol=1e-5
    )
    assert [token["label"] for token in seen["tokens"]] == list("hell")


def test_every_number_is_the_models_own(capsys: pytest.CaptureFixture[str]) -> None:
    seen = document(capsys, "look", "hello shell", "--at", "-3", "--layer", "1", "--head", "2")
    _, weights = whole("hello shell")
    at = len("hello shell") - 3
    assert (seen["at"], seen["layer"], seen["head"]) == (at, 1, 2)
    row = weights[1][2, at]
    best = row.topk(5)
    for entry, position, weight in zip(
        seen["sources"], best.indices.tolist(), best.values.tolist(), strict=True
    ):
        assert entry["position"] == position
        assert math.isclose(entry["weight"], weight, abs_tol=1e-6)
    torch.testing.assert_close(torch.tensor(seen["map"]["weights"]), weights[1][2])
    for entry in seen["heads"]:
        row = weights[entry["layer"]][entry["head"], at]
        assert entry["strongest"]["position"] == row.argmax().item()
        entropy = -torch.special.xlogy(row, row).sum().item()
        assert math.isclose(entry["entropy"], entropy, abs_tol=1e-5)
        for name, position in (("self", at), ("previous", at - 1), ("first", 0)):
            assert math.isclose(entry[name], row[position].item(), abs_tol=1e-6)


def test_the_map_shows_what_is_blocked(capsys: pytest.CaptureFixture[str]) -> None:
    seen = document(capsys, "look", "bell")
    assert seen["map"]["allowed"] == [[j <= i for j in range(4)] for i in range(4)]


def test_the_text_tells_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", "hell"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for part in (
        "What comes after",
        "looks (layer 3, mean over 4 heads)",
        "Every head",
        "guarantee",
    ):
        assert part in out


def test_long_texts_get_no_map(capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, "look", "a bell and a shell, well held")["map"] is None


def test_bert_guesses_what_is_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = models.Characters.of("hello shell", models.BERT.special)
    models.save(models.BERT(words, layers=1, heads=2, width=16, length=16), tmp_path)
    seen = document(capsys, "look", "hell", "--model", str(tmp_path))
    assert seen["kind"] == "masked"
    assert seen["masked"]
    assert [token["label"] for token in seen["tokens"]] == ["h", "e", "l", "[MASK]"]
    marked = document(capsys, "look", "h[MASK]ll", "--model", str(tmp_path))
    assert marked["at"] == 1
    assert all(all(row) for row in marked["map"]["allowed"])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["look", ""], "at least one token"),
        (["look", "hell", "--at", "4"], r"must be within 0..3"),
        (["look", "hell", "--at", "-5"], r"must be within 0..3"),
        (["look", "hell", "--layer", "9"], "--layer"),
        (["look", "hell", "--head", "9"], "--head"),
        (["look", "hell", "--top", "0"], "--top"),
        (["look", "h\u00e9"], "not in the vocabulary"),
        (["look", "a" * 1000], "the model reads 128 positions"),
        (["look", "hell", "--model", "/no/such/model"], "no such file or directory"),
    ],
)
def test_refusals(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in refusal(capsys, *words)


def test_no_model_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model" in refusal(capsys, "look", "hell", "--model", str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    assert "must be GGUF" in refusal(capsys, "look", "a", "--model", str(tmp_path / "x.gguf"))


def test_a_model_without_attention_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = models.Characters.of("hello")
    models.save(models.RNN(words, layers=1, width=8, length=16), tmp_path)
    assert "GRU" in refusal(capsys, "look", "hell", "--model", str(tmp_path))


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    facts = document(capsys, "info")
    assert facts["torch"] == torch.__version__
    assert facts["implementations"]["reference"] == "ready"
    assert main(["info"]) == 0
    assert "reference" in capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    from clearhead.cli import COMMANDS

    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert not [name for name in COMMANDS if name not in shown]
