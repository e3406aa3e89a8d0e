"""The figures of a report as a file: JSON, CSV or Parquet, one row per estimate."""

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ia_mech.rates.compute import Row, comparisons
from ia_mech.rates.load import Judged
from ia_mech.run.layout import replace_file

_FLOATS = ("temperature", "value", "low", "high", "p", "p_holm", "level")
_WHOLE = ("n_samples", "events", "rows", "sources", "contexts")
COLUMNS = tuple(field.name for field in fields(Row))
SCHEMA = pa.schema(
    [
        (name, pa.float64() if name in _FLOATS else pa.int64() if name in _WHOLE else pa.string())
        for name in COLUMNS
    ]
)


def frame_of(rows: list[Row]) -> pd.DataFrame:
    """The rows as a data frame; columns as :class:`Row` has them, whole numbers nullable."""
    frame = pd.DataFrame(_records(rows), columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(_FLOATS, "float64") | dict.fromkeys(_WHOLE, "Int64"))


def write(
    path: str | Path, kind: str, rows: list[Row], judged: Judged, options: dict[str, Any]
) -> None:
    """Replace a file whole: the old one or the new one, never a half.

    Args:
        path: the file; its folder must be there.
        kind: ``json`` (an object with ``about`` and ``estimates``), ``csv``, or ``parquet`` (with
            the same ``about`` in its metadata under ``ia_mech``).
        rows: the estimates.
        judged: what they are of.
        options: level, resamples, seed and method, to be kept with them.

    Raises:
        OSError: it can't be written.
    """
    path = Path(path)
    own, pooled = comparisons(rows)
    about = {
        "runs": [str(run.path) for run in judged.runs],
        "judge": {"name": judged.judge, "record": judged.record},
        "annotator": judged.annotator,
        "responses": judged.responses,
        "comparisons": own,
        "comparisons_of_all_datasets": pooled,
        "notes": judged.notes,
        **options,
    }

    def fill(scratch: Path) -> None:
        if kind == "json":
            text = json.dumps(
                {"about": about, "estimates": _records(rows)}, indent=1, ensure_ascii=False
            )
            scratch.write_text(text + "\n", encoding="utf-8")
        elif kind == "csv":
            frame_of(rows).to_csv(scratch, index=False)
        else:
            schema = SCHEMA.with_metadata({b"ia_mech": json.dumps(about, sort_keys=True).encode()})
            pq.write_table(pa.Table.from_pylist(_records(rows), schema=schema), scratch)

    replace_file(path, fill)


def _records(rows: list[Row]) -> list[dict[str, Any]]:
    """Plain dictionaries; what isn't there is None, which all three forms can say."""
    return [
        {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(row).items()
        }
        for row in rows
    ]
