"""`clearhead look` and `clearhead info`: the same data as text and as JSON, and clear refusals."""

from __future__ import annotations

import io
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


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("columns", "cell"), [("80", 2), ("40", 1)])
def test_longer_texts_get_a_map_in_shades(
    columns: str, cell: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = "a bell and a shell, well held"
    lines = printed(capsys, "look", text).split("\n")
    top = next(i for i, line in enumerate(lines) if line.split() and line.split()[0] == "0") - 1
    while not lines[top].startswith("     a"):
        top = next(i for i, line in enumerate(lines[top + 2 :], top + 2) if line[:5] == " 0 a ") - 1
    weights = whole(text)[1][-1].mean(0)
    for i, line in enumerate(lines[top + 1 : top + 1 + len(text)]):
        cells = line[5:].ljust(cell * len(text))[::cell]
        for j, sign in enumerate(cells):
            weight = weights[i, j].item()
            if j > i:
                assert sign == "·"
            elif min(abs(weight - edge) for edge in (0.5, 0.25, 0.1, 0.02)) > 1e-4:
                steps = [
                    e for e, s in zip((0.5, 0.25, 0.1, 0.02), "█▓▒░", strict=True) if s == sign
                ]
                least = steps[0] if steps else 0.0
                above = {0.5: 2.0, 0.25: 0.5, 0.1: 0.25, 0.02: 0.1, 0.0: 0.02}[least]
                assert least <= weight < above


def test_a_map_that_is_left_out_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert document(capsys, "look", "a bell " * 10)["map"] is None
    assert "left out, 70 tokens where up to 64 are shown" in printed(capsys, "look", "a bell " * 10)
    monkeypatch.setenv("COLUMNS", "20")
    shown = " ".join(printed(capsys, "look", "hello " * 4 + "he ").split())
    assert "left out, 27 tokens need a wider terminal" in shown


def test_a_long_text_is_read_by_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    text = "the bell rang and the well held. " * 5
    seen = document(capsys, "look", text)
    assert "".join(t["label"] for t in seen["tokens"]) == text[-128:].replace(" ", "␣")
    logits, _ = whole(text[-128:])
    best = seen["predictions"][0]["probability"]
    assert math.isclose(best, logits[-1].softmax(-1).max().item(), rel_tol=1e-5)
    assert seen["notes"][0].startswith("the text has 165 tokens and the model reads 128")


def test_the_verdict_says_over_how_many_sources(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(printed(capsys, "look", "a yellow bell in the").split())
    assert "over 16 of the 20 tokens (5 shown)." in text
    assert "mean weight, source all layers probability change" in text
    # Of four sources no rank is worth a word.
    assert "rank correlation" not in printed(capsys, "look", "hell")


def test_the_text_comes_from_a_file_or_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("hell\n")
    assert document(capsys, "look", "--file", str(tmp_path / "text.txt"))["text"] == "hell"
    monkeypatch.setattr("sys.stdin", io.StringIO("bell\n"))
    assert document(capsys, "look", "-")["text"] == "bell"
    monkeypatch.chdir(tmp_path)
    assert main(["look", "text.txt"]) == 0
    assert "--file text.txt reads the file" in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_not_utf_8_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    """Which of the two Python takes hangs on the locale."""
    stream = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", stream)
    said = refusal(capsys, "look", "-")
    assert "TEXT: standard input is not UTF-8; got byte 0xe9" in said
    assert "to do: convert it to UTF-8" in said


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
        (["look"], "TEXT: is needed"),
        (["look", "hell", "--file", "x"], "TEXT: and --file are two texts"),
        (["look", "--file", "/none"], "--file: does not exist"),
        (["look", "h\u00e9"], "TEXT: the character 'é' at position 1 is not in the vocabulary"),
        # What would steer the terminal stays an escape.
        (["look", "h\x1b[31m"], r"the character '\x1b' at position 1"),
        (["look", "hell", "--model", "/no/such/model"], "no such file or directory"),
        (["look", "hell", "--model", "a/b/c"], "no such file or directory"),
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
    refused = refusal(capsys, "look", "hell", "--model", str(tmp_path), "--head", "0")
    assert "--head: chooses attention, and an RNN has none" in refused
    seen = document(capsys, "look", "hello", "--at", "2", "--model", str(tmp_path))
    # The derivative of the logits at position 2 by each embedded token, worked out on its own.
    model = models.load(tmp_path)
    assert isinstance(model, models.RNN)
    embedded = model.embedding(words.encode("hello"))

    def logits(x: torch.Tensor) -> torch.Tensor:
        return model.head(model.recurrent(x[None])[0])[0, 2]

    jacobian = torch.autograd.functional.jacobian(logits, embedded)
    assert isinstance(jacobian, torch.Tensor)
    strength = jacobian.square().sum((0, 2)).sqrt()
    found = {entry["position"]: entry["influence"] for entry in seen["influence"]}
    assert found == pytest.approx({i: strength[i].item() for i in range(3)}, rel=1e-4)
    shown = printed(capsys, "look", "hello", "--at", "2", "--model", str(tmp_path))
    assert "An RNN has no attention" in shown
    best = max(range(3), key=lambda i: strength[i].item())
    assert f" {best}  {'hello'[best]}  {strength[best]:.3f}  {'█' * 40}\n" in shown


def test_a_scan_refuses_an_rnn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = models.Characters.of("hello")
    models.save(models.RNN(words, layers=1, width=8, length=16), tmp_path)
    page = tmp_path / "page.txt"
    page.write_text("hello\n")
    out = str(tmp_path / "table")
    refused = refusal(capsys, "scan", str(page), "--model", str(tmp_path), "--out", out)
    assert "an RNN has no attention, so there is nothing to measure" in refused


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that cannot be reached, and what was asked of it."""
    import huggingface_hub

    asked: list[str] = []

    class ConnectError(Exception):
        pass

    def model_info(self: Any, name: str, **options: Any) -> None:
        asked.append(name)
        raise ConnectError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    return asked


def test_a_name_is_looked_for_where_it_can_be(
    no_hub: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    models.save(models.load(), tmp_path / "hell-gpt")
    for wrong in ("hel-gpt", "hel-gpt/", "Hell-GPT2", f"{tmp_path}/hellgpt"):
        shown = refusal(capsys, "look", "hell", "--model", wrong)
        assert "no such file or directory" in shown
        assert "did you mean" in shown
        assert "hell-gpt" in shown.rpartition("did you mean")[2]
    assert "OWNER/NAME" in refusal(capsys, "look", "hell", "--model", "zzz")
    assert "choose one inside of it" in refusal(capsys, "look", "hell", "--model", str(tmp_path))
    assert "--model: there is" in refusal(capsys, "generate", "hell", "--model", "hel-gpt")
    assert "SPEC: there is" in refusal(capsys, "audit", "hel-gpt")
    assert not no_hub
    assert "the hub cannot be reached" in refusal(capsys, "look", "hell", "--model", "owner/model")
    assert no_hub == ["owner/model"]


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    facts = document(capsys, "info")
    assert facts["torch"] == torch.__version__
    assert facts["implementations"]["reference"] == "ready"
    assert main(["info"]) == 0
    assert "reference" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["look", "mask", "train", "generate", "scan", "heads", "audit"])
def test_examples_fit_a_terminal(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out.partition("options:")[2].splitlines()
    assert not [line for line in shown if len(line) > 80]
    assert "examples:" in shown


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    from clearhead.cli import COMMANDS

    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert not [name for name in COMMANDS if name not in shown]
    assert "start with:  clearhead look hell\n" in shown
    assert "exit codes:  0 ok, 1 a finding, 2 misuse, 130 stopped\n" in shown


# --- without heads ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["--without", "3.1,0.2"], ["--without", "3.1", "--without", "0.2"]]
)
def test_the_difference_without_heads(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    seen = document(capsys, "look", "hello shell", "--top", "3", *words)
    assert seen["without"]["heads"] == [[3, 1], [0, 2]]
    # Heads are ablated by hand: their part of what `join` reads is 0.
    model: Any = models.load()
    tokens, hooks = model.vocabulary.encode("hello shell")[None], []
    for layer, head in ((3, 1), (0, 2)):

        def cut(module: Any, inputs: tuple[torch.Tensor], head: int = head) -> Any:
            context = inputs[0].unflatten(-1, (4, -1)).clone()
            context[..., head, :] = 0
            return (context.flatten(-2),)

        hooks.append(model.blocks[layer].attention.join.register_forward_pre_hook(cut))
    with torch.no_grad():
        after = model(tokens)[0, -1].softmax(-1)
        for hook in hooks:
            hook.remove()
        before = model(tokens)[0, -1].softmax(-1)
    rows = seen["without"]["predictions"]
    best = {*before.topk(3).indices.tolist(), *after.topk(3).indices.tolist()}
    assert {row["id"] for row in rows} == best
    for row in rows:
        assert row["probability"] == pytest.approx(before[row["id"]].item(), rel=1e-4)
        assert row["without"] == pytest.approx(after[row["id"]].item(), rel=1e-4)
        assert row["change"] == pytest.approx(row["without"] - row["probability"], abs=1e-6)
    assert seen["predictions"][0]["probability"] == pytest.approx(before.max().item(), rel=1e-4)
    shown = printed(capsys, "look", "hello shell", "--top", "3", *words)
    assert "without heads 3.1, 0.2?\n prediction   probability   without   change\n" in shown
    first = rows[0]
    line = f"{first['probability']:.3f} {first['without']:.3f} {first['change']:+.3f}"
    assert f" {first['label']} {line}" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("without", "part"),
    [
        ("3", "--without: names a head; got '3'"), ("a.b", "names a head"),
        ("1.2.3", "names a head"), ("-1.0", "names a head"), ("", "names a head"),
        ("4.0", "--without: must be within 0..3; got 4"),
        ("0.4", "--without: must be within 0..3; got 4"),
    ],
)  # fmt: skip
def test_heads_that_are_none(without: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in refusal(capsys, "look", "hell", f"--without={without}")


def test_an_rnn_has_no_heads_to_do_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.save(models.RNN(models.Characters.of("hello"), layers=1, width=8), tmp_path)
    refused = refusal(capsys, "look", "hell", "--model", str(tmp_path), "--without", "0.0")
    assert "--without: chooses attention, and an RNN has none" in refused
