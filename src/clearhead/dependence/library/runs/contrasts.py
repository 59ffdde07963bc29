"""The two runs that a finding compares, as calls of the model and as lines of a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from clearhead.dependence.library.runs.caches import cache_name, switches
from clearhead.dependence.library.runs.modes import mode_lines, mode_options

if TYPE_CHECKING:
    from clearhead.dependence.library.making import Built
    from clearhead.dependence.library.rows import Row

__all__ = [
    "PADS",
    "TRIED",
    "Contrast",
    "Run",
    "contrasts",
    "given",
    "reading_the_future",
    "with_calls",
]

# How many other tokens are tried in the place of one before all are (few may change a hash), and
# how many pads stand on a side.
TRIED, PADS = 4, 3
OF_ENCODER = "of the encoder"
Arguments = dict[str, Any]


class Run(NamedTuple):
    """Calls of the model, each with the cache of the one before, and the logits to read."""

    calls: tuple[Arguments, ...]
    sample: int
    position: int | slice  # in the last call
    mode: str = ""
    output: str = "logits"
    axis: int = 1  # of the positions in the output


class Contrast(NamedTuple):
    """Two runs whose logits must be equal, and lines that make `one` and `two` of `inputs`."""

    one: Run
    two: Run
    lines: tuple[str, ...]


def given(row: Row, built: Built) -> Arguments:
    """The arguments of the question."""
    return {**built.inputs, **row.call}


def contrasts(row: Row, built: Built) -> Iterator[Contrast]:
    """Yield pairs of runs, any of which may show the finding; the likely ones come first."""
    form: Callable[[Row, Built], Iterator[Contrast]] = {
        "causal": _causal,
        "padding": _padding,
        "documents": _documents,
        "generation": _generation,
        "batch": _batch,
        "modes": _modes,
    }[row.form]
    return form(row, built)


def with_calls(contrast: Contrast, change: Callable[[Arguments], Arguments]) -> Contrast:
    """Change every call; the lines of a script stay as they are."""

    def changed(run: Run) -> Run:
        return run._replace(calls=tuple(change(call) for call in run.calls))

    return contrast._replace(one=changed(contrast.one), two=changed(contrast.two))


def with_output(contrast: Contrast, name: str, axis: int) -> Contrast:
    """Read another output of the model, whose positions are on an axis."""
    one, two = (run._replace(output=name, axis=axis) for run in (contrast.one, contrast.two))
    read = f".{name}[" if axis == 1 else f".{name}.movedim({axis}, 1)["
    return Contrast(one, two, tuple(line.replace(".logits[", read) for line in contrast.lines))


def reading_the_future(row: Row, built: Built, mode: str) -> Contrast:
    """Replace every token after the query of a row, in a mode of the model."""
    inputs, key, sample, query = given(row, built), built.stream, row.sample, row.query or 0
    changed = inputs[key].clone()
    changed[sample, query + 1 :] = changed[sample, query + 1 :].flip(0)
    changed[sample, -1] = _others(int(inputs[key][sample, -1]), built)[0]
    runs = [
        Run(({**inputs, key: tokens},), sample, query, mode) for tokens in (inputs[key], changed)
    ]
    after = f"[{sample}, {query + 1}:]"
    lines = (
        *mode_lines(mode),
        f'changed = inputs["{key}"].clone()',
        f"changed{after} = torch.tensor({changed[sample, query + 1 :].tolist()})",
        _both(key, f"[{sample}, {query}]", mode_options(mode)),
    )
    return Contrast(runs[0], runs[1], lines)


def _both(key: str, place: str, options: str = "") -> str:
    call = f'model(**(inputs | {{"{key}": ids}}){options}).logits{place}'
    return f'one, two = ({call} for ids in (inputs["{key}"], changed))'


def _causal(row: Row, built: Built) -> Iterator[Contrast]:
    yield from _replaced(row, built, given(row, built), built.stream)


def _documents(row: Row, built: Built) -> Iterator[Contrast]:
    """Pack three documents, whose position ids restart."""
    inputs = given(row, built)
    batch, length = inputs[built.stream].shape[:2]
    numbers = [3 * n // length for n in range(length)]
    sizes = [numbers.count(n) for n in range(3)]
    positions = torch.cat([torch.arange(size) for size in sizes]).expand(batch, -1)
    spelled = f"torch.cat([torch.arange(n) for n in {sizes}]).expand({batch}, -1)"
    off = switches(built.model)[1]
    line = f'inputs |= {{"position_ids": {spelled}}} | {off}'
    inputs |= {"position_ids": positions, **off}
    yield from _replaced(row, built, inputs, built.stream, (line,))


def _replaced(
    row: Row, built: Built, inputs: Arguments, key: str, before: tuple[str, ...] = ()
) -> Iterator[Contrast]:
    """Replace the one token by others."""
    sample, source, query = row.sample, row.source or 0, _read_at(row)
    for token in _others(int(inputs[key][sample, source]), built):
        changed = inputs[key].clone()
        changed[sample, source] = token
        lines = (
            *before,
            f'changed = inputs["{key}"].clone()',
            f"changed[{sample}, {source}] = {token}",
            _both(key, _spelled(sample, query)),
        )
        yield Contrast(
            Run((inputs,), sample, query), Run(({**inputs, key: changed},), sample, query), lines
        )


def _read_at(row: Row, shift: int = 0) -> int | slice:
    """The position of the logits; what the padding of an encoder moves is read at all of them."""
    return slice(None) if OF_ENCODER in row.variant else (row.query or 0) - shift


def _spelled(sample: int, position: int | slice) -> str:
    return f"[{sample}]" if isinstance(position, slice) else f"[{sample}, {position}]"


def _others(token: int, built: Built) -> list[int]:
    """List the other tokens, some that are spread over the vocabulary first."""
    lowest, number = built.lowest, built.vocabulary - built.lowest
    step = max(number // (TRIED + 1), 1)
    found = [lowest + (token - lowest + n * step) % number for n in range(1, TRIED + 1)]
    every = range(lowest, built.vocabulary)
    return [other for other in dict.fromkeys([*found, *every]) if other != token]


def _padding(row: Row, built: Built) -> Iterator[Contrast]:
    """Pad on a side; replace what stands there, or compare with the sample alone."""
    key = "input_ids" if OF_ENCODER in row.variant else built.stream
    left = "left" in (row.detail or row.variant)
    inputs, shift = given(row, built), PADS if left and key == built.stream else 0
    for pad in dict.fromkeys((pad_token(built), 0)):
        padded, line = _padded(inputs, pad, key, left)
        if row.detail.startswith("content"):
            yield from _replaced(row, built, padded, key, (line,))
        else:
            yield _alone(row, inputs, padded, key, shift, line)


def _alone(
    row: Row, inputs: Arguments, padded: Arguments, key: str, shift: int, line: str
) -> Contrast:
    sample, (batch, length) = row.sample, inputs[key].shape[:2]
    one, two = _read_at(row, shift), _read_at(row)
    alone = {
        name: value[[sample]] if _has_batch(value, batch) else value
        for name, value in inputs.items()
    } | {mask_of(key): torch.ones(1, length, dtype=torch.long)}
    lines = (
        f"alone = {{k: v[[{sample}]] if torch.is_tensor(v) else v for k, v in inputs.items()}}"
        f' | {{"{mask_of(key)}": torch.ones(1, {length}).long()}}',
        line,
        f"one, two = model(**alone).logits{_spelled(0, one)},"
        f" model(**inputs).logits{_spelled(sample, two)}",
    )
    return Contrast(Run((alone,), 0, one), Run((padded,), sample, two), lines)


def _has_batch(value: Any, batch: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == batch


def mask_of(key: str) -> str:
    """The name of the padding mask of token ids."""
    return key.replace("input_ids", "attention_mask")


def _padded(inputs: Arguments, pad: int, key: str, left: bool) -> tuple[Arguments, str]:
    """Pad everything that has one entry for each position of a stream."""
    batch, length = inputs[key].shape[:2]
    inner = key.startswith("decoder_")
    along = [
        name
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == length
        if name.startswith("decoder_") == inner and name != mask_of(key)
    ]
    fills = {name: pad if name == key else 0 for name in along} | {mask_of(key): 0}
    masked = {**inputs, mask_of(key): torch.ones(batch, length, dtype=torch.long)}
    sides = {name: _sides(masked[name], left) for name in fills}
    padded = {
        name: torch.nn.functional.pad(masked[name], sides[name], value=fill)
        for name, fill in fills.items()
    }
    sources = {name: f'inputs["{name}"]' for name in along}
    sources[mask_of(key)] = f"torch.ones({batch}, {length}).long()"
    spelled = ", ".join(
        f'"{name}": torch.nn.functional.pad({sources[name]}, {sides[name]}, value={fill})'
        for name, fill in fills.items()
    )
    return {**inputs, **padded}, f"inputs |= {{{spelled}}}"


def _sides(value: Tensor, left: bool) -> tuple[int, ...]:
    return (0, 0) * (value.ndim - 2) + ((PADS, 0) if left else (0, PADS))


def pad_token(built: Built) -> int:
    """The token that pads: the model's own, its end of text, or 0."""
    config: Any = getattr(built.model, "config", None)
    known = [getattr(config, name, None) for name in ("pad_token_id", "eos_token_id")]
    return next((token for token in known if isinstance(token, int) and token >= 0), 0)


