"""What temperature does to the user turn, and how deep greedy decoding hides it, offline.

Usage::

    python -m experiments.temperature_sweep cache/RUN
    python -m experiments.temperature_sweep cache/RUN-A cache/RUN-B --judge rules --out sweep/
"""

import argparse
import math
import sys
from pathlib import Path

from experiments.common.command import add_out, output_folder, write_estimates
from ia_mech.cli import Parser, add_intervals, guarded, tolerant_streams

DESCRIPTION = """\
What does temperature do to the user turn, and how deep does greedy decoding hide follow-ups?
From what judged runs stored and the model's lens (its final norm and unembedding); no language
model is loaded.

rates        the follow-up rate and the shares of all failures at every sampled temperature, and
             their differences from the greedy turns of the same sources.
first token  its distribution at any temperature, from the header's logits: entropy (nats), the
             effective number of tokens exp(entropy), the mass on ending the turn at once, total
             variation from T = 1, and the mass on openings. An opening is a token that opened
             judged turns of other sources, at all temperatures together; its probability counts as
             genuine to the share of genuine ones among the genuine turns and restatements (of query
             or response) that it opened there, and as restated to the rest. Does heat move mass
             from one to the other, or from both to tokens that opened neither?
hidden       greedy leaves a turn at the first token that differs from the run's greedy turn: which
             token that is, its rank and probability, and the gap, log p of greedy's token less its
             own (T = 1, nats; exact, since what comes before is the same). Any sampled turn is left
             somewhere, so the question is the difference: genuine turns less other turns of the
             same context and temperature, with and without degenerate ones (noise that leads far
             from greedy also garbles). A negative gap: genuine turns lie nearer to greedy.
references   log p of users' real follow-ups by temperature (in the file), and where it is largest.
logit lens   at every stored position, every layer's residual stream through final norm and
             unembedding: log p of the token that opens the greedy turn, of the best of the other
             tokens that open follow-ups (in at least half of the turns, as above), and of all those
             together. "Overtakes" is the first layer from which greedy's opening stays ahead to the
             last (there it is ahead of every other by definition). Early layers aren't made to be
             read so: it shows when an answer becomes legible to the unembedding, not when it is
             decided.
"""

EPILOG = """\
The unit is the source; intervals over sources by the methods that benchmarks/coverage.md found to
hold (rates: Wilson's with the effective sample size, since bootstraps fall short near zero;
medians: cluster bootstrap; the column method says which). Tests are Holm-corrected: differences
from greedy of the rate, those of the failures, and genuine turns against others are a family each,
and in each the datasets together are one of their own.
Written: estimates.parquet (every number, one per row), turns.parquet (where greedy leaves each
sampled turn), rates, first_token, hidden and lens (PNG, SVG).
Exit status: 0 done, 2 bad input (one line says what and what to do), 130 interrupted.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return guarded(lambda: _run(args), lambda: "files that were written are whole")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog="python -m experiments.temperature_sweep", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a judged run's folder")
    parser.add_argument("--judge", metavar="NAME", help="whose verdicts (default: the only judge)")
    parser.add_argument(
        "--temperatures",
        nargs="+",
        type=_temperature,
        metavar="T",
        help="of the first-token curves (default: 0.3, 0.4 … 1.5, 1.75, 2 and the sampled ones)",
    )
    parser.add_argument(
        "--positions",
        nargs="+",
        metavar="NAME",
        help="of the logit lens (default: all that were kept)",
    )
    add_out(parser, "temperature_sweep")
    add_intervals(parser.add_argument_group("intervals"), seed="resampling and sign flips")
    return parser


def _temperature(text: str) -> float:
    """A temperature that a distribution can have, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.01 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature from 0.01 to 100")
    return value


def _run(args: argparse.Namespace) -> None:
    from experiments.temperature_sweep import show as figures
    from experiments.temperature_sweep import show as screen
    from experiments.temperature_sweep.analyse import analyse, estimates
    from experiments.temperature_sweep.read import read
    from ia_mech.display import Bar
    from ia_mech.estimates import few_sources, write_parquet
    from probes.report.figures import save

    folder = output_folder(args.out, args.runs[0], "temperature_sweep")
    sweep = read(args.runs, args.judge)
    bar = Bar()
    try:
        found, notes = analyse(sweep, args.temperatures, args.positions, bar)
    finally:
        bar.stop()
    made = estimates(found, level=args.level, resamples=args.resamples, seed=args.seed)
    write_estimates(
        made, folder, sweep.runs, args.level, judge=sweep.judge, experiment="temperature_sweep"
    )
    # Keys that hold across runs are for joining here; a reader has the names.
    turns = found.hidden.drop(columns=["source", "context"])
    write_parquet(turns, folder / "turns.parquet", {"judge": sweep.judge})
    name = f"{sweep.runs[0].model['name']} · judge {sweep.judge}"
    save(figures.rates(made, name), folder, "rates")
    save(figures.first_token(made, name), folder, "first_token")
    save(figures.hidden(made, name), folder, "hidden")
    if found.lens is not None:
        save(figures.lens(made, name), folder, "lens")
    # Last: a closed pipe must not cost the files.
    screen.show(made, notes + few_sources(made), args.level)
    print(f"wrote {folder}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
