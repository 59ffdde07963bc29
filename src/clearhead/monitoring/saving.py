"""The numbers of steps as rows, as a flat dict, and as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead._core import replacing, value_error
from clearhead.monitoring.statistics import STATISTICS

__all__ = ["flat", "rows", "write"]

SCHEMA, VERSION = "clearhead.monitor", 1


def rows(
    values: Tensor, layers: Sequence[int], heads: Sequence[int], modules: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield a dict for each layer and head that was read."""
    for layer, of_layer in zip(layers, values.tolist(), strict=False):
        for head, numbers in zip(heads, of_layer, strict=False):
            row = dict(zip(STATISTICS, numbers, strict=True))
            if row["rows"]:
                row["rows"] = int(row["rows"])
                yield {"layer": layer, "module": modules[layer], "head": head, **row}


def flat(
    values: Tensor, layers: Sequence[int], heads: Sequence[int], every_head: bool, prefix: str
) -> dict[str, float]:
    """Give the numbers under names as `attention/layer.3/entropy`."""
    found: dict[str, float] = {}
    for layer, of_layer in zip(layers, values.cpu(), strict=False):
        there = of_layer[..., -1] > 0
        for at, name in enumerate(STATISTICS):
            numbers = of_layer[there, at]
            if not len(numbers) or name == "rows":
                continue
            place = f"{prefix}/layer.{layer}"
            found |= _of_layer(f"{place}/{name}", numbers, name == "max_logit")
            if every_head:
                kept = [
                    head for head, is_there in zip(heads, there.tolist(), strict=False) if is_there
                ]
                pairs = zip(kept, numbers.tolist(), strict=True)
                found |= {f"{place}/head.{head}/{name}": number for head, number in pairs}
    return found


def _of_layer(name: str, numbers: Tensor, largest: bool) -> dict[str, float]:
    low, mean, high = (float(x) for x in (numbers.amin(), numbers.mean(), numbers.amax()))
    if largest:
        return {name: high, f"{name}_min": low, f"{name}_mean": mean}
    return {name: mean, f"{name}_min": low, f"{name}_max": high}


def write(
    path: Path,
    history: Sequence[tuple[int, Tensor]],
    layers: Sequence[int],
    heads: Sequence[int],
    modules: Sequence[str],
) -> None:
    """Write the history whole or not at all."""
    kinds = {".parquet": _parquet, ".safetensors": _safetensors}
    kind = kinds.get(path.suffix)
    if kind is None:
        raise value_error("path", "ends in .parquet or .safetensors", got=str(path))
    with replacing(path) as part:
        kind(part, history, layers, heads, modules)


def _parquet(part: Path, history: Any, layers: Any, heads: Any, modules: Any) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        hint = "pip install 'clearhead[scan]', or save to a name that ends in .safetensors"
        raise ImportError(f"monitor.save needs pyarrow for Parquet; to do: {hint}") from error
    found = [
        {"step": step, **row}
        for step, values in history
        for row in rows(values, layers, heads, modules)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), part)


def _safetensors(part: Path, history: Any, layers: Any, heads: Any, modules: Any) -> None:
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise ImportError(
            "monitor.save needs safetensors; to do: pip install safetensors"
        ) from error
    shape = tuple(max(values.shape[axis] for _, values in history) for axis in (0, 1))
    whole = torch.full(
        (len(history), *shape, len(STATISTICS)), torch.nan, dtype=history[0][1].dtype
    )
    for at, (_, values) in enumerate(history):
        whole[at, : values.shape[0], : values.shape[1]] = values.cpu()
    head = {
        "schema": SCHEMA, "version": VERSION, "statistics": STATISTICS, "layers": layers,
        "heads": heads, "modules": modules,
    }  # fmt: skip
    steps = torch.tensor([step for step, _ in history])
    tensors = {"steps": steps, "values": whole}
    part.write_bytes(save(tensors, {"clearhead": json.dumps(head)}))
