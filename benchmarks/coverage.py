"""Do the intervals hold what they promise, and the tests? A simulation study on clustered data.

    python -m benchmarks.coverage                 the whole study, some 25 minutes on one core
    python -m benchmarks.coverage --quick         a tenth of the data sets
    python -m benchmarks.coverage --only rates    one part of it

Events are beta-binomial: each source has its own rate, with a given within-source correlation, and
8 rows; or 1, 2, 4, 8, 16 and 17 rows in turn, 8 on average. Seeds are fixed. Markdown goes to
stdout, progress to stderr.
"""

import argparse
import platform
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import scipy

from benchmarks.coverage_data import (
    SHEETS,
    accepting_sources,
    accuracy_of,
    annotate,
    conditions,
    corrected_sheet,
    decoyed,
    percent,
    recall_on_a_sheet,
    rows_per_source,
    share_and_interval,
    skewed,
    source_rates,
    symmetric,
    table,
)
from benchmarks.coverage_where import PARTS as WHERE
from ia_mech.judge.decoys import DECOY_KINDS
from ia_mech.stats import (
    Estimate,
    cluster_bootstrap,
    cluster_mean,
    dyadic_difference,
    kappa_of,
    paired_difference,
    prediction_powered,
    zero_events_bound,
)
from ia_mech.stats.significance import sign_flip_p


def rates(trials: int) -> None:
    """Coverage and mean width of intervals of one rate."""
    print(f"### One rate: {4 * trials} data sets a row\n")
    cells = list(product((24, 50, 100), (True, False), (0.2, 0.5), (0.02, 0.05, 0.2, 0.5)))

    def rows() -> Iterator[list[object]]:
        for number, (sources, equal, correlation, rate) in enumerate(cells):
            rng = np.random.default_rng([1, number])
            index = np.repeat(np.arange(sources), rows_per_source(sources, equal))
            covered, width = 0, 0.0
            for _ in range(4 * trials):
                values = (
                    rng.random(len(index)) < source_rates(rng, rate, correlation, sources)[index]
                )
                e = cluster_mean(values, index, proportion=True)
                covered += e.low <= rate <= e.high
                width += e.high - e.low
            shares = [percent(covered / (4 * trials)), f"{width / (4 * trials):.3f}"]
            yield [sources, "8" if equal else "1–17", correlation, rate, *shares]

    header = ["sources", "rows each", "correlation", "rate", "coverage", "width"]
    table(header, rows(), len(cells), "rates")


def zero_events(trials: int) -> None:
    """How often the bound of no events is wrong at the rate where it is tightest."""
    print(f"### No event: {10 * trials} data sets a row at a rate just above the bound\n")
    cells = list(product((24, 50, 100), (0.2, 0.5, 0.999)))

    def rows() -> Iterator[list[object]]:
        for number, (sources, correlation) in enumerate(cells):
            rng, bound = np.random.default_rng([2, number]), zero_events_bound(sources)
            none = 0
            for _ in range(10 * trials):
                each = source_rates(rng, bound * 1.0001, correlation, sources)
                none += not rng.binomial(8, each).any()
            yield [sources, correlation, f"{bound:.4f}", percent(none / (10 * trials))]

    header = ["sources", "correlation", "bound", "no event seen, so bound wrong (at most 5)"]
    table(header, rows(), len(cells), "no event")


def means(trials: int) -> None:
    """Coverage of means that aren't rates."""
    print(f"### Means of other values: {trials} data sets a row\n")
    kinds: dict[str, tuple[float, Callable]] = {
        "normal": (0.0, lambda rng, u, n: rng.normal(u, 1, n)),
        "log-normal": (np.exp(0.25), lambda rng, u, n: np.exp(rng.normal(u / 2, 0.5, n))),
    }
    cells = list(product(kinds, (24, 50, 100), (True, False)))

    def rows() -> Iterator[list[object]]:
        for number, (kind, sources, equal) in enumerate(cells):
            rng, (mean, draw) = np.random.default_rng([3, number]), kinds[kind]
            index = np.repeat(np.arange(sources), rows_per_source(sources, equal))
            covered = 0
            for _ in range(trials):
                e = cluster_mean(draw(rng, rng.normal(size=sources)[index], len(index)), index)
                covered += e.low <= mean <= e.high
            yield [kind, sources, "8" if equal else "1–17", percent(covered / trials)]

    table(["values", "sources", "rows each", "coverage"], rows(), len(cells), "means")


