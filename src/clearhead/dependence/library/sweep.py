"""A sweep over the classes of a library: its folder, its start, and what it has found so far."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from clearhead._core import did_you_mean, replacing, take_lock, type_error, value_error
from clearhead.dependence.library.rows import FORMS, Row, file_of, ordered, read_rows

__all__ = [
    "BACKENDS",
    "LIBRARIES",
    "Library",
    "SweepJob",
    "Tell",
    "audit_library",
    "read_header",
    "read_run",
]

BACKENDS = ("eager", "sdpa")
# Seconds that the worker has to end its children.
PATIENCE = 20.0
# What is told of the progress: classes that are done, all classes, the name of the last one.
Tell = Callable[[int, int, str], None]


class Library(NamedTuple):
    """Where the classes of a library come from; functions are named `module:function`."""

    name: str
    catalogue: str  # () -> subjects, each with `name`, `mapping` and `model_type`
    build: str  # (subject, backend, seed=) -> what `questions.Subjected` says
    packages: tuple[str, ...] = ()  # whose versions the rows depend on
    proves: bool = False  # findings are confirmed by `rerun`
    backends: tuple[str, ...] = BACKENDS  # that its classes have


_HOME = "clearhead.dependence.library"
LIBRARIES = {
    "transformers": Library(
        "transformers",
        catalogue=f"{_HOME}.subjects:catalogue",
        build=f"{_HOME}.making:build",
        packages=("transformers",),
        proves=True,
    ),
    **{
        friend.replace("_", "-"): Library(
            friend.replace("_", "-"),
            catalogue=f"{_HOME}.friends:of_{friend}",
            build=f"{_HOME}.friends:build",
            packages=packages,
            proves=True,
            backends=backends,
        )
        for friend, packages, backends in (
            ("torch", (), ("sdpa",)),
            ("x_transformers", ("x-transformers",), BACKENDS),
            ("diffusers", ("diffusers",), ("sdpa",)),
            ("sentence_transformers", ("sentence-transformers", "transformers"), ("sdpa",)),
            ("peft", ("peft", "transformers"), BACKENDS),
        )
    },
}


@dataclass(frozen=True)
class SweepJob:
    """What the worker is asked to do."""

    library: Library
    folder: str
    chosen: tuple[tuple[str, str], ...]  # name and mapping of each class
    forms: tuple[str, ...]
    backends: tuple[str, ...]
    processes: int
    limit: float  # seconds for a class
    memory: float  # GiB for a class
    seed: int

    @classmethod
    def of(cls, plain: dict[str, Any]) -> SweepJob:
        """Read what `asdict` wrote, after a way through JSON."""
        lists = {n: tuple(map(_frozen, v)) for n, v in plain.items() if isinstance(v, list)}
        library = Library(*(map(_frozen, plain["library"])))
        return cls(**{**plain, **lists, "library": library})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def audit_library(
    library: str | Library = "transformers",
    out: str | Path | None = None,
    classes: Sequence[str] | None = None,
    forms: Sequence[str] = FORMS,
    backends: Sequence[str] = BACKENDS,
    *,
    processes: int = 2,
    limit: float = 120.0,
    memory: float = 4.0,
    seed: int = 0,
    tell: Tell | None = None,
) -> list[Row]:
    """Audit every class of a library, or those that are named, each in a process of its own.

    `out` is the folder that the rows are written to, one file a class; a sweep that was stopped
    goes on from there. `limit` is in seconds and `memory` in GiB, both for one class: a class that
    takes more is "not tested", as is one that ends its process. The rows are sorted, and depend
    only on the versions and the rules (a hash of the code) that `run.json` in the folder names, and
    on `seed`.
    """
    chosen = _library(library)
    if not hasattr(os, "fork"):
        raise RuntimeError("a sweep forks a process for each class, which this system cannot do")
    _check_numbers(processes=processes, limit=limit, memory=memory)
    _check_choices("forms", forms, FORMS)
    _check_choices("backends", backends, BACKENDS)
    backends = _of_the_library(backends, chosen)
    folder = _folder(out)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise value_error("seed", "is a whole number of at least 0", got=repr(seed))
    names = _chosen(chosen, classes)
    job = SweepJob(
        chosen, str(folder.absolute()), tuple(names), _kept(forms, FORMS),
        _kept(backends, BACKENDS), processes, limit, memory, seed,
    )  # fmt: skip
    with _held(folder, _run_of(job)) as files:
        rest = tuple(name for name in names if read_rows(files / file_of(*name)) is None)
        if rest:
            _run(SweepJob(**{**vars(job), "chosen": rest}), len(names), tell or (lambda *_: None))
        return ordered(row for name in names for row in read_rows(files / file_of(*name)) or [])


def read_run(folder: str | Path, argument: str = "out") -> tuple[dict[str, Any], list[Row]]:
    """Read what a sweep left in its folder: what it depends on, and its rows."""
    home = Path(folder).expanduser()
    run, files = read_header(home, argument), sorted((home / "rows").glob("*.json"))
    damaged = [file for file in files if read_rows(file) is None]
    if damaged:
        hint = "remove that file, and run the sweep of that folder again"
        raise value_error(argument, "has whole files of rows", got=damaged[0], hint=hint)
    return run, ordered(row for file in files for row in read_rows(file) or [])


def read_header(folder: str | Path, argument: str = "out") -> dict[str, Any]:
    """Read what the rows of a sweep depend on."""
    home = Path(folder).expanduser()
    try:
        run = json.loads((home / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise value_error(argument, "is the folder of a sweep", got=f"{home} ({error})") from None
    parts = {"library": str, "versions": dict, "seed": int, "backends": list}
    if not isinstance(run, dict) or not all(isinstance(run.get(n), k) for n, k in parts.items()):
        got = f"{home} (run.json has not {', '.join(parts)})"
        raise value_error(argument, "is the folder of a sweep", got=got)
    return run


def write_json(path: Path, value: Any) -> None:
    """Write a file whole, or not at all."""
    with replacing(path) as part:
        part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def function_of(name: str) -> Any:
    """Import a function by `module:function`."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def _library(library: str | Library) -> Library:
    if isinstance(library, Library):
        return library
    if not isinstance(library, str) or library not in LIBRARIES:
        known = ", ".join(LIBRARIES)
        raise value_error("library", f"is one that can be audited ({known})", got=repr(library))
    found = LIBRARIES[library]
    missing = [name for name in found.packages if find_spec(name.replace("-", "_")) is None]
    if missing:
        packages = " ".join(missing)
        raise ImportError(f"library: {packages} is not installed\n  to do: pip install {packages}")
    return found


