"""The loop: any mix of rows, groups and stops. What rows write is compared with full passes in
``test_architectures.py``."""

from itertools import pairwise

import tiny
from contract import copied_prefixes, near_ties, prefilled
from hypothesis import given, settings
from hypothesis import strategies as st

from ia_mech.engine.decode import Row, decode
from ia_mech.engine.sampling import stream_key

LENGTHS = (3, 5, 9, 14, 17, 23, 26, 31)
STOPS = [tiny.EOS, 5, 50, 77, *range(90, 110)]
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
    for step, drew, ended in steps:
        assert drew == sum(length > step for length in lengths)
        assert ended == sum(length == step + 1 for length in lengths)
    assert [step for step, *_ in steps] == list(range(max(lengths)))
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
    assert steps == [(0, len(ROWS), len(ROWS))] * 2
    assert decode(model, groups_of(model), [], [], 5) == []
