"""Responses of one or more models, verified, and the judged user turns that follow them.

All models are compared on the prompts that they share.
"""

import json
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import pandas as pd

from experiments.decoupling.verify import INSTRUCTIONS, MATHS, verifier_of, verify
from ia_mech.data.conversations import UNPERTURBED
from ia_mech.errors import UserError
from ia_mech.rates.gate import Gate
from ia_mech.rates.load import NO_ANNOTATOR, read_runs
from ia_mech.run import Run

LIBRARIES = {MATHS: "math-verify", INSTRUCTIONS: "if-verifiable"}


@dataclass(frozen=True)
class Measured:
    """What the estimates are made of: every model on the prompts that it shares with others.

    Attributes:
        runs: the runs.
        responses: one row per context: ``model``, ``dataset``, ``source`` (a key that holds across
            datasets), ``source_id``, ``run``, ``context_id``, ``query``, ``response``,
            ``response_cut_off``, and the fields of
            :class:`experiments.decoupling.verify.Correctness`; ``correct`` and ``correct_loosely``
            are 1, 0, or NaN where it couldn't be verified.
        turns: one row per user turn: ``response`` (row of ``responses``), its ``model``,
            ``dataset``, ``source``, ``correct`` and ``response_cut_off``, ``temperature``, and
            ``genuine`` (1, 0, or NaN where the judge couldn't say).
        gate: whose verdicts, and whether they pass their control.
        notes: what a reader has to know.
    """

    runs: list[Run]
    responses: pd.DataFrame
    turns: pd.DataFrame
    gate: Gate
    notes: list[str]

    @property
    def models(self) -> list[str]:
        """Names of the models, as the tables call them."""
        return sorted(self.responses["model"].unique())


def read(runs: list[Run], judge: str | None = None) -> Measured:
    """Read judged runs and verify the responses that their models wrote.

    Args:
        runs: the runs.
        judge: whose verdicts on the user turns; the only judge if there is one.

    Raises:
        UserError: a run without judgements; no response by the model itself, or none of an
            unperturbed prompt; nothing to verify responses by; prompts that the models don't share,
            or that have one name and several texts.
    """
    judged = read_runs(runs, judge, NO_ANNOTATOR)
    notes = list(judged.notes)
    contexts = pd.concat([_contexts(run, notes) for run in runs], ignore_index=True)
    contexts = _verifiable(_with_model_names(contexts), notes)
    contexts = _on_shared_prompts(contexts, notes)
    # Runs of other seeds hold the same response to the same prompt once more.
    key = ["model", "source", "text"]
    contexts["response_row"] = contexts.groupby(key, sort=False).ngroup()
    turns = _turns(judged.turns, contexts)
    responses = contexts.drop_duplicates(key).reset_index(drop=True)
    responses = _verified(responses)
    if responses["correct"].isna().all():
        raise UserError(
            f"none of the {len(responses)} responses could be verified: {_reasons(responses)}",
            "give runs of prompts that can be, or install what is missing",
        )
    turns = turns.join(
        responses[["model", "dataset", "source", "correct", "response_cut_off"]], on="response"
    )
    if turns["genuine"].isna().all():
        raise UserError(
            f"{judged.judge!r} assessed no user turn after these responses",
            "judge again, or choose another with --judge",
        )
    notes += _notes(responses, turns)
    return Measured(runs, responses, turns, judged.gate, notes)


