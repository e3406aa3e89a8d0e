"""Scores of predictions against their definitions, and replicates against repeated rows."""

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from ia_mech.stats import FoldScores, ResampledScore, auroc_columns
from ia_mech.stats.resampling import resample_counts, source_index

RESAMPLES = 40


def auroc(scores, positives, trials):
    """Of one column."""
    columns = (np.asarray(x, dtype=float)[:, None] for x in (scores, positives, trials))
    return float(auroc_columns(*columns)[0])


@dataclass(frozen=True)
class Data:
    """Contexts and predictions; ``rows`` may repeat contexts."""

    k: np.ndarray
    n: np.ndarray
    sources: np.ndarray
    folds: np.ndarray
    strata: np.ndarray
    scores: np.ndarray
    null: np.ndarray
    context: np.ndarray

    def __getitem__(self, rows):
        return Data(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def p(self):
        return 1 / (1 + np.exp(-self.scores))

    def fold_scores(self, **options):
        strata = options.pop("strata", self.strata)
        options = {"resamples": RESAMPLES, **options}
        return FoldScores(self.k, self.n, self.sources, self.folds, strata, **options)


def data(seed=0, contexts=150, decimals=None):
    """Contexts of 30 sources in 4 folds and 2 strata, with scores that say something."""
    rng = np.random.default_rng(seed)
    sources = rng.integers(30, size=contexts)
    n = rng.integers(1, 9, size=contexts).astype(float)
    latent = rng.normal(size=contexts)
    k = rng.binomial(n.astype(int), 1 / (1 + np.exp(1 - latent))).astype(float)
    scores = latent + rng.normal(size=contexts)
    if decimals is not None:
        scores = scores.round(decimals)
    null = rng.uniform(0.2, 0.5, size=contexts)
    strata = rng.integers(2, size=contexts)
    return Data(k, n, sources, sources % 4, strata, scores, null, np.arange(contexts))


def pairs(d):
    """``[contexts, contexts]`` pairs of a positive and a negative turn of two contexts; a repeat of
    a context is no other context."""
    return np.outer(d.k, d.n - d.k) * (d.context[:, None] != d.context)


def pairwise_auroc(d):
    won = 0.5 + np.sign(d.scores[:, None] - d.scores) / 2
    return (pairs(d) * won).sum() / pairs(d).sum()


def sklearn_deviance(d):
    labels, weights = np.repeat([1, 0], len(d.k)), np.concatenate([d.k, d.n - d.k])
    model, null = (log_loss(labels, np.tile(p, 2), sample_weight=weights) for p in (d.p, d.null))
    return 1 - model / null


def by_fold(d, score, strata=True):
    """Mean over folds; within, mean over strata weighted by pairs, or all strata in one."""
    means = []
    for fold in np.unique(d.folds):
        part = d[d.folds == fold]
        groups = [part[part.strata == s] for s in np.unique(part.strata)] if strata else [part]
        weights = [pairs(group).sum() for group in groups]
        means.append(np.average([score(group) for group in groups], weights=weights))
    return np.mean(means)


CASES = {
    "auroc": (lambda f, d: f.auroc(d.scores), lambda d: by_fold(d, pairwise_auroc)),
    "deviance": (
        lambda f, d: f.deviance_explained(d.p, d.null),
        lambda d: by_fold(d, sklearn_deviance, strata=False),
    ),
}


@pytest.mark.parametrize("decimals", [None, 0], ids=["continuous", "ties"])
@pytest.mark.parametrize("case", CASES)
def test_scores_and_replicates_are_those_of_repeated_rows(case, decimals):
    d = data(decimals=decimals)
    score, brute = CASES[case]
    result = score(d.fold_scores(seed=3), d)
    assert result.value == pytest.approx(brute(d), abs=1e-12)
    index, sources = source_index(d.sources)
    (counts,) = resample_counts(sources, RESAMPLES, 3)
    assert result.replicates.shape == (RESAMPLES,) and result.sources == sources
    for r in (0, 1, 7, RESAMPLES - 1):
        repeated = d[np.repeat(np.arange(len(d.k)), counts[r][index].astype(int))]
        assert result.replicates[r] == pytest.approx(brute(repeated), abs=1e-12)


def test_differences_are_paired():
    d = data()
    scores = d.fold_scores()
    good, bad = scores.auroc(d.scores), scores.auroc(d.scores + np.sin(np.arange(len(d.k))))
    difference = good - bad
    assert difference.value == good.value - bad.value
    np.testing.assert_array_equal(difference.replicates, good.replicates - bad.replicates)
    interval, alone = difference.estimate(), good.estimate()
    assert alone.low < alone.value < alone.high
    assert interval.high - interval.low < alone.high - alone.low
    assert (good - good).estimate().method == "no resample differs"


def test_strata_are_not_compared():
    d = data()
    shifted = d.scores + 100 * d.strata
    plain, moved = (d.fold_scores().auroc(s) for s in (d.scores, shifted))
    assert plain.value == moved.value
    np.testing.assert_array_equal(plain.replicates, moved.replicates)
    pooled = d.fold_scores(strata=None)
    assert pooled.auroc(shifted).value != pooled.auroc(d.scores).value
    expected = by_fold(d, pairwise_auroc, strata=False)
    assert pooled.auroc(d.scores).value == pytest.approx(expected, abs=1e-12)


def test_turns_of_one_context_are_not_compared():
    assert auroc([2.0, 1.0], [1, 0], [2, 1]) == 1
    assert auroc([2.0, 1.0], [1, 2], [2, 2]) == 0
    # two pairs of turns: the first context's positive one wins, its negative one ties
    assert auroc([2.0, 2.0, 1.0], [1, 1, 0], [2, 1, 1]) == pytest.approx(2.5 / 3)
    assert np.isnan(auroc([1.0], [3], [4]))
    assert auroc([np.inf, np.inf], [1, 0], [1, 1]) == 0.5
    k, n = [0, 1, 0.25], [2, 1, 0.5]
    assert auroc([3, np.inf, -np.inf], k, n) == auroc([1, 2, 0], k, n)


def test_columns_are_scored_one_by_one():
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(30, 6))
    scores[:, 1] = scores[:, 1].round()
    scores[:, 2] = 0
    n, k = rng.integers(3, 7, size=(30, 6)), rng.integers(0, 4, size=(30, 6))
    found = auroc_columns(scores, k, n)
    assert found.shape == (6,) and found[2] == 0.5
    for j in range(6):
        d = replace(data(contexts=30), k=k[:, j], n=n[:, j], scores=scores[:, j])
        assert found[j] == pytest.approx(pairwise_auroc(d), abs=1e-12)
    ones = np.tile([0, 1], 15)  # a row that has one turn is a row with a label
    assert auroc(scores[:, 0], ones, np.ones(30)) == pytest.approx(
        roc_auc_score(ones, scores[:, 0])
    )


