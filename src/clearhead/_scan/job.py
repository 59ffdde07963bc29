"""A scan from its beginning, or from where it was stopped, to its table."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clearhead._heads.batch import PaddingIsRead
from clearhead._heads.part import Layer, Part
from clearhead._scan import table
from clearhead._scan.checkpoint import Checkpoint
from clearhead._scan.sequences import Place, Sequence, Sequences, batch_of, batches
from clearhead.errors import value_error
from clearhead.heads import Survey

__all__ = ["Job", "Stopped"]


class Stopped(Exception):
    """The scan was asked to stop, and did so between two batches."""


class Job:
    """One scan. `about` says what makes it this scan: a resumed one must have the same."""

    def __init__(
        self,
        survey: Survey,
        sequences: Sequences,
        target: Path,
        about: dict[str, Any],
        *,
        per_document: bool,
        every: float,
    ) -> None:
        self.survey, self.sequences, self.target = survey, sequences, target
        self.about, self.per_document, self.every = about, per_document, every
        self.checkpoint = Checkpoint(target)
        self.place, self.share = Place(), 0.0
        self.unencoded: dict[str, Any] = {}
        self.documents: dict[int, list[Layer]] = {}
        self._rows: list[dict[str, Any]] = []

    def resume(self) -> None:
        """Go on from the checkpoint."""
        layers, state = self.checkpoint.load()
        differ = [name for name in self.about if state["about"].get(name) != self.about[name]]
        if differ:
            lines = "; ".join(
                f"{name} was {state['about'].get(name)!r}, now {self.about[name]!r}"
                for name in differ
            )
            hint = "ask for the same scan, or start over with --force"
            raise value_error("--resume", "is another scan", got=lines, hint=hint)
        self.survey.layers = layers.pop("corpus")
        self.survey.sequences, self.survey.tokens = state["sequences"], state["tokens"]
        self.documents = {int(name): found for name, found in layers.items()}
        self.place, self.share = Place(*state["place"]), state["share"]
        self.unencoded = state["unencoded"]

    def run(self, tell: Callable[[float, int], None], batch: int) -> None:
        """Read on to the end, and write the table. Raises Stopped where it was asked to."""
        saved = time.monotonic()
        with _asked_to_stop() as asked:
            for sequences in batches(self.sequences.since(self.place), batch):
                self._add(sequences)
                tell(self.share, self.survey.tokens)
                if asked() or time.monotonic() - saved >= self.every:
                    self.save()
                    saved = time.monotonic()
                if asked():
                    raise Stopped
            self._finish()

    def _add(self, sequences: list[Sequence]) -> None:
        batch = batch_of(sequences)
        try:
            parts = self.survey.read(batch)
        except PaddingIsRead:
            # A model that reads padding gets none: it sees each sequence alone.
            for sequence in sequences:
                alone = batch_of([sequence])
                self._count(alone, [sequence], self.survey.read(alone))
        else:
            self._count(batch, sequences, parts)
        self.place, self.share = sequences[-1].after, sequences[-1].share

    def _count(self, batch: Any, sequences: list[Sequence], parts: list[Part]) -> None:
        self.survey.count(batch, parts)
        if not self.per_document:
            return
        for number, sequence in enumerate(sequences):
            new = [part.sequence(number) for part in parts]
            old = self.documents.get(sequence.record)
            self.documents[sequence.record] = (
                [a.merge(b) for a, b in zip(old, new, strict=True)] if old else new
            )
        self._close(sequences[-1].after.record)

    def _close(self, record: int) -> None:
        """Turn the documents before a record into rows."""
        for document in [number for number in self.documents if number < record]:
            for number, layer in enumerate(self.documents.pop(document)):
                for head in range(layer.heads):
                    self._rows += [
                        {"document": document, **vars(row)}
                        for row in Survey.rows_of(layer, number, head)
                        if row.count
                    ]

    def save(self) -> None:
        """Write a checkpoint."""
        self.checkpoint.add_rows(self._rows)
        self._rows = []
        layers = {"corpus": self.survey.layers}
        layers |= {str(number): found for number, found in self.documents.items()}
        state = {
            "about": self.about,
            "place": self.place,
            "share": self.share,
            "sequences": self.survey.sequences,
            "tokens": self.survey.tokens,
            "unencoded": self._all_unencoded(),
        }
        self.checkpoint.save(layers, state)

    def _all_unencoded(self) -> dict[str, Any]:
        """What the tokenizer refused, also before a resume: those records are not read again."""
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
            raise value_error("CORPUS", "holds no text that can be used", got="; ".join(reasons))
        problems = {reason: n for reason, (n, _) in self.problems().items()}
        counts = {"sequences": self.survey.sequences, "tokens": self.survey.tokens}
        about = {**self.about, **counts, "records": self.place.record, "problems": problems}
        if self.per_document:
            self._close(self.place.record)
            self.checkpoint.add_rows(self._rows)
            table.gather(self.target, self.checkpoint.row_files(), about)
        else:
            table.write(self.target, (vars(row) for row in self.survey.rows()), about)
        self.checkpoint.clear()


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
