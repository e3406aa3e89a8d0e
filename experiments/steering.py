"""Can a direction in the residual stream move the user's turns, more than random directions do?

The logistic direction of a probe (--probe) is added to the residual stream where the probe reads,
or that of a file (--vector) where the file says, and the run's turns are scored again. Do turns
that the judge accepts become likelier than other turns after the same context? Half of the queries
choose the dose, among those that change the first token's distribution little (by KL); results are
of the other half. Controls have the same KL: random directions with the covariance of the states; a
constant added to the first token's logits; and a direction optimised by gradient on the first half,
which shows whether any direction could move these turns.

Needs: a judged run with several sampled turns per context. Cost: half an hour on a CPU (135M).

    ia-mech probes cache/RUN
    ia-mech steering cache/RUN --probe cache/RUN/results/probe-rate-rules
    ia-mech steering cache/RUN --vector my.safetensors --doses 0.1 0.2 0.4
    ia-mech sample … --intervention cache/RUN/results/steering/vector.safetensors
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from experiments.directions import (
    BATCH,
    BIAS,
    DIRECTION,
    OPTIMISED,
    RANDOM,
    STEPS,
    Change,
    ControlSearch,
    ScoredQuery,
    SteeredContext,
    find_controls,
    random_directions,
    steered_context,
    steering_effects,
)
from experiments.experiment import Conclusion, Experiment, Model, Unit, flag
from experiments.figures import Bars, Drawing
from experiments.tables import sentence_of, tables_of
from ia_mech.cli import above_zero, path_of
from ia_mech.errors import UserError
from ia_mech.estimates import Group, TidyEstimate, all_datasets, by_dataset, p_value, paired_row
from ia_mech.results import Table
from ia_mech.run.queries import Query, subsample
from ia_mech.stats import Estimate, permutation_p
from ia_mech.steering import ADD, TURN, SteeringVector

if TYPE_CHECKING:
    from probes.card import Probe

DOSES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
CONTROLS = 39  # random directions
LEAST, SIGNIFICANT = 19, 0.05  # random directions with which such a p can be reached
RESPONSES = 3  # most contexts of a query
TOKENS = 24  # of a turn: nearly all of the bits come before (docs/locate.md)
CHOOSING, REPORTING = "choosing", "reporting"  # halves of the sources
RANDOM_MEAN = "random directions"  # their mean
KL, ODDS = "KL at the header", "log-odds, change"
BEYOND, RANK = "log-odds, change beyond random directions'", "share of random directions that reach"
ARM = ["term", "draw", "dose"]
FILE = "vector.safetensors"


# -- estimate --------------------------------------------------------------------------------------


def chosen_dose(rows: pd.DataFrame, most_kl: float) -> float:
    """The dose that raises the log-odds most, among those whose mean KL is at most ``most_kl``
    nats; the smallest if none's is. Each source weighs the same.

    Args:
        rows: of :func:`steering_effects`, of one direction and the sources that choose.
        most_kl: in nats.
    """
    each = rows.groupby(["dose", "source"])[["log_odds", "kl"]].mean()
    of = each.groupby("dose").mean()
    within = of[of["kl"] <= most_kl]
    return float(of.index.min() if within.empty else within["log_odds"].idxmax())


def estimates(rows: pd.DataFrame, dose: float, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """Every estimate; each source weighs the same.

    Args:
        rows: of :func:`steering_effects`, all arms, of the half that chose nothing, with ``source``
            and ``dataset``.
        dose: of the direction, that was chosen.
        options: ``level``, ``resamples`` and ``seed``.
    """
    for dataset, here in by_dataset(rows):
        means = rows[here].groupby([*ARM, "source"], sort=False)[["kl", "log_odds"]].mean()
        drawn = means.xs(RANDOM, level="term")
        random = drawn.groupby("source", sort=False).mean()
        arms = {tuple(key): arm.droplevel(ARM) for key, arm in means.groupby(ARM, sort=False)}
        for (term, draw, at), arm in [*arms.items(), ((RANDOM_MEAN, None, None), random)]:
            names = {"dataset": dataset, "term": term, "draw": draw, "dose": at}
            group = Group(arm.index.to_numpy(), options, names)
            kl = group.mean(KL, arm["kl"])
            yield replace(kl, estimate=kl.estimate.clip(0.0))
            yield group.mean(ODDS, arm["log_odds"])
            if term in (OPTIMISED, BIAS) or (term == DIRECTION and at == dose):
                yield from _differences_from_random(
                    arm["log_odds"], drawn["log_odds"], random["log_odds"], group
                )


def _differences_from_random(
    arm: pd.Series, drawn: pd.Series, random: pd.Series, group: Group
) -> Iterator[TidyEstimate]:
    """An arm's log-odds by source against those of the random directions: their mean, and each."""
    both = arm.to_numpy(), arm.index.to_numpy(), random.to_numpy(), random.index.to_numpy()
    yield paired_row(group, BEYOND, *both)
    each, whole = drawn.groupby("draw").mean().to_numpy(), float(arm.mean())
    share = Estimate(float((each >= whole).mean()), np.nan, np.nan, len(arm), "count")
    p = float(permutation_p(whole, each))
    yield group.row(RANK, share, len(each), p=p, test="rank among random directions")