def _folder(out: Any) -> Path:
    rule = "is needed: the folder that the rows are written to"
    if not isinstance(out, (str, os.PathLike)):
        raise type_error("out", rule, got=repr(out))
    if not os.fspath(out):
        raise value_error("out", rule, got=repr(out))
    return Path(out).expanduser()


def _check_numbers(**numbers: Any) -> None:
    for name, value in numbers.items():
        whole = name == "processes"
        kind = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < float("inf"):
            rule = "is a whole number of at least 1" if whole else "is a number above 0"
            raise value_error(name, rule, got=repr(value))


def _check_choices(name: str, given: Any, known: tuple[str, ...]) -> None:
    if isinstance(given, str) or not given:
        raise value_error(name, f"is a list of some of {', '.join(known)}", got=repr(given))
    unknown = [one for one in given if one not in known]
    if unknown:
        raise value_error(name, f"are some of {', '.join(known)}", got=repr(unknown[0]))


def _of_the_library(given: Sequence[str], library: Library) -> list[str]:
    """Choose the backends that the classes of a library have."""
    found = [one for one in given if one in library.backends]
    if not found:
        rule = f"of {library.name} are {', '.join(library.backends)}"
        raise value_error("backends", rule, got=", ".join(given))
    return found


def _kept(given: Sequence[str], known: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one for one in known if one in given)


def _chosen(library: Library, classes: Sequence[str] | None) -> list[tuple[str, str]]:
    """List the name and the mapping of each class that is asked for, in the catalogue's order."""
    there = [(one.name, one.mapping) for one in function_of(library.catalogue)()]
    if classes is None:
        return there
    if isinstance(classes, str) or not classes:
        raise value_error("classes", "is a list of names of classes", got=repr(classes))
    names = [name for name, _ in there]
    # The name of a class stands for its variants, such as FalconForCausalLM:alibi, too.
    names += [name.partition(":")[0] for name in names]
    for name in classes:
        _check_class(library.name, name, names)
    return [one for one in there if {one[0], one[0].partition(":")[0]} & set(classes)]


