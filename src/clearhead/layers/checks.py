"""What `MultiheadAttention` accepts: every rule once, and what to do where it is broken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from clearhead import masks
from clearhead._core import Sizes, type_error, value_error, watchers
from clearhead.attention import warn_if_backwards
from clearhead.masks import MAY_ATTEND, Mask, no_mask

if TYPE_CHECKING:
    from clearhead.layers.multihead import MultiheadAttention


class Layout(NamedTuple):
    """The sizes of one call of a layer; `batched` is False for inputs without a batch axis."""

    batch: int
    heads: int
    query: int
    source: int
    batched: bool


def construction(
    embed_dim: Any, num_heads: Any, dropout: Any, kdim: int | None, vdim: int | None
) -> None:
    """Check the sizes and the probability that a layer is made with."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim}
    for name, size in sizes.items():
        if size is None and name in ("kdim", "vdim"):
            continue
        if not isinstance(size, int) or isinstance(size, bool):
            raise type_error(name, "is a whole number", got=type(size).__name__)
        if size <= 0:
            raise value_error(name, "is positive", got=size)
    if embed_dim % num_heads:
        raise value_error(
            "embed_dim",
            "is a whole multiple of num_heads",
            got=f"{embed_dim} for {num_heads} heads",
            hint=f"take embed_dim={(embed_dim // num_heads + 1) * num_heads}",
        )
    if not isinstance(dropout, (int, float)):
        raise type_error("dropout", "is a number", got=type(dropout).__name__)
    if not 0 <= dropout <= 1:
        raise value_error("dropout", "is a probability, 0 to 1", got=dropout)


def flags(**given: Any) -> None:
    """Check the switches of a call; a mask that slipped one place in the arguments ends here."""
    for name, value in given.items():
        if not isinstance(value, (bool, int, type(None))):
            raise type_error(
                name,
                "is True or False",
                got="a tensor" if isinstance(value, Tensor) else repr(value),
                hint="pass masks by name: mask=, attn_mask= or key_padding_mask=",
            )


def tensors(weight: Tensor, query: Any, key: Any, value: Any) -> None:
    """Check the types of the inputs against each other and against the layer's parameters."""
    given = {"query": query, "key": key, "value": value}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            hint = "wrap it in torch.as_tensor"
            raise type_error(name, "is a floating-point tensor", got=type(x).__name__, hint=hint)
        if not x.is_floating_point():
            hint = "embed token ids first; convert other numbers with .float()"
            raise type_error(name, "is a floating-point tensor", got=x.dtype, hint=hint)
        if x.layout not in (torch.strided, torch.jagged):
            raise type_error(name, "is a dense tensor", got=x.layout, hint=f"{name}.to_dense()")
        if x.dtype != weight.dtype and not _casts(x, weight):
            raise type_error(
                name,
                "has the dtype of the layer's parameters",
                got=f"{x.dtype} beside {weight.dtype}",
                hint=f"{name}.to({weight.dtype}), or layer.to({x.dtype})",
            )
        if x.device != weight.device:
            raise value_error(
                name,
                "is on the device of the layer's parameters",
                got=f"{x.device} beside {weight.device}",
                hint=f"{name}.to({str(weight.device)!r}), or layer.to({str(x.device)!r})",
            )
    if len({x.is_nested for x in given.values()}) > 1:
        nested_ones = [name for name, x in given.items() if x.is_nested]
        raise type_error(
            "query, key, value",
            "are all nested tensors or all dense ones",
            got=f"nested {' and '.join(nested_ones)} beside dense ones",
        )


def _casts(x: Tensor, weight: Tensor) -> bool:
    """Say whether autocast brings both to one dtype; float64 it leaves alone."""
    doubled = torch.float64 in (x.dtype, weight.dtype)
    return torch.is_autocast_enabled(x.device.type) and not doubled


def nested(layer: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, **rest: Any):
    """Check that nested inputs fit each other and come without what speaks of one size."""
    if not layer.batch_first:
        hint = "make the layer with batch_first=True"
        raise value_error("query", "may be nested only in a layer with batch_first=True", hint=hint)
    for name, given in rest.items():
        if given is not None:
            raise value_error(
                name,
                "does not go with nested tensors, whose samples have sizes of their own",
                hint="call the layer for each sample, or pad and pass key_padding_mask",
            )
    counts = [x.size(0) for x in (query, key, value)]
    if len(set(counts)) > 1:
        raise value_error("query, key, value", "have as many samples", got=counts)


