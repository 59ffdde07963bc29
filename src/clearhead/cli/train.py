"""`clearhead train FILE`: train a small model on a text, stop at any time, go on later."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead._core import StopRequests, value_error
from clearhead.cli.arguments import named, note
from clearhead.cli.options.torchrun import of_torchrun, out_of, resuming
from clearhead.cli.options.train import NUMBERS, add_arguments

__all__ = ["HELP", "add_arguments", "run"]

if TYPE_CHECKING:
    from clearhead.models import Group, Step, Training
    from clearhead.monitoring import Monitor

HELP = "train a small GPT, BERT or RNN on a text file"
MISUSE = 2
INTERRUPTED = 130  # as a shell gives it for a command that Ctrl-C ended
STOPPING = "\nStopping after this step ...\n"
# What the library calls the arguments.
_OPTIONS = {
    **{name: f"--{name}" for name in (*NUMBERS, "dropout", "resume", "out")},
    **{"file": "FILE", "learning_rate": "--lr", "model": "--resume"},
    "width, layers": "--width, --layers",
}


def run(arguments: argparse.Namespace) -> int:
    """Train, save at every validation and at the end, show a sample."""
    from clearhead.models import training_fits

    with named(**_OPTIONS), training_fits("take a smaller --batch, --length, --width or --layers"):
        return _train(arguments)


def _train(arguments: argparse.Namespace) -> int:
    from clearhead.models import RefusedByFirst, process_group

    with process_group(of_torchrun()) as group:
        try:
            return _train_in(resuming(arguments) if group.world > 1 else arguments, group)
        except RefusedByFirst:
            return MISUSE


def _train_in(arguments: argparse.Namespace, group: Group) -> int:
    """Train as one of the processes of a group; the first one locks, prints and writes."""
    from clearhead.models import output_directory, run_and_save, samples
    from clearhead.views import train_progress, training_end

    message = STOPPING if group.first else ""
    with StopRequests(message, patient=group.world > 1) as stop, ExitStack() as held:
        out = _resumed_directory(arguments)
        if out is not None and out.is_dir():
            # Locked before its state is read: another training may be writing it.
            held.enter_context(group.only_first(output_directory(out, overwrite=True)))
        text = _text(arguments)
        make = _resumed if arguments.resume else _fresh
        training = make(arguments, text, group)
        if out is None:
            out = out_of(arguments, training.settings.file, training.model.name)
            options = {"overwrite": arguments.force, "source": Path(training.settings.file)}
            held.enter_context(group.only_first(output_directory(out, **options)))
        monitor = held.enter_context(_monitored(training, out)) if arguments.monitor else None
        progress = train_progress(training, monitor) if group.first else nullcontext(_silent)
        with stop.deferred(), progress as show:
            run_and_save(training, out, stop, show, every=arguments.every)
        done = training.step == training.settings.steps
        if group.first:
            found = samples(training.model, text) if done else {}
            print(*training_end(training, out, found), sep="\n")
        return 0 if done else INTERRUPTED


def _silent(step: Step) -> None:
    """Show nothing: the first process does."""


def _monitored(training: Training, out: Path) -> AbstractContextManager[Monitor]:
    from clearhead.monitoring import recorded

    if training.model.name == "rnn":
        raise value_error("--monitor", "is for gpt and bert: an rnn has no attention")
    return recorded(
        training.model, out, training.step, training.settings.steps, write=training.group.first
    )


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


def _fresh(arguments: argparse.Namespace, text: str, group: Group) -> Training:
    from clearhead.models import begin

    name = arguments.model or "gpt"
    if name == "rnn" and arguments.heads is not None:
        raise value_error("--heads", "is for gpt and bert: an rnn has no heads")
    sizes = _given(arguments, "length", "layers", "heads", "width", "dropout")
    settings = _given(arguments, "steps", "batch", "lr", "seed")
    options: Any = {"threads": arguments.threads, "group": group}
    return begin(name, text, arguments.file, settings, sizes, **options)


def _resumed(arguments: argparse.Namespace, text: str, group: Group) -> Training:
    from clearhead.models import resume

    sizes = _given(arguments, "model", "batch", "length", "layers", "heads", "width", "dropout")
    if fixed := {**sizes, **_given(arguments, "lr", "seed")}:
        names = ", ".join(f"--{name}" for name in fixed)
        raise value_error("--resume", f"takes {names} from the checkpoint", hint="leave them out")
    options: Any = {"threads": arguments.threads, "group": group}
    training = resume(arguments.resume, text, steps=arguments.steps, **options)
    if arguments.file is not None:
        training.settings = training.settings.reading(arguments.file)
    return training


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    found = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}
