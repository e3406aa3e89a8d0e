"""The contract of an experiment, and the runner that all of them share.

An experiment is a module ``experiments.NAME``: one file, or a folder where one is too long. It has

- what comes in: from open runs to data frames; bad input is a ``UserError``;
- what is measured, unit by unit, so that an interrupted command goes on
  (:func:`experiments.given_turns.computed_for_each`);
- the estimates, as :mod:`ia_mech.estimates` makes them; tables (:mod:`experiments.tables`) and
  figures;
- an :class:`Experiment` with the command's help and flags, and the function ``run`` that ties these
  together and returns :func:`result_of` them. Nothing imports torch or matplotlib before ``run`` is
  called, so that ``--help`` and a mistyped flag answer at once.

``docs/NAME.md`` (``_`` becomes ``-``) has the method, and one analysis to read. To add one, copy
``experiments/likelihood.py``. The runner opens and checks the runs, chooses the output folder,
refuses to overwrite what isn't the experiment's, writes everything and prints it.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ia_mech.cli import (
    Parser,
    add_intervals,
    add_threads,
    guarded,
    path_of,
    tolerant_streams,
)
from ia_mech.errors import UserError

if TYPE_CHECKING:
    from ia_mech.rates.gate import Gate
    from ia_mech.results import Result
    from ia_mech.run import Run


def result_of(
    runs: "Sequence[Run]",
    gate: "Gate | None",
    *,
    control: str = "",
    **found: Any,
) -> "Result":
    """A result of runs, whose name, question and level :class:`Experiment` fills in.

    Args:
        runs: what it was made from.
        gate: of the judge whose verdicts were used, if any; it is the control if none is given.
        control: what the sentence is held against, and how it came out.
        found: the other attributes of a :class:`ia_mech.results.Result`.
    """
    from ia_mech.results import Result, about_runs

    about = about_runs(runs, [] if gate is None else [gate.judge])
    if gate is not None:
        about |= {"judge": gate.judge, "gate": gate.word}
        control = control or f"{gate.sentence}."
    names = {str(run.path): run.name for run in runs}  # files hold no folders of this machine
    data = {
        stem: frame.assign(run=frame["run"].replace(names)) if "run" in frame else frame
        for stem, frame in found.pop("data", {}).items()
    }
    return Result(name="", question="", control=control, about=about, data=data, **found)


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
        beside: results go to ``cache/<first run>-<this>``, not to ``results/NAME`` in the first
            run: they hold runs, which can't lie in a run.
        kept: what an interrupted command leaves.
        page: in ``docs/``, of the method, if it isn't ``NAME.md``.
    """

    name: str
    description: str
    written: str
    run: "Callable[[argparse.Namespace, list[Run], Path], Result | None]"
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
            + fill(f"Written: estimates.parquet (every number, one per row), {self.written}.", 100),
        )
        parser.add_argument("runs", nargs="+", type=path_of, metavar="RUN", help="a run's folder")
        if self.judged:
            judge = "whose verdicts (default: the only judge)"
            parser.add_argument("--judge", metavar="NAME", help=judge)
        self.add_flags(parser)
        usual = f"results/{self.name} in the first run"
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
        from ia_mech.display import console, styled
        from ia_mech.estimates import few_sources
        from ia_mech.rates.load import open_runs
        from ia_mech.results import show, write

        runs = open_runs(args.runs)
        folder = self.output_folder(args.out, args.runs[0])
        if not self.several_models:
            check_one_model(runs)
        if not self.perturbed:
            check_unperturbed(runs)
        result = styled(self.run)(args, runs, folder)
        if result is None:
            return
        result = replace(
            result,
            name=self.name,
            question=self.question,
            notes=[*result.notes, *few_sources(result.estimates)],
            about={"kind": self.name, "level": args.level, **result.about},
        )
        write(result, folder)
        show(result, console())  # after writing: a closed pipe must not cost the files
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
        from ia_mech.results import RESULT, folder_of, kind_of
        from ia_mech.run.layout import refuse_inside_run, refuse_unwritable

        inside = folder_of(first_run, self.name)
        usual = inside
        if self.beside:
            from ia_mech.models.embedded import cache_dir

            usual = cache_dir() / f"{first_run.resolve().name}-{self.beside}"
        folder = usual if out is None else out
        if self.beside or folder.resolve() != inside.resolve():
            refuse_inside_run(folder / RESULT)
        refuse_unwritable(folder)
        owner = kind_of(folder)
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
