"""The main job as a function: conversations in, a run on disk out.

``chat`` knows templates and text, ``engine`` knows token ids and tensors; this module is where the
two meet. Where the subject model has to write responses itself, that comes first, in parts of their
own. Then every context is prefilled once, and that one pass feeds the captured residual stream, the
header logits, all sampled rows and the scores of reference turns.
"""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import context_and_reference
from ia_mech.cli import using_threads
from ia_mech.collect.identity import (
    build_chat,
    eos_ids,
    identity,
    machine,
    machine_changes,
    probe_ids,
    requested_identity,
)
from ia_mech.collect.parts import (
    Inputs,
    Parts,
    Survey,
    check_disk,
    check_model,
    check_without_weights,
    flag_of,
    kept_positions,
    open_inputs,
    plan_parts,
    run_bytes,
    survey,
    without_response,
)
from ia_mech.collect.progress import PhaseProgress
from ia_mech.collect.rows import ContextResult, PreparedContext, tables
from ia_mech.display import Progress
from ia_mech.engine.capture import find_blocks
from ia_mech.engine.check import check_engine
from ia_mech.engine.decode import Decoded, Row, decode
from ia_mech.engine.memory import Backoff
from ia_mech.engine.sampling import compile_failure, response_stream_key, stream_key
from ia_mech.engine.score import Scored, Turn, score
from ia_mech.engine.shared import Engine
from ia_mech.engine.state import Prefilled, Prefix, prefill_all
from ia_mech.errors import UserError, exhaustion
from ia_mech.lens import save_lens
from ia_mech.likelihood.reference import scored_temperatures
from ia_mech.models.load import Subject, load, remember
from ia_mech.run import Run, RunWriter, integrity, layout
from ia_mech.settings import WHOLE, Settings, Shard


def make_run(
    settings: Settings,
    out: Path,
    progress: Progress,
    *,
    shard: Shard = WHOLE,
    threads: int | None = None,
) -> Run:
    """Load the model and make a run, or go on with it; keep the model's lens as well.

    What needs no weights is refused before they are fetched.

    Args:
        shard: which shard of the run to make, and of how many.
        threads: of the computations on a CPU; None for those that the run was begun with, or all
            cores. Their number changes rounding.

    Other arguments and Raises: see :func:`collect`.
    """
    inputs = check_without_weights(settings, out)
    with using_threads(threads or _threads_before(out, shard)):
        subject = load(settings.model_spec)
        run = collect(settings, subject, out, progress, inputs=inputs, shard=shard)
        if run.counts["contexts"]:
            try:
                problem = save_lens(subject, run.contexts["token_ids"].iloc[0].tolist()[:64])
            except (OSError, SafetensorError, RuntimeError) as error:  # the run is whole without it
                problem = str(error)
            if problem:
                progress.say(f"note: no offline lens for this model: {problem}")
    return run


def _threads_before(out: Path, shard: Shard) -> int | None:
    """How many threads a shard of a run was begun with, else another shard; None if none was."""
    for file in (out / layout.manifest_file(shard), *sorted(out.glob("manifest*.json"))):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # or it is damaged
            return int(integrity.read_json(file)["sessions"][-1]["threads"])
    return None


