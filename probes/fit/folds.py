"""Folds of whole sources, their permutations, and the selection and tests that use both.

Folds are stratified by the target, so they depend on the labels. The observed labels are spread
evenly over the folds; freely shuffled labels would not be, and the two could not be compared.
Therefore a permutation is drawn from exactly those arrangements of labels that could have led to
these folds. If hidden states have nothing to do with the labels, each arrangement is as likely as
the observed one.

Selection uses inner folds only. It is repeated for every permutation, so that the headline's p
value accounts for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ia_mech.stats import permutation_p
from probes.targets import Outcome

LEVEL = 0.05  # of permutation tests


@dataclass(frozen=True)
class SelectionTests:
    """Selection and permutation tests over a heat map, layers and positions in the given order.

    A statistic is the AUROC of closed-form probes, averaged over outer folds.
    """

    statistic: np.ndarray  # [layers, positions]
    p_family: np.ndarray  # [layers, positions] share of permutations whose largest reaches it
    null_quantile: np.ndarray  # [layers, positions] 95% quantile of the permuted statistics
    family_quantile: float  # 95% quantile of each permutation's largest statistic
    chosen: np.ndarray  # [folds, 2] layer and position (indices) that each inner loop chose
    chosen_on_all: tuple[int, int]  # layer and position (indices) chosen on all contexts
    headline_statistic: float  # mean over outer folds, each at its chosen layer and position
    headline_p: float  # its p value, with the selection replayed under each permutation
    headline_null: np.ndarray  # [permutations] the headline's statistic under each

    @property
    def permutations(self) -> int:
        return len(self.headline_null)

    @property
    def readable(self) -> bool:
        """Whether both p values are at most :data:`LEVEL`: the headline's, and the smallest
        family-wise p value of the heat map."""
        return bool(self.headline_p <= LEVEL and self.p_family.min() <= LEVEL)


def choose(correlations: np.ndarray, sources: int) -> tuple[np.ndarray, np.ndarray]:
    """The earliest layer within a standard error of the best one.

    What a block writes into the residual stream stays there. Many later layers therefore
    hold the same, and the best of them is best by chance. At the position of the best
    correlation, the earliest layer within one standard error of it is chosen (Breiman et al. 1984,
    section 3.4.3). The standard error is that of Fisher's z, ``1 / sqrt(sources - 3)``.

    Args:
        correlations: ``[layers, positions, …]`` held-out correlations. A choice is made for each
            entry of the other axes.
        sources: the number of sources behind each correlation.

    Returns:
        Indices of layer and position, each ``[…]``.
    """
    layers, positions = correlations.shape[:2]
    rest = correlations.shape[2:]
    flat = correlations.reshape(layers * positions, -1)
    best = flat.argmax(0)
    position = best % positions
    columns = np.arange(flat.shape[1])
    there = correlations.reshape(layers, positions, -1)[:, position, columns]
    clipped = np.clip(flat[best, columns], -1 + 1e-6, 1 - 1e-6)
    floor = np.tanh(np.arctanh(clipped) - 1 / np.sqrt(max(sources - 3, 1)))
    layer = (there >= np.minimum(floor, flat[best, columns])).argmax(0)
    return layer.reshape(rest), position.reshape(rest)


def select_and_test(
    inner: np.ndarray, outer: np.ndarray, whole: np.ndarray, sources_inside: int, sources: int
) -> SelectionTests:
    """Select the headline and test everything against permutations.

    Args:
        inner: ``[layers, positions, folds, 1 + permutations]`` inner correlations; column 0 of the
            last axis belongs to the observed labels.
        outer: AUROC in the outer folds, with the same shape.
        whole: ``[layers, positions]`` correlations over all folds.
        sources_inside: the mean number of sources in the inner loop of an outer fold.
        sources: the number of all sources.
    """
    statistic = outer.mean(2)
    observed, null = statistic[..., 0], statistic[..., 1:]
    largest = null.max((0, 1))
    layer, position = choose(inner, sources_inside)
    folds, columns = np.indices(layer.shape)
    headline = outer[layer, position, folds, columns].mean(0)
    at = choose(whole[..., None], sources)
    return SelectionTests(
        statistic=observed,
        p_family=_p(observed, largest.reshape(-1, 1, 1)),
        null_quantile=_quantile(null),
        family_quantile=float(_quantile(largest)),
        chosen=np.stack([layer[:, 0], position[:, 0]], axis=1),
        chosen_on_all=(int(at[0][0]), int(at[1][0])),
        headline_statistic=float(headline[0]),
        headline_p=float(_p(headline[0], headline[1:])),
        headline_null=headline[1:],
    )


def _p(observed: np.ndarray, null: np.ndarray) -> np.ndarray:
    """p values; NaN without permutations. The slack allows for rounding in float32 sums."""
    if not len(null):
        return np.full_like(observed, np.nan)
    return permutation_p(observed, null, slack=1e-6)


def _quantile(null: np.ndarray) -> np.ndarray:
    if not null.shape[-1]:
        return np.full(null.shape[:-1], np.nan)
    return np.quantile(null, 0.95, axis=-1)


Seed = int | np.random.SeedSequence


def seeds_of(seed: int) -> list[np.random.SeedSequence]:
    """The seeds of folds and of permutations. With one seed, permutations would repeat the random
    numbers that made the folds."""
    return np.random.SeedSequence(seed).spawn(2)


def make_folds(outcome: Outcome, folds: int = 5, seed: Seed = 0) -> np.ndarray:
    """Deal sources into folds, stratified by their rates.

    Sources with the same number of contexts in the same runs can change places. They are sorted by
    their rates, with ties in random order. Each block of ``folds`` neighbours is dealt to different
    folds.

    Returns:
        ``[contexts]`` fold of each context; contexts of one source have the same fold.

    Raises:
        ValueError: there are fewer sources than folds, or fewer than three folds: an inner loop
            needs two.
    """
    if folds < 3:
        raise ValueError(f"{folds} folds leave the inner loop none to train on; take 3 or more")
    rng = np.random.default_rng(seed)
    rates = _source_rates(outcome)
    if len(rates) < folds:
        raise ValueError(f"{len(rates)} sources can't be dealt into {folds} folds")
    fold = np.empty(len(rates), dtype=int)
    filled = np.zeros(folds)
    contexts = np.bincount(outcome.sources)
    for members in _classes(outcome):
        order = members[np.lexsort((rng.random(len(members)), rates[members]))]
        for start in range(0, len(order), folds):
            block = order[start : start + folds]
            # A block that is not full goes to the folds that are emptiest so far.
            emptiest = np.lexsort((rng.random(folds), filled))[: len(block)]
            fold[block] = rng.permutation(emptiest)
            np.add.at(filled, fold[block], contexts[block])
    return fold[outcome.sources]


def permutations(
    outcome: Outcome, folds: np.ndarray, count: int, seed: Seed = 0
) -> Iterator[np.ndarray]:
    """Random permutations of labels that could have led to these folds.

    Whole sources change places: a source's labels move together, context by context, to a source
    with as many contexts in the same runs. The labels of a block are dealt to the folds anew, then
    shuffled within each fold. Where siblings are compared, labels change places within each query.

    Args:
        folds: as :func:`make_folds` gave them.

    Yields:
        ``[contexts]`` rows: context i gets the labels of context ``rows[i]``.
    """
    rng = np.random.default_rng(seed)
    if outcome.compares_siblings:
        for _ in range(count):  # sorted by source; within one, at random
            taken = np.empty(len(outcome), dtype=int)
            order = np.argsort(outcome.sources, kind="stable")
            taken[order] = np.lexsort((rng.random(len(outcome)), outcome.sources))
            yield taken
        return
    rates = _source_rates(outcome)
    rows = _rows_of_sources(outcome)
    fold_of = np.array([folds[r[0]] for r in rows])
    number = int(folds.max()) + 1
    classes = [
        (members, fold_of[members], *_blocks(fold_of[members], number))
        for members in _classes(outcome)
    ]
    for _ in range(count):
        giver = np.arange(len(rows))
        for members, fold, full, extra in classes:
            order = members[np.lexsort((rng.random(len(members)), rates[members]))]
            dealt = np.argsort(rng.random((full, number)), axis=1).ravel()
            dealt = np.concatenate([dealt, rng.permutation(extra)])
            in_fold_order = order[np.lexsort((rng.random(len(order)), dealt))]
            giver[members[np.argsort(fold, kind="stable")]] = in_fold_order
        taken = np.arange(len(outcome))
        for receiver in np.flatnonzero(giver != np.arange(len(rows))):
            taken[rows[receiver]] = rows[giver[receiver]]
        yield taken


def exchangeable_sources(outcome: Outcome) -> int:
    """How many sources can change places with another source; where siblings are compared, how many
    have several responses."""
    if outcome.compares_siblings:
        return int((np.bincount(outcome.sources) > 1).sum())
    return sum(len(members) for members in _classes(outcome) if len(members) > 1)


def _source_rates(outcome: Outcome) -> np.ndarray:
    """``[sources]`` share of positive turns."""
    return np.bincount(outcome.sources, outcome.positives) / np.bincount(
        outcome.sources, outcome.trials
    )


def _rows_of_sources(outcome: Outcome) -> list[np.ndarray]:
    """The rows of each source, ordered by run, so that the rows of two sources correspond."""
    order = np.lexsort((np.arange(len(outcome)), outcome.runs, outcome.sources))
    return np.split(order, np.cumsum(np.bincount(outcome.sources))[:-1])


def _classes(outcome: Outcome) -> list[np.ndarray]:
    """Groups of sources that can change places: with as many contexts in the same runs."""
    kinds = [tuple(outcome.runs[rows]) for rows in _rows_of_sources(outcome)]
    order = sorted(range(len(kinds)), key=lambda source: (kinds[source], source))
    return [np.array(list(group)) for _, group in groupby(order, key=kinds.__getitem__)]


def _blocks(fold: np.ndarray, number: int) -> tuple[int, np.ndarray]:
    """How many full blocks these members fill, and the folds of the last, partial one."""
    counts = np.bincount(fold, minlength=number)
    full = len(fold) // number
    return full, np.flatnonzero(counts > full)
