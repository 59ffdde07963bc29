"""The memory of this process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

SELF = Path("/proc/self")


def forget_peak() -> None:
    """Reset the peak of the resident set to its current size."""
    (SELF / "clear_refs").write_text("5", encoding="utf-8")


def peak() -> int:
    """The peak of the resident set since `forget_peak`, in bytes."""
    for line in (SELF / "status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this benchmark needs Linux: /proc/self/status has no VmHWM")
