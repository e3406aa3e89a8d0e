"""Perturbed and unperturbed contexts side by side: turns with labels, references, header states."""

import json
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.perturbations.conditions import BARE
from experiments.perturbations.sample import Base
from ia_mech.data.conversations import UNPERTURBED
from ia_mech.judge.label import UNSEEN
from ia_mech.rates.load import NOBODY, read_runs
from ia_mech.run import Run


@dataclass(frozen=True)
class Compared:
    """What the tables are computed from.

    Attributes:
        turns: one row per user turn: ``dataset``, ``source`` (a key that holds across runs),
            ``condition`` (``none`` for unperturbed), ``temperature``, ``category``, ``genuine`` (1,
            0 or NaN; judged after the response that the model was given), ``held`` (the same,
            judged after the unperturbed response) and ``context_id``.
        contexts: one row per context: ``dataset``, ``source``, ``condition``, ``pair`` (id of the
            unperturbed context), ``row`` (in its run) and ``logprob`` of the reference turn
            (without turn-end, nats; NaN without one).
        base: the unperturbed runs.
        run: the perturbed one.
        notes: what a reader has to know.
    """

    turns: pd.DataFrame
    contexts: pd.DataFrame
    base: Base
    run: Run
    notes: list[str]


def read(base: Base, run: Run, judge: str, left_out: list[str]) -> Compared:
    """Join the unperturbed runs with the perturbed one.

    Args:
        base: the unperturbed runs.
        run: the perturbed contexts.
        judge: whose verdicts.
        left_out: ids of unperturbed contexts that aren't compared.

    Raises:
        UserError: verdicts are missing, or are of different judges or texts.
    """
    used = base.contexts[~base.contexts["context_id"].isin(left_out)]
    paths = [*(one.path for one in base.runs), run.path]
    seen = read_runs(paths, judge, NOBODY)
    turns = seen.turns[_compared(seen.turns, base, run, set(used["context_id"]))].copy()
    keys = ["context_id", "temperature", "sample"]
    held = read_runs([run.path], judge + UNSEEN, NOBODY).turns.set_index(keys)["genuine"]
    own = turns["genuine"].to_numpy()
    other = held.reindex(pd.MultiIndex.from_frame(turns[keys])).to_numpy()
    perturbed = (turns["perturbation"] != UNPERTURBED).to_numpy()
    turns["held"] = np.where(perturbed, other, own)
    turns = turns.rename(columns={"perturbation": "condition"})
    contexts = _contexts(used, run)
    return Compared(turns.reset_index(drop=True), contexts, base, run, _notes(contexts, base, run))


def _compared(turns: pd.DataFrame, base: Base, run: Run, used: set[str]) -> pd.Series:
    """Which turns are compared: all perturbed ones, and their likes of the unperturbed runs."""
    in_grid = turns["temperature"].isin([0.0, *base.grid.temperatures])
    in_grid &= turns["sample"] < base.grid.samples
    return (turns["run"] == str(run.path)) | (turns["context_id"].isin(used) & in_grid)


def _contexts(used: pd.DataFrame, run: Run) -> pd.DataFrame:
    parts = []
    for path, rows in used.groupby("run", sort=False):
        parts.append(rows.assign(condition=UNPERTURBED, pair=rows["context_id"], place=path))
    own = run.contexts
    pairs = [json.loads(metadata)["unperturbed_id"] for metadata in own["metadata"]]
    own = own.assign(condition=own["perturbation"], pair=pairs, place=str(run.path))
    parts.append(own.assign(row=np.arange(len(own))))
    contexts = pd.concat(parts, ignore_index=True)
    contexts["source"] = contexts["dataset"] + "\0" + contexts["source_id"]
    contexts["logprob"] = contexts["reference_logprob"].astype(float)
    names = ["dataset", "source", "condition", "pair", "place", "row", "logprob", "metadata"]
    return contexts[[*names, "response_cut_off"]]


def _notes(contexts: pd.DataFrame, base: Base, run: Run) -> list[str]:
    notes = []
    perturbed = contexts[contexts["condition"] != UNPERTURBED]
    how = perturbed["metadata"].map(lambda metadata: json.loads(metadata)["how"])
    for condition, ways in how.groupby(perturbed["condition"], sort=False):
        counts = ways.value_counts()
        if len(counts) > 1:
            said = ", ".join(f"{way} {count}" for way, count in counts.items())
            notes.append(f"{condition} was made in several ways: {said} (metadata, how).")
    plain = contexts[contexts["condition"] == UNPERTURBED]
    cut = int(plain["response_cut_off"].sum())
    if cut:
        notes.append(
            f"{cut} of {len(plain)} unperturbed responses were cut off, which is another stimulus; "
            "their perturbations are made of the cut text."
        )
    if BARE in set(perturbed["condition"]):
        notes.append(
            "header_only shows the model nothing of a conversation: all its greedy turns are one "
            "turn, held against every source's response."
        )
    software = {r.record["identity"]["software"]["torch"] for r in (*base.runs, run)}
    if len(software) > 1:
        notes.append(f"the runs were made with several versions of torch: {', '.join(software)}.")
    return notes
