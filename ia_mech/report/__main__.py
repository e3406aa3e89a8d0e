"""Runs as one page.

Usage::

    ia-mech report cache/RUN
    ia-mech report cache/RUN-A cache/RUN-B --out both.html
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ia_mech.cli import JUDGE_HELP, Parser, path_of, run_command, run_folder, tolerant_streams

if TYPE_CHECKING:
    from ia_mech.run import Run

MARK = b"Written by ia_mech"  # stands in every page
DESCRIPTION = """\
Write runs as one HTML file that opens from disk without a network. It shows what judges, probes and
experiments found, each result with its control, figures and estimates, and all turns to read and
filter. Several runs stand side by side. Results are read from the run's folder, and from folders
beside it or in the cache if they name this run. At the end the command prints how often the model's
turns are follow-ups, three turns with their labels, and where the page is.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="ia-mech report", description=DESCRIPTION)
    parser.add_argument("runs", nargs="+", type=run_folder, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--results",
        nargs="+",
        type=path_of,
        default=[],
        metavar="FOLDER",
        help="further folders with results on the first run",
    )
    whose = f"{JUDGE_HELP}, in the lines at the end and first on the page"
    parser.add_argument("--judge", metavar="NAME", help=whose)
    parser.add_argument(
        "--out", type=path_of, metavar="FILE", help="the page (default: report.html in the run)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return run_command(lambda: _report(args), lambda: "no file was left half-written")


def _report(args: argparse.Namespace) -> None:
    from ia_mech.cli import program, shell_word
    from ia_mech.errors import UserError
    from ia_mech.run.layout import check_output, refuse_unwritable

    usual = args.runs[0] / "report.html"
    out: Path = args.out or usual
    if out.resolve() != usual.resolve():
        check_output(out)
        if out.is_file() and MARK not in out.read_bytes():
            raise UserError(f"{out} is a file that no report wrote", "give another --out")
    elif out.is_dir():
        raise UserError(f"{out} is a folder", "remove it, or give --out")

    from ia_mech.display import Bar, console
    from ia_mech.rates.evidence import result_folders
    from ia_mech.rates.load import open_runs
    from ia_mech.report.contents import missing
    from ia_mech.report.ending import conclusions, control, turns_shown
    from ia_mech.run.integrity import replace_file
    from ia_mech.run.labels import choose_judge

    runs = open_runs(args.runs)
    refuse_unwritable(out.parent)
    Bar().say("reading runs and results …")
    judges = [choose_judge([run], args.judge) if run.labels.judges else None for run in runs]
    folders = [result_folders(run, () if n else args.results) for n, run in enumerate(runs)]
    lines = conclusions(runs, _names(runs), judges, folders)
    controls = [one for run, by in zip(runs, judges, strict=True) if by for one in control(run, by)]
    page = render_report(runs, args.results, args.judge, lines, controls)

    def write(scratch: Path) -> None:
        scratch.write_text(page, encoding="utf-8")

    replace_file(out, write)
    judged = [(run, judge) for run, judge in zip(runs, judges, strict=True) if judge is not None]
    for run, by in judged[:1]:
        lines += turns_shown(run, by)
    screen = console()
    for line in lines:
        screen.print(line, soft_wrap=True, markup=False)
    print(f"\npage: {shell_word(out)}\nopen it in a browser: {out.resolve().as_uri()}")
    for run, judge, of_run in zip(runs, judges, folders, strict=True):
        if command := missing(run, of_run, judge):
            print(f"next: {program()} {command}")


def render_report(
    runs: "Sequence[Run]",
    more: "Sequence[Path]" = (),
    judge: str | None = None,
    conclusions: Sequence[str] = (),
    controls: Sequence[str] = (),
) -> str:
    """The page of open, finished runs; ``more`` are folders with results on the first one. The
    labels of ``judge`` come first. ``conclusions`` with their ``controls`` are sentences that stand
    on top where no result answers the plain question.

    Raises:
        UserError: labels or results that can't be read.
    """
    import pandas as pd

    from ia_mech import __version__
    from ia_mech.judge.rubric import CATEGORIES, heading
    from ia_mech.page import glossary, rendered
    from ia_mech.rates.evidence import result_folders
    from ia_mech.rates.load import QUESTION
    from ia_mech.report.contents import builtin_card, cards_of, commands, provenance
    from ia_mech.report.turns import browser
    from ia_mech.run.queries import conversations_text

    names = _names(runs)
    folders = [result_folders(run, () if n else more) for n, run in enumerate(runs)]
    cards = cards_of(runs, names, folders)
    data, turns_note = browser(runs, names, folders, judge=judge)
    if any(answer.plain for card in cards for answer in card.answers):
        conclusions = ()  # these answers say the same, with intervals
    models = ", ".join(dict.fromkeys(run.model["name"] for run in runs))
    turns = sum(len(run.turns) for run in runs)
    contexts = pd.concat([run.turns.drop_duplicates("context_id") for run in runs])
    sources = len(contexts[["dataset", "source_id"]].drop_duplicates())
    temperatures = sorted({t for run in runs for t in run.turns["temperature"]})
    settings = ", ".join(f"T = {t:g}" if t else "greedy" for t in temperatures)
    return rendered(
        "report",
        data,
        title=models if models == ", ".join(names) else f"{models}: {', '.join(names)}",
        description=f"{models} was given a query and an assistant's response, and wrote the next "
        f"user turn: {turns:,} turns ({settings}) in {conversations_text(len(contexts), sources)} "
        f"from {', '.join(sorted(contexts['dataset'].unique()))}. A follow-up could be the user's "
        "next message and takes up something concrete in the response. A greedy turn takes the "
        "likeliest token each time, others are sampled at temperature T.",
        question=QUESTION if conclusions or not cards else cards[0].question,
        rubric=CATEGORIES,
        heading=heading,
        conclusions=conclusions,
        controls=controls,
        words=glossary(),
        cards=cards,
        several=len(runs) > 1,
        without_results=[
            (name, "rates" if run.labels.judges else "judge run")
            for run, name, of_run in zip(runs, names, folders, strict=True)
            if not of_run
        ],
        turns_note=turns_note,
        provenance=provenance(runs, names),
        commands=commands(runs, cards),
        judge_card=builtin_card(runs),
        version=__version__,
    )


def _names(runs: "Sequence[Run]") -> list[str]:
    """The runs' names on the page: their models' names if these differ, else their folders'."""
    for names in ([run.model["name"] for run in runs], [run.name for run in runs]):
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({number})" for number, run in enumerate(runs, start=1)]


if __name__ == "__main__":
    sys.exit(main())
