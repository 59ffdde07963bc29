"""Calls of `distributed.attend` as `watch`, `knockout` and `monitor` see them inside of a model.

Each rank sees its own queries beside the keys and values of all ranks, which it gathers for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from clearhead._capture import FusedCall, Place, from_attend, intercept_calls
from clearhead._core import Sizes, value_error
from clearhead.attention import Corner
from clearhead.distributed.link import Link
from clearhead.distributed.section import Section
from clearhead.masks import Mask
from clearhead.readings import Reading

__all__ = ["observed"]

_Attend = Callable[..., Any]


def observed(attend: _Attend) -> _Attend:
    """Let the calls of `attend` over ranks be seen in a model that is watched."""

    @functools.wraps(attend)
    def seen(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any) -> Any:
        if has_torch_function((query, key, value)):
            given = (query, key, value, mask)
            return handle_torch_function(seen, given[:3], *given, **options)
        return attend(query, key, value, mask, **options)

    intercept_calls(seen, functools.partial(_described, attend))
    return seen


@dataclass(frozen=True)
class _OverRanks:
    """The whole of a call, and how its readings are taken: by the same call once more."""

    first: int
    sizes: Sizes
    mask: Mask | None
    bias: Tensor | None
    section: Mask | None  # the mask of this rank's rows
    sources: slice  # of this rank
    attend: _Attend
    options: dict[str, Any]

    def read(self, call: FusedCall, wanted: Sequence[Reading]) -> list[Any]:
        """Give one value for each reading, of the heads and samples of the call."""
        if call.mask is not self.section:
            rule = "is taken under the model's own mask where other ranks have the other queries"
            raise value_error("read", rule, hint="watch all heads, and outside of a cut")
        key, value = (x[:, :, self.sources] for x in (call.key, call.value))
        tensors = (call.query, key, value, self.mask)
        options = {**self.options, "sinks": call.sinks, "bias": self.bias}
        return list(self.attend(*tensors, read=tuple(wanted), **options)[1])


def _described(
    attend: _Attend, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *,
    read: Any = None, group: Any = None, **options: Any,
) -> FusedCall:  # fmt: skip
    """Describe a call: its own queries, and the sources of all ranks, which all of them gather."""
    link = Link(group, "distributed.attend")
    told = _told(link, query, key, value)
    counts = [said["queries"] for said in told]
    first, many = sum(counts[: link.rank]), sum(counts)
    keys, values = (torch.cat([said["sources"][at] for said in told], -2) for at in (0, 1))
    # It takes no memory: only its shape counts.
    every = query.detach().new_zeros(()).expand(*query.shape[:-2], many, query.shape[-1])
    whole = from_attend(every, keys, values, mask, **options)
    corner = Corner(0, first, 0, whole.sizes)
    own = query.reshape(whole.sizes.batch, whole.sizes.head, *query.shape[-2:])
    section = None
    if whole.mask is not None:
        _, heads, _, sources_of_all = whole.sizes
        section = Section(whole.mask, corner, heads, counts[link.rank], sources_of_all)
    rest = {name: options[name] for name in ("scale", "softcap") if name in options}
    rest["group"] = group
    before = sum(said["sources"][0].shape[-2] for said in told[: link.rank])
    own_sources = slice(before, before + key.shape[-2])
    spread = _OverRanks(
        first, whole.sizes, whole.mask, whole.bias, section, own_sources, attend, rest
    )
    bias = whole.bias if whole.bias is None else whole.bias[:, :, first : first + own.shape[2]]
    return replace(
        whole, query=own, mask=section, bias=bias, spread=spread, how="distributed.attend",
        place=Place(query=(first, many)),
    )  # fmt: skip


def _told(link: Link, query: Tensor, key: Tensor, value: Tensor) -> list[dict[str, Any]]:
    """Exchange keys and values; a rank that is not watched takes the message for a refusal."""
    here = {
        "refused": "the model is watched on that rank, and not on all",
        "queries": query.shape[-2],
        "sources": (key.detach(), value.detach()),
    }
    told = link.gather(here)
    for rank, said in enumerate(told):
        if "sources" not in said:
            got = f"rank {link.name(rank)}, which is not"
            raise value_error("model", "is watched on all ranks that attend together", got=got)
    return told
