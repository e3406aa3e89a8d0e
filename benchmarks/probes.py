"""How long probing takes: a whole analysis, its fits against scikit-learn's, and its permutations.

    nice python -m benchmarks.probes --write     a few minutes; the output goes to probes.md

The hidden states are Gaussian without a signal, with singular values that fall geometrically from
30 to 0.03. Every context is a source of its own and has 24 turns. All times are processor times of
all threads together, which other work on the machine disturbs little.

- The analysis (``probes.analysis.analyse``) of some layers, with controls as wide as real ones.
- Nested cross-validation of one cell, against the loop over folds and penalties that one would
  write with scikit-learn: same splits, penalties, centring and scale; each context stands twice,
  weighted by its positive and its negative turns. Ours also measures the scores' unreliability,
  which takes ten more fits.
- What permutations add to a cell, in closed form.
"""

import argparse
import os
import platform
import re
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import process_time

import numpy as np
import scipy
import sklearn
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from ia_mech.display import Quiet
from probes.analysis import AnalysisSettings, Arrays, analyse
from probes.controls import Baseline, Controls
from probes.fit.folds import make_folds, permutations
from probes.fit.nested_cv import Design, cross_validate
from probes.targets import Outcome

RESULTS = Path(__file__).with_suffix(".md")
CONTEXTS, WIDTH, LAYERS, POSITIONS, ALL_LAYERS = 500, 576, 4, 5, 31
TURNS, PERMUTATIONS, CELLS = 24, 1000, 3
SCIKIT: dict[str, dict] = {
    "lbfgs as it comes (tol=1e-4), max_iter=1000": {"max_iter": 1000},
    "lbfgs, tol=1e-8": {"tol": 1e-8, "max_iter": 100_000},
}


@dataclass
class Phases(Quiet):
    """A progress bar that notes when phases begin and end."""

    marks: list[tuple[str, float]]

    def start(self, phase: str, total: int, **_) -> None:
        print(f"{phase}: {total} steps", file=sys.stderr)
        self.marks.append((phase, process_time()))

    def stop(self) -> None:
        self.start("end", 0)


def whole(hidden: Arrays, outcome: Outcome, rng: np.random.Generator) -> str:
    """The time of each phase of the analysis, scaled up to all layers where it grows with them."""

    def drawn(widths: dict[str, int]) -> list[Baseline]:
        return [Baseline(name, rng.normal(size=(CONTEXTS, d)), "") for name, d in widths.items()]

    text, output = {"text": 100, "lengths": 7, "dataset": 4}, {"output": WIDTH, "summaries": 8}
    phases = Phases([])
    settings = AnalysisSettings(permutations=PERMUTATIONS, workers=2)
    analyse(hidden, outcome, Controls(drawn(text), drawn(output)), settings, phases)
    rows = []
    for (phase, started), (_, ended) in pairwise(phases.marks):
        more = ALL_LAYERS / LAYERS if phase == "probes" else 1
        spent = ended - started
        rows.append([phase, f"{spent:.0f} s", f"{spent * more / 60:.1f} min"])
    size = f"{CONTEXTS} contexts, {POSITIONS} positions, d = {WIDTH}, {PERMUTATIONS} permutations"
    header = ["", f"{LAYERS} layers, measured", f"{ALL_LAYERS} layers, **extrapolated**"]
    return table(f"The analysis: {size}", header, rows)


