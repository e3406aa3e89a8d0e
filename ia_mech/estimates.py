"""Estimates as tidy rows: what was estimated, the number, its interval, its test.

Rates, probes and experiments make :class:`TidyEstimate` rows and turn them into one table with
:func:`frame_of`. Intervals and tests are made in :mod:`ia_mech.stats`. Only
:meth:`ia_mech.stats.Estimate.text`, :func:`p_value`, :func:`shown_changes` and :func:`could_show`
write them as text.
"""

import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from ia_mech.cli import expanded
from ia_mech.run.integrity import replace_file
from ia_mech.stats import (
    LEAST_SHOWN,
    Estimate,
    cluster_bootstrap,
    cluster_mean,
    holm,
    paired_difference,
)

ALL = "(all)"  # the name of all datasets together
TOGETHER = "all together"  # the same in notes
FEW_SOURCES = 24  # the fewest sources that benchmarks/coverage.md simulates
POWER = 0.8  # the power at which we say that an effect would have been shown
LEAST_P = 0.001  # the smallest p that is shown; a note says where a test can't reach it
SHOWN = 0.05  # the largest corrected p at which a difference is said to be shown
MEASURED = {  # columns of every estimate, after those that name what was estimated
    "rows": "int64",
    "value": "float64",
    "low": "float64",
    "high": "float64",
    "p": "float64",
    "p_holm": "float64",
    "test": "object",
    "sources": "int64",
    "method": "object",
}


@dataclass(frozen=True)
class TidyEstimate:
    """One estimate of a ``quantity``."""

    quantity: str
    names: dict[str, Any]  # column → value: what was estimated, and further cells of its row
    rows: int  # how many values it was computed from
    estimate: Estimate  # with its interval over sources
    p: float = np.nan  # p value of a difference of 0; NaN where nothing was tested
    test: str | None = None  # the test of p, as :class:`ia_mech.stats.Difference` names it
    p_holm: float = np.nan  # by :func:`holm_corrected`
    together: int = 1  # how many tests p_holm is corrected for


@dataclass(frozen=True)
class Group:
    """What estimates from the same rows share: sources, options and names."""

    sources: np.ndarray  # [rows] the source of each value
    options: dict[str, Any]  # level, resamples and seed of intervals and tests
    names: dict[str, Any] = field(default_factory=dict)  # names that every estimate gets

    def mean(
        self,
        quantity: str,
        values: ArrayLike,
        *,
        proportion: bool = False,
        least: float = -np.inf,
        most: float = np.inf,
        **names: Any,
    ) -> TidyEstimate:
        """The mean of ``[rows]`` values with its interval, within these bounds; NaN is left out.

        Follow-ups, and masses of them, are proportions. Probabilities that can't be near 0 or 1
        after any query aren't: their interval needn't allow for such queries.
        """
        values = np.asarray(values, dtype=float)
        level = self.options["level"]
        estimate = cluster_mean(values, self.sources, proportion=proportion, level=level)
        estimate = estimate.clip(least, most)
        return self.row(quantity, estimate, int((~np.isnan(values)).sum()), **names)

    def median(self, quantity: str, values: ArrayLike, **names: Any) -> TidyEstimate:
        """The median of ``[rows]`` values with a cluster-bootstrap interval; NaN is left out."""
        values = np.asarray(values, dtype=float)
        kept = ~np.isnan(values)
        distinct, codes = np.unique(values[kept], return_inverse=True)

        def middle(counts: np.ndarray) -> np.ndarray:
            reached = counts.cumsum(1)
            half = reached[:, -1:] / 2
            low, high = distinct[(reached >= half).argmax(1)], distinct[(reached > half).argmax(1)]
            return (low + high) / 2  # in an even number of rows the two in the middle may differ

        if not kept.any():
            return self.row(quantity, Estimate(np.nan, np.nan, np.nan, 0, "no values"), 0, **names)
        sources = np.asarray(self.sources)[kept]
        (estimate,) = cluster_bootstrap(middle, sources, codes, **self.options)
        return self.row(quantity, estimate, int(kept.sum()), **names)

    def row(
        self,
        quantity: str,
        estimate: Estimate,
        rows: int,
        *,
        p: float = np.nan,
        test: str | None = None,
        **names: Any,
    ) -> TidyEstimate:
        """An estimate that was made elsewhere; it gets the group's names and ``names``."""
        return TidyEstimate(quantity, self.names | names, rows, estimate, p, test or None)


