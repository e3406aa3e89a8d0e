"""The falsifier: does the follow-up rate fall when there is no response to react to?"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from experiments.common.estimates import together
from experiments.common.screen import label
from experiments.perturbations.conditions import BARE, REMOVE, SWAP
from experiments.perturbations.tables import DETECTABLE, HELD, LESS
from ia_mech.conversations import UNPERTURBED


def verdicts(estimates: pd.DataFrame, level: float) -> Iterator[str]:
    """A line per temperature, over all datasets.

    A genuine follow-up that reacts to the response can't be written without having seen it. All
    turns are held against the unperturbed response: held against an empty one, hardly any turn is
    grounded, and the rate would fall by definition. Turns after the bare header have seen nothing
    at all; what of them is called genuine, the judge calls genuine by their form.

    Args:
        estimates: of :func:`experiments.perturbations.tables.estimates`.
        level: of confidence; a difference counts if its Holm-corrected p is at most 1 - level.
    """
    pooled = together(estimates)
    for temperature, rows in pooled[pooled["quantity"] == HELD].groupby("temperature"):
        at = pooled[pooled["temperature"] == temperature]
        plain = rows[rows["condition"] == UNPERTURBED].iloc[0]
        where = "greedy" if temperature == 0 else f"T = {label(temperature)}"
        if not plain["value"] > 0:
            yield (
                f"falsifier, {where}: no unperturbed turn is judged genuine "
                f"(of {plain['rows']}, at most {plain['high']:.3f}), so nothing could be lower."
            )
            continue
        yield f"falsifier, {where}: {_said(at, level)}"


def _said(at: pd.DataFrame, level: float) -> str:
    texts, failed = {}, []
    for condition in (REMOVE, SWAP, BARE):
        rows = at[at["condition"] == condition].set_index("quantity")
        if HELD + LESS not in rows.index:
            continue
        row, size = rows.loc[HELD + LESS], rows.loc[DETECTABLE, "value"]
        p = "p<0.001" if row["p_holm"] < 0.001 else f"p={row['p_holm']:.3f}"
        ends = "–" if np.isnan(row["low"]) else f"{row['low']:+.3f}, {row['high']:+.3f}"
        text = f"{condition} {row['value']:+.3f} [{ends}], {p}"
        if not (row["value"] < 0 and row["p_holm"] <= 1 - level):
            failed.append(condition)
            text += "" if np.isnan(size) else f" (detectable: {size:.3f})"
        texts[condition] = text
    if not {REMOVE, SWAP} & set(texts):
        return f"neither {REMOVE} nor {SWAP} was made, so it can't be told."
    text = "; ".join(texts.values())
    kept = [condition for condition in failed if condition != BARE]
    if kept:
        verb = "isn't" if len(kept) == 1 else "aren't"
        return (
            f"{text}. {' and '.join(kept)} {verb} shown to lower the rate: what was measured is "
            "not shown to react to the response."
        )
    if BARE in failed:
        return (
            f"{text}. The rate falls without the response, but turns that were written with no "
            "conversation at all are called genuine about as often: by this judge, the rate is no "
            "evidence of a reaction."
        )
    return f"{text}. The rate falls without the response: what was measured reacts to it."
