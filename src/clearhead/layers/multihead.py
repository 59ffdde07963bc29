"""The attention layer: `MultiheadAttention` in place of torch's, and `convert` for whole models."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from clearhead import masks
from clearhead._core import type_error, value_error
from clearhead.attention import attend
from clearhead.layers import checks as checks
from clearhead.masks import Block, Mask
from clearhead.readings import Reading, Weights

if TYPE_CHECKING:
    from clearhead._core import Sizes

__all__ = ["MultiheadAttention", "convert"]

ModelT = TypeVar("ModelT", bound=nn.Module)


class MultiheadAttention(nn.MultiheadAttention):
    """Project, attend with several heads, and project back, as `torch.nn.MultiheadAttention` does.

    >>> import torch, clearhead as ch
    >>> layer = ch.MultiheadAttention(embed_dim=8, num_heads=2, batch_first=True)
    >>> x = torch.randn(1, 4, 8)
    >>> output, weights = layer(x, x, x, is_causal=True)
    >>> output.shape, weights.shape
    (torch.Size([1, 4, 8]), torch.Size([1, 4, 4]))
    >>> output, entropy = layer(x, x, x, mask=ch.masks.window(3), read=ch.readings.Entropy())
    >>> entropy.shape
    torch.Size([1, 2, 4])

    Constructor, arguments of the call, parameters and state_dict are torch's. So are the answers,
    except where torch contradicts itself:

    - asking for weights changes nothing: output and gradients keep their bits;
    - a query that may attend to nothing gets context 0 (its output is the bias of out_proj);
    - `is_causal=True` means causal, with or without a mask, and is never taken for a mere hint;
    - weights are those before dropout, so that rows sum to one;
    - a misuse is a ValueError or TypeError, the same in training and evaluation.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.construction(embed_dim, num_heads, dropout, kdim, vdim)
        super().__init__(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn,
                         kdim, vdim, batch_first, device, dtype)  # fmt: skip
        _keep_off_fast_path(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        mask: Mask | Tensor | None = None,
        read: Reading | Sequence[Reading] | None = None,
    ) -> Any:
        """Return (output, weights), or (output, values of `read`) where `read` is given.

        Weights are averaged over the heads, (batch, query, source), or with
        `average_attn_weights=False` (batch, head, query, source); None with `need_weights=False`.
        The values mirror `read` as those of `attend` do and are always per head; then the two
        arguments about weights play no part: ask for `readings.Weights()` by name.

        Inputs are (query, batch, embed_dim), (batch, query, embed_dim) with `batch_first=True`, or
        (query, embed_dim) without a batch. All masks compose:

        - `mask`: a `Mask`, or a bool tensor with **True where a query may attend**, (query,
          source), (batch, query, source) or (batch, head, query, source).
        - `attn_mask`, (query, source) or (batch * head, query, source), and `key_padding_mask`,
          (batch, source), have torch's meaning: True blocks, floats are added to the scores.
        - `is_causal`: the same as `mask & masks.causal()`.

        Nested tensors (with `batch_first=True`) are attended sample by sample.
        """
        flags = {"need_weights": need_weights, "average_attn_weights": average_attn_weights}
        checks.flags(**flags, is_causal=is_causal)
        packed = self.in_proj_weight
        checks.tensors(self.q_proj_weight if packed is None else packed, query, key, value)
        if query.is_nested:
            checks.nested(self, query, key, value, key_padding_mask=key_padding_mask,
                          attn_mask=attn_mask, mask=mask, read=read)  # fmt: skip
            return self._each(query, key, value, **flags, is_causal=is_causal)
        sizes = checks.shapes(self, query, key, value)
        checks.torch_masks(sizes, query, key_padding_mask=key_padding_mask, attn_mask=attn_mask)

        real, added = checks.padding(key_padding_mask, sizes)
        edges = self._edges(sizes, mask, attn_mask, real, is_causal)
        bias = self._bias(sizes, attn_mask, added)
        q, k, v = (self._split(x, query.ndim) for x in self._project(packed, query, key, value))
        k, v = self._append(k, self.bias_k), self._append(v, self.bias_v)

        wanted = (Weights() if need_weights else None) if read is None else read
        dropout = self.dropout if self.training else 0.0
        answer = attend(q, k, v, edges, bias=bias, dropout=dropout, read=wanted)
        context, values = (answer, None) if wanted is None else answer
        output = self.out_proj(self._join(context, query.ndim))
        if query.ndim == 2 and values is not None:
            values = tree_map(lambda x: x.squeeze(0), values)
        if read is not None or values is None:
            return output, values
        weights = values.mean(-3) if average_attn_weights else values
        return output, weights.to(output.dtype)

    def _project(
        self, packed: Tensor | None, query: Tensor, key: Tensor, value: Tensor
    ) -> Sequence[Tensor]:
        bias = self.in_proj_bias
        if packed is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            return F.linear(query, packed, bias).chunk(3, -1)
        else:
            weights = packed.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(map(F.linear, (query, key, value), weights, biases))

    def _split(self, x: Tensor, rank: int) -> Tensor:
        """(position, embed_dim), with a batch axis or not -> (batch, head, position, head_dim)."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if rank == 2:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _join(self, x: Tensor, rank: int) -> Tensor:
        """Undo `_split`."""
        if rank == 2:
            return x.squeeze(0).transpose(0, 1).flatten(-2)
        return (x.transpose(1, 2) if self.batch_first else x.permute(2, 0, 1, 3)).flatten(-2)

    @property
    def _appended(self) -> int:
        """How many sources the layer itself puts behind the sequence."""
        return (self.bias_k is not None) + bool(self.add_zero_attn)

    def _append(self, x: Tensor, learned: Tensor | None) -> Tensor:
        """Append the learned source of `add_bias_kv` and the zeros of `add_zero_attn`."""
        batch, heads, _, width = x.shape
        if learned is not None:
            row = learned.to(x.dtype).view(1, heads, 1, width).expand(batch, -1, -1, -1)
            x = torch.cat([x, row], -2)
        return F.pad(x, (0, 0, 0, 1)) if self.add_zero_attn else x

    def _edges(
        self,
        sizes: checks.Layout,
        mask: Mask | Tensor | None,
        attn_mask: Tensor | None,
        real: Tensor | None,
        is_causal: bool,
    ) -> Mask | None:
        """Put together all that blocks: the edges that each query may use."""
        parts: list[Mask] = [masks.causal()] if is_causal else []
        if mask is not None:
            parts.append(checks.as_mask(mask, sizes))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            parts.append(masks.dense(~checks.per_head(attn_mask, sizes)))
        if real is not None:
            parts.append(masks.keep(real))
        if not parts:
            return None
        edges = functools.reduce(operator.and_, parts)
        return _Appended(edges, self._appended) if self._appended else edges

    def _bias(
        self, sizes: checks.Layout, attn_mask: Tensor | None, added: Tensor | None
    ) -> Tensor | None:
        """Put together all that is added to the scores."""
        parts = [] if added is None else [added]
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            parts.append(checks.per_head(attn_mask, sizes))
        if not parts:
            return None
        bias = functools.reduce(operator.add, parts)
        return F.pad(bias, (0, self._appended)) if self._appended else bias

    def _each(self, query: Tensor, key: Tensor, value: Tensor, **flags: Any) -> Any:
        """Attend in each sample of nested tensors on its own."""
        same = query is key and key is value
        triples = zip(query.unbind(), key.unbind(), value.unbind(), strict=True)
        answers = [self.forward(q, *((q, q) if same else (k, v)), **flags) for q, k, v in triples]
        outputs, weights = zip(*answers, strict=True)
        output = torch.nested.as_nested_tensor(list(outputs), layout=query.layout)
        return output, _pad_together(weights) if flags["need_weights"] else None


class _Appended(Mask):
    """The edges of a mask; the sources that the layer itself appends are open to every query."""

    def __init__(self, inner: Mask, extra: int):
        self.inner, self.extra = inner, extra
        source = inner.own.source
        self.own = inner.own._replace(source=None if source is None else source + extra)
        self._calls = inner._calls

    def to(self, device: torch.device | str) -> Mask:
        return _Appended(self.inner.to(device), self.extra)

    def check(self, sizes: Sizes) -> None:
        self.inner.check(self._before(sizes))

    def _before(self, sizes: Sizes) -> Sizes:
        return sizes._replace(source=sizes.source - self.extra)

    def _text(self, full: bool) -> str:
        return f"appended({self.inner._text(full)}, {self.extra})"

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        before = self._before(sizes)
        if before.source == 0:
            return (i == i) & (j == j)
        inside = self.inner._at(b, h, i, j.clamp(max=before.source - 1), before)
        return inside | (j >= before.source)

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        before, added = self._before(sizes), columns >= sizes.source - self.extra
        if before.source == 0:
            return added.expand(len(rows), -1)
        within = None if within is None else within & ~added
        return self.inner._tile(rows, columns.clamp(max=before.source - 1), before, within) | added

    def _block(
        self, top: int, bottom: int, left: int, right: int, query: int, source: int
    ) -> Block:
        before = source - self.extra
        if left >= before:
            return Block.FULL
        inside = self.inner._block(top, bottom, left, min(right, before), query, before)
        return inside if right <= before or inside == Block.FULL else Block.PARTIAL


def _pad_together(weights: Sequence[Tensor]) -> Tensor:
    """Stack the weights of samples of several sizes; what is not there has weight 0."""
    query, source = (max(w.shape[axis] for w in weights) for axis in (-2, -1))
    return torch.stack(
        [F.pad(w, (0, source - w.shape[-1], 0, query - w.shape[-2])) for w in weights]
    )


def _keep_off_fast_path(layer: nn.MultiheadAttention) -> None:
    # nn.TransformerEncoderLayer reads this attribute to decide whether it may bypass the layer
    # with one fused kernel of its own. The parameters are where they always are.
    layer._qkv_same_embed_dim = False


def convert(model: ModelT) -> ModelT:
    """Turn every `torch.nn.MultiheadAttention` in a model into ours, in place; return the model.

    >>> import torch, clearhead as ch
    >>> encoder = torch.nn.TransformerEncoder(
    ...     torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), num_layers=2)
    >>> type(ch.convert(encoder).layers[0].self_attn).__module__
    'clearhead.layers.multihead'

    The layers stay the same objects with another class: parameters (also an optimizer's), hooks,
    shared layers, parametrizations, pruning, training mode, dtype and device are as they were.
    `nn.TransformerEncoder` and `nn.TransformerEncoderLayer` no longer bypass their layers in
    evaluation, so that they answer as in training, padded rows included.

    Subclasses of `nn.MultiheadAttention` and layers whose `forward` was replaced are refused by
    name, before anything is changed. A model that has been converted may be converted again.
    """
    if not isinstance(model, nn.Module):
        raise type_error("model", "is a torch.nn.Module", got=type(model).__name__)
    found = {n: m for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    if not found:
        raise value_error(
            "model",
            "holds at least one torch.nn.MultiheadAttention",
            got=f"{type(model).__name__} without any",
            hint="models with attention of their own are watched as they are: clearhead.watch",
        )
    if reasons := [why for name, layer in found.items() if (why := _why_not(name, layer))]:
        raise value_error(
            "model", "holds layers that cannot be converted:\n  " + "\n  ".join(reasons)
        )
    for layer in found.values():
        _change_class(layer)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            # Otherwise it packs padded batches for the fused kernel and returns zeros there.
            module.use_nested_tensor = False
    return model


def _why_not(name: str, layer: nn.MultiheadAttention) -> str | None:
    where, kind = name or "the model itself", parametrize.type_before_parametrizations(layer)
    if "forward" in vars(layer):
        return f"{where}: its forward was replaced by another function; put the method back first"
    if kind is not nn.MultiheadAttention and not issubclass(kind, MultiheadAttention):
        return (
            f"{where}: {kind.__name__} is a subclass; derive it from clearhead.MultiheadAttention"
        )
    return None


def _change_class(layer: nn.MultiheadAttention) -> None:
    if isinstance(layer, MultiheadAttention):
        return
    kind: Any = MultiheadAttention
    if parametrize.is_parametrized(layer):
        # Its class was made for this layer alone, with a property for each parametrized tensor.
        own = {n: x for n, x in vars(type(layer)).items() if n not in ("__dict__", "__weakref__")}
        kind = type(type(layer).__name__, (MultiheadAttention,), own)
    layer.__class__ = kind
    _keep_off_fast_path(layer)
