"""Imports go down, through faces; names stay free, and importing the package stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import clearhead

SOURCE = Path(clearhead.__file__).parent

# The floors, lowest first: a package imports from lower floors alone.
FLOORS = [
    {"_core"},
    {"masks", "biases"},
    {"readings"},
    {"attention"},
    {"layers"},
    {"_capture"},
    {"recording", "intervention"},
    {"dependence", "heads"},
    {"models"},
    {"views"},
    {"cli"},
]
FLOOR = {package: number for number, floor in enumerate(FLOORS) for package in floor}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package by its dotted name, without `clearhead` itself."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts and parts != ("__main__",):
            yield ".".join(parts), path


def imported(path: Path) -> Iterator[str]:
    """What a file imports of the package: at its top, late, or for type checkers alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "clearhead")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "clearhead":
            assert not node.level, f"{path} imports by relative name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_package_stands_on_a_floor() -> None:
    there = {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert there == set(FLOOR)
    assert {p.name for p in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize(("name", "path"), list(modules()))
def test_imports_go_down(name: str, path: Path) -> None:
    package = name.split(".")[0]
    for target in imported(path):
        part = f"{target}.".split(".")[1]
        if part in FLOOR and part != package:
            assert FLOOR[part] < FLOOR[package], f"{name} imports {target}"


def test_no_file_bears_the_name_of_a_public_function() -> None:
    functions = {n for n in clearhead.__all__ if callable(getattr(clearhead, n))}
    names = {path.stem for path in SOURCE.glob("*.py")} | {p.name for p in SOURCE.iterdir()}
    assert not functions & names


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
