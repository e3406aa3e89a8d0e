"""What workers do: from token ids to what the engine gives for them.

Nothing here reads or writes text, so that several workers can do it at once; what goes in was
prepared, and what comes out is written, by the main thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ia_mech.collect.progress import PartProgress
from ia_mech.collect.rows import ContextResult, PreparedContext
from ia_mech.engine.decode import Decoded, Row, decode
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.score import Scored, Turn, score
from ia_mech.engine.state import Prefilled, Prefix, prefill_all
from ia_mech.errors import UserError
from ia_mech.likelihood.reference import scored_temperatures
from ia_mech.models.load import Subject
from ia_mech.settings import Settings


@dataclass(frozen=True)
class Response:
    """A response to write: the ids of its prompt, and the stream of its noise."""

    order: int
    prompt: tuple[int, ...]
    stream: tuple[int, int]


@dataclass(frozen=True)
class Computation:
    """How a run computes.

    Attributes:
        subject: the model.
        settings: of the run.
        positions: names of the tokens at which the residual stream is kept.
        stop_ids: that end a user turn.
        response_stop_ids: that end a response.
    """

    subject: Subject
    settings: Settings
    positions: tuple[str, ...]
    stop_ids: Sequence[int]
    response_stop_ids: Sequence[int]

    @torch.inference_mode()
    def respond(self, responses: Sequence[Response], limit: int, work: PartProgress):
        """Responses to prompts, at most ``limit`` together; several to one prompt share its
        prefill. Greedy ones are as ``generate(do_sample=False)`` writes them."""
        written: list[Decoded] = []
        for start in range(0, len(responses), limit):
            written += self._respond_together(responses[start : start + limit], work)
        return written

    def _respond_together(self, responses: Sequence[Response], work: PartProgress) -> list[Decoded]:
        prompts = list(dict.fromkeys(one.prompt for one in responses))
        prefixes = [Prefix(ids) for ids in prompts]
        groups, order = prefill_all(self.subject.model, prefixes, work.prefilled)
        number = {prompts[i]: at for at, i in enumerate(order)}
        temperature = self.settings.response_temperature
        return decode(
            self.subject.model,
            groups,
            [Row(number[one.prompt], temperature, one.stream) for one in responses],
            self.response_stop_ids,
            self.settings.max_response_tokens,
            on_step=work.decoded,
        )

    @torch.inference_mode()
    def contexts(
        self, contexts: Sequence[PreparedContext], limit: int, work: PartProgress
    ) -> list[ContextResult]:
        """Results of contexts; as many are held together as ``limit`` rows are of."""
        together = max(1, limit // len(self.settings.rows()))
        results: list[ContextResult] = []
        for start in range(0, len(contexts), together):
            results += self._contexts_together(contexts[start : start + together], limit, work)
        return results

    def _contexts_together(
        self, contexts: Sequence[PreparedContext], limit: int, work: PartProgress
    ) -> list[ContextResult]:
        """Prefill contexts; score and sample from that."""
        model, grid = self.subject.model, self.settings.rows()
        prefixes = [self._prefix(context) for context in contexts]
        groups, order = prefill_all(model, prefixes, work.prefilled)
        members = [contexts[number] for number in order]  # in the order of the groups
        scored = self._references(groups, members, work)
        rows = [
            Row(
                number,
                temperature,
                stream_key(self.settings.seed, context.conversation.source_id, sample),
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
                self.stop_ids,
                self.settings.max_new_tokens,
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
        self, groups: list[Prefilled], members: list[PreparedContext], work: PartProgress
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
            on_tokens=work.scored,
        )
        return {turn.context: one for turn, one in zip(turns, scores, strict=True)}
