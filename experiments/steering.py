"""Can a direction in the residual stream move the user's turns, more than random directions do?

The direction of a probe (--probe), or of a file (--vector), is added to the residual stream at
tokens of one layer, and the run's turns are scored again. Do turns that the judge accepts become
likelier than other turns after the same context? Half of the queries choose the dose, among those
that change the first token's distribution little (by KL); results are of the other half. Controls
have the same KL: random directions with the covariance of the states; a constant added to the first
token's logits; and a direction optimised by gradient on the first half, which shows whether any
direction could move these turns.

Needs: a judged run with several sampled turns per context. Cost: half an hour on a CPU (135M).

    python -m probes.train cache/RUN
    python -m experiments.steering cache/RUN --probe cache/RUN/results/probe-rate-rules
    python -m experiments.steering cache/RUN --vector my.safetensors --doses 0.1 0.2 0.4
    python -m ia_mech.sample … --intervention cache/RUN/results/steering/vector.safetensors
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import torch

from experiments.directions import (
    BATCH,
    STEPS,
    Arm,
    Context,
    DirectionSearch,
    SteeredContexts,
    arms_of_equal_kl,
    chance_cosine,
    optimise_direction,
    random_directions,
    steering_effects,
)
from experiments.experiment import Conclusion, Experiment, Model, Unit
from experiments.tables import sentence_of, tables_of
from ia_mech.cli import nonblank, path_of, whole_from
from ia_mech.errors import UserError
from ia_mech.estimates import Group, TidyEstimate, all_datasets, by_dataset, p_value, paired_row
from ia_mech.stats import Estimate, permutation_p
from ia_mech.steering import ADD, TURN, SteeringVector

if TYPE_CHECKING:
    from experiments.figures import Drawing
    from ia_mech.results import Table
    from ia_mech.run import Run
    from ia_mech.run.queries import Query
    from probes.card import Probe

DOSES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
LEAST, SIGNIFICANT = 19, 0.05  # random directions with which such a p can be reached
RESPONSES = 3  # most contexts of a query
TOKENS = 24  # of a turn: nearly all of the bits come before (docs/reaction.md)
CHOOSING, REPORTING = "choosing", "reporting"  # halves of the sources
DIRECTION, OPTIMISED, BIAS = "the direction", "optimised by gradient", "bias of the first token"
RANDOM, EACH = "random directions", "random direction"  # their mean, and each of them
KL, ODDS, LOGP = "KL at the header", "log-odds, change", "log p a token, change"
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
    each = rows.groupby(["dose", "source"])[["odds", "kl"]].mean()
    of = each.groupby("dose").mean()
    within = of[of["kl"] <= most_kl]
    return float(of.index.min() if within.empty else within["odds"].idxmax())


def estimates(rows: pd.DataFrame, dose: float, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """Every estimate; each source weighs the same.

    Args:
        rows: of :func:`steering_effects`, all arms, with ``source`` and ``dataset``.
        dose: of the direction, that was chosen.
        options: ``level``, ``resamples`` and ``seed``.
    """
    for dataset, here in by_dataset(rows):
        for half in (CHOOSING, REPORTING):
            mine = rows[here & (rows["half"] == half)]
            means = mine.groupby([*ARM, "source"], sort=False)[["kl", "odds", "logp"]].mean()
            names = {"dataset": dataset, "half": half}
            drawn = means[means.index.get_level_values("term") == EACH]
            for key, arm in means.groupby(ARM, sort=False):
                yield from _of_arm(arm, names | dict(zip(ARM, key, strict=True)), options)
            if drawn.empty:
                continue
            mean = drawn.groupby("source", sort=False).mean()
            yield from _of_arm(mean, names | {"term": RANDOM}, options)
            for term in (DIRECTION, OPTIMISED, BIAS):
                own = means[means.index.get_level_values("term") == term].droplevel(
                    ["term", "draw"]
                )
                if term == DIRECTION:
                    own = own.xs(dose, level="dose", drop_level=False)
                if len(own):
                    at = {"term": term, "dose": own.index[0][0]}
                    yield from _beyond_random(own["odds"], drawn["odds"], names | at, options)


def _of_arm(
    arm: pd.DataFrame, names: dict[str, Any], options: dict[str, Any]
) -> Iterator[TidyEstimate]:
    """Of one row per source."""
    group = Group(arm.index.get_level_values("source").to_numpy(), options, names)
    kl = group.mean(KL, arm["kl"])
    yield replace(kl, estimate=kl.estimate.clip(0.0))
    yield group.mean(ODDS, arm["odds"])
    yield group.mean(LOGP, arm["logp"])


def _beyond_random(
    own: pd.Series, drawn: pd.Series, names: dict[str, Any], options: dict[str, Any]
) -> Iterator[TidyEstimate]:
    """An arm's log-odds by source against those of each random direction."""
    by_source = drawn.groupby("source", sort=False).mean()
    group = Group(np.array([]), options, names)
    sources = own.index.get_level_values("source").to_numpy(), by_source.index.to_numpy()
    yield paired_row(group, BEYOND, own.to_numpy(), sources[0], by_source.to_numpy(), sources[1])
    each = drawn.groupby("draw").mean().to_numpy()
    whole = float(own.mean())
    share = Estimate(float((each >= whole).mean()), np.nan, np.nan, len(own), "count")
    p = float(permutation_p(whole, each))
    yield group.row(RANK, share, len(each), p=p, test="rank among random directions")


