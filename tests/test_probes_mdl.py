"""The online code: lengths by hand, what noise and signal save, and that nothing looks ahead."""

import numpy as np
import pytest

from probes.fit.nested_cv import Cell
from probes.fitting.mdl import block_bits, block_ends, code_length
from probes.outcome import Outcome


def contexts(strength, sources=60, per_source=2, d=40, seed=0):
    """(cell, outcome): 8 turns each, log-odds ``strength`` times the first feature, less 0.5."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(sources * per_source, d))
    chance = 1 / (1 + np.exp(0.5 - strength * features[:, 0]))
    labels = [f"s{i % sources}" for i in range(len(features))]
    outcome = Outcome.of(rng.binomial(8, chance), np.full(len(features), 8), labels)
    return Cell.of(features), outcome


def cost(k, n, rate):
    return -k * np.log2(rate) - (n - k) * np.log2(1 - rate)


@pytest.mark.parametrize("sources", [2, 3, 5, 11, 16, 20, 30, 150, 1000])
def test_blocks_grow_to_all_sources(sources):
    ends = block_ends(sources)
    assert ends[-1] == sources and 2 <= len(ends) <= 10
    assert (np.diff(ends) > 0).all()
    assert 1 <= ends[0] <= sources / 2
    if sources >= 20:
        assert len(ends) == 10 and ends[0] == max(10, sources // 16)


def test_blocks_grow_geometrically():
    ends = np.array(block_ends(5120))
    np.testing.assert_allclose(ends[1:] / ends[:-1], 16 ** (1 / 9), rtol=2e-3)


def test_the_intercept_code_by_hand():
    """Sources alike, so that their order says nothing: 2 in the first block, then 1 and 1."""
    outcome = Outcome.of([1, 3] * 4, [4, 4] * 4, np.repeat([5, 6, 7, 8], 2), [0, 1] * 4)
    assert block_ends(4) == [2, 3, 4]
    first = 2 * 8
    third = cost(1, 4, 3 / 10) + cost(3, 4, 7 / 10)
    fourth = cost(1, 4, 4 / 14) + cost(3, 4, 10 / 14)
    found = code_length(Cell.of(np.random.default_rng(0).normal(size=(8, 3))), outcome)
    assert found.intercept_bits == pytest.approx(first + third + fourth, abs=1e-9)
    assert found.turns == 32


def test_blocks_by_hand_with_a_run_that_comes_late():
    outcome = Outcome.of([2, 0, 5, 1], [4, 2, 6, 3], [0, 1, 2, 3], [0, 0, 0, 1])
    cell = Cell.of(np.ones((4, 3)))
    by_hand = [4, 2, cost(5, 6, 3 / 8), 3]
    for code in block_bits(cell, outcome, np.array([0, 0, 1, 2])):
        np.testing.assert_allclose(code, by_hand, rtol=1e-5)


def test_where_hidden_states_say_nothing_both_codes_are_the_same():
    _, outcome = contexts(0.0)
    runs = np.arange(len(outcome)) % 3
    runs[7] = 3  # one source alone has it
    pooled = Outcome.of(outcome.positives // 6, outcome.trials, outcome.sources, runs)
    for constant in (np.ones((len(outcome), 4)), np.zeros((len(outcome), 500))):
        found = code_length(Cell.of(constant), pooled)
        assert found.bits == pytest.approx(found.intercept_bits, rel=1e-5)
        assert found.ratio == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("d", [20, 300])
def test_noise_saves_nothing(d):
    found = [code_length(*contexts(0.0, d=d, seed=seed)).saved_per_turn for seed in range(6)]
    assert all(saved.low <= 0 for saved in found)
    assert -0.1 < np.mean([saved.value for saved in found]) < 0.005


@pytest.mark.parametrize("d", [20, 300])
def test_signal_saves_bits(d):
    cell, outcome = contexts(2.5, d=d)
    found = code_length(cell, outcome)
    assert found.saved_per_turn.low > 0
    assert found.saved_per_turn.sources == 60
    assert found.ratio == found.intercept_bits / found.bits > 1
    saved = (found.intercept_bits - found.bits) / found.turns
    assert found.saved_per_turn.value == pytest.approx(saved)
    assert saved > code_length(*contexts(0.8, d=d)).saved_per_turn.value


def test_sources_stay_together():
    """A label drawn per source: contexts of a source would give each other away."""
    rng = np.random.default_rng(0)
    source = np.arange(160) % 40
    features = rng.normal(size=(40, 30))[source] + 0.1 * rng.normal(size=(160, 30))
    positives = 8 * rng.integers(2, size=40)[source]
    together = Outcome.of(positives, np.full(160, 8), source)
    apart = Outcome.of(positives, np.full(160, 8), np.arange(160))
    assert code_length(Cell.of(features), together).saved_per_turn.low <= 0
    assert code_length(Cell.of(features), apart).saved_per_turn.low > 0.1


def test_a_block_is_coded_by_what_came_before():
    cell, outcome = contexts(1.5, sources=40, d=200)
    block = np.searchsorted([10, 20, 30, 40], outcome.sources, side="right")
    changed = np.where(block >= 2, outcome.negatives, outcome.positives)
    other = Outcome.of(changed, outcome.trials, outcome.sources)
    before, after = block_bits(cell, outcome, block), block_bits(cell, other, block)
    np.testing.assert_array_equal(before[:, block < 2], after[:, block < 2])
    assert (before[:, block == 2] != after[:, block == 2]).any(1).all()
    np.testing.assert_array_equal(before[:, block == 0], np.full((2, (block == 0).sum()), 8.0))


def test_the_penalty_is_the_best_of_the_blocks_so_far():
    cell, outcome = contexts(1.5, sources=40)
    block = np.searchsorted([10, 20, 30, 40], outcome.sources, side="right")
    penalties = (100.0, 10.0, 1.0, 0.01)
    alone = np.stack([block_bits(cell, outcome, block, [p])[0] for p in penalties])
    chosen = block_bits(cell, outcome, block, penalties)[0]
    for number in (1, 2, 3):
        before = alone[:, (block > 0) & (block < number)].sum(1)
        best = 1 if number == 1 else before.argmin()
        here = block == number
        np.testing.assert_allclose(chosen[here], alone[best, here], rtol=1e-4)


def test_a_sure_probe_pays_a_bounded_price():
    features = np.array([[1.0], [-1.0]] * 20)
    positives = np.array([8, 0] * 20)
    positives[-2:] = [0, 8]
    outcome = Outcome.of(positives, np.full(40, 8), np.arange(40))
    bits = block_bits(Cell.of(features), outcome, np.repeat([0, 1], [38, 2]), [1e-6])
    np.testing.assert_allclose(bits[0, -2:], 8 * np.log2(1e4))


def test_the_seed_decides():
    cell, outcome = contexts(1.0)
    assert code_length(cell, outcome, seed=3) == code_length(cell, outcome, seed=3)
    assert code_length(cell, outcome, seed=3).bits != code_length(cell, outcome, seed=4).bits


def test_what_cannot_be_coded_is_refused():
    cell, outcome = contexts(1.0, sources=12)
    alone = Outcome.of(outcome.positives, outcome.trials, np.zeros(len(outcome)))
    with pytest.raises(ValueError, match="at least 2 sources"):
        code_length(cell, alone)
    with pytest.raises(ValueError, match="at least 2 blocks"):
        block_ends(20, blocks=1)
    with pytest.raises(ValueError, match="24 hidden states but 20 outcomes"):
        code_length(cell, outcome.take(np.arange(20)))
    with pytest.raises(ValueError, match="orders"):
        code_length(cell, outcome, orders=0)
    for penalties in ((), (1.0, 10.0)):
        with pytest.raises(ValueError, match="falling"):
            code_length(cell, outcome, penalties=penalties)
    with pytest.raises(ValueError, match="level"):
        code_length(cell, outcome, level=1.0)
