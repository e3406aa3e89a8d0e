"""What goes into an analysis and what comes out: plain records, arrays in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ia_mech.stats import Estimate
from probes.fit.folds import Tested
from probes.fitting.mdl import CodeLength
from probes.outcome import Outcome


class Hidden(Protocol):
    """Hidden states by layer; ``probes.dataset.ProbeSet`` is one, :class:`Arrays` another."""

    layers: Sequence[int]
    positions: Sequence[str]

    def layer(self, layer: int) -> np.ndarray:
        """``[contexts, positions, d_model]``."""


@dataclass(frozen=True)
class Arrays:
    """Hidden states in memory: ``states`` is ``[layers, contexts, positions, d_model]``."""

    states: np.ndarray
    positions: Sequence[str]

    def __post_init__(self) -> None:
        if self.states.ndim != 4 or self.states.shape[2] != len(self.positions):
            raise ValueError(
                f"states have shape {self.states.shape}, not [layers, contexts, positions, d_model]"
                f" with {len(self.positions)} positions"
            )

    @property
    def layers(self) -> Sequence[int]:
        return range(len(self.states))

    def layer(self, layer: int) -> np.ndarray:
        return self.states[layer]


@dataclass(frozen=True)
class Settings:
    """How to analyse.

    Attributes:
        estimator: of the scores that are reported.
        folds: of the outer loop; the inner one has one less.
        permutations: of the tests.
        control_draws: random functions of the control task.
        orders: random orders of sources for the code length.
        level: coverage of intervals.
        resamples: bootstrap samples.
        seed: of folds, permutations, resampling, control task and orders.
        workers: threads; the processors this process may use, if not given.
    """

    estimator: str = "logistic"
    folds: int = 5
    permutations: int = 1000
    control_draws: int = 10
    orders: int = 2
    level: float = 0.95
    resamples: int = 2000
    seed: int = 0
    workers: int | None = None


@dataclass(frozen=True)
class Compared:
    """A control beside the headline.

    Attributes:
        name: of the control.
        what: one line on what it is.
        kind: ``text``, ``output`` or ``control task``.
        auroc: its own.
        gain: the headline's AUROC less its own, on the same resamples.
        scores: ``[contexts]`` log-odds; None for the control task, which has other labels.
    """

    name: str
    what: str
    kind: str
    auroc: Estimate
    gain: Estimate
    scores: np.ndarray | None


@dataclass(frozen=True)
class Headline:
    """The probe whose layer, position and penalty the inner loops chose.

    Attributes:
        layer, position: chosen on all contexts.
        picked: (layer, position) that each outer fold chose.
        scores: ``[contexts]`` log-odds, each from the probe of its outer fold, at that fold's cell.
        weights: ``[folds, d_model]`` of those probes, on hidden states as they are.
        penalty: for logistic regression on all contexts at ``layer`` and ``position``: the median
            of what the inner loops chose.
        measures: name -> estimate, see :data:`MEASURES`.
        chance: share of the variance of scores that is chance in training, mean of ``picked``;
            intervals are widened by it (:meth:`ia_mech.stats.Replicated.with_training`).
    """

    layer: int
    position: str
    picked: list[tuple[int, str]]
    scores: np.ndarray
    weights: np.ndarray
    penalty: float
    measures: dict[str, Estimate]
    chance: float


@dataclass(frozen=True)
class Analysis:
    """What came out.

    Attributes:
        settings, outcome, folds: what went in, and the outer fold of each context.
        layers, positions: of the heat map.
        tested: selection and permutation tests.
        auroc: ``[layers][positions]`` of the reported estimator, each cell by itself.
        cell_scores: ``[layers, positions, contexts]`` float32 log-odds.
        headline: the probe with the inner loops' choices.
        compared: controls.
        code: per layer, at the headline's position.
        notes: what a reader has to know.
    """

    settings: Settings
    outcome: Outcome
    folds: np.ndarray
    layers: list[int]
    positions: list[str]
    tested: Tested
    auroc: list[list[Estimate]]
    cell_scores: np.ndarray
    headline: Headline
    compared: list[Compared]
    code: list[CodeLength]
    notes: list[str]


MEASURES = {
    "auroc": "AUROC: a random positive turn's context outranks a random negative turn's",
    "auroc_of_rates": "AUROC of the contexts' observed rates: more than any probe can reach",
    "average_precision": "average precision",
    "prevalence": "prevalence: average precision of a probe that knows nothing",
    "recall_at_5_fpr": "recall at 5% false positives",
    "spearman": "Spearman's rank correlation with the rate",
    "deviance_explained": "binomial deviance explained, against a rate per run",
    "brier": "Brier score",
    "brier_of_rate": "Brier score of a rate per run",
    "calibration_in_the_large": "mean predicted probability less the rate (0 is right)",
    "calibration_slope": "slope of outcomes on predicted log-odds (1 is right, less: too sure)",
}
