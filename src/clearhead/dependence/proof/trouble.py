"""What would blur an audit: randomness, state, non-determinism, inputs edited in place."""

from __future__ import annotations

from torch import nn

from clearhead.dependence.proof.report import Report
from clearhead.dependence.proof.runner import Runner, movement

__all__ = ["look_for_trouble"]


def look_for_trouble(runner: Runner, report: Report) -> None:
    """Run the unchanged inputs a few times, and say what is not the same."""
    base = runner.base()
    if runner.edits:
        report.trouble.append(
            f"edits its inputs in place ({', '.join(sorted(runner.edits))}); "
            "each run was given its own copy"
        )
    if runner.draws and movement(base, runner.outputs(seed=1)).any():
        dropouts = _dropouts(runner.model)
        where = f", dropout is on in {', '.join(dropouts[:4])}" if dropouts else ""
        report.trouble.append(
            f"random: two seeds give two outputs{where}; every run was given the same seed. "
            "Call model.eval() to audit what is used later"
        )
        runner.single = True
    if runner.state and (told := _second_call(runner)):
        report.trouble.append(
            f"keeps state between calls ({', '.join(runner.state[:4])}): {told}; "
            "it was put back before every run"
        )
        runner.single = True
    if movement(base, runner.outputs()).any():
        report.trouble.append(
            "not deterministic: the same inputs give different outputs, so only what moves further "
            "than that counts, and nothing else is proven"
        )
        runner.noisy = True


def _second_call(runner: Runner) -> str:
    """Call twice without putting the state back, and say what comes of it."""
    try:
        first, second = runner.outputs(restore=False), runner.outputs()
    except Exception as error:
        return f"a second call fails with {type(error).__name__}: {error}"
    return "a second call gives another output" if movement(first, second).any() else ""


def _dropouts(model: object) -> list[str]:
    if not isinstance(model, nn.Module):
        return []
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module.training and getattr(module, "p", 0) and "Dropout" in type(module).__name__
    ]
