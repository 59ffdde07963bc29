"""`view`: records as a page that opens in any browser, from one file and without a network."""

from __future__ import annotations

import html as escape
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead._core import type_error, value_error
from clearhead._display import mimebundle
from clearhead.heads import Survey, atlas
from clearhead.masks import Mask
from clearhead.recording import Record
from clearhead.views import page
from clearhead.views.content.atlas import ShownAtlas, atlas_of_survey, atlas_of_table
from clearhead.views.content.comparison import beside, divided, with_effects, with_tokens
from clearhead.views.content.effects import entries_of_look
from clearhead.views.content.masked import ShownMask, masks_of, shown_mask
from clearhead.views.shown import Shown, shown_of

if TYPE_CHECKING:
    from clearhead.intervention import Effects
    from clearhead.views.reader import Reader

__all__ = ["PageView", "view", "view_of_table", "view_of_text"]

# Texts of at most this many tokens are held in full.
WHOLE = 256


@dataclass(frozen=True)
class PageView:
    """A page that has not been written yet."""

    shown: Shown | ShownMask | ShownAtlas

    def html(self, *, fragment: bool = False) -> str:
        """Return the page as one self-contained HTML document, or as a `fragment` of another.

        A fragment is a frame that has no rights but to run the page's own script, so several of
        them share a document without touching it or each other.
        """
        text = page.html(*self.shown.pages())
        if not fragment:
            return text
        return (
            '<iframe sandbox="allow-scripts" style="width:100%;height:720px;border:0" '
            f'title="{escape.escape(self.shown.title[:200])}" srcdoc="{escape.escape(text)}">'
            "</iframe>"
        )

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the page to one file, whole or not at all; an existing one is kept without `force`.

        Everything is inlined: the page asks for nothing over a network, and token text is data.
        """
        page.save(path, *self.shown.pages(), force=force)

    def serve(self, port: int = 0) -> None:
        """Serve the page on this machine until Ctrl-C, and print its address.

        The page asks for what is looked at, exactly: nothing of a large record is left out. Only
        who knows the address, which has a random part, gets an answer.
        """
        from clearhead.views.page.server import serve

        serve(self.shown.content(live=True), port)

    def __repr__(self) -> str:
        shown = self.shown
        return f"PageView({shown.title!r}, {shown.extent}); .save(path) writes the page"

    def widget(self) -> Any:
        """The page as a notebook's widget (anywidget), which asks this kernel for what it shows."""
        from clearhead.views.notebook.widget import widget_of

        return widget_of(self.shown.content(live=True))

    _repr_mimebundle_ = mimebundle


