"""`clearhead view RECORD`: what `seen.save(path)` wrote, as a page for a browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from clearhead._core import StopRequests, value_error
from clearhead.cli.arguments import examples, labels_in, named, new_file

HELP = "write or serve a page that shows a saved record, or compares two"
OF_TEXT = ("layer", "head", "sample", "at")
NOTES = """\
A page in one file holds long records as their largest weights. --serve shows
all that the record holds: on this machine alone, under a secret address.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `clearhead view`."""
    parser.add_argument("record", metavar="RECORD", help="a file that seen.save(path) wrote")
    parser.add_argument(
        "other", metavar="OTHER", nargs="?", help="a second one, to show the difference"
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="the page (default: RECORD with the ending .html)"
    )
    parser.add_argument(
        "--tokens", metavar="FILE", help="a JSON list of labels, or one list for each sample"
    )
    parser.add_argument(
        "--other-tokens", metavar="FILE", help="labels of OTHER, where they are others"
    )
    parser.add_argument(
        "--mask", action="store_true", help="show the masks alone: who may attend to whom, and why"
    )
    parser.add_argument("--serve", action="store_true", help="serve the page until Ctrl-C")
    parser.add_argument(
        "--port", type=int, metavar="N", default=0, help="of --serve (any that is free)"
    )
    parser.add_argument("--text", action="store_true", help="draw on the terminal instead")
    for name, what in (("layer", "layer"), ("head", "head"), ("sample", "sample"), ("at", "query")):
        words = f"of --text: the {what} shown"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=words)
    parser.add_argument("--force", action="store_true", help="overwrite a page that exists")
    examples(
        parser,
        "clearhead view page.seen -o page.html --tokens labels.json",
        "clearhead view before.seen after.seen -o both.html",
        "clearhead view page.seen --serve",
        "clearhead view page.seen --text --layer 3 --head 1 --at -1",
        notes=NOTES,
    )


def run(arguments: argparse.Namespace) -> int:
    """Load, then write the page and say where, or serve it."""
    _check_options(arguments)
    path = Path(arguments.record).expanduser()
    out = None
    if arguments.text:
        return _draw(_page(arguments, path), {n: getattr(arguments, n) for n in OF_TEXT})
    if not arguments.serve:
        out = new_file("--out", arguments.out or str(path.with_suffix(".html")), arguments.force)
    page = _page(arguments, path)
    if out is None:
        with StopRequests():
            page.serve(arguments.port)
        return 0
    with named(path="--out"):
        page.save(out, force=arguments.force)
    print(f"Wrote {out}")
    return 0


def _draw(page: Any, where: dict[str, int | None]) -> int:
    from clearhead.views import render_record

    with named(**{name: f"--{name}" for name in OF_TEXT}):
        render_record(page.shown, **{n: x for n, x in where.items() if x is not None})
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    if arguments.serve and arguments.out is not None:
        rule, hint = "and --serve exclude each other", "leave one of them out"
        raise value_error("--out", rule, hint=hint)
    if arguments.text and (arguments.serve or arguments.out is not None):
        raise value_error("--text", "stands for a page", hint="leave --out and --serve out")
    if arguments.text and (arguments.mask or arguments.other is not None):
        hint = "`clearhead mask` draws masks" if arguments.mask else "draw each by itself"
        raise value_error("--text", "draws the weights of one record", hint=hint)
    for name in OF_TEXT:
        if getattr(arguments, name) is not None and not arguments.text:
            raise value_error(f"--{name}", "belongs to --text", got=getattr(arguments, name))
    if arguments.port and not arguments.serve:
        raise value_error("--port", "belongs to --serve", got=arguments.port)
    if arguments.other_tokens is not None and arguments.other is None:
        raise value_error("--other-tokens", "needs OTHER, a second record")
    if arguments.mask and arguments.other is not None:
        raise value_error("--mask", "shows the masks of one record", got=arguments.other)


def _page(arguments: argparse.Namespace, path: Path) -> Any:
    from clearhead.recording import load
    from clearhead.views import view

    own, others = (
        None if name is None else labels_in(option, name)
        for option, name in (
            ("--tokens", arguments.tokens),
            ("--other-tokens", arguments.other_tokens),
        )
    )
    with named(path="RECORD"):
        seen = load(path)
    if arguments.other is None:
        kind = "mask" if arguments.mask else None
        with named(seen="RECORD", tokens="--tokens"):
            return view(seen, own, title=path.name, kind=kind)
    second = Path(arguments.other).expanduser()
    with named(path="OTHER"):
        other = load(second)
    names = (path.name, second.name)
    if names[0] == names[1]:
        names = (str(path), str(second))
    with named(seen="RECORD", tokens="--tokens", other="OTHER"):
        title = f"{names[0]} − {names[1]}"
        return view(seen, own, title=title, other=other, names=names, other_tokens=others)
