"""The command `clearhead`: one file per subcommand, and one place from error to exit code.

A command module has `HELP` (one line), `add_arguments(parser)` and `run(arguments) -> int`.
It imports torch inside `run`, so that `clearhead --help` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

__all__ = ["COMMANDS", "main"]

COMMANDS = ("look", "mask", "train", "generate", "scan", "heads", "audit", "info")
OK, MISUSE = 0, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Exit codes: 0 ok, 1 a finding, 2 misuse."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except BrokenPipeError:
        # The reader of a pipe went away (`clearhead look hell | head -3`): that is no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, ImportError, MemoryError, RuntimeError) as error:
        if os.environ.get("CLEARHEAD_TRACEBACK"):
            raise
        print(f"clearhead {arguments.command}: {error}", file=sys.stderr)
        return MISUSE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="clearhead", description="Attention that you can see through."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = import_module(f"clearhead.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
