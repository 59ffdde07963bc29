"""The command `clearhead`: one file per subcommand, and one place from error to exit code.

A command module has `HELP` (one line), `add_arguments(parser)` and `run(arguments) -> int`.
It imports torch inside `run`, so that `clearhead --help` is quick.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NoReturn

__all__ = ["COMMANDS", "main", "process"]

COMMANDS = ("look", "mask", "train", "generate", "scan", "heads", "audit", "view", "info")
MISUSE, STOPPED = 2, 130
EPILOG = """\
start with:  clearhead look hell
a command:   clearhead COMMAND --help
exit codes:  0 ok, 1 a finding, 2 misuse, 130 stopped
             3 could not be audited (audit alone)
an error:    CLEARHEAD_TRACEBACK=1 shows where it arose"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Exit codes: 0 ok, 1 a finding, 2 misuse, 130 stopped."""
    from clearhead.views import output_streams

    with output_streams():
        return _main(argv)


def process() -> int:
    """Run the command line as a process: an unexpected exception must not be exit code 1."""
    from clearhead.views import output_streams

    with output_streams():
        try:
            return _main(None)
        except (KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit):
                raise
            return STOPPED
        except BaseException as error:  # of a model, such as GeneratorExit
            return _failed("", f"{type(error).__name__}: {error}")


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return MISUSE
    try:
        code = arguments.run(arguments)
        # Inside the try block, because a full disk may become visible only now.
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return STOPPED
    except SystemExit as error:
        return _failed(
            f" {arguments.command}", f"the code of a model called sys.exit({error.code!r})"
        )
    except (ValueError, TypeError, OSError, ImportError, MemoryError, RuntimeError) as error:
        return _failed(f" {arguments.command}", str(error) or type(error).__name__)


def _failed(command: str, message: str) -> int:
    if os.environ.get("CLEARHEAD_TRACEBACK"):
        traceback.print_exc(file=sys.stderr)
    # In one write, so that the messages of several processes do not run into each other.
    sys.stderr.write(f"clearhead{command}: {message}\n")
    return MISUSE


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ")
        if words != message and not words.startswith("-"):
            message += '\n  to do: put several words in quotes, as in clearhead look "hello world"'
        elif close := self._close(message):
            message += f"\n  to do: did you mean {close}?"
        super().error(message)

    def _close(self, message: str) -> str:
        """Give the command or option that a mistyped one is close to, or nothing."""
        given = re.search(r"COMMAND: invalid choice: '(.*?)'|arguments: (--[^\s=]+)", message)
        if given is None:
            return ""
        known = COMMANDS if given[1] else [*self._option_string_actions]
        return next(iter(get_close_matches(given[1] or given[2], known, 1)), "")


def _parser() -> argparse.ArgumentParser:
    from clearhead import __version__

    parser = _Parser(
        prog="clearhead",
        description="Attention that you can see through.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="version", version=f"clearhead {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name in COMMANDS:
        module = import_module(f"clearhead.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser
