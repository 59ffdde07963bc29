"""monitor(): every number against its plain definition on the full weights, and what a step is."""

# Lists of tensors are spread over arguments of other types too.
# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false
# pyright: reportUnusedExpression=false
from __future__ import annotations

import copy
import math
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead import masks
from clearhead.monitoring import STATISTICS, Alarm


class Attends(nn.Module):
    """One call of attention in which query, key and value come from one tensor."""

    def __init__(self, attend: Any = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor, heads: int, query: int, *args: Any, **given: Any) -> Tensor:
        q, k, v = parts(x, heads, query)
        return self.attend(q, k, v, *args, **given)


def parts(x: Tensor, heads: int, query: int) -> tuple[Tensor, ...]:
    """Query heads, source heads, and as many of values; the queries are the last positions."""
    shared = (x.shape[1] - heads) // 2
    q, k, v = x.split([heads, shared, shared], 1)
    return q[:, :, x.shape[2] - query :], k, v


class Handwritten(nn.Module):
    """Matmul, softmax, matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.mT / 2
        if real is not None:
            scores = scores.masked_fill(~real[:, None, None], -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def plain(
    q: Tensor, k: Tensor, context: Tensor, allowed: Tensor | None = None, real: Any = None,
    sinks: int = 4, scale: float | None = None, softcap: float | None = None,
    sink_logits: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The statistics of one call on the full weights in float64, (head, statistic)."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias.double()
    allowed = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed
    allowed = allowed.expand_as(scores)
    scores = scores.masked_fill(~allowed, -math.inf)
    logits = scores
    if sink_logits is not None:
        column = sink_logits.double()[:, None, None].expand(*scores.shape[:-1], 1)
        logits = torch.cat([scores, column], -1)
    weights = logits.softmax(-1)[..., : k.shape[-2]].nan_to_num(0)
    counts = allowed.sum(-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    offset = k.shape[-2] - q.shape[-2]
    own = torch.zeros_like(entropy)
    for i in range(q.shape[-2]):
        if i + offset >= 0:
            own[..., i] = weights[..., i, i + offset]
    real = (counts > 0) if real is None else real.expand_as(counts) & (counts > 0)
    found = []
    for head in range(q.shape[1]):
        rows = real[:, head]
        each = (
            entropy, torch.where(counts > 1, entropy / counts.clamp(min=2).double().log(), 0),
            weights[..., :sinks].sum(-1), weights.amax(-1), own, context.double().norm(dim=-1),
        )  # fmt: skip
        most = scores.amax(-1)[:, head][rows].max()
        means = [x[:, head][rows].mean() for x in each]
        found.append(torch.stack([most, *means, rows.sum().double()]))
    return torch.stack(found)


def draw(batch: int, heads: int, shared: int, source: int, width: int, dtype: Any = torch.float64):
    """The tensor that `Attends` splits."""
    draw = torch.Generator().manual_seed(0)
    shape = (batch, heads + 2 * shared, source, width)
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)


def read(model: nn.Module, x: Tensor, heads: int, *args: Any, query: int = 0, **given: Any) -> Any:
    """What a monitor reads of one call, (head, statistic), and query, key and context."""
    options = {name: given.pop(name) for name in ("sinks", "through") if name in given}
    query = query or x.shape[2]
    with ch.monitor(model, alarms=False, **options) as seen:
        context = model(x, heads, query, *args, **given)
    ((_, values),) = seen.history
    return values[0], (*parts(x, heads, query)[:2], context)


def close(found: Tensor, right: Tensor, eps: float = 2.0**-52) -> None:
    """Equal to the roundings of sums of about a hundred terms."""
    gap = (found - right).abs() / (1 + right.abs())
    assert gap.max() <= 256 * eps, dict(zip(STATISTICS, gap.amax(0).tolist(), strict=True))


REAL = torch.tensor([[True] * 13, [False] * 3 + [True] * 10, [True] * 6 + [False] * 7])
CAUSAL = torch.ones(13, 13, dtype=torch.bool).tril()
PACKED = torch.tensor([0] * 5 + [1] * 3 + [2] * 5)


class TestNumbers:
    @pytest.mark.parametrize("through", [False, True])
    @pytest.mark.parametrize(
        ("dtype", "eps"), [(torch.float64, 2.0**-52), (torch.float32, 2.0**-23)], ids=str
    )
    @pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
    def test_causal(self, heads: Any, dtype: torch.dtype, eps: float, through: bool) -> None:
        x = draw(3, *heads, 13, 8, dtype)
        found, call = read(Attends(), x, heads[0], is_causal=True, enable_gqa=True, through=through)
        close(found, plain(*call, CAUSAL), eps)

    @pytest.mark.parametrize("sinks", [1, 4, 50])
    def test_everything(self, sinks: int) -> None:
        found, call = read(Attends(), draw(2, 3, 3, 11, 4), 3, sinks=sinks)
        close(found, plain(*call, sinks=sinks))

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("form", ["bool", "float"])
    def test_padded(self, causal: bool, form: str) -> None:
        """Positions that no query may read are padding, and do not count as queries."""
        allowed = REAL[:, None, None].expand(3, 1, 13, 13)
        allowed = allowed & CAUSAL if causal else allowed
        given = allowed
        if form == "float":
            given = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -math.inf)
        found, (q, k, context) = read(Attends(), draw(3, 4, 4, 13, 8), 4, attn_mask=given)
        close(found, plain(q, k, context.nan_to_num(), allowed, REAL[:, None]))
        assert found[:, -1].tolist() == [REAL.sum().item()] * 4

    @pytest.mark.parametrize("ours", [False, True])
    def test_packed(self, ours: bool) -> None:
        allowed = (PACKED[:, None] == PACKED) & CAUSAL
        mask = masks.causal() & masks.document(PACKED)
        given = {"mask": mask} if ours else {"attn_mask": allowed}
        model = Attends(ch.attend) if ours else Attends()
        found, call = read(model, draw(2, 3, 3, 13, 8), 3, **given)
        close(found, plain(*call, allowed))

    @pytest.mark.parametrize("query", [7, 13])
    def test_what_attend_takes(self, query: int) -> None:
        bias, logits = torch.randn(4, query, 13).double(), torch.randn(4).double()
        bias[:, :, 2] = -math.inf
        given: dict[str, Any] = {"softcap": 3.0, "bias": bias, "scale": 0.7}
        model = Attends(lambda *args, **more: ch.attend(*args, **more, sinks=logits))
        found, call = read(model, draw(2, 4, 2, 13, 8), 4, masks.causal(), query=query, **given)
        allowed = CAUSAL[-query:] & (bias != -math.inf)
        # Source 2 is read by nobody: where queries stand for sources it is padding.
        real = torch.arange(13) != 2 if query == 13 else torch.ones(7, dtype=torch.bool)
        close(found, plain(*call, allowed, real, sink_logits=logits, **given))

    def test_more_queries_than_sources(self) -> None:
        class Longer(Attends):
            def forward(
                self, x: Tensor, heads: int, query: int, *args: Any, **given: Any
            ) -> Tensor:
                q, k, v = parts(x, heads, query)
                return self.attend(q, k[:, :, :5], v[:, :, :5])

        x = draw(2, 3, 3, 9, 4)
        found, (q, k, context) = read(Longer(), x, 3)
        close(found, plain(q, k[:, :, :5], context))

    def test_queries_without_sources_do_not_count(self) -> None:
        x, strictly = draw(1, 2, 2, 5, 4), torch.ones(5, 5, dtype=torch.bool).tril(-1)
        found, _ = read(Attends(ch.attend), x, 2, masks.dense(strictly))
        # The first may read nothing, and nothing may read the last one.
        assert found[:, -1].tolist() == [3, 3]
        found, _ = read(Attends(ch.attend), x, 2, masks.diagonal(1))
        assert found[:, -1].tolist() == [4, 4]

    def test_dropout(self) -> None:
        """Readings are those of the weights before dropout; the context is the model's own."""
        x = draw(2, 3, 3, 13, 8)
        torch.manual_seed(3)
        found, call = read(Attends(), x, 3, dropout_p=0.5)
        close(found, plain(*call))
        torch.manual_seed(3)
        assert torch.equal(call[2], Attends()(x, 3, 13, dropout_p=0.5))

    def test_bf16_autocast(self) -> None:
        torch.manual_seed(0)
        layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 13, 32)
        seen: list[tuple[Tensor, ...]] = []
        real = F.scaled_dot_product_attention

        class Spy(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                if func is real:
                    seen.append((args[0], args[1], out))
                return out

        with torch.autocast("cpu", torch.bfloat16), ch.monitor(layer) as monitor, Spy():
            layer(x, x, x, need_weights=False)
        q, k, context = seen[-1]
        assert q.dtype == torch.bfloat16
        (_, values), = monitor.history  # fmt: skip
        close(values[0], plain(q, k, context), 2.0**-23)

    def test_handwritten(self) -> None:
        torch.manual_seed(0)
        model, x = Handwritten().double(), torch.randn(3, 13, 8, dtype=torch.float64)
        with ch.monitor(model, sinks=2) as monitor:
            model(x, REAL)
        q, k = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (model.q, model.k))
        context = model(x, REAL).unflatten(-1, (2, 4)).transpose(1, 2)
        right = plain(q, k, context, REAL[:, None, None], REAL[:, None], sinks=2)
        close(monitor.history[0][1][0], right)

    def test_cross_attention_has_no_own_position(self) -> None:
        layer = nn.MultiheadAttention(8, 2, batch_first=True)
        with ch.monitor(layer) as monitor:
            layer(torch.randn(2, 5, 8), x := torch.randn(2, 7, 8), x)
        assert all(math.isnan(row["self"]) and row["rows"] == 10 for row in monitor.table())
        assert not monitor.alarms


