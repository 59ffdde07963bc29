"""The time of a complete causal audit, in seconds and in plain forwards.

    python benchmarks/audit.py [--model DIRECTORY]

Without a directory it audits a model with the sizes of SmolLM2-135M and random weights, which takes
as long. Times are CPU times, which other processes affect little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import machine
from clearhead.dependence import audit
from clearhead.models import GPT


def seconds(run: Callable[[], Any], times: int) -> float:
    """The median CPU time of a call, after a warm-up call."""
    run()
    spent = []
    for _ in range(times):
        start = time.process_time()
        run()
        spent.append(time.process_time() - start)
    return statistics.median(spent)


def row(name: str, model: Any, ids: torch.Tensor, goal: str) -> str:
    with torch.no_grad():
        forward = seconds(lambda: model(ids), 5)
    reports = []
    whole = seconds(lambda: reports.append(audit(model, ids)), 3)
    report = reports[-1]
    assert report.ok, report
    assert report.covered == 1, report
    return (
        f"{name:<22} {ids.shape[1]:>4} {report.pairs:>7} {forward * 1e3:>9.1f} ms {whole:>7.2f} s"
        f" {whole / forward:>7.1f}  {goal}"
    )


def smollm2(directory: str | None) -> Any:
    import transformers

    if directory:
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="the directory of SmolLM2-135M")
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    print(machine.line(cpu_time=True))
    print(f"{'model':<22} {'T':>4} {'pairs':>7} {'forward':>12} {'audit':>9} {'ratio':>7}  goal")
    ids = torch.randint(65, (1, 128), generator=generator)
    print(row("GPT of default size", GPT(65).eval(), ids, "2 s"))
    ids = torch.randint(49152, (1, 256), generator=generator)
    print(row("SmolLM2-135M", smollm2(arguments.model).eval(), ids, "25 forwards"))


if __name__ == "__main__":
    main()
