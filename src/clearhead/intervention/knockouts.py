"""Cut attention in a running model: edges before the softmax, weights after it, or whole heads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from clearhead._core import value_error
from clearhead.intervention.cuts import Cut, EdgeCut, WeightCut
from clearhead.intervention.cutter import cutting
from clearhead.intervention.outputs import HOW, Ablation, contexts
from clearhead.intervention.selection import Heads, Model, as_edges, select_heads
from clearhead.masks import Mask

__all__ = ["ablate", "knockout", "zero_weights"]


@contextlib.contextmanager
def knockout(
    model: Model,
    edges: Mask | Tensor | Iterable[tuple[int, int]],
    heads: Heads = None,
    *,
    layers: int | Sequence[int] | None = None,
) -> Iterator[Cut]:
    """Cut edges before the softmax of every attention call that a model makes inside the block.

    >>> import torch, clearhead as ch
    >>> model = ch.models.load()
    >>> tokens = model.vocabulary.encode("hell")[None]
    >>> with torch.no_grad(), ch.knockout(model, ch.masks.diagonal(1), heads=[(0, 2)]):
    ...     blind = model(tokens)

    The softmax runs over the edges that remain (attention knockout, Geva et al. 2023, "Dissecting
    Recall of Factual Associations"). A row without any has context 0, as under
    `ablate(how="zero")`. Heads and rows that lose no edge keep the bits of the model's own kernel.

    - `edges`: (query, source) pairs, as `[(3, 0)]` or an integer tensor (n, 2), a `Mask` or a bool
      tensor; in positions of the whole sequence, also in steps with a cache. In `generate()`
      positions may lie ahead of the current step; elsewhere they are a ValueError.
    - `heads`: head numbers, in all of `layers`, or (layer, head) pairs. All unless given.
    - `layers`: numbers of the attention modules in order of first call, as `watch` counts them.

    The block yields the cut; its `moved` has the largest change of the output of each (layer,
    head). A block that changed nothing raises a RuntimeError on leaving; a layer or head that the
    model does not have is a ValueError.
    """
    cut = EdgeCut(as_edges(edges), select_heads(layers, heads))
    with _block("knockout", model, cut):
        yield cut


@contextlib.contextmanager
def zero_weights(
    model: Model,
    edges: Mask | Tensor | Iterable[tuple[int, int]],
    heads: Heads = None,
    *,
    layers: int | Sequence[int] | None = None,
) -> Iterator[Cut]:
    """Set weights to zero after the softmax: the weights of the other edges stay as they were.

    >>> import torch, clearhead as ch
    >>> x = torch.randn(1, 3, 4)
    >>> with ch.zero_weights(ch.attend, ch.masks.everything()):
    ...     ch.attend(x, x, x).abs().max()
    tensor(0.)

    Rows then sum to less than one. Arguments and errors are those of `knockout`.
    """
    cut = WeightCut(as_edges(edges), select_heads(layers, heads))
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
    - `seed`: of the draw, which leaves torch's RNG state alone.

    Errors are those of `knockout`.
    """
    if how not in HOW:
        raise value_error("how", f"is one of {', '.join(HOW)}", got=repr(how))
    if how == "zero" and reference is not None:
        raise value_error(
            "reference", "is not used with how='zero'", hint="how='mean', or 'resample'"
        )
    outputs = None if reference is None else contexts(model, reference)
    cut = Ablation(how, outputs, seed, select_heads(layers, heads))
    with _block("ablate", model, cut):
        yield cut


@contextlib.contextmanager
def _block(name: str, model: Any, cut: Cut) -> Iterator[None]:
    with cutting(model, [cut]) as cutter:
        yield
    cutter.finish(name, cut)
