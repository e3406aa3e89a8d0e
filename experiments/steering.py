"""Can a direction in the residual stream move the user's turns, more than other directions do?

A direction is added to the residual stream, and the run's turns are scored again. The direction is
the logistic one of a probe (--probe), added where the probe reads, or that of a file (--vector),
added where the file says. The question is whether turns that the judge calls follow-ups become
likelier than other turns after the same context. The control is other directions: for a
probe, probes whose labels queries have exchanged; for a file, random directions with the covariance
of the states. All directions change the next token equally: for each, the dose is sought at which
the first token's distribution moves by one KL (--kl). Half of the queries choose the doses, and
results are of the other half.

Needs: a judged run with several sampled turns per context. Cost: half an hour on a CPU (135M).

    ia-mech probes cache/RUN
    ia-mech steering cache/RUN --probe cache/RUN/results/probe-rate-builtin
    ia-mech steering cache/RUN --vector my.safetensors --kl 0.5
    ia-mech sample … --intervention cache/RUN/results/steering/vector.safetensors
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from experiments.control import centred_states, halves_of, permuted_probes, random_directions
from experiments.experiment import Conclusion, Experiment, flag
from experiments.fit import FILE, KEY, MOST_DOSE, Dosing, Steered, SteeredContext, steered_context
from experiments.shown import Bars, Drawing, only, tables_of
from ia_mech.cli import above_zero, path_of
from ia_mech.errors import UserError
from ia_mech.estimates import Group, TidyEstimate, all_datasets, by_dataset, p_value, paired_row
from ia_mech.results import Table
from ia_mech.run.queries import Query
from ia_mech.stats import Estimate, permutation_p
from ia_mech.steering import ADD, TURN, SteeringVector

if TYPE_CHECKING:
    from probes.card import Probe

OTHERS = 39  # other directions
LEAST, SIGNIFICANT = 19, 0.05  # other directions with which such a p can be reached
RESPONSES = 3  # most contexts of a query
TOKENS = 24  # of a turn: nearly all of the bits come before (docs/locate.md)
DIRECTION, OTHER, OTHER_MEAN = "the direction", "other direction", "other directions"
PERMUTED, RANDOM = "probes of permuted labels", "random directions"
UNFITTED = "Fitted directions favour axes of low variance, these don't: p may be too small. "
KL, ODDS = "KL at the header", "log-odds, change"
BEYOND, RANK = "log-odds, change beyond other directions'", "share of other directions that reach"


# -- estimate --------------------------------------------------------------------------------------


def estimates(rows: pd.DataFrame, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """Every estimate of rows of :class:`Steered`; each source weighs the same."""
    for dataset, here in by_dataset(rows):
        wide = rows[here].pivot_table(index="source", columns="draw", values=["kl", "log_odds"])
        group = Group(wide.index.to_numpy(), options, {"dataset": dataset})
        own, others = wide["log_odds"][0], wide["log_odds"].drop(columns=0)
        for term, some in ((DIRECTION, [0]), (OTHER_MEAN, list(others))):
            yield group.mean(KL, wide["kl"][some].mean(axis=1), least=0, term=term)
            yield group.mean(ODDS, wide["log_odds"][some].mean(axis=1), term=term)
        for draw in others:
            yield group.mean(ODDS, others[draw], term=OTHER, draw=draw)
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


def vector_of_probe(probe: "Probe", path: Path) -> SteeringVector:
    """A probe's logistic direction, to be added where the probe reads."""
    import torch

    card = probe.card
    try:
        model, where = card["asked"]["runs"][0]["model"], (int(card["layer"]), (card["position"],))
        weights = torch.from_numpy(probe.directions["logistic"].weights)
        float(card["penalty"])  # of the probes that it is compared with
        return SteeringVector(ADD, *where, weights, 1.0, model["name"], model["weights_hash"])
    except (LookupError, TypeError, ValueError):
        raise UserError(
            f"the probe {path} doesn't say which direction of which model it is",
            "write the probe again with ia-mech probes, or give --vector",
        ) from None


