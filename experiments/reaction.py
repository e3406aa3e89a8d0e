"""How much does a user turn tell about which response it followed?

Every turn is scored after each of the K responses to its query. The more one response stands out by
the turn's likelihood, the more bits the turn tells about which response it followed; no judge is
needed. The mean is I_K, the mutual information of turn and response given the query, at most log2
K. Unfinished responses are left out: a turn may go on with their text. The control is the same
number for K wordings of one response, which the model writes itself: bits beyond the control are
about content. One fixed reader scores all turns, so that greedy and sampled ones can be compared.

Needs: runs with several responses per query, better eight than four. Cost: sampling a third of the
runs again for the control, and a second or two per turn to score on a CPU (135M).

    ia-mech sample --response generate --responses 8 --out cache/several
    ia-mech reaction cache/several
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd
import snowballstemmer

from experiments.arms import Arm
from experiments.experiment import Conclusion, Experiment, flag
from experiments.outcome import SiblingTurns, mean_by_query, unit_of
from experiments.shown import Drawing, Lines, only, sentence_of, tables_of
from ia_mech.cli import whole_from
from ia_mech.data.conversations import Conversation
from ia_mech.errors import UserError
from ia_mech.estimates import (
    Group,
    TidyEstimate,
    all_datasets,
    by_dataset,
    holm_corrected,
    paired_row,
)
from ia_mech.likelihood.reaction import (
    bits_by_token,
    evidence,
    information,
    reaction_bits,
    readable_bits,
)
from ia_mech.results import Table
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.run.queries import Query, queries_of, subsample
from ia_mech.run.sources import split_source

# What an estimate is of: the runs' finished responses, or the control.
ALTERNATIVES, COMPLETE = "alternatives", "complete responses"
WORDINGS, REWORDED = "wordings of one response", "other_wording"  # the arm, its perturbation
INFORMATION, SAME_QUERIES = "I_K, bits", "I_K on the same queries, bits"
DIFFERENCE = "I_K minus the control's, bits"
READABLE, GREEDY_DIFFERENCE = "readable bits", "greedy turns' readable bits minus these"
MOST_RESPONSES = 4  # that headline and control tell apart
MOST_CONTROLLED = 60  # queries that have the control
MOST_TOKENS = 24  # of the curve of bits by token
SURPLUS = 3  # times as many wordings are written as are needed: some are no good
REWORDING_TEMPERATURE = 0.6  # at 1 the embedded model copies a text or loses it
ROOM = 1.25  # tokens that a wording may have, in those of the longest response
REQUESTED = "to_reword"  # the name of contexts that ask for a wording
REQUEST = """\
Write the text below again in other words. Say all that it says, with the same facts, names and \
numbers, in the same order and at about the same length. Add nothing, and answer with the new text \
alone.

{text}"""
SHORTEST, LONGEST = 0.5, 2.0  # times the original's length, in words
LEAST_KEPT, MOST_COPIED = 0.5, 0.8  # shares of the original's content words, and of its trigrams
LONG = 4  # fewest letters of a content word
_WORD = re.compile(  # a character of Chinese or Japanese, a word up to an apostrophe, a number
    r"[\u3040-\u30ff\u3400-\u9fff]|(?<!\w['’])[^\W\d_\u3040-\u30ff\u3400-\u9fff]+|\d[\d.,]*"
)
_stem = lru_cache(snowballstemmer.stemmer("english").stemWord)

# -- wordings of one response ----------------------------------------------------------------------


def perturbed_conversation(query: Query, kind: str, messages: Sequence[dict]) -> Conversation:
    """Messages as a conversation with a query's source, marked as perturbed by ``kind``: no
    estimate pools it with unperturbed ones."""
    _, source = split_source(query.source)
    what = f"{source}/{kind}", source, query.dataset, tuple(messages)
    return Conversation(*what, perturbation=kind)


def usable_wordings(
    run: Run, reworded: Mapping[str, int], queries: Sequence[Query], count: int
) -> dict[str, list[str]]:
    """The first ``count`` usable wordings of one response to each query (source → which), from a
    run that was asked for them: they end, have about the response's length, keep its content and
    don't copy it or each other. Responses with fewer are left out.
    """
    answers = {query.source: query for query in queries_of([run], REQUESTED)}
    found = {}
    for query in queries:
        own, answer = query.responses[reworded[query.source]], answers[query.source]
        whole = zip(answer.responses, answer.complete, strict=True)
        kept = []
        for text in dict.fromkeys(text.strip() for text, complete in whole if complete):
            close = closeness(text, own)
            long = SHORTEST <= close["length ratio"] <= LONGEST
            copied = text == own.strip() or close["trigrams kept"] > MOST_COPIED
            if long and close["words kept"] >= LEAST_KEPT and not copied:
                kept.append(text)
        if len(kept) >= count:
            found[query.source] = kept[:count]
    return found


def closeness(text: str, original: str) -> dict[str, float]:
    """How close a text is to another; NaN where that has no words.

    ``words kept`` is the share of its different content words that the text has (stems of words of
    four letters and more, numbers, words in other scripts), ``trigrams kept`` that of its runs of
    any three words, which show the wording.
    """
    words, own = stems(text), stems(original)
    content = {one for one in own if len(one) >= LONG or not (one.isascii() and one.isalpha())}
    mine, theirs = ({*zip(some, some[1:], some[2:], strict=False)} for some in (words, own))
    return {
        "words kept": len(content & {*words}) / len(content) if content else np.nan,
        "trigrams kept": len(mine & theirs) / len(theirs) if theirs else np.nan,
        "length ratio": len(words) / len(own) if own else np.nan,
    }


def stems(text: str) -> list[str]:
    """The English stems of a text's words and its numbers, in their order."""
    return [_stem(word.rstrip(".,")) for word in _WORD.findall(text.lower())]


