"""Imports go down, through faces; names stay free, and importing the package stays light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import clearhead
from tests import layout

SOURCE = Path(clearhead.__file__).parent
NATIVE = Path(__file__).parents[1] / "native"

Rule = layout.Rule
RULES: list[Rule] = [
    layout.floors,
    layout.directions,
    layout.faces,
    layout.attributes_of_faces,
    layout.assignments,
    layout.classes,
    layout.names_of_files,
    layout.sizes,
    layout.long_functions,
    layout.circles,
]


@pytest.fixture(scope="module")
def tree() -> layout.Tree:
    return layout.Tree(SOURCE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule, tree: layout.Tree) -> None:
    assert list(rule(tree)) == []


def test_files_of_the_kernel_stay_readable() -> None:
    assert list(layout.native_sizes(NATIVE)) == []


# What a tree without breaches looks like, as far as the rules read it.
HONEST = {
    "__init__.py": """
        from importlib import import_module
        from clearhead import masks, readings
        from clearhead._core import errors
        __version__ = "1"
        _HOMES = {"watch": "recording", "heads": "heads"}
        def __getattr__(name):
            return import_module(f"clearhead.{_HOMES[name]}")
        """,
    "__main__.py": "from clearhead.cli import main",
    "_core/__init__.py": "from clearhead._core import errors as errors",
    "_core/errors.py": "def value_error(): ...",
    "_display/__init__.py": "def provide(): ...",
    "masks/__init__.py": """
        from clearhead.masks.mask import Mask
        from clearhead.masks.algebra import And
        __all__ = ["And", "Mask", "causal"]
        """,
    "masks/mask.py": """
        class Mask:
            def both(self):
                from clearhead.masks.algebra import And
        """,
    "masks/algebra.py": """
        from clearhead.masks.mask import Mask
        class And(Mask): ...
        """,
    "monitoring/__init__.py": "",
    "distributed/__init__.py": "",
    "readings/__init__.py": "from clearhead.readings.kinds import Rows",
    "readings/kinds.py": "class Rows: ...",
    "attention/__init__.py": "from clearhead.attention.api import attend",
    "attention/api.py": """
        from clearhead._core import errors
        from clearhead import masks
        def attend(mask=masks.causal): ...
        """,
    "attention/impl/native/rows.py": "class Rows: ...",
    "heads/__init__.py": "",
    "heads/corpus/__init__.py": "class Job: ...",
    "models/__init__.py": "",
    "models/gpt.py": "class Block: ...",
    "models/bert.py": "class Block: ...",
    "recording/__init__.py": "from clearhead.recording.watching import watch",
    "recording/watching.py": """
        class Seen:
            def __init__(self):
                self.value = 1
        def watch(): ...
        """,
    "cli/__init__.py": """
        from clearhead import __version__, watch
        from clearhead.heads.corpus import Job
        def main(): ...
        """,
    **{
        f"{package}/__init__.py": ""
        for package in (
            "biases",
            "layers",
            "_capture",
            "intervention",
            "dependence",
            "views",
            "integrations",
        )
    },
}
CIRCLE = {
    "views/page.py": "from clearhead.views.text import a",
    "views/text.py": "def a():\n    from clearhead.views.page import b",
}
# Each lie beside the honest files, and the one breach that must be reported.
LIES: list[tuple[str, Rule, dict[str, str], str]] = [
    ("a package without a floor", layout.floors, {"tricks/__init__.py": ""},
     "tricks: stands on no floor"),
    ("a file in no package", layout.floors, {"tricks.py": ""}, "tricks.py: lies in no package"),
    ("an import that goes up", layout.directions,
     {"masks/up.py": "from clearhead.readings import Rows"}, "masks.up:1 imports readings"),
    ("a late one", layout.directions,
     {"masks/up.py": "def f():\n    from clearhead.readings import Rows"},
     "masks.up:2 imports readings"),
    ("one for types only", layout.directions,
     {"masks/up.py": "if TYPE_CHECKING:\n    import clearhead.readings"},
     "masks.up:2 imports readings"),
    ("one by a relative name", layout.directions,
     {"masks/up.py": "from ..readings import Rows"}, "masks.up:1 imports readings"),
    ("one by a function", layout.directions,
     {"masks/up.py": "import_module('clearhead.readings')"}, "masks.up:1 imports readings"),
    ("one of a package on the same floor", layout.directions,
     {"recording/up.py": "from clearhead import intervention"}, "recording.up:1 imports interv"),
    ("the public names from below", layout.directions,
     {"views/up.py": "from clearhead import watch"}, "views.up:1 imports watch of the top"),
    ("a file of another package", layout.faces,
     {"views/in.py": "from clearhead.masks.mask import Mask"}, "views.in:1 imports masks.mask"),
    ("a file through its package, which does not bind it", layout.faces,
     {"views/in.py": "from clearhead.heads import moments", "heads/moments.py": ""},
     "views.in:1 imports heads.moments"),
    ("that file as a module", layout.faces,
     {"views/in.py": "import clearhead.masks.mask"}, "views.in:1 imports masks.mask"),
    ("a package inside of one, without a face", layout.faces,
     {"views/in.py": "from clearhead.attention.impl.native.rows import Rows"},
     "views.in:1 imports attention.impl.native.rows"),
    ("a name that the face has not", layout.faces,
     {"views/in.py": "from clearhead.masks import secret"}, "views.in:1 imports secret: masks"),
    ("a name of the top that is not there", layout.faces,
     {"cli/in.py": "from clearhead import secret"}, "cli.in:1 imports secret"),
    ("a name that the face has not, by attribute", layout.attributes_of_faces,
     {"views/in.py": "from clearhead import masks\nmasks.secret"}, "views.in:2 uses masks.secret"),
    ("an attribute of an imported module", layout.assignments,
     {"views/on.py": "import torch\ntorch.nn.functional.softmax = 1"},
     "views.on:2 assigns to torch.nn.functional.softmax"),
    ("of one that is imported by name", layout.assignments,
     {"views/on.py": "from clearhead import masks\nmasks.causal += 1"},
     "views.on:2 assigns to masks.causal"),
    ("by setattr", layout.assignments,
     {"views/on.py": "from torch import nn\nsetattr(nn.Module, 'forward', 1)"},
     "views.on:2 assigns to nn.Module"),
    ("in its dictionary", layout.assignments,
     {"views/on.py": "import torch\nvars(torch)['x'] = 1"}, "views.on:2 assigns to vars(torch)"),
    ("in another way", layout.assignments,
     {"views/on.py": "import torch\ntorch.__dict__['x'] = 1"}, "views.on:2 assigns to torch"),
    ("by a deletion", layout.assignments,
     {"views/on.py": "import torch\ndel torch.nn"}, "views.on:2 assigns to torch.nn"),
    ("among others", layout.assignments,
     {"views/on.py": "import torch\na, torch.x = 1, 2"}, "views.on:2 assigns to torch.x"),
    ("two classes of one name", layout.classes,
     {"views/two.py": "class Seen: ..."}, "class Seen is in recording.watching, views.two"),
    ("a reading's name outside of the implementations", layout.classes,
     {"views/two.py": "class Rows: ..."}, "class Rows is in readings.kinds, views.two"),
    ("a file beside a function of its name", layout.names_of_files,
     {"attention/attend.py": ""}, "attention.attend: attention binds"),
    ("a package with the name of a public function", layout.names_of_files,
     {"watch/__init__.py": ""}, "watch: the top binds"),
    ("a long file", layout.sizes, {"views/long.py": "\n" * 401}, "views.long: 401 lines"),
    ("a full folder", layout.sizes, {f"views/{n}.txt": "" for n in range(12)}, "views: 13 files"),
    ("long functions", layout.long_functions,
     {"views/long.py": "\n".join(f"def f{n}():\n" + "    1\n" * 20 for n in range(9))},
     "one function in ten has 21 lines"),
    ("a circle", layout.circles, CIRCLE, "a circle: views.page, views.text"),
    ("a second one inside of masks", layout.circles,
     {"masks/a.py": "import clearhead.masks.b", "masks/b.py": "import clearhead.masks.a"},
     "a circle: masks."),
    ("one through a face", layout.circles,
     {"masks/tie.py": "from clearhead.readings import Rows",
      "readings/kinds.py": "from clearhead import masks\nclass Rows: ...",
      "masks/__init__.py": "from clearhead.masks.tie import x"},
     "a circle: masks, masks.tie, readings, readings.kinds"),
]  # fmt: skip


def grown(root: Path, files: dict[str, str]) -> layout.Tree:
    """A tree of files in a folder of its own."""
    import textwrap

    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return layout.Tree(root)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_an_honest_tree_passes(rule: Rule, tmp_path: Path) -> None:
    assert list(rule(grown(tmp_path, HONEST))) == []


@pytest.mark.parametrize(("rule", "files", "breach"), [lie[1:] for lie in LIES],
                         ids=[lie[0] for lie in LIES])  # fmt: skip
def test_a_lie_is_reported(rule: Rule, files: dict[str, str], breach: str, tmp_path: Path) -> None:
    (found,) = rule(grown(tmp_path, HONEST | files))
    assert found.startswith(breach)


def test_a_package_that_is_missing_is_reported(tmp_path: Path) -> None:
    files = {name: text for name, text in HONEST.items() if not name.startswith("layers/")}
    assert list(layout.floors(grown(tmp_path, files))) == ["layers: has a floor and is not there"]


def test_a_long_file_of_the_kernel_is_reported(tmp_path: Path) -> None:
    (tmp_path / "long.inl").write_text("\n" * 601)
    assert list(layout.native_sizes(tmp_path)) == ["long.inl: 601 lines"]


def test_components_are_those_of_the_definition() -> None:
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a", "f"}}
    found = {frozenset(group) for group in layout.components(edges)}
    assert found == {frozenset("abc"), frozenset("de"), frozenset("f")}


def test_a_kernel_that_was_built_loads() -> None:
    """Or the tests of the kernel would be skipped, and nobody would notice."""
    from clearhead.attention.impl.native import kernel

    assert "does not load" not in kernel.MISSING, kernel.MISSING
    assert kernel._native is not None or not list(SOURCE.glob("attention/impl/native/_native*"))


def test_import_is_light() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import clearhead; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"rich", "safetensors", "transformers", "onnx", "pyarrow", "clearhead.models"}
    assert not heavy & set(done.stdout.split())
