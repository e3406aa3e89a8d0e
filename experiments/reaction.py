"""How much does a user turn tell about which response it followed?

Every turn is scored after each of the K responses to its query. The more one response stands out by
its likelihood, the more bits the turn tells about which it followed; no judge is needed. The mean
is I_K, the mutual information of turn and response given the query, at most log2 K. The sentence is
about complete responses alone, since a turn also tells that a response was cut off. The control is
the same number for K wordings of one response, which the model writes itself: what different
responses have beyond it is content. A second control puts the assistant's header in the user's
place: do the bits need the user's? One fixed reader of all turns measures whether greedy turns tell
as much as sampled ones.

Needs: runs with several responses per query, better eight than four. Cost: sampling a third of the
runs again for the controls, and a second or two per turn to score on a CPU (135M).

    python -m ia_mech.sample --response generate --responses 8 --out cache/several
    python -m experiments.reaction cache/several --dry-run
    python -m experiments.reaction cache/several
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from experiments.experiment import Conclusion, Experiment, Model, Unit
from experiments.paraphrase import (
    REQUESTED,
    Versions,
    choose_response,
    closeness,
    perturbed_conversation,
    read_versions,
    requests,
    usable_wordings,
)
from experiments.tables import sentence_of, tables_of
from ia_mech.cli import path_of, whole_from
from ia_mech.errors import UserError
from ia_mech.estimates import ALL, Group, TidyEstimate, all_datasets, holm_corrected, paired_row
from ia_mech.likelihood.copying import GROUPS, copy_features
from ia_mech.likelihood.reaction import (
    bits_by_token,
    by_query,
    choice_bits,
    evidence,
    identified,
    information,
    reaction_bits,
    readable_bits,
)
from ia_mech.results import Table
from ia_mech.run.queries import Query, queries_of, subsample

if TYPE_CHECKING:
    from experiments.figures import Drawing
    from ia_mech.data.conversations import Conversation
    from ia_mech.run import Run

# What an estimate is of: the runs' responses, those that weren't cut off, or a control.
ALTERNATIVES, COMPLETE = "alternatives", "complete responses"
WORDINGS, ASSISTANT = CONTROLS = ("wordings of one response", "assistant header")
KINDS = {WORDINGS: "other_wording", ASSISTANT: "header_assistant"}  # of perturbation
INFORMATION, SAME_QUERIES = "I_K, bits", "I_K on the same queries, bits"
LESS = "I_K less the control's, bits"
READABLE, GREEDY_LESS = "readable bits", "greedy turns' readable bits less these"
COPIED, BEYOND = "copy bits (lower bound)", "beyond copy, bits (upper bound)"
DIFFER = "greedy turns that differ"
CLOSE = ("words kept", "runs of three kept", "length ratio")
MOST_TOKENS = 24  # of the curve of bits by token
FEWEST = 3  # queries: of copy bits, the penalty is chosen on others than the coefficients
MORE = 3  # times as many wordings are written as are needed: some are no good
REWORDING_TEMPERATURE = 0.6  # at 1 the embedded model copies a text or loses it
ROOM = 1.25  # tokens that a wording may have, in those of the longest response

Ids = tuple[int, ...]


# -- measure ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns(Unit):
    """The turns after the responses to one query, and the contexts that they are scored after.

    Attributes:
        arm: :data:`ALTERNATIVES` or a control.
        contexts: token ids with each of the K responses.
        turns: token ids and temperature of each turn.
    """

    arm: str
    contexts: tuple[Ids, ...]
    turns: tuple[tuple[Ids, float], ...]


def unit_of(arm: str, query: Query) -> Turns:
    """A query's turns, to be scored after each of its contexts."""
    contexts = tuple(query.token_ids)
    turns = [tuple(ids.tolist()) for ids in query.turns["token_ids"]]
    tokens = sum(map(len, contexts)) + len(contexts) * sum(map(len, turns))
    pairs = tuple(zip(turns, query.turns["temperature"].astype(float), strict=True))
    return Turns(query.source, query.dataset, tokens, arm, contexts, pairs)


