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

Needs: ``ia-mech mass`` of each run by the same judge, and a model whose passes have gradients.
Cost: minutes (135M, two cores), and two greedy turns after each conversation.

    ia-mech mass cache/RUN
    ia-mech mass-vector cache/RUN --layer 15
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import numpy as np
import pandas as pd
from scipy.special import log_softmax

from experiments.control import halves_of
from experiments.experiment import Conclusion, Model, flag
from experiments.grid import TEMPERATURE
from experiments.learned_vector import BATCH, UNIT, UNSTEERED, Name, Vectors, placed
from experiments.mass import SHARE
from experiments.outcome import IN_ROLE, RATE
from experiments.shown import Bars, Drawing, tables_of, told
from experiments.steering import SteeredContext, dosing
from ia_mech.cli import above_zero, whole_from
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, all_datasets
from ia_mech.results import Table, folder_of
from ia_mech.steering import SteeringVector
from probes.dataset import masses_of
from probes.targets import MASS

LEARNED, PERMUTED = "follow-ups", "permuted labels"  # what vectors are of
OF_MASS, OF_ROLE, REST = "follow-up mass", "mass in role", "not covered"
GREEDY, GREEDY_ROLE, KL = "greedy follow-ups", "greedy in role", "KL at the header"
SHARES = OF_MASS, OF_ROLE, GREEDY, GREEDY_ROLE
COMPARED, ALONE = dict.fromkeys(SHARES, (0.0, 1.0)), {REST: (0.0, 1.0), KL: (0.0, np.inf)}
DRAWN = 8  # first tokens of a context to learn from, drawn by their probability
DOSED = 24  # contexts, at most, drawn to seek a dose on


@dataclass(frozen=True, kw_only=True)
class FirstTokens(SteeredContext):
    """A context, whose turn doesn't matter, with those of its first tokens whose turn was assessed.

    Attributes:
        context_id: its name.
        firsts, p: ids of first tokens, and the probability of each.
        labels: of each whether it leads to a follow-up, and whether to a turn in role.
        temperature: of the first token.
    """

    context_id: str
    firsts: tuple[int, ...]
    p: tuple[float, ...]
    labels: tuple[tuple[float, float], ...]
    temperature: float

    @property
    def follow_up(self) -> np.ndarray:
        return np.array(self.labels)[:, 0]

    @property
    def teaches(self) -> bool:
        """Whether some of its first tokens lead to follow-ups, and others don't."""
        return 0 < self.follow_up.sum() < len(self.labels)

    def drawn(self, permuted: bool, rng: np.random.Generator) -> list[SteeredContext]:
        """The context with first tokens that lead to follow-ups, drawn by their probability, each
        perhaps several times; or, permuted, with as many that labels drawn at random say so of."""
        labels = rng.permutation(self.follow_up) if permuted else self.follow_up
        held = np.array(self.p) * labels
        tokens = rng.choice(self.firsts, DRAWN, p=held / held.sum()).tolist()
        return [replace(self, turns=((token,),)) for token in tokens]

    def rows(self, model: Model) -> pd.DataFrame:
        """A row without a direction, and one under each: the masses, and the KL."""
        _, log, kl = self.scores(model.after([self.prefix]))
        p = np.exp(log_softmax(log / self.temperature, axis=1)[:, list(self.firsts)])
        of_mass, of_role = (p @ np.array(self.labels)).T.clip(0, 1)  # rounding
        values = {OF_MASS: of_mass, OF_ROLE: of_role, REST: (1 - p.sum(1)).clip(0, 1), KL: kl}
        return pd.DataFrame({"draw": range(len(log)), "context_id": self.context_id, **values})


