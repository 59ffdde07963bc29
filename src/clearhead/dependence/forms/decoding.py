"""Decode the positions in chunks, one after the other, with the cache that the model fills."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.dependence.proof import ModuleCall, trace_modules
from clearhead.dependence.subject import ModelInputs, OutputRows, Runner, outputs_of

__all__ = ["ChunkedDecoding", "StepFunction"]

# Given the model, the keyword arguments of one chunk and the cache so far (None at first), returns
# the chunk's outputs and the cache with the chunk in it.
StepFunction = Callable[[Any, dict[str, Any], Any], tuple[Any, Any]]


class _Chunk(NamedTuple):
    start: int
    inputs: ModelInputs


class ChunkedDecoding:
    """One way to cut the positions into chunks."""

    def __init__(self, read: ModelInputs, model: Any, step: StepFunction, sizes: Sequence[int]):
        self._read, self._model, self._step, self._sizes = read, model, step, sizes

    def run(self) -> Iterator[tuple[int, list[OutputRows]]]:
        """Yield the first position and the outputs of each chunk."""
        forward = self._forward()
        for chunk in self._chunks():
            with torch.no_grad():
                answer = forward(*chunk.inputs.args, **chunk.inputs.kwargs)
            yield chunk.start, outputs_of(answer, chunk.inputs)

    def trace(self, sample: int, query: int, start: int) -> list[ModuleCall]:
        """List the module calls of the chunk at `start`, which `query` is in."""
        forward = self._forward()
        for chunk in self._chunks():
            if chunk.start == start:
                runner = Runner(_CallOf(forward, self._model), chunk.inputs)
                return trace_modules(runner, runner.inputs, sample, query - start)
            with torch.no_grad():
                forward(*chunk.inputs.args, **chunk.inputs.kwargs)
        return []

    def _forward(self) -> Callable[..., Any]:
        cache = None

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal cache
            answer, cache = self._step(self._model, self._named(args, kwargs), cache)
            return answer

        return forward

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = list(inspect.signature(getattr(self._model, "forward", self._model)).parameters)
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _chunks(self) -> Iterator[_Chunk]:
        start = 0
        for size in self._sizes:
            yield _Chunk(start, self._cut(start, start + size))
            start += size

    def _cut(self, start: int, stop: int) -> ModelInputs:
        read = self._read
        args = tuple(_cut(read, "", value, start, stop) for value in read.args)
        kwargs = {name: _cut(read, name, value, start, stop) for name, value in read.kwargs.items()}
        return replace(read, args=args, kwargs=kwargs, positions=stop - start)


def _cut(read: ModelInputs, name: str, value: Any, start: int, stop: int) -> Any:
    if not isinstance(value, Tensor) or value.ndim < 1:
        return value
    axis = min(1, value.ndim - 1)
    if value.shape[axis] != read.positions or name == "labels":
        return value
    # A padding mask describes all sources so far, everything else the new positions.
    first = 0 if "mask" in name else start
    return value.narrow(axis, first, stop - first)


class _CallOf:
    """A function that says which module it calls, so that a trace can hook it."""

    def __init__(self, function: Callable[..., Any], model: Any):
        self.function, self.__self__ = function, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