def alarms(trials: int) -> None:
    """False alarms of the paired test at three levels, also with few sources."""
    runs, levels = 10 * trials, (0.05, 0.01, 0.001)
    print(f"### Paired test under no difference: {runs} data sets a row\n")
    kinds: tuple[float | str, ...] = (0.02, 0.05, 0.2, 0.5, "log-normal")
    cells = list(product((8, 16, 24, 50, 100), ((1, 8), (8, 8)), kinds))

    def rows() -> Iterator[list[object]]:
        for number, (sources, n, kind) in enumerate(cells):
            rng, p, flips = np.random.default_rng([4, number]), np.empty(runs), np.empty(runs)
            tests: list[str] = []
            for run in range(runs):
                data = (
                    skewed(rng, n, sources)
                    if isinstance(kind, str)
                    else conditions(rng, kind, kind, n, sources)
                )
                test = paired_difference(*data, permutations=1999)
                p[run] = test.p
                tests.append(test.test)
                if n[0] != n[1]:
                    a, b = (data[i].reshape(sources, -1).mean(1) for i in (0, 2))
                    flips[run] = sign_flip_p(a - b, 1999, 0)
            shares = [share_and_interval(int((p <= x).sum()), runs, x) for x in levels]
            other = " / ".join(f"{100 * (flips <= x).mean():.{1 + (x < 0.01)}f}" for x in levels)
            yield [
                *(
                    sources,
                    f"{n[0]} and {n[1]}",
                    kind,
                    Counter(tests).most_common(1)[0][0],
                    *shares,
                ),
                other if n[0] != n[1] else "the same",
            ]

    header = ["sources", "rows each", "rate", "test", *(f"at {100 * x:g}%" for x in levels)]
    table([*header, "with sign flips"], rows(), len(cells), "alarms")


def paired(trials: int) -> None:
    """Coverage of the paired difference."""
    print(f"### Difference of two rates: {trials} data sets a row\n")
    pairs = ((0.0, 0.02), (0.02, 0.02), (0.02, 0.1), (0.05, 0.2), (0.2, 0.5))
    grid = list(product((24, 50, 100), ((1, 8), (8, 8)), pairs))

    def intervals() -> Iterator[list[object]]:
        for number, (sources, n, (a, b)) in enumerate(grid):
            rng, covered, width = np.random.default_rng([5, number]), 0, 0.0
            for _ in range(trials):
                e = paired_difference(*conditions(rng, a, b, n, sources), permutations=1).difference
                covered += e.low <= a - b <= e.high
                width += e.high - e.low
            shares = [percent(covered / trials), f"{width / trials:.3f}"]
            yield [sources, f"{n[0]} and {n[1]}", f"{a} and {b}", *shares]

    header = ["sources", "rows each", "rates", "coverage", "width"]
    table(header, intervals(), len(grid), "differences")


def decoys(trials: int) -> None:
    """Coverage of the rate beyond that of decoys, and of rate − 2 · floor, by which the gate goes.

    The gate says whether a judge can tell own from wrong conversations.
    """
    trials *= 2
    print(f"### Excess over decoys, 4 turns of each source: {trials} data sets a row\n")
    pairs = ((0.02, 0.02), (0.2, 0.02), (0.6, 0.02), (0.2, 0.2), (0.6, 0.2), (0.6, 0.6))
    cells = list(product(DECOY_KINDS, (20, 60, 100), pairs))

    def rows() -> Iterator[list[object]]:
        for number, (kind, sources, (rate, floor)) in enumerate(cells):
            found = []
            for blind in (0.3, 0.9):
                rng, covered, width = np.random.default_rng([11, number]), np.zeros(2), 0.0
                for _ in range(trials):
                    own, decoy, *pair = decoyed(rng, kind, sources, rate, floor, blind=blind)
                    for at, times in enumerate((1, 2)):
                        e = dyadic_difference(own, decoy, *pair, times=times)
                        covered[at] += e.low <= rate - times * floor <= e.high
                        width += (e.high - e.low) * (times == 1)
                found += [percent(share) for share in covered / trials]
                found += [f"{width / trials:.3f}"]
            yield [kind, sources, rate, floor, *found]

    header = ["decoy", "sources", "rate", "floor"]
    for judge in ("of a judge", "of one nearly blind to contexts"):
        header += [f"beyond {judge}", "rate − 2 · floor", "width of beyond"]
    table(header, rows(), len(cells), "decoys")


