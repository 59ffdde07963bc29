"""Cuts and readings of models that are not what a cut assumes: right, refused or noted."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead import masks, readings

NO_SOFTMAX = r"no softmax of its\s+scores"
Map = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """One head whose weights are `f(scores)`; `cut` blocks edges in the scores."""

    def __init__(self, f: Map) -> None:
        super().__init__()
        self.qkv, self.f = nn.Linear(8, 24), f
        self.cut: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / 8**0.5
        if self.cut is not None:
            scores = scores.masked_fill(self.cut, -math.inf)
        return self.f(scores) @ v


def off(f: Map, edge: tuple[int, int], size: int, batch: int = 2, dtype: Any = None) -> float:
    """How far a knockout is from the model with that edge blocked in its scores."""
    torch.manual_seed(1)
    model = Attention(f).eval().to(dtype)
    x = 1.5 * torch.randn(batch, size, 8, dtype=dtype)
    model.cut = torch.zeros(size, size, dtype=torch.bool)
    model.cut[edge] = True
    with torch.no_grad():
        want, model.cut = model(x), None
        with ch.knockout(model, [edge]):
            return (model(x) - want).abs().max().item()


def above_zero(s: Tensor) -> Tensor:
    top = s.amax(-1, keepdim=True).clamp(min=0)
    e = (s - top).exp()
    return e / ((-top).exp() + e.sum(-1, keepdim=True))


def epsilon(s: Tensor, size: float = 0.1) -> Tensor:
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / (e.sum(-1, keepdim=True) + size)


def renormalised(s: Tensor) -> Tensor:
    w = s.softmax(-1)
    w *= torch.ones_like(w[0]).tril()
    w /= w.sum(-1, keepdim=True)
    return w


def with_factor(s: Tensor) -> Tensor:
    e = s.exp() * torch.linspace(0.5, 2, s.shape[-1])
    return e / e.sum(-1, keepdim=True)


def one_row_set(s: Tensor) -> Tensor:
    w = s.softmax(-1)
    w[:, -2, 1] = 0.3
    return w


def scores_reused(s: Tensor) -> Tensor:
    w = s.softmax(-1)
    s.zero_()
    return w


def half_of_one_row(s: Tensor) -> Tensor:
    factor = torch.ones_like(s[0])
    factor[-2] = 0.5
    return s.softmax(-1) * factor


NO_PLAIN_SOFTMAX = [
    lambda s: s.exp() / (1 + s.exp().sum(-1, keepdim=True)),
    above_zero,
    epsilon,
    lambda s: epsilon(s, 1e-3),
    renormalised,
    with_factor,
    one_row_set,
    scores_reused,
    lambda s: s.softmax(-1).clamp_(max=0.1),
    lambda s: F.softmax(s, dim=-1).mul_(0.9),
]
# What a model does to weights in a new tensor: then they are not those that meet the values.
EDITED = [
    half_of_one_row,
    lambda s: s.softmax(-1).clamp(max=0.1),
    lambda s: s.softmax(-1) * torch.ones_like(s[0]).triu(-3),
    lambda s: s.softmax(-1).flip(-2),
]
PLAIN = [
    lambda s: s.softmax(-1),
    lambda s: torch.softmax(s, -1, out=s),
    lambda s: s.exp() / s.exp().sum(-1, keepdim=True),
    lambda s: s.softmax(-1).clamp(min=0),
    lambda s: s.softmax(-1).nan_to_num_(0.0),
    lambda s: epsilon(s, 1e-9),
    lambda s: F.softmax(s, -1, dtype=torch.float64).type_as(s),
]


class TestNormalisation:
    @pytest.mark.parametrize("f", NO_PLAIN_SOFTMAX)
    def test_other_normalisations_are_refused(self, f):
        with pytest.raises(RuntimeError, match=NO_SOFTMAX):
            off(f, (10, 4), 12)

    @pytest.mark.parametrize("f", EDITED)
    def test_edited_weights_are_refused(self, f):
        with pytest.raises(RuntimeError, match=NO_SOFTMAX):
            off(f, (10, 4), 12)

    @pytest.mark.parametrize("f", PLAIN)
    @pytest.mark.parametrize("edge", [(9, 4), (0, 2)])
    def test_plain_ones_are_cut(self, f, edge):
        assert off(f, edge, 12) < 2e-6

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("f", PLAIN[2:5])
    def test_in_other_dtypes(self, f, dtype):
        assert off(f, (9, 4), 12, dtype=dtype) < 8 * torch.finfo(dtype).eps

    def test_rows_that_a_cut_does_not_touch_may_be_edited(self):
        assert off(half_of_one_row, (4, 2), 12) < 2e-6

    def test_effects_refuse_too(self):
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match=NO_SOFTMAX):
            ch.effects(Attention(epsilon), torch.randn(1, 6, 8), edges=[(3, 1)], metric=Tensor.sum)

    def test_zeroing_needs_no_softmax(self):
        torch.manual_seed(0)
        model, x = Attention(epsilon).eval(), torch.randn(2, 6, 8)
        q, k, v = model.qkv(x).chunk(3, -1)
        weights = epsilon(q @ k.mT / 8**0.5)
        weights[:, 3, 1] = 0
        with torch.no_grad(), ch.zero_weights(model, [(3, 1)]):
            torch.testing.assert_close(model(x), weights @ v)


def watched(f: Map, size: int = 12) -> tuple[float, list[str]]:
    """How far exp(scores - lse) is from the weights, and the notes."""
    torch.manual_seed(1)
    model, x = Attention(f).eval(), torch.randn(2, size, 8)
    read = readings.Weights(), readings.Scores(), readings.LogSumExp()
    with torch.no_grad(), ch.watch(model, read=read) as seen:
        model(x)
    w, s, lse = seen[0].value
    return (w - (s - lse[..., None]).exp()).abs().max().item(), seen.notes


class TestReadings:
    @pytest.mark.parametrize("f", NO_PLAIN_SOFTMAX)
    def test_those_that_contradict_each_other_are_noted(self, f):
        error, notes = watched(f)
        assert error > 1e-5
        assert any("softmax of its scores" in note for note in notes)

    @pytest.mark.parametrize("f", EDITED)
    def test_weights_that_meet_no_value_are_noted(self, f):
        assert "differs by" in watched(f)[1][0]

    @pytest.mark.parametrize("f", PLAIN)
    def test_plain_ones_have_no_note(self, f):
        error, notes = watched(f)
        assert error < 1e-6
        assert not notes


def shaw(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    return w @ v + torch.einsum("bij,ijd->bid", w, r)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    return w @ v + (w.unsqueeze(-1) * r).sum(-2)


def two_values(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    return torch.cat([w @ v, w @ v.sin()], -1)


class TestWeightsThatAreUsedTwice:
    @pytest.mark.parametrize("f", [shaw, one_by_one, two_values])
    @pytest.mark.parametrize(
        "cut",
        [
            lambda f: ch.knockout(f, ~torch.eye(5, dtype=torch.bool)),
            lambda f: ch.zero_weights(f, [(3, 1)]),
            lambda f: ch.ablate(f, how="mean"),
        ],
    )
    def test_they_are_not_cut_in_one_product_alone(self, f, cut):
        torch.manual_seed(0)
        q, k, v, r = *torch.randn(3, 2, 5, 8), torch.randn(5, 5, 8)
        match = "cannot be cut: its weights are multiplied by"
        with pytest.raises(RuntimeError, match=match), cut(f):
            f(q, k, v, r)

    def test_another_layer_can_be_cut(self):
        torch.manual_seed(0)
        plain, twice = Attention(lambda s: s.softmax(-1)), Attention(lambda s: s.softmax(-1))
        twice.forward = lambda x: two_values(x, x, x, x)
        model, x = nn.Sequential(plain, twice), torch.randn(1, 5, 8)
        with torch.no_grad(), ch.knockout(model, [(3, 1)], layers=0) as cut:
            model(x)
        assert cut.moved[0, 0] > 0


class Net(nn.Module):
    """An attention layer inside of a checkpoint, or of none."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(layers)
        )

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        return checkpoint(self.body, x, **how) if how else self.body(x)


