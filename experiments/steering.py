"""Can a direction in the residual stream move the user's turns, more than random directions do?

The direction of a probe, or of a file, is added to the residual stream at tokens of one layer, and
turns that the run holds are scored again: how much likelier do those become that the judge accepts,
against others after the same context? Half of the sources choose the dose, among those of little KL
at the header; the other half is reported. There it stands beside random directions with the
covariance of the states, a bias of the first token, and a direction that was optimised by gradient
on the first half, which tells whether any direction could move these turns. All have the same KL.

Needs: a judged run with several sampled turns per context. Cost: half an hour on a CPU (135M).

    python -m probes.train cache/RUN
    python -m experiments.steering cache/RUN --probe cache/RUN/results/probe-rate-rules
    python -m experiments.steering cache/RUN --vector my.safetensors --doses 0.1 0.2 0.4
    python -m ia_mech.sample … --intervention cache/RUN/results/steering/vector.safetensors
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from experiments.experiment import Conclusion, Experiment, Model, Unit
from experiments.tables import stated, tables_of
from ia_mech.cli import named, path_of, whole_from
from ia_mech.engine.intervene import Add
from ia_mech.errors import UserError, is_out_of_memory
from ia_mech.estimates import Group, TidyEstimate, by_dataset, p_value, paired_row, together
from ia_mech.likelihood.intervened import Continued, Row
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
TOKENS = 24  # of a turn: nearly all of the bits come before (docs/reaction.md)
CHOOSING, REPORTING = "choosing", "reporting"  # halves of the sources
DIRECTION, OPTIMISED, BIAS = "the direction", "optimised by gradient", "bias of the first token"
RANDOM, EACH = "random directions", "random direction"  # their mean, and each of them
KL, ODDS, LOGP = "KL at the header", "log-odds, change", "log p a token, change"
BEYOND, RANK = "log-odds, change beyond random directions'", "share of random directions that reach"
ARM = ["of", "draw", "dose"]
STEPS, BATCH, RATE = 60, 8, 0.1  # steps of Adam, contexts of each, most change of a unit vector
FAR = 4  # times its first dose, or a fourth: as far as that of an optimised direction goes
ROUNDS, NEAR = 6, 0.1  # of the search for a KL; how near it has to come, relatively


# -- what is measured ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Context:
    """A context, and turns that were sampled after it.

    Attributes:
        ids: with the open header.
        at: indices of the tokens that are steered, but for those of the turn.
        turns: ids of each, at most :data:`TOKENS`.
        accepted: of each turn, whether the judge accepts it.
    """

    ids: tuple[int, ...]
    at: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...] = ()
    accepted: tuple[bool, ...] = ()

    @property
    def start(self) -> int:
        """Index of the first token that is computed again."""
        return min(*self.at, len(self.ids) - 1)

    def continued(self, model: Model) -> Continued:
        """Its turns, to be scored under interventions; without any, the first token alone."""
        turns = self.turns or ((0,),)
        return Continued(model.subject.model, self.ids, self.start, turns, model.on_tokens)


@dataclass(frozen=True)
class Site:
    """Where the model is steered: layer (0 = embeddings), and whether at each token of the turn,
    besides those that a context names."""

    layer: int
    in_turn: bool

    def add(self, context: Context, turn: int, direction: Tensor, dose: float) -> Row:
        """What is done in the row of a context's turn."""
        end, tokens = len(context.ids), len(context.turns[turn]) if context.turns else 1
        after = range(end, end + tokens - 1) if self.in_turn else ()
        return turn, [Add(self.layer, (*context.at, *after), direction, dose)]


@dataclass(frozen=True)
class Arm:
    """A way of changing the model.

    Attributes:
        of: what is done.
        dose: length of what is added, in norms of the state; of a bias, what it is multiplied with.
        direction: ``[d_model]`` along which states are moved; none for a bias.
        bias: ``[vocab]`` nats, added to the log-probabilities of the turn's first token.
        draw: which of several alike.
    """

    of: str
    dose: float
    direction: tuple[float, ...] = ()
    bias: tuple[float, ...] = ()
    draw: int = 0


