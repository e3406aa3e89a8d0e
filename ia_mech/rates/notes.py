"""What has to be known to read the tables of the rates report."""

from collections import Counter

import numpy as np

from ia_mech.rates.corrected import MIN_ANNOTATED, MIN_ANNOTATED_SOURCES
from ia_mech.rates.pool import Judged
from ia_mech.rates.rows import Row
from ia_mech.rates.tables import POWER, comparisons
from ia_mech.stats import IMPOSSIBLE

FEW_SOURCES = 24  # benchmarks/coverage.md simulates so many sources and more
TESTS = {  # Paired.test
    "mover and sign flip": "the larger of that by sign flips of whole sources and of where MOVER's "
    "interval of two rates begins to leave out 0",
    "student and sign flip": "the larger of that by sign flips of whole sources and of Student's t",
    "sign flip": "sign flips of whole sources",
}


def notes_of(judged: Judged, rows: list[Row]) -> list[str]:
    """What has to be known to read the tables, each on a line."""
    notes = [
        f"Δ: mean over sources; {_tests(rows)}; detectable Δ: found with {POWER:.0%} power in one "
        "comparison, uncorrected. any of n: contexts with a genuine turn among n samples, unbiased "
        "over subsets (pass@k); (a/b): only a of b contexts have n samples that were assessed."
    ]
    if any(row.quantity == "cut_off" for row in rows):
        notes.append(
            "†: after a response that was cut off, which is a different stimulus; rates are of all "
            "turns unless the column says complete responses."
        )
    few = _few_sources(rows)
    if few:
        notes.append(
            f"fewer than {FEW_SOURCES} sources stand behind intervals of {', '.join(few)}: the "
            f"simulations (benchmarks/coverage.md) cover {FEW_SOURCES} and more, so take these as "
            "rough."
        )
    if judged.record.get("caveat"):
        notes.append(judged.record["caveat"])
    if any(row.method.startswith(IMPOSSIBLE) for row in rows):
        notes.append(
            "– under Rogan & Gladen: the judge says genuine less often there than it errs that way "
            "elsewhere, so the assumption fails and no rate fits."
        )
    for reason in _unlabelled(rows):
        notes.append(f"– under prediction-powered: {reason}, so its errors there are unknown.")
    if any(row.quantity == "rate_rogan_gladen" for row in rows):
        notes.append(
            "Rogan & Gladen assumes that the judge errs alike in all rows of a table, labelled or "
            f"not; the prediction-powered rate needs {MIN_ANNOTATED} annotated turns of "
            f"{MIN_ANNOTATED_SOURCES} sources in the very row, and labels of every run and stratum."
        )
    elif judged.annotator:
        notes.append(
            f"none of {judged.annotator}'s labels is of a turn that the judge assessed: no rate is "
            "corrected."
        )
    else:
        notes.append(
            "no annotations: a raw rate is only as good as the judge. To correct it: python -m "
            f"ia_mech.judge export {judged.runs[0].path}, fill the sheet in, then import it."
        )
    return notes + judged.notes


def _tests(rows: list[Row]) -> str:
    """Which tests gave the p values, and how they were corrected."""
    own, pooled = comparisons(rows)
    counts = Counter(row.test for row in rows if not np.isnan(row.p))
    if not counts:
        return "nothing could be tested"
    how = [TESTS.get(test, str(test)) for test in counts]
    if len(counts) > 1:
        how = [f"{text} ({count})" for text, count in zip(how, counts.values(), strict=True)]
    text = f"p: {', '.join(how)}, Holm-corrected over {own} comparison{'' if own == 1 else 's'}"
    return text + (f" and, as a family of its own, over the {pooled} of (all)" if pooled else "")


def _few_sources(rows: list[Row]) -> list[str]:
    """What rests on fewer sources than were simulated: datasets, and the judge's error rates."""
    few = [
        row
        for row in rows
        if row.sources < FEW_SOURCES
        # The table says of how many annotated turns a rate by labels alone is.
        and row.quantity not in ("follow_up_rate_bounds", "rate_annotated")
        and not (np.isnan(row.low) and np.isnan(row.p))
    ]
    names = (
        row.quantity.replace("_", " ") if row.quantity.startswith("judge_") else row.dataset
        for row in few
    )
    return list(dict.fromkeys(names))


def _unlabelled(rows: list[Row]) -> list[str]:
    """Why there are no prediction-powered rates where there are none."""
    found = (
        row.method.split(";")[0].removeprefix("undefined: ")
        for row in rows
        if row.quantity == "rate_prediction_powered"
        and np.isnan(row.value)
        and not row.method.startswith(IMPOSSIBLE)
    )
    return list(dict.fromkeys(found))
