"""The peers: each takes the same query, key, value and mask, and returns the same context.

`PEERS[name](q, k, v, mask)` prepares a call (what it prepares is not timed) or says why it cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead import masks
from measure import Way

Peer = Callable[[Tensor, Tensor, Tensor, masks.Mask | None], Way]


class Missing(Exception):
    """A peer is not installed, or does not support this kind of call."""


def ways(
    names: Iterable[str], q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None = None
) -> tuple[dict[str, Way], str]:
    """The named peers that support the call, and a note on those that do not."""
    found, missing = {}, []
    for name in names:
        try:
            found[name] = PEERS[name](q, k, v, mask)
        except Missing as reason:
            missing.append(f"{name}: {reason}")
    return found, "; ".join(missing)


def is_causal(mask: masks.Mask | None) -> bool:
    return repr(mask) == repr(masks.causal())


def dense(q: Tensor, k: Tensor, mask: masks.Mask | None) -> Tensor | None:
    return None if mask is None else mask.dense(q.shape[-2], k.shape[-2])


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None) -> Way:
    """torch's fused kernel, with `is_causal` where the mask is exactly causal."""
    if is_causal(mask) and q.shape[-2] == k.shape[-2]:
        return partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    return sdpa_bool(q, k, v, mask)


def sdpa_bool(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None) -> Way:
    """torch's fused kernel with a bool tensor."""
    return partial(F.scaled_dot_product_attention, q, k, v, attn_mask=dense(q, k, mask))


def weights_and_context(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Eager attention, which returns its weights, as most models write it."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    weights = scores.softmax(-1)
    return weights @ v, weights


def eager(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None) -> Way:
    """Eager attention, context alone."""
    allowed = dense(q, k, mask)
    return lambda: weights_and_context(q, k, v, allowed)[0]


def eager_weights(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None) -> Way:
    """Eager attention with the weights."""
    return partial(weights_and_context, q, k, v, dense(q, k, mask))


def flex(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None) -> Way:
    """Compiled FlexAttention; neither compilation nor the block mask is timed."""
    from torch.nn.attention.flex_attention import flex_attention

    # Compile anew for these sizes: after eight recompilations torch silently runs it eagerly.
    torch.compiler.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    blocks = None if mask is None else mask.to_flex(q.shape[-2], k.shape[-2])
    call = partial(compiled, q, k, v, block_mask=blocks)
    try:
        call()
    except Exception as reason:  # no C++ compiler, or an unsupported mask: torch raises many types
        raise Missing(str(reason).strip().splitlines()[0][:90]) from None
    return call


def onnxruntime(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None) -> Way:
    """onnxruntime's MultiHeadAttention, on its own layout (batch, position, head * head_dim)."""
    if mask is not None and not is_causal(mask):
        raise Missing("no mask of this kind")
    if q.dtype != torch.float32:
        raise Missing(f"no {str(q.dtype).removeprefix('torch.')} on CPUs")
    session = _session(q.shape[1], is_causal(mask), torch.get_num_threads())
    given = {
        name: x.transpose(1, 2).flatten(2).contiguous().numpy()
        for name, x in zip(("query", "key", "value"), (q, k, v), strict=True)
    }

    def call() -> Tensor:
        joined = torch.from_numpy(session.run(None, given)[0])
        return joined.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)

    return call


def _session(head: int, causal: bool, threads: int) -> Any:
    try:
        import onnxruntime as runtime
        from onnx import TensorProto, helper
    except ImportError:
        raise Missing("not installed") from None
    describe = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=[None] * 3)
    names = ["query", "key", "value"]
    node = helper.make_node(
        "MultiHeadAttention", names, ["context"], domain="com.microsoft",
        num_heads=head, unidirectional=int(causal),
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "attention", [describe(name) for name in names], [describe("context")]
    )
    versions = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=10)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    # Its spinning threads would take a core from the next way.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


PEERS: dict[str, Peer] = {
    "SDPA": sdpa,
    "SDPA, bool tensor": sdpa_bool,
    "eager": eager,
    "eager with weights": eager_weights,
    "flex": flex,
    "onnxruntime": onnxruntime,
}
