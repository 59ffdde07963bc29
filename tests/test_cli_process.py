"""The command as a process: signals, pipes, locks, links, and what reaches a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from clearhead import cli, models
from clearhead.views.labels import label, visible

TEXT = "ten men went to the bell and the well, and then to the hill.\n" * 6
TINY = ["--length", "16", "--layers", "1", "--width", "8", "--batch", "4"]
# Part of a name or a text that would steer a terminal: title, report, colour, C1, overrides.
ODD = "\x1b]2;owned\x07\x1b[31m\x1b[6n\x7f\x85\x9b\u202d\u2067x"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tale.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(*words: str, **options: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen([sys.executable, "-m", "clearhead", *words], **pipes)


def training(out: str, *more: str, **options: Any) -> subprocess.Popen[str]:
    return started("train", "tale.txt", *TINY, "--out", out, *more, **options)


def first_line(process: subprocess.Popen[str]) -> str:
    """The line that comes when the loop is about to start."""
    assert process.stderr is not None
    return process.stderr.readline()


# --- stopped ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["look", "hell"], ["audit"], ["generate", "h", "--tokens", "9999"]]
)
@pytest.mark.parametrize("imported", ["argparse", "torch", "clearhead.models"])
def test_ctrl_c_is_130_from_the_first_import_on(words: list[str], imported: str) -> None:
    """The signal comes at an import, not at a time: an early, a middle and a late one."""
    code = f"""
