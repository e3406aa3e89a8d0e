"""The main job as a function: conversations in, a run on disk out.

``chat`` knows templates and text, ``engine`` knows token ids and tensors; this module is where the
two meet. A run has two phases. Where the subject model has to write the responses itself, that
comes first, with batches of its own; then every context is prefilled once, and that one pass feeds
the captured residual stream, the header logits, all sampled rows and the scores of reference turns.

A run may be made in shards, by processes that know nothing of each other. Only contrasts need what
another shard wrote: the responses of the subject model, all of which have to be there first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    Buckets,
    Inputs,
    Survey,
    Texts,
    check_disk,
    check_header_logits,
    check_vector,
    context_units,
    kept_positions,
    open_inputs,
    read_snapshot,
    response_units,
    run_bytes,
    survey,
    too_few,
    without_response,
    write_snapshot,
)
from ia_mech.collect.progress import Work
from ia_mech.collect.rows import ContextResult, PreparedContext, tables
from ia_mech.collect.shards import WHOLE, Shard, refuse_differing, responses_of_others
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
from ia_mech.models import parallel
from ia_mech.models.load import (
    Subject,
    context_limit,
    load,
    load_tokenizer_and_config,
    remember,
)
from ia_mech.run import Run, RunWriter, layout
from ia_mech.run.background import Background
from ia_mech.run.integrity import scratch_folder
from ia_mech.run.writer import RunFollower


def make_run(
    config: SampleConfig,
    out: Path,
    progress: Progress,
    *,
    repair: bool = False,
    shard: Shard = WHOLE,
    phase: str | None = None,
    wait: bool = False,
) -> Run:
    """Load the model and make a run, or go on with it; keep the model's lens as well.

    Args and Raises: see :func:`collect`. What needs no weights is refused before they are fetched.
    """
    inputs = open_inputs(config, out, shard, repair=repair)
    tokenizer, model_config = load_tokenizer_and_config(config.model)
    chat = build_chat(config, tokenizer)
    kept_positions(config, chat)
    check_header_logits(config, model_config)
    check_vector(inputs.vector, chat, model_config)
    subject = load(config.model)
    run = collect(
        config,
        subject,
        out,
        progress,
        inputs=inputs,
        repair=repair,
        shard=shard,
        phase=phase,
        wait=wait,
    )
    if problem := keep_lens(run, subject):
        progress.say(f"note: no offline lens for this model: {problem}")
    return run


def keep_lens(run: Run, subject: Subject) -> str | None:
    """Keep the model's lens if it isn't kept yet; returns why there can be none, or None."""
    if not run.kept["contexts"]:
        return None
    try:
        return save_lens(subject, run.contexts["token_ids"].iloc[0].tolist()[:64])
    except (OSError, SafetensorError, RuntimeError) as error:  # the run is whole without it
        return str(error)


@dataclass(frozen=True)
class Prepared:
    """What all shards of a run share: its conversations, surveyed, and how they are computed."""

    inputs: Inputs
    chat: ChatFormat
    engine: Engine
    survey: Survey
    texts: Texts


def prepare(config: SampleConfig, subject: Subject, inputs: Inputs, folder: Path) -> Prepared:
    """Check the engine and all conversations, whose texts are kept on the disk of a folder.

    Raises:
        UserError: anything wrong with data or template.
    """
    model = subject.model
    chat = build_chat(config, subject.tokenizer, eos_ids(model.generation_config, model.config))
    ids = probe_ids(chat)
    engine = check_engine(model, ids, config.engine)
    if inputs.vector is None:
        engine = with_static_buffers(model, ids, engine, config.engine)
    else:  # in static buffers nothing can be changed
        inputs.vector.check_weights(subject.weights_hash)
    texts = Texts(folder)
    found = survey(inputs, config, chat, model.config, texts.append)
    return Prepared(inputs, chat, engine, found, texts)


def collect(
    config: SampleConfig,
    subject: Subject,
    out: Path,
    progress: Progress,
    *,
    inputs: Inputs | None = None,
    prepared: Prepared | None = None,
    repair: bool = False,
    shard: Shard = WHOLE,
    phase: str | None = None,
    wait: bool = False,
) -> Run:
    """Make a run, or go on with it if the folder holds one of the same configuration.

    Args:
        out: the run's folder.
        inputs: what :func:`ia_mech.collect.preflight.open_inputs` found, if it was called.
        prepared: what :func:`prepare` returned, if it was called; ``inputs`` isn't looked at then.
        repair: compute damaged parts again.
        shard: which shard of the run to make, in a folder of its own within ``out``.
        phase: ``responses`` or ``turns``, to do no more than that; both if None.
        wait: for responses that other shards have yet to write, rather than raise.

    Returns:
        The run, or the shard.

    Raises:
        UserError: anything wrong with data, template, folder or disk; nothing is written then that
            a later call wouldn't remove. Responses of this shard, with ``phase`` ``turns``, or of
            others that contrasts need, aren't written yet.
    """
    if config.batch_rows is None:
        config = replace(config, batch_rows=batch_defaults(subject.device).batch_rows)
    if prepared is None:
        inputs = inputs or open_inputs(config, out, shard, repair=repair)
    folder, model = shard.folder(out), subject.model
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if prepared is None:
            assert inputs is not None
            prepared = prepare(config, subject, inputs, folder.parent)
        inputs, chat, found = prepared.inputs, prepared.chat, prepared.survey
        buckets, positions = found.buckets(config, shard), kept_positions(config, chat)
        who = identity(config, subject, chat, found.facts, prepared.engine, inputs)
        refuse_differing(out, shard, who)
        record = {
            "format": layout.FORMAT,
            "source": inputs.source.description | {"dataset": who["config"]["dataset"]},
            "identity": who,
            "buckets": found.bucket_count(config),
            "shard": [shard.number, shard.of],
        }
        lengths = [found.lengths[i] for orders in buckets.values() for i in orders]
        counts = len(lengths), sum(lengths)
        size = model.dtype.itemsize
        needed = sum(run_bytes(config, positions, model.config, size, *counts).values())
        opened: list[RunWriter] = []

        def open_writer(texts: Texts = prepared.texts) -> None:
            with scratch_folder(folder.parent) as scratch:
                file = scratch / layout.CONVERSATIONS
                write_snapshot(texts, buckets, file)
                check_disk(needed, folder)
                if (folder / layout.RUN).is_file():
                    one = RunWriter.resume(folder, record, file, repair=repair, name_of=flag_of)
                else:
                    one = RunWriter.create(folder, record, file)
                opened.append(one)

        parallel.of_first(open_writer)
        writer = opened[0] if opened else RunFollower(folder)
        if problem := too_few(config, found.read):
            progress.say(f"note: {problem}")
        remember(config.model, subject.weights_hash)
        with writer:
            if writer.manifest["complete"]:
                progress.say(f"{folder} was finished before; nothing was computed again")
            else:
                others = partial(responses_of_others, out, shard, wait)
                job = _Job(config, inputs, subject, chat, writer, progress, prepared.engine)
                job.work(found, buckets, prepared.texts, others, phase)
            parallel.barrier()  # the other ranks read what the first one wrote
    except BrokenPipeError:  # of the progress, not of the run
        raise
    except OSError as error:
        lacking = exhaustion(error)
        remedy = lacking.remedy if lacking else "check its disk, or give another --out"
        raise UserError(
            f"{error.filename2 or folder} could not be written ({error.strerror or error})",
            f"{remedy}; the same command then goes on from what is kept",
        ) from error
    return Run.open(folder)


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
        self.config, self.subject, self.chat = config, subject, chat
        self.own, self.vector = inputs.own, inputs.vector
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

    def work(
        self,
        survey: Survey,
        buckets: Buckets,
        texts: Texts,
        others: Callable[[], list[dict]],
        phase: str | None,
    ) -> None:
        """Compute and write what isn't there yet.

        Args:
            survey: of all conversations.
            buckets: the contexts of this shard.
            texts: all conversations.
            others: gives the responses that the model wrote in other shards.
            phase: as for :func:`collect`.
        """
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
        if self.vector is not None:
            self.progress.say(f"steered: {self.vector}")
        if self.engine.why:
            self.writer.note("engine", str(self.engine))
        if problem := fused.missed(self.subject.device):
            self.progress.say(f"note: without the sampling kernel, which is slower: {problem}")
            self.writer.note("without_kernels", problem)
        try:
            with self.background:
                self._write_responses(survey, buckets, compute=phase != "turns")
                if phase != "responses":
                    self._write_contexts(survey, buckets, texts, others)
        finally:
            self.progress.stop()
        if phase != "responses":
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

    def _write_responses(self, survey: Survey, buckets: Buckets, *, compute: bool) -> None:
        """Responses of the model, where they are wanted and not written yet.

        Raises:
            UserError: some aren't, and ``compute`` says that they should be.
        """
        config, writer, most = self.config, self.writer, self.config.max_response_tokens
        prompts = survey.prompts(i for orders in buckets.values() for i in orders)
        units = response_units(config, self.defaults.unit_cost, buckets, prompts)
        costs = {
            name: sum(most + PREFILL_COST * prompts[i] for i in unit)
            for part in units.values()
            for name, unit in part.items()
        }
        done, finished = writer.count("responses"), writer.done("responses")
        if done < len(prompts):
            if not compute:
                missing = len(prompts) - done
                raise UserError(
                    f"{missing} responses of {writer.path} are not written yet",
                    "run it with --phase responses first",
                )
            total = len(prompts)
            work = Work(self.progress, "responses", costs, finished, total, done, most, "response")
            respond = partial(self._respond, work)
            for bucket, conversations in read_snapshot(self._snapshot):
                orders = [i for i in conversations if i in prompts]
                longest = max((prompts[i] for i in orders), default=0)
                self._make_static(len(orders), config.responses, longest, most)
                for name, unit in units[bucket].items():
                    if name not in finished:
                        work.begin(costs[name])
                        group = [(i, conversations[i]) for i in unit]
                        rows = self.responses_limit.map(respond, group)
                        low = self._backed_off(rows=self.responses_limit)
                        writer.add_responses(name, rows, low)
                        work.end()
            self.progress.stop()
        if any(size.prompt is not None for size in survey.sizes):
            writer.finish_responses()
            parallel.barrier()  # the other ranks read what the first one wrote

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

    def _write_contexts(
        self, survey: Survey, buckets: Buckets, texts: Texts, others: Callable[[], list[dict]]
    ) -> None:
        finished, unit_cost = self.writer.done("contexts"), self.defaults.unit_cost
        lengths, rows = list(survey.lengths), len(self.grid_rows)
        if survey.prompts(i for orders in buckets.values() for i in orders):
            for _, contexts in self._buckets():  # responses turned out shorter than allowed
                for order, context in contexts.items():
                    lengths[order] = len(context.chat.ids) if context else 0
        costs = survey.costs(self.config, lengths)
        units = context_units(self.config, unit_cost, buckets, lengths, costs)
        planned = {
            name: sum(costs[i] for i in unit)
            for part in units.values()
            for name, unit in part.items()
        }
        total, most = sum(map(len, buckets.values())), self.config.grid.max_new_tokens
        done = rows * self.writer.count("contexts")
        work = Work(self.progress, "user turns", planned, finished, total * rows, done, most)
        scorer = self._scorer(work, survey, texts, others)
        for bucket, contexts in self._buckets():
            here = buckets[bucket]
            self._make_static(len(here), rows, max(lengths[i] for i in here), most)
            for name, unit in units[bucket].items():
                if name not in finished:
                    members = [one for i in unit if (one := contexts[i])]
                    work.begin(planned[name])
                    run = partial(self._run_contexts, scorer, work, members)
                    results = self.width.retry(run)
                    low = self._backed_off(rows=self.width, turns=self.turns_limit)
                    self.background.do(partial(self._store, name, members, results, low))
                    work.end()

    def _buckets(self) -> Iterator[tuple[int, dict[int, PreparedContext | None]]]:
        """The contexts of each bucket by their order; None for one that is left out."""
        for bucket, conversations in read_snapshot(self._snapshot):
            responses = self.writer.read_responses(bucket)
            yield (
                bucket,
                {i: self._prepared(i, one, responses.get(i)) for i, one in conversations.items()},
            )

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
            steered = self.vector.at_context(context.positions) if self.vector else ()
        except UserError as error:
            if written is None:
                raise
            if conversation.id not in self.left_out:
                self.progress.say(f"conversation {conversation.id} is left out: {error.problem}")
                self.left_out.append(conversation.id)
                self.writer.note("left_out", self.left_out)
            return None
        at_turn = self.vector.at_turn if self.vector else ()
        return PreparedContext(order, conversation, written, context, turn, steered, at_turn)

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
            places = [-1 if p is None else p for p in at]
            prefixes.append(Prefix(context.chat.ids, places, context.at_context))
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
            Row(
                index,
                temperature,
                stream_key(grid.seed, context.conversation.source_id, sample),
                context.at_turn,
            )
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

    def _scorer(
        self, work: Work, survey: Survey, texts: Texts, others: Callable[[], list[dict]]
    ) -> Scorer:
        """What scores given turns; swaps come from every unperturbed conversation of all shards."""
        sources = SwapSources([], self.config.grid.seed)
        if self.config.rivals:
            own = self.writer.read_responses()
            given = all(size.prompt is None for size in survey.sizes)
            written = own | {row["order"]: row for row in ([] if given else others())}
            rows = (
                (order, conversation, written.get(order))
                for order, conversation in texts.conversations()
                if conversation.perturbation == UNPERTURBED
            )
            sources = SwapSources.of(rows, self.subject.tokenizer, self.config.grid.seed)
        config, grid = self.config, self.config.grid
        return Scorer(
            self.subject.model,
            self.chat,
            sources,
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
