"""Does a model that solves a task also follow up on it as a user would?

Accuracy of responses and rate of genuine turns after them, on the same prompts, over models and
within each. A response is checked by its gold answer (maths), by the instructions of its query
(IFEval), or, if it is given, by a column ``correct`` of the data. Models are compared on the
prompts that all of them have. Within a model the rate after right responses is compared with that
after wrong ones by permuting queries. The control is the judge's floor: how often it accepts the
same turns after another conversation. Nothing here says anything about causes: easy prompts and
complete responses may explain both.

Needs: judged runs with --response generate on such prompts, or with given responses and a column
``correct``. Cost: seconds; no language model is loaded.

    ia-mech decoupling cache/RUN
    ia-mech decoupling cache/RUN-OF-MODEL-A cache/RUN-OF-MODEL-B
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import pandas as pd

from experiments.experiment import Conclusion, Experiment
from experiments.figures import Bars, Drawing
from experiments.tables import only, sentence_of, tables_of
from experiments.verify import COLUMN, verify
from ia_mech.errors import UserError
from ia_mech.estimates import Group, TidyEstimate, by_dataset, holm_corrected
from ia_mech.rates.compute import rates
from ia_mech.results import Table, label_of
from ia_mech.run import Run
from ia_mech.run.queries import exchange
from ia_mech.run.sources import sources_of
from ia_mech.stats import group_difference

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
        responses: one row per response that can be verified, of prompts that all models have:
            ``model``, ``dataset``, ``source``, ``unfinished``, the texts, and the verdict on it
            (:class:`experiments.verify.Correctness`). Runs of other seeds hold the same response
            again; it counts once.
    """

    name = "decoupling"
    judged, loads, several_models, mixed = True, False, True, True
    columns = COLUMNS

    def read(self) -> None:
        judged = self.verdicts
        contexts = pd.concat([verified_contexts(run) for run in self.runs], ignore_index=True)
        self.notes += judged.notes
        contexts = shared_prompts(
            verifiable_contexts(with_model_names(contexts), self.notes), self.notes
        )
        self.responses = contexts.drop_duplicates(["model", "source", "text"])
        if self.responses["correct"].isna().all():
            raise UserError(
                f"none of the {len(self.responses)} responses could be verified: "
                f"{unverified_reasons(self.responses)}",
                "give runs of prompts that can be",
            )
        self.notes += notes_of(self.responses)
        columns = ["run", "context_id", "model", "dataset", "source", "correct", "unfinished"]
        turns = judged.turns[["run", "context_id", "temperature", "genuine"]]
        turns = turns.astype({"run": object, "context_id": object})
        self.turns = turns.merge(contexts[columns], on=["run", "context_id"])
        if missing := int(self.turns["genuine"].isna().sum()):
            self.notes.append(f"{missing} of {len(self.turns)} user turns were not assessed.")

    def rows(self) -> pd.DataFrame:
        """A row per user turn: ``model``, ``dataset``, ``source``, ``temperature``, ``genuine``,
        and ``correct`` and ``unfinished`` of the response that it follows."""
        return self.turns

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        """Holm-corrected over all tests of a quantity and of the same responses."""
        estimates: list[TidyEstimate] = []
        for term in (EVERY, COMPLETE):
            responses, turns = self.responses, rows
            if term == COMPLETE:
                if not responses["unfinished"].any():
                    continue
                responses, turns = (one[~one["unfinished"]] for one in (responses, turns))
            for dataset, here in by_dataset(responses):
                for model, own in responses[here].groupby("model"):
                    names = {"model": model, "dataset": dataset, "term": term}
                    group = Group(own["source"].to_numpy(), self.options, names)
                    unverified = own["correct"].isna()
                    estimates.append(group.mean(ACCURACY, own["correct"], proportion=True))
                    estimates.append(group.mean("unverified", unverified, proportion=True))
                    estimates.append(group.mean("unfinished", own["unfinished"], proportion=True))
            for dataset, here in by_dataset(turns):
                options = {"dataset": dataset, "term": term, "level": self.args.level}
                estimates += rates(turns[here], ["model", "temperature"], quantity=RATE, **options)
            # Not pooled: datasets differ in accuracy and in rate, which would be an association.
            known = turns.dropna(subset=["correct", "genuine"])
            for (dataset, model, t), at in known.groupby(["dataset", "model", "temperature"]):
                names = {"dataset": dataset, "model": model, "temperature": t, "term": term}
                estimates += self._association(at, names)
        return holm_corrected(estimates, lambda row: (row.quantity, row.names["term"]))

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

    def tables(self, estimates: pd.DataFrame) -> list[Table]:
        names = ("dataset", "model", "term")
        made = tables_of(
            f"responses ({self.intervals})",
            estimates,
            {
                ACCURACY: ("accuracy", 2),
                "unverified": ("unverified", 2),
                "unfinished": ("unfinished", 2),
            },
            index=names,
            rows="responses",
            legend="Accuracy: share of right responses among those verified. Unverified: share "
            "that couldn't be. Unfinished: share that was cut off, or ended within its thought.",
        )
        made += tables_of(
            f"user turns after them ({self.intervals})",
            estimates,
            {RATE: ("follow-up rate", 2)},
            index=(*names, "temperature"),
            rows="turns",
            legend="Follow-up rate: share of turns that the judge calls genuine.",
        )
        made += tables_of(
            f"after right and after wrong responses ({self.intervals})",
            estimates,
            {
                RIGHT: ("after right", 2),
                WRONG: ("after wrong", 2),
                DIFFERENCE: ("right less wrong", 2),
            },
            shown_if=DIFFERENCE,
            index=(*names, "temperature"),
            rows="turns after right",
            legend="Shares of turns that the judge calls genuine. Right less wrong: with "
            "Holm-corrected p of permuting queries.",
        )
        return made

    def figures(self, estimates: pd.DataFrame) -> Mapping[str, Drawing]:
        from ia_mech.rates.figures import gate_title  # loads matplotlib

        assert self.gate is not None
        every = estimates[estimates["term"] == EVERY]
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
        return {"responses": self.responses.drop(columns=["name", "source", "prompt", "text"])}

    def conclude(self, estimates: pd.DataFrame) -> Conclusion:
        assert self.gate is not None
        every = estimates[estimates["term"] == EVERY]
        sentence = " ".join(
            [
                sentence_of("accuracy", only(every, ACCURACY)),
                sentence_of(RATE, only(every, RATE)),
                self.tested(DIFFERENCE, only(every, DIFFERENCE))
                or "Whether being right goes with following up can't be told: no model has turns "
                "after right and after wrong responses to a dataset.",
            ]
        )
        return Conclusion(sentence, f"{self.gate.sentence}.")


