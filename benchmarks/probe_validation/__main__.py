"""Hold the analysis against planted truths: does it find what is there, and only that?

Usage::

    python -m benchmarks.probe_validation                       20 minutes on two cores
    python -m benchmarks.probe_validation --of-each 10          a first look
    python -m benchmarks.probe_validation --write table.md      and keep the table

Every run is drawn by ``planted.py``, written in the run format, read back and analysed
as ``python -m probes.train`` would; no model is behind any of them.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from ia_mech.cli import Parser, guarded, tolerant_streams, whole_from
from ia_mech.errors import UserError
from ia_mech.stats import Estimate, cluster_mean
from probes.analysis import processors

RUNS = {
    "signal": 100,
    "elsewhere": 30,
    "none": 400,
    "output-common": 30,
    "output-rare": 30,
    "topic": 30,
}

DESCRIPTION = """\
Analyse synthetic runs whose truth is known, and print what the analysis made of them:

  signal         one direction at header_last, from layer 4 on and so in the output too: is that
                 where the headline lands?
  elsewhere      the same at turn_end, which the output doesn't show: is it called latent?
  none           rates that nothing shows: how often is something found?
  output-common  the direction moves the logit of a token that is often sampled, in the last layer
  output-rare    the same with a token that never is: latent must not be said of either
  topic          rates and states depend on what the text is about: text alone must read as well

