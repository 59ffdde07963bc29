"""What users of other viewers reported about size, tokens, security, export and looks.

`CASES` names each case with the tests that hold it, here or in another file.
"""

from __future__ import annotations

import ast
import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import readings
from tests.view.browser import run

ROOT = Path(__file__).parents[2]
PAGE, KINDS = "tests/view/test_page.py", "tests/view/test_page_kinds.py"
VIEW = "tests/view/test_view.py"
SHOWN, HERE = "tests/view/test_shown.py", "tests/view/test_cases.py"

# The case, what was wanted, and the tests that hold it.
CASES: dict[str, tuple[str, list[str]]] = {
    "V1": ("long inputs open: no node for each weight", [
        f"{HERE}::test_v1_no_node_for_each_weight",
        "tests/view/test_page_size.py::test_a_large_record_is_one_file_of_bounded_size"]),
    "V2": ("chosen layers and heads keep their numbers; what is left out is announced", [
        f"{PAGE}::test_layers_heads_and_rows_keep_their_numbers",
        f"{VIEW}::test_what_a_file_leaves_out_is_announced_before_it_is_made"]),
    "V16": ("each layer's largest difference from the model's own output", [
        f"{HERE}::test_v16_the_check_against_the_model_is_shown"]),
    "V26": ("self and cross attention, each by its name", [
        f"{SHOWN}::test_an_encoder_and_a_decoder_have_their_own_labels"]),
    "V37": ("new tokens beside the prompt; the sink can be hidden", [
        f"{HERE}::test_v37_generated_tokens_follow_the_prompt",
        f"{PAGE}::test_generated_tokens_are_queries_behind_the_prompt"]),
    "V40": ("a hidden sink: rows as they are, or summing to 1 again; empty ones blank", [
        f"{HERE}::test_v40_a_row_of_which_nothing_is_left_is_blank",
        f"{KINDS}::test_a_hidden_sink_is_left_out_and_rows_sum_to_one_again"]),
    "V44": ("allowed and blocked by row, with the reason", [
        f"{KINDS}::test_a_mask_says_who_may_attend_and_why"]),
    "V46": ("the mask is its own: a blocked cell is no zero", [
        f"{PAGE}::test_a_blocked_cell_is_hatched_and_a_zero_is_not"]),
    "V47": ("empty rows are said to be empty", [
        f"{PAGE}::test_nan_and_empty_rows_are_shown_as_such"]),
    "V49": ("the sample of a batch; errors name the axis", [
        f"{PAGE}::test_a_sample_of_a_batch", f"{SHOWN}::test_what_cannot_be_shown_is_refused"]),
    "V62": ("tokens are text", [
        f"{PAGE}::test_hostile_tokens_are_text_alone",
        f"{KINDS}::test_hostile_names_and_tokens_are_text_on_every_page",
        "tests/view/test_document.py::test_a_hostile_token_is_data_in_the_header_alone"]),
    "V64": ("a character that is split over tokens shows whole, with its part; bytes on hover", [
        f"{HERE}::test_v64_v65_marks_numbers_and_bytes_of_tokens"]),
    "V65": ("a leading space is a thin mark; the token's number on hover", [
        f"{HERE}::test_v64_v65_marks_numbers_and_bytes_of_tokens"]),
    "V67": ("right-to-left tokens keep the order of positions", [
        f"{HERE}::test_v67_right_to_left_tokens_stand_by_position"]),
    "V68": ("blocked cells come from the mask, not from an assumption", [
        f"{HERE}::test_v68_nothing_is_blocked_without_a_mask"]),
    "V70": ("signed colours, safe for colour-blind readers; zoom; one source or query", [
        f"{HERE}::test_v70_colours_are_told_apart_by_lightness",
        f"{PAGE}::test_zooming_in_shows_single_weights",
        f"{PAGE}::test_hover_previews_a_click_locks_escape_frees"]),
    "V71": ("the text is coloured by the chosen head", [
        f"{HERE}::test_v64_v65_marks_numbers_and_bytes_of_tokens"]),
    "V76": ("offline", [f"{PAGE}::test_every_record_opens_without_error_or_request_and_fits"]),
    "V80": ("a small bundle", [
        "tests/view/test_document.py::test_the_module_is_small_when_packed"]),
    "V82": ("vector graphics", [f"{PAGE}::test_pictures_are_whole_and_hold_no_script"]),
    "V83": ("a picture of what is selected", [f"{HERE}::test_v83_a_picture_names_its_selection"]),
    "V85": ("HTML to embed, several in one document", [
        f"{HERE}::test_v85_fragments_share_a_document",
        f"{PAGE}::test_two_widgets_in_one_document_do_not_collide"]),
    "V86": ("a page is saved", [f"{SHOWN}::test_a_view_is_saved_whole_or_not_at_all"]),
    "V88": ("weights of one's own", [f"{SHOWN}::test_arrays_of_any_kind"]),
    "V89": ("arrays of any library", [f"{SHOWN}::test_arrays_of_any_library"]),
    "V91": ("image patches, and no labels at all", [
        f"{KINDS}::test_segments_and_patches_are_shown",
        f"{HERE}::test_v91_patches_lie_on_a_grid"]),
    "V94": ("nothing is found by hovering alone", [
        f"{HERE}::test_v94_every_control_is_a_visible_button",
        f"{PAGE}::test_the_whole_tour_by_keyboard"]),
    "V95": ("from segment to segment, by every head", [
        f"{VIEW}::test_segments_are_statistics_of_every_head"]),
    "V97": ("the effect of an edge beside its weight", [
        f"{KINDS}::test_effects_stand_beside_the_weights",
        f"{KINDS}::test_where_there_are_no_effects_the_page_says_how_to_get_them"]),
    "V98": ("a model that looks untrained is named", [
        f"{VIEW}::test_a_model_whose_weights_were_not_loaded_is_named"]),
    "V101": ("what could not be seen is listed", [f"{HERE}::test_v101_notes_of_the_run_are_shown"]),
    "V103": ("the mask of the live call, of any model", [
        f"{KINDS}::test_the_masks_of_a_model_are_those_of_its_calls"]),
    "V104": ("labels of one's own for the sources, such as regions of an image", [
        f"{SHOWN}::test_a_pair_of_labels_is_cross_attention"]),
}  # fmt: skip

