"""A scan from its beginning, or from where it was stopped, to its table."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from clearhead._core import value_error
from clearhead.heads.corpus import table
from clearhead.heads.corpus.checkpoint import Checkpoint
from clearhead.heads.corpus.sequences import Place, Sequence, Sequences, batch_of, batches, windows
from clearhead.heads.moments import Moments
from clearhead.heads.part import Outline, Tally
from clearhead.heads.survey import Survey

__all__ = ["Job", "Stopped"]

# Sequences of a window: the more, the more have the same length. Documents are kept to its end.
WINDOW, WINDOW_OF_DOCUMENTS = 2048, 512


class Stopped(Exception):
    """The scan was asked to stop, and did so between two batches."""


class Job:
    """One scan. `about` says what makes it this scan: a resumed one must have the same."""

    def __init__(
        self,
        survey: Survey,
        sequences: Sequences,
        checkpoint: Checkpoint,
        about: dict[str, Any],
        *,
        per_document: bool,
        every: float,
    ) -> None:
        self.survey, self.sequences, self.checkpoint = survey, sequences, checkpoint
        self.about, self.per_document, self.every = about, per_document, every
        # Where the window starts, and how many of its sequences are counted.
        self.place, self.done, self.share = Place(), 0, 0.0
        # What the tokenizer refused: before this process began, and before the window.
        self.unencoded: dict[str, Any] = {}
        self.settled: dict[str, Any] = {}
        self.documents: dict[int, Moments] = {}

    def resume(self) -> None:
        """Go on from the checkpoint."""
        moments, state = self.checkpoint.load()
        differ = [name for name in self.about if state["about"].get(name) != self.about[name]]
        if differ:
            lines = "; ".join(
                f"{name} was {state['about'].get(name)!r}, now {self.about[name]!r}"
                for name in differ
            )
            hint = "ask for the same scan, or start over with --force"
            raise value_error("--resume", "is another scan", got=lines, hint=hint)
        outlines = [Outline(*outline) for outline in state["layers"]]
        self.survey.tally = Tally(outlines, moments["corpus"])
        self.survey.sequences, self.survey.tokens = state["sequences"], state["tokens"]
        numbers = state["documents"]
        self.documents = {n: moments["documents"][i] for i, n in enumerate(numbers)}
        self.place, self.done = Place(*state["place"]), state["done"]
        self.share, self.unencoded = state["share"], state["unencoded"]
        self.settled = self.unencoded

    def run(self, tell: Callable[[float, int], None], batch: int) -> None:
        """Read on to the end, and write the table. Raises Stopped where it was asked to."""
        saved = time.monotonic()
        size = WINDOW_OF_DOCUMENTS if self.per_document else WINDOW
        with _asked_to_stop() as asked:
            for window in windows(self.sequences.since(self.place), size):
                for sequences in batches(window, batch, self.done):
                    self._add(sequences)
                    tell(self._share(window), self.survey.tokens)
                    if asked() or time.monotonic() - saved >= self.every:
                        self.save()
                        saved = time.monotonic()
                    if asked():
                        raise Stopped
                self._end(window)
            self._finish()

    def _add(self, sequences: list[Sequence]) -> None:
        moments = self.survey.read(batch_of(sequences))[: len(sequences)]
        self.survey.count(moments, sum(len(sequence.tokens) for sequence in sequences))
        self.done += len(sequences)
        if self.per_document:
            self._add_to_documents(sequences, moments)

    def _add_to_documents(self, sequences: list[Sequence], moments: Moments) -> None:
        assert self.survey.tally is not None
        own = moments[:, : self.survey.tally.of_statistics]
        for number, sequence in enumerate(sequences):
            before = self.documents.get(sequence.record)
            self.documents[sequence.record] = (
                own[number] if before is None else before.merge(own[number])
            )

    def _share(self, window: list[Sequence]) -> float:
        """How much of the corpus is read, about: as much of the window as is counted."""
        lengths = sorted((len(sequence.tokens) for sequence in window), reverse=True)
        part = sum(lengths[: self.done]) / sum(lengths)
        return self.share + (window[-1].share - self.share) * part

    def _end(self, window: list[Sequence]) -> None:
        self.place, self.done, self.share = window[-1].after, 0, window[-1].share
        self.settled = self._all_unencoded()
        over = sorted(number for number in self.documents if number < self.place.record)
        if over:
            assert self.survey.tally is not None
            moments = Moments.stack([self.documents.pop(number) for number in over])
            rows = table.of_documents(over, self.survey.tally.outlines, moments)
            with _writing():
                table.write(self.checkpoint.next_part(), rows, {})
            self.checkpoint.add_part()

    def save(self) -> None:
        """Write a checkpoint."""
        tally = self.survey.tally
        assert tally is not None
        moments = {"corpus": tally.moments}
        if self.documents:
            moments["documents"] = Moments.stack(list(self.documents.values()))
        state = {
            "about": self.about,
            "layers": tally.outlines,
            "documents": list(self.documents),
            "place": self.place,
            "done": self.done,
            "share": self.share,
            "sequences": self.survey.sequences,
            "tokens": self.survey.tokens,
            "unencoded": self.settled,
        }
        with _writing():
            self.checkpoint.save(moments, state)

    def _all_unencoded(self) -> dict[str, Any]:
        """What the tokenizer refused, also before a resume."""
        found = {}
        for reason in {*self.unencoded, *self.sequences.refused}:
            count, place = self.unencoded.get(reason, (0, self.sequences.places.get(reason)))
            found[reason] = (count + self.sequences.refused[reason], place)
        return found

    def problems(self) -> dict[str, tuple[int, str]]:
        """How many records could not be used, by reason, and where the first was."""
        corpus = self.sequences.corpus
        found = {reason: (n, corpus.places[reason]) for reason, n in corpus.problems.items()}
        return found | {reason: tuple(pair) for reason, pair in self._all_unencoded().items()}

    def _finish(self) -> None:
        if not self.survey.sequences:
            reasons = [f"{n} {reason} ({at})" for reason, (n, at) in self.problems().items()]
            got = "; ".join(reasons) or "nothing but blanks"
            raise value_error("CORPUS", "holds no text that can be used", got=got)
        problems = {reason: n for reason, (n, _) in self.problems().items()}
        counts = {"sequences": self.survey.sequences, "tokens": self.survey.tokens}
        about = {**self.about, **counts, "records": self.place.record, "problems": problems}
        target, files = self.checkpoint.target, self.checkpoint.row_files()
        with _writing():
            if self.per_document:
                table.gather(target, files, about)
            else:
                table.write(target, table.of_rows(map(vars, self.survey.rows())), about)
        self.checkpoint.clear()


@contextmanager
def _writing() -> Iterator[None]:
    """Say of a full disk what is left, and what to do."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        hint = "make room; --resume then goes on from the last checkpoint"
        raise value_error("--out", "cannot be written", got=error, hint=hint) from error


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C (or SIGTERM) wait for the end of the batch; a second one does not."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def ask(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, ask) for number in numbers]
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
