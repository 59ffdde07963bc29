"""The layer answers as torch's, except where torch contradicts itself; so does a whole model."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import clearhead as ch
from clearhead import masks, readings

INF = float("inf")
N, H, L, S, E = 3, 2, 5, 7, 8
BATCH_FIRST, SEQUENCE_FIRST, UNBATCHED = "batch first", "sequence first", "unbatched"
LAYOUTS = (BATCH_FIRST, SEQUENCE_FIRST, UNBATCHED)
ATTN_MASKS = ("none", "bool", "bool per head", "float", "float per head")
PADDINGS = ("none", "bool", "float")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def close(ours: Tensor, theirs: Tensor, what: str = "", *, scale: float = 1.0) -> None:
    """Equal up to the rounding of some hundred operations in that dtype."""
    assert ours.shape == theirs.shape, what
    assert ours.dtype == theirs.dtype, what
    if ours.numel():
        bound = 200 * torch.finfo(theirs.dtype).eps * max(1.0, theirs.abs().max().item()) * scale
        difference = (ours - theirs).abs().max().item()
        assert difference <= bound, f"{what}: {difference} > {bound}"


def pair(**options: Any) -> tuple[nn.MultiheadAttention, ch.MultiheadAttention]:
    """One layer of torch and one of ours with the same, not quite initial, parameters."""
    options = {"embed_dim": E, "num_heads": H, "dtype": torch.float64} | options
    theirs = nn.MultiheadAttention(**options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    ours = ch.MultiheadAttention(**options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def sizes(layout: str) -> int:
    return 1 if layout == UNBATCHED else N


def inputs(
    layout: str, *, kdim: int = E, vdim: int = E, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    made = []
    for length, width in ((L, E), (S, kdim), (S, vdim)):
        shape = {
            BATCH_FIRST: (N, length, width),
            SEQUENCE_FIRST: (length, N, width),
            UNBATCHED: (length, width),
        }[layout]
        made.append(torch.randn(shape, dtype=dtype))
    return made


def attn_mask(kind: str, layout: str) -> Tensor | None:
    """A mask that leaves source 0 to everyone."""
    shape = (sizes(layout) * H, L, S) if "per head" in kind else (L, S)
    if kind == "none":
        return None
    blocked = torch.rand(shape) < 0.4
    blocked[..., 0] = False
    if kind.startswith("bool"):
        return blocked
    return torch.randn(shape, dtype=torch.float64).masked_fill(blocked, -INF)


def padding(kind: str, layout: str) -> Tensor | None:
    if kind == "none":
        return None
    blocked = torch.arange(S) >= torch.tensor([[S], [S - 2], [S - 3]])
    blocked = blocked[1] if layout == UNBATCHED else blocked
    if kind == "bool":
        return blocked
    return torch.randn(blocked.shape, dtype=torch.float64).masked_fill(blocked, -INF)


def run(layer: nn.Module, tensors: list[Tensor], call: dict[str, Any]) -> dict[str, Tensor]:
    """The answer of a layer and every gradient, of a loss in which weights take part."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in zip("qkv", tensors, strict=True)}
    call = dict(call)
    for name in ("attn_mask", "key_padding_mask"):
        if call.get(name) is not None and call[name].is_floating_point():
            call[name] = leaves[name] = call[name].detach().clone().requires_grad_()
    layer.zero_grad()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched", UserWarning)
        output, weights = layer(leaves["q"], leaves["k"], leaves["v"], **call)
    found = {"output": output} | ({} if weights is None else {"weights": weights})
    generator = torch.Generator().manual_seed(3)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in found.values()
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    parameters = dict(layer.named_parameters())
    grads = {f"grad of {n}": x.grad for n, x in (leaves | parameters).items()}
    found |= {name: grad for name, grad in grads.items() if grad is not None}
    return {name: x.detach() for name, x in found.items()}


# The same answers


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attn", ATTN_MASKS)
@pytest.mark.parametrize("pad", PADDINGS)
def test_answers_as_torch(layout: str, attn: str, pad: str) -> None:
    """Values, weights and all gradients over the product of the options."""
    for widths, add_bias_kv, add_zero_attn in itertools.product(
        ((E, E), (6, 11)), (True, False), (True, False)
    ):
        # Every triple of the four options appears.
        bias = (widths == (E, E)) ^ add_bias_kv ^ add_zero_attn
        theirs, ours = pair(
            kdim=widths[0],
            vdim=widths[1],
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            batch_first=layout == BATCH_FIRST,
        )
        tensors = inputs(layout, kdim=widths[0], vdim=widths[1])
        call = {"attn_mask": attn_mask(attn, layout), "key_padding_mask": padding(pad, layout)}
        for weights in (
            {"need_weights": False},
            {"need_weights": True, "average_attn_weights": True},
            {"need_weights": True, "average_attn_weights": False},
        ):
            expected = run(theirs, tensors, call | weights)
            found = run(ours, tensors, call | weights)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                what = f"{name} ({widths} {bias=} {add_bias_kv=} {add_zero_attn=} {weights})"
                close(found[name], value, what)


