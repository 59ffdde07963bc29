"""Token labels: what a token is, written so that it can be read in a line of a terminal or a page.

Token text is data. Spaces, line ends and control characters become visible marks, so that a label
can neither vanish nor steer the terminal; a character that is split over several tokens is shown
whole, with the part that each token holds.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

__all__ = ["label", "labels", "token_bytes"]

SPACE, LINE_END, TAB = "␣", "⏎", "⇥"
# Isolates keep a right-to-left label from turning the rest of the line around.
ISOLATE, END_ISOLATE = "\u2068", "\u2069"
_WORD_START = "\u2581"  # SentencePiece's mark for a leading space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def label(text: str) -> str:
    r"""Write a token's text with everything visible.

    >>> label(" hello"), label("\n"), label("\x1b[31m"), label("")
    ('␣hello', '⏎', '␛[31m', '∅')
    """
    if not text:
        return "∅"
    shown = "".join(map(_visible, text))
    if unicodedata.category(text[0]).startswith("M"):
        # A combining mark at the start needs something of its own to stand on.
        shown = "◌" + shown
    right_to_left = any(unicodedata.bidirectional(c) in ("R", "AL", "AN") for c in text)
    return f"{ISOLATE}{shown}{END_ISOLATE}" if right_to_left else shown


def labels(parts: Sequence[bytes]) -> list[str]:
    """Label tokens given as bytes; a character split over tokens shows whole, with its part.

    >>> labels(["h".encode(), "é".encode()[:1], "é".encode()[1:]])
    ['h', 'é 1/2', 'é 2/2']
    """
    shown: list[str] = []
    while (start := len(shown)) < len(parts):
        stop = _end_of_character(parts, start)
        whole = _decode(b"".join(parts[start:stop]))
        if whole is None:
            shown.append(_hexadecimal(parts[start]))
        elif stop == start + 1:
            shown.append(label(whole))
        else:
            shown += [
                f"{label(whole)} {part}/{stop - start}" for part in range(1, stop - start + 1)
            ]
    return shown


def token_bytes(tokenizer: Any, ids: Sequence[int]) -> list[bytes]:
    """Return the bytes that each token stands for, for the usual families of tokenizers.

    Byte-level tokens are mapped back to bytes, SentencePiece's word mark to a space and its byte
    tokens to bytes; anything else is taken as text.
    """
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(list(ids))]
    byte_level = _is_byte_level(tokenizer)
    special = set(getattr(tokenizer, "all_special_ids", ()))
    return [
        token.encode() if id_ in special else _bytes(token, byte_level)
        for id_, token in zip(ids, tokens, strict=True)
    ]


def _bytes(token: str, byte_level: bool) -> bytes:
    if byte_level and all(character in _byte_of() for character in token):
        return bytes(_byte_of()[character] for character in token)
    if match := _BYTE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_WORD_START, " ").encode()


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in f"{backend.decoder}{backend.pre_tokenizer}"


@cache
def _byte_of() -> dict[str, int]:
    # GPT-2's table: printable bytes stand for themselves, the others for characters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


def _decode(part: bytes) -> str | None:
    try:
        return part.decode()
    except UnicodeDecodeError:
        return None


def _end_of_character(parts: Sequence[bytes], start: int) -> int:
    """Return where the text that starts in token `start` is whole (the next token if never)."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for index in range(start, min(len(parts), start + 8)):
        try:
            decoder.decode(parts[index])
        except UnicodeDecodeError:
            return start + 1
        if not decoder.getstate()[0]:
            return index + 1
    return start + 1


def _hexadecimal(part: bytes) -> str:
    return "".join(f"<{byte:02X}>" for byte in part)


def _visible(character: str) -> str:
    if character == " ":
        return SPACE
    if character == "\n":
        return LINE_END
    if character == "\t":
        return TAB
    if ord(character) < 32:
        return chr(0x2400 + ord(character))
    if character == "\x7f":
        return "␡"
    # Other separators, control, format (bidirectional overrides among them) and lone surrogates.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp", "Zs"):
        return f"<U+{ord(character):04X}>"
    return character
