"""Copy features of texts, counted by hand, and the copy bits of readers that copy or don't."""

import numpy as np
import pytest

from ia_mech.likelihood.copying import FEATURES, GROUPS, copy_features
from ia_mech.likelihood.reaction import choice_bits

QUERY = "How does a lens work?"
RESPONSES = (
    "A lens bends light. In Paris, Galileo polished 3 lenses.",
    "It is a piece of glass that was polished by Newton in 1704.",
    "A lens works as the eye does: it focuses light.",
    "Glass bends light.",
)


def features(turn: str, query: str = QUERY, responses=RESPONSES) -> dict[str, np.ndarray]:
    table = copy_features([turn], query, responses)
    assert table.shape == (1, len(responses), len(FEATURES))
    return dict(zip(FEATURES, table[0].T, strict=True))


def test_every_feature_is_in_one_group():
    assert sorted(i for group in GROUPS.values() for i in group) == list(range(len(FEATURES)))


LIGHT = np.log2(4 / 3)  # "light" is in 3 of 4 responses


@pytest.mark.parametrize(
    ("feature", "turn", "weights"),  # the weight of what is shared with each response
    [
        # polish: 2 of 4 responses, 1 bit; lens is in the query.
        ("shared_stems", "lens polishing light", [1 + LIGHT, 1, LIGHT, LIGHT]),
        ("shared_stems", QUERY, [0, 0, 0, 0]),
        # polish by, by newton; "a lens" stands in the query.
        ("shared_bigrams", "Why was it polished by Newton? A lens again.", [0, 4, 0, 0]),
        ("shared_trigrams", "Why was it polished by Newton? A lens again.", [0, 2, 0, 0]),
        ("shared_numbers", "In 1704?", [0, 2, 0, 0]),
        ("shared_numbers", "In 170?", [0, 0, 0, 0]),
        ("shared_numbers", "17 04", [0, 0, 0, 0]),
        ("shared_names", "Newton did?", [0, 2, 0, 0]),
        ("shared_names", "And Galileo's?", [2, 0, 0, 0]),
        ("shared_names", "newton did?", [0, 0, 0, 0]),
        ("shared_names", "Glass and It", [0, 0, 0, 0]),  # they begin sentences
        ("asked_words", "The eye is what?", [0, 0, 0, 0]),
        ("asked_words", "What did you say of the eye?", [0, 0, 0, 0]),
    ],
)
def test_what_few_responses_have_weighs_more_and_what_the_query_has_nothing(feature, turn, weights):
    assert np.expm1(features(turn)[feature]) == pytest.approx(weights)


def test_question_words_count_with_what_stands_beside_them():
    assert np.expm1(features("What is the eye?")["asked_words"])[2] > 2  # "the" counts as well


def test_share_of_response_is_of_its_different_stems():
    found = features("glass bends light, light bends glass")["share_of_response"]
    assert found[3] == 1 and found[1] == pytest.approx(1 / 13)  # it is a piece of glass …


def test_numbers_are_whole_and_characters_are_words_where_no_spaces_are():
    found = features("1,000.5 it is", responses=("it costs 1,000.5.", "it costs 1 000"))
    assert np.expm1(found["shared_numbers"]) == pytest.approx([1, 0])
    found = features("光", "镜?", ("镜弯曲光", "玻璃"))
    assert np.expm1(found["shared_stems"]) == pytest.approx([1, 0])


def test_texts_that_share_nothing_and_empty_ones():
    for turn in ("", "…", "OK!"):
        assert not any(column.any() for column in features(turn).values())
    assert copy_features([], QUERY, RESPONSES).shape == (0, 4, len(FEATURES))
    assert not copy_features(["x"], "", ["", ""]).any()


WORDS = ("stone river cloud tiger silver garden window winter copper island ladder meadow").split()  # noqa: SIM905


def dialogues(react, queries: int = 40):
    """Features of planted turns: ``react(rng, query, response)`` gives one."""
    rng, tables, followed, sources = np.random.default_rng(0), [], [], []
    for query in range(queries):
        asked = "Tell me about " + " ".join(rng.choice(WORDS, 3))
        given = [" ".join(rng.choice(WORDS, 12)) + " indeed." for _ in range(4)]
        turns = [react(rng, asked, response) for response in given]
        tables.append(copy_features(turns, asked, given))
        followed += range(4)
        sources += [query] * 4
    return np.concatenate(tables), followed, sources


def test_who_copies_has_copy_bits_and_who_does_not_has_none():
    reactions = {
        "repeats the response": lambda rng, query, response: response,
        "picks two words": lambda rng, query, response: (
            "What of " + " ".join(rng.choice(response.split()[:12], 2)) + "?"
        ),
        "repeats the query": lambda rng, query, response: query,
        "changes the topic": lambda rng, query, response: " ".join(rng.choice(WORDS, 3)),
    }
    bits = {name: choice_bits(*dialogues(react)).bits.mean() for name, react in reactions.items()}
    assert bits["repeats the response"] > 1.99
    assert 0.3 < bits["picks two words"] < 1.5
    assert abs(bits["repeats the query"]) < 0.05
    assert abs(bits["changes the topic"]) < 0.05
