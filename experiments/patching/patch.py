"""Likelihoods of turns while states of one context stand in another one's run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.given_turns import places_of
from experiments.patching.read import Pair
from ia_mech.chat.format import ChatContext
from ia_mech.engine.capture import find_blocks
from ia_mech.engine.intervene import Add, Intervention, Replace
from ia_mech.engine.state import Prefix, prefill
from ia_mech.engine.sampling import stream_key
from ia_mech.likelihood.intervened import Continued

INTERCHANGE = "interchange"
SELF, SAME, OTHER, RANDOM = (
    "own states",
    "same content",
    "response to another query",
    "random direction",
)
CONTROLS = (SELF, SAME, OTHER, RANDOM)
ALL_LAYERS = "all layers"  # of one position
HEADER, TAIL = "header", "turn end to header"
RESPONSE, BEFORE_TAIL = "response and turn end", "response alone"
BOTH = "response, turn end and header"
BARE = "header after nothing"
ARMS = (HEADER, TAIL, RESPONSE, BEFORE_TAIL, BOTH, BARE)
EVERY = 4  # layers, of controls

Cell = tuple[int, str]


@dataclass(frozen=True)
class Design:
    """What is patched.

    Attributes:
        cells: layer and position of each interchange.
        controls: those of the controls.
        arms: whether the arms of several states are there.
        temperature: that turns are scored at.
        seed: of random directions.
    """

    cells: tuple[Cell, ...]
    controls: tuple[Cell, ...]
    arms: bool
    temperature: float
    seed: int


@dataclass(frozen=True)
class _Row:
    """Interventions in a run, and what they are of."""

    of: str
    layer: int
    position: str
    interventions: tuple[Intervention, ...]
    distance: float = np.nan


def patched(model: PreTrainedModel, pair: Pair, design: Design) -> pd.DataFrame:
    """Likelihoods of a pair's turns under every intervention of a design.

    Returns:
        A row per intervention and turn: ``of`` (:data:`INTERCHANGE`, a control or an arm),
        ``layer`` (-1 for all), ``position`` (empty for several), ``turn``, ``distance`` (length of
        the change over that of the state), and ``[tokens]`` log-likelihoods in nats: ``before``
        and ``after`` the intervention, and ``goal`` after response B.
    """
    turns = list(pair.turns)
    places, donors = places_of(pair.a), places_of(pair.b)
    run_a = Continued(model, pair.a.ids, min(places.values()), turns)
    run_b = Continued(model, pair.b.ids, min(donors.values()), turns)
    states_a, states_b = _states(run_a, places), _states(run_b, donors)
    plain = [(turn, ()) for turn in range(len(turns))]
    log_a = run_a.score(plain, design.temperature)
    log_b = run_b.score(plain, design.temperature)

    def table(run: Continued, before: list[np.ndarray], rows: list[_Row]) -> pd.DataFrame:
        wanted = [(turn, row.interventions) for row in rows for turn in range(len(turns))]
        found = run.score(wanted, design.temperature)
        names = [(row, turn) for row in rows for turn in range(len(turns))]
        return pd.DataFrame(
            {
                "of": [row.of for row, _ in names],
                "layer": [row.layer for row, _ in names],
                "position": [row.position for row, _ in names],
                "turn": [turn for _, turn in names],
                "distance": [row.distance for row, _ in names],
                "before": [before[turn] for _, turn in names],
                "after": found,
                "goal": [log_b[turn] for _, turn in names],
            }
        )

    def relative(layer: int, name: str) -> float:
        own = states_a[name][layer]
        return float((states_b[name][layer] - own).norm() / own.norm())

    rows = [
        _Row(
            INTERCHANGE,
            layer,
            name,
            (Replace(layer, (places[name],), states_b[name][layer, None]),),
            relative(layer, name),
        )
        for layer, name in design.cells
    ]
    givers = {SELF: states_a}
    for of, context in ((SAME, pair.same), (OTHER, pair.other)):
        if context is not None and design.controls:
            givers[of] = _captured(model, context)
    for layer, name in design.controls:
        at = (places[name],)
        for of, states in givers.items():
            rows.append(_Row(of, layer, name, (Replace(layer, at, states[name][layer, None]),)))
        direction = _direction(len(states_a[name][layer]), pair.source, layer, name, design.seed)
        dose = relative(layer, name)
        rows.append(_Row(RANDOM, layer, name, (Add(layer, at, direction, dose),), dose))
    if not design.arms:
        return table(run_a, log_a, rows)
    header = [name for name in places if name.startswith("header_")]
    rows += [_Row(ALL_LAYERS, -1, name, _everywhere([name], places, states_b)) for name in places]
    rows += [
        _Row(HEADER, -1, "", _everywhere(header, places, states_b)),
        _Row(TAIL, -1, "", _everywhere(list(places), places, states_b)),
    ]
    reverse = [
        _Row(RESPONSE, -1, "", _everywhere(header, donors, states_a)),
        _Row(BEFORE_TAIL, -1, "", _everywhere(list(places), donors, states_a)),
        _Row(BOTH, -1, "", _everywhere(list(places), donors, states_b)),
    ]
    parts = [table(run_a, log_a, rows), table(run_b, log_a, reverse)]
    if pair.bare is not None:
        start = len(pair.bare) - len(header)
        run = Continued(model, pair.bare, start, turns)
        alone = {name: start + number for number, name in enumerate(header)}
        rows = [_Row(BARE, -1, "", _everywhere(header, alone, states_b))]
        parts.append(table(run, run.score(plain, design.temperature), rows))
    return pd.concat(parts, ignore_index=True)


def _states(run: Continued, places: dict[str, int]) -> dict[str, Tensor]:
    """Position → ``[layers + 1, d_model]`` of a run without interventions."""
    return {name: run.states[0, :, at - run.start] for name, at in places.items()}


def _captured(model: PreTrainedModel, context: ChatContext) -> dict[str, Tensor]:
    """The same of a context that no turn follows."""
    places = places_of(context)
    prefix = Prefix(context.ids, tuple(places.values()))
    residuals = prefill(model, [prefix], find_blocks(model)).residuals
    assert residuals is not None  # blocks are given
    return {name: residuals[0, :, number] for number, name in enumerate(places)}


def _everywhere(
    names: Sequence[str], places: dict[str, int], states: dict[str, Tensor]
) -> tuple[Intervention, ...]:
    """States of all layers at some positions."""
    at = tuple(places[name] for name in names)
    each = torch.stack([states[name] for name in names], dim=1)  # [layers + 1, positions, d_model]
    return tuple(Replace(layer, at, some) for layer, some in enumerate(each))


def _direction(width: int, source: str, layer: int, position: str, seed: int) -> Tensor:
    """``[width]`` standard normal numbers."""
    key = stream_key(seed, f"{source}\x1f{position}", layer)
    return torch.from_numpy(np.random.default_rng(key).standard_normal(width))
