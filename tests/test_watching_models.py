"""Watching many architectures: weights equal eager's; docs/watch.md is made from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import clearhead as ch
from clearhead import readings
from tests.architectures import ALL, MORE, Architecture

transformers.logging.set_verbosity_error()

WEIGHTS = readings.Weights()
BY_NAME = {architecture.name: architecture for architecture in ALL}
CASES = [(one, backend) for one in ALL for backend in one.backends]
IDS = [f"{one.name}-{backend}" for one, backend in CASES]
PAGE = Path(__file__).parents[1] / "docs" / "watch.md"


def leaves(output: Any) -> list[Tensor]:
    """All tensors of a model's output, in order."""
    if isinstance(output, Tensor):
        return [output]
    if hasattr(output, "values"):
        output = list(output.values())
    return [x for part in output for x in leaves(part)] if isinstance(output, (tuple, list)) else []


def attentions(output: Any) -> list[Tensor]:
    """All weights that an eager model hands out, in the order of its calls."""
    towers = [output.get(name) for name in ("vision_model_output", "text_model_output")]
    if any(tower is not None for tower in towers):
        return [x for tower in towers for x in attentions(tower)]
    pairs = zip(
        output.get("decoder_attentions") or (), output.get("cross_attentions") or (), strict=False
    )
    alone = output.get("attentions") or output.get("encoder_attentions") or ()
    return [*alone, *(x for pair in pairs for x in pair)]


def assert_seen(seen: Any, eager: list[Tensor], rows: Any = None, beside: str = "$^") -> None:
    """Every map that eager hands out was seen, in the same order."""
    found = [record for record in seen if not re.search(beside, record.module)]
    assert len(found) == len(eager) > 0
    for record, weights in zip(found, eager, strict=True):
        assert record.value.shape == weights.shape, record.module
        got, want = (record.value, weights) if rows is None else (rows(record.value), rows(weights))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        assert record.check < 1e-5


@pytest.mark.parametrize(("one", "backend"), CASES, ids=IDS)
@torch.no_grad()
def test_one_pass(one: Architecture, backend: str):
    model, inputs = one.make(backend), one.read()
    before = leaves(model(**inputs))
    with ch.watch(model, read=WEIGHTS) as seen:
        after = leaves(model(**inputs))
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after))
    eager = attentions(one.make("eager")(**inputs, output_attentions=True))
    assert_seen(seen, eager, beside=one.beside)
    assert all(record.check is not None and record.check < 1e-5 for record in seen)
    assert {record.how for record in seen} <= {backend, "handwritten", "sdpa"}
    assert all(re.search(one.unseen + ": not seen", note) for note in seen.notes), seen.notes
    assert bool(seen.notes) == (one.unseen != "$^")


FULL = [(one, backend) for one, backend in CASES if one not in MORE or backend == one.backends[0]]
PADDED = [(one, backend) for one, backend in FULL if one.inputs in ("tokens", "pair")]


def real(weights: Tensor) -> Tensor:
    """The rows of real queries: those of padding differ by backend (uniform, or empty)."""
    return (
        torch.cat([weights[0, :, 4:].flatten(), weights[1].flatten()])
        if len(weights) == 2
        else weights
    )


@pytest.mark.parametrize(("one", "backend"), PADDED, ids=[f"{one.name}-{b}" for one, b in PADDED])
@torch.no_grad()
def test_left_padding(one: Architecture, backend: str):
    model, inputs = one.make(backend), one.read()
    keep = torch.ones_like(inputs["input_ids"])
    keep[0, :4] = 0
    inputs["attention_mask"] = keep
    before = leaves(model(**inputs))
    with ch.watch(model, read=WEIGHTS) as seen:
        after = leaves(model(**inputs))
    assert all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(before, after, strict=True)
    )
    eager = attentions(one.make("eager")(**inputs, output_attentions=True))
    assert_seen(seen, eager, real)
    for record in seen:
        if record.sizes[3] == keep.shape[1] and (
            record.kind == "cross" or record.sizes[2] == keep.shape[1]
        ):
            assert record.value[0, :, 4:, :4].max() < 1e-6


