"""What a class does on purpose: a named reason, and where its code or documentation says so."""

from __future__ import annotations

from typing import NamedTuple

from clearhead.dependence.library.runs.evidence import POSITIONS

__all__ = ["DESIGNS", "Design", "design_of"]


class Design(NamedTuple):
    """A reason why a finding is meant to be.

    It holds for the findings of a form and kind, of these types of model (of all where none is
    named), for which the second run saw the evidence (if any is named).
    """

    form: str
    kind: str
    reason: str
    reference: str
    types: tuple[str, ...] = ()
    evidence: str = ""
    detail: str = ""  # the finding's detail begins with it

    def explains(
        self, form: str, kind: str, detail: str, model_type: str, evidence: frozenset[str]
    ) -> bool:
        """Whether this is the reason for a finding."""
        return (
            (self.form, self.kind) == (form, kind)
            and detail.startswith(self.detail)
            and (not self.types or model_type in self.types)
            and (not self.evidence or self.evidence in evidence)
        )


DESIGNS = (
    Design(
        "padding",
        "padding amount",
        "absolute positions: without position_ids they are counted from the first token, so "
        "padding on the left moves them; with position_ids from the mask the logits are equal",
        "transformers/generation/utils.py: GenerationMixin._prepare_position_ids_for_generation",
        evidence=POSITIONS,
    ),
)


def design_of(
    form: str, kind: str, detail: str, model_type: str, evidence: frozenset[str]
) -> Design | None:
    """Find the reason for a finding, if it is meant to be."""
    known = (d for d in DESIGNS if d.explains(form, kind, detail, model_type, evidence))
    return next(known, None)
