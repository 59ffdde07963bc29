"""The cost of `clearhead scan` relative to the plain forward, and its throughput.

    python benchmarks/scan.py DIRECTORY TEXT [--nth 8] [--batch 32] [--by paragraph]
    python benchmarks/scan.py DIRECTORY TEXT --write    # results/scan.json, and the docs' table

Every nth batch of the text's first window is run, whose lengths are about those of the whole text.
The model alone and the scan of the same batch are timed in turns in one process. The plain forward
computes the last logits only and keeps no cache. Times are CPU times of all threads, which other
processes affect little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import machine
import page
import table
from clearhead.heads import Survey
from clearhead.heads.corpus.corpus import Corpus
from clearhead.heads.corpus.job import WINDOW
from clearhead.heads.corpus.sequences import ResumePoint, Sequences, batch_of, batches, windows
from clearhead.views import open_reader

HERE = Path(__file__).parent
RESULT, PAGE = HERE / "results" / "scan.json", HERE.parent / "docs" / "scan.md"


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a scan relative to the model alone.")
    parser.add_argument("model", metavar="DIRECTORY")
    parser.add_argument("text", type=Path)
    parser.add_argument("--nth", type=int, default=8, help="run every nth batch of the window")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--by", choices=("line", "paragraph"), default="paragraph")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--write", action="store_true", help=f"save the result, and write it into {PAGE.name}"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = measure(given)
    written = "\n".join(lines(given, found))
    print(written)
    if given.write:
        asked = {name: value for name, value in vars(given).items() if name != "write"}
        asked |= {"model": Path(given.model).name, "text": given.text.name}
        document = {"facts": machine.facts(cpu_time=True), "asked": asked, "found": found}
        table.write(RESULT, json.dumps(document, indent=1) + "\n")
        page.place(PAGE, written)


@torch.no_grad()
def measure(given: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds of the model alone and of the scan, over the same batches."""
    reader = open_reader(given.model)
    corpus = Corpus(given.text, format="text", by=given.by, field="text")
    every = Sequences(corpus, reader.encode, given.length, None).since(ResumePoint())
    survey, plain, scan, used = Survey(reader.model), 0.0, 0.0, 0
    window = next(windows(every, WINDOW))
    survey.read(batch_of(window[:1]))  # the choice of the layers is part of neither
    for sequences in list(batches(window, given.batch))[given.nth // 2 :: given.nth]:
        batch = batch_of(sequences)
        plain += seconds(partial(survey.run, batch))
        scan += seconds(partial(add, survey, batch, sequences))
        used += 1
    share = survey.tokens / sum(len(sequence.tokens) for sequence in window)
    return {
        "bytes": share * window[-1].share * corpus.size, "tokens": survey.tokens, "batches": used,
        "sequences": survey.sequences, "plain": plain, "scan": scan,
    }  # fmt: skip


def add(survey: Survey, batch: Any, sequences: list[Any]) -> None:
    """Process a batch as a scan does."""
    moments = survey.read(batch)[: len(sequences)]
    survey.count(moments, sum(len(sequence.tokens) for sequence in sequences))


def seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def lines(given: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    """The results as a table."""
    plain, scan, size = found["plain"], found["scan"], found["bytes"] / 1e6
    return [
        f"{Path(given.model).name}, {size * 1e3:.0f} kB by {given.by}, --length {given.length}, "
        f"--batch {given.batch}: {found['sequences']:,} sequences in {found['batches']:,} batches, "
        f"{found['tokens']:,} tokens.",
        "",
        "| | CPU seconds | MB per hour | tokens per second |",
        "|---|---|---|---|",
        *(
            f"| {name} | {took:.1f} | {3600 * size / took:.2f} | {found['tokens'] / took:.0f} |"
            for name, took in (("the model alone", plain), ("scan", scan))
        ),
        "",
        f"The scan takes {100 * (scan / plain - 1):.0f}% more time than the model alone. "
        f"Measured on: {machine.line(cpu_time=True)}",
    ]


if __name__ == "__main__":
    main()
