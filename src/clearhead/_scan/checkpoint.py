"""What a scan needs to go on after it was stopped or killed, in a directory beside the table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead._files import replacing
from clearhead._heads.part import Layer
from clearhead._scan import table
from clearhead.errors import value_error

__all__ = ["Checkpoint"]


class Checkpoint:
    """The directory FILE.partial: one state file, replaced as a whole, and finished rows.

    Rows of documents are written before the state that counts them: a part that no state knows of
    is written over.
    """

    def __init__(self, target: Path) -> None:
        self.home = target.with_name(target.name + ".partial")
        self.parts = 0

    @property
    def exists(self) -> bool:
        """Whether there is something to go on with."""
        return (self.home / "state.safetensors").exists()

    def clear(self) -> None:
        """Forget everything."""
        shutil.rmtree(self.home, ignore_errors=True)

    def save(self, layers: Mapping[str, list[Layer]], state: Mapping[str, Any]) -> None:
        """Write the state: named lists of layers, and what JSON can hold."""
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        modules: dict[str, list[str]] = {}
        for name, found in layers.items():
            modules[name] = [layer.module for layer in found]
            for number, layer in enumerate(found):
                for field, tensor in layer.tensors().items():
                    tensors[f"{name}/{number}/{field}"] = tensor.contiguous().clone()
        self.home.mkdir(exist_ok=True)
        document = json.dumps({**state, "modules": modules, "parts": self.parts})
        with replacing(self.home / "state.safetensors") as part:
            save_file(tensors or {"none": torch.zeros(1)}, part, metadata={"clearhead": document})

    def load(self) -> tuple[dict[str, list[Layer]], dict[str, Any]]:
        """Read what `save` wrote."""
        from safetensors import SafetensorError, safe_open

        path = self.home / "state.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                state = json.loads(file.metadata()["clearhead"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.parts = state["parts"]
            return {
                name: [_layer(tensors, name, i, module) for i, module in enumerate(modules)]
                for name, modules in state["modules"].items()
            }, state
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            hint = "start over with --force"
            raise value_error("--resume", "cannot read its state", got=path, hint=hint) from error

    def add_rows(self, rows: list[dict[str, Any]]) -> None:
        """Write rows that are finished."""
        if rows:
            self.home.mkdir(exist_ok=True)
            table.write(self._part(self.parts), rows, {})
            self.parts += 1

    def row_files(self) -> Iterator[Path]:
        """Give the files that `add_rows` wrote, in order."""
        return map(self._part, range(self.parts))

    def _part(self, number: int) -> Path:
        return self.home / f"rows-{number:06}.parquet"


def _layer(tensors: Mapping[str, Tensor], name: str, number: int, module: str) -> Layer:
    start = f"{name}/{number}/"
    return Layer.of(
        module, {key[len(start) :]: x for key, x in tensors.items() if key.startswith(start)}
    )
