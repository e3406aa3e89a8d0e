"""Does a model that solves a task also follow up on it as a user would?

Accuracy of responses and rate of genuine turns after them, on the same prompts, over models and
within each. A response is checked by its gold answer (maths), by the instructions of its query
(IFEval; IFBench where NLTK's data is there), or, if it is given, by a column ``correct`` of the
data. Models are compared on the prompts that all of them have. Within a model the rate after right
responses is compared with that after wrong ones by permuting queries. This says nothing about
causes: easy prompts and complete responses may explain both.

Needs: judged runs with --response generate on such prompts, or with given responses and a column
``correct``. Cost: seconds; no language model is loaded.

    python -m experiments.decoupling cache/RUN
    python -m experiments.decoupling cache/RUN-OF-MODEL-A cache/RUN-OF-MODEL-B
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from experiments.experiment import Conclusion, Experiment
from experiments.tables import sentence_of, tables_of, with_detectable
from experiments.verify import COLUMN, verifier_of, verify
from ia_mech.errors import UserError
from ia_mech.estimates import Group, TidyEstimate, by_dataset, holm_corrected
from ia_mech.rates.compute import rates
from ia_mech.results import label_of
from ia_mech.stats import group_difference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from experiments.figures import Drawing
    from ia_mech.results import Table
    from ia_mech.run import Run

EVERY, COMPLETE = "all responses", "complete responses"
ACCURACY, RATE = "accuracy", "follow-up rate"
RIGHT, WRONG = f"{RATE}, right", f"{RATE}, wrong"
DIFFERENCE = f"{RATE}, right less wrong"
COLUMNS = {
    **dict.fromkeys(("model", "dataset", "term", "outcome"), "str"),
    **{"temperature": "float64", "level": "float64", "events": "Int64"},
}
NEEDED = (
    "verifying takes a gold answer that is one number or formula (--answer-column), IFEval's "
    "columns instruction_id_list and kwargs, or a column correct beside given responses"
)


class Decoupling(Experiment):
    """See the module.

    Attributes:
        contexts: one row per context whose response can be verified, of prompts that all models
            have: columns of ``Run.contexts``, ``model``, ``source``, ``query``, ``response`` and
            ``row`` (that of its response: runs of other seeds hold the same one again).
        responses: one row per response, with the verdict on it.
    """

    name = "decoupling"
    judged, loads, several_models, mixed = True, False, True, True
    columns = COLUMNS

    def read(self) -> None:
        from ia_mech.rates.load import NO_ANNOTATOR, read_runs

        judged = read_runs(self.runs, self.args.judge, NO_ANNOTATOR)
        self.notes += judged.notes
        contexts = pd.concat([contexts_of(run) for run in self.runs], ignore_index=True)
        self.contexts = shared_prompts(
            verifiable_contexts(with_model_names(contexts), self.notes), self.notes
        )
        self.judged_turns = judged.turns

    def rows(self) -> pd.DataFrame:
        """A row per user turn: ``model``, ``dataset``, ``source``, ``temperature``, ``genuine``,
        and ``correct`` and ``cut_off`` of the response that it follows."""
        self.responses = verify_responses(self.contexts)
        if self.responses["correct"].isna().all():
            raise UserError(
                f"none of the {len(self.responses)} responses could be verified: "
                f"{unverified_reasons(self.responses)}",
                "give runs of prompts that can be, or install what is missing",
            )
        of = self.contexts.set_index(["run", "context_id"])["row"]
        keys = pd.MultiIndex.from_frame(self.judged_turns[["run", "context_id"]].astype(object))
        turns = self.judged_turns[["temperature", "genuine"]].assign(row=of.reindex(keys).array)
        columns = ["model", "dataset", "source", "correct", "cut_off"]
        turns = turns.dropna(subset="row").join(self.responses[columns], on="row")
        if turns["genuine"].isna().all():
            raise UserError(
                "the judge assessed no user turn after these responses",
                "judge again, or choose another with --judge",
            )
        self.notes += notes_of(self.responses)
        if missing := int(turns["genuine"].isna().sum()):
            self.notes.append(f"{missing} of {len(turns)} user turns were not assessed.")
        return turns.reset_index(drop=True)

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        """Holm-corrected over all tests of a quantity and of the same responses."""
        found: list[TidyEstimate] = []
        for term in (EVERY, COMPLETE):
            responses, turns = self.responses, rows
            if term == COMPLETE:
                if not responses["cut_off"].any():
                    continue
                responses, turns = (one[~one["cut_off"]] for one in (responses, turns))
            for dataset, here in by_dataset(responses):
                for model, own in responses[here].groupby("model"):
                    names = {"model": model, "dataset": dataset, "term": term}
                    group = Group(own["source"].to_numpy(), self.options, names)
                    yielded = {ACCURACY: own["correct"], "unverified": own["correct"].isna()}
                    for quantity, values in (yielded | {"cut off": own["cut_off"]}).items():
                        found.append(group.mean(quantity, values, proportion=True))
            for dataset, here in by_dataset(turns):
                options: dict[str, Any] = {
                    "dataset": dataset,
                    "level": self.args.level,
                    "term": term,
                }
                found += rates(turns[here], ["model", "temperature"], quantity=RATE, **options)
            # Not pooled: datasets differ in accuracy and in rate, which would be an association.
            known = turns.dropna(subset=["correct", "genuine"])
            for (dataset, model, t), at in known.groupby(["dataset", "model", "temperature"]):
                names = {"dataset": dataset, "model": model, "temperature": t, "term": term}
                found += self._association(at, names)
        return holm_corrected(found, lambda row: (row.quantity, row.names["term"]))

    def _association(self, turns: pd.DataFrame, names: dict[str, Any]) -> Iterator[TidyEstimate]:
        group = Group(turns["source"].to_numpy(), self.options, names)
        found = group_difference(
            turns["genuine"],
            turns["correct"],
            turns["source"],
            level=self.args.level,
            permutations=self.args.resamples,
            seed=self.args.seed,
        )
        right = int((turns["correct"] == 1).sum())
        yield group.row(RIGHT, found.first, right)
        yield group.row(WRONG, found.second, len(turns) - right)
        yield group.row(DIFFERENCE, found.difference, len(turns), p=found.p, test=found.test)

    # -- shown ------------------------------------------------------------------------------------

    def tables(self, found: pd.DataFrame) -> "list[Table]":
        percent = f"{100 * self.args.level:g}% intervals over queries"
        names = ("dataset", "model", "term")
        made = tables_of(
            f"responses ({percent})",
            found,
            {ACCURACY: ("accuracy", 2), "unverified": ("unverified", 2), "cut off": ("cut off", 2)},
            index=names,
            rows="responses",
            legend="Accuracy: share of right responses among those verified. Unverified: share "
            "that couldn't be. Cut off: share that ended at the token limit.",
        )
        made += tables_of(
            f"user turns after them ({percent})",
            found,
            {RATE: ("follow-up rate", 2)},
            index=(*names, "temperature"),
            rows="turns",
            legend="Follow-up rate: share of turns that the judge calls genuine.",
        )
        made += tables_of(
            f"after right and after wrong responses ({percent})",
            with_detectable(found, DIFFERENCE),
            {
                RIGHT: ("after right", 2),
                WRONG: ("after wrong", 2),
                DIFFERENCE: ("right less wrong", 2),
                "detectable": ("shown if", 2),
            },
            index=(*names, "temperature"),
            rows="turns after right",
            legend="Shares of turns that the judge calls genuine. Right less wrong: with "
            "Holm-corrected p of permuting queries. Shown if: the difference that would have been "
            "shown with 80% power.",
        )
        return made

    def figures(self, found: pd.DataFrame) -> "Mapping[str, Drawing]":
        from experiments.figures import Bars
        from ia_mech.rates.figures import gate_title

        assert self.gate is not None
        every = found[found["term"] == EVERY]
        names = every["dataset"].str.cat(every["model"], " · ")
        t = [label_of(t, "temperature") for t in every["temperature"]]
        at = pd.Series(t, every.index).where(every["quantity"] != ACCURACY, ACCURACY)
        every = every.assign(name=names, at=at)
        title = gate_title("accuracy and follow-ups", self.gate)
        both = every[every["quantity"].isin([ACCURACY, RATE])]
        apart = every[(every["quantity"] == DIFFERENCE) & every["value"].notna()]
        words = "accuracy, and follow-up rate by temperature"
        made = {"accuracy": Bars(title, words, both, names="name", by="at", at=None)}
        if len(apart):
            made["association"] = Bars(title, DIFFERENCE, apart, names="name", by="at")
        return made

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"responses": self.responses.drop(columns="source")}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        assert self.gate is not None
        every = found[found["term"] == EVERY]
        apart = every[every["quantity"] == DIFFERENCE]
        sentence = " ".join(
            [
                sentence_of("accuracy", every[every["quantity"] == ACCURACY]),
                sentence_of(RATE, every[every["quantity"] == RATE]),
                sentence_of(DIFFERENCE, apart, null=0.0, level=self.args.level)
                or "Whether being right goes with following up can't be told: no model has turns "
                "after right and after wrong responses to a dataset.",
            ]
        )
        return Conclusion(sentence, f"{self.gate.sentence}.")


# -- what is verified ------------------------------------------------------------------------------


def contexts_of(run: "Run") -> pd.DataFrame:
    """Contexts of a run with what verifying takes."""
    frame = run.contexts
    messages = [list(messages) for messages in frame["messages"]]
    metadata = [json.loads(text) for text in frame["metadata"]]
    answers = frame["answer"].astype(object).where(frame["answer"].notna(), None)
    given = (frame["response_policy"] != "generated").tolist()
    return frame.assign(
        run=str(run.path),
        name=run.model["name"],
        weights_hash=run.model["weights_hash"],
        source=frame["dataset"] + "\x1f" + frame["source_id"],
        query=[turns[-2]["content"] for turns in messages],
        response=[turns[-1]["content"] for turns in messages],
        # A system message may differ between models; the prompt may not.
        asked=[
            "\x1f".join(turn["content"] for turn in turns[:-1] if turn["role"] != "system")
            for turns in messages
        ],
        answer=answers,
        metadata=metadata,
        given=given,
        verifier=[
            verifier_of(answer, about, given=told)
            for answer, about, told in zip(answers, metadata, given, strict=True)
        ],
        cut_off=frame["response_cut_off"].fillna(False).astype(bool),
    )


def with_model_names(contexts: pd.DataFrame) -> pd.DataFrame:
    """The contexts with ``model``: the name, with a hash where two sets of weights share it."""
    weights = contexts.groupby("name")["weights_hash"].transform("nunique")
    hashed = contexts["name"] + " " + contexts["weights_hash"].str[:8]
    return contexts.assign(model=contexts["name"].where(weights == 1, hashed))


def verifiable_contexts(contexts: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """The contexts whose response can be verified.

    Raises:
        UserError: there are none.
    """
    known = contexts[contexts["verifier"].notna()]
    if known.empty:
        names = ", ".join(sorted(set(contexts["dataset"])))
        raise UserError(f"nothing says which responses of {names} are right", NEEDED)
    lost = contexts[contexts["verifier"].isna()].groupby("dataset").size()
    for dataset, count in lost.items():
        total = (contexts["dataset"] == dataset).sum()
        notes.append(f"{count} of {total} responses of {dataset} left out: {NEEDED}.")
    return known


def shared_prompts(contexts: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """The prompts of each dataset that all models have which have that dataset, with ``row``.

    Raises:
        UserError: a prompt has several texts or gold answers, or models have none in common.
    """
    for column, what in (("asked", "text"), ("answer", "gold answer")):
        texts = contexts.groupby("source")[column].nunique(dropna=False)
        if (texts > 1).any():
            own = contexts[contexts["source"] == texts.idxmax()]
            first, other = own.iloc[0], own[own[column] != own[column].iloc[0]].iloc[0]
            raise UserError(
                f"prompt {first['source_id']!r} of {first['dataset']} has another {what} in "
                f"{other['run']} than in {first['run']}",
                "sample all runs from the same file",
            )
    models = contexts.groupby("dataset")["model"].transform("nunique")
    kept = contexts[contexts.groupby("source")["model"].transform("nunique") == models]
    compared = kept.groupby("dataset")["model"].nunique()
    if contexts["model"].nunique() > 1 and not (compared > 1).any():
        held = contexts.groupby("model")["dataset"].unique()
        listed = ", ".join(f"{model}: {' and '.join(names)}" for model, names in held.items())
        raise UserError(
            f"the models have no prompts in common ({listed})",
            "sample them all from the same rows (--dataset, --limit)",
        )
    for dataset, own in contexts.groupby("dataset")["source"]:
        common = kept.loc[kept["dataset"] == dataset, "source"].nunique()
        if common < own.nunique():
            notes.append(
                f"{dataset}: the {common} of {own.nunique()} prompts that all models share."
            )
    return kept.assign(row=kept.groupby(["model", "source", "text"], sort=False).ngroup())


def verify_responses(contexts: pd.DataFrame) -> pd.DataFrame:
    """One row per response, indexed by ``row``, with the verdict and what it rests on."""
    responses = contexts.drop_duplicates("row").set_index("row")
    found = [
        verify(
            row.query, row.response, row.answer, row.metadata, given=row.given, cut_off=row.cut_off
        )
        for row in responses.itertuples()
    ]
    kept = ["model", "dataset", "source", "source_id", "run", "context_id", "verifier", "cut_off"]
    return responses[[*kept, "query", "response"]].assign(
        correct=np.array([one.correct for one in found], dtype=float),
        why=[one.why for one in found],
        answer=[one.answer for one in found],
        gold=[one.gold for one in found],
    )


def notes_of(responses: pd.DataFrame) -> list[str]:
    """What a reader has to know of the verdicts."""
    notes = []
    for dataset, own in responses.groupby("dataset"):
        used = [name for name in sorted(own["verifier"].unique()) if name != COLUMN]
        by = " and ".join(f"{name} {version(name)}" for name in used) or f"the {COLUMN}"
        notes.append(f"{dataset}: {len(own)} responses verified by {by}.")
        if unknown := int(own["correct"].isna().sum()):
            notes.append(
                f"{unknown} of {len(own)} responses of {dataset} count as neither right nor wrong: "
                f"{unverified_reasons(own)}."
            )
        for model, of in own.dropna(subset="correct").groupby("model")["correct"]:
            if of.nunique() == 1:
                what = "right" if of.iloc[0] else "wrong"
                notes.append(
                    f"{model} on {dataset}: all responses are {what}, so whether being right goes "
                    "with following up can't be tested."
                )
    if cut := int(responses["cut_off"].sum()):
        notes.append(
            f"{cut} of {len(responses)} responses were cut off by the token limit, which may be "
            "why they are wrong, or right; what follows them is another stimulus, too. Hence the "
            "rows of complete responses."
        )
    return notes


def unverified_reasons(responses: pd.DataFrame) -> str:
    """Why responses couldn't be verified, with how many each."""
    found = Counter(responses.loc[responses["correct"].isna(), "why"])
    return "; ".join(f"{why} ({count})" for why, count in found.most_common())


main = Decoupling.main

if __name__ == "__main__":
    sys.exit(main())
