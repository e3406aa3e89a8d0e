"""The scorer on token ids alone: every tested architecture, odd turns, and full contexts.

A format of one id per character stands in for a chat template.
"""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from contract import LOGPROB
from scored import logprobs

from ia_mech.chat.format import ChatContext
from ia_mech.data.conversations import Conversation
from ia_mech.engine.decode import decode
from ia_mech.engine.loop import Decoded, Row
from ia_mech.engine.plan import OomBackoff
from ia_mech.engine.prefill import Prefix, prefill
from ia_mech.engine.sampling import stream_key
from ia_mech.errors import UserError
from ia_mech.likelihood.scorer import (
    ContextScores,
    Scorable,
    Scorer,
    contrast_columns,
    reference_columns,
)
from ia_mech.likelihood.swaps import SwapSources

TEMPERATURES = (0.5, 1.0, 2.0)
# Sums over turns of up to 40 tokens, at half the temperature; log-odds and bits are differences.
NUMBERS = 40 * LOGPROB / 0.5 * 2
EACH = pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)


class Letters:
    """A chat format without a template: a turn is its role, its characters and an end."""

    def __init__(self, closing: int | None = tiny.EOS, refused: str = "") -> None:
        self.closing_id, self.refused = closing, refused

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        """As a tokenizer."""
        return {"input_ids": [3 + ord(letter) % 90 for letter in text]}

    def context(self, messages) -> ChatContext:
        ids = [1]
        for one in messages:
            if one["role"] == "assistant" and not one["content"] and self.refused == "empty":
                raise UserError("no empty answers", "answer")
            ids += [93 + len(one["role"]) % 3, *self(one["content"])["input_ids"], 96]
        return ChatContext("", [*ids, 93], {})

    def reference_ids(self, messages, context, turn: str) -> list[int]:
        if "|" in turn:
            raise UserError("a mark", "remove it")
        return self(turn)["input_ids"]

    def opening(self, messages) -> list[int]:
        if self.refused == "header":
            raise UserError("no first user turn", "leave it out")
        return [1, 93]


def conversation(name: str, query: str, response: str, reference: str | None) -> Conversation:
    messages = ({"role": "user", "content": query}, {"role": "assistant", "content": response})
    return Conversation(name, name, "letters", messages, reference)


CONVERSATIONS = [
    conversation("a", "What is it?", "It is blue, as far as anyone can tell.", "And why?"),
    conversation("b", "Why?", "No.", "Go on, say it in a whole sentence"),
    conversation("c", "And half of that, in metres?", "12", None),
    conversation("d", "hi", "Hello there!", "h"),
]


class Bench:
    """A model, conversations after their prefill, generations, and a scorer of them."""

    def __init__(
        self, architecture: str, chat: Letters | None = None, conversations=CONVERSATIONS
    ) -> None:
        self.model, self.conversations = tiny.model(architecture), conversations
        self.chat = chat or Letters()
        self.notes: list[tuple[str, str]] = []
        self.contexts = [
            Scorable(
                order,
                one,
                self.chat.context(one.messages).ids,
                None if one.reference is None else self.chat(one.reference)["input_ids"],
            )
            for order, one in enumerate(conversations)
        ]
        rows = [(order, one, None) for order, one in enumerate(conversations)]
        self.donors = SwapSources.of(rows, self.chat, seed=0)

    def scorer(self, *, swaps: int = 2, generations: bool = True, limit=None) -> Scorer:
        return Scorer(
            self.model,
            self.chat,
            self.donors,
            TEMPERATURES,
            swaps=swaps,
            generations=generations,
            own=None,
            limit=limit,
            rows_limit=OomBackoff(64),
            note=lambda kind, problem: self.notes.append((kind, problem)),
        )

    def written(self) -> list[list[Decoded]]:
        """Two generations of every context."""
        prefilled = prefill(self.model, [Prefix(c.ids) for c in self.contexts])
        rows = [
            Row(at, t, stream_key(0, "bench", at))
            for at in range(len(self.contexts))
            for t in (0.0, 1.5)
        ]
        decoded = decode(self.model, prefilled, rows, [tiny.EOS, *range(40, 50)], 9)
        return [decoded[at : at + 2] for at in range(0, len(decoded), 2)]

    def score(self, decoded=None, chosen=None, **options) -> list[ContextScores]:
        contexts = [self.contexts[at] for at in chosen or range(len(self.contexts))]
        decoded = decoded or [[] for _ in contexts]
        prefilled = prefill(self.model, [Prefix(c.ids) for c in contexts])
        scorer = self.scorer(**options)
        scores = scorer.score_candidates(prefilled, contexts)
        scorer.add_contrasts(contexts, scores, decoded)
        return scores

    def after(self, at: int, response: str) -> list[int]:
        return self.chat.context(self.conversations[at].with_response(response).messages).ids

    def sums(self, context: list[int], ids: list[int], tokens: int) -> tuple[float, float | None]:
        """Content and whole of a turn, from a forward pass."""
        full = logprobs(self.model, context, ids)
        return full[:tokens].sum(), full.sum() if len(ids) > tokens else None

    def check(self, at: int, scores: ContextScores, contrasts, ids: list[int], tokens: int) -> None:
        """A turn's contrasts against forward passes."""
        responses = {one.id: one.response for one in self.conversations}
        wanted = {
            "given": self.contexts[at].ids,
            "empty": self.after(at, ""),
            "header": self.chat.opening(()),
        }
        found = {name: getattr(contrasts, name) for name in wanted}
        for number, lender in enumerate(scores.swapped_from):
            wanted[lender] = self.after(at, responses[lender])
            found[lender] = contrasts.swapped[number]
        assert len(contrasts.swapped) == len(scores.swapped_from)
        atol = max(1, len(ids)) * LOGPROB
        for name, context in wanted.items():
            content, whole = self.sums(context, ids, tokens)
            np.testing.assert_allclose(
                found[name].content, content, rtol=0, atol=atol, err_msg=name
            )
            assert (found[name].whole is None) == (whole is None)
            if whole is not None:
                np.testing.assert_allclose(
                    found[name].whole, whole, rtol=0, atol=atol, err_msg=name
                )


