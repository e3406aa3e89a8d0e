"""Too little to train probes on is refused, with what would be enough."""

import numpy as np
import pytest

from ia_mech.errors import UserError
from probes.dataset import check_enough
from probes.outcome import Outcome
from probes.outcome import parse


def outcome(positive: int, negative: int, both: int = 0) -> Outcome:
    """Sources of one context and two turns: all positive, all negative, or one of each."""
    k = [2] * positive + [0] * negative + [1] * both
    return Outcome.of(k, [2] * len(k), np.arange(len(k)))


def test_enough_sources_of_either_kind_pass():
    check_enough(outcome(20, 20))
    check_enough(outcome(1, 1, 19))
    check_enough(outcome(2, 3), folds=2, minimum=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            outcome(7, 17),
            "only 7 sources have a genuine follow-up (of 24); probes need 20 with one and 20 "
            "without; sample contexts of about 70 sources at this rate, more turns per context",
        ),
        (outcome(22, 1), "only 1 source has a turn other than a genuine follow-up (of 23)"),
        (outcome(1, 1, 9), "sample contexts of about 30 sources at this rate, more"),
        (outcome(0, 1, 11), "only 11 sources have a genuine follow-up (of 12)"),
        (outcome(0, 30), "no context has a genuine follow-up: there is nothing to predict"),
        (outcome(30, 0), "all turns of every context are a genuine follow-up: there is nothing"),
        (outcome(0, 0, 30), "the same rate of a genuine follow-up, 0.50: there is nothing"),
        (Outcome.of([0, 1], [1, 1], ["a", "a"]), "all 2 contexts come from one source"),
    ],
)
def test_too_little_is_refused_and_what_would_be_enough_is_said(given, words):
    with pytest.raises(UserError) as refusal:
        check_enough(given, positive=parse_target("rate").positive)
    assert words in str(refusal.value)


def test_more_turns_are_no_remedy_where_every_source_has_both():
    k = [1] * 9 + [2]
    with pytest.raises(UserError) as refusal:
        check_enough(Outcome.of(k, [3] * 10, np.arange(10)))
    assert str(refusal.value).endswith("sample contexts of about 20 sources at this rate")


def test_folds_need_sources_of_either_kind():
    with pytest.raises(UserError, match="probes need 5 with one"):
        check_enough(outcome(4, 4), folds=5, minimum=2)


def test_rates_must_vary_where_contexts_are_compared():
    apart = Outcome.of([2] * 25 + [0] * 25, [2] * 50, np.arange(50), [0] * 25 + [1] * 25)
    words = r"within each run \(or dataset\) all contexts have the same rate of a genuine follow-up"
    with pytest.raises(UserError, match=words) as refusal:
        check_enough(apart, positive=parse_target("rate").positive)
    assert "choose another --target or --within" in str(refusal.value)
    check_enough(Outcome.of(apart.positives, apart.trials, apart.sources))  # as one run


def test_sources_count_where_rates_vary():
    """Whatever a run has of which nothing can be told."""
    constant, level = [1] * 40, 5
    for few in (19, 20):
        k = constant + [2] * few + [0] * few
        runs = [level] * 40 + [7] * (2 * few)
        given = Outcome.of(k, [2] * len(k), np.arange(len(k)), runs)
        if few == 20:
            check_enough(given)
            continue
        words = r"only 19 sources have .* \(of 38 in runs or datasets where rates differ\)"
        with pytest.raises(UserError, match=words):
            check_enough(given)


def test_sources_must_be_able_to_change_places():
    """30 sources of 1, 2, … contexts, like no other, and some of 40 contexts each."""

    def uneven(alike: int) -> Outcome:
        sources = np.repeat(np.arange(30 + alike), [*range(1, 31), *[40] * alike])
        k = np.arange(len(sources)) % 3
        return Outcome.of(k, np.full(len(k), 2), sources)

    check_enough(uneven(20))
    for alike, can in ((19, 19), (2, 2), (1, 0), (0, 0)):
        words = f"only {can} of {30 + alike} sources can change places with another one"
        with pytest.raises(UserError, match=words) as refusal:
            check_enough(uneven(alike))
        assert "give runs whose sources have equally many contexts" in str(refusal.value)


def test_of_the_latent_target_too_few_negatives_are_contexts_without_any_follow_up():
    target = parse_target("latent")
    with pytest.raises(UserError) as refusal:
        check_enough(
            outcome(64, 3), positive=target.positive, negative=target.negative, more_turns=False
        )
    assert str(refusal.value) == (
        "only 3 sources have no genuine follow-up in any turn (of 67); probes need 20 with one and "
        "20 without; sample contexts of about 450 sources at this rate"
    )
