"""Chat formats: what is derived from each family's template, and contexts against whole dialogues.

Tokens are pinned as strings: the ids of learned pieces change with the families' training text.
"""

import copy
import datetime
from dataclasses import dataclass

import families
import pytest
from tokenizers import AddedToken, processors
from transformers import ByT5Tokenizer
from transformers.utils import chat_template_utils

from ia_mech.chat.format import ChatFormat
from ia_mech.chat.thoughts import Response
from ia_mech.errors import UserError

NEWLINE, NEWLINES = "Ċ", "ĊĊ"  # as byte-level tokenizers write them
BLANK = ("", "\n", "<0x0A>", NEWLINE, NEWLINES)


@dataclass(frozen=True)
class Derived:
    """What ``ChatFormat`` has to find in a family's template; tokens are separated by spaces."""

    header_text: str
    header: str
    gap: str  # the tokens between response and header: the turn end, white space around it
    closing: str  # a mark, after white space
    turning: str  # further marks that no content may hold
    stops: str = ""  # closing
    response_stops: str = ""  # stops

    def __post_init__(self) -> None:
        object.__setattr__(self, "stops", self.stops or self.closing.split(" ")[-1])
        object.__setattr__(self, "response_stops", self.response_stops or self.stops)

    @property
    def end(self) -> int | None:
        """Index of the turn end in the gap."""
        marks = [i for i, token in enumerate(self.gap.split(" ")) if token not in BLANK]
        return marks[-1] if marks else None

    @property
    def separator(self) -> int | None:
        last = self.gap.count(" ")
        return None if self.end in (None, last) else last


FOUND = {
    "smollm2": Derived(
        header_text="<|im_start|>user\n", header=f"<|im_start|> user {NEWLINE}",
        gap=f"<|im_end|> {NEWLINE}", closing="<|im_end|>", turning="<|im_start|>",
    ),
    "qwen3": Derived(
        header_text="<|im_start|>user\n", header=f"<|im_start|> user {NEWLINE}",
        gap=f"<|im_end|> {NEWLINE}", closing="<|im_end|>", stops="<|endoftext|> <|im_end|>",
        turning="<|im_start|>",
    ),
    "llama3_1": Derived(
        header_text="<|start_header_id|>user<|end_header_id|>\n\n",
        header=f"<|start_header_id|> user <|end_header_id|> {NEWLINES}", gap="<|eot_id|>",
        closing="<|eot_id|>", stops="<|end_of_text|> <|eom_id|> <|eot_id|>",
        turning="<|begin_of_text|> <|start_header_id|> <|end_header_id|>",
    ),
    "gemma3": Derived(
        header_text="<start_of_turn>user\n", header="<start_of_turn> user \n",
        gap="<end_of_turn> \n", closing="<end_of_turn>", stops="<eos> <end_of_turn>",
        turning="<bos> <start_of_turn>",
    ),
    "glm4": Derived(
        header_text="<|user|>\n", header=f"<|user|> {NEWLINE}", gap="", closing="<|assistant|>",
        stops="<|endoftext|> <|user|> <|assistant|> <|observation|>",
        response_stops="<|endoftext|> <|user|> <|observation|>",
        turning="[gMASK] <sop> <|system|>",
    ),
    "gpt_oss": Derived(
        header_text="<|start|>user<|message|>", header="<|start|> user <|message|>",
        gap="<|end|>", closing="<|end|>", stops="<|endoftext|> <|return|> <|end|> <|call|>",
        response_stops="<|endoftext|> <|return|> <|call|>",
        turning="<|channel|> <|start|> <|message|>",
    ),
    "deepseek_v3": Derived(
        header_text="<｜User｜>", header="<｜User｜>", gap="<｜end▁of▁sentence｜>",
        closing="<｜Assistant｜>", stops="<｜end▁of▁sentence｜> <｜Assistant｜>",
        response_stops="<｜end▁of▁sentence｜>", turning="<｜begin▁of▁sentence｜> <｜User｜>",
    ),
    "mistral": Derived(
        header_text="[INST]", header="[INST]", gap="</s>", closing="[/INST]",
        stops="</s> [/INST]", response_stops="</s>", turning="<s> [INST]",
    ),
    "exaone": Derived(
        header_text="[|user|]", header="[|user|]", gap=f"[|endofturn|] {NEWLINE}",
        closing=f"{NEWLINE} [|assistant|]", stops="[|assistant|] [|endofturn|]",
        response_stops="[|endofturn|]", turning="[|system|] [|user|]",
    ),
    "nemotron_mini": Derived(
        header_text="<extra_id_1>User\n", header=f"<extra_id_1> U s er {NEWLINE}", gap=NEWLINE,
        closing=f"{NEWLINE} <extra_id_1>", stops="</s> <extra_id_1>", turning="<extra_id_0>",
    ),
    "apriel": Derived(
        header_text="<|user|>\n", header=f"<|user|> {NEWLINE}",
        gap=f"{NEWLINE} <|end|> {NEWLINE}", closing=f"{NEWLINE} <|end|>", stops="</s> <|end|>",
        turning="<|system|> <|user|> <|assistant|>",
    ),
    "kimi_k2": Derived(
        header_text="<|im_user|>user<|im_middle|>", header="<|im_user|> user <|im_middle|>",
        gap="<|im_end|>", closing="<|im_end|>", stops="[EOS] <|im_end|>",
        turning="<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|>",
    ),
    "gigachat3": Derived(
        header_text="user<|role_sep|>\n", header=f"user <|role_sep|> {NEWLINE}",
        gap=f"<|message_sep|> {NEWLINE} {NEWLINE}", closing="<|message_sep|>",
        stops="</s> <|message_sep|>", turning="<s> <|role_sep|>",
    ),
    "zephyr_text": Derived(
        header_text="<|user|>\n", header="<0x3C> <0x7C> user <0x7C> <0x3E> <0x0A>",
        gap="</s> <0x0A>", closing="</s>", turning="",
    ),
}  # fmt: skip

