"""The turns that labellers disagree on, the most telling first."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ia_mech.judge.label import items_of
from ia_mech.judge.rubric import ASSESSED, GENUINE
from ia_mech.judge.sheets.files import csv_bytes
from ia_mech.judge.verdict import Item
from ia_mech.run import Run
from ia_mech.run.labels import KEY

if TYPE_CHECKING:
    from ia_mech.judge.agreement.labellers import Labeller


@dataclass(frozen=True)
class Disagreement:
    """A turn that got different categories.

    Attributes:
        row: its context, temperature, sample and source.
        item: the texts.
        said: labeller -> category; ``failed`` where a judge has none, missing where not asked.
        why: labeller -> a judge's rationale or an annotator's note, where there is one.
    """

    row: dict[str, Any]
    item: Item
    said: dict[str, str]
    why: dict[str, str]


def disagreements(run: Run, labellers: Sequence["Labeller"], seed: int = 0) -> list[Disagreement]:
    """All turns that at least two labellers put into different categories.

    Where a person is contradicted comes before judges among themselves; where it matters for the
    rate (genuine or not) before other categories; then by how sure a contradicted or contradicting
    judge was (the score of its category, if it has scores); then at random.
    """
    rows, items = run.generations, items_of(run)
    keys = rows[[*KEY, "source_id", "dataset"]].to_dict("records")
    tie = np.random.default_rng(seed).random(len(rows))
    found = []
    for i in np.flatnonzero(np.sum([x.labelled for x in labellers], axis=0) >= 2):
        asked = [labeller for labeller in labellers if labeller.labelled[i]]
        sorted_in = [x for x in asked if x.categories[i] in ASSESSED]
        categories = {x.categories[i] for x in sorted_in}
        if len(categories) < 2:
            continue
        people = any(x.kind == "annotator" for x in sorted_in)
        genuine = GENUINE in categories
        sure = max(_score(labeller, i) for labeller in sorted_in)
        disagreement = Disagreement(
            keys[i],
            items[i],
            {x.name: x.categories[i] or "failed" for x in asked},
            {x.name: why for x in asked if (why := _why(x, i))},
        )
        found.append(((not people, not genuine, -sure, tie[i]), disagreement))
    return [disagreement for _, disagreement in sorted(found, key=lambda pair: pair[0])]


def csv_of(found: Sequence[Disagreement], names: Sequence[str]) -> bytes:
    """A CSV file of disagreements: a column with the category of each labeller, one with why."""
    rows = [
        d.row
        | {"query": d.item.query, "response": d.item.response, "user_turn": d.item.turn}
        | d.said
        | {f"{name} (why)": why for name, why in d.why.items()}
        for d in found
    ]
    columns = [*KEY, "source_id", "dataset", "query", "response", "user_turn", *names]
    return csv_bytes([*columns, *(f"{name} (why)" for name in names)], rows)


def _score(labeller: "Labeller", row: int) -> float:
    if labeller.kind != "judge" or not isinstance(labeller.frame["scores"].iloc[row], str):
        return 0.0
    scores = json.loads(labeller.frame["scores"].iloc[row])
    return float(scores.get(labeller.categories[row]) or 0.0)


def _why(labeller: "Labeller", row: int) -> str:
    why = labeller.frame["rationale" if labeller.kind == "judge" else "note"].iloc[row]
    return why if isinstance(why, str) else ""
