"""Several responses to a query: written by the model, or given by the data."""

import json
from dataclasses import replace

import pytest

from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.collect.summary import several_responses
from ia_mech.data.conversations import Conversation, open_conversations
from ia_mech.engine.decode import decode
from ia_mech.engine.loop import Row
from ia_mech.engine.plan import Grid
from ia_mech.engine.prefill import Prefix, prefill
from ia_mech.engine.sampling import response_stream_key, stream_key
from ia_mech.errors import UserError
from ia_mech.judge.label import label_run
from ia_mech.judge.rules import RulesJudge
from ia_mech.rates.compute import estimates
from ia_mech.rates.load import read_runs

CONFIG = SampleConfig(
    limit=3,
    response="generate",
    responses=3,
    response_temperature=1.0,
    max_response_tokens=6,
    grid=Grid((0.7,), 2, 5, 0),
    batch_rows=20,
)


@pytest.fixture(scope="module")
def run(tiny_subject, tmp_path_factory):
    from ia_mech.display import Quiet

    return collect(CONFIG, tiny_subject, tmp_path_factory.mktemp("several") / "run", Quiet())


def test_each_response_is_a_context_of_its_source(run):
    contexts = run.contexts
    assert contexts["context_id"].tolist()[:4] == [
        "maths-01/r0", "maths-01/r1", "maths-01/r2", "instructions-01/r0"
    ]  # fmt: skip
    assert contexts["source_id"].tolist()[:4] == ["maths-01"] * 3 + ["instructions-01"]
    assert contexts["response_index"].tolist() == [0, 1, 2] * 3
    assert run.generations.groupby("response_index").size().tolist() == [9, 9, 9]
    texts = [messages[-1]["content"] for messages in contexts["messages"]]
    assert len(set(texts)) == 9
    assert several_responses(run) == (
        "responses per query: 3, of which 3 differ (means over 3 queries); queries with one text "
        "only: 0."
    )


def test_a_response_is_what_its_own_noise_draws_from_the_model(run, tiny_subject):
    from ia_mech.collect.identity import build_chat

    chat = build_chat(CONFIG, tiny_subject.tokenizer)
    for row in run.contexts.to_dict("records"):
        prompt = chat.prompt([dict(m) for m in row["messages"][:-1]])
        key = response_stream_key(0, row["source_id"], row["response_index"])
        alone = decode(
            tiny_subject.model,
            prefill(tiny_subject.model, [Prefix(prompt)]),
            [Row(0, 1.0, key)],
            chat.response_stop_ids,
            CONFIG.max_response_tokens,
        )[0]
        assert chat.response_text(alone.token_ids.tolist()) == row["messages"][-1]["content"]


def test_fewer_responses_are_the_first_of_more(run, tiny_subject, tmp_path, progress):
    fewer = collect(replace(CONFIG, responses=2), tiny_subject, tmp_path / "fewer", progress)
    more = run.contexts[run.contexts["response_index"] < 2]
    assert more["text"].tolist() == fewer.contexts["text"].tolist()


def test_no_response_shares_its_noise_with_a_turn():
    keys = [response_stream_key(0, s, k) for s in ("a", "b") for k in range(50)]
    keys += [stream_key(0, s, k) for s in ("a", "b", "response") for k in range(50)]
    assert len(set(keys)) == len(keys)


def test_greedy_responses_are_as_before(tiny_subject, tmp_path, progress):
    one = replace(CONFIG, responses=1, response_temperature=0.0)
    contexts = collect(one, tiny_subject, tmp_path / "run", progress).contexts
    assert contexts["context_id"].tolist() == ["maths-01", "instructions-01", "open-01"]
    assert contexts["response_index"].isna().all()


def test_data_may_hold_several_responses(tiny_subject, tmp_path, progress):
    rows = [
        {"id": f"q{i}", "question": f"What is {i}?", "responses": ["One.", "Two.", f"It is {i}."]}
        for i in range(2)
    ]
    file = tmp_path / "several.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SampleConfig(dataset=str(file), limit=2, grid=CONFIG.grid, batch_rows=20)
    progress.lines.clear()
    contexts = collect(config, tiny_subject, tmp_path / "run", progress).contexts
    assert contexts["context_id"].tolist() == [f"q{i}/r{k}" for i in range(2) for k in range(3)]
    assert contexts["source_id"].tolist() == ["q0"] * 3 + ["q1"] * 3
    assert contexts["messages"].iloc[5][-1]["content"] == "It is 1."
    assert not any("fewer conversations" in line for line in progress.lines)
    with pytest.raises(UserError, match="q0/r0 is one of several responses already"):
        collect(replace(CONFIG, dataset=str(file)), tiny_subject, tmp_path / "again", progress)
    rows[1]["response"] = "Three."
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="line 2: a response and a list of responses"):
        list(open_conversations(str(file)))


@pytest.mark.parametrize("responses", [["x", 3], "text", []])
def test_other_lists_of_responses_are_refused(responses, tmp_path):
    file = tmp_path / "odd.jsonl"
    file.write_text(json.dumps({"question": "Why?", "responses": responses}) + "\n")
    with pytest.raises(UserError, match="line 1: the responses are not a list of texts"):
        open_conversations(str(file))


def test_flags_about_responses_without_one_to_write_are_refused(tiny_subject, tmp_path, progress):
    config = replace(CONFIG, response="auto")
    with pytest.raises(UserError, match="every conversation has a response: --responses"):
        collect(config, tiny_subject, tmp_path / "run", progress)


def test_a_conversation_with_a_response_index_is_read_back(tmp_path):
    one = Conversation("q/r1", "q", "d", ({"role": "user", "content": "Why?"},), response_index=1)
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps(one.to_dict()) + "\n")
    assert list(open_conversations(str(file))) == [one]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"responses": 0}, "--responses 0"),
        ({"response_temperature": 0.0}, "the same response 3 times"),
        ({"response_temperature": -1.0}, "response temperature -1.0 is not possible"),
        ({"response_temperature": float("nan")}, "response temperature nan is not possible"),
        ({"response": "given"}, "--response given: the model writes no responses"),
    ],
)
def test_what_cannot_be_is_refused(change, said):
    with pytest.raises(UserError, match=said):
        replace(CONFIG, **change)


def test_judge_and_rates_count_sources(run):
    from ia_mech.display import Quiet

    label_run(run, RulesJudge(), "rules", Quiet())
    data = read_runs([run])
    found = estimates(data, resamples=200)
    assert found["sources"].max() == 3  # of nine contexts


def test_prefilled_once_the_query_serves_all_its_responses(tiny_subject, tmp_path, monkeypatch):
    import ia_mech.collect.job
    from ia_mech.display import Quiet

    seen: list[int] = []
    honest = ia_mech.collect.job.prefill

    def counted(model, prefixes, blocks=None):
        if blocks is None:
            seen.append(len(prefixes))
        return honest(model, prefixes, blocks)

    monkeypatch.setattr(ia_mech.collect.job, "prefill", counted)
    collect(CONFIG, tiny_subject, tmp_path / "run", Quiet())
    assert sum(seen) == 3
