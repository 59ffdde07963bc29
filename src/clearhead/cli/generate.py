"""`clearhead generate PROMPT`: continue a text, character by character."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from clearhead._core import value_error
from clearhead.cli.arguments import add_text, examples, named, note, text_of

HELP = "continue a text with a trained model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_text(parser, "PROMPT", "the beginning of the text")
    parser.add_argument("--model", metavar="DIR", help="a trained model (the shipped GPT)")
    parser.add_argument(
        "--tokens", type=int, metavar="N", default=200, help="how many to add (200)"
    )
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="below 1: safer, above: wilder (0.8)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest only")
    parser.add_argument("--seed", type=int, metavar="N", help="makes the draw repeatable (0)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads to use (1 for a small model)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    examples(
        parser,
        "clearhead generate hell",
        'clearhead generate "the bell" --tokens 80 --greedy',
        'clearhead generate "once" --model tale-gpt --temperature 0.5 --seed 3',
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and what the model adds to it, as it comes."""
    from clearhead import models

    choice = _choice(arguments)
    prompt = text_of(arguments, "PROMPT")
    with named(model="--model"):
        model = _load(arguments.model)
    with named(text="PROMPT", prompt="PROMPT", tokens="--tokens", top_k="--top-k",
               threads="--threads", model="--model"):  # fmt: skip
        pieces = models.stream(model, prompt, arguments.tokens, threads=arguments.threads, **choice)
    if arguments.json:
        added = "".join(pieces)
        document = {"prompt": prompt, "added": added, "model": model.name, **choice}
        print(json.dumps(document))
        return 0
    if model.name == "gpt" and len(prompt) > model.length:
        note(f"the model reads the last {model.length} characters")
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
        if getattr(sys.stdout, "lost", False):
            break  # the reader has closed the pipe
    print()
    return 0


def _load(spec: str | None) -> Any:
    from clearhead import models

    if spec is not None and not Path(spec).expanduser().is_dir():
        raise models.missing_model(spec)
    return models.load(spec)


def _choice(arguments: argparse.Namespace) -> dict:
    """Check what the draw is set to, before a model is loaded."""
    if arguments.greedy and (arguments.temperature is not None or arguments.top_k is not None):
        raise value_error("--greedy", "takes the likeliest; --temperature and --top-k need a draw")
    temperature = 0.8 if arguments.temperature is None else arguments.temperature
    if not 0 < temperature < float("inf"):
        hint = "--greedy always takes the likeliest"
        raise value_error("--temperature", "needs to be above 0", got=temperature, hint=hint)
    if not 0 <= (arguments.seed or 0) < 2**63:
        raise value_error("--seed", "needs to be 0 or more, below 2**63", got=arguments.seed)
    if arguments.greedy and arguments.seed is not None:
        note("--seed has no use: --greedy draws nothing")
    return {
        "temperature": 0.0 if arguments.greedy else temperature,
        "top_k": arguments.top_k,
        "seed": arguments.seed or 0,
    }
