"""Users' real follow-ups, scored at many temperatures, as runs store them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ia_mech.estimates import Group, TidyEstimate
from ia_mech.run import Run
from ia_mech.stats import cluster_statistic


@dataclass(frozen=True)
class References:
    """Scored reference turns of runs.

    Attributes:
        frame: one row per context with a reference turn: ``run``, ``context_id``, ``dataset``,
            ``source`` (a key that holds across runs) and the stored columns.
        temperatures: at which all runs scored, ascending.
        curve: ``[references, temperatures]`` log-probability of the turn, with its turn-end where
            the template has one, in nats.
        columns: run → where in its stored lists these temperatures are.
        closed: the template closes turns with a token.
    """

    frame: pd.DataFrame
    temperatures: np.ndarray
    curve: np.ndarray
    columns: dict[str, list[int]]
    closed: bool


def references_of(runs: list[Run]) -> References | None:
    """The references of runs that have ``score_temperatures``; None if no context has one."""
    contexts = pd.concat([keyed(run, run.contexts) for run in runs], ignore_index=True)
    frame = contexts[contexts["reference_logprob"].notna()].reset_index(drop=True)
    if frame.empty:
        return None
    common = set.intersection(*({*run.score_temperatures} for run in runs))
    temperatures = np.array(sorted(common))
    closed = bool(frame["reference_logprob_with_end"].notna().all())
    name = "reference_logprob_tempered" + ("_with_end" if closed else "")
    at = {str(run.path): [run.score_temperatures.index(t) for t in temperatures] for run in runs}
    pairs = zip(frame[name], frame["run"], strict=True)
    curve = np.array([np.asarray(values)[at[path]] for values, path in pairs])
    return References(frame, temperatures, curve, at, closed)


def keyed(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of a run with ``run`` and a ``source`` that holds across runs."""
    source = frame["dataset"] + "\x1f" + frame["source_id"]
    return frame.assign(run=str(run.path), source=source)


def by_temperature(
    group: Group, curve: np.ndarray, temperatures: np.ndarray
) -> Iterator[TidyEstimate]:
    """The mean log-probability of a whole turn by temperature, and where it is largest.

    Args:
        group: of the references.
        curve: ``[references, temperatures]`` log-probabilities in nats.
        temperatures: ascending.
    """
    for column, t in zip(curve.T, temperatures, strict=True):
        yield group.mean("tempered log p", column, temperature=float(t))

    def best(columns, counts) -> float:
        return float(temperatures[np.argmax(counts @ columns["curve"])])

    estimate = cluster_statistic(best, {"curve": curve}, group.sources, **group.options)
    if estimate.sources > 1:
        # Between which points of the grid it may lie; where all resamples agree there is no spread.
        ends = np.nan_to_num([estimate.low, estimate.high], nan=estimate.value)
        at = np.searchsorted(temperatures, ends) + np.array([-1, 1])
        low, high = temperatures[at.clip(0, len(temperatures) - 1)]
        estimate = replace(estimate, low=float(low), high=float(high))
    yield group.row("best temperature", estimate, len(curve))
