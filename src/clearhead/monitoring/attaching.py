"""monitor(): what every head does at every step of a training, while the model trains."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._capture import attached, watchable
from clearhead._core import is_number, numbers, type_error, value_error
from clearhead.monitoring import saving
from clearhead.monitoring.alarms import PATIENCE, Alarm, Alarms, thresholds_of
from clearhead.monitoring.hooks import Hooks
from clearhead.monitoring.reader import Follower
from clearhead.monitoring.steps import TrainingStep, over_ranks

__all__ = ["Monitor", "monitor"]


class Monitor:
    """What `monitor` gives: the numbers of the steps so far, and `close()`.

    It is a context manager, too. Everything but `close` and `save` may be read at any time.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        chosen: tuple[tuple[int, ...] | None, tuple[int, ...] | None],
        sinks: int,
        through: bool,
        alarms: Alarms,
        kept: int,
    ) -> None:
        self.model, self.every, self.closed = model, every, False
        self._inner = watchable(model)
        self._layers, self._heads = chosen
        self._alarms = alarms
        self._reader = Follower(self._inner, sinks, through, self._layers)
        self._done: deque[TrainingStep] = deque(maxlen=kept)
        self._step: TrainingStep | None = None
        self._over = False  # whether an optimizer has made the step
        self._optimizers: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._open: contextlib.ExitStack | None = None
        self._ignored = 0
        self._known: Any = None  # the modules of the model, as the last forward had them
        self._agreed: set[torch.Size] = set()  # what the ranks have compared
        self._hooks = Hooks(model, self)

    # What the hooks call.

    def starts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin to read a forward of the model, in training mode, whose step is due."""
        if module is not self.model or (self._open is not None and self._inside()):
            return
        if not module.training:
            self._ignored += 1
            return
        if self._step is None or not self._goes_on():
            self._finish()
            self._step = TrainingStep(0 if self._step is None else self._step.number + 1)
            self._over = False
        if self._step.number % self.every == 0:
            self._begin(args, kwargs)

    def _inside(self) -> bool:
        """Whether the forward that is read still runs; Ctrl-C may have ended it."""
        assert self._open is not None
        if self._interceptor.modules.over:
            self._open.close()
            self._open = None
            return False
        return True

    def _begin(self, args: Any, kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:
            self._interceptor = stack.enter_context(
                attached(self._inner, self._reader, self._reader.interceptor, self._known)
            )
            self._known = self._interceptor.modules.inventory
            self._reader.begin(self._interceptor)
            if self._inner is not self.model or not self._interceptor.modules.eager:
                self._reader.remark("the model is compiled: the steps that are read run eagerly")
            modules = self._interceptor.modules
            stack.enter_context(modules.running(self._inner, args, kwargs))
            self._open = stack.pop_all()

    def ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Take in what was read of a forward, unless it has failed."""
        if module is not self.model or self._open is None:
            return
        stack, self._open = self._open, None
        stack.close()
        if output is None and sys.exc_info()[1] is not None:
            return
        totals = self._reader.end()
        self._check_chosen()
        if totals is not None and self._step is not None:
            self._step.add(over_ranks(totals, self._agreed))

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """End the step after an optimizer has changed a parameter of the model."""
        if self._step is None or not self._owns(optimizer):
            return
        self._over = True
        if self._step.read and self._step.device.type != "cuda":
            self._finish()

    def _owns(self, optimizer: Any) -> bool:
        if optimizer not in self._optimizers:
            own = {id(x) for x in self.model.parameters()}
            theirs = (id(x) for group in optimizer.param_groups for x in group["params"])
            self._optimizers[optimizer] = any(x in own for x in theirs)
        return self._optimizers[optimizer]

    def _goes_on(self) -> bool:
        """Whether a forward adds to the gradients of the last one: its step is not over."""
        return not self._over and any(x.grad is not None for x in self.model.parameters())

    def _check_chosen(self) -> None:
        total, most = len(self._reader.layers.numbers), self._reader.layers.heads
        for name, chosen, size in (("layers", self._layers, total), ("heads", self._heads, most)):
            missing = [x for x in chosen or () if not -size <= x < size]
            if missing:
                raise value_error(name, f"lie in 0..{size - 1}, or count from the end", got=missing)

    # What was read.

    @property
    def layers(self) -> list[str]:
        """The dotted names of the attention modules, in the order of the layers."""
        return [layer.module for layer in self._reader.layers.numbers]

    @property
    def notes(self) -> list[str]:
        """What could not be seen, or was changed."""
        return list(self._reader.notes)

    @property
    def history(self) -> list[tuple[int, Tensor]]:
        """The steps that were read, (step, values): (layer, head, statistic), on their device.

        The statistics are `clearhead.monitoring.STATISTICS`; NaN stands where there is no number.
        """
        return [(step.number, self._select(step.values)) for step in self._steps()]

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms so far: named tuples (step, layer, head, kind, value)."""
        if self._step is not None and self._step.read:
            self._check(self._step)
        return list(self._alarms.found)

    def table(self) -> list[dict[str, Any]]:
        """List the numbers of the last step that was read, a dict for each layer and head."""
        _, values = self._last()
        return list(saving.rows(values, *self._chosen(), self.layers))

    def log(self, heads: bool = False, prefix: str = "attention") -> dict[str, float]:
        """Give the last step as a flat dict of floats, for any logger.

        For each layer `max_logit` is that of its largest head, all other statistics are means over
        the heads; `_min` and `_max` (or `_mean`) follow each. `heads` adds every head by itself.
        """
        _, values = self._last()
        return saving.flat(values, *self._chosen(), heads, prefix)

    def save(self, path: str | Path) -> None:
        """Write the history, as Parquet or safetensors by the name of the file.

        A Parquet file has a row for each step, layer and head; a safetensors file the tensors
        `steps` and `values`, (step, layer, head, statistic). It is written whole or not at all.
        """
        if not self._steps():
            raise self._nothing()
        saving.write(Path(path), self.history, *self._chosen(), self.layers)

    def close(self) -> None:
        """Detach from the model; what was read stays. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self._hooks.remove()
        if self._open is not None:
            self._open.close()
            self._open = None
        self._finish()

    def __enter__(self) -> Monitor:
        if self.closed:
            hint = "make a new one: clearhead.monitor(model)"
            raise value_error("monitor", "is closed", hint=hint)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close()
        if kind is None and not self._steps():
            raise self._nothing()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"every={self.every}"
        of, steps = type(self.model).__name__, len(self._steps())
        return f"<clearhead.Monitor of {of}, {state}, {steps} steps>"

    def _finish(self) -> None:
        """Put the step that is over into the history."""
        if self._step is None or not self._step.read:
            return
        done = self._step
        if not self._is_done(done):
            self._check(done)
            self._done.append(done)

    def _is_done(self, step: TrainingStep) -> bool:
        return bool(self._done) and self._done[-1].number == step.number

    def _check(self, step: TrainingStep) -> None:
        if self._alarms.silent:
            return
        values = step.host
        self._alarms.check(step.number, self._masked(values), list(range(values.shape[1])))

    def _steps(self) -> list[TrainingStep]:
        """The steps that were read, and the one that goes on."""
        step = self._step
        if step is None or not step.read or self._is_done(step):
            return list(self._done)
        return [*self._done, step]

    def _last(self) -> tuple[int, Tensor]:
        steps = self._steps()
        if not steps:
            raise self._nothing()
        return steps[-1].number, self._select(steps[-1].values)

    def _nothing(self) -> RuntimeError:
        lines = ["monitor: no step was read yet"]
        if self._ignored:
            lines.append(f"  {self._ignored} forwards were in evaluation mode, which is left out")
        lines.append("  to do: call the monitored model itself in training mode, model.train()")
        return RuntimeError("\n".join(lines))

    def _chosen(self) -> tuple[list[int], list[int]]:
        """The numbers of the layers and heads in the history."""
        total, most = len(self._reader.layers.numbers), self._reader.layers.heads
        layers = range(total) if self._layers is None else self._layers
        heads = range(most) if self._heads is None else self._heads
        return [x % total for x in layers], [x % most for x in heads]

    def _select(self, values: Tensor) -> Tensor:
        if self._layers is None and self._heads is None:
            return values
        layers, heads = self._chosen()
        return values[layers][:, heads]

    def _masked(self, values: Tensor) -> Tensor:
        """The values with NaN and no rows where layers and heads were not chosen."""
        if self._layers is None and self._heads is None:
            return values
        layers, heads = self._chosen()
        masked = torch.full_like(values, torch.nan)
        masked[..., -1] = 0
        at = (torch.tensor(layers)[:, None], torch.tensor(heads))
        masked[at] = values[at]
        return masked