def shapes(layer: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> Layout:
    """Check the shapes of the inputs and return the sizes of the call."""
    given = {"query": query, "key": key, "value": value}
    axes = "(batch, position, width)" if layer.batch_first else "(position, batch, width)"
    if query.ndim not in (2, 3):
        rule = f"is {axes}, or (position, width) without a batch"
        hint = "the layer makes the heads itself: flatten head and head_dim into the width"
        raise value_error("query", rule, shapes=given, hint=hint)
    for name, width in (
        ("query", layer.embed_dim),
        ("key", layer.kdim),
        ("value", layer.vdim),
    ):
        if given[name].ndim != query.ndim:
            hint = "give all three a batch axis, or none"
            raise value_error(name, "has as many axes as query", shapes=given, hint=hint)
        if given[name].shape[-1] != width:
            option = "embed_dim" if name == "query" else f"{name[0]}dim"
            got = given[name].shape[-1]
            raise value_error(
                name,
                f"has the width the layer was made for, {option}={width}",
                got=got,
                shapes=given,
                hint=f"project it to {width}, or make the layer with {option}={got}",
            )
    if query.ndim == 2:
        sizes = Layout(1, layer.num_heads, query.shape[0], key.shape[0], False)
        batches = (1, 1)
    else:
        at = 0 if layer.batch_first else 1
        sizes = Layout(
            query.shape[at], layer.num_heads, query.shape[1 - at], key.shape[1 - at], True
        )
        batches = (query.shape[at], key.shape[at])
    if batches[0] != batches[1]:
        raise value_error(
            "key",
            "has the batch size of query",
            got=f"{batches[1]} beside {batches[0]}",
            shapes=given,
            hint=f"the layer reads {axes} (batch_first={layer.batch_first}); "
            "expand the smaller batch, or transpose",
        )
    if key.shape[:-1] != value.shape[:-1]:
        hint = "give one value for each key"
        raise value_error("value", "has the axes of key except the width", shapes=given, hint=hint)
    return sizes


def torch_masks(sizes: Layout, query: Tensor, **given: Any) -> None:
    """Check key_padding_mask and attn_mask, in which True blocks and floats are added."""
    batch, heads, length, source, batched = sizes
    fitting = {
        "key_padding_mask": {"(batch, source)": (batch, source)}
        if batched
        else {"(source,)": (source,)},
        "attn_mask": {
            "(query, source)": (length, source),
            "(batch * head, query, source)": (batch * heads, length, source),
        },
    }
    for name, mask in given.items():
        if mask is None:
            continue
        _mask_type(name, mask)
        if mask.device != query.device:
            got = f"{mask.device} beside {query.device}"
            raise value_error(name, "is on the device of query", got=got)
        if tuple(mask.shape) not in fitting[name].values():
            rule = "is " + " or ".join(f"{axes} = {s}" for axes, s in fitting[name].items())
            raise value_error(
                name,
                rule,
                shapes={name: mask, "query": query},
                hint="masks of other shapes go into mask=, where True means may attend",
            )
        _no_disguise(name, mask)


def _mask_type(name: str, mask: Any) -> None:
    rule = "is a bool tensor (True = blocked) or a float tensor (added to the scores)"
    if isinstance(mask, Mask):
        raise type_error(name, rule, got=type(mask).__name__, hint="pass a Mask as mask=")
    if not isinstance(mask, Tensor):
        raise type_error(name, rule, got=type(mask).__name__, hint="wrap it in torch.as_tensor")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        hint = f"say which number blocks, for example {name} == 0"
        raise type_error(name, rule, got=mask.dtype, shapes={name: mask}, hint=hint)


def _no_disguise(name: str, mask: Tensor) -> None:
    """Refuse a float mask of zeros and ones, which is nearly always a bool mask in disguise.

    A mask that asks for a gradient is a learned bias, whatever it holds at the start.
    """
    if mask.dtype == torch.bool or mask.requires_grad or not mask.numel() or _hidden(mask):
        return
    low, high = torch.aminmax(mask)
    if high == 1 and low >= 0 and bool(((mask == 0) | (mask == 1)).all()):
        raise value_error(
            name,
            "holds only 0 and 1, which would be added to the scores and block nothing",
            shapes={name: mask},
            hint=f"pass {name} == 0 if 1 means may attend, {name} == 1 if 1 means blocked",
        )


def _hidden(x: Tensor) -> bool:
    """Say whether nobody knows the stored values, because the call is traced or has none."""
    return x.is_meta or bool(watchers())


def per_head(mask: Tensor, sizes: Layout) -> Tensor:
    """(batch * head, query, source) -> (batch, head, query, source)."""
    return mask.reshape(sizes.batch, sizes.heads, *mask.shape[1:]) if mask.ndim == 3 else mask


def padding(mask: Tensor | None, sizes: Layout) -> tuple[Tensor | None, Tensor | None]:
    """Split key_padding_mask into the sources that are real, and what is added to the scores."""
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        return ~mask, None
    # Whole encoder stacks turn their bool masks into floats; as edges they cost no sum of
    # (batch, query, source) beside a mask.
    if not (mask.requires_grad or _hidden(mask)):
        real = mask == 0
        if bool((real | (mask == -torch.inf)).all()):
            return real, None
    return None, mask.reshape(sizes.batch, 1, 1, sizes.source)


def as_mask(mask: Any, sizes: Layout) -> Mask:
    """Return `mask=` as a `Mask`; a bool tensor must broadcast to the scores."""
    if isinstance(mask, Mask):
        mask.check(Sizes(sizes.batch, sizes.heads, sizes.query, sizes.source))
        return mask
    if not isinstance(mask, Tensor):
        raise no_mask("mask", mask)
    if mask.dtype != torch.bool:
        float_hint = "floats that are added to the scores go into attn_mask="
        hint = float_hint if mask.is_floating_point() else "say which number may attend: mask == 1"
        raise type_error("mask", MAY_ATTEND, got=mask.dtype, shapes={"mask": mask}, hint=hint)
    batch, heads, query, source, batched = sizes
    whole = mask.unsqueeze(1) if mask.ndim == 3 and batched else mask
    target = (batch, heads, query, source)[max(4 - whole.ndim, 0) :]
    if whole.ndim not in (2, 3, 4) or any(
        size not in (1, full) for size, full in zip(whole.shape, target, strict=True)
    ):
        axes = "(batch, query, source)" if batched else "(head, query, source)"
        raise value_error(
            "mask",
            f"broadcasts to (query, source), {axes} or (batch, head, query, source)",
            shapes={"mask": mask, "scores": (batch, heads, query, source)},
            hint="make each axis 1 or the size of the scores; padding is masks.keep(real)",
        )
    warn_if_backwards(mask)
    whole = whole.expand(*whole.shape[:-2], query, source)
    return masks.dense(whole if whole.ndim != 3 else whole.unsqueeze(0))
