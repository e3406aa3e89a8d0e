"""Turns that go on greedily from each of the likeliest first tokens."""

import numpy as np
import pytest
import tiny
import torch
from runs import sampled

from ia_mech import sample
from ia_mech.engine.sampling import first_tokens_holding, likeliest_tokens
from ia_mech.errors import UserError
from ia_mech.settings import MOST_FIRST, Settings


def test_the_nth_likeliest_token_has_its_probability_and_margin():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, -1.0, 0.5, 0.0]])
    rows, nth = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 2])
    found = likeliest_tokens(logits, rows, nth, torch.full((4,), 0.7))
    assert found.token.tolist() == [1, 3, 2, 3]  # of equal ones the first
    assert found.rank.tolist() == [1, 2, 3, 3]
    assert found.margin.tolist() == [0.0, 0.0, 1.0, 0.5]
    for t, log_p in ((1.0, found.logprob), (0.7, found.logprob_tempered)):
        torch.testing.assert_close(log_p, (logits / t).log_softmax(-1)[rows, found.token])


def test_as_many_first_tokens_as_hold_the_share():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for share, most, count in ((0.4, 4, 1), (0.6, 4, 2), (0.9, 4, 3), (0.99, 4, 4), (0.9, 2, 2)):
        assert first_tokens_holding(share, logits, 1.0, most) == [count]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "gpt_oss", "gemma3"])
def test_each_has_its_greedy_continuation(architecture, tokenizer, tmp_path):
    """It is the turn of a row that drew this token, and the greedy one of the likeliest."""
    subject = tiny.subject(architecture, tokenizer)
    given = {"model": subject.spec.name, "limit": 2, "temperatures": 0.7, "max_new_tokens": 5}
    named, drawn, again = (
        sampled(Settings(**given, **how), subject, tmp_path / name).generations
        for name, how in (
            ("named", {"first_tokens": 0.3}),
            ("sampled", {"sampled_tokens": 1, "samples": 40}),
            ("again", {"first_tokens": 0.3, "batch_rows": 7}),
        )
    )
    assert named["text"].tolist() == again["text"].tolist()
    equal = 0
    for context, turns in named.groupby("context_id", observed=True):
        assert turns["temperature"].tolist() == [0.0] + [0.7] * (len(turns) - 1)
        assert turns["sample"].tolist() == [0, *range(len(turns) - 1)]
        first, *others = (tuple(ids) for ids in turns["token_ids"])
        assert first == others[0] and len({ids[0] for ids in others}) == len(others)
        share = np.exp(turns["logprob_tempered"].iloc[1:].to_numpy())
        assert (np.diff(share) <= 0).all()
        assert (share.sum() >= 0.3 and share[:-1].sum() < 0.3) or len(share) == MOST_FIRST
        turn_of = {ids[0]: ids for ids in others}
        one = drawn[(drawn["context_id"] == context) & (drawn["temperature"] > 0)]
        for ids in map(tuple, one["token_ids"]):
            equal += ids == turn_of.get(ids[0], ids) and ids[0] in turn_of
            assert ids == turn_of.get(ids[0], ids)
    assert equal > 5


def test_it_takes_one_temperature_and_no_sampled_tokens(tiny_subject, tmp_path):
    with pytest.raises(UserError, match=r"^samples does nothing with first_tokens: a turn goes on"):
        sample(tmp_path / "run", first_tokens=0.9, samples=2, temperatures=1)
    for more in ({}, {"temperatures": 0.7, "sampled_tokens": 1}):
        with pytest.raises(UserError, match="by their probability at one temperature"):
            Settings(first_tokens=0.9, **more)
    how = {"model": tiny_subject.spec.name, "limit": 2, "temperatures": 1, "max_new_tokens": 3}
    run = sampled(Settings(**how, first_tokens=0.1), tiny_subject, tmp_path / "run")
    assert run.decoding(1.0, 1) == "each first token, by T = 1"
