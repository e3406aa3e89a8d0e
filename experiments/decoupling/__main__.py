"""Tables and figures of task accuracy beside follow-up rate, from judged runs.

Usage::

    python -m experiments.decoupling cache/RUN
    python -m experiments.decoupling cache/RUN-OF-MODEL-A cache/RUN-OF-MODEL-B --judge rules
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.runner import Experiment, intervals, result_of

if TYPE_CHECKING:
    from ia_mech.results import Result
    from ia_mech.run import Run


def run(args: argparse.Namespace, runs: "list[Run]", folder: Path) -> "Result":
    """Read, verify, estimate and draw."""
    from experiments.decoupling import show
    from experiments.decoupling.analyse import DIFFERENCE, EVERY, estimates, remarks
    from experiments.decoupling.read import read
    from experiments.tables import stated

    measured = read(runs, args.judge)
    found = estimates(measured, **intervals(args))
    names = " · ".join(measured.models) if len(measured.models) < 4 else "several models"
    return result_of(
        runs,
        measured.gate,
        estimates=found,
        tables=show.tables(found, args.level),
        figures=show.figures(found, names, measured.gate),
        data={"responses": measured.responses},
        notes=measured.notes + remarks(found),
        sentence=stated(
            "follow-up rate after right responses less that after wrong ones",
            found[(found["quantity"] == DIFFERENCE) & (found["of"] == EVERY)],
            null=0.0,
            level=args.level,
        ),
    )


EXPERIMENT = Experiment(
    name="decoupling",
    description="""\
Does a model that solves a task also follow up on it as a user would? Accuracy of the responses that
the model wrote, and follow-up rate of its user turns after them, on the same prompts. From judged
runs (python -m ia_mech.sample --response generate, python -m ia_mech.judge run).

accuracy     against gold answers (GSM8K, MATH) or checkable instructions (IFEval, IFBench)
follow-up    share of user turns that are genuine follow-ups, per temperature
association  within a model: the rate after right responses less that after wrong ones, and AUROC
over models  rank correlation of accuracy and rate, with four models or more""",
    written="responses.parquet (every response and whether it is right: read some), scatter and "
    "association (PNG, SVG, PDF)",
    run=run,
    several_models=True,
    perturbed=True,  # they are left out
    drawn="resampling and permutations",
)
build_parser, main = EXPERIMENT.build_parser, EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
