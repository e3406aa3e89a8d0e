"""What steering changes, by dose, beside what other directions of the same KL change."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.steering.controls import ALIKE, HIGH, LOW, PATCHED, RANDOM
from experiments.steering.read import CHOOSING, REPORTING
from experiments.steering.sample import distinct_pairs
from experiments.steering.steer import UNSTEERED
from ia_mech.estimates import Group, TidyEstimate, by_dataset, corrected, frame_of, paired_row
from ia_mech.likelihood.reaction import mean_over_queries, readable_bits
from ia_mech.rates.compute import estimates as rate_estimates
from ia_mech.rates.load import Judged
from ia_mech.stats import Estimate, permutation_p

# ``of``: what is done; ``draw``: which of several alike; ``half``: of the sources.
COLUMNS = {"dataset": "str", "of": "str", "draw": "int64", "dose": "float64", "half": "str"}
ADDED, REMOVED = "added", "projected out"
ODDS = "log-odds of accepted turns, change"
LOGP = "log p of the turns, change"
KL = "KL at the header"
EXPECTED = "rate expected of the first token, change"
ENDED = "mass on turn-end, change"
BITS = "readable bits"
WRONG = "share of contexts moved the wrong way"
BEYOND = "log-odds of accepted turns, change beyond that of the control"
RANK = "share of random directions that reach it"
RATE, EXCESS, DEGENERATE = "rate", "excess", "degenerate share"
DISTINCT, COST, RISE = "distinct pairs of words", "log p under the unsteered model", "rate, change"
ARM = ["of", "draw", "dose"]


def by_context(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per arm and context: ``odds`` (NaN without turns of both labels), ``logp`` a token, and
    ``kl``, ``expected`` and ``ended``, all but ``kl`` less those of the unsteered model. Draws of
    patched arms are averaged: they are several donors to a context."""
    moved = rows["logprob"] - rows["plain"]
    rows = rows.assign(
        draw=rows["draw"].mask(rows["of"].isin(PATCHED), 0),
        accepted=moved.where(rows["label"] == 1),
        other=moved.where(rows["label"] == 0),
        logp=moved / rows["tokens"],
    )
    keys = [*ARM, "half", "dataset", "source", "followed"]
    means = ["accepted", "other", "logp", "kl", "expected", "ended"]
    found = rows.groupby(keys, sort=False)[means].mean().reset_index()
    found["odds"] = found["accepted"] - found["other"]
    plain = found[found["of"] == UNSTEERED].set_index(["source", "followed"])
    at = pd.MultiIndex.from_frame(found[["source", "followed"]])
    for name in ("expected", "ended"):
        found[name] -= plain[name].reindex(at).to_numpy()
    return found.drop(columns=["accepted", "other"])


def chosen_dose(contexts: pd.DataFrame, most_kl: float, sign: int = 1) -> float | None:
    """The dose that is reported, from the :data:`CHOOSING` half alone.

    Of the doses above 0 whose mean KL is at most ``most_kl`` (the smallest dose if none's is), the
    one with the largest mean change of the log-odds; the largest one if turns have no labels.

    Args:
        contexts: of :func:`by_context`, with arms of :data:`ADDED`.
        most_kl: in nats.
        sign: -1 for the dose below 0 that lowers the log-odds most, likewise.

    Returns:
        The dose; None if there is none of this sign.
    """
    mine = contexts[(contexts["of"] == ADDED) & (contexts["half"] == CHOOSING)]
    mine = mine[sign * mine["dose"] > 0]
    mine = mine.assign(size=sign * mine["dose"], odds=sign * mine["odds"])
    if mine.empty:
        return None
    of = mine.groupby("size")[["odds", "kl"]].mean()
    within = of[of["kl"] <= most_kl]
    if within.empty:
        return sign * float(of.index.min())
    if within["odds"].isna().all():
        return sign * float(within.index.max())
    return sign * float(within["odds"].idxmax())


