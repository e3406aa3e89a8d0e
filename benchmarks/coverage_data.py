"""The data sets of the coverage study (``benchmarks.coverage``), and how its tables are printed."""

import sys
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy.special import betaincinv, ndtr, ndtri
from scipy.stats import binomtest

from ia_mech.judge.decoys import SIBLING
from ia_mech.stats import (
    Estimate,
    balanced_accuracy,
    dyadic_difference,
    paired_difference,
    prediction_powered,
    weighted_share,
)

UNEQUAL = (1, 2, 4, 8, 16, 17)


def rows_per_source(sources: int, equal: bool) -> np.ndarray:
    """``[sources]`` numbers of rows."""
    return np.full(sources, 8) if equal else np.resize(UNEQUAL, sources)


def source_rates(
    rng: np.random.Generator, mean: float, correlation: float, sources: int
) -> np.ndarray:
    """``[sources]`` beta-distributed rates; rows of a source then correlate as given."""
    shape = (1 - correlation) / correlation
    return rng.beta(mean * shape, (1 - mean) * shape, sources)


def table(header: Iterable[str], rows: Iterable[Iterable[object]], total: int, name: str) -> None:
    """Print a Markdown table row by row as it is computed, with progress on stderr."""
    header, begun = list(header), time.perf_counter()
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header), flush=True)
    for done, row in enumerate(rows, 1):
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)
        spent = time.perf_counter() - begun
        left = spent / done * (total - done)
        print(f"{name}: {done} of {total}, {spent:.0f} s, {left:.0f} s left", file=sys.stderr)
    print(flush=True)


def percent(share: float) -> str:
    """``94.8``."""
    return f"{100 * share:.1f}"


def share_and_interval(found: int, trials: int, level: float) -> str:
    """``3.5 (2.7 … 4.3)`` in percent: a share and its exact 95% interval.

    Bold where the whole interval lies above the level that was promised.
    """
    digits = 1 if level >= 0.01 else 2
    ends = binomtest(found, trials).proportion_ci(0.95, "exact")
    share, low, high = (f"{100 * x:.{digits}f}" for x in (found / trials, ends.low, ends.high))
    text = f"{share} ({low} … {high})"
    return f"**{text}**" if ends.low > level else text


def conditions(
    rng: np.random.Generator, rate_a: float, rate_b: float, rows: tuple[int, int], sources: int
) -> list[np.ndarray]:
    """Two conditions whose rates per source are Beta (correlation 0.3) and correlate at 0.7."""
    first = rng.normal(size=sources)
    second = 0.7 * first + np.sqrt(1 - 0.49) * rng.normal(size=sources)
    out = []
    for rate, n, normal in ((rate_a, rows[0], first), (rate_b, rows[1], second)):
        shape = 0.7 / 0.3
        each = betaincinv(rate * shape, (1 - rate) * shape, ndtr(normal)) if rate else 0 * normal
        values = rng.random((sources, n)) < each[:, None]
        out += [values.ravel().astype(float), np.repeat(np.arange(sources), n)]
    return out


def skewed(rng: np.random.Generator, rows: tuple[int, int], sources: int) -> list[np.ndarray]:
    """Two conditions with log-normal values of the same mean, paired by source."""
    level, out = rng.normal(0, 0.5, sources), []
    for n in rows:
        index = np.repeat(np.arange(sources), n)
        out += [np.exp(rng.normal(level[index], 0.5)), index]
    return out


