"""The callback for the Trainer of transformers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from clearhead.integrations.training import TrainingMonitor

__all__ = ["TrainerMonitor"]


class TrainerMonitor(TrainingMonitor, TrainerCallback):
    """Every head at every step of a Trainer, beside the loss in its logs.

    `Trainer(..., callbacks=[MonitorCallback()])` puts the numbers into `state.log_history`. A
    Trainer calls its loggers (wandb, TensorBoard, MLflow) before the callbacks that it is given, so
    call `MonitorCallback().attach(trainer)` instead for these to get the numbers too. Arguments are
    those of `clearhead.monitor`, and `path`, `heads` and `prefix`; `callback.monitor` is the
    monitor.
    """

    def attach(self, trainer: Any) -> TrainerMonitor:
        """Join a trainer as the first of its callbacks, before its loggers."""
        callbacks = trainer.callback_handler.callbacks
        if self not in callbacks:
            callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the monitor to the model."""
        self._begin(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the model is seen."""
        self._check("the model has attention calls that clearhead.watch(model) sees?")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add what is new to the logs of a training step."""
        logs = kwargs.get("logs")
        # Logs of an evaluation and the summary at the end belong to no step.
        if logs is None or "loss" not in logs:
            return
        new = self._new()
        logs.update(new)
        state.log_history[-1].update(new)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach the monitor."""
        self._end()
