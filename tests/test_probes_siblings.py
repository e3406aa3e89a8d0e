"""Probes of responses to one query: what depends on the query alone counts for nothing."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

from ia_mech.errors import UserError
from ia_mech.stats import Estimate
from probes.analysis import AnalysisSettings, Arrays, analyse, less_sources
from probes.controls import Baseline, Controls
from probes.dataset import LEAST_RELIABILITY, _reliability, check_reliable
from probes.fit.folds import exchangeable_sources, permutations
from probes.fit.nested_cv import held_out_loss
from probes.targets import Outcome, Target

SOURCES, SIBLINGS, TURNS = 40, 4, 16
FAST = AnalysisSettings(permutations=59, resamples=200, workers=1)
POSITIONS = ("query_end", "header_last")


def planted(seed: int, of_response: float, of_query: float = 1.5):
    """States and outcome. Layer 1 at the header holds what a response adds to the log-odds; every
    state, the query's end included, holds more loudly what the query adds."""
    rng = np.random.default_rng(seed)
    sources = np.repeat(np.arange(SOURCES), SIBLINGS)
    query, response = rng.normal(size=SOURCES)[sources], rng.normal(size=len(sources))
    states = rng.normal(size=(2, len(sources), 2, 6))
    states[:, :, 0] = rng.normal(size=(2, SOURCES, 6))[:, sources]  # before the response
    states[..., 0] += 5 * query[:, None]
    states[1, :, 1, 1] += 2 * response
    k = rng.binomial(TURNS, expit(of_query * query + of_response * response - 0.5))
    outcome = Outcome.from_counts(k, np.full(len(k), TURNS), sources, sources)
    return Arrays(states, POSITIONS), outcome


def test_a_response_s_part_is_found_where_it_is():
    hidden, outcome = planted(0, of_response=1.0)
    text = np.random.default_rng(1).normal(size=(len(outcome), 3)) + outcome.sources[:, None]
    found = analyse(hidden, outcome, Controls(text=[Baseline("text", text, "noise")]), FAST)
    assert (found.headline.layer, found.headline.position) == (1, "header_last")
    assert found.tested.headline_p == pytest.approx(1 / 60)
    assert found.headline.auroc.low > 0.6
    assert found.auroc[0][1].low < 0.5 < found.auroc[0][1].high  # noise there
    assert found.auroc[1][0].value == 0.5  # the same in all responses: nothing to tell by
    assert found.controls[0].auroc.low < 0.5 < found.controls[0].auroc.high


def test_what_hangs_on_the_query_alone_is_not_found():
    """At a level of 5%, it is found in at most 1 of 4 planted runs (more have a chance of 1.4%)."""
    settings = AnalysisSettings(permutations=19, resamples=50, workers=1)
    found = [analyse(*planted(seed, of_response=0.0), settings=settings) for seed in range(4)]
    assert sum(one.tested.headline_p <= 0.05 for one in found) <= 1
    hidden, outcome = planted(0, of_response=0.0)
    between = Outcome.from_counts(outcome.positives, outcome.trials, outcome.sources)
    assert analyse(hidden, between, settings=settings).headline.auroc.low > 0.6  # of queries


def test_labels_move_among_the_responses_to_one_query():
    outcome = Outcome.from_counts([1, 0, 2, 1, 0], [2] * 5, list("abaab"), list("abaab"))
    assert outcome.compares_siblings and exchangeable_sources(outcome) == 2
    drawn = np.array(list(permutations(outcome, np.zeros(5, dtype=int), 600, 0)))
    assert (outcome.sources[drawn] == outcome.sources).all()
    orders, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(orders) == 12 and counts.min() > 20  # all of 3! × 2!, 50 times each
    assert not Outcome.from_counts([1, 0, 1], [1] * 3, list("abc")).compares_siblings


def test_the_loss_is_that_of_telling_pairs_of_turns_apart():
    outcome = Outcome.from_counts([2, 0, 1, 3], [3, 2, 4, 3], list("aaab"), list("aaab"))
    scores = np.array([0.3, -0.2, 1.1, 5.0])
    total, pairs = 0.0, 0
    for i, j in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]:
        several = outcome.positives[i] * outcome.negatives[j]
        total += several * np.log1p(np.exp(scores[j] - scores[i]))
        pairs += several
    losses = held_out_loss(scores, outcome)
    assert losses[:3].sum() == pytest.approx(total / pairs * 9) and losses[3] == 0
    assert held_out_loss(scores + 7, outcome) == pytest.approx(losses)  # it has no level


def test_states_before_the_response_hold_nothing_but_rounding():
    rng = np.random.default_rng(0)
    states = np.repeat(rng.normal(size=(5, 8)), 3, axis=0).astype(np.float32)
    states += rng.normal(size=states.shape).astype(np.float32) * 1e-7
    sources = np.repeat(np.arange(5), 3)
    assert not less_sources(states, sources).any()
    apart = less_sources(states + rng.normal(size=states.shape), sources)
    means = [apart[sources == source].mean(0) for source in range(5)]
    assert np.abs(means).max() < 1e-12 and apart.any()


class _Data:
    target = Target("rate")

    def __init__(self, reliability: Estimate | None) -> None:
        self.reliability = reliability


def test_siblings_that_do_not_differ_are_a_result():
    check_reliable(_Data(Estimate(0.1, 0.0, LEAST_RELIABILITY, 60)))
    with pytest.raises(UserError, match=r"reliability of siblings' rates is 0.10 \[0.00, 0.20\]"):
        check_reliable(_Data(Estimate(0.1, 0.0, 0.2, 60)))
    with pytest.raises(UserError, match="no query has several responses"):
        check_reliable(_Data(None))
    rng = np.random.default_rng(0)
    names = pd.MultiIndex.from_product(
        [range(50), range(3), range(8)], names=["source", "response", "sample"]
    )
    turns = names.to_frame(index=False).assign(run="A", temperature=1.0)
    turns["context_id"] = turns["source"].astype(str) + "/" + turns["response"].astype(str)
    alike = _reliability(turns.assign(positive=rng.random(len(turns)) < 0.5))
    apart = _reliability(turns.assign(positive=rng.random(len(turns)) < turns["response"] / 2))
    assert alike.low == 0 and alike.high < 0.6 < apart.low