def paired_row(
    group: Group,
    quantity: str,
    values: ArrayLike,
    sources: Iterable[Hashable],
    baseline: ArrayLike,
    baseline_sources: Iterable[Hashable],
    **names: Any,
) -> TidyEstimate:
    """Mean over sources of ``[n]`` values minus that of a ``[m]`` baseline, with its test
    (:func:`ia_mech.stats.paired_difference`). Only the group's options and names are used."""
    options = {key: group.options[key] for key in ("level", "seed")}
    paired = paired_difference(values, sources, baseline, baseline_sources, **options)
    counted = int((~np.isnan(np.asarray(values, dtype=float))).sum())
    return group.row(quantity, paired.difference, counted, p=paired.p, test=paired.test, **names)


def by_dataset(frame: pd.DataFrame) -> Iterator[tuple[str, np.ndarray]]:
    """Each dataset with its mask ``[rows]``, then :data:`ALL` if there are several."""
    if frame.empty:
        return
    names = sorted(frame["dataset"].unique())
    for name in names:
        yield name, (frame["dataset"] == name).to_numpy()
    if len(names) > 1:
        yield ALL, np.ones(len(frame), dtype=bool)


def by_quantity(row: TidyEstimate) -> Hashable:
    """The usual family of a test: tests of its quantity, either those on all datasets together or
    those on single datasets."""
    return row.quantity, row.names["dataset"] == ALL


def holm_corrected(
    rows: Iterable[TidyEstimate], family: Callable[[TidyEstimate], Hashable] = by_quantity
) -> list[TidyEstimate]:
    """The rows with ``p_holm``, Holm-corrected over all tests of the same family."""
    rows = list(rows)
    families = [family(row) if not np.isnan(row.p) else None for row in rows]
    for name in set(families) - {None}:
        at = [i for i, of in enumerate(families) if of == name]
        for i, p in zip(at, holm([rows[i].p for i in at]), strict=True):
            rows[i] = replace(rows[i], p_holm=float(p), together=len(at))
    return rows


def frame_of(
    rows: Iterable[TidyEstimate], names: Mapping[str, str], columns: Sequence[str] | None = None
) -> pd.DataFrame:
    """One line per estimate.

    ``names`` maps all names that estimates may have to dtypes. An estimate without a name has a
    missing value there, or an empty string where the dtype is ``str``. ``columns`` are by default
    ``quantity``, ``names`` and :data:`MEASURED`, whose dtypes ``names`` may change.

    Raises:
        ValueError: an estimate has a name that isn't in ``names``.
    """
    dtypes = {"quantity": "object"} | MEASURED | dict(names)
    if columns is None:
        own = [name for name in names if name not in ("quantity", *MEASURED)]
        columns = ["quantity", *own, *MEASURED]
    records = []
    for row in rows:
        unknown = set(row.names) - set(names)
        if unknown:
            raise ValueError(f"{row.quantity} has no column for {', '.join(sorted(unknown))}")
        e = row.estimate
        records.append(
            {"quantity": row.quantity, **row.names, "rows": row.rows}
            | {"value": e.value, "low": e.low, "high": e.high}
            | {"p": row.p, "p_holm": row.p_holm, "test": row.test}
            | {"sources": e.sources, "method": e.method}
        )
    frame = pd.DataFrame(records, columns=list(columns))
    for name in frame:
        if dtypes[name] == "str":
            frame[name] = frame[name].astype("object").where(frame[name].notna(), "")
        else:
            frame[name] = frame[name].astype(dtypes[name])
    return frame


def write_parquet(
    frame: pd.DataFrame, path: str | Path, about: dict[str, Any] | None = None
) -> None:
    """Write a table without its index, replacing the whole file at once. ``about`` says what it was
    made from and goes to the metadata as JSON, under ``ia_mech``.

    Raises:
        OSError: it can't be written.
    """
    table = pa.Table.from_pandas(frame, preserve_index=False)
    metadata = dict(table.schema.metadata or {})
    if about is not None:
        metadata[b"ia_mech"] = json.dumps(about, sort_keys=True).encode()
    # Texts are ``string``, whatever pandas keeps them as.
    fields = [
        column.with_type(pa.string())
        if pa.types.is_large_string(column.type) or pa.types.is_null(column.type)
        else column
        for column in table.schema
    ]
    table = table.cast(pa.schema(fields, metadata))
    replace_file(expanded(path), lambda scratch: pq.write_table(table, scratch))


def estimate_of(row: Any) -> Estimate:
    """The estimate in a row of a table, whose columns are attributes."""
    return Estimate(row.value, row.low, row.high, row.sources, getattr(row, "method", ""))


def with_shown_intervals(rows: pd.DataFrame) -> pd.DataFrame:
    """Estimates for a figure: without the intervals that :meth:`Estimate.text` doesn't show."""
    if "sources" not in rows:
        return rows
    few = rows["sources"] < LEAST_SHOWN
    return rows.assign(low=rows["low"].mask(few), high=rows["high"].mask(few))


