"""A layer under `torch.fx`: one node of the graph, as torch's own layers are."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

__all__ = ["node_of", "traces"]


def traces(*inputs: Any) -> bool:
    """Whether `torch.fx` traces a call with these inputs."""
    return any(isinstance(x, fx.Proxy) for x in inputs)


def node_of(layer: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Give the node of a call of the layer, which depends on values and is not traced."""
    tracer: Any = next(x.tracer for x in inputs if isinstance(x, fx.Proxy))
    given = {name: value for name, value in options.items() if value is not None}
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), inputs, given)  # pyright: ignore[reportAttributeAccessIssue]
