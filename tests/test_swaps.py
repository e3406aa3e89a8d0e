"""Donors: of the same dataset and another source, the nearest in length, drawn by the seed."""

import numpy as np
import pytest

from experiments.swaps import REACH, Donors
from ia_mech.data.conversations import Conversation


def donor(number: int, tokens: int, *, dataset="d", source=None, response=None):
    name = f"c{number}"
    text = f"response {number}" if response is None else response
    asked = {"role": "user", "content": "?"}, {"role": "assistant", "content": text}
    about = {"tokens": tokens}
    return Conversation(name, source or name, dataset, asked, metadata=about)


THOSE = [
    *(donor(n, tokens=10 * n) for n in range(12)),
    donor(12, 50, source="c5"),  # another response to the same prompt
    donor(13, 50, dataset="other"),
    donor(14, 50, response=" response 4 "),  # as another one's
    donor(15, 50, response=" "),
]


LENGTHS = {one.response: one.metadata["tokens"] for one in THOSE}


def tokenizer(text: str, add_special_tokens: bool) -> dict:
    return {"input_ids": [0] * LENGTHS[text]}


def donors(seed: int, those=THOSE) -> Donors:
    return Donors(those, tokenizer, seed)


@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_lenders_are_of_the_same_dataset_another_source_and_all_differ(count):
    found = donors(0).responses(5, count)
    assert len(found) == min(count, 11)
    texts = [text.strip() for text in found]
    assert len(set(texts)) == len(texts) and "" not in texts and "response 5" not in texts
    lenders = {one.response: one for one in THOSE if one.id != "c13"}
    assert all(lenders[text].source_id != "c5" for text in found)


def test_all_that_can_be_drawn_are_the_nearest_in_length():
    drawn = {text for seed in range(200) for text in donors(seed).responses(5, 1)}
    near = sorted(
        (abs(one.metadata["tokens"] - 50), one.id, one.response)
        for one in THOSE
        if one.dataset == "d" and one.source_id != "c5" and one.response.strip()
    )
    near = [text for _, name, text in near if name != "c4"][:REACH]  # c14 is nearer, says the same
    assert drawn == set(near)


def test_draws_depend_on_the_conversation_alone():
    order = np.random.default_rng(0).permutation(len(THOSE))
    mixed = donors(0, [THOSE[n] for n in order])
    at = int(np.flatnonzero(order == 8)[0])
    assert mixed.responses(at, 2) == donors(0).responses(8, 2)