@dataclass(frozen=True)
class Steered(Unit):
    """A query's contexts, scored under arms; without turns only the KL is measured."""

    half: str
    site: Site
    contexts: tuple[Context, ...]
    arms: tuple[Arm, ...]


@dataclass(frozen=True)
class FirstToken(Unit):
    """A query's contexts, whose first token's distribution an arm changes."""

    site: Site
    contexts: tuple[Context, ...]
    arm: Arm


@dataclass(frozen=True)
class Optimising(Unit):
    """Contexts on which a direction of this KL at the header is optimised, from this dose on."""

    site: Site
    contexts: tuple[Context, ...]
    kl: float
    dose: float
    seed: int


def read_off(logits: Tensor, turns: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """``[rows]`` log-probabilities of turns, and ``[rows, vocab]`` of the first token, in nats.

    Args:
        logits: ``[rows, tokens, vocab]`` that predict the tokens of each row's turn.
        turns: ids of each row's turn.
    """
    log = logits.log_softmax(-1)
    sums = [
        own[: len(turn)].gather(-1, torch.tensor(turn, device=own.device)[:, None]).sum()
        for own, turn in zip(log, turns, strict=True)
    ]
    return torch.stack(sums), log[:, 0]


def divergence(first: Tensor, plain: Tensor) -> Tensor:
    """``[…]`` KL in nats of distributions from another one, of ``[…, vocab]`` log-probabilities."""
    return (first.exp() * (first - plain)).sum(-1)


def apart(values: Any, accepted: Sequence[bool]) -> Any:
    """The mean of accepted turns' values less that of the others'."""
    own = np.array(accepted)
    return values[own].mean() - values[~own].mean()


def steered(model: Model, unit: Steered) -> pd.DataFrame:
    """A row per arm and context: ``of``, ``draw``, ``dose``, ``half``, ``context`` (its number),
    ``kl`` at the header, and where there are turns ``odds`` and ``logp``: what the arm changes in
    the log-odds of accepted turns, and in the log-probability of all a token; in nats."""
    found = []
    for number, context in enumerate(unit.contexts):
        run = context.continued(model)
        count = len(run.turns)
        lengths = np.array([len(turn) for turn in run.turns])

        def read(logits: Tensor, turns: Sequence[int], run=run) -> list[tuple[float, Tensor]]:
            sums, first = read_off(logits, [run.turns[turn] for turn in turns])
            return list(zip(sums.tolist(), first.double().cpu(), strict=True))

        plain = run.read([(n, ()) for n in range(count)], read)
        before, first = np.array([one for one, _ in plain]), plain[0][1]
        for arm in unit.arms:
            if arm.bias:
                after = (first + arm.dose * torch.tensor(arm.bias).double()).log_softmax(-1)
                opening = [turn[0] for turn in run.turns]
                change = (after - first)[opening].numpy()
            else:
                along = torch.tensor(arm.direction)
                rows = [unit.site.add(context, n, along, arm.dose) for n in range(count)]
                scored = run.read(rows, read)
                change, after = np.array([one for one, _ in scored]) - before, scored[0][1]
            row = {"of": arm.of, "draw": arm.draw, "dose": arm.dose, "half": unit.half}
            row |= {"context": number, "kl": max(float(divergence(after, first)), 0.0)}
            if context.turns:
                row |= {"odds": apart(change, context.accepted), "logp": (change / lengths).mean()}
            found.append(row)
    return pd.DataFrame(found)


def first_token(model: Model, unit: FirstToken) -> pd.DataFrame:
    """One row with ``change`` ``[vocab]``: what the arm changes in the log-probabilities of the
    first token, the mean over contexts, in nats."""
    changes = []
    for context in unit.contexts:
        run = context.continued(model)
        rows = [(0, ()), unit.site.add(context, 0, torch.tensor(unit.arm.direction), unit.arm.dose)]
        plain, moved = run.read(rows, lambda logits, _: list(logits[:, 0].log_softmax(-1).cpu()))
        changes.append((moved - plain).double())
    return pd.DataFrame({"change": [torch.stack(changes).mean(0).tolist()]})


def optimised(model: Model, unit: Optimising) -> np.ndarray:
    """The direction that raises the log-odds of accepted turns most, for the KL it costs.

    It begins as the gradient of the log-odds at a dose near 0. Then Adam goes up their change over
    a few contexts, times the root of the wanted KL by the KL: to first order that is the change at
    the wanted KL, whatever the dose is. The dose follows, so that the KL stays near.

    Returns:
        ``[d_model]`` float32 of length 1; empty if the model's passes have no gradient (recurrent
        layers that change their state in place).
    """
    runs = [context.continued(model) for context in unit.contexts]
    draw = torch.Generator().manual_seed(unit.seed)
    with torch.no_grad():
        plain = [
            read_off(run.differentiable([(n, ()) for n in range(len(run.turns))]), run.turns)
            for run in runs
        ]

    def changed(some: Sequence[int], along: Tensor, dose: float) -> tuple[Tensor, Tensor]:
        """The mean change of the log-odds in contexts, and the mean KL."""
        odds, kl = [], []
        for i in some:
            run, (before, unmoved) = runs[i], plain[i]
            rows = [
                unit.site.add(unit.contexts[i], n, along.to(before), dose)
                for n in range(len(run.turns))
            ]
            after, first = read_off(run.differentiable(rows), run.turns)
            odds.append(apart(after - before, unit.contexts[i].accepted))
            kl.append(divergence(first[0], unmoved[0]))
        return torch.stack(odds).mean(), torch.stack(kl).mean()

    along = torch.randn(runs[0].states.shape[-1], generator=draw).requires_grad_()
    try:
        (uphill,) = torch.autograd.grad(changed(range(len(runs)), along, unit.dose / 100)[0], along)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return np.zeros(0, dtype=np.float32)
    along = (uphill / uphill.norm()).requires_grad_()
    adam, dose = torch.optim.Adam([along], lr=RATE / len(along) ** 0.5), unit.dose
    for _ in range(STEPS):
        some = torch.randperm(len(runs), generator=draw)[:BATCH].tolist()
        odds, kl = changed(some, along, dose)
        adam.zero_grad()
        (-odds * (unit.kl / kl.clamp(min=unit.kl / 100)).sqrt()).backward()
        adam.step()
        with torch.no_grad():
            along /= along.norm()
        dose *= float(np.clip((unit.kl / max(kl.item(), 1e-9)) ** 0.5, 0.5, 2.0))
        dose = float(np.clip(dose, unit.dose / FAR, unit.dose * FAR))
    return along.detach().cpu().numpy()


# -- what it is compared with ----------------------------------------------------------------------


def random_directions(
    states: np.ndarray, direction: np.ndarray, count: int, seed: int
) -> tuple[np.ndarray, float]:
    """Directions with the covariance of states, without the component along a direction.

    The covariance has few large directions, so that what is drawn lies closer to each of them, and
    to a probe that lies there, than directions without a preference do; a control that holds a part
    of what it is held against would hide its effect.

    Args:
        states: ``[n, d]``, centred.
        direction: ``[d]`` that is taken out.
        count: how many.
        seed: of the draws.

    Returns:
        ``[count, d]`` of length 1, and the largest absolute cosine to the direction as drawn.
    """
    unit = direction / np.linalg.norm(direction)
    drawn = np.random.default_rng([seed, 24]).standard_normal((count, len(states))) @ states
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    cosines = drawn @ unit
    drawn -= cosines[:, None] * unit
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True), float(np.abs(cosines).max())


