"""Perturb the conversations of sampled runs, sample again, and compare.

Usage::

    python -m experiments.perturbations cache/RUN
    python -m experiments.perturbations cache/RUN-A cache/RUN-B --limit 40 --out cache/perturbed

What torch needs is imported late, so that ``--help`` and a mistyped flag answer at once.
"""

import argparse
import sys
from pathlib import Path

from experiments.common.command import outside_runs, write_estimates
from ia_mech.cli import Parser, add_intervals, guarded, tolerant_streams, whole_from

DESCRIPTION = """\
Does the user turn react to the response, or is it role play that would come anyway? Each
conversation of a sampled and judged run is changed in one respect and sampled again, with the same
random numbers; every conversation appears under every condition.

truncate             the first half of the response, cut at a sentence's end (a single sentence:
                     between words)
truncate_mid         the first half of the response, cut inside a sentence
ask                  a generic question after the response
remove               an empty response
swap                 another conversation's response of similar length, drawn from these
                     conversations of the same dataset
contradict           a wrong final answer where it is a number, else a sentence that retracts
neutral              "Okay." and the like in place of the response
shuffle              the response's sentences in random order (a single one stays as it is)
header_only          the bare user header, no conversation: what the role alone brings forth
header_assistant     an assistant header where the user header stood: is it the role, or the place?
header_no_turn_end   the token that ends the response left out
header_no_separator  what stands between turn end and user header left out

What a condition did to each conversation is in its metadata (how); conversations that it left
unchanged count, and are counted in a note.
"""

EPILOG = """\
rate          share of turns judged genuine, after the response that the model was given. "Held":
              the judge is shown the unperturbed response instead. A turn that was written without
              it can still fit by topic or luck; that rate is what a reaction has to exceed. Of the
              conditions on the header both are the same.
falsifier     if remove and swap don't lower the held rate, what was measured isn't shown to react
              to the response; nor if turns after the bare header, which have seen no conversation,
              are called genuine as often. It is printed per temperature, with what could have been
              detected.
profile       shares of the rubric's categories.
real follow-ups  log p at T = 1 of what users really said, the same token ids under all conditions.
displacement  L2 distance of the header's residual stream from the unperturbed one, layer by layer;
              1 is the mean distance between two of these conversations, of one dataset.
Differences are paired within sources and Holm-corrected.

The unperturbed turns are the runs' first --samples, nothing is sampled twice. An interrupted run
goes on when the same command is given again. The rules judge judges at once; another one is asked
for by name. Written to --out: conversations.jsonl (what each condition made of each conversation),
run/ (a run like any other), estimates.parquet, rates, profile, references and displacement (PNG,
SVG).
Exit status: 0 done, 2 bad input (one line says what and what to do), 130 interrupted.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return guarded(
        lambda: _run(args),
        lambda: "what was sampled is kept; the same command goes on from there",
    )


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog="python -m experiments.perturbations", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a judged run's folder")
    parser.add_argument(
        "--conditions", nargs="+", metavar="NAME", help="which to make (default: all)"
    )
    parser.add_argument(
        "--limit",
        type=whole_from(1),
        metavar="N",
        help="conversations per run, from the start (default: all)",
    )
    parser.add_argument(
        "--temperatures",
        nargs="+",
        type=float,
        metavar="T",
        help="of those in the runs, besides greedy (default: 1, if they have it)",
    )
    parser.add_argument(
        "--samples",
        type=whole_from(1),
        metavar="N",
        help="per temperature, at most what the runs have (default: 4)",
    )
    parser.add_argument("--judge", metavar="NAME", help="whose verdicts (default: the only judge)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where everything goes (default: cache/<first run>-perturbed)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show what each condition makes of the first conversation and how much there is to "
        "sample, and stop",
    )
    add_intervals(parser.add_argument_group("intervals"), seed="resampling")
    return parser


def _run(args: argparse.Namespace) -> None:
    from experiments.perturbations import sample
    from experiments.perturbations import show as figures
    from experiments.perturbations import show as screen
    from experiments.perturbations.analyse import DISTANCE, REFERENCE, estimates
    from experiments.perturbations.conditions import CONDITIONS
    from experiments.perturbations.read import read
    from experiments.perturbations.sample import known_conditions, read_base
    from ia_mech.estimates import few_sources
    from ia_mech.rates.load import NOBODY, read_runs
    from probes.report.figures import save

    folder = _folder(args)
    names = known_conditions(args.conditions or list(CONDITIONS))
    grid = {"limit": args.limit, "temperatures": args.temperatures, "samples": args.samples}
    base = read_base(args.runs, **grid)
    judge = read_runs(args.runs, args.judge, NOBODY).judge  # before hours of sampling
    conversations, left_out, notes = sample.prepare(base, names)
    if args.dry_run:
        screen.show_plan(conversations, base, notes, folder)
        return
    run = sample.sampled(base, conversations, folder)
    sample.judged(run, judge, base)
    compared = read(base, run, judge, left_out)
    found = estimates(compared, level=args.level, resamples=args.resamples, seed=args.seed)
    about = {"experiment": "perturbations", "judge": judge}
    write_estimates(found, folder, [*base.runs, run], args.level, **about)
    name = run.model["name"]
    save(figures.rates(found, f"{name}, {judge}"), folder, "rates")
    save(figures.profile(found, f"{name}, {judge}"), folder, "profile")
    if (found["quantity"] == DISTANCE).any():
        save(figures.displacement(found, f"{name} · header_last"), folder, "displacement")
    else:
        notes.append("no displacement: a dataset needs two sources to say how far apart they lie.")
    if (found["quantity"] == REFERENCE).any():
        save(figures.references(found, f"{name} · real follow-ups"), folder, "references")
    notes += compared.notes + few_sources(found)
    screen.show(found, notes, args.level)  # last: a closed pipe costs no file
    print(f"wrote {folder}", file=sys.stderr)


def _folder(args: argparse.Namespace) -> Path:
    from ia_mech.models.embedded import cache_dir

    name = args.runs[0].resolve().name
    folder = cache_dir() / f"{name}-perturbed" if args.out is None else args.out
    return outside_runs(folder, "perturbations")


if __name__ == "__main__":
    sys.exit(main())
