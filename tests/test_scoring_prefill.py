"""Contexts that begin alike: the numbers they have when each is prefilled whole."""

from dataclasses import replace

import pytest
import tiny
import torch

from ia_mech.engine import plan
from ia_mech.engine.loop import decode_step
from ia_mech.engine.prefill import Prefix, continue_prefill, expand, prefill
from ia_mech.engine.score import Turn, score_groups
from ia_mech.engine.shared_prefix import Engine
from ia_mech.likelihood.counterfactual_prefill import (
    SHARED_TOKENS,
    prefill_counterfactuals,
    shared_prefix,
)

SHARED = ("llama", "qwen3", "qwen3_moe", "glm4", "glm4_moe")  # in every layer
TRUNKS = [tiny.prompt(n, seed=n) for n in (17, 23)]
RESTS = [(0, 9), (1, 4), (0, 1), (1, 30), (0, 12)]  # the shared_prefix, and how many tokens follow


def whole(at: int, count: int) -> list[int]:
    return [*TRUNKS[at], *tiny.prompt(count, seed=count)]


@pytest.mark.parametrize("architecture", SHARED)
def test_going_on_from_a_beginning_equals_a_prefill_of_all(architecture):
    model = tiny.model(architecture)
    assert Engine.possible(model).shared == 4
    begun = prefill(model, [Prefix(ids) for ids in TRUNKS])
    rests = [tiny.prompt(count, seed=count) for _, count in RESTS]
    ours = continue_prefill(model, begun, [at for at, _ in RESTS], rests)
    theirs = prefill(model, [Prefix(whole(*rest)) for rest in RESTS])
    largest = float(theirs.logits.abs().max())
    assert (ours.logits - theirs.logits).abs().max() < 1e-5 * largest
    assert ours.state.mask.equal(theirs.state.mask)
    assert ours.state.position.equal(theirs.state.position)
    for mine, other in zip(ours.state.cache.layers, theirs.state.cache.layers, strict=True):
        for row, (at, count) in enumerate(RESTS):
            real = slice(-len(TRUNKS[at]) - count, None)
            torch.testing.assert_close(mine.keys[row, :, real], other.keys[row, :, real])
            torch.testing.assert_close(mine.values[row, :, real], other.values[row, :, real])
    index = torch.tensor([4, 1, 2, 2, 3])
    for share in (True, False):  # and what is decoded after it
        a, b = (expand(p.state, index, capacity=3, share=share) for p in (ours, theirs))
        for step in range(3):
            token = torch.tensor(tiny.prompt(5, seed=step))
            difference = decode_step(model, a, token) - decode_step(model, b, token)
            assert difference.abs().max() < 1e-5 * largest


def test_the_trunk_is_what_all_have_but_for_a_last_token():
    begun = tuple(range(3, 3 + SHARED_TOKENS))
    assert shared_prefix([(*begun, 1, 2), (*begun, 2, 2), (*begun, 1, 1)]) == begun
    assert shared_prefix([(*begun, 1), begun]) == (), (
        "one token has to follow, and the rest is short"
    )
    assert shared_prefix([(*begun, 1, 1), (*begun, 1)]) == begun
    assert shared_prefix([(*begun, 1)]) == (), "nobody else begins so"
    assert shared_prefix([]) == ()


@pytest.mark.parametrize("branched", [True, False])
def test_turns_after_others_are_scored_as_after_whole_prefills(branched, monkeypatch):
    several = replace(plan.CPU, prefill_tokens=60)  # groups
    monkeypatch.setattr(plan, "CPU", several)
    model = tiny.model("llama")
    contexts = [tuple(whole(*rest)) for rest in RESTS] + [tuple(tiny.prompt(6, seed=1))]
    prefixes = [tuple(TRUNKS[at]) if branched else () for at, _ in RESTS] + [()]
    groups, order = prefill_counterfactuals(model, contexts, prefixes)
    assert sorted(order) == list(range(6)) and len(groups) > 2
    turn = tiny.prompt(8, seed=8)
    scored = score_groups(model, groups, [Turn(row, turn) for row in range(6)], [])
    for row, at in enumerate(order):
        ids = [*contexts[at], *turn]
        logits = model(torch.tensor([ids])).logits[0, len(contexts[at]) - 1 : -1]
        full = logits.log_softmax(-1).gather(-1, torch.tensor(turn)[:, None])[:, 0]
        assert (torch.from_numpy(scored[row].logprobs_raw) - full).abs().max() < 4e-5
