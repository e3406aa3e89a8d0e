"""``experiments.reaction``: likelihoods against full passes, controls, and the command."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scored
import tiny
from shell import call

from experiments.experiment import Model
from experiments.outcome import SiblingTurns
from experiments.reaction import Reaction, closeness, main, usable_wordings
from ia_mech.collect.command import main as sample
from ia_mech.engine.check import check_engine
from ia_mech.errors import UserError
from ia_mech.run import Run
from ia_mech.run.queries import queries_of

RESPONSES = 3


# -- what is measured ------------------------------------------------------------------------------


def a_model(architecture: str) -> Model:
    model = tiny.model(architecture)
    check_engine(model, tiny.prompt(24, seed=0))
    return Model(SimpleNamespace(model=model), None)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_likelihoods_equal_those_of_full_passes(architecture):
    """Contexts that begin alike, turns of three temperatures."""
    model = a_model(architecture)
    begun = tuple(tiny.prompt(20, seed=1))
    contexts = [(*begun, *tiny.prompt(5 + 2 * k, seed=k)) for k in range(RESPONSES)]
    turns = [
        (tuple(tiny.prompt(3 + n, seed=100 + n)), temperature)
        for n, temperature in enumerate((0.0, 0.7, 1.0, 0.7))
    ]
    what = "d\x1fq", "d", 1, "alternatives", tuple(contexts), tuple(turns)
    found = SiblingTurns(*what).rows(model)
    for (ids, temperature), row in zip(turns, found.to_dict("records"), strict=True):
        near = scored.nats(len(ids))
        for name, t in (("reader", 1.0), ("own", temperature or 1.0)):
            full = [
                scored.logprobs(model.subject.model, list(context), list(ids), t)
                for context in contexts
            ]
            wanted = np.ravel(full) if name == "own" else np.sum(full, axis=1)
            np.testing.assert_allclose(row[name], wanted, **near)


# -- a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_model_dir, tmp_path_factory):
    """A run of three responses to each of five queries."""
    place = tmp_path_factory.mktemp("reaction")
    rows = [
        {
            "id": f"q{i}",
            "source_id": f"q{i}",
            "question": f"What is {i} plus {i}?",
            "responses": [
                f"Add {i} to {i}. The sum is {2 * i}. That is all. Ask me more.",
                f"It is {2 * i + 1}. I am sure. Nothing else is. Numbers 1 are fun."
                if i % 2
                else f"No idea about {i}. Try a friend. Or a book. Or a {i}.",
                f"Twice {i} makes {2 * i}. Double it. Then stop. Good luck {i}.",
            ],
        }
        for i in range(5)
    ]
    file = place / "several.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = place / "run"
    words = ["--model", tiny_model_dir, "--dataset", str(file), "--out", str(out)]
    words += ["--temperatures", "0.7", "1", "--samples", "2", "--max-new-tokens", "6"]
    assert sample(words) == 0
    return out


def wordings(_, reworded, queries, count):
    """Wordings of all responses but one, in place of those of a random model, which say nothing."""
    return {
        query.source: [f"Wording {k} of {n}." for k in range(count)]
        for n, query in enumerate(queries[1:])
    }


@pytest.fixture(scope="module")
def answered(folder):
    """What the command writes with three wordings of one response to two of the queries."""
    out = folder.parent / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.reaction.MOST_CONTROLLED", 3)
        patch.setattr("experiments.reaction.SURPLUS", 1)  # what is written isn't used
        patch.setattr("experiments.reaction.usable_wordings", wordings)
        assert main([str(folder), "--out", str(out), "--resamples", "200"]) == 0
    return out


def test_estimates_are_means_of_what_turns_tell(answered):
    found = pd.read_parquet(answered / "estimates.parquet")
    turns = pd.read_parquet(answered / "turns.parquet")
    assert len(turns) == 5 * RESPONSES * 5
    means = turns.groupby(["source_id", "temperature", "followed"])[["reaction_bits"]].mean()
    by_query = means.groupby(["source_id", "temperature"])["reaction_bits"].mean().unstack()
    warm = found[found["temperature"] == 1.0]
    information = warm[warm["quantity"] == "I_K, bits"].set_index(["term", "responses"])["value"]
    of_all = information["alternatives", RESPONSES]
    assert of_all == pytest.approx(by_query[1.0].mean(), abs=1e-9)
    tokens = warm[warm["quantity"] == "bits by token"]
    assert tokens["value"].sum() == pytest.approx(of_all, abs=1e-9)
    bounded = found[found["quantity"].isin(["I_K, bits"])]
    assert (bounded["low"].dropna() >= 0).all() and (bounded["high"].dropna() <= np.log2(3)).all()
    read = turns.groupby(["source_id", "temperature", "followed"])["readable_bits"].mean()
    read = read.groupby(["source_id", "temperature"]).mean().unstack()
    less = found[found["quantity"] == "greedy turns' readable bits minus these"]
    assert set(less["temperature"]) == {0.7, 1.0}
    for _, row in less.iterrows():
        difference = read[0.0] - read[row["temperature"]]
        assert row["value"] == pytest.approx(difference.mean(), abs=1e-9)
        reach = 2.776 * difference.std() / np.sqrt(5)  # Student's, 4 degrees of freedom
        assert row["high"] - row["value"] == pytest.approx(reach, rel=1e-3)


def test_the_control_is_of_the_same_queries(answered):
    found = pd.read_parquet(answered / "estimates.parquet")
    tested = found[found["quantity"] == "I_K minus the control's, bits"]
    assert set(tested["term"]) == {"wordings of one response"}
    assert len(tested) == 2 and (tested["p_holm"] >= tested["p"]).all()
    same = Run.open(answered / "wordings_of_one_response" / "run").contexts
    assert same["source_id"].nunique() == 2 and len(same) == 6
    alike = found[found["quantity"] == "I_K on the same queries, bits"]
    assert set(alike["sources"]) == {len(same) // 3}


def test_a_model_that_writes_no_wordings_has_no_such_control(folder, tmp_path, capfd, monkeypatch):
    """Random weights end no text: all wordings are cut off."""
    monkeypatch.setattr("experiments.reaction.MOST_CONTROLLED", 1)
    words = [str(folder), "--out", str(tmp_path / "out"), "--resamples", "100"]
    plan = call(main, [*words, "--dry-run"], capfd).out
    assert "1 conversation to sample about 9 user turns after each" in plan
    assert "at most 3 conversations to sample" in plan
    shown = " ".join(call(main, words, capfd).out.split())
    assert "There is no control of wordings" in shown
    requests, own = Run.open(tmp_path / "out" / "to_reword" / "run").contexts, Run.open(folder)
    own = own.contexts[own.contexts["source_id"] == requests["source_id"].iloc[0]]
    texts = [messages[-1]["content"] for messages in own["messages"]]
    (request,) = {messages[-2]["content"] for messages in requests["messages"]}
    assert len(requests) == 9 and any(text in request for text in texts)
    found = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    assert "wordings of one response" not in set(found["term"])


# -- what is refused, and what is left out --------------------------------------------------------


def read(folder, change) -> Reaction:
    """The experiment, up to what it reads, on a run with changed contexts and turns."""
    run = Run.open(folder)
    contexts, turns = change(run.contexts, run.generations)
    changed = SimpleNamespace(path=folder, contexts=contexts, generations=turns, record=run.record)
    changed.drawn = run.drawn
    one = Reaction([changed], Reaction.build_parser().parse_args([str(folder)]), Path())
    one.read()
    return one


def cut(contexts, those):
    """Contexts of which some have responses that are cut off."""
    return contexts.assign(response_unfinished=those)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda c, t: (c[c["response_index"] == 0], t), "has one response per query"),
        (lambda c, t: (c, t[t["temperature"] == 0]), "has greedy turns alone"),
        (lambda c, t: (c[c["source_id"] < "q1"], t), "needed; of 1 there is 1"),
        (lambda c, t: (cut(c, c["response_index"] > 0), t), "needed; of 5 there are 0"),
    ],
)
def test_what_holds_no_answer_is_refused(change, problem, folder):
    with pytest.raises(UserError, match=problem):
        read(folder, change)


def test_what_is_told_apart_are_finished_responses_that_half_of_the_queries_have(folder):
    some = ["q0/r1", "q0/r2", "q3/r0"]
    one = read(folder, lambda c, t: (cut(c, c["context_id"].isin(some)), t))
    assert one.count == 3 and [len(query.contexts) for query in one.used] == [3, 3, 3]
    assert "2 of 5 queries have fewer than 3 finished responses and are left out" in one.notes[-1]
    gone = ["q3/r2", "q4/r1", "q4/r2"]
    one = read(folder, lambda c, t: (c[~c["context_id"].isin(gone)], t))
    assert "1 of 5 queries have one response and are left out" in one.notes[0]
    middle = [f"q{i}/r1" for i in range(3)]
    one = read(folder, lambda c, t: (cut(c, c["context_id"].isin(middle)), t))
    assert one.count == 2 and len(one.used) == 5
    for query, whole in zip(one.used, queries_of([Run.open(folder)]), strict=True):
        kept = [0, 2] if query.source[-2:] < "q3" else [0, 1]
        assert query.responses == [whole.responses[k] for k in kept]
        turns = whole.turns[whole.turns["followed"].isin(kept)]
        assert query.turns["text"].tolist() == turns["text"].tolist()
        assert [kept[k] for k in query.turns["followed"]] == turns["followed"].tolist()


# -- controls --------------------------------------------------------------------------------------


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
        response_unfinished=[text.startswith("Cut") for text in texts],
        perturbation="to_reword",
    )
    run = SimpleNamespace(path=folder, contexts=rows, generations=query.turns.iloc[:0])
    run.drawn = lambda turns: turns["order"] >= 0
    found = usable_wordings(run, {query.source: 1}, [query], 2)
    assert found == {query.source: good}
    assert usable_wordings(run, {query.source: 1}, [query], 3) == {}


def test_closeness_tells_words_from_wording():
    original = "The red houses were built in 1950 by masons"
    same = closeness(original, original)
    assert same == {"words kept": 1.0, "trigrams kept": 1.0, "length ratio": 1.0}
    reworded = closeness("Masons built them, red house by red house, in 1950", original)
    assert reworded["words kept"] == pytest.approx(4 / 5)  # were is gone
    assert reworded["trigrams kept"] == 0 and reworded["length ratio"] == 10 / 9
    assert closeness("Nothing", original)["words kept"] == 0
