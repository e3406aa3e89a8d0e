"""The arithmetic of buffers and memory, checked against tensors."""

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_stream import prefilled_by

from ia_mech.engine.cuda.sizes import FACTOR, SMALLEST, Shape, Sizes, demand, needed_bytes
from ia_mech.engine.cuda.stepper import Stepper
from ia_mech.engine.plan import OomBackoff
from ia_mech.errors import UserError
from ia_mech.models.load import text_config

LAYERS = ((8, 128, 128, None),) * 28
QWEN = Shape(LAYERS, heads=16, width=1024 + 3072, vocab=151_936, dtype=torch.bfloat16)


def test_the_grid_of_the_benchmark():
    contexts = [c for c in range(32) for _ in range(33)]
    sizes = Sizes.of_rows(contexts, 1056, 512, 64)
    assert sizes == Sizes(lines=1056, slots=32, seats=33, prefix=512, own=64)
    assert sizes.buckets == [16, 64, 256, 1024, 1056]
    assert sizes.bucket(1050) == sizes and sizes.bucket(33) == Sizes(64, 32, 33, 512, 64)
    assert sizes.bucket(3) == Sizes(16, 16, 16, 512, 64)
    half = Sizes.of_rows(contexts, 528, 513, 64)
    assert half == Sizes(lines=528, slots=32, seats=33, prefix=640, own=64)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 70))
def test_sizes_hold_what_they_promise(contexts, width):
    sizes = Sizes.of_rows(contexts, width, 100, 8)
    most = max(contexts.count(c) for c in contexts)
    width = min(width, len(set(contexts)) * most)
    assert sizes.seats == min(width, most) and 1 <= sizes.slots <= len(set(contexts))
    assert sizes.slots * sizes.seats >= min(width, len(contexts), sizes.slots * most)
    assert sizes.buckets == sorted(set(sizes.buckets)) and sizes.buckets[-1] == width
    for lines in range(1, width + 1):
        bucket = sizes.bucket(lines)
        assert lines <= bucket.lines < max(FACTOR * lines, SMALLEST + 1) or bucket.lines == width
        assert bucket.slots == min(sizes.slots, bucket.lines)


# Bytes of a row's state in a gated delta layer of qwen3_5: the last 4 tokens of two keys of 2 heads
# and a value of 4, and a matrix for each of these.
STATE = 4 * (4 * (2 * 16 + 32) + 4 * 8 * 8)


@pytest.mark.parametrize(
    ("architecture", "windows", "recurrent"),
    [
        ("llama", [None] * 4, ()),
        ("gemma3", [8, 8, 8, None], ()),
        ("mistral", [8] * 4, ()),
        ("qwen3_5", [None], (STATE,) * 3),
    ],
)
def test_buffers_take_what_was_planned(architecture, windows, recurrent):
    model = tiny.model(architecture)
    group = prefilled_by(model, (9, 5))
    sizes = Sizes.of_rows([0] * 4 + [1] * 3, 7, 9, 6)
    stepper = Stepper(model, sizes, group)
    cache = sum(t.nbytes for layer in stepper._cache.layers for t in layer.tensors())
    shape = Shape.of(text_config(model.config), group.state.cache.layers, group.logits, model.dtype)
    layers = tuple((2, 8, 8, window) for window in windows)
    assert shape == Shape(layers, 4, 32 + 48, tiny.VOCAB, torch.float32, recurrent)
    rooms = [128 if window is None else window for window in windows]
    keys = sum(4 * 2 * (8 + 8) * (2 * room + 7 * 6) for room in rooms)
    assert cache == keys + 7 * sum(recurrent)
    scores = 3 * 4 * 4 * (2 * 4 * max(rooms) + 7 * 6)
    biases = 4 * 2 * 4 * 8 * 2 if 8 in windows else 0  # of 2 slots of 4 seats, 2 heads to a key
    largest = 7 * max(recurrent, default=0)
    always = cache + largest + 4 * 7 * 80 * 4
    logits = 7 * tiny.VOCAB * (8 + 32)
    assert needed_bytes(shape, sizes) == always + max(scores + biases, logits, 3 * largest)
    parts, logits = 7 * 4 * (8 + 1) * 4, 7 * tiny.VOCAB * 8
    assert needed_bytes(shape, sizes, fused=True) == always + max(parts, logits, 3 * largest)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 99), st.integers(1, 99))