def corrected(trials: int) -> None:
    """Bias, coverage and width of rates corrected for two judges' errors."""
    print(f"### Corrected rates, 200 annotations: {trials} data sets a row\n")
    judges = ((0.8, 0.95), (0.6, 0.6))
    choices = ("any rows", "half of each verdict")
    cells = list(product(judges, (50, 100), choices, (0.02, 0.2, 0.5)))

    def rows() -> Iterator[list[object]]:
        for number, ((sensitivity, specificity), sources, choice, rate) in enumerate(cells):
            rng, index = np.random.default_rng([8, number]), np.repeat(np.arange(sources), 8)
            found: dict[str, list[Estimate]] = {"pp": [], "alone": []}
            raw = []
            for _ in range(trials):
                truth = rng.random(len(index)) < source_rates(rng, rate, 0.3, sources)[index]
                hits = rng.random(len(index)) < source_rates(rng, sensitivity, 0.1, sources)[index]
                alarms = (
                    rng.random(len(index)) < source_rates(rng, 1 - specificity, 0.1, sources)[index]
                )
                verdict = np.where(truth, hits, alarms).astype(float)
                at, chances = annotate(rng, verdict, choice)
                known, inclusion = np.full(len(index), np.nan), np.full(len(index), np.nan)
                known[at], inclusion[at] = truth[at], chances
                found["pp"].append(prediction_powered(verdict, known, index, inclusion=inclusion))
                found["alone"].append(
                    cluster_mean(truth[at], index[at], weights=1 / chances, proportion=True)
                )
                raw.append(verdict.mean())
            shown = []
            for name, results in found.items():
                value, low, high = np.array([(e.value, e.low, e.high) for e in results]).T
                there = ~np.isnan(value)
                error = value[there].std() / np.sqrt(there.sum())
                held = ((low <= rate) & (rate <= high))[there].mean()
                if name != "alone":
                    shown += [f"{value[there].mean():.3f} ± {error:.4f}", percent(held)]
                shown.append(f"{(high - low)[there].mean():.3f}")
            judge = f"{sensitivity}, {specificity}"
            yield [judge, sources, choice, rate, f"{np.mean(raw):.3f}", *shown]

    header = ["sensitivity, specificity", "sources", "annotated", "rate", "judge's rate"]
    header += ["prediction-powered", "coverage", "width", "width by annotations alone"]
    table(header, rows(), len(cells), "corrected")


def corners(trials: int) -> None:
    """Coverage where data often show no spread, so that a plain formula would be too certain."""
    print(f"### Corners: {trials} data sets a row\n")
    cells: list[tuple[str, Callable]] = [
        *(
            (f"recall, {what}", lambda rng, o=options: recall_on_a_sheet(rng, **o))
            for what, options in SHEETS.items()
        ),
        *(
            (f"corrected rate, {what}", lambda rng, o=options: corrected_sheet(rng, **o))
            for what, options in SHEETS.items()
        ),
        *(
            (
                f"balanced accuracy, {few} against {many} rows, recalls {right} and {wrong}",
                lambda rng, o=(few, many, right, wrong): accuracy_of(rng, *o),
            )
            for few, many in ((10, 40), (12, 60), (30, 30))
            for right, wrong in ((0.9, 0.95), (0.95, 0.9), (0.8, 0.8))
        ),
        *(
            (
                f"difference, {sources} sources, {100 * rare:g}% of them another kind",
                lambda rng, o=(sources, rare): symmetric(rng, *o),
            )
            for sources in (24, 50, 100)
            for rare in (0.01, 0.05, 0.1)
        ),
        *(
            (
                f"rate − 2 · floor, {sources} sources, {100 * accepting:g}% accept all",
                lambda rng, o=(sources, accepting): accepting_sources(rng, *o),
            )
            for sources in (12, 24, 60)
            for accepting in (0.02, 0.08, 0.15)
        ),
    ]

    def rows() -> Iterator[list[object]]:
        for number, (name, draw) in enumerate(cells):
            rng, covered, width, none = np.random.default_rng([12, number]), 0, 0.0, 0
            for _ in range(trials):
                e, truth = draw(rng)
                if np.isnan(e.low):
                    none += 1
                    continue
                covered += e.low - 1e-12 <= truth <= e.high + 1e-12
                width += e.high - e.low
            made = trials - none
            yield [name, percent(covered / made), f"{width / made:.3f}", none]

    table(["what", "coverage", "width", "without an interval"], rows(), len(cells), "corners")


