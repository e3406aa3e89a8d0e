"""Train linear probes on a judged run, with controls, and keep what came out.

Usage::

    python -m probes.train cache/RUN
    python -m probes.train cache/RUN --target latent --estimator mass-mean

What needs torch, pandas or matplotlib is imported late, so that ``--help`` and a mistyped flag
answer at once.
"""

import argparse
import sys
from pathlib import Path

from ia_mech.cli import guarded, tolerant_streams
from probes.options import build_parser, chosen


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return guarded(lambda: _train(args), lambda: "nothing was written")


def _train(args: argparse.Namespace) -> None:
    from ia_mech.display import Bar, console
    from probes import dataset
    from probes.analysis import analyse
    from probes.controls import controls_of
    from probes.dataset import check_enough
    from probes.records import Settings
    from probes.report.keep import Kept
    from probes.report.screen import print_analysis
    from probes.report.verdict import verdict
    from probes.targets import LATENT

    settings = Settings(
        estimator=args.estimator,
        permutations=args.permutations,
        level=args.level,
        resamples=args.resamples,
        seed=args.seed,
        workers=args.threads,
    )
    runs = dataset.in_order(args.runs)
    data = dataset.read(runs, args.judge, args.target, *chosen(args), args.within)
    kept = Kept.place(data, settings, args.out, args.replace, home=Path(args.runs[0]))
    check_enough(
        data.outcome,
        settings.folds,
        positive=data.target.positive,
        negative=data.target.negative,
        more_turns=data.target.kind != LATENT,
    )
    controls = controls_of(data, settings.seed)
    analysis = analyse(data, data.outcome, controls, settings, Bar())
    analysis.notes[:0] = data.notes
    datasets = data.within == dataset.DATASET
    said = verdict(analysis, data.target.words + (" within datasets" if datasets else ""))
    kept.write(analysis, said)
    what = f"{data.target.name}: {data.target.describe()}"
    within = "run, and within a dataset" if datasets else "run"
    print_analysis(console(), analysis, what, said, within)
    print(f"wrote {kept.folder}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
