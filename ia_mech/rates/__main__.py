"""How often the user turns of runs are follow-ups.

Usage::

    ia-mech rates cache/RUN
    ia-mech rates cache/RUN-A cache/RUN-B --judge builtin
    ia-mech rates cache/RUN --by correct

What needs torch or pandas is imported late, so that ``--help`` and a mistyped flag answer at once.
"""

import argparse
import sys

from ia_mech.cli import (
    JUDGE_HELP,
    Parser,
    add_threads,
    coverage,
    nonblank,
    path_of,
    program,
    run_command,
    run_folder,
    shell_word,
    tolerant_streams,
    whole_from,
)

DESCRIPTION = """\
Say how often a run's user turns are follow-ups, per model, dataset and temperature, by the labels
of ia-mech judge. The table also says how often the judge calls the same turns follow-ups if it is
shown them after a wrong conversation, one of another query. Runs of one model and dataset are
pooled. Intervals are over queries. Methods: docs/judging.md

Follow-ups are called latent if three things hold: sampled turns are follow-ups more often than
greedy ones; the rate minus the rate after wrong conversations rises, too (at 5%, corrected for the
temperatures); and the judge can tell own from wrong conversations. To show this takes about 50
queries. With --full, a table splits the rise: fewer turns repeat the conversation or speak as the
assistant, or more of the other turns are follow-ups.
"""

CORRECT = "correct"  # what --by takes besides fields of the data
EPILOG = """\
examples:
  ia-mech rates cache/RUN-* --judge gpt-5-mini --annotator anna --full
  ia-mech rates cache/RUN --by topic      where rows of the data have a column topic
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="ia-mech rates", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("runs", nargs="+", type=run_folder, metavar="RUN", help="a run's folder")
    counted = parser.add_argument_group("what is counted")
    counted.add_argument("--judge", metavar="NAME", help=JUDGE_HELP)
    counted.add_argument(
        "--annotator",
        metavar="NAME",
        help="annotator whose labels correct the rates (default: the only one)",
    )
    counted.add_argument(
        "--after",
        choices=["all", "complete", "unfinished"],
        default="all",
        metavar="KIND",
        help="count turns after all (default), complete or unfinished responses",
    )
    counted.add_argument(
        "--sampled-tokens",
        type=whole_from(1),
        metavar="K",
        help="count turns whose first K tokens alone were sampled (default: turns with all tokens "
        "sampled)",
    )
    counted.add_argument(
        "--by",
        type=nonblank,
        metavar="FIELD",
        help="give a rate for each value of FIELD: dataset, or a column of the data that isn't "
        "part of the conversation and has at most 20 values (a wrong name lists these columns). "
        "correct: compare right with wrong responses (maths, IFEval, or a column correct)",
    )
    shown = parser.add_argument_group("what is shown and written")
    shown.add_argument("--full", action="store_true", help="print all tables and notes")
    shown.add_argument(
        "--out",
        type=path_of,
        metavar="FOLDER",
        help="where numbers go (default: RUN/results/rates-JUDGE/, of the first run)",
    )
    statistics = parser.add_argument_group("intervals and tests")
    statistics.add_argument(
        "--level", type=coverage, default=0.95, help="coverage of intervals (default: 0.95)"
    )
    statistics.add_argument(
        "--seed",
        type=whole_from(0),
        default=0,
        help="seed of sign flips and permutations (default: 0)",
    )
    add_threads(statistics)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return run_command(lambda: _rates(args), lambda: "no file was left half-written", args.threads)


def _rates(args: argparse.Namespace) -> None:
    from ia_mech.results import folder_of, refuse_place, show, write
    from ia_mech.run.layout import refuse_unwritable

    if args.out is not None:
        refuse_place(args.out)

    from ia_mech.rates.load import read_runs

    solved = args.by == CORRECT
    field = None if solved else args.by
    last = args.after, field, args.sampled_tokens
    judged = read_runs(args.runs, args.judge, args.annotator, *last)
    print(f"estimating rates of {len(judged.turns):,} turns …", file=sys.stderr, flush=True)
    from ia_mech.display import console
    from ia_mech.rates import correct, result  # which load matplotlib

    made = correct.result if solved else result.result
    rates = made(judged, level=args.level, seed=args.seed)
    folder = args.out or folder_of(args.runs[0], rates.name)
    refuse_unwritable(folder)
    write(rates, folder)
    show(rates, console(), full=args.full)
    print(f"wrote {shell_word(folder)}", file=sys.stderr)
    runs = " ".join(shell_word(run) for run in args.runs)
    elsewhere = f" --results {shell_word(args.out)}" if args.out else ""
    judge = judged.runs[0].labels.flag(judged.judge)
    print(f"next: {program()} report {runs}{judge}{elsewhere}")


if __name__ == "__main__":
    sys.exit(main())
