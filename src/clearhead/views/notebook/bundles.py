"""What each object shows in a notebook, by MIME type."""

from __future__ import annotations

import html as escape
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from clearhead.dependence import Report
from clearhead.heads import Survey
from clearhead.intervention import Effects
from clearhead.masks import Mask
from clearhead.recording import Record, Seen
from clearhead.views.figures import figure
from clearhead.views.labels import visible
from clearhead.views.notebook.widget import VIEW, in_kernel, widget_of
from clearhead.views.shown import Shown
from clearhead.views.sight import PageView, view

__all__ = ["mimebundle"]

# Numbers of a record whose page is put into the notebook's file.
EMBEDDED = 4_000_000
CELL = "text-align:left;padding:1px 10px 1px 0"


def mimebundle(shown: Any) -> dict[str, Any]:
    """Show an object of clearhead: as text, and as a page, a table or a picture where it has one.

    >>> from clearhead import masks
    >>> sorted(mimebundle(masks.causal())) # doctest: +SKIP
    ['image/png', 'text/html', 'text/plain']
    """
    if isinstance(shown, PageView):
        return {"text/plain": visible(repr(shown)), **_page(shown)}
    if isinstance(shown, (Record, Seen)):
        return _of_records(shown)
    if isinstance(shown, Mask):
        text = visible(str(shown))
        drawn = _picture(shown, "mask") if "\n" in text else {}
        return {"text/plain": text, "text/html": _pre(text), **drawn}
    if isinstance(shown, Survey):
        text = {"text/plain": visible(repr(shown))}
        return text | (_page(view(shown)) | _picture(shown, "atlas") if shown.layers else {})
    if isinstance(shown, Effects):
        text = visible(str(shown))
        return {"text/plain": text, "text/html": _pre(text), **_picture(shown, "effects")}
    if isinstance(shown, Report):
        return {"text/plain": visible(str(shown)), "text/html": _report(shown)}
    return {"text/plain": visible(repr(shown))}


def _page(made: PageView) -> dict[str, Any]:
    """A widget in a kernel that has them; the page in a frame, where it is small; a picture."""
    found: dict[str, Any] = {}
    content = made.shown.content(live=True)
    if in_kernel():
        found[VIEW] = _view_of(widget_of(content))
    if not isinstance(made.shown, Shown):
        return found | {"text/html": made.html(fragment=True)}
    if _numbers(made.shown) <= EMBEDDED:
        found["text/html"] = made.html(fragment=True)
    return found | _picture(made.shown, "map")


def _view_of(widget: Any) -> Any:
    bundle = widget._repr_mimebundle_()
    return (bundle[0] if isinstance(bundle, tuple) else bundle)[VIEW]


def _numbers(shown: Shown) -> int:
    values = (x for call in shown.layers for x in (call.weights, call.top, call.blocks))
    tensors = (
        each for x in values if x is not None for each in (x if isinstance(x, tuple) else [x])
    )
    return sum(each.numel() for each in tensors)


def _of_records(seen: Record | Seen) -> dict[str, Any]:
    """The page of what maps are drawn of; else, and where it is large, a table of the calls."""
    text = visible(repr(seen))
    records = [seen] if isinstance(seen, Record) else list(seen)
    bundle = {"text/plain": text, "text/html": _calls(records, getattr(seen, "notes", []))}
    try:
        made = view(seen)
    except (TypeError, ValueError):
        return bundle
    return bundle | _page(made)


def _picture(shown: Any, kind: str) -> dict[str, Any]:
    """A picture for where neither widgets nor HTML are shown, if matplotlib is there."""
    if find_spec("matplotlib") is None:
        return {}
    drawn: Any = figure(shown, kind)
    return {"image/png": drawn._repr_png_()}


def _calls(records: Sequence[Record], notes: Iterable[str]) -> str:
    names = ("layer", "call", "kind", "module", "samples", "heads", "queries", "sources", "how")
    rows = [
        (r.layer, r.call, r.kind, r.module, r.sizes.batch, len(r.heads), *r.sizes[2:], r.how)
        for r in records[:100]
    ]
    more = [f"and {len(records) - 100} more calls"] if len(records) > 100 else []
    hint = "ch.view(seen).save(path) writes a page, ch.view(seen).serve() serves all that was seen"
    lines = [*more, *notes, hint]
    return _table(names, rows) + "".join(f"<p>{_text(line)}</p>" for line in lines)


def _report(report: Report) -> str:
    colour = "#1a7f37" if report.ok else "#b3261e"
    head = f'<p><strong style="color:{colour}">{_text(report.headline)}</strong></p>'
    names = ("sample", "output", "depends on", "moved by", "rounding", "first in")
    rows = [
        (f.sample, f.query, f.source, f"{f.size:.3g}", f"{f.floor:.1g}", f.module)
        for f in report.findings
    ]
    hints = dict.fromkeys(f.hint for f in report.findings if f.hint)
    lines = "".join(f"<p>{_text(line)}</p>" for line in (*hints, *report.details))
    return head + (_table(names, rows) if rows else "") + lines


def _table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f'<th style="{CELL}">{_text(name)}</th>' for name in names)
    body = "".join(
        "<tr>" + "".join(f'<td style="{CELL}">{_text(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _pre(text: str) -> str:
    return f'<pre style="line-height:1.15">{_text(text)}</pre>'


def _text(value: Any) -> str:
    """Text as HTML that shows it, and does nothing else."""
    return escape.escape(visible(str(value)))
