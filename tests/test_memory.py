"""Half the size when memory ends."""

import pytest
import torch

from ia_mech.engine.memory import Backoff
from ia_mech.errors import UserError


def test_memory_running_out_halves_the_batch_once_and_for_all():
    sizes, notes = [], []

    def work(items):
        sizes.append(len(items))
        if len(items) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [item * 2 for item in items]

    halving = Backoff(10, notes.append)
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
        Backoff(4).map(broken, [1])
    with pytest.raises(UserError, match="out of memory with a batch of one"):
        Backoff(4).map(work, [1, 2])
