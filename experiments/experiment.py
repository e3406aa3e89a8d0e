"""What an experiment is, and the command that runs any.

An experiment is one file with a subclass of :class:`Experiment`. ``--help`` prints the docstring of
the module: the question as its first sentence, the method, what it needs, what it costs. It says
what it needs as class attributes, and the rest by the methods under *what an experiment says*.
``docs/worked_experiment.py`` is one to begin from.

The command opens and checks the runs, chooses the queries, samples, measures the unfinished units
(:mod:`experiments.units`) with progress, writes one :class:`ia_mech.results.Result` and prints it.
``--dry-run`` shows what would be computed.
"""

import argparse
import inspect
import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd

from experiments.arms import (
    CHAT,
    DECODING,
    Arm,
    ArmRun,
    judge_alike,
    verdicts_of,
)
from experiments.shown import Drawing, estimates_of, headline, print_plan, sentence_of, too_few
from experiments.units import Loaded, Unit, file_of, kept, measure
from experiments.units import Model as Model
from ia_mech.cli import (
    JUDGE_HELP,
    Parser,
    add_intervals,
    add_ray,
    add_workers,
    go_on,
    nonblank,
    path_of,
    program,
    run_command,
    run_folder,
    shell_word,
    tolerant_streams,
    whole_from,
)
from ia_mech.display import console, with_style
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, few_sources
from ia_mech.rates.fit import marked
from ia_mech.rates.gate import Gate
from ia_mech.rates.load import JudgedTurns, open_runs
from ia_mech.results import (
    Result,
    Table,
    about_runs,
    folder_of,
    refuse_place,
    show,
    write,
)
from ia_mech.run import Run
from ia_mech.run.layout import UNPERTURBED
from ia_mech.run.queries import Query, queries_of, subsample
from ia_mech.run.sources import sources_of

if TYPE_CHECKING:  # these load torch, for which --help doesn't wait
    from ia_mech.chat.format import ChatFormat


class Conclusion(NamedTuple):
    """What was found, and its control."""

    sentence: str
    control: str


