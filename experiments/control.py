"""What an effect is held against, and where it is chosen.

Nothing is chosen and reported on the same queries: halves, the best of several on the other half,
donors by one half of their turns. Contrasts are paired by query; where a value depends on the
recipient's and the donors' queries, both are clusters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from experiments.outcome import CHOOSING, IN_ROLE, ONCE_IN_ROLE
from ia_mech.estimates import Group, TidyEstimate, by_dataset
from ia_mech.run import Run
from ia_mech.stats import Estimate, cluster_bootstrap, dyadic_mean, dyadic_test
from ia_mech.steering import TURN

if TYPE_CHECKING:
    from probes.targets import Outcome

HIGH, LOW, EQUAL_A, EQUAL_B = ARMS = ("high", "low", "equal a", "equal b")  # donors
POOL = 0.25  # donors of a high share are of the upper quarter, those of a low one of the lower
MOVED, RATIO, EQUAL = "high minus low donor", "share of the donors' difference", "equal donors"
MOVED_PARTS = {part: f"{MOVED}, {part}" for part in (IN_ROLE, ONCE_IN_ROLE)}
BEYOND = "high minus low donor, beyond the first token"
DONORS, UNCHANGED = "donors' own difference, held out", "share, unchanged"
UNDER = {HIGH: "share under the high donor", LOW: "share under the low donor"}
COVERED = "probability of the openings"  # of the recipient, under a donor
COVERED_UNDER = {arm: f"{COVERED} under the {arm} donor" for arm in (HIGH, LOW)}
OWN_MASS = "donors' own masses, high minus low"
HALF = "p that more than half is moved from here on"
FIRST = "first token alone"  # the last token's state after the last layer, which nothing else reads
CELL = ["term", "layer"]
EPSILON = 1e-9  # a sum below which nothing is divided by it

# -- paired by query -------------------------------------------------------------------------------


def ratio(
    values: ArrayLike, whole: ArrayLike, sources: Iterable[Any], options: Mapping[str, Any]
) -> Estimate:
    """The mean of ``[rows]`` values by that of others, with a bootstrap interval over sources."""
    values, whole = np.asarray(values, float), np.asarray(whole, float)

    def of(counts: np.ndarray) -> np.ndarray:
        below = counts @ whole
        return (counts @ values) / np.where(np.abs(below) > EPSILON, below, np.nan)

    (estimate,) = cluster_bootstrap(of, list(sources), **options)
    return estimate


def halves_of(queries: Iterable[str], seed: int) -> dict[str, int]:
    """Each query's half, 0 or 1, drawn by seed."""
    names = sorted(set(queries))
    order = np.random.default_rng([seed, 2]).permutation(len(names))
    return {names[at]: place % 2 for place, at in enumerate(order)}


# -- the best of several ---------------------------------------------------------------------------


