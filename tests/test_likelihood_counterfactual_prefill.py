"""Contexts that begin alike: the numbers they have when each is prefilled whole."""

from dataclasses import replace

import pytest
import tiny
import torch
from contract import VECTOR, assert_logprobs, full_logits, logits_apart, relative_l2

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

SHARED = ("llama", "qwen3_moe")  # in every layer
BEGINNINGS = [tiny.prompt(n, seed=n) for n in (17, 23)]
RESTS = [(0, 9), (1, 4), (0, 1), (1, 30), (0, 12)]  # the beginning, and how many tokens follow


def whole(at: int, count: int) -> list[int]:
    return [*BEGINNINGS[at], *tiny.prompt(count, seed=count)]


@pytest.mark.parametrize("architecture", SHARED)
def test_a_continued_prefill_equals_a_prefill_of_all(architecture):
    model = tiny.model(architecture)
    assert Engine.possible(model).shared == 4
    begun = prefill(model, [Prefix(ids) for ids in BEGINNINGS])
    rests = [tiny.prompt(count, seed=count) for _, count in RESTS]
    ours = continue_prefill(model, begun, [at for at, _ in RESTS], rests)
    theirs = prefill(model, [Prefix(whole(*rest)) for rest in RESTS])
    assert logits_apart(ours.logits, theirs.logits) <= VECTOR
    assert ours.state.mask.equal(theirs.state.mask)
    assert ours.state.position.equal(theirs.state.position)
    for mine, other in zip(ours.state.cache.layers, theirs.state.cache.layers, strict=True):
        for row, (at, count) in enumerate(RESTS):
            real = slice(-len(BEGINNINGS[at]) - count, None)
            assert relative_l2(mine.keys[row, :, real], other.keys[row, :, real]) <= VECTOR
            assert relative_l2(mine.values[row, :, real], other.values[row, :, real]) <= VECTOR
    index = torch.tensor([4, 1, 2, 2, 3])
    for share in (True, False):  # and what is decoded after it
        a, b = (expand(p.state, index, capacity=3, share=share) for p in (ours, theirs))
        for step in range(3):
            token = torch.tensor(tiny.prompt(5, seed=step))
            logits = decode_step(model, a, token), decode_step(model, b, token)
            assert logits_apart(*logits) <= VECTOR


def test_the_shared_prefix_is_what_all_have_but_for_a_last_token():
    begun = tuple(range(3, 3 + SHARED_TOKENS))
    assert shared_prefix([(*begun, 1, 2), (*begun, 2, 2), (*begun, 1, 1)]) == begun
    assert shared_prefix([(*begun, 1), begun]) == (), (
        "one token has to follow, and the rest is short"
    )
    assert shared_prefix([(*begun, 1, 1), (*begun, 1)]) == begun
    assert shared_prefix([(*begun, 1)]) == (), "of one context there is none"
    assert shared_prefix([]) == ()


@pytest.mark.parametrize("branched", [True, False])
def test_turns_after_others_are_scored_as_after_whole_prefills(branched, monkeypatch):
    several = replace(plan.CPU, prefill_tokens=60)  # groups
    monkeypatch.setattr(plan, "CPU", several)
    model = tiny.model("llama")
    contexts = [tuple(whole(*rest)) for rest in RESTS] + [tuple(tiny.prompt(6, seed=1))]
    prefixes = [tuple(BEGINNINGS[at]) if branched else () for at, _ in RESTS] + [()]
    groups, order = prefill_counterfactuals(model, contexts, prefixes)
    assert sorted(order) == list(range(6)) and len(groups) > 2
    turn = tiny.prompt(8, seed=8)
    scored = score_groups(model, groups, [Turn(row, turn) for row in range(6)], [])
    for row, at in enumerate(order):
        logits = full_logits(model, list(contexts[at]), turn)
        assert_logprobs(scored[row].logprobs_raw, logits, turn)