# -- say -------------------------------------------------------------------------------------------


def against_random(found: pd.DataFrame, term: str) -> pd.DataFrame:
    """How an arm stands against the random directions, by quantity: :data:`BEYOND`,
    :data:`RANK`."""
    mine = all_datasets(found[found["quantity"].isin([BEYOND, RANK])])
    return mine[mine["term"] == term].set_index("quantity", drop=False)


def is_shown(found: pd.DataFrame, term: str) -> bool:
    """Whether an arm raises the log-odds: more than the mean of the random directions does, by
    flipping signs over sources, and more than nearly all of them."""
    mine = against_random(found, term)
    return bool(mine["value"][BEYOND] > 0 and mine["p"].max() <= SIGNIFICANT)


def arm_sentence(found: pd.DataFrame, term: str, level: float) -> str:
    """How far an arm goes beyond random directions, with tests and the least p there can be."""
    mine = against_random(found, term)
    count = int(mine["rows"][RANK])
    change = sentence_of(
        "change of their log-odds beyond the mean of random directions, nats",
        mine.loc[[BEYOND]],
        null=0.0,
        level=level,
    )
    return (
        f"{change[:-1]}, {p_value(mine['p'][BEYOND])}; {round(mine['value'][RANK] * count)} of "
        f"{count} random directions reach it, {p_value(mine['p'][RANK])} (the least there can be: "
        f"{1 / (count + 1):.3f})."
    )


# -- what runs hold --------------------------------------------------------------------------------


def vector_of_probe(probe: "Probe", path: Path) -> SteeringVector:
    """A probe's logistic direction, to be added where the probe reads.

    Raises:
        UserError: its card, made by hand, doesn't say of which model it is.
    """
    import torch

    card = probe.card
    try:
        model, where = card["asked"]["runs"][0]["model"], (int(card["layer"]), (card["position"],))
        weights = torch.from_numpy(probe.directions["logistic"].weights)
        return SteeringVector(ADD, *where, weights, 1.0, model["name"], model["weights_hash"])
    except (LookupError, TypeError, ValueError):
        raise UserError(
            f"the probe {path} doesn't say which direction of which model it is",
            "write the probe again with ia-mech probes, or give --vector",
        ) from None


