"""Scores of a probe's predictions, with intervals over sources that two probes can share.

A context has k positive turns of n, and one score for all of them, so its positive and negative
turns tie. Where functions take multiplicities, those are ``[contexts, resamples]``, how often each
context occurs in each resample, and one call scores all resamples: the order of the contexts is the
same in all.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from ia_mech.stats.auroc import check_outcomes
from ia_mech.stats.intervals import Estimate, check_level
from ia_mech.stats.resampling import as_column, bootstrap_estimate, resample_counts, source_index

STEPS = 60  # of Newton, halved ones included; eight are usual
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
        """With its interval, see ``resampling.bootstrap_estimate``."""
        if self.sources < 2:
            return Estimate(self.value, np.nan, np.nan, self.sources, "one source")
        return bootstrap_estimate(self.value, self.replicates, self.sources, self.level)

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
        factor = np.sqrt(1 + share)
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


# -- one group of contexts, all resamples ----------------------------------------------------------


def curves(
    scores: np.ndarray, positives: np.ndarray, negatives: np.ndarray, multiplicities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Turns at or above each threshold: what ROC and precision-recall curves are made of.

    Args:
        scores: ``[n]`` in descending order; those that tie make one threshold.
        positives: ``[n]`` positive turns.
        negatives: ``[n]`` negative turns.
        multiplicities: ``[n, resamples]``.

    Returns:
        Positive and negative turns, ``[thresholds + 1, resamples]`` each, from 0 to all.
    """
    ends = np.append(np.flatnonzero(scores[1:] != scores[:-1]), len(scores) - 1)
    found = []
    for turns in (positives, negatives):
        sums = np.zeros((len(scores) + 1, multiplicities.shape[1]))
        np.multiply(turns[:, None], multiplicities, out=sums[1:])
        np.cumsum(sums[1:], axis=0, out=sums[1:])
        found.append(sums if len(ends) == len(scores) else sums[np.append(0, ends + 1)])
    return found[0], found[1]


