"""Records on disk: one safetensors file, whose header holds a JSON document that describes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead import masks, readings
from clearhead._core import replacing, type_error, value_error
from clearhead.masks import Mask

__all__ = ["SCHEMA", "VERSION", "read", "write"]

SCHEMA, VERSION = "clearhead.seen", 1
# Masks with more edges than this are left out: the file is for the readings.
_MASK_LIMIT = 1 << 26


class Writer:
    """Turns a tree of values into named tensors and a JSON outline of them."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._masks: dict[int, Any] = {}

    def tensor(self, tensor: Tensor) -> str:
        """Add a tensor, and return its name."""
        name = f"t{len(self.tensors)}"
        self.tensors[name] = tensor.detach().cpu().contiguous().clone()
        return name

    def value(self, value: Any) -> Any:
        """Outline a value: a tensor's name, a named pair, or a list of outlines."""
        if isinstance(value, Tensor):
            return self.tensor(value)
        if not isinstance(value, tuple):
            raise type_error("value", "can be saved where it is tensors", got=type(value).__name__)
        parts = [self.value(part) for part in value]
        if hasattr(value, "_fields"):
            return {"type": type(value).__name__, "parts": parts}
        return parts

    def reading(self, reading: Any, sizes: tuple[int, int, int, int]) -> Any:
        """Outline a reading by its type and arguments, or several; None where it is unknown."""
        if isinstance(reading, tuple):
            return [self.reading(one, sizes) for one in reading]
        if getattr(readings, type(reading).__name__, None) is not type(reading):
            return None
        given = {name: one for name, one in vars(reading).items() if not name.startswith("_")}
        edges = {n: self.mask(one, sizes) for n, one in given.items() if isinstance(one, Mask)}
        return {"type": type(reading).__name__, "arguments": {**given, **edges}}

    def mask(self, mask: Mask | None, sizes: tuple[int, int, int, int]) -> Any:
        """Outline a mask: its expression, or the tensor of its edges."""
        if mask is None:
            return None
        if id(mask) not in self._masks:
            self._masks[id(mask)] = self._mask(mask, sizes)
        return self._masks[id(mask)]

    def _mask(self, mask: Mask, sizes: tuple[int, int, int, int]) -> Any:
        text = repr(mask)
        try:
            masks.parse(text)
            return {"expression": text}
        except (ValueError, TypeError):
            pass
        batch, heads, query, source = sizes
        size = query * source * (mask.own.batch or 1) * (mask.own.head or 1)
        if size > _MASK_LIMIT:
            return {"left out": text}
        return {"edges": self.tensor(mask.dense(query, source, batch=batch, head=heads))}


def write(path: str | Path, document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the file whole or not at all."""
    from safetensors.torch import save_file

    with replacing(Path(path)) as part:
        save_file(tensors, part, metadata={"clearhead": json.dumps(document)})


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file that `write` wrote; another file, schema or version is a ValueError."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            document = json.loads((file.metadata() or {}).get("clearhead", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise value_error(
            "path", "is a file that seen.save wrote", got=f"{path}: {error}"
        ) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise value_error("path", "is a file that seen.save wrote", got=str(path))
    if document.get("version") != VERSION:
        found = document.get("version")
        raise value_error("path", f"is of schema version {VERSION}", got=f"version {found}")
    return document, tensors


def value(outline: Any, tensors: dict[str, Tensor]) -> Any:
    """Rebuild a value from its outline."""
    if isinstance(outline, str):
        return tensors[outline]
    if isinstance(outline, dict):
        kind = getattr(readings, outline["type"])
        return kind(*(value(part, tensors) for part in outline["parts"]))
    return tuple(value(part, tensors) for part in outline)


def reading(outline: Any, tensors: dict[str, Tensor]) -> Any:
    """Rebuild a reading, or several, from its outline; one that is not known is None."""
    if outline is None:
        return None
    if isinstance(outline, list):
        return tuple(reading(one, tensors) for one in outline)
    given = dict(outline["arguments"])
    if isinstance(given.get("edges"), dict):
        given["edges"] = mask(given["edges"], tensors)
    if None in given.values():
        return None
    return getattr(readings, outline["type"])(**given)


def mask(outline: Any, tensors: dict[str, Tensor]) -> Mask | None:
    """Rebuild a mask from its outline; one that was left out is None."""
    if outline is None or "left out" in outline:
        return None
    if "expression" in outline:
        return masks.parse(outline["expression"])
    edges = tensors[outline["edges"]]
    assert edges.dtype == torch.bool
    return masks.dense(edges)
