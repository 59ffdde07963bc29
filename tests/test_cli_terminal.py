"""The command on terminals of every kind: encodings, widths, closed pipes, helps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead import cli, models
from clearhead.views import encoding as signs  # noqa: F401 - it knows the signs
from clearhead.views.terminal import Terminal

EVERY = """
import sys
import torch, clearhead as ch
from clearhead.cli import COMMANDS, main
layer, x = torch.nn.MultiheadAttention(4, 1, batch_first=True), torch.zeros(1, 3, 4)
with ch.watch(layer) as seen:
    layer(x, x, x)
seen.save("look.seen")
words = {
    "look": ["look", "a yellow bell, well h"],
    "mask": ["mask", "causal", "-q", "40"],
    "train": ["train", "tale.txt", "--steps", "1", "--length", "8", "--width", "8", "--heads", "2",
              "--layers", "1", "--force"],
    "generate": ["generate", "G", "--model", "tale-gpt", "--tokens", "20"],
    "scan": ["scan", "page.txt", "--out", "page.heads", "--force"],
    "heads": ["heads", "page.heads"],
    "audit": ["audit", "tale-gpt", "--length", "5"],
    "view": ["view", "look.seen"],
    "info": ["info"],
}
assert list(words) == list(COMMANDS)
codes = [main(each) for each in words.values()]
codes.append(main(["look", "hell", "--model", "rnn"]))
assert codes == [0] * len(codes), codes
assert sys.stdout.errors == "strict", "the stream is left as it was"
"""


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_every_command_prints_in_every_encoding(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "tale.txt").write_text("Grüße, Ж, naïve “quotes” – 你好 ok\n" * 8, "utf-8")
    (tmp_path / "page.txt").write_text("the bell and the well and the shell\n" * 3)
    words = models.Characters.of("hello")
    models.save(models.RNN(words, layers=1, width=8, length=16), tmp_path / "rnn")
    env = os.environ | {
        "PYTHONIOENCODING": f"{encoding}:strict",
        "PYTHONUTF8": "0",
        "COLUMNS": "80",
    }
    done = subprocess.run(
        [sys.executable, "-c", EVERY], cwd=tmp_path, env=env, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode(encoding)
    assert ("█" in text) == (encoding == "utf-8")
    assert ("####" in text) == (encoding != "utf-8")
    assert "\ufffd" not in text


def test_a_sign_in_ascii_is_as_wide() -> None:
    assert "█▏ 0.9 ≥ ␣".encode("ascii", "clearhead") == b"#- 0.9 >= _"
    assert "\u2068é\u2069".encode("ascii", "clearhead") == b"\\xe9"


@pytest.mark.parametrize("columns", ["30", "60", "100"])
def test_no_width_cuts_anything_off(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["look", "hello"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    lines = text.split("\n")
    assert not [line for line in lines if line.endswith(" ")]
    # Words are wrapped; only tables may be wider than the terminal, by what they need.
    assert "layer  head  strongest   entropy  self  previous  first" in lines
    assert max(len(line) for line in lines if ". " in line) <= int(columns)


def test_a_closed_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "clearhead", "look", "hell"],
        stdout=writer, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "look" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--version"], 0, "clearhead 0."),
        (["look", "hello", "world"], 2, 'put several words in quotes, as in clearhead look "'),
        (["look", "hello", "--wat"], 2, "unrecognized arguments: --wat\n"),
    ],
)
def test_what_is_said_before_any_work(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == code
    shown = capsys.readouterr()
    assert said in shown.out + shown.err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_help_of_each_command_has_examples_that_parse(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import shlex

    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    lines = capsys.readouterr().out.partition("\nexamples:\n")[2].splitlines()
    assert lines
    for line in lines:
        for part in line.split(" && "):
            words = shlex.split(part)
            if words[0] == "torchrun":  # torchrun [options] -m clearhead ...
                words = words[words.index("-m") + 1 :]
            assert words[0] == "clearhead"
            assert cli._parser().parse_args(words[1:]).command in cli.COMMANDS


def test_a_table_keeps_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.table import Table

    monkeypatch.setenv("COLUMNS", "8")
    table = Table(box=None)
    table.add_column("wide", no_wrap=True)
    table.add_row("0123456789")
    Terminal().print(table)
    assert "0123456789" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "closed", "code", "said"),
    [
        ("mask causal -q 4", ">&-", 0, ""),
        ("mask causal -q x", ">&-", 2, "-q"),
        ("generate -", "<&-", 2, "standard input is closed"),
    ],
)
def test_closed_streams(words: str, closed: str, code: int, said: str) -> None:
    """A daemon may start us without standard input or output."""
    line = f"{sys.executable} -m clearhead {words} {closed}"
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
