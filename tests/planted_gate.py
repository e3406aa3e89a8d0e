"""A transformer set by hand, whose turns name their response only where the header tells them to.

As in :mod:`planted_reaction`, a response holds a token that names it. Block :data:`OPEN` of the
turn's tokens reads some dimensions of a header token, which are 0 unless a test writes there. What
it reads opens a gate, through which block :data:`planted_reaction.READ` reads the response's name.
With the gate shut the turn leans to its response a little, too little for greedy decoding.
"""

from types import SimpleNamespace

import numpy as np
import planted_reaction as planted
import torch
from planted_reaction import ECHO, IS_BOS, IS_NAME, IS_TURN, NAMES, READ, READ_OUT

from experiments.experiment import Model
from experiments.steering import SteeredContext
from ia_mech.engine.intervene import Add
from ia_mech.engine.score import Turn

OPEN, GATE, JUNK = 3, 17, planted.FILLER  # a block, dimensions, what greedy turns say


def model(reads: bool) -> Model:
    """The model; with ``reads`` False there is nothing behind the gate."""
    made = planted.model(True)
    with torch.no_grad():
        for block in made.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(block.self_attn, name).weight.zero_()
        planted._attends(made, OPEN, IS_TURN, planted.IS_HEADER, planted.COPIED, GATE, 0.4)
        if reads:
            planted._attends(made, READ, GATE, IS_NAME, planted.OWN, READ_OUT, 2.0)
            attention = made.model.layers[READ - 1].self_attn
            attention.q_proj.weight[3, planted.CONSTANT] = 1.0
            attention.k_proj.weight[3, IS_BOS] = 1.0
            attention.q_proj.weight[7, GATE] = attention.k_proj.weight[7, IS_NAME] = 2.0
        made.lm_head.weight[JUNK, IS_TURN] = 2.0
    planted.install(made)
    return Model(SimpleNamespace(model=made), None)


def queries(count: int, seed: int) -> list[list[SteeredContext]]:
    """Queries, each with a context per name and the turn that says it; no layer is set. In every
    third query no response holds its name, so that nothing can open."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        some = []
        for name in range(NAMES):
            length = int(rng.integers(4, 9))
            made = planted.context(name, length, int(rng.integers(length)), query=2 + number % 4)
            at = tuple(made.positions[position] for position in planted.POSITIONS[2:])
            ids = made.ids
            if number % 3 == 2:
                ids = [JUNK if one == planted.NAME + name else one for one in ids]
            where = tuple(ids), 0, at, False
            some.append(SteeredContext(f"q{number}", "", 0, *where, (planted.turn(name, 1),)))
        found.append(some)
    return found


def said(one: Model, contexts: list[SteeredContext], layer: int, direction, dose: float) -> list:
    """The name that greedy decoding gives after each context and the opener; no index if none."""
    turns = []
    for number, context in enumerate(contexts):
        ids = (*context.ids[context.start :], *planted.turn(0, 1))
        at = tuple(position - context.start for position in context.at)
        moved = () if direction is None else (Add(layer, at, direction, dose),)
        turns.append(Turn(number, ids, interventions=moved, whole_at=len(ids) - 1))
    scores = one.score([context.ids[: context.start] for context in contexts], turns)
    return [int(score.whole.argmax()) - ECHO for score in scores]
