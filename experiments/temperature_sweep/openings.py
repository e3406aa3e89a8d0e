"""Which tokens open genuine follow-ups, and which open restatements, in the turns of others."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.temperature_sweep.read import RESTATEMENTS, genuine


@dataclass(frozen=True)
class Openings:
    """How often which token opened what, by source.

    Attributes:
        ids: ``[tokens]`` those that opened a sampled turn of either kind, ascending.
        sources: the sources, as rows of the counts.
        genuine: ``[sources, tokens]`` judged-genuine turns that a token opened.
        restated: ``[sources, tokens]`` restatements (of query or response) that it opened.
    """

    ids: np.ndarray
    sources: list[str]
    genuine: np.ndarray
    restated: np.ndarray

    def of_others(self, sources: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """To what share each token opens genuine turns, and restatements, in other sources.

        Of the turns of either kind, at any temperature, that a token opened in all sources but the
        context's own: which share was genuine, and which restated; both are 0 for a token that
        opened none, and else add up to 1. So a token that opens both kinds counts for each as often
        as it was found to, and no probability counts twice.

        Args:
            sources: ``[contexts]`` of each context.

        Returns:
            ``[contexts, tokens]`` shares of genuine turns and of restatements; a row is NaN where
            no other source has a turn of the kind.
        """
        number = {source: row for row, source in enumerate(self.sources)}
        own = [number[source] for source in sources]
        kinds = [counts.sum(0) - counts[own] for counts in (self.genuine, self.restated)]
        total = np.maximum(kinds[0] + kinds[1], 1)  # nothing opened is a share of 0
        shares = [counts / total for counts in kinds]
        for share, counts in zip(shares, kinds, strict=True):
            share[counts.sum(1) == 0] = np.nan
        return shares[0], shares[1]


def openings_of(turns: pd.DataFrame) -> Openings:
    """Count the tokens that open sampled turns; greedy's are what they are compared with.

    Args:
        turns: those of a :class:`experiments.temperature_sweep.read.Sweep`.
    """
    sampled = turns[turns["temperature"] > 0]
    kinds = genuine(sampled), sampled["category"].isin(RESTATEMENTS)
    first = np.array([int(ids[0]) for ids in sampled["token_ids"]], dtype=np.int64)
    ids = np.unique(first[(kinds[0] | kinds[1]).to_numpy()])
    if not len(ids):  # a token that opened neither, so that shares are missing and not sums of none
        ids = first[:1]
    sources = sorted(turns["source"].unique())
    row = np.searchsorted(sources, sampled["source"].to_numpy(dtype=str))
    counts = np.zeros((2, len(sources), len(ids)))
    for table, kind in zip(counts, kinds, strict=True):
        so = kind.to_numpy()
        np.add.at(table, (row[so], np.searchsorted(ids, first[so])), 1)
    return Openings(ids, sources, counts[0], counts[1])
