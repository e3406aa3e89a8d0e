"""The main job as a function: conversations in, a run on disk out.

``chat`` knows templates and text, ``engine`` knows token ids and tensors; this module is where the
two meet. It plans the parts of a run, has workers compute those that aren't there, and writes each.
Where the subject model has to write responses itself, that comes first, in parts of their own. Then
every context is prefilled once, and that one pass feeds the captured residual stream, the header
logits, all sampled rows and the scores of real follow-ups.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from safetensors import SafetensorError

from ia_mech.chat.format import ChatContext
from ia_mech.cli import one_line
from ia_mech.collect.compute import DRAWS, Drawn, Query, Recipe
from ia_mech.collect.cost import check_disk, run_bytes
from ia_mech.collect.machine import machine, machine_changes
from ia_mech.collect.memory import Memory
from ia_mech.collect.parts import Parts
from ia_mech.collect.plan import Plan, probe_ids
from ia_mech.collect.progress import PartProgress, PhaseProgress
from ia_mech.collect.rows import ContextResult, PreparedContext, tables
from ia_mech.data.conversations import Conversation
from ia_mech.display import Progress
from ia_mech.engine.check import check_engine
from ia_mech.engine.cluster import team_of
from ia_mech.engine.intervene import Intervention
from ia_mech.engine.memory import Backoff, Footprint, footprint, part_bytes
from ia_mech.engine.shared import Engine
from ia_mech.engine.splice import Foreign
from ia_mech.engine.workers import ANY, Crew, Team, compute_in_workers, usable_cores
from ia_mech.errors import UserError, exhaustion
from ia_mech.lens import save_lens
from ia_mech.models.load import Subject, remember
from ia_mech.run import Run, RunWriter
from ia_mech.run.integrity import without_folders
from ia_mech.run.reader import UNANSWERED
from ia_mech.settings import WHOLE, Shard, flag_of

# What is changed in the context of a conversation.
Interventions = Callable[[Conversation, ChatContext], Sequence[Intervention | Foreign]]
PATIENCE = 1  # seconds between looks at the parts that other processes compute


def make_run(plan: Plan, progress: Progress, *, shard: Shard = WHOLE, crew: Crew = ANY) -> Run:
    """Load the model, and make a run as :func:`collect` does; keep the model's lens as well."""
    settings = plan.settings
    if plan.data.text:
        progress.say(f"{one_line(settings.dataset)}: {plan.data.text}")
    team = team_of(settings.model_spec, crew, progress)
    run = collect(plan, team, progress, shard=shard, crew=crew)
    if run.counts["contexts"]:
        ids = run.contexts["token_ids"].iloc[0].tolist()[:64]
        try:
            problem = save_lens(team, run.model["weights_hash"], ids)
        except (OSError, SafetensorError, RuntimeError) as error:  # the run is whole without it
            problem = str(error)
        if problem:
            progress.say(f"note: no offline lens for this model: {problem}")
    return run


class Opened(NamedTuple):
    """What is known of a model where it is loaded."""

    about: dict  # what run.json records of it
    engine: Engine
    size: Footprint
    itemsize: int  # bytes of a number
    room: int  # bytes that a part may take there
    machine: dict
    cores: int


def opened(
    subject: Subject, ids: Sequence[int], device: torch.device, ignore: bool, everywhere: bool
) -> Opened:
    """Check a loaded model with ids, and say what is known of it then. ``ignore``: go on if the
    check fails; ``everywhere``: the weights are distributed over all GPUs."""
    engine = check_engine(subject.model, ids, ignore=ignore)
    size, itemsize = footprint(subject.model), subject.model.dtype.itemsize
    room = part_bytes(device, size.weights, everywhere)
    about, here = subject.describe(), machine(subject)
    return Opened(about, engine, size, itemsize, room, here, usable_cores())


