"""A sweep over a library: its rows, what classes do to their process, its folder, its command."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from clearhead.cli import main
from clearhead.dependence import audit, library
from clearhead.dependence.library import Library, Row, audit_library, read_run
from clearhead.dependence.library.questions import _innermost, questions
from clearhead.dependence.library.rows import ordered, readable
from tests.library import toys

TOYS = Library("toys", "tests.library.toys:catalogue", "tests.library.toys:build")
QUIET = [one.__name__ for one in toys.CAUSAL if one is not toys.Hanging] + ["Masked"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """A sweep over all classes that come to an end."""
    folder = tmp_path_factory.mktemp("swept")
    sys.path.insert(0, str(ROOT))
    try:
        rows = audit_library(TOYS, folder, QUIET, backends=["eager"], memory=1)
    finally:
        sys.path.remove(str(ROOT))
    return folder, rows


def of(rows: list[Row], name: str, form: str = "", variant: str | None = None) -> list[Row]:
    return [
        row for row in rows
        if row.name == name and form in ("", row.form) and variant in (None, row.variant)
    ]  # fmt: skip


def test_every_question_has_a_row(swept):
    for toy in toys.catalogue():
        if toy.name in QUIET:
            asked = {(row.form, row.variant) for row in of(swept[1], toy.name)}
            assert asked == {tuple(one) for one in questions(toy.mapping, library.FORMS)}


def test_a_sound_class_has_no_finding(swept):
    rows = of(swept[1], "Sound")
    assert {row.verdict for row in rows} == {"ok", "not tested"}
    assert {row.form for row in rows if row.untested} == {"generation"}  # it has no cache
    assert all(row.covered == 1 for row in rows if row.verdict == "ok")
    assert {row.verdict for row in of(swept[1], "Masked") if row.fits} == {"ok"}


def test_a_leak_is_one_that_the_class_really_has(swept):
    (row,) = of(swept[1], "Leaking", "causal", "")
    assert (row.verdict, row.kind, row.source) == ("fault", "leak", (row.query or 0) + 1)
    assert row.place == "tests/library/toys.py, Sound.forward"
    built = toys.build(toys.Toy("Leaking"))
    model, ids = built.model.double(), built.inputs["input_ids"]
    before = model(ids)["logits"]
    assert row.logits == pytest.approx(before.abs().max().item(), rel=1e-5)
    sizes = []
    for token in range(toys.VOCAB):
        other = ids.clone()
        other[row.sample, row.source] = token
        moved = model(other)["logits"] - before
        sizes.append(moved[row.sample, row.query].abs().max().item())
    assert min(abs(size - row.size) for size in sizes) < 1e-9
    assert row.size > row.floor


def test_a_place_is_in_the_library_of_the_class():
    model = toys.Sound()
    leaking = toys.Leaking()
    model.add_module("inner", torch.nn.Sequential(leaking))
    for module in ("inner.0.qkv", "inner.0"):
        assert _innermost(model, module, "tests") is leaking
    for module in ("qkv", "Sound (its own forward)", "inner", "nowhere.at.all"):
        assert _innermost(model, module, "tests") is model


def test_documents_that_see_each_other(swept):
    (row,) = of(swept[1], "Packing", "documents")
    assert (row.verdict, row.kind) == ("fault", "documents")
    assert row.source is not None
    assert row.query is not None
    assert row.source * 3 // toys.LENGTH < row.query * 3 // toys.LENGTH
    assert [one.verdict for one in of(swept[1], "Sound", "documents")] == ["ok"]


def test_a_question_that_makes_no_sense_says_why(swept):
    (row,) = of(swept[1], "Packing", "padding", "left")
    assert row.reason == "does not apply: its forward does not take attention_mask"
    assert not row.fits


def test_a_class_that_ends_its_process_loses_that_question_alone(swept):
    (row,) = of(swept[1], "Ending", "modes")
    assert row.verdict == "not tested"
    assert row.reason == "the class ended its process with exit code 7"
    assert [one.verdict for one in of(swept[1], "Ending", "batch")] == ["ok"]


def test_a_class_that_is_killed_names_the_signal(swept):
    rows = of(swept[1], "Faulting", "causal")
    assert {row.reason for row in rows} == {"the process of the class was ended by SIGSEGV"}


def test_sys_exit_while_it_is_built_is_a_reason(swept):
    reasons = {row.reason for row in of(swept[1], "Exiting")}
    assert reasons == {"could not be built: the class itself fails with SystemExit: 3"}


def test_what_does_not_fit_into_memory_says_so(swept):
    (row,) = of(swept[1], "Greedy", "batch")
    assert row.verdict == "not tested"
    assert row.reason.startswith("does not fit into the memory limit of 1 GiB")


def test_what_a_class_prints_is_printable_and_bounded(swept):
    rows = of(swept[1], "Painting", "batch")
    assert [row.verdict for row in rows] == ["ok"]
    assert "printed: red bell turned" in rows[0].notes
    for row in of(swept[1], "Painting"):
        assert all(note.isprintable() and len(note) < 400 for note in row.notes)
        assert len(row.notes) < 20


def test_words_of_a_class_become_one_printable_line():
    assert readable("\x1b[31mred\x1b[0m\n\x9b2Jx\x1b]8;;http://x\x07y") == "red 2Jx y"
    assert len(readable("x" * 10_000)) == 300
    path = "/home/me/env/lib/python3.11/site-packages/torch/nn/modules/linear.py"
    assert readable(f"in {path}:124: it failed") == "in torch/nn/modules/linear.py:124: it failed"


def test_a_class_that_hangs_runs_into_the_limit(tmp_path):
    rows = audit_library(
        TOYS, tmp_path, ["Hanging"], ["documents", "batch"], ["eager"], limit=8
    )  # fmt: skip
    assert [(row.form, row.reason) for row in rows] == [
        ("batch", "left over at the limit of 8 s"),
        ("documents", "ran into the limit of 8 s"),
    ]


def plain(rows: list[Row]) -> list[dict]:
    """The rows without what differs from run to run."""
    return [{**row.as_dict(), "seconds": 0} for row in rows]


def test_the_same_seeds_give_the_same_table(swept, tmp_path):
    names = ["Sound", "Leaking", "Packing", "Painting", "Ending"]
    rows = audit_library(
        TOYS, tmp_path, names, backends=["eager"], processes=1, memory=1
    )  # fmt: skip
    assert plain(rows) == plain([row for row in swept[1] if row.name in names])
    run, _ = read_run(swept[0])
    mine = [row for row in swept[1] if row.name in names]
    assert library.page((run, rows)) == library.page((run, mine))


def test_a_finished_sweep_is_read_not_run(swept, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)  # no worker is started
    again = audit_library(TOYS, swept[0], QUIET, backends=["eager"])
    assert again == swept[1] == ordered(read_run(swept[0])[1])


SCRIPT = """\
import sys
from clearhead.cli import main
from clearhead.dependence.library import LIBRARIES, Library
if __name__ == "__main__":
    LIBRARIES["toys"] = Library("toys", "tests.library.toys:catalogue", "tests.library.toys:build")
    sys.exit(main(sys.argv[1:]))
