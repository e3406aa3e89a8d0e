"""What an experiment is, and the command that runs any.

An experiment is one file with a subclass of :class:`Experiment`. ``--help`` prints the docstring of
the module: the question as its first sentence, the method, what it needs, what it costs. It says
what it needs as class attributes, and the rest by the methods under *what an experiment says*.

The command opens and checks the runs, chooses the queries, samples, measures the unfinished units
with progress, writes one :class:`ia_mech.results.Result` and prints it. ``--dry-run`` shows what
would be computed. ``docs/worked_experiment.py`` is one to begin from.
"""

import argparse
import hashlib
import inspect
import json
import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from experiments.arms import CHAT, DECODING, Arm, judge_alike, sample_arm, verdicts_of
from experiments.shown import Drawing, estimates_of, headline, print_plan, sentence_of, too_few
from ia_mech.cli import (
    JUDGE_HELP,
    RUN,
    Parser,
    add_intervals,
    add_ray,
    add_workers,
    expanded,
    nonblank,
    path_of,
    program,
    run_command,
    run_folder,
    shell_word,
    tolerant_streams,
    whole_from,
)
from ia_mech.display import Bar, Progress, console, with_style
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, few_sources
from ia_mech.rates.fit import marked
from ia_mech.rates.gate import Gate
from ia_mech.rates.load import JudgedTurns, open_runs
from ia_mech.results import (
    LOCK,
    Result,
    Table,
    about_runs,
    folder_of,
    kind_of,
    read,
    refuse_place,
    show,
    write,
)
from ia_mech.run import Run
from ia_mech.run.integrity import replace_file
from ia_mech.run.layout import UNPERTURBED
from ia_mech.run.queries import Query, queries_of, subsample
from ia_mech.run.sources import sources_of, split_source
from ia_mech.settings import Settings

if TYPE_CHECKING:  # these load torch, for which --help doesn't wait
    from ia_mech.chat.format import ChatFormat
    from ia_mech.engine.score import Scored, Turn
    from ia_mech.engine.workers import Crew, Team
    from ia_mech.models.load import ModelFiles, ModelSpec, Subject


SHARES = 64  # where memory runs out, a pass holds no less than this part of what it usually may


@dataclass(frozen=True)
class Unit:
    """What is measured by itself, and kept.

    A subclass holds all that the measurement depends on besides the model and the code, flags
    included, in values that JSON can hold: stored rows are found by this content.

    Attributes:
        source, dataset: of the query, written beside the rows.
        tokens: about how many the model computes for it, for the progress bar and ``--dry-run``.
    """

    source: str
    dataset: str
    tokens: int

    def rows(self, model: Any) -> pd.DataFrame:
        """What is measured, by the :class:`Model` and this unit alone; ``source`` and ``dataset``
        are added."""
        raise NotImplementedError


class Conclusion(NamedTuple):
    """What was found, and its control."""

    sentence: str
    control: str


@dataclass
class Model:
    """The subject model, as units have it.

    Attributes:
        subject: the model, its tokenizer, the hash of its weights.
        chat: the model's chat format with the run's settings.
        on_tokens: told how many tokens were computed.
    """

    subject: "Subject"
    chat: "ChatFormat"
    on_tokens: Callable[[int], None] = field(default=lambda count: None)

    def score(
        self,
        contexts: Sequence[Sequence[int]],
        turns: "Sequence[Turn]",
        temperatures: Sequence[float] = (),
    ) -> "list[Scored]":
        """Log-probabilities of turns; see :func:`ia_mech.likelihood.scorer.score_turns`."""
        from ia_mech.likelihood.scorer import score_turns

        return score_turns(
            self.subject.model,
            contexts,
            turns,
            temperatures,
            on_tokens=self.on_tokens,
        )