def estimates(
    rows: pd.DataFrame,
    doses: Sequence[float],
    sampled: Mapping[tuple[str, int, float], tuple[Judged, pd.DataFrame]],
    outcome: str,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Every estimate, one row each; p is Holm-corrected over the doses, and over the controls. Each
    comparison with a control stands alone.

    Args:
        rows: of all arms, as :func:`experiments.steering.steer.steered` makes them, with
            ``source`` and ``dataset``.
        doses: that were chosen, at most one of each sign.
        sampled: arm → verdicts on its turns, and :func:`experiments.steering.sample.described`.
        outcome: ``genuine`` or ``grounded``, what is accepted.
        level: coverage of the intervals.
        resamples: bootstrap samples.
        seed: of resamples and tests.
    """
    options = {"level": level, "resamples": resamples, "seed": seed}
    contexts = by_context(rows)
    found: list[TidyEstimate] = []
    for dataset, here in by_dataset(contexts):
        for half in (CHOOSING, REPORTING):
            mine = contexts[here & (contexts["half"] == half)]
            for (of, draw, of_dose), arm in mine.groupby(ARM, sort=False):
                names = {"dataset": dataset, "of": of, "draw": draw, "dose": of_dose, "half": half}
                found += _of_arm(arm, names, options)
        mine = contexts[here & (contexts["half"] == REPORTING) & contexts["odds"].notna()]
        for of, dose, control in (*((ADDED, dose, RANDOM) for dose in doses), (HIGH, 0, LOW)):
            names = {"dataset": dataset, "of": of, "draw": 0, "dose": dose, "half": REPORTING}
            found += _beyond(mine, names, control, options)
        whole = rows[(rows["dataset"] == dataset) | (here.all())]
        found += _bits(whole[whole["half"] == REPORTING], dataset, options)
    found += _sampled(sampled, outcome, options)
    return frame_of(corrected(found, _family), COLUMNS)


def _family(row: TidyEstimate) -> tuple:
    names = row.names
    alone = row.quantity in (BEYOND, RANK)
    of = (names["of"], names["dose"]) if alone else names["of"] in ALIKE
    return row.quantity, names["dataset"], names["half"], of


def _of_arm(
    arm: pd.DataFrame, names: dict[str, Any], options: dict[str, Any]
) -> Iterator[TidyEstimate]:
    sources = arm["source"].to_numpy()
    group = Group(sources, options, names)
    yield group.mean(KL, arm["kl"])
    if names["of"] == UNSTEERED:
        return
    yield group.mean(LOGP, arm["logp"])
    yield group.mean(ENDED, arm["ended"])
    if arm["expected"].notna().any():
        yield group.mean(EXPECTED, arm["expected"])
    told = arm[arm["odds"].notna()]
    if told["source"].nunique() > 1:
        sources, odds = told["source"].to_numpy(), told["odds"].to_numpy()
        yield paired_row(group, ODDS, odds, sources, np.zeros(len(odds)), sources)
        sign = -1.0 if names["dose"] < 0 else 1.0
        wrong = Group(sources, options, names)
        yield wrong.mean(WRONG, (sign * odds < 0).astype(float), proportion=True)


def _beyond(
    contexts: pd.DataFrame, names: dict[str, Any], control: str, options: dict[str, Any]
) -> Iterator[TidyEstimate]:
    """An arm against its control: a dose against random directions of the same KL and sign."""
    own = contexts[(contexts["of"] == names["of"]) & (contexts["dose"] == names["dose"])]
    drawn = contexts[contexts["of"] == control]
    drawn = drawn[np.sign(drawn["dose"]) == np.sign(names["dose"])]
    if drawn.empty or own["source"].nunique() < 2:
        return
    by_source = drawn.groupby("source", sort=False)["odds"].mean()
    group = Group(np.array([]), options, names)
    pairs = own["odds"].to_numpy(), own["source"].to_numpy()
    yield paired_row(group, BEYOND, *pairs, by_source.to_numpy(), by_source.index.to_numpy())
    if control != RANDOM:
        return
    each = drawn.groupby(["draw", "source"])["odds"].mean().groupby("draw").mean().to_numpy()
    whole = own.groupby("source")["odds"].mean().mean()
    sign = np.sign(names["dose"])  # a negative dose is to lower the log-odds
    p = float(permutation_p(sign * whole, sign * each))
    value = float((sign * each >= sign * whole).mean())
    rank = Estimate(value, np.nan, np.nan, own["source"].nunique(), "count")
    yield group.row(RANK, rank, len(each), p=p, test="rank among random directions")


def _bits(rows: pd.DataFrame, dataset: str, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """Readable bits of arms whose turns were scored after all of their query's contexts."""
    counts = rows["logprobs"].map(len)
    wide = rows[counts == counts.max()] if len(rows) and counts.max() > 1 else rows[:0]
    # A turn after each of the responses is needed to fit a reader.
    wide = wide[wide.groupby("source")["followed"].transform("nunique") == counts.max()]
    for (of, draw, dose), arm in wide.groupby(ARM, sort=False):
        if arm["source"].nunique() < 2:
            continue
        scores = np.stack(arm["logprobs"].tolist())
        turns = arm["followed"], arm["source"]
        held = readable_bits(scores, *turns, seed=options["seed"])
        mean = mean_over_queries(held.bits, *turns, scores.shape[1], level=options["level"])
        names = {"dataset": dataset, "of": of, "draw": draw, "dose": dose, "half": REPORTING}
        yield Group(np.array([]), options, names).row(BITS, mean, len(arm))


def _sampled(
    sampled: Mapping[tuple[str, int, float], tuple[Judged, pd.DataFrame]],
    outcome: str,
    options: dict[str, Any],
) -> Iterator[TidyEstimate]:
    plain = next((turns for (of, *_), (_, turns) in sampled.items() if of == UNSTEERED), None)
    for (of, draw, dose), (judged, turns) in sampled.items():
        arm = {"of": of, "draw": draw, "dose": dose, "half": REPORTING}
        excess = rate_estimates(judged, level=options["level"], seed=options["seed"])
        excess = excess[(excess["quantity"] == "excess") & (excess["outcome"] == outcome)]
        excess = excess[(excess["decoy"] == "conversation") & (excess["temperature"] > 0)]
        for dataset, here in by_dataset(turns):
            mine, names = turns[here], arm | {"dataset": dataset}
            group = Group(mine["source"].to_numpy(), options, names)
            yield group.mean(RATE, mine[outcome], proportion=True)
            yield group.mean(DEGENERATE, mine["degenerate"], proportion=True)
            yield group.mean(COST, mine["cost"])
            texts = mine.groupby("source", sort=False)["text"].agg(list)
            each = Group(texts.index.to_numpy(), options, names)
            yield each.mean(DISTINCT, texts.map(distinct_pairs))
            for row in excess[excess["dataset"] == dataset].itertuples():
                ends = row.value, row.low, row.high, row.sources, row.method
                yield group.row(EXCESS, Estimate(*ends), row.rows)
            if plain is not None and of != UNSTEERED:
                base = plain[plain["source"].isin(mine["source"])]
                pairs = (mine[outcome], mine["source"], base[outcome], base["source"])
                yield paired_row(group, RISE, *pairs)


def of_arm(
    estimates: pd.DataFrame, quantity: str, of: str, dose: float | None = None
) -> pd.DataFrame:
    """The estimates of a quantity and an arm, reporting half."""
    here = (estimates["quantity"] == quantity) & (estimates["of"] == of)
    here &= estimates["half"] == REPORTING
    return estimates[here if dose is None else here & (estimates["dose"] == dose)]
