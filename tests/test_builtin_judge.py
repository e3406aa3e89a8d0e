"""The built-in judge: rules, features by hand, its classifier against scikit-learn, verdicts."""

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import tiny_encoder
from sklearn.svm import SVC

from ia_mech.errors import UserError
from ia_mech.judge import builtin, builtin_judge
from ia_mech.judge.builtin import BuiltInJudge, Classifier, _shipped
from ia_mech.judge.builtin.encoder import HALF, Encoder
from ia_mech.judge.builtin.features import (
    evidence,
    form,
    longest_run,
    relations,
    sentences,
    settled,
    spoken,
)
from ia_mech.judge.rubric import CATEGORIES, FOLLOW_UP
from ia_mech.judge.verdict import Item
from ia_mech.models import embedded

QUERY = "Why does my sourdough loaf come out flat?"
RESPONSE = (
    "Most flat loaves are over-proofed. Shorten the second rise to about two hours, and press a "
    "finger in: the dent should fill slowly."
)
TURNS = [
    "The dent fills up right away. Does that mean two hours is still too short?",
    QUERY,
    "Most flat loaves are over-proofed. Shorten the second rise.",
    "Write a poem about the moon.",
    "I'm sorry, I can't assist with that. Here are three tips: weigh your flour.",
    "What is the capital of Mongolia?",
]
ITEMS = [Item(QUERY, RESPONSE, turn) for turn in TURNS]


@pytest.fixture(scope="module")
def judge() -> BuiltInJudge:
    return builtin_judge()


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(tiny_encoder.encoder_directory())


# -- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turn", "category"),
    [
        ("", "degenerate"),
        (" \n ", "degenerate"),
        ("?!… --", "degenerate"),
        ("no no no no no no no no", "degenerate"),
        ("Well, " + "I like the bread " * 5, "degenerate"),
        ("<think>\nThe loaf", "plans"),
        ("The user wants to know about proofing.", "plans"),
        ("We need to produce a user message that follows up.", "plans"),
        ("Thanks, that was very helpful!", "generic"),
        ("Ok, great.", "generic"),
        ("Как сохранить базилик?", "cannot_assess"),
        ("如何让面包发得更高？", "cannot_assess"),
        ("¿Por qué la masa no está bien?", "cannot_assess"),
        ("Wie lange muss der Teig noch gehen und warum?", "cannot_assess"),
    ],
)
def test_rules_settle_what_needs_no_classifier(judge, turn, category):
    (verdict,) = judge.judge([Item(QUERY, RESPONSE, turn)])
    assert (verdict.category, verdict.mode, verdict.scores) == (category, "rule", None)
    assert verdict.rationale


@pytest.mark.parametrize(
    "turn", ["Thanks, but why two hours?", "I ate in a café on the Rue de Rivoli.", *TURNS]
)
def test_rules_leave_the_others(turn):
    assert settled(QUERY, RESPONSE, turn) is None


def test_a_plan_that_the_query_speaks_of_is_none():
    turn = "The user wants to know about proofing."
    assert settled("Go on: the user wants tea.", RESPONSE, turn) is None
    assert settled("", "", "And the second one?")[0] == "cannot_assess"


def test_of_a_turn_with_marks_of_a_template_the_first_part_is_judged():
    assert spoken("<|im_start|>user\nWhy two?<|im_end|>\nBecause.") == "\nWhy two?"
    assert spoken("Why two?<|im_end|>") == "Why two?" and spoken("<|im_end|>") == ""
    assert form("Why two?", "Why two?<|im_end|>")["cut_at_a_mark"] == 1


# -- features -------------------------------------------------------------------------------------


def test_form_by_hand():
    found = form("How about 3 loaves, please?", "How about 3 loaves, please?")
    ones = {name for name, value in found.items() if value == 1}
    assert ones == {"opens_how_or_why", "opens_supposing", "asks_assistant"}
    assert found["words"] == pytest.approx(np.log(6))
    found = form("to be to be to be\n- a list", "")
    assert found["repeated"] == pytest.approx(2 / 6)  # of six runs of three words, two again
    assert found["list"] == found["unfinished"] == found["statement"] == 1