def _generation(row: Row, built: Built) -> Iterator[Contrast]:
    """Decode up to the query, in single tokens after a prefill or in three chunks."""
    inputs, key, query = given(row, built), built.stream, row.query or 0
    length = inputs[key].shape[1]
    half, third = (length + 1) // 2, max(length // 3, 1)
    in_thirds = [0, third, 2 * third, length]
    cuts = in_thirds if row.detail == "in chunks" else [0, *range(half, length + 1)]
    chunks = [(a, b) for a, b in pairwise(cuts) if a <= query]
    name, on, off = cache_name(built.model), *switches(built.model)
    calls = tuple({**inputs, key: inputs[key][:, a:b], **on} for a, b in chunks)
    place = query - chunks[-1][0]
    lines = (
        f"answer = {{'{name}': None}}",
        f"for start, stop in {chunks}:",
        f'    chunk = {{"{key}": inputs["{key}"][:, start:stop], "{name}": answer["{name}"]}}',
        f"    answer = model(**(inputs | chunk | {on}))",
        f"one, two = model(**(inputs | {off})).logits[{row.sample}, {query}],"
        f" answer.logits[{row.sample}, {place}]",
    )
    whole = Run(({**inputs, **off},), row.sample, query)
    yield Contrast(whole, Run(calls, row.sample, place), lines)