def test_a_context_drawn_twice_is_no_other_context():
    result = FoldScores([1, 0], [2, 1], [0, 1], [0, 0], resamples=50).auroc([2, 1])
    (counts,) = resample_counts(2, 50, 0)
    assert result.value == 1 and {0, 1, 2} <= set(counts[:, 0])
    for replicate, (first, second) in zip(result.replicates, counts, strict=True):
        assert replicate == 1 if first and second else np.isnan(replicate)


def test_pairs_within_a_source_count_as_often_as_it_is_drawn():
    """Not as the square of that: the spread is that of a quotient of sums over sources."""
    rng = np.random.default_rng(5)
    sources = np.repeat(np.arange(150), 4)
    k, n = rng.integers(1, 8, 600), np.full(600, 8)
    scores = rng.standard_normal(600) + 0.1 * k
    found = FoldScores(k, n, sources, np.zeros(600), sources, resamples=4000).auroc(scores)
    right, pairs = np.zeros(150), np.zeros(150)
    for one in range(150):
        at = sources == one
        weight = np.outer(k[at], n[at] - k[at]) * (1 - np.eye(4))
        right[one] = (weight * (scores[at][:, None] > scores[at][None, :])).sum()
        pairs[one] = weight.sum()
    value = right.sum() / pairs.sum()
    assert found.value == pytest.approx(value)
    error = np.sqrt(((right - value * pairs) ** 2).sum()) / pairs.sum()
    assert found.replicates.std() == pytest.approx(error, rel=0.1)


def test_probabilities_of_0_and_1_cost_no_infinite_deviance():
    scores = FoldScores([1, 0], [1, 1], [0, 1], [0, 0], resamples=5)
    assert scores.deviance_explained([1, 0], [0.5, 0.5]).value == pytest.approx(1, abs=1e-5)
    assert scores.deviance_explained([0, 1], [0.5, 0.5]).value == pytest.approx(
        1 - np.log(1e-6) / np.log(0.5)
    )


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_chance_in_training_adds_its_share_of_the_variance(share):
    d = data()
    area = d.fold_scores(resamples=500).auroc(d.scores)
    wider = area.with_training(share)
    assert wider.value == area.value
    assert wider.replicates.var() == pytest.approx(area.replicates.var() * (1 + share))
    assert wider.replicates.mean() == pytest.approx(area.replicates.mean())
    was, now = area.estimate(), wider.estimate()
    assert now.high - now.low == pytest.approx((was.high - was.low) * np.sqrt(1 + share))


def test_scores_widened_for_training_stay_within_their_bounds():
    replicates = np.array([0.2, 0.5, 0.9, 1.0, np.nan])
    score = ResampledScore(0.7, replicates, 20, 0.95, (0.0, 1.0))
    found = score.with_training(8).replicates  # three times as far from their mean of 0.65
    np.testing.assert_allclose(found, [0, 0.2, 1, 1, np.nan], atol=1e-12)
    free = replace(score, bounds=(-np.inf, np.inf)).with_training(8).replicates
    np.testing.assert_allclose(free, [-0.7, 0.2, 1.4, 1.7, np.nan], atol=1e-12)
    gain = (score - replace(score, replicates=1 - replicates)).with_training(80).replicates
    assert np.nanmin(gain) == -1 and np.nanmax(gain) == 1
