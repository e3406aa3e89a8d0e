"""``export`` and ``import`` of ``python -m ia_mech.judge``."""

import argparse
import re

from rich.console import Console
from rich.markup import escape

from ia_mech.cli import one_line
from ia_mech.judge.rubric import NAMES
from ia_mech.judge.sheets.draw import export_sheet, write_sheet
from ia_mech.judge.sheets.read_back import import_sheet
from ia_mech.run import Run

_CELL = 32_767  # characters; a spreadsheet breaks longer cells


def export_command(args: argparse.Namespace) -> None:
    """``python -m ia_mech.judge export``."""
    run = Run.open(args.run)
    out = args.out
    if out is not None:
        out = out.with_name(re.sub(r"\.(csv|jsonl)$", "", out.name))
    name = args.name
    if name is None and out is not None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", out.name).lstrip("._-") or None
    sheet = export_sheet(run, args.n, by=args.by, seed=args.seed, name=name)
    # Not the run's name: it holds the model's and the dataset's.
    out = out or run.path.resolve().parent / sheet.key["sheet"]
    files = write_sheet(run, sheet, out)
    console, key = Console(highlight=False, emoji=False), sheet.key

    def say(text: str) -> None:
        console.print(escape(text), soft_wrap=True)

    if key["judge"] is None:
        say("no judge has judged this run: one stratum, so rare categories may hardly be seen")
    else:
        say(f"{key['n']} of {len(run.generations)} turns, by what {key['judge']['name']} says:")
    for stratum, count in key["strata"].items():
        say(f"  {stratum:<24}{count['drawn']:>5} of {count['rows']:>6}")
    if any(len(text) > _CELL for row in sheet.rows for text in (row["query"], row["response"])):
        say(f"some texts are longer than a spreadsheet's cell ({_CELL}): fill in the JSON lines")
    say(f"the key stays in the run, as sheet {key['sheet']!r}")
    say("an apostrophe before = + - @ is ours: it keeps spreadsheets from running a model's text")
    for file in files:
        say(f"sheet: {file}")
    say("fill in: category (and note, if you like); explained by: python -m ia_mech.judge rubric")
    say(f"next: python -m ia_mech.judge import {args.run} {files[0]} --annotator NAME")


def import_command(args: argparse.Namespace) -> None:
    """``python -m ia_mech.judge import``."""
    run = Run.open(args.run)
    done = import_sheet(run, args.file, args.annotator, replace=args.replace)
    console, count = Console(highlight=False, emoji=False), done.labels.total()
    said = ", ".join(f"{name} {done.labels[name]}" for name in NAMES if done.labels[name])
    console.print(
        escape(f"{count} of {done.drawn} rows labelled by {one_line(args.annotator)}: {said}"),
        soft_wrap=True,
    )
    if count < done.drawn:
        console.print(
            f"{done.drawn - count} of the sheet's {done.drawn} rows have no category and are left "
            "out; the others are taken for a random part of their strata",
            soft_wrap=True,
        )
    if done.unseen:
        console.print(
            f"nothing is labelled of {', '.join(done.unseen)}: no figure will cover such turns",
            soft_wrap=True,
        )
    console.print(escape(f"labels: {done.path}"), soft_wrap=True)
    console.print(escape(f"next: python -m ia_mech.judge agreement {args.run}"), soft_wrap=True)
