"""The format of a corpus: text, JSON lines or Parquet, by its suffix and its first bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from clearhead._core import value_error

__all__ = ["format_of", "size_of"]

_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
# At most so many bytes are parsed to find out whether a file is JSON.
_PARSED = 1 << 26
# How a larger JSON file begins.
_BEGINS = re.compile(r'\s*(\[\s*[\[{"\]]|\{\s*["}])')


def size_of(path: Path) -> int:
    """Return the size of a corpus in bytes; refuse anything but a file that can be read twice."""
    if path.is_dir():
        raise value_error("CORPUS", "needs to be a file", got=f"the directory {path}")
    if not path.exists():
        raise value_error("CORPUS", "does not exist", got=path)
    if path.is_char_device() or path.is_block_device():
        raise value_error("CORPUS", "needs to be a file", got=f"the device {path}")
    if not path.is_file():
        raise value_error(
            "CORPUS", "needs to be a file that can be read twice", got=path, hint="save it first"
        )
    if not path.stat().st_size:
        raise value_error("CORPUS", "is empty", got=path)
    return path.stat().st_size


def format_of(path: Path) -> str:
    """Return "text", "jsonl" or "parquet"; refuse JSON that would be read as text."""
    with path.open("rb") as file:
        start = file.read(1 << 13)
    if start.startswith(b"PAR1"):
        return "parquet"
    if (zero := start.find(0)) >= 0 or start.startswith(b"\x1f\x8b"):
        hint = "text or JSON lines in UTF-8, or Parquet; unpack compressed files first"
        got = f"{path}: byte {zero} is zero" if zero >= 0 else f"{path}: gzip"
        raise value_error("CORPUS", "is binary", got=got, hint=hint)
    suffix = path.suffix.lower()
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    kind = _json_kind(path, named_so=suffix == ".json")
    if kind == "lines" and suffix == ".json":
        return "jsonl"
    if kind is not None:
        lines = {"lines": ("JSON lines", "--format jsonl reads its records")}
        what, hint = lines.get(kind, ("JSON, and not JSON lines", "write a record a line"))
        hint += ", --format text reads it as it stands"
        raise value_error("CORPUS", f"is {what}", got=path, hint=hint)
    return "text"


def _json_kind(path: Path, *, named_so: bool) -> str | None:
    """Tell JSON "lines" (an object each) from another "document", and both from text."""
    with path.open("rb") as file:
        text = file.read(_PARSED).decode("utf-8-sig", "replace").lstrip()
    if text[:1] not in ("{", "[") and not named_so:
        return None
    value, rest = _first_value(text)
    if value is None:
        return "document" if _BEGINS.match(text) and (named_so or len(text) == _PARSED) else None
    if isinstance(value, dict) and isinstance(_first_value(text.partition("\n")[0])[0], dict):
        return "lines"
    # A text may begin with [1]; a JSON document has nothing after it but more JSON.
    more = rest.lstrip()
    whole = not more or _first_value(more)[0] is not None
    return "document" if isinstance(value, dict) or whole else None


def _first_value(text: str) -> tuple[Any, str]:
    """The JSON value that a text begins with, and the rest; None where it begins with none."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, text
    return value, text[end:]
