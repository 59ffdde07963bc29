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
from typing import NoReturn

__all__ = ["COMMANDS", "main"]

COMMANDS = ("look", "mask", "train", "generate", "scan", "heads", "audit", "info")
OK, MISUSE = 0, 2
EPILOG = """\
start with:  clearhead look hell
a command:   clearhead COMMAND --help
exit codes:  0 ok, 1 a finding, 2 misuse, 130 stopped
an error:    CLEARHEAD_TRACEBACK=1 shows where it arose"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Exit codes: 0 ok, 1 a finding, 2 misuse, 130 stopped."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return MISUSE
    from clearhead.views import any_encoding

    if sys.stdout is None:  # closed by who started us, as a daemon's may be
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        with any_encoding():
            code = arguments.run(arguments)
            # Here, because a closed pipe may show only now.
            sys.stdout.flush()
        return code
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ")
        if words != message and not words.startswith("-"):
            message += '\n  to do: put several words in quotes, as in clearhead look "hello world"'
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    from clearhead import __version__

    parser = _Parser(
        prog="clearhead",
        description="Attention that you can see through.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"clearhead {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name in COMMANDS:
        module = import_module(f"clearhead.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