def selective() -> dict[str, Any]:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    return {"use_reentrant": False, "context_fn": lambda: contexts(saved)}


WAYS = [lambda: {"use_reentrant": True}, lambda: {"use_reentrant": False}, selective]
CUTS = [
    lambda model: ch.knockout(model, masks.diagonal(0), layers=1),
    lambda model: ch.zero_weights(model, masks.diagonal(1)),
    lambda model: ch.ablate(model, [(0, 1)], how="mean"),
]


@pytest.mark.parametrize("how", WAYS)
class TestCheckpointing:
    @pytest.mark.parametrize("cut", CUTS)
    def test_a_cut_model_is_refused(self, cut, how):
        model, x = Net(2), torch.randn(2, 7, 16, requires_grad=True)
        match = "under activation checkpointing cannot be cut"
        with pytest.raises(RuntimeError, match=match), cut(model):
            model(x, **how()).sum().backward()

    @pytest.mark.parametrize("cut", CUTS)
    def test_without_a_gradient_it_is_cut(self, cut, how):
        torch.manual_seed(0)
        model, x = Net(2), torch.randn(2, 7, 16, requires_grad=True)
        with torch.no_grad(), cut(model):
            assert torch.equal(model(x, **how()), model(x))

    def test_head_importance(self, how):
        model, x = Net(2), torch.randn(2, 7, 16, requires_grad=True)
        with pytest.raises(RuntimeError, match="under activation checkpointing cannot be cut"):
            ch.head_importance(lambda y: model(y, **how()), x, Tensor.sum)

    @pytest.mark.parametrize("through", [False, True])
    @pytest.mark.parametrize("inside", [False, True])
    def test_watching_changes_nothing_and_records_once(self, how, inside, through):
        torch.manual_seed(0)
        model, x = Net(2), torch.randn(2, 7, 16, requires_grad=True)
        model(x).square().sum().backward()
        want, x.grad = x.grad, None
        with contextlib.ExitStack() as stack:
            seen = stack.enter_context(ch.watch(model, through=through))
            loss = model(x, **how()).square().sum()
            if not inside:
                stack.close()
            loss.backward()
        assert [(record.layer, record.call) for record in seen] == [(0, 0), (1, 0)]
        torch.testing.assert_close(x.grad, want)


