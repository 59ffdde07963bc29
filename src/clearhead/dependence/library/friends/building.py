"""What other libraries give to audit: a few lines of Python that make a small model.

The lines build the model here, and stand as they are in the script of a finding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["BuiltFriend", "Friend", "build"]

# Tokens, positions of what is audited, and positions of what an encoder reads.
VOCABULARY, LENGTH, SOURCES = 80, 24, 17
# Weights get noise of SCALE / sqrt(inputs), so that attention is far from uniform.
SCALE = 1.5
SCALED = (
    "for p in model.eval().parameters(): p.data += torch.randn_like(p) * "
    f"({SCALE} / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.2)"
)


class Friend(NamedTuple):
    """A model of another library: its name, what it is, and the lines that make `model`."""

    name: str
    mapping: str  # of the questions that are asked: "causal", "masked", "encoder-decoder"
    model_type: str
    library: str  # the package, as it is imported
    lines: tuple[str, ...]  # with {backend} where the backend is named
    imports: str = ""  # more packages: ", x_transformers"
    chunks: tuple[int, ...] | None = None  # for a cache that takes single tokens alone

    def recipe(self, backend: str, seed: int = 0) -> tuple[str, ...]:
        """Write the lines that make `model`, with seeded random weights."""
        made = (line.replace("{backend}", backend) for line in self.lines)
        imports = f"import torch, torch.nn as nn{self.imports}"
        return (imports, f"torch.manual_seed({seed})", *made, SCALED)


class BuiltFriend(NamedTuple):
    """A model in eval mode, its inputs, and the lines that build it again."""

    model: nn.Module
    inputs: dict[str, Any]
    stream: str
    vocabulary: int
    notes: tuple[str, ...]
    model_type: str
    recipe: tuple[str, ...]
    caches: bool  # whether it takes a cache
    chunks: tuple[int, ...] | None
    lowest: int = 0  # the ids from here to `vocabulary` mean nothing special


def build(
    subject: Friend, backend: str = "sdpa", *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> BuiltFriend:
    """Run the lines of a subject; the random state outside stays as it is."""
    recipe = subject.recipe(backend, seed)
    # Findings name files of the package that a model says it comes from.
    names: dict[str, Any] = {"__name__": subject.library}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        exec(compile("\n".join(recipe), f"<{subject.name}>", "exec"), names)
    encodes = subject.mapping == "encoder-decoder"
    inputs = {"input_ids": tokens(SOURCES if encodes else LENGTH, seed)}
    if encodes:
        inputs["decoder_input_ids"] = tokens(LENGTH, seed + 1)
    stream = "decoder_input_ids" if encodes else "input_ids"
    model = names["model"].to(dtype)
    caches = "cache" in "".join(recipe)
    told = subject.model_type, recipe, caches, subject.chunks
    return BuiltFriend(model, inputs, stream, VOCABULARY, (), *told)


def tokens(length: int, seed: int) -> Tensor:
    """Draw two samples."""
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))
