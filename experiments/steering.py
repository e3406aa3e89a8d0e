"""Can a direction in the residual stream move the user's turns, more than other directions do?

A direction is added to the residual stream, and the run's turns are scored again: do turns that the
judge calls follow-ups become likelier than other turns after the same response? The direction is
the logistic one of a probe (--probe), added where the probe reads, or that of a file (--vector),
added where the file says. The control is other directions: probes fitted to permuted labels, or for
a file random directions with the covariance of the states. Each direction has the dose at which the
first token's distribution moves by the same KL (--kl). Doses are chosen on half of the queries, and
results are of the other half.

Needs: a judged run with several sampled turns per context. Cost: half an hour on a CPU (135M).

    ia-mech probes cache/RUN
    ia-mech steering cache/RUN --probe cache/RUN/results/probe-rate-builtin
    ia-mech sample … --intervention cache/RUN/results/steering/vector.safetensors
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pandas as pd

from experiments.control import centred_states, halves_of, permuted_probes, random_directions
from experiments.experiment import Conclusion, Experiment, Model, Unit, flag
from experiments.shown import only, tables_of
from ia_mech.cli import above_zero, path_of
from ia_mech.errors import UserError
from ia_mech.estimates import Group, TidyEstimate, all_datasets, by_dataset, p_value, paired_row
from ia_mech.rates.load import JudgedTurns
from ia_mech.results import Table
from ia_mech.run import labels
from ia_mech.run.queries import Query
from ia_mech.stats import Estimate, permutation_p
from ia_mech.steering import ADD, TURN, SteeringVector

if TYPE_CHECKING:  # these load torch
    from torch import Tensor

    from ia_mech.engine.score import Scored, Turn

FILE = "vector.safetensors"
LEAST_DOSE, MOST_DOSE = 2.0**-8, 2.0**4  # between which a KL is sought, in norms of the state
ROUNDS, KL_TOLERANCE = 14, 0.1  # of the search; how near the KL has to come, relatively
OTHERS = 39  # other directions
LEAST, SIGNIFICANT = 19, 0.05  # other directions with which such a p can be reached
RESPONSES = 3  # most contexts of a query
TOKENS = 24  # of a turn: nearly all of the bits come before (docs/locate.md)
DIRECTION, OTHER_MEAN = "the direction", "other directions"
PERMUTED, RANDOM = "probes of permuted labels", "random directions"
UNFITTED = "Fitted directions favour axes of low variance, these don't: p may be too small. "
KL, ODDS = "KL at the header", "log-odds, change"
BEYOND, RANK = "log-odds, change beyond other directions'", "share of other directions that reach"


# -- a direction in a pass -------------------------------------------------------------------------


@dataclass(frozen=True)
class SteeredContext(Unit):
    """A context with turns, where the model is steered, and along what.

    Attributes:
        ids: with the open header.
        layer: whose states are moved; 0 = embeddings.
        at: indices of the context's tokens that are steered.
        in_turn: whether each token of a turn is, too.
        turns: ids of each.
        directions, doses: ``[d_model]`` each, and of each the length of what is added, in norms of
            the state that it is added to.
    """

    ids: tuple[int, ...]
    layer: int
    at: tuple[int, ...]
    in_turn: bool
    turns: tuple[tuple[int, ...], ...]
    directions: tuple[tuple[float, ...], ...] = ()
    doses: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        query: Query,
        k: int,
        vector: SteeringVector,
        turns: Iterable[Sequence[int]],
        **more: Any,
    ) -> Self:
        """The context of a query's response k with turns, steered where a vector says."""
        named = query.contexts["positions"].iloc[k]
        places = {name: None if pd.isna(at) else int(at) for name, at in named.items()}
        at = sorted({at for one in vector.at_context(places) for at in one.positions})
        what = query.token_ids[k], vector.layer, tuple(at), TURN in vector.positions
        return cls(query.source, query.dataset, 0, *what, tuple(map(tuple, turns)), **more)

    @property
    def start(self) -> int:
        """Index of the first token that is scored with a turn, so that it can be steered."""
        return min((*self.at, len(self.ids) - 1))

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens before those that are scored."""
        return self.ids[: self.start]

    @property
    def header(self) -> int:
        """How many of its tokens are scored with a turn."""
        return len(self.ids) - self.start

    @property
    def scored(self) -> int:
        """How many tokens are scored for all turns together."""
        return sum(self.header + len(turn) for turn in self.turns)

    def steered_turns(
        self, number: int, direction: "Tensor | None" = None, dose: float = 0.0
    ) -> "list[Turn]":
        """Its turns after its tokens from ``start`` on, with the direction added, if there is one;
        the scorer knows the context by its number."""
        from ia_mech.engine.intervene import Add
        from ia_mech.engine.score import Turn

        found = []
        for ids in self.turns:
            after = range(self.header, self.header + len(ids) - 1) if self.in_turn else ()
            at = (*(position - self.start for position in self.at), *after)
            steered = () if direction is None or not at else (Add(self.layer, at, direction, dose),)
            tokens = (*self.ids[self.start :], *ids)
            found.append(Turn(number, tokens, interventions=steered, whole_at=self.header))
        return found

    def under(self, directions: Iterable[Iterable[float]], doses: Iterable[float]) -> Self:
        """The same under other directions."""
        along = tuple(map(tuple, directions))
        tokens = self.start + self.scored * (1 + len(along))
        return replace(self, tokens=tokens, directions=along, doses=tuple(doses))

    def scores(
        self, after: "Callable[..., list[Scored]]"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Without a direction, then under each, in nats: ``[1 + directions, turns]``
        log-probabilities of the turns, ``[1 + directions, vocab]`` of the first token, and
        ``[1 + directions]`` KLs of these from the first. After: ``Model.after`` its prefix."""
        import torch

        turns = self.steered_turns(0)
        for direction, dose in zip(self.directions, self.doses, strict=True):
            turns += self.steered_turns(0, torch.tensor(direction), dose)
        scores, count = after(turns), len(self.turns)
        sums = [one.logprobs_raw[self.header :].sum(dtype=np.float64) for one in scores]
        first = np.array([one.whole for one in scores[::count]], dtype=np.float64)
        kl = (np.exp(first) * (first - first[0])).sum(1).clip(0)
        return np.reshape(sums, (-1, count)), first, kl


