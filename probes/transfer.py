"""``python -m probes.transfer``: do probes transfer between runs or datasets? A matrix of scores.

What needs torch or pandas is imported late, so that ``--help`` and a mistyped flag answer at once.
"""

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

from ia_mech.cli import Parser, guarded, one_line, path_of, tolerant_streams
from ia_mech.errors import UserError
from probes.train import add_statistics, add_subject, chosen, settings_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from probes.analysis import Settings
    from probes.cross_evaluate import Entry, Unit
    from probes.dataset import ProbeSet

STAR = 0.05  # Holm-adjusted p values below it are marked

DESCRIPTION = """\
Train probes on one run and test them on another. Rows of the matrix are what a probe was trained
on, columns what it was tested on; "all others" is trained on every unit but the one tested. Units
are the runs or, of a single run, its datasets. Runs must be of models with equal hidden size and
number of blocks. No language model is loaded. docs/probes.md explains the method.
"""

EPILOG = """\
examples:
  python -m probes.transfer cache/RUN-A cache/RUN-B cache/RUN-C
  python -m probes.transfer cache/RUN --layers 10-20 --positions header_last
  python -m probes.transfer cache/RUN-A cache/RUN-B --by dataset --out transfer.parquet
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog="python -m probes.transfer",
        usage="%(prog)s RUN [RUN ...] [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add_subject(parser)
    parser.add_argument(
        "--by",
        choices=("run", "dataset"),
        metavar="WHAT",
        help="units: run or dataset (default: run if several are given)",
    )
    add_statistics(parser)
    parser.add_argument(
        "--out", type=path_of, metavar="FILE.parquet", help="write every entry here, one per row"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return guarded(lambda: _transfer(args), lambda: "nothing was written")


def _transfer(args: argparse.Namespace) -> None:
    if args.out is not None:
        from ia_mech.run.layout import check_output

        check_output(args.out, "parquet")

    from ia_mech.display import Bar, console
    from probes import dataset
    from probes.cross_evaluate import cross_evaluate

    settings = settings_of(args)
    data = dataset.read(
        args.runs,
        args.judge,
        args.target,
        *chosen(args),
        args.within,
        reaction=args.reaction,
    )
    by = args.by or ("run" if len(data.runs) > 1 else "dataset")
    units = units_of(data, by)
    entries, notes = cross_evaluate(data, data.outcome, units, settings, Bar())
    about = {
        "runs": [run.name for run in data.runs],
        "by": by,
        "labels": data.labelled_by,
        "target": data.target.name,
        "estimator": settings.estimator,
        "permutations": settings.permutations,
        "level": settings.level,
        "resamples": settings.resamples,
        "seed": settings.seed,
        "notes": data.notes + notes,
    }
    _print(console(), _table(entries, units, about), _explained(entries, data, about, settings))
    if args.out is not None:
        from pandas import DataFrame

        from ia_mech.estimates import write_parquet

        write_parquet(DataFrame([_record(entry) for entry in entries]), args.out, about)
        print(f"wrote {args.out}", file=sys.stderr)


def units_of(data: "ProbeSet", by: str) -> list["Unit"]:
    """The runs, named by their folders (by their paths where two are alike), or the datasets.

    Raises:
        UserError: there is only one with an outcome.
    """
    import numpy as np

    from probes.cross_evaluate import Unit

    of = data.contexts["dataset" if by == "dataset" else "run"]
    names = {str(name): str(name) for name in of.unique()}
    if by == "run":
        folders = [run.name for run in data.runs]
        for number, folder in enumerate(folders):
            alone = folders.count(folder) == 1
            names[str(number)] = folder if alone else f"{folder} ({number + 1})"
    values = of.astype(str)
    found = [Unit(names[value], np.flatnonzero(values == value)) for value in values.unique()]
    if len(found) < 2:
        raise UserError(
            f"there is one {by} with an outcome, {found[0].name}: nothing to carry over to",
            "give several runs" if by == "run" else "give several runs, or one of several datasets",
        )
    return found


# -- at the terminal ------------------------------------------------------------------------------


def _table(entries: list["Entry"], units: list["Unit"], about: dict[str, Any]) -> "Table":
    """Rows trained on, columns tested on; what the probe of a row reads is named once."""
    from rich.markup import escape
    from rich.table import Table

    what = f"AUROC · target {about['target']} · {about['estimator']} · {about['labels']}"
    title = f"[bold]{escape(what)}[/] ({about['level'] * 100:g}% intervals over sources tested)"
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


def _explained(
    entries: list["Entry"], data: "ProbeSet", about: dict[str, Any], settings: "Settings"
) -> list[str]:
    """What an entry means, and what else a reader has to know."""
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
    if any(len(entry.picked) > 1 for entry in entries):
        lines.append(
            f"Entries with (n of {settings.folds}): training and test share sources, so "
            f"{settings.folds} probes were cross-fitted by folds of whole sources; n of them chose "
            "that layer and position. There the tested labels are permuted with those trained on."
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


def _print(screen: "Console", table: "Table", lines: list[str]) -> None:
    from rich.markup import escape
    from rich.measure import Measurement

    wide = screen.options.update(width=1000)
    screen.width = max(screen.width, Measurement.get(screen, wide, table).maximum)
    screen.print(table)
    for line in lines:
        screen.print(escape(line), soft_wrap=True)


# -- the file -------------------------------------------------------------------------------------


def _record(entry: "Entry") -> dict[str, Any]:
    """One row of the Parquet file."""
    record: dict[str, Any] = {"trained": entry.trained, "tested": entry.tested}
    for name, estimate in (("auroc", entry.auroc), ("spearman", entry.spearman)):
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


if __name__ == "__main__":
    sys.exit(main())
