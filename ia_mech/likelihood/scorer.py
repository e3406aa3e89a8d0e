"""Scores of given user turns: in their own context, and in counterfactual ones.

The run's own prefill gives the scores of the reference and its rivals at every temperature. For a
contrast the same turns are scored after another context, which is prefilled once however many turns
are scored after it. A perturbed context is a contrast itself: only its reference is scored.

The functions at the end turn scores into the columns that a run stores.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import logsumexp
from transformers import PreTrainedModel

from ia_mech.chat.format import ChatFormat
from ia_mech.data.conversations import UNPERTURBED, Conversation
from ia_mech.engine.intervene import Steered
from ia_mech.engine.score import Scored, Turn, score
from ia_mech.engine.state import Prefilled, Prefix, prefill_all
from ia_mech.errors import UserError
from ia_mech.likelihood.candidates import OTHER, REFERENCE, Candidate, OwnCandidates, rivals
from ia_mech.likelihood.swaps import SwapSource, SwapSources

SCORED = (
    *(round(0.1 * step, 1) for step in range(1, 16)),  # 0.1, 0.2, … 1.5
    *(1.75, 2.0, 2.25, 2.5, 3.0),
)
HELD = 16  # counterfactual contexts whose turns are scored together
Ids = tuple[int, ...]
NO_SWAP_SOURCE = "no other source of its dataset has another response: use more conversations of it"
KINDS = {"empty": "empty response", "swapped": "swapped response", "header": "bare header"}


def scored_temperatures(sampled: Iterable[float]) -> tuple[float, ...]:
    """:data:`SCORED` with the temperatures that a run samples at, ascending."""
    return tuple(sorted({*SCORED, *sampled}))


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
        swapped: after each swap source's response.
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
        swapped_from: ids of the swap sources, in the order of every ``Contrasts.swapped``.
    """

    candidates: list[ScoredCandidate] = field(default_factory=list)
    swapped_from: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Scorable:
    """A context as the scorer sees it.

    Attributes:
        order: of the conversation in the run.
        conversation: with its response.
        ids: of the context, with the open header.
        reference_ids: of the reference turn, without turn-end; None if there is none.
        steered: at each token of a turn in this context.
    """

    order: int
    conversation: Conversation
    ids: Sequence[int]
    reference_ids: Sequence[int] | None
    steered: tuple[Steered, ...] = ()

    @property
    def perturbed(self) -> bool:
        return self.conversation.perturbation != UNPERTURBED


@dataclass
class _Turn:
    """A turn to score in counterfactual contexts: ``ids`` with the turn-end, ``tokens`` without."""

    ids: list[int]
    tokens: int
    contrasts: Contrasts


