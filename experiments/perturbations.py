"""Which edits of the response change the next user turn?

Each conversation is changed in one respect (--conditions) and sampled again with the same random
numbers. The judge is shown each turn after the conversation that the model was given, and after
the unchanged one: a turn that was written without the response may still fit it, by topic or by
luck. Real follow-ups are scored after each changed conversation. Differences are paired by query. A
conversation that a change doesn't alter doesn't count for that change. The control is the rate of
turns that were written without any conversation (header_only): a judge can like only their form.

Needs: judged runs; real follow-ups for the likelihoods. Cost: eight times the sampling of as many
turns (48 queries of the embedded model, 5 turns each: some fifteen minutes on a CPU).

    ia-mech perturbations cache/RUN
    ia-mech perturbations cache/RUN --queries 100 --samples 8
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from experiments.arms import Arm, conversations_of, verdicts_of
from experiments.change import ask, contradict, other_response, shuffle_sentences, truncate
from experiments.experiment import Conclusion, flag
from experiments.judged import Arms
from experiments.outcome import IN_ROLE, RATE
from experiments.shown import only, tables_of
from ia_mech.cli import whole_from
from ia_mech.data.conversations import UNPERTURBED, UNPERTURBED_RESPONSE, USER_HEADER, Conversation
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, all_datasets, could_show, shown_changes
from ia_mech.judge.judging import ON_UNPERTURBED
from ia_mech.rates.evidence import CHANGE, FITS_ORIGINAL, UNCHANGED
from ia_mech.results import Table
from ia_mech.run import Run
from ia_mech.run.queries import Query, queries_of
from ia_mech.run.sources import sources_of


@dataclass(frozen=True)
class Condition:
    """A change of a conversation.

    Attributes:
        shown: in tables, figures and notes.
        words: how a sentence on a changed response begins.
        response: what the response becomes, by the conversation, another query's response and
            draws; None, or its own: the conversation is left out.
        header: the one that is opened.
    """

    shown: str
    words: str = ""
    response: Callable[[Conversation, str, np.random.Generator], str | None] = (
        lambda one, swap, rng: one.response
    )
    header: str = USER_HEADER


REMOVE, SWAP, HEADER_ONLY = "remove", "swap", "header_only"
CONDITIONS = {
    REMOVE: Condition("no response", "Removing the response", lambda one, swap, rng: ""),
    SWAP: Condition(
        "another query's response",
        "Swapping the response for another query's",
        lambda one, swap, rng: swap,
    ),
    "truncate": Condition(
        "first half of the response",
        "Cutting the response to its first half",
        lambda one, swap, rng: truncate(one.response or ""),
    ),
    "generic_question": Condition(
        "generic question added",
        "Adding a generic question to the response",
        lambda one, swap, rng: ask(one.response or "", rng),
    ),
    "shuffle": Condition(
        "sentences shuffled",
        "Shuffling the response's sentences",
        lambda one, swap, rng: shuffle_sentences(one.response or "", rng),
    ),
    "contradict": Condition(
        "answer contradicted",
        "Contradicting the response's answer",
        lambda one, swap, rng: contradict(one.response or "", one.answer, rng),
    ),
    HEADER_ONLY: Condition("no conversation", header="alone"),
    "header_assistant": Condition("assistant header", header="assistant"),
}
NAMES = {name: f"{one.shown} ({name})" for name, one in CONDITIONS.items()}
NAMES |= {UNPERTURBED: UNCHANGED}
STREAM = -3  # of the draws; samples have streams of their own
MINUS = "minus unchanged"
BITS = "log p of real follow-ups, bits"
DIFFERENCE, BITS_DIFFERENCE = f"{RATE}, {MINUS}", f"{BITS}, {MINUS}"


def apply_condition(
    conversation: Conversation, name: str, rng: np.random.Generator, swap: str = ""
) -> Conversation | None:
    """A conversation with its response, under a condition; None if it would stay as it is. The
    metadata hold the unperturbed response."""
    condition, own = CONDITIONS[name], conversation.response or ""
    text = condition.response(conversation, swap, rng)
    if condition.header == USER_HEADER and text in (None, own):
        return None
    return replace(
        conversation.with_response(
            text or "", None if name in (REMOVE, SWAP) else conversation.thought
        ),
        id=f"{conversation.id}~{name}",
        perturbation=name,
        header=condition.header,
        metadata=conversation.metadata | {UNPERTURBED_RESPONSE: own},
    )


def first_complete(queries: Sequence[Query]) -> pd.DataFrame:
    """A row of ``Query.contexts`` per query: that of its first complete response, if any."""
    rows = [query.contexts.iloc[[int(np.argmax(query.complete))]] for query in queries]
    return pd.concat(rows, ignore_index=True)


# -- the experiment --------------------------------------------------------------------------------


class Perturbations(Arms):
    name = "perturbations"
    queries_used = 48
    unperturbed = True
    less: ClassVar = {MINUS: {"term": UNPERTURBED}}
    words = NAMES
    title = "follow-ups to the unchanged response"
    legend = (
        "The judge is shown the unchanged response, whatever the model was given (the built-in "
        f"judge's labels are named builtin{ON_UNPERTURBED}). Differences use "
        "only conversations that the edit changed."
    )

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        turns = "turns of each conversation, at the run's lowest temperature"
        flag(parser, "--samples", whole_from(1), 4, turns, metavar="N")
        each = "; ".join(f"{name}: {one.shown}" for name, one in CONDITIONS.items())
        of, every = f"changes to make (default: all). {each}", list(CONDITIONS)
        how: dict[str, Any] = {"nargs": "+", "choices": every, "metavar": "NAME"}
        parser.add_argument("--conditions", default=every, help=of, **how)

    def read(self) -> None:
        has, used = self.runs[0].settings, self.decoding
        count, (t,), others = used["samples"], used["temperatures"], has["temperatures"][1:]
        if count < has["samples"] or others:
            of = f"the greedy one and {count} of {has['samples']} at T = {t:g} (--samples)"
            none = ", none at higher temperatures" if others else ""
            self.notes.append(f"compared in each conversation: {of}{none}.")

    # -- sampled ----------------------------------------------------------------------------------

    @property
    def decoding(self) -> dict[str, Any]:
        """The temperature and the samples of the runs that are used."""
        of = self.runs[0].settings
        lowest = tuple(sorted(of["temperatures"])[:1])
        return {"temperatures": lowest, "samples": min(self.args.samples, of["samples"])}

    @cached_property
    def contexts(self) -> pd.DataFrame:
        return first_complete(self.queries)

    def arms(self) -> Mapping[str, Arm]:
        return {name: Arm(those, self.decoding) for name, those in self.changed.items()}

    @cached_property
    def changed(self) -> dict[str, list[Conversation]]:
        """By condition every conversation that it changes and that can be made of it."""
        # Responses to put in another's place are drawn from all queries of the runs.
        those, made = conversations_of(first_complete(queries_of(self.runs))), {}
        ids = (self.chat.tokenizer(one.response or "", add_special_tokens=False) for one in those)
        tokens = [len(one["input_ids"]) for one in ids]
        used = {*zip(self.contexts["dataset"], self.contexts["context_id"], strict=True)}
        own = [order for order, one in enumerate(those) if (one.dataset, one.id) in used]
        for name in self.args.conditions:
            each = [self._changed(those, order, name, tokens) for order in own]
            if changed := [one for one in each if isinstance(one, Conversation)]:
                made[name] = changed
            if left_out := Counter(one for one in each if isinstance(one, str)):
                why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
                count = f"{len(own) - left_out.total()} of {len(own)} conversations"
                self.notes.append(f"{NAMES[name]}: {count}. Left out: {why}.")
        if not made:
            raise UserError("none of these conversations can be changed", "give other runs")
        return made

    def _changed(
        self, those: Sequence[Conversation], order: int, name: str, tokens: Sequence[int]
    ) -> Conversation | str:
        """A conversation under a condition, or why it is left out."""
        from ia_mech.chat.headers import context_and_real_follow_up
        from ia_mech.engine.sampling import stream_key
        from ia_mech.models.load import context_limit

        settings = self.runs[0].settings
        key = stream_key(settings["seed"], those[order].id, STREAM - list(CONDITIONS).index(name))
        rng = np.random.default_rng(list(key))
        swap = other_response(those, tokens, order, rng) if name == SWAP else ""
        if swap is None:
            return "with no response to another query of their dataset"
        changed = apply_condition(those[order], name, rng, swap)
        if changed is None:
            return "that the change doesn't alter"
        context, turn = context_and_real_follow_up(self.chat, changed)
        longest = max(settings["max_new_tokens"], 0 if turn is None else len(turn.whole))
        if len(context.ids) + longest > (context_limit(self.config) or np.inf):
            return "that would be too long for the model"
        return changed

    # -- read -------------------------------------------------------------------------------------

    def compared(self) -> Iterable[tuple[dict[str, Any], Sequence[Run]]]:
        """Those before, and those after any change."""
        return [({}, self.runs), ({}, list(self.sampled.values()))]

    def rows(self) -> pd.DataFrame:
        """The turns before and after, with both verdicts: ``follow_up``, after what the model was
        given, and how often they are follow-ups to the unchanged response."""
        rows, like = super().rows(), self.decoding
        alike = rows["temperature"].isin([0.0, *like["temperatures"]])
        alike &= rows["sample"] < like["samples"]
        changed = rows["perturbation"] != UNPERTURBED
        names, sampled = ["category", "follow_up"], list(self.sampled.values())
        rows.loc[changed, names] = verdicts_of(sampled, self.gate.judge).turns[names].to_numpy()
        return rows.assign(term=rows["perturbation"])[changed | alike].reset_index(drop=True)

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        """Rates, and the likelihoods of real follow-ups in each context that has one."""
        own = self.contexts.assign(perturbation=UNPERTURBED)
        changed = (run.contexts for run in self.sampled.values())
        scored = pd.concat([own, *changed], ignore_index=True)
        scored[BITS] = scored["real_follow_up_logprob"].astype(float) / np.log(2.0)
        scored = scored.assign(source=sources_of(scored), term=scored["perturbation"])
        scored = scored[scored[BITS].notna()]
        return super().estimate(rows) + self.compare(scored, {BITS: (-np.inf, 0.0)}, ["term"])

    # -- shown ------------------------------------------------------------------------------------

    def tables(self, found: pd.DataFrame) -> list[Table]:
        return super().tables(found) + tables_of(
            "real follow-ups after each change, bits",
            found.assign(term=found["term"].replace(NAMES)),
            self.columns_of(BITS, "log p", 1, "+.1f"),
            index=("dataset", "term"),
            rows="follow-ups",
            legend="Log p: of the whole real follow-up at T = 1; its tokens are the same under "
            "each change. Differences are paired by query; p is Holm-corrected.",
        )

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        names = ["run", "context_id", "dataset", "category", "condition", "temperature", "sample"]
        names += ["sampled_tokens", "follow_up", FITS_ORIGINAL, IN_ROLE]
        rows = rows.rename(columns={"term": "condition", RATE: FITS_ORIGINAL})[names]
        return {"turns": rows.assign(**{CHANGE: rows["condition"].map(NAMES)})}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        rates, bits = only(found, DIFFERENCE), only(found, BITS_DIFFERENCE)
        rate = "lowers the follow-up rate by", "raises the follow-up rate by"
        real = "makes real follow-ups less likely by", "makes real follow-ups likelier by"
        said, moved = [], False
        for name, words in ((name, one.words) for name, one in CONDITIONS.items() if one.words):
            of_rate, of_bits = (of[of["term"] == name] for of in (rates, bits))
            shown = shown_changes(of_rate, *rate), shown_changes(of_bits, *real, 1, " bits")
            said += [f"{words} {' and '.join(filter(None, shown))}."] if any(shown) else []
            moved |= bool(shown[0])
        if not moved:
            sizes = all_datasets(rates)["detectable"]
            could = could_show(sizes.min(), most=1, up_to=sizes.max())
            could += ", uncorrected" * bool(len(sizes) > 1 and sizes.min() < 1)
            could = f" ({could})" if could else ""
            said.append(f"No change of the response is shown to move the follow-up rate{could}.")
        control, bare = "", rates[rates["term"] == HEADER_ONLY]
        if len(bare):
            ways = "are follow-ups less often by", "are follow-ups more often by"
            how = shown_changes(bare, *ways) or "are not shown to be follow-ups less often"
            control = f"Turns that were written without any conversation {how}. "
        return Conclusion(" ".join(said), f"{control}{self.gate.short}.")


main = Perturbations.main

if __name__ == "__main__":
    sys.exit(main())
