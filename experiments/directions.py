"""Directions in the residual stream: what they change in given turns, and controls for them.

All are compared at one KL: that of the first token's distribution at the header, steered from
unsteered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from experiments.experiment import Model, Unit
from ia_mech.engine.intervene import Add
from ia_mech.errors import is_out_of_memory
from ia_mech.likelihood.intervened import IntervenedTurns, Row

STEPS, BATCH, RATE = 60, 8, 0.1  # steps of Adam, contexts of each, most change of a unit vector
FAR = 4  # times its first dose, or a fourth: as far as that of an optimised direction goes
ROUNDS, NEAR = 6, 0.1  # of the search for a KL; how near it has to come, relatively


@dataclass(frozen=True)
class Context:
    """A context with turns that were sampled after it, and where the model is steered.

    Attributes:
        ids: with the open header.
        layer: whose states are moved; 0 = embeddings.
        at: indices of the context's tokens that are steered.
        in_turn: whether each token of a turn is, too.
        turns: ids of each turn.
        accepted: of each turn, whether the judge accepts it.
    """

    ids: tuple[int, ...]
    layer: int
    at: tuple[int, ...]
    in_turn: bool = False
    turns: tuple[tuple[int, ...], ...] = ()
    accepted: tuple[bool, ...] = ()

    @property
    def start(self) -> int:
        """Index of the first token that is computed again."""
        return min(*self.at, len(self.ids) - 1)

    @property
    def rows(self) -> int:
        """How many tokens are computed again for all turns."""
        header = len(self.ids) - self.start
        return sum(header + len(turn) - 1 for turn in self.turns or ((0,),))

    def intervened_turns(self, model: Model) -> IntervenedTurns:
        """Its turns, to be scored under interventions; without any, the first token alone."""
        turns = self.turns or ((0,),)
        return IntervenedTurns(model.subject.model, self.ids, self.start, turns, model.on_tokens)

    def steered_rows(self, direction: Tensor, dose: float) -> list[Row]:
        """The row of each turn, with the direction added."""
        end = len(self.ids)
        found: list[Row] = []
        for number, turn in enumerate(self.turns or ((0,),)):
            after = range(end, end + len(turn) - 1) if self.in_turn else ()
            found.append((number, [Add(self.layer, (*self.at, *after), direction, dose)]))
        return found

    def odds(self, values: Any) -> Any:
        """The mean of accepted turns' values ``[turns]`` less that of the others'."""
        own = np.array(self.accepted)
        return values[own].mean() - values[~own].mean()


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

    kind: str
    dose: float
    direction: tuple[float, ...] = ()
    bias: tuple[float, ...] = ()
    draw: int = 0


@dataclass(frozen=True)
class SteeredContexts(Unit):
    """A query's contexts, scored under arms. Of contexts without turns only the first token is."""

    half: str
    contexts: tuple[Context, ...]
    arms: tuple[Arm, ...]


@dataclass(frozen=True)
class DirectionSearch(Unit):
    """Contexts on which a direction of this KL at the header is optimised, from this dose on."""

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
    """KL in nats of a distribution from another one, of ``[vocab]`` log-probabilities."""
    return (first.exp() * (first - plain)).sum()


