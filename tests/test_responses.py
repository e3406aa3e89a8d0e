"""Several responses to a query: written by the model, or given by the data."""

import json
from dataclasses import replace

import pytest
from runs import sampled

from ia_mech.chat.thoughts import Response
from ia_mech.collect import compute
from ia_mech.collect.plan import build_chat
from ia_mech.collect.summary import alike_text
from ia_mech.data.conversations import open_conversations
from ia_mech.display import Quiet
from ia_mech.engine.decode import Row, decode
from ia_mech.engine.sampling import response_stream_key, stream_key
from ia_mech.engine.state import Prefix, prefill
from ia_mech.engine.workers import Crew
from ia_mech.errors import UserError
from ia_mech.judge import builtin_judge
from ia_mech.judge.judging import label_run
from ia_mech.rates.compute import estimates
from ia_mech.rates.load import read_runs
from ia_mech.run import Run
from ia_mech.run.writer import kept_draws
from ia_mech.settings import Settings

SETTINGS = Settings(
    limit=3,
    response="generate",
    responses=3,
    response_temperature=1.0,
    unfinished=True,
    max_response_tokens=6,
    temperatures=(0.7,),
    samples=2,
    max_new_tokens=5,
    batch_rows=20,
)


@pytest.fixture(scope="module")
def run(tiny_subject, tmp_path_factory):
    return sampled(SETTINGS, tiny_subject, tmp_path_factory.mktemp("several") / "run", Quiet())


def test_each_response_is_a_context_of_its_source(run):
    contexts = run.contexts
    assert contexts["context_id"].tolist()[:4] == [
        "maths-01/r0", "maths-01/r1", "maths-01/r2", "instructions-01/r0"
    ]  # fmt: skip
    assert contexts["source_id"].tolist()[:4] == ["maths-01"] * 3 + ["instructions-01"]
    assert contexts["response_index"].tolist() == [0, 1, 2] * 3
    assert run.generations.groupby("response_index").size().tolist() == [9, 9, 9]
    texts = [messages[-1]["content"] for messages in contexts["messages"]]
    assert len(set(texts)) == 9 and alike_text(run) == ""
    again = Run.open(run.path)
    again.contexts.at[1, "messages"] = again.contexts.at[0, "messages"]
    assert alike_text(again) == "1 of 3 queries have responses that are alike"


def test_a_response_is_what_its_own_noise_draws_from_the_model(run, tiny_subject):
    chat = build_chat(SETTINGS, tiny_subject.files)
    for row in run.contexts.to_dict("records"):
        prompt = chat.prompt([dict(m) for m in row["messages"][:-1]])
        key = response_stream_key(0, row["source_id"], row["response_index"])
        alone = decode(
            tiny_subject.model,
            [prefill(tiny_subject.model, [Prefix(prompt)])],
            [Row(0, 1.0, key)],
            chat.response_stop_ids,
            SETTINGS.max_response_tokens,
        )[0]
        said = chat.parse_response(alone.token_ids.tolist(), prompt)
        assert said == Response(row["messages"][-1]["content"])


def test_fewer_responses_are_the_first_of_more_and_share_a_prefill(
    run, tiny_subject, tmp_path, progress, monkeypatch
):
    prefilled: list[int] = []
    honest = compute.prefill_all

    def counted(model, prefixes, *others):
        if not prefixes[0].positions:  # of queries: nothing is captured
            prefilled.append(len(prefixes))
        return honest(model, prefixes, *others)

    monkeypatch.setattr(compute, "prefill_all", counted)
    fewer = sampled(replace(SETTINGS, responses=2), tiny_subject, tmp_path / "fewer", progress)
    more = run.contexts[run.contexts["response_index"] < 2]
    assert more["text"].tolist() == fewer.contexts["text"].tolist()
    assert prefilled == [3]


@pytest.fixture
def ending(monkeypatch, tiny_subject):
    """A fifth of the tokens end a response."""
    config = tiny_subject.model.generation_config
    monkeypatch.setattr(config, "eos_token_id", [*range(60, 400, 5)])


