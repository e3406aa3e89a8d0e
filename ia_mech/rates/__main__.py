"""How often the user turns of runs are genuine follow-ups.

Usage::

    python -m ia_mech.rates cache/RUN
    python -m ia_mech.rates cache/RUN-A cache/RUN-B --judge rules --parquet rates.parquet

What needs torch or pandas is imported late, so that ``--help`` and a mistyped flag answer at once.

The command line of ``python -m ia_mech.rates``: its flags and their help.
"""

import argparse
import sys
from pathlib import Path

from ia_mech.cli import Parser, add_intervals, guarded, tolerant_streams, whole_from
from ia_mech.errors import UserError

DESCRIPTION = """\
Say how often the generated user turns of a run are genuine follow-ups, per model, dataset and
temperature, from the verdicts that python -m ia_mech.judge wrote into it. Several runs of one model
and dataset are pooled; everything else stays apart.

follow-up rate   share of genuine turns among those the judge could assess. Turns that it could not
                 (cannot_assess) or failed on are counted apart, with the range of the rate if none
                 or all of them were genuine.
any of n         latent reach: share of contexts with a genuine turn among n samples, estimated
                 without bias over all subsets of n of the samples there are (pass@k; Chen et al.
                 2021, arXiv 2107.03374). Turns not assessed are left out; so are contexts with
                 fewer than n others. Over all temperatures it draws from their samples together;
                 these share their noise, so it is no estimate for as many fresh samples.
difference       mean over sources of a source's rate minus its greedy rate. p is the larger
                 of two: by flipping the signs of whole sources, and where MOVER's interval begins
                 to leave out 0 (flips alone where every source has as many turns at greedy as at
                 the other temperature). Which test it was stands below the tables and in the
                 files; --method doesn't change it.
                 p is corrected by Holm's method over all comparisons of model, dataset and
                 temperature in the output. What could have been found with 80% power in a single
                 comparison stands beside it.
failure profile  share of every category among the turns assessed.
corrected rate   needs annotations (python -m ia_mech.judge export, then import). Rogan & Gladen's
                 estimate takes the judge's sensitivity and specificity from all annotated turns of
                 a model, weighed by their inclusion probabilities: it assumes that the judge errs
                 alike at all temperatures and in all datasets, labelled ones or not. The
                 prediction-powered one assumes no such thing. It is given where 30 annotated turns
                 of 10 sources are there for the very line, and labels of every run with turns in
                 it: what people had no chance to see is not taken to be like what they saw. Neither
                 is given where a stratum of a run's sheet has no label at all.

Intervals are over sources (the original prompts): samples of one context are not independent. Lines
"(all)" weigh every turn alike, whatever its dataset; they repeat what the datasets say, and their
p values are corrected as a family of their own. Simulations cover 24 sources and more; where there
are fewer, a note says so. Where responses were cut off, the rate after complete responses stands
beside the rate of all; --responses shows everything apart. Of a judge's repeats the first is used.
"""

EPILOG = """\
examples:
  python -m ia_mech.rates cache/RUN
      the tables of one run, by the only judge there
  python -m ia_mech.rates cache/RUN-* --judge gpt-5-mini --json rates.json --parquet rates.parquet
      several runs, by one judge, with all figures in files: one row per estimate
  python -m ia_mech.rates cache/RUN --annotator anna --examples 3
      corrected for the judge's errors by anna's labels; three drawn turns of every category
  python -m ia_mech.rates cache/RUN --responses complete
      everything once more, without the turns after responses that were cut off

Before: python -m ia_mech.judge run cache/RUN
Exit status: 0 done, 2 bad input (one line says what and what to do), 130 interrupted.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="python -m ia_mech.rates", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--judge", metavar="NAME", help="whose verdicts (default: the only judge)")
    parser.add_argument(
        "--annotator",
        metavar="NAME",
        help="whose labels correct the rate (default: the only annotator, if there is one)",
    )
    parser.add_argument(
        "--responses",
        choices=["all", "complete", "cut-off"],
        default="all",
        help="count only user turns after such responses, in every figure and example; a response "
        "that was cut off is a different stimulus (default: all)",
    )
    numbers = parser.add_argument_group("intervals")
    add_intervals(numbers, seed="resampling, sign flips and --examples")
    numbers.add_argument(
        "--method",
        choices=["auto", "percentile", "bca"],
        default="auto",
        help="intervals of shares and differences. auto: what kept its level in simulations of "
        "clustered turns (python -m benchmarks.coverage); percentile, bca: a cluster bootstrap. A "
        "share of 0 or 1 has the exact one-sided bound on sources with each (default: auto)",
    )
    files = parser.add_argument_group("output")
    for kind in ("json", "csv", "parquet"):
        files.add_argument(
            f"--{kind}", type=Path, metavar="FILE", help="write every estimate here, one per row"
        )
    files.add_argument(
        "--examples",
        type=whole_from(0),
        default=0,
        metavar="N",
        help="show N turns of every category found, drawn by --seed (default: 0)",
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
        _check_files(files)

    from ia_mech.display import console
    from ia_mech.rates.compute import estimates
    from ia_mech.rates.files import write
    from ia_mech.rates.load import read_runs
    from ia_mech.rates.show import examples_by_category, print_examples, print_rates

    judged = read_runs(args.runs, args.judge, args.annotator, args.responses)
    options = {key: getattr(args, key) for key in ("level", "resamples", "seed", "method")}
    rows = estimates(judged, **options)
    screen = console()
    print_rates(screen, judged, rows)
    if args.examples:
        for run in judged.runs:
            found = examples_by_category(
                run, judged.judge, args.examples, args.seed, responses=args.responses
            )
            print_examples(screen, found, of=str(run.path) if len(judged.runs) > 1 else "")
    for kind, path in files.items():
        write(path, kind, rows, judged, options)
        print(f"wrote {path}", file=sys.stderr)


def _check_files(files: dict[str, Path]) -> None:
    """Refuse what can't be written before anything is computed.

    Raises:
        UserError: a folder that isn't there or is a run's, a folder in the file's place, one file
            for two forms.
    """
    from ia_mech.run.layout import refuse_inside_run

    for kind, path in files.items():
        if path.is_dir():
            raise UserError(f"--{kind} {path} is a folder", "name a file in it")
        if not path.parent.is_dir():
            raise UserError(f"--{kind} {path}: there is no folder {path.parent}", "make it first")
        refuse_inside_run(path)
        same = [other for other in files if files[other].resolve() == path.resolve()]
        if len(same) > 1:
            named = " and ".join(f"--{other}" for other in same)
            raise UserError(f"{named} name the same file", "give each its own")


if __name__ == "__main__":
    sys.exit(main())
