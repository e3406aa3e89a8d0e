"""Directions in the residual stream: learned ones, what they change in given turns, and controls.

Those that are compared have one KL: that of the first token's distribution at the header, steered
from unsteered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from experiments.experiment import Model, Unit
from ia_mech.errors import UserError
from ia_mech.run.queries import Query
from ia_mech.steering import TURN, SteeringVector

if TYPE_CHECKING:  # these load torch
    import torch
    from torch import Tensor

    from ia_mech.engine.score import Turn

DIRECTION, OPTIMISED, BIAS = "the direction", "optimised by gradient", "bias of the first token"
RANDOM = "random direction"
STEPS = 60  # of Adam, of an optimised direction
BATCH, RATE = 12, 0.1  # contexts of a step, most change of a unit vector
ROUNDS, KL_TOLERANCE = 16, 0.1  # of the search for a dose; how near its KL has to come, relatively


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
        """Index of the first token that is scored with a turn, so that it can be steered."""
        return min((*self.at, len(self.ids) - 1))

    @property
    def scored(self) -> int:
        """How many tokens are scored for all turns."""
        header = len(self.ids) - self.start
        return sum(header + len(turn) for turn in self.turns)

    def steered_turns(self, number: int, direction: Tensor | None, dose: float) -> list[Turn]:
        """Its turns after its tokens up to ``start``, with the direction added, if there is one.

        Args:
            number: of the context, by which the scorer knows it.
        """
        from ia_mech.engine.intervene import Add
        from ia_mech.engine.score import Turn

        end = len(self.ids) - self.start
        found = []
        for ids in self.turns:
            steered: tuple[Add, ...] = ()
            if direction is not None:
                after = range(end, end + len(ids) - 1) if self.in_turn else ()
                at = (*(position - self.start for position in self.at), *after)
                steered = (Add(self.layer, at, direction, dose),) if at else ()
            tokens = (*self.ids[self.start :], *ids)
            found.append(Turn(number, tokens, interventions=steered, whole_at=end))
        return found


def steered_context(
    query: Query, k: int, vector: SteeringVector, turns: Sequence[Sequence[int]]
) -> SteeredContext:
    """A context of a query with turns, steered where a vector says.

    Raises:
        UserError: it lacks a position.
    """
    named = query.contexts["positions"].iloc[k]
    places = {name: None if pd.isna(at) else int(at) for name, at in named.items()}
    at = sorted({at for one in vector.at_context(places) for at in one.positions})
    site = vector.layer, tuple(at), TURN in vector.positions
    return SteeredContext(query.source, query.token_ids[k], *site, tuple(map(tuple, turns)))


@dataclass(frozen=True)
class Change:
    """A way of changing the model, an arm of what is compared.

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
    arms: tuple[Change, ...]


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
    arm: Change
    kl: float
    random: tuple[Change, ...]
    seed: int


@dataclass(frozen=True)
class Learning(Unit):
    """A direction to be learned.

    Attributes:
        half: of the queries, that the turns are of.
        term: what they come after.
        contexts: each with a turn that is to become likely, and maybe one that is to become less
            so.
        dose: length of what is added, in norms of the state that it is added to.
        steps: of Adam, of :data:`BATCH` turns each.
        seed: of the start and the batches, which are alike for all that are compared.
    """

    half: int
    term: str
    contexts: tuple[SteeredContext, ...]
    dose: float
    steps: int
    seed: int


def divergence(first: Tensor, plain: Tensor) -> Tensor:
    """KL in nats of a distribution from another one, of ``[vocab]`` log-probabilities."""
    return (first.exp() * (first - plain)).sum()