@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_through_the_packed_projection(batch_first: bool) -> None:
    theirs, ours = pair(batch_first=batch_first)
    x = torch.randn(N, L, E, dtype=torch.float64, requires_grad=True)
    answers = []
    for layer in (theirs, ours):
        output, weights = layer(x, x, x)
        (grad,) = torch.autograd.grad(output.pow(3).sum() + weights.pow(2).sum(), x)
        answers.append((output, weights, grad))
    for mine, torchs in zip(answers[1], answers[0], strict=True):
        close(mine, torchs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("need_weights", [True, False])
def test_low_precision_is_as_exact_as_torch(dtype: torch.dtype, need_weights: bool) -> None:
    oracle = nn.MultiheadAttention(64, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 37, 64, dtype=torch.float64)
    with torch.no_grad():
        low = copy.deepcopy(oracle).to(dtype)
        exact, exact_weights = copy.deepcopy(low).double()(*[x.to(dtype).double()] * 3)
        theirs = low(*[x.to(dtype)] * 3, need_weights=need_weights)
        ours = ch.convert(copy.deepcopy(low))(*[x.to(dtype)] * 3, need_weights=need_weights)
    eps = torch.finfo(dtype).eps
    for mine, torchs, truth in zip(ours, theirs, (exact, exact_weights), strict=True):
        if torchs is None:
            assert mine is None
            continue
        assert mine.dtype == torchs.dtype
        bound = 2 * (torchs - truth).abs().max() + eps * truth.abs().max()
        assert (mine - truth).abs().max() <= bound


@pytest.mark.parametrize("options", [{}, {"kdim": 6}, {"bias": False}, {"add_bias_kv": True}])
def test_the_same_seed_makes_the_same_parameters(options: dict[str, Any]) -> None:
    made = []
    for kind in (nn.MultiheadAttention, ch.MultiheadAttention):
        torch.manual_seed(5)
        made.append(kind(E, H, **options).state_dict())
    assert list(made[0]) == list(made[1])
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


@pytest.mark.parametrize(
    "options", [{}, {"kdim": 6, "vdim": 3}, {"bias": False, "add_bias_kv": True}]
)
def test_state_dicts_go_both_ways(options: dict[str, Any]) -> None:
    theirs, ours = nn.MultiheadAttention(E, H, **options), ch.MultiheadAttention(E, H, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)


def test_signatures_begin_as_torchs() -> None:
    import inspect

    for method in ("__init__", "forward"):
        theirs = inspect.signature(getattr(nn.MultiheadAttention, method)).parameters.values()
        ours = inspect.signature(getattr(ch.MultiheadAttention, method)).parameters.values()
        for a, b in zip(theirs, ours, strict=False):
            assert (a.name, a.default, a.kind) == (b.name, b.default, b.kind)
        extra = list(ours)[len(theirs) :]
        assert all(p.kind is p.KEYWORD_ONLY for p in extra)


@pytest.mark.parametrize(
    ("batch", "query", "source"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 1, 1), (1, 1, 4), (0, 0, 0)]
)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("extra", [False, True])
def test_sizes_of_zero_and_one(
    batch: int, query: int, source: int, batch_first: bool, extra: bool
) -> None:
    theirs, ours = pair(batch_first=batch_first, add_bias_kv=extra, add_zero_attn=extra)
    tensors = [torch.randn(batch, n, E, dtype=torch.float64) for n in (query, source, source)]
    tensors = tensors if batch_first else [x.transpose(0, 1) for x in tensors]
    blocked = torch.zeros(query, source, dtype=torch.bool)
    expected, expected_weights = theirs(*tensors, need_weights=True, attn_mask=blocked)
    output, weights = ours(*tensors, need_weights=True, attn_mask=blocked)
    close(output, expected)
    close(weights, expected_weights)
    close(ours(*tensors, need_weights=False, attn_mask=blocked)[0], expected)
    padded = torch.zeros(batch, source, dtype=torch.bool)
    for masked in ({"key_padding_mask": padded}, {"is_causal": source == query}):
        for asked in ({}, {"read": (readings.TopK(2), readings.Entropy(), readings.Received())}):
            output, _ = ours(*tensors, **masked, **asked)
            assert output.shape == expected.shape
            (output.sum() * 1.0).backward()


# Where torch contradicts itself


