"""The rules of the layout, each a function from a source tree to its breaches, one line each.

A tree is the folder of the package `clearhead`: the real one, or a small one full of lies. Nothing
is imported; files are parsed. Every import counts, at the top, late, or for type checkers alone.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

# The package itself: its public names, which only the command uses.
TOP = ""
# The floors, lowest first: a package imports from lower floors alone.
FLOORS = [
    {"_core", "_display"},
    {"masks", "biases"},
    {"readings"},
    {"attention"},
    {"layers"},
    {"_capture"},
    {"recording", "intervention"},
    {"dependence", "heads"},
    {"models", "monitoring", "distributed"},
    {"views"},
    {"integrations"},
    {TOP},
    {"cli"},
    {"__main__"},
]
FLOOR = {package: number for number, floor in enumerate(FLOORS) for package in floor}
# Packages inside of packages that have a face of their own.
SUB_FACES = {"dependence.library", "heads.corpus"}
# Each is read alone, from its top to its bottom: its classes do not count beside others.
READ_ALONE = {"models.gpt", "models.bert", "models.rnn"}
# The one place that replaces attributes of torch and of transformers, and puts them back.
PATCHES = "_capture.attach"

FILES_IN_A_FOLDER, LINES_IN_A_FILE, LINES_OF_NATIVE, P90_OF_A_FUNCTION = 12, 400, 600, 20


Rule = Callable[["Tree"], Iterator[str]]


class Import(NamedTuple):
    """`module` is the dotted name without `clearhead`; `name` is None where the module is meant."""

    module: str
    name: str | None
    line: int


class Source:
    """One file of the tree."""

    def __init__(self, path: Path, root: Path) -> None:
        parts = path.relative_to(root).with_suffix("").parts
        self.is_init = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_init else parts)
        self.package = self.name.partition(".")[0]
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))


class Tree:
    """All files of the package below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        files = (Source(path, root) for path in sorted(root.rglob("*.py")))
        self.files = {file.name: file for file in files}

    def imports(self, file: Source) -> Iterator[Import]:
        """What a file imports of the package."""
        for node in file.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if _ours(alias.name):
                        yield self._import(alias.name, None, node.lineno)
            elif isinstance(node, ast.ImportFrom) and (node.level or _ours(node.module or "")):
                for alias in node.names:
                    yield self._import(_absolute(file, node), alias.name, node.lineno)
            elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
                literal = _literal(node.args[0]) if node.args else ""
                if _ours(literal):
                    yield self._import(literal, None, node.lineno)

    def _import(self, module: str, name: str | None, line: int) -> Import:
        module = module.removeprefix("clearhead").removeprefix(".")
        within = f"{module}.{name}" if module else (name or "")
        if name is not None and within in self.files:
            return Import(within, None, line)
        return Import(module, name, line)

    def bound(self, package: str) -> set[str]:
        """The names that the face of a package binds."""
        file = self.files.get(package)
        if file is None or not file.is_init:
            return set()
        names: set[str] = set()
        for node in _top_level(file.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {(a.asname or a.name).partition(".")[0] for a in node.names}
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names |= set(_names(node.targets)) | _listed(node)
            elif isinstance(node, ast.AnnAssign):
                names |= set(_names([node.target]))
        return names

    @cached_property
    def edges(self) -> dict[str, set[str]]:
        """Which file imports which; a name that a face binds is imported from the face."""
        return {
            file.name: {i.module for i in self.imports(file) if i.module in self.files}
            for file in self.files.values()
        }


def _ours(module: str) -> bool:
    return module.partition(".")[0] == "clearhead"


def _absolute(file: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = file.name.split(".") if file.name else []
    parts = parts[: len(parts) - node.level + file.is_init]
    return ".".join(["clearhead", *parts, *([node.module] if node.module else [])])


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _literal(node: ast.expr) -> str:
    """A string, or what an f-string begins with."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value.rstrip(".") if is_text else ""  # type: ignore[union-attr]


def _names(targets: list[ast.expr]) -> Iterator[str]:
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                yield node.id


def _listed(node: ast.Assign) -> set[str]:
    """The strings of `__all__`, and the keys of a table of lazy names."""
    strings = {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
    if "__all__" in _names(node.targets):
        return {s for s in strings if isinstance(s, str)}
    if isinstance(node.value, ast.Dict):
        return {k.value for k in node.value.keys if isinstance(k, ast.Constant)}  # type: ignore[misc]
    return set()


def floors(tree: Tree) -> Iterator[str]:
    """Every package stands on a floor, and every floor's package is there."""
    there = {p.name for p in tree.root.iterdir() if p.is_dir() and p.name != "__pycache__"}
    known = set(FLOOR) - {TOP, "__main__"}
    yield from (f"{name}: stands on no floor" for name in sorted(there - known))
    yield from (f"{name}: has a floor and is not there" for name in sorted(known - there))
    loose = {p.name for p in tree.root.glob("*.py")} - {"__init__.py", "__main__.py"}
    yield from (f"{name}: lies in no package" for name in sorted(loose))


def directions(tree: Tree) -> Iterator[str]:
    """Imports go down."""
    for file in tree.files.values():
        for target in tree.imports(file):
            package = target.module.partition(".")[0]
            if package != file.package and not FLOOR.get(package, 99) < FLOOR.get(file.package, 0):
                name = target.module or f"{target.name} of the top"
                yield f"{file.name}:{target.line} imports {name}, which is not below it"


def faces(tree: Tree) -> Iterator[str]:
    """Other packages are imported through their faces, and only the names that these bind."""
    for file in tree.files.values():
        for target in tree.imports(file):
            package = target.module.partition(".")[0]
            if package == file.package:
                continue
            if target.module not in {package} | SUB_FACES:
                inner = target.module.rpartition(".")
                if target.name is not None or inner[2] not in tree.bound(inner[0]):
                    yield f"{file.name}:{target.line} imports {target.module}, which is no face"
            elif target.name is not None and target.name not in tree.bound(target.module):
                yield f"{file.name}:{target.line} imports {target.name}: {target.module} has none"


def attributes_of_faces(tree: Tree) -> Iterator[str]:
    """`masks.name` of an imported package is a name of its face, too."""
    for file in tree.files.values():
        own = {package for package in FLOOR if _imports_package(file, package)}
        for node in file.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                package = node.value.id
                if package not in own - {file.package} or node.attr.startswith("__"):
                    continue
                if node.attr not in tree.bound(package):
                    yield f"{file.name}:{node.lineno} uses {package}.{node.attr}"


def _imports_package(file: Source, package: str) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == "clearhead"
        and any(alias.name == package and alias.asname is None for alias in node.names)
        for node in file.nodes
    )


def assignments(tree: Tree) -> Iterator[str]:
    """No file assigns to the attributes of what it imports, but for `PATCHES`."""
    for file in tree.files.values():
        if file.name == PATCHES:
            continue
        imported = set(_imported_names(file))
        for node in file.nodes:
            for target in _assigned(node):
                if _root(target) in imported:
                    yield f"{file.name}:{target.lineno} assigns to {ast.unparse(target)}"


def _imported_names(file: Source) -> Iterator[str]:
    for node in file.nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((a.asname or a.name).partition(".")[0] for a in node.names)


def _assigned(node: ast.AST) -> Iterator[ast.expr]:
    """The objects whose attributes a statement sets or deletes."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and _called(node) in ("setattr", "delattr", "__setattr__"):
        yield from node.args[:1]
    for target in targets:
        for inner in ast.walk(target):
            if not isinstance(inner, (ast.Attribute, ast.Subscript)):
                continue
            is_set = not isinstance(inner.ctx, ast.Load)
            if is_set and (isinstance(inner, ast.Attribute) or _is_namespace(inner.value)):
                yield inner


def _is_namespace(node: ast.expr) -> bool:
    """Whether an expression is the dictionary of an object: `vars(x)` or `x.__dict__`."""
    if isinstance(node, ast.Call):
        return _called(node) == "vars"
    return isinstance(node, ast.Attribute) and node.attr == "__dict__"


def _root(node: ast.expr) -> str | None:
    """The name at which a chain of attributes begins."""
    while not isinstance(node, ast.Name):
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        elif isinstance(node, ast.Call) and _called(node) == "vars" and node.args:
            node = node.args[0]
        else:
            return None
    return node.id


def classes(tree: Tree) -> Iterator[str]:
    """A class name has one meaning; what an implementation makes of a reading bears its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in tree.files.values():
        if file.name not in READ_ALONE:
            for node in file.nodes:
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(file.name)
    for name, files in found.items():
        if any(file.startswith("readings") for file in files):
            files = [file for file in files if not file.startswith("attention.impl")]
        if len(files) > 1:
            yield f"class {name} is in {', '.join(files)}"


def names_of_files(tree: Tree) -> Iterator[str]:
    """No file bears a name that the face beside it binds to something else, late or at once."""
    for file in tree.files.values():
        if not file.is_init:
            continue
        for name, module in _bound_elsewhere(file):
            path = f"{file.name}.{name}".removeprefix(".")
            if path in tree.files and module != path:
                yield f"{path}: {file.name or 'the top'} binds the name to something else"


def _bound_elsewhere(file: Source) -> Iterator[tuple[str, str]]:
    """The names that a face binds at its top, or in a table of lazy names, and their sources."""
    for node in _top_level(file.tree):
        if isinstance(node, ast.ImportFrom) and _ours(node.module or ""):
            for alias in node.names:
                path = f"{node.module}.{alias.name}".removeprefix("clearhead.")
                yield alias.asname or alias.name, path
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, "itself"
        elif isinstance(node, ast.Assign):
            yield from ((name, "itself") for name in _names(node.targets))
            if isinstance(node.value, ast.Dict):
                pairs = zip(node.value.keys, node.value.values, strict=True)
                found = ((_literal(key), _literal(value)) for key, value in pairs if key)
                yield from ((key, value) for key, value in found if value)


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements outside of functions and classes."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            waiting += [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]


def sizes(tree: Tree) -> Iterator[str]:
    """Files fit on a few screens, and folders on one."""
    for folder in [tree.root, *sorted(p for p in tree.root.rglob("*") if p.is_dir())]:
        files = [p for p in folder.iterdir() if p.is_file() and p.suffix not in (".so", ".pyd")]
        if folder.name != "__pycache__" and len(files) > FILES_IN_A_FOLDER:
            yield f"{folder.relative_to(tree.root)}: {len(files)} files"
    for file in tree.files.values():
        lines = file.text.count("\n")
        if lines > LINES_IN_A_FILE:
            yield f"{file.name}: {lines} lines"


def native_sizes(root: Path) -> Iterator[str]:
    """Files of the C++ kernel are longer, as it unrolls its loops by hand."""
    for path in sorted(root.rglob("*")):
        if path.suffix in (".h", ".inl", ".cpp", ".hpp"):
            lines = path.read_text(encoding="utf-8").count("\n")
            if lines > LINES_OF_NATIVE:
                yield f"{path.relative_to(root)}: {lines} lines"


def long_functions(tree: Tree) -> Iterator[str]:
    """Nine functions in ten have at most `P90_OF_A_FUNCTION` lines."""
    lengths = sorted(
        (node.end_lineno or 0) - node.lineno + 1
        for file in tree.files.values()
        for node in file.nodes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    ninth = lengths[len(lengths) * 9 // 10] if lengths else 0
    if ninth > P90_OF_A_FUNCTION:
        yield f"one function in ten has {ninth} lines or more"


def circles(tree: Tree) -> Iterator[str]:
    """Files import each other in circles nowhere but, once, inside of `masks`."""
    found = [group for group in components(tree.edges) if len(group) > 1]
    within = [group for group in found if all(n.partition(".")[0] == "masks" for n in group)]
    bad = [group for group in found if group not in within] + within[1:]
    yield from (f"a circle: {', '.join(sorted(group))}" for group in bad)


def components(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of a graph (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in edges.get(name, ()):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            at = stack.index(name)
            found.append(stack[at:])
            del stack[at:]

    for name in edges:
        if name not in order:
            visit(name)
    return found
