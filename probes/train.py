"""``ia-mech probes``: train linear probes on a judged run, compare them with controls, save them.

torch, pandas and matplotlib are imported late, so that ``--help`` and a mistyped flag answer at
once.
"""

import argparse
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ia_mech.cli import (
    JUDGE_HELP,
    Parser,
    add_intervals,
    add_threads,
    run_command,
    run_folder,
    tolerant_streams,
    whole_from,
)
from ia_mech.errors import UserError
from ia_mech.run.tokens import COMPONENTS

if TYPE_CHECKING:
    from ia_mech.results import Result
    from probes.analysis import AnalysisSettings
    from probes.dataset import ProbeSet

DESCRIPTION = """\
Train linear probes on the residual stream at every layer and position of a judged run, compare
them with controls, and keep them in RUN/results/NAME. Several runs are pooled, with an intercept
each. No language model is loaded. docs/probes.md explains the method.

Needs: a judged run with about 40 queries: 20 with a turn that counts, as a follow-up does, and 20
with one that doesn't. Cost: minutes.
"""

EPILOG = """\
examples:
  ia-mech probes cache/RUN
  ia-mech probes cache/RUN --target latent --positions header_last --layers 10-20
  ia-mech probes cache/RUN-A cache/RUN-B --judge gpt-5-mini --out pooled
  ia-mech probes cache/RUN --random-blocks cache/RUN-RANDOM
  ia-mech probes cache/RUN --at turn:0 --component mlp
  ia-mech probes cache/RUN-A cache/RUN-B --transfer
Judge a run first: ia-mech judge run cache/RUN
"""


def build_parser() -> argparse.ArgumentParser:
    prog, usage = "ia-mech probes", "%(prog)s RUN [RUN ...] [options]"
    parser = Parser(prog=prog, usage=usage, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "runs", nargs="+", type=run_folder, metavar="RUN", help="a judged run's folder"
    )
    parser.add_argument("--judge", metavar="NAME", help=JUDGE_HELP)
    add_threads(parser)
    parser.add_argument(
        "--target",
        default="rate",
        metavar="T",
        help="rate, rate@T, latent, latent@T, greedy, mass, mass-in-role, or a failure category",
    )
    parser.add_argument(
        "--positions",
        nargs="+",
        metavar="NAME",
        help="of those that every run kept (default: all)",
    )
    parser.add_argument(
        "--at",
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="in place of positions, tokens that ia-mech capture has added, such as turn:0",
    )
    parser.add_argument(
        "--component", choices=COMPONENTS, default=COMPONENTS[0], help="of --at (default: resid)"
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        type=layers,
        metavar="L",
        help="such as 0 8-12 30; 0 = embeddings (default: all, of --at those captured)",
    )
    parser.add_argument(
        "--within",
        choices=["run", "dataset", "source"],
        default="run",
        metavar="WHAT",
        help="compare conversations of one run, of one dataset, or responses to one query: source "
        "(default: run)",
    )
    parser.add_argument(
        "--random-blocks",
        nargs="+",
        type=run_folder,
        default=[],
        metavar="RUN",
        help="runs of sample --random-blocks on the same conversations, as a control",
    )
    parser.add_argument(
        "--transfer",
        action="store_true",
        help="add a table of probes trained on one run, or dataset of a single run, and tested on "
        "another",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what it takes, and stop")
    numbers = parser.add_argument_group("statistics")
    numbers.add_argument(
        "--permutations",
        type=whole_from(19, "fewer can't reach p = 0.05"),
        default=1000,
        metavar="N",
        help="of whole sources (default: 1000)",
    )
    add_intervals(numbers, seed="folds, permutations and resampling")
    parser.add_argument(
        "--out", metavar="NAME", help="of the folder in RUN/results (default: target and judge)"
    )
    parser.add_argument("--full", action="store_true", help="print all tables")
    return parser


def layers(text: str) -> list[int]:
    """One layer, or a range with both ends."""
    found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text, re.ASCII)
    if not found or int(found[2] or found[1]) < int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no layer and no range such as 8-12")
    return list(range(int(found[1]), int(found[2] or found[1]) + 1))