def gpt(**more: Any) -> Any:
    torch.manual_seed(0)
    options = {"layers": 2, "heads": 2, "width": 32, "length": 16, "dropout": 0.0, **more}
    return ch.models.GPT(50, **options)


def tokens(batch: int = 3, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, steps: int, micro: int = 1, **given: Any) -> list[float]:
    """Losses of a short training, each step of so many forwards whose gradients add up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        for part in range(micro):
            x = tokens(seed=10 * step + part)
            loss = F.cross_entropy(model(x, **given).flatten(0, 1), x.flatten())
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Torch(nn.Module):
    """A model of torch's own layers."""

    def __init__(self, checkpointed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True) for _ in range(2)
        )
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


class TestSteps:
    def test_losses_have_the_same_bits(self) -> None:
        for make in (lambda: gpt(dropout=0.1), lambda: Torch(dropout=0.1)):
            plain_model, model = make(), make()
            torch.manual_seed(1)
            right = train(plain_model, 4)
            torch.manual_seed(1)
            with ch.monitor(model, alarms=False):
                assert train(model, 4) == right

    def test_every(self) -> None:
        model = gpt()
        with ch.monitor(model, every=3) as monitor:
            train(model, 8)
        assert [step for step, _ in monitor.history] == [0, 3, 6]

    def test_forwards_whose_gradients_add_up_are_one_step(self) -> None:
        model = gpt()
        with ch.monitor(model, alarms=False) as monitor:
            train(model, 2, micro=3)
        assert [step for step, _ in monitor.history] == [0, 1]
        assert all(row["rows"] == 3 * 3 * 7 for row in monitor.table())
        again = gpt()
        with ch.monitor(again, alarms=False) as each:
            for part in range(3):
                again(tokens(seed=part))
        (one,), parts = [monitor.history[:1], torch.stack([x for _, x in each.history])]
        assert len(each.history) == 3
        close(one[1][..., 1:-1], parts.mean(0)[..., 1:-1])
        close(one[1][..., 0], parts.amax(0)[..., 0])

    def test_evaluation_is_left_out(self) -> None:
        model = gpt()
        with ch.monitor(model) as monitor:
            model(tokens())
            model.eval()(tokens())
            model.train()
        assert len(monitor.history) == 1
        words = "2 forwards were in evaluation mode"
        with pytest.raises(RuntimeError, match=words), ch.monitor(model.eval()):
            model(tokens()), model(tokens())

    @pytest.mark.parametrize("through", [False, True])
    def test_recomputation_counts_once(self, through: bool) -> None:
        found = []
        for checkpointed in (False, True):
            model = Torch(checkpointed)
            with ch.monitor(model, through=through, alarms=False) as monitor:
                losses = train(model, 1)
            found.append((losses, monitor.history[-1][1]))
        assert torch.allclose(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)
        assert found[1][1][..., -1].unique().tolist() == [21]

    def test_through_trains_alike(self) -> None:
        plain_model, model = Torch(), Torch()
        right = train(plain_model, 4)
        with ch.monitor(model, through=True, alarms=False) as monitor:
            found = train(model, 4)
        assert torch.allclose(torch.tensor(found), torch.tensor(right), rtol=1e-4)
        assert len(monitor.history) == 4

    def test_two_monitors_see_the_same(self) -> None:
        model = gpt()
        with ch.monitor(model) as one, ch.monitor(model) as other:
            train(model, 2)
        assert all(
            torch.equal(a, b) for (_, a), (_, b) in zip(one.history, other.history, strict=False)
        )

    def test_layers_and_heads(self) -> None:
        model = gpt(layers=3)
        with ch.monitor(model) as every, ch.monitor(model, layers=-1, heads=[1]) as some:
            train(model, 2)
        assert [(row["layer"], row["head"]) for row in some.table()] == [(2, 1)]
        for (_, whole), (_, chosen) in zip(every.history, some.history, strict=True):
            assert torch.equal(whole[2:, 1:], chosen)
        with pytest.raises(ValueError, match=r"layers: lie in 0..2"), ch.monitor(model, layers=[3]):
            model(tokens())

    def test_shared_layers_and_growing_lengths(self) -> None:
        model = gpt()
        with ch.monitor(model, steps=3, alarms=False) as monitor:
            for length in range(2, 9):
                model(tokens(length=length))
        assert [step for step, _ in monitor.history] == [4, 5, 6]
        assert [int(x[0, 0, -1]) for _, x in monitor.history] == [18, 21, 24]

    def test_a_forward_that_fails_is_not_counted(self) -> None:
        model = gpt()
        with ch.monitor(model) as monitor:
            with pytest.raises(ValueError, match="tokens"):
                model(tokens(length=99))
            model(tokens())
        assert len(monitor.history) == 1

    def test_interrupted_forwards_leave_nothing_behind(self) -> None:
        model = gpt()

        def stop(*args: Any) -> None:
            raise KeyboardInterrupt

        monitor = ch.monitor(model, alarms=False)
        handle = model.blocks[1].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(tokens())
        handle.remove()
        model(tokens())
        assert len(monitor.history) == 1
        monitor.close()
        assert not torch.overrides._get_current_function_mode_stack()

    def test_copies_and_files_of_the_model_are_not_monitored(self) -> None:
        model = gpt()
        with ch.monitor(model) as monitor:
            model(tokens())
            copied = copy.deepcopy(model)
            copied(tokens())
            pickle.loads(pickle.dumps(model))(tokens())
        assert len(monitor.history) == 1
        assert not model._forward_hooks
        assert not model._forward_pre_hooks

    def test_a_layer_that_changes_its_way_is_read_again(self) -> None:
        """Where only kernels were seen, nothing else is followed; a silent layer is noticed."""
        torch.manual_seed(0)
        layer, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 5, 8)
        with ch.monitor(layer, alarms=False) as monitor:
            for weights in (False, False, True, True):
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    layer(x, x, x, need_weights=weights)
                if weights and len(monitor.history) == 2:
                    assert "took another way" in str(warned[0].message)
        assert [step for step, _ in monitor.history] == [0, 1, 3]
        assert torch.allclose(monitor.history[0][1], monitor.history[2][1], atol=1e-6)

    def test_a_model_that_changes_its_dtype(self) -> None:
        model = gpt()
        with ch.monitor(model, alarms=False) as monitor:
            model(tokens())
            model.double()(tokens())
        (_, one), (_, other) = monitor.history
        close(one.flatten(0, 1), other.flatten(0, 1), 2.0**-23)