class Odds(SteeredContext):
    """A context with two turns: one that the judge calls a follow-up, and one that it doesn't."""

    def rows(self, model: Model) -> pd.DataFrame:
        """A row per direction: ``draw`` (its number: 0 is the direction), and in nats ``kl`` at the
        header and ``log_odds``, the change of the log-odds of follow-ups."""
        sums, _, kl = self.scores(model.after([self.prefix]))
        odds = sums[:, 0] - sums[:, 1]
        rows = {"draw": range(len(self.doses)), "dose": self.doses, "kl": kl[1:]}
        return pd.DataFrame(rows | {"log_odds": odds[1:] - odds[0]})


@dataclass(frozen=True)
class Dosing(Unit):
    """Directions, ``[d_model]`` each, whose doses of one KL (nats) are sought in contexts of the
    queries that choose."""

    contexts: tuple[SteeredContext, ...]
    directions: tuple[tuple[float, ...], ...]
    kl: float

    def rows(self, model: Model) -> pd.DataFrame:
        """A row per direction with its ``dose``, at which its KL, a mean over sources, is the
        wanted one; NaN if none comes near."""
        # Of the first token alone: a turn whose one token doesn't matter.
        firsts = [replace(one, turns=((0,),)) for one in self.contexts]
        afters = [model.after([one.prefix]) for one in firsts]
        sources = [one.source for one in firsts]

        def kl_of(some: np.ndarray, doses: np.ndarray) -> np.ndarray:
            along = [self.directions[n] for n in some]
            under = (one.under(along, doses.tolist()) for one in firsts)
            each = [one.scores(after)[2][1:] for one, after in zip(under, afters, strict=True)]
            return pd.DataFrame(each).groupby(sources).mean().mean().to_numpy()

        return pd.DataFrame({"dose": doses_of_equal_kl(len(self.directions), self.kl, kl_of)})


