"""Token labels, and text of any source, written so that it can be read and steers no terminal.

The text of a token is data. In a label spaces, line ends and control characters become visible
marks; a character that is split over several tokens is shown whole, with the part that each token
holds. In other text only what steers a terminal is replaced.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

__all__ = ["label", "labels", "many", "token_bytes", "visible"]

_MARKS = {" ": "␣", "\n": "⏎", "\t": "⇥"}
# Isolates keep a right-to-left label from turning the rest of the line around.
ISOLATE, END_ISOLATE = "\u2068", "\u2069"
_WORD_START = "\u2581"  # SentencePiece's mark for a leading space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# C0 but line end and tab, DEL, C1, bidirectional embeddings, overrides, isolates, and surrogates.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# What `label` writes around right-to-left text: an isolate that is closed again steers nothing.
_ISOLATED = re.compile("\u2068([^\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]*)\u2069")


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
    known = zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True)
    # A model may predict ids that its tokenizer has no token for.
    tokens = [f"<{id_}>" if token is None else str(token) for id_, token in known]
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
    if character in _MARKS:
        return _MARKS[character]
    if ord(character) < 32 or character == "\x7f":
        return _escape(character)
    # Other separators, control, format (bidirectional overrides among them) and lone surrogates.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp", "Zs"):
        return _escape(character)
    return character


def _escape(character: str) -> str:
    code = ord(character)
    if code < 32:
        return chr(0x2400 + code)
    return "␡" if code == 127 else f"<U+{code:04X}>"


def visible(text: str) -> str:
    r"""Replace what would steer a terminal; line ends, tabs and letters of all scripts stay.

    >>> visible("tale\x1b[31m\x9b6n\u202e.txt")
    'tale␛[31m<U+009B>6n<U+202E>.txt'
    """
    if not _STEERING.search(text):
        return text
    shown, at = [], 0
    for match in _ISOLATED.finditer(text):
        if any(unicodedata.bidirectional(c) in ("R", "AL", "AN") for c in match[1]):
            shown += [_escaped(text[at : match.start()]), match[0]]
            at = match.end()
    return "".join([*shown, _escaped(text[at:])])


def _escaped(text: str) -> str:
    return _STEERING.sub(lambda match: _escape(match[0]), text)


def many(number: int, one: str, more: str | None = None) -> str:
    """Put a number before its word.

    >>> many(1, "query", "queries"), many(2000, "head")
    ('1 query', '2,000 heads')
    """
    return f"{number:,} {one if number == 1 else more or one + 's'}"
