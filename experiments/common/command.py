"""What the command lines of all experiments share: where results go, and writing them.

What needs pandas or torch is imported late, so that ``--help`` and a mistyped flag answer at once.

Open the runs of an experiment.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ia_mech.data.conversations import UNPERTURBED
from ia_mech.errors import UserError
from ia_mech.judge.label import check_finished
from ia_mech.run import Run

if TYPE_CHECKING:
    import pandas as pd

    from ia_mech.run import Run


def open_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Finished runs, each once.

    Raises:
        UserError: not a run, an unfinished one, one given twice, or a copy of another.
    """
    places = [Path(path).resolve() for path in paths]
    for at, place in enumerate(places):
        if place in places[:at]:
            raise UserError(f"{paths[at]} is given twice", "give each run once")
    runs = [Run.open(path) for path in paths]
    for at, run in enumerate(runs):
        check_finished(run)
        same = [other for other in runs[:at] if other.identity_digest == run.identity_digest]
        if same:
            raise UserError(f"{run.path} is a copy of {same[0].path}", "give each run once")
    return runs


def unperturbed(runs: list[Run]) -> list[Run]:
    """The runs, if none of their contexts is perturbed.

    Raises:
        UserError: one is: what is measured in changed contexts isn't pooled with the rest.
    """
    for run in runs:
        if (run.contexts["perturbation"].fillna(UNPERTURBED) != UNPERTURBED).any():
            raise UserError(
                f"{run.path} holds perturbed contexts", "give the run that they were made from"
            )
    return runs


def of_one_model(runs: list[Run]) -> list[Run]:
    """The runs, if they are of one model.

    Raises:
        UserError: they aren't.
    """
    if len({run.model["weights_hash"] for run in runs}) > 1:
        names = ", ".join(dict.fromkeys(run.model["name"] for run in runs))
        raise UserError(f"the runs are of several models ({names})", "give runs of one model")
    return runs


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
    from ia_mech.estimates import write_parquet

    folder.mkdir(parents=True, exist_ok=True)
    record = {"experiment": experiment, "runs": [str(run.path) for run in runs], "level": level}
    write_parquet(frame, folder / ESTIMATES, record | about)
