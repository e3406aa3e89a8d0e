"""Draw a blind sheet from a run's user turns, and keep its key in the run.

A sheet is a stratified random sample of the run's rows (a row is one generated turn; turns that
happen to be worded alike are rows of their own). Strata are a judge's categories, so that rare ones
are seen; the key keeps each row's inclusion probability, by whose inverse every figure is weighted.
The sheet itself shows text alone.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ia_mech.errors import UserError
from ia_mech.judge.label import check_finished, items_of
from ia_mech.judge.rubric import VERSION, rubric_hash
from ia_mech.judge.sheets.files import NewFiles, csv_bytes, jsonl_bytes
from ia_mech.judge.verdict import JUDGED, Item
from ia_mech.run import Run
from ia_mech.run.labels import KEY, check_name

COLUMNS = ("item", "query", "response", "response_complete", "user_turn", "category", "note")
ALL, FAILED = "all", "failed"  # strata that are no category: without a judge; no verdict
LEAST = 5  # rows of a stratum, where it has so many


@dataclass(frozen=True)
class Sheet:
    """A drawn sheet: ``rows`` for people, in random order, and ``key`` to stay in the run.

    The key names the run and the judge, ``strata`` (rows there are, rows drawn) and, per item, the
    row of the run, its stratum and its inclusion probability.
    """

    rows: list[dict[str, Any]]
    key: dict[str, Any]


def allocate(sizes: dict[str, int], n: int) -> dict[str, int]:
    """How many rows to draw of each stratum; they sum to n.

    At least :data:`LEAST` of each (fewer if it has fewer or n is short), the rest by the square
    root of its size: between proportional, which would leave rare categories out, and equal, which
    would give them most of the work. Seats go one by one as Sainte-Laguë's method does.

    Args:
        sizes: rows per stratum.
        n: rows to draw, from the number of strata to the number of rows.
    """
    drawn = {name: min(LEAST, size, n // len(sizes)) for name, size in sizes.items()}
    for _ in range(n - sum(drawn.values())):
        open_ = [name for name in sizes if drawn[name] < sizes[name]]
        drawn[max(open_, key=lambda name: math.sqrt(sizes[name]) / (2 * drawn[name] + 1))] += 1
    return drawn


def export_sheet(
    run: Run, n: int, *, by: str | None = None, seed: int = 0, name: str | None = None
) -> Sheet:
    """Draw a sheet; nothing is written.

    Within a stratum rows are drawn at random without replacement, all alike. Draws depend on the
    seed and on the sheet's name, so that two sheets of a run are independent samples.

    Args:
        run: a finished run.
        n: how many rows.
        by: the judge whose categories (of its first repeat) are the strata. By default the only
            judge there is, or ``rules``; with no judge in the run there is one stratum, ``all``.
        seed: of the draws and of the order.
        name: the sheet's name in the run; by default one that tells nothing.

    Raises:
        UserError: an unfinished run; no such judge, or several and none was named; n that the run
            can't give.
    """
    check_finished(run)
    by = _judge(run, by)
    rows = run.generations
    if not 1 <= n <= len(rows):
        raise UserError(
            f"a sheet of {n} rows can't be drawn: {run.path} has {len(rows)} user turns",
            f"give --n from 1 to {len(rows)} ({len(rows)} takes them all)",
        )
    strata = [ALL] * len(rows) if by is None else _strata(run, by)
    sizes = {stratum: strata.count(stratum) for stratum in sorted(set(strata))}
    if n < len(sizes):
        raise UserError(
            f"--n {n} can't cover the {len(sizes)} strata by judge {by!r} ({', '.join(sizes)})",
            f"give --n {len(sizes)} or more; {LEAST * len(sizes)} would be sensible",
        )
    identity = run_identity(run)
    name = check_name(name or "sheet-" + _hash(identity, by, n, seed)[:8])
    rng = np.random.default_rng(int(_hash(identity, name, n, seed)[:16], 16))
    drawn = allocate(sizes, n)
    positions = np.array(strata)
    chosen = [
        rng.choice(np.flatnonzero(positions == stratum), count, replace=False)
        for stratum, count in drawn.items()
    ]
    order = rng.permutation(np.concatenate(chosen)).tolist()

    items = items_of(run)
    cut_off = run.contexts.set_index("context_id")["response_cut_off"]
    keys = list(rows[list(KEY)].itertuples(index=False, name=None))
    sheet, known = [], {}
    for row in order:
        item = item_id(identity, name, keys[row], items[row])
        stratum = strata[row]
        known[item] = dict(zip(KEY, keys[row], strict=True)) | {
            "stratum": stratum,
            "inclusion_probability": drawn[stratum] / sizes[stratum],
        }
        sheet.append(
            {
                "item": item,
                "query": items[row].query,
                "response": items[row].response,
                "response_complete": not cut_off[keys[row][0]],
                "user_turn": items[row].turn,
                "category": "",
                "note": "",
            }
        )
    judge = None
    if by is not None:
        record = run.labels.record("judgements", by)
        judge = {"name": by, "identity_hash": record.get("identity_hash")}
    key = {
        "run": identity,
        "sheet": name,
        "judge": judge,
        "seed": seed,
        "n": n,
        "rubric": {"version": VERSION, "hash": rubric_hash()},
        "strata": {s: {"rows": sizes[s], "drawn": drawn[s]} for s in sizes},
        "items": known,
    }
    return Sheet(sheet, key)


def write_sheet(run: Run, sheet: Sheet, out: Path) -> tuple[Path, Path]:
    """Write a drawn sheet as ``<out>.csv`` and ``<out>.jsonl``, and its key into the run.

    Raises:
        UserError: a sheet of that name or one of the files is there. Nothing is written then.
    """
    name = sheet.key["sheet"]
    if name in run.labels.sheets:
        raise UserError(
            f"{run.path} has a sheet named {name!r}", "give another --name, or another --seed"
        )
    files = tuple(out.with_name(out.name + suffix) for suffix in (".csv", ".jsonl"))
    contents = (csv_bytes(COLUMNS, sheet.rows), jsonl_bytes(COLUMNS, sheet.rows))
    kept: Path | None = None
    try:
        with NewFiles(dict(zip(files, contents, strict=True))):
            kept = run.labels.write_sheet(name, sheet.key)
    except BaseException:
        if kept is not None:
            kept.unlink(missing_ok=True)
        raise
    return files


def run_identity(run: Run) -> str:
    """16 hex digits of what a run was asked for."""
    return _hash(run.record["identity"])[:16]


def _judge(run: Run, by: str | None) -> str | None:
    judges = run.labels.judges
    if by is not None or not judges:
        return by
    if len(judges) == 1:
        return judges[0]
    if "rules" in judges:
        return "rules"
    raise UserError(
        f"{run.path} has verdicts of several judges ({', '.join(judges)})",
        "say with --by which one to stratify by",
    )


def _strata(run: Run, by: str) -> list[str]:
    verdicts = run.labels.judgements(by)
    verdicts = verdicts[verdicts["repeat"] == 0]
    category = {
        key: category if status == JUDGED else FAILED
        for *key, category, status in verdicts[[*KEY, "category", "status"]].itertuples(index=False)
        for key in [tuple(key)]
    }
    keys = run.generations[list(KEY)].itertuples(index=False, name=None)
    return [category.get(key, FAILED) for key in keys]


def item_id(run: str, sheet: str, key: Sequence[Any], item: Item) -> str:
    """Names a row of one sheet of one run with these very texts.

    The letter in front keeps spreadsheets from reading 12 digits, or 1234567e8901, as a number.
    """
    context, temperature, sample = key
    texts = [item.query, item.response, item.turn]
    return "t" + _hash(run, sheet, str(context), float(temperature), int(sample), *texts)[:12]


def _hash(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
