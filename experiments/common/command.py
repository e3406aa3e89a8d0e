"""What the command lines of all experiments share: where results go, and writing them.

What needs pandas or torch is imported late, so that ``--help`` and a mistyped flag answer at once.
"""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ia_mech.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from ia_mech.run import Run

ESTIMATES = "estimates.parquet"


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
        UserError: as :func:`outside_runs`.
    """
    usual = first_run / "experiments" / name
    folder = usual if out is None else out
    if folder.resolve() == usual.resolve():
        return _own(folder, name)
    return outside_runs(folder, name)


def outside_runs(folder: Path, name: str) -> Path:
    """The folder, if the results of an experiment may go there.

    Raises:
        UserError: a file, a folder that can't be written, one among a run's own files, or one with
            another experiment's results.
    """
    from ia_mech.run.layout import refuse_inside_run

    refuse_inside_run(folder / ESTIMATES)
    return _own(folder, name)


def _own(folder: Path, name: str) -> Path:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{there} is a file", "name a folder with --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{there} is not writable", "name another folder with --out")
    whose = _experiment(folder / ESTIMATES)
    if whose not in (None, name):
        raise UserError(f"{folder} holds results of {whose}", "name another folder with --out")
    return folder


def _experiment(file: Path) -> str | None:
    """Which experiment wrote a file of estimates; None if there is none, or it doesn't say."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        return None
    try:
        about = (pq.read_schema(file).metadata or {}).get(b"ia_mech", b"{}")
    except (pa.ArrowException, OSError):
        return "something else"
    return json.loads(about).get("experiment")


def write_estimates(
    frame: "pd.DataFrame",
    folder: Path,
    runs: "list[Run]",
    level: float,
    *,
    experiment: str,
    **about,
) -> None:
    """Make the folder and write ``estimates.parquet``, with what it was made from."""
    from probes.report.tables import write_parquet

    folder.mkdir(parents=True, exist_ok=True)
    record = {"experiment": experiment, "runs": [str(run.path) for run in runs], "level": level}
    write_parquet(frame, folder / ESTIMATES, record | about)