Coverage is of the headline's 95% interval, for what it says it estimates: the mean over the five
outer folds of the AUROC that the fold's probe has on new sources, known here in closed form.
"""


@dataclass(frozen=True)
class Found:
    """What the analysis of one planted run said.

    Attributes:
        landed: the headline is at the planted position and within one layer of the first
            informative one.
        readable, beyond_text, latent: the conclusion.
        headline_p, family_p: of the headline, and the smallest of the heat map.
        covered: the headline's interval holds the true AUROC of its probes; None without a truth.
        auroc, truth: estimate, and mean true AUROC of the probes it is of.
    """

    kind: str
    landed: bool
    readable: bool
    beyond_text: bool
    latent: bool
    headline_p: float
    family_p: float
    covered: bool | None
    auroc: float
    truth: float | None


def try_one(kind: str, seed: int) -> Found:
    """Plant, write, read and analyse one run."""
    from benchmarks.probe_validation.planted import GAUSSIAN, Plan, plant, true_auroc, write
    from probes import dataset
    from probes.analysis import Settings, analyse
    from probes.controls import controls_of
    from probes.report.conclusion import conclude

    position = "turn_end" if kind == "elsewhere" else "header_last"
    drawn = "signal" if kind == "elsewhere" else kind
    plan = Plan(drawn, informative_position=position, seed=seed)
    planted = plant(plan)
    lens = planted.lens.save(planted.weights_hash)
    with tempfile.TemporaryDirectory() as folder:
        run = write(planted, Path(folder) / "run")
        data = dataset.read([run.path])
        controls = controls_of(data)
        settings = Settings(permutations=199, resamples=1000, control_draws=1, workers=1)
        analysis = analyse(data, data.outcome, controls, settings)
    lens.unlink()
    headline, said = analysis.headline, conclude(analysis)
    estimate, truth = headline.measures["auroc"], None
    if drawn in GAUSSIAN:
        probes = zip(headline.picked, headline.weights, strict=True)
        truth = float(np.mean([true_auroc(planted, *cell, weights) for cell, weights in probes]))
    return Found(
        kind=kind,
        landed=headline.position == plan.informative_position
        and abs(headline.layer - plan.informative_layer) <= 1,
        readable=said.readable,
        beyond_text=said.beyond_text,
        latent=said.latent,
        headline_p=analysis.tested.p,
        family_p=float(analysis.tested.p_family.min()),
        covered=None if truth is None else bool(estimate.low <= truth <= estimate.high),
        auroc=estimate.value,
        truth=truth,
    )


def shares(found: list[Found]) -> list[tuple[str, str, str, Estimate]]:
    """(planted, question, what should be, share of runs with its exact interval) for a table."""
    rows = []

    def ask(kind: str, question: str, wanted: str, answers: Iterable[bool]) -> None:
        answers = list(answers)
        if answers:
            rate = cluster_mean(
                np.array(answers, dtype=float), np.arange(len(answers)), proportion=True
            )
            rows.append((kind, question, wanted, rate))

    for kind in RUNS:
        here = [f for f in found if f.kind == kind]
        if kind in ("signal", "elsewhere"):
            place = "headline within one layer, at the position"
            ask(kind, place, "0.90 or more", (f.landed for f in here))
        if kind == "none":
            wanted = "0.05"
            ask(kind, "family-wise p ≤ 0.05", wanted, (f.family_p <= 0.05 for f in here))
            ask(kind, "headline p ≤ 0.05", wanted, (f.headline_p <= 0.05 for f in here))
        else:
            ask(kind, "readable", "near 1", (f.readable for f in here))
        if kind == "topic":
            ask(kind, "beyond the text", "near 0", (f.beyond_text for f in here))
        ask(kind, "latent", "near 1" if kind == "elsewhere" else "near 0", (f.latent for f in here))
        covered = [f.covered for f in here if f.covered is not None]
        ask(kind, "interval holds the true AUROC", "0.92 to 0.98", covered)
    return rows


def table(found: list[Found], seconds: float, workers: int) -> str:
    """Markdown."""
    lines = [
        "| planted | runs | question | should be | share of runs, 95% interval |",
        "|---|---|---|---|---|",
    ]
    for kind, question, wanted, rate in shares(found):
        lines.append(f"| {kind} | {rate.sources} | {question} | {wanted} | {rate.text(3)} |")
    lines.append("")
    for kind in RUNS:
        here = [f for f in found if f.kind == kind]
        if here and here[0].truth is not None:
            mean = np.mean([f.auroc for f in here]), np.mean([f.truth for f in here])
            lines.append(f"Mean AUROC of {kind}: estimated {mean[0]:.3f}, true {mean[1]:.3f}.")
    lines.append(f"\n{len(found)} runs in {seconds / 60:.0f} min with {workers} processes.")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return guarded(lambda: _validate(args), lambda: "nothing was written")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.probe_validation", description=DESCRIPTION)
    parser.add_argument(
        "--of-each",
        type=whole_from(1),
        metavar="N",
        help="runs of each kind (default: " + ", ".join(f"{n} {k}" for k, n in RUNS.items()) + ")",
    )
    parser.add_argument(
        "--seed", type=whole_from(0), default=0, help="of the first run (default: 0)"
    )
    parser.add_argument("--workers", type=whole_from(1), help="processes (default: all processors)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the table here")
    return parser


def _validate(args: argparse.Namespace) -> None:
    from ia_mech.display import Bar

    if args.write is not None and not args.write.parent.is_dir():
        raise UserError(f"there is no folder {args.write.parent}", "make it first")
    workers = args.workers or processors()
    kinds = [kind for kind, runs in RUNS.items() for _ in range(args.of_each or runs)]
    bar, begun = Bar(), time.monotonic()
    bar.start("runs", len(kinds))
    found = []
    with tempfile.TemporaryDirectory() as cache:
        pool = ProcessPoolExecutor(
            workers, get_context("spawn"), initializer=_alone, initargs=(cache,)
        )
        with pool:
            try:
                seeds = range(args.seed, args.seed + len(kinds))
                for one in pool.map(try_one, kinds, seeds):
                    found.append(one)
                    bar.advance()
            finally:
                pool.shutdown(cancel_futures=True)
                bar.stop()
    text = table(found, time.monotonic() - begun, workers)
    print(text)
    if args.write is not None:
        args.write.write_text(text + "\n", encoding="utf-8")


def _alone(cache: str) -> None:
    """A process of its own: one thread, and a cache that goes when it is done."""
    import torch

    torch.set_num_threads(1)
    os.environ["IA_MECH_CACHE"] = cache


if __name__ == "__main__":
    sys.exit(main())
