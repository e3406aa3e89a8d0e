"""Scores as columns, against sums and closed forms worked out by hand."""

import math

import numpy as np
import pytest
from scipy.special import logsumexp

from ia_mech.engine.score import Scored
from ia_mech.likelihood.candidates import Candidate
from ia_mech.likelihood.scorer import (
    SCORED,
    Contrasts,
    Likelihood,
    ScoredCandidate,
    contrast_columns,
    reference_columns,
    scored_temperatures,
)
from ia_mech.run import layout

LN2 = math.log(2)
KINDS = ("logprob_empty", "logprob_swapped", "logprob_header")
BITS = ("response_contrast_bits", "empty_contrast_bits", "header_contrast_bits")


def likelihood(content: float, whole: float | None = None) -> Likelihood:
    """Of probabilities, not their logarithms."""
    return Likelihood(math.log(content), None if whole is None else math.log(whole))


# -- contrasts ----------------------------------------------------------------------------------


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
    assert found["logprob_swapped_with_end"] == [one.whole for one in swapped]


def test_the_mean_of_probabilities_too_small_for_a_float_is_right():
    found = contrast_columns(
        Contrasts(
            Likelihood(-2000.0, None), swapped=[Likelihood(-2000.0 - k, None) for k in (1, 2)]
        )
    )
    expected = -math.log2((math.exp(-1) + math.exp(-2)) / 2)
    assert found["response_contrast_bits"] == pytest.approx(expected)


def test_what_was_not_scored_has_no_contrast():
    found = contrast_columns(Contrasts(likelihood(1 / 4, 1 / 8)))
    assert set(found.values()) == {None}
    found = contrast_columns(Contrasts(likelihood(1 / 4, 1 / 8), empty=likelihood(1 / 8, 1 / 8)))
    assert {name for name, value in found.items() if value is not None} == {
        *("logprob_empty", "logprob_empty_with_end"),
        *("empty_contrast_bits", "empty_contrast_bits_with_end"),
    }


def test_a_turn_without_a_turn_end_has_no_contrast_with_it():
    one = likelihood(1 / 4)
    found = contrast_columns(Contrasts(one, one, [one, one], one))
    assert [found[name] for name in BITS] == [0, 0, 0]
    assert {found[f"{name}_with_end"] for name in (*KINDS, *BITS)} == {None}


def test_contrasts_of_nothing_are_no_columns_and_names_take_a_prefix():
    assert contrast_columns(None) == contrast_columns(None, "reference_") == {}
    contrasts = Contrasts(likelihood(1 / 4, 1 / 8))
    named = contrast_columns(contrasts, "reference_")
    assert named == {f"reference_{k}": v for k, v in contrast_columns(contrasts).items()}
    assert named.keys() <= set(layout.contexts_schema([]).names)
    assert contrast_columns(contrasts).keys() <= set(layout.GENERATIONS.names)


# -- references ---------------------------------------------------------------------------------


