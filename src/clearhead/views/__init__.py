"""What a person sees: data gathered from a model, and the renderers of that data."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearhead.views.figures import figure
    from clearhead.views.json import document
    from clearhead.views.look import look_at
    from clearhead.views.mask import describe_edge, describe_maps, describe_row, sizes_of_mask
    from clearhead.views.notebook import mimebundle
    from clearhead.views.reader import Reader, open_reader, open_with_inputs
    from clearhead.views.shown import record_from
    from clearhead.views.sight import PageView, view, view_of_table, view_of_text
    from clearhead.views.streams import output_streams
    from clearhead.views.terminal import Terminal
    from clearhead.views.text.audit import render_report, render_sweep, sweep_progress
    from clearhead.views.text.heads import render_atlas
    from clearhead.views.text.info import render_info
    from clearhead.views.text.look import render_look
    from clearhead.views.text.mask import cells_of_terminal, render_mask
    from clearhead.views.text.record import render_record
    from clearhead.views.text.scan import scan_progress, scan_summary
    from clearhead.views.text.train import train_progress, training_end

__all__ = [
    "PageView",
    "Reader",
    "Terminal",
    "cells_of_terminal",
    "describe_edge",
    "describe_maps",
    "describe_row",
    "document",
    "figure",
    "look_at",
    "mimebundle",
    "open_reader",
    "open_with_inputs",
    "output_streams",
    "record_from",
    "render_atlas",
    "render_info",
    "render_look",
    "render_mask",
    "render_record",
    "render_report",
    "render_sweep",
    "scan_progress",
    "scan_summary",
    "sizes_of_mask",
    "sweep_progress",
    "train_progress",
    "training_end",
    "view",
    "view_of_table",
    "view_of_text",
]

# Each name with its module, imported at the first use: a command loads only what it shows.
_HOMES = {
    "Reader": "reader",
    "Terminal": "terminal",
    "PageView": "sight",
    "cells_of_terminal": "text.mask",
    "describe_edge": "mask",
    "describe_maps": "mask",
    "describe_row": "mask",
    "document": "json",
    "figure": "figures",
    "look_at": "look",
    "mimebundle": "notebook",
    "open_reader": "reader",
    "open_with_inputs": "reader",
    "output_streams": "streams",
    "record_from": "shown",
    "render_atlas": "text.heads",
    "render_info": "text.info",
    "render_look": "text.look",
    "render_mask": "text.mask",
    "render_record": "text.record",
    "render_report": "text.audit",
    "render_sweep": "text.audit",
    "scan_progress": "text.scan",
    "scan_summary": "text.scan",
    "sizes_of_mask": "mask",
    "sweep_progress": "text.audit",
    "train_progress": "text.train",
    "training_end": "text.train",
    "view": "sight",
    "view_of_table": "sight",
    "view_of_text": "sight",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'clearhead.views' has no attribute {name!r}")
    found = getattr(import_module(f"clearhead.views.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
