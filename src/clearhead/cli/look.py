"""`clearhead look TEXT`: what a model predicts, and where the chosen position looks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from clearhead.cli._json import document
from clearhead.errors import value_error

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.cli._loading import Reader

HELP = "what the model predicts for a text, and where a position looks"
# A map of all weights is drawn for texts of at most this many tokens.
MAP_LIMIT = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `clearhead look`."""
    parser.add_argument("text", metavar="TEXT", help="the text to read")
    parser.add_argument(
        "--model",
        metavar="SPEC",
        help="a checkpoint directory, a Hugging Face directory or id, or a GGUF file "
        "(default: the GPT that is shipped)",
    )
    parser.add_argument(
        "--at",
        type=int,
        metavar="POSITION",
        help="the position that looks (default: the last; negative counts from the end)",
    )
    parser.add_argument(
        "--layer", type=int, metavar="L", help="the layer shown (default: the last)"
    )
    parser.add_argument(
        "--head", type=int, metavar="H", help="the head shown (default: the mean over heads)"
    )
    parser.add_argument(
        "--top", type=int, default=5, metavar="K", help="how many predictions and sources (5)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Look, then print as text or JSON."""
    if arguments.top < 1:
        raise value_error("--top", "must be at least 1", got=arguments.top)
    from clearhead.cli._loading import load

    if arguments.model is None:
        import torch

        # The shipped model is small: more threads would wait for each other longer than they work.
        torch.set_num_threads(1)
    seen = look(
        load(arguments.model),
        arguments.text,
        at=arguments.at,
        layer=arguments.layer,
        head=arguments.head,
        top=arguments.top,
    )
    if arguments.json:
        print(document(seen))
    else:
        render(seen)
    return 0


def look(
    reader: Reader,
    text: str,
    *,
    at: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    top: int = 5,
) -> dict[str, Any]:
    """Run the model over `text` once and gather what is shown, as one JSON-ready dictionary."""
    import clearhead as ch
    from clearhead.readings import Entropy, Mass, Rows, Weights

    ids = reader.encode(text)
    if not ids:
        raise value_error("TEXT", "needs at least one token", got=repr(text))
    at = _position(reader, ids, at)
    ids, masked = _mask(reader, ids, at)
    whole = len(ids) <= MAP_LIMIT
    read = (
        Rows([at]),
        Entropy(),
        Mass(ch.masks.diagonal(0)),
        Mass(ch.masks.diagonal(1)),
        Mass(ch.masks.first(1)),
        *((Weights(),) if whole else ()),
    )
    with ch.watch(reader.model, read=read) as records:
        logits = reader.predict(ids)
    layers = [_layer(record, at, len(ids)) for record in records]
    layers = [found for found in layers if found is not None]
    chosen = (layer, head)
    layer = _index("--layer", layer, len(layers), default=len(layers) - 1)
    rows = layers[layer]["rows"]
    if head is not None:
        head = _index("--head", head, rows.shape[0], default=0)
    row = rows.mean(0) if head is None else rows[head]
    names = reader.labels(ids)
    shown = {
        "model": reader.name,
        "kind": reader.kind,
        "text": text,
        "tokens": [{"position": i, "id": id_, "label": names[i]} for i, id_ in enumerate(ids)],
        "at": at,
        "masked": masked,
        "predictions": _predictions(reader, logits, at, top),
        "layer": layer,
        "head": head,
        "sources": _sources(row, names, top),
        "difference": None
        if logits is None
        else _difference(reader, ids, at, layers, layer, chosen, names, top),
        "heads": _heads(layers, names),
        "map": _map(layers[layer], head) if whole else None,
        "notes": [str(note) for note in records.notes],
    }
    return shown


def _difference(
    reader: Reader,
    ids: list[int],
    at: int,
    layers: list[dict[str, Any]],
    layer: int,
    chosen: tuple[int | None, int | None],
    names: list[str],
    top: int,
) -> dict[str, Any]:
    """Cut in all layers and heads at once, or in the layer and head that were asked for."""
    import torch

    from clearhead.cli._difference import difference

    where, pairs = "all layers and heads at once", None
    shown = layers
    if chosen != (None, None):
        heads = range(len(layers[layer]["rows"])) if chosen[1] is None else [chosen[1]]
        pairs = [(layers[layer]["layer"], head % len(layers[layer]["rows"])) for head in heads]
        shown = [{"rows": layers[layer]["rows"][[head for _, head in pairs]]}]
        where = f"layer {layer}, " + ("all heads" if chosen[1] is None else f"head {pairs[0][1]}")
    weights = torch.cat([one["rows"] for one in shown]).mean(0)
    return {"where": where, **difference(reader, ids, at, weights, names, pairs, top)}


def _position(reader: Reader, ids: list[int], at: int | None) -> int:
    if at is None and reader.kind == "masked":
        if reader.mask_id in ids:
            return ids.index(reader.mask_id)
        special = set(getattr(reader.tokenizer, "all_special_ids", ()))
        real = [i for i, id_ in enumerate(ids) if id_ not in special]
        return real[-1] if real else len(ids) - 1
    return _index("--at", at, len(ids), default=len(ids) - 1)


def _mask(reader: Reader, ids: list[int], at: int) -> tuple[list[int], bool]:
    """Hide the chosen token from a masked-token model, or it would only have to copy it."""
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


def _predictions(
    reader: Reader, logits: Tensor | None, at: int, top: int
) -> list[dict[str, Any]] | None:
    if logits is None:
        return None
    best = logits[at].float().softmax(-1).topk(min(top, logits.shape[-1]))
    ids = best.indices.tolist()
    names = [reader.labels([id_])[0] for id_ in ids]
    return [
        {"id": id_, "label": name, "probability": probability}
        for id_, name, probability in zip(ids, names, best.values.tolist(), strict=True)
    ]


def _sources(row: Tensor, names: list[str], top: int) -> list[dict[str, Any]]:
    best = row.topk(min(top, row.shape[-1]))
    return [
        {"position": position, "label": names[position], "weight": weight}
        for position, weight in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        if weight > 0
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
                    name: float(layer[name][head])
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


def render(seen: dict[str, Any]) -> None:
    """Draw what `look` gathered on the terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    heads = len([entry for entry in seen["heads"] if entry["layer"] == seen["layer"]])
    layers = 1 + max(entry["layer"] for entry in seen["heads"])
    console.print(
        Text.assemble(
            (seen["model"], "bold"), f": {layers} layers, {len(seen['heads'])} heads in all"
        )
    )
    console.print(_strip(seen))
    asker = Text.assemble(f"position {seen['at']} ", (seen["tokens"][seen["at"]]["label"], "bold"))
    if seen["predictions"] is None:
        console.print("\nThis model has no head that predicts tokens; it is only watched.")
    else:
        verb = "What stands at" if seen["masked"] else "What comes after"
        console.print(Text.assemble("\n", verb, " ", asker, "?"))
        console.print(_bars(seen["predictions"], "probability", console.width))
    which = f"mean over {heads} heads" if seen["head"] is None else f"head {seen['head']}"
    console.print(Text.assemble("\nWhere ", asker, f" looks (layer {seen['layer']}, {which})"))
    console.print(_bars(seen["sources"], "weight", console.width))
    if seen["difference"]:
        from clearhead.cli import _difference

        _difference.render(seen, console)
    if seen["map"]:
        console.print(
            f"\nWho attends to whom (layer {seen['layer']}, {which}; rows look at columns, in %)"
        )
        console.print(_grid(seen))
    console.print(Text.assemble("\nEvery head, at ", asker))
    console.print(_table(seen))
    console.print(
        "Weights say where a head looks, not what made the difference: "
        "a useful intuition, not a guarantee.",
        style="dim",
    )


def _strip(seen: dict[str, Any]) -> Any:
    from rich.text import Text

    strip = Text()
    for token in seen["tokens"]:
        chosen = token["position"] == seen["at"]
        strip.append(token["label"], style="bold reverse" if chosen else "")
        strip.append(" ")
    return strip


def _bars(entries: list[dict[str, Any]], key: str, width: int) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 1, 0, 1))
    room = max(8, min(40, width - 34))
    for entry in entries:
        cells = [
            Text(entry["label"], style="bold"),
            Text(f"{entry[key]:.3f}"),
            _bar(entry[key], room),
        ]
        if "position" in entry:
            cells.insert(0, Text(str(entry["position"]), justify="right", style="dim"))
        table.add_row(*cells)
    return table


def _bar(share: float, room: int) -> Any:
    from rich.text import Text

    eighths = round(share * room * 8)
    partial = " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return Text("█" * (eighths // 8) + partial, style="cyan")


def _grid(seen: dict[str, Any]) -> Any:
    from rich.table import Table
    from rich.text import Text

    names = [token["label"] for token in seen["tokens"]]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", style="dim", justify="right")
    for name in names:
        table.add_column(Text(name), justify="right", no_wrap=True)
    rows = zip(names, seen["map"]["weights"], seen["map"]["allowed"], strict=True)
    for position, (name, weights, allowed) in enumerate(rows):
        cells = [
            Text(f"{100 * weight:.0f}", style=_shade(weight)) if may else Text("·", style="dim")
            for weight, may in zip(weights, allowed, strict=True)
        ]
        table.add_row(Text(name, style="bold" if position == seen["at"] else ""), *cells)
    return table


def _shade(weight: float) -> str:
    return "bold cyan" if weight >= 0.5 else "cyan" if weight >= 0.2 else ""


def _table(seen: dict[str, Any]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("layer", "head", "strongest source", "entropy", "self", "previous", "first"):
        table.add_column(name, justify="left" if name == "strongest source" else "right")
    for entry in seen["heads"]:
        best = entry["strongest"]
        source = Text.assemble(
            (f"{best['position']:>3} ", "dim"), (best["label"], "bold"), f" {best['weight']:.2f}"
        )
        numbers = [
            Text(f"{entry[name]:.2f}", style=_shade(entry[name]) if name != "entropy" else "")
            for name in ("entropy", "self", "previous", "first")
        ]
        table.add_row(str(entry["layer"]), str(entry["head"]), source, *numbers)
    return table
