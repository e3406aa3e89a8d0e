"""What a probe is to predict: k positive of n turns, per context."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.resampling import source_index


@dataclass(frozen=True)
class Outcome:
    """Binomial outcomes of contexts, and how the contexts hang together.

    All samples of a context share its header state, so a context is one row with a rate, not n rows
    with a label each.

    Attributes:
        positives: ``[contexts]`` turns that have what is to be predicted (k).
        trials: ``[contexts]`` turns assessed (n); above 0, at least ``positives``.
        sources: ``[contexts]`` source of each, numbered from 0: the unit of folds, permutations and
            intervals.
        runs: ``[contexts]`` run of each (or dataset, where only contexts of one dataset are to be
            compared), numbered from 0: a covariate. Probes get an intercept per run, labels are
            permuted within runs, and scores compare contexts of the same run only.
    """

    positives: np.ndarray
    trials: np.ndarray
    sources: np.ndarray
    runs: np.ndarray

    @classmethod
    def of(
        cls,
        positives: ArrayLike,
        trials: ArrayLike,
        sources: ArrayLike,
        runs: ArrayLike | None = None,
    ) -> "Outcome":
        """From any labels of sources and runs; one run if none are given.

        Raises:
            ValueError: lengths differ, a source is missing, or there are not 0 ≤ k ≤ n, n > 0.
        """
        index, _ = source_index(sources)
        k, n = np.asarray(positives, dtype=float), np.asarray(trials, dtype=float)
        run = np.zeros(len(index), dtype=int) if runs is None else source_index(runs)[0]
        if not k.shape == n.shape == index.shape == run.shape:
            raise ValueError("positives, trials, sources and runs must have one entry per context")
        if not ((k >= 0) & (k <= n) & (n > 0)).all():
            raise ValueError("positives must lie between 0 and trials, and trials above 0")
        return cls(k, n, index, run)

    def __len__(self) -> int:
        return len(self.trials)

    @property
    def negatives(self) -> np.ndarray:
        """``[contexts]`` turns that have it not."""
        return self.trials - self.positives

    @property
    def rate(self) -> np.ndarray:
        """``[contexts]`` share of positives."""
        return self.positives / self.trials

    def take(self, rows: np.ndarray) -> "Outcome":
        """The same of some contexts, sources numbered anew."""
        return Outcome.of(
            self.positives[rows], self.trials[rows], self.sources[rows], self.runs[rows]
        )