class Experiment(ABC):
    """One question put to sampled runs. Subclasses say what is asked; see the module.

    Class attributes:
        name: of the results, and of the module.
        siblings: queries with several responses are needed.
        judged: verdicts are used, so that a judge can be chosen.
        loads: units use the model; else they are given None, and no model is loaded.
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
        self._workers: dict[Path | None, tuple[Team, Callable]] = {}

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

    def units(self) -> Iterable[Unit]:
        """What is measured by itself, and stored when it is finished. With ``--dry-run`` nothing is
        in ``sampled``."""
        return []

    def rows(self) -> pd.DataFrame:
        """All rows. One that measures in several steps calls :meth:`measure_units` for each."""
        return self.measure_units(self.units())

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

    @property
    def _place(self) -> str | None:
        """Where the model is, if the command says so."""
        return getattr(self.args, "model", None)

    @cached_property
    def _spec(self) -> "ModelSpec":
        return spec_of(self.runs[0], self._place)

    @cached_property
    def _files(self) -> "ModelFiles":
        from ia_mech.models.load import load_files

        with _flag_named(self._spec, self._place):
            return load_files(self._spec)

    @property
    def config(self) -> Any:
        return self._files.config

    @cached_property
    def chat(self) -> "ChatFormat":
        """The model's chat format with the run's settings; no weights are loaded."""
        from ia_mech.collect.plan import build_chat

        first = self.runs[0]
        chat = build_chat(Settings.read(first.settings), self._files)
        if chat.describe()["template"] != first.record["identity"]["chat"]["template"]:
            raise UserError(
                f"the chat template of {first.model['name']} is not the one that {first.path} was "
                "sampled with",
                "sample the run again",
            )
        return chat

    def run_for(self, unit: Any) -> Run:
        """The run whose model measures a unit: the first, where runs are of one model."""
        return self.runs[0]

    def workers(self, run: Run | None) -> "tuple[Team, Callable]":
        """Those that have a run's model, loaded at first use, and what they do with a unit."""
        from ia_mech.engine.workers import Team

        place = run.path if run else None
        if place not in self._workers:
            team, chat = team_for(run, self._place, self.crew) if run else (Team(), None)
            self._workers[place] = team, partial(measured, chat)
        return self._workers[place]

    @property
    def crew(self) -> "Crew":
        """Workers, and threads of each, as the command asks for them."""
        from ia_mech.engine.workers import Crew

        return Crew(self.args.workers, self.args.threads, getattr(self.args, "ray", None))

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
        first, place = self.runs[0], self.place(name)
        how = place, lambda: self.workers(first)[0], self.crew, self.chat
        found = sample_arm(first, self._spec, arm, *how)
        self.sampled[name] = found
        return found

    def judge_arms(self, *, unperturbed: bool = False) -> str:
        """Have the arms' turns judged as the first run's were (:func:`judge_alike`); returns the
        judge's name."""
        judge, arms = self.gate.judge, list(self.sampled.values())
        judge_alike(self.runs[0], arms, judge, unperturbed=unperturbed)
        return judge

    @property
    def intervals(self) -> str:
        """What titles of tables say of intervals."""
        return f"{100 * self.args.level:g}% intervals over queries"

    def tested(self, words: str, rows: pd.DataFrame, digits: int = 2, most: float = np.inf) -> str:
        """A sentence of differences, and of one that isn't shown, how large it would have to be.
        ``most`` is the largest that there can be, 1 of differences of rates."""
        return sentence_of(words, rows, digits, null=0.0, level=self.args.level, most=most)

    @property
    def tests_made(self) -> int:
        """How many tests are corrected together, as far as that is known before."""
        return 1

    @property
    def too_few(self) -> str:
        """A warning if there are too few queries to show anything; else an empty text."""
        if self.siblings and not self.several_models:
            count = len(self.queries)
        else:
            count = len({source for run in self.runs for source in sources_of(run.contexts)})
        return too_few(min(count, getattr(self.args, "queries", None) or count), self.tests_made)

    @property
    def beside(self) -> Path:
        """Where new turns are kept: ``<first run>-<name>`` beside the first run."""
        first = self.runs[0].path.resolve()
        return self.args.out or first.with_name(f"{first.name}-{self.folder_name()}")

    def place(self, name: str) -> Path:
        """The folder of an arm."""
        return self.beside / name.replace(" ", "_")

    def _about_queries(self) -> list[str]:
        """How many queries there are, and how many of their responses are unfinished."""
        if "queries" not in vars(self):  # never read
            return []
        complete = [each for query in self.queries for each in query.complete]
        note = f"{len(self.queries)} queries, {len(complete)} responses"
        unfinished = complete.count(False)
        return [f"{note}, {unfinished} of them unfinished." if unfinished else f"{note}."]

    def measure_units(self, units: Iterable[Unit], phase: str = "") -> pd.DataFrame:
        """The rows of units one below the other, with ``source`` and ``dataset``.

        Several are measured at once, by workers. Finished units are kept in ``parts/`` of the
        results, and aren't measured again unless something changes of what :meth:`_key` holds.

        Raises:
            UserError: there is no unit.
        """
        from ia_mech.engine.workers import Team, compute_in_workers

        units = self._at_least_one(units)
        stored = {n: kept(self._parts, self._key(unit)) for n, unit in enumerate(units)}
        tables = {n: table for n, table in stored.items() if table is not None}
        todo = [n for n in range(len(units)) if n not in tables]
        if tables:
            print(f"{len(tables)} of {len(units)} units were measured before", file=sys.stderr)
        those = {n: self.workers(self.run_for(units[n]) if self.loads else None) for n in todo}
        for team in {team for team, _ in those.values()}:
            team.spread(self.crew, len(units) if self.loads else 1)
        team = those[todo[0]][0] if todo else Team()
        bar, total = Bar(), sum(unit.tokens for unit in units)
        done_before = total - sum(units[n].tokens for n in todo)
        bar.start(phase or f"measuring, {self.name}", total, done=done_before, unit="token")

        def measure(n: int) -> pd.DataFrame:
            return self._measured(*those[n], units[n], bar)

        def done(n: int, table: pd.DataFrame) -> None:
            keep(self._parts, self._key(units[n]), table)
            tables[n] = table

        try:
            compute_in_workers(todo, measure, done, team.most, team.threads, team.ready)
        finally:
            bar.stop()
        return pd.concat(
            [tables[n].assign(source=u.source, dataset=u.dataset) for n, u in enumerate(units)],
            ignore_index=True,
        )

    def _at_least_one(self, units: Iterable[Unit]) -> list[Unit]:
        found = list(units)
        if not found:
            raise UserError(
                f"{self.runs[0].path} holds nothing that {self.name} could measure",
                "".join(self.notes[-1:]) or "see what it needs in --help",
            )
        return found

    def _measured(
        self, team: "Team", task: Callable, unit: Unit, progress: Progress
    ) -> pd.DataFrame:
        """The rows of a unit, measured now, by a worker."""
        from ia_mech.engine.memory import Backoff

        ticked = 0

        def tick(tokens: int) -> None:
            nonlocal ticked
            ticked += tokens
            progress.advance(tokens, team.devices().removeprefix(", "))

        def measured(size: int) -> pd.DataFrame:
            tick(-ticked)  # of a try that memory was too small for
            return team.call(task, unit, SHARES // size, listener=SimpleNamespace(advance=tick))

        def shrank(size: int) -> None:
            progress.say(f"out of memory: passes of {named!r} hold 1/{SHARES // size} now")

        named = " ".join(split_source(unit.source))  # dataset and query
        try:
            rows = Backoff(SHARES, shrank).retry(measured)
        except Exception as error:
            error.add_note(f"This was of {named!r}; units before it are kept.")
            raise
        progress.advance(max(unit.tokens - ticked, 0))
        return rows

    @property
    def _parts(self) -> Path:
        return self.folder / "parts"

    def _key(self, unit: Unit) -> list:
        """All that a unit's rows depend on: its content, the model, and the code that measures it.
        The code counts as text, so that the key is the same for any version of Python."""
        model, kinds = self.run_for(unit).model, type(unit).__mro__
        modules = {kind.__module__ for kind in kinds if issubclass(kind, Unit) and kind is not Unit}
        code = sorted(
            hash_of((Path(inspect.getfile(sys.modules[one])),))
            for one in modules_of(frozenset(modules))
        )
        what = [self.name, code, model["weights_hash"], model["dtype"], type(unit).__name__]
        return [*what, *(engine_of() if self.loads else ()), asdict(unit)]

    def _stored(self, units: Sequence[Unit]) -> list[bool]:
        return [kept(self._parts, self._key(unit)) is not None for unit in units]

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
            "If it is interrupted, the same command goes on. Intervals are over queries.",
        )
        parser.add_argument("runs", nargs="+", type=kind, metavar=run, help="its folder")
        if cls.judged:
            parser.add_argument("--judge", metavar="NAME", help=JUDGE_HELP)
        if cls.queries_used is not None:
            least, what = whole_from(2), "at most N queries, drawn by --seed"
            flag(parser, "--queries", least, cls.queries_used, what, metavar="N")
        if cls.loads:
            where = "where the runs' model is now (default: where it was)"
            parser.add_argument("--model", type=nonblank, metavar="PATH", help=where)
        cls.add_flags(parser)
        written = parser.add_argument_group("what is shown and written")
        where = "where both go instead"
        written.add_argument("--out", type=path_of, metavar="FOLDER", help=where)
        written.add_argument("--full", action="store_true", help="print all tables and notes")
        written.add_argument("--dry-run", action="store_true", help="say what it takes, and stop")
        add_workers(computing := parser.add_argument_group("what computes"))
        if cls.loads and not cls.several_models:
            add_ray(computing)
        add_intervals(parser.add_argument_group("intervals"), seed="what is drawn")
        parser.set_defaults(command_line="")  # as it was given; empty where there was none
        return parser

    @classmethod
    def main(cls, argv: list[str] | None = None) -> int:
        tolerant_streams()
        parser = cls.build_parser()
        args = parser.parse_args(argv)
        args.command_line = command_line(parser, args)
        kept = "what was computed is kept; the same command goes on from there"
        return run_command(lambda: cls.command(args), lambda: kept, args.threads)

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
        if one.too_few:
            print(f"note: too few queries: {one.too_few}", file=sys.stderr, flush=True)
        with only_writer(one.folder):
            result = with_style(one.result)()
            known = kind_of(one.folder)
            earlier = read(one.folder).about["command"] if known else args.command_line
            write(result, one.folder)
        show(result, console(), full=args.full)  # after writing: a closed pipe costs no file
        print(f"numbers went to {shell_word(one.folder)}", file=sys.stderr)
        if one.sampled:
            print(f"new turns went to {shell_word(one.beside)}", file=sys.stderr)
        if earlier != args.command_line:
            print(f"this replaced the result of: {earlier}", file=sys.stderr)
        page = f"{program()} report {' '.join(map(shell_word, args.runs))}"
        print(f"next: {page}{f' --results {shell_word(args.out)}' if args.out else ''}")

    def check(self) -> None:
        """Refuse what can't be answered."""
        refuse_unlike(self.runs, self.several_models, self.mixed)
        if self.siblings and not self.several_models:
            _ = self.queries  # refused before anything slow is loaded
        if self.judged:
            self.gate = self.verdicts.gate
        self.read()

    def plan(self) -> dict[str, str]:
        """What would be sampled and measured: name → how much."""
        lines, tokens, todo, arms = {}, 0, 0, self.arms()
        for name, arm in arms.items():
            turns = f"{arm.rows(self.runs[0])} turns after each"
            lines[name] = f"{len(arm.conversations)} conversations to sample {turns}"
            if self._sampled_before(name):
                lines[name] += "; done already"
        if type(self).units is not Experiment.units:
            units = self._at_least_one(self.units())
            stored = self._stored(units)
            lacking = [one for one, is_there in zip(units, stored, strict=True) if not is_there]
            tokens, todo = sum(unit.tokens for unit in lacking), len(lacking)
            queries = len({unit.source for unit in units})
            lines["to measure"] = (
                f"{len(units)} units of {queries} queries; {sum(stored)} are measured already, the "
                f"others have about {tokens:,} tokens"
            )
        to_sample = [arm for name, arm in arms.items() if not self._sampled_before(name)]
        if to_sample or (todo and self.loads):
            lines |= self._costs(to_sample, tokens, todo)
        lines = lines or {"to compute": "nothing: the runs hold all that is read"}
        if self.too_few:
            lines["too few queries"] = self.too_few
        lines["numbers"] = f"go to {shell_word(self.folder)}"
        return lines | ({"new turns": f"go to {shell_word(self.beside)}"} if arms else {})

    def _sampled_before(self, name: str) -> bool:
        """Whether an arm's run is there, and finished."""
        place = self.place(name) / "run"
        return (place / RUN).is_file() and Run.open(place).complete

    def _costs(self, arms: Sequence[Arm], tokens: int, units: int) -> dict[str, str]:
        """Memory and time, where arms are sampled and units of so many tokens are measured."""
        import torch

        from ia_mech.collect.cost import Pace, memory_text, time_text
        from ia_mech.engine.memory import Footprint
        from ia_mech.engine.score import LOGITS, STATE_BYTES
        from ia_mech.models.load import resolve_device

        first = self.runs[0]
        device = resolve_device(first.settings["device"])  # here, wherever the run was made
        batch = first.settings["batch_rows"]
        size = Footprint.read(first.record["footprint"])
        pace = Pace(self.config, getattr(torch, first.model["dtype"]), device)
        longest = int(first.contexts["context_tokens"].max())
        seconds = pace.seconds(tokens, 2 * units)
        part = (4 * LOGITS[device.type] + STATE_BYTES[device.type]) if units else 0
        for arm in arms:
            contexts, each = len(arm.conversations), arm.rows(first)
            new = arm.settings.get("max_new_tokens", first.settings["max_new_tokens"])
            rows = contexts * each
            seconds += pace.seconds(contexts * longest, contexts)
            seconds += pace.seconds(rows * new, -(-rows // batch) * new)
            row = size.row(longest, new) + size.context(longest) // each
            part = max(part, min(rows, batch) * row)
        return {"memory": memory_text(size, part), "time": time_text(seconds)}

    def result(self) -> Result:
        """Sample, measure, estimate, conclude."""
        for name, arm in self.arms().items():
            self.sample(name, arm)
        rows = self.rows()
        found = estimates_of(self.estimate(rows), self.columns, self.args.level)
        sentence, control = self.conclude(found)
        gate = {"judge": self.gate.judge, "gate": self.gate.word} if self.judged else {}
        used = [*self.runs, *self.sampled.values()]
        samples = {}
        if {"temperature", "sample"} <= {*rows} and (sampled := rows["temperature"] > 0).any():
            samples["samples"] = int(rows.loc[sampled, "sample"].max()) + 1
        names = {str(run.path): run.name for run in used}  # no folders of this machine in files
        made = Result(
            name=self.name,
            question=self.question(),
            sentence=headline(sentence, found),
            control=control,
            estimates=found,
            tables=self.tables(found),
            figures={stem: figure.draw() for stem, figure in self.figures(found).items()},
            notes=[*self._about_queries(), *self.notes, *few_sources(found)],
            about={"kind": self.name, "level": self.args.level, "command": self.args.command_line}
            | gate
            | samples
            | about_runs(used, [gate["judge"]] if gate else []),
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


def measured(
    chat: Any, subject: "Subject | None", unit: Unit, share: int, listener: Any
) -> pd.DataFrame:
    """The rows of a unit, in passes that hold one part in ``share`` of what they may."""
    from ia_mech.engine.memory import smaller_passes

    with smaller_passes(share):
        return unit.rows(subject and Model(subject, chat, listener.advance))


def spec_of(run: Run, place: str | None = None) -> "ModelSpec":
    """Which model a run was sampled from, and how it was loaded; ``place`` is where it is now, if
    not where it was."""
    from ia_mech.models.load import recall

    spec = recall(run.settings, run.model["weights_hash"])
    return spec if place is None else replace(spec, name=place, revision=None)


@contextmanager
def _flag_named(spec: "ModelSpec", place: str | None) -> Iterator[None]:
    """Have the refusal of a model that may have moved name ``--model``."""
    from ia_mech.models.embedded import MODELS

    try:
        yield
    except UserError as error:
        if place is not None or spec.name in MODELS or expanded(spec.name).exists():
            raise
        raise UserError(
            f"the run's model is not where it was: {error.problem}",
            f"give its place now with --model PATH, or {error.remedy}",
        ) from error


def team_for(run: Run, place: str | None, crew: "Crew") -> "tuple[Team, ChatFormat]":
    """Workers that have the model that a run was sampled from, checked as before sampling, and its
    chat format; ``place`` is as for :func:`spec_of`."""
    from ia_mech.collect.job import opened
    from ia_mech.collect.plan import build_chat, probe_ids
    from ia_mech.engine.cluster import team_of
    from ia_mech.models.load import load_files, remember

    if run.settings["intervention"] is not None:
        raise UserError(
            f"{run.path} was sampled under --intervention {run.settings['intervention']}: scored "
            "again, its turns would be those of another model",
            "give a run that was sampled without one",
        )
    spec = spec_of(run, place)
    with _flag_named(spec, place):
        chat = build_chat(Settings.read(run.settings), load_files(spec))
        team = team_of(spec, crew, Bar())
        found = team.begin(opened, probe_ids(chat), team.device, False, False)
    there, here = run.model["weights_hash"], found.about["weights_hash"]
    if here != there:
        raise UserError(
            f"{spec.name} has the weights {here} now, {run.path} those of {there}",
            "give the place of the same weights with --model PATH, or sample the run again",
        )
    remember(spec, here)
    return team, chat


@lru_cache
def hash_of(files: tuple[Path, ...]) -> str:
    """What files say, as a short hash."""
    text = b"".join(file.read_bytes() for file in files)
    return hashlib.blake2b(text, digest_size=8).hexdigest()


@lru_cache
def modules_of(measuring: frozenset[str]) -> frozenset[str]:
    """Modules that measure, and those of experiments that they import, but for the runner's own."""

    def closed(todo: list[str]) -> set[str]:
        found: set[str] = set()
        while todo:
            if (name := todo.pop()) not in found:
                found.add(name)
                held = vars(sys.modules[name]).values()
                named = (str(getattr(one, "__module__", "")) for one in held)
                todo += [one for one in named if one.startswith("experiments.")]
        return found

    return frozenset(measuring | (closed(list(measuring)) - closed([__name__])))


def engine_of() -> list[str]:
    """What computes with the model: our code as a hash, and torch's version on any machine."""
    import torch

    package = Path(inspect.getfile(UserError)).parent
    files = (sorted((package / name).glob("*.py")) for name in ("engine", "likelihood"))
    return [hash_of((*chain.from_iterable(files),)), torch.__version__.partition("+")[0]]


def kept(folder: Path, key: Any) -> pd.DataFrame | None:
    """The rows of a unit, by a key that JSON can hold but for NumPy's numbers; None if they aren't
    there, or are damaged."""
    try:
        return pq.read_table(_file(folder, key), page_checksum_verification=True).to_pandas()
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        return None


def keep(folder: Path, key: Any, table: pd.DataFrame) -> None:
    """Keep the rows of a unit."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(_file(folder, key), partial(table.to_parquet, write_page_checksum=True))


def _file(folder: Path, key: Any) -> Path:
    text = json.dumps(key, default=lambda value: value.tolist())
    return folder / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.parquet"


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other commands from writing results to a folder; none is left that holds nothing."""
    new = not folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"another command is writing to {folder}", "wait for it, or give another --out"
        ) from None
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        if new and not any(folder.iterdir()):
            folder.rmdir()


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


def refuse_unlike(runs: list[Run], several_models: bool, mixed: bool) -> None:
    """Refuse runs that can't be used together, and perturbed contexts, which none are."""
    first = runs[0]
    if not several_models and len({run.model["weights_hash"] for run in runs}) > 1:
        models = ", ".join(dict.fromkeys(run.model["name"] for run in runs))
        raise UserError(f"the runs are of several models ({models})", "give runs of one model")
    for run in runs:
        names = (*CHAT, *DECODING)
        differ = [name for name in names if run.settings[name] != first.settings[name]]
        if differ and not mixed:
            raise UserError(
                f"{first.path} and {run.path} differ in {', '.join(differ)}",
                "give runs of the same settings",
            )
        if (run.contexts["perturbation"].fillna(UNPERTURBED) != UNPERTURBED).any():
            raise UserError(
                f"{run.path} holds perturbed conversations", "give the run that they were made from"
            )
