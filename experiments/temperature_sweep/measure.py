"""What is measured per context and per turn, before estimates are made of it.

- the first token's distribution at any temperature, from header logits or the lens;
- the logit lens: what each layer says of greedy's opening and of the openings of follow-ups;
- where greedy decoding leaves a sampled turn: at which token, by how many ranks and nats.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from experiments.likelihood import References, references_of
from experiments.temperature_sweep.read import HEADER_LAST, Openings, Sweep, genuine, openings_of
from ia_mech.data.conversations import UNPERTURBED
from ia_mech.display import Progress
from ia_mech.errors import UserError
from ia_mech.lens import Lens, NoLens
from ia_mech.run import Run

GRID = (*(round(0.1 * step, 1) for step in range(3, 16)), 1.75, 2.0)
COLDEST_STORED = 0.3  # below, the half precision of stored logits shows
LOGITS = 2**23  # most held at a time: 32 MiB, and a few times that with what is made from them
MOSTLY = 0.5  # from this share of genuine turns on, a token is a follow-up opening by itself
CONTEXTS = 1024  # of the lens at a time
NAMES = ("run", "dataset", "source", "context", "context_id", "temperature", "sample", "category")


# -- the first token -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstToken:
    """The first token's distribution; every array is ``[contexts, temperatures]``.

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
    """Curves of every context at temperatures above 0, from stored header logits or by the lens.

    The lens is needed for runs without all header logits (:func:`check`); ``advance`` is called
    after each run.
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
            own = [share[here] for share in shares]
            chunk = curves(logits, temperatures, sweep.turn_ends, openings.ids, own)
            for name, values in zip(names, chunk, strict=True):
                found[name][here] = values
        advance()
    return FirstToken(temperatures=temperatures, tokens=np.exp(found["entropy"]), **found)


def stored(run: Run) -> bool:
    """Whether a run holds all header logits."""
    return run.settings["header_logits"] == "full"


def check(run: Run, lens: Lens | None, temperatures: Sequence[float]) -> None:
    """Refuse a run without the first token's distribution at these temperatures.

    Raises:
        UserError: it has no header logits and nothing to compute them from, or has them in half
            precision and a temperature is below 0.3.
    """
    if stored(run):
        if min(temperatures) < COLDEST_STORED:
            raise UserError(
                f"the header logits of {run.path} are kept in half precision, too coarse for "
                f"T = {min(temperatures):g}",
                f"give --temperatures from {COLDEST_STORED} up",
            )
        return
    kept = run.settings["header_logits"]
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
    """Logits at ``header_last`` of some rows of ``run.contexts``, a chunk at a time.

    The run passes :func:`check`. Where they aren't stored the last layer gives them exactly.

    Yields:
        Which of the contexts, and their logits ``[chunk, vocab]`` float32, up to a constant each.
    """
    size = max(1, LOGITS // run.model["vocab"])
    chunks = [slice(start, start + size) for start in range(0, len(contexts), size)]
    if stored(run):
        kept = run.header_logits()
        for rows in chunks:
            yield rows, torch.stack([kept[int(at)] for at in contexts[rows]])
        return
    assert lens is not None  # as check found
    last = run.residuals(run.layers[-1], HEADER_LAST)[list(contexts)].float()
    for rows in chunks:
        yield rows, torch.cat(list(lens.logits_in_slices(last[rows])), dim=-1)


def curves(
    logits: Tensor,
    temperatures: Sequence[float],
    turn_ends: Sequence[int],
    opening_ids: Sequence[int] | np.ndarray,
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


# -- the logit lens --------------------------------------------------------------------------------


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
    """Read every layer at the positions (None: all kept) through final norm and unembedding.

    ``advance`` is called after each layer and position of a run.

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
                    log_p = log_probs(lens, residual[part], ids)
                    found[:, here, layer, place] = compared(log_p, column[here], weights[here])
                advance()
    greedy, follow_ups, best = found
    return LensCurves(layers, names, greedy, follow_ups, best, share)


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
    """Log-probabilities ``[contexts, tokens]`` of the tokens with these ids, float64, in nats.

    ``residual`` is ``[contexts, d_model]`` of any layer, before the final norm; NaN gives NaN.
    """
    slices = [part.logsumexp(-1) for part in lens.logits_in_slices(residual)]
    total = torch.stack(slices).logsumexp(0)
    few = replace(lens, unembedding=lens.unembedding[torch.from_numpy(ids)])
    picked = few.logits(residual)
    return (picked - total[:, None]).double().numpy()


