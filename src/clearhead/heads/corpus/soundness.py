"""Validation of a table: damaged, missing and duplicate rows are errors, not results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from clearhead.heads.statistics import STATISTICS

__all__ = ["faults_of"]

# The statistic with one value for all sequences: undefined for fewer than two.
VARIABILITY = "variability"
# More layers or heads than any model has: larger numbers are damage.
LARGEST = 1 << 16
# Tolerance for the rounding of a mean, at the ends of its range.
SLACK = 1e-3
_INTEGERS, _FLOATS, _TEXTS = ("layer", "head", "count"), ("mean", "variance"), ("module", "unit")


def faults_of(about: Any, table: Any) -> Iterator[str]:
    """Yield what is wrong with a table and its metadata; one fault may hide others."""
    for name, kind in (("model", str), ("corpus", str), ("tokens", int)):
        if not isinstance(about.get(name), kind) or isinstance(about[name], bool):
            yield f"its metadata has no {name}"
            return
    if about["tokens"] < 0:
        yield f"its metadata has {about['tokens']} tokens"
        return
    found = list(_faults_of_columns(table))
    if not found and not table.num_rows:
        found = ["it has no rows"]
    if not found and "rows" in about and about["rows"] != table.num_rows:
        found = [f"it has {table.num_rows} rows, and was written with {about['rows']!r}"]
    yield from found or _faults_of_rows(_Columns(table), about["tokens"])


def _faults_of_columns(table: Any) -> Iterator[str]:
    import pyarrow.types as types

    documents = ("document",) if "document" in table.schema.names else ()
    checks = {
        **dict.fromkeys((*documents, *_INTEGERS), types.is_integer),
        **dict.fromkeys(_FLOATS, types.is_floating),
        **dict.fromkeys((*_TEXTS, "statistic"), _is_text),
    }
    for name, check in checks.items():
        if table.schema.names.count(name) != 1:
            yield f"it has {table.schema.names.count(name)} columns {name!r}"
        elif not check(table.schema.field(name).type):
            yield f"its column {name!r} is {table.schema.field(name).type}"
        elif name != "variance" and table[name].null_count:
            yield f"its column {name!r} has nulls"


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind)


class _Columns:
    """The columns of a table as arrays; `statistic` and `unit` number the names in lists."""

    def __init__(self, table: Any) -> None:
        self.document = table["document"].to_numpy() if "document" in table.schema.names else None
        self.layer, self.head, self.count = (table[name].to_numpy() for name in _INTEGERS)
        self.mean = table["mean"].to_numpy()
        self.variance = table["variance"].to_numpy(zero_copy_only=False)
        self.no_variance = table["variance"].is_null().to_numpy()
        self.names, self.statistic = _numbered(table["statistic"])
        self.units, self.unit = _numbered(table["unit"])

    def name(self, at: Any) -> str:
        """Name the statistic of the first of some rows."""
        return repr(self.names[self.statistic[at][0]])

    def each(self, name: str) -> Any:
        """Return which rows hold a statistic."""
        at = self.names.index(name) if name in self.names else -1
        return self.statistic == at


def _numbered(column: Any) -> tuple[list[str], Any]:
    import pyarrow

    plain = column.cast(pyarrow.string()).combine_chunks().dictionary_encode()
    if isinstance(plain, pyarrow.ChunkedArray):
        plain = plain.unify_dictionaries().combine_chunks()
    return plain.dictionary.to_pylist(), plain.indices.to_numpy()


def _faults_of_rows(rows: _Columns, tokens: int) -> Iterator[str]:
    for name, values, most in (
        ("layer", rows.layer, LARGEST), ("head", rows.head, LARGEST), ("count", rows.count, tokens),
    ):  # fmt: skip
        if values.min() < 0 or int(values.max()) > most:
            yield f"it has a {name} of {values.min() if values.min() < 0 else values.max()}"
            return
    yield from _faults_of_units(rows)
    yield from _faults_of_numbers(rows, tokens)
    yield from _faults_of_keys(rows)
    yield from _gaps(rows)


def _faults_of_units(rows: _Columns) -> Iterator[str]:
    units = {name: statistic.unit for name, statistic in STATISTICS.items()}
    units[VARIABILITY] = "share of the squares"
    wanted = ["cosine" if _is_overlap(name) else units.get(name) for name in rows.names]
    got = [rows.units.index(unit) if unit in rows.units else -1 for unit in wanted]
    known = np.array([unit is not None for unit in wanted])[rows.statistic]
    if (bad := known & (np.array(got)[rows.statistic] != rows.unit)).any():
        unit = rows.units[rows.unit[bad][0]]
        yield f"{bad.sum()} rows have another unit: {unit!r} of {rows.name(bad)}"


def _faults_of_numbers(rows: _Columns, tokens: int) -> Iterator[str]:
    counted, undefined = rows.count > 0, rows.each(VARIABILITY) & (rows.count <= 1)
    if (bad := counted & ~undefined & ~np.isfinite(rows.mean)).any():
        yield f"{bad.sum()} means are no numbers, though something was counted"
    spread = counted & ~rows.no_variance
    if (bad := spread & ~(np.isfinite(rows.variance) & (rows.variance >= 0))).any():
        yield f"{bad.sum()} variances are no numbers of 0 or more, though something was counted"
    for number, unit in enumerate(rows.units):
        here, (least, most) = counted & (rows.unit == number), _range(unit, tokens)
        with np.errstate(invalid="ignore"):
            out = (rows.mean < least) | (rows.mean > most)
            wide = spread & (rows.variance > ((most - least) / 2) ** 2)
        if (bad := here & out).any():
            yield f"{bad.sum()} means are no {unit}: {rows.mean[bad][0]:g} of {rows.name(bad)}"
        if (bad := here & wide).any():
            got = f"{rows.variance[bad][0]:g} of {rows.name(bad)}"
            yield f"{bad.sum()} variances are none of a {unit} from {least:g} to {most:g}: {got}"


def _range(unit: str, tokens: int) -> tuple[float, float]:
    """The smallest and largest mean of a unit over a corpus of so many tokens."""
    if unit.startswith("share"):
        return -SLACK, 1 + SLACK
    if unit == "cosine":
        return -1 - SLACK, 1 + SLACK
    # No row has more sources than there are tokens: at most all alike, or the furthest one.
    return -SLACK, (math.log(max(tokens, 1)) if unit == "nats" else tokens) + SLACK


def _faults_of_keys(rows: _Columns) -> Iterator[str]:
    known = {*STATISTICS, VARIABILITY}
    if strange := [n for n in rows.names if n not in known and not _is_overlap(n)]:
        yield f"it has a statistic {strange[0]!r}"
    parts = [rows.layer, rows.head, rows.statistic]
    parts = parts if rows.document is None else [rows.document, *parts]
    keys = np.stack([part.astype("int64") for part in parts])
    doubled = keys.shape[1] - np.unique(keys, axis=1).shape[1]
    if doubled:
        yield f"{doubled} rows are there twice"


def _is_overlap(name: str) -> bool:
    start, dot, other = name.partition(".")
    return start == "overlap" and bool(dot) and other.isdecimal()


def _gaps(rows: _Columns) -> Iterator[str]:
    """Missing layers, heads and statistics; a table of documents omits rows without a count."""
    layers = np.unique(rows.layer)
    if len(layers) != layers.max() + 1:
        yield f"it has {len(layers)} layers, and one with the number {layers.max()}"
    for layer in layers:
        inside = rows.layer == layer
        heads = np.unique(rows.head[inside])
        if len(heads) != heads.max() + 1:
            yield f"layer {layer} has {len(heads)} heads, and one with the number {heads.max()}"
            continue
        if rows.document is None:
            yield from _missing(rows, int(layer), inside, len(heads))


def _missing(rows: _Columns, layer: int, inside: Any, heads: int) -> Iterator[str]:
    for head in range(heads):
        here = set(rows.statistic[inside & (rows.head == head)].tolist())
        others = {f"overlap.{other}" for other in range(heads) if other != head}
        needed = {*STATISTICS, VARIABILITY} | others
        if needed != {rows.names[number] for number in here}:
            yield f"layer {layer}, head {head} has {len(here)} statistics of {len(needed)}"
            return