def concordance(hits: np.ndarray, misses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of a positive and a negative turn in the right order, ties one half, and all pairs.

    The area under the ROC curve by the trapezoid rule, before it is divided. ``hits`` and
    ``misses`` are the ``[thresholds + 1, resamples]`` positive and negative turns of
    :func:`curves`, here and below.
    """
    area = np.einsum("ir,ir->r", np.diff(misses, axis=0), hits[1:] + hits[:-1]) / 2
    return area, hits[-1] * misses[-1]


def precision_sum(hits: np.ndarray, misses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum over positive turns of the precision at their threshold, and how many there are.

    The quotient is the average precision as scikit-learn defines it: not interpolated, ties are one
    threshold. It is 1 if no turn is negative.
    """
    turns = hits[1:] + misses[1:]
    precision = np.divide(hits[1:], turns, out=np.zeros_like(turns), where=turns > 0)
    return np.einsum("ir,ir->r", np.diff(hits, axis=0), precision), hits[-1]


def recalled(
    hits: np.ndarray, misses: np.ndarray, false_positive_rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """Positive turns found at a rate of false positives, and all of them.

    The ROC curve is interpolated linearly, so that a tie is one segment; where it rises vertically
    at that rate, the upper end counts. Both are 0 if no turn is negative.
    """
    target = false_positive_rate * misses[-1]
    # 0.29 * 100 is less than 29: rounding must not choose the lower end of a vertical segment
    last = (misses <= target * (1 + 1e-12)).sum(axis=0) - 1
    following = np.minimum(last + 1, len(misses) - 1)
    each = np.arange(len(last))
    width = misses[following, each] - misses[last, each]
    excess = np.maximum(target - misses[last, each], 0.0)
    share = np.divide(excess, width, out=np.zeros_like(width), where=width > 0)
    found = hits[last, each] + share * (hits[following, each] - hits[last, each])
    return np.where(misses[-1] > 0, found, 0.0), np.where(misses[-1] > 0, hits[-1], 0.0)


def centred_ranks(values: np.ndarray, multiplicities: np.ndarray) -> np.ndarray:
    """``[n, resamples]`` mid-ranks of ``[n]`` values among rows repeated so many times, centred."""
    _, group = np.unique(values, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    sizes = np.add.reduceat(multiplicities[order], starts, axis=0)
    upto = np.cumsum(sizes, axis=0)
    return (upto - sizes / 2 - upto[-1] / 2)[group]


def rank_correlation(
    first: np.ndarray, second: np.ndarray, multiplicities: np.ndarray
) -> np.ndarray:
    """``[resamples]`` Spearman's (1904) correlation of ``[n]`` values; NaN if one is constant."""
    x, y = centred_ranks(first, multiplicities), centred_ranks(second, multiplicities)
    weighted = x * multiplicities
    spread = np.einsum("ir,ir->r", weighted, x)
    spread *= np.einsum("ir,ir,ir->r", y, y, multiplicities)
    products = np.einsum("ir,ir->r", weighted, y)
    root = np.sqrt(spread)
    return np.divide(products, root, out=np.full(len(root), np.nan), where=root > 0)


def logistic_slope(
    predictor: np.ndarray, positives: np.ndarray, trials: np.ndarray, multiplicities: np.ndarray
) -> np.ndarray:
    """Slope of the logistic regression of turns on one predictor and an intercept.

    Newton's method, its steps halved until the likelihood rises, for all resamples at once.

    Args:
        predictor: ``[n]`` finite values.
        positives: ``[n]`` positive turns.
        trials: ``[n]`` all turns.
        multiplicities: ``[n, resamples]``, not all 0 in a resample.

    Returns:
        ``[resamples]``; NaN where there is none, as the predictor is constant or it separates the
        positive from the negative turns.
    """
    x = predictor - predictor.mean()  # keeps the intercept from mattering to the slope's rounding
    k, n = positives, trials
    resamples = multiplicities.shape[1]
    slopes = np.full(resamples, np.nan)
    rate = k @ multiplicities / (n @ multiplicities)
    active = np.flatnonzero((rate > 0) & (rate < 1))
    place = np.zeros((2, len(active)))
    place[0] = np.log(rate[active] / (1 - rate[active]))
    step, best = np.zeros_like(place), np.full(len(active), -np.inf)
    for _ in range(STEPS):
        if not len(active):
            break
        counts = multiplicities[:, active]
        linear = (place[0] + step[0]) + x[:, None] * (place[1] + step[1])
        fit = expit(linear)
        likelihood = k * linear.T - n * np.logaddexp(0, linear).T
        likelihood = np.einsum("ri,ir->r", likelihood, counts)
        rises = likelihood >= best - 1e-12 * np.abs(best)
        small = (np.abs(step) <= 1e-9 * (1 + np.abs(place))).all(axis=0) & np.isfinite(best)
        place = np.where(rises, place + step, place)
        best = np.where(rises, likelihood, best)
        newton, solvable = newton_step(x, k, n, fit, counts)
        step = np.where(rises, newton, step / 2)
        slopes[active[small]] = place[1, small]
        going = ~small & (solvable | ~rises)
        active, place, step, best = active[going], place[:, going], step[:, going], best[going]
    return slopes


def newton_step(
    x: np.ndarray, k: np.ndarray, n: np.ndarray, fit: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``[2, resamples]`` step of intercept and slope, and ``[resamples]`` whether there is one."""
    residual = (k[:, None] - n[:, None] * fit) * counts
    weight = n[:, None] * fit * (1 - fit) * counts
    gradient, across = residual.sum(axis=0), x @ residual
    flat, mixed, steep = weight.sum(axis=0), x @ weight, x**2 @ weight
    determinant = flat * steep - mixed**2
    solvable = determinant > 1e-12 * flat * steep
    scale = np.where(solvable, determinant, np.inf)
    step = np.stack([steep * gradient - mixed * across, flat * across - mixed * gradient])
    return step / scale, solvable
