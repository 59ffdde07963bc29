"""`clearhead scan`: any batch size, a kill and a resume give the same table; errors are counted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from clearhead import cli, heads, models
from clearhead.heads.corpus.checkpoint import Checkpoint
from clearhead.heads.corpus.job import Job
from clearhead.heads.corpus.sequences import ResumePoint, TokenSequence, batch_of, batches
from clearhead.models.text import Characters, shipped_text

LINES = [line for line in shipped_text().splitlines() if line][:8]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(LINES), encoding="utf-8")
    return path


def letters() -> Characters:
    vocabulary = models.load().vocabulary
    assert isinstance(vocabulary, Characters)
    return vocabulary


def scan(*arguments: object) -> int:
    return cli.main(["scan", *map(str, arguments)])


def table(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = pq.read_table(path).to_pylist()
    found = {(r.get("document"), r["layer"], r["head"], r["statistic"]): r for r in rows}
    assert len(found) == len(rows)
    return found


def about(path: Path) -> dict[str, Any]:
    return json.loads(pq.read_table(path).schema.metadata[b"clearhead"])


def assert_same(left: Path, right: Path) -> None:
    ours, theirs = table(left), table(right)
    assert ours.keys() == theirs.keys()
    for key, row in ours.items():
        assert row["count"] == theirs[key]["count"], key
        for name in ("mean", "variance"):
            # To 1e-6: of the value, where it is above one.
            a, b = row[name], theirs[key][name]
            assert a == b or a == pytest.approx(b, rel=1e-6, abs=1e-6), (key, name)


def test_the_table_is_what_measure_gives(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    assert scan(corpus, "--out", out, "--length", 32) == 0
    model = models.load()
    pieces = [
        tokens[at : at + 32]
        for tokens in map(letters().encode, LINES)
        for at in range(0, len(tokens), 32)
    ]
    survey = heads.measure(model, pieces)
    found = table(out)
    rows = list(survey.rows())
    assert len(rows) == len(found) == 16 * (len(heads.STATISTICS) + 3 + 1)
    for row in rows:
        got = found[None, row.layer, row.head, row.statistic]
        assert got["count"] == row.count
        assert got["mean"] == pytest.approx(row.mean, rel=1e-6, abs=1e-6)
    assert about(out)["records"] == len(LINES)
    assert about(out)["tokens"] == sum(map(len, LINES))
    assert about(out)["sequences"] == len(pieces)


@pytest.mark.parametrize("more", [[], ["--per-document"]])
def test_any_batch_size_gives_the_same_table(corpus: Path, tmp_path: Path, more: list[str]) -> None:
    for size in (1, 3, 64):
        assert scan(corpus, "--out", tmp_path / f"{size}", "--batch", size, *more) == 0
    assert_same(tmp_path / "1", tmp_path / "3")
    assert_same(tmp_path / "1", tmp_path / "64")


def test_documents_add_up_to_the_corpus(corpus: Path, tmp_path: Path) -> None:
    whole, each = tmp_path / "whole", tmp_path / "each"
    assert scan(corpus, "--out", whole, "--length", 50) == 0
    assert scan(corpus, "--out", each, "--length", 50, "--per-document") == 0
    pooled: Counter[Any] = Counter()
    sums: Counter[Any] = Counter()
    for (document, *key), row in table(each).items():
        assert 0 <= document < len(LINES)
        pooled[tuple(key)] += row["count"]
        sums[tuple(key)] += row["count"] * row["mean"]
    for (_, *key), row in table(whole).items():
        if row["statistic"] in heads.STATISTICS:
            assert pooled[tuple(key)] == row["count"]
            assert sums[tuple(key)] / row["count"] == pytest.approx(row["mean"], abs=1e-6)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "clearhead", "scan", *map(str, arguments)]


def started(corpus: Path, out: Path, *more: object) -> subprocess.Popen[str]:
    """Start a scan that saves after every batch, and wait for its second checkpoint."""
    process = subprocess.Popen(
        command(corpus, "--out", out, "--every", 0, "--batch", 2, *more),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    state = out.with_name(out.name + ".partial") / "state.safetensors"
    seen: set[int] = set()
    while process.poll() is None and len(seen) < 3:
        try:
            seen.add(state.stat().st_mtime_ns)
        except FileNotFoundError:
            time.sleep(0.01)
    return process


@pytest.mark.parametrize(
    ("how", "more"),
    [(signal.SIGKILL, []), (signal.SIGKILL, ["--per-document"]), (signal.SIGINT, [])],
)
def test_a_scan_goes_on_after_a_stop(
    corpus: Path, tmp_path: Path, how: int, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus.write_text("\n".join(LINES[:5] * 3), encoding="utf-8")
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert scan(corpus, "--out", whole, "--length", 40, *more) == 0
    process = started(corpus, out, "--length", 40, *more)
    for other in ([], ["--resume"], ["--force"]):
        assert scan(corpus, "--out", out, "--length", 40, *other) == 2
        assert f"--out: another scan writes it; got {out}" in capsys.readouterr().err
    assert process.poll() is None
    process.send_signal(how)
    _, stderr = process.communicate()
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), stderr
    if how == signal.SIGINT:
        assert "--resume goes on" in stderr
        assert "Traceback" not in stderr
    assert not out.exists()

    capsys.readouterr()
    assert scan(corpus, "--out", out, "--length", 40, *more) == 2
    assert "--resume goes on with it, --force starts over" in capsys.readouterr().err
    assert scan(corpus, "--out", out, "--length", 41, "--resume", *more) == 2
    assert "length was 40, now 41" in capsys.readouterr().err
    assert scan(corpus, "--out", out, "--length", 40, "--resume", "--batch", 7, *more) == 0
    assert "resumed after" in capsys.readouterr().err
    assert_same(whole, out)
    assert about(whole) == about(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt", "out", "whole"]


class Broken(Exception):
    """A scan that ends in the middle."""


@pytest.mark.parametrize("more", [[], ["--per-document"]])
def test_a_scan_goes_on_from_any_batch(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """Windows of four sequences, batches of at most two: every place at which a scan may end."""
    corpus.write_text("\n".join([*(line[:20] for line in LINES[:5]), "\u2603", LINES[5]]))
    for name in ("WINDOW", "WINDOW_OF_DOCUMENTS"):
        monkeypatch.setattr(f"clearhead.heads.corpus.job.{name}", 4)
    options = ["--length", 9, "--batch", 2, *more]
    whole, out, add = tmp_path / "whole", tmp_path / "out", Job._add
    left = [0]

    def fail(self: Job, sequences: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Broken
        add(self, sequences)

    assert scan(corpus, "--out", whole, *options) == 0
    monkeypatch.setattr(Job, "_add", fail)
    times = 0
    while not out.exists():
        left[0] = 1
        with contextlib.suppress(Broken):
            scan(corpus, "--out", out, "--every", 0, "--resume", *options)
        times += 1
    assert times > 8
    assert table(out) == table(whole)
    assert about(out) == about(whole)
    assert about(out)["problems"] == {"not known to the model's tokenizer": 1}


def test_batches_hold_one_length_and_come_in_one_order() -> None:
    window = [
        TokenSequence(n, [0] * length, ResumePoint(n + 1), 0.0) for n, length in enumerate(LENGTHS)
    ]
    ordered = [3, 0, 4, 6, 1, 5, 2]
    for most in (1, 2, 3, 8):
        found = list(batches(window, most))
        assert [sequence.record for batch in found for sequence in batch] == ordered
        assert all(len({len(s.tokens) for s in batch}) == 1 for batch in found)
        assert max(map(len, found)) == min(most, 3)
        rest = [s.record for batch in batches(window, most, done=2) for s in batch]
        assert rest == ordered[2:]
    long = [TokenSequence(n, [0] * 1500, ResumePoint(n + 1), 0.0) for n in range(3)]
    assert [len(batch) for batch in batches(long, 8)] == [1, 1, 1]
    # Very few tokens are run beside their own copies.
    assert batch_of(window[2:3]).tokens.shape == (16, 1)
    assert batch_of(window[:1]).tokens.shape == (2, 8)


LENGTHS = (8, 5, 1, 9, 8, 5, 8)


def test_a_lock_that_nobody_holds_is_none(corpus: Path, tmp_path: Path) -> None:
    out, home = tmp_path / "out", tmp_path / "out.partial"
    home.mkdir()
    (home / "lock").touch()
    (home / "rows-000000.parquet").write_bytes(b"of no state")
    assert scan(corpus, "--out", out, "--limit", 2, "--per-document") == 0
    assert not home.exists()


def test_a_lock_waits_for_no_file_that_is_gone(tmp_path: Path) -> None:
    first, second = Checkpoint(tmp_path / "out"), Checkpoint(tmp_path / "out")
    with first.held(), pytest.raises(ValueError, match="another scan writes it"), second.held():
        pass
    with second.held():
        assert (tmp_path / "out.partial" / "lock").exists()
    assert not list(tmp_path.iterdir())


def broken(self: Job, window: Any) -> None:
    raise Broken


def test_a_corpus_that_changes_is_noticed(
    corpus: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beyond what is read of a file at once, and of the same size.
    text = "\n".join(LINES) + "\n" * 200_000 + "shell"
    corpus.write_text(text, encoding="utf-8")
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(Job, "_end", broken)
        with pytest.raises(Broken):
            scan(corpus, "--out", out, "--every", 0)
    corpus.write_text(text[:-5] + "hells", encoding="utf-8")
    assert scan(corpus, "--out", out, "--resume") == 2
    assert "--resume: is another scan; got contents was" in capsys.readouterr().err
    corpus.write_text(text, encoding="utf-8")
    assert scan(corpus, "--out", out, "--resume") == 0


def test_a_scan_over_a_table_goes_on(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert scan(corpus, "--out", out, "--limit", 2) == 0
    old = out.read_bytes()
    corpus.write_text("\n".join(LINES[:5] * 3), encoding="utf-8")
    process = started(corpus, out, "--force")
    process.send_signal(signal.SIGINT)
    assert "--resume goes on" in process.communicate()[1]
    assert out.read_bytes() == old

    late = (tmp_path / "out.partial" / "state.safetensors").stat().st_mtime_ns + 1_000_000_000
    before = out.stat().st_mtime_ns
    os.utime(out, ns=(late, late))  # as a table that came after the scan was stopped
    assert scan(corpus, "--out", out, "--resume") == 2
    assert f"--out: exists; got {out}\n  to do: --force writes" in capsys.readouterr().err
    os.utime(out, ns=(before, before))
    assert scan(corpus, "--out", out, "--resume") == 0
    assert scan(corpus, "--out", whole) == 0
    assert_same(whole, out)

    assert scan(corpus, "--out", out, "--resume") == 2
    assert "to do: nothing is left to resume; --force writes" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--per-document"]])
def test_a_full_disk_is_said(corpus: Path, tmp_path: Path, capsys: Any, more: list[str]) -> None:
    resource = pytest.importorskip("resource")
    out, whole = tmp_path / "out", tmp_path / "whole"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for every in (0, 30):  # at the first checkpoint, and at the table
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, before[1]))
        try:
            assert scan(corpus, "--out", out, "--every", every, "--force", *more) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        error = capsys.readouterr().err
        assert "--out: cannot be written; got" in error
        assert "to do: make room; nothing is kept so far\n" in error
        assert not out.exists()
    assert scan(corpus, "--out", out, "--resume", *more) == 0
    assert scan(corpus, "--out", whole, *more) == 0
    assert table(out) == table(whole)


def test_a_damaged_checkpoint_is_said(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    home = tmp_path / "out.partial"
    home.mkdir()
    (home / "state.safetensors").write_bytes(b"nonsense")
    assert scan(corpus, "--out", tmp_path / "out", "--resume") == 2
    assert "cannot read its state" in capsys.readouterr().err
    assert scan(corpus, "--out", tmp_path / "out") == 2
    assert "has an unfinished scan beside it" in capsys.readouterr().err
    assert scan(corpus, "--out", tmp_path / "out", "--force", "--limit", 1) == 0
    assert not home.exists()


def test_a_checkpoint_of_another_version_is_refused(
    corpus: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr("clearhead.heads.corpus.checkpoint.VERSION", 1)
        patched.setattr(Job, "_end", broken)
        with pytest.raises(Broken):
            scan(corpus, "--out", out, "--every", 0, "--limit", 2)
    assert scan(corpus, "--out", out, "--resume", "--limit", 2) == 2
    said = capsys.readouterr().err
    assert "--resume: another version of clearhead wrote its state\n  to do: start over" in said
    assert scan(corpus, "--out", out, "--force", "--limit", 2) == 0


def test_rows_that_are_missing_are_said_before_any_work(
    corpus: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.heads.corpus.job.WINDOW_OF_DOCUMENTS", 2)
    add, left = Job._add, [4]

    def fail(self: Job, sequences: list[TokenSequence]) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Broken
        add(self, sequences)

    monkeypatch.setattr(Job, "_add", fail)
    options = ["--out", tmp_path / "out", "--per-document", "--batch", 1, "--every", 0]
    with pytest.raises(Broken):
        scan(corpus, *options)
    (tmp_path / "out.partial" / "rows-000000.parquet").unlink()
    capsys.readouterr()
    # Not one sequence is read: that would raise Broken.
    assert scan(corpus, *options, "--resume") == 2
    said = capsys.readouterr().err
    assert "--resume: misses rows that were finished; got" in said
    assert "rows-000000.parquet\n  to do: start over with --force" in said


def test_resume_with_nothing_to_resume_starts(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    assert scan(corpus, "--out", tmp_path / "out", "--resume", "--limit", 2) == 0
    assert "starting at the beginning" in capsys.readouterr().err


def test_all_formats_give_the_same_table(tmp_path: Path) -> None:
    lines = LINES[:7]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode())
    objects = "\n".join(json.dumps({"text": line, "id": 1}) for line in lines)
    (tmp_path / "b.jsonl").write_text(objects, encoding="utf-8")
    for name, kind in (
        ("c.parquet", pa.string()),
        ("d.parquet", pa.dictionary(pa.int8(), pa.string())),
    ):
        pq.write_table(pa.table({"id": range(7), "text": pa.array(lines, kind)}), tmp_path / name)
    pq.write_table(pa.table({"body": lines}), tmp_path / "e.parquet")
    for path in sorted(tmp_path.iterdir()):
        more = ["--field", "body"] if path.name == "e.parquet" else []
        more += ["--by", "paragraph"] if path.name == "a.txt" else []
        assert scan(path, "--out", tmp_path / f"{path.stem}.out", *more) == 0
        assert_same(tmp_path / "a.out", tmp_path / f"{path.stem}.out")


def test_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text(f"\n\n{LINES[0]}\n{LINES[1]}\n\n \n{LINES[2]}\n", encoding="utf-8")
    assert scan(path, "--out", tmp_path / "out", "--by", "paragraph") == 0
    found = about(tmp_path / "out")
    assert found["records"] == 2
    assert found["tokens"] == sum(len(line) for line in LINES[:3]) + 1


def test_broken_records_are_counted(tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(
        LINES[0].encode() + b"\nbroken \xff\xfe\n\n" + LINES[1].encode() + b"\n\xc3\n"
        + "snow \u2603\n".encode()
    )  # fmt: skip
    assert scan(text, "--out", tmp_path / "a") == 0
    printed = capsys.readouterr().out
    assert "left out: 2 not UTF-8; the first: line 2" in printed
    assert (
        "left out: 1 not known to the model's tokenizer; the first: record 2, line 6: " in printed
    )
    assert printed.splitlines()[-1] == f"Wrote {tmp_path / 'a'}"
    good = tmp_path / "good.txt"
    good.write_text("\n".join(LINES[:2]), encoding="utf-8")
    assert scan(good, "--out", tmp_path / "good") == 0
    assert_same(tmp_path / "good", tmp_path / "a")

    lines = [
        json.dumps({"text": LINES[0]}), "{", "[1]", '{"other": 1}', '{"text": 5}', "[" * 100_000,
        '{"text": "\\ud800"}', '{"text": ""}', json.dumps({"text": LINES[1]}),
    ]  # fmt: skip
    objects = tmp_path / "b.jsonl"
    objects.write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}')
    capsys.readouterr()
    assert scan(objects, "--out", tmp_path / "b") == 0
    printed = capsys.readouterr().out
    for part in (
        "2 not JSON; the first: line 2", "2 no field 'text'; the first: line 3", "1 not UTF-8",
        "1 field 'text' is no text; the first: line 5", "1 not known to the model's tokenizer",
    ):  # fmt: skip
        assert f"left out: {part}" in printed
    assert_same(tmp_path / "good", tmp_path / "b")

    pq.write_table(pa.table({"text": [LINES[0], None, LINES[1]]}), tmp_path / "c.parquet")
    assert scan(tmp_path / "c.parquet", "--out", tmp_path / "c") == 0
    assert "left out: 1 column 'text' is null; the first: row 2" in capsys.readouterr().out
    assert_same(tmp_path / "good", tmp_path / "c")
    assert about(tmp_path / "c")["problems"] == {"column 'text' is null": 1}


def test_a_line_without_end_is_read_in_pieces(tmp_path: Path, monkeypatch: Any) -> None:
    from clearhead.heads.corpus import corpus

    monkeypatch.setattr(corpus, "_PIECE", 10)
    path = tmp_path / "long.txt"
    path.write_text("é" * 12 + "abc\n" + "snow ☃☃☃☃", encoding="utf-8")
    found = corpus.Corpus(path, format=None, by="line", field="text")
    assert "".join(record.text for record in found) == "é" * 12 + "abc" + "snow ☃☃☃☃"
    assert not found.problems


def test_texts_without_end_are_read_in_pieces(tmp_path: Path, monkeypatch: Any) -> None:
    from clearhead.heads.corpus import corpus

    monkeypatch.setattr(corpus, "_PIECE", 10)
    monkeypatch.setattr(corpus, "_LONGEST", 1 << 20)
    lines, long = tmp_path / "a.txt", json.dumps({"text": "b" * 25})
    lines.write_text("abcd\n" * 9)
    pieces = [r.text for r in corpus.Corpus(lines, format=None, by="paragraph", field="text")]
    assert max(map(len, pieces)) <= 12
    assert "".join(pieces).replace("\n", "") == "abcd" * 9
    objects = tmp_path / "b.jsonl"
    objects.write_text("\n".join([long, "x" * (3 << 20), long]))
    found = corpus.Corpus(objects, format=None, by="line", field="text")
    assert [record.text for record in found] == ["b" * 10, "b" * 10, "b" * 5] * 2
    assert found.problems == {"longer than 1 MiB": 1}
    assert found.places == {"longer than 1 MiB": "line 2"}


def test_documents_of_one_token(tmp_path: Path, capsys: Any) -> None:
    """A first token has one source: nothing before it, and nothing to choose."""
    path = tmp_path / "short.txt"
    path.write_text("h\nhe\n\ne\n")
    assert scan(path, "--out", tmp_path / "out") == 0
    assert scan(path, "--out", tmp_path / "each", "--per-document") == 0
    rows, each = table(tmp_path / "out"), table(tmp_path / "each")
    assert rows[None, 0, 0, "previous"]["count"] == 1
    assert rows[None, 0, 0, "self"]["count"] == 4
    assert rows[None, 0, 0, "duplicate"]["count"] == 0
    for document in (0, 2):
        assert (document, 0, 0, "previous") not in each
        assert each[document, 0, 0, "self"]["mean"] == 1
        assert each[document, 0, 0, "entropy"]["mean"] == pytest.approx(0, abs=1e-7)
    assert cli.main(["heads", str(tmp_path / "out")]) == 0


BAD = {
    "empty": (b"", "CORPUS: is empty"),
    "blank": (b"\n \n\n", "CORPUS: holds no text that can be used; got nothing but blanks\n"),
    "binary": (b"ELF\0\1\2", "CORPUS: is binary; got"),
    "gzip": (b"\x1f\x8b\x08", "CORPUS: is binary"),
    "latin": (b"caf\xe9\n", "CORPUS: holds no text that can be used; got 1 not UTF-8 (line 1)"),
    "cut.parquet": (b"PAR1 and no more", "CORPUS: is no whole Parquet file"),
    "none.jsonl": (b"no\njson\n", "CORPUS: holds no text that can be used; got 2 not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_corpus_that_cannot_be_used(name: str, tmp_path: Path, capsys: Any) -> None:
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    assert scan(tmp_path / name, "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_parquet_columns(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["a"], "number": [1]}), path)
    assert scan(path, "--out", tmp_path / "out") == 2
    assert "--field, one of body, number" in capsys.readouterr().err
    assert scan(path, "--out", tmp_path / "out", "--field", "number") == 2
    assert "column 'number' is no text; got int64" in capsys.readouterr().err


def test_misuse_is_refused_before_any_work(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    out, pipe = tmp_path / "out", tmp_path / "pipe"
    os.mkfifo(pipe)
    cases: list[tuple[list[object], str]] = [
        ([tmp_path / "missing", "--out", out], "CORPUS: does not exist"),
        ([tmp_path, "--out", out], "CORPUS: needs to be a file; got the directory"),
        (["/dev/null", "--out", out], "CORPUS: needs to be a file; got the device"),
        ([corpus, "--out", tmp_path], "--out: needs to be a file; got the directory"),
        ([corpus, "--out", pipe, "--force"], "--out: needs to be a file; got the device or pipe"),
        ([corpus, "--out", tmp_path / "no" / "out"], "--out: lies in no directory that exists"),
        ([corpus, "--out", corpus, "--force"], "--out: is the corpus itself"),
        ([corpus, "--out", out, "--batch", 0], "--batch: must be at least 1"),
        ([corpus, "--out", out, "--length", -1], "--length: must be at least 1"),
        ([corpus, "--out", out, "--length", 4000], "--length: the model reads"),
        ([corpus, "--out", out, "--every", "nan"], "--every: must be a number of seconds"),
        ([corpus, "--out", out, "--limit", 0], "--limit: must be at least 1"),
        ([corpus, "--out", out, "--model", tmp_path / "no"], "no such file or directory"),
    ]
    for arguments, message in cases:
        assert scan(*arguments) == 2, arguments
        assert message in capsys.readouterr().err, arguments
    out.write_text("mine")
    assert scan(corpus, "--out", out) == 2
    assert "--out: exists" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert scan(corpus, "--out", out, "--force", "--limit", 2) == 0
    assert about(out)["records"] == 2


def test_a_bidirectional_model_is_told_its_padding() -> None:
    torch.manual_seed(0)
    bert = models.BERT(
        Characters(letters().characters, models.BERT.special), layers=2, heads=2, width=16
    )
    tokens = [letters().encode(line)[:60] + 2 for line in LINES[:5]]
    one = heads.measure(bert.eval(), tokens)
    longest = max(map(len, tokens))
    batch = torch.zeros(5, longest, dtype=torch.int64)
    for row, some in zip(batch, tokens, strict=True):
        row[: len(some)] = some
    many = heads.measure(bert, batch, real=batch != 0)
    for left, right in zip(one.rows(), many.rows(), strict=True):
        assert left.count == right.count
        assert left.mean == pytest.approx(right.mean, rel=1e-6, abs=1e-6)


def test_scan_changes_nothing_in_the_model(corpus: Path, tmp_path: Path) -> None:
    model = models.load()
    tokens = letters().encode(LINES[0])[None]
    before = model(tokens)
    heads.measure(model, tokens)
    assert torch.equal(model(tokens), before)


# Shards: any number of them gives the table of one process.


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_shards_merge_to_the_table_of_one_process(
    corpus: Path, tmp_path: Path, monkeypatch: Any, shards: int
) -> None:
    # Windows of two sequences: five shards of seven have one or none.
    monkeypatch.setattr("clearhead.heads.corpus.job.WINDOW", 2)
    corpus.write_text("\n".join(LINES[:5]), encoding="utf-8")
    assert scan(corpus, "--out", tmp_path / "whole") == 0
    files = [tmp_path / f"{k}" for k in range(shards)]
    for k, file in enumerate(files):
        more = ["--shard", f"{k + 1}/{shards}", "--batch", k + 1]
        assert scan(corpus, "--out", file, *more) == 0
    merged = tmp_path / "merged"
    assert cli.main(["heads", "--merge", *map(str, files[::-1]), "--out", str(merged)]) == 0
    assert merged.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_shard_goes_on_after_a_stop(corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("clearhead.heads.corpus.job.WINDOW", 2)
    arguments = [corpus, "--shard", "2/2", "--batch", 1]
    assert scan(*arguments, "--out", tmp_path / "whole") == 0
    read, reads = heads.Survey.read, []

    def stopping(self: Any, batch: Any) -> Any:
        reads.append(batch)
        if len(reads) == 3:
            signal.raise_signal(signal.SIGINT)
        return read(self, batch)

    monkeypatch.setattr(heads.Survey, "read", stopping)
    out = tmp_path / "out"
    assert scan(*arguments, "--out", out) == 130
    assert not out.exists()
    assert scan(corpus, "--shard", "1/2", "--out", out, "--resume") == 2
    assert scan(*arguments, "--out", out, "--resume") == 0
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()
    # A finished shard is left as it is, and no other takes its place.
    assert scan(*arguments, "--out", out, "--resume") == 0
    assert scan(corpus, "--shard", "1/2", "--out", out, "--resume") == 2


def test_shards_that_are_not_of_one_scan_are_refused(
    corpus: Path, tmp_path: Path, capsys: Any
) -> None:
    one, two, other, whole = (tmp_path / name for name in ("one", "two", "other", "whole"))
    assert scan(corpus, "--out", one, "--shard", "1/2") == 0
    assert scan(corpus, "--out", two, "--shard", "2/2") == 0
    assert scan(corpus, "--out", other, "--shard", "2/2", "--length", 9) == 0
    assert scan(corpus, "--out", whole) == 0
    for files, text in (
        ([one], "needs every shard; got 1 of 2, without 2/2"),
        ([one, two, two], "takes each shard once; got shard 2/2 twice"),
        ([one, other], "takes the shards of one scan; got length is 128 in"),
        ([one, whole], "as a shard of this version"),
        ([one, tmp_path / "none"], "is a file for each shard"),
    ):
        capsys.readouterr()
        assert cli.main(["heads", "--merge", *map(str, files)]) == 2
        assert text in capsys.readouterr().err.replace("\n", " ")
    damaged = one.read_bytes()
    one.write_bytes(damaged[: len(damaged) // 2])
    assert cli.main(["heads", "--merge", str(one), str(two)]) == 2
    assert cli.main(["heads", str(two)]) == 2
    for shard in ("0/2", "3/2", "1", "a/b"):
        assert scan(corpus, "--out", tmp_path / "x", "--shard", shard) == 2
    assert scan(corpus, "--out", tmp_path / "x", "--shard", "1/2", "--per-document") == 2
    assert not (tmp_path / "x").exists()


def torchrun(port: int, node: int, *arguments: object) -> subprocess.Popen[str]:
    """One of two nodes of a torchrun, on a loopback address of its own."""
    options = [
        "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=scan", "--max-restarts=2",
        f"--local-addr=127.0.0.{node + 1}",
    ]  # fmt: skip
    line = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "clearhead", "scan"]
    return subprocess.Popen(
        [*line, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_torchrun_scans_on_two_nodes_and_survives_the_loss_of_a_worker(
    corpus: Path, tmp_path: Path
) -> None:
    many = tmp_path / "many.txt"
    # Two windows, of 2,048 sequences and of the rest.
    many.write_text("\n".join(LINES[i % 8][:4] for i in range(4000)), encoding="utf-8")
    assert scan(many, "--out", tmp_path / "whole") == 0
    out = tmp_path / "out"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [torchrun(port, node, many, "--out", out, "--every", 0) for node in (0, 1)]
    # A worker is killed once it has a checkpoint.
    partial = [tmp_path / f"out.shard-{k}-of-2.partial" / "state.safetensors" for k in (1, 2)]
    end = time.monotonic() + 60
    while not any(path.exists() for path in partial) and time.monotonic() < end:
        time.sleep(0.05)
    (worker,) = [int(x) for x in children(nodes[0].pid)]
    os.kill(worker, signal.SIGKILL)
    ends = [node.communicate(timeout=100) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ends
    assert "resumed after" in ends[0][1] + ends[1][1]
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()
    assert not list(tmp_path.glob("out.*"))


def children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()