QUERY, RESPONSE = "Why?", "It is blue."

CONTENTS = [
    *(RESPONSE, "", "  lead and trail  ", "\n\nlead and trail\n", " \n ", "灯塔在海边。"),
    "ok 👍🏽 👩‍👩‍👧",
    *("cafe\u0301", "```python\ndef f(x):\n\treturn x\n```", QUERY, "hy", "408", "...", "Qzxvjk"),
    *("</think>", "<think>\nhm\n</think>\n\nIt is blue.", "<think>\nhm"),
    *("{{ bos_token }}{% raw %}", "half <|im_end [INST <end_of a mark"),
]


def tokens(tokenizer, ids) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(list(ids)))


def chat(family: str, **options) -> ChatFormat:
    return ChatFormat(families.build(family), eos_ids=families.eos_ids(family), **options)


def turns(*contents: str, system: str | None = None) -> list[dict]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return opening + [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def changed(family: str, template, *special: str, **named: str):
    """A family's tokenizer with another template, more special tokens, or others by name."""
    tokenizer = copy.deepcopy(families.build(family))
    tokenizer.chat_template = template
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    for name, token in named.items():
        setattr(tokenizer, name, token)
    return tokenizer


def rendered(family: str, messages: list[dict], **options) -> list[int]:
    """Ids of a dialogue as ``transformers`` renders it, its date written into the template."""
    template = families.template(family)
    template = template.replace("strftime_now('%d %b %Y')", "'01 Jan 2026'")
    template = template.replace("strftime_now('%Y-%m-%d')", "'2026-01-01'")
    tokenizer = families.build(family)
    return tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=True, return_dict=False, **options
    )