def monitor(
    model: nn.Module,
    every: int = 1,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    sinks: int = 4,
    through: bool = False,
    alarms: bool | Callable[[Alarm], Any] = True,
    *,
    thresholds: Mapping[str, float] | None = None,
    patience: int = PATIENCE,
    steps: int = 1000,
) -> Monitor:
    """Read every head of a model at every step of its training.

    >>> import torch, clearhead as ch
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.zeros(1, 3, 8)
    >>> with ch.monitor(layer) as seen:
    ...     _ = layer(x, x, x, need_weights=False)
    >>> seen.log()["attention/layer.0/entropy"]  # ln 3: all sources alike
    1.0986...

    Use it as a context manager, or keep it and call `close()` after the training. Only forwards in
    training mode are read. A step is one of them, or several with gradient accumulation: a forward
    belongs to the step of the last one while gradients lie on the parameters and no optimizer has
    made its step. Steps are counted from 0.

    - `every`: reads the steps 0, every, 2 * every, ...; in between the model runs as without.
    - `layers`, `heads`: the numbers to keep; negative ones count from the end.
    - `sinks`: how many first sources `sink` stands for.
    - `through`: clearhead's own kernel makes the context and the numbers in one pass: faster, and
      equal to rounding only. Without it every loss has the bits of a run without a monitor.
    - `alarms`: True warns of each head once; False is silent; a function receives each `Alarm`.
    - `thresholds`, `patience`: what is alarming, and for how many steps in a row that are read;
      the defaults are `clearhead.monitoring.THRESHOLDS` and `PATIENCE`.
    - `steps`: how many steps the history keeps.

    With a process group, every forward that is read is reduced over its ranks, by one all-reduce
    of a few numbers a head, its sums and a maximum of each rank: the samples of DDP and FSDP add
    up, and the heads that tensor parallelism splits stand side by side, under the numbers of the
    whole layer.
    """
    if not isinstance(model, nn.Module):
        raise type_error("model", "is a torch.nn.Module, which trains", got=type(model).__name__)
    for name, value in (
        ("every", every),
        ("sinks", sinks),
        ("patience", patience),
        ("steps", steps),
    ):
        if not is_number(value):
            raise type_error(name, "is an integer", got=repr(value))
        if value < 1:
            raise value_error(name, "is at least 1", got=value)
    if not (isinstance(alarms, bool) or callable(alarms)):
        hint = "a function receives each alarm"
        raise type_error("alarms", "is True, False or a function", got=repr(alarms), hint=hint)
    checker = Alarms(alarms, thresholds_of(thresholds), patience)
    chosen = (numbers("layers", layers), numbers("heads", heads))
    return Monitor(model, every, chosen, sinks, through, checker, steps)
