"""The elicitation gap of arms that are alike and of one that is better, and the command."""

import shutil

import numpy as np
import pandas as pd
import pytest
from conftest import Silent
from shell import call, refusal

from experiments.control import best_elsewhere
from experiments.elicit import GREEDY, OPENING, main
from experiments.outcome import BEYOND_SIBLINGS, IN_ROLE, ONCE_IN_ROLE, RATE, SIBLINGS, rates_of
from ia_mech.judge import builtin_judge
from ia_mech.judge.decoys import SIBLING
from ia_mech.judge.judging import label_run
from ia_mech.rates.load import JudgedTurns
from ia_mech.run import Run
from ia_mech.stats import cluster_bootstrap


def gaps(beyond, greedy, half, counts):
    return best_elsewhere(beyond, beyond - beyond[greedy], half, counts)


def by_loops(ranked, reported, half, counts) -> float:
    total = 0.0
    drawn = [q for q in range(len(half)) for _ in range(int(counts[q]))]
    for one in (0, 1):
        choosing = [q for q in drawn if half[q] != one]
        best = max(range(len(ranked)), key=lambda arm: sum(ranked[arm][q] for q in choosing))
        total += sum(reported[best][q] for q in drawn if half[q] == one)
    return total / len(drawn)


def test_an_arm_is_chosen_on_one_half_and_reported_on_the_other():
    rng = np.random.default_rng(0)
    ranked, reported, half = rng.normal(size=(3, 16)), rng.normal(size=(3, 16)), np.arange(16) % 2
    counts = 1.0 + rng.multinomial(16, np.full(16, 1 / 16), size=50)
    wanted = [by_loops(ranked, reported, half, one) for one in counts]
    np.testing.assert_allclose(best_elsewhere(ranked, reported, half, counts), wanted, atol=1e-12)
    assert np.isnan(best_elsewhere(ranked, reported, half, 1.0 * (half == 0)[None]))


@pytest.mark.slow
def test_arms_that_do_nothing_are_called_in_5_percent_though_the_best_is_chosen():
    """Of 400 studies of 60 queries with seven arms: within three standard errors of the level."""
    rng, called = np.random.default_rng(1), 0
    half = np.arange(60) % 2
    for seed in range(400):
        values = rng.normal(size=(7, 60)) + rng.normal(size=60)
        options = {"level": 0.95, "resamples": 400, "seed": seed}

        def statistic(counts: np.ndarray, values=values) -> np.ndarray:
            return best_elsewhere(values, values, half, counts)

        (found,) = cluster_bootstrap(statistic, range(60), **options)
        called += not found.low <= 0 <= found.high
    assert called / 400 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)


def test_arms_that_are_alike_have_no_gap_though_the_best_is_chosen():
    """If it weren't chosen on one half and reported on the other, the best of six equal arms would
    be 0.4 standard deviations better."""
    rng = np.random.default_rng(1)
    each = [
        gaps(rng.normal(size=(6, 20)), 0, np.arange(20) % 2, np.ones((1, 20)))[0]
        for _ in range(2000)
    ]
    assert abs(np.mean(each)) < 3 * np.std(each) / np.sqrt(len(each))


def test_rates_are_of_the_same_turns_after_their_own_response_and_after_siblings():
    rows = pd.DataFrame(
        [
            {"source": "a", "own_follow_up": 1.0, "follow_up": 0.0, "out_of_role": 0.0},
            {"source": "a", "own_follow_up": 1.0, "follow_up": 1.0, "out_of_role": 0.0},
            {"source": "b", "own_follow_up": 0.0, "follow_up": np.nan, "out_of_role": 0.0},
            {"source": "c", "own_follow_up": 0.0, "follow_up": 1.0, "out_of_role": 1.0},
            {"source": "c", "own_follow_up": 0.0, "follow_up": 1.0, "out_of_role": 0.0},
        ]
    ).assign(temperature=0.0, dataset="d", decoy=SIBLING)
    judged = JudgedTurns(pd.DataFrame(), "me", {}, None, [], [], decoys=rows)
    found = rates_of(judged, siblings=True).set_index("source")
    assert found[RATE].to_dict() == {"a": 1.0, "c": 0.0}  # nothing is known of b's siblings
    assert found[SIBLINGS].to_dict() == {"a": 0.5, "c": 1.0}
    assert found[BEYOND_SIBLINGS].to_dict() == {"a": 0.5, "c": -1.0}
    assert found[IN_ROLE].to_dict() == {"a": 1.0, "c": 0.5}
    assert found[ONCE_IN_ROLE].to_dict() == {"a": 1.0, "c": 0.0}  # of the turns in role


def test_the_command_samples_each_arm_once(siblings, tmp_path, capfd):
    run = Run.open(shutil.copytree(siblings.path, tmp_path / "run"))
    out = tmp_path / "out"
    words = [str(run.path), "--out", str(out), "--resamples", "100"]
    assert "has not been judged" in refusal(call(main, words, capfd))
    label_run(run, builtin_judge(), "builtin", Silent())
    planned = call(main, [*words, "--dry-run"], capfd)
    ways = ("", "prompt, ", "opening, ")
    arms = [f"{way}{t}" for way in ways for t in (GREEDY, "T = 1")]
    assert planned.status == 0 and planned.out.count(" to sample ") == 2
    line = refusal(call(main, [*words, "--opening", "Thanks. "], capfd))
    assert "has white space at its ends" in line
    assert not out.exists()
    outcome = call(main, words, capfd)
    assert outcome.status == 0, outcome.err
    assert "\nWhat the best other way of asking adds" in outcome.out
    found = pd.read_parquet(out / "estimates.parquet")
    assert set(found["term"]) == {*arms, "best arm"}
    by_arm = found.set_index(["quantity", "term"])["value"]
    for arm in set(arms) - {GREEDY}:  # every query has turns of all arms
        apart = by_arm[BEYOND_SIBLINGS, arm] - by_arm[BEYOND_SIBLINGS, GREEDY]
        assert by_arm["follow-ups beyond siblings, minus greedy", arm] == pytest.approx(apart)
    prompted, opened = (Run.open(out / way / "run") for way in ("prompt", "opening"))
    assert prompted.settings["system"] and prompted.labels.judges == ["builtin"]
    assert opened.settings["opening"] == OPENING and opened.settings["system"] is None
    ends = [one["text"].rpartition("user\n")[2] for _, one in opened.contexts.iterrows()]
    assert set(ends) == {OPENING}
    again = call(main, words, capfd)
    assert again.status == 0, again.err
    assert again.out == outcome.out
    assert "--prompt is " in refusal(call(main, [*words, "--prompt", "Be kind."], capfd))
    planned = call(main, [*words, "--dry-run"], capfd).out
    assert planned.count("; done already") == 2 and "\ntime " not in planned
    assert f"go to {out}" in " ".join(planned.split())
