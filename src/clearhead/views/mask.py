"""The data behind `clearhead mask`: a picture, a row, or why an edge is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clearhead._core import value_error

if TYPE_CHECKING:
    from clearhead.masks import Mask

__all__ = ["describe_edge", "describe_maps", "describe_row", "sizes_of_mask"]

# More positions than this are not drawn.
LIMIT = 1 << 24


def sizes_of_mask(mask: Mask, query: int | None, source: int | None) -> tuple[int, int]:
    """Give the number of queries and of sources; by default those of the mask's own data."""
    from clearhead.masks import default_sizes

    own = default_sizes(mask)
    if source is None:
        source = own[1] if query is None or mask.own.source is not None else query
    query = own[0] if query is None else query
    for name, size in (("query", query), ("source", source)):
        if not 0 <= size <= LIMIT:
            raise value_error(name, f"is a number of positions up to {LIMIT:,}", got=f"{size:,}")
    return query, source


def describe_row(mask: Mask, i: int, which: dict[str, Any]) -> dict[str, Any]:
    """List the sources that query `i` may read; `which` has sizes, sample and head."""
    return {"query": i, "sources": mask.row(i, **which)}


def describe_edge(mask: Mask, i: int, j: int, which: dict[str, Any]) -> dict[str, Any]:
    """Say whether query `i` may read source `j`, and why."""
    verdict, *reasons = mask.why(i, j, **which).split("\n")
    allowed = j % which["source"] in mask.row(i, **which)
    return {"allowed": allowed, "verdict": verdict, "reasons": reasons}


def describe_maps(mask: Mask, which: dict[str, Any], *, cells: int) -> list[dict[str, Any]]:
    """Draw the mask in at most `cells` tiles a side; one map for each sample and head."""
    return [each._asdict() | {"edges": each.edges} for each in mask.maps(**which, cells=cells)]
