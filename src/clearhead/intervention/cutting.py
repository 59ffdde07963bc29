"""Cut attention in a running model: edges before the softmax, weights after it, or whole heads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead._capture import call_with
from clearhead._core import is_number, type_error, value_error
from clearhead.intervention.choosing import chosen
from clearhead.intervention.cutter import Cut, Edges, Weights, cutting
from clearhead.intervention.outputs import HOW, Ablated, Gates, contexts
from clearhead.masks import Mask, no_mask

__all__ = ["ablate", "head_importance", "knockout", "zero_weights"]

Model = nn.Module | Callable[..., Any]
Heads = int | tuple[int, int] | Iterable[int] | Iterable[tuple[int, int]] | None


@contextlib.contextmanager
def knockout(
    model: Model,
    edges: Mask | Tensor | Iterable[tuple[int, int]],
    *,
    layers: int | Sequence[int] | None = None,
    heads: Heads = None,
) -> Iterator[Cut]:
    """Cut edges before the softmax of every attention call that a model makes inside the block.

    >>> import torch, clearhead as ch
    >>> model = ch.models.load()
    >>> tokens = model.vocabulary.encode("hell")[None]
    >>> with torch.no_grad(), ch.knockout(model, ch.masks.diagonal(1), heads=[(0, 2)]):
    ...     blind = model(tokens)

    The other weights of a row share what the cut ones had (attention knockout, Geva et al. 2023,
    "Dissecting Recall of Factual Associations"). A row of which nothing is left has context 0, as
    under `ablate(how="zero")`. Heads and rows that lose no edge keep the bits of the model's own
    kernel.

    - `edges`: (query, source) pairs, as `[(3, 0)]` or an integer tensor (n, 2), a `Mask` or a bool
      tensor; in positions of the whole sequence, also in steps with a cache. In `generate()`
      positions that are not there yet may still come; elsewhere they are a ValueError.
    - `layers`: numbers of the attention modules in order of first call, as `watch` counts them.
    - `heads`: head numbers, in all of `layers`, or (layer, head) pairs. All unless given.

    What the block yields has `moved`: how far each (layer, head) moved at most. A block that moved
    nothing raises a RuntimeError on leaving; a layer or head that there is not is a ValueError.
    """
    cut = Edges(_edges(edges), chosen(layers, heads))
    with _block("knockout", model, cut):
        yield cut


@contextlib.contextmanager
def zero_weights(
    model: Model,
    edges: Mask | Tensor | Iterable[tuple[int, int]],
    *,
    layers: int | Sequence[int] | None = None,
    heads: Heads = None,
) -> Iterator[Cut]:
    """Set weights to zero after the softmax: what the other edges carry stays as it was.

    >>> import torch, clearhead as ch
    >>> x = torch.randn(1, 3, 4)
    >>> with ch.zero_weights(ch.attend, ch.masks.everything()):
    ...     ch.attend(x, x, x).abs().max()
    tensor(0.)

    Rows then sum to less than one. Arguments and errors are those of `knockout`.
    """
    cut = Weights(_edges(edges), chosen(layers, heads))
    with _block("zero_weights", model, cut):
        yield cut


@contextlib.contextmanager
def ablate(
    model: Model,
    heads: Heads = None,
    *,
    layers: int | Sequence[int] | None = None,
    how: str = "zero",
    reference: Any = None,
    seed: int = 0,
) -> Iterator[Cut]:
    """Replace the output of heads, just before the projection that joins them.

    >>> import torch, clearhead as ch
    >>> model = ch.models.load()
    >>> tokens = model.vocabulary.encode("hell")[None]
    >>> with torch.no_grad(), ch.ablate(model, [(0, 2), (1, 0)], how="mean"):
    ...     logits = model(tokens)

    - `heads`, `layers`: as in `knockout`.
    - `how`: "zero" (Michel et al. 2019); "mean", over the positions of the same sample and run;
      "resample", each position gets the output of another one, drawn at random.
    - `reference`: inputs of the model; mean and resample take the outputs of a run on these, of all
      its samples and positions (Wang et al. 2022 take the mean of a reference distribution).
      A step of `generate()` has too few positions of its own, and needs it.
    - `seed`: of the draw; torch's own random state is left alone.

    Errors are those of `knockout`.
    """
    if how not in HOW:
        raise value_error("how", f"is one of {', '.join(HOW)}", got=repr(how))
    if how == "zero" and reference is not None:
        raise value_error(
            "reference", "is of no use to how='zero'", hint="how='mean', or 'resample'"
        )
    outputs = None if reference is None else contexts(model, reference)
    cut = Ablated(how, outputs, seed, chosen(layers, heads))
    with _block("ablate", model, cut):
        yield cut


def head_importance(
    model: Model,
    inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    layers: int | Sequence[int] | None = None,
    heads: Heads = None,
) -> Tensor:
    """Estimate what the loss owes to each head, from the gradients of one backward pass.

    >>> import torch, clearhead as ch
    >>> model = ch.models.load()
    >>> tokens = model.vocabulary.encode("hello")[None]
    >>> loss = lambda logits: torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    >>> ch.head_importance(model, tokens, loss).shape
    torch.Size([4, 4])

    Each head's output is multiplied by a gate of one; its importance is the absolute gradient of
    the loss with respect to the gate, summed over the samples (Michel et al. 2019, "Are Sixteen
    Heads Really Better than One?", whose mean over samples this is for a loss that is a mean).
    The gates change no bit of the output, and the parameters get no gradient.

    - `inputs`: a tensor, a tuple of arguments or a dict of keywords.
    - `loss`: makes a scalar of the output; by default the output's own `loss`.

    The answer is (layer, head), NaN where a layer has fewer heads or was not chosen.
    """
    gates = Gates(chosen(layers, heads))
    with torch.enable_grad(), cutting(model, [gates]) as cutter:
        output = call_with(model, inputs)
        scalar = _loss(output, loss)
        cutter.reached("head_importance", gates)
        made = [gate for _, _, gate in gates.gates]
        gradients = torch.autograd.grad(scalar, made, allow_unused=True)
    table = scalar.new_full((max(cutter.totals) + 1, max(cutter.totals.values())), float("nan"))
    for (layer, some, gate), gradient in zip(gates.gates, gradients, strict=True):
        size = torch.zeros_like(gate) if gradient is None else gradient.abs()
        table[layer, some] = table[layer, some].detach().nan_to_num(0.0) + size.sum((0, 2, 3))
    return table


def _loss(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    scalar = getattr(output, "loss", None) if loss is None else loss(output)
    if scalar is None:
        hint = "head_importance(model, inputs, lambda output: ...)"
        raise value_error("loss", "is needed: the model's output has none of its own", hint=hint)
    if not isinstance(scalar, Tensor) or scalar.numel() != 1 or not scalar.requires_grad:
        got = tuple(scalar.shape) if isinstance(scalar, Tensor) else type(scalar).__name__
        raise value_error("loss", "gives one number that depends on the model's output", got=got)
    return scalar.reshape(())


def _edges(edges: Any) -> Mask:
    if isinstance(edges, Mask):
        return edges
    if isinstance(edges, Tensor) and edges.dtype == torch.bool:
        return masks.dense(edges)
    edges = listed(edges)
    if isinstance(edges, list | tuple):
        # Cuts are said in positions of the whole sequence. There the alignments of self-attention
        # are one, and the queries of cross-attention count by themselves.
        pairs: Any = [edges] if _is_pair(edges) else edges
        return masks.edges(pairs, align="start")
    rule = "is a Mask, (query, source) pairs, or a bool tensor: True is cut"
    if isinstance(edges, Tensor):
        got = f"{tuple(edges.shape)} of {edges.dtype}"
        hint = "pairs are an integer tensor of shape (n, 2)"
        raise type_error("edges", rule, got=got, hint=hint)
    raise no_mask("edges", edges, rule)


def listed(edges: Any) -> Any:
    """List the things that come one after another or are rows of numbers; leave others as is."""
    if isinstance(edges, Tensor):
        numbers = edges.dtype != torch.bool and not edges.dtype.is_floating_point
        pairs = numbers and edges.dim() == 2 and edges.shape[1] == 2
        return [tuple(pair) for pair in edges.tolist()] if pairs else edges
    whole = isinstance(edges, str | bytes | dict | tuple) or not isinstance(edges, Iterable)
    return edges if whole else list(edges)


def _is_pair(edges: Any) -> bool:
    return len(edges) == 2 and all(is_number(number) for number in edges)


@contextlib.contextmanager
def _block(name: str, model: Any, cut: Cut) -> Iterator[None]:
    with cutting(model, [cut]) as cutter:
        yield
    cutter.finish(name, cut)
