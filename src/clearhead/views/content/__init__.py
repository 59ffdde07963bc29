"""What a page is given: the header and the chunks of records, masks and atlases."""

from __future__ import annotations

from clearhead.views.content.chunks import PageContent

__all__ = ["PageContent"]