def contexts_of(
    query: Query, labels: pd.Series, vector: SteeringVector
) -> tuple[SteeredContext, ...]:
    """A query's contexts after which the judge accepts a turn and another not, with one of each.

    Args:
        query: with sampled turns.
        labels: 1 of accepted turns, 0 of others, NaN without a verdict, by ``run``,
            ``context_id``, ``temperature`` and ``sample``.
        vector: whose layer and positions are steered.

    Raises:
        UserError: a context lacks a position.
    """
    turns = query.turns[(query.turns["temperature"] > 0) & (query.turns["token_ids"].map(len) > 0)]
    keys = pd.MultiIndex.from_frame(turns[["run", "context_id", "temperature", "sample"]])
    turns = turns.assign(label=labels.reindex(keys).to_numpy(dtype=float)).dropna(subset="label")
    order = {"label": False, "temperature": False, "sample": True}  # accepted turns first
    turns = turns.sort_values(list(order), ascending=list(order.values()), kind="stable")
    found = []
    for k, mine in turns.drop_duplicates(["followed", "label"]).groupby("followed"):
        if len(mine) < 2:
            continue
        both = [ids.tolist()[:TOKENS] for ids in mine["token_ids"]]
        found.append(steered_context(query, k, vector, both))
    return tuple(found[:RESPONSES])