MODEL = ch.models.load()
ARABIC = "مرحبا"


def test_every_case_is_held_by_tests_that_exist() -> None:
    known: dict[str, set[str]] = {}
    for _, tests in CASES.values():
        for test in tests:
            file, _, name = test.partition("::")
            if file not in known:
                nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
                known[file] = {x.name for x in nodes if isinstance(x, ast.FunctionDef)}
            assert name in known[file], test


def records() -> dict[str, Any]:
    shown: dict[str, Any] = {}
    long = torch.rand(1, 512, 512, generator=torch.Generator().manual_seed(0)).softmax(-1)
    shown["long"] = ch.view(ch.record_from(long))
    tokens = MODEL.vocabulary.encode("hell or shell")[None]
    with torch.no_grad(), ch.watch(MODEL, read=readings.Weights()) as seen:
        MODEL(tokens)
    seen.notes.append("layer 7 (blocks.7) could not be seen")
    shown["notes"] = ch.view(seen, list("hell or shell"))
    both = torch.full((2, 5, 5), 0.2)
    with ch.watch(ch.attend, read=readings.Weights()) as open_:
        q = torch.zeros(1, 1, 5, 4)
        ch.attend(q, q, q)
    shown["open"] = ch.view(open_, list("abcde"))
    shown["arabic"] = ch.view(ch.record_from(both, ["a", ARABIC, "b", "שלום", "c"]))
    shown["patches"] = ch.view(ch.record_from(np.full((1, 13, 13), 1 / 13)), grid=(3, 4))
    shown["pair"] = ch.view(seen, other=seen)
    return shown


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("cases")
    shown = records()
    for name, page in shown.items():
        page.save(folder / f"{name}.html")
    ch.view(generated(), [*"abcdef", *"ghij"]).save(folder / "generated.html")
    text_page(folder / "text.html")
    frames = shown["notes"].html(fragment=True) + shown["open"].html(fragment=True)
    (folder / "frames.html").write_text(f"<!DOCTYPE html>{frames}", encoding="utf-8")

    def job(check: str, page: str, **more: Any) -> dict[str, Any]:
        return {"name": page, "check": check, "file": str(folder / f"{page}.html"), **more}

    return run([
        *(job("strip", name) for name in ("long", "notes", "arabic", "patches", "generated")),
        job("strip", "text"), job("fragments", "frames"), job("read", "open"),
        job("read", "notes", name="words"),
        job("read", "notes", name="bare", hash="#hide=1&rows=scaled&query=0"),
        job("exported", "notes", name="chosen", hash="#layer=2&head=1&query=9&source=4"),
        *(job("ramp", name, name=f"{name}.{dark}", dark=dark)
          for name in ("open", "pair") for dark in (False, True)),
    ])  # fmt: skip


