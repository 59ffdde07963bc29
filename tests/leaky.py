"""Hand-written modules that leak, a kind each, beside their mended twins.

`CASES` maps a kind to (make(leaky: bool), where the leak is, which pairs (query, source) leak).
All are to be causal, on float inputs (batch, position, WIDTH) unless the case says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LENGTH, BATCH, VOCAB = 8, 13, 3, 17


class Case(NamedTuple):
    make: Callable[[bool], nn.Module]
    module: str
    # Does the source (second) really reach the query (first)? Only asked of forbidden pairs.
    leaks: Callable[[int, int], bool] = lambda query, source: source > query
    inputs: str = "floats"


class Block(nn.Module):
    """A residual block around one mixer, as in a transformer: norm, mix, add."""

    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.norm, self.mixer, self.up = nn.LayerNorm(WIDTH), mixer, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        return x + F.gelu(self.up(x))


class Attention(nn.Module):
    """Attention by hand; `wrong` names the one thing that is wrong with it."""

    def __init__(self, wrong: str = ""):
        super().__init__()
        self.wrong, self.qkv = wrong, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / math.sqrt(WIDTH)
        late = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        match self.wrong:
            case "missing":
                return scores.softmax(-1) @ v
            case "inverted":
                weights = scores.masked_fill(~late, -torch.inf).softmax(-1)
                return weights.nan_to_num() @ v
            case "after softmax":
                return scores.softmax(-1).masked_fill(late, 0) @ v
            case "off by one":
                late = torch.ones_like(late).triu(2)
            case "softmax axis":
                return scores.masked_fill(late, -torch.inf).softmax(-2) @ v
            case "too mild":
                return (scores - 5.0 * late).softmax(-1) @ v
            case "zero instead of -inf":
                return (scores * ~late).softmax(-1) @ v
            case "renormalised by all":
                weights = scores.exp()
                return weights.masked_fill(late, 0) @ v / weights.sum(-1, keepdim=True)
            case "shift by the mean":
                scores = scores * torch.sigmoid(scores.mean(-1, keepdim=True))
            case "one head":
                free = torch.cat([v[..., :4], (scores.softmax(-1) @ v)[..., 4:]], -1)
                return scores.masked_fill(late, -torch.inf).softmax(-1) @ v + free
            case "last row":
                late = late & (torch.arange(len(late)) != 3)[:, None]
        return scores.masked_fill(late, -torch.inf).softmax(-1) @ v


class Fused(nn.Module):
    """Attention through torch's fused function."""

    def __init__(self, wrong: str = ""):
        super().__init__()
        self.wrong, self.qkv, self.out = wrong, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        may = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
        if self.wrong == "nn polarity":
            may = ~may
            may[-1, -1] = True
        if self.wrong == "whole prompt":  # a mask made for one more token than there is
            return self.out(F.scaled_dot_product_attention(q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, may))


class Across(nn.Module):
    """nn.MultiheadAttention that takes the batch axis for the positions, or does not."""

    def __init__(self, leaky: bool):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=not leaky)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if not self.attention.batch_first:  # forgotten: (position, batch, width) is expected
            mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


class Mixer(nn.Module):
    """A function over positions as a module."""

    def __init__(self, mix: Callable[[Tensor], Tensor]):
        super().__init__()
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


class Convolution(nn.Module):
    def __init__(self, left: int, right: int):
        super().__init__()
        self.pad, self.conv = (left, right), nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, self.pad)).mT


class Chunks(nn.Module):
    """Attention inside chunks of four positions."""

    def __init__(self, leaky: bool):
        super().__init__()
        self.inner = Attention("missing" if leaky else "")

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[1] % 4))
        chunks = padded.unflatten(1, (-1, 4)).flatten(0, 1)
        return self.inner(chunks).unflatten(0, (len(x), -1)).flatten(1, 2)[:, : x.shape[1]]


class Cached(nn.Module):
    """Two halves one after the other, as in chunked prefill; the mask is dropped with a cache."""

    def __init__(self, leaky: bool):
        super().__init__()
        self.leaky, self.qkv = leaky, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        half, size = x.shape[1] // 2, x.shape[1]
        may = torch.ones(size, size, dtype=torch.bool).tril()
        first = F.scaled_dot_product_attention(
            q[:, :half], k[:, :half], v[:, :half], may[:half, :half]
        )
        later = None if self.leaky else may[half:]
        return torch.cat([first, F.scaled_dot_product_attention(q[:, half:], k, v, later)], 1)


class BatchNorm(nn.Module):
    def __init__(self, leaky: bool):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).train(leaky)
        self.norm.train = lambda mode=True: self.norm  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


class Recurrent(nn.Module):
    def __init__(self, leaky: bool):
        super().__init__()
        self.rnn = nn.GRU(
            WIDTH, WIDTH // 2 if leaky else WIDTH, bidirectional=leaky, batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class InPlace(nn.Module):
    """Writes the mean of neighbours into its own input, which the residual then adds."""

    def __init__(self, leaky: bool):
        super().__init__()
        self.leaky, self.inner = leaky, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.leaky else x.clone()
        kept[:, :-1] += x[:, 1:] if self.leaky else 0 * x[:, :-1]
        return x + self.inner(kept)


class Routed(nn.Module):
    """Expert choice: an expert takes the best positions of the whole sequence."""

    def __init__(self, leaky: bool):
        super().__init__()
        self.leaky, self.gate, self.expert = leaky, nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        chosen = gate >= gate.topk(4, 1).values[:, -1:] if self.leaky else gate > 0
        return x + chosen * self.expert(x)


class Tokens(nn.Module):
    """A model on token ids; the positions are numbered by what the tokens are, or plainly."""

    def __init__(self, wrong: str = ""):
        super().__init__()
        self.wrong, self.token = wrong, nn.Embedding(VOCAB, WIDTH)
        self.place, self.block = nn.Embedding(64, WIDTH), Block(Attention())
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).expand_as(ids)
        if self.wrong == "position ids":  # counted from the end of the odd tokens
            places = (ids % 2).flip(1).cumsum(1).flip(1)
        x = self.token(ids) + self.place(places)
        if self.wrong == "labels":  # the next token comes in with the inputs
            x = x + 0.01 * self.token(ids.roll(-1, 1))
        return self.head(self.block(x))


