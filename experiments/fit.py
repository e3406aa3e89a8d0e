"""What is learned before it is tried: a direction by gradient, and doses of one KL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from experiments.arms import Arm, conversations_of
from experiments.experiment import Experiment, Model, Unit
from ia_mech.run import Run, labels
from ia_mech.run.queries import Query
from ia_mech.steering import ADD, TURN, SteeringVector

if TYPE_CHECKING:  # these load torch
    from torch import Tensor

    from ia_mech.engine.score import Scored, Turn

BATCH, RATE = 12, 0.1  # contexts of a step of Adam, most change of a unit vector
LEAST_DOSE, MOST_DOSE = 2.0**-8, 2.0**4  # between which a KL is sought, in norms of the state
KEY = ["run", *labels.KEY]  # of a turn
FILE = "vector.safetensors"
DOSE = 0.5  # length of a vector that is learned, in norms of the state that it is added to
UNSTEERED = "unsteered"
ROUNDS, KL_TOLERANCE = 14, 0.1  # of the search; how near the KL has to come, relatively


@dataclass(frozen=True)
class SteeredContext:
    """A context with turns, and where the model is steered.

    Attributes:
        source: of its query.
        ids: with the open header.
        layer: whose states are moved; 0 = embeddings.
        at: indices of the context's tokens that are steered.
        in_turn: whether each token of a turn is, too.
        turns: ids of each.
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
        """How many tokens are scored for all turns together."""
        header = len(self.ids) - self.start
        return sum(header + len(turn) for turn in self.turns)

    def steered_turns(self, number: int, direction: Tensor | None, dose: float) -> list[Turn]:
        """Its turns after its tokens up to ``start``, with the direction added, if there is
        one; the scorer knows the context by its number."""
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
    """A context of a query with turns, steered where a vector says."""
    named = query.contexts["positions"].iloc[k]
    places = {name: None if pd.isna(at) else int(at) for name, at in named.items()}
    at = sorted({at for one in vector.at_context(places) for at in one.positions})
    site = vector.layer, tuple(at), TURN in vector.positions
    return SteeredContext(query.source, query.token_ids[k], *site, tuple(map(tuple, turns)))


# -- learned ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learning(Unit):
    """A direction to be learned.

    Attributes:
        half, term: of the queries that the turns are of, and what they come after.
        contexts: each with a turn that is to become likely.
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

    def rows(self, model: Model) -> pd.DataFrame:
        """One row, with the ``direction``."""
        row = {"half": self.half, "term": self.term, "layer": self.contexts[0].layer}
        return pd.DataFrame([row | {"direction": learn(model, self)}])


def learn(model: Model, unit: Learning) -> np.ndarray:
    """``[d_model]`` float32 of length 1: the direction that makes turns likely if states are moved
    along it by the dose. What is minimised is the mean cross-entropy of the turns' tokens.

    The start is the downhill gradient at a dose near 0. After each step of Adam the direction is
    scaled to length 1.
    """
    import torch

    with torch.inference_mode(False):  # workers compute in it
        return _learn(model, unit)


def _learn(model: Model, unit: Learning) -> np.ndarray:
    import torch

    from ia_mech.engine.score import differentiable_logits
    from ia_mech.engine.state import Prefix, prefill_all
    from ia_mech.models.load import text_config

    network = model.subject.model
    keys = [one.ids[: one.start] for one in unit.contexts]
    prefixes = list(dict.fromkeys(keys))
    groups, order = prefill_all(network, [Prefix(ids) for ids in prefixes], model.on_tokens)
    place = {prefixes[at]: number for number, at in enumerate(order)}
    draw = torch.Generator().manual_seed(unit.seed)

    def cross_entropy(along: Tensor, dose: float) -> Tensor:
        """Of a new batch, in nats per token."""
        drawn = torch.randperm(len(keys), generator=draw)[:BATCH].tolist()
        some = sorted(drawn, key=lambda i: place[keys[i]])
        turns, ends = [], []
        for i in some:
            one = unit.contexts[i]
            turns += one.steered_turns(place[keys[i]], along, dose)
            ends += [len(one.ids) - one.start] * len(one.turns)
        log = differentiable_logits(network, groups, turns).log_softmax(-1)
        model.on_tokens(sum(unit.contexts[i].scored for i in some))
        said = []
        for own, turn, end in zip(log, turns, ends, strict=True):
            ids = torch.tensor([turn.ids[end:]], device=log.device).T
            said.append(own[end : len(turn.ids)].gather(-1, ids))
        return -torch.cat(said).mean()

    along = torch.randn(text_config(network.config).hidden_size, generator=draw).requires_grad_()
    (uphill,) = torch.autograd.grad(cross_entropy(along, unit.dose / 100), along)
    downhill = -uphill if uphill.norm() > 0 else along.detach()
    along = (downhill / downhill.norm()).requires_grad_()
    adam = torch.optim.Adam([along], lr=RATE / len(along) ** 0.5)
    for _ in range(unit.steps):
        adam.zero_grad()
        cross_entropy(along, unit.dose).backward()
        adam.step()
        with torch.no_grad():
            along /= along.norm()
    return along.detach().numpy()


class Vectors(Experiment):
    """An experiment that learns vectors, and writes greedy turns under them.

    Attributes:
        positions: where vectors are added.
    """

    positions: tuple[str, ...]

    def vector(self, layer: int, direction: Iterable[float], dose: float = DOSE) -> SteeringVector:
        """A direction as what is added after a layer."""
        import torch

        model, along = self.runs[0].model, torch.tensor([*direction], dtype=torch.float32)
        what = ADD, layer, self.positions, along, dose
        return SteeringVector(*what, model["name"], model["weights_hash"])

    def steered(self, query: Query, k: int, layer: int, turn: Sequence[int]) -> SteeredContext:
        """A query's context with a turn, steered after a layer."""
        anything = self.vector(layer, np.ones(self.runs[0].model["d_model"]))
        return steered_context(query, k, anything, (turn,))

    def check_layer(self, layer: int) -> None:
        """Refuse a layer or positions that the model lacks."""
        model, names = self.runs[0].model, list(self.runs[0].contexts["positions"].iloc[0])
        width = model["d_model"]
        self.vector(layer, np.ones(width)).check(model["layers"], width, names)

    def learning(self, half: int, term: str, contexts: Sequence[SteeredContext]) -> Learning:
        """A vector that is learned from these contexts of a half of the queries."""
        tokens = sum(len(ids) for ids in {one.ids[: one.start] for one in contexts})
        batch = min(BATCH, len(contexts)) * sum(one.scored for one in contexts) // len(contexts)
        name = f"half {half + 1}", "", tokens + (self.args.steps + 1) * batch
        how = DOSE, self.args.steps, self.args.seed
        return Learning(*name, half, term, tuple(contexts), *how)

    def write_under(self, vector: SteeringVector, name: str, contexts: pd.DataFrame) -> Run:
        """The greedy turns after contexts under a vector, which is kept beside them."""
        folder = self.place(name)
        folder.mkdir(parents=True, exist_ok=True)
        vector.save(folder / FILE)
        settings = {"temperatures": (), "intervention": folder / FILE}
        return self.sample(name, Arm(conversations_of(contexts), settings))


