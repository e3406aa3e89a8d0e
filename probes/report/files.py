"""Keep an analysis in the run it is of.

::

    probes/<name>/
      probe.safetensors     directions in activation space
      card.json             where they come from, scores, conclusion; written last
      estimates.parquet     every number with its interval, one row each
      predictions.parquet   per context, from probes that weren't trained on its source
      heat_map.png .svg .pdf     layer_curve.png .svg .pdf

The folder is written under another name and takes its place when it is whole.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit

from ia_mech.display import KINDS, save_figure
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, frame_of, write_parquet
from ia_mech.run.integrity import read_json
from ia_mech.run.labels import check_name
from ia_mech.run.layout import refuse_unwritable
from ia_mech.stats import Estimate
from probes.analysis import MEASURES, Analysis, Settings
from probes.card import CARD, WEIGHTS, Probe, directions
from probes.dataset import ProbeSet
from probes.report import figures
from probes.report.conclusion import Conclusion

KEY = ["quantity", "layer", "position", "control"]  # no two rows have the same
COLUMNS = [*KEY, "value", "low", "high", "p", "sources", "contexts", "level", "method"]
_DTYPES = {
    **dict.fromkeys(("quantity", "position", "control", "method"), "string"),
    **dict.fromkeys(("layer", "sources", "contexts"), "Int64"),
    "level": "float64",
}
FILES = {
    *(WEIGHTS, CARD, "estimates.parquet", "predictions.parquet"),
    *(f"{name}.{kind}" for name in ("heat_map", "layer_curve") for kind in KINDS),
}
LAYERS = "0 = embeddings, l = output of block l, before the final norm"


# -- tables ---------------------------------------------------------------------------------------


def estimates(analysis: Analysis) -> pd.DataFrame:
    """Every estimate of an analysis, with what it is of.

    Quantities, by what their rows are of:

    - a layer and position: ``auroc_cell`` (the reported estimator's), ``statistic`` (the
      closed-form probes' AUROC, which is tested), ``null_band_95`` (95% quantile of the permuted
      statistics there), ``p_family`` (family-wise), ``p_best`` (of the model confidence set),
      ``selected_in_folds`` (share of the outer folds that chose it).
    - the headline, which is the selection procedure and so has no layer or position: the names in
      :data:`probes.analysis.MEASURES`, ``statistic_headline``, ``null_band_95_headline`` and
      ``p_headline`` (the selection replayed).
    - a control: ``auroc_control``.
    - the readout of output and text: ``auroc_base``, ``auroc_full`` (with hidden states),
      ``auroc_gain`` and ``deviance_saved`` (what hidden states add).
    - the heat map: ``null_band_95_family`` (95% quantile of the largest permuted statistic).

    Returns:
        :data:`COLUMNS`; :data:`KEY` is unique. ``layer``, ``position`` and ``control`` are missing
        where a quantity has none, ``low``, ``high`` and ``level`` where there is no interval. ``p``
        stands beside the statistic that it belongs to, and is the ``value`` of the rows named after
        it.
    """
    return frame_of(_rows(analysis), _DTYPES, COLUMNS)


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

    for name, estimate in headline.measures.items():
        yield interval(name, estimate)
    band = np.quantile(tested.null, 0.95) if tested.permutations else np.nan
    yield plain("statistic_headline", tested.value, "closed form", tested.p)
    yield plain("null_band_95_headline", band, permuted)
    replayed = f"{permuted}, selection replayed"
    yield plain("p_headline", tested.p, replayed, tested.p)
    for control in analysis.compared:
        yield interval("auroc_control", control.auroc, control=control.name)
    if analysis.beyond is not None:
        yield interval("auroc_base", analysis.beyond.base)
        yield interval("auroc_full", analysis.beyond.full)
        yield interval("auroc_gain", analysis.beyond.gain)
        yield interval("deviance_saved", analysis.beyond.saved)
    picked = Counter(headline.picked)
    for i, layer in enumerate(analysis.layers):
        for j, position in enumerate(analysis.positions):
            at: dict[str, Any] = {"layer": layer, "position": position}
            p = tested.p_family[i, j]
            share = picked[layer, position] / len(headline.picked)
            yield interval("auroc_cell", analysis.auroc[i][j], **at)
            yield plain("statistic", tested.statistic[i, j], "closed form", p, **at)
            yield plain("null_band_95", tested.band[i, j], permuted, **at)
            yield plain("p_family", p, permuted, p, **at)
            yield plain("p_best", analysis.p_best[i, j], "model confidence set", **at)
            yield plain("selected_in_folds", share, "inner folds", **at)
    yield plain("null_band_95_family", tested.family_band, permuted)


def predictions(analysis: Analysis) -> pd.DataFrame:
    """What was predicted of every context, out of fold.

    Returns:
        One row per context, in order: ``fold`` (outer), ``positives``, ``trials``, ``log_odds`` and
        ``probability`` of the headline, and for every control that predicts the same outcome
        ``control:<name>`` with its log-odds; ``base`` and ``full``, the log-odds of the readout of
        output and text without and with hidden states.
    """
    scores = analysis.headline.scores
    columns = {
        "fold": analysis.folds,
        "positives": analysis.outcome.positives,
        "trials": analysis.outcome.trials,
        "log_odds": scores,
        "probability": expit(scores),
    }
    for control in analysis.compared:
        if control.scores is not None:
            columns[f"control:{control.name}"] = control.scores
    if analysis.beyond is not None:
        columns |= {"base": analysis.beyond.found.base, "full": analysis.beyond.found.full}
    return pd.DataFrame(columns)


# -- the folder -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """A place for one analysis.

    Attributes:
        folder: where it goes.
        data: what is analysed.
        asked: everything that decides the result, as the card records it.
    """

    folder: Path
    data: ProbeSet
    asked: dict

    @classmethod
    def place(
        cls,
        data: ProbeSet,
        settings: Settings,
        name: str | None = None,
        replace: bool = False,
        home: Path | None = None,
    ) -> "Kept":
        """A folder in a run that this analysis may write.

        The same analysis may be written again; one of other settings or labels only with
        ``replace``.

        Args:
            data: what is to be analysed.
            settings: how.
            name: of the folder; made from target, estimator and judge if not given.
            replace: allow to replace any other analysis.
            home: the run to keep it in; the first if not given.

        Raises:
            UserError: a name that no file can have, one that is taken, a run that can't be
                written to, or a folder with files that no analysis wrote.
        """
        if name is None:
            parts = [data.target.name.replace("@", "-at-"), settings.estimator]
            parts += [data.judge] if data.judge else []
            name = "-".join([*parts, f"{len(data.runs)}-runs"] if len(data.runs) > 1 else parts)
        folder = (home or data.runs[0].path) / "probes" / check_name(name)
        refuse_unwritable(folder, "give a copy of the run")
        _restore(folder)
        asked = _asked(data, settings)
        _check_free(folder, asked, replace)
        return cls(folder, data, asked)

    def write(self, analysis: Analysis, conclusion: Conclusion) -> None:
        """Write all files, or none."""
        scratch, old = _beside(self.folder, "new"), _beside(self.folder, "old")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            self._fill(scratch, analysis, conclusion)
            if self.folder.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.replace(self.folder, old)
            os.replace(scratch, self.folder)
        finally:
            _restore(self.folder)
            shutil.rmtree(scratch, ignore_errors=True)

    def _fill(self, folder: Path, analysis: Analysis, conclusion: Conclusion) -> None:
        data, headline = self.data, analysis.headline
        about = {
            "target": data.target.name,
            "judge": data.judge,
            "within": data.within,
            "estimator": analysis.settings.estimator,
            "model": ", ".join(dict.fromkeys(run.model["name"] for run in data.runs)),
            "runs": ", ".join(run.name for run in data.runs),
        }
        write_parquet(estimates(analysis).assign(**about), folder / "estimates.parquet")
        names = data.contexts[["run", "context_id", "dataset"]].assign(
            run=data.contexts["run"].map(lambda number: data.runs[number].name),
            source=data.contexts["source"].str.replace("\0", "/"),
        )
        predicted = pd.concat([names, predictions(analysis)], axis=1)
        write_parquet(predicted, folder / "predictions.parquet")
        title = f"{about['model']} · {data.target.name} · {data.labelled_by}"
        save_figure(figures.heat_map(figures.Map.of(analysis), title), folder, "heat_map")
        save_figure(figures.layer_curve(analysis, title), folder, "layer_curve")
        position = analysis.positions.index(headline.position)
        states = data.layer(headline.layer)[:, position]
        found = directions(states, data.outcome, headline.penalty)
        Probe(found, self._card(analysis, conclusion)).save(folder)

    def _card(self, analysis: Analysis, conclusion: Conclusion) -> dict:
        headline, tested = analysis.headline, analysis.tested
        measures = {
            name: {"what": MEASURES[name], **_numbers(estimate)}
            for name, estimate in headline.measures.items()
        }
        compared = [
            {"name": c.name, "kind": c.kind, "what": c.what} | {"auroc": _numbers(c.auroc)}
            for c in analysis.compared
        ]
        gain = analysis.beyond
        added = gain and {
            "base": _numbers(gain.base),
            "full": _numbers(gain.full),
            "auroc_gain": _numbers(gain.gain),
            "deviance_saved": _numbers(gain.saved),
        }
        return {
            "asked": self.asked,
            "layer": headline.layer,
            "position": headline.position,
            "layer_convention": LAYERS,
            "fitted_on": self.data.states_are,
            "penalty": headline.penalty,
            "target": self.data.target.describe(),
            "verdict": {"sentence": conclusion.sentence, "beyond": conclusion.beyond},
            "p": tested.p,
            "permutations": tested.permutations,
            "chosen_by_outer_folds": [list(cell) for cell in headline.picked],
            "scores": measures,
            "controls": compared,
            "beyond_output_and_text": added,
            "contexts": len(analysis.outcome),
            "training_sources": sorted(set(self.data.contexts["source"].str.replace("\0", "/"))),
            "notes": analysis.notes,
        }


def _check_free(folder: Path, asked: dict, replace: bool) -> None:
    """Refuse a place that holds anything but this analysis, or one that may be replaced."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file", "give another --out")
    others = sorted({path.name for path in folder.iterdir()} - FILES)
    if others:
        raise UserError(
            f"{folder} holds what no analysis wrote ({', '.join(others[:3])})",
            "move it elsewhere, or give another --out",
        )
    if replace or not any(folder.iterdir()):
        return
    before = _asked_before(folder)
    if before is None:
        raise UserError(
            f"{folder / CARD} is missing or can't be read", "give another --out, or --replace"
        )
    differing = [key for key in asked if _compared(before, key) != _compared(asked, key)]
    if differing:
        raise UserError(
            f"{folder} holds an analysis that differs in {', '.join(differing)}",
            "give another --out, or --replace",
        )


