"""Biases of relative positions, beside the models that use them."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch

import clearhead as ch
from clearhead import biases, masks, readings

SIZES = [(1, 1), (5, 5), (1, 7), (3, 11), (131, 300)]


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 20, 71])
def test_slopes_are_those_of_bloom(heads: int) -> None:
    modeling = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    ones = torch.ones(1, 2)
    theirs = modeling.build_alibi_tensor(ones, heads, torch.float32)  # slope * position
    # Theirs is a power of a rounded base: half an ulp for each factor, and the power's own.
    rtol = (heads / 2 + 1) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(biases.slopes(heads), theirs[:, 0, 1], rtol=rtol, atol=0)


def test_slopes_of_a_power_of_two_are_exact() -> None:
    want = [2.0 ** (-8 * h / 16) for h in range(1, 17)]
    assert torch.equal(biases.slopes(16), torch.tensor(want))


@pytest.mark.parametrize(("query", "source"), SIZES)
def test_alibi_is_minus_slope_times_distance(query: int, source: int) -> None:
    bias = biases.alibi(3, query, source)
    assert bias.shape == (3, query, source)
    for head, slope in enumerate(biases.slopes(3).tolist()):
        for i, j in ((0, 0), (query - 1, source - 1), (query // 2, source // 2)):
            distance = abs(i + source - query - j)
            assert math.isclose(bias[head, i, j].item(), -slope * distance, rel_tol=1e-6)


def test_alibi_gives_the_weights_of_one_row_under_a_causal_mask() -> None:
    """A row's constant does not move a softmax: the form that Bloom adds."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, 9, 8, dtype=torch.float64)
    row = biases.slopes(4).double()[:, None, None] * torch.arange(9)
    given = {"mask": masks.causal(), "read": readings.Weights()}
    ours = ch.attend(x, x, x, bias=biases.alibi(4, 9).double(), **given)[1]
    torch.testing.assert_close(ours, ch.attend(x, x, x, bias=row, **given)[1])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (8, 20), (6, 5)])
@pytest.mark.parametrize(("query", "source"), SIZES)
def test_buckets_are_those_of_t5(
    query: int, source: int, buckets: int, far: int, bidirectional: bool
) -> None:
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    rows = torch.arange(source - query, source)[:, None]
    relative = torch.arange(source) - rows
    theirs = modeling.T5Attention._relative_position_bucket(relative, bidirectional, buckets, far)
    ours = biases.t5_buckets(
        query, source, buckets=buckets, max_distance=far, bidirectional=bidirectional
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: biases.alibi(0, 3), "heads: is at least 1"),
        (lambda: biases.alibi(cast("Any", 2.0), 3), "heads: takes an integer"),
        (lambda: biases.alibi(2, -1), "query: is at least 0"),
        (lambda: biases.t5_buckets(3, buckets=7), "buckets: is even"),
        (lambda: biases.t5_buckets(3, buckets=2), "buckets: is at least 4"),
        (lambda: biases.t5_buckets(3, max_distance=3), "max_distance: is at least 9"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        call()
