"""What `attend` refuses: the message names the argument, the rule, the shapes and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead import _checks, errors, masks, readings

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
     ("mask", "bool tensor", "float32", "bias=", "masks.from_additive", "(5, 7)")),
    ("int mask", {"mask": torch.ones(5, 7, dtype=torch.int64)}, TypeError,
     ("mask", "int64", "mask == 1")),
    ("list mask", {"mask": [[True]]}, TypeError, ("mask", "list", "masks.causal()")),
    ("the word", {"mask": "causal"}, TypeError, ("mask", "str", "masks.causal()")),
    ("the function", {"mask": masks.causal}, TypeError, ("mask", "function")),
    ("mask size", {"mask": BOOL.T}, ValueError, ("mask", "broadcasts", "(7, 5)", "(2, 6, 5, 7)")),
    ("mask rank", {"mask": BOOL[None, None, None]}, ValueError, ("mask", "(1, 1, 1, 5, 7)")),
    ("mask for samples", {"mask": torch.ones(2, 7, dtype=torch.bool)}, ValueError,
     ("mask", "axes of 1 for heads and queries")),
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
    ("class", {"read": readings.Weights}, TypeError, ("read", "class Weights", "Weights()")),
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


def test_nested_tensors_get_a_pointer() -> None:
    jagged = torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(5, 4)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"(?s)strided.*masks\.document"):
        ch.attend(jagged, jagged, jagged)


def test_shapes_are_aligned() -> None:
    with pytest.raises(ValueError) as caught:
        ch.attend(Q, K[..., :3], K)
    lines = str(caught.value).splitlines()
    assert lines[1:4] == ["  query  (2, 6, 5, 4)", "  key    (2, 3, 7, 3)", "  value  (2, 3, 7, 4)"]
    assert lines[4].startswith("  to do: ")


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
        monkeypatch.setattr(_checks, "SMALL", 0)
        x = torch.zeros(1, 1, 64, 2)
        one = 64 * 64 * 4
        monkeypatch.setattr(_checks, "free_bytes", lambda device: one)
        ch.attend(x, x, x, read=readings.Weights())
        ch.attend(x, x, x, read=(readings.TopK(2), readings.Received()))
        with pytest.raises(ValueError, match=f"{2 * one:,} bytes, with {one:,} free"):
            ch.attend(x, x, x, read=(readings.Weights(), readings.Scores()))
        with pytest.raises(ValueError, match=f"{2 * one:,} bytes"):
            ch.attend(x.double(), x.double(), x.double(), read=readings.Weights())

    def test_the_free_memory_is_known(self) -> None:
        free = _checks.free_bytes(torch.device("cpu"))
        if free is not None:
            assert 1 << 20 < free < 1 << 50
        assert _checks.free_bytes(torch.device("meta")) is None

    def test_a_container_counts_file_caches_as_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        files = {
            "/proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 90 kB\n",
            "/sys/fs/cgroup/memory.max": "50000\n",
            "/sys/fs/cgroup/memory.current": "30000\n",
            "/sys/fs/cgroup/memory.stat": "anon 20000\ninactive_file 8000\n",
        }
        monkeypatch.setattr(_checks, "_read", lambda path: files.get(path, ""))
        assert _checks.free_bytes(torch.device("cpu")) == 28000
        files["/sys/fs/cgroup/memory.max"] = "max\n"
        assert _checks.free_bytes(torch.device("cpu")) == 90 * 1024
        files.clear()
        assert _checks.free_bytes(torch.device("cpu")) is None


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