def _batch(row: Row, built: Built) -> Iterator[Contrast]:
    """Turn the tokens of one sample round, and read another."""
    inputs, source, query, position = given(row, built), row.source, row.query or 0, row.sample
    keys = [key for key in ("input_ids", "decoder_input_ids") if key in inputs]
    for turned in (1, 5):
        changed, lines = dict(inputs), ["changed = {**inputs}"]
        for key in keys:
            changed[key] = inputs[key].clone()
            changed[key][source] = inputs[key][source].roll(turned)
            lines += [
                f'changed["{key}"] = inputs["{key}"].clone()',
                f'changed["{key}"][{source}] = changed["{key}"][{source}].roll({turned})',
            ]
        lines.append(
            f"one, two = (model(**x).logits[{query}, {position}] for x in (inputs, changed))"
        )
        yield Contrast(
            Run((inputs,), query, position), Run((changed,), query, position), tuple(lines)
        )


def _modes(row: Row, built: Built) -> Iterator[Contrast]:
    """Run the model as it is, and in the mode."""
    one = Run((given(row, built),), row.sample, row.query or 0)
    place = f"[{one.sample}, {one.position}]"
    lines = (
        f"with torch.no_grad(): one = model(**inputs).logits{place}",
        *mode_lines(row.detail),
        f"two = model(**inputs{mode_options(row.detail)}).logits{place}",
    )
    yield Contrast(one, one._replace(mode=row.detail), lines)
