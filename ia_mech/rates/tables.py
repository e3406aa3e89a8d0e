"""Every figure of the rates report, one row per estimate. The terminal and the files show these."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.special import gammaln

from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, GENUINE
from ia_mech.rates.corrected import corrected, judge_errors
from ia_mech.rates.pool import EVERY, FAILED, SUBJECT, Judged
from ia_mech.rates.rows import ALL, Group, Row
from ia_mech.stats import Estimate, cluster_mean, detectable_difference, holm, paired_difference

POWER = 0.8


def estimates(
    judged: Judged,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    method: str = "auto",
) -> list[Row]:
    """All figures of a report, per model and perturbation, dataset and temperature.

    Args:
        judged: turns with their labels.
        level: coverage of intervals.
        resamples: bootstrap samples.
        seed: of resampling and sign flips.
        method: of the intervals of shares and differences: ``auto``, ``percentile`` or ``bca``, as
            in :func:`ia_mech.stats.cluster_mean`.
    """
    options = {"level": level, "resamples": resamples, "seed": seed}
    shares = options | {"method": method, "proportion": True}
    rows: list[Row] = []
    for subject, turns in judged.turns.groupby(SUBJECT):
        names = dict(zip(SUBJECT, subject, strict=True))
        names |= {"judge": judged.judge, "responses": judged.responses, "level": level}
        truth = turns[turns["truth"].notna() & turns["genuine"].notna()]
        rows += judge_errors(Group(names, ALL, None, truth), shares)
        for dataset, of_dataset in _datasets(turns):
            greedy = of_dataset[of_dataset["temperature"] == 0]
            for temperature, at in of_dataset.groupby("temperature"):
                group = Group(names, dataset, float(temperature), at)
                rows += _rates(group, shares)
                if temperature:
                    rows += _reach(group, shares)
                    rows += _difference(group, greedy, options | {"method": method})
                rows += corrected(group, truth, options, shares, judged.annotator)
            sampled = of_dataset[of_dataset["temperature"] > 0]
            if sampled["temperature"].nunique() > 1:
                rows += _reach(Group(names, dataset, None, sampled), shares)
    # Lines of all datasets say nothing that those of each didn't: they are a family of their own.
    adjusted = np.stack(
        [
            holm([row.p if (row.dataset == ALL) is pooled else np.nan for row in rows])
            for pooled in (False, True)
        ]
    )
    return [
        row if np.isnan(row.p) else replace(row, p_holm=float(p[int(row.dataset == ALL)]))
        for row, p in zip(rows, adjusted.T, strict=True)
    ]


def comparisons(rows: list[Row]) -> tuple[int, int]:
    """How many tests Holm's method corrected for: of single datasets, and of ``(all)``."""
    made = [row.dataset == ALL for row in rows if not np.isnan(row.p)]
    return made.count(False), made.count(True)


def any_of_n(genuine: np.ndarray, samples: np.ndarray, n: int) -> np.ndarray:
    """Chance that n samples, drawn from those there are, hold a genuine turn.

    ``1 - C(N - g, n) / C(N, n)``: the unbiased estimate of 1 - (1 - p)^n from g genuine turns among
    N independent samples (Chen et al. 2021, arXiv 2107.03374, "pass@k").

    Args:
        genuine: ``[contexts]`` g.
        samples: ``[contexts]`` N.
        n: how many are drawn.

    Returns:
        ``[contexts]`` probabilities; NaN for a context with fewer than n samples.
    """
    genuine, samples = np.asarray(genuine, dtype=float), np.asarray(samples, dtype=float)
    rest = samples - genuine
    with np.errstate(invalid="ignore"):
        log_none = (
            gammaln(rest + 1)
            - gammaln(rest - n + 1)
            - gammaln(samples + 1)
            + gammaln(samples - n + 1)
        )
    # n samples can't avoid a genuine one if fewer than n others are there.
    chance = np.where(rest < n, 1.0, -np.expm1(log_none))
    chance = np.where(genuine == 0, 0.0, np.clip(chance, 0, 1))
    return np.where(samples < n, np.nan, chance)


# -- one group of turns ---------------------------------------------------------------------------


def _datasets(turns: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    yield from turns.groupby("dataset")
    if turns["dataset"].nunique() > 1:
        yield ALL, turns


def _share(
    group: Group, quantity: str, turns: pd.DataFrame, events: pd.Series, shares: dict, **more
) -> Row:
    """The share of events among turns, with its interval over sources."""
    estimate = cluster_mean(events.astype(float), turns["source"], **shares)
    return group.row(quantity, estimate, turns, events=int(events.sum()), **more)


def _rates(group: Group, shares: dict) -> Iterator[Row]:
    """Follow-up rate and failure profile, and what is counted apart from them."""
    turns = group.turns
    assessed = turns[turns["genuine"].notna()]
    genuine = assessed["category"] == GENUINE
    yield _share(group, "follow_up_rate", assessed, genuine, shares)
    if group.names["responses"] == EVERY and turns["cut_off"].any():
        complete = assessed[~assessed["cut_off"]]
        yield _share(
            group, "follow_up_rate_complete", complete, complete["category"] == GENUINE, shares
        )
        yield _share(group, "cut_off", turns, turns["cut_off"], shares)
    for status in (CANNOT_ASSESS, FAILED):
        yield _share(group, status, turns, turns["category"] == status, shares)
    missing = len(turns) - len(assessed)
    if missing:
        low, high = genuine.sum() / len(turns), (genuine.sum() + missing) / len(turns)
        method = f"not an interval: none or all of {missing} unassessed turns genuine"
        worst = Estimate(np.nan, low, high, turns["source"].nunique(), method)
        yield group.row("follow_up_rate_bounds", worst, events=missing)
    for category in ASSESSED:
        so = assessed["category"] == category
        yield _share(group, "category_share", assessed, so, shares, category=category)


def _reach(group: Group, shares: dict) -> Iterator[Row]:
    """Latent reach for n = 1 … the most samples that a context has."""
    assessed = group.turns[group.turns["genuine"].notna()]
    contexts = assessed.groupby("context").agg(
        source=("source", "first"), genuine=("genuine", "sum"), samples=("genuine", "size")
    )
    for n in range(1, int(contexts["samples"].max() if len(contexts) else 0) + 1):
        chance = any_of_n(contexts["genuine"].to_numpy(), contexts["samples"].to_numpy(), n)
        there = contexts["samples"] >= n
        yield group.row(
            "reach",
            cluster_mean(chance, contexts["source"], **shares),
            n_samples=n,
            rows=int(contexts.loc[there, "samples"].sum()),
            contexts=int(there.sum()),
        )


def _difference(group: Group, greedy: pd.DataFrame, options: dict) -> Iterator[Row]:
    """The rate minus the greedy rate of the same sources, and what could have been detected."""
    columns = [group.turns["genuine"], group.turns["source"], greedy["genuine"], greedy["source"]]
    paired = paired_difference(*columns, **options)
    both = pd.concat([group.turns, greedy])
    both = both[both["genuine"].notna()]
    yield group.row(
        "difference_from_greedy", paired.difference, both, p=paired.p, test=paired.test or None
    )
    size = detectable_difference(*columns, power=POWER, level=options["level"])
    method = f"{POWER:.0%} power in a single comparison"
    found = Estimate(size, np.nan, np.nan, paired.sources, method)
    yield group.row("detectable_difference", found, both)
