"""One training loop for all three models, which can stop and resume bit for bit.

All randomness of step n depends only on the seed and n: which windows are read, which tokens are
hidden, what dropout drops. So a checkpoint holds the weights, the optimizer state and n.

`python -m clearhead.models.train` makes the GPT that ships with the library.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead._core import value_error
from clearhead.models import checkpoint
from clearhead.models.ranks import (
    ALONE,
    Group,
    is_current,
    read_shards,
    remove_shards,
    write_shards,
)
from clearhead.models.text import Characters, read_text, shipped_text
from clearhead.models.threads import check_threads, small_threads

__all__ = ["Settings", "Step", "Training", "text_training"]

TRAINING_FILE = "training.safetensors"
IGNORE = -100  # the ignore_index of cross_entropy: positions without a target
Batch = tuple[Tensor, Tensor, Any]  # tokens, targets, mask or None


@dataclass(frozen=True)
class Settings:
    """The settings of a training run; the checkpoint holds all of them."""

    steps: int = 600
    batch: int = 16
    learning_rate: float = 3e-3
    seed: int = 0
    weight_decay: float = 0.1
    clip: float = 1.0
    validate_every: int = 50
    text: str = ""  # a digest of the text: a run resumes with the text it began with
    file: str = ""  # the path of the text, so that a run resumes without naming it

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "validate_every"):
            number = getattr(self, name)
            if not isinstance(number, int) or not 1 <= number < 2**31:
                raise value_error(name, "needs to be a whole number of 1 or more", got=number)
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise value_error(name, "needs to be a number above 0", got=getattr(self, name))
        if not 0 <= self.weight_decay < math.inf:
            raise value_error("weight_decay", "needs to be 0 or more", got=self.weight_decay)
        if not 0 <= self.seed < 2**31:
            raise value_error("seed", "needs to be in 0..2147483647", got=self.seed)

    def reading(self, file: str | Path) -> Settings:
        """Return the same settings for a text that lies in `file`."""
        return replace(self, file=str(Path(file).expanduser().resolve()))

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then cosine decay to a tenth (Loshchilov and Hutter 2016)."""
        warmup = min(100, self.steps // 10 + 1)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        done = (step - warmup) / max(self.steps - warmup, 1)
        return self.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


class Step(NamedTuple):
    """The losses of one step; `validation` is None where it was not measured."""

    number: int
    loss: float
    validation: float | None


class Training:
    """A training run: iterate over it to train, and `save` it between any two steps.

    >>> from clearhead.models import RNN
    >>> tokens = torch.arange(8).repeat(4, 1)
    >>> training = Training(RNN(8, layers=1, width=16),
    ...                     batches=lambda number: (tokens[:, :-1], tokens[:, 1:], None),
    ...                     settings=Settings(steps=30))
    >>> steps = list(training)
    >>> steps[-1].loss < steps[0].loss
    True

    `batches(number)` returns the batch of a step: tokens, targets (-100 where no loss is taken) and
    a mask or None. It must return the same batch for the same number each time.

    A small model trains with one thread, because several would wait for each other longer than they
    compute. `threads` overrides that; so do OMP_NUM_THREADS and `torch.set_num_threads`.

    Several processes train one model where each passes its `group`: `batches` gives the same batch
    in all of them, of which each takes some rows, and the losses are those of one process.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Callable[[int], Batch],
        settings: Settings,
        validation: Sequence[Batch] = (),
        threads: int | None = None,
        group: Group = ALONE,
    ) -> None:
        check_threads(threads)
        self.model: Any = model
        self.group, self._parallel = group, group.parallel(model)
        self.threads = threads
        self.batches = batches
        self.settings = settings
        self.validation = validation
        self.step = 0
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=(0.9, 0.99),
            weight_decay=settings.weight_decay,
        )

    def __iter__(self) -> Iterator[Step]:
        """Train to the last step; between two steps the caller may save, or leave."""
        while self.step < self.settings.steps:
            yield self.advance()

    def advance(self) -> Step:
        """Do one step of gradient descent."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_mixed(self.settings.seed, self.step))
            batch = self.batches(self.step)
            fewer = small_threads(self.model, batch[0].numel(), self.threads)
            with fewer, self.group.naming_lost(f"step {self.step + 1} of the training"):
                return self._descend(batch)

    def _descend(self, batch: Batch) -> Step:
        self.model.train()
        self.optimizer.param_groups[0]["lr"] = self.settings.learning_rate_at(self.step)
        loss, mean = self._loss(batch)
        if not math.isfinite(mean):
            raise value_error(
                "learning_rate",
                f"the loss is {mean} at step {self.step + 1}",
                hint="train again with a smaller --lr",
            )
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.step += 1
        due = self.step % self.settings.validate_every == 0 or self.step == self.settings.steps
        return Step(self.step, mean, self.validate() if due else None)

    def _loss(self, batch: Batch) -> tuple[Tensor, float]:
        """Give the loss whose gradient is taken here, and the mean over the whole batch."""
        if self.group.world == 1:
            loss = loss_of(self.model, batch)
            return loss, loss.item()
        count = int((batch[1] != IGNORE).sum())
        with self.group.rows(batch) as rows:
            loss = loss_of(self._parallel, rows, reduction="sum") / count
        # The gradients are averaged over the processes, and have to be their sum.
        return loss * self.group.world, self.group.sums(loss.item())[0]

    def validate(self) -> float | None:
        """Return the mean loss on held-out text; None where there is none."""
        if not self.validation:
            return None
        self.model.eval()
        tokens = self.validation[0][0].numel()
        mine = self.validation[self.group.rank :: self.group.world]
        with torch.no_grad(), small_threads(self.model, tokens, self.threads):
            losses = [loss_of(self.model, batch).item() for batch in mine]
        return self.group.sums(sum(losses))[0] / len(self.validation)

    def save(self, path: str | Path) -> None:
        """Write the state to resume from, then the model itself, into a directory.

        Several processes call it together, and each writes a shard of the state.
        """
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors.update({f"adamw.{number}.{key}": t for key, t in state.items()})
        header = {
            **checkpoint.describe(self.model),
            "training": {"step": self.step, **asdict(self.settings)},
        }
        path = Path(path).expanduser()
        if self.group.world > 1:
            with self.group.naming_lost(f"the checkpoint of step {self.step}"):
                write_shards(path, tensors, header, self.group)
        else:
            checkpoint.write(path / TRAINING_FILE, tensors, header)
        if self.group.first:
            checkpoint.save(self.model, path)
            # What is left of a state that another number of processes wrote.
            if self.group.world > 1:
                (path / TRAINING_FILE).unlink(missing_ok=True)
            else:
                remove_shards(path)


def loss_of(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats over the positions that have a target."""
    tokens, targets, mask = batch
    logits = model(tokens) if mask is None else model(tokens, mask=mask)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def text_training(
    model: checkpoint.Model,
    text: str,
    settings: Settings,
    *,
    threads: int | None = None,
    group: Group = ALONE,
) -> Training:
    """Set up the training of a model of characters on a text; the last tenth is for validation."""
    assert isinstance(model.vocabulary, Characters)
    need = 2 * (model.length + 1)
    if len(text) < need:
        raise value_error(
            "file",
            f"is too short: a length of {model.length} needs {need} characters",
            got=len(text),
            hint="take a longer text, or a smaller --length",
        )
    tokens = model.vocabulary.encode(text, special=False)
    held_out = max(len(tokens) // 10, model.length + 1)
    known, unknown = tokens[:-held_out], tokens[-held_out:]

    def batches(number: int) -> Batch:
        generator = torch.Generator().manual_seed(_mixed(settings.seed, number))
        starts = torch.randint(len(known) - model.length, (settings.batch,), generator=generator)
        return model.task(_windows(known, starts, model.length + 1), generator)

    starts = torch.arange(0, len(unknown) - model.length, model.length)[:64]
    windows = _windows(unknown, starts, model.length + 1).split(settings.batch)
    generator = torch.Generator().manual_seed(0)
    validation = [model.task(window, generator) for window in windows]
    settings = replace(settings, text=hashlib.sha256(text.encode()).hexdigest())
    return Training(model, batches, settings, validation, threads, group)


def resume(
    path: str | Path,
    text: str | None = None,
    *,
    steps: int | None = None,
    threads: int | None = None,
    group: Group = ALONE,
) -> Training:
    """Resume a training of `text_training` from its checkpoint; more `steps` make it longer.

    Any number of processes resumes what any other number began. Without a `text`, the file that
    `Settings.file` named is read again.
    """
    path = Path(path).expanduser()
    tensors, header = _saved(path)
    step, settings = _state(header, path)
    text = text_of(path) if text is None else text
    if hashlib.sha256(text.encode()).hexdigest() != settings.text:
        rule = "is not the text that this training began with, or has changed since"
        began = f"{path}, begun with {settings.file}" if settings.file else path
        raise value_error("file", rule, got=began)
    settings = replace(settings, steps=steps or settings.steps)
    if step >= settings.steps:
        hint = f"ask for more than that, for example --steps {2 * step}"
        raise value_error("resume", f"all {settings.steps} steps are done", got=path, hint=hint)
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    model = checkpoint.build(weights, header, path)
    training = text_training(model, text, settings, threads=threads, group=group)
    training.step = step
    _restore(training.optimizer, tensors, path)
    return training


def _saved(path: Path, weights: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the state of a training: one file, or the shards of several processes."""
    if is_current(path, path / TRAINING_FILE):
        return read_shards(path, weights)
    return checkpoint.read(path / TRAINING_FILE, weights=weights)


def _state(header: dict[str, Any], path: Path) -> tuple[int, Settings]:
    try:
        saved = dict(header.pop("training"))
        step = saved.pop("step")
        settings = Settings(**saved)
        if not isinstance(step, int) or step < 0 or not isinstance(settings.file, str):
            raise TypeError(f"step {step!r}, file {settings.file!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise value_error(
            "resume", f"the state of the training is damaged ({error})", got=path
        ) from None
    return step, settings


def text_of(path: str | Path) -> str:
    """Read the text of a saved training from the path it had when the training began."""
    path = Path(path).expanduser()
    _, settings = _state(_saved(path, weights=False)[1], path)
    if not settings.file:
        rule = "is needed: this training does not know where its text lies"
        raise value_error("file", rule, got=path)
    if not Path(settings.file).is_file():
        raise value_error(
            "file", "the text of this training is no longer there", got=settings.file,
            hint="name the file that holds it now",
        )  # fmt: skip
    return read_text(settings.file)


def _restore(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], path: Path) -> None:
    state = optimizer.state_dict()
    parameters = optimizer.param_groups[0]["params"]
    try:
        state["state"] = {
            number: {key: tensors[f"adamw.{number}.{key}"] for key in _ADAMW}
            for number in range(len(parameters))
        }
        for moments in state["state"].values():
            moments["step"] = moments["step"].reshape(())  # in shards it has an axis
    except KeyError as error:
        raise value_error("resume", f"the state of the training lacks {error}", got=path) from None
    for number, parameter in enumerate(parameters):
        moments = state["state"][number]
        if any(moments[key].shape != parameter.shape for key in _ADAMW[1:]):
            raise value_error("resume", f"adamw.{number} does not fit the model", got=path)
    optimizer.load_state_dict(state)


_ADAMW = ("step", "exp_avg", "exp_avg_sq")


def _windows(
    tokens: Int[Tensor, " position"], starts: Int[Tensor, " batch"], length: int
) -> Int[Tensor, "batch length"]:
    return tokens[starts[:, None] + torch.arange(length)]


def _mixed(seed: int, number: int) -> int:
    # 32 bits: torch's generator uses no more of a seed.
    return (seed * 1_000_003 + number) % 2**32


def make_shipped() -> Path:
    """Train the GPT that ships with the library, and write it in float16."""
    from clearhead.models.gpt import GPT

    text = shipped_text()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the same bits on every machine with the same kernels
    training = text_training(GPT(Characters.of(text)), text, Settings())
    for step in training:
        if step.validation is not None:
            print(f"step {step.number}: loss {step.loss:.3f}, validation {step.validation:.3f}")
    return checkpoint.save(training.model, checkpoint.SHIPPED, dtype=torch.float16)


if __name__ == "__main__":
    print(f"Wrote {make_shipped()}")
