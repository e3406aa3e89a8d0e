"""Open the runs of an experiment."""

from collections.abc import Sequence
from pathlib import Path

from ia_mech.conversations import UNPERTURBED
from ia_mech.errors import UserError
from ia_mech.judge.label import check_finished
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
