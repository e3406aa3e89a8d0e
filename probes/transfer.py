"""``python -m probes.transfer``: do probes transfer between runs or datasets? A matrix of scores.

What needs torch or pandas is imported late, so that ``--help`` and a mistyped flag answer at once.
"""

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ia_mech.cli import Parser, run_command, tolerant_streams
from ia_mech.errors import UserError
from probes.train import (
    add_result,
    add_statistics,
    add_subject,
    chosen_places,
    settings_of,
    write_and_show,
)

if TYPE_CHECKING:
    import numpy as np
    from pandas import DataFrame

    from ia_mech.results import Result, Table
    from probes.analysis import Settings
    from probes.cross_evaluate import Entry
    from probes.dataset import ProbeSet

STAR = 0.05  # Holm-adjusted p values below it are marked

DESCRIPTION = """\
Train probes on one run and test them on another. Rows of the matrix are what a probe was trained
on, columns what it was tested on. Units are the runs or, of a single run, its datasets. Runs must
be of models with equal hidden size and number of blocks. The result is kept in RUN/results/NAME of
the first run. No language model is loaded. docs/probes.md explains the method.
"""

EPILOG = """\
examples:
  python -m probes.transfer cache/RUN-A cache/RUN-B cache/RUN-C
  python -m probes.transfer cache/RUN --layers 10-20 --positions header_last
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
    add_statistics(parser)
    add_result(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    return run_command(lambda: _transfer(args), lambda: "nothing was written", args.threads)


def _transfer(args: argparse.Namespace) -> None:
    from ia_mech.display import Bar
    from probes import dataset, show
    from probes.cross_evaluate import cross_evaluate

    settings = settings_of(args)
    data = dataset.read(
        args.runs,
        args.judge,
        args.target,
        *chosen_places(args),
        args.within,
    )
    units = units_of(data)
    about = show.about("transfer", data, settings)
    folder = show.result_folder(about, args.runs[0], args.out, args.replace)
    entries, notes = cross_evaluate(data, data.outcome, units, settings, Bar())
    result = _result(entries, data, notes, settings, about, folder.name)
    write_and_show(result, folder, args.full)


def units_of(data: "ProbeSet") -> dict[str, "np.ndarray"]:
    """Name → rows of the runs or, of a single run, of its datasets. Runs are named by their
    folders, with their number where two are alike.

    Raises:
        UserError: there is only one with an outcome.
    """
    import numpy as np

    of = data.contexts["dataset"]
    if len(data.runs) > 1:
        folders = [run.name for run in data.runs]
        names = {
            number: folder if folders.count(folder) == 1 else f"{folder} ({number + 1})"
            for number, folder in enumerate(folders)
        }
        of = data.contexts["run"].map(names)
    units = {name: np.flatnonzero(of == name) for name in of.unique()}
    if len(units) < 2:
        raise UserError(
            f"there is one {_unit(data)} with an outcome, {next(iter(units))}: nothing to carry "
            "over to",
            "give several runs, or one of several datasets",
        )
    return units


def _unit(data: "ProbeSet") -> str:
    return "run" if len(data.runs) > 1 else "dataset"


# -- the result -----------------------------------------------------------------------------------


def _result(
    entries: list["Entry"],
    data: "ProbeSet",
    notes: list[str],
    settings: "Settings",
    about: dict[str, Any],
    name: str,
) -> "Result":
    from ia_mech.results import Result

    by = _unit(data)
    others = [entry for entry in entries if entry.trained != entry.tested]
    starred = sum(entry.p_holm < STAR for entry in others)
    best, least = (f(others, key=lambda entry: entry.auroc.value) for f in (max, min))
    return Result(
        name=name,
        question=f"Does a probe of {data.target.words}, trained on one {by}, work on another?",
        sentence=f"Of {len(others)} probes tested on another {by} than they were trained on, "
        f"{starred} read it above chance (p < {STAR:g} after Holm's method); their AUROC is "
        f"{least.auroc.text()} ({least.trained} → {least.tested}) to {best.auroc.text()} "
        f"({best.trained} → {best.tested}).",
        control="Layer, position and penalty were chosen by cross-validation within the training "
        f"contexts; p is from {settings.permutations} permutations of the training labels (whole "
        "sources), choice and training replayed by ridge regression. "
        f"Labels: {data.labelled_by}.",
        estimates=_estimates(entries),
        tables=[_table(entries, settings)],
        notes=[
            f"target {data.target.name}: {data.target.describe()}",
            *_explained(entries, data, settings),
            *data.notes,
            *notes,
        ],
        about=about,
    )


def _estimates(entries: list["Entry"]) -> "DataFrame":
    """One row per entry; ``layer`` and ``position`` are those that most of its probes read."""
    from ia_mech.estimates import TidyEstimate, frame_of

    names = dict.fromkeys(("trained", "tested", "position"), "string")
    counts = dict.fromkeys(("layer", "train_contexts", "train_sources"), "Int64")
    rows = []
    for entry in entries:
        layer, position = entry.most_chosen
        of: dict[str, Any] = {"trained": entry.trained, "tested": entry.tested, "layer": layer}
        of |= {"position": position, "train_sources": entry.train_sources}
        of["train_contexts"] = entry.train_contexts
        one = TidyEstimate("auroc", of, entry.test_contexts, entry.auroc, entry.p)
        rows.append(replace(one, p_holm=entry.p_holm))
    return frame_of(rows, names | counts)


def _table(entries: list["Entry"], settings: "Settings") -> "Table":
    """Rows trained on, columns tested on; what the probe of a row reads is named once."""
    from ia_mech.results import Table

    tested = list(dict.fromkeys(entry.tested for entry in entries))
    rows = []
    for trained in dict.fromkeys(entry.trained for entry in entries):
        row = {entry.tested: entry for entry in entries if entry.trained == trained}
        places = {place for entry in row.values() for place in entry.chosen}
        reads = "{} {}".format(*places.pop()) if len(places) == 1 else "its own in each"
        cells = [
            row[name].auroc.text() + ("*" if row[name].p_holm < STAR else " ") for name in tested
        ]
        rows.append([trained, reads, *cells])
    return Table(
        f"AUROC, trained on ↓ tested on → [{settings.level * 100:g}% intervals]",
        ["trained on", "layer, position", *tested],
        rows,
        f"* p < {STAR:g} after Holm's method over {len(entries)} entries",
    )


def _explained(entries: list["Entry"], data: "ProbeSet", settings: "Settings") -> list[str]:
    """What an entry means, and what else a reader has to know."""
    lines = [
        "An entry: how often the context of a random positive turn scores higher than that of a "
        f"random negative one of the same {data.within}, by the row's probe, among the column's "
        "contexts (0.5: chance). The interval is over the sources tested, given the trained "
        "probes.",
    ]
    if any(len(entry.chosen) > 1 for entry in entries):
        lines.append(
            f"Where training and test share sources, {settings.folds} probes were cross-fitted by "
            "folds of whole sources, and the tested labels are permuted with those trained on."
        )
    models = len({run.model["weights_hash"] for run in data.runs})
    if models > 1:
        lines.append(
            f"the runs are of {models} models: a direction in one need not mean the same in "
            "another."
        )
    if len(entries) >= STAR * (settings.permutations + 1):
        enough = 100 * (int(len(entries) / STAR) // 100 + 1)
        lines.append(
            f"{settings.permutations} permutations can't give a * among {len(entries)} entries; "
            f"give --permutations {enough}."
        )
    mixed = (data.contexts.groupby("run")["dataset"].nunique() > 1).any()
    if mixed and data.within == _unit(data) == "run":
        lines.append(
            "Some runs hold several datasets, whose contexts are compared with each other too: a "
            "probe that only tells datasets apart can score. --within dataset compares within them."
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
