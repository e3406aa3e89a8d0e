"""Do probes carry over from one run or dataset to another? A matrix of scores.

Usage::

    python -m probes.transfer cache/RUN-A cache/RUN-B
    python -m probes.transfer cache/RUN --by dataset --target latent

What needs torch or pandas is imported late, so that ``--help`` and a mistyped flag answer at once.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ia_mech.cli import Parser, guarded, one_line, tolerant_streams
from ia_mech.errors import UserError
from probes.options import add_statistics, add_subject, chosen

if TYPE_CHECKING:
    from rich.table import Table

    from probes.dataset import ProbeSet
    from probes.fit.cross_evaluate import Entry, Unit
    from probes.records import Settings

STAR = 0.05  # Holm-adjusted p values below it are marked

DESCRIPTION = """\
Ask whether linear probes carry over: train on one run, test on another. Rows of the matrix are what
a probe was trained on, columns what it was tested on; "all others" is trained on every unit but the
one tested. Units are the runs, or, of a single run, its datasets. No language model is loaded.

target     as in python -m probes.train; so are AUROC, estimators and the choice of layer and
           position, which is made on the training contexts alone, anew for every probe.
sources    no probe is tested on a source that it was trained on. Where training and test share
           sources (the diagonal, or the same prompts answered by two models), both are dealt into
           five folds of whole sources, and each is predicted by a probe of the other four.
interval   over the sources tested, given the trained probes: it doesn't say how far probes trained
           on other sources would differ.
p          how often probes of permuted labels get as far: labels of whole training sources change
           places, and choice and training are replayed, by the closed form (ridge). Where sources
           are shared, the tested labels move with them. Adjusted by Holm's method over the matrix.
too few    a unit is trained on with 20 sources that have a positive turn and 20 that have a
           negative one, and tested on with 10 of each.
"""

EPILOG = """\
examples:
  python -m probes.transfer cache/RUN-A cache/RUN-B cache/RUN-C
      from run to run, and from the other two to each
  python -m probes.transfer cache/RUN --layers 10-20 --positions header_last
      from dataset to dataset within one run
  python -m probes.transfer cache/RUN-A cache/RUN-B --by dataset --out transfer.parquet
      the datasets of both, with all figures in a file: one row per entry

