"""`clearhead look TEXT`: what a model predicts, and where the chosen position looks."""

from __future__ import annotations

import argparse
import sys

from clearhead._core import value_error
from clearhead.cli.arguments import add_text, examples, named, new_file, text_of

HELP = "what the model predicts for a text, and where a position looks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `clearhead look`."""
    add_text(parser, "TEXT", "the text to read")
    parser.add_argument(
        "--model",
        metavar="SPEC",
        help="a checkpoint directory, a Hugging Face directory or id, or a GGUF file "
        "(default: the GPT that is shipped)",
    )
    parser.add_argument(
        "--at",
        type=int,
        metavar="POSITION",
        help="the position that looks (default: the last; negative counts from the end)",
    )
    parser.add_argument(
        "--layer", type=int, metavar="L", help="the layer shown (default: the last)"
    )
    parser.add_argument(
        "--head", type=int, metavar="H", help="the head shown (default: the mean over heads)"
    )
    parser.add_argument(
        "--top", type=int, default=5, metavar="K", help="how many predictions and sources (5)"
    )
    parser.add_argument(
        "--without",
        metavar="L.H",
        action="append",
        default=[],
        help="the predictions without a head, as 18.6; several with commas",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--html", metavar="FILE", help="also write a page for a browser")
    parser.add_argument("--force", action="store_true", help="overwrite a page that exists")
    examples(
        parser,
        "clearhead look hell",
        'clearhead look "a yellow bell" --at -3 --layer 1 --head 2',
        'clearhead look "he[MASK]lo" --model tale-bert',
        "clearhead look hell --without 3.1,2.2",
        "clearhead look --file page.txt --model HuggingFaceTB/SmolLM2-135M",
    )


def run(arguments: argparse.Namespace) -> int:
    """Look, then print as text or JSON."""
    if arguments.top < 1:
        raise value_error("--top", "must be at least 1", got=arguments.top)
    without = [_head(part) for given in arguments.without for part in given.split(",")]
    text = text_of(arguments, "TEXT")
    from clearhead.views import document, look_at, open_reader, render_look, view_of_text

    page = None if arguments.html is None else new_file("--html", arguments.html, arguments.force)

    with named(model="--model"):
        reader = open_reader(arguments.model)
    chosen = {name: getattr(arguments, name) for name in ("at", "layer", "head", "top")}
    options = {name: f"--{name}" for name in ("at", "layer", "head", "without")}
    with named(text="TEXT", tokens="TEXT", **options):
        seen = look_at(reader, text, without=without, **chosen)
    if arguments.json:
        print(document(seen))
    else:
        render_look(seen)
    if page is not None:
        ids = [token["id"] for token in seen["tokens"]]
        view_of_text(reader, ids, seen).save(page, force=arguments.force)
        print(f"Wrote {page}", file=sys.stderr if arguments.json else None)
    return 0


def _head(text: str) -> tuple[int, int]:
    layer, dot, head = text.strip().partition(".")
    if not (dot and layer.isdecimal() and head.isdecimal()):
        hint = "give LAYER.HEAD, as in --without 18.6"
        raise value_error("--without", "names a head", got=repr(text), hint=hint)
    return int(layer), int(head)
