"""`clearhead audit SPEC`: does anything flow through a model that must not?"""

from __future__ import annotations

import argparse
import inspect
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead._core import value_error
from clearhead.cli.arguments import examples, named
from clearhead.views.json import document

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.dependence import Report

HELP = "prove that a model sees nothing that it must not see (exit code 1: it does)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `clearhead audit`."""
    parser.add_argument(
        "spec",
        metavar="SPEC",
        nargs="?",
        help="a model directory, a Hugging Face id, a GGUF file, or package.module:factory, where "
        "the factory gives a model or (model, inputs) (default: the GPT that is shipped)",
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--allowed",
        metavar="EXPR",
        help='who may see whom, as a mask: "causal & window(4)" (default: causal)',
    )
    asked.add_argument("--padding", action="store_true", help="does padding change what is real?")
    asked.add_argument("--batch", action="store_true", help="do samples of a batch see each other?")
    asked.add_argument(
        "--documents", metavar="IDS", help="packed documents, a number a position: 0,0,0,1,1"
    )
    asked.add_argument("--generation", action="store_true", help="cached decoding against one pass")
    asked.add_argument("--modes", action="store_true", help="train, eval and backends compared")
    parser.add_argument("--depth", type=int, metavar="N", help="compose the mask over N layers (1)")
    parser.add_argument("--budget", type=int, metavar="N", help="run at most N changed inputs")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="TEXT", help="the text to read (default: random tokens)")
    source.add_argument(
        "--length", type=int, metavar="N", default=32, help="the number of random tokens (32)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    examples(
        parser,
        "clearhead audit",
        'clearhead audit tale-gpt --text "a yellow bell"',
        "clearhead audit tale-bert --allowed everything",
        'clearhead audit my.model:make --allowed "causal & window(4)" --depth 2',
        "clearhead audit my.model:make --documents 0,0,0,1,1",
    )


def run(arguments: argparse.Namespace) -> int:
    """Audit, print, and exit with 1 if something leaks."""
    with named(depth="--depth", budget="--budget", allowed="--allowed", expression="--allowed"):
        report = audit_spec(arguments)
    if arguments.json:
        print(document(report.as_dict()))
    else:
        render(report)
    return 0 if report.ok else 1


def audit_spec(arguments: argparse.Namespace) -> Report:
    """Load the model, make the inputs, and ask the question that was named."""
    from clearhead import masks
    from clearhead.dependence import audit

    _only_with_edges(arguments)
    ids = _numbers(arguments.documents) if arguments.documents is not None else None
    length = len(ids) if ids else arguments.length
    allowed = masks.parse(arguments.allowed or "causal")
    model, inputs = _load(arguments.spec, arguments.text, length)
    from clearhead.models.threads import small_threads

    with small_threads(model, length):
        if arguments.padding:
            return audit.padding(model, _maskable(model, inputs))
        if arguments.batch:
            return audit.batch(model, inputs)
        if arguments.generation:
            return audit.generation(model, inputs)
        if arguments.modes:
            return audit.modes(model, inputs)
        depth = 1 if arguments.depth is None else arguments.depth
        options = {"depth": depth, "budget": arguments.budget}
        if ids is not None:
            return audit.documents(model, _placed(model, inputs, ids), ids, **options)
        return audit(model, inputs, allowed, **options)


def _only_with_edges(arguments: argparse.Namespace) -> None:
    """Refuse an option that the named question would leave unread."""
    asked = [n for n in ("padding", "batch", "generation", "modes") if getattr(arguments, n)]
    given = [n for n in ("depth", "budget") if getattr(arguments, n) is not None]
    if asked and given:
        raise value_error(
            f"--{given[0]}",
            f"says nothing to --{asked[0]}, which compares a fixed set of runs",
            got=getattr(arguments, given[0]),
            hint="leave it out, or ask with --allowed or --documents",
        )


def _load(spec: str | None, text: str | None, length: int) -> tuple[Any, Any]:
    if spec and ":" in spec and not Path(spec).exists():
        if text is not None:
            raise value_error(
                "--text",
                "needs a model with a tokenizer",
                got=repr(spec),
                hint="let the factory give (model, inputs)",
            )
        return _made(spec, length)
    from clearhead.views.reader import KINDS, load

    _refuse_bare_module(spec)
    reader = load(spec, "SPEC", f"{KINDS}, or package.module:factory, which makes one")
    if text is not None:
        import torch

        with named(text="--text"):
            ids = reader.encode(text)
        if not ids:
            raise value_error("--text", "needs at least one token", got=repr(text))
        reader.must_fit("--text", len(ids))
        return reader.model, _named(reader.model, torch.tensor([ids]))
    reader.must_fit("--length", length)
    return reader.model, _named(reader.model, _random_tokens(reader.model, length))


