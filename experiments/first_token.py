"""The first token of a user turn: its distribution by temperature and by layer, and what it opens.

From stored header logits and residual streams and the model's lens; no model is loaded. Columns of
``contexts`` that name a run's rows are ``run`` (the number of the run), ``at`` (the row there),
``source``, and ``greedy``, the token that opens the greedy turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ia_mech.display import Bar
from ia_mech.errors import UserError
from ia_mech.judge.rubric import GENUINE

if TYPE_CHECKING:
    from torch import Tensor

    from ia_mech.lens import Lens
    from ia_mech.run import Run

COLDEST_STORED = 0.3  # below, the half precision of stored logits shows
LOGITS = 2**23  # most held at a time: 32 MiB, and a few times that with what is made from them
MOSTLY = 0.5  # from this share of genuine turns on, a token is a follow-up opening by itself
HEADER_LAST = "header_last"  # where the first token of the user turn is predicted
RESTATEMENTS = ("prompt_restatement", "assistant_restatement")
OPENINGS = GREEDY, BEST = ("greedy's opening", "best follow-up opening")


# -- openings --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Openings:
    """How often which token opened what, by source.

    Attributes:
        ids: ``[tokens]`` those that opened a sampled turn of either kind, ascending.
        sources: the sources, as rows of the counts.
        genuine: ``[sources, tokens]`` judged-genuine turns that a token opened.
        restated: ``[sources, tokens]`` restatements (of query or response) that it opened.
    """

    ids: np.ndarray
    sources: list[str]
    genuine: np.ndarray
    restated: np.ndarray

    def of_others(self, sources: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Which share of the turns that a token opens in other sources is genuine, or restated.

        Counted are turns of either kind, at any temperature, in all sources but the context's own.
        Both shares are 0 for a token that opened none, and else add up to 1: a token that opens
        both kinds counts for each in proportion, and no probability counts twice.

        Args:
            sources: ``[contexts]`` of each context.

        Returns:
            ``[contexts, tokens]`` shares of genuine turns and of restatements; a row is NaN where
            no other source has a turn of the kind.
        """
        number = {source: row for row, source in enumerate(self.sources)}
        own = [number[source] for source in sources]
        kinds = [counts.sum(0) - counts[own] for counts in (self.genuine, self.restated)]
        total = np.maximum(kinds[0] + kinds[1], 1)  # nothing opened is a share of 0
        shares = [counts / total for counts in kinds]
        for share, counts in zip(shares, kinds, strict=True):
            share[counts.sum(1) == 0] = np.nan
        return shares[0], shares[1]


def openings_of(turns: pd.DataFrame) -> Openings:
    """Count the tokens that open sampled (not greedy) turns."""
    sampled = turns[turns["temperature"] > 0]
    category = sampled["category"]
    kinds = [of.to_numpy() for of in (category == GENUINE, category.isin(RESTATEMENTS))]
    first = np.array([int(ids[0]) for ids in sampled["token_ids"]], dtype=np.int64)
    ids = np.unique(first[kinds[0] | kinds[1]])
    if not len(ids):  # a token that opened neither, so that shares are missing and not sums of none
        ids = first[:1]
    sources = sorted(turns["source"].unique())
    row = np.searchsorted(sources, sampled["source"].to_numpy(dtype=str))
    counts = np.zeros((2, len(sources), len(ids)))
    for table, kind in zip(counts, kinds, strict=True):
        np.add.at(table, (row[kind], np.searchsorted(ids, first[kind])), 1)
    return Openings(ids, sources, counts[0], counts[1])


# -- the first token -------------------------------------------------------------------------------


def check_logits(run: Run, lens: Lens | None, temperatures: Sequence[float]) -> None:
    """Refuse a run without the first token's distribution at these temperatures.

    Raises:
        UserError: it has no header logits and nothing to compute them from, or has them in half
            precision and a temperature is below 0.3; its turns were made to begin with words.
    """
    if run.settings["opening"] is not None:
        raise UserError(
            f"the turns of {run.path} go on from --opening: {HEADER_LAST} doesn't predict them",
            "give a run without",
        )
    if run.settings["header_logits"] == "full":
        if min(temperatures) < COLDEST_STORED:
            raise UserError(
                f"the header logits of {run.path} are kept in half precision, too coarse for "
                f"T = {min(temperatures):g}",
                f"give --temperatures from {COLDEST_STORED} up",
            )
        return
    missing = "header_last was not kept" if HEADER_LAST not in run.positions else "there is no lens"
    if HEADER_LAST not in run.positions or lens is None:
        raise UserError(
            f"{run.path} has not all header logits, and {missing} to compute them",
            "sample with --header-logits full on this machine",
        )


