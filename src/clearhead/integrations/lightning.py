"""The callback for the Trainer of Lightning.

>>> from clearhead.integrations.lightning import MonitorCallback  # doctest: +SKIP
>>> trainer = lightning.Trainer(callbacks=[MonitorCallback("model")])  # doctest: +SKIP
"""

from __future__ import annotations

import functools
from typing import Any

from clearhead._core import type_error, value_error
from clearhead.integrations.training import TrainingMonitor

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise ImportError(
        "integrations.lightning needs lightning; to do: pip install 'clearhead[lightning]'"
    ) from error

__all__ = ["MonitorCallback"]


class LightningMonitor(TrainingMonitor, Callback):
    """Every head at every step, logged by the LightningModule beside the loss.

    Lightning calls `training_step`, not the forward of the LightningModule, so `module` names what
    `training_step` calls: the dotted name of an attribute, such as "model"; without it, it is the
    LightningModule itself. A training in which that is not called stops after its first step with a
    ValueError. Other arguments are those of `clearhead.monitor`, and `path`, `heads` and `prefix`;
    `callback.monitor` is the monitor.
    """

    def __init__(self, module: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(module, str | None):
            raise type_error("module", "is the name of an attribute", got=type(module).__name__)
        self._module = module

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the monitor to the module."""
        names = self._module.split(".") if self._module else []
        try:
            model = functools.reduce(getattr, names, pl_module)
        except AttributeError as error:
            rule = f"{type(pl_module).__name__} has no such attribute"
            raise value_error("module", rule, got=repr(self._module)) from error
        self._begin(model)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what is new, at the pace of the trainer."""
        self._check('name what training_step calls, as in MonitorCallback("model")')
        if new := self._new():
            pl_module.log_dict(new)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach the monitor."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach the monitor."""
        self._end()


MonitorCallback = LightningMonitor
