"""Locks that the system releases when the process ends, however it ends."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_file_at", "take_lock"]


def take_lock(handle: int) -> bool:
    """Lock an open file or directory; False where another process holds the lock.

    True where there are no locks: on Windows, and on some network file systems.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def is_file_at(handle: int, path: Path) -> bool:
    """Tell whether an open file or directory still has that name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
