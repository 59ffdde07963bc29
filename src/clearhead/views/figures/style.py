"""How figures look: the palette of the page, fonts, and tokens as text that is never markup."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure

from clearhead.views.figures.oklch import colours
from clearhead.views.labels import label

__all__ = [
    "BLOCKED",
    "INK",
    "NAN",
    "SERIES",
    "PaperFigure",
    "in_lines",
    "palette",
    "style",
    "token",
]

INK, BLOCKED = "#222222", "#b8b8b8"
# Okabe and Ito's colours, which colour-blind readers tell apart.
NAN = "#d55e00"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
# Characters of a label that are shown, of the first that are looked at.
MOST, LOOKED_AT = 12, 64
# Where DejaVu Sans has no glyph: fonts that many systems have.
OTHERS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans Devanagari", "Noto Sans Thai",
          "Noto Sans Symbols2", "Noto Sans Symbols")  # fmt: skip
SETTINGS = {
    "font.family": ["DejaVu Sans", *OTHERS],
    "font.size": 8,
    "axes.edgecolor": "#666666",
    "axes.linewidth": 0.6,
    "axes.titlesize": 9,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.5,
    # Text stays text in PDF; in SVG it is drawn as outlines, which need no fonts.
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "text.usetex": False,
    "text.parse_math": False,
    "figure.dpi": 120,
    "savefig.dpi": 200,
}


class PaperFigure(Figure):
    """A matplotlib figure that keeps its style when it is saved, and shows itself in notebooks."""

    def savefig(self, *arguments: Any, **options: Any) -> None:
        """Save as `Figure.savefig` does, with the margins cut to what is drawn."""
        with style():
            super().savefig(*arguments, **{"bbox_inches": "tight", "pad_inches": 0.05, **options})

    def _repr_png_(self) -> bytes:
        from io import BytesIO

        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=144)
        return buffer.getvalue()


@contextmanager
def style() -> Iterator[None]:
    """Draw with the settings of figures; those of the user come back afterwards."""
    known = {font.name for font in font_manager.fontManager.ttflist}
    families = [name for name in SETTINGS["font.family"] if name in known]
    settings: dict[Any, Any] = {**SETTINGS, "font.family": families}
    with matplotlib.rc_context(settings):
        yield


@cache
def palette() -> Colormap:
    """The palette of the page, near the paper's white at 0."""
    return ListedColormap(colours(), name="clearhead")


def token(text: str) -> str:
    """A token as a short label: what cannot be seen is a visible mark, what is long is cut."""
    text = re.sub("[\u2068\u2069]", "", text)
    shown = label(text[:LOOKED_AT]).strip("\u2068\u2069")
    # A base character keeps two combining marks.
    shown = re.sub("([\u0300-\u036f]{2})[\u0300-\u036f]+", r"\1", shown)
    units = re.findall("<U[+][0-9A-F]+>|(?s:.)", shown)
    legible = [unit if len(unit) > 1 else _legible(unit) for unit in units]
    fits = [len("".join(legible[: at + 1])) for at in range(len(legible))]
    if fits[-1] <= MOST and len(text) <= LOOKED_AT:
        return "".join(legible)
    return "".join(legible[: sum(width < MOST for width in fits)]) + "…"


def in_lines(text: str, width: int, most: int = 2) -> str:
    """A title in at most so many lines."""
    lines = textwrap.wrap("".join(map(_legible, text[:1000])), width) or [""]
    return "\n".join(lines[:most]) + " …" * (len(lines) > most)


def _legible(character: str) -> str:
    """A character, or its code point where no font has a glyph for it."""
    code = ord(character)
    # Few fonts have the pictures of control characters: <1B> says the same.
    code -= 0x2400 if 0x2400 <= code < 0x2420 else 0
    known = code >= 32 and any(code in charmap for charmap in _charmaps())
    return chr(code) if known else f"<{code:02X}>"


@cache
def _charmaps() -> Sequence[Any]:
    known = {font.name for font in font_manager.fontManager.ttflist}
    families = [name for name in SETTINGS["font.family"] if name in known]
    return [font_manager.get_font(font_manager.findfont(name)).get_charmap() for name in families]
