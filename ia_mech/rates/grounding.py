"""A p value that a turn's words have nothing to do with the conversation that it is shown after.

The score of a turn (``judge.verdict.Verdict.grounding``) means nothing by itself. A long turn
shares a rarer word with any conversation than a short one (8% of turns of 60 words reach a score
that 2% of those of 15 words do), and conversations of one kind share more words than others. So
scores are compared with those of the run's own turns after wrong conversations, the nearest by
length. The p value is conformal (Vovk, Gammerman & Shafer 2005): the share of these turns that
score as high, the turn itself counted among them.
"""

import numpy as np
import pandas as pd

from ia_mech.judge.verdict import GROUNDED_P

NEAREST, SHARE = 200, 0.1  # so many decoys of about a turn's length, or this share if that is more


def p_values(
    scores: np.ndarray, words: np.ndarray, sources: np.ndarray, shown: np.ndarray, null: np.ndarray
) -> np.ndarray:
    """Conformal p values of grounding scores.

    Decoys of a row's own sources are left out of its null, itself included.

    Args:
        scores: ``[n]`` larger is better grounded; NaN where there is none.
        words: ``[n]`` the turns' lengths.
        sources: ``[n]`` the source of the turn.
        shown: ``[n]`` that of the context that it was held against.
        null: ``[n]`` which rows are decoys of wrong conversations.

    Returns:
        ``[n]``; NaN where there is no score, or where decoys of other sources are so few that no
        turn could reach ``GROUNDED_P``.
    """
    p = np.full(len(scores), np.nan)
    decoys = np.flatnonzero(null & ~np.isnan(scores))
    if not len(decoys):
        return p
    codes, _ = pd.factorize(np.r_[sources, shown])
    one, other = codes[: len(scores)], codes[len(scores) :]
    decoys = decoys[np.argsort(words[decoys], kind="stable")]
    nearest = max(NEAREST, round(SHARE * len(decoys)))
    rows = pd.DataFrame({"words": words, "one": one, "other": other})[~np.isnan(scores)]
    for length, alike in rows.groupby("words"):
        near = decoys[_nearest(words[decoys], length, nearest)]
        for (first, second), those in alike.groupby(["one", "other"]).groups.items():
            apart = ~np.isin(one[near], (first, second)) & ~np.isin(other[near], (first, second))
            against = np.sort(scores[near[apart]])
            above = len(against) - np.searchsorted(against, scores[those], side="left")
            if 1 / (1 + len(against)) <= GROUNDED_P:
                p[those] = (1 + above) / (1 + len(against))
    return p


def _nearest(lengths: np.ndarray, length: float, count: int) -> slice:
    """Of ascending lengths, at least ``count`` that are nearest to this one, ties included."""
    if len(lengths) <= count:
        return slice(None)
    far = np.partition(np.abs(lengths - length), count - 1)[count - 1]
    return slice(
        int(np.searchsorted(lengths, length - far, side="left")),
        int(np.searchsorted(lengths, length + far, side="right")),
    )
