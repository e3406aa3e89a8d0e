"""Is a response right: maths, instructions of IFEval, and what can't be verified."""

import time
from pathlib import Path

import math_verify
import pytest

from ia_mech.data.conversations import open_conversations
from ia_mech.rates.verify import (
    COLUMN,
    INSTRUCTIONS,
    MATHS,
    gold_formulas,
    has_instructions,
    verifier_of,
    verify,
)

FIXTURES = Path(__file__).parent / "fixtures" / "presets"


def correct(response: str, answer: str, **options) -> bool | None:
    return verify("", response, answer, {}, **options).correct


@pytest.mark.parametrize(
    ("answer", "equal", "different"),
    [
        ("She sells 9 eggs.\n#### 18", "18", "9"),
        ("#### 70,000", "70000", "70"),
        ("First 3\n#### 3\nand then\n#### 4", "4", "3"),
        ("-3", "-3", "3"),
        ("$18", "18", "17"),
        ("-$5", "-5", "5"),
        ("\\$32,348", "32348", "32"),
        ("18 dollars", "18", "81"),
        ("1/2", "0.5", "2"),
        ("\\boxed{\\frac{3}{4}}", "0.75", "0.7"),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", "\\boxed{\\text{Carla}}"),
    ],
)
def test_a_gold_answer_and_what_is_equal_to_it(answer, equal, different):
    assert correct(f"So the answer is {equal}", answer) is True
    assert correct(f"So the answer is {different}", answer) is False


@pytest.mark.parametrize(
    "answer",
    [
        *("", "   ", "No idea.", "Paris", "It depends on 2 or 3 things that you know."),
        *("The train arrives at 18:30.", "1. Blue\n2. Red", "\\frac{1}{", "#### none of them"),
    ],
)
def test_what_is_no_number_or_formula_is_no_gold_answer(answer):
    assert gold_formulas(answer) is None and verifier_of(answer, {}, given=False) is None


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("16 - 3 = 13 eggs, hence 13 - 4 = 9.", "9"),
        ("60*3 = 180\n#### 540\nThe answer is: 180", "540"),  # what is marked comes first
        ("#### 180\nNo, wait.\n#### 540", "540"),  # the last mark
        ("**#### 1,234 metres**", "1234"),
        ("The final answer is $\\boxed{18}$. Check: 16 - 3 = 13", "18"),
        ("She has **18** eggs", "18"),
        ("**Answer: \\$18**", "18"),
        ("It is −3.", "-3"),
        ("He has -$5 left", "-5"),
        ("$9 * 2 = $<<9*2=18>>18", "18"),
        ("1. Sell 9\n2. That makes 18.\n3. Done", "18"),
        ("<think>The final answer is \\boxed{3}.</think>So it is 4", "4"),
    ],
)
def test_right_responses_of_every_shape(response, answer):
    assert correct(response, answer) is True
    assert correct(response, f"{answer}1" if answer[-1].isdigit() else "7") is False


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("So 18 apples are sold, and 3 remain.", "18"),  # the last number is another one
        ("It is 18.5", "18"),
        ("It is -18", "18"),
        ("I have no idea.", "18"),
    ],
)
def test_wrong_responses(response, answer):
    assert correct(response, answer) is False


def test_the_last_number_before_a_cut_is_no_answer():
    text = "20 candles cost 20 * $2 = $40. The total cost of 20"
    assert correct(text, "20") is True
    found = verify("", text, "20", {}, unfinished=True)
    assert (found.correct, found.why) == (False, "unfinished before it states an answer")
    for stated in ("#### 20\nThat is", "\\boxed{20}, or", "The answer is 20, since"):
        assert correct(stated, "20", unfinished=True) is True


def test_an_answer_in_what_a_model_thought_is_not_stated():
    thought = "<think>The answer is 4.</think>It is 4"
    assert correct(thought, "4") is True
    assert correct(thought, "4", unfinished=True) is False