# -- measure ---------------------------------------------------------------------------------------


def with_bits(queries: Sequence[Query], rows: pd.DataFrame) -> pd.DataFrame:
    """The turns of queries, in the order in which they were measured, with what was measured:
    ``whole`` and ``reader`` ``[K]``, the log-likelihood in nats at the turn's own temperature and
    at T = 1; and, of sampled turns, ``reaction_bits``, ``evidence`` and ``bits_by_token``
    ``[tokens]``."""
    turns = pd.concat([query.turns for query in queries], ignore_index=True)
    turns = turns.join(rows[["own", "whole", "reader"]].reset_index(drop=True))
    sampled = turns[turns["temperature"] > 0]
    whole, followed = np.stack(sampled["whole"].tolist()), sampled["followed"]
    bits = {
        "reaction_bits": reaction_bits(whole),
        "evidence": evidence(whole, followed),
        "bits_by_token": [bits_by_token(one.reshape(whole.shape[1], -1)) for one in sampled["own"]],
    }
    return turns.join(pd.DataFrame(bits, index=sampled.index))


def information_of(turns: pd.DataFrame, size: int) -> pd.Series:
    """I_K′ by query (:func:`ia_mech.likelihood.reaction.information`)."""
    whole = np.stack(turns["whole"].tolist())
    found = information(whole, turns["followed"], turns["source"], size)
    return pd.Series(found, dtype=float)


def finished(query: Query, count: int) -> Query:
    """The query with its first ``count`` finished responses, and the turns after these."""
    kept = np.flatnonzero(query.complete)[:count].tolist()
    turns = query.turns[query.turns["followed"].isin(kept)].reset_index(drop=True)
    contexts = query.contexts.iloc[kept].reset_index(drop=True)
    return replace(
        query, contexts=contexts, turns=turns.assign(followed=turns["followed"].map(kept.index))
    )


# -- the experiment --------------------------------------------------------------------------------


