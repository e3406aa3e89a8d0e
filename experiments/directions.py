"""Directions in the residual stream: what they change in given turns, and controls for them.

All are compared at one KL: that of the first token's distribution at the header, steered from
unsteered.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from experiments.experiment import Model, Unit
from ia_mech.engine.intervene import Add
from ia_mech.errors import is_out_of_memory
from ia_mech.likelihood.intervened import IntervenedTurns, Row

DIRECTION, OPTIMISED, BIAS = "the direction", "optimised by gradient", "bias of the first token"
RANDOM = "random direction"
STEPS, BATCH, RATE = 60, 8, 0.1  # steps of Adam, contexts of each, most change of a unit vector
MOST_DOSE = 4  # times its first dose, or a fourth: as far as that of an optimised direction goes
ROUNDS, KL_TOLERANCE = 6, 0.1  # of the search for a dose; how near its KL has to come, relatively


@dataclass(frozen=True)
class SteeredContext:
    """A context with two turns that were sampled after it, and where the model is steered.

    Attributes:
        source: of its query.
        ids: with the open header.
        layer: whose states are moved; 0 = embeddings.
        at: indices of the context's tokens that are steered.
        in_turn: whether each token of a turn is, too.
        turns: ids of a turn that the judge accepts, and of one that it doesn't.
    """

    source: str
    ids: tuple[int, ...]
    layer: int
    at: tuple[int, ...]
    in_turn: bool
    turns: tuple[tuple[int, ...], ...]

    @property
    def start(self) -> int:
        """Index of the first token that is computed again."""
        return min(*self.at, len(self.ids) - 1)

    @property
    def recomputed(self) -> int:
        """How many tokens are computed again for all turns."""
        header = len(self.ids) - self.start
        return sum(header + len(turn) - 1 for turn in self.turns)

    def intervened_turns(self, model: Model) -> IntervenedTurns:
        """Its turns, to be scored under interventions."""
        subject = model.subject.model
        return IntervenedTurns(subject, self.ids, self.start, self.turns, model.on_tokens)

    def steered_rows(self, direction: Tensor, dose: float) -> list[Row]:
        """The row of each turn, with the direction added."""
        end = len(self.ids)
        found: list[Row] = []
        for number, turn in enumerate(self.turns):
            after = range(end, end + len(turn) - 1) if self.in_turn else ()
            found.append((number, [Add(self.layer, (*self.at, *after), direction, dose)]))
        return found


@dataclass(frozen=True)
class Arm:
    """A way of changing the model.

    Attributes:
        term: what is done.
        dose: length of what is added, in norms of the state; of a bias, what it is multiplied with.
        direction: ``[d_model]`` along which states are moved; none for a bias.
        bias: ``[vocab]`` nats, added to the log-probabilities of the turn's first token.
        draw: which of several alike.
    """

    term: str
    dose: float
    direction: tuple[float, ...] = ()
    bias: tuple[float, ...] = ()
    draw: int = 0


@dataclass(frozen=True)
class ScoredQuery(Unit):
    """A query's contexts, scored under arms; ``half`` of the queries it is in."""

    half: str
    contexts: tuple[SteeredContext, ...]
    arms: tuple[Arm, ...]


@dataclass(frozen=True)
class ControlSearch(Unit):
    """The contexts on which controls of an arm are sought.

    Attributes:
        contexts: of the queries that choose.
        arm: the direction, at the dose that was chosen.
        kl: its mean KL at the header, in nats, which all controls are to have.
        random: random directions.
        seed: of the optimised one.
    """

    contexts: tuple[SteeredContext, ...]
    arm: Arm
    kl: float
    random: tuple[Arm, ...]
    seed: int