def collect(
    plan: Plan,
    subject: Subject | Team,
    progress: Progress,
    *,
    shard: Shard = WHOLE,
    crew: Crew = ANY,
    interventions: Interventions | None = None,
) -> Run:
    """Make a run, or go on with it if the folder holds one of the same plan.

    Args:
        subject: the model, or the workers that have it.
        crew: how many workers compute at once, on which no row depends, and how many threads each
            has, which changes rounding. Without a wish, a worker has as many threads as the run was
            begun with, but no more than there are cores.
        interventions: what is changed in each context while it is prefilled. Everything that it
            depends on has to be in the conversations' metadata, which is part of the run's
            identity.

    Raises:
        UserError: anything wrong with model, folder or disk; nothing is written then that a later
            call wouldn't use.
    """
    settings, out, parts = plan.settings, plan.out, len(plan.parts.contexts)
    team = Team(subject) if isinstance(subject, Subject) else subject
    how = settings.ignore_check, settings.device_map is not None
    found = team.begin(opened, probe_ids(plan.chat), plan.device, *how)
    on_cpu, there = team.device.type == "cpu", (found.cores, 0)
    if plan.vector is not None:
        plan.vector.check_weights(found.about["weights_hash"])
    weights = {"model": found.about, "engine": found.engine.name}
    record = plan.record | {
        "identity": without_folders(plan.identity | weights),
        "part_room": found.room,
        "footprint": asdict(found.size),
        "threads": crew.for_items(parts, on_cpu=on_cpu, machine=there)[1],
    }
    mine = plan.parts.of_shard(shard)
    try:
        check_disk(run_bytes(plan, mine, found.itemsize), out)
        with RunWriter(out, record, flag_of) as writer:
            memory = Memory(plan, found.size, writer.record["part_room"])
            threads = crew.threads or min(writer.record["threads"], found.cores)
            for note in plan.data.notes:
                progress.say(f"note: {note}")
            remember(settings.model_spec, found.about["weights_hash"])
            team.spread(Crew(crew.workers, threads), parts, memory.part_bytes)
            job = _Job(plan, team, memory, mine, writer, progress, interventions)
            job.work(found, shard, threads)
    except BrokenPipeError:  # of the progress, not of the run
        raise
    except OSError as error:
        lacking = exhaustion(error)
        remedy = lacking.remedy if lacking else "check its disk, or give another --out"
        raise UserError(
            f"{error.filename2 or out} could not be written ({error.strerror or error})",
            f"{remedy}; the same command then goes on from what is kept",
        ) from error
    return Run.open(out, unfinished=True)