def one_by_one(settings, subject, prompt, source):
    """The draws of a query, each made alone, and which of them become contexts."""
    chat = build_chat(settings, subject.files)
    draws, taken = [], []
    while len(taken) < settings.responses:
        if len(draws) + settings.responses - len(taken) > 3 * settings.responses:
            return draws, []
        row = decode(
            subject.model,
            [prefill(subject.model, [Prefix(prompt)])],
            [Row(0, 1.0, response_stream_key(0, source, len(draws)))],
            chat.response_stop_ids,
            settings.max_response_tokens,
        )[0]
        text = chat.parse_response(row.token_ids.tolist(), prompt).text
        if row.finish_reason == "turn_end" and text not in [draws[i] for i in taken]:
            taken.append(len(draws))
        draws.append(text)
    return draws, taken


@pytest.mark.parametrize(("most", "count"), [(4, 3), (12, 2)])
def test_responses_are_drawn_until_enough_are_finished_and_differ(
    most, count, tiny_subject, tmp_path, progress, ending
):
    settings = replace(SETTINGS, limit=count, unfinished=False, max_response_tokens=most)
    crew = Crew(2, 1)
    run = sampled(settings, tiny_subject, tmp_path / "run", progress, crew=crew)
    chat = build_chat(settings, tiny_subject.files)
    queries, drawn = list(open_conversations("builtin", limit=count)), run.responses
    expected, short = [], 0
    for number, one in enumerate(queries):
        prompt = chat.prompt(one.messages[:-1])
        draws, taken = one_by_one(settings, tiny_subject, prompt, one.source_id)
        own = drawn[drawn["query"] == 3 * number]
        assert own["response"].tolist()[: len(draws)] == draws
        assert own.loc[own["order"].notna(), "draw"].tolist() == taken
        expected += [draws[i] for i in taken]
        short += not taken
    assert 0 < short < count or most == 12
    written = run.contexts["messages"].map(lambda messages: messages[-1]["content"])
    assert written.tolist() == expected and not run.contexts["response_unfinished"].any()
    assert run.complete and run.counts["contexts"] == 3 * (count - short)
    said = [line for line in progress.lines if "distinct finished" in line]
    assert len(said) == (short > 0) and run.unanswered == (short, count)
    alone = sampled(settings, tiny_subject, tmp_path / "alone", Quiet(), crew=Crew(1, 1))
    assert alone.digest() == run.digest()


def test_a_run_none_of_whose_queries_is_answered_is_refused(tiny_subject, tmp_path, progress):
    settings = replace(SETTINGS, unfinished=False, max_response_tokens=1)
    with pytest.raises(UserError, match="3 of 3 queries have fewer than 3 distinct finished"):
        sampled(settings, tiny_subject, tmp_path / "run", progress)
    assert [line.split()[0] for line in progress.lines if line.endswith(" 0")] == ["responses"]
    run = Run.open(tmp_path / "run", unfinished=True)
    for read in (run.check_finished, lambda: run.contexts):
        with pytest.raises(UserError, match=r"have any user turn: 3 of 3 .*; raise --max-resp"):
            read()


def test_no_response_shares_its_noise_with_a_turn():
    keys = [response_stream_key(0, s, k) for s in ("a", "b") for k in range(50)]
    keys += [stream_key(0, s, k) for s in ("a", "b", "response") for k in range(50)]
    assert len(set(keys)) == len(keys)


