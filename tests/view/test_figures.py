"""Figures: the arrays that are drawn are the weights that were watched, and tokens are text."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import heads, masks, readings
from tests.view.records import HEADS, SIZE
from tests.view.records import of_a_call as watched
from tests.view.test_shown import HOSTILE

pytest.importorskip("matplotlib")


def figure_of(*given: Any, **options: Any) -> Any:
    return ch.figure(*given, **options)


def image(figure: Any, at: int = 0) -> np.ma.MaskedArray:
    return figure.axes[0].images[at].get_array()


def texts(figure: Any) -> list[str]:
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text)]


def saved(figure: Any, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind)
    return buffer.getvalue()


def test_a_map_is_the_weights_with_the_blocked_cells_left_out() -> None:
    seen = watched(readings.Weights())
    figure = figure_of(seen, tokens=list("abcdefghijk"), head=2, sample=1)
    drawn = image(figure)
    assert np.array_equal(drawn.mask, ~np.tril(np.ones((SIZE, SIZE), bool)))
    assert np.array_equal(drawn.data, seen[0].value[1, 2].numpy())
    mean = image(figure_of(seen))
    np.testing.assert_allclose(mean.filled(0), seen[0].value[0].mean(0), rtol=1e-6)
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == list("abcdefghijk")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("source", "query")
    assert axes.get_title() == "head 0.2"
    assert axes.patch.get_hatch()
    assert "blocked by the mask" in texts(figure)


def test_scales_span_the_weights() -> None:
    weights = np.array([[0.5, 0.5], [0.125, 0.875]])
    for scale, half in (("linear", 0.5), ("sqrt", 0.25), ("log", None)):
        norm = figure_of(ch.record_from(weights), scale=scale).axes[0].images[0].norm
        assert norm.vmax == 0.875
        if half is not None:
            assert norm(0.875 * half) == pytest.approx(0.5)
        else:
            assert norm(0.125) == 0
            assert norm(np.sqrt(0.125 * 0.875)) == pytest.approx(0.5)


def test_lists_say_what_was_not_read() -> None:
    seen = watched(readings.TopK(3))
    figure = figure_of(seen, head=1)
    top = seen[0].value
    full = np.zeros((SIZE, SIZE))
    for row in range(SIZE):
        for weight, source in zip(top.weights[0, 1, row], top.sources[0, 1, row], strict=True):
            if source >= 0:
                full[row, source] = weight
    drawn = figure.axes[0].images[-1].get_array()
    np.testing.assert_allclose(drawn.filled(0), full, rtol=1e-6)
    assert np.array_equal(~drawn.mask, full > 0)
    assert "not read" in texts(figure)
    assert any("3 largest" in text for text in texts(figure))


def test_long_maps_are_drawn_by_tiles() -> None:
    weights = torch.rand(1, 1100, 1100).softmax(-1)
    drawn = image(figure_of(ch.record_from(weights)))
    assert drawn.shape == (512, 512)
    # 1100 = 76 x 3 + 436 x 2, the longer cells first, as torch.tensor_split cuts.
    rows = weights[0].tensor_split(512, 0)
    expected = torch.stack([torch.stack([x.max() for x in r.tensor_split(512, 1)]) for r in rows])
    assert np.array_equal(drawn.filled(0), expected.numpy())
    seen = watched((readings.TopK(4), readings.BlockMap(5)), 1031)
    tiles = image(figure_of(seen, head=1, tokens=[["t"] * 1031] * 2))
    lower = np.tril(np.ones((5, 5), bool))
    np.testing.assert_allclose(tiles.data[lower], seen[0].value[1].max[0, 1].numpy()[lower])
    assert np.array_equal(tiles.mask, ~lower)


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_hostile_tokens_are_text(kind: str) -> None:
    tokens = [*HOSTILE, "$\\frac{1}{0}$", "$", "%s_{x}^2", "\x1b[31m", "👩‍👩‍👧", "مرحبا", "日本"]
    figure = figure_of(ch.record_from(np.eye(len(tokens)), tokens), title="$x</title><script>")
    data = saved(figure, kind)
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels[4:6] == ["<00>", "<U+D800>"] or labels[4] == "<00>"
    assert labels[len(HOSTILE)] == "$\\frac{1}{0…"
    assert labels[len(HOSTILE) + 3] == "<1B>[31m"
    assert max(map(len, labels)) <= 13
    if kind == "svg":
        names = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(data).iter()}
        assert "script" not in names
        assert b"<script" not in re.sub(rb"<!--.*?-->", b"", data, flags=re.S)


def test_all_heads_are_named() -> None:
    figure = figure_of(ch.record_from(np.random.default_rng(0).dirichlet(np.ones(5), (2, 3, 5))),
                       "heads")  # fmt: skip
    assert {f"{layer}.{head}" for layer in (0, 1) for head in (0, 1, 2)} <= set(texts(figure))


def test_a_head_that_was_chosen_keeps_its_number() -> None:
    model = ch.models.load()
    tokens = model.vocabulary.encode("hello")[None]
    with (
        torch.no_grad(),
        ch.watch(model, read=readings.Weights(), heads=[1, 3], layers=[2]) as seen,
    ):
        model(tokens)
    figure = figure_of(seen, head=3)
    assert figure.axes[0].get_title() == "head 2.3"
    np.testing.assert_array_equal(image(figure).data, seen[0].value[0, 1].numpy())
    assert {"2.1", "2.3"} <= set(texts(figure_of(seen, "heads")))
    with pytest.raises(
        ValueError, match="head: is one of those that the record holds: 1, 3; got 0"
    ):
        figure_of(seen, head=0)
    with pytest.raises(ValueError, match="layer: is one of those that the record holds: 2; got 0"):
        figure_of(seen, layer=0)


def test_the_atlas_holds_the_statistics() -> None:
    model = ch.models.load()
    tokens = model.vocabulary.encode("hello, hello, said the bell")[None]
    survey = heads.measure(model, tokens)
    for name in ("induction", "sink"):
        drawn = image(figure_of(survey, "atlas", statistic=name))
        np.testing.assert_allclose(drawn.data, survey.mean(name).numpy())
    seen = watched(readings.Weights())
    drawn = image(figure_of(seen, "atlas", statistic="entropy"))
    entropy = torch.special.entr(seen[0].value[0]).sum(-1).mean(-1)
    np.testing.assert_allclose(drawn.data, entropy[None].numpy(), rtol=1e-6)
    with pytest.raises(ValueError, match="statistic: is one of entropy"):
        figure_of(seen, "atlas", statistic="charm")


def test_distances_are_those_of_the_reading() -> None:
    def points(read: Any) -> np.ndarray:
        figure = figure_of(watched(read), "distance", sample=1)
        return np.asarray(figure.axes[0].collections[0].get_offsets())

    expected = watched(readings.Distance())[0].value[1].mean(-1)
    for read in (readings.Weights(), (readings.TopK(2), readings.Distance())):
        found = points(read)
        assert found[:, 0].tolist() == [0] * HEADS
        np.testing.assert_allclose(found[:, 1], expected, rtol=1e-5)
    with pytest.raises(ValueError, match=r"record: holds Distance"):
        points(readings.TopK(2))


def test_masks_are_drawn_by_their_share_of_edges() -> None:
    figure = figure_of(masks.causal() & masks.lengths([5]), "mask", list("abcde"))
    drawn = image(figure)
    assert np.array_equal(drawn.filled(0), np.tril(np.ones((5, 5))))
    (found,) = masks.causal().maps(300, cells=128)
    seen = watched(readings.TopK(1), 300)
    drawn = image(figure_of(seen, "mask"))
    np.testing.assert_allclose(drawn.filled(0), found.shares)
    assert "some edges of the tile" in texts(figure_of(seen, "mask"))


def test_effects_are_points_with_names() -> None:
    model = ch.models.load()
    tokens = model.vocabulary.encode("hell")[None]
    effects = ch.effects(model, tokens, edges=[(3, 0), (3, 1), (3, 2)])
    figure = figure_of(effects, "effects", list("hell"))
    found = np.asarray(figure.axes[0].collections[0].get_offsets())
    np.testing.assert_allclose(found, [(row.weight, row.effect) for row in effects])
    assert "3 l → 0 h" in texts(figure)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_drawn(dtype: torch.dtype) -> None:
    weights = torch.rand(3, 5, 7).softmax(-1).to(dtype)
    drawn = image(figure_of(ch.record_from(weights), head=1))
    assert np.array_equal(drawn.data, weights[1].float().numpy())


def test_broken_and_empty_rows_are_told_apart() -> None:
    weights = np.eye(4)
    weights[1], weights[2] = np.nan, 0
    figure = figure_of(ch.record_from(weights))
    main, broken = (picture.get_array() for picture in figure.axes[0].images)
    assert main.mask[1].all()
    assert not main.mask[2].any()
    assert np.array_equal(~broken.mask, np.isnan(weights))
    assert "NaN" in texts(figure)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (100, 2, 3, 3)])
@pytest.mark.parametrize("kind", ["map", "heads", "atlas"])
def test_any_shape_is_drawn(shape: tuple[int, ...], kind: str) -> None:
    shown = ch.record_from(np.full(shape, 1 / shape[-1]))
    assert saved(figure_of(shown, kind), "png").startswith(b"\x89PNG")


def test_the_style_of_the_user_stays(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    figure = figure_of(ch.record_from(np.eye(3)))
    figure.savefig(tmp_path / "map.png")
    assert dict(matplotlib.rcParams) == before
    assert figure._repr_png_().startswith(b"\x89PNG")
    # No figure is left behind in pyplot.
    from matplotlib import _pylab_helpers

    assert not _pylab_helpers.Gcf.figs


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: figure_of(ch.record_from(np.eye(2)), "pie"), "kind: is one of map, heads"),
        (lambda: figure_of(ch.record_from(np.eye(2)), scale="cube"), "scale: is one of linear"),
        (lambda: figure_of(np.eye(2)), "record: is what watch\\(\\) gave"),
        (lambda: figure_of(ch.record_from(np.eye(2)), "effects"), "ch.effects"),
        (lambda: figure_of(masks.causal(), "map"), "a mask"),
        (lambda: figure_of(ch.record_from(np.eye(2)), tokens=["a"]), "tokens: has one label"),
        (lambda: figure_of(ch.record_from(np.eye(2)), sample=1), "sample: is one of"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        call()


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.views.figures.kinds.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "clearhead\[figure\]"'):
        figure_of(ch.record_from(np.eye(2)))
