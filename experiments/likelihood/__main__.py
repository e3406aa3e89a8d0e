"""Tables and figures of how likely users' real follow-ups are, from stored scores.

Usage::

    python -m experiments.likelihood cache/RUN
    python -m experiments.likelihood cache/RUN-A cache/RUN-B --out tables/
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
    """Read, estimate and draw."""
    from experiments.likelihood import show
    from experiments.likelihood.analyse import estimates
    from experiments.likelihood.read import read
    from experiments.tables import stated

    scored = read(runs)
    found = estimates(scored, **intervals(args))
    of_response = found[found["of"] == "response"]
    return result_of(
        runs,
        None,
        estimates=found,
        tables=show.tables(found, args.level),
        figures=show.figures(found, runs[0].model["name"]),
        notes=scored.notes,
        sentence=stated(
            "bits by which users' real follow-ups are likelier after their response than after "
            "swapped ones",
            of_response[of_response["quantity"] == "contrast, bits"],
        ),
        control=stated(
            "the same of another conversation's follow-up",
            of_response[of_response["quantity"] == "control's contrast, bits"],
        ),
    )


EXPERIMENT = Experiment(
    name="likelihood",
    description="""\
How likely is what users really said next, and how much of that does the response account for?
From the scores that python -m ia_mech.sample stored; no language model is loaded.

likelihood   log p of the real follow-up at many temperatures, and where greedy decoding leaves it
contrasts    bits in favour of the context's own response over swapped ones, an empty one and none,
             beside a control (another conversation's follow-up) and a placebo
rivals       how often the follow-up is likelier than a repetition, a closing or your candidates""",
    written="temperature_curve and contrasts (PNG, SVG, PDF)",
    run=run,
    judged=False,
)
build_parser, main = EXPERIMENT.build_parser, EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
