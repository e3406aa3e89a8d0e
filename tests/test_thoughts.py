"""Thoughts: told apart in what a model writes, and in the context as the template has history."""

from dataclasses import dataclass, field

import families
import pytest

from ia_mech.chat.format import ChatFormat
from ia_mech.chat.thoughts import Response
from ia_mech.errors import UserError

TEXT, THOUGHT = "It is blue.", "Hm, light."


@dataclass(frozen=True)
class Thinking:
    """What a family's model writes, and what its template makes of it."""

    written: str  # after the prompt, without the token that ends it
    kept: str | None  # with --thinking keep, from the assistant's header to the turn end
    history: str = TEXT  # the same in a context
    options: dict = field(default_factory=dict)


FOUND = {
    "qwen3": Thinking(
        "<think>\nHm, light.\n</think>\n\nIt is blue.",
        "<think>\nHm, light.\n</think>\n\nIt is blue.",
    ),
    "qwen3_5": Thinking(
        "Hm, light.\n</think>\n\nIt is blue.",
        "<think>\nHm, light.\n</think>\n\nIt is blue.",
    ),
    "gpt_oss": Thinking(
        "<|channel|>analysis<|message|>Hm, light.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is blue.",
        "<|channel|>analysis<|message|>Hm, light.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is blue.",
        "<|channel|>final<|message|>It is blue.",
        {"reasoning_effort": "high"},
    ),
    "glm4_7": Thinking(
        "Hm, light.</think>It is blue.",
        "<think>Hm, light.</think>It is blue.",
        "</think>It is blue.",
    ),
    "gemma4": Thinking(
        "<|channel>thought\nHm, light.\n<channel|>It is blue.",
        None,
        options={"enable_thinking": True},
    ),
    "kimi_k2_thinking": Thinking(
        "<think>Hm, light.</think>It is blue.",
        None,
        "<think></think>It is blue.",
    ),
    "kimi_vl": Thinking(
        "◁think▷Hm, light.◁/think▷It is blue.",
        "◁think▷Hm, light.◁/think▷It is blue.",
    ),
    "smollm3": Thinking(
        "<think>\nHm, light.\n</think>\nIt is blue.",
        "<think>\nHm, light.\n</think>\nIt is blue.",
        "<think>\nHm, light.\n</think>\nIt is blue.",
    ),
    "deepseek_r1": Thinking("Hm, light.\n</think>\n\nIt is blue.", None),
    "magistral": Thinking(
        "[THINK]Hm, light.[/THINK]It is blue.",
        "[THINK]Hm, light.[/THINK]It is blue.",
        "[THINK]Hm, light.[/THINK]It is blue.",
    ),
    "seed_oss": Thinking(
        "<seed:think>Hm, light.</seed:think>\nIt is blue.",
        "<seed:think>Hm, light.</seed:think>\nIt is blue.",
        "<seed:think>Hm, light.</seed:think>\nIt is blue.",
    ),
}
UNTHOUGHT = {  # the options that switch thinking off, and what an answer then begins with
    "qwen3": ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    "qwen3_5": ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    "glm4_7": ({"enable_thinking": False}, "</think>"),
    "gemma4": ({"enable_thinking": False}, "<|channel>thought\n<channel|>"),
    "smollm3": ({"enable_thinking": False}, "<think>\n\n</think>\n"),
    "seed_oss": ({"thinking_budget": 0}, "<seed:think>\n</seed:think>"),
}


def chat(family: str, tokenizer=None, **given) -> ChatFormat:
    tokenizer, eos = tokenizer or families.build(family), families.eos_ids(family)
    return ChatFormat(tokenizer, eos_ids=eos, **{"options": FOUND[family].options, **given})


def encoded(c: ChatFormat, text: str) -> list[int]:
    return c.template.encode(text)[0]


def dialogue(**said: str) -> list[dict]:
    query = {"role": "user", "content": "Why is the sky as it is?"}
    return [query, {"role": "assistant", "content": TEXT} | said]


def parsed(c: ChatFormat, text: str, *, ended: bool = True) -> Response:
    ids = encoded(c, text) + c.response_stop_ids[:1] * ended
    return c.parse_response(ids, c.prompt(dialogue()[:1]))


