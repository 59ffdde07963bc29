"""The benchmark measures what it says: everyone in a row agrees, and a liar is refused.

No time is asserted here; that everyone who is timed gave the same answer is.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import cases
import clearhead as ch
import compare
import layers
import machine
import measure
import page
import peers
import processes
import resident
import run
import table
from clearhead import masks, readings
from measure import Goal, Row, Settings, check, summary

F32, BF16 = torch.float32, torch.bfloat16
SMALL = [(1, 3, 67, 16)]
# Compiling takes too long here; a run checks FlexAttention as it checks all the others.
OTHERS = ("SDPA, bool tensor", "eager", "onnxruntime")

ROWS = {
    "attend": lambda: cases.attend(SMALL, [F32, BF16], OTHERS),
    "read": lambda: cases.read(SMALL, [F32, BF16]),
    "weights": lambda: cases.weights(SMALL[0]),
    "masks": lambda: cases.masked((1, 2, 131, 16), width=7, document=40, flex=False),
    "backward": lambda: cases.backward(SMALL, [F32, BF16]),
    "decode": lambda: cases.decode([129], [F32, BF16]),
    "small": cases.small,
    "tiled": lambda: cases.tiled(SMALL[0]),
    "multihead": lambda: layers.multihead(size=67, width=48, head=3),
    "training": lambda: layers.training(layers=1, heads=2, width=16, length=8),
    "avx2": lambda: cases.isa(SMALL, "avx2"),
}


def needs_kernel_for(name: str) -> None:
    kernel = machine.kernel()
    if name == "avx2" and (kernel is None or "avx2" not in kernel.available()):
        pytest.skip("no kernel for AVX2 here")


@pytest.mark.parametrize("name", ROWS)
def test_everyone_in_a_row_agrees(name: str) -> None:
    needs_kernel_for(name)
    count = 0
    for row in ROWS[name]():
        assert len(row.ways) >= 2, row.name
        check(row)
        count += 1
    assert count


@pytest.mark.parametrize("name", ["SDPA", "SDPA, bool tensor", "eager", "onnxruntime"])
def test_a_liar_is_refused(name: str) -> None:
    """A mask that is off by one position is the error that a benchmark hides best."""
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime")
    q, k, v = cases.tensors((1, 2, 33, 8), F32)
    theirs, _ = peers.ways([name], q, k, v, masks.causal())
    check(Row("right", {"ours": partial(ch.attend, q, k, v, masks.causal()), **theirs}))
    shifted = masks.causal() - masks.diagonal(0) | masks.first(1)
    with pytest.raises(ValueError, match=f"wrong: {name} is off by"):
        check(Row("wrong", {"ours": partial(ch.attend, q, k, v, shifted), **theirs}))


def test_other_shapes_and_nan_are_refused() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"they gives \(2, 1\), not \(2, 3\)"):
        check(Row("r", {"ours": lambda: x, "they": lambda: x[:, :1]}))
    with pytest.raises(ValueError, match="they is off by nan"):
        check(Row("r", {"ours": lambda: x, "they": lambda: x * torch.nan}))
    with pytest.raises(ValueError, match="2 tensors to compare, and only 1"):
        check(Row("r", {"ours": lambda: x, "they": lambda: x}, compare=2))


def test_a_peer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    q, k, v = cases.tensors((1, 2, 5, 8), F32)
    found, note = peers.ways(["SDPA", "onnxruntime"], q, k, v)
    assert list(found) == ["SDPA"]
    assert note == "onnxruntime: not installed"
    _, note = peers.ways(["onnxruntime"], q, k, v, masks.window(2))
    assert note == "onnxruntime: no mask of this kind"


def test_the_kernel_of_avx2_is_put_back() -> None:
    needs_kernel_for("avx2")
    kernel: Any = machine.kernel()
    before, rows = kernel.isa(), cases.isa(SMALL, "avx2")
    assert next(rows).name.startswith("avx2, full")
    assert kernel.isa() == "avx2"
    list(rows)
    assert kernel.isa() == before


def test_a_row_is_measured_in_turns() -> None:
    calls: list[str] = []
    row = Row("r", {"ours": lambda: calls.append("o"), "they": lambda: calls.append("t")})
    measure.SAMPLE, kept = 0.0, measure.SAMPLE
    try:
        measure.measure(row, Settings(rounds=3))
    finally:
        measure.SAMPLE = kept
    assert "".join(calls[-6:]) == "ottoot"
    assert [len(samples) for samples in row.samples.values()] == [3, 3]


def found(**more: Any) -> dict[str, Any]:
    """A row of a made-up machine: 100 operations a second, and 80 beside the softmax."""
    given: dict[str, Any] = {
        "samples": {"ours": [2.0, 2.0, 2.0], "SDPA": [3.0, 3.0, 4.0], "sum": [1.0, 1.0, 1.0],
                    "peak": [machine.PEAK_FLOPS / 100] * 3, "bound": [machine.PEAK_FLOPS / 80] * 3},
        "yardsticks": {"sum": lambda: None}, "flops": 150.0,
    }  # fmt: skip
    return summary(Row("work", {}, **(given | more)))


def test_the_bound_is_of_multiply_adds_with_softmax_and_of_a_yardstick() -> None:
    row = found()
    assert row["of_peak"] == pytest.approx(0.75)  # 150 operations take 1.5 s at the peak, ours 2 s
    assert row["bound"] == pytest.approx(3 / (150 / 80))
    assert list(row["others"]) == ["SDPA", "sum"]
    assert found(floor="sum", flops=0.0)["bound"] == pytest.approx(3 / 1)
    assert found(floor="sum")["bound"] == pytest.approx(3 / (1 + 150 / 80))
    assert found(floor="sum")["of_peak"] is None
    assert found(flops=0.0)["bound"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("each", [0, 1, 2 * 64])
def test_a_call_does_as_many_multiply_adds_as_it_says(dtype: torch.dtype, each: int) -> None:
    native = machine.kernel()
    if native is None:
        pytest.skip("the kernel is not compiled")
    pairs = dtype == torch.bfloat16
    small, large = (native.peak(rounds, each, pairs) for rounds in (1000, 3000))
    assert 0 < 3 * small == large


@pytest.mark.parametrize(
    ("goal", "state"),
    [
        (Goal("SDPA", 1.5), "met"), (Goal("SDPA", 1.55), "missed"),
        (Goal("SDPA", 1.7), "above the bound"), (Goal("flex", 2), "not measured"),
        (Goal("sum", 0.5), "met"), (Goal("sum", 3), "missed"),
        (Goal("peak", 0.7), "met"), (Goal("peak", 0.8), "missed"),
        (Goal(most=2.0), "met"), (Goal(most=1.9), "missed"),
    ],
)  # fmt: skip
def test_goals(goal: Goal, state: str) -> None:
    assert found(goals=(goal,))["goals"][0]["state"] == state


def test_the_table_says_all_of_a_row() -> None:
    goals = (Goal("SDPA", 2.3), Goal("flex", 2), Goal("peak", 0.7))
    assert table.line(found(goals=goals, error=lambda: 1.1, note="flex: not here")) == (
        "| work | float32 | 2.00 s ± 0% | SDPA 3.00 s (1.50x); sum 1.00 s (0.50x) (flex: not here) "
        "| 75% | 1.60x | 1.10 "
        "| 2.3x SDPA: above the bound; 2x flex: not measured; 70% of peak: met |"
    )
    assert table.HEAD.splitlines()[0].count("|") == table.line(found()).count("|")


def test_amounts() -> None:
    assert [table.amount(x, "s") for x in (2.0, 0.0123, 1.234e-5, 0.4567)] == [
        "2.00 s", "12.3 ms", "12.3 us", "457 ms",
    ]  # fmt: skip
    assert [table.amount(x, "B") for x in (60e6, 500.0)] == ["60.0 MB", "0.50 kB"]


def test_losses_are_on_the_page_and_yardsticks_are_none() -> None:
    slow = found(
        samples={"ours": [2.0] * 3, "SDPA": [1.0] * 3, "ours, no readings": [1.0] * 3},
        goals=(Goal("SDPA", 2),),
    )
    text = table.page({"machine": "made up"}, {"attend": [slow], "avx2": []}, "run it")
    assert "Made by `run it`" in text
    assert "\n\nGoals: 1 missed.\n\n" in text
    assert "- work, float32: SDPA takes 0.50x ours\n" in text
    assert "no readings takes" not in text
    assert "## Context alone\n\n| work |" in text
    assert text.endswith("Not measured on this machine.\n")
    assert "Nowhere in this table." in table.page({}, {"attend": [found()]}, "")


def test_every_group_has_a_title() -> None:
    assert set(run.GROUPS) | {"own"} == set(table.TITLES)


def test_figures_are_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "run.json"
    table.save({"machine": "made up"}, {"attend": [found()]}, path)
    document = json.loads(path.read_text())
    assert document["rows"][0]["group"] == "attend"
    assert document["rows"][0]["samples"]["SDPA"] == [3, 3, 4]
    assert [x.name for x in path.parent.iterdir()] == ["run.json"]


def test_options() -> None:
    given = run.options(["--quick", "--only", "decode", "small"])
    assert (given.only, run.settings_of(given).rounds) == (["decode", "small"], 5)
    own = ["--shape", "1,2,9,4", "--dtype", "bfloat16", "--mask", "causal", "--read", "TopK(3)"]
    settings = run.settings_of(run.options(own))
    assert (settings.shape, settings.dtype, settings.rounds) == ((1, 2, 9, 4), "bfloat16", 9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--shape", "1,2,3"], "argument --shape: invalid shape value: '1,2,3'"),
        (["--shape", "1,2,3,0"], "argument --shape"),
        (["--mask", "causal"], "give its --shape"),
        (["--write", "--only", "small"], "--write keeps the whole table"),
        (["--only", "nothing"], "invalid choice"),
    ],
)
def test_wrong_options(given: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run.options(given)
    assert message in capsys.readouterr().err


def test_own_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "flex", missing)
    settings = Settings(
        shape=(2, 2, 33, 8), dtype="float32", mask="causal & window(5)", read="Entropy, TopK(3)"
    )
    (row,) = cases.own(settings)
    check(row)
    assert list(row.ways) == ["ours", "SDPA", "eager", "ours, no readings"]
    assert row.note == "flex: left out; onnxruntime: no mask of this kind"
    edges = 5 * 33 - 4 - 3 - 2 - 1
    assert row.flops == pytest.approx(4 * 2 * 2 * 8 * edges)
    _, values = row.ways["ours"]()
    assert [type(x).__name__ for x in values] == ["Tensor", "TopKValue"]


def test_a_peer_that_gives_another_answer_is_left_out_of_an_own_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(peers.PEERS, "flex", missing)
    (row,) = cases.own(Settings(shape=(1, 1, 5, 4), mask="nothing"))
    assert "eager" not in row.ways
    assert "SDPA" in row.ways
    assert "eager is off by nan" in row.note


def test_what_is_wrong_with_a_case_is_said_without_a_trace(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "limits", lambda clock: {})
    with pytest.raises(SystemExit, match="2"):
        run.main(["--shape", "1,1,5,4", "--mask", "causl"])
    assert "did you mean causal?" in capsys.readouterr().err


def missing(*_: Any) -> Any:
    raise peers.Missing("left out")


def test_readings_of_the_command_line() -> None:
    entropy, top = cases.parse_readings("Entropy(), TopK(8)")
    assert (type(entropy), top.k) == (readings.Entropy, 8)
    for wrong in ("Entropie()", "TopK()", "Entropy(", "__import__('os')"):
        with pytest.raises(ValueError, match=r"--read .*; for example: Entropy"):
            cases.parse_readings(wrong)


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    context = 4 * processes.HEAD * processes.WIDTH * 256
    assert context <= processes._peak("SDPA", 256, 1) < 50 * context


@pytest.mark.parametrize("name", ["small", "avx2"])
def test_groups_give_rows(name: str) -> None:
    needs_kernel_for(name)
    rows = list(run.GROUPS[name](Settings(quick=True)))
    assert rows
    assert all(isinstance(row, Row) for row in rows)


def test_a_table_takes_the_place_of_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"above\n\n{page.BEGIN}\nold\n{page.END}\n\nbelow é\n", encoding="utf-8")
    for table_ in ("| a |", "| b |\n| c |"):
        page.place(path, table_)
        whole = f"above\n\n{page.BEGIN}\n\n{table_}\n\n{page.END}\n\nbelow é\n"
        assert path.read_text(encoding="utf-8") == whole
    path.write_text(page.BEGIN, encoding="utf-8")
    with pytest.raises(ValueError, match="has no place for the table"):
        page.place(path, "| a |")
    assert path.read_text(encoding="utf-8") == page.BEGIN
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["watch", "scan", "training"])
def test_the_pages_have_a_place_for_their_table(name: str) -> None:
    text = (Path(page.__file__).parent.parent / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert text.count(page.BEGIN) == text.count(page.END) == 1


def test_the_peak_of_memory_is_seen_and_forgotten() -> None:
    """What is touched after the peak was forgotten counts, and what was let go before does not."""
    size = 64 << 20
    held = torch.ones(size, dtype=torch.uint8)
    del held
    resident.forget_peak()
    before = resident.peak()
    held = torch.ones(size, dtype=torch.uint8)
    # The kernel counts pages of each thread late, by up to 64 of them.
    assert abs(resident.peak() - before - held.numel()) < 1 << 21


def test_two_trees_are_compared_by_the_ratio_of_their_medians(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steady, noisy = [100.0, 101.0, 99.0, 100.0], [80.0, 120.0, 100.0, 140.0]
    assert compare.line("slower", steady, [1.1 * time for time in steady])
    assert not compare.line("below 2%", steady, [1.01 * time for time in steady])
    assert not compare.line("in the spread", noisy, [1.1 * time for time in noisy])
    assert "1.100  slower" in capsys.readouterr().out


def test_the_cases_that_are_compared_run_and_have_names_of_their_own() -> None:
    names = [case.name for case in compare.attend_cases()]
    assert len(set(names)) == len(names) > 50
    for case in compare.small_cases():
        case.run()


def test_a_folder_without_sources_is_no_tree(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no checkout"):
        compare.Tree(tmp_path, None)
