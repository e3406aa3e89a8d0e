"""What workers do: from token ids to what the engine gives for them.

The main thread prepares what goes in and writes what comes out. Only the batches of a part of
responses are kept by the worker itself, so that an interruption costs one batch and not the part.
"""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from ia_mech.chat.format import ChatFormat
from ia_mech.chat.thoughts import Response
from ia_mech.collect.parts import QUEUE
from ia_mech.collect.progress import PartProgress
from ia_mech.collect.rows import ContextResult, PreparedContext
from ia_mech.engine.decode import Decoded, Row, decode
from ia_mech.engine.installed import installed
from ia_mech.engine.intervene import at_tokens
from ia_mech.engine.sampling import first_tokens_holding, response_stream_key, stream_key
from ia_mech.engine.score import Scored, Turn, score
from ia_mech.engine.shared import Engine
from ia_mech.engine.splice import prefill_foreign
from ia_mech.engine.state import Prefilled, Prefix, prefill_all
from ia_mech.errors import UserError
from ia_mech.likelihood.real_follow_up import scored_temperatures
from ia_mech.models.load import Subject
from ia_mech.run import layout
from ia_mech.settings import Settings

DRAWS = 3  # most draws for each response that is wanted
Written = tuple[list[int], str]  # a draw: its token ids, and "turn_end" or "length"
Batch = list[Written]  # draws that were decoded together


@dataclass(frozen=True)
class Query:
    """Responses to write: the orders of their contexts, the ids of the prompt, the source."""

    orders: tuple[int, ...]
    prompt: tuple[int, ...]
    source_id: str


@dataclass(frozen=True)
class Drawn:
    """A response as the model wrote it, as it reads, and the order of the context that it becomes,
    if it becomes one."""

    token_ids: list[int]
    ended: str
    said: Response
    order: int | None = None

    @property
    def finish_reason(self) -> str:
        return "thought" if self.said.within_thought else self.ended


class Recipe:
    """What workers know of a plan, and what they do, as a team takes it."""

    def __init__(self, settings: Settings, chat: ChatFormat, positions: Sequence[str]) -> None:
        self.settings, self.chat, self.positions = settings, chat, positions
        # Read with by one thread at a time: a tokenizer that two threads use may refuse to.
        self._own, self._alone = copy.deepcopy(chat), threading.Lock()

    def __reduce__(self) -> tuple:
        return Recipe, (self.settings, self.chat, self.positions)

    def respond(self, subject: Subject, *what: Any) -> tuple[list[list[Drawn]], Engine]:
        return Computation(subject, self).respond(*what), installed(subject.model).engine

    def contexts(self, subject: Subject, *what: Any) -> tuple[list[ContextResult], Engine]:
        return Computation(subject, self).contexts(*what), installed(subject.model).engine

    def read(self, ids: Sequence[int], prompt: Sequence[int]) -> Response:
        """A response, from its ids and its prompt's, in any thread."""
        with self._alone:
            return self._own.parse_response(ids, prompt)


