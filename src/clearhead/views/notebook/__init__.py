"""What notebooks show: pages as widgets or in frames, tables, pictures, and always text."""

from __future__ import annotations

from clearhead.views.notebook.bundles import mimebundle
from clearhead.views.notebook.widget import widget_of

__all__ = ["mimebundle", "widget_of"]
