"""Draw the pictures of docs/gallery.md from real models: python benchmarks/gallery.py MODELS

MODELS is the folder that `make real` fills (tests/real/fetch.py): SmolLM2, MiniLM, and the ALBERT
that maps atoms of chemical reactions. The picture of the page needs Chromium, and is left as it is
without one; --only NAME draws one picture.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import clearhead as ch
from clearhead import heads, readings
from clearhead.models import shipped_text
from clearhead.views import open_reader

OUT = Path(__file__).resolve().parent.parent / "docs" / "gallery"
SENTENCE = (
    "The animal did not cross the street because it was too tired. The animal did not cross the"
)
REACTION = "CCC(=O)O.CO>>COC(=O)CC"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("--only")
    given = parser.parse_args()
    for name, draw in PICTURES.items():
        if given.only in (None, name):
            draw(given.models)
            print(f"Drew {name}")


def watched(folder: Path, text: str, most: int | None = None) -> tuple[Any, list[str], list[int]]:
    """The weights of all heads over a text, its labels and its tokens."""
    reader = open_reader(str(folder))
    ids = reader.encode(text)[:most]
    with torch.no_grad(), ch.watch(reader.model, read=readings.Weights()) as seen:
        reader.predict(ids)
    return seen, reader.labels(ids), ids


def draw_page(models: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("without Chromium page.png stays as it is")
        return
    seen, labels, _ = watched(models / "smollm2", SENTENCE)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        ch.view(seen, labels, title="SmolLM2-135M").save(page)
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--window-size=1200,1010", "--virtual-time-budget=20000",
             f"--screenshot={OUT / 'page.png'}", f"file://{page}#layer=12&head=3&query=18"],
            check=True, capture_output=True,
        )  # fmt: skip


def draw_map(models: Path) -> None:
    seen, labels, _ = watched(models / "smollm2", SENTENCE)
    save(ch.figure(seen, tokens=labels, layer=12, head=3, title="SmolLM2, head 12.3"), "map")


def draw_heads(models: Path) -> None:
    seen, _, _ = watched(models / "smollm2", shipped_text(), 256)
    title = "SmolLM2: 270 heads over 256 tokens"
    save(ch.figure(seen, "heads", title=title), "heads", dpi=90)
    save(ch.figure(seen, "distance", title="SmolLM2: how far back each head looks"), "distance")


def draw_atlas(models: Path) -> None:
    reader = open_reader(str(models / "smollm2"))
    tokens = torch.tensor(reader.encode(shipped_text())[:1024]).view(2, 512)
    save(ch.figure(heads.measure(reader.model, tokens), "atlas"), "atlas", dpi=90)


def draw_sentence(models: Path) -> None:
    seen, labels, _ = watched(
        models / "minilm", "The bell rings twice, and a voice calls: who is it?"
    )
    save(
        ch.figure(seen, tokens=labels, layer=2, title="MiniLM, layer 2, mean over heads"), "minilm"
    )


def draw_masks(models: Path) -> None:
    seen, labels, _ = watched(models / "smollm2", "The bell rings twice, and a voice calls")
    save(ch.figure(seen, "mask", labels, layer=0, title="SmolLM2: a GPT"), "mask-gpt")
    reader = open_reader(str(models / "minilm"))
    batch = reader.tokenizer(["The bell rings twice, and a voice calls", "Who is it?"],
                             padding=True, return_tensors="pt")  # fmt: skip
    with torch.no_grad(), ch.watch(reader.model, read=readings.Weights()) as both:
        reader.model(**batch)
    names = [reader.labels(ids) for ids in batch["input_ids"].tolist()]
    title = "MiniLM: a BERT, padded"
    save(ch.figure(both, "mask", names, layer=0, sample=1, title=title), "mask-bert")


def draw_atoms(models: Path) -> None:
    model, vocabulary = albert(models / "albert")
    tokens = ["[CLS]", *re.findall(">>|.", REACTION), "[SEP]"]
    ids = torch.tensor([[vocabulary[token] for token in tokens]])
    with torch.no_grad(), ch.watch(model, read=readings.Weights(), calls=10, heads=5) as seen:
        model(ids)
    save(
        ch.figure(seen, tokens=tokens, head=5, title="ALBERT, call 10 of 0 to 11, head 5"), "atoms"
    )


def albert(folder: Path) -> tuple[Any, dict[str, int]]:
    import transformers

    config = transformers.AlbertConfig.from_pretrained(folder)
    model = transformers.AlbertModel(config, add_pooling_layer=False).eval()
    state = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
    model.load_state_dict({n.removeprefix("albert."): x for n, x in state.items()}, strict=False)
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return model, {token: at for at, token in enumerate(lines)}


def draw_effects(models: Path) -> None:
    reader = open_reader(str(models / "smollm2"))
    ids = reader.encode(SENTENCE)
    last = len(ids) - 1
    edges = [(last, source) for source in range(last)]
    found = ch.effects(reader.model, torch.tensor([ids]), edges=edges)
    title = "SmolLM2: cuts of single edges, all heads at once"
    save(ch.figure(found, "effects", reader.labels(ids), title=title), "effects")


def save(figure: Any, name: str, dpi: int = 110) -> None:
    figure.savefig(OUT / f"{name}.png", dpi=dpi, metadata={"Software": "clearhead"})


PICTURES: dict[str, Callable[[Path], None]] = {
    "page": draw_page,
    "map": draw_map,
    "heads": draw_heads,
    "atlas": draw_atlas,
    "minilm": draw_sentence,
    "masks": draw_masks,
    "atoms": draw_atoms,
    "effects": draw_effects,
}

if __name__ == "__main__":
    main()
