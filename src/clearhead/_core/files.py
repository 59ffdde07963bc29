"""Files that are always complete: written under a temporary name, then renamed atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from clearhead._core.errors import value_error

__all__ = ["link_target", "remove_parts", "replacing"]


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
    The target of a link is written, and the link stays. A path that exists and is no regular file
    (a device, a pipe, a directory) is a ValueError.
    """
    path = link_target(path)
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


def link_target(path: Path) -> Path:
    """Return the target of a symbolic link, even if it does not exist; any other path unchanged.

    A link without a target that has a name (a loop, a pipe, a deleted file) is a ValueError.
    """
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    same = os.path.samefile(path, target) if path.exists() and target.exists() else False
    if target.is_symlink() or (path.exists() and not same):
        raise value_error("path", "is a link that leads to no file", got=path)
    return target


def remove_parts(path: Path) -> None:
    """Remove the partial files of killed processes; the caller holds the lock on `path`."""
    path = link_target(path)
    for part in path.parent.glob(f".{escape(path.name)}.*.part"):
        part.unlink(missing_ok=True)
