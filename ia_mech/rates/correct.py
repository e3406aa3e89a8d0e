"""Follow-up rates after right and after wrong responses, and how many responses are right.

Responses are checked by :mod:`ia_mech.rates.verify`. A difference says nothing about causes: easy
prompts and finished responses may make responses right and have them followed up.
"""

import json
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import pandas as pd

from ia_mech.cli import one_line
from ia_mech.errors import UserError
from ia_mech.estimates import (
    TidyEstimate,
    all_datasets,
    by_dataset,
    could_show,
    estimate_of,
    few_sources,
    frame_of,
    holm_corrected,
    smallest_effect,
)
from ia_mech.judge.decoys import DECOY_KINDS, SIBLING
from ia_mech.rates import compute
from ia_mech.rates.compute import floors, rates
from ia_mech.rates.load import SUBJECT, JudgedTurns, matching
from ia_mech.rates.result import LEGENDS, LINES, Columns, result_on
from ia_mech.rates.verify import COLUMN, verify
from ia_mech.results import Result, Table, table_of
from ia_mech.run.queries import exchange
from ia_mech.stats import group_difference

QUESTION = "Are right responses followed up more often than wrong ones?"
NAMES = compute.NAMES | {"correct": "object"}
ACCURACY, DIFFERENCE, SIBLINGS = "accuracy", "right minus wrong", " over siblings"
NEEDED = (
    "responses that the model wrote are verified by a gold answer that is one number or formula "
    "(--answer-column) or IFEval's columns instruction_id_list and kwargs, given ones by a column "
    "correct alone"
)


def verified_responses(judged: JudgedTurns) -> pd.DataFrame:
    """The responses that turns follow, a row each: what their turns have in common, ``query`` and
    ``response``, and the fields of :class:`ia_mech.rates.verify.Correctness`, ``correct`` 1, 0 or
    NaN.

    Raises:
        UserError: nothing says which responses are right, or none of them could be verified.
    """
    columns = ["run", *SUBJECT, "dataset", "source", "context_id", "context", "unfinished"]
    first = judged.turns.drop_duplicates([*SUBJECT, "context"])[columns]
    first = first.astype(dict.fromkeys(columns[:-1], object))
    unfinished = first.set_index(["run", "context_id"])["unfinished"]
    rows = []
    for run in judged.runs:
        for one in run.contexts.itertuples():
            key = str(run.path), one.context_id
            if key not in unfinished.index:
                continue
            query, response = exchange(one.messages)
            found = verify(
                query,
                response,
                one.answer if isinstance(one.answer, str) else None,
                json.loads(one.metadata),
                given=one.response_policy != "generated",
                unfinished=bool(unfinished[key]),
            )
            about = dict(zip(("run", "context_id"), key, strict=True))
            rows.append(about | {"query": query, "response": response} | asdict(found))
    every = first.merge(pd.DataFrame(rows), on=["run", "context_id"])
    known = every[every["verifier"].notna()]
    if known["correct"].isna().all():
        why = f": {_reasons(known)}" if len(known) else ""
        datasets = ", ".join(sorted(set(every["dataset"])))
        raise UserError(f"which responses of {datasets} are right can't be told{why}", NEEDED)
    return every.assign(correct=every["correct"].astype(float))


def estimates(
    judged: JudgedTurns, responses: pd.DataFrame, *, level: float, seed: int
) -> pd.DataFrame:
    """Accuracy, and rates after right and after wrong responses, per model, perturbation, dataset.

    Only the accuracy is also of all datasets together. Datasets differ in accuracy and in rate;
    pooled rates would show that as an association. ``responses`` are those of
    :func:`verified_responses`.

    Returns:
        One row per estimate, as of :func:`ia_mech.rates.compute.estimates`: ``accuracy``, of
        responses that could be verified; and per temperature, with ``correct`` (``right`` or
        ``wrong``), ``rate``, ``rate_after_own``, ``floor`` and ``beyond``, and their difference
        ``right minus wrong`` with p by permuting whole queries, Holm-corrected over all of them.
    """
    known = responses[responses["verifier"].notna()]
    labels = known.drop_duplicates("context").set_index("context")["correct"]
    labels = labels.map({1.0: "right", 0.0: "wrong"})
    turns, decoys = (
        frame.assign(correct=frame["context"].astype(object).map(labels)).dropna(subset="correct")
        for frame in (judged.turns, judged.decoys)
    )
    rows: list[TidyEstimate] = []
    for subject, own in known.groupby(SUBJECT):
        names: dict[str, Any] = dict(zip(SUBJECT, subject, strict=True))
        gate = judged.by_model[names["model"], names["weights_hash"]].verdict
        of = names | {"judge": judged.judge, "responses": judged.responses, "level": level}
        for dataset, here in by_dataset(own):
            about = of | {"dataset": dataset}
            rows += rates(own[here], outcome="correct", quantity=ACCURACY, **about)
        mine = matching(turns, names)
        for dataset, at in turns[mine].groupby("dataset", observed=True):
            about = of | {"dataset": dataset, "gate": gate}
            those = decoys[matching(decoys, names | {"dataset": dataset})]
            rows += rates(at, ["temperature", "correct"], **about)
            for kind in DECOY_KINDS:
                rows += floors(those, kind, ["temperature", "correct"], **about)
            for temperature, of_both in at.groupby("temperature"):
                values, right = of_both["follow_up"], (of_both["correct"] == "right").astype(int)
                found = group_difference(values, right, of_both["source"], level=level, seed=seed)
                so = about | {"temperature": float(temperature), "outcome": "follow_up"}
                counted, test = int(values.notna().sum()), found.test or None
                rows.append(TidyEstimate(DIFFERENCE, so, counted, found.difference, found.p, test))
    return frame_of(holm_corrected(rows, lambda row: row.quantity), NAMES)


