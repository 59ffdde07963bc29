"""Record the bits of random calls, and compare them after a change that may move none of them.

    python benchmarks/bits.py record FILE [--problems 2000] [--seed 0] [--force]
    python benchmarks/bits.py compare FILE

A problem is drawn from its number alone: a call of `attend`, a layer, or a model that is watched or
cut. The file holds a SHA-256 of each output and gradient, and what the bits depend on. Only public
names are used, so that one script runs on the tree before and after a change of the internals:
PYTHONPATH chooses the tree, CLEARHEAD_ISA the kernel. `compare` exits with 1 where a bit differs,
and with 2 where the file cannot be compared here.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import clearhead
import draws
import machine
import problems
import subjects

# Each kind of problem as often as it stands here.
KINDS = (
    16 * (problems.attend,) + 2 * (problems.multihead, subjects.watched) + 2 * (subjects.shipped,)
)
HERE, SCRIPTS = Path(__file__).parent, ("draws.py", "problems.py", "subjects.py")
Found = dict[str, Any]


def digest(value: Any) -> str:
    """A SHA-256 of a tensor's type, shape and bytes, or of how another value prints."""
    if not isinstance(value, Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    told = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode())
    flat = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
    told.update(flat.view(torch.uint8).numpy().tobytes())
    return told.hexdigest()


def solve(seed: int, number: int) -> Found:
    """What one problem is made of, and the digest of each of its outputs."""
    draw = draws.Draw(seed, number)
    kind = draw.dice.choice(KINDS)
    outputs: dict[str, Any] = {}
    ended = {}
    try:
        outputs.update(kind(draw))
    except Exception as error:
        how = "refused" if "cannot serve this call" in str(error) else "raised"
        ended = {how: type(error).__name__}
    digests = {name: digest(value) for name, value in outputs.items()} | ended
    return {"made of": f"{kind.__name__}: {' '.join(draw.words)}", "outputs": digests}


def solved(seed: int, count: int) -> Iterator[Found]:
    """The problems in their order, on one thread."""
    torch.set_num_threads(1)
    with quiet():
        yield from (solve(seed, number) for number in range(count))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that odd problems bring, and those that torch logs as it compiles."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class Misuse(Exception):
    """What the user has to do something about."""


def place() -> Found:
    """What the bits depend on beside the package."""
    return {
        "problems": digest([HERE.joinpath(name).read_text("utf-8") for name in SCRIPTS])[:12],
        "machine": machine.cpu(),
        "kernel": kernel(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": 1,
    }


def kernel() -> str:
    """The instruction set that the kernel takes, as the command says it."""
    home = str(Path(str(clearhead.__file__)).parent.parent)
    done = subprocess.run(
        [sys.executable, "-m", "clearhead", "info", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([home, *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Misuse(f"clearhead info: {done.stderr.strip()}")
    return json.loads(done.stdout)["implementations"]["native"].split()[0]


def record(path: Path, count: int, seed: int, force: bool) -> int:
    """Solve the problems and write the file, whole or not at all."""
    if path.exists() and not force:
        raise Misuse(f"{path} exists; --force writes over it")
    if not path.parent.is_dir() or count < 1:
        raise Misuse("record takes a file in a directory that exists, and at least one problem")
    here, found = place(), list(solved(seed, count))
    write(path, {"place": here, "seed": seed, "problems": found})
    outputs = [problem["outputs"] for problem in found]
    ends = Counter(f"{how} {x[how]}" for x in outputs for how in ("refused", "raised") if how in x)
    for end, number in sorted(ends.items()):
        print(f"{number} problems: {end}")
    print(f"Wrote {path}: {count} problems, {sum(map(len, outputs))} outputs")
    return 0


def write(path: Path, document: Found) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(document, indent=0), encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def load(path: Path) -> tuple[int, list[Found]]:
    """The seed and the problems of a file that was recorded in a place like this."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        there, seed, found = (document[name] for name in ("place", "seed", "problems"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Misuse(f"{path} is no record of bits: {error!r}") from None
    here = place()
    others = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if others:
        told = (f"{name} {there.get(name)!r}, here {here.get(name)!r}" for name in others)
        raise Misuse(f"{path} was recorded elsewhere: {'; '.join(told)}")
    return seed, found


def compare(path: Path) -> int:
    """Solve the problems of a file again, and print each output whose bits are others."""
    seed, before = load(path)
    differ = 0
    for number, (then, now) in enumerate(zip(before, solved(seed, len(before)), strict=True)):
        found = differences(then["outputs"], now["outputs"])
        differ += bool(found)
        if found:
            print(f"problem {number}, {now['made of']}", *found, sep="\n    ", flush=True)
    print(f"{len(before)} problems: {differ} differ")
    return 1 if differ else 0


def differences(then: Found, now: Found) -> list[str]:
    """Say which outputs are others: their bits, or whether they came at all."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return [f"{name}: {str(then.get(name))[:12]} -> {str(now.get(name))[:12]}" for name in names]


def main(arguments: list[str] | None = None) -> int:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "compare"):
        commands.add_parser(name).add_argument("file", type=Path)
    recording = commands.choices["record"]
    recording.add_argument("--problems", type=int, default=2000)
    recording.add_argument("--seed", type=int, default=0)
    recording.add_argument("--force", action="store_true")
    given = parser.parse_args(arguments)
    try:
        if given.command == "compare":
            return compare(given.file)
        return record(given.file, given.problems, given.seed, given.force)
    except Misuse as error:
        print(f"bits: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
