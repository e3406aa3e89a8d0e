"""``benchmarks.probe_validation``: planted runs are what their plan says, and what they show."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from benchmarks.probe_validation.__main__ import RUNS
from benchmarks.probe_validation.blocks import SIZES
from benchmarks.probe_validation.one_run import RunFindings, analyse_planted
from benchmarks.probe_validation.planted import (
    SIGNALS,
    Plan,
    Planted,
    plant,
    true_auroc,
    write,
)
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.rates.load import read_runs


def auroc(scores: np.ndarray, planted: Planted, rows=slice(None)) -> float:
    """AUROC of turns: each context counts once per positive and once per negative turn."""
    k = planted.positives[rows]
    weights = np.concatenate([k, planted.turns.shape[1] - k])
    truth = np.repeat([1, 0], len(k))
    return roc_auc_score(truth, np.tile(scores[rows], 2), sample_weight=weights)


def states(planted: Planted, layer: int, position: str) -> np.ndarray:
    return planted.residuals[layer, :, planted.plan.positions.index(position)]


def small(kind: str, contexts: int, **others) -> Plan:
    """A plan of two blocks and few dimensions, so that many contexts fit into memory."""
    sizes = {"layers": 2, "d_model": 16, "vocab": 64, "informative_layer": 1}
    return Plan(kind, contexts, **(sizes | others))


# -- labels ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIGNALS)
@pytest.mark.parametrize(("prevalence", "oracle"), [(0.3, 0.75), (0.1, 0.9)])
def test_the_labels_have_the_prevalence_and_the_oracle_auroc_that_were_asked_for(
    kind, prevalence, oracle
):
    # The Beta distribution of "none" has the other kinds' variance, not exactly their AUROC.
    planted = plant(small(kind, 20_000, prevalence=prevalence, oracle_auroc=oracle))
    assert planted.positives.mean() / 8 == pytest.approx(prevalence, abs=0.006)
    assert auroc(planted.z, planted) == pytest.approx(oracle, abs=0.02 if kind == "none" else 0.01)


def test_a_plan_is_reproducible_and_another_draw_is_of_the_same_world():
    for kind in SIGNALS:
        plan = small(kind, 50)
        first, again = plant(plan), plant(plan)
        other, elsewhere = plant(replace(plan, draw=1)), plant(replace(plan, seed=1))
        assert np.array_equal(first.residuals, again.residuals)
        assert np.array_equal(first.turns, again.turns)
        for of_world in ("direction", "slopes", "covariance", "weights_hash"):
            assert np.array_equal(getattr(first, of_world), getattr(other, of_world))
        assert not np.array_equal(first.turns, other.turns)
        assert first.weights_hash != elsewhere.weights_hash


# -- hidden states --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["signal", "output-rare"])
def test_the_closed_form_is_what_very_many_contexts_show(kind):
    planted = plant(small(kind, 200_000))
    rng = np.random.default_rng(0)
    best = np.linalg.solve(planted.covariance, planted.direction)
    said = []
    for layer, position in [
        (0, "header_last"),
        (1, "header_last"),
        (2, "turn_end"),
        (2, "header_last"),
    ]:
        weights = best + rng.standard_normal(16)
        expected = true_auroc(planted, layer, position, weights)
        scores = states(planted, layer, position).astype(float) @ weights
        assert auroc(scores, planted) == pytest.approx(expected, abs=0.005)
        assert true_auroc(planted, layer, position, -weights) == pytest.approx(1 - expected)
        said.append(expected > 0.55)
    informed = [1, 3] if kind == "signal" else [3]
    assert said == [cell in informed for cell in range(4)]


# -- the run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["signal", *(pytest.param(k, marks=pytest.mark.slow) for k in SIGNALS if k != "signal")]
)
def test_a_written_run_is_whole_and_has_the_planted_counts(kind, tmp_path):
    plan = Plan(kind, contexts=40, per_source=2, samples=3, temperatures=(1.3, 0.7))
    planted = plant(plan)
    run = write(planted, tmp_path / "new" / "run")
    assert run.complete and run.verify() == []
    assert run.digest() == write(planted, tmp_path / "again").digest()
    assert run.record["source"]["plan"]["kind"] == kind
    assert run.model["name"] == run.settings["dataset"] == "planted"
    assert [*run.positions] == list(plan.positions) and len(run.layers) == 8
    for layer in run.layers:
        for position in run.positions:
            assert np.array_equal(run.residuals(layer, position), states(planted, layer, position))
    read = read_runs([run.path])
    assert read.judge == "planted"
    turns = read.turns.assign(order=run.generations["order"])
    assert turns["follow_up"].notna().all() and turns["source"].nunique() == 20
    sampled = turns[turns["temperature"] > 0].groupby("order")["follow_up"]
    assert sampled.sum().tolist() == planted.positives.tolist()
    assert set(sampled.size()) == {6}
    # Temperatures that aren't ascending: the columns of ``turns`` go with the right ones.
    hot = turns[turns["temperature"] == 1.3].groupby("order")["follow_up"].sum()
    assert hot.tolist() == planted.turns[:, :3].sum(axis=1).tolist()
    greedy = turns[turns["temperature"] == 0].set_index("order")["category"] == FOLLOW_UP
    assert greedy.tolist() == (planted.rates > 0.5).tolist()


# -- what the analysis finds in them --------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[RunFindings]:
    """Two runs of each kind, eight without signal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IA_MECH_CACHE", str(tmp_path_factory.mktemp("cache")))
        return [
            analyse_planted(kind, 500 + seed)
            for kind in RUNS
            for seed in range({"none": 8, "complement": 8, "set": 8}.get(kind, 2))
        ]


@pytest.mark.slow
def test_the_headline_lands_where_the_signal_is(found):
    planted = [f for f in found if f.kind in ("signal", "elsewhere")]
    assert all(f.located and f.readable for f in planted)


@pytest.mark.slow
def test_beyond_is_said_of_what_output_and_text_lack_and_of_nothing_else(found):
    own = ("elsewhere", "complement", *SIZES)
    assert not any(f.beyond for f in found if f.kind not in own)
    assert all(f.beyond for f in found if f.kind == "elsewhere")
    assert sum(f.beyond for f in found if f.kind == "complement") >= 7
    assert all(f.readable for f in found if f.kind == "topic")
    assert all(f.above_output > 0 for f in found if f.kind == "loud-copy")


@pytest.mark.slow
def test_the_confidence_set_holds_the_first_layer_and_is_small(found):
    planted = [f for f in found if f.kind == "set"]
    # Of 8 at 95%, fewer have a chance of 1 in 17.
    assert sum(f.set_holds_first for f in planted) >= 7
    assert np.median([f.set_share for f in planted]) <= 0.25


@pytest.mark.slow
def test_nothing_is_seldom_found_where_nothing_is(found):
    nothing = [f for f in found if f.kind == "none"]
    # Of eight at the 5% level, more than two have a chance of 1 in 170.
    assert sum(f.headline_p <= 0.05 for f in nothing) <= 2
    assert sum(f.family_p <= 0.05 for f in nothing) <= 2


@pytest.mark.slow
def test_intervals_hold_what_they_estimate(found):
    known = [f for f in found if f.covered is not None]
    assert len(known) == 16
    # Of 16 at 95%, fewer than 13 have a chance of 1 in 140.
    assert sum(f.covered for f in known) >= 13
    assert abs(np.mean([f.auroc - f.truth for f in known])) < 0.02
