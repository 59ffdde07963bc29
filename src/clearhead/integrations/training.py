"""What the callbacks of all trainers share: one monitor for the time of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from clearhead._core import value_error
from clearhead.monitoring import Monitor, monitor

__all__ = ["TrainingMonitor"]


class TrainingMonitor:
    """Attaches a monitor when a training begins, and gives what is new in it to a logger.

    `heads` and `prefix` are those of `Monitor.log`, `options` those of `clearhead.monitor`; at the
    end the history is saved to `path`, where one is given.
    """

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        heads: bool = False,
        prefix: str = "attention",
        **options: Any,
    ) -> None:
        super().__init__()
        self._monitor: Monitor | None = None
        self._path, self._options = path, options
        self._logged, self._log = -1, {"heads": heads, "prefix": prefix}

    @property
    def monitor(self) -> Monitor:
        """The monitor of the training that runs, or of the last one."""
        if self._monitor is None:
            raise RuntimeError(
                "MonitorCallback: the training has not begun, and has no monitor yet"
            )
        return self._monitor

    def _begin(self, model: nn.Module) -> None:
        self._end()
        self._monitor, self._logged = monitor(model, **self._options), -1

    def _new(self) -> dict[str, float]:
        """Give the last step that was read, once."""
        history = [] if self._monitor is None else self._monitor.history
        if self._monitor is None or not history or history[-1][0] == self._logged:
            return {}
        self._logged = history[-1][0]
        return self._monitor.log(**self._log)

    def _check(self, hint: str) -> None:
        """Raise where the first step of a training was over, and nothing of it was read."""
        if self._monitor is not None and not self._monitor.history:
            name = type(self._monitor.model).__name__
            rule = f"a step of the training is over, and no forward of {name} was seen"
            raise value_error("MonitorCallback", rule, hint=hint)

    def _end(self) -> None:
        """Detach the monitor, whose numbers stay, and save them; again does nothing."""
        if self._monitor is None or self._monitor.closed:
            return
        self._monitor.close()
        if self._path is not None and self._monitor.history:
            self._monitor.save(self._path)
