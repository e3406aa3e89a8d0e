"""Whether sampled turns follow up more than greedy ones do, and not just by copying less."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from ia_mech.estimates import TidyEstimate, estimate_of, p_value, smallest_effect
from ia_mech.rates.gate import CONVERSATION
from ia_mech.stats.decomposition import decomposed_difference

PARTS = ("rise", "rise_copying", "rise_else")  # quantities
LEAST = 50  # queries: with fewer, a rise can hardly be told from none


def rises(
    decoys: pd.DataFrame, names: dict[str, Any], level: float = 0.95
) -> Iterator[TidyEstimate]:
    """How much more often the turns of each temperature are accepted than greedy ones, beyond
    another conversation (``rise``); by a smaller share of copies (``rise_copying``); and by all
    else (``rise_else``, with its p).

    ``decoys`` are ``JudgedTurns.decoys``. There is nothing without greedy turns, or where the
    rubric doesn't say what copies are.
    """
    own = decoys[(decoys["decoy"] == CONVERSATION) & decoys["copies"].notna()]
    own = own.assign(beyond=own["own_genuine"].astype(float) - own["genuine"].astype(float))
    own = own[own["beyond"].notna()]
    greedy = own["temperature"] == 0
    for temperature in sorted(own.loc[~greedy, "temperature"].unique()) if greedy.any() else ():
        at = own[greedy | (own["temperature"] == temperature)]
        columns = at["beyond"], at["copies"], at["temperature"] > 0, at["source"]
        *found, p = decomposed_difference(*columns, level=level)
        of = names | {"temperature": float(temperature), "decoy": CONVERSATION, "events": pd.NA}
        for quantity, estimate in zip(PARTS, found, strict=True):
            tested = (p, "jackknife") if quantity == PARTS[-1] else ()
            yield TidyEstimate(quantity, of, len(at), estimate, *tested)


def verdict(estimates: pd.DataFrame, level: float = 0.95) -> str:
    """Whether latent awareness is shown, in words, by estimates of one model's turns, those of all
    datasets; empty if there are none.

    Of several temperatures the one at which most is left counts, with p corrected for them all.
    """
    rows = estimates[estimates["quantity"].isin(PARTS) & estimates["value"].notna()]
    wide = {quantity: of.set_index("temperature") for quantity, of in rows.groupby("quantity")}
    if len(wide) < len(PARTS):
        return ""
    tried = wide[PARTS[-1]]
    best = tried["value"].idxmax()
    rise, copying, rest = (wide[name].loc[best] for name in PARTS)
    if rest["sources"] < LEAST:
        return f"Whether awareness is latent isn't told of fewer than {LEAST} queries."
    several = f", the highest of {len(tried)} temperatures" if len(tried) > 1 else ""
    shown = rest["value"] > 0 and rest["p_holm"] < 1 - level
    word = "is" if shown else "isn't"
    power = "" if shown else f"; {smallest_effect(rest, level):.2f} would have been"
    return (
        f"Latent awareness {word} shown at T = {best:g}{several}: beyond "
        "what the judge accepts after another conversation the rate rises from greedy turns by "
        f"{estimate_of(rise).text(sign=True)}, of which less copying of the conversation makes "
        f"{estimate_of(copying).text(sign=True)} and all else {estimate_of(rest).text(sign=True)} "
        f"({p_value(rest['p_holm'])}{power})."
    )
