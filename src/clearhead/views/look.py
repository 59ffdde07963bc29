"""The data behind `clearhead look`: what a model predicts, and where a position looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clearhead._core import value_error

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.views.reader import Reader

__all__ = ["MAP_LIMIT", "look_at"]

# A map of all weights is made for texts of at most this many tokens.
MAP_LIMIT = 64


@dataclass(frozen=True)
class Asked:
    """What is looked at: a position of a text, and the layer and head if they were chosen."""

    reader: Reader
    ids: list[int]
    names: list[str]
    at: int
    layer: int | None
    head: int | None
    top: int
    without: list[tuple[int, int]]


def look_at(
    reader: Reader,
    text: str,
    *,
    at: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    top: int = 5,
    without: Sequence[tuple[int, int]] = (),
) -> dict[str, Any]:
    """Run the model over `text` and gather what is shown, as one JSON-ready dictionary.

    `without` names heads as (layer, head); the predictions are shown with and without them.
    """
    from clearhead.models import small_threads

    ids, notes = _fitting(reader, reader.encode(text))
    if not ids:
        raise value_error("text", "needs at least one token", got=repr(text))
    at = _position(reader, ids, at)
    ids, masked = _mask(reader, ids, at)
    names = reader.labels(ids)
    shown = {
        "model": reader.name,
        "kind": reader.kind,
        "text": text,
        "tokens": [{"position": i, "id": id_, "label": names[i]} for i, id_ in enumerate(ids)],
        "at": at,
        "masked": masked,
    }
    asked = Asked(reader, ids, names, at, layer, head, top, list(without))
    with small_threads(reader.model, len(ids)):
        found = _attention(asked) if reader.attends else _influence(asked)
    return shown | found | {"notes": [*notes, *found["notes"]]}


def _fitting(reader: Reader, ids: list[int]) -> tuple[list[int], list[str]]:
    """Keep the last tokens that fit the model, after a special token that opens the text."""
    limit = reader.limit
    if limit is None or len(ids) <= limit:
        return ids, []
    opening = ids[:1] if ids[0] in getattr(reader.tokenizer, "all_special_ids", ()) else []
    note = (
        f"the text has {len(ids)} tokens and the model reads {limit}: these are the last, "
        "counted from 0"
    )
    return opening + ids[len(ids) - limit + len(opening) :], [note]


def _attention(asked: Asked) -> dict[str, Any]:
    """Watch one pass over the text: where the position looks, in every layer and head."""
    from clearhead.recording import watch

    at, size = asked.at, len(asked.ids)
    whole = size <= MAP_LIMIT
    with watch(asked.reader.model, read=_readings(at, whole)) as records:
        logits = asked.reader.predict(asked.ids)
    found = (_layer(record, at, size) for record in records)
    layers = [layer for layer in found if layer is not None]
    layer = _index("layer", asked.layer, len(layers), default=len(layers) - 1)
    rows, head = layers[layer]["rows"], asked.head
    if head is not None:
        head = _index("head", head, rows.shape[0], default=0)
    row = rows.mean(0) if head is None else rows[head]
    return {
        "predictions": _predictions(asked, logits),
        "layer": layer,
        "head": head,
        "sources": _sources(asked, row, "weight"),
        "difference": None if logits is None else _difference(asked, layers, layer, head),
        "without": _without(asked, layers, logits) if asked.without else None,
        "heads": _heads(layers, asked.names),
        "map": _map(layers[layer], head) if whole else None,
        "notes": [str(note) for note in records.notes],
    }


def _readings(at: int, whole: bool) -> tuple[Any, ...]:
    from clearhead import masks
    from clearhead.readings import Entropy, Mass, Rows, Weights

    edges = (masks.diagonal(0), masks.diagonal(1), masks.first(1))
    return (Rows([at]), Entropy(), *map(Mass, edges), *((Weights(),) if whole else ()))


def _influence(asked: Asked) -> dict[str, Any]:
    """Measure for a model without attention how strongly the answer depends on each token."""
    import torch

    from clearhead.dependence import influence

    chosen = {"layer": asked.layer, "head": asked.head, "without": asked.without or None}
    for name, given in chosen.items():
        if given is not None:
            raise value_error(name, "chooses attention, and an RNN has none", hint="leave it out")
    model, tokens = asked.reader.model, torch.tensor([asked.ids])
    strengths = influence(model, tokens, position=asked.at)[0]
    return {
        "predictions": _predictions(asked, asked.reader.predict(asked.ids)),
        "layer": None,
        "head": None,
        "sources": None,
        "influence": _sources(asked, strengths, "influence"),
        "difference": None,
        "without": None,
        "heads": [],
        "map": None,
        "notes": [],
    }


def _difference(
    asked: Asked, layers: list[dict[str, Any]], layer: int, head: int | None
) -> dict[str, Any]:
    """Cut in all layers and heads at once, or in the layer and head that were chosen."""
    import torch

    from clearhead.views.difference import difference_without

    where, over, pairs = "all layers and heads at once", "mean weight, all layers", None
    shown = layers
    if asked.layer is not None or head is not None:
        rows = layers[layer]["rows"]
        heads = list(range(len(rows))) if head is None else [head]
        pairs = [(layers[layer]["layer"], each) for each in heads]
        shown = [{"rows": rows[heads]}]
        where = f"layer {layer}, " + ("all heads" if head is None else f"head {head}")
        over = f"mean weight, layer {layer}" if head is None else "weight, this head"
    weights = torch.cat([one["rows"] for one in shown]).mean(0)
    found = {"where": where, "mean_over": over}
    reader, ids = asked.reader, asked.ids
    return found | difference_without(reader, ids, asked.at, weights, asked.names, pairs, asked.top)


def _without(
    asked: Asked, layers: list[dict[str, Any]], logits: Tensor | None
) -> dict[str, Any] | None:
    """Ablate heads, all at once, and give the predictions before and after."""
    from clearhead.views.difference import predictions_without

    if logits is None:
        raise value_error("without", "needs a model that predicts tokens", got=asked.reader.name)
    heads, calls = [], [layer["layer"] for layer in layers]
    for layer, head in asked.without:
        layer = _index("without", layer, len(layers), default=0)
        head = _index("without", head, len(layers[layer]["rows"]), default=0)
        heads.append((calls[layer], head))
    found = predictions_without(asked.reader, asked.ids, asked.at, logits, heads, asked.top)
    # A module that is called several times, as in ALBERT, is one to a cut.
    note = "" if len(calls) == len(set(calls)) else "layers share a module: it is cut in each call"
    return {"heads": [list(pair) for pair in asked.without], "predictions": found, "note": note}


def _position(reader: Reader, ids: list[int], at: int | None) -> int:
    if at is None and reader.kind == "masked":
        if reader.mask_id in ids:
            return ids.index(reader.mask_id)
        special = set(getattr(reader.tokenizer, "all_special_ids", ()))
        real = [i for i, id_ in enumerate(ids) if id_ not in special]
        return real[-1] if real else len(ids) - 1
    return _index("at", at, len(ids), default=len(ids) - 1)


def _mask(reader: Reader, ids: list[int], at: int) -> tuple[list[int], bool]:
    """Mask the chosen token for a masked-token model, which could otherwise copy it."""
    if reader.kind != "masked" or reader.mask_id is None:
        return ids, False
    return [*ids[:at], reader.mask_id, *ids[at + 1 :]], True


def _index(argument: str, index: int | None, size: int, default: int) -> int:
    if index is None:
        return default
    if not -size <= index < size:
        raise value_error(argument, f"must be within 0..{size - 1}", got=index)
    return index % size


def _layer(record: Any, at: int, size: int) -> dict[str, Any] | None:
    """One self-attention call over the whole sequence, for the chosen position."""
    rows, entropy, self_, previous, first, *weights = record.value
    if record.kind != "self" or entropy.shape[-1] != size:
        return None
    return {
        "layer": record.layer,
        "call": record.call,
        "module": record.module,
        "rows": rows[0, :, 0].float(),
        "entropy": entropy[0, :, at].float(),
        "self": self_[0, :, at].float(),
        "previous": previous[0, :, at].float(),
        "first": first[0, :, at].float(),
        "weights": weights[0][0].float() if weights else None,
        "allowed": record.mask,
    }


def _predictions(asked: Asked, logits: Tensor | None) -> list[dict[str, Any]] | None:
    if logits is None:
        return None
    best = logits[asked.at].float().softmax(-1).topk(min(asked.top, logits.shape[-1]))
    ids = best.indices.tolist()
    names = [asked.reader.labels([id_])[0] for id_ in ids]
    return [
        {"id": id_, "label": name, "probability": probability}
        for id_, name, probability in zip(ids, names, best.values.tolist(), strict=True)
    ]


def _sources(asked: Asked, row: Tensor, key: str) -> list[dict[str, Any]]:
    best = row.topk(min(asked.top, row.shape[-1]))
    return [
        {"position": position, "label": asked.names[position], key: number}
        for position, number in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        if number > 0
    ]


def _heads(layers: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    table = []
    for number, layer in enumerate(layers):
        for head in range(layer["rows"].shape[0]):
            weight, source = layer["rows"][head].max(0)
            table.append(
                {
                    "layer": number,
                    "head": head,
                    "strongest": {
                        "position": int(source),
                        "label": names[int(source)],
                        "weight": float(weight),
                    },
                }
                | {
                    # Rounding leaves the entropy of one source a little below 0.
                    name: max(0.0, float(layer[name][head]))
                    for name in ("entropy", "self", "previous", "first")
                }
            )
    return table


def _map(layer: dict[str, Any], head: int | None) -> dict[str, Any]:
    weights = layer["weights"]
    chosen = weights.mean(0) if head is None else weights[head]
    allowed = layer["allowed"]
    size = chosen.shape[-1]
    may = allowed.dense(size, size).reshape(-1, size, size)[0] if allowed is not None else None
    return {
        "weights": chosen.tolist(),
        "allowed": may.tolist() if may is not None else [[True] * size for _ in range(size)],
    }