GENERATING = [
    (one, backend) for one, backend in FULL
    if one.family in ("decoder", "hybrid", "encoder-decoder") and one.inputs != "sound"
]  # fmt: skip


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    some = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    inputs = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    return model.generate(**inputs, **{**some, **options})


def teach(one: Architecture, inputs: dict[str, Tensor], made: Tensor) -> list[Tensor]:
    """The weights of one eager pass over everything but the last token."""
    keep = inputs.get("attention_mask")
    if one.family == "encoder-decoder":
        given = {**inputs, "decoder_input_ids": made[:, :-1]}
    else:
        given = {"input_ids": made[:, :-1]}
        if keep is not None:
            rest = keep.new_ones(len(made), made.shape[1] - 1 - keep.shape[1])
            given["attention_mask"] = torch.cat([keep, rest], 1)
            if one.name not in ("Bloom", "MPT", "Falcon"):
                places = given["attention_mask"].cumsum(-1) - 1
                given["position_ids"] = places.clamp(min=0)
    return attentions(one.make("eager")(**given, output_attentions=True))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("one", "backend"), GENERATING, ids=[f"{one.name}-{backend}" for one, backend in GENERATING]
)
@torch.no_grad()
def test_generation_is_stitched(one: Architecture, backend: str, padded: bool):
    model, inputs = one.make(backend), one.read()
    inputs.pop("decoder_input_ids", None)
    if padded:
        keep = torch.ones_like(inputs["input_ids"])
        keep[0, :4] = 0
        inputs["attention_mask"] = keep
    before = generate(model, inputs)
    with ch.watch(model, read=WEIGHTS) as seen:
        after = generate(model, inputs)
    assert torch.equal(before, after)
    assert_seen(seen, teach(one, inputs, after), real if padded else None)
    if one.family != "encoder-decoder":
        assert {record.prompt for record in seen} == {11}
        assert {record.sizes[2:] for record in seen} == {(14, 14)}


CACHES = {
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 4},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 3", "GPT-2"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", CACHES)
@torch.no_grad()
def test_caches(name: str, backend: str, cache: str):
    one = BY_NAME[name]
    model, inputs = one.make(backend), one.read()
    with ch.watch(model, read=WEIGHTS) as seen:
        made = generate(model, inputs, **CACHES[cache])
    assert torch.equal(made, generate(model, inputs, **CACHES[cache]))
    assert_seen(seen, teach(one, inputs, made))
    assert not seen.notes


BEAMS = {
    "best": {"num_beams": 3},
    "all": {"num_beams": 3, "num_return_sequences": 3},
    "early": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": -2.0},
    "late": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 3.0, "use_cache": False},
    "drawn": {"num_beams": 3, "num_return_sequences": 2, "do_sample": True},
    "static": {"num_beams": 3, "num_return_sequences": 3, **CACHES["static"]},
    "chunks": {"num_beams": 3, "num_return_sequences": 3, **CACHES["chunks"]},
}
BEAMING = [(name, "sdpa", beams) for name in ("Llama", "Mistral") for beams in BEAMS]
BEAMING += [(name, "eager", beams) for name in ("Llama", "BART") for beams in ("all", "early")]
BEAMING += [(name, "sdpa", beams) for name in ("BART", "T5") for beams in ("all", "early", "late")]
BEAMING += [("Bloom", "eager", "early"), ("GPT-2", "sdpa", "early"), ("Gemma 3", "sdpa", "static")]


