"""What the command lines of all experiments share: where results go, and writing them.

What needs pandas or torch is imported late, so that ``--help`` and a mistyped flag answer at once.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ia_mech.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from ia_mech.run import Run


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """``--out`` of an experiment that reads runs."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"where tables and figures go (default: experiments/{name} in the first run)",
    )


def output_folder(out: Path | None, first_run: Path, name: str) -> Path:
    """Where results go; it isn't made yet.

    Raises:
        UserError: a file, or a folder among a run's own files.
    """
    usual = first_run / "experiments" / name
    folder = usual if out is None else out
    return folder if folder.resolve() == usual.resolve() else outside_runs(folder)


def outside_runs(folder: Path) -> Path:
    """The folder, if results may go there.

    Raises:
        UserError: a file, or a folder among a run's own files.
    """
    from ia_mech.run.layout import refuse_inside_run

    refuse_inside_run(folder / "estimates.parquet")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", "name a folder with --out")
    return folder


def write_estimates(
    frame: "pd.DataFrame", folder: Path, runs: "list[Run]", level: float, **about
) -> None:
    """Make the folder and write ``estimates.parquet``, with what it was made from."""
    from probes.report.tables import write_parquet

    folder.mkdir(parents=True, exist_ok=True)
    record = {"runs": [str(run.path) for run in runs], "level": level, **about}
    write_parquet(frame, folder / "estimates.parquet", record)