def by_hand(layer: nn.MultiheadAttention, x: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Self-attention of a batch, head by head and query by query; an empty row is 0."""
    q, k, v = (x @ layer.in_proj_weight.mT + layer.in_proj_bias).chunk(3, -1)
    width = layer.head_dim
    context = torch.zeros_like(q)
    weights = torch.zeros(len(x), layer.num_heads, x.shape[1], x.shape[1], dtype=x.dtype)
    for b, h, i in itertools.product(range(len(x)), range(layer.num_heads), range(x.shape[1])):
        sources = allowed[b, h, i].nonzero()[:, 0]
        if len(sources):
            columns = slice(h * width, (h + 1) * width)
            scores = k[b, sources, columns] @ q[b, i, columns] / width**0.5
            weights[b, h, i, sources] = scores.exp() / scores.exp().sum()
            context[b, i, columns] = weights[b, h, i] @ v[b, :, columns]
    return context @ layer.out_proj.weight.mT + layer.out_proj.bias, weights


def layer_of_ours(**options: Any) -> ch.MultiheadAttention:
    return pair(batch_first=True, **options)[1]


def tokens(batch: int = N, length: int = L) -> Tensor:
    return torch.randn(batch, length, E, dtype=torch.float64)


CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()
BAND = CAUSAL.triu(-1)


@pytest.mark.parametrize("training", [True, False])
def test_is_causal_without_a_mask_is_causal(training: bool) -> None:
    layer, x = layer_of_ours().train(training), tokens()
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        pair()[0](x, x, x, is_causal=True)
    expected, weights = by_hand(layer, x, CAUSAL.expand(N, H, L, L))
    output, found = layer(x, x, x, is_causal=True, average_attn_weights=False)
    close(output, expected)
    close(found, weights)
    close(layer(x, x, x, is_causal=True, need_weights=False)[0], expected)


def test_is_causal_is_heard_in_evaluation() -> None:
    """Without a mask torch raises in training and lets everyone see the future in evaluation."""
    theirs, layer = pair(batch_first=True)
    x = tokens()
    blind = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True).double().eval()
    seeing = ch.convert(copy.deepcopy(blind))
    with torch.no_grad():
        assert torch.equal(theirs.eval()(x, x, x, is_causal=True)[0], theirs(x, x, x)[0])
        close(layer.eval()(x, x, x, is_causal=True)[0], layer(x, x, x, attn_mask=~CAUSAL)[0])
        assert torch.equal(blind(x, is_causal=True), blind(x))
        close(seeing(x, is_causal=True), blind.train()(x, src_mask=~CAUSAL))


def test_is_causal_composes_with_a_mask_and_is_no_hint() -> None:
    """Torch gives two answers to this call: the band, and all of the past."""
    theirs, layer = pair(batch_first=True)
    x = tokens()
    call = {"attn_mask": ~BAND, "is_causal": True}
    with_weights = theirs(x, x, x, **call)[0]
    without = theirs(x, x, x, **call, need_weights=False)[0]
    assert (with_weights - without).abs().max() > 1e-3
    expected, _ = by_hand(layer, x, BAND.expand(N, H, L, L))
    close(layer(x, x, x, **call)[0], expected)
    close(layer(x, x, x, **call, need_weights=False)[0], expected)
    # A mask that lets the future through does not undo it.
    future = torch.zeros(L, L, dtype=torch.bool)
    future[:, 2] = True
    expected, _ = by_hand(layer, x, (CAUSAL & ~future).expand(N, H, L, L))
    close(layer(x, x, x, attn_mask=future, is_causal=True)[0], expected)


def test_is_causal_composes_with_padding_and_a_float_mask() -> None:
    layer, x = layer_of_ours(), tokens()
    padded = torch.arange(L) >= torch.tensor([[5], [4], [2]])
    expected, _ = by_hand(layer, x, (CAUSAL & ~padded[:, None, None]).expand(N, H, L, L))
    close(layer(x, x, x, key_padding_mask=padded, is_causal=True)[0], expected)
    as_float = torch.zeros(L, L, dtype=torch.float64).masked_fill(~CAUSAL, -INF)
    for kind in (padded, torch.zeros(N, L, dtype=torch.float64).masked_fill(padded, -INF)):
        answer = layer(x, x, x, key_padding_mask=kind, attn_mask=as_float, is_causal=True)[0]
        close(answer, expected)


def test_the_last_query_stands_at_the_last_source() -> None:
    layer, x = layer_of_ours(), tokens()
    whole = layer(x, x, x, is_causal=True)[0]
    close(layer(x[:, -2:], x, x, is_causal=True)[0], whole[:, -2:])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_one_blocked_head_leaves_the_others_alone(
    training: bool, grad: bool, need_weights: bool
) -> None:
    """A fully masked head makes everything NaN in torch, with weights only."""
    layer = ch.MultiheadAttention(3, 3, batch_first=True, dtype=torch.float64).train(training)
    x = torch.randn(1, 5, 3, dtype=torch.float64)
    blocked = torch.zeros(3, 5, 5, dtype=torch.bool)
    blocked[2] = True
    theirs = nn.MultiheadAttention(3, 3, batch_first=True, dtype=torch.float64)
    assert theirs(x, x, x, attn_mask=blocked)[0].isnan().all()
    expected, weights = by_hand(layer, x, ~blocked[None])
    with torch.set_grad_enabled(grad):
        output, found = layer(
            x, x, x, attn_mask=blocked, need_weights=need_weights, average_attn_weights=False
        )
    close(output.detach(), expected.detach())
    if need_weights:
        close(found.detach(), weights.detach())
        assert (found[:, 2] == 0).all()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_an_empty_row_has_no_gradient(need_weights: bool, kind: str) -> None:
    """Band mask and right padding: the gradient equals that of the batch without dead rows."""
    layer = ch.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 4, 4, dtype=torch.float64)
    band = torch.ones(4, 4, dtype=torch.bool).tril().triu(-1)
    padded = torch.tensor([[False] * 4, [False, False, True, True]])
    if kind == "bool":
        call: dict[str, Any] = {"attn_mask": ~band, "key_padding_mask": padded}
    else:
        call = {
            "attn_mask": torch.zeros(4, 4, dtype=torch.float64).masked_fill(~band, -INF),
            "key_padding_mask": torch.zeros(2, 4, dtype=torch.float64).masked_fill(padded, -INF),
        }
    layer(x, x, x, need_weights=need_weights, **call)[0][:, :2].sum().backward()
    found = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    short = x[:, :2]
    layer(short, short, short, attn_mask=~band[:2, :2])[0].sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        close(found[name], parameter.grad, name)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_sample_of_nothing_but_padding_is_zero(training: bool, need_weights: bool) -> None:
    layer = ch.MultiheadAttention(8, 2, batch_first=True).train(training)
    nn.init.normal_(layer.out_proj.bias)
    x = torch.randn(2, 4, 8)
    padded = torch.tensor([[False] * 4, [True] * 4])
    with torch.no_grad():
        output, weights = layer(x, x, x, key_padding_mask=padded, need_weights=need_weights)
        alone, _ = layer(x[:1], x[:1], x[:1], need_weights=need_weights)
    assert torch.equal(output[1], layer.out_proj.bias.expand(4, 8))
    close(output[:1], alone)
    assert weights is None or (weights[1] == 0).all()


def test_padded_queries_are_zero_too() -> None:
    layer, x = layer_of_ours(), tokens(1, 4)
    real = torch.tensor([True, True, False, False])
    blocked = ~(real[:, None] & real)
    output, weights = layer(x, x, x, attn_mask=blocked.expand(H, 4, 4))
    close(output[0, 2:], layer.out_proj.bias.expand(2, E))
    close(output[:, :2], layer(x[:, :2], x[:, :2], x[:, :2])[0])
    assert (weights[0, 2:] == 0).all()


def test_a_long_band_has_no_dead_blocks() -> None:
    """Whole blocks of sources are masked for late rows; torch's fused kernel once gave NaN."""
    layer = layer_of_ours()
    x = tokens(1, 600)
    band = torch.ones(600, 600, dtype=torch.bool).tril().triu(-10)
    with_weights, weights = layer(x, x, x, attn_mask=~band)
    without, _ = layer(x, x, x, attn_mask=~band, need_weights=False)
    assert torch.equal(with_weights, without)
    close(weights.sum(-1), torch.ones(1, 600, dtype=torch.float64))
    close(without, layer(x, x, x, mask=masks.band(10, 0), need_weights=False)[0])


def test_finite_floats_are_a_bias_even_the_smallest() -> None:
    """A row of finfo.min is an ordinary softmax of equal scores: the mean of the values."""
    theirs, layer = pair(batch_first=True)
    x = tokens(1, 3)
    bias = torch.zeros(3, 3, dtype=torch.float64)
    bias[0] = torch.finfo(torch.float64).min
    close(layer(x, x, x, attn_mask=bias)[0], theirs(x, x, x, attn_mask=bias)[0])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("attn", ATTN_MASKS)
@pytest.mark.parametrize("extra", [False, True])
def test_asking_changes_nothing(grad: bool, training: bool, attn: str, extra: bool) -> None:
    """The output keeps its bits whether weights or readings are asked for or not."""
    layer = ch.MultiheadAttention(
        E, H, dropout=0.3, batch_first=True, add_bias_kv=extra, add_zero_attn=extra
    ).train(training)
    tensors = inputs(BATCH_FIRST, dtype=torch.float32)
    mask = attn_mask(attn, BATCH_FIRST)
    mask = mask.float() if mask is not None and mask.is_floating_point() else mask
    call = {"attn_mask": mask, "key_padding_mask": padding("bool", BATCH_FIRST)}
    outputs = []
    for asked in (
        {"need_weights": False},
        {"need_weights": True},
        {"average_attn_weights": False},
        {"read": readings.TopK(2)},
        {"read": (readings.Entropy(), readings.Weights())},
    ):
        torch.manual_seed(9)
        with torch.set_grad_enabled(grad):
            outputs.append(layer(*tensors, **call, **asked)[0])
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_asking_changes_no_gradient() -> None:
    layer, x = layer_of_ours(dropout=0.4), tokens()
    grads = []
    for need_weights in (True, False):
        torch.manual_seed(9)
        layer.zero_grad()
        layer(x, x, x, need_weights=need_weights, is_causal=True)[0].pow(2).sum().backward()
        grads.append(layer.in_proj_weight.grad)
    assert torch.equal(grads[0], grads[1])


def test_weights_are_before_dropout() -> None:
    """With one source the weight is 1; torch prints 1.25 or 0."""
    layer = ch.MultiheadAttention(E, H, dropout=0.2, batch_first=True)
    x = torch.randn(4, 1, E)
    assert (layer(x, x, x)[1] == 1).all()
    theirs = nn.MultiheadAttention(E, H, dropout=0.2, batch_first=True)
    assert not (theirs(x, x, x)[1] == 1).all()
    many = torch.randn(4, 9, E)
    rows = layer(many, many, many)[1].sum(-1)
    close(rows, torch.ones_like(rows))


def test_dropout_acts_in_training_only_and_keeps_the_mean() -> None:
    layer = ch.MultiheadAttention(E, H, dropout=0.25, batch_first=True)
    x = torch.randn(1, 6, E)
    with torch.no_grad():
        many = x.expand(4000, 6, E).contiguous()
        dropped = layer(many, many, many, need_weights=False)[0]
        layer.eval()
        plain = layer(x, x, x)[0]
        assert torch.equal(plain, layer(x, x, x)[0])
    assert not torch.equal(dropped[0], dropped[1])
    spread = dropped.std(0) / 4000**0.5
    assert ((dropped.mean(0) - plain[0]).abs() < 6 * spread).all()
    layer.train().dropout = 1.0
    assert torch.equal(layer(x, x, x)[0], layer.out_proj.bias.expand(1, 6, E))


def test_per_head_weights_are_honoured_always() -> None:
    layer, x = layer_of_ours(), tokens()
    for training, grad in itertools.product((True, False), (True, False)):
        with torch.set_grad_enabled(grad):
            weights = layer.train(training)(x, x, x, average_attn_weights=False)[1]
        assert weights.shape == (N, H, L, L)
    assert layer(x[0], x[0], x[0], average_attn_weights=False)[1].shape == (H, L, L)
    assert layer(x[0], x[0], x[0])[1].shape == (L, L)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_mask_per_head_works_in_every_mode(training: bool, grad: bool) -> None:
    layer = layer_of_ours().train(training)
    x = tokens(3, 4)
    blocked = torch.rand(3 * H, 4, 4) < 0.5
    with torch.set_grad_enabled(grad):
        output, weights = layer(x, x, x, attn_mask=blocked, average_attn_weights=False)
    expected, expected_weights = by_hand(layer, x, ~blocked.view(3, H, 4, 4))
    close(output.detach(), expected.detach())
    close(weights.detach(), expected_weights.detach())


def test_mixed_kinds_of_masks_need_no_warning() -> None:
    """Torch deprecates a bool padding mask beside a float mask; here both mean what they say."""
    theirs, layer = pair(batch_first=True)
    tensors = inputs(BATCH_FIRST)
    call = {"attn_mask": attn_mask("float", BATCH_FIRST), "key_padding_mask": padding("bool", "")}
    with pytest.warns(UserWarning, match="mismatched"):
        expected = theirs(*tensors, **call)[0]
    close(layer(*tensors, **call)[0], expected)


def test_nan_in_padding_stays_there() -> None:
    layer, x = layer_of_ours(), tokens(2, 4)
    padded = torch.tensor([[False] * 4, [False, False, True, True]])
    spoiled = x.masked_fill(padded[..., None], float("nan"))
    clean = layer(x, x, x, key_padding_mask=padded)[0]
    output = layer(x, spoiled, spoiled, key_padding_mask=padded)[0]
    close(output, clean)


def test_setting_a_key_to_blocked_makes_the_answer_independent_of_it() -> None:
    layer, x = layer_of_ours(), tokens()
    blocked = torch.zeros(L, L, dtype=torch.bool)
    blocked[:, 3] = True
    other = x.clone()
    other[:, 3] += 5.0
    for call in (
        {"attn_mask": blocked},
        {"key_padding_mask": blocked[0].expand(N, L)},
        {"mask": ~blocked},
    ):
        close(layer(x, x, x, **call)[0], layer(x, other, other, **call)[0])


# mask= and read=


def test_mask_takes_a_mask_and_composes() -> None:
    layer, x = layer_of_ours(), tokens()
    padded = torch.arange(L) >= torch.tensor([[5], [4], [3]])
    blocked = attn_mask("bool per head", BATCH_FIRST)
    assert blocked is not None
    blocked = blocked[:, :, :L]
    expected, _ = by_hand(layer, x, BAND & ~padded[:, None, None] & ~blocked.view(N, H, L, L))
    call = {"attn_mask": blocked, "key_padding_mask": padded}
    close(layer(x, x, x, mask=masks.window(2), **call)[0], expected)
    close(layer(x, x, x, mask=masks.band(1, 9), is_causal=True, **call)[0], expected)
    close(layer(x, x, x, mask=BAND, **call)[0], expected)


@pytest.mark.parametrize(
    "shape",
    [(L, L), (1, L), (N, L, L), (N, 1, L), (1, L, L), (N, H, L, L), (N, 1, 1, L), (1, H, L, 1)],
)
def test_mask_as_a_bool_tensor_broadcasts(shape: tuple[int, ...]) -> None:
    layer, x = layer_of_ours(), tokens()
    mask = torch.rand(shape) < 0.6
    whole = (mask.unsqueeze(1) if mask.ndim == 3 else mask).expand(N, H, L, L)
    close(layer(x, x, x, mask=mask)[0], by_hand(layer, x, whole)[0])


def test_mask_of_an_unbatched_call() -> None:
    layer, x = layer_of_ours(), tokens()[0]
    mask = torch.rand(H, L, L) < 0.6
    expected, weights = by_hand(layer, x[None], mask[None])
    output, found = layer(x, x, x, mask=mask, average_attn_weights=False)
    close(output, expected[0])
    close(found, weights[0])
    close(
        layer(x, x, x, mask=masks.window(2))[0],
        by_hand(layer, x[None], BAND.expand(1, H, L, L))[0][0],
    )


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
@pytest.mark.parametrize(
    "make", [lambda: masks.window(2), lambda: masks.lengths([7, 4, 2]), lambda: masks.nothing()]
)
def test_sources_that_the_layer_appends_are_open_under_every_mask(
    option: str, make: Callable[[], masks.Mask]
) -> None:
    theirs, ours = pair(batch_first=True, **{option: True})
    tensors = inputs(BATCH_FIRST)
    mask = make()
    dense = mask.dense(L, S)
    blocked = (~dense).expand(N, H, L, S).reshape(N * H, L, S)
    expected, expected_weights = theirs(*tensors, attn_mask=blocked)
    output, weights = ours(*tensors, mask=mask)
    close(output, expected)
    close(weights, expected_weights)


def test_the_appended_mask_agrees_with_itself() -> None:
    from clearhead._core.sizes import Sizes

    for inner in (
        masks.causal(),
        masks.keep(torch.rand(3, 6) < 0.5),
        masks.first(2) | masks.window(1),
    ):
        mask = inner.appended(2)
        whole = mask.dense(5, 8, batch=3)
        assert torch.equal(whole[..., :6], inner.dense(5, 6, batch=3))
        assert whole[..., 6:].all()
        rows, columns = torch.tensor([1, 4]), torch.tensor([2, 5, 6])
        tile = mask.tile(rows, columns, Sizes(3, 2, 5, 8))
        assert torch.equal(tile, whole[..., rows, :][..., columns])
        for top, left in itertools.product(range(5), range(8)):
            for bottom, right in itertools.product(range(top + 1, 6), range(left + 1, 9)):
                tile = whole[..., top:bottom, left:right]
                block = mask.block(range(top, bottom), range(left, right), 5, 8)
                assert block.name != "FULL" or tile.all()
                assert block.name != "EMPTY" or not tile.any()
        with pytest.raises(ValueError, match="mask"):
            masks.keep(torch.ones(3, 6, dtype=torch.bool)).appended(2).dense(5, 9, batch=3)


def test_read_mirrors_attend() -> None:
    layer, x = layer_of_ours(), tokens()
    output, entropy = layer(x, x, x, read=readings.Entropy(), is_causal=True)
    plain, weights = layer(x, x, x, is_causal=True, average_attn_weights=False)
    assert torch.equal(output, plain)
    close(entropy, torch.special.entr(weights).sum(-1))
    _, (top, received, whole, overlap) = layer(
        x,
        x,
        x,
        read=(readings.TopK(2), readings.Received(), readings.Weights(), readings.Overlap()),
    )
    assert top.weights.shape == top.sources.shape == (N, H, L, 2)
    assert received.shape == (N, H, L)
    assert whole.shape == (N, H, L, L)
    assert overlap.shape == (N, H, H)
    assert layer(x, x, x, read=())[1] == ()


def test_read_of_an_unbatched_call_has_no_batch_axis() -> None:
    layer, x = layer_of_ours(), tokens()
    kinds = (readings.TopK(2), readings.LogSumExp(), readings.Overlap(), readings.Rows([0]))
    _, batched = layer(x, x, x, read=kinds)
    _, alone = layer(x[0], x[0], x[0], read=kinds)
    close(alone[0].weights, batched[0].weights[0])
    assert torch.equal(alone[0].sources, batched[0].sources[0])
    for mine, whole in zip(alone[1:], batched[1:], strict=True):
        close(mine, whole[0])


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most memory that a call holds at once, by the profiler's account of the allocator."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    held = peak = 0
    kineto: Any = profile.profiler and profile.profiler.kineto_results
    events = [e for e in kineto.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_asking_nothing_allocates_no_map() -> None:
    layer = ch.MultiheadAttention(64, 4, batch_first=True).eval()
    # So long that the strips of `tiled`, whose size is fixed, are small beside a map.
    length = 4096
    x = torch.randn(1, length, 64)
    one_map = 4 * length * length * 4

    def call(**asked: Any) -> Callable[[], Any]:
        return lambda: layer(x, x, x, is_causal=True, **asked)

    padded = torch.arange(length)[None] >= 1000
    causal = nn.Transformer.generate_square_subsequent_mask(length)
    with torch.no_grad():
        assert peak_bytes(call(need_weights=True)) >= one_map
        both = call(need_weights=False, attn_mask=causal, key_padding_mask=padded)
        assert peak_bytes(both) < one_map / 3
        assert peak_bytes(call(need_weights=False)) < one_map / 3
        assert peak_bytes(call(read=readings.LogSumExp())) < one_map / 3


# Misuse


BAD_CALLS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "query is a list": (TypeError, "query: is a floating-point tensor; got list", {"query": [1]}),
    "key is None": (TypeError, "key: is a floating-point tensor; got NoneType", {"key": None}),
    "integer value": (
        TypeError,
        "value: is a floating-point",
        {"value": torch.ones(N, S, E).long()},
    ),
    "bool query": (TypeError, "query: is a floating-point", {"query": torch.ones(N, L, E) > 0}),
    "other dtype": (TypeError, "query: has the dtype of", {"query": torch.ones(N, L, E).half()}),
    "sparse key": (TypeError, "key: is a dense tensor", {"key": torch.ones(N, S, E).to_sparse()}),
    "complex key": (TypeError, "key: is a floating-point", {"key": torch.ones(N, S, E) + 0j}),
    "array as mask": (
        TypeError,
        "attn_mask: is a bool tensor .*; got ndarray",
        {"attn_mask": torch.zeros(L, S).numpy()},
    ),
    "other device": (
        ValueError,
        "query: is on the device of",
        {"query": torch.ones(N, L, E, device="meta")},
    ),
    "one axis": (ValueError, "query: is .batch, position, width.", {"query": torch.ones(E)}),
    "four axes": (ValueError, "query: .*", {"query": torch.ones(N, H, L, 4)}),
    "key without batch": (ValueError, "key: has as many axes", {"key": torch.ones(S, E)}),
    "wide query": (
        ValueError,
        "query: has the width .* embed_dim=8",
        {"query": torch.ones(N, L, 9)},
    ),
    "wide key": (ValueError, "key: has the width .* kdim=8", {"key": torch.ones(N, S, 9)}),
    "wide value": (ValueError, "value: has the width .* vdim=8", {"value": torch.ones(N, S, 9)}),
    "one query sample": (ValueError, "key: has the batch size", {"query": torch.ones(1, L, E)}),
    "short value": (ValueError, "value: has the axes of key", {"value": torch.ones(N, 6, E)}),
    "int mask": (TypeError, "attn_mask: is a bool", {"attn_mask": torch.ones(L, S).long()}),
    "uint8 padding": (
        TypeError,
        "key_padding_mask: is a bool",
        {"key_padding_mask": torch.ones(N, S).byte()},
    ),
    "0/1 mask": (
        ValueError,
        "attn_mask: holds only 0 and 1",
        {"attn_mask": torch.ones(L, S).tril()},
    ),
    "ones": (ValueError, "attn_mask: holds only 0 and 1", {"attn_mask": torch.ones(L, S)}),
    "0/1 padding": (
        ValueError,
        "key_padding_mask: holds only 0 and 1",
        {"key_padding_mask": torch.ones(N, S).tril(4)},
    ),
    "mask of other sizes": (
        ValueError,
        r"attn_mask: is \(query, source\) = \(5, 7\) or .* = \(6, 5, 7\)",
        {"attn_mask": torch.zeros(L, L)},
    ),
    "mask for each sample": (ValueError, "attn_mask: is", {"attn_mask": torch.zeros(N, L, S)}),
    "mask of four axes": (ValueError, "attn_mask: is", {"attn_mask": torch.zeros(N, H, L, S)}),
    "padding of other sizes": (
        ValueError,
        r"key_padding_mask: is \(batch, source\) = \(3, 7\)",
        {"key_padding_mask": torch.zeros(N, L)},
    ),
    "padding without batch": (
        ValueError,
        "key_padding_mask: is",
        {"key_padding_mask": torch.zeros(S)},
    ),
    "attn_mask is a Mask": (TypeError, "pass a Mask as mask=", {"attn_mask": masks.causal()}),
    "padding is a list": (TypeError, "key_padding_mask: .*list", {"key_padding_mask": [True]}),
    "mask on another device": (
        ValueError,
        "attn_mask: is on the device",
        {"attn_mask": torch.zeros(L, S, device="meta")},
    ),
    "mask is float": (TypeError, "mask: is a Mask or a bool", {"mask": torch.zeros(L, S)}),
    "mask is int": (TypeError, "mask: .*\n.*\n.*mask == 1", {"mask": torch.ones(L, S).int()}),
    "mask is a string": (TypeError, "mask: is a Mask or a bool", {"mask": "causal"}),
    "mask of wrong rank": (ValueError, "mask: broadcasts", {"mask": torch.ones(S) > 0}),
    "mask of wrong size": (ValueError, "mask: broadcasts", {"mask": torch.ones(2, L, S) > 0}),
    "mask of five axes": (ValueError, "mask: broadcasts", {"mask": torch.ones(1, 1, 1, L, S) > 0}),
    "Mask of wrong size": (ValueError, "mask: ", {"mask": masks.lengths([3, 4])}),
    "mask as need_weights": (TypeError, "need_weights: .*", {"need_weights": torch.ones(L, S) > 0}),
    "is_causal is a word": (TypeError, "is_causal: is True or False", {"is_causal": "yes"}),
    "average is a float": (TypeError, "average_attn_weights", {"average_attn_weights": 0.5}),
    "read is a class": (TypeError, "read: ", {"read": readings.Weights}),
    "read is a word": (TypeError, "read: ", {"read": "weights"}),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_misuse_is_told_alike_in_training_and_evaluation(case: str) -> None:
    error, message, wrong = BAD_CALLS[case]
    told = set()
    for training, grad, need_weights in itertools.product((True, False), repeat=3):
        layer = ch.MultiheadAttention(E, H, batch_first=True).train(training)
        call = {
            "query": torch.ones(N, L, E),
            "key": torch.ones(N, S, E),
            "need_weights": need_weights,
        }
        call["value"] = call["key"]
        with torch.set_grad_enabled(grad), pytest.raises(error, match=message) as caught:
            layer(**(call | wrong))
        told.add(str(caught.value))
    assert len(told) == 1


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "embed_dim: is a whole multiple", {"embed_dim": 9}),
        (ValueError, "embed_dim: is positive", {"embed_dim": 0}),
        (TypeError, "embed_dim: is a whole number", {"embed_dim": 8.0}),
        (ValueError, "num_heads: is positive", {"num_heads": -2}),
        (TypeError, "num_heads: is a whole number", {"num_heads": "2"}),
        (TypeError, "num_heads: is a whole number", {"num_heads": True}),
        (ValueError, "kdim: is positive", {"kdim": 0}),
        (TypeError, "vdim: is a whole number", {"vdim": 2.5}),
        (ValueError, "dropout: is a probability", {"dropout": 1.5}),
        (ValueError, "dropout: is a probability", {"dropout": float("nan")}),
        (TypeError, "dropout: is a number", {"dropout": "0.1"}),
    ],
)
def test_wrong_constructor_arguments(
    error: type[Exception], match: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=match):
        ch.MultiheadAttention(**{"embed_dim": 8, "num_heads": 2, **options})