class Steering(Experiment):
    """See the module.

    Attributes:
        vector: along which the model is steered, once it is read with the chosen dose.
        outcome: what is accepted: ``genuine`` or ``grounded`` turns.
        used: the queries with turns to compare, of each its half and its contexts.
    """

    name = "steering"
    judged = True
    queries_used = 40
    columns: ClassVar = {"dataset": "str", "term": "str", "draw": "Int64", "dose": "float64"}

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        along = parser.add_mutually_exclusive_group(required=True)
        along.add_argument(
            "--probe", type=path_of, metavar="PROBE", help="what ia-mech probes wrote"
        )
        along.add_argument("--vector", type=path_of, metavar="FILE", help="a steering vector's")
        add, most = (
            partial(flag, parser),
            "the dose is chosen among those of at most this KL at the header",
        )
        add("--doses", above_zero, DOSES, "in norms of the state", nargs="+", metavar="D")
        add("--most-kl", above_zero, 0.5, f"{most} at the header", metavar="NATS")

    # -- read -------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the direction, the verdicts, the contexts and the states."""
        self.vector, self.outcome = self._vector()
        self.used = self._contexts()
        self.states = self._states()

    def _vector(self) -> tuple[SteeringVector, str]:
        """The direction, and what the judge of its probe accepts.

        Raises:
            UserError: it is of another model, or nothing is steered before the turn's first token.
        """
        from probes.card import Probe
        from probes.targets import GROUNDED

        outcome = "genuine"
        if self.args.vector is not None:
            vector = replace(SteeringVector.load(self.args.vector), kind=ADD)
        else:
            probe = Probe.load(self.args.probe)
            vector = vector_of_probe(probe, self.args.probe)
            if probe.card["asked"].get("target") == GROUNDED:
                outcome = GROUNDED
            self.notes.append("the probe was fitted to all sources, reported ones among them.")
        model = self.runs[0].model
        vector.check_weights(model["weights_hash"])
        names = self.runs[0].contexts["positions"].iloc[0]
        vector.check(model["layers"], model["d_model"], list(names))
        if set(vector.positions) == {TURN}:
            raise UserError(
                "steering the turn's tokens alone leaves the next token at the header as it is",
                "give a vector with a position of the header, too",
            )
        return vector, outcome

    def _contexts(self) -> list[tuple[Query, str, tuple[SteeredContext, ...]]]:
        """The queries with turns to compare, of each its half and its contexts.

        Raises:
            UserError: verdicts don't have the outcome; fewer than four queries have such turns.
        """
        judged = self.verdicts
        if self.outcome not in judged.outcomes:
            raise UserError(
                f"judge {judged.judge!r} doesn't test whether turns are {self.outcome}",
                "give --judge one that does, or another probe",
            )
        self.gate = judged.gates[self.outcome]
        keys = judged.turns[["run", "context_id", "temperature", "sample"]].astype(
            {"run": object, "context_id": object}
        )
        labels = pd.Series(judged.turns[self.outcome].to_numpy(), pd.MultiIndex.from_frame(keys))
        found = {query.source: contexts_of(query, labels, self.vector) for query in self.queries}
        used = [query for query in self.queries if found[query.source]]
        if len(used) < 4:
            raise UserError(
                f"{len(used)} queries have a response after which the judge accepts some turns "
                "and not others",
                "sample more turns (--samples), or more queries",
            )
        if less := len(self.queries) - len(used):
            self.notes.append(
                f"{less} queries have no response after which the judge accepts some turns and not "
                "others; they are left out."
            )
        choosing = {one.source for one in subsample(used, len(used) // 2, self.args.seed + 1)}
        return [
            (query, CHOOSING if query.source in choosing else REPORTING, found[query.source])
            for query in used
        ]

    def _states(self) -> np.ndarray:
        """``[contexts, d_model]`` of all contexts, where the first position is steered, less each
        run's mean."""
        position = next(name for name in self.vector.positions if name != TURN)
        found = []
        for run in self.runs:
            own = run.residuals(self.vector.layer, position).double().numpy()
            found.append(own - own.mean(0))
        return np.concatenate(found)

    # -- measure ----------------------------------------------------------------------------------

    def units(self) -> list[Unit]:
        """All, as far as it is known before; for ``--dry-run``."""
        search = self.search_unit(1.0, self.args.most_kl)
        return [*self.dose_units(), search, *self.scoring_units(REPORTING, search.random)]

    def dose_units(self) -> list[ScoredQuery]:
        """All queries under all doses of the direction."""
        arms = [self.direction_arm(dose) for dose in sorted(set(self.args.doses))]
        return [*self.scoring_units(CHOOSING, arms), *self.scoring_units(REPORTING, arms)]

    def direction_arm(self, dose: float) -> Change:
        """The direction at a dose."""
        return Change(DIRECTION, dose, tuple(self.vector.direction.tolist()))

    def scoring_units(self, half: str, arms: Sequence[Change]) -> list[ScoredQuery]:
        """The queries of a half under arms."""
        found = []
        for query, own, contexts in self.used:
            if own == half:
                tokens = sum(one.scored for one in contexts) * (len(arms) + 1)
                names = query.source, query.dataset, tokens, half
                found.append(ScoredQuery(*names, contexts, tuple(arms)))
        return found

    def search_unit(self, dose: float, kl: float) -> ControlSearch:
        """The controls of a dose with this KL, on the half that chooses."""
        along = self.vector.direction.double().numpy()
        drawn = random_directions(self.states, along, CONTROLS, self.args.seed)
        random = tuple(
            Change(RANDOM, dose, tuple(one.tolist()), draw=n) for n, one in enumerate(drawn)
        )
        contexts = tuple(one for _, half, some in self.used if half == CHOOSING for one in some)
        tokens = 4 * sum(one.scored for one in contexts)
        tokens += STEPS * min(BATCH, len(contexts)) * contexts[0].scored
        tokens += 3 * len(random) * sum(len(one.ids) - one.start + 1 for one in contexts)
        names = "all that choose", "", tokens
        return ControlSearch(*names, contexts, self.direction_arm(dose), kl, random, self.args.seed)

    def measure(self, model: Model, unit: Any) -> pd.DataFrame:
        run = steering_effects if isinstance(unit, ScoredQuery) else find_controls
        return run(model, unit)

    def rows(self) -> pd.DataFrame:
        """Doses first, on both halves; then controls with the KL of the chosen dose.

        Raises:
            UserError: too few random directions reach that KL.
        """
        doses = self.measure_units(self.dose_units(), "doses of the direction")
        choosing = doses[doses["half"] == CHOOSING]
        dose = chosen_dose(choosing, self.args.most_kl)
        self.vector = replace(self.vector, dose=dose)
        kl = float(choosing[choosing["dose"] == dose].groupby("source")["kl"].mean().mean())
        made = self.measure_units([self.search_unit(dose, kl)], "controls of the same KL")
        arms = [
            Change(one.term, one.dose, tuple(one.direction), tuple(one.bias), one.draw)
            for one in made.itertuples()
        ]
        if less := CONTROLS + 2 - len(arms):
            self.notes.append(f"{less} controls are left out: they don't reach the KL of the dose.")
        if (none := Change(OPTIMISED, 0.0)) in arms:
            arms.remove(none)
            self.notes.append(
                f"no direction is optimised: the passes of {self.runs[0].model['name']} have no "
                "gradient (recurrent layers change their state in place)."
            )
        best = [np.array(arm.direction) for arm in arms if arm.term == OPTIMISED]
        if (reached := sum(arm.term == RANDOM for arm in arms)) < LEAST:
            raise UserError(
                f"{reached} random directions reach the KL of dose {dose:g} ({kl:.2g} nats)",
                "give other --doses, or another layer or position",
            )
        if best:
            own = self.vector.direction.numpy()
            cosine = float(best[0] @ own / np.linalg.norm(own))
            self.notes.append(f"the cosine of the optimised direction to it is {cosine:.2f}.")
        controls = self.measure_units(self.scoring_units(REPORTING, arms), "turns under controls")
        return pd.concat([doses, controls], ignore_index=True)

    # -- say --------------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        return estimates(rows[rows["half"] == REPORTING], self.vector.dose, self.options)

    def tables(self, found: pd.DataFrame) -> list[Table]:
        here = f"{100 * self.args.level:g}% intervals over the sources that chose nothing"
        own = found["term"] == DIRECTION
        made = tables_of(
            f"what moves the turns, at the KL of dose {self.vector.dose:g} ({here})",
            found[self._alike(found) & (found["term"] != RANDOM)],
            {
                ODDS: ("log-odds", 2),
                BEYOND: ("beyond random", 2),
                RANK: ("reached by", 2),
                KL: ("KL", 3),
            },
            index=("dataset", "term"),
            legend=f"log-odds: change, in nats, of those of {self.outcome} turns against others; "
            "beyond random: less the mean of the random directions; reached by: "
            "the share of these that change them as much; KL: of the first token's distribution, "
            "in nats.",
        )
        made += tables_of(
            f"the direction, by dose ({here}; {self.vector.dose:g} was chosen by the others)",
            found[own],
            {KL: ("KL", 3), ODDS: ("log-odds", 2)},
            index=("dataset", "dose"),
            legend="dose: what is added, in norms of the state.",
        )
        return made

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        title = f"{self.runs[0].model['name']} · directions of the same KL"
        rows = all_datasets(found[(found["quantity"] == ODDS) & self._alike(found)])
        rows[["low", "high"]] = rows[["low", "high"]].where(rows["term"] != RANDOM)
        return {"controls": Bars(title, "log-odds of accepted turns, change, nats", rows)}

    def _alike(self, found: pd.DataFrame) -> pd.Series:
        """Estimates of the arms of one KL: all but the direction at other doses."""
        return (found["term"] != DIRECTION) | (found["dose"] == self.vector.dose)

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"arms": rows}

    def files(self) -> dict[str, Callable[[Path], None]]:
        return {FILE: self.vector.save}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        level, there = self.args.level, set(found["term"])
        self.notes.append(
            "next: what the model writes under it: ia-mech sample … --intervention "
            f"{self.folder / FILE}; then ia-mech judge run, and ia-mech rates."
        )
        own = all_datasets(found[(found["term"] == DIRECTION) & (found["quantity"] == KL)])
        kl = own.loc[own["dose"] == self.vector.dose, "value"].item()
        verb = "makes" if is_shown(found, DIRECTION) else "isn't shown to make"
        sentence = (
            f"Steering along the direction in layer {self.vector.layer} at "
            f"{', '.join(self.vector.positions)} (dose {self.vector.dose:g}) {verb} {self.outcome} "
            f"turns likelier than random directions of the same KL ({kl:.3f} nats) do. "
            f"{arm_sentence(found, DIRECTION, level)}"
        )
        control = "No optimised direction stands beside it: whether one could isn't known."
        if OPTIMISED in there:
            verb = "does" if is_shown(found, OPTIMISED) else "isn't shown to"
            control = (
                f"A direction that was optimised for that there, on other sources, {verb}. "
                f"{arm_sentence(found, OPTIMISED, level)}"
            )
        if BIAS in there:
            control += f" A bias of the first token alone: {arm_sentence(found, BIAS, level)}"
        return Conclusion(sentence, control)


main = Steering.main

if __name__ == "__main__":
    sys.exit(main())
