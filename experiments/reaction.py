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
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from experiments.experiment import Conclusion, Experiment, Model, Unit
from experiments.tables import sentence_of, tables_of
from ia_mech.cli import one_line, path_of, whole_from
from ia_mech.errors import UserError
from ia_mech.estimates import ALL, Group, TidyEstimate, all_datasets, holm_corrected, paired_row
from ia_mech.likelihood.copying import FEATURES, GROUPS, copy_features
from ia_mech.likelihood.reaction import (
    bits_by_token,
    by_query,
    choice_bits,
    distinctness,
    evidence,
    identified,
    information,
    permutation_test,
    reaction_bits,
    readable_bits,
)
from ia_mech.results import Table, label_of

if TYPE_CHECKING:
    from experiments.figures import Drawing
    from experiments.paraphrase import Versions
    from ia_mech.data.conversations import Conversation
    from ia_mech.run import Run
    from ia_mech.run.queries import Query

# What an estimate is of: the runs' responses, those that weren't cut off, or a control.
ALTERNATIVES, COMPLETE = "alternatives", "complete responses"
WORDINGS, ASSISTANT = CONTROLS = ("wordings of one response", "assistant header")
KINDS = {WORDINGS: "other_wording", ASSISTANT: "header_assistant"}  # of perturbation
INFORMATION, SAME_QUERIES = "I_K, bits", "I_K on the same queries, bits"
LESS = "I_K less the control's, bits"
READABLE, GREEDY_LESS = "readable bits", "greedy turns' readable bits less these"
COPIED, BEYOND = "copy bits (lower bound)", "beyond copy, bits (upper bound)"
PRESENCE, DIFFER = "presence, bits", "greedy turns that differ"
CLOSE = ("words kept", "runs of three kept", "length ratio")
MOST_TOKENS = 24  # of the curve of bits by token
COPYING = 3  # queries that a conditional logit needs at least
MOST = 5  # turns shown at either end
MORE = 3  # times as many wordings are written as are needed: some are no good
REWORDING_TEMPERATURE = 0.6  # at 1 the embedded model copies a text or loses it
ROOM = 1.25  # tokens that a wording may have, in those of the longest response
LN2 = float(np.log(2))

Ids = tuple[int, ...]


# -- measure ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns(Unit):
    """The turns after the responses to one query, and the contexts that they are scored after.

    Attributes:
        arm: :data:`ALTERNATIVES` or a control.
        reader: empty for the subject; else the hash of another model's weights.
        responses: K.
        contexts: token ids with each response, perhaps with none as the last.
        turns: token ids and temperature of each turn.
    """

    arm: str
    reader: str
    responses: int
    contexts: tuple[Ids, ...]
    turns: tuple[tuple[Ids, float], ...]


def unit_of(
    arm: str, query: "Query", turns: Sequence[Ids], contexts: Sequence[Ids], reader: str = ""
) -> Turns:
    """A query's turns in some token ids, to be scored after contexts."""
    tokens = sum(map(len, contexts)) + len(contexts) * sum(map(len, turns))
    pairs = tuple(zip(turns, query.turns["temperature"].astype(float), strict=True))
    count = len(query.contexts)
    return Turns(query.source, query.dataset, tokens, arm, reader, count, tuple(contexts), pairs)


def measure(model: Model, unit: Turns) -> pd.DataFrame:
    """One row per turn, in the unit's order, log-probabilities in nats.

    ``own`` ``[K · tokens]``: of each token after each response at the turn's own temperature (NaN
    for greedy turns); ``reader`` ``[K]``: of the whole turn at T = 1; ``absent``: of the whole turn
    after no response at its own temperature (NaN where that wasn't scored).
    """
    from ia_mech.engine.score import Turn

    temperatures = sorted({t for _, t in unit.turns if t not in (0.0, 1.0)})
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
        if temperature == 0:
            own = np.full_like(raw, np.nan)
        absent = own[unit.responses].sum() if count > unit.responses else np.nan
        reader = raw[: unit.responses].sum(1)
        rows.append({"own": own[: unit.responses].ravel(), "reader": reader, "absent": absent})
    return pd.DataFrame(rows).assign(arm=unit.arm, scorer=unit.reader)


