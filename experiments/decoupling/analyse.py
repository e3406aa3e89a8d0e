"""Every number of the experiment, one row each."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from experiments.decoupling.read import Measured
from ia_mech.estimates import Group, TidyEstimate, corrected, frame_of
from ia_mech.stats import (
    Estimate,
    auroc_between,
    cluster_statistic,
    group_difference,
    kendall,
    kendall_p,
)

COLUMNS = {"model": "str", "dataset": "str", "temperature": "float64", "of": "str"}
EVERY, COMPLETE = "all responses", "complete responses"
DIFFERENCE = "follow-up rate, right less wrong"
RANK = "rank correlation over models"
FEWEST_MODELS = 4  # with three, no order is rarer than 1 in 6


def estimates(
    measured: Measured, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """Every estimate, one row each: quantity, :data:`COLUMNS`, value, interval, test.

    ``of`` is all or complete responses; p is Holm-corrected over all tests of a quantity and
    ``of``. ``resamples`` is also the number of permutations of sources.
    """
    options = {"level": level, "resamples": resamples, "seed": seed}
    rows: list[TidyEstimate] = []
    for of in (EVERY, COMPLETE):
        responses, turns = measured.responses, measured.turns
        if of == COMPLETE:
            if not responses["response_cut_off"].any():
                continue
            responses, turns = (frame[~frame["response_cut_off"]] for frame in (responses, turns))
        for (dataset, model), own in responses.groupby(["dataset", "model"]):
            names = {"model": model, "dataset": dataset, "of": of}
            rows += _accuracy(own, names, options)
            follow = turns[(turns["dataset"] == dataset) & (turns["model"] == model)]
            for temperature, at in follow.groupby("temperature"):
                rows += _awareness(at, names | {"temperature": float(temperature)}, options)
        for dataset, of_dataset in responses.groupby("dataset"):
            own = turns[turns["dataset"] == dataset]
            for temperature, at in own.groupby("temperature"):
                names = {"dataset": dataset, "of": of, "temperature": float(temperature)}
                rows += _over_models(of_dataset, at, names, options)
    return frame_of(corrected(rows, lambda row: (row.quantity, row.names["of"])), COLUMNS)


def remarks(found: pd.DataFrame) -> list[str]:
    """What the estimates can't say, and why: a line each."""
    notes = []
    whole = found[found["of"] == EVERY]
    for (model, dataset), rows in whole.groupby(["model", "dataset"]):
        accuracy = rows.loc[rows["quantity"] == "accuracy", "value"]
        if accuracy.isin([0.0, 1.0]).any():
            what = "right" if accuracy.item() else "wrong"
            notes.append(
                f"{model} on {dataset}: all responses are {what}, so whether being right goes with "
                "following up can't be tested."
            )
    for dataset, rows in whole[whole["model"] != ""].groupby("dataset"):
        models = rows["model"].nunique()
        if models < FEWEST_MODELS:
            notes.append(
                f"{dataset}: no rank correlation over models, which takes at least "
                f"{FEWEST_MODELS} on the same prompts; there {'is' if models == 1 else 'are'} "
                f"{models}."
            )
    if (found["quantity"] == RANK).any():
        notes.append(
            f"{RANK}: Kendall's τ-b. Its interval draws prompts anew, the same for all models; it "
            "says nothing of other models. p is of the models' order and ignores how well each "
            "is measured."
        )
    return notes


def _accuracy(own: pd.DataFrame, names: dict, options: dict) -> Iterator[TidyEstimate]:
    """How many responses are right, and what is counted apart from them."""
    group = Group(own["source"].to_numpy(), options, names)
    yield group.mean("accuracy", own["correct"], proportion=True)
    yield group.mean("unverified", own["correct"].isna(), proportion=True)
    if names["of"] == EVERY:
        yield group.mean("cut off", own["response_cut_off"], proportion=True)
    checked = own[(own["instructions"].str.len() > 0) & own["correct"].notna()]
    if len(checked):
        group = Group(checked["source"].to_numpy(), options, names)
        yield group.mean("accuracy, loose", checked["correct_loosely"], proportion=True)
        for column, quantity in (
            ("followed", "instructions followed"),
            ("followed_loosely", "instructions followed, loosely"),
        ):
            each = checked[["source", column]].explode(column)
            single = Group(each["source"].to_numpy(), options, names)
            yield single.mean(quantity, each[column].astype(float), proportion=True)