def lengths(made: Tensor, prompt: int, ends: list[int]) -> list[int]:
    """How long each sequence is, with the token that ends it."""
    found = []
    for row in made.tolist():
        after = [at + 1 for at in range(prompt, len(row)) if row[at] in ends]
        found.append(min([*after, len(row)]))
    return found


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "backend", "beams"), BEAMING)
@torch.no_grad()
def test_beams(name: str, backend: str, beams: str, padded: bool):
    """Each sequence that came out has the rows of a pass of its own, and none where it ended."""
    one, options = BY_NAME[name], {"max_new_tokens": 6, "min_new_tokens": None, **BEAMS[beams]}
    model, inputs = one.make(backend), one.read()
    inputs.pop("decoder_input_ids", None)
    if padded:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :4] = 0
    prompt = 11 if one.family == "decoder" else 1
    if beams in ("early", "late"):  # tokens that are about to come end the sequence
        free = generate(model, inputs, num_beams=3, max_new_tokens=6, eos_token_id=None)
        options["eos_token_id"] = [int(free[0, prompt + 2]), int(free[1, prompt + 3]), 7, 8]
    else:
        options["eos_token_id"] = None
    torch.manual_seed(5)
    before = generate(model, inputs, **options)
    torch.manual_seed(5)
    with ch.watch(model, read=WEIGHTS) as seen:
        made = generate(model, inputs, **options)
    assert torch.equal(before, made)
    assert not seen.notes
    decoder = [record for record in seen if record.prompt is not None]
    assert {record.prompt for record in decoder} == {prompt}
    assert {record.sizes[::2] for record in decoder} == {(len(made), made.shape[1] - 1)}
    apart = 0.0
    for at, length in enumerate(lengths(made, prompt, options["eos_token_id"] or [])):
        sample = at * 2 // len(made)
        own = {key: x[sample : sample + 1] for key, x in inputs.items()}
        eager = teach(one, own, made[at : at + 1, :length])[-len(decoder) :]
        some = slice(4 if padded and sample == 0 and prompt > 1 else 0, length - 1)
        for record, weights in zip(decoder, eager, strict=True):
            source = weights.shape[3]
            got = record.value[at, :, some, :source]
            torch.testing.assert_close(got, weights[0, :, some], rtol=0, atol=1e-5)
            assert not record.value[at, :, length - 1 :].any()
            other = record.value[at - 1, :, some, :source]
            apart = max(apart, float((other - weights[0, :, some]).abs().max()))
    assert apart > 1e-3  # rows of another sequence would have been found out


@torch.no_grad()
def test_beams_keep_what_generate_answers():
    model, inputs = BY_NAME["Llama"].make("sdpa"), BY_NAME["Llama"].read()
    for asked in (None, False, True):
        options = {"num_beams": 2, "return_dict_in_generate": asked}
        before = generate(model, inputs, **options)
        with ch.watch(model):
            after = generate(model, inputs, **options)
        assert type(after) is type(before)
        for name in before if asked else ():
            assert asked
            assert type(before[name]) is type(after[name])
        assert all(map(torch.equal, leaves(before)[:1], leaves(after)[:1]))


DRAFTED = [
    (name, drafts)
    for name in ("Llama", "Mistral", "Gemma 3", "GPT-2", "Falcon", "BART", "T5")
    for drafts in ("assistant", "prompt")
] + [("Llama", "itself"), ("Mistral", "itself"), ("Gemma 3", "itself")]


@pytest.mark.parametrize(("name", "drafts"), DRAFTED)
@torch.no_grad()
def test_drafted_tokens_that_were_rejected_leave_no_rows(name: str, drafts: str):
    one = BY_NAME[name]
    model, inputs = one.make("sdpa"), one.read(batch=1)
    inputs = {"input_ids": inputs["input_ids"][:, :6].repeat(1, 2)}
    helper: Any = one.make("sdpa")
    some = torch.Generator().manual_seed(3)
    for parameter in helper.parameters():
        parameter += (
            0.4 * parameter.std().nan_to_num() * torch.randn(parameter.shape, generator=some)
        )
    options: dict[str, Any] = {
        "assistant": {"assistant_model": helper},
        "prompt": {"prompt_lookup_num_tokens": 3},
        "itself": {"assistant_early_exit": 1},
    }[drafts]
    options |= {"max_new_tokens": 9, "eos_token_id": None, "min_new_tokens": None}
    before = generate(model, inputs, **options)
    rows = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(
            kwargs["decoder_input_ids" if one.family == "encoder-decoder" else "input_ids"].shape[1]
        ),
        with_kwargs=True,
    )
    with ch.watch(model, read=WEIGHTS) as seen:
        made = generate(model, inputs, **options)
    handle.remove()
    assert torch.equal(before, made)
    assert sum(rows) > made.shape[1] - 1  # some were computed twice
    assert_seen(seen, teach(one, inputs, made))
    assert bool(seen.notes) == (drafts == "itself")


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 3", "GPT-2"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@torch.no_grad()
def test_a_generation_that_goes_on_from_a_cache(name: str, backend: str):
    one = BY_NAME[name]
    model, inputs = one.make(backend), one.read()
    first = generate(model, inputs, return_dict_in_generate=True)
    more = torch.randint(3, 53, (2, 3), generator=torch.Generator().manual_seed(7))
    said = {"input_ids": torch.cat([first.sequences, more], 1), "cache": first.cache}
    with ch.watch(model, read=WEIGHTS) as seen:
        made = generate(model, said)
    past = first.sequences.shape[1] - 1
    for record, weights in zip(seen, teach(one, inputs, made), strict=True):
        assert record.prompt == past + 1 + 3
        got, want = record.value, weights[:, :, past:]
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert not seen.notes


