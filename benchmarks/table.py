"""The figures of a benchmark as lines of a table, as a page, and as JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Found = dict[str, Any]  # as `measure.summary` gives it

HEAD = (
    "| work | dtype | ours | the others, and how many times ours they take | of peak | bound "
    "| error | goal |\n|---|---|---|---|---|---|---|---|"
)
TITLES = {
    "attend": "Context alone",
    "read": "Readings in the same pass",
    "masks": "Masks that leave most edges out",
    "backward": "Backward",
    "decode": "Decoding: one query over a long cache",
    "small": "Small calls",
    "layers": "Layers, and a step of training",
    "avx2": "The kernel for AVX2",
    "tiled": 'Without the kernel: `impl="tiled"`',
    "memory": "Memory that a call takes over its inputs",
    "start": "Start of the program",
    "own": "Your own case",
}
PAGE = """
# How fast it is

Made by `{command}` on the machine and the commit below: everyone in a row took turns in one
process, after their answers had been found alike.

- **ours**: the median, and half the distance between the quartiles. **The others** take so long,
  and that is so many times as long as ours: above 1 we win, below 1 we lose.
- **of peak**: the share of the multiply-adds that this machine does when it does nothing else,
  which took its turn in the same row. A causal mask counts for half of the edges.
- **bound**: how many times as fast as the peer (SDPA, if it is there) this machine could be: a loop
  that never touches memory does the multiply-adds and, after as many as a score needs, the softmax
  of a score (maximum, difference, exponential, sum). It takes its turn in the row as well. For a
  step of training the time without any attention comes on top; for decoding it is the time of
  `torch.sum` over the same keys and values. A goal above the bound is out of reach here.
- **error**: our largest error against float64, over that of SDPA in the same dtype.
- **goal**: what the project set itself, on a machine where SDPA reaches a third of the peak.
"""


def amount(value: float, unit: str) -> str:
    """A time or a size with three digits and the unit that suits it."""
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
    """A goal, and whether it was reached."""
    if "most" in one:
        text = f"at most {amount(one['most'], unit)}"
    elif one["of"] == "peak":
        text = f"{one['least']:.0%} of peak"
    else:
        text = f"{one['least']:.3g}x {one['of']}"
    return f"{text}: {one['state']}"


def losses(rows: Iterable[Found]) -> list[str]:
    """Where somebody else is faster, or smaller."""
    lines = []
    for found in rows:
        for name, value in found["others"].items():
            ours = name.startswith("ours") or name in found["yardsticks"] or name == "import torch"
            if not ours and value < found["ours"]:
                ratio = f"{value / found['ours']:.2f}x"
                lines.append(f"- {found['work']}, {found['dtype']}: {name} takes {ratio} ours")
    return lines


def page(about: dict[str, Any], groups: dict[str, list[Found]], command: str) -> str:
    """All of it, as a page of Markdown."""
    rows = [found for group in groups.values() for found in group]
    goals = Counter(x["state"] for found in rows for x in found["goals"])
    parts = [
        PAGE.strip().format(command=command),
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        "Goals: " + ", ".join(f"{count} {state}" for state, count in sorted(goals.items())) + ".",
        "## Where we lose\n\n" + ("\n".join(losses(rows)) or "Nowhere in this table."),
    ]
    for name, group in groups.items():
        lines = [HEAD, *map(line, group)] if group else ["Not measured on this machine."]
        parts.append(f"## {TITLES[name]}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def save(about: dict[str, Any], groups: dict[str, list[Found]], path: Path) -> None:
    """The same as JSON, with every sample; a row a line."""
    rows = [{"group": name, **found} for name, group in groups.items() for found in group]
    lines = ",\n".join(json.dumps(row) for row in rows)
    write(path, f'{{"machine": {json.dumps(about, indent=1)},\n"rows": [\n{lines}\n]}}\n')


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
    print(f"Wrote {path}")
