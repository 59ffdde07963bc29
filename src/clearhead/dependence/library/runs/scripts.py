"""A finding as a script that needs torch and transformers alone."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.dependence.library.friends.building import BuiltFriend
from clearhead.dependence.library.making import recipe
from clearhead.dependence.library.runs.contrasts import Contrast, given
from clearhead.dependence.library.runs.measuring import Compared

if TYPE_CHECKING:
    from clearhead.dependence.library.making import Built
    from clearhead.dependence.library.rows import Row

__all__ = ["reproduces", "written"]

# The largest number of lines; above it the comment stands beside the imports.
LONGEST = 15


def written(row: Row, built: Built, contrast: Contrast, sizes: Compared, says: str) -> str:
    """Write the script: it exits with 1 where the two runs differ by more than rounding."""
    limit = sizes.rounding if sizes.own else sizes.exact_rounding
    lines = [
        f"# {row.name}, {row.backend}: {says}",
        *_made(row, built),
        f"inputs = {_spelled(given(row, built))}"
        if sizes.own
        else f"model, inputs = model.double(), {_spelled(given(row, built))}",
        *(_of_a_dict(line, built) for line in contrast.lines),
        'print(f"the outputs differ by {(size := (one - two).abs().max().item()):.3g}; "'
        ' f"the largest of them is {one.abs().max().item():.3g}")',
        f"raise SystemExit(int(not size <= {limit:.2g}))",
    ]
    if len(lines) > LONGEST:
        lines[:2] = [f"{lines[1]}  {lines[0]}"]
    return "\n".join(lines) + "\n"


def _made(row: Row, built: Built) -> list[str]:
    """The lines that make `model`."""
    if not isinstance(built, BuiltFriend):
        return ["import torch, transformers", *recipe(built)]
    imports, seed, *made = built.recipe
    # torch has paths that it takes without gradients alone; a script about modes sets its own.
    no_grad = "" if row.form == "modes" else ", torch.set_grad_enabled(False)"
    return [imports, seed + no_grad, *made]


def _of_a_dict(line: str, built: Built) -> str:
    """Read the outputs of a friend, which are a plain dict."""
    return line.replace(".logits", "['logits']") if isinstance(built, BuiltFriend) else line


def reproduces(script: str) -> bool:
    """Run a script here, in a namespace of its own, and see whether it shows the fault."""
    silence = io.StringIO()
    state = torch.get_rng_state()
    try:
        with (
            contextlib.redirect_stdout(silence),
            contextlib.redirect_stderr(silence),
            torch.enable_grad(),  # whatever the script sets ends with it
        ):
            exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        return end.code == 1
    except Exception:  # the script fails where the model did not
        return False
    finally:
        torch.set_rng_state(state)
    return False


def _spelled(inputs: dict[str, Any]) -> str:
    """Write the inputs as Python."""
    items = (f'"{name}": {_value(value)}' for name, value in inputs.items())
    return f"{{{', '.join(items)}}}"


def _value(value: Any) -> str:
    return f"torch.tensor({value.tolist()})" if isinstance(value, Tensor) else repr(value)
