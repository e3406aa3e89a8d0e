"""``experiments.reaction``: likelihoods against full passes, controls, and the command."""

import copy
import json
import shutil
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import families
import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from stub_server import Reply, StubServer, completion, error, item_of

import experiments.reaction.score
from experiments.reaction import show
from experiments.reaction.__main__ import main
from experiments.reaction.analyse import ScoredArm, estimates, per_turn
from experiments.reaction.controls import same_content, shuffled, under_assistant
from experiments.reaction.paraphrase import Paraphraser, paraphrases
from experiments.reaction.read import SAME_CONTENT, Arm, Query, cut_off, read
from experiments.reaction.score import (
    Likelihoods,
    Reader,
    likelihoods,
    retold,
    scored_by,
)
from ia_mech.chat.format import ChatFormat
from ia_mech.collect.command import main as sample
from ia_mech.display import Quiet
from ia_mech.engine.check import check_engine
from ia_mech.errors import UserError
from ia_mech.judge.verdict import Item
from ia_mech.likelihood.reaction import reaction_bits
from ia_mech.models.load import weights_hash
from ia_mech.run import Run

RESPONSES = 3


class NoChat:
    """A template that refuses empty responses."""

    def context(self, messages):
        raise UserError("an empty response is refused", "")


class PlainChat:
    """A format whose context without a response is a few ids."""

    def context(self, messages):
        return SimpleNamespace(ids=[*tiny.prompt(20, seed=1), 9, 8])


def a_reader(model, chat) -> Reader:
    """A model as a reader, its engine checked."""
    engine = check_engine(model, tiny.prompt(24, seed=0))
    return Reader(model, weights_hash(model), engine, chat)


def an_arm() -> Arm:
    """Two queries of random ids whose contexts begin alike, and two turns after each response."""
    complete = (True,) * RESPONSES
    queries, rows = [], []
    for number in range(2):
        begun = tiny.prompt(20, seed=1)
        ids = [
            (*begun, *tiny.prompt(5 + 2 * k + number, seed=10 * number + k))
            for k in range(RESPONSES)
        ]
        names = tuple(f"q{number}/r{k}" for k in range(RESPONSES))
        query = ({"role": "user", "content": "Why?"},)
        texts = tuple("abc"[:RESPONSES])
        queries.append(Query(f"d\x1fq{number}", "d", names, query, texts, tuple(ids), complete))
        for k in range(RESPONSES):
            for sample_, temperature in ((0, 0.0), (0, 0.7), (0, 1.0)):
                seed = 100 * number + 10 * k + int(10 * temperature)
                turn = tiny.prompt(3 + k + number, seed=seed)
                rows.append((names[k], k, temperature, sample_, np.array(turn), f"d\x1fq{number}"))
    columns = ["context_id", "followed", "temperature", "sample", "token_ids", "source"]
    turns = pd.DataFrame(rows, columns=columns).assign(
        dataset="d", text="t", finish_reason="length", complete=True
    )
    return Arm("alternatives", queries, turns)


def from_full_passes(model, arm: Arm) -> tuple[np.ndarray, np.ndarray]:
    """``[turns, K]`` log-likelihoods at the turn's own temperature (1 for greedy) and at T = 1."""
    of = {query.source: query for query in arm.queries}
    found = np.zeros((2, len(arm.turns), RESPONSES))
    for row, turn in enumerate(arm.turns.to_dict("records")):
        for k, context in enumerate(of[turn["source"]].token_ids):
            ids = [*context, *turn["token_ids"]]
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, len(context) - 1 : -1]
            chosen = torch.tensor(turn["token_ids"])[:, None]
            for which, t in enumerate((turn["temperature"] or 1.0, 1.0)):
                each = (logits.double() / t).log_softmax(-1).gather(-1, chosen)
                found[which, row, k] = float(each.sum())
    return found[0], found[1]


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@torch.inference_mode()
def test_bits_from_shared_states_equal_those_of_full_passes(architecture, tmp_path):
    model = tiny.model(architecture)
    arm = an_arm()
    found = likelihoods(arm, a_reader(model, PlainChat()), tmp_path, Quiet())
    own, at_one = from_full_passes(model, arm)
    sampled = (arm.turns["temperature"] > 0).to_numpy()
    ours = np.nansum(found.own[sampled], axis=2)
    assert np.abs(reaction_bits(ours) - reaction_bits(own[sampled])).max() < 1e-4
    assert np.abs(reaction_bits(found.reader) - reaction_bits(at_one)).max() < 1e-4
    assert np.isnan(found.own[~sampled]).all() and not np.isnan(found.reader).any()
    lengths = arm.turns["token_ids"].map(len).to_numpy()
    assert ((~np.isnan(found.own)).sum(2)[sampled] == lengths[sampled, None]).all()


