"""The state from which a stopped or killed scan resumes, in a directory beside the table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from clearhead._core import is_file_at, remove_parts, replacing, take_lock, value_error
from clearhead.heads.moments import Moments

__all__ = ["Checkpoint"]

# Of the state: a scan does not resume from another version.
VERSION = 3
_FIELDS = ("count", "mean", "spread")


class Checkpoint:
    """The directory FILE.partial: one state file, replaced as a whole, and finished rows.

    Rows of documents are written before the state that counts them, and a file that no state
    counts is overwritten. One process at a time holds the directory, by a lock that the system
    releases when the process ends.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.home = target.with_name(target.name + ".partial")
        self.parts = 0

    @property
    def exists(self) -> bool:
        """Whether there is a state to resume from."""
        return self._state.exists()

    @property
    def newer(self) -> bool:
        """Whether the state is newer than the table that exists."""
        return self._state.stat().st_mtime_ns >= self.target.stat().st_mtime_ns

    @property
    def _state(self) -> Path:
        return self.home / "state.safetensors"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock on FILE; remove the directory afterwards if it has no state."""
        file = self._locked()
        try:
            remove_parts(self.target)
            remove_parts(self._state)
            yield
        finally:
            if not self.exists:
                shutil.rmtree(self.home, ignore_errors=True)
            file.close()

    def _locked(self) -> IO[bytes]:
        while True:
            self.home.mkdir(exist_ok=True)
            try:
                file = (self.home / "lock").open("ab")
            except FileNotFoundError:  # the scan that held the lock has just ended
                continue
            if not take_lock(file.fileno()):
                file.close()
                hint = "wait for it, or write to another file"
                raise value_error("--out", "another scan writes it", got=self.target, hint=hint)
            # The previous holder may have removed the file.
            if is_file_at(file.fileno(), self.home / "lock"):
                return file
            file.close()

    def clear(self) -> None:
        """Remove the state and the rows; the lock stays."""
        self.parts = 0
        # The state first: rows without a state are ignored.
        self._state.unlink(missing_ok=True)
        for path in self.home.glob("rows-*.parquet"):
            path.unlink(missing_ok=True)

    def save(self, moments: Mapping[str, Moments], state: Mapping[str, Any]) -> None:
        """Write the state: moments by name, and values that JSON can hold."""
        from safetensors.torch import save_file

        tensors = {
            f"{name}.{field}": getattr(some, field).contiguous()
            for name, some in moments.items()
            for field in _FIELDS
        }
        document = json.dumps({**state, "version": VERSION, "parts": self.parts})
        with replacing(self._state) as part:
            save_file(tensors, part, metadata={"clearhead": document})

    def load(self) -> tuple[dict[str, Moments], dict[str, Any]]:
        """Read what `save` wrote."""
        from safetensors import SafetensorError, safe_open

        path, hint = self._state, "start over with --force"
        try:
            with safe_open(path, framework="pt") as file:
                state = json.loads(file.metadata()["clearhead"])
                tensors: dict[str, Tensor] = {
                    name: file.get_tensor(name)
                    for name in file.keys()  # noqa: SIM118
                }
            names = {name.rpartition(".")[0] for name in tensors}
            found = {name: Moments(*(tensors[f"{name}.{f}"] for f in _FIELDS)) for name in names}
            self.parts, version = state["parts"], state.get("version")
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise value_error("--resume", "cannot read its state", got=path, hint=hint) from error
        if version != VERSION:
            raise value_error("--resume", "another version of clearhead wrote its state", hint=hint)
        for path in self.row_files():
            if not path.is_file():
                raise value_error("--resume", "misses rows that were finished", got=path, hint=hint)
        return found, state

    def next_part(self) -> Path:
        """The file for the next finished rows; `add_part` counts it."""
        return self._part(self.parts)

    def add_part(self) -> None:
        """Count a file of rows that was written."""
        self.parts += 1

    def row_files(self) -> Iterator[Path]:
        """Return the files of finished rows, in order."""
        return map(self._part, range(self.parts))

    def _part(self, number: int) -> Path:
        return self.home / f"rows-{number:06}.parquet"
