"""From records to windows of sequences, and to batches in which all sequences have one length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch

from clearhead.heads.batch import Batch
from clearhead.heads.corpus.corpus import Corpus

__all__ = ["Place", "Sequence", "Sequences", "batch_of", "batches", "windows"]

UNENCODED = "not known to the model's tokenizer"
# A window ends with its last sequence, or once it has so many tokens.
TOKENS = 1 << 18
# Several sequences run together up to so many tokens: more at once is no faster on a CPU.
TOGETHER = 2048
# Fewer rows than this may be multiplied by other code than many, which rounds in another way.
LEAST = 16


class Place(NamedTuple):
    """Where a scan goes on: the number of a record, and of a sequence in it."""

    record: int = 0
    sequence: int = 0


class Sequence(NamedTuple):
    """Some tokens of a record, with the place of the next sequence."""

    record: int
    tokens: list[int]
    after: Place
    share: float


class Sequences:
    """A corpus as sequences of at most `length` tokens; a longer record gives several."""

    def __init__(
        self, corpus: Corpus, encode: Callable[[str], list[int]], length: int, limit: int | None
    ) -> None:
        self.corpus, self.encode = corpus, encode
        self.length, self.limit = length, limit
        self.refused: Counter[str] = Counter()
        self.places: dict[str, str] = {}

    def since(self, place: Place) -> Iterator[Sequence]:
        """Give the sequences from a place on."""
        for record in self.corpus:
            if self.limit is not None and record.number >= self.limit:
                return
            if record.number < place.record:
                continue
            tokens = self._tokens(record.number, record.text)
            starts = range(0, len(tokens), self.length)
            share = record.share if self.limit is None else (record.number + 1) / self.limit
            for number, start in enumerate(starts):
                if record.number == place.record and number < place.sequence:
                    continue
                last = number == len(starts) - 1
                after = Place(record.number + 1) if last else Place(record.number, number + 1)
                piece = tokens[start : start + self.length]
                yield Sequence(record.number, piece, after, max(share, record.share))

    def _tokens(self, number: int, text: str) -> list[int]:
        try:
            return self.encode(text)
        # What tokenizers raise on text that they do not know, lone surrogates among it.
        except (ValueError, TypeError, UnicodeError) as error:
            reason = str(error).splitlines()[0]
            self.refused[UNENCODED] += 1
            self.places.setdefault(UNENCODED, f"record {number}: {reason}")
            return []


def windows(sequences: Iterator[Sequence], size: int) -> Iterator[list[Sequence]]:
    """Cut what comes into windows of `size` sequences, fewer where they are long."""
    window: list[Sequence] = []
    tokens = 0
    for sequence in sequences:
        window.append(sequence)
        tokens += len(sequence.tokens)
        if len(window) == size or tokens >= TOKENS:
            yield window
            window, tokens = [], 0
    if window:
        yield window


def batches(window: list[Sequence], most: int, done: int = 0) -> Iterator[list[Sequence]]:
    """Batches of a window, after its first `done` sequences: the longest first.

    All sequences of a batch have one length: none is padded, and the order in which sequences are
    counted does not hang on how many run together.
    """
    ordered = sorted(window, key=lambda sequence: -len(sequence.tokens))[done:]
    for length, alike in groupby(ordered, key=lambda sequence: len(sequence.tokens)):
        group = list(alike)
        step = max(1, min(most, TOGETHER // length))
        for start in range(0, len(group), step):
            yield group[start : start + step]


def batch_of(sequences: list[Sequence]) -> Batch:
    """Put sequences of one length side by side; very few tokens are run along with copies."""
    tokens = torch.tensor([sequence.tokens for sequence in sequences])
    return Batch(tokens.repeat(-(-LEAST // tokens.numel()), 1))
