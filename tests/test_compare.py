"""Categories of turns by query, which studies are compared by."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from experiments.compare import SHARE, Compare, after_which, category_shares
from ia_mech.judge.rubric import BUILT_IN, CANNOT_ASSESS, FOLLOW_UP
from ia_mech.run.sources import sources_of


def test_shares_are_of_the_turns_assessed_and_of_each_source_alone():
    """Two datasets use the id 1; a turn that can't be assessed is left out, as in rates."""
    contexts = pd.DataFrame(
        {"context_id": ["a", "b"], "dataset": ["one", "two"], "source_id": ["1", "1"]}
    )
    names = {"context_id": list("aaabb"), "temperature": 0.0}
    turns = pd.DataFrame(names).merge(contexts, on="context_id")
    said = [FOLLOW_UP, "generic", CANNOT_ASSESS, "generic", "failed"]
    follow_up = pd.Series(map(BUILT_IN.follow_up, said), dtype=float)
    turns = turns.assign(source=sources_of(turns), category=said, follow_up=follow_up)
    labels = SimpleNamespace(record=lambda *_: {})
    run = SimpleNamespace(labelled=lambda *_, **__: turns, labels=labels)
    run.drawn = lambda turns: pd.Series(True, turns.index)
    found = category_shares(run, "builtin")
    shares = found.set_index(["source", "term"])["value"]
    one, two = sources_of(contexts)
    assert shares[one, FOLLOW_UP] == pytest.approx(1 / 2)
    assert (shares[two, FOLLOW_UP], shares[two, "generic"]) == (0, 1)
    assert set(found["source"]) == {one, two} and CANNOT_ASSESS not in set(found["term"])


def test_the_mean_of_shares_of_queries_has_the_interval_of_a_mean():
    """Of 60 queries with 16 turns each: half of the turns are follow-ups, of every query alike."""
    shares = np.random.default_rng(0).binomial(16, 0.5, 60) / 16
    rows = pd.DataFrame({"source": [f"d/{n}" for n in range(60)], "value": shares})
    names = {"quantity": SHARE, "term": FOLLOW_UP, "turns": "sampled", "model": "a", "dataset": "d"}
    one = Compare([], Compare.build_parser().parse_args(["study"]), Path())
    one.models = ["a"]
    (found,) = one.estimate(rows.assign(**names))
    assert found.estimate.high - found.estimate.low < 5 * shares.std() / np.sqrt(60)  # not 13


def test_the_headline_says_whether_models_followed_the_same_responses():
    """Diverse responses are told apart more easily: models after their own aren't alike."""

    def run(*responses: str) -> SimpleNamespace:
        contexts = pd.DataFrame({"source": ["q1", "q2"], "messages": [
            [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": text}]
            for text in responses
        ]})  # fmt: skip
        return SimpleNamespace(contexts=contexts.assign(dataset="d", source_id=contexts["source"]))

    queries = set(sources_of(run("", "").contexts))
    same = after_which([run("a", "b"), run("a", "b"), run("a", "b")], queries)
    assert same == "all after the same responses"
    own = after_which([run("a", "b"), run("a", "c")], queries)
    assert own == "each after its own responses, which alone can move bits"
    (first, *_) = sorted(queries)
    assert after_which([run("a", "b"), run("a", "c")], {first}) == same
