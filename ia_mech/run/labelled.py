"""A run's user turns with their labels. Rates, agreement, probes and the report read this frame.

Labels are put beside the turns of ``Run.turns`` here and nowhere else.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ia_mech.run.labels import KEY, Labels
from ia_mech.run.layout import UNPERTURBED
from ia_mech.run.sources import sources_of

FAILED = "failed"  # the category where a judge gave a turn none


def labelled_turns(
    turns: pd.DataFrame,
    labels: Labels,
    judge: str | None,
    annotator: str | None,
    columns: Sequence[str],
) -> pd.DataFrame:
    """See :meth:`ia_mech.run.Run.labelled`."""
    first = turns.drop_duplicates("context_id")
    of_context = pd.DataFrame(
        {
            "source": sources_of(first),
            "perturbation": first["perturbation"].astype(object).fillna(UNPERTURBED),
        }
    ).astype("category")
    contexts = pd.Index(first["context_id"].astype(str))
    of_turn = of_context.take(contexts.get_indexer(turns["context_id"]))
    unfinished = turns["response_unfinished"].fillna(False).astype(bool)
    frame = turns.assign(
        source=of_turn["source"].array,
        perturbation=of_turn["perturbation"].array,
        unfinished=unfinished,
    )
    if judge is not None:
        wanted = [*dict.fromkeys([*KEY, "category", "follow_up", *columns])]
        found = _over(turns, _named(labels.judgements(judge, wanted)))
        frame = frame.assign(**{name: found[name] for name in wanted if name not in KEY})
    if annotator is not None:
        found = _over(turns, _named(labels.annotations(annotator)))
        frame = frame.assign(
            truth=found["follow_up"],
            truth_category=found["category"].astype(object),
            inclusion=found["inclusion_probability"].astype(float),
            **{name: found[name].astype(object) for name in ("stratum", "sheet", "note")},
        )
    return frame


def follow_ups_of(record: dict[str, Any]) -> list[str]:
    """The categories that count as follow-ups by the rubric in a judge's record."""
    own = record.get("rubric", {}).get("own")
    return [one["name"] for one in own["categories"] if one["follow_up"]] if own else ["follow_up"]


def follow_up_probabilities(scores: pd.Series, follow_ups: Collection[str]) -> pd.Series:
    """Of each of a judge's ``scores`` (JSON), the sum over the categories that are follow-ups; NaN
    where there are none."""
    found = [json.loads(text) if isinstance(text, str) else {} for text in scores]
    chances = [sum(of.get(name, 0.0) for name in follow_ups) if of else np.nan for of in found]
    return pd.Series(chances, scores.index, dtype=float)


def labelled_decoys(
    turns: pd.DataFrame, labels: Labels, name: str, columns: Sequence[str]
) -> pd.DataFrame:
    """See :meth:`ia_mech.run.Run.decoys`."""
    kind = "annotations" if name in labels.annotators else "judgements"
    wanted = [*dict.fromkeys([*KEY, "decoy", "shown", "category", "follow_up", *columns])]
    found = _named(labels.decoys(name, kind, wanted))
    first = turns.drop_duplicates("context_id")
    source_of = pd.Series(sources_of(first).to_numpy(), first["context_id"].astype(object))
    return found.assign(
        row=positions(turns, found),
        source=found["context_id"].astype(object).map(source_of),
        shown_source=found["shown"].astype(object).map(source_of),
    )


def _named(labels: pd.DataFrame) -> pd.DataFrame:
    """Labels with a category in every row (:data:`FAILED` where a judge failed), and ``follow_up``
    as a number."""
    category = labels["category"].astype(object).fillna(FAILED).astype("category")
    return labels.assign(category=category, follow_up=labels["follow_up"].astype(float))


def _over(turns: pd.DataFrame, labels: pd.DataFrame) -> pd.DataFrame:
    """A row of labels for each turn; values are missing where a turn has no label."""
    return labels.set_axis(positions(turns, labels)).reindex(turns.index)


def positions(turns: pd.DataFrame, labels: pd.DataFrame) -> np.ndarray:
    """``[labels]`` the row of ``turns`` that each label belongs to."""
    keys, wanted = (pd.MultiIndex.from_frame(frame[list(KEY)]) for frame in (turns, labels))
    return keys.get_indexer(wanted)