def test_floats_that_are_no_bool_in_disguise_are_taken() -> None:
    theirs, layer = pair(batch_first=True)
    tensors = inputs(BATCH_FIRST)
    for mask in (torch.zeros(L, S), torch.full((L, S), 0.5), torch.ones(L, S).tril() * 2):
        mask = mask.double()
        close(layer(*tensors, attn_mask=mask)[0], theirs(*tensors, attn_mask=mask)[0])
    learned = torch.ones(L, S, dtype=torch.float64, requires_grad=True)
    close(layer(*tensors, attn_mask=learned)[0], theirs(*tensors, attn_mask=learned)[0])


# Whole models


def encoder(**options: Any) -> nn.TransformerEncoder:
    options = {"batch_first": True, "dropout": 0.0, "dtype": torch.float64, **options}
    layer = nn.TransformerEncoderLayer(E, H, 16, **options)
    fast = options["batch_first"] and not options.get("norm_first")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=fast)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 3)
    return model


PADDED = torch.arange(L) >= torch.tensor([[L], [L - 1], [L - 3]])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_converted_encoder_answers_alike(
    training: bool, grad: bool, norm_first: bool, batch_first: bool
) -> None:
    """As torch's in training, padded rows included; its evaluation returns zeros there."""
    theirs = encoder(norm_first=norm_first, batch_first=batch_first).train()
    ours = ch.convert(copy.deepcopy(theirs)).train(training)
    x = tokens() if batch_first else tokens().transpose(0, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    for call in (
        {"src_key_padding_mask": PADDED},
        {"mask": ~CAUSAL},
        {"mask": causal, "is_causal": True},
        {"mask": ~BAND},
        {},
    ):
        expected = theirs(x, **call)
        with torch.set_grad_enabled(grad):
            close(ours(x, **call).detach(), expected.detach(), str(call))
    both = ours(x, mask=~CAUSAL, src_key_padding_mask=PADDED)
    close(both, theirs(x, mask=~CAUSAL, src_key_padding_mask=PADDED))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_evaluation_is_another_answer() -> None:
    """What the test above guards against is still there."""
    theirs = encoder()
    x = tokens()
    with torch.no_grad():
        trained = theirs.train()(x, src_key_padding_mask=PADDED)
        evaluated = theirs.eval()(x, src_key_padding_mask=PADDED)
    assert (trained - evaluated)[PADDED].abs().max() > 1e-3


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_fast_path_is_not_taken(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the fused kernels runs, no nested tensor is made, no switch is thrown."""
    model = ch.convert(encoder(activation=activation)).eval()
    called = []
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        monkeypatch.setattr(torch, name, lambda *a, **k: called.append(a))
    monkeypatch.setattr(torch, "_nested_tensor_from_mask", lambda *a, **k: called.append(a))
    seen = []
    model.get_submodule("layers.1.self_attn").register_forward_hook(lambda *a: seen.append(a))
    with torch.inference_mode():
        model(tokens(), src_key_padding_mask=PADDED)
        model(tokens())
        model.layers[0](tokens(), src_key_padding_mask=PADDED)
    assert not called
    assert len(seen) == 2
    assert torch.backends.mha.get_fastpath_enabled()


def test_it_says_truly_whether_its_projections_are_packed() -> None:
    """As torch's own layer does; peft and torch's averaged models look at it."""
    packed, apart = layer_of_ours(), ch.MultiheadAttention(E, H, kdim=3)
    turned = ch.convert(nn.Sequential(nn.MultiheadAttention(E, H)))[0]
    for layer in (packed, turned, copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert layer._qkv_same_embed_dim is (layer.in_proj_weight is not None) is True
    assert apart._qkv_same_embed_dim is (apart.in_proj_weight is not None) is False


def test_averaged_weights_follow_the_layer() -> None:
    layer = layer_of_ours()
    averaged = torch.optim.swa_utils.AveragedModel(layer)
    for step in (1.0, 3.0):
        with torch.no_grad():
            layer.in_proj_weight.fill_(step)
        averaged.update_parameters(layer)
    assert (averaged.module.in_proj_weight == 2).all()  # pyright: ignore[reportAttributeAccessIssue]
    x = tokens()
    with torch.no_grad():
        layer.in_proj_weight.fill_(2.0)
        assert torch.equal(averaged(x, x, x)[0], layer(x, x, x)[0])


def test_layers_put_in_by_hand_are_not_bypassed() -> None:
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True).double()
    plain = copy.deepcopy(layer)
    mine = ch.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    mine.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = mine
    x = tokens()
    with torch.no_grad():
        expected = plain.train()(x, src_key_padding_mask=PADDED)
        close(layer.eval()(x, src_key_padding_mask=PADDED), expected)
    # A new stack notices that it must not pack, and says so.
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim"):
        stack = nn.TransformerEncoder(layer, 2)
    with torch.no_grad():
        close(
            stack.eval()(x, src_key_padding_mask=PADDED),
            stack.train()(x, src_key_padding_mask=PADDED),
        )


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_converted_transformer_answers_alike(batch_first: bool, training: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor", UserWarning)
        theirs = nn.Transformer(E, H, 2, 2, 16, 0.0, batch_first=batch_first, dtype=torch.float64)
    ours = ch.convert(copy.deepcopy(theirs)).train(training)
    source, target = tokens(length=S), tokens()
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    padded = torch.arange(S) >= torch.tensor([[S], [4], [2]])
    call = {
        "src_key_padding_mask": padded,
        "memory_key_padding_mask": padded,
        "tgt_key_padding_mask": PADDED,
        "tgt_mask": causal,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched", UserWarning)
        expected = theirs.train()(source, target, **call)
    close(ours(source, target, **call), expected)
    close(ours(source, target, **call, tgt_is_causal=True), expected)
    # Torch raises here, or trains a decoder that sees its own answers.
    del call["tgt_mask"]
    close(ours(source, target, **call, tgt_is_causal=True), expected)


def test_a_converted_decoder_layer_hears_tgt_is_causal() -> None:
    layer = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True).double()
    memory, target = tokens(length=S), tokens()
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        layer(target, memory, tgt_is_causal=True)
    expected = layer(target, memory, tgt_mask=~CAUSAL)
    close(ch.convert(layer)(target, memory, tgt_is_causal=True), expected)


def test_conversion_keeps_everything_else() -> None:
    """The same objects: parameters in an optimizer, hooks, sharing, modes, frozen tensors."""
    shared = nn.MultiheadAttention(E, H, batch_first=True, dropout=0.1)
    model = nn.ModuleDict(
        {"a": shared, "b": shared, "c": nn.MultiheadAttention(E, 1).half().eval()}
    )
    model["c"].in_proj_weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    keys = list(model.state_dict())
    calls = []
    shared.register_forward_hook(lambda *a: calls.append(a))
    setattr(shared, "note", "kept")  # noqa: B010
    assert ch.convert(model) is model
    assert model["a"] is model["b"] is shared
    assert type(shared) is ch.MultiheadAttention
    assert {n: id(p) for n, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
    assert shared.training
    assert not model["c"].training
    assert not model["c"].in_proj_weight.requires_grad
    assert model["c"].in_proj_weight.dtype == torch.float16
    assert (shared.dropout, shared.note) == (0.1, "kept")
    x = torch.randn(N, L, E)
    old = shared.in_proj_weight.detach().clone()
    shared(x, x, x)[0].sum().backward()
    optimizer.step()
    assert len(calls) == 1
    assert not torch.equal(shared.in_proj_weight, old)
    ch.convert(model)
    assert type(shared) is ch.MultiheadAttention


def test_a_bare_layer_is_converted_in_place() -> None:
    layer = nn.MultiheadAttention(E, H)
    assert ch.convert(layer) is layer
    assert isinstance(layer, ch.MultiheadAttention)


def test_parametrized_pruned_and_normed_layers() -> None:
    def plain() -> nn.MultiheadAttention:
        torch.manual_seed(2)
        return nn.MultiheadAttention(E, H, batch_first=True).double()

    def double_it(layer: nn.MultiheadAttention) -> None:
        class Twice(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * x

        parametrize.register_parametrization(layer, "in_proj_weight", Twice())
        parametrize.register_parametrization(layer.out_proj, "weight", Twice())

    x = tokens()
    for change in (
        double_it,
        lambda layer: parametrizations.weight_norm(layer, "in_proj_weight"),
        lambda layer: prune.l1_unstructured(layer, "in_proj_weight", 0.5),
    ):
        theirs, ours = plain(), plain()
        change(theirs)
        change(ours)
        ch.convert(ours)
        close(ours(x, x, x)[0], theirs(x, x, x)[0])
        assert list(ours.state_dict()) == list(theirs.state_dict())
        ch.convert(ours)
        if not prune.is_pruned(ours):  # torch cannot copy a pruned layer
            close(copy.deepcopy(ours)(x, x, x)[0], theirs(x, x, x)[0])
        if parametrize.is_parametrized(ours):
            parametrize.remove_parametrizations(ours, "in_proj_weight")
            assert type(ours) is ch.MultiheadAttention
            close(ours(x, x, x)[0], theirs(x, x, x)[0])


def test_what_cannot_be_converted_is_named_and_nothing_is_changed() -> None:
    class Special(nn.MultiheadAttention):
        pass

    patched = nn.MultiheadAttention(E, H)
    patched.forward = lambda *a, **k: None  # pyright: ignore[reportAttributeAccessIssue]
    model = nn.ModuleDict(
        {"good": nn.MultiheadAttention(E, H), "special": Special(E, H), "patched": patched}
    )
    with pytest.raises(
        ValueError, match=r"special: Special is a subclass(.|\n)*patched: its forward"
    ):
        ch.convert(model)
    assert type(model["good"]) is nn.MultiheadAttention
    with pytest.raises(ValueError, match="the model itself: Special"):
        ch.convert(Special(E, H))
    with pytest.raises(ValueError, match=r"holds at least one .*MultiheadAttention; got Linear"):
        ch.convert(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model: is a torch.nn.Module; got list"):
        ch.convert([nn.MultiheadAttention(E, H)])  # pyright: ignore[reportArgumentType]

    class Ours(ch.MultiheadAttention):
        pass

    assert type(ch.convert(nn.ModuleList([Ours(E, H)]))[0]) is Ours


# The rest of torch


@pytest.mark.parametrize("converted", [True, False])
def test_copies_and_pickles(converted: bool) -> None:
    layer = nn.MultiheadAttention(E, H, batch_first=True) if converted else None
    layer = ch.convert(layer) if layer else ch.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(N, L, E)
    expected = layer(x, x, x)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
    ):
        assert type(other) is ch.MultiheadAttention
        for a, b in zip(other(x, x, x), expected, strict=True):
            assert torch.equal(a, b)
        stack = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
        stack.self_attn = other
        with torch.no_grad():
            assert stack.eval()(x).isfinite().all()


def test_autocast_and_meta() -> None:
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    ours = ch.convert(copy.deepcopy(theirs))
    x = torch.randn(N, L, E)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = theirs(x, x, x)
        for mine, torchs in zip(ours(x, x, x), expected, strict=True):
            assert mine.dtype == torchs.dtype
            assert (mine - torchs).abs().max() < 0.02
        assert torch.equal(ours(x, x, x)[0], ours(x, x, x, need_weights=False)[0])
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TypeError, match="query: has the dtype of"),
    ):
        ours(x.double(), x, x)
    meta = ch.MultiheadAttention(E, H, batch_first=True, device="meta")
    x = torch.empty(N, L, E, device="meta")
    output, weights = meta(x, x, x, is_causal=True, attn_mask=torch.empty(L, L, device="meta"))
    assert (output.shape, weights.shape) == ((N, L, E), (N, L, L))


@pytest.mark.parametrize("need_weights", [True, False])
def test_compiled_and_exported(need_weights: bool) -> None:
    layer = ch.MultiheadAttention(E, H, batch_first=True).eval()
    x = torch.randn(N, L, E)
    call = {"key_padding_mask": PADDED, "attn_mask": ~BAND, "need_weights": need_weights}
    expected = layer(x, x, x, **call)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    exported = torch.export.export(layer, (x, x, x), call).module()
    for other in (compiled, exported):
        for mine, plain in zip(other(x, x, x, **call), expected, strict=True):
            assert (mine is None) == (plain is None)
            if plain is not None:
                close(mine, plain)


def test_traced_by_other_means() -> None:
    """A graph keeps torch's layer as a module of its own, which can be converted afterwards."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(E, H, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x, x, key_padding_mask=x[..., 0] > 1)[0]

    model, x = Model().eval(), torch.randn(N, L, E)
    expected = model(x)
    graph = ch.convert(torch.fx.symbolic_trace(model))
    close(graph(x), expected)
    compiled: Any = torch.compile(model, backend="eager")
    close(compiled(x), expected)
    ch.convert(compiled)
    assert type(model.layer) is ch.MultiheadAttention
    close(compiled(x), expected)


def test_dropout_repeats_under_checkpointing() -> None:
    layer, x = ch.MultiheadAttention(E, H, dropout=0.5, batch_first=True), torch.randn(N, L, E)
    found = []
    for wrap in (False, True):
        torch.manual_seed(4)
        if wrap:
            output, _ = torch.utils.checkpoint.checkpoint(layer, x, x, x, use_reentrant=False)
        else:
            output, _ = layer(x, x, x)
        found.append((output, torch.autograd.grad(output.sum(), layer.in_proj_weight)[0]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_functional_transforms() -> None:
    layer, x = layer_of_ours(), tokens()
    one = torch.func.vmap(lambda sample: layer(sample, sample, sample, is_causal=True)[0])
    close(one(x), layer(x, x, x, is_causal=True)[0])
    parameters: dict[str, Tensor] = dict(layer.named_parameters())

    def loss(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, given, (x, x, x), {"is_causal": True})[0].sum()

    grads = torch.func.grad(loss)(parameters)
    layer(x, x, x, is_causal=True)[0].sum().backward()
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        close(grads[name], parameter.grad, name)


def test_gradcheck_through_a_learned_bias() -> None:
    layer = ch.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, b: layer(x, x, x, attn_mask=b, is_causal=True), (x, bias)
    )


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_equal_a_loop_over_samples(layout: torch.layout) -> None:
    layer = ch.MultiheadAttention(E, H, batch_first=True)
    samples = [torch.randn(n, E, requires_grad=True) for n in (3, 5, 1)]
    nested = torch.nested.as_nested_tensor(samples, layout=layout)
    output, weights = layer(nested, nested, nested, is_causal=True)
    assert output.is_nested
    assert output.layout == layout
    assert weights.shape == (3, 5, 5)
    for sample, mine, rows in zip(samples, output.unbind(), weights, strict=True):
        alone, expected = layer(sample, sample, sample, is_causal=True)
        close(mine, alone)
        close(rows[: len(sample), : len(sample)], expected)
        assert rows.sum().item() == pytest.approx(len(sample))
    assert layer(nested, nested, nested, need_weights=False)[1] is None
    torch.cat(output.unbind()).sum().backward()
    assert all(sample.grad is not None for sample in samples)
    with pytest.raises(ValueError, match="key_padding_mask: does not go with nested"):
        layer(nested, nested, nested, key_padding_mask=torch.zeros(3, 5))
    with pytest.raises(ValueError, match="read: does not go with nested"):
        layer(nested, nested, nested, read=readings.Entropy())
    with pytest.raises(TypeError, match="are all nested tensors or all dense"):
        layer(nested, samples[0], samples[0])
    with pytest.raises(ValueError, match="only in a layer with batch_first=True"):
        ch.MultiheadAttention(E, H)(nested, nested, nested)
