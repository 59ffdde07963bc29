"""`clearhead train FILE`: train a small model on a text, stop at any time, go on later."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead._core import stop_requests, value_error
from clearhead.cli.arguments import examples, named

if TYPE_CHECKING:
    from clearhead.models import Training

HELP = "train a small GPT, BERT or RNN on a text file"
INTERRUPTED = 130  # as a shell gives it for a command that Ctrl-C ended
STOPPING = "\nStopping after this step ...\n"


# What the library calls the arguments.
_OPTIONS = {
    **{name: f"--{name}" for name in ("steps", "batch", "length", "layers", "heads", "width")},
    **{name: f"--{name}" for name in ("dropout", "seed", "threads", "resume", "out")},
    **{"file": "FILE", "learning_rate": "--lr", "model": "--resume"},
    "width, layers": "--width, --layers",
}


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


def _train(arguments: argparse.Namespace) -> int:
    from clearhead.models import samples
    from clearhead.views import render_samples, train_progress

    text = _text(arguments)
    training = _resumed(arguments, text) if arguments.resume else _fresh(arguments, text)
    out = _out(arguments, training)
    with stop_requests(STOPPING) as stopped, train_progress(training) as show:
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
        print(render_samples(samples(training.model, text)))
    print(f"Wrote {out}")
    return 0 if training.step == training.settings.steps else INTERRUPTED


def _text(arguments: argparse.Namespace) -> str:
    from clearhead.models import read_text, text_of

    if arguments.file is not None:
        return read_text(arguments.file)
    if arguments.resume is None:
        raise value_error("FILE", "is needed", hint="name a text, or --resume DIR to go on")
    return text_of(arguments.resume)


def _fresh(arguments: argparse.Namespace, text: str) -> Training:
    from clearhead.models import Settings, begin

    name = arguments.model or "gpt"
    if name == "rnn" and arguments.heads is not None:
        raise value_error("--heads", "is for gpt and bert: an rnn has no heads")
    sizes = _given(arguments, "length", "layers", "heads", "width", "dropout")
    settings = Settings(**_settings(arguments), file=_whole(arguments.file))
    return begin(name, text, settings, sizes, threads=arguments.threads)


def _resumed(arguments: argparse.Namespace, text: str) -> Training:
    from clearhead.models import resume

    fixed = _given(arguments, "model", "batch", "length", "layers", "heads", "width", "dropout")
    if fixed or _given(arguments, "lr", "seed"):
        names = ", ".join(f"--{name}" for name in [*fixed, *_given(arguments, "lr", "seed")])
        raise value_error("--resume", f"takes {names} from the checkpoint", hint="leave them out")
    training = resume(arguments.resume, text, steps=arguments.steps, threads=arguments.threads)
    if arguments.file is not None:
        training.settings = replace(training.settings, file=_whole(arguments.file))
    return training


def _whole(file: str) -> str:
    return str(Path(file).expanduser().resolve())


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


def _out(arguments: argparse.Namespace, training: Training) -> Path:
    from clearhead.models import output_directory

    if arguments.resume is not None and arguments.out is None:
        return output_directory(Path(arguments.resume).expanduser(), overwrite=True)
    out = arguments.out or f"{Path(training.settings.file).stem}-{training.model.name}"
    return output_directory(Path(out).expanduser(), overwrite=arguments.force)
