"""The whole analysis on small arrays: what it reports, what may influence it, what doesn't leak."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import roc_auc_score

from ia_mech.errors import UserError
from probes import analysis
from probes.analysis import AnalysisSettings, Arrays, analyse, fold_scores
from probes.controls import Baseline, Controls
from probes.fit.folds import make_folds, permutations, seeds_of, select_and_test
from probes.fit.nested_cv import Design, cross_validate
from probes.targets import Outcome

LAYERS, CONTEXTS, POSITIONS, WIDTH = 4, 100, ("start", "end"), 12
SMALL = AnalysisSettings(folds=4, permutations=19, resamples=100, workers=1)


def planted(contexts=CONTEXTS, strength=2.0, layer=2, runs=1):
    """A signal at "end" from one layer on; before it and at "start" there is noise."""
    rng = np.random.default_rng(0)
    awareness = rng.normal(size=contexts)
    states = rng.normal(size=(LAYERS, contexts, 2, WIDTH)) * 1.5
    states[layer:, :, 1, :4] += strength * awareness[:, None]
    run = np.arange(contexts) % runs
    states += 5 * run[:, None, None]
    trials = rng.integers(4, 9, contexts)
    positives = rng.binomial(trials, expit(1.5 * awareness - 0.5))
    outcome = Outcome.from_counts(positives, trials, np.arange(contexts), run)
    ends = rng.normal(size=(LAYERS, contexts, 6))
    return Arrays(states.astype(np.float32), POSITIONS, ends), outcome


def controls(contexts=CONTEXTS):
    rng = np.random.default_rng(9)
    text = [
        Baseline(name, rng.normal(size=(contexts, 3)), f"{name}'s") for name in ("tfidf", "ids")
    ]
    output = [Baseline("output", rng.normal(size=(contexts, 30)), "the model's own")]
    return Controls(text, output, ["no lens"])


def noise():
    """States of the same shape without a signal."""
    rng = np.random.default_rng(3)
    states = rng.normal(size=(LAYERS, CONTEXTS, 2, WIDTH))
    return Arrays(states, POSITIONS, rng.normal(size=(LAYERS, CONTEXTS, 4)))


@pytest.fixture(scope="module")
def found():
    hidden, outcome = planted(runs=2)
    return analyse(hidden, outcome, controls(), SMALL, None, {"noise": noise(), "same": hidden})


def slow_auroc(scores, outcome, folds):
    """AUROC as a mean over folds; it compares all pairs of turns of two contexts in a run."""
    by_fold = []
    for fold in np.unique(folds):
        won = total = 0.0
        for run in np.unique(outcome.runs):
            here = (folds == fold) & (outcome.runs == run)
            k, rest = outcome.positives[here], outcome.negatives[here]
            label, turns = np.repeat([1, 0], here.sum()), np.concatenate([k, rest])
            area = roc_auc_score(label, np.tile(scores[here], 2), sample_weight=turns)
            pairs, own = k.sum() * rest.sum(), (k * rest).sum()  # within contexts all tie
            won += area * pairs - own / 2
            total += pairs - own
        by_fold.append(won / total)
    return np.mean(by_fold)


# -- what is reported -----------------------------------------------------------------------------


def test_scores_of_the_headline_are_those_of_the_cell_each_fold_picked(found):
    for fold, (layer, position) in enumerate(found.headline.chosen):
        assert (layer, POSITIONS.index(position)) == tuple(found.tested.chosen[fold])
        here = found.folds == fold
        own = found.cell_scores[layer, POSITIONS.index(position)]
        np.testing.assert_array_equal(found.headline.scores[here], own[here])


def test_weights_of_the_headline_give_its_scores_on_states_as_they_are(found):
    hidden, _ = planted(runs=2)
    for fold, (layer, position) in enumerate(found.headline.chosen):
        for run in range(2):
            here = (found.folds == fold) & (found.outcome.runs == run)
            states = hidden.at(layer, position)[here].astype(float)
            offset = found.headline.scores[here] - states @ found.headline.weights[fold]
            assert np.ptp(offset) < 1e-4  # one intercept per run


def test_aurocs_are_those_of_the_scores(found):
    def check(scores, estimate):
        slow = slow_auroc(scores, found.outcome, found.folds)
        assert estimate.value == pytest.approx(slow, abs=1e-5)
        assert estimate.low <= estimate.value <= estimate.high

    check(found.headline.scores, found.headline.auroc)
    for layer in range(LAYERS):
        for position in range(2):
            check(found.cell_scores[layer, position], found.auroc[layer][position])
    for control in found.controls:
        check(control.scores, control.auroc)


def test_controls_are_those_given_and_the_readout_of_both_kinds_is_compared(found):
    names = [one.control.name for one in found.controls]
    assert names == ["tfidf", "ids", "output"]
    beyond = found.beyond
    check = fold_scores(found.outcome, found.folds, SMALL)
    assert beyond.base.value == check.auroc(beyond.scores.base).value
    assert beyond.gain.value == pytest.approx(beyond.full.value - beyond.base.value, abs=1e-12)
    assert beyond.deviance_saved.low > 0 and beyond.gain.low > 0  # the controls are noise
    assert beyond.planted is None


def test_the_confidence_set_is_of_losses_by_source(found):
    assert found.among_best.shape == (LAYERS, 2)
    best = np.unravel_index(found.p_best.argmax(), found.p_best.shape)
    assert found.p_best[best] == 1 and best[0] >= 2 and best[1] == 1
    assert found.among_best[2, 1] and not found.among_best[:, 0].any()
    assert not found.among_best[:2].any()


def test_a_signal_is_found_where_it_is_written(found):
    assert (found.headline.layer, found.headline.position) == (2, "end")
    assert set(found.headline.chosen) <= {(2, "end"), (3, "end")}
    assert found.tested.headline_p == 1 / 20  # the smallest there can be
    assert (found.tested.p_family[2:, 1] == 1 / 20).all()
    assert (found.tested.p_family[:2] > 0.1).all() and (found.tested.p_family[:, 0] > 0.1).all()
    assert found.headline.auroc.low > 0.6


def test_states_that_are_the_same_everywhere_are_never_chosen():
    rng = np.random.default_rng(0)
    states = rng.normal(size=(3, 40, 2, WIDTH)).astype(np.float32)
    states[0] = 1.0  # as a header's tokens are in layer 0
    states[1, :20, 0], states[1, 20:, 0] = 2.0, 3.0  # and between runs only
    outcome = Outcome.from_counts(
        rng.binomial(8, 0.5, 40), np.full(40, 8), range(40), np.repeat([0, 1], 20)
    )
    found = analyse(Arrays(states, ["a", "b"]), outcome, settings=SMALL)
    chosen = {(found.headline.layer, found.headline.position), *found.headline.chosen}
    assert not chosen & {(0, "a"), (0, "b"), (1, "a")}
    with pytest.raises(UserError, match="the same in all contexts of a run; give other layers"):
        analyse(Arrays(states[:1], ["a", "b"]), outcome, settings=SMALL)


def test_states_of_other_contexts_are_refused():
    outcome = Outcome.from_counts([1, 0] * 20, [2] * 40, range(40))
    with pytest.raises(ValueError, match="states of 50 contexts, and an outcome of 40"):
        analyse(Arrays(np.zeros((2, 50, 1, 4)), ["a"]), outcome)


def test_random_blocks_are_compared_cell_by_cell_and_as_the_headline(found):
    nothing, same = found.random_blocks
    own = np.array([[cell.value for cell in row] for row in found.auroc])
    assert nothing.name == "noise" and nothing.difference.low > 0 and nothing.auroc.high < 0.65
    assert (nothing.cells < own)[2:, 1].all()
    assert same.auroc == found.headline.auroc and (same.cells == own).all()
    assert same.difference.value == 0 and not same.difference.low > 0


def test_threads_change_nothing_and_another_seed_draws_other_folds(found):
    two = analyse(*planted(runs=2), controls(), replace(SMALL, workers=2))
    one = replace(found, random_blocks=[])
    np.testing.assert_equal(asdict(replace(two, settings=SMALL)), asdict(one))
    assert (make_folds(found.outcome, 4, seeds_of(1)[0]) != found.folds).any()


# -- nothing leaks --------------------------------------------------------------------------------


def test_labels_of_a_fold_do_not_influence_its_scores_or_its_choice(found, monkeypatch):
    hidden, outcome = planted(runs=2)
    monkeypatch.setattr(analysis, "make_folds", lambda *_: found.folds)
    tested = found.folds == 1
    flipped = replace(outcome, positives=np.where(tested, outcome.negatives, outcome.positives))
    two = analyse(hidden, flipped, controls(), replace(SMALL, permutations=0))
    np.testing.assert_array_equal(found.headline.scores[tested], two.headline.scores[tested])
    np.testing.assert_array_equal(found.cell_scores[..., tested], two.cell_scores[..., tested])
    np.testing.assert_array_equal(found.headline.weights[1], two.headline.weights[1])
    assert found.headline.chosen[1] == two.headline.chosen[1]
    for before, after in zip(found.controls, two.controls, strict=True):
        np.testing.assert_array_equal(before.scores[tested], after.scores[tested])
    assert two.headline.auroc.value < found.headline.auroc.value - 0.1
    assert np.isnan(two.tested.headline_p) and np.isnan(two.tested.p_family).all()


def fingerprints(seed, count, per_source):
    """A target that is a random constant per source, in states that tell sources apart."""
    rng = np.random.default_rng(seed)
    sources = np.repeat(np.arange(count), per_source)
    own = rng.normal(size=(2, count, 2, 80))
    states = 3 * own[:, sources] + rng.normal(size=(2, len(sources), 2, 80))
    return Arrays(states, POSITIONS), rng.choice([0, 1, 7, 8], count)[sources], sources


# An interval misses 0.5 in some seeds, as it should; these are fixed.
@pytest.mark.parametrize(
    ("seed", "count", "per_source"),
    [(1, 40, 4), *(pytest.param(seed, 60, 6, marks=pytest.mark.slow) for seed in range(3))],
)
def test_telling_sources_apart_does_not_help_but_would_if_they_were_split(seed, count, per_source):
    hidden, positives, sources = fingerprints(seed, count, per_source)
    trials = np.full(len(sources), 8)
    settings = replace(SMALL, folds=5)
    whole = analyse(hidden, Outcome.from_counts(positives, trials, sources), settings=settings)
    auroc = whole.headline.auroc
    assert auroc.low < 0.5 < auroc.high
    assert whole.tested.headline_p > 0.05
    by_context = Outcome.from_counts(positives, trials, np.arange(len(sources)))
    leaky = analyse(hidden, by_context, settings=settings)
    assert leaky.headline.auroc.low > 0.8


# At a level of 0.1, more than 19 of 100, or more than 3 of 8, have odds of 1 in 200 or less.
@pytest.mark.parametrize(
    ("repeats", "most"), [(8, 3), pytest.param(100, 19, marks=pytest.mark.slow)]
)
def test_labels_without_meaning_are_seldom_found(repeats, most):
    rng, p = np.random.default_rng(0), []
    for seed in range(repeats):
        each = rng.normal(size=(4, 36, WIDTH))
        outcome = Outcome.from_counts(
            rng.binomial(8, rng.beta(1, 1, 36)), np.full(36, 8), range(36)
        )
        folds = make_folds(outcome, 3, seed)
        design = Design.from_outcome(outcome, folds, permutations(outcome, folds, 19, seed))
        found = [cross_validate(features, design) for features in each]
        inner, outer = (
            np.array([getattr(one, name) for one in found]).reshape(2, 2, 3, -1)
            for name in ("inner_correlation", "outer_auroc")
        )
        whole = np.array([one.whole_correlation for one in found]).reshape(2, 2)
        tested = select_and_test(inner, outer, whole, 24, 36)
        p.append([tested.headline_p, tested.p_family.min()])
    assert ((np.array(p) <= 0.1 + 1e-9).sum(0) <= most).all()
    # The mean of p values that are uniform on 0.05, 0.1, … 1, within three standard errors.
    assert (abs(np.mean(p, axis=0) - 0.525) < 3 * 0.288 / np.sqrt(repeats)).all()
