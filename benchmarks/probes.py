"""How long probing takes: a whole analysis, its fits against scikit-learn's, and its null.

    python -m benchmarks.probes                    a few minutes on two cores
    python -m benchmarks.probes --large --write    also d = 4096; the output goes to probes.md

All in one process, on hidden states without a signal: Gaussian, with singular values that fall
geometrically from 30 to 0.03; and outcomes of 24 turns, every context a source of its own:

- the default analysis (``probes.analysis.analyse``), with controls as wide as real ones; with
  ``--large`` also at d = 4096 on two layers, scaled up to 33;
- the nested logistic fits of a few cells against the loop over folds and penalties that one would
  write with scikit-learn: same splits, penalties, centring and scale; contexts doubled, weighed by
  counts of positives and negatives. An outer and an inner fold leave out the same contexts
  whichever is which: ten of the plain loop's twenty inner splits differ (all "equal fits" counts);
- what permutations cost in closed form, and what refitting logistic regression would.

The analysis is timed by the clock; fits and permutations, on one thread and taking turns, in
processor time. What was scaled up, not measured, is marked "extrapolated".
"""

import argparse
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from pathlib import Path
from string import ascii_lowercase
from time import process_time

import numpy as np
import scipy
import sklearn
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from ia_mech.display import Quiet
from probes.analysis import AnalysisSettings, analyse
from probes.controls import Baseline, Controls
from probes.fit.folds import make_folds, permutations
from probes.fit.nested_cv import Design, cross_validate, fit
from probes.fit.solvers import Fit, compact, logistic_path, project
from probes.targets import Outcome

RESULTS = Path(__file__).with_suffix(".md")
TURNS, REFITTED, LARGE_LAYERS = 24, 3, 2  # of a context; permutations refitted; layers timed
DEFAULTS = {"contexts": 500, "width": 576, "layers": 31, "positions": 5, "permutations": 1000}
DEFAULTS |= {"threads": 2, "peer-cells": 3}
PEERS: dict[str, dict] = {
    "lbfgs as it comes (tol=1e-4), max_iter=1000": {"max_iter": 1000},
    "lbfgs, tol=1e-8": {"tol": 1e-8, "max_iter": 100_000},
    "newton-cholesky, tol=1e-8": {"solver": "newton-cholesky", "tol": 1e-8, "max_iter": 1000},
}


@dataclass(frozen=True)
class RandomStates:
    """Hidden states that are drawn when they are read; a layer is the same each time."""

    contexts: int
    width: int
    layers: Sequence[int]
    positions: Sequence[str]

    def layer(self, layer: int) -> np.ndarray:
        """``[contexts, positions, width]`` float32."""
        shape = self.contexts, len(self.positions), self.width
        normal = np.random.default_rng([1, layer]).standard_normal(shape, dtype=np.float32)
        return normal * np.geomspace(30, 0.03, self.width, dtype=np.float32)

    def ends(self, layer: int) -> np.ndarray:
        """``[contexts, 2 × width]``."""
        shape = self.contexts, 2 * self.width
        return np.random.default_rng([4, layer]).standard_normal(shape, dtype=np.float32)

    def outcome(self) -> Outcome:
        """Rates around 0.3 that have nothing to do with the states."""
        rng = np.random.default_rng(2)
        positives = rng.binomial(TURNS, expit(rng.normal(-1, 1, self.contexts)))
        return Outcome.from_counts(
            positives, np.full(self.contexts, TURNS), np.arange(self.contexts)
        )

    def controls(self) -> Controls:
        """As wide as real ones, and as many."""
        rng = np.random.default_rng(3)
        text = {"text": 100, "lengths": 7, "dataset": 4}
        own, output = (
            [Baseline(name, rng.normal(size=(self.contexts, d)), "") for name, d in widths.items()]
            for widths in (text, {"output": self.width, "summaries": 8})
        )
        return Controls(own, output)


