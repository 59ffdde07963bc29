"""Files that are always whole: written beside their place, then put into it in one step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clearhead._core.errors import value_error

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a name beside `path` to write to; the file takes its place once the block ends well.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "kept.txt"
    >>> _ = path.write_text("old")
    >>> with replacing(path) as part:
    ...     _ = part.write_text("new")
    >>> path.read_text()
    'new'

    A full disk or a lost machine leaves the old file or the new one, and an error leaves no rest.
    What is there and is no file (a device, a pipe, a directory) is a ValueError: it would be lost.
    """
    if path.exists() and not path.is_file():
        raise value_error("path", "names a file", got=f"{path}, which is there and is none")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
