"""`clearhead mask`: expressions, what they print, and how they fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from clearhead import masks
from clearhead.cli import main


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def test_draws_a_composed_mask(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mask", "causal & window(3) | first(1)", "-q", "6"]) == 0
    assert capsys.readouterr().out == (
        'causal(align="end") & window(3, align="end") | first(1)   6 queries x 6 sources\n\n'
        "  0 1 2 3 4 5\n"
        "0 ■ · · · · ·\n"
        "1 ■ ■ · · · ·\n"
        "2 ■ ■ ■ · · ·\n"
        "3 ■ ■ ■ ■ · ·\n"
        "4 ■ · ■ ■ ■ ·\n"
        "5 ■ · · ■ ■ ■\n\n"
        "18 of 36 edges (50.0%)\n"
    )


def test_row_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mask", "causal", "-q", "3", "-s", "5", "--row", "1", "--why", "0", "3"]) == 0
    assert capsys.readouterr().out.split("\n")[1:-1] == [
        "query 1 may read 4 sources: 0-3",
        "query 0 may not read source 3",
        "- blocked by causal(): source 3 lies 1 after query 0 (at position 2)",
    ]
    assert main(["mask", "window(2) - diagonal(0)", "-q", "4", "--row", "0"]) == 0
    assert "query 0 may read no source" in capsys.readouterr().out


def test_json_is_one_document_with_the_same_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mask", "causal & lengths([4, 2])", "-q", "4", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert masks.parse(seen["expression"]).count(4) == 17
    assert [each["edges"] for each in seen["maps"]] == [10, 7]
    assert seen["maps"][1]["shares"] == [[1, 0, 0, 0]] + [[1, 1, 0, 0]] * 3
    given = ["--row", "-1", "--why", "1", "0", "--sample", "1"]
    assert main(["mask", "causal & lengths([4, 2])", "-q", "4", *given, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["row"]["sources"] == [0, 1]
    assert seen["why"]["allowed"] is True


def test_sizes_come_from_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mask", "document([0, 0, 1])"]) == 0
    assert "3 queries x 3 sources" in capsys.readouterr().out
    assert main(["mask", "lengths([12])"]) == 0
    assert "12 queries x 12 sources" in capsys.readouterr().out


def test_long_sequences_are_drawn_in_shades(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mask", "causal & window(300)", "-q", "20000"]) == 0
    out = capsys.readouterr().out
    assert "░ under 1/3" in out
    assert f"{300 * 301 // 2 + 300 * 19700:,} of 400,000,000 edges" in out
    assert max(map(len, out.split("\n"))) <= 80


@pytest.mark.parametrize("columns", ["20", "40", "200"])
def test_pictures_fit_the_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["mask", "causal", "-q", "100"]) == 0
    rows = [line for line in capsys.readouterr().out.split("\n") if line.endswith(("▒", "▓", "■"))]
    assert rows
    assert max(map(len, rows)) <= int(columns)


def test_a_terminal_without_utf8_gets_ascii() -> None:
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "clearhead", "mask", "causal", "-q", "3"]
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    assert b"\n1 # # .\n" in done.stdout


@pytest.mark.parametrize(
    ("expression", "said", "under"),
    [
        ("causal & windw(3)", "did you mean window?", "windw"),
        ("causal & window(0)", "at least 1", "window(0)"),
        ("causal & window", "takes arguments", "window"),
        ("window(3, alig=2)", "takes no alig", "alig=2"),
        ("window(1, 2, 3)", "too many positional", "window(1, 2, 3)"),
        ("first()", "missing a required argument", "first()"),
        ("causal and first(1)", "and/or is not a mask", "causal and first(1)"),
        ("causal + first(1)", "is not a mask", "causal + first(1)"),
        ("not causal", "not is not a mask", "not causal"),
        ("-causal", "- is not a mask", "-causal"),
        ("causal & 3", "a number is not a mask", "3"),
        ("causal & [1]", "a list is not a mask", "[1]"),
        ("first(1.5)", "1.5 is not a value", "1.5"),
        ("first(x)", "'x' is not a value", "x"),
        ("first(causal)", "'causal' is not a value", "causal"),
        ("causal(align='middle')", "'middle' is not a value", "'middle'"),
        ("keep([1, 2])", "", "keep([1, 2])"),
        ("document([[0], [0, 1]])", "equal lengths", "document([[0], [0, 1]])"),
        ("where(lambda b, h, q, k: True)", "'where' is not a mask", "where"),
        ("é | causal", "'é' is not a mask", "é"),
        ("causal | é", "'é' is not a mask", "é"),
        ("__import__('os').system('true')", "only masks can be called", "__import__('os').system"),
        ("causal.__class__", "this is not a mask", "causal.__class__"),
        ("(lambda: causal)()", "only masks can be called", "lambda: causal"),
        ("first(10**9)", "this is not a value", "10**9"),
        ("first(99999999999999999999)", "numbers go up to", "99999999999999999999"),
        ("first(*[1])", "is not a value", "*[1]"),
        ("first(**{})", "takes no **", "**{}"),
    ],
)
def test_typos_are_pointed_at(expression: str, said: str, under: str) -> None:
    with pytest.raises(ValueError, match="expression: ") as caught:
        masks.parse(expression)
    problem, shown, carets = str(caught.value).split("\n")[:3]
    assert said in problem
    assert shown == f"  {expression}"
    at = carets.index("^")
    assert shown[at : at + len(under)] == under
    assert carets.count("^") == len(under)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "   ",
        "causal &",
        "(causal",
        "causal)",
        "causal causal",
        "causal\0",
        "causal;causal",
        "a = causal",
        "~" * 5000 + "causal",
        "(" * 3000 + "causal" + ")" * 3000,
        "causal|" * 1400 + "causl",
        "[" * 200 + "]" * 200,
        "keep(" + "[" * 150 + "]" * 150 + ")",
        "9" * 9999,
        "x" * 9999,
        "x" * 100_000,
        "first(" + "1_" * 3000 + "1)",
        "causal\n\n&&",
        "\ud800",
        "'" * 3,
        "first(1e999)",
        "first(1)[0]",
        "yield causal",
        "await causal",
        "causal if causal else causal",
        "causal := 3",
    ],
)
def test_hostile_expressions_end_in_a_short_clear_error(expression: str) -> None:
    with pytest.raises(ValueError, match="expression: ") as caught:
        masks.parse(expression)
    assert len(str(caught.value)) < 700


def test_a_mask_of_very_many_parts_is_a_mask() -> None:
    assert masks.parse("causal|" * 1400 + "causal").row(1, 4) == [0, 1]


def test_line_breaks_are_spaces() -> None:
    assert repr(masks.parse("\n causal\n  & first(1) ")) == 'causal(align="end") & first(1)'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["causl"], "did you mean causal"),
        (["causal", "-q", "-1"], "--query: is a number of positions"),
        (["causal", "-q", "1000000000000"], "got 1,000,000,000,000"),
        (["causal", "-q", "4", "--row", "4"], "--row: lies in 0..3"),
        (["causal", "-q", "4", "--why", "1", "9"], "--why J: lies in 0..3"),
        (["lengths([1, 2])", "--row", "0"], "--sample: must be given"),
        (["document([0, 1])", "-q", "9"], "at most as many"),
        (["document([0, 1])", "-q", "1", "-s", "3"], "made for 2 sources, the call has 3"),
        ([f"induction({[1] * 9})", "-q", "3", "-s", "9", "--sample", "4"], None),
    ],
)
def test_misuse_is_exit_code_2(
    arguments: list[str], said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["mask", *arguments])
    errors = capsys.readouterr().err
    if said is None:
        assert code == 0
        return
    assert code == 2
    assert said in errors
    assert errors.startswith("clearhead mask: ")


def test_no_positions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mask", "causal", "-q", "0"]) == 0
    assert "no edges: 0 queries, 0 sources" in capsys.readouterr().out
