"""One thread for each test process, and the fixture that sends a test through an implementation."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import clearhead
from clearhead.attention import impl
from clearhead.attention.impl.native import native
from clearhead.attention.problem import Problem

torch.set_num_threads(1)

# Forward-mode derivatives import this at their first use, and it warns of torch's own old habits.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp


class Implementation:
    """`attend`, forced to one implementation; it is an error if another one ran.

    The kernel may hand over numbers that are out of its range.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ran: list[str] = []

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        self.ran.clear()
        answer = clearhead.attend(*args, **kwargs, impl=self.name)
        handed_over = ["native", "tiled"] if self.name == "native" else []
        assert self.ran in ([self.name], handed_over), f"{self.name} was asked, {self.ran} ran"
        return answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Attend in this implementation, or where it says that it cannot serve, in the next."""
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
    return [m.NAME for m in impl.IMPLEMENTATIONS if not m.unsupported_reasons(plain, ())]


@pytest.fixture(params=built())
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each implementation in turn; it notes which one really ran."""
    chosen = Implementation(request.param)
    for module in impl.IMPLEMENTATIONS:
        monkeypatch.setattr(module, "attend", _noted(module, chosen.ran))
    monkeypatch.setattr(native, "plain", _noted_where_it_answers(chosen.ran))
    return chosen


def _noted(module: Any, ran: list[str]) -> Any:
    original = module.attend

    def attend(*args: Any, **kwargs: Any) -> Any:
        ran.append(module.NAME)
        return original(*args, **kwargs)

    return attend


def _noted_where_it_answers(ran: list[str]) -> Any:
    original = native.plain

    def plain(*args: Any) -> Any:
        ran.append(native.NAME)
        answer = original(*args)
        if answer is None:
            ran.pop()
        return answer

    return plain
