"""Nothing damaged is believed: tables, corpora, factories of models."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from clearhead import cli, models

LINES = ["the bell and the well", "hell or shell, shell or hell", "ten men"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of a model of two layers and three heads: of a corpus, and of each document."""
    folder = tmp_path_factory.mktemp("tables")
    (folder / "page.txt").write_text("\n".join(LINES))
    torch.manual_seed(0)
    words = models.Characters.of("".join(LINES))
    models.save(models.GPT(words, layers=2, heads=3, width=12, length=32), folder / "model")
    scan = ["scan", str(folder / "page.txt"), "--model", str(folder / "model"), "--out"]
    assert cli.main([*scan, str(folder / "whole")]) == 0
    assert cli.main([*scan, str(folder / "each"), "--per-document"]) == 0
    (folder / "one.txt").write_text("then")
    one = ["scan", str(folder / "one.txt"), "--model", str(folder / "model"), "--out"]
    assert cli.main([*one, str(folder / "one")]) == 0
    return folder


def with_column(table: Any, name: str, change: Callable[[list[Any]], list[Any]]) -> Any:
    at = table.schema.get_field_index(name)
    values = pa.array(change(table[name].to_pylist()), table.schema.field(name).type)
    return table.set_column(at, name, values)


def set_at(number: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [value if i == number else v for i, v in enumerate(values)]


def all_of(value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [value] * len(values)


def fraction(share: float) -> Callable[[Any], Any]:
    return lambda table: table.slice(0, round(share * table.num_rows))


def one_twice(table: Any) -> Any:
    last = table.num_rows - 1
    return pa.concat_tables([table.slice(0, last), table.slice(0, 1)])


def column(name: str, change: Callable[[list[Any]], list[Any]]) -> Callable[[Any], Any]:
    return lambda table: with_column(table, name, change)


def of(statistic: str, name: str, value: Any) -> Callable[[Any], Any]:
    """Another value in the first row of a statistic."""

    def change(table: Any) -> Any:
        return with_column(
            table, name, set_at(table["statistic"].to_pylist().index(statistic), value)
        )

    return change


DAMAGE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "NaN": (column("mean", all_of(math.nan)), "means are no numbers"),
    "one NaN": (column("mean", set_at(5, math.nan)), "1 means are no numbers"),
    "inf": (column("mean", set_at(3, -math.inf)), "1 means are no numbers"),
    "null": (column("mean", all_of(None)), "column 'mean' has nulls"),
    "one null": (column("head", set_at(1, None)), "column 'head' has nulls"),
    "a share of 3": (column("mean", lambda v: [3.0] * len(v)), "means are no share"),
    "a variance below 0": (column("variance", set_at(0, -1.0)), "1 variances are no numbers"),
    "an entropy of no row": (of("entropy", "mean", 30.0), "1 means are no nats: 30 of 'entropy'"),
    "a distance of no corpus": (of("distance", "mean", 1e9), "1 means are no positions: 1e+09"),
    "a variance of no share": (of("sink", "variance", 0.3), "1 variances are none of a share"),
    "a count of no corpus": (column("count", set_at(9, 10**9)), "a count of 1000000000"),
    "another unit": (of("entropy", "unit", "positions"), "1 rows have another unit: 'positions'"),
    "a count below 0": (column("count", set_at(9, -3)), "a count of -3"),
    "a head of no model": (column("head", set_at(0, 2**30)), "a head of 1073741824"),
    "half": (fraction(1 / 2), "rows, and was written with"),
    "three quarters": (fraction(3 / 4), "rows, and was written with"),
    "all but one": (lambda table: table.slice(1), "rows, and was written with"),
    "none": (fraction(0), "has no rows"),
    "all twice": (lambda table: pa.concat_tables([table, table]), "rows, and was written with"),
    "one twice": (one_twice, "1 rows are there twice"),
    "another statistic": (column("statistic", set_at(0, "fame")), "a statistic 'fame'"),
    "no column": (lambda table: table.drop_columns(["count"]), "it has 0 columns 'count'"),
    "text for numbers": (
        lambda table: table.set_column(
            table.schema.get_field_index("mean"), "mean", pa.array(["1"] * table.num_rows)
        ), "its column 'mean' is string",
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", ["whole", "each"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_table_is_refused(
    folder: Path, tmp_path: Path, name: str, which: str, capsys: Any
) -> None:
    damage, said = DAMAGE[name]
    pq.write_table(damage(pq.read_table(folder / which)), tmp_path / "table")
    assert cli.main(["heads", str(tmp_path / "table")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "FILE: is damaged: " in shown.err
    assert said in shown.err


def without(layer: int | None = None, head: int | None = None, statistic: str | None = None) -> Any:
    """Leave out rows, and say so where the number of rows is kept: only the gap is left to see."""

    def cut(table: Any) -> Any:
        wanted = {"layer": layer, "head": head, "statistic": statistic}
        keep = [
            not all(row[name] == value for name, value in wanted.items() if value is not None)
            for row in table.to_pylist()
        ]
        found = table.filter(pa.array(keep))
        about = json.loads(table.schema.metadata[b"clearhead"]) | {"rows": found.num_rows}
        return found.replace_schema_metadata({"clearhead": json.dumps(about)})

    return cut


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (without(layer=0), "it has 1 layers, and one with the number 1"),
        (without(layer=1, head=0), "layer 1 has 2 heads, and one with the number 2"),
        (without(layer=1, head=2), "layer 1, head 0 has"),
        (without(layer=0, head=1, statistic="sink"), "layer 0, head 1 has"),
        (without(statistic="entropy"), "layer 0, head 0 has"),
        (without(layer=1, statistic="variability"), "layer 1, head 0 has"),
        (without(layer=1, head=1, statistic="overlap.2"), "layer 1, head 1 has"),
    ],
)
def test_a_gap_in_a_table_is_found(
    folder: Path, tmp_path: Path, cut: Any, said: str, capsys: Any
) -> None:
    pq.write_table(cut(pq.read_table(folder / "whole")), tmp_path / "table")
    code = cli.main(["heads", str(tmp_path / "table")])
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert f"FILE: is damaged: {said}" in shown.err


def test_whole_tables_stay_readable(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Also with counts of 0, one sequence, rows in another order, or an older table's metadata."""
    for name in ("whole", "each", "one"):
        table = pq.read_table(folder / name)
        some = np.random.default_rng(0).permutation(table.num_rows)
        about = json.loads(table.schema.metadata[b"clearhead"])
        del about["rows"]
        older = table.replace_schema_metadata({"clearhead": json.dumps(about)})
        for number, each in enumerate((table, table.take(some), older)):
            pq.write_table(each, tmp_path / f"{name}{number}")
            assert cli.main(["heads", str(tmp_path / f"{name}{number}")]) == 0
    one = pq.read_table(folder / "one").to_pylist()
    assert {row["count"] for row in one if row["statistic"] == "variability"} == {1}
    assert [row for row in one if row["count"] == 0 and math.isnan(row["mean"])]


@pytest.mark.parametrize("metadata", ["[]", "null", "3", '"text"', "{", "[[{}]]", "[" * 100_000])
def test_metadata_that_is_none(folder: Path, tmp_path: Path, metadata: str, capsys: Any) -> None:
    table = pq.read_table(folder / "whole").replace_schema_metadata({"clearhead": metadata})
    pq.write_table(table, tmp_path / "table")
    assert cli.main(["heads", str(tmp_path / "table")]) == 2
    assert "FILE: is no table of `clearhead scan`" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["model", "corpus", "tokens"])
def test_metadata_that_lacks_something(
    folder: Path, tmp_path: Path, missing: str, capsys: Any
) -> None:
    table = pq.read_table(folder / "whole")
    about = json.loads(table.schema.metadata[b"clearhead"])
    for change in ({}, {missing: None}, {missing: ["x"]}):
        odd = {**{k: v for k, v in about.items() if k != missing}, **change}
        meta = {"clearhead": json.dumps(odd)}
        pq.write_table(table.replace_schema_metadata(meta), tmp_path / "table")
        assert cli.main(["heads", str(tmp_path / "table")]) == 2
        assert f"metadata has no {missing}" in capsys.readouterr().err


# --- corpora ------------------------------------------------------------------------------------

RECORDS = [{"text": "hell"}, {"text": "a bell"}]
JSON = {
    "array.json": json.dumps(RECORDS),
    "pretty.json": json.dumps(RECORDS[0], indent=2),
    "pretty.array.json": json.dumps(RECORDS, indent=1),
    "byte order.json": "\ufeff" + json.dumps(RECORDS),
    "text.json": '"hell"',
    "array.txt": "\n  " + json.dumps(RECORDS),
    "no suffix": json.dumps(["hell", "shell"]),
    "lines.txt": "\n".join(map(json.dumps, RECORDS)),
    "objects.text": "\n".join(json.dumps(record, indent=1) for record in RECORDS),
    "lists.txt": '["hell"]\n["shell"]\n',
}


@pytest.mark.parametrize("name", JSON)
def test_json_is_not_read_as_text(name: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / name).write_text(JSON[name], encoding="utf-8")
    scan = ["scan", str(tmp_path / name), "--out", str(tmp_path / "out")]
    assert cli.main(scan) == 2
    assert "CORPUS: is JSON" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    if all(c in models.shipped_text() for c in JSON[name]):
        assert cli.main([*scan, "--format", "text"]) == 0


@pytest.mark.parametrize(
    ("name", "text", "kind", "records"),
    [
        ("lines.json", "\n".join(map(json.dumps, RECORDS)), "jsonl", 2),
        ("one.json", json.dumps(RECORDS[0]), "jsonl", 1),
        ("notes.txt", "[1] hell\n[2] shell\n", "text", 2),
        ("code.txt", "{\n hell\n}\n", "text", 3),
        ("open.txt", "[hell\n", "text", 1),
        ("prose.json", "hell or shell\n", "text", 1),
    ],
)
def test_the_format_goes_by_what_is_there(
    name: str, text: str, kind: str, records: int, tmp_path: Path
) -> None:
    known = models.Characters.of(text + "hel")
    torch.manual_seed(0)
    models.save(models.GPT(known, layers=1, width=8, heads=2, length=64), tmp_path / "model")
    (tmp_path / name).write_text(text)
    options = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    assert cli.main(["scan", str(tmp_path / name), *options]) == 0
    about = json.loads(pq.read_table(tmp_path / "out").schema.metadata[b"clearhead"])
    assert (about["format"], about["records"]) == (kind, records)


@pytest.mark.parametrize(
    "values",
    [
        [["a", "b"], ["c"]],
        pa.array([["a"], ["b"]], pa.large_list(pa.string())),
        pa.array([["a", "b"]], pa.list_(pa.string(), 2)),
        [{"text": "a"}],
        pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string())),
        pa.array([[["a"]]]),
        [b"a"],
    ],
)
def test_a_column_that_is_no_text(values: Any, tmp_path: Path, capsys: Any) -> None:
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    assert cli.main(["scan", str(tmp_path / "a.parquet"), "--out", str(tmp_path / "out")]) == 2
    assert "CORPUS: column 'text' is no text; got " in capsys.readouterr().err


