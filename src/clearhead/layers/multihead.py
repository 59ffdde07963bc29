"""`MultiheadAttention`: a drop-in replacement for torch's layer, with masks and readings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from clearhead.attention import attend
from clearhead.layers import checks
from clearhead.layers.mask_arguments import MaskArguments
from clearhead.layers.tracing import node_of, traces
from clearhead.masks import Mask
from clearhead.readings import Reading, Weights

__all__ = ["MultiheadAttention"]

# The module whose encoders replace their layers by one fused call.
_BYPASSES = nn.TransformerEncoderLayer.__module__


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

    The constructor, the arguments of the call, the parameters and the state_dict are torch's. So
    are the outputs, except where torch contradicts itself:

    - asking for weights changes nothing: output and gradients keep their bits;
    - a query that may attend to nothing gets context 0 (its output is the bias of out_proj);
    - `is_causal=True` means causal, with or without a mask, and is never a mere hint;
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

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """Whether query, key and value share `in_proj_weight`, as in torch's own layer.

        `nn.TransformerEncoder` and its layers bypass an attention layer for which this is true:
        they alone, and a compiler that traces them, read False.
        """
        asks = torch.compiler.is_compiling() or sys._getframe(1).f_globals.get("__name__")
        return asks not in (True, _BYPASSES) and vars(self)["_qkv_same_embed_dim"]

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        vars(self)["_qkv_same_embed_dim"] = value

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
        The values mirror `read` as those of `attend` do and are always per head. The two
        arguments about weights are then ignored: ask for `readings.Weights()` by name.

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
        if traces(query, key, value):
            return node_of(
                self, query, key, value, key_padding_mask=key_padding_mask, attn_mask=attn_mask,
                is_causal=is_causal, mask=mask, read=read, **flags,
            )  # fmt: skip
        checks.flags(**flags, is_causal=is_causal)
        packed = self.in_proj_weight
        checks.tensors(self.q_proj_weight if packed is None else packed, query, key, value)
        if query.is_nested:
            checks.nested(self, query, key, value, key_padding_mask=key_padding_mask,
                          attn_mask=attn_mask, mask=mask, read=read)  # fmt: skip
            return self._each(query, key, value, **flags, is_causal=is_causal)
        sizes = checks.shapes(self, query, key, value)
        arguments = MaskArguments(sizes, query, mask, attn_mask, key_padding_mask, is_causal)

        wanted = (Weights() if need_weights else None) if read is None else read
        context, values = self._attend(packed, (query, key, value), arguments, wanted)
        output = self.out_proj(self._join(context, query.ndim))
        if query.ndim == 2 and values is not None:
            values = tree_map(lambda x: x.squeeze(0), values)
        if read is not None or values is None:
            return output, values
        weights = values.mean(-3) if average_attn_weights else values
        return output, weights.to(output.dtype)

    def _attend(
        self,
        packed: Tensor | None,
        inputs: tuple[Tensor, Tensor, Tensor],
        arguments: MaskArguments,
        read: Reading | Sequence[Reading] | None,
    ) -> tuple[Tensor, Any]:
        """Project the inputs and attend; return the context and the values of `read`."""
        edges, bias = arguments.edges(self._appended), arguments.bias(self._appended)
        rank = inputs[0].ndim
        q, k, v = (self._split(x, rank) for x in self._project(packed, *inputs))
        k, v = self._append(k, self.bias_k), self._append(v, self.bias_v)
        dropout = self.dropout if self.training else 0.0
        answer = attend(q, k, v, edges, bias=bias, dropout=dropout, read=read)
        return (answer, None) if read is None else answer

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
        """The number of sources that the layer itself appends to the sequence."""
        return (self.bias_k is not None) + bool(self.add_zero_attn)

    def _append(self, x: Tensor, learned: Tensor | None) -> Tensor:
        """Append the learned source of `add_bias_kv` and the zeros of `add_zero_attn`."""
        batch, heads, _, width = x.shape
        if learned is not None:
            row = learned.to(x.dtype).view(1, heads, 1, width).expand(batch, -1, -1, -1)
            x = torch.cat([x, row], -2)
        return F.pad(x, (0, 0, 0, 1)) if self.add_zero_attn else x

    def _each(self, query: Tensor, key: Tensor, value: Tensor, **flags: Any) -> Any:
        """Attend within each sample of nested tensors."""
        same = query is key and key is value
        triples = zip(query.unbind(), key.unbind(), value.unbind(), strict=True)
        answers = [self.forward(q, *((q, q) if same else (k, v)), **flags) for q, k, v in triples]
        outputs, weights = zip(*answers, strict=True)
        output = torch.nested.as_nested_tensor(list(outputs), layout=query.layout)
        return output, _pad_together(weights) if flags["need_weights"] else None


def _pad_together(weights: Sequence[Tensor]) -> Tensor:
    """Stack the weights of samples of several sizes, padded with zeros."""
    query, source = (max(w.shape[axis] for w in weights) for axis in (-2, -1))
    return torch.stack(
        [F.pad(w, (0, source - w.shape[-1], 0, query - w.shape[-2])) for w in weights]
    )
