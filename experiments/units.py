"""What is measured by itself and kept, and the models that measure it.

The rows of a unit are kept in a file whose name is a hash of all that they depend on. So a stopped
command goes on, and what was changed is measured again.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ia_mech.cli import expanded
from ia_mech.display import Bar, Progress
from ia_mech.errors import UserError
from ia_mech.run import Run
from ia_mech.run.integrity import replace_file
from ia_mech.run.sources import split_source
from ia_mech.settings import Settings

if TYPE_CHECKING:  # these load torch, for which --help doesn't wait
    from ia_mech.chat.format import ChatFormat
    from ia_mech.engine.score import Scored, Turn
    from ia_mech.engine.workers import Crew, Team
    from ia_mech.models.load import ModelFiles, ModelSpec, Subject

SHARES = 64  # where memory runs out, a pass holds no less than this part of what it usually may
RUNNER = "experiments.experiment"  # what it imports measures nothing


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

    def after(self, contexts: Sequence[Sequence[int]]) -> "Callable[..., list[Scored]]":
        """Scores turns after contexts, which are prefilled once; see
        :func:`ia_mech.likelihood.scorer.scorer_after`."""
        from ia_mech.likelihood.scorer import scorer_after

        return scorer_after(self.subject.model, contexts, on_tokens=self.on_tokens)

    def score(
        self,
        contexts: Sequence[Sequence[int]],
        turns: "Sequence[Turn]",
        temperatures: Sequence[float] = (),
    ) -> "list[Scored]":
        """Log-probabilities of turns after contexts."""
        return self.after(contexts)(turns, temperatures)


class Loaded:
    """The model that a run was sampled from: its files, and the workers that have its weights, each
    loaded at first use.

    Args:
        run: which one.
        place: where the model is now, if not where it was.
        crew: how many workers it has.
    """

    def __init__(self, run: Run, place: str | None, crew: "Crew") -> None:
        self.run, self.place, self.crew = run, place, crew

    @cached_property
    def spec(self) -> "ModelSpec":
        """Which model it is, and how it was loaded."""
        from ia_mech.models.load import recall

        spec = recall(self.run.settings, self.run.model["weights_hash"])
        return spec if self.place is None else replace(spec, name=self.place, revision=None)

    @cached_property
    def files(self) -> "ModelFiles":
        from ia_mech.models.embedded import MODELS
        from ia_mech.models.load import load_files

        name = self.spec.name
        try:
            return load_files(self.spec)
        except UserError as error:
            if self.place is not None or name in MODELS or expanded(name).exists():
                raise
            raise UserError(
                f"the run's model is not where it was: {error.problem}",
                f"give its place now with --model PATH, or {error.remedy}",
            ) from error

    @cached_property
    def chat(self) -> "ChatFormat":
        """The chat format with the run's settings."""
        from ia_mech.collect.plan import build_chat

        chat = build_chat(Settings.read(self.run.settings), self.files)
        if chat.describe()["template"] != self.run.record["identity"]["chat"]["template"]:
            raise UserError(
                f"the chat template of {self.run.model['name']} is not the one that "
                f"{self.run.path} was sampled with",
                "sample the run again",
            )
        return chat

    @cached_property
    def team(self) -> "Team":
        """The workers, their model checked as before sampling."""
        from ia_mech.collect.job import opened
        from ia_mech.collect.plan import probe_ids
        from ia_mech.engine.cluster import team_of
        from ia_mech.models.load import remember

        if (steered := self.run.settings["intervention"]) is not None:
            raise UserError(
                f"{self.run.path} was sampled under --intervention {steered}: scored again, its "
                "turns would be those of another model",
                "give a run that was sampled without one",
            )
        ids = probe_ids(self.chat)
        team = team_of(self.spec, self.crew, Bar())
        found = team.begin(opened, ids, team.device, False, False)
        there, here = self.run.model["weights_hash"], found.about["weights_hash"]
        if here != there:
            raise UserError(
                f"{self.spec.name} has the weights {here} now, {self.run.path} those of {there}",
                "give the place of the same weights with --model PATH, or sample the run again",
            )
        remember(self.spec, here)
        return team

    def measure(self, unit: Unit, progress: Progress) -> pd.DataFrame:
        """The rows of a unit, measured now, by a worker."""
        from ia_mech.engine.memory import Backoff

        ticked, named = 0, " ".join(split_source(unit.source))  # dataset and query

        def tick(tokens: int) -> None:
            nonlocal ticked
            ticked += tokens
            progress.advance(tokens, self.team.devices().removeprefix(", "))

        def measured(size: int) -> pd.DataFrame:
            what = rows_of, self.chat, unit, SHARES // size
            return self.team.call(*what, listener=SimpleNamespace(advance=tick))

        def shrank(size: int) -> None:
            progress.say(f"out of memory: passes of {named!r} hold 1/{SHARES // size} now")

        try:
            rows = Backoff(SHARES, shrank).retry(measured)
        except Exception as error:
            error.add_note(f"This was of {named!r}; units before it are kept.")
            raise
        progress.advance(max(unit.tokens - ticked, 0))
        return rows


