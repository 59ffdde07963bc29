"""`figure`: what was watched as a matplotlib figure, by kind."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from clearhead._core import type_error, value_error
from clearhead.heads import Survey
from clearhead.intervention import Effects
from clearhead.masks import Mask
from clearhead.views.shown import shown_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure"]

KINDS = ("map", "heads", "atlas", "mask", "distance", "effects")
SCALES = ("linear", "sqrt", "log")


def figure(
    record: Any,
    kind: str = "map",
    tokens: Any = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    sample: int = 0,
    statistic: str | None = None,
    scale: str = "sqrt",
    title: str | None = None,
) -> Figure:
    """Draw what was watched as a matplotlib figure, which saves as SVG, PDF or PNG.

    >>> import numpy as np, clearhead as ch
    >>> drawn = ch.figure(ch.record_from(np.eye(3), ["a", "b", "c"]))  # doctest: +SKIP
    >>> drawn.savefig("map.pdf")                                       # doctest: +SKIP

    `record` is what `watch` gave, one record of it, or what `record_from(weights, tokens)` made.
    The kinds:

    - "map": the weights of one `head` of a `layer` (the last layer, the mean over its heads),
      rows are queries and columns are sources; blocked cells are hatched;
    - "heads": small maps of all layers and heads;
    - "mask": who may attend to whom, of a record or of a `Mask`;
    - "distance": how far back each head looks on average, in positions;
    - "atlas": a `statistic` of all heads (several by default), also of a survey or a table;
    - "effects": what `effects` returned, the weight of each cut against its effect.

    `tokens` are labels as `view` takes them; numbers of layers and heads are the model's own.
    `scale` of colours is "linear", "sqrt" or "log". Needs matplotlib: `pip install
    "clearhead[figure]"`.
    """
    if kind not in KINDS:
        raise value_error("kind", f"is one of {', '.join(KINDS)}", got=repr(kind))
    if scale not in SCALES:
        raise value_error("scale", f"is one of {', '.join(SCALES)}", got=repr(scale))
    shown = _shown(record, kind, tokens)
    if find_spec("matplotlib") is None:
        raise ImportError('figure needs matplotlib: pip install "clearhead[figure]"')
    options = {"layer": layer, "head": head, "sample": sample, "scale": scale}
    return _drawn(shown, kind, title=title, statistic=statistic, tokens=tokens, **options)


def _drawn(shown: Any, kind: str, **options: Any) -> Figure:
    from clearhead.views.figures.maps import draw_map, draw_mask
    from clearhead.views.figures.numbers import draw_atlas, draw_distance
    from clearhead.views.figures.scatter import draw_effects
    from clearhead.views.figures.style import style
    from clearhead.views.figures.thumbs import draw_heads

    draw: dict[str, Any] = {
        "map": draw_map,
        "heads": draw_heads,
        "atlas": draw_atlas,
        "mask": draw_mask,
        "distance": draw_distance,
        "effects": draw_effects,
    }
    with style():
        return draw[kind](shown, **options)


def _shown(record: Any, kind: str, tokens: Any) -> Any:
    """What a kind draws: effects, a survey, a table or a mask as they are, all else as `Shown`."""
    if isinstance(record, Effects) or kind == "effects":
        _must(isinstance(record, Effects) and kind == "effects", "effects", "ch.effects(...)")
        return record
    if isinstance(record, Mask):
        _must(kind == "mask", "mask", "a mask")
        return record
    if isinstance(record, Survey) or hasattr(record, "column_names"):
        _must(kind in ("atlas", "distance"), "atlas", "heads.measure(...)")
        return record
    try:
        return shown_of(record, tokens)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("seen:", "record:", 1)) from None


def _must(fits: bool, kind: str, what: str) -> None:
    if not fits:
        rule = f'is "{kind}" for the value of {what}, and only for it'
        raise type_error("kind", rule)