def decoyed(
    rng: np.random.Generator,
    kind: str,
    sources: int,
    rate: float,
    floor: float,
    temperatures: int = 4,
    blind: float = 0.3,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Verdicts on turns after their own context, and on the same turns as decoys.

    A verdict says whether a normal latent value lies below the quantile of its rate. A share
    ``blind`` of the latent variance belongs to the turn, and a share of 0.1 to the context's
    source. Turns of one source share 0.4 of what belongs to a turn. A judge with ``blind`` = 0.9
    hardly looks at the context.

    Args:
        rng: the generator.
        kind: ``wrong_conversation``: the turn is that of the next source in a random cycle;
            ``sibling``: it is another turn of the same source.
        sources: how many.
        rate: follow-up rate of turns after their own context.
        floor: follow-up rate of decoys.
        temperatures: turns of each source.
        blind: see above.

    Returns:
        ``[sources * temperatures]`` verdicts on the own turn, verdicts on the decoy, and the
        sources of context and decoy.
    """
    cycles = [rng.permutation(sources) for _ in range(temperatures)]
    context = np.concatenate(cycles)
    source_of_turn = np.concatenate([np.roll(cycle, -1) for cycle in cycles])
    at, n = np.repeat(np.arange(temperatures), sources), sources * temperatures
    common, likes = rng.normal(size=(2, sources))
    turns = np.sqrt(0.4) * common[:, None] + np.sqrt(0.6) * rng.normal(
        size=(2, sources, temperatures)
    )
    if kind == SIBLING:
        source_of_turn, shown = context, turns[1][context, at]
    else:
        shown = turns[0][source_of_turn, at]
    own, decoy = (
        np.sqrt(blind) * turn
        + np.sqrt(0.1) * likes[context]
        + np.sqrt(0.9 - blind) * rng.normal(size=n)
        for turn in (turns[0][context, at], shown)
    )
    return (own < ndtri(rate)) * 1.0, (decoy < ndtri(floor)) * 1.0, context, source_of_turn


def annotate(
    rng: np.random.Generator, verdict: np.ndarray, choice: str
) -> tuple[np.ndarray, np.ndarray]:
    """200 rows to annotate and the probabilities with which they were chosen."""
    if choice == "any rows":
        at = rng.choice(len(verdict), 200, replace=False)
        return at, np.full(200, 200 / len(verdict))
    chosen, inclusion = [], []
    for value in (0, 1):
        rows = np.flatnonzero(verdict == value)
        take = min(100, len(rows))
        chosen.append(rng.choice(rows, take, replace=False))
        inclusion.append(np.full(take, take / max(len(rows), 1)))
    return np.concatenate(chosen), np.concatenate(inclusion)


# -- corners: what is often seen without any spread, with its interval and the truth ---------------

# Rows of each stratum (the judge calls those of the first one follow-ups); the share of each that
# are follow-ups; annotated rows of each; numbers of sources.
SHEETS: dict[str, dict] = {
    "3% missed, a source each": {"missed": 0.03},
    "3% missed, 60 sources": {"missed": 0.03, "sources": 60},
    "10% missed, a source each": {"missed": 0.10},
    "0.5% missed, a source each": {"missed": 0.005},
    "3% missed, 50 of a stratum": {"missed": 0.03, "each": 50},
    "two strata, half right": {"sizes": (200, 1000), "missed": 0.05, "right": 0.5, "each": 30},
    "two strata, half right, 40 sources": {
        **{"sizes": (200, 1000), "missed": 0.05, "right": 0.5, "each": 30, "sources": 40},
    },
}


def _sheet(
    rng: np.random.Generator,
    missed: float,
    right: float = 0.95,
    sizes: tuple[int, ...] = (40, 1500, 300, 60),
    each: int = 15,
    sources: int | None = None,
) -> tuple[np.ndarray, ...]:
    """Truth, verdict, source, whether annotated, inclusion of a run's rows; and both truths.

    Sources with several rows differ in how often their turns are follow-ups.
    """
    stratum = np.repeat(np.arange(len(sizes)), sizes)
    n = len(stratum)
    source = np.arange(n) if sources is None else rng.permutation(n) % sources
    share = np.where(stratum == 0, right, np.where(stratum == 1, missed, 0.0))
    odds = rng.uniform(0, 2, n if sources is None else sources)[source]  # 1 on average
    chance = np.where(stratum == 0, share, share * odds)
    truth = rng.random(n) < chance
    inclusion = np.array([min(each, size) / size for size in sizes])[stratum]
    annotated = np.zeros(n, dtype=bool)
    for number, size in enumerate(sizes):
        at = np.flatnonzero(stratum == number)
        annotated[rng.choice(at, min(each, size), replace=False)] = True
    return truth, stratum == 0, source, annotated, inclusion


def recall_on_a_sheet(rng: np.random.Generator, **options: Any) -> tuple[Estimate, float]:
    """Recall of follow-ups; the truth is the recall in the run."""
    truth, verdict, source, at, inclusion = _sheet(rng, **options)
    found = weighted_share(verdict[at], truth[at], source[at], 1 / inclusion[at])
    return found, float(verdict[truth].mean())


def corrected_sheet(rng: np.random.Generator, **options: Any) -> tuple[Estimate, float]:
    """The corrected rate; the truth is the rate of all runs."""
    truth, verdict, source, at, inclusion = _sheet(rng, **options)
    known = np.where(at, truth, np.nan)
    sizes = options.get("sizes", (40, 1500))
    total = len(truth)
    expected = options.get("right", 0.95) * sizes[0] + options["missed"] * sizes[1]
    found = prediction_powered(verdict.astype(float), known, source, inclusion=inclusion)
    return found, expected / total


def accuracy_of(
    rng: np.random.Generator, few: int, many: int, right: float, wrong: float
) -> tuple[Estimate, float]:
    """Balanced accuracy of a recall of ``right`` among few rows and of ``wrong`` among many."""
    truth = np.repeat([True, False], [few, many])
    hit = rng.random(few + many) < np.where(truth, right, wrong)
    found = balanced_accuracy(truth, truth == hit, range(few + many))
    return found, (right + wrong) / 2


def symmetric(rng: np.random.Generator, sources: int, rare: float) -> tuple[Estimate, float]:
    """Two rows of a source before and after: half of the sources go from 0 to ½, half from ½ to 1,
    and a rare kind from 1 to 0."""
    half = np.arange(sources) % 2 == 0
    before = np.stack([np.zeros(sources), np.where(half, 0.0, 1.0)], axis=1)
    after = np.stack([np.where(half, 0.0, 1.0), np.ones(sources)], axis=1)
    other = rng.random(sources) < rare
    before[other], after[other] = 1, 0
    index = np.repeat(np.arange(sources), 2)
    found = paired_difference(after.ravel(), index, before.ravel(), index, permutations=1)
    return found.difference, (1 - rare) * 0.5 - rare


def accepting_sources(
    rng: np.random.Generator, sources: int, accepting: float
) -> tuple[Estimate, float]:
    """Rate − 2 · floor, with decoys in a cycle: the judge calls 60% of turns follow-ups after their
    own context, and every turn a follow-up after contexts of some sources."""
    always = rng.random(sources) < accepting
    own = (rng.random(sources) < 0.6) | always
    ring = np.arange(sources), np.roll(np.arange(sources), 1)
    found = dyadic_difference(own * 1.0, always * 1.0, *ring, times=2)
    return found, 0.6 + 0.4 * accepting - 2 * accepting
