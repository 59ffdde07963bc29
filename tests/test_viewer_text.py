"""Token labels: everything visible, nothing that steers the terminal, whole characters."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.views.labels import label, labels, token_bytes


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" hello", "␣hello"),
        ("\n", "⏎"),
        ("\t", "⇥"),
        ("\x1b[31mred", "␛[31mred"),
        ("\x7f", "␡"),
        ("", "∅"),
        ("\u202eabc", "<U+202E>abc"),
        ("\u200b", "<U+200B>"),
        ("\u2028", "<U+2028>"),
        ("\u00a0", "<U+00A0>"),
        ("日本", "日本"),
        ("<script>", "<script>"),
        ("[bold]", "[bold]"),
        ("\u0301", "◌\u0301"),
        ("שלום", "\u2068שלום\u2069"),
    ],
)
def test_label(text: str, shown: str) -> None:
    assert label(text) == shown


@given(st.text(max_size=8))
def test_no_label_steers_the_terminal(text: str) -> None:
    shown = label(text).replace("\u2068", "").replace("\u2069", "")
    assert shown
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


def test_split_characters_show_whole_with_their_part() -> None:
    euro = "€".encode()
    assert labels([b"h", euro[:1], euro[1:2], euro[2:], b"o"]) == [
        "h",
        "€ 1/3",
        "€ 2/3",
        "€ 3/3",
        "o",
    ]
    assert labels([b"\xff", b"x"]) == ["<FF>", "x"]
    assert labels([euro[:2]]) == ["<E2><82>"]
    assert labels([]) == []


@given(st.text(max_size=12), st.integers(1, 4))
def test_every_split_of_a_text_gives_one_label_a_part(text: str, step: int) -> None:
    whole = text.encode("utf-8", "ignore")
    parts = [whole[i : i + step] for i in range(0, len(whole), step)]
    assert len(labels(parts)) == len(parts)


class Tokens:
    """As a tokenizer of transformers, with the tokens of one family."""

    all_special_ids = (0,)

    def __init__(self, tokens: list[str], decoder: str | None = None) -> None:
        self.tokens = tokens
        if decoder:
            self.backend_tokenizer = type("Backend", (), {"decoder": decoder, "pre_tokenizer": ""})

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.tokens[i] for i in ids]


def test_token_bytes_of_each_family() -> None:
    # The byte-level alphabet writes a space as U+0120 and the bytes of "é" as U+00C3, U+00A9.
    byte_level = Tokens(["<s>", "\u0120the", "\u00c3", "\u00a9"], "ByteLevel()")
    assert token_bytes(byte_level, [0, 1, 2, 3]) == [b"<s>", b" the", b"\xc3", b"\xa9"]
    sentence_piece = Tokens(["<s>", "\u2581the", "<0xE2>", "a"])
    assert token_bytes(sentence_piece, [1, 2, 3]) == [b" the", b"\xe2", b"a"]
    word_piece = Tokens(["[CLS]", "hell", "##o"])
    assert token_bytes(word_piece, [0, 1, 2]) == [b"[CLS]", b"hell", b"##o"]


def test_an_id_without_a_token_is_shown_as_its_number() -> None:
    class Few(Tokens):
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:  # type: ignore[override]
            return [self.tokens[i] if i < len(self.tokens) else None for i in ids]

    assert token_bytes(Few(["a", "b"]), [1, 7]) == [b"b", b"<7>"]