@dataclass(frozen=True)
class _Target:
    """Where the scores after a counterfactual context go.

    ``context`` is the index of the context whose turns are scored, ``name`` a field of their
    ``Contrasts``, ``number`` the index in ``swapped``.
    """

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
        contrasts: whether turns are scored in counterfactual contexts, too.
        swaps: after how many other responses.
        rivals: whether rivals of the reference are scored in its context.
        own: the user's candidates.
        limit: of the model's context in tokens, or None.
        note: called with what is left out somewhere (a kind of context, or a candidate), and why.
        share: turns after one context read its keys and values in one place.
        on_tokens: called with how many tokens were scored.
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
        rivals: bool = True,
        own: OwnCandidates | None,
        limit: int | None,
        note: Callable[[str, str], None],
        share: bool = True,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self._model, self._chat, self._swap_sources = model, chat, swap_sources
        self._temperatures, self._swaps = temperatures, swaps
        self._own, self._limit, self._note = own, limit, note
        self._contrasts, self._rivals = contrasts, rivals
        self._share, self._on_tokens = share, on_tokens
        self._closing = [] if chat.closing_id is None else [chat.closing_id]

    # -- in the context itself ------------------------------------------------------------------

    def score_candidates(
        self, groups: Sequence[Prefilled], contexts: Sequence[Scorable]
    ) -> list[ContextScores]:
        """Scores of the references and their rivals, in their own contexts.

        Args:
            groups: contexts that were prefilled together.
            contexts: their members, in that order.
        """
        found = [
            (at, candidate, ids)
            for at, context in enumerate(contexts)
            for candidate, ids in self._candidates(context)
        ]
        turns = [Turn(at, [*ids, *self._closing], contexts[at].steered) for at, _, ids in found]
        scored = self._score(groups, turns, self._temperatures)
        scores = [ContextScores() for _ in contexts]
        for (at, candidate, ids), one in zip(found, scored, strict=True):
            contrasts = None
            compared = self._contrasts and candidate.name in (REFERENCE, OTHER)
            if compared and not contexts[at].perturbed:
                contrasts = Contrasts(Likelihood.of(one.logprobs_raw, len(ids)))
            scores[at].candidates.append(ScoredCandidate(candidate, ids, one, contrasts))
        return scores

    def _score(
        self, groups: Sequence[Prefilled], turns: Sequence[Turn], temperatures: Sequence[float]
    ) -> list[Scored]:
        return score(
            self._model,
            groups,
            turns,
            temperatures,
            share=self._share,
            on_tokens=self._on_tokens,
        )

    def _candidates(self, context: Scorable) -> Iterator[tuple[Candidate, list[int]]]:
        """The reference of a context and its rivals, with their ids; none without a reference."""
        conversation = context.conversation
        if context.reference_ids is None or conversation.reference is None:
            return
        yield Candidate(REFERENCE, conversation.reference), list(context.reference_ids)
        if context.perturbed or not self._rivals:
            return
        swap_source = self._swap_sources.reference(context.order, self._sources_for(context))
        for candidate in rivals(conversation, swap_source, self._own):
            ids = self._ids_of(context, candidate)
            if ids is not None:
                yield candidate, ids

    def _ids_of(self, context: Scorable, candidate: Candidate) -> list[int] | None:
        """A candidate's ids; None where the template refuses it or the model's context is full."""
        messages, name = context.conversation.messages, f"candidate {candidate.name!r}"
        try:
            opened = self._chat.context(messages)
            ids = self._chat.reference_ids(messages, opened, candidate.text)
        except UserError as error:
            self._note(name, error.problem)
            return None
        return ids if self._fits(len(context.ids) + len(ids) + 1, name) else None

    def _sources_for(self, context: Scorable) -> list[SwapSource]:
        """The conversations whose responses a context's turns are scored after."""
        if context.perturbed:
            return []
        return self._swap_sources.responses(context.order, self._swaps)

    def _fits(self, tokens: int, name: str) -> bool:
        """Whether the model's context holds so many tokens; noted if it doesn't."""
        if self._limit is None or tokens <= self._limit:
            return True
        self._note(name, f"the model's context of {self._limit} tokens is too short for it")
        return False

    # -- in counterfactual contexts --------------------------------------------------------------

    def add_contrasts(self, contexts: Sequence[Scorable], scores: Sequence[ContextScores]) -> None:
        """Add scores of the same turns in other contexts to ``scores``.

        Args:
            contexts: any whose candidates were scored.
            scores: what :meth:`score_candidates` returned for each.
        """
        turns: dict[int, list[_Turn]] = {}  # by context
        for at, one in enumerate(scores):
            found = [
                _Turn([*c.ids, *self._closing], len(c.ids), c.contrasts)
                for c in one.candidates
                if c.contrasts is not None
            ]
            if found:
                turns[at] = found
        targets: dict[Ids, list[_Target]] = {}  # contexts with the same ids are prefilled once
        for at, found in turns.items():
            longest = max(len(turn.ids) for turn in found)
            for name, ids, source in self._counterfactuals(contexts[at], longest):
                target = _Target(at, name, len(scores[at].swapped_from))
                targets.setdefault(tuple(ids), []).append(target)
                if source is not None:
                    scores[at].swapped_from.append(source.id)
            for turn in found:
                # Placeholders, each of which is overwritten.
                turn.contrasts.swapped = [turn.contrasts.given] * len(scores[at].swapped_from)
        order = sorted(targets, key=len)  # similar lengths are prefilled together
        for start in range(0, len(order), HELD):
            self._score_after(order[start : start + HELD], targets, turns)

    def _counterfactuals(
        self, context: Scorable, longest: int
    ) -> Iterator[tuple[str, list[int], SwapSource | None]]:
        """What stands in a context's place, where template and context length allow it.

        Yields:
            The kind (a key of :data:`KINDS`), the ids, and the swap source of a swapped response.
        """
        conversation, sources = context.conversation, self._sources_for(context)
        if self._swaps and not sources and not context.perturbed:
            self._note(KINDS["swapped"], NO_SWAP_SOURCE)
        wanted: list[tuple[str, SwapSource | None]] = [("swapped", source) for source in sources]
        for name, source in [*wanted, ("empty", None), ("header", None)]:
            response = "" if source is None else source.response
            try:
                if name == "header":
                    ids = self._chat.opening(conversation.messages)
                else:
                    ids = self._chat.context(conversation.with_response(response).messages).ids
            except UserError as error:
                self._note(KINDS[name], error.problem)
                continue
            if self._fits(len(ids) + longest, KINDS[name]):
                yield name, ids, source

    def _score_after(
        self,
        contexts: Sequence[Ids],
        targets: dict[Ids, list[_Target]],
        turns: dict[int, list[_Turn]],
    ) -> None:
        """Score the turns that belong after these contexts."""
        groups, order = prefill_all(self._model, [Prefix(ids) for ids in contexts])
        meant = [
            (row, target, turn)
            for row, ids in enumerate(contexts[i] for i in order)
            for target in targets[ids]
            for turn in turns[target.context]
        ]
        scored = self._score(groups, [Turn(row, turn.ids) for row, _, turn in meant], ())
        for (_, target, turn), one in zip(meant, scored, strict=True):
            likelihood = Likelihood.of(one.logprobs_raw, turn.tokens)
            if target.name == "swapped":
                turn.contrasts.swapped[target.number] = likelihood
            else:
                setattr(turn.contrasts, target.name, likelihood)


# -- columns --------------------------------------------------------------------------------------

LN2 = float(np.log(2.0))


def contrast_columns(contrasts: Contrasts | None, prefix: str = "") -> dict:
    """How much likelier the response makes the turn, in bits, and the log-probabilities behind it.

    ``response_contrast_bits`` = log₂ p(turn | query, response) − log₂ mean p(turn | query, another
    response); ``empty_contrast_bits`` and ``header_contrast_bits`` the like against an empty
    response and the bare header. Without the turn-end, and (``…_with_end``) with it.
    """
    if contrasts is None:
        return {}
    columns: dict[str, float | list[float] | None] = {}
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
