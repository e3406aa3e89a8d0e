"""The main job as a function: conversations in, a run on disk out.

``chat`` knows templates and text, ``engine`` knows token ids and tensors; this module is where the
two meet. A run has two phases. Where the subject model has to write the responses itself, that
comes first, with batches of its own; then every context is prefilled once, and that one pass feeds
the captured residual stream, the header logits, all sampled rows and the scores of reference turns.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import rendered
from ia_mech.collect.config import SampleConfig, flag_of
from ia_mech.collect.identity import (
    build_chat,
    differences,
    eos_ids,
    identity,
    machine,
    probe_ids,
)
from ia_mech.collect.preflight import (
    Inputs,
    Survey,
    check_disk,
    check_header_logits,
    context_units,
    kept_positions,
    needs_response,
    open_inputs,
    read_chunks,
    response_units,
    run_bytes,
    run_units,
    scratch_folder,
    too_few,
    without_response,
    write_snapshot,
)
from ia_mech.collect.progress import Work
from ia_mech.collect.rows import ContextResult, PreparedContext, tables
from ia_mech.data.conversations import UNPERTURBED, Conversation
from ia_mech.display import Progress
from ia_mech.engine.capture import find_blocks
from ia_mech.engine.check import check_engine
from ia_mech.engine.cuda import fused
from ia_mech.engine.cuda.check import with_static_buffers
from ia_mech.engine.cuda.stepper import StaticBuffers, start_copy
from ia_mech.engine.decode import decode_stream
from ia_mech.engine.loop import Decoded, Row
from ia_mech.engine.plan import (
    PREFILL_COST,
    OomBackoff,
    batch_defaults,
    contexts_per_batch,
    plan_units,
)
from ia_mech.engine.prefill import Prefilled, Prefix, prefill
from ia_mech.engine.sampling import response_stream_key, stream_key
from ia_mech.engine.shared_prefix import Engine
from ia_mech.errors import UserError, exhaustion
from ia_mech.lens import save_lens
from ia_mech.likelihood.scorer import ContextScores, Scorer, scored_temperatures
from ia_mech.likelihood.swaps import SwapSources
from ia_mech.models.load import Subject, context_limit, load, load_tokenizer_and_config
from ia_mech.run import Run, RunWriter, layout
from ia_mech.run.background import Background


def make_run(config: SampleConfig, out: Path, progress: Progress, *, repair: bool = False) -> Run:
    """Load the model and make a run, or go on with it; keep the model's lens as well.

    Raises:
        UserError: see :func:`collect`. What needs no weights is refused before they are fetched.
    """
    inputs = open_inputs(config, out, repair=repair)
    tokenizer, model_config = load_tokenizer_and_config(config.model)
    kept_positions(config, build_chat(config, tokenizer))
    check_header_logits(config, model_config)
    subject = load(config.model)
    run = collect(config, subject, out, progress, inputs=inputs, repair=repair)
    try:
        problem = save_lens(subject, run.contexts["token_ids"].iloc[0].tolist()[:64])
    except (OSError, SafetensorError, RuntimeError) as error:  # the run is whole without it
        problem = str(error)
    if problem:
        progress.say(f"note: no offline lens for this model: {problem}")
    return run


def collect(
    config: SampleConfig,
    subject: Subject,
    out: Path,
    progress: Progress,
    *,
    inputs: Inputs | None = None,
    repair: bool = False,
) -> Run:
    """Make a run, or go on with it if the folder holds one of the same configuration.

    Args:
        inputs: what :func:`ia_mech.collect.preflight.open_inputs` found, if it was called.
        repair: compute damaged parts again.

    Raises:
        UserError: anything wrong with data, template, folder or disk; nothing is written then that
            a later call wouldn't remove.
    """
    if config.batch_rows is None:
        config = replace(config, batch_rows=batch_defaults(subject.device).batch_rows)
    inputs = inputs or open_inputs(config, out, repair=repair)
    model = subject.model
    chat = build_chat(config, subject.tokenizer, eos_ids(model.generation_config, model.config))
    ids = probe_ids(chat)
    engine = check_engine(model, ids, config.engine)
    engine = with_static_buffers(model, ids, engine, config.engine)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(out.parent) as scratch:
            file = scratch / layout.CONVERSATIONS
            survey = write_snapshot(inputs, config, chat, model.config, file)
            facts, positions = survey.facts, kept_positions(config, chat)
            record = {
                "format": layout.FORMAT,
                "source": inputs.source.description,
                "identity": identity(config, subject, chat, facts, engine, inputs.own),
            }
            counts = facts["count"], facts["tokens"]
            size = model.dtype.itemsize
            check_disk(run_bytes(config, positions, model.config, size, *counts), out)
            if (out / layout.RUN).is_file():
                writer = RunWriter.resume(out, record, file, repair=repair, name_of=flag_of)
            else:
                writer = RunWriter.create(out, record, file)
        if problem := too_few(config, survey.read):
            progress.say(f"note: {problem}")
        with writer:
            if writer.manifest["complete"]:
                progress.say(f"{out} was finished before; nothing was computed again")
            else:
                _Job(config, inputs, subject, chat, writer, progress, engine).work(survey)
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
        config: SampleConfig,
        inputs: Inputs,
        subject: Subject,
        chat: ChatFormat,
        writer: RunWriter,
        progress: Progress,
        engine: Engine,
    ) -> None:
        assert config.batch_rows is not None
        self.config, self.own, self.subject, self.chat = config, inputs.own, subject, chat
        self.writer, self.progress, self.engine = writer, progress, engine
        self.batch_rows = config.batch_rows
        self.defaults = batch_defaults(subject.device)
        self.blocks = find_blocks(subject.model)
        self.static: StaticBuffers | None = None
        self.background = Background(subject.device.type == "cuda")
        self.positions = kept_positions(config, chat)
        self.grid_rows = config.grid.rows()
        self.width = OomBackoff(self.batch_rows, self._batch_shrank)
        self.responses_limit = OomBackoff(self.batch_rows, self._batch_shrank)
        self.turns_limit = OomBackoff(self.batch_rows, self._batch_shrank, outermost=False)
        self.shrunk = False
        self.left_out: list[str] = []
        self.refused: dict[str, str] = {}

    def _batch_shrank(self, size: int) -> None:
        if self.static is not None:
            self.static.release()
        if not self.shrunk:
            self.progress.say(f"out of memory: going on with batches of {size} or fewer")
        self.shrunk = True

    def _backed_off(self, **limits: OomBackoff) -> dict[str, int]:
        """The limits that are lower than asked for; rounding depends on them."""
        return {name: one.limit for name, one in limits.items() if one.limit < self.batch_rows}

    def work(self, survey: Survey) -> None:
        """Compute and write what isn't there yet."""
        here = machine(self.subject)
        before = self.writer.manifest["sessions"]
        if before and (changed := differences(before[-1], here)):
            self.progress.say(
                f"note: {changed} since this run was last worked on; rows computed now may round "
                "differently"
            )
        self.writer.start_session(here)
        about = self.subject.describe()
        self.progress.say(
            f"{self.config.model.name}: {about['layers']} layers, d_model {about['d_model']}, "
            f"{about['dtype']} on {about['device']}, weights {about['weights_hash']}"
        )
        self.progress.say(f"engine: {self.engine}")
        if self.engine.why:
            self.writer.note("engine", str(self.engine))
        if problem := fused.missed(self.subject.device):
            self.progress.say(f"note: without the sampling kernel, which is slower: {problem}")
            self.writer.note("without_kernels", problem)
        try:
            with self.background:
                self._write_responses()
                self._write_contexts(survey)
        finally:
            self.progress.stop()
        self.writer.finish()

    @property
    def _snapshot(self) -> Path:
        return self.writer.path / layout.CONVERSATIONS

    def _make_static(self, contexts: int, rows: int, longest: int, own: int) -> None:
        """Static buffers for all contexts of a phase, if the engine has any."""
        self.static = None  # before the next ones are made
        if self.engine.static:
            graphs = self.engine.graphs
            model = self.subject.model
            self.static = StaticBuffers(model, contexts, rows, longest, own, graphs)

    # -- responses ------------------------------------------------------------------------------

    def _write_responses(self) -> None:
        """Responses of the model, where they are wanted and not written yet."""
        config, writer = self.config, self.writer
        most, unit_cost = config.max_response_tokens, self.defaults.unit_cost
        costs: dict[str, float] = {}
        total = longest = 0
        for number, chunk in read_chunks(self._snapshot):
            lengths = [
                len(self.chat.prompt(without_response(c)))
                for _, c in chunk
                if needs_response(config, c)
            ]
            total, longest = total + len(lengths), max([longest, *lengths])
            parts = response_units(config, self.batch_rows, unit_cost, lengths)
            for index, unit in enumerate(parts):
                costs[f"{number}.{index}"] = sum(most + PREFILL_COST * lengths[i] for i in unit)
        done, finished = writer.count("responses"), writer.done("responses")
        if done == total:
            return
        self._make_static(total, config.responses, longest, most)
        work = Work(self.progress, "responses", costs, finished, total, done, most, "response")
        for number, chunk in read_chunks(self._snapshot):
            todo = [(order, c) for order, c in chunk if needs_response(config, c)]
            lengths = [len(self.chat.prompt(without_response(c))) for _, c in todo]
            parts = response_units(config, self.batch_rows, unit_cost, lengths)
            respond = partial(self._respond, work)
            for index, unit in enumerate(parts):
                name = f"{number}.{index}"
                if name not in finished:
                    work.begin(costs[name])
                    rows = self.responses_limit.map(respond, [todo[i] for i in unit])
                    low = self._backed_off(rows=self.responses_limit)
                    writer.add_responses(name, rows, low)
                    work.end()
        self.progress.stop()

    def _respond(self, work: Work, group: list[tuple[int, Conversation]]) -> list[dict]:
        """Responses to (order, conversation): greedy ones, as ``generate(do_sample=False)`` writes
        them, or samples. Several to one query share its prefill."""
        model, config = self.subject.model, self.config
        prompts: dict[tuple[int, ...], int] = {}  # and their numbers
        rows = []
        for _, conversation in group:
            prompt = tuple(self.chat.prompt(without_response(conversation)))
            index = conversation.response_index or 0
            key = response_stream_key(config.grid.seed, conversation.source_id, index)
            at = prompts.setdefault(prompt, len(prompts))
            rows.append(Row(at, config.response_temperature, key))
        prefixes = [Prefix(prompt) for prompt in prompts]
        lengths = [len(prompt) for prompt in prompts]  # sorted, so that parts are slices
        parts = plan_units(lengths, len(prompts), self.defaults.prefill_tokens)

        def groups() -> Iterator[Prefilled]:
            for part in parts:
                prefilled = prefill(model, [prefixes[i] for i in part])
                work.prefilled(sum(len(prefixes[i].ids) for i in part))
                yield prefilled
                del prefilled  # before the next one is made

        decoded = decode_stream(
            model,
            groups(),
            rows,
            self.chat.response_stop_ids,
            config.max_response_tokens,
            width=self.responses_limit.limit,  # of all groups, which share static buffers
            on_step=work.decoded,
            share=self.engine.shared > 0,
            static=self.static,
        )
        return [
            {
                "order": order,
                "response": self.chat.response_text(row.token_ids.tolist()),
                "finish_reason": row.finish_reason,
                # Without the turn-end, as the tokens of a given response are counted.
                "tokens": len(row.token_ids) - (row.finish_reason == "turn_end"),
            }
            for (order, _), row in zip(group, decoded, strict=True)
        ]

    # -- contexts -------------------------------------------------------------------------------

    def _write_contexts(self, survey: Survey) -> None:
        finished, unit_cost = self.writer.done("contexts"), self.defaults.unit_cost
        lengths = list(survey.lengths)
        total, rows, most = len(lengths), len(self.grid_rows), self.config.grid.max_new_tokens
        for _, chunk in read_chunks(self._snapshot):  # responses turned out shorter than allowed
            responses = self.writer.read_responses([order for order, _ in chunk])
            for order, conversation in chunk:
                if order in responses:
                    context = self._prepared(order, conversation, responses[order])
                    lengths[order] = len(context.chat.ids) if context else 0
        self._make_static(total, rows, max(lengths, default=0), most)
        costs = survey.costs(self.config, lengths)
        units = run_units(self.config, self.batch_rows, unit_cost, lengths, costs)
        planned = {name: sum(costs[i] for i in unit) for name, unit in units.items()}
        done = rows * self.writer.count("contexts")
        work = Work(self.progress, "user turns", planned, finished, total * rows, done, most)
        scorer = self._scorer(work)
        for number, chunk in read_chunks(self._snapshot):
            responses = self.writer.read_responses([order for order, _ in chunk])
            contexts = [
                context
                for order, conversation in chunk
                if (context := self._prepared(order, conversation, responses.get(order)))
            ]
            lengths = [len(context.chat.ids) for context in contexts]
            costs = [survey.cost(self.config, c.order, len(c.chat.ids)) for c in contexts]
            parts = context_units(self.config, self.batch_rows, unit_cost, lengths, costs)
            for index, unit in enumerate(parts):
                name = f"{number}.{index}"
                if name not in finished:
                    members = [contexts[i] for i in unit]
                    work.begin(sum(costs[i] for i in unit))
                    run = partial(self._run_contexts, scorer, work, members)
                    results = self.width.retry(run)
                    low = self._backed_off(rows=self.width, turns=self.turns_limit)
                    self.background.do(partial(self._store, name, members, results, low))
                    work.end()

    def _store(
        self,
        unit: str,
        contexts: list[PreparedContext],
        results: list[ContextResult],
        backed_off: dict[str, int],
    ) -> None:
        written = tables(contexts, results, self.config, self.chat)
        self.writer.add_contexts(unit, *written, backed_off)

    def _prepared(
        self, order: int, conversation: Conversation, written: dict | None
    ) -> PreparedContext | None:
        """A conversation ready for the engine; None where its written response can't be used.

        Given responses were checked before anything was written. One that the model wrote may be
        refused by the template only now; such a conversation is left out, reported and recorded.
        """
        if written is not None:
            messages = tuple(without_response(conversation))
            conversation = replace(conversation, messages=messages)
            conversation = conversation.with_response(written["response"])
        try:
            context, turn = rendered(self.chat, conversation)
        except UserError as error:
            if written is None:
                raise
            if conversation.id not in self.left_out:
                self.progress.say(f"conversation {conversation.id} is left out: {error.problem}")
                self.left_out.append(conversation.id)
                self.writer.note("left_out", self.left_out)
            return None
        return PreparedContext(order, conversation, written, context, turn)

    def _run_contexts(
        self,
        scorer: Scorer,
        work: Work,
        contexts: list[PreparedContext],
        width: int,
    ) -> list[ContextResult]:
        """Prefill contexts group by group; sample and score from that."""
        sent: list[tuple[list[ContextScores], Callable[[], Tensor], Callable[[], Tensor]]] = []

        def groups() -> Iterator[Prefilled]:
            together = contexts_per_batch(len(self.grid_rows), width)
            # The contexts are sorted by length, so the groups are slices of them.
            lengths = [len(context.chat.ids) for context in contexts]
            for group in plan_units(lengths, together, self.defaults.prefill_tokens):
                members = [contexts[i] for i in group]
                prefilled = self._prefill(members)
                work.prefilled(sum(lengths[i] for i in group))
                scores = scorer.score_candidates(prefilled, [one.scorable for one in members])
                logits, residuals = prefilled.logits, prefilled.residuals
                assert residuals is not None
                sent.append((scores, start_copy(logits), start_copy(residuals)))
                yield prefilled
                del prefilled  # before the next one is made

        decoded = self._sample(work, groups(), contexts, width)
        results = [
            ContextResult([], *one)
            for scores, *copies in sent
            for one in zip(scores, *(wait() for wait in copies), strict=True)
        ]
        rows = len(self.grid_rows)
        for at, (context, result) in enumerate(zip(contexts, results, strict=True)):
            self._check_numbers(context, result.logits)
            result.rows.extend(decoded[at * rows : (at + 1) * rows])
        scorer.add_contrasts(
            [context.scorable for context in contexts],
            [result.scores for result in results],
            [result.rows for result in results],
        )
        return results

    def _prefill(self, contexts: list[PreparedContext]) -> Prefilled:
        prefixes = []
        for context in contexts:
            at = [context.chat.positions[name] for name in self.positions]
            prefixes.append(Prefix(context.chat.ids, [-1 if p is None else p for p in at]))
        return prefill(self.subject.model, prefixes, self.blocks)

    def _check_numbers(self, context: PreparedContext, logits: Tensor) -> None:
        """Checked once they are on the host: a GPU isn't kept waiting for the answer."""
        if logits.isnan().any():
            raise UserError(
                f"the model's logits are not numbers for the context of {context.conversation.id} "
                f"in {self.subject.describe()['dtype']}",
                "use --dtype bfloat16 or float32 and another --out",
            )

    def _sample(
        self,
        work: Work,
        groups: Iterator[Prefilled],
        contexts: list[PreparedContext],
        width: int,
    ) -> list[Decoded]:
        """Every row of the grid for every context, contexts first."""
        grid = self.config.grid
        rows = [
            Row(index, temperature, stream_key(grid.seed, context.conversation.source_id, sample))
            for index, context in enumerate(contexts)
            for temperature, sample in self.grid_rows
        ]
        return decode_stream(
            self.subject.model,
            groups,
            rows,
            self.chat.stop_ids,
            grid.max_new_tokens,
            width=width,
            on_step=work.decoded,
            share=self.engine.shared > 0,
            static=self.static,
        )

    def _scorer(self, work: Work) -> Scorer:
        """What scores given turns; swaps come from every unperturbed conversation."""
        rows = (
            (order, conversation, responses.get(order))
            for _, chunk in read_chunks(self._snapshot)
            for responses in [self.writer.read_responses([order for order, _ in chunk])]
            for order, conversation in chunk
            if conversation.perturbation == UNPERTURBED
        )
        config, grid = self.config, self.config.grid
        return Scorer(
            self.subject.model,
            self.chat,
            SwapSources.of(rows, self.subject.tokenizer, grid.seed),
            scored_temperatures(grid.temperatures),
            contrasts=config.contrasts,
            swaps=config.swaps,
            generations=config.score_generations,
            rivals=config.rivals,
            own=self.own,
            limit=context_limit(self.subject.model.config),
            rows_limit=self.turns_limit,
            note=self._refuse,
            share=self.engine.shared > 0,
            on_work=work.scored,
        )

    def _refuse(self, kind: str, problem: str) -> None:
        """Report and record, once per kind, what is left out of the scores somewhere."""
        if kind not in self.refused:
            self.refused[kind] = problem
            self.progress.say(f"not scored everywhere: {kind}: {problem}")
            self.writer.note("contrasts_refused", self.refused)