def _contexts(run: Run, notes: list[str]) -> pd.DataFrame:
    """Contexts of a run whose response is the model's own and whose prompt is as it was."""
    frame = run.contexts.assign(
        run=str(run.path), name=run.model["name"], weights_hash=run.model["weights_hash"]
    )
    own = frame[frame["response_policy"] == "generated"]
    if own.empty:
        raise UserError(
            f"the {len(frame)} responses in {run.path} were given, not written by "
            f"{run.model['name']}: they say nothing of how accurate it is",
            "sample with --response generate",
        )
    if len(own) < len(frame):
        notes.append(
            f"{len(frame) - len(own)} of {len(frame)} responses in {run.path} were given, not "
            "written by the model, and are left out."
        )
    plain = own[own["perturbation"].fillna(UNPERTURBED) == UNPERTURBED]
    if plain.empty:
        raise UserError(
            f"all {len(own)} contexts of {run.path} are perturbed", "give a run of plain prompts"
        )
    if len(plain) < len(own):
        notes.append(
            f"{len(own) - len(plain)} of {len(own)} contexts in {run.path} are perturbed and are "
            "left out."
        )
    messages = [list(messages) for messages in plain["messages"]]
    return plain.assign(
        source=plain["dataset"] + "\x1f" + plain["source_id"],
        query=[turns[-2]["content"] for turns in messages],
        response=[turns[-1]["content"] for turns in messages],
        # A system message may differ between models; the prompt may not.
        asked=[
            "\x1f".join(turn["content"] for turn in turns[:-1] if turn["role"] != "system")
            for turns in messages
        ],
        answer=plain["answer"].astype(object).where(plain["answer"].notna(), None),
        metadata=[json.loads(text) for text in plain["metadata"]],
        response_cut_off=plain["response_cut_off"].fillna(False).astype(bool),
    )


