"""Reaction bits as a target: turns that tell more of their response than others of their query.

Reads the table of turns that ``python -m experiments.reaction`` wrote. A turn's bits are those of
its second and later tokens: the first token's distribution is a function of the header state that
is probed.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ia_mech.cli import shell_word
from ia_mech.errors import UserError
from ia_mech.run import Run
from ia_mech.stats import Estimate, cluster_bootstrap

RELIABLE = 0.2  # split-half reliability below which there is too little to predict
KEY = ["dataset", "context_id", "temperature", "sample"]


def read_bits(runs: Sequence[Run], folder: Path | None = None) -> pd.DataFrame:
    """The sampled turns with their bits.

    Args:
        runs: open runs; the experiment read all of them.
        folder: of the experiment; ``cache/<first run>-reaction`` if not given.

    Returns:
        One row per turn sampled above temperature 0: ``run``, ``context_id``, ``query``,
        ``temperature``, ``sample``, ``bits`` (from the second token on) and ``positive`` (more
        than the median of the query's turns at the temperature).

    Raises:
        UserError: there is no such table, or it isn't of these runs' turns.
    """
    from ia_mech.models.embedded import cache_dir

    folder = folder or cache_dir() / f"{runs[0].path.resolve().name}-reaction"
    file, first = folder / "turns.parquet", " ".join(shell_word(run.path) for run in runs)
    remedy = f"run: python -m experiments.reaction {first}, or give its folder with --reaction"
    try:
        table = pd.read_parquet(file, columns=[*KEY, "text", "bits_by_token"])
    except (OSError, ValueError, KeyError):
        raise UserError(f"{file} is missing or no table of reaction bits", remedy) from None
    own = pd.concat([run.generations.assign(run=str(run.path)) for run in runs])
    own = own[own["temperature"] > 0]
    own = own.assign(query=own["dataset"] + "\0" + own["source_id"])
    table = table[table["temperature"] > 0]
    found = own[["run", "query", *KEY, "text"]].merge(table, on=[*KEY, "text"])
    if len(found) != len(table) or found.duplicated(KEY).any() or found.empty:
        raise UserError(f"{file} is not of the turns of {first}", remedy)
    found["bits"] = [float(np.nansum(tokens[1:])) for tokens in found["bits_by_token"]]
    median = found.groupby(["query", "temperature"])["bits"].transform("median")
    columns = ["run", "context_id", "query", "temperature", "sample", "bits"]
    return found[columns].assign(positive=found["bits"] > median)


def reliability(turns: pd.DataFrame) -> Estimate:
    """Split-half reliability of a context's mean bits, less its query's mean.

    Samples of odd and of even number give two means of each context; their correlation over
    contexts, each less the mean of its query, is stepped up to all samples (Spearman 1910; Brown
    1910). It is 0 where they don't correlate positively.

    Args:
        turns: as :func:`read_bits` gives them.

    Returns:
        With a 95% interval over queries; NaN if the turns have no two halves.
    """
    half = turns["sample"] % 2
    per_query = turns.groupby(["query", "temperature", half])["bits"].transform("mean")
    centred = turns["bits"] - per_query
    means = centred.groupby([turns["query"], turns["context_id"], half]).mean().unstack().dropna()
    if means.shape != (len(means), 2) or means.empty:
        return Estimate(np.nan, np.nan, np.nan, turns["query"].nunique(), "no two halves")

    odd, even = means[1].to_numpy(), means[0].to_numpy()

    def stepped_up(counts: np.ndarray) -> np.ndarray:
        length = np.sqrt((counts @ odd**2) * (counts @ even**2))
        products = counts @ (odd * even)
        correlation = np.divide(products, length, out=np.zeros(len(counts)), where=length > 0)
        correlation = correlation.clip(min=0)
        return 2 * correlation / (1 + correlation)

    (found,) = cluster_bootstrap(stepped_up, means.index.get_level_values("query"))
    return found


def check_reliable(turns: pd.DataFrame) -> str:
    """A note with the reliability.

    Raises:
        UserError: it is below :data:`RELIABLE`, or can't be told.
    """
    found = reliability(turns)
    more = "sample more turns per context, or more responses per query"
    if np.isnan(found.value):
        raise UserError("the target reaction needs two samples per context", more)
    text = f"{found.text()} (split halves, over {found.sources} queries)"
    if found.value < RELIABLE:
        raise UserError(
            f"reliability {text} of the contexts' reaction bits is below {RELIABLE:g}: there is "
            "too little to predict",
            more,
        )
    return f"reliability of the contexts' mean bits, less their query's: {text}."