# -- every architecture -------------------------------------------------------------------------


@EACH
def test_scores_equal_full_forward_passes(architecture):
    bench = Bench(architecture)
    written = bench.written()
    for at, scores in enumerate(bench.score(written)):
        context = bench.contexts[at]
        assert len(scores.swapped_from) == 2
        for one in scores.candidates:
            ids = [*one.ids, tiny.EOS]
            np.testing.assert_allclose(
                one.scored.logprobs_raw,
                logprobs(bench.model, context.ids, ids),
                rtol=0,
                atol=LOGPROB,
            )
            for number, temperature in enumerate(TEMPERATURES):
                full = logprobs(bench.model, context.ids, ids, temperature)
                found = one.scored.logprobs_tempered[number]
                atol = LOGPROB / temperature
                np.testing.assert_allclose(found, full, rtol=0, atol=atol)
            if one.contrasts is not None:
                bench.check(at, scores, one.contrasts, ids, len(one.ids))
        for row, contrasts in zip(written[at], scores.generations, strict=True):
            ids = row.token_ids.tolist()
            tokens = len(ids) - (row.finish_reason == "turn_end")
            bench.check(at, scores, contrasts, ids, tokens)
    assert bench.notes == []


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss", "qwen3_5"])
def test_contexts_scored_together_score_as_each_alone(architecture):
    bench = Bench(architecture)
    written = bench.written()
    together = bench.score(written)
    for at, scores in enumerate(together):
        alone = bench.score([written[at]], [at])[0]
        assert alone.swapped_from == scores.swapped_from
        a, b = (_numbers(bench, at, one) for one in (scores, alone))
        np.testing.assert_allclose(a, b, rtol=0, atol=NUMBERS)


def _numbers(bench: Bench, at: int, scores: ContextScores) -> list[float]:
    """All log-probabilities of a context, and its contrasts."""
    text = bench.conversations[at].reference or ""
    columns = reference_columns(scores.candidates, text, closed=True)
    numbers = [contrast_columns(one) for one in scores.generations]
    numbers += [*columns.pop("candidates", []), columns]
    flat = []
    for row in numbers:
        for value in row.values():
            if not isinstance(value, str | None):
                flat += [float(one) for one in np.atleast_1d(value)]
    assert len(flat) > 10
    return flat


# -- odd turns ----------------------------------------------------------------------------------


def generation(bench: Bench, at: int, ids: list[int], reason: str) -> Decoded:
    """As if the model had written these ids."""
    raw = logprobs(bench.model, bench.contexts[at].ids, ids)
    nothing = np.full(len(ids), np.nan)
    return Decoded(np.array(ids, dtype=int), raw, nothing, nothing, nothing, reason)


@pytest.mark.parametrize(
    ("ids", "reason", "tokens"),
    [
        ([tiny.EOS], "turn_end", 0),
        ([45], "turn_end", 0),  # another token that ends a turn
        ([5, 6, 45], "turn_end", 2),
        ([tiny.EOS], "length", 1),
        ([5, 6, 7], "length", 3),
        ([], "length", 0),
    ],
)
def test_a_generation_that_is_empty_ends_otherwise_or_never(ids, reason, tokens):
    bench = Bench("llama")
    decoded = [[generation(bench, at, ids, reason)] for at in range(4)]
    for at, scores in enumerate(bench.score(decoded)):
        contrasts = scores.generations[0]
        bench.check(at, scores, contrasts, ids, tokens)
        columns = contrast_columns(contrasts)
        ended = reason == "turn_end"
        assert (columns["response_contrast_bits_with_end"] is not None) is ended
        assert (columns["logprob_swapped_with_end"] is not None) is ended
        if tokens == 0:  # nothing was said, so nothing is owed to the response
            assert columns["response_contrast_bits"] == columns["header_contrast_bits"] == 0


