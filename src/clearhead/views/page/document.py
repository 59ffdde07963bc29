"""One self-contained HTML file: the header, the chunks, and the page's own script and style."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from clearhead._core import replacing, value_error

__all__ = ["bundle", "html", "save", "style"]

HERE = Path(__file__).parent
# In the order of the imports: each module uses the ones before it.
MODULES = [
    "base/text.js",
    "base/dom.js",
    "base/palette.js",
    "base/data.js",
    "base/rows.js",
    "base/state.js",
    "parts/raster.js",
    "parts/paint.js",
    "parts/map.js",
    "parts/strip.js",
    "parts/question.js",
    "parts/heads.js",
    "parts/tables.js",
    "parts/why.js",
    "parts/export.js",
    "parts/controls.js",
    "page.js",
    "sources.js",
]
# How each place starts the page.
ENTRIES = {
    "file": 'mount(document.getElementById("clearhead"), fromDocument(), STYLE);',
    "server": 'mount(document.getElementById("clearhead"), await fromServer(), STYLE);',
    "widget": "export default { render({ model, el }) { mount(el, fromKernel(model), STYLE); } };",
}
# Pages above this size are written in basE91: 6.5 bits a character instead of 6.
LARGE = 4_000_000
# The characters of basE91, with "-" for "<", which would end the block that holds them.
ALPHABET = np.frombuffer(
    b'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%&()*+,./:;-=>?@[]^_`{|}~"',
    dtype=np.uint8,
)
# Comments that fill their lines; one that a statement follows stays.
_COMMENT = re.compile(r"^[ \t]*(?://.*|/\*\*(?:[^*]|\*(?!/))*\*/[ \t]*)\n", re.MULTILINE)
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_WITHOUT_SCRIPT = "Where this line stays, scripts are off or the file is not complete."
_FRAME = "html{color-scheme:light dark}body{margin:0}"


@cache
def style() -> str:
    """The style of the page."""
    return (HERE / "page.css").read_text(encoding="utf-8")


@cache
def bundle(place: str) -> str:
    """The page as one JavaScript module, for a "file", a "server" or a notebook's "widget"."""
    texts = (_joined((HERE / name).read_text(encoding="utf-8")) for name in MODULES)
    return f"const STYLE = {_script_json(style())};\n{''.join(texts)}\n{ENTRIES[place]}\n"


def html(header: Mapping[str, Any], chunks: Mapping[str, bytes], *, place: str = "file") -> str:
    """Write a page that holds its header and its chunks, or a served one that asks for them."""
    return "".join(_pieces(header, chunks, place))


def save(
    path: str | Path,
    header: Mapping[str, Any],
    chunks: Mapping[str, bytes],
    *,
    force: bool = False,
) -> None:
    """Write the page to a file, whole or not at all; one that is there is kept unless forced."""
    path = Path(path)
    if path.exists() and not force:
        raise value_error("path", "is a new file, or force=True", got=f"{path}, which exists")
    if not path.parent.is_dir():
        raise value_error("path", "lies in a folder that exists", got=str(path))
    with replacing(path) as part, part.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(_pieces(header, chunks, "file"))


def _pieces(header: Mapping[str, Any], chunks: Mapping[str, bytes], place: str) -> Iterator[str]:
    script = bundle(place)
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_policy(script, place)}">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield f"<title>{_escaped(str(header.get('title', '')))} · clearhead</title>\n"
    yield f"<style>{_FRAME}</style>\n</head>\n<body>\n"
    # What stands inside is shown until the script, which comes last, draws the page.
    yield f'<div id="clearhead"><p>{_WITHOUT_SCRIPT}</p></div>\n'
    if place == "file":
        yield '<script type="application/json" id="clearhead-header">'
        yield f"{_script_json(header)}</script>\n"
        yield from _blocks(chunks)
    yield f'<script type="module">{script}</script>\n</body>\n</html>\n'


def _blocks(chunks: Mapping[str, bytes]) -> Iterator[str]:
    packed = {name: _deflated(data) for name, data in chunks.items()}
    large = sum(map(len, packed.values())) > LARGE
    encoding, encode = ("base91", _base91) if large else ("base64", _base64)
    for name, data in packed.items():
        yield '<script type="application/octet-stream" '
        yield f'data-chunk="{_escaped(name)}" data-encoding="{encoding}">{encode(data)}</script>\n'


def _policy(script: str, place: str) -> str:
    connect = "; connect-src 'self'" if place == "server" else ""
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(_FRAME)}'; "
        f"img-src data: blob:; base-uri 'none'; form-action 'none'{connect}"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _joined(text: str) -> str:
    """A module without its imports, exports and whole lines of comment."""
    text = _IMPORT.sub("", _COMMENT.sub("", text))
    return re.sub(r"^export (?!default)", "", text, flags=re.MULTILINE)


def _script_json(value: Any) -> str:
    r"""JSON that no script block ends at: `<`, `>` and `&` are escapes, and all is ASCII."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escaped(text: str) -> str:
    """Text for a title or an attribute: control characters and lone surrogates are replaced."""
    text = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", "\ufffd", text)
    text = text[:200].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace('"', "&quot;")


def _deflated(data: bytes) -> bytes:
    # For codes of weights this is as small as level 9 or smaller, and five times as fast.
    packer = zlib.compressobj(6, zlib.DEFLATED, -15, 6, zlib.Z_FILTERED)
    return packer.compress(data) + packer.flush()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _base91(data: bytes) -> str:
    """Write 13 bits in two characters, after the number of bytes and a space."""
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8))
    words = np.pad(bits, (0, -len(bits) % 13)).reshape(-1, 13)
    numbers = words @ (1 << np.arange(12, -1, -1))
    pairs = ALPHABET[np.stack([numbers // 91, numbers % 91], axis=1)]
    return f"{len(data)} {pairs.tobytes().decode()}"
