"""Tables and figures of task accuracy beside follow-up rate, offline.

Usage::

    python -m experiments.decoupling cache/RUN
    python -m experiments.decoupling cache/RUN-OF-MODEL-A cache/RUN-OF-MODEL-B --judge rules
"""

import argparse
import sys
from pathlib import Path

from experiments.common.command import add_out, output_folder, write_estimates
from ia_mech.cli import Parser, add_intervals, guarded, tolerant_streams

DESCRIPTION = """\
Does a model that solves a task also follow up on it as a user would? Accuracy of the responses that
the subject model wrote, and follow-up rate of its user turns after them, on the same prompts. From
judged runs (python -m ia_mech.sample --response generate, python -m ia_mech.judge run); no language
model is loaded.

accuracy     maths, where the data have a gold answer (GSM8K, MATH): equal as formulas, by
             math-verify; a response that was cut off before it states an answer counts as wrong.
             Instructions, where they have instruction_id_list and kwargs (IFEval, IFBench): all
             are followed, strictly, by if-verifiable; "loose" also without first line, last line
             or asterisks. Unverified responses count as neither right nor wrong.
follow-up    share of user turns that are genuine follow-ups, per temperature.
association  within one model: the rate after right responses less that after wrong ones, and the
             AUROC (a right response's share of genuine turns is above a wrong one's; 0.5 = no
             association). p by permuting sources (--resamples times), Holm-corrected. That doesn't
             say what causes what: easy prompts and complete responses may have both.
over models  on the prompts that all of them have: Kendall's rank correlation of accuracy and
             rate, with four models or more. The paper (arXiv 2604.02315) finds that under greedy
             decoding the rate on maths is near 0 whatever the accuracy.

"complete responses" leaves out those that the token limit cut off.
"""

EPILOG = """\
Intervals over sources. Written: estimates.parquet (every number, one per row), responses.parquet
(every response with its verdict and what that rests on: read some), scatter and association (PNG,
SVG). Exit status: 0 done, 2 bad input (one line says what and what to do), 130 interrupted.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return guarded(lambda: _run(args), lambda: "files that were written are whole")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="python -m experiments.decoupling", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--judge", metavar="NAME", help="whose verdicts (default: the only judge)")
    add_out(parser, "decoupling")
    add_intervals(parser.add_argument_group("intervals"), seed="resampling and permutations")
    return parser


def _run(args: argparse.Namespace) -> None:
    from experiments.decoupling import show as figures
    from experiments.decoupling import show as screen
    from experiments.decoupling.analyse import estimates, remarks
    from experiments.decoupling.read import read
    from ia_mech.estimates import few_sources, write_parquet
    from probes.report.figures import save

    folder = output_folder(args.out, args.runs[0], "decoupling")
    measured = read(args.runs, args.judge)
    found = estimates(measured, level=args.level, resamples=args.resamples, seed=args.seed)
    write_estimates(
        found, folder, measured.runs, args.level, judge=measured.judge, experiment="decoupling"
    )
    record = {"runs": [str(run.path) for run in measured.runs]}
    write_parquet(measured.responses, folder / "responses.parquet", record)
    name = " · ".join(measured.models) if len(measured.models) < 4 else "several models"
    title = f"{name} · judge {measured.judge}"
    save(figures.scatter(found, title), folder, "scatter")
    save(figures.association(found, title), folder, "association")
    # Last: a closed pipe must not cost the files.
    screen.show(found, measured.notes + remarks(found) + few_sources(found), args.level)
    print(f"wrote {folder}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
