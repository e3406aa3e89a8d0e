"""Rows that go on from contexts of several groups, against full passes of each row alone."""

import pytest
import tiny
import torch
from contract import VECTOR, prefilled, relative_l2, stepped
from hypothesis import given, settings
from hypothesis import strategies as st

import ia_mech.engine.state
from ia_mech.engine.shared import SharedLayer
from ia_mech.engine.state import PADDING, Prefix, expand, prefill_all, similar_lengths

GROUPS = ((23, 14, 5), (3,), (30, 4))  # tokens of contexts; sliding windows are 8
LENGTHS = [length for group in GROUPS for length in group]


def largest_difference(model, groups, contexts, steps, drops, *, share) -> float:
    """Relative L2 of the logits of rows against full passes of each row alone.

    Args:
        contexts: of the rows.
        drops: step → rows that are dropped after it, counted as they then are.
    """
    groups = [prefilled(model, lengths) for lengths in groups]
    state = expand(model, groups, contexts, steps, copies=not share)
    batch = list(range(len(contexts)))  # which row is where
    fed: list[list[int]] = [[] for _ in contexts]
    found: list[list[torch.Tensor]] = [[] for _ in contexts]
    for step in range(steps):
        tokens = tiny.prompt(len(batch), seed=step)
        for row, token, logits in zip(batch, tokens, stepped(model, state, tokens), strict=True):
            fed[row].append(token)
            found[row].append(logits)
        batch = [batch[at] for at in state.drop(drops.get(step, []))]
        assert state.rows == len(batch)
    worst = 0.0
    lengths = [n for group in groups for n in group.state.mask.sum(-1).tolist()]
    for context, tokens, ours in zip(contexts, fed, found, strict=True):
        ids = [*tiny.prompt(lengths[context], seed=lengths[context]), *tokens]
        with torch.inference_mode():
            alone = model(torch.tensor([ids]), use_cache=False).logits[0, -len(tokens) :]
        worst = max(worst, relative_l2(torch.stack(ours), alone))
    return worst


@pytest.mark.parametrize(
    ("architecture", "share"),
    [*((each, True) for each in tiny.ARCHITECTURES), *((each, False) for each in tiny.FAMILIES)],
)
def test_rows_of_several_groups_equal_rows_alone(architecture, share):
    """Groups and contexts differ in length; rows end in every place, and whole groups end, too."""
    drops = {1: [3], 2: [6, 0, 7], 4: [1, 3], 5: [0]}
    model, contexts = tiny.model(architecture), [0, 0, 1, 2, 2, 3, 4, 5, 5]
    assert largest_difference(model, GROUPS, contexts, 7, drops, share=share) <= VECTOR


@pytest.mark.parametrize("architecture", tiny.FAMILIES)
def test_prefixes_of_several_blocks_of_keys(architecture):
    """Attention on CPUs goes through keys in blocks of 512."""
    model = tiny.model(architecture)
    off = largest_difference(model, ((530, 517), (9,)), [0, 0, 1, 2], 2, {}, share=True)
    assert off <= VECTOR


@settings(derandomize=True, deadline=None, max_examples=5)
@given(st.data())
def test_rows_may_be_dropped_in_any_order(data):
    contexts = sorted(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=12)))
    left, drops = len(contexts), {}
    for step in range(6):
        if left > 1:
            drops[step] = data.draw(st.lists(st.integers(0, left - 1), max_size=left - 1))
            left -= len(set(drops[step]))
    model, share = tiny.model("llama"), data.draw(st.booleans())
    assert largest_difference(model, GROUPS, contexts, 6, drops, share=share) <= VECTOR


def test_a_prefix_is_in_memory_once():
    model = tiny.model("gemma3")  # of which the last layer has full attention
    group = prefilled(model, LENGTHS)
    state = expand(model, [group], [0, 0, 3, 5], 2)
    for before, after in zip(group.state.cache.layers, state.cache.layers, strict=True):
        shared = isinstance(after, SharedLayer)
        keys = after.prefixes[0][0] if shared else after.keys
        assert (keys.data_ptr() == before.keys.data_ptr()) is shared
    assert shared
    places = set()
    for step in range(2):
        stepped(model, state, [3, 4, 5, 6])
        storage = after.keys.untyped_storage()
        assert storage.nbytes() == 4 * 2 * 2 * 8 * 4  # rows, heads, tokens, dimensions, bytes
        places.add(storage.data_ptr())
        assert len(places) == 1
        assert after.get_seq_length() == max(LENGTHS) + step + 1


def test_any_number_of_contexts_are_prefilled_in_groups(monkeypatch):
    monkeypatch.setitem(ia_mech.engine.state.PREFILL_TOKENS, "cpu", 40)
    model, told = tiny.model("llama"), []
    prefixes = [Prefix(tiny.prompt(n, seed=n)) for n in LENGTHS]
    groups, order = prefill_all(model, prefixes, on_tokens=told.append)
    assert len(told) == len(groups) > 2 and sum(told) == sum(LENGTHS)
    assert sorted(order) == list(range(len(LENGTHS)))
    logits = torch.cat([group.logits for group in groups])
    for index, ours in zip(order, logits, strict=True):
        with torch.inference_mode():
            alone = model(torch.tensor([prefixes[index].ids]), use_cache=False).logits[0, -1]
        assert relative_l2(ours, alone) <= VECTOR


@given(st.lists(st.integers(0, 60), max_size=30), st.integers(1, 200))
def test_groups_hold_every_sequence_once_with_little_padding(lengths, most):
    groups = list(similar_lengths(lengths, most))
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        padded, real = len(group) * max(lengths[i] for i in group), sum(lengths[i] for i in group)
        assert len(group) == 1 or (padded <= most and padded - real <= PADDING * real)
