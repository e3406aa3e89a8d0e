"""``agreement`` of ``python -m ia_mech.judge``."""

import argparse
import json
from typing import Any

from rich.console import Console
from rich.markup import escape

from ia_mech.errors import UserError
from ia_mech.judge.agreement.disagreements import csv_of
from ia_mech.judge.agreement.labellers import Agreement, agreement
from ia_mech.judge.agreement.tables import (
    print_comparison,
    print_disagreements,
    print_group,
    print_pairs,
    print_repeats,
    to_json,
)
from ia_mech.judge.sheets.files import NewFiles
from ia_mech.run import Run, layout


def command(args: argparse.Namespace) -> None:
    """``python -m ia_mech.judge agreement``."""
    if args.disagreements < 0:
        raise UserError("--disagreements can't be negative", "give 0 for none")
    for path in (args.json, args.csv):
        if path is not None:
            layout.refuse_inside_run(path)
    run = Run.open(args.run)
    found = agreement(run, args.between)
    contents = {}
    if args.json is not None:
        text = json.dumps(report(run, found), indent=1, ensure_ascii=False, allow_nan=False)
        contents[args.json] = (text + "\n").encode()
    if args.csv is not None:
        contents[args.csv] = csv_of(found.disagreements, [x.name for x in found.labellers])
    with NewFiles(contents, replace=True):
        pass
    console = Console(highlight=False, emoji=False)
    console.width = max(console.width, 110)  # the confusion matrix belongs on one line
    print_pairs(console, found.pairs)
    if found.group is not None:
        print_group(console, len(found.labellers), found.group)
    if found.repeats:
        print_repeats(console, found.repeats)
    for pair in found.pairs:
        console.print()
        print_comparison(console, f"{pair.prediction} against {pair.truth}", pair.comparison)
    console.print()
    print_disagreements(console, found.disagreements, args.disagreements)
    for path in contents:
        console.print(escape(f"written: {path}"), soft_wrap=True)
    console.print(escape(f"next: python -m ia_mech.rates {args.run}"), soft_wrap=True)


def report(run: Run, found: Agreement) -> dict[str, Any]:
    """All figures as JSON; NaN is null."""
    return to_json(
        {
            "run": str(run.path),
            "labellers": [
                {"name": x.name, "kind": x.kind, "rows": int(x.labelled.sum())}
                for x in found.labellers
            ],
            "pairs": found.pairs,
            "group": found.group,
            "repeats": {
                name: {"repeats": count, "alpha": alpha}
                for name, (count, alpha) in found.repeats.items()
            },
            "disagreements": len(found.disagreements),
        }
    )