@dataclass
class _Job:
    """The work of one process on one run: parts are prepared, computed by workers, and written."""

    plan: Plan
    team: Team
    memory: Memory
    parts: Parts
    writer: RunWriter
    progress: Progress
    interventions: Interventions | None

    def __post_init__(self) -> None:
        self.settings = self.plan.settings
        # Without its data, which workers are given in parts.
        settings = replace(self.settings, dataset="builtin")
        self.recipe = Recipe(settings, self.plan.chat, self.plan.positions)

    def work(self, found: Opened, shard: Shard, threads: int) -> None:
        """Compute and write what isn't there yet, with workers of so many threads."""
        self.engine = found.engine
        responses = self._todo("responses", self.parts.responses)
        contexts = self._todo("contexts", self.parts.contexts)
        if responses or contexts:
            self._begin_session(found, shard, threads)
            try:
                if responses:
                    self._write_responses(responses)
                if contexts:
                    self._write_contexts(contexts)
            finally:
                self.progress.stop()
        else:
            here = self.writer.path
            done = here if Run(here).complete else f"this shard of {here}"
            line = f"{done} was finished before; nothing was computed again"
            if not self.parts.contexts:
                line = f"this shard has no part of {here}: the run has fewer parts than shards"
            self.progress.say(line)
        self.writer.finish()

    def _todo(self, kind: str, parts: dict[str, list[int]]) -> list[str]:
        """The parts that no process has written yet, or that are damaged."""
        for problem in self.writer.find_damage(kind, parts):
            self.progress.say(f"{problem}; it is computed again")
        done = self.writer.finished_parts(kind)
        return [name for name in parts if name not in done]

    def _begin_session(self, found: Opened, shard: Shard, threads: int) -> None:
        here, say = {"threads": threads} | found.machine, self.progress.say
        for before in Run(self.writer.path).sessions[-1:]:
            if changed := machine_changes(before, here):
                say(
                    f"note: {changed} since this run was last worked on; turns written now may "
                    "round differently"
                )
        about, engine = found.about, found.engine
        if not self.team.named:
            say(
                f"{self.settings.model}: {about['layers']} layers, d_model {about['d_model']}, "
                f"{about['dtype']} on {about['device']}, weights {about['weights_hash']}"
            )
            checked = "" if self.settings.ignore_check else "agrees with plain forward passes; "
            say(f"engine: {checked}{engine}")
            self.team.named = True
        if self.plan.vector is not None:
            plain = engine.captured and self.plan.vector.at_turn
            say(f"steered: {self.plan.vector}{'; such steps are not captured' if plain else ''}")
        if self.plan.skipped:
            say(f"skipped: {len(self.plan.skipped)}, such as {self.plan.skipped[0]}")
        if engine.ignored:
            say(f"note: ignored check: {engine.ignored}")
            here["ignored_check"] = engine.ignored
        self.writer.start_session(here | {"shard": list(shard), "workers": self.team.ready()})

    def _compute_parts(
        self,
        kind: str,
        work: PhaseProgress,
        parts: Iterable[str],
        rows: int,
        prepare: Callable[[str], list],
        compute: Callable[[str, list, int, PartProgress], tuple[list, Engine]],
        write: Callable[[str, list, list, int | None], None],
    ) -> None:
        """Have workers compute parts. This thread prepares each part before, and writes it after.

        It waits for parts that other processes compute, and takes over those that they give up.
        Where memory runs out, a part is computed again with fewer rows at a time; parts that come
        after it and begin later have no more rows than that.

        Args:
            rows: how many each prepared thing has.
            compute: what was prepared of a part, at most so many rows at a time; it says, too, how
                the worker's engine computes.
            write: is given a part's name, what it was computed from, what came out, and how many
                rows memory allowed if those were fewer, since rounding depends on it.
        """
        most, named = self.plan.batch_rows, getattr(self.parts, kind)
        limits: dict[str, int] = {}  # of parts at which memory ran out

        def computed(item: tuple[str, list]) -> tuple[tuple[list, Engine], int, PartProgress]:
            name, prepared = item
            begun = work.begin(name)

            def shrank(limit: int) -> None:
                limits[name] = limit
                line = f"out of memory: going on with batches of {limit} turns or fewer"
                self.progress.say(line)

            earlier = [limit for part, limit in list(limits.items()) if part < name]
            fitting = self.memory.together(kind, named[name])[0]
            backoff = Backoff(min([fitting, *earlier]), shrank)
            count = max(1, rows * len(prepared))
            made = backoff.retry(lambda limit: compute(name, prepared, limit, begun), count)
            return made, backoff.limit, begun

        def finished(
            item: tuple[str, list], outcome: tuple[tuple[list, Engine], int, PartProgress]
        ) -> None:
            (name, prepared), ((results, engine), limit, begun) = item, outcome
            if engine.uncaptured != self.engine.uncaptured:
                self.progress.say(f"note: steps aren't captured now ({engine.uncaptured})")
            self.engine = engine
            write(name, prepared, results, limit if limit < most else None)
            begun.end()

        work.devices = self.team.devices
        left, waiting = list(parts), False
        while left:
            mine = (name for name in left if self.writer.claim(kind, name))
            items = ((name, prepare(name)) for name in mine)
            team = self.team
            compute_in_workers(items, computed, finished, team.most, team.threads, team.ready)
            done = self.writer.finished_parts(kind)
            work.pass_over([name for name in left if name in done])
            left = [name for name in left if name not in done]
            if left and not waiting:
                self.progress.say(f"waiting for {len(left)} part(s) that other processes compute")
                waiting = True
            if left:
                time.sleep(PATIENCE)
        self.progress.stop()

    # -- responses ------------------------------------------------------------------------------

    def _write_responses(self, todo: list[str]) -> None:
        queries = {name: self._queries(part) for name, part in self.parts.responses.items()}
        # Responses share the prompt's prefill.
        sizes = {
            name: (sum(len(one.orders) for one in part), sum(len(one.prompt) for one in part))
            for name, part in queries.items()
        }
        most = self.settings.max_response_tokens
        draws = DRAWS if self.settings.wants_finished else 1
        work = PhaseProgress(self.progress, "responses", "response", sizes, todo, most, draws)

        def compute(
            name: str, some: list[Query], limit: int, begun: PartProgress
        ) -> tuple[list[list[Drawn]], Engine]:
            begun.keep = partial(self.writer.keep_batches, name, limit)
            kept = self.writer.kept_batches(name, limit)
            what = some, limit, self.memory.waiting, kept
            return self.team.call(self.recipe.respond, *what, listener=begun)

        each = self.settings.responses
        prepare, write = queries.__getitem__, self._write_response_part
        self._compute_parts("responses", work, todo, each, prepare, compute, write)

    def _queries(self, orders: list[int]) -> list[Query]:
        """What the model writes for contexts of these orders: all responses to a query at once."""
        planned, found = self.plan.contexts, []
        writing = (order for order in orders if planned[order].prompt)
        for _, own in groupby(writing, lambda order: planned[order].conversation.query_id):
            together = tuple(own)
            first = planned[together[0]]
            found.append(Query(together, first.prompt, first.conversation.source_id))
        return found

    def _write_response_part(
        self, name: str, queries: list[Query], drawn: list[list[Drawn]], limit: int | None
    ) -> None:
        rows = [
            {
                "query": query.orders[0],
                "draw": draw,
                "order": one.order,
                "response": one.said.text,
                "thought": one.said.thought,
                "finish_reason": one.finish_reason,
                # Without the turn-end, as the tokens of a given response are counted.
                "tokens": len(one.token_ids) - (one.ended == "turn_end"),
            }
            for query, own in zip(queries, drawn, strict=True)
            for draw, one in enumerate(own)
        ]
        self.writer.add_responses(name, rows, limit, self.engine.captured)

    # -- contexts -------------------------------------------------------------------------------

    def _write_contexts(self, todo: list[str]) -> None:
        each, planned = len(self.settings.rows()), self.plan.contexts
        sizes = {
            name: (each * len(part), sum(planned[i].tokens for i in part))
            for name, part in self.parts.contexts.items()
        }
        run = Run(self.writer.path)
        if problem := run.unanswered_text:
            run.refuse_unanswered()
            self.progress.say(f"note: left out: {problem}; to keep more, {UNANSWERED}")
        most = self.settings.max_new_tokens
        work = PhaseProgress(self.progress, "user turns", "turn", sizes, todo, most)
        taken = run.responses.dropna(subset="order").to_dict("records")
        written = {int(row["order"]): row for row in taken}

        def prepare(name: str) -> list[PreparedContext]:
            part = self.parts.contexts[name]
            usable = [order for order in part if order in written or not planned[order].prompt]
            made = [self._prepare(order, written.get(order)) for order in usable]
            return [one for one in made if one is not None]

        def write(
            name: str,
            contexts: list[PreparedContext],
            results: list[ContextResult],
            limit: int | None,
        ) -> None:
            made = tables(contexts, results, self.settings, self.plan.chat)
            steered = any(context.at_turn for context in contexts)
            self.writer.add_contexts(name, *made, limit, self.engine.captured and not steered)

        def compute(
            _: str, some: list[PreparedContext], limit: int, begun: PartProgress
        ) -> tuple[list[ContextResult], Engine]:
            return self.team.call(self.recipe.contexts, some, limit, listener=begun)

        self._compute_parts("contexts", work, todo, each, prepare, compute, write)

    def _prepare(self, order: int, written: dict | None) -> PreparedContext | None:
        """A context ready for the engine. It is None, and that is said, where the template refuses
        the response that the model wrote."""
        planned, vector = self.plan.contexts[order], self.plan.vector
        conversation, rendered = planned.conversation, planned.rendered
        try:
            if written is not None:
                thought = written["thought"] if isinstance(written["thought"], str) else None
                conversation = conversation.with_response(written["response"], thought)
                rendered = self.plan.render(conversation)
            assert rendered is not None
            context, turn = rendered
            steered: list[Intervention | Foreign] = []
            if vector is not None:
                steered += vector.at_context(context.positions)
            if self.interventions is not None:
                steered += self.interventions(conversation, context)
        except UserError as error:
            if written is None:
                raise
            self.progress.say(f"conversation {conversation.id} is left out: {error.problem}")
            return None
        at_turn = vector.at_turn if vector else ()
        at_context = tuple(one for one in steered if not isinstance(one, Foreign))
        foreign = next((one for one in steered if isinstance(one, Foreign)), None)
        what = order, conversation, written, context, turn, at_context, at_turn
        return PreparedContext(*what, foreign)
