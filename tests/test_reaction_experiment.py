"""``experiments.reaction``: likelihoods against full passes, controls, and the command."""

import json
from types import SimpleNamespace

import families
import numpy as np
import pandas as pd
import pytest
import scored
import tiny
import torch
from shell import call, refusal

import ia_mech
from experiments.experiment import Model
from experiments.paraphrase import closeness, read_versions, usable_wordings
from experiments.reaction import Reaction, Turns, headline, main, measure
from ia_mech.chat.format import ChatFormat
from ia_mech.collect.command import main as sample
from ia_mech.engine.check import check_engine
from ia_mech.likelihood.reaction import reaction_bits
from ia_mech.run import Run
from ia_mech.run.queries import queries_of

RESPONSES = 3


# -- what is measured ------------------------------------------------------------------------------


def a_model(architecture: str) -> Model:
    model = tiny.model(architecture)
    share = check_engine(model, tiny.prompt(24, seed=0)).share
    return Model(SimpleNamespace(model=model), None, share)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@torch.inference_mode()
def test_likelihoods_equal_those_of_full_passes(architecture):
    """Contexts that begin alike, turns of three temperatures."""
    model = a_model(architecture)
    begun = tuple(tiny.prompt(20, seed=1))
    contexts = [(*begun, *tiny.prompt(5 + 2 * k, seed=k)) for k in range(RESPONSES)]
    turns = [
        (tuple(tiny.prompt(3 + n, seed=100 + n)), temperature)
        for n, temperature in enumerate((0.0, 0.7, 1.0, 0.7))
    ]
    found = measure(model, Turns("d\x1fq", "d", 1, "alternatives", tuple(contexts), tuple(turns)))
    for (ids, temperature), row in zip(turns, found.to_dict("records"), strict=True):
        full = np.zeros((2, RESPONSES, len(ids)))
        for k, context in enumerate(contexts):
            logits = model.subject.model(torch.tensor([[*context, *ids]])).logits
            logits = logits[0, len(context) - 1 : -1].double()
            for which, t in enumerate((1.0, temperature or 1.0)):
                each = (logits / t).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])
                full[which, k] = each[:, 0].numpy()
        near = scored.nats(len(ids))
        np.testing.assert_allclose(row["reader"], full[0].sum(-1), **near)
        np.testing.assert_allclose(row["own"], full[1].ravel(), **near)


def test_identical_contexts_give_no_bits():
    """As a control may have them, K identical responses tell nothing."""
    same = (tuple(tiny.prompt(20, seed=1)),) * RESPONSES
    turns = tuple((tuple(tiny.prompt(5, seed=n)), 1.0) for n in range(3))
    unit = Turns("d\x1fq", "d", 1, "alternatives", same, turns)
    found = measure(a_model("llama"), unit)
    assert reaction_bits(np.stack(found["reader"].tolist())).max() < 1e-9


