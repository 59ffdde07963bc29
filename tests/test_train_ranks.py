"""One training by several processes: the losses of one, shards, other numbers of processes."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F

from clearhead import models
from clearhead.cli.options.torchrun import resuming
from clearhead.cli.options.train import add_arguments
from clearhead.models import BERT, GPT, RNN, Characters, Group
from clearhead.models.ranks.dropout import RowsOfDropout
from clearhead.models.train import Settings, Training, resume, text_training
from tests.ranks import LOST, SHORT, Failure, Ranks

TEXT = "".join(f"{a} said hello to {b}.\n" for a in ("nell", "bell") for b in ("jim", "tim")) * 13
KINDS = {"gpt": GPT, "bert": BERT, "rnn": RNN}
# Losses of a few nats in float32, whose sums over rows are taken in another order, after as many
# steps as a test makes: each step's gradient has a relative error of some eps.
CLOSE: Any = {"rtol": 2e-5, "atol": 0.0}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(tmp_path_factory.mktemp("ranks") / "group", world=4)
    yield pool
    pool.close()


def answers(found: list[Any]) -> list[Any]:
    for answer in found:
        assert not isinstance(answer, Failure), answer
    return found


def training(kind: str, group: Group | None = None, **settings: Any) -> Training:
    """A run with dropout, whose batch three processes cannot split evenly."""
    torch.manual_seed(1)
    of = KINDS[kind]
    sizes: dict[str, Any] = {"layers": 1} if kind == "rnn" else {"layers": 2, "heads": 2}
    model = of(Characters.of(TEXT, of.special), width=16, length=16, dropout=0.2, **sizes)
    given = Settings(**{"batch": 5, "steps": 8, "validate_every": 4, **settings})
    return text_training(model, TEXT, given, group=group or Group())


def group_of(of: Any) -> Group:
    """This process in a group of the tests."""
    return Group(torch.distributed.get_rank(of), torch.distributed.get_world_size(of), of)


def trained(of: Any, kind: str, path: str, stop: int) -> Any:
    """The losses of a process up to a step, after which the state is saved."""
    run = training(kind, group_of(of))
    found = [(x.loss, x.validation) for _, x in zip(range(stop), run, strict=False)]
    run.save(path)
    return found


def resumed(of: Any, path: str) -> Any:
    """The losses of a process that goes on."""
    run = resume(path, TEXT, group=group_of(of))
    found = [(x.loss, x.validation) for x in run]
    run.save(path)
    return found


def check_close(found: Any, right: Any) -> None:
    for (loss, validation), (of_one, validated) in zip(found, right, strict=True):
        torch.testing.assert_close(loss, of_one, **CLOSE)
        assert (validation is None) == (validated is None)
        torch.testing.assert_close(validation or 0.0, validated or 0.0, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_are_those_of_one_process(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    right = [(x.loss, x.validation) for x in training(kind)]
    each = answers(ranks.run(trained, 3, kind, str(tmp_path), 3))
    assert all(found == each[0] for found in each)
    check_close(each[0], right[:3])
    # Other numbers of processes go on, and one at last.
    found = answers(ranks.run(resumed, 2, str(tmp_path)))
    check_close(found[0], right[3:])
    with pytest.raises(ValueError, match="all 8 steps are done"):
        resume(tmp_path, TEXT)
    more = [x.loss for x in resume(tmp_path, TEXT, steps=9)]
    torch.testing.assert_close(more, [x.loss for x in again(kind, 9)], **CLOSE)


def again(kind: str, steps: int) -> list[Any]:
    """The last step of a run in one process that was made longer after eight."""
    run = training(kind)
    list(run)
    run.settings = training(kind, steps=steps).settings
    return list(run)


@pytest.mark.slow
def test_shards_hold_numbers_and_json(ranks: Ranks, tmp_path: Path) -> None:
    training("gpt").save(tmp_path)
    assert {x.name for x in tmp_path.iterdir()} == {"model.safetensors", "training.safetensors"}
    answers(ranks.run(trained, 3, "gpt", str(tmp_path), 1))
    model, folder, header = sorted(tmp_path.iterdir())
    assert (model.name, header.name) == ("model.safetensors", "training.json")
    files = sorted(folder.iterdir())
    assert [x.suffix for x in files] == [".safetensors"] * 3
    sizes = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            sizes.append(sum(opened.get_tensor(name).nbytes for name in opened.keys()))  # noqa: SIM118
    state = training("gpt")
    next(iter(state))
    whole = 3 * sum(x.nbytes for x in state.model.parameters())
    steps = 4 * len(list(state.model.parameters()))
    assert sum(sizes) == whole + steps
    assert max(sizes) < 0.45 * whole  # a third each, in whole tensors
    found = resume(tmp_path, TEXT)
    for one, other in zip(
        found.model.parameters(), models.load(tmp_path).parameters(), strict=True
    ):
        assert torch.equal(one, other)
    found.save(tmp_path)
    assert {x.name for x in tmp_path.iterdir()} == {"model.safetensors", "training.safetensors"}


@pytest.mark.slow
def test_damaged_shards_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    answers(ranks.run(trained, 2, "gpt", str(tmp_path), 1))
    header, folder = tmp_path / "training.json", next(x for x in tmp_path.iterdir() if x.is_dir())
    text, file = header.read_text(), sorted(folder.iterdir())[1]
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    with pytest.raises(ValueError, match=r"resume: has its 2 shards of the state.*cut short"):
        resume(tmp_path, TEXT)
    file.write_bytes(b"\xff" * len(data))
    with pytest.raises(ValueError, match="the state of the training is damaged"):
        resume(tmp_path, TEXT)
    file.unlink()
    with pytest.raises(ValueError, match=r"has its 2 shards of the state.*not there"):
        resume(tmp_path, TEXT)
    for wrong, words in (("{", "damaged"), ("[]", "version None"), (
            text.replace(f'"{folder.name}"', '"../elsewhere"'), "leads elsewhere")):  # fmt: skip
        header.write_text(wrong)
        with pytest.raises(ValueError, match=words):
            resume(tmp_path, TEXT)


def refused(of: Any, path: str) -> str:
    """What a process hears of a batch that is too small."""
    run = training("gpt", group_of(of), batch=2)
    try:
        run.advance()
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_a_batch_has_a_row_for_each_process(ranks: Ranks, tmp_path: Path) -> None:
    for said in answers(ranks.run(refused, 3, str(tmp_path))):
        assert said.startswith("batch: has a row for each of 3 processes; got 2")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_rows_of_dropout_are_those_of_the_whole(turned: bool, inplace: bool) -> None:
    whole = torch.rand(5, 3, 4) + 1
    whole = whole.transpose(0, 1).contiguous().transpose(0, 1) if turned else whole
    torch.manual_seed(3)
    right = F.dropout(whole, 0.5)
    for rows in (slice(0, 2), slice(2, 5), slice(4, 5)):
        torch.manual_seed(3)
        mine = whole[rows].clone()
        if turned:  # as an operation makes it of fewer rows
            mine = mine.transpose(0, 1).contiguous().transpose(0, 1)
        with RowsOfDropout(rows, 5):
            assert torch.equal(nn.Dropout(0.5, inplace)(mine), right[rows])
            assert torch.equal(F.dropout(whole[rows], 0.5, training=False), whole[rows])
    assert (right == 0).any()


def test_processes_that_torchrun_starts_again_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args(["tale.txt", "--model", "bert", "--batch", "8", "--monitor"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert resuming(given) is given  # nothing was saved before the loss
    (tmp_path / "tale-bert").mkdir()
    (tmp_path / "tale-bert" / "training.json").touch()
    found = resuming(given)
    assert (found.resume, found.file, found.monitor) == ("tale-bert", "tale.txt", True)
    assert found.batch is found.model is found.out is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert resuming(given) is given


def stalling(of: Any, lost: int) -> tuple[str, float]:
    """The error of a process, and how long it took, where another one stalls in the second step."""
    run = training("gpt", group_of(of))
    run.advance()
    if torch.distributed.get_rank(of) == lost:
        time.sleep(SHORT + 2)
    started = time.monotonic()
    try:
        run.advance()
        return "no error", 0.0
    except RuntimeError as error:
        return str(error), time.monotonic() - started


@pytest.mark.slow
def test_a_process_that_stalls_is_named_with_the_step(ranks: Ranks) -> None:
    for rank, (said, seconds) in zip(
        LOST["stalls"], answers(ranks.run(stalling, "stalls", 2)), strict=True
    ):
        if rank != 2:
            assert said.startswith("rank 2 did not answer in step 2 of the training: it has ended")
            assert seconds < SHORT + 4


def process_of(run: subprocess.Popen, rank: int) -> int:
    """The process of a rank among those that torchrun has started."""
    for child in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_is_killed_ends_the_others_at_once(tmp_path: Path, lost: int) -> None:
    (tmp_path / "tale.txt").write_text(TEXT)
    command = [*TORCHRUN, "clearhead", "train", "tale.txt", "--out", "out", "--every", "0", *TINY]
    command[command.index("2")] = "3"
    with open(tmp_path / "log", "w+", encoding="utf-8") as log:
        run = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        try:
            for _ in range(600):
                if (tmp_path / "out" / "training.json").exists() or run.poll() is not None:
                    break
                signal.sigtimedwait([], 0.2)
            os.kill(process_of(run, lost), signal.SIGKILL)
            # torchrun kills what has not ended 30 seconds after it was asked to.
            assert run.wait(timeout=25) == 1
        finally:
            run.kill()
        log.seek(0)
        said = log.read()
    named = f"clearhead train: rank {lost} did not answer in (step|the checkpoint of step) "
    assert len(re.findall("clearhead train: ", said)) == len(re.findall(named, said)) == 2, said
    # What was saved before is whole.
    assert resume(tmp_path / "out").step > 0


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--"]
TINY = ["--layers", "1", "--width", "16", "--length", "16", "--batch", "4", "--steps", "100000"]


@pytest.mark.slow
def test_the_command_under_torchrun_saves_when_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "tale.txt").write_text(TEXT)
    options: Any = {
        "cwd": tmp_path,
        "text": True,
        "stderr": subprocess.PIPE,
        "stdout": subprocess.PIPE,
    }
    command = [*TORCHRUN, "clearhead", "train", "tale.txt", "--out", "out", "--every", "0", *TINY]
    run = subprocess.Popen(command, **options)
    header = tmp_path / "out" / "training.json"
    try:
        for _ in range(600):
            if header.exists() or run.poll() is not None:
                break
            signal.sigtimedwait([], 0.2)
        run.send_signal(signal.SIGTERM)
        out, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert header.exists(), errors
    assert out.count("Stopped after step") == 1  # by the first process alone
    assert "Traceback" not in errors.split("torch/distributed/elastic")[0]
    done = resume(tmp_path / "out").step
    assert f"Stopped after step {done} of 100000" in out
    command = [
        sys.executable,
        "-m",
        "clearhead",
        "train",
        "--resume",
        "out",
        "--steps",
        str(done + 2),
    ]
    again = subprocess.run(command, **options, timeout=60, env=os.environ)
    assert again.returncode == 0, again.stderr
    assert not header.exists()
    # The first process refuses, and no other waits for it.
    command = [*TORCHRUN, "clearhead", "train", "tale.txt", "--out", "out", *TINY]
    refused = subprocess.run(command, **options, timeout=60)
    assert refused.returncode != 0
    assert refused.stderr.count("clearhead train: --out: out holds model.safetensors already") == 1
