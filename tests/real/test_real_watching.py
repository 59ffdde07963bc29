"""Watching real models: weights are those of eager, and known heads do their known work."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import transformers

import clearhead as ch
from clearhead import masks, readings

MODELS = Path(os.environ.get("CLEARHEAD_MODELS", ".cache/models"))
if not (MODELS / "smollm2" / "config.json").exists():
    pytest.skip(f"no models in {MODELS}: run `make real`", allow_module_level=True)


@pytest.fixture(scope="module")
def smollm2():
    return transformers.AutoModelForCausalLM.from_pretrained(MODELS / "smollm2").eval()


def twice(length: int, seed: int) -> torch.Tensor:
    some = torch.Generator().manual_seed(seed)
    return torch.randint(3, 49000, (1, length), generator=some).repeat(1, 2)


@torch.no_grad()
def test_smollm2_weights_are_those_of_eager(smollm2):
    tokens = twice(48, seed=0)
    with ch.watch(smollm2, read=readings.Weights()) as seen:
        watched = smollm2(tokens).logits
    assert torch.equal(watched, smollm2(tokens).logits)
    smollm2.set_attn_implementation("eager")
    eager = smollm2(tokens, output_attentions=True).attentions
    smollm2.set_attn_implementation("sdpa")
    assert len(seen) == len(eager) == 30
    for record, weights in zip(seen, eager, strict=True):
        assert record.value.shape == (1, 9, 96, 96)
        torch.testing.assert_close(record.value, weights, rtol=0, atol=1e-5)
        assert record.check is not None
        assert record.check < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("seed", [0, 1])
def test_smollm2_induction_and_previous_token_heads(smollm2, seed):
    tokens = twice(64, seed)
    read = (readings.Mass(masks.induction(tokens[0])), readings.Mass(masks.diagonal(1)))
    with ch.watch(smollm2, read=read) as seen:
        smollm2(tokens)
    induction = torch.stack([record.value[0][0, :, 64:].mean(-1) for record in seen])
    previous = torch.stack([record.value[1][0, :, 1:].mean(-1) for record in seen])
    best = {divmod(int(at), 9) for at in induction.flatten().topk(5).indices}
    assert {(18, 6), (17, 3), (17, 4), (18, 7)} <= best
    assert divmod(int(previous.argmax()), 9) == (16, 0)


@torch.no_grad()
def test_smollm2_generation_is_stitched(smollm2):
    tokens = twice(8, seed=2)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    with ch.watch(smollm2, read=readings.Weights(), layers=[0, -1]) as seen:
        made = smollm2.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert [record.layer for record in seen] == [0, 29]
    assert [record.prompt for record in seen] == [16, 16]
    smollm2.set_attn_implementation("eager")
    eager = smollm2(made[:, :-1], output_attentions=True).attentions
    smollm2.set_attn_implementation("sdpa")
    for record in seen:
        assert record.value.shape[-2:] == (20, 20)
        torch.testing.assert_close(record.value, eager[record.layer], rtol=0, atol=1e-5)


@torch.no_grad()
def test_minilm_padding_changes_no_real_row():
    model = transformers.AutoModel.from_pretrained(MODELS / "minilm").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / "minilm")
    texts = ["The cat sat.", "A much longer sentence about attention heads and their masks."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with ch.watch(model, read=(readings.Weights(), readings.Entropy())) as together:
        model(**batch)
    alone = tokenizer(texts[0], return_tensors="pt")
    with ch.watch(model, read=(readings.Weights(), readings.Entropy())) as single:
        model(**alone)
    size = alone["input_ids"].shape[1]
    assert size < batch["input_ids"].shape[1]
    for padded, plain in zip(together, single, strict=True):
        weights = padded.value[0][:1]
        assert weights[..., size:].max() == 0
        torch.testing.assert_close(weights[..., :size, :size], plain.value[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(padded.value[1][:1, :, :size], plain.value[1], rtol=0, atol=1e-4)


# Atoms are numbered from the left of the reactants; the product's atoms come from these.
ESTERIFICATIONS = {
    "CCC(=O)O.CO>>COC(=O)CC": [5, 6, 2, 3, 1, 0],
    "OC(=O)c1ccccc1.CO>>COC(=O)c1ccccc1": [9, 10, 1, 2, 3, 4, 5, 6, 7, 8],
}


@torch.no_grad()
@pytest.mark.parametrize("reaction", ESTERIFICATIONS)
def test_albert_maps_product_atoms_to_reactant_atoms(reaction):
    """Layer 10 of 0..11, head 5 of 0..7 (Schwaller et al. 2021): one module, twelve calls."""
    model, vocabulary = albert()
    tokens = ["[CLS]", *re.findall(">>|.", reaction), "[SEP]"]
    ids = torch.tensor([[vocabulary[token] for token in tokens]])
    with ch.watch(model, read=readings.Weights(), calls=10, heads=5) as seen:
        model(ids)
    (record,) = seen
    weights = record.value[0, 0]
    arrow = tokens.index(">>")
    atoms = [at for at, token in enumerate(tokens) if token in ("C", "O", "c")]
    reactants = [at for at in atoms if at < arrow]
    found = [int(weights[at, reactants].argmax()) for at in atoms if at > arrow]
    assert found == ESTERIFICATIONS[reaction]


def albert():
    folder = MODELS / "albert"
    config = transformers.AlbertConfig.from_pretrained(folder)
    assert (config.num_hidden_layers, config.num_attention_heads) == (12, 8)
    model = transformers.AlbertModel(config, add_pooling_layer=False).eval()
    state = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
    ours = {name.removeprefix("albert."): value for name, value in state.items()}
    missing = model.load_state_dict(ours, strict=False).missing_keys
    assert not missing
    lines = (folder / "vocab.txt").read_text().splitlines()
    return model, {token: at for at, token in enumerate(lines)}
