"""Scanning with a real model: the same table whatever the batch size, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from clearhead import cli
from clearhead.heads.roles import pooled
from clearhead.models.text import shipped_text

MODELS = Path(os.environ.get("CLEARHEAD_MODELS", ".cache/models"))
if not (MODELS / "smollm2" / "config.json").exists():
    pytest.skip(f"no models in {MODELS}: run `make real`", allow_module_level=True)

# A larger slice can be asked for: the whole promise is one megabyte.
BYTES = int(os.environ.get("CLEARHEAD_SCAN_BYTES", 4_000))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Paragraphs of very unlike lengths, repeated to the size asked for."""
    path = tmp_path_factory.mktemp("scan") / "corpus.txt"
    text = shipped_text()
    path.write_text((text * (1 + BYTES // len(text)))[:BYTES], encoding="utf-8")
    return path


def options(corpus: Path, out: Path, model: str, batch: int) -> list[str]:
    return [
        "scan", str(corpus), "--model", str(MODELS / model), "--out", str(out),
        "--by", "paragraph", "--length", "128", "--batch", str(batch),
    ]  # fmt: skip


def rows(path: Path) -> dict[tuple[int, int, str], dict[str, Any]]:
    return {(r["layer"], r["head"], r["statistic"]): r for r in pq.read_table(path).to_pylist()}


def killed(command: list[str], state: Path) -> None:
    """Start a scan, and kill it once it has saved what it has."""
    before = state.stat().st_mtime_ns if state.exists() else None
    process = subprocess.Popen([sys.executable, "-m", "clearhead", *command, "--every", "0"])
    while process.poll() is None:
        if state.exists() and state.stat().st_mtime_ns != before:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.timeout(0)
@pytest.mark.parametrize("model", ["smollm2", "minilm"])
def test_any_batch_size_and_a_kill_give_the_same_table(
    corpus: Path, tmp_path: Path, model: str
) -> None:
    """To the last bit: sequences of one length run together, and none is padded."""
    one, out, state = tmp_path / "one", tmp_path / "out", tmp_path / "out.partial"
    assert cli.main(options(corpus, one, model, 1)) == 0
    killed(options(corpus, out, model, 5), state / "state.safetensors")
    killed([*options(corpus, out, model, 2), "--resume"], state / "state.safetensors")
    assert not out.exists()
    assert cli.main([*options(corpus, out, model, 3), "--resume"]) == 0
    assert rows(one) == rows(out)
    # Line for line what the file says of itself, too.
    about = [json.loads(pq.read_table(path).schema.metadata[b"clearhead"]) for path in (one, out)]
    assert about[0] == about[1]


@torch.no_grad()
def test_smollm2_previous_token_scores_are_those_of_eager(corpus: Path, tmp_path: Path) -> None:
    import transformers

    out, where = tmp_path / "out", MODELS / "smollm2"
    assert cli.main([*options(corpus, out, "smollm2", 4), "--limit", "6"]) == 0

    model = transformers.AutoModelForCausalLM.from_pretrained(where, attn_implementation="eager")
    encode = transformers.AutoTokenizer.from_pretrained(where)
    sums, count = torch.zeros(30, 9, dtype=torch.float64), 0
    paragraphs = [p for p in corpus.read_text().split("\n\n") if p.strip()][:6]
    for text in paragraphs:
        for ids in torch.tensor(encode(text)["input_ids"]).split(128):
            maps = torch.cat(model.eval()(ids[None], output_attentions=True).attentions).double()
            sums += maps.diagonal(-1, -2, -1).sum(-1)
            count += len(ids) - 1
    means = pooled(pq.read_table(out))
    got = [[means[layer, head]["previous"]["mean"] for head in range(9)] for layer in range(30)]
    # As the weights of watch and of eager agree: to 1e-5 each, and so does their mean.
    torch.testing.assert_close(torch.tensor(got).double(), sums / count, rtol=0, atol=1e-5)