def p_value(p: float) -> str:
    """``p = 0.012``, or ``p < 0.001``; ``–`` where nothing was tested."""
    return "–" if np.isnan(p) else "p < 0.001" if p < LEAST_P else f"p = {p:.3f}"


def smallest_effect(row: Any, level: float = 0.95) -> Any:
    """The effect that an estimate's spread had 80% power to show at its level, two-sided.

    That is the sum of two normal quantiles times the standard error, which is read off the
    interval: 2.8 standard errors at 95%. NaN without an interval. ``row`` is one estimate, or a
    table of them.
    """
    tail = NormalDist().inv_cdf(0.5 + level / 2)
    return (row["high"] - row["low"]) / (2 * tail) * (tail + NormalDist().inv_cdf(POWER))


def could_show(
    least: float, digits: int = 2, most: float = np.inf, up_to: float | None = None
) -> str:
    """In words, how large an effect would have been shown where none was; empty if that isn't
    known. ``least`` is :func:`smallest_effect`, of several ones the smallest, and ``up_to`` the
    largest; ``most`` is the largest possible effect, such as 1 for a difference of rates."""
    if np.isnan(least):
        return ""
    if round(least, digits) >= most:
        return "too few data to show any effect"
    least_text, last = (f"{one:.{digits}f}" for one in (least, up_to or least))
    sizes = least_text if last == least_text else f"{least_text} to {last}"
    if up_to is not None and up_to >= most:  # of some nothing could be shown
        sizes = f"at best {least_text}"
    return f"{sizes} would have been shown with 80% power"


def queries_needed(comparisons: int = 1) -> int:
    """The fewest queries with which one of so many comparisons can be shown at all.

    Flipping the signs of n queries' differences gives no p below 2^(1 − n), however large they are,
    and Holm's correction multiplies the smallest p by the number of comparisons.
    """
    return math.ceil(1 + math.log2(comparisons / SHOWN))


def shown_changes(
    differences: pd.DataFrame, less: str, more: str, digits: int = 2, unit: str = ""
) -> str:
    """The differences that are shown, in words: ``falls by 0.28 [0.05, 0.48] at T = 1``.

    Args:
        differences: of one quantity; if there are several datasets, only all together are told.
        less, more: what stands before differences below 0 and above 0, which are written without
            their sign.
        digits, unit: decimals, and what stands after each difference.

    Returns:
        An empty text if no corrected p is at most :data:`SHOWN`.
    """
    whole = all_datasets(differences)
    whole = whole[whole["p_holm"] <= SHOWN]
    if "temperature" in whole:
        whole = whole.sort_values("temperature")
    said = []
    for words, sign in ((less, -1), (more, 1)):
        sizes = []
        for _, row in whole[sign * whole["value"] > 0].iterrows():
            low, high = sorted((sign * row["low"], sign * row["high"]))
            size = Estimate(abs(row["value"]), low, high, row["sources"]).text(digits)
            t = row.get("temperature", np.nan)
            at = "" if np.isnan(t) else " for greedy turns" if t == 0 else f" at T = {t:g}"
            sizes.append(f"{size}{unit}{at}")
        if sizes:
            said.append(f"{words} {' and '.join(sizes)}")
    return " and ".join(said)


def all_datasets(estimates: pd.DataFrame) -> pd.DataFrame:
    """The rows of all datasets together, or of the only dataset."""
    several = (estimates["dataset"] == ALL).any()
    return estimates[estimates["dataset"] == ALL] if several else estimates


def few_sources(estimates: pd.DataFrame) -> list[str]:
    """A note on datasets whose intervals or tests have fewer than :data:`FEW_SOURCES` sources.

    Flipping the signs of n sources gives no p below 2^(1 − n), however large the effect is.
    """
    tested = estimates["low"].notna() | estimates["p"].notna()
    shown = estimates[tested & (estimates["sources"] < FEW_SOURCES)]
    names = list(dict.fromkeys(shown["dataset"].replace(ALL, TOGETHER)))
    if not names:
        return []
    note = (
        f"{', '.join(names)}: some intervals are of fewer than {FEW_SOURCES} queries. Read them as "
        "rough: we did not test how often such intervals contain the true value."
    )
    flipped = estimates[estimates["test"].str.contains("sign flip", na=False)]
    least = flipped.groupby("dataset", sort=False)["sources"].min().rename({ALL: TOGETHER})
    too_few = least[2.0 ** (1 - least) >= LEAST_P]
    for count, of in too_few.groupby(too_few):
        note += (
            f" Some tests have {count} quer{'y' if count == 1 else 'ies'} ({', '.join(of.index)}): "
            f"sign flips of so few give no p below {2.0 ** (1 - count):.2g}, however large the "
            "effect."
        )
    return [note]
