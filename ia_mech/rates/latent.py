"""Whether sampled turns are follow-ups more often than greedy ones, and what that consists of."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from ia_mech.estimates import TidyEstimate, could_show, estimate_of, p_value, smallest_effect
from ia_mech.judge.decoys import DECOY_KINDS, SIBLING
from ia_mech.rates.gate import NOT_PASSED
from ia_mech.stats import Estimate, decomposed_difference, paired_difference

RISE, ROLE, REST = "rise", "rise_staying_in_role", "rise_once_in_role"
BEYOND = "rise_beyond_siblings"
PARTS = (RISE, ROLE, REST, BEYOND)  # quantities
MORE = "sampling brings out follow-ups that greedy decoding hides"
FEWER = "sampling makes follow-ups fewer"


def rises(
    decoys: pd.DataFrame, names: dict[str, Any], level: float = 0.95, seed: int = 0
) -> Iterator[TidyEstimate]:
    """How much more often the turns of each temperature are follow-ups than greedy ones.

    - ``rise``: of the follow-up rate minus that of the same turns after a wrong conversation. It
      has two parts: more turns stay in role (``rise_staying_in_role``), and turns in role are
      follow-ups more often (``rise_once_in_role``, which also holds what changes of turns out of
      role).
    - ``rise_beyond_siblings``: of the rate minus that after other responses to the same query.

    Rises are paired by query, as the difference of the rates themselves is
    (:func:`ia_mech.stats.paired_difference`, with the ``seed`` of its flips). All but
    ``rise_staying_in_role`` have a p. ``decoys`` are ``JudgedTurns.decoys``. Without greedy turns
    there is no estimate, and without categories out of role in the rubric there are no parts.
    """
    beyond = decoys["own_follow_up"].astype(float) - decoys["follow_up"].astype(float)
    decoys = decoys.assign(beyond=beyond)[beyond.notna()]
    for temperature in sorted(decoys.loc[decoys["temperature"] > 0, "temperature"].unique()):
        here = decoys[decoys["temperature"].isin([0.0, temperature])]
        for kind in DECOY_KINDS:
            own = here[here["decoy"] == kind]
            if own.empty:
                continue
            roles = own["out_of_role"]
            hot = own["temperature"] > 0
            pair = (own.loc[rows, name] for rows in (hot, ~hot) for name in ("beyond", "source"))
            rise = paired_difference(*pair, level=level, seed=seed)
            kept: list[tuple[str, Estimate, float, str | None]]
            kept = [(BEYOND if kind == SIBLING else RISE, rise.difference, rise.p, rise.test)]
            if kind != SIBLING and roles.notna().any():
                columns = own["beyond"], roles.fillna(0), hot, own["source"]
                found = decomposed_difference(*columns, level=level)
                kept.append((ROLE, found.mix, np.nan, None))
                kept.append((REST, found.rest, found.p_rest, "jackknife"))
            of = names | {"temperature": float(temperature), "decoy": kind, "events": pd.NA}
            for quantity, estimate, p, test in kept:
                if pd.notna(estimate.value):
                    test = None if np.isnan(p) else test
                    yield TidyEstimate(quantity, of, len(own), estimate, p, test)


def verdict(estimates: pd.DataFrame, level: float = 0.95, fit: float = math.inf) -> str:
    """Whether follow-ups are latent, in words; empty if there are no estimates.

    They are where the rise is shown to be above 0, the rate itself is higher than that of greedy
    turns, too, and the judge's gate doesn't fail. The temperature with the largest rise counts, of
    those at which a rise is shown if there are any. Temperatures above the judge's fit count only
    where there are no others. p is corrected for all temperatures.

    Args:
        estimates: of one model's turns, all datasets together.
        level: of the intervals; what is shown is shown at 1 minus it.
        fit: the highest temperature of the judge's fit.
    """
    chosen = _best(estimates, level, fit)
    if chosen is None:
        return ""
    found, tried, change, best = chosen

    def told(quantity: str) -> str:
        row = found[quantity]
        estimate, differs = estimate_of(row), row["p_holm"] < 1 - level
        if estimate.few:
            return estimate.text(sign=True)
        could = "" if differs else could_show(smallest_effect(row, level), most=1)
        return f"{estimate.text(sign=True)} ({could or p_value(row['p_holm'])})"

    gate = found[RISE]["gate"]
    several = f", the best of {len(tried)} temperatures" if len(tried) > 1 else ""
    shown = "isn't" if gate == NOT_PASSED or not change else "is"
    words = FEWER if shown == "is" and change < 0 else MORE
    said = [
        f"It {shown} shown that {words}: the rise from greedy to T = {best:g}{several}, minus that "
        f"after wrong conversations, is {told(RISE)}."
    ]
    if REST in found and shown == "is":
        role, rest = ("more" if found[part]["value"] > 0 else "fewer" for part in (ROLE, REST))
        said.append(
            f"Of this rise, {estimate_of(found[ROLE]).text(sign=True)} comes from {role} turns "
            "in role (those that neither repeat the conversation nor speak as the assistant), and "
            f"{told(REST)} from {rest} follow-ups among the turns in role."
        )
    if gate == NOT_PASSED:
        said.append("Most of what this judge calls follow-ups fits wrong conversations, too.")
    if not change and found[RISE]["p_holm"] < 1 - level and found[RISE]["value"] > 0:
        said.append("But sampled turns aren't follow-ups more often than greedy ones.")
    if BEYOND in found:
        row = found[BEYOND]
        more = "is" if row["value"] > 0 and row["p_holm"] < 1 - level else "isn't"
        said.append(
            f"It {more} shown that the rate rises more than the rate after siblings, other "
            f"responses to the same query: {told(BEYOND)}."
        )
    return " ".join(said)


def conclusion(estimates: pd.DataFrame, level: float = 0.95, fit: float = math.inf) -> str:
    """:func:`verdict` in one sentence."""
    chosen = _best(estimates, level, fit)
    if chosen is None:
        return ""
    found, _, change, best = chosen
    if found[RISE]["gate"] == NOT_PASSED:
        return "Most of what this judge calls follow-ups fits other conversations, too."
    said = {
        1: f"Sampling at T = {best:g} brings out follow-ups that greedy decoding hides",
        0: f"It isn't shown that sampling at T = {best:g} brings out more",
        -1: f"Sampling at T = {best:g} makes follow-ups fewer",
    }[change]
    rise = estimate_of(found[RISE])
    if rise.value < 0:
        rise = replace(rise, value=-rise.value, low=-rise.high, high=-rise.low)
    moves = "falls" if found[RISE]["value"] < 0 else "rises"
    return (
        f"{said}: the rate {moves} by {rise.text()}, net of its change after wrong conversations."
    )


def _best(
    estimates: pd.DataFrame, level: float, fit: float
) -> tuple[dict[str, pd.Series], pd.DataFrame, int, float] | None:
    """The estimates, by quantity, at the temperature that counts; the rises that were tried;
    whether the rise there is shown to be above 0 (1), or below it (-1), and the rate itself isn't
    on the other side; and the temperature."""
    rows = estimates[estimates["quantity"].isin(PARTS)]
    of = {quantity: own.set_index("temperature") for quantity, own in rows.groupby("quantity")}
    if RISE not in of:
        return None
    within = of[RISE][of[RISE].index <= fit]
    tried = within if len(within) else of[RISE]
    rates = estimates[estimates["quantity"] == "difference"].set_index("temperature")["value"]
    signs = np.sign(tried["value"])
    alike = rates.reindex(tried.index).pipe(np.sign).fillna(signs) == signs
    changes = signs.where(alike & (tried["p_holm"] < 1 - level), 0).astype(int)
    sure = tried[changes > 0]
    best = (sure if len(sure) else tried)["value"].idxmax()
    found = {quantity: own.loc[best] for quantity, own in of.items() if best in own.index}
    return found, tried, changes[best], best
