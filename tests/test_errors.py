"""What `attend` refuses: the message names the argument, the rule, the shapes and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import masks, readings
from clearhead._core import errors
from clearhead.attention import memory

Q = torch.zeros(2, 6, 5, 4)
K = torch.zeros(2, 3, 7, 4)
BOOL = torch.ones(5, 7, dtype=torch.bool)

# (what, arguments, kind of error, pieces of the message that must be there)
BREACHES: list[tuple[str, dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ("no tensor", {"query": [[1.0]]}, TypeError, ("query", "list", "torch.as_tensor")),
    ("no tensor", {"value": None}, TypeError, ("value", "NoneType")),
    ("one axis", {"query": Q[0, 0, 0]}, ValueError, ("query", "(position, head_dim)", "(4,)")),
    ("ranks", {"key": K[0]}, ValueError, ("key", "as many axes", "3 beside 4", "(3, 7, 4)")),
    ("ranks", {"value": K[0]}, ValueError, ("value", "as many axes", "3 beside 4")),
    ("widths", {"key": K[..., :3]}, ValueError, ("key", "head_dim", "3 beside 4", "(2, 6, 5, 4)")),
    ("lengths", {"value": K[:, :, :6]}, ValueError, ("value", "axes of key", "(2, 3, 6, 4)")),
    ("value heads", {"value": K[:, :1]}, ValueError, ("value", "(2, 1, 7, 4)", "(2, 3, 7, 4)")),
    ("batches", {"query": Q[:1]}, ValueError, ("key", "batch", "(2,) beside (1,)", "(1, 6, 5, 4)")),
    (
        "batches of 3-D tensors",
        {"query": Q[0, :1], "key": K[0], "value": K[0]},
        ValueError,
        ("key", "batch", "(3,) beside (1,)"),
    ),
    (
        "heads",
        {"key": torch.zeros(2, 4, 7, 4), "value": torch.zeros(2, 4, 7, 4)},
        ValueError,
        ("query", "whole multiple", "6 query heads and 4 source heads", "transpose(1, 2)"),
    ),
    ("no source heads", {"key": K[:, :0], "value": K[:, :0]}, ValueError, ("whole multiple",)),
    ("integers", {"query": Q.long(), "key": K.long(), "value": K.long()}, TypeError,
     ("floating-point", "int64", ".float()")),
    ("complex", dict.fromkeys(("query", "key", "value"), Q.to(torch.complex64)), TypeError,
     ("floating-point", "complex64")),
    ("dtypes", {"value": K.double()}, TypeError, ("one dtype", "float32, float32, float64")),
    ("devices", {"key": K.to("meta")}, ValueError, ("one device", "key on meta", ".to(")),
    ("sparse", {"key": K.to_sparse()}, TypeError, ("strided", "masks.document")),
    ("0/1 mask", {"mask": torch.ones(5, 7)}, TypeError,
     ("mask", "bool tensor", "float32", "mask.bool()", "(5, 7)")),
    ("float mask", {"mask": torch.full((5, 7), -1e4)}, TypeError,
     ("mask", "bool tensor", "float32", "bias=", "masks.from_additive", "(5, 7)")),
    ("0/1 int mask", {"mask": torch.ones(5, 7, dtype=torch.int64)}, TypeError,
     ("mask", "int64", "mask.bool()")),
    ("int mask", {"mask": torch.full((5, 7), 3)}, TypeError, ("mask", "int64", "mask == 1")),
    ("list mask", {"mask": [[True]]}, TypeError, ("mask", "list", "masks.causal()")),
    ("pairs", {"mask": [(3, 0)]}, TypeError, ("mask", "list", "masks.edges(pairs)")),
    ("the word", {"mask": "causal"}, TypeError, ("mask", "str", "masks.parse('causal')")),
    ("the function", {"mask": masks.causal}, TypeError, ("function causal", "add (): masks.caus")),
    ("a function", {"mask": lambda b, h, q, k: q > k}, TypeError, ("function", "masks.where")),
    ("torch's name", {"is_causal": True}, TypeError, ("is_causal=", "mask=masks.causal()")),
    ("torch's name", {"attn_mask": BOOL}, TypeError, ("attn_mask=", "mask=", "bias=")),
    ("torch's name", {"need_weights": True}, TypeError, ("need_weights=", "read=readings.Weights")),
    ("torch's name", {"dropout_p": 0.1}, TypeError, ("dropout_p=", "dropout=")),
    ("no name", {"softmax": 1}, TypeError, ("softmax=", "help(clearhead.attend)")),
    ("mask size", {"mask": BOOL.T}, ValueError, ("mask", "broadcasts", "(7, 5)", "(2, 6, 5, 7)")),
    ("mask rank", {"mask": BOOL[None, None, None]}, ValueError, ("mask", "(1, 1, 1, 5, 7)")),
    ("mask for samples", {"mask": torch.ones(2, 7, dtype=torch.bool)}, ValueError,
     ("mask", "axes of 1 for heads and queries", "masks.keep(mask)")),
    ("mask device", {"mask": BOOL.to("meta")}, ValueError, ("mask on meta",)),
    ("Mask size", {"mask": masks.document(torch.zeros(20, dtype=torch.int64))}, ValueError,
     ("20", "7")),
    ("Mask batch", {"mask": masks.lengths([1, 2, 3])}, ValueError, ("3", "2")),
    ("bool bias", {"bias": BOOL}, TypeError, ("bias", "torch.bool", "mask=")),
    ("number as bias", {"bias": 1.0}, TypeError, ("bias", "float")),
    ("bias size", {"bias": torch.zeros(6, 5, 5)}, ValueError,
     ("bias", "(6, 5, 5)", "(2, 6, 5, 7)")),
    ("bias device", {"bias": torch.zeros(5, 7, device="meta")}, ValueError, ("bias on meta",)),
    ("tensor as scale", {"scale": torch.ones(())}, TypeError, ("scale", "number", "query")),
    ("softcap 0", {"softcap": 0.0}, ValueError, ("softcap", "positive", "None means no cap")),
    ("scale beyond floats", {"scale": 10**400}, ValueError, ("scale", "float can hold")),
    ("softcap", {"softcap": float("inf")}, ValueError, ("softcap", "finite")),
    ("softcap", {"softcap": float("nan")}, ValueError, ("softcap", "finite")),
    ("sink numbers", {"sinks": torch.zeros(3)}, ValueError, ("sinks", "(head,)", "(6,)", "(3,)")),
    ("sink type", {"sinks": 0.0}, TypeError, ("sinks", "float", "torch.zeros(head)")),
    ("dropout", {"dropout": 1.5}, ValueError, ("dropout", "0 to 1", "1.5")),
    ("dropout", {"dropout": float("nan")}, ValueError, ("dropout", "nan")),
    ("dropout", {"dropout": "0.1"}, TypeError, ("dropout", "str")),
    ("impl", {"impl": "fast"}, ValueError, ("impl", "native, tiled, reference", "fast")),
    ("class", {"read": readings.Weights}, TypeError, ("class Weights", "add (): Weights()")),
    ("string", {"read": "weights"}, TypeError, ("read", "'weights'")),
    ("one wrong", {"read": (readings.Weights(), 3)}, TypeError, ("read", "got 3")),
    ("row", {"read": readings.Rows([5])}, ValueError, ("queries", "0..4", "got 5")),
    ("edges", {"read": readings.Mass(masks.lengths([1, 2, 3]))}, ValueError, ("3",)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "kind", "pieces"), [b[1:] for b in BREACHES], ids=[b[0] for b in BREACHES]
)
def test_a_breach_is_explained(
    arguments: dict[str, Any], kind: type[Exception], pieces: tuple[str, ...]
) -> None:
    given: dict[str, Any] = {"query": Q, "key": K, "value": K, **arguments}
    with pytest.raises(kind) as caught:
        ch.attend(**given)
    for piece in pieces:
        assert piece in str(caught.value), str(caught.value)


class TestWarnings:
    """What is allowed and seldom meant is done as it is said, with a warning."""

    FUTURE = torch.ones(5, 5, dtype=torch.bool).triu(1)
    X = torch.randn(2, 3, 5, 4)

    @pytest.mark.parametrize("mask", [FUTURE, FUTURE[None, None], FUTURE.expand(2, 3, 5, 5)])
    def test_a_mask_of_the_future(self, mask: torch.Tensor) -> None:
        with pytest.warns(UserWarning, match=r"~mask, or masks\.from_multihead\(mask\)") as caught:
            backwards = ch.attend(self.X, self.X, self.X, mask)
        assert [w.filename for w in caught] == [__file__]
        assert (backwards[..., -1, :] == 0).all()
        assert torch.equal(backwards, ch.attend(self.X, self.X, self.X, ~masks.causal()))

    def test_it_names_the_line_that_called_a_layer(self) -> None:
        layer, x = ch.MultiheadAttention(4, 2, batch_first=True), torch.randn(1, 5, 4)
        with pytest.warns(UserWarning, match="only what lies after it") as caught:
            layer(x, x, x, mask=self.FUTURE)
        assert [w.filename for w in caught] == [__file__]

    @pytest.mark.parametrize("change", [(0, 0), (4, 0), (4, 4), (2, 2), (0, 4), (1, 2), (3, 2)])
    def test_another_mask_is_taken_as_it_is(self, change: tuple[int, int]) -> None:
        mask = self.FUTURE.clone()
        mask[change] ^= True
        ch.attend(self.X, self.X, self.X, mask)

    def test_nor_of_others(self) -> None:
        x = self.X
        ch.attend(x, x, x, ~self.FUTURE)
        ch.attend(x, x, x, masks.dense(self.FUTURE))
        ch.attend(x[..., :1, :], x[..., :1, :], x[..., :1, :], self.FUTURE[:1, :1])
        ch.attend(x[..., :4, :], x, x, self.FUTURE[:4])
        ch.attend(x, x, x, self.FUTURE[:, None].transpose(0, 1)[:, :, -1:])

    def test_nothing_is_asked_of_numbers_that_are_not_at_hand(self) -> None:
        x, mask = self.X, self.FUTURE
        ch.attend(x.to("meta"), x.to("meta"), x.to("meta"), mask.to("meta"))
        torch.compile(ch.attend, backend="eager")(x, x, x, mask)
        torch.vmap(lambda m: ch.attend(x, x, x, m))(mask[None])
        torch.vmap(lambda q: ch.attend(q, q, q, mask))(x)

    def test_a_bias_of_zeros_and_ones(self) -> None:
        x, ones = self.X, self.FUTURE.float()
        with pytest.warns(UserWarning, match=r"blocks nothing(?s:.)*mask=bias\.bool\(\)") as caught:
            ch.attend(x, x, x, bias=ones)
        assert [w.filename for w in caught] == [__file__]
        for bias in (ones * 2, ones - 1, ones * 0, ones * 0 + 1, ones + 0.5 * ones.T):
            ch.attend(x, x, x, bias=bias)
        ch.attend(x, x, x, bias=ones.clone().requires_grad_())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_get_a_pointer(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(5, 4)], layout=layout)
    with pytest.raises(TypeError, match=r"(?s)strided.*nested.*masks\.document"):
        ch.attend(nested, nested, nested)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MaxLogit", r"readings.MaxScore\(\)"),
        ("scaled_dot_product_attention", "attend"), ("causal", "masks.causal"),
        ("Weights", "readings.Weights"), ("GPT", "models.GPT"), ("load", "models.load"),
        ("look", "clearhead look"), ("padding", "masks.lengths"), ("knockot", "knockout"),
    ],
)  # fmt: skip
def test_names_that_are_not_there_are_answered(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"{name}.*; did you mean .*{meant}"):
        getattr(ch, name)
    with pytest.raises(AttributeError, match=r"attribute 'qqq'$"):
        ch.qqq  # noqa: B018


def test_what_is_printed_at_a_prompt_is_short() -> None:
    model = ch.models.load()
    tokens = torch.tensor([[3, 4, 5, 5]])
    with torch.no_grad(), ch.watch(model, read=readings.Weights()) as seen:
        model(tokens)
    line = "layer 1 call 0 self blocks.1.attention: 1 x 4 heads, 4 queries, 4 sources, by attend"
    assert repr(seen[1]) == line
    assert line in repr(seen)
    assert repr(ch.heads.measure(model, tokens)).startswith("Survey of 4 layers, over 1 seq")
    alone = Alone()
    with ch.watch(alone, read=readings.Entropy()) as seen:
        alone(torch.randn(1, 3, 4))
    assert "(the model itself): 1 x 1 heads, 3 queries" in repr(seen[0])
    assert repr(seen[0]).endswith("sources, handwritten")


def test_shapes_are_aligned() -> None:
    with pytest.raises(ValueError) as caught:
        ch.attend(Q, K[..., :3], K)
    lines = str(caught.value).splitlines()
    assert lines[1:4] == ["  query  (2, 6, 5, 4)", "  key    (2, 3, 7, 3)", "  value  (2, 3, 7, 4)"]
    assert lines[4].startswith("  to do: ")


class Alone(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT / 2).softmax(-1) @ x


def test_a_refused_call_draws_no_random_number() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="impl"):
        ch.attend(Q, K, K, dropout=0.5, impl="fast")
    assert torch.equal(before, torch.get_rng_state())


class TestMemory:
    """Weights that cannot fit are refused before anything is allocated."""

    @pytest.mark.parametrize("reading", [readings.Weights(), readings.Scores()], ids=str)
    def test_it_says_the_bytes_and_what_to_ask_for(self, reading: readings.Reading) -> None:
        x = torch.empty(1, 1, 1, 1).expand(1, 12, 1 << 22, 1)
        with pytest.raises(ValueError) as caught:
            ch.attend(x, x, x, read=(readings.Entropy(), reading))
        message = str(caught.value)
        assert f"{12 * (1 << 44) * 4:,} bytes" in message
        assert "(1, 12, 4194304, 4194304)" in message
        for name in ("TopK(k)", "Rows(queries)", "Received()"):
            assert name in message

    def test_both_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "SMALL", 0)
        x = torch.zeros(1, 1, 64, 2)
        one = 64 * 64 * 4
        monkeypatch.setattr(memory, "free_bytes", lambda device: one)
        ch.attend(x, x, x, read=readings.Weights())
        ch.attend(x, x, x, read=(readings.TopK(2), readings.Received()))
        with pytest.raises(ValueError, match=f"{2 * one:,} bytes, with {one:,} free"):
            ch.attend(x, x, x, read=(readings.Weights(), readings.Scores()))
        with pytest.raises(ValueError, match=f"{2 * one:,} bytes"):
            ch.attend(x.double(), x.double(), x.double(), read=readings.Weights())

    def test_the_free_memory_is_known(self) -> None:
        free = memory.free_bytes(torch.device("cpu"))
        if free is not None:
            assert 1 << 20 < free < 1 << 50
        assert memory.free_bytes(torch.device("meta")) is None

    def test_a_container_counts_file_caches_as_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        files = {
            "/proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 90 kB\n",
            "/sys/fs/cgroup/memory.max": "50000\n",
            "/sys/fs/cgroup/memory.current": "30000\n",
            "/sys/fs/cgroup/memory.stat": "anon 20000\ninactive_file 8000\n",
        }
        monkeypatch.setattr(memory, "_read", lambda path: files.get(path, ""))
        assert memory.free_bytes(torch.device("cpu")) == 28000
        files["/sys/fs/cgroup/memory.max"] = "max\n"
        assert memory.free_bytes(torch.device("cpu")) == 90 * 1024
        files.clear()
        assert memory.free_bytes(torch.device("cpu")) is None


class TestBuilder:
    def test_only_what_is_known_is_said(self) -> None:
        assert str(errors.value_error("x", "is positive")) == "x: is positive"
        assert str(errors.type_error("x", "is a tensor", got=0)) == "x: is a tensor; got 0"

    def test_tensors_and_missing_shapes(self) -> None:
        shapes = {"a": torch.zeros(2, 3), "long": (1,), "none": None}
        text = str(errors.value_error("a", "fits", shapes=shapes, hint="fit it"))
        assert text == "a: fits\n  a     (2, 3)\n  long  (1,)\n  to do: fit it"


def test_the_annotations_hold() -> None:
    """The shapes in the signature are those of real calls, and a wrong one is seen."""
    from beartype import beartype
    from jaxtyping import TypeCheckError, jaxtyped

    checked: Any = jaxtyped(typechecker=beartype)(ch.attend)
    for rank in (4, 3, 2):
        query, key = (x[(0,) * (4 - rank)] for x in (Q[:, :3], K))
        query = query[:, :5]
        assert checked(query, key, key[..., :2]).shape == (*query.shape[:-1], 2)
    checked(Q, K, K, masks.causal(), read=readings.Entropy(), bias=torch.zeros(5, 7))
    checked(Q, K, K, BOOL, read=(readings.Entropy(),), softcap=1.0, sinks=torch.zeros(6))
    with pytest.raises(TypeCheckError):
        checked(Q, K[..., :3], K)
    with pytest.raises(TypeCheckError):
        checked(Q, K, K, scale="1")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("MaxLogit", "MaxScore"), ("max_attention_logit", "MaxScore"), ("TopKs", "TopK")],
)
def test_readings_that_are_not_there_are_answered(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"{name}.*; did you mean {meant}"):
        getattr(ch.readings, name)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: ch.masks.window(n),
        lambda n: ch.masks.chunk(n),
        lambda n: ch.masks.first(n),
        lambda n: ch.masks.causal(align=n),
        lambda n: ch.masks.window(n) & ch.masks.diagonal(-n),
    ],
)
def test_numpy_integers_are_integers_of_masks(make):
    number = np.int64(3)
    assert torch.equal(make(number).dense(5, 7), make(3).dense(5, 7))
    with pytest.raises((TypeError, ValueError), match="integer"):
        make(np.float64(3))


def test_numpy_integers_are_integers_of_readings_and_audits():
    q, k, v = torch.randn(3, 1, 1, 6, 4, generator=torch.Generator().manual_seed(0)).unbind()
    three: Any = np.int32(3)
    for kind in (ch.readings.TopK, ch.readings.BlockMap, ch.readings.Rows):
        got, right = (ch.attend(q, k, v, read=kind(n))[1] for n in (three, 3))
        for one, other in zip(
            *((x if isinstance(x, tuple) else (x,)) for x in (got, right)), strict=True
        ):
            assert torch.equal(one, other)
    x = torch.randn(1, 4, 2, generator=torch.Generator().manual_seed(0))
    assert ch.audit(lambda x: x.cumsum(1), x, ch.masks.causal(), changes=three)