def agreement(trials: int) -> None:
    """Coverage of Cohen's kappa with a cluster bootstrap."""
    runs = max(trials // 3, 20)
    print(f"### Cohen's κ of two raters, 4 labels, 2 rows a source: {runs} data sets a row\n")

    def raters(rng: np.random.Generator, sources: int) -> tuple[np.ndarray, np.ndarray]:
        """A source makes its rows easy or hard for the second rater."""
        first = rng.choice(4, size=2 * sources, p=[0.5, 0.3, 0.15, 0.05])
        right = rng.random(2 * sources) < np.repeat(rng.beta(2.0, 1.0, sources), 2)
        return first, np.where(right, first, rng.integers(4, size=2 * sources))

    first, second = raters(np.random.default_rng(9), 1_000_000)
    kappa = kappa_of(np.bincount(first * 4 + second, minlength=16).reshape(4, 4))

    def rows() -> Iterator[list[object]]:
        for number, sources in enumerate((30, 50, 100)):
            rng, covered = np.random.default_rng([9, number]), 0
            for _ in range(runs):
                first, second = raters(rng, sources)
                (e,) = cluster_bootstrap(
                    lambda counts: kappa_of(counts.reshape(-1, 4, 4)),
                    np.repeat(np.arange(sources), 2),
                    first * 4 + second,
                    number=16,
                    resamples=500,
                )
                covered += int(e.low <= kappa <= e.high)
            yield [sources, f"{kappa:.3f}", percent(covered / runs)]

    table(["sources", "κ", "coverage"], rows(), 3, "kappa")


def speed(_: int) -> None:
    """Seconds for 10,000 resamples of 1,000 sources."""
    rng, index = np.random.default_rng(10), np.repeat(np.arange(1000), 8)
    truth = rng.integers(8, size=8000)
    right, guesses = rng.random((3, 8000)) < 0.7, rng.integers(8, size=(3, 8000))
    raters = np.where(right, truth, guesses)
    cell = truth * 8 + raters[0]

    def of_tables(statistic: Callable) -> Callable:
        return lambda counts: statistic(counts.reshape(-1, 8, 8))

    cases: dict[str, tuple[Callable, np.ndarray]] = {
        "κ of 8 categories": (of_tables(kappa_of), cell),
    }
    print("### Speed: 10,000 resamples of 1,000 sources (8,000 rows), best of three\n")
    for name, (statistic, cell_of) in cases.items():
        spent = []
        for _ in range(3):
            begun = time.perf_counter()
            cluster_bootstrap(statistic, index, cell_of, resamples=10_000)
            spent.append(time.perf_counter() - begun)
        print(f"- {name}: {min(spent):.2f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # kB on Linux
    print(f"- largest memory of the whole process: {peak:.0f} MB\n", flush=True)


STUDY = (rates, zero_events, means, alarms, paired, decoys, corrected, corners, agreement, speed)
PARTS = {part.__name__: part for part in STUDY} | WHERE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the data sets")
    parser.add_argument("--only", choices=PARTS, help="one part of the study")
    args = parser.parse_args()
    begun, trials = time.perf_counter(), 100 if args.quick else 1000
    for name, part in PARTS.items():
        if args.only in (None, name):
            part(trials)
    print(
        f"{(time.perf_counter() - begun) / 60:.1f} minutes on one core of "
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}, SciPy {scipy.__version__}."
    )


if __name__ == "__main__":
    main()