class Reaction(Experiment):
    name = "reaction"
    siblings = True
    columns = dict(Experiment.columns) | {"responses": "Int64", "token": "Int64"}

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        add, most = partial(flag, parser), "at most N queries, chosen by --seed (default: all)"
        add("--queries", whole_from(2), None, most, metavar="N")

    # -- what is read and sampled -----------------------------------------------------------------

    def read(self) -> None:
        from ia_mech.engine.sampling import stream_key

        counts = sorted((sum(query.complete) for query in self.queries), reverse=True)
        # As many as half of the queries have, and two at least.
        self.count = count = max(counts[(len(counts) - 1) // 2], 2)
        enough = [query for query in self.queries if sum(query.complete) >= count]
        if len(enough) < 2:  # the reader's scale is fitted on other queries
            raise UserError(
                f"two queries with {count} finished responses are needed; of {len(self.queries)} "
                f"there {'is' if len(enough) == 1 else 'are'} {len(enough)}",
                "sample more queries, or with a larger --max-response-tokens",
            )
        self.used = [finished(query, count) for query in enough]
        self.size = min(MOST_RESPONSES, count)
        if fewer := len(self.queries) - len(self.used):
            self.notes.append(
                f"{fewer} of {len(self.queries)} queries have fewer than {count} finished "
                "responses and are left out."
            )
        if not any((query.turns["temperature"] > 0).any() for query in self.used):
            raise UserError(
                f"{self.runs[0].path} has greedy turns alone", "sample with --temperatures 1"
            )
        self.controlled = subsample(self.used, MOST_CONTROLLED, self.args.seed)
        self.reworded = {}
        for query in self.controlled:
            rng = np.random.default_rng([*stream_key(self.args.seed, query.source, 0), 1])
            self.reworded[query.source] = int(rng.choice(count))

    def arms(self) -> Mapping[str, Arm]:
        asked, longest = [], 0
        for query in self.controlled:
            k = self.reworded[query.source]
            request = REQUEST.format(text=query.responses[k])
            messages = [{"role": "user", "content": request}]
            asked.append(perturbed_conversation(query, REQUESTED, messages))
            longest = max(longest, int(query.contexts["response_tokens"].iloc[k]))
        changes = {
            "response": "generate",
            "responses": SURPLUS * self.size,
            "unfinished": True,  # those that are complete are chosen below
            "response_temperature": REWORDING_TEMPERATURE,
            "max_response_tokens": int(ROOM * longest) + 1,
            "temperatures": (),  # the turns after wordings by themselves are of no interest
            "max_new_tokens": 1,
        }
        return {REQUESTED: Arm(asked, changes, turns=SURPLUS * self.size)}

    def plan(self) -> dict[str, str]:
        most = f"at most {len(self.controlled) * self.size} conversations to sample"
        return super().plan() | {WORDINGS: most}

    # -- what is measured -------------------------------------------------------------------------

    def measured(self) -> dict[str, list[Query]]:
        """The queries of what has been sampled, by the name of the arm."""
        queries = {ALTERNATIVES: self.used}
        if WORDINGS in self.sampled:
            queries[WORDINGS] = queries_of([self.sampled[WORDINGS]], REWORDED)
        return queries

    def units(self) -> list[SiblingTurns]:
        of_arms = self.measured().items()
        return [unit_of(arm, one, one.turns) for arm, queries in of_arms for one in queries]

    def rows(self) -> pd.DataFrame:
        run, wanted = self.sampled[REQUESTED], self.controlled
        wordings = usable_wordings(run, self.reworded, wanted, self.size)
        self.notes.append(
            f"Of {len(wanted)} responses that the model was asked to write again in other "
            f"words, {len(wordings)} have {self.size} wordings that end, are half to "
            "twice as long, keep half of the content words and don't copy; the others have no "
            "such control."
        )
        made = []  # turns after K′ wordings that stand as responses to each query
        for query in wanted:
            for index, text in enumerate(wordings.get(query.source, [])):
                messages = [*query.messages, {"role": "assistant", "content": text}]
                one = perturbed_conversation(query, REWORDED, messages)
                made.append(one.with_response_index(index))
        if made:
            self.sample(WORDINGS, Arm(made))
        return self.measure_units(self.units(), "scoring turns after each response")

    # -- what is estimated ------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        arms = {
            name: with_bits(queries, rows[rows["arm"] == name])
            for name, queries in self.measured().items()
        }
        self.turns, seed = arms[ALTERNATIVES], self.args.seed
        own = self.turns["followed"], self.turns["source"]
        reader = np.stack(self.turns["reader"].tolist())
        self.turns["readable_bits"] = readable_bits(reader, *own, seed=seed).bits
        return holm_corrected(list(self.of_turns(arms)))

    def mean(
        self,
        quantity: str,
        values: pd.Series,
        names: dict[str, Any],
        baseline: pd.Series | None = None,
        least: float = -np.inf,
        most: float = np.inf,
    ) -> Iterator[TidyEstimate]:
        """The mean of values by source, minus that of a baseline if there is one, over queries of
        each dataset and of all together."""
        frame = values.rename_axis("source").reset_index(name="value")
        frame["dataset"] = frame["source"].map(lambda source: split_source(source)[0])
        for dataset, here in by_dataset(frame):
            values, sources = frame.loc[here, "value"], frame.loc[here, "source"].to_numpy()
            group = Group(sources, self.options, names | {"dataset": dataset})
            if baseline is None:
                row = group.mean(quantity, values)
            else:
                row = paired_row(group, quantity, values, sources, baseline, baseline.index)
            yield replace(row, estimate=row.estimate.clip(least, most))

    def of_turns(self, arms: Mapping[str, pd.DataFrame]) -> Iterator[TidyEstimate]:
        """All that the arms' turns tell (:func:`with_bits`), a temperature at a time."""
        main, count, size = self.turns, self.count, self.size

        def by_query(of: pd.DataFrame, values: Any) -> pd.Series:
            return mean_by_query(of, values, count)

        most = {number: float(np.log2(number)) for number in (size, count)}
        greedy = main[main["temperature"] == 0]
        greedy_bits = by_query(greedy, greedy["readable_bits"])
        for temperature, turns in main.groupby("temperature"):
            names = {"temperature": temperature, "term": ALTERNATIVES, "responses": count}
            readable = by_query(turns, turns["readable_bits"])
            yield from self.mean(READABLE, readable, names, most=most[count])
            if temperature == 0:
                continue
            yield from self.mean(GREEDY_DIFFERENCE, greedy_bits, names, baseline=readable)
            told = {number: information_of(turns, number) for number in most}
            for number, bits in told.items():
                labels = names | {"responses": number}
                yield from self.mean(INFORMATION, bits, labels, least=0, most=most[number])
            if WORDINGS in arms:
                own = arms[WORDINGS]
                bits = information_of(own[own["temperature"] == temperature], size)
                same = told[size][bits.index]
                labels, highest = names | {"term": WORDINGS, "responses": size}, most[size]
                yield from self.mean(INFORMATION, bits, labels, least=0, most=highest)
                yield from self.mean(SAME_QUERIES, same, labels, least=0, most=highest)
                yield from self.mean(DIFFERENCE, same, labels, bits, least=-highest, most=highest)
            for token in range(min(MOST_TOKENS, turns["bits_by_token"].map(len).max())):
                # After a turn's end no token adds bits.
                added = [one[token] if token < len(one) else 0.0 for one in turns["bits_by_token"]]
                labels = names | {"token": token + 1}
                yield from self.mean("bits by token", by_query(turns, added), labels)

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        columns = [*KEY, "dataset", "source_id", "text", "followed", "finish_reason"]
        columns += ["reaction_bits", "evidence", "readable_bits", "bits_by_token"]
        return {"turns": self.turns[columns]}

    def conclude(self, estimates: pd.DataFrame) -> Conclusion:
        wordings, size = estimates[estimates["term"] == WORDINGS], self.size
        told = sentence_of(
            f"bits that a turn tells about which of {size} {COMPLETE} it followed, at most "
            f"{np.log2(size):.2f}",
            only(estimates, INFORMATION, term=ALTERNATIVES, responses=size),
        )
        greedy = self.tested(
            "bits that one fixed reader finds in greedy turns, minus those in sampled ones",
            only(estimates, GREEDY_DIFFERENCE),
            most=float(np.log2(self.count)),
        )
        beyond = self.tested(
            f"bits beyond those about {size} wordings of one response",
            only(wordings, DIFFERENCE),
            most=float(np.log2(size)),
        )
        none = (
            "There is no control of wordings of one response: turns may tell the content of a "
            "response or only its wording."
        )
        return Conclusion(" ".join(filter(None, [told, greedy])), beyond or none)

    def tables(self, estimates: pd.DataFrame) -> list[Table]:
        size = self.size
        made = tables_of(
            f"bits that a turn tells about which response it followed ({self.intervals})",
            estimates[estimates["term"] == ALTERNATIVES],
            {
                INFORMATION: (COMPLETE, 2),
                READABLE: ("readable", 2),
                GREEDY_DIFFERENCE: ("greedy minus these", "+.2f"),
            },
            index=("dataset", "responses", "temperature"),
            rows="queries",
            legend=f"Of {size} {COMPLETE} a turn tells at most {np.log2(size):.2f} bits. Readable: "
            "bits that one fixed reader of all turns finds, a lower bound; greedy minus these: "
            "readable bits of greedy turns minus those of this line, by query. Bits show that "
            "turns depend on the response, not that they are apt.",
        )
        return made + tables_of(
            f"control: {size} {WORDINGS}",
            estimates[estimates["term"] == WORDINGS],
            {
                SAME_QUERIES: (COMPLETE, 2),
                INFORMATION: (WORDINGS, 2),
                DIFFERENCE: ("difference", "+.2f"),
            },
            index=("dataset", "temperature"),
            rows="queries",
            legend=f"Bits of turns after {size} different responses, bits of turns after as many "
            "wordings of one response to the same queries, and the difference.",
        )

    def figures(self, estimates: pd.DataFrame) -> Mapping[str, Drawing]:
        model, whole = self.runs[0].model["name"], all_datasets(estimates)
        main = whole[whole["term"] == ALTERNATIVES]
        words, rows = (f"{model} · bits by token", "token of the turn"), only(main, "bits by token")
        how: dict[str, Any] = {"across": "token", "by": "temperature", "levels": {"": 0.0}}
        return {"tokens": Lines(*words, "bits that it adds", rows, **how)}


main = Reaction.main

if __name__ == "__main__":
    sys.exit(main())