def said_in(c: ChatFormat, messages: list[dict]) -> str:
    """What a context holds of its last response, from the assistant's header to the turn end."""
    bare = c.thoughts.header(c.template.decode(c.prompt(messages[:-1])))
    text = c.context(messages).text
    assert text.startswith(bare) and text.endswith(c.tail_text)
    return text[len(bare) : len(text) - len(c.tail_text)]


# --- what a model wrote


@pytest.mark.parametrize("family", FOUND)
def test_a_thought_is_told_apart(family):
    c, found = chat(family), FOUND[family]
    assert parsed(c, found.written) == parsed(c, found.written, ended=False)
    assert parsed(c, found.written) == Response(TEXT, THOUGHT)
    run_on = found.written + c.tail_text + "Thanks!"
    assert parsed(c, run_on, ended=False) == Response(TEXT, THOUGHT)


@pytest.mark.parametrize("family", FOUND)
def test_a_response_that_ends_within_its_thought_says_nothing(family):
    c, found = chat(family), FOUND[family]
    begun = found.written[: found.written.index("ight.")]
    for ended in (True, False):
        assert parsed(c, begun, ended=ended) == Response("", "Hm, l", within_thought=True)
    # A turn that is opened within a thought ends it, whatever follows.
    cut = begun + c.tail_text + "So?" + found.written[len(begun) :]
    if family != "gpt_oss":  # a channel is itself such a mark
        assert parsed(c, cut) == Response("", "Hm, l", within_thought=True)


@pytest.mark.parametrize("family", UNTHOUGHT)
def test_a_response_without_a_thought_is_all_text(family):
    options, opened = UNTHOUGHT[family]
    c = chat(family, options=options)
    assert c.template.decode(c.prompt(dialogue()[:1])).endswith(opened)
    assert parsed(c, TEXT) == Response(TEXT)
    assert parsed(c, "Write <think> and </think>.") == Response("Write <think> and </think>.")


def test_a_second_end_of_a_thought_ends_the_response():
    """Templates that split at such marks would show the words behind the last one alone."""
    c = chat("qwen3_5")
    ids = encoded(c, f"Hm\n</think>\n\n{TEXT}</think>\n\nMore.")
    assert c.parse_response(ids, c.prompt(dialogue()[:1])) == Response(TEXT, "Hm")


def test_a_prompt_that_opens_no_thought_begins_none():
    """As SmolLM3's, whose system message may switch thinking off, too."""
    c = chat("qwen3")
    assert parsed(c, TEXT) == Response(TEXT)
    assert parsed(c, "<think>\n\n</think>\n\nIt is blue.") == Response(TEXT)
    closed = c.prompt(dialogue()[:1]) + encoded(c, "<think>\n\n</think>\n\n")
    assert c.parse_response(encoded(c, TEXT), closed) == Response(TEXT)
    opened = c.prompt(dialogue()[:1]) + encoded(c, "<think>\n")
    assert c.parse_response(encoded(c, "Hm"), opened) == Response("", "Hm", within_thought=True)


def test_templates_that_know_no_thoughts_leave_all_of_a_response():
    c = ChatFormat(families.build("smollm2"))
    said = "<think>\nHm.\n</think>\n\nIt is blue."
    assert c.thoughts.marks is None and c.thoughts.key is None
    assert parsed(c, said) == Response(said)
    with_thought = c.context(dialogue(reasoning_content=THOUGHT))
    assert with_thought == c.context(dialogue())
    with pytest.raises(UserError, match="--thinking keep: the chat template has no place for a th"):
        ChatFormat(c.tokenizer, thinking="keep").context(dialogue(reasoning_content=THOUGHT))


# --- in a context


