"""All cases of the ONNX operator `Attention`, by its own test data, through attend().

The way from ONNX's attributes to `attend` is the adapter here: masks, windows and caches become
masks of the library, and the four modes of `qk_matmul_output` are readings of four calls.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from clearhead import masks, readings

DOUBLE = 11  # onnx.TensorProto.DOUBLE
INPUTS = ("query", "key", "value", "mask", "past_key", "past_value", "lengths")


def _collect() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other operators' data overflow on purpose
        cases: list[Any] = collect_testcases("Attention")
    return [case for case in cases if case.model.graph.node[0].op_type == "Attention"]


CASES = {case.name: case for case in _collect() if not case.name.endswith("_expanded")}


def test_there_are_93() -> None:
    assert len(CASES) == 93


@pytest.mark.parametrize("name", CASES)
def test_case(implementation: Any, name: str) -> None:
    case = CASES[name]
    node = case.model.graph.node[0]
    arrays, expected = case.data_sets[0]
    given: dict[str, Any] = dict(
        zip(INPUTS, _place(node.input, map(_tensor, arrays)), strict=False)
    )
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    ours = _onnx_attention(implementation, given, attributes)
    exact = _onnx_attention(implementation, {n: _double(x) for n, x in given.items()}, attributes)
    checked = 0
    for got, right, sure in zip(ours, _place(node.output, expected), exact, strict=False):
        if right is None:
            continue
        checked += 1
        right = _tensor(right)
        assert got.shape == right.shape
        assert got.dtype == right.dtype
        # Half precision in ONNX rounds at every step, so its own error is the yardstick there.
        off = (right.double() - sure.double()).abs().nan_to_num(0, 0, 0).max().item()
        own = 0.0 if right.dtype == torch.float32 else 2 * off
        torch.testing.assert_close(got, right, rtol=case.rtol, atol=max(1e-6, own))
    assert checked == len(expected)


def _place(names: Any, values: Any) -> list[Any]:
    """Put the values at the names that are there; the others are None."""
    values = iter(values)
    return [next(values) if name else None for name in names]


def _tensor(array: Any) -> Tensor:
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.ascontiguousarray(array))


def _double(x: Tensor | None) -> Tensor | None:
    return x.double() if x is not None and x.is_floating_point() else x


def _onnx_attention(attend: Any, given: dict[str, Any], attributes: dict[str, Any]) -> list[Tensor]:
    """Return (Y, present_key, present_value, qk_matmul_output) as the operator defines them."""
    query, key, value = given["query"], given["key"], given["value"]
    flat = query.ndim == 3
    if flat:
        query = query.unflatten(-1, (attributes["q_num_heads"], -1)).transpose(1, 2)
        sources = attributes["kv_num_heads"]
        key, value = (x.unflatten(-1, (sources, -1)).transpose(1, 2) for x in (key, value))
    past = 0
    if given.get("past_key") is not None:
        past = given["past_key"].shape[2]
        key = torch.cat([given["past_key"], key], 2)
        value = torch.cat([given["past_value"], value], 2)

    samples = []
    for b in range(query.shape[0]):
        # The position of the first query differs from sample to sample where lengths are given.
        length, offset = key.shape[2], past
        if given.get("lengths") is not None:
            length = int(given["lengths"][b])
            offset = length - query.shape[2]
        mask = _mask(attributes, length, offset, key.shape[2])
        tensor = _padded(given.get("mask"), b, key.shape[2])
        one = [x[b : b + 1] for x in (query, key, value)]
        samples.append(_one(attend, one, mask, tensor, attributes))
    context, qk = (torch.cat(parts) for parts in zip(*samples, strict=True))
    if flat:
        context = context.transpose(1, 2).flatten(2)
    dtype = given["query"].dtype
    return [context.to(dtype), key, value, qk.to(dtype)]


def _mask(attributes: dict[str, Any], length: int, offset: int, sources: int) -> masks.Mask:
    mask = masks.lengths([length])
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if attributes.get("is_causal"):
        mask = mask & masks.causal(offset)
    if max(left, right) >= 0:
        far = sources + abs(offset) + 1
        before, after = (far if size < 0 else size for size in (left, right))
        mask = mask & masks.band(before, after, align=offset)
    return mask


def _padded(mask: Tensor | None, b: int, sources: int) -> Tensor | None:
    """Return the sample's mask or bias; what lacks on the right is blocked."""
    if mask is None:
        return None
    if mask.ndim == 4:
        mask = mask[min(b, mask.shape[0] - 1)]
    fill = False if mask.dtype == torch.bool else -torch.inf
    more = mask.new_full((*mask.shape[:-1], sources - mask.shape[-1]), fill)
    return torch.cat([mask, more], -1)


def _one(
    attend: Any,
    inputs: list[Tensor],
    mask: masks.Mask,
    tensor: Tensor | None,
    attributes: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    if attributes.get("softmax_precision") == DOUBLE:
        inputs = [x.double() for x in inputs]
    plain = {"scale": attributes.get("scale")}
    softcap = {"softcap": attributes.get("softcap") or None}
    blocked: dict[str, Any] = {"mask": mask}
    if tensor is not None and tensor.dtype == torch.bool:
        blocked["mask"] = mask & masks.dense(_query_rows(tensor, inputs[0].shape[2]))
    elif tensor is not None:
        blocked["bias"] = tensor
    whole = plain | softcap | blocked
    mode = attributes.get("qk_matmul_output_mode", 0)
    reading = readings.Weights() if mode == 3 else readings.Scores()
    context = attend(*inputs, **whole)
    _, qk = attend(*inputs, **(plain, plain | softcap, whole, whole)[mode], read=reading)
    return context, qk


def _query_rows(mask: Tensor, queries: int) -> Tensor:
    """Return (query, source) or (1, head, query, source), as masks.dense takes them."""
    mask = mask.expand(*mask.shape[:-2], queries, mask.shape[-1])
    return mask[None] if mask.ndim == 3 else mask
