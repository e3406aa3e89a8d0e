"""Do the intervals hold what they promise, and the tests? A simulation study on clustered data.

    python -m benchmarks.coverage                 the whole study, a quarter of an hour on one core
    python -m benchmarks.coverage --quick         a tenth of the data sets
    python -m benchmarks.coverage --only rates    one part of it

Events are beta-binomial: each source has its own rate, with a given within-source correlation, and
8 rows; or 1, 2, 4, 8, 16 and 17 rows in turn, 8 on average. Figures are of the functions of
``ia_mech.stats`` as they come, unless a column names another method. Seeds are fixed. Markdown goes
to stdout, progress to stderr.
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
from ia_mech.stats.paired import sign_flip_p
from scipy.stats import binomtest

from benchmarks.coverage_data import (
    annotate,
    conditions,
    percent,
    rows_per_source,
    share_and_interval,
    skewed,
    source_rates,
    table,
)
from ia_mech.stats import (
    alpha_of,
    balanced_accuracy_of,
    cluster_counts,
    cluster_mean,
    cluster_statistic,
    cohen_kappa,
    detectable_difference,
    kappa_of,
    paired_difference,
    permutation_max,
    prediction_powered,
    rogan_gladen,
    zero_events_bound,
)


def rates(trials: int) -> None:
    """Coverage and mean width of intervals of one rate."""
    print(f"### One rate: {4 * trials} data sets a row ({trials} for the bootstraps)\n")
    methods = ("auto", "korn-graubard", "percentile", "bca")
    cells = list(product((24, 50, 100), (True, False), (0.2, 0.5), (0.02, 0.05, 0.2, 0.5)))

    def rows() -> Iterator[list[object]]:
        for number, (sources, equal, correlation, rate) in enumerate(cells):
            rng = np.random.default_rng([1, number])
            index = np.repeat(np.arange(sources), rows_per_source(sources, equal))
            covered, width = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0.0)
            for trial in range(4 * trials):
                values = (
                    rng.random(len(index)) < source_rates(rng, rate, correlation, sources)[index]
                )
                for method in methods[: 4 if trial < trials else 2]:
                    e = cluster_mean(values, index, proportion=True, method=method, resamples=1000)
                    covered[method] += e.low <= rate <= e.high
                    width[method] += e.high - e.low
            n = {m: 4 * trials if m in methods[:2] else trials for m in methods}
            yield [
                sources,
                "8" if equal else "1–17",
                correlation,
                rate,
                f"**{percent(covered['auto'] / n['auto'])}** ({width['auto'] / n['auto']:.3f})",
                *(f"{percent(covered[m] / n[m])} ({width[m] / n[m]:.3f})" for m in methods[1:]),
            ]

    table(["sources", "rows each", "correlation", "rate", *methods], rows(), len(cells), "rates")


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
    methods = ("auto", "percentile", "bca")

    def rows() -> Iterator[list[object]]:
        for number, (kind, sources, equal) in enumerate(cells):
            rng, (mean, draw) = np.random.default_rng([3, number]), kinds[kind]
            index = np.repeat(np.arange(sources), rows_per_source(sources, equal))
            covered = dict.fromkeys(methods, 0)
            for _ in range(trials):
                values = draw(rng, rng.normal(size=sources)[index], len(index))
                for method in methods:
                    e = cluster_mean(values, index, method=method, resamples=1000)
                    covered[method] += e.low <= mean <= e.high
            shares = [percent(covered[m] / trials) for m in methods]
            yield [kind, sources, "8" if equal else "1–17", *shares]

    table(["values", "sources", "rows each", *methods], rows(), len(cells), "means")


def alarms(trials: int) -> None:
    """False alarms of the paired test at three levels, down to few sources."""
    runs, levels = 10 * trials, (0.05, 0.01, 0.001)
    print(f"### Paired test under no difference: {runs} data sets a row\n")
    kinds = (0.02, 0.05, 0.2, 0.5, "log-normal")
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
    """Coverage of the paired difference; power at the detectable difference."""
    print(f"### Difference of two rates: {trials} data sets a row\n")
    pairs = ((0.0, 0.02), (0.02, 0.02), (0.02, 0.1), (0.05, 0.2), (0.2, 0.5))
    grid = list(product((24, 50, 100), ((1, 8), (8, 8)), pairs))
    methods = ("auto", "percentile", "bca")

    def intervals() -> Iterator[list[object]]:
        for number, (sources, n, (a, b)) in enumerate(grid):
            rng = np.random.default_rng([5, number])
            covered, width = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0.0)
            for _ in range(trials):
                data = conditions(rng, a, b, n, sources)
                for method in methods:
                    e = paired_difference(
                        *data, permutations=1, resamples=1000, method=method
                    ).difference
                    covered[method] += e.low <= a - b <= e.high
                    width[method] += e.high - e.low
            shares = [f"{percent(covered[m] / trials)} ({width[m] / trials:.3f})" for m in methods]
            yield [sources, f"{n[0]} and {n[1]}", f"{a} and {b}", *shares]

    header = ["sources", "rows each", "rates", "auto (MOVER)", *methods[1:]]
    table(header, intervals(), len(grid), "differences")

    print(f"### Power at the detectable difference (asked for 80%): {trials} data sets a row\n")

    def power() -> Iterator[list[object]]:
        for number, (sources, n, rate) in enumerate(designs):
            rng, found = np.random.default_rng([6, number]), 0
            null = [conditions(rng, rate, rate, n, sources) for _ in range(200)]
            size = float(np.nanmedian([detectable_difference(*data) for data in null]))
            for _ in range(trials):
                data = conditions(rng, rate + size, rate, n, sources)
                found += paired_difference(*data, permutations=1999).p <= 0.05
            yield [sources, f"{n[0]} and {n[1]}", rate, f"{size:.3f}", percent(found / trials)]

    designs = list(product((24, 50, 100), ((8, 1), (8, 8)), (0.02, 0.2, 0.5)))
    header = ["sources", "rows each", "rate of the second", "detectable difference", "found"]
    table(header, power(), len(designs), "power")


def maximum(trials: int) -> None:
    """Family-wise false alarms of the permutation test against the maximum."""
    runs = max(trials // 2, 20)
    print(f"### Permutation against the maximum of 30 layers: {runs} data sets\n")
    rng, groups, adjusted, raw = np.random.default_rng(7), np.repeat(np.arange(50), 3), 0, 0
    for _ in range(runs):
        layers = (rng.normal(size=(50, 30)) + rng.normal(size=(50, 1)))[groups]
        labels = (rng.permutation(50) < 25)[groups]

        def statistic(on: np.ndarray, layers: np.ndarray = layers) -> np.ndarray:
            return np.abs(layers[on].mean(0) - layers[~on].mean(0))

        test = permutation_max(statistic, labels, groups, permutations=199)
        adjusted += test.p_adjusted.min() <= 0.05
        raw += test.p_raw.min() <= 0.05
    ends = binomtest(adjusted, runs).proportion_ci(0.95, "exact")
    print(
        f"Any of 30 layers significant at 5% though none is: {percent(adjusted / runs)}% "
        f"(95% interval {percent(ends.low)} … {percent(ends.high)}); without adjusting "
        f"{percent(raw / runs)}%.\n",
        flush=True,
    )


def corrected(trials: int) -> None:
    """Bias and coverage of rates corrected for a judge with sensitivity 0.8, specificity 0.95."""
    print(
        f"### Corrected rates, judge with sensitivity 0.8 and specificity 0.95 on average, 200 "
        f"annotations: {trials} data sets a row\n"
    )
    cells = list(product((50, 100), ("any rows", "half of each verdict"), (0.02, 0.2, 0.5)))

    def rows() -> Iterator[list[object]]:
        for number, (sources, choice, rate) in enumerate(cells):
            rng, index = np.random.default_rng([8, number]), np.repeat(np.arange(sources), 8)
            found: dict[str, list[tuple[float, float, float]]] = {"rg": [], "pp": []}
            raw = []
            for _ in range(trials):
                truth = rng.random(len(index)) < source_rates(rng, rate, 0.3, sources)[index]
                hits = rng.random(len(index)) < source_rates(rng, 0.8, 0.1, sources)[index]
                alarms = rng.random(len(index)) < source_rates(rng, 0.05, 0.1, sources)[index]
                verdict = np.where(truth, hits, alarms).astype(float)
                at, inclusion = annotate(rng, verdict, choice)
                notes = {
                    "truth": truth[at].astype(float),
                    "truth_prediction": verdict[at],
                    "truth_sources": index[at],
                    "resamples": 500,
                    "clip": False,
                }
                rg = rogan_gladen(verdict, index, truth_weights=1 / inclusion, **notes)
                pp = prediction_powered(verdict, index, inclusion=inclusion, **notes)
                found["rg"].append((rg.value, rg.low, rg.high))
                found["pp"].append((pp.value, pp.low, pp.high))
                raw.append(verdict.mean())
            cells_of = []
            for results in found.values():
                value, low, high = np.array(results).T
                there = ~np.isnan(value)
                error = value[there].std() / np.sqrt(there.sum())
                held = ((low <= rate) & (rate <= high))[there].mean()
                cells_of += [f"{value[there].mean():.3f} ± {error:.4f}", percent(held)]
            undefined = percent(np.isnan(np.array(found["rg"])[:, 0]).mean())
            yield [sources, choice, rate, f"{np.mean(raw):.3f}", *cells_of, undefined]

    header = ["sources", "annotated", "rate", "judge's rate", "Rogan–Gladen", "coverage"]
    header += ["prediction-powered", "coverage", "R–G undefined, %"]
    table(header, rows(), len(cells), "corrected")


def agreement(trials: int) -> None:
    """Coverage of Cohen's kappa with a cluster bootstrap."""
    runs = max(trials // 3, 20)
    print(f"### Cohen's κ of two raters, 4 labels, 2 rows a source: {runs} data sets a row\n")

    def raters(rng: np.random.Generator, sources: int) -> tuple[np.ndarray, np.ndarray]:
        """A source makes its rows easy or hard for the second rater."""
        first = rng.choice(4, size=2 * sources, p=[0.5, 0.3, 0.15, 0.05])
        right = rng.random(2 * sources) < np.repeat(rng.beta(2.0, 1.0, sources), 2)
        return first, np.where(right, first, rng.integers(4, size=2 * sources))

    kappa = cohen_kappa(*raters(np.random.default_rng(9), 1_000_000))

    def rows() -> Iterator[list[object]]:
        for number, sources in enumerate((30, 50, 100)):
            rng, covered = np.random.default_rng([9, number]), 0
            for _ in range(runs):
                first, second = raters(rng, sources)
                e = cluster_counts(
                    lambda counts: kappa_of(counts.reshape(-1, 4, 4)),
                    first * 4 + second,
                    np.repeat(np.arange(sources), 2),
                    patterns=16,
                    resamples=500,
                )
                covered += e.low <= kappa <= e.high
            yield [sources, f"{kappa:.3f}", percent(covered / runs)]

    table(["sources", "κ", "coverage"], rows(), 3, "kappa")


def speed(_: int) -> None:
    """Seconds for 10,000 resamples of 1,000 sources."""
    rng, index = np.random.default_rng(10), np.repeat(np.arange(1000), 8)
    values, truth = rng.random(8000), rng.integers(8, size=8000)
    right, guesses = rng.random((3, 8000)) < 0.7, rng.integers(8, size=(3, 8000))
    raters = np.where(right, truth, guesses)
    cell = truth * 8 + raters[0]
    patterns, pattern = np.unique(raters.T, axis=0, return_inverse=True)

    def counted(statistic: Callable, of: np.ndarray, method: str) -> Callable:
        return lambda: cluster_counts(statistic, of, index, resamples=10_000, method=method)

    cases: dict[str, Callable] = {}
    for method in ("percentile", "bca"):
        cases[f"mean, {method}"] = lambda method=method: cluster_mean(
            values, index, resamples=10_000, method=method
        )
        for name, of_tables in (("κ", kappa_of), ("balanced accuracy", balanced_accuracy_of)):
            cases[f"{name} of 8 categories, {method}"] = counted(
                lambda c, of_tables=of_tables: of_tables(c.reshape(-1, 8, 8)), cell, method
            )
        cases[f"α of three raters, {len(patterns)} patterns of ratings, {method}"] = counted(
            lambda c: alpha_of(c, patterns, 8000), pattern.reshape(-1), method
        )
    print("### Speed: 10,000 resamples of 1,000 sources (8,000 rows), best of three\n")
    for name, case in cases.items():
        print(f"- {name}: {min(seconds(case) for _ in range(3)):.2f} s")
    slow = seconds(
        lambda: cluster_statistic(
            lambda c, w: cohen_kappa(c["a"], c["b"], w),
            {"a": truth, "b": raters[0]},
            index,
            resamples=1000,
        )
    )
    print(
        f"- for comparison, κ by `cluster_statistic`, one call per resample: {10 * slow:.1f} s "
        "(from 1,000 resamples, once)"
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # kB on Linux
    print(f"- largest memory of the whole process: {peak:.0f} MB\n", flush=True)


def seconds(call: Callable) -> float:
    """How long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


PARTS = {
    part.__name__: part
    for part in (rates, zero_events, means, alarms, paired, maximum, corrected, agreement, speed)
}


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