def scored(
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
    found = columns(scored([-0.5, -1.5, -4.0]), 2, text="Où ?")
    assert found["reference_token_ids"] == [100, 101]
    assert found["reference_logprobs_raw"].tolist() == [-0.5, -1.5, -4.0]
    assert found["reference_logprob"] == -2.0
    assert found["reference_logprob_with_end"] == -6.0
    assert found["reference_logprob_tempered"].tolist() == [-3.0, -0.75]
    assert found["reference_logprob_tempered_with_end"].tolist() == [-7.0, -3.75]
    assert found["reference_bits_per_byte"] == pytest.approx(2.0 / LN2 / 5)  # ù is two bytes


def test_a_template_that_closes_turns_with_text_has_no_sum_with_the_end():
    found = columns(scored([-0.5, -1.5, -4.0]), 3, closed=False)
    assert found["reference_logprob"] == -6.0
    assert found["reference_logprob_tempered"].tolist() == [-7.0, -3.75]
    assert found["reference_logprob_with_end"] is None
    assert found["reference_logprob_tempered_with_end"] is None
    assert found["candidates"][0]["logprob"] == -6.0
    assert found["candidates"][0]["logprob_with_end"] is None
    assert found["candidates"][0]["logprob_tempered_with_end"] is None


def test_sums_are_made_in_double_precision():
    logprobs = [-16777216.0, -1.0]  # in single precision the sum is the first
    assert columns(scored(logprobs), 2, closed=False)["reference_logprob"] == -16777217.0


GREEDY = {
    "at once": ((0, 1, 1), (7, 1, 1), 0, 7, 0.5),
    "later": ((1, 0, 0), (1, 3, 9), 1, 3, 0.25),
    "at the turn-end": ((1, 1, 0), (1, 1, 2), 2, 2, 0.125),
    "at a tie": ((1, 0, 1), (1, 1, 1), 1, 1, 0.25),
}


@pytest.mark.parametrize(("greedy", "ranks", "tokens", "rank", "prob"), GREEDY.values(), ids=GREEDY)
def test_where_greedy_decoding_leaves(greedy, ranks, tokens, rank, prob):
    logprobs = np.log([1 / 2, 1 / 4, 1 / 8])
    found = columns(scored(logprobs, ranks=ranks, greedy=greedy), 2)
    assert found["reference_greedy"] is False
    assert found["reference_greedy_tokens"] == tokens
    assert found["reference_greedy_left_rank"] == rank
    assert found["reference_greedy_left_prob"] == pytest.approx(prob)
    assert found["reference_ranks"].tolist() == list(ranks)


def test_a_reference_that_greedy_decoding_writes_is_never_left():
    found = columns(scored([-0.5, -1.5, -4.0]), 2)
    assert found["reference_greedy"] is True and found["reference_greedy_tokens"] == 2
    assert found["reference_greedy_left_rank"] is None
    assert found["reference_greedy_left_prob"] is None


@pytest.mark.parametrize("greedy", [True, False])
def test_an_empty_turn_has_a_turn_end_alone(greedy):
    found = columns(scored([-0.5], greedy=[greedy], ranks=[2 - greedy]), 0, text="")
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
    candidate("query", scored([-1.0, -1.0]), 1),
    candidate(
        "other_reference",
        scored([-2.0, -3.0, -0.5], tempered=[[-9.0, -1.0, -1.0], [-0.5, -0.5, -0.5]]),
        2,
        swap_source="c7",
        contrasts=Contrasts(likelihood(1 / 2, 1 / 2), swapped=[likelihood(1 / 8, 1 / 32)]),
    ),
)


def test_log_odds_are_of_the_whole_turn_against_all_rivals_together():
    found = columns(scored([-0.5, -1.5, -4.0]), 2, *RIVALS)
    expected = -6.0 - math.log(math.exp(-2.0) + math.exp(-5.5))
    assert found["candidate_log_odds"] == pytest.approx(expected)
    # Query: -3 and -0.75 with its turn-end; the other reference: -11 and -1.5.
    expected = [-7.0 - logsumexp([-3.0, -11.0]), -3.75 - logsumexp([-0.75, -1.5])]
    assert found["candidate_log_odds_tempered"].tolist() == pytest.approx(expected)


def test_every_candidate_has_its_scores_and_only_the_contrasts_that_were_made():
    found = columns(scored([-0.5, -1.5, -4.0]), 2, *RIVALS)["candidates"]
    assert [one["name"] for one in found] == ["reference", "query", "other_reference"]
    assert [one["lender"] for one in found] == [None, None, "c7"]
    assert [one["tokens"] for one in found] == [2, 1, 2]
    assert [one["logprob"] for one in found] == [-2.0, -1.0, -5.0]
    assert [one["logprob_with_end"] for one in found] == [-6.0, -2.0, -5.5]
    assert found[2]["logprob_tempered"].tolist() == [-10.0, -1.0]
    assert found[2]["logprob_tempered_with_end"].tolist() == [-11.0, -1.5]
    assert ["response_contrast_bits" in one for one in found] == [False, False, True]
    assert found[2]["response_contrast_bits"] == pytest.approx(2)
    assert found[2]["response_contrast_bits_with_end"] == pytest.approx(4)
    assert found[1]["text"] == "text of query"


def test_columns_are_those_of_the_schema():
    contrasts = Contrasts(likelihood(1 / 2, 1 / 2))
    genuine = candidate("reference", scored([-0.5, -1.5, -4.0]), 2, contrasts=contrasts)
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