def _verifiable(contexts: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """The contexts whose response can be verified, with ``verifier``."""
    needed = (
        "verifying takes a gold answer that is one number or formula (--answer-column), or "
        "IFEval's columns instruction_id_list and kwargs"
    )
    names = [
        verifier_of(answer, metadata)
        for answer, metadata in zip(contexts["answer"], contexts["metadata"], strict=True)
    ]
    contexts = contexts.assign(verifier=names)
    known = contexts[contexts["verifier"].notna()]
    without = sorted(set(contexts["dataset"]) - set(known["dataset"]))
    if known.empty:
        raise UserError(f"nothing says which responses of {', '.join(without)} are right", needed)
    if without:
        notes.append(f"{', '.join(without)} left out: nothing says what is right. {needed}.")
    for dataset, rows in contexts[~contexts["dataset"].isin(without)].groupby("dataset"):
        open_ones = int(rows["verifier"].isna().sum())
        if open_ones:
            notes.append(
                f"{open_ones} of {len(rows)} responses of {dataset} left out: their gold answer is "
                "missing or is no number or formula."
            )
    return known


def _verified(responses: pd.DataFrame) -> pd.DataFrame:
    """The responses with their verdicts."""
    needed = ["query", "response", "answer", "metadata", "response_cut_off"]
    found = [
        verify(row.query, row.response, row.answer, row.metadata, cut_off=row.response_cut_off)
        for row in responses[needed].itertuples(index=False)
    ]
    kept = ["model", "dataset", "source", "source_id", "run", "context_id", "verifier"]
    return responses[kept].assign(
        correct=np.array([one.correct for one in found], dtype=float),
        correct_loosely=np.array([one.correct_loosely for one in found], dtype=float),
        why=[one.why for one in found],
        answer=[one.answer for one in found],
        gold=[one.gold for one in found],
        instructions=[list(one.instructions) for one in found],
        followed=[list(one.followed) for one in found],
        followed_loosely=[list(one.followed_loosely) for one in found],
        response_cut_off=responses["response_cut_off"],
        query=responses["query"],
        response=responses["response"],
    )


def _with_model_names(contexts: pd.DataFrame) -> pd.DataFrame:
    """The contexts with ``model``: the name, with a hash where two sets of weights share it."""
    weights = contexts.groupby("name")["weights_hash"].transform("nunique")
    hashed = contexts["name"] + " " + contexts["weights_hash"].str[:8]
    return contexts.assign(model=contexts["name"].where(weights == 1, hashed))


def _on_shared_prompts(contexts: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Only the prompts, per dataset, that all models have which have that dataset.

    Args:
        contexts: ``model``, ``dataset``, ``source``, ``source_id``, ``asked`` and ``answer``.
        notes: gets a line per dataset that lost prompts.

    Raises:
        UserError: a prompt has several texts or gold answers, or models have none in common.
    """
    _check_texts(contexts)
    kept = []
    for dataset, rows in contexts.groupby("dataset", sort=False):
        models, prompts = rows["model"].nunique(), rows["source"].nunique()
        had_by = rows.groupby("source")["model"].nunique()
        shared = rows[rows["source"].map(had_by) == models]
        if shared.empty:
            raise UserError(
                f"the models have no prompt of {dataset} in common",
                "sample them all from the same rows (--dataset, --limit)",
            )
        common = shared["source"].nunique()
        if common < prompts:
            notes.append(f"{dataset}: the {common} of {prompts} prompts that all models share.")
        kept.append(shared)
    alone = all(rows["model"].nunique() == 1 for rows in kept)
    if alone and contexts["model"].nunique() > 1:
        held = contexts.groupby("model")["dataset"].unique()
        listed = ", ".join(f"{model}: {' and '.join(names)}" for model, names in held.items())
        raise UserError(
            f"the models have no dataset in common ({listed})",
            "sample them all from the same file or preset",
        )
    return pd.concat(kept, ignore_index=True)


def _check_texts(contexts: pd.DataFrame) -> None:
    for column, what in (("asked", "text"), ("answer", "gold answer")):
        texts = contexts.groupby("source")[column].nunique(dropna=False)
        if (texts > 1).any():
            rows = contexts[contexts["source"] == texts.idxmax()]
            first = rows.iloc[0]
            other = rows[rows[column] != first[column]].iloc[0]
            raise UserError(
                f"prompt {first['source_id']!r} of {first['dataset']} has another {what} in "
                f"{other['run']} than in {first['run']}",
                "sample all runs from the same file",
            )


def _turns(turns: pd.DataFrame, contexts: pd.DataFrame) -> pd.DataFrame:
    """The judged turns that follow these contexts' responses."""
    rows = contexts.set_index(["run", "context_id"])["response_row"]
    at = rows.reindex(pd.MultiIndex.from_frame(turns[["run", "context_id"]])).to_numpy()
    kept = turns[["temperature", "genuine"]].assign(response=at)
    kept = kept[kept["response"].notna()].reset_index(drop=True)
    return kept.astype({"response": int})


def _notes(responses: pd.DataFrame, turns: pd.DataFrame) -> list[str]:
    """What a reader has to know of the verdicts."""
    notes = []
    for dataset, rows in responses.groupby("dataset"):
        libraries = [LIBRARIES[name] for name in sorted(rows["verifier"].unique())]
        versions = " and ".join(f"{name} {version(name)}" for name in libraries)
        notes.append(f"{dataset}: {len(rows)} responses verified by {versions}.")
        unknown = int(rows["correct"].isna().sum())
        if unknown:
            notes.append(
                f"{unknown} of {len(rows)} responses of {dataset} could not be verified and count "
                f"as neither right nor wrong: {_reasons(rows)}."
            )
    cut = int(responses["response_cut_off"].sum())
    if cut:
        notes.append(
            f"{cut} of {len(responses)} responses were cut off by the token limit, which may "
            "be why they are wrong, or right; what follows them is another stimulus, too. Hence "
            "the figures of complete responses."
        )
    missing = int(turns["genuine"].isna().sum())
    if missing:
        notes.append(f"{missing} of {len(turns)} user turns were not assessed and are left out.")
    return notes


def _reasons(responses: pd.DataFrame) -> str:
    """Why responses couldn't be verified, with how many each."""
    found = Counter(responses.loc[responses["correct"].isna(), "why"])
    return "; ".join(f"{why} ({count})" for why, count in found.most_common())