B, H, T, D = 2, 3, 5, 4


class Folded(nn.Module):
    """Several heads, whose axes `fold` puts elsewhere, and `unfold` back."""

    def __init__(self, fold: Any, unfold: Any, mix: Any) -> None:
        super().__init__()
        self.qkv, self.fold, self.unfold, self.mix = nn.Linear(H * D, 3 * H * D), fold, unfold, mix

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.fold(t.view(B, T, H, D)) for t in self.qkv(x).chunk(3, -1))
        return self.unfold(self.mix(q, k, v)).reshape(B, T, H * D)

    def weights(self, x: Tensor) -> Tensor:
        """The weights by their definition, (batch, head, query, source)."""
        q, k, _ = (t.view(B, T, H, D).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return (q @ k.mT / 2).softmax(-1)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 2).softmax(-1) @ v


def in_fairseq(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.bmm(q / 2, k.transpose(1, 2)).view(-1, H, T, T)
    s = s.masked_fill(torch.zeros(T, T, dtype=torch.bool), -math.inf).view(-1, T, T)
    return torch.bmm(F.dropout(s.softmax(-1), 0.1, training=False), v)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, torch.ones(len(q), 1, T, T).bool()[:, 0]
                                          if q.ndim == 3 else None)  # fmt: skip


FOLDS = {
    "(h b) t d": (
        lambda t: t.permute(2, 0, 1, 3).reshape(H * B, T, D),
        lambda c: c.view(H, B, T, D).permute(1, 2, 0, 3),
    ),
    "(b h) t d": (
        lambda t: t.permute(0, 2, 1, 3).reshape(B * H, T, D),
        lambda c: c.view(B, H, T, D).transpose(1, 2),
    ),
    "h b t d": (lambda t: t.permute(2, 0, 1, 3), lambda c: c.permute(1, 2, 0, 3)),
    "cat of heads": (
        lambda t: torch.cat([h[:, :, 0] for h in t.split(1, 2)], 0),
        lambda c: torch.stack(c.chunk(H, 0), 2),
    ),
    "stack of heads": (
        lambda t: torch.stack(t.unbind(2)).flatten(0, 1),
        lambda c: torch.stack(c.split(B), 2),
    ),
    "fairseq": (
        lambda t: t.transpose(0, 1).reshape(T, B * H, D).transpose(0, 1),
        lambda c: c.transpose(0, 1).reshape(T, B, H, D).transpose(0, 1),
    ),
}
MIXES = [by_hand, in_fairseq, sdpa]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("fold", FOLDS)
class TestFoldedHeads:
    def made(self, fold: str, mix: Any) -> tuple[Folded, Tensor]:
        torch.manual_seed(0)
        if mix is in_fairseq and fold not in ("(b h) t d", "fairseq"):
            pytest.skip("it views scores as (b h)")
        return Folded(*FOLDS[fold], mix).eval(), torch.randn(B, T, H * D)  # pyright: ignore[reportCallIssue]

    @torch.no_grad()
    def test_weights(self, fold, mix):
        model, x = self.made(fold, mix)
        with ch.watch(model, read=readings.Weights()) as seen:
            model(x)
        torch.testing.assert_close(seen[0].value, model.weights(x))
        assert seen[0].check is not None
        assert seen[0].check < 1e-5
        assert not seen.notes

    @torch.no_grad()
    def test_one_head_is_cut(self, fold, mix):
        model, x = self.made(fold, mix)
        with ch.ablate(model, [(0, 1)]):
            got = model(x)
        want = model(x).view(B, T, H, D)
        want[:, :, 1] = 0
        torch.testing.assert_close(got.view(B, T, H, D), want)

    @torch.no_grad()
    def test_an_edge_of_one_sample_is_cut(self, fold, mix):
        model, x = self.made(fold, mix)
        edges = torch.zeros(B, H, T, T, dtype=torch.bool)
        edges[1, 2, 3, 1] = True
        with ch.knockout(model, edges):
            got = model(x).view(B, T, H, D)
        v = model.qkv(x).chunk(3, -1)[2].view(B, T, H, D).transpose(1, 2)
        w = model.weights(x).masked_fill(edges, 0)
        want = (w / w.sum(-1, keepdim=True)) @ v
        torch.testing.assert_close(got, want.transpose(1, 2))