import os, runpy, signal, sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == {imported!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.modules.pop({imported!r}, None)
sys.meta_path.insert(0, Hook())
sys.argv = ["clearhead", *{words!r}]
runpy.run_module("clearhead", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_training_that_is_stopped_goes_on_to_the_same_bytes(home: Path, number: int) -> None:
    with training("whole", "--steps", "30") as process:
        assert process.communicate()[0].endswith("Wrote whole\n")
    with training("part", "--steps", "30", "--every", "1e9") as process:
        assert "30 steps" in first_line(process)
        process.send_signal(number)
        out, err = process.communicate()
    if process.returncode == 130:  # else it was done before the signal came
        assert "Stopping after this step" in err
        assert out.splitlines()[-1] == "Wrote part"
        with started("train", "--resume", "part") as process:
            process.communicate()
    assert process.returncode == 0
    for file in ("model.safetensors", "training.safetensors"):
        assert (home / "whole" / file).read_bytes() == (home / "part" / file).read_bytes()


def test_a_training_is_saved_every_so_many_seconds(home: Path) -> None:
    """And not only where it is validated, which a long run does every hundred steps."""
    saved = models.Training.save
    steps: list[int] = []

    def save(self: models.Training, path: Path) -> None:
        steps.append(self.step)
        saved(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.Training, "save", save)
        words = ["train", "tale.txt", *TINY, "--steps", "40"]
        assert cli.main([*words, "--out", "often", "--every", "0"]) == 0
        assert steps == list(range(1, 41))
        steps.clear()
        assert cli.main([*words, "--out", "seldom", "--every", "1e9"]) == 0
        assert steps == list(range(2, 41, 2))
    assert cli.main([*words, "--every", "nan"]) == 2


# --- one writer ---------------------------------------------------------------------------------


def test_one_training_writes_a_directory(home: Path, capsys: Any) -> None:
    with training("d", "--steps", "1000000", "--every", "0") as process:
        assert "steps" in first_line(process)
        while not (home / "d" / "training.safetensors").exists():
            assert process.poll() is None
            time.sleep(0.01)
        for words in (["tale.txt", "--out", "d", "--force"], ["--resume", "d"]):
            assert cli.main(["train", *words]) == 2
            assert "--out: another training writes it; got d\n" in capsys.readouterr().err
        process.kill()
        process.communicate()
    # No lock outlives its process, and nothing that it was writing is left.
    (home / "d" / ".model.safetensors.1.part").write_bytes(b"cut short")
    step = models.resume("d", TEXT).step
    assert cli.main(["train", "--resume", "d", "--steps", str(step + 2)]) == 0
    assert sorted(os.listdir("d")) == ["model.safetensors", "training.safetensors"]


def test_of_two_trainings_that_start_together_one_is_lost_before_its_work(home: Path) -> None:
    both = [training("d", "--steps", "400", "--seed", str(seed)) for seed in (1, 2)]
    errors = [process.communicate()[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2]
    assert "--out: " in errors[codes.index(2)]
    assert "step " not in errors[codes.index(2)].replace("steps", "")
    with training("alone", "--steps", "400", "--seed", str(codes.index(0) + 1)) as process:
        process.communicate()
    files = [home / name / "model.safetensors" for name in ("d", "alone")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_directory_that_nothing_was_written_into_is_not_left(home: Path) -> None:
    os.mkdir("old")
    os.symlink("nowhere/at/all", "old/model.safetensors")
    assert cli.main(["train", "tale.txt", *TINY, "--steps", "1", "--out", "old", "--force"]) == 2
    assert os.readlink("old/model.safetensors") == "nowhere/at/all"
    code = f"""
from clearhead import cli, models
def fail(self): raise RuntimeError("broken")
models.Training.advance = fail
raise SystemExit(cli.main(["train", "tale.txt", *{TINY!r}, "--out", "fresh"]))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 2
    assert not (home / "fresh").exists()


# --- links, inputs ------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [True, False])
def test_a_link_as_output_stays_and_its_target_is_written(home: Path, there: bool) -> None:
    os.mkdir("real")
    if there:
        Path("real/table").write_text("old")
    os.symlink("real/table", "latest")
    scan = ["scan", "tale.txt", "--limit", "1", "--out", "latest"]
    assert cli.main([*scan, "--force"]) == 0
    assert os.readlink("latest") == "real/table"
    assert pq.read_table("real/table").num_rows
    assert sorted(os.listdir()) == ["latest", "real", "tale.txt"]
    assert os.listdir("real") == ["table"]
    assert cli.main(scan) == 2


def test_links_in_the_directory_of_a_training_stay(home: Path) -> None:
    words = ["train", "tale.txt", *TINY, "--steps", "1", "--out", "d"]
    assert cli.main(words) == 0
    for name in ("model", "training"):
        Path(f"d/{name}.safetensors").rename(f"{name}.bin")
        os.symlink(f"../{name}.bin", f"d/{name}.safetensors")
    before = Path("model.bin").read_bytes()
    assert cli.main([*words, "--seed", "7", "--force"]) == 0
    assert os.readlink("d/model.safetensors") == "../model.bin"
    assert Path("model.bin").read_bytes() != before
    assert models.load("d").name == "gpt"
    assert cli.main(["train", "--resume", "d", "--steps", "2"]) == 0
    assert os.readlink("d/training.safetensors") == "../training.bin"


@pytest.mark.parametrize("target", ["loop", "/dev/stdout", "/dev/null", "pipe"])
def test_a_link_to_no_file_is_refused(home: Path, target: str, capsys: Any) -> None:
    os.mkfifo("pipe")
    os.symlink(target, "loop")
    line = f"{sys.executable} -m clearhead scan tale.txt --limit 1 --force --out loop | cat"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert re.match(
        r"clearhead scan: --out: (is a link that leads to no|needs to be a) file", done.stderr
    )
    assert os.readlink("loop") == target
    assert sorted(os.listdir()) == ["loop", "pipe", "tale.txt"]


def test_no_input_is_written_over(home: Path, capsys: Any) -> None:
    assert cli.main(["train", "tale.txt", *TINY, "--steps", "1", "--out", "t"]) == 0
    os.symlink("t/model.safetensors", "link")
    os.link("tale.txt", "t/model.safetensors.txt")
    os.mkdir("text")
    os.link("tale.txt", "text/model.safetensors")
    capsys.readouterr()
    for words, said in (
        (["scan", "tale.txt", "--model", "t", "--out", "t/model.safetensors"], "of the model"),
        (["scan", "tale.txt", "--model", "t", "--out", "link"], "of the model itself"),
        (["scan", "tale.txt", "--out", "t/model.safetensors.txt"], "is the corpus itself"),
        (["train", "tale.txt", *TINY, "--out", "text"], "would overwrite the text that is read"),
    ):  # fmt: skip
        assert cli.main([*words, "--force"]) == 2
        assert said in capsys.readouterr().err
    assert Path("tale.txt").read_text() == TEXT
    assert models.load("t").name == "gpt"


# --- pipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "codes"),
    [("2>&1 | head -1", "0"), ("2>&1 >/dev/null | true", "0"), ("| true", "0"), ("2>&-", "0"),
     ("2>/dev/full", "0"), (">&- 2>&-", "0"), (">/dev/full", "2")],
)  # fmt: skip
def test_whoever_stops_to_listen_ends_no_training(home: Path, end: str, codes: str) -> None:
    words = " ".join(["-m clearhead train tale.txt --out d --steps 40 --every 0", *TINY])
    line = f"{sys.executable} {words} {end}; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1] == codes
    assert "Traceback" not in done.stdout + done.stderr
    assert models.resume("d", TEXT, steps=99).step == 40


def test_a_finding_is_a_finding_even_if_nobody_reads_it(home: Path) -> None:
    Path("leaky.py").write_text(
        "import torch\ndef make(): return torch.nn.Sequential(torch.nn.Embedding(7, 3), Leak())\n"
        "class Leak(torch.nn.Module):\n    def forward(self, x): return x.flip(1).cumsum(1)\n"
    )
    line = (
        f"{sys.executable} -m clearhead audit leaky:make --length 5 | true; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1] == "1", done.stderr


@pytest.mark.parametrize("words", ["--help", "look --help", "info", "mask causal -q 400"])
def test_a_reader_that_leaves_early_is_no_error(words: str) -> None:
    line = f"{sys.executable} -m clearhead {words} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_text_without_end_ends_with_its_reader() -> None:
    line = f"{sys.executable} -m clearhead generate h --tokens 100000000 | head -c 20"
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, check=False, timeout=60
    )
    assert (len(done.stdout), done.stderr) == (20, "")


# --- a terminal ---------------------------------------------------------------------------------


def on_terminal(*words: str, **variables: str) -> tuple[int, str]:
    """Exit code and all that reached a terminal, without colours and the moves of a bar."""
    child, terminal = pty.fork()
    if not child:
        os.environ.update({"TERM": "xterm", "COLUMNS": "100", **variables})
        os.execv(sys.executable, [sys.executable, "-m", "clearhead", *words])
    shown = b""
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:
            break
        if not data:
            break
        shown += data
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(terminal)
    text = shown.decode().replace("\r\n", "\n")
    return code, re.sub(r"\x1b\[(\?25[hl]|[0-9;]*m|2K|1A)|\r", "", text)


@pytest.mark.slow
def test_no_name_and_no_metadata_steers_a_terminal(home: Path) -> None:
    assert cli.main(["scan", "tale.txt", "--limit", "1", "--out", "t.heads"]) == 0
    table = pq.read_table("t.heads")
    about = json.loads(table.schema.metadata[b"clearhead"])
    for name, changes in {
        "odd": {"model": f"m{ODD}", "corpus": f"c{ODD}"}, "version": {"version": f"v{ODD}"},
    }.items():  # fmt: skip
        odd = {"clearhead": json.dumps({**about, **changes})}
        pq.write_table(table.replace_schema_metadata(odd), name)
    out = f"o{ODD}"
    cases = {
        ("heads", "odd"): (0, "owned"), ("heads", "version"): (2, "owned"),
        ("scan", "tale.txt", "--limit", "1", "--out", out): (0, "Wrote o"),
        ("scan", "tale.txt", "--limit", "1", "--out", out, "--wat"): (2, "--wat"),
        ("train", "tale.txt", *TINY, "--steps", "1", "--out", f"{out}2"): (0, "Wrote o"),
        ("look", ODD): (2, "owned"), ("look", "hell", ODD): (2, "owned"),
        ("mask", f"causal {ODD}"): (2, "owned"), ("generate", "h", "--model", ODD): (2, "owned"),
        ("audit", f"json:{ODD}"): (2, "owned"), ("look", "hell", "--file", ODD): (2, ""),
    }  # fmt: skip
    for words, (code, part) in cases.items():
        got, shown = on_terminal(*words)
        assert got == code, (words, shown)
        assert part in shown, (words, shown)
        assert not STEERING.findall(shown), (words, shown)
    assert {out, f"{out}2"} <= set(os.listdir())


@pytest.mark.slow
def test_text_of_a_model_steers_no_terminal_and_is_else_as_in_a_pipe(home: Path) -> None:
    odd = "ab\x1b\x07\x08\x9b\u202e\r"
    for name, characters in (("odd", odd), ("even", "ab \n\té你م")):
        models.save(models.RNN(models.Characters(characters), layers=1, width=8), name)
        for words in (["--seed", "3"], ["--seed", "4", "--temperature", "9"]):
            line = ("generate", "ab", "--model", name, "--tokens", "60", *words)
            code, shown = on_terminal(*line)
            piped = subprocess.run(
                [sys.executable, "-m", "clearhead", *line], capture_output=True, check=True
            ).stdout.decode()
            assert code == 0
            assert not STEERING.findall(shown)
            assert shown == visible(piped).replace("\r", "")
            assert (shown == piped) == (name == "even")


def test_the_sample_of_a_training_steers_no_terminal(home: Path) -> None:
    Path("odd.txt").write_text("ab\x1b[2J\x07\x9d" * 40, encoding="utf-8")
    code, shown = on_terminal("train", "odd.txt", *TINY, "--steps", "1")
    assert code == 0
    assert "A sample:\nab␛[2" in shown
    assert not STEERING.findall(shown)


def test_what_is_visible() -> None:
    assert visible("a\tb\nc\u200d é 你 🏳️‍🌈") == "a\tb\nc\u200d é 你 🏳️‍🌈"
    assert visible(ODD) == "␛]2;owned␇␛[31m␛[6n␡<U+0085><U+009B><U+202D><U+2067>x"
    assert visible("\udc80") == "<U+DC80>"
    # The isolates of a label close, and hold a right-to-left text; others do not pass.
    hebrew = "\u05e9\u05dc\u05d5\u05dd"
    assert visible(f"1 {label(hebrew)} 2") == f"1 \u2068{hebrew}\u2069 2"
    for text in ("\u2068a\u2069", f"\u2068{hebrew}", f"\u2067{hebrew}\u2069", f"{hebrew}\u2069"):
        assert not STEERING.findall(visible(text))
    for character in map(chr, range(0x110000 - 1)):
        assert not STEERING.findall(visible(character))


@pytest.mark.parametrize("size", ["0", "00", "-3", "", "x"])
def test_a_size_that_is_none_hides_nothing(size: str, monkeypatch: Any, capsys: Any) -> None:
    for words in (["mask", "causal", "-q", "5"], ["look", "hell"], ["info"]):
        monkeypatch.delenv("COLUMNS", raising=False)
        assert cli.main(words) == 0
        whole = capsys.readouterr().out
        monkeypatch.setenv("COLUMNS", size)
        monkeypatch.setenv("LINES", size)
        assert cli.main(words) == 0
        assert capsys.readouterr().out == whole
        monkeypatch.delenv("LINES")


# --- exit codes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["KeyError", "GeneratorExit", "BaseException"])
def test_no_fault_is_a_finding(error: str) -> None:
    code = f"""
import sys
from clearhead import cli
from clearhead.cli import mask
def run(arguments): raise {error}("a fault of ours")
mask.run = run
sys.argv = ["clearhead", "mask", "causal"]
raise SystemExit(cli.process())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    said = "'a fault of ours'" if error == "KeyError" else "a fault of ours"
    assert done.stderr == f"clearhead: {error}: {said}\n"


@pytest.mark.parametrize("threads", ["257", "5000", "9" * 30, "0", "-1"])
@pytest.mark.parametrize("words", [["generate", "h"], ["train", "tale.txt", "--steps", "1"]])
def test_no_more_threads_than_a_machine_has(
    home: Path, threads: str, words: list[str], capsys: Any, monkeypatch: Any
) -> None:
    import torch

    made: list[int] = []
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", made.append)
    assert cli.main([*words, "--threads", threads]) == 2
    assert "--threads: " in capsys.readouterr().err
    assert not made


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["scan", "tale.txt", "--out", "x", "--field", "body"], "--field"),
        (["scan", "lines.jsonl", "--out", "x", "--by", "paragraph"], "--by"),
        (["generate", "h", "--tokens", "1", "--greedy", "--seed", "5"], "--seed"),
        (["audit", "--documents", "0,0,1", "--length", "5"], "--length"),
        (["train", "--resume", "d", "--steps", "2", "--force"], "--force"),
    ],
)
def test_an_option_that_is_not_used_is_named(
    home: Path, words: list[str], option: str, capsys: Any
) -> None:
    Path("lines.jsonl").write_text('{"text": "hell"}\n')
    assert cli.main(["train", "tale.txt", *TINY, "--steps", "1", "--out", "d"]) == 0
    capsys.readouterr()
    cli.main(words)
    assert option in capsys.readouterr().err