def main(argv: list[str] | None = None) -> int:
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return run_command(lambda: _train(args), lambda: "nothing was written", args.threads)


def _train(args: argparse.Namespace) -> None:
    from ia_mech.rates.load import open_runs
    from probes.dataset import (
        SOURCE,
        check_enough,
        check_one_model,
        check_reliable,
        read,
        with_random_blocks,
    )

    # Sorted, so that the order in which runs are given doesn't matter.
    runs = open_runs(args.runs)
    check_one_model(runs)
    runs.sort(key=lambda run: (run.identity_digest, str(run.path)))
    layers = None if args.layers is None else [at for part in args.layers for at in part]
    how = args.positions, layers, args.within, args.at, args.component
    data = read(runs, args.judge, args.target, *how)
    twins = with_random_blocks(data, args.random_blocks)
    if data.within == SOURCE:
        if args.transfer:
            raise UserError("--within source compares siblings, --transfer doesn't", "give one")
        check_reliable(data)
    check_enough(data.outcome, data.target)

    from ia_mech.display import Bar
    from probes import show
    from probes.analysis import AnalysisSettings, analyse
    from probes.controls import controls_of
    from probes.cross_evaluate import cross_evaluate, pairs_of, units_of, with_transfer

    units = units_of(data) if args.transfer else {}
    if units:
        pairs_of(data.outcome, units)  # refused before anything is fitted
    settings = AnalysisSettings(
        permutations=args.permutations,
        level=args.level,
        resamples=args.resamples,
        seed=args.seed,
        workers=args.threads,
    )
    random = [run.identity_digest for twin in twins.values() for run in twin.runs]
    about = show.about("probe", data, settings, random_blocks=random, transfer=args.transfer)
    folder = show.result_folder(about, args.runs[0], args.out)
    if args.dry_run:
        return print_plan(data, settings, len(twins), folder)
    controls = controls_of(data)
    analysis = analyse(data, data.outcome, controls, settings, Bar(), twins)
    result = show.result_of(analysis, data, about, folder.name)
    if args.transfer:
        found = cross_evaluate(data, data.outcome, units, settings, Bar())
        result = with_transfer(result, *found, data, settings)
    write_and_show(result, folder, args.full)


def print_plan(data: "ProbeSet", settings: "AnalysisSettings", twins: int, folder: Path) -> None:
    """Print what would be fitted, and about how long it takes: one layer and position is timed."""
    from probes.analysis import analyse, processors

    began = time.perf_counter()
    one = replace(data, layers=data.layers[-1:], positions=data.positions[-1:])
    analyse(one, one.outcome, settings=settings)
    layers, positions = len(data.layers), len(data.positions)
    cells = layers * positions * (1 + twins)
    seconds = (time.perf_counter() - began) * cells / (settings.workers or processors())
    what = f"{layers} layers × {positions} positions"
    random = f", and as many of {twins} runs with random blocks" if twins else ""
    for name, value in {
        "target": data.target.describe(),
        "labelled": data.counted,
        "probes": f"{what}{random}; {settings.folds} folds, {settings.permutations} permutations",
        "time": f"about {max(1, round(seconds / 60))} min, and some for the controls",
        "numbers": f"go to {folder}",
    }.items():
        print(f"{name:<20}{value}")


def write_and_show(result: "Result", folder: Path, full: bool) -> None:
    """Write a result and print it, and say whether it replaced another one."""
    from ia_mech.display import console
    from ia_mech.results import kind_of, read, show, write

    earlier = read(folder).about if kind_of(folder) else result.about
    write(result, folder)
    show(result, console(), full=full)
    print(f"wrote {folder}", file=sys.stderr)
    if earlier != result.about:
        print("this replaced the result of other settings, runs or labels", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
