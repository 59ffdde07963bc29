"""What an audit found, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Finding", "Report"]


@dataclass(frozen=True)
class Finding:
    """One pair that leaks: what `source` holds reaches the output at `query`, though it may not."""

    source: int  # position whose content was changed (for `audit.batch`: the sample)
    query: int  # position whose output moved (for `audit.batch`: the sample)
    size: float  # largest change of that output; inf where it became NaN
    floor: float  # what rounding alone can do to it, measured; 0.0 where nothing else moved a bit
    module: str  # deepest module whose output moved while what it was given had not
    kind: str = "leak"
    sample: int = 0
    output: str = "output"
    hint: str = ""

    @property
    def line(self) -> str:
        """What leaks, without the hint."""
        return (
            f"output {self.query} depends on input {self.source}: moved by {self.size:.3g} "
            f"(rounding: {self.floor:.1g}), first in {self.module}"
        )

    def __str__(self) -> str:
        return self.line + (f"\n    {self.hint}" if self.hint else "")


@dataclass
class Report:
    """The outcome of an audit: `ok`, `findings`, `covered`, `notes`; its text is `str()`."""

    subject: str
    question: str
    findings: list[Finding] = field(default_factory=list)
    # The share of the forbidden pairs that was put to the test: 1.0 is every one.
    covered: float = 1.0
    pairs: int = 0
    moved: int = 0
    # Random, stateful or failing models: said as such, never as leaks.
    trouble: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    forwards: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing leaked, and something was tested (or there was nothing to test)."""
        return not self.findings and (self.covered > 0 or self.pairs == 0)

    def as_dict(self) -> dict[str, Any]:
        """Give the report as plain data, ready for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return "\n".join([self._headline(), *self._details()])

    def _headline(self) -> str:
        if self.findings:
            count = max(self.moved, len(self.findings))
            return f"LEAK in {self.subject}: {count} of its outputs move ({self.question})"
        if not self.ok:
            return f"NOT TESTED: {self.subject} ({self.question})"
        return f"ok: {self.subject} ({self.question})"

    def _details(self) -> list[str]:
        lines = self._listed()
        if self.pairs:
            lines.append(
                f"  covered {self.covered:.1%} of {self.pairs} forbidden pairs (source, query)"
                f" in {self.forwards:.3g} forwards"
            )
        lines += [f"  trouble: {text}" for text in self.trouble]
        return lines + [f"  note: {text}" for text in self.notes]

    def _listed(self) -> list[str]:
        """The findings; a hint that several share stands once, below them."""
        hints = [finding.hint for finding in self.findings]
        shared = [hint for hint in dict.fromkeys(hints) if hint and hints.count(hint) > 1]
        lines = [f"  {f.line if f.hint in shared else f}" for f in self.findings]
        if (more := self.moved - len(self.findings)) > 0:
            lines.append(f"  and {more} more, not narrowed down to a source")
        for hint in shared:
            of = ", ".join(str(f.query) for f in self.findings if f.hint == hint)
            lines.append(f"    outputs {of}: {hint}")
        return lines
