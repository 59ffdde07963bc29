"""The table of a scan on disk: Parquet, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clearhead._files import replacing
from clearhead.errors import value_error

__all__ = ["SCHEMA", "VERSION", "gather", "parquet", "read", "write"]

SCHEMA, VERSION = "clearhead.scan", 1


def parquet() -> Any:
    """Import pyarrow with its Parquet module, or say how to get it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("scan needs pyarrow; to do: pip install 'clearhead[scan]'") from error
    return pyarrow


def write(path: Path, rows: Iterable[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Write rows to a Parquet file, under its name only once it is whole."""
    pyarrow = parquet()
    rows = list(rows)
    schema = _schema(pyarrow, about, document=bool(rows) and "document" in rows[0])
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    with replacing(path) as part:
        pyarrow.parquet.write_table(table, part)


def gather(path: Path, parts: Iterable[Path], about: Mapping[str, Any]) -> None:
    """Put the parts of a table together, one after another, in one file."""
    pyarrow = parquet()
    schema = _schema(pyarrow, about, document=True)

    with replacing(path) as whole, pyarrow.parquet.ParquetWriter(whole, schema) as writer:
        for piece in parts:
            table = pyarrow.parquet.read_table(piece)
            writer.write_table(table.replace_schema_metadata(schema.metadata))


def _schema(pyarrow: Any, about: Mapping[str, Any], document: bool) -> Any:
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
    text = json.dumps({"schema": SCHEMA, "version": VERSION, **about})
    return pyarrow.schema(columns, metadata={"clearhead": text})


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a table that `scan` wrote: what it says of itself, and its rows."""
    pyarrow = parquet()
    if not path.is_file():
        raise value_error("FILE", "does not exist" if not path.exists() else "is no file", got=path)
    try:
        table = pyarrow.parquet.read_table(path)
        about = json.loads((table.schema.metadata or {}).get(b"clearhead", b"{}"))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise value_error("FILE", "is no table of `clearhead scan`", got=reason) from error
    if about.get("schema") != SCHEMA:
        raise value_error("FILE", "is no table of `clearhead scan`", got=path)
    if about.get("version") != VERSION:
        rule = f"has version {about.get('version')} of the table, and this is version {VERSION}"
        raise value_error("FILE", rule, got=path)
    return about, table.to_pylist()
