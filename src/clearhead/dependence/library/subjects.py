"""The classes of the installed transformers that are audited: of three of its mappings."""

from __future__ import annotations

from typing import Any, NamedTuple

from clearhead._core import value_error
from clearhead.dependence.library.exceptions import VARIANTS

__all__ = ["Subject", "catalogue", "subject_named"]

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}


class Subject(NamedTuple):
    """A class to audit; a variant of it has a name such as `FalconForCausalLM:alibi`."""

    name: str
    mapping: str
    model_type: str

    @property
    def class_name(self) -> str:
        """The name of the class in transformers."""
        return self.name.partition(":")[0]


def catalogue() -> tuple[Subject, ...]:
    """List every class of the three mappings once each, with variants, sorted."""
    from transformers.models.auto import modeling_auto

    subjects = []
    for mapping, names in MAPPINGS.items():
        types: dict[str, str] = {}
        for model_type, name in getattr(modeling_auto, names).items():
            for one in (name,) if isinstance(name, str) else name:
                types[one] = min(types.get(one, model_type), model_type, key=_rank(one))
        for name, model_type in types.items():
            known = (name, *(f"{name}:{variant}" for variant in VARIANTS.get(name, ())))
            subjects += [Subject(one, mapping, model_type) for one in known]
    order = list(MAPPINGS)
    return tuple(sorted(subjects, key=lambda s: (order.index(s.mapping), s.name)))


def _rank(name: str) -> Any:
    """Prefer the type that a class is named after: "llama" for LlamaForCausalLM, not "exaone"."""

    def rank(model_type: str) -> tuple[bool, int, str]:
        plain = model_type.removesuffix("_text").replace("_", "").replace("-", "")
        return not name.lower().startswith(plain), len(model_type), model_type

    return rank


def subject_named(name: str) -> Subject:
    """Find a subject by its name; of a class in several mappings, the first."""
    found = [subject for subject in catalogue() if subject.name == name]
    if not found:
        import transformers

        raise value_error(
            "classes",
            "must be in transformers' causal, masked or encoder-decoder mapping",
            got=repr(name),
            hint=f"catalogue() lists those of transformers {transformers.__version__}",
        )
    return found[0]