def chance_cosine(width: int, count: int) -> float:
    """What the largest absolute cosine of so many directions without a preference to a given one
    exceeds once in twenty times."""
    from scipy.stats import beta

    return float(np.sqrt(beta.ppf(0.95 ** (1 / count), 0.5, (width - 1) / 2)))


def of_equal_kl(
    arms: Sequence[Arm], kl: float, kl_of: Callable[[Sequence[Arm]], np.ndarray]
) -> list[Arm]:
    """The arms with doses whose mean KL at the header is this one.

    A KL grows about with the square of a dose, so each is multiplied with the root of what is
    wanted by what it has, until it is near.

    Args:
        arms: with a first guess of the dose. Those that don't come near are left out.
        kl: in nats.
        kl_of: the mean KL of each of some arms.
    """
    found: dict[int, Arm] = {}
    left = dict(enumerate(arms))
    for _ in range(ROUNDS):
        if not left:
            break
        for n, value in zip(list(left), kl_of(list(left.values())), strict=True):
            if abs(value / kl - 1) <= NEAR:
                found[n] = left.pop(n)
            else:
                by = np.clip(np.sqrt(kl / max(value, 1e-12)), 1 / 8, 8)
                left[n] = replace(left[n], dose=float(left[n].dose * by))
    return [found[n] for n in sorted(found)]


