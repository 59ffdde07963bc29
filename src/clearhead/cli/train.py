"""`clearhead train FILE`: train a small model on a text, stop at any time, go on later."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead._core import StopRequests, value_error
from clearhead.cli.arguments import examples, named, note

if TYPE_CHECKING:
    from clearhead.models import Training
    from clearhead.monitoring import Monitor

NOTES = """\
how long: a bert on the text that ships with clearhead (36 kB) predicts hidden
characters better than their frequencies (3.01 nats) after 60 steps, and is at
2.0 nats after the 600 steps of the default. Ctrl-C and SIGTERM save; so does
every --every'th second, and every validation.
"""
HELP = "train a small GPT, BERT or RNN on a text file"
INTERRUPTED = 130  # as a shell gives it for a command that Ctrl-C ended
STOPPING = "\nStopping after this step ...\n"


_NUMBERS = {
    "steps": "how many steps (600)",
    "batch": "windows of text in a step (16)",
    "length": "characters in a window (128)",
    "layers": "layers (4; rnn 2)",
    "heads": "heads in a layer (4)",
    "width": "features a position (128; rnn 256)",
    "seed": "makes a run repeatable (0)",
    "threads": "threads to use (1 for a small model)",
}
_FLOATS = (
    ("dropout", "SHARE", "share that is dropped in training (0.1)"),
    ("lr", "RATE", "largest learning rate (0.003)"),
    ("every", "SECONDS", "between checkpoints (30)"),
)
_FLAGS = {
    "force": "overwrite a model in --out",
    "monitor": "read every head at every step: a line of it is shown, DIR has the history",
}
# What the library calls the arguments.
_OPTIONS = {
    **{name: f"--{name}" for name in (*_NUMBERS, "dropout", "resume", "out")},
    **{"file": "FILE", "learning_rate": "--lr", "model": "--resume"},
    "width, layers": "--width, --layers",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. What --resume takes from the checkpoint has no default here."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="a text in UTF-8")
    parser.add_argument("--model", choices=("gpt", "bert", "rnn"), help="which model (gpt)")
    parser.add_argument("--out", metavar="DIR", help="where the model goes (FILE-MODEL)")
    for name, words in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=words)
    for name, metavar, words in _FLOATS:
        parser.add_argument(f"--{name}", type=float, metavar=metavar, help=words)
    parser.add_argument("--resume", metavar="DIR", help="go on with a training that was stopped")
    for name, words in _FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=words)
    examples(
        parser,
        "clearhead train tale.txt",
        "clearhead train tale.txt --model bert --steps 2000 --out tale-bert",
        "clearhead train --resume tale-gpt --steps 1200",
        notes=NOTES,
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, save at every validation and at the end, show a sample."""
    from clearhead.models import training_fits

    with (
        named(**_OPTIONS, monitored="--monitor"),
        training_fits("take a smaller --batch, --length, --width or --layers"),
    ):
        return _train(arguments)


def _train(arguments: argparse.Namespace) -> int:
    from clearhead.models import output_directory, run_and_save, samples
    from clearhead.views import train_progress, training_end

    with StopRequests(STOPPING) as stop, ExitStack() as held:
        out = _resumed_directory(arguments)
        if out is not None and out.is_dir():
            # Locked before its state is read: another training may be writing it.
            held.enter_context(output_directory(out, overwrite=True))
        text = _text(arguments)
        training = _resumed(arguments, text) if arguments.resume else _fresh(arguments, text)
        if out is None:
            source = Path(training.settings.file)
            out = Path(arguments.out or f"{source.stem}-{training.model.name}").expanduser()
            options = {"overwrite": arguments.force, "source": source}
            held.enter_context(output_directory(out, **options))
        monitor = held.enter_context(_monitored(training, out)) if arguments.monitor else None
        with stop.deferred(), train_progress(training, monitor) as show:
            run_and_save(training, out, stop, show, every=arguments.every)
        done = training.step == training.settings.steps
        found = samples(training.model, text) if done else {}
        print(*training_end(training, out, found), sep="\n")
        return 0 if done else INTERRUPTED


def _monitored(training: Training, out: Path) -> AbstractContextManager[Monitor]:
    from clearhead.monitoring import recorded

    if training.model.name == "rnn":
        raise value_error("--monitor", "is for gpt and bert: an rnn has no attention")
    return recorded(training.model, out, training.step, training.settings.steps)


def _resumed_directory(arguments: argparse.Namespace) -> Path | None:
    """The directory that is resumed and written, unless --out names another one."""
    if not (arguments.every or 0) >= 0:
        raise value_error("--every", "must be a number of seconds", got=arguments.every)
    if arguments.resume is None or arguments.out is not None:
        return None
    if arguments.force:
        note("--force has no use: --resume writes its own directory, unless --out names another")
    return Path(arguments.resume).expanduser()


def _text(arguments: argparse.Namespace) -> str:
    from clearhead.models import read_text, text_of

    if arguments.file is not None:
        return read_text(arguments.file)
    if arguments.resume is None:
        raise value_error("FILE", "is needed", hint="name a text, or --resume DIR to go on")
    return text_of(arguments.resume)


def _fresh(arguments: argparse.Namespace, text: str) -> Training:
    from clearhead.models import begin

    name = arguments.model or "gpt"
    if name == "rnn" and arguments.heads is not None:
        raise value_error("--heads", "is for gpt and bert: an rnn has no heads")
    sizes = _given(arguments, "length", "layers", "heads", "width", "dropout")
    settings = _given(arguments, "steps", "batch", "lr", "seed")
    return begin(name, text, arguments.file, settings, sizes, threads=arguments.threads)


def _resumed(arguments: argparse.Namespace, text: str) -> Training:
    from clearhead.models import resume

    sizes = _given(arguments, "model", "batch", "length", "layers", "heads", "width", "dropout")
    if fixed := {**sizes, **_given(arguments, "lr", "seed")}:
        names = ", ".join(f"--{name}" for name in fixed)
        raise value_error("--resume", f"takes {names} from the checkpoint", hint="leave them out")
    training = resume(arguments.resume, text, steps=arguments.steps, threads=arguments.threads)
    if arguments.file is not None:
        training.settings = training.settings.reading(arguments.file)
    return training


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    found = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}
