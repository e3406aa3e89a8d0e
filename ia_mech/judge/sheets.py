"""Blind sheets: user turns for annotators to label, and the way back of their labels.

A sheet is a random sample of the run's rows (a row is one generated turn), stratified by a judge's
categories, or, of turns that go on from each likely first token, by the token's probability. A
fifth of its rows are decoys, whose labels only give the annotator's floor. The key, with each row's
inclusion probability, stays in the run. The sheet is written as a table (CSV) and as a page to
annotate in (:mod:`ia_mech.page`), which saves such a table; only tables are read back. A model
wrote the texts, so they aren't trusted: they are made inert
(:func:`ia_mech.untrusted.spreadsheet_safe`) and never read back.
"""

import argparse
import csv
import hashlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ia_mech.cli import one_line, program, shell_word
from ia_mech.errors import UserError
from ia_mech.judge.decoys import draw_decoys
from ia_mech.judge.judging import items_of
from ia_mech.judge.rubric import BUILT_IN, Rubric, heading, rubric_of
from ia_mech.judge.verdict import Item
from ia_mech.page import packed, rendered
from ia_mech.run import Run, integrity, layout
from ia_mech.run.labelled import FAILED
from ia_mech.run.labels import KEY, check_name, choose_judge
from ia_mech.untrusted import spreadsheet_safe, visible

PAGE_KEYS = "123456789abcfghijklmopqrstvwxyz"  # of categories on the page; "0" is the last one's
COLUMNS = ("item", "query", "response", "response_complete", "user_turn", "category", "note")
# Strata that are no category, beside ``failed``: of all turns without a judge, and of decoys.
ALL, DECOY = "all", "decoy"
USUAL = 200  # turns on a sheet
DECOY_SHARE = 0.25  # of the number of turns: a fifth of the sheet
LEAST_PER_STRATUM = 5  # rows of a stratum, where it has so many
# Inverse probabilities: between those of two neighbours lie the first tokens of a stratum.
BANDS = (2, 4, 8, 16, 32)

COLUMNS_READ = ("item", "category", "note")  # the last may be absent


class Sheet(NamedTuple):
    """A drawn sheet."""

    rows: list[dict[str, Any]]  # for annotators, in random order
    key: dict[str, Any]  # stays in the run: the judge, the strata, and which turn each item is


def export_sheet(
    run: Run, n: int | None, *, judge: str | None = None, seed: int = 0, name: str | None = None
) -> Sheet:
    """Draw a sheet; nothing is written.

    ``n`` rows (if not given, 200, or all) are drawn at random without replacement within strata. A
    quarter as many decoys are added, equally many of each kind that there is. Draws depend on the
    seed and the sheet's name: two sheets of a run are independent samples. The strata are the
    categories of the judge ``judge`` (by default that of
    :func:`ia_mech.run.labels.choose_judge`; without a judge all are one stratum), whose rubric is
    the sheet's. Of a run that goes on from each likely first token, they are :func:`bands`.

    Raises:
        UserError: an unfinished run; no such judge, or one has to be named; n that the run can't
            give.
    """
    run.check_finished()
    rows = run.turns
    if judge is None and run.labels.judges:
        judge = choose_judge([run], None)
    strata, worth = np.array([ALL] * len(rows)), None
    if run.settings["first_tokens"]:
        strata, worth = bands(run)
    elif judge is not None:
        labels = run.labelled(judge, texts=False)["category"]
        strata = labels.astype(object).fillna(FAILED).to_numpy()
    sizes = dict(sorted(Counter(strata[strata != ""].tolist()).items()))
    count = sum(sizes.values())
    n = min(USUAL, count) if n is None else n
    if not 1 <= n <= count:
        raise UserError(
            f"a sheet of {n} turns can't be made: {run.path} has {count} user turns",
            f"give --n from 1 to {count} ({count} takes them all)",
        )
    if n < len(sizes):
        raise UserError(
            f"--n {n} can't cover the {len(sizes)} strata of {run.path} ({', '.join(sizes)})",
            f"give --n {len(sizes)} or more; {LEAST_PER_STRATUM * len(sizes)} would be sensible",
        )
    identity = run.identity_digest
    name = check_name(name or "sheet-" + _hash(identity, judge, n, seed)[:8])
    rng = np.random.default_rng(int(_hash(identity, name, n, seed)[:16], 16))
    sampled = allocate(sizes, n, worth)
    chosen = {
        stratum: rng.choice(np.flatnonzero(strata == stratum), count, replace=False).tolist()
        for stratum, count in sampled.items()
    }
    decoys = draw_decoys(run, 1)
    kinds = [at for _, at in sorted(decoys.groupby("decoy").indices.items())]
    share = round(DECOY_SHARE * n) // max(len(kinds), 1)
    if kinds:
        decoys = decoys.iloc[np.concatenate([rng.permutation(at)[:share] for at in kinds])]
    items = items_of(run, decoys)
    keys = rows[list(KEY)].astype({"context_id": object}).to_dict("records")
    lines: list[tuple[Item, dict[str, Any]]] = []  # texts, place in the run
    for stratum, drawn in chosen.items():
        chance = sampled[stratum] / sizes[stratum]
        of = {"stratum": stratum, "inclusion_probability": chance}
        lines += [(items[row], keys[row] | of) for row in drawn]
    of = {"stratum": DECOY, "inclusion_probability": None}
    places_of_decoys = (place | of for place in decoys.to_dict("records"))
    lines += zip(items[len(rows) :], places_of_decoys, strict=True)
    unfinished = run.contexts.set_index("context_id")["response_unfinished"]
    sheet, places = [], {}
    for line in rng.permutation(len(lines)).tolist():
        text, place = lines[line]
        item = item_id(identity, name, place)
        places[item] = place
        complete = not unfinished[place.get("shown", place["context_id"])]
        row = item, text.query, text.response, complete, text.turn, "", ""
        sheet.append(dict(zip(COLUMNS, row, strict=True)))
    by, rubric = None, BUILT_IN
    if judge is not None:
        record = run.labels.record("judgements", judge)
        by = {"name": judge, "identity_hash": record.get("identity_hash")}
        rubric = rubric_of(record)
    key = {
        "run": identity,
        "sheet": name,
        "judge": by,
        "seed": seed,
        "n": n,
        "rubric": rubric.record(),
        "strata": {s: {"rows": sizes[s], "drawn": sampled[s]} for s in sizes},
        "items": places,
    }
    return Sheet(sheet, key)


