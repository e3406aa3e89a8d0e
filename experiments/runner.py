"""The contract of an experiment, and the runner that all of them share.

An experiment is a folder ``experiments/NAME`` with

- ``read.py``: what comes in. From open runs to data frames; bad input is a ``UserError``.
- ``analyse.py``: the estimates, as :mod:`ia_mech.estimates` makes them.
- ``show.py``: the tables of the terminal (:mod:`experiments.tables`) and the figures.
- ``__main__.py``: an :class:`Experiment` with the command's help and flags, and a function that
  ties the three together and returns :class:`Results`. That function imports what needs pandas or
  torch itself, so that ``--help`` and a mistyped flag answer at once.
- ``docs/NAME.md`` (``_`` becomes ``-``): the method, and one analysis to read.

To add one, copy the shortest, ``experiments/likelihood``. The runner opens and checks the runs,
chooses the output folder, refuses to overwrite what isn't the experiment's, writes everything and
prints it.
"""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ia_mech.cli import (
    Parser,
    add_intervals,
    add_threads,
    guarded,
    one_line,
    path_of,
    tolerant_streams,
)
from ia_mech.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import Console

    from ia_mech.rates.gate import Gate
    from ia_mech.run import Run

ESTIMATES = "estimates.parquet"


@dataclass(frozen=True)
class Results:
    """What an experiment found.

    Attributes:
        runs: what it was made from.
        judge: whose verdicts were used, if any, and whether they pass their control.
        estimates: written as ``estimates.parquet``.
        show: prints the tables of the terminal.
        figures: stem of the file → figure, written as PNG, SVG and PDF.
        tables: stem of the file → further table, written as Parquet.
        notes: what a reader has to know, a line each.
        sentence: what was found, in words, with its interval. Empty: no such estimate was made.
        control: what that is held against, and how it came out; the judge's floor if not given.
    """

    runs: "list[Run]"
    judge: "Gate | None"
    estimates: "pd.DataFrame"
    show: "Callable[[Console], None]"
    figures: "Mapping[str, Figure]"
    tables: "Mapping[str, pd.DataFrame]" = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    sentence: str = ""
    control: str = ""


@dataclass(frozen=True)
class Experiment:
    """A declared experiment; its method :meth:`main` is the command.

    Attributes:
        name: of its folder.
        description: what it answers, for ``--help``. Its first sentence is the question, which is
            the title of the results.
        written: the files it writes, for ``--help``.
        run: takes the arguments, the open runs and the output folder (not made yet); returns the
            results, or None if there is nothing to write.
        add_flags: adds the experiment's own flags.
        several_models: runs of several models may be given together.
        perturbed: runs that hold perturbed contexts may be given.
        judged: verdicts are used, so a judge can be chosen.
        drawn: what ``--seed`` is the seed of.
        beside: results go to ``cache/<first run>-<this>``, not to ``experiments/NAME`` in the first
            run: they hold runs, which can't lie in a run.
        kept: what an interrupted command leaves.
        page: in ``docs/``, of the method, if it isn't ``NAME.md``.
    """

    name: str
    description: str
    written: str
    run: "Callable[[argparse.Namespace, list[Run], Path], Results | None]"
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    several_models: bool = False
    perturbed: bool = False
    judged: bool = True
    drawn: str = "resampling"
    beside: str = ""
    kept: str = "files that were written are whole"
    page: str = ""

    def build_parser(self) -> argparse.ArgumentParser:
        """The command line."""
        parser = Parser(
            prog=f"python -m experiments.{self.name}",
            usage="%(prog)s RUN [RUN …] [options]",
            description=self.description,
            epilog=f"Method: docs/{self.page or f'{self.name}.md'.replace('_', '-')}. "
            "Intervals are over sources.\n"
            + fill(f"Written: {ESTIMATES} (every number, one per row), {self.written}.", 100),
        )
        parser.add_argument("runs", nargs="+", type=path_of, metavar="RUN", help="a run's folder")
        if self.judged:
            judge = "whose verdicts (default: the only judge)"
            parser.add_argument("--judge", metavar="NAME", help=judge)
        self.add_flags(parser)
        usual = f"experiments/{self.name} in the first run"
        if self.beside:
            usual = f"cache/<first run>-{self.beside}"
        where = f"where results go (default: {usual})"
        parser.add_argument("--out", type=path_of, metavar="FOLDER", help=where)
        add_threads(parser)
        add_intervals(parser.add_argument_group("intervals"), seed=self.drawn)
        return parser

    def main(self, argv: list[str] | None = None) -> int:
        """Run the command; returns the exit status."""
        tolerant_streams()
        args = self.build_parser().parse_args(argv)
        return guarded(lambda: self._run(args), lambda: self.kept, args.threads)

    def _run(self, args: argparse.Namespace) -> None:
        from ia_mech.display import styled
        from ia_mech.rates.load import open_runs

        runs = open_runs(args.runs)
        folder = self.output_folder(args.out, args.runs[0])
        if not self.several_models:
            check_one_model(runs)
        if not self.perturbed:
            check_unperturbed(runs)
        results = styled(self.run)(args, runs, folder)
        if results is None:
            return
        write(results, folder, self.name, self.question, args.level)
        from experiments.tables import screen
        from ia_mech.estimates import few_sources

        console = screen()
        results.show(console)  # after writing: a closed pipe must not cost the files
        if results.judge is not None:
            console.print(f"{results.judge.sentence}.", style="bold", soft_wrap=True, markup=False)
        said = filter(None, [results.sentence, results.control])
        for note in [*said, *results.notes, *few_sources(results.estimates)]:
            console.print(one_line(note), soft_wrap=True, markup=False)
        print(f"wrote {folder}", file=sys.stderr)

    @property
    def question(self) -> str:
        """The first sentence of the description."""
        first = re.split(r"(?<=[?.])\s", self.description, maxsplit=1)[0]
        return " ".join(first.split())

    def output_folder(self, out: Path | None, first_run: Path) -> Path:
        """Where results go; the folder isn't made.

        Raises:
            UserError: a file, a folder that can't be written, one among a run's own files, or one
                with results of another experiment, or of none.
        """
        from ia_mech.run.layout import refuse_inside_run, refuse_unwritable

        inside = first_run / "experiments" / self.name
        usual = inside
        if self.beside:
            from ia_mech.models.embedded import cache_dir

            usual = cache_dir() / f"{first_run.resolve().name}-{self.beside}"
        folder = usual if out is None else out
        if self.beside or folder.resolve() != inside.resolve():
            refuse_inside_run(folder / ESTIMATES)
        refuse_unwritable(folder)
        owner = _experiment_of(folder / ESTIMATES)
        if owner not in (None, self.name):
            raise UserError(f"{folder} holds results of {owner}", "name another folder with --out")
        return folder