def _check_class(library: str, name: Any, names: list[str]) -> None:
    if name in names:
        return
    if not isinstance(name, str):
        raise type_error("classes", "is a list of names of classes", got=repr(name))
    if "/" in name or "--" in name:
        rule = "are built from their configuration alone: nothing is downloaded, no other code runs"
        hint = f"name a class of {library}, as {names[0]}; `clearhead audit ID` audits one model"
        raise value_error("classes", rule, got=repr(name), hint=hint)
    close = did_you_mean(" or ".join(get_close_matches(name, dict.fromkeys(names), 3)))
    raise value_error("classes", f"are in the mappings of {library}{close}", got=repr(name))


def _run_of(job: SweepJob) -> dict[str, Any]:
    """Describe what the rows depend on."""
    return {
        "library": job.library.name,
        "versions": {name: _version(name) for name in ("clearhead", "torch", *job.library.packages)}
        | {"python": platform.python_version()},
        "rules": _rules(),
        "seed": job.seed,
        "forms": list(job.forms),
        "backends": list(job.backends),
    }


def _rules() -> str:
    """Give a hash of the code that makes the rows: of one version it may differ as well."""
    home = Path(__file__).parents[1]
    sums = hashlib.sha256()
    for path in sorted(home.rglob("*.py")):
        sums.update(f"{path.relative_to(home).as_posix()}\0".encode() + path.read_bytes())
    return sums.hexdigest()[:12]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(name), "__version__", "not installed"))


@contextlib.contextmanager
def _held(folder: Path, run: dict[str, Any]) -> Iterator[Path]:
    """Hold the folder of this run alone; yield where the rows are."""
    rows = folder / "rows"
    try:
        rows.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise value_error("out", "is a folder that can be written", got=error) from None
    try:
        if not take_lock(handle):
            raise value_error("out", "is in use by another sweep", got=folder)
        _check_same(folder, run)
        yield rows
    finally:
        os.close(handle)


def _check_same(folder: Path, run: dict[str, Any]) -> None:
    """Write what the rows depend on; refuse a folder whose rows depend on something else."""
    path = folder / "run.json"
    if not path.exists():
        if any((folder / "rows").iterdir()):
            raise value_error("out", "has rows of a sweep, but no run.json", got=folder)
        write_json(path, run)
        return
    there = read_header(folder)
    was, now = _flat(there), _flat(run)
    other = [
        f"{name} {was.get(name)} there, {now.get(name)} here"
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
    ]
    if other:
        hint = "name another folder, or remove this one"
        rule = "has the rows of another sweep"
        raise value_error("out", rule, got=f"{folder}: {'; '.join(other)}", hint=hint)


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    return {**run, "versions": None, **run["versions"]}


def _run(job: SweepJob, total: int, tell: Tell) -> None:
    """Start the worker, follow what it tells, and end it with this process or before."""
    done = total - len(job.chosen)
    with tempfile.TemporaryFile() as errors, _worker(errors) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        tell(done, total, "")
        worker.stdin.write(json.dumps(asdict(job)) + "\n")
        worker.stdin.flush()
        ended = False
        for line in worker.stdout:
            event = json.loads(line)
            if "failed" in event:
                raise RuntimeError(f"the sweep failed: {event['failed']}")
            ended = "end" in event
            if not ended:
                done += 1
                tell(done, total, event["done"])
        if not ended:
            raise RuntimeError(f"the worker of the sweep died ({_last_line(errors)})")


@contextlib.contextmanager
def _worker(errors: Any) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join(os.path.abspath(one) for one in sys.path)
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    worker = subprocess.Popen(
        [sys.executable, "-m", f"{_HOME}.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        env={**os.environ, **offline, **threads, "PYTHONPATH": path}, start_new_session=True,
    )  # fmt: skip
    try:
        yield worker
    finally:
        _end(worker)


def _end(worker: subprocess.Popen[str]) -> None:
    """Close the worker's input, which is its order to stop; kill it where it does not."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    with contextlib.suppress(OSError):
        worker.stdin.close()
    try:
        worker.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
    worker.stdout.close()


def _last_line(errors: Any) -> str:
    errors.seek(0)
    lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "without a word"
