"""`clearhead heads FILE`: the atlas of a model's heads, from a table that `scan` wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

from clearhead._core import value_error
from clearhead.cli.arguments import examples

HELP = "print which heads are sinks, previous-token, induction or redundant"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `clearhead heads`."""
    parser.add_argument("file", metavar="FILE", help="a table that `clearhead scan` wrote")
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="SHARE",
        default=0.4,
        help="the mean weight from which a head has a role (0.4)",
    )
    parser.add_argument(
        "--alike",
        type=float,
        metavar="COSINE",
        default=0.9,
        help="the cosine from which heads are redundant (0.9)",
    )
    parser.add_argument(
        "--top", type=int, default=8, metavar="K", help="how many heads are named for each role (8)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    examples(
        parser, "clearhead scan page.txt --out page.heads && clearhead heads page.heads",
        "clearhead heads page.heads --threshold 0.3 --top 20",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Read, judge, print."""
    for name in ("threshold", "alike"):
        if not 0 < getattr(arguments, name) <= 1:
            raise value_error(
                f"--{name}", "is a share, above 0 and at most 1", got=getattr(arguments, name)
            )
    if arguments.top < 1:
        raise value_error("--top", "must be at least 1", got=arguments.top)
    from clearhead.heads import atlas, cut_calls
    from clearhead.heads.corpus import read
    from clearhead.views import document, render_atlas

    about, table = read(Path(arguments.file).expanduser())
    found = {"about": about, **atlas(table, threshold=arguments.threshold, alike=arguments.alike)}
    found["cuts"] = cut_calls(about, found, arguments.top)
    if arguments.json:
        print(document(found))
    else:
        render_atlas(found, arguments.top)
    return 0
