"""The bare user header with no turn before it, in each family's template."""

import copy

import families
import pytest

from ia_mech.chat.format import ChatFormat
from ia_mech.errors import UserError

FAMILIES = (*families.REAL_FAMILIES, "zephyr_text")
MERGING = ("gemma3", "mistral")  # the system message opens the first user turn
EACH = pytest.mark.parametrize("family", FAMILIES)
SYSTEM = {"role": "system", "content": "Answer in one word."}
DIALOGUE = [
    {"role": "user", "content": "What is 17 times 24?"},
    {"role": "assistant", "content": "408."},
]
OPENED = {
    "smollm2": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
    "Hugging Face<|im_end|>\n<|im_start|>user\n",
    "qwen3": "<|im_start|>user\n",
    "llama3_1": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 01 Jan 2026\n\n<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n",
    "gemma3": "<bos><start_of_turn>user\n",
    "glm4": "[gMASK]<sop><|user|>\n",
    "deepseek_v3": "<｜begin▁of▁sentence｜><｜User｜>",
    "mistral": "<s>[INST]",
    "zephyr_text": "<|user|>\n",
}


def formats(family: str, **options) -> ChatFormat:
    return ChatFormat(families.build(family), **options)


def changed(family: str, template: str) -> ChatFormat:
    """A format whose template is another one, in which ``{}`` stands for the family's."""
    tokenizer = copy.deepcopy(families.build(family))
    tokenizer.chat_template = template.replace("{}", families.template(family))
    return ChatFormat(tokenizer)


@pytest.mark.parametrize("family", OPENED)
def test_the_opening_is_what_the_template_writes_before_a_first_user_turn(family):
    chat = formats(family)
    assert chat.template.decode(chat.opening(DIALOGUE)) == OPENED[family]


@EACH
def test_contexts_begin_with_the_opening(family):
    """The first query of a dialogue stands after the same tokens."""
    chat = formats(family)
    ids = chat.opening(DIALOGUE)
    assert chat.context(DIALOGUE).ids[: len(ids)] == ids


@EACH
def test_a_turn_after_the_opening_has_the_ids_that_the_template_gives_it(family):
    """The follow-up's own ids continue the opening as the whole rendered text is tokenized."""
    chat = formats(family)
    turn = "Thanks, that helps!"
    ids = chat.reference_ids(DIALOGUE, chat.context(DIALOGUE), turn)
    alone = chat.template.encode(chat.template.render([{"role": "user", "content": turn}]))[0]
    whole = [*chat.opening(DIALOGUE), *ids]
    assert alone[: len(whole)] == whole


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MERGING])
def test_a_system_message_stays(family):
    chat, told = formats(family), formats(family, system="Be brief.")
    said = chat.template.decode(chat.opening([SYSTEM, *DIALOGUE]))
    assert said.count(SYSTEM["content"]) == 1
    assert "17" not in said and said.endswith(chat.header_text)
    assert chat.opening([SYSTEM, *DIALOGUE]) != chat.opening(DIALOGUE)
    by_option = told.template.decode(told.opening(DIALOGUE))
    assert by_option == said.replace(SYSTEM["content"], "Be brief.")
    # The conversation's own message goes before that of the option.
    assert told.opening([SYSTEM, *DIALOGUE]) == chat.opening([SYSTEM, *DIALOGUE])
    ids = chat.opening([SYSTEM, *DIALOGUE])
    assert chat.context([SYSTEM, *DIALOGUE]).ids[: len(ids)] == ids


@pytest.mark.parametrize("family", MERGING)
def test_a_system_message_that_opens_the_first_user_turn_is_refused(family):
    said = "opens a first user turn in another way than later ones; leave the system message out"
    with pytest.raises(UserError, match=said):
        formats(family).opening([SYSTEM, *DIALOGUE])
    with pytest.raises(UserError, match=said):
        formats(family, system="Be brief.").opening(DIALOGUE)


def test_a_first_user_turn_that_opens_with_words_of_its_own_is_refused():
    chat = changed(
        "qwen3",
        "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
        "{{ 'Today is Monday. ' if loop.first }}{{ m.content }}<|im_end|>\n{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}",
    )
    chat.context(DIALOGUE)
    with pytest.raises(UserError, match="opens a first user turn in another way"):
        chat.opening(DIALOGUE)
    assert chat.opening([SYSTEM, *DIALOGUE])[-len(chat.header_ids) :] == chat.header_ids
