"""A record on the terminal: what is drawn, decoded from the escapes, are the weights."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import readings
from clearhead.cli import main
from clearhead.views.figures import colours
from clearhead.views.shown import shown_of
from clearhead.views.text import record
from tests.view.records import SIZE
from tests.view.records import of_a_call as watched
from tests.view.test_shown import HOSTILE


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True

    def draw(self, shown: Any, **where: Any) -> str:
        with contextlib.redirect_stdout(self):
            record.render_record(shown, **where)
        return self.getvalue()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Screen()


def pixels(line: str) -> list[tuple[Any, Any]]:
    """The colours of the upper and of the lower half of each cell, None where blocked."""
    found: list[tuple[Any, Any]] = []
    for codes, text in re.findall(r"(?:\x1b\[([\d;]*)m)?([^\x1b]+)(?:\x1b\[0m)?", line):
        front = re.search(r"38;2;(\d+;\d+;\d+)", codes)
        back = re.search(r"48;2;(\d+;\d+;\d+)", codes)
        for sign in text:
            pair = {"▀": (front, back), "▄": (None, front), " ": (None, None)}[sign]
            high, low = (None if x is None else x[1] for x in pair)
            found.append((high, low))
    return found


def test_half_blocks_have_the_colours_of_the_weights(screen: Screen) -> None:
    seen = watched(readings.Weights())
    drawn = screen.draw(shown_of(seen, [list("abcdefghijk")] * 2), head=1, sample=1)
    weights = seen[0].value[1, 1].numpy()
    lines = drawn.split("\n")
    start = next(n for n, line in enumerate(lines) if "▀" in line)
    palette = [";".join(str(round(255 * x)) for x in colour) for colour in colours(dark=True)]
    steps = np.sqrt(weights / weights.max()) * 255
    for row in range(0, SIZE, 2):
        line = lines[start + row // 2]
        assert f"{row} {'abcdefghijk'[row]}" in line
        cells = pixels(line.partition("\x1b[0m")[2])
        cells += [(None, None)] * (SIZE - len(cells))
        for column in range(SIZE):
            for half in (0, 1):
                at = row + half
                blocked = column > at or at >= SIZE
                expected = None if blocked else palette[round(float(steps[at, column]))]
                assert cells[column][half] == expected


def test_a_pipe_gets_signs_and_every_head(capsys: pytest.CaptureFixture[str]) -> None:
    seen = watched(readings.Weights())
    record.render_record(shown_of(seen), head=2, at=-2)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    lines = text.split("\n")
    start = next(n for n, line in enumerate(lines) if line.startswith("0 "))
    weights = seen[0].value[0, 2]
    for row in range(SIZE):
        signs = [next((s for least, s in record.SHADES if w >= least), " ") for w in weights[row]]
        expected = "".join(s if c <= row else "·" for c, s in enumerate(signs))
        assert lines[start + row].partition(" ")[2].strip() == expected.strip()
    best, source = weights[-2].max(0)
    assert "Where query 9 looks" in text
    assert re.search(rf"{int(source)} +{best:.3f}", text)
    entropy = torch.special.entr(seen[0].value[0]).sum(-1).mean(-1)
    for head in range(3):
        assert re.search(rf"^ *0\.{head} +{entropy[head]:.2f}", text, re.MULTILINE)


def test_no_escape_of_a_token_reaches_the_terminal(screen: Screen) -> None:
    tokens = [*HOSTILE, "\x1b[2J\x1b]0;owned\x07", "\x9b31m", "\u202eevil"]
    shown = ch.record_from(np.eye(len(tokens)), tokens).changed(title="\x1b[2J title")
    text = re.sub(r"\x1b\[[\d;]*m", "", screen.draw(shown, at=-3))
    assert "␛[2J" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text)


@pytest.mark.parametrize(
    "weights",
    [np.ones((1, 1)), np.full((1, 9), 1 / 9), np.full((9, 1), 1.0), np.zeros((3, 3)),
     np.full((3, 3), np.nan), np.full((100, 1, 2, 2), 0.5), np.full((300, 300), 1 / 300)],
    ids=["one", "row", "column", "empty", "nan", "100 layers", "long"],
)  # fmt: skip
def test_any_shape_is_drawn(weights: Any, screen: Screen) -> None:
    assert "Who attends to whom" in screen.draw(ch.record_from(weights))


@pytest.mark.parametrize("read", [readings.TopK(3), readings.BlockMap(4)])
def test_what_was_not_read_is_said(read: Any, capsys: pytest.CaptureFixture[str]) -> None:
    record.render_record(shown_of(watched(read)))
    text = capsys.readouterr().out
    assert "largest weight" in text


def test_the_command_draws_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    watched(readings.Weights()).save("a.seen")
    assert main(["view", "a.seen", "--text", "--head", "1", "--at", "3"]) == 0
    assert "head 0.1" in capsys.readouterr().out
    assert not (tmp_path / "a.html").exists()
    for arguments, text in [
        (["--text", "-o", "a.html"], "--text: stands for a page"),
        (["--head", "1"], "--head: belongs to --text"),
        (["--text", "--head", "7"], "--head: is one of those that the record holds: 0, 1, 2"),
        (["--text", "--at", "99"], "--at: must be within 0..10"),
        (["--text", "--mask"], "--text: draws the weights of one record"),
    ]:
        assert main(["view", "a.seen", *arguments]) == 2
        assert text in capsys.readouterr().err
