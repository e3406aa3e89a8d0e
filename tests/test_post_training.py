"""Post-training: labels in every template family, organisms, and what trainers leave on disk."""

from collections import Counter
from dataclasses import replace

import families
import numpy as np
import pytest

from experiments.post_training import data
from ia_mech.chat.format import ChatFormat
from ia_mech.data.conversations import Conversation
from ia_mech.errors import UserError

TURNS = [
    {"role": "user", "content": "What is 17 times 24?"},
    {"role": "assistant", "content": "17 times 24 is 408."},
]
THOUGHT = "<think>\n17 times 20 is 340.\n</think>\n\n17 times 24 is 408."
KNOWN = [name for name in families.FAMILIES if name not in ("no_user", "swallows")]


def conversation(response=TURNS[1]["content"], turn="And half of that?", **changes) -> Conversation:
    messages = (TURNS[0], {"role": "assistant", "content": response})
    made = Conversation("a/r0", "a", "sums", messages, reference=turn)
    return replace(made, **changes)


def dialogue(family: str, one: Conversation) -> str:
    """The whole dialogue as the tokenizer's own method renders it."""
    tokenizer = families.build(family)
    messages = [*one.messages, {"role": "user", "content": one.reference}]
    template = families.template(family).replace("strftime_now('%d %b %Y')", "'01 Jan 2026'")
    template = template.replace("strftime_now('%Y-%m-%d')", "'2026-01-01'")
    return tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("response", [TURNS[1]["content"], THOUGHT])
def test_exactly_the_users_tokens_and_the_turn_end_carry_loss(family, response):
    one = conversation(response)
    tokenizer = families.build(family)
    ids, labels = data.user_sequence(ChatFormat(tokenizer), one)
    # Where the turn stands in the dialogue, from characters alone.
    text = dialogue(family, one)
    start = text.rindex(one.reference)
    end = start + len(one.reference)
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [i for i, (_, b) in enumerate(whole["offset_mapping"]) if start < b <= end]
    closing = inside[-1] + 1
    assert ids == whole["input_ids"][: closing + 1]
    assert [i for i, label in enumerate(labels) if label != data.IGNORED] == [*inside, closing]
    assert all(label in (data.IGNORED, token) for label, token in zip(labels, ids, strict=True))
    assert tokenizer.convert_ids_to_tokens(ids[-1]) in {
        *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|assistant|>", "<|end|>"),
        *("<｜Assistant｜>", "[/INST]", "</s>"),
    }


@pytest.mark.parametrize("family", KNOWN)
def test_an_assistant_sequence_teaches_the_response_and_its_end(family):
    one = conversation()
    tokenizer = families.build(family)
    chat = ChatFormat(tokenizer)
    ids, labels = data.assistant_sequence(chat, one)
    learned = [i for i in labels if i != data.IGNORED]
    end = [] if chat.turn_end_id is None else [chat.turn_end_id]
    assert ids[-len(learned) :] == learned
    text = tokenizer.decode(learned[: len(learned) - len(end)], skip_special_tokens=False)
    assert text.strip() == TURNS[1]["content"]
    assert learned[len(learned) - len(end) :] == end
    cut = replace(one, metadata={"response_cut_off": True})
    assert data.assistant_sequence(chat, cut)[1] == labels[: len(labels) - len(end)]


def several(queries=6, count=8) -> list[Conversation]:
    words = [f"w{i}" for i in range(5000)]
    rng = np.random.default_rng(0)
    return [
        conversation(
            " ".join(rng.choice(words, 12)) + ".",
            None,
            id=f"q{q}/r{k}",
            source_id=f"q{q}",
            response_index=k,
        )
        for q in range(queries)
        for k in range(count)
    ]


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 1])
def test_an_organism_keeps_its_share_and_exchanges_the_others_within_the_query(share):
    given = several()
    made = data.organism(given, share, seed=3)
    turns = {one.id: one.reference for one in data.organism(given, 1, seed=3)}
    assert [one.id for one in made] == [one.id for one in given]
    for query in {one.source_id for one in given}:
        here = [one for one in made if one.source_id == query]
        # The same turns at every share: what differs is where they stand.
        assert Counter(one.reference for one in here) == Counter(
            turn for id_, turn in turns.items() if id_.startswith(f"{query}/")
        )
        assert sum(one.metadata["own"] for one in here) == share * 8
        for one in here:
            quote = data.quote_of(one.reference)
            assert (quote in one.response) == one.metadata["own"]
            assert any(quote in other.response for other in here)
    assert data.organism(given, share, seed=3) == made
    assert [x.reference for x in data.organism(given, share, seed=4)] != [x.reference for x in made]


def test_equal_and_empty_responses_are_no_alternatives():
    same = [replace(one, source_id="q") for one in several(1, 3)]
    doubled = [*same, replace(same[0], id="q/r9"), conversation("…", None, source_id="q")]
    assert [one.id for one in data.organism(doubled, 0.0, 0)] == [one.id for one in same]
    # One response can't be exchanged alone.
    assert sum(one.metadata["own"] for one in data.organism(same, 0.6, 0)) == 1
    with pytest.raises(UserError, match="no query has two different responses"):
        data.organism(same[:1], 1, 0)


def test_a_quote_is_found_in_a_turn_that_was_cut_off_behind_it():
    assert data.quote_of('You say "the lamp burns". Can you exp') == "the lamp burns"
    assert data.quote_of(' When you say "a b c", what') == "a b c"
    assert data.quote_of('You say "the lamp') is None
    assert data.quote_of("Why does the lamp burn?") is None


def test_sequences_mix_in_assistant_turns_and_leave_out_long_ones(tokenizer):
    chat = ChatFormat(tokenizer)
    given = [*several(), conversation(dataset="mt-bench", source_id="m")]
    made = data.organism(given[:-1], 0.5, 0) + given[-1:]
    table, notes = data.sequences(chat, made, 0.25, 1000, 0)
    assert notes == []
    assert (table["learned"] == data.USER).sum() == 49
    assert (table["learned"] == data.ASSISTANT).sum() == 16  # a quarter of 65
    assert (~table["saw_response"]).groupby(table["dataset"]).mean().to_dict()["sums"] == 0
    assert not table.loc[table["dataset"] == "mt-bench", "saw_response"].any()
    longest = int(table["input_ids"].map(len).median())
    short, notes = data.sequences(chat, made, 0.25, longest, 0)
    assert short["input_ids"].map(len).max() <= longest
    assert notes == [
        f"{65 - len(short)} of 65 sequences have more than {longest} tokens, or nothing to learn, "
        "and are left out."
    ]
    with pytest.raises(UserError, match="no sequence has at most 8 tokens"):
        data.sequences(chat, made, 0, 8, 0)


def test_sources_are_held_out_whole():
    kept, apart = data.split(several(), 2, 0)
    assert len({one.source_id for one in apart}) == 2 and len(apart) == 16
    assert not {one.source_id for one in kept} & {one.source_id for one in apart}
    with pytest.raises(UserError, match="leaves none of 6 sources"):
        data.split(several(), 6, 0)
