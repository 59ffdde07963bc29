"""The options of `clearhead train`."""

from __future__ import annotations

import argparse

from clearhead.cli.arguments import examples

__all__ = ["NUMBERS", "add_arguments"]

NOTES = """\
how long: a bert on the text that ships with clearhead (36 kB) predicts hidden
characters better than their frequencies (3.01 nats) after 60 steps, and is at
2.0 nats after the 600 steps of the default. Ctrl-C and SIGTERM save; so does
every --every'th second, and every validation.

under torchrun each process takes some rows of every batch; the losses are
those of one process. Any number of processes goes on with --resume.
"""
NUMBERS = {
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. What --resume takes from the checkpoint has no default here."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="a text in UTF-8")
    parser.add_argument("--model", choices=("gpt", "bert", "rnn"), help="which model (gpt)")
    parser.add_argument("--out", metavar="DIR", help="where the model goes (FILE-MODEL)")
    for name, words in NUMBERS.items():
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
        "torchrun --nproc-per-node 4 -m clearhead train tale.txt --batch 64",
        notes=NOTES,
    )