def test_a_column_with_a_dictionary_is_text(tmp_path: Path) -> None:
    values = pa.array(["hell", "bell", "hell"]).dictionary_encode()
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    assert cli.main(["scan", str(tmp_path / "a.parquet"), "--out", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("by", "place"), [(["--by", "line"], "line 11: "), (["--by", "paragraph"], "line 10: ")]
)
def test_the_line_of_what_is_not_known(
    by: list[str], place: str, tmp_path: Path, capsys: Any
) -> None:
    page = tmp_path / "page.txt"
    page.write_text("\n\nhell\n\n\n\n \nbell\n\nshell\nwell ж\n\nж\n", encoding="utf-8")
    assert cli.main(["scan", str(page), "--out", str(tmp_path / "out"), *by]) == 0
    assert place in capsys.readouterr().out


def test_a_full_disk_says_what_is_kept(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.txt"
    page.write_text("\n".join(LINES * 3))
    scan = ["scan", str(page), "--out", str(tmp_path / "out"), "--batch", "1", "--every", "0"]
    real, left = os.fsync, [3]

    def full(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    assert cli.main(scan) == 2
    assert "--resume then goes on from the last checkpoint" in capsys.readouterr().err
    left[0] = 0
    assert cli.main([*scan, "--force"]) == 2
    error = capsys.readouterr().err
    assert "--out: cannot be written" in error
    assert "--resume" not in error


# --- factories ----------------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor] = torch.sin) -> None:
        super().__init__()
        self.table, self.then = nn.Embedding(7, 3), then

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.then(self.table(tokens))


class Aborted(BaseException):
    pass


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*arguments: Any) -> Any:
        raise error

    return fail


FACTORIES: dict[str, tuple[Any, str]] = {
    "gives_none": (lambda: None, "gives no model; got a NoneType"),
    "gives_text": (lambda: "model", "gives no model; got a str"),
    "gives_class": (lambda: Table, "gives no model; got the class Table"),
    "gives_three": (lambda: (Table(), 1, 2), "gives a tuple that is not (model, inputs)"),
    "gives_inputs": (lambda: (torch.zeros(1, 3), Table()), "gives no model; got a Tensor"),
    "number": (7, "names no function and no model; got a int"),
    "needs": (lambda size: Table(), "cannot be called: missing a required argument: 'size'"),
    "key": (raising(KeyError("width")), "raised KeyError: 'width'"),
    "divides": (lambda: 1 // 0, "raised ZeroDivisionError"),
    "stops": (raising(StopIteration()), "raised StopIteration: without a message"),
    "aborts": (raising(Aborted("no")), "raised Aborted: no"),
    "exits": (raising(SystemExit(0)), "called sys.exit(0)"),
    "exits_late": (lambda: Table(raising(SystemExit(1))), "the model called sys.exit(1)"),
    "index_late": (lambda: Table(raising(IndexError("4"))), "the model raised IndexError: 4"),
    "abort_late": (lambda: Table(raising(Aborted())), "the model raised Aborted"),
    "asserts_late": (lambda: Table(raising(AssertionError())), "the model raised AssertionError"),
}
globals().update({name: made for name, (made, _) in FACTORIES.items()})
HERE = "tests.test_cli_damage"


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("more", [[], ["--json"], ["--documents", "0,0,1"]])
def test_a_factory_that_fails_is_no_finding(name: str, more: list[str], capsys: Any) -> None:
    assert cli.main(["audit", f"{HERE}:{name}", *more]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("clearhead audit: SPEC: ")
    assert FACTORIES[name][1] in shown.err


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (":make", "SPEC: names no module"),
        ("json:", "SPEC: names no factory"),
        (":", "SPEC: names no module"),
        ("json:dumps", "missing a required argument: 'obj'"),
        ("math:pi", "names no function and no model; got a float"),
        (f"{HERE}:nothing", "has no attribute 'nothing'"),
        ("broken_module_of_a_test:make", "importing broken_module_of_a_test raised SyntaxError"),
    ],
)
def test_a_name_that_leads_to_no_factory(
    spec: str, said: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module_of_a_test.py").write_text("def make(:")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["audit", spec]) == 2
    error = capsys.readouterr().err
    assert "SPEC: " in error
    assert said in error


def chatty() -> nn.Module:
    print("loading")
    return Table(lambda x: (print("running"), x.sin())[1])


def test_what_a_model_prints_is_not_in_the_document(capsys: Any) -> None:
    assert cli.main(["audit", f"{HERE}:chatty", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["ok"]
    assert shown.err.startswith("loading\nrunning\n")


def test_finished_rows_that_are_damaged_are_named(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clearhead.heads.corpus import Job

    page = tmp_path / "page.txt"
    page.write_text("\n".join(LINES))
    scan = ["scan", str(page), "--out", str(tmp_path / "out"), "--per-document", "--every", "0"]
    monkeypatch.setattr("clearhead.heads.corpus.job.WINDOW_OF_DOCUMENTS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "_finish", raising(RuntimeError("broken")))
        assert cli.main(scan) == 2
    rows = sorted((tmp_path / "out.partial").glob("rows-*.parquet"))
    assert len(rows) > 1
    rows[0].write_bytes(rows[0].read_bytes()[:50])
    assert cli.main([*scan, "--resume"]) == 2
    assert f"--resume: has damaged rows; got {rows[0]}" in capsys.readouterr().err
    assert cli.main([*scan, "--force"]) == 0