Runs must be of models with equal hidden size and number of blocks.
Before: python -m ia_mech.judge run cache/RUN
Exit status: 0 done, 2 bad input (one line says what and what to do), 130 interrupted.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="python -m probes.transfer", description=DESCRIPTION, epilog=EPILOG)
    add_subject(parser)
    parser.add_argument(
        "--by",
        choices=("run", "dataset"),
        help="what a row and a column are (default: run if several are given, else dataset)",
    )
    add_statistics(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE.parquet", help="write every entry here, one per row"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return guarded(lambda: _transfer(args), lambda: "nothing was written")


def _transfer(args: argparse.Namespace) -> None:
    if args.out is not None:
        _check_file(args.out)

    from ia_mech.display import Bar, console
    from probes import dataset
    from probes.fit.cross_evaluate import carry
    from probes.records import Settings

    settings = Settings(
        estimator=args.estimator,
        permutations=args.permutations,
        level=args.level,
        resamples=args.resamples,
        seed=args.seed,
    )
    data = dataset.read(args.runs, args.judge, args.target, *chosen(args), args.within)
    by = args.by or ("run" if len(data.runs) > 1 else "dataset")
    units = units_of(data, by)
    entries, notes = carry(data, data.outcome, units, settings, Bar())
    about = {
        "runs": [str(run.path) for run in data.runs],
        "by": by,
        "judge": data.judge,
        "target": data.target.name,
        "estimator": settings.estimator,
        "permutations": settings.permutations,
        "level": settings.level,
        "resamples": settings.resamples,
        "seed": settings.seed,
        "notes": data.notes + notes,
    }
    screen = console()
    _print(screen, table_of(entries, units, _title(about)), _lines(entries, data, about, settings))
    if args.out is not None:
        write(args.out, entries, about)
        print(f"wrote {args.out}", file=sys.stderr)


def units_of(data: "ProbeSet", by: str) -> list["Unit"]:
    """The runs, named by their folders (by their paths where two are alike), or the datasets.

    Raises:
        UserError: there is only one with an outcome.
    """
    import numpy as np

    from probes.fit.cross_evaluate import Unit

    of = data.contexts["dataset" if by == "dataset" else "run"]
    names = {str(name): str(name) for name in of.unique()}
    if by == "run":
        folders = [run.path.resolve() for run in data.runs]
        for number, folder in enumerate(folders):
            alike = [other for other in folders if other.name == folder.name]
            names[str(number)] = folder.name if len(alike) == 1 else str(data.runs[number].path)
    values = of.astype(str)
    found = [Unit(names[value], np.flatnonzero(values == value)) for value in values.unique()]
    if len(found) < 2:
        raise UserError(
            f"there is one {by} with an outcome, {found[0].name}: nothing to carry over to",
            "give several runs" if by == "run" else "give several runs, or one of several datasets",
        )
    return found


# -- at the terminal ------------------------------------------------------------------------------


def table_of(entries: list["Entry"], units: list["Unit"], title: str) -> "Table":
    """Rows trained on, columns tested on; where a row's probe is one, its cell is named once."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="")
    tested = [unit.name for unit in units if any(e.tested == unit.name for e in entries)]
    table.add_column("trained on ↓ tested on →", no_wrap=True)
    table.add_column("layer, position", no_wrap=True)
    for name in tested:
        table.add_column(escape(one_line(name, 30)), justify="right", no_wrap=True)
    for trained in dict.fromkeys(entry.trained for entry in entries):
        row = {entry.tested: entry for entry in entries if entry.trained == trained}
        single = {entry.picked[0] for entry in row.values() if len(entry.picked) == 1}
        common = single.pop() if len(single) == 1 else None
        named = f"{common[0]} {common[1]}" if common else "its own in each"
        cells = [_cell(row[name], common) if name in row else "–" for name in tested]
        table.add_row(escape(one_line(trained, 30)), escape(named), *cells)
    return table


def _cell(entry: "Entry", common: tuple[int, str] | None) -> str:
    """``0.61 [0.55, 0.67]*``, and below it what was read if the row doesn't say so."""
    from rich.markup import escape

    text = escape(entry.auroc.text()) + ("*" if entry.p_holm < STAR else " ")
    layer, position = entry.usual
    if len(entry.picked) > 1:
        often = f"{entry.picked.count(entry.usual)} of {len(entry.picked)}"
        return f"{text}\n[dim]{layer} {escape(position)} ({often})[/] "
    return text if entry.usual == common else f"{text}\n[dim]{layer} {escape(position)}[/] "


def _title(about: dict[str, Any]) -> str:
    from rich.markup import escape

    what = f"AUROC · target {about['target']} · {about['estimator']} · judge {about['judge']}"
    return f"[bold]{escape(what)}[/] ({about['level'] * 100:g}% intervals over sources tested)"


def _lines(
    entries: list["Entry"], data: "ProbeSet", about: dict[str, Any], settings: "Settings"
) -> list[str]:
    """What an entry means, and what else a reader has to know."""
    crossed = any(len(entry.picked) > 1 for entry in entries)
    tests = sum(not math.isnan(entry.p) for entry in entries)
    lines = [
        f"target {data.target.name}: {data.target.describe()}",
        "An entry: how often the context of a random positive turn scores higher than that of a "
        f"random negative one of the same {data.within}, by the row's probe, among the column's "
        "contexts (0.5: chance). The interval is over the sources tested, given the trained "
        "probes.",
        "Layer, position and penalty were chosen by cross-validation within the training contexts.",
        f"*: p < {STAR:g} after Holm's method over {tests} entries, from {settings.permutations} "
        "permutations of the training labels (whole sources), choice and training replayed by "
        "ridge regression.",
    ]
    if crossed:
        lines.append(
            f"Entries with (n of {settings.folds}): training and test share sources, so "
            f"{settings.folds} probes were cross-fitted by folds of whole sources; n of them chose "
            "that cell. There the tested labels are permuted with those trained on."
        )
    if tests >= STAR * (settings.permutations + 1):
        enough = 100 * (int(tests / STAR) // 100 + 1)
        lines.append(
            f"{settings.permutations} permutations can't give a * among {tests} entries; give "
            f"--permutations {enough}."
        )
    mixed = (data.contexts.groupby("run")["dataset"].nunique() > 1).any()
    if mixed and data.within == about["by"] == "run":
        lines.append(
            "Some runs hold several datasets, whose contexts are compared with each other too: a "
            "probe that only tells datasets apart can score. --by dataset compares within them."
        )
    return lines + about["notes"]


def _print(screen, table: "Table", lines: list[str]) -> None:
    from rich.markup import escape
    from rich.measure import Measurement

    wide = screen.options.update(width=1000)
    screen.width = max(screen.width, Measurement.get(screen, wide, table).maximum)
    screen.print(table)
    for line in lines:
        screen.print(escape(line), soft_wrap=True)


# -- the file -------------------------------------------------------------------------------------


def write(path: Path, entries: list["Entry"], about: dict[str, Any]) -> None:
    """Replace a Parquet file whole: one row per entry, ``about`` in its metadata (``ia_mech``).

    Raises:
        OSError: it can't be written.
    """
    import pandas as pd

    from ia_mech.estimates import write_parquet

    write_parquet(pd.DataFrame([_record(entry) for entry in entries]), path, about)


def _record(entry: "Entry") -> dict[str, Any]:
    record: dict[str, Any] = {"trained": entry.trained, "tested": entry.tested}
    for name in ("auroc", "spearman"):
        estimate = getattr(entry, name)
        record |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    layer, position = entry.usual
    return record | {
        "p": entry.p,
        "p_holm": entry.p_holm,
        "layer": layer,
        "position": position,
        "picked_layers": [layer for layer, _ in entry.picked],
        "picked_positions": [position for _, position in entry.picked],
        "train_contexts": entry.train_contexts,
        "train_sources": entry.train_sources,
        "test_contexts": entry.test_contexts,
        "test_sources": entry.test_sources,
    }


def _check_file(path: Path) -> None:
    """Refuse what can't be written before anything is computed.

    Raises:
        UserError: a folder in its place, a folder that isn't there or is a run's.
    """
    from ia_mech.run.layout import refuse_inside_run

    if path.is_dir():
        raise UserError(f"--out {path} is a folder", "name a file in it")
    if path.suffix != ".parquet":
        raise UserError(f"--out {path}: Parquet is what is written", "name it FILE.parquet")
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: there is no folder {path.parent}", "make it first")
    refuse_inside_run(path)


if __name__ == "__main__":
    sys.exit(main())
