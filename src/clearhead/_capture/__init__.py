"""How the attention calls of a model are intercepted, read and put together."""

from __future__ import annotations

from clearhead._capture import attach, joined, recompute
from clearhead._capture.call import Call, from_sdpa
from clearhead._capture.calling import call_with
from clearhead._capture.intercept import Handler, Interceptor, Loop
from clearhead._capture.modules import Modules, nothing_seen, two_sided
from clearhead._capture.provenance import SOFTMAXES

__all__ = [
    "SOFTMAXES",
    "Call",
    "Handler",
    "Interceptor",
    "Loop",
    "Modules",
    "attach",
    "call_with",
    "from_sdpa",
    "joined",
    "nothing_seen",
    "recompute",
    "two_sided",
]
