"""Tables and figures of how likely users' real follow-ups are, offline.

Usage::

    python -m experiments.likelihood cache/RUN
    python -m experiments.likelihood cache/RUN-A cache/RUN-B --judge rules --out tables/
"""

import argparse
import sys
from pathlib import Path

from experiments.common.command import add_out, output_folder, write_estimates
from ia_mech.cli import Parser, add_intervals, guarded, tolerant_streams

DESCRIPTION = """\
How likely is what users really said next, and how much of that does the response account for?
From the scores that python -m ia_mech.sample stored; no language model is loaded.

likelihood  log p of the reference turn at T = 1, and at 20 temperatures and the run's own (nats,
            with the turn-end where the template has one): at which is it largest? Where does greedy
            decoding leave it, at which rank and probability?
contrasts   in bits, in favour of the context's own response: log2 p(turn | query, response) less
              response  log2 of the mean p(turn | query, another response) over the swapped ones
              empty     log2 p(turn | query, an empty response)
              header    log2 p(turn | the bare user header)
            The turn's own fluency is in both terms and goes out. In the "mean of logs" a turn to
            which all responses are alike has 0, as the placebo has, where a swapped response takes
            the own one's place; in the log of a mean it has less. "another's follow-up" is the same
            for a turn of another conversation, which has nothing to do with the response; what
            doesn't fit is less likely after a response that fits, so it may be below 0. The
            difference is how much better the right turn fits, topic included.
rivals      how often the reference is likelier than the query repeated, the response repeated,
            another conversation's reference, a closing, or candidates of yours: as a whole turn
            (short ones win) and per token.
generations with --score-generations and a judge: do genuine follow-ups owe more to the response
            than others, in all and per token? AUROC between turns of different sources, and between
            turns of one context.
"""

EPILOG = """\
A contrast is no mutual information: see the README. The unit is the source; intervals over sources.
Written: estimates.parquet (every number, one per row), temperature_curve and contrasts (PNG, SVG).
Exit status: 0 done, 2 bad input (one line says what and what to do), 130 interrupted.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return guarded(lambda: _run(args), lambda: "files that were written are whole")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="python -m experiments.likelihood", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--judge", metavar="NAME", help="whose verdicts (default: the only judge)")
    add_out(parser, "likelihood")
    add_intervals(parser.add_argument_group("intervals"), seed="resampling")
    return parser


def _run(args: argparse.Namespace) -> None:
    from experiments.likelihood import show as figures
    from experiments.likelihood import show as screen
    from experiments.likelihood.analyse import estimates
    from experiments.likelihood.read import read
    from ia_mech.estimates import few_sources
    from probes.report.figures import save

    folder = output_folder(args.out, args.runs[0], "likelihood")
    scored = read(args.runs, args.judge)
    found = estimates(scored, level=args.level, resamples=args.resamples, seed=args.seed)
    write_estimates(
        found, folder, scored.runs, args.level, judge=scored.judge, experiment="likelihood"
    )
    name = scored.runs[0].model["name"]
    save(figures.temperature_curve(found, f"{name} · real follow-ups"), folder, "temperature_curve")
    if (found["quantity"] == "contrast, bits").any():
        title = f"{name} · bits in favour of the own response"
        save(figures.contrasts(found, title), folder, "contrasts")
    screen.show(
        found, scored.notes + few_sources(found), args.level
    )  # last: a closed pipe must not cost the files
    print(f"wrote {folder}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