def compared(log_p: np.ndarray, greedy: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """``[3, contexts]``: greedy's opening, the follow-up openings together, the best of them.

    Args:
        log_p: ``[contexts, tokens]`` log-probabilities.
        greedy: ``[contexts]`` which token greedy opens with.
        weights: ``[contexts, tokens]`` shares of follow-up openings, 0 for greedy's own; a row may
            be NaN.
    """
    with np.errstate(divide="ignore"):
        together = np.log((np.exp(log_p) * weights).sum(1))
    best = np.where(weights >= MOSTLY, log_p, -np.inf).max(1)
    values = np.stack([log_p[np.arange(len(log_p)), greedy], together, best])
    values[1:, np.isnan(weights).any(1)] = np.nan
    return np.where(np.isneginf(values), np.nan, values)  # nothing to compare with


def overtaking(greedy: np.ndarray, rival: np.ndarray) -> np.ndarray:
    """From which layer on greedy's opening stays above its rival, to the last layer.

    Both are ``[contexts, layers, positions]`` log-probabilities. The result is ``[contexts,
    positions]``: the layer's place from 0; infinite if it isn't above at the last layer, NaN where
    a layer has no value.
    """
    ahead = greedy > rival
    for_good = np.flip(np.logical_and.accumulate(np.flip(ahead, 1), axis=1), 1)
    first = np.where(for_good[:, -1], for_good.argmax(1), np.inf)
    missing = (np.isnan(greedy) | np.isnan(rival)).any(1)
    return np.where(missing, np.nan, first)


# -- where greedy leaves ---------------------------------------------------------------------------


def hidden(sweep: Sweep) -> pd.DataFrame:
    """Where greedy decoding leaves every sampled turn that was assessed.

    Up to that token the turn and the run's own greedy turn are the same. So both tokens follow the
    same text, their stored log-probabilities are of one distribution, and the difference is exact.

    Returns:
        One row per turn: :data:`NAMES` of ``Sweep.turns``, ``genuine`` (1 or 0), ``follows`` (its
        first token is greedy's, 1 or 0), ``leaves`` (greedy leaves it, 1 or 0), and where it does,
        else NaN: ``token`` (number of the token, from 1), ``before`` (share of the turn's tokens
        before it, turn-end included), ``rank`` (from 1), ``probability`` and ``gap``
        (log-probability of greedy's token less that of the turn's, in nats), all at T = 1.
    """
    turns = sweep.turns[sweep.turns["genuine"].notna()]
    sampled = turns[turns["temperature"] > 0]
    greedy = {
        (str(run.path), row.context_id): row
        for run in sweep.runs
        for row in run.generations.query("temperature == 0").itertuples()
    }
    pairs = [(row, greedy[row.run, row.context_id]) for row in sampled.itertuples()]
    frame = sampled[[*NAMES]].reset_index(drop=True)
    frame["genuine"] = genuine(sampled).to_numpy(dtype=float)
    left = pd.DataFrame([leaving(turn, greedy_turn) for turn, greedy_turn in pairs])
    return pd.concat([frame, left], axis=1)


def leaving(turn, greedy) -> dict[str, float]:
    """Where greedy leaves one turn; both have ``token_ids``, ``logprobs_raw`` and ``ranks``."""
    ids, others = np.asarray(turn.token_ids), np.asarray(greedy.token_ids)
    shared = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:shared] != others[:shared])
    found = {"follows": float(ids[0] == others[0]), "leaves": float(len(differ) > 0)}
    if not len(differ):  # the same turn, to its end or to the limit of tokens
        return found | dict.fromkeys(("token", "before", "rank", "probability", "gap"), np.nan)
    at = int(differ[0])
    log_p = float(turn.logprobs_raw[at])
    return found | {
        "token": at + 1.0,
        "before": at / len(ids),
        "rank": float(turn.ranks[at]),
        "probability": float(np.exp(log_p)),
        "gap": float(greedy.logprobs_raw[at]) - log_p,
    }


