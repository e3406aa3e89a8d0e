"""``ia-mech judge check``: a judge against the annotated turns of a file."""

import argparse
from pathlib import Path
from typing import Any

from rich.markup import escape

from ia_mech.cli import NOTHING, one_line
from ia_mech.display import Bar, console
from ia_mech.errors import UserError
from ia_mech.judge.command import make_judge, print_plan
from ia_mech.judge.comparison import TEXTS, compare, tables_of_pairs
from ia_mech.judge.judging import judge_items
from ia_mech.judge.rubric import Rubric
from ia_mech.judge.verdict import JUDGED, Item
from ia_mech.results import print_table
from ia_mech.untrusted import parse_json


def check(args: argparse.Namespace) -> int:
    """Judge a file's turns and compare with its annotations; returns the exit status."""
    judge = make_judge(args)
    rows = _turns(args.file, judge.rubric)
    items = [Item(row["query"], row["response"], row["user_turn"]) for row in rows]
    if args.dry_run:
        print_plan(judge, items)
        return 0
    judged, _ = judge_items(items, judge, Bar())
    verdicts = [judged[item] for item in items]
    screen = console()
    annotated = [i for i, row in enumerate(rows) if row.get("category")]
    if annotated:
        comparison = compare(
            [rows[i]["category"] for i in annotated],
            [verdicts[i].category for i in annotated],
            # A row without a source stands alone.
            [f"row {i}" if (s := rows[i].get("source_id")) is None else str(s) for i in annotated],
            rubric=judge.rubric,
        )
        for table in tables_of_pairs({(args.file.name, args.judge): comparison}, []):
            print_table(screen, table)
        if known := sum(judge.fitted_on(items)):
            screen.print(
                f"[bold]{known} of these {len(items)} turns were in the judge's fit[/]: on "
                "them it looks better than it is; its card has cross-validated figures.",
                soft_wrap=True,
            )
    else:
        for row, verdict in zip(rows, verdicts, strict=True):
            screen.print(
                f"{verdict.category or verdict.status:<22}{escape(one_line(row['user_turn'], 90))}",
                soft_wrap=True,
            )
    if judge.caveat:
        screen.print(escape(judge.caveat), soft_wrap=True)
    return 0 if any(verdict.status == JUDGED for verdict in verdicts) else NOTHING


def _turns(path: Path, rubric: Rubric) -> list[dict[str, Any]]:
    """The object of every line of a file that isn't blank.

    Raises:
        UserError: there is none, or lines can't be used: the first, and how many.
    """
    rows, bad = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            try:
                rows.append(_turn(line, f"line {number} of {path}", rubric))
            except UserError as error:
                bad.append(error)
    if len(bad) > 1:
        raise UserError(f"{bad[0].problem} (and {len(bad) - 1} lines more)", bad[0].remedy)
    if bad:
        raise bad[0]
    if not rows:
        raise UserError(f"{path} holds no turn", "give a JSON-lines file")
    return rows


def _turn(line: bytes, where: str, rubric: Rubric) -> dict[str, Any]:
    row = parse_json(line, where, "correct it")
    if not isinstance(row, dict):
        raise UserError(f"{where} isn't a JSON object", "correct it")
    if not all(isinstance(row.get(key), str) for key in TEXTS):
        raise UserError(f"{where} lacks a text", f"each needs {', '.join(TEXTS)}")
    if row.get("category") and row["category"] not in [*rubric.names]:
        known = f"give one of {', '.join(rubric.names)}"
        raise UserError(f"{where}: no category {row['category']!r} in the rubric", known)
    return row
