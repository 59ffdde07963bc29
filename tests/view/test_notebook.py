"""What notebooks show: every kind of object, and pages in JupyterLab and marimo in a browser."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead import heads, masks, readings
from tests.view.browser import BROWSERS, HERE
from tests.view.records import of_a_call as watched

ROOT = HERE.parent.parent
SETUP = """\
import torch, clearhead as ch
from clearhead import readings, masks
model = ch.models.load()
with torch.no_grad(), ch.watch(model, read=readings.Weights()) as seen:
    logits = model(model.vocabulary.encode("hell")[None])
labels = ["h", "</script><img src=x onerror='window.ran=1'>", "\\ud800\\x00", "\\x1b[31m$x$"]
"""


def bundle(shown: Any) -> dict[str, Any]:
    return shown._repr_mimebundle_()


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append(tag)


def every_kind() -> dict[str, Any]:
    model = ch.models.load()
    tokens = model.vocabulary.encode("hello")[None]
    return {
        "mask": masks.causal() & masks.window(3),
        "seen": watched(readings.Weights()),
        "record": watched(readings.TopK(2))[0],
        "readings": watched(readings.Entropy()),
        "survey": heads.measure(model, tokens),
        "no survey": heads.Survey(model),
        "report": ch.audit(model, tokens),
        "effects": ch.effects(model, tokens, edges=[(4, 0), (4, 1)]),
        "view": ch.view(watched(readings.Weights())),
    }


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    return every_kind()


@pytest.mark.parametrize("kind", ["mask", "seen", "record", "readings", "survey", "no survey",
                                  "report", "effects", "view"])  # fmt: skip
def test_every_kind_has_text_and_what_else_it_can(kinds: dict[str, Any], kind: str) -> None:
    found = bundle(kinds[kind])
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", found["text/plain"])
    if kind != "no survey":
        assert "script" not in Elements(found["text/html"]).found
    if kind in ("seen", "record", "survey", "view"):
        assert 'sandbox="allow-scripts"' in found["text/html"]
    drawn = kind in ("mask", "seen", "record", "survey", "effects", "view")
    if drawn and importlib.util.find_spec("matplotlib"):
        assert found["image/png"].startswith(b"\x89PNG")


def test_kinds_can_be_chosen(kinds: dict[str, Any]) -> None:
    assert set(kinds["mask"]._repr_mimebundle_(include=["text/plain"])) == {"text/plain"}
    assert "image/png" not in kinds["mask"]._repr_mimebundle_(exclude=["image/png"])


def test_masks_and_reports_are_written_out(kinds: dict[str, Any]) -> None:
    assert bundle(kinds["mask"])["text/plain"] == str(kinds["mask"])
    assert bundle(kinds["report"])["text/plain"] == str(kinds["report"])
    table = bundle(kinds["readings"])["text/html"]
    assert "<td" in table
    assert ">11</td>" in table


def test_text_in_tables_is_escaped() -> None:
    seen = watched(readings.Entropy())
    seen.notes.append("<script>alert(1)</script>\x1b[31m")
    found = bundle(seen)
    assert "&lt;script&gt;" in found["text/html"]
    assert "\x1b" not in found["text/plain"] + found["text/html"]


def test_large_records_are_not_put_into_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.views.notebook.bundles.EMBEDDED", 10)
    found = bundle(watched(readings.Weights()))
    assert "iframe" not in found["text/html"]
    assert "ch.view(seen).save(path)" in found["text/html"]


class Sent:
    """What a widget sends instead of a comm."""

    def __init__(self, widget: Any) -> None:
        self.messages: list[tuple[Any, Any]] = []
        self.widget = widget
        widget.send = lambda content, buffers=None: self.messages.append((content, buffers))

    def ask(self, name: Any) -> tuple[Any, Any]:
        self.widget._answer(self.widget, {"chunk": name, "id": 7}, [])
        return self.messages[-1]


def test_a_widget_answers_with_the_chunks_of_the_page() -> None:
    pytest.importorskip("anywidget")
    seen = watched(readings.Weights())
    widget = ch.view(seen, [["\ud800", *"bcdefghijk"]] * 2).widget()
    assert widget.header["axes"][0]["labels"][0][0] == "<U+D800>"
    json.dumps(widget.header).encode()
    sent = Sent(widget)
    content, (data,) = sent.ask("full/1/0/2")
    assert content == {"id": 7}
    assert np.array_equal(np.frombuffer(data, "<f4").reshape(11, 11), seen[0].value[1, 2].numpy())
    for wrong in ("full/9/9/9", "../secret", "", "row/0/0/0/-1", None):
        content, buffers = sent.ask(wrong)
        assert (content["id"], buffers) == (7, None)
        assert "names a chunk" in content["error"]


def test_without_anywidget_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.views.notebook.widget.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "clearhead\[notebook\]"'):
        ch.view(watched(readings.Weights())).widget()


# In a real browser.


def needs(*packages: str) -> tuple[str, str]:
    """Node and a browser; the test is skipped without them, and without a package."""
    node, browser = shutil.which("node"), next(filter(None, map(shutil.which, BROWSERS)), None)
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install '.[dev]'")
    if not (node and browser and (HERE / "node_modules").exists()):
        assert os.environ.get("CI") != "true", "CI needs node, chromium and tests/view/node_modules"
        pytest.skip("needs node, chromium and `npm install` in tests/view")
    assert node is not None
    assert browser is not None
    return node, browser


@contextlib.contextmanager
def serving(command: list[str], folder: Path, port: int) -> Iterator[None]:
    paths = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    own = {"PYTHONPATH": paths, "HOME": str(folder), "PYTHONWARNINGS": "default"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stdout=log,
                                   stderr=log, env={**os.environ, **own})  # fmt: skip
        try:
            for _ in range(240):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def opened(node: str, browser: str, job: dict[str, Any]) -> dict[str, Any]:
    asked = json.dumps({"executable": browser, "jobs": [{"name": "it", **job}]})
    done = subprocess.run([node, HERE / "notebook.mjs"], input=asked, capture_output=True,
                          text=True, timeout=280)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["it"]
    assert "failed" not in found, found
    assert (found["dialogs"], found["ran"]) == ([], False)
    return found["shown"]


LAST = "query 3 “\u2068␛[31m$x$\u2069”"


@pytest.mark.slow
def test_jupyterlab_shows_the_page_as_a_widget(tmp_path: Path) -> None:
    node, browser = needs("jupyterlab", "anywidget")
    import nbformat

    cells = [SETUP, "ch.view(seen, labels)", "masks.causal()", "seen"]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    cells = [nbformat.v4.new_code_cell(text) for text in cells]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=kernel)
    nbformat.write(notebook, tmp_path / "look.ipynb")
    port = free_port()
    command = ["jupyter", "lab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1",
               "--IdentityProvider.token=secret", f"--ServerApp.root_dir={tmp_path}"]  # fmt: skip
    with serving(command, tmp_path, port):
        job = {
            "address": f"http://127.0.0.1:{port}/lab/tree/look.ipynb?token=secret",
            "lab": True,
            "reads": {
                "widget": {"selector": ".jp-OutputArea-output main.page .readout"},
                "mask": {"selector": ".jp-OutputArea-output pre >> text=causal"},
            },
            "screenshot": os.environ.get("CLEARHEAD_LAB_PICTURE"),
        }
        shown = opened(node, browser, job)
    assert shown["widget"].startswith(LAST)
    assert "causal" in shown["mask"]


@pytest.mark.slow
def test_marimo_shows_the_page(tmp_path: Path) -> None:
    node, browser = needs("marimo")
    body = "\n".join(f"    {line}" for line in SETUP.splitlines())
    (tmp_path / "look.py").write_text(
        f"import marimo\napp = marimo.App()\n\n@app.cell\ndef _():\n{body}\n"
        "    ch.view(seen, labels)\n    return\n\nif __name__ == '__main__':\n    app.run()\n"
    )
    port = free_port()
    command = ["marimo", "run", "look.py", "--headless", "--no-token", "--port", str(port)]
    with serving(command, tmp_path, port):
        job = {
            "address": f"http://127.0.0.1:{port}/",
            "reads": {"page": {"frame": "iframe", "selector": "main.page .readout"}},
            "screenshot": os.environ.get("CLEARHEAD_MARIMO_PICTURE"),
        }
        shown = opened(node, browser, job)
    assert shown["page"].startswith(LAST)
