"""What reading a model must not get wrong: forms of attention, modes around it, true reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead import readings

WEIGHTS = readings.Weights()
einsum = torch.einsum


class Attention(nn.Module):
    """Handwritten attention over (batch, position, width), with heads, mixed by a function."""

    def __init__(self, mix: Any, heads: int = 2, width: int = 6):
        super().__init__()
        self.mix, self.heads = mix, heads
        self.qkv = nn.Linear(width, 3 * width)

    def split(self, x: Tensor) -> list[Tensor]:
        parts = self.qkv(x).chunk(3, -1)
        return [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in parts]

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(*self.split(x))


def watched(mix: Any, *, batch: int = 3, heads: int = 2, positions: int = 5, read: Any = WEIGHTS):
    """Watch one attention; give the records, and query, key and value."""
    torch.manual_seed(0)
    model, x = Attention(mix, heads), torch.randn(batch, positions, 6)
    with torch.no_grad(), ch.watch(model, read=read) as seen:
        model(x)
    return seen, *model.split(x)


def reason(mix: Any, **sizes: int) -> str:
    """Give the error of a watch that sees nothing."""
    with pytest.raises(RuntimeError, match="no attention call") as raised:
        watched(mix, **sizes)
    return str(raised.value)


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.detach(), rtol=0, atol=1e-6)


def soft(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1)


def one_by_one(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product, written with elementwise products."""
    return (left[..., None] * right[..., None, :, :]).sum(-2)


class TestFormsOfProducts:
    EINSUMS = (
        # One head of keys and values.
        ("bhqd,bkd->bhqk", "bhqk,bkd->bhqd"),
        ("bhqd,bkd->bqhk", "bqhk,bkd->bqhd"),
        ("bhqd,bkd->bhkq", "bhkq,bkd->dqbh"),
        # An ellipsis beside letters that an alphabet would give it.
        ("...aqz,...azk->...aqk", "...aqk,...azk->...aqz"),
        ("...qZ,...ZY->...qY", "...qY,...ZY->...qZ"),
        ("...yd,...dx->...xy", "...xy,...dx->...dy"),
    )

    @pytest.mark.parametrize(("scores", "context"), EINSUMS)
    def test_einsum(self, scores, context):
        axis = scores.partition("->")[2].replace("...", "").index(
            next(x for x in "kYx" if x in scores.partition("->")[2])
        ) - len(scores.partition("->")[2].replace("...", ""))  # fmt: skip

        def mix(q, k, v):
            if ",b" in scores:
                k, v = k[:, 0], v[:, 0]
            else:
                k, v = k.mT, v.mT
            return einsum(context, einsum(scores, q, k).softmax(axis), v)

        seen, q, k, _ = watched(mix)
        near(seen[0].value, soft(q, k[:, :1] if ",b" in scores else k))
        assert not seen.notes

    def test_einsum_that_leaves_the_queries_open_is_named(self):
        def mix(q, k, v):
            return einsum(
                "bhij,bjd->bhid", einsum("bhid,bjd->bhij", q, k[:, 0]).softmax(-1), v[:, 0]
            )

        assert "'bhij,bjd->bhid' leaves open which axis" in reason(mix, heads=3, positions=3)

    @pytest.mark.parametrize("arrow", ["", "->di", "->id"])
    def test_einsum_of_one_sequence(self, arrow):
        def mix(q, k, v):
            weights = einsum("id,jd->ij", q[0, 0], k[0, 0]).softmax(-1)
            return einsum("ij,jd" + arrow, weights, v[0, 0])

        seen, q, k, _ = watched(mix)
        near(seen[0].value, soft(q, k)[:1, :1])

    @pytest.mark.parametrize(
        ("equation", "why"),
        [
            ("bhqk,bhkd", "sums over b, h, k"),
            ("bhqk,bhkd->bqd", "sums over h, k"),
            ("bhqk,bhkd->bhqkd", "sums over no axis"),
            ("bhqk,bhde->bhqkde", "sums over no axis"),
        ],
    )
    def test_einsum_that_is_no_attention_says_why(self, equation, why):
        def mix(q, k, v):
            return einsum(equation, soft(q, k), v)

        assert f"its einsum {equation!r} {why}" in reason(mix)

    TURNED = (
        lambda q, k, v: (k @ q.mT).softmax(-2).mT @ v,
        lambda q, k, v: v.mT @ (k @ q.mT).softmax(-2),
        lambda q, k, v: v.mT @ soft(q, k).transpose(-1, -2),
        lambda q, k, v: torch.movedim(soft(q, k), 2, 3).swapaxes(2, 3) @ v,
        lambda q, k, v: einsum("bqhk,bhkd->bqhd", soft(q, k).transpose(1, 2), v),
        lambda q, k, v: einsum("kqbh,bhkd->bhqd", soft(q, k).permute(3, 2, 0, 1), v),
        lambda q, k, v: torch.linalg.matmul(torch.linalg.matmul(q, k.mT).softmax(-1), v),
    )

    @pytest.mark.parametrize("mix", TURNED)
    @pytest.mark.parametrize("positions", [2, 3, 5])
    def test_axes_of_one_size_are_told_apart(self, mix, positions):
        for batch, heads in ((3, 2), (positions, 2), (3, 3)):
            seen, q, k, _ = watched(mix, batch=batch, heads=heads, positions=positions)
            near(seen[0].value, soft(q, k))
            assert seen[0].check < 1e-5  # pyright: ignore[reportOptionalOperand]
            assert not seen.notes

    def test_dropout_of_turned_weights(self):
        def mix(q, k, v):
            return v.mT @ F.dropout(soft(q, k), 0.5).mT

        seen, q, k, _ = watched(mix)
        near(seen[0].value, soft(q, k))

    @pytest.mark.parametrize(
        "mix",
        [
            lambda q, k, v: (k @ q.mT).softmax(-1).mT @ v,
            lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
            lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1),
        ],
    )
    def test_softmax_over_the_queries_is_named(self, mix):
        assert "and its product with the value sums another one" in reason(mix, positions=3)