class TestAlarms:
    def test_scores_that_grow(self) -> None:
        model = gpt()
        with torch.no_grad():
            model.blocks[1].attention.query_layer.weight *= 1e4
        heard: list[Alarm] = []
        with ch.monitor(model, alarms=heard.append, thresholds={"logit_growth": 20.0}) as monitor:
            train(model, 3)
        assert {(x.step, x.layer, x.kind) for x in heard} == {(0, 1, "logit_growth")}
        assert sorted(x.head for x in heard) == [0, 1]
        assert monitor.alarms == heard
        assert all(x.value > 20 for x in heard)

    def test_entropy_that_collapses_for_some_steps(self) -> None:
        model = gpt()
        with torch.no_grad():
            model.blocks[0].attention.query_layer.weight *= 1e6
        monitor = ch.monitor(model, patience=3, thresholds={"logit_growth": 1e9, "sink": 2})
        model(tokens()), model(tokens()), model(tokens())
        words = r"entropy_collapse at step 2, .* for 3 steps: layer 0 head 0"
        with pytest.warns(UserWarning, match=words):
            model(tokens())
        model(tokens())
        monitor.close()
        assert {(x.layer, x.step) for x in monitor.alarms} == {(0, 2)}

    def test_dead_heads_and_sinks(self) -> None:
        model = gpt(heads=4)
        with torch.no_grad():
            model.blocks[0].attention.value_layer.weight[8:16] = 0
        with ch.monitor(model, alarms=lambda alarm: None, patience=2) as monitor:
            for _ in range(3):
                model(tokens())
        dead = [(x.layer, x.head, x.step) for x in monitor.alarms if x.kind == "dead_head"]
        assert dead == [(0, 1, 1)]
        # Four of seven positions are the first ones.
        assert len([x for x in monitor.alarms if x.kind == "sink"]) == 8

    def test_a_nan_is_reported_and_the_run_goes_on(self) -> None:
        model = gpt()
        with torch.no_grad():
            model.blocks[1].attention.key_layer.weight[0, 0] = math.nan
        with warnings.catch_warnings(record=True) as warned, ch.monitor(model) as monitor:
            warnings.simplefilter("always")
            train(model, 2)
        assert "nan at step 0" in str(warned[0].message)
        assert "layer 1 head 0" in str(warned[0].message)
        assert len(monitor.history) == 2
        assert {(x.step, x.layer, x.head) for x in monitor.alarms if x.kind == "nan"} >= {(0, 1, 0)}

    def test_a_callback_that_raises(self) -> None:
        model = gpt()

        def broken(alarm: Alarm) -> None:
            raise OSError("no space left")

        with (
            pytest.warns(
                UserWarning, match="callback of alarms raised OSError: no space"
            ) as warned,
            ch.monitor(model, alarms=broken, thresholds={"logit_growth": -1e9}) as monitor,
        ):
            train(model, 3)
        assert len(warned) == 1
        assert len(monitor.history) == 3
        assert len(monitor.alarms) == 4


