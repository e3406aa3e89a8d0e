"""The logit lens: what each layer would have said, of greedy's opening and of follow-ups'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from experiments.temperature_sweep.read import Openings, Sweep
from ia_mech.errors import UserError
from ia_mech.lens import Lens

MOSTLY = 0.5  # from this share of genuine turns on, a token is a follow-up opening by itself
CONTEXTS = 1024  # at a time


@dataclass(frozen=True)
class LensCurves:
    """Log-probabilities in nats by layer; arrays are ``[contexts, layers, positions]``.

    NaN where a context lacks the position; rivals also where other sources have none.

    Attributes:
        layers: 0 is the embeddings.
        positions: names.
        greedy: of the token that opens the context's greedy turn.
        follow_ups: of all other tokens that opened genuine turns of other sources, together, each
            with its share as in :meth:`Openings.of_others`.
        best: of the likeliest other token that opened more genuine turns than restatements there,
            or as many.
        share: ``[contexts]`` that of greedy's own opening: how often it opened a genuine turn of
            another source, against a restatement; NaN where there is no genuine turn.
    """

    layers: list[int]
    positions: list[str]
    greedy: np.ndarray
    follow_ups: np.ndarray
    best: np.ndarray
    share: np.ndarray


def lens_curves(
    sweep: Sweep,
    openings: Openings,
    lens: Lens,
    positions: Sequence[str] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> LensCurves:
    """Read every layer at every stored position through the final norm and the unembedding.

    Args:
        sweep: the runs.
        openings: what opened turns of either kind.
        lens: of the model.
        positions: which; None is all that some run has kept.
        advance: called after each layer and position of a run.

    Raises:
        UserError: a position that no run has kept.
    """
    names = positions_of(sweep, positions)
    layers = list(sweep.runs[0].layers)
    frame = sweep.contexts
    own = frame["greedy"].to_numpy()
    ids = np.unique(np.concatenate([openings.ids, own]))
    weights = np.zeros((len(frame), len(ids)))
    weights[:, np.searchsorted(ids, openings.ids)] = openings.of_others(frame["source"])[0]
    column = np.searchsorted(ids, own)
    rows = np.arange(len(frame))
    share = weights[rows, column]
    share[np.isnan(weights).any(1)] = np.nan
    weights[rows, column] = 0.0  # what greedy opens with is what the others are compared with
    found = np.full((3, len(frame), len(layers), len(names)), np.nan, dtype=np.float32)
    for number, run in enumerate(sweep.runs):
        mine = np.flatnonzero(frame["run"] == number)
        at = torch.from_numpy(frame["at"].to_numpy()[mine])
        for place, name in enumerate(names):
            if name not in run.positions or not len(mine):
                continue
            for layer in layers:
                residual = run.residuals(layer, name)[at]
                for part in torch.arange(len(mine)).split(CONTEXTS):
                    here = mine[part.numpy()]
                    said = log_probs(lens, residual[part], ids)
                    found[:, here, layer, place] = compared(said, column[here], weights[here])
                advance()
    return LensCurves(layers, names, *found, share)


def positions_of(sweep: Sweep, wanted: Sequence[str] | None = None) -> list[str]:
    """The positions that some run has kept, in the order of the template; or those wanted.

    Raises:
        UserError: a position that no run has kept.
    """
    kept = list(dict.fromkeys(name for run in sweep.runs for name in run.positions))
    unknown = [name for name in wanted or [] if name not in kept]
    if unknown:
        raise UserError(
            f"position {unknown[0]!r} was not kept in any run", f"give some of {', '.join(kept)}"
        )
    return kept if wanted is None else [name for name in kept if name in wanted]


def log_probs(lens: Lens, residual: Tensor, ids: np.ndarray) -> np.ndarray:
    """Log-probabilities ``[contexts, tokens]`` of some tokens, float64, in nats.

    Args:
        lens: of the model.
        residual: ``[contexts, d_model]`` of any layer, before the final norm; NaN gives NaN.
        ids: ``[tokens]`` ids.
    """
    slices = [part.logsumexp(-1) for part in lens.logits_in_slices(residual)]
    total = torch.stack(slices).logsumexp(0)
    few = replace(lens, unembedding=lens.unembedding[torch.from_numpy(ids)])
    picked = few.logits(residual)
    return (picked - total[:, None]).double().numpy()


def compared(said: np.ndarray, greedy: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """``[3, contexts]``: greedy's opening, the follow-up openings together, the best of them.

    Args:
        said: ``[contexts, tokens]`` log-probabilities.
        greedy: ``[contexts]`` which token greedy opens with.
        weights: ``[contexts, tokens]`` shares of follow-up openings, 0 for greedy's own; a row may
            be NaN.
    """
    with np.errstate(divide="ignore"):
        together = np.log((np.exp(said) * weights).sum(1))
    best = np.where(weights >= MOSTLY, said, -np.inf).max(1)
    values = np.stack([said[np.arange(len(said)), greedy], together, best])
    values[1:, np.isnan(weights).any(1)] = np.nan
    return np.where(np.isneginf(values), np.nan, values)  # nothing to compare with


def overtaking(greedy: np.ndarray, rival: np.ndarray) -> np.ndarray:
    """From which layer on greedy's opening stays above its rival, to the last layer.

    Args:
        greedy: ``[contexts, layers, positions]`` log-probabilities.
        rival: the same of what it is compared with.

    Returns:
        ``[contexts, positions]``: the layer's place from 0; infinite if it isn't above at the last
        layer, NaN where a layer has no value.
    """
    ahead = greedy > rival
    for_good = np.flip(np.logical_and.accumulate(np.flip(ahead, 1), axis=1), 1)
    first = np.where(for_good[:, -1], for_good.argmax(1), np.inf)
    missing = (np.isnan(greedy) | np.isnan(rival)).any(1)
    return np.where(missing, np.nan, first)
