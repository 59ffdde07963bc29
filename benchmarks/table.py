"""The results of a benchmark as rows of a table, as a page, and as JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Found = dict[str, Any]  # as `measure.summary` returns it

HEAD = (
    "| work | dtype | ours | the others, and their time over ours | of peak | bound "
    "| error | goal |\n|---|---|---|---|---|---|---|---|"
)
TITLES = {
    "attend": "Context alone",
    "read": "Readings in the same pass",
    "masks": "Sparse masks",
    "backward": "Backward",
    "decode": "Decoding: one query over a long cache",
    "small": "Small calls",
    "layers": "Layers, and a training step",
    "avx2": "The kernel for AVX2",
    "tiled": 'Without the kernel: `impl="tiled"`',
    "memory": "Memory of a call beyond its inputs",
    "start": "Start-up time",
    "own": "Your own case",
}
PAGE = """
# Performance

Made by `{command}` on the machine and the commit below. The implementations in a row are timed in
turns in one process, after a check that their results agree.

- **ours**: the median, and half the interquartile range relative to it. **The others**: their
  medians, and the ratio of theirs to ours: above 1 clearhead is faster, below 1 it is slower.
- **of peak**: the rate of multiply-adds, relative to the highest rate of this machine, measured in
  turn in the same row. A causal mask counts for half of the edges.
- **bound**: the largest speed-up over the peer (SDPA, where it takes part) on this machine.
  A loop without memory accesses does the multiply-adds and, once per score, the operations of the
  softmax (maximum, difference, exponential, sum); it is timed in turn in the same row. For a
  training step the time without any attention is added; for decoding the bound is the time of
  `torch.sum` over the same keys and values. A goal above the bound cannot be reached here.
- **error**: the largest error against float64, relative to that of SDPA in the same dtype.
- **goal**: the goal of the project, set for a machine on which SDPA reaches a third of the peak.
"""


def amount(value: float, unit: str) -> str:
    """A time or a size with three digits, in a suitable unit."""
    steps = {"s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")), "B": ((1e6, "MB"), (1e3, "kB"))}[unit]
    size, name = next((step for step in steps if value >= step[0]), steps[-1])
    number = value / size
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {name}"


def line(found: Found) -> str:
    """One row of the table."""
    unit = found["unit"]
    spread = "" if found["spread"] is None else f" ± {found['spread']:.0%}"
    others = "; ".join(
        f"{name} {amount(value, unit)} ({value / found['ours']:.2f}x)"
        for name, value in found["others"].items()
    )
    cells = (
        found["work"],
        found["dtype"] if unit == "s" else "",
        amount(found["ours"], unit) + spread,
        others + (f" ({found['note']})" if found["note"] else ""),
        "" if found["of_peak"] is None else f"{found['of_peak']:.0%}",
        "" if found["bound"] is None else f"{found['bound']:.2f}x",
        "" if found["error"] is None else f"{found['error']:.2f}",
        "; ".join(goal(x, unit) for x in found["goals"]),
    )
    return "| " + " | ".join(cells) + " |"


def goal(one: dict[str, Any], unit: str) -> str:
    """A goal, and whether it is met."""
    if "most" in one:
        text = f"at most {amount(one['most'], unit)}"
    elif one["of"] == "peak":
        text = f"{one['least']:.0%} of peak"
    else:
        text = f"{one['least']:.3g}x {one['of']}"
    return f"{text}: {one['state']}"


def losses(rows: Iterable[Found]) -> list[str]:
    """The rows in which another implementation is faster or smaller."""
    lines = []
    for found in rows:
        for name, value in found["others"].items():
            ours = name.startswith("ours") or name in found["yardsticks"] or name == "import torch"
            if not ours and value < found["ours"]:
                ratio = f"{value / found['ours']:.2f}x"
                lines.append(f"- {found['work']}, {found['dtype']}: {name} takes {ratio} ours")
    return lines


def page(about: dict[str, Any], groups: dict[str, list[Found]], command: str) -> str:
    """All results as a page of Markdown."""
    rows = [found for group in groups.values() for found in group]
    goals = Counter(x["state"] for found in rows for x in found["goals"])
    parts = [
        PAGE.strip().format(command=command),
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        "Goals: " + ", ".join(f"{count} {state}" for state, count in sorted(goals.items())) + ".",
        "## Where clearhead loses\n\n" + ("\n".join(losses(rows)) or "Nowhere in this table."),
    ]
    for name, group in groups.items():
        lines = [HEAD, *map(line, group)] if group else ["Not measured on this machine."]
        parts.append(f"## {TITLES[name]}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def save(about: dict[str, Any], groups: dict[str, list[Found]], path: Path) -> None:
    """All results as JSON with every sample, one row per line."""
    rows = [{"group": name, **found} for name, group in groups.items() for found in group]
    lines = ",\n".join(json.dumps(row) for row in rows)
    write(path, f'{{"machine": {json.dumps(about, indent=1)},\n"rows": [\n{lines}\n]}}\n')


def write(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
    print(f"Wrote {path}")