@pytest.mark.parametrize("chat", [NoChat(), None])
def test_without_a_context_for_no_response_presence_is_left_open(chat, tmp_path):
    found = likelihoods(an_arm(), a_reader(tiny.model("llama"), chat), tmp_path, Quiet())
    assert np.isnan(found.absent).all() and not np.isnan(found.reader).any()


def test_finished_queries_are_kept_and_damaged_ones_computed_again(tmp_path, monkeypatch):
    reader, arm = a_reader(tiny.model("llama"), PlainChat()), an_arm()
    first = likelihoods(arm, reader, tmp_path, Quiet())
    files = sorted(tmp_path.glob("*.parquet"))
    assert len(files) == 2
    calls: list[int] = []
    honest = experiments.reaction.score._of_query

    def counted(*arguments):
        calls.append(1)
        return honest(*arguments)

    monkeypatch.setattr(experiments.reaction.score, "_of_query", counted)
    again = likelihoods(arm, reader, tmp_path, Quiet())
    assert not calls
    np.testing.assert_array_equal(again.own, first.own)
    whole = files[0].read_bytes()
    for at in range(0, len(whole), len(whole) // 10):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        files[0].write_bytes(damaged)
        mended = likelihoods(arm, reader, tmp_path, Quiet())
        np.testing.assert_array_equal(mended.reader, first.reader)
        np.testing.assert_array_equal(mended.own, first.own)
    assert calls


def test_shuffled_versions_hold_the_same_sentences():
    text = "One is first. Two follows it.\nThree ends a line.\n\nFour is last."
    versions = shuffled(text, 5, np.random.default_rng(0))
    assert len(set(versions)) == 5
    for version in versions:
        assert sorted(version.replace("\n", " ").split()) == sorted(text.split())
    assert shuffled("Only one sentence.", 3, np.random.default_rng(0)) == ["Only one sentence."]


@pytest.fixture(scope="module")
def folder(tiny_model_dir, tmp_path_factory):
    """A run of three responses to each of five queries."""
    place = tmp_path_factory.mktemp("reaction")
    rows = [
        {
            "id": f"q{i}",
            "question": f"What is {i} plus {i}?",
            "responses": [
                f"Add {i} to {i}. The sum is {2 * i}. That is all. Ask me more.",
                f"It is {2 * i + k}. I am sure. Nothing else is. Numbers {k} are fun."
                if k
                else f"No idea about {i}. Try a friend. Or a book. Or a {i}.",
                f"Twice {i} makes {2 * i}. Double it. Then stop. Good luck {i}.",
            ][:RESPONSES],
        }
        for i in range(5)
        for k in [i % 2]
    ]
    file = place / "several.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = place / "run"
    words = ["--model", tiny_model_dir, "--dataset", str(file), "--out", str(out)]
    words += ["--temperatures", "0.7", "1", "--samples", "2", "--max-new-tokens", "6"]
    assert sample(words) == 0
    return out


def test_the_command_estimates_shows_and_goes_on(folder, capsys):
    out = folder.parent / "reaction"
    words = [str(folder), "--control-queries", "3", "--control-responses", "3", "--out", str(out)]
    assert main([*words, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert "5, 3 responses to each" in planned and "same content" in planned
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "which of 3 responses it followed" in shown and "most bits" in shown
    found = pd.read_parquet(out / "estimates.parquet")
    turns = pd.read_parquet(out / "turns.parquet")
    assert len(turns) == 5 * RESPONSES * 5
    main_rows = found[(found["quantity"] == "I_K, bits") & (found["of"] == "alternatives")]
    whole = main_rows[(main_rows["responses"] == 3) & (main_rows["temperature"] == 1.0)]
    mine = turns[turns["temperature"] == 1.0]
    by_query = mine.groupby(["source_id", "followed"])["reaction_bits"].mean()
    by_query = by_query.groupby("source_id").mean()
    assert whole["value"].iloc[0] == pytest.approx(by_query.mean(), abs=1e-9)
    controls = set(found["of"])
    assert {"same content", "assistant header"} <= controls
    tested = found[found["quantity"] == "I_K less the control's, bits"]
    assert len(tested) == 4 and (tested["p_holm"] >= tested["p"]).all()
    bounded = found[found["quantity"].isin(["I_K, bits", "identified"])]
    assert (bounded["low"] >= 0).all() and (bounded["high"] <= np.log2(3)).all()
    role = Run.open(out / "assistant_header" / "run").contexts
    own = Run.open(folder).contexts.set_index(["source_id", "response_index"])["text"]
    for row in role.to_dict("records"):
        user = own[row["source_id"], row["response_index"]]
        assert row["text"] == user.removesuffix("user\n") + "assistant\n"
    same = Run.open(out / "same_content" / "run").contexts
    assert set(same["perturbation"]) == {"same_content"} and len(same) == len(role) == 9
    tokens = found[(found["quantity"] == "bits by token") & (found["temperature"] == 1.0)]
    assert tokens["value"].sum() == pytest.approx(whole["value"].iloc[0], abs=1e-9)
    kept = {file: file.stat().st_mtime_ns for file in (out / "likelihoods").iterdir()}
    assert main(words) == 0
    capsys.readouterr()
    assert {file: file.stat().st_mtime_ns for file in (out / "likelihoods").iterdir()} == kept


def scored(arm: Arm, name: str, run: Run, folder, progress) -> np.ndarray:
    """What ``--scorer`` gives."""
    return scored_by(name, retold(arm, name, run), run, folder, progress)


def test_another_model_reads_the_texts_under_its_own_template(
    folder, tiny_model_dir, tmp_path, progress
):
    """Given as the scorer, the subject reads what it reads itself, if texts tokenise alike."""
    run = Run.open(folder)
    arm, _ = read([run])
    subject = experiments.resample.subject_of(run)
    reader = experiments.reaction.score.reader_of(subject, run)
    texts = [f"What about {i % 7}?" for i in range(len(arm.turns))]
    of = {query.source: query for query in arm.queries}
    ids = []
    for text, source in zip(texts, arm.turns["source"], strict=True):
        query = of[source]
        messages = [*query.messages, {"role": "assistant", "content": query.responses[0]}]
        ids.append(
            np.array(reader.chat.reference_ids(messages, reader.chat.context(messages), text))
        )
    turns = arm.turns.assign(text=texts, token_ids=ids, finish_reason="length")
    arm = replace(arm, turns=turns)
    own = likelihoods(arm, reader, tmp_path / "own", Quiet()).reader
    scorer = tiny_model_dir, run, tmp_path / "other"
    other = scored(arm, *scorer, progress)
    assert np.abs(own - other).max() < 1e-4
    assert progress.steps == RESPONSES * sum(map(len, ids))  # none after an empty response
    closed = replace(arm, turns=turns.assign(finish_reason="turn_end"))
    longer = scored(closed, *scorer, Quiet())
    assert (longer < other - 1e-3).all()


def test_scorers_of_one_tokenizer_do_not_share_what_is_kept(
    folder, tiny_model_dir, tiny_subject, tmp_path
):
    run = Run.open(folder)
    arm, _ = read([run])
    model = copy.deepcopy(tiny_subject.model)
    for weights in model.parameters():
        weights.mul_(1.5)
    changed = tmp_path / "changed"
    shutil.copytree(tiny_model_dir, changed)
    model.save_pretrained(changed)
    kept = tmp_path / "kept"
    first = scored(arm, tiny_model_dir, run, kept, Quiet())
    second = scored(arm, str(changed), run, kept, Quiet())
    assert (np.abs(first - second) > 1e-3).all()
    np.testing.assert_array_equal(scored(arm, tiny_model_dir, run, kept, Quiet()), first)


def test_queries_of_two_datasets_may_have_one_id(tiny_model_dir, tmp_path):
    runs = []
    for name, responses in (("one", ["A.", "A."]), ("two", ["B.", "C."])):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({"id": "a", "question": "Why?", "responses": responses}) + "\n")
        words = ["--model", tiny_model_dir, "--dataset", str(file), "--temperatures", "1"]
        assert sample([*words, "--out", str(tmp_path / name), "--samples", "2"]) == 0
        runs.append(Run.open(tmp_path / name))
    arm, _ = read(runs)
    assert arm.turns.groupby("source")["dataset"].agg(set).tolist() == [{"one"}, {"two"}]
    own = runs[0].generations["token_ids"].map(tuple).tolist()
    assert arm.turns[arm.turns["dataset"] == "one"]["token_ids"].map(tuple).tolist() == own


def test_a_query_with_one_response_is_left_out_and_counted(tiny_model_dir, tmp_path):
    file = tmp_path / "ragged.jsonl"
    rows = [{"question": f"{n}?", "responses": [f"{k}." for k in range(n)]} for n in (3, 2, 1)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", tiny_model_dir, "--dataset", str(file), "--out", str(tmp_path / "run")]
    assert sample([*words, "--temperatures", "1", "--samples", "1"]) == 0
    arm, notes = read([Run.open(tmp_path / "run")])
    assert arm.responses == 3 and len(arm.queries) == 1
    assert "2 of 3 queries have fewer than 3 responses and are left out." in notes


def test_scores_of_a_judge_take_the_readers_place(folder, tmp_path, capsys):
    """Scores that know the response tell all of it, but for the one turn that counts for none."""
    arm, _ = read([Run.open(folder)])
    lines = [
        {"context_id": turn["context_id"], "temperature": turn["temperature"]}
        | {"sample": turn["sample"], "scores": [float(k == turn["followed"]) for k in range(3)]}
        for turn in arm.turns.to_dict("records")
    ]
    file = tmp_path / "scores.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [str(folder), "--control-queries", "0", "--scores", str(file)]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    found = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    told = found[found["quantity"] == "readable bits"]
    assert (told["value"] > 0.9 * np.log2(3)).all() and (told["p"] < 0.01).all()
    for change, said in (
        (lines[:-1], "lacks 1 of 75 turns"),
        ([*lines, lines[0]], "is scored twice"),
        ([lines[0] | {"scores": [1, 2]}], "line 1 has no list of 3 scores"),
        ([lines[0] | {"sample": 9}], "the runs have no turn ("),
    ):
        file.write_text("".join(json.dumps(line) + "\n" for line in change))
        assert main([*words, "--out", str(tmp_path / "bad")]) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]


def test_paraphrases_stand_in_for_shuffled_sentences(folder, tmp_path):
    arm, _ = read([Run.open(folder)])
    texts = {"q0/r1": ["a", "b", "c"], "q1/r0": ["a", "a", "b"]}
    made, notes = same_content(arm, 3, 10, 0, texts)
    assert [one.response for one in made] == ["a", "b", "c"]
    assert notes == [
        "4 queries have no response with 3 versions that say the same; they are left out of that "
        "comparison."
    ]


def test_paraphrases_are_bought_once(folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    made: list[list[str]] = []

    def resampled(first, conversations, *_):
        made.append([one.response for one in conversations])
        raise UserError("as far as this test goes", "stop")

    monkeypatch.setattr(experiments.resample, "resampled", resampled)
    words = [str(folder), "--control-queries", "2", "--control-responses", "2", "--out", str(out)]
    words += ["--paraphrase-model", "m", "--base-url"]

    def answer(body, n):
        return completion(f" Version {n}: {item_of(body)['response']}\n")

    with StubServer(answer) as server:
        assert main([*words, server.url, "--dry-run"]) == 0
        assert "4 requests to m, about " in capsys.readouterr().out and not server.bodies
        for _ in range(2):
            assert main([*words, server.url]) == 2
            assert "as far as this test goes" in capsys.readouterr().err
            assert len(server.bodies) == 4
    assert made[0] == made[1] and sorted(made[0]) == sorted(
        f"Version {n}: {item_of(body)['response']}" for n, body in enumerate(server.bodies)
    )


def test_an_answer_that_repeats_is_no_version(tmp_path):
    """Of four answers two are alike, and one is the response itself."""
    said = ["Rain falls.", "It rains.", "<think>so?</think>Rain falls.", "There is rain."]
    with StubServer(lambda body, n: completion(said[n])) as server:
        model = Paraphraser("m", server.url, None)
        items = {"a/r0": Item("How is it?", "It rains.", "")}
        found = paraphrases(model, items, 4, tmp_path, Quiet())
    assert sorted(found["a/r0"]) == ["Rain falls.", "There is rain."]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda body, n: error(401, "no"), "refuses access (HTTP 401"),
        (lambda body, n: error(404, "no such model"), "; check --paraphrase-model, and --base-url"),
        (lambda body, n: Reply(200, "none"), "; check the server, then give the same command"),
        (lambda body, n: completion("cut", finish="length"), "no response has 3 different"),
    ],
)
def test_a_server_that_writes_none_ends_in_one_line(folder, tmp_path, capsys, answer, said):
    words = [str(folder), "--control-queries", "5", "--control-responses", "3"]
    with StubServer(answer) as server:
        words += ["--out", str(tmp_path / "out"), "--paraphrase-model", "m"]
        assert main([*words, "--base-url", server.url]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and said in line and "; " in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--paraphrases", "none.jsonl"], "no file none.jsonl"),
        (["--base-url", "http://localhost:1"], "need --paraphrase-model"),
        (["--paraphrase-model", "m", "--base-url", "localhost"], "not the address of a server"),
        (["--paraphrases", "{other}"], "the runs have no context 'elsewhere'"),
        (["--paraphrases", "{shape}"], "line 1 has no list of texts called versions"),
        (["--paraphrases", "{few}"], "no response has 3 different paraphrases"),
        (["--scorer", "{plain}"], "chat template"),
        (["--scorer", "{short}"], "takes 40 tokens, a context of q0/r0 and its turn have "),
    ],
)
def test_bad_input_is_one_line(folder, tmp_path, capsys, words, said, tiny_model_dir):
    plain = tmp_path / "plain"
    shutil.copytree(tiny_model_dir, plain)
    (plain / "chat_template.jinja").unlink()
    short = tmp_path / "short"
    shutil.copytree(tiny_model_dir, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    files = {
        "other": {"id": "elsewhere", "versions": ["a", "b", "c"]},
        "shape": {"id": "q0/r0", "versions": "a"},
        "few": {"id": "q0/r0", "versions": ["a"]},
    }
    for name, row in files.items():
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    given = [w.format(plain=plain, short=short, **{n: tmp_path / n for n in files}) for w in words]
    if "--scorer" in words:
        given += ["--control-queries", "0"]
    given += ["--control-responses", "3", "--out", str(tmp_path / "out")]
    assert main([str(folder), *given]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and said in error and "; " in error


def test_runs_that_cannot_tell_responses_apart_are_refused(tiny_model_dir, tmp_path, capsys):
    words = ["--model", tiny_model_dir, "--temperatures", "1", "--max-new-tokens", "2"]
    one = tmp_path / "one"
    assert sample([*words, "--limit", "2", "--out", str(one)]) == 0
    assert main([str(one)]) == 2
    assert "one has one response per query; sample" in capsys.readouterr().err
    file = tmp_path / "alike.jsonl"
    file.write_text(json.dumps({"question": "Why?", "responses": ["So.", "So."]}) + "\n")
    alike = tmp_path / "alike"
    assert sample([*words, "--dataset", str(file), "--out", str(alike)]) == 0
    assert main([str(alike)]) == 2
    assert "are all alike: no turn can tell them apart" in capsys.readouterr().err


def test_identical_contexts_give_no_bits(tiny_model_dir, tmp_path):
    """As a control may have them, K identical responses tell nothing."""
    file = tmp_path / "alike.jsonl"
    file.write_text(json.dumps({"question": "Why?", "responses": ["So.", "So.", "So."]}) + "\n")
    words = ["--model", tiny_model_dir, "--dataset", str(file), "--out", str(tmp_path / "run")]
    assert sample([*words, "--temperatures", "1", "--samples", "3"]) == 0
    arm, _ = read([Run.open(tmp_path / "run")], SAME_CONTENT)
    reader = experiments.reaction.score.reader_of(
        experiments.resample.subject_of(Run.open(tmp_path / "run")), Run.open(tmp_path / "run")
    )
    found = likelihoods(arm, reader, tmp_path / "likelihoods", Quiet())
    sampled = (arm.turns["temperature"] > 0).to_numpy()
    assert reaction_bits(np.nansum(found.own[sampled], axis=2)).max() < 1e-9


def test_complete_responses_alone_are_compared_on_the_queries_that_have_them():
    """Against all subsets, one by one: 4 responses to each of 3 queries, 3, 2 and 1 complete."""
    rng = np.random.default_rng(0)
    flags = {"a": (True, False, True, True), "b": (False, True, False, True)}
    flags["c"] = (False, False, True, False)
    queries = [
        Query(
            f"d\x1f{name}",
            "d",
            tuple("0123"),
            ({"role": "user", "content": "?"},),
            tuple("wxyz"),
            ((1,),) * 4,
            complete,
        )
        for name, complete in flags.items()
    ]
    rows = [
        (query.source, k, query.complete[k])
        for query in queries
        for k in range(4)
        for _ in range(2)
    ]
    turns = pd.DataFrame(rows, columns=["source", "followed", "complete"]).assign(
        dataset="d", temperature=1.0, sample=0, text="t", token_ids=[np.array([1])] * len(rows)
    )
    arm = Arm("alternatives", queries, turns)
    assert [arm.complete_responses(most) for most in (2, 3, 4)] == [2, 2, 2]
    own = rng.normal(size=(len(turns), 4, 1))
    scored_arm = ScoredArm(arm, Likelihoods(own, own[:, :, 0], own[:, 0, 0]))
    table = per_turn(scored_arm, np.zeros(len(turns)))
    found = estimates({"alternatives": scored_arm}, table, complete=2)
    titles = [one.title for one in show.tables(found, table.assign(context_id="c"), 0.95)]
    assert "complete responses alone, 2 contexts a query, 2 queries" in titles
    found = found[found["of"] == "complete responses"].set_index("quantity")
    for quantity, among_all in (("I_K, bits", False), ("I_K on the same queries, bits", True)):
        each = []
        for query in queries[:2]:
            columns = [k for k in range(4) if among_all or query.complete[k]]
            pairs = []
            for pair in combinations(columns, 2):
                here = (turns["source"] == query.source) & turns["followed"].isin(pair)
                pairs.append(reaction_bits(own[here][:, list(pair), 0]).mean())
            each.append(np.mean(pairs))
        assert found.loc[quantity, "value"] == pytest.approx(np.mean(each), abs=1e-12)
    assert (found["responses"] == 2).all() and (found["sources"] == 2).all()
    assert found["rows"].tolist() == [10, 16]


def test_complete_responses_are_told_apart_within_a_query(folder):
    run = Run.open(folder)
    cut = run.contexts["context_id"].isin(["q0/r1", "q0/r2", "q3/r0"])
    contexts = run.contexts.assign(response_cut_off=cut)
    flagged = SimpleNamespace(path=folder, contexts=contexts, generations=run.generations)
    arm, notes = read([flagged])
    assert cut_off(arm.queries) == ["3 of 15 responses were cut off, which is another stimulus."]
    assert cut_off(arm.queries[1:3]) == [] == notes
    flags = [query.complete for query in arm.queries]
    whole = (True,) * RESPONSES
    assert flags == [(True, False, False), whole, whole, (False, True, True), whole]
    followed = arm.turns["context_id"].isin(["q0/r1", "q0/r2", "q3/r0"])
    assert (arm.turns["complete"] == ~followed).all()
    assert [arm.complete_responses(most) for most in (2, 3)] == [2, 3]


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "gemma3", "glm4", "mistral"])
def test_an_opener_of_user_turns_that_ends_responses_is_noted(family):
    tokenizer = families.build(family)
    stops = tokenizer.convert_tokens_to_ids(list(families.GENERATION_EOS.get(family, ())))
    chat = ChatFormat(tokenizer, eos_ids=stops).describe()
    run = SimpleNamespace(record={"identity": {"chat": json.loads(json.dumps(chat))}})
    made, notes = under_assistant(an_arm(), 2, 1, 0, run)
    assert len(made) == 2 and len(notes) == (family == "glm4")