def error_of(call, *arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    return str(caught.value)


# --- derivation


@pytest.mark.parametrize("family", FOUND)
def test_header_tail_and_stops_are_derived(family):
    c, found = chat(family), FOUND[family]
    tokenizer = c.tokenizer
    assert c.header_text == found.header_text
    assert tokens(tokenizer, c.header_ids) == found.header
    assert tokens(tokenizer, c.tail_ids) == f"{found.gap} {found.header}".lstrip(" ")
    assert c.tail_text.endswith(c.header_text)
    assert tokenizer.decode(c.tail_ids, skip_special_tokens=False) == c.tail_text
    if found.end is None:
        assert c.turn_end_id is None
    else:
        assert tokens(tokenizer, [c.turn_end_id]) == found.gap.split(" ")[found.end]
    assert tokens(tokenizer, [c.closing_id]) == found.closing.split(" ")[-1]
    assert tokens(tokenizer, c.stop_ids) == found.stops
    assert tokens(tokenizer, c.response_stop_ids) == found.response_stops
    inner = [f"header_{i}" for i in range(len(c.header_ids) - 1)]
    assert c.position_names == (
        *("query_end", "response_end", "turn_end", "turn_separator"),
        *inner,
        "header_last",
    )


# --- contexts


@pytest.mark.parametrize("family", FOUND)
def test_positions_point_to_their_tokens(family):
    c, found = chat(family), FOUND[family]
    context = c.context(turns(QUERY, RESPONSE))
    gap, header = found.gap.split(" ") if found.gap else [], found.header.split(" ")
    end = len(context.ids) - len(gap) - len(header)  # where the tail begins
    where = context.positions
    assert tuple(where) == c.position_names
    assert where["query_end"] == max(
        i for i in range(end) if tokens(c.tokenizer, [context.ids[i]]) == "?"
    )
    assert tokens(c.tokenizer, [context.ids[where["response_end"]]]) == "."
    assert where["response_end"] == end - 1
    for span, text in ((context.query, QUERY), (context.response, RESPONSE)):
        assert c.tokenizer.decode(context.ids[span.start : span.stop]).strip() == text
    assert where["turn_end"] == (None if found.end is None else end + found.end)
    assert where["turn_separator"] == (None if found.separator is None else end + found.separator)
    for i in range(len(header) - 1):
        assert where[f"header_{i}"] == end + len(gap) + i
    assert where["header_last"] == len(context.ids) - 1
    assert tokens(c.tokenizer, context.ids[end:]) == " ".join(gap + header)


@pytest.mark.parametrize("family", FOUND)
def test_a_context_is_a_prefix_of_the_whole_dialogue(family):
    c = chat(family)
    for text in CONTENTS:
        if family == "qwen3" and text == "<think>\nhm":
            continue  # all of it is a thought
        for messages, *said in (
            (turns(QUERY, text), "So.", "7", "日本"),
            (turns(f"{text} or not?", text), "So."),
            (turns(QUERY, text, system=f"Be brief. {text}"), "7"),
            (turns(QUERY, text, f"Say {text} again", RESPONSE), "日本"),
            (turns(QUERY, RESPONSE, "And then?", text), "So."),
        ):
            context = c.context(messages)
            assert context.text.endswith(c.header_text)
            for turn in said:
                whole = rendered(family, [*messages, *turns(turn)])
                assert whole[: len(context.ids)] == context.ids, text
            # White space before the turn end, or the header, may merge with the response's.
            assert tokens(c.tokenizer, context.ids).endswith(
                f"{FOUND[family].gap} {FOUND[family].header}".lstrip("\n Ċ")
            )
            # What the template leaves of a response that is white space, or ends a thinking block
            # that it drops, may be nothing.
            last = messages[-1]["content"]
            if last.strip() and not (family == "qwen3" and last == "</think>"):
                after = c.template.decode(context.ids[context.positions["response_end"] + 1 :])
                assert c.tail_text in (after, f"\n{after}")
            elif last == "":
                assert context.positions["response_end"] is None
    messages = turns("a", "b", QUERY)
    assert c.prompt(messages) == rendered(family, messages, add_generation_prompt=True)


def test_trailing_spaces_belong_to_query_and_response_where_offsets_are_trimmed():
    tokenizer = copy.deepcopy(families.build("smollm2"))
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    context = ChatFormat(tokenizer).context(turns("Why? ", "It is "))
    assert context == chat("smollm2").context(turns("Why? ", "It is "))
    ids = context.ids
    assert tokens(tokenizer, ids[context.positions["response_end"] :]).split(" ")[:2] == [
        "Ġ",
        "<|im_end|>",
    ]
    queried = context.positions["query_end"]
    assert tokens(tokenizer, ids[queried - 1 : queried + 2]) == "? Ġ <|im_end|>"


def test_a_system_message_goes_where_a_conversation_has_none():
    c = chat("smollm2", system="Be brief.")
    given = c.context(turns(QUERY, RESPONSE, system="Be long."))
    added = c.context(turns(QUERY, RESPONSE))
    assert given == chat("smollm2").context(turns(QUERY, RESPONSE, system="Be long."))
    assert added == chat("smollm2").context(turns(QUERY, RESPONSE, system="Be brief."))
    assert added.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?")
    default = chat("smollm2").context(turns(QUERY, RESPONSE))
    assert "You are a helpful AI assistant named SmolLM" in default.text
    asked = rendered("smollm2", turns(QUERY, system="Be brief."), add_generation_prompt=True)
    assert c.prompt(turns(QUERY)) == asked


def test_of_named_templates_the_default_is_used():
    template = families.template("smollm2")
    named = ChatFormat(changed("smollm2", {"tool_use": "no", "default": template}))
    assert named.context(turns(QUERY, RESPONSE)) == chat("smollm2").context(turns(QUERY, RESPONSE))
    assert named.template.source == chat("smollm2").template.source
    no_default = changed("smollm2", {"tool_use": "no", "rag": template})
    assert "no chat template, or none that is named default; give one (--chat-template" in error_of(
        ChatFormat, no_default
    )


# --- the user's real turn


@pytest.mark.parametrize("family", FOUND)
def test_a_turn_is_tokenized_as_in_the_dialogue(family):
    c = chat(family)
    for messages in (turns(QUERY, RESPONSE), turns(QUERY, "", system="Be brief.")):
        context = c.context(messages)
        for turn in ("So.", " So", "7", "😀", "(why?)", "日本", "'s", "Thanks! ", "</think>"):
            ids = c.turn_ids(messages, context, turn)
            want = [*context.ids, *ids.whole]
            assert tokens(c.tokenizer, ids.end) == FOUND[family].closing
            whole = rendered(family, [*messages, *turns(turn, RESPONSE)])
            assert whole[: len(want)] == want
            assert c.text(ids.whole).strip() == turn.strip()


@pytest.mark.parametrize("family", FOUND)
def test_a_turn_may_not_merge_with_the_header(family):
    c = chat(family)
    messages = turns(QUERY, RESPONSE)
    context = c.context(messages)
    if family in ("qwen3", "glm4"):  # their newlines merge with one another
        assert "merges with the user header" in error_of(c.turn_ids, messages, context, "\nSo")
    else:
        ids = c.turn_ids(messages, context, "\nSo").words
        whole = rendered(family, [*messages, *turns("\nSo")])
        assert whole[len(context.ids) :][: len(ids)] == ids


@pytest.mark.parametrize("family", FOUND)
def test_an_empty_turn_is_its_end_alone_or_refused(family):
    c, messages, closing = chat(family), turns(QUERY, RESPONSE), FOUND[family].closing
    context = c.context(messages)
    if closing.startswith(NEWLINE) and c.header_text.endswith("\n"):  # the newlines merge
        assert "turn '' merges" in error_of(c.turn_ids, messages, context, "")
    else:
        ids = c.turn_ids(messages, context, "")
        assert tokens(c.tokenizer, ids.words) in ("", "▁")
        assert tokens(c.tokenizer, ids.end) == closing
        assert c.text(ids.whole) == c.text(ids.end) == ""


@pytest.mark.parametrize("family", ["exaone", "nemotron_mini", "apriel"])
def test_white_space_before_the_end_is_the_template_s_or_in_the_turn_s_last_token(family):
    merging = changed("qwen3", families.template(family))  # "?\n" is one token
    added = families.build(family).added_tokens_decoder.values()
    merging.add_tokens([AddedToken(t.content, normalized=False, special=True) for t in added])
    messages, ends = turns(QUERY, RESPONSE), []
    for c, last in ((chat(family), "?"), (ChatFormat(merging), "?Ċ")):
        context = c.context(messages)
        ids = c.turn_ids(messages, context, "So?")
        assert tokens(c.tokenizer, ids.words) == f"So {last}"
        ends.append(tokens(c.tokenizer, ids.end))
        whole = c.template.encode(c.template.render([*messages, *turns("So?", RESPONSE)]))[0]
        assert whole[: len(context.ids) + len(ids.whole)] == context.ids + ids.whole
        assert tokens(c.tokenizer, [context.ids[context.positions["query_end"]]]) == last
        assert c.text(ids.whole) == "So?"
        assert c.text(ids.words) == ("So?\n" if last == "?Ċ" else "So?")  # cut off: no end wrote it
        longer = c.turn_ids(messages, context, "So?\n\n").whole
        assert c.text(longer) == ("So?" if "trim" in c.tokenizer.chat_template else "So?\n\n")
        if c.turn_end_id is not None:
            at = context.positions["turn_end"]
            assert context.ids[at] == c.turn_end_id
            assert context.response.stop in (at, at - 1)
    assert ends == [FOUND[family].closing, FOUND[family].closing.removeprefix("Ċ ")]


# --- words that every turn is made to begin with


@pytest.mark.parametrize("opening", ["Thanks. You say that", "谢谢。"])
@pytest.mark.parametrize("family", FOUND)
def test_an_opening_ends_the_context_as_the_template_holds_it_and_is_no_part_of_the_turn(
    family, opening
):
    plain, c = chat(family), chat(family, opening=opening)
    for messages in (turns(QUERY, RESPONSE), turns("a", "b", QUERY, "", system="Be brief.")):
        without, context = plain.context(messages), c.context(messages)
        assert context.ids == without.ids + c.opening_ids and context.text.endswith(opening)
        assert context.positions == without.positions  # header_last is the header's own
        for turn in ("it is blue?", "7", '"Yes" it is', "日本", "😀"):
            ids = c.turn_ids(messages, context, turn)
            want = [*context.ids, *ids.whole]
            answered = [*messages, *turns(f"{opening} {turn}", RESPONSE)]
            assert rendered(family, answered)[: len(want)] == want
            assert c.text(ids.whole) == turn


def test_an_opening_that_merges_with_what_stands_beside_it_is_refused():
    for family, opening in (("qwen3", "\nSo"), ("smollm2", "So ")):
        line = error_of(chat, family, opening=opening)
        assert f"the words of --opening {opening!r} merge with text beside them" in line
    assert "changes the words of --opening ' So'" in error_of(chat, "llama3_1", opening=" So")
    assert "holds the token '<|im_end|>'" in error_of(chat, "smollm2", opening="So<|im_end|>")


# --- marks within a text


@pytest.mark.parametrize("family", FOUND)
def test_a_mark_of_turns_within_a_text_is_refused(family):
    c, found = chat(family), FOUND[family]
    context = c.context(turns(QUERY, RESPONSE))
    for mark in f"{found.stops} {found.turning}".split():
        text = f"a {mark} b"
        for role, call in {
            "query": lambda text=text: c.context(turns(text, RESPONSE)),
            "assistant": lambda text=text: c.context(turns(QUERY, text)),
            "prompt": lambda text=text: c.prompt(turns(text)),
            "system": lambda text=text: c.context(turns(QUERY, RESPONSE, system=text)),
            "real_follow_up": lambda text=text: c.turn_ids(turns(QUERY, RESPONSE), context, text),
        }.items():
            of = role if role in ("assistant", "system") else "user"
            assert error_of(call).startswith(f"the {of} turn {text!r} holds the token {mark!r}, ")


# --- what is refused


def test_what_no_format_can_be_derived_from_is_refused():
    slow = ByT5Tokenizer()
    slow.chat_template = families.template("smollm2")
    once = "doesn't show the user turn's text exactly once; use a template that renders every turn"
    apart = "doesn't mark user turns apart from assistant turns; use a template that marks"
    unmarked = ("'<|im_start|>' + m.content + '<|im_end|>\n'", "m.content + '\n'", "m.content")
    for tokenizer, problem in (
        (families.plain(), "no chat template, or none that is named default; give one (--chat-"),
        (slow, "no character offsets; use the model's fast tokenizer"),
        (families.build("no_user"), "(Unsupported role: user); use conversations that"),
        (families.build("swallows"), once),
        (changed("smollm2", "{{ messages[-1].content }}" + families.template("smollm2")), once),
        *(
            (changed("smollm2", f"{{% for m in messages %}}{{{{ {turn} }}}}{{% endfor %}}"), apart)
            for turn in unmarked
        ),
        (changed("smollm2", "{% for m in messages %}{{ m.content"), "is no Jinja template (line 1"),
    ):
        assert problem in error_of(ChatFormat, tokenizer)


# --- templates of other shapes

TURNS = "{% for m in messages %}{{ MARK[m.role] + m.content + END[m.role] }}{% endfor %}"


def roles(user: str, assistant: str, end: str, user_end: str | None = None) -> str:
    """A template of role marks, with nothing but the assistant's mark as generation prompt."""
    ends = {"user": end if user_end is None else user_end, "assistant": end, "system": end}
    marks = {"user": user, "assistant": assistant, "system": "<|system|>"}
    return (
        f"{{% set MARK = {marks!r} %}}{{% set END = {ends!r} %}}{TURNS}"
        f"{{% if add_generation_prompt %}}{{{{ {assistant!r} }}}}{{% endif %}}"
    )


def test_an_end_of_text_token_that_also_begins_the_text_is_no_header():
    """As in OLMo 2, whose roles are plain text."""
    template = "{{ bos_token }}" + roles("<|user|>\n", "<|assistant|>\n", "<|endoftext|>\n", "\n")
    end = "<|endoftext|>"
    c = ChatFormat(changed("smollm2", template, bos_token=end, eos_token=end))
    assert c.header_text == "<|user|>\n"
    assert c.tail_text == "<|endoftext|>\n<|user|>\n"
    assert tokens(c.tokenizer, [c.turn_end_id]) == end
    assert c.closing_id is None
    assert tokens(c.tokenizer, c.stop_ids) == end
    context = c.context(turns(QUERY, RESPONSE))
    assert context.positions["turn_end"] == len(context.ids) - 8
    assert context.positions["turn_separator"] == len(context.ids) - 7
    real_follow_up = c.turn_ids(turns(QUERY, RESPONSE), context, "So.")
    assert tokens(c.tokenizer, real_follow_up.whole) == "So ."


def test_roles_of_plain_text_leave_the_space_after_them_to_the_user():
    """As in Vicuna: the space merges with the first word."""
    template = roles(" USER: ", " ASSISTANT: ", "<|im_end|>", "")
    c = ChatFormat(changed("smollm2", template))
    assert c.header_text == "USER:"
    assert tokens(c.tokenizer, c.tail_ids) == "<|im_end|> Ġ U S E R :"
    messages = turns(QUERY, RESPONSE)
    context = c.context(messages)
    assert context.text == " USER: Why? ASSISTANT: It is blue.<|im_end|> USER:"
    ids = c.turn_ids(messages, context, "So.").words
    assert tokens(c.tokenizer, ids) == "ĠS o ."
    assert c.text(ids) == "So."


def plain(template: str, *special: str, **named: str) -> ChatFormat:
    return ChatFormat(changed("smollm2", template, *special, **named))


CHATML = TURNS.replace("MARK[m.role]", "'<|im_start|>' + m.role + '\n'")
DEFAULT = "<|im_start|>system\nBe kind.<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "special", "eos", "header", "end", "response_stop"),
    [
        (  # as in Ling: a mark opens the turns of both roles, and the role is written out
            roles("<role>HUMAN</role>", "<role>ASSISTANT</role>", ""),
            ("<role>", "</role>"), "<|endoftext|>", "<role>HUMAN</role>", None, "<role>",
        ),
        (  # as in Baichuan, with an answer opened whether or not it is asked for
            roles("<u>", "<a>", "").replace("if add_generation_prompt", "if true"),
            ("<u>", "<a>"), "<|endoftext|>", "<u>", None, "<u>",
        ),
        (  # as in GLM-Edge: what opens a user turn is the end of text
            roles("<u>\n", "<a>\n", ""), ("<u>", "<a>"), "<u>", "<u>\n", None, "<u>",
        ),
        (  # as in Command R7B: two marks close a response
            roles("<t><u>", "<t><a><r>", "</r></t>", "</t>"),
            ("<t>", "<u>", "<a>", "<r>", "</r>", "</t>"), "</t>", "<t><u>", "</t>", "</r>",
        ),
        (  # as in DeepSeek-Coder: roles of plain text, and an answer always opened
            roles("### User:\n", "### Answer:\n", "\n<e>\n", "\n").replace(
                "if add_generation_prompt", "if true"),
            ("<e>",), "<e>", "### User:\n", "<e>", "<e>",
        ),
        (  # a last turn is left open
            DEFAULT + CHATML.replace("END[m.role]", "('' if loop.last else '<|im_end|>\n')"),
            (), "<|im_end|>", "<|im_start|>user\n", "<|im_end|>", "<|im_end|>",
        ),
        (  # no prompt for an answer at all
            DEFAULT + CHATML.replace("END[m.role]", "'<|im_end|>\n'"),
            (), "<|endoftext|>", "<|im_start|>user\n", "<|im_end|>", "<|im_end|>",
        ),
    ],
)  # fmt: skip
def test_what_a_template_writes_only_before_a_user_turn_opens_it(
    template, special, eos, header, end, response_stop
):
    c = plain(template, *special, eos_token=eos)
    assert c.header_text == header
    assert c.turn_end_id == (end and c.tokenizer.convert_tokens_to_ids(end))
    assert c.tokenizer.convert_tokens_to_ids(response_stop) in c.response_stop_ids
    context = c.context(turns(QUERY, RESPONSE))
    assert context.text.endswith(c.tail_text) and context.ids[-len(c.tail_ids) :] == c.tail_ids


