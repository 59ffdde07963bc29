"""`clearhead view RECORD`: what `seen.save(path)` wrote, as a page for a browser."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from clearhead._core import value_error
from clearhead.cli.arguments import examples, named, new_file

HELP = "write a page that shows a saved record"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `clearhead view`."""
    parser.add_argument("record", metavar="RECORD", help="a file that seen.save(path) wrote")
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="the page (default: RECORD with the ending .html)"
    )
    parser.add_argument(
        "--tokens", metavar="FILE", help="a JSON list of labels, or one list for each sample"
    )
    parser.add_argument("--force", action="store_true", help="overwrite a page that exists")
    examples(parser, "clearhead view page.seen -o page.html --tokens labels.json")


def run(arguments: argparse.Namespace) -> int:
    """Load, write the page, say where."""
    from clearhead.recording import load
    from clearhead.views import view

    path = Path(arguments.record).expanduser()
    out = new_file("--out", arguments.out or str(path.with_suffix(".html")), arguments.force)
    tokens = None if arguments.tokens is None else _labels(Path(arguments.tokens).expanduser())
    with named(path="RECORD", seen="RECORD", tokens="--tokens"):
        view(load(path), tokens, title=path.name).save(out, force=arguments.force)
    print(f"Wrote {out}")
    return 0


def _labels(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise value_error("--tokens", f"is a file of JSON ({error})", got=str(path)) from None
    lists = found if isinstance(found, list) else [None]
    flat = [x for each in lists for x in (each if isinstance(each, list) else [each])]
    if not all(isinstance(x, str) for x in flat):
        raise value_error("--tokens", "holds a list of labels, or lists of them", got=str(path))
    return found