class TestResults:
    def test_log_and_table(self) -> None:
        model = gpt()
        with ch.monitor(model) as monitor:
            model(tokens())
        table, log = monitor.table(), monitor.log(heads=True, prefix="a")
        of = [row["max_logit"] for row in table if row["layer"] == 1]
        assert log["a/layer.1/max_logit"] == max(of)
        assert log["a/layer.1/max_logit_min"] == min(of)
        assert log["a/layer.1/head.0/entropy"] == table[2]["entropy"]
        assert log["a/layer.1/sink"] == pytest.approx(sum(row["sink"] for row in table[2:]) / 2)
        assert all(type(x) is float for x in log.values())
        assert tuple(table[0])[3:] == STATISTICS
        assert table[0]["module"] == "blocks.0.attention"

    @pytest.mark.parametrize("kind", ["parquet", "safetensors"])
    def test_files(self, kind: str, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow" if kind == "parquet" else "safetensors")
        model, path = gpt(), tmp_path / f"history.{kind}"
        with ch.monitor(model) as monitor:
            train(model, 3)
            monitor.save(path)
        whole = torch.stack([x for _, x in monitor.history])
        if kind == "safetensors":
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                assert torch.equal(file.get_tensor("values"), whole)
                assert file.get_tensor("steps").tolist() == [0, 1, 2]
        else:
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
            assert rows[-1] == {"step": 2, **monitor.table()[-1]}
            assert len(rows) == 12
        assert [x.name for x in tmp_path.iterdir()] == [path.name]

    def test_a_file_is_written_whole_or_not_at_all(self, tmp_path: Path) -> None:
        model, path = gpt(), tmp_path / "history.csv"
        with ch.monitor(model) as monitor:
            model(tokens())
        with pytest.raises(ValueError, match=r"path: ends in .parquet or .safetensors"):
            monitor.save(path)
        with pytest.raises(FileNotFoundError):
            monitor.save(tmp_path / "missing" / "history.safetensors")
        assert not list(tmp_path.iterdir())


class TestBadInput:
    @pytest.mark.parametrize(
        ("given", "error", "text"),
        [
            ({"every": 0}, ValueError, "every: is at least 1; got 0"),
            ({"every": 1.5}, TypeError, "every: is an integer"),
            ({"sinks": 0}, ValueError, "sinks: is at least 1"),
            ({"alarms": "yes"}, TypeError, "alarms: is True, False or a function"),
            ({"thresholds": {"logit": 3}}, ValueError, "did you mean logit_growth"),
            ({"thresholds": {"sink": "1"}}, TypeError, "thresholds: holds numbers"),
            ({"layers": "all"}, TypeError, "layers: takes numbers"),
        ],
        ids=str,
    )
    def test_arguments(self, given: Any, error: Any, text: str) -> None:
        with pytest.raises(error, match=text):
            ch.monitor(gpt(), **given)

    def test_models(self) -> None:
        with pytest.raises(TypeError, match=r"model: is a torch.nn.Module"):
            ch.monitor(lambda x: x)
        model = nn.Sequential(nn.Linear(3, 3))
        words = "monitor: no attention call of the model was seen"
        with pytest.raises(RuntimeError, match=words), ch.monitor(model):
            model(torch.zeros(2, 3))
        assert not torch.overrides._get_current_function_mode_stack()

    def test_before_and_after(self) -> None:
        monitor = ch.monitor(model := gpt())
        for ask in (monitor.table, monitor.log):
            with pytest.raises(RuntimeError, match="no step was read yet"):
                ask()
        assert monitor.history == []
        assert monitor.alarms == []
        model(tokens())
        monitor.close()
        monitor.close()
        model(tokens())
        assert len(monitor.history) == 1
        assert len(monitor.table()) == 4
        with pytest.raises(ValueError, match="monitor: is closed"), monitor:
            pass

    def test_a_module_that_is_replaced(self) -> None:
        model = gpt()
        with ch.monitor(model, alarms=False) as monitor:
            train(model, 2)
            model.blocks[1] = copy.deepcopy(model.blocks[0])
            train(model, 1)
        assert len(monitor.history) == 3
        assert len(monitor.table()) == 4
        assert not monitor.notes


class TestCompiled:
    """Steps that are read run eagerly, and the others compiled."""

    @pytest.mark.parametrize("part", ["model", "layer"])
    def test_the_wrapper_is_monitored(self, part: str) -> None:
        right = train(Torch(), 4)
        model: Any = Torch()
        if part == "model":
            model = torch.compile(model, backend="eager")
        else:
            model.layers[1] = torch.compile(model.layers[1], backend="eager")
        monitor = ch.monitor(model, every=2, alarms=False)
        with pytest.warns(UserWarning, match="compiled: the steps that are read run eagerly"):
            found = train(model, 4)
        assert torch.allclose(torch.tensor(found), torch.tensor(right))
        assert [step for step, _ in monitor.history] == [0, 2]
        assert len(monitor.table()) == 4
        assert "layers.1.self_attn" in monitor.layers[1]


def of_a_rank(rank: int, home: str, wrap: bool) -> None:
    """Train on a rank's own samples, of which rank 1 has more, and save what the rank read."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{home}/group", rank=rank, world_size=2
    )
    torch.set_num_threads(1)
    model: Any = Torch()
    model = torch.nn.parallel.DistributedDataParallel(model) if wrap else model
    calls: list[Any] = []
    real = torch.distributed.all_reduce
    with ch.monitor(model, alarms=False) as monitor:
        torch.distributed.all_reduce = lambda *args, **more: (
            calls.append(args) or real(*args, **more)
        )
        model(tokens(batch=1 + rank, seed=rank)).sum().backward()
        torch.distributed.all_reduce = real
    torch.save((monitor.history[0][1], len(calls)), f"{home}/{rank}.pt")
    torch.distributed.barrier()
    # The destructors of DDP and of gloo's group wait for one another at times.
    os._exit(0)


@pytest.mark.slow
class TestRanks:
    @pytest.mark.parametrize("wrap", [False, True])
    def test_numbers_are_those_of_all_ranks(self, wrap: bool, tmp_path: Path) -> None:
        torch.multiprocessing.spawn(of_a_rank, (str(tmp_path), wrap), nprocs=2)
        (one, calls), (other, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
        assert torch.equal(one, other)
        assert calls == 1
        with ch.monitor(model := Torch(), alarms=False) as monitor:
            model(torch.cat([tokens(1, seed=0), tokens(2, seed=1)]))
        close(one.flatten(0, 1), monitor.history[0][1].flatten(0, 1), 2.0**-23)


def recipe() -> Any:
    """The functions of the recipe on docs/training.md."""
    text = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    parts = text.partition("## A recipe: QK-clip")[2].split("```python\n")[1:]
    code = "".join(part.partition("```")[0] for part in parts).partition("with torch.no_grad")[0]
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    return names


class Grouped(nn.Module):
    """Six query heads on two source heads, from separate projections with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.query_layer, self.key_layer = nn.Linear(24, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query_layer(x).unflatten(-1, (6, 4)).transpose(1, 2)
        key = self.key_layer(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)


class TestRecipe:
    """QK-clip: each head above tau has tau as its largest logit, and no other head changes."""

    @pytest.mark.parametrize("kind", ["separate", "fused", "grouped"])
    def test_the_largest_logits_are_bounded(self, kind: str) -> None:
        names, x = recipe(), torch.randn(3, 7, 24)
        torch.manual_seed(0)
        if kind == "separate":
            model: Any = ch.models.GPT(50, layers=1, heads=6, width=24, length=16, dropout=0.0)
            where, given = names["separate"](model.blocks[0].attention), (tokens(),)
        elif kind == "fused":
            model = nn.MultiheadAttention(24, 6, batch_first=True)
            where, given = names["fused"](model), (x, x, x)
        else:
            model, given = Grouped(), (x,)
            query, key = model.query_layer, model.key_layer
            where = [query.weight, query.bias], [key.weight, key.bias]
        with torch.no_grad():
            # The logits of half of the heads are large.
            where[0][0][:12] *= 3e4 if kind == "separate" else 30
        with ch.monitor(model, alarms=False) as monitor:
            model(*given)
            before = names["largest_logits"](monitor)[0]
            assert (before > 3).sum() >= 3 > 1 >= (before[3:] > 3).sum()
            names["qk_clip"](before, *where, tau=3.0)
            model(*given)
        after = names["largest_logits"](monitor)[0]
        assert torch.allclose(after, before.clamp(max=3.0), rtol=1e-5)