class Sliced(nn.Module):
    """Computes its attention in slices that `parts` gives, (heads first, then positions)."""

    def __init__(self, slices: list[Any]) -> None:
        super().__init__()
        self.qkv, self.slices, self.fused = nn.Linear(H * D, 3 * H * D), slices, False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(B, T, H, D).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.slices == ["rows"]:
            q, k, v = (t.reshape(B * H, T, D) for t in (q, k, v))
            out = [by_hand(q[i : i + 2], k[i : i + 2], v[i : i + 2]) for i in (0, 2, 4)]
            return torch.cat(out).view(B, H, T, D).transpose(1, 2).reshape(B, T, H * D)
        if self.slices == ["width"]:
            q, k, v = (t.transpose(1, 2).flatten(2) for t in (q, k, v))
            heads = [slice(at * D, at * D + D) for at in range(H)]
            return torch.cat([by_hand(q[..., at], k[..., at], v[..., at]) for at in heads], -1)
        out = torch.zeros(B, H, T, D)
        mix = F.scaled_dot_product_attention if self.fused else by_hand
        for at in self.slices:
            sources = (*at[:2], slice(None)) if len(at) == 3 else at
            out[at] = mix(q[at], k[sources], v[sources])
        return out.transpose(1, 2).reshape(B, T, H * D)


every = slice(None)
SLICES = {
    "rows of batch and heads": ["rows"],
    "a head at a time": [(every, at) for at in range(H)],
    "some heads at a time": [(every, slice(0, 2)), (every, slice(2, 3))],
    "a head at a time, of the width": ["width"],
    "a sample at a time": [(0,), (1,)],
}


class TestSlices:
    @pytest.mark.parametrize("name", SLICES)
    @torch.no_grad()
    def test_are_noted(self, name):
        torch.manual_seed(0)
        model, x = Sliced(SLICES[name]), torch.randn(B, T, H * D)
        with ch.watch(model) as seen:
            model(x)
        assert ["slice by slice" in note for note in seen.notes] == [True]

    @pytest.mark.parametrize("name", SLICES)
    @torch.no_grad()
    def test_one_head_cannot_be_cut_there(self, name):
        torch.manual_seed(0)
        model, x = Sliced(SLICES[name]), torch.randn(B, T, H * D)
        with pytest.raises(RuntimeError, match="slice by slice"), ch.ablate(model, heads=[0]):
            model(x)

    @pytest.mark.parametrize("name", SLICES)
    @torch.no_grad()
    def test_edges_of_all_heads_can(self, name):
        torch.manual_seed(0)
        model, x = Sliced(SLICES[name]), torch.randn(B, T, H * D)
        plain = Sliced([(every,)])
        plain.load_state_dict(model.state_dict())
        with ch.knockout(model, [(3, 1)]), ch.knockout(plain, [(3, 1)]):
            torch.testing.assert_close(model(x), plain(x))


