"""The atlas of a model's heads, drawn on the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from clearhead.heads import ROLES
from clearhead.views.labels import many
from clearhead.views.terminal import Terminal

__all__ = ["render_atlas"]


def render_atlas(found: dict[str, Any], top: int) -> None:
    """Draw the atlas on the terminal: a picture of all heads, then the best of each role."""
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
    if found["cuts"]:
        words = (
            "In Python (import clearhead as ch) `with CALL: model(tokens)` cuts them; the calls:"
        )
        console.print(words, style="dim")
        for call in found["cuts"].values():
            console.print(Text(f"  {call}"), soft_wrap=True)
    console.print(
        f"A role is assigned from a mean weight of {found['threshold']:g} on, and half of it for "
        "roles that need repeated tokens. Weights say where heads look, not what they do with it.",
        style="dim",
    )


def _picture(heads: list[dict[str, Any]], redundant: list[dict[str, Any]]) -> Any:
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
    named = ", ".join(f"{h['layer']}.{h['head']} ({h['mean']:.2f})" for h in having[:top])
    more = f" and {len(having) - top} more" if len(having) > top else ""
    return Text.assemble((f"{name} ", "bold"), (f"[{role}] ", "dim"), f"{named}{more}")


def _redundant(found: dict[str, Any]) -> Any:
    if found["about"].get("per_document"):
        text = "not in a table per document"
    else:
        groups = found["redundant"]
        alike = sum(len(g["heads"]) for g in groups)
        text = f"{many(alike, 'head')} in {many(len(groups), 'group')}"
    return Text.assemble(("redundant ", "bold"), (f"[cosine ≥ {found['alike']:g}] ", "dim"), text)
