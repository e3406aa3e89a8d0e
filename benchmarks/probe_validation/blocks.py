"""Planted arrays for what hidden states add to output and text, and for the confidence set.

They go to :func:`probes.analysis.analyse` directly: no run is written, and nothing is permuted, so
that hundreds take minutes.

A *state* is anisotropic Gaussian noise with one direction that carries something. In all kinds but
``set`` the output state carries a latent z, and text carries nothing:

- ``copy``: the hidden state is the output state, rotated, with noise added.
- ``loud-copy``: the output state carries z where it varies least. The hidden state carries what
  that direction reads (z with the output's error), with more error still, but loudly: alone, it is
  read better than the output is.
- ``complement``: the hidden state carries another latent, which counts as much, as loudly as the
  output state carries z: alone, both have the same AUROC.
- ``set``: a strong signal at one of three positions, from layer 4 of 7 on, where it is clearest.
"""

import numpy as np
from scipy.special import expit

from benchmarks.probe_validation.planted import Plan, plant
from probes.analysis import Analysis, Arrays, Settings, analyse
from probes.controls import Baseline, Controls
from probes.targets import Outcome

BLOCKS = ("copy", "loud-copy", "complement", "set")
CONTEXTS, WIDTH, TURNS = 120, 32, 8
SETTINGS = Settings(permutations=0, resamples=1000, workers=1)


def analysed(kind: str, seed: int) -> tuple[Analysis, tuple[int, int]]:
    """Plant and analyse once.

    Returns:
        The analysis, and indices of the first informative layer and its position.
    """
    if kind == "set":
        plan = Plan("signal", seed=seed, contexts=150, d_model=32, oracle_auroc=0.85)
        planted = plant(plan)
        full = np.full(len(planted.positives), planted.turns.shape[1])
        outcome = Outcome.of(planted.positives, full, planted.sources)
        at = plan.informative_layer, plan.positions.index(plan.informative_position)
        return analyse(Arrays(planted.residuals, plan.positions), outcome, None, SETTINGS), at
    rng = np.random.default_rng([seed, BLOCKS.index(kind)])
    z, other = rng.standard_normal((2, CONTEXTS))
    output, read = _state(z, 2.0, rng, quiet=kind == "loud-copy")
    log_odds = 1.2 * z
    if kind == "copy":
        turned = output @ np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0]
        hidden = turned + 0.5 * rng.standard_normal(turned.shape)
    elif kind == "loud-copy":
        hidden, _ = _state(read + 0.3 * rng.standard_normal(CONTEXTS), 10.0, rng)
    else:
        hidden, _ = _state(other, 2.0, rng)
        log_odds = 1.2 * (z + other)
    noise = rng.standard_normal((CONTEXTS, WIDTH))
    layers = np.array([noise, hidden, hidden + 0.3 * rng.standard_normal(hidden.shape)])
    outcome = Outcome.of(
        rng.binomial(TURNS, expit(log_odds - 0.8)), np.full(CONTEXTS, TURNS), np.arange(CONTEXTS)
    )
    text = Baseline("text", rng.standard_normal((CONTEXTS, 20)), "noise")
    controls = Controls([text], [Baseline("output", output, "the output state")])
    given = Arrays(layers[:, :, None], ["header_last"])
    return analyse(given, outcome, controls, SETTINGS), (1, 0)


def _state(
    carried: np.ndarray, loudness: float, rng: np.random.Generator, quiet: bool = False
) -> tuple[np.ndarray, ...]:
    """``[contexts, width]`` a state that carries a value, and ``[contexts]`` what the direction of
    the value reads there; ``loudness`` is relative to the noise along that direction, which is the
    direction of least noise if ``quiet``."""
    deviations = np.geomspace(3, 0.3, WIDTH)
    rotation, _ = np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))
    root = rotation * (deviations / np.sqrt(np.mean(deviations**2)))
    direction = rotation[:, -1] if quiet else rng.standard_normal(WIDTH)
    direction /= np.linalg.norm(direction)
    noise = rng.standard_normal((CONTEXTS, WIDTH)) @ root.T
    size = loudness * np.linalg.norm(root.T @ direction)
    return noise + size * np.outer(carried, direction), carried + noise @ direction / size