def plain(features: np.ndarray, design: Design, options: dict) -> np.ndarray:
    """``[contexts]`` out-of-fold log-odds by the loop that one would write with scikit-learn."""
    outcome, scores = design.outcome, np.empty(len(features))

    def held_out(train: np.ndarray, test: np.ndarray, penalty: float) -> np.ndarray:
        centred = features - features[train].mean(0)
        scale = 1 / np.sqrt((centred[train] ** 2).sum(1).mean())
        rows, labels = np.vstack([centred[train] * scale] * 2), np.repeat([1, 0], len(train))
        counts = np.concatenate([outcome.positives[train], outcome.negatives[train]])
        counts /= outcome.trials[train].mean()
        model = LogisticRegression(C=1 / penalty, **options).fit(rows, labels, counts)
        return model.decision_function(centred[test] * scale)

    for fold in range(design.fold_count):
        losses = np.zeros(len(design.penalties))
        for other in sorted({*range(design.fold_count)} - {fold}):
            test = design.rows_of(other)
            k, n = outcome.positives[test], outcome.trials[test]
            for at, penalty in enumerate(design.penalties):
                found = held_out(design.rows_outside(fold, other), test, penalty)
                losses[at] += (n * np.logaddexp(0, found) - k * found).sum()
        test, best = design.rows_of(fold), design.penalties[losses.argmin()]
        scores[test] = held_out(design.rows_outside(fold), test, best)
    return scores


def cells(hidden: Arrays, outcome: Outcome) -> str:
    """A cell by itself: ours, with permutations, and by scikit-learn."""
    folds = make_folds(outcome)
    drawn = permutations(outcome, folds, PERMUTATIONS)
    permuted = Design.from_outcome(outcome, folds, drawn)
    design, spent = permuted.observed(), {}
    differ = dict.fromkeys(SCIKIT, 0.0)
    cross_validate(hidden.at(0, "a"), design)  # warm-up
    for position in hidden.positions[:CELLS]:
        states = hidden.at(0, position).astype(float)
        begun = process_time()
        ours = cross_validate(states, design).scores
        between = process_time()
        cross_validate(states, permuted)
        spent.setdefault("ours", []).append(between - begun)
        spent.setdefault(f"ours, {PERMUTATIONS} permutations", []).append(process_time() - between)
        for name, options in SCIKIT.items():
            print(f"scikit-learn: {name}", file=sys.stderr)
            begun = process_time()
            theirs = plain(states, design, options)
            spent.setdefault(name, []).append(process_time() - begun)
            differ[name] = max(differ[name], float(np.abs(theirs - ours).max() / ours.std()))
    own = np.median(spent["ours"])
    rows = [
        [name, f"{np.median(s):.2f} s", f"{np.median(s) / own:.1f}", far]
        for name, s in spent.items()
        for far in [f"{differ[name]:.0e}" if name in differ else ""]
    ]
    header = ["", "a cell", "to ours", "scores differ by up to, in standard deviations"]
    return table(f"A layer and position by itself, median of {CELLS}, one thread", header, rows)


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    lines = [["", *cells, ""] for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join([f"### {title}\n", *(" | ".join(line).strip() for line in lines), ""])


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--write", action="store_true", help="the output to probes.md, too")
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    states = rng.standard_normal((LAYERS, CONTEXTS, POSITIONS, WIDTH), dtype=np.float32)
    states *= np.geomspace(30, 0.03, WIDTH, dtype=np.float32)
    ends = rng.standard_normal((LAYERS, CONTEXTS, 2 * WIDTH), dtype=np.float32)
    hidden = Arrays(states, "abcde", ends)
    positives = rng.binomial(TURNS, expit(rng.normal(-1, 1, CONTEXTS)))
    outcome = Outcome.from_counts(positives, np.full(CONTEXTS, TURNS), np.arange(CONTEXTS))
    cpu = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[0]
    said = [
        f"{time.strftime('%Y-%m-%d')}, {cpu}, load average {os.getloadavg()[0]:.1f}; Python "
        f"{platform.python_version()}, NumPy {np.__version__}, SciPy {scipy.__version__}, "
        f"scikit-learn {sklearn.__version__}. Processor time of all threads together.\n",
        whole(hidden, outcome, rng),
    ]
    with threadpool_limits(1):
        said.append(cells(hidden, outcome))
    print("\n".join(said))
    if args.write:
        head = "# Speed of the probes\n\nOutput of `python -m benchmarks.probes --write`:\n"
        RESULTS.write_text("\n".join([head, *said]), encoding="utf-8")


if __name__ == "__main__":
    main()
