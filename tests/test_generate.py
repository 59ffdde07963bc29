"""Generation: the cache changes nothing, draws follow the model, bad calls are refused."""

from __future__ import annotations

import json
import math

import pytest
import torch

from clearhead import models
from clearhead.cli import main
from clearhead.models import BERT, GPT, RNN, Characters
from clearhead.models.generating import choose, next_tokens


def small(kind, length=9):
    torch.manual_seed(2)
    heads = {} if kind is RNN else {"heads": 2}
    letters = Characters.of("hello yw", kind.special)
    model = kind(letters, layers=2, width=16, length=length, **heads).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    return model


@pytest.fixture
def saved(tmp_path):
    def save(kind):
        models.save(small(kind).float(), tmp_path / kind.name)
        return str(tmp_path / kind.name)

    return save


# --- the cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GPT, RNN])
@pytest.mark.parametrize("parts", [(1,) * 9, (4, 5), (3, 1, 5), (9,)])
def test_logits_with_a_cache_are_those_of_one_pass(kind, parts):
    model = small(kind)
    tokens = torch.randint(7, (2, 9), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache()
    pieces = [model(part, cache=cache) for part in tokens.split(parts, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [GPT, RNN])
@pytest.mark.parametrize("prompt", ["h", "hell", "hello yellow hello"])
@pytest.mark.parametrize("choice", [{"temperature": 0}, {"temperature": 1.3, "seed": 4}])
def test_tokens_with_a_cache_are_those_without(kind, prompt, choice):
    # 25 tokens over a window of 9: the cache fills, and the window slides on.
    model = small(kind)
    expected = models.generate(model, prompt, 25, cache=False, **choice)
    assert models.generate(model, prompt, 25, **choice) == expected
    assert len(expected) == len(prompt) + 25
    if choice["temperature"]:
        assert len(set(expected[len(prompt) :])) > 1


def test_a_long_prompt_is_read_by_its_end():
    model = small(GPT)
    long = models.generate(model, "hello " * 50 + "yellow he", 12)
    assert long[-12:] == models.generate(model, "yellow he", 12)[-12:]


def test_the_cache_saves_work():
    model, seen = small(GPT, length=64), []
    model.embedding.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    models.generate(model, "hello", 10)
    assert seen == [5] + [1] * 9


# --- the draw -----------------------------------------------------------------------------------


def drawn(logits, count=4000, **choice):
    choice = {"temperature": 1.0, "top_k": None, **choice}
    generator = torch.Generator().manual_seed(0)
    found = [choose(logits, generator=generator, **choice) for _ in range(count)]
    return torch.bincount(torch.tensor(found), minlength=len(logits)) / count


def test_the_draw_follows_the_softmax():
    chances = torch.tensor([0.5, 0.25, 0.125, 0.125])
    torch.testing.assert_close(drawn(chances.log()), chances, rtol=0, atol=0.025)
    # At temperature 1/2 chances are squared, then normalised: 4/4, 1/4, 1/16, 1/16 of 22/16.
    squared = torch.tensor([16.0, 4.0, 1.0, 1.0]) / 22
    torch.testing.assert_close(drawn(chances.log(), temperature=0.5), squared, rtol=0, atol=0.025)
    two = torch.tensor([2 / 3, 1 / 3, 0, 0])
    torch.testing.assert_close(drawn(chances.log(), top_k=2), two, rtol=0, atol=0.025)


@pytest.mark.parametrize("choice", [{"temperature": 0.0}, {"temperature": 1e-300}, {"top_k": 1}])
def test_the_likeliest(choice):
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert drawn(logits, count=20, **choice)[1] == 1.0


def test_a_large_temperature_is_nearly_uniform():
    shares = drawn(torch.tensor([0.0, 50.0]), temperature=1e300)
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.5]), rtol=0, atol=0.03)


def test_top_k_may_exceed_the_vocabulary():
    assert len(models.generate(small(GPT), "h", 3, top_k=1000)) == 4