def rows_of(
    subject: "Subject", chat: "ChatFormat", unit: Unit, share: int, listener: Any
) -> pd.DataFrame:
    """The rows of a unit, in passes that hold one part in ``share`` of what they may."""
    from ia_mech.engine.memory import smaller_passes

    with smaller_passes(share):
        return unit.rows(Model(subject, chat, listener.advance))


def measure(
    units: Sequence[Unit], model: Loaded, files: Sequence[Path], phase: str
) -> pd.DataFrame:
    """The rows of units one below the other, with ``source`` and ``dataset``: kept ones, and what
    the model measures now, several at once."""
    from ia_mech.engine.workers import compute_in_workers

    tables = {n: table for n, file in enumerate(files) if (table := kept(file)) is not None}
    todo = [n for n in range(len(units)) if n not in tables]
    if tables:
        print(f"{len(tables)} of {len(units)} units were measured before", file=sys.stderr)
    bar, total = Bar(), sum(unit.tokens for unit in units)

    def done(n: int, table: pd.DataFrame) -> None:
        tables[n] = table
        files[n].parent.mkdir(parents=True, exist_ok=True)
        replace_file(files[n], partial(table.to_parquet, write_page_checksum=True))

    if todo:
        team, left = model.team, sum(units[n].tokens for n in todo)
        team.spread(model.crew, len(units))
        how = done, team.most, team.threads, team.ready
        bar.start(phase, total, done=total - left, unit="token")
        try:
            compute_in_workers(todo, lambda n: model.measure(units[n], bar), *how)
        finally:
            bar.stop()
    every = [tables[n].assign(source=u.source, dataset=u.dataset) for n, u in enumerate(units)]
    return pd.concat(every, ignore_index=True)


# -- kept ------------------------------------------------------------------------------------------


def file_of(folder: Path, experiment: str, unit: Unit, run: Run) -> Path:
    """Where the rows of a unit are kept: by its content, the run's model, and the code that
    measures it. The code counts as text, so that it is the same for any version of Python."""
    modules = {kind.__module__ for kind in type(unit).__mro__} - {__name__, "builtins"}
    code = sorted(
        hash_of((Path(inspect.getfile(sys.modules[name])),))
        for name in modules_of(frozenset(modules))
    )
    key = [experiment, code, run.model["weights_hash"], run.model["dtype"], type(unit).__name__]
    # But for NumPy's numbers, JSON can hold all of it.
    text = json.dumps([*key, *engine_of(), asdict(unit)], default=lambda value: value.tolist())
    return folder / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.parquet"


def kept(file: Path) -> pd.DataFrame | None:
    """The rows of a unit; None if they aren't there, or are damaged."""
    try:
        return pq.read_table(file, page_checksum_verification=True).to_pandas()
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        return None


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

    return frozenset(measuring | (closed(list(measuring)) - closed([RUNNER])))


def engine_of() -> list[str]:
    """What computes with the model: our code as a hash, and torch's version on any machine."""
    import torch

    package = Path(inspect.getfile(UserError)).parent
    files = (sorted((package / name).glob("*.py")) for name in ("engine", "likelihood"))
    return [hash_of((*chain.from_iterable(files),)), torch.__version__.partition("+")[0]]
