"""One call of the compiled kernel: addresses in, tensors out."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from clearhead import readings
from clearhead.attention.impl import dropout
from clearhead.attention.problem import Problem
from clearhead.masks import Mask, Ranges
from clearhead.readings import BlockMapValue, Reading, TopKValue

# As in native/host/kernel.h.
CONTRACT = 3


def _load() -> tuple[Any, str]:
    """The compiled module, and why it is not there where it is not."""
    missing = "no C++ compiler was found when clearhead was installed"
    try:
        found: Any = import_module("clearhead.attention.impl.native._native")
    except ModuleNotFoundError:
        return None, missing
    except ImportError as error:
        return None, f"it was compiled, and does not load: {error}"
    if getattr(found, "contract", None) != CONTRACT:
        return None, (
            "it was built from another version of clearhead: install clearhead again, or run "
            "native/build.sh in a checkout"
        )
    return found, missing


_native, MISSING = _load()

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# The kernel takes so many intervals a row.
RANGES = 4
# A mask that is no union of intervals is written out as bytes for so many edges at a time.
EDGES = 1 << 24
# Sums over queries are added up in so many places, whatever the threads, to have the same bits.
SLOTS = 64


# Where scores are larger, fp32 rounds them by more than the kernel's exponential takes.
LARGEST = 1e8


class OutOfRange(ArithmeticError):
    """The numbers of a call are too large for the kernel, or not finite."""


def four(x: Tensor) -> Tensor:
    """The tensor as (batch, head, position, feature), features side by side."""
    if x.ndim != 4:
        x = x.reshape(-1, *x.shape[-3:])
    if x.is_neg():
        # What lies there has the other sign (the imaginary part of a conjugate).
        x = x.resolve_neg()
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def lifted(bias: Tensor, problem: Problem) -> Tensor:
    """The bias as (batch or 1, head or 1, query or 1, source or 1)."""
    rank = problem.query.ndim
    if rank == bias.ndim == 4:
        return bias
    bias = bias[(None,) * (rank - bias.ndim)]
    if any(n > 1 for n in bias.shape[:-3]):
        bias = bias.expand(*problem.query.shape[:-3], *bias.shape[-3:])
    return bias.reshape(-1, *bias.shape[-3:])


class Inputs:
    """The tensors of a problem as the kernel reads them; they live as long as the call."""

    def __init__(self, problem: Problem, ranges: Ranges | None = None, edges: Tensor | None = None):
        self.problem = problem
        self.query, self.key, self.value = map(four, (problem.query, problem.key, problem.value))
        self.ranges, self.edges, self.bias, self.sinks = ranges, edges, None, None
        if problem.mask is not None:
            self.ranges = problem.mask.ranges(*problem.sizes[2:], RANGES)
        if problem.bias is not None:
            shape = (*self.query.shape[:3], self.key.shape[2])
            self.bias = lifted(problem.bias.detach().resolve_neg(), problem).float().expand(shape)
        if problem.sinks is not None:
            self.sinks = problem.sinks.detach().resolve_neg().float().contiguous()

    def parts(self) -> list[range]:
        """The whole, or as many queries at a time as have few enough edges to write out."""
        query = self.query.shape[2]
        mask = self.problem.mask
        if mask is None or self.ranges is not None or mask.stored:
            return [range(query)]
        own, block = mask.own, _native.block()
        row = (own.batch or 1) * (own.head or 1) * self.key.shape[2]
        step = max(1, EDGES // (row * block)) * block
        return [range(i, min(i + step, query)) for i in range(0, query, step)]

    def call(self, out: Tensor, part: range | None = None) -> Any:
        """A kernel call on some of the queries, without results other than the context."""
        q, k, v = self.query, self.key, self.value
        if part is not None:
            q, out = q[:, :, part.start : part.stop], out[:, :, part.start : part.stop]
        call = _native.Forward(
            TYPES[q.dtype], q.data_ptr(), q.shape, q.stride(), k.data_ptr(), k.shape, k.stride(),
            v.data_ptr(), v.shape, v.stride(), out.data_ptr(), out.stride(), self.problem.scale,
        )  # fmt: skip
        if self.ranges is not None:
            call.set_ranges(*self.ranges.address_from(part.start if part is not None else 0))
        elif self.problem.mask is not None:
            queries = part or range(q.shape[2])
            self.edges = self.problem.mask.strip(queries, self.problem.sizes)
        if self.edges is not None:
            call.set_edges(self.edges.data_ptr(), steps(self.edges))
        if part is not None:
            call.set_part(part.start, self.query.shape[2])
        if self.bias is not None:
            bias = self.bias if part is None else self.bias[:, :, part.start : part.stop]
            call.set_bias(bias.data_ptr(), bias.stride())
        if self.sinks is not None:
            call.set_sinks(self.sinks.data_ptr())
        if self.problem.softcap is not None:
            call.set_softcap(self.problem.softcap)
        if self.problem.seed is not None:
            call.set_dropout(*dropout.bounds(self.problem.seed, self.problem.dropout))
        return call


def steps(x: Tensor) -> tuple[int, ...]:
    """The strides of a tensor that broadcasts: 0 where there is but one."""
    return tuple(s if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True))


class ReadEdges:
    """The edges whose mass is read, as ranges or, for some queries at a time, as bytes."""

    def __init__(self, inputs: Inputs, edges: Mask):
        self.inputs, self.edges = inputs, edges
        self.ranges = edges.ranges(*inputs.problem.sizes[2:], RANGES)
        self.bytes: Tensor | None = None

    def split(self, parts: list[range]) -> list[range]:
        """Parts of few enough queries to write their edges out."""
        if self.ranges is not None:
            return parts
        batch, head, _, _ = self.inputs.query.shape
        return split(parts, max(1, EDGES // (batch * head * self.inputs.key.shape[2])))

    def tell(self, call: Any, part: range) -> None:
        """Tell a kernel call on these queries."""
        if self.ranges is None:
            self.bytes = self.edges.strip(part, self.inputs.problem.sizes)
            call.set_mass_edges(self.bytes.data_ptr(), steps(self.bytes))
            return
        call.set_mass_ranges(*self.ranges.address_from(part.start))


class Results:
    """What the kernel fills beside the context: made to measure, handed out as reading values."""

    def __init__(self, inputs: Inputs, read: tuple[Reading, ...], graph: bool):
        self.inputs, self.read, self.kinds = inputs, read, {type(reading) for reading in read}
        self.shape = tuple(inputs.query.shape[:3])
        self.source = inputs.key.shape[2]
        # What the backward needs: the largest score of each row, and one over its sum.
        self.softmax = self._new(2, *self.shape) if graph else None
        self.lse = self._new(*self.shape) if graph or self._wants(readings.LogSumExp) else None
        self.entropy = self._new(*self.shape) if self._wants(readings.Entropy) else None
        self.distance = self._new(*self.shape) if self._wants(readings.Distance) else None
        self.top: Any = None
        self.received: Any = None
        self.cells: Any = None
        self.mass: Any = None
        self.edges: Any = None
        self.rows: Any = None
        self.slots = max(
            1, min(SLOTS // (self.shape[0] * self.shape[1]), -(-self.shape[2] // _native.block()))
        )
        if not read:
            return
        if top := max((r.k for r in read if isinstance(r, readings.TopK)), default=0):
            self.top = self._new(*self.shape, top), torch.empty(*self.shape, top, dtype=torch.int64)
        if self._wants(readings.Received):
            self.received = self._new(self.slots, *self.shape[:2], self.source).zero_()
        if self._wants(readings.BlockMap):
            self._make_cells(next(r.cells for r in read if isinstance(r, readings.BlockMap)))
        if self._wants(readings.Mass):
            self._make_mass(next(r.edges for r in read if isinstance(r, readings.Mass)))
        if self._wants(readings.Rows) or self._wants(readings.Weights):
            self._make_rows()

    def _wants(self, kind: type) -> bool:
        return kind in self.kinds

    @staticmethod
    def _new(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32)

    def _make_cells(self, cells: int) -> None:
        edges = [cuts(size, min(cells, size)) for size in (self.shape[2], self.source)]
        shape = (self.slots, *self.shape[:2], *(len(x) - 1 for x in edges))
        self.cells = (*edges, self._new(*shape).zero_(), self._new(*shape).zero_())

    def _make_mass(self, edges: Any) -> None:
        self.mass, self.edges = self._new(*self.shape), ReadEdges(self.inputs, edges)

    def _make_rows(self) -> None:
        self.row_of, count = row_numbers(self.read, self.shape[2])
        self.rows = self._new(*self.shape[:2], count, self.source).zero_()

    def ask(self, call: Any, part: range) -> None:
        """Tell a kernel call where its results go."""
        if self.lse is not None:
            call.set_lse(self.lse.data_ptr())
        if self.softmax is not None:
            call.set_softmax(*(x.data_ptr() for x in self.softmax))
        if self.entropy is not None:
            call.set_entropy(self.entropy.data_ptr())
        if self.distance is not None:
            call.set_distance(self.distance.data_ptr(), self.source - self.shape[2])
        if self.top is not None:
            weights, sources = self.top
            call.set_top(weights.shape[-1], weights.data_ptr(), sources.data_ptr())
        if self.mass is not None:
            call.set_mass(self.mass.data_ptr())
            self.edges.tell(call, part)
        if self.rows is not None:
            call.set_rows(self.row_of.data_ptr(), self.rows.shape[2], self.rows.data_ptr())
        call.set_slots(self.slots)
        if self.received is not None:
            call.set_received(self.received.data_ptr())
        if self.cells is not None:
            queries, sources, total, most = self.cells
            call.set_cells(
                len(queries) - 1,
                len(sources) - 1,
                *(x.data_ptr() for x in (queries, sources, total, most)),
            )

    def value(self, reading: Reading) -> Any:
        """The value of one reading, without the batch axes put back."""
        if isinstance(reading, readings.LogSumExp):
            return self.lse
        if isinstance(reading, readings.Entropy):
            return self._normalized() if reading.normalized else self.entropy
        if isinstance(reading, readings.Distance):
            return self.distance
        if isinstance(reading, readings.Mass):
            return self.mass
        if isinstance(reading, readings.TopK):
            return TopKValue(*(x[..., : reading.k] for x in self.top))
        if isinstance(reading, readings.Received):
            return self.received.sum(0)
        if isinstance(reading, readings.Weights):
            return self.rows
        if isinstance(reading, readings.Rows):
            return self.rows[..., self.row_of[list(reading.queries)].long(), :]
        queries, sources, total, most = self.cells
        edges = queries.diff()[:, None] * sources.diff()
        return BlockMapValue(total.sum(0) / edges, most.amax(0))

    def _normalized(self) -> Tensor:
        """The entropy over the largest it can be; 0 where there is one source."""
        assert self.entropy is not None
        many, largest = largest_entropy(self.inputs)
        return torch.where(many | self.entropy.isnan(), self.entropy / largest, 0)


def largest_entropy(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Where a row has more than one source, and the log of how many it has."""
    if inputs.ranges is None:
        count = torch.tensor(inputs.key.shape[2])
    else:
        start, stop = inputs.ranges.start[0], inputs.ranges.stop[0]
        count = stop.clamp(0, inputs.key.shape[2]) - start.clamp(0, inputs.key.shape[2])
    many = count > 1
    return many, torch.where(many, count, 2).to(torch.float32).log()


