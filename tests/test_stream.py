"""Rows that join a batch under way: the same numbers as alone."""

import gc
import weakref
from itertools import pairwise

import pytest
import tiny
import torch
from contract import VECTOR, assert_ranks, assert_same_scores, full_logits, logits_apart, near_ties
from hypothesis import given, settings
from hypothesis import strategies as st

import ia_mech.engine.loop
from ia_mech.engine.decode import decode, decode_stream
from ia_mech.engine.loop import Row, decode_step
from ia_mech.engine.prefill import Prefix, can_join, expand, join, prefill
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.score import Turn, score, score_groups

FAMILIES = pytest.mark.parametrize("architecture", tiny.FAMILIES)
STOPS = [tiny.EOS, 5, 50, 77, *range(90, 110)]


def prefilled_by(model, lengths):
    return prefill(model, [Prefix(tiny.prompt(n, seed=n)) for n in lengths])


@FAMILIES
@pytest.mark.parametrize(
    ("first", "then"),
    [((23, 14, 5), (30, 4)), ((23, 14, 5), (6, 3)), ((4,), (5, 3)), ((9,), (40, 41))],
)
def test_rows_that_join_have_the_logits_they_have_alone(architecture, first, then):
    """Contexts that are shorter and longer than the batch, in lines that became free and in new
    ones, into a batch of any age; windows of 8 tokens are full and not."""
    model = tiny.model(architecture)
    groups = [prefilled_by(model, lengths) for lengths in (first, then)]
    lengths = [*first, *then]
    batch = expand(
        groups[0].state, torch.arange(len(first)).repeat(2), capacity=16, share=True, max_rows=9
    )
    held = list(range(len(first))) * 2  # the context of each line
    assert can_join(batch)
    own = {}  # by line, the tokens it was given
    for step in range(12):
        if step in (3, 7):
            lines = [1, len(held)] if len(held) < 9 else [1, 0]
            batch.retire(lines[:1])
            join(batch, lines, groups[1].state, torch.tensor([1, 0]), [len(first) + 1, len(first)])
            held[lines[0]] = len(first) + 1
            held[lines[1] : lines[1] + 1] = [len(first)]
            own |= {line: [] for line in lines}
        tokens = tiny.prompt(len(held), seed=step)
        logits = decode_step(model, batch, torch.tensor(tokens))
        for line, token in enumerate(tokens):
            own.setdefault(line, []).append(token)
        for line in (0, 1, len(held) - 1):
            ids = [*tiny.prompt(lengths[held[line]], seed=lengths[held[line]]), *own[line]]
            with torch.inference_mode():
                alone = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            assert logits_apart(logits[line], alone) <= VECTOR


LENGTHS = (3, 5, 9, 14, 17, 23, 26, 31)
ROWS = [Row(c, 0.0, (0, 0)) for c in range(8)] + [
    Row(c, t, stream_key(1, f"s{c}", s)) for c in range(8) for t in (0.7, 1.3) for s in range(2)
]


@FAMILIES
def test_a_narrow_batch_writes_what_each_row_writes_alone(architecture):
    model = tiny.model(architecture)
    alone = []
    for row in ROWS[::2]:
        one = prefilled_by(model, LENGTHS[row.context : row.context + 1])
        alone += decode(model, one, [Row(0, row.temperature, row.stream)], STOPS, 12, None, False)
    lengths = {len(row.token_ids) for row in alone}
    assert {1, 2} < lengths and len(lengths) > 4, "rows end at all times"
    narrow, wide = (5, ((0, 3), (3, 4), (4, 8))), (17, ((0, 8),))
    for share, (width, parts) in ((True, narrow), (False, wide)):
        groups = (prefilled_by(model, LENGTHS[a:b]) for a, b in parts)
        ours = decode_stream(model, groups, ROWS, STOPS, 12, width=width, share=share)
        assert near_ties(model, LENGTHS, ROWS[::2], ours[::2], alone) <= 1


