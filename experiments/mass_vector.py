"""Does a vector at the user header that raises the follow-up mass change the greedy turn, too?

``ia-mech mass`` tells which first tokens of a user turn lead to a follow-up. On half of the
queries, a vector is learned by gradient that makes these tokens likely: it is added after one layer
to the state of the header's last token. It is tried on the other half. After that the halves change
places. The follow-up mass is the probability of the same tokens; the greedy turn is written under
the vector and judged anew. The control is a vector that is learned in the same way from as many
first tokens, whose labels have changed places at random within each conversation. Each vector has
the dose at which its KL at the header is the same (--kl) on 24 conversations, drawn from those
that it was learned from; the KL on the others is reported. Labels of first tokens are those
of turns without a vector. Intervals are over queries, for these very vectors.

Needs: ``ia-mech mass`` of the same runs and judge, and a model whose passes have gradients. Cost:
minutes (135M, two cores), and two greedy turns after each conversation.

    ia-mech mass cache/RUN
    ia-mech mass-vector cache/RUN --layer 15
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
from scipy.special import log_softmax

from experiments.arms import verdicts_of
from experiments.control import halves_of
from experiments.experiment import Conclusion, Model, Unit, flag
from experiments.fit import (
    BATCH,
    UNSTEERED,
    Dosing,
    Learning,
    SteeredContext,
    Vectors,
    scored_under,
)
from experiments.grid import TEMPERATURE
from experiments.mass import SHARE
from experiments.outcome import IN_ROLE, parts_of
from experiments.shown import Bars, Drawing, tables_of, told
from ia_mech.cli import above_zero, whole_from
from ia_mech.errors import UserError
from ia_mech.estimates import Group, TidyEstimate, all_datasets, by_dataset, paired_row
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.results import Table, folder_of
from ia_mech.run import Run
from ia_mech.run.queries import Query
from probes.dataset import masses_of
from probes.targets import MASS

LEARNED, PERMUTED = "follow-ups", "permuted labels"  # what vectors are of
VECTORS = LEARNED, PERMUTED
TERMS = UNSTEERED, *VECTORS
OF_MASS, OF_ROLE, REST = "follow-up mass", "mass in role", "not covered"
GREEDY, GREEDY_ROLE, KL = "greedy follow-ups", "greedy in role", "KL at the header"
SHARES = OF_MASS, OF_ROLE, GREEDY, GREEDY_ROLE
LESS = {PERMUTED: "minus permuted", UNSTEERED: "minus unsteered"}
DRAWN = 8  # first tokens of a context to learn from, drawn by their probability
DOSED = 24  # contexts, at most, drawn to seek a dose on


@dataclass(frozen=True)
class Labelled:
    """A context of a query with its first tokens, of those whose turn was assessed.

    Attributes:
        query, k: the context is that of the query's response k.
        tokens, p: ids of first tokens, and the probability of each.
        follow_up, in_role: 1 or 0, of the greedy continuation of each.
    """

    query: Query
    k: int
    tokens: np.ndarray
    p: np.ndarray
    follow_up: np.ndarray
    in_role: np.ndarray

    @property
    def teaches(self) -> bool:
        """Whether some of its first tokens lead to follow-ups, and others don't."""
        return 0 < self.follow_up.sum() < len(self.follow_up)

    def drawn(self, permuted: bool, rng: np.random.Generator) -> list[int]:
        """Ids of first tokens that lead to follow-ups, drawn by their probability, each perhaps
        several times; or, permuted, of as many that labels drawn at random say so of."""
        labels = rng.permutation(self.follow_up) if permuted else self.follow_up
        held = self.p * labels
        return rng.choice(self.tokens, DRAWN, p=held / held.sum()).tolist()


@dataclass(frozen=True)
class Moved(Unit):
    """A context under directions with their doses.

    Attributes:
        context: where the model is steered; its one turn doesn't matter.
        directions, doses: ``[d_model]`` each, and the length of each in norms of the state.
        firsts, labels: ids of first tokens, and of each whether it leads to a follow-up, and
            whether to a turn in role.
        temperature: of the first token.
    """

    context: SteeredContext
    directions: tuple[tuple[float, ...], ...]
    doses: tuple[float, ...]
    firsts: tuple[int, ...]
    labels: tuple[tuple[float, ...], ...]
    temperature: float

    def rows(self, model: Model) -> pd.DataFrame:
        """A row without a vector, and one for each direction: the masses, and the KL."""
        scores = scored_under(model, self.context, self.directions, self.doses)
        log = np.array([one.whole for one in scores], dtype=np.float64)
        p = np.exp(log_softmax(log / self.temperature, axis=1)[:, list(self.firsts)])
        of_mass, of_role = (p @ np.array(self.labels)).T.clip(0, 1)  # rounding
        kl = (np.exp(log) * (log - log[0])).sum(1)
        values = {OF_MASS: of_mass, OF_ROLE: of_role, REST: (1 - p.sum(1)).clip(0, 1), KL: kl}
        return pd.DataFrame({"draw": range(len(log)), **values})