def steering_effects(model: Model, unit: SteeredContexts) -> pd.DataFrame:
    """What arms change, in nats: a row per arm and context.

    Returns:
        ``term``, ``draw``, ``dose``, ``half``, ``context`` (its number), ``kl`` at the header.
        Where there are turns, ``odds`` and ``logp``: the change of the log-odds of accepted turns,
        and of the log-probability of all turns a token; where there are none, ``change``
        ``[vocab]`` of the first token's log-probabilities.
    """
    found = []
    for number, context in enumerate(unit.contexts):
        run = context.intervened_turns(model)
        lengths = np.array([len(turn) for turn in run.turns])

        def read(logits: Tensor, turns: Sequence[int], run=run) -> list[tuple[float, Tensor]]:
            sums, first = read_off(logits, [run.turns[turn] for turn in turns])
            return list(zip(sums.tolist(), first.double().cpu(), strict=True))

        plain = run.read([(turn, ()) for turn in range(len(lengths))], read)
        before, first = np.array([one for one, _ in plain]), plain[0][1]
        for arm in unit.arms:
            if arm.bias:
                after = (first + arm.dose * torch.tensor(arm.bias).double()).log_softmax(-1)
                moved = (after - first)[[turn[0] for turn in run.turns]].numpy()
            else:
                scored = run.read(context.steered_rows(torch.tensor(arm.direction), arm.dose), read)
                moved, after = np.array([one for one, _ in scored]) - before, scored[0][1]
            row = {"term": arm.kind, "draw": arm.draw, "dose": arm.dose, "half": unit.half}
            row |= {"context": number, "kl": max(float(divergence(after, first)), 0.0)}
            if context.turns:
                row |= {"odds": context.odds(moved), "logp": (moved / lengths).mean()}
            elif len(unit.arms) == 1:
                row["change"] = (after - first).tolist()
            found.append(row)
    return pd.DataFrame(found)


def optimise_direction(model: Model, unit: DirectionSearch) -> np.ndarray:
    """The direction that raises the log-odds of accepted turns most, for the KL it costs.

    It begins as the gradient of the log-odds at a dose near 0. Then Adam goes up their change over
    a few contexts, times the root of the wanted KL by the KL: to first order that is the change at
    the wanted KL, whatever the dose is. The dose follows, so that the KL stays near.

    Returns:
        ``[d_model]`` float32 of length 1; empty if the model's passes have no gradient (recurrent
        layers that change their state in place).
    """
    contexts = [(context, context.intervened_turns(model)) for context in unit.contexts]
    draw = torch.Generator().manual_seed(unit.seed)
    with torch.no_grad():
        plain = [
            read_off(run.differentiable([(n, ()) for n in range(len(run.turns))]), run.turns)
            for _, run in contexts
        ]

    def changed(some: Sequence[int], along: Tensor, dose: float) -> tuple[Tensor, Tensor]:
        """The mean change of the log-odds in contexts, and the mean KL."""
        odds, kl = [], []
        for i in some:
            (context, run), (before, first) = contexts[i], plain[i]
            rows = context.steered_rows(along.to(before), dose)
            after, moved = read_off(run.differentiable(rows), run.turns)
            odds.append(context.odds(after - before))
            kl.append(divergence(moved[0], first[0]))
        return torch.stack(odds).mean(), torch.stack(kl).mean()

    along = torch.randn(contexts[0][1].states.shape[-1], generator=draw).requires_grad_()
    try:
        odds, _ = changed(range(len(contexts)), along, unit.dose / 100)
        (uphill,) = torch.autograd.grad(odds, along)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return np.zeros(0, dtype=np.float32)
    along = (uphill / uphill.norm()).requires_grad_()
    adam, dose = torch.optim.Adam([along], lr=RATE / len(along) ** 0.5), unit.dose
    for _ in range(STEPS):
        some = torch.randperm(len(contexts), generator=draw)[:BATCH].tolist()
        odds, kl = changed(some, along, dose)
        adam.zero_grad()
        (-odds * (unit.kl / kl.clamp(min=unit.kl / 100)).sqrt()).backward()
        adam.step()
        with torch.no_grad():
            along /= along.norm()
        dose *= float(np.clip((unit.kl / max(kl.item(), 1e-9)) ** 0.5, 0.5, 2.0))
        dose = float(np.clip(dose, unit.dose / FAR, unit.dose * FAR))
    return along.detach().numpy()


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
            if abs(value - kl) <= NEAR * kl:
                found[n] = left.pop(n)
            else:
                by = np.clip(np.sqrt(kl / max(value, 1e-12)), 1 / 8, 8)
                left[n] = replace(left[n], dose=float(left[n].dose * by))
    return [found[n] for n in sorted(found)]
