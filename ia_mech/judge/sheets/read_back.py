"""Read a filled-in sheet back: every row is checked before anything is written."""

import difflib
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ia_mech.errors import UserError
from ia_mech.judge.label import items_of
from ia_mech.judge.rubric import NAMES
from ia_mech.judge.sheets.draw import item_id, run_identity
from ia_mech.judge.sheets.files import SheetRow, read_sheet
from ia_mech.judge.verdict import Verdict
from ia_mech.run import Run
from ia_mech.run.labels import KEY, check_name


@dataclass(frozen=True)
class Imported:
    """What came of a filled-in sheet.

    Attributes:
        path: the file in the run.
        sheet: the sheet's name.
        labels: rows per category.
        drawn: rows of the sheet.
        unseen: strata of which nothing is labelled, so that nothing can be said of them.
    """

    path: Path
    sheet: str
    labels: Counter[str]
    drawn: int
    unseen: list[str]


def import_sheet(run: Run, file: Path, annotator: str, *, replace: bool = False) -> Imported:
    """Check a filled-in sheet row by row and write ``annotations/<annotator>.parquet``.

    Rows without a category are left out. If some are, what was filled in counts as the sample: as
    the sheet is in random order, its first rows are a random part of each stratum, and inclusion
    probabilities become rows filled in / rows of the stratum. (A turn that can't be assessed is a
    ``cannot_assess``, not a gap.) An item that stands there twice with one category counts once.

    Raises:
        UserError: whatever is wrong, naming the first bad row and how many more there are; labels
            of this annotator are there and ``replace`` isn't given. Nothing is written then.
    """
    check_name(annotator)
    if annotator in run.labels.annotators and not replace:
        raise UserError(
            f"{run.path} has labels of an annotator named {annotator!r}",
            "give another --annotator, or --replace",
        )
    rows = read_sheet(file)
    sheet, key = _sheet_of(run, file, rows)
    labelled, bad = _checked(rows, key["items"])
    if bad:
        more = f" (and {len(bad) - 1} more bad rows)" if len(bad) > 1 else ""
        raise UserError(f"{bad[0][0]}{more}", bad[0][1])
    if not labelled:
        raise UserError(f"no row of {file} has a category", "fill in the column 'category'")
    _check_texts(run, sheet, key, labelled)

    filled = Counter(key["items"][item]["stratum"] for item in labelled)
    stored = []
    for item, row in labelled.items():
        place = key["items"][item]
        stored.append(
            {column: place[column] for column in KEY}
            | {
                "category": row.category,
                "genuine": Verdict(row.category).genuine,
                "note": row.note,
                "sheet": sheet,
                "stratum": place["stratum"],
                "inclusion_probability": filled[place["stratum"]]
                / key["strata"][place["stratum"]]["rows"],
            }
        )
    record = {
        "annotator": annotator,
        "sheet": sheet,
        "judge": key["judge"],
        "rubric": key["rubric"],
        "strata": {s: v | {"filled": filled[s]} for s, v in key["strata"].items()},
    }
    path = run.labels.write_annotations(annotator, stored, record)
    labels = Counter(row.category for row in labelled.values())
    unseen = [stratum for stratum in key["strata"] if not filled[stratum]]
    return Imported(path, sheet, labels, len(key["items"]), unseen)


def _sheet_of(run: Run, file: Path, rows: list[SheetRow]) -> tuple[str, dict[str, Any]]:
    """The sheet that a file's items belong to, and its key."""
    if not rows:
        raise UserError(f"{file} has no rows", "give the sheet that was filled in")
    sheets = {name: run.labels.sheet(name) for name in run.labels.sheets}
    items = {row.item for row in rows}
    found = [name for name in sheets if items & sheets[name]["items"].keys()]
    if not found:
        raise UserError(
            f"{file} holds annotations of another run: none of its {len(items)} items is on a "
            f"sheet of {run.path} ({', '.join(sheets) or 'there is no sheet'})",
            "give the run that the sheet was exported from",
        )
    if len(found) > 1:
        raise UserError(
            f"{file} mixes the sheets {' and '.join(found)}, which are samples of their own",
            "import one file per sheet, each as an annotator of its own (anna-1, anna-2)",
        )
    return found[0], sheets[found[0]]


def _checked(
    rows: list[SheetRow], known: dict[str, Any]
) -> tuple[dict[str, SheetRow], list[tuple[str, str]]]:
    """Rows with a category by item, and (problem, remedy) of every bad row."""
    labelled: dict[str, SheetRow] = {}
    bad = []
    for row in rows:
        category = re.sub(r"[\s_-]+", "_", row.category.lower())
        before = labelled.get(row.item)
        if row.item not in known:
            item = f"the item {row.item!r}" if row.item else "no item"
            bad.append((f"{row.where} has {item}", "keep the items of the exported sheet"))
        elif not category:
            continue
        elif category not in NAMES:
            near = [name for name in NAMES if name.startswith(category)]
            near += difflib.get_close_matches(category, NAMES, 1, 0.5)
            remedy = f"did you mean {near[0]}?" if near else f"choose from {', '.join(NAMES)}"
            bad.append((f"{row.where} has the unknown category {row.category[:60]!r}", remedy))
        elif before is not None and before.category != category:
            problem = f"{row.where} calls {row.item} {category}, and {before.where} "
            bad.append((problem + before.category, "keep one of the two"))
        elif before is None:
            labelled[row.item] = SheetRow(row.where, row.item, category, row.note)
    return labelled, bad


def _check_texts(run: Run, sheet: str, key: dict[str, Any], labelled: dict[str, SheetRow]) -> None:
    """Raise UserError unless the run still holds the very turns that were labelled."""
    keys = run.generations[list(KEY)].itertuples(index=False, name=None)
    items, identity = dict(zip(keys, items_of(run), strict=True)), run_identity(run)
    for item in labelled:
        place = tuple(key["items"][item][column] for column in KEY)
        if place not in items or item_id(identity, sheet, place, items[place]) != item:
            raise UserError(
                f"{run.path} was changed after sheet {sheet!r} was exported: it has another turn "
                f"in the place of {item}",
                "export and annotate a new sheet",
            )
