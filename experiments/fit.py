"""What is learned before it is tried: a direction by gradient, and doses of one KL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from experiments.experiment import Model, Unit
from ia_mech.run.queries import Query
from ia_mech.steering import TURN, SteeringVector

if TYPE_CHECKING:  # these load torch
    from torch import Tensor

    from ia_mech.engine.score import Turn

BATCH, RATE = 12, 0.1  # contexts of a step of Adam, most change of a unit vector


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


# -- learned ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learning(Unit):
    """A direction to be learned.

    Attributes:
        half: of the queries, that the turns are of.
        term: what they come after.
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


def learn(model: Model, unit: Learning) -> np.ndarray:
    """``[d_model]`` float32 of length 1: the direction that makes turns likely if states are moved
    along it by the dose. What is minimised is the mean cross-entropy of the turns' tokens.

    The start is the downhill gradient at a dose near 0. After each step of Adam the direction is
    scaled to length 1.

    Raises:
        UserError: the model's passes have no gradient.
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