def chosen_dose(rows: pd.DataFrame, most_kl: float) -> float:
    """The dose that raises the log-odds most, among those whose mean KL is at most ``most_kl``
    nats; the smallest if none's is. Each source weighs the same.

    Args:
        rows: of :func:`steered`, of one direction and the sources that choose.
        most_kl: in nats.
    """
    each = rows.groupby(["dose", "source"])[["odds", "kl"]].mean()
    of = each.groupby("dose").mean()
    within = of[of["kl"] <= most_kl]
    return float(of.index.min() if within.empty else within["odds"].idxmax())


# -- estimate --------------------------------------------------------------------------------------


def estimates(rows: pd.DataFrame, dose: float, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """Every estimate; each source weighs the same.

    Args:
        rows: of :func:`steered`, all arms, with ``source`` and ``dataset``.
        dose: of the direction, that was chosen.
        options: ``level``, ``resamples`` and ``seed``.
    """
    for dataset, here in by_dataset(rows):
        for half in (CHOOSING, REPORTING):
            mine = rows[here & (rows["half"] == half)]
            means = mine.groupby([*ARM, "source"], sort=False)[["kl", "odds", "logp"]].mean()
            names = {"dataset": dataset, "half": half}
            drawn = means[means.index.get_level_values("of") == EACH]
            for key, arm in means.groupby(ARM, sort=False):
                yield from _of_arm(arm, names | dict(zip(ARM, key, strict=True)), options)
            if drawn.empty:
                continue
            mean = drawn.groupby("source", sort=False).mean()
            yield from _of_arm(mean, names | {"of": RANDOM}, options)
            for of in (DIRECTION, OPTIMISED, BIAS):
                own = means[means.index.get_level_values("of") == of].droplevel(["of", "draw"])
                if of == DIRECTION:
                    own = own.xs(dose, level="dose", drop_level=False)
                if len(own):
                    at = {"of": of, "dose": own.index[0][0]}
                    yield from _beyond(own["odds"], drawn["odds"], names | at, options)


def _of_arm(
    arm: pd.DataFrame, names: dict[str, Any], options: dict[str, Any]
) -> Iterator[TidyEstimate]:
    """Of one row per source."""
    group = Group(arm.index.get_level_values("source").to_numpy(), options, names)
    kl = group.mean(KL, arm["kl"])
    yield replace(kl, estimate=kl.estimate.within(0.0))
    yield group.mean(ODDS, arm["odds"])
    yield group.mean(LOGP, arm["logp"])


def _beyond(
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


def is_shown(found: pd.DataFrame, of: str) -> bool:
    """Whether an arm raises the log-odds: more than the mean of the random directions does, by
    flipping signs over sources, and more than nearly all of them."""
    mine = _reported(found, of).set_index("quantity")
    more, rank = mine.loc[BEYOND], mine.loc[RANK]
    return bool(more["value"] > 0 and max(more["p"], rank["p"]) <= SIGNIFICANT)


def _reported(found: pd.DataFrame, of: str) -> pd.DataFrame:
    """What is compared of an arm, on the sources that chose nothing."""
    mine = together(found)
    mine = mine[(mine["of"] == of) & (mine["half"] == REPORTING)]
    return mine[mine["quantity"].isin([BEYOND, RANK])]


def said_of(found: pd.DataFrame, of: str, level: float) -> str:
    """How far an arm goes beyond random directions, with tests and the least p there can be."""
    mine = _reported(found, of)
    more, rank = (mine[mine["quantity"] == name].iloc[0] for name in (BEYOND, RANK))
    count = int(rank["rows"])
    change = stated(
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


def contexts_of(
    query: "Query", labels: pd.Series, vector: SteeringVector, most: int
) -> tuple[Context, ...]:
    """A query's contexts after which the judge accepts a turn and another not, with one of each.

    Args:
        query: with sampled turns.
        labels: 1 of accepted turns, 0 of others, NaN without a verdict, by ``run``,
            ``context_id``, ``temperature`` and ``sample``.
        vector: whose positions are steered.
        most: of them.

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
        accepted = tuple((mine["label"] == 1).tolist())
        found.append(Context(query.token_ids[k], tuple(at), ids, accepted))
    return tuple(found[:most])


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
        "of": "str",
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
            type=named,
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
            "--responses",
            type=whole_from(1),
            default=3,
            metavar="K",
            help="most contexts of a query (default: 3)",
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
        self.site = Site(self.vector.layer, TURN in self.vector.positions)
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
        from ia_mech.run.queries import drawn

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
            if (contexts := contexts_of(query, labels, self.vector, self.args.responses))
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
        choosing = {q.source for q, _ in drawn(found, len(found) // 2, self.args.seed + 1)}
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
        """All but the search for equal KL, whose doses aren't known before; at a dose of 1."""
        kl = self.args.most_kl
        drawn = self.random_arms(1.0)[0]
        return [*self.dosed(), self.optimising(1.0, kl), *self.scored(REPORTING, drawn)]

    def scored(self, half: str, arms: Sequence[Arm], turns: bool = True) -> list[Steered]:
        """The queries of a half under arms; without turns the KL alone."""
        found = []
        for query, own, contexts in self.used:
            if own != half:
                continue
            if not turns:
                contexts = tuple(replace(one, turns=(), accepted=()) for one in contexts)
            found.append(
                Steered(
                    query.source,
                    query.dataset,
                    sum(_tokens(one, len(arms)) for one in contexts),
                    half,
                    self.site,
                    contexts,
                    tuple(arms),
                )
            )
        return found

    def dosed(self) -> list[Steered]:
        """All queries under all doses of the direction."""
        along = tuple(self.vector.direction.tolist())
        arms = [Arm(DIRECTION, dose, along) for dose in sorted(set(self.args.doses))]
        return [*self.scored(CHOOSING, arms), *self.scored(REPORTING, arms)]

    def choosing(self) -> tuple[Context, ...]:
        """The contexts of the half that chooses."""
        return tuple(one for _, half, some in self.used if half == CHOOSING for one in some)

    def optimising(self, dose: float, kl: float) -> Optimising:
        """On the half that chooses."""
        contexts = self.choosing()
        ahead = sum(_tokens(one, 2) for one in contexts)
        once = sum(_tokens(one, 1, prefill=False) for one in contexts) / len(contexts)
        tokens = round(ahead + STEPS * min(BATCH, len(contexts)) * once)
        return Optimising(
            "all that choose", "", tokens, self.site, contexts, kl, dose, self.args.seed
        )

    def random_arms(self, dose: float) -> tuple[list[Arm], float]:
        """Random directions at a dose, and the largest cosine as they were drawn."""
        along = self.vector.direction.double().numpy()
        drawn, closest = random_directions(self.states, along, self.args.controls, self.args.seed)
        arms = [Arm(EACH, dose, tuple(one.tolist()), draw=n) for n, one in enumerate(drawn)]
        return arms, closest

    def measure(self, model: Model, unit: Any) -> pd.DataFrame:
        if isinstance(unit, Steered):
            return steered(model, unit)
        if isinstance(unit, FirstToken):
            return first_token(model, unit)
        return pd.DataFrame({"direction": [optimised(model, unit).tolist()]})

    def rows(self) -> pd.DataFrame:
        doses = self.measured(self.dosed(), "doses of the direction")
        choosing = doses[doses["half"] == CHOOSING]
        dose = chosen_dose(choosing, self.args.most_kl)
        self.vector = replace(self.vector, dose=dose)
        each = choosing[choosing["dose"] == dose].groupby("source")["kl"].mean()
        arms = self.controls(dose, float(each.mean()))
        return pd.concat(
            [doses, self.measured(self.scored(REPORTING, arms), "controls of the same KL")],
            ignore_index=True,
        )

    def controls(self, dose: float, kl: float) -> list[Arm]:
        """Random directions, the optimised one and the bias, each of this KL in the half that
        chooses."""
        arms, closest = self.random_arms(dose)
        self.notes.append(
            f"the largest |cosine| of a random direction to the direction was {closest:.2f} as "
            f"drawn ({len(arms)} without a preference exceed "
            f"{chance_cosine(self.states.shape[1], len(arms)):.2f} once in twenty times); it is 0 "
            "now: that component is taken out of each."
        )
        made = self.measured([self.optimising(dose, kl)], "optimising a direction by gradient")
        best = made["direction"].iloc[0]
        if len(best):
            arms.append(Arm(OPTIMISED, dose, tuple(best)))
            along = self.vector.direction.numpy()
            cosine = float(np.dot(best, along) / np.linalg.norm(along))
            self.notes.append(f"the cosine of the optimised direction to it is {cosine:.2f}.")
        moved = self.measured(
            [
                FirstToken(query.source, query.dataset, tokens, self.site, contexts, arm)
                for query, half, contexts in self.used
                if half == CHOOSING
                for arm in [Arm(DIRECTION, dose, tuple(self.vector.direction.tolist()))]
                for tokens in [sum(_tokens(one, 1) for one in contexts)]
            ],
            "what the direction changes in the first token",
        )
        change = np.mean(np.stack(moved["change"].tolist()), axis=0)
        arms.append(Arm(BIAS, 1.0, bias=tuple(change.tolist())))
        found = of_equal_kl(arms, kl, self._kl)
        if (reached := sum(arm.of == EACH for arm in found)) < LEAST:
            raise UserError(
                f"{reached} random directions reach the KL of dose {dose:g} ({kl:.2g} nats)",
                "give other --doses, another --layer or other --positions",
            )
        if less := len(arms) - len(found):
            self.notes.append(f"{less} controls don't reach the KL of the dose and are left out.")
        return found

    def _kl(self, arms: Sequence[Arm]) -> np.ndarray:
        """``[arms]`` mean KL at the header over the sources that choose."""
        numbered = [replace(arm, draw=n) for n, arm in enumerate(arms)]
        found = self.measured(self.scored(CHOOSING, numbered, turns=False), "doses of equal KL")
        return found.groupby(["draw", "source"])["kl"].mean().groupby("draw").mean().to_numpy()

    # -- say --------------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        return estimates(rows, self.vector.dose, self.options)

    def tables(self, found: pd.DataFrame) -> "list[Table]":
        found = found[found["half"] == REPORTING]
        here = f"{100 * self.args.level:g}% intervals over the sources that chose nothing"
        own = (found["of"] == DIRECTION) & (found["dose"] == self.vector.dose)
        made = tables_of(
            f"what moves the turns, at the KL of dose {self.vector.dose:g} ({here})",
            found[own | found["of"].isin([OPTIMISED, BIAS, RANDOM])],
            {
                ODDS: ("log-odds", 2),
                BEYOND: ("beyond random", 2),
                RANK: ("reached by", 2),
                LOGP: ("log p a token", 3),
                KL: ("KL", 3),
            },
            index=("dataset", "of"),
            legend=f"log-odds: change, in nats, of those of {self.outcome} turns against others; "
            f"beyond random: less the mean of {self.args.controls} random directions; reached by: "
            "the share of these that change them as much; log p a token: change of all turns'; KL: "
            "of the first token's distribution, in nats.",
        )
        made += tables_of(
            f"the direction, by dose ({here}; {self.vector.dose:g} was chosen by the others)",
            found[found["of"] == DIRECTION],
            {KL: ("KL", 3), ODDS: ("log-odds", 2), LOGP: ("log p a token", 3)},
            index=("dataset", "dose"),
            legend="dose: what is added, in norms of the state.",
        )
        return made

    def figures(self, found: pd.DataFrame) -> "Mapping[str, Drawing]":
        from experiments.figures import Bars, Lines

        found = together(found[(found["quantity"] == ODDS) & (found["half"] == REPORTING)])
        name, y = self.runs[0].model["name"], "log-odds of accepted turns, change, nats"
        added = found["of"] == DIRECTION
        alike = found[~added | (found["dose"] == self.vector.dose)]
        each = alike[alike["of"] == EACH].assign(low=np.nan, high=np.nan)
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
                pd.concat([alike[alike["of"] != EACH], each]),
            ),
        }

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"arms": rows}

    def files(self) -> dict[str, Callable[[Path], None]]:
        return {"vector.safetensors": self.vector.save}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        level, there = self.args.level, set(found["of"])
        flips = max(2.0 ** (1 - sum(half == REPORTING for _, half, _ in self.used)), 1e-4)
        self.notes.append(f"the least p of flipping signs over sources is {flips:.2g}.")
        file = self.folder / "vector.safetensors"
        self.notes.append(
            "next: what the model writes under it: python -m ia_mech.sample … --intervention "
            f"{file}; then ia_mech.judge run, and ia_mech.rates."
        )
        kl = float(
            together(found)[_at_dose(together(found), KL, self.vector.dose)]["value"].iloc[0]
        )
        where = f"layer {self.site.layer} at {', '.join(self.vector.positions)}"
        verb = "makes" if is_shown(found, DIRECTION) else "isn't shown to make"
        sentence = (
            f"Steering along the direction in {where} (dose {self.vector.dose:g}, KL {kl:.3f} at "
            f"the header) {verb} {self.outcome} turns likelier than random directions of that KL "
            f"do. {said_of(found, DIRECTION, level)}"
        )
        if OPTIMISED in there:
            verb = "does" if is_shown(found, OPTIMISED) else "isn't shown to"
            control = (
                f"A direction that was optimised for that there, on other sources, {verb}. "
                f"{said_of(found, OPTIMISED, level)}"
            )
        else:
            control = "No direction could be optimised there: the model's passes have no gradient."
        if BIAS in there:
            control += f" A bias of the first token alone: {said_of(found, BIAS, level)}"
        return Conclusion(sentence, control)


def _at_dose(found: pd.DataFrame, quantity: str, dose: float) -> pd.Series:
    here = (found["quantity"] == quantity) & (found["of"] == DIRECTION)
    return here & (found["half"] == REPORTING) & (found["dose"] == dose)


def _tokens(context: Context, arms: int, prefill: bool = True) -> int:
    """What is computed of a context's turns under arms."""
    header = len(context.ids) - context.start
    rows = sum(header + len(turn) - 1 for turn in context.turns or ((0,),))
    return context.start * prefill + rows * (arms + 2 * prefill)


main = Steering.main

if __name__ == "__main__":
    sys.exit(main())