@torch.no_grad()
def test_several_samples_and_embeddings():
    one = BY_NAME["Llama"]
    model, inputs = one.make("sdpa"), one.read()
    with ch.watch(model, read=WEIGHTS) as seen:
        made = generate(model, inputs, do_sample=True, num_return_sequences=3)
    assert len(made) == 6
    assert_seen(seen, teach(one, {}, made))
    vectors = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}  # type: ignore
    for beams in (1, 2):
        with ch.watch(model, read=WEIGHTS) as seen:
            made = generate(model, vectors, num_beams=beams, max_new_tokens=5)
        whole = torch.cat([inputs["input_ids"], made], 1)
        assert_seen(seen, teach(one, {}, whole))
        assert {record.prompt for record in seen} == {11}


THROUGH = [(name, cache) for name in ("Llama", "Mistral", "Gemma 3") for cache in CACHES]
THROUGH += [(name, "dynamic") for name in ("Llama", "Gemma 3", "GPT-2", "BART", "T5", "Whisper")]


@pytest.mark.parametrize(("name", "cache"), THROUGH)
@torch.no_grad()
def test_through_in_generation(name: str, cache: str):
    """clearhead's kernel makes the steps: the tokens are those of the model's own."""
    one, options = BY_NAME[name], CACHES.get(cache, {})
    model, inputs = one.make("sdpa"), one.read()
    options = {**options, "return_dict_in_generate": True, "output_logits": True}
    before = generate(model, inputs, **options)
    with ch.watch(model, read=WEIGHTS) as plain:
        generate(model, inputs, **options)
    with ch.watch(model, read=WEIGHTS, through=True) as seen:
        after = generate(model, inputs, **options)
    assert torch.equal(before.sequences, after.sequences)
    changed = 0
    for own, ours in zip(before.logits, after.logits, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-4)
        changed += int((ours != own).sum())
    assert changed  # another kernel made them, indeed
    for record, other in zip(seen, plain, strict=True):
        torch.testing.assert_close(record.value, other.value, rtol=0, atol=1e-5)
        assert record.check is not None
        assert record.check < 1e-4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 2"])
@torch.no_grad()
def test_flex(name: str, monkeypatch: pytest.MonkeyPatch, cpp_compiler: None):
    """The backend flex_attention, with the kernel that needs no compiler; its masks need one."""
    from torch.nn.attention import flex_attention as flex
    from transformers.integrations import flex_attention as theirs

    def uncompiled(query, key, value, training=False, **options):
        return flex.flex_attention(query, key, value, **options)

    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(theirs, "compile_friendly_flex_attention", uncompiled)
    one = BY_NAME[name]
    model, inputs = one.make("flex_attention"), one.read()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, :4] = 0
    before = leaves(model(**inputs))
    with ch.watch(model, read=WEIGHTS) as seen:
        after = leaves(model(**inputs))
    assert all(map(torch.equal, before, after))
    assert_seen(seen, attentions(one.make("eager")(**inputs, output_attentions=True)), real)
    assert {record.how for record in seen} == {"flex_attention"}


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@torch.no_grad()
def test_steps_by_hand_are_records_of_their_own():
    one = BY_NAME["Llama"]
    model, tokens = one.make("sdpa"), one.read()["input_ids"]
    with ch.watch(model, read=WEIGHTS) as seen:
        first = model(tokens[:, :7], use_cache=True)
        for at in range(7, 11):
            model(tokens[:, at : at + 1], past_key_values=first.past_key_values, use_cache=True)
    eager = one.make("eager")(tokens, output_attentions=True).attentions
    steps = [record for record in seen if record.layer == 1]
    assert [record.call for record in steps] == list(range(5))
    for at, record in enumerate(steps[1:], 7):
        assert record.value.shape == (2, 6, 1, at + 1)
        want = eager[1][:, :, at : at + 1, : at + 1]
        torch.testing.assert_close(record.value, want, rtol=0, atol=1e-5)


