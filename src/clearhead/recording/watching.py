"""watch(): see the attention calls that a model really makes, without changing them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from clearhead import readings
from clearhead._capture import attached, watchable
from clearhead._core import numbers
from clearhead.readings import Reading
from clearhead.recording import cost
from clearhead.recording.records import Record, Seen
from clearhead.recording.request import Request
from clearhead.recording.watcher import Watcher

__all__ = ["estimate", "watch"]

_TOP = readings.TopK(8)


def estimate(
    model: nn.Module | Callable[..., Any],
    inputs: Any,
    *,
    read: Reading | Sequence[Reading] = _TOP,
    layers: int | Sequence[int] | None = None,
) -> cost.Cost:
    """Estimate what `watch(model, read=...)` takes for one call with these inputs.

    >>> import torch, clearhead as ch
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.zeros(1, 100, 8)
    >>> ch.estimate(layer, (x, x, x), read=ch.readings.Weights()).bytes
    80000

    `inputs` is a tensor, a tuple of arguments, or a dict of keywords. The model is run on shapes
    alone where it allows that, and once on the inputs themselves where it does not.
    """
    wanted = (read,) if isinstance(read, Reading) else tuple(read)
    measured = cost.CallSizes()

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        measured.calls.clear()
        with attached(model, measured):
            yield

    cost.run_once(model, inputs, watched)
    chosen = numbers("layers", layers)
    total = 1 + max((layer for layer, _ in measured.calls), default=-1)
    kept = None if chosen is None else {layer % total for layer in chosen}
    calls = [sizes for layer, sizes in measured.calls if kept is None or layer in kept]
    edges = sum(math.prod(sizes) for sizes in calls)
    return cost.Cost(
        calls=len(calls),
        edges=edges,
        bytes=sum(reading.nbytes(sizes) for sizes in calls for reading in wanted),
        seconds=cost.seconds(wanted, edges, max((sizes.head for sizes in calls), default=1)),
    )


@contextlib.contextmanager
def watch(
    model: nn.Module | Callable[..., Any],
    *,
    read: Reading | Sequence[Reading] = _TOP,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    queries: int | Sequence[int] | None = None,
    calls: int | Sequence[int] | None = None,
    through: bool = False,
    on_call: Callable[[Record], None] | None = None,
) -> Iterator[Seen]:
    """Read the weights of every attention call that a model makes inside the block.

    >>> import torch, clearhead as ch
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.zeros(1, 3, 8)
    >>> with ch.watch(layer, read=ch.readings.Weights()) as seen:
    ...     context, _ = layer(x, x, x, need_weights=False)
    >>> seen[0].kind, seen[0].value.shape
    ('self', torch.Size([1, 2, 3, 3]))

    The model's own kernel makes the output, on the backend that the model chose: it is
    bit-identical to that of an unwatched run. Readings are detached, in float32 (float64 for
    float64 models), and taken before dropout. Nothing is left behind on the model.

    - `read`: one reading or several; `record.value` mirrors it.
    - `layers`, `heads`, `queries`, `calls`: the numbers to read; nothing is computed for others.
      `queries` may count from the end.
    - `through`: clearhead's own kernel makes context and readings in one pass: faster, and equal to
      rounding only. Handwritten attention keeps the model's own context.
    - `on_call`: receives each record as it is made; records are then not kept in `seen`.

    Calls are seen through `F.scaled_dot_product_attention`, `nn.MultiheadAttention`,
    `nn.Transformer*`, `transformers` on any backend, `flex_attention`, `clearhead.attend`, and
    handwritten matmul, softmax, matmul. A block that saw nothing raises on leaving.
    """
    inner = watchable(model)
    request = Request.of(read, layers=layers, heads=heads, queries=queries, calls=calls)
    watcher = Watcher(inner, request, through, on_call)
    with attached(model, watcher) as interceptor:
        if inner is not model or not interceptor.modules.eager:
            watcher.note("the model is compiled: inside the block it runs eagerly")
        watcher.modules = interceptor.modules
        yield watcher.seen
    watcher.finish(interceptor)
    # A cycle would hold the records after the caller has released them.
    del watcher.modules