def bands(run: Run) -> tuple[np.ndarray, dict[str, float]]:
    """The strata of a run's first tokens, by their probability, and how much each stratum holds.

    A likely first token counts more in a mass. Rows that are drawn by how much their stratum holds,
    within a factor of 2 by how much they hold themselves, make a corrected mass most precise, and
    unlikely ones are drawn, too. The greedy turn is in no stratum (an empty text): it stands there
    again, as the likeliest first token's.
    """
    p = np.exp(run.generations["logprob_tempered"].astype(float).to_numpy())
    names = [f"p >= 1/{BANDS[0]}"]
    names += [f"1/{low} <= p < 1/{high}" for high, low in pairwise(BANDS)]
    names += [f"p < 1/{BANDS[-1]}"]
    strata = np.array(names)[(p[:, None] < 1 / np.array(BANDS)).sum(1)]
    strata[(run.turns["temperature"] == 0).to_numpy()] = ""
    return strata, {name: float(p[strata == name].sum()) for name in names}


def allocate(
    sizes: dict[str, int], n: int, worth: Mapping[str, float] | None = None
) -> dict[str, int]:
    """How many rows to draw of each stratum; they sum to n, which covers all strata.

    At least :data:`LEAST_PER_STRATUM` of each (fewer if it has fewer or n is short), the rest by
    its ``worth``. That is the square root of its size, if not given: between proportional, which
    would leave rare categories out, and equal, which would give them most of the work. Rows are
    handed out one by one by Sainte-Laguë's method.
    """
    worth = worth or {name: math.sqrt(size) for name, size in sizes.items()}
    counts = {name: min(LEAST_PER_STRATUM, size, n // len(sizes)) for name, size in sizes.items()}
    for _ in range(n - sum(counts.values())):
        left = [name for name in sizes if counts[name] < sizes[name]]
        counts[max(left, key=lambda name: worth[name] / (2 * counts[name] + 1))] += 1
    return counts


def write_sheet(run: Run, sheet: Sheet, out: Path) -> tuple[Path, ...]:
    """Write a drawn sheet as ``<out>.csv`` and ``.html``; last its key, into the run.

    Raises:
        UserError: a sheet of that name or one of the files is there. Nothing is written then.
    """
    name = sheet.key["sheet"]
    if name in run.labels.sheets:
        raise UserError(f"{run.path} has a sheet named {name!r}", "give another --out and --seed")
    forms = {
        "csv": csv_bytes(pd.DataFrame(sheet.rows, columns=COLUMNS)),
        "html": _page(sheet).encode(),
    }
    contents = {out.with_name(f"{out.name}.{form}"): made for form, made in forms.items()}
    for path in contents:
        layout.check_output(path)
        if path.exists():
            raise UserError(f"{path} exists", "give another --out, or remove it")
    for path, content in contents.items():
        integrity.replace_file(path, partial(Path.write_bytes, data=content))
    run.labels.write_sheet(name, sheet.key)
    return tuple(contents)


def csv_bytes(table: pd.DataFrame) -> bytes:
    """A CSV file: UTF-8 with byte order mark, comma, everything quoted, every text inert."""
    cells = table.astype(object).map(
        lambda cell: "" if pd.isna(cell) else spreadsheet_safe(str(cell))
    )
    text = cells.to_csv(index=False, quoting=csv.QUOTE_ALL, lineterminator="\r\n")
    return text.encode("utf-8-sig")


def _page(sheet: Sheet) -> str:
    """The page to annotate in: the same texts, and nothing else of the run or the sheet's key."""
    shown = ("item", "query", "response", "response_complete", "user_turn")
    rows = [
        {name: visible(row[name]) if isinstance(row[name], str) else row[name] for name in shown}
        for row in sheet.rows
    ]
    rubric = rubric_of(sheet.key)
    keys = [*PAGE_KEYS[: len(rubric.names) - 1], "0"]
    choices = [
        {
            "name": category.name,
            "shown": heading(category.name),
            "key": key,
            "short": category.definition.partition(".")[0] + ".",
        }
        for category, key in zip(rubric.categories, keys, strict=True)
    ]
    digest = _hash(*(row["item"] for row in rows))[:16]  # items are of one sheet of one run
    data = packed(
        {"sheet": sheet.key["sheet"], "digest": digest, "rows": rows, "categories": choices}
    )
    return rendered(
        "annotate",
        data,
        title="Annotate user turns",
        rubric=rubric.categories,
        heading=heading,
        order=rubric.order,
    )


def item_id(run: str, sheet: str, place: dict[str, Any]) -> str:
    """Names a row of one sheet of one run; ``place`` is that of the key.

    The letter in front keeps spreadsheets from reading 12 digits, or 1234567e8901, as a number.
    """
    context, temperature, *numbers = (place[column] for column in KEY)
    shown = str(place.get("shown", context))
    turn = str(context), float(temperature), *map(int, numbers)
    return "t" + _hash(run, sheet, *turn, shown)[:12]


def _hash(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# -- reading a filled-in sheet -----------------------------------------------------------------


def import_sheet(run: Run, file: Path, annotator: str, *, replace: bool = False) -> Path:
    """Check a filled-in table row by row and write ``annotations/<annotator>.parquet``.

    Rows without a category are left out. If some are, what was filled in counts as the sample: as
    the sheet is in random order, its first rows are a random part of each stratum, and inclusion
    probabilities become rows filled in / rows of the stratum. (A turn that can't be assessed is a
    ``cannot_assess``, not a gap.) An item that stands there twice with one category counts once.

    Raises:
        UserError: whatever is wrong, naming the first bad row; labels of this annotator are there
            and ``replace`` isn't given. Nothing is written then.
    """
    run.labels.check_name("annotations", annotator)
    if annotator in run.labels.annotators and not replace:
        raise UserError(
            f"{run.path} has labels by an annotator named {annotator!r}",
            "give another --annotator, or --replace",
        )
    rows = read_sheet(file)
    key = _key_of(run, file, rows)
    places, strata, rubric = key["items"], key["strata"], rubric_of(key)
    labelled = _labelled(file, rows, places, rubric)
    filled = Counter(places[item]["stratum"] for item in labelled["item"])
    chances = {name: filled[name] / of["rows"] for name, of in strata.items()}
    stored = [
        places[row.item]
        | {
            "category": row.category,
            "follow_up": rubric.follow_up(row.category),
            "note": row.note,
            "sheet": key["sheet"],
            "inclusion_probability": chances.get(places[row.item]["stratum"]),
        }
        for row in labelled.itertuples()
    ]
    record = {
        "annotator": annotator,
        **{name: key[name] for name in ("sheet", "judge", "rubric")},
        "strata": {s: v | {"filled": filled[s]} for s, v in strata.items()},
    }
    return run.labels.write_annotations(annotator, stored, record)


def read_sheet(path: Path) -> pd.DataFrame:
    """:data:`COLUMNS_READ` of a filled-in table, by the number of the row in the file.

    Spreadsheets in languages with a decimal comma separate cells by semicolons.

    Raises:
        UserError: it isn't CSV in UTF-8, or a column is missing.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        separator = max(",;\t", key=text.partition("\n")[0].count)
        table = pd.read_csv(io.StringIO(text), sep=separator, dtype=str, keep_default_na=False)
    except ValueError as error:  # pandas' own and UnicodeDecodeError are subclasses
        raise UserError(
            f"{path} isn't CSV in UTF-8 ({one_line(str(error), 100)})",
            "save it as CSV UTF-8, or annotate in the page",
        ) from None
    if absent := [column for column in ("item", "category") if column not in table]:
        raise UserError(
            f"{path} has no column {absent[0]!r}", f"keep the columns {', '.join(COLUMNS_READ)}"
        )
    cells = table.reindex(columns=list(COLUMNS_READ)).fillna("").map(str.strip)
    return cells.set_axis(pd.RangeIndex(2, len(cells) + 2))


def _key_of(run: Run, file: Path, rows: pd.DataFrame) -> dict[str, Any]:
    """The key of the sheet that a table is of."""
    sheets = run.labels.sheets
    for key in map(run.labels.sheet, sheets):
        if rows["item"].isin(list(key["items"])).any():
            return key
    raise UserError(
        f"{file} holds annotations of another run: none of its {rows['item'].nunique()} items is "
        f"on a sheet of {run.path} ({', '.join(sheets) or 'there is no sheet'})",
        "give the run that the sheet was exported from",
    )


def _labelled(
    file: Path, rows: pd.DataFrame, places: dict[str, Any], rubric: Rubric
) -> pd.DataFrame:
    """The rows with a category, each item once; UserError names the first that can't be, and says
    how many there are."""

    def refuse(bad: pd.Series, problem: str, remedy: str) -> None:
        if bad.any():
            row, others = bad.idxmax(), bad.sum() - 1
            words = problem.format(**rows.loc[row].map(lambda text: repr(text[:60])))
            more = f" (and {others} rows more)" if others else ""
            raise UserError(f"row {row} of {file} {words}{more}", remedy)

    remedy = "keep the items of the exported sheet, a table of each sheet"
    refuse(~rows["item"].isin(list(places)), "has the item {item}", remedy)
    filled = rows[rows["category"] != ""]
    if filled.empty:
        raise UserError(f"no row of {file} has a category", "fill in the column 'category'")
    named = filled["category"].map(rubric.named)
    known = f"choose from {', '.join(rubric.names)}"
    refuse(named.isna(), "has the unknown category {category}", known)
    first = named.groupby(filled["item"]).transform("first")
    refuse(named != first, "calls {item} {category}, unlike a row before it", "keep one of the two")
    return filled.assign(category=named).drop_duplicates("item")


# -- from the command line ---------------------------------------------------------------------


def export_command(args: argparse.Namespace) -> None:
    """``ia-mech annotate export``."""
    run = Run.open(args.run)
    out, name = args.out, None
    if out is not None:
        out = out.with_name(re.sub(r"\.(csv|html)$", "", out.name))
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", out.name).lstrip("._-") or None
    sheet = export_sheet(run, args.n, judge=args.judge, seed=args.seed, name=name)
    # Not the run's name: it holds the model's and the dataset's.
    out = out or run.path.resolve().parent / sheet.key["sheet"]
    files = write_sheet(run, sheet, out)
    key, judge = sheet.key, sheet.key["judge"]
    how = f"by categories of {judge['name']}" if judge else "in one stratum, as no judge judged it"
    if run.settings["first_tokens"]:
        how = "by the probability of their first token"
    rows = sum(stratum["rows"] for stratum in key["strata"].values())
    print(f"{key['n']} of {rows} turns, {how}:")
    for stratum, count in key["strata"].items():
        print(f"  {heading(stratum):<24}{count['drawn']:>5} of {count['rows']:>6}")
    if decoys := len(key["items"]) - key["n"]:
        print(f"  and {decoys} turns after wrong conversations, to check the annotator")
    for file in files:
        print(f"sheet: {file}")
    print("open the .html, which needs no network, and import the table that it saves; or fill in")
    print(f"this table's category (and note), explained by: {program()} judge rubric")
    print("cells that begin with = + - @ have an apostrophe before: spreadsheets would run them")
    words = f"{shell_word(args.run)} {shell_word(files[0])}"
    print(f"next: {program()} annotate import {words} --annotator NAME")


def import_command(args: argparse.Namespace) -> None:
    """``ia-mech annotate import``."""
    run = Run.open(args.run)
    path = import_sheet(run, args.file, args.annotator, replace=args.replace)
    labels = Counter(run.labels.annotations(args.annotator)["category"])
    decoys = len(run.labels.decoys(args.annotator, "annotations"))
    strata = run.labels.record("annotations", args.annotator)["strata"]
    labelled, rows = labels.total(), sum(stratum["drawn"] for stratum in strata.values())
    listed = ", ".join(f"{heading(name)} {labels[name]}" for name in sorted(labels))
    print(f"{labelled} of {rows} turns labelled by {one_line(args.annotator)}: {listed}")
    if decoys:
        print(
            f"and {decoys} turns after wrong conversations; judge agreement shows how many of "
            "them are called follow-ups"
        )
    if labelled < rows:
        print(
            "turns without a category are left out: the others count as a random part of a stratum"
        )
    if unseen := [name for name, stratum in strata.items() if not stratum["filled"]]:
        names = ", ".join(map(heading, unseen))
        print(f"no label is of the strata {names}: no figure covers such turns")
    print(f"labels: {path}")
    print(f"next: {program()} judge agreement {shell_word(args.run)}")
