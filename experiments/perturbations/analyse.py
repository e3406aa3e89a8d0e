"""Estimates per condition, how far each is from the unperturbed one, and what follows from it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.spatial.distance import cdist

from experiments.perturbations.conditions import HEADER_ONLY, REMOVE, SWAP
from experiments.perturbations.read import Compared
from ia_mech.data.conversations import UNPERTURBED
from ia_mech.estimates import (
    ALL,
    Group,
    TidyEstimate,
    by_dataset,
    corrected,
    frame_of,
    paired_row,
    together,
)
from ia_mech.judge.rubric import ASSESSED
from ia_mech.run import Run
from ia_mech.stats import paired_difference

RATE = "follow-up rate"
HELD = "follow-up rate, held against the unperturbed response"
SHARE = "category share"
REFERENCE = "reference log p, bits"
LESS = ", less unperturbed"
HALVED = "held follow-up rate, unperturbed less twice the condition's"
DISTANCE, RELATIVE = "header displacement", "header displacement, relative to its norm"
COLUMNS = {
    "dataset": "str",
    "condition": "str",
    "temperature": "float64",
    "category": "str",
    "layer": "Int64",
    "position": "str",
}


def estimates(
    compared: Compared, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """Every estimate, one row each: quantity, :data:`COLUMNS`, value, interval and test.

    Differences are Holm-corrected over all tests of one quantity; those over all datasets
    (:data:`ALL`) are a family of their own.
    """
    options = {"level": level, "resamples": resamples, "seed": seed}
    rows: list[TidyEstimate] = []
    for dataset, here in by_dataset(compared.turns):
        for temperature, turns in compared.turns[here].groupby("temperature"):
            names = {"dataset": dataset, "temperature": float(temperature)}
            rows += _turns(turns, names, options)
    for dataset, here in by_dataset(compared.contexts):
        rows += _references(compared.contexts[here], {"dataset": dataset}, options)
    rows += _displacements(compared, options)
    rows = corrected(rows, lambda row: (row.quantity, row.names["dataset"] == ALL))
    return frame_of(rows, COLUMNS)


def _turns(turns: pd.DataFrame, names: dict[str, Any], options: dict) -> Iterator[TidyEstimate]:
    """Rates and profile of one temperature, condition by condition."""
    plain = turns[turns["condition"] == UNPERTURBED]
    for condition, own in turns.groupby("condition", sort=False):
        group = Group(own["source"].to_numpy(), options, names | {"condition": condition})
        for quantity, column in ((RATE, "genuine"), (HELD, "held")):
            yield group.mean(quantity, own[column], proportion=True)
            if condition != UNPERTURBED:
                yield _less(group, quantity, own, plain, own[column], plain[column])
        if condition != UNPERTURBED:
            sides = plain["held"], plain["source"], 2 * own["held"], own["source"]
            found = paired_difference(*sides, level=options["level"]).difference
            yield group.row(HALVED, found, int(own["held"].notna().sum()))
        for category in ASSESSED:
            events, before = (_events(frame, category) for frame in (own, plain))
            yield group.mean(SHARE, events, proportion=True, category=category)
            if condition != UNPERTURBED:
                yield _less(group, SHARE, own, plain, events, before, category=category)


def _events(turns: pd.DataFrame, category: str) -> np.ndarray:
    """``[turns]`` 1 where the category is that one; NaN where the turn wasn't assessed."""
    return np.where(turns["genuine"].isna(), np.nan, turns["category"] == category).astype(float)


def _less(group: Group, quantity: str, own, plain, values, baseline, **names) -> TidyEstimate:
    """Values of a condition's rows less those of the unperturbed ones; the source is the pair."""
    sides = values, own["source"], baseline, plain["source"]
    return paired_row(group, quantity + LESS, *sides, **names)


def _references(
    contexts: pd.DataFrame, names: dict[str, Any], options: dict
) -> Iterator[TidyEstimate]:
    """Log-probability of real follow-ups at T = 1, in bits."""
    scored = contexts[contexts["logprob"].notna()]
    plain = scored[scored["condition"] == UNPERTURBED]
    for condition, own in scored.groupby("condition", sort=False):
        group = Group(own["source"].to_numpy(), options, names | {"condition": condition})
        bits, before = (frame["logprob"].to_numpy() / np.log(2.0) for frame in (own, plain))
        yield group.mean(REFERENCE, bits, temperature=1.0)
        if condition != UNPERTURBED:
            yield _less(group, REFERENCE, own, plain, bits, before, temperature=1.0)


# -- displacement ----------------------------------------------------------------------------------


def _displacements(compared: Compared, options: dict) -> Iterator[TidyEstimate]:
    plain = compared.contexts[compared.contexts["condition"] == UNPERTURBED]
    sources = plain["source"].to_numpy()
    for names, distance, relative in displacements(compared):
        for dataset, here in by_dataset(plain):
            group = Group(sources[here], options, {"dataset": dataset, **names})
            for quantity, values in ((DISTANCE, distance), (RELATIVE, relative)):
                if not np.isnan(values[here]).all():
                    row = group.mean(quantity, values[here])
                    yield replace(row, estimate=row.estimate.within(0))  # a distance


