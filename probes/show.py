"""What is reported of an analysis: conclusion, tables, every estimate, and the kept result.

::

    RUN/results/<name>/     what ia_mech.results writes, and
      predictions.parquet   per context, from probes that weren't trained on its source
      probe.safetensors     directions in activation space
      card.json             where these directions come from
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit
from scipy.stats import norm

from ia_mech.estimates import TidyEstimate, could_show, frame_of, p_value, smallest_effect
from ia_mech.results import Result, Table, about_runs, folder_of, refuse_place
from ia_mech.run.labels import KEY as TURN_KEY
from ia_mech.run.labels import check_name
from ia_mech.run.sources import SEPARATOR
from ia_mech.run.tokens import of_turns
from ia_mech.stats import Estimate
from probes import figures
from probes.analysis import Analysis, AnalysisSettings, RandomBlocks
from probes.card import CARD, Probe, directions
from probes.dataset import ProbeSet
from probes.figures import LEVEL

COVERAGE = 0.95  # lowest level of an interval from which "beyond" is concluded
READOUT = (
    "a linear readout of the first-token state, the text, and the states at the ends of query and "
    "response"
)
RANDOM_BLOCKS = "a model with random blocks over the trained embeddings"
POWER = 0.8  # power with which an effect "would be found"
MARGIN = 0.05  # of two AUROCs that are called the same, within which the whole interval lies
KEY = ["quantity", "layer", "position", "control"]  # no two rows have the same
COLUMNS = [*KEY, "value", "low", "high", "p", "p_holm", "sources", "contexts", "level", "method"]
DTYPES = {
    **dict.fromkeys(("quantity", "position", "control", "method"), "string"),
    **dict.fromkeys(("layer", "sources", "contexts"), "Int64"),
    "level": "float64",
}
LAYERS = "0 = embeddings, l = output of block l, before the final norm"


# -- the conclusion -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What an analysis shows.

    ``beyond`` is true if the target is readable, and hidden states save deviance that
    :data:`READOUT` leaves, with an interval above zero. It is false without these controls, with
    intervals below 95%, and where random blocks aren't shown to be read less well.
    """

    readable: bool  # see :attr:`probes.fit.folds.SelectionTests.readable`
    beyond: bool
    sentence: str  # what was found, the plain sentence first
    control: str  # what the finding is compared with


def conclude(
    analysis: Analysis, what: str = "the follow-up rate", labelled_by: str = ""
) -> Finding:
    """Put into words what the headline, its p values and its controls show. ``what`` is the target
    in words; ``labelled_by`` names the judge."""
    tested, gain = analysis.tested, analysis.beyond
    readable = tested.readable
    sure = analysis.settings.level >= COVERAGE
    no_better = [one for one in analysis.random_blocks if not one.difference.low > 0]
    saves = gain is not None and bool(gain.deviance_saved.low > 0)
    beyond = readable and sure and not no_better and saves
    subject = what[:1].upper() + what[1:]
    can = f"{subject} can be read from the hidden states"
    if not readable:
        verdict = f"No evidence was found that {what} can be read from the hidden states."
    elif no_better:
        verdict = (
            f"{can}. That it can be read better there than from {RANDOM_BLOCKS} is not shown, and "
            "so not that the model computes anything of it."
        )
    elif beyond:
        verdict = f"{can}, and they tell more than {READOUT}."
    elif gain is None:
        verdict = f"{can}; whether they tell more than {READOUT} was not tested."
    else:
        verdict = f"{can}; it is not shown that they tell more than {READOUT}."
    sentences = [verdict, _numbers(analysis)]
    if not readable:
        sentences.append(_power(analysis))
    controls = []
    if gain is not None:
        controls.append(
            f"Added to {READOUT} (AUROC {gain.base.value:.2f}), the hidden states save "
            f"{gain.deviance_saved.text(1, sign=True, percent=True)} of its held-out deviance "
            f"and change its AUROC by {gain.gain.text(sign=True)}."
        )
        if gain.planted is not None:
            share, shown = gain.planted
            found = "would be found" if shown else "would not be found, nor would a smaller one"
            controls.append(
                f"If an addition planted into these states saved {share:.1%} of that deviance, it "
                f"{found}."
            )
        if not sure:
            controls.append(
                f"Only intervals of {COVERAGE:.0%} or more can show that hidden states tell more."
            )
    own = np.array([[cell.value for cell in row] for row in analysis.auroc])
    controls += [_random(one, own, analysis.settings.level) for one in analysis.random_blocks]
    if labelled_by:
        controls.append(f"Labels: {labelled_by}.")
    return Finding(readable, beyond, " ".join(sentences), " ".join(controls))


