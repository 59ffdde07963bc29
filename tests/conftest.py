"""One thread for each test process, and the fixture that sends a test through an implementation."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import clearhead
from clearhead.attention import Problem
from clearhead.attention.impl import IMPLEMENTATIONS, NATIVE

torch.set_num_threads(1)

# Forward-mode derivatives import this at their first use, and it warns of torch's own old habits.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp


class Implementation:
    """`attend`, forced to one implementation; it is an error if another one ran.

    The kernel may leave numbers that are out of its range to its fallback.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ran: list[str] = []

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        self.ran.clear()
        answer = clearhead.attend(*args, **kwargs, impl=self.name)
        fallback = ["native", "tiled"] if self.name == "native" else []
        assert self.ran in ([self.name], fallback), f"{self.name} was forced, {self.ran} ran"
        return answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Attend in this implementation, or where it cannot serve, in the first that can."""
        try:
            return self.attend(*args, **kwargs)
        except ValueError as refusal:
            if "cannot serve this call" not in str(refusal):
                raise
        answer = clearhead.attend(*args, **kwargs)
        assert self.ran
        assert self.ran[-1] != self.name
        return answer


def torch_compiles() -> bool:
    """Whether torch finds a C++ compiler, without which its own compiler makes nothing."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


@pytest.fixture
def cpp_compiler() -> None:
    """Skip the test where torch cannot compile."""
    if not torch_compiles():
        pytest.skip("torch finds no C++ compiler here")


def built() -> list[str]:
    """The implementations that serve a plain call here: the kernel may not be compiled."""
    x = torch.ones(1, 1, 2, 3)
    plain = Problem(x, x, x, None, 1.0)
    return [each.name for each in IMPLEMENTATIONS if not each.unsupported_reasons(plain, ())]


@pytest.fixture(params=built())
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each implementation in turn; it records which one really ran."""
    chosen = Implementation(request.param)
    for each in IMPLEMENTATIONS:
        monkeypatch.setattr(each, "attend", _recorded(each, chosen.ran))
    monkeypatch.setattr(NATIVE, "plain", _recorded_where_it_answers(chosen.ran))
    return chosen


def _recorded(each: Any, ran: list[str]) -> Any:
    original = each.attend

    def attend(*args: Any, **kwargs: Any) -> Any:
        ran.append(each.name)
        return original(*args, **kwargs)

    return attend


def _recorded_where_it_answers(ran: list[str]) -> Any:
    original = NATIVE.plain

    def plain(*args: Any) -> Any:
        ran.append(NATIVE.name)
        answer = original(*args)
        if answer is None:
            ran.pop()
        return answer

    return plain
