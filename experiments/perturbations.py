"""What of the response does the next user turn depend on?

Each conversation is changed in one respect and sampled again with the same random numbers. The
response is removed, swapped for one to another query, cut to half of its sentences, or given a
generic question at its end; its sentences are shuffled, or its answer is contradicted. In two more
conditions the user header stands without a conversation, or is the assistant's. The judge is shown
each turn twice: after the conversation that the model was given, and after the unchanged one. A
turn that was written without the response may still fit it, by topic or by luck. Real follow-ups
are scored in each changed context. Differences are paired by query. A conversation that a change
leaves as it is doesn't count for that change. The control is the rate of turns that were written
without any conversation: only their form can please a judge.

Needs: judged runs; real follow-ups for the likelihoods. Cost: eight times the sampling of as
many turns (48 queries of the embedded model, 5 turns each: some fifteen minutes on a CPU). The
built-in judge runs at once; for another judge the message says which command to run.

    ia-mech perturbations cache/RUN
    ia-mech perturbations cache/RUN --queries 100 --samples 8
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from experiments.arms import Arm, conversations_of, verdicts_of
from experiments.change import ask, contradict, other_response, shuffle_sentences, truncate
from experiments.control import arm_estimates
from experiments.experiment import Conclusion, Experiment, flag
from experiments.shown import LEAST, Bars, Drawing, only, out_of_reach, tables_of
from ia_mech.cli import whole_from
from ia_mech.data.conversations import UNPERTURBED, UNPERTURBED_RESPONSE, USER_HEADER, Conversation
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, all_datasets, by_dataset, holm_corrected, shown_changes
from ia_mech.judge.judging import ON_UNPERTURBED
from ia_mech.rates.compute import differences, rates
from ia_mech.rates.evidence import FITS_ORIGINAL, UNCHANGED
from ia_mech.results import Table
from ia_mech.run import Run
from ia_mech.run.queries import Query, queries_of, unfinished_text
from ia_mech.run.sources import sources_of

REMOVE, SWAP, SHUFFLE, CONTRADICT = "remove", "swap", "shuffle", "contradict"
TRUNCATE, QUESTION = "truncate", "generic_question"
HEADER_ONLY, HEADER_ASSISTANT = "header_only", "header_assistant"
NAMES = {  # of conditions, as tables, figures and notes show them
    UNPERTURBED: UNCHANGED,
    REMOVE: "no response (remove)",
    SWAP: "another query's response (swap)",
    TRUNCATE: "first half of the response (truncate)",
    QUESTION: "generic question added (generic_question)",
    SHUFFLE: "sentences shuffled (shuffle)",
    CONTRADICT: "answer contradicted (contradict)",
    HEADER_ONLY: "no conversation (header_only)",
    HEADER_ASSISTANT: "assistant header (header_assistant)",
}
CONDITIONS = dict.fromkeys((one for one in NAMES if one != UNPERTURBED), USER_HEADER)
CONDITIONS |= {HEADER_ONLY: "alone", HEADER_ASSISTANT: "assistant"}  # → the header that is opened
CHANGES = {  # of the response, as sentences begin
    REMOVE: "Removing the response",
    SWAP: "Swapping the response for another query's",
    TRUNCATE: "Cutting the response to its first half",
    QUESTION: "Adding a generic question to the response",
    SHUFFLE: "Shuffling the response's sentences",
    CONTRADICT: "Contradicting the response's answer",
}
STREAM = -3  # of the draws; samples have streams of their own
RATE, DIFFERENCE = "rate", "difference"
BITS = "log p of real follow-ups, bits"
MINUS = "minus unchanged"
BITS_DIFFERENCE = f"{BITS}, {MINUS}"
COLUMNS = {  # of estimates; ``events`` are the turns with the outcome
    **dict.fromkeys(("dataset", "condition", "outcome"), "str"),
    **{"temperature": "float64", "level": "float64", "events": "Int64"},
}


# -- what is changed -------------------------------------------------------------------------------


def apply_condition(
    conversation: Conversation, name: str, rng: np.random.Generator, swap: str = ""
) -> Conversation | None:
    """A conversation with its response, under a condition; None if it would stay as it is.

    The draws are of an order, a question, or a wrong answer; ``swap`` is the response that the
    condition ``swap`` puts in place of its own. The metadata hold the unperturbed response, the id
    of its conversation, and how it was changed.
    """
    own, how = conversation.response or "", name
    changes: dict[str, Callable[[], str | None]] = {
        REMOVE: lambda: "",
        SWAP: lambda: swap,
        SHUFFLE: lambda: shuffle_sentences(own, rng),
        TRUNCATE: lambda: truncate(own),
        QUESTION: lambda: ask(own, rng),
    }
    if name == CONTRADICT:
        text, how = contradict(own, conversation.answer, rng)
    else:
        found = changes.get(name, lambda: own)()
        text = own if found is None else found
    if text == own and CONDITIONS[name] == USER_HEADER:
        return None
    about = {UNPERTURBED_RESPONSE: own, "unperturbed_id": conversation.id, "how": how}
    return replace(
        conversation.with_response(text, None if name in (REMOVE, SWAP) else conversation.thought),
        id=f"{conversation.id}~{name}",
        perturbation=name,
        header=CONDITIONS[name],
        metadata=conversation.metadata | about,
    )


def first_complete(queries: Sequence[Query]) -> pd.DataFrame:
    """A row of ``Query.contexts`` per query: that of its first complete response, if any."""
    rows = [query.contexts.iloc[[int(np.argmax(query.complete))]] for query in queries]
    return pd.concat(rows, ignore_index=True)


# -- the experiment --------------------------------------------------------------------------------


class Perturbations(Experiment):
    name = "perturbations"
    judged = True
    queries_used = 48
    columns = COLUMNS

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        turns = "turns per temperature, of those that the run has"
        flag(parser, "--samples", whole_from(1), 4, turns, metavar="N")
        of, every = f"changes to make, of {', '.join(CONDITIONS)} (default: all)", list(CONDITIONS)
        how: dict[str, Any] = {"nargs": "+", "choices": every, "metavar": "NAME"}
        parser.add_argument("--conditions", default=every, help=of, **how)

    # -- sampled ----------------------------------------------------------------------------------

    @property
    def decoding(self) -> dict[str, Any]:
        """T = 1 if the runs have it, else all their temperatures."""
        of = self.runs[0].settings
        some = (1.0,) if 1.0 in of["temperatures"] else tuple(of["temperatures"])
        return {"temperatures": some, "samples": min(self.args.samples, of["samples"])}

    @cached_property
    def base(self) -> pd.DataFrame:
        """The contexts that are changed, of the queries that are used."""
        return first_complete(self.queries)

    @cached_property
    def changed_conversations(self) -> list[Conversation]:
        """Every conversation under every condition that changes it and can be made of it."""
        # Responses to put in another's place are drawn from all queries of the runs.
        those, made = conversations_of(first_complete(queries_of(self.runs))), []
        ids = (self.chat.tokenizer(one.response or "", add_special_tokens=False) for one in those)
        tokens = [len(one["input_ids"]) for one in ids]
        used = {*zip(self.base["dataset"], self.base["context_id"], strict=True)}
        own = [order for order, one in enumerate(those) if (one.dataset, one.id) in used]
        for name in self.args.conditions:
            left_out: dict[str, int] = {}
            for order in own:
                try:
                    made.append(self._changed(those, order, name, tokens))
                except UserError as error:
                    left_out[error.problem] = left_out.get(error.problem, 0) + 1
            if left_out:
                why = ", ".join(f"{count} {problem}" for problem, count in left_out.items())
                count = f"{len(own) - sum(left_out.values())} of {len(own)} conversations"
                self.notes.append(f"{NAMES[name]}: {count}. Left out: {why}.")
        if not made:
            raise UserError("none of these conversations can be changed", "give other runs")
        return made

    def _changed(
        self, those: Sequence[Conversation], order: int, name: str, tokens: Sequence[int]
    ) -> Conversation:
        """A conversation under a condition; UserError if it can't be made, or is too long."""
        from ia_mech.chat.headers import context_and_real_follow_up
        from ia_mech.engine.sampling import stream_key
        from ia_mech.models.load import context_limit

        settings = self.runs[0].settings
        key = stream_key(settings["seed"], those[order].id, STREAM - list(CONDITIONS).index(name))
        rng = np.random.default_rng(list(key))
        swap = other_response(those, tokens, order, rng) if name == SWAP else ""
        if swap is None:
            few = "the runs have no other response to another query"
            raise UserError(f"of whose dataset {few}", "")
        changed = apply_condition(those[order], name, rng, swap)
        if changed is None:
            raise UserError("that the change leaves as it is", "")
        context, turn = context_and_real_follow_up(self.chat, changed)
        longest = max(settings["max_new_tokens"], 0 if turn is None else len(turn.whole))
        if len(context.ids) + longest > (context_limit(self.config) or np.inf):
            raise UserError("that would be too long for the model", "")
        return changed

    def arms(self) -> Mapping[str, Arm]:
        return {"conditions": Arm(self.changed_conversations, self.decoding)}

    @property
    def tests_made(self) -> int:
        return len(self.args.conditions) * (1 + len(self.decoding["temperatures"]))

    # -- read -------------------------------------------------------------------------------------

    def rows(self) -> pd.DataFrame:
        """The turns before and after: ``run``, ``context_id``, ``dataset``, ``source``,
        ``condition``, ``temperature``, ``sample``, ``category``, ``follow_up`` and
        ``follow_up_to_original`` (1, 0 or NaN)."""
        (run,) = self.sampled.values()
        for unperturbed in (False, True):  # after what the model was given; after the unchanged
            judge = self.judge_arms(unperturbed=unperturbed)
        self._note_changes(run)
        turns = verdicts_of([*self.runs, run], judge).turns
        like = self.decoding
        alike = turns["temperature"].isin([0.0, *like["temperatures"]])
        alike &= turns["sample"] < like["samples"]
        used = pd.MultiIndex.from_frame(self.base[["run", "context_id"]])
        before = pd.MultiIndex.from_frame(turns[["run", "context_id"]].astype(object)).isin(used)
        turns = turns[(turns["run"] == str(run.path)) | (before & alike)].reset_index(drop=True)
        keys = ["source", "context_id", "temperature", "sample", "drawn_tokens"]
        judged = verdicts_of([run], judge + ON_UNPERTURBED).turns.set_index(keys)["follow_up"]
        found = judged.reindex(pd.MultiIndex.from_frame(turns[keys])).to_numpy()
        own = turns["perturbation"] == UNPERTURBED
        names = turns["perturbation"].astype(object)
        condition = pd.Categorical(names, [UNPERTURBED, *CONDITIONS], ordered=True)
        turns = turns.assign(condition=condition)
        turns[FITS_ORIGINAL] = np.where(own, turns["follow_up"], found)
        texts = ["run", "context_id", "dataset", "source", "category"]
        kept = [*texts, "condition", *keys[2:], "follow_up", FITS_ORIGINAL]
        return turns[kept].astype(dict.fromkeys(texts, object))

    def _note_changes(self, run: Run) -> None:
        how = run.contexts["metadata"].map(lambda text: json.loads(text)["how"])
        ways = how[run.contexts["perturbation"] == CONTRADICT].value_counts()
        counts = ", ".join(f"{count} by a {way}" for way, count in ways.items())
        if counts:
            self.notes.append(
                f"{NAMES[CONTRADICT]}: {counts} (how, in the metadata of each conversation)."
            )
        if unfinished := unfinished_text(self.base):
            self.notes.append(f"{unfinished}.")
        if HEADER_ONLY in self.args.conditions:
            self.notes.append(
                f"{NAMES[HEADER_ONLY]}: there is one greedy turn, which the judge is shown after "
                "every query's response."
            )

    def follow_up_bits(self) -> pd.DataFrame:
        """Contexts with a real follow-up: ``dataset``, ``source``, ``condition`` and its bits."""
        (run,) = self.sampled.values()
        own = self.base.assign(perturbation=UNPERTURBED)
        frame = pd.concat([own, run.contexts], ignore_index=True)
        bits = frame["real_follow_up_logprob"].astype(float) / np.log(2.0)
        frame = frame.assign(source=sources_of(frame), condition=frame["perturbation"])
        return frame.assign(**{BITS: bits})[bits.notna()].reset_index(drop=True)

    # -- estimated --------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        """Holm-corrected by quantity; all datasets together are a family of their own."""
        found: list[TidyEstimate] = []
        by, before = ["temperature", "condition"], {"condition": UNPERTURBED}
        for dataset, here in by_dataset(rows):
            names = {"outcome": FITS_ORIGINAL, "dataset": dataset, "level": self.args.level}
            found += rates(rows[here], by, **names)
            paired = {"within": "source", "seed": self.args.seed}
            found += differences(rows[here], by, before, **paired, **names)
        scored = self.follow_up_bits()
        what = ["condition"], {BITS: (-np.inf, 0.0)}, {MINUS: before}, self.options
        for dataset, here in by_dataset(scored):
            found += arm_estimates(scored[here], *what, dataset)
        return holm_corrected(found)

    # -- shown ------------------------------------------------------------------------------------

    @property
    def fewer(self) -> str:
        """Which samples and temperatures of the run are used, if not all."""
        of, used = self.runs[0].settings, self.decoding
        said = ""
        if used["samples"] < of["samples"]:
            said += f"; {used['samples']} of {of['samples']} samples (--samples)"
        if len(used["temperatures"]) < len(of["temperatures"]):
            said += f"; of sampled turns T = {used['temperatures'][0]:g} alone"
        return said

    def tables(self, found: pd.DataFrame) -> list[Table]:
        minus = "difference from the unchanged conversation, by query; p is Holm-corrected."
        found = found.assign(condition=found["condition"].map(NAMES))
        made = tables_of(
            f"follow-ups to the unchanged response ({self.intervals}{self.fewer})",
            found,
            {RATE: ("rate", 2), DIFFERENCE: (MINUS, 2)},
            detectable=DIFFERENCE,
            most=1.0,
            index=("dataset", "temperature", "condition"),
            rows="turns",
            legend="Rate: share of turns that the judge calls follow-ups to the unchanged "
            f"response, whatever the model was given. Minus unchanged: {minus}",
        )
        made += tables_of(
            f"real follow-ups after each change, bits ({self.intervals})",
            found,
            {BITS: ("log p", 1), BITS_DIFFERENCE: (MINUS, 1)},
            detectable=BITS_DIFFERENCE,
            index=("dataset", "condition"),
            rows="follow-ups",
            legend="Log p: of the whole real follow-up at T = 1; its tokens are the same under "
            f"each change. Minus unchanged: {minus}",
        )
        return made

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        from ia_mech.rates.figures import gate_title  # loads matplotlib

        model = self.runs[0].model["name"]
        found = all_datasets(found.assign(condition=found["condition"].map(NAMES)))
        title, rows = gate_title(model, self.gate), only(found, DIFFERENCE)
        change = "change of the rate of follow-ups to the unchanged response"
        made: dict[str, Drawing] = {"rates": Bars(title, change, rows, names="condition")}
        if len(rows := only(found, BITS_DIFFERENCE)):
            title, change = f"{model} · real follow-ups", "change of log p of real follow-ups, bits"
            made["real follow-ups"] = Bars(title, change, rows, names="condition")
        return made

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        rows = rows.drop(columns="source").astype({"condition": object})
        return {"turns": rows.assign(change=rows["condition"].map(NAMES))}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        rates, bits = only(found, DIFFERENCE), only(found, BITS_DIFFERENCE)
        most = int(all_datasets(rates)["sources"].max()) if len(rates) else 0
        if most < LEAST:  # the sentence says already that these are too few
            return Conclusion("The table has what was measured.", f"{self.gate.short}.")
        said, rate_changed = [], False
        for condition, words in CHANGES.items():
            of_rate, of_bits = (of[of["condition"] == condition] for of in (rates, bits))
            rate = "lowers the follow-up rate by", "raises the follow-up rate by"
            real = "makes real follow-ups less likely by", "makes real follow-ups likelier by"
            shown = shown_changes(of_rate, *rate), shown_changes(of_bits, *real, 1, " bits")
            rate_changed |= bool(shown[0])
            if any(shown):
                said.append(f"{words} {' and '.join(filter(None, shown))}.")
        few = out_of_reach("follow-up rate", rates)
        nothing = f"With {most} queries no change of the response is shown to matter."
        if few:
            said.append(few)
        elif said and not rate_changed:
            said.append("The follow-up rate is not shown to change.")
        if of_bits := out_of_reach("likelihood of real follow-ups", bits):
            said.append(of_bits)
        control = ""
        bare = rates[rates["condition"] == HEADER_ONLY]
        if len(bare) and few:
            control = (
                f"With {most} queries it can't be shown either that turns which were written "
                "without any conversation are follow-ups less often. "
            )
        elif len(bare):
            ways = "are follow-ups less often by", "are follow-ups more often by"
            how = shown_changes(bare, *ways) or "are not shown to be follow-ups less often"
            control = f"Turns that were written without any conversation {how}. "
        return Conclusion(" ".join(said) or nothing, f"{control}{self.gate.short}.")


main = Perturbations.main

if __name__ == "__main__":
    sys.exit(main())
