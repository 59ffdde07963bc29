"""The memory of this process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

SELF = Path("/proc/self")


def forget_peak() -> None:
    """Let the highest resident set start again from what is resident now."""
    (SELF / "clear_refs").write_text("5", encoding="utf-8")


def peak() -> int:
    """Bytes of the highest resident set since `forget_peak`."""
    for line in (SELF / "status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this benchmark needs Linux: /proc/self/status has no VmHWM")
