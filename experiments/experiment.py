"""What an experiment is.

An experiment is one file with a subclass of :class:`Experiment`. ``--help`` prints the docstring of
the module: the question as its first sentence, the method, what it needs, what it costs. It says
what it needs as class attributes, and the rest by the methods under *what an experiment says*.
``docs/worked_experiment.py`` is one to begin from.

:mod:`experiments.running` does the rest. The command opens and checks the runs, chooses the
queries, samples, measures the unfinished units with progress, writes one
:class:`ia_mech.results.Result` and prints it. ``--dry-run`` shows what would be computed.
"""

import argparse
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd

from experiments import running
from experiments.arms import Arm, judge_alike, sample_arm, verdicts_of
from experiments.shown import Drawing, sentence_of, too_few
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate
from ia_mech.rates.gate import Gate
from ia_mech.rates.load import JudgedTurns
from ia_mech.results import Table
from ia_mech.run import Run
from ia_mech.run.queries import Query, queries_of, subsample
from ia_mech.run.sources import sources_of

if TYPE_CHECKING:  # these load torch, for which --help doesn't wait
    from ia_mech.chat.format import ChatFormat
    from ia_mech.engine.score import Scored, Turn
    from ia_mech.models.load import Subject


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
        loads: the model is used, so that its place can be given.
        several_models: runs of several models may be given together.
        mixed: runs that were decoded in different ways may be given together.
        queries_used: how many queries at most, drawn by ``--seed``; None for all. If it is given,
            so is ``--queries``.
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
        self._models: dict[Path, running.Loaded] = {}

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

    def model_of(self, run: Run) -> "running.Loaded":
        """The model of a run, which is loaded at first use."""
        from ia_mech.engine.workers import Crew

        args, place = self.args, getattr(self.args, "model", None)
        crew = Crew(args.workers, args.threads, getattr(args, "ray", None))
        return self._models.setdefault(run.path, running.Loaded(run, place, crew))

    @property
    def config(self) -> Any:
        return self.model_of(self.runs[0]).files.config

    @property
    def chat(self) -> "ChatFormat":
        """The model's chat format with the run's settings; no weights are loaded."""
        return self.model_of(self.runs[0]).chat

    def run_for(self, unit: Any) -> Run:
        """The run whose model measures a unit: the first, where runs are of one model."""
        return self.runs[0]

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
        found = sample_arm(self.model_of(self.runs[0]), arm, self.place(name))
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
        every = {source for run in self.runs for source in sources_of(run.contexts)}
        count = len(vars(self).get("queries", every))  # those that were read
        return too_few(min(count, getattr(self.args, "queries", None) or count), self.tests_made)

    @property
    def beside(self) -> Path:
        """Where new turns are kept: ``<first run>-<name>`` beside the first run."""
        first = self.runs[0].path.resolve()
        return self.args.out or first.with_name(f"{first.name}-{self.folder_name()}")

    def place(self, name: str) -> Path:
        """The folder of an arm."""
        return self.beside / name.replace(" ", "_")

    # -- the command (:mod:`experiments.running`) -------------------------------------------------

    measure_units = running.measure
    plan = running.plan
    build_parser = classmethod(running.build_parser)
    main = classmethod(running.main)

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

    def check(self) -> None:
        """Refuse what can't be answered."""
        running.refuse_unlike(self.runs, self.several_models, self.mixed)
        if self.siblings and not self.several_models:
            _ = self.queries  # refused before anything slow is loaded
        if self.judged:
            self.gate = self.verdicts.gate
        self.read()


def flag(
    parser: argparse.ArgumentParser, name: str, kind: Any, default: Any, what: str, **more: Any
) -> None:
    """Add a flag with a value of a kind, whose help ends with its default, if there is one."""
    shown = [f"{one:g}" if isinstance(one, float) else str(one) for one in np.atleast_1d(default)]
    what += "" if default is None else f" (default: {' '.join(shown)})"
    parser.add_argument(name, type=kind, default=default, help=what.replace("%", "%%"), **more)
