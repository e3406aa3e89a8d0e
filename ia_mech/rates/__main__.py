"""How often the user turns of runs are genuine follow-ups.

Usage::

    python -m ia_mech.rates cache/RUN
    python -m ia_mech.rates cache/RUN-A cache/RUN-B --judge rules --parquet rates.parquet

What needs torch or pandas is imported late, so that ``--help`` and a mistyped flag answer at once.
"""

import argparse
import sys

from ia_mech.cli import (
    Parser,
    add_intervals,
    guarded,
    path_of,
    tolerant_streams,
    whole_from,
)

DESCRIPTION = """\
Say how often the generated user turns of a run are genuine follow-ups, per model, dataset and
temperature, from the verdicts of python -m ia_mech.judge. Runs of one model and dataset are pooled.
The tables: follow-up rate, difference from greedy, failure profile, latent reach (any of n), rates
corrected by annotations, and the floor: what the judge accepts of turns after another conversation.
Intervals are over sources (prompts). Methods: docs/statistics.md
"""

EPILOG = """\
example:
  python -m ia_mech.rates cache/RUN-* --judge gpt-5-mini --annotator anna --parquet rates.parquet
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="python -m ia_mech.rates", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("runs", nargs="+", type=path_of, metavar="RUN", help="a run's folder")
    parser.add_argument("--judge", metavar="NAME", help="whose verdicts (default: the only judge)")
    parser.add_argument(
        "--annotator",
        metavar="NAME",
        help="whose labels correct rates (default: the only one)",
    )
    parser.add_argument(
        "--responses",
        choices=["all", "complete", "cut-off"],
        default="all",
        metavar="KIND",
        help="after all (default), complete or cut-off responses",
    )
    numbers = parser.add_argument_group("intervals")
    add_intervals(numbers, seed="resampling, sign flips and --examples")
    files = parser.add_argument_group("output")
    for kind in ("json", "csv", "parquet"):
        files.add_argument(
            f"--{kind}", type=path_of, metavar="FILE", help="write all estimates, one per row"
        )
    files.add_argument(
        "--examples",
        type=whole_from(0),
        default=0,
        metavar="N",
        help="show N turns of every category, drawn by --seed (default: 0)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return guarded(lambda: _rates(args), lambda: "no file was left half-written")


def _rates(args: argparse.Namespace) -> None:
    asked = {kind: getattr(args, kind) for kind in ("json", "csv", "parquet")}
    files = {kind: path for kind, path in asked.items() if path is not None}
    if files:
        from ia_mech.run.layout import check_output

        for kind, file in files.items():
            check_output(file, kind)

    from ia_mech.display import console
    from ia_mech.estimates import write_table
    from ia_mech.rates.compute import comparisons, estimates
    from ia_mech.rates.load import read_runs
    from ia_mech.rates.show import examples_by_category, print_examples, print_rates

    judged = read_runs(args.runs, args.judge, args.annotator, args.responses)
    options = {key: getattr(args, key) for key in ("level", "resamples", "seed")}
    found = estimates(judged, **options)
    own, pooled = comparisons(found)
    about = {
        "runs": [run.name for run in judged.runs],
        "judge": {"name": judged.judge, "record": judged.record},
        "gates": {name: gate.word for name, gate in judged.gates.items()},
        "annotator": judged.annotator,
        "responses": judged.responses,
        "comparisons": own,
        "comparisons_of_all_datasets": pooled,
        "notes": judged.notes,
        **options,
    }
    for kind, path in files.items():
        write_table(found, path, kind, about)
        print(f"wrote {path}", file=sys.stderr)
    screen = console()
    print_rates(screen, judged, found)
    if args.examples:
        for run in judged.runs:
            examples = examples_by_category(
                run, judged.judge, args.examples, args.seed, responses=args.responses
            )
            of = str(run.path) if len(judged.runs) > 1 else ""
            print_examples(screen, examples, str(judged.gate), of)


if __name__ == "__main__":
    sys.exit(main())