def _compared(asked: dict, key: str) -> Any:
    """A moved run is still the same run."""
    found = asked.get(key)
    if key == "runs" and isinstance(found, list):
        return [{k: v for k, v in run.items() if k != "name"} for run in found]
    return found


def _beside(folder: Path, word: str) -> Path:
    return folder.with_name(f".{folder.name}.{word}")


def _restore(folder: Path) -> None:
    """Bring back what was moved aside, unless its place is taken."""
    old = _beside(folder, "old")
    if old.exists() and not folder.exists():
        os.replace(old, folder)
    shutil.rmtree(old, ignore_errors=True)


def _asked(data: ProbeSet, settings: Settings) -> dict:
    """Runs, labels and settings as plain JSON; without the number of threads."""
    chosen = {k: v for k, v in asdict(settings).items() if k != "workers"}
    runs = [
        {
            "name": run.name,
            "identity": run.identity_digest,
            "model": run.model,
            "labels": _labels_digest(data, n),
        }
        for n, run in enumerate(data.runs)
    ]
    return {
        "runs": runs,
        "judge": data.judge and {"name": data.judge, "identity": data.record.get("identity")},
        "rubric": data.record.get("rubric"),
        "target": data.target.name,
        "embeddings": _digest(data.embeddings),
        "within": data.within,
        "positions": data.positions,
        "layers": list(data.layers),
        "settings": chosen,
    }


def _labels_digest(data: ProbeSet, number: int) -> str:
    """Of a run's outcomes: which contexts, k and n."""
    own = data.contexts.loc[data.contexts["run"] == number]
    hashes = pd.util.hash_pandas_object(own[["context_id", "positives", "trials"]], index=False)
    return f"{int(hashes.sum()):016x}"[-16:]


def _digest(embeddings: np.ndarray | None) -> str | None:
    return None if embeddings is None else sha256(embeddings.tobytes()).hexdigest()[:16]


def _asked_before(folder: Path) -> dict | None:
    if not (folder / CARD).is_file():  # a FIFO would be waited for
        return None
    try:
        asked = read_json(folder / CARD).get("asked")
    except (OSError, ValueError, AttributeError):
        return None
    return asked if isinstance(asked, dict) else None


def _numbers(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON, which has no NaN."""
    numbers = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    found = {name: None if np.isnan(value) else float(value) for name, value in numbers.items()}
    return found | {"sources": estimate.sources, "method": estimate.method}
