"""The loop: any mix of rows, groups and stops. What rows write is compared with full passes in
``test_architectures.py``."""

from itertools import pairwise

import numpy as np
import pytest
import tiny
from contract import (
    assert_logprobs,
    assert_ranks,
    copied_prefixes,
    full_logits,
    near_ties,
    prefilled,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import ia_mech.engine.steps as loop
from ia_mech.engine.check import TOKENS, check_engine
from ia_mech.engine.decode import Row, decode
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.score import Turn, score
from ia_mech.engine.shared import SharedLayer

LENGTHS = (3, 5, 9, 14, 17, 23, 26, 31)
ROWS = [Row(c, 0.0, (0, 0)) for c in range(8)] + [
    Row(c, t, stream_key(1, f"s{c}", s)) for c in range(8) for t in (0.7, 1.3) for s in range(2)
]


def groups_of(model, *cuts: int):
    edges = [0, *cuts, len(LENGTHS)]
    return [prefilled(model, LENGTHS[a:b]) for a, b in pairwise(edges)]


@settings(derandomize=True, deadline=None, max_examples=6)
@given(
    contexts=st.lists(st.integers(0, 7), min_size=1, max_size=24),
    cuts=st.sets(st.integers(1, 7), max_size=3),
    most=st.integers(1, 7),
    stops=st.sets(st.integers(3, tiny.VOCAB - 1), max_size=60),
)
def test_any_mix_of_contexts_groups_and_stops(contexts, cuts, most, stops):
    model, steps = tiny.model("llama"), []
    rows = [Row(c, 0.5 * (i % 3), stream_key(0, "mix", i)) for i, c in enumerate(contexts)]
    ours = decode(
        model, groups_of(model, *sorted(cuts)), rows, stops, most,
        on_step=lambda *numbers: steps.append(numbers),
    )  # fmt: skip
    with copied_prefixes(model):
        whole = decode(model, groups_of(model), rows, stops, most)
    assert near_ties(model, LENGTHS, rows, ours, whole) <= 1
    lengths = [len(row.token_ids) for row in ours]
    for step, (drew, ended, spared) in enumerate(steps):
        assert drew == sum(length > step for length in lengths)
        assert ended == sum(length == step + 1 for length in lengths)
        assert spared == ended * (most - step - 1)
    assert len(steps) == max(lengths)
    for row in ours:
        tokens = row.token_ids.tolist()
        assert not stops & set(tokens[:-1]) and len(tokens) <= most
        assert row.finish_reason == ("turn_end" if tokens[-1] in stops else "length")
        assert row.finish_reason == "turn_end" or len(tokens) == most


def test_one_token_and_rows_that_all_end_at_once():
    model = tiny.model("llama")
    steps: list[tuple[int, int, int]] = []
    for stops, most, reason in (([], 1, "length"), (range(tiny.VOCAB), 9, "turn_end")):
        wrote = decode(
            model, groups_of(model, 3), ROWS, stops, most, on_step=lambda *n: steps.append(n)
        )
        assert {(len(row.token_ids), row.finish_reason) for row in wrote} == {(1, reason)}
    assert steps == [(len(ROWS), len(ROWS), 0), (len(ROWS), len(ROWS), 8 * len(ROWS))]
    assert decode(model, groups_of(model), [], [], 5) == []


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "gpt_oss", "gemma3"])
def test_after_its_sampled_tokens_a_row_goes_on_greedily(architecture):
    """It equals the whole row up to there, and then a greedy row after the same tokens."""
    model, most = tiny.model(architecture), 7
    whole, drawn = (
        [Row(c, 1.3, stream_key(1, f"s{c}", 0), drawn=count(c)) for c in range(8)]
        for count in (lambda _: None, lambda c: c)
    )
    rows = decode(model, groups_of(model, 3), whole, [], most)
    wrote = decode(model, groups_of(model, 3), drawn, [], most, together=5)
    for c, (row, one) in enumerate(zip(rows, wrote, strict=True)):
        np.testing.assert_array_equal(one.token_ids[:c], row.token_ids[:c])
        assert np.isnan(one.logprobs_tempered).tolist() == [step >= c for step in range(most)]
    turns = [Turn(c, one.token_ids.tolist()) for c, one in enumerate(wrote)]
    scored = score(model, groups_of(model, 3), turns)
    greedy = np.concatenate([one.greedy[c:] for c, one in enumerate(scored)])
    assert len(greedy) == 28 and (~greedy).sum() <= 1  # a near tie