def collect(
    settings: Settings,
    subject: Subject,
    out: Path,
    progress: Progress,
    *,
    inputs: Inputs | None = None,
    shard: Shard = WHOLE,
) -> Run:
    """Make a run, or go on with it if the folder holds one of the same settings.

    Args:
        settings: of the run.
        subject: its model.
        out: the run's folder.
        progress: shows what is done.
        inputs: what :func:`ia_mech.collect.parts.open_inputs` returned, if it was called.
        shard: which shard of the run to make, and of how many.

    Raises:
        UserError: anything wrong with data, template, folder or disk; nothing is written then that
            a later call wouldn't use.
    """
    inputs, model = inputs or open_inputs(settings, out), subject.model
    chat = build_chat(settings, subject.tokenizer, eos_ids(model.generation_config, model.config))
    check_model(settings, inputs, chat, model.config)
    if inputs.vector is not None:
        inputs.vector.check_weights(subject.weights_hash)
    engine = check_engine(model, probe_ids(chat), ignore=settings.ignore_check)
    surveyed = survey(inputs, settings, chat, model.config)
    parts = plan_parts(surveyed, settings, model.config, model.dtype.itemsize)
    settings = replace(settings, batch_rows=parts.batch_rows)
    positions = kept_positions(settings, chat)
    requested = requested_identity(settings, positions, surveyed.facts, inputs.vector)
    record = {
        "identity": identity(subject, chat, engine, requested),
        "parts": parts.counts,
        "source": inputs.source.description | {"dataset": requested["settings"]["dataset"]},
    }
    mine = parts.of_shard(shard)
    lengths = [surveyed.lengths[order] for part in mine.contexts.values() for order in part]
    needed = run_bytes(settings, positions, model.config, model.dtype.itemsize, lengths)
    try:
        check_disk(needed, out)
        with RunWriter(out, record, shard, flag_of) as writer:
            for note in surveyed.notes:
                progress.say(f"note: {note}")
            remember(settings.model_spec, subject.weights_hash)
            _Job(settings, inputs, subject, chat, engine, surveyed, mine, writer, progress).work()
    except BrokenPipeError:  # of the progress, not of the run
        raise
    except OSError as error:
        lacking = exhaustion(error)
        remedy = lacking.remedy if lacking else "check its disk, or give another --out"
        raise UserError(
            f"{error.filename2 or out} could not be written ({error.strerror or error})",
            f"{remedy}; the same command then goes on from what is kept",
        ) from error
    return Run.open(out)


