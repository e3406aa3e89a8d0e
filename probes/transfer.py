"""``ia-mech transfer``: do probes transfer between runs or datasets? A matrix of scores.

torch and pandas are imported late, so that ``--help`` and a mistyped flag answer at once.
"""

import argparse
import sys

from ia_mech.cli import run_command, tolerant_streams
from ia_mech.errors import UserError
from probes.train import parser_of, probe_set, settings_of, write_and_show

DESCRIPTION = """\
Train probes on one run and test them on another. Rows of the matrix are what a probe was trained
on, columns what it was tested on. Units are the runs or, of a single run, its datasets. Runs must
be of models with equal hidden size and number of blocks. The result is kept in RUN/results/NAME of
the first run. No language model is loaded. docs/probes.md explains the method.
"""

EPILOG = """\
examples:
  ia-mech transfer cache/RUN-A cache/RUN-B cache/RUN-C
  ia-mech transfer cache/RUN --layers 10-20 --positions header_last
"""


def main(argv: list[str] | None = None) -> int:
    tolerant_streams()
    args = parser_of("transfer", DESCRIPTION, EPILOG).parse_args(argv)
    return run_command(lambda: _transfer(args), lambda: "nothing was written", args.threads)


def _transfer(args: argparse.Namespace) -> None:
    from probes.dataset import SOURCE

    if args.within == SOURCE:
        raise UserError("--within source compares siblings, which transfer doesn't", "leave it out")
    data = probe_set(args, args.runs)

    from ia_mech.display import Bar
    from probes import show
    from probes.cross_evaluate import cross_evaluate, result_of, units_of

    settings = settings_of(args)
    units = units_of(data)
    about = show.about("transfer", data, settings)
    folder = show.result_folder(about, args.runs[0], args.out)
    entries, notes = cross_evaluate(data, data.outcome, units, settings, Bar())
    result = result_of(entries, data, notes, settings, about, folder.name)
    write_and_show(result, folder, args.full)


if __name__ == "__main__":
    sys.exit(main())
