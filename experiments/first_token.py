"""The first token of a user turn: its distribution by temperature and layer, and what it opens.

All is computed from stored header logits, residual streams and the model's lens; no model is
loaded. ``contexts`` has a row per context, with ``run`` (the run's folder), ``at`` (the row in that
run), ``source``, and ``greedy`` (the token that opens the greedy turn).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ia_mech.display import Bar
from ia_mech.errors import UserError
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.run.labels import KEY

if TYPE_CHECKING:
    from torch import Tensor

    from ia_mech.lens import Lens
    from ia_mech.run import Run

LOGITS = 2**23  # most held at a time: 32 MiB, and a few times that for what is computed from them
LEAST_FOLLOW_UPS = 0.5  # least share of follow-ups among the turns that a follow-up opening opens
HEADER_LAST = "header_last"  # where the first token of the user turn is predicted
RESTATEMENTS = ("repeats_query", "repeats_response")
OPENINGS = GREEDY, BEST = ("greedy's opening", "best follow-up opening")


# -- openings --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Openings:
    """How many turns each token opened: a row per source, a column per token id.

    Columns are the tokens that opened a sampled turn of either kind, ascending.

    Attributes:
        follow_up: how many follow-ups a token opened.
        restated: how many turns that repeat the query or the response it opened.
    """

    follow_up: pd.DataFrame
    restated: pd.DataFrame

    @property
    def ids(self) -> np.ndarray:
        """``[tokens]`` of the columns."""
        return self.follow_up.columns.to_numpy(dtype=np.int64)

    def of_others(self, sources: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Of the turns that a token opens in other sources, the shares of both kinds.

        Turns of both kinds are counted, at any temperature, in all sources but the context's own.
        Both shares are 0 for a token that opened none. Otherwise they add up to 1: a token that
        opens both kinds counts for each in proportion, and no probability counts twice.

        Args:
            sources: ``[contexts]``, the source of each context.

        Returns:
            ``[contexts, tokens]`` shares of follow-ups, and of turns that repeat query or response;
            a row is NaN where no other source has a turn of the kind.
        """
        kinds = [
            of.sum().to_numpy() - of.loc[list(sources)].to_numpy()
            for of in (self.follow_up, self.restated)
        ]
        total = np.maximum(kinds[0] + kinds[1], 1)  # a token that opened nothing has a share of 0
        follow_up, restated = (
            np.where(of.sum(1, keepdims=True) > 0, of / total, np.nan) for of in kinds
        )
        return follow_up, restated


def openings_of(turns: pd.DataFrame) -> Openings:
    """Count the tokens that open sampled (not greedy) turns."""
    sampled = turns[turns["temperature"] > 0]
    first = sampled["token_ids"].map(lambda ids: int(ids[0])).astype(np.int64)
    kinds = sampled["category"] == FOLLOW_UP, sampled["category"].isin(RESTATEMENTS)
    ids = np.unique(first[kinds[0] | kinds[1]])
    if not len(ids):  # some token that opened neither: its shares are NaN, an empty sum would be 0
        ids = np.unique(first[:1])
    sources = sampled["source"].astype(object)
    counts = (
        pd.crosstab(sources[kind], first[kind]).reindex(
            index=sorted(turns["source"].unique()), columns=ids, fill_value=0
        )
        for kind in kinds
    )
    return Openings(*counts)


def with_token_scores(turns: pd.DataFrame, runs: Sequence[Run]) -> pd.DataFrame:
    """The turns with their tokens, the tokens' log-probabilities and ranks, and ``at``, the row of
    their context."""
    written = []
    for run in runs:
        row = {name: at for at, name in enumerate(run.contexts["context_id"])}
        own = run.generations[[*KEY, "token_ids", "logprobs_raw", "ranks"]]
        written.append(own.assign(run=str(run.path), at=own["context_id"].map(row).astype(int)))
    return turns.merge(pd.concat(written), on=["run", *KEY], how="left", validate="one_to_one")


# -- the first token -------------------------------------------------------------------------------


def check_logits(run: Run) -> None:
    """Refuse a run without the first token's distribution.

    Raises:
        UserError: the run doesn't keep all header logits, or was sampled with ``--opening``.
    """
    if run.settings["opening"] is not None:
        raise UserError(
            f"the turns of {run.path} begin after --opening: {HEADER_LAST} doesn't predict them",
            "give a run without",
        )
    if run.settings["header_logits"] != "full":
        raise UserError(
            f"{run.path} doesn't keep all header logits", "sample with --header-logits full"
        )


