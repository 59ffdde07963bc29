"""Where the faults that were traced by hand come from: file and function in transformers."""

from __future__ import annotations

__all__ = ["CAUSES", "cause_of"]

# (model_type, form, kind) -> the place of the cause, which is not always where it first shows.
CAUSES: dict[tuple[str, str, str], str] = {
    ("falcon", "causal", "leak"): "models/falcon/modeling_falcon.py: FalconAttention.forward",
    ("fsmt", "causal", "cache mask"): "models/fsmt/modeling_fsmt.py: FSMTModel.forward",
}


def cause_of(form: str, kind: str, model_type: str) -> str:
    """The place of a cause that is known, or nothing."""
    return CAUSES.get((model_type, form, kind), "")
