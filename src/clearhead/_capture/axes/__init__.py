"""Which axes of a tensor are batch, heads and positions, followed from the projections on."""

from __future__ import annotations

from clearhead._capture.axes.follow import REORDERS, Layouts
from clearhead._capture.axes.held import HeldHeads, held_heads
from clearhead._capture.axes.layout import AxisLayout
from clearhead._capture.axes.marks import Marks, is_parameter
from clearhead._capture.axes.place import Fold, Place, fold_of, misread, parted, place_of
from clearhead._capture.axes.scores import paired_axes, paired_letters, scored, scores_of

__all__ = [
    "REORDERS",
    "AxisLayout",
    "Fold",
    "HeldHeads",
    "Layouts",
    "Marks",
    "Place",
    "fold_of",
    "held_heads",
    "is_parameter",
    "misread",
    "paired_axes",
    "paired_letters",
    "parted",
    "place_of",
    "scored",
    "scores_of",
]
