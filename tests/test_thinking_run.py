"""The main job with a model that thinks: generated responses and ones written elsewhere."""

import copy
import json
from dataclasses import replace

import families
import pytest
import tiny
import torch
from runs import sampled

from ia_mech.chat.format import ChatFormat
from ia_mech.display import Quiet
from ia_mech.errors import UserError
from ia_mech.judge.judging import items_of
from ia_mech.models.load import ModelSpec, Subject, weights_hash
from ia_mech.run import Run, layout
from ia_mech.settings import Settings

SETTINGS = Settings(
    limit=3,
    response="generate",
    responses=4,
    unfinished=True,
    max_response_tokens=24,
    temperatures=(),
    max_new_tokens=4,
    batch_rows=20,
    seed=4,
)


@pytest.fixture(scope="module")
def subject() -> Subject:
    """A random Llama that likes to end its thoughts, and its turns, with Qwen3.5's template."""
    tokenizer = families.build("qwen3_5")
    model = tiny.fresh("llama", vocab_size=len(tokenizer))
    head = torch.nn.Linear(32, len(tokenizer))
    head.weight, head.bias = model.lm_head.weight, torch.nn.Parameter(torch.zeros(len(tokenizer)))
    for token in ("</think>", "<|im_end|>"):
        head.bias.data[tokenizer.convert_tokens_to_ids(token)] = 6.0
    model.lm_head = head.requires_grad_(False)
    return Subject(ModelSpec(name="tiny-thinking"), model, tokenizer, weights_hash(model))


@pytest.fixture(scope="module")
def run(subject, tmp_path_factory) -> Run:
    return sampled(SETTINGS, subject, tmp_path_factory.mktemp("thinking") / "run", Quiet())


def test_a_thought_has_a_column_of_its_own_and_how_a_response_ended_is_known(run):
    contexts = run.contexts.set_index("order")
    written = run.responses.set_index("order")
    ended = contexts["response_finish_reason"]
    assert set(ended) == {"turn_end", "length", "thought"}
    assert ended.tolist() == written["finish_reason"].tolist()
    unfinished = contexts["response_unfinished"]
    assert (unfinished == ended.isin(["length", "thought"])).all()
    after = run.generations["order"].map(unfinished)
    assert (run.generations["response_unfinished"] == after).all()
    thoughts = contexts["response_thought"].dropna()
    assert thoughts.equals(written["thought"].dropna()) and set(ended[thoughts.index]) == set(ended)
    for order, messages in contexts["messages"].items():
        said = messages[-1]
        assert said["content"] == written["response"][order]
        assert said.get("reasoning_content") == thoughts.get(order)
        assert set(messages[0]) == {"role", "content"}
        if ended[order] == "thought":
            assert said["content"] == ""
    # As the template has history: without thoughts.
    assert not contexts["text"].str.contains("<think>").any()


def test_a_judge_sees_no_thought(run):
    responses = run.contexts.set_index("context_id")["messages"].map(lambda all_: all_[-1])
    shown = [(item.response, item.query) for item in items_of(run)]
    names = run.generations["context_id"]
    assert [response for response, _ in shown] == [responses[name]["content"] for name in names]
    assert all("think" not in query for _, query in shown)


def test_kept_thoughts_are_of_the_same_responses(run, subject, tmp_path):
    kept = sampled(replace(SETTINGS, thinking="keep"), subject, tmp_path / "run", Quiet())
    assert kept.responses.equals(run.responses)
    for row in kept.contexts.itertuples():
        thought = row.messages[-1].get("reasoning_content", "")
        assert f"<think>\n{thought}\n</think>\n\n{row.messages[-1]['content']}" in row.text


def test_an_option_reaches_the_prompt_and_is_part_of_the_identity(run, subject, tmp_path):
    option = {"enable_thinking": False}
    settings = replace(SETTINGS, template_option=option, limit=1)
    quick = sampled(settings, subject, tmp_path / "run", Quiet())
    assert quick.contexts["response_thought"].isna().all()
    assert "thought" not in set(quick.contexts["response_finish_reason"])
    assert quick.responses["response"].tolist() != run.responses["response"].tolist()[:4]
    assert quick.settings["template_option"] == option
    assert quick.record["identity"]["chat"]["options"] == option
    assert Settings.read(quick.settings) == replace(settings, batch_rows=20)
    with pytest.raises(UserError, match="--template-option"):
        sampled(replace(settings, template_option=None), subject, tmp_path / "run", Quiet())


