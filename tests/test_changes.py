"""Other responses: of the same dataset and another source, the nearest in length."""

import numpy as np

from experiments.changes import REACH, other_response
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


TOKENS = [one.metadata["tokens"] for one in THOSE]


def drawn_for(recipient: int) -> set[str | None]:
    rngs = map(np.random.default_rng, range(200))
    return {other_response(THOSE, TOKENS, recipient, rng) for rng in rngs}


def test_what_is_drawn_is_of_the_nearest_in_length_of_the_dataset_and_another_source():
    near = sorted(
        (abs(one.metadata["tokens"] - 50), one.id, one.response)
        for one in THOSE
        if one.dataset == "d" and one.source_id != "c5" and one.response.strip()
    )
    near = [text for _, name, text in near if name != "c4"][:REACH]  # c14 is nearer, says the same
    assert drawn_for(5) == set(near)


def test_a_conversation_alone_in_its_dataset_has_no_other_response():
    assert drawn_for(13) == {None}
