"""Who lends a response or a follow-up: another source of the same dataset, near in length."""

import random
from dataclasses import replace

import families
import pytest

from ia_mech.data.conversations import Conversation
from ia_mech.likelihood.swaps import REACH, SwapSource, SwapSources


def donor(order: int, tokens: int, **changes) -> SwapSource:
    """A donor of a source, a response and a reference of its own, unless told otherwise."""
    found = SwapSource(
        order=order,
        id=f"c{order}",
        source_id=f"s{order}",
        dataset="chats",
        response=f"response {order}",
        tokens=tokens,
        reference=f"reference {order}",
    )
    return replace(found, **changes)


def crowd(count: int = 60, seed: int = 0) -> list[SwapSource]:
    """Two datasets, three conversations to a source, lengths that often coincide."""
    chance = random.Random(seed)
    return [
        donor(
            order,
            chance.randrange(30),
            source_id=f"s{order // 6}",
            dataset=("chats", "maths")[order % 2],
            response=f"response {chance.randrange(count)}",
        )
        for order in range(count)
    ]


# -- responses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4])
def test_lenders_are_of_the_same_dataset_another_source_and_all_differ(count):
    everyone = crowd()
    donors = SwapSources(everyone, seed=0)
    for own in everyone:
        found = donors.responses(own.order, count)
        assert len(found) == count
        assert {d.dataset for d in found} == {own.dataset}
        assert own.source_id not in {d.source_id for d in found}
        said = [d.response for d in found]
        assert len({*said, own.response}) == count + 1


def test_all_that_can_be_drawn_are_the_nearest_in_length():
    """Over many seeds the draws cover a pool of REACH · count, which a plain sort gives too."""
    everyone = [donor(order, tokens) for order, tokens in enumerate(range(0, 200, 4))]
    for own in (everyone[0], everyone[20], everyone[-1]):
        nearest = sorted(abs(d.tokens - own.tokens) for d in everyone if d != own)
        pool = {
            d for seed in range(60) for d in SwapSources(everyone, seed).responses(own.order, 2)
        }
        assert sorted(abs(d.tokens - own.tokens) for d in pool) == nearest[: REACH * 2]


def test_of_equally_near_lenders_the_earlier_conversations_are_taken():
    around = [donor(order, 10 + (-1) ** order) for order in range(1, 9)]
    everyone = [donor(0, 10), *around]
    pool = {d.order for seed in range(60) for d in SwapSources(everyone, seed).responses(0, 1)}
    assert pool == {1, 2, 3, 4}


def test_empty_and_equal_responses_are_not_lent():
    everyone = [
        donor(0, 5, response="Yes."),
        donor(1, 5, response=" Yes.\n"),
        donor(2, 5, response=""),
        donor(3, 5, response=" \n"),
        donor(4, 9, response="No."),
        donor(5, 99, response="No. "),
    ]
    assert [d.order for d in SwapSources(everyone, 0).responses(0, 4)] == [4]


# -- draws --------------------------------------------------------------------------------------


def drawn(donors: SwapSources, orders) -> list:
    return [
        ([d.id for d in lent], donors.reference(order, lent))
        for order in orders
        for lent in [donors.responses(order, 4)]
    ]


def test_draws_depend_on_neither_the_order_of_conversations_nor_of_questions():
    everyone = crowd()
    expected = drawn(SwapSources(everyone, 5), range(60))
    shuffled = random.Random(1).sample(everyone, len(everyone))
    assert drawn(SwapSources(shuffled, 5), range(60)) == expected
    assert drawn(SwapSources(iter(everyone), 5), range(59, -1, -1))[::-1] == expected


# -- references ---------------------------------------------------------------------------------


def test_a_reference_is_of_the_same_dataset_and_of_none_that_lent_a_response():
    everyone = crowd()
    donors = SwapSources(everyone, 0)
    for own in everyone:
        besides = donors.responses(own.order, 2)
        found = donors.reference(own.order, besides)
        assert found.dataset == own.dataset
        assert found.source_id not in {own.source_id, *(d.source_id for d in besides)}
        assert found.reference and found.reference != own.reference


def test_the_own_reference_and_empty_ones_are_not_lent():
    everyone = [
        donor(0, 3, reference="Why?"),
        donor(1, 3, reference="Why?"),
        donor(2, 3, reference=None),
        donor(3, 3, reference=" \n"),
        donor(4, 3, reference="Who?", dataset="maths"),
        donor(5, 3, reference="Who?", source_id="s0"),
        donor(6, 3, reference="When?"),
    ]
    donors = SwapSources(everyone, 0)
    assert donors.reference(0).order == 6
    assert donors.reference(0, [everyone[6]]) is None


# -- from conversations -------------------------------------------------------------------------


def conversation(name: str, response: str | None) -> Conversation:
    messages = [{"role": "user", "content": "What is it?"}]
    if response is not None:
        messages.append({"role": "assistant", "content": response})
    return Conversation(name, f"source of {name}", "chats", tuple(messages), f"And {name}?")


def test_given_responses_are_counted_in_tokens_and_written_ones_as_they_were_counted():
    tokenizer = families.build("llama3_1")  # which puts a token before every text of its own
    text = "A lens gathers the light into a beam."
    written = {"response": "It is blue.", "tokens": 77, "finish_reason": "length"}
    rows = [
        (0, conversation("a", text), None),
        (1, conversation("b", "A given response that was replaced."), written),
        (2, conversation("c", None), None),
    ]
    donors = SwapSources.of(rows, tokenizer, seed=0)
    (own,), (other,) = donors.responses(1, 4), donors.responses(0, 4)
    count = len(tokenizer.tokenize(text))
    assert len(tokenizer(text)["input_ids"]) == count + 1
    assert own == SwapSource(0, "a", "source of a", "chats", text, count, "And a?")
    assert (other.response, other.tokens) == ("It is blue.", 77)