def arm_effects(
    model: Model, contexts: Sequence[SteeredContext], arms: Sequence[Change]
) -> list[list[tuple[np.ndarray, Tensor, float]]]:
    """What each arm changes in each context, ``[contexts][arms]``, in nats.

    Returns:
        ``[turns]`` changes of the turns' log-probabilities, ``[vocab]`` of those of the first
        token, and the first token's KL.
    """
    import torch

    directions: list[tuple[Tensor | None, float]] = [(None, 0.0)]  # unsteered first
    directions += [(torch.tensor(arm.direction), arm.dose) for arm in arms if not arm.bias]
    wanted = [
        turn
        for number, context in enumerate(contexts)
        for direction, dose in directions
        for turn in context.steered_turns(number, direction, dose)
    ]
    scores = iter(model.score([context.ids[: context.start] for context in contexts], wanted))
    found = []
    for context in contexts:
        header = len(context.ids) - context.start

        def next_scores(header: int = header, turns: int = len(context.turns)):
            """Log-probabilities of the turns, and of the first token."""
            each = [next(scores) for _ in range(turns)]
            sums = [one.logprobs_raw[header:].sum(dtype=np.float64) for one in each]
            return np.array(sums), torch.from_numpy(each[0].whole).double()

        before, first = next_scores()
        changes = []
        for arm in arms:
            if arm.bias:
                after = (first + arm.dose * torch.tensor(arm.bias).double()).log_softmax(-1)
                moved = (after - first)[[turn[0] for turn in context.turns]].numpy()
            else:
                sums, after = next_scores()
                moved = sums - before
            changes.append((moved, after - first, max(float(divergence(after, first)), 0.0)))
        found.append(changes)
    return found


