"""Perturb the conversations of sampled runs, sample again, and compare.

Usage::

    python -m experiments.perturbations cache/RUN
    python -m experiments.perturbations cache/RUN-A cache/RUN-B --limit 40 --out cache/perturbed
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.runner import Experiment, add_dry_run, intervals, result_of
from ia_mech.cli import whole_from

if TYPE_CHECKING:
    from ia_mech.results import Result
    from ia_mech.run import Run


def run(args: argparse.Namespace, runs: "list[Run]", folder: Path) -> "Result | None":
    """Perturb, sample, judge, estimate and draw; only show the plan with ``--dry-run``."""
    from experiments.perturbations import sample, show
    from experiments.perturbations.analyse import estimates, verdicts
    from experiments.perturbations.conditions import CONDITIONS, known_conditions
    from experiments.perturbations.read import compare, read_base
    from ia_mech.rates.load import NO_ANNOTATOR, read_runs

    names = known_conditions(args.conditions or list(CONDITIONS))
    grid = {"limit": args.limit, "temperatures": args.temperatures, "samples": args.samples}
    base = read_base(runs, **grid)
    gate = read_runs(runs, args.judge, NO_ANNOTATOR).gate  # before hours of sampling
    conversations, left_out, notes = sample.prepare(base, names)
    if args.dry_run:
        show.plan(conversations, base, notes, folder)
        return None
    perturbed = sample.sampled(base, conversations, folder)
    sample.judged(perturbed, gate.judge, base)
    compared = compare(base, perturbed, gate.judge, left_out)
    found = estimates(compared, **intervals(args))
    figures = show.figures(found, perturbed.model["name"], gate)
    if "displacement" not in figures:
        notes.append("no displacement: a dataset needs two sources to say how far apart they lie.")
    return result_of(
        [*runs, perturbed],
        gate,
        estimates=found,
        tables=show.tables(found, args.level),
        figures=figures,
        notes=notes + compared.notes,
        sentence=" ".join(verdicts(found)),
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which conditions, on how much."""
    parser.add_argument(
        "--conditions", nargs="+", metavar="NAME", help="which to make (default: all)"
    )
    parser.add_argument(
        "--limit", type=whole_from(1), metavar="N", help="conversations per run (default: all)"
    )
    parser.add_argument(
        "--temperatures",
        nargs="+",
        type=float,
        metavar="T",
        help="besides greedy (default: 1, if the runs have it)",
    )
    parser.add_argument(
        "--samples",
        type=whole_from(1),
        metavar="N",
        help="per temperature (default: 4, or the run's)",
    )
    add_dry_run(parser, "sampled")


EXPERIMENT = Experiment(
    name="perturbations",
    description="""\
Does the user turn react to the response, or is it role play that would come anyway? Each
conversation of judged runs is changed in one respect and sampled again with the same random
numbers; every conversation appears under every condition:

truncate truncate_mid ask remove swap contradict neutral shuffle   the response is changed
header_only header_assistant header_no_turn_end header_no_separator   the header is changed

Interrupted, the same command continues. The rules judge judges at once; for another judge the
message says which command to run.""",
    written="conversations.jsonl (as changed), run/ (a run like any other), rates, "
    "profile, references and displacement (PNG, SVG, PDF)",
    run=run,
    add_flags=add_flags,
    beside="perturbed",
    kept="what was sampled is kept; the same command goes on from there",
)
build_parser, main = EXPERIMENT.build_parser, EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