UNSHOWN = (
    "{% for m in messages %}{% if not loop.last %}{{ m.role + ': ' + m.content + '\n\n' }}"
    "{% elif m.role == 'user' %}{{ 'user: ' + m.content + '\n\nassistant:<sep>' }}{% endif %}"
    "{% endfor %}"
)


def test_a_template_may_show_a_response_only_where_something_follows():
    """As in YandexGPT."""
    c = plain(UNSHOWN, "<sep>")
    assert c.header_text == "user:" and c.turn_end_id is None and c.closing_id is None
    context = c.context(turns(QUERY, RESPONSE))
    assert context.text == "user: Why?\n\nassistant: It is blue.\n\nuser:"
    assert context.positions["turn_end"] is context.positions["turn_separator"] is None
    assert c.template.decode(c.prompt(turns(QUERY))) == "user: Why?\n\nassistant:<sep>"
    assert c.parse_response(c.template.encode(" It is blue.")[0], []) == Response(RESPONSE)
    line = error_of(ChatFormat, c.tokenizer, thinking="keep")
    assert "doesn't show a response that comes last; use --thinking template" in line


LAST = (  # as in Mistral v3: a system message is written into the last user turn
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}<u>"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}{{ m.content + '<a>' }}{% else %}{{ m.content + '<e>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        (LAST, "moves the system turn's text into another turn"),
        (LAST.replace("{{ messages[0].content + '\n\n' }}", ""), "doesn't show the system turn's"),
        (LAST.replace("if m.role == 'user'", "if messages[0].role == 'system' %}"
                      "{{ raise_exception('no system role') }}{% elif m.role == 'user'"),
         "(no system role)"),
    ],
)  # fmt: skip
def test_a_system_message_that_has_no_place_of_its_own_is_refused(template, cause):
    c = plain(template, "<u>", "<a>", "<e>")
    c.context(turns(QUERY, RESPONSE))
    told = ChatFormat(c.tokenizer, system="Be brief.")
    for line in (
        error_of(c.context, turns(QUERY, RESPONSE, system="Be brief.")),
        error_of(c.prompt, turns(QUERY, system="Be brief.")),
        error_of(told.context, turns(QUERY, RESPONSE)),
    ):
        assert line.startswith("a system message can't be given: the chat template ")
        assert cause in line
        assert "leave it out, or put its words at the start of the first query" in line


