"""The options of `clearhead scan`."""

from __future__ import annotations

import argparse

from clearhead.cli.arguments import examples

__all__ = ["LENGTH", "add_arguments"]

# Tokens of a sequence, unless the model reads fewer.
LENGTH = 256
_NUMBERS = {
    "length": f"cut records into sequences of at most N tokens ({LENGTH}, or what the model reads)",
    "batch": "run up to N sequences of one length together; the table is the same (32)",
    "limit": "read the first N records only",
}
_CHOICES = {
    "format": (("text", "jsonl", "parquet"), "of the corpus (default: by name)"),
    "by": (("line", "paragraph"), "what a record of a text file is (line)"),
}
_NAMES = {
    "model": ("SPEC", "what clearhead look takes (default: the GPT that is shipped)"),
    "out": ("FILE", "the table to write"),
    "field": ("NAME", "the JSON field or Parquet column that is read (text)"),
    "shard": ("K/N", "count every Nth part of the corpus only; `heads --merge` joins all N files"),
}
_FLAGS = {"per-document": "one row for each record, instead of for all"}
_GOING = {"resume": "go on where a scan was stopped", "force": "write over FILE, start over"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `clearhead scan`."""
    parser.add_argument("corpus", metavar="CORPUS", help="text, JSON lines or Parquet")
    for name, (metavar, words) in _NAMES.items():
        parser.add_argument(f"--{name}", metavar=metavar, required=name == "out", help=words)
    for name, (choices, words) in _CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices, help=words)
    for name, words in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=words)
    parser.set_defaults(batch=32)
    going = parser.add_mutually_exclusive_group()
    for group, flags in ((parser, _FLAGS), (going, _GOING)):
        for name, words in flags.items():
            group.add_argument(f"--{name}", action="store_true", help=words)
    parser.add_argument(
        "--every", type=float, default=30, metavar="SECONDS", help="between checkpoints (30)"
    )
    examples(
        parser,
        "clearhead scan page.txt --out page.heads",
        "clearhead scan corpus.jsonl --model openai-community/gpt2 --out corpus.heads",
        "clearhead scan corpus.jsonl --out corpus.heads --resume",
        "clearhead scan corpus.jsonl --shard 3/16 --out corpus.3",
        "torchrun --nproc-per-node 4 -m clearhead scan corpus.jsonl --out corpus.heads",
    )
