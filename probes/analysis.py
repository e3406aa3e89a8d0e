"""The whole analysis of one target, as a function of arrays: heat map, headline, controls.

Nothing here knows runs or files. ``probes.train`` reads those, and calls :func:`analyse`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit
from threadpoolctl import threadpool_limits

from ia_mech.display import Progress, Quiet
from ia_mech.errors import UserError
from ia_mech.stats import Estimate, FoldScores, Replicated
from probes.controls import Controls, control_outcomes
from probes.fit.folds import Tested, against_permutations, make_folds, movable, permutations
from probes.fit.nested_cv import Cell, Design, Examined, examine, examine_once, fit, rotate
from probes.fitting.mdl import CodeLength, code_length
from probes.options import processors
from probes.outcome import Outcome
from probes.records import (
    MEASURES,
    Analysis,
    Compared,
    Headline,
    Hidden,
    Settings,
)

NEVER = -2.0  # below any correlation


def analyse(
    hidden: Hidden,
    outcome: Outcome,
    controls: Controls | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Analysis:
    """Probe every layer and position, choose the headline, hold it against its controls.

    With arrays of your own, by ``probes.records.Arrays`` and ``probes.outcome.Outcome``:
    ``analyse(Arrays(states, ["header_last"]), Outcome.of(k, n, sources))``.

    Args:
        hidden: the states, read one layer at a time.
        outcome: k of n per context.
        controls: what to compare with; none if not given.
        settings: the default analysis if not given.
        progress: told how far it is.

    Raises:
        ValueError: fewer sources than folds, no source can change places with another, or states
            that are not of these contexts and positions.
        UserError: states that don't differ, and whatever reading them raises.
    """
    controls, settings = controls or Controls(), settings or Settings()
    progress = progress or Quiet()
    notes = list(controls.missing)
    shape = hidden.layer(next(iter(hidden.layers))).shape
    if len(shape) != 3 or shape[:2] != (len(outcome), len(hidden.positions)):
        raise ValueError(
            f"a layer has shape {shape}; [contexts, positions, d_model] begins with "
            f"({len(outcome)}, {len(hidden.positions)})"
        )
    moving, sources = movable(outcome), int(outcome.sources.max()) + 1
    if moving < 2:
        raise ValueError("no source can change places with another; there is nothing to permute")
    if moving < sources:
        notes.append(
            f"{moving} of {sources} sources can change places in permutations; the others, alone "
            "in their number of contexts per run or perturbation, stay and make the tests weaker."
        )
    folds = make_folds(outcome, settings.folds, settings.seed)
    permuted = permutations(outcome, folds, settings.permutations, settings.seed)
    design = Design.of(outcome, folds, permuted, settings.estimator)
    scores = fold_scores(outcome, folds, settings)
    with threadpool_limits(1), ThreadPoolExecutor(_workers(settings)) as pool:
        try:
            work = _Work(hidden, design, scores, settings, pool, progress)
            return work.run(controls, notes)
        finally:
            progress.stop()


def fold_scores(outcome: Outcome, folds: np.ndarray, settings: Settings) -> FoldScores:
    """Scores within folds and runs; those of equal settings and sources share their resamples."""
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


class _Probed(NamedTuple):
    """``[contexts]`` log-odds, and how much of them is chance in training."""

    scores: np.ndarray
    chance: float


class _Work:
    def __init__(self, hidden, design, scores, settings, pool, progress) -> None:
        self.hidden: Hidden = hidden
        self.design: Design = design
        self.scores: FoldScores = scores
        self.settings: Settings = settings
        self.pool: ThreadPoolExecutor = pool
        self.progress: Progress = progress
        self.outcome: Outcome = design.outcome
        self.layers, self.positions = list(hidden.layers), list(hidden.positions)

    def run(self, controls: Controls, notes: list[str]) -> Analysis:
        shape = (len(self.layers), len(self.positions))
        self.progress.start("probes", shape[0] * shape[1])
        examined = list(self._map(lambda cell: examine(cell, self.design), self._cells()))
        sources = int(self.outcome.sources.max()) + 1
        if not any(e.differs for e in examined):
            raise UserError(
                "hidden states at these layers and positions are the same in all contexts of a run",
                "give other layers or positions",
            )
        # A cell where nothing differs, such as a header's tokens in layer 0, is never chosen.
        inner = np.array([e.inner if e.differs else np.full_like(e.inner, NEVER) for e in examined])
        whole = np.array([e.whole if e.differs else NEVER for e in examined])
        tested = against_permutations(
            inner.reshape(*shape, *examined[0].inner.shape),
            np.array([e.outer for e in examined]).reshape(*shape, *examined[0].outer.shape),
            whole.reshape(shape),
            round(sources * (1 - 1 / self.settings.folds)),
            sources,
        )
        said = np.array([e.scores for e in examined], dtype=np.float32).reshape(*shape, -1)
        penalties = np.array([e.penalties for e in examined]).reshape(*shape, -1)
        auroc = [self.scores.auroc(e.scores).with_training(e.chance).estimate() for e in examined]
        chances = np.array([e.chance for e in examined]).reshape(shape)
        headline = self._headline(tested, said, penalties, chances)
        embeddings = self._embeddings(examined)
        compared = self._compared(controls, headline, embeddings)
        position = self.positions.index(headline.position)
        self.progress.start("code lengths", len(self.layers))
        code = list(self._map(self._code, (cell for cell in self._cells([position]))))
        width = len(self.positions)
        return Analysis(
            self.settings,
            self.outcome,
            self.design.folds,
            self.layers,
            self.positions,
            tested,
            [auroc[at : at + width] for at in range(0, len(auroc), width)],
            said,
            headline,
            compared,
            code,
            notes,
        )

    # -- parts ------------------------------------------------------------------------------------

    def _headline(
        self, tested: Tested, said: np.ndarray, penalties: np.ndarray, chances: np.ndarray
    ) -> Headline:
        folds = self.design.folds
        picked = tested.picked
        scores = said[picked[folds, 0], picked[folds, 1], np.arange(len(folds))].astype(float)
        layer, position = tested.headline
        cells = [self._cell(*cell) for cell in picked]
        chance = float(chances[tuple(picked.T)].mean())
        return Headline(
            self.layers[layer],
            self.positions[position],
            [(self.layers[at], self.positions[where]) for at, where in picked],
            scores,
            self._weights(cells, penalties[(*picked.T, np.arange(len(picked)))]),
            self._logistic_penalty(layer, position, penalties),
            self._measures(scores, chance),
            chance,
        )

    def _logistic_penalty(self, layer: int, position: int, penalties: np.ndarray) -> float:
        """What the inner loops chose for logistic regression, or would have: their median."""
        if self.settings.estimator == "logistic":
            return float(np.median(penalties[layer, position]))
        design = Design.of(self.outcome, self.design.folds, estimator="logistic")
        return float(np.median(examine(self._cell(layer, position), design).penalties))

    def _cell(self, layer: int, position: int) -> Cell:
        """By indices of layer and position."""
        return Cell.of(self.hidden.layer(self.layers[layer])[:, position])

    def _weights(self, cells: list[Cell], penalties: np.ndarray) -> np.ndarray:
        """``[folds, d_model]`` of the headline's probes: fitted again, not kept for every cell."""
        weights = []
        for fold, cell in enumerate(cells):
            train = self.design.rows_outside(fold)
            rotated = rotate(cell, train, train[:1], self.outcome.runs)
            fitted = fit(rotated, self.design, train, penalties[fold])
            weights.append(rotated.weights(fitted.weights))
        return np.array(weights)

    def _measures(self, scores: np.ndarray, chance: float) -> dict[str, Estimate]:
        predicted, known = expit(scores), self._rates_of_runs()
        large, slope = self.scores.calibration(predicted)
        found = {
            "auroc": self.scores.auroc(scores),
            "auroc_of_rates": self.scores.auroc(self.outcome.rate),
            "average_precision": self.scores.average_precision(scores),
            "prevalence": self.scores.prevalence(),
            "recall_at_5_fpr": self.scores.recall_at(scores, 0.05),
            "spearman": self.scores.spearman(scores),
            "deviance_explained": self.scores.deviance_explained(predicted, known),
            "brier": self.scores.brier(predicted),
            "brier_of_rate": self.scores.brier(known),
            "calibration_in_the_large": large,
            "calibration_slope": slope,
        }
        untrained = ("auroc_of_rates", "prevalence", "brier_of_rate")
        return {
            name: found[name].with_training(0.0 if name in untrained else chance).estimate()
            for name in MEASURES
        }

    def _rates_of_runs(self) -> np.ndarray:
        """``[contexts]`` rate of a context's run outside its fold."""
        known = np.empty(len(self.outcome))
        for fold in range(self.design.fold_count):
            train = self.design.rows_outside(fold)
            of_run = self.outcome.runs[train]
            count = self.design.run_count
            k = np.bincount(of_run, self.outcome.positives[train], count)
            n = np.bincount(of_run, self.outcome.trials[train], count)
            rate = np.where(n > 0, k / np.maximum(n, 1), k.sum() / n.sum())
            rows = self.design.rows_of(fold)
            known[rows] = rate[self.outcome.runs[rows]]
        return known

    def _embeddings(self, examined: list[Examined]) -> _Probed | None:
        """Layer 0 at the position that each fold's inner loop chose, also if it isn't probed."""
        if self.layers == [0]:
            return None
        if 0 in self.layers:
            at, width = self.layers.index(0), len(self.positions)
            here = examined[at * width : (at + 1) * width]
        else:
            states = np.moveaxis(self.hidden.layer(0), 1, 0)
            here = [examine_once(Cell.of(at_position), self.design) for at_position in states]
        best = np.array([e.inner[:, 0] for e in here]).argmax(0)
        scores = np.array([e.scores for e in here])
        chosen = scores[best[self.design.folds], np.arange(len(self.outcome))]
        return _Probed(chosen, float(np.mean([here[b].chance for b in best])))

    def _compared(
        self, controls: Controls, headline: Headline, embeddings: _Probed | None
    ) -> list[Compared]:
        named = [("text", b) for b in controls.text] + [("output", b) for b in controls.output]
        draws = self.settings.control_draws if controls.types is not None else 0
        self.progress.start("controls", len(named) + draws)
        reached = self.scores.auroc(headline.scores)

        def beside(kind: str, name: str, what: str, probed: _Probed) -> Compared:
            own = self.scores.auroc(probed.scores)
            # Chance in training may be shared by the two, or not: the larger part is assumed.
            gain = (reached - own).with_training(max(headline.chance, probed.chance)).estimate()
            auroc = own.with_training(probed.chance).estimate()
            return Compared(name, what, kind, auroc, gain, probed.scores)

        found = []
        cells = (Cell.of(baseline.features) for _, baseline in named)
        probed = self._map(lambda cell: examine_once(cell, self.design), cells)
        for (kind, baseline), examined in zip(named, probed, strict=True):
            own = _Probed(examined.scores, examined.chance)
            found.append(beside(kind, baseline.name, baseline.what, own))
        if embeddings is not None:
            what = "layer 0, at the position its inner loop chose"
            found.append(beside("text", "embeddings", what, embeddings))
        if draws:
            own, chance = self._control_task(controls.types, headline)
            gain = (reached - own).with_training(max(headline.chance, chance)).estimate()
            auroc = own.with_training(chance).estimate()
            what = f"{draws} random functions of response length × opening token, same cells"
            found.append(Compared("control task", what, "control task", auroc, gain, None))
        return found

    def _control_task(self, types: np.ndarray, headline: Headline) -> tuple[Replicated, float]:
        """AUROC on random functions of the type, each fold at the cell that the headline has."""
        distinct = sorted(set(headline.picked), key=headline.picked.index)
        cells = {}
        for layer, position in distinct:
            states = self.hidden.layer(layer)[:, self.positions.index(position)]
            cells[layer, position] = Cell.of(states)
        own = [np.array([p == cell for p in headline.picked]) for cell in distinct]

        def probe(outcome: Outcome) -> tuple[Replicated, float]:
            design = Design.of(outcome, self.design.folds, estimator=self.settings.estimator)
            scores, chances = np.empty(len(outcome)), []
            for cell, mine in zip(distinct, own, strict=True):
                here = mine[self.design.folds]
                examined = examine(cells[cell], design)
                scores[here] = examined.scores[here]
                chances.append(examined.chance)
            auroc = fold_scores(outcome, design.folds, self.settings).auroc(scores)
            return auroc, float(np.mean(chances))

        draws = control_outcomes(
            self.outcome, types, self.settings.control_draws, self.settings.seed
        )
        aurocs, chances = zip(*self._map(probe, draws), strict=True)
        return Replicated.mean(aurocs), float(np.mean(chances))

    def _code(self, cell: Cell) -> CodeLength:
        settings = self.settings
        return code_length(
            cell, self.outcome, orders=settings.orders, seed=settings.seed, level=settings.level
        )

    # -- reading and computing --------------------------------------------------------------------

    def _cells(self, positions: list[int] | None = None) -> Iterator[Cell]:
        """Cells, layers first; a layer is read when its first cell is asked for."""
        for layer in self.layers:
            states = self.hidden.layer(layer)
            for position in range(len(self.positions)) if positions is None else positions:
                yield Cell.of(states[:, position])

    def _map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Results in order; no more items are taken than the threads can soon use."""
        waiting: deque = deque()
        for item in items:
            waiting.append(self.pool.submit(function, item))
            if len(waiting) > _workers(self.settings):
                yield waiting.popleft().result()
                self.progress.advance()
        while waiting:
            yield waiting.popleft().result()
            self.progress.advance()


def _workers(settings: Settings) -> int:
    return settings.workers or processors()