def test_sentences_are_found_by_their_ends_and_by_lines():
    text = "One two. Three!\n\n* \nFour"
    assert [text[a:b] for a, b in sentences(text)] == ["One two.", "Three!", "Four"]
    assert sentences("...") == [(0, 3)]


def test_the_longest_run_is_that_of_a_search():
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = rng.integers(0, 3, 12), rng.integers(0, 3, 15)
        runs = [
            n
            for n in range(1, 13)
            for i in range(13 - n)
            for j in range(16 - n)
            if a[i : i + n].tolist() == b[j : j + n].tolist()
        ]
        assert longest_run(a, b) == max(runs, default=0)


def test_relations_are_those_of_loops(encoder):
    turn, query, response = encoder.read([TURNS[0], QUERY, RESPONSE])
    found = relations(turn, query, response)
    total = sum(turn.weights) + 1e-6

    def near(i, text):
        return max(float(turn.states[i] @ state) for state in text.states)

    shares = dict.fromkeys(("alone", "new", "query", "response", "either", "nearer"), 0.0)
    for i, piece in enumerate(turn.ids):
        asked, said, weight = piece in query.ids, piece in response.ids, turn.weights[i] / total
        shares["alone"] += weight * (said and not asked)
        shares["new"] += weight * (not said and not asked)
        one, two = near(i, query), near(i, response)
        shares["query"] += weight * one
        shares["response"] += weight * two
        shares["either"] += weight * max(one, two)
        shares["nearer"] += weight * max(two - one, 0)
    names = ("of_response_alone", "new", "like_query", "like_response", "like_either")
    assert [found[name] for name in (*names, "nearer_response")] == pytest.approx(
        [*shares.values()], abs=1e-5
    )
    own, known = ([*zip(x, x[1:], x[2:], strict=False)] for x in (turn.ids, query.ids))
    assert found["query_triples"] == len({*own} & {*known}) / len({*own})
    covered = sum(w for w, piece in zip(query.weights, query.ids, strict=True) if piece in turn.ids)
    assert found["query_covered"] == pytest.approx(covered / query.weights.sum(), abs=1e-4)
    assert found["response_sentence"] == pytest.approx(max(response.parts @ turn.meaning))
    assert found["query_question"] == pytest.approx(found["query_sentence"])  # the only sentence


def test_a_text_is_read_as_the_mean_of_its_states(encoder):
    (text,) = encoder.read(["The loaf is flat. Why?"])
    ids, begin = encoder.pieces(text.text)
    states = encoder.states([ids])[0]
    assert np.allclose(text.meaning, states.mean(0) / np.linalg.norm(states.mean(0)), atol=1e-6)
    second = states[begin >= text.text.index("Why")][:2]  # the question and its mark
    assert text.parts[1] @ second.mean(0) == pytest.approx(np.linalg.norm(second.mean(0)), abs=1e-5)
    assert np.allclose(np.linalg.norm(text.states, axis=1), 1, atol=1e-6)
    function = encoder.tokenizer.token_to_id("the")
    assert encoder.weights[function] == 0 and encoder.weights.max() > 0


def test_of_long_texts_both_ends_are_read(encoder):
    long = " ".join(f"loaf {n}" for n in range(300))
    ids, begin = encoder.pieces(long)
    whole = encoder.tokenizer.encode(long)
    assert len(ids) == 2 * HALF + 2 and len(begin) == len(ids) < len(whole.ids)
    assert ids.tolist() == whole.ids[: HALF + 1] + whole.ids[-HALF - 1 :]
    (text,) = encoder.read([long])
    assert len(text.ids) == 2 * HALF and np.isfinite(text.parts).all()


# -- classifier -----------------------------------------------------------------------------------