class Top(nn.Module):
    """A block and something between its parts that is no module of its own."""

    def __init__(self, after: Callable[[Tensor], Tensor]):
        super().__init__()
        self.block, self.after, self.head = Block(Attention()), after, nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.after(self.block(x)))


def fourier(x: Tensor) -> Tensor:
    return torch.fft.fft(x, dim=1).real


def long_convolution(x: Tensor, size: int) -> Tensor:
    """A causal filter by FFT: right with room for the tail, circular without."""
    taps = torch.arange(1.0, x.shape[1] + 1).reciprocal().to(x)[:, None]
    spectrum = torch.fft.rfft(x, size, dim=1) * torch.fft.rfft(taps, size, dim=0)
    return torch.fft.irfft(spectrum, size, dim=1)[:, : x.shape[1]]


def over_time(x: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)


def over_width(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)


def quantised(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    step = x.abs().amax(axes, keepdim=True) / 127
    return (x / step).round() * step


def attention(wrong: str, leaks: Callable[[int, int], bool] | None = None) -> Case:
    case = Case(lambda leaky: Block(Attention(wrong if leaky else "")), "mixer")
    return case._replace(leaks=leaks) if leaks else case


def mixer(bad: Callable[[Tensor], Tensor], good: Callable[[Tensor], Tensor]) -> Case:
    return Case(lambda leaky: Block(Mixer(bad if leaky else good)), "mixer")


def next_only(query: int, source: int) -> bool:
    return source == query + 1


CASES: dict[str, Case] = {
    "missing mask": attention("missing"),
    "inverted mask": attention("inverted"),
    "mask after softmax": attention("after softmax"),
    "mask off by one": attention("off by one", next_only),
    "softmax over the queries": attention("softmax axis"),
    "mask constant too mild": attention("too mild"),
    "masked with zero": attention("zero instead of -inf"),
    "denominator over all": attention("renormalised by all"),
    "temperature from all scores": attention("shift by the mean"),
    "one head forgot the mask": attention("one head"),
    "one row forgot the mask": attention("last row", lambda q, s: q == 3 and s > 3),
    "polarity of another API": Case(
        lambda leaky: Block(Fused("nn polarity" if leaky else "")), "mixer"
    ),
    "fused without is_causal": Case(
        lambda leaky: Block(Fused("whole prompt" if leaky else "")), "mixer"
    ),
    "mask dropped with a cache": Case(
        lambda leaky: Block(Cached(leaky)), "mixer", lambda q, s: q >= LENGTH // 2
    ),
    "chunk edges": Case(lambda leaky: Block(Chunks(leaky)), "mixer", lambda q, s: s // 4 == q // 4),
    "convolution padded on both sides": Case(
        lambda leaky: Block(Convolution(1, 1) if leaky else Convolution(2, 0)),
        "mixer.conv",
        next_only,
    ),
    "pooling over all": mixer(
        lambda x: x.mean(1, keepdim=True).expand_as(x), lambda x: x.cumsum(1)
    ),
    "maximum over all": mixer(lambda x: x.amax(1, keepdim=True) - x, lambda x: x.cummax(1).values),
    "normalised over time": mixer(over_time, over_width),
    "Fourier mixing": mixer(fourier, lambda x: x.cumsum(1)),
    "circular long convolution": mixer(
        lambda x: long_convolution(x, x.shape[1]), lambda x: long_convolution(x, 2 * x.shape[1])
    ),
    "shift the wrong way": Case(
        lambda leaky: Block(Mixer(lambda x: F.pad(x, (0, 0, -1, 1) if leaky else (0, 0, 1, -1)))),
        "mixer",
        next_only,
    ),
    "reversed and not back": mixer(lambda x: x.flip(1).cumsum(1).flip(1), lambda x: x.cumsum(1)),
    "scale from the whole tensor": mixer(
        lambda x: quantised(x, (1, 2)), lambda x: quantised(x, (2,))
    ),
    "batch normalisation": Case(lambda leaky: Block(BatchNorm(leaky)), "mixer.norm"),
    "two-way recurrence": Case(lambda leaky: Block(Recurrent(leaky)), "mixer.rnn"),
    "in-place edit": Case(lambda leaky: Block(InPlace(leaky)), "mixer", next_only),
    "expert choice": Case(lambda leaky: Block(Routed(leaky)), "mixer"),
    "position ids from the tokens": Case(
        lambda leaky: Tokens("position ids" if leaky else ""),
        "Tokens (its own forward)",
        inputs="tokens",
    ),
    "next token among the inputs": Case(
        lambda leaky: Tokens("labels" if leaky else ""),
        "Tokens (its own forward)",
        lambda q, s: s == q + 1,
        "tokens",
    ),
    "between the modules": Case(
        lambda leaky: Top(lambda x: x + 1e-6 * x.sum(1, keepdim=True) if leaky else x),
        "Top (its own forward)",
    ),
}


def make(kind: str, leaky: bool, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """Build a case with its inputs, always with the same weights."""
    torch.manual_seed(7)
    case = CASES[kind]
    model = case.make(leaky).eval().to(dtype)
    if case.inputs == "tokens":
        return model, torch.randint(VOCAB, (BATCH, LENGTH))
    return model, torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype)
