"""The first phase of a run: the subject model writes the responses that the data lacks."""

from functools import partial

from ia_mech.chat.format import ChatFormat
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.preflight import needs_response, windows, without_response
from ia_mech.collect.work import Work
from ia_mech.display import Progress
from ia_mech.engine.cuda.sizes import Sizes
from ia_mech.engine.decode import decode_stream
from ia_mech.engine.loop import Row
from ia_mech.engine.plan import OomBackoff, batch_defaults, evenly, plan_units
from ia_mech.engine.prefill import Prefix, prefill
from ia_mech.engine.shared_prefix import Engine
from ia_mech.models.load import Subject
from ia_mech.run import RunWriter, layout


class Responses:
    """Writes them, greedily, with batches of their own.

    Args:
        config: of the run.
        subject: the model.
        chat: its format.
        writer: of the run.
        progress: is told what is done.
        engine: how rows are decoded.
        limit: most responses at a time; halved when memory ends.
    """

    def __init__(
        self,
        config: SampleConfig,
        subject: Subject,
        chat: ChatFormat,
        writer: RunWriter,
        progress: Progress,
        engine: Engine,
        limit: OomBackoff,
    ) -> None:
        self._config, self._subject, self._chat, self._writer = config, subject, chat, writer
        self._progress, self._engine, self._limit = progress, engine, limit
        self._defaults = batch_defaults(subject.device)

    def write(self) -> None:
        """All that are wanted and not written yet."""
        snapshot, writer = self._writer.path / layout.CONVERSATIONS, self._writer
        total = sum(
            needs_response(self._config, c)
            for _, conversations in windows(snapshot)
            for _, c in conversations
        )
        if writer.count("responses") == total:
            return
        done = writer.done("responses")
        self._work = Work(self._progress, "responses", total, writer.count("responses"), "response")
        for window, conversations in windows(snapshot):
            todo = [
                (order, self._chat.prompt(without_response(c)))
                for order, c in conversations
                if needs_response(self._config, c)
            ]
            lengths = [len(prompt) for _, prompt in todo]
            most = max(1, self._config.batch_rows // self._defaults.response_share)
            respond = partial(self._respond, self._static(total, most, max(lengths, default=0)))
            for index, unit in enumerate(plan_units(lengths, evenly(len(todo), most))):
                name = f"{window}.{index}"
                if name not in done:
                    group = [todo[i] for i in unit]
                    writer.add_responses(name, self._limit.map(respond, group))
        self._progress.stop()

    def _static(self, total: int, most: int, longest: int) -> Sizes | None:
        """Of the buffers of fixed addresses, if there are any; all units of a window share them."""
        if not self._engine.graphs:
            return None
        return Sizes.of(total, 1, most, longest, self._config.max_response_tokens)

    def _respond(self, static: Sizes | None, group: list[tuple[int, list[int]]]) -> list[dict]:
        """Greedy responses to (order, prompt ids), as ``generate(do_sample=False)`` writes them."""
        model = self._subject.model
        prompts = [Prefix(prompt) for _, prompt in group]
        parts = plan_units(
            [len(prompt.ids) for prompt in prompts], len(prompts), self._defaults.prefill_tokens
        )
        decoded = decode_stream(
            model,
            (prefill(model, [prompts[i] for i in part]) for part in parts),
            [Row(i, 0.0, (0, 0)) for i in range(len(group))],
            self._chat.response_stop_ids,
            self._config.max_response_tokens,
            width=len(group),
            on_step=self._work.advance,
            share=self._engine.shared > 0,
            static=static and static.narrowed(self._limit.limit),
        )
        return [
            {
                "order": order,
                "response": self._chat.response_text(row.token_ids.tolist()),
                "finish_reason": row.finish_reason,
                # Without the turn-end, as the tokens of a given response are counted.
                "tokens": len(row.token_ids) - (row.finish_reason == "turn_end"),
            }
            for (order, _), row in zip(group, decoded, strict=True)
        ]
