"""How the attention calls of a model are intercepted, described, and read again."""

from __future__ import annotations

from clearhead._capture.attach import active_handlers, attached
from clearhead._capture.axes import Place
from clearhead._capture.call import (
    Call,
    EagerCall,
    FusedCall,
    dense_edges,
    plain_call,
    unmasked,
    wide,
)
from clearhead._capture.calling import call_with, nothing_seen, watchable
from clearhead._capture.describe import from_attend, from_sdpa
from clearhead._capture.handler import Handler, in_short
from clearhead._capture.intercept import (
    FusedInterceptor,
    Interceptor,
    NamedInterceptor,
    intercept_calls,
)
from clearhead._capture.modules import Modules, moves_positions
from clearhead._capture.provenance import SOFTMAXES
from clearhead._capture.recompute import (
    call_mask,
    call_strip,
    context_difference,
    read_call,
    rounding_bound,
    shared_mask,
    softmax_difference,
)
from clearhead._capture.transformers import Loop, last_query, prompt_length, two_sided

__all__ = [
    "SOFTMAXES",
    "Call",
    "EagerCall",
    "FusedCall",
    "FusedInterceptor",
    "Handler",
    "Interceptor",
    "Loop",
    "Modules",
    "NamedInterceptor",
    "Place",
    "active_handlers",
    "attached",
    "call_mask",
    "call_strip",
    "call_with",
    "context_difference",
    "dense_edges",
    "from_attend",
    "from_sdpa",
    "in_short",
    "intercept_calls",
    "last_query",
    "moves_positions",
    "nothing_seen",
    "plain_call",
    "prompt_length",
    "read_call",
    "rounding_bound",
    "shared_mask",
    "softmax_difference",
    "two_sided",
    "unmasked",
    "watchable",
    "wide",
]
