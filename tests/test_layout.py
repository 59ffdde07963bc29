"""Imports go one way, names stay free, and importing the package stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import clearhead

SOURCE = Path(clearhead.__file__).parent
LIGHT = {"torch", "math", "typing", "collections", "dataclasses", "enum", "functools", "jaxtyping"}


def imported(path: Path) -> set[str]:
    """Modules that a file imports at run time (imports for type checkers do not count)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                visit(child)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        else:
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(tree)
    return found


def test_implementations_do_not_know_each_other() -> None:
    names = ("reference", "tiled", "native")
    above = ("clearhead.attention", "clearhead.multihead", "clearhead.watching", "clearhead.cli")
    for name in names:
        path = SOURCE / "_impl" / f"{name}.py"
        if not path.exists():
            continue
        for module in imported(path):
            others = [n for n in names if n != name]
            assert not any(f"_impl.{n}" in module or module.endswith(f"_impl.{n}") for n in others)
            assert not module.startswith(above)


@pytest.mark.parametrize("name", ["masks", "readings", "_fold", "errors", "_choice"])
def test_the_vocabulary_imports_only_torch(name: str) -> None:
    paths = [SOURCE / f"{name}.py"] if (SOURCE / f"{name}.py").exists() else []
    paths += sorted((SOURCE / name).glob("*.py"))
    assert paths
    for path in paths:
        for module in imported(path):
            assert not module.startswith("clearhead.") or module.startswith(
                (
                    "clearhead.errors",
                    f"clearhead.{name}",
                    "clearhead.masks",
                    "clearhead._impl.problem",
                    "clearhead._choice",
                    "clearhead._fold",
                )
            ), f"{path.name} imports {module}"


def test_nothing_imports_the_command() -> None:
    for path in SOURCE.rglob("*.py"):
        if "cli" not in path.parts and path.name != "__main__.py":
            assert not [m for m in imported(path) if m.startswith("clearhead.cli")], path


def test_no_file_bears_the_name_of_a_public_function() -> None:
    functions = {n for n in clearhead.__all__ if callable(getattr(clearhead, n))}
    modules = {path.stem for path in SOURCE.glob("*.py")} | {p.name for p in SOURCE.iterdir()}
    assert not functions & modules


def test_a_kernel_that_was_built_loads() -> None:
    """Or the tests of the kernel would be skipped, and nobody would notice."""
    from clearhead._impl import _kernel

    assert "does not load" not in _kernel.MISSING, _kernel.MISSING
    assert _kernel._native is not None or not list(SOURCE.glob("_impl/_native*"))


def test_import_is_light() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import clearhead; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"rich", "safetensors", "transformers", "onnx", "pyarrow", "clearhead.models"}
    assert not heavy & set(done.stdout.split())
