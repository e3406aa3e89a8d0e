"""Batches: every context once, similar lengths together, and half the size when memory ends."""

import pytest
import torch

from ia_mech.engine.plan import (
    CPU,
    GPU,
    Grid,
    OomBackoff,
    batch_defaults,
    consecutive,
    contexts_per_batch,
    evenly,
    plan_units,
    write_units,
)
from ia_mech.errors import UserError, is_out_of_memory


def test_units_hold_every_context_once_sorted_by_length():
    lengths = [50, 10, 30, 10, 90, 20, 30]
    units = plan_units(lengths, 3)
    flat = [i for unit in units for i in unit]
    assert sorted(flat) == list(range(7))
    assert [lengths[i] for i in flat] == sorted(lengths)
    assert flat.index(1) < flat.index(3), "ties keep their order"
    assert [len(unit) for unit in units] == [3, 3, 1]


def test_long_contexts_share_a_unit_with_fewer_others():
    units = plan_units([6000, 6000, 6000, 10], 4, max_tokens=12_000)
    assert units == [[3, 0], [1, 2]]
    assert plan_units([20_000], 4, max_tokens=12_000) == [[0]]


def test_units_with_little_padding_hold_similar_lengths():
    lengths = [100, 95, 50, 100, 52, 3]
    assert plan_units(lengths, 6, max_padding=0.1) == [[5], [2, 4], [1, 0, 3]]
    assert plan_units(lengths, 6, max_padding=0.0) == [[5], [2], [4], [1], [0, 3]]
    assert plan_units([0, 0, 1], 6, max_padding=0.5) == [[0, 1], [2]]  # turns may be empty


@pytest.mark.parametrize(
    ("count", "most", "each"), [(256, 236, 128), (24, 8, 8), (25, 8, 7), (3, 8, 3), (1, 1, 1)]
)
def test_units_are_of_like_size(count, most, each):
    assert evenly(count, most) == each
    assert consecutive([3, 4, 2, 9, 1, 1], 7) == [[0, 1], [2], [3], [4, 5]]
    assert -(-count // each) == -(-count // most), "no more parts than need be"


def test_what_is_written_together_is_bounded_in_contexts_and_work():
    assert (contexts_per_batch(13, 64), contexts_per_batch(100, 64)) == (4, 1)
    lengths, costs = [50, 10, 30, 10, 90], [5.0, 1.0, 3.0, 1.0, 9.0]
    assert write_units(lengths, costs, 10, 100) == [[1, 3, 2, 0, 4]]
    assert write_units(lengths, costs, 10, 9.5) == [[1, 3, 2], [0], [4]]
    assert write_units(lengths, costs, 2, 9.5) == [[1, 3], [2], [0], [4]]
    assert write_units(lengths, costs, 10, 2) == [[1, 3], [2], [0], [4]], "one context at least"
    assert write_units([], [], 2, 9.5) == []


def test_batches_suit_the_device():
    cpu, gpu = (batch_defaults(torch.device(name)) for name in ("cpu", "cuda"))
    assert (cpu, gpu) == (CPU, GPU)
    for name in ("batch_rows", "prefill_tokens", "unit_cost"):
        assert getattr(cpu, name) < getattr(gpu, name)
    assert cpu.unit_cost == 20 * 150  # 20 seconds at 150 decoded tokens a second


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"temperatures": (-1.0,)}, "temperature -1.0 is not possible"),
        ({"temperatures": (float("nan"),)}, "temperature nan is not possible"),
        ({"temperatures": (float("inf"),)}, "temperature inf is not possible"),
        ({"temperatures": (1e-50,)}, "temperature 1e-50 is not possible"),
        ({"temperatures": (1e39,)}, r"temperature 1e\+39 is not possible"),
        ({"temperatures": (0.0, 1.0)}, "temperature 0 is greedy decoding"),
        ({"temperatures": (1.0, 1.0)}, "a temperature is given twice"),
        ({"samples": 0}, "--samples 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
    ],
)
def test_an_impossible_grid_is_refused(settings, problem):
    with pytest.raises(UserError, match=problem):
        Grid(**settings)


def test_memory_running_out_halves_the_batch_once_and_for_all():
    sizes, notes = [], []

    def work(items):
        sizes.append(len(items))
        if len(items) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [item * 2 for item in items]

    halving = OomBackoff(10, notes.append)
    assert halving.map(work, list(range(11))) == [2 * i for i in range(11)]
    assert sizes == [10, 5, 2, 2, 2, 2, 2, 1]
    assert notes == [5, 2]
    assert halving.limit == 2


def test_a_single_item_that_does_not_fit_is_an_error():
    def work(_):
        raise MemoryError

    def broken(_):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        OomBackoff(4).map(broken, [1])
    with pytest.raises(UserError, match="out of memory with a batch of one"):
        OomBackoff(4).map(work, [1, 2])
    # Inside another one, which has smaller batches left to try.
    with pytest.raises(MemoryError):
        OomBackoff(4, outermost=False).map(work, [1, 2])


def test_what_counts_as_out_of_memory():
    # What PyTorch's CPU allocator says.
    cpu = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
    assert is_out_of_memory(cpu)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert not is_out_of_memory(RuntimeError("index out of range"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