def _awareness(at: pd.DataFrame, names: dict, options: dict) -> Iterator[TidyEstimate]:
    """The follow-up rate at one temperature, and whether it goes with being right."""
    group = Group(at["source"].to_numpy(), options, names)
    yield group.mean("follow-up rate", at["genuine"], proportion=True)
    known = at[at["correct"].notna() & at["genuine"].notna()]
    found = group_difference(
        known["genuine"],
        known["correct"],
        known["source"],
        level=options["level"],
        permutations=options["resamples"],
        seed=options["seed"],
    )
    right = int((known["correct"] == 1).sum())
    yield group.row("follow-up rate, right", found.first, right)
    yield group.row("follow-up rate, wrong", found.second, len(known) - right)
    yield group.row(DIFFERENCE, found.difference, len(known), p=found.p, test=found.test)
    shares = known.groupby("response").agg(
        share=("genuine", "mean"), correct=("correct", "first"), source=("source", "first")
    )
    area = _area(shares, options)
    yield group.row("AUROC of being right", area, len(shares))


def _area(shares: pd.DataFrame, options: dict) -> Estimate:
    """Chance that a right response's share of genuine turns is above a wrong one's.

    Without an interval where all of a group have the same share (none genuine, say): resamples
    would, too, and the interval would be far too short.
    """
    spread = shares.groupby("correct")["share"].nunique()
    sources = shares["source"].nunique()
    if len(spread) < 2:
        return Estimate(np.nan, np.nan, np.nan, sources, "one group is empty")
    columns = shares["share"], shares["correct"], shares["source"].to_numpy()
    found = auroc_between(*columns, **options)
    if (spread == 1).any():
        return Estimate(found.value, np.nan, np.nan, sources, "no spread in a group")
    return found


def _over_models(
    responses: pd.DataFrame, turns: pd.DataFrame, names: dict, options: dict[str, Any]
) -> Iterator[TidyEstimate]:
    """Do more accurate models follow up more often? Prompts are drawn anew, models are not."""
    models = sorted(set(responses["model"]) & set(turns["model"]))
    if len(models) < FEWEST_MODELS:
        return
    responses = responses[responses["correct"].notna() & responses["model"].isin(models)]
    turns = turns[turns["genuine"].notna()]
    rows = pd.concat(
        [
            responses[["model", "source"]].assign(value=responses["correct"], task=True),
            turns[["model", "source"]].assign(value=turns["genuine"], task=False),
        ]
    )
    columns = {
        "cell": 2 * rows["model"].map(models.index).to_numpy() + rows["task"].to_numpy(),
        "value": rows["value"].to_numpy(dtype=float),
    }

    def means(columns: dict[str, np.ndarray], counts: np.ndarray) -> np.ndarray:
        cells = 2 * len(models)
        total = np.bincount(columns["cell"], counts, minlength=cells)
        hits = np.bincount(columns["cell"], counts * columns["value"], minlength=cells)
        with np.errstate(invalid="ignore"):
            return (hits / total).reshape(-1, 2)

    def correlation(columns: dict[str, np.ndarray], counts: np.ndarray) -> float:
        rate, accuracy = means(columns, counts).T
        return kendall(accuracy, rate)

    estimate = cluster_statistic(correlation, columns, rows["source"].to_numpy(), **options)
    rate, accuracy = means(columns, np.ones(len(rows))).T
    p = kendall_p(accuracy, rate, seed=options["seed"])
    test = None if np.isnan(p) else "permutation of models"
    yield TidyEstimate(RANK, names, len(models), estimate, p=p, test=test)
