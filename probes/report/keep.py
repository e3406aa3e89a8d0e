"""What an analysis leaves in the run it is of.

::

    probes/<name>/
      probe.safetensors     directions in activation space
      card.json             where they come from, what they score, what may be said; written last
      estimates.parquet     every number with its interval, one row each
      predictions.parquet   per context, from probes that weren't trained on its source
      heat_map.png .svg     layer_curve.png .svg

A folder is written under another name and takes its place when it is whole.

An analysis as tidy tables: one row per estimate, one row per context.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit

from ia_mech.errors import UserError
from ia_mech.estimates import write_parquet
from ia_mech.run.labels import check_name
from ia_mech.run.layout import read_json
from ia_mech.stats import Estimate
from probes.card import CARD, WEIGHTS, Probe, directions
from probes.dataset import ProbeSet
from probes.records import MEASURES, Analysis, Settings
from probes.report import figures
from probes.report.verdict import Verdict

KEY = ["quantity", "layer", "position", "control"]  # no two rows have the same
_DTYPES = {
    **dict.fromkeys(("quantity", "position", "control", "method"), "string"),
    **dict.fromkeys(("layer", "sources", "contexts"), "Int64"),
    **dict.fromkeys(("value", "low", "high", "p", "level"), "float64"),
}
COLUMNS = (*KEY, "value", "low", "high", "p", "sources", "contexts", "level", "method")


def rows(analysis: Analysis, context: Mapping[str, Any]) -> pd.DataFrame:
    """Every estimate of an analysis, with what it is of.

    Quantities, by what their rows are of:

    - a layer and position: ``auroc_cell`` (the reported estimator's), ``statistic`` (the
      closed-form probes' AUROC, which is what is tested), ``null_band_95`` (95% quantile of the
      permuted statistics of that cell), ``p_family`` (family-wise), ``selected_in_folds`` (share of
      the outer folds that chose the cell; 0 where none did).
    - the headline, which has the layer and position that were chosen on all contexts: the names in
      :data:`probes.records.MEASURES`, ``statistic_headline``, ``null_band_95_headline`` and
      ``p_headline`` (the selection replayed).
    - a control: ``auroc_control`` and ``gain_over_control`` (for the control task: selectivity).
    - a layer at the headline's position: ``code_bits_saved_per_turn`` and ``code_ratio``.
    - the heat map: ``null_band_95_family`` (95% quantile of the largest permuted statistic).

    Args:
        analysis: of one target.
        context: constant columns, one value each: target, judge, estimator, runs, model.

    Returns:
        :data:`COLUMNS` and those of ``context``; ``KEY`` is unique. ``layer``, ``position`` and
        ``control`` are missing where a quantity has none, ``low`` and ``high`` where there is no
        interval. ``p`` stands beside the statistic that it belongs to, and is the ``value`` of the
        rows named after it.

    Raises:
        ValueError: a column of ``context`` has the name of another.
    """
    taken = [name for name in context if name in COLUMNS]
    if taken:
        raise ValueError(f"columns that an analysis has already: {', '.join(taken)}")
    whole = {
        "sources": int(analysis.outcome.sources.max()) + 1,
        "contexts": len(analysis.outcome),
        "level": np.nan,
    }
    records = [whole | record for part in _PARTS for record in part(analysis)]
    frame = pd.DataFrame(records, columns=list(COLUMNS)).astype(_DTYPES)
    return frame.assign(**context)


def predictions(analysis: Analysis) -> pd.DataFrame:
    """What was predicted of every context, out of fold.

    Args:
        analysis: of one target.

    Returns:
        One row per context, in order: ``fold`` (outer), ``source`` and ``run`` (indices),
        ``positives``, ``trials``, ``log_odds`` and ``probability`` of the headline, and for every
        control that predicts the same outcome ``control:<name>`` with its log-odds.
    """
    outcome, headline = analysis.outcome, analysis.headline
    columns = {
        "fold": analysis.folds,
        "source": outcome.sources,
        "run": outcome.runs,
        "positives": outcome.positives,
        "trials": outcome.trials,
        "log_odds": headline.scores,
        "probability": expit(headline.scores),
    }
    for control in analysis.compared:
        if control.scores is not None:
            columns[f"control:{control.name}"] = control.scores
    return pd.DataFrame(columns)


# -- rows by what they are of ---------------------------------------------------------------------


def _cells(analysis: Analysis) -> Iterator[dict[str, Any]]:
    tested, method = analysis.tested, _permuted(analysis)
    picked = Counter(analysis.headline.picked)
    for i, layer in enumerate(analysis.layers):
        for j, position in enumerate(analysis.positions):
            where = {"layer": layer, "position": position}
            p = tested.p_family[i, j]
            share = picked[layer, position] / len(analysis.headline.picked)
            yield where | _estimated("auroc_cell", analysis.auroc[i][j], analysis)
            yield where | _plain("statistic", tested.statistic[i, j], "closed form", p)
            yield where | _plain("null_band_95", tested.band[i, j], method)
            yield where | _plain("p_family", p, method, p)
            yield where | _plain("selected_in_folds", share, "inner folds")


def _family(analysis: Analysis) -> Iterator[dict[str, Any]]:
    yield _plain("null_band_95_family", analysis.tested.family_band, _permuted(analysis))


def _headline(analysis: Analysis) -> Iterator[dict[str, Any]]:
    headline, tested, method = analysis.headline, analysis.tested, _permuted(analysis)
    where = {"layer": headline.layer, "position": headline.position}
    for name, estimate in headline.measures.items():
        yield where | _estimated(name, estimate, analysis)
    band = np.quantile(tested.null, 0.95) if len(tested.null) else np.nan
    yield where | _plain("statistic_headline", tested.value, "closed form", tested.p)
    yield where | _plain("null_band_95_headline", band, method)
    yield where | _plain("p_headline", tested.p, f"{method}, selection replayed", tested.p)


def _controls(analysis: Analysis) -> Iterator[dict[str, Any]]:
    for control in analysis.compared:
        of = {"control": control.name}
        yield of | _estimated("auroc_control", control.auroc, analysis)
        yield of | _estimated("gain_over_control", control.gain, analysis)


def _codes(analysis: Analysis) -> Iterator[dict[str, Any]]:
    for layer, code in zip(analysis.layers, analysis.code, strict=True):
        where = {"layer": layer, "position": analysis.headline.position}
        yield where | _estimated("code_bits_saved_per_turn", code.saved_per_turn, analysis)
        yield where | _plain("code_ratio", code.ratio, "online code, mean length over orders")


_PARTS = (_headline, _controls, _cells, _family, _codes)


def _estimated(quantity: str, estimate: Estimate, analysis: Analysis) -> dict[str, Any]:
    return {
        "quantity": quantity,
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "sources": estimate.sources,
        "level": analysis.settings.level,
        "method": estimate.method,
    }


def _plain(quantity: str, value: float, method: str, p: float = np.nan) -> dict[str, Any]:
    return {"quantity": quantity, "value": value, "p": p, "method": method}


def _permuted(analysis: Analysis) -> str:
    return f"{analysis.tested.permutations} permutations of whole sources"


FILES = {
    *(WEIGHTS, CARD, "estimates.parquet", "predictions.parquet"),
    *(f"{name}.{kind}" for name in ("heat_map", "layer_curve") for kind in ("png", "svg")),
}
LAYERS = "0 = embeddings, l = output of block l, before the final norm"


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

        The same analysis may be written again; one of other settings or labels is only replaced if
        asked for.

        Args:
            data: what is to be analysed.
            settings: how.
            name: of the folder; made from target, estimator and judge if not given.
            replace: any other analysis that is there.
            home: the run to keep it in; the first if not given.

        Raises:
            UserError: a name that no file can have, one that is taken, or files there that no
                analysis wrote.
        """
        if name is None:
            parts = [data.target.name.replace("@", "-at-"), settings.estimator, data.judge]
            name = "-".join([*parts, f"{len(data.runs)}-runs"] if len(data.runs) > 1 else parts)
        folder = (home or data.runs[0].path) / "probes" / check_name(name)
        _restore(folder)
        asked = _asked(data, settings)
        _check_free(folder, asked, replace)
        return cls(folder, data, asked)

    def write(self, analysis: Analysis, verdict: Verdict) -> None:
        """Write all files, or none."""
        scratch, old = _beside(self.folder, "new"), _beside(self.folder, "old")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            self._fill(scratch, analysis, verdict)
            if self.folder.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.replace(self.folder, old)
            os.replace(scratch, self.folder)
        finally:
            _restore(self.folder)
            shutil.rmtree(scratch, ignore_errors=True)

    def _fill(self, folder: Path, analysis: Analysis, verdict: Verdict) -> None:
        data, headline = self.data, analysis.headline
        about = {
            "target": data.target.name,
            "judge": data.judge,
            "within": data.within,
            "estimator": analysis.settings.estimator,
            "model": ", ".join(dict.fromkeys(run.model["name"] for run in data.runs)),
            "runs": ", ".join(str(run.path) for run in data.runs),
        }
        write_parquet(rows(analysis, about), folder / "estimates.parquet")
        names = data.contexts[["run", "context_id", "dataset"]]
        names = names.assign(
            run=names["run"].map(lambda number: str(data.runs[number].path)),
            source=data.contexts["source"].str.replace("\0", "/"),
        )
        said = predictions(analysis).drop(columns=["run", "source"], errors="ignore")
        write_parquet(pd.concat([names, said], axis=1), folder / "predictions.parquet")
        title = f"{about['model']} · {data.target.name} · judge {data.judge}"
        figures.save(figures.heat_map(analysis, title), folder, "heat_map")
        figures.save(figures.layer_curve(analysis, title), folder, "layer_curve")
        position = analysis.positions.index(headline.position)
        states = data.layer(headline.layer)[:, position]
        found = directions(states, data.outcome, headline.penalty)
        Probe(found, self._card(analysis, verdict)).save(folder)

    def _card(self, analysis: Analysis, verdict: Verdict) -> dict:
        headline, tested = analysis.headline, analysis.tested
        measures = {
            name: {"what": MEASURES[name], **_numbers(estimate)}
            for name, estimate in headline.measures.items()
        }
        compared = [
            {"name": c.name, "kind": c.kind, "what": c.what}
            | {"auroc": _numbers(c.auroc), "gain": _numbers(c.gain)}
            for c in analysis.compared
        ]
        return {
            "asked": self.asked,
            "layer": headline.layer,
            "position": headline.position,
            "layer_convention": LAYERS,
            "penalty": headline.penalty,
            "target": self.data.target.describe(),
            "verdict": {"sentence": verdict.sentence, "latent": verdict.latent},
            "p": tested.p,
            "permutations": tested.permutations,
            "chosen_by_outer_folds": [list(cell) for cell in headline.picked],
            "scores": measures,
            "controls": compared,
            "contexts": len(analysis.outcome),
            "training_sources": sorted(set(self.data.contexts["source"].str.replace("\0", "/"))),
            "notes": analysis.notes,
        }


