"""Scores of turns after contexts of several groups, against full passes."""

import pytest
import tiny
from contract import assert_logprobs, assert_ranks, full_logits, prefilled

from ia_mech.engine.score import Turn, score

GROUPS = ((23, 14, 5), (31,), (3, 9))  # tokens of contexts; sliding windows are 8
LENGTHS = [n for group in GROUPS for n in group]
TURNS = [
    Turn(c, tiny.prompt(n, seed=n))
    for c, n in [(5, 9), (0, 8), (3, 1), (0, 11), (4, 10), (1, 30), (2, 9), (4, 0), (3, 9)]
]


@pytest.mark.parametrize("architecture", tiny.FAMILIES)
@pytest.mark.parametrize(
    ("share", "piece"), [(True, 5), (False, 256)], ids=["shared, in pieces", "copied, whole"]
)
def test_turns_of_several_groups_are_scored_as_in_full_passes(
    architecture, share, piece, monkeypatch
):
    monkeypatch.setattr("ia_mech.engine.score.LOGITS", piece * tiny.VOCAB)
    model, told = tiny.model(architecture), []
    groups = [prefilled(model, lengths) for lengths in GROUPS]
    scored = score(model, groups, TURNS, [0.5], share=share, on_tokens=told.append)
    assert sum(told) == sum(len(turn.ids) for turn in TURNS)
    for turn, ours in zip(TURNS, scored, strict=True):
        length = LENGTHS[turn.context]
        assert len(ours.logprobs_raw) == len(turn.ids)
        logits = full_logits(model, tiny.prompt(length, seed=length), turn.ids)
        assert_logprobs(ours.logprobs_raw, logits, turn.ids)
        assert_logprobs(ours.logprobs_tempered[0], logits, turn.ids, 0.5)
        assert_ranks(ours.ranks, logits, turn.ids)
