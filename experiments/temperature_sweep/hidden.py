"""How far below greedy decoding a sampled turn lies: where, by how many ranks, by how many nats."""

import numpy as np
import pandas as pd

from experiments.temperature_sweep.read import Sweep, genuine

NAMES = ("run", "dataset", "source", "context", "context_id", "temperature", "sample", "category")


def hidden(sweep: Sweep) -> pd.DataFrame:
    """Where greedy decoding leaves every sampled turn that was assessed.

    Up to that token the turn and the run's own greedy turn are the same, so that both tokens follow
    the same text: the stored log-probabilities of both are of one distribution, and their
    difference is exact, at whichever token it is.

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
    left = pd.DataFrame([leaving(turn, other) for turn, other in pairs])
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
