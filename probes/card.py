"""A probe on disk: directions in activation space, and the probe's card, which says where they come
from.

::

    probe.safetensors    weights_<direction> [d] float32, of length 1
    card.json            what the caller gives, thresholds, slopes, and the hash of the weights

The card is written last and holds the hash of the weights, so that the files of two probes can't be
mixed up.
"""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import scipy
import torch
from numpy.typing import ArrayLike
from safetensors import SafetensorError
from safetensors.numpy import load, save
from scipy.special import logit
from torch import Tensor

import ia_mech
from ia_mech.errors import UserError
from ia_mech.run.integrity import read_json, replace_file, write_json
from probes.fit.solvers import logistic_path, project
from probes.targets import Outcome

WEIGHTS, CARD = "probe.safetensors", "card.json"
DIRECTIONS = ("logistic", "mass-mean")
SOFTWARE = {
    "ia_mech": ia_mech.__version__,
    "python": platform.python_version(),
    "numpy": np.__version__,
    "scipy": scipy.__version__,
}


@dataclass(frozen=True)
class Direction:
    """One direction in activation space. Further along it, a follow-up is likelier.

    Log-odds are ``slope * (x @ weights - threshold) + base_log_odds``.
    """

    weights: np.ndarray  # [d] float32 of length 1
    threshold: float  # projection at which the predicted probability is the base rate
    slope: float  # change of log-odds per unit of activation, above 0
    base_log_odds: float  # of the base rate, over all turns of the training contexts


def directions(states: ArrayLike, outcome: Outcome, penalty: float) -> dict[str, Direction]:
    """Fit two directions on all contexts: logistic weights, and the difference of means (Marks &
    Tegmark 2023), whose slope comes from a logistic regression on its projections.

    Each run has an intercept. The thresholds use the mean of the intercepts.

    Args:
        states: ``[n, d]`` hidden states at one layer and position.
        outcome: the n contexts' outcome.
        penalty: factor of half the squared weights, for states whose mean squared norm is 1.

    Raises:
        ValueError: within each run all states are the same.
    """
    states = np.asarray(states, dtype=float)
    runs, k, n = outcome.runs, outcome.positives, outcome.trials
    rows = np.arange(len(states))
    split = project(states, rows, runs)
    centred, run_count = split.train, int(runs.max()) + 1
    if not centred.shape[1]:
        raise ValueError("hidden states that don't differ have no direction")
    (fitted,) = logistic_path(centred, runs, k, n, [penalty], run_count)
    apart = centred.T @ (k / k.sum() - (n - k) / (n - k).sum())
    apart /= (centred @ apart).std()
    (scaled,) = logistic_path((centred @ apart)[:, None], runs, k, n, [1e-3], run_count)
    base_log_odds = float(logit(k.sum() / n.sum()))
    found = {}
    for name, weights, intercepts in (
        ("logistic", fitted.weights, fitted.intercepts),
        ("mass-mean", scaled.weights[0] * apart, scaled.intercepts),
    ):
        raw = split.axes @ weights
        slope = float(np.linalg.norm(raw))
        level = float((intercepts - split.centres @ raw).mean())
        unit = (raw / slope).astype(np.float32)
        found[name] = Direction(unit, (base_log_odds - level) / slope, slope, base_log_odds)
    return found


@dataclass(frozen=True)
class Probe:
    """Directions of equal width, by name, and the probe's card: plain JSON with run, model, layer
    convention, position, target, sources and scores."""

    directions: Mapping[str, Direction]
    card: dict

    def score(self, residuals: Tensor, direction: str = "logistic") -> Tensor:
        """Projections minus the threshold, in units of the residual stream; 0 at the base rate.

        Contexts that the probe was trained on score better than new ones do.

        Args:
            residuals: ``[…, d]`` of any float type, on any device.
            direction: the direction's name.

        Returns:
            ``[…]`` float32, on the same device.

        Raises:
            UserError: there is no such direction.
            ValueError: the residuals have another width.
        """
        along = self._direction(direction)
        width, shape = len(along.weights), tuple(residuals.shape)
        if shape[-1:] != (width,):
            raise ValueError(f"the probe is for width {width}, the residuals have shape {shape}")
        weights = torch.as_tensor(along.weights, device=residuals.device)
        return residuals.float() @ weights - along.threshold

    def probability(self, residuals: Tensor, direction: str = "logistic") -> Tensor:
        """``[…]`` float32 predicted rate of follow-ups; see :meth:`score` for the rest."""
        along, scores = self._direction(direction), self.score(residuals, direction)
        return (along.slope * scores + along.base_log_odds).sigmoid()

    def _direction(self, name: str) -> Direction:
        if name not in self.directions:
            known = ", ".join(self.directions)
            raise UserError(f"the probe has no direction {name!r}", f"choose from {known}")
        return self.directions[name]

    def save(self, folder: str | Path) -> None:
        """Write the two files, each replaced whole, the card last. A card that was loaded keeps the
        versions of the software that the probe was fitted with."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        about = {name: asdict(along) for name, along in self.directions.items()}
        content = save({f"weights_{name}": own.pop("weights") for name, own in about.items()})
        card = {"software": dict(SOFTWARE), **self.card, "directions": about}
        card["weights"] = {"file": WEIGHTS, "sha256": sha256(content).hexdigest()}
        replace_file(folder / WEIGHTS, lambda file: file.write_bytes(content))
        write_json(folder / CARD, card)

    @classmethod
    def load(cls, path: str | Path) -> "Probe":
        """The probe of a folder, or of one of its two files.

        Raises:
            UserError: a file is missing, damaged, or belongs to another probe.
        """
        path = Path(path)
        folder = path.parent if path.name in (WEIGHTS, CARD) else path
        for name in (WEIGHTS, CARD):
            if not (folder / name).is_file():
                raise UserError(f"{path} is not a probe (no {name})", "give a probe's folder")
        again = "write the probe again with ia-mech probes"
        try:
            card, content = read_json(folder / CARD), (folder / WEIGHTS).read_bytes()
            if sha256(content).hexdigest() != card["weights"]["sha256"]:
                raise UserError(f"{folder / WEIGHTS} is damaged, or of another {CARD}", again)
            tensors = load(content)
            found = {
                name: Direction(weights=tensors[f"weights_{name}"], **facts)
                for name, facts in card["directions"].items()
            }
        except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"the probe in {folder} is damaged ({error!r})", again) from None
        return cls(found, card)
