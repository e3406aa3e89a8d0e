"""Estimates of reaction information, one row each, with intervals over queries."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from experiments.reaction.read import ALTERNATIVES, ASSISTANT, COMPLETE, SAME_CONTENT, Arm
from experiments.reaction.score import Likelihoods
from ia_mech.estimates import ALL, TidyEstimate, by_dataset, corrected, frame_of
from ia_mech.likelihood.copying import FEATURES, GROUPS, copy_features
from ia_mech.likelihood.reaction import (
    bits_by_token,
    by_query,
    copy_curve,
    distinctness,
    evidence,
    identified,
    mean_over_queries,
    permutation_test,
    reaction_bits,
    readable_bits,
    subset_bits,
)
from ia_mech.stats import Estimate, cluster_mean, paired_difference

# ``of``: the arm, complete responses, or the group of copy features; ``responses``: K, or K′;
# ``token``: from 1.
COLUMNS = {"dataset": "str", "temperature": "float64", "of": "str"}
COLUMNS |= {"responses": "int64", "token": "Int64"}
INFORMATION, SAME_QUERIES = "I_K, bits", "I_K on the same queries, bits"
LESS = "I_K less the control's, bits"
MOST_TOKENS = 24  # of the curve of bits by token
COPYING = 3  # queries that a conditional logit needs at least


@dataclass(frozen=True)
class ScoredArm:
    """An arm with its likelihoods.

    Attributes:
        arm: the turns.
        found: how likely they are.
    """

    arm: Arm
    found: Likelihoods

    @property
    def own(self) -> np.ndarray:
        """``[turns, K]`` of the whole turn at its own temperature; NaN for greedy turns."""
        summed = np.nansum(self.found.own, axis=2)
        return np.where(np.isnan(self.found.own[:, :, 0]), np.nan, summed)

    def __getitem__(self, rows: np.ndarray) -> "ScoredArm":
        turns = self.arm.turns[rows].reset_index(drop=True)
        found = Likelihoods(self.found.own[rows], self.found.reader[rows], self.found.absent[rows])
        return ScoredArm(replace(self.arm, turns=turns), found)


def estimates(
    scored: dict[str, ScoredArm],
    turns: pd.DataFrame,
    scores: np.ndarray | None = None,
    complete: int = 0,
    *,
    level: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """Every estimate, one row each.

    p is Holm-corrected over all tests of a quantity; those over all datasets together are a family
    of their own.

    Args:
        scored: the arms by their names; :data:`~experiments.reaction.read.ALTERNATIVES` is there.
        turns: its table (:func:`per_turn`).
        scores: ``[turns, K]`` of the reader in place of the subject's likelihoods at T = 1, or
            None.
        complete: K′ of the estimates from complete responses alone; below 2 there are none.
        level: coverage of the intervals.
        seed: of folds and tests.
    """
    main = scored[ALTERNATIVES]
    options = {"level": level, "seed": seed}
    rows: list[TidyEstimate] = []
    for dataset, here in by_dataset(main.arm.turns):
        here = np.asarray(here)
        for temperature in sorted(set(main.arm.turns.loc[here, "temperature"])):
            at = here & (main.arm.turns["temperature"] == temperature).to_numpy()
            names = {"dataset": dataset, "temperature": float(temperature)}
            told = None if scores is None else scores[at]
            maker = _Maker(main[at], turns[at].reset_index(drop=True), told, names, options)
            rows += maker.readable()
            if temperature == 0:
                rows += maker.greedy()
                continue
            rows += maker.sampled()
            if complete >= 2:
                rows += maker.complete(complete)
            for name in (SAME_CONTENT, ASSISTANT):
                if name in scored:
                    rows += maker.against(scored[name])
    return frame_of(
        corrected(rows, lambda row: (row.quantity, row.names["dataset"] == ALL)), COLUMNS
    )


def readable(scored: ScoredArm, scores: np.ndarray, seed: int) -> np.ndarray:
    """``[turns]`` held-out bits of one reader of all turns, at whatever temperature.

    NaN where there is one query only.
    """
    turns = scored.arm.turns
    if turns["source"].nunique() < 2:
        return np.full(len(turns), np.nan)
    return readable_bits(scores, turns["followed"], turns["source"], seed=seed).bits


def per_turn(scored: ScoredArm, held: np.ndarray) -> pd.DataFrame:
    """The table of turns: their bits, what they gave for their own response, and by token."""
    turns, own = scored.arm.turns, scored.own
    sampled = (turns["temperature"] > 0).to_numpy()
    bits, proof, right, absent = (np.full(len(turns), np.nan) for _ in range(4))
    tokens: list[Any] = [None] * len(turns)
    if sampled.any():
        followed = turns["followed"].to_numpy()[sampled]
        bits[sampled] = reaction_bits(own[sampled])
        proof[sampled] = evidence(own[sampled], followed)
        right[sampled] = identified(own[sampled], followed)
        after = own[np.arange(len(own)), turns["followed"]]
        absent[sampled] = ((after - scored.found.absent) / np.log(2))[sampled]
        each = bits_by_token(scored.found.own[sampled])
        for row, values in zip(np.flatnonzero(sampled), each, strict=True):
            tokens[row] = values[~np.isnan(values)]
    return turns.drop(columns=["token_ids"]).assign(
        reaction_bits=bits,
        evidence=proof,
        identified=right,
        readable_bits=held,
        presence_bits=absent,
        bits_by_token=tokens,
    )


@dataclass(frozen=True)
class _Maker:
    """Estimates over turns of one dataset and temperature; ``scores`` of a reader that isn't the
    subject, or None."""

    scored: ScoredArm
    turns: pd.DataFrame
    scores: np.ndarray | None
    names: dict[str, Any]
    options: dict[str, Any]

    @property
    def count(self) -> int:
        return self.scored.arm.responses

    def _row(self, quantity: str, estimate: Estimate, rows: int, **names: Any) -> TidyEstimate:
        usual = {"of": ALTERNATIVES, "responses": self.count, "token": None}
        return TidyEstimate(quantity, self.names | usual | names, rows, estimate)

    def _mean(
        self, quantity: str, column: str, most: float | None = None, **names: Any
    ) -> TidyEstimate:
        values, turns = self.turns[column], self.turns
        if values.isna().any():
            missing = Estimate(np.nan, np.nan, np.nan, 0, "no values")
            return self._row(quantity, missing, 0, **names)
        found = mean_over_queries(
            values, turns["followed"], turns["source"], self.count, level=self.options["level"]
        )
        found = found if most is None else found.within(0, most)
        return self._row(quantity, found, len(turns), **names)

    def readable(self) -> Iterator[TidyEstimate]:
        row = self._mean("readable bits", "readable_bits")
        if self.scores is not None:
            turns, seed = self.turns, self.options["seed"]
            told = permutation_test(self.scores, turns["followed"], turns["source"], seed=seed)
            row = replace(row, p=told.p, test="permutation of turns between responses")
        yield row

    def greedy(self) -> Iterator[TidyEstimate]:
        """How often greedy turns after different responses differ."""
        texts = self.turns.groupby("source")["text"]
        each = texts.apply(lambda of: distinctness(list(of)))
        level = self.options["level"]
        found = cluster_mean(each.to_numpy(), each.index, level=level).within(0, 1)
        yield self._row("greedy turns that differ", found, len(self.turns))

    def sampled(self) -> Iterator[TidyEstimate]:
        turns = self.turns
        yield self._mean(INFORMATION, "reaction_bits", most=np.log2(self.count))
        yield self._mean("evidence, bits", "evidence")
        yield self._mean("identified", "identified", most=1.0)
        yield self._mean("presence, bits", "presence_bits")
        own, followed = self.scored.own, turns["followed"].to_numpy()
        for size in range(2, self.count):
            values = subset_bits(own, followed, size)
            found = mean_over_queries(
                values, followed, turns["source"], self.count, level=self.options["level"]
            )
            found = found.within(0, np.log2(size))
            yield self._row(INFORMATION, found, len(turns), responses=size)
        yield from self._by_token()
        yield from self._copying()

    def complete(self, size: int) -> Iterator[TidyEstimate]:
        """I_K′ of the complete responses of queries that have K′ = ``size`` of them, and that of
        all responses to the same queries; nothing where no response was cut off."""
        if self.turns["complete"].all():
            return
        own, followed = self.scored.own, self.turns["followed"].to_numpy()
        of = {query.source: query.complete for query in self.scored.arm.queries}
        means: dict[str, list[float]] = {INFORMATION: [], SAME_QUERIES: []}
        counts = dict.fromkeys(means, 0)
        for source, rows in self.turns.groupby("source").indices.items():
            whole = np.flatnonzero(of[str(source)])
            if len(whole) < size:
                continue
            for quantity, among in ((INFORMATION, whole), (SAME_QUERIES, np.arange(self.count))):
                here = rows[np.isin(followed[rows], among)]
                index = np.searchsorted(among, followed[here])
                bits = subset_bits(own[np.ix_(here, among)], index, size)
                _, (mean,) = by_query(bits, index, [source] * len(here), len(among))
                means[quantity].append(mean)
                counts[quantity] += len(here)
        for quantity, each in means.items():
            if each:
                found = cluster_mean(each, range(len(each)), level=self.options["level"])
                found = found.within(0, np.log2(size))
                yield self._row(quantity, found, counts[quantity], of=COMPLETE, responses=size)

    def _by_token(self) -> Iterator[TidyEstimate]:
        turns = self.turns
        longest = min(MOST_TOKENS, max(map(len, turns["bits_by_token"])))
        table = np.zeros((len(turns), longest))  # after a turn's end no token adds bits
        for row, values in enumerate(turns["bits_by_token"]):
            table[row, : len(values)] = values[:longest]
        for token, values in enumerate(table.T, start=1):
            found = mean_over_queries(
                values,
                turns["followed"],
                turns["source"],
                self.count,
                level=self.options["level"],
            )
            yield self._row("bits by token", found, len(turns), token=token)

    def _copying(self) -> Iterator[TidyEstimate]:
        turns = self.turns
        if turns["source"].nunique() < COPYING:
            return
        of = {query.source: query for query in self.scored.arm.queries}
        features = np.zeros((len(turns), self.count, len(FEATURES)))
        for source, rows in turns.groupby("source").indices.items():
            query = of[str(source)]
            texts = turns["text"].iloc[rows].tolist()
            asked = query.messages[-1]["content"]
            features[rows] = copy_features(texts, asked, query.responses)
        steps = copy_curve(
            features,
            GROUPS,
            turns["reaction_bits"],
            turns["followed"],
            turns["source"],
            seed=self.options["seed"],
            level=self.options["level"],
        )
        for step in steps:
            yield self._row("copy bits", step.copied, len(turns), of=step.group)
            yield self._row("beyond copy, bits", step.beyond, len(turns), of=step.group)

    def against(self, control: ScoredArm) -> Iterator[TidyEstimate]:
        """A control's I_K′, ours on the same queries, and the difference."""
        arm = control.arm
        shared = arm.turns["source"].isin(set(self.turns["source"]))
        mine = ((arm.turns["temperature"] == self.names["temperature"]) & shared).to_numpy()
        if not mine.any():
            return
        theirs, size = control[mine], arm.responses
        bits = reaction_bits(theirs.own)
        turns = theirs.arm.turns
        names, values = by_query(bits, turns["followed"], turns["source"], size)
        here = self.turns["source"].isin(set(names)).to_numpy()
        own, followed = self.scored.own, self.turns["followed"].to_numpy()
        if arm.name == ASSISTANT:  # the same responses, the first ones
            here = here & (followed < size)
            ours = reaction_bits(own[here][:, :size])
            count = size
        else:
            ours, count = subset_bits(own[here], followed[here], size), self.count
        sources = self.turns["source"][here]
        base, baseline = by_query(ours, followed[here], sources, count)
        level = self.options["level"]
        for quantity, each in ((INFORMATION, values), (SAME_QUERIES, baseline)):
            found = cluster_mean(each, range(len(each)), level=level).within(0, np.log2(size))
            yield self._row(quantity, found, int(mine.sum()), of=arm.name, responses=size)
        if len(names) > 1:
            pair = paired_difference(baseline, base, values, names, **self.options)
            row = self._row(LESS, pair.difference, int(mine.sum()), of=arm.name, responses=size)
            yield replace(row, p=pair.p, test=pair.test)
