"""What the attention weights show: their edges, their scale and their normalization.

These are notes beside the proof, never instead of it: a weight is what a layer reads, not what
reaches an output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead._capture import SOFTMAXES, Call, EagerCall, FusedCall, Handler, Interceptor, attached
from clearhead.attention import attend
from clearhead.dependence.subject import ModelInputs, call, modules_in
from clearhead.readings import Weights

__all__ = ["inspect_weights"]

# Weight maps with more elements than this are not computed.
MOST_WEIGHTS = 1 << 24
# Scores so far below the others are meant as a mask, though softmax may give them a weight that
# matters.
MEANT_AS_MASK = -15.0


def inspect_weights(
    model: Callable[..., Any], inputs: ModelInputs, edges: Tensor, depth: int = 1
) -> tuple[str, ...]:
    """Run once more and list what is unusual about the weights, one line a kind.

    `edges` are those of one layer, whatever `depth` composed them to for the outputs.
    """
    roots = [root for _, root in modules_in(model)]
    if not roots:
        return ()
    checks = _WeightChecks(inputs, edges, depth)
    try:
        with attached(roots[0], checks, _SoftmaxInterceptor):
            call(model, inputs)
    except Exception as error:  # the weights are an extra: the proof stands without them
        return (f"the weights could not be inspected ({type(error).__name__}: {error})",)
    return tuple(_line(kind, found) for kind, found in checks.found.items())


def _line(kind: str, found: list[tuple[str, str]]) -> str:
    module, detail = found[0]
    more = f" (and {len(found) - 1} more calls)" if len(found) > 1 else ""
    return f"seen in the weights of {module or 'the model'}{more}: {kind}{detail}"


class _SoftmaxInterceptor(Interceptor):
    """Also reports a softmax of the result of a softmax."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = next(iter(args), None) if func in SOFTMAXES else None
        origin = self.provenance.origin(given) if isinstance(given, Tensor) else None
        if origin is not None and origin.softmax is not None:
            self.handler.unseen(
                self.sites.running, "a second softmax, of weights that sum to one already"
            )
        return super().__torch_function__(func, types, args, kwargs)


class _WeightChecks(Handler):
    """Checks the weights of each attention call; `found` maps a kind to (module, detail)."""

    def __init__(self, inputs: ModelInputs, edges: Tensor, depth: int):
        self.layer = " to one layer" if depth > 1 else ""
        self.size = (inputs.batch, inputs.positions)
        self.edges = edges[:, None]  # (batch or 1, 1, query, source)
        self.found: dict[str, list[tuple[str, str]]] = {}

    def report(self, call: Call, kind: str, detail: str = "") -> None:
        self.found.setdefault(kind, []).append((call.module, detail))

    def unseen(self, module: str, reason: str) -> None:
        self.found.setdefault(reason, []).append((module, ""))

    def before(self, call: Call) -> Tensor | None:
        if not isinstance(call, FusedCall) or not self._fits(call):
            return None
        _, weights = attend(
            call.query, call.key, call.value, call.mask, read=Weights(), scale=call.scale,
            bias=call.bias, softcap=call.softcap, sinks=call.sinks, impl="reference",
        )  # fmt: skip
        self._scale(call, call.query.shape[-1])
        if call.bias is not None:
            self._constants(call, call.bias)
        self._edges(call, weights)
        return None

    def after(self, call: Call, context: Tensor) -> Tensor | None:
        if not isinstance(call, EagerCall) or not self._fits(call):
            return None
        self._scale(call, (call.value if call.key is None else call.key).shape[-1])
        self._constants(call, call.scores)
        self._edges(call, call.weights)
        return None

    def _fits(self, call: Call) -> bool:
        batch, head, query, source = call.sizes
        fits = (batch, query) == self.size and query == source
        return fits and batch * head * query * source <= MOST_WEIGHTS

    def _scale(self, call: Call, width: int) -> None:
        usual = 1 / math.sqrt(max(width, 1))
        if call.scale is not None and abs(call.scale / usual - 1) > 0.01:
            self.report(
                call,
                "the scale is not 1/sqrt(head_dim)",
                f": {call.scale:.4g}, and 1/sqrt({width}) is {usual:.4g}",
            )

    def _constants(self, call: Call, scores: Tensor) -> None:
        """Report edges that are blocked by a finite number other than the lowest of its dtype."""
        low = scores[(scores < MEANT_AS_MASK) & (scores > torch.finfo(scores.dtype).min / 2)]
        most = scores.max()
        if low.numel() and torch.isfinite(most) and low.max() < most + MEANT_AS_MASK:
            self.report(
                call,
                "edges are masked by a finite constant, so that a row of nothing else is uniform",
                f" (about {low.max():.3g})",
            )

    def _edges(self, call: Call, weights: Tensor) -> None:
        weights = weights.nan_to_num()
        forbidden = weights.masked_fill(self.edges.to(weights.device), 0)
        if float(forbidden.max()) > 0:
            place = torch.unravel_index(forbidden.argmax(), forbidden.shape)
            head, query, source = map(int, place[1:])
            most = float(forbidden.max())
            self.report(
                call,
                f"weight on edges that `allowed` forbids{self.layer}",
                f": up to {most:.3g} (head {head}, query {query}, source {source})",
            )
            self._polarity(call, weights)
        sums = weights.double().sum(-1)
        wrong = (sums > 0) & ((sums - 1).abs() > 0.01)
        sinks = isinstance(call, FusedCall) and call.sinks is not None
        if not sinks and bool(wrong.any()):
            self.report(
                call, "rows do not sum to one", f" (one sums to {float(sums[wrong][0]):.3g})"
            )

    def _polarity(self, call: Call, weights: Tensor) -> None:
        strictly = self.edges & ~torch.eye(self.size[1], dtype=torch.bool)
        kept = weights.masked_fill(~strictly.to(weights.device), 0)
        if strictly.any() and float(kept.max()) == 0:
            self.report(
                call, "it reads only what it must not read: the mask's polarity is inverted"
            )
