"""`MonitorCallback` of transformers and of Lightning, in trainings by the real libraries."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import clearhead as ch
from tests import architectures

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 6


def llama() -> Any:
    architecture = next(one for one in architectures.DECODERS if one.name == "Llama")
    return architecture.make("sdpa").train()


def samples() -> list[dict[str, torch.Tensor]]:
    ids = architectures.tokens(2 * STEPS, 9)["input_ids"]
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture
def trainer(tmp_path):
    """Make a Trainer with one step for two samples, which logs every second one."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def make(callbacks: list[Any] | None = None, **options: Any) -> Any:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=STEPS,
            logging_steps=2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
            seed=0, **options,
        )  # fmt: skip
        return transformers.Trainer(
            model=llama(), args=arguments, train_dataset=samples(), callbacks=callbacks
        )

    return make


def test_a_trainer_logs_every_head(trainer, tmp_path):
    callback = ch.integrations.transformers.MonitorCallback(
        path=tmp_path / "heads.parquet", heads=True, alarms=False
    )
    with pytest.raises(RuntimeError, match="the training has not begun"):
        _ = callback.monitor
    run = trainer([callback])
    run.train()
    logs = [x for x in run.state.log_history if "loss" in x]
    assert [x["step"] for x in logs] == [2, 4, 6]
    for entry, (step, values) in zip(logs, callback.monitor.history[1::2], strict=True):
        assert step == entry["step"] - 1  # the trainer counts steps that are over
        assert entry["attention/layer.1/max_logit"] == float(values[1, :, 0].max())
        assert entry["attention/layer.0/head.5/entropy"] == pytest.approx(float(values[0, 5, 1]))
    assert len(callback.monitor.history) == STEPS
    assert callback.monitor.closed
    assert (tmp_path / "heads.parquet").exists()
    assert "attention/layer.0/entropy" not in run.state.log_history[-1]  # the summary


def test_the_numbers_are_those_of_the_weights(trainer):
    """The first step, against the full weights of the model before it was trained."""
    callback = ch.integrations.transformers.MonitorCallback(alarms=False)
    run = trainer([callback])
    read: list[torch.Tensor] = []

    model = run.model
    before = model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"]), with_kwargs=True
    )
    exact = llama().double().eval()
    run.train()
    before.remove()
    exact.set_attn_implementation("eager")
    with torch.no_grad():
        weights = exact(input_ids=read[0], output_attentions=True).attentions
    step, values = callback.monitor.history[0]
    assert step == 0
    for layer, map_ in enumerate(weights):
        entropy = -(map_ * map_.clamp_min(1e-300).log()).sum(-1).mean((0, 2))
        torch.testing.assert_close(values[layer, :, 1].double(), entropy, rtol=1e-4, atol=1e-5)


def test_losses_are_those_without_the_callback(trainer):
    with_, without = trainer([ch.integrations.transformers.MonitorCallback()]), trainer()
    with_.train()
    without.train()
    losses = [[x["loss"] for x in run.state.log_history if "loss" in x] for run in (with_, without)]
    assert losses[0] == losses[1]
    for x, y in zip(with_.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(x, y)


def test_attach_comes_before_the_loggers(trainer):
    transformers = pytest.importorskip("transformers")
    seen: list[dict[str, float]] = []

    class Logger(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append({**(logs or {})})

    run = trainer([Logger()])
    callback = ch.integrations.transformers.MonitorCallback(every=4, alarms=False).attach(run)
    assert callback.attach(run) is callback
    assert run.callback_handler.callbacks.count(callback) == 1
    run.train()
    # The steps 0 and 4 are read; each is logged once.
    assert ["attention/layer.0/entropy" in x for x in seen] == [True, False, True, False]


def test_gradient_accumulation_is_one_step(trainer):
    callback = ch.integrations.transformers.MonitorCallback(alarms=False)
    run = trainer([callback], gradient_accumulation_steps=2)
    run.train()
    assert [step for step, _ in callback.monitor.history] == list(range(STEPS))
    assert callback.monitor.table()[0]["rows"] == 2 * 2 * 9


lightning = pytest.importorskip("lightning")


class Module(lightning.LightningModule):
    """A LightningModule around the GPT of the library."""

    def __init__(self, calls: str = "model") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.calls = ch.models.GPT(53, layers=2, heads=2, width=16, length=16), calls
        self.losses: list[float] = []

    def forward(self, ids):
        return self.model(ids)

    def training_step(self, batch, index):
        logits = self.model(batch) if self.calls == "model" else self(batch)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(float(loss))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.model(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(module: Any, callbacks: list[Any], folder: Any, **options: Any) -> list[dict[str, Any]]:
    """Train for some steps, and give what reached the logger."""
    from lightning.pytorch.loggers import CSVLogger

    logged: list[dict[str, Any]] = []

    class Logger(CSVLogger):
        def log_metrics(self, metrics, step=None):
            logged.append(dict(metrics))

    ids = architectures.tokens(2 * STEPS, 9)["input_ids"]
    data: Any = torch.utils.data.DataLoader(list(ids), batch_size=2)  # type: ignore[arg-type]
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_steps=STEPS, callbacks=callbacks, logger=Logger(folder), log_every_n_steps=2,
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data, data)
    return [x for x in logged if "loss" in x]


def test_lightning_logs_every_head(tmp_path):
    callback = ch.integrations.lightning.MonitorCallback(
        "model", path=tmp_path / "heads.safetensors", alarms=False
    )
    logged = fit(Module(), [callback], tmp_path)
    assert len(logged) == STEPS // 2
    history = callback.monitor.history
    assert len(history) == STEPS  # the validation is left out
    for entry, (_, values) in zip(logged, history[1::2], strict=True):
        assert entry["attention/layer.1/entropy"] == pytest.approx(float(values[1, :, 1].mean()))
        assert math.isfinite(entry["attention/layer.0/max_logit"])
    assert callback.monitor.closed
    assert (tmp_path / "heads.safetensors").exists()


def test_lightning_trains_alike(tmp_path):
    one, two = Module(), Module()
    fit(one, [ch.integrations.lightning.MonitorCallback("model")], tmp_path)
    fit(two, [], tmp_path)
    assert one.losses == two.losses


def test_lightning_sees_the_module_itself(tmp_path):
    callback = ch.integrations.lightning.MonitorCallback(alarms=False)
    assert len(fit(Module("self"), [callback], tmp_path)) == STEPS // 2
    assert len(callback.monitor.history) == STEPS


def test_lightning_never_sees_nothing(tmp_path):
    callback = ch.integrations.lightning.MonitorCallback()
    with pytest.raises(ValueError, match="no forward of Module was seen"):
        fit(Module(), [callback], tmp_path)
    assert callback.monitor.closed
    with pytest.raises(ValueError, match=r"^module: Module has no such attribute; got 'net'"):
        fit(Module(), [ch.integrations.lightning.MonitorCallback("net")], tmp_path)
    with pytest.raises(TypeError, match=r"^module: is the name of an attribute"):
        ch.integrations.lightning.MonitorCallback(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^every: is at least 1"):
        fit(Module(), [ch.integrations.lightning.MonitorCallback("model", every=0)], tmp_path)
