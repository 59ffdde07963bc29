"""`clearhead train FILE`: train a small model on a text, stop at any time, go on later."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead._core import value_error
from clearhead.cli.arguments import examples, named

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.models.train import Step, Training

HELP = "train a small GPT, BERT or RNN on a text file"
INTERRUPTED = 130  # as a shell gives it for a command that Ctrl-C ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. What --resume takes from the checkpoint has no default here."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="a text in UTF-8")
    parser.add_argument("--model", choices=("gpt", "bert", "rnn"), help="which model (gpt)")
    parser.add_argument("--out", metavar="DIR", help="where the model goes (FILE-MODEL)")
    parser.add_argument("--steps", type=int, metavar="N", help="how many steps (600)")
    parser.add_argument("--batch", type=int, metavar="N", help="windows of text in a step (16)")
    parser.add_argument("--length", type=int, metavar="N", help="characters in a window (128)")
    parser.add_argument("--layers", type=int, metavar="N", help="layers (4; rnn 2)")
    parser.add_argument("--heads", type=int, metavar="N", help="heads in a layer (4)")
    parser.add_argument("--width", type=int, metavar="N", help="features a position (128; rnn 256)")
    parser.add_argument(
        "--dropout", type=float, metavar="SHARE", help="share that is dropped in training (0.1)"
    )
    parser.add_argument("--lr", type=float, metavar="RATE", help="largest learning rate (0.003)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes a run repeatable (0)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads to use (1 for a small model)"
    )
    parser.add_argument("--resume", metavar="DIR", help="go on with a training that was stopped")
    parser.add_argument("--force", action="store_true", help="overwrite a model in --out")
    examples(
        parser,
        "clearhead train tale.txt",
        "clearhead train tale.txt --model bert --steps 2000 --out tale-bert",
        "clearhead train --resume tale-gpt --steps 1200",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, save at every validation and at the end, show a sample."""
    try:
        with named(**_OPTIONS):
            return _train(arguments)
    except RuntimeError as error:
        # torch has no error of its own for this on the CPU.
        if "can't allocate memory" not in str(error):
            raise
        advice = "take a smaller --batch, --length, --width or fewer --layers"
        raise MemoryError(f"the training does not fit into memory: {advice}") from None


# What the library calls the arguments.
_OPTIONS = {"file": "FILE", "learning_rate": "--lr", "model": "--resume"} | {
    name: f"--{name}"
    for name in ("steps", "batch", "length", "layers", "heads", "width", "dropout", "seed",
                 "threads", "resume")
}  # fmt: skip


def _train(arguments: argparse.Namespace) -> int:
    text = _text(arguments)
    training = _resumed(arguments, text) if arguments.resume else _fresh(arguments, text)
    out = _prepared(arguments, training)
    with _stop_signal() as stopped, _display(training) as show:
        for step in training:
            show(step)
            if step.validation is not None or stopped:
                training.save(out)
            if stopped:
                break
    if training.step < training.settings.steps:
        print(f"Stopped after step {training.step} of {training.settings.steps}.")
        print(f"To go on: clearhead train --resume {shlex.quote(str(out))}")
    else:
        print(_sample(training.model, text))
    print(f"Wrote {out}")
    return 0 if training.step == training.settings.steps else INTERRUPTED


def _fresh(arguments: argparse.Namespace, text: str) -> Training:
    import torch

    from clearhead.models import BERT, GPT, RNN, Characters
    from clearhead.models.train import Settings, text_training

    kind = {"gpt": GPT, "bert": BERT, "rnn": RNN}[arguments.model or "gpt"]
    if kind is RNN and arguments.heads is not None:
        raise value_error("--heads", "is for gpt and bert: an rnn has no heads")
    sizes = _given(arguments, "length", "layers", "heads", "width", "dropout")
    settings = Settings(**_settings(arguments), file=_whole(arguments.file))
    vocabulary = Characters.of(text, kind.special)
    _must_fit(kind, vocabulary, sizes)
    # A seed gives the same weights, and the caller's random state is left alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = kind(vocabulary, **sizes)
    return text_training(model, text, settings, threads=arguments.threads)


def _text(arguments: argparse.Namespace) -> str:
    from clearhead.models import read_text
    from clearhead.models.train import text_of

    if arguments.file is not None:
        return read_text(arguments.file)
    if arguments.resume is None:
        raise value_error("FILE", "is needed", hint="name a text, or --resume DIR to go on")
    return text_of(arguments.resume)


def _whole(file: str) -> str:
    return str(Path(file).expanduser().resolve())


def _must_fit(kind: Any, vocabulary: Any, sizes: dict[str, Any]) -> None:
    """Refuse a model that memory cannot hold, before making it takes all of the memory."""
    import torch

    from clearhead.attention import free_bytes

    def parameters(layers: int) -> int:
        with torch.device("meta"):
            model = kind(vocabulary, **(sizes | {"layers": layers}))
        return sum(parameter.numel() for parameter in model.parameters())

    layers = sizes.get("layers", 1)
    if not 0 < layers < 2**31:
        return  # the model itself refuses this
    first = parameters(1)
    count = first + (layers - 1) * (parameters(2) - first)
    # In float32: parameter, gradient and the two averages of the optimizer.
    needed, free = 16 * count, free_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        raise value_error(
            "--width, --layers",
            "the training of the model must fit into memory",
            got=f"{count:,} parameters, {needed:,} bytes with {free:,} free",
            hint="make the model smaller",
        )


