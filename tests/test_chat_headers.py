"""The bare user header that opens a dialogue, and other headers than the user's."""

import copy
from dataclasses import replace

import families
import pytest

from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import context_and_real_follow_up
from ia_mech.data.conversations import HEADERS, Conversation
from ia_mech.errors import UserError

FAMILIES = (*families.REAL_FAMILIES, "zephyr_text")
MERGING = ("gemma3", "mistral")  # the system message opens the first user turn
EACH = pytest.mark.parametrize("family", FAMILIES)
SYSTEM = {"role": "system", "content": "Answer in one word."}
DIALOGUE = (
    {"role": "user", "content": "What is 17 times 24?"},
    {"role": "assistant", "content": "408."},
)
ASKED = Conversation("a", "a", "d", DIALOGUE, real_follow_up="Are you sure?")
ENDS = {  # how contexts end, in each family: (user, assistant, no_turn_end, no_turn_separator)
    "smollm2": (
        "408.<|im_end|>\n<|im_start|>user\n",
        "408.<|im_end|>\n<|im_start|>assistant\n",
        "408.\n<|im_start|>user\n",
        "408.<|im_end|><|im_start|>user\n",
    ),
    "gemma3": (
        "408.<end_of_turn>\n<start_of_turn>user\n",
        "408.<end_of_turn>\n<start_of_turn>model\n",
        "408.\n<start_of_turn>user\n",
        "408.<end_of_turn><start_of_turn>user\n",
    ),
    "glm4": ("408.<|user|>\n", "408.<|assistant|>", None, None),
    "gpt_oss": (
        "408.<|end|><|start|>user<|message|>",
        "408.<|end|><|start|>assistant",
        "408.<|start|>user<|message|>",
        None,
    ),
    "mistral": ("408.</s>[INST]", "408.</s>[/INST]", "408.[INST]", None),
    "gigachat3": (
        "408.<|message_sep|>\n\nuser<|role_sep|>\n",
        "408.<|message_sep|>\n\nassistant<|role_sep|>\n",
        "408.\n\nuser<|role_sep|>\n",
        "408.<|message_sep|>user<|role_sep|>\n",
    ),
}


def chat_of(family: str, **options) -> ChatFormat:
    return ChatFormat(families.build(family), **options)


def variant(chat: ChatFormat, header: str):
    return context_and_real_follow_up(chat, replace(ASKED, header=header))[0]


@pytest.mark.parametrize("family", ENDS)
def test_the_variants_are_what_they_are_called(family):
    chat = chat_of(family)
    names = ("user", "assistant", "no_turn_end", "no_turn_separator")
    for name, end in zip(names, ENDS[family], strict=True):
        if end is None:
            with pytest.raises(UserError, match=name.removeprefix("no_").replace("_", " ")):
                variant(chat, name)
        else:
            assert variant(chat, name).text.endswith(end)


@EACH
def test_the_bare_header_is_what_the_template_writes_before_a_first_user_turn(family):
    """Contexts begin with it, and the template gives a follow-up the same ids after it."""
    chat = chat_of(family)
    bare = variant(chat, "alone")
    assert bare.ids == chat.bare_header(DIALOGUE)
    there = [i for i in bare.positions.values() if i is not None]
    assert [bare.ids[i] for i in there] == chat.header_ids
    assert all(bare.positions[name] is None for name in ("query_end", "response_end", "turn_end"))
    regular = variant(chat, "user")
    assert regular == chat.context(DIALOGUE) and regular.ids[: len(bare.ids)] == bare.ids
    turn = "Thanks, that helps!"
    whole = [*bare.ids, *chat.turn_ids(DIALOGUE, regular, turn).words]
    alone = chat.template.encode(chat.template.render([{"role": "user", "content": turn}]))[0]
    assert alone[: len(whole)] == whole


@EACH
@pytest.mark.parametrize("name", ["turn_end", "turn_separator"])
def test_leaving_a_mark_out_changes_no_other_id_and_no_position_s_token(family, name):
    chat = chat_of(family)
    regular = chat.context(DIALOGUE)
    if regular.positions[name] is None:
        pytest.skip(f"{family} has no {name}")
    changed = variant(chat, f"no_{name}")
    at = regular.positions[name]
    if name == "turn_separator":
        assert changed.ids == regular.ids[: regular.positions["turn_end"] + 1] + chat.header_ids
    else:
        start = at - chat.tail_ids.index(chat.turn_end_id)  # white space before it is left out, too
        assert changed.ids == regular.ids[:start] + regular.ids[at + 1 :]
    assert changed.positions[name] is None
    for other, index in changed.positions.items():
        if other != name and index is not None:
            assert changed.ids[index] == regular.ids[regular.positions[other]], other