@settings(derandomize=True, deadline=None, max_examples=10)
@given(
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=24),
    width=st.integers(1, 9),
    cuts=st.sets(st.integers(1, 4)),
    most=st.integers(1, 7),
    stops=st.sets(st.integers(3, tiny.VOCAB - 1), max_size=60),
)
def test_any_mix_of_contexts_rows_and_stops(rows, width, cuts, most, stops):
    """Each row once, whatever the groups; told as often as tokens were drawn."""
    model = tiny.model("llama")
    rows = [Row(c, 0.5 * (i % 3), stream_key(0, "mix", i)) for i, c in enumerate(rows)]
    edges = [0, *sorted(cuts), 5]
    groups = (prefilled_by(model, LENGTHS[a:b]) for a, b in pairwise(edges))
    told = []
    ours = decode_stream(
        model, groups, rows, stops, most, width=width, on_step=lambda *n: told.append(n)
    )
    alone = decode(model, prefilled_by(model, LENGTHS[:5]), rows, stops, most, None, False)
    assert near_ties(model, LENGTHS, rows, ours, alone) <= 1
    assert sum(tokens for tokens, _ in told) == sum(len(row.token_ids) for row in ours)
    lengths = sorted(length for _, finished in told for length in finished)
    assert lengths == sorted(len(row.token_ids) for row in ours)
    assert all(tokens <= width for tokens, _ in told)


def test_groups_are_made_when_they_are_needed_and_let_go_afterwards():
    model, alive, log = tiny.model("llama"), [], []

    def groups():
        for number in range(4):
            log.append(f"group {number}")
            made = prefilled_by(model, LENGTHS[2 * number : 2 * number + 2])
            alive.append(weakref.ref(made.state.cache.layers[0].keys.untyped_storage()))
            yield made
            del made
            gc.collect()
            log.append(sum(ref() is not None for ref in alive))

    rows = [Row(context, 0.0, (0, 0)) for context in range(8) for _ in range(2)]
    decode_stream(model, groups(), rows, [], 6, width=4, on_step=lambda *_: log.append("."))
    asked = [at for at, what in enumerate(log) if str(what).startswith("group")]
    assert all("." in log[a:b] for a, b in pairwise(asked))
    held = [what for what in log if isinstance(what, int)]
    assert held == [0, 0, 0] or max(held) <= 2, held


def test_full_attention_that_is_copied_is_not_joined():
    model = tiny.model("llama")
    group = prefilled_by(model, LENGTHS[:2])
    assert not can_join(expand(group.state, torch.tensor([0, 1]), capacity=3))
    assert can_join(expand(group.state, torch.tensor([0, 1]), capacity=3, share=True))


@FAMILIES
@pytest.mark.parametrize("share", [True, False])
def test_turns_of_several_groups_are_scored_as_alone(architecture, share):
    model = tiny.model(architecture)
    groups = [prefilled_by(model, LENGTHS[a:b]) for a, b in ((0, 3), (3, 4), (4, 8))]
    turns = [
        Turn(c, tiny.prompt(n, seed=n))
        for c, n in [(5, 9), (0, 8), (3, 1), (0, 11), (7, 10), (1, 30), (2, 9), (4, 8), (3, 9)]
    ]
    alone = [
        score(model, prefilled_by(model, [LENGTHS[t.context]]), [Turn(0, t.ids)], [0.5], False)[0]
        for t in turns
    ]
    scored = score_groups(model, groups, turns, [0.5], share)
    for turn, ours, theirs in zip(turns, scored, alone, strict=True):
        assert_same_scores(ours, theirs)
        if ours.ranks.tolist() != theirs.ranks.tolist():
            length = LENGTHS[turn.context]
            logits = full_logits(model, tiny.prompt(length, seed=length), turn.ids)
            assert_ranks(ours.ranks, logits, turn.ids)


def test_a_batch_that_is_not_joined_is_compacted_while_others_wait(monkeypatch):
    model, widths = tiny.model("llama"), []
    honest = ia_mech.engine.loop.decode_step

    def seen(model, state, token):
        widths.append(len(token))
        return honest(model, state, token)

    monkeypatch.setattr(ia_mech.engine.loop, "decode_step", seen)
    groups = (prefilled_by(model, LENGTHS[at : at + 2]) for at in (0, 2, 4, 6))
    decode_stream(model, groups, ROWS, STOPS, 12, width=14, share=False)
    first = widths[: next(at for at in range(1, len(widths)) if widths[at] > widths[at - 1])]
    assert first[0] > first[-1] and first == sorted(first, reverse=True)
