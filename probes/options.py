"""The command line of ``python -m probes.train``: its flags and their help."""

import argparse
import os
import re
from pathlib import Path

from ia_mech.cli import Parser, add_intervals, whole_from

ESTIMATORS = ("logistic", "mass-mean", "lda", "ridge")

DESCRIPTION = """\
Ask where in a model's hidden states its follow-ups can be read: train linear probes on the residual
stream at every layer and position of a judged run, and say which of it survives its controls. No
language model is loaded.

target     what is predicted of a context. All samples of a context share its header state, so the
           default, rate, is its share of genuine follow-ups: k of n sampled turns over all
           temperatures above 0. rate@0.7: at one of them. greedy: the greedy turn's label. latent:
           contexts whose greedy turn is no follow-up, by whether any sample is. A failure category
           (new_topic, degenerate, …): its share, like rate.
folds      five, of whole sources, stratified by the target. The inner loop (the four other folds)
           chooses penalty, layer and position; the outer one scores. Of layers that read alike the
           earliest is taken (one-standard-error rule), since what a block writes stays there.
AUROC      the chance that the context of a random positive turn gets a higher score than that of a
           random negative turn of another context of the same fold and run; ties count one half. It
           stays below 1 even for a probe that knows every rate; how far is printed.
p          from permutations of whole sources' labels: family-wise over the heat map (largest
           statistic), and for the headline with its selection replayed. By the closed form (ridge).
controls   the same probe on TF-IDF of the text, lengths, dataset, random token vectors, layer 0; on
           the model's own output distribution (final_norm of the last layer at header_last, in
           which every next-token logit is linear, and summaries of it); and on a control task, a
           random function of the response's length and opening. Gains are paired by source. The
           word latent is used only for what exceeds all of text and output.
code       bits per turn that the probe saves in an online code against the rate so far (MDL).

Several runs (of models of one size) are pooled with an intercept each; labels are permuted within
runs, and only contexts of the same run are compared; --within dataset does so for datasets.
"""

EPILOG = """\
examples:
  python -m probes.train cache/RUN
      the default analysis, kept in cache/RUN/probes/rate-logistic-rules/
  python -m probes.train cache/RUN --target latent --positions header_last --layers 10-20
      another target, part of the heat map
  python -m probes.train cache/RUN-A cache/RUN-B --judge gpt-5-mini --out pooled
      two runs, by one judge; kept in the first one's folder
  python -c "from probes.card import Probe; print(Probe.load('cache/RUN/probes/pooled').card)"

written: probe.safetensors, card.json (directions to score with), estimates.parquet (every
number with its interval), predictions.parquet (out of fold), heat_map and layer_curve (PNG, SVG).
Before: python -m ia_mech.judge run cache/RUN
Exit status: 0 done, 2 bad input (one line says what and what to do), 130 interrupted.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="python -m probes.train", description=DESCRIPTION, epilog=EPILOG)
    add_subject(parser)
    add_statistics(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        metavar="NAME",
        help="keep it in RUN/probes/NAME (default: target, estimator and judge)",
    )
    output.add_argument(
        "--replace",
        action="store_true",
        help="replace what is kept under that name though it is of other settings",
    )
    output.add_argument(
        "--threads",
        type=whole_from(1),
        help="cells examined at once (default: all processors)",
    )
    return parser


def add_subject(parser: argparse.ArgumentParser) -> None:
    """What is probed, and by what: runs, judge, target, positions, layers, estimator."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a judged run's folder")
    parser.add_argument("--judge", metavar="NAME", help="whose verdicts (default: the only judge)")
    parser.add_argument(
        "--target",
        default="rate",
        metavar="TARGET",
        help="rate, rate@T, greedy, latent, or a failure category (default: rate)",
    )
    parser.add_argument(
        "--positions",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help="positions to probe, of those that every run kept (default: all)",
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        type=layers,
        default=[None],
        metavar="LAYERS",
        help="layers to probe, such as 0 8-12 30; 0 = embeddings (default: all)",
    )
    parser.add_argument(
        "--estimator",
        choices=ESTIMATORS,
        default="logistic",
        help="of the reported scores: L2 logistic regression, difference of means, its whitened "
        "form (LDA, Ledoit-Wolf), or ridge on the rate (default: logistic)",
    )
    parser.add_argument(
        "--within",
        choices=["run", "dataset"],
        default="run",
        help="what contexts must share to be compared; with dataset, telling datasets apart earns "
        "nothing (default: run)",
    )


def add_statistics(parser: argparse.ArgumentParser) -> None:
    """Permutations, resamples, level and seed."""
    numbers = parser.add_argument_group("statistics")
    numbers.add_argument(
        "--permutations",
        type=whole_from(19, "fewer can't reach p = 0.05"),
        default=1000,
        help="of whole sources (default: 1000)",
    )
    add_intervals(numbers, seed="folds, permutations and resampling")


def chosen(args: argparse.Namespace) -> tuple[list[str] | None, list[int] | None]:
    """Positions and layers that were asked for; None for all."""
    names = None if "all" in args.positions else args.positions
    numbers = None if None in args.layers else sorted({at for part in args.layers for at in part})
    return names, numbers


def processors() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def layers(text: str) -> list[int] | None:
    """``all`` (None), one layer, or a range with both ends."""
    if text == "all":
        return None
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text, re.ASCII)
    if not found or int(found[2] or found[1]) < int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no layer and no range such as 8-12")
    return list(range(int(found[1]), int(found[2] or found[1]) + 1))
