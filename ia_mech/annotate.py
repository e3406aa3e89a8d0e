"""``ia-mech annotate export`` and ``import``: turns for people to label, blind."""

import importlib
import sys

from ia_mech.cli import (
    JUDGE_HELP,
    Parser,
    path_of,
    run_command,
    run_folder,
    tolerant_streams,
    whole_from,
)

DESCRIPTION = """\
Label user turns by hand: export a page to annotate in, which opens in any browser without a network
and is blind, and import what its annotator hands back.
"""

EPILOG = """\
examples:
  ia-mech annotate export cache/RUN --n 200 --out sheet
      sheet.html is the page; its button "export" (key e) saves sheet-filled.csv
  ia-mech annotate import cache/RUN sheet-filled.csv --annotator anna
Then: ia-mech judge agreement cache/RUN
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)

    def body() -> int | None:
        # Imported late, so that --help and a mistyped flag are answered at once.
        return getattr(importlib.import_module("ia_mech.judge.sheets"), args.function)(args)

    return run_command(body, lambda: "no file was left half-written")


def build_parser() -> Parser:
    """The command line; ``args.function`` names a function of :mod:`ia_mech.judge.sheets`."""
    parser = Parser(prog="ia-mech annotate", description=DESCRIPTION, epilog=EPILOG)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    _add_export(commands)
    _add_import(commands)
    return parser


def _add_export(commands) -> None:
    parser = commands.add_parser(
        "export",
        help="write a blind sheet to annotate",
        description="Write a sample of a run's user turns as a page to annotate in (HTML) and as a "
        "table to fill\nin (CSV): query, response and turn in random order, without model, "
        "temperature, judge\nor real follow-up. Stratified by a judge's labels, so that rare "
        "categories are seen, or,\nof first tokens (ia-mech mass), by how likely they are; the "
        "inclusion probabilities stay in\nthe run, for weighting. Turns after wrong conversations "
        "are mixed in. Nothing is "
        "overwritten.",
    )
    parser.set_defaults(function="export_command")
    add = parser.add_argument
    add("run", type=run_folder, help="a run's folder")
    add(
        "--n",
        type=int,
        help="turns (default: 200, or all); a quarter as many are added after wrong conversations",
    )
    add("--judge", metavar="NAME", help=f"by {JUDGE_HELP}")
    add("--seed", type=whole_from(0), default=0, help="seed of the choice of turns (default: 0)")
    add(
        "--out",
        type=path_of,
        help="the sheet without .csv or .html (default: a blind name beside the run)",
    )


def _add_import(commands) -> None:
    parser = commands.add_parser(
        "import",
        help="read a filled-in sheet",
        description="Check a filled-in sheet (CSV in UTF-8) row by row and write\n"
        "annotations/<annotator>.parquet. Rows without a category are "
        "left out; one bad row and\nnothing is written. Only item, category and note are read.",
    )
    parser.set_defaults(function="import_command")
    add = parser.add_argument
    add("run", type=run_folder, help="the run that the sheet was exported from")
    add("file", type=path_of, help="the sheet, as the page saved it or a spreadsheet")
    add("--annotator", required=True, help="who filled it in; a name for the file")
    add("--replace", action="store_true", help="replace this annotator's labels in the run")


if __name__ == "__main__":
    sys.exit(main())
