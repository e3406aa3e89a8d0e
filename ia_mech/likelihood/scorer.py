"""Scores of given user turns in a group of contexts, and of the same turns after other responses.

Everything the run's own prefill can give comes from it: the reference and its rivals, at every
temperature. For a contrast the same turns are scored after another context, which costs that
context one prefill, however many turns are scored after it.

A perturbed context is a contrast itself: its reference is scored in it, and nothing else.

Scores as the columns that a run stores.

The temperatures that given user turns are scored at.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import logsumexp
from transformers import PreTrainedModel

from ia_mech.chat.format import ChatFormat
from ia_mech.data.conversations import UNPERTURBED, Conversation
from ia_mech.engine.loop import Decoded
from ia_mech.engine.plan import (
    PREFILL_COST,
    RESCORE_COST,
    SCORE_COST,
    OomBackoff,
    consecutive,
)
from ia_mech.engine.prefill import Prefilled
from ia_mech.engine.score import Scored, Turn, score, score_groups
from ia_mech.engine.shared_prefix import Engine
from ia_mech.errors import UserError
from ia_mech.likelihood.candidates import OTHER, REFERENCE, Candidate, OwnCandidates, rivals
from ia_mech.likelihood.counterfactual_prefill import Ids, prefill_counterfactuals, shared_prefix
from ia_mech.likelihood.swaps import SwapSources

SCORED = (
    *(round(0.1 * step, 1) for step in range(1, 16)),  # 0.1, 0.2, … 1.5
    *(1.75, 2.0, 2.25, 2.5, 3.0),
)


def scored_temperatures(sampled: Iterable[float]) -> tuple[float, ...]:
    """:data:`SCORED` with the temperatures that a run samples at, ascending."""
    return tuple(sorted({*SCORED, *sampled}))


HELD_TOKENS = 4096  # of other contexts whose turns are scored together
NO_SWAP_SOURCE = (
    "no other source of its dataset has another response to lend: use more conversations"
)
SAID = {"empty": "empty response", "swapped": "swapped response", "header": "bare header"}


@dataclass(frozen=True)
class Likelihood:
    """Log-probability of a turn in nats, T = 1.

    Attributes:
        content: of its tokens, without the turn-end; 0 for an empty turn.
        whole: with the turn-end; None where the turn has none (it was cut off, or the template
            closes turns with text).
    """

    content: float
    whole: float | None

    @classmethod
    def of(cls, logprobs: np.ndarray, tokens: int) -> "Likelihood":
        """From ``[tokens]`` or ``[tokens + 1]`` log-probabilities, summed in float64."""
        logprobs = np.asarray(logprobs, dtype=np.float64)
        whole = float(logprobs.sum()) if len(logprobs) > tokens else None
        return cls(float(logprobs[:tokens].sum()), whole)


@dataclass
class Contrasts:
    """How likely a turn is after its context's response, and after what stands in its place.

    Attributes:
        given: after the response.
        empty: after an empty response; None if the template refuses one.
        swapped: after each other conversation's response.
        header: after the bare user header, with no conversation before it; None if the template
            opens a first user turn otherwise.
    """

    given: Likelihood
    empty: Likelihood | None = None
    swapped: list[Likelihood] = field(default_factory=list)
    header: Likelihood | None = None


@dataclass
class ScoredCandidate:
    """A candidate with its scores: ``ids`` without the turn-end, which ``scored`` has at the end
    where the template closes turns with a token."""

    candidate: Candidate
    ids: list[int]
    scored: Scored
    contrasts: Contrasts | None = None


@dataclass
class ContextScores:
    """All scores of one context.

    Attributes:
        candidates: the reference first; empty where the context has none.
        generations: contrasts of its generations, in the grid's order, or None if not asked for.
        swapped_from: ids of the conversations whose responses were put in place, in the order of
            every ``Contrasts.swapped``.
    """

    candidates: list[ScoredCandidate] = field(default_factory=list)
    generations: list[Contrasts] | None = None
    swapped_from: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Scorable:
    """A context as the scorer sees it.

    Attributes:
        order: of the conversation in the run.
        conversation: with its response.
        ids: of the context, with the open header.
        reference_ids: of the reference turn, without turn-end; None if there is none.
    """

    order: int
    conversation: Conversation
    ids: Sequence[int]
    reference_ids: Sequence[int] | None

    @property
    def perturbed(self) -> bool:
        return self.conversation.perturbation != UNPERTURBED


@dataclass
class _Probe:
    """A turn on its way: its ids with the turn-end, and where the results go."""

    context: int
    ids: list[int]
    tokens: int
    contrasts: Contrasts


@dataclass(frozen=True)
class _Slot:
    """Where the scores after other ids go: the context, the field of its probes' ``Contrasts``, and
    which of the swapped responses it is."""

    context: int
    name: str
    number: int


class Scorer:
    """Scores for a run.

    Args:
        model: the subject model.
        chat: its format.
        swap_sources: all conversations of the run.
        temperatures: at which the candidates are scored.
        contrasts: whether turns are scored in other contexts, too.
        swaps: after how many other responses.
        generations: whether generations are scored there as well.
        rivals: whether rivals of the reference are scored in its context.
        own: the user's candidates.
        limit: of the model's context, or None.
        rows_limit: how many turns are scored together; halved when memory ends.
        note: told what is left out somewhere (a kind of context, or a candidate), and why.
        share: turns after one context read its keys and values in one place.
        on_work: called with the work that was done, in decoded tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        chat: ChatFormat,
        swap_sources: SwapSources,
        temperatures: Sequence[float],
        *,
        contrasts: bool = True,
        swaps: int,
        generations: bool,
        rivals: bool = True,
        own: OwnCandidates | None,
        limit: int | None,
        rows_limit: OomBackoff,
        note: Callable[[str, str], None],
        share: bool = True,
        on_work: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._model, self._chat, self._swap_sources = model, chat, swap_sources
        self._temperatures, self._swaps, self._generations = temperatures, swaps, generations
        self._own, self._limit, self._rows_limit, self._note = own, limit, rows_limit, note
        self._contrasts, self._rivals = contrasts, rivals
        self._share, self._on_work = share, on_work
        self._branches = share and Engine.possible(model).whole
        self._others_limit = OomBackoff(10**6, outermost=False)
        self._closing = [] if chat.closing_id is None else [chat.closing_id]

    def score(
        self,
        prefilled: Prefilled,
        contexts: Sequence[Scorable],
        decoded: Sequence[Sequence[Decoded]],
    ) -> list[ContextScores]:
        """All scores of a group of contexts; see the two methods that follow."""
        scores = self.score_candidates(prefilled, contexts)
        self.add_contrasts(contexts, scores, decoded)
        return scores

    def score_candidates(
        self, prefilled: Prefilled, contexts: Sequence[Scorable]
    ) -> list[ContextScores]:
        """Scores of the references and their rivals, in their own contexts.

        Args:
            prefilled: a group of contexts.
            contexts: its members, in that order.
        """
        scores = [ContextScores() for _ in contexts]
        sources = [self._sources_for(context) for context in contexts]
        self._score_candidates(prefilled, contexts, sources, scores)
        return scores

    def add_contrasts(
        self,
        contexts: Sequence[Scorable],
        scores: Sequence[ContextScores],
        decoded: Sequence[Sequence[Decoded]],
    ) -> None:
        """Scores of the same turns, and of generations, in other contexts; into ``scores``.

        Args:
            contexts: any that :meth:`score_candidates` was asked about.
            scores: what it answered for each.
            decoded: the generations of each.
        """
        probes = [
            _Probe(at, [*c.ids, *self._closing], len(c.ids), c.contrasts)
            for at, one in enumerate(scores)
            for c in one.candidates
            if c.contrasts is not None
        ]
        if self._contrasts and self._generations:
            for at, rows in enumerate(decoded):
                if contexts[at].perturbed:
                    continue
                own = [self._generated(at, row) for row in rows]
                scores[at].generations = [probe.contrasts for probe in own]
                probes += own
        if probes:
            sources = [self._sources_for(context) for context in contexts]
            self._contrast(contexts, sources, scores, probes)

    def _sources_for(self, context: Scorable) -> list:
        """The conversations whose responses its turns are scored after."""
        if context.perturbed:
            return []
        return self._swap_sources.responses(context.order, self._swaps)

    # -- in the context itself ------------------------------------------------------------------

    def _score_candidates(self, prefilled, contexts, sources, scores) -> None:
        found: list[tuple[int, Candidate, list[int]]] = []
        for at, context in enumerate(contexts):
            if context.reference_ids is None:
                continue
            conversation = context.conversation
            genuine = Candidate(REFERENCE, conversation.reference)
            found.append((at, genuine, list(context.reference_ids)))
            if context.perturbed or not self._rivals:
                continue
            swap_source = self._swap_sources.reference(context.order, sources[at])
            for candidate in rivals(conversation, swap_source, self._own):
                ids = self._ids_of(context, candidate)
                if ids is not None:
                    found.append((at, candidate, ids))
        turns = [Turn(at, [*ids, *self._closing]) for at, _, ids in found]
        scored = self._rows_limit.map(
            lambda part: score(
                self._model, prefilled, part, self._temperatures, self._share,
                lambda tokens: self._on_work(SCORE_COST * tokens),
            ),
            turns,
        )  # fmt: skip
        for (at, candidate, ids), one in zip(found, scored, strict=True):
            contrasts = None
            compared = self._contrasts and candidate.name in (REFERENCE, OTHER)
            if compared and not contexts[at].perturbed:
                contrasts = Contrasts(Likelihood.of(one.logprobs_raw, len(ids)))
            scores[at].candidates.append(ScoredCandidate(candidate, ids, one, contrasts))

    def _ids_of(self, context: Scorable, candidate: Candidate) -> list[int] | None:
        """A candidate's ids; None where the template refuses it or the model's context is full."""
        messages, name = context.conversation.messages, f"candidate {candidate.name!r}"
        try:
            opened = self._chat.context(messages)
            ids = self._chat.reference_ids(messages, opened, candidate.text)
        except UserError as error:
            self._note(name, error.problem)
            return None
        if self._limit is not None and len(context.ids) + len(ids) + 1 > self._limit:
            self._note(name, self._no_room())
            return None
        return ids

    def _generated(self, at: int, row: Decoded) -> _Probe:
        ids = row.token_ids.tolist()
        tokens = len(ids) - (row.finish_reason == "turn_end")
        return _Probe(at, ids, tokens, Contrasts(Likelihood.of(row.logprobs_raw, tokens)))

    # -- in other contexts ----------------------------------------------------------------------

    def _contrast(self, contexts, sources, scores, probes: list[_Probe]) -> None:
        """Score every probe after an empty response, other responses and the bare header."""
        of: dict[int, list[_Probe]] = {}
        for probe in probes:
            of.setdefault(probe.context, []).append(probe)
        others: dict[Ids, list[_Slot]] = {}  # ids that many share are prefilled once

        def add(at: int, name: str, ids: list[int] | None) -> bool:
            if ids is None:
                return False
            longest = max(len(probe.ids) for probe in of[at])
            if self._limit is not None and len(ids) + longest > self._limit:
                self._note(SAID[name], self._no_room())
                return False
            others.setdefault(tuple(ids), []).append(_Slot(at, name, len(scores[at].swapped_from)))
            return True

        for at in of:
            conversation = contexts[at].conversation
            if self._swaps and not sources[at] and not contexts[at].perturbed:
                self._note(SAID["swapped"], NO_SWAP_SOURCE)
            for swap_source in sources[at]:
                if add(
                    at, "swapped", self._context_with(conversation, swap_source.response, "swapped")
                ):
                    scores[at].swapped_from.append(swap_source.id)
            add(at, "empty", self._context_with(conversation, "", "empty"))
            add(at, "header", self._opening(conversation))
            for probe in of[at]:
                probe.contrasts.swapped = [None] * len(scores[at].swapped_from)
        prefixes = self._trunks(others)
        ids = sorted(others, key=lambda one: (prefixes[one], len(one)))
        for held in consecutive([len(one) for one in ids], HELD_TOKENS):
            self._others_limit.map(
                lambda part: self._score_after(part, prefixes, others, of), [ids[i] for i in held]
            )

    def _trunks(self, others: dict[Ids, list[_Slot]]) -> dict[Ids, Ids]:
        """What each of these contexts begins with that others of its conversation do, too."""
        of: dict[int, list[Ids]] = {}
        for ids, slots in others.items():
            if self._branches and slots[0].name != "header":
                of.setdefault(slots[0].context, []).append(ids)
        found = {
            ids: begun
            for several in of.values()
            for begun in [shared_prefix(several)]
            for ids in several
        }
        return dict.fromkeys(others, ()) | found

    def _score_after(
        self,
        ids: Sequence[Ids],
        prefixes: dict[Ids, Ids],
        others: dict[Ids, list[_Slot]],
        of: dict[int, list[_Probe]],
    ) -> Sequence[Ids]:
        """Score the probes of contexts after these ids, and return the ids.

        They are prefilled in groups, but all scored together: their turns are few and short.
        """
        groups, order = prefill_counterfactuals(
            self._model,
            ids,
            [prefixes[one] for one in ids],
            lambda tokens: self._on_work(PREFILL_COST * tokens),
        )
        meant = [
            (row, slot, probe)
            for row, one in enumerate(ids[i] for i in order)
            for slot in others[one]
            for probe in of[slot.context]
        ]
        turns = [Turn(row, probe.ids) for row, _, probe in meant]
        scored = self._rows_limit.map(
            lambda part: score_groups(
                self._model, groups, part, (), self._share,
                lambda tokens: self._on_work(RESCORE_COST * tokens),
            ),
            turns,
        )  # fmt: skip
        for (_, slot, probe), one in zip(meant, scored, strict=True):
            found = Likelihood.of(one.logprobs_raw, probe.tokens)
            if slot.name == "swapped":
                probe.contrasts.swapped[slot.number] = found
            else:
                setattr(probe.contrasts, slot.name, found)
        return ids

    def _context_with(
        self, conversation: Conversation, response: str, name: str
    ) -> list[int] | None:
        try:
            return self._chat.context(conversation.with_response(response).messages).ids
        except UserError as error:
            self._note(SAID[name], error.problem)
            return None

    def _opening(self, conversation: Conversation) -> list[int] | None:
        try:
            return self._chat.opening(conversation.messages)
        except UserError as error:
            self._note(SAID["header"], error.problem)
            return None

    def _no_room(self) -> str:
        return f"the model's context of {self._limit} tokens has no room for it"


