"""Time the page at 4,096 tokens and 270 heads in a browser: python benchmarks/view.py

It prints the milliseconds to the first painted map, the median answer to a hover, the longest task
while scrolling (none below 50 ms count), the bytes of the tab's heap, and a yardstick: a fixed
piece of work in the same tab, about 40 ms on an idle core. Needs node, chromium and `make browser`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.view.browser import run
from tests.view.pages import wide

from clearhead.views.page import save


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wide.html"
        save(path, *wide().finish())
        seen = run([{"name": "speed", "check": "speed", "file": str(path)}])["speed"]
        value = seen["value"]
        found = {
            "file_bytes": path.stat().st_size,
            "first_map_ms": value["first"],
            "hover_ms": sorted(value["hover"])[len(value["hover"]) // 2],
            "longest_task_ms": max(value["long"], default=0),
            "heap_bytes": value["memory"],
            "yardstick_ms": value["yardstick"],
            "errors": seen["errors"],
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