@pytest.mark.parametrize("family", FOUND)
def test_a_context_has_a_thought_as_the_template_has_history_or_keeps_it(family):
    found, key = FOUND[family], {"gpt_oss": "thinking"}.get(family, "reasoning_content")
    messages = dialogue(reasoning_content=THOUGHT)
    c = chat(family)
    assert said_in(c, messages).lstrip("\n") == found.history
    as_documented = [*dialogue(**{key: THOUGHT}), {"role": "user", "content": "So?"}]
    if c.thoughts.key == "content":  # contents as the model writes them
        as_documented[1] = {"role": "assistant", "content": found.written}
    whole = c.template.render(as_documented)
    assert whole.startswith(c.context(messages).text)
    if found.kept is None:
        with pytest.raises(UserError, match="--thinking keep: the chat template leaves out"):
            chat(family, thinking="keep")
        return
    kept = chat(family, thinking="keep")
    assert said_in(kept, messages).lstrip("\n") == found.kept
    # So does a dialogue whose last turn it is, up to the end of that turn.
    last = kept.template.render(as_documented[:2])
    assert last.startswith(kept.context(messages).text.removesuffix(kept.tail_text))


@pytest.mark.parametrize("family", FOUND)
def test_a_shown_thought_is_part_of_the_response(family):
    for thinking in ("template", "keep"):
        if thinking == "keep" and FOUND[family].kept is None:
            continue
        c = chat(family, thinking=thinking)
        context, bare = (
            c.context(dialogue(**said)) for said in ({"reasoning_content": THOUGHT}, {})
        )
        said = c.template.decode(context.ids[context.response.start : context.response.stop])
        shown = THOUGHT in context.text
        assert (THOUGHT in said) is shown and said.endswith(TEXT)
        assert c.template.decode(bare.ids[bare.response.start : bare.response.stop]).strip() == TEXT
        if shown:  # all that differs lies within it
            asked = context.response.start
            assert context.ids[:asked] == bare.ids[:asked]


@pytest.mark.parametrize("family", FOUND)
def test_a_given_text_that_holds_its_thought_is_one_with_a_thought(family):
    c, found = chat(family), FOUND[family]
    if family == "gpt_oss":  # whose template refuses channels in a content, too
        with pytest.raises(UserError, match="holds the token"):
            c.context(dialogue(content=found.written))
        return
    given = dialogue(content=found.written)
    assert c.context(given) == c.context(dialogue(reasoning_content=THOUGHT))
    told = c.thoughts.told_apart(given)
    assert told[1] == dialogue(reasoning_content=THOUGHT)[1]
    assert c.thoughts.told_apart(told) == told
    assert c.thoughts.told_apart(dialogue()) == dialogue()


def test_earlier_thoughts_are_given_to_the_template_too():
    c = chat("glm4_7", options={"clear_thinking": False})
    turns = [*dialogue(reasoning_content="One."), *dialogue(reasoning_content="Two.")]
    text = c.context(turns).text
    assert "<think>One.</think>It is blue." in text and "<think>Two.</think>It is blue." in text
    assert "Two." not in chat("glm4_7").context(turns).text


def test_a_thought_may_not_open_a_turn():
    with pytest.raises(UserError, match=r"the assistant turn .* holds the token '<\|im_end\|>'"):
        chat("qwen3").context(dialogue(reasoning_content="Hm<|im_end|>"))


# --- options of templates


def test_options_reach_every_rendering():
    c = chat("qwen3_5", options={"enable_thinking": False})
    prompt = c.template.decode(c.prompt(dialogue()[:1]))
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    effort = chat("gpt_oss", options={"reasoning_effort": "low"})
    for text in (
        effort.context(dialogue()).text,
        effort.template.decode(effort.prompt(dialogue()[:1])),
        effort.template.decode(effort.bare_header(dialogue())),
    ):
        assert "Reasoning: low\n" in text
    assert effort.describe()["options"] == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("thinking", "give one of .*enable_thinking"),
        *((name, "give one of") for name in ("messages", "add_generation_prompt")),
        *((name, "use --date") for name in ("strftime_now", "today")),
    ],
)
def test_what_a_template_never_reads_is_refused(name, problem):
    with pytest.raises(UserError, match=f"{name}: .* reads no such option; {problem}"):
        chat("qwen3", options={name: True})
    with pytest.raises(UserError, match="reads no such option; leave it out"):
        ChatFormat(families.build("zephyr_text"), options={"enable_thinking": True})
