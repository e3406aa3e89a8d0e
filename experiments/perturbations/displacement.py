"""How far a perturbation moves the header's residual stream, layer by layer."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from experiments.perturbations.read import Compared
from ia_mech.conversations import UNPERTURBED
from ia_mech.run import Run


@dataclass(frozen=True)
class Moved:
    """One condition at one layer and position.

    Attributes:
        condition, layer, position: where.
        distance: ``[pairs]`` L2 distance of the perturbed state from the unperturbed one, over the
            mean distance between unperturbed states of different sources of the pair's dataset; NaN
            where there is no state, or no other source.
        relative: ``[pairs]`` the same distance over the norm of the unperturbed state.
    """

    condition: str
    layer: int
    position: str
    distance: np.ndarray
    relative: np.ndarray


def displacements(compared: Compared) -> Iterator[Moved]:
    """Every condition at every layer and header position that all runs kept.

    ``[pairs]`` are the unperturbed contexts, in the order of ``compared.contexts``.
    """
    runs = {str(run.path): run for run in (*compared.base.runs, compared.run)}
    contexts = compared.contexts
    plain = contexts[contexts["condition"] == UNPERTURBED]
    conditions = [c for c in dict.fromkeys(contexts["condition"]) if c != UNPERTURBED]
    of = {
        condition: contexts[contexts["condition"] == condition].set_index("pair").loc[plain["pair"]]
        for condition in conditions
    }
    datasets, sources = plain["dataset"].to_numpy(), plain["source"].to_numpy()
    for position in compared.run.positions:
        for layer in compared.run.layers:
            before = _states(runs, plain, layer, position)
            scale = typical_distance(before, datasets, sources)
            norm = np.linalg.norm(before, axis=1)
            for condition, rows in of.items():
                moved = np.linalg.norm(_states(runs, rows, layer, position) - before, axis=1)
                yield Moved(condition, layer, position, moved / scale, moved / norm)


def _states(runs: dict[str, Run], rows, layer: int, position: str) -> np.ndarray:
    """``[rows, d_model]`` float64 of contexts that may lie in several runs."""
    stored = {
        place: runs[place].residuals(layer, position) for place in dict.fromkeys(rows["place"])
    }
    pairs = zip(rows["place"], rows["row"], strict=True)
    return torch.stack([stored[place][row] for place, row in pairs]).double().numpy()


def typical_distance(states: np.ndarray, datasets: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """``[n]``: the mean L2 distance between states of different sources of each one's dataset.

    Args:
        states: ``[n, d_model]``; rows with NaN are left out.
        datasets: ``[n]``.
        sources: ``[n]``.

    Returns:
        NaN where the dataset has no two sources, or their states don't differ.
    """
    found = np.full(len(states), np.nan)
    there = ~np.isnan(states).any(axis=1)
    for dataset in set(datasets):
        at = there & (datasets == dataset)
        x = states[at]
        squares = (x**2).sum(1)
        gaps = np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * x @ x.T, 0))
        different = sources[at][:, None] != sources[at][None]
        if gaps[different].any():  # at layer 0 one token's states are all alike
            found[datasets == dataset] = gaps[different].mean()
    return found
