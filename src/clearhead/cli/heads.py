"""`clearhead heads FILE`: the atlas of a model's heads, from a table that `scan` wrote."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from clearhead._core import value_error
from clearhead.cli.arguments import examples, labels_in, named, new_file

HELP = "print which heads are sinks, previous-token, induction or redundant"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `clearhead heads`."""
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="a table that `clearhead scan` wrote"
    )
    parser.add_argument(
        "--merge",
        metavar="SHARD",
        nargs="+",
        help="the files of all shards that `clearhead scan --shard K/N` wrote, in place of FILE",
    )
    parser.add_argument("--out", metavar="FILE", help="write the merged table")
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
    parser.add_argument("--html", metavar="FILE", help="also write the atlas for a browser")
    parser.add_argument(
        "--record",
        metavar="RECORD",
        help="what seen.save(path) wrote of the same model: the page shows its maps",
    )
    parser.add_argument(
        "--tokens", metavar="FILE", help="labels of RECORD's positions, a JSON list"
    )
    parser.add_argument(
        "--force", action="store_true", help="overwrite a page or a table that exists"
    )
    examples(
        parser, "clearhead scan page.txt --out page.heads && clearhead heads page.heads",
        "clearhead heads page.heads --threshold 0.3 --top 20",
        "clearhead heads --merge corpus.1 corpus.2 corpus.3 --out corpus.heads",
        "clearhead heads page.heads --html atlas.html --record page.seen",
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
    for name in ("record", "tokens"):
        needs = "html" if name == "record" else "record"
        if getattr(arguments, name) is not None and getattr(arguments, needs) is None:
            raise value_error(f"--{name}", f"belongs to --{needs}", hint=f"add --{needs} FILE")
    page = None if arguments.html is None else new_file("--html", arguments.html, arguments.force)
    from clearhead.heads import atlas, cut_calls
    from clearhead.views import document, render_atlas

    about, table = _table(arguments)
    found = {"about": about, **atlas(table, threshold=arguments.threshold, alike=arguments.alike)}
    found["cuts"] = cut_calls(about, found, arguments.top)
    if arguments.json:
        print(document(found))
    else:
        render_atlas(found, arguments.top)
    if page is not None:
        _write(arguments, about, table, page)
    return 0


def _table(arguments: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Read the table, or merge the shards into one."""
    from clearhead.heads.corpus import merge, read

    if (arguments.file is None) == (arguments.merge is None):
        hint = "clearhead heads FILE, or clearhead heads --merge SHARD ..."
        raise value_error("FILE", "is a table, or --merge has shards: one of both", hint=hint)
    if arguments.merge is None:
        if arguments.out is not None:
            raise value_error("--out", "belongs to --merge", hint="add --merge SHARD ...")
        return read(Path(arguments.file).expanduser())
    shards = [Path(shard).expanduser() for shard in arguments.merge]
    if arguments.out is None:
        with TemporaryDirectory() as home:
            merge(shards, Path(home) / "table")
            return read(Path(home) / "table")
    target = new_file("--out", arguments.out, arguments.force)
    merge(shards, target)
    print(f"Wrote {target}", file=sys.stderr if arguments.json else None)
    return read(target)


def _write(arguments: argparse.Namespace, about: dict[str, Any], table: Any, page: Path) -> None:
    from clearhead.recording import load
    from clearhead.views import view_of_table

    tokens = None if arguments.tokens is None else labels_in("--tokens", arguments.tokens)
    with named(path="--record"):
        record = None if arguments.record is None else load(Path(arguments.record).expanduser())
    judged = {"threshold": arguments.threshold, "alike": arguments.alike}
    with named(seen="--record", record="--record", tokens="--tokens"):
        made = view_of_table(about, table, record=record, tokens=tokens, **judged)
    with named(path="--html"):
        made.save(page, force=arguments.force)
    print(f"Wrote {page}", file=sys.stderr if arguments.json else None)