LN2 = float(np.log(2.0))


def contrast_columns(contrasts: Contrasts | None, prefix: str = "") -> dict:
    """What the turn's likelihood owes to the response, in bits, and what that is made of.

    ``response_contrast_bits`` = log₂ p(turn | query, response) − log₂ mean p(turn | query, another
    response); ``empty_contrast_bits`` and ``header_contrast_bits`` the like against an empty
    response and the bare header. Without the turn-end, and (``…_with_end``) with it.
    """
    if contrasts is None:
        return {}
    columns = {}
    for end, of in (("", lambda one: one.content), ("_with_end", lambda one: one.whole)):

        def value(one: Likelihood | None, of=of) -> float | None:
            return None if one is None else of(one)

        given, empty, header = map(value, (contrasts.given, contrasts.empty, contrasts.header))
        swapped = [] if given is None else [of(one) for one in contrasts.swapped]
        mean = float(logsumexp(swapped) - np.log(len(swapped))) if swapped else None
        columns |= {
            f"logprob_empty{end}": empty,
            f"logprob_swapped{end}": swapped or None,
            f"logprob_header{end}": header,
            f"response_contrast_bits{end}": _bits(given, mean),
            f"empty_contrast_bits{end}": _bits(given, empty),
            f"header_contrast_bits{end}": _bits(given, header),
        }
    return {prefix + name: column for name, column in columns.items()}


