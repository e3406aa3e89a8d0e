"""What results say of the turns of a run, such as which turns depend on their own response."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ia_mech.errors import UserError
from ia_mech.estimates import SHOWN, all_datasets
from ia_mech.judge.restated import restates
from ia_mech.models.embedded import cache_dir
from ia_mech.rates.fit import FITTED_WORDS
from ia_mech.results import folder_of, folders_of, read
from ia_mech.run import Run
from ia_mech.run.labelled import positions
from ia_mech.run.labels import BUILT_IN, KEY
from ia_mech.run.layout import RUN, UNPERTURBED
from ia_mech.run.sources import sources_of

# A follow-up that is likelier after its own response than after all siblings together.
DEPENDENT = "dependent"
FITS_ORIGINAL = "follow_up_to_original"  # also a follow-up to the response before it was changed
CHANGE, UNCHANGED = "change", "unchanged"  # how a turn's conversation was changed, in words


def dependent(frame: pd.DataFrame, runs: list[Run], run: Run) -> np.ndarray:
    """``[turns]`` of :data:`DEPENDENT`, from the first results that hold the evidence of turns.

    Let w be the likelihoods of a turn after the K responses to its query, scaled to add up to 1.
    The evidence is log₂ K wₖ, where k is the response that the turn followed. Only one response can
    have wₖ > ½. So a turn that depends on no response has it with a probability of 1 / K at most.
    """
    for folder in dict.fromkeys(at for one in (run, *runs) for at in result_folders(one)):
        table = table_of_run(folder, run, "turns", [*KEY, "evidence"])
        if table is None:
            continue
        table = table.drop(columns=["dataset", "source_id"], errors="ignore").merge(
            run.contexts[["context_id", "dataset", "source_id"]].astype(object), on="context_id"
        )
        responses = table.groupby(sources_of(table))["context_id"].transform("nunique")
        likelier = (table["evidence"] > np.log2(responses) - 1).where(table["evidence"].notna())
        table = table.assign(likelier=likelier.astype(float)).drop_duplicates(list(KEY))
        at = positions(table, frame.astype({"context_id": object}))
        favoured = np.where(at >= 0, table["likelier"].to_numpy()[at], np.nan)
        return favoured * frame["follow_up"].to_numpy()
    return np.full(len(frame), np.nan)


def result_folders(run: Run, more: Sequence[Path] = ()) -> list[Path]:
    """The folders with results on a run: in it, beside it or in the cache, and ``more``."""
    found = folders_of(run.path, run.identity_digest, [run.path.resolve().parent, cache_dir()])
    return list(dict.fromkeys([*found, *(folder.resolve() for folder in more)]))


def changed_runs(run: Run, folders: Sequence[Path]) -> list[tuple[Run, pd.DataFrame]]:
    """The runs that experiments sampled from changed conversations of a run, if they are on this
    machine, each with the table of its turns; ``folders`` are the run's results.

    Raises:
        UserError: a run or a table is damaged.
    """
    found = []
    for folder in folders:
        for place in (folder, run.path.resolve().with_name(f"{run.name}-{folder.name}")):
            for file in sorted(place.glob(f"*/run/{RUN}")):
                changed = Run(file.parent)
                table = table_of_run(folder, changed, "turns", [*KEY, CHANGE])
                if table is not None:
                    found.append((changed, table))
    return found


def without_response(run: Run, judge: str) -> str:
    """How many turns that were written without the response a judge calls follow-ups to it, and how
    much lower that rate is, in words: those of ``ia-mech perturbations --conditions remove``; empty
    without such results."""
    folder = folder_of(run.path, "perturbations")
    if not (folder / "turns.parquet").is_file():
        return ""
    result = read(folder)
    if result.about.get("judge") != judge or run.identity_digest not in result.about["identities"]:
        return ""
    turns = pd.read_parquet(folder / "turns.parquet")
    turns = turns[(turns["condition"] == "remove") & turns[FITS_ORIGINAL].notna()]
    counts = turns.groupby("temperature")[FITS_ORIGINAL].agg(["sum", "count"]).astype(int)
    if counts.empty:
        return ""
    rows = all_datasets(result.estimates).set_index(["quantity", "term", "temperature"])
    shown = rows["p_holm"] <= SHOWN
    each = list[str]()
    for t, yes, of in counts.itertuples():
        said = f"{yes} of {of} {f'sampled at T = {t:g}' if t else 'greedy ones'}"
        if (change := (f"follow-ups, minus {UNCHANGED}", "remove", t)) in shown:
            said += "" if shown[change] else " (not shown to be fewer)"
        each.append(said)
    return (
        "without the response, the model still writes turns that the judge calls follow-ups to it: "
        f"{' and '.join(each)}"
    )


def doubts(run: Run, judge: str) -> Iterator[str]:
    """What makes a judge's follow-ups doubtful that its control can't show: how many take most of
    their words from their query; and, of the built-in judge, that queries are shorter than those of
    its fit, since it takes paraphrases of short queries for follow-ups (its card)."""
    rows = run.labelled(judge)
    words = rows["query"].drop_duplicates().str.split().str.len().median()
    rows = rows[(rows["perturbation"] == UNPERTURBED) & (rows["follow_up"] == 1) & run.drawn(rows)]
    if close := sum(map(restates, rows["query"], rows["text"])):
        yield (
            f"{close} of the {len(rows)} follow-ups repeat{'s' * (close == 1)} mostly words of the "
            "query, and more may paraphrase it: the judge's control can't detect this."
        )
    if judge == BUILT_IN and words < FITTED_WORDS:
        yield (
            f"Half of the queries have at most {words:g} words. The built-in judge was fitted on "
            "longer ones: here it may take many turns that ignore the response for follow-ups."
        )


def table_of_run(folder: Path, run: Run, stem: str, columns: Sequence[str]) -> pd.DataFrame | None:
    """A run's rows in the table ``<stem>.parquet`` of a result; None if there is none with these
    columns, or the result isn't of the run.

    Raises:
        UserError: the table is damaged.
    """
    file = folder / f"{stem}.parquet"
    try:
        if not file.is_file() or not {*columns} <= set(pq.read_schema(file).names):
            return None
        about = json.loads(pq.read_schema(file).metadata[b"ia_mech"])
        if run.identity_digest not in about.get("identities", []):
            return None
        table = pq.read_table(file).to_pandas()
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{file} is damaged", "remove it, or analyse again") from None
    return table[table["run"] == run.name] if "run" in table else table
