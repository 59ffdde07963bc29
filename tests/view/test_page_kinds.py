"""Pages of real calls, told by a browser: effects, two records, masks, an atlas."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead import heads, masks, readings
from tests.view.browser import run
from tests.view.pages import HOSTILE
from tests.view.records import MODEL, TEXT, TOKENS
from tests.view.records import of_the_model as watched

MASK = masks.causal() & masks.window(3) | masks.first(1)


def hostile_record() -> Any:
    size = len(HOSTILE)
    weights = np.tril(np.ones((2, size, size)))
    return ch.record_from(weights / weights.sum(-1, keepdims=True), HOSTILE)


def pages() -> dict[str, Any]:
    seen, table = watched(), ch.effects(MODEL, TOKENS, edges=[(12, i) for i in range(4)])
    whole = ch.effects(MODEL, TOKENS, heads=[(0, 0)])
    source = ch.effects(MODEL, TOKENS, sources=[12])
    with ch.knockout(MODEL, masks.diagonal(1)):
        cut = watched()
    survey = heads.measure(MODEL, MODEL.vocabulary.encode("a yellow bell or a shell")[None])
    return {
        "effects": ch.view(seen, list(TEXT), effects=[table, whole, source]),
        "bare": ch.view(seen, list(TEXT)),
        "compared": ch.view(seen, list(TEXT), other=cut, names=("whole", "cut")),
        "mask": ch.view(MASK, query=12),
        "large mask": ch.view(MASK, query=300),
        "masks": ch.view(watched(readings.Entropy()), list(TEXT), kind="mask"),
        "atlas": ch.view(survey, list(TEXT), record=watched(layers=[0, 1])),
        "survey": ch.view(survey),
        "top": ch.view(watched(readings.TopK(4)), list(TEXT)),
        "segments": ch.view(seen, list(TEXT), segments=[(0, 4, "a"), (4, 13, HOSTILE[0])]),
        "image": ch.view(ch.record_from(np.full((1, 10, 10), 0.1)), grid=(3, 3)),
        "hostile mask": ch.view(masks.causal(), HOSTILE),
        "hostile pair": ch.view(
            hostile_record(), other=hostile_record(), names=(HOSTILE[0], HOSTILE[2])
        ),
        "hostile atlas": ch.view(survey, title=HOSTILE[0]),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kinds")
    for name, page in pages().items():
        page.save(folder / f"{name}.html")

    def job(check: str, page: str, **more: Any) -> dict[str, Any]:
        return {"name": page, "check": check, "file": str(folder / f"{page}.html"), **more}

    jobs = [
        *(job("read", name) for name in ("effects", "bare", "compared", "segments", "image")),
        job("read", "effects", name="other query", hash="#query=5"),
        job("read", "effects", name="scaled", hash="#hide=1&rows=scaled&query=12"),
        job("read", "effects", name="kept", hash="#hide=1&query=12"),
        job("read", "top", hash="#hide=1&rows=scaled"),
        job("read", "bare", name="blocked", hash="#query=2&source=9"),
        *(job("why", name) for name in ("mask", "large mask", "masks")),
        *(job("atlas", name) for name in ("atlas", "survey")),
        job("tabs", "mask", name="mask.tabs", until="canvas.over"),
        job("tabs", "atlas", name="atlas.tabs", until="Head 1.2: "),
        *(job("read", f"hostile {name}") for name in ("pair", "mask")),
        job("read", "hostile mask", name="narrow", width=360),
        job("words", "hostile atlas"),
        *(
            job("accessible", name, name=f"{name}.axe.{dark}", dark=dark)
            for name in ("effects", "compared", "mask", "masks", "atlas")
            for dark in (False, True)
        ),
    ]
    return run(jobs)


def of(seen: dict[str, Any], name: str) -> Any:
    assert "failed" not in seen[name], seen[name]
    assert [seen[name][kind] for kind in ("errors", "requests", "dialogs")] == [[], [], []]
    return seen[name]["value"]


def cells(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"))))


def test_effects_stand_beside_the_weights(seen: dict[str, Any]) -> None:
    table = ch.effects(MODEL, TOKENS, edges=[(12, i) for i in range(4)])
    shown = of(seen, "effects")["where"]
    effects = {position: words for position, *_, words in shown["rows"]}
    for row in table:
        assert float(effects[row.cut[1]].replace("−", "-")) == pytest.approx(row.effect, rel=0.05)
    assert effects[9] == "–"
    weights = watched()[0].value[0, 0, 12]
    ranks = [position for position, *_ in shown["rows"]]
    assert ranks == sorted(ranks, key=lambda position: -float(weights[position]))


def test_where_there_are_no_effects_the_page_says_how_to_get_them(seen: dict[str, Any]) -> None:
    bare = of(seen, "bare")["page"]
    assert "This page holds no effects" in bare
    assert "ch.effects(model, inputs, edges=[(12, 9), (12, 8), (12, 12)])" in bare
    assert "Effects of cuts are held for query 12" in of(seen, "other query")["page"]
    assert "the change of the log-probability (nats)" in of(seen, "effects")["page"]
    assert "Without this whole head" in of(seen, "effects")["page"]
    assert "Cut from every query but its own" in of(seen, "effects")["page"]


def test_a_hidden_sink_is_left_out_and_rows_sum_to_one_again(seen: dict[str, Any]) -> None:
    weights = watched()[0].value[0, 0].double().numpy()
    expected = weights.copy()
    expected[:, 0] = 0
    expected[1:] /= expected[1:].sum(-1, keepdims=True)
    for name, values in (("scaled", expected), ("kept", weights)):
        lines = cells(of(seen, name)["csv"])
        assert {line["state"] for line in lines if line["source"] == "0"} == {"hidden"}
        for line in lines:
            if line["state"] == "" and line["source"] != "0":
                value = values[int(line["query"]), int(line["source"])]
                assert float(line["weight"]) == pytest.approx(value, rel=1e-4)
    rows = of(seen, "scaled")["where"]["rows"]
    assert 0 not in {position for position, *_ in rows}
    assert "sum to 1 again" in of(seen, "scaled")["legend"]
    assert "stay as they are" in of(seen, "kept")["legend"]
    # Rows of which the record does not hold everything are not scaled.
    assert "stay as they are" in of(seen, "top")["legend"]


def test_a_blocked_edge_is_explained_by_the_part_that_blocks_it(seen: dict[str, Any]) -> None:
    assert of(seen, "blocked")["readout"].endswith("blocked by the mask. causal() blocks it.")


def test_the_difference_of_two_records(seen: dict[str, Any]) -> None:
    with ch.knockout(MODEL, masks.diagonal(1)):
        cut = watched()
    difference = (watched()[0].value - cut[0].value)[0, 0].double().numpy()
    lines = cells(of(seen, "compared")["csv"])
    for line in lines:
        if line["state"] == "":
            value = difference[int(line["query"]), int(line["source"])]
            assert float(line["weight"]) == pytest.approx(value, abs=1e-7)
    assert {line["state"] for line in lines} == {"", "blocked"}
    assert of(seen, "compared")["title"] == "whole − cut"


@pytest.mark.parametrize("name", ["mask", "large mask"])
def test_a_mask_says_who_may_attend_and_why(seen: dict[str, Any], name: str) -> None:
    shown, size = of(seen, name), 12 if name == "mask" else 300
    where, why, who = shown["first"]
    last = size - 1
    assert where[0] == f"Whom may #{last} attend to?"
    assert where[2] == f"0, {last - 2}–{last}"
    assert why[0] == f"Why is {last} → {last} allowed?"
    assert who[2] == f"{last}"
    assert shown["moved"]["hash"].startswith(f"layer=0&head=0&query={last - 1}&source={last - 2}")
    moved = MASK.why(last - 1, last - 2, query=size).split("\n")
    assert shown["moved"]["say"][1][0] == f"Why is {last - 1} → {last - 2} allowed?"
    if name == "mask":
        assert shown["moved"]["say"][1][2:] == [line[2:] for line in moved[1:]]
        hovered = MASK.why(11, 0, query=size).split("\n")[1:]
        assert shown["hovered"][1][2:] == [line[2:] for line in hovered]
    else:
        assert shown["moved"]["say"][1][2:] == [
            "causal() allows it", "window(3) allows it", "first(1) blocks it",
        ]  # fmt: skip


def test_the_masks_of_a_model_are_those_of_its_calls(seen: dict[str, Any]) -> None:
    where, why, who = of(seen, "masks")["first"]
    assert where[0] == "Whom may l attend to?"
    assert "13 sources of 13" in where[1]
    assert why[2] == "allowed by causal(): source 12 is the position of query 12"
    assert who[1] == "source 12 · 1 query of 13"


@pytest.mark.parametrize("name", ["atlas", "survey"])
def test_an_atlas_is_sorted_and_leads_to_maps(seen: dict[str, Any], name: str) -> None:
    survey = heads.measure(MODEL, MODEL.vocabulary.encode("a yellow bell or a shell")[None])
    shown = of(seen, name)
    for order, statistic, sign in (
        ("first", "entropy", -1),
        ("down", "sink", -1),
        ("up", "sink", 1),
    ):
        means = survey.mean(statistic)
        places = [(layer, head) for layer in range(4) for head in range(4)]
        places.sort(key=lambda place: sign * float(means[place]))
        assert shown[order]["heads"] == [f"{layer}.{head}" for layer, head in places]
    assert shown["down"]["sorted"].count("descending") == 1
    assert shown["up"]["sorted"].count("ascending") == 1
    assert heads.STATISTICS["previous"].definition in shown["side"]
    assert "Olsson et al. 2022" in shown["side"]
    chosen = float(survey.mean("previous")[1, 2])
    assert float(shown["chosen"][0]) == pytest.approx(chosen, rel=0.05)
    if name == "atlas":
        assert "layer 1, head 2" in shown["under"]
        assert shown["seen"]
    assert shown["wide"] <= 0


def test_masks_and_atlases_are_toured_by_keyboard_alone(seen: dict[str, Any]) -> None:
    mask, atlas = of(seen, "mask.tabs"), of(seen, "atlas.tabs")
    for stop in ("button. Light or dark", "button. Help", "input.", "div.tokens", "canvas.over"):
        assert any(found.startswith(stop) for found in mask["stops"]), (stop, mask["stops"])
    assert "query=11" in mask["hash"]
    assert any(found.startswith("select.") for found in atlas["stops"])
    assert atlas["stops"][-1].startswith("button.pick Head 1.2: ")
    assert "layer=1&head=2" in atlas["hash"]


def test_segments_and_patches_are_shown(seen: dict[str, Any]) -> None:
    assert "The mean weight that a query of one segment" in of(seen, "segments")["page"]
    assert of(seen, "image")["where"]["title"] == "Where does #9 look?"


def test_hostile_names_and_tokens_are_text_on_every_page(seen: dict[str, Any]) -> None:
    assert of(seen, "hostile pair")["title"].startswith("</script>")
    assert of(seen, "hostile mask")["wide"] <= 0
    assert of(seen, "narrow")["wide"] <= 0
    assert "</script><script>window" in of(seen, "hostile atlas")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["effects", "compared", "mask", "masks", "atlas"])
def test_axe_finds_no_serious_fault(seen: dict[str, Any], name: str, dark: bool) -> None:
    faults = of(seen, f"{name}.axe.{dark}")
    assert [fault for fault in faults if fault["impact"] in ("serious", "critical")] == []
