"""From the name of a model to something that reads text, whatever library the model comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clearhead._core import value_error
from clearhead.models import (
    KINDS,
    Characters,
    LoadedModel,
    find_model,
    from_factory,
    is_factory,
    named_inputs,
    random_tokens,
    refuse_bare_module,
)
from clearhead.views.labels import label, labels, token_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Reader", "open_reader", "open_with_inputs"]


def open_reader(spec: str | None, kinds: str = KINDS) -> Reader:
    """Load the model that `spec` names; an error says what `kinds` of names there are."""
    loaded = find_model(spec, kinds)
    characters = isinstance(loaded.tokenizer, Characters)
    return CharacterReader(loaded) if characters else Reader(loaded)


def open_with_inputs(spec: str | None, text: str | None, length: int) -> tuple[Any, Any, bool]:
    """Load a model, or make it with a factory; give it, its inputs, and whether it came with them.

    The inputs are those of the factory, the tokens of `text`, or `length` random tokens.
    """
    if is_factory(spec):
        if text is not None:
            hint = "let the factory give (model, inputs)"
            raise value_error("text", "needs a model with a tokenizer", got=repr(spec), hint=hint)
        model, inputs = from_factory(spec)
        own = inputs is not None
        return model, inputs if own else random_tokens(model, length), own
    refuse_bare_module(spec)
    reader = open_reader(spec, f"{KINDS}, or package.module:factory, which makes one")
    tokens = reader.random_tokens(length) if text is None else reader.tokens(text)
    return reader.model, named_inputs(reader.model, tokens), False


class Reader:
    """A model with its tokenizer: text to tokens, tokens to labels, tokens to logits.

    `kind` is "next" (it predicts the token after a position), "masked" (the token at a masked
    position) or "none" (it predicts no tokens).
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.name, self.kind, self.mask_id = loaded.name, loaded.kind, loaded.mask_id
        self.model: Any = loaded.model
        self.tokenizer: Any = loaded.tokenizer

    @property
    def limit(self) -> int | None:
        """How many tokens the model reads at once; None where nothing says so."""
        config = getattr(self.model, "config", None)
        limits = (
            getattr(config, "max_position_embeddings", None),
            getattr(self.tokenizer, "model_max_length", None),
        )
        # Tokenizers without a limit say 1e30.
        return min((n for n in limits if isinstance(n, int) and 0 < n < 1 << 40), default=None)

    @property
    def attends(self) -> bool:
        """Whether the model has attention, as far as that is known before it runs."""
        return True

    def must_fit(self, argument: str, length: int) -> None:
        """Refuse, under the name of an option, more tokens than the model reads."""
        if self.limit is not None and length > self.limit:
            raise value_error(
                argument,
                f"the model reads {self.limit} positions",
                got=length,
                hint=f"give at most {self.limit} tokens",
            )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, special tokens included."""
        return list(self.tokenizer(text)["input_ids"])

    def tokens(self, text: str) -> Tensor:
        """Return the tokens of `text`, (1, position), at least one and as many as fit."""
        import torch

        ids = self.encode(text)
        if not ids:
            raise value_error("text", "needs at least one token", got=repr(text))
        self.must_fit("text", len(ids))
        return torch.tensor([ids])

    def random_tokens(self, length: int) -> Tensor:
        """Draw one sequence of tokens, (1, length), the same each time."""
        self.must_fit("length", length)
        return random_tokens(self.model, length)

    def labels(self, ids: list[int]) -> list[str]:
        """Return a visible label for each token of a sequence."""
        return labels(token_bytes(self.tokenizer, ids))

    def bytes_of(self, ids: list[int]) -> list[bytes]:
        """Return the bytes that each token of a sequence stands for."""
        return token_bytes(self.tokenizer, ids)

    def predict(self, ids: list[int]) -> Tensor | None:
        """Run the model on one sequence; logits (position, vocab), or None without a token head."""
        import torch

        with torch.no_grad():
            answer = self.model(input_ids=torch.tensor([ids]))
        logits = getattr(answer, "logits", None)
        return None if self.kind == "none" or logits is None else logits[0]


class CharacterReader(Reader):
    """A teaching model: one token a character."""

    @property
    def limit(self) -> int | None:
        return self.model.length if self.attends else None

    @property
    def attends(self) -> bool:
        return self.model.name != "rnn"

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist()

    def labels(self, ids: list[int]) -> list[str]:
        return [label(self.tokenizer.decode([id_])) for id_ in ids]

    def bytes_of(self, ids: list[int]) -> list[bytes]:
        return [self.tokenizer.decode([id_]).encode("utf-8", "replace") for id_ in ids]

    def predict(self, ids: list[int]) -> Tensor | None:
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([ids]))[0]