def generated() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.tensor([[3, 4, 5, 6, 7, 8]])
    with torch.no_grad(), ch.watch(model, read=readings.Weights()) as seen:
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return seen


def text_page(path: Path) -> None:
    """A text whose tokens are bytes: a letter of two of them is split."""
    from clearhead.views.content.comparison import with_tokens
    from clearhead.views.labels import labels
    from clearhead.views.shown import shown_of
    from clearhead.views.sight import PageView

    parts = [b"h", *(bytes([byte]) for byte in "é".encode()), b" x", b"\n"]
    shown = shown_of(ch.record_from(np.full((1, 5, 5), 0.2), labels(parts)))
    PageView(with_tokens(shown, [7, 11, 13, 17, 19], parts)).save(path)


def of(told: dict[str, Any], name: str) -> Any:
    assert "failed" not in told[name], told[name]
    assert [told[name][kind] for kind in ("errors", "requests", "dialogs")] == [[], [], []]
    return told[name]["value"]


def test_v1_no_node_for_each_weight(told: dict[str, Any]) -> None:
    # 262,144 weights; the tokens near the visible part are nodes, at most three each.
    assert of(told, "long")["nodes"] < 3 * 512 + 500


def test_v16_the_check_against_the_model_is_shown(told: dict[str, Any]) -> None:
    assert (
        "Largest difference of the weights from the model's own output"
        in of(told, "words")["about"]
    )


def test_v37_generated_tokens_follow_the_prompt(told: dict[str, Any]) -> None:
    chips = of(told, "generated")["chips"]
    # The last new token was never read: 6 + 4 - 1 positions.
    assert [text for text, *_ in chips] == list("abcdefghi")
    assert [i for i, (_, classes, *_) in enumerate(chips) if "new" in classes.split()] == [6, 7, 8]
    assert ["first-new" in classes for _, classes, *_ in chips].index(True) == 6


def test_v40_a_row_of_which_nothing_is_left_is_blank(told: dict[str, Any]) -> None:
    shown = of(told, "bare")
    lines = list(csv.DictReader(io.StringIO(shown["csv"].removeprefix("\ufeff"))))
    first = {line["state"] for line in lines if line["query"] == "0"}
    assert first == {"hidden", "blocked"}
    assert "Nothing is left of this row without the hidden sources." in shown["page"]


def test_v64_v65_marks_numbers_and_bytes_of_tokens(told: dict[str, Any]) -> None:
    chips = of(told, "text")["chips"]
    assert [text for text, *_ in chips] == ["h", "é␣1/2", "é␣2/2", "␣x", "⏎"]
    assert [title for *_, title, _ in chips] == [
        "position 0 · id 7 · bytes 68", "position 1 · id 11 · bytes c3",
        "position 2 · id 13 · bytes a9", "position 3 · id 17 · bytes 20 78",
        "position 4 · id 19 · bytes 0a",
    ]  # fmt: skip