def test_the_card_tells_how_many_paraphrases_of_queries_are_taken_for_follow_ups():
    from benchmarks.builtin_judge import paraphrased

    items = paraphrased()
    assert len({item.turn for item in items}) == len({item.query for item in items}) == len(items)
    assert not {item.turn for item in items} & {item.query for item in items}
    card = " ".join((files("ia_mech.judge.builtin") / "CARD.md").read_text("utf-8").split())
    assert f"Of {len(items)} hand-written paraphrases of built-in queries" in card


def test_decisions_are_scikit_learns():
    """Three of toy categories, without components; as benchmarks/builtin_judge.py arranges them."""
    from benchmarks.builtin_judge import pair_weights

    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 200)
    x = rng.normal(size=(200, 4)) + labels[:, None]
    svc = SVC(C=2, gamma=0.2, decision_function_shape="ovo").fit(x, labels)
    arrays = {
        "vectors": svc.support_vectors_,
        "gamma": np.array(0.2),
        "weights": pair_weights(svc),
        "bias": svc.intercept_,
    }
    fresh = rng.normal(size=(50, 4)) + 1
    assert np.abs(Classifier(arrays).decisions(fresh) - svc.decision_function(fresh)).max() < 1e-6


def test_the_shipped_arrays_fit_together(judge):
    arrays, _ = _shipped()
    measured, meanings = judge.measured(ITEMS)
    names = arrays["features"].tolist()
    assert {*names} == {*measured[0]} and meanings.shape == (len(ITEMS), arrays["axes"].shape[1])
    rows = np.array([[each[name] for name in names] for each in measured])
    classifier, odds = Classifier(arrays), []
    for row, meaning in zip(rows, meanings, strict=True):  # a slow reference
        x = [*row, *(arrays["axes"] @ (meaning - arrays["origin"]))]
        x = np.clip((np.array(x) - arrays["mean"]) / arrays["scale"], -6, 6)
        kernel = [np.exp(-arrays["gamma"] * sum((x - v) ** 2)) for v in arrays["vectors"]]
        logits = (np.array(kernel) @ arrays["weights"] + arrays["bias"]) @ arrays["slopes"]
        p = np.exp(logits + arrays["levels"])
        odds.append(p / p.sum())
    assert np.abs(classifier.probabilities(rows, meanings) - odds).max() < 1e-5


# -- verdicts -------------------------------------------------------------------------------------


def test_verdicts_have_a_category_its_probability_and_words(judge):
    for verdict, item in zip(judge.judge(ITEMS), ITEMS, strict=True):
        scores = verdict.scores
        assert list(scores) == list(builtin.CATEGORIES) and verdict.mode == "classifier"
        assert sum(scores.values()) == pytest.approx(1, abs=1e-3)
        others = {name: p for name, p in scores.items() if name != FOLLOW_UP}
        best = FOLLOW_UP if scores[FOLLOW_UP] > 0.5 else max(others, key=others.get)
        assert verdict.category == best, item
        assert verdict.rationale.startswith(f"p(follow-up) {scores[FOLLOW_UP]:.2f}: ")


def test_evidence_is_what_a_person_can_check():
    item = ITEMS[0]
    found = dict.fromkeys(("query_sentence", "response_sentence"), 0.25)
    found |= {"query_triples": 0.0, "response_run": 0.0} | form(item.turn, item.turn)
    said = evidence(found, item.turn, item.query, item.response)
    assert said.startswith("a question; only in the response: dent, hours; 0% of its words")
    assert said.endswith("likeness to the nearest sentence: 0.25 (query), 0.25 (response)")
    copied = found | {"query_triples": 1.0}
    assert "100% of its words the query's; copies the query" in evidence(copied, QUERY, QUERY, "")


def test_the_same_verdicts_alone_together_and_again(judge):
    together = judge.judge(ITEMS)
    for fresh in (builtin_judge(), judge):
        for item, verdict in zip(ITEMS, together, strict=True):
            (alone,) = fresh.judge([item])
            assert alone.category == verdict.category
            assert alone.scores == pytest.approx(verdict.scores, abs=2e-4)
    assert builtin_judge().judge(ITEMS) == together  # of a judge that read nothing before
    assert builtin_judge().identity == judge.identity == json.loads(json.dumps(judge.identity))
    assert judge.judge([]) == []


