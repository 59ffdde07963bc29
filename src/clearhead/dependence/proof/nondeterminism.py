"""What makes an audit ambiguous: randomness, state, nondeterminism, inputs edited in place."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from clearhead.dependence.report import Outcome
from clearhead.dependence.subject import Runner, movement

__all__ = ["Repeatability", "check_repeatability"]


class Repeatability(NamedTuple):
    """What a few runs of the unperturbed inputs show."""

    trouble: tuple[str, ...] = ()
    single: bool = False  # random or stateful: only one copy of the batch a forward is safe
    noisy: bool = False  # equal runs give different outputs

    @property
    def outcome(self) -> Outcome:
        """The findings of this stage."""
        return Outcome(trouble=self.trouble)


def check_repeatability(runner: Runner) -> Repeatability:
    """Run the unperturbed inputs a few times, and report what differs between the runs."""
    base = runner.base()
    random, stateful = _randomness(runner), _statefulness(runner)
    noisy = bool(movement(base, runner.outputs()).any())
    trouble = [_edits(runner), random, stateful]
    if noisy:
        trouble.append(
            "not deterministic: the same inputs give different outputs, so only what moves further "
            "than that counts, and nothing else is proven"
        )
    return Repeatability(
        tuple(text for text in trouble if text), single=bool(random or stateful), noisy=noisy
    )


def _edits(runner: Runner) -> str:
    if not runner.edits:
        return ""
    return (
        f"edits its inputs in place ({', '.join(sorted(runner.edits))}); "
        "each run was given its own copy"
    )


def _randomness(runner: Runner) -> str:
    if not runner.draws or not movement(runner.base(), runner.outputs(seed=1)).any():
        return ""
    dropouts = _active_dropouts(runner.model)
    where = f", dropout is on in {', '.join(dropouts[:4])}" if dropouts else ""
    return (
        f"random: two seeds give two outputs{where}; every run was given the same seed. "
        "Call model.eval() to audit what is used later"
    )


def _statefulness(runner: Runner) -> str:
    problem = _second_call(runner) if runner.state else ""
    if not problem:
        return ""
    return (
        f"keeps state between calls ({', '.join(runner.state[:4])}): {problem}; "
        "it was restored before every run"
    )


def _second_call(runner: Runner) -> str:
    """Call twice without restoring the state, and describe what differs."""
    try:
        first, second = runner.outputs(restore=False), runner.outputs()
    except Exception as error:
        return f"a second call fails with {type(error).__name__}: {error}"
    return "a second call gives another output" if movement(first, second).any() else ""


def _active_dropouts(model: object) -> list[str]:
    if not isinstance(model, nn.Module):
        return []
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module.training and getattr(module, "p", 0) and "Dropout" in type(module).__name__
    ]
