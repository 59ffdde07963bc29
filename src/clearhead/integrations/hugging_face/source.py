"""What the source of a model says about the implementations that it can take.

A model that decides by the name of the implementation takes one branch for "eager" and another for
an unknown name. Masks are made in the form of "eager", so every comparison that comes out alike for
both is harmless; a comparison with "eager" itself is not, unless it is known to be.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterator

from clearhead._core import value_error

__all__ = ["NAMES", "reasons_of", "refuse"]

# The names under which the attention function is registered.
NAMES: set[str] = set()

# Comparisons with "eager" after which another name computes the same, with the reason.
_HARMLESS = {
    # It chooses between two forms of one equation, of which the other one upcasts.
    "gpt2": {"self.config._attn_implementation == 'eager'"},
    "decision_transformer": {"self.config._attn_implementation == 'eager'"},
    # A part that has no eager attention falls back to SDPA for "eager", and takes other names.
    "qwen2_5_omni": {"config._attn_implementation == 'eager'"},
}

_ATTENTION = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)
_ASKS = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)")


@functools.cache
def reasons_of(name: str) -> tuple[str, ...]:
    """Give the reasons why the models of a Python module cannot be served, by its source."""
    source = _source(name)
    if "PreTrainedModel" not in source:
        return ()
    reasons = []
    if _ATTENTION.search(source) and not _ASKS.search(source):
        reasons.append(f"{name} has attention of its own and never asks for an implementation")
    known = _HARMLESS.get(name.rpartition(".modeling_")[2], set())
    reasons += [
        f'{name} treats "eager" unlike any other name: {found}'
        for found in dict.fromkeys(_comparisons(source))
        if found not in known
    ]
    return tuple(reasons)


def refuse(package: str) -> None:
    """Raise where a loaded modeling file of a package says that its models cannot be served."""
    # A copy: another thread may import.
    for name in list(sys.modules):
        home, _, file = name.rpartition(".")
        if home == package and file.startswith("modeling_") and (reasons := reasons_of(name)):
            raise value_error(
                "attn_implementation",
                "this model cannot be served: " + "; ".join(reasons),
                hint='use "eager" or "sdpa", and clearhead.watch(model) to read its weights',
            )


def _source(name: str) -> str:
    try:
        return inspect.getsource(sys.modules[name])
    except (OSError, TypeError, KeyError):
        return ""


def _comparisons(source: str) -> Iterator[str]:
    """Give the comparisons of something like an attention implementation with "eager"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Compare, ast.match_case)):
            text = ast.unparse(node)
            constants = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
            if "eager" in constants and "expert" not in text:
                yield text.partition("\n")[0]