def _resumed(arguments: argparse.Namespace, text: str) -> Training:
    from clearhead.models.train import resume

    fixed = _given(arguments, "model", "batch", "length", "layers", "heads", "width", "dropout")
    if fixed or _given(arguments, "lr", "seed"):
        names = ", ".join(f"--{name}" for name in [*fixed, *_given(arguments, "lr", "seed")])
        raise value_error("--resume", f"takes {names} from the checkpoint", hint="leave them out")
    training = resume(arguments.resume, text, steps=arguments.steps, threads=arguments.threads)
    if arguments.file is not None:
        training.settings = replace(training.settings, file=_whole(arguments.file))
    return training


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    given = _given(arguments, "steps", "batch", "lr", "seed")
    if "lr" in given:
        given["learning_rate"] = given.pop("lr")
    # Twenty times in a run: often enough to watch, seldom enough to cost little.
    given["validate_every"] = min(max(given.get("steps", 600) // 20, 1), 100)
    return given


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    found = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _prepared(arguments: argparse.Namespace, training: Training) -> Path:
    """Find out before the work, and not after it, whether the result can be written."""
    from clearhead.models.checkpoint import MODEL_FILE
    from clearhead.models.train import TRAINING_FILE

    if arguments.resume and arguments.out is None:
        out = Path(arguments.resume).expanduser()
    else:
        stem = Path(training.settings.file).stem
        out = Path(arguments.out or f"{stem}-{training.model.name}")
        out = out.expanduser()
        taken = [name for name in (MODEL_FILE, TRAINING_FILE) if (out / name).exists()]
        if taken and not arguments.force:
            hint = "choose another --out, or --force to overwrite it"
            raise value_error("--out", f"{out} holds {taken[0]} already", hint=hint)
    if out.exists() and not out.is_dir():
        raise value_error("--out", "needs to be a directory", got=f"the file {out}")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):
        return out


@contextmanager
def _stop_signal() -> Iterator[list[int]]:
    """Let Ctrl-C wait for the end of a step; a second one ends the command at once."""
    stopped: list[int] = []

    def stop(number: int, frame: object) -> None:
        stopped.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nStopping after this step ...", file=sys.stderr)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _display(training: Training) -> Iterator[Callable[[Step], None]]:
    """Show a bar with loss and time left on a terminal, and plain lines in a pipe."""
    from rich.console import Console

    count = sum(parameter.numel() for parameter in training.model.parameters())
    steps = training.settings.steps
    console = Console(stderr=True, highlight=False)
    console.print(f"{training.model.name}: {count:,} parameters, {steps} steps")
    if console.is_terminal:
        with _bar(training, console) as show:
            yield show
        return

    def line(step: Step) -> None:
        if step.validation is not None:
            losses = f"loss {step.loss:.3f}  validation {step.validation:.3f}"
            console.print(f"step {step.number}/{steps}  {losses}")

    yield line


@contextmanager
def _bar(training: Training, console: Console) -> Iterator[Callable[[Step], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    losses = TextColumn("loss {task.fields[loss]}  validation {task.fields[validation]}  left")
    with Progress(MofNCompleteColumn(), BarColumn(), losses, TimeLeft(), console=console) as bar:
        steps, done = training.settings.steps, training.step
        task = bar.add_task("train", total=steps, completed=done, loss="...", validation="...")

        def show(step: Step) -> None:
            bar.update(task, completed=step.number, loss=f"{step.loss:.3f}")
            if step.validation is not None:
                bar.update(task, validation=f"{step.validation:.3f}")

        yield show


def _sample(model: Any, text: str) -> str:
    """Show what the model has learned: a text that it goes on with, or gaps that it fills."""
    import torch

    from clearhead.models import BERT, Characters, generate

    model.eval()
    if not isinstance(model, BERT):
        start = text[: model.length // 4 + 1]
        return f"A sample:\n{generate(model, start, 200, temperature=0.8)}\n"
    words = model.vocabulary
    assert isinstance(words, Characters)
    shown = words.encode(text[: min(model.length, 64)], special=False)
    hidden = shown.clone()
    hidden[3::7] = words.number["[MASK]"]
    with torch.no_grad():
        guessed = model(hidden[None])[0, :, len(words.special) :].argmax(-1) + len(words.special)
    filled = hidden.where(hidden != words.number["[MASK]"], guessed)
    # One sign a gap, so that the two lines stand under each other.
    gaps = words.decode(hidden).replace("[MASK]", "_")
    return f"Gaps, and what the model puts there:\n{gaps!r}\n{words.decode(filled)!r}\n"
