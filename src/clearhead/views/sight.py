"""`view`: records as a page that opens in any browser, from one file and without a network."""

from __future__ import annotations

import html as escape
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead._core import value_error
from clearhead.views import page
from clearhead.views.shown import Shown, shown_of

if TYPE_CHECKING:
    from clearhead.views.reader import Reader

__all__ = ["PageView", "view", "view_of_text"]

# Texts of at most this many tokens are held in full.
WHOLE = 256


@dataclass(frozen=True)
class PageView:
    """A page that has not been written yet."""

    shown: Shown

    def html(self) -> str:
        """Return the page as one self-contained HTML document."""
        return page.html(*self.shown.pages())

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the page to one file, whole or not at all; an existing one is kept without `force`.

        Everything is inlined: the page asks for nothing over a network, and token text is data.
        """
        page.save(path, *self.shown.pages(), force=force)

    def __repr__(self) -> str:
        count = len(self.shown.layers)
        return (
            f"PageView({self.shown.title!r}, {count} attention calls); .save(path) writes the page"
        )

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        """Show the page in a notebook, in a frame that has no rights but to run its own script."""
        frame = (
            '<iframe sandbox="allow-scripts" style="width:100%;height:720px;border:0" '
            f'srcdoc="{escape.escape(self.html())}"></iframe>'
        )
        return {"text/plain": repr(self), "text/html": frame}


def view(seen: Any, tokens: Any = None, *, title: str | None = None) -> PageView:
    """Show what was watched as a page: where each token looks, by every head, with its mask.

    >>> import clearhead as ch
    >>> model = ch.models.load()
    >>> tokens = model.vocabulary.encode("hell")[None]
    >>> with ch.watch(model, read=ch.readings.Weights()) as seen:
    ...     logits = model(tokens)
    >>> ch.view(seen, list("hell"))
    PageView('Attention of a model', 4 attention calls); .save(path) writes the page

    `seen` is what `watch` gave, one record of it, or what `record_from(weights, tokens)` made;
    `tokens` are labels, one for each position, or a list of them for each sample. Maps are drawn of
    `Weights`, or for long texts of `TopK` and `BlockMap`. The page says what it holds.
    """
    return PageView(shown_of(seen, tokens, title))


def view_of_text(reader: Reader, ids: list[int]) -> PageView:
    """Watch a model read one text, and show it; long texts by their top sources and blocks."""
    import torch

    from clearhead.readings import BlockMap, TopK, Weights
    from clearhead.recording import watch

    if not reader.attends:
        rule = "has no attention to show"
        raise value_error("model", rule, got=reader.name, hint="leave --html out")
    read = Weights() if len(ids) <= WHOLE else (TopK(16), BlockMap(64))
    with torch.no_grad(), watch(reader.model, read=read) as seen:
        reader.predict(ids)
    return view(seen, reader.labels(ids), title=f"{reader.name}: {len(ids)} tokens")