def test_narrower_batches_have_the_buffers_they_would_have_been_given(contexts, rows, wide, narrow):
    narrowed = Sizes.of(contexts, rows, wide, 100, 8).narrowed(narrow)
    assert narrowed == Sizes.of(contexts, rows, min(wide, narrow), 100, 8)


def test_windows_hold_no_more_than_is_seen():
    sizes = Sizes(lines=8, slots=2, seats=4, prefix=256, own=6)
    assert [sizes.room(window) for window in (None, 8, 128, 4096)] == [256, 8, 128, 256]


def test_kernels_of_attention_need_no_scores():
    """Prefixes of 32k tokens: 21 GiB of scores, or the averages of all lines and heads; of one
    line and context, those of as many splits as make 256 programs."""
    contexts = [c for c in range(32) for _ in range(33)]
    small = replace(QWEN, vocab=97)
    whole, alone = Sizes.of_rows(contexts, 1056, 2**15, 64), Sizes.of_rows([0], 1, 2**15, 64)
    spared = needed_bytes(small, whole) - needed_bytes(small, whole, fused=True)
    seen = 32 * 33 * 2**15 + 1056 * 64
    assert spared == (3 * seen - 1056 * 129) * 16 * 4
    spared = needed_bytes(small, alone) - needed_bytes(small, alone, fused=True)
    assert spared == (3 * (2**15 + 64) - 256 // 8 * 129) * 16 * 4


def test_memory_at_150k_logits():
    """Written out: 0.9 GiB of prefixes and 7.2 of rows at 1056 lines, 9.5 of logits; half a
    batch needs half, and the kernel spares most of what sampling takes."""
    contexts = [c for c in range(64) for _ in range(33)]
    whole, half = (Sizes.of_rows(contexts, width, 512, 64) for width in (1056, 528))
    cache = 28 * 2 * 8 * 256 * (64 * 512 + 1056 * 64)
    assert cache == 11_509_170_176
    logits = 1056 * 151_936 * (2 + 4 + 32)
    assert needed_bytes(QWEN, whole) == cache + logits + 4 * 1056 * 4096 * 2
    assert 0.49 < needed_bytes(QWEN, half) / needed_bytes(QWEN, whole) < 0.51
    assert needed_bytes(QWEN, whole, fused=True) < cache + 2**30


def test_memory_of_recurrent_states():
    """Of the hybrid that is benchmarked: 24 gated delta layers of 32 heads of 128 × 128 in float32,
    which at 64 rows take 3 GiB, and the last 4 tokens of 8192 channels in half precision."""
    state = 32 * 128 * 128 * 4 + 8192 * 4 * 2
    layers = ((4, 256, 256, None),) * 8
    shape = Shape(layers, 16, 2560 + 9216, 248_320, torch.bfloat16, (state,) * 24)
    sizes = Sizes(lines=64, slots=4, seats=33, prefix=512, own=64)
    keys = 8 * 2 * 4 * 512 * (4 * 512 + 64 * 64)
    logits = 64 * 248_320 * (2 + 4 + 32)
    planned = needed_bytes(shape, sizes)
    assert planned == 64 * 25 * state + keys + logits + 4 * 64 * 11_776 * 2
    assert 64 * 24 * 32 * 128 * 128 * 4 == 3 * 2**30
    fused = needed_bytes(shape, sizes, fused=True)
    assert planned - fused == logits - 64 * 3 * state, "the step of a layer then takes the most"


def test_what_doesnt_fit_is_halved_and_said():
    contexts, said, tried = [c for c in range(32) for _ in range(33)], [], []

    def attempt(width: int) -> int:
        tried.append(width)
        demand(needed_bytes(QWEN, Sizes.of_rows(contexts, width, 512, 64)), 6 * 2**30)
        return width

    assert OomBackoff(1056, said.append).retry(attempt) == 264
    assert tried == [1056, 528, 264] and said == [528, 264]
    with pytest.raises(UserError, match="batch of one"):
        OomBackoff(1).retry(lambda width: demand(10, 11))
    demand(7, 10)
