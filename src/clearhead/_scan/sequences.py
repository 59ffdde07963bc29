"""From records to batches of sequences, from any place in the corpus on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from clearhead._heads.batch import Batch
from clearhead._scan.corpus import Corpus

__all__ = ["Place", "Sequences", "batch_of", "batches"]

UNENCODED = "not known to the model's tokenizer"


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


def batches(sequences: Iterator[Sequence], size: int) -> Iterator[list[Sequence]]:
    """Take sequences together as they come."""
    batch: list[Sequence] = []
    for sequence in sequences:
        batch.append(sequence)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def batch_of(sequences: list[Sequence]) -> Batch:
    """Put sequences side by side, padded on the right with a token of their own."""
    longest = max(len(sequence.tokens) for sequence in sequences)
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    real = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, mask, sequence in zip(tokens, real, sequences, strict=True):
        row[: len(sequence.tokens)] = torch.tensor(sequence.tokens)
        mask[: len(sequence.tokens)] = True
    return Batch(tokens, real)
