"""Files are written whole, and only in the place of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clearhead._core.files import replacing


def test_an_error_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "kept.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as part:
        part.write_text(f"half {1 / 0}")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, make: object) -> None:
    path = tmp_path / "thing"
    make(path)  # type: ignore[operator]
    before = path.stat()
    with pytest.raises(ValueError, match="names a file"), replacing(path):
        pytest.fail("nothing may be written")
    assert (path.stat().st_mode, path.stat().st_ino) == (before.st_mode, before.st_ino)