class Experiment(ABC):
    """One question put to sampled runs. Subclasses say what is asked; see the module.

    Class attributes:
        name: of the results, and of the module.
        siblings: queries with several responses are needed.
        judged: verdicts are used, so that a judge can be chosen.
        loads: the model is used, so that its place can be given.
        several_models: runs of several models may be given together.
        mixed: runs that were decoded in different ways may be given together.
        queries_used: how many queries at most, drawn by ``--seed``; None for all. If it is given,
            so is ``--queries``.
        given: how ``--help`` calls what is given, and what reads the folder of each.
        columns: what estimates are of: column → dtype.

    Attributes:
        runs: that were given.
        args: the command line.
        folder: of the results, ``results/<name>`` in the first run; it may not be there yet.
        gate: whether the judge passes its control, where verdicts are used.
        notes: what a reader has to know; add to it.
        sampled: the runs of :meth:`arms`, once they are sampled.
    """

    name: ClassVar[str]
    siblings: ClassVar[bool] = False
    judged: ClassVar[bool] = False
    loads: ClassVar[bool] = True
    several_models: ClassVar[bool] = False
    mixed: ClassVar[bool] = False
    queries_used: ClassVar[int | None] = None
    given: ClassVar[tuple[str, Callable[[str], Path]]] = "RUN", run_folder
    columns: ClassVar[Mapping[str, str]] = {
        "dataset": "str",
        "temperature": "float64",
        "term": "str",
    }
    gate: Gate

    def __init__(self, runs: list[Run], args: argparse.Namespace, folder: Path) -> None:
        self.runs, self.args, self.folder = runs, args, folder
        self.notes: list[str] = []
        self.sampled: dict[str, Run] = {}

    # -- what an experiment says ------------------------------------------------------------------

    @classmethod  # noqa: B027 (there may be none)
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Add the experiment's own flags."""

    @classmethod
    def asked(cls, args: argparse.Namespace) -> "type[Experiment]":
        """The class that answers what the flags ask for."""
        return cls

    def read(self) -> None:  # noqa: B027 (may allow everything)
        """Refuse here what can't be answered: it is called before anything is computed."""

    def arms(self) -> Mapping[str, Arm]:
        """Conditions under which turns are sampled first, by name, each as a run of its own."""
        return {}

    def units(self) -> Iterable[Unit] | None:
        """What is measured by itself, and stored when it is finished; None for nothing. With
        ``--dry-run`` nothing is in ``sampled``."""
        return None

    def rows(self) -> pd.DataFrame:
        """All rows. One that measures in several steps calls :meth:`measure_units` for each."""
        return self.measure_units(self.units() or ())

    @abstractmethod
    def estimate(self, rows: pd.DataFrame) -> Iterable[TidyEstimate]:
        """The estimates."""

    def tables(self, found: pd.DataFrame) -> list[Table]:
        """The tables of the estimates (:mod:`experiments.shown`), the most important first."""
        return []

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        """The figures by the stem of their files."""
        return {}

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        """What is written beside the estimates: stem of the file → table."""
        return {"rows": rows}

    def files(self) -> dict[str, Callable[[Path], None]]:
        """What else is written: name → what writes the file."""
        return {}

    @abstractmethod
    def conclude(self, found: pd.DataFrame) -> Conclusion:
        """The sentence and its control."""

    # -- what an experiment uses ------------------------------------------------------------------

    @cached_property
    def queries(self) -> list[Query]:
        """The queries of the runs: those with several responses where siblings are needed, and as
        many as were asked for."""
        found = queries_of(self.runs)
        if self.siblings:
            several = [query for query in found if len(query.contexts) > 1]
            if not several:
                raise UserError(
                    f"{self.runs[0].path} has one response per query",
                    "sample again with --response generate --responses 4, in another --out",
                )
            if len(several) < len(found):
                self.notes.append(
                    f"{len(found) - len(several)} of {len(found)} queries have one response and "
                    "are left out."
                )
            found = several
        return subsample(found, getattr(self.args, "queries", None), self.args.seed)

    @cached_property
    def model(self) -> Loaded:
        """The first run's model, which is loaded at first use."""
        from ia_mech.engine.workers import Crew

        args = self.args
        return Loaded(self.runs[0], args.model, Crew(args.workers, args.threads, args.ray))

    @property
    def config(self) -> Any:
        return self.model.files.config

    @property
    def chat(self) -> "ChatFormat":
        """The model's chat format with the run's settings; no weights are loaded."""
        return self.model.chat

    @property
    def options(self) -> dict[str, Any]:
        """``level``, ``resamples`` and ``seed``, as estimates take them."""
        return {name: getattr(self.args, name) for name in ("level", "resamples", "seed")}

    @cached_property
    def verdicts(self) -> JudgedTurns:
        """The runs' turns with the judge's verdicts."""
        return verdicts_of(self.runs, self.args.judge)

    def sample(self, name: str, arm: Arm) -> Run:
        """The run of an arm, which is then among :attr:`sampled`."""
        self.sampled[name] = ArmRun(self.model, arm, self.place(name)).sample()
        return self.sampled[name]

    def judge_arms(self, *, unperturbed: bool = False) -> str:
        """Have the arms' turns judged as the first run's were (:func:`judge_alike`); returns the
        judge's name."""
        judge, arms = self.gate.judge, list(self.sampled.values())
        judge_alike(self.runs[0], arms, judge, unperturbed=unperturbed)
        return judge

    @property
    def labellers(self) -> list[str]:
        """Whose labels the numbers rest on."""
        return [self.gate.judge] if self.judged else []

    @property
    def intervals(self) -> str:
        """What titles of tables say of intervals."""
        return f"{100 * self.args.level:g}% intervals over queries"

    def tested(self, words: str, rows: pd.DataFrame, most: float = np.inf) -> str:
        """A sentence of differences, and of one that isn't shown, how large it would have to be.
        ``most`` is the largest that there can be, 1 of differences of rates."""
        return sentence_of(words, rows, null=0.0, most=most)

    @property
    def too_few(self) -> str:
        """A warning if there are too few queries to show anything; else an empty text."""
        count = len({source for run in self.runs for source in sources_of(run.contexts)})
        return too_few(min(count, getattr(self.args, "queries", None) or count))

    @property
    def beside(self) -> Path:
        """Where new turns are kept: ``<first run>-<name>`` beside the first run."""
        first = self.runs[0].path.resolve()
        return self.args.out or first.with_name(f"{first.name}-{self.folder_name()}")

    def place(self, name: str) -> Path:
        """The folder of an arm."""
        return self.beside / name.replace(" ", "_")

    def measure_units(self, units: Iterable[Unit], phase: str = "") -> pd.DataFrame:
        """The rows of units one below the other, with ``source`` and ``dataset``.

        Several are measured at once, by workers. Finished units are kept in ``parts/`` of the
        results, and aren't measured again unless something changes of what they depend on.

        Raises:
            UserError: there is no unit.
        """
        units = list(units)
        if not units:
            raise UserError(
                f"{self.runs[0].path} holds nothing that {self.name} could measure",
                "".join(self.notes[-1:]) or "see what it needs in --help",
            )
        return measure(units, self.model, self._files(units), phase or f"measuring, {self.name}")

    def _files(self, units: Sequence[Unit]) -> list[Path]:
        """Where the rows of units are kept."""
        where = self.folder / "parts", self.name
        return [file_of(*where, unit, self.runs[0]) for unit in units]

    # -- the command ------------------------------------------------------------------------------

    @classmethod
    def help(cls) -> str:
        """The docstring of the experiment's module."""
        return (sys.modules[cls.__module__].__doc__ or "").strip()

    @classmethod
    def folder_name(cls) -> str:
        """What folders of its results and of its new turns are named by."""
        return cls.name.replace("_", "-")

    @classmethod
    def question(cls) -> str:
        """Its first sentence."""
        return " ".join(re.split(r"(?<=[?.])\s", cls.help(), maxsplit=1)[0].split())

    @classmethod
    def build_parser(cls) -> argparse.ArgumentParser:
        name, file = cls.folder_name(), Path(inspect.getfile(cls)).resolve()
        run, kind = cls.given
        parser = Parser(
            prog=f"ia-mech {name}"
            if file.parent == Path(__file__).resolve().parent
            else f"python {file.name}",
            usage=f"%(prog)s {run} [{run} …] [options]",
            description=cls.help(),
            epilog=f"Numbers go to RUN/results/{name}/, new turns to RUN-{name}/ beside RUN.\n"
            "The same command continues an interrupted one. Intervals are over queries.",
        )
        parser.add_argument("runs", nargs="+", type=kind, metavar=run, help="its folder")
        if cls.judged:
            parser.add_argument("--judge", metavar="NAME", help=JUDGE_HELP)
        if cls.queries_used is not None:
            least, what = whole_from(2), "at most N queries, chosen at random (--seed)"
            flag(parser, "--queries", least, cls.queries_used, what, metavar="N")
        if cls.loads:
            where = "where the runs' model is now (default: where it was)"
            parser.add_argument("--model", type=nonblank, metavar="PATH", help=where)
        cls.add_flags(parser)
        written = parser.add_argument_group("what is shown and written")
        where = "folder for results and new turns instead"
        written.add_argument("--out", type=path_of, metavar="FOLDER", help=where)
        written.add_argument("--full", action="store_true", help="print all tables and notes")
        stop = "print what would be computed, and stop"
        written.add_argument("--dry-run", action="store_true", help=stop)
        add_workers(computing := parser.add_argument_group("what computes"))
        if cls.loads:
            add_ray(computing)
        add_intervals(parser.add_argument_group("intervals"), seed="all random choices")
        parser.set_defaults(command_line="")  # as it was given; empty where there was none
        return parser

    @classmethod
    def main(cls, argv: list[str] | None = None) -> int:
        tolerant_streams()
        parser = cls.build_parser()
        words = sys.argv[1:] if argv is None else argv
        args = parser.parse_args(words)
        args.command_line = command_line(parser, args)
        kept = "finished parts are kept"
        file = Path(inspect.getfile(cls)).resolve()  # a user's own may be anywhere
        again = partial(go_on, kept, parser.prog.replace(file.name, shell_word(file)), words)
        return run_command(lambda: cls.command(args), again, args.threads)

    @classmethod
    def command(cls, args: argparse.Namespace) -> None:
        """What the command does: answer, write and print."""
        runs, kind = open_runs(args.runs), cls.asked(args)
        one = kind(runs, args, output_folder(kind, args.out, args.runs[0]))
        one.check()
        if args.dry_run:
            plan = one.plan()
            print_plan(plan | ({"to know": " ".join(one.notes)} if one.notes else {}))
            return
        for note in [*one.notes, *[f"too few queries: {one.too_few}"] * bool(one.too_few)]:
            print(f"note: {note}", file=sys.stderr, flush=True)
        made = with_style(one.result)()
        write(made, one.folder)
        show(made, console(), full=args.full)  # after writing: a closed pipe costs no file
        print(f"numbers went to {shell_word(one.folder)}", file=sys.stderr)
        if one.sampled:
            print(f"new turns went to {shell_word(one.beside)}", file=sys.stderr)
        page = f"{program()} report {' '.join(map(shell_word, args.runs))}"
        print(f"next: {page}{f' --results {shell_word(args.out)}' if args.out else ''}")

    def check(self) -> None:
        """Refuse what can't be answered."""
        self._refuse_unlike()
        if self.siblings and not self.several_models:
            _ = self.queries  # refused before anything slow is loaded
        if self.judged:
            self.gate = self.verdicts.gate
        self.read()

    def _refuse_unlike(self) -> None:
        """Refuse runs that can't be used together, and perturbed contexts, which none are."""
        first, names = self.runs[0], () if self.mixed else (*CHAT, *DECODING)
        models = dict.fromkeys(run.model["name"] for run in self.runs)
        if len({run.model["weights_hash"] for run in self.runs}) > 1 and not self.several_models:
            several = f"the runs are of several models ({', '.join(models)})"
            raise UserError(several, "give runs of one model")
        for run in self.runs:
            differ = [name for name in names if run.settings[name] != first.settings[name]]
            if differ:
                raise UserError(
                    f"{first.path} and {run.path} differ in {', '.join(differ)}",
                    "give runs of the same settings",
                )
            if (run.contexts["perturbation"].fillna(UNPERTURBED) != UNPERTURBED).any():
                raise UserError(
                    f"{run.path} holds perturbed conversations",
                    "give the run that they were made from",
                )

    def plan(self) -> dict[str, str]:
        """What would be sampled and measured: name → how much."""
        lines, tokens, todo, arms, units = {}, 0, 0, self.arms(), self.units()
        to_sample = []
        for name, arm in arms.items():
            count, each = len(arm.conversations), arm.turns_text(arm.rows(self.runs[0]))
            lines[name] = f"{count} conversation{'s' * (count > 1)} to sample {each} after each"
            if ArmRun(self.model, arm, self.place(name)).finished() is not None:
                lines[name] += "; done already"
            else:
                to_sample.append(arm)
        if units is not None:
            units = list(units)
            lacking = [
                unit
                for unit, file in zip(units, self._files(units), strict=True)
                if kept(file) is None
            ]
            tokens, todo = sum(unit.tokens for unit in lacking), len(lacking)
            queries = len({unit.source for unit in units})
            lines["to measure"] = (
                f"{len(units)} units of {queries} queries; {len(units) - todo} are measured "
                f"already, the others have about {tokens:,} tokens"
            )
        if to_sample or todo:
            lines["time"] = self._time(to_sample, tokens, todo)
        lines = lines or {"to compute": "nothing: the runs hold all that is read"}
        if self.too_few:
            lines["too few queries"] = self.too_few
        lines["numbers"] = f"go to {shell_word(self.folder)}"
        return lines | ({"new turns": f"go to {shell_word(self.beside)}"} if arms else {})

    def _time(self, arms: Sequence[Arm], tokens: int, units: int) -> str:
        """About how long it takes to sample arms, and to measure units of so many tokens."""
        import torch

        from ia_mech.collect.cost import Pace, time_text
        from ia_mech.models.load import resolve_device

        first = self.runs[0]
        device = resolve_device(first.settings["device"])  # here, wherever the run was made
        pace = Pace(self.config, getattr(torch, first.model["dtype"]), device)
        longest = int(first.contexts["context_tokens"].max())
        seconds = pace.seconds(tokens, 2 * units)
        for arm in arms:
            contexts, rows = len(arm.conversations), len(arm.conversations) * arm.rows(first)
            new = arm.settings.get("max_new_tokens", first.settings["max_new_tokens"])
            batches = -(-rows // first.settings["batch_rows"])
            seconds += pace.seconds(contexts * longest, contexts)
            seconds += pace.seconds(rows * new, batches * new)
        return time_text(seconds)

    def result(self) -> Result:
        """Sample, measure, estimate, conclude."""
        for name, arm in self.arms().items():
            self.sample(name, arm)
        rows = self.rows()
        found = estimates_of(self.estimate(rows), self.columns, self.args.level)
        sentence, control = self.conclude(found)
        gate = {"judge": self.gate.judge, "gate": self.gate.word} if self.judged else {}
        used, queries, samples = [*self.runs, *self.sampled.values()], [], {}
        if {"temperature", "sample"} <= {*rows} and (sampled := rows["temperature"] > 0).any():
            samples["samples"] = int(rows.loc[sampled, "sample"].max()) + 1
        if "queries" in vars(self):  # they were read
            complete = [each for query in self.queries for each in query.complete]
            note = f"{len(self.queries)} queries, {len(complete)} responses"
            cut = complete.count(False)
            queries.append(f"{note}, {cut} of them unfinished." if cut else f"{note}.")
        names = {str(run.path): run.name for run in used}  # no folders of this machine in files
        made = Result(
            name=self.name,
            question=self.question(),
            sentence=headline(sentence, found),
            control=control,
            estimates=found,
            tables=self.tables(found),
            figures={stem: figure.draw() for stem, figure in self.figures(found).items()},
            notes=[*queries, *self.notes, *few_sources(found)],
            about={"kind": self.name, "level": self.args.level, "command": self.args.command_line}
            | gate
            | samples
            | about_runs(used, self.labellers),
            data={
                stem: frame.assign(run=frame["run"].replace(names)) if "run" in frame else frame
                for stem, frame in self.data(rows).items()
            },
            files=self.files(),
        )
        return marked(made, self.verdicts.record) if self.judged else made


def flag(
    parser: argparse.ArgumentParser, name: str, kind: Any, default: Any, what: str, **more: Any
) -> None:
    """Add a flag with a value of a kind, whose help ends with its default, if there is one."""
    shown = [f"{one:g}" if isinstance(one, float) else str(one) for one in np.atleast_1d(default)]
    what += "" if default is None else f" (default: {' '.join(shown)})"
    parser.add_argument(name, type=kind, default=default, help=what.replace("%", "%%"), **more)


def command_line(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """The command as a result keeps it: all that may change the result, and no folders of this
    machine."""
    words = [run.name for run in args.runs]
    silent = {"runs", "model", "out", "dry_run", "full", "workers", "threads", "ray"}
    for name, value in vars(args).items():
        if name in silent or value == parser.get_default(name):
            continue
        words.append(f"--{name.replace('_', '-')}")
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [one.name if isinstance(one, Path) else str(one) for one in values]
    return f"{parser.prog} {shlex.join(words)}"


def output_folder(cls: type[Experiment], out: Path | None, first_run: Path) -> Path:
    """Where results of an experiment go; the folder isn't made."""
    usual = folder_of(first_run, cls.folder_name())
    refuse_place(out or usual, cls.name, usual)
    return out or usual