@EACH
def test_the_assistant_header_stands_where_the_user_header_stood(family):
    chat = chat_of(family)
    regular, changed = chat.context(DIALOGUE), variant(chat, "assistant")
    kept = len(regular.ids) - len(chat.header_ids)
    assert changed.ids[:kept] == regular.ids[:kept]
    header = changed.ids[kept:]
    assert header and header != chat.header_ids
    asked = chat.prompt(DIALOGUE[:1])[regular.positions["query_end"] + 1 :]
    assert " ".join(map(str, header)) in " ".join(map(str, asked))  # as before the first response
    assert changed.positions["header_last"] == len(changed.ids) - 1
    first = next(name for name in chat.position_names if name.startswith("header_"))
    wanted = kept if len(header) > 1 or first == "header_last" else None
    assert changed.positions[first] == wanted


@EACH
def test_all_headers_score_the_same_ids_of_the_real_follow_up(family):
    chat = chat_of(family)
    ids = chat.turn_ids(DIALOGUE, chat.context(DIALOGUE), ASKED.real_follow_up)
    for header in HEADERS:
        try:
            _, turn = context_and_real_follow_up(chat, replace(ASKED, header=header))
        except UserError:
            continue
        assert turn == ids
    assert context_and_real_follow_up(chat, replace(ASKED, real_follow_up=None))[1] is None


@EACH
def test_an_opening_follows_every_header_and_leaves_no_real_follow_up(family):
    plain, opened = chat_of(family), chat_of(family, opening="Thanks. You say that")
    for header in HEADERS:
        try:
            without = variant(plain, header)
        except UserError:
            continue
        made, turn = context_and_real_follow_up(opened, replace(ASKED, header=header))
        assert made.ids == without.ids + opened.opening_ids
        assert made.positions == without.positions
        assert turn is None  # the user's own turn doesn't begin so


# -- the bare header --------------------------------------------------------------------------


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MERGING])
def test_a_system_message_stays(family):
    chat, told = chat_of(family), chat_of(family, system="Be brief.")
    said = chat.template.decode(chat.bare_header([SYSTEM, *DIALOGUE]))
    assert said.count(SYSTEM["content"]) == 1
    assert "17" not in said and said.endswith(chat.header_text)
    assert chat.bare_header([SYSTEM, *DIALOGUE]) != chat.bare_header(DIALOGUE)
    by_option = told.template.decode(told.bare_header(DIALOGUE))
    assert by_option == said.replace(SYSTEM["content"], "Be brief.")
    # The conversation's own message goes before that of the option.
    assert told.bare_header([SYSTEM, *DIALOGUE]) == chat.bare_header([SYSTEM, *DIALOGUE])
    ids = chat.bare_header([SYSTEM, *DIALOGUE])
    assert chat.context([SYSTEM, *DIALOGUE]).ids[: len(ids)] == ids


@pytest.mark.parametrize("family", MERGING)
def test_a_system_message_that_opens_the_first_user_turn_is_refused(family):
    said = "opens a first user turn differently from later ones; leave the system message out"
    with pytest.raises(UserError, match=said):
        chat_of(family).bare_header([SYSTEM, *DIALOGUE])
    with pytest.raises(UserError, match=said):
        chat_of(family, system="Be brief.").bare_header(DIALOGUE)


def test_a_first_user_turn_that_opens_with_words_of_its_own_is_refused():
    tokenizer = copy.deepcopy(families.build("qwen3"))
    tokenizer.chat_template = (
        "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
        "{{ 'Today is Monday. ' if loop.first }}{{ m.content }}<|im_end|>\n{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
    )
    chat = ChatFormat(tokenizer)
    chat.context(DIALOGUE)
    with pytest.raises(UserError, match="opens a first user turn differently"):
        chat.bare_header(DIALOGUE)
    assert chat.bare_header([SYSTEM, *DIALOGUE])[-len(chat.header_ids) :] == chat.header_ids