def test_data_may_hold_several_responses(tiny_subject, tmp_path, progress):
    rows = [
        {
            "id": f"q{i}",
            "source_id": f"q{i}",
            "question": f"What is {i}?",
            "responses": ["One.", "Two.", f"It is {i}."],
        }
        for i in range(2)
    ]
    file = tmp_path / "several.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(
        dataset=str(file), limit=2, temperatures=(0.7,), samples=2, max_new_tokens=5, batch_rows=20
    )
    progress.lines.clear()
    contexts = sampled(settings, tiny_subject, tmp_path / "run", progress).contexts
    assert contexts["context_id"].tolist() == [f"q{i}/r{k}" for i in range(2) for k in range(3)]
    assert contexts["source_id"].tolist() == ["q0"] * 3 + ["q1"] * 3
    assert contexts["messages"].iloc[5][-1]["content"] == "It is 1."
    assert not any("fewer conversations" in line for line in progress.lines)
    with pytest.raises(UserError, match="q0/r0 is one of several responses already"):
        sampled(replace(SETTINGS, dataset=str(file)), tiny_subject, tmp_path / "again", progress)
    rows[1]["response"] = "Three."
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"line 2 .*: .* column 'responses' may be one, too"):
        list(open_conversations(str(file)))
    for other in (["x", 3], "text"):
        file.write_text(json.dumps({"question": "Why?", "responses": other}) + "\n")
        with pytest.raises(UserError, match="line 1: no response, and the column 'responses' m"):
            open_conversations(str(file))


def test_flags_about_responses_without_one_to_write_are_refused(tiny_subject, tmp_path, progress):
    settings = replace(SETTINGS, response="auto")
    with pytest.raises(UserError, match="every conversation has a response: --responses"):
        sampled(settings, tiny_subject, tmp_path / "run", progress)


def test_an_interrupted_part_of_responses_keeps_its_finished_batches(
    tiny_subject, tmp_path, progress, ending, monkeypatch
):
    settings = replace(SETTINGS, limit=2, unfinished=False, max_response_tokens=12)
    honest, batches = compute.Computation._respond_together, []

    def counted(self, draws, *others):
        if len(batches) == last:
            raise KeyboardInterrupt
        batches.append(len(draws))
        return honest(self, draws, *others)

    monkeypatch.setattr(compute.Computation, "_respond_together", counted)
    last, crew = -1, Crew(1, 1)
    whole = sampled(settings, tiny_subject, tmp_path / "whole", progress, crew=crew)
    made, out = [*batches], tmp_path / "run"
    assert len(made) > len(whole.parts("responses")), "some were drawn again"
    assert progress.steps == sum(int(line.split()[-2]) for line in progress.lines[-2:])
    last = len(made) - 1
    batches.clear()
    with pytest.raises(KeyboardInterrupt):
        sampled(settings, tiny_subject, out, progress, crew=crew)
    (file,) = out.glob("responses/*.batches.json")
    parts = len(whole.parts("responses"))
    assert kept_draws(out) + Run(out).counts["responses"] == sum(made[:-1])
    assert len(Run(out).parts("responses")) == parts - 1
    last = -1
    batches.clear()
    resumed = sampled(settings, tiny_subject, out, progress, crew=crew)
    assert batches == made[-1:] and not file.exists()
    assert resumed.digest() == whole.digest() and resumed.verify() == []


def test_judge_and_rates_count_sources(run):
    label_run(run, builtin_judge(), "builtin", Quiet())
    assert estimates(read_runs([run]))["sources"].max() == 3  # of nine contexts


def test_only_missing_responses_are_written(tiny_subject, tmp_path):
    rows = [{"id": f"q{i}", "question": f"What is {i}?"} for i in range(6)]
    for row in rows[:5]:
        row["response"] = "It is that."
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(
        dataset=str(file), limit=6, temperatures=(), max_new_tokens=3, max_response_tokens=4
    )
    run = sampled(replace(settings, batch_rows=2), tiny_subject, tmp_path / "run", Quiet())
    assert [part["contexts"] for part in run.parts("responses")] == [0, 0, 0, 1]
    assert run.contexts["response_policy"].tolist() == ["given"] * 5 + ["generated"]
    with pytest.raises(UserError, match="\\(id q5\\): no response, and --response given was"):
        sampled(replace(settings, response="given"), tiny_subject, tmp_path / "given", Quiet())
