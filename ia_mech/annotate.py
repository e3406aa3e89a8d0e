"""``python -m ia_mech.annotate export`` and ``import``: turns for people to label, blind.

The subcommands of ``python -m ia_mech.judge``, under the name of what they are for.
"""

import sys

from ia_mech.cli import Parser
from ia_mech.judge.__main__ import add_export, add_import
from ia_mech.judge.__main__ import main as judge

DESCRIPTION = """\
Label user turns by hand: export a page to annotate in, which opens in any browser without a network
and is blind, and import what its annotator hands back.
"""

EPILOG = """\
examples:
  python -m ia_mech.annotate export cache/RUN --n 200 --out sheet
      sheet.html is the page; its button "export" (key e) saves sheet.json
  python -m ia_mech.annotate import cache/RUN sheet.json --annotator anna
Then: python -m ia_mech.judge agreement cache/RUN
"""


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="python -m ia_mech.annotate", description=DESCRIPTION, epilog=EPILOG)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    add_export(commands)
    add_import(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return judge(argv, build_parser())


if __name__ == "__main__":
    sys.exit(main())
