"""Every block of the README and the docs runs, and prints what stands below it.

A `python` block shares one namespace with the blocks above it in its file. A `text` block right
below one is what it prints. A `console` block holds commands (`$ ...`), each with its output.
"""

from __future__ import annotations

import codeop
import contextlib
import doctest
import importlib
import io
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import clearhead

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# The blocks of the recipes run in a copy of the source that they have changed: test_extending.
RUN_HERE = [page for page in PAGES if page.name != "extending.md"]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# Commands that set a machine up or train at length are what `make` runs, not what a test runs.
NOT_RUN = ("git", "make", "pip", "python", "cd")


def blocks(page: Path) -> list[tuple[str, str, int]]:
    text = page.read_text(encoding="utf-8")
    return [(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in FENCE.finditer(text)]


# What Lightning says of itself and of the size of an example.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:The number of training")
@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_python_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    found = blocks(page)
    for index, (language, code, line) in enumerate(found):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
        if index + 1 < len(found) and found[index + 1][0] == "text":
            assert_alike(printed.getvalue(), found[index + 1][1])


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_python_blocks_can_be_pasted_into_a_prompt(page: Path) -> None:
    for language, block, line in blocks(page):
        if language == "python":
            assert pastes(block), (page.name, line)


def pastes(block: str) -> bool:
    """Whether a prompt takes it: a `with`, `for` or `def` ends at its first empty line, only."""
    lines: list[str] = []
    for text in [*block.splitlines(), ""]:
        lines.append(text)
        try:
            whole = codeop.compile_command("\n".join(lines)) is not None
        except SyntaxError:
            return False
        lines = [] if whole else lines
    return not lines


def test_a_block_that_cannot_be_pasted_is_found() -> None:
    assert pastes("for x in y:\n    a(x)\n\nb()\n")
    assert not pastes("for x in y:\n    a(x)\nb()\n")
    assert not pastes("class A:\n    x = 1\n\n    y = 2\n")


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_console_blocks(page: Path, tmp_path: Path) -> None:
    for language, block, _ in blocks(page):
        if language == "console":
            for command, output in commands(block):
                words = shlex.split(command)
                if words[0] in NOT_RUN:
                    continue
                assert_alike(run(words, tmp_path), output)


def commands(block: str) -> list[tuple[str, str]]:
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


def run(words: list[str], folder: Path) -> str:
    assert words[0] == "clearhead", words
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "clearhead", *words[1:]],
        cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def assert_alike(got: str, expected: str) -> None:
    """Compare word by word; decimals may differ by their last shown digit, integers may not."""
    if not expected.strip():
        return
    assert NUMBER.sub("#", " ".join(got.split())) == NUMBER.sub("#", " ".join(expected.split()))
    for ours, theirs in zip(NUMBER.findall(got), NUMBER.findall(expected), strict=True):
        last = 10.0 ** -len(theirs.partition(".")[2]) if "." in theirs else 0.0
        assert abs(float(ours) - float(theirs)) <= last * 1.01, f"{ours} is not {theirs}"


def test_alike_tells_a_lie() -> None:
    assert_alike("a 0.51\n", "a 0.50\n")
    for lie in ("a 0.53\n", "b 0.50\n", "a\n", "a 0.50 0.50\n"):
        with pytest.raises(AssertionError):
            assert_alike(lie, "a 0.50\n")


def modules() -> list[str]:
    walk = pkgutil.walk_packages(clearhead.__path__, "clearhead.")
    return sorted(m.name for m in walk if not m.name.endswith(("__main__", "._native")))


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


SOURCE = Path(clearhead.__file__).parent
# A file, and perhaps names in parentheses that it defines: `masks/mask.py` (`Mask`).
MENTION = re.compile(r"`([\w/]+\.py)`(?:\s\(((?:`\w+`(?:,\s)?)+)\))?")


def missing(text: str) -> list[str]:
    """The files that a page mentions and that are not there, and names that they do not define."""
    found = []
    for name, names in MENTION.findall(text):
        files = [path for path in SOURCE.rglob("*.py") if f"/{path}".endswith(f"/{name}")]
        for word in re.findall(r"\w+", names):
            defined = re.compile(rf"^\s*(?:def|class) {word}\b|^{word}\b.*=", re.MULTILINE)
            files = [path for path in files if defined.search(path.read_text(encoding="utf-8"))]
        if not files and not (ROOT / name).exists():
            found.append(f"{name} {names}".strip())
    return found


def test_the_architecture_is_the_real_one() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(MENTION.findall(text)) > 40
    assert missing(text) == []


def test_a_file_or_name_that_is_not_there_is_found() -> None:
    assert missing("`masks/mask.py` (`Mask`) and `README.md`") == []
    lies = "`masks/unmask.py`, `masks/mask.py` (`Unmask`)"
    assert missing(lies) == ["masks/unmask.py", "masks/mask.py `Unmask`"]
