"""The main job as a function: conversations in, a run on disk out.

``chat`` knows templates and text, ``engine`` knows token ids and tensors; this module is where the
two meet. A run has two phases. Where the subject model has to write the responses itself, that
comes first, with batches of its own; then every context is prefilled once, and that one pass feeds
the captured residual stream, the header logits, all sampled rows and the scores of reference turns.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import rendered
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.identity import build_chat, eos_ids, identity, machine
from ia_mech.collect.preflight import (
    check_folder,
    check_room,
    kept_positions,
    open_source,
    scratch_folder,
    windows,
    without_response,
    write_snapshot,
)
from ia_mech.collect.responses import Responses
from ia_mech.collect.rows import Item, Result, tables
from ia_mech.collect.work import Work
from ia_mech.data.conversations import UNPERTURBED, Conversation
from ia_mech.display import Progress
from ia_mech.engine.capture import find_blocks
from ia_mech.engine.check import check_engine
from ia_mech.engine.cuda import fused
from ia_mech.engine.cuda.check import with_graphs
from ia_mech.engine.cuda.copies import CopyStream, HostCopy
from ia_mech.engine.cuda.sizes import Sizes
from ia_mech.engine.cuda.stepper import forget
from ia_mech.engine.decode import decode_stream
from ia_mech.engine.loop import Decoded, Row
from ia_mech.engine.plan import (
    OomBackoff,
    batch_defaults,
    contexts_per_batch,
    contexts_per_unit,
    evenly,
    plan_units,
)
from ia_mech.engine.prefill import Prefilled, Prefix, prefill
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.shared_prefix import Engine
from ia_mech.errors import UserError
from ia_mech.likelihood.candidates import OwnCandidates
from ia_mech.likelihood.scorer import ContextScores, Scorer, scored_temperatures
from ia_mech.likelihood.swaps import SwapSources
from ia_mech.models.load import Subject, context_limit
from ia_mech.run import Run, RunWriter, layout
from ia_mech.run.background import Background


def collect(
    config: SampleConfig,
    subject: Subject,
    out: Path,
    progress: Progress,
    *,
    repair: bool = False,
) -> Run:
    """Make a run, or go on with it if the folder holds one of the same configuration.

    Raises:
        UserError: anything wrong with data, template, folder or disk; nothing is written then that
            a later call wouldn't remove.
    """
    if config.batch_rows is None:
        config = replace(config, batch_rows=batch_defaults(subject.device).batch_rows)
    chat = build_chat(
        config, subject.tokenizer, eos_ids(subject.model.generation_config, subject.model.config)
    )
    check_folder(out)
    own = None if config.candidates is None else OwnCandidates.read(config.candidates)
    probe = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "Blue."}]
    ids = (chat.context(probe).ids * 12)[:12]
    engine = check_engine(subject.model, ids, config.engine)
    engine = with_graphs(subject.model, ids, engine, config.engine)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(out.parent) as scratch:
            file = scratch / layout.CONVERSATIONS
            source = open_source(config)
            limit = context_limit(subject.model.config)
            snapshot = write_snapshot(source, config, chat, limit, file)
            if own is not None:
                every = [c for _, window in windows(file) for _, c in window]
                references = sum(c.reference is not None for c in every)
                own.check({c.id for c in every}, references)
            record = {
                "format": layout.FORMAT,
                "source": source.description,
                "identity": identity(config, subject, chat, snapshot, engine, own),
            }
            check_room(config, subject, chat, snapshot, out)
            if (out / layout.RUN).is_file():
                writer = RunWriter.resume(out, record, file, repair=repair)
            else:
                writer = RunWriter.create(out, record, file)
        with writer:
            if not writer.manifest["complete"]:
                _Job(config, subject, chat, writer, progress, engine, own).work()
    except OSError as error:
        raise UserError(
            f"{out} could not be written ({error.strerror or error})",
            "make room or give another --out; the same command then goes on from what is kept",
        ) from error
    return Run.open(out)


class _Job:
    """The work of one process on one run."""

    def __init__(
        self, config, subject, chat, writer: RunWriter, progress: Progress, engine: Engine, own=None
    ) -> None:
        self.config: SampleConfig = config
        self.subject: Subject = subject
        self.chat: ChatFormat = chat
        self.writer = writer
        self.progress = progress
        self.engine = engine
        self.own: OwnCandidates | None = own
        self.defaults = batch_defaults(subject.device)
        self.blocks = find_blocks(subject.model)
        self.copies = CopyStream(subject.device)
        self.behind = Background(subject.device.type == "cuda")
        self.positions = kept_positions(config, chat)
        self.grid_rows = config.grid.rows()
        self.width = OomBackoff(config.batch_rows, self._halved)
        self.responses_limit = OomBackoff(config.batch_rows, self._halved)
        self.turns_limit = OomBackoff(config.batch_rows, self._halved, outermost=False)
        self.halved: list[int] = []
        self.skipped: list[str] = []
        self.refused: dict[str, str] = {}

    def _halved(self, size: int) -> None:
        forget(self.subject.model)
        if not self.halved:
            self.progress.say(f"out of memory: going on with batches of {size} or fewer")
        self.halved.append(size)
        self.writer.note("out_of_memory", self.halved)

    def work(self) -> None:
        here = machine(self.subject)
        before = self.writer.manifest["sessions"]
        if before and any(before[-1].get(name) != value for name, value in here.items()):
            self.progress.say(
                "note: this run was begun on another machine, or with other threads; rows computed "
                "now may round differently"
            )
        self.writer.start_session(here)
        self.progress.say(f"engine: {self.engine}")
        if self.engine.why:
            self.writer.note("engine", str(self.engine))
        if problem := fused.missed(self.subject.device):
            self.progress.say(f"note: without Triton's kernels, which is slower: {problem}")
            self.writer.note("without_kernels", problem)
        try:
            with self.behind:
                Responses(
                    self.config, self.subject, self.chat, self.writer, self.progress, self.engine,
                    self.responses_limit,
                ).write()  # fmt: skip
                forget(self.subject.model)
                self._write_contexts()
        finally:
            self.progress.stop()
        self.writer.finish()

    @property
    def _snapshot(self) -> Path:
        return self.writer.path / layout.CONVERSATIONS

    def _write_contexts(self) -> None:
        finished = self.writer.done("contexts")
        total = self.writer.record["identity"]["conversations"]["count"]
        rows = len(self.grid_rows)
        done = self.writer.count("contexts") * rows
        self.decoding = Work(self.progress, "user turns", total * rows, done, "row")
        size = contexts_per_unit(
            rows, self.config.batch_rows, self.config.grid.max_new_tokens, self.defaults.unit_tokens
        )
        scorer = self._scorer()
        for window, conversations in windows(self._snapshot):
            responses = self.writer.read_responses([order for order, _ in conversations])
            items = [
                item
                for order, conversation in conversations
                if (item := self._item(order, conversation, responses.get(order))) is not None
            ]
            together = min(size, self.defaults.scored_contexts) if self._is_scored(items) else size
            lengths = [len(item.chat.ids) for item in items]
            static = self._static(total, max(lengths, default=0))
            run = partial(self._run_contexts, scorer, static)
            units = plan_units(lengths, evenly(len(items), together))
            for index, unit in enumerate(units):
                name = f"{window}.{index}"
                if name not in finished:
                    members = [items[i] for i in unit]
                    results = self.width.retry(partial(run, members))
                    self.behind.do(partial(self._store, name, members, results))

    def _store(self, unit: str, items: list[Item], results: list[Result]) -> None:
        stored = tables(items, results, self.config, self.chat)
        self.writer.add_contexts(unit, *stored)

    def _item(self, order: int, conversation: Conversation, written: dict | None) -> Item | None:
        """A conversation made ready for the engine; None where its written response can't be used.

        Given responses were checked before anything was written. One that the model wrote may be
        refused by the template only now; such a conversation is left out, said and recorded.
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
            self.progress.say(f"conversation {conversation.id} is left out: {error.problem}")
            self.skipped.append(conversation.id)
            self.writer.note("left_out", self.skipped)
            return None
        return Item(order, conversation, written, context, turn)

    def _run_contexts(
        self, scorer: Scorer, static: Sizes | None, items: list[Item], width: int
    ) -> list[Result]:
        """Prefill contexts group by group; sample and score from that."""
        sent: list[tuple[list[ContextScores], HostCopy, HostCopy]] = []

        def groups() -> Iterator[Prefilled]:
            together = contexts_per_batch(len(self.grid_rows), width)
            # The items are sorted by length, so the groups are slices of them.
            lengths = [len(item.chat.ids) for item in items]
            for group in plan_units(lengths, together, self.defaults.prefill_tokens):
                members = [items[i] for i in group]
                prefilled = self._prefill(members)
                scores = scorer.score_candidates(prefilled, [item.scorable for item in members])
                copies = (self.copies.start(t) for t in (prefilled.logits, prefilled.residuals))
                sent.append((scores, *copies))
                yield prefilled
                del prefilled  # before the next one is made

        scored = self._is_scored(items)
        decoded = self._sample(groups(), items, width, static, not scored)
        results = [
            Result([], *one)
            for scores, *copies in sent
            for one in zip(scores, *(copy.wait() for copy in copies), strict=True)
        ]
        rows = len(self.grid_rows)
        for at, (item, result) in enumerate(zip(items, results, strict=True)):
            self._demand_numbers(item, result.logits)
            result.rows.extend(decoded[at * rows : (at + 1) * rows])
        scorer.add_contrasts(
            [item.scorable for item in items],
            [result.scores for result in results],
            [result.rows for result in results],
        )
        if scored:
            self.decoding.advance(0, len(decoded))
        return results

    def _prefill(self, items: list[Item]) -> Prefilled:
        prefixes = []
        for item in items:
            at = [item.chat.positions[name] for name in self.positions]
            prefixes.append(Prefix(item.chat.ids, [-1 if p is None else p for p in at]))
        return prefill(self.subject.model, prefixes, self.blocks)

    def _demand_numbers(self, item: Item, logits: Tensor) -> None:
        """Asked once they are on the host: a GPU isn't kept waiting for the answer."""
        if logits.isnan().any():
            raise UserError(
                f"the model's logits are not numbers for the context of {item.conversation.id} "
                f"in {self.subject.describe()['dtype']}",
                "use --dtype bfloat16 or float32 and another --out",
            )

    def _is_scored(self, items: list[Item]) -> bool:
        """Whether any turn of these contexts is scored, which may take longer than decoding."""
        return self.config.score_generations or any(i.reference_ids is not None for i in items)

    def _static(self, contexts: int, longest: int) -> Sizes | None:
        """Of the buffers of fixed addresses, if there are any: the same for all units of a window,
        which share them, whatever rows a unit has."""
        if not self.engine.graphs:
            return None
        most, own = self.config.batch_rows, self.config.grid.max_new_tokens
        return Sizes.of(contexts, len(self.grid_rows), most, longest, own)

    def _sample(
        self,
        groups: Iterator[Prefilled],
        items: list[Item],
        width: int,
        static: Sizes | None,
        rows_are_done: bool,
    ) -> list[Decoded]:
        """Every row of the grid for every context, contexts first."""
        grid = self.config.grid

        def advance(tokens: int, rows: int) -> None:
            self.decoding.advance(tokens, rows if rows_are_done else 0)

        rows = [
            Row(index, temperature, stream_key(grid.seed, item.conversation.source_id, sample))
            for index, item in enumerate(items)
            for temperature, sample in self.grid_rows
        ]
        return decode_stream(
            self.subject.model,
            groups,
            rows,
            self.chat.stop_ids,
            grid.max_new_tokens,
            width=width,
            on_step=advance,
            share=self.engine.shared > 0,
            static=static and static.narrowed(width),
        )

    def _scorer(self) -> Scorer:
        """What scores given turns; every unperturbed conversation may lend its response to it."""
        rows = (
            (order, conversation, responses.get(order))
            for _, conversations in windows(self._snapshot)
            for responses in [self.writer.read_responses([order for order, _ in conversations])]
            for order, conversation in conversations
            if conversation.perturbation == UNPERTURBED
        )
        grid = self.config.grid
        return Scorer(
            self.subject.model,
            self.chat,
            SwapSources.of(rows, self.subject.tokenizer, grid.seed),
            scored_temperatures(grid.temperatures),
            swaps=self.config.swaps,
            generations=self.config.score_generations,
            own=self.own,
            limit=context_limit(self.subject.model.config),
            rows_limit=self.turns_limit,
            note=self._refuse,
            share=self.engine.shared > 0,
        )

    def _refuse(self, kind: str, problem: str) -> None:
        """Say and record once per kind what is left out of the scores somewhere."""
        if kind not in self.refused:
            self.refused[kind] = problem
            self.progress.say(f"not scored everywhere: {kind}: {problem}")
            self.writer.note("contrasts_refused", self.refused)