class Phases(Quiet):
    """A progress that notes when phases begin, and the end."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, float]] = []

    def start(self, phase: str, total: int, **_) -> None:
        print(f"{phase}: {total} steps", file=sys.stderr)
        self.marks.append((phase, time.perf_counter()))

    def stop(self) -> None:
        self.start("end", 0)


def whole(every: RandomStates, layers: int, settings: AnalysisSettings) -> str:
    """The analysis of so many layers, scaled up to all if they are fewer."""
    hidden, phases, times = replace(every, layers=range(layers)), Phases(), len(every.layers)
    outcome, controls, begun = hidden.outcome(), hidden.controls(), time.perf_counter()
    analyse(hidden, outcome, controls, settings, phases)
    total = scaled = time.perf_counter() - begun
    rows = []
    for (phase, started), (_, ended) in pairwise(phases.marks):
        spent = ended - started
        of_all = spent if phase == "controls" else spent / layers * times
        scaled += of_all - spent
        rows.append([f"of it {phase}", f"{spent:.1f} s", f"{of_all / 60:.1f} min"])
    rows.insert(0, ["whole analysis", f"{total:.1f} s", f"{scaled / 60:.1f} min"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # kB on Linux
    rows.append(["largest memory of the process so far", f"{peak:.2f} GB", ""])
    size = f"{times} × {len(every.positions)} cells, {len(outcome):,} contexts, d = {every.width}"
    size += f", {settings.permutations:,} permutations, {settings.workers} threads"
    last = f"all {times} layers{', **extrapolated**' if layers < times else ''}"
    return table(f"The default analysis: {size}", ["", f"{layers} layers, measured", last], rows)


@dataclass(frozen=True)
class Loop:
    """Nested fits: seconds, those of decompositions (ours) or repeated splits (plain) among them,
    and weights by folds left out and penalty."""

    total: float
    shared: float
    weights: dict[tuple, np.ndarray]


def ours(features: np.ndarray, design: Design) -> Loop:
    """The fits as ``probes.fit.nested_cv`` makes them."""
    begun, outcome, all_folds = process_time(), design.outcome, range(design.fold_count)
    states, pairs = compact(features), list(combinations(all_folds, 2))
    projections = {
        folds: project(states, design.rows_outside(*folds), outcome.runs)
        for folds in [*pairs, *((fold,) for fold in all_folds)]
    }
    between = process_time()
    fitted: dict[tuple, Fit] = {}
    losses = np.zeros((design.fold_count, len(design.penalties)))
    for pair in pairs:
        test, split = design.rows_of(*pair), projections[pair]
        labels = (
            column[split.rows] for column in (outcome.runs, outcome.positives, outcome.trials)
        )
        path = logistic_path(split.train, *labels, design.penalties, 1)
        for at, found in enumerate(path):
            lost = loss(found.scores(split.at(test), outcome.runs[test]), outcome, test)
            for fold, other in (pair, pair[::-1]):
                losses[fold, at] += lost[design.folds[test] == other].sum()
            fitted[pair, design.penalties[at]] = found
    for fold in all_folds:
        split, penalty = projections[fold,], design.penalties[losses[fold].argmin()]
        fitted[(fold,), penalty] = fit(split, design, penalty)
    total = process_time() - begun
    on_states = np.linalg.lstsq(states, features - features.mean(0), rcond=None)[0]
    weights = {
        key: on_states.T @ (projections[key[0]].axes @ found.weights)
        for key, found in fitted.items()
    }
    return Loop(total, between - begun, weights)


def plain(features: np.ndarray, design: Design, options: dict) -> Loop:
    """The fits as one would write them with scikit-learn."""
    begun, again, weights = process_time(), 0.0, {}
    outcome, all_folds, wide = design.outcome, range(design.fold_count), features.astype(float)

    def held_out(left_out: tuple[int, ...], fold: int, penalties: Sequence[float]) -> list[float]:
        """Fit once per penalty; the losses in a fold."""
        train, test, losses = design.rows_outside(*left_out), design.rows_of(fold), []
        centred = wide - wide[train].mean(0)
        scale = 1 / np.sqrt((centred[train] ** 2).sum(1).mean())
        rows, labels = np.vstack([centred[train] * scale] * 2), np.repeat([1, 0], len(train))
        counts = np.concatenate([outcome.positives[train], outcome.negatives[train]])
        counts /= outcome.trials[train].mean()
        for penalty in penalties:
            model = LogisticRegression(C=1 / penalty, **options).fit(rows, labels, counts)
            weights[left_out, penalty] = model.coef_[0] * scale
            scores = model.decision_function(centred[test] * scale)
            losses.append(loss(scores, outcome, test).sum())
        return losses

    for fold in all_folds:
        losses = np.zeros(len(design.penalties))
        for other in sorted(set(all_folds) - {fold}):
            started = process_time()
            losses += held_out(tuple(sorted([fold, other])), other, design.penalties)
            again += (process_time() - started) * (fold > other)
        held_out((fold,), fold, [design.penalties[losses.argmin()]])
    return Loop(process_time() - begun, again, weights)


def loss(scores: np.ndarray, outcome: Outcome, rows: np.ndarray) -> np.ndarray:
    """Of each row, summed over its turns."""
    return outcome.trials[rows] * np.logaddexp(0, scores) - outcome.positives[rows] * scores


def fits(cells: list[np.ndarray], design: Design) -> str:
    """Our logistic fits of some cells against scikit-learn's."""
    ours(cells[0], design)  # warm-up
    found: dict[str, list[tuple[Loop, Loop]]] = {name: [] for name in PEERS}
    for cell, (name, options) in product(cells, PEERS.items()):
        print(f"fits: {name}", file=sys.stderr)
        found[name].append((ours(cell, design), plain(cell, design, options)))
    own = np.median([mine.total for pairs in found.values() for mine, _ in pairs])
    rows = [["ours", f"{own:.2f}", "1", "1", ""]]
    for name, pairs in found.items():
        far = max(
            np.linalg.norm(theirs.weights[key] - weights) / np.linalg.norm(weights)
            for mine, theirs in pairs
            for key, weights in mine.weights.items()
            if key in theirs.weights  # they may have chosen another penalty
        )
        plainly = [theirs.total / mine.total for mine, theirs in pairs]
        equal = [(theirs.total - theirs.shared) / mine.total for mine, theirs in pairs]
        spent = np.median([theirs.total for _, theirs in pairs])
        rows.append([name, f"{spent:.2f}", f"**{spread(plainly)}**", spread(equal), f"{far:.1e}"])
    header = ["", "s per cell", "plain loop / ours", "equal fits / ours", "weights differ by up to"]
    title = f"Nested logistic fits: {len(cells)} cells, one thread, processor time"
    return table(title, header, rows)


