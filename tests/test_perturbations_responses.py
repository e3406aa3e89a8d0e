"""Changes to responses: what each changes, and what it leaves."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from experiments.perturbations import conditions as responses
from experiments.perturbations.conditions import CONDITIONS, UNCHANGED, perturbed, sentences
from ia_mech.data.conversations import HEADERS, Conversation, open_conversations, validate

TEXT = (
    "First, boil 2.5 l of water, i.e. a lot. Then add salt.\n\n"
    "1. Wait.\n2. Stir it well.\nDone? Serve it."
)
SEEDS = range(60)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def builtin() -> list[Conversation]:
    return list(open_conversations("builtin"))


# -- sentences ------------------------------------------------------------------------------------


def test_sentences_end_at_full_stops_and_lines():
    found = [sentence.strip() for sentence in sentences(TEXT)]
    assert found == [
        "First, boil 2.5 l of water, i.e. a lot.",
        "Then add salt.",
        "1. Wait.",
        "2. Stir it well.",
        "Done?",
        "Serve it.",
    ]


def test_a_code_block_is_one_sentence():
    code = "```python\nx = 1\ny = 2. + 3\n```\n"
    assert code in "".join(sentences(f"Run this:\n\n{code}It prints 5."))
    assert any("x = 1\ny = 2" in one for one in sentences(f"Run this:\n\n{code}It prints 5."))


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "a", " a. ", "\n\na. b.\n\n\nc", TEXT, "é…\r\nb"]
)
def test_sentences_joined_are_the_text(text):
    assert "".join(sentences(text)) == text
    assert all(one.strip() for one in sentences(text)) or not text.strip()


# -- cutting --------------------------------------------------------------------------------------


def test_truncate_keeps_whole_sentences_up_to_half():
    cut = responses.truncate(TEXT)
    assert (cut.text, cut.how) == ("First, boil 2.5 l of water, i.e. a lot.", "sentences")
    long = "One two three. Four five. Six seven eight nine ten. Eleven."
    assert responses.truncate(long).text == "One two three. Four five."
    assert (
        responses.truncate(long, 0.9).text == "One two three. Four five. Six seven eight nine ten."
    )
    # the first sentence stays even where it is more than half
    assert (
        responses.truncate("A very long first sentence. No.").text == "A very long first sentence."
    )


def test_truncate_never_keeps_all():
    assert responses.truncate("A. B. C.", 1.0).text == "A. B."


def test_a_single_sentence_is_cut_between_words():
    cut = responses.truncate("The answer is forty two")
    assert (cut.text, cut.how) == ("The answer", "words")
    assert responses.truncate("408.") == responses.Text("408.", UNCHANGED)
    assert responses.truncate("") == responses.Text("", UNCHANGED)


def test_truncate_mid_ends_inside_a_sentence():
    cut = responses.truncate_mid("One two. Three four five six seven.")
    assert cut.text == "One two. Three" and cut.how == "words"
    # half of the characters is where a sentence ends: one word less
    assert responses.truncate_mid("One two. Abc def.").text == "One"


def test_both_cuts_are_beginnings(builtin):
    for conversation in builtin:
        text = conversation.response
        whole, mid = responses.truncate(text).text, responses.truncate_mid(text).text
        ends = np.cumsum([len(one) for one in sentences(text)])
        assert text.startswith(whole) and text.startswith(mid)
        assert len(whole) in {len(text[:end].rstrip()) for end in ends}
        assert len(mid) not in {len(text[:end].rstrip()) for end in ends}
        assert text[len(mid)].isspace()
        assert len(mid) <= len(text) / 2


# -- additions ------------------------------------------------------------------------------------


def test_a_question_is_appended_and_all_wordings_are_drawn():
    drawn = {responses.ask("Yes. \n", rng(seed)).text for seed in SEEDS}
    assert drawn == {f"Yes. {question}" for question in responses.QUESTIONS}
    assert responses.ask("", rng()).text in responses.QUESTIONS
    assert all(question.endswith("?") for question in responses.QUESTIONS)


def test_an_acknowledgement_says_nothing_of_the_response():
    drawn = {responses.neutral(rng(seed)).text for seed in SEEDS}
    assert drawn == set(responses.ACKNOWLEDGEMENTS)


# -- contradiction --------------------------------------------------------------------------------


def wrong(text: str, answer: str | None, seed: int = 0) -> responses.Text:
    return responses.contradict(text, answer, rng(seed))


def test_the_final_number_becomes_another_one_and_nothing_else_changes():
    text = "There are 18 boxes. So 18 - 3 = 15. The answer is 15 boxes, or 15."
    for seed in SEEDS:
        changed = wrong(text, "15", seed)
        assert changed.how == "number"
        head, _, tail = changed.text.partition("The answer is ")
        assert head == "There are 18 boxes. So 18 - 3 = 15. "
        said = tail.removesuffix(".").split(" boxes, or ")
        assert said[0] == said[1] and said[0] not in ("15", "18.0") and int(said[0]) >= 0


def test_a_wrong_answer_is_never_the_gold_one():
    """Where the response is wrong already, it must not become right."""
    drawn = {wrong("It is 4.", "5", seed).text for seed in range(300)}
    assert len(drawn) > 1 and not drawn & {"It is 4.", "It is 5."}


@pytest.mark.parametrize(
    ("said", "shape"),
    [("1,250", r"(1,)?\d{3}"), ("3.50", r"\d\.\d\d"), ("0.375", r"\d\.\d{3}"), ("-7", r"-?\d+")],
)
def test_a_wrong_number_is_written_like_the_right_one(said, shape):
    for seed in SEEDS:
        changed = wrong(f"So it costs ${said}.", said, seed).text
        assert re.fullmatch(rf"So it costs \${shape}\.", changed), changed
        assert said not in changed


@pytest.mark.parametrize("answer", [None, "8:50 am", "blue"])
def test_without_a_numeric_answer_a_sentence_retracts(answer):
    drawn = {wrong("Page 3 says so.", answer, seed).text for seed in SEEDS}
    assert drawn == {f"Page 3 says so. {one}" for one in responses.RETRACTIONS}
    assert wrong("It is blue.", "4").how == "retraction"  # an answer, but no number to change


def test_times_ratios_and_words_with_digits_are_no_numbers():
    found = [match.group() for match in responses.NUMBER.finditer("v2 x3y 1.2.3 7. 1,000.5, -4")]
    assert found == ["7", "1,000.5", "-4"]


# -- order ----------------------------------------------------------------------------------------


def test_shuffling_keeps_sentences_and_white_space_and_changes_the_order(builtin):
    for conversation in builtin:
        text = conversation.response
        changed = responses.shuffle(text, rng(1)).text
        before, after = (Counter(one.split()) for one in (text, changed))
        assert before == after and changed != text
        assert [c for c in text if c.isspace()].count("\n") == changed.count("\n")
    two = responses.shuffle("A b.\n\nC d.", rng()).text
    assert two == "C d.\n\nA b."


def test_one_sentence_can_t_be_shuffled():
    assert responses.shuffle("Only one.", rng()) == responses.Text("Only one.", UNCHANGED)
    assert responses.shuffle("Yes.\nYes.", rng()).how == UNCHANGED


# -- conditions -----------------------------------------------------------------------------------


def test_every_condition_leaves_all_but_the_response_and_the_header(builtin):
    lender = builtin[0].response
    for conversation in builtin[1:]:
        for name, condition in CONDITIONS.items():
            changed = perturbed(conversation, name, 0, lender)
            validate(changed, "here")
            for kept in ("source_id", "dataset", "reference", "answer", "query"):
                assert getattr(changed, kept) == getattr(conversation, kept)
            assert changed.messages[:-1] == conversation.messages[:-1]
            assert changed.id == f"{conversation.id}~{name}" and changed.perturbation == name
            assert changed.header == condition.header and changed.header in HEADERS
            assert changed.metadata["unperturbed_response"] == conversation.response
            assert changed.metadata["unperturbed_id"] == conversation.id
            assert conversation.metadata.items() <= changed.metadata.items()
            same = changed.response == conversation.response
            assert same == (name.startswith("header") or changed.metadata["how"] == UNCHANGED)


def test_what_removes_the_response_removes_it(builtin):
    by_name = {name: perturbed(builtin[0], name, 0, "Lent.") for name in CONDITIONS}
    assert by_name["remove"].response == "" and by_name["swap"].response == "Lent."
    assert by_name["neutral"].response in responses.ACKNOWLEDGEMENTS


def test_draws_depend_on_seed_condition_and_conversation_alone(builtin):
    def drawn(seed: int) -> list[str]:
        names = ("ask", "neutral", "contradict", "shuffle")
        return [perturbed(c, n, seed).response for c in builtin[:20] for n in names]

    assert drawn(0) == drawn(0) != drawn(1)
    alone = perturbed(builtin[7], "ask", 0)
    assert alone.response == drawn(0)[28]


def test_a_perturbed_conversation_can_t_be_perturbed_again(builtin):
    with pytest.raises(ValueError, match="unperturbed"):
        perturbed(perturbed(builtin[0], "ask", 0), "shuffle", 0)
    with pytest.raises(ValueError, match="another conversation"):
        perturbed(builtin[0], "swap", 0)


def test_jsonl_takes_perturbed_conversations_and_back(builtin, tmp_path):
    made = [perturbed(builtin[i], name, 0, "Lent.") for i in range(3) for name in CONDITIONS]
    file = tmp_path / "made.jsonl"
    file.write_text("".join(json.dumps(one.to_dict()) + "\n" for one in [builtin[0], *made]))
    assert list(open_conversations(str(file))) == [builtin[0], *made]
    assert "perturbation" not in builtin[0].to_dict()  # the hash of older snapshots stays