def steering_effects(model: Model, unit: ScoredQuery) -> pd.DataFrame:
    """What arms change: a row per context and arm.

    Returns:
        ``term``, ``draw``, ``dose``, ``half``, ``context`` (its number), and in nats ``kl`` at the
        header and ``log_odds``: the change of the log-odds of accepted turns.
    """
    found = []
    for number, effects in enumerate(arm_effects(model, unit.contexts, unit.arms)):
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
        A row per control, with the fields of `Change`. The optimised one has no direction if the
        model's passes have no gradient.
    """
    arms = list(unit.random)
    dose, optimised = unit.arm.dose, False
    how = Learning("", "", unit.tokens, 0, OPTIMISED, unit.contexts, dose, STEPS, unit.seed)
    with suppress(UserError):  # its passes have no gradient
        arms.append(Change(OPTIMISED, dose, tuple(learn(model, how).tolist())))
        optimised = True
    # Of the first token alone: a turn whose one token doesn't matter.
    firsts = [replace(one, turns=((0,),)) for one in unit.contexts]
    moved = [one.numpy() for ((_, one, _),) in arm_effects(model, firsts, [unit.arm])]
    arms.append(Change(BIAS, 1.0, bias=tuple(np.mean(moved, axis=0).tolist())))

    def kl_of(some: Sequence[Change]) -> np.ndarray:
        rows = [
            {"arm": n, "source": context.source, "kl": kl}
            for context, effects in zip(firsts, arm_effects(model, firsts, some), strict=True)
            for n, (_, _, kl) in enumerate(effects)
        ]
        each = pd.DataFrame(rows).groupby(["arm", "source"])["kl"].mean()
        return each.groupby("arm").mean().to_numpy()

    found = arms_of_equal_kl(arms, unit.kl, kl_of)
    found += [] if optimised else [Change(OPTIMISED, 0.0)]
    return pd.DataFrame(map(asdict, found))


def with_gradients(search: Callable[[Model, Any], np.ndarray]) -> Callable[..., np.ndarray]:
    """A function whose computation can be differentiated, whatever thread it is called in."""

    @wraps(search)
    def differentiable(model: Model, unit: Any) -> np.ndarray:
        import torch

        with torch.inference_mode(False):
            return search(model, unit)

    return differentiable


@with_gradients
def learn(model: Model, unit: Learning) -> np.ndarray:
    """``[d_model]`` of length 1: the direction along which a state has to be moved by the dose so
    that turns become likely, by the mean cross-entropy of their tokens, less that of the tokens of
    turns that are to become less likely.

    Raises:
        UserError: the model's passes have no gradient.
    """
    import torch

    from ia_mech.engine.score import differentiable_logits
    from ia_mech.engine.state import Prefix, prefill_all

    network = model.subject.model
    keys = [one.ids[: one.start] for one in unit.contexts]
    prefixes = list(dict.fromkeys(keys))
    groups, order = prefill_all(network, [Prefix(ids) for ids in prefixes], model.on_tokens)
    place = {prefixes[at]: number for number, at in enumerate(order)}
    draw = torch.Generator().manual_seed(unit.seed)

    def cross_entropy(along: Tensor, dose: float = unit.dose) -> Tensor:
        """Of a new batch, in nats per token."""
        drawn = torch.randperm(len(keys), generator=draw)[:BATCH].tolist()
        some = sorted(drawn, key=lambda i: place[keys[i]])
        turns, ends, signs = [], [], []
        for i in some:
            one = unit.contexts[i]
            turns += one.steered_turns(place[keys[i]], along, dose)
            ends += [len(one.ids) - one.start] * len(one.turns)
            signs += [1, -1][: len(one.turns)]
        log = differentiable_logits(network, groups, turns).log_softmax(-1)
        model.on_tokens(sum(unit.contexts[i].scored for i in some))
        said = []
        for sign, own, turn, end in zip(signs, log, turns, ends, strict=True):
            ids = torch.tensor([turn.ids[end:]], device=log.device).T
            said.append(sign * own[end : len(turn.ids)].gather(-1, ids))
        return -torch.cat(said).mean()

    def start(along: Tensor) -> Tensor:
        return cross_entropy(along, unit.dose / 100)

    return descend(network, draw, start, cross_entropy, unit.steps)


def descend(
    network: Any,
    draw: torch.Generator,
    start: Callable[[Tensor], Tensor],
    loss: Callable[[Tensor], Tensor],
    steps: int,
) -> np.ndarray:
    """The direction of least loss: downhill from a start at a dose near 0, then by steps of Adam,
    after each of which its length is 1 again.

    Args:
        network: the model.
        draw: draws the direction at which the start's gradient is taken.
        start, loss: scalars of ``[d_model]``; the start's doesn't depend on the place.
        steps: of Adam.

    Returns:
        ``[d_model]`` float32 of length 1.
    """
    import torch

    from ia_mech.models.load import text_config

    along = torch.randn(text_config(network.config).hidden_size, generator=draw).requires_grad_()
    (uphill,) = torch.autograd.grad(start(along), along)
    downhill = -uphill if uphill.norm() > 0 else along.detach()
    along = (downhill / downhill.norm()).requires_grad_()
    adam = torch.optim.Adam([along], lr=RATE / len(along) ** 0.5)
    for _ in range(steps):
        adam.zero_grad()
        loss(along).backward()
        adam.step()
        with torch.no_grad():
            along /= along.norm()
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
    arms: Sequence[Change], kl: float, kl_of: Callable[[Sequence[Change]], np.ndarray]
) -> list[Change]:
    """The arms with doses whose mean KL at the header is this one.

    A KL grows about with the square of a dose: hence the first step. It may grow otherwise, so
    steps become larger until what is wanted lies between two doses; then their geometric mean takes
    the place of one of them, until the KL is near.

    Args:
        arms: with a first guess of the dose. Those that don't come near are left out.
        kl: in nats.
        kl_of: the mean KL of each of some arms.
    """
    found: dict[int, Change] = {}
    left = dict(enumerate(arms))
    below, above = dict.fromkeys(left, 0.0), dict.fromkeys(left, np.inf)  # doses that were tried
    for number in range(1, ROUNDS + 1):
        if not left:
            break
        for n, value in zip(list(left), kl_of(list(left.values())), strict=True):
            dose = left[n].dose
            if abs(value - kl) <= KL_TOLERANCE * kl:
                found[n] = left.pop(n)
                continue
            ends = below if value < kl else above
            ends[n] = dose
            if below[n] > 0 and above[n] < np.inf:
                dose = (below[n] * above[n]) ** 0.5
            else:
                dose *= np.clip((kl / max(value, 1e-12)) ** (number / 2), 1 / 8, 8)
            left[n] = replace(left[n], dose=float(dose))
    return [found[n] for n in sorted(found)]
