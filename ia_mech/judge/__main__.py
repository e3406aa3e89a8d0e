"""``python -m ia_mech.judge``: what the subcommands do. See ``--help``, and ``options.py``."""

import argparse
import sys

from ia_mech.cli import guarded, tolerant_streams
from ia_mech.judge.commands import build_parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return guarded(
        lambda: _COMMANDS[args.command](args), lambda: "verdicts that were paid for are kept"
    )


# What each needs is imported late, so that --help and a mistyped flag answer at once.


def _run(args: argparse.Namespace) -> None:
    from ia_mech.judge.commands import run

    run(args)


def _check(args: argparse.Namespace) -> None:
    from ia_mech.judge.commands import check

    check(args)


def _export(args: argparse.Namespace) -> None:
    from ia_mech.judge.sheets import export_command

    export_command(args)


def _import(args: argparse.Namespace) -> None:
    from ia_mech.judge.sheets import import_command

    import_command(args)


def _agreement(args: argparse.Namespace) -> None:
    from ia_mech.judge.agreement import command

    command(args)


def _rubric(args: argparse.Namespace) -> None:
    from ia_mech.judge.commands import rubric

    rubric(args)


_COMMANDS = {
    "run": _run,
    "check": _check,
    "export": _export,
    "import": _import,
    "agreement": _agreement,
    "rubric": _rubric,
}

if __name__ == "__main__":
    sys.exit(main())