def _numbers(analysis: Analysis) -> str:
    tested, auroc = analysis.tested, analysis.headline.auroc
    p, family = p_value(tested.headline_p), p_value(float(tested.p_family.min()))
    count, level = int(analysis.among_best.sum()), f"{100 * analysis.settings.level:g}%"
    best = f"Of {analysis.among_best.size} layers × positions {count} can't be told from the best"
    if count == analysis.among_best.size:
        best = f"No layer or position stands out: none of {count} pairs can be told from the best"
    return (
        f"Probes whose layer and position are chosen inside the training folds have AUROC "
        f"{auroc.text()}, {p} (permutations repeat the choice; for the best single layer and "
        f"position, family-wise, {family}). {best} ({level} confidence set)."
    )


def _power(analysis: Analysis) -> str:
    """How large an effect would have been found."""
    tested, sources = analysis.tested, analysis.outcome.source_count
    reached = float(np.quantile(tested.headline_null, 0.95))
    # In four of five data sets an estimate is above its mean minus 0.84 standard deviations. The
    # spread is taken from the permutations.
    found = reached + float(norm.ppf(POWER)) * float(tested.headline_null.std())
    return (
        f"The tested AUROC, of closed-form probes, is {tested.headline_statistic:.2f}. One in "
        f"twenty permutations of the labels of these {sources} sources reaches {reached:.2f}, so a "
        f"true AUROC of about {found:.2f} would be found in four of five such data sets."
    )


def _random(one: RandomBlocks, own: np.ndarray, level: float) -> str:
    """``own``: ``[layers, positions]`` AUROC of the model itself."""
    better, cells, difference = int((one.cells >= own).sum()), own.size, one.difference
    how = "are not shown to be read less well than the model's"
    if difference.low > 0:
        how = "are read less well than the model's"
    elif difference.low > -MARGIN and difference.high < MARGIN:
        how = f"are read as well as the model's, give or take {MARGIN:g}"
    elif least := could_show(smallest_effect(asdict(difference), level), most=0.5):
        how += f" ({least})"
    return (
        f"Random blocks ({one.name}) {how}: AUROC {one.auroc.text()}; the headline minus that is "
        f"{difference.text(sign=True)}. At {better} of {cells} layers × positions they are read at "
        "least as well."
    )


# -- every number ---------------------------------------------------------------------------------


def estimates(analysis: Analysis) -> pd.DataFrame:
    """Every estimate of an analysis.

    Quantities, by what their rows belong to:

    - a layer and position: ``auroc_cell`` (of random blocks if it has a control), ``statistic``
      (AUROC of the closed-form probes, which is tested, with its family-wise p), ``null_band_95``
      (95% quantile of the permuted statistics there), ``p_best`` (of the model confidence set),
      ``selected_in_folds`` (share of the outer folds that chose it).
    - the headline, which is the selection procedure and so has no layer or position: ``auroc``,
      ``auroc_of_rates`` (of the observed rates, more than any probe can reach),
      ``statistic_headline`` (its permutations repeat the choice) and ``null_band_95_headline``.
    - a control: ``auroc_control``; for random blocks also ``auroc_less_control`` (the headline's
      minus theirs).
    - the readout of output, text and the ends of query and response: ``auroc_base``, ``auroc_full``
      (with hidden states), ``auroc_gain`` and ``deviance_saved`` (what hidden states add), and
      ``deviance_planted`` (see :class:`probes.analysis.IncrementalValue`).
    - the heat map: ``null_band_95_family`` (95% quantile of the largest permuted statistic).
    - an entry of the matrix of --transfer, named in ``control``: ``auroc_transfer``, the only one
      with ``p_holm``.

    Returns:
        :data:`COLUMNS`; :data:`KEY` is unique. ``layer``, ``position`` and ``control`` are missing
        where a quantity has none, ``low``, ``high`` and ``level`` where there is no interval.
    """
    return frame_of(_rows(analysis), DTYPES, COLUMNS)


