"""The records of a corpus of any size; broken ones are counted, not fatal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from clearhead._core import value_error
from clearhead.heads.corpus.formats import format_of, size_of

__all__ = ["Corpus", "CorpusRecord"]

# Longer texts are cut into several records, which bounds the memory; a line of JSON, which cannot
# be cut, has at most so many bytes.
_PIECE, _LONGEST = 1 << 20, 1 << 26


class CorpusRecord(NamedTuple):
    """One text, its number among the usable ones, its place and the share read so far."""

    number: int
    text: str
    place: str
    share: float


class Corpus:
    """Texts from a file, each a line, a paragraph, a JSON object or a Parquet row.

    `problems` counts the records that could not be used, by reason; `places` holds the first.
    """

    def __init__(self, path: Path, *, format: str | None, by: str, field: str) -> None:
        self.path, self.by, self.field = path, by, field
        self.size = size_of(path)
        self.format = format or format_of(path)
        self.problems: Counter[str] = Counter()
        self.places: dict[str, str] = {}

    def __iter__(self) -> Iterator[CorpusRecord]:
        """Read the file from its beginning."""
        self.problems.clear()
        self.places.clear()
        texts = {"text": self._texts, "jsonl": self._objects, "parquet": self._rows}
        pieces = (
            (text[at : at + _PIECE], place, share)
            for text, place, share in texts[self.format]()
            for at in range(0, len(text), _PIECE)
        )
        found = (piece for piece in pieces if piece[0].strip())
        for number, (text, place, share) in enumerate(found):
            yield CorpusRecord(number, text, place, share)

    def problem(self, reason: str, place: str) -> None:
        """Count a record that could not be used."""
        self.problems[reason] += 1
        self.places.setdefault(reason, place)

    def _lines(self, limit: int) -> Iterator[tuple[int, bytes, float]]:
        """Yield lines with their numbers from 1; a line longer than `limit` is cut."""
        with self.path.open("rb") as file:
            number = 1
            while line := file.readline(limit):
                yield number, line, self._share(file)
                number += line.endswith(b"\n")

    def _share(self, file: IO[bytes]) -> float:
        return file.tell() / self.size if self.size else 0.0

    def _decoded(self) -> Iterator[tuple[str, str, float]]:
        """Yield lines of text; undecodable ones are counted, and long ones cut."""
        carried = b""
        for number, line, share in self._lines(_PIECE):
            line, carried = carried + line, b""
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                if line.endswith(b"\n") or error.start < len(line) - 3 or error.start == 0:
                    self.problem("not UTF-8", f"line {number}")
                    continue
                # The cut divides a character: its first bytes belong to the next piece.
                text, carried = line[: error.start].decode(), line[error.start :]
            if "\0" in text:
                self.problem("has zero bytes", f"line {number}")
                continue
            yield text.rstrip("\r\n"), f"line {number}", share
        if carried:
            self.problem("not UTF-8", "the end")

    def _texts(self) -> Iterator[tuple[str, str, float]]:
        if self.by == "line":
            yield from self._decoded()
            return
        lines: list[str] = []
        size, first, share = 0, "", 0.0
        for line, place, share in self._decoded():
            if line.strip():
                first = first if lines else place
                lines.append(line)
                size += len(line)
            if lines and (not line.strip() or size >= _PIECE):
                yield "\n".join(lines), first, share
                lines, size = [], 0
        yield "\n".join(lines), first, share

    def _objects(self) -> Iterator[tuple[str, str, float]]:
        cut = 0
        for number, line, share in self._lines(_LONGEST):
            place = f"line {number}"
            if number == cut or not line.strip():
                continue
            if len(line) == _LONGEST and not line.endswith(b"\n"):
                self.problem(f"longer than {_LONGEST >> 20} MiB", place)
                cut = number
                continue
            try:
                found = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                self.problem("not UTF-8", place)
                continue
            except (ValueError, RecursionError):
                self.problem("not JSON", place)
                continue
            if not isinstance(found, dict) or self.field not in found:
                self.problem(f"no field {self.field!r}", place)
            elif not isinstance(found[self.field], str):
                self.problem(f"field {self.field!r} is no text", place)
            else:
                yield found[self.field], place, share

    def _rows(self) -> Iterator[tuple[str, str, float]]:
        file = self._parquet()
        total, row = max(file.metadata.num_rows, 1), 0
        try:
            for batch in file.iter_batches(batch_size=64, columns=[self.field]):
                for value in batch.column(0):
                    row += 1
                    text = self._text(value, f"row {row}")
                    if text is not None:
                        yield text, f"row {row}", row / total
        except OSError as error:
            raise value_error("CORPUS", f"breaks off after row {row}", got=error) from error

    def _text(self, value: Any, place: str) -> str | None:
        try:
            text = value.as_py()
        except UnicodeDecodeError:
            self.problem("not UTF-8", place)
            return None
        if text is None:
            self.problem(f"column {self.field!r} is null", place)
        return text

    def _parquet(self) -> Any:
        from clearhead.heads.corpus.table import parquet

        pyarrow = parquet()
        try:
            file = pyarrow.parquet.ParquetFile(self.path)
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise value_error("CORPUS", "is no whole Parquet file", got=reason) from error
        names = file.schema_arrow.names
        if self.field not in names:
            hint = f"--field, one of {', '.join(names)}"
            raise value_error("CORPUS", f"has no column {self.field!r}", hint=hint)
        kind = file.schema_arrow.field(self.field).type
        # The values of a column with a dictionary; those of a column of lists are no texts.
        texts = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if str(texts) not in ("string", "large_string", "string_view"):
            raise value_error("CORPUS", f"column {self.field!r} is no text", got=kind)
        return file