@dataclass(frozen=True)
class Arm:
    """Turns that followed one of the K responses to their query, with likelihoods in nats.

    Attributes:
        turns: one row per turn, with the columns of ``Query.turns``.
        own: ``[turns, K, tokens]`` of each token, turn-end included, after each response, at the
            turn's own temperature; NaN after the turn's last token, and for greedy turns.
        reader: ``[turns, K]`` of the whole turn at T = 1.
        absent: ``[turns]`` of the whole turn without a response.
    """

    turns: pd.DataFrame
    own: np.ndarray
    reader: np.ndarray
    absent: np.ndarray

    @classmethod
    def from_queries(cls, queries: "Sequence[Query]", rows: pd.DataFrame) -> "Arm":
        """The turns of queries; ``rows`` are what was measured of each, in their order."""
        turns = pd.concat([query.turns for query in queries], ignore_index=True)
        count = len(queries[0].contexts)
        each = [np.reshape(values, (count, -1)) for values in rows["own"]]
        own = np.full((len(turns), count, max(one.shape[1] for one in each)), np.nan)
        for row, values in enumerate(each):
            own[row, :, : values.shape[1]] = values
        return cls(turns, own, np.stack(rows["reader"].tolist()), rows["absent"].to_numpy(float))

    @cached_property
    def whole_turns(self) -> np.ndarray:
        """``[turns, K]`` of the whole turn at its own temperature; NaN for greedy turns."""
        return np.where(np.isnan(self.own[:, :, 0]), np.nan, np.nansum(self.own, axis=2))

    @property
    def followed_and_source(self) -> tuple[np.ndarray, np.ndarray]:
        """``[turns]`` the response followed, and the query."""
        return self.turns["followed"].to_numpy(), self.turns["source"].to_numpy()

    def at_temperature(self, temperature: float) -> "Arm":
        """Only turns of a temperature."""
        here = (self.turns["temperature"] == temperature).to_numpy()
        turns = self.turns[here].reset_index(drop=True)
        return Arm(turns, self.own[here], self.reader[here], self.absent[here])

    def information(self, size: int, among: Mapping[Any, Sequence[int]] | None = None) -> pd.Series:
        """I_K′ by query (:func:`ia_mech.likelihood.reaction.information`)."""
        return pd.Series(
            information(self.whole_turns, *self.followed_and_source, among, size), dtype=float
        )

    def means(self, values: Any) -> pd.Series:
        """Values of turns → their mean by query; empty where one is missing."""
        values = np.asarray(values, dtype=float)
        if np.isnan(values).any():
            return pd.Series(dtype=float)
        names, found = by_query(values, *self.followed_and_source, self.reader.shape[1])
        return pd.Series(found, index=names)


def per_turn(arm: Arm, held: np.ndarray) -> pd.DataFrame:
    """The table of turns: their bits, also by token, and what they gave for their own response;
    ``held`` are their readable bits."""
    turns = arm.turns
    followed, _ = arm.followed_and_source
    sampled = (turns["temperature"] > 0).to_numpy()
    bits, proof, right, present = np.full((4, len(turns)), np.nan)
    tokens: list[Any] = [None] * len(turns)
    if sampled.any():
        whole = arm.whole_turns[sampled], followed[sampled]
        bits[sampled] = reaction_bits(whole[0])
        proof[sampled], right[sampled] = evidence(*whole), identified(*whole)
        after = arm.whole_turns[np.arange(len(turns)), followed]
        present[sampled] = ((after - arm.absent) / LN2)[sampled]
        each = bits_by_token(arm.own[sampled])
        for row, values in zip(np.flatnonzero(sampled), each, strict=True):
            tokens[row] = values[~np.isnan(values)]
    columns = ["context_id", "dataset", "source_id", "temperature", "sample", "text"]
    return turns[[*columns, "source", "followed", "finish_reason"]].assign(
        complete=~turns["response_cut_off"].astype(bool),
        reaction_bits=bits,
        evidence=proof,
        identified=right,
        readable_bits=held,
        presence_bits=present,
        bits_by_token=tokens,
    )


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


