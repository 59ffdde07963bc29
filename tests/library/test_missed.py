"""The search for what the audit missed finds what is planted, and what a folder says is ok."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.library import missed


class Sums(nn.Module):
    """Running sums of embeddings, with a share of the last token in the first output."""

    def __init__(self, share: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.share = nn.Embedding(31, 7), share

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids)
        logits = x.cumsum(1)
        logits[:, 0] += self.share * x[:, -1]
        return SimpleNamespace(logits=logits)


def _built(share: float) -> Any:
    ids = torch.randint(3, 31, (2, 11), generator=torch.Generator().manual_seed(1))
    return SimpleNamespace(
        model=Sums(share), inputs={"input_ids": ids}, stream="input_ids", vocabulary=31, lowest=3
    )


@pytest.mark.parametrize(("share", "leaks"), [(0.0, False), (1e-9, False), (1e-3, True)])
def test_futures(share: float, leaks: bool) -> None:
    readings = missed.futures(_built(share))
    assert [reading.dtype for reading in readings] == [torch.float64, torch.float32]
    assert [reading.leaks for reading in readings] == [leaks, leaks]


def test_small_leaks_are_seen_in_float64() -> None:
    exact, own = missed.futures(_built(5e-5))
    assert (exact.leaks, own.leaks) == (True, False)
    assert exact.size < 5e-4


def test_an_ok_that_is_none_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    names = ("CpmAntForCausalLM", "LlamaForCausalLM")
    (tmp_path / "rows").mkdir()
    for name in names:
        row = {"name": name, "mapping": "causal", "backend": "eager", "form": "causal"}
        rows = {"rows": [row | {"verdict": "ok", "call": {}}]}
        (tmp_path / "rows" / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    assert missed.main([str(tmp_path), "--processes", "1"]) == 1
    said = capsys.readouterr().out
    assert "CpmAntForCausalLM" in said
    assert "LlamaForCausalLM" not in said
    assert "2 answers checked with seeds (0, 1), 1 do not hold" in said
