"""The arithmetic of static buffers."""

from hypothesis import given
from hypothesis import strategies as st

from ia_mech.engine.cuda.layers import Sizes
from ia_mech.engine.cuda.stepper import StaticBuffers


def test_the_grid_of_the_benchmark():
    sizes = StaticBuffers(None, 32, 33, 512, 64).sizes(1056)
    assert sizes == Sizes(1056, prefixes=32, rows=33, prefix_capacity=512, own_capacity=64)
    half = StaticBuffers(None, 32, 33, 513, 64).sizes(528)
    assert half == Sizes(528, prefixes=32, rows=33, prefix_capacity=520, own_capacity=64)


@given(st.integers(1, 10), st.integers(1, 30), st.integers(1, 70))
def test_sizes_hold_what_they_promise(contexts, rows, width):
    sizes = StaticBuffers(None, contexts, rows, 100, 8).sizes(width)
    width = min(width, contexts * rows)
    assert sizes.slots == width and sizes.rows == min(width, rows)
    assert 1 <= sizes.prefixes <= min(contexts, width) and sizes.prefixes * sizes.rows >= width


def test_windows_hold_no_more_than_is_seen():
    sizes = Sizes(8, 2, 4, 256, 6)
    assert [sizes.capacity(window) for window in (None, 8, 128, 4096)] == [256, 8, 128, 256]