# -- the command -----------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def wordings(folder):
    """Three wordings of one response to four of the queries."""
    file = folder.parent / "wordings.jsonl"
    rows = [
        {"id": f"q{i}/r{i % 3}", "versions": [f"Wording {k} of {i}." for k in range(3)]}
        for i in range(4)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_command_estimates_shows_and_goes_on(folder, wordings, capsys):
    out = folder.parent / "reaction"
    words = [str(folder), "--control-queries", "3", "--among", "3", "--out", str(out)]
    words += ["--paraphrases", str(wordings)]
    assert main([*words, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert "5 units of 5 queries" in planned and "wordings of one response" in planned
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "which of 3 complete responses" in shown
    found = pd.read_parquet(out / "estimates.parquet")
    turns = pd.read_parquet(out / "turns.parquet")
    assert len(turns) == 5 * RESPONSES * 5
    information = found[found["quantity"] == "I_K, bits"]
    whole = information[(information["term"] == "alternatives") & (information["responses"] == 3)]
    whole = whole[whole["temperature"] == 1.0]
    mine = turns[turns["temperature"] == 1.0]
    by_query = mine.groupby(["source_id", "followed"])["reaction_bits"].mean()
    by_query = by_query.groupby("source_id").mean()
    assert whole["value"].iloc[0] == pytest.approx(by_query.mean(), abs=1e-9)
    tested = found[found["quantity"] == "I_K less the control's, bits"]
    assert set(tested["term"]) == {"wordings of one response", "assistant header"}
    assert len(tested) == 4 and (tested["p_holm"] >= tested["p"]).all()
    bounded = found[found["quantity"].isin(["I_K, bits", "identified", "words kept"])]
    assert (bounded["low"].dropna() >= 0).all() and (bounded["high"].dropna() <= np.log2(3)).all()
    role = Run.open(out / "assistant_header" / "run").contexts
    own = Run.open(folder).contexts.set_index(["source_id", "response_index"])["text"]
    for row in role.to_dict("records"):
        user = own[row["source_id"], row["response_index"]]
        assert row["text"] == user.removesuffix("user\n") + "assistant\n"
    same = Run.open(out / "wordings_of_one_response" / "run").contexts
    assert set(same["source_id"]) == set(role["source_id"]) <= {f"q{i}" for i in range(4)}
    assert len(same) == len(role) in (6, 9)
    tokens = found[(found["quantity"] == "bits by token") & (found["temperature"] == 1.0)]
    assert tokens["value"].sum() == pytest.approx(whole["value"].iloc[0], abs=1e-9)
    read = turns.groupby(["source_id", "temperature", "followed"])["readable_bits"].mean()
    read = read.groupby(["source_id", "temperature"]).mean().unstack()
    less = found[found["quantity"] == "greedy turns' readable bits less these"]
    for _, row in less.iterrows():
        difference = read[0.0] - read[row["temperature"]]
        assert row["value"] == pytest.approx(difference.mean(), abs=1e-9)
        reach = 2.776 * difference.std() / np.sqrt(5)  # Student's, 4 degrees of freedom
        assert row["high"] - row["value"] == pytest.approx(reach, rel=1e-3)
    kept = {file: file.stat().st_mtime_ns for file in (out / "parts").iterdir()}
    assert main(words) == 0
    capsys.readouterr()
    assert {file: file.stat().st_mtime_ns for file in (out / "parts").iterdir()} == kept


def test_a_model_that_writes_no_wordings_has_no_such_control(folder, tmp_path, capfd):
    """Random weights don't end a text: every wording is cut off."""
    words = [str(folder), "--control-queries", "2", "--among", "2", "--out", str(tmp_path / "out")]
    planned = call(main, [*words, "--dry-run"], capfd).out
    assert "2 responses, each 6 times" in planned
    shown = call(main, words, capfd).out
    assert "No control was made of wordings" in shown
    asked = Run.open(tmp_path / "out" / "to_reword" / "run").contexts
    own = Run.open(folder).contexts
    for source, rows in asked.groupby("source_id"):
        texts = [
            messages[-1]["content"] for messages in own[own["source_id"] == source]["messages"]
        ]
        requests = {messages[-2]["content"] for messages in rows["messages"]}
        assert len(rows) == 6
        (request,) = requests
        assert any(text in request for text in texts)
    found = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    assert "assistant header" in set(found["term"])
    assert "wordings of one response" not in set(found["term"])


@pytest.mark.parametrize(
    ("responses", "temperatures", "said"),
    [
        (["So."], (1.0,), "run has one response per query"),
        (["So.", "So."], (1.0,), "are all alike: no turn can tell them apart"),
        (["So.", "Or."], (), "run has greedy turns alone"),
        (["So.", "Or."], (1.0,), "1 queries have 2 responses"),
    ],
)
def test_runs_that_hold_no_answer_are_refused(
    responses, temperatures, said, tiny_model_dir, tmp_path, capfd
):
    file = tmp_path / "given.jsonl"
    file.write_text(json.dumps({"question": "Why?", "responses": responses}) + "\n")
    run = tmp_path / "run"
    settings = {"model": tiny_model_dir, "dataset": str(file), "temperatures": temperatures}
    ia_mech.sample(**settings, max_new_tokens=2, out=run)
    assert said in refusal(call(main, [str(run)], capfd))


def test_queries_with_fewer_responses_are_left_out_and_counted(tiny_model_dir, tmp_path, capfd):
    file = tmp_path / "ragged.jsonl"
    rows = [
        {"question": f"{n}?", "responses": [f"{k}." for k in range(n)]} for n in (3, 3, 3, 2, 1)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", tiny_model_dir, "--dataset", str(file), "--out", str(tmp_path / "run")]
    assert sample([*words, "--temperatures", "1", "--samples", "1"]) == 0
    words = [str(tmp_path / "run"), "--control-queries", "0", "--out", str(tmp_path / "out")]
    shown = " ".join(call(main, words, capfd).out.split())
    assert "1 of 5 queries have one response and are left out" in shown
    assert "1 of 4 queries have fewer than 3 responses and are left out" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--paraphrases", "none.jsonl"], "no file none.jsonl"),
        (["--paraphrases", "{other}"], "the runs have no context 'elsewhere'"),
        (["--paraphrases", "{shape}"], "line 1 has no list of texts called versions"),
        (["--paraphrases", "{few}"], "3 different versions of one response to no query"),
    ],
)
def test_bad_input_is_one_line(folder, tmp_path, capfd, words, said):
    files = {
        "other": {"id": "elsewhere", "versions": ["a", "b", "c"]},
        "shape": {"id": "q0/r0", "versions": "a"},
        "few": {"id": "q0/r0", "versions": ["a", "a ", ""]},
    }
    for name, row in files.items():
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    given = [word.format(**{name: tmp_path / name for name in files}) for word in words]
    given = [str(folder), *given, "--among", "3", "--out", str(tmp_path / "out")]
    assert said in refusal(call(main, given, capfd))


# -- headline and controls -------------------------------------------------------------------------


def flagged(folder, cut: set[str]) -> list:
    """The queries of a run, some of whose responses were cut off."""
    run = Run.open(folder)
    contexts = run.contexts.assign(response_cut_off=run.contexts["context_id"].isin(cut))
    return queries_of(
        [SimpleNamespace(path=folder, contexts=contexts, generations=run.generations)]
    )


def test_the_headline_is_of_complete_responses_that_half_of_the_queries_have(folder):
    queries = flagged(folder, {"q0/r1", "q0/r2", "q3/r0"})
    size, among = headline(queries, 3)
    assert size == 3 and [*among.values()] == [[0], [0, 1, 2], [0, 1, 2], [1, 2], [0, 1, 2]]
    assert headline(queries, 2)[0] == 2
    queries = flagged(folder, {f"q{i}/r{k}" for i in range(3) for k in (0, 2)})
    size, among = headline(queries, 4)
    assert size == 3 and set(map(tuple, among.values())) == {(0, 1, 2)}


def test_wordings_end_say_the_same_and_do_not_copy(folder):
    (query,) = queries_of([Run.open(folder)])[:1]
    original = "No idea about 0. Try a friend. Or a book. Or a 0."
    assert query.responses[1] == original
    good = [
        "About 0 there is no idea, so some friend or book",
        "Some friend, or a book: my idea of 0",
    ]
    texts = [good[0], original + " ", "Too short.", good[0], "x " * 30, "Cut " + good[0]]
    texts += ["Nothing of what was said there is kept here now", original + " Ok.", good[1]]
    rows = query.contexts.iloc[[0] * len(texts)].assign(
        messages=[[{"role": "assistant", "content": text}] for text in texts],
        context_id=[f"q0/{n}" for n in range(len(texts))],
        response_index=range(len(texts)),
        response_cut_off=[text.startswith("Cut") for text in texts],
        perturbation="to_reword",
    )
    run = SimpleNamespace(path=folder, contexts=rows, generations=query.turns.iloc[:0])
    found = usable_wordings(run, {query.source: 1}, [query], 2)
    assert found == {query.source: (1, good)}
    assert usable_wordings(run, {query.source: 1}, [query], 3) == {}


def test_closeness_tells_words_from_wording():
    original = "The red houses were built in 1950 by masons"
    same = closeness(original, original)
    assert same == {"words kept": 1.0, "runs of three kept": 1.0, "length ratio": 1.0}
    reworded = closeness("Masons built them, red house by red house, in 1950", original)
    assert reworded["words kept"] == pytest.approx(4 / 5)  # were is gone
    assert reworded["runs of three kept"] == 0 and reworded["length ratio"] == 10 / 9
    assert closeness("Nothing", original)["words kept"] == 0


def test_of_versions_of_several_responses_the_first_that_are_enough_count(folder, tmp_path):
    (query, *_) = queries = queries_of([Run.open(folder)])
    file = tmp_path / "versions.jsonl"
    rows = [
        {"id": f"q0/r{k}", "versions": [f"{k}{n}" for n in range(many)]}
        for k, many in ((2, 2), (0, 4), (1, 5))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_versions(file, queries, 3) == {query.source: (0, ["00", "01", "02"])}


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "gemma3", "glm4", "mistral"])
def test_an_opener_of_user_turns_that_ends_responses_is_noted(family):
    tokenizer = families.build(family)
    stops = tokenizer.convert_tokens_to_ids(list(families.GENERATION_EOS.get(family, ())))
    chat = ChatFormat(tokenizer, eos_ids=stops).describe()
    run = SimpleNamespace(record={"identity": {"chat": json.loads(json.dumps(chat))}})
    one = Reaction([run], None, None)
    one.note_header()
    assert len(one.notes) == (family == "glm4")
