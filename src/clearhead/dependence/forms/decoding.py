"""Decode the positions in chunks, one after the other, with the cache that the model fills."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.dependence.proof import ModuleCall, trace_modules
from clearhead.dependence.subject import (
    Measured,
    ModelInputs,
    OutputRows,
    Runner,
    outputs_of,
)

__all__ = ["ChunkedDecoding", "StepFunction", "named_arguments"]

# Given the model, the keyword arguments of one chunk and the cache so far (None at first), returns
# the chunk's outputs and the cache with the chunk in it.
StepFunction = Callable[[Any, dict[str, Any], Any], tuple[Any, Any]]


def named_arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by name."""
    parameters = inspect.signature(getattr(model, "forward", model)).parameters.values()
    names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    # A wrapper of a library model may declare *args and **kwargs alone.
    return {**dict(zip(names or ["input_ids"], args, strict=False)), **kwargs}


class _Chunk(NamedTuple):
    start: int
    inputs: ModelInputs


class ChunkedDecoding:
    """One way to cut the positions into chunks."""

    def __init__(
        self, read: ModelInputs, measured: Measured, step: StepFunction, sizes: Sequence[int]
    ):
        self._read = read.to(measured.dtype) if measured.dtype else read
        self._model, self._context = measured.model, measured.context
        self._step, self._sizes = step, sizes

    def run(self) -> Iterator[tuple[int, list[OutputRows]]]:
        """Yield the first position and the outputs of each chunk."""
        forward = self._forward()
        for chunk in self._chunks():
            with torch.no_grad(), self._context():
                answer = forward(*chunk.inputs.args, **chunk.inputs.kwargs)
            yield chunk.start, outputs_of(answer, chunk.inputs)

    def trace(self, sample: int, query: int, start: int) -> list[ModuleCall]:
        """List the module calls of the chunk at `start`, which `query` is in."""
        forward = self._forward()
        for chunk in self._chunks():
            if chunk.start == start:
                function = _CallOf(forward, self._model)
                runner = Runner(function, chunk.inputs, context=self._context)
                return trace_modules(runner, runner.inputs, sample, query - start)
            with torch.no_grad(), self._context():
                forward(*chunk.inputs.args, **chunk.inputs.kwargs)
        return []

    def _forward(self) -> Callable[..., Any]:
        cache = None

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal cache
            arguments = named_arguments(self._model, args, kwargs)
            answer, cache = self._step(self._model, arguments, cache)
            return answer

        return forward

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
    """A function that names the module it calls, so that a trace can hook it."""

    def __init__(self, function: Callable[..., Any], model: Any):
        self.function, self.__self__ = function, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
