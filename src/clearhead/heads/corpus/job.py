"""The job of a scan: from its beginning, or from a checkpoint, to its table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clearhead._core import StopRequests, value_error
from clearhead.heads.corpus import table
from clearhead.heads.corpus.checkpoint import Checkpoint
from clearhead.heads.corpus.sequences import (
    ResumePoint,
    Sequences,
    TokenSequence,
    batch_of,
    batches,
    windows,
)
from clearhead.heads.corpus.shards import Shard, WindowMoments, check_same, windows_in, write_shard
from clearhead.heads.layer_moments import LayerOutline, Totals
from clearhead.heads.moments import Moments
from clearhead.heads.survey import Survey

__all__ = ["Job", "Stopped"]

# Sequences in a window: a larger one has more sequences of each length. Documents stay in memory
# until its end.
WINDOW, WINDOW_OF_DOCUMENTS = 2048, 512


class Stopped(Exception):
    """The scan stopped on request, between two batches."""


class Job:
    """One scan. `about` identifies it: a resumed scan must have the same."""

    def __init__(
        self,
        survey: Survey,
        sequences: Sequences,
        checkpoint: Checkpoint,
        about: dict[str, Any],
        *,
        per_document: bool,
        every: float,
        shard: Shard | None = None,
    ) -> None:
        self.survey, self.sequences, self.checkpoint = survey, sequences, checkpoint
        self.about, self.per_document, self.every = about, per_document, every
        self.shard = shard
        # The windows that were counted: the whole of them, or each where this is a shard, so that
        # any number of shards adds up in the same order.
        self.window, self.counted = 0, WindowMoments(shard is not None)
        # Where the window starts, how many of its sequences are counted, the share of the corpus.
        self.place, self.done, self.share = ResumePoint(), 0, 0.0
        # Records that the tokenizer refused: before this process started, and before the window.
        self.unencoded: dict[str, Any] = {}
        self.settled: dict[str, Any] = {}
        self.documents: dict[int, Moments] = {}

    def resume(self) -> None:
        """Restore the state of the checkpoint."""
        moments, state = self.checkpoint.load()
        about = self._identity
        differ = [name for name in about if state["about"].get(name) != about[name]]
        if differ:
            lines = "; ".join(
                f"{name} was {state['about'].get(name)!r}, now {about[name]!r}" for name in differ
            )
            hint = "ask for the same scan, or start over with --force"
            raise value_error("--resume", "is another scan", got=lines, hint=hint)
        outlines = [LayerOutline(*outline) for outline in state["layers"]]
        self.survey.totals = Totals(outlines, moments["corpus"])
        self.window, self.counted.windows = state["window"], windows_in(moments)
        self.survey.sequences, self.survey.tokens = state["sequences"], state["tokens"]
        numbers = state["documents"]
        self.documents = {n: moments["documents"][i] for i, n in enumerate(numbers)}
        self.place, self.done = ResumePoint(*state["place"]), state["done"]
        self.share, self.unencoded = state["share"], state["unencoded"]
        self.settled = self.unencoded

    def check_same(self, path: Path) -> None:
        """Refuse a file that another scan or another shard wrote."""
        assert self.shard is not None
        check_same(self.about, self.shard, path)

    @property
    def _identity(self) -> dict[str, Any]:
        return {**self.about, "shard": None if self.shard is None else str(self.shard)}

    def run(self, report: Callable[[float, int], None], batch: int, stop: StopRequests) -> None:
        """Read to the end and write the table. Raises `Stopped` on a request to stop."""
        saved = time.monotonic()
        size = WINDOW_OF_DOCUMENTS if self.per_document else WINDOW
        with stop.deferred():
            for window in windows(self.sequences.since(self.place), size):
                for sequences in batches(window, batch, self.done) if self._mine() else ():
                    self._add(sequences)
                    report(self._share(window), self.survey.tokens)
                    if time.monotonic() - saved >= self.every:
                        self.save()
                        saved = time.monotonic()
                    if stop.asked:
                        self._stop()
                self._end(window)
                if stop.asked:
                    self._stop()
            self._finish()

    def _mine(self) -> bool:
        """Whether the window is counted here, and not by another shard."""
        return self.shard is None or self.shard.has(self.window)

    def _stop(self) -> None:
        """Keep what there is; a shard may have counted nothing yet."""
        if self.survey.totals is not None:
            self.save()
        raise Stopped

    def _add(self, sequences: list[TokenSequence]) -> None:
        moments = self.survey.read(batch_of(sequences))[: len(sequences)]
        self.survey.count(moments, sum(len(sequence.tokens) for sequence in sequences))
        self.done += len(sequences)
        if self.per_document:
            self._add_to_documents(sequences, moments)

    def _add_to_documents(self, sequences: list[TokenSequence], moments: Moments) -> None:
        assert self.survey.totals is not None
        own = moments[:, : self.survey.totals.statistics_size]
        for number, sequence in enumerate(sequences):
            before = self.documents.get(sequence.record)
            self.documents[sequence.record] = (
                own[number] if before is None else before.merge(own[number])
            )

    def _share(self, window: list[TokenSequence]) -> float:
        """Estimate the share of the corpus that is read, from the counted part of the window."""
        lengths = sorted((len(sequence.tokens) for sequence in window), reverse=True)
        part = sum(lengths[: self.done]) / sum(lengths)
        return self.share + (window[-1].share - self.share) * part

    def _end(self, window: list[TokenSequence]) -> None:
        self.place, self.done, self.share = window[-1].after, 0, window[-1].share
        self.settled = self._all_unencoded()
        totals = self.survey.totals
        if totals is not None and self._mine():
            self.counted.add(self.window, totals.moments)
            self.survey.totals = Totals(totals.outlines)
        self.window += 1
        finished = sorted(number for number in self.documents if number < self.place.record)
        if finished:
            assert self.survey.totals is not None
            moments = Moments.stack([self.documents.pop(number) for number in finished])
            rows = table.of_documents(finished, self.survey.totals.outlines, moments)
            with self._writing():
                table.write(self.checkpoint.next_part(), rows, {})
            self.checkpoint.add_part()

    def save(self) -> None:
        """Write a checkpoint."""
        totals = self.survey.totals
        assert totals is not None
        moments = {"corpus": totals.moments, **self.counted.named()}
        if self.documents:
            moments["documents"] = Moments.stack(list(self.documents.values()))
        state = {
            "about": self._identity,
            "layers": totals.outlines,
            "documents": list(self.documents),
            "place": self.place,
            "done": self.done,
            "window": self.window,
            "share": self.share,
            "sequences": self.survey.sequences,
            "tokens": self.survey.tokens,
            "unencoded": self.settled,
        }
        with self._writing():
            self.checkpoint.save(moments, state)

    def _all_unencoded(self) -> dict[str, Any]:
        """Records that the tokenizer refused, also before a resume."""
        found = {}
        for reason in {*self.unencoded, *self.sequences.refused}:
            count, place = self.unencoded.get(reason, (0, self.sequences.places.get(reason)))
            found[reason] = (count + self.sequences.refused[reason], place)
        return found

    def problems(self) -> dict[str, tuple[int, str]]:
        """How many records could not be used, and the place of the first, by reason."""
        corpus = self.sequences.corpus
        found = {reason: (n, corpus.places[reason]) for reason, n in corpus.problems.items()}
        return found | {reason: tuple(pair) for reason, pair in self._all_unencoded().items()}

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Explain a failed write: what is kept, and what to do."""
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as error:
            kept = "--resume then goes on from the last checkpoint"
            hint = f"make room; {kept if self.checkpoint.exists else 'nothing is kept so far'}"
            raise value_error("--out", "cannot be written", got=error, hint=hint) from error

    def _finish(self) -> None:
        if not self.survey.sequences and self.shard is None:
            reasons = [f"{n} {reason} ({at})" for reason, (n, at) in self.problems().items()]
            got = "; ".join(reasons) or "nothing but blanks"
            raise value_error("CORPUS", "holds no text that can be used", got=got)
        problems = {reason: n for reason, (n, _) in self.problems().items()}
        counts = {"sequences": self.survey.sequences, "tokens": self.survey.tokens}
        about = {**self.about, **counts, "records": self.place.record, "problems": problems}
        target, files = self.checkpoint.target, self.checkpoint.row_files()
        outlines = [] if self.survey.totals is None else self.survey.totals.outlines
        if outlines:
            self.survey.totals = Totals(outlines, self.counted.whole())
        with self._writing():
            if self.shard is not None:
                write_shard(target, self.shard, about, self.window, outlines, self.counted)
            elif self.per_document:
                table.gather(target, files, about)
            else:
                table.write(target, table.of_rows(map(vars, self.survey.rows())), about)
        self.checkpoint.clear()
