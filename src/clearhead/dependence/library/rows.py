"""The rows of the table: what one question about one class found."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

__all__ = [
    "BY_DESIGN",
    "FAULT",
    "FORMS",
    "NOT_TESTED",
    "OK",
    "UNFIT",
    "VERDICTS",
    "Row",
    "counts",
    "exit_code",
    "file_of",
    "one_line",
    "ordered",
    "read_rows",
    "readable",
]

FORMS = ("causal", "padding", "documents", "generation", "batch", "modes")
OK, FAULT, BY_DESIGN, NOT_TESTED = "ok", "fault", "by design", "not tested"
VERDICTS = (OK, FAULT, BY_DESIGN, NOT_TESTED)
# How the reason begins where a question makes no sense for a class.
UNFIT = "does not apply: "
# The longest text that is kept of what a model says.
LONGEST = 300
# The types of fields as they are in JSON.
KINDS: dict[Any, Any] = {
    "str": str,
    "int": int,
    "float": int | float,
    "int | None": int | None,
    "bool | None": bool | None,
    "dict[str, Any]": dict,
    "tuple[str, ...]": list,
}
# What a terminal would take for a command.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")
# Where packages are on this machine.
INSTALLED = re.compile(r"[^\s'\"(]*/(?:site|dist)-packages/")


@dataclass(frozen=True)
class Row:
    """The answer to one question about one class: a finding of one kind, or none.

    `form`, `variant` and `call` are the question: which audit, and what the call was given beside
    the inputs. `detail` and `output` are the kind and the output of the audit's finding.
    """

    name: str
    mapping: str
    backend: str
    form: str
    variant: str = ""
    verdict: str = OK
    kind: str = ""
    detail: str = ""
    size: float = 0.0
    floor: float = 0.0  # what rounding alone can do to this output
    logits: float = 0.0  # the largest of the class's own outputs
    source: int | None = None
    query: int | None = None
    sample: int = 0
    output: str = ""
    module: str = ""
    place: str = ""  # the file and the function of that module
    reason: str = ""  # why it is by design, or why it was not tested
    reference: str = ""
    covered: float = 1.0
    resolution: float = 0.0
    seconds: float = 0.0
    script: str = ""
    confirmed: bool | None = None
    call: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Row:
        """Read what `as_dict` wrote; anything else, as of another version, is a ValueError."""
        kinds = {one.name: KINDS[one.type] for one in fields(cls)}
        if not isinstance(plain, dict) or plain.keys() != kinds.keys():
            raise ValueError("these are not the fields of a row")
        if not all(isinstance(plain[name], kind) for name, kind in kinds.items()):
            raise ValueError("these are not the values of a row")
        if plain["form"] not in FORMS or plain["verdict"] not in VERDICTS:
            raise ValueError("this is not the form or the verdict of a row")
        return cls(**{**plain, "notes": tuple(plain["notes"])})

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain data, ready for JSON."""
        return asdict(self)

    @property
    def question(self) -> str:
        """The form and its variant, in words."""
        return f"{self.form} ({self.variant})" if self.variant else self.form

    @property
    def fits(self) -> bool:
        """Whether the question makes sense for the class."""
        return not (self.verdict == NOT_TESTED and self.reason.startswith(UNFIT))

    @property
    def untested(self) -> bool:
        """Whether a question that makes sense for the class has no answer."""
        return self.verdict == NOT_TESTED and self.fits


def file_of(name: str, mapping: str) -> str:
    """Name the file with the rows of a class; a class may be in two mappings."""
    return f"{name.replace(':', '-')}.{mapping}.json"


def read_rows(path: Path) -> list[Row] | None:
    """Read the rows of a class; None where the file is missing, damaged or of another version."""
    try:
        rows = [Row.of(one) for one in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return rows if rows and {file_of(x.name, x.mapping) for x in rows} == {path.name} else None


def ordered(rows: Iterable[Row]) -> list[Row]:
    """Sort the rows: the same rows in the same order, however they were made."""
    return sorted(
        rows,
        key=lambda row: (row.name, row.mapping, row.form, row.variant, row.backend, row.detail),
    )


def counts(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """Count the verdicts of each form; questions that make no sense for a class are left out."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        if row.fits:
            found.setdefault(row.form, Counter())[row.verdict] += 1
    return {form: dict(sorted(found[form].items())) for form in sorted(found)}


def exit_code(rows: Iterable[Row]) -> int:
    """The exit code of a sweep: 1 a fault, 3 a question without an answer, 0 neither."""
    found = list(rows)
    if any(row.verdict == FAULT for row in found):
        return 1
    return 3 if any(row.untested for row in found) else 0


def one_line(text: object) -> str:
    """Turn what a model says into one line of printable characters."""
    printable = "".join(c if c.isprintable() else " " for c in ESCAPES.sub(" ", str(text)))
    return " ".join(printable.split())


def readable(text: object) -> str:
    """Turn what a model says into one line of printable characters of bounded length.

    Paths begin at their package, as on any other machine.
    """
    line = INSTALLED.sub("", one_line(text))
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."