def _rows(analysis: Analysis) -> Iterator[TidyEstimate]:
    headline, tested, outcome = analysis.headline, analysis.tested, analysis.outcome
    permuted = f"{tested.permutations} permutations of whole sources"

    def row(quantity: str, estimate: Estimate, p: float = np.nan, **names: Any) -> TidyEstimate:
        names["contexts"] = len(outcome)
        return TidyEstimate(quantity, names, len(outcome), estimate, p)

    def interval(quantity: str, estimate: Estimate, **names: Any) -> TidyEstimate:
        return row(quantity, estimate, level=analysis.settings.level, **names)

    def plain(
        quantity: str, value: float, method: str, p: float = np.nan, **names: Any
    ) -> TidyEstimate:
        estimate = Estimate(float(value), np.nan, np.nan, outcome.source_count, method)
        return row(quantity, estimate, p, **names)

    yield interval("auroc", headline.auroc)
    yield interval("auroc_of_rates", headline.auroc_of_rates)
    band = float(np.quantile(tested.headline_null, 0.95))
    yield plain("statistic_headline", tested.headline_statistic, "closed form", tested.headline_p)
    yield plain("null_band_95_headline", band, permuted)
    for compared in analysis.controls:
        yield interval("auroc_control", compared.auroc, control=compared.control.name)
    for one in analysis.random_blocks:
        yield interval("auroc_control", one.auroc, control=one.name)
        yield interval("auroc_less_control", one.difference, control=one.name)
    if analysis.beyond is not None:
        yield interval("auroc_base", analysis.beyond.base)
        yield interval("auroc_full", analysis.beyond.full)
        yield interval("auroc_gain", analysis.beyond.gain)
        yield interval("deviance_saved", analysis.beyond.deviance_saved)
        if analysis.beyond.planted is not None:
            share, shown = analysis.beyond.planted
            yield plain("deviance_planted", share, "found" if shown else "not found")
    picked = Counter(headline.chosen)
    for i, layer in enumerate(analysis.layers):
        for j, position in enumerate(analysis.positions):
            at: dict[str, Any] = {"layer": layer, "position": position}
            p = tested.p_family[i, j]
            share = picked[layer, position] / len(headline.chosen)
            yield interval("auroc_cell", analysis.auroc[i][j], **at)
            yield plain("statistic", tested.statistic[i, j], "closed form", p, **at)
            yield plain("null_band_95", tested.null_quantile[i, j], permuted, **at)
            yield plain("p_best", analysis.p_best[i, j], "model confidence set", **at)
            yield plain("selected_in_folds", share, "inner folds", **at)
            for one in analysis.random_blocks:
                yield plain("auroc_cell", one.cells[i, j], "", control=one.name, **at)
    yield plain("null_band_95_family", tested.family_quantile, permuted)


def predictions(analysis: Analysis) -> pd.DataFrame:
    """The out-of-fold predictions for every context.

    Returns:
        One row per context, in order: ``fold`` (outer), ``positives``, ``trials``, ``log_odds`` and
        ``probability`` of the headline, and for every control
        ``control:<name>`` with its log-odds; ``base`` and ``full``, the log-odds of the readout
        without and with hidden states.
    """
    scores = analysis.headline.scores
    columns = {
        "fold": analysis.folds,
        "positives": analysis.outcome.positives,
        "trials": analysis.outcome.trials,
        "log_odds": scores,
        "probability": expit(scores),
    }
    columns |= {f"control:{one.control.name}": one.scores for one in analysis.controls}
    if analysis.beyond is not None:
        columns |= {"base": analysis.beyond.scores.base, "full": analysis.beyond.scores.full}
    return pd.DataFrame(columns)


# -- tables ---------------------------------------------------------------------------------------


def tables(analysis: Analysis) -> list[Table]:
    """The headline with its controls, and the heat map."""
    level, headline = f"{100 * analysis.settings.level:g}%", analysis.headline
    rows = [
        ["headline", headline.auroc.text(), "hidden states, chosen inside the training folds"],
        ["rates", headline.auroc_of_rates.text(), "observed rates: more than a probe can reach"],
    ]
    rows += [[one.control.name, one.auroc.text(), one.control.what] for one in analysis.controls]
    rows += [[one.name, one.auroc.text(), RANDOM_BLOCKS] for one in analysis.random_blocks]
    if analysis.beyond is not None:
        base = "output, text, and states at the ends of query and response"
        rows.append(["base", analysis.beyond.base.text(), base])
        rows.append(["  + hidden", analysis.beyond.full.text(), "and the headline's states"])
    scores = Table(
        f"AUROC of the headline and of its controls [{level} intervals over sources]",
        ["read", "AUROC", "what"],
        rows,
    )
    cells = [
        [str(layer), *(_cell(analysis, i, j) for j in range(len(analysis.positions)))]
        for i, layer in enumerate(analysis.layers)
    ]
    what = "turns" if of_turns(analysis.positions) else "conversations"
    heat_map = Table(
        f"AUROC by layer and position, {len(analysis.outcome)} {what} in every column",
        ["layer", *analysis.positions],
        cells,
        f"* family-wise p ≤ 0.05 (closed form); ° in the {level} confidence set of the best "
        "(held-out log loss)",
        full=True,
    )
    return [scores, heat_map]


def _cell(analysis: Analysis, i: int, j: int) -> str:
    value = analysis.auroc[i][j].value
    star = "*" if analysis.tested.p_family[i, j] <= LEVEL else ""
    best = "°" if analysis.among_best[i, j] else ""
    return ("–" if np.isnan(value) else f"{value:.2f}") + star + best