@pytest.mark.parametrize("architecture", [*tiny.FAMILIES, "gemma4"])
def test_rows_that_take_the_places_of_others_are_as_those_alone(architecture):
    """Of every age together, in layers that share their prefix, slide or recur, and in copies."""
    model, lengths = tiny.model(architecture), (3, 23, 9, 14)
    rows = [Row(i % 4, 0.8 * (i % 3), stream_key(0, "s", i)) for i in range(8)]
    groups = [prefilled(model, lengths[:2]), prefilled(model, lengths[2:])]
    stops, steps = [tiny.EOS, *range(80, 97)], []
    alone = [decode(model, groups, [row], stops, 8)[0] for row in rows]
    assert len({len(one.token_ids) for one in alone}) > 3
    for places in (1, 4) if architecture == "llama" else (4,):
        found = decode(
            model, groups, rows, stops, 8, together=places, on_step=lambda *n: steps.append(n)
        )
        assert near_ties(model, lengths, rows, found, alone) == 0
        assert max(drew for drew, *_ in steps) <= places
    with copied_prefixes(model):
        found = decode(model, groups, rows, stops, 8, together=5)
    assert near_ties(model, lengths, rows, found, alone) == 0


@pytest.mark.parametrize("architecture", ["gemma3", "gpt_oss", "mistral"])
@pytest.mark.parametrize("window", [32, 31])
def test_layers_with_a_window_share_a_prefix_that_lies_within_it(architecture, window, monkeypatch):
    """The longest of all contexts, and the most new tokens, have 32; every number is compared with
    full passes. It isn't in the group of the first rows, and rows join later."""
    model, lengths = tiny.fresh(architecture, sliding_window=window), (3, 9, 14, 23)
    engine = check_engine(model, tiny.prompt(TOKENS, seed=0))
    assert len(engine.within) == {"gemma3": 3, "gpt_oss": 2, "mistral": 4}[architecture]
    groups = [prefilled(model, lengths[:2]), prefilled(model, lengths[2:])]
    rows = [Row(i % 4, 0.8 * (i % 3), stream_key(0, "s", i)) for i in range(8)]
    honest, kinds = loop.expand, set()

    def spied(*arguments, **settings):
        state = honest(*arguments, **settings)
        kinds.update(isinstance(state.cache.layers[at - 1], SharedLayer) for at in engine.within)
        return state

    monkeypatch.setattr(loop, "expand", spied)
    found = decode(model, groups, rows, [tiny.EOS, *range(80, 97)], 10, together=4)
    assert kinds == {window == 32}
    turns = [Turn(i % 4, tiny.prompt(10, seed=i)) for i in range(8)]
    scored = score(model, groups, turns)
    for which, ids, numbers in [
        *((row.context, one.token_ids, one) for row, one in zip(rows, found, strict=True)),
        *((turn.context, turn.ids, one) for turn, one in zip(turns, scored, strict=True)),
    ]:
        logits = full_logits(model, tiny.prompt(lengths[which], seed=lengths[which]), ids)
        assert_logprobs(numbers.logprobs_raw, logits, ids)
        assert_ranks(numbers.ranks, logits, ids)


def test_first_tokens_are_drawn_and_the_rest_is_greedy():
    model, noise = tiny.model("llama"), stream_key(0, "s", 0)
    rows = [Row(c, 1.3, noise, drawn=drawn) for c in range(4) for drawn in (None, 0, 1, 3)]
    wrote = decode(model, [prefilled(model, LENGTHS[:4])], rows, [], 6)
    for row, one in zip(rows, wrote, strict=True):
        everywhere = wrote[4 * row.context].token_ids
        greedy = full_logits(model, tiny.prompt(LENGTHS[row.context], LENGTHS[row.context]),
                             one.token_ids).argmax(-1).numpy()  # fmt: skip
        drawn = row.most_drawn
        assert (one.token_ids[:drawn] == everywhere[:drawn]).all()
        assert (one.token_ids[drawn:] == greedy[drawn:]).all()
        assert (np.isnan(one.logprobs_tempered) == (np.arange(6) >= drawn)).all()
