"""The labels of a run by a judge or an annotator, laid out over the run's turns."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from ia_mech.errors import UserError
from ia_mech.judge.rubric import NAMES
from ia_mech.run import Run
from ia_mech.run.labels import KEY, positions


class LabelSet(NamedTuple):
    """Labels of one run by one judge or annotator.

    Attributes:
        repeats: per repeat (of an annotator there is one), ``[rows of Run.turns]`` the columns of
            its file; missing where a turn has no label.
        decoys: the first labels of decoys: the columns of its file, and ``row``, the position of
            the decoy's turn in ``Run.turns``.
    """

    repeats: list[pd.DataFrame]
    decoys: pd.DataFrame

    @property
    def turns(self) -> pd.DataFrame:
        """The first repeat."""
        return self.repeats[0]


def read_labels(run: Run, kind: str, name: str, columns: Sequence[str] | None = None) -> LabelSet:
    """The labels of a judge or an annotator.

    Args:
        run: whose turns they are of.
        kind: ``judgements`` or ``annotations``.
        name: of the judge or annotator.
        columns: of a judge's file, :data:`KEY` and ``category`` always; all if not given.

    Raises:
        UserError: no such labels, or ones of another run, of other turns or another rubric.
    """
    if columns is not None:
        columns = [*dict.fromkeys([*KEY, "category", *columns])]
    labels = run.labels
    judged = kind == "judgements"
    own = labels.judgements(name, columns) if judged else labels.annotations(name)
    decoys = labels.decoys(name, kind, None if columns is None else [*columns, "decoy", "shown"])
    unknown = {*own["category"].dropna(), *decoys["category"].dropna()} - {*NAMES}
    if unknown:
        raise UserError(
            f"the labels of {name!r} in {run.path} name {', '.join(sorted(unknown))}, which the "
            "rubric lacks",
            f"make them again: {labels.command(kind, name)}",
        )
    parts = [own]
    if judged:
        parts = [part for _, part in own.groupby("repeat")] or parts
        decoys = decoys[decoys["repeat"] == 0].reset_index(drop=True)
    rows = np.arange(len(run.turns))
    repeats = [part.set_axis(positions(run.turns, part)).reindex(rows) for part in parts]
    return LabelSet(repeats, decoys.assign(row=positions(run.turns, decoys)))