def cuts(size: int, cells: int) -> Tensor:
    """Where `cells` cells of `size` positions begin, and the end, split as torch.tensor_split."""
    width, longer = divmod(size, cells)
    at = [i * width + min(i, longer) for i in range(cells + 1)]
    return torch.tensor(at, dtype=torch.int32)


def queries_of(reading: Reading, query: int) -> Iterable[int]:
    """The queries whose weights a reading shows, in its order."""
    if isinstance(reading, readings.Weights):
        return range(query)
    return [x % query for x in reading.queries] if isinstance(reading, readings.Rows) else ()


def row_numbers(read: Iterable[Reading], query: int) -> tuple[Tensor, int]:
    """Number the queries that are shown, -1 for the others; and how many they are."""
    shown = sorted({x for reading in read for x in queries_of(reading, query)})
    row_of = torch.full((query,), -1, dtype=torch.int32)
    row_of[shown] = torch.arange(len(shown), dtype=torch.int32)
    return row_of, len(shown)


def native_readings(inputs: Inputs, read: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """Return those that the kernel takes while it works; there is room for one set of edges."""
    kinds, taken = set(), []
    for reading in read:
        kind = type(reading)
        if kind in ONCE and kind in kinds:
            continue
        if (
            kind in ALWAYS
            or kind in ONCE
            or (type(reading) is readings.Entropy and (not reading.normalized or counted(inputs)))
        ):
            kinds.add(kind)
            taken.append(reading)
    return tuple(taken)


def counted(inputs: Inputs) -> bool:
    """Say whether one subtraction tells how many sources a row may read."""
    if inputs.problem.bias is not None:
        return False
    one = inputs.ranges is not None and len(inputs.ranges.start) == 1
    return inputs.problem.mask is None or one


ALWAYS = {
    readings.LogSumExp, readings.TopK, readings.Received, readings.Distance, readings.Rows,
    readings.Weights,
}  # fmt: skip
ONCE = {readings.Mass, readings.BlockMap}


def forward(
    inputs: Inputs, read: tuple[Reading, ...] = (), graph: bool = False, strict: bool = True
) -> tuple[Tensor, Results | None]:
    """Run the kernel: the context, (batch, head, query, value_dim), and what else was asked for.

    OutOfRange if `strict` and scores or sums are too large to be told apart in fp32, or not finite.
    """
    q = inputs.query
    out = torch.empty(*q.shape[:3], inputs.value.shape[3], dtype=q.dtype)
    results = Results(inputs, read, graph) if read or graph else None
    parts = inputs.parts()
    if results is not None and results.edges is not None:
        parts = results.edges.split(parts)
    for part in parts:
        call = inputs.call(out, part if len(parts) > 1 else None)
        if results is not None:
            results.ask(call, part)
        if call.run(0) and strict:
            raise OutOfRange
    return out, results


def in_range(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the context of a call that is out of range, and for which rows it can be relied on."""
    out, results = forward(Inputs(problem), graph=True, strict=False)
    small = results.lse.abs() <= LARGEST  # type: ignore[union-attr]
    shape = (*problem.query.shape[:-1], -1)
    return out.reshape(shape), (small & out.isfinite().all(-1)).reshape(*shape[:-1], 1)


def plain(query: Any, key: Any, value: Any, mask: Any, scale: Any) -> Tensor | None:
    """The context, where all that was given is right at first sight: the shortest way there is."""
    if mask is not None and not (isinstance(mask, Mask) and mask.relative):
        return None
    call = _native.fast_call(query, key, value, scale)
    if call is None:
        return None
    if mask is not None:
        # The kernel reads them while it runs: they live as long as this name.
        ranges: Any = mask.ranges(call.query, call.source)
        call.set_ranges(*ranges.address)
    if call.run(0):
        raise OutOfRange
    return call.context


def split(parts: list[range], rows: int) -> list[range]:
    """Cut into parts of at most so many rows, in whole blocks of the kernel."""
    step = max(1, rows // _native.block()) * _native.block()
    return [part[i : i + step] for part in parts for i in range(0, len(part), step)]