def _refuse_bare_module(spec: str | None) -> None:
    """Say that a factory is missing, where a module is named and no model has that name."""
    if spec is None or not all(map(str.isidentifier, spec.split("."))) or Path(spec).exists():
        return
    sys.path.insert(0, "")
    try:
        found = find_spec(spec)
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.remove("")
    if found is not None:
        hint = f"name what makes the model in it, as in {spec}:make"
        raise value_error("SPEC", "is a Python module, and not yet a model", got=spec, hint=hint)


def _made(spec: str, length: int) -> tuple[Any, Any]:
    """Import `package.module:factory`, from the current directory too, and call it."""
    home, _, name = spec.partition(":")
    sys.path.insert(0, "")
    try:
        made = getattr(import_module(home), name)
    except (ImportError, AttributeError) as error:
        raise value_error(
            "SPEC", "names nothing that can be imported", got=repr(spec), hint=str(error)
        ) from error
    finally:
        sys.path.remove("")
    from torch import nn

    made = made if isinstance(made, nn.Module) else made()
    if isinstance(made, tuple):
        return made
    return made, _random_tokens(made, length)


def _random_tokens(model: Any, length: int) -> Tensor:
    import torch
    from torch import nn

    if length < 1:
        raise value_error("--length", "must be at least 1", got=length)
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if not embeddings:
        raise value_error(
            "SPEC",
            "has no embedding, so there are no tokens to make up",
            hint="let the factory give (model, inputs)",
        )
    # The table of tokens is the first, as a rule; that of positions comes after it.
    size = embeddings[0].num_embeddings
    return torch.randint(size, (1, length), generator=torch.Generator().manual_seed(0))


def _named(model: Any, inputs: Any) -> Any:
    """Give the arguments as a dict under the model's own names."""
    if isinstance(inputs, dict):
        return inputs
    names = list(inspect.signature(getattr(model, "forward", model)).parameters)
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    return dict(zip(names, values, strict=False))


def _maskable(model: Any, inputs: Any) -> dict[str, Any]:
    """Give the arguments of a model that can be told what is padding; refuse any other."""
    takes = inspect.signature(getattr(model, "forward", model)).parameters
    any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    if "attention_mask" not in takes and not any_name:
        raise value_error(
            "--padding",
            "needs a model that takes attention_mask",
            got=f"{type(model).__name__}({', '.join(takes)})",
            hint="let a factory give a model that does; audit.padding(..., mask=NAME) knows others",
        )
    return _named(model, inputs)


def _placed(model: Any, inputs: Any, ids: list[int]) -> Any:
    """Say where each document begins, to a model that takes position ids."""
    inputs = _named(model, inputs)
    if "position_ids" in inspect.signature(getattr(model, "forward", model)).parameters:
        import torch

        places, start = [], 0
        for n, document in enumerate(ids):
            start = n if n and document != ids[n - 1] else start
            places.append(n - start)
        inputs = {**inputs, "position_ids": torch.tensor([places])}
    return inputs


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers:
        raise value_error("--documents", "must be numbers with commas, 0,0,1,1", got=repr(text))
    return numbers


def render(report: Report) -> None:
    """Print the report, its findings as a table."""
    from rich.table import Table
    from rich.text import Text

    from clearhead.views.terminal import Terminal

    console = Terminal()
    headline = str(report).splitlines()[0]
    console.print(Text(headline, style="bold green" if report.ok else "bold red"))
    if report.findings:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("output", "depends on", "moved by", "rounding", "first in"):
            table.add_column(name, overflow="fold")
        for f in report.findings:
            cells = (f.query, f.source, f"{f.size:.3g}", f"{f.floor:.1g}", f.module)
            table.add_row(*(Text(str(cell)) for cell in cells))
        console.print(table)
        if report.moved > len(report.findings):
            console.print(f"and {report.moved - len(report.findings)} more")
        for hint in dict.fromkeys(f.hint for f in report.findings if f.hint):
            console.print(Text(hint))
    # The lines below the findings, as the report itself words them.
    for line in str(replace(report, findings=[], moved=0)).splitlines()[1:]:
        console.print(Text(line))
