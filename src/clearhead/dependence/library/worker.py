"""The process of a sweep that has the library loaded, and forks a child for each class.

It is started by `sweep` as `python -m clearhead.dependence.library.worker`, reads a job from its
standard input, and writes a line of JSON for each class that is done. The end of its input is an
order to stop: it kills its children and ends.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from clearhead._core import replacing
from clearhead.dependence.library.questions import (
    MEMORY_LIMIT,
    Question,
    answers,
    asked,
    questions,
    reason_of,
)
from clearhead.dependence.library.rows import (
    FAULT,
    NOT_TESTED,
    UNFIT,
    Row,
    file_of,
    ordered,
    readable,
)
from clearhead.dependence.library.sweep import SweepJob, function_of, write_json

__all__ = ["main"]

# Seconds between two looks at the clock while children are busy.
TICK = 0.2
# Bytes that a class may print, and lines of them that are kept for each question.
MOST_PRINTED, LINES_KEPT = 1 << 26, 3
# What a child has imported already: what most classes need.
PRELOADED = ("transformers.modeling_utils", "transformers.generation", "transformers.cache_utils")


class Ask(NamedTuple):
    """One question on one backend."""

    backend: str
    question: Question


def main() -> None:
    """Read the job, run it, and tell each class that is done, or why the sweep failed."""
    with os.fdopen(os.dup(1), "w") as events, _redirected(os.devnull):
        # The worker ends with its input, not with the terminal's interrupt.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            job = SweepJob.of(json.loads(_first_line()))
            stopped = _sweep(job, functools.partial(_tell, events))
        except Exception as error:
            _tell(events, failed=readable(f"{type(error).__name__}: {error}"))
        else:
            if not stopped:
                _tell(events, end=True)


def _tell(events: Any, **event: Any) -> None:
    print(json.dumps(event), file=events, flush=True)


def _first_line() -> bytes:
    """Read a line and no more, so that the end of the input can be waited for."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _sweep(job: SweepJob, tell: Callable[..., None]) -> bool:
    """Audit the classes of a job, several at once; whether it was stopped before the end."""
    _preload(job)
    subjects = {(one.name, one.mapping): one for one in function_of(job.library.catalogue)()}
    waiting, running = deque(subjects[one] for one in job.chosen), list[_ClassRun]()
    torch.set_num_threads(1)
    gc.freeze()  # the children share what is there by now
    try:
        while waiting or running:
            while waiting and len(running) < job.processes:
                running.append(_ClassRun(job, waiting.popleft()))
            if _told_to_stop([part for one in running for part in one.parts]):
                return True
            for one in [one for one in running if one.is_done()]:
                running.remove(one)
                one.write()
                tell(done=one.subject.name)
    finally:
        for one in running:
            one.end()
    return False


def _preload(job: SweepJob) -> None:
    for name in PRELOADED if "transformers" in job.library.packages else ():
        with contextlib.suppress(ImportError):  # other versions have other files
            import_module(name)
    function_of(job.library.build)


def _told_to_stop(parts: list[Any]) -> bool:
    """Wait until a child has something to say; whether the input has ended."""
    return 0 in wait([*parts, 0], TICK) and not os.read(0, 1)


class _ClassRun:
    """The audit of one class: its child, what it was asked, and the rows so far."""

    def __init__(self, job: SweepJob, subject: Any) -> None:
        self.job, self.subject, self.rows = job, subject, list[Row]()
        self.scripts: dict[str, str] = {}
        asks = questions(subject.mapping, job.forms)
        self.left = [Ask(backend, one) for backend in job.backends for one in asks]
        self.deadline = time.monotonic() + job.limit
        self._start()

    @property
    def parts(self) -> list[Any]:
        """What to wait for."""
        return [self.messages, self.child.sentinel]

    def is_done(self) -> bool:
        """Take what the child has said; go on with another one where it has died."""
        self._receive()
        if self.left and time.monotonic() > self.deadline:
            self.end()
            self._give_up()
        if self.child.is_alive() and self.left:
            return False
        self._receive()
        self.end()
        if self.left:
            self._lose(_death(self.child.exitcode))
            if self.left:
                self._start()
        return not self.left

    def end(self) -> None:
        """End the child, if it has not ended."""
        self.child.kill()
        self.child.join()

    def write(self) -> None:
        """Write the rows, whole, and the scripts of the findings before them."""
        folder = Path(self.job.folder)
        for name, text in self.scripts.items():
            path = folder / "scripts" / name
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as part:
                part.write_text(text, encoding="utf-8")
        subject = self.subject
        path = folder / "rows" / file_of(subject.name, subject.mapping)
        write_json(path, {"rows": [row.as_dict() for row in ordered(self.rows)]})

    def _start(self) -> None:
        self.building, self.doing = "", None
        self.messages, sender = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")
        self.child = context.Process(
            target=_child, args=(self.job, self.subject, list(self.left), sender)
        )
        self.child.start()
        sender.close()

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self.messages.poll():
                kind, value = self.messages.recv()
                getattr(self, f"_on_{kind}")(value)

    def _on_building(self, backend: str) -> None:
        self.building = backend

    def _on_asking(self, ask: Ask) -> None:
        self.building, self.doing = "", ask

    def _on_rows(self, answer: tuple[Ask, list[Row], dict[str, str]]) -> None:
        ask, rows, scripts = answer
        self.left.remove(ask)
        self.rows += rows
        self.scripts |= scripts
        self.doing = None

    def _lose(self, reason: str) -> None:
        """Note what a child died of: at its question, or for all that it built the class for."""
        lost = [one for one in self.left if one == self.doing or one.backend == self.building]
        while_building = "while it was built, " if self.building else ""
        for ask in lost or list(self.left):
            self._unanswered(ask, while_building + reason)

    def _give_up(self) -> None:
        limit = f"the limit of {self.job.limit:g} s"
        for ask in list(self.left):
            current = ask == self.doing or ask.backend == self.building
            self._unanswered(ask, f"ran into {limit}" if current else f"left over at {limit}")

    def _unanswered(self, ask: Ask, reason: str) -> None:
        self.left.remove(ask)
        self.rows.append(replace(_row(self.subject, ask), verdict=NOT_TESTED, reason=reason))