class Projection(nn.Linear):
    """A projection that changes its weight before it uses it."""

    def __init__(self, change: Any, how: str):
        super().__init__(8, 8, bias=False)
        self.change, self.how = change, how

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight = self.change(self.weight)
        return x @ weight.mT if self.how == "matmul" else einsum("oi,bti->bto", weight, x)


class TestKind:
    @pytest.mark.parametrize("how", ["matmul", "einsum"])
    @pytest.mark.parametrize(
        "change",
        [
            lambda w: w.double().float(),
            lambda w: w / w.norm(),
            lambda w: (w - w.mean(0)).clone().contiguous(),
            lambda w: w.to(torch.bfloat16).to(w.dtype).mT.mT,
            lambda w: w.abs().sign() * w,
        ],
    )
    def test_weights_that_are_changed_are_weights(self, change, how):
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.q, self.k = Projection(change, how), Projection(change, how)

            def forward(self, x, source):
                return soft(self.q(x), self.k(source)) @ source

        layer, x, other = Layer(), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
        with ch.watch(layer) as seen:
            layer(x, x)
        assert seen[0].kind == "self"
        with ch.watch(layer) as seen:
            layer(x, other)
        assert seen[0].kind == "cross"

    def test_learned_queries_are_activations(self):
        class Pool(nn.Module):
            def __init__(self):
                super().__init__()
                self.latents, self.q = nn.Parameter(torch.randn(3, 8)), nn.Linear(8, 8)

            def forward(self, x):
                return soft(self.q(self.latents.double().float()), x) @ x

        model, x = Pool(), torch.randn(2, 5, 8)
        with ch.watch(model, read=WEIGHTS) as seen:
            model(x)
        near(seen[0].value[:, 0], soft(model.q(model.latents), x))
        assert seen[0].kind == "cross"