# -- doses of one KL -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dosing(Unit):
    """Directions, ``[d_model]`` each, whose doses of one KL (nats) are sought in contexts of the
    queries that choose."""

    contexts: tuple[SteeredContext, ...]
    directions: tuple[tuple[float, ...], ...]
    kl: float

    def rows(self, model: Model) -> pd.DataFrame:
        """A row per direction with its ``dose``, at which its KL, a mean over sources, is the
        wanted one."""
        # Of the first token alone: a turn whose one token doesn't matter.
        firsts = [replace(one, turns=((0,),)) for one in self.contexts]
        sources = [one.source for one in firsts]

        def kl_of(some: np.ndarray, doses: np.ndarray) -> np.ndarray:
            along = [self.directions[n] for n in some]
            each = [effects(model, one, along, doses.tolist())[1] for one in firsts]
            return pd.DataFrame(each).groupby(sources).mean().mean().to_numpy()

        return pd.DataFrame({"dose": doses_of_equal_kl(len(self.directions), self.kl, kl_of)})


@dataclass(frozen=True)
class Steered(Unit):
    """A query's contexts, each with a turn that the judge calls a follow-up and one that it
    doesn't. They are scored under directions with their doses."""

    contexts: tuple[SteeredContext, ...]
    directions: tuple[tuple[float, ...], ...]
    doses: tuple[float, ...]

    def rows(self, model: Model) -> pd.DataFrame:
        """A row per context and direction: ``draw`` (its number: 0 is the direction), and in nats
        ``kl`` at the header and ``log_odds``, the change of the log-odds of follow-ups."""
        found = []
        for context in self.contexts:
            moved, kl = effects(model, context, self.directions, self.doses)
            rows = {"draw": range(len(kl)), "dose": self.doses, "kl": kl}
            found.append(pd.DataFrame(rows | {"log_odds": moved[:, 0] - moved[:, 1]}))
        return pd.concat(found, ignore_index=True)


def scored_under(
    model: Model,
    context: SteeredContext,
    directions: Sequence[Sequence[float]],
    doses: Sequence[float],
) -> list[Scored]:
    """A context's turns, scored without a vector, then under each direction."""
    import torch

    turns = context.steered_turns(0, None, 0.0)
    for direction, dose in zip(directions, doses, strict=True):
        turns += context.steered_turns(0, torch.tensor(direction), dose)
    return model.score([context.ids[: context.start]], turns)


def effects(
    model: Model,
    context: SteeredContext,
    directions: Sequence[Sequence[float]],
    doses: Sequence[float],
) -> tuple[np.ndarray, np.ndarray]:
    """What directions change in a context, in nats: ``[directions, turns]`` log-probabilities of
    the turns, and ``[directions]`` KLs of the first token's distribution from the unsteered one."""
    scores = scored_under(model, context, directions, doses)
    header, count = len(context.ids) - context.start, len(context.turns)
    sums = [one.logprobs_raw[header:].sum(dtype=np.float64) for one in scores]
    plain, *moved = np.reshape(sums, (-1, count))
    before, *first = (np.asarray(one.whole, dtype=np.float64) for one in scores[::count])
    kl = [max(float(np.exp(after) @ (after - before)), 0.0) for after in first]
    return np.array(moved) - plain, np.array(kl)


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