def numbers(
    arms: Mapping[str, Arm],
    queries: "Sequence[Query]",
    among: Mapping[str, Sequence[int]],
    size: int,
    turns: pd.DataFrame,
    seed: int,
) -> Iterator[Number]:
    """Every number of the queries, a temperature at a time.

    Args:
        arms: what was measured; :data:`ALTERNATIVES` is there.
        queries: of these.
        among: source → the responses of the headline.
        size: K′ of the headline and its controls.
        turns: of :func:`per_turn`.
        seed: of folds.
    """
    main = arms[ALTERNATIVES]
    count = main.reader.shape[1]
    some = any(len(those) < count for those in among.values())
    most = {size: float(np.log2(size)) for size in range(2, count + 1)}
    greedy = main.at_temperature(0.0).means(turns.loc[turns["temperature"] == 0, "readable_bits"])
    for temperature in sorted({*main.turns["temperature"]}):
        here, arm = turns[turns["temperature"] == temperature], main.at_temperature(temperature)
        names = {"temperature": float(temperature), "term": ALTERNATIVES, "responses": count}
        held = arm.means(here["readable_bits"])
        yield Number(READABLE, held, names, most=most[count])
        if temperature == 0:
            each = arm.turns.groupby("source")["text"].agg(lambda texts: distinctness([*texts]))
            yield Number(DIFFER, each, names, least=0, most=1)
            continue
        yield Number(GREEDY_LESS, greedy, names, less=held)
        yield Number("identified", arm.means(here["identified"]), names, least=0, most=1)
        yield Number(PRESENCE, arm.means(here["presence_bits"]), names)
        for fewer, highest in most.items():
            labels = names | {"responses": fewer}
            yield Number(INFORMATION, arm.information(fewer), labels, least=0, most=highest)
        compared = {}  # of what → its bits, and those of all or different responses
        if some:
            bits = arm.information(size, among)
            compared[COMPLETE] = bits, arm.information(size)[bits.index]
        for name in CONTROLS:
            if name in arms and temperature in set(arms[name].turns["temperature"]):
                bits = arms[name].at_temperature(temperature).information(size)
                # The assistant's header stands after the first K′ responses, wordings are of one.
                last = size if name == ASSISTANT else None
                ours = {source: among[str(source)][:last] for source in bits.index}
                compared[name] = bits, arm.information(size, ours)
        for name, (theirs, ours) in compared.items():
            labels = names | {"term": name, "responses": size}
            yield Number(INFORMATION, theirs, labels, least=0, most=most[size])
            yield Number(SAME_QUERIES, ours, labels, least=0, most=most[size])
            if name != COMPLETE:
                yield Number(LESS, ours, labels, less=theirs, least=-most[size], most=most[size])
        yield from _by_token(arm, here, names)
        yield from _copying(arm, here, queries, names, seed)


def _by_token(arm: Arm, turns: pd.DataFrame, names: dict[str, Any]) -> Iterator[Number]:
    longest = min(MOST_TOKENS, max(map(len, turns["bits_by_token"])))
    table = np.zeros((len(turns), longest))  # after a turn's end no token adds bits
    for row, values in enumerate(turns["bits_by_token"]):
        table[row, : len(values)] = values[:longest]
    for token, column in enumerate(table.T, start=1):
        yield Number("bits by token", arm.means(column), names | {"token": token})


def _copying(
    arm: Arm, turns: pd.DataFrame, queries: "Sequence[Query]", names: dict[str, Any], seed: int
) -> Iterator[Number]:
    """Copy bits as groups of features are added in their order, and what is beyond them."""
    if len(queries) < COPYING:
        return
    bits, count = turns["reaction_bits"].to_numpy(), arm.reader.shape[1]
    features = np.zeros((len(turns), count, len(FEATURES)))
    rows = arm.turns.groupby("source").indices
    for query in queries:
        texts = arm.turns["text"].iloc[rows[query.source]].tolist()
        asked = query.messages[-1]["content"]
        features[rows[query.source]] = copy_features(texts, asked, query.responses)
    columns: list[int] = []
    most = float(np.log2(count))
    for group, added in GROUPS.items():
        columns += added
        found = choice_bits(features[:, :, columns], *arm.followed_and_source, seed=seed)
        labels = names | {"term": group}
        yield Number(COPIED, arm.means(found.bits), labels, most=most)
        yield Number(BEYOND, arm.means(bits - found.bits), labels, least=-most)