def measure(model: Model, unit: Turns) -> pd.DataFrame:
    """One row per turn, in the unit's order, log-probabilities in nats.

    ``own`` ``[K · tokens]``: of each token, turn-end included, after each response, at the turn's
    own temperature (at T = 1 for greedy turns); ``reader`` ``[K]``: of the whole turn at T = 1.
    """
    from ia_mech.engine.score import Turn

    temperatures = sorted({t for _, t in unit.turns} - {0.0, 1.0})
    count = len(unit.contexts)
    wanted = [Turn(at, ids) for ids, _ in unit.turns for at in range(count)]
    found = model.score(unit.contexts, wanted, temperatures)
    rows = []
    for number, (_, temperature) in enumerate(unit.turns):
        each = found[number * count : (number + 1) * count]
        raw = np.stack([one.logprobs_raw for one in each]).astype(np.float64)
        own = raw
        if temperature in temperatures:
            which = temperatures.index(temperature)
            own = np.stack([one.logprobs_tempered[which] for one in each]).astype(np.float64)
        rows.append({"own": own.ravel(), "reader": raw.sum(1)})
    return pd.DataFrame(rows).assign(arm=unit.arm)


def turns_of(queries: Sequence[Query], rows: pd.DataFrame) -> pd.DataFrame:
    """The turns of an arm's queries with their likelihoods and bits.

    Args:
        queries: of the arm, in the order in which they were measured.
        rows: what was measured of each turn.

    Returns:
        One row per turn with the columns of ``Query.turns``; ``whole`` and ``reader`` ``[K]``, the
        log-likelihood in nats at the turn's own temperature and at T = 1; and, of sampled turns,
        ``reaction_bits``, ``evidence``, ``identified`` and ``bits_by_token`` ``[tokens]``.
    """
    count = len(queries[0].contexts)
    turns = pd.concat([query.turns for query in queries], ignore_index=True)
    each = [values.reshape(count, -1) for values in rows["own"]]
    turns = turns.assign(whole=[one.sum(1) for one in each], reader=rows["reader"].tolist())
    sampled = turns[turns["temperature"] > 0]
    whole, followed = np.stack(sampled["whole"].tolist()), sampled["followed"]
    bits = {
        "reaction_bits": reaction_bits(whole),
        "evidence": evidence(whole, followed),
        "identified": identified(whole, followed),
        "bits_by_token": [bits_by_token(each[row]) for row in sampled.index],
    }
    return turns.join(pd.DataFrame(bits, index=sampled.index))


def information_of(
    turns: pd.DataFrame, size: int, among: Mapping[str, Sequence[int]] | None = None
) -> pd.Series:
    """I_K′ by query (:func:`ia_mech.likelihood.reaction.information`)."""
    whole = np.stack(turns["whole"].tolist())
    found = information(whole, turns["followed"], turns["source"], among, size)
    return pd.Series(found, dtype=float)


def means(turns: pd.DataFrame, values: Any) -> pd.Series:
    """Values of turns → their mean by query."""
    count = len(turns["whole"].iloc[0])
    names, found = by_query(values, turns["followed"], turns["source"], count)
    return pd.Series(found, index=names)


