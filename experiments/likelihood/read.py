"""Scored turns of one or more runs as data frames."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.common.command import of_one_model, open_runs, unperturbed
from experiments.common.references import keyed, references_of
from ia_mech.errors import UserError
from ia_mech.likelihood.candidates import OTHER
from ia_mech.rates.load import NOBODY, differing, read_runs
from ia_mech.run import Run

CONTROL = OTHER  # owes the response nothing
MEAN_OF_LOGS = "response, mean of logs"  # a contrast made here from stored log-probabilities


@dataclass(frozen=True)
class Scored:
    """What the tables are computed from.

    Attributes:
        runs: the runs.
        temperatures: at which all of them scored their references, ascending.
        references: one row per context with a reference turn: ``run``, ``context_id``, ``dataset``,
            ``source`` (a key that holds across runs) and the stored columns.
        curve: ``[references, temperatures]`` log-probability of the turn, with its turn-end where
            the template has one, in nats.
        candidates: one row per candidate of these contexts: ``reference`` (row of ``references``),
            the stored fields, ``whole`` (log-probability of the whole turn), its ``curve``, and
            where it was scored after other responses the contrast in ``MEAN_OF_LOGS``, its
            ``placebo`` (a swapped response takes the own one's place), whether it is ``likeliest``
            after the context's own (1 or 0), and the ``chance`` of that if all responses were alike
            to it.
        generations: one row per generation that was scored after other responses, with ``genuine``
            (1, 0 or NaN) where a judge said so; empty if none was.
        judge: whose verdicts, or None.
        notes: what a reader has to know.
    """

    runs: list[Run]
    temperatures: np.ndarray
    references: pd.DataFrame
    curve: np.ndarray
    candidates: pd.DataFrame
    generations: pd.DataFrame
    judge: str | None
    notes: list[str]


def read(paths: Sequence[str | Path], judge: str | None = None) -> Scored:
    """Read runs of one model.

    Args:
        paths: the runs' folders.
        judge: whose verdicts on generations; the only judge if there is one.

    Raises:
        UserError: not a finished run, one given twice or without scores, several models, no
            reference turn at all, or a judge that isn't there.
    """
    runs = unperturbed(of_one_model(open_runs(paths)))
    for run in runs:
        if not run.score_temperatures:
            raise UserError(
                f"{run.path} was sampled before turns were scored after other responses",
                "sample again",
            )
    found = references_of(runs)
    if found is None:
        raise UserError(
            "no context has a reference turn: the data doesn't say what users said next",
            "give runs of conversations with a later user turn (--followup-column)",
        )
    references = found.frame
    candidates = _candidates(references, found.columns, found.closed)
    notes = _notes(runs, references, candidates)
    generations, judge = _generations(runs, paths, judge, notes)
    return Scored(
        runs, found.temperatures, references, found.curve, candidates, generations, judge, notes
    )


def _candidates(references: pd.DataFrame, at: dict[str, list[int]], closed: bool) -> pd.DataFrame:
    end = "_with_end" if closed else ""
    rows = [
        {
            **candidate,
            "reference": row,
            "dataset": context["dataset"],
            "source": context["source"],
            "whole": candidate[f"logprob{end}"],
            "curve": np.asarray(candidate[f"logprob_tempered{end}"])[at[context["run"]]],
            **_among_swapped(candidate["logprob"], candidate["logprob_swapped"]),
        }
        for row, context in references.iterrows()
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
    written = [str(run.path) for run in runs if run.config["response"] == "generate"]
    if written:
        notes.append(
            f"responses of {', '.join(written)} are the model's own: what users really said "
            "answered other ones."
        )
    swaps = {str(run.path): run.config["swaps"] for run in runs}
    found = references["swapped_from"].map(lambda ids: 0 if ids is None else len(ids))
    fewer = int((found < references["run"].map(swaps)).sum())
    if fewer:
        notes.append(
            f"{fewer} of {total} contexts have fewer swapped responses than --swaps asked for: "
            "their datasets have no more others."
        )
    controlled = set(candidates.loc[candidates["name"] == CONTROL, "dataset"])
    without = sorted(set(references["dataset"]) - controlled)
    if without:
        notes.append(
            f"no control in {', '.join(without)}: there is no other follow-up than of those who "
            "lend their responses."
        )
    different = differing(runs) + (["swaps"] if len(set(swaps.values())) > 1 else [])
    if different:
        notes.append(f"runs that were pooled differ in {', '.join(different)}.")
    return notes


def _among_swapped(logprob: float, swapped: np.ndarray | None) -> dict:
    """How a turn's log-probability after its own response stands among those after others."""
    if swapped is None:
        return dict.fromkeys((MEAN_OF_LOGS, "placebo", "likeliest", "chance"), np.nan)
    several = len(swapped) > 1
    return {
        MEAN_OF_LOGS: (logprob - np.mean(swapped)) / np.log(2.0),
        "placebo": (swapped[0] - np.mean(swapped[1:])) / np.log(2.0) if several else np.nan,
        "likeliest": float(logprob > np.max(swapped)),
        "chance": 1 / (len(swapped) + 1),
    }


def _generations(
    runs: list[Run], paths: Sequence[str | Path], judge: str | None, notes: list[str]
) -> tuple[pd.DataFrame, str | None]:
    """Generations with a contrast, with their labels if all runs are judged."""
    pooled = pd.concat([keyed(run, run.generations) for run in runs], ignore_index=True)
    if judge is not None:
        for run in runs:
            run.labels.judgements(judge)  # that there is one is checked though none may be needed
    contrasts = ["response_contrast_bits", "empty_contrast_bits", "header_contrast_bits"]
    scored = pooled[pooled[contrasts].notna().any(axis=1)].reset_index(drop=True)
    if scored.empty:
        notes.append(
            "generations were not scored after other responses: sample with --score-generations"
        )
        return scored, None
    if judge is None and not all(run.labels.judges for run in runs):
        bare = next(run.path for run in runs if not run.labels.judges)
        notes.append(
            f"{bare} is not judged, so generations aren't told apart: python -m ia_mech.judge run "
            f"{bare}"
        )
        return scored.assign(genuine=np.nan), None
    judged = read_runs(paths, judge, NOBODY)
    keys = ["run", "context_id", "temperature", "sample"]
    labels = judged.turns[[*keys, "genuine"]].assign(run=judged.turns["run"].astype(str))
    notes += [note for note in judged.notes if not note.startswith("runs that were pooled")]
    return scored.merge(labels, on=keys, how="inner"), judged.judge