# -- the result -----------------------------------------------------------------------------------


def result_folder(about: dict[str, Any], home: Path, name: str | None = None) -> Path:
    """The folder of an analysis in the run ``home``; its ``name`` is by default made from kind,
    target and judge.

    Raises:
        UserError: no file can have this name, a result of another kind has it, or the run can't be
            written to.
    """
    if name is None:
        target = about["settings"]["target"].replace("@", "-at-")
        name = f"{about['kind']}-{target}-{about['judge']}"
        if ":" in about["settings"]["positions"][0]:
            name += f"-tokens-{about['settings']['component']}"
    folder = folder_of(home, check_name(name))
    refuse_place(folder, about["kind"], folder)
    return folder


def about(kind: str, data: ProbeSet, settings: AnalysisSettings, **more: Any) -> dict[str, Any]:
    """All that a result depends on, as plain JSON: not the number of threads."""
    return {
        "kind": kind,
        **about_runs(data.runs, [data.judge]),
        "judge": data.judge,
        "gate": data.labelled_by,
        "settings": {
            "target": data.target.name,
            "within": data.within,
            "positions": data.positions,
            "component": data.component,
            "layers": list(data.layers),
            **{k: v for k, v in asdict(settings).items() if k != "workers"},
            **more,
        },
    }


WITHIN = {"run": "", "dataset": " within datasets", "source": " among responses to one query"}


def result_of(analysis: Analysis, data: ProbeSet, about: dict[str, Any], name: str) -> Result:
    """The result of an analysis, with the probe that is fitted on all contexts."""
    target, headline = data.target, analysis.headline
    within = WITHIN[data.within]
    conclusion = conclude(analysis, target.words + within, data.labelled_by)
    models = dict.fromkeys(run.model["name"] for run in data.runs)
    title = f"{', '.join(models)} · {target.name} · {data.labelled_by}"
    named = [name for name in ("run", *TURN_KEY, "dataset") if name in data.contexts]
    names = data.contexts[named].assign(
        run=data.contexts["run"].map(lambda number: data.runs[number].name),
        source=data.contexts["source"].str.replace(SEPARATOR, "/"),
    )
    notes = [f"{target.name}: {target.describe()}", _data_note(analysis, data), *data.notes]
    drawn = [
        ("heat_map", figures.heat_map(analysis, title)),
        ("layer_curve", figures.layer_curve(analysis, title)),
    ]
    found_some = (analysis.tested.p_family <= LEVEL).any()
    found = Result(
        name=name,
        question=f"Where can {target.words}{within} be read from the hidden states?",
        sentence=conclusion.sentence,
        control=conclusion.control,
        estimates=estimates(analysis),
        tables=tables(analysis),
        figures=dict(drawn if found_some else reversed(drawn)),  # pages open the first
        notes=[*notes, *analysis.notes],
        about=about,
        data={"predictions": pd.concat([names, predictions(analysis)], axis=1)},
    )
    states = data.at(headline.layer, headline.position)
    probe = Probe(directions(states, data.outcome, headline.penalty), _card(analysis, data, found))
    return replace(found, files={CARD: lambda file: probe.save(file.parent)})  # and its weights


def _data_note(analysis: Analysis, data: ProbeSet) -> str:
    outcome, headline, folds = analysis.outcome, analysis.headline, analysis.settings.folds
    share = outcome.positives.sum() / outcome.trials.sum()
    by_fold = ", ".join(
        f"layer {layer} {position} ×{times}"
        for (layer, position), times in Counter(headline.chosen).most_common()
    )
    return (
        f"{data.counted}, {share:.1%} positive. A score is a mean over {folds} outer folds, each "
        f"scored by probes trained on the others; it compares those of the same fold and "
        f"{data.within}. "
        f"The headline's folds read {by_fold}. The probe that is kept is fitted on all of them, at "
        f"layer {headline.layer}, {headline.position}."
    )


def _card(analysis: Analysis, data: ProbeSet, found: Result) -> dict[str, Any]:
    headline = analysis.headline
    runs = [
        {"name": run.name, "identity": run.identity_digest, "model": run.model} for run in data.runs
    ]
    return {
        "asked": {**found.about["settings"], "judge": data.judge, "runs": runs},
        "layer": headline.layer,
        "position": headline.position,
        "layer_convention": LAYERS,
        "penalty": headline.penalty,
        "target": data.target.describe(),
        "sentence": found.sentence,
        "control": found.control,
        "contexts": len(analysis.outcome),
        "training_sources": sorted(set(data.contexts["source"].str.replace(SEPARATOR, "/"))),
    }
