"""The model of cost of docs/scale.md: the page has the tables, and the formulas hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import page
import scale
from clearhead import masks
from clearhead._core import Sizes
from clearhead.distributed.sequence.balance import make_plan
from clearhead.distributed.sequence.plan import Costs, Shares

TINY = scale.Layer("tiny", 8, 2, 16, 3, 1e6)
MACHINE = scale.Machine("a machine", "m", 1e9, 8e8, 1e6, 1e-3, 1e9)


def measured() -> dict:
    return json.loads(scale.RESULT.read_text(encoding="utf-8"))


def test_the_page_has_the_tables() -> None:
    text = scale.PAGE.read_text(encoding="utf-8")
    _, _, after = text.partition(page.BEGIN)
    assert after.partition(page.END)[0].strip() == scale.tables(measured())


def test_rates_are_those_of_the_last_run() -> None:
    rows = json.loads(scale.RATES.read_text(encoding="utf-8"))["rows"]
    times = {x["work"]: x["ours"] for x in rows if x["dtype"] == "bfloat16"}
    found = measured()
    # 12 heads of 64, half of 4096^2 edges, 2 products, 2 operations.
    assert found["forward"] == pytest.approx(12 * 64 * 4096**2 * 2 / times[scale.WORK])
    backward = times[f"backward, {scale.WORK}"]
    assert found["backward"] == pytest.approx(2.5 * 12 * 64 * 4096**2 * 2 / backward)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_are_those_of_a_plan(ranks: int) -> None:
    """Of a full map, whose pairs of ranks are all there: keys and values of each are sent."""
    length = 24 * ranks
    each = (24,) * ranks
    shares = Shares(Sizes(1, TINY.heads, length, length), TINY.source_heads, each, each)
    # Of a position and a source head: four queries, their contexts with a float64, key and value.
    plan = make_plan(None, shares, Costs(4 * 32, 4 * (32 + 8), 2 * 32))
    assert plan.sent() == [scale.sent(TINY, length, ranks)] * ranks


@pytest.mark.parametrize("layer", scale.LAYERS, ids=lambda layer: layer.name)
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_page_has_the_bytes_of_causal_plans_of_any_length(
    layer: scale.Layer, ranks: int
) -> None:
    assert measured()["over_ring"][layer.name]["1"] == 1
    over = measured()["over_ring"][layer.name][str(ranks)]
    assert over == pytest.approx(scale.over_ring(layer, ranks), abs=1e-4)
    each, group = (4096,) * ranks, layer.heads // layer.source_heads
    sizes = Sizes(1, layer.heads, sum(each), sum(each))
    size = 2 * layer.width
    costs = Costs(group * size, group * (size + 8), 2 * size)
    plan = make_plan(masks.causal(), Shares(sizes, layer.source_heads, each, each), costs)
    assert max(plan.sent()) / scale.sent(layer, sizes.source, ranks) == pytest.approx(
        over, rel=0.02
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_of_others_even_out_causal_work(ranks: int) -> None:
    """In shares of a rank squared: the first rank has half of one, and the mean of all N / 2."""
    given = scale.rows_of_others(ranks)
    assert 0.5 + given * ranks == pytest.approx(ranks / 2)


def test_work_is_that_of_the_edges() -> None:
    edges = masks.causal().count(64, 64)
    # Half of all edges is the convention: the diagonal counts half.
    assert scale.operations(TINY, 64) == 4 * (edges - 32) * TINY.heads * TINY.width


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("length", [400, 40_000])
def test_time_is_that_of_a_ring_step_by_step(ranks: int, length: int) -> None:
    share = length / ranks
    work = 2 * share**2 * TINY.heads * TINY.width / MACHINE.forward
    message = 2 * share * TINY.source_heads * TINY.width * 2 / MACHINE.link + MACHINE.latency
    ready = done = 0.0
    for step in range(ranks):
        # The tensors of a step are sent as soon as those of the step before have arrived.
        begin = max(done, ready)
        done = begin + work
        ready = begin + message if step + 1 < ranks else ready
    assert scale.seconds(MACHINE, TINY, length, ranks, 0.0) == pytest.approx(done)
    planned = scale.seconds(MACHINE, TINY, length, ranks, 1e-3)
    assert planned == pytest.approx(done + 1e-3 * ranks**2)


def test_the_least_share_hides_its_message() -> None:
    share = scale.least_share(MACHINE, TINY)
    work = 2 * share**2 * TINY.heads * TINY.width / MACHINE.forward
    assert work == pytest.approx(2 * share * TINY.source_heads * TINY.width * 2 / MACHINE.link)


def test_memory_is_near_what_processes_allocate() -> None:
    """Of 8 heads of 64 features in float32 and 32,768 positions, as the table of attend has it."""
    layer = scale.Layer("", 8, 8, 64, 1, 0, itemsize=4)
    for ranks, found in ((1, 297e6), (2, 161e6), (4, 90e6), (8, 51e6)):
        assert scale.held(layer, 32_768, ranks, given=0) == pytest.approx(found, rel=0.25)
    text = (Path(page.__file__).parent.parent / "docs" / "all-of-clearhead.md").read_text()
    assert "take at most 297 MB on one rank, 161, 90 and 51 MB" in " ".join(text.split())


def test_memory_of_causal_work_is_near_what_processes_allocate() -> None:
    """Of `benchmarks/ring.py --positions 32768`: grouped heads, which give rows to other ranks."""
    layer = scale.Layer("", 8, 2, 64, 1, 0, itemsize=4)
    for ranks, found in ((1, 190.5e6), (2, 114.8e6), (4, 75.5e6), (8, 44.0e6)):
        assert scale.held(layer, 32_768, ranks) == pytest.approx(found, rel=0.25)


def test_bytes_of_training() -> None:
    # 10 parameters, 4 ranks: weight, gradient and two averages, of 4 bytes.
    assert scale.training(10, 4, False) == (160, 2 * 3 / 4 * 40)
    assert scale.training(10, 4, True) == (40, 3 * 3 / 4 * 40)
    assert scale.lasting(24, 1000, 24_000) == pytest.approx(0.3679, abs=1e-4)