def _death(code: int | None) -> str:
    if code is None or code >= 0:
        return f"the class ended its process with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the process of the class was ended by {name}"


def _row(subject: Any, ask: Ask) -> Row:
    row = Row(subject.name, subject.mapping, ask.backend, ask.question.form)
    return asked(row, ask.question)


def _child(job: SweepJob, subject: Any, left: list[Ask], sender: Connection) -> None:
    """Answer the questions that are left, in a process of its own."""
    with tempfile.TemporaryFile() as said, _redirected(said.fileno()):
        _limit_memory(job.memory)
        for backend in dict.fromkeys(ask.backend for ask in left):
            sender.send(("building", backend))
            asks = [ask for ask in left if ask.backend == backend]
            make = functools.partial(
                function_of(job.library.build), subject, backend, seed=job.seed
            )
            try:
                built = make()
            except BaseException as error:  # sys.exit() of a class, too
                for ask in asks:
                    row = _not_built(subject, ask, error)
                    sender.send(("rows", (ask, _measured([row], job.memory), {})))
                continue
            for ask in asks:
                sender.send(("asking", ask))
                sender.send(("rows", (ask, *_answer(job, subject, ask, built, make, said))))


def _not_built(subject: Any, ask: Ask, error: BaseException) -> Row:
    row = replace(_row(subject, ask), verdict=NOT_TESTED)
    if type(error).__name__ != "NotBuilt":
        return replace(row, reason=f"could not be built: {reason_of(error)}")
    unfit = "does not support attn_implementation" in str(error)
    return replace(row, reason=f"{UNFIT if unfit else 'could not be built: '}{readable(error)}")


def _answer(
    job: SweepJob, subject: Any, ask: Ask, built: Any, make: Callable[[], Any], said: Any
) -> tuple[list[Row], dict[str, str]]:
    row, start, began = _row(subject, ask), os.fstat(said.fileno()).st_size, time.monotonic()
    scripts: dict[str, str] = {}
    try:
        rows = answers(row, ask.question, built)
        if job.library.proves:
            rows = [_proven(one, make, scripts) for one in rows]
    except BaseException as error:  # sys.exit() of a class, too
        rows = [replace(row, verdict=NOT_TESTED, reason=reason_of(error))]
    heard = _heard(said, start)
    seconds = round(time.monotonic() - began, 3)
    rows = [replace(one, seconds=seconds, notes=(*one.notes, *heard)) for one in rows]
    return _measured(rows, job.memory), scripts


def _measured(rows: list[Row], memory: float) -> list[Row]:
    """Put the number into reasons that name the memory limit."""
    limit = f"{MEMORY_LIMIT} of {memory:g} GiB"
    return [replace(row, reason=row.reason.replace(MEMORY_LIMIT, limit, 1)) for row in rows]


def _proven(row: Row, make: Callable[[], Any], scripts: dict[str, str]) -> Row:
    """Run a finding again without the audit, and keep the script that does so."""
    if row.verdict != FAULT:
        return row
    from clearhead.dependence.library.classify import settled
    from clearhead.dependence.library.rerun import confirm

    proof = confirm(row, make)
    row = settled(row, proof)
    if not proof.script:
        return row
    words = (row.name, row.mapping, row.backend, row.form, row.variant, row.detail)
    name = "-".join("".join(c if c.isalnum() else "_" for c in word) for word in words if word)
    scripts[f"{name}.py"] = proof.script
    return replace(row, script=f"scripts/{name}.py")


def _heard(said: Any, start: int) -> list[str]:
    """Give the first lines that a class has printed since, made printable."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # Not by `read`, which would move where the class writes next.
    text = os.pread(said.fileno(), 1 << 14, start).decode("utf-8", "replace")
    lines = dict.fromkeys(line for one in text.splitlines() if (line := readable(one)))
    return [f"printed: {line}" for line in list(lines)[:LINES_KEPT]]


@contextlib.contextmanager
def _redirected(to: str | int) -> Iterator[None]:
    """Send what this process prints elsewhere, for good."""
    target = os.open(to, os.O_WRONLY) if isinstance(to, str) else to
    os.dup2(target, 1)
    if isinstance(to, int):
        os.dup2(target, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    yield


def _limit_memory(gib: float) -> None:
    """Limit what the process may allocate beyond what it has by now, where the system can."""
    try:
        import resource
    except ImportError:
        return
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return
    most = min(pages * resource.getpagesize() + int(gib * (1 << 30)), sys.maxsize)
    for kind, number in ((resource.RLIMIT_AS, most), (resource.RLIMIT_FSIZE, MOST_PRINTED)):
        _, hard = resource.getrlimit(kind)
        number = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(kind, (number, hard))


if __name__ == "__main__":
    main()