class MassVector(Vectors):
    name = "mass_vector"
    queries_used = 60
    positions = ("header_last",)
    terms = LEARNED, PERMUTED
    shares = SHARES
    less: ClassVar = {
        "minus permuted": {"term": PERMUTED},
        "minus unsteered": {"layer": UNIT, "term": UNSTEERED},
    }
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
        """Find the layer, and the first tokens of each context of both halves."""
        half, layer, seed = self.runs[0].model["layers"] // 2, self.args.layer, self.args.seed
        self.layers = [half if layer is None else layer]
        self.check_layers()
        of = halves_of((query.source for query in self.queries), seed)
        each = list(self._first_tokens())
        self.halves = [[one for one in each if of[one.source] == half] for half in (0, 1)]
        self.taught = {}
        for half, own in enumerate(self.halves):
            some = [one for one in own if one.teaches]
            if not some:
                raise UserError(
                    f"half {half + 1} of the queries has no conversation of which some first "
                    "tokens lead to follow-ups, and others don't",
                    "measure the mass of more queries: ia-mech mass with --queries",
                )
            for term in self.terms:
                rng = np.random.default_rng([seed, 5, half])
                drawn = (context for one in some for context in one.drawn(term == PERMUTED, rng))
                self.taught[half, self.layers[0], term] = tuple(drawn)
        contexts = pd.concat([query.contexts for query in self.queries])
        contexts.index = pd.MultiIndex.from_frame(contexts[["dataset", "context_id"]])
        names = [[(one.dataset, one.context_id) for one in own] for own in self.halves]
        self.tried = [contexts.loc[those].reset_index(drop=True) for those in names[::-1]]

    def _first_tokens(self) -> Iterator[FirstTokens]:
        """Contexts with their first tokens; of each run those of its own, as ``ia-mech mass`` of
        several runs writes all of them to the first one."""
        places = {
            (row.run, row.dataset, row.context_id): (query, row.Index)
            for query in self.queries
            for row in query.contexts.itertuples()
        }
        for run in self.runs:
            masses_of(run, self.gate.judge)  # refuses what isn't there
            found = pd.read_parquet(folder_of(run.path, MASS) / "first_tokens.parquet")
            assessed = found[found[SHARE].notna()]
            for key, own in assessed.groupby(["dataset", "context_id"], sort=False):
                if place := places.get((str(run.path), *key)):
                    labels = tuple(map(tuple, own[[SHARE, IN_ROLE]].to_numpy().tolist()))
                    yield FirstTokens.of(
                        *(*place, self.anything, ((0,),)),
                        context_id=key[1],
                        firsts=tuple(own["token"].tolist()),
                        p=tuple(own["p"].tolist()),
                        labels=labels,
                        temperature=self.args.temperature,
                    )

    # -- measure ----------------------------------------------------------------------------------

    @cached_property
    def vectors(self) -> dict[Name, SteeringVector]:
        """The learned vectors, each with the dose at which it has the KL in some contexts of the
        half that learned it."""
        searches = []
        for half, own in enumerate(self.halves):
            drawn = np.random.default_rng([self.args.seed, 6, half]).permutation(len(own))[:DOSED]
            some = [own[at] for at in sorted(drawn)]
            along = [self.directions[half, self.layers[0], term] for term in self.terms]
            searches.append(dosing(f"half {half + 1}", some, along, self.args.kl))
        doses = self.measure_units(searches, "doses of one KL")["dose"]
        if doses.isna().any():
            raise UserError(f"no dose has a KL of {self.args.kl:g}", "give another --kl")
        return {
            name: self.vector(self.layers[0], direction, dose)
            for (name, direction), dose in zip(self.directions.items(), doses, strict=True)
        }

    def rows(self) -> pd.DataFrame:
        """A row per context without a vector, and under each."""
        greedy, tried = super().rows().rename(columns={RATE: GREEDY, IN_ROLE: GREEDY_ROLE}), []
        for half, others in ((0, self.halves[1]), (1, self.halves[0])):
            own = [self.vectors[half, self.layers[0], term] for term in self.terms]
            what = [one.direction.tolist() for one in own], [one.dose for one in own]
            tried += [one.under(*what) for one in others]
        found = self.measure_units(tried, "masses under vectors")
        terms = found.pop("draw").map(dict(enumerate((UNSTEERED, *self.terms))))
        layer = np.where(terms == UNSTEERED, UNIT, self.layers[0])
        keys = ["layer", "term", "dataset", "context_id"]
        those = greedy[[*keys, GREEDY, GREEDY_ROLE]]
        found = found.assign(term=terms, layer=layer)
        return found.merge(those, on=keys, how="left", validate="one_to_one")

    # -- estimate ---------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        rows = rows.assign(**{KL: rows[KL].where(rows["term"] != UNSTEERED)})
        found = [*self.compare(rows, COMPARED), *self.compare(rows, ALONE, less={})]
        return placed(found)

    # -- say --------------------------------------------------------------------------------------

    def tables(self, found: pd.DataFrame) -> list[Table]:
        where = f"at {self.positions[0]} after layer {self.layers[0]} ({self.intervals})"
        made = []
        for title, quantities, more in (
            ("the mass of first tokens under a vector", SHARES[:2], {KL: (KL, 2)}),
            ("greedy turns under a vector", SHARES[2:], {}),
        ):
            columns = [item for one in quantities for item in self.columns_of(one, one).items()]
            made += tables_of(
                f"{title}, {where}",
                found,
                dict(columns) | more,
                index=("term",),
                rows="conversations",
                legend="The vectors were learned on the other half of the queries. Minus: paired "
                "by query; p is for these very vectors.",
            )
        return made

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        rows = all_datasets(found)
        title = f"{self.runs[0].model['name']}, layer {self.layers[0]}, "
        title += f"T = {self.args.temperature:g}"
        shown = rows[rows["quantity"].isin(SHARES)]
        return {"moved": Bars(title, "share", shown, names="quantity", by="term")}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        def said(quantity: str, term: str, digits: int | str = 2) -> str:
            return told(all_datasets(found), quantity, digits, term=term)

        def moved(what: str, quantity: str) -> str:
            apart = said(f"{quantity}, minus permuted", LEARNED, "+.2f")
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
