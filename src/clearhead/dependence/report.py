"""What an audit found, as data and as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from clearhead._display import mimebundle

__all__ = ["BATCH", "Finding", "Outcome", "Report"]

# The kind of a finding of `audit.batch`, whose `sample` is the position at which it was found.
BATCH = "batch"


@dataclass(frozen=True)
class Finding:
    """One pair that leaks: the content of `source` reaches the output at `query`."""

    source: int  # position whose content was replaced (for `audit.batch`: the sample)
    query: int  # position whose output moved (for `audit.batch`: the sample)
    size: float  # largest change of that output; inf where it became NaN
    floor: float  # what rounding alone can do to it, measured; 0.0 where nothing else moved a bit
    module: str  # deepest module whose output moved while its input had not
    kind: str = "leak"
    sample: int = 0
    output: str = "output"
    hint: str = ""
    compared: bool = False  # two runs differ there, where a leak moves one output

    @property
    def line(self) -> str:
        """What leaks, without the hint."""
        return f"{self._effect} (rounding: {self.floor:.1g}), first in {self.module}"

    @property
    def _effect(self) -> str:
        size = f"{self.size:.3g}"
        if self.compared:
            return f"sample {self.sample}: output {self.query} differs by {size}, {self.kind}"
        if self.kind == BATCH:
            pair = f"position {self.sample}: sample {self.query} depends on sample {self.source}"
        else:
            pair = f"sample {self.sample}: output {self.query} depends on input {self.source}"
        return f"{pair}: moved by {size}"

    def __str__(self) -> str:
        return self.line + (f"\n    {self.hint}" if self.hint else "")


class Outcome(NamedTuple):
    """What one stage of an audit found; a report adds up the outcomes of its stages."""

    findings: tuple[Finding, ...] = ()
    moved: int = 0  # outputs that moved by more than rounding, narrowed down or not
    pairs: int = 0  # forbidden pairs, of which `untested` were not tested
    untested: int = 0
    trouble: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    forwards: float = 0.0
    # The largest effect, relative to the largest output, that looks like rounding.
    resolution: float = 0.0


@dataclass(frozen=True)
class Report:
    """The result of an audit: `ok`, `findings`, `covered`, `notes`; its text is `str()`."""

    subject: str
    question: str
    findings: tuple[Finding, ...] = ()
    # The share of the forbidden pairs that was tested: 1.0 is every one.
    covered: float = 1.0
    pairs: int = 0
    moved: int = 0
    # Random, stateful or failing models, NaN outputs: stated as such, never as leaks.
    trouble: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    forwards: float = 0.0
    # The largest effect, relative to the largest output, that looks like rounding.
    resolution: float = 0.0

    @classmethod
    def of(cls, subject: str, question: str, outcomes: Iterable[Outcome]) -> Report:
        """Add up the outcomes of all stages."""
        columns = zip(*outcomes, strict=True)
        findings, moved, pairs, untested, trouble, notes, forwards, resolutions = columns
        total = sum(pairs)
        return cls(
            subject,
            question,
            findings=sum(findings, ()),
            covered=max(0.0, 1 - sum(untested) / total) if total else 1.0,
            pairs=total,
            moved=sum(moved),
            trouble=sum(trouble, ()),
            notes=sum(notes, ()),
            forwards=sum(forwards),
            resolution=max(resolutions),
        )

    @property
    def ok(self) -> bool:
        """Whether nothing leaked, and every forbidden pair was tested."""
        return not self.findings and self.covered == 1

    @property
    def exit_code(self) -> int:
        """The exit code of a command: 0 ok, 1 something leaks, 3 it could not be (fully) tested."""
        return 0 if self.ok else 1 if self.findings else 3

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return "\n".join([self.headline, *self._findings(), *self.details])

    _repr_mimebundle_ = mimebundle

    @property
    def headline(self) -> str:
        """The verdict, in one line."""
        if self.findings:
            count = max(self.moved, len(self.findings))
            only_compared = all(finding.compared for finding in self.findings)
            what, how = ("DIFFERENCE", "differ") if only_compared else ("LEAK", "move")
            return f"{what} in {self.subject}: {count} of its outputs {how} ({self.question})"
        if not self.ok:
            how = "PARTLY TESTED" if self.covered else "NOT TESTED"
            return f"{how}: {self.subject} ({self.question})"
        return f"ok: {self.subject} ({self.question})"

    @property
    def details(self) -> list[str]:
        """The lines below the findings: what was covered, how precisely, trouble and notes."""
        lines = []
        if self.pairs:
            lines.append(
                f"  covered {self.covered:.1%} of {self.pairs} pairs in"
                f" {self.forwards:.3g} forwards"
            )
        if self.resolution:
            lines.append(
                f"  resolution: an effect below {self.resolution:.1g} of the largest output cannot"
                " be distinguished from rounding"
            )
        lines += [f"  trouble: {text}" for text in self.trouble]
        return lines + [f"  note: {text}" for text in self.notes]

    def _findings(self) -> list[str]:
        """List the findings; a hint that several share is printed once, below them."""
        hints = [finding.hint for finding in self.findings]
        shared = [hint for hint in dict.fromkeys(hints) if hint and hints.count(hint) > 1]
        lines = [f"  {f.line if f.hint in shared else f}" for f in self.findings]
        if (more := self.moved - len(self.findings)) > 0:
            compared = all(finding.compared for finding in self.findings)
            lines.append(f"  and {more} more" + (not compared) * ", not narrowed down to a source")
        for hint in shared:
            queries = ", ".join(str(f.query) for f in self.findings if f.hint == hint)
            lines.append(f"    outputs {queries}: {hint}")
        return lines