class _Job:
    """The work of one process on one run."""

    def __init__(
        self,
        settings: Settings,
        inputs: Inputs,
        subject: Subject,
        chat: ChatFormat,
        engine: Engine,
        surveyed: Survey,
        parts: Parts,
        writer: RunWriter,
        progress: Progress,
    ) -> None:
        self.settings, self.inputs, self.subject, self.chat = settings, inputs, subject, chat
        self.engine, self.survey, self.parts = engine, surveyed, parts
        self.writer, self.progress = writer, progress
        self.blocks = find_blocks(subject.model)
        self.positions = kept_positions(settings, chat)
        self.backoff = Backoff(parts.batch_rows, self._batch_shrank)
        self.left_out: list[str] = []

    def _batch_shrank(self, size: int) -> None:
        self.progress.say(f"out of memory: going on with batches of {size} rows or fewer")

    @property
    def _batch_rows(self) -> int | None:
        """The most rows of a batch where memory allowed fewer than asked for: rounding depends on
        it."""
        return self.backoff.limit if self.backoff.limit < self.parts.batch_rows else None

    def work(self) -> None:
        """Compute and write what isn't there yet."""
        for problem in self.writer.damaged:
            self.progress.say(f"{problem}; it is computed again")
        self.responses = self._todo("responses", self.parts.responses)
        self.contexts = self._todo("contexts", self.parts.contexts)
        if not self.responses and not self.contexts:
            here = self.writer.path
            done = here if Run(here).complete else f"this shard of {here}"
            line = f"{done} was finished before; nothing was computed again"
            if not self.parts.responses and not self.parts.contexts:
                line = f"this shard has no part of {here}: the run has fewer parts than shards"
            self.progress.say(line)
            self.writer.finish()
            return
        self._begin_session()
        try:
            if self.responses:
                self._write_responses()
            if self.contexts:
                self._write_contexts()
        finally:
            self.progress.stop()
        self.writer.finish()

    def _todo(self, kind: str, parts: dict[str, list[int]]) -> dict[str, list[int]]:
        """The parts that no process has written yet."""
        done = self.writer.finished_parts(kind)
        return {name: orders for name, orders in parts.items() if name not in done}

    def _begin_session(self) -> None:
        here, say = machine(self.subject), self.progress.say
        before = self.writer.sessions or Run(self.writer.path).sessions
        if before and (changed := machine_changes(before[-1], here)):
            say(
                f"note: {changed} since this run was last worked on; rows computed now may round "
                "differently"
            )
        self.writer.start_session(here)
        about = self.subject.describe()
        say(
            f"{self.settings.model}: {about['layers']} layers, d_model {about['d_model']}, "
            f"{about['dtype']} on {about['device']}, weights {about['weights_hash']}"
        )
        say(f"engine: {self.engine}")
        if self.inputs.vector is not None:
            say(f"steered: {self.inputs.vector}")
        if self.survey.skipped:
            say(f"skipped: {len(self.survey.skipped)} that can't be used, such as")
            say(f"  {self.survey.skipped[0]}")
        notes = {
            "engine": str(self.engine) if self.engine.why else "",
            "ignored_check": self.engine.ignored,
            "uncompiled": compile_failure(self.subject.device),
            "skipped": self.survey.skipped,
        }
        for name in ("ignored_check", "uncompiled"):
            if notes[name]:
                say(f"note: {name.replace('_', ' ')}: {notes[name]}")
        for name, value in notes.items():
            if value:
                self.writer.note(name, value)

    def _start_phase(
        self,
        phase: str,
        parts: dict[str, list[int]],
        todo: Collection[str],
        lengths: dict[int, int],
        rows: int,
        most: int,
        unit: str,
    ) -> PhaseProgress:
        """The progress of a phase: contexts of these ``lengths`` with so many rows each."""
        sizes = {
            name: (rows * len(orders), sum(lengths[order] for order in orders))
            for name, orders in parts.items()
        }
        before = [size for name, size in sizes.items() if name not in todo]
        done = sum(size[0] for size in before), sum(size[1] for size in before)
        left = {name: sizes[name] for name in todo}
        return PhaseProgress(self.progress, phase, left, done, most, unit)

    # -- responses ------------------------------------------------------------------------------

    def _write_responses(self) -> None:
        prompts, most = self.survey.prompts, self.settings.max_response_tokens
        orders = {
            name: [i for i in part if i in prompts] for name, part in self.parts.responses.items()
        }
        work = self._start_phase("responses", orders, self.responses, prompts, 1, most, "response")
        for name in self.responses:
            work.begin(name)
            respond = partial(self._respond, work, orders[name])
            rows = self.backoff.retry(respond, max(1, len(orders[name])))
            self.writer.add_responses(name, rows, self._batch_rows)
            work.end()
        self.progress.stop()

    def _respond(self, work: PhaseProgress, orders: Sequence[int], limit: int) -> list[dict]:
        """Responses to conversations: greedy ones, as ``generate(do_sample=False)`` writes them, or
        samples. Several to one query share its prefill."""
        limit = min(limit, self.parts.response_rows)
        responses: list[dict] = []
        for start in range(0, len(orders), limit):
            responses += self._respond_together(work, orders[start : start + limit])
        return responses

    def _respond_together(self, work: PhaseProgress, orders: Sequence[int]) -> list[dict]:
        settings, model = self.settings, self.subject.model
        conversations = [self.survey.conversations[order] for order in orders]
        ids = [tuple(self.chat.prompt(without_response(one))) for one in conversations]
        prompts = list(dict.fromkeys(ids))
        groups, order = prefill_all(model, [Prefix(one) for one in prompts], None, work.prefilled)
        number = {prompts[i]: at for at, i in enumerate(order)}
        rows = [
            Row(
                number[prompt],
                settings.response_temperature,
                response_stream_key(settings.seed, one.source_id, one.response_index or 0),
            )
            for prompt, one in zip(ids, conversations, strict=True)
        ]
        decoded = decode(
            model,
            groups,
            rows,
            self.chat.response_stop_ids,
            settings.max_response_tokens,
            share=self.engine.share,
            on_step=work.decoded,
        )
        return [
            self._response_row(order, row, prompt)
            for order, row, prompt in zip(orders, decoded, ids, strict=True)
        ]

    def _response_row(self, order: int, row: Decoded, prompt: Sequence[int]) -> dict:
        said = self.chat.parse_response(row.token_ids.tolist(), prompt)
        return {
            "order": order,
            "response": said.text,
            "thought": said.thought,
            "finish_reason": "thought" if said.within_thought else row.finish_reason,
            # Without the turn-end, as the tokens of a given response are counted.
            "tokens": len(row.token_ids) - (row.finish_reason == "turn_end"),
        }

    # -- contexts -------------------------------------------------------------------------------

    def _write_contexts(self) -> None:
        each, most = len(self.settings.rows()), self.settings.max_new_tokens
        lengths = dict(enumerate(self.survey.lengths))
        parts = self.parts.contexts
        work = self._start_phase("user turns", parts, self.contexts, lengths, each, most, "row")
        responses = Run(self.writer.path).responses.to_dict("records")
        written = {row["order"]: row for row in responses}
        for name, orders in self.contexts.items():
            work.begin(name)
            prepared = [self._prepare(order, written.get(order)) for order in orders]
            contexts = [one for one in prepared if one is not None]
            compute = partial(self._compute, work, contexts)
            results = self.backoff.retry(compute, max(1, each * len(contexts)))
            self.writer.add_contexts(
                name, *tables(contexts, results, self.settings, self.chat), self._batch_rows
            )
            work.end()

    def _prepare(self, order: int, written: dict | None) -> PreparedContext | None:
        """A conversation ready for the engine; None where its written response can't be used.

        Given responses were checked before anything was written. One that the model wrote may be
        refused by the template only now; such a conversation is left out, reported and recorded.
        """
        conversation, vector = self.survey.conversations[order], self.inputs.vector
        if written is not None:
            messages = tuple(without_response(conversation))
            conversation = replace(conversation, messages=messages)
            thought = written["thought"] if isinstance(written["thought"], str) else None
            conversation = conversation.with_response(written["response"], thought)
        try:
            context, turn = context_and_reference(self.chat, conversation)
            steered = vector.at_context(context.positions) if vector else ()
        except UserError as error:
            if written is None:
                raise
            self.progress.say(f"conversation {conversation.id} is left out: {error.problem}")
            self.left_out.append(conversation.id)
            self.writer.note("left_out", self.left_out)
            return None
        at_turn = vector.at_turn if vector else ()
        return PreparedContext(order, conversation, written, context, turn, steered, at_turn)

    def _compute(
        self, work: PhaseProgress, contexts: list[PreparedContext], limit: int
    ) -> list[ContextResult]:
        """Results of contexts; as many are held together as ``limit`` rows are of."""
        together = max(1, limit // len(self.settings.rows()))
        results: list[ContextResult] = []
        for start in range(0, len(contexts), together):
            results += self._compute_together(work, contexts[start : start + together], limit)
        return results

    def _compute_together(
        self, work: PhaseProgress, contexts: list[PreparedContext], limit: int
    ) -> list[ContextResult]:
        """Prefill contexts; score and sample from that."""
        settings, model, grid = self.settings, self.subject.model, self.settings.rows()
        prefixes = [self._prefix(context) for context in contexts]
        groups, order = prefill_all(model, prefixes, self.blocks, work.prefilled)
        members = [contexts[number] for number in order]  # in the order of the groups
        scored = self._references(groups, members, work)
        rows = [
            Row(
                number,
                temperature,
                stream_key(settings.seed, context.conversation.source_id, sample),
                context.at_turn,
            )
            for number, context in enumerate(members)
            for temperature, sample in grid
        ]
        decoded: list[Decoded] = []
        for start in range(0, len(rows), limit):
            decoded += decode(
                model,
                groups,
                rows[start : start + limit],
                self.chat.stop_ids,
                settings.max_new_tokens,
                share=self.engine.share,
                on_step=work.decoded,
            )
        logits = torch.cat([group.logits.cpu() for group in groups])
        residuals = torch.cat([cast(Tensor, group.residuals).cpu() for group in groups])
        results: dict[int, ContextResult] = {}
        for at, number in enumerate(order):
            if logits[at].isnan().any():
                raise UserError(
                    "the model's logits are not numbers for the context of "
                    f"{contexts[number].conversation.id} in {self.subject.describe()['dtype']}",
                    "use --dtype bfloat16 or float32 and another --out",
                )
            own = decoded[at * len(grid) : (at + 1) * len(grid)]
            results[number] = ContextResult(own, scored.get(at), logits[at], residuals[at])
        return [results[number] for number in range(len(contexts))]

    def _prefix(self, context: PreparedContext) -> Prefix:
        at = [context.chat.positions[name] for name in self.positions]
        places = [-1 if place is None else place for place in at]
        return Prefix(context.chat.ids, places, context.at_context)

    def _references(
        self, groups: list[Prefilled], members: list[PreparedContext], work: PhaseProgress
    ) -> dict[int, Scored]:
        """Scores of the users' real follow-ups, by the number of their context."""
        turns = [
            Turn(number, context.reference.whole, context.at_turn)
            for number, context in enumerate(members)
            if context.reference is not None
        ]
        scores = score(
            self.subject.model,
            groups,
            turns,
            scored_temperatures(self.settings.temperatures),
            share=self.engine.share,
            on_tokens=work.scored,
        )
        return {turn.context: one for turn, one in zip(turns, scores, strict=True)}
