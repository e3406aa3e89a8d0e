"""What temperature does to the user turn, and how deep greedy decoding hides it.

Usage::

    python -m experiments.temperature_sweep cache/RUN
    python -m experiments.temperature_sweep cache/RUN-A cache/RUN-B --judge rules --out sweep/
"""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.runner import Experiment, intervals, result_of

if TYPE_CHECKING:
    from ia_mech.results import Result
    from ia_mech.run import Run


def run(args: argparse.Namespace, runs: "list[Run]", folder: Path) -> "Result":
    """Read, measure, estimate and draw."""
    from experiments.tables import stated
    from experiments.temperature_sweep import show
    from experiments.temperature_sweep.analyse import RATE, estimates
    from experiments.temperature_sweep.measure import measure
    from experiments.temperature_sweep.read import read
    from ia_mech.display import Bar

    sweep = read(runs, args.judge)
    bar = Bar()
    try:
        measured, notes = measure(sweep, args.temperatures, args.positions, bar)
    finally:
        bar.stop()
    found = estimates(measured, **intervals(args))
    # Keys that hold across runs are for joining here; a reader has the names.
    turns = measured.hidden.drop(columns=["source", "context"])
    return result_of(
        runs,
        sweep.gate,
        estimates=found,
        tables=show.tables(found, args.level),
        figures=show.figures(found, runs[0].model["name"], sweep.gate),
        data={"turns": turns},
        notes=notes,
        sentence=stated(
            "share of turns that the judge calls genuine follow-ups",
            found[found["quantity"] == RATE],
        ),
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """``--temperatures`` and ``--positions``."""
    parser.add_argument(
        "--temperatures",
        nargs="+",
        type=temperature,
        metavar="T",
        help="of the first-token curves (default: 0.3, 0.4 … 1.5, 1.75, 2 and the sampled ones)",
    )
    parser.add_argument(
        "--positions",
        nargs="+",
        metavar="NAME",
        help="of the logit lens (default: all that were kept)",
    )


def temperature(text: str) -> float:
    """A temperature that a distribution can have, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.01 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature from 0.01 to 100")
    return value


EXPERIMENT = Experiment(
    name="temperature_sweep",
    description="""\
What does temperature do to the user turn, and how deep does greedy decoding hide follow-ups?
From judged runs and the model's lens (its final norm and unembedding); no model is loaded.

rates        follow-up rate and failures per temperature, and their differences from greedy
first token  its distribution at any temperature, from the header's logits
hidden       where greedy leaves sampled turns: token, rank, probability, gap in nats
references   at which temperature users' real follow-ups are likeliest
logit lens   from which layer on greedy's opening is ahead of follow-ups' openings""",
    written="turns.parquet (where greedy leaves each sampled turn), rates, first_token, hidden and "
    "lens (PNG, SVG, PDF)",
    run=run,
    add_flags=add_flags,
    perturbed=True,  # they are left out
    drawn="resampling and sign flips",
)
build_parser, main = EXPERIMENT.build_parser, EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
