"""The page about a sweep, in Markdown: what was found, what was not tested, and how to run it."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clearhead._core import replacing
from clearhead.dependence.library.rows import (
    BY_DESIGN,
    FAULT,
    FORMS,
    NOT_TESTED,
    OK,
    UNFIT,
    VERDICTS,
    Row,
    counts,
    one_line,
)

__all__ = ["page", "write_report"]

# A sweep: what its rows depend on, and the rows.
Sweep = tuple[dict[str, Any], Sequence[Row]]
# Characters that mean something in Markdown.
MARKUP = re.compile(r"([\\`*_{}\[\]<>|#])")

INTRODUCTION = """\
Tiny copies with random weights of {classes} were audited: content that an output must not depend
on was changed, and the output was compared. The weights are scaled so that attention is far from
uniform; a size says how far one output moved, beside the largest logit. A row says what the code
does in that call. It says nothing about trained weights, nor about how often anyone makes the call:
several of the calls are rare."""
# The classes of a sweep; of other libraries they are chosen by hand.
CLASSES = {
    "transformers": "the classes that transformers {version} lists for causal, masked and "
    "encoder-decoder language models"
}
FAULTS = """\
Each of these was run again without the audit: one input was changed, and the logits compared, in
the model's own dtype and in float64. *Where* is the deepest module whose output moved while its
inputs had not and the function that it runs, or what causes it where that was traced by hand."""
DOUBTFUL = """\
What a second run without the audit did not show: neither a fault nor its absence is proven."""
DESIGNED = """\
An output moves here, too; the documentation or the code of the class says that it is meant to."""
UNTESTED = """\
What could not be built or gave no answer, with the reason; then the questions that make no sense
for a class (its forward takes no such argument, say)."""
RERUN = """\
One class with all of its rows, and a script for each of its faults that needs only
{needed}:

```text
clearhead audit --library {library} --classes {example} --out DIR
python DIR/{script}
```"""
WHOLE = "The whole table, from the same seeds: `make leaks`."
FORMS_IN_WORDS = {
    "causal": "no output reads a later input, whether weights or a cache are asked for or not",
    "padding": "padding, left and right, changes nothing that is real",
    "documents": "packed documents whose position_ids restart do not see each other",
    "generation": "cached decoding gives what one pass gives",
    "batch": "the samples of a batch do not see each other",
    "modes": "train and eval, backends, and requested weights give the same outputs",
}


class _Fault(NamedTuple):
    """Rows of one class that tell of the same thing."""

    rows: tuple[Row, ...]

    @property
    def largest(self) -> Row:
        # As it is shown: which of two equal ones is larger is rounding, and differs by machine.
        return max(self.rows, key=lambda row: float(_size(row.size)))


def write_report(folder: str | Path, run: dict[str, Any], rows: Sequence[Row], old: Any) -> Path:
    """Write `report.md` into the folder of a sweep."""
    path = Path(folder).expanduser() / "report.md"
    with replacing(path) as part:
        part.write_text(page((run, rows), old), encoding="utf-8")
    return path


def page(new: Sweep, old: Sweep | None = None) -> str:
    """Write the page about a sweep, beside that of another version."""
    run, rows = new
    library, release = run["library"], _release(run)
    faults = _faults(row for row in rows if row.verdict == FAULT)
    doubtful = _faults(row for row in rows if row.confirmed is False)
    parts = [
        f"# The leak report: {library} {release}",
        INTRODUCTION.format(classes=_audited(library, release)),
        f"Versions: {_versions(run)}; seed {run['seed']}; backends {', '.join(run['backends'])}.",
        *_section("Counts", "", _counts(rows)),
        *_section(f"Faults ({len(faults)})", FAULTS, _all_faults(faults)),
        *_section("Found by the audit, not confirmed", DOUBTFUL, _fault_table(doubtful)),
        *_section("By design", DESIGNED, _design_table(rows)),
        *_section("Not tested", UNTESTED, _untested(rows)),
        *([] if old is None else _beside(new, old)),
        "## Run a line again",
        RERUN.format(
            library=library,
            needed=" and ".join(dict.fromkeys(("torch", library))),
            example=_word(faults[0].largest.name) if faults else "NAME",
            script=_word((faults[0].largest.script if faults else "") or "scripts/NAME.py"),
        ),
        *([WHOLE] if library == "transformers" else []),
    ]
    return "\n\n".join(parts) + "\n"


def _audited(library: str, release: str) -> str:
    return CLASSES.get(library, "classes of {library} {version}").format(
        library=library, version=release
    )


def _release(run: dict[str, Any]) -> str:
    return _text(str(run["versions"].get(run["library"], "")))


def _versions(run: dict[str, Any]) -> str:
    return _text(", ".join(f"{name} {one}" for name, one in sorted(run["versions"].items())))


def _section(title: str, words: str, body: list[str]) -> list[str]:
    """Give a title, words and a body; nothing where the body is empty."""
    if not body:
        return []
    return [f"## {title}", *([words] if words else []), *body]


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    found = ["| " + " | ".join(line) + " |" for line in lines]
    top = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return ["\n".join([*top, *found])] if found else []


def _text(words: str) -> str:
    return MARKUP.sub(r"\\\1", one_line(words))


def _code(words: str) -> str:
    plain = one_line(words).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`" if plain else ""


def _word(words: str) -> str:
    """A word of a command line."""
    return shlex.quote(one_line(words))


def _size(number: float) -> str:
    return f"{number:.2g}"


def _counts(rows: Sequence[Row]) -> list[str]:
    """Count the classes of each mapping, and the verdicts of each form."""
    classes = [
        (mapping, str(len(_names(mine))), str(len(_names(_tested(mine)))))
        for mapping in sorted({row.mapping for row in rows})
        for mine in [[row for row in rows if row.mapping == mapping]]
    ]
    found = counts(rows)
    forms = [
        (form, FORMS_IN_WORDS[form], *(str(found[form].get(one, 0)) for one in VERDICTS))
        for form in FORMS
        if form in found
    ]
    return [
        *_table(("mapping", "classes", "audited"), classes),
        "Rows by form (a row is one question about one class on one backend):",
        *_table(("form", "question", *VERDICTS), forms),
    ]


def _names(rows: Iterable[Row]) -> set[str]:
    return {row.name for row in rows}


def _tested(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.verdict != NOT_TESTED]


def _faults(rows: Iterable[Row]) -> list[_Fault]:
    """Join the rows of a class that name the same kind and the same place."""
    joined: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        joined.setdefault(_key(row), []).append(row)
    return [_Fault(tuple(joined[key])) for key in sorted(joined)]


def _key(row: Row) -> tuple[str, str, str, str]:
    return row.kind, row.name, row.mapping, row.place or row.module


def _all_faults(faults: Sequence[_Fault]) -> list[str]:
    """Count the faults of each kind, then list them."""
    kinds = Counter(fault.largest.kind for fault in faults)
    words = ", ".join(f"{number} {_text(kind)}" for kind, number in sorted(kinds.items()))
    return [f"By kind: {words}.", *_fault_table(faults)] if faults else []


def _fault_table(faults: Sequence[_Fault]) -> list[str]:
    head = ("kind", "class", "backend", "question", "size", "logits", "where", "script")
    return _table(head, map(_fault_line, faults))


def _fault_line(fault: _Fault) -> tuple[str, ...]:
    row = fault.largest
    why = "" if row.confirmed is False else row.reason
    first = "; ".join(filter(None, (_code(row.module), _code(row.place), _text(why))))
    return (
        _text(row.kind), _code(row.name), _text(", ".join(_each(x.backend for x in fault.rows))),
        _text("; ".join(_each(_question(one) for one in fault.rows))), _size(row.size),
        _size(row.logits), first, _code(row.script.rpartition("/")[2]),
    )  # fmt: skip


def _question(row: Row) -> str:
    """The question, and what kind of difference it found."""
    known = row.detail in ("", "leak", "batch") or row.form == "padding"
    return row.question if known else f"{row.question}: {row.detail}"


def _each(words: Iterable[str]) -> list[str]:
    return sorted(set(words))


def _design_table(rows: Sequence[Row]) -> list[str]:
    """List what is by design: one line for each reason, with its classes."""
    found: dict[tuple[str, str, str], set[str]] = {}
    for row in rows:
        if row.verdict == BY_DESIGN:
            found.setdefault((row.kind, row.reason, row.reference), set()).add(row.name)
    lines = [
        (_text(kind), _text(reason), _text(reference), _classes(found[kind, reason, reference]))
        for kind, reason, reference in sorted(found)
    ]
    return _table(("kind", "reason", "reference", "classes"), lines)


def _classes(names: Iterable[str]) -> str:
    return ", ".join(_code(name) for name in sorted(names))


def _untested(rows: Sequence[Row]) -> list[str]:
    """List reasons with their classes: what failed, then what does not apply."""
    failed = [row for row in rows if row.untested and row.confirmed is None]
    unfit = [row for row in rows if not row.fits]
    head = ("reason", "questions", "classes")
    return [
        *_table(head, _reasons(failed)),
        *(["Questions that do not apply:"] if unfit else []),
        *_table(head, _reasons(unfit)),
    ]


def _reasons(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        # Classes share a reason that begins with the name of each.
        reason = row.reason.removeprefix(UNFIT).removeprefix(f"{row.name.partition(':')[0]} ")
        found.setdefault(reason, []).append(row)
    for reason in sorted(found):
        mine = found[reason]
        asked = _each(row.form for row in mine)
        yield _text(reason), ", ".join(asked), _classes(_names(mine))


def _beside(new: Sweep, old: Sweep) -> list[str]:
    """Say what was mended since another version, what is new, and what stayed."""
    (run, rows), (before, earlier) = new, old
    now, then = _known(rows), _known(earlier)
    mended, gone = _split([then[key] for key in sorted(then.keys() - now.keys())], rows)
    fresh, added = _split([now[key] for key in sorted(now.keys() - then.keys())], earlier)
    here, there = _release(run), _release(before)
    both = now.keys() & then.keys()
    words = (
        f"Of {there}, {len(mended)} faults are mended, {len(both)} are in both, "
        f"and {len(gone)} have no counterpart: the question has no answer there. In {here}, "
        f"{len(fresh)} are new, and {len(added)} have no counterpart. ({_versions(before)}.)"
    )
    return [
        f"## {there} beside {here}",
        words,
        *_part("Mended", mended),
        *_part(f"Without a counterpart in {here}", gone),
        *_part("New", fresh),
        *_part(f"Without a counterpart in {there}", added),
    ]


def _split(faults: Iterable[_Fault], rows: Sequence[Row]) -> tuple[list[_Fault], list[_Fault]]:
    """Split the faults that other rows do not have: those have answers there, or have none."""
    answered = {_asked(row) for row in rows if row.verdict in (OK, FAULT)}
    parts: tuple[list[_Fault], list[_Fault]] = ([], [])
    for fault in faults:
        parts[not all(_asked(row) in answered for row in fault.rows)].append(fault)
    return parts


def _asked(row: Row) -> tuple[str, ...]:
    return row.name, row.mapping, row.backend, row.form, row.variant


def _part(title: str, faults: Sequence[_Fault]) -> list[str]:
    head = ("kind", "class", "backend", "question", "size", "where")
    lines = (_fault_line(fault) for fault in faults)
    table = _table(head, ((*line[:5], line[6]) for line in lines))
    return [f"### {title}", *table] if table else []


def _known(rows: Sequence[Row]) -> dict[tuple[str, str, str], _Fault]:
    """Faults by kind and class: files and modules may have new names in another version."""
    joined: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.verdict == FAULT:
            joined.setdefault((row.kind, row.name, row.mapping), []).append(row)
    return {key: _Fault(tuple(found)) for key, found in joined.items()}