# --- responses written elsewhere, and tools

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALLS = [{"type": "function", "function": {"name": "look", "arguments": {"where": "up"}}}]
QUERY = {"role": "user", "content": "What colour is it?"}
ROWS = [
    {"role": "assistant", "content": "Blue.", "reasoning_content": "The sky?"},
    {"role": "assistant", "content": "<think>\nThe sky?\n</think>\n\nBlue."},
    {"role": "assistant", "content": "Blue, or rather", "reasoning_content": "The sky?"},
    {"role": "assistant", "content": "<think>\nThe sk"},
    {"role": "assistant", "content": "Blue."},
]
ENDED = ["stop", None, "length", "length", None]


@pytest.fixture(scope="module")
def given(subject, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("given")
    rows = [
        {"id": f"q{i}", "source_id": f"q{i}", "messages": [QUERY, said], "finish_reason": ended}
        for i, (said, ended) in enumerate(zip(ROWS, ENDED, strict=True))
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(
        dataset=str(folder / "chats.jsonl"), limit=None, temperatures=(), max_new_tokens=3
    )
    return sampled(settings, subject, folder / "run", Quiet())


def test_given_responses_have_their_thoughts_and_how_they_ended(given):
    contexts = given.contexts
    assert set(contexts["response_policy"]) == {"given"}
    ended = ["stop", "given", "length", "thought", "given"]
    assert contexts["response_finish_reason"].tolist() == ended
    assert contexts["response_unfinished"].tolist() == [False, False, True, True, False]
    thoughts = ["The sky?"] * 3 + ["The sk", None]
    assert contexts["response_thought"].astype(object).where(
        lambda t: t.notna(), None
    ).tolist() == (thoughts)
    messages = contexts["messages"].tolist()
    assert messages[0] == messages[1] == [QUERY, ROWS[0]]
    assert messages[3] == [
        QUERY,
        {"role": "assistant", "content": "", "reasoning_content": "The sk"},
    ]
    assert messages[4] == [QUERY, ROWS[4]]
    assert contexts["text"][0] == contexts["text"][1] == contexts["text"][4]


def test_messages_are_stored_with_all_that_they_have():
    called = {"role": "assistant", "content": "", "reasoning_content": "Up?", "tool_calls": CALLS}
    answered = {"role": "tool", "content": "blue", "name": "look", "tool_call_id": "1"}
    for message in (QUERY | {"tools": TOOLS}, called, answered, ROWS[0]):
        stored = layout.message_columns(message)
        assert all(value is None or isinstance(value, str) for value in stored.values())
        assert layout.message_of(stored) == message


SHOWS = """\
{{- tools | tojson if tools -}}
{%- for m in messages -%}
{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ (m.tool_calls | tojson if m.tool_calls else '') -}}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


@pytest.mark.parametrize(
    ("lacks", "what"),
    [
        ("{{- tools | tojson if tools -}}", "the list of tools"),
        (" ~ (m.tool_calls | tojson if m.tool_calls else '')", "the calls of tools"),
        (" if m.role != 'tool'", "the answers of tools"),
    ],
)
def test_what_belongs_to_tools_is_shown_or_refused_by_name(lacks, what):
    messages = [
        QUERY | {"tools": TOOLS},
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "Blue."},
    ]
    tokenizer = copy.deepcopy(families.build("smollm2"))
    tokenizer.chat_template = SHOWS
    context = ChatFormat(tokenizer).context(messages)
    bare = [{name: m[name] for name in m if name != "tools"} for m in messages]
    whole = [*bare, {"role": "user", "content": "So?"}]
    rendered = tokenizer.apply_chat_template(whole, tools=TOOLS, tokenize=False)
    assert rendered.startswith(context.text)
    decoded = tokenizer.decode(context.ids[context.query.start : context.query.stop])
    assert decoded == QUERY["content"]
    tokenizer.chat_template = (
        SHOWS.replace(lacks, "")
        if lacks in SHOWS
        else SHOWS.replace("in messages", f"in messages{lacks}")
    )
    with pytest.raises(
        UserError, match=f"the chat template doesn't show {what}; use a model whose"
    ) as refused:
        ChatFormat(tokenizer).context(messages)
    # Named as metadata, tools would leave a dialogue with calls of what isn't there.
    assert "--metadata-columns" not in refused.value.remedy
    if what == "the list of tools":
        with pytest.raises(UserError, match="--metadata-columns"):
            ChatFormat(tokenizer).context([messages[0], messages[-1]])


def test_a_name_is_shown_or_refused():
    tokenizer = copy.deepcopy(families.build("smollm2"))
    named = [QUERY | {"name": "Ann"}, {"role": "assistant", "content": "Blue."}]
    with pytest.raises(UserError, match=r"doesn't show the user's name; .*--metadata-columns"):
        ChatFormat(tokenizer).context(named)
    tokenizer.chat_template = SHOWS.replace("m.role ~", "m.role ~ (m.name or '') ~")
    assert "<|im_start|>userAnn\n" in ChatFormat(tokenizer).context(named).text