# -- estimate --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A number of every query, of which the mean is estimated.

    Attributes:
        quantity: what it is.
        values: by source.
        names: what it is of.
        less: by source, what is subtracted and tested; None for a plain mean.
        least, most: between which it lies.
    """

    quantity: str
    values: pd.Series
    names: dict[str, Any]
    less: pd.Series | None = None
    least: float = -np.inf
    most: float = np.inf


def share_of_pairs_that_differ(texts: pd.Series) -> float:
    """Of K texts, without bias for a fresh pair."""
    return float(np.mean([one != other for one, other in combinations(texts, 2)]))


def estimate_means(numbers: Iterator[Number], options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """The mean of every number over the queries of each dataset, and of all of them."""
    for number in numbers:
        sources = number.values.index.to_numpy()
        datasets = np.array([str(source).partition("\x1f")[0] for source in sources])
        names = sorted({*datasets})
        for dataset in [*names, *([ALL] if len(names) > 1 else [])]:
            values = number.values[(datasets == dataset) | (dataset == ALL)]
            group = Group(values.index.to_numpy(), options, {"dataset": dataset} | number.names)
            if number.less is None:
                row = group.mean(number.quantity, values)
            else:
                base = number.less, number.less.index
                row = paired_row(group, number.quantity, values, values.index, *base)
            yield replace(row, estimate=row.estimate.clip(number.least, number.most))


# -- the experiment --------------------------------------------------------------------------------


class Reaction(Experiment):
    """See the module."""

    name = "reaction"
    siblings = True
    beside = "reaction"
    columns = dict(Experiment.columns) | {"responses": "Int64", "token": "Int64"}

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--queries",
            type=whole_from(FEWEST),
            metavar="N",
            help="at most N queries, drawn by --seed (default: all)",
        )
        parser.add_argument(
            "--among",
            type=whole_from(2),
            default=4,
            metavar="K",
            help="most responses that headline and controls tell apart (default: 4)",
        )
        parser.add_argument(
            "--control-queries",
            type=whole_from(0),
            default=60,
            metavar="N",
            help="the first N drawn queries have controls; 0: no controls (default: 60)",
        )
        parser.add_argument(
            "--paraphrases",
            type=path_of,
            metavar="FILE",
            help='wordings of responses in place of the model\'s own, as JSONL: {"id": '
            '"open-03/r0", "versions": […]}',
        )

    # -- what is read and sampled -----------------------------------------------------------------

    def read(self) -> None:
        args = self.args
        count = max(len(query.contexts) for query in self.queries)
        self.used = [query for query in self.queries if len(query.contexts) == count]
        if fewer := len(self.queries) - len(self.used):
            self.notes.append(
                f"{fewer} of {len(self.queries)} queries have fewer than {count} responses and are "
                "left out."
            )
        if all(len({*query.responses}) == 1 for query in self.used):
            raise UserError(
                f"the {count} responses to each query are all alike: no turn can tell them apart",
                "sample with a higher --response-temperature",
            )
        if not any((query.turns["temperature"] > 0).any() for query in self.used):
            raise UserError(
                f"{self.runs[0].path} has greedy turns alone", "sample with --temperatures 1"
            )
        if len(self.used) < FEWEST:
            raise UserError(
                f"{len(self.used)} queries have {count} responses: what is fitted on some queries "
                f"is scored on others, which takes {FEWEST}",
                "sample more queries",
            )
        self.size, self.among = headline(self.used, args.among)
        if not self.only_complete:
            self.notes.append(
                "Too few queries have two complete responses: the headline is of all, and a turn "
                "can tell that one was cut off."
            )

        first = {q.source for q in subsample(self.queries, args.control_queries, args.seed)}
        having = [q for q in self.used if q.source in first]
        having = [q for q in having if len(self.among[q.source]) >= self.size]
        self.versions: Versions = {}
        if args.paraphrases is not None and args.control_queries:
            self.versions = read_versions(args.paraphrases, self.used, self.size)
            having = [query for query in having if query.source in self.versions]
            if not having:
                raise UserError(
                    f"{args.paraphrases.name} has {self.size} different versions of one response "
                    f"to no query that has {self.size} responses to tell apart",
                    "give more versions, or lower --among",
                )
        self.controlled = having
        self.reworded = {
            query.source: choose_response(query, self.among[query.source], args.seed)
            for query in self.controlled
            if not self.versions
        }
        if self.controlled:
            self.note_header()

    @property
    def only_complete(self) -> bool:
        """Whether the headline is of complete responses alone."""
        return all(query.complete[k] for query in self.used for k in self.among[query.source])

    def conversations(self) -> "Mapping[str, list[Conversation]]":
        made = {}
        if self.reworded:
            made[REQUESTED] = requests(self.reworded, self.controlled)
        if self.versions:
            made[WORDINGS] = self.control(WORDINGS)
        if self.controlled:
            made[ASSISTANT] = self.control(ASSISTANT)
        return made

    def control(self, name: str) -> "list[Conversation]":
        """The conversations of a control: K′ texts that stand as responses to each query."""
        header = "assistant" if name == ASSISTANT else "user"
        made = []
        for query in self.controlled:
            texts = [query.responses[k] for k in self.among[query.source][: self.size]]
            if name == WORDINGS:
                _, texts = self.versions.get(query.source, (0, []))
            for index, text in enumerate(texts):
                messages = [*query.messages, {"role": "assistant", "content": text}]
                made.append(perturbed_conversation(query, index, messages, KINDS[name], header))
        return made

    def sample(self, name: str, conversations: "list[Conversation]") -> "Run":
        from experiments.resample import resample_run

        if name != REQUESTED:
            return super().sample(name, conversations)
        contexts = [query.contexts.iloc[self.reworded[query.source]] for query in self.controlled]
        longest = max(int(one["response_tokens"]) for one in contexts)
        return resample_run(
            self.runs[0],
            conversations,
            self.place(name),
            ("header_last",),
            response="generate",
            responses=MORE * self.size,
            response_temperature=REWORDING_TEMPERATURE,
            max_response_tokens=int(ROOM * longest) + 1,
            temperatures=(),  # the turns after wordings by themselves are of no interest
            max_new_tokens=1,
        )

    def plan(self) -> dict[str, str]:
        lines = super().plan()
        if self.reworded:
            count = len(self.reworded)
            lines[REQUESTED] = f"{count} responses, each {MORE * self.size} times"
            lines[WORDINGS] = f"of these at most {count * self.size} contexts, as of the other one"
        return lines

    # -- what is measured -------------------------------------------------------------------------

    def arms(self) -> dict[str, list[Query]]:
        """The queries of what has been sampled, by the name of the arm."""
        found = {ALTERNATIVES: self.used}
        for name in CONTROLS:
            if name in self.sampled:
                found[name] = queries_of([self.sampled[name]], KINDS[name])
        return found

    def units(self) -> list[Turns]:
        return [unit_of(arm, query) for arm, queries in self.arms().items() for query in queries]

    def rows(self) -> pd.DataFrame:
        if REQUESTED in self.sampled:
            run, wanted = self.sampled[REQUESTED], self.controlled
            self.versions = usable_wordings(run, self.reworded, wanted, self.size)
            self.notes.append(
                f"Of {len(wanted)} responses that the model was asked to write again in other "
                f"words, {len(self.versions)} have {self.size} wordings that end, are half to "
                "twice as long, keep half of the content words and don't copy; the others have no "
                "such control."
            )
            if self.versions:
                self.sampled[WORDINGS] = self.sample(WORDINGS, self.control(WORDINGS))
        return self.measure_units(self.units(), "scoring")

    def measure(self, model: Model, unit: Any) -> pd.DataFrame:
        return measure(model, unit)

    # -- what is said -----------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        arms = {
            name: turns_of(queries, rows[rows["arm"] == name])
            for name, queries in self.arms().items()
        }
        self.turns, seed = arms[ALTERNATIVES], self.args.seed
        own = self.turns["followed"], self.turns["source"]
        reader = np.stack(self.turns["reader"].tolist())
        self.turns["readable_bits"] = readable_bits(reader, *own, seed=seed).bits
        estimates = estimate_means(chain(self.numbers(arms), self.kept_by_wordings()), self.options)
        return holm_corrected(estimates, lambda row: (row.quantity, row.names["dataset"] == ALL))

    def numbers(self, arms: Mapping[str, pd.DataFrame]) -> Iterator[Number]:
        """Every number of the arms' turns (:func:`turns_of`), a temperature at a time."""
        main, count = self.turns, len(self.used[0].contexts)
        most = {fewer: float(np.log2(fewer)) for fewer in range(2, count + 1)}
        greedy = main[main["temperature"] == 0]
        greedy_bits = means(greedy, greedy["readable_bits"])
        for temperature, turns in main.groupby("temperature"):
            names = {"temperature": temperature, "term": ALTERNATIVES, "responses": count}
            held = means(turns, turns["readable_bits"])
            yield Number(READABLE, held, names, most=most[count])
            if temperature == 0:
                each = turns.groupby("source")["text"].agg(share_of_pairs_that_differ)
                yield Number(DIFFER, each, names, least=0, most=1)
                continue
            yield Number(GREEDY_LESS, greedy_bits, names, less=held)
            yield Number("identified", means(turns, turns["identified"]), names, least=0, most=1)
            for fewer, highest in most.items():
                bits, labels = information_of(turns, fewer), names | {"responses": fewer}
                yield Number(INFORMATION, bits, labels, least=0, most=highest)
            for term, theirs, ours in self.compared(arms, turns):
                labels, highest = names | {"term": term, "responses": self.size}, most[self.size]
                yield Number(INFORMATION, theirs, labels, least=0, most=highest)
                yield Number(SAME_QUERIES, ours, labels, least=0, most=highest)
                if term != COMPLETE:
                    yield Number(LESS, ours, labels, less=theirs, least=-highest, most=highest)
            for token in range(min(MOST_TOKENS, turns["bits_by_token"].map(len).max())):
                # After a turn's end no token adds bits.
                added = [one[token] if token < len(one) else 0.0 for one in turns["bits_by_token"]]
                yield Number("bits by token", means(turns, added), names | {"token": token + 1})
            yield from self.copying(turns, names)

    def compared(
        self, arms: Mapping[str, pd.DataFrame], turns: pd.DataFrame
    ) -> Iterator[tuple[str, pd.Series, pd.Series]]:
        """Of complete responses and of each control at the temperature of ``turns``: the name, its
        I_K′ by query, and that of all or of different responses to the same queries."""
        size, among = self.size, self.among
        if any(len(those) < len(self.used[0].contexts) for those in among.values()):
            bits = information_of(turns, size, among)
            yield COMPLETE, bits, information_of(turns, size)[bits.index]
        for name in CONTROLS:
            if name in arms:
                own = arms[name][arms[name]["temperature"] == turns["temperature"].iloc[0]]
                bits = information_of(own, size)
                # The assistant's header stands after the first K′ responses, wordings are of one.
                last = size if name == ASSISTANT else None
                those = {source: among[str(source)][:last] for source in bits.index}
                yield name, bits, information_of(turns, size, those)

    def copying(self, turns: pd.DataFrame, names: dict[str, Any]) -> Iterator[Number]:
        """Copy bits as groups of features are added in their order, and what is beyond them."""
        texts = turns.groupby("source")["text"]
        features = np.concatenate(
            [
                copy_features(
                    texts.get_group(query.source).tolist(),
                    query.messages[-1]["content"],
                    query.responses,
                )
                for query in self.used
            ]
        )
        own, seed = (turns["followed"], turns["source"]), self.args.seed
        columns: list[int] = []
        most = float(np.log2(features.shape[1]))
        for group, added in GROUPS.items():
            columns += added
            found = choice_bits(features[:, :, columns], *own, seed=seed)
            labels = names | {"term": group}
            yield Number(COPIED, means(turns, found.bits), labels, most=most)
            beyond = means(turns, turns["reaction_bits"] - found.bits)
            yield Number(BEYOND, beyond, labels, least=-most)

    def kept_by_wordings(self) -> Iterator[Number]:
        """How close wordings are to their response, and the headline's other responses to it."""
        rows = []
        for query in self.used:
            if query.source in self.versions:
                k, wordings = self.versions[query.source]
                others = [query.responses[i] for i in self.among[query.source] if i != k]
                for term, texts in ((WORDINGS, wordings), ("other responses", others)):
                    for text in texts:
                        found = closeness(text, query.responses[k])
                        rows.append({"term": term, "source": query.source} | found)
        if rows:
            for term, each in pd.DataFrame(rows).groupby("term", sort=False):
                by_source = each.groupby("source")[[*CLOSE]].mean()
                for quantity in CLOSE:
                    most = np.inf if quantity == "length ratio" else 1.0
                    values = by_source[quantity].dropna()
                    yield Number(quantity, values, {"term": term}, least=0, most=most)

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        columns = ["context_id", "dataset", "source_id", "temperature", "sample", "text"]
        columns += ["followed", "finish_reason", "complete", "reaction_bits", "evidence"]
        columns += ["identified", "readable_bits", "bits_by_token"]
        complete = ~self.turns["response_cut_off"].astype(bool)
        return {"turns": self.turns.assign(complete=complete)[columns]}

    def headline(self, found: pd.DataFrame) -> pd.DataFrame:
        """The estimates that the sentence is about, and beside them those of all responses."""
        term = COMPLETE if COMPLETE in set(found["term"]) else ALTERNATIVES
        wanted = found["quantity"].isin([INFORMATION, SAME_QUERIES])
        return found[(found["term"] == term) & (found["responses"] == self.size) & wanted]

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        level, head = self.args.level, self.headline(found)
        sentences = [
            sentence_of(
                f"bits that a turn tells about which of {self.size} {self.words} it followed, at "
                f"most {np.log2(self.size):.2f}",
                head[head["quantity"] == INFORMATION],
            ),
            sentence_of(
                "bits that one reader of all turns finds in greedy ones, less in sampled ones",
                found[found["quantity"] == GREEDY_LESS],
                null=0.0,
                level=level,
            ),
        ]
        wordings = found[found["term"] == WORDINGS]
        controls = [
            sentence_of(
                f"bits more than with {self.size} wordings of one response",
                wordings[wordings["quantity"] == LESS],
                null=0.0,
                level=level,
            ),
            sentence_of(
                "share of its content words that they keep",
                wordings[wordings["quantity"] == CLOSE[0]],
            ),
        ]
        none = "No control was made of wordings of one response: wording and content aren't told "
        control = " ".join(controls) if controls[0] else none + "apart."
        return Conclusion(" ".join(filter(None, sentences)), control)

    @property
    def words(self) -> str:
        return "complete responses" if self.only_complete else "responses"

    def tables(self, found: pd.DataFrame) -> list[Table]:
        count, size = len(self.used[0].contexts), self.size
        interval = f"{100 * self.args.level:g}% intervals over queries"

        def table(title, rows, columns, legend, beside="temperature") -> list[Table]:
            shown = {name: (head, style) for name, head, style in columns}
            options = {"index": ("dataset", beside), "rows": "queries", "legend": legend}
            return tables_of(title, rows, shown, **options)

        made = table(
            f"bits that a turn tells about which of {size} {self.words} it followed "
            f"(at most {np.log2(size):.2f}; {interval})",
            self.headline(found),
            [(INFORMATION, self.words, 2), (SAME_QUERIES, "all responses", 2)],
            "all responses: of the same queries, also those that were cut off, which a turn can "
            "tell.",
        )
        made += table(
            f"the same of all {count} responses (at most {np.log2(count):.2f} bits)",
            found[(found["term"] == ALTERNATIVES) & (found["responses"] == count)],
            [
                (INFORMATION, "bits", 2),
                (READABLE, "readable", 2),
                (GREEDY_LESS, "greedy less these", "+.2f"),
                ("identified", f"identified (chance {1 / count:.2g})", 2),
                (DIFFER, "differ", 2),
            ],
            "readable: bits that one reader of all turns finds, a lower bound; greedy less these: "
            "readable bits of greedy turns less those of this line, by query; identified: how "
            "often the response that was followed is the likeliest; differ: share of pairs of "
            "greedy turns. Bits show that turns depend on the response, not that they are apt or "
            "that the model is aware of it; alike responses (a maths answer) leave few to tell.",
        )
        for name in CONTROLS:
            made += table(
                f"control: {name}, {size} contexts a query",
                found[found["term"] == name],
                [(SAME_QUERIES, self.words, 2), (INFORMATION, name, 2), (LESS, "less", "+.2f")],
                f"bits of turns after {size} different responses, after the control's contexts to "
                "the same queries, and the former less the latter.",
            )
        made += table(
            "what wordings keep of their response",
            found,
            [(name, name, 2) for name in CLOSE],
            "words kept: content words of the response that the text has, many if it says the "
            "same; runs of three kept: likewise of three words in a row, few if it uses others; "
            "length ratio: of the numbers of words; other responses: to the same query.",
            beside="term",
        )
        made += table(
            f"of the bits of all {count} responses, told by copied words",
            found[found["term"] == [*GROUPS][-1]],
            [(COPIED, "copied, at least", 2), (BEYOND, "beyond, at most", 2)],
            "copied: bits that shared words, numbers and names tell, a lower bound on copying; "
            "beyond: the rest, an upper bound on what isn't copied.",
        )
        return made

    def figures(self, found: pd.DataFrame) -> "Mapping[str, Drawing]":
        from experiments.figures import Lines

        model, whole = self.runs[0].model["name"], all_datasets(found)
        main = whole[whole["term"] == ALTERNATIVES]
        return {
            "responses": Lines(
                f"{model} · fewer responses",
                "responses",
                "bits of a turn",
                main[main["quantity"] == INFORMATION],
                across="responses",
                by="temperature",
            ),
            "tokens": Lines(
                f"{model} · bits by token",
                "token of the turn",
                "bits that it adds",
                main[main["quantity"] == "bits by token"],
                across="token",
                by="temperature",
                levels={"": 0.0},
            ),
        }

    def note_header(self) -> None:
        """Note where the two headers differ in more than the role."""
        note = (
            "The token that opens a user turn is also one that ends this model's responses: the "
            "user's and the assistant's header differ in more than the role."
        )
        chat = self.runs[0].record["identity"]["chat"]
        if str(chat["header_ids"][0]) in chat["response_stop_ids"]:
            self.notes.append(note)


def headline(queries: Sequence[Query], most: int) -> tuple[int, dict[str, list[int]]]:
    """K′, and the responses to each query that are told apart, by source.

    These are the complete ones, and K′ is as many, up to ``most``, as half of the queries have;
    all responses where that is fewer than two.
    """
    whole = {query.source: np.flatnonzero(query.complete).tolist() for query in queries}
    counts = sorted(map(len, whole.values()), reverse=True)
    size = min(most, counts[(len(counts) - 1) // 2])
    if size >= 2:
        return size, whole
    count = len(queries[0].contexts)
    return min(most, count), {source: list(range(count)) for source in whole}


main = Reaction.main

if __name__ == "__main__":
    sys.exit(main())
