"""`clearhead mask EXPR`: who may attend to whom, as a picture, a row or in words."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from clearhead.cli.arguments import named, new_file

HELP = "who may attend to whom, drawn from an expression"
EXAMPLES = """\
masks: everything nothing causal window(n) band(before, after)
       diagonal(distance) first(n) prefix(n) lengths([5, 3]) keep([0, 1, 1])
       document([0, 0, 1]) same([0], [0, 1]) induction([7, 8, 7])
       duplicate([7, 8, 7]) edges([(3, 0)]) dense([[1, 0], [1, 1]])
       (causal, window, band, diagonal and edges take align=start or the
       position of the first query)
operators, tightest first:
       ~ (all other edges)  - (without)  & (both)  | (either)

examples:
  clearhead mask "causal & window(3) | first(1)" -q 8
  clearhead mask "causal & lengths([5, 3])" -q 5 --sample 1 --why 4 3
  clearhead mask causal -q 2 -s 6 --row 0
  clearhead mask "causal & window(3)" -q 16 --html mask.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `clearhead mask`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("expression", metavar="EXPR", help="a mask, such as 'causal & window(3)'")
    parser.add_argument("-q", "--query", type=int, metavar="N", help="how many queries (8)")
    parser.add_argument(
        "-s", "--source", type=int, metavar="N", help="how many sources (as queries)"
    )
    parser.add_argument("--row", type=int, metavar="I", help="list the sources query I may read")
    parser.add_argument(
        "--why",
        type=int,
        nargs=2,
        metavar=("I", "J"),
        help="say why query I may (not) read source J",
    )
    parser.add_argument("--sample", type=int, metavar="B", help="the sample, where samples differ")
    parser.add_argument("--head", type=int, metavar="H", help="the head, where heads differ")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--html", metavar="FILE", help="also write a page for a browser")
    parser.add_argument("--force", action="store_true", help="overwrite a page that exists")


def run(arguments: argparse.Namespace) -> int:
    """Ask the mask, then print as text or JSON."""
    from clearhead.views import render_mask

    page = None if arguments.html is None else new_file("--html", arguments.html, arguments.force)
    options = {"query": "--query", "source": "--source", "sample": "--sample", "head": "--head"}
    with named(expression="EXPR", **options):
        seen = _ask(arguments)
    if arguments.json:
        print(json.dumps(seen, ensure_ascii=True))
    else:
        render_mask(seen)
    if page is not None:
        _write(arguments, seen, page)
    return 0


def _write(arguments: argparse.Namespace, seen: dict[str, Any], page: Path) -> None:
    from clearhead import masks
    from clearhead.views import view

    mask = masks.parse(arguments.expression)
    with named(mask="EXPR", path="--html"):
        made = view(mask, query=seen["query"], source=seen["source"])
        made.save(page, force=arguments.force)
    print(f"Wrote {page}", file=sys.stderr if arguments.json else None)


def _ask(arguments: argparse.Namespace) -> dict[str, Any]:
    """Gather what is shown as one JSON-ready dictionary; a row or an edge needs no picture."""
    from clearhead import masks
    from clearhead.views import (
        cells_of_terminal,
        describe_edge,
        describe_maps,
        describe_row,
        sizes_of_mask,
    )

    mask = masks.parse(arguments.expression)
    query, source = sizes_of_mask(mask, arguments.query, arguments.source)
    which = {
        "query": query, "source": source, "sample": arguments.sample, "head": arguments.head,
    }  # fmt: skip
    seen: dict[str, Any] = {"expression": repr(mask), **which}
    if arguments.row is not None:
        with named(i="--row"):
            seen["row"] = describe_row(mask, arguments.row, which)
    if arguments.why is not None:
        with named(i="--why I", j="--why J"):
            i, j = arguments.why
            seen["why"] = describe_edge(mask, i, j, which)
    if arguments.row is None and arguments.why is None:
        cells = 32 if arguments.json else cells_of_terminal(query, source)
        seen["maps"] = describe_maps(mask, which, cells=cells)
    return seen
