"""Cross-validation folds of whole sources, and the permutations that go with them.

Folds are stratified by the target, so they depend on the labels. A permutation test that shuffled
labels freely and kept the folds would compare labels that are evenly spread over the folds with
labels that aren't. Here a permutation draws from exactly the arrangements of labels that could have
led to these folds: given the folds, under the hypothesis that hidden states have nothing to do with
the labels, each of them is as likely as the one that was observed.
"""

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from probes.data.outcome import Outcome


def make_folds(outcome: Outcome, folds: int = 5, seed: int = 0) -> np.ndarray:
    """Deal sources into folds, stratified by their rates.

    Sources that can change places (the same number of contexts in the same runs) are sorted by
    their rates, ties at random, and every ``folds`` of them in a row are dealt out to different
    folds.

    Args:
        outcome: k of n per context.
        folds: how many.
        seed: of dealing and ties.

    Returns:
        ``[contexts]`` fold of each; contexts of one source share it.

    Raises:
        ValueError: fewer sources than folds, or fewer folds than three: an inner loop needs two.
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
    outcome: Outcome, folds: np.ndarray, count: int, seed: int = 0
) -> Iterator[np.ndarray]:
    """Random permutations of whole sources that could have led to these folds.

    A source's labels move together, context by context, to a source with as many contexts in the
    same runs. Labels that would have been dealt out together are dealt out anew, then shuffled
    within each fold.

    Args:
        outcome: k of n per context.
        folds: ``[contexts]`` as :func:`make_folds` gave them.
        count: how many permutations.
        seed: of the permutations.

    Yields:
        ``[contexts]`` rows: context i gets the labels of context ``rows[i]``.
    """
    rng = np.random.default_rng(seed)
    rates = _source_rates(outcome)
    rows = _rows_of_sources(outcome)
    fold_of = np.array([folds[r[0]] for r in rows])
    number = int(folds.max()) + 1
    classes = [
        (members, fold_of[members], *_blocks(fold_of[members], number))
        for members in _classes(outcome)
    ]
    for _ in range(count):
        donor = np.arange(len(rows))
        for members, fold, full, extra in classes:
            order = members[np.lexsort((rng.random(len(members)), rates[members]))]
            dealt = np.argsort(rng.random((full, number)), axis=1).ravel()
            dealt = np.concatenate([dealt, rng.permutation(extra)])
            givers = order[np.lexsort((rng.random(len(order)), dealt))]
            donor[members[np.argsort(fold, kind="stable")]] = givers
        taken = np.arange(len(outcome))
        for receiver in np.flatnonzero(donor != np.arange(len(rows))):
            taken[rows[receiver]] = rows[donor[receiver]]
        yield taken


def movable(outcome: Outcome) -> int:
    """How many sources can change places with another one."""
    return sum(len(members) for members in _classes(outcome) if len(members) > 1)


def _source_rates(outcome: Outcome) -> np.ndarray:
    """``[sources]`` share of positive turns."""
    return np.bincount(outcome.sources, outcome.positives) / np.bincount(
        outcome.sources, outcome.trials
    )


def _rows_of_sources(outcome: Outcome) -> list[np.ndarray]:
    """Rows of each source, ordered by run, so that those of two sources correspond."""
    order = np.lexsort((np.arange(len(outcome)), outcome.runs, outcome.sources))
    return np.split(order, np.cumsum(np.bincount(outcome.sources))[:-1])


def _classes(outcome: Outcome) -> list[np.ndarray]:
    """Sources that can change places: as many contexts in the same runs."""
    kinds = [tuple(outcome.runs[rows]) for rows in _rows_of_sources(outcome)]
    order = sorted(range(len(kinds)), key=lambda source: (kinds[source], source))
    return [np.array(list(group)) for _, group in groupby(order, key=kinds.__getitem__)]


def _blocks(fold: np.ndarray, number: int) -> tuple[int, np.ndarray]:
    """How many full blocks were dealt to these members, and the folds of the last, partial one."""
    counts = np.bincount(fold, minlength=number)
    full = len(fold) // number
    return full, np.flatnonzero(counts > full)