def test_a_template_that_closes_turns_with_text_has_contents_alone():
    bench = Bench("llama", Letters(closing=None))
    for at, scores in enumerate(bench.score()):
        for one in scores.candidates:
            assert len(one.scored.logprobs_raw) == len(one.ids)
            if one.contrasts is not None:
                bench.check(at, scores, one.contrasts, one.ids, len(one.ids))
                assert one.contrasts.given.whole is None


def test_generations_are_not_scored_where_nobody_asked():
    bench = Bench("llama")
    for at, scores in enumerate(bench.score(bench.written(), generations=False)):
        assert scores.generations is None
        assert bool(scores.swapped_from) == (bench.conversations[at].reference is not None)


def test_no_swaps_leave_the_empty_response_and_the_header():
    for scores in Bench("llama").score(swaps=0):
        for one in scores.candidates:
            if one.contrasts is not None:
                assert one.contrasts.swapped == [] and one.contrasts.empty and one.contrasts.header


@pytest.mark.parametrize("kind", ["empty", "header"])
def test_what_a_template_refuses_is_noted_and_left_out(kind):
    bench = Bench("llama", Letters(refused=kind))
    problem = {"empty": "no empty answers", "header": "no first user turn"}[kind]
    other = {"empty": "header", "header": "empty"}[kind]
    for scores in bench.score():
        for one in scores.candidates:
            if one.contrasts is not None:
                assert getattr(one.contrasts, kind) is None
                assert getattr(one.contrasts, other) and len(one.contrasts.swapped) == 2
    said = {"empty": "empty response", "header": "bare header"}[kind]
    assert set(bench.notes) == {(said, problem)}


def test_a_candidate_that_the_template_refuses_is_left_out():
    for reference, lender in (("a b", "a"), ("a|b", None)):
        pair = [replace(CONVERSATIONS[0], reference=reference), CONVERSATIONS[1]]
        found = Bench("llama", conversations=pair).score(chosen=[1], swaps=0, generations=False)[0]
        lenders = {one.candidate.name: one.candidate.swap_source for one in found.candidates}
        assert lenders.get("other_reference") == lender
        assert len(lenders) == 4 + (lender is not None)


# -- the model's limit --------------------------------------------------------------------------


def test_contexts_and_turns_that_exceed_the_limit_are_left_out():
    """Each at its own boundary: what just fits is scored, what is one too long is not."""
    bench = Bench("llama")
    at = 1  # its response is the shortest
    free = bench.score(chosen=[at], swaps=3, generations=False)[0]
    responses = {one.id: one.response for one in CONVERSATIONS}
    longest = max(len(one.ids) for one in free.candidates if one.contrasts is not None) + 1
    lengths = {lender: len(bench.after(at, responses[lender])) for lender in free.swapped_from}
    assert len(set(lengths.values())) == 3
    for length in lengths.values():
        for limit in (length + longest, length + longest - 1):
            bench.notes.clear()
            cut = bench.score(chosen=[at], swaps=3, generations=False, limit=limit)[0]
            no_room = f"the model's context of {limit} tokens is too short for it"
            short = len(free.swapped_from) > len(cut.swapped_from)
            assert (("swapped response", no_room) in bench.notes) is short
            fitting = [x for x in free.swapped_from if lengths[x] + longest <= limit]
            assert cut.swapped_from == fitting
            for a, b in zip(free.candidates, cut.candidates, strict=False):
                if a.contrasts is None:
                    continue
                kept = [free.swapped_from.index(lender) for lender in fitting]
                assert [one.content for one in b.contrasts.swapped] == pytest.approx(
                    [a.contrasts.swapped[number].content for number in kept], abs=longest * LOGPROB
                )
                assert b.contrasts.header is not None


def test_memory_running_out_in_the_scorer_halves_the_turns(monkeypatch):
    import ia_mech.likelihood.scorer as module

    bench = Bench("llama")
    written = bench.written()
    free = bench.score(written)
    honest = module.score

    def tight(model, prefilled, turns, *others):
        if len(turns) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(model, prefilled, turns, *others)

    monkeypatch.setattr(module, "score", tight)
    for at, (a, b) in enumerate(zip(free, bench.score(written), strict=True)):
        np.testing.assert_allclose(
            _numbers(bench, at, a), _numbers(bench, at, b), rtol=0, atol=NUMBERS
        )
