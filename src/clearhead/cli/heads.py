"""`clearhead heads FILE`: the atlas of a model's heads, from a table that `scan` wrote."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from clearhead._core import value_error
from clearhead.cli.arguments import examples, many
from clearhead.views.json import document

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
    from clearhead.heads import atlas
    from clearhead.heads.corpus import read

    about, table = read(Path(arguments.file).expanduser())
    found = {"about": about, **atlas(table, threshold=arguments.threshold, alike=arguments.alike)}
    if arguments.json:
        print(document(found))
    else:
        render(found, arguments.top)
    return 0


def render(found: dict[str, Any], top: int) -> None:
    """Draw the atlas on the terminal: a picture of all heads, then the best of each role."""
    from rich.text import Text

    from clearhead.heads import ROLES
    from clearhead.views.terminal import Terminal

    console = Terminal()
    about, heads = found["about"], found["heads"]
    layers = len({head["layer"] for head in heads})
    console.print(
        Text.assemble(
            (str(about["model"]), "bold"),
            f": {many(layers, 'layer')}, {many(len(heads), 'head')}, "
            f"over {about['tokens']:,} tokens of {about['corpus']}",
        )
    )
    console.print(_picture(heads, found["redundant"]))
    used = {role for head in heads for role in head["roles"][:1]}
    legend = [f"{mark} {name}" for role, (mark, name) in ROLES.items() if role in used]
    console.print(Text(", ".join([*legend, "· none of these"]), style="dim"))
    for role, (_, name) in ROLES.items():
        if having := found["roles"][role]:
            console.print(_line(name, role, having, top))
    console.print(_redundant(found))
    console.print(
        f"A head has a role from a mean weight of {found['threshold']:g} on, half of it where "
        "tokens must repeat. Weights say where heads look, not what they do with it.",
        style="dim",
    )


def _picture(heads: list[dict[str, Any]], redundant: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from clearhead.heads import ROLES

    width = 1 + max(head["head"] for head in heads)
    cells = {(head["layer"], head["head"]): head["roles"] for head in heads}
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("layer", justify="right", style="dim")
    for number in range(width):
        table.add_column(str(number), justify="right", no_wrap=True)
    table.add_column("redundant" if redundant else "", style="dim")
    for layer in sorted({layer for layer, _ in cells}):
        marks = []
        for number in range(width):
            roles = cells.get((layer, number))
            mark = " " if roles is None else ROLES[roles[0]][0] if roles else "·"
            marks.append(Text(mark, style="bold cyan" if roles else "dim"))
        alike = [" = ".join(map(str, g["heads"])) for g in redundant if g["layer"] == layer]
        table.add_row(str(layer), *marks, ", ".join(alike))
    return table


def _line(name: str, role: str, having: list[dict[str, Any]], top: int) -> Any:
    from rich.text import Text

    named = ", ".join(f"{h['layer']}.{h['head']} ({h['mean']:.2f})" for h in having[:top])
    more = f" and {len(having) - top} more" if len(having) > top else ""
    return Text.assemble((f"{name} ", "bold"), (f"[{role}] ", "dim"), f"{named}{more}")


def _redundant(found: dict[str, Any]) -> Any:
    from rich.text import Text

    if found["about"].get("per_document"):
        text = "not in a table per document"
    else:
        groups = found["redundant"]
        alike = sum(len(g["heads"]) for g in groups)
        text = f"{many(alike, 'head')} in {many(len(groups), 'group')}"
    return Text.assemble(("redundant ", "bold"), (f"[cosine ≥ {found['alike']:g}] ", "dim"), text)
