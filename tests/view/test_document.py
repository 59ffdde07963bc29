"""The page as text: one module of unique names, nothing that ends a block, whole or not at all."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from clearhead.views.page import bundle, html, save
from clearhead.views.page.document import ALPHABET, HERE, MODULES, _base91
from tests.view.synthetic import Record, causal_weights

DECLARED = re.compile(r"^(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)


def page_of(tokens: list[str], **header: object) -> str:
    record = Record(tokens)
    record.layer(causal_weights(2, len(tokens)))
    record.header |= header
    return html(*record.finish())


def test_modules_that_become_one_have_unique_names_and_no_imports() -> None:
    text = bundle("file")
    counts = Counter(DECLARED.findall(text))
    assert [name for name, times in counts.items() if times > 1] == []
    assert not re.search(r"^\s*(import|export) ", text, re.MULTILINE)


def test_joining_takes_away_comments_imports_and_exports_alone() -> None:
    def code(text: str) -> str:
        text = re.sub(r"/\*\*.*?\*/", "", text, flags=re.DOTALL)
        text = re.sub(r"^\s*//.*|^import [^;]*;|^export ", "", text, flags=re.MULTILINE)
        return re.sub(r"\s+", "", text)

    parts = [code((HERE / name).read_text(encoding="utf-8")) for name in MODULES]
    assert "".join(parts) in code(bundle("file"))


def test_the_module_is_small_when_packed() -> None:
    assert len(gzip.compress(bundle("file").encode(), 9)) <= 60_000


def test_every_script_of_the_folder_is_part_of_the_module() -> None:
    assert sorted(MODULES) == sorted(str(f.relative_to(HERE)) for f in HERE.rglob("*.js"))


def test_files_keep_the_limits_of_the_layout() -> None:
    for folder in (HERE, HERE / "base", HERE / "parts"):
        assert sum(f.is_file() for f in folder.iterdir()) <= 12
    for file in [*HERE.rglob("*.js"), HERE / "page.css"]:
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 400, file


def test_the_policy_names_the_very_script_and_style() -> None:
    text = page_of(["a", "b"])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        attributes = ' type="module"' if tag == "script" else ""
        body = re.search(rf"<{tag}{attributes}>(.*?)</{tag}>", text, re.DOTALL)
        assert body is not None
        digest = base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1]


@pytest.mark.parametrize("token", ["</script>", "<!--", "\u2028", "\x00", "\ud800", "&lt;", '"'])
def test_a_hostile_token_is_data_in_the_header_alone(token: str) -> None:
    text = page_of(["a", token], title=token)
    header = re.search(r'id="clearhead-header">(.*?)</script>', text, re.DOTALL)
    assert header is not None
    assert not set("<>&\u2028\x00") & set(header[1])
    assert json.loads(header[1])["axes"][0]["labels"][0][1] == token
    text.encode()
    assert text.count("</script") == 2 + text.count("data-chunk=") - bundle("file").count(
        "data-chunk="
    )


def test_basE91_holds_13_bits_in_two_characters() -> None:
    data = np.random.default_rng(3).bytes(1009)
    length, _, text = _base91(data).partition(" ")
    digits = {chr(c): i for i, c in enumerate(ALPHABET)}
    numbers = [digits[a] * 91 + digits[b] for a, b in zip(text[::2], text[1::2], strict=True)]
    bits = "".join(f"{n:013b}" for n in numbers)
    back = bytes(int(bits[i : i + 8], 2) for i in range(0, 8 * int(length), 8))
    assert back == data
    assert len(set(ALPHABET.tolist())) == 91
    assert not set(b"<\\'") & set(ALPHABET.tolist())


def test_a_page_that_is_there_is_kept(tmp_path: Path) -> None:
    record = Record(["a"])
    record.layer(np.ones((1, 1, 1), np.float32))
    path = tmp_path / "page.html"
    save(path, *record.finish())
    first = path.read_bytes()
    with pytest.raises(ValueError, match="exists"):
        save(path, *record.finish())
    with pytest.raises(ValueError, match="path: lies in a folder that exists"):
        save(tmp_path / "no" / "page.html", *record.finish())
    with pytest.raises(ValueError, match="Out of range float"):
        save(path, {**record.header, "title": float("nan")}, {}, force=True)
    assert path.read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
