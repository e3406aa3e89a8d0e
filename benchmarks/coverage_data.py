"""The data sets of the coverage study (``benchmarks.coverage``), and how its tables are printed."""

import sys
import time
from collections.abc import Iterable

import numpy as np
from scipy.special import betaincinv, ndtr, ndtri
from scipy.stats import binomtest

from ia_mech.judge.decoys import SIBLING

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
    """Verdicts on turns after their own context and on decoys, of so many temperatures.

    A verdict is whether a normal latent value lies below the quantile of its rate. A share
    ``blind`` of the latent variance belongs to the turn and a share of 0.1 to the context's source;
    0.4 of what belongs to a turn, its source has in common. At ``blind`` = 0.9 a judge hardly looks
    at the context.

    Args:
        rng: the generator.
        kind: ``conversation``, where the turn is the next source's in a random cycle, or
            ``sibling``, where it is another turn of the same source.
        sources: how many.
        rate: of turns after their own context.
        floor: of decoys.
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