@torch.no_grad()
def test_readings_of_a_generation_speak_of_whole_sequences():
    one = BY_NAME["Mistral"]
    model, inputs = one.make("sdpa"), one.read()
    read = (readings.Received(), readings.Distance(), readings.TopK(3), readings.Rows([-1]))
    with ch.watch(model, read=read) as seen:
        made = generate(model, inputs)
    with ch.watch(model, read=read) as whole:
        model(made[:, :-1])
    for stitched, once in zip(seen, whole, strict=True):
        torch.testing.assert_close(stitched.value[0], once.value[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(stitched.value[1], once.value[1], rtol=0, atol=1e-4)
        assert torch.equal(stitched.value[2].sources, once.value[2].sources)
        torch.testing.assert_close(stitched.value[3], once.value[3], rtol=0, atol=1e-5)


@torch.no_grad()
def test_clearheads_own_models():
    from clearhead import models

    tokens = torch.arange(6)[None] % 5
    model = models.GPT(5, layers=2, heads=2, width=16, length=8).eval()
    with ch.watch(model, read=WEIGHTS) as seen:
        _, weights = model(tokens, read=WEIGHTS)
    assert {record.how for record in seen} == {"attend"}
    for record, own in zip(seen, weights, strict=True):
        torch.testing.assert_close(record.value, own)
        assert torch.equal(record.value, record.value.tril())


def test_registries_are_as_before():
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    def registries():
        return (
            dict(AttentionInterface._global_mapping),
            dict(AttentionMaskInterface._global_mapping),
            AttentionInterface.__dict__["get_interface"],
        )

    model: Any = BY_NAME["Llama"].make("sdpa")
    before, config, own = registries(), model.config.to_dict(), set(model.__dict__)
    with ch.watch(model):
        model(**BY_NAME["Llama"].read())
    with pytest.raises(ZeroDivisionError), ch.watch(model):
        raise ZeroDivisionError
    assert registries() == before
    assert model.config.to_dict() == config
    assert set(model.__dict__) == own


def table() -> str:
    """Render the table of docs/watch.md by watching each architecture once."""
    lines = ["| Architecture | Kind | Backend: seen by | Maps | Of note |", "|---|---|---|---|---|"]
    for one in ALL:
        seen_by, maps = [], ""
        for backend in one.backends:
            model = one.make(backend)
            with torch.no_grad(), ch.watch(model, read=readings.Entropy()) as seen:
                model(**one.read())
            how = ", ".join(sorted({record.how for record in seen}))
            seen_by.append(f"{backend}: {how}")
            kinds = [record.kind for record in seen]
            maps = ", ".join(
                f"{kinds.count(kind)} {kind}" for kind in ("self", "cross") if kind in kinds
            )
        lines.append(f"| {one.name} | {one.family} | {'; '.join(seen_by)} | {maps} | {one.note} |")
    return "\n".join(lines)


def test_the_page_is_up_to_date():
    text = PAGE.read_text()
    start, end = "<!-- table -->\n", "<!-- end of table -->"
    assert text.partition(start)[2].partition(end)[0].strip() == table(), (
        "docs/watch.md: put the table of `python tests/test_watching_models.py` in"
    )
    assert len(ALL) >= 30


if __name__ == "__main__":
    print(table())
