"""The whole analysis of one target, as a function of arrays: heat map, headline, controls.

This module knows neither runs nor files. ``probes.train`` reads a run, calls :func:`analyse` and
writes the :class:`Analysis`.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Protocol, TypeVar

import numpy as np
from scipy.special import expit
from threadpoolctl import threadpool_limits

from ia_mech.display import Progress, Quiet
from ia_mech.errors import UserError
from ia_mech.stats import Estimate, FoldScores, ResampledScore, model_confidence_set
from probes.controls import Baseline, Controls
from probes.dataset import ENDS
from probes.fit.beyond import (
    PLANTED,
    IncrementalScores,
    centre_and_scale,
    incremental_scores,
    plant,
    saved_by,
    tune_base,
)
from probes.fit.folds import (
    SelectionTests,
    exchangeable_sources,
    make_folds,
    permutations,
    seeds_of,
    select_and_test,
)
from probes.fit.nested_cv import (
    CrossValidated,
    Design,
    cross_validate,
    fit,
    held_out_loss,
    less_means,
)
from probes.fit.solvers import project
from probes.targets import Outcome

NEVER = -2.0  # below any correlation
SINGLE = 1e-10  # a smaller share of the squares of single-precision states is rounding

T = TypeVar("T")
R = TypeVar("R")
Place = tuple[int, str]  # layer and position


# -- what goes in ---------------------------------------------------------------------------------


class HiddenStates(Protocol):
    """Hidden states, each read when it is needed, such as ``probes.dataset.ProbeSet`` and
    :class:`Arrays`. Several threads may read at once."""

    @property
    def layers(self) -> Sequence[int]: ...

    @property
    def positions(self) -> Sequence[str]: ...

    def at(self, layer: int, position: str) -> np.ndarray:
        """``[contexts, d_model]``."""
        ...

    def ends(self, layer: int) -> np.ndarray | None:
        """``[contexts, features]`` states at :data:`ENDS` side by side; None if one is lacking."""
        ...


@dataclass(frozen=True)
class Arrays:
    """Hidden states in memory.

    Attributes:
        states: ``[layers, contexts, positions, d_model]``.
        positions: their names.
        conversation: ``[layers, contexts, features]`` states at the ends of query and response, if
            the positions don't include these.
    """

    states: np.ndarray
    positions: Sequence[str]
    conversation: np.ndarray | None = None

    @property
    def layers(self) -> Sequence[int]:
        return range(len(self.states))

    def at(self, layer: int, position: str) -> np.ndarray:
        return self.states[layer][:, self.positions.index(position)]

    def ends(self, layer: int) -> np.ndarray | None:
        if self.conversation is not None:
            return self.conversation[layer]
        if not {*ENDS} <= {*self.positions}:
            return None
        return np.hstack([self.at(layer, name) for name in ENDS])


def less_sources(features: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """``[contexts, d]`` features minus their source's mean, which no probe of siblings may use.

    They are zeros where only rounding is left: siblings share every state before the response.
    """
    given = np.asarray(features, dtype=np.float64)
    left = less_means(given, sources)
    return left if (left**2).sum() > SINGLE * (given**2).sum() else np.zeros_like(left)


@dataclass(frozen=True)
class AnalysisSettings:
    folds: int = 5  # of the outer loop; the inner loop has one fewer
    permutations: int = 1000  # 0 permutations allow no conclusion
    level: float = 0.95  # coverage of intervals
    resamples: int = 2000  # bootstrap samples
    seed: int = 0  # of folds, permutations and resampling, each with a random stream of its own
    workers: int | None = None  # threads; one per processor of this process if not given


# -- what comes out -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ControlComparison:
    """A control beside the headline: its own AUROC, and ``[contexts]`` log-odds."""

    control: Baseline
    auroc: Estimate
    scores: np.ndarray


@dataclass(frozen=True)
class IncrementalValue:
    """What hidden states add to the *base*: a linear readout of the first-token state, the text,
    and the states at the ends of query and response.

    ``planted``: if hidden states are not shown to add anything, an addition is planted into them.
    The pair holds the share of deviance that it saves, and whether the analysis found it; of
    several additions the smallest that was found, or else the largest. None otherwise, and where
    all chosen states are at the ends.
    """

    scores: IncrementalScores  # of the base and of base with hidden states, out of fold
    deviance_saved: Estimate  # by hidden states, as a share of the base's held-out deviance
    gain: Estimate  # AUROC with hidden states minus AUROC without
    base: Estimate  # AUROC of the base
    full: Estimate  # AUROC of base with hidden states
    planted: tuple[float, bool] | None = None


@dataclass(frozen=True)
class RandomBlocks:
    """The headline's procedure on states of a model with random blocks, in the same contexts."""

    name: str  # of the random blocks
    auroc: Estimate  # of the procedure
    difference: Estimate  # the headline's AUROC minus ``auroc``, over the same resamples
    cells: np.ndarray  # [layers, positions] AUROC of each layer and position by itself


