"""A reason why a finding is meant to be, and the cause of one that is not."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Cause", "Design"]


class Design(NamedTuple):
    """A reason why a finding is meant to be.

    It holds for the findings of a form and a kind whose detail begins with `detail`, of these types
    of model (of all where none is named), for which the second run saw the evidence (if any).
    """

    form: str
    kind: str
    reason: str
    reference: str
    types: tuple[str, ...] = ()
    evidence: str = ""
    detail: str = ""

    def explains(
        self, form: str, kind: str, detail: str, types: tuple[str, ...], evidence: frozenset[str]
    ) -> bool:
        """Whether this is the reason for a finding."""
        return (
            (self.form, self.kind) == (form, kind)
            and detail.startswith(self.detail)
            and (not self.types or any(one in self.types for one in types))
            and (not self.evidence or self.evidence in evidence)
        )


class Cause(NamedTuple):
    """The place of a cause, which is not always where it first shows, and what happens there."""

    place: str
    reason: str
