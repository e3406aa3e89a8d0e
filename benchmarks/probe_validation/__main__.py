"""Does the analysis find what was planted, and only that?

Usage::

    python -m benchmarks.probe_validation                       30 minutes on two cores
    python -m benchmarks.probe_validation --kinds copy set      some kinds only
    python -m benchmarks.probe_validation --of-each 10          a first look
    python -m benchmarks.probe_validation --write table.md      and keep the table

Runs drawn by ``planted.py`` are written in the run format, read back and analysed as
``ia-mech probes`` would; those of ``blocks.py`` are analysed as arrays. No model is behind
any of them.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.probe_validation.blocks import BLOCKS, SIZES
from benchmarks.probe_validation.one_run import RunFindings, analyse_planted, work_alone
from ia_mech.cli import Parser, run_command, tolerant_streams, whole_from
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
    **dict.fromkeys(BLOCKS, 200),
    **dict.fromkeys(SIZES, 20),
}

DESCRIPTION = """\
Analyse synthetic runs whose truth is known, and print what the analysis made of them:

  signal         one direction at header_last, from layer 4 on and so in the output too: is that
                 where the headline lands?
  elsewhere      the same at turn_end, which the output doesn't show: is it found beyond that?
  none           rates that nothing shows: how often is something found?
  output-common  the direction moves the logit of a token that is often sampled, in the last layer
  output-rare    the same with a token that never is: neither goes beyond the output
  topic          rates and states depend on what the text is about: nothing goes beyond the text
  copy           hidden states are a noisy copy of the output state: not beyond it
  loud-copy      the same of what is quiet in the output and loud in the copy
  complement     they add as much as the output tells, and alone read as well
  leak           every state holds the words that rates depend on, and nothing else
  wide-complement    a complement in data of the study's size: how often is it found?
  scarce-complement  the same of few contexts
  set            a strong signal from layer 4 on: does the confidence set hold it, and how large?

Coverage is of the headline's 95% interval, for what it says it estimates: the mean over the five
outer folds of the AUROC that the fold's probe has on new sources, known here in closed form.
"""


def shares(found: list[RunFindings]) -> list[tuple[str, str, str, Estimate]]:
    """Rows of a table: planted, question, wanted share, share of runs with its exact interval."""
    rows = []

    def add_row(kind: str, question: str, wanted: str, given: Iterable[bool | None]) -> None:
        answers = [answer for answer in given if answer is not None]
        if answers:
            rate = cluster_mean(
                np.array(answers, dtype=float), np.arange(len(answers)), proportion=True
            )
            rows.append((kind, question, wanted, rate))

    for kind in RUNS:
        here = [f for f in found if f.kind == kind]
        if kind in ("signal", "elsewhere"):
            place = "headline within one layer, at the position"
            add_row(kind, place, "0.90 or more", (f.located for f in here))
        if kind == "none":
            wanted = "0.05"
            smallest = [f.family_p for f in here if f.family_p is not None]
            add_row(kind, "family-wise p ≤ 0.05", wanted, (p <= 0.05 for p in smallest))
            add_row(kind, "headline p ≤ 0.05", wanted, (f.readable for f in here))
        else:
            add_row(kind, "readable", "near 1", (f.readable for f in here))
        wanted = {
            "elsewhere": "near 1",
            "complement": "0.90 or more",
            **dict.fromkeys(SIZES, "what it is: power"),
        }.get(kind, "0.05 or less")
        add_row(kind, "beyond output and text", wanted, (f.beyond for f in here))
        add_row(kind, "interval holds the true AUROC", "0.92 to 0.98", (f.covered for f in here))
        holds = (f.set_holds_first for f in here)
        add_row(kind, "confidence set holds the first layer", "0.93 or more", holds)
    return rows


def table(found: list[RunFindings], seconds: float, workers: int) -> str:
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
        summaries = (
            ("mean AUROC estimated", np.mean, [f.auroc for f in here]),
            ("true", np.mean, [f.truth for f in here]),
            ("AUROC minus the output's own", np.mean, [f.above_output for f in here]),
            ("median share of cells in the confidence set", np.median, [f.set_share for f in here]),
        )
        shown = []
        for what, summary, values in summaries:
            known = [value for value in values if value is not None]
            shown += [f"{what} {summary(known):.3f}"] if known else []
        if here:
            lines.append(f"- {kind}: {', '.join(shown)}")
    lines.append(f"\n{len(found)} runs in {seconds / 60:.0f} min with {workers} processes.")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return run_command(lambda: _validate(args), lambda: "nothing was written")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.probe_validation", description=DESCRIPTION)
    parser.add_argument(
        "--of-each",
        type=whole_from(1),
        metavar="N",
        help="runs of each kind (default: " + ", ".join(f"{n} {k}" for k, n in RUNS.items()) + ")",
    )
    parser.add_argument("--kinds", nargs="+", choices=RUNS, metavar="KIND", help="default: all")
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
    wanted = {kind: runs for kind, runs in RUNS.items() if kind in (args.kinds or RUNS)}
    kinds = [kind for kind, runs in wanted.items() for _ in range(args.of_each or runs)]
    bar, begun = Bar(), time.monotonic()
    bar.start("runs", len(kinds))
    found = []
    with tempfile.TemporaryDirectory() as cache:
        pool = ProcessPoolExecutor(
            workers, get_context("spawn"), initializer=work_alone, initargs=(cache,)
        )
        with pool:
            try:
                seeds = range(args.seed, args.seed + len(kinds))
                for one in pool.map(analyse_planted, kinds, seeds):
                    found.append(one)
                    bar.advance()
            finally:
                pool.shutdown(cancel_futures=True)
                bar.stop()
    text = table(found, time.monotonic() - begun, workers)
    print(text)
    if args.write is not None:
        args.write.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