def header_logits(
    run: Run, contexts: Sequence[int], lens: Lens | None
) -> Iterator[tuple[slice, Tensor]]:
    """Logits at ``header_last`` of some rows of ``run.contexts``, a chunk at a time.

    The run passes :func:`check_logits`. Where they aren't stored the last layer gives them exactly.

    Yields:
        Which of the contexts, and their logits ``[chunk, vocab]`` float32, up to a constant each.
    """
    import torch

    size = max(1, LOGITS // run.model["vocab"])
    chunks = [slice(start, start + size) for start in range(0, len(contexts), size)]
    if run.settings["header_logits"] == "full":
        kept = run.header_logits()
        for rows in chunks:
            yield rows, torch.stack([kept[int(at)] for at in contexts[rows]])
        return
    assert lens is not None  # as check_logits found
    last = run.residuals(run.layers[-1], HEADER_LAST)[list(contexts)].float()
    for rows in chunks:
        yield rows, torch.cat(list(lens.logits_in_slices(last[rows])), dim=-1)


def curves(
    logits: Tensor,
    temperatures: Sequence[float],
    turn_ends: Sequence[int],
    opening_ids: np.ndarray,
    shares: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Entropy, turn-end mass, variation from T = 1, and the mass on each kind of opening.

    Args:
        logits: ``[contexts, vocab]`` at T = 1, up to a constant per context.
        temperatures: above 0.
        turn_ends: ids of the tokens that end a turn.
        opening_ids: ``[tokens]`` ids.
        shares: ``[contexts, tokens]`` arrays, how much of a token's probability counts.

    Returns:
        ``[contexts, temperatures]`` arrays: entropy in nats, then probabilities, one per share at
        the end.
    """
    import torch

    logits = logits - logits.amax(-1, keepdim=True)
    plain = logits.softmax(-1)
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
                (probability - plain).abs().sum(-1) / 2,
                *((opened * torch.from_numpy(share)).sum(-1) for share in shares),
            ]
        )
    return [
        torch.stack([c.double() for c in column], dim=-1).numpy()
        for column in zip(*columns, strict=True)
    ]


def first_token_curves(
    runs: Sequence[Run],
    contexts: pd.DataFrame,
    openings: Openings,
    temperatures: Sequence[float],
    lens: Lens | None,
) -> dict[str, np.ndarray]:
    """``[contexts, temperatures]`` arrays of :func:`curves`: ``entropy``, ``turn_end``,
    ``variation``, and the mass on openings of ``genuine`` turns and of ``restated`` ones."""
    names = ("entropy", "turn_end", "variation", "genuine", "restated")
    found = np.full((len(names), len(contexts), len(temperatures)), np.nan)
    shares = openings.of_others(contexts["source"])
    stops = sorted({int(i) for run in runs for i in run.record["identity"]["chat"]["stop_ids"]})
    for number, run in enumerate(runs):
        mine = np.flatnonzero(contexts["run"] == number)
        for chunk, logits in header_logits(run, contexts["at"].to_numpy()[mine], lens):
            here = mine[chunk]
            own = [share[here] for share in shares]
            found[:, here] = curves(logits, temperatures, stops, openings.ids, own)
    return dict(zip(names, found, strict=True))


# -- the logit lens --------------------------------------------------------------------------------


def lens_curves(
    runs: Sequence[Run], contexts: pd.DataFrame, openings: Openings, lens: Lens
) -> dict[str, np.ndarray]:
    """What every layer at ``header_last`` says, through final norm and unembedding.

    Returns:
        ``[contexts, layers]`` log-probabilities in nats of the token that opens the greedy turn
        (:data:`GREEDY`), and of the likeliest other follow-up opening (:data:`BEST`): a token of
        whose turns in other sources most are genuine. NaN where there is none.
    """
    import torch

    layers, own = list(runs[0].layers), contexts["greedy"].to_numpy()
    ids = np.unique(np.concatenate([openings.ids, own]))
    shares = np.zeros((len(contexts), len(ids)))
    shares[:, np.searchsorted(ids, openings.ids)] = openings.of_others(contexts["source"])[0]
    column = np.searchsorted(ids, own)
    shares[np.arange(len(own)), column] *= 0.0  # what the others are compared with; NaN stays
    found = np.full((2, len(own), len(layers)), np.nan)
    bar = Bar()
    bar.start("logit lens", len(runs) * len(layers), unit="layer")
    try:
        for number, run in enumerate(runs):
            mine = np.flatnonzero(contexts["run"] == number)
            if HEADER_LAST not in run.positions or not len(mine):
                continue
            at = torch.from_numpy(contexts["at"].to_numpy()[mine])
            for layer in layers:
                log_p = log_probs(lens, run.residuals(layer, HEADER_LAST)[at], ids)
                found[0, mine, layer] = log_p[np.arange(len(mine)), column[mine]]
                found[1, mine, layer] = best_of(log_p, shares[mine])
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


def best_of(log_p: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """``[contexts]``: log-probability of the likeliest follow-up opening.

    Args:
        log_p: ``[contexts, tokens]`` log-probabilities.
        shares: ``[contexts, tokens]`` how many of the turns that a token opens are genuine; those
            of :data:`MOSTLY` and more count. NaN gives NaN, and so does a context without one.
    """
    best = np.where(shares >= MOSTLY, log_p, -np.inf).max(1)
    return np.where(np.isneginf(best) | np.isnan(shares).any(1), np.nan, best)


def overtaking_layer(greedy: np.ndarray, rival: np.ndarray) -> np.ndarray:
    """From which layer on greedy's opening stays above its rival, to the last layer.

    Both are ``[contexts, layers]`` log-probabilities. The result is ``[contexts]``: the layer's
    place from 0; infinite if it isn't above at the last layer, NaN where a layer has no value.
    """
    ahead = greedy > rival
    for_good = np.flip(np.logical_and.accumulate(np.flip(ahead, 1), axis=1), 1)
    first = np.where(for_good[:, -1], for_good.argmax(1), np.inf)
    return np.where((np.isnan(greedy) | np.isnan(rival)).any(1), np.nan, first)