class TestScale:
    @staticmethod
    def of(score: Any, heads: int = 2, positions: int = 5) -> float | None:
        class Scored(Attention):
            def __init__(self):
                super().__init__(lambda q, k, v: score(self, q, k).softmax(-1) @ v, heads)
                self.bias = nn.Parameter(torch.randn(positions, positions))
                self.gain = nn.Parameter(torch.rand(heads, 1, 1) + 1)
                self.one = nn.Parameter(torch.tensor(3.0))

        model = Scored()
        with torch.no_grad(), ch.watch(model, read=WEIGHTS) as seen:
            model(torch.randn(1, positions, 6))
        return seen[0].scale

    @pytest.mark.parametrize(
        ("score", "scale"),
        [
            (lambda m, q, k: 0.25 * (q @ k.mT) + m.bias, 0.25),
            (lambda m, q, k: (q @ k.mT + m.bias) / 4, 0.25),
            (lambda m, q, k: (q / 2) @ k.mT * 0.5 + m.bias.double().float(), 0.25),
            (lambda m, q, k: torch.divide(q @ k.mT, 4) - m.bias, 0.25),
            (lambda m, q, k: q @ k.mT * m.one, 3.0),
            (lambda m, q, k: q @ k.mT / m.one.exp().log(), 1 / 3),
        ],
    )
    def test_one_number(self, score, scale):
        assert self.of(score) == pytest.approx(scale)
        assert self.of(score, heads=1, positions=1) == pytest.approx(scale)

    @pytest.mark.parametrize(
        "score",
        [
            lambda m, q, k: q @ k.mT * m.gain,
            lambda m, q, k: q @ k.mT * m.gain.exp(),
            lambda m, q, k: m.gain.detach().clone() * (q @ k.mT),
            lambda m, q, k: q @ k.mT / torch.tensor([2.0, 4.0])[:, None, None],
            lambda m, q, k: (q @ k.mT).mul(m.gain) * 0.5,
        ],
    )
    def test_no_one_number(self, score):
        assert self.of(score) is None


class TestFormsOfSoftmax:
    SEEN = (
        lambda s: F.log_softmax(s, -1).exp(),
        lambda s: s.log_softmax(-1).float().exp_(),
        lambda s: torch.exp(torch.special.log_softmax(s, dim=-1)),
        lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(),
        lambda s: s.sub(torch.logsumexp(s, -1, True)).exp_(),
        lambda s: (s - s.amax(-1, True)).exp() * (s - s.amax(-1, True)).exp().sum(-1, True) ** -1,
        lambda s: F.normalize(s.exp(), p=1, dim=-1),
        lambda s: s.mT.log_softmax(-2).mT.exp(),
    )

    @pytest.mark.parametrize("normal", SEEN)
    def test_other_ways_to_write_it(self, normal):
        seen, q, k, _ = watched(lambda q, k, v: normal(q @ k.mT) @ v)
        near(seen[0].value, soft(q, k))
        assert seen[0].check < 1e-5  # pyright: ignore[reportOptionalOperand]
        assert not seen.notes

    def test_implicit_axis(self):
        def mix(q, k, v):
            weights = F.softmax((q @ k.mT)[:, 0].permute(2, 0, 1), _stacklevel=0)  # over axis 0
            return weights.permute(1, 2, 0) @ v[:, 0]

        with pytest.warns(UserWarning, match="Implicit dimension"):
            seen, q, k, _ = watched(mix)
        near(seen[0].value, soft(q, k)[:, :1])

    @pytest.mark.parametrize(
        ("mix", "why"),
        [
            (lambda q, k, v: (q @ k.mT).exp() @ v, "before it is divided by its sum"),
            (
                lambda q, k, v: (q @ k.mT).exp() @ v / (q @ k.mT).exp().sum(-1, keepdim=True),
                "before it is divided by its sum",
            ),
            (lambda q, k, v: torch.sigmoid(q @ k.mT) @ v, "without a softmax"),
            (lambda q, k, v: (q @ k.mT).relu().square() @ v, "without a softmax"),
            (lambda q, k, v: F.elu(q) @ (F.elu(k).mT @ v), "without a softmax"),
            (
                lambda q, k, v: einsum("bhnd,bhde->bhne", q, einsum("bhnd,bhne->bhde", k, v)),
                "without a softmax",
            ),
            (lambda q, k, v: torch.tensordot(soft(q, k)[0, 0], v[0, 0], 1), "met no value"),
            (lambda q, k, v: soft(q, k)[..., None, :] @ v[:, :, None], "reshaped between"),
        ],
    )  # fmt: skip
    def test_what_is_not_followed_is_named(self, mix, why):
        assert why in reason(mix)

    def test_scores_from_torchscript_are_named(self):
        with pytest.warns(DeprecationWarning, match="jit"):
            clamp: Any = torch.jit.trace(lambda s: 5 * torch.tanh(s / 5), torch.ones(3, 2, 5, 5))
        assert "TorchScript" in reason(lambda q, k, v: clamp(q @ k.mT).softmax(-1) @ v)
        scaled = reason(
            lambda q, k, v: (clamp(q @ k.mT) * 2).masked_fill(k[0, 0, 0, 0] > 9, 0).softmax(-1) @ v
        )
        assert "TorchScript" in scaled


