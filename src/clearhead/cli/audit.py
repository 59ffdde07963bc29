"""`clearhead audit SPEC`: does anything flow through a model that must not?"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from clearhead._core import value_error
from clearhead.cli.arguments import examples, named, note

if TYPE_CHECKING:
    from clearhead.dependence import Report

# Random tokens, unless another number is asked for.
LENGTH = 32
PROOF = """\
what it proves: with these weights and inputs, new content at a forbidden source
moves an output (exit code 1, with the pair and the module where it comes in),
or moves none by more than rounding (exit code 0).
what it cannot prove: that nothing leaks with other inputs, lengths or weights,
below the rounding that the report names, or from what is no token and no float
input. What a --budget or outputs of NaN leave untested is exit code 3.
"""
HELP = "prove that a model sees nothing that it must not see (exit code 1: it does)"


# Questions that compare a fixed set of runs.
_QUESTIONS = {
    "padding": "does padding change what is real?",
    "batch": "do samples of a batch see each other?",
    "generation": "cached decoding against one pass",
    "modes": "train, eval and backends compared",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `clearhead audit`."""
    parser.add_argument(
        "spec",
        metavar="SPEC",
        nargs="?",
        help="a model directory, a Hugging Face id, a GGUF file, or package.module:factory, where "
        "the factory gives a model or (model, inputs) (default: the GPT that is shipped)",
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--allowed",
        metavar="EXPR",
        help='who may see whom, as a mask: "causal & window(4)" (default: causal)',
    )
    for name, words in _QUESTIONS.items():
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
    examples(
        parser,
        "clearhead audit",
        'clearhead audit tale-gpt --text "a yellow bell"',
        "clearhead audit tale-bert --allowed everything",
        'clearhead audit my.model:make --allowed "causal & window(4)" --depth 2',
        "clearhead audit my.model:make --documents 0,0,0,1,1",
        notes=PROOF,
    )


def run(arguments: argparse.Namespace) -> int:
    """Audit, print, and exit with 1 if something leaks, with 3 if not all could be tested."""
    from clearhead.views import document, render_report

    _check_use(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # what a model prints is no part of the report
        report = _audit(arguments)
    if arguments.json:
        print(document(report.as_dict()))
    else:
        render_report(report)
    return report.exit_code


def _audit(arguments: argparse.Namespace) -> Report:
    """Load the model, make the inputs, and ask the question that was named."""
    from clearhead import models
    from clearhead.dependence import read_ids
    from clearhead.views import open_with_inputs

    documents = arguments.documents
    ids = None if documents is None else read_ids("--documents", documents)
    with named(model="SPEC", length="--length", text="--text"):
        length = len(ids) if ids else LENGTH if arguments.length is None else arguments.length
        model, inputs, given = open_with_inputs(arguments.spec, arguments.text, length)
        if given and arguments.length is not None:
            note(f"--length has no use: {arguments.spec} gives inputs of its own")
        known = (ValueError, TypeError, OSError, ImportError, MemoryError, RuntimeError)
        with models.small_threads(model, length), models.model_errors("the model", *known):
            return _ask(arguments, model, inputs, ids)


def _ask(arguments: argparse.Namespace, model: Any, inputs: Any, ids: list[int] | None) -> Report:
    from clearhead import masks
    from clearhead.dependence import audit
    from clearhead.models import maskable_inputs, packed_inputs

    names = ("depth", "budget", "allowed", "padding")
    with named(expression="--allowed", **{name: f"--{name}" for name in names}):
        if arguments.padding:
            return audit.padding(model, maskable_inputs(model, inputs))
        for name in ("batch", "generation", "modes"):
            if getattr(arguments, name):
                return getattr(audit, name)(model, inputs)
        depth = 1 if arguments.depth is None else arguments.depth
        options = {"depth": depth, "budget": arguments.budget}
        if ids is not None:
            return audit.documents(model, packed_inputs(model, inputs, ids), ids, **options)
        return audit(model, inputs, masks.parse(arguments.allowed or "causal"), **options)


def _check_use(arguments: argparse.Namespace) -> None:
    """Refuse, or name, an option that the question leaves unread."""
    asked = [name for name in _QUESTIONS if getattr(arguments, name)]
    given = [n for n in ("depth", "budget") if getattr(arguments, n) is not None]
    if asked and given:
        rule = f"says nothing to --{asked[0]}, which compares a fixed set of runs"
        hint = "leave it out, or ask with --allowed or --documents"
        raise value_error(f"--{given[0]}", rule, got=getattr(arguments, given[0]), hint=hint)
    if arguments.documents is not None and arguments.length is not None:
        note("--length has no use: --documents has a number for each token")
