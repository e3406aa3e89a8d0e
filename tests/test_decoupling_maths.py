"""Maths: what is read off responses and gold answers, and when they are equal."""

import json
import signal
import threading
import time
from pathlib import Path

import math_verify
import pytest

from experiments.decoupling.verify import TimedOut, limited, verifier_of, verify
from experiments.decoupling.verify.maths import cleared, gold
from ia_mech.data.formats import ColumnMap
from ia_mech.data.presets import PRESETS

FIXTURES = Path(__file__).parent / "fixtures" / "presets"


def correct(response: str, answer: str, **options) -> bool | None:
    return verify("", response, answer, {}, **options).correct


@pytest.mark.parametrize(
    ("answer", "equal", "different"),
    [
        ("18", "18", "19"),
        ("She sells 9 eggs.\n#### 18", "18", "9"),
        ("#### 70,000", "70000", "70"),
        ("First 3\n#### 3\nand then\n#### 4", "4", "3"),
        ("70,000", "70000", "70"),
        ("-3", "-3", "3"),
        ("$18", "18", "17"),
        ("-$5", "-5", "5"),
        ("\\$32,348", "32348", "32"),
        ("18 dollars", "18", "81"),
        ("5 \\text{ cm}", "5", "6"),
        ("1/2", "0.5", "2"),
        ("\\frac{1}{2}", "1/2", "1/3"),
        ("\\boxed{\\frac{3}{4}}", "0.75", "0.7"),
        ("50%", "50", "5"),
        ("10\\%", "0.1", "1"),
        ("3.0", "3", "3.1"),
        ("11\\sqrt{2}", "$\\sqrt{242}$", "$11$"),
        ("x^2+1", "$1 + x^2$", "$x^2-1$"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "$(3, \\pi/2)$", "$(3, \\pi)$"),
        ("(-\\infty, 2)", "$x \\in (-\\infty, 2)$", "$(-\\infty, 2]$"),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", "\\boxed{\\text{Carla}}"),
        (
            "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
            "$\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}$",
            "$\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}$",
        ),
        ("90^\\circ", "90", "45"),
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
    assert gold(answer) is None and verifier_of(answer, {}) is None


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("She makes 9 * 2 = $18 every day.", "18"),
        ("16 - 3 = 13 eggs, hence 13 - 4 = 9.", "9"),
        ("60*3 = 180\n#### 540\nThe answer is: 180", "540"),  # what is marked comes first
        ("#### 180\nNo, wait.\n#### 540", "540"),  # the last mark
        ("**#### 1,234 metres**", "1234"),
        ("The final answer is $\\boxed{18}$. Check: 16 - 3 = 13", "18"),
        ("Answer: 18. That was step 2 of 3", "18"),
        ("She has **18** eggs", "18"),
        ("**Answer: \\$18**", "18"),
        ("It is −3.", "-3"),
        ("He has -$5 left", "-5"),
        ("The profit is $130,000.00", "130000"),
        ("$9 * 2 = $<<9*2=18>>18", "18"),
        ("1. Sell 9\n2. That makes 18.\n3. Done", "18"),
        ("That is 50% of it", "50"),
        ("so x = 0.5", "\\frac{1}{2}"),
        ("\\[ x = \\frac{1}{2} \\]", "0.5"),
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
        ("It is 180", "18"),
        ("It is -18", "18"),
        ("I have no idea.", "18"),
        ("", "18"),
        ("eighteen", "18"),
    ],
)
def test_wrong_responses(response, answer):
    assert correct(response, answer) is False


def test_a_verdict_says_what_it_rests_on():
    found = verify("", "9 eggs\n#### $1,080", "#### 1,080", {})
    assert (found.verifier, found.correct, found.why) == (
        "maths",
        True,
        "equal; answer read after ####",
    )
    assert (found.answer, found.gold) == ("1080", "1080")
    found = verify("", "\\boxed{19}", "18", {})
    assert (found.why, found.answer, found.gold) == ("not equal; answer read in a box", "19", "18")
    assert verify("", "It is 18", "18", {}).why == "equal; answer read as math-verify finds it"
    nothing = verify("", "No idea", "18", {})
    assert (nothing.why, nothing.answer) == ("no answer could be read off the response", None)


def test_the_last_number_before_a_cut_is_no_answer():
    text = "20 candles cost 20 * $2 = $40. The total cost of 20"
    assert correct(text, "20") is True
    found = verify("", text, "20", {}, cut_off=True)
    assert (found.correct, found.why) == (False, "cut off before it states an answer")
    for stated in ("#### 20\nThat is", "\\boxed{20}, or", "The answer is 20, since"):
        assert correct(stated, "20", cut_off=True) is True


def test_an_answer_in_what_a_model_thought_is_not_stated():
    thought = "<think>The answer is 4.</think>It is 4"
    assert correct(thought, "4") is True
    assert correct(thought, "4", cut_off=True) is False


@pytest.mark.parametrize(
    ("name", "verifier"),
    [
        *(("gsm8k", "maths"), ("math-500", "maths"), ("wildchat", None)),
        *(("ifeval", "instructions"), ("ifbench", "instructions")),
    ],
)
def test_rows_of_public_datasets_have_their_verifier(name, verifier):
    for line in (FIXTURES / f"{name}.jsonl").read_text().splitlines():
        parts = PRESETS[name].parse(json.loads(line), ColumnMap(), "here")
        assert verifier_of(parts.answer, parts.metadata) == verifier


def test_nothing_else_is_cleared_away():
    text = "1.5 and 2) or a-$x$-b, 3 * 4 ** 2?\nIn 1990. 7 came"
    assert cleared(text) == text.replace("**", "")
    assert cleared("1) a\n 2. b\n3.") == "a\nb\n3."


def test_a_parser_that_fails_leaves_the_verdict_open(monkeypatch):
    def fails(*_, **__):
        raise RecursionError

    monkeypatch.setattr(math_verify, "verify", fails)
    found = verify("", "18", "18", {})
    assert (found.correct, found.why) == (None, "the verifier failed: RecursionError")


def test_a_response_that_takes_too_long_leaves_the_verdict_open():
    started = time.process_time()
    found = verify("", "The answer is \\boxed{9^{9^{9^{9}}}}", "18", {}, seconds=0.3)
    assert (found.correct, found.why) == (None, "the verifier took more than 0.3 s")
    assert time.process_time() - started < 3


def test_a_limit_leaves_nothing_behind():
    before = signal.getsignal(signal.SIGPROF)
    with limited(5):
        pass
    with pytest.raises(TimedOut), limited(0.02):
        while True:
            pass
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_outside_the_main_thread_there_is_no_limit_but_a_verdict():
    found = []
    thread = threading.Thread(target=lambda: found.append(correct("It is 18", "18")))
    thread.start()
    thread.join()
    assert found == [True]
