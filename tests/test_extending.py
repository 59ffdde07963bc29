"""The recipes of docs/extending.md, applied to a copy of the source and run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import clearhead
from clearhead.attention.impl.native import kernel
from tests import layout
from tests.test_docs import assert_alike, commands

# An editable install finds its own source before the copy.
FINDERS = """
import sys
sys.meta_path[:] = [x for x in sys.meta_path if not type(x).__module__.startswith("_editable")]
"""
PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
SOURCE = Path(clearhead.__file__).parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A block that makes or edits a file comes after a line that begins with the file's name.
NAME = re.compile(r"^`src/clearhead/([\w/]+\.py)`[^\n]*:\n\n```(\w+)\n(.*?)^```$", re.M | re.S)


def recipes() -> dict[str, str]:
    """The text of each recipe by its heading."""
    parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: part for part in parts}


def applied(text: str, root: Path) -> list[str]:
    """Make and edit the files of a recipe; return their names."""
    names = []
    for name, language, block in NAME.findall(text):
        path = root / name
        if language == "python":
            assert not path.exists(), name
            path.write_text(block, encoding="utf-8")
        else:
            path.write_text(edited(path.read_text(encoding="utf-8"), block), encoding="utf-8")
        names.append(name)
    return names


def edited(text: str, block: str) -> str:
    """Apply the hunks of a diff block, each of which must fit exactly one place."""
    for hunk in block.split("@@\n"):
        lines = [(line[:1], line[1:]) for line in hunk.splitlines()]
        old = "".join(line + "\n" for sign, line in lines if sign in " -")
        new = "".join(line + "\n" for sign, line in lines if sign in " +")
        assert not old or text.count(old) == 1, f"fits {text.count(old)} places:\n{old}"
        text = text.replace(old, new) if old else text + new
    return text


def run(arguments: list[str], root: Path, code: int = 0) -> str:
    environment = os.environ | {"PYTHONPATH": str(root), "NO_COLOR": "1", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True,
        encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source with every recipe applied."""
    root = tmp_path_factory.mktemp("extended")
    shutil.copytree(SOURCE, root / "clearhead", ignore=shutil.ignore_patterns("__pycache__"))
    compiled = kernel._native and Path(kernel._native.__file__)
    if compiled:  # an editable install keeps it elsewhere
        into = root / "clearhead" / "attention" / "impl" / "native" / compiled.name
        shutil.copyfile(compiled, into)
    (root / "sitecustomize.py").write_text(FINDERS)
    made = {title: applied(text, root / "clearhead") for title, text in recipes().items()}
    assert {title for title, names in made.items() if names} == {
        "A reading", "A mask leaf", "An implementation", "A command", "A view",
    }  # fmt: skip
    return root


def test_there_are_seven_recipes() -> None:
    assert list(recipes()) == [
        "A reading", "A mask leaf", "An instruction set", "An implementation",
        "A kind of handwritten attention", "A command", "A view",
    ]  # fmt: skip


def test_the_blocks_print_what_the_page_says(extended: Path) -> None:
    """One namespace for the page: the blocks that make no file, in their order."""
    text = NAME.sub("", PAGE.read_text(encoding="utf-8"))
    found = BLOCK.findall(text)
    code = [block for language, block in found if language == "python"]
    right = [block for language, block in found if language == "text"]
    assert len(code) == len(right) == 3
    assert_alike(run(["-c", "\n".join(code)], extended), "".join(right))


def test_the_command_runs(extended: Path) -> None:
    (console,) = [
        block for language, block in BLOCK.findall(PAGE.read_text()) if language == "console"
    ]
    (good, printed), (bad, _) = commands(console)
    arguments = ["-m", "clearhead", "count", "causal & window(3)", "-q", "6"]
    assert good == 'clearhead count "causal & window(3)" -q 6'
    assert run(arguments, extended) == printed
    assert '"edges": 15' in run([*arguments, "--json"], extended)
    assert bad == "clearhead count nonsense"
    run(["-m", "clearhead", "count", "nonsense"], extended, code=2)


# Each toy against a source of its own: loops over numbers, torch's softmax.
CHECKS = {
    "the reading": """
        q, k, v = (torch.randn(2, 3, n, 5, dtype=torch.float64) for n in (7, 11, 11))
        scores = q @ k.mT / 5**0.5
        for i in range(7):
            scores[..., i, i + 5:] = -torch.inf
        right = scores.softmax(-1).amax(-1)
        for impl in ("reference", "tiled", None):
            x = q.clone().requires_grad_()
            found = ch.attend(x, k, v, masks.causal(), read=readings.Largest(), impl=impl)[1]
            torch.testing.assert_close(found, right)
            found.sum().backward()
            assert x.grad.abs().sum() > 0
        left, end = scores[..., :4], scores[..., 4:]
        whole = {"lse": scores.logsumexp(-1), "query": 7, "source": 11}
        parts = [readings.Strip.of(left, sources=range(4), **whole),
                 readings.Strip.of(end, sources=range(4, 11), **whole)]
        torch.testing.assert_close(readings.Largest().fold(parts), right)
        """,
    "the leaf": """
        for query, source in ((5, 5), (3, 8), (1, 1)):
            for step in (1, 2, 3):
                rows = [[0 <= i + source - query - j and (i + source - query - j) % step == 0
                         for j in range(source)] for i in range(query)]
                found = masks.dilated(step)
                assert torch.equal(found.dense(query, source), torch.tensor(rows))
                assert found.count(query, source) == sum(map(sum, rows))
                q, k = torch.randn(2, query, 4), torch.randn(2, source, 4)
                same = ch.attend(q, k, k, found), ch.attend(q, k, k, torch.tensor(rows))
                torch.testing.assert_close(*same)
        assert masks.parse("dilated(2)") == masks.dilated(2) != masks.dilated(3)
        """,
    "the implementation": """
        q, k, v = (torch.randn(2, 3, n, 5) for n in (7, 11, 11))
        right = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(ch.attend(q, k, v, impl="eager"), right)
        from clearhead.attention import available
        assert available()["eager"] == "ready"
        """,
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_toys_are_right(name: str, extended: Path) -> None:
    import textwrap

    head = "import torch, clearhead as ch\nfrom clearhead import masks, readings\n"
    run(["-c", head + textwrap.dedent(CHECKS[name])], extended)


def test_the_docstrings_of_the_toys_are_true(extended: Path) -> None:
    run(["-m", "doctest", str(extended / "clearhead" / "readings" / "largest.py")], extended)
    run(["-m", "doctest", str(extended / "clearhead" / "masks" / "positional.py")], extended)


RULES = [
    layout.floors, layout.directions, layout.faces, layout.classes, layout.names_of_files,
    layout.sizes, layout.circles,
]  # fmt: skip


def test_the_recipes_keep_the_rule_of_the_layout(extended: Path) -> None:
    tree, before = layout.Tree(extended / "clearhead"), layout.Tree(SOURCE)
    for rule in RULES:
        assert list(rule(tree)) == list(rule(before)), rule.__name__


def test_a_recipe_that_does_not_fit_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    assert edited("x = 1\ny = 2\n", " x = 1\n+z = 3\n") == "x = 1\nz = 3\ny = 2\n"
    with pytest.raises(AssertionError, match="fits 0 places"):
        edited("x = 1\n", "-x = 2\n+x = 3\n")
    with pytest.raises(AssertionError, match="fits 2 places"):
        edited("x = 1\nx = 1\n", "-x = 1\n+x = 3\n")
