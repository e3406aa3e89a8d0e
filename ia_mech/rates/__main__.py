"""How often the user turns of runs are genuine follow-ups.

Usage::

    python -m ia_mech.rates cache/RUN
    python -m ia_mech.rates cache/RUN-A cache/RUN-B --judge rules --parquet rates.parquet

What needs torch or pandas is imported late, so that ``--help`` and a mistyped flag answer at once.
"""

import argparse
import sys
from pathlib import Path

from ia_mech.cli import guarded, tolerant_streams
from ia_mech.errors import UserError
from ia_mech.rates.options import build_parser


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

    from ia_mech.rates.examples import examples_by_category, print_examples
    from ia_mech.rates.files import write
    from ia_mech.rates.pool import read_runs
    from ia_mech.rates.show import console, print_rates
    from ia_mech.rates.tables import estimates

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
