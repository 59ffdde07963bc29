"""Windows of token sequences, and batches in which all sequences have one length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch

from clearhead.heads.batch import Batch
from clearhead.heads.corpus.corpus import Corpus, CorpusRecord

__all__ = ["ResumePoint", "Sequences", "TokenSequence", "batch_of", "batches", "windows"]

UNENCODED = "not known to the model's tokenizer"
# A window ends at its limit of sequences, or once it holds so many tokens.
TOKENS = 1 << 18
# Sequences run together up to so many tokens: more at once is no faster on a CPU.
TOGETHER = 2048
# Products of fewer rows may take another code path, which rounds differently.
LEAST = 16


class ResumePoint(NamedTuple):
    """Where a scan resumes: the number of a record, and of a sequence in it."""

    record: int = 0
    sequence: int = 0


class TokenSequence(NamedTuple):
    """Some tokens of a record, and the resume point after them."""

    record: int
    tokens: list[int]
    after: ResumePoint
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

    def since(self, place: ResumePoint) -> Iterator[TokenSequence]:
        """Yield the sequences from a resume point on."""
        for record in self.corpus:
            if self.limit is not None and record.number >= self.limit:
                return
            if record.number < place.record:
                continue
            tokens = self._tokens(record)
            starts = range(0, len(tokens), self.length)
            share = record.share if self.limit is None else (record.number + 1) / self.limit
            for number, start in enumerate(starts):
                if record.number == place.record and number < place.sequence:
                    continue
                last = number == len(starts) - 1
                after = ResumePoint(
                    *((record.number + 1,) if last else (record.number, number + 1))
                )
                piece = tokens[start : start + self.length]
                yield TokenSequence(record.number, piece, after, max(share, record.share))

    def _tokens(self, record: CorpusRecord) -> list[int]:
        try:
            return self.encode(record.text)
        # What tokenizers raise on text that they cannot encode, such as lone surrogates.
        except (ValueError, TypeError, UnicodeError) as error:
            reason = str(error).splitlines()[0]
            self.refused[UNENCODED] += 1
            self.places.setdefault(UNENCODED, f"record {record.number}, {record.place}: {reason}")
            return []


def windows(sequences: Iterator[TokenSequence], size: int) -> Iterator[list[TokenSequence]]:
    """Cut a stream into windows of `size` sequences, fewer where they are long."""
    window: list[TokenSequence] = []
    tokens = 0
    for sequence in sequences:
        window.append(sequence)
        tokens += len(sequence.tokens)
        if len(window) == size or tokens >= TOKENS:
            yield window
            window, tokens = [], 0
    if window:
        yield window


def batches(window: list[TokenSequence], most: int, done: int = 0) -> Iterator[list[TokenSequence]]:
    """Yield the batches of a window after its first `done` sequences, longest first.

    All sequences of a batch have one length: none is padded, and the order in which sequences are
    counted does not depend on the batch size.
    """
    ordered = sorted(window, key=lambda sequence: -len(sequence.tokens))[done:]
    for length, alike in groupby(ordered, key=lambda sequence: len(sequence.tokens)):
        group = list(alike)
        step = max(1, min(most, TOGETHER // length))
        for start in range(0, len(group), step):
            yield group[start : start + step]


def batch_of(sequences: list[TokenSequence]) -> Batch:
    """Stack sequences of one length; very few tokens are repeated to reach `LEAST`."""
    tokens = torch.tensor([sequence.tokens for sequence in sequences])
    return Batch(tokens.repeat(-(-LEAST // tokens.numel()), 1))
