"""What the arguments of commands share: the text to read, notes, and option names in errors."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clearhead._core import value_error

__all__ = ["add_text", "examples", "labels_in", "named", "new_file", "note", "text_of"]


def examples(parser: argparse.ArgumentParser, *lines: str, notes: str = "") -> None:
    """Close the help of a command with notes and examples."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(
        [*([notes] if notes else []), "examples:", *(f"  {x}" for x in lines)]
    )


def add_text(parser: argparse.ArgumentParser, metavar: str, words: str) -> None:
    """Declare a text that is given, read from standard input, or from a file."""
    parser.add_argument(
        "text", metavar=metavar, nargs="?", help=f"{words} (- reads standard input)"
    )
    parser.add_argument("--file", metavar="FILE", help=f"read {metavar} from a file in UTF-8")


def text_of(arguments: argparse.Namespace, metavar: str) -> str:
    """Return the text of `add_text`, without the line end that closes a file or an input."""
    given, file = arguments.text, arguments.file
    if (given is None) == (file is None):
        rule = "is needed" if given is None else f"and --file are two texts, {metavar} is one"
        raise value_error(metavar, rule, hint=f"give {metavar}, - or --file FILE")
    if file is not None:
        from clearhead.models import read_text

        with named(file="--file"):
            return read_text(file).removesuffix("\n")
    if given == "-" and sys.stdin is None:
        raise value_error(metavar, "cannot be read, as standard input is closed", hint="give it")
    if given == "-":
        return _standard_input(metavar).removesuffix("\n")
    if "." in given and _is_file(given):
        note(f"{given} is read as a text; --file {given} reads the file")
    return given


def _standard_input(metavar: str) -> str:
    """Read standard input; undecodable bytes are an error, or (in some locales) surrogates."""
    try:
        text = sys.stdin.read()
        text.encode()
    except UnicodeError as error:
        encoding = (sys.stdin.encoding or "utf-8").upper()
        hint = f"convert it to {encoding} first, for example with iconv"
        rule = f"standard input is not {encoding}"
        raise value_error(metavar, rule, got=_undecodable_byte(error), hint=hint) from None
    return text


def _undecodable_byte(error: UnicodeError) -> str:
    """Return the first byte that could not be decoded."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.object[error.start]:#04x}"
    assert isinstance(error, UnicodeEncodeError)
    # A locale with surrogateescape decodes byte 0x80 as the surrogate U+DC80.
    return f"byte {ord(error.object[error.start]) & 0xFF:#04x} at character {error.start}"


def note(text: str) -> None:
    """Print a note to standard error."""
    print(f"note: {text}", file=sys.stderr)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def labels_in(option: str, name: str) -> Any:
    """Read the labels of positions from a JSON file that an option names."""
    path = Path(name).expanduser()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise value_error(option, f"is a file of JSON ({error})", got=str(path)) from None
    lists = found if isinstance(found, list) else [None]
    flat = [x for each in lists for x in (each if isinstance(each, list) else [each])]
    if not all(isinstance(x, str) for x in flat):
        raise value_error(option, "holds a list of labels, or lists of them", got=str(path))
    return found


def new_file(option: str, name: str, force: bool) -> Path:
    """Return the file that an option names; refuse one that exists, before anything is done."""
    path = Path(name).expanduser()
    if path.exists() and not force:
        hint = f"choose another {option}, or overwrite it with --force"
        raise value_error(option, "is a new file", got=f"{path}, which exists", hint=hint)
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "which cannot be written" if folder.is_dir() else "which is no folder"
        raise value_error(option, "lies in a folder that can be written", got=f"{folder}, {why}")
    return path


@contextlib.contextmanager
def named(**options: str) -> Iterator[None]:
    """Let an error name the command's option instead of the library's argument.

    >>> with named(i="--row"):
    ...     raise ValueError("i: lies in 0..3")
    Traceback (most recent call last):
    ValueError: --row: lies in 0..3
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        argument, colon, rest = str(error).partition(": ")
        if not colon or argument not in options:
            raise
        raise type(error)(f"{options[argument]}: {rest}") from error
