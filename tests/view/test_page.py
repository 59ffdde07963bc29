"""What the page shows is what the record holds, told by a browser; the numbers are numpy's."""

from __future__ import annotations

import base64
import csv
import io
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.views.page import bundle, save
from clearhead.views.page import html as page_html
from tests.view.browser import run
from tests.view.pages import BROKEN, EMPTY, HOSTILE, RECORDS, WEIGHTS

READ = [name for name in RECORDS if name not in ("nothing", "atlas", "mask")]
Seen = dict[str, Any]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Everything that the browser reports, in one run."""
    folder = tmp_path_factory.mktemp("pages")
    for name, make in RECORDS.items():
        save(folder / f"{name}.html", *make().finish())
    empty = folder / "empty.html"
    empty.write_text("<!DOCTYPE html><title>empty</title>", encoding="utf-8")
    inner = escape(page_html(*RECORDS["plain"]().finish()))
    frame = f'<!DOCTYPE html><iframe sandbox="allow-scripts" srcdoc="{inner}"></iframe>'
    (folder / "frame.html").write_text(frame, encoding="utf-8")
    newer = RECORDS["one"]()
    newer.header["version"] = 2
    save(folder / "newer.html", *newer.finish())
    return run(jobs(folder))


def jobs(folder: Path) -> list[dict[str, Any]]:
    def job(check: str, page: str, **more: Any) -> dict[str, Any]:
        return {"name": check, "check": check, "file": str(folder / f"{page}.html"), **more}

    return [
        *(job("read", name) | {"name": name} for name in [*READ, "mask"]),
        job("read", "large", name="zoomed", hash="#layer=0&head=1&zoom=280-300-270-301"),
        job("read", "plain", name="hidden", hash="#head=3&hide=1&query=5&source=4"),
        job("read", "plain", name="mean", hash="#head=mean&query=3"),
        job("read", "compared", name="after", hash="#side=other&head=1"),
        job("read", "batch", name="second", hash="#sample=1&query=6"),
        job("read", "plain", name="sorted", hash="#sort=sink&least=0.4"),
        *(job("words", name, name=f"{name}.words") for name in ("nothing", "atlas", "newer")),
        job("read", "live", name="live.mean", hash="#head=mean"),
        job("words", "damaged", name="unread", hash="#head=1"),
        job("sandboxed", "frame"),
        job("options", "selected"),
        job("options", "compared", name="records"),
        job("colours", "broken", cells=[[0, 6], [4, 1], [2, 0], [6, 0]], queries=7, sources=7),
        job("pointer", "plain"),
        job("keyboard", "plain"),
        job("exported", "hostile"),
        job("widgets", "empty", script=bundle("widget"), records=kernels()),
        job("read", "hostile", name="narrow", width=360),
        *(
            job("accessible", page, name=f"{page}.axe.{dark}", dark=dark)
            for page in ("plain", "compared", "cross", "mask")
            for dark in (False, True)
        ),
    ]


def kernels() -> list[dict[str, Any]]:
    made = [RECORDS[name]().finish() for name in ("plain", "selected")]
    return [
        {"header": header, "chunks": {n: base64.b64encode(d).decode() for n, d in chunks.items()}}
        for header, chunks in made
    ]


def of(seen: Seen, name: str) -> Any:
    result = seen[name]
    assert "failed" not in result, result
    assert result["errors"] == []
    assert result["requests"] == []
    assert result["dialogs"] == []
    return result["value"]


def cells(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"))))


def grid(text: str, field: str = "weight") -> dict[tuple[int, int], str]:
    return {(int(c["query"]), int(c["source"])): c[field] for c in cells(text)}


@pytest.mark.parametrize("name", READ)
def test_every_record_opens_without_error_or_request_and_fits(seen: Seen, name: str) -> None:
    assert of(seen, name)["wide"] <= 0


def test_every_cell_is_the_weight_of_the_record(seen: Seen) -> None:
    shown = of(seen, "plain")
    states = grid(shown["csv"], "state")
    for (query, source), text in grid(shown["csv"]).items():
        if source > query:
            assert states[query, source] == "blocked"
        else:
            assert np.float32(text) == WEIGHTS["plain"][0, query, source]


def test_the_question_lists_sources_by_weight_with_rank_remainder_and_effect(seen: Seen) -> None:
    shown = of(seen, "plain")
    row = WEIGHTS["plain"][0, 6]
    assert shown["where"]["title"] == "Where does t6 look?"
    assert "may attend to 7 sources" in shown["where"]["under"]
    order = [position for position, *_ in shown["where"]["rows"]]
    assert order == np.argsort(-row, kind="stable").tolist()
    assert shown["where"]["rest"] == "These are all sources with a weight; together 1.00."
    effects = {position: effect for position, _, _, effect in shown["where"]["rows"]}
    assert effects[5] == "−1.25"
    assert effects[0] == "–"


def test_who_looks_at_a_source_lists_the_queries(seen: Seen) -> None:
    shown = of(seen, "hidden")["who"]
    column = WEIGHTS["plain"][1, 4:, 4]
    assert shown["title"] == "Who looks at t4?"
    assert [q for q, *_ in shown["rows"]] == (4 + np.argsort(-column)).tolist()


@pytest.mark.parametrize(("name", "within"), [("top", 0.0005), ("planes", 2 ** (1 / 12) - 1)])
def test_the_largest_weights_of_a_row_and_what_is_not_held(
    seen: Seen, name: str, within: float
) -> None:
    shown = grid(of(seen, name)["csv"])
    states = grid(of(seen, name)["csv"], "state")
    weights = WEIGHTS["top"][0]
    for query in range(41):
        largest = set(np.argsort(-weights[query], kind="stable")[:4]) & set(range(query + 1))
        for source in range(query + 1):
            if source in largest:
                assert float(shown[query, source]) == pytest.approx(weights[query, source], within)
            else:
                assert states[query, source] == "not held"
    assert "not among the 4 largest of its row" in of(seen, name)["legend"]


def test_log_codes_are_said_to_be_coarse(seen: Seen) -> None:
    shown = of(seen, "coded")
    for (query, source), text in grid(shown["csv"]).items():
        if source <= query:
            exact = max(WEIGHTS["top"][0, query, source], 2 ** (-253 / 16))
            assert float(text) == pytest.approx(exact, 2 ** (1 / 32) - 1 + 1e-6)
    assert all(weight.startswith("≈") for _, _, weight, _ in shown["where"]["rows"])


def test_the_overview_is_the_largest_weight_of_each_block(seen: Seen) -> None:
    shown = cells(of(seen, "large")["csv"])
    starts = np.cumsum([0] + [len(p) for p in np.array_split(np.arange(301), 16)])
    assert "overview" in of(seen, "large")["legend"]
    for cell in shown[:: len(shown) // 997]:
        down = np.searchsorted(starts, int(cell["query_start"]), "right") - 1
        across = np.searchsorted(starts, int(cell["source_start"]), "right") - 1
        block = WEIGHTS["large"][
            0, starts[down] : starts[down + 1], starts[across] : starts[across + 1]
        ]
        assert float(cell["weight"]) == pytest.approx(block.max(), 2 ** (1 / 32) - 1 + 1e-6)


def test_zooming_in_shows_single_weights(seen: Seen) -> None:
    shown = grid(of(seen, "zoomed")["csv"])
    assert set(shown) == {(q, s) for q in range(280, 300) for s in range(270, 301)}
    held = {pair: float(text) for pair, text in shown.items() if text}
    assert held
    for (query, source), weight in held.items():
        assert weight == pytest.approx(WEIGHTS["large"][1, query, source], 0.0005)


def test_hidden_sources_are_named_and_not_drawn(seen: Seen) -> None:
    states = grid(of(seen, "hidden")["csv"], "state")
    assert {s for (_, s), state in states.items() if state == "hidden"} == {0}
    assert "hidden" in of(seen, "hidden")["legend"]


def test_the_mean_is_the_mean_of_the_heads(seen: Seen) -> None:
    shown = grid(of(seen, "mean")["csv"])
    mean = WEIGHTS["plain"].mean(0)
    for (query, source), text in shown.items():
        if source <= query:
            assert float(text) == pytest.approx(mean[query, source], 1e-6)
    assert of(seen, "mean")["where"]["under"].startswith("query 3 · layer 0, mean of 3 heads")


def test_two_records_are_compared_as_a_difference(seen: Seen) -> None:
    difference = WEIGHTS["plain"][0] - WEIGHTS["other"][0]
    for (query, source), text in grid(of(seen, "compared")["csv"]).items():
        if source <= query:
            assert float(text) == pytest.approx(difference[query, source], abs=1e-7)
    assert "before − after" in of(seen, "compared")["where"]["rest"]
    assert np.float32(grid(of(seen, "after")["csv"])[6, 3]) == WEIGHTS["other"][1, 6, 3]
    assert ["Record", ["before", "after", "difference"]] in of(seen, "records")


def test_a_rectangle_has_queries_down_and_sources_across(seen: Seen) -> None:
    shown = of(seen, "cross")
    for (query, source), text in grid(shown["csv"]).items():
        assert np.float32(text) == WEIGHTS["cross"][0, query, source]
    first = cells(shown["csv"])[0]
    assert (first["query_token"], first["source_token"]) == ("t0", "s0")
    assert shown["where"]["title"] == "Where does t4 look?"
    assert {label[0] for _, label, *_ in shown["where"]["rows"]} == {"s"}


def test_nan_and_empty_rows_are_shown_as_such(seen: Seen) -> None:
    weights, states = grid(of(seen, "broken")["csv"]), grid(of(seen, "broken")["csv"], "state")
    assert [weights[4, s] for s in range(5)] == ["NaN"] * 5
    assert {states[2, s] for s in range(7)} == {"blocked"}
    assert np.isnan(BROKEN[0, 4]).all()
    assert not EMPTY[2].any()
    assert "NaN" in of(seen, "broken")["legend"]


def test_a_blocked_cell_is_hatched_and_a_zero_is_not(seen: Seen) -> None:
    blocked, nan, empty, plain = of(seen, "colours")
    assert len(blocked) >= 2
    assert len(nan) >= 2
    assert len(empty) >= 2
    assert len(plain) == 1


def test_generated_tokens_are_queries_behind_the_prompt(seen: Seen) -> None:
    shown = of(seen, "generated")
    assert shown["where"]["title"] == "Where does t6 look?"
    assert "query 2" in shown["where"]["under"]
    assert np.float32(grid(shown["csv"])[0, 4]) == WEIGHTS["plain"][0, 4, 4]


def test_layers_heads_and_rows_keep_their_numbers(seen: Seen) -> None:
    shown = of(seen, "selected")
    assert shown["heads"] == ["11.2", "11.5", "11.7"]
    assert dict(of(seen, "options"))["Head"] == ["mean of 3", "2", "5", "7"]
    states = grid(shown["csv"], "state")
    assert {q for (q, _), state in states.items() if state != "not held"} == {1, 4, 6}
    assert np.float32(grid(shown["csv"])[4, 2]) == WEIGHTS["plain"][0, 4, 2]


def test_a_sample_of_a_batch(seen: Seen) -> None:
    shown = of(seen, "second")
    assert shown["where"]["title"] == "Where does u6 look?"
    assert np.float32(grid(shown["csv"])[6, 3]) == WEIGHTS["other"][0, 6, 3]


def test_heads_are_sorted_and_filtered_by_a_statistic(seen: Seen) -> None:
    assert of(seen, "sorted")["heads"] == ["0.3", "1.0", "0.8"]
    assert len(of(seen, "tall")["heads"]) == 100


def test_records_at_the_edge(seen: Seen) -> None:
    assert of(seen, "one")["where"]["rows"] == [[0, "only", "1.00", None]]
    assert "2 heads" in of(seen, "nothing.words")
    assert "reads clearhead.view version 1" in of(seen, "newer.words")
    assert of(seen, "patches")["where"]["title"] == "Where does #6 look?"


def test_rows_that_are_asked_for_make_the_map(seen: Seen) -> None:
    for name, weights in (("live", WEIGHTS["live"][0]), ("live.mean", WEIGHTS["live"].mean(0))):
        shown = grid(of(seen, name)["csv"])
        for (query, source), text in shown.items():
            if source <= query:
                assert float(text) == pytest.approx(weights[query, source], 1e-6)


def test_what_cannot_be_read_is_said(seen: Seen) -> None:
    assert "this page does not hold full/0/0/1" in of(seen, "unread")


def test_records_that_do_not_fit_are_not_subtracted(seen: Seen) -> None:
    shown = of(seen, "unlike")
    assert np.float32(grid(shown["csv"])[6, 3]) == WEIGHTS["plain"][0, 6, 3]
    assert "difference" not in shown["where"]["under"]


def test_a_mask_page_says_who_may_attend_and_why(seen: Seen) -> None:
    shown = of(seen, "mask")
    assert grid(shown["csv"], "state")[6, 3] == "blocked"
    assert grid(shown["csv"], "state")[6, 4] == ""
    assert shown["where"]["title"] == "Whom may t6 attend to?"
    assert "3 sources of 7" in shown["where"]["under"]


def test_an_atlas_has_all_heads_by_statistic_with_definitions(seen: Seen) -> None:
    text = of(seen, "atlas.words")
    for part in ("Atlas of heads", "22", "0.917", "A paper, 2022", "that entropy names"):
        assert part in text


def test_hover_previews_a_click_locks_escape_frees(seen: Seen) -> None:
    hover, locked, held, freed = of(seen, "pointer")
    weight = WEIGHTS["plain"][0, 4, 2]
    assert hover[0].startswith("query 4 “\u2068t4\u2069” → source 2 “\u2068t2\u2069”: weight ")
    assert float(hover[0].split("weight ")[1].split(",")[0]) == pytest.approx(weight, 0.05)
    assert hover[1] == "Where does t4 look?"
    assert "query=" not in hover[2]
    assert "query=5&source=1" in locked[2]
    assert held[1] == "Where does t5 look?"
    assert "query=" not in freed[2]


def test_the_whole_tour_by_keyboard(seen: Seen) -> None:
    tour = of(seen, "keyboard")
    stops = " ".join(tour["stops"])
    for stop in ("select", "input", "div.tokens", "canvas.over", "button.pick", "button.head"):
        assert stop in stops
    assert tour["moved"].startswith("query 4 ")
    assert "query=4" in tour["locked"]
    assert "query=" not in tour["freed"]
    assert "head=3" in tour["freed"]
    assert "zoom=" in tour["zoomed"]
    assert "mean of 3 heads" in tour["mean"]
    assert "layer 1" in tour["layer"]
    assert tour["found"] == "Where does t3 look?"
    assert tour["theme"] == "dark"
    assert tour["help"] is True
    assert tour["closed"] is False
    assert tour["strip"] == "Where does t1 look?"


def test_hostile_tokens_are_text_alone(seen: Seen) -> None:
    shown, narrow, files = of(seen, "hostile"), of(seen, "narrow"), of(seen, "exported")
    assert narrow["wide"] <= 0
    assert files["ran"] is False
    labels = [c["query_token"] for c in cells(shown["csv"])[:: len(HOSTILE)]]
    assert labels[0] == HOSTILE[0]
    assert labels[5] == "␀␛[31m"
    assert labels[6] == "<U+D800>"
    assert labels[7] == "<U+202E>evil<U+202C>"
    assert labels[9] == "x" * 200 + "…"
    assert labels[12] == "a" + "\u0301" * 3 + "…"
    assert labels[13] == "'=HYPERLINK(1)"
    assert labels[15:18] == ["👩‍👩‍👧", "∅", "⏎"]


def test_pictures_are_whole_and_hold_no_script(seen: Seen) -> None:
    files = of(seen, "exported")
    assert files["svg"]["error"] is None
    assert set(files["svg"]["names"]) <= {
        "svg", "title", "defs", "pattern", "path", "rect", "text", "g"
    }  # fmt: skip
    assert bytes(files["png"]) == b"\x89PNG\r\n\x1a\n"


def test_two_widgets_in_one_document_do_not_collide(seen: Seen) -> None:
    first, second, document = of(seen, "widgets")
    assert first == ["Seven tokens", "query 6 · layer 0, head 3 · may attend to 7 sources"]
    assert second[1].startswith("query 6 · layer 11, head 2")
    assert document == ["", "false"]


def test_a_sandboxed_frame_shows_the_page(seen: Seen) -> None:
    assert of(seen, "sandboxed").startswith("query 6 · layer 0, head 8")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("page", ["plain", "compared", "cross", "mask"])
def test_axe_finds_no_serious_fault(seen: Seen, page: str, dark: bool) -> None:
    faults = of(seen, f"{page}.axe.{dark}")
    assert [fault for fault in faults if fault["impact"] in ("serious", "critical")] == []
