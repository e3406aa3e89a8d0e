"""An analysis as tidy tables: one row per estimate, one row per context."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.special import expit

from ia_mech.run.layout import replace_file
from ia_mech.stats import Estimate
from probes.records import Analysis

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


def write_parquet(
    frame: pd.DataFrame, path: str | Path, about: dict[str, Any] | None = None
) -> None:
    """Replace a file whole: the old one or the new one, never a half.

    Args:
        frame: the table; its index is left out.
        path: the file; its folder must be there.
        about: kept as JSON in the file's metadata, under ``ia_mech``.

    Raises:
        OSError: it can't be written.
    """
    table = pa.Table.from_pandas(frame, preserve_index=False)
    if about is not None:
        text = json.dumps(about, sort_keys=True)
        table = table.replace_schema_metadata((table.schema.metadata or {}) | {b"ia_mech": text})
    replace_file(Path(path), lambda scratch: pq.write_table(table, scratch))


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
