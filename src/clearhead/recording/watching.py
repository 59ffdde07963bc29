"""watch(): see the attention calls that a model really makes, without changing them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from clearhead import readings
from clearhead._capture import attach
from clearhead._core import numbers
from clearhead.readings import Reading
from clearhead.recording import cost
from clearhead.recording.records import Record, Seen, load
from clearhead.recording.watcher import Watcher

__all__ = ["Record", "Seen", "estimate", "load", "watch"]

_TOP = readings.TopK(8)


def estimate(
    model: nn.Module | Callable[..., Any],
    inputs: Any,
    *,
    read: Reading | Sequence[Reading] = _TOP,
    layers: int | Sequence[int] | None = None,
) -> cost.Cost:
    """Say what `watch(model, read=...)` would take for one call with these inputs.

    >>> import torch, clearhead as ch
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.zeros(1, 100, 8)
    >>> ch.estimate(layer, (x, x, x), read=ch.readings.Weights()).bytes
    80000

    `inputs` is a tensor, a tuple of arguments, or a dict of keywords. The model is run on shapes
    alone where it allows that, and once in earnest where it does not.
    """
    wanted = (read,) if isinstance(read, Reading) else tuple(read)
    sizes = cost.Sizes()

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        sizes.calls.clear()
        with attach.attached(model, sizes):
            yield

    cost.run_once(model, inputs, watched)
    chosen = numbers("layers", layers)
    total = 1 + max((call.layer for call in sizes.calls), default=-1)
    kept = None if chosen is None else {layer % total for layer in chosen}
    calls = [call for call in sizes.calls if kept is None or call.layer in kept]
    edges = sum(math.prod(call.sizes) for call in calls)
    return cost.Cost(
        calls=len(calls),
        edges=edges,
        bytes=sum(cost.value_bytes(reading, call) for call in calls for reading in wanted),
        seconds=cost.seconds(wanted, edges, max((call.sizes[1] for call in calls), default=1)),
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
    - `layers`, `heads`, `queries`, `calls`: numbers to keep; nothing is computed for the others.
      `queries` may count from the end.
    - `through`: clearhead's own kernel makes context and readings in one pass: faster, and equal to
      rounding only. Attention written by hand keeps the model's own context.
    - `on_call`: is handed each record as it comes; records are then not kept in `seen`.

    Calls are seen through `F.scaled_dot_product_attention`, `nn.MultiheadAttention`,
    `nn.Transformer*`, `transformers` on any backend, `flex_attention`, `clearhead.attend`, and
    matmul, softmax, matmul written by hand. A block that saw nothing raises on leaving.
    """
    inner = attach.watchable(model)
    watcher = Watcher(inner, read, layers, heads, queries, calls, through, on_call)
    with attach.attached(model, watcher) as seer:
        if inner is not model or not seer.modules.eager:
            watcher.note("the model is compiled: inside the block it runs eagerly")
        watcher.seer = seer
        yield watcher.seen
    watcher.finish(seer.modules, seer)
    # A cycle would hold the records when the caller has let them go.
    del watcher.seer
