"""The options of `clearhead audit`."""

from __future__ import annotations

import argparse
from typing import Any

from clearhead._core import value_error
from clearhead.cli.arguments import examples

__all__ = ["FORMS_OF_ONE", "add_arguments", "check_use"]

PROOF = """\
what it proves: with these weights and inputs, new content at a forbidden source
moves an output (exit code 1, with the pair and the module where it comes in),
or moves none by more than rounding (exit code 0).
what it cannot prove: that nothing leaks with other inputs, lengths or weights,
below the rounding that the report names, or from what is no token and no float
input. What a --budget or outputs of NaN leave untested is exit code 3.
"""
# Questions that compare a fixed set of runs.
FORMS_OF_ONE = {
    "padding": "does padding change what is real?",
    "batch": "do samples of a batch see each other?",
    "generation": "cached decoding against one pass",
    "modes": "train, eval and backends compared",
}
LIBRARIES = "transformers, torch, x-transformers, diffusers, sentence-transformers, peft"
# What belongs to a sweep, with what it is where it is not given.
_OF_A_SWEEP: dict[str, Any] = {
    "classes": None,
    "forms": None,
    "backends": None,
    "out": None,
    "beside": None,
    "processes": 2,
    "limit": 120.0,
    "memory": 4.0,
}
_OF_ONE = ("spec", "allowed", *FORMS_OF_ONE, "documents", "depth", "budget", "text", "length")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `clearhead audit`."""
    parser.add_argument(
        "spec",
        metavar="SPEC",
        nargs="?",
        help="a model directory, a Hugging Face id, a GGUF file, or package.module:factory, where "
        "the factory gives a model or (model, inputs) (default: the GPT that is shipped)",
    )
    _add_questions(parser)
    _add_sweep(parser.add_argument_group("every class of a library"))
    examples(
        parser,
        "clearhead audit",
        'clearhead audit tale-gpt --text "a yellow bell"',
        "clearhead audit tale-bert --allowed everything",
        'clearhead audit my.model:make --allowed "causal & window(4)" --depth 2',
        "clearhead audit my.model:make --documents 0,0,0,1,1",
        "clearhead audit --library transformers --classes BartForCausalLM --out bart",
        notes=PROOF,
    )


def _add_questions(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--allowed",
        metavar="EXPR",
        help='who may see whom, as a mask: "causal & window(4)" (default: causal)',
    )
    for name, words in FORMS_OF_ONE.items():
        asked.add_argument(f"--{name}", action="store_true", help=words)
    asked.add_argument(
        "--documents", metavar="IDS", help="packed documents, a number a position: 0,0,0,1,1"
    )
    parser.add_argument("--depth", type=int, metavar="N", help="compose the mask over N layers (1)")
    parser.add_argument("--budget", type=int, metavar="N", help="run at most N changed inputs")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="TEXT", help="the text to read (default: random tokens)")
    source.add_argument("--length", type=int, metavar="N", help="the number of random tokens (32)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _add_sweep(group: Any) -> None:
    words = "audit tiny random copies of the classes of a library, each in a process of its own"
    group.add_argument("--library", metavar="NAME", help=f"{words}: {LIBRARIES}")
    lists = {
        "classes": ("NAME", "these classes only"),
        "forms": ("FORM", "of causal padding documents generation batch modes (all)"),
        "backends": ("NAME", "of eager sdpa (both)"),
    }
    for name, (metavar, words) in lists.items():
        group.add_argument(f"--{name}", nargs="+", action="extend", metavar=metavar, help=words)
    folders = {
        "out": "the folder of the rows and the report; a sweep that was stopped goes on there",
        "beside": "the folder of a sweep of another version, to compare with",
    }
    for name, words in folders.items():
        group.add_argument(f"--{name}", metavar="DIR", help=words)
    numbers = {
        "processes": (int, "N", "classes audited at once"),
        "limit": (float, "SECONDS", "time for a class"),
        "memory": (float, "GIB", "memory for a class"),
    }
    for name, (kind, metavar, words) in numbers.items():
        default = _OF_A_SWEEP[name]
        group.add_argument(
            f"--{name}", type=kind, metavar=metavar, default=default, help=f"{words} ({default:g})"
        )


def check_use(arguments: argparse.Namespace) -> None:
    """Refuse an option that the question leaves unread."""
    if arguments.library is not None:
        _check_sweep(arguments)
        return
    for name, default in _OF_A_SWEEP.items():
        if getattr(arguments, name) != default:
            hint = "add --library transformers"
            raise value_error(f"--{name}", "belongs to a sweep over a library", hint=hint)
    asked = [name for name in FORMS_OF_ONE if getattr(arguments, name)]
    given = [name for name in ("depth", "budget") if getattr(arguments, name) is not None]
    if asked and given:
        rule = f"says nothing to --{asked[0]}, which compares a fixed set of runs"
        hint = "leave it out, or ask with --allowed or --documents"
        raise value_error(f"--{given[0]}", rule, got=getattr(arguments, given[0]), hint=hint)


def _check_sweep(arguments: argparse.Namespace) -> None:
    for name in _OF_ONE:
        if getattr(arguments, name) not in (None, False):
            option = "SPEC" if name == "spec" else f"--{name}"
            rule = "is about one model, and --library about the classes of a library"
            got = repr(getattr(arguments, name))
            raise value_error(option, rule, got=got, hint="--classes and --forms choose there")
    if arguments.out is None:
        raise value_error("--out", "is needed: the folder of the rows", hint="--out DIR")
