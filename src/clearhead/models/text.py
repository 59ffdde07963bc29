"""Text as token ids: a vocabulary of characters, and reading of training files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from clearhead._core import value_error

__all__ = ["Characters", "read_text", "shipped_text"]


class Characters:
    """A vocabulary in which every token is one character.

    >>> letters = Characters.of("hello")
    >>> letters.encode("hole").tolist()
    [1, 3, 2, 0]
    >>> letters.decode([1, 0, 2, 2])
    'hell'

    `special` tokens such as "[MASK]" come first. `encode` reads them where they are written out.
    """

    def __init__(self, characters: str, special: Sequence[str] = ()) -> None:
        if len(set(characters)) != len(characters):
            raise value_error("characters", "may hold each character once")
        self.characters = characters
        self.special = tuple(special)
        self.names = (*self.special, *characters)
        self.number = {name: number for number, name in enumerate(self.names)}

    @classmethod
    def of(cls, text: str, special: Sequence[str] = ()) -> Characters:
        """Make the vocabulary of a text: its characters, in the order of their code points."""
        return cls("".join(sorted(set(text))), special)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        special = f", {self.special!r}" if self.special else ""
        return f"Characters({self.characters!r}{special})"

    def encode(self, text: str, *, special: bool = True) -> Int[Tensor, " position"]:
        """Turn text into token numbers; a character the vocabulary lacks is a ValueError.

        `special=False` reads "[MASK]" as six characters, as a training file needs it.
        """
        if not (special and self.special):
            return self._characters(text)
        parts = [
            torch.tensor([self.number[piece]]) if piece in self.special else self._characters(piece)
            for piece in re.split("(" + "|".join(map(re.escape, self.special)) + ")", text)
        ]
        return torch.cat(parts)

    def decode(self, tokens: Iterable[int] | Tensor) -> str:
        """Turn token numbers back into text."""
        numbers = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        return "".join(self.names[number] for number in numbers)

    def _characters(self, text: str) -> Int[Tensor, " position"]:
        # By a table over code points, because a training file may have many millions of characters.
        codes = _code_points(text)
        known = _code_points(self.characters)
        highest = max(codes.max(initial=0), known.max(initial=0))
        table = np.full(int(highest) + 1, -1, dtype=np.int64)
        table[known] = np.arange(len(known)) + len(self.special)
        tokens = table[codes]
        if (tokens < 0).any():
            raise self._unknown(text, int((tokens < 0).argmax()))
        return torch.from_numpy(tokens)

    def _unknown(self, text: str, position: int) -> ValueError:
        around = text[max(position - 10, 0) : position + 11]
        return value_error(
            "text",
            # repr shows letters of any script, and escapes what would steer a terminal.
            f"the character {text[position]!r} at position {position} is not in the vocabulary",
            got=repr(around),
            hint=f"use these {len(self.characters)} characters: {self.characters!r}",
        )


def read_text(path: str | Path) -> str:
    """Read a training file: UTF-8, any line ends, and refuse what is no text."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise value_error("file", "needs to be a text file", got=f"the directory {path}")
    if not path.exists():
        raise value_error("file", "does not exist", got=path)
    if path.is_char_device() or path.is_block_device():
        raise value_error("file", "needs to be a text file", got=f"the device {path}")
    data = path.read_bytes()
    if not data.strip():
        raise value_error("file", "has no text in it", got=f"{path}, {len(data)} bytes")
    if (zero := data.find(0)) >= 0:
        raise value_error("file", f"is binary: byte {zero} is zero", got=path, hint=_AS_UTF8)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        raise value_error("file", rule, got=path, hint=_AS_UTF8) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def shipped_text() -> str:
    """Give the English text that the shipped GPT was trained on, written for this library."""
    return read_text(Path(__file__).parent / "data" / "bell-street.txt")


_AS_UTF8 = "save the text as UTF-8 (iconv -t UTF-8 does it on most systems)"


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
