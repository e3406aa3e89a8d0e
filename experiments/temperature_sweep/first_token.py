"""The distribution of the first token of a user turn at any temperature."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.temperature_sweep.read import HEADER_LAST, Openings, Sweep
from ia_mech.errors import UserError
from ia_mech.lens import Lens
from ia_mech.run import Run

GRID = (*(round(0.1 * step, 1) for step in range(3, 16)), 1.75, 2.0)
COLDEST_STORED = 0.3  # below, the half precision of stored logits shows
LOGITS = 2**23  # most held at a time: 32 MiB, and a few times that with what is made from them


@dataclass(frozen=True)
class FirstToken:
    """What the first token's distribution is like; every array is ``[contexts, temperatures]``.

    Attributes:
        temperatures: of the columns, ascending.
        entropy: nats.
        tokens: exp(entropy), the effective number of tokens.
        turn_end: probability of ending the turn at once.
        variation: total variation from T = 1: half the sum of absolute differences.
        genuine: probability of tokens that opened genuine turns of other sources, each token with
            its share as in :meth:`Openings.of_others`; NaN where there is none.
        restated: the same for restatements.
    """

    temperatures: list[float]
    entropy: np.ndarray
    tokens: np.ndarray
    turn_end: np.ndarray
    variation: np.ndarray
    genuine: np.ndarray
    restated: np.ndarray


def first_token(
    sweep: Sweep,
    openings: Openings,
    temperatures: Sequence[float],
    lens: Lens | None,
    advance: Callable[[], None] = lambda: None,
) -> FirstToken:
    """Curves of every context, from stored header logits or by the lens.

    Args:
        sweep: the runs.
        openings: what opened turns of either kind.
        temperatures: above 0.
        lens: of the model; needed for runs that don't have all header logits (:func:`check`).
        advance: called after each run.
    """
    temperatures = sorted(set(temperatures))
    names = ("entropy", "turn_end", "variation", "genuine", "restated")
    shape = (len(sweep.contexts), len(temperatures))
    found = {name: np.full(shape, np.nan) for name in names}
    shares = openings.of_others(sweep.contexts["source"])
    for number, run in enumerate(sweep.runs):
        mine = np.flatnonzero(sweep.contexts["run"] == number)
        for rows, logits in header_logits(run, sweep.contexts["at"].to_numpy()[mine], lens):
            here = mine[rows]
            chunk = curves(
                logits,
                temperatures,
                sweep.turn_ends,
                openings.ids,
                [share[here] for share in shares],
            )
            for name, values in zip(names, chunk, strict=True):
                found[name][here] = values
        advance()
    return FirstToken(temperatures=temperatures, tokens=np.exp(found["entropy"]), **found)


def stored(run: Run) -> bool:
    """Whether a run holds all header logits."""
    return run.config["header_logits"] == "full"


def check(run: Run, lens: Lens | None, temperatures: Sequence[float]) -> None:
    """Refuse a run that doesn't give the first token's distribution at these temperatures.

    Raises:
        UserError: it has no header logits and nothing they could be computed from, or has them only
            in half precision and a temperature is below 0.3.
    """
    if stored(run):
        if min(temperatures) < COLDEST_STORED:
            raise UserError(
                f"the header logits of {run.path} are kept in half precision, too coarse for "
                f"T = {min(temperatures):g}",
                f"give --temperatures from {COLDEST_STORED} up",
            )
        return
    kept = run.config["header_logits"]
    has = "no header logits" if kept == "none" else f"only the {kept} largest header logits"
    remedy = "sample with --header-logits full"
    if HEADER_LAST not in run.positions:
        raise UserError(f"{run.path} has {has}, and {HEADER_LAST} was not kept either", remedy)
    if lens is None:
        raise UserError(
            f"{run.path} has {has}, and there is no lens to compute them with",
            f"{remedy}, or sample from the model once on this machine, which writes the lens",
        )


def header_logits(
    run: Run, contexts: Sequence[int], lens: Lens | None
) -> Iterator[tuple[slice, Tensor]]:
    """Logits at ``header_last`` a chunk of contexts at a time.

    Args:
        run: a run that passes :func:`check`.
        contexts: rows of ``run.contexts``.
        lens: for a run that doesn't have them stored: the last layer gives them exactly.

    Yields:
        Which of the contexts, and their logits ``[chunk, vocab]`` float32, up to a constant each.
    """
    size = max(1, LOGITS // run.model["vocab"])
    if stored(run):
        kept = run.header_logits()
    else:
        last = run.residuals(run.layers[-1], HEADER_LAST)[list(contexts)].float()
    for start in range(0, len(contexts), size):
        rows = slice(start, min(start + size, len(contexts)))
        if stored(run):
            yield rows, torch.stack([kept[int(at)] for at in contexts[rows]])
        else:
            yield rows, torch.cat(list(lens.logits_in_slices(last[rows])), dim=-1)


def curves(
    logits: Tensor,
    temperatures: Sequence[float],
    turn_ends: Sequence[int],
    opening_ids: Sequence[int],
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
