"""What is done with the attention calls of a model: the protocol of a handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from clearhead._capture.call import Call

if TYPE_CHECKING:
    from clearhead._capture.transformers import Loop

__all__ = ["Handler", "in_short"]


class Handler:
    """Reads the attention calls of a model, or replaces their contexts.

    For each call `before` is called ahead of the kernel, and not for handwritten attention; `after`
    is called with the context. Either may return another context, or None to keep the model's own.
    All tensors are `(batch, head, position, ...)`.

    Handlers on the same model do not know each other. Where one of them edits attention
    (`edits` is True), another one asks it with `remaining` what is left of a call.
    """

    reads_values = True  # False where shapes are enough, so that the model may have no values
    names_kernels = False  # whether it may leave the mode: see `NamedInterceptor`
    edits = False  # whether it may return contexts that the model itself would not have made

    def before(self, call: Call) -> Tensor | None:
        """Return a context in place of the model's own kernel, or None to run that kernel."""

    def after(self, call: Call, context: Tensor) -> Tensor | None:
        """Read the context that was made; return another one, or None to keep it."""

    def remaining(self, call: Call, *, edited: bool) -> Call | None:
        """Give a call as this handler leaves it, or None where it does not touch the call.

        `edited` tells whether `after` of this handler has already run for the call.
        """

    def unseen(self, module: str, reason: str) -> None:
        """Receive the reason why something that looks like attention cannot be seen."""

    def failed(self, module: str, reason: str) -> None:
        """Receive the reason why a call of attention cannot be read, and runs as it is."""
        self.unseen(module, reason)

    def elsewhere(self, module: str, reason: str) -> None:
        """Receive how weights of a call meet a value in a product that is no call."""
        self.unseen(module, reason)

    def joined(self, modules: list[str]) -> None:
        """Receive modules of one head each whose contexts are concatenated."""

    def module_starts(self, name: str) -> None:
        """Receive the name of a module of the model that starts to run."""

    def module_ends(self, name: str, positions: Callable[[], int | None]) -> None:
        """Receive the name of a module that has run, and what tells on how many positions."""

    def generate(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's own `generate`."""
        return run(*args, **kwargs)

    def loop_starts(self, loop: Loop) -> None:
        """Receive a loop of `generate` that starts."""

    def loop_ends(self, sequences: Tensor, rows: Tensor | None) -> None:
        """Receive the sequences that a loop made, and for beams the rows that they came from."""


def in_short(error: Exception) -> str:
    """Give the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