def test_an_empty_response_is_rendered_without_white_space_before_it_or_refused():
    """As in GLM-4.5, and as in Seed-OSS, which doesn't close it."""
    spaced = "{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<u>\n' + m.content + '<e>' }}"
        f"{{% else %}}{{{{ '<a>' }}}}{spaced}{{{{ '<e>' }}}}{{% endif %}}{{% endfor %}}"
    )
    c = plain(template, "<u>", "<a>", "<e>")
    context = c.context(turns(QUERY, ""))
    assert context.text == "<u>\nWhy?<e><a><e><u>\n"
    assert context.positions["response_end"] is None
    assert context.ids[context.positions["turn_end"]] == c.turn_end_id
    closing = spaced.replace("m.content }}", "m.content + '<e>' }}")
    unclosed = plain(template.replace(spaced + "{{ '<e>' }}", closing), "<u>", "<a>", "<e>")
    assert unclosed.context(turns(QUERY, RESPONSE)).text.endswith("<a>\nIt is blue.<e><u>\n")
    line = error_of(unclosed.context, turns(QUERY, ""))
    assert "renders an empty assistant turn differently from others; leave out" in line


# --- dates


@pytest.mark.parametrize(
    ("family", "line"),
    [("llama3_1", "Today Date: 31 Dec 1999"), ("gpt_oss", "Current date: 1999-12-31")],
)
def test_a_printed_date_is_the_given_one_and_no_other_clock_is_asked(family, line, monkeypatch):
    messages = turns(QUERY, RESPONSE)
    want, other = chat(family).context(messages), chat(family, date="1999-12-31")
    assert f"\n{line}\n" in other.context(messages).text and line not in want.text
    assert other.template.source == chat(family).template.source

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 5, 17)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    tokenizer = copy.deepcopy(families.build(family))
    unpinned = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "17 May 2031" in unpinned or "2031-05-17" in unpinned
    assert ChatFormat(tokenizer).context(messages) == want


