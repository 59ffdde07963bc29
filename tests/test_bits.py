"""The recorded bits are compared as said: the same tree is clean, and one ulp is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bits
import clearhead as ch

pytestmark = pytest.mark.slow
COUNT = 20


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bits") / "bits.json"
    assert bits.main(["record", str(path), "--problems", str(COUNT), "--seed", "2"]) == 0
    return path


def problems(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["problems"]


def one_ulp_off(x: Tensor) -> Tensor:
    """The same numbers, of which the first is the next larger one."""
    x = x.clone()
    first = x[(0,) * x.ndim]
    first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))
    return x


def lie(monkeypatch: pytest.MonkeyPatch, what: str) -> list[str]:
    """Let the first call of `attend` that can be off by an ulp be so; returns what was changed."""
    original, told = ch.attend, []

    def lying(*args: Any, **given: Any) -> Any:
        answer = original(*args, **given)
        context = answer if given.get("read") is None else answer[0]
        finite = context.dtype == torch.float32 and context.numel() and context.isfinite().all()
        if told or not finite or (what == "gradient" and not given["query"].requires_grad):
            return answer
        if what == "gradient":
            given["query"].register_hook(one_ulp_off)
        told.append(what)
        if what == "gradient":
            return answer
        nudged = context + (one_ulp_off(context.detach()) - context.detach())
        return nudged if given.get("read") is None else (nudged, answer[1])

    monkeypatch.setattr(ch, "attend", lying)
    return told


def test_the_same_tree_is_clean(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bits.main(["compare", str(recorded)]) == 0
    assert capsys.readouterr().out == f"{COUNT} problems: 0 differ\n"
    assert len(problems(recorded)) == COUNT
    assert len({p["made of"].split(":")[0] for p in problems(recorded)}) == 4
    assert not [p for p in problems(recorded) if "raised" in p["outputs"]]


@pytest.mark.parametrize(
    ("what", "output"), [("context", "context"), ("gradient", "gradient.query")]
)
def test_one_ulp_is_found(
    recorded: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    output: str,
) -> None:
    told = lie(monkeypatch, what)
    assert [bits.main(["compare", str(recorded)]), *told] == [1, what]
    problem, *outputs, total = capsys.readouterr().out.splitlines()
    assert problem.startswith("problem ")
    assert ", attend: " in problem
    assert " in torch.float32 " in problem
    assert outputs[0].split(":")[0].strip() == output
    assert total == f"{COUNT} problems: 1 differ"


def test_an_error_that_was_none_is_found(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ch, "attend", lambda *_, **given: 1 / 0)
    assert bits.main(["compare", str(recorded)]) == 1
    assert "raised: None -> ZeroDivision" in capsys.readouterr().out


def test_a_digest_holds_type_shape_and_every_bit() -> None:
    zeros = torch.zeros(2, 3)
    same = [zeros, torch.zeros(3, 2).mT, torch.zeros(4, 5)[1:3, ::2]]
    others = [-zeros, zeros.int(), zeros.flatten(), zeros.bfloat16(), one_ulp_off(zeros), None]
    assert len({bits.digest(x) for x in same}) == 1
    assert len({bits.digest(x) for x in [zeros, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    ("name", "value"), [("torch", "2.0.0"), ("kernel", "none"), ("problems", "0" * 12)]
)
def test_a_record_from_elsewhere_is_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    document = json.loads(recorded.read_text(encoding="utf-8"))
    document["place"][name] = value
    path = tmp_path / "other.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert bits.main(["compare", str(path)]) == 2
    assert f"was recorded elsewhere: {name} '{value}', here" in capsys.readouterr().err


def test_misuse_is_told(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = recorded.read_bytes()
    assert bits.main(["record", str(recorded), "--problems", "1"]) == 2
    assert "--force writes over it" in capsys.readouterr().err
    assert recorded.read_bytes() == before
    assert list(recorded.parent.iterdir()) == [recorded]
    for text in (None, "", "{}"):
        path = tmp_path / "missing.json"
        if text is not None:
            path.write_text(text, encoding="utf-8")
        assert bits.main(["compare", str(path)]) == 2
        assert "is no record of bits" in capsys.readouterr().err
    assert bits.main(["record", str(tmp_path / "new.json"), "--problems", "0"]) == 2
    assert bits.main(["record", str(tmp_path / "no" / "new.json")]) == 2