@pytest.mark.parametrize(
    ("name", "verifier"),
    [
        *(("gsm8k", MATHS), ("math-500", MATHS), ("wildchat", None)),
        *(("ifeval", INSTRUCTIONS), ("ifbench", INSTRUCTIONS)),
    ],
)
def test_rows_of_public_datasets_have_their_verifier(name, verifier):
    for one in open_conversations(str(FIXTURES / f"{name}.jsonl")):
        assert verifier_of(one.answer, one.metadata, given=False) == verifier


def fails(*_, **__):
    raise RecursionError


def test_a_parser_that_fails_or_takes_too_long_leaves_the_verdict_open(monkeypatch):
    monkeypatch.setattr("ia_mech.rates.verify.SECONDS", 1)
    started = time.monotonic()
    found = verify("", "The answer is \\boxed{9^{9^{9^{9}}}}", "18", {})
    assert (found.correct, found.why) == (None, "the verifier took more than 1 s")
    assert time.monotonic() - started < 10
    monkeypatch.setattr(math_verify, "verify", fails)
    found = verify("", "18", "18", {})
    assert (found.correct, found.why) == (None, "the verifier failed: RecursionError")


# -- instructions --------------------------------------------------------------------------------

QUERY = "Repeat this sentence. Then say something."


def data(*ids: str, **kwargs) -> dict:
    return {
        "instruction_id_list": list(ids),
        "kwargs": [kwargs.get(name.split(":")[1], {}) for name in ids],
    }


def test_a_response_is_right_if_all_instructions_are_followed():
    instructed = data("punctuation:no_comma", "startend:quotation")
    both = verify(QUERY, '"no comma"', None, instructed)
    assert (both.correct, both.why) == (True, "all followed")
    one = verify(QUERY, 'Sure:\n"none"', None, instructed)
    assert (one.correct, one.why) == (False, "violated: startend:quotation")
    assert verify(QUERY, " \n", None, instructed).correct is False
    given = data("keywords:existence", existence={"keywords": ["lantern"], "other": None})
    assert [verify(QUERY, f"A {it}.", None, given).correct for it in ("lantern", "lamp")] == [
        True,
        False,
    ]


def test_an_instruction_that_no_checker_can_check_leaves_the_verdict_open():
    given = data("keywords:existence", existence={"keywords": None})
    for instructed, why in (
        (given, "keywords:existence: its parameter keywords is not in the data"),
        (data("punctuation:no_comma", "new:thing"), "new:thing: IFEval has no such instruction"),
    ):
        found = verify(QUERY, "no comma", None, instructed)
        assert (found.correct, found.why) == (None, why)


def test_a_checker_that_fails_leaves_the_verdict_open(monkeypatch):
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    monkeypatch.setattr(INSTRUCTION_DICT["punctuation:no_comma"], "check_following", fails)
    found = verify(QUERY, "anything", None, data("punctuation:no_comma"))
    assert (found.correct, found.why) == (None, "the verifier failed: RecursionError")


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"instruction_id_list": ["punctuation:no_comma"]},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
        {"instruction_id_list": [], "kwargs": []},
        {"instruction_id_list": "punctuation:no_comma", "kwargs": "{}"},
    ],
)
def test_metadata_without_instructions_in_that_form_have_no_verifier(metadata):
    assert not has_instructions(metadata)
    assert verifier_of(None, metadata, given=False) is None
    found = verify(QUERY, "anything", None, metadata)
    assert (found.verifier, found.correct) == (None, None)


def test_of_given_responses_the_column_tells_and_of_written_ones_it_does_not():
    for value, right in ((True, True), ("False", False), (1, True), ("0", False), (0.0, False)):
        found = verify("", "It is 18", "18", {"correct": value}, given=True)
        assert (found.verifier, found.correct) == (COLUMN, right)
    assert verifier_of("18", {"correct": None}, given=True) is None
    assert verifier_of("18", {}, given=True) is None
    assert verify("", "It is 18", "18", {"correct": False}).correct is True
