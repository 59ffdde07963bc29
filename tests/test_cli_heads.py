"""`clearhead heads`: the roles of heads with known weights, as text and as JSON, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import clearhead as ch
from clearhead import cli, heads, masks, models

# Heads that are their masks: rows have one source, so that weights are known. The last is even.
TOKENS = torch.tensor([9, *[4, 5, 6, 7] * 6])
PATTERNS = (
    masks.diagonal(1), masks.induction(TOKENS) & masks.window(4), masks.first(1),
    masks.diagonal(0), masks.first(1), masks.causal(),
)  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    from clearhead.heads.corpus import table

    size = len(TOKENS)
    edges = torch.stack([mask.dense(size, size).reshape(size, size) for mask in PATTERNS])

    def model(tokens: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(1, len(PATTERNS), size, 4)
        return ch.attend(x, x, x, masks.dense(edges[None]))

    survey = heads.measure(model, TOKENS)  # type: ignore[arg-type]
    about = {"model": "a model [of/tests]", "corpus": "a corpus", "tokens": size}
    table.write(tmp_path / "table", table.of_rows(map(vars, survey.rows())), about)
    return tmp_path / "table"


def printed(capsys: Any, *arguments: object) -> str:
    assert cli.main(["heads", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_roles(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, file, "--json"))
    roles = {head["head"]: head["roles"][0] for head in found["heads"]}
    assert roles == {
        0: "previous", 1: "induction", 2: "sink", 3: "self", 4: "sink", 5: "entropy_normalized",
    }  # fmt: skip
    assert found["redundant"] == [{"layer": 0, "heads": [2, 4]}]
    assert found["roles"]["previous"] == [{"layer": 0, "head": 0, "mean": 1.0}]
    assert found["about"]["schema"] == "clearhead.scan"


def test_text(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(capsys, file)
    lines = text.splitlines()
    # Markup in a name is no markup.
    assert re.match(r"a model \[of/tests\]: 1 layers?, 6 heads, over 25 tokens", lines[0])
    assert lines[1].split() == ["layer", *"012345", "redundant"]
    assert lines[2].split() == ["0", *"PIS=S~", "2", "=", "4"]
    assert "sink [sink] 0.2 (1.00), 0.4 (1.00)" in lines
    assert any(line.startswith("redundant [cosine ≥ 0.9] 2 heads in 1 group") for line in lines)
    assert max(map(len, lines)) <= 80
    assert "0.2 (1.00) and 1 more" in printed(capsys, file, "--top", 1)


def test_a_table_per_document_adds_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from clearhead.heads.roles import pooled

    # Several parts, each with a dictionary of its own.
    monkeypatch.setattr("clearhead.heads.corpus.job.WINDOW_OF_DOCUMENTS", 1)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the bell\nhell or shell, shell or hell\nten men\n", encoding="utf-8")
    for name, more in (("whole", []), ("each", ["--per-document"])):
        assert cli.main(["scan", str(corpus), "--out", str(tmp_path / name), *more]) == 0
    capsys.readouterr()
    ones, others = (json.loads(printed(capsys, tmp_path / n, "--json")) for n in ("each", "whole"))
    for ours, theirs in zip(ones["heads"], others["heads"], strict=True):
        for name, mean in ours["means"].items():
            assert mean == pytest.approx(theirs["means"][name], abs=1e-12)
        assert ours["roles"] == theirs["roles"]
    assert "not in a table per document" in printed(capsys, tmp_path / "each")
    together, apart = (pooled(pq.read_table(tmp_path / name)) for name in ("whole", "each"))
    assert together.keys() == apart.keys()
    for head, found in apart.items():
        assert set(found) == set(heads.STATISTICS)
        for name, row in found.items():
            whole = together[head][name]
            assert row["count"] == whole["count"]
            assert row["variance"] == pytest.approx(whole["variance"], abs=1e-12)


def test_refusals(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"layer": [1]}), other)
    (tmp_path / "text").write_text("no table")
    table = pq.read_table(file)
    newer = json.dumps({"schema": "clearhead.scan", "version": 2})
    pq.write_table(table.replace_schema_metadata({"clearhead": newer}), tmp_path / "newer")
    cases: list[tuple[list[object], str]] = [
        ([tmp_path / "missing"], "FILE: does not exist"),
        ([tmp_path], "FILE: is no file"),
        ([other], "FILE: is no table of `clearhead scan`"),
        ([tmp_path / "text"], "FILE: is no table of `clearhead scan`"),
        ([tmp_path / "newer"], "FILE: has version 2 of the table, and this is version 1"),
        ([file, "--threshold", 0], "--threshold: is a share"),
        ([file, "--alike", "nan"], "--alike: is a share"),
        ([file, "--top", 0], "--top: must be at least 1"),
    ]
    for arguments, message in cases:
        assert cli.main(["heads", *map(str, arguments)]) == 2, arguments
        assert message in capsys.readouterr().err, arguments


def test_the_calls_that_cut_what_was_found(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each call is run as it is printed, and moves the heads of its role and no other."""
    found = json.loads(printed(capsys, file, "--json"))
    roles = {role: having for role, having in found["roles"].items() if having}
    assert found["cuts"].keys() == {"model", *roles}
    assert found["cuts"]["model"] == "model = ch.models.load('a model [of/tests]')"
    size = len(TOKENS)
    edges = torch.stack([mask.dense(size, size).reshape(size, size) for mask in PATTERNS])
    values = torch.randn(1, len(PATTERNS), size, 4)

    def model(tokens: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(1, len(PATTERNS), size, 4)
        return ch.attend(x, x, values, masks.dense(edges[None]))

    lines = printed(capsys, file).splitlines()
    before = model(TOKENS)
    for role, having in roles.items():
        call = found["cuts"][role]
        assert f"  {call}" in lines
        names = {"ch": ch, "model": model, "tokens": TOKENS[None]}
        with eval(call, names):
            moved = (model(TOKENS) - before).abs().amax((0, 2, 3)).nonzero().flatten().tolist()
        assert moved == sorted(head["head"] for head in having), role


def test_a_table_names_the_model_that_it_is_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.txt"
    page.write_text("hell or shell, shell or hell\n")
    torch.manual_seed(0)
    words = models.Characters.of("hel orst,")
    model = models.GPT(words, layers=1, width=8, heads=2)
    torch.nn.init.zeros_(model.blocks[0].attention.query_layer.weight)  # type: ignore[arg-type]
    models.save(model, tmp_path / "it's")
    for more, call in (
        ([], "model = ch.models.load()"),
        (["--model", str(tmp_path / "it's")], None),
    ):
        out = tmp_path / "table"
        scan = ["scan", str(page), "--out", str(out), "--force", *more]
        assert cli.main(scan) == 0
        capsys.readouterr()
        cuts = json.loads(printed(capsys, out, "--threshold", 0.01, "--json"))["cuts"]
        assert call in (None, cuts["model"])
        names: dict[str, Any] = {"ch": ch}
        exec(cuts["model"], names)
        assert ch.models.encode(names["model"], "hell").shape == (1, 4)
        assert len(names["model"].blocks) == (1 if more else 4)