CHUNKS = [(every, every, slice(0, 2)), (every, every, slice(2, 4)), (every, every, slice(4, 5))]


class TestChunksOfQueries:
    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("edges", [[(4, 0)], [(1, 0)], [(2, 3), (3, 3)], masks.diagonal(1)])
    @torch.no_grad()
    def test_edges_are_cut_where_they_are(self, edges, fused):
        torch.manual_seed(0)
        model, plain, x = Sliced(CHUNKS), Sliced([(every,)]), torch.randn(B, T, H * D)
        plain.load_state_dict(model.state_dict())
        model.fused = plain.fused = fused
        with ch.knockout(model, edges), ch.knockout(plain, edges):
            torch.testing.assert_close(model(x), plain(x))

    @pytest.mark.parametrize("fused", [False, True])
    @torch.no_grad()
    def test_positions_are_noted(self, fused):
        torch.manual_seed(0)
        model, x = Sliced(CHUNKS), torch.randn(B, T, H * D)
        model.fused = fused
        with ch.watch(model, read=readings.Mass(masks.diagonal(1))) as seen:
            model(x)
        assert ["in chunks of the queries" in note for note in seen.notes] == [True]


class OneHead(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 4) for _ in range(3))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        mix = F.scaled_dot_product_attention if self.fused else by_hand
        return mix(self.q(x), self.k(x), self.v(x))


class HeadsAsModules(nn.Module):
    def __init__(self, fused: bool, joined: bool = True) -> None:
        super().__init__()
        self.heads = nn.ModuleList(OneHead(fused) for _ in range(2))
        self.joined, self.out = joined, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (head(x) for head in self.heads)
        if self.joined:
            return self.out(torch.cat([first, second], -1))
        return self.heads[1](torch.cat([self.heads[0](x), x[..., :4]], -1))


@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_modules_that_are_heads_are_noted(fused: bool):
    model, x = HeadsAsModules(fused), torch.randn(2, 5, 8)
    with ch.watch(model) as seen:
        model(x)
    assert ["heads.0, heads.1: their outputs are joined" in n for n in seen.notes] == [True]
    model.joined = False
    with ch.watch(model) as seen:
        model(x)
    assert not seen.notes


