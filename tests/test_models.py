"""The teaching models: shapes, what may flow where, text, and models on disk."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clearhead import masks, models, readings
from clearhead.models import BERT, GPT, RNN, Characters, checkpoint
from clearhead.models.bert import hide

KINDS = (GPT, BERT, RNN)
SMALL = dict(layers=2, width=12, length=11, dropout=0.0)


def small(kind, vocabulary: Characters | int = 17, **changes) -> Any:
    torch.manual_seed(3)
    heads = {} if kind is RNN else {"heads": 3}
    model = kind(vocabulary, **{**SMALL, **heads, **changes}).double().eval()
    # A fresh model is near uniform; large weights make a leak stand out.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 and kind is not RNN else 1)
    return model


def tokens(batch=3, position=7, size=17):
    return torch.randint(2, size, (batch, position), generator=torch.Generator().manual_seed(5))


# --- shapes and what flows where ------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "position"), [(3, 7), (1, 1), (2, 11)])
def test_logits_have_one_row_for_every_position(kind, batch, position):
    assert small(kind)(tokens(batch, position)).shape == (batch, position, 17)


@pytest.mark.parametrize("kind", [GPT, RNN])
def test_the_past_does_not_move_when_the_future_changes(kind):
    model, before = small(kind), tokens()
    for edit in range(1, 7):
        after = before.clone()
        after[:, edit:] = (after[:, edit:] - 2 + 5) % 15 + 2
        moved = (model(before) - model(after)).abs().amax(dim=(0, 2))
        assert moved[:edit].max() < 1e-12
        assert moved[edit] > 1e-4


def test_bert_looks_both_ways():
    model, before = small(BERT), tokens()
    for edit in (0, 3, 6):
        after = before.clone()
        after[:, edit] = (after[:, edit] - 2 + 5) % 15 + 2
        assert (model(before) - model(after)).abs().amax(dim=(0, 2)).min() > 1e-6


@pytest.mark.parametrize("mask", ["lengths", "keep"])
def test_padding_does_not_reach_real_positions(mask):
    model, text = small(BERT), tokens(2, 9)
    real = torch.arange(9) < torch.tensor([[9], [5]])
    allowed = masks.lengths([9, 5]) if mask == "lengths" else masks.keep(real)
    padded = model(text, mask=allowed)
    torch.testing.assert_close(padded[1:, :5], model(text[1:, :5]), rtol=1e-12, atol=1e-12)
    other = text.where(real, torch.tensor(7))
    assert torch.equal(model(other, mask=allowed)[1, :5], padded[1, :5])
    assert (model(text)[1, :5] - padded[1, :5]).abs().max() > 1e-4


def test_packed_documents_in_gpt_do_not_see_each_other():
    model, text = small(GPT), tokens(1, 8)
    packed = model(text, mask=masks.document(torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])))
    other = text.clone()
    other[:, :3] = 4
    again = model(other, mask=masks.document(torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])))
    torch.testing.assert_close(packed[:, 3:], again[:, 3:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [GPT, BERT])
def test_readings_come_one_for_each_layer_and_change_nothing(kind):
    model, text = small(kind), tokens()
    logits, seen = model(text, read=readings.Weights())
    assert torch.equal(logits, model(text))
    assert [tuple(weights.shape) for weights in seen] == [(3, 3, 7, 7)] * 2
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(3, 3, 7, dtype=torch.float64))
    assert (seen[1].triu(1).abs().max() == 0) == (kind is GPT)


def test_default_sizes_are_about_eight_hundred_thousand_parameters():
    # 4 layers of 4 w^2 + 8 w^2 weights, w + 5w biases and two norms of 2w; then the rest.
    w, words = 128, 96
    blocks = 4 * (12 * w * w + w + 5 * w + 4 * w)
    around = 2 * words * w + 2 * w
    assert sum(p.numel() for p in GPT(words).parameters()) == blocks + around
    for kind in KINDS:
        assert 0.75e6 < sum(p.numel() for p in kind(words).parameters()) < 0.9e6


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_guess_is_uniform(kind):
    model = kind(97, **({} if kind is RNN else {"heads": 4}), layers=2, width=32).eval()
    text = tokens(8, 30, 97)
    loss = torch.nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten())
    assert loss.item() == pytest.approx(math.log(97), abs=0.15)


# --- sizes that no model can have ------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(heads=5), "heads: needs to divide width; got 5 heads, width 12"),
        (dict(layers=0), "layers: needs to be a whole number of 1 or more; got 0"),
        (dict(width=-4), "width: needs"),
        (dict(heads=0), "heads: needs"),
        (dict(length=2.5), "length: needs"),
        (dict(vocabulary=0), "vocabulary: needs"),
        (dict(dropout=1.0), "dropout: needs to be at least 0 and below 1"),
        (dict(dropout=math.nan), "dropout: needs"),
    ],
)
@pytest.mark.parametrize("kind", [GPT, BERT])
def test_impossible_sizes_are_refused(kind, changes, words):
    with pytest.raises(ValueError, match=words):
        kind(**{"vocabulary": 17, "heads": 3, **SMALL, **changes})


@pytest.mark.parametrize("kind", [GPT, BERT])
def test_too_many_tokens_are_refused(kind):
    with pytest.raises(ValueError, match="tokens: the model reads 11 positions; got 12") as caught:
        small(kind)(tokens(1, 12))
    assert "at most 11, as the last ones: tokens[:, -11:]" in str(caught.value)


@pytest.mark.parametrize("kind", [GPT, BERT, RNN])
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("hell", TypeError, r"got str(?s:.)*encode\(text\)\[None\]"),
        ([1, 2], TypeError, "got list"),
        (torch.tensor([1, 2]), ValueError, r"\(2,\)(?s:.)*tokens\[None\]"),
        (torch.ones(1, 2, 3).long(), ValueError, r"\(1, 2, 3\)"),
        (torch.ones(1, 2), TypeError, "got torch.float32"),
        (torch.tensor([[]]), TypeError, "got torch.float32"),
    ],
)
def test_what_are_no_tokens_is_refused(kind, given, error, words):
    model = kind(17, layers=1, width=8)
    with pytest.raises(error, match=rf"tokens: .*\(batch, position\)(?s:.)*{words}"):
        model(given)


def test_a_full_cache_is_refused():
    model = small(GPT)
    cache = model.new_cache()
    model(tokens(1, 9), cache=cache)
    with pytest.raises(ValueError, match="11 positions; got 12"):
        model(tokens(1, 3), cache=cache)


# --- masked tokens ----------------------------------------------------------------------------


def test_hidden_tokens_follow_the_shares_of_the_paper():
    generator = torch.Generator().manual_seed(1)
    shown_from = torch.randint(2, 50, (200, 100), generator=generator)
    real = torch.arange(100) < torch.randint(50, 101, (200, 1), generator=generator)
    shown, targets = hide(shown_from, real, 50, generator)
    asked = targets != -100
    assert not (asked & ~real).any()
    assert torch.equal(targets[asked], shown_from[asked])
    assert torch.equal(shown[~asked], shown_from[~asked])
    count = asked.sum().item()
    assert count / real.sum().item() == pytest.approx(0.15, abs=0.01)
    assert (shown[asked] == 1).sum().item() / count == pytest.approx(0.8, abs=0.03)
    # A random token is the old one once in 48 times.
    same = (shown[asked] == shown_from[asked]).sum().item() / count
    assert same == pytest.approx(0.1 + 0.1 / 48, abs=0.02)
    assert (shown != 0).all()


def test_there_is_always_a_question():
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        one = torch.full((1, 1), 5)
        _, targets = hide(one, torch.ones(1, 1, dtype=torch.bool), 9, generator)
        assert targets.item() == 5


def test_the_task_of_bert_pads_and_the_task_of_gpt_shifts():
    windows = tokens(6, 12)
    generator = torch.Generator().manual_seed(0)
    shown, targets, mask = small(BERT).task(windows, generator)
    real = mask.dense(11, 11).squeeze(1)[:, 0]
    assert shown.shape == targets.shape == (6, 11)
    assert ((shown == 0) == ~real).all()
    assert real[:, 0].all()
    before, after, none = small(GPT).task(windows, generator)
    assert torch.equal(before[:, 1:], after[:, :-1])
    assert none is None


# --- text -------------------------------------------------------------------------------------


def test_characters_come_back():
    text = "hello, 'Nell'!\n\t\u00e9\u4e16\U0001f41a"
    letters = Characters.of(text)
    assert letters.decode(letters.encode(text)) == text
    assert letters.encode("").shape == (0,)
    assert letters.encode("").dtype == torch.long


def test_special_tokens_are_read_where_they_are_written_out():
    letters = Characters.of("hello[]MASK", special=BERT.special)
    assert letters.encode("he[MASK]o").tolist()[2] == 1
    assert len(letters.encode("he[MASK]o", special=False)) == 9
    assert len(letters.encode("[MASK]", special=False)) == 6
    assert letters.encode("[PAD][MASK]").tolist() == [0, 1]
    assert letters.decode([0, 1]) == "[PAD][MASK]"


@pytest.mark.parametrize(
    ("text", "name", "position"),
    [("he\u20aco", "'\u20ac'", 2), ("Hello", "'H'", 0), ("hell\udcff", r"'\\udcff'", 4)],
)
def test_an_unknown_character_is_named_with_its_place(text, name, position):
    with pytest.raises(ValueError, match=f"the character {name} at position {position} is not"):
        Characters.of("hello").encode(text)


def test_a_vocabulary_prints_as_what_makes_it():
    for letters in (Characters.of("he\nllo"), Characters.of("hello", special=BERT.special)):
        again = eval(repr(letters))
        assert (again.characters, again.special) == (letters.characters, letters.special)


def test_a_vocabulary_holds_a_character_once():
    with pytest.raises(ValueError, match="each character once"):
        Characters("hello")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "has no text in it"),
        (b" \n\t\r\n", "has no text in it"),
        (b"hello\x00hello", "is binary: byte 5 is zero"),
        (b"hell\xff", "is not UTF-8 text: byte 4 is 0xff"),
        ("hello".encode("utf-16"), "is binary"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, data, words):
    (tmp_path / "text").write_bytes(data)
    with pytest.raises(ValueError, match=words):
        models.read_text(tmp_path / "text")


def test_text_is_read_whatever_the_line_ends(tmp_path):
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert models.read_text(tmp_path / "text") == "one\ntwo\nthree\n"


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        models.read_text(tmp_path / "none")
    with pytest.raises(ValueError, match="needs to be a text file"):
        models.read_text(tmp_path)


# --- models on disk ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_comes_back(kind, tmp_path):
    model = small(kind, Characters.of("hello yellow shell", kind.special)).float()
    models.save(model, tmp_path / "deep" / "er")
    back: Any = models.load(tmp_path / "deep" / "er")
    assert models.is_checkpoint(str(tmp_path / "deep" / "er"))
    assert not back.training
    text = back.vocabulary.encode("hello shell")[None]
    # Not bit for bit: a GRU sums in another order where its weights lie apart in memory.
    torch.testing.assert_close(back(text), model(text), rtol=1e-6, atol=1e-6)
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert all(parameter.requires_grad for parameter in back.parameters())
    assert os.listdir(tmp_path / "deep" / "er") == ["model.safetensors"]


def test_a_model_without_characters_comes_back(tmp_path):
    models.save(small(GPT).float(), tmp_path)
    assert models.load(tmp_path).vocabulary == 17


def test_half_precision_on_disk_is_single_in_memory(tmp_path):
    model = small(GPT).float()
    models.save(model, tmp_path, dtype=torch.float16)
    back = models.load(tmp_path)
    for name, tensor in back.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, model.state_dict()[name].half().float())


@pytest.fixture
def saved(tmp_path):
    models.save(small(GPT, Characters.of("hello")).float(), tmp_path)
    return tmp_path


def tampered(path, change_tensors=None, **header):
    file = path / checkpoint.MODEL_FILE
    tensors, old = checkpoint.read(file)
    (change_tensors or (lambda _: None))(tensors)
    whole = {key: value for key, value in {**old, **header}.items() if value is not ...}
    save_file(tensors, file, metadata={"clearhead": json.dumps(whole)})


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_refused(saved, share):
    data = (saved / checkpoint.MODEL_FILE).read_bytes()
    (saved / checkpoint.MODEL_FILE).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match="cut short or no safetensors file"):
        models.load(saved)
    assert not models.is_checkpoint(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("norm.bias"), "lacks the tensors norm.bias"),
        (lambda t: t.update(extra=torch.ones(2)), "does not know: extra"),
        (lambda t: t.update({"norm.bias": torch.ones(5)}), r"norm.bias has shape \(5,\) where"),
        (lambda t: t["norm.bias"].fill_(math.nan), "norm.bias holds NaN or inf"),
        (lambda t: t.clear(), "it says it has 2 layers, and holds 0 tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved, change, words):
    tampered(saved, change)
    with pytest.raises(ValueError, match=words):
        models.load(saved)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (dict(version=2), "version 2 of the format, and this clearhead reads version 1"),
        (dict(version=...), "version None"),
        (dict(model="lstm"), "needs to be one of gpt, bert, rnn; got 'lstm'"),
        (dict(model=[1]), "needs to be one of gpt"),
        (dict(width=13), "heads: needs to divide width"),
        (dict(width=24), "has shape"),
        (dict(layers=10**9), "1000000000"),
        (dict(layers="two"), "'two'"),
        (dict(heads=4), "needs to be even"),
        (dict(colour="red"), "does not describe a model"),
        (dict(vocabulary="hellooo"), "each character once"),
        (dict(vocabulary="helo!"), "has shape"),
        (dict(vocabulary=None), "vocabulary"),
    ],
)
def test_headers_that_do_not_fit_are_refused(saved, header, words):
    tampered(saved, **header)
    with pytest.raises(ValueError, match=words):
        models.load(saved)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no model\.safetensors in"):
        models.load(tmp_path)
    with pytest.raises(ValueError, match=r"there is no model\.safetensors in"):
        models.load(tmp_path / "none")
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="was not written by clearhead"):
        models.load(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"clearhead": "{"})
    with pytest.raises(ValueError, match="its header is no JSON"):
        models.load(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"clearhead": "[]"})
    with pytest.raises(ValueError, match="version None"):
        models.load(tmp_path)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_model(saved, monkeypatch, call):
    old = (saved / checkpoint.MODEL_FILE).read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(
        OSError, match="No space left on device; what was there before is untouched"
    ):
        models.save(small(GPT).float(), saved)
    assert (saved / checkpoint.MODEL_FILE).read_bytes() == old
    assert os.listdir(saved) == ["model.safetensors"]


# --- the shipped model ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped():
    return models.load()


def likeliest(model, text):
    logits = model(model.vocabulary.encode(text)[None])[0, -1]
    chance, token = torch.softmax(logits, -1).topk(4)
    return [(model.vocabulary.decode([t]), c.item()) for t, c in zip(token, chance, strict=True)]


def test_after_hell_it_says_o(shipped):
    (first, chance), (_, second), *_ = likeliest(shipped, "hell")
    assert first == "o"
    assert chance > second + 0.2


@pytest.mark.parametrize(
    ("text", "known"), [("shel", "l"), ("hel", "lpd"), ("yello", "w"), ("say hell", "o")]
)
def test_it_knows_the_words_of_its_text(shipped, text, known):
    assert likeliest(shipped, text)[0][0] in known


def test_the_shipped_files_have_the_size_that_was_promised(shipped):
    data = checkpoint.SHIPPED
    assert (data / "model.safetensors").stat().st_size <= 2_000_000
    assert 0.75e6 < sum(p.numel() for p in shipped.parameters()) < 0.9e6
    assert {t.dtype for t in load_file(data / "model.safetensors").values()} == {torch.float16}
    text = models.shipped_text()
    assert 20_000 < len(text) < 60_000
    assert shipped.vocabulary.characters == Characters.of(text).characters
    assert text.isascii()
    # Every printable character, so that no plain English prompt is refused.
    assert set(map(chr, range(32, 127))) <= set(text)
    for word in ("hello", "shell", "help", "held", "bell", "well", "yellow"):
        assert text.count(word) >= 8


def test_it_reads_english_better_than_letter_pairs(shipped):
    # On the tenth of the text that it was not trained on, beside counted pairs of letters.
    tokens = shipped.vocabulary.encode(models.shipped_text())
    known, unknown = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]
    pairs = torch.full((96, 96), 0.05)
    pairs.index_put_((known[:-1], known[1:]), torch.tensor(1.0), accumulate=True)
    chance = (pairs / pairs.sum(1, keepdim=True)).log()
    counted = -chance[unknown[:-1], unknown[1:]].mean()
    windows = unknown[: 27 * 129].reshape(27, 129)
    logits = shipped(windows[:, :-1])
    read = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert read < counted - 0.5


# --- one loader ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """Directories of a small GPT-2 and BERT of transformers, with a tokenizer of words."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", "[MASK]", "hell", "or", "shell"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", mask_token="[MASK]"
    )
    torch.manual_seed(0)
    made = {
        "gpt2": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=5, n_embd=8, n_layer=1, n_head=2, n_positions=16)
        ),
        "bert": transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=5, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                intermediate_size=8,
            )
        ),
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("hugging-face")
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder, made