# -- say -------------------------------------------------------------------------------------------


def is_shown(found: pd.DataFrame, term: str) -> bool:
    """Whether an arm raises the log-odds: more than the mean of the random directions does, by
    flipping signs over sources, and more than nearly all of them."""
    mine = _reported_rows(found, term).set_index("quantity")
    more, rank = mine.loc[BEYOND], mine.loc[RANK]
    return bool(more["value"] > 0 and max(more["p"], rank["p"]) <= SIGNIFICANT)


def _reported_rows(found: pd.DataFrame, term: str) -> pd.DataFrame:
    """What is compared of an arm, on the sources that chose nothing."""
    mine = all_datasets(found)
    mine = mine[(mine["term"] == term) & (mine["half"] == REPORTING)]
    return mine[mine["quantity"].isin([BEYOND, RANK])]


def arm_sentence(found: pd.DataFrame, term: str, level: float) -> str:
    """How far an arm goes beyond random directions, with tests and the least p there can be."""
    mine = _reported_rows(found, term)
    more, rank = (mine[mine["quantity"] == name].iloc[0] for name in (BEYOND, RANK))
    count = int(rank["rows"])
    change = sentence_of(
        "change of their log-odds beyond the mean of random directions, nats",
        mine[mine["quantity"] == BEYOND],
        null=0.0,
        level=level,
    )
    return (
        f"{change[:-1]}, {p_value(more['p'])}; {round(rank['value'] * count)} of {count} random "
        f"directions reach it, {p_value(rank['p'])} (the least there can be: "
        f"{1 / (count + 1):.3f})."
    )


# -- what runs hold --------------------------------------------------------------------------------


def vector_of_probe(
    probe: "Probe", path: Path, direction: str, runs: "Sequence[Run]"
) -> SteeringVector:
    """A probe's direction, to be added where the probe reads.

    Raises:
        UserError: there is no such direction; the probe is of another model than the runs.
    """
    if direction not in probe.directions:
        raise UserError(
            f"the probe {path} has no direction {direction!r}",
            f"give --direction {' or '.join(probe.directions)}",
        )
    try:
        models = [run["model"] for run in probe.card["asked"]["runs"]]
        layer, position = int(probe.card["layer"]), str(probe.card["position"])
        known = {model["weights_hash"]: model["name"] for model in models}
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"the card of the probe {path} doesn't say where it is from",
            "write the probe again with probes.train, or give --vector",
        ) from None
    wanted = runs[0].model
    if wanted["weights_hash"] not in known:
        raise UserError(
            f"the probe {path} is of {', '.join(known.values())}, the runs are of "
            f"{wanted['name']} with other weights",
            "give a probe that was trained on runs of this model",
        )
    weights = torch.from_numpy(probe.directions[direction].weights)
    return SteeringVector(
        ADD, layer, (position,), weights, 1.0, wanted["name"], wanted["weights_hash"]
    )


