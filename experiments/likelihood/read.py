"""Scored turns of one or more runs as data frames."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ia_mech.errors import UserError
from ia_mech.likelihood.candidates import OTHER
from ia_mech.rates.load import differing
from ia_mech.run import Run

CONTROL = OTHER  # owes the response nothing
MEAN_OF_LOGS = "response, mean of logs"  # a contrast made here from stored log-probabilities


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


@dataclass(frozen=True)
class Scored:
    """What the estimates are made of.

    Attributes:
        runs: the runs.
        references: their reference turns.
        candidates: one row per candidate of these contexts: ``reference`` (row of the references'
            frame), the stored fields, ``whole`` (log-probability of the whole turn), its ``curve``,
            and where it was scored after swapped responses the columns of :func:`_against_swapped`.
        notes: what a reader has to know.
    """

    runs: list[Run]
    references: References
    candidates: pd.DataFrame
    notes: list[str]


def read(runs: list[Run]) -> Scored:
    """Read unperturbed runs of one model.

    Raises:
        UserError: no reference turn at all, or two runs that hold the same references after the
            same contexts.
    """
    scored = references_of(runs)
    if scored is None:
        raise UserError(
            "no context has a reference turn: the data doesn't say what users said next",
            "give runs of conversations with a later user turn (--followup-column)",
        )
    _refuse_repeated(scored.frame)
    candidates = _candidates(scored)
    return Scored(runs, scored, candidates, _notes(runs, scored.frame, candidates))


def _refuse_repeated(frame: pd.DataFrame) -> None:
    """Refuse references that two runs score in the same context: they would count twice."""
    columns = ["token_ids", "reference_token_ids"]
    keys = frame[columns].map(tuple).agg(tuple, axis=1)
    again = keys.duplicated()
    if again.any():
        first = frame.loc[keys == keys[again].iloc[0], "run"].iloc[0]
        other = frame.loc[again, "run"].iloc[0]
        raise UserError(
            f"{first} and {other} score {again.sum()} of the same follow-ups in the same contexts",
            "give one of them",
        )


def references_of(runs: list[Run]) -> References | None:
    """The references of runs; None if no context has one."""
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


def _candidates(references: References) -> pd.DataFrame:
    """``Scored.candidates``."""
    end = "_with_end" if references.closed else ""
    rows = [
        {
            **candidate,
            "reference": row,
            "dataset": context["dataset"],
            "source": context["source"],
            "whole": candidate[f"logprob{end}"],
            "curve": np.asarray(candidate[f"logprob_tempered{end}"])[
                references.columns[context["run"]]
            ],
            **_against_swapped(candidate["logprob"], candidate["logprob_swapped"]),
        }
        for row, context in enumerate(references.frame.to_dict("records"))
        for candidate in context["candidates"]
    ]
    return pd.DataFrame(rows)


def _notes(runs: list[Run], references: pd.DataFrame, candidates: pd.DataFrame) -> list[str]:
    """What a reader of estimates over references has to know."""
    notes = []
    cut, total = int(references["response_cut_off"].sum()), len(references)
    if cut:
        notes.append(
            f"{cut} of {total} follow-ups are scored after a response that was cut off, which is "
            "another stimulus (column response_cut_off)."
        )
    written = [run.name for run in runs if run.settings["response"] == "generate"]
    if written:
        notes.append(
            f"responses of {', '.join(written)} are the model's own: what users really said "
            "answered other ones."
        )
    contrasts = {str(run.path): run.settings["contrasts"] for run in runs}
    swaps = {str(run.path): run.settings["swaps"] * contrasts[str(run.path)] for run in runs}
    if not any(contrasts.values()):
        notes.append("no contrasts and rivals: they are scored where sampling has --contrasts.")
    found = references["swapped_from"].map(lambda ids: 0 if ids is None else len(ids))
    fewer = int((found < references["run"].map(swaps)).sum())
    if fewer:
        notes.append(
            f"{fewer} of {total} contexts have fewer swapped responses than --swaps asked for: "
            "their datasets hold no more."
        )
    controlled = set(candidates.loc[candidates["name"] == CONTROL, "dataset"])
    scored = references[references["run"].map(contrasts)]
    without = sorted(set(scored["dataset"]) - controlled)
    if without:
        notes.append(
            f"no control in {', '.join(without)}: all other follow-ups are of conversations whose "
            "responses were swapped in."
        )
    different = differing(runs) + (["swaps"] if len(set(swaps.values())) > 1 else [])
    if different:
        notes.append(f"runs that were pooled differ in {', '.join(different)}.")
    return notes


def _against_swapped(logprob: float, swapped: np.ndarray | None) -> dict[str, float]:
    """A turn's log-probability after its own response, against those after swapped ones.

    Returns:
        The contrast in :data:`MEAN_OF_LOGS`, in bits; ``placebo``, the same with the first swapped
        response in the own one's place; ``likeliest``, whether the turn is likeliest after its own
        response (1 or 0); and ``chance``, of that if all responses were alike to it. NaN without
        swapped responses.
    """
    if swapped is None:
        return dict.fromkeys((MEAN_OF_LOGS, "placebo", "likeliest", "chance"), np.nan)
    several = len(swapped) > 1
    return {
        MEAN_OF_LOGS: (logprob - np.mean(swapped)) / np.log(2.0),
        "placebo": (swapped[0] - np.mean(swapped[1:])) / np.log(2.0) if several else np.nan,
        "likeliest": float(logprob > np.max(swapped)),
        "chance": 1 / (len(swapped) + 1),
    }