@pytest.mark.parametrize("name", ["gpt2", "bert"])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_model_of_transformers_is_loaded_by_its_directory(hugging_face, name, kind):
    folder, made = hugging_face
    model = models.load(kind(folder / name))
    assert type(model) is type(made[name])
    assert not model.training
    tokens = models.encode(model, "hell or shell")
    assert tokens.tolist() == [[2, 3, 4]]
    with torch.no_grad():
        expected = made[name].eval()(input_ids=tokens).logits
        assert torch.equal(model(input_ids=tokens).logits, expected)


def test_the_loader_reads_what_the_command_reads(hugging_face, tmp_path, monkeypatch):
    folder, _ = hugging_face
    monkeypatch.chdir(folder)
    assert type(models.load("gpt2")).__name__ == "GPT2LMHeadModel"
    models.save(GPT(Characters.of("hel"), layers=1, width=8, heads=2), tmp_path / "own")
    assert models.encode(models.load(str(tmp_path / "own")), "hell").tolist() == [[1, 0, 2, 2]]
    assert models.encode(models.load(), "hell").shape == (1, 4)
    (tmp_path / "a.gguf").write_bytes(b"not a model")
    for spec, words in (
        (tmp_path / "a.gguf", "a file must be GGUF"),
        ("no/model/at/all", r"there is no model\.safetensors in no/model/at/all"),
        ("gpt3", "there is no such file or directory(.|\n)*did you mean gpt2"),
        ("owner/name", "model: is no directory here"),
    ):
        with pytest.raises(ValueError, match=words):
            models.load(spec)


def test_a_model_of_token_numbers_reads_no_text():
    with pytest.raises(ValueError, match="model: knows no text, only token ids"):
        models.encode(GPT(17, layers=1, width=8, heads=2), "hell")
