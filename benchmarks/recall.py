"""Recall of the token d steps before: a GPT against a recurrent network of equal size.

    python benchmarks/recall.py             # about four minutes on one thread
    python benchmarks/recall.py --redraw    # the table and the figure, from the last result

One model of each kind is trained for each d, from one seed, to predict at every position of a
random sequence the token d steps before. Two numbers are measured on new sequences: the accuracy
(chance is one in eight), and the share of the last output's influence (the norm of its Jacobian,
`ch.influence`) that comes from the token to recall.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
import machine
from clearhead.models import GPT, RNN
from table import write

TOKENS, LENGTH, STEPS, BATCH, RATE = 8, 160, 300, 16, 3e-3
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128)
SEED = 10
HERE = Path(__file__).parent
RESULT, FIGURE = HERE / "results" / "recall.json", HERE.parent / "docs" / "recall.svg"


def gpt() -> nn.Module:
    return GPT(TOKENS, layers=1, heads=2, width=64, length=LENGTH, dropout=0.0)


def rnn() -> nn.Module:
    return RNN(TOKENS, layers=1, width=90, length=LENGTH, dropout=0.0)


KINDS = {"gpt": gpt, "rnn": rnn}


def train(model: nn.Module, distance: int, steps: int) -> None:
    """Train the model to predict, at each position, the token `distance` steps before."""
    draw = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 30) * (1 - 0.9 * step / steps)
        tokens = torch.randint(TOKENS, (BATCH, LENGTH), generator=draw)
        loss = F.cross_entropy(*asked(model(tokens), tokens, distance))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def asked(logits: Tensor, tokens: Tensor, distance: int) -> tuple[Tensor, Tensor]:
    """Align the logits with their targets, the tokens `distance` steps before."""
    return logits[:, distance:].flatten(0, 1), tokens[:, : LENGTH - distance].flatten()


def measure(model: nn.Module, distance: int) -> dict[str, float]:
    """Measure accuracy and influence on held-out sequences."""
    model.eval()
    tokens = torch.randint(TOKENS, (64, LENGTH), generator=torch.Generator().manual_seed(SEED + 1))
    with torch.no_grad():
        logits, targets = asked(model(tokens), tokens, distance)
    reach = ch.influence(model, tokens[:8])
    share = reach[:, LENGTH - 1 - distance] / reach.sum(-1)
    return {
        "accuracy": round((logits.argmax(-1) == targets).float().mean().item(), 4),
        "influence": round(share.mean().item(), 4),
    }


def rows(steps: int) -> Iterator[dict[str, Any]]:
    for distance in DISTANCES:
        for kind, make in KINDS.items():
            torch.manual_seed(SEED)
            model, start = make(), time.process_time()
            train(model, distance, steps)
            yield {
                "distance": distance,
                "model": kind,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                **measure(model, distance),
                "seconds": round(time.process_time() - start, 1),
            }


def table(found: list[dict[str, Any]]) -> str:
    """The result as a table in Markdown."""
    lines = [
        "| d | GPT accuracy | RNN accuracy | GPT influence | RNN influence |",
        "|---|---|---|---|---|",
    ]
    for distance in DISTANCES:
        pair = {row["model"]: row for row in found if row["distance"] == distance}
        cells = [f"{pair[kind][name]:.2f}" for name in ("accuracy", "influence") for kind in KINDS]
        lines.append("| " + " | ".join([str(distance), *cells]) + " |")
    return "\n".join(lines)


# The figure: two panels, each with a line for each model, in colours safe for the colour-blind.
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 180, 46, 34, 74
COLOURS = {"gpt": "#0072B2", "rnn": "#D55E00"}


def figure(found: list[dict[str, Any]]) -> str:
    """Draw accuracy and influence against the distance."""
    whole = 2 * WIDTH + GAP + LEFT + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {HEIGHT + 84}" '
        'font-family="sans-serif" font-size="12" role="img">',
        "<title>Recall of a token seen d steps before: GPT and RNN</title>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    panels = {
        "accuracy": "Accuracy (chance: 0.125)",
        "influence": "Share of influence from the token d back",
    }
    for number, (name, title) in enumerate(panels.items()):
        left = LEFT + number * (WIDTH + GAP)
        parts += _axes(left, title)
        for kind, colour in COLOURS.items():
            values = [row[name] for row in found if row["model"] == kind]
            parts += _line(left, values, colour, kind.upper())
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(left: int, title: str) -> Iterator[str]:
    yield f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{title}</text>'
    for tick in (0, 0.5, 1):
        y = TOP + HEIGHT * (1 - tick)
        yield f'<path d="M{left} {y}h{WIDTH}" stroke="#ccc"/>'
        yield f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{tick}</text>'
    for number, distance in enumerate(DISTANCES):
        yield (
            f'<text x="{_x(left, number):.1f}" y="{TOP + HEIGHT + 18}" '
            f'text-anchor="middle">{distance}</text>'
        )
    x, y = left + WIDTH / 2, TOP + HEIGHT + 38
    yield f'<text x="{x}" y="{y}" text-anchor="middle">d, steps back</text>'


def _line(left: int, values: list[float], colour: str, name: str) -> Iterator[str]:
    points = [(_x(left, n), TOP + HEIGHT * (1 - value)) for n, value in enumerate(values)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in points:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
    x, y = points[-1]
    yield f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{colour}">{name}</text>'


def _x(left: int, number: int) -> float:
    return left + WIDTH * number / (len(DISTANCES) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training ({STEPS})")
    parser.add_argument("--redraw", action="store_true", help="draw the last result again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.redraw:
        found = []
        for row in rows(arguments.steps):
            print(json.dumps(row), flush=True)
            found.append(row)
        settings = dict(tokens=TOKENS, length=LENGTH, steps=arguments.steps, batch=BATCH, rate=RATE)
        document = {
            "settings": {**settings, "seed": SEED},
            "machine": machine.facts(cpu_time=True),
            "rows": found,
        }
        write(RESULT, json.dumps(document, indent=1) + "\n")
    found = json.loads(RESULT.read_text())["rows"]
    print(table(found))
    write(FIGURE, figure(found))


if __name__ == "__main__":
    main()