@dataclass(frozen=True)
class Computation:
    """How a run computes with a model."""

    subject: Subject
    plan: Recipe

    @property
    def settings(self) -> Settings:
        return self.plan.settings

    @torch.inference_mode()
    def respond(
        self,
        queries: Sequence[Query],
        limit: int,
        waiting: int,
        kept: Sequence[Batch],
        work: PartProgress,
    ) -> list[list[Drawn]]:
        """Draw responses to queries until each has what it wants: at most ``limit`` at a time,
        while the prompts of ``waiting`` times as many are held.

        The draws of a query are numbered, and the first that are finished and differ become its
        contexts. A query that doesn't get as many of them as it wants gets none.

        Args:
            kept: the batches that an interrupted call with the same arguments has finished. They
                are not drawn again; the batches after them are the same as without interruption.
            work: is told what is done. Before a batch is begun, it is given all finished ones.

        Returns:
            All draws of each query.
        """
        drawn: list[list[Drawn]] = [[] for _ in queries]
        batches: list[Batch] = []
        again, held = False, waiting * limit
        while wanted := [
            (number, draw)
            for number, query in enumerate(queries)
            for draw in self._next_draws(query, drawn[number])
        ]:
            for start in range(0, len(wanted), held):
                some = [(queries[number], draw) for number, draw in wanted[start : start + held]]
                if again:
                    work.redraw(len(some))
                if len(batches) < len(kept):
                    batch = kept[len(batches)]
                    spared = len(some) * self.settings.max_response_tokens
                    work.decoded(0, len(some), spared)
                else:
                    if len(batches) > len(kept):
                        work.keep([*batches])
                    rows = self._respond_together(some, limit, work)
                    batch = [(row.token_ids.tolist(), row.finish_reason) for row in rows]
                batches.append(batch)
                cut = sum(ended in layout.UNFINISHED for _, ended in batch)
                work.responded(len(batch), cut)
                for (number, _), (ids, ended) in zip(
                    wanted[start : start + held], batch, strict=True
                ):
                    one = Drawn(ids, ended, self.plan.read(ids, queries[number].prompt))
                    drawn[number].append(self._taken(one, queries[number].orders, drawn[number]))
            again = True
        for query, own in zip(queries, drawn, strict=True):
            if sum(one.order is not None for one in own) < len(query.orders):
                own[:] = [replace(one, order=None) for one in own]
        return drawn

    def _next_draws(self, query: Query, drawn: Sequence[Drawn]) -> range:
        """The draws that a query still needs; none if it has enough or can't get enough.

        From the second time on they are twice as many as are missing, as few rows take nearly as
        long as many.
        """
        missing, most = len(query.orders), DRAWS * len(query.orders)
        missing -= sum(one.order is not None for one in drawn)
        if len(drawn) + missing > most:
            return range(0)
        return range(len(drawn), min(most, len(drawn) + missing * (2 if drawn else 1)))

    def _taken(self, one: Drawn, orders: Sequence[int], before: Sequence[Drawn]) -> Drawn:
        """A draw with the order of the context that it becomes, if it becomes one."""
        taken = [other for other in before if other.order is not None]
        if self.settings.wants_finished and (
            len(taken) == len(orders)
            or one.finish_reason in layout.UNFINISHED
            or one.said.text.strip() in {other.said.text.strip() for other in taken}
        ):
            return one
        return replace(one, order=orders[len(taken)])

    def _respond_together(
        self, draws: Sequence[tuple[Query, int]], limit: int, work: PartProgress
    ) -> list[Decoded]:
        """Decode draws, each named by its query and its number. Draws of one prompt share its
        prefill; greedy ones are as ``generate(do_sample=False)`` writes them."""
        prompts = list(dict.fromkeys(query.prompt for query, _ in draws))
        prefixes = [Prefix(ids) for ids in prompts]
        groups, order = prefill_all(self.subject.model, prefixes, work.prefilled)
        number = {prompts[i]: at for at, i in enumerate(order)}
        temperature, seed = self.settings.response_temperature, self.settings.seed
        rows = [
            Row(
                number[query.prompt],
                temperature,
                response_stream_key(seed, query.source_id, draw),
            )
            for query, draw in draws
        ]
        return decode(
            self.subject.model,
            groups,
            rows,
            self.plan.chat.response_stop_ids,
            self.settings.max_response_tokens,
            together=limit,
            on_step=work.decoded,
        )

    @torch.inference_mode()
    def contexts(
        self, contexts: Sequence[PreparedContext], limit: int, work: PartProgress
    ) -> list[ContextResult]:
        """Results of contexts, at most ``limit`` rows at a time. Where rows end, rows of other
        contexts take their places."""
        queue = QUEUE[self.subject.device.type] * limit
        together = max(1, queue // len(self.settings.rows()))
        results: list[ContextResult] = []
        for start in range(0, len(contexts), together):
            results += self._contexts_together(contexts[start : start + together], limit, work)
        return results

    def _contexts_together(
        self, contexts: Sequence[PreparedContext], limit: int, work: PartProgress
    ) -> list[ContextResult]:
        """Prefill contexts; score and sample from that."""
        model, grid = self.subject.model, self.settings.rows()
        groups, order = self._prefilled(contexts, work)
        members = [contexts[number] for number in order]  # in the order of the groups
        scored = self._real_follow_ups(groups, members)
        counts = self._rows_of(groups, work)
        rows = [
            Row(
                number,
                temperature,
                stream_key(self.settings.seed, context.conversation.source_id, sample),
                context.at_turn,
                drawn,
                sample if self.settings.first_tokens and drawn else None,
            )
            for number, context in enumerate(members)
            for temperature, drawn, sample in grid[: counts[number]]
        ]
        decoded = decode(
            model,
            groups,
            rows,
            self.plan.chat.stop_ids,
            self.settings.max_new_tokens,
            together=limit,
            on_step=work.decoded,
        )
        # Each leaves the device at once, when the rows are decoded.
        logits = torch.cat([group.logits for group in groups]).cpu()
        residuals = torch.cat([cast(Tensor, group.residuals) for group in groups]).cpu()
        results: dict[int, ContextResult] = {}
        own = iter(decoded)
        for at, number in enumerate(order):
            if logits[at].isnan().any():
                raise UserError(
                    "the model's logits are not numbers for the context of "
                    f"{contexts[number].conversation.id} in {self.subject.describe()['dtype']}",
                    "use --dtype bfloat16 or float32 and another --out",
                )
            turns = list(islice(own, counts[at]))
            results[number] = ContextResult(turns, scored.get(at), logits[at], residuals[at])
        return [results[number] for number in range(len(contexts))]

    def _rows_of(self, groups: list[Prefilled], work: PartProgress) -> list[int]:
        """How many of the rows of ``Settings.rows`` each context has: all of them, or as many first
        tokens as are asked for."""
        most, share = len(self.settings.rows()), self.settings.first_tokens
        if not share:
            return [most] * sum(len(group.logits) for group in groups)
        (t,) = self.settings.temperatures
        counts = [
            1 + n
            for group in groups
            for n in first_tokens_holding(share, group.logits, t, most - 1)
        ]
        lacking = sum(most - count for count in counts)
        work.fewer(lacking, lacking * self.settings.max_new_tokens)
        return counts

    def _prefilled(
        self, contexts: Sequence[PreparedContext], work: PartProgress
    ) -> tuple[list[Prefilled], list[int]]:
        """The contexts in groups, and their numbers; one with pieces of another is by itself."""
        prefixes = [self._prefix(context) for context in contexts]
        foreign = {n: one.foreign for n, one in enumerate(contexts) if one.foreign is not None}
        plain = [number for number in range(len(contexts)) if number not in foreign]
        some = [prefixes[number] for number in plain]
        groups, order = prefill_all(self.subject.model, some, work.prefilled)
        for number, pieces in foreign.items():
            groups.append(prefill_foreign(self.subject.model, prefixes[number], pieces))
            work.prefilled(len(prefixes[number].ids))
        return groups, [*(plain[number] for number in order), *foreign]

    def _prefix(self, context: PreparedContext) -> Prefix:
        at = [context.chat.positions[name] for name in self.plan.positions]
        places = [-1 if place is None else place for place in at]
        return Prefix(context.chat.ids, places, context.at_context)

    def _real_follow_ups(
        self, groups: list[Prefilled], members: list[PreparedContext]
    ) -> dict[int, Scored]:
        """Scores of the real follow-ups, by the number of their context."""
        turns = []
        for number, context in enumerate(members):
            if context.real_follow_up is not None:
                ids = context.real_follow_up.whole
                steered = at_tokens(context.at_turn, range(len(ids) - 1))  # the last is predicted
                turns.append(Turn(number, ids, interventions=tuple(steered)))
        scores = score(
            self.subject.model,
            groups,
            turns,
            scored_temperatures(self.settings.temperatures),
        )
        return {turn.context: one for turn, one in zip(turns, scores, strict=True)}