def result(judged: JudgedTurns, *, level: float = 0.95, seed: int = 0) -> Result:
    """Accuracy and rates by it, as a result; raises what :func:`verified_responses` does."""
    responses = verified_responses(judged)
    rows = estimates(judged, responses, level=level, seed=seed)
    return result_on(
        judged,
        "rates-by-correct",
        [*judged.by_model.values()],
        {"level": level, "seed": seed},
        question=QUESTION,
        sentence=" ".join(_sentence(of, level) for _, of in rows.groupby(SUBJECT, sort=False)),
        estimates=rows,
        tables=_tables(rows, level),
        notes=[*_notes(responses), *few_sources(rows), *judged.notes],
        data={"responses": responses.drop(columns=["run", "source", "context"])},
    )


def _sentence(of: pd.DataFrame, level: float) -> str:
    """Of one model and perturbation."""
    accuracy = all_datasets(of[of["quantity"] == ACCURACY]).iloc[0]
    found = of[(of["quantity"] == DIFFERENCE) & of["value"].notna()]
    differences = []
    for row in found.itertuples():
        at = f"T = {row.temperature:g}" if row.temperature else "greedy"
        text = f"{one_line(row.dataset, 40)} {at} {estimate_of(row).text(sign=True)}"
        if row.low <= 0 <= row.high:
            text += f" ({could_show(smallest_effect(row._asdict(), level), most=1)})"
        differences.append(text)
    told = (
        "The follow-up rate after right responses minus that after wrong ones is "
        f"{', '.join(differences)}."
        if differences
        else "Whether right responses are followed up more often can't be told: no dataset has "
        "judged turns after both."
    )
    whose = f"{accuracy['rows']} responses of {one_line(of['model'].iloc[0])}"
    return f"{estimate_of(accuracy).text()} of {whose} are right. {told}"


def _tables(rows: pd.DataFrame, level: float) -> list[Table]:
    intervals = f"({100 * level:g}% intervals over queries)"
    over = rows["quantity"].where(rows["decoy"] != SIBLING, rows["quantity"] + SIBLINGS)
    of_turns: Columns = {
        "rate": ("follow-ups", 2),
        "floor": ("after a wrong conversation", 2),
        "beyond": ("minus that", "+.2f"),
    }
    of_turns |= {f"beyond{SIBLINGS}": ("minus that after siblings", "+.2f")}
    tables = [
        table_of(
            f"follow-up rates after right and after wrong responses {intervals}",
            rows.assign(key=over),
            of_turns,
            (*LINES, "correct"),
            key="key",
            rows="turns",
            legend=LEGENDS["floor"],
        ),
        table_of(
            f"follow-up rates after {DIFFERENCE} responses",
            rows,
            {DIFFERENCE: ("difference", "+.2f")},
            LINES,
            rows="turns",
            legend="p: from permuting which queries were answered rightly, Holm-corrected.",
        ),
        table_of(
            f"how many responses are right {intervals}",
            rows,
            {ACCURACY: ("right", 2)},
            LINES[:3],
            rows="responses",
        ),
    ]
    return [table for table in tables if table.rows]


def _notes(responses: pd.DataFrame) -> list[str]:
    """What a reader has to know of the verdicts on responses."""
    notes = []
    for dataset, every in responses.groupby("dataset"):
        own = every[every["verifier"].notna()]
        if len(own) < len(every):
            lost = f"{len(every) - len(own)} of {len(every)} responses of {dataset}"
            notes.append(f"{lost} left out: {NEEDED}.")
        names = [name for name in sorted(own["verifier"].unique()) if name != COLUMN]
        if len(own):
            by = " and ".join(f"{name} {version(name)}" for name in names) or f"the {COLUMN}"
            notes.append(f"{dataset}: {len(own)} responses verified by {by}.")
        if unknown := int(own["correct"].isna().sum()):
            notes.append(
                f"{unknown} of {len(own)} responses of {dataset} count as neither right nor wrong: "
                f"{_reasons(own)}."
            )
    if unfinished := int(responses["unfinished"].sum()):
        notes.append(
            f"{unfinished} of {len(responses)} responses are unfinished, which may be why they are "
            "wrong, or right, and is another stimulus: --after complete leaves them out."
        )
    return notes


def _reasons(responses: pd.DataFrame) -> str:
    """Why responses couldn't be verified, with how many each."""
    found = Counter(responses.loc[responses["correct"].isna(), "why"])
    return "; ".join(f"{why} ({count})" for why, count in found.most_common())