# --- what was sampled


@pytest.mark.parametrize("family", FOUND)
def test_a_response_loses_its_end_and_the_white_space_around_it(family):
    c = chat(family)
    said = "\nOne two\nthree four\n\nfive "
    ids = c.tokenizer(said, add_special_tokens=False)["input_ids"]
    for end in ([], [c.response_stop_ids[0]], [c.response_stop_ids[-1]]):
        assert c.parse_response([*ids, *end], []).text == "One two\nthree four\n\nfive"
    assert c.parse_response([], []) == c.parse_response(c.response_stop_ids[:1], []) == Response("")


@pytest.mark.parametrize("family", FOUND)
def test_a_response_ends_where_it_opens_another_turn(family):
    c = chat(family)
    said = f"{RESPONSE}{c.tail_text}Thanks!"
    text = c.parse_response(c.tokenizer(said, add_special_tokens=False)["input_ids"], []).text
    assert text == RESPONSE
    assert c.context(turns(QUERY, text)) == c.context(turns(QUERY, RESPONSE))


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ("<|channel|>final<|message|>Blue.\nSky.<|return|>", "Blue.\nSky."),
        (
            "<|channel|>analysis<|message|>Hm. What?<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Blue.<|return|>",
            "Blue.",
        ),
        ("<|channel|>analysis<|message|>Hm, the sky", ""),  # cut off before it answered
        ("<|channel|>final<|message|>Blue.<|end|><|start|>user<|message|>So", "Blue."),
        ("Blue.<|return|>", "Blue."),
    ],
)
def test_a_harmony_response_is_its_final_channel(said, want):
    c = chat("gpt_oss")
    ids = c.tokenizer(said, add_special_tokens=False)["input_ids"]
    assert c.parse_response(ids, []).text == want
    c.context(turns(QUERY, want))


def test_a_user_turn_keeps_every_special_token_but_the_one_that_ended_it():
    c = chat("gpt_oss")
    said = "<|channel|>analysis<|message|>They may ask.<|end|>"
    ids = c.tokenizer(said, add_special_tokens=False)["input_ids"]
    assert c.text(ids) == "<|channel|>analysis<|message|>They may ask."
    assert c.text(ids[:-1]) == "<|channel|>analysis<|message|>They may ask."
    assert c.text([]) == c.text(c.stop_ids[:1]) == ""
    assert c.text([c.stop_ids[0], c.stop_ids[0]]) == "<|endoftext|>"
