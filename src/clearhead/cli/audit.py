"""`clearhead audit SPEC`: does anything flow through a model that must not?"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from clearhead._core import StopRequests, value_error
from clearhead.cli.arguments import named, note
from clearhead.cli.options.audit import add_arguments, check_use

if TYPE_CHECKING:
    from clearhead.dependence import Report

__all__ = ["HELP", "add_arguments", "run"]

# Random tokens, unless another number is asked for.
LENGTH = 32
HELP = "prove that a model sees nothing that it must not see (exit code 1: it does)"
INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """Audit, print, and exit with 1 if something leaks, with 3 if not all could be tested."""
    from clearhead.views import document, render_report

    check_use(arguments)
    if arguments.library is not None:
        return _audit_library(arguments)
    if arguments.documents is not None and arguments.length is not None:
        note("--length has no use: --documents has a number for each token")
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


def _other_sweep(arguments: argparse.Namespace) -> Any:
    """Read the sweep to compare with, which is over the same library."""
    from clearhead.dependence import library

    if arguments.beside is None:
        return None
    run, rows = library.read_run(arguments.beside, "beside")
    if run["library"] != arguments.library:
        got = f"{arguments.beside}, a sweep over {run['library']}"
        raise value_error("beside", f"is the folder of a sweep over {arguments.library}", got=got)
    return run, rows


def _audit_library(arguments: argparse.Namespace) -> int:
    """Sweep over a library, write the report, and print what was found."""
    from clearhead.dependence import library
    from clearhead.views import document, render_sweep, sweep_progress

    choices = {n: v for n in ("forms", "backends") if (v := getattr(arguments, n)) is not None}
    numbers = {name: getattr(arguments, name) for name in ("processes", "limit", "memory")}
    names = ("library", "out", "classes", "beside", *choices, *numbers)
    with named(**{name: f"--{name}" for name in names}), StopRequests():
        beside = _other_sweep(arguments)
        try:
            with sweep_progress(arguments.limit, arguments.memory) as tell:
                rows = library.audit_library(
                    arguments.library, arguments.out, arguments.classes, tell=tell,
                    **choices, **numbers,
                )  # fmt: skip
        except KeyboardInterrupt:
            print("stopped; the same command goes on from there", file=sys.stderr, flush=True)
            return INTERRUPTED
        run = library.read_header(arguments.out)
        written = library.write_report(arguments.out, run, rows, beside)
    if arguments.json:
        print(document({**run, "rows": [row.as_dict() for row in rows]}))
    else:
        render_sweep(run, rows)
        print(f"Wrote {written}")
    return library.exit_code(rows)