def first_token_masses(
    logits: Tensor,
    temperatures: Sequence[float],
    turn_ends: Sequence[int],
    opening_ids: np.ndarray,
    shares: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Entropy, turn-end mass, and the mass on each kind of opening.

    Args:
        logits: ``[contexts, vocab]`` at T = 1, up to a constant per context.
        temperatures: above 0.
        turn_ends: ids of the tokens that end a turn.
        opening_ids: ``[tokens]`` ids.
        shares: ``[contexts, tokens]`` arrays: the share of a token's probability that counts.

    Returns:
        ``[contexts, temperatures]`` arrays: entropy in nats, the probability of turn ends, and one
        probability for each array of shares.
    """
    import torch

    logits = logits - logits.amax(-1, keepdim=True)
    columns: list[list[Tensor]] = []
    for t in temperatures:
        scaled = logits / t
        probability = scaled.softmax(-1)
        # log Z − E[logit] needs no logarithm of a probability that underflowed.
        expected = torch.einsum("cv,cv->c", probability, scaled)
        opened = probability[:, list(opening_ids)].double()
        columns.append(
            [
                scaled.logsumexp(-1) - expected,
                probability[:, list(turn_ends)].sum(-1),
                *((opened * torch.from_numpy(share)).sum(-1) for share in shares),
            ]
        )
    return [
        torch.stack([c.double() for c in column], dim=-1).numpy()
        for column in zip(*columns, strict=True)
    ]


def first_token_curves(
    runs: Sequence[Run], contexts: pd.DataFrame, openings: Openings, temperatures: Sequence[float]
) -> dict[str, np.ndarray]:
    """``[contexts, temperatures]`` arrays of :func:`first_token_masses`: ``entropy``, ``turn_end``,
    and the mass on openings of ``follow_up`` turns and of ``restated`` ones. The runs have passed
    :func:`check_logits`."""
    import torch

    names = ("entropy", "turn_end", "follow_up", "restated")
    found = np.full((len(names), len(contexts), len(temperatures)), np.nan)
    shares = openings.of_others(contexts["source"])
    stops = sorted({int(i) for run in runs for i in run.record["identity"]["chat"]["stop_ids"]})
    for run in runs:
        kept, mine = run.header_logits(), np.flatnonzero(contexts["run"] == str(run.path))
        size = max(1, LOGITS // run.model["vocab"])
        for here in (mine[start : start + size] for start in range(0, len(mine), size)):
            logits = torch.stack([kept[int(at)] for at in contexts["at"].iloc[here]])
            own = [share[here] for share in shares]
            found[:, here] = first_token_masses(logits, temperatures, stops, openings.ids, own)
    return dict(zip(names, found, strict=True))


# -- the logit lens --------------------------------------------------------------------------------


def lens_curves(
    runs: Sequence[Run], contexts: pd.DataFrame, openings: Openings, lens: Lens
) -> dict[str, np.ndarray]:
    """The logit lens: every layer at ``header_last``, through final norm and unembedding.

    Returns:
        ``[contexts, layers]`` log-probabilities in nats of the token that opens the greedy turn
        (:data:`GREEDY`), and of the likeliest other token (:data:`BEST`) whose turns in other
        sources are follow-ups at least half of the time. NaN where there is none.
    """
    import torch

    layers, own = list(runs[0].layers), contexts["greedy"].to_numpy()
    ids = np.unique(np.concatenate([openings.ids, own]))
    shares = np.zeros((len(contexts), len(ids)))
    shares[:, np.searchsorted(ids, openings.ids)] = openings.of_others(contexts["source"])[0]
    column = np.searchsorted(ids, own)
    shares[np.arange(len(own)), column] *= 0.0  # greedy's token is no other opening; NaN stays
    found = np.full((2, len(own), len(layers)), np.nan)
    bar = Bar()
    bar.start("logit lens", len(runs) * len(layers), unit="layer")
    try:
        for run in runs:
            mine = np.flatnonzero(contexts["run"] == str(run.path))
            if HEADER_LAST not in run.positions or not len(mine):
                continue
            at = torch.from_numpy(contexts["at"].to_numpy()[mine])
            for layer in layers:
                log_p = log_probs(lens, run.residuals(layer, HEADER_LAST)[at], ids)
                found[0, mine, layer] = log_p[np.arange(len(mine)), column[mine]]
                found[1, mine, layer] = best_opening(log_p, shares[mine])
                bar.advance()
    finally:
        bar.stop()
    return dict(zip(OPENINGS, found, strict=True))


def log_probs(lens: Lens, residual: Tensor, ids: np.ndarray) -> np.ndarray:
    """``[contexts, tokens]`` log-probabilities of the tokens with these ids, float64, in nats.

    ``residual`` is ``[contexts, d_model]`` of any layer, before the final norm; NaN gives NaN.
    """
    import torch

    slices = [part.logsumexp(-1) for part in lens.logits_in_slices(residual)]
    total = torch.stack(slices).logsumexp(0)
    few = replace(lens, unembedding=lens.unembedding[torch.from_numpy(ids)])
    return (few.logits(residual) - total[:, None]).double().numpy()


def best_opening(log_p: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """``[contexts]``: log-probability of the likeliest follow-up opening.

    Args:
        log_p: ``[contexts, tokens]`` log-probabilities.
        shares: ``[contexts, tokens]``, the share of follow-ups among the turns that a token opens.
            Tokens with :data:`LEAST_FOLLOW_UPS` and more are follow-up openings. A context with a
            NaN, or without such a token, gives NaN.
    """
    best = np.where(shares >= LEAST_FOLLOW_UPS, log_p, -np.inf).max(1)
    return np.where(np.isneginf(best) | np.isnan(shares).any(1), np.nan, best)


def ahead_for_good(greedy: np.ndarray, rival: np.ndarray) -> np.ndarray:
    """Whether greedy's opening is above its rival in a layer and in all later ones.

    Both are ``[contexts, layers]`` log-probabilities. The result has their shape: 1 if so, else 0;
    NaN for a context that lacks a value in some layer.
    """
    ahead = np.flip(np.logical_and.accumulate(np.flip(greedy > rival, 1), axis=1), 1)
    unknown = np.isnan(greedy) | np.isnan(rival)
    return np.where(unknown.any(1, keepdims=True), np.nan, ahead)
