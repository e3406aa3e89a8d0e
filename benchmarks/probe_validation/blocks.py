"""Planted arrays for what hidden states add to the base, and for the confidence set.

They go to :func:`probes.analysis.analyse` directly: no run is written, and nothing is permuted, so
that hundreds of sets take minutes.

A *state* is anisotropic Gaussian noise with one direction that carries something. In all kinds but
``leak`` and ``set`` the output state carries a latent z, and text and the states at the ends of
query and response carry nothing:

- ``copy``: the hidden state is the output state, rotated, with noise added.
- ``loud-copy``: the output state carries z in the direction in which it varies least. The hidden
  state carries a noisier copy of what that direction reads, but in a direction of large variance.
  So a probe reads the hidden state better than the output, though the hidden state has nothing of
  its own.
- ``complement``: the hidden state carries another latent, which counts as much as z, as strongly as
  the output state carries z. Each alone has the same AUROC.
- ``wide-complement``, ``scarce-complement``: like ``complement`` with more features; with as many
  contexts and features as the study has, or with few contexts.
- ``leak``: rates depend on the words of the conversation, and every state holds a bag of these
  words, as the attention of random blocks leaves one. Nothing else is in the states.
- ``set``: a strong signal at one of three positions, from layer 4 of 7 on, and clearest there.
"""

import numpy as np
from scipy.special import expit

from benchmarks.probe_validation.planted import Plan, plant
from probes.analysis import Analysis, AnalysisSettings, Arrays, analyse
from probes.controls import Baseline, Controls, lsa
from probes.targets import Outcome

SIZES = {"wide-complement": (480, 576), "scarce-complement": (120, 576)}  # contexts, features
BLOCKS = ("copy", "loud-copy", "complement", "leak", *SIZES, "set")
CONTEXTS, WIDTH, TURNS = 120, 32, 8
WORDS, ASKED, SAID = 300, 12, 25  # different ones, and of query and response
SETTINGS = AnalysisSettings(permutations=0, resamples=1000, workers=1)


def analysed(kind: str, seed: int) -> tuple[Analysis, tuple[int, int]]:
    """Plant and analyse once.

    Returns:
        The analysis, and indices of the first informative layer and its position.
    """
    if kind == "set":
        plan = Plan("signal", seed=seed, contexts=150, d_model=32, oracle_auroc=0.85)
        planted = plant(plan)
        full = np.full(len(planted.positives), planted.turns.shape[1])
        outcome = Outcome.from_counts(planted.positives, full, planted.sources)
        at = plan.informative_layer, plan.positions.index(plan.informative_position)
        return analyse(Arrays(planted.residuals, plan.positions), outcome, None, SETTINGS), at
    rng = np.random.default_rng([seed, BLOCKS.index(kind)])
    given, controls, log_odds = _leak(rng) if kind == "leak" else _latents(kind, rng)
    turns = np.full(len(log_odds), TURNS)
    outcome = Outcome.from_counts(
        rng.binomial(turns, expit(log_odds)), turns, np.arange(len(turns))
    )
    return analyse(given, outcome, controls, SETTINGS), (1, 0)


def _latents(kind: str, rng: np.random.Generator) -> tuple[Arrays, Controls, np.ndarray]:
    """States, controls and log-odds of all kinds where the output carries a latent."""
    contexts, width = SIZES.get(kind, (CONTEXTS, WIDTH))
    z, other = rng.standard_normal((2, contexts))
    output, read = _state(z, 2.0, width, rng, quiet=kind == "loud-copy")
    log_odds = 1.2 * z
    if kind == "copy":
        turned = output @ np.linalg.qr(rng.standard_normal((width, width)))[0]
        hidden = turned + 0.5 * rng.standard_normal(turned.shape)
    elif kind == "loud-copy":
        hidden, _ = _state(read + 0.3 * rng.standard_normal(contexts), 10.0, width, rng)
    else:
        hidden, _ = _state(other, 2.0, width, rng)
        log_odds = 1.2 * (z + other)
    noise = rng.standard_normal((contexts, width))
    layers = np.array([noise, hidden, hidden + 0.3 * rng.standard_normal(hidden.shape)])
    ends = np.tile(rng.standard_normal((contexts, 2 * width)), (len(layers), 1, 1))
    text = Baseline("text", rng.standard_normal((contexts, 20)), "noise")
    controls = Controls([text], [Baseline("output", output, "the output state")])
    return Arrays(layers[:, :, None], ["header_last"], ends), controls, log_odds - 0.8


def _leak(rng: np.random.Generator) -> tuple[Arrays, Controls, np.ndarray]:
    """States, controls and log-odds of ``leak``: every state holds a bag of words."""
    frequency = 1 / (np.arange(WORDS) + 5)
    words = rng.choice(WORDS, (CONTEXTS, ASKED + SAID), p=frequency / frequency.sum())
    bags = np.stack(
        [np.bincount(row[:ASKED], minlength=WORDS) for row in words]
        + [np.bincount(row, minlength=WORDS) for row in words]
    ).astype(float)
    asked, everything = bags[:CONTEXTS], bags[CONTEXTS:]
    embeddings = rng.standard_normal((WORDS, WIDTH)) / np.sqrt(ASKED + SAID)

    def state(bag: np.ndarray, noise: float) -> np.ndarray:
        """A state as another attention head would hold it: rotated, with noise of its own."""
        turned = bag @ embeddings @ np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0]
        return turned + noise * rng.standard_normal(turned.shape)

    layers = np.array([state(everything, noise) for noise in (0.1, 0.1, 0.2)])
    ends = np.array([np.hstack([state(asked, 0.1), state(everything, 0.1)]) for _ in layers])
    texts = [" ".join(f"w{word}" for word in row) for row in words]
    output = Baseline("output", state(everything, 0.3), "the output state")
    meant = everything @ embeddings @ rng.standard_normal(WIDTH)
    log_odds = 1.5 * (meant - meant.mean()) / meant.std() - 0.8
    return (
        Arrays(layers[:, :, None], ["header_last"], ends),
        Controls([lsa(texts)], [output]),
        log_odds,
    )


def _state(
    carried: np.ndarray, loudness: float, width: int, rng: np.random.Generator, quiet: bool = False
) -> tuple[np.ndarray, ...]:
    """``[contexts, width]`` a state that carries a value, and ``[contexts]`` what the direction of
    the value reads there; ``loudness`` is relative to the noise along that direction, which is the
    direction of least noise if ``quiet``."""
    deviations = np.geomspace(3, 0.3, width)
    rotation, _ = np.linalg.qr(rng.standard_normal((width, width)))
    root = rotation * (deviations / np.sqrt(np.mean(deviations**2)))
    direction = rotation[:, -1] if quiet else rng.standard_normal(width)
    direction /= np.linalg.norm(direction)
    noise = rng.standard_normal((len(carried), width)) @ root.T
    size = loudness * np.linalg.norm(root.T @ direction)
    return noise + size * np.outer(carried, direction), carried + noise @ direction / size