def test_a_seed_repeats_the_text_and_leaves_the_random_state_alone():
    model, state = small(GPT), torch.get_rng_state()
    texts = [models.generate(model, "h", 30, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(prompt=""), "prompt: needs at least one token"),
        (dict(prompt="hexlo"), "the character 'x' at position 2 is not in the vocabulary"),
        (dict(tokens=-1), "tokens: needs to be 0 or more; got -1"),
        (dict(temperature=-0.1), "temperature: needs"),
        (dict(temperature=math.nan), "temperature: needs"),
        (dict(temperature=math.inf), "temperature: needs"),
        (dict(top_k=0), "top_k: needs to be 1 or more; got 0"),
    ],
)
def test_bad_calls_are_refused_before_the_first_token(arguments, words):
    with pytest.raises(ValueError, match=words):
        models.stream(small(GPT), **{"prompt": "hello", **arguments})


def test_bert_does_not_continue_a_text():
    with pytest.raises(TypeError, match=r"fills gaps(.|\n)*clearhead look"):
        models.generate(small(BERT), "hello")


def test_a_model_of_token_numbers_has_no_text():
    model = GPT(5, layers=1, heads=1, width=4)
    with pytest.raises(TypeError, match="use next_tokens"):
        models.generate(model, "hello")
    assert len(list(next_tokens(model, torch.tensor([1]), 3))) == 3


# --- the command --------------------------------------------------------------------------------


def test_the_command_continues_with_the_shipped_model(capsys):
    assert main(["generate", "hell", "--tokens", "1", "--greedy"]) == 0
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.parametrize("kind", [GPT, RNN])
def test_the_command_reads_a_model_and_gives_json(kind, saved, capsys):
    path = saved(kind)
    assert main(["generate", "hello", "--model", path, "--tokens", "7", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prompt"] == "hello"
    assert len(document["added"]) == 7
    assert document["model"] == kind.name
    assert main(["generate", "hello", "--model", path, "--tokens", "7"]) == 0
    assert capsys.readouterr().out == f"hello{document['added']}\n"


def test_the_command_says_what_a_long_prompt_loses(saved, capsys):
    assert main(["generate", "hello yellow", "--model", saved(GPT), "--tokens", "3"]) == 0
    assert "reads the last 9 characters" in capsys.readouterr().err
    assert main(["generate", "hello yellow", "--model", saved(RNN), "--tokens", "3"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hell\u20ac"], "PROMPT: the character '€' at position 4"),
        ([""], "PROMPT: needs"),
        (["h", "--model", "/none"], "--model: there is no such file or directory; got '/none'"),
        (["h", "--tokens", "-2"], "--tokens: needs"),
        (["h", "--threads", "0"], "--threads: needs"),
        (["h", "--temperature", "0"], "--greedy always takes the likeliest"),
        (["h", "--temperature", "nan"], "--temperature: needs to be above 0; got nan"),
        (["h", "--greedy", "--top-k", "3"], "--greedy: takes the likeliest"),
        (["h", "--top-k", "0"], "--top-k: needs"),
        (["h", "--seed", "-1"], "--seed: needs"),
    ],
)
def test_the_command_refuses_with_exit_code_2(arguments, words, capsys):
    assert main(["generate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""


def test_a_token_of_a_small_model_takes_one_thread_and_gives_them_back(monkeypatch):
    from clearhead.models import threads

    for name in threads._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_AT_START", 2)
    model, inside = small(GPT), []
    model.register_forward_hook(lambda *_: inside.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        outside = [torch.get_num_threads() for _ in models.stream(model, "hello", 3)]
        assert (inside, outside) == ([1] * 3, [2] * 3)
        models.generate(model, "hello", 1, threads=2)
        assert inside.pop() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        models.generate(model, "hello", 1)
        assert inside.pop() == 2
    finally:
        torch.set_num_threads(1)


def test_the_prompt_comes_from_a_file(saved, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("hello\n")
    words = ["--file", str(tmp_path / "prompt.txt"), "--model", saved(GPT), "--tokens", "0"]
    assert main(["generate", *words]) == 0
    assert capsys.readouterr().out == "hello\n"


def test_the_command_points_bert_to_look(saved, capsys):
    assert main(["generate", "hello", "--model", saved(BERT)]) == 2
    assert "clearhead look" in capsys.readouterr().err
