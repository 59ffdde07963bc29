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

import clearhead as ch
from clearhead import masks
from clearhead.views.page import save
from tests.view.browser import run
from tests.view.synthetic import Record, causal_weights

pytestmark = pytest.mark.slow
LOOKS = Path(__file__).parent / "looks"
# The mean difference of 32 pixels across that other fonts make; another theme makes over 100.
TOLERANCE = 6.0
TEXT = "The cat sat on the mat , because the dog had chased it all over the garden . ⏎ It ran ."
KINDS: dict[str, dict[str, Any]] = {
    "light": {"hash": "#layer=2&head=4&query=16&source=10"},
    "dark": {"hash": "#layer=2&head=4&query=16&source=10", "dark": True},
    "narrow": {"width": 390, "height": 844},
    "print": {"print": True, "width": 900, "height": 1270},
    "mask": {"page": "mask", "hash": "#query=9&source=4"},
    "mask-dark": {"page": "mask", "hash": "#query=9&source=4", "dark": True},
    "mask-narrow": {"page": "mask", "width": 390, "height": 844},
    "mask-print": {"page": "mask", "print": True, "width": 900, "height": 1270},
    "atlas": {"page": "atlas", "hash": "#layer=1&head=2"},
    "atlas-dark": {"page": "atlas", "hash": "#layer=1&head=2", "dark": True},
    "atlas-narrow": {"page": "atlas", "width": 390, "height": 844},
    "atlas-print": {"page": "atlas", "print": True, "width": 900, "height": 1270},
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


def atlas() -> Record:
    made = record()
    generator = np.random.default_rng(5)
    shares = generator.beta(0.6, 1.4, (4, 6))
    made.statistics(previous=shares, sink=generator.beta(0.5, 2, (4, 6)), entropy=3 * shares)
    made.header |= {"kind": "atlas", "title": "Heads of a model"}
    return made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("looks")
    save(folder / "page.html", *record().finish())
    save(folder / "atlas.html", *atlas().finish())
    mask = masks.causal() & masks.window(5) | masks.first(1)
    first, *others = TEXT.split()
    ch.view(mask, [first, *others][:16]).save(folder / "mask.html")
    path = folder / "page.html"
    files = {kind: LOOKS / f"{kind}.png" for kind in KINDS}
    kept = {k: base64.b64encode(f.read_bytes()).decode() for k, f in files.items() if f.exists()}
    jobs = [
        {"name": kind, "check": "looks", "file": str(folder / f"{how.get('page', 'page')}.html"),
         "kept": kept.get(kind), **how}
        for kind, how in KINDS.items()
    ]  # fmt: skip
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
