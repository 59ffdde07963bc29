"""`clearhead info`: versions, threads, and which implementations can serve here."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from typing import Any

from clearhead.cli.arguments import examples

HELP = "versions, threads, implementations and instruction sets of this machine"
OPTIONAL = ("transformers", "gguf", "pyarrow", "onnx")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `clearhead info`."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    examples(parser, "clearhead info", "clearhead info --json")


def run(arguments: argparse.Namespace) -> int:
    """Print what is installed and what it runs on."""
    from clearhead.views import render_info

    facts = collect()
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        render_info(facts)
    return 0


def collect() -> dict[str, Any]:
    """Return the facts as one JSON-ready dictionary."""
    import torch

    import clearhead
    from clearhead.attention import available

    return {
        "clearhead": clearhead.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "implementations": available(),
        "optional": {name: _version(name) for name in OPTIONAL},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