def log_probabilities(logits: Tensor, turns: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
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
    """KL in nats of a distribution from another one, of ``[vocab]`` log-probabilities."""
    return (first.exp() * (first - plain)).sum()


def arm_effects(
    context: SteeredContext, run: IntervenedTurns, arms: Sequence[Arm]
) -> Iterator[tuple[np.ndarray, Tensor, float]]:
    """What each arm changes, in nats: ``[turns]`` log-probabilities of turns, ``[vocab]`` those of
    the first token; and its KL at the header."""

    def read(logits: Tensor, turns: Sequence[int]) -> list[tuple[float, Tensor]]:
        sums, first = log_probabilities(logits, [run.turns[turn] for turn in turns])
        return list(zip(sums.tolist(), first.double().cpu(), strict=True))

    plain = run.read([(turn, ()) for turn in range(len(run.turns))], read)
    before, first = np.array([one for one, _ in plain]), plain[0][1]
    rows = [
        row
        for arm in arms
        if not arm.bias
        for row in context.steered_rows(torch.tensor(arm.direction), arm.dose)
    ]
    steered = iter(run.read(rows, read))  # of all arms together: a pass has room for many rows
    for arm in arms:
        if arm.bias:
            after = (first + arm.dose * torch.tensor(arm.bias).double()).log_softmax(-1)
            moved = (after - first)[[turn[0] for turn in run.turns]].numpy()
        else:
            scored = [next(steered) for _ in run.turns]
            moved, after = np.array([one for one, _ in scored]) - before, scored[0][1]
        yield moved, after - first, max(float(divergence(after, first)), 0.0)


def steering_effects(model: Model, unit: ScoredQuery) -> pd.DataFrame:
    """What arms change: a row per context and arm.

    Returns:
        ``term``, ``draw``, ``dose``, ``half``, ``context`` (its number), and in nats ``kl`` at the
        header and ``log_odds``: the change of the log-odds of accepted turns.
    """
    found = []
    for number, context in enumerate(unit.contexts):
        effects = arm_effects(context, context.intervened_turns(model), unit.arms)
        for arm, (moved, _, kl) in zip(unit.arms, effects, strict=True):
            row = {"term": arm.term, "draw": arm.draw, "dose": arm.dose, "half": unit.half}
            found.append(row | {"context": number, "kl": kl, "log_odds": moved[0] - moved[1]})
    return pd.DataFrame(found)


def find_controls(model: Model, unit: ControlSearch) -> pd.DataFrame:
    """Controls of one KL at the header: random directions, an optimised one, and a bias.

    The bias is the mean change that the arm makes to the first token's log-probabilities. Each
    control gets the dose at which its KL, a mean over sources, is near; one that doesn't come near
    is left out.

    Returns:
        A row per control, with the fields of :class:`Arm`.
    """
    arms = list(unit.random)
    best = optimise_direction(model, unit)
    if len(best):
        arms.append(Arm(OPTIMISED, unit.arm.dose, tuple(best.tolist())))
    # Of the first token alone: a turn whose one token doesn't matter.
    firsts = [replace(one, turns=((0,),)) for one in unit.contexts]
    runs = [(one, one.intervened_turns(model)) for one in firsts]
    moved = [one.numpy() for each in runs for _, one, _ in arm_effects(*each, [unit.arm])]
    arms.append(Arm(BIAS, 1.0, bias=tuple(np.mean(moved, axis=0).tolist())))

    def kl_of(some: Sequence[Arm]) -> np.ndarray:
        rows = [
            {"arm": n, "source": context.source, "kl": kl}
            for context, run in runs
            for n, (_, _, kl) in enumerate(arm_effects(context, run, some))
        ]
        each = pd.DataFrame(rows).groupby(["arm", "source"])["kl"].mean()
        return each.groupby("arm").mean().to_numpy()

    return pd.DataFrame(map(asdict, arms_of_equal_kl(arms, unit.kl, kl_of)))


def optimise_direction(model: Model, unit: ControlSearch) -> np.ndarray:
    """The direction that raises the log-odds of accepted turns most, for the KL it costs.

    It begins as the gradient of the log-odds at a dose near 0. Then Adam goes up their change over
    a few contexts, times the root of the wanted KL by the KL: to first order that is the change at
    the wanted KL, whatever the dose is. The dose follows, so that the KL stays near.

    Returns:
        ``[d_model]`` float32 of length 1; empty if the model's passes have no gradient (recurrent
        layers that change their state in place).
    """
    contexts, kl, dose = unit.contexts, unit.kl, unit.arm.dose
    runs = [context.intervened_turns(model) for context in contexts]
    draw = torch.Generator().manual_seed(unit.seed)
    with torch.no_grad():
        plain = [
            log_probabilities(
                run.differentiable([(n, ()) for n in range(len(run.turns))]), run.turns
            )
            for run in runs
        ]

    def changed(some: Sequence[int], along: Tensor, dose: float) -> tuple[Tensor, Tensor]:
        """The mean change of the log-odds in contexts, and the mean KL."""
        odds, cost = [], []
        for i in some:
            before, first = plain[i]
            rows = contexts[i].steered_rows(along.to(before), dose)
            after, moved = log_probabilities(runs[i].differentiable(rows), runs[i].turns)
            odds.append((after - before)[0] - (after - before)[1])
            cost.append(divergence(moved[0], first[0]))
        return torch.stack(odds).mean(), torch.stack(cost).mean()

    along = torch.randn(runs[0].states.shape[-1], generator=draw).requires_grad_()
    try:
        odds, _ = changed(range(len(contexts)), along, dose / 100)
        (uphill,) = torch.autograd.grad(odds, along)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return np.zeros(0, dtype=np.float32)
    along = (uphill / uphill.norm()).requires_grad_()
    adam, near = torch.optim.Adam([along], lr=RATE / len(along) ** 0.5), dose
    for _ in range(STEPS):
        some = torch.randperm(len(contexts), generator=draw)[:BATCH].tolist()
        odds, cost = changed(some, along, near)
        adam.zero_grad()
        (-odds * (kl / cost.clamp(min=kl / 100)).sqrt()).backward()
        adam.step()
        with torch.no_grad():
            along /= along.norm()
        near *= float(np.clip((kl / max(cost.item(), 1e-9)) ** 0.5, 0.5, 2.0))
        near = float(np.clip(near, dose / MOST_DOSE, dose * MOST_DOSE))
    return along.detach().numpy()


def random_directions(
    states: np.ndarray, direction: np.ndarray, count: int, seed: int
) -> np.ndarray:
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
        ``[count, d]`` of length 1.
    """
    unit = direction / np.linalg.norm(direction)
    drawn = np.random.default_rng([seed, 24]).standard_normal((count, len(states))) @ states
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    drawn -= (drawn @ unit)[:, None] * unit
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def arms_of_equal_kl(
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
            if abs(value - kl) <= KL_TOLERANCE * kl:
                found[n] = left.pop(n)
            else:
                by = np.clip(np.sqrt(kl / max(value, 1e-12)), 1 / 8, 8)
                left[n] = replace(left[n], dose=float(left[n].dose * by))
    return [found[n] for n in sorted(found)]