class TestAttentionBesideWhatIsSeen:
    """What attends is named whatever its class is called, and nothing else is."""

    @staticmethod
    def notes(mix: Any, positions: int = 7) -> list[str]:
        class Blend(Attention):
            pass

        model = nn.Sequential(Blend(mix, 1, 8), nn.TransformerEncoderLayer(8, 2, 8, 0.0))
        with ch.watch(model) as seen:
            model(torch.randn(2, positions, 8))
        assert len(seen) == 1
        return seen.notes

    @pytest.mark.parametrize(
        "mix",
        [
            lambda q, k, v: (torch.sigmoid(q @ k.mT) @ v)[:, 0],
            lambda q, k, v: ((q @ k.mT).tril() @ v)[:, 0],
            lambda q, k, v: einsum("bhij,bhjd->bhid", F.relu(q @ k.mT), v)[:, 0],
            lambda q, k, v: ((F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).pow(2) @ v)[:, 0],
            lambda q, k, v: ((1 + F.elu(q)) @ ((1 + F.elu(k)).mT @ v))[:, 0],
            lambda q, k, v: one_by_one(one_by_one(q, k.mT).softmax(-1), v)[:, 0],
            lambda q, k, v: one_by_one((q @ k.mT).softmax(-1), v)[:, 0],
            lambda q, k, v: torch.linalg.vecdot(
                torch.linalg.vecdot(q[..., None, :], k[..., None, :, :]).softmax(-1)[..., None, :],
                v.mT[..., None, :, :],
            )[:, 0],
            lambda q, k, v: torch.stack([
                torch.tensordot(torch.tensordot(a, b.mT, 1).softmax(-1), c, 1)
                for a, b, c in zip(q[:, 0], k[:, 0], v[:, 0], strict=True)
            ]),
            lambda q, k, v: torch.stack([
                F.linear(F.linear(a, b).softmax(-1), c.mT)
                for a, b, c in zip(q[:, 0], k[:, 0], v[:, 0], strict=True)
            ]),
        ],
    )  # fmt: skip
    def test_named(self, mix):
        assert [note.partition(",")[0] for note in self.notes(mix)] == ["0: not seen"]

    @pytest.mark.parametrize(
        "mix",
        [
            lambda q, k, v: (q * torch.sigmoid(k) + v)[:, 0],
            lambda q, k, v: (q @ (k[:, :, :1].mT @ v[:, :, :1]))[:, 0],
            lambda q, k, v: (q[..., None, :] @ k[..., None] @ v[..., None, :])[:, 0, :, 0],
            lambda q, k, v: (q.softmax(-1) * v)[:, 0],
            # Gates: of the width of a projection, and of the best of them.
            lambda q, k, v: one_by_one(q[..., :7].softmax(-1), v[:, :, :1].expand(2, 1, 7, 8))[
                :, 0
            ],
            lambda q, k, v: one_by_one(q.topk(2).values.softmax(-1), v[:, :, :2])[:, 0],
        ],
    )
    def test_what_mixes_no_positions_is_not(self, mix):
        assert not self.notes(mix)


class Plain(nn.Module):
    """Self-attention by torch's own function, with a padding mask that is added."""

    def __init__(self, ban: Any = None):
        super().__init__()
        self.qkv, self.ban = nn.Linear(8, 24), ban

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(-2, -3) for y in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, self.ban).transpose(-2, -3).flatten(-2)