def _bits(given: float | None, other: float | None) -> float | None:
    return None if given is None or other is None else (given - other) / LN2


def reference_columns(candidates: Sequence[ScoredCandidate], text: str, closed: bool) -> dict:
    """Columns of a context's reference turn and of its rivals; the reference comes first.

    Args:
        candidates: of one context; none if it has no reference.
        text: of the reference.
        closed: whether the template closes turns with a token.
    """
    if not candidates:
        return {}
    genuine, scored = candidates[0], candidates[0].scored
    n, size = len(genuine.ids), len(text.encode())
    raw = scored.logprobs_raw.astype(np.float64)
    all_greedy = bool(scored.greedy.all())
    leaves = len(scored.greedy) if all_greedy else int(np.argmin(scored.greedy))
    tempered, with_end = _tempered(genuine, closed)
    return {
        "reference_token_ids": genuine.ids,
        "reference_logprobs_raw": scored.logprobs_raw,
        "reference_ranks": scored.ranks,
        "reference_logprob": float(raw[:n].sum()),
        "reference_logprob_with_end": float(raw.sum()) if closed else None,
        "reference_logprob_tempered": tempered,
        "reference_logprob_tempered_with_end": with_end,
        "reference_bits_per_byte": float(-raw[:n].sum() / LN2 / size) if size else None,
        "reference_greedy": all_greedy,
        "reference_greedy_tokens": min(leaves, n),
        "reference_greedy_left_rank": None if all_greedy else int(scored.ranks[leaves]),
        "reference_greedy_left_prob": None if all_greedy else float(np.exp(raw[leaves])),
        **contrast_columns(genuine.contrasts, "reference_"),
        "candidates": [_candidate(one, closed) for one in candidates],
        **_log_odds(candidates, closed),
    }


