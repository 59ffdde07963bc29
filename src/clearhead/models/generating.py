"""Generate text from a model, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead._core import type_error, value_error
from clearhead.models.bert import BERT
from clearhead.models.checkpoint import Model
from clearhead.models.gpt import GPT
from clearhead.models.rnn import RNN
from clearhead.models.text import Characters
from clearhead.models.threads import check_threads, small_threads

__all__ = ["generate", "next_tokens", "stream"]


def generate(model: Model, prompt: str, tokens: int = 100, **choice) -> str:
    """Continue a text; the answer begins with the prompt. `choice` as in `stream`.

    >>> from clearhead import models
    >>> models.generate(models.load(), "hell", tokens=1, temperature=0)
    'hello'
    """
    return prompt + "".join(stream(model, prompt, tokens, **choice))


def stream(model: Model, prompt: str, tokens: int = 100, **choice) -> Iterator[str]:
    """Continue a text, and yield each new token as soon as it is sampled.

    `temperature` divides the logits (0 always takes the likeliest token), `top_k` keeps the k
    likeliest, `seed` makes sampling repeatable, `cache=False` recomputes the whole text each time.
    `threads` is for large models: a small one is fastest with one thread, its default.
    """
    model, vocabulary = _writer(model)
    start = vocabulary.encode(prompt)
    return (vocabulary.decode([token]) for token in next_tokens(model, start, tokens, **choice))


def next_tokens(
    model: GPT | RNN,
    start: Int[Tensor, " position"],
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    cache: bool = True,
    threads: int | None = None,
) -> Iterator[int]:
    """Continue token numbers. A GPT sees the last `model.length` of them, an RNN all."""
    if len(start) == 0:
        raise value_error("prompt", "needs at least one token to continue")
    if tokens < 0:
        raise value_error("tokens", "needs to be 0 or more", got=tokens)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise value_error("temperature", "needs to be a number of 0 or more", got=temperature)
    if top_k is not None and top_k < 1:
        raise value_error("top_k", "needs to be 1 or more", got=top_k)
    check_threads(threads)
    return _steps(model, start, tokens, temperature, top_k, seed, cache, threads)


def _steps(model, start, tokens, temperature, top_k, seed, cache, threads) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    text = start.tolist()
    memory, fed = model.new_cache(), 0
    limit = model.length if isinstance(model, GPT) else math.inf
    device = next(model.parameters()).device
    for _ in range(tokens):
        if len(text) > limit or not cache:
            # The window slides: every token in it gets a new position, so no cache entry is valid.
            memory, fed = model.new_cache(), max(len(text) - int(min(limit, len(text))), 0)
        new = torch.tensor([text[fed:]], device=device)
        # Not around the yield: the caller keeps its own number of threads in between.
        with torch.no_grad(), small_threads(model, new.numel(), threads):
            logits = model(new, cache=memory)[0, -1]
        fed = len(text)
        text.append(choose(logits.cpu(), temperature, top_k, generator))
        yield text[-1]


def choose(
    logits: Float[Tensor, " token"],
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> int:
    """Sample one token from the softmax of the logits; temperature 0 takes the largest."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None:
        least = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -math.inf)
    # The largest logit is subtracted first, so that a tiny temperature does not overflow.
    weights = torch.softmax((logits.double() - logits.max()) / temperature, dim=-1)
    return int(torch.multinomial(weights, 1, generator=generator))


def _writer(model: Model) -> tuple[GPT | RNN, Characters]:
    if not isinstance(model, GPT | RNN):
        rule = "is a GPT or an RNN of clearhead, which continue a text"
        hint = "a model of transformers has a method for it: model.generate(ids)"
        if isinstance(model, BERT):
            rule = "a BERT fills gaps and does not continue a text"
            hint = 'look at its guesses instead: clearhead look "he[MASK]o" --model DIR'
        raise type_error("model", rule, got=type(model).__name__, hint=hint)
    if not isinstance(model.vocabulary, Characters):
        raise type_error("model", "has no characters, only token numbers", hint="use next_tokens")
    return model, model.vocabulary