def against_others(frame: pd.DataFrame, column: str) -> tuple[np.ndarray, np.ndarray, pd.DataFrame]:
    """Genuine turns against the others of the same context at the same temperature.

    Every value is taken less the mean of those others, so that neither contexts nor temperatures
    with many genuine turns are compared with ones that have few. Turns of a context without both
    kinds are left out.

    Args:
        frame: rows of :func:`hidden`.
        column: of it; NaN is left out.

    Returns:
        ``[rows]`` centred values; ``[rows]`` which of them are genuine; the rows themselves.
    """
    kept = frame[frame[column].notna()]
    cells = kept.groupby(["context", "temperature"])["genuine"]
    kept = kept[(cells.transform("min") == 0) & (cells.transform("max") == 1)]
    others = kept[column].where(kept["genuine"] == 0)
    mean = others.groupby([kept["context"], kept["temperature"]]).transform("mean")
    return (kept[column] - mean).to_numpy(), (kept["genuine"] == 1).to_numpy(), kept


# -- together --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What estimates are made of.

    Attributes:
        sweep: the runs with turns and contexts.
        first: the first token's distribution.
        hidden: where greedy leaves each turn, as :func:`hidden` gives it.
        lens: the logit lens, or None without a lens file.
        references: scored real follow-ups, or None without any.
    """

    sweep: Sweep
    first: FirstToken
    hidden: pd.DataFrame
    lens: LensCurves | None
    references: References | None


def measure(
    sweep: Sweep,
    temperatures: Sequence[float] | None,
    positions: Sequence[str] | None,
    progress: Progress,
) -> tuple[Measured, list[str]]:
    """Curves, divergences and lens of a sweep, and what a reader has to know of them.

    Args:
        sweep: judged runs.
        temperatures: of the first-token curves; None is :data:`GRID` and the sampled ones.
        positions: of the logit lens; None is all.
        progress: shows what takes long.

    Raises:
        UserError: no logits for a run, an unknown position, or a damaged lens.
    """
    notes = list(sweep.notes)
    places = positions_of(sweep, positions)
    openings = openings_of(sweep.turns)
    notes += _of_openings(openings)
    lens, why = _offline_lens(sweep)
    if lens is None:
        notes.append(f"no logit lens: {why}.")
    sampled = [t for t in sweep.temperatures if t >= COLDEST_STORED]
    grid = temperatures or [*GRID, *sampled]
    for run in sweep.runs:
        check(run, lens, grid)
    without = [run.name for run in sweep.runs if not stored(run)]
    progress.start("first token", len(sweep.runs))
    first = first_token(sweep, openings, grid, lens, progress.advance)
    if without:
        notes.append(
            f"header logits of {', '.join(without)} are not stored: they were computed from the "
            "last layer with the lens."
        )
    curves = None
    if lens is not None:
        kept = sum(name in run.positions for run in sweep.runs for name in places)
        progress.start("logit lens", kept * len(sweep.runs[0].layers))
        curves = lens_curves(sweep, openings, lens, positions, progress.advance)
    references = _references(sweep, notes)
    return Measured(sweep, first, hidden(sweep), curves, references), notes


def _offline_lens(sweep: Sweep) -> tuple[Lens | None, str]:
    try:
        return Lens.load(sweep.runs[0].model["weights_hash"]), ""
    except NoLens as missing:
        return None, str(missing)


def _of_openings(openings: Openings) -> list[str]:
    """What there is too little of for openings to be compared."""
    counts = {"genuine": openings.genuine, "restatements": openings.restated}
    notes = []
    for kind, table in counts.items():
        found = int((table.sum(1) > 0).sum())
        if found < 2:
            notes.append(
                f"sampled turns of {('no', 'one')[found]} source were judged {kind}: their "
                "openings can't be compared with those of other sources."
            )
    both = ((openings.genuine.sum(0) > 0) & (openings.restated.sum(0) > 0)).sum()
    return [
        *notes,
        f"openings: {len(openings.ids)} tokens opened {openings.genuine.sum():.0f} genuine turns "
        f"and {openings.restated.sum():.0f} restatements, {both} of them both kinds.",
    ]


def _references(sweep: Sweep, notes: list[str]) -> References | None:
    """Scored references of unperturbed contexts, each once."""
    found = references_of(sweep.runs)
    if found is None:
        notes.append("no context has a reference turn, so there is no curve of references.")
        return None
    frame = found.frame
    plain = frame["perturbation"].fillna(UNPERTURBED) == UNPERTURBED
    kept = (plain & ~frame.duplicated(["source", "context_id", "text"])).to_numpy()
    if not kept.any():
        return None
    frame = frame[kept].reset_index(drop=True)
    return replace(found, frame=frame, curve=found.curve[kept])
