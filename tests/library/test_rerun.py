"""The second run of a finding: sizes, rounding, scripts, on models whose answers are known."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.dependence.library.classify import kind_of, settled
from clearhead.dependence.library.reasons.by_design import DESIGNS, design_of
from clearhead.dependence.library.reasons.causes import CAUSES
from clearhead.dependence.library.rerun import Proof, confirm
from clearhead.dependence.library.rows import BY_DESIGN, FAULT, Row
from clearhead.dependence.library.runs.evidence import (
    CACHE,
    FUTURE,
    POSITIONS,
    RECURRENT,
)
from clearhead.dependence.library.runs.measuring import Compared
from clearhead.dependence.library.runs.scripts import reproduces

LENGTH, VOCABULARY = 13, 29


class Sums(nn.Module):
    """Logits are running sums of embeddings, and of what a fault adds to them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(model_type="sums", pad_token_id=0)
        self.embed = nn.Embedding(VOCABULARY, 7)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = True,
        cache: Tensor | None = None,
    ) -> dict[str, Any]:
        x = self.embed(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        logits = x.cumsum(1) + (0 if cache is None else cache)
        return {"logits": self.more(logits, x, position_ids, use_cache), "cache": logits[:, -1:]}

    def more(self, logits: Tensor, x: Tensor, places: Tensor | None, cached: bool) -> Tensor:
        """Add the fault."""
        return logits


class ReadsTheNext(Sums):
    """Leaks a thousandth of the next token, where something is cached only."""

    def more(self, logits: Tensor, x: Tensor, places: Tensor | None, cached: bool) -> Tensor:
        """Add the fault."""
        following = torch.cat([x[:, 1:], x[:, :1] * 0], 1)
        return logits + 1e-3 * following if cached else logits


class CountsPositions(Sums):
    """Adds the position, which is that in the row where none are given."""

    def more(self, logits: Tensor, x: Tensor, places: Tensor | None, cached: bool) -> Tensor:
        """Add the positions."""
        places = torch.arange(x.shape[1]).expand(x.shape[:2]) if places is None else places
        return logits + places[..., None].to(logits)


class Rounds(Sums):
    """Adds what float32 makes of one third, by the number of tokens: rounding and no leak."""

    def more(self, logits: Tensor, x: Tensor, places: Tensor | None, cached: bool) -> Tensor:
        """Add the noise."""
        return logits * (1 + torch.finfo(logits.dtype).eps * x.sum(1, keepdim=True).sign())


def _built(model: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)
    return SimpleNamespace(
        model=model.eval(), inputs={"input_ids": ids}, stream="input_ids",
        vocabulary=VOCABULARY, lowest=0,
        class_name="Sums", config_class="Config", config={}, backend="eager", seed=0, scale=1.0,
    )  # fmt: skip


def _row(form: str, **found: Any) -> Row:
    return Row("Sums", "causal", "eager", form, verdict=FAULT, **found)


def _confirmed(model: nn.Module, row: Row) -> Proof:
    return confirm(row, lambda: _built(model))


def test_a_leak_is_confirmed_with_its_size_and_with_the_cache_as_its_condition() -> None:
    model = ReadsTheNext()
    proof = _confirmed(model, _row("causal", detail="leak", source=6, query=5))
    assert proof.confirmed
    assert proof.evidence == {CACHE}
    # The largest of a thousandth of the differences of the four embeddings that were tried.
    ids = _built(model).inputs["input_ids"]
    tried = [(int(ids[0, 6]) + n * (VOCABULARY // 5)) % VOCABULARY for n in range(1, 5)]
    moved = (model.embed.weight[tried] - model.embed.weight[ids[0, 6]]).abs().max().item() / 1000
    assert proof.sizes is not None
    assert proof.sizes.size == pytest.approx(moved, rel=1e-2)
    assert proof.sizes.exact == pytest.approx(moved, rel=1e-5)
    assert settled(_row("causal", detail="leak"), proof).kind == "cache mask"


def test_what_does_not_move_is_not_confirmed() -> None:
    proof = _confirmed(Sums(), _row("causal", detail="leak", source=6, query=5))
    assert not proof.confirmed
    assert proof.size == 0.0


def test_rounding_is_not_confirmed() -> None:
    proof = _confirmed(Rounds(), _row("causal", detail="leak", source=6, query=5))
    assert proof.size > 0
    assert not proof.confirmed


def test_positions_in_the_row_are_meant_to_be_where_giving_them_helps() -> None:
    row = _row("padding", variant="left", detail="amount of left padding", source=0, query=7)
    proof = _confirmed(CountsPositions(), row)
    assert proof.evidence == {POSITIONS}
    assert proof.size == pytest.approx(3)
    after = settled(row, proof)
    assert (after.verdict, after.kind) == (BY_DESIGN, "padding amount")
    assert "_prepare_position_ids_for_generation" in after.reference


def test_padding_content_that_is_masked_is_not_confirmed() -> None:
    row = _row("padding", variant="left", detail="content of the left padding", source=1, query=7)
    assert not _confirmed(Sums(), row).confirmed


@pytest.mark.parametrize("detail", ["token by token", "in chunks"])
def test_decoding_with_the_cache_is_one_pass(detail: str) -> None:
    row = _row("generation", detail=detail, source=8, query=10)
    assert not _confirmed(Sums(), row).confirmed
    assert _confirmed(ReadsTheNext(), replace(row, query=5)).confirmed


def test_a_model_that_fails_is_trouble_and_no_finding() -> None:
    def fails() -> Any:
        raise RuntimeError("no such model")

    proof = confirm(_row("causal", detail="leak", source=6, query=5), fails)
    assert (proof.confirmed, proof.trouble) == (False, "RuntimeError: no such model")


@pytest.mark.parametrize(
    ("form", "detail", "evidence", "kind"),
    [
        ("causal", "leak", (), "leak"),
        ("causal", "leak", (CACHE,), "cache mask"),
        ("padding", "content of the right padding", (), "padding content"),
        ("padding", "amount of right padding", (), "padding amount"),
        ("documents", "leak", (), "documents"),
        ("documents", "leak", (RECURRENT,), "carried state"),
        ("generation", "in chunks", (), "cache mask"),
        ("batch", "batch", (), "batch"),
        ("modes", "sdpa", (), "modes"),
        ("modes", "weights requested", (FUTURE,), "leak"),
    ],
)
def test_kinds(form: str, detail: str, evidence: tuple[str, ...], kind: str) -> None:
    assert kind_of(_row(form, detail=detail), frozenset(evidence)) == kind


def test_every_reason_has_a_reference_and_none_hides_a_traced_fault() -> None:
    assert all(design.reason and ".py, " in design.reference for design in DESIGNS)
    hidden = [
        key
        for key in CAUSES
        if design_of(key[1], key[2], "", (key[0],), frozenset())
        or (key[1] != "padding" and design_of(key[1], key[2], "leak", (key[0],), frozenset()))
    ]
    assert hidden == []


@pytest.mark.parametrize(
    ("sizes", "real"),
    [
        (Compared(1e-3, 1e-3, 1e-5, 1e-7, 1.0), True),
        (Compared(1e-6, 1e-12, 1e-5, 1e-7, 1.0), False),
        # Seen in float64 alone, and in a dtype that float64 does not follow.
        (Compared(1e-6, 2e-6, 1e-5, 1e-7, 1.0), True),
        (Compared(1e-3, math.nan, 1e-5, math.inf, 1.0), True),
        (Compared(math.inf, math.nan, 1e-5, math.inf, 1.0), True),
    ],
)
def test_what_is_more_than_rounding(sizes: Compared, real: bool) -> None:
    assert sizes.real == real


@pytest.mark.parametrize(
    ("script", "shows"),
    [
        ("raise SystemExit(1)", True),
        ("raise SystemExit(0)", False),
        ("print('nothing')", False),
        ("raise ValueError('wrong')", False),
    ],
)
def test_a_script_reproduces_where_it_exits_with_one(script: str, shows: bool) -> None:
    assert reproduces(script) == shows
