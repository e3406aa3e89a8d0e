"""Scores of a probe's predictions, with intervals over sources that two probes can share.

Does one thing go with another: two groups of sources, and two rankings of a few things.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import kendalltau, permutation_test

from ia_mech.stats.clusters import cluster_mean
from ia_mech.stats.curves import (
    check_outcomes,
    concordance,
    curves,
    logistic_slope,
    precision_sum,
    rank_correlation,
    recalled,
)
from ia_mech.stats.intervals import Estimate, check_level
from ia_mech.stats.multiple import permutation_max
from ia_mech.stats.resampling import as_column, bootstrap_estimate, resample_counts, source_index


@dataclass(frozen=True)
class Grouped:
    """A difference between two groups of sources.

    Attributes:
        first: the rate of the rows with label 1.
        second: that of the rows with label 0.
        difference: first minus second, with its interval.
        p: two-sided p value of no association; NaN where a group is empty.
        test: how p was found; empty without one.
    """

    first: Estimate
    second: Estimate
    difference: Estimate
    p: float
    test: str


def group_difference(
    values: ArrayLike,
    labels: ArrayLike,
    sources: Iterable[Hashable],
    *,
    level: float = 0.95,
    permutations: int = 2000,
    seed: int = 0,
) -> Grouped:
    """Rate of the rows with label 1 minus rate of those with label 0.

    The interval is MOVER's without correlation, the distances of both rates' own intervals over
    sources put together (Newcombe 1998, Statist. Med. 17:873, method 10; Zou & Donner 2008,
    Statist. Med. 27:1693). It says something where a group has no event, and no bootstrap does. A
    source with rows in both groups counts in both as if it were two, which is on the safe side if
    its rows are alike.

    The p value is of the difference's size when labels change places between sources (Fisher 1935,
    section 21; :func:`ia_mech.stats.permutation_max`). It and the interval are made separately and
    may disagree at the margin.

    Args:
        values: ``[n]`` events (0 or 1) or shares of them; NaN is left out.
        labels: ``[n]`` 1 or 0.
        sources: ``[n]`` the source of each row.
        level: coverage.
        permutations: of labels.
        seed: of the permutations.

    Raises:
        ValueError: lengths differ, or a value lies outside [0, 1].
    """
    values, labels = np.asarray(values, dtype=float), np.asarray(labels)
    sources = np.array([*sources, None], dtype=object)[:-1]  # tuples stay what they are
    kept = ~np.isnan(values)
    values, labels, sources = values[kept], labels[kept], sources[kept]
    options = {"proportion": True, "level": level, "seed": seed}
    first, second = (
        cluster_mean(values[labels == label], sources[labels == label], **options)
        for label in (1, 0)
    )
    count = len(set(sources))
    if not (first.sources and second.sources):
        nothing = Estimate(np.nan, np.nan, np.nan, count, "one group is empty")
        return Grouped(first, second, nothing, np.nan, "")
    difference = first.value - second.value
    down = np.hypot(first.value - first.low, second.high - second.value)
    up = np.hypot(first.high - first.value, second.value - second.low)
    low, high = max(difference - down, -1.0), min(difference + up, 1.0)

    def size(permuted: np.ndarray) -> float:
        one = permuted == 1
        return abs(values[one].mean() - values[~one].mean())

    test = permutation_max(size, labels, sources, permutations=permutations, seed=seed)
    estimate = Estimate(difference, low, high, count, "mover")
    return Grouped(first, second, estimate, float(test.p_raw[0]), "permutation of sources")


def kendall(x: ArrayLike, y: ArrayLike) -> float:
    """Kendall's (1945, Biometrika 33:239) rank correlation τ-b; NaN where either is constant.

    Args:
        x: ``[n]`` numbers.
        y: ``[n]`` numbers.
    """
    return float(kendalltau(x, y).statistic)


def kendall_p(x: ArrayLike, y: ArrayLike, *, permutations: int = 10_000, seed: int = 0) -> float:
    """Two-sided p value of no rank correlation, by permuting one of both.

    Exact over all ``n!`` orders if there are no more of them than ``permutations``, else over so
    many random ones; NaN where either is constant. (SciPy's own p is exact only without ties.)
    """
    if np.isnan(kendall(x, y)):
        return np.nan
    found = permutation_test(
        (np.asarray(x, dtype=float),),
        lambda permuted: abs(kendall(permuted, y)),
        permutation_type="pairings",
        n_resamples=permutations,
        alternative="greater",
        rng=seed,
    )
    return float(found.pvalue)


CHUNK = 1 << 15  # numbers per chunk: 256 kB, which a core keeps at hand
NARROW = 1e-6  # probabilities nearer than this to 0 or 1 would make one turn decide everything

UNBOUNDED = (-np.inf, np.inf)

Group = tuple[int, np.ndarray]  # number of a fold, and rows in it that are compared
Part = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Replicated:
    """A score on the data and on every resample of sources.

    Attributes:
        value: on the data.
        replicates: ``[resamples]`` on the resamples; may hold NaN.
        sources: how many there are.
        level: coverage of the interval.
        bounds: what the score can't be below and above.
    """

    value: float
    replicates: np.ndarray
    sources: int
    level: float
    bounds: tuple[float, float] = UNBOUNDED

    def estimate(self) -> Estimate:
        """With its percentile interval, widened for the number of sources (``resampling``)."""
        if self.sources < 2:
            return Estimate(self.value, np.nan, np.nan, self.sources, "one source")
        no_jackknife = np.empty(0)
        return bootstrap_estimate(
            self.value, self.replicates, no_jackknife, self.sources, self.level, "auto"
        )

    def __sub__(self, other: "Replicated") -> "Replicated":
        """The paired difference: both must come from the same resamples, as of one FoldScores.

        Raises:
            ValueError: they can't: numbers of resamples or of sources, or levels, differ.
        """
        self._check(other)
        difference = self.replicates - other.replicates
        (low, high), (other_low, other_high) = self.bounds, other.bounds
        bounds = (low - other_high, high - other_low)
        return Replicated(self.value - other.value, difference, self.sources, self.level, bounds)

    def with_training(self, share: float) -> "Replicated":
        """Replicates spread as if chance in training had its part in them too.

        In cross-validation two sources meet twice, each tested by a probe that the other helped to
        train, and chance makes the two agree. Resampling the tested sources takes them for
        independent. Where scores are nothing but chance in training, that misses half the variance
        (then an interval would hold 0.5 in some 82% of cases, not 95%), and where they aren't,
        accordingly less: the variance is multiplied by ``1 + share``. No estimate of it from the
        folds alone can be unbiased (Bengio & Grandvalet 2004, JMLR 5:1089).

        Args:
            share: of the variance of scores over contexts that is chance in training, 0 to 1.
        """
        return self.stretched(np.sqrt(1 + share))

    def stretched(self, factor: float) -> "Replicated":
        """Replicates that many times as far from their mean, within the bounds of the score."""
        centre = np.nanmean(self.replicates) if not np.isnan(self.replicates).all() else np.nan
        stretched = centre + (self.replicates - centre) * factor
        return replace(self, replicates=np.clip(stretched, *self.bounds))

    @classmethod
    def mean(cls, several: Sequence["Replicated"]) -> "Replicated":
        """Plain mean of scores from the same resamples, of those that a resample leaves defined.

        Raises:
            ValueError: there are none, or they can't come from the same resamples.
        """
        if not several:
            raise ValueError("a mean needs at least one score")
        first = several[0]
        for other in several:
            first._check(other)
        stacked = np.array([one.replicates for one in several])
        defined = ~np.isnan(stacked)
        replicates = np.full(stacked.shape[1], np.nan)
        np.divide(
            np.where(defined, stacked, 0).sum(axis=0),
            defined.sum(axis=0),
            out=replicates,
            where=defined.any(axis=0),
        )
        value = float(np.mean([one.value for one in several]))
        return cls(value, replicates, first.sources, first.level, first.bounds)

    def _check(self, other: "Replicated") -> None:
        if (self.sources, self.level, len(self.replicates)) != (
            (other.sources, other.level, len(other.replicates))
        ):
            raise ValueError("scores don't come from the same resamples")


def quotient(top: np.ndarray, bottom: np.ndarray) -> Part:
    """Of two ``[contexts]`` columns, the sums to divide and to divide by."""
    return lambda rows, counts: (top[rows] @ counts, bottom[rows] @ counts)


class FoldScores:
    """Scores of predictions that were made out of fold, averaged over folds.

    What is estimated is the mean over folds of the score, on new sources, of the probe that was
    trained without that fold (Bayle, Bayle, Janson & Mackey 2020, "Cross-validation confidence
    intervals for test error", NeurIPS). The interval is conditional on the trained probes: it says
    how far the sources tested may mislead, not how probes trained on other sources would fare.

    Whole sources are drawn with replacement from all sources, once per object: all scores share the
    resamples, so that the difference of two is paired. Two objects share them too if they have the
    same sources, seed and number of resamples, though their contexts differ.

    A score that ranks contexts compares those of one fold only, as the probes of two folds need not
    share a scale, and those of one stratum only. Sums over the strata of a fold are divided, then
    the mean is taken over folds; folds without a value, on the data or in a resample, are left out,
    and the score is NaN if all are.

    Args:
        positives: ``[contexts]`` turns that have what is predicted (k); may be fractional.
        trials: ``[contexts]`` turns assessed (n); above 0, at least ``positives``.
        sources: ``[contexts]`` source of each, any hashable labels.
        folds: ``[contexts]`` the fold in which each was tested, any hashable labels.
        strata: ``[contexts]`` contexts of different strata (runs, say) are not compared; any
            hashable labels. One stratum if not given.
        level: coverage of intervals.
        resamples: bootstrap samples.
        seed: of the resampling.

    Raises:
        ValueError: lengths differ, there are no contexts, a label is missing, there are not
            0 ≤ k ≤ n, n > 0, or an option is out of range.
    """

    def __init__(
        self,
        positives: ArrayLike,
        trials: ArrayLike,
        sources: Iterable[Hashable],
        folds: Iterable[Hashable],
        strata: Iterable[Hashable] | None = None,
        *,
        level: float = 0.95,
        resamples: int = 2000,
        seed: int = 0,
    ) -> None:
        check_level(level)
        index, count = source_index(sources)
        if not count:
            raise ValueError("there are no contexts")
        positives = as_column(positives, len(index), "positives")
        trials = as_column(trials, len(index), "trials")
        check_outcomes(positives, trials)
        fold, _ = source_index(folds)
        stratum = np.zeros(len(index), dtype=int) if strata is None else source_index(strata)[0]
        if not index.shape == fold.shape == stratum.shape:
            raise ValueError("sources, folds and strata must have one entry per context")
        self._positives, self._trials, self._negatives = positives, trials, trials - positives
        self._source, self._level = index, level
        _, group = np.unique(np.stack([fold, stratum]), axis=1, return_inverse=True)
        rows = (np.flatnonzero(group == g) for g in range(group.max() + 1))
        self._groups: list[Group] = [(int(fold[r[0]]), r) for r in rows]
        # Column 0 is the data. A byte does: no source is drawn 256 times, the odds are under 1e-500
        self._draws = np.ones((count, 1 + resamples), dtype=np.uint8)
        start = 1
        for counts in resample_counts(count, resamples, seed):
            self._draws[:, start : start + len(counts)] = counts.T
            start += len(counts)

    def auroc(self, scores: ArrayLike) -> Replicated:
        """How often a positive turn scores higher than a negative one of another context.

        See :func:`ia_mech.stats.auroc`. A context that was drawn twice is no other context. Every
        pair of a fold counts alike, whatever its stratum.

        Args:
            scores: ``[contexts]`` numbers; may be infinite.

        Raises:
            ValueError: not one score per context, or one is NaN.
        """
        column = self._column(scores)
        within = self._positives * self._negatives

        def part(rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            k, rest = self._positives[rows], self._negatives[rows]
            area, pairs = concordance(*curves(column[rows], k, rest, counts))
            own = within[rows] @ counts**2
            pairs = np.maximum(pairs - own, 0.0)
            return np.where(pairs > 0, area - own / 2, 0.0), pairs

        return self._folded(self._descending(column), part, (0.0, 1.0))

    def average_precision(self, scores: ArrayLike) -> Replicated:
        """Average precision as in scikit-learn; strata count by their positive turns.

        Args and errors are those of :meth:`auroc`.
        """
        return self._ranked(scores, precision_sum)

    def prevalence(self) -> Replicated:
        """Share of positives, averaged as is average precision: about what chance would reach."""

        def part(rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            positives, turns = self._positives[rows] @ counts, self._trials[rows] @ counts
            share = np.divide(positives, turns, out=np.zeros_like(turns), where=turns > 0)
            return positives * share, positives

        return self._folded(self._groups, part)

    def recall_at(self, scores: ArrayLike, false_positive_rate: float = 0.05) -> Replicated:
        """Share of positive turns found when that share of negative turns is taken for positive.

        Read off the ROC curve, interpolated linearly; strata count by their positive turns, and
        each has its own threshold.

        Args:
            scores: ``[contexts]`` numbers; may be infinite.
            false_positive_rate: from 0 to 1.

        Raises:
            ValueError: not one score per context, one is NaN, or the rate is out of range.
        """
        if not 0 <= false_positive_rate <= 1:
            raise ValueError(f"a rate must lie between 0 and 1, not {false_positive_rate!r}")
        return self._ranked(scores, lambda tp, fp: recalled(tp, fp, false_positive_rate))

    def brier(self, probabilities: ArrayLike) -> Replicated:
        """Mean squared difference of probability and outcome, over turns (Brier 1950).

        Args:
            probabilities: ``[contexts]`` numbers between 0 and 1.

        Raises:
            ValueError: not one per context, or one lies outside [0, 1].
        """
        p = self._probabilities(probabilities)
        squares = self._positives * (1 - p) ** 2 + self._negatives * p**2
        return self._folded(self._groups, quotient(squares, self._trials))

    def deviance_explained(
        self, probabilities: ArrayLike, null_probabilities: ArrayLike
    ) -> Replicated:
        """Share of the deviance of turns that probabilities save, as against simpler ones.

        1 - D / D0, below 0 where they predict worse. Both are kept 1e-6 off 0 and 1.

        Args:
            probabilities: ``[contexts]`` numbers between 0 and 1.
            null_probabilities: ``[contexts]`` those of the null model, likewise out of fold.

        Raises:
            ValueError: not one per context, or one lies outside [0, 1].
        """
        null = self._deviance(null_probabilities)
        saved = null - self._deviance(probabilities)
        return self._folded(self._groups, quotient(saved, null))

    def spearman(self, scores: ArrayLike) -> Replicated:
        """Rank correlation of score and rate k / n; strata count by their contexts.

        Every context counts alike, however many turns it has. Strata in which either is constant
        have no value and are left out.

        Args and errors are those of :meth:`auroc`.
        """
        column, rate = self._column(scores), self._positives / self._trials

        def part(rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            correlation = rank_correlation(column[rows], rate[rows], counts)
            contexts = np.where(np.isnan(correlation), 0.0, counts.sum(axis=0))
            return contexts * np.nan_to_num(correlation), contexts

        return self._folded(self._groups, part, (-1.0, 1.0))

    def calibration(self, probabilities: ArrayLike) -> tuple[Replicated, Replicated]:
        """Calibration in the large, and its slope (Cox 1958, Biometrika 45:562).

        In the large: mean probability less rate, over turns. The slope is that of the logistic
        regression of turns on the logit of the probability (kept 1e-6 off 0 and 1): below 1,
        probabilities are too extreme, as when overfitted. Both pool folds and strata, as a fold may
        be too small for a slope; there is none where probabilities are all the same or separate
        the outcomes.

        Args:
            probabilities: ``[contexts]`` numbers between 0 and 1.

        Raises:
            ValueError: not one per context, or one lies outside [0, 1].
        """
        p = self._probabilities(probabilities)
        clipped = np.clip(p, NARROW, 1 - NARROW)
        logit = np.log(clipped / (1 - clipped))

        def part(rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            slope = logistic_slope(logit, self._positives, self._trials, counts)
            return np.nan_to_num(slope), np.isfinite(slope).astype(float)

        everything = [(0, np.arange(len(p)))]
        excess = quotient(self._trials * p - self._positives, self._trials)
        return self._folded(everything, excess), self._folded(everything, part)

    def _column(self, scores: ArrayLike) -> np.ndarray:
        column = as_column(scores, len(self._trials), "scores")
        if np.isnan(column).any():
            raise ValueError("a score is NaN")
        return column

    def _probabilities(self, probabilities: ArrayLike) -> np.ndarray:
        column = as_column(probabilities, len(self._trials), "probabilities")
        if not ((column >= 0) & (column <= 1)).all():
            raise ValueError("probabilities must lie between 0 and 1")
        return column

    def _deviance(self, probabilities: ArrayLike) -> np.ndarray:
        p = np.clip(self._probabilities(probabilities), NARROW, 1 - NARROW)
        return -2 * (self._positives * np.log(p) + self._negatives * np.log1p(-p))

    def _ranked(self, scores: ArrayLike, measure: Part) -> Replicated:
        """A score made of :func:`curves`, whose sums the measure gives."""
        column = self._column(scores)

        def part(rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            k, rest = self._positives[rows], self._negatives[rows]
            return measure(*curves(column[rows], k, rest, counts))

        return self._folded(self._descending(column), part, (0.0, 1.0))

    def _descending(self, column: np.ndarray) -> list[Group]:
        """Groups whose rows are in the order that :func:`curves` wants."""
        return [(f, rows[np.argsort(-column[rows], kind="stable")]) for f, rows in self._groups]

    def _chunks(self, rows: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Columns of draws, and how often each row occurs in them: ``[rows, columns]``."""
        width = max(1, CHUNK // len(rows))
        for start in range(0, self._draws.shape[1], width):
            columns = slice(start, start + width)
            yield columns, self._draws[:, columns][self._source[rows]].astype(float)

    def _folded(
        self, groups: list[Group], part: Part, bounds: tuple[float, float] = UNBOUNDED
    ) -> Replicated:
        """Mean over folds of a quotient of sums over the groups of a fold.

        Args:
            groups: fold and rows of each.
            part: of ``[rows]`` and their ``[rows, columns]`` multiplicities makes the ``[columns]``
                sums to divide, and to divide by; both 0 where the group has nothing to say.
            bounds: of the score.
        """
        folds = 1 + max(fold for fold, _ in groups)
        sums = np.zeros((2, folds, self._draws.shape[1]))
        for fold, rows in groups:
            for columns, counts in self._chunks(rows):
                sums[:, fold, columns] += part(rows, counts)
        top, bottom = sums
        defined = bottom > 0
        quotients = np.divide(top, bottom, out=np.zeros_like(top), where=defined)
        number = defined.sum(axis=0)
        means = np.full(len(number), np.nan)
        np.divide(quotients.sum(axis=0), number, out=means, where=number > 0)
        sources = len(self._draws)
        return Replicated(float(means[0]), means[1:], sources, self._level, bounds)
