"""Figures for papers, drawn with matplotlib from the same data as the page."""

from __future__ import annotations

from clearhead.views.figures.kinds import figure
from clearhead.views.figures.oklch import colours
from clearhead.views.figures.values import DrawnMap, chosen, map_values

__all__ = ["DrawnMap", "chosen", "colours", "figure", "map_values"]
