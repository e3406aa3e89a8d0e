"""``python -m ia_mech.annotate``: turns for people to label, in a browser or a spreadsheet.

Usage::

    python -m ia_mech.annotate export cache/RUN --n 200
    python -m ia_mech.annotate import cache/RUN sheet-0a1b2c3d.json --annotator anna

Both are subcommands of ``ia_mech.judge``, too.
"""

import argparse
import sys

from ia_mech.cli import Parser
from ia_mech.judge.__main__ import add_export, add_import, run_command

DESCRIPTION = """\
Have people label user turns without knowing model, judge, temperature or which turns are decoys:
export writes a page to annotate in, which works without a network, and the same as a sheet; import
reads what came back.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="python -m ia_mech.annotate", description=DESCRIPTION)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    add_export(commands)
    add_import(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
