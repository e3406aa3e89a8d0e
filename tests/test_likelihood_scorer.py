"""The scorer on token ids, with a format of one id per character for a chat template, and its
columns against sums and closed forms worked out by hand.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import tiny
from contract import LOGPROB
from scipy.special import logsumexp
from scored import logprobs

from ia_mech.chat.format import ChatContext
from ia_mech.data.conversations import Conversation
from ia_mech.engine.score import Scored
from ia_mech.engine.state import Prefix, prefill
from ia_mech.errors import UserError
from ia_mech.likelihood.candidates import Candidate
from ia_mech.likelihood.scorer import (
    SCORED,
    ContextScores,
    Contrasts,
    Likelihood,
    Scorable,
    ScoredCandidate,
    Scorer,
    contrast_columns,
    reference_columns,
    scored_temperatures,
)
from ia_mech.likelihood.swaps import SwapSources
from ia_mech.run import layout

AT = (0.5, 1.0, 2.0)
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
    """A model, conversations after their prefill, and a scorer of them."""

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

    def scorer(self, *, swaps: int = 2, limit=None) -> Scorer:
        return Scorer(
            self.model,
            self.chat,
            self.donors,
            AT,
            swaps=swaps,
            own=None,
            limit=limit,
            note=lambda kind, problem: self.notes.append((kind, problem)),
        )

    def score(self, chosen=None, **options) -> list[ContextScores]:
        contexts = [self.contexts[at] for at in chosen or range(len(self.contexts))]
        prefilled = prefill(self.model, [Prefix(c.ids) for c in contexts])
        scorer = self.scorer(**options)
        scores = scorer.score_candidates([prefilled], contexts)
        scorer.add_contrasts(contexts, scores)
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
    for at, scores in enumerate(bench.score()):
        context = bench.contexts[at]
        assert len(scores.swapped_from) == 2 * bool(scores.candidates)
        for one in scores.candidates:
            ids = [*one.ids, tiny.EOS]
            np.testing.assert_allclose(
                one.scored.logprobs_raw,
                logprobs(bench.model, context.ids, ids),
                rtol=0,
                atol=LOGPROB,
            )
            for number, temperature in enumerate(AT):
                full = logprobs(bench.model, context.ids, ids, temperature)
                found = one.scored.logprobs_tempered[number]
                atol = LOGPROB / temperature
                np.testing.assert_allclose(found, full, rtol=0, atol=atol)
            if one.contrasts is not None:
                bench.check(at, scores, one.contrasts, ids, len(one.ids))
    assert bench.notes == []


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss", "qwen3_5"])
def test_contexts_scored_together_score_as_each_alone(architecture):
    bench = Bench(architecture)
    for at, scores in enumerate(bench.score()):
        alone = bench.score([at])[0]
        assert alone.swapped_from == scores.swapped_from
        a, b = (_numbers(bench, at, one) for one in (scores, alone))
        np.testing.assert_allclose(a, b, rtol=0, atol=NUMBERS)


def _numbers(bench: Bench, at: int, scores: ContextScores) -> list[float]:
    """All log-probabilities of a context, and its contrasts."""
    text = bench.conversations[at].reference or ""
    columns = reference_columns(scores.candidates, text, closed=True)
    numbers = [*columns.pop("candidates", []), columns]
    flat = []
    for row in numbers:
        for value in row.values():
            if not isinstance(value, str | None):
                flat += [float(one) for one in np.atleast_1d(value)]
    assert len(flat) > 10 or not scores.candidates
    return flat


# -- odd turns ----------------------------------------------------------------------------------


def test_a_template_that_closes_turns_with_text_has_contents_alone():
    bench = Bench("llama", Letters(closing=None))
    for at, scores in enumerate(bench.score()):
        for one in scores.candidates:
            assert len(one.scored.logprobs_raw) == len(one.ids)
            if one.contrasts is not None:
                bench.check(at, scores, one.contrasts, one.ids, len(one.ids))
                assert one.contrasts.given.whole is None


def test_a_candidate_that_the_template_refuses_is_left_out():
    for reference, lender in (("a b", "a"), ("a|b", None)):
        pair = [replace(CONVERSATIONS[0], reference=reference), CONVERSATIONS[1]]
        found = Bench("llama", conversations=pair).score(chosen=[1], swaps=0)[0]
        lenders = {one.candidate.name: one.candidate.swap_source for one in found.candidates}
        assert lenders.get("other_reference") == lender
        assert len(lenders) == 4 + (lender is not None)


# -- the model's limit --------------------------------------------------------------------------


@pytest.mark.parametrize("short", [False, True])
def test_empty_responses_and_rivals_that_just_fit_are_scored(short):
    bench, options = Bench("llama"), {"swaps": 0}
    limit = len(bench.contexts[0].ids) + len(CONVERSATIONS[0].response) + 1 - short
    found = bench.score(chosen=[0], limit=limit, **options)[0].candidates
    names = [one.candidate.name for one in found]
    assert "query" in names and ("response" not in names) is short
    problem = f"the model's context of {limit} tokens is too short for it"
    assert (("candidate 'response'", problem) in bench.notes) is short
    limit = len(bench.after(3, "")) + len(bench.contexts[3].reference_ids) + 1 - short
    bench.donors = SwapSources.of([(3, CONVERSATIONS[3], None)], bench.chat, seed=0)
    (one,) = bench.score(chosen=[3], limit=limit, **options)[0].candidates
    assert one.contrasts.header is not None
    assert (one.contrasts.empty is None) is short is ("empty response" in dict(bench.notes))


def test_contexts_and_turns_that_exceed_the_limit_are_left_out():
    """Each at its own boundary: what just fits is scored, what is one too long is not."""
    bench = Bench("llama")
    at = 1  # its response is the shortest
    free = bench.score(chosen=[at], swaps=3)[0]
    responses = {one.id: one.response for one in CONVERSATIONS}
    longest = max(len(one.ids) for one in free.candidates if one.contrasts is not None) + 1
    lengths = {lender: len(bench.after(at, responses[lender])) for lender in free.swapped_from}
    assert len(set(lengths.values())) == 3
    for length in lengths.values():
        for limit in (length + longest, length + longest - 1):
            bench.notes.clear()
            cut = bench.score(chosen=[at], swaps=3, limit=limit)[0]
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


LN2 = math.log(2)
KINDS = ("logprob_empty", "logprob_swapped", "logprob_header")
BITS = ("response_contrast_bits", "empty_contrast_bits", "header_contrast_bits")


def likelihood(content: float, whole: float | None = None) -> Likelihood:
    """Of probabilities, not their logarithms."""
    return Likelihood(math.log(content), None if whole is None else math.log(whole))


# -- columns of contrasts --------------------------------------------------------------------------


def test_contrasts_are_log_ratios_of_probabilities_in_bits():
    found = contrast_columns(
        Contrasts(
            given=likelihood(1 / 4, 1 / 8),
            empty=likelihood(1 / 32, 1 / 8),
            swapped=[likelihood(1 / 16, 1 / 64)],
            header=likelihood(1 / 2, 1 / 1024),
        )
    )
    assert found.keys() == {name + end for name in (*KINDS, *BITS) for end in ("", "_with_end")}
    assert [found[name] for name in BITS] == pytest.approx([2, 3, -1])
    assert [found[f"{name}_with_end"] for name in BITS] == pytest.approx([3, 0, 7])
    assert found["logprob_empty"] == math.log(1 / 32)
    assert found["logprob_swapped"] == [math.log(1 / 16)]
    assert found["logprob_header_with_end"] == math.log(1 / 1024)


def test_several_swaps_are_averaged_as_probabilities():
    swapped = [likelihood(1 / 2, 1 / 2), likelihood(1 / 4, 1 / 64), likelihood(0.5**30, 0.5**40)]
    found = contrast_columns(Contrasts(likelihood(1 / 2, 1 / 4), swapped=swapped))
    mean = (1 / 2 + 1 / 4 + 0.5**30) / 3
    assert found["response_contrast_bits"] == pytest.approx(math.log2(1 / 2 / mean))
    mean = (1 / 2 + 1 / 64 + 0.5**40) / 3
    assert found["response_contrast_bits_with_end"] == pytest.approx(math.log2(1 / 4 / mean))
    assert found["logprob_swapped"] == [one.content for one in swapped]
    tiny = [Likelihood(-2000.0 - k, None) for k in (0, 1, 2)]  # whose probabilities are 0 as floats
    found = contrast_columns(Contrasts(tiny[0], swapped=tiny[1:]))
    expected = -math.log2((math.exp(-1) + math.exp(-2)) / 2)
    assert found["response_contrast_bits"] == pytest.approx(expected)


def test_what_was_not_scored_has_no_contrast():
    assert contrast_columns(None) == {}
    found = contrast_columns(Contrasts(likelihood(1 / 4, 1 / 8), empty=likelihood(1 / 8, 1 / 8)))
    assert {name for name, value in found.items() if value is not None} == {
        *("logprob_empty", "logprob_empty_with_end"),
        *("empty_contrast_bits", "empty_contrast_bits_with_end"),
    }
    one = likelihood(1 / 4)  # without a turn end
    found = contrast_columns(Contrasts(one, one, [one, one], one))
    assert [found[name] for name in BITS] == [0, 0, 0]
    assert {found[f"{name}_with_end"] for name in (*KINDS, *BITS)} == {None}


# -- references ---------------------------------------------------------------------------------


def of_logprobs(
    logprobs, *, tempered=((-1.0, -2.0, -4.0), (-0.5, -0.25, -3.0)), ranks=None, greedy=None
) -> Scored:
    count = len(logprobs)
    return Scored(
        logprobs_raw=np.array(logprobs, dtype=np.float32),
        logprobs_tempered=np.array([row[:count] for row in tempered], dtype=np.float32),
        ranks=np.array([1] * count if ranks is None else ranks),
        greedy=np.array([True] * count if greedy is None else greedy, dtype=bool),
    )


def candidate(name: str, of: Scored, tokens: int, *, contrasts=None, **more) -> ScoredCandidate:
    ids = list(range(100, 100 + tokens))
    return ScoredCandidate(Candidate(name, f"text of {name}", **more), ids, of, contrasts)


def columns(of: Scored, tokens: int, *rivals, text="Why so?", closed=True) -> dict:
    return reference_columns([candidate("reference", of, tokens), *rivals], text, closed)


def test_sums_are_without_the_turn_end_and_with_it():
    found = columns(of_logprobs([-0.5, -1.5, -4.0]), 2, text="Où ?")
    assert found["reference_token_ids"] == [100, 101]
    assert found["reference_logprobs_raw"].tolist() == [-0.5, -1.5, -4.0]
    assert found["reference_logprob"] == -2.0
    assert found["reference_logprob_with_end"] == -6.0
    assert found["reference_logprob_tempered"].tolist() == [-3.0, -0.75]
    assert found["reference_logprob_tempered_with_end"].tolist() == [-7.0, -3.75]
    assert found["reference_bits_per_byte"] == pytest.approx(2.0 / LN2 / 5)  # ù is two bytes
    assert found["reference_greedy"] is True and found["reference_greedy_tokens"] == 2
    assert found["reference_greedy_left_rank"] is found["reference_greedy_left_prob"] is None
    assert "candidate_log_odds" not in found
    logprobs = [-16777216.0, -1.0]  # in single precision the sum is the first
    assert columns(of_logprobs(logprobs), 2, closed=False)["reference_logprob"] == -16777217.0


def test_a_template_that_closes_turns_with_text_has_no_sum_with_the_end():
    rival = candidate("query", of_logprobs([-1.0]), 1)
    found = columns(of_logprobs([-0.5, -1.5, -4.0]), 3, rival, closed=False)
    assert found["reference_logprob"] == found["candidates"][0]["logprob"] == -6.0
    assert found["reference_logprob_tempered"].tolist() == [-7.0, -3.75]
    for name in ("logprob_with_end", "logprob_tempered_with_end"):
        assert found[f"reference_{name}"] is found["candidates"][0][name] is None
    assert found["candidate_log_odds"] == pytest.approx(-6.0 + 1.0)
    assert found["candidate_log_odds_tempered"].tolist() == [-7.0 + 1.0, -3.75 + 0.5]


GREEDY = {
    "at once": ((0, 1, 1), (7, 1, 1), 0, 7, 0.5),
    "later": ((1, 0, 0), (1, 3, 9), 1, 3, 0.25),
    "at the turn-end": ((1, 1, 0), (1, 1, 2), 2, 2, 0.125),
    "at a tie": ((1, 0, 1), (1, 1, 1), 1, 1, 0.25),
}


@pytest.mark.parametrize(("greedy", "ranks", "tokens", "rank", "prob"), GREEDY.values(), ids=GREEDY)
def test_where_greedy_decoding_leaves(greedy, ranks, tokens, rank, prob):
    logprobs = np.log([1 / 2, 1 / 4, 1 / 8])
    found = columns(of_logprobs(logprobs, ranks=ranks, greedy=greedy), 2)
    assert found["reference_greedy"] is False
    assert found["reference_greedy_tokens"] == tokens
    assert found["reference_greedy_left_rank"] == rank
    assert found["reference_greedy_left_prob"] == pytest.approx(prob)
    assert found["reference_ranks"].tolist() == list(ranks)


@pytest.mark.parametrize("greedy", [True, False])
def test_an_empty_turn_has_a_turn_end_alone(greedy):
    found = columns(of_logprobs([-0.5], greedy=[greedy], ranks=[2 - greedy]), 0, text="")
    assert found["reference_token_ids"] == []
    assert found["reference_logprob"] == 0.0
    assert found["reference_logprob_with_end"] == -0.5
    assert found["reference_logprob_tempered"].tolist() == [0.0, 0.0]
    assert found["reference_logprob_tempered_with_end"].tolist() == [-1.0, -0.5]
    assert found["reference_bits_per_byte"] is None
    assert found["reference_greedy"] is greedy and found["reference_greedy_tokens"] == 0
    assert found["reference_greedy_left_rank"] == (None if greedy else 2)


# -- candidates ---------------------------------------------------------------------------------


RIVALS = (
    candidate("query", of_logprobs([-1.0, -1.0]), 1),
    candidate(
        "other_reference",
        of_logprobs([-2.0, -3.0, -0.5], tempered=[[-9.0, -1.0, -1.0], [-0.5, -0.5, -0.5]]),
        2,
        swap_source="c7",
        contrasts=Contrasts(likelihood(1 / 2, 1 / 2), swapped=[likelihood(1 / 8, 1 / 32)]),
    ),
)


def test_log_odds_are_of_the_whole_turn_against_all_rivals_together():
    found = columns(of_logprobs([-0.5, -1.5, -4.0]), 2, *RIVALS)
    expected = -6.0 - math.log(math.exp(-2.0) + math.exp(-5.5))
    assert found["candidate_log_odds"] == pytest.approx(expected)
    # Query: -3 and -0.75 with its turn-end; the other reference: -11 and -1.5.
    expected = [-7.0 - logsumexp([-3.0, -11.0]), -3.75 - logsumexp([-0.75, -1.5])]
    assert found["candidate_log_odds_tempered"].tolist() == pytest.approx(expected)
    stored = found["candidates"]
    assert [one["name"] for one in stored] == ["reference", "query", "other_reference"]
    assert [one["lender"] for one in stored] == [None, None, "c7"]
    assert [one["logprob"] for one in stored] == [-2.0, -1.0, -5.0]
    assert [one["logprob_with_end"] for one in stored] == [-6.0, -2.0, -5.5]
    assert stored[2]["logprob_tempered_with_end"].tolist() == [-11.0, -1.5]
    assert stored[2]["response_contrast_bits"] == pytest.approx(2)


def test_columns_are_those_of_the_schema():
    contrasts = Contrasts(likelihood(1 / 2, 1 / 2))
    genuine = candidate("reference", of_logprobs([-0.5, -1.5, -4.0]), 2, contrasts=contrasts)
    found = reference_columns([genuine, *RIVALS], "Why?", closed=True)
    schema = layout.contexts_schema([])
    stored = [name for name in schema.names if name.startswith(("reference_", "candidate"))]
    assert sorted(found) == sorted(stored)
    fields = schema.field("candidates").type.value_type
    names = [sorted(one) for one in found["candidates"]]
    assert names[0] == names[2] == sorted(field.name for field in fields)
    assert set(names[1]) < set(names[0])  # the query repeated has no contrasts


# -- temperatures -------------------------------------------------------------------------------


def test_turns_are_scored_at_twenty_temperatures_and_at_those_of_the_run():
    assert len(SCORED) == 20 and SCORED[0] == 0.1 and SCORED[-1] == 3.0
    assert scored_temperatures([]) == SCORED == tuple(sorted(SCORED))
    assert scored_temperatures([0.7, 1.0, 3.0]) == SCORED  # 0.7 is 0.7, not 0.7000000000000001
    assert scored_temperatures([5.0, 0.05, 0.72]) == tuple(sorted({*SCORED, 5.0, 0.05, 0.72}))