def view(
    seen: Any,
    tokens: Any = None,
    *,
    title: str | None = None,
    effects: Effects | list[Effects] | None = None,
    other: Any = None,
    names: tuple[str, str] = ("this", "other"),
    other_tokens: Any = None,
    segments: Any = None,
    grid: tuple[int, int] | None = None,
    kind: str | None = None,
    query: int | None = None,
    source: int | None = None,
    record: Any = None,
) -> PageView:
    """Show what was watched as a page: where each token looks, by every head, with its mask.

    >>> import clearhead as ch
    >>> model = ch.models.load()
    >>> tokens = model.vocabulary.encode("hell")[None]
    >>> with ch.watch(model, read=ch.readings.Weights()) as seen:
    ...     logits = model(tokens)
    >>> ch.view(seen, list("hell"))
    PageView('Attention of a model', 4 attention calls); .save(path) writes the page
    >>> ch.view(ch.masks.causal(), query=4)
    PageView('causal()', 1 mask); .save(path) writes the page

    `seen` is what `watch` gave, one record of it, or what `record_from(weights, tokens)` made;
    `tokens` are labels, one for each position, or a list of them for each sample. Maps are drawn of
    `Weights`, or for long texts of `TopK` and `BlockMap`. The page says what it holds.

    - `effects`: what `ch.effects` gave, shown beside the weights of the edges that it cut.
    - `other`: a second record with the same heads and positions; the page shows the difference,
      and each by its name in `names`. `other_tokens` are its labels where they are others.
    - `segments`: (start, stop, name) of stretches such as system, user and document.
    - `grid`: (rows, columns) of the patches of an image, which are the last positions.
    - `kind="mask"` shows the masks of the calls alone.

    A `Mask` is shown for `query` and `source` positions. What `heads.measure` gave is shown as an
    atlas of all heads, with maps where `record` is what was watched of the same model.
    """
    alone = {"query": query, "source": source, "record": record}
    if isinstance(seen, Mask):
        return _checked(shown_mask(seen, query, source, tokens, title))
    if isinstance(seen, Survey):
        maps = None if record is None else shown_of(record, tokens)
        return _checked(atlas_of_survey(seen, title, maps))
    for name, value in alone.items():
        if value is not None:
            rule = "belongs to a survey" if name == "record" else "belongs to a mask"
            raise value_error(name, rule, got=f"seen of type {type(seen).__name__}")
    if kind not in (None, "mask"):
        raise value_error("kind", 'is "mask", or left out', got=repr(kind))
    if kind == "mask":
        return _checked(masks_of(_records(seen), tokens, title))
    shown = divided(shown_of(seen, tokens, title), segments, grid)
    if effects is not None:
        shown = with_effects(shown, effects)
    if other is not None:
        labels = tokens if other_tokens is None else other_tokens
        shown = beside(shown, shown_of(other, labels), names)
        shown = shown if title else replace(shown, title=f"{names[0]} − {names[1]}")
    return _checked(shown)


def view_of_table(
    about: dict[str, Any],
    table: Any,
    *,
    record: Any = None,
    tokens: Any = None,
    threshold: float = 0.4,
    alike: float = 0.9,
) -> PageView:
    """Show the table that `clearhead scan` wrote, with the maps of a record of the same model."""
    words = f"{about['model']}, over {about['tokens']:,} tokens of {about['corpus']}."
    maps = None if record is None else shown_of(record, tokens)
    judged = atlas(table, threshold=threshold, alike=alike)
    return _checked(atlas_of_table(table, judged, f"Heads of {about['model']}", maps, words))


def _checked(shown: Shown | ShownMask | ShownAtlas) -> PageView:
    shown.check()
    return PageView(shown)


def _records(seen: Any) -> list[Record]:
    records = [seen] if isinstance(seen, Record) else list(seen)
    if not records or not all(isinstance(record, Record) for record in records):
        rule = "is what watch() gave, or a record of it"
        raise type_error("seen", rule, got=type(seen).__name__)
    return records


def view_of_text(reader: Reader, ids: list[int], looked: dict[str, Any] | None = None) -> PageView:
    """Watch a model read one text, and show it; long texts by their top sources and blocks.

    `looked` is what `look_at` found of the same text: its cuts are shown as effects.
    """
    import torch

    from clearhead.recording import watch

    if not reader.attends:
        rule = "has no attention to show"
        raise value_error("model", rule, got=reader.name, hint="leave --html out")
    with torch.no_grad(), watch(reader.model, read=_readings(len(ids))) as seen:
        reader.predict(ids)
    title = f"{reader.name}: {len(ids)} tokens"
    shown = with_tokens(shown_of(seen, reader.labels(ids), title), ids, reader.bytes_of(ids))
    effects = () if looked is None else tuple(entries_of_look(looked))
    return _checked(replace(shown, effects=effects))


def _readings(length: int) -> Any:
    """What is read of a text: all weights, or what stands for them and the statistics of heads."""
    from clearhead import masks
    from clearhead.readings import BlockMap, Entropy, Mass, TopK, Weights

    if length <= WHOLE:
        return Weights()
    # Each more costs a third of the time that these two take.
    return TopK(16), BlockMap(64), Entropy(), Mass(masks.first(1)), Mass(masks.diagonal(1))
