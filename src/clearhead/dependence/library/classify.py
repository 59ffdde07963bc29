"""What a confirmed finding is: its kind, by rule, and whether it is a fault or meant to be."""

from __future__ import annotations

from dataclasses import replace

from clearhead.dependence.library.reasons.by_design import design_of
from clearhead.dependence.library.reasons.causes import cause_of
from clearhead.dependence.library.rerun import Proof
from clearhead.dependence.library.rows import BY_DESIGN, FAULT, NOT_TESTED, Row, readable
from clearhead.dependence.library.runs.evidence import CACHE, FUTURE, RECURRENT

__all__ = ["kind_of", "settled"]

KINDS = {"generation": "cache mask", "batch": "batch", "modes": "modes"}


def kind_of(row: Row, evidence: frozenset[str]) -> str:
    """Name the kind of a finding from its form, its detail and what the second run saw."""
    if row.form == "causal":
        return "cache mask" if CACHE in evidence else "leak"
    if row.form == "padding":
        return "padding content" if row.detail.startswith("content") else "padding amount"
    if row.form == "documents":
        return "carried state" if RECURRENT in evidence else "documents"
    return "leak" if FUTURE in evidence else KINDS[row.form]


def settled(row: Row, proof: Proof) -> Row:
    """Put what the second run showed into the row of a finding."""
    if not proof.confirmed or proof.sizes is None:
        why = proof.trouble or f"the logits differ by {proof.size:.2g} there, within rounding"
        reason = readable(f"the audit's finding is not confirmed by a plain second run: {why}")
        return replace(row, verdict=NOT_TESTED, reason=reason, confirmed=False)
    kind, sizes = kind_of(row, proof.evidence), proof.sizes
    row = replace(
        row,
        kind=kind,
        query=proof.query,
        size=sizes.size if sizes.own else sizes.exact,
        logits=sizes.logits,
        confirmed=True,
    )
    if design := design_of(row.form, kind, row.detail, proof.model_types, proof.evidence):
        return replace(row, verdict=BY_DESIGN, reason=design.reason, reference=design.reference)
    cause = cause_of(row.form, kind, proof.model_types)
    return replace(
        row,
        verdict=FAULT,
        place=cause.place if cause else row.place,
        reason=cause.reason if cause else row.reason,
    )
