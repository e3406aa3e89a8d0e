"""How the command of an experiment runs: models, units, plan, result.

What is measured is kept by unit in ``parts/`` of the results, under a name that is a hash of all
that it depends on. So a stopped command goes on, and what was changed is measured again.
"""

import argparse
import hashlib
import inspect
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from experiments.arms import CHAT, DECODING, Arm
from experiments.shown import estimates_of, headline, print_plan
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
from ia_mech.estimates import few_sources
from ia_mech.rates.fit import marked
from ia_mech.rates.load import open_runs
from ia_mech.results import (
    LOCK,
    Result,
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
from ia_mech.run.sources import split_source
from ia_mech.settings import Settings

if TYPE_CHECKING:  # these load torch
    from experiments.experiment import Experiment, Unit
    from ia_mech.chat.format import ChatFormat
    from ia_mech.engine.workers import Crew, Team
    from ia_mech.models.load import ModelFiles, ModelSpec, Subject

SHARES = 64  # where memory runs out, a pass holds no less than this part of what it usually may


# -- the model -------------------------------------------------------------------------------------


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

    def measure(self, unit: "Unit", progress: Progress) -> pd.DataFrame:
        """The rows of a unit, measured now, by a worker."""
        from ia_mech.engine.memory import Backoff

        ticked, named = 0, " ".join(split_source(unit.source))  # dataset and query

        def tick(tokens: int) -> None:
            nonlocal ticked
            ticked += tokens
            progress.advance(tokens, self.team.devices().removeprefix(", "))

        def measured(size: int) -> pd.DataFrame:
            tick(-ticked)  # of a try that memory was too small for
            what, listener = (
                (rows_of, self.chat, unit, SHARES // size),
                SimpleNamespace(advance=tick),
            )
            return self.team.call(*what, listener=listener)

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
    subject: "Subject", chat: "ChatFormat", unit: "Unit", share: int, listener: Any
) -> pd.DataFrame:
    """The rows of a unit, in passes that hold one part in ``share`` of what they may."""
    from experiments.experiment import Model
    from ia_mech.engine.memory import smaller_passes

    with smaller_passes(share):
        return unit.rows(Model(subject, chat, listener.advance))


# -- units -----------------------------------------------------------------------------------------


def measure(one: "Experiment", units: "Iterable[Unit]", phase: str = "") -> pd.DataFrame:
    """The rows of units one below the other, with ``source`` and ``dataset``.

    Several are measured at once, by workers. Finished units are kept, and aren't measured again
    unless something changes of what :func:`file_of` holds.

    Raises:
        UserError: there is no unit.
    """
    from ia_mech.engine.workers import compute_in_workers

    units = at_least_one(one, units)
    files = [file_of(one, unit) for unit in units]
    tables = {n: table for n, file in enumerate(files) if (table := kept(file)) is not None}
    todo = [n for n in range(len(units)) if n not in tables]
    if tables:
        print(f"{len(tables)} of {len(units)} units were measured before", file=sys.stderr)
    models = {n: one.model_of(one.run_for(units[n])) for n in todo}
    for model in {*models.values()}:
        model.team.spread(model.crew, len(units))
    bar, total = Bar(), sum(unit.tokens for unit in units)
    before = total - sum(units[n].tokens for n in todo)

    def done(n: int, table: pd.DataFrame) -> None:
        tables[n] = table
        files[n].parent.mkdir(parents=True, exist_ok=True)
        replace_file(files[n], partial(table.to_parquet, write_page_checksum=True))

    if todo:
        team = models[todo[0]].team
        bar.start(phase or f"measuring, {one.name}", total, done=before, unit="token")
        try:
            how = team.most, team.threads, team.ready
            compute_in_workers(todo, lambda n: models[n].measure(units[n], bar), done, *how)
        finally:
            bar.stop()
    every = [tables[n].assign(source=u.source, dataset=u.dataset) for n, u in enumerate(units)]
    return pd.concat(every, ignore_index=True)


def at_least_one(one: "Experiment", units: "Iterable[Unit]") -> "list[Unit]":
    found = list(units)
    if not found:
        raise UserError(
            f"{one.runs[0].path} holds nothing that {one.name} could measure",
            "".join(one.notes[-1:]) or "see what it needs in --help",
        )
    return found


def file_of(one: "Experiment", unit: "Unit") -> Path:
    """Where a unit's rows are kept, by all that they depend on: its content, the model, and the
    code that measures it. The code counts as text, so that it is the same for any version of
    Python."""
    model = one.run_for(unit).model
    modules = {kind.__module__ for kind in type(unit).__mro__} - {RUNNER, "builtins"}
    code = sorted(
        hash_of((Path(inspect.getfile(sys.modules[name])),))
        for name in modules_of(frozenset(modules))
    )
    key = [one.name, code, model["weights_hash"], model["dtype"], type(unit).__name__]
    # But for NumPy's numbers, JSON can hold all of it.
    text = json.dumps([*key, *engine_of(), asdict(unit)], default=lambda value: value.tolist())
    name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return one.folder / "parts" / f"{name}.parquet"


def kept(file: Path) -> pd.DataFrame | None:
    """The rows of a unit; None if they aren't there, or are damaged."""
    try:
        return pq.read_table(file, page_checksum_verification=True).to_pandas()
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        return None


RUNNER = "experiments.experiment"  # what it imports measures nothing


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


# -- the plan --------------------------------------------------------------------------------------


def plan(one: "Experiment") -> dict[str, str]:
    """What would be sampled and measured: name → how much."""
    lines, tokens, todo, arms, units = {}, 0, 0, one.arms(), one.units()
    to_sample = []
    for name, arm in arms.items():
        place, turns = one.place(name) / "run", f"{arm.rows(one.runs[0])} turns after each"
        lines[name] = f"{len(arm.conversations)} conversations to sample {turns}"
        if (place / RUN).is_file() and Run.open(place).complete:
            lines[name] += "; done already"
        else:
            to_sample.append(arm)
    if units is not None:
        units = at_least_one(one, units)
        lacking = [unit for unit in units if kept(file_of(one, unit)) is None]
        tokens, todo = sum(unit.tokens for unit in lacking), len(lacking)
        queries = len({unit.source for unit in units})
        lines["to measure"] = (
            f"{len(units)} units of {queries} queries; {len(units) - todo} are measured already, "
            f"the others have about {tokens:,} tokens"
        )
    if to_sample or todo:
        lines["time"] = time_of(one, to_sample, tokens, todo)
    lines = lines or {"to compute": "nothing: the runs hold all that is read"}
    if one.too_few:
        lines["too few queries"] = one.too_few
    lines["numbers"] = f"go to {shell_word(one.folder)}"
    return lines | ({"new turns": f"go to {shell_word(one.beside)}"} if arms else {})


def time_of(one: "Experiment", arms: Sequence[Arm], tokens: int, units: int) -> str:
    """About how long it takes to sample arms, and to measure units of so many tokens."""
    import torch

    from ia_mech.collect.cost import Pace, time_text
    from ia_mech.models.load import resolve_device

    first = one.runs[0]
    device = resolve_device(first.settings["device"])  # here, wherever the run was made
    pace = Pace(one.config, getattr(torch, first.model["dtype"]), device)
    longest = int(first.contexts["context_tokens"].max())
    seconds = pace.seconds(tokens, 2 * units)
    for arm in arms:
        contexts, rows = len(arm.conversations), len(arm.conversations) * arm.rows(first)
        new = arm.settings.get("max_new_tokens", first.settings["max_new_tokens"])
        batches = -(-rows // first.settings["batch_rows"])
        seconds += pace.seconds(contexts * longest, contexts)
        seconds += pace.seconds(rows * new, batches * new)
    return time_text(seconds)


# -- the command -----------------------------------------------------------------------------------


def build_parser(cls: "type[Experiment]") -> argparse.ArgumentParser:
    name, file = cls.folder_name(), Path(inspect.getfile(cls)).resolve()
    ours = file.parent == Path(__file__).resolve().parent
    parser = Parser(
        prog=f"ia-mech {name}" if ours else f"python {file.name}",
        usage="%(prog)s RUN [RUN …] [options]",
        description=cls.help(),
        epilog=f"Numbers go to RUN/results/{name}/, new turns to RUN-{name}/ beside RUN.\n"
        "If it is interrupted, the same command goes on. Intervals are over queries.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=run_folder, metavar="RUN", help="a run's folder")
    if cls.judged:
        add("--judge", metavar="NAME", help=JUDGE_HELP)
    if (most := cls.queries_used) is not None:
        what = f"at most N queries, drawn by --seed (default: {most})"
        add("--queries", type=whole_from(2), default=most, metavar="N", help=what)
    if cls.loads:
        where = "where the runs' model is now (default: where it was)"
        add("--model", type=nonblank, metavar="PATH", help=where)
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


def main(cls: "type[Experiment]", argv: list[str] | None = None) -> int:
    tolerant_streams()
    parser = cls.build_parser()
    args = parser.parse_args(argv)
    args.command_line = command_line(parser, args)
    kept = "what was computed is kept; the same command goes on from there"
    return run_command(lambda: command(cls, args), lambda: kept, args.threads)


def command(cls: "type[Experiment]", args: argparse.Namespace) -> None:
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
        made = with_style(result)(one)
        known = kind_of(one.folder)
        earlier = read(one.folder).about["command"] if known else args.command_line
        write(made, one.folder)
    show(made, console(), full=args.full)  # after writing: a closed pipe costs no file
    print(f"numbers went to {shell_word(one.folder)}", file=sys.stderr)
    if one.sampled:
        print(f"new turns went to {shell_word(one.beside)}", file=sys.stderr)
    if earlier != args.command_line:
        print(f"this replaced the result of: {earlier}", file=sys.stderr)
    page = f"{program()} report {' '.join(map(shell_word, args.runs))}"
    print(f"next: {page}{f' --results {shell_word(args.out)}' if args.out else ''}")


def result(one: "Experiment") -> Result:
    """Sample, measure, estimate, conclude."""
    for name, arm in one.arms().items():
        one.sample(name, arm)
    rows = one.rows()
    found = estimates_of(one.estimate(rows), one.columns, one.args.level)
    sentence, control = one.conclude(found)
    gate = {"judge": one.gate.judge, "gate": one.gate.word} if one.judged else {}
    used, queries, samples = [*one.runs, *one.sampled.values()], [], {}
    if {"temperature", "sample"} <= {*rows} and (sampled := rows["temperature"] > 0).any():
        samples["samples"] = int(rows.loc[sampled, "sample"].max()) + 1
    if "queries" in vars(one):  # they were read
        complete = [each for query in one.queries for each in query.complete]
        note = f"{len(one.queries)} queries, {len(complete)} responses"
        cut = complete.count(False)
        queries.append(f"{note}, {cut} of them unfinished." if cut else f"{note}.")
    names = {str(run.path): run.name for run in used}  # no folders of this machine in files
    made = Result(
        name=one.name,
        question=one.question(),
        sentence=headline(sentence, found),
        control=control,
        estimates=found,
        tables=one.tables(found),
        figures={stem: figure.draw() for stem, figure in one.figures(found).items()},
        notes=[*queries, *one.notes, *few_sources(found)],
        about={"kind": one.name, "level": one.args.level, "command": one.args.command_line}
        | gate
        | samples
        | about_runs(used, [gate["judge"]] if gate else []),
        data={
            stem: frame.assign(run=frame["run"].replace(names)) if "run" in frame else frame
            for stem, frame in one.data(rows).items()
        },
        files=one.files(),
    )
    return marked(made, one.verdicts.record) if one.judged else made


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


def output_folder(cls: "type[Experiment]", out: Path | None, first_run: Path) -> Path:
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
