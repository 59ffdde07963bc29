"""Shards of a scan: each counts some windows of a corpus; their files merge to one table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from clearhead._core import replacing, value_error
from clearhead.heads.layer_moments import LayerOutline, Totals
from clearhead.heads.moments import Moments

__all__ = ["Shard", "WindowMoments", "check_same", "merged", "windows_in", "write_shard"]

SCHEMA, VERSION = "clearhead.scan.shard", 1
_FIELDS, _WINDOW = ("count", "mean", "spread"), "window."
# What every shard of a scan has counted for itself; all else is the same in all of them.
_OWN = ("sequences", "tokens")


class Shard(NamedTuple):
    """Number `number` of `of` shards, from 1: it counts every `of`-th window."""

    number: int
    of: int

    @staticmethod
    def parse(text: str) -> Shard:
        """Read "3/16".

        >>> Shard.parse("3/16")
        Shard(number=3, of=16)
        """
        number, slash, of = text.partition("/")
        whole = slash and number.isdecimal() and of.isdecimal()
        if not (whole and 1 <= int(number) <= int(of)):
            hint = "--shard 1/16 to --shard 16/16 are the shards of one scan"
            raise value_error("--shard", "is K/N, with 1 <= K <= N", got=text, hint=hint)
        return Shard(int(number), int(of))

    def has(self, window: int) -> bool:
        """Whether the shard counts a window, numbered from 0."""
        return window % self.of == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


class WindowMoments:
    """The moments of windows: merged as they come, or each kept where others lie between."""

    def __init__(self, separate: bool) -> None:
        self.separate = separate
        self.windows: dict[int, Moments] = {}

    def add(self, window: int, moments: Moments) -> None:
        """Count a window, later than those before."""
        if not self.separate and self.windows:
            window, moments = 0, self.whole().merge(moments)
        self.windows[window] = moments

    def whole(self) -> Moments:
        """All windows, merged in their order."""
        return reduce(Moments.merge, (self.windows[number] for number in sorted(self.windows)))

    def named(self) -> dict[str, Moments]:
        """The windows by their names in a file."""
        return {f"{_WINDOW}{number}": moments for number, moments in self.windows.items()}


def windows_in(moments: Mapping[str, Moments]) -> dict[int, Moments]:
    """The windows among the moments of a file."""
    return {
        int(name.removeprefix(_WINDOW)): some
        for name, some in moments.items()
        if name.startswith(_WINDOW)
    }


def write_shard(
    path: Path,
    shard: Shard,
    about: Mapping[str, Any],
    windows: int,
    outlines: Sequence[LayerOutline],
    counted: WindowMoments,
) -> None:
    """Write what a shard counted, and what identifies its scan, which has so many windows."""
    from safetensors.torch import save_file

    tensors = {
        f"{name}.{field}": getattr(some, field).contiguous()
        for name, some in counted.named().items()
        for field in _FIELDS
    }
    own = {"schema": SCHEMA, "version": VERSION, "shard": shard, "windows": windows}
    document = json.dumps({**own, "layers": list(outlines), "about": about})
    with replacing(path) as part:
        save_file(tensors, part, metadata={"clearhead": document})


def merged(paths: Sequence[Path]) -> tuple[dict[str, Any], Totals]:
    """Merge the files of all shards of one scan: what the whole scan is about, and its numbers.

    The windows are merged in their order, as one process merges them.
    """
    found = [_read(path) for path in paths]
    _check_complete(paths, [head for head, _ in found])
    heads = [head for head, _ in found]
    about = {**heads[0]["about"]}
    for name in _OWN:
        about[name] = sum(head["about"][name] for head in heads)
    counted = WindowMoments(separate=True)
    for _, windows in found:
        counted.windows |= windows
    if not counted.windows:
        raise value_error("--merge", "has shards that counted no text", got=_listed(paths))
    outlines = next(head["layers"] for head in heads if head["layers"])
    return about, Totals([LayerOutline(*each) for each in outlines], counted.whole())


def check_same(about: Mapping[str, Any], shard: Shard, path: Path) -> None:
    """Refuse the file of a shard of another scan."""
    head, _ = _read(path)
    found = {**head["about"], "shard": Shard(*head["shard"])}
    for name, value in {**about, "shard": shard}.items():
        if found.get(name) != value:
            got = f"{name} was {found.get(name)!r}, now {value!r}"
            hint = "ask for the same scan, or start over with --force"
            raise value_error("--resume", "is another scan", got=got, hint=hint)


def _read(path: Path) -> tuple[dict[str, Any], dict[int, Moments]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise value_error("--merge", "is a file for each shard", got=f"{path}, which is none")
    try:
        with safe_open(path, framework="pt") as file:
            head = json.loads(file.metadata()["clearhead"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if (head["schema"], head["version"]) != (SCHEMA, VERSION):
            raise ValueError(f"{head['schema']}, version {head['version']}")
        names = {name.rpartition(".")[0] for name in tensors}
        found = {name: Moments(*(tensors[f"{name}.{f}"] for f in _FIELDS)) for name in names}
        return head, windows_in(found)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        hint = "`clearhead scan --shard K/N` writes one; a whole table needs no merge"
        raise value_error(
            "--merge", f"cannot read {path} as a shard of this version", got=reason, hint=hint
        ) from error


def _check_complete(paths: Sequence[Path], heads: Sequence[Mapping[str, Any]]) -> None:
    """Refuse shards of different scans, shards that are there twice, and shards that miss."""
    same: dict[str, tuple[Any, Path]] = {}
    for path, head in zip(paths, heads, strict=True):
        for name, value in _common(head).items():
            first, where = same.setdefault(name, (value, path))
            if value != first:
                got = f"{name} is {first!r} in {where}, {value!r} in {path}"
                raise value_error("--merge", "takes the shards of one scan", got=got)
    numbers, of = [head["shard"][0] for head in heads], heads[0]["shard"][1]
    if twice := sorted({number for number in numbers if numbers.count(number) > 1}):
        raise value_error("--merge", "takes each shard once", got=f"shard {twice[0]}/{of} twice")
    if missing := sorted({*range(1, of + 1)} - {*numbers}):
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        got = f"{len(numbers)} of {of}, without {missing[0]}/{of}{rest}"
        raise value_error("--merge", "needs every shard", got=got, hint="scan what is missing")


def _common(head: Mapping[str, Any]) -> dict[str, Any]:
    """What is the same in all shards of a scan."""
    about = {name: value for name, value in head["about"].items() if name not in _OWN}
    # A shard without a window has met no layer.
    layers = {"layers": head["layers"]} if head["layers"] else {}
    return {"number of shards": head["shard"][1], "windows": head["windows"], **layers, **about}


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths[:3]))