def _tempered(one: ScoredCandidate, closed: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """``[temperatures]`` sums without and with the turn-end."""
    tempered = one.scored.logprobs_tempered.astype(np.float64)
    return tempered[:, : len(one.ids)].sum(-1), tempered.sum(-1) if closed else None


def _candidate(one: ScoredCandidate, closed: bool) -> dict:
    likelihood = Likelihood.of(one.scored.logprobs_raw, len(one.ids))
    tempered, with_end = _tempered(one, closed)
    return {
        "name": one.candidate.name,
        "text": one.candidate.text,
        "lender": one.candidate.swap_source,
        "tokens": len(one.ids),
        "logprob": likelihood.content,
        "logprob_with_end": likelihood.whole,
        "logprob_tempered": tempered,
        "logprob_tempered_with_end": with_end,
        **contrast_columns(one.contrasts),
    }


def _log_odds(candidates: Sequence[ScoredCandidate], closed: bool) -> dict:
    """Log-odds in nats of the reference among the candidates, each as a whole turn."""
    if len(candidates) < 2:
        return {}
    raw = np.array([one.scored.logprobs_raw.astype(np.float64).sum() for one in candidates])
    tempered = np.array([_tempered(one, closed)[1 if closed else 0] for one in candidates])
    return {
        "candidate_log_odds": float(raw[0] - logsumexp(raw[1:])),
        "candidate_log_odds_tempered": tempered[0] - logsumexp(tempered[1:], axis=0),
    }