def _check_free(folder: Path, asked: dict, replace: bool) -> None:
    """Refuse a place that holds anything but this analysis, or another one that may go.

    Raises:
        UserError: says what is there.
    """
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


def _compared(asked: dict, key: str):
    """A run that was moved is still the same run."""
    found = asked.get(key)
    if key == "runs" and isinstance(found, list):
        return [{k: v for k, v in run.items() if k != "path"} for run in found]
    return found


def _beside(folder: Path, word: str) -> Path:
    return folder.with_name(f".{folder.name}.{word}")


def _restore(folder: Path) -> None:
    """Bring back what was moved out of the way, unless something else is there by now."""
    old = _beside(folder, "old")
    if old.exists() and not folder.exists():
        os.replace(old, folder)
    shutil.rmtree(old, ignore_errors=True)


def _asked(data: ProbeSet, settings: Settings) -> dict:
    """Runs, labels and settings, as JSON has them; not the number of threads."""
    chosen = {k: v for k, v in asdict(settings).items() if k != "workers"}
    runs = [
        {
            "path": str(run.path.resolve()),
            "identity": run.identity_digest,
            "model": run.model,
            "labels": _labels_digest(data, n),
        }
        for n, run in enumerate(data.runs)
    ]
    return {
        "runs": runs,
        "judge": {"name": data.judge, "identity": data.record.get("identity")},
        "rubric": data.record.get("rubric"),
        "target": data.target.name,
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


def _asked_before(folder: Path) -> dict | None:
    try:
        asked = read_json(folder / CARD).get("asked")
    except (OSError, ValueError, AttributeError):
        return None
    return asked if isinstance(asked, dict) else None


def _numbers(estimate) -> dict:
    """JSON has no NaN."""
    numbers = {name: getattr(estimate, name) for name in ("value", "low", "high")}
    return {k: None if v != v else float(v) for k, v in numbers.items()} | {
        "sources": estimate.sources,
        "method": estimate.method,
    }
