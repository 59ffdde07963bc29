"""`ch.view` of two records, effects, masks and surveys, and the commands that write such pages."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import heads, masks, readings
from clearhead.cli import main
from clearhead.intervention import Effect, Effects
from clearhead.views.shown import UNTRAINED
from tests.view.records import MODEL, TEXT, TOKENS
from tests.view.records import of_the_model as watched


def header_of(page: Any) -> dict[str, Any]:
    return page.shown.pages()[0]


def statistic(page: Any, name: str) -> np.ndarray:
    """One statistic of a page, (sample, call, head)."""
    header, chunks = page.shown.pages()
    names = [each["name"] for each in header["statistics"]]
    calls, most = len(header["layers"]), max(len(x["heads"]) for x in header["layers"])
    table = np.frombuffer(chunks["statistics"], "<f4")
    return table.reshape(len(names), header["samples"], calls, most)[names.index(name)]


def test_effects_stand_beside_the_edges_that_were_cut() -> None:
    table = ch.effects(MODEL, TOKENS, edges=[(12, 3), (12, 9)])
    one = ch.effects(MODEL, TOKENS, edges=[(12, 3)], heads=[(2, 1)])
    whole = ch.effects(MODEL, TOKENS, heads=[(0, 3)])
    source = ch.effects(MODEL, TOKENS, sources=[4], layers=1)
    found = header_of(ch.view(watched(), list(TEXT), effects=[table, one, whole, source]))[
        "effects"
    ]
    places = [(e["query"], e["source"], e["layer"], e["head"]) for e in found]
    assert places == [
        (12, 3, None, None), (12, 9, None, None), (12, 3, 2, 1), (None, None, 0, 3),
        (None, 4, 1, None),
    ]  # fmt: skip
    assert [e["effect"] for e in found] == [
        r.effect for t in (table, one, whole, source) for r in t
    ]
    assert found[0]["where"] == "in all layers and heads at once"
    assert found[2]["where"] == "in head 2.1"
    assert "log-probability (nats)" in found[0]["metric"]


def test_effects_of_a_step_with_a_cache_are_rows_of_its_map() -> None:
    q, k = torch.randn(2, 1, 2, 9, 4)
    with ch.watch(ch.attend, read=readings.Weights()) as seen:
        ch.attend(q[:, :, -3:], k, k, masks.causal())
    table = Effects([Effect((7, 2), 0.5, -1.0)], 0.0)
    (entry,) = header_of(ch.view(seen, effects=table))["effects"]
    assert (entry["query"], entry["source"]) == (1, 2)


@pytest.mark.parametrize(
    ("effects", "text"),
    [
        (3, "effects: is what ch.effects gave"),
        ([], "effects: is what ch.effects gave"),
        (
            Effects([Effect((40, 2), 0.5, -1.0)], 0.0),
            "13 positions that are shown; got query",
        ),
        (Effects([Effect(masks.causal(), 0.5, -1.0)], 0.0), "edges, sources or heads"),
    ],
)
def test_effects_that_do_not_fit_are_refused(effects: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        ch.view(watched(), effects=effects)


def test_look_writes_the_effects_that_it_found(tmp_path: Path, capsys: Any) -> None:
    assert main(["look", "hell", "--html", str(tmp_path / "a.html"), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    header = header_in(tmp_path / "a.html")
    rows = {row["position"]: row for row in seen["difference"]["sources"]}
    assert {e["source"] for e in header["effects"]} == set(rows)
    for entry in header["effects"]:
        row = rows[entry["source"]]
        ratio = row["probability"] / seen["difference"]["probability"]
        assert entry["query"] == 3
        assert entry["effect"] == pytest.approx(math.log(ratio))


def header_in(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    start = text.index('id="clearhead-header">') + len('id="clearhead-header">')
    return json.loads(text[start : text.index("</script>", start)])


def test_two_records_before_and_after_a_cut() -> None:
    before = watched()
    with ch.knockout(MODEL, masks.diagonal(1)):
        after = watched()
    page = ch.view(before, list(TEXT), other=after, names=("before", "after"))
    header, chunks = page.shown.pages()
    assert (header["title"], header["other"]["name"]) == ("before − after", "before")
    assert len(header["other"]["layers"]) == len(header["layers"]) == 4
    for name, seen in (("full/0/2/1", before), ("other/full/0/2/1", after)):
        data = np.frombuffer(chunks[name], "<f4").reshape(13, 13)
        assert np.array_equal(data, seen[2].value[0, 1].numpy())
    assert any(note.startswith("after: ") for note in header["notes"])


def test_two_prompts_keep_their_labels() -> None:
    second = "bell or spell"
    other = watched(tokens=MODEL.vocabulary.encode(second)[None])
    page = ch.view(watched(), list(TEXT), other=other, other_tokens=list(second))
    header = header_of(page)
    assert [axis["labels"][0] for axis in header["axes"]] == [list(TEXT), list(second)]
    assert {x["query_axis"] for x in header["other"]["layers"]} == {1}
    assert any("tokens differ" in note for note in header["notes"])


def test_records_that_cannot_be_compared_are_refused() -> None:
    other = watched(tokens=TOKENS[:, :5])
    with pytest.raises(ValueError, match=r"other: has layers with the heads and positions"):
        ch.view(watched(), other=other)


def test_view_compares_two_files(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    watched().save("a.seen")
    with ch.ablate(MODEL, [(1, 2)]):
        watched().save("b.seen")
    assert main(["view", "a.seen", "b.seen", "-o", "both.html"]) == 0
    assert header_in(Path("both.html"))["other"]["other_name"] == "b.seen"
    watched(tokens=TOKENS[:, :5]).save("c.seen")
    assert main(["view", "a.seen", "c.seen", "-o", "none.html"]) == 2
    assert "OTHER: has layers with the heads" in capsys.readouterr().err
    assert not Path("none.html").exists()
    assert main(["view", "a.seen", "--mask", "-o", "mask.html"]) == 0
    assert header_in(Path("mask.html"))["kind"] == "mask"


def test_a_mask_is_shown_with_every_edge_and_its_words() -> None:
    mask = masks.causal() & masks.window(3) | masks.first(1)
    header, chunks = ch.view(mask, query=5, source=7).shown.pages()
    (entry,) = header["layers"]
    assert (header["kind"], entry["queries"], entry["sources"], entry["offset"]) == (
        "mask",
        5,
        7,
        2,
    )
    assert header["title"] == "causal() & window(3) | first(1)"
    words = json.loads(chunks["why/0/0"])
    for i in range(5):
        for j in range(7):
            expected = mask.why(i, j, query=5, source=7).split("\n")[1:]
            assert words[i][j] == [line[2:] for line in expected]
    assert [part["name"] for part in entry["parts"]] == ["causal()", "window(3)", "first(1)"]
    for part in entry["parts"]:
        leaf = masks.parse(part["name"])
        assert np.array_equal(runs(chunks[part["mask"]], 7), leaf.dense(5, 7).numpy())


def runs(data: bytes, size: int) -> np.ndarray:
    numbers, rows, at = np.frombuffer(data, "<u4"), [], 0
    while at < len(numbers):
        row = np.zeros(size, bool)
        for start, stop in numbers[at + 1 : at + 1 + 2 * numbers[at]].reshape(-1, 2):
            row[start:stop] = True
        rows.append(row)
        at += 1 + 2 * numbers[at]
    return np.stack(rows)


def test_a_mask_that_differs_by_head_or_calls_a_function_is_shown_right() -> None:
    edges = torch.rand(2, 3, 5, 5) > 0.5
    _, chunks = ch.view(masks.dense(edges)).shown.pages()
    for sample in range(2):
        expected = edges[sample].any(0).numpy()
        assert np.array_equal(runs(chunks[f"mask/{sample}/0"], 5), expected)
    parts = header_of(ch.view(masks.where(lambda b, h, i, j: j < 2), query=4))["layers"][0]["parts"]
    assert parts == []


def test_the_masks_of_a_model_need_no_maps() -> None:
    page = ch.view(watched(read=readings.Entropy()), list(TEXT), kind="mask")
    header, chunks = page.shown.pages()
    assert [entry["module"] for entry in header["layers"]] == [
        f"blocks.{n}.attention" for n in range(4)
    ]
    assert np.array_equal(runs(chunks["mask/0/3"], 13), np.tril(np.ones((13, 13), bool)))
    assert header["axes"][0]["labels"] == [list(TEXT)]


def test_the_command_mask_writes_a_page(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["mask", "causal & window(3)", "-q", "9", "--html", "m.html"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Wrote m.html"
    assert header_in(Path("m.html"))["layers"][0]["queries"] == 9
    assert main(words) == 2
    assert "--html: is a new file" in capsys.readouterr().err
    assert main(["mask", "causal", "-q", "10000", "--html", "large.html"]) == 2
    assert "8,192 positions a side" in capsys.readouterr().err
    assert not Path("large.html").exists()


def test_an_atlas_has_the_means_of_the_survey() -> None:
    survey = heads.measure(MODEL, TOKENS)
    page = ch.view(survey)
    for name in heads.STATISTICS:
        np.testing.assert_allclose(statistic(page, name)[0], survey.mean(name), rtol=1e-6)
    header = header_of(page)
    known = {each["name"]: each for each in header["statistics"]}
    assert known["entropy"]["paper"].startswith("Zhai et al. 2023")
    assert known["induction"]["definition"].startswith("The weight on the tokens that came after")
    assert all(not entry["encoding"] for entry in header["layers"])


def test_an_atlas_with_a_record_shows_its_maps_and_the_survey() -> None:
    survey = heads.measure(MODEL, MODEL.vocabulary.encode("a yellow bell")[None])
    with torch.no_grad(), ch.watch(MODEL, read=readings.Weights(), layers=[1, 3]) as seen:
        MODEL(TOKENS)
    page = ch.view(survey, list(TEXT), record=seen)
    header, chunks = page.shown.pages()
    assert [(x["layer"], x["encoding"]) for x in header["layers"]] == [
        (1, "f32"), (3, "f32"), (0, None), (2, None)
    ]  # fmt: skip
    expected = survey.mean("previous")[[1, 3, 0, 2]]
    np.testing.assert_allclose(statistic(page, "previous")[0], expected, rtol=1e-6)
    data = np.frombuffer(chunks["full/0/1/2"], "<f4").reshape(13, 13)
    assert np.array_equal(data, seen[1].value[0, 2].numpy())


def test_a_record_of_another_model_is_refused() -> None:
    other = ch.record_from(np.eye(3)[None].repeat(9, 0))
    moved = replace(other, layers=tuple(replace(x, layer=9, heads=(8,) * 9) for x in other.layers))
    with pytest.raises(ValueError, match="record: has heads of the table"):
        ch.view(heads.measure(MODEL, TOKENS), record=moved)


def test_the_command_heads_writes_an_atlas(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("page.txt").write_text("hell or shell\n" * 3)
    assert main(["scan", "page.txt", "--out", "page.heads"]) == 0
    watched().save("page.seen")
    Path("labels.json").write_text(json.dumps(list(TEXT)))
    words = ["heads", "page.heads", "--html", "atlas.html", "--record", "page.seen"]
    assert main([*words, "--tokens", "labels.json"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Wrote atlas.html"
    header = header_in(Path("atlas.html"))
    assert header["kind"] == "atlas"
    assert header["axes"][0]["labels"] == [list(TEXT)]
    roles = [names for entry in header["layers"] for names in entry["roles"]]
    assert any(roles)
    assert main(["heads", "page.heads", "--record", "page.seen"]) == 2
    assert "--record: belongs to --html" in capsys.readouterr().err
    assert main([*words, "--force", "--tokens", "missing.json"]) == 2


def test_statistics_of_a_page_are_those_of_a_survey() -> None:
    survey, page = heads.measure(MODEL, TOKENS), ch.view(watched(), list(TEXT))
    for name in (
        "entropy", "entropy_normalized", "confidence", "sink", "previous", "self", "induction",
    ):  # fmt: skip
        found, expected = statistic(page, name)[0], survey.mean(name)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)
    for layer, cosines in enumerate(survey.overlap):
        others = cosines.masked_fill(torch.eye(4, dtype=torch.bool), -1).amax(-1)
        np.testing.assert_allclose(statistic(page, "overlap")[0, layer], others, rtol=1e-5)


def test_long_records_have_statistics_from_readings() -> None:
    read = (
        readings.TopK(3), readings.Entropy(), readings.Mass(masks.first(1)),
        readings.Mass(masks.diagonal(1)),
    )  # fmt: skip
    survey, page = heads.measure(MODEL, TOKENS), ch.view(watched(read=read))
    for name in ("entropy", "entropy_normalized", "sink", "previous"):
        np.testing.assert_allclose(statistic(page, name)[0], survey.mean(name), rtol=1e-5)


def test_every_statistic_has_a_definition_and_its_papers() -> None:
    own = {"entropy_normalized", "self", "precursor"}
    for name, known in heads.STATISTICS.items():
        assert known.definition.endswith("."), name
        assert "(" not in known.definition or ")" in known.definition
        assert bool(known.paper) == (name not in own), name
    assert heads.STATISTICS["previous"].paper == (
        'Olsson et al. 2022, "In-context Learning and Induction Heads"; Voita et al. 2019'
    )
    assert heads.STATISTICS["sink"].definition.startswith("The weight on the first token: w_i0")


def test_segments_are_statistics_of_every_head() -> None:
    weights = watched()[1].value[0]
    parts = [(0, 4, "one"), (4, 8, "two"), (8, 13, "three")]
    page = ch.view(watched(), segments=parts)
    found = statistic(page, "segment three → one")[0, 1]
    np.testing.assert_allclose(found, weights[:, 8:, :4].sum(-1).mean(-1), rtol=1e-5)
    assert header_of(page)["axes"][0]["segments"] == tuple(parts)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"segments": [(0, 9, "a"), (5, 13, "b")]}, "segments: are .start, stop, name."),
        ({"segments": [(0, 99, "a")]}, "segments: are"),
        ({"segments": [3]}, "segments: are"),
        ({"grid": (4, 4)}, "grid: is .rows, columns. of patches"),
        ({"grid": 3}, "grid: is"),
        ({"kind": "map"}, 'kind: is "mask"'),
        ({"query": 3}, "query: belongs to a mask"),
        ({"record": 3}, "record: belongs to a survey"),
        ({"tokens": list("abc")}, "tokens: has one label for each source"),
        ({"names": ("a",), "other": watched()}, "names: are two texts"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        ch.view(watched(), **options)


def test_a_model_whose_weights_were_not_loaded_is_named() -> None:
    torch.manual_seed(0)
    q = 1e-3 * torch.randn(1, 2, 30, 8)
    with ch.watch(ch.attend, read=readings.Weights()) as seen:
        ch.attend(q, q, q, masks.causal())
    assert UNTRAINED in header_of(ch.view(seen))["notes"]
    assert UNTRAINED not in header_of(ch.view(watched()))["notes"]
    with ch.watch(ch.attend, read=(readings.TopK(2), readings.Entropy(normalized=True))) as seen:
        ch.attend(q, q, q, masks.causal())
    assert UNTRAINED in header_of(ch.view(seen))["notes"]


def test_what_a_file_leaves_out_is_announced_before_it_is_made(monkeypatch: Any) -> None:
    monkeypatch.setattr("clearhead.views.content.layers.MOST", 100)
    with pytest.warns(UserWarning, match=r"2,704 weights, and a file holds .*\n.*serve"):
        page = ch.view(watched())
    assert header_of(page)["layers"][0]["top"] == 13
    served = page.shown.content(live=True)
    assert served.header["layers"][0]["encoding"] == "f32"


def test_a_file_above_the_cap_is_refused_before_it_is_made(monkeypatch: Any) -> None:
    monkeypatch.setattr("clearhead.views.content.records.CAP", 1000)
    with pytest.raises(
        ValueError, match=r"seen: fits into a file of 0 MB; got about 0 MB\n.*serve"
    ):
        ch.view(watched())


def test_a_folder_that_cannot_be_written_is_named_before_any_work(
    tmp_path: Path, capsys: Any
) -> None:
    for words in (["look", "hell"], ["mask", "causal"]):
        assert main([*words, "--html", str(tmp_path / "no" / "a.html")]) == 2
        seen = capsys.readouterr()
        assert "--html: lies in a folder that can be written" in seen.err
        assert seen.out == ""


def test_a_record_of_another_version_or_a_cut_file_is_named(tmp_path: Path, capsys: Any) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "newer.seen"
    head = {"schema": "clearhead.seen", "version": 99, "records": [], "notes": []}
    save_file({"x": torch.zeros(1)}, path, metadata={"clearhead": json.dumps(head)})
    assert main(["view", str(path)]) == 2
    assert "is of schema version 1; got version 99" in capsys.readouterr().err
    watched().save(tmp_path / "a.seen")
    whole = (tmp_path / "a.seen").read_bytes()
    for size in (0, 7, 300, len(whole) - 1):
        (tmp_path / "cut.seen").write_bytes(whole[:size])
        assert main(["view", str(tmp_path / "cut.seen")]) == 2
        assert "RECORD: is a file that seen.save wrote" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--serve", "-o", "x.html"], "--out: and --serve exclude each other"),
        (["--port", "80"], "--port: belongs to --serve"),
        (["--other-tokens", "x.json"], "--other-tokens: needs OTHER"),
        (["b.seen", "--mask"], "--mask: shows the masks of one record"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], text: str, capsys: Any) -> None:
    assert main(["view", "a.seen", *words]) == 2
    assert text in capsys.readouterr().err
