"""The page: one self-contained HTML file that shows a record, a mask or an atlas of heads."""

from __future__ import annotations

from clearhead.views.page.document import bundle, html, save, style

__all__ = ["bundle", "html", "save", "style"]
