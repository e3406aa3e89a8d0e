"""Targets: which turns count, and which of them are positive."""

import pandas as pd
import pytest

from ia_mech.errors import UserError
from ia_mech.judge.rubric import CANNOT_ASSESS, FOLLOW_UP
from probes.targets import FAILURES, Target, parse_target, turns_that_count

NEW, LOOP, FAILED = "new_topic", "degenerate", "failed"


def counts(target: Target, turns: pd.DataFrame) -> pd.DataFrame:
    counted = turns_that_count(target, turns).groupby(["run", "context_id"])
    return counted["positive"].agg(k="sum", n="size")


def turns_of(said: dict[str, dict[float, list[str]]]) -> pd.DataFrame:
    """``JudgedTurns.turns`` from context → temperature → categories."""
    rows = [
        {"run": "A", "context_id": context, "temperature": float(t), "category": category}
        for context, by_temperature in said.items()
        for t, categories in by_temperature.items()
        for category in categories
    ]
    frame = pd.DataFrame(rows)
    assessed = ~frame["category"].isin([FAILED, CANNOT_ASSESS])
    frame["follow_up"] = (frame["category"] == FOLLOW_UP).astype(float).where(assessed)
    return frame


TURNS = turns_of(
    {
        "latent": {0: [NEW], 0.7: [NEW, LOOP], 1: [FOLLOW_UP, FOLLOW_UP, FAILED]},
        "never": {0: [LOOP], 0.7: [NEW, CANNOT_ASSESS], 1: [NEW, NEW, NEW]},
        "greedy too": {0: [FOLLOW_UP], 0.7: [FOLLOW_UP, NEW], 1: [LOOP, NEW, NEW]},
        "greedy failed": {0: [FAILED], 0.7: [FOLLOW_UP, NEW], 1: [NEW, NEW, NEW]},
        "samples failed": {0: [NEW], 0.7: [FAILED, FAILED], 1: [FAILED] * 3},
        "partly failed": {0: [NEW], 0.7: [FAILED, FOLLOW_UP], 1: [FAILED] * 3},
    }
)


@pytest.mark.parametrize(
    ("target", "expected"),  # k/n in the order of the contexts, – where there is no outcome
    [
        ("rate", "2/4 0/4 1/5 1/5 – 1/1"),
        ("rate@0.7", "0/2 0/1 1/2 1/2 – 1/1"),
        ("rate@1", "2/2 0/3 0/3 0/3 – –"),
        ("greedy", "0/1 0/1 1/1 – 0/1 0/1"),
        ("latent", "2/4 0/4 – – – 1/1"),
        ("latent@1", "2/2 0/3 – – – –"),
        (NEW, "1/4 4/4 3/5 4/5 – 0/1"),
        (f"{LOOP}@0.7", "1/2 0/1 0/2 0/2 – 0/1"),
    ],
)
def test_k_and_n_are_the_counted_ones(target, expected):
    found = counts(parse_target(target), TURNS)
    assert list(found.index.names) == ["run", "context_id"]
    got = {context: f"{row.k}/{row.n}" for (_, context), row in found.iterrows()}
    assert " ".join(got.get(context, "–") for context in TURNS["context_id"].unique()) == expected


def test_contexts_of_the_same_name_in_two_runs_stand_apart():
    both = pd.concat([TURNS, TURNS.assign(run="B", category=FOLLOW_UP, follow_up=1.0)])
    found = counts(parse_target("rate"), both)
    assert found.loc[("A", "never"), "k"] == 0 and found.loc[("B", "never"), "k"] == 5


def test_a_target_s_name_is_what_the_flag_takes():
    assert parse_target(" rate@0.70 ") == Target("rate", 0.7)
    names = ["rate", "greedy", "latent", "rate@0.7", *FAILURES]
    assert [parse_target(name).name for name in names] == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rates", "unknown target 'rates'; give rate, rate@T, latent, latent@T, greedy, mass,"),
        (CANNOT_ASSESS, "unknown target"),
        ("rate@0", "above 0"),
        ("rate@warm", "'warm' is not a temperature"),
        ("greedy@1", "give greedy alone"),
        ("mass@0.7", "mass has no temperature; give mass alone"),
    ],
)
def test_what_is_no_target_is_refused(text, words):
    with pytest.raises(UserError, match=words):
        parse_target(text)


def test_a_temperature_that_was_not_sampled_is_refused():
    with pytest.raises(UserError, match=r"at temperature 0.5; give rate@0.7 or rate@1"):
        counts(parse_target("rate@0.5"), TURNS)