"""


def children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def waited(true: object) -> None:
    assert callable(true)
    end = time.monotonic() + 200
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_sweep_that_was_stopped_goes_on(tmp_path, how):
    script, out = tmp_path / "sweep.py", tmp_path / "out"
    script.write_text(SCRIPT)
    words = ["audit", "--library", "toys", "--classes", "Ending", "Hanging", "--out", str(out)]
    words += ["--processes", "1", "--backends", "eager", "--forms", "documents", "batch"]
    path = os.pathsep.join([str(ROOT), *sys.path])
    sweep = subprocess.Popen(
        [sys.executable, script, *words, "--limit", "1000"],
        env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    done = out / "rows" / "Ending.causal.json"
    try:
        waited(done.exists)
        (worker,) = children(sweep.pid)
        waited(lambda: children(worker))
        (child,) = children(worker)
        sweep.send_signal(how)
        _, said = sweep.communicate(timeout=60)
    finally:
        sweep.kill()
    assert sweep.returncode == (130 if how == signal.SIGINT else -how)
    assert ("the same command goes on" in said) == (how == signal.SIGINT)
    waited(lambda: not lives(worker) and not lives(child))
    before = done.stat().st_mtime_ns
    rows = audit_library(
        TOYS, out, ["Ending", "Hanging"], ["documents", "batch"], ["eager"], limit=3
    )  # fmt: skip
    assert done.stat().st_mtime_ns == before
    assert {row.name for row in rows} == {"Ending", "Hanging"}
    assert not list(out.rglob("*.part"))


@pytest.mark.slow
def test_classes_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    classes = ["AfmoeForCausalLM", "GPT2LMHeadModel", "MambaForCausalLM"]
    rows = audit.library(out=tmp_path, classes=classes, forms=["causal", "documents"])
    assert {row.verdict for row in of(rows, "GPT2LMHeadModel", "causal")} == {"ok"}
    for row in of(rows, "AfmoeForCausalLM", "documents"):
        assert (row.verdict, row.kind, row.confirmed) == ("fault", "documents", True)
        assert row.size > 0
        assert (tmp_path / row.script).read_text().startswith("# AfmoeForCausalLM")
    backends = {row.backend for row in of(rows, "MambaForCausalLM", "causal") if row.fits}
    assert backends == {"eager"}  # it says that it has no other one
    assert read_run(tmp_path)[0]["versions"].keys() == {
        "clearhead", "python", "torch", "transformers"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"library": "torchvision"}, ValueError, "library: is one that can be audited"),
        ({"classes": ["Sond"]}, ValueError, "did you mean Sound"),
        ({"classes": ["meta-llama/Llama-3"]}, ValueError, "nothing is downloaded"),
        ({"classes": ["me/mine--modeling_mine.Mine"]}, ValueError, "no other code runs"),
        ({"classes": []}, ValueError, "classes: is a list"),
        ({"classes": "Sound"}, ValueError, "classes: is a list"),
        ({"forms": ["causality"]}, ValueError, "forms: are some of causal"),
        ({"forms": "causal"}, ValueError, "forms: is a list"),
        ({"backends": ["flash"]}, ValueError, "backends: are some of eager, sdpa"),
        ({"processes": 0}, ValueError, "processes: is a whole number"),
        ({"processes": 1.5}, ValueError, "processes: is a whole number"),
        ({"limit": float("nan")}, ValueError, "limit: is a number above 0"),
        ({"memory": -1}, ValueError, "memory: is a number above 0"),
        ({"out": None}, TypeError, "out: is needed"),
        ({"out": 5}, TypeError, "out: is needed"),
        ({"out": ""}, ValueError, "out: is needed"),
        ({"seed": "0"}, ValueError, "seed: is a whole number"),
        ({"library": ["torch"]}, ValueError, "library: is one that can be audited"),
    ],
)
def test_bad_input(tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        audit.library(**{"library": TOYS, "out": tmp_path / "out", **options})
    assert not (tmp_path / "out").exists()


def test_a_library_that_is_not_installed(tmp_path, monkeypatch):
    absent = library.LIBRARIES["transformers"]._replace(packages=("not_there",))
    monkeypatch.setitem(library.LIBRARIES, "transformers", absent)
    with pytest.raises(ImportError, match=r"not_there is not installed\n  to do: pip install"):
        audit_library("transformers", tmp_path)


def test_a_folder_of_another_version(tmp_path):
    other = {"library": "toys", "versions": {"torch": "1.0"}, "seed": 0, "backends": []}
    (tmp_path / "rows").mkdir()
    (tmp_path / "run.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"another sweep.*torch 1\.0 there, 2"):
        audit_library(TOYS, tmp_path, ["Sound"])
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="out: is the folder of a sweep"):
        audit_library(TOYS, tmp_path, ["Sound"])


def test_rows_of_other_rules_are_not_taken_for_those_of_this_code(tmp_path):
    audit_library(TOYS, tmp_path, ["Sound"], ["causal"], processes=1)
    run = json.loads((tmp_path / "run.json").read_text())
    assert re.fullmatch("[0-9a-f]{12}", run["rules"])
    (tmp_path / "run.json").write_text(json.dumps(run | {"rules": "0" * 12}))
    with pytest.raises(
        ValueError, match=rf"another sweep.*rules 0{{12}} there, {run['rules']} here"
    ):
        audit_library(TOYS, tmp_path, ["Sound"], ["causal"], processes=1)


@pytest.mark.parametrize("run", ["{}", "[]", '{"library": "toys", "versions": []}'])
def test_a_damaged_header_is_refused(tmp_path, run):
    (tmp_path / "run.json").write_text(run)
    with pytest.raises(ValueError, match="beside: is the folder of a sweep"):
        library.read_run(tmp_path, "beside")


@pytest.mark.parametrize(
    "change",
    [{"size": "big"}, {"verdict": "fine"}, {"form": "none"}, {"name": "Other"}, {"notes": "x"}],
)
def test_damaged_rows_are_not_read(tmp_path, change):
    (tmp_path / "rows").mkdir()
    (tmp_path / "run.json").write_text(json.dumps(run_of("1")))
    file = tmp_path / "rows" / "AForCausalLM.causal.json"
    file.write_text(json.dumps({"rows": [ROW.as_dict()]}))
    assert library.read_run(tmp_path)[1] == [ROW]
    for damaged in ([{**ROW.as_dict(), **change}], [], [5]):
        file.write_text(json.dumps({"rows": damaged}))
        with pytest.raises(ValueError, match=r"out: has whole files of rows.*AForCausalLM"):
            library.read_run(tmp_path)


def test_a_sweep_over_another_library_is_not_compared_with(tmp_path, capsys):
    (tmp_path / "rows").mkdir()
    (tmp_path / "run.json").write_text(json.dumps(run_of("1")))
    words = ["audit", "--library", "torch", "--out", str(tmp_path / "new")]
    assert main([*words, "--beside", str(tmp_path)]) == 2
    assert "--beside: is the folder of a sweep over torch" in capsys.readouterr().err


def test_an_option_that_is_given_twice_adds_to_its_list(capsys, tmp_path):
    words = ["audit", "--library", "torch", "--out", str(tmp_path / "new")]
    assert main([*words, "--forms", "nonesuch", "--forms", "batch"]) == 2
    assert "nonesuch" in capsys.readouterr().err


def test_the_page_says_what_was_swept():
    run = {**run_of("1"), "library": "torch"}
    text = library.page((run, [ROW]), None)
    assert "copies with random weights of classes of torch 2 were" in text
    assert "make leaks" not in text
    assert "torch and torch" not in text
    spaced = dataclasses.replace(ROW, name="MultiheadAttention:bool mask")
    assert "--classes 'MultiheadAttention:bool mask' --out" in library.page((run, [spaced]), None)
    assert "language models" in library.page((run_of("1"), [ROW]), None)


def test_the_page_has_no_control_characters():
    words = "a\x1b]0;title\x07\nb"
    odd = dataclasses.replace(ROW, name=words, module=words, kind=words, reason=words)
    odd = dataclasses.replace(odd, backend=words, script=words)
    text = library.page((run_of(words), [odd]), None)
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "\nb" not in text


def test_an_output_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="out: is a folder that can be written"):
        audit_library(TOYS, tmp_path / "file", ["Sound"])


def test_the_command(swept, capsys, monkeypatch):
    monkeypatch.setitem(library.LIBRARIES, "toys", TOYS)
    words = ["audit", "--library", "toys", "--out", str(swept[0]), "--backends", "eager"]
    assert main([*words, "--classes", "Leaking", "Sound"]) == 1
    said = capsys.readouterr()
    assert "Leaking" in said.out
    assert said.out.endswith(f"Wrote {swept[0] / 'report.md'}\n")
    assert "each class may take 120 s and 4 GiB" in said.err
    assert main([*words, "--classes", "Sound"]) == 3  # it has no cache to be tested
    capsys.readouterr()
    assert main([*words, "--classes", "Masked", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in found["rows"]} == {"Masked"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--library", "transformers"], "--out: is needed"),
        (["--library", "nonesuch", "--out", "x"], "--library: is one that can be audited"),
        (["--out", "x"], "--out: belongs to a sweep"),
        (["--classes", "GPT2LMHeadModel"], "--classes: belongs to a sweep"),
        (["tale-gpt", "--library", "transformers", "--out", "x"], "SPEC: is about one model"),
        (["--batch", "--library", "transformers", "--out", "x"], "--batch: is about one model"),
        (["--library", "transformers", "--out", "x", "--beside", "y"], "--beside: is the folder"),
    ],
)
def test_misuse_of_the_command(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["audit", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


ROW = Row("AForCausalLM", "causal", "eager", "causal", verdict="fault", kind="leak", size=0.5)


def run_of(version: str) -> dict:
    versions = {"transformers": version, "torch": "2"}
    return {"library": "transformers", "versions": versions, "seed": 0, "backends": ["eager"]}


def test_the_page_shows_words_of_classes_as_they_are():
    row = Row("B", "causal", "eager", "causal", verdict="not tested", reason="<b>|`x`|_y_")
    assert r"\<b\>\|\`x\`\|\_y\_" in library.page((run_of("2"), [row]))


def test_classes_that_share_a_reason_share_a_line():
    said = [
        Row(name, "causal", "sdpa", "batch", verdict="not tested", reason=f"{name[0]} has no sdpa")
        for name in ("A", "B:variant")
    ]
    assert "| has no sdpa | batch | `A`, `B:variant` |" in library.page((run_of("2"), said))


def test_the_page_joins_backends_and_questions_of_one_place():
    more = [ROW, Row(**{**vars(ROW), "backend": "sdpa", "size": 0.75})]
    line = next(x for x in library.page((run_of("2"), more)).splitlines() if "AForCausalLM" in x)
    assert line.startswith("| leak | `AForCausalLM` | eager, sdpa | causal | 0.75 |")


def test_a_finding_that_was_not_confirmed_is_no_fault():
    text = library.page(
        (run_of("2"), [Row(**{**vars(ROW), "verdict": "not tested", "confirmed": False})])
    )
    assert "not confirmed" in text
    assert "## Faults" not in text


def test_two_versions_beside_each_other():
    def row(name, **changes):
        return Row(**{**vars(ROW), "name": name, **changes})

    ok = {"verdict": "ok", "kind": ""}
    refused = {"verdict": "not tested", "kind": "", "reason": "does not apply: no sdpa"}
    new = [row("Fresh"), row("Both"), row("Mended", **ok), row("Added"), row("Gone", **refused)]
    old = [row("Fresh", **ok), row("Both"), row("Mended"), row("Gone")]
    text = library.page((run_of("2"), new), (run_of("1"), old))
    beside = text.partition("## 1 beside 2")[2]
    assert "Of 1, 1 faults are mended, 1 are in both, and 1 have no counterpart" in beside
    assert "In 2, 1 are new, and 1 have no counterpart" in beside
    parts = {
        "### Mended": "`Mended`",
        "### Without a counterpart in 2": "`Gone`",
        "### New": "`Fresh`",
        "### Without a counterpart in 1": "`Added`",
    }
    places = [beside.index(words) for pair in parts.items() for words in pair]
    assert places == sorted(places)
    assert "`Both`" not in beside
