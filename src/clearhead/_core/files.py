"""Files that are always complete: written under a temporary name, then renamed atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clearhead._core.errors import value_error

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path in the same folder to write to; it replaces `path` if the block succeeds.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "kept.txt"
    >>> _ = path.write_text("old")
    >>> with replacing(path) as part:
    ...     _ = part.write_text("new")
    >>> path.read_text()
    'new'

    A full disk or a crash leaves the old file or the new one, and an error leaves no partial file.
    A path that exists and is no regular file (a device, a pipe, a directory) is a ValueError.
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
