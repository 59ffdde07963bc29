"""What a page is given: the numbers that were watched, decoded here by code of its own."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import readings
from clearhead.cli import main
from clearhead.views.content.layers import MOST
from clearhead.views.shown import Shown, shown_of
from tests.view.records import BATCH, HEADS, SIZE
from tests.view.records import of_a_call as watched


def of_codes(data: bytes, steps: int) -> np.ndarray:
    codes = np.frombuffer(data, np.uint8).astype(np.float64)
    return np.where(codes == 0, 0, np.where(codes == 255, np.nan, 2.0 ** (-(codes - 1) / steps)))


def runs(data: bytes, size: int) -> np.ndarray:
    numbers, rows, at = np.frombuffer(data, "<u4"), [], 0
    while at < len(numbers):
        row = np.zeros(size, bool)
        for start, stop in numbers[at + 1 : at + 1 + 2 * numbers[at]].reshape(-1, 2):
            row[start:stop] = True
        rows.append(row)
        at += 1 + 2 * numbers[at]
    return np.stack(rows)


def test_small_records_are_exact() -> None:
    seen = watched(readings.Weights())
    header, chunks = shown_of(seen, [list("abcdefghijk")] * BATCH).pages()
    (entry,) = header["layers"]
    assert (header["schema"], header["version"], header["samples"]) == ("clearhead.view", 1, BATCH)
    assert (entry["encoding"], entry["heads"], entry["offset"]) == ("f32", [0, 1, 2], 0)
    assert header["chunks"] == {name: len(data) for name, data in chunks.items()}
    for sample in range(BATCH):
        for head in range(HEADS):
            full = np.frombuffer(chunks[f"full/{sample}/0/{head}"], "<f4").reshape(SIZE, SIZE)
            assert np.array_equal(full, seen[0].value[sample, head].numpy())
        allowed = runs(chunks[f"mask/{sample}/0"], SIZE)
        assert np.array_equal(allowed, np.tril(np.ones((SIZE, SIZE), bool)))
    weights = seen[0].value
    found = np.frombuffer(chunks["statistics"], "<f4").reshape(-1, BATCH, 1, HEADS)
    names = [statistic["name"] for statistic in header["statistics"]]
    plain = -(weights * weights.clamp(min=1e-30).log()).sum(-1).mean(-1)
    np.testing.assert_allclose(found[names.index("entropy"), :, 0], plain, rtol=1e-5)
    previous = weights.diagonal(-1, -2, -1).mean(-1)
    np.testing.assert_allclose(found[names.index("previous"), :, 0], previous, rtol=1e-6)


def test_large_maps_are_codes_within_their_promise() -> None:
    weights = torch.rand(1, 2, 600, 600).softmax(-1)
    header, chunks = ch.record_from(weights).pages()
    assert header["layers"][0]["encoding"] == "log8"
    assert any("2.2%" in line for line in header["holds"])
    decoded = of_codes(chunks["full/0/0/1"], 16).reshape(600, 600)
    np.testing.assert_allclose(decoded, weights[0, 1], rtol=2 ** (1 / 32) - 1 + 1e-6)


@pytest.mark.parametrize("size", [SIZE, 1031])
def test_lists_hold_the_top_sources(size: int) -> None:
    seen = watched((readings.TopK(4), readings.BlockMap(5)), size)
    header, chunks = shown_of(seen).pages()
    (entry,) = header["layers"]
    top, tiles = seen[0].value
    weights, sources = (x[1, 2].numpy() for x in top)
    data = chunks["top/1/0/2"]
    if size == SIZE:
        assert entry["top_encoding"] == "f16"
        ids = np.frombuffer(data[: size * 8], "<u2").reshape(size, 4)
        assert np.array_equal(ids, np.where(sources < 0, 0xFFFF, sources))
        half = np.frombuffer(data[size * 8 :], "<f2").reshape(size, 4)
        np.testing.assert_allclose(half, weights, rtol=2**-10, atol=1e-7)
    else:
        assert entry["top_encoding"] == "planes"
        planes = np.frombuffer(data[: 8 * size], np.uint8).reshape(2, 4, size).astype(int)
        ids = (planes[0] + 256 * planes[1]).cumsum(0).T
        values = of_codes(data[8 * size :], 4).reshape(4, size).T
        for row in range(0, size, 97):
            kept = {s: w for s, w in zip(sources[row], weights[row], strict=True) if w >= 2**-8}
            shown = {s: w for s, w in zip(ids[row], values[row], strict=True) if w > 0}
            assert set(shown) == set(kept)
            assert all(abs(math.log2(shown[s] / kept[s])) <= 1 / 8 + 1e-6 for s in kept)
    mean = of_codes(chunks["block/1/0/2"][:25], 16).reshape(5, 5)
    np.testing.assert_allclose(mean, tiles.mean[1, 2], rtol=0.023)


@pytest.mark.parametrize("pack", ["top_values", "top_planes"])
def test_sources_take_the_bytes_that_the_page_reads(pack: str) -> None:
    # Above 65,535 positions each takes four bytes, also where a head looks at the first ones.
    from clearhead.views.page import codes

    weights, sources = torch.ones(3, 2) / 2, torch.tensor([[0, 1]] * 3)
    sizes = {n: len(getattr(codes, pack)(weights, sources, n)) for n in (65_535, 65_536)}
    assert sizes[65_536] - sizes[65_535] == 3 * 2 * 2


def test_what_is_too_large_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.views.content.layers.MOST", 100)
    assert MOST > 100
    header, chunks = shown_of(watched(readings.Weights())).pages()
    (entry,) = header["layers"]
    assert entry["encoding"] is None
    assert entry["top"] == SIZE
    assert any("16 largest" in line for line in header["holds"])
    assert not [name for name in chunks if name.startswith("full/")]


@pytest.mark.parametrize("kind", [np.float64, np.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6), (2, 3, 4, 6), (1, 1)])
def test_arrays_of_any_kind(kind: Any, shape: tuple[int, ...]) -> None:
    values = torch.rand(shape).softmax(-1)
    given = values.to(kind) if isinstance(kind, torch.dtype) else values.numpy().astype(kind)
    shown = ch.record_from(given, [f"t{i}" for i in range(shape[-1])])
    layers, heads = ((1, 1, *shape)[-4], (1, 1, *shape)[-3])
    assert len(shown.layers) == layers
    assert shown.layers[0].sizes == (1, heads, *shape[-2:])
    whole = torch.cat([layer.weights for layer in shown.layers if layer.weights is not None])
    torch.testing.assert_close(whole.reshape(shape), torch.as_tensor(given).float())


def test_a_broken_model_is_shown_as_such() -> None:
    weights = torch.full((1, 600, 600), torch.nan)
    weights[0, 0] = 0
    chunks = ch.record_from(weights).pages()[1]
    decoded = of_codes(chunks["full/0/0/0"], 16).reshape(600, 600)
    assert (decoded[0] == 0).all()
    assert np.isnan(decoded[1:]).all()
    assert math.isnan(struct.unpack("<f", chunks["sums/0/0/0"][4:8])[0])


HOSTILE = ["</script><script>alert(1)</script>", "<!--", '"', "\u2028", "\0", "\ud800", "\u202e",
           "a" * 10_000, "e" + "\u0301" * 5_000, "'];}", "\u200b"]  # fmt: skip


def test_tokens_are_data() -> None:
    page = ch.view(ch.record_from(np.eye(len(HOSTILE)), HOSTILE)).html()
    assert "<script>alert" not in page
    assert page.count("</script>") == page.count("<script")
    start = page.index('id="clearhead-header">') + len('id="clearhead-header">')
    header = json.loads(page[start : page.index("</script>", start)])
    assert header["axes"][0]["labels"] == [HOSTILE]


def test_a_view_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    view = ch.view(watched(readings.Weights()), title="A title")
    view.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Content-Security-Policy" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    with pytest.raises(ValueError, match="path"):
        view.save(tmp_path / "page.html")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html"]
    shown = view._repr_mimebundle_()
    assert 'sandbox="allow-scripts"' in shown["text/html"]
    assert shown["text/plain"] == repr(view)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ch.record_from([0.9, 0.1]), r"weights: has the axes .*\n.*\(2,\)"),
        (lambda: ch.record_from([[-1.0, 2.0]]), "weights: are 0 or more"),
        (lambda: ch.record_from([[1.0, np.inf]]), "at most 1; got 1 to inf"),
        (lambda: ch.record_from([[3.0, 2.0]]), "divided by their largest"),
        (lambda: ch.record_from("attention"), "weights: is an array of numbers"),
        (lambda: ch.record_from(np.array([["0.5"]])), "weights: is an array of numbers"),
        (lambda: ch.record_from(torch.ones(2, 2, dtype=torch.complex64)), "array of numbers"),
        (lambda: ch.record_from([torch.ones(2, 2), torch.ones(3, 3)]), "equal size"),
        (lambda: ch.record_from([torch.ones(1, 2, 3, 3)] * 2), r"stack\(weights\)\[:, 0\]"),
        (lambda: ch.record_from(np.ones((1, 0, 3, 3))), "none of them empty"),
        (
            lambda: ch.record_from(np.eye(2), [7, 9]),
            "tokens: is a list of strings.*\\n.*convert_ids",
        ),
        (lambda: ch.record_from(np.eye(2), 3), "tokens: is a list of strings"),
        (lambda: ch.record_from(np.ones((2, 3)) / 3, (["a"], list("xyz"))), "for each query"),
        (lambda: ch.record_from(np.ones((2, 3)) / 3, (list("ab"), list("x"))), "for each source"),
        (lambda: ch.record_from(np.eye(3), ["a"]), "tokens: has one label for each source"),
        (lambda: ch.view(watched(readings.Entropy())), "holds what a map is drawn of"),
        (lambda: ch.view([]), "is what watch\\(\\) gave"),
        (lambda: ch.view(np.eye(3)), "record_from"),
    ],
)
def test_what_cannot_be_shown_is_refused(call: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        call()


def test_the_command_writes_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["look", "hell", "--html", "hell.html"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Wrote hell.html"
    assert (tmp_path / "hell.html").stat().st_size < 250_000
    assert main(["look", "hell", "--html", "hell.html"]) == 2
    assert "--html: is a new file" in capsys.readouterr().err
    assert main(["look", "hell", "--html", "hell.html", "--force"]) == 0
    watched(readings.Weights()).save("a.seen")
    assert main(["view", "a.seen", "-o", "a.html"]) == 0
    assert main(["view", "a.seen", "-o", "a.html"]) == 2
    (tmp_path / "labels.json").write_text(json.dumps(list("abc")))
    assert main(["view", "a.seen", "-o", "b.html", "--tokens", "labels.json"]) == 2
    assert "--tokens: has one label for each source" in capsys.readouterr().err
    (tmp_path / "labels.json").write_text(json.dumps(list("abcdefghijk")))
    assert main(["view", "a.seen", "-o", "b.html", "--tokens", "labels.json"]) == 0
    assert main(["view", "missing.seen"]) == 2
    (tmp_path / "cut.seen").write_bytes((tmp_path / "a.seen").read_bytes()[:100])
    assert main(["view", "cut.seen"]) == 2


def test_a_pair_of_labels_is_cross_attention() -> None:
    weights = torch.rand(2, 3, 4, 6).softmax(-1)
    header, _ = ch.record_from(weights, (list("abcd"), list("uvwxyz"))).pages()
    assert [axis["labels"] for axis in header["axes"]] == [[list("abcd")], [list("uvwxyz")]]
    for entry in header["layers"]:
        assert (entry["kind"], entry["query_axis"], entry["source_axis"]) == ("cross", 0, 1)
        assert (entry["queries"], entry["sources"], entry["offset"]) == (4, 6, 0)
    # With more queries than sources no alignment is known.
    (entry,) = ch.record_from(torch.rand(6, 4).softmax(-1)).pages()[0]["layers"]
    assert (entry["kind"], entry["offset"]) == ("cross", 0)


def test_an_encoder_and_a_decoder_have_their_own_labels() -> None:
    torch.manual_seed(0)
    model = torch.nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    with torch.no_grad(), ch.watch(model, read=readings.Weights()) as seen:
        model(torch.randn(2, 6, 8), torch.randn(2, 4, 8))
    header, _ = ch.view(seen, (list("abcd"), [list("uvwxyz"), list("UVWXYZ")])).shown.pages()
    assert header["axes"][0]["labels"] == [list("abcd")] * 2
    assert header["axes"][1]["labels"] == [list("uvwxyz"), list("UVWXYZ")]
    found = {
        entry["module"]: (entry["kind"], entry["query_axis"], entry["source_axis"])
        for entry in header["layers"]
    }
    assert found == {
        "encoder.layers.0.self_attn": ("self", 1, 1),
        "decoder.layers.0.self_attn": ("self", 0, 0),
        "decoder.layers.0.multihead_attn": ("cross", 0, 1),
    }


class Foreign:
    """An array of another library, which numpy can read."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.eye(3, dtype=dtype)


@pytest.mark.parametrize(
    "given",
    [Foreign(), [[1, 0, 0], [0, 1, 0], [0, 0, 1]], np.eye(3, dtype=bool), list(torch.eye(3)),
     torch.eye(3, requires_grad=True), tuple(np.eye(3)), np.asfortranarray(np.eye(3))[::1]],
    ids=["foreign", "lists", "bool", "rows", "graph", "tuple", "strides"],
)  # fmt: skip
def test_arrays_of_any_library(given: Any) -> None:
    (layer,) = ch.record_from(given).layers
    assert layer.weights is not None
    assert torch.equal(layer.weights, torch.eye(3)[None, None])


def test_what_was_made_can_be_titled() -> None:
    assert isinstance(ch.record_from(np.eye(2)), Shown)
    assert ch.view(ch.record_from(np.eye(2)), title="Two").shown.title == "Two"