def best_elsewhere(
    ranked: np.ndarray, reported: np.ndarray, half: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """``[resamples]`` means of the arm that is best on other queries; NaN where a half has nothing
    to choose by.

    Args:
        ranked, reported: ``[arms, queries]`` by whose mean an arm is chosen, and what is read off.
        half: ``[queries]`` 0 or 1: each half chooses the arm that the other reports.
        counts: ``[resamples, queries]`` how often each query was drawn.
    """
    total = np.zeros(len(counts))
    for one in (0, 1):
        choosing, reporting = counts * (half != one), counts * (half == one)
        best = (choosing @ ranked.T).argmax(1)  # sums rank as means do
        total += (reporting * reported[best]).sum(1)
        total[(choosing.sum(1) == 0) & (reporting.sum(1) > 0)] = np.nan
    return total / counts.sum(1)


# -- donors ----------------------------------------------------------------------------------------


def donors_of(contexts: pd.DataFrame, recipients: Sequence[int], seed: int) -> pd.DataFrame:
    """Donors for recipients, all of the same dataset and of other queries than the recipient's.

    High and low donors come from the upper and the lower quarter by :data:`CHOOSING`. The two equal
    donors are any context and the nearest to it, in random order. Of the possible donors the least
    used ones are taken, by lot. A row per recipient that has all four: ``recipient`` and
    :data:`ARMS`, as they stand in ``contexts`` (``dataset``, ``source``, :data:`CHOOSING`).
    """
    rng, used, found = np.random.default_rng([seed, 5]), Counter[int](), []
    source, share = contexts["source"].to_numpy(), contexts[CHOOSING].to_numpy(float)

    def taken(pool: np.ndarray, *besides: int) -> int | None:
        others = [i for i in pool.tolist() if source[i] not in {source[j] for j in besides}]
        return min(others, key=lambda i: (used[i], rng.random()), default=None)

    for one in recipients:
        same = contexts["dataset"].to_numpy() == contexts["dataset"].iloc[one]
        pool = np.flatnonzero(same & (source != source[one]))
        if len(np.unique(source[pool])) < 2:
            continue
        few, many = np.quantile(share[pool], [POOL, 1 - POOL])
        high = taken(pool[share[pool] >= many], one)
        low = None if high is None else taken(pool[share[pool] <= few], one, high)
        first = taken(pool, one)
        assert first is not None
        others = pool[source[pool] != source[first]]
        apart = abs(share[others] - share[first])
        second = taken(others[apart == apart.min()], one)
        if high is None or low is None or second is None:
            continue
        equal = rng.permutation([first, second]).tolist()
        used.update([high, low, *equal])
        found.append([one, high, low, *equal])
    return pd.DataFrame(found, columns=["recipient", *ARMS])


def donors_among_siblings(
    contexts: pd.DataFrame, recipients: Sequence[int], seed: int
) -> pd.DataFrame:
    """As :func:`donors_of`, but donors are other contexts of the recipient's query: that with the
    highest :data:`CHOOSING`, that with the lowest, and the two that are nearest to each other, in
    random order. A recipient takes three others: of two, the nearest were also the farthest."""
    rng, found = np.random.default_rng([seed, 5]), []
    source, share = contexts["source"].to_numpy(), contexts[CHOOSING].to_numpy(float)
    for one in recipients:
        others = np.flatnonzero((source == source[one]) & (np.arange(len(source)) != one))
        if len(others) < 3:
            continue
        ranked = others[np.argsort(share[others], kind="stable")]
        nearest = np.diff(share[ranked]).argmin()
        equal = rng.permutation(ranked[nearest : nearest + 2]).tolist()
        found.append([one, ranked[-1], ranked[0], *equal])
    return pd.DataFrame(found, columns=["recipient", *ARMS])


def estimates(rows: pd.DataFrame, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """Every estimate, with its interval over queries: those of the recipient and of its donors, as
    values that share one may depend on each other (:func:`ia_mech.stats.dyadic_mean`).

    There is no ratio where the donors' own difference isn't shown to be above 0, and nothing beyond
    the first token where that wasn't put in alone.

    Args:
        rows: a row per recipient and cell: ``dataset``, ``source``, :data:`CELL`, ``unchanged``,
            the share under each of :data:`ARMS`, and of each donor its query (``query high``, …)
            and its share in the half that chose nothing (``own high``, …).
        options: ``level``, ``resamples`` and ``seed``.
    """
    level = options["level"]

    def row(of: Group, quantity: str, values: Any, queries: Any, most: float = 1) -> TidyEstimate:
        each = (queries[name] for name in queries)
        found = dyadic_test(values, *each, ends=(-most, most), level=level)
        return of.row(quantity, found.difference, len(values), p=found.p, test=found.test)

    for dataset, here in by_dataset(rows):
        of_recipient = rows[here].drop_duplicates("source")
        group = Group(of_recipient["source"].to_numpy(), options, {"dataset": dataset})
        yield group.mean(UNCHANGED, of_recipient["unchanged"], proportion=True)
        high, low = (of_recipient[f"own {arm}"] for arm in (HIGH, LOW))
        apart = row(group, DONORS, high - low, of_recipient[["query high", "query low"]])
        yield apart
        first = rows[here & (rows["term"] == FIRST)].set_index("source")
        for (term, layer), cell in rows[here].groupby(CELL, sort=False):
            sources = cell["source"].to_numpy()
            own = Group(sources, options, group.names | {"term": term, "layer": layer})
            for arm in UNDER:
                pair = cell["source"], cell[f"query {arm}"]
                for name, words in ((arm, UNDER), (f"{COVERED} {arm}", COVERED_UNDER)):
                    if name in cell:
                        share = dyadic_mean(cell[name], *pair, ends=(0, 1), level=level)
                        yield own.row(words[arm], share, len(cell))
            for quantity, a, b in ((MOVED, HIGH, LOW), (EQUAL, EQUAL_A, EQUAL_B)):
                queries = cell[["source", f"query {a}", f"query {b}"]]
                yield row(own, quantity, cell[a] - cell[b], queries)
            queries = cell[["source", "query high", "query low"]]
            for part, quantity in MOVED_PARTS.items() if f"{IN_ROLE} {HIGH}" in cell else ():
                apart_by = cell[f"{part} {HIGH}"] - cell[f"{part} {LOW}"]
                both = apart_by.notna()
                if both.sum() > 1:
                    yield row(own, quantity, apart_by[both], queries[both])
            moved, whole = cell[HIGH] - cell[LOW], cell["own high"] - cell["own low"]
            if len(first) and term != FIRST:
                alone = (first[HIGH] - first[LOW]).loc[sources].to_numpy()
                yield row(own, BEYOND, moved - alone, queries, most=2)
            if apart.estimate.low > 0 and whole.mean() > 0:
                ratio = moved.mean() / whole.mean()
                linear = ratio + (moved - ratio * whole) / whole.mean()  # the delta method
                most = abs(ratio) + (1 + abs(ratio)) / whole.mean()
                yield replace(row(own, RATIO, linear, queries, most), p=np.nan, test=None)


# -- drawn -----------------------------------------------------------------------------------------


def centred_states(runs: Sequence[Run], layer: int, positions: Sequence[str]) -> np.ndarray:
    """``[contexts, d_model]`` states of all contexts at the first of the positions that isn't the
    turn's (``header_last`` if none is), minus each run's mean."""
    named = next((name for name in positions if name != TURN), "header_last")
    states = [run.residuals(layer, named).double().numpy() for run in runs]
    return np.concatenate([own - own.mean(0) for own in states])


def permuted_probes(
    states: np.ndarray, outcome: Outcome, penalty: float, count: int, seed: int
) -> np.ndarray:
    """``[count, d]`` logistic directions of length 1: of a probe of ``[n, d]`` states with this
    penalty whose labels whole sources have exchanged at random.

    Like the probe's, and unlike random ones, they favour axes along which states hardly vary.
    """
    from probes.card import directions
    from probes.fit.folds import permutations

    together = np.zeros(len(outcome), dtype=int)  # one fold: no permutation is left out
    found = []
    for rows in permutations(outcome, together, count, np.random.SeedSequence([seed, 24])):
        moved = {"positives": outcome.positives[rows], "trials": outcome.trials[rows]}
        labels = replace(outcome, **moved)
        found.append(directions(states, labels, penalty)["logistic"].weights)
    return np.array(found, dtype=float)


def random_directions(
    states: np.ndarray, direction: np.ndarray, count: int, seed: int
) -> np.ndarray:
    """``[count, d]`` directions of length 1 with the covariance of centred ``[n, d]`` states.

    The covariance has few large directions. Drawn directions lie closer to them, and to a probe
    that lies there, than directions without a preference would. The component along ``direction``
    is taken out, since a control that holds a part of the direction would hide its effect.
    """
    unit = direction / np.linalg.norm(direction)
    drawn = np.random.default_rng([seed, 24]).standard_normal((count, len(states))) @ states
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    drawn -= (drawn @ unit)[:, None] * unit
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
