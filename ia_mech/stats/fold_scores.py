"""Scores of a probe's predictions, with intervals over sources that two probes can share.

A context has k positive turns of n, and one score for all of them, so its positive and negative
turns tie.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.auroc import concordance
from ia_mech.stats.intervals import Estimate
from ia_mech.stats.resampling import as_column, bootstrap_estimate, resample_counts, source_index

CHUNK = 1 << 15  # numbers per chunk: 256 kB, which fit into a core's cache
NARROW = 1e-6  # probabilities nearer than this to 0 or 1 would make one turn decide everything
UNBOUNDED = (-np.inf, np.inf)

FoldRows = tuple[int, np.ndarray]  # number of a fold, and rows in it that are compared
# Takes [rows] and how often each is in each resample, [rows, resamples]; gives the [resamples] sums
# to divide and to divide by, both 0 where the rows allow no comparison.
Part = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class ResampledScore:
    """A score on the data (``value``) and on every resample of sources."""

    value: float
    replicates: np.ndarray  # [resamples]; may hold NaN
    sources: int
    level: float
    bounds: tuple[float, float] = UNBOUNDED  # what the score can't be below and above

    def estimate(self) -> Estimate:
        """The score with its interval, see ``resampling.bootstrap_estimate``."""
        if self.sources < 2:
            return Estimate(self.value, np.nan, np.nan, self.sources, "one query")
        return bootstrap_estimate(self.value, self.replicates, self.sources, self.level)

    def __sub__(self, other: "ResampledScore") -> "ResampledScore":
        """The paired difference of two scores of the same resamples, say of one FoldScores."""
        own, others = ((one.sources, one.level, len(one.replicates)) for one in (self, other))
        if own != others:
            raise ValueError("scores don't come from the same resamples")
        return replace(
            self,
            value=self.value - other.value,
            replicates=self.replicates - other.replicates,
            bounds=(self.bounds[0] - other.bounds[1], self.bounds[1] - other.bounds[0]),
        )

    def with_training(self, share: float) -> "ResampledScore":
        """The score with replicates spread as far as if they also held chance in training.

        In cross-validation two sources meet twice, each tested by a probe that the other helped to
        train, so chance makes the two agree. If scores were nothing but chance in training,
        resampling the tested sources would miss half the variance. So the variance is multiplied by
        ``1 + share``, where ``share`` is how much of the variance of scores over contexts is chance
        in training. No estimate of it from the folds alone can be unbiased (Bengio & Grandvalet
        2004, JMLR 5:1089).
        """
        centre = np.nanmean(self.replicates) if not np.isnan(self.replicates).all() else np.nan
        stretched = centre + (self.replicates - centre) * np.sqrt(1 + share)
        return replace(self, replicates=np.clip(stretched, *self.bounds))


class FoldScores:
    """Scores of predictions that were made out of fold, averaged over folds.

    The estimand is the mean, over folds, of the score that the probe trained without a fold has on
    new sources (Bayle, Bayle, Janson & Mackey 2020). The interval is conditional on the trained
    probes.

    Whole sources are drawn with replacement, once per object, so that the difference of two scores
    is paired, even from two objects if they have the same sources, seed and number of resamples.

    A score that ranks contexts compares those of one fold and one stratum only, as probes of two
    folds need not share a scale. A fold's score is a quotient of sums over its strata, and the mean
    is taken over folds; folds without a value, on the data or in a resample, are left out, and the
    score is NaN if all are.

    Args:
        positives: ``[contexts]`` k of each; may be fractional.
        trials: ``[contexts]`` n; above 0, at least ``positives``.
        sources, folds: ``[contexts]`` source of each, and the fold in which it was tested.
        strata: ``[contexts]`` contexts of different strata (runs, say) are not compared.
        level, resamples, seed: of intervals.

    Raises:
        ValueError: lengths differ, there are no contexts, or a label is missing.
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
        index, count = source_index(sources)
        if not count:
            raise ValueError("there are no contexts")
        self._positives = as_column(positives, len(index), "positives")
        self._trials = as_column(trials, len(index), "trials")
        fold, _ = source_index(folds)
        stratum = np.zeros(len(index), dtype=int) if strata is None else source_index(strata)[0]
        if not index.shape == fold.shape == stratum.shape:
            raise ValueError("sources, folds and strata must have one entry per context")
        self._negatives, self._source, self._level = self._trials - self._positives, index, level
        _, group = np.unique(np.stack([fold, stratum]), axis=1, return_inverse=True)
        rows = (np.flatnonzero(group == g) for g in range(group.max() + 1))
        self._groups: list[FoldRows] = [(int(fold[r[0]]), r) for r in rows]
        # Column 0 is the data. Bytes do: no source is drawn 256 times, the odds are under 1e-500
        draws = [counts.T.astype(np.uint8) for counts in resample_counts(count, resamples, seed)]
        self._draws = np.hstack([np.ones((count, 1), dtype=np.uint8), *draws])

    def auroc(self, scores: ArrayLike) -> ResampledScore:
        """How often a positive turn scores higher than a negative one of another context, of
        ``[contexts]`` scores; see :func:`ia_mech.stats.auroc_columns`.

        A context that was drawn twice isn't compared with its copy. Every pair of a fold counts
        alike, whatever its stratum. In a stratum of one source, pairs count as often as it was
        drawn.
        """
        column = as_column(scores, len(self._trials), "scores")
        if np.isnan(column).any():
            raise ValueError("a score is NaN")
        within = self._positives * self._negatives

        def part(rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            drawn = np.ones(counts.shape[1])
            if (self._source[rows] == self._source[rows[0]]).all():
                drawn, counts = counts[0], np.ones_like(counts)
            times = np.ascontiguousarray(counts.T)
            k, rest = times * self._positives[rows], times * self._negatives[rows]
            area, pairs = concordance(column[None, rows], k, rest)
            own = within[rows] @ counts**2
            pairs = np.maximum(pairs - own, 0.0)
            return np.where(pairs > 0, area - own / 2, 0.0) * drawn, pairs * drawn

        ascending = [
            (fold, rows[np.argsort(column[rows], kind="stable")]) for fold, rows in self._groups
        ]
        return self._folded(ascending, part, (0.0, 1.0))

    def deviance_explained(
        self, probabilities: ArrayLike, null_probabilities: ArrayLike
    ) -> ResampledScore:
        """Share of the turns' deviance that ``[contexts]`` probabilities save against those of a
        simpler model: 1 - D / D0. Probabilities are kept 1e-6 away from 0 and 1."""
        null = self._deviance(null_probabilities)
        saved = null - self._deviance(probabilities)
        return self._folded(
            self._groups, lambda rows, counts: (saved[rows] @ counts, null[rows] @ counts)
        )

    def _deviance(self, probabilities: ArrayLike) -> np.ndarray:
        column = as_column(probabilities, len(self._trials), "probabilities")
        if not ((column >= 0) & (column <= 1)).all():
            raise ValueError("probabilities must lie between 0 and 1")
        p = np.clip(column, NARROW, 1 - NARROW)
        return -2 * (self._positives * np.log(p) + self._negatives * np.log1p(-p))

    def _folded(
        self, groups: list[FoldRows], part: Part, bounds: tuple[float, float] = UNBOUNDED
    ) -> ResampledScore:
        """Mean over folds of the quotient of a fold's sums over its groups."""
        folds = 1 + max(fold for fold, _ in groups)
        top, bottom = sums = np.zeros((2, folds, self._draws.shape[1]))
        for fold, rows in groups:
            width = max(1, CHUNK // len(rows))
            for start in range(0, self._draws.shape[1], width):
                columns = slice(start, start + width)
                counts = self._draws[:, columns][self._source[rows]].astype(float)
                sums[:, fold, columns] += part(rows, counts)
        defined = bottom > 0
        quotients = np.divide(top, bottom, out=np.zeros_like(top), where=defined)
        number = defined.sum(axis=0)
        means = np.full(len(number), np.nan)
        np.divide(quotients.sum(axis=0), number, out=means, where=number > 0)
        return ResampledScore(float(means[0]), means[1:], len(self._draws), self._level, bounds)