def closeness_of(
    versions: "Versions", queries: "Sequence[Query]", among: Mapping[str, Sequence[int]]
) -> Iterator[Number]:
    """How close wordings are to their response, and the other responses of the headline to it."""
    from experiments.paraphrase import closeness

    each: dict[tuple[str, str], dict[str, float]] = {}
    for query in queries:
        if query.source not in versions:
            continue
        k, texts = versions[query.source]
        others = [query.responses[i] for i in among[query.source] if i != k]
        for name, those in ((WORDINGS, texts), ("other responses", others)):
            found = pd.DataFrame([closeness(text, query.responses[k]) for text in those]).mean()
            for quantity, value in found.items():
                each.setdefault((name, str(quantity)), {})[query.source] = value
    for (name, quantity), values in each.items():
        most = np.inf if quantity == "length ratio" else 1.0
        column = pd.Series(values, dtype=float).dropna()
        yield Number(quantity, column, {"term": name}, least=0, most=most)


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
                base = number.less
                row = paired_row(
                    group, number.quantity, values, values.index, base, list(base.index)
                )
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
            type=whole_from(2),
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
        reader = parser.add_mutually_exclusive_group()
        reader.add_argument(
            "--scorer", metavar="MODEL", help="another model as the one reader of all turns"
        )
        reader.add_argument(
            "--scores",
            type=path_of,
            metavar="FILE",
            help="scores of any judge or embedding in the reader's place (docs/reaction.md)",
        )

    # -- what is read and sampled -----------------------------------------------------------------

    def read(self) -> None:
        from experiments.paraphrase import choose_response, read_versions
        from experiments.resample import same_settings
        from ia_mech.run.queries import subsample

        args = self.args
        same_settings(self.runs)
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
        self.size, self.among = headline(self.used, args.among)
        complete = [each for query in self.used for each in query.complete]
        if cut := complete.count(False):
            note = f"{cut} of {len(complete)} responses were cut off, which a turn can tell."
            if not self.only_complete:
                note += " Too few queries have two complete ones: the headline is of all responses."
            self.notes.append(note)

        first = {q.source for q in subsample(self.queries, args.control_queries, args.seed)}
        having = [q for q in self.used if q.source in first]
        having = [q for q in having if len(self.among[q.source]) >= self.size]
        self.versions: Versions = {}
        if args.paraphrases is not None and args.control_queries:
            self.versions = read_versions(args.paraphrases, self.used, self.size, args.seed)
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
        self.retokenised = (
            [] if args.scorer is None else retokenise(self.used, args.scorer, self.runs[0])
        )
        self.scores = None if args.scores is None else given_scores(args.scores, self.used)

    @property
    def only_complete(self) -> bool:
        """Whether the headline is of complete responses alone."""
        return all(query.complete[k] for query in self.used for k in self.among[query.source])

    def conversations(self) -> "Mapping[str, list[Conversation]]":
        from experiments.paraphrase import REQUESTED, requests

        if not self.controlled:
            return {}
        self.note_header()
        made = {REQUESTED: requests(self.reworded, self.controlled)} if self.reworded else {}
        if self.versions:
            made[WORDINGS] = self.wordings()
        made[ASSISTANT] = [
            conversation
            for query in self.controlled
            for those in [self.among[query.source][: self.size]]
            for conversation in control_conversations(
                query, [query.responses[k] for k in those], ASSISTANT
            )
        ]
        return made

    def wordings(self) -> "list[Conversation]":
        """Each query with every wording of one response."""
        return [
            conversation
            for query in self.controlled
            if query.source in self.versions
            for conversation in control_conversations(
                query, self.versions[query.source][1], WORDINGS
            )
        ]

    def sample(self, name: str, conversations: "list[Conversation]") -> "Run":
        from experiments.paraphrase import REQUESTED
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
        from experiments.paraphrase import REQUESTED

        lines = super().plan()
        if self.reworded:
            count = len(self.reworded)
            lines[REQUESTED] = f"{count} responses, each {MORE * self.size} times"
            lines[WORDINGS] = f"of these at most {count * self.size} contexts, as of the other one"
        return lines

    # -- what is measured -------------------------------------------------------------------------

    def arms(self) -> "dict[str, list[Query]]":
        """The queries of what has been sampled, by the name of the arm."""
        from ia_mech.run.queries import queries_of

        found = {ALTERNATIVES: self.used}
        for name in CONTROLS:
            if name in self.sampled:
                found[name] = queries_of([self.sampled[name]], KINDS[name])
        return found

    def units(self) -> list[Turns]:
        found = []
        for arm, queries in self.arms().items():
            for query in queries:
                contexts = query.token_ids
                if arm == ALTERNATIVES:
                    with contextlib.suppress(UserError):  # a template may refuse it
                        empty = [*query.messages, {"role": "assistant", "content": ""}]
                        contexts.append(tuple(self.chat.context(empty).ids))
                turns = [tuple(ids.tolist()) for ids in query.turns["token_ids"]]
                found.append(unit_of(arm, query, turns, contexts))
        name = self.args.scorer
        if self.retokenised and not self.args.dry_run:
            name = self.scorer.subject.weights_hash
        return found + [replace(unit, reader=name) for unit in self.retokenised]

    def rows(self) -> pd.DataFrame:
        from experiments.paraphrase import REQUESTED, usable_wordings

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
                self.sampled[WORDINGS] = self.sample(WORDINGS, self.wordings())
        return self.measure_units(self.units(), "scoring")

    def measure(self, model: Model, unit: Any) -> pd.DataFrame:
        return measure(model, unit)

    def model_for(self, unit: Any) -> Model:
        return self.scorer if unit.reader else self.model

    @cached_property
    def scorer(self) -> Model:
        """The other model that reads all turns."""
        from experiments.experiment import model_of
        from ia_mech.models.load import ModelSpec, load

        first = self.runs[0].settings
        spec = ModelSpec(name=self.args.scorer, dtype=first["dtype"], device=first["device"])
        return model_of(load(spec), self.runs[0])

    # -- what is said -----------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        seed, own = self.args.seed, rows[rows["scorer"] == ""]
        arms = {
            name: Arm.from_queries(those, own[own["arm"] == name])
            for name, those in self.arms().items()
        }
        main, scores = arms[ALTERNATIVES], self.scores
        if self.retokenised:
            scores = np.stack(rows.loc[rows["scorer"] != "", "reader"].tolist())
        held = np.full(len(main.turns), np.nan)
        if len(self.used) > 1:
            read = main.reader if scores is None else scores
            held = readable_bits(read, *main.followed_and_source, seed=seed).bits
        self.turns = per_turn(main, held)
        found = numbers(arms, self.used, self.among, self.size, self.turns, seed)
        made = [*estimate_means(found, self.options)]
        made += estimate_means(closeness_of(self.versions, self.used, self.among), self.options)
        if scores is not None:
            made = [with_permutation_test(row, scores, main, seed) for row in made]
        return holm_corrected(made, lambda row: (row.quantity, row.names["dataset"] == ALL))

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"turns": self.turns.drop(columns=["source"])}

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
        main = found[(found["term"] == ALTERNATIVES) & found["token"].isna()]
        made += table(
            f"the same of all {count} responses (at most {np.log2(count):.2f} bits)",
            main[main["responses"] == count],
            [
                (INFORMATION, "bits", 2),
                (READABLE, "readable", 2),
                (GREEDY_LESS, "greedy less these", "+.2f"),
                ("identified", f"identified (chance {1 / count:.2g})", 2),
                (PRESENCE, "presence", 1),
                (DIFFER, "differ", 2),
            ],
            "readable: bits that one reader of all turns finds, a lower bound; greedy less these: "
            "readable bits of greedy turns less those of this line, by query; identified: how "
            "often the response that was followed is the likeliest; presence: bits gained over no "
            "response; differ: share of pairs of greedy turns. Bits show that turns depend on the "
            "response, not that they are apt or that the model is aware of it; alike responses (a "
            "maths answer) leave few to tell.",
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
        return made + examples(self.turns)

    def figures(self, found: pd.DataFrame) -> "Mapping[str, Drawing]":
        from experiments.figures import Lines

        model, whole, head = self.runs[0].model["name"], all_datasets(found), self.headline(found)
        information = whole[whole["quantity"] == INFORMATION]
        main = information[information["term"] == ALTERNATIVES]
        count = int(main["responses"].max())
        lines = {
            f"{count} responses": main[main["responses"] == count],
            f"{self.size} {self.words}": all_datasets(head[head["quantity"] == INFORMATION]),
        }
        lines |= {
            f"{name} ({self.size})": information[information["term"] == name] for name in CONTROLS
        }
        lines["readable by one reader"] = whole[whole["quantity"] == READABLE]
        drawn = pd.concat([rows.assign(line=name) for name, rows in lines.items()])
        ceilings = {f"ceiling of {n}": float(np.log2(n)) for n in {count, self.size}}
        at = "temperature (0 = greedy)"
        made: dict[str, Drawing] = {
            "information": Lines(
                f"{model} · reaction bits", at, "bits of a turn", drawn, by="line", levels=ceilings
            ),
            "responses": Lines(
                f"{model} · fewer responses",
                "responses",
                "bits of a turn",
                main,
                across="responses",
                by="temperature",
            ),
        }
        each = whole[whole["quantity"] == "bits by token"]
        if len(each):
            made["tokens"] = Lines(
                f"{model} · bits by token",
                "token of the turn",
                "bits that it adds",
                each,
                across="token",
                by="temperature",
                levels={"": 0.0},
            )
        return made

    def note_header(self) -> None:
        """Note where the two headers differ in more than the role."""
        note = (
            "The token that opens a user turn is also one that ends this model's responses: the "
            "user's and the assistant's header differ in more than the role."
        )
        chat = self.runs[0].record["identity"]["chat"]
        if str(chat["header_ids"][0]) in chat["response_stop_ids"] and note not in self.notes:
            self.notes.append(note)


def headline(queries: "Sequence[Query]", most: int) -> tuple[int, dict[str, list[int]]]:
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


def control_conversations(
    query: "Query", responses: Sequence[str], arm: str
) -> "list[Conversation]":
    """A query with each of some responses, as conversations of a control."""
    from experiments.paraphrase import perturbed_conversation

    header = "assistant" if arm == ASSISTANT else "user"
    replies = [{"role": "assistant", "content": text} for text in responses]
    return [
        perturbed_conversation(query, index, [*query.messages, reply], KINDS[arm], header)
        for index, reply in enumerate(replies)
    ]


def retokenise(queries: "Sequence[Query]", name: str, run: "Run") -> list[Turns]:
    """The same texts as token ids of another model, under its own chat template; no weights are
    loaded, so that what can't be scored is refused before anything is computed.

    Args:
        queries: with their turns.
        name: of the model.
        run: whose chat settings are used.

    Raises:
        UserError: the model can't be had, has no chat template that can express the texts, or is
            made for shorter ones.
    """
    from experiments.resample import chat_of
    from ia_mech.collect.identity import eos_ids
    from ia_mech.models.load import ModelSpec, context_limit, load_tokenizer_and_config

    tokenizer, config = load_tokenizer_and_config(ModelSpec(name=name))
    chat, limit, units = chat_of(run, tokenizer, eos_ids(None, config)), context_limit(config), []
    end = () if chat.closing_id is None else (chat.closing_id,)
    for query in queries:
        messages = [[*query.messages, {"role": "assistant", "content": t}] for t in query.responses]
        contexts = [chat.context(one) for one in messages]
        turns: list[Ids] = []
        for text, reason in zip(query.turns["text"], query.turns["finish_reason"], strict=True):
            ids = chat.reference_ids(messages[0], contexts[0], text) if text else []
            turns.append((*ids, *(end if reason == "turn_end" else ())))
        needed = max(len(one.ids) for one in contexts) + max(map(len, turns))
        if limit is not None and needed > limit:
            raise UserError(
                f"{name} takes {limit} tokens, a context of {query.contexts['context_id'].iloc[0]} "
                f"and its turn have {needed}",
                "give a model with a longer context, or leave --scorer out",
            )
        at_one = replace(query, turns=query.turns.assign(temperature=1.0))
        ids_of = [tuple(one.ids) for one in contexts]
        units.append(unit_of(ALTERNATIVES, at_one, turns, ids_of, reader=name))
    return units


def given_scores(file: Path, queries: "Sequence[Query]") -> np.ndarray:
    """``[turns, K]`` scores of a judge or an embedding, from a file of the user's.

    JSONL, a line per turn with ``context_id``, ``temperature``, ``sample`` and ``scores``: K in the
    order of the responses; larger means likelier.

    Raises:
        UserError: no such file, not such JSON, or turns that are missing, unknown or scored twice.
    """
    from ia_mech.untrusted import parse_json

    remedy = 'write lines such as {"context_id": …, "temperature": …, "sample": …, "scores": […]}'
    if not file.is_file():
        raise UserError(f"no file {file}", "give --scores an existing file")
    keys = ["context_id", "temperature", "sample"]
    turns = pd.concat([query.turns[keys] for query in queries])
    rows = {key: at for at, key in enumerate(turns.itertuples(index=False, name=None))}
    found = np.full((len(turns), len(queries[0].contexts)), np.nan)
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        place = f"{file.name} line {number}"
        if not line.strip():
            continue
        row = parse_json(line, place, remedy)
        scores = row.get("scores") if isinstance(row, dict) else None
        finite = isinstance(scores, list) and all(
            isinstance(score, int | float) and np.isfinite(score) for score in scores
        )
        if scores is None or not finite or len(scores) != found.shape[1]:
            raise UserError(f"{place} has no list of {found.shape[1]} scores", remedy)
        key = tuple(row.get(name) for name in keys)
        if key not in rows:
            raise UserError(f"{place}: the runs have no turn {key}", remedy)
        if not np.isnan(found[rows[key]]).all():
            raise UserError(f"{place}: turn {key} is scored twice", "leave out one of the lines")
        found[rows[key]] = scores
    missing = int(np.isnan(found).any(1).sum())
    if missing:
        raise UserError(f"{file} lacks {missing} of {len(found)} turns", "score all of them")
    return found


def with_permutation_test(
    row: TidyEstimate, scores: np.ndarray, arm: Arm, seed: int
) -> TidyEstimate:
    """Readable bits of another reader with a test: turns change places between responses."""
    if row.quantity != READABLE:
        return row
    turns, dataset = arm.turns, row.names["dataset"]
    here = turns["temperature"] == row.names["temperature"]
    here = (here & ((turns["dataset"] == dataset) | (dataset == ALL))).to_numpy()
    followed, sources = arm.followed_and_source
    found = permutation_test(scores[here], followed[here], sources[here], seed=seed)
    return replace(row, p=found.p, test="permutation of turns between responses")


def examples(turns: pd.DataFrame) -> list[Table]:
    """The turns with the most bits, and those with the fewest."""
    sampled = turns[turns["reaction_bits"].notna()].sort_values("reaction_bits", kind="stable")
    found = []
    for title, rows in (
        ("turns with most bits", sampled.iloc[::-1].head(MOST)),
        ("turns with fewest bits", sampled.head(MOST)),
    ):
        columns = ["context_id", "temperature", "reaction_bits", "text"]
        lines = [
            [one_line(context, 40), label_of(at, "temperature"), f"{bits:.2f}", one_line(text, 140)]
            for context, at, bits, text in rows[columns].itertuples(index=False)
        ]
        found.append(Table(title, ["context", "T", "bits", "turn"], lines))
    return found


main = Reaction.main

if __name__ == "__main__":
    sys.exit(main())
