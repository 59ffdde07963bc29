"""The served page: who gets an answer, and that it shows every weight of the record."""

from __future__ import annotations

import csv
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import masks, readings
from clearhead.views.page.server import PageServer
from tests.view.browser import run

SIZE, HEADS = 61, 3


def watched(read: Any) -> Any:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, HEADS, SIZE, 8)
    with torch.no_grad(), ch.watch(ch.attend, read=read) as seen:
        ch.attend(q, k, k, masks.causal() & masks.window(40))
    return seen


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PageServer, Any]]:
    """A record whose maps are too large to be sent whole."""
    monkeypatch.setattr("clearhead.views.content.layers.SENT", 100)
    seen = watched(readings.Weights())
    with PageServer(ch.view(seen).shown.content(live=True)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server, seen[0].value
        server.shutdown()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_who_knows_the_address_gets_every_row(served: Any) -> None:
    server, weights = served
    page = f"/{server.token}/"
    status, text = ask(server, page)
    assert status == 200
    assert b"connect-src 'self'" in text
    header = json.loads(ask(server, f"{page}header")[1])
    (entry,) = header["layers"]
    assert (entry["live"], entry["encoding"]) == (True, None)
    for sample, head, query in ((0, 0, 0), (1, 2, 60), (0, 1, 33)):
        status, data = ask(server, f"{page}chunk/row/{sample}/0/{head}/{query}")
        assert status == 200
        assert np.array_equal(np.frombuffer(data, "<f4"), weights[sample, head, query].numpy())
        data = ask(server, f"{page}chunk/column/{sample}/0/{head}/{query}")[1]
        assert np.array_equal(np.frombuffer(data, "<f4"), weights[sample, head, :, query].numpy())
    words = json.loads(ask(server, f"{page}chunk/why/1/0/50/9")[1])
    assert words == [
        "blocked by window(40): source 9 lies 41 before query 50",
        "although causal() allows it: source 9 lies 41 before query 50",
    ]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 404),
        ("/header", {}, 404),
        ("/{wrong}/header", {}, 404),
        ("/{token}/chunk/row/0/0/0/999", {}, 404),
        ("/{token}/chunk/row/0/0/0/-1", {}, 404),
        ("/{token}/chunk/row/0/0/0", {}, 404),
        ("/{token}/chunk/../../../../etc/passwd", {}, 404),
        ("/{token}/../etc/passwd", {}, 404),
        ("/{token}/header", {"Host": "evil.example"}, 403),
        ("/{token}/header", {"Host": "127.0.0.1"}, 403),
        ("/{token}/header", {"Origin": "https://evil.example"}, 403),
        ("/{token}/header", {"Origin": "null"}, 403),
        ("/{token}/header", {"Sec_Fetch_Site": "cross-site"}, 403),
        ("/{token}/header", {"Sec_Fetch_Site": "same-origin"}, 200),
    ],
)
def test_anything_else_gets_no_data(
    served: Any, path: str, headers: dict[str, str], status: int
) -> None:
    server, _ = served
    wrong = server.token[:-1] + ("a" if server.token[-1] != "a" else "b")
    found, data = ask(server, path.format(token=server.token, wrong=wrong), **headers)
    assert found == status
    assert (b"layers" in data) == (status == 200)


def test_only_reading_and_only_this_machine(served: Any) -> None:
    server, _ = served
    assert ask(server, f"/{server.token}/header", "POST")[0] == 501
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 32
    with PageServer(server.content) as other:
        assert other.token != server.token


def test_a_port_that_is_taken_is_named(served: Any) -> None:
    server, _ = served
    with pytest.raises(ValueError, match="port: cannot be used"):
        PageServer(server.content, server.server_port)
    with pytest.raises(ValueError, match="port: is a number up to 65535"):
        PageServer(server.content, 65536)


def test_a_record_of_the_largest_weights_pretends_no_rows() -> None:
    content = ch.view(watched(readings.TopK(4))).shown.content(live=True)
    (entry,) = content.header["layers"]
    assert (entry["live"], entry["top"], entry["top_encoding"]) == (False, 4, "f32")
    assert any("other weights were not saved" in line for line in content.header["holds"])
    with pytest.raises(ValueError, match="names a chunk of the page"):
        content.chunk("row/0/0/0/0")


def test_two_records_masks_and_atlases_are_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.views.content.layers.SENT", 100)
    one, two = watched(readings.Weights()), watched(readings.Weights())
    content = ch.view(one, other=two).shown.content(live=True)
    data = content.chunk("other/row/1/0/2/17")
    assert np.array_equal(np.frombuffer(data, "<f4"), two[0].value[1, 2, 17].numpy())
    mask = ch.view(masks.causal(), query=5).shown.content(live=True)
    assert mask.header["layers"][0]["why"] is None
    assert json.loads(mask.chunk("why/0/0/1/3")) == [
        "blocked by causal(): source 3 lies 2 after query 1"
    ]
    model = ch.models.load()
    survey = ch.heads.measure(model, model.vocabulary.encode("hell")[None])
    assert len(ch.view(survey).shown.content(live=True).chunk("statistics")) == 4 * 15 * 16


def test_the_browser_shows_every_weight(served: Any) -> None:
    server, weights = served
    jobs = [
        {"name": name, "check": "read", "url": server.address, "hash": place}
        for name, place in (("rows", "#head=1&query=60"), ("scaled", "#hide=1&rows=scaled"))
    ]
    found = run(jobs)
    for name, head in (("rows", 1), ("scaled", 0)):
        assert "failed" not in found[name], found[name]
        assert found[name]["errors"] == []
        assert all(url.startswith(server.address) for url in found[name]["requests"])
        expected = weights[0, head].double().numpy()
        if name == "scaled":
            expected[:, 0] = 0
            sums = expected.sum(-1, keepdims=True)
            expected = np.divide(expected, sums, out=np.zeros_like(expected), where=sums > 0)
        lines = list(
            csv.DictReader(io.StringIO(found[name]["value"]["csv"].removeprefix("\ufeff")))
        )
        assert len(lines) == SIZE * SIZE
        shown = [line for line in lines if line["state"] == ""]
        assert len(shown) > 1000
        for line in shown:
            weight = expected[int(line["query"]), int(line["source"])]
            assert float(line["weight"]) == pytest.approx(weight, rel=1e-5, abs=1e-7)
    column = found["rows"]["value"]["who"]["rows"]
    assert [query for query, *_ in column] == [60]


def test_ctrl_c_ends_the_command_with_130(tmp_path: Path) -> None:
    watched(readings.Weights()).save(tmp_path / "a.seen")
    started = subprocess.Popen(
        [sys.executable, "-m", "clearhead", "view", str(tmp_path / "a.seen"), "--serve"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert started.stdout is not None
    line = started.stdout.readline()
    assert line.startswith("Serving http://127.0.0.1:")
    address = line.split()[1]
    port, token = int(address.split(":")[2].split("/")[0]), address.rstrip("/").split("/")[-1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", f"/{token}/header")
    assert json.loads(connection.getresponse().read())["title"] == "a.seen"
    connection.close()
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=30)
    assert (started.returncode, out, err.strip()) == (130, "", "interrupted")
    later = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    with pytest.raises(OSError):
        later.request("GET", "/")
    later.close()
