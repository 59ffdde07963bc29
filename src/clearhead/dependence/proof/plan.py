"""Which inputs to perturb in which run, so that every forbidden pair is tested.

A run that perturbs the sources S tests every query that may read none of S. Where the allowed rows
are nested (a causal mask), no black box can be tested with fewer runs than there are rows: the
adjacent pair (i, i+1) needs two runs that agree up to i and differ at i+1, for every i, and a set
of runs that branches at T depths has T leaves. Where they are not (documents, windows), few do.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

__all__ = ["PlannedRun", "make_plan"]

# Above this many different rows the search for the best order costs more than it saves.
MOST_ORDERED = 400


class PlannedRun(NamedTuple):
    """Perturb the inputs at `sources`; the outputs at `queries` must not move. Both are bool."""

    sources: np.ndarray
    queries: np.ndarray


def make_plan(forbidden: np.ndarray) -> list[PlannedRun]:
    """List runs that cover each forbidden pair (query, source), those that cover most first."""
    rows = np.unique(forbidden[forbidden.any(1)], axis=0)
    allowed = (~forbidden).astype(np.float32)
    if not len(rows):
        return []
    if len(rows) <= MOST_ORDERED:
        runs = _greedy(np.concatenate([rows, _shared(rows)]), allowed)
        if len(runs) <= len(rows):
            return runs
    rows = rows[_halving(len(rows))]
    return [PlannedRun(row, row.astype(np.float32) @ allowed.T == 0) for row in rows]


def _greedy(candidates: np.ndarray, allowed: np.ndarray) -> list[PlannedRun]:
    tested = candidates.astype(np.float32) @ allowed.T == 0  # (candidate, query)
    left = 1 - allowed
    gains = ((tested.astype(np.float32) @ left) * candidates).sum(1)
    queue = [(-gain, number) for number, gain in enumerate(gains) if gain]
    heapq.heapify(queue)
    runs = []
    while queue:
        expected, number = heapq.heappop(queue)
        sources, queries = candidates[number], tested[number]
        # Gains only fall, so a candidate whose gain has not changed is still the best of all.
        gain = float(left[np.ix_(queries, sources)].sum())
        if gain < -expected:
            if gain:
                heapq.heappush(queue, (-gain, number))
            continue
        left[np.ix_(queries, sources)] = 0
        runs.append(PlannedRun(sources, queries))
    return runs


def _halving(count: int) -> list[int]:
    """Order 0..count-1 so that every prefix is spread evenly: the middle comes first."""
    bits = max(count - 1, 1).bit_length()
    spread = [int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits)]
    order = [number for number in spread if number < count]
    return order[1:] + order[:1]


def _shared(rows: np.ndarray) -> np.ndarray:
    """List sources that are forbidden to whole groups: runs of rows, and rows that share a bit."""
    numbers = np.arange(len(rows))
    groups = []
    for bit in range(int(len(rows) - 1).bit_length()):
        groups += [(numbers >> bit) & 1 == value for value in (0, 1)]
        blocks = numbers >> bit + 1
        groups += [blocks == block for block in range(blocks[-1] + 1)]
    shared = [rows[group].all(0) for group in groups if group.any()]
    return np.array([row for row in shared if row.any()], bool).reshape(-1, rows.shape[1])
