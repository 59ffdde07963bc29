"""The table of a scan on disk: Parquet, written atomically."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead._core import replacing, value_error
from clearhead.heads.corpus.shards import merged
from clearhead.heads.corpus.soundness import faults_of
from clearhead.heads.layer_moments import LayerOutline
from clearhead.heads.moments import Moments
from clearhead.heads.statistics import STATISTICS
from clearhead.heads.survey import rows_of

__all__ = [
    "SCHEMA",
    "VERSION",
    "gather",
    "merge",
    "of_documents",
    "of_rows",
    "parquet",
    "read",
    "write",
]

SCHEMA, VERSION = "clearhead.scan", 1


def parquet() -> Any:
    """Import pyarrow with its Parquet module, or raise with the pip command."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("scan needs pyarrow; to do: pip install 'clearhead[scan]'") from error
    return pyarrow


def of_rows(rows: Iterable[Mapping[str, Any]]) -> Any:
    """The rows of a corpus as an Arrow table."""
    pyarrow = parquet()
    return pyarrow.Table.from_pylist(list(rows), schema=_schema(pyarrow, document=False))


def of_documents(numbers: Sequence[int], outlines: Sequence[LayerOutline], moments: Moments) -> Any:
    """Documents as an Arrow table; `moments` are (document, number), in the order of `Totals`."""
    pyarrow = parquet()
    schema = _schema(pyarrow, document=True)
    document = torch.tensor(numbers)[:, None].expand_as(moments.count)
    layer, head, statistic = (x.expand_as(document) for x in _places(outlines))
    counted = moments.count > 0

    def names(of: Tensor, values: Sequence[str]) -> Any:
        codes = pyarrow.array(of[counted].int().numpy())
        return pyarrow.DictionaryArray.from_arrays(codes, pyarrow.array(values, pyarrow.string()))

    columns = {
        "document": document[counted].numpy(),
        "layer": layer[counted].int().numpy(),
        "module": names(layer, [outline.module for outline in outlines]),
        "head": head[counted].int().numpy(),
        "statistic": names(statistic, list(STATISTICS)),
        "unit": names(statistic, [each.unit for each in STATISTICS.values()]),
        "count": moments.count[counted].long().numpy(),
        "mean": moments.mean[counted].numpy(),
        "variance": moments.variance[counted].numpy(),
    }
    return pyarrow.table(columns, schema=schema)


def _places(outlines: Sequence[LayerOutline]) -> tuple[Tensor, Tensor, Tensor]:
    """Layer, head and statistic of each number."""
    found = []
    for layer, outline in enumerate(outlines):
        statistic, head = (
            x.flatten()
            for x in torch.meshgrid(
                torch.arange(len(STATISTICS)), torch.arange(outline.heads), indexing="ij"
            )
        )
        found.append((torch.full_like(head, layer), head, statistic))
    layers, heads, statistics = (torch.cat(x) for x in zip(*found, strict=True))
    return layers, heads, statistics


def write(path: Path, rows: Any, about: Mapping[str, Any]) -> None:
    """Write an Arrow table to a Parquet file, which replaces `path` once it is complete."""
    pyarrow = parquet()
    with replacing(path) as part:
        metadata = _metadata(about, rows.num_rows)
        pyarrow.parquet.write_table(rows.replace_schema_metadata(metadata), part)


def merge(paths: Sequence[Path], target: Path) -> None:
    """Write the table of a scan from the files of its shards: the table that one process writes."""
    about, totals = merged(paths)
    write(target, of_rows(map(vars, rows_of(totals.layers))), about)


def gather(path: Path, parts: Iterable[Path], about: Mapping[str, Any]) -> None:
    """Concatenate the parts of a table into one file."""
    pyarrow = parquet()
    parts = list(parts)
    rows = sum(_rows_of(pyarrow, part) for part in parts)
    schema = _schema(pyarrow, document=True).with_metadata(_metadata(about, rows))
    with replacing(path) as whole, pyarrow.parquet.ParquetWriter(whole, schema) as writer:
        for part in parts:
            table = pyarrow.parquet.read_table(part)
            writer.write_table(table.replace_schema_metadata(schema.metadata))


def _rows_of(pyarrow: Any, part: Path) -> int:
    try:
        return pyarrow.parquet.read_metadata(part).num_rows
    except (pyarrow.ArrowException, OSError) as error:
        hint = "start over with --force"
        raise value_error("--resume", "has damaged rows", got=part, hint=hint) from error


def _metadata(about: Mapping[str, Any], rows: int) -> dict[str, str]:
    own = {"schema": SCHEMA, "version": VERSION, "rows": rows}
    return {"clearhead": json.dumps({**own, **about})}


def _schema(pyarrow: Any, *, document: bool) -> Any:
    small = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    columns = [
        *([("document", pyarrow.int64())] if document else []),
        ("layer", pyarrow.int32()),
        ("module", small),
        ("head", pyarrow.int32()),
        ("statistic", small),
        ("unit", small),
        ("count", pyarrow.int64()),
        ("mean", pyarrow.float64()),
        ("variance", pyarrow.float64()),
    ]
    return pyarrow.schema(columns)


def read(path: Path) -> tuple[dict[str, Any], Any]:
    """Read a table of `scan`, refuse a damaged one: its metadata, its rows as an Arrow table."""
    pyarrow = parquet()
    if not path.is_file():
        raise value_error("FILE", "does not exist" if not path.exists() else "is no file", got=path)
    try:
        table = pyarrow.parquet.read_table(path)
        about = json.loads((table.schema.metadata or {}).get(b"clearhead", b"{}"))
    except (pyarrow.ArrowException, OSError, ValueError, RecursionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise value_error(
            "FILE", "is no table of `clearhead scan`", got=f"{path} ({reason})"
        ) from error
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        raise value_error("FILE", "is no table of `clearhead scan`", got=path)
    if about.get("version") != VERSION:
        rule = f"has version {about.get('version')} of the table, and this is version {VERSION}"
        raise value_error("FILE", rule, got=path)
    for fault in faults_of(about, table):
        hint = "scan the corpus again"
        raise value_error("FILE", f"is damaged: {fault}", got=path, hint=hint)
    return about, table