class Lost(nn.Module):
    """Heads in the batch, whose order cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(H * D, 3 * H * D), H

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(H * B).view(B, H).T.flatten()
        parts = (t.view(B, T, H, D).transpose(1, 2).flatten(0, 1) for t in self.qkv(x).chunk(3, -1))
        return by_hand(*(torch.index_select(t, 0, order) for t in parts))


class TestAnUnknownOrder:
    @torch.no_grad()
    def test_is_noted(self):
        model = Lost()
        with ch.watch(model) as seen:
            model(torch.randn(B, T, H * D))
        assert ["in an order that is not known" in note for note in seen.notes] == [True]

    @torch.no_grad()
    def test_is_not_cut_by_head(self):
        model = Lost()
        with pytest.raises(RuntimeError, match="in an order that is not known"):  # noqa: SIM117
            with ch.ablate(model, heads=[0]):
                model(torch.randn(B, T, H * D))


def coverage(w: Tensor, x: Tensor) -> Tensor:
    return w @ x + w.sum(-2, keepdim=True).mT


# What a model does with weights beside the product with its values, before it or after.
OTHER_USES = {
    "coverage": coverage,
    "tensordot": lambda w, x: w @ x + torch.tensordot(w[0], x[0], 1),
    "a product of numbers": lambda w, x: w @ x + (w * x[..., 0][:, None]).sum(-1, keepdim=True),
    "one weight": lambda w, x: w @ x + w[..., :1],
    "linear": lambda w, x: w @ x + F.linear(w, x[0].mT.contiguous()),
    "before it": lambda w, x: w.square().sum(-1, keepdim=True) + w @ x,
    "a penalty": lambda w, x: w @ x - 1e-3 * (w * (w + 1e-9).log()).sum(),
}
# What leaves no trace of the weights in the output.
NO_USES = {
    "kept": lambda w, x: (w @ x, w.detach().mean(-3, keepdim=True))[0],
    "counted": lambda w, x: (w @ x, (w * w.log()).sum(-1).mean().item())[0],
    "two layers": lambda w, x: w @ x + (x @ x.mT).softmax(-1) @ x,
    "a residual": lambda w, x: x + F.dropout(w, 0.0) @ x,
}


class Uses(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        self.q, self.v, self.use = nn.Linear(8, 8), nn.Linear(8, 8), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use((self.q(x) @ x.mT).softmax(-1), self.v(x))


@pytest.mark.parametrize(
    "cut",
    [
        lambda m: ch.knockout(m, [(3, 1)]),
        lambda m: ch.zero_weights(m, [(3, 1)]),
        lambda m: ch.ablate(m, [(0, 0)]),
    ],
)
class TestOtherUses:
    """Weights that act elsewhere than in the product with the values are not cut there."""

    @pytest.mark.parametrize("name", OTHER_USES)
    @torch.no_grad()
    def test_are_refused(self, cut, name):
        torch.manual_seed(0)
        model = Uses(OTHER_USES[name])
        with (
            pytest.raises(RuntimeError, match=r"meet other activations|several values"),
            cut(model),
        ):
            model(torch.randn(1, 5, 8))

    @pytest.mark.parametrize("name", NO_USES)
    @torch.no_grad()
    def test_what_is_only_looked_at_is_none(self, cut, name):
        torch.manual_seed(0)
        model, x = Uses(NO_USES[name]), torch.randn(1, 5, 8)
        with cut(model):
            model(x)

    @torch.no_grad()
    def test_watching_has_no_note(self, cut):
        with ch.watch(model := Uses(coverage)) as seen:
            model(torch.randn(1, 5, 8))
        assert not seen.notes


class TestTolerance:
    """What a context may be off is rounding, and in proportion to it."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
    @pytest.mark.parametrize("share", [0.2, 0.9])
    @torch.no_grad()
    def test_a_factor_is_noticed_at_every_size(self, dtype, size, share):
        torch.manual_seed(0)
        model, x = Attention(lambda s: s.softmax(-1) * share).eval(), torch.randn(2, 9, 8)
        model.qkv.weight[16:] *= size
        model.qkv.bias[16:] *= size
        with pytest.raises(RuntimeError, match=NO_SOFTMAX), ch.knockout(model.to(dtype), [(3, 1)]):
            model(x.to(dtype))

    @torch.no_grad()
    def test_a_small_epsilon_in_another_tensor(self):
        with pytest.raises(RuntimeError, match=NO_SOFTMAX):
            off(lambda s: (s.softmax(-1) + 1e-3) / (1 + 12e-3), (9, 4), 12)

    @torch.no_grad()
    def test_rows_that_are_no_numbers_hide_nothing(self):
        model = Attention(lambda s: s.softmax(-1) * 0.5).eval()
        model.cut = torch.zeros(9, 9).bool()
        model.cut[1] = True  # a softmax of nothing
        with pytest.raises(RuntimeError, match=NO_SOFTMAX), ch.knockout(model, masks.diagonal(1)):
            model(torch.randn(1, 9, 8))


def test_attention_without_a_softmax_is_named_by_a_cut():
    model = Attention(lambda s: s.sigmoid())
    with pytest.raises(RuntimeError, match="without a softmax"), ch.knockout(model, [(3, 1)]):
        model(torch.randn(1, 5, 8))


def test_all_cuts_take_the_same_arguments_in_the_same_order():
    names = [
        list(inspect.signature(cut).parameters.values()) for cut in (ch.knockout, ch.zero_weights)
    ]
    assert names[0] == names[1]
    own = [p for p in names[0] if p.name != "edges"]
    assert own == list(inspect.signature(ch.ablate).parameters.values())[: len(own)]
    assert [p.name for p in own] == ["model", "heads", "layers"]
