"""Models on disk: one safetensors file whose JSON header says which model it holds.

Each file is replaced in one step, so that a full disk or a crash leaves either the old file or the
new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clearhead._core import replacing, value_error
from clearhead.models.bert import BERT
from clearhead.models.gpt import GPT
from clearhead.models.rnn import RNN
from clearhead.models.text import Characters

__all__ = [
    "MODEL_FILE",
    "VERSION",
    "build",
    "check_version",
    "describe",
    "is_checkpoint",
    "load",
    "no_weights",
    "save",
]

VERSION = 1
MODEL_FILE = "model.safetensors"
KINDS = {kind.name: kind for kind in (GPT, BERT, RNN)}
Model = GPT | BERT | RNN
SHIPPED = Path(__file__).parent / "data"


def save(model: Model, path: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write a model into a directory, and return the path of its file.

    `dtype` stores the weights in another precision (the shipped model is in float16).
    """
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    return write(Path(path).expanduser() / MODEL_FILE, tensors, describe(model))


def load(path: str | Path | None = None) -> Model:
    """Read a model from its directory; without a path, the GPT that ships with the library.

    >>> load().name
    'gpt'

    The weights are in float32 and the model in eval mode. A file that is no model, is damaged or
    has another version is a ValueError that says so.
    """
    path = SHIPPED if path is None else Path(path).expanduser()
    tensors, header = read(path / MODEL_FILE)
    return build(tensors, header, path).eval()


def is_checkpoint(path: str | Path) -> bool:
    """Tell whether a directory holds a model of this library."""
    try:
        read(Path(path).expanduser() / MODEL_FILE, weights=False)
    except (ValueError, OSError):
        return False
    return True


def describe(model: Model) -> dict[str, Any]:
    """Describe the model in JSON terms; `build` makes it again."""
    words = model.vocabulary
    vocabulary = words if isinstance(words, int) else words.characters
    return {"version": VERSION, "model": model.name, **model.config, "vocabulary": vocabulary}


def build(tensors: Mapping[str, Tensor], header: Mapping[str, Any], path: Path) -> Model:
    """Build the model that a header describes, and check that the weights fit it."""
    config = dict(header)
    config.pop("version")
    kind = KINDS.get(str(config.pop("model", None)))
    if kind is None:
        known = ", ".join(KINDS)
        raise value_error("model", f"needs to be one of {known}", got=f"{header.get('model')!r}")
    words = config.pop("vocabulary", None)
    # More layers than tensors cannot be right, and would take forever to build.
    if not isinstance(config.get("layers"), int) or config["layers"] > len(tensors):
        raise _damaged(
            path,
            f"it says it has {config.get('layers')!r} layers, and holds {len(tensors)} tensors",
        )
    try:
        vocabulary = Characters(words, kind.special) if isinstance(words, str) else words
        with no_weights():
            model = kind(vocabulary, **config)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise _damaged(path, f"its header does not describe a model ({error})") from error
    _check_tensors(model, tensors, path)
    model.load_state_dict({n: t.to(torch.float32) for n, t in tensors.items()}, assign=True)
    return model.requires_grad_()


class _Uninitialized(TorchFunctionMode):
    """Skip the random initialization of parameters: on meta tensors it imports torch._dynamo."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def no_weights() -> Iterator[None]:
    """Build models on the meta device: they have shapes, and no memory or numbers."""
    with torch.device("meta"), _Uninitialized():
        yield


def write(file: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Path:
    """Write tensors and a JSON header so that `file` is always either the old or the new one."""
    from safetensors.torch import save as to_bytes

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data = to_bytes(whole, metadata={"clearhead": json.dumps(header)})
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(file) as part:
            part.write_bytes(data)
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}; what was there before is untouched", str(file)
        ) from error
    return file


def read(file: Path, *, weights: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and the JSON header, or say in a ValueError why that cannot be done.

    Without `weights` only the header is read, and no tensors come back.
    """
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        hint = "clearhead train FILE --out DIR makes one"
        raise value_error("model", f"there is no {file.name} in {file.parent}", hint=hint)
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            names = handle.keys() if weights else ()
            tensors = {name: handle.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise _damaged(file.parent, f"it is cut short or no safetensors file ({error})") from error
    return tensors, _header(metadata, file)


def _header(metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    if "clearhead" not in metadata:
        raise value_error("model", "was not written by clearhead", got=file)
    try:
        header = json.loads(metadata["clearhead"])
    except ValueError as error:
        raise _damaged(file.parent, f"its header is no JSON ({error})") from error
    check_version(header, file)
    return header


def check_version(header: Any, file: Path) -> None:
    """Raise where a header is of another version of the format."""
    version = header.get("version") if isinstance(header, dict) else None
    if version != VERSION:
        raise value_error(
            "model",
            f"has version {version!r} of the format, and this clearhead reads version {VERSION}",
            got=file,
            hint="use the clearhead that wrote it, or train it again",
        )


def _check_tensors(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if missing := sorted(expected.keys() - found.keys()):
        raise _damaged(path, f"it lacks the tensors {_few(missing)}")
    if extra := sorted(found.keys() - expected.keys()):
        raise _damaged(path, f"it has tensors that this model does not know: {_few(extra)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise _damaged(path, f"{name} has shape {found[name]} where the model needs {shape}")
        if not tensors[name].isfinite().all():
            raise _damaged(path, f"{name} holds NaN or inf")


def _damaged(path: Path, what: str) -> ValueError:
    return value_error("model", f"cannot be loaded: {what}", got=path)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