@dataclass(frozen=True)
class Headline:
    """The selection procedure: each outer fold is scored by the probe whose layer, position and
    penalty its inner loop chose."""

    layer: int  # the layer and position that the rule chooses on all contexts, for the saved probe
    position: str
    chosen: list[Place]  # layer and position that each outer fold chose
    scores: np.ndarray  # [contexts] log-odds, each from the probe that its outer fold chose
    weights: np.ndarray  # [folds, d_model] of those probes, on unscaled hidden states
    penalty: float  # of the saved probe: the median of the inner loops' choices there
    auroc: Estimate  # of the scores
    auroc_of_rates: Estimate  # of the contexts' observed rates, which no probe can exceed
    unreliability: float  # mean over the chosen probes; intervals are widened by it


@dataclass(frozen=True)
class Analysis:
    settings: AnalysisSettings
    outcome: Outcome
    folds: np.ndarray  # [contexts] outer fold
    layers: list[int]  # of the heat map
    positions: list[str]
    tested: SelectionTests
    auroc: list[list[Estimate]]  # [layers][positions] of each by itself
    cell_scores: np.ndarray  # [layers, positions, contexts] float32 log-odds
    p_best: np.ndarray  # [layers, positions] p values of the model confidence set (log loss)
    headline: Headline
    controls: list[ControlComparison]
    beyond: IncrementalValue | None  # None if output, text or the ends are lacking
    random_blocks: list[RandomBlocks]
    notes: list[str]  # sentences that a reader needs

    @property
    def among_best(self) -> np.ndarray:
        """``[layers, positions]`` whether each is in the model confidence set."""
        return self.p_best > 1 - self.settings.level


# -- the analysis ---------------------------------------------------------------------------------


def analyse(
    hidden: HiddenStates,
    outcome: Outcome,
    controls: Controls | None = None,
    settings: AnalysisSettings | None = None,
    progress: Progress | None = None,
    random_blocks: Mapping[str, HiddenStates] | None = None,
) -> Analysis:
    """Probe every layer and position, choose the headline, and compare it with its controls.

    With your own arrays: ``analyse(Arrays(states, ["header_last"]), outcome)``, with
    ``outcome = Outcome.from_counts(positives, trials, sources)``.

    Args:
        hidden: the states of the outcome's contexts.
        outcome: k of n per context.
        controls: the baselines; none if not given.
        settings: the defaults if not given.
        progress: nothing is shown if not given.
        random_blocks: name → states of a model with random blocks in the same contexts, at the same
            layers and positions.

    Raises:
        ValueError: there are fewer sources than folds, or the states have another number of
            contexts than the outcome.
        UserError: the states are the same in all contexts, or can't be read.
    """
    controls, settings = controls or Controls(), settings or AnalysisSettings()
    progress = progress or Quiet()
    count = len(hidden.at(hidden.layers[0], hidden.positions[0]))
    if count != len(outcome):
        raise ValueError(f"states of {count} contexts, and an outcome of {len(outcome)}")
    notes = list(controls.missing)
    exchangeable, sources = exchangeable_sources(outcome), outcome.source_count
    if exchangeable < sources:
        notes.append(
            f"{exchangeable} of {sources} sources can change places in permutations; the others, "
            "alone in their number of contexts per run or perturbation, stay and make the tests "
            "weaker."
        )
    of_folds, of_permutations = seeds_of(settings.seed)
    folds = make_folds(outcome, settings.folds, of_folds)
    permuted = permutations(outcome, folds, settings.permutations, of_permutations)
    design = Design.from_outcome(outcome, folds, permuted)
    with threadpool_limits(1), ThreadPoolExecutor(settings.workers or processors()) as pool:
        try:
            analyser = _Analyser(hidden, design, settings, pool, progress)
            return analyser.run(controls, notes, random_blocks or {})
        finally:
            progress.stop()


def processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fold_scores(outcome: Outcome, folds: np.ndarray, settings: AnalysisSettings) -> FoldScores:
    """Scores within folds and runs. With equal settings and sources, resamples are the same."""
    return FoldScores(
        outcome.positives,
        outcome.trials,
        outcome.sources,
        folds,
        outcome.runs,
        level=settings.level,
        resamples=settings.resamples,
        seed=settings.seed,
    )