class Written(Plain):
    """The same, handwritten."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(-2, -3) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / 2
        return ((scores if self.ban is None else scores + self.ban).softmax(-1) @ v).sum(-3)


BAN = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(2).bool(), -torch.inf)
BAN[4, 0] = 0.7


class Base(Tensor):
    """A subclass that adds nothing."""


class TestModes:
    """A mode or transform around the model changes neither the model nor what is read."""

    @pytest.fixture(params=[Plain, Written])
    def model(self, request):
        torch.manual_seed(1)
        return request.param(BAN).eval()

    X = torch.arange(80.0).sin().view(2, 5, 8)

    def want(self, model: nn.Module) -> tuple[Tensor, Any]:
        with torch.no_grad(), ch.watch(model, read=(WEIGHTS, readings.TopK(2))) as seen:
            model(self.X)
        return seen[0].value

    def check(self, model: nn.Module, run: Any, notes: int = 0) -> None:
        weights, top = self.want(model)
        with ch.watch(model, read=(WEIGHTS, readings.TopK(2))) as seen:
            run()
        got, most = seen[0].value
        near(got, weights)
        assert torch.equal(most.sources, top.sources)
        assert type(got) is type(most.weights) is Tensor
        assert len(seen.notes) == notes

    def test_counting_operations(self, model):
        from torch.utils.flop_counter import FlopCounterMode

        with torch.no_grad(), FlopCounterMode(display=False) as plain:
            model(self.X)
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            self.check(model, lambda: model(self.X))
        assert counted.get_total_flops() == 2 * plain.get_total_flops() > 0  # of two runs

    def test_a_mode_that_only_passes_on(self, model):
        from torch.utils._python_dispatch import TorchDispatchMode

        class Passing(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        with Passing(), torch.no_grad():
            self.check(model, lambda: model(self.X))
            cut = [(3, 1)]
            with ch.knockout(model, cut):
                got = model(self.X)
        with torch.no_grad(), ch.knockout(model, cut):
            near(got, model(self.X))

    def test_inference_mode(self, model):
        with torch.inference_mode():
            self.check(model, lambda: model(self.X.clone()))
            with ch.knockout(model, [(3, 1)]):
                got = model(self.X)
        with torch.no_grad(), ch.knockout(model, [(3, 1)]):
            near(got, model(self.X))

    def test_subclass(self, model):
        x = self.X.as_subclass(Base)
        self.check(model, lambda: model(x))
        with ch.watch(model) as seen:
            assert type(model(x)) is Base
        assert not seen.notes

    def test_torch_func(self, model):
        def loss(x):
            return model(x).square().sum()

        self.check(model, lambda: torch.func.grad(loss)(self.X))
        self.check(model, lambda: torch.func.vjp(loss, self.X))
        self.check(model, lambda: torch.func.grad_and_value(loss)(self.X))

    def test_knockout_under_torch_func(self, model):
        def loss(x):
            return model(x).square().sum()

        x = self.X.clone().requires_grad_()
        with ch.knockout(model, [(3, 1)]):
            got = torch.func.grad(loss)(self.X)
            loss(x).backward()
        torch.testing.assert_close(got, x.grad)

    def test_forward_mode(self):
        model = Written(BAN)
        self.check(model, lambda: torch.func.jvp(model, (self.X,), (self.X,)))

    def test_vmap_is_named(self, model):
        with torch.no_grad():
            want = torch.vmap(model)(self.X)
            with (
                pytest.raises(RuntimeError, match=r"no attention call[\s\S]*vmap"),
                ch.watch(model),
            ):
                near(torch.vmap(model)(self.X), want)
            with ch.watch(model) as seen:
                torch.vmap(model)(self.X)
                model(self.X)
        assert len(seen) == 1
        assert "vmap" in seen.notes[0]
        refused = pytest.raises(RuntimeError, match=r"cannot be cut: it runs inside of torch\.vmap")
        with refused, ch.knockout(model, [(3, 1)]):
            torch.vmap(model)(self.X)

    def test_gradients_of_each_sample_are_named(self, model):
        def loss(x):
            return model(x).square().sum()

        each = torch.vmap(torch.func.grad(loss))
        want = each(self.X)
        with pytest.raises(RuntimeError, match="vmap"), ch.watch(model):
            near(each(self.X), want)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_jagged_tensors_are_named(self):
        def run(x):
            return F.scaled_dot_product_attention(x, x, x)

        parts = [torch.randn(4, 6), torch.randn(2, 6)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged).unflatten(-1, [2, 3])
        with pytest.raises(RuntimeError, match="jagged"), ch.watch(run):
            run(x.transpose(1, 2))

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
    def test_a_function_that_cannot_be_followed(self):
        """Sparse tensors, tensors without strides, and results that are no tensors."""

        def run(x):
            sparse = x[0].to_sparse_csr()
            sizes = torch.linalg.svd(x)
            return soft(x, x) @ x + (sparse @ x[0]) + sizes.S.sum() + len(torch.unique(x))

        x = torch.randn(1, 4, 4)
        with ch.watch(run, read=WEIGHTS) as seen, torch.no_grad():
            run(x)
        near(seen[0].value[:, 0], soft(x, x))

    @pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, AttributeError, KeyError])
    def test_an_error_of_a_reading_is_a_note(self, model, error):
        class Broken(readings.Entropy):
            def part(self, strip):
                raise error("of the reading")

            def merge(self, left, right):
                raise error("of the reading")

        want = model(self.X)
        with ch.watch(model, read=Broken()) as seen:
            assert torch.equal(model(self.X), want)
        assert len(seen) == 0
        assert error.__name__ in "".join(seen.notes)

    def test_what_the_user_gave_is_refused_as_ever(self, model):
        from clearhead import masks

        def refuse(record):
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"), ch.watch(model, on_call=refuse):
            model(self.X)
        small = readings.Mass(masks.dense(torch.ones(3, 3).bool()))
        with pytest.raises(ValueError, match=r"3"), ch.watch(model, read=small):
            model(self.X)

    def test_tracing_a_converted_model(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.mix, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

            def forward(self, x, ban):
                return self.out(self.mix(x, x, x, attn_mask=ban, need_weights=False)[0])

        ban = torch.ones(5, 5).triu(1).bool()
        model = ch.convert(Model()).eval()
        traced = torch.fx.symbolic_trace(model)
        near(traced(self.X, ban), model(self.X, ban))
        assert "call_module" in {node.op for node in traced.graph.nodes if node.target == "mix"}


class TestTasks:
    """Tasks that take turns in one thread, each with its own block."""

    @staticmethod
    async def run(model: nn.Module, times: int, block: Any) -> Any:
        import asyncio

        with block as seen:
            for _ in range(times):
                await asyncio.sleep(0)
                made = model(TestModes.X)
                await asyncio.sleep(0)
        return len(seen) if isinstance(seen, Sequence) else made  # pyright: ignore[reportPossiblyUnboundVariable]

    def test_each_task_sees_its_own_calls(self):
        import asyncio

        model = Plain()

        async def main():
            return await asyncio.gather(*(self.run(model, n, ch.watch(model)) for n in (1, 3, 2)))

        assert asyncio.run(main()) == [1, 3, 2]

    def test_a_cut_stays_in_its_task(self):
        import asyncio
        import contextlib

        model = Plain().eval()

        async def main():
            cut = self.run(model, 2, ch.knockout(model, [(3, 1)]))
            return await asyncio.gather(cut, self.run(model, 2, contextlib.nullcontext()))

        with torch.no_grad():
            cut, plain = asyncio.run(main())
            near(plain, model(TestModes.X))
            with ch.knockout(model, [(3, 1)]):
                near(cut, model(TestModes.X))

    def test_tasks_made_inside_of_a_block_belong_to_it(self):
        import asyncio

        model = Plain()

        async def main():
            async def part():
                model(TestModes.X)

            with ch.watch(model) as seen:
                await asyncio.gather(part(), asyncio.create_task(part()))
            return len(seen)

        assert asyncio.run(main()) == 2

    def test_a_block_that_outlives_its_task_is_of_the_thread(self):
        import asyncio

        model, loop = Plain(), asyncio.new_event_loop()

        async def enter():
            block = ch.watch(model)
            return block, block.__enter__()

        async def step():
            model(TestModes.X)

        block, seen = loop.run_until_complete(enter())
        loop.run_until_complete(step())
        block.__exit__(None, None, None)
        loop.close()
        assert len(seen) == 1
        assert torch._C._len_torch_function_stack() == 0


class TestDropoutInPlace:
    @pytest.mark.parametrize(
        "drop",
        [
            nn.Dropout(0.5, inplace=True),
            lambda w: F.dropout(w, 0.4, True, True),
            lambda w: F.dropout(w, p=0.4, inplace=True),
            lambda w: torch.dropout_(w, 0.4, True),
            lambda w: F.dropout2d(w, 0.9, True, True),
            lambda w: F.dropout(w.flatten(0, 1), 0.4, inplace=True).unflatten(0, w.shape[:2]),
            lambda w: (F.dropout(w, 0.4, inplace=True), w)[1],
        ],
    )
    def test_weights_are_those_before(self, drop):
        seen, q, k, _ = watched(lambda q, k, v: drop(soft(q, k)) @ v)
        near(seen[0].value, soft(q, k))
        assert seen.notes == [
            "dropout was on: readings are of the weights before it, without a check"
        ]

    def test_off_it_changes_nothing(self):
        seen, q, k, _ = watched(lambda q, k, v: F.dropout(soft(q, k), 0.4, False, True) @ v)
        near(seen[0].value, soft(q, k))
        assert not seen.notes

    def test_gradient_of_a_cut(self):
        model, x = (
            Attention(lambda q, k, v: F.dropout(soft(q, k), 0.3, True, True) @ v),
            torch.randn(1, 5, 6),
        )
        torch.manual_seed(3)
        with ch.knockout(model, [(4, 0)]):
            got = model(x)
        torch.manual_seed(3)
        model.mix = lambda q, k, v: F.dropout(soft(q, k), 0.3, True) @ v
        with ch.knockout(model, [(4, 0)]):
            near(got, model(x))


class TestSoftTokens:
    """The prompt of a model may have more positions than it has tokens."""

    @staticmethod
    def model(more: int):
        from transformers import LlamaConfig, LlamaForCausalLM

        class Soft(LlamaForCausalLM):
            def prepare_inputs_for_generation(self, input_ids, cache=None, **_):  # pyright: ignore[reportIncompatibleMethodOverride]
                embed = self.get_input_embeddings()
                if cache is None or cache.get_seq_length() == 0:
                    x = embed(input_ids)
                    x = torch.cat([self.soft.expand(len(x), -1, -1), x], 1)  # pyright: ignore[reportCallIssue]
                else:
                    x = embed(input_ids[:, -1:])
                return {"inputs_embeds": x, "cache": cache, "use_cache": True}

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=20, num_hidden_layers=2,
            num_attention_heads=2, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        model = Soft(config).eval()
        model.soft = nn.Parameter(torch.randn(1, more, 16))
        return model

    @pytest.mark.parametrize("more", [0, 2, 5])
    @pytest.mark.parametrize("beams", [1, 2])
    @torch.no_grad()
    def test_generate(self, more, beams):
        model, ids = self.model(more), torch.randint(3, 50, (2, 6))
        with ch.watch(model, read=WEIGHTS) as seen:
            made = model.generate(ids, max_new_tokens=4, do_sample=False, num_beams=beams)  # pyright: ignore[reportAttributeAccessIssue]
        x = torch.cat([model.soft.expand(2, -1, -1), model.get_input_embeddings()(made)], 1)[:, :-1]  # pyright: ignore[reportCallIssue]
        with ch.watch(model, read=WEIGHTS) as whole:
            model(inputs_embeds=x)
        for record, want in zip(seen, whole, strict=True):
            torch.testing.assert_close(record.value, want.value, rtol=0, atol=1e-5)
            assert record.prompt == 6 + more
        assert not seen.notes


class TestWhatTorchDoesNotShow:
    """Tensors that no function of torch made: TorchScript, functions with their own backward."""

    @pytest.fixture
    def turn(self) -> Any:
        with pytest.warns(DeprecationWarning, match="jit"):
            return torch.jit.trace(lambda x: x.flip(-1) * 0.5 + x, torch.ones(3, 2, 5, 3))

    def test_queries_and_keys_from_torchscript(self, turn):
        seen, q, k, _ = watched(lambda q, k, v: soft(turn(q), turn(k)) @ v)
        near(seen[0].value, soft(turn(q), turn(k)))
        assert seen[0].kind == "self"

    def test_weights_from_a_compiled_extension(self, turn):
        why = reason(lambda q, k, v: turn(torch.sigmoid(q @ k.mT)) @ v)
        assert "weights that no function of torch shows" in why

    @pytest.mark.parametrize("learning", [False, True])
    def test_a_function_with_its_own_backward(self, learning):
        class Own(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, scores: Tensor) -> Tensor:
                return scores.softmax(-1)

            @staticmethod
            def backward(context: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
                return grads[0]

        model = Attention(lambda q, k, v: Own.apply(q @ k.mT) @ v)
        x = torch.randn(1, 5, 6)
        with torch.set_grad_enabled(learning), ch.watch(model, read=WEIGHTS) as seen:
            model(x)
        near(seen[0].value, soft(*model.split(x)[:2]))

    def test_an_einsum_of_three(self):
        def mix(q, k, v):
            scores = einsum("bhqd,bhkd,h->bhqk", q, k, torch.arange(2.0) + 1)
            return scores.softmax(-1) @ v

        seen, q, k, _ = watched(mix)
        near(seen[0].value, (q @ k.mT * torch.tensor([1.0, 2.0])[:, None, None]).softmax(-1))
        assert seen[0].kind == "self"
        assert seen[0].scale is None

    @pytest.mark.parametrize(
        "score",
        [
            lambda q, k: torch.stack([torch.inner(*x) for x in zip(q[:, 0], k[:, 0], strict=True)]),
            lambda q, k: (q[..., None, :] * k[..., None, :, :]).sum(-1),
        ],
    )  # fmt: skip
    def test_scores_that_are_no_product(self, score):
        def mix(q, k, v):
            weights = score(q, k).softmax(-1)
            return weights @ (v if weights.ndim == 4 else v[:, 0])

        assert "of no product of two activations" in reason(mix)

    @pytest.mark.parametrize("how", ["matmul", "einsum"])
    def test_weights_that_are_dequantized(self, how):
        class Dequantized(nn.Module):
            def __init__(self):
                super().__init__()
                self.codes: Tensor
                self.register_buffer("codes", torch.randint(-9, 9, (8, 8), dtype=torch.int8))
                self.scale = nn.Parameter(torch.rand(8, 1))

            def forward(self, x):
                weight = self.codes.float() * self.scale
                return x @ weight.mT if how == "matmul" else einsum("oi,bti->bto", weight, x)

        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.q, self.k = Dequantized(), Dequantized()

            def forward(self, x):
                return soft(self.q(x), self.k(x)) @ x

        model = Layer()
        with ch.watch(model) as seen:
            model(torch.randn(1, 5, 8))
        assert seen[0].kind == "self"

    @pytest.mark.parametrize("how", ["expand", "repeat", "product", "plain"])
    def test_learned_queries_are_cross_attention(self, how):
        class Pool(nn.Module):
            def __init__(self):
                super().__init__()
                self.latents, self.w = (nn.Parameter(torch.randn(*s)) for s in ((3, 8), (8, 8)))

            def forward(self, x):
                q = {
                    "expand": lambda: self.latents[None].expand(len(x), -1, -1),
                    "repeat": lambda: self.latents.repeat(len(x), 1, 1),
                    "product": lambda: self.latents @ self.w,
                    "plain": lambda: F.linear(self.latents, self.w),
                }[how]()
                return soft(q, x) @ x

        model = Pool()
        with ch.watch(model) as seen:
            model(torch.randn(2, 5, 8))
        assert seen[0].kind == "cross"
        assert not seen.notes
