"""Figures for papers, drawn with matplotlib from the same data as the page."""

from __future__ import annotations

from clearhead.views.figures.kinds import figure
from clearhead.views.figures.values import MapValues, map_values

__all__ = ["MapValues", "figure", "map_values"]