def contexts_of(query: "Query", labels: pd.Series, vector: SteeringVector) -> tuple[Context, ...]:
    """A query's contexts after which the judge accepts a turn and another not, with one of each.

    Args:
        query: with sampled turns.
        labels: 1 of accepted turns, 0 of others, NaN without a verdict, by ``run``,
            ``context_id``, ``temperature`` and ``sample``.
        vector: whose layer and positions are steered.

    Raises:
        UserError: a context lacks a position.
    """
    turns = query.turns[
        (query.turns["temperature"] > 0) & (query.turns["token_ids"].map(len) > 0)
    ].sort_values(["temperature", "sample"], ascending=[False, True], kind="stable")
    keys = pd.MultiIndex.from_frame(turns[["run", "context_id", "temperature", "sample"]])
    turns = turns.assign(label=labels.reindex(keys).to_numpy(dtype=float)).dropna(subset="label")
    found = []
    for k, mine in turns.drop_duplicates(["followed", "label"]).groupby("followed"):
        if len(mine) < 2:
            continue
        named = query.contexts["positions"].iloc[k]
        places = {name: None if pd.isna(at) else int(at) for name, at in named.items()}
        at = sorted({at for one in vector.at_context(places) for at in one.positions})
        ids = tuple(tuple(ids.tolist()[:TOKENS]) for ids in mine["token_ids"])
        site = vector.layer, tuple(at), TURN in vector.positions
        found.append(Context(query.token_ids[k], *site, ids, tuple((mine["label"] == 1).tolist())))
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
    columns: ClassVar = {
        "dataset": "str",
        "term": "str",
        "draw": "Int64",
        "dose": "float64",
        "half": "str",
    }

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        along = parser.add_mutually_exclusive_group(required=True)
        along.add_argument("--probe", type=path_of, metavar="PROBE", help="what probes.train wrote")
        along.add_argument("--vector", type=path_of, metavar="FILE", help="a steering vector's")
        parser.add_argument(
            "--direction",
            type=nonblank,
            default="logistic",
            metavar="NAME",
            help="of the probe: logistic or mass-mean (default: logistic)",
        )
        parser.add_argument(
            "--layer", type=whole_from(0), metavar="L", help="0 = embeddings (default: the probe's)"
        )
        parser.add_argument(
            "--positions",
            nargs="+",
            metavar="NAME",
            help="tokens such as header_last; turn: each of the turn's (default: the probe's)",
        )
        parser.add_argument(
            "--doses",
            type=float,
            nargs="+",
            metavar="D",
            default=DOSES,
            help=f"in norms of the state (default: {' '.join(f'{dose:g}' for dose in DOSES)})",
        )
        parser.add_argument(
            "--most-kl",
            type=float,
            default=0.5,
            metavar="NATS",
            help="the dose is chosen among those of at most this KL at the header (default: 0.5)",
        )
        parser.add_argument(
            "--controls",
            type=int,
            default=39,
            metavar="N",
            help=f"random directions, at least {LEAST} (default: 39)",
        )

    # -- read -------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the direction, the verdicts, the contexts and the states."""
        if not all(isfinite(dose) and dose > 0 for dose in self.args.doses):
            raise UserError("--doses must be above 0, and finite", "give some: 0.5 1 2")
        if self.args.controls < LEAST:
            raise UserError(
                f"with --controls {self.args.controls} p would be at least "
                f"{1 / (max(self.args.controls, 0) + 1):.2f}",
                f"give {LEAST} or more, with which {SIGNIFICANT} can be reached",
            )
        if not self.args.most_kl > 0:
            raise UserError(f"--most-kl {self.args.most_kl:g}: no dose has so little", "give 0.5")
        self.vector, self.outcome = self._vector()
        self._read_contexts()
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
            vector = vector_of_probe(probe, self.args.probe, self.args.direction, self.runs)
            if probe.card["asked"].get("target") == GROUNDED:
                outcome = GROUNDED
            self.notes.append("the probe was fitted to all sources, reported ones among them.")
        if self.args.layer is not None:
            vector = replace(vector, layer=self.args.layer)
        if self.args.positions:
            vector = replace(vector, positions=tuple(dict.fromkeys(self.args.positions)))
        model = self.runs[0].model
        names = sorted({name for run in self.runs for name in run.contexts["positions"].iloc[0]})
        vector.check(model["layers"], model["d_model"], names)
        vector.check_weights(model["weights_hash"])
        if set(vector.positions) == {TURN}:
            raise UserError(
                "steering the turn's tokens alone leaves the next token at the header as it is",
                "give --positions a token of the header, too",
            )
        return vector, outcome

    def _read_contexts(self) -> None:
        """Set ``used``, and the gate of the outcome.

        Raises:
            UserError: verdicts don't have the outcome; fewer than four queries have turns to
                compare.
        """
        from ia_mech.rates.load import NO_ANNOTATOR, read_runs
        from ia_mech.run.queries import subsample

        judged = read_runs(self.runs, self.args.judge, NO_ANNOTATOR)
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
        found = [
            (query, contexts)
            for query in self.queries
            if (contexts := contexts_of(query, labels, self.vector))
        ]
        if len(found) < 4:
            raise UserError(
                f"{len(found)} queries have a response after which the judge accepts some turns "
                "and not others",
                "sample more turns (--samples), or more queries",
            )
        if less := len(self.queries) - len(found):
            self.notes.append(
                f"{less} queries have no response after which the judge accepts some turns and not "
                "others; they are left out."
            )
        half = subsample([query for query, _ in found], len(found) // 2, self.args.seed + 1)
        choosing = {query.source for query in half}
        self.used = [(q, CHOOSING if q.source in choosing else REPORTING, c) for q, c in found]

    def _states(self) -> np.ndarray:
        """``[contexts, d_model]`` of all contexts, where the first position is steered, less each
        run's mean.

        Raises:
            UserError: a run doesn't keep states there.
        """
        position = next(name for name in self.vector.positions if name != TURN)
        found = []
        for run in self.runs:
            if position not in run.positions:
                raise UserError(
                    f"{run.path} keeps no states at {position}, whose covariance random directions "
                    "have",
                    f"sample it again with --positions {position}",
                )
            own = run.residuals(self.vector.layer, position).double().numpy()
            found.append(own - own.mean(0))
        return np.concatenate(found)

    # -- measure ----------------------------------------------------------------------------------

    def units(self) -> list[Unit]:
        """All but the search for equal KL, as far as it is known before; for ``--dry-run``."""
        drawn, _ = self.random_arms(1.0)
        kl = self.args.most_kl
        return [
            *self.dose_units(),
            self.search_unit(1.0, kl),
            *self.scoring_units(REPORTING, drawn),
        ]

    def scoring_units(
        self, half: str, arms: Sequence[Arm], turns: bool = True
    ) -> list[SteeredContexts]:
        """The queries of a half under arms; without turns the first token alone."""
        found = []
        for query, own, some in self.used:
            if own == half:
                contexts = some if turns else [replace(one, turns=()) for one in some]
                tokens = sum(one.start + one.rows * (len(arms) + 2) for one in contexts)
                names = query.source, query.dataset, tokens, half
                found.append(SteeredContexts(*names, tuple(contexts), tuple(arms)))
        return found

    def direction_arm(self, dose: float) -> Arm:
        """The direction at a dose."""
        return Arm(DIRECTION, dose, tuple(self.vector.direction.tolist()))

    def dose_units(self) -> list[SteeredContexts]:
        """All queries under all doses of the direction."""
        arms = [self.direction_arm(dose) for dose in sorted(set(self.args.doses))]
        return [*self.scoring_units(CHOOSING, arms), *self.scoring_units(REPORTING, arms)]

    def search_unit(self, dose: float, kl: float) -> DirectionSearch:
        """On the half that chooses."""
        contexts = [one for _, half, some in self.used if half == CHOOSING for one in some]
        rows = sum(one.rows for one in contexts)
        steps = STEPS * min(1, BATCH / len(contexts))
        tokens = round(sum(one.start for one in contexts) + rows * (3 + steps))
        names = "all that choose", "", tokens
        return DirectionSearch(*names, tuple(contexts), kl, dose, self.args.seed)

    def random_arms(self, dose: float) -> tuple[list[Arm], float]:
        """Random directions at a dose, and the largest cosine as they were drawn."""
        along = self.vector.direction.double().numpy()
        drawn, closest = random_directions(self.states, along, self.args.controls, self.args.seed)
        arms = [Arm(EACH, dose, tuple(one.tolist()), draw=n) for n, one in enumerate(drawn)]
        return arms, closest

    def measure(self, model: Model, unit: Any) -> pd.DataFrame:
        if isinstance(unit, SteeredContexts):
            return steering_effects(model, unit)
        return pd.DataFrame({"direction": [optimise_direction(model, unit).tolist()]})

    def rows(self) -> pd.DataFrame:
        doses = self.measure_units(self.dose_units(), "doses of the direction")
        choosing = doses[doses["half"] == CHOOSING]
        dose = chosen_dose(choosing, self.args.most_kl)
        self.vector = replace(self.vector, dose=dose)
        each = choosing[choosing["dose"] == dose].groupby("source")["kl"].mean()
        arms = self.controls(dose, float(each.mean()))
        return pd.concat(
            [
                doses,
                self.measure_units(self.scoring_units(REPORTING, arms), "controls of the same KL"),
            ],
            ignore_index=True,
        )

    def controls(self, dose: float, kl: float) -> list[Arm]:
        """Random directions, the optimised one and the bias, each of this KL in the half that
        chooses.

        Raises:
            UserError: too few random directions reach it.
        """
        arms, closest = self.random_arms(dose)
        chance = chance_cosine(self.states.shape[1], len(arms))
        self.notes.append(
            f"the largest |cosine| of a random direction to the direction was {closest:.2f} as "
            f"drawn ({len(arms)} without a preference exceed {chance:.2f} once in twenty times); "
            "it is 0 now: that component is taken out of each."
        )
        made = self.measure_units(
            [self.search_unit(dose, kl)], "optimising a direction by gradient"
        )
        if len(best := made["direction"].iloc[0]):
            arms.append(Arm(OPTIMISED, dose, tuple(best)))
            own = self.vector.direction.numpy()
            cosine = float(np.dot(best, own) / np.linalg.norm(own))
            self.notes.append(f"the cosine of the optimised direction to it is {cosine:.2f}.")
        else:
            self.notes.append("no direction could be optimised: the model's passes lack gradients.")
        moved = self.measure_units(
            self.scoring_units(CHOOSING, [self.direction_arm(dose)], turns=False),
            "what the direction changes in the first token",
        )
        change = np.mean(np.stack(moved["change"].tolist()), axis=0)
        arms.append(Arm(BIAS, 1.0, bias=tuple(change.tolist())))
        found = arms_of_equal_kl(arms, kl, self.kl_of)
        if (reached := sum(arm.kind == EACH for arm in found)) < LEAST:
            raise UserError(
                f"{reached} random directions reach the KL of dose {dose:g} ({kl:.2g} nats)",
                "give other --doses, another --layer or other --positions",
            )
        if less := len(arms) - len(found):
            self.notes.append(f"{less} controls don't reach the KL of the dose and are left out.")
        return found

    def kl_of(self, arms: Sequence[Arm]) -> np.ndarray:
        """``[arms]`` mean KL at the header over the sources that choose."""
        numbered = [replace(arm, draw=n) for n, arm in enumerate(arms)]
        found = self.measure_units(
            self.scoring_units(CHOOSING, numbered, turns=False), "doses of equal KL"
        )
        return found.groupby(["draw", "source"])["kl"].mean().groupby("draw").mean().to_numpy()

    # -- say --------------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        return estimates(rows, self.vector.dose, self.options)

    def tables(self, found: pd.DataFrame) -> "list[Table]":
        found = found[found["half"] == REPORTING]
        here = f"{100 * self.args.level:g}% intervals over the sources that chose nothing"
        own = (found["term"] == DIRECTION) & (found["dose"] == self.vector.dose)
        made = tables_of(
            f"what moves the turns, at the KL of dose {self.vector.dose:g} ({here})",
            found[own | found["term"].isin([OPTIMISED, BIAS, RANDOM])],
            {
                ODDS: ("log-odds", 2),
                BEYOND: ("beyond random", 2),
                RANK: ("reached by", 2),
                LOGP: ("log p a token", 3),
                KL: ("KL", 3),
            },
            index=("dataset", "term"),
            legend=f"log-odds: change, in nats, of those of {self.outcome} turns against others; "
            f"beyond random: less the mean of {self.args.controls} random directions; reached by: "
            "the share of these that change them as much; log p a token: change of all turns'; KL: "
            "of the first token's distribution, in nats.",
        )
        made += tables_of(
            f"the direction, by dose ({here}; {self.vector.dose:g} was chosen by the others)",
            found[found["term"] == DIRECTION],
            {KL: ("KL", 3), ODDS: ("log-odds", 2), LOGP: ("log p a token", 3)},
            index=("dataset", "dose"),
            legend="dose: what is added, in norms of the state.",
        )
        return made

    def figures(self, found: pd.DataFrame) -> "Mapping[str, Drawing]":
        from experiments.figures import Bars, Lines

        found = all_datasets(found[(found["quantity"] == ODDS) & (found["half"] == REPORTING)])
        name, y = self.runs[0].model["name"], "log-odds of accepted turns, change, nats"
        added = found["term"] == DIRECTION
        alike = found[~added | (found["dose"] == self.vector.dose)]
        each = alike[alike["term"] == EACH].assign(low=np.nan, high=np.nan)
        return {
            "doses": Lines(
                f"{name} · steering by dose",
                "dose, in norms of the state",
                y,
                found[added],
                across="dose",
                levels={"": 0.0},
            ),
            "controls": Bars(
                f"{name} · directions of the same KL",
                y,
                pd.concat([alike[alike["term"] != EACH], each]),
            ),
        }

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"arms": rows}

    def files(self) -> dict[str, Callable[[Path], None]]:
        return {FILE: self.vector.save}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        level, there = self.args.level, set(found["term"])
        flips = max(2.0 ** (1 - sum(half == REPORTING for _, half, _ in self.used)), 1e-4)
        self.notes.append(f"the least p of flipping signs over sources is {flips:.2g}.")
        self.notes.append(
            "next: what the model writes under it: python -m ia_mech.sample … --intervention "
            f"{self.folder / FILE}; then ia_mech.judge run, and ia_mech.rates."
        )
        own = all_datasets(found[(found["term"] == DIRECTION) & (found["half"] == REPORTING)])
        kl = own[(own["quantity"] == KL) & (own["dose"] == self.vector.dose)]["value"].item()
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