def select(
    found: Sequence[CrossValidated], design: Design, shape: tuple[int, int]
) -> SelectionTests:
    """Choose among the cells of ``found``, and test them.

    Args:
        found: of all positions of the first layer, then of the second, and so on.
        shape: how many layers and positions.

    Raises:
        UserError: the states are the same in all contexts, at every layer and position.
    """
    differ = np.array([one.differs for one in found])
    if not differ.any():
        raise UserError(
            "hidden states at these layers and positions are the same in all contexts of a run",
            "give other layers or positions",
        )
    # States that don't differ between contexts, such as a header's in layer 0, aren't chosen.
    inner = np.array([one.inner_correlation for one in found])
    whole = np.array([one.whole_correlation for one in found])
    inner[~differ] = whole[~differ] = NEVER
    outer = np.array([one.outer_auroc for one in found])
    sources = design.outcome.sources
    inside = [len(np.unique(sources[design.rows_outside(fold)])) for fold in design.outer]
    return select_and_test(
        inner.reshape(*shape, *inner.shape[1:]),
        outer.reshape(*shape, *outer.shape[1:]),
        whole.reshape(shape),
        round(float(np.mean(inside))),
        design.outcome.source_count,
    )


class _Analyser:
    """One analysis, with the data that its steps share."""

    def __init__(
        self,
        hidden: HiddenStates,
        design: Design,
        settings: AnalysisSettings,
        pool: ThreadPoolExecutor,
        progress: Progress,
    ) -> None:
        self.hidden, self.design, self.settings = hidden, design, settings
        self.pool, self.progress = pool, progress
        self.outcome, self.observed = design.outcome, design.observed()
        self.scores = fold_scores(self.outcome, design.folds, settings)
        self.layers, self.positions = list(hidden.layers), list(hidden.positions)

    def run(
        self, controls: Controls, notes: list[str], random_blocks: Mapping[str, HiddenStates]
    ) -> Analysis:
        found, tested = self._probed(self.hidden, self.design, "probes")
        headline, resampled = self._headline(tested, found)
        # In single precision: there is one score for each layer, position and context.
        cell_scores = np.array([[one.scores for one in row] for row in found], dtype=np.float32)
        return Analysis(
            settings=self.settings,
            outcome=self.outcome,
            folds=self.design.folds,
            layers=self.layers,
            positions=self.positions,
            tested=tested,
            auroc=[[self._auroc(one) for one in row] for row in found],
            cell_scores=cell_scores,
            p_best=self._p_best(cell_scores, headline.unreliability),
            headline=headline,
            controls=self._controls(controls),
            beyond=self._beyond(controls, headline, tested),
            random_blocks=[self._random_blocks(*one, resampled) for one in random_blocks.items()],
            notes=notes,
        )

    def _probed(
        self, hidden: HiddenStates, design: Design, phase: str
    ) -> tuple[list[list[CrossValidated]], SelectionTests]:
        """Every layer and position, ``[layers][positions]``, and the selection among them."""
        places, width = list(product(self.layers, self.positions)), len(self.positions)
        self.progress.start(phase, len(places))
        found = list(
            self._map(lambda place: cross_validate(self._own(hidden.at(*place)), design), places)
        )
        tested = select(found, design, (len(self.layers), width))
        return [found[at : at + width] for at in range(0, len(found), width)], tested

    def _auroc(self, one: CrossValidated) -> Estimate:
        return self.scores.auroc(one.scores).with_training(one.unreliability).estimate()

    def _random_blocks(
        self, name: str, hidden: HiddenStates, headline: ResampledScore
    ) -> RandomBlocks:
        """Probe the states of random blocks, and compare them with the headline's AUROC."""
        found, tested = self._probed(hidden, self.observed, "random blocks")
        scores, unreliability = self._chosen(tested, found)
        auroc = self.scores.auroc(scores)
        cells = np.array([[self.scores.auroc(one.scores).value for one in row] for row in found])
        # Each of the two varies with its training; all of the difference's variance may be that.
        return RandomBlocks(
            name,
            auroc.with_training(unreliability).estimate(),
            (headline - auroc).with_training(1.0).estimate(),
            cells,
        )

    def _p_best(self, cell_scores: np.ndarray, unreliability: float) -> np.ndarray:
        """p values of the model confidence set, widened as the headline's interval is."""
        outcome, shape = self.outcome, cell_scores.shape[:2]
        losses = held_out_loss(cell_scores.reshape(-1, len(outcome)).astype(float), outcome)
        by_source = np.zeros((len(losses), outcome.source_count))
        np.add.at(by_source.T, outcome.sources, losses.T)
        p = model_confidence_set(
            by_source,
            resamples=self.settings.resamples,
            seed=self.settings.seed,
            stretch=float(np.sqrt(1 + unreliability)),
        )
        return p.reshape(shape)

    def _chosen(
        self, tested: SelectionTests, found: list[list[CrossValidated]]
    ) -> tuple[np.ndarray, float]:
        """``[contexts]`` scores of the probes that the folds chose, and their unreliability."""
        folds, chosen = self.design.folds, [found[at][where] for at, where in tested.chosen]
        # In single precision, as ``Analysis.cell_scores`` keeps them.
        by_fold = np.array([one.scores for one in chosen], dtype=np.float32).astype(float)
        unreliability = float(np.mean([one.unreliability for one in chosen]))
        return by_fold[folds, np.arange(len(folds))], unreliability

    def _headline(
        self, tested: SelectionTests, found: list[list[CrossValidated]]
    ) -> tuple[Headline, ResampledScore]:
        """The headline, and its AUROC on every resample, of ``[layers][positions]`` probes."""
        scores, unreliability = self._chosen(tested, found)
        auroc = self.scores.auroc(scores)
        weights = []  # fitted again, as the weights of all layers and positions take much memory
        chosen = [(self.layers[at], self.positions[where]) for at, where in tested.chosen]
        for fold, (layer, position) in enumerate(tested.chosen):
            states = self._own(self.hidden.at(*chosen[fold])).astype(float)
            split = project(states, self.design.rows_outside(fold), self.outcome.runs)
            fitted = fit(split, self.design, found[layer][position].penalties[fold])
            weights.append(split.axes @ fitted.weights)
        layer, position = tested.chosen_on_all
        headline = Headline(
            layer=self.layers[layer],
            position=self.positions[position],
            chosen=chosen,
            scores=scores,
            weights=np.array(weights),
            penalty=float(np.median(found[layer][position].penalties)),
            auroc=auroc.with_training(unreliability).estimate(),
            auroc_of_rates=self.scores.auroc(self.outcome.rate).estimate(),
            unreliability=unreliability,
        )
        return headline, auroc

    def _controls(self, controls: Controls) -> list[ControlComparison]:
        named = [*controls.text, *controls.output]
        self.progress.start("controls", len(named))
        probed = self._map(
            lambda one: cross_validate(self._own(one.features), self.observed), named
        )
        return [
            ControlComparison(control, self._auroc(one), one.scores)
            for control, one in zip(named, probed, strict=True)
        ]

    def _beyond(
        self, controls: Controls, headline: Headline, tested: SelectionTests
    ) -> IncrementalValue | None:
        ends = [self.hidden.ends(layer) for layer, _ in headline.chosen]
        known = [self._own(states) for states in ends if states is not None]
        if not (controls.output and controls.text and len(known) == len(ends)):
            return None
        # States at the ends are in the base as they are, and add nothing.
        each = {
            place: self._own(self.hidden.at(*place)).astype(float) * (place[1] not in ENDS)
            for place in dict.fromkeys(headline.chosen)
        }
        blocks = [
            np.hstack([centre_and_scale(self._own(one.features)) for one in baselines])
            for baselines in (controls.output, controls.text)
        ]
        self.progress.start("beyond output and text", 2 * self.observed.fold_count)
        bases = tune_base(blocks, known, self.observed, self._map)

        def added(hidden: Mapping[Place, np.ndarray]) -> IncrementalScores:
            chosen = [hidden[place] for place in headline.chosen]
            return incremental_scores(bases, chosen, self.observed, self._map)

        def saved(found: IncrementalScores) -> Estimate:
            scores = self.scores.deviance_explained(expit(found.full), expit(found.base))
            return scores.with_training(found.unreliability).estimate()

        def planted() -> tuple[float, bool] | None:
            if not (tested.readable and any(states.any() for states in each.values())):
                return None
            share, shown = 0.0, False
            self.progress.start("planted additions", len(PLANTED) * self.observed.fold_count)
            for strength in PLANTED:
                states, signal = plant(each, self.outcome, found.base, strength, self.settings.seed)
                wiser = saved_by(signal, self.outcome, found.base)
                share = self.scores.deviance_explained(expit(wiser), expit(found.base)).value
                if shown := saved(added(states)).low > 0:
                    break
            return share, shown

        found = added(each)
        base, full = self.scores.auroc(found.base), self.scores.auroc(found.full)
        by_hidden = saved(found)
        # How much of an AUROC's variance is chance in training is known of the difference alone, so
        # that each AUROC is widened as if all of its variance were.
        return IncrementalValue(
            scores=found,
            deviance_saved=by_hidden,
            gain=(full - base).with_training(found.unreliability).estimate(),
            base=base.with_training(1.0).estimate(),
            full=full.with_training(1.0).estimate(),
            planted=None if by_hidden.low > 0 else planted(),
        )

    def _own(self, features: np.ndarray) -> np.ndarray:
        """``[contexts, d]`` features, minus the mean of their source if siblings are compared."""
        siblings = self.outcome.compares_siblings
        return less_sources(features, self.outcome.sources) if siblings else features

    def _map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Apply a function in the pool. Results are in order; each is a step of the progress."""
        for result in self.pool.map(function, items):
            yield result
            self.progress.advance()
