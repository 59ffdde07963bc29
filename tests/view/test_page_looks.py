"""What the page looks like, against pictures that were looked at and kept in tests/view/looks.

CLEARHEAD_KEEP_LOOKS=1 keeps the present pictures; look at them before you commit them.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.views.page import save
from tests.view.browser import run
from tests.view.synthetic import Record, causal_weights

LOOKS = Path(__file__).parent / "looks"
# The mean difference of 32 pixels across that other fonts make; another theme makes over 100.
TOLERANCE = 6.0
TEXT = "The cat sat on the mat , because the dog had chased it all over the garden . ⏎ It ran ."
KINDS: dict[str, dict[str, Any]] = {
    "light": {"hash": "#layer=2&head=4&query=16&source=10"},
    "dark": {"hash": "#layer=2&head=4&query=16&source=10", "dark": True},
    "narrow": {"width": 390, "height": 844},
    "print": {"print": True, "width": 900, "height": 1270},
}


def record() -> Record:
    first, *others = TEXT.split()
    tokens = [first, *(f"␣{t}" if t.isalpha() else t for t in others)]
    n = len(tokens)
    made = Record(
        tokens, title="The cat sat on the mat", prompt=18, segments=[[0, 7, "a"], [7, n, "b"]]
    )
    for layer in range(4):
        made.layer(causal_weights(6, n, layer), allowed=np.tril(np.ones((n, n), dtype=bool)))
    return made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("looks") / "page.html"
    save(path, *record().finish())
    files = {kind: LOOKS / f"{kind}.png" for kind in KINDS}
    kept = {k: base64.b64encode(f.read_bytes()).decode() for k, f in files.items() if f.exists()}
    jobs = [
        {"name": kind, "check": "looks", "file": str(path), "kept": kept.get(kind), **how}
        for kind, how in KINDS.items()
    ]
    lie = {"name": "lie", "check": "looks", "file": str(path), "kept": kept.get("dark")}
    return run([*jobs, lie])


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_looks_as_it_did_when_it_was_looked_at(
    pictures: dict[str, Any], kind: str
) -> None:
    assert "failed" not in pictures[kind], pictures[kind]
    found = pictures[kind]["value"]
    if os.environ.get("CLEARHEAD_KEEP_LOOKS"):
        LOOKS.mkdir(exist_ok=True)
        (LOOKS / f"{kind}.png").write_bytes(base64.b64decode(found["picture"].partition(",")[2]))
    else:
        assert found["mean"] is not None
        assert found["mean"] <= TOLERANCE


def test_another_look_is_found(pictures: dict[str, Any]) -> None:
    assert pictures["lie"]["value"]["mean"] > 10 * TOLERANCE