def contexts_of(
    query: Query, verdicts: pd.Series, vector: SteeringVector
) -> tuple[SteeredContext, ...]:
    """A query's contexts with one follow-up and one other turn each, by verdicts (1, 0, NaN without
    one; by :data:`KEY`), steered where a vector says."""
    turns = query.turns[(query.turns["temperature"] > 0) & (query.turns["token_ids"].map(len) > 0)]
    keys = pd.MultiIndex.from_frame(turns[KEY])
    turns = turns.assign(label=verdicts.reindex(keys).to_numpy(dtype=float)).dropna(subset="label")
    order = {"label": False, "temperature": False, "sample": True}  # follow-ups first
    turns = turns.sort_values(list(order), ascending=list(order.values()), kind="stable")
    found = []
    for k, mine in turns.drop_duplicates(["followed", "label"]).groupby("followed"):
        if len(mine) == 2:
            both = [ids.tolist()[:TOKENS] for ids in mine["token_ids"]]
            found.append(steered_context(query, k, vector, both))
    return tuple(found[:RESPONSES])


class Steering(Experiment):
    name = "steering"
    judged = True
    queries_used = 40
    columns: ClassVar = {"dataset": "str", "term": "str", "draw": "Int64"}

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
        half = halves_of([query.source for query, _ in used], self.args.seed)
        self.choosing, self.reporting = (
            [one for one in used if half[one[0].source] == number] for number in (0, 1)
        )
        own = self.vector.direction.double().numpy()
        self.directions = tuple(tuple(one.tolist()) for one in (own, *self._others(own)))

    def _others(self, own: np.ndarray) -> np.ndarray:
        """``[OTHERS, d_model]`` that the direction is compared with; UserError if none fit."""
        last = OTHERS, self.args.seed
        if self.probe is None:
            states = centred_states(self.runs, self.vector.layer, self.vector.positions)
            return random_directions(states, own, *last)
        from probes.dataset import RUN, read

        card, judge = self.probe.card, self.verdicts.judge
        asked, layer, position = card["asked"], self.vector.layer, card["position"]
        how = asked.get("target", "rate"), [position], [layer], asked.get("within", RUN)
        data = read(self.runs, judge, *how)
        fitted = {run.get("identity") for run in asked["runs"]}
        if (asked.get("judge"), fitted) != (judge, {run.identity_digest for run in self.runs}):
            self.notes.append(f"p is rough: {PERMUTED} aren't of the probe's own runs or labels.")
        if not np.ptp(data.outcome.rate):
            problem = "all conversations here have the same rate, so that no probe can be fitted"
            raise UserError(problem, "give the runs that the probe was fitted to, or --vector")
        states, penalty = data.at(layer, position), float(card["penalty"])
        return permuted_probes(states, data.outcome, penalty, *last)

    def _vector(self) -> SteeringVector:
        """The direction; refused if it is of another model, or steers no token before the turn."""
        from probes.card import Probe

        self.probe, self.others = None, RANDOM
        if self.args.vector is not None:
            vector = replace(SteeringVector.load(self.args.vector), kind=ADD)
        else:
            self.probe, self.others = Probe.load(self.args.probe), PERMUTED
            vector = vector_of_probe(self.probe, self.args.probe)
            self.notes.append("the probe was fitted to all queries, reported ones among them.")
        model = self.runs[0].model
        vector.check_weights(model["weights_hash"])
        names = self.runs[0].contexts["positions"].iloc[0]
        vector.check(model["layers"], model["d_model"], list(names))
        if set(vector.positions) == {TURN}:
            alone = "steering the turn's tokens alone leaves the next token at the header as it is"
            raise UserError(alone, "give a vector with a position of the header, too")
        return vector

    def _contexts(self) -> list[tuple[Query, tuple[SteeredContext, ...]]]:
        """The queries with turns to compare, each with its contexts."""
        judged = self.verdicts
        keys = judged.turns[KEY].astype({"run": object, "context_id": object})
        verdicts = pd.Series(judged.turns["follow_up"].to_numpy(), pd.MultiIndex.from_frame(keys))
        each = [(query, contexts_of(query, verdicts, self.vector)) for query in self.queries]
        used = [one for one in each if one[1]]
        which = "response after which the judge calls some turns follow-ups and not others"
        if len(used) < 4:
            few = f"{len(used)} queries have a {which}"
            raise UserError(few, "sample more turns (--samples), or more queries")
        if less := len(each) - len(used):
            self.notes.append(f"{less} queries have no {which}; they are left out.")
        return used

    # -- measure ----------------------------------------------------------------------------------

    def units(self) -> list[Dosing | Steered]:
        """All units, for ``--dry-run``: each direction has dose 1, as doses aren't known yet."""
        return [self.dosing(), *self.steered(np.ones(len(self.directions)))]

    def dosing(self) -> Dosing:
        """The search for all doses, on the half that chooses."""
        contexts = tuple(one for _, some in self.choosing for one in some)
        rounds, each = 6, len(self.directions)  # until most directions have their KL, about
        tokens = rounds * sum(one.start + each * (len(one.ids) - one.start) for one in contexts)
        return Dosing("all that choose", "", tokens, contexts, self.directions, self.args.kl)

    def steered(self, doses: np.ndarray) -> list[Steered]:
        """The queries of the other half under the directions that have a dose."""
        there = np.flatnonzero(~np.isnan(doses))
        arms = tuple(self.directions[n] for n in there), tuple(doses[there].tolist())
        found = []
        for query, contexts in self.reporting:
            tokens = sum(one.start + one.scored * (len(there) + 1) for one in contexts)
            found.append(Steered(query.source, query.dataset, tokens, contexts, *arms))
        return found

    def rows(self) -> pd.DataFrame:
        """The turns of one half under the doses that the other has chosen."""
        found = self.measure_units([self.dosing()], "doses of one KL")["dose"].to_numpy()
        reached = int((~np.isnan(found[1:])).sum())
        if np.isnan(found[0]) or reached < LEAST:
            few = f"{reached} of {OTHERS} {self.others} reach"
            raise UserError(
                f"{'the direction does not reach' if np.isnan(found[0]) else few} a KL of "
                f"{self.args.kl:g} nats at doses up to {MOST_DOSE:g}",
                "give another --kl, layer or position",
            )
        if reached < OTHERS:
            left_out = f"{OTHERS - reached} {self.others} don't reach the KL"
            self.notes.append(f"{left_out}; they are left out.")
        self.vector = replace(self.vector, dose=float(found[0]))
        return self.measure_units(self.steered(found), "turns under directions")

    # -- say --------------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        return estimates(rows, self.options)

    def tables(self, found: pd.DataFrame) -> list[Table]:
        columns = {ODDS: "log-odds", BEYOND: "beyond others", RANK: "reached by"}
        return tables_of(
            f"what moves the turns, at one KL ({self.intervals} that chose nothing)",
            found[found["term"] != OTHER],
            {name: (head, 2) for name, head in columns.items()} | {KL: ("KL", 3)},
            index=("dataset", "term"),
            legend="log-odds: change, in nats, of those of follow-ups against other "
            f"turns; other directions: {self.others}; beyond others: minus their mean; reached by: "
            "the share of these that change them as much; KL: of the first token's distribution, "
            "in nats.",
        )

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        title = f"{self.runs[0].model['name']} · directions of one KL"
        rows = all_datasets(only(found, ODDS)).copy()
        rows[["low", "high"]] = rows[["low", "high"]].where(rows["term"] != OTHER)
        change = "log-odds of follow-ups, change, nats"
        return {"directions": Bars(title, change, rows)}

    def files(self) -> dict[str, Callable[[Path], None]]:
        return {FILE: self.vector.save}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        self.notes.append(
            f"To sample turns under it, give ia-mech sample --intervention {self.folder / FILE}."
        )
        whole = all_datasets(found)
        beyond, rank = (only(whole, name).iloc[0] for name in (BEYOND, RANK))
        kl, of_others = (
            only(whole, KL, term=term)["value"].item() for term in (DIRECTION, OTHER_MEAN)
        )
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
            f"much, {p_value(rank['p'])} (the least there can be: {least:.3f}). KL "
            f"at the header: {kl:.3f} nats, that of the others {of_others:.3f}. "
            f"{UNFITTED if self.probe is None else ''}{self.gate.short}."
        )
        return Conclusion(sentence, control)


main = Steering.main

if __name__ == "__main__":
    sys.exit(main())
