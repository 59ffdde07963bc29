"""`clearhead mask EXPR`: who may attend to whom, as a picture, a row or in words."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clearhead._core import value_error
from clearhead.cli.arguments import many, named

if TYPE_CHECKING:
    from rich.text import Text

    from clearhead.masks import Mask

# Runs of sources listed for a row.
SHOWN = 20
HELP = "who may attend to whom, drawn from an expression"
# More positions than this are not drawn.
LIMIT = 1 << 24
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


def run(arguments: argparse.Namespace) -> int:
    """Ask the mask, then print as text or JSON."""
    from clearhead import masks

    with named(expression="EXPR", sample="--sample", head="--head"):
        mask = masks.parse(arguments.expression)
        query, source = _sizes(mask, arguments.query, arguments.source)
        cells = 32 if arguments.json else _cells(query, source)
        seen = describe(
            mask,
            query,
            source,
            row=arguments.row,
            why=arguments.why,
            sample=arguments.sample,
            head=arguments.head,
            cells=cells,
        )
    if arguments.json:
        print(json.dumps(seen, ensure_ascii=True))
    else:
        render(seen)
    return 0


def describe(
    mask: Mask,
    query: int,
    source: int,
    *,
    row: int | None = None,
    why: Sequence[int] | None = None,
    sample: int | None = None,
    head: int | None = None,
    cells: int = 32,
) -> dict[str, Any]:
    """Gather what is shown of a mask, as one JSON-ready dictionary.

    With `row` or `why` only these are asked, so that they stay quick for long sequences.
    """
    which = {"query": query, "source": source, "sample": sample, "head": head}
    seen: dict[str, Any] = {"expression": repr(mask), **which}
    if row is not None:
        with named(i="--row"):
            seen["row"] = {"query": row, "sources": mask.row(row, **which)}
    if why is not None:
        i, j = why
        with named(i="--why I", j="--why J"):
            verdict, *reasons = mask.why(i, j, **which).split("\n")
            allowed = j % source in mask.row(i, **which)
        seen["why"] = {"allowed": allowed, "verdict": verdict, "reasons": reasons}
    if row is None and why is None:
        maps = mask.maps(query, source, sample=sample, head=head, cells=cells)
        seen["maps"] = [each._asdict() | {"edges": each.edges} for each in maps]
    return seen


def _sizes(mask: Mask, query: int | None, source: int | None) -> tuple[int, int]:
    from clearhead.masks import default_sizes

    own = default_sizes(mask)
    if source is None:
        source = own[1] if query is None or mask.own.source is not None else query
    query = own[0] if query is None else query
    for name, size in (("--query", query), ("--source", source)):
        if not 0 <= size <= LIMIT:
            raise value_error(name, f"is a number of positions up to {LIMIT:,}", got=f"{size:,}")
    return query, source


def _cells(query: int, source: int) -> int:
    """Tiles a side that fit the terminal: two columns each, beside the row numbers."""
    from rich.console import Console

    return max(1, min(64, (Console().width - len(str(query)) - 1) // 2))


def render(seen: dict[str, Any]) -> None:
    """Draw what `describe` gathered on the terminal."""
    from clearhead.views.terminal import Terminal

    console = Terminal()
    for line in lines(seen):
        console.print(_coloured(line), soft_wrap=True)


def lines(seen: dict[str, Any]) -> list[str]:
    """Put what `describe` gathered in words."""
    from clearhead.masks import Map, picture

    shape = f"{many(seen['query'], 'query', 'queries')} x {many(seen['source'], 'source')}"
    shown = [f"{seen['expression']}   {shape}"]
    if row := seen.get("row"):
        shown.append(f"query {row['query']} may read {_sources(row['sources'])}")
    if why := seen.get("why"):
        shown += [why["verdict"], *why["reasons"]]
    if maps := seen.get("maps"):
        drawn = [Map(**{name: each[name] for name in Map._fields}) for each in maps]
        shown += ["", *picture(drawn).split("\n"), "", _total(seen)]
    return shown


def _total(seen: dict[str, Any]) -> str:
    edges = sum(each["edges"] for each in seen["maps"])
    total = seen["query"] * seen["source"] * len(seen["maps"])
    share = f" ({edges / total:.1%})" if total else ""
    return f"{edges:,} of {total:,} edges{share}"


def _sources(row: list[int]) -> str:
    """Positions, runs of them as ranges: 0, 3-5."""
    runs: list[list[int]] = []
    for source in row:
        if runs and runs[-1][1] == source - 1:
            runs[-1][1] = source
        else:
            runs.append([source, source])
    named = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    cut = [*named[:SHOWN], f"and {len(named) - SHOWN} more runs"] if len(named) > SHOWN else named
    return f"{many(len(row), 'source')}: {', '.join(cut)}" if row else "no source"


def _coloured(line: str) -> Text:
    from rich.text import Text

    text = Text(line)
    text.highlight_regex("[■▓▒░]+", "bold cyan")
    text.highlight_regex("·", "dim")
    return text
