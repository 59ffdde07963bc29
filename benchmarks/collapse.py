"""A GPT that is driven into entropy collapse, and what its heads show before the loss does.

    python benchmarks/collapse.py [--steps 500] [--peak 0.1]
    python benchmarks/collapse.py --write   # docs/training.md and docs/collapse.svg

A character GPT (2 layers of 4 heads, width 64, no QK norm) learns the pages of docs/. The learning
rate of its query and key projections warms up to a peak that is far too high; all other weights
have 0.003. The same run is made with QK-clip after every step. Both see the same batches.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
import page

LENGTH, BATCH, RATE, TAU = 64, 8, 0.003, 10.0
# The loss is the mean over so many steps; it shows the collapse where it is RISE above its least.
SMOOTH, RISE = 25, 0.1
HERE = Path(__file__).parent
PAGE, FIGURE = HERE.parent / "docs" / "training.md", HERE.parent / "docs" / "collapse.svg"
# The pages that are learned: a list, so that a new page changes no number.
TEXTS = ("lesson.md", "watch.md", "scan.md", "words.md", "recipes.md", "all-of-clearhead.md")


class Run(NamedTuple):
    """What one training showed at each step."""

    loss: Tensor
    entropy: Tensor  # of the head with the least
    logit: Tensor  # of the head with the largest
    alarms: list[Any]

    @property
    def smooth(self) -> Tensor:
        """The mean loss of the last steps."""
        return self.loss.unfold(0, SMOOTH, 1).mean(-1)

    def shown(self) -> int | None:
        """The step at which the loss shows it."""
        risen = self.smooth > self.smooth.cummin(0).values + RISE
        return int(risen.nonzero()[0]) + SMOOTH - 1 if risen.any() else None

    def alarmed(self, kind: str) -> int | None:
        """The step of the first alarm of a kind."""
        return min((alarm.step for alarm in self.alarms if alarm.kind == kind), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--peak", type=float, default=0.1)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = {
        name: train(arguments.steps, arguments.peak, clip)
        for name, clip in (("without QK-clip", False), ("with QK-clip", True))
    }
    text = table(runs, arguments)
    print(text)
    if arguments.write:
        page.place(PAGE, text, "experiment")
        draw(runs)
        print(f"Wrote {FIGURE}")


def train(steps: int, peak: float, clip: bool) -> Run:
    """Train on the same batches each time."""
    text = "".join((HERE.parent / "docs" / name).read_text("utf-8") for name in TEXTS)
    characters = sorted(set(text))
    ids = torch.tensor([characters.index(x) for x in text])
    torch.manual_seed(0)
    model = ch.models.GPT(len(characters), layers=2, heads=4, width=64, length=LENGTH, dropout=0.0)
    chosen = [x for n, x in model.named_parameters() if "query_layer" in n or "key_layer" in n]
    others = [x for x in model.parameters() if not any(x is y for y in chosen)]
    groups = [{"params": others, "lr": RATE}, {"params": chosen}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.0)
    draws, losses = torch.Generator().manual_seed(0), []
    monitor = ch.monitor(model, alarms=lambda alarm: None, steps=steps)
    for step in range(steps):
        optimizer.param_groups[1]["lr"] = RATE + (peak - RATE) * step / steps
        at = torch.randint(len(ids) - LENGTH, (BATCH,), generator=draws)
        windows = ids[at[:, None] + torch.arange(LENGTH + 1)]
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if clip:
            clip_scores(model, monitor.history[-1][1][..., 0].float())
    monitor.close()
    values = torch.stack([x for _, x in monitor.history])
    least, most = values[..., 1].amin((1, 2)), values[..., 0].amax((1, 2))
    return Run(torch.tensor(losses), least, most, monitor.alarms)


@torch.no_grad()
def clip_scores(model: Any, logits: Tensor) -> None:
    """QK-clip: scale query and key of each head whose largest logit is above TAU."""
    for block, largest in zip(model.blocks, logits, strict=True):
        factor = torch.where(largest > TAU, TAU / largest, 1.0).sqrt()
        for layer in (block.attention.query_layer, block.attention.key_layer):
            layer.weight.unflatten(0, (len(factor), -1)).mul_(factor[:, None, None])


def table(runs: dict[str, Run], arguments: argparse.Namespace) -> str:
    """Both runs side by side."""
    rows: list[tuple[str, list[Any]]] = [
        ("least loss", [f"{x.smooth.min():.2f}" for x in runs.values()]),
        ("last loss", [f"{x.smooth[-1]:.2f}" for x in runs.values()]),
        ("largest logit", [f"{x.logit.max():,.0f}" for x in runs.values()]),
        ("least entropy of a head, nats", [f"{x.entropy.min():.3f}" for x in runs.values()]),
        ("`logit_growth` at step", [x.alarmed("logit_growth") for x in runs.values()]),
        ("`entropy_collapse` at step", [x.alarmed("entropy_collapse") for x in runs.values()]),
        (f"the loss rises by {RISE} at step", [x.shown() for x in runs.values()]),
    ]
    about = (
        f"{arguments.steps} steps; the rate of query and key goes from {RATE:g} to "
        f"{arguments.peak:g}, tau is {TAU:g}. Losses are means over {SMOOTH} steps, in nats."
    )
    lines = ["|  | " + " | ".join(runs) + " |", "|---" * (len(runs) + 1) + "|"]
    for name, cells in rows:
        shown = ("never" if cell is None else str(cell) for cell in cells)
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join([about, "", *lines])


def draw(runs: dict[str, Run]) -> None:
    """The loss, the largest logit and the least entropy of both runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "clearhead"
    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(7, 6.5))
    panels = ("loss, nats", "largest logit", "least entropy, nats")
    for name, run in runs.items():
        steps = range(len(run.loss))
        axes[0].plot(steps[SMOOTH - 1 :], run.smooth, label=name)
        axes[1].semilogy(steps, run.logit)
        axes[2].semilogy(steps, run.entropy)
    first = next(iter(runs.values()))
    marks = {"logit_growth": "C3", "entropy_collapse": "C4"}
    for axis, panel in zip(axes, panels, strict=True):
        axis.set_ylabel(panel)
        axis.grid(alpha=0.3)
        for kind, color in marks.items():
            if (at := first.alarmed(kind)) is not None:
                label = f"alarm: {kind}" if axis is axes[0] else None
                axis.axvline(at, color=color, linestyle="--", label=label)
        if (at := first.shown()) is not None:
            label = "the loss shows it" if axis is axes[0] else None
            axis.axvline(at, color="black", linestyle=":", label=label)
    axes[0].legend(fontsize=8)
    axes[2].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