def test_v67_right_to_left_tokens_stand_by_position(told: dict[str, Any]) -> None:
    chips = of(told, "arabic")["chips"]
    assert [text for text, *_ in chips] == ["a", ARABIC, "b", "שלום", "c"]
    assert {direction for *_, direction in chips} == {"auto"}


def test_v68_nothing_is_blocked_without_a_mask(told: dict[str, Any]) -> None:
    lines = list(csv.DictReader(io.StringIO(of(told, "open")["csv"].removeprefix("\ufeff"))))
    assert {line["state"] for line in lines} == {""}
    assert [float(line["weight"]) for line in lines] == pytest.approx([0.2] * 25)
    assert "blocked" not in of(told, "open")["legend"]


def lightness(colours: list[list[int]]) -> np.ndarray:
    """CIE L* of sRGB colours."""
    c = np.array(colours) / 255
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    y = linear @ [0.2126, 0.7152, 0.0722]
    return np.where(y > 216 / 24389, 116 * np.cbrt(y) - 16, y * 24389 / 27)


# Red and green cones that are missing (Machado et al. 2009, severity 1), on linear sRGB.
DEUTAN = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])


@pytest.mark.parametrize("dark", [False, True])
def test_v70_colours_are_told_apart_by_lightness(told: dict[str, Any], dark: bool) -> None:
    # A sequence rises all the way; a difference rises from its middle to both ends.
    ramp = lightness(of(told, f"open.{dark}"))
    steps = np.diff(ramp if dark else -ramp)
    assert (steps > -0.6).all()
    assert abs(ramp[-1] - ramp[0]) > 55
    both = of(told, f"pair.{dark}")
    away = lightness(both)
    middle = away[60:68].mean()
    for end in (away[0], away[-1]):
        assert abs(end - middle) > 15
    ends = (np.array([both[0], both[-1]]) / 255) ** 2.2 @ DEUTAN.T
    assert np.linalg.norm(ends[0] - ends[1]) > 0.25


def test_v83_a_picture_names_its_selection(told: dict[str, Any]) -> None:
    files = of(told, "chosen")
    assert files["title"].endswith("layer 2, head 1, query 9 → source 4")


def test_v85_fragments_share_a_document(told: dict[str, Any]) -> None:
    shown = of(told, "frames")
    assert shown["found"] == ["Attention of a model", "Attention of a model"]
    assert shown["outside"] == [2, False]


def test_v91_patches_lie_on_a_grid(told: dict[str, Any]) -> None:
    chips = of(told, "patches")["chips"]
    assert [text for text, *_ in chips] == ["#0", *[""] * 12]


def test_v94_every_control_is_a_visible_button(told: dict[str, Any]) -> None:
    buttons = of(told, "notes")["buttons"]
    for name in (
        "Help",
        "Light or dark",
        "Zoom in",
        "Zoom out",
        "Fit",
        "PNG",
        "SVG",
        "CSV",
        "Copy",
    ):
        assert name in buttons


def test_v101_notes_of_the_run_are_shown(told: dict[str, Any]) -> None:
    assert "layer 7 (blocks.7) could not be seen" in of(told, "words")["about"]


def test_labels_of_a_whole_generation_are_taken() -> None:
    seen = generated()
    for tokens in ([*"abcdefghi"], [*"abcdefghij"]):
        header, _ = ch.view(seen, tokens).shown.pages()
        assert header["axes"][0]["labels"] == [list("abcdefghi")]
        assert header["axes"][0]["prompt"] == 6
    with pytest.raises(ValueError, match="tokens: has one label for each source"):
        ch.view(seen, [*"abcdefgh"])