def intervals(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of estimates: ``level``, ``resamples``, ``seed``."""
    return {"level": args.level, "resamples": args.resamples, "seed": args.seed}


def add_dry_run(parser: argparse.ArgumentParser, done: str = "computed") -> None:
    """Add ``--dry-run``; ``done`` is what it only shows."""
    words = f"show what would be {done}, and stop"
    parser.add_argument("--dry-run", action="store_true", help=words)


def write(results: Results, folder: Path, name: str, title: str, level: float) -> None:
    """Make the folder and put estimates, tables and figures in it, in place of earlier ones.

    They are put in place together, the estimates last: where those are, all is of one analysis.
    With the estimates goes what a report needs to show them (:mod:`ia_mech.report`): title,
    sentence, control, notes and the names of the figures.

    Raises:
        UserError: there is a folder where a file is to be; nothing is replaced then.
    """
    from ia_mech.display import save_figure
    from ia_mech.estimates import write_parquet
    from ia_mech.run.integrity import fsync_folder

    names = {str(run.path): run.name for run in results.runs}
    scratch = folder / ".new"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    about = {"experiment": name, "runs": [run.name for run in results.runs], "level": level}
    about["identities"] = [run.identity_digest for run in results.runs]
    if results.judge is not None:
        about |= {"judge": results.judge.judge, "gate": results.judge.word}
    try:
        for stem, table in results.tables.items():
            if "run" in table:  # files hold no folders of this machine
                table = table.assign(run=table["run"].replace(names))
            write_parquet(table, scratch / f"{stem}.parquet", about)
        for stem, figure in results.figures.items():
            save_figure(figure, scratch, stem)
        written = [*sorted(scratch.iterdir()), scratch / ESTIMATES]
        control = results.control or (results.judge.sentence if results.judge else "")
        about |= {"title": title, "sentence": results.sentence, "control": control}
        about |= {"notes": results.notes, "figures": list(results.figures)}
        write_parquet(results.estimates, scratch / ESTIMATES, about)
        for file in written:
            if (folder / file.name).is_dir():
                raise UserError(f"{folder / file.name} is a folder", "name another one with --out")
        (folder / ESTIMATES).unlink(missing_ok=True)
        for file in written:
            os.replace(file, folder / file.name)
        fsync_folder(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _experiment_of(file: Path) -> str | None:
    """Which experiment wrote a file of estimates; None if there is no file.

    Raises:
        UserError: none wrote it, or it is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        return None
    try:
        return json.loads(pq.read_schema(file).metadata[b"ia_mech"])["experiment"]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"no experiment wrote {file}, or it is damaged",
            "remove it, or name another folder with --out",
        ) from None


def check_unperturbed(runs: "list[Run]") -> None:
    """Refuse perturbed contexts: what is measured in them isn't pooled with the rest.

    Raises:
        UserError: a run holds some.
    """
    from ia_mech.data.conversations import UNPERTURBED

    for run in runs:
        if (run.contexts["perturbation"].fillna(UNPERTURBED) != UNPERTURBED).any():
            raise UserError(
                f"{run.path} holds perturbed contexts", "give the run that they were made from"
            )


def check_one_model(runs: "list[Run]") -> None:
    """Refuse runs of several models.

    Raises:
        UserError: their weights differ.
    """
    if len({run.model["weights_hash"] for run in runs}) > 1:
        names = ", ".join(dict.fromkeys(run.model["name"] for run in runs))
        raise UserError(f"the runs are of several models ({names})", "give runs of one model")