def displacements(
    compared: Compared,
) -> Iterator[tuple[dict[str, Any], np.ndarray, np.ndarray]]:
    """How far header states move, for every condition, layer and header position that was kept.

    Yields:
        ``condition``, ``layer`` and ``position``; ``[pairs]`` L2 distance of the perturbed state
        from the unperturbed one, over :func:`typical_distance`; ``[pairs]`` the same over the norm
        of the unperturbed state. Pairs are the unperturbed contexts, in the order of
        ``compared.contexts``; NaN where there is no state, or no other source.
    """
    runs = {str(run.path): run for run in (*compared.base.runs, compared.run)}
    contexts = compared.contexts
    plain = contexts[contexts["condition"] == UNPERTURBED]
    conditions = [c for c in dict.fromkeys(contexts["condition"]) if c != UNPERTURBED]
    of = {
        condition: contexts[contexts["condition"] == condition].set_index("pair").loc[plain["pair"]]
        for condition in conditions
    }
    datasets, sources = plain["dataset"].to_numpy(), plain["source"].to_numpy()
    for position in compared.run.positions:
        for layer in compared.run.layers:
            before = _states(runs, plain, layer, position)
            scale = typical_distance(before, datasets, sources)
            norm = np.linalg.norm(before, axis=1)
            for condition, rows in of.items():
                moved = np.linalg.norm(_states(runs, rows, layer, position) - before, axis=1)
                names = {"condition": condition, "layer": layer, "position": position}
                yield names, moved / scale, moved / norm


def _states(runs: dict[str, Run], rows, layer: int, position: str) -> np.ndarray:
    """``[rows, d_model]`` float64 of contexts that may lie in several runs."""
    stored = {
        place: runs[place].residuals(layer, position) for place in dict.fromkeys(rows["place"])
    }
    pairs = zip(rows["place"], rows["row"], strict=True)
    return torch.stack([stored[place][row] for place, row in pairs]).double().numpy()


def typical_distance(states: np.ndarray, datasets: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """``[n]``: the mean L2 distance between states of different sources of each one's dataset.

    Args:
        states: ``[n, d_model]``; rows with NaN are left out.
        datasets: ``[n]``.
        sources: ``[n]``.

    Returns:
        NaN where the dataset has no two sources, or their states don't differ.
    """
    found = np.full(len(states), np.nan)
    there = ~np.isnan(states).any(axis=1)
    for dataset in set(datasets):
        at = there & (datasets == dataset)
        x = states[at]
        gaps = cdist(x, x)  # subtracts before it squares, so equal states are exactly 0 apart
        different = sources[at][:, None] != sources[at][None]
        if gaps[different].any():  # at layer 0 one token's states are all alike
            found[datasets == dataset] = gaps[different].mean()
    return found


# -- the falsifier ---------------------------------------------------------------------------------


def verdicts(estimates: pd.DataFrame) -> Iterator[str]:
    """Does the rate fall by half without a response to react to? A line per temperature, all
    datasets.

    All turns are judged against the unperturbed response: against an empty one hardly any turn is
    grounded, and the rate would fall by definition. What the judge calls genuine after the bare
    header, it calls so by its form. The bound is on the size of the effect, since any difference is
    significant in a large enough sample: the unperturbed rate less twice the condition's has an
    interval above 0.

    Args:
        estimates: of :func:`estimates`.
    """
    pooled = together(estimates)
    for temperature, rows in pooled[pooled["quantity"] == HELD].groupby("temperature"):
        at = pooled[pooled["temperature"] == temperature]
        plain = rows[rows["condition"] == UNPERTURBED].iloc[0]
        where = "greedy" if temperature == 0 else f"T = {temperature:g}"
        if not plain["value"] > 0:
            yield (
                f"falsifier, {where}: no unperturbed turn is judged genuine "
                f"(of {plain['rows']}, at most {plain['high']:.3f}), so nothing could be lower."
            )
            continue
        yield f"falsifier, {where}: {_verdict(at, plain['value'])}"


def _verdict(at: pd.DataFrame, plain: float) -> str:
    texts, failed = [], []
    for condition in (REMOVE, SWAP, HEADER_ONLY):
        rows = at[at["condition"] == condition].set_index("quantity")
        if HALVED not in rows.index:
            continue
        row = rows.loc[HALVED]
        ends = "–" if np.isnan(row["low"]) else f"{row['low']:+.3f}, {row['high']:+.3f}"
        texts.append(f"{condition} {rows.loc[HELD, 'value']:.3f} ({row['value']:+.3f} [{ends}])")
        if not row["low"] > 0:
            failed.append(condition)
    if not any(text.startswith((f"{REMOVE} ", f"{SWAP} ")) for text in texts):
        return f"neither {REMOVE} nor {SWAP} was made, so it can't be told."
    less = "in brackets: the rate less twice that"
    text = f"of a rate of {plain:.3f} remain ({less}) {'; '.join(texts)}"
    kept = [condition for condition in failed if condition != HEADER_ONLY]
    if kept:
        verb = "isn't" if len(kept) == 1 else "aren't"
        return (
            f"{text}. {' and '.join(kept)} {verb} shown to halve the rate: what was measured is "
            "not shown to depend on the response."
        )
    if HEADER_ONLY in failed:
        return (
            f"{text}. The rate falls by half without the response, but turns that were written "
            "with no conversation at all aren't shown to be called genuine half as often: by this "
            "judge, the rate is no evidence of a reaction."
        )
    return (
        f"{text}. The rate falls by more than half without the response: what was measured depends "
        "on it."
    )