# -- what is verified ------------------------------------------------------------------------------


def verified_contexts(run: Run) -> pd.DataFrame:
    """Contexts of a run with the verdicts on their responses."""
    frame = run.contexts
    messages = [list(messages) for messages in frame["messages"]]
    frame = frame.assign(
        run=str(run.path),
        name=run.model["name"],
        weights_hash=run.model["weights_hash"],
        source=sources_of(frame),
        query=[exchange(turns)[0] for turns in messages],
        response=[exchange(turns)[1] for turns in messages],
        # A system message may differ between models; the prompt may not.
        prompt=[
            "\x1f".join(turn["content"] for turn in turns[:-1] if turn["role"] != "system")
            for turns in messages
        ],
        answer=frame["answer"].astype(object).where(frame["answer"].notna(), None),
        given=frame["response_policy"] != "generated",
        unfinished=frame["response_unfinished"].fillna(False).astype(bool),
    )
    verdicts = [
        verify(
            row.query,
            row.response,
            row.answer,
            json.loads(row.metadata),
            given=row.given,
            unfinished=row.unfinished,
        )
        for row in frame.itertuples()
    ]
    texts = ["dataset", "source", "source_id", "text", "prompt", "query", "response"]
    kept = frame[["run", "context_id", "name", "weights_hash", *texts, "unfinished"]]
    found = kept.assign(**pd.DataFrame(verdicts))
    return found.assign(correct=found["correct"].astype(float))


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
    """The prompts of each dataset that all models have which have that dataset.

    Raises:
        UserError: a prompt has several texts, or models have none in common.
    """
    texts = contexts.groupby("source")["prompt"].transform("nunique")
    if (texts > 1).any():
        first = contexts[texts > 1].iloc[0]
        raise UserError(
            f"prompt {first['source_id']!r} of {first['dataset']} has several texts in these runs",
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
    return kept


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
    if unfinished := int(responses["unfinished"].sum()):
        notes.append(
            f"{unfinished} of {len(responses)} responses are unfinished (cut off by the limit, or "
            "ended within their thought), which may be why they are wrong, or right; what follows "
            "them is another stimulus, too. Hence the rows of complete responses."
        )
    return notes


def unverified_reasons(responses: pd.DataFrame) -> str:
    """Why responses couldn't be verified, with how many each."""
    found = Counter(responses.loc[responses["correct"].isna(), "why"])
    return "; ".join(f"{why} ({count})" for why, count in found.most_common())


main = Decoupling.main

if __name__ == "__main__":
    sys.exit(main())
