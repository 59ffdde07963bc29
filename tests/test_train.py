"""The training loop and `clearhead train`: it learns, stops, goes on, and loses nothing."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import pty
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from clearhead import models
from clearhead.cli import main
from clearhead.models import BERT, GPT, RNN, Characters, checkpoint
from clearhead.models.train import Settings, Training, resume, text_training

TEXT = "".join(f"{a} said hello to {b}.\n" for a, b in itertools.permutations(["nell", "bell"]))
TEXT = (TEXT + "a yellow shell fell in the well; help! he held it.\n") * 12
TINY = ["--layers", "1", "--width", "16", "--length", "16", "--batch", "4"]
KINDS = {"gpt": GPT, "bert": BERT, "rnn": RNN}


def training(kind, text=TEXT, *, width=16, **settings):
    torch.manual_seed(1)
    heads = {} if kind is RNN else {"heads": 2}
    letters = Characters.of(text, kind.special)
    model = kind(letters, layers=1, width=width, length=16, **heads)
    return text_training(model, text, Settings(**{"batch": 4, "validate_every": 3, **settings}))


def last(steps) -> float:
    """The validation loss at the end of a run."""
    *_, step = steps
    assert step.validation is not None
    return step.validation


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tale.txt").write_text(TEXT)
    return "tale.txt"


# --- it learns ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS.values())
def test_the_loss_begins_at_chance_and_falls(kind):
    steps = list(training(kind, steps=60, learning_rate=1e-2, validate_every=60))
    chance = math.log(len(Characters.of(TEXT, kind.special)))
    assert steps[0].loss == pytest.approx(chance, abs=0.3)
    assert last(steps) < chance - 0.5


@pytest.mark.parametrize("kind", [GPT, RNN])
def test_a_text_without_surprise_is_learned_to_zero(kind):
    # Each letter is followed by one other, always: a perfect guess is possible.
    run = training(kind, "abcdefg" * 40, steps=100, learning_rate=2e-2, validate_every=100)
    assert last(run) < 0.05  # log(7) = 1.95 is chance


def test_bert_fills_gaps_from_both_sides():
    # The letter in the middle repeats the one before and the one after it.
    text = "aaabbbcccddd" * 30
    run = training(BERT, text, width=32, steps=200, learning_rate=1e-2, validate_every=200, batch=8)
    assert last(run) < 1.0  # log(4) = 1.39 is chance
    model, letters = run.model.eval(), run.model.vocabulary
    guess = model(letters.encode("aaab[MASK]bcccd")[None])[0, 4].argmax()
    assert letters.decode([guess]) == "b"


def test_any_stream_of_tokens_can_be_trained_on():
    # Recall: say the token that stood two positions before.
    def batches(number):
        tokens = torch.randint(5, (8, 12), generator=torch.Generator().manual_seed(number))
        targets = tokens.roll(2, dims=1)
        targets[:, :2] = -100
        return tokens, targets, None

    torch.manual_seed(0)
    model = GPT(5, layers=2, heads=2, width=32, length=12, dropout=0.0)
    run = Training(model, batches, Settings(steps=250, learning_rate=1e-2))
    assert list(run)[-1].loss < 0.5  # log(5) = 1.61 is chance
    assert run.validate() is None


def test_the_learning_rate_rises_and_falls():
    settings = Settings(steps=1000, learning_rate=1.0)
    rates = [settings.learning_rate_at(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[99] == rates[100] == 1.0
    # Half way down the cosine is the middle between 1 and 0.1.
    assert rates[550] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1, abs=1e-4)
    assert rates[:100] == sorted(rates[:100])
    assert rates[100:] == sorted(rates[100:], reverse=True)


def test_a_run_is_repeatable_and_a_seed_changes_it():
    first, again, other = (
        [step.loss for step in training(GPT, steps=4, seed=seed)] for seed in (1, 1, 2)
    )
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_training_leaves_the_random_state_alone():
    run = training(GPT, steps=3)
    before = torch.get_rng_state()
    list(run)
    assert torch.equal(before, torch.get_rng_state())


def test_the_validation_text_is_never_trained_on():
    text = "ab" * 108 + "c" * 24
    run = training(GPT, text=text, steps=1)
    seen = torch.cat([run.batches(number)[0].flatten() for number in range(50)])
    c = run.model.vocabulary.number["c"]
    assert not (seen == c).any()
    assert all((batch[1] == c).all() for batch in run.validation)


# --- it stops and goes on -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("stop", [1, 5])
def test_a_resumed_run_has_the_same_losses(kind, stop, tmp_path):
    whole = training(kind, steps=8, seed=7)
    expected = list(whole)
    part = training(kind, steps=8, seed=7)
    for step in part:
        if step.number == stop:
            break
    part.save(tmp_path)
    torch.manual_seed(99)
    later = resume(tmp_path, TEXT)
    assert list(later) == expected[stop:]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, later.model.state_dict()[name])


def test_saving_changes_nothing(tmp_path):
    quiet, saving = training(GPT, steps=4), training(GPT, steps=4)
    for one, other in zip(quiet, saving, strict=True):
        saving.save(tmp_path)
        assert one == other


def test_more_steps_make_a_finished_run_longer(tmp_path):
    run = training(GPT, steps=3)
    list(run)
    run.save(tmp_path)
    with pytest.raises(ValueError, match=r"all 3 steps are done(.|\n)*--steps 6"):
        resume(tmp_path, TEXT)
    assert [step.number for step in resume(tmp_path, TEXT, steps=5)] == [4, 5]


def test_another_text_is_refused(tmp_path):
    training(GPT, steps=3).save(tmp_path)
    with pytest.raises(ValueError, match="is not the text that this training began with"):
        resume(tmp_path, TEXT + "!")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, h: t.pop("adamw.0.exp_avg"), "the state of the training lacks 'adamw.0.exp_avg"),
        (lambda t, h: t.update({"adamw.1.exp_avg": torch.ones(3)}), "adamw.1 does not fit"),
        (lambda t, h: t.pop("model.norm.bias"), "lacks the tensors norm.bias"),
        (lambda t, h: h.pop("training"), "the state of the training is damaged"),
        (lambda t, h: h["training"].pop("step"), "is damaged"),
        (lambda t, h: h["training"].update(step=-1), "is damaged"),
        (lambda t, h: h["training"].update(steps="many"), "is damaged"),
        (lambda t, h: h["training"].update(colour="red"), "is damaged"),
        (lambda t, h: h.update(training=3), "is damaged"),
        (lambda t, h: h.update(version=7), "version 7"),
    ],
)
def test_a_damaged_state_is_refused(tmp_path, change, words):
    run = training(GPT, steps=3)
    run.advance()
    run.save(tmp_path)
    tensors, header = checkpoint.read(tmp_path / "training.safetensors")
    change(tensors, header)
    metadata = {"clearhead": json.dumps(header)}
    save_file(tensors, tmp_path / "training.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match=words):
        resume(tmp_path, TEXT)


def test_nothing_is_pickled(tmp_path):
    run = training(GPT, steps=3)
    run.advance()
    run.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "training.safetensors"]
    with safe_open(tmp_path / "training.safetensors", framework="pt") as handle:
        header = json.loads(handle.metadata()["clearhead"])
    assert header["training"]["step"] == 1


# --- bad settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(steps=0), "steps: needs"),
        (dict(steps=-5), "steps: needs"),
        (dict(steps=2.5), "steps: needs"),
        (dict(batch=0), "batch: needs"),
        (dict(validate_every=0), "validate_every: needs"),
        (dict(learning_rate=0.0), "learning_rate: needs to be a number above 0"),
        (dict(learning_rate=math.nan), "learning_rate: needs"),
        (dict(learning_rate=math.inf), "learning_rate: needs"),
        (dict(clip=-1.0), "clip: needs"),
        (dict(weight_decay=-1.0), "weight_decay: needs"),
        (dict(seed=-1), "seed: needs"),
        (dict(seed=2**31), "seed: needs"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Settings(**settings)


def test_a_text_shorter_than_two_windows_is_refused():
    assert training(GPT, text="ab" * 17, steps=1)
    with pytest.raises(ValueError, match="a length of 16 needs 34 characters; got 33"):
        training(GPT, text="ab" * 16 + "a", steps=1)


def test_a_loss_that_is_no_number_stops_the_run():
    run = training(GPT, steps=9)
    with torch.no_grad():
        run.model.head.weight.fill_(math.inf)
    with pytest.raises(ValueError, match=r"the loss is nan at step 1(.|\n)*smaller"):
        run.advance()


# --- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt", "bert", "rnn"])
def test_the_command_trains_each_model(kind, file, capsys):
    heads = [] if kind == "rnn" else ["--heads", "2"]
    assert main(["train", file, "--model", kind, "--steps", "3", *TINY, *heads]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"Wrote tale-{kind}"
    assert ("Gaps, and" if kind == "bert" else "A sample:\n" + TEXT[:5]) in out
    assert "step 3/3  loss " in err
    assert "validation" in err
    assert models.load(f"tale-{kind}").config["width"] == 16


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_the_command_monitors_the_heads(kind, file, capsys):
    args = ["train", file, "--model", kind, "--steps", "3", *TINY, "--heads", "2"]
    assert main([*args, "--out", "plain"]) == 0
    assert main([*args, "--out", "seen", "--monitor"]) == 0
    err = capsys.readouterr().err
    assert re.search(
        r"step 3/3 .*\n   max logit -?\d+\.\d\d \(head \d\.\d\)  min entropy \d\.\d\d \(head", err
    )
    found = load_file("seen/monitor.safetensors")
    assert found["steps"].tolist() == [0, 1, 2]
    assert found["values"].shape == (3, 1, 2, 8)
    # The bits of the model are those of a training without a monitor.
    for name, tensor in load_file("plain/model.safetensors").items():
        assert torch.equal(tensor, load_file("seen/model.safetensors")[name])
    assert main(["train", file, "--resume", "seen", "--steps", "5", "--monitor"]) == 0
    assert load_file("seen/monitor-3.safetensors")["values"].shape[0] == 2


def test_the_command_monitors_no_rnn(file, capsys):
    assert main(["train", file, "--model", "rnn", "--steps", "3", *TINY, "--monitor"]) == 2
    assert "--monitor: is for gpt and bert" in capsys.readouterr().err


def test_the_command_leaves_the_caller_as_it_was(file):
    handler, state = signal.getsignal(signal.SIGINT), torch.get_rng_state()
    main(["train", file, "--steps", "1", *TINY])
    assert signal.getsignal(signal.SIGINT) is handler
    assert torch.equal(torch.get_rng_state(), state)


def test_the_command_overwrites_only_when_it_is_told_to(file, capsys):
    short = ["train", file, "--steps", "1", *TINY]
    assert main(short) == 0
    before = Path("tale-gpt/model.safetensors").read_bytes()
    assert main([*short, "--seed", "5"]) == 2
    assert "tale-gpt holds model.safetensors already" in capsys.readouterr().err
    assert Path("tale-gpt/model.safetensors").read_bytes() == before
    assert main([*short, "--seed", "5", "--force"]) == 0
    assert Path("tale-gpt/model.safetensors").read_bytes() != before


def test_the_command_goes_on_to_the_same_model(file, capsys):
    assert main(["train", file, "--steps", "6", "--out", "whole", *TINY]) == 0
    whole = models.load("whole").state_dict()
    text = Path(file).read_text()
    torch.manual_seed(0)
    model = GPT(Characters.of(text), layers=1, width=16, length=16)
    run = text_training(model, text, Settings(steps=6, batch=4, validate_every=1))
    run.advance()
    run.advance()
    run.save("part")
    assert main(["train", file, "--resume", "part"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Wrote part"
    for name, tensor in models.load("part").state_dict().items():
        assert torch.equal(tensor, whole[name])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.txt"], "FILE: does not exist"),
        ([], "FILE: is needed"),
        (["tale.txt", "--steps", "-1"], "--steps: needs"),
        (["tale.txt", "--threads", "0"], "--threads: needs"),
        (["tale.txt", "--heads", "3"], "--heads: needs to divide width; got 3 heads, width 128"),
        (["tale.txt", "--model", "rnn", "--heads", "2"], "an rnn has no heads"),
        (["tale.txt", "--lr", "nan"], "--lr: needs"),
        (["tale.txt", "--length", "9000"], "is too short: a length of 9000 needs 18002"),
        (["tale.txt", "--width", "1" + "0" * 30, "--heads", "1"], "--width: needs"),
        (["/dev/zero"], "needs to be a text file; got the device /dev/zero"),
        (["tale.txt", "--resume", "none"], "there is no training.safetensors in none"),
        (["tale.txt", "--resume", "none", "--lr", "1", "--heads", "2"], "takes --heads, --lr from"),
        (["tale.txt", "--out", "tale.txt"], "--out: needs to be a directory"),
        (["tale.txt", "--out", "tale.txt/in"], "tale.txt"),
        (["tale.txt", "--out", "/proc/none"], "/proc/none"),
    ],
)
def test_the_command_refuses_before_it_works(file, capsys, arguments, words):
    before = sorted(os.listdir())
    assert main(["train", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "step " not in err
    assert sorted(os.listdir()) == before


def test_a_run_knows_its_text(file, capsys, monkeypatch):
    assert main(["train", file, "--steps", "2", *TINY]) == 0
    assert main(["train", file, "--steps", "4", "--out", "whole", *TINY]) == 0
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    on = ["train", "--resume", "../tale-gpt", "--steps", "4"]
    Path("../tale.txt").rename("moved.txt")
    capsys.readouterr()
    assert main(on) == 2
    assert "FILE: the text of this training is no longer there" in capsys.readouterr().err
    Path("../tale.txt").write_text(TEXT + "!")
    assert main(on) == 2
    assert "not the text that this training began with, or has changed" in capsys.readouterr().err
    # Where the text lies now is remembered from then on.
    assert main(["train", "moved.txt", *on[1:-1], "3"]) == 0
    assert main(on) == 0
    assert "A sample:\n" + TEXT[:5] in capsys.readouterr().out
    assert resume("../tale-gpt", steps=9).settings.file == str(Path("moved.txt").resolve())


def test_a_run_of_the_library_asks_for_its_text(tmp_path):
    training(GPT, steps=3).save(tmp_path)
    with pytest.raises(ValueError, match="file: is needed: this training does not know"):
        resume(tmp_path)


def test_a_small_step_takes_one_thread_and_gives_them_back(monkeypatch):
    from clearhead.models import threads

    for name in threads._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_AT_START", 2)
    run, inside = training(GPT, steps=9, validate_every=1), []
    run.model.register_forward_hook(lambda *_: inside.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        run.advance()
        assert set(inside) == {1}
        assert torch.get_num_threads() == 2
        small: Any = run.model.config
        large = {**small, "width": threads.SMALL}
        # Who was told, who is large, and a model of another make, which counts as large.
        for told, config, expected in (
            (2, small, 2), (1, large, 1), (None, large, 2), (None, object(), 2),
        ):  # fmt: skip
            run.threads, run.model.config = told, config
            inside.clear()
            run.advance()
            assert set(inside) == {expected}
        run.threads, run.model.config = None, small
        # Whoever sets torch's threads after the import has chosen.
        torch.set_num_threads(3)
        inside.clear()
        run.advance()
        assert set(inside) == {3}
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["gpt", "bert", "rnn"])
@pytest.mark.parametrize("size", [["--layers", "1000000000"], ["--width", "1000000"]])
def test_a_model_that_memory_cannot_hold_is_not_begun(file, capsys, kind, size):
    assert main(["train", str(file), "--model", kind, *size]) == 2
    assert "bytes" in capsys.readouterr().err


def test_a_training_that_does_not_fit_into_memory_says_what_to_make_smaller(file, capsys):
    # The places of 2 ** 30 windows are 8 GiB of numbers, as much as the whole process may have.
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**33, limits[1]))
    try:
        assert main(["train", file, "--steps", "1", *TINY, "--batch", str(2**30)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert "does not fit into memory: take a smaller --batch" in capsys.readouterr().err


def test_a_disk_that_fills_keeps_the_last_checkpoint(file, capsys, monkeypatch):
    real, calls = os.fsync, itertools.count()

    def full(handle):
        # Two files make a checkpoint: the third and later ones find no room.
        if next(calls) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main(["train", file, "--steps", "3", *TINY]) == 2
    assert "No space left on device; what was there before is untouched" in capsys.readouterr().err
    assert sorted(os.listdir("tale-gpt")) == ["model.safetensors", "training.safetensors"]
    models.load("tale-gpt")
    assert resume("tale-gpt", TEXT).step == 1


def started(*arguments, **options):
    command = [sys.executable, "-m", "clearhead", "train", "tale.txt", *TINY, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, text=True, **options)


def test_ctrl_c_saves_and_says_how_to_go_on(file):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started("--steps", "1000000", **pipes) as process:
        # The first line comes when the loop is about to start; then any moment will do.
        assert process.stderr is not None
        assert "parameters" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopping after this step" in err
    assert "Traceback" not in err
    assert "To go on: clearhead train --resume tale-gpt" in out
    assert out.splitlines()[-1] == "Wrote tale-gpt"
    done = resume("tale-gpt", TEXT).step
    assert done >= 1
    assert f"Stopped after step {done} of 1000000." in out


@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_gets_a_bar(file, colour):
    parent, child = pty.openpty()
    variables = {"TERM": "xterm-256color", "COLUMNS": "80"} | ({} if colour else {"NO_COLOR": "1"})
    code = f"import os; os.environ.update({variables!r}); from clearhead.cli import main; "
    code += f"raise SystemExit(main(['train', 'tale.txt', '--steps', '2', *{TINY!r}]))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=child, stderr=child)
    os.close(child)
    shown = b""
    while True:
        try:
            data = os.read(parent, 4096)
        except OSError:
            break
        if not data:
            break
        shown += data
    os.close(parent)
    assert process.wait() == 0
    text = shown.decode()
    assert "2/2" in text
    assert "loss" in text
    assert "validation" in text
    assert ("\x1b[38;" in text or "\x1b[32m" in text or "\x1b[3" in text) == colour
    assert text.splitlines()[-1] == "Wrote tale-gpt"
