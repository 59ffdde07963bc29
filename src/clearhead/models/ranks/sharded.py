"""The state of a training as shards: each process writes some of the tensors, none is pickled.

    training.json         the header, and which folder holds the tensors
    training-1a2b3c/      a safetensors file of each process, by torch.distributed.checkpoint

A folder is written under another name and renamed when it is whole, then the header is replaced:
what is there before a crash is there after it. Any number of processes can read the shards.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead._core import is_refusal, replacing, value_error
from clearhead.models.checkpoint import check_version
from clearhead.models.ranks.group import Group

__all__ = [
    "HEADER_FILE",
    "is_current",
    "read_shards",
    "remove_parts_of_shards",
    "remove_shards",
    "write_shards",
]

HEADER_FILE = "training.json"
_PREFIX = "training-"


def is_current(path: Path, other: Path) -> bool:
    """Whether a directory holds shards, and no later state in the file `other`."""
    header = path / HEADER_FILE
    if not header.is_file():
        return False
    return not other.is_file() or header.stat().st_mtime_ns >= other.stat().st_mtime_ns


def write_shards(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any], group: Group
) -> None:
    """Write the state of all processes, which call this together."""
    name = group.told(f"{_PREFIX}{time.time_ns():x}")
    part = path / f".{name}.part"
    try:
        _save(part, tensors, group)
        if group.first:
            _check_whole(part, tensors)
            files = {file.name: file.stat().st_size for file in sorted(part.iterdir())}
            os.replace(part, path / name)
            with replacing(path / HEADER_FILE) as file:
                file.write_text(json.dumps({**header, "folder": name, "files": files}))
            remove_shards(path, but=name)
    finally:
        if group.first:
            shutil.rmtree(part, ignore_errors=True)


def _checkpointing() -> Any:
    """Import torch.distributed.checkpoint, which takes a while, where it is needed."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def _save(folder: Path, tensors: Mapping[str, Tensor], group: Group) -> None:
    dcp = _checkpointing()
    # Its slices have an axis.
    state = {name: x.detach().reshape(x.shape or (1,)) for name, x in tensors.items()}
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(state, storage_writer=writer, process_group=group.of)
    except dcp.CheckpointException as error:
        reasons = {f"rank {rank}: {found[0]}" for rank, found in error.failures.items()}
        text = "; ".join(sorted(reasons))
        raise OSError(f"{folder.parent}: {text}; what was there before is untouched") from None


def _check_whole(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise where shards are missing, as on machines whose folders are not the same."""
    dcp = _checkpointing()
    there = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    if missing := sorted(tensors.keys() - there.keys()):
        raise OSError(
            f"{folder.parent}: {len(missing)} of {len(tensors)} tensors were not written there, "
            f"first {missing[0]}: all processes have to see the same folder"
        )


def remove_shards(path: Path, but: str = "") -> None:
    """Remove the shards of other states; where none stays, the header first."""
    if not but:
        (path / HEADER_FILE).unlink(missing_ok=True)
    for folder in path.glob(f"{_PREFIX}*"):
        if folder.is_dir() and folder.name != but:
            shutil.rmtree(folder, ignore_errors=True)


def remove_parts_of_shards(path: Path) -> None:
    """Remove the partial shards of killed processes; the caller holds the lock on `path`."""
    for folder in path.glob(f".{_PREFIX}*.part"):
        shutil.rmtree(folder, ignore_errors=True)


def read_shards(path: Path, weights: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and header; without `weights` only the header."""
    header = _header(path)
    name, files = header.pop("folder"), header.pop("files")
    if not weights:
        return {}, header
    folder = path / name
    for file, size in files.items():
        there = folder / file
        if not there.is_file() or there.stat().st_size != size:
            got = f"{there}, which is {'cut short' if there.is_file() else 'not there'}"
            raise value_error("resume", f"has its {len(files)} shards of the state", got=got)
    return _load(folder), header


def _header(path: Path) -> dict[str, Any]:
    file = path / HEADER_FILE
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
        check_version(header, file)
        names = [header["folder"], *header["files"]]
        if any(Path(name).name != name for name in names):
            raise ValueError("a name leads elsewhere")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if is_refusal(error):
            raise
        raise _damaged(file, error) from None
    return header


def _damaged(where: Path, error: Exception) -> ValueError:
    return value_error("resume", f"the state of the training is damaged ({error})", got=where)


def _load(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError

    dcp = _checkpointing()
    try:
        found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, KeyError) as error:
        raise _damaged(folder, error) from error
    tensors: dict[str, Tensor] = {
        name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in found.items()
    }
    with warnings.catch_warnings():
        # Each process reads all of it by itself.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return tensors
