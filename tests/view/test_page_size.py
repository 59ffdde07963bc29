"""The size of a page at 4,096 tokens and 270 heads; `benchmarks/view.py` times it in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from clearhead.views.page import save
from tests.view.pages import wide


@pytest.mark.slow
def test_a_large_record_is_one_file_of_bounded_size(tmp_path: Path) -> None:
    save(tmp_path / "wide.html", *wide().finish())
    assert (tmp_path / "wide.html").stat().st_size < 26e6