class MassVector(Vectors):
    name = "mass_vector"
    judged = True
    queries_used = 60
    positions = ("header_last",)
    columns: ClassVar[Mapping[str, str]] = {"dataset": "str", "term": "str", "layer": "Int64"}

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        add = partial(flag, parser)
        after = "after which the vector is added (default: half of them)"
        add("--layer", whole_from(0), None, after, metavar="L")
        add("--steps", whole_from(1), 30, f"of {BATCH} tokens, to learn a vector", metavar="N")
        add("--kl", above_zero, 0.1, "at the header under every vector, in nats", metavar="NATS")
        add("--temperature", above_zero, TEMPERATURE, "of the first token", metavar="T")

    # -- read -------------------------------------------------------------------------------------

    def read(self) -> None:
        """Find the layer, the halves, and the first tokens of each context."""
        half = self.runs[0].model["layers"] // 2
        self.layer = half if self.args.layer is None else self.args.layer
        self.check_layer(self.layer)
        self.half = halves_of((query.source for query in self.queries), self.args.seed)
        self.labelled = list(self._labelled())
        for half in (0, 1):
            if not any(one.teaches for one in self.of(half)):
                raise UserError(
                    f"half {half + 1} of the queries has no conversation of which some first "
                    "tokens lead to follow-ups, and others don't",
                    "measure the mass of more queries: ia-mech mass with --queries",
                )

    def _labelled(self) -> Iterator[Labelled]:
        places = {
            (query.dataset, name): (query, k)
            for query in self.queries
            for k, name in enumerate(query.contexts["context_id"])
        }
        for run in self.runs:
            masses_of(run, self.gate.judge)  # refuses what isn't there
            found = pd.read_parquet(folder_of(run.path, MASS) / "first_tokens.parquet")
            assessed = found[found[SHARE].notna()]
            for key, own in assessed.groupby(["dataset", "context_id"], sort=False):
                if key in places:
                    columns = (own[name].to_numpy() for name in ("token", "p", SHARE, IN_ROLE))
                    yield Labelled(*places[key], *columns)

    def of(self, half: int) -> list[Labelled]:
        """The contexts of a half."""
        return [one for one in self.labelled if self.half[one.query.source] == half]

    def before(self, one: Labelled, token: int = 0) -> SteeredContext:
        """A context with a turn of one token."""
        return self.steered(one.query, one.k, self.layer, (token,))

    # -- measure ----------------------------------------------------------------------------------

    def units(self) -> list[Learning]:
        """The vectors that are learned."""
        return [self._learning(half, term) for half in (0, 1) for term in VECTORS]

    def _learning(self, half: int, term: str) -> Learning:
        rng = np.random.default_rng([self.args.seed, 5, half])
        taught = [one for one in self.of(half) if one.teaches]
        drawn = [(one, one.drawn(term == PERMUTED, rng)) for one in taught]
        contexts = [self.before(one, token) for one, tokens in drawn for token in tokens]
        return self.learning(half, term, contexts)

    def _dosing(self, half: int, learned: pd.DataFrame) -> Dosing:
        own = self.of(half)
        some = np.random.default_rng([self.args.seed, 6, half]).permutation(len(own))[:DOSED]
        contexts = tuple(self.before(own[at]) for at in sorted(some))
        tokens = sum(len(one.ids) for one in contexts)
        along = tuple(tuple(one) for one in learned.loc[learned["half"] == half, "direction"])
        return Dosing(f"half {half + 1}", "", tokens, contexts, along, self.args.kl)

    def plan(self) -> dict[str, str]:
        more = f"{len(self.labelled)} conversations under each of two vectors, a greedy turn each"
        return super().plan() | {"then to sample": more}

    def rows(self) -> pd.DataFrame:
        """A row per context without a vector, and under each."""
        learned = self.measure_units(self.units(), "learning vectors")
        dosings = [self._dosing(half, learned) for half in (0, 1)]
        doses = self.measure_units(dosings, "doses of one KL")["dose"].to_numpy()
        if np.isnan(doses).any():
            raise UserError(f"no dose has a KL of {self.args.kl:g}", "give another --kl")
        moved, turns = [], [(UNSTEERED, run) for run in self.runs]
        for half, (dosing, own) in enumerate(zip(dosings, doses.reshape(2, -1), strict=True)):
            others, what = self.of(1 - half), (dosing.directions, tuple(own.tolist()))
            moved += [self._moved(one, *what) for one in others]
            for term, direction, dose in zip(VECTORS, *what, strict=True):
                name = f"layer {self.layer} {term} {half + 1}"
                vector = self.vector(self.layer, direction, dose)
                contexts = pd.concat([one.query.contexts.iloc[[one.k]] for one in others])
                turns.append((term, self.write_under(vector, name, contexts)))
        self.judge_arms()
        found = self.measure_units(moved, "masses under vectors")
        names = [one.query.contexts["context_id"].iloc[one.k] for one in self.of(1) + self.of(0)]
        found = found.assign(
            term=found.pop("draw").map(dict(enumerate(TERMS))),
            context_id=np.repeat(names, len(TERMS)),
        )
        judged = pd.concat([self._greedy(*one) for one in turns])
        keys = ["term", "dataset", "context_id"]
        return found.merge(judged, on=keys, how="left", validate="one_to_one")

    def _moved(self, one: Labelled, directions: tuple, doses: tuple) -> Moved:
        context, query = self.before(one), one.query
        labels = tuple(zip(one.follow_up.tolist(), one.in_role.tolist(), strict=True))
        what = context, directions, doses, tuple(one.tokens.tolist()), labels
        return Moved(query.source, query.dataset, len(context.ids), *what, self.args.temperature)

    def _greedy(self, term: str, run: Run) -> pd.DataFrame:
        """What the greedy turns of a run are, a row each."""
        turns = verdicts_of([run], self.gate.judge).turns
        turns = turns[turns["temperature"] == 0]
        found = turns[["dataset", "context_id"]].astype(object).assign(term=term)
        parts = parts_of(turns, FOLLOW_UP)
        return found.assign(**{GREEDY: parts[SHARE], GREEDY_ROLE: parts[IN_ROLE]})

    # -- estimate ---------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        for dataset, here in by_dataset(rows):
            arms = {term: rows[here & (rows["term"] == term)] for term in TERMS}
            for term, own in arms.items():
                layer = None if term == UNSTEERED else self.layer
                names = {"dataset": dataset, "term": term, "layer": layer}
                group = Group(own["source"].to_numpy(), self.options, names)
                yield group.mean(REST, own[REST], proportion=True)
                if term != UNSTEERED:
                    yield group.mean(KL, own[KL])
                for quantity in SHARES:
                    yield group.mean(quantity, own[quantity], proportion=True)
                    for base in LESS if term == LEARNED else (UNSTEERED,) * (term == PERMUTED):
                        pair = own[quantity], own["source"], arms[base][quantity]
                        words = f"{quantity}, {LESS[base]}"
                        yield paired_row(group, words, *pair, arms[base]["source"])

    # -- say --------------------------------------------------------------------------------------

    def tables(self, found: pd.DataFrame) -> list[Table]:
        def made(title: str, quantities: Sequence[str], more: dict[str, tuple[str, int]]) -> list:
            columns: dict[str, tuple[str, int | str]] = {}
            for quantity in quantities:
                columns[quantity] = quantity, 2
                columns |= {f"{quantity}, {less}": (less, "+.2f") for less in LESS.values()}
            where = f"at {self.positions[0]} after layer {self.layer}"
            return tables_of(
                f"{title}, {where} ({self.intervals})",
                found,
                columns | more,
                index=("term",),
                rows="conversations",
                legend="The vectors were learned on the other half of the queries. Minus: paired "
                "by query; p is for these very vectors.",
            )

        return [
            *made("the mass of first tokens under a vector", SHARES[:2], {KL: (KL, 2)}),
            *made("greedy turns under a vector", SHARES[2:], {}),
        ]

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        rows = all_datasets(found)
        title = f"{self.runs[0].model['name']}, layer {self.layer}, T = {self.args.temperature:g}"
        shown = rows[rows["quantity"].isin(SHARES)]
        return {"moved": Bars(title, "share", shown, names="quantity", by="term")}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        def said(quantity: str, term: str, digits: int | str = 2) -> str:
            return told(all_datasets(found), quantity, digits, term=term)

        def moved(what: str, quantity: str) -> str:
            apart = said(f"{quantity}, {LESS[PERMUTED]}", LEARNED, "+.2f")
            return (
                f"{what} is {said(quantity, LEARNED)} under the vector, "
                f"{said(quantity, PERMUTED)} under the control and {said(quantity, UNSTEERED)} "
                f"without one (vector minus control {apart})"
            )

        return Conclusion(
            f"On queries that a vector wasn't learned from, {moved('the follow-up mass', OF_MASS)}."
            f" {moved('The rate at which greedy turns are follow-ups', GREEDY)}.",
            f"The control is learned from first tokens whose labels have changed places; the KL at "
            f"the header is {said(KL, LEARNED)} and {said(KL, PERMUTED)} nats. "
            f"{moved('In role, the share of greedy turns', GREEDY_ROLE)}. {self.gate.short}.",
        )


main = MassVector.main

if __name__ == "__main__":
    sys.exit(main())