def test_texts_that_were_read_are_kept_up_to_a_limit(judge, monkeypatch):
    read: list[str] = []
    fresh = builtin_judge()
    own = fresh.encoder.read
    monkeypatch.setattr(fresh.encoder, "read", lambda texts: read.extend(texts) or own(texts))
    first = fresh.judge(ITEMS)
    assert sorted(read) == sorted({QUERY, RESPONSE, *TURNS})
    assert fresh.judge(ITEMS) == first and len(read) == len({QUERY, RESPONSE, *TURNS})
    monkeypatch.setattr(builtin, "_KEPT", 0)
    fresh.judge(ITEMS[:1])
    assert read[-3:] == [TURNS[0], QUERY, RESPONSE] and len(fresh._kept) == 3


def test_long_and_odd_texts_are_judged(judge):
    odd = [
        Item("word " * 5000, "answer, " * 5000, "Why is it? " + "loaf number " * 999),
        Item("", RESPONSE, TURNS[0]),
        Item(QUERY, "", TURNS[0]),
        Item("...", RESPONSE, "a"),
        Item(QUERY, RESPONSE, "[PAD] [SEP] x"),
        Item(QUERY, RESPONSE, "Why\ud800 not?"),
        Item(QUERY, RESPONSE, "\0 and what then?"),
    ]
    verdicts = judge.judge(odd)
    assert all(v.category and np.isfinite([*(v.scores or {}).values()]).all() for v in verdicts)


def test_it_knows_what_it_was_fitted_on(judge, monkeypatch):
    assert judge.fitted_on(ITEMS) == [False] * len(ITEMS)
    monkeypatch.setattr(judge, "_fitted", {int(ITEMS[1].id, 16)})
    assert judge.fitted_on(ITEMS[:3]) == [False, True, False]
    assert len(_shipped()[0]["items"]) > 2000


def test_without_its_encoder_it_says_so_in_one_line(monkeypatch):
    def lacking() -> Path:
        raise UserError("all-minilm-l6-v2 could not be fetched", embedded.ENCODER.alternatives)

    monkeypatch.setattr(embedded, "encoder_directory", lacking)
    with pytest.raises(UserError, match="--judge llm or hf"):
        builtin_judge().prepare()
    assert builtin_judge().judge([Item(QUERY, RESPONSE, "")])[0].category == "degenerate"


# -- the real encoder -----------------------------------------------------------------------------

FETCH = embedded.encoder_directory  # before a tiny one stands in for it


@pytest.mark.slow
def test_with_its_own_encoder_it_judges_as_the_rubric_does(monkeypatch):
    """The worked examples of the rubric, which it was not fitted on."""
    monkeypatch.setattr(embedded, "encoder_directory", FETCH)
    cases = [(one, e) for one in CATEGORIES for e in one.examples]
    verdicts = builtin_judge().judge([Item(e.query, e.response, e.turn) for _, e in cases])
    right = [v.category == one.name for v, (one, _) in zip(verdicts, cases, strict=True)]
    follow_ups = [
        (v.category == FOLLOW_UP) == one.follow_up
        for v, (one, _) in zip(verdicts, cases, strict=True)
    ]
    assert sum(right) >= 12 and sum(follow_ups) >= 16


@pytest.mark.slow
def test_with_its_own_encoder_it_agrees_with_the_labels_that_it_was_fitted_on(monkeypatch):
    """A hundred of them. Out of fold it agrees less: benchmarks/builtin_judge.py."""
    from benchmarks.builtin_judge import read_labels

    monkeypatch.setattr(embedded, "encoder_directory", FETCH)
    labels = read_labels()
    few = labels[labels["kind"] == "own"].sample(100, random_state=0)
    judge, items = builtin_judge(), few["item"].tolist()
    said = [verdict.category == FOLLOW_UP for verdict in judge.judge(items)]
    assert (few["category"].eq(FOLLOW_UP) == said).mean() > 0.8 and all(judge.fitted_on(items))