def null(cells: list[np.ndarray], design: Design, permuted: Design, every: int) -> str:
    """The permutations' cost, in closed form and by logistic regression."""
    count, closed = len(permuted.label_rows) - 1, []
    for features in cells:
        begun = process_time()
        cross_validate(features, permuted)
        between = process_time()
        cross_validate(features, design)
        closed.append(2 * between - begun - process_time())
    cost = float(np.median(closed))
    refitted = permuted.label_rows[1 : 1 + REFITTED]
    drawn = [replace(design, outcome=design.outcome.take(taken)) for taken in refitted]
    spent = {"ours": [loop.total - loop.shared for loop in (ours(cells[0], d) for d in drawn)]}
    for name, options in PEERS.items():
        print(f"null: {name}", file=sys.stderr)
        spent[name] = [plain(cells[0], d, options).total for d in drawn]
    timed = f"1 cell × {len(drawn)}, **extrapolated**"
    costs = [("closed form", f"{len(cells)} cells × {count:,}", cost)]
    costs += [(f"logistic, {name}", timed, float(np.mean(s)) * count) for name, s in spent.items()]
    rows = [
        [name, timed, f"{each:,.2f} s", f"{each * every / 3600:,.3f} h", f"{each / cost:,.0f}"]
        for name, timed, each in costs
    ]
    header = ["", "timed", "a cell", f"{every} cells, **extrapolated**", "to the closed form"]
    return table(f"What {count:,} permutations add, one thread, processor time", header, rows)


def spread(ratios: list[float]) -> str:
    return f"{np.median(ratios):.1f} ({min(ratios):.1f} … {max(ratios):.1f})"


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    lines = [["", *cells, ""] for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join([f"### {title}\n", *(" | ".join(line).strip() for line in lines), ""])


def machine(load: float) -> str:
    """Where and with what; the load tells whether others were at work."""
    cpu = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[0]
    return (
        f"{time.strftime('%Y-%m-%d')}, {cpu}, {os.cpu_count()} cores, load average {load:.1f} "
        f"before and {os.getloadavg()[0]:.1f} after; Python {platform.python_version()}, NumPy "
        f"{np.__version__}, SciPy {scipy.__version__}, scikit-learn {sklearn.__version__}. States "
        "are float32, fits float64, products of the closed form float32.\n"
    )


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--large", action="store_true", help="also d = 4096")
    parser.add_argument("--write", action="store_true", help="the output to probes.md, too")
    args = parser.parse_args()
    settings = AnalysisSettings(permutations=args.permutations, workers=args.threads)
    layers, positions = range(args.layers), ascii_lowercase[: args.positions]
    hidden = RandomStates(args.contexts, args.width, layers, positions)
    load, said = os.getloadavg()[0], [whole(hidden, args.layers, settings)]
    if args.large:
        said.append(whole(RandomStates(1000, 4096, range(33), "abcde"), LARGE_LAYERS, settings))
    cells = [hidden.layer(layer)[:, 0] for layer in range(args.peer_cells)]
    outcome, every = hidden.outcome(), len(layers) * len(positions)
    design = Design.from_outcome(outcome, folds := make_folds(outcome))
    permuted = Design.from_outcome(outcome, folds, permutations(outcome, folds, args.permutations))
    with threadpool_limits(1):
        said += [fits(cells, design), null(cells, design, permuted, every)]
    print("\n".join(said := [machine(load), *said]))
    if args.write:
        command = " ".join(["python -m benchmarks.probes", *sys.argv[1:]])
        head = f"# Speed of the probes\n\nOutput of `{command}`:\n"
        RESULTS.write_text("\n".join([head, *said]), encoding="utf-8")


if __name__ == "__main__":
    main()
