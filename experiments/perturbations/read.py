"""What of the unperturbed runs is compared, and with which perturbed contexts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.perturbations.conditions import HEADER_ONLY
from experiments.resample import SHARED
from ia_mech.data.conversations import UNPERTURBED
from ia_mech.errors import UserError
from ia_mech.judge.label import UNSEEN
from ia_mech.rates.load import NO_ANNOTATOR, read_runs
from ia_mech.run import Run
from ia_mech.settings import Settings


@dataclass(frozen=True)
class Base:
    """Unperturbed contexts and how they were sampled.

    Attributes:
        runs: where they are.
        settings: of the first run, with the temperatures and samples that the conditions are
            compared on: of what all runs have.
        contexts: one row per context that is used: ``run`` (its folder), ``row`` (its place among
            the run's contexts) and the columns of these.
    """

    runs: list[Run]
    settings: Settings
    contexts: pd.DataFrame


def read_base(
    runs: list[Run],
    *,
    limit: int | None = None,
    temperatures: Sequence[float] | None = None,
    samples: int | None = None,
) -> Base:
    """What of the runs is compared.

    Args:
        runs: unperturbed runs of one model.
        limit: contexts per run, from the start; None for all.
        temperatures: besides greedy; 1 if not given (if the runs have it, else all they share).
        samples: per temperature; 4 if not given (or as many as the runs have).

    Raises:
        UserError: runs of several settings, one context twice, or decoding that they lack.
    """
    _same(runs, "dtype", [run.model["dtype"] for run in runs])
    for name in (*SHARED, "max_new_tokens", "seed"):
        _same(runs, name, [run.settings[name] for run in runs])
    common = set.intersection(*(set(run.settings["temperatures"]) for run in runs))
    if temperatures is None:
        temperatures = [1.0] if 1.0 in common else sorted(common)
    missing = [t for t in temperatures if t not in common]
    if missing or not temperatures:
        has = ", ".join(f"{t:g}" for t in sorted(common)) or "none but greedy"
        problem = f"temperature {missing[0]:g} is not in all runs" if missing else "no temperature"
        raise UserError(f"{problem} (they have {has})", "give --temperatures of these")
    most = min(run.settings["samples"] for run in runs)
    samples = min(4, most) if samples is None else samples
    if samples > most:
        raise UserError(f"--samples {samples}: the runs have {most}", f"give at most {most}")
    asked = {"temperatures": tuple(temperatures), "samples": samples}
    settings = Settings.from_dict(runs[0].settings | asked)
    used = [
        run.contexts.assign(run=str(run.path), row=range(len(run.contexts))).iloc[:limit]
        for run in runs
    ]
    contexts = pd.concat(used, ignore_index=True)
    twice = contexts[contexts.duplicated("context_id")]
    if len(twice):
        raise UserError(
            f"context {twice['context_id'].iloc[0]} is in two runs",
            "give one of them, or perturb them apart if these are different conversations",
        )
    return Base(runs, settings, contexts)


def _same(runs: list[Run], name: str, settings: list) -> None:
    for run, setting in zip(runs, settings, strict=True):
        if setting != settings[0]:
            raise UserError(
                f"{runs[0].path} and {run.path} differ in {name} ({settings[0]!r}, {setting!r})",
                "perturb them apart",
            )


@dataclass(frozen=True)
class Compared:
    """What the estimates are made of.

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


def compare(base: Base, run: Run, judge: str, left_out: list[str]) -> Compared:
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
    seen = read_runs([*base.runs, run], judge, NO_ANNOTATOR)
    turns = seen.turns[_compared(seen.turns, base, run, set(used["context_id"]))].copy()
    keys = ["context_id", "temperature", "sample"]
    held = read_runs([run], judge + UNSEEN, NO_ANNOTATOR).turns.set_index(keys)["genuine"]
    own = turns["genuine"].to_numpy()
    other = held.reindex(pd.MultiIndex.from_frame(turns[keys])).to_numpy()
    perturbed = (turns["perturbation"] != UNPERTURBED).to_numpy()
    turns["held"] = np.where(perturbed, other, own)
    turns = turns.rename(columns={"perturbation": "condition"})
    contexts = _contexts(used, run)
    return Compared(turns.reset_index(drop=True), contexts, base, run, _notes(contexts, base, run))


def _compared(turns: pd.DataFrame, base: Base, run: Run, used: set[str]) -> pd.Series:
    """Which turns are compared: all perturbed ones, and the unperturbed ones sampled alike."""
    alike = turns["temperature"].isin([0.0, *base.settings.temperatures])
    alike &= turns["sample"] < base.settings.samples
    return (turns["run"] == str(run.path)) | (turns["context_id"].isin(used) & alike)


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
            listed = ", ".join(f"{way} {count}" for way, count in counts.items())
            notes.append(f"{condition} was made in several ways: {listed} (metadata, how).")
    plain = contexts[contexts["condition"] == UNPERTURBED]
    cut = int(plain["response_cut_off"].sum())
    if cut:
        notes.append(
            f"{cut} of {len(plain)} unperturbed responses were cut off, which is another stimulus; "
            "their perturbations are made of the cut text."
        )
    if HEADER_ONLY in set(perturbed["condition"]):
        notes.append(
            "header_only shows the model no conversation: all its greedy turns are one turn, "
            "judged against every source's response."
        )
    software = {r.record["identity"]["software"]["torch"] for r in (*base.runs, run)}
    if len(software) > 1:
        notes.append(f"the runs were made with several versions of torch: {', '.join(software)}.")
    return notes
