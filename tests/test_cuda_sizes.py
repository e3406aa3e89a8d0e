"""The arithmetic of buffers and memory, checked against tensors."""

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_stream import prefilled_by

from ia_mech.engine.cuda.sizes import Shape, Sizes, demand, needed_bytes
from ia_mech.engine.cuda.stepper import Stepper
from ia_mech.engine.memory import Halving
from ia_mech.errors import UserError
from ia_mech.models import text_config

LAYERS = ((8, 128, 128),) * 28
QWEN = Shape(LAYERS, heads=16, width=1024 + 3072, vocab=151_936, dtype=torch.bfloat16)


def test_the_grid_of_the_benchmark():
    contexts = [c for c in range(32) for _ in range(33)]
    sizes = Sizes.of(contexts, 1056, 512, 64)
    assert sizes == Sizes(lines=1056, slots=32, seats=33, prefix=512, own=64)
    assert sizes.buckets == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1056]
    assert sizes.bucket(1050) == sizes and sizes.bucket(33) == Sizes(64, 32, 33, 512, 64)
    assert sizes.bucket(3) == Sizes(4, 4, 4, 512, 64)
    half = Sizes.of(contexts, 528, 513, 64)
    assert half == Sizes(lines=528, slots=32, seats=33, prefix=640, own=64)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 70))
def test_sizes_hold_what_they_promise(contexts, width):
    sizes = Sizes.of(contexts, width, 100, 8)
    most = max(contexts.count(c) for c in contexts)
    assert sizes.seats == min(width, most) and 1 <= sizes.slots <= len(set(contexts))
    assert sizes.slots * sizes.seats >= min(width, len(contexts), sizes.slots * most)
    assert sizes.buckets == sorted(set(sizes.buckets)) and sizes.buckets[-1] == width
    for lines in range(1, width + 1):
        bucket = sizes.bucket(lines)
        assert lines <= bucket.lines < max(2 * lines, 2) or bucket.lines == width
        assert bucket.slots == min(sizes.slots, bucket.lines)


def test_buffers_take_what_was_planned():
    model = tiny.model("llama")
    group = prefilled_by(model, (9, 5))
    sizes = Sizes.of([0] * 4 + [1] * 3, 7, 9, 6)
    stepper = Stepper(model, sizes, group)
    cache = sum(t.nbytes for layer in stepper._cache.layers for t in (*layer.own, *layer.prefix))
    shape = Shape.of(text_config(model.config), group.state.cache.layers, group.logits)
    assert shape == Shape(((2, 8, 8),) * 4, 4, 32 + 48, tiny.VOCAB, torch.float32)
    assert cache == 4 * 4 * 2 * (8 + 8) * (2 * 128 + 7 * 6)
    scores = 3 * 4 * 4 * (2 * 4 * 128 + 7 * 6)
    logits, activations = 7 * tiny.VOCAB * (4 + 4), 4 * 7 * 80 * 4
    assert needed_bytes(shape, sizes) == cache + scores + activations
    assert needed_bytes(shape, sizes, fused=True) == cache + logits + activations


def test_kernels_of_attention_need_no_scores():
    """Prefixes of 32k tokens: 21 GiB of scores, or the averages of all lines and heads; of one
    line and context, those of as many splits as make 256 programs."""
    contexts = [c for c in range(32) for _ in range(33)]
    small = replace(QWEN, vocab=97)
    whole, alone = Sizes.of(contexts, 1056, 2**15, 64), Sizes.of([0], 1, 2**15, 64)
    spared = needed_bytes(small, whole) - needed_bytes(small, whole, fused=True)
    seen = 32 * 33 * 2**15 + 1056 * 64
    assert spared == (3 * seen - 1056 * 129) * 16 * 4
    spared = needed_bytes(small, alone) - needed_bytes(small, alone, fused=True)
    assert spared == (3 * (2**15 + 64) - 256 // 8 * 129) * 16 * 4


def test_memory_at_150k_logits():
    """Written out: 0.9 GiB of prefixes and 7.2 of rows at 1056 lines, 9.5 of logits; half a
    batch needs half, and the kernel spares most of what sampling takes."""
    contexts = [c for c in range(64) for _ in range(33)]
    whole, half = (Sizes.of(contexts, width, 512, 64) for width in (1056, 528))
    cache = 28 * 2 * 8 * 256 * (64 * 512 + 1056 * 64)
    assert cache == 11_509_170_176
    logits = 1056 * 151_936 * (2 + 4 + 32)
    assert needed_bytes(QWEN, whole) == cache + logits + 4 * 1056 * 4096 * 2
    assert 0.49 < needed_bytes(QWEN, half) / needed_bytes(QWEN, whole) < 0.51
    assert needed_bytes(QWEN, whole, fused=True) < cache + 2**30


def test_what_doesnt_fit_is_halved_and_said():
    contexts, said, tried = [c for c in range(32) for _ in range(33)], [], []

    def attempt(width: int) -> int:
        tried.append(width)
        demand(needed_bytes(QWEN, Sizes.of(contexts, width, 512, 64)), 6 * 2**30)
        return width

    assert Halving(1056, said.append).retry(attempt) == 264
    assert tried == [1056, 528, 264] and said == [528, 264]
    with pytest.raises(UserError, match="batch of one"):
        Halving(1).retry(lambda width: demand(10, 11))
    demand(9, 10)
