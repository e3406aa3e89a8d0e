"""Rates corrected for the judge's errors: a slow reference, bias and coverage."""

import numpy as np
import pytest

from ia_mech.judge.sheets import allocate
from ia_mech.stats import cluster_mean, corrected_labels, corrected_mean, prediction_powered


def judged_run(rng, rate, sensitivity=0.8, specificity=0.95, sources=80, rows=8, annotated=200):
    """Verdicts of a judge, annotations stratified by verdict (else NaN), sources, inclusion.

    Rates and both kinds of error differ between sources; half of the annotations go to rows judged
    1 and half to rows judged 0, as far as there are any.
    """
    index = np.repeat(np.arange(sources), rows)

    def per_source(mean, concentration):
        return rng.beta(mean * concentration, (1 - mean) * concentration, sources)[index]

    truth = rng.random(len(index)) < per_source(rate, 2.5)
    said_yes = rng.random(len(index)) < per_source(sensitivity, 10)
    said_no = rng.random(len(index)) < per_source(specificity, 20)
    verdict = np.where(truth, said_yes, ~said_no).astype(float)
    known, inclusion = np.full(len(index), np.nan), np.full(len(index), np.nan)
    for value in (0, 1):
        rows_of = np.flatnonzero(verdict == value)
        at = rng.choice(rows_of, min(annotated // 2, len(rows_of)), replace=False)
        known[at], inclusion[at] = truth[at], len(at) / len(rows_of)
    return verdict, known, index, inclusion


def powered_slowly(verdict, index, truth, judged, where, weights):
    """Estimate and linearised variance, source by source, each λ without the source's own rows."""
    sources = sorted({*index, *where})
    mean, accepted = np.average(truth, weights=weights), np.average(judged, weights=weights)
    everywhere = verdict.mean()
    first, second = {}, {}
    for s in sources:
        w, rows = weights * (where == s) / weights.sum(), (index == s) / len(index)
        first[s] = (w * (truth - mean)).sum()
        second[s] = (w * (judged - accepted)).sum() - (rows * (verdict - everywhere)).sum()
    tuned = {}
    for s in sources:
        rest = [other for other in sources if other != s]
        ratio = sum(first[o] * second[o] for o in rest) / sum(second[o] ** 2 for o in rest)
        tuned[s] = min(max(ratio, 0), 1)
    of_notes = truth - np.array([tuned[s] for s in where]) * judged
    of_rows = np.array([tuned[s] for s in index]) * verdict
    left, added = np.average(of_notes, weights=weights), of_rows.mean()
    squares = 0.0
    for s in sources:
        w, rows = weights * (where == s) / weights.sum(), (index == s) / len(index)
        squares += ((w * (of_notes - left)).sum() + (rows * (of_rows - added)).sum()) ** 2
    return left + added, len(sources) / (len(sources) - 1) * squares


def test_prediction_powered_equals_a_slow_reference():
    rng = np.random.default_rng(2)
    verdict, known, index, inclusion = judged_run(rng, 0.3, sources=20, annotated=60)
    fast = prediction_powered(verdict, known, index, inclusion=inclusion)
    at = ~np.isnan(known)
    notes = known[at], verdict[at], index[at], 1 / inclusion[at]
    value, variance = powered_slowly(verdict, index, *notes)
    assert fast.value == pytest.approx(value, rel=1e-12)
    # Wilson's interval of the effective number of rows: its ends solve a quadratic equation.
    by_ends = fast.low * fast.high, fast.low + fast.high
    sizes = [value**2 / by_ends[0] - 1, (2 * value - by_ends[1]) / (by_ends[1] - 1)]  # z² / n
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-9)
    z2 = 1.959963984540054**2
    assert 0.5 < (z2 / sizes[0]) / (value * (1 - value) / variance) < 1  # less for the variance's


@pytest.mark.parametrize(("sensitivity", "specificity"), [(0.5, 0.5), (0.98, 0.99)])
def test_prediction_powered_is_as_good_as_the_judge(sensitivity, specificity):
    """With a useless judge the rate of the annotations, else an interval well within theirs."""
    rng, widths = np.random.default_rng(5), []
    for _ in range(20):
        verdict, known, index, inclusion = judged_run(
            rng, 0.4, sensitivity, specificity, annotated=80
        )
        powered = prediction_powered(verdict, known, index, inclusion=inclusion)
        at = ~np.isnan(known)
        alone = cluster_mean(known[at], index[at], weights=1 / inclusion[at], proportion=True)
        widths.append((powered.high - powered.low) / (alone.high - alone.low))
    assert (
        np.mean(widths) == pytest.approx(1, abs=0.03)
        if sensitivity == 0.5
        else (np.mean(widths) < 0.85)
    )


@pytest.mark.parametrize("rate", [0.02, 0.2, 0.5])
def test_corrected_rates_are_unbiased_and_covered(rate):
    """Sensitivity 0.8, specificity 0.95, both varying between sources; 200 annotations."""
    rng, found, raw = np.random.default_rng(4), [], []
    for _ in range(250):
        verdict, known, index, inclusion = judged_run(rng, rate)
        e = prediction_powered(verdict, known, index, inclusion=inclusion)
        found.append((e.value, e.low <= rate <= e.high))
        raw.append(verdict.mean())
    values, covered = np.array(found).T
    error = values.std() / np.sqrt(len(values))
    assert abs(values.mean() - rate) < 3 * error + 0.003
    assert covered.mean() > 0.91
    if rate != 0.2:  # where misses and false alarms happen to cancel
        assert abs(np.mean(raw) - rate) > 0.03


def test_errors_that_were_never_seen_are_not_taken_for_impossible():
    """60 annotations, all of them right: the judge may still err, and the interval says so."""
    verdict, rows = np.tile([0.0, 1.0], 200), np.repeat(np.arange(100), 4)
    annotated = (rows < 30) & (np.arange(400) % 4 < 2)
    known, inclusion = np.where(annotated, verdict, np.nan), np.full(400, 0.15)
    found = prediction_powered(verdict, known, rows, inclusion=inclusion)
    assert found.value == 0.5
    assert found.low < 0.49 and found.high > 0.51
    known = np.where(annotated, 0.0, np.nan)
    none = prediction_powered(np.zeros(400), known, rows, inclusion=inclusion)
    assert none.value == 0 and none.low == 0
    assert 1 / 30 < none.high < 0.2  # about the rule of three on 30 annotated sources


def test_one_annotated_source_gives_no_interval():
    truth = np.full(40, np.nan)
    truth[:4] = [1, 0, 1, 0]
    verdict, sources = np.tile([1, 0], 20), np.arange(40) // 4
    found = prediction_powered(verdict, truth, sources, inclusion=np.ones(40))
    assert found.value == 0.5 and np.isnan([found.low, found.high]).all()
    assert found.method == "one annotated query"


def test_where_there_is_no_corrected_rate():
    one, nan = np.ones(2), np.full(2, np.nan)
    nothing = prediction_powered([1, 0], nan, "ab", inclusion=one)
    assert np.isnan(nothing.value) and "no annotations" in nothing.method
    assert "no rows" in prediction_powered(nan, one, "ab", inclusion=one).method
    for truth, inclusion, message in (
        ([1, 0.5], one, "truth must be 0, 1 or NaN"),
        ([1, 0], [0.0, 1.0], "inclusion probabilities must lie in"),
    ):
        with pytest.raises(ValueError, match=message):
            prediction_powered([1, 0], truth, "ab", inclusion=inclusion)


# -- masses ----------------------------------------------------------------------------------------


def first_tokens(rng, rate, queries=100, tokens=12):
    """Sources, probabilities that sum to 0.9 a source, verdicts of a judge that calls three in ten
    of what is none a follow-up, and the truth, whose mean mass is 0.9 of the rate."""
    source = np.repeat(np.arange(queries), tokens)
    p = 0.9 * rng.dirichlet(np.full(tokens, 0.5), queries).ravel()
    truth = rng.random(len(p)) < rng.beta(2 * rate, 2 * (1 - rate), queries)[source]
    verdict = rng.random(len(p)) < np.where(truth, 0.9, 0.3)
    return source, p, verdict.astype(float), truth.astype(float)


def annotated(rng, p, truth, labels):
    """Annotations of a sample that is stratified by probability, and inclusion probabilities."""
    band = np.digitize(p, [1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2]).astype(str)
    sizes = {str(name): int((band == name).sum()) for name in np.unique(band)}
    known, inclusion = np.full(len(p), np.nan), np.full(len(p), np.nan)
    for name, n in allocate(sizes, labels, {one: p[band == one].sum() for one in sizes}).items():
        at = rng.choice(np.flatnonzero(band == name), n, replace=False)
        known[at], inclusion[at] = truth[at], n / sizes[name]
    return known, inclusion


def test_corrected_labels_equal_a_slow_reference():
    rng = np.random.default_rng(0)
    source, p, verdict, truth = first_tokens(rng, 0.4, 12, 5)
    kind = np.where(rng.random(len(p)) < 0.3, "other", verdict.astype(str))
    known, inclusion = annotated(rng, p, truth, 30)
    kind[7], known[7] = "alone", 1.0  # nothing says what to expect of its kind, but the judge
    inclusion[7] = 0.5
    found = corrected_labels(verdict, kind, known, source, inclusion=inclusion, worth=p)
    for row in range(len(p)):
        others = (kind == kind[row]) & (source != source[row]) & ~np.isnan(known)
        expected = verdict[row]
        if others.any():
            expected = np.average(known[others], weights=(p / inclusion)[others])
        if not np.isnan(known[row]):
            expected += (known[row] - expected) / inclusion[row]
        assert found[row] == pytest.approx(expected, abs=1e-12)
    whole = corrected_labels(verdict, kind, truth, source, inclusion=np.ones(len(p)), worth=p)
    np.testing.assert_allclose(whole, truth, atol=1e-12)


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_corrected_masses_are_unbiased_and_covered_and_the_judge_s_are_not(rate):
    rng, found, truth = np.random.default_rng(1), [], 0.9 * rate
    for _ in range(200):
        source, p, verdict, true = first_tokens(rng, rate)
        known, inclusion = annotated(rng, p, true, 150)
        labels = corrected_labels(verdict, verdict, known, source, inclusion=inclusion, worth=p)
        by_judge, mass = (np.bincount(source, p * of) for of in (verdict, labels))
        noted = np.bincount(source, ~np.isnan(known)) > 0
        own = corrected_mean(mass, noted, range(100))
        judged = cluster_mean(by_judge, range(100), proportion=True)
        found.append([mass.mean() - truth, *(e.low <= truth <= e.high for e in (own, judged))])
        found[-1].append(own.high - own.low)
    away, covered, of_judge, width = np.mean(found, axis=0)
    assert abs(away) < 3 * np.std(found, axis=0)[0] / np.sqrt(200)
    assert covered > 0.92 and of_judge < 0.15
    assert width < 0.2


def test_differences_of_corrected_masses_are_covered():
    """The first token's mass minus the likeliest token: one set of labels, paired by query."""
    rng, covered = np.random.default_rng(2), []
    for _ in range(200):
        source, p, verdict, true = first_tokens(rng, 0.3)
        true = np.where(p > 0.3, true * (rng.random(len(p)) < 0.6), true)  # likely ones less often
        known, inclusion = annotated(rng, p, true, 150)
        labels = corrected_labels(verdict, verdict, known, source, inclusion=inclusion, worth=p)
        likeliest = p.reshape(100, -1).argmax(1) + np.arange(0, len(p), 12)
        of_rows, of_truth = (
            np.bincount(source, p * of) / 0.9 - of[likeliest] for of in (labels, true)
        )
        e = cluster_mean(of_rows, range(100))
        covered.append((e.low, e.high, of_truth.mean()))
    low, high, truths = np.array(covered).T
    assert np.mean((low <= truths.mean()) & (truths.mean() <= high)) > 0.92


def test_there_is_no_corrected_mean_without_annotated_queries():
    assert np.isnan(corrected_mean([0.2, 0.4], [True, False], "ab").value)
    none = corrected_mean(np.zeros(40), np.arange(40) < 20, range(40))
    assert none.value == none.low == 0 and 0.1 < none.high < 0.2  # by 20 queries, not 40
