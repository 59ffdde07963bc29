"""Alarms: which heads are beyond a threshold, each reported once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead._core import did_you_mean, type_error, value_error
from clearhead.monitoring.statistics import STATISTICS

__all__ = ["PATIENCE", "THRESHOLDS", "Alarm", "Alarms", "thresholds_of"]

# Mean entropy in nats, below (Zhai et al. 2023); largest score, above (Kimi Team 2025); output norm
# relative to the median of the layer's heads, below; mean mass on the first sources, above.
THRESHOLDS = {"entropy_collapse": 0.1, "logit_growth": 100.0, "dead_head": 0.01, "sink": 0.5}
# How many steps that are read in a row; one is enough for a score, and for a NaN.
PATIENCE = 10
_MEANS = {
    "entropy_collapse": "a mean entropy below {:g} nats",
    "logit_growth": "an attention logit above {:g}",
    "dead_head": "an output norm below {:g} of the layer's median",
    "sink": "a mean mass above {:g} on the first sources",
    "nan": "a NaN in its scores or weights",
}
_AT_ONCE = ("logit_growth", "nan")


class Alarm(NamedTuple):
    """A head that went beyond a threshold, and the value that did."""

    step: int
    layer: int
    head: int
    kind: str
    value: float


def thresholds_of(given: Mapping[str, float] | None) -> dict[str, float]:
    """Check thresholds by name; those that are not given have their defaults."""
    if given is not None and not isinstance(given, Mapping):
        hint = "for example thresholds={'logit_growth': 50.0}"
        raise type_error("thresholds", "is a dict", got=type(given).__name__, hint=hint)
    for name, value in (given or {}).items():
        if name not in THRESHOLDS:
            import difflib

            near = " or ".join(difflib.get_close_matches(str(name), THRESHOLDS, cutoff=0.5))
            rule = f"has the names {', '.join(THRESHOLDS)}"
            raise value_error("thresholds", rule, got=f"{name!r}{did_you_mean(near)}")
        if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
            raise type_error("thresholds", "holds numbers", got=f"{name}={value!r}")
    return {**THRESHOLDS, **(given or {})}


class Alarms:
    """Checks step after step, and tells a callback or a Python warning of each head once."""

    def __init__(
        self,
        tell: bool | Callable[[Alarm], Any],
        thresholds: dict[str, float],
        patience: int,
    ) -> None:
        self.tell, self.thresholds, self.patience = tell, thresholds, patience
        self.found: list[Alarm] = []
        self._reported: set[tuple[str, int, int]] = set()
        self._failed: set[str] = set()
        # How many steps in a row each head has been beyond, before the step and with it.
        self._runs: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        self._step = -1

    @property
    def silent(self) -> bool:
        """Whether nobody is told of anything, so that nothing is checked."""
        return self.tell is False

    def check(self, step: int, values: Tensor, heads: list[int]) -> None:
        """Check the values of a step, (layer, head, statistic); once more where it went on."""
        if self.silent:
            return
        new: list[Alarm] = []
        for kind, (beyond, shown) in self._beyond(values).items():
            long = beyond if kind in _AT_ONCE else self._lasting(kind, beyond, step)
            for layer, at in long.nonzero().tolist():
                if (kind, layer, at) not in self._reported:
                    self._reported.add((kind, layer, at))
                    new.append(Alarm(step, layer, heads[at], kind, float(shown[layer, at])))
        self._step = step
        self.found += new
        self._report(new)

    def _beyond(self, values: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        by_name = dict(zip(STATISTICS, values.unbind(-1), strict=True))
        most, entropy, norm = (by_name[x] for x in ("max_logit", "entropy", "output_norm"))
        counted, at = by_name["rows"] > 0, self.thresholds
        median = norm.nanmedian(-1, keepdim=True).values
        return {
            "entropy_collapse": (counted & (entropy < at["entropy_collapse"]), entropy),
            "logit_growth": (counted & (most > at["logit_growth"]), most),
            "dead_head": (counted & (norm <= at["dead_head"] * median), norm),
            "sink": (counted & (by_name["sink"] > at["sink"]), by_name["sink"]),
            "nan": (counted & (most.isnan() | norm.isnan()), torch.where(norm.isnan(), norm, most)),
        }

    def _lasting(self, kind: str, beyond: Tensor, step: int) -> Tensor:
        before, now = self._runs.get(kind, (None, None))
        before = before if step == self._step else now
        run = torch.zeros(beyond.shape, dtype=torch.int64)
        if before is not None:
            run[: before.shape[0], : before.shape[1]] = before
        run = torch.where(beyond, run + 1, 0)
        self._runs[kind] = before, run
        return run >= self.patience

    def _report(self, new: list[Alarm]) -> None:
        if callable(self.tell):
            for alarm in new:
                self._call(self.tell, alarm)
            return
        for kind in dict.fromkeys(alarm.kind for alarm in new):
            warnings.warn(self._text([x for x in new if x.kind == kind]), UserWarning, stacklevel=2)

    def _call(self, tell: Callable[[Alarm], Any], alarm: Alarm) -> None:
        try:
            tell(alarm)
        except Exception as error:
            # The training is worth more than its observer: it goes on, and hears of the error once.
            name = f"{type(error).__name__}: {error}"
            if name not in self._failed:
                self._failed.add(name)
                warnings.warn(f"monitor: the callback of alarms raised {name}", stacklevel=2)

    def _text(self, alarms: list[Alarm]) -> str:
        first = alarms[0]
        means = _MEANS[first.kind].format(self.thresholds.get(first.kind, 0))
        places = ", ".join(f"layer {x.layer} head {x.head} ({x.value:.3g})" for x in alarms[:8])
        more = f", and {len(alarms) - 8} more" if len(alarms) > 8 else ""
        lasting = "" if first.kind in _AT_ONCE else f" for {self.patience} steps"
        return f"monitor: {first.kind} at step {first.step}, {means}{lasting}: {places}{more}"
