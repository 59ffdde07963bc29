"""The letters of an einsum of weights and values: which axis is which."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Letters", "read_equation"]


@dataclass(frozen=True)
class Letters:
    """One letter an axis, of the weights (`ours`), of the value (`theirs`) and of the context."""

    ours: str
    theirs: str
    result: str
    source: str
    query: str
    width: str

    @property
    def lead(self) -> list[str]:
        """The axes of the weights before query and source."""
        return [x for x in self.ours if x not in (self.source, self.query)]


def read_equation(equation: str, operands: Sequence[Tensor], at: int) -> Letters | str:
    """Find the axes in an equation, whose operand `at` is the weights, or say what is in the way.

    The reason follows the words "its einsum '...'".
    """
    subscripts, result = _spelled(equation, operands)
    ours, theirs = subscripts[at], subscripts[1 - at]
    if any(len({*x}) != len(x) for x in (ours, theirs, result)):
        return "takes a diagonal"
    summed = [x for x in (*ours, *theirs) if x not in result]
    source = [x for x in ours if x in theirs and x not in result]
    if len(source) != 1 or {*summed} != {*source}:
        found = ", ".join(sorted({*summed})) or "no axis"
        return f"sums over {found}, where attention sums over the sources alone"
    width = [x for x in theirs if x not in ours]
    if len(width) != 1:
        return f"gives the values {len(width)} axes that the weights do not have, instead of one"
    sizes = dict(zip(ours, operands[at].shape, strict=True))
    query = _query([x for x in ours if x not in theirs], source[0], sizes)
    if query is None:
        return "leaves open which axis of the weights is that of the queries"
    return Letters(ours, theirs, result, source[0], query, width[0])


def _query(candidates: list[str], source: str, sizes: dict[str, int]) -> str | None:
    """Choose the axis of the queries among those of the weights that the value does not have.

    With one there is no choice. With heads that share one value there are several: in
    self-attention the queries are as many as the sources.
    """
    if len(candidates) == 1:
        return candidates[0]
    as_many = [x for x in candidates if sizes[x] == sizes[source]]
    return as_many[0] if len(as_many) == 1 else None


def _spelled(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """Write the operands and the result of an equation with one letter an axis."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    unused = [x for x in string.ascii_letters if x not in equation]
    parts = left.split(",")
    missing = [
        x.ndim - len(part.replace("...", "")) for part, x in zip(parts, operands, strict=True)
    ]
    subscripts = [_spell(*pair, unused) for pair in zip(parts, missing, strict=True)]
    if not arrow:
        # Without an arrow the result has the letters that stand once, in alphabetical order.
        plain = left.replace("...", "").replace(",", "")
        result = "..." * ("..." in left) + "".join(x for x in sorted(plain) if plain.count(x) == 1)
    most = max((n for n, part in zip(missing, parts, strict=True) if "..." in part), default=0)
    return subscripts, _spell(result, most, unused)


def _spell(subscripts: str, missing: int, unused: list[str]) -> str:
    """Write letters for an ellipsis of some axes, the same ones counted from the right."""
    if "..." not in subscripts:
        return subscripts
    return subscripts.replace("...", "".join(reversed(unused[:missing])))
