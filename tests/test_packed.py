"""Values of records: packed and off the heap until they are read, then ordinary tensors."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import multiprocessing
import os
import pickle
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import clearhead as ch
from clearhead import masks, readings
from clearhead._capture import FusedCall, context_difference
from clearhead._capture.recompute import few_rows
from clearhead.recording import load
from clearhead.recording.packed import PackedValue, pack


class Deep(nn.Module):
    """Layers of self-attention over one input."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for _ in range(self.layers):
            x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return x


class TestWaiting:
    """Values stay packed until they are read, and are then ordinary tensors."""

    READ = (readings.Entropy(), readings.TopK(8), readings.Received(), readings.BlockMap(4))

    @staticmethod
    def see(read=READ, layers=1, length=2053, **how):
        torch.manual_seed(0)
        x = torch.randn(1, 3, length, 8)
        model = Deep(layers)
        with ch.watch(model, read=read, **how) as seen:
            model(x)
        return x, seen

    @pytest.mark.parametrize("through", [False, True])
    def test_bytes_that_wait_grow_with_layers_and_positions_alone(self, through):
        """Per position and head: 4 (entropy), 4 (received), 8 x 4 (weights), 8 x 2 (sources)."""
        for layers in (1, 3):
            _, seen = self.see(layers=layers, through=through)
            held = [vars(record)["value"].nbytes for record in seen]
            most_padding = 6 * 64
            exact = 3 * 2053 * (4 + 4 + 32 + 16) + 2 * 3 * 4 * 4 * 4
            assert len(held) == layers
            assert all(exact <= nbytes <= exact + most_padding for nbytes in held)

    def test_no_tensor_waits(self):
        """Not even a header: what is small pins the heap as well as what is large."""

        def there():
            gc.collect()
            return [x for x in gc.get_objects() if issubclass(type(x), Tensor)]

        self.see()  # what is made once, as tables of masks, is made
        before = {id(x) for x in there()}
        x, seen = self.see(layers=3)
        assert [y is x for y in there() if id(y) not in before] == [True]
        assert len(seen) == 3

    @pytest.mark.parametrize("through", [False, True])
    def test_values_are_those_of_attend(self, through):
        x, seen = self.see(through=through)
        _, want = ch.attend(x, x, x, masks.causal(), read=self.READ)
        found = seen[0].value
        assert type(found) is tuple
        assert [type(value) for value in found] == [type(value) for value in want]
        for got, right in zip(tree_leaves(found), tree_leaves(want), strict=True):
            assert got.dtype == right.dtype
            assert got.is_contiguous()
            assert torch.equal(got, right)

    def test_one_reading_is_not_in_a_tuple(self):
        _, seen = self.see(readings.TopK(8))
        assert seen[0].value.sources.dtype == torch.int64
        assert isinstance(vars(seen[0])["value"], PackedValue)

    def test_asked_twice_it_is_the_same(self):
        _, seen = self.see()
        entropy = seen[0].value[0]
        entropy.zero_()
        assert seen[0].value[0] is entropy
        assert not seen[0].value[0].any()

    def test_values_are_ordinary_and_apart(self):
        _, seen = self.see(layers=2)
        leaves = tree_leaves([record.value for record in seen])
        assert len({x.untyped_storage().data_ptr() for x in leaves}) == len(leaves)
        for x in leaves:
            assert x.untyped_storage().nbytes() == x.nbytes
            assert not x.requires_grad
            assert not x.is_inference()
        others = [x.clone() for x in leaves[1:]]
        leaves[0].resize_(1 << 16).fill_(7)
        assert all(torch.equal(x, y) for x, y in zip(leaves[1:], others, strict=True))

    def test_the_memory_goes_with_what_was_packed(self):
        _, seen = self.see()
        waiting = vars(seen[0])["value"]
        block = weakref.ref(waiting._block)
        value = seen[0].value
        assert block() is None
        right = value[0].clone()
        del seen, waiting
        gc.collect()
        assert torch.equal(value[0], right)

    @pytest.mark.parametrize("through", [False, True])
    def test_records_go_with_the_last_who_holds_them(self, through):
        gc.collect()
        gc.disable()
        try:
            _, seen = self.see(through=through)
            all_of_it, record = weakref.ref(seen), weakref.ref(seen[0])
            del seen
            assert all_of_it() is None
            assert record() is None
        finally:
            gc.enable()

    def test_records_outlive_model_and_block(self):
        x, seen = self.see()
        _, want = ch.attend(x, x, x, masks.causal(), read=self.READ)
        del x
        gc.collect()
        assert torch.equal(seen[0].value[0], want[0])

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_copies_are_their_own(self, copied):
        _, seen = self.see()
        other = copied(seen[0])
        other.value[0].zero_()
        assert seen[0].value[0].any()
        assert torch.equal(other.value[1].sources, seen[0].value[1].sources)

    def test_a_shallow_copy_shares_the_value(self):
        _, seen = self.see()
        other = copy.copy(seen[0])
        later = dataclasses.replace(seen[0], call=7)
        assert other.value is seen[0].value is later.value
        assert later.call == 7

    def test_save_and_load(self, tmp_path):
        _, seen = self.see(layers=2)
        seen.save(tmp_path / "seen")
        again = load(tmp_path / "seen")
        pairs = zip(*(tree_leaves([r.value for r in s]) for s in (seen, again)), strict=True)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)

    def test_threads_get_one_value(self):
        _, seen = self.see()
        barrier = threading.Barrier(8)

        def ask(_):
            barrier.wait()
            return seen[0].value

        with ThreadPoolExecutor(8) as pool:
            values = list(pool.map(ask, range(8)))
        assert all(value is values[0] for value in values)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
    def test_a_fork_has_its_own(self):
        _, seen = self.see()
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()

        def child():
            queue.put(float(seen[0].value[0].zero_().sum()))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's threads are running
            process = context.Process(target=child)
            process.start()
        assert queue.get() == 0
        process.join()
        assert seen[0].value[0].any()

    def test_inside_of_modes(self):
        _, seen = self.see(layers=3)
        with torch.inference_mode():
            assert seen[0].value[0].shape == (1, 3, 2053)
        assert not any(x.is_inference() for x in tree_leaves(seen[0].value))
        with torch.device("meta"):
            assert seen[1].value[0].device.type == "cpu"
        torch.set_default_dtype(torch.float64)
        try:
            assert seen[2].value[0].dtype == torch.float32
        finally:
            torch.set_default_dtype(torch.float32)

    @pytest.mark.parametrize(
        ("least", "most", "packed"),
        [
            (0, 255, torch.uint8),
            (0, 256, torch.int16),
            (-1, 2**15 - 1, torch.int16),
            (0, 2**15, torch.int32),
            (-(2**15) - 1, 0, torch.int32),
            (0, 2**31 - 1, torch.int32),
            (0, 2**31, torch.int64),
            (-(2**31) - 1, 0, torch.int64),
            (-(2**63), 2**63 - 1, torch.int64),
        ],
    )
    def test_whole_numbers_come_back(self, least, most, packed):
        x = torch.zeros(1 << 16, dtype=torch.int64)
        x[7], x[8] = least, most
        waiting = pack(x)
        assert waiting.nbytes == (1 << 16) * packed.itemsize
        assert torch.equal(waiting(), x)
        assert waiting().dtype == torch.int64

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
    def test_other_numbers_keep_their_bits(self, dtype):
        x = torch.randn(3, 1 << 15).to(dtype).mT
        if dtype.is_floating_point:
            x[0, 0], x[1, 0] = math.nan, -math.inf
        waiting = pack((x,))
        (found,) = waiting()
        assert found.dtype == dtype
        assert torch.equal(found.contiguous().view(torch.uint8), x.contiguous().view(torch.uint8))

    def test_what_is_small_or_very_large_stays(self):
        small, large = torch.ones(3), torch.empty(1 << 23)
        value = readings.BlockMapValue(small, large)
        assert pack(value) is value

    def test_what_is_elsewhere_stays(self):
        there = torch.empty(1 << 15, device="meta")
        assert pack(there) is there
        here = torch.ones(1 << 15)
        value = pack((here, there))()
        assert value[1] is there
        assert torch.equal(value[0], here)

    def test_a_product_of_few_rows(self):
        """Sums of n products are off by at most n roundings of their absolute sum."""
        torch.manual_seed(0)
        for inner, columns in ((67, 2053), (2053, 67), (5, 7)):
            left = torch.randn(2, 3, 5, inner)
            right = torch.randn(2, columns, 3, inner).permute(0, 2, 3, 1)
            got = few_rows(left, right)
            want = left.double() @ right.double()
            most = inner * 2.0**-24 * (left.double().abs() @ right.double().abs())
            assert got.shape == (2, 3, 5, columns)
            assert ((got.double() - want).abs() <= most).all()

    def test_the_check_calls_no_blas_for_large_keys(self):
        """Its buffers would stay in the heap among the tensors of the model."""
        x = torch.randn(1, 3, 2053, 64)
        given = FusedCall(x, x, x, masks.causal())
        context = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        with torch.profiler.profile() as profile:
            found = context_difference(given, context, [0, 7, 2052])
        assert found is not None
        assert found < 1e-5
        assert not {event.key for event in profile.key_averages()} & {"aten::bmm", "aten::mm"}