def dosing(
    name: str, contexts: Iterable[SteeredContext], directions: Iterable[Iterable[float]], kl: float
) -> Dosing:
    """The search for the doses of directions in contexts."""
    those, along = tuple(contexts), tuple(map(tuple, directions))
    rounds = 6  # until most directions have their KL, about
    tokens = sum(one.start + rounds * len(along) * one.header for one in those)
    return Dosing(name, "", tokens, those, along, kl)


def doses_of_equal_kl(
    count: int, kl: float, kl_of: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """``[count]`` doses at which directions have a KL, by halving the logarithm's range; NaN for
    one that doesn't come near. ``kl_of`` gives the KLs of some, by their numbers, at a dose each;
    they rise with it."""
    found = np.full(count, np.nan)
    low, high = np.full(count, np.log(LEAST_DOSE)), np.full(count, np.log(MOST_DOSE))
    for _ in range(ROUNDS):
        left = np.flatnonzero(np.isnan(found))
        if not len(left):
            break
        middle = (low + high)[left] / 2
        values = kl_of(left, np.exp(middle))
        near, less = abs(values - kl) <= KL_TOLERANCE * kl, values < kl
        found[left[near]] = np.exp(middle[near])
        low[left[less]], high[left[~less]] = middle[less], middle[~less]
    return found


# -- estimate --------------------------------------------------------------------------------------


def estimates(rows: pd.DataFrame, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """Every estimate of rows of :class:`Odds`; each source weighs the same."""
    for dataset, here in by_dataset(rows):
        wide = rows[here].pivot_table(index="source", columns="draw", values=["kl", "log_odds"])
        group = Group(wide.index.to_numpy(), options, {"dataset": dataset})
        own, others = wide["log_odds"][0], wide["log_odds"].drop(columns=0)
        for term, some in ((DIRECTION, [0]), (OTHER_MEAN, list(others))):
            yield group.mean(KL, wide["kl"][some].mean(axis=1), least=0, term=term)
            yield group.mean(ODDS, wide["log_odds"][some].mean(axis=1), term=term)
        both = own, own.index, others.mean(axis=1), others.index
        yield paired_row(group, BEYOND, *both, term=DIRECTION)
        each, whole = others.mean().to_numpy(), float(own.mean())
        share = Estimate(float((each >= whole).mean()), np.nan, np.nan, len(own), "count")
        p = float(permutation_p(whole, each))
        test = "rank among other directions"
        yield group.row(RANK, share, len(each), p=p, test=test, term=DIRECTION)


def is_shown(found: pd.DataFrame) -> bool:
    """Whether the direction raises the log-odds: more than the mean of the other directions does,
    by flipping signs over sources, and more than nearly all of them."""
    mine = all_datasets(found[found["quantity"].isin([BEYOND, RANK])]).set_index("quantity")
    return bool(mine["value"][BEYOND] > 0 and mine["p"].max() <= SIGNIFICANT)


# -- what runs hold --------------------------------------------------------------------------------


def contexts_of(
    queries: Iterable[Query], judged: JudgedTurns, vector: SteeringVector
) -> Iterator[list[Odds]]:
    """Each query's contexts with two of their sampled turns each, one that the judge calls a
    follow-up and one that it doesn't, steered where a vector says."""
    key = ["run", *labels.KEY]
    keys = judged.turns[key].astype({"run": object, "context_id": object})
    verdicts = pd.Series(judged.turns["follow_up"].to_numpy(), pd.MultiIndex.from_frame(keys))
    order = {"label": False, "temperature": False, "sample": True}  # follow-ups first
    for query in queries:
        named = pd.MultiIndex.from_frame(query.turns[key])
        turns = query.turns.assign(label=verdicts.reindex(named).to_numpy(dtype=float))
        turns = turns[(turns["temperature"] > 0) & (turns["token_ids"].map(len) > 0)]
        turns = turns.dropna(subset="label")
        turns = turns.sort_values(list(order), ascending=list(order.values()), kind="stable")
        each = turns.drop_duplicates(["followed", "label"]).groupby("followed")["token_ids"]
        both = {k: [ids.tolist()[:TOKENS] for ids in pair] for k, pair in each if len(pair) == 2}
        yield [Odds.of(query, k, vector, both[k]) for k in list(both)[:RESPONSES]]


class Steering(Experiment):
    name = "steering"
    judged = True
    queries_used = 40
    columns: ClassVar = {"dataset": "str", "term": "str"}

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        along = parser.add_mutually_exclusive_group(required=True)
        along.add_argument(
            "--probe", type=path_of, metavar="PROBE", help="what ia-mech probes wrote"
        )
        along.add_argument("--vector", type=path_of, metavar="FILE", help="a steering vector's")
        all_have = "that every direction has at the header"
        flag(parser, "--kl", above_zero, 0.1, all_have, metavar="NATS")

    # -- read -------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the direction, the verdicts, the contexts and the states."""
        self.vector = self._vector()
        used = self._contexts()
        half = halves_of((one.source for one in used), self.args.seed)
        choosing, self.reported = ([one for one in used if half[one.source] == n] for n in (0, 1))
        own = self.vector.direction.double().numpy()
        self.directions = [one.tolist() for one in (own, *self._others(own))]
        self.search = dosing("all that choose", choosing, self.directions, self.args.kl)

    def _others(self, own: np.ndarray) -> np.ndarray:
        """``[OTHERS, d_model]`` that the direction is compared with; UserError if none fit."""
        last = OTHERS, self.args.seed
        if self.probe is None:
            states = centred_states(self.runs, self.vector.layer, self.vector.positions)
            return random_directions(states, own, *last)
        from probes.dataset import RUN, read

        card, asked = self.probe.card, self.probe.card["asked"]
        where = [card["position"]], [self.vector.layer]
        target = asked.get("target", "rate")
        data = read(self.runs, self.verdicts.judge, target, *where, asked.get("within", RUN))
        fitted = {run.get("identity") for run in asked["runs"]}, asked.get("judge")
        if fitted != ({run.identity_digest for run in self.runs}, self.verdicts.judge):
            self.notes.append(f"p is rough: {PERMUTED} aren't of the probe's own runs or labels.")
        if not np.ptp(data.outcome.rate):
            problem = "all conversations here have the same rate, so that no probe can be fitted"
            raise UserError(problem, "give the runs that the probe was fitted to, or --vector")
        states = data.at(self.vector.layer, card["position"])
        return permuted_probes(states, data.outcome, float(card["penalty"]), *last)

    def _vector(self) -> SteeringVector:
        """The direction; refused if it is of another model."""
        import torch

        from probes.card import Probe

        self.probe, self.others = None, RANDOM
        if self.args.vector is not None:
            vector = replace(SteeringVector.load(self.args.vector), kind=ADD)
        else:
            self.probe, self.others = Probe.load(self.args.probe), PERMUTED
            card, weights = self.probe.card, self.probe.directions["logistic"].weights
            what = card["layer"], (card["position"],), torch.from_numpy(weights), 1.0
            of = card["asked"]["runs"][0]["model"]
            vector = SteeringVector(ADD, *what, of["name"], of["weights_hash"])
            self.notes.append("the probe was fitted to all queries, reported ones among them.")
        model = self.runs[0].model
        vector.check_weights(model["weights_hash"])
        names = self.runs[0].contexts["positions"].iloc[0]
        vector.check(model["layers"], model["d_model"], list(names))
        return vector

    def _contexts(self) -> list[Odds]:
        """The contexts with turns to compare."""
        each = list(contexts_of(self.queries, self.verdicts, self.vector))
        which = "response after which the judge calls some turns follow-ups and not others"
        if (used := sum(map(bool, each))) < 4:
            few = f"{used} queries have a {which}"
            raise UserError(few, "sample more turns (--samples), or more queries")
        if less := len(each) - used:
            self.notes.append(f"{less} queries have no {which}; they are left out.")
        return [one for some in each for one in some]

    # -- measure ----------------------------------------------------------------------------------

    def units(self) -> list[Dosing | Odds]:
        """All units, for ``--dry-run``: each direction has dose 1, as doses aren't known yet."""
        return [self.search, *self.tried(np.ones(len(self.directions)))]

    def tried(self, doses: np.ndarray) -> list[Odds]:
        """The contexts of the other half under the directions that have a dose."""
        there = np.flatnonzero(~np.isnan(doses))
        arms = [self.directions[n] for n in there], doses[there].tolist()
        return [one.under(*arms) for one in self.reported]

    def rows(self) -> pd.DataFrame:
        """The turns of one half under the doses that the other has chosen."""
        found = self.measure_units([self.search], "doses of one KL")["dose"].to_numpy()
        reached = int((~np.isnan(found[1:])).sum())
        if np.isnan(found[0]) or reached < LEAST:
            few = f"{reached} of {OTHERS} {self.others} reach"
            raise UserError(
                f"{'the direction does not reach' if np.isnan(found[0]) else few} a KL of "
                f"{self.args.kl:g} nats at doses up to {MOST_DOSE:g}",
                "give another --kl, layer or position",
            )
        self.vector = replace(self.vector, dose=float(found[0]))
        return self.measure_units(self.tried(found), "turns under directions")

    # -- say --------------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        return estimates(rows, self.options)

    def tables(self, found: pd.DataFrame) -> list[Table]:
        columns = {ODDS: "log-odds", BEYOND: "beyond others", RANK: "reached by"}
        return tables_of(
            f"what moves the turns, at one KL ({self.intervals} that chose nothing)",
            found,
            {name: (head, 2) for name, head in columns.items()} | {KL: ("KL", 3)},
            index=("dataset", "term"),
            legend="log-odds: change, in nats, of those of follow-ups against other "
            f"turns; other directions: {self.others}; beyond others: minus their mean; reached by: "
            "the share of these that change them as much; KL: of the first token's distribution, "
            "in nats.",
        )

    def files(self) -> dict[str, Callable[[Path], None]]:
        return {FILE: self.vector.save}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        self.notes.append(
            f"To sample turns under it, give ia-mech sample --intervention {self.folder / FILE}."
        )
        whole = all_datasets(found)
        beyond, rank = (only(whole, name).iloc[0] for name in (BEYOND, RANK))
        change = self.tested(
            f"change of their log-odds, in nats, minus the mean change by {self.others}",
            only(whole, BEYOND),
        )
        verb = "makes" if is_shown(found) else "isn't shown to make"
        sentence = (
            f"Steering along the direction in layer {self.vector.layer} at "
            f"{', '.join(self.vector.positions)} (dose {self.vector.dose:.2g}) {verb} "
            f"follow-ups likelier than {self.others} of the same KL do. "
            f"{change[:-1]}, {p_value(beyond['p'])}."
        )
        least = 1 / (rank["rows"] + 1)
        control = (
            f"{round(rank['value'] * rank['rows'])} of {rank['rows']} {self.others} do as "
            f"much, {p_value(rank['p'])} (the least there can be: {least:.3f}). "
            f"{UNFITTED if self.probe is None else ''}{self.gate.short}."
        )
        return Conclusion(sentence, control)


main = Steering.main

if __name__ == "__main__":
    sys.exit(main())
