"""Judging a run: what is asked, what is paid, what is kept, and a row for every user turn."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from judging import DECOYS, ROWS, FakeJudge, Recorded, follow_up
from runs import CONTEXTS, planted, stored

from ia_mech import judge as judge_package
from ia_mech.errors import UserError
from ia_mech.judge.judging import items_of, label_run
from ia_mech.judge.rubric import BUILT_IN, CANNOT_ASSESS, FOLLOW_UP, VERSION, YES_NO
from ia_mech.judge.verdict import FAILURES, TRUNCATED, Judge, Verdict, identity_hash
from ia_mech.rates.load import read_runs
from ia_mech.run import Run
from ia_mech.run.labels import KEY

ALL = ROWS + DECOYS


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "judgements"


@pytest.fixture
def run(run) -> Run:
    """A run whose 60 rows are 5 different turns in each of 12 contexts."""
    run.generations["text"] = [f"turn {i}" for i in range(ROWS)]
    return stored(run)


@pytest.fixture
def label(run, cache):
    """Judge the run; returns the rows that were written."""

    def call(judge, name: str = "fake", progress=None, **options) -> pd.DataFrame:
        path = label_run(run, judge, name, progress or Recorded(), cache_folder=cache, **options)
        assert path == run.path / "judgements" / f"{name}.parquet"
        return run.labels.judgements(name)

    return call


def kept(judge: Judge, cache: Path) -> int:
    """How many verdicts of a judge the cache has on the disk."""
    lines = (cache / f"{identity_hash(judge.identity)}.jsonl").read_text().splitlines()
    return sum("key" in json.loads(line) for line in lines)


def unreachable():
    raise ConnectionError("no host")  # an OSError


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        (
            lambda items: [1 / 0 for _ in items],
            r"failed: ZeroDivisionError: .* \(.*test_judge_label\.py:\d+\)",
        ),
        (lambda items: unreachable(), r"failed: ConnectionError: no host \(.*_label\.py:\d+\)"),
        (
            lambda items: [Verdict(FOLLOW_UP, rationale=None) for _ in items],
            r"failed: TypeError: a verdict whose rationale is None \(.*_label\.py:\d+\)",
        ),
        (
            lambda items: [Verdict(FOLLOW_UP)] * (len(items) - 1),
            r"returned 3 objects \(Verdict\) for 4 turns",
        ),
        (lambda items: ["generic"] * len(items), r"returned 4 objects \(str\) for 4 turns"),
    ],
    ids=["fails", "no server", "no text", "one lacks", "texts"],
)
def test_a_judge_of_ones_own_that_does_something_else_is_named(run, label, verdicts, said):
    class Own(Judge):
        batch, identity = 4, {"kind": "own"}

        def judge(self, items):
            return verdicts(items)

    with pytest.raises(UserError, match=rf"^the judge Own {said}"):
        label(Own())
    assert run.labels.judges == []


@pytest.mark.parametrize("method", ["prepare", "estimate", "fitted_on"])
def test_what_else_a_judge_of_ones_own_raises_is_named(label, method):
    own = FakeJudge()
    setattr(own, method, lambda *_: unreachable())
    with pytest.raises(UserError, match=r"^the judge FakeJudge failed: .*_label\.py:\d+\)"):
        label(own)


def test_half_a_surrogate_is_written_as_a_question_mark(label):
    rows = label(FakeJudge(lambda item, _: Verdict(FOLLOW_UP, rationale="half \ud83d")))
    assert set(rows["rationale"]) == {"half ?"}


# -- rows ---------------------------------------------------------------------------------------


def test_rows_are_those_of_the_generations_in_their_order(run, label):
    judge = FakeJudge()
    rows = label(judge)
    assert rows[list(KEY)].values.tolist() == run.generations[list(KEY)].values.tolist()
    assert rows["rationale"].tolist() == run.generations["text"].tolist()
    assert rows["item"].nunique() == ROWS and rows["item"].str.fullmatch("[0-9a-f]{16}").all()
    assert set(rows["status"]) == {"judged"}
    assert run.labels.record("judgements", "fake") == {
        "identity": judge.identity,
        "identity_hash": identity_hash(judge.identity),
        "rubric": {"version": VERSION, "hash": BUILT_IN.hash},
        "decoys_per_source": 1,
        "unperturbed": False,
        "caveat": judge.caveat,
    }


def test_neither_system_messages_nor_the_users_real_follow_up_are_shown(tmp_path):
    chat = [("system", "Rules."), ("user", "Why?"), ("assistant", "So."), ("user", "And then?")]
    messages = [{"role": role, "content": content} for role, content in chat]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": m}) + "\n" for m in (messages, messages[1:3])))
    run = planted(tmp_path / "run", [2], dataset=str(file))
    assert [len(m) for m in run.contexts["messages"]] == [3, 2]
    assert run.contexts["real_follow_up"].tolist()[0] == "And then?"
    assert {(item.query, item.response) for item in items_of(run)} == {("Why?", "So.")}
    assert [item.turn for item in items_of(run)] == run.generations["text"].tolist()


def test_follow_up_follows_from_the_category(label, run):
    verdicts = [
        Verdict(FOLLOW_UP),
        Verdict("new_topic", scores={"generic": 0.5, "follow_up": 0.25}),
        Verdict(CANNOT_ASSESS),
    ]
    rows = label(FakeJudge(lambda item, _: verdicts[int(item.turn[5:]) % 3]))
    assert rows["category"].tolist() == [FOLLOW_UP, "new_topic", CANNOT_ASSESS] * (ROWS // 3)
    assert rows["follow_up"].tolist() == [True, False, pd.NA] * (ROWS // 3)
    assert json.loads(rows["scores"][1])["generic"] == 0.5 and rows["scores"].isna()[0]
    chances = run.labelled("fake")["follow_up_probability"]
    assert chances.isna()[0] and chances[1] == 0.25


# -- identical turns ----------------------------------------------------------------------------


def test_identical_turns_in_identical_contexts_are_judged_once(run, label):
    """Tokens and cost stand on the first row of each, so that sums are what was paid."""
    run.generations["text"] = ["yes", "no", "yes", "yes", "no"] * CONTEXTS
    stored(run)
    judge = FakeJudge()
    rows = label(judge)
    assert set(Counter(judge.asked).values()) == {1} and len(judge.asked) == CONTEXTS * 2
    assert rows["rationale"].tolist() == run.generations["text"].tolist()
    assert rows["item"].nunique() == CONTEXTS * 2
    first = [True, True, False, False, False] * CONTEXTS
    assert rows["prompt_tokens"].tolist() == [100 * f for f in first]
    assert rows["completion_tokens"].tolist() == [7 * f for f in first]
    assert rows["cost"].tolist() == [0.25 * f for f in first]
    assert rows["cached"].tolist() == [not f for f in first]


# -- the cache ----------------------------------------------------------------------------------


def test_failures_are_rows_that_are_not_kept_and_the_same_command_asks_again(label, cache):
    """Of seven turns, wherever they are shown, each with its kind of failure."""
    failed = {f"turn {number}": status for number, status in enumerate(FAILURES)}
    bad = FakeJudge(
        lambda item, n: (
            Verdict(None, failed[item.turn], error="no", cost=0.5)
            if item.turn in failed
            else follow_up(item, n)
        )
    )
    rows = label(bad)
    lost = rows[rows["status"] != "judged"]
    assert lost["status"].tolist() == list(FAILURES) and rows["follow_up"].sum() == ROWS - 7
    assert lost["category"].isna().all() and lost["follow_up"].isna().all()
    assert set(lost["error"]) == {"no"} and lost["cost"].sum() == 3.5
    again = [item for item, _ in bad.asked if failed.get(item.turn, TRUNCATED) != TRUNCATED]
    assert kept(bad, cache) == ALL - len(again)
    judge, progress = FakeJudge(), Recorded()
    rows = label(judge, progress=progress)
    assert {item for item, _ in judge.asked} == {*again}
    assert rows["follow_up"].sum() == ROWS - 1 and kept(judge, cache) == ALL
    # An answer that a token limit cut off would be cut off again: it isn't paid for twice.
    assert set(rows["status"][~rows["follow_up"].fillna(False)]) == {TRUNCATED}
    assert any("cut off by a token limit" in line for line in progress.lines)


# -- refusals -----------------------------------------------------------------------------------


def test_another_judge_under_the_same_name_is_refused_naming_what_differs(label, run):
    label(FakeJudge())
    before = (run.path / "judgements" / "fake.parquet").read_bytes()
    judge = FakeJudge(model="n", params={"top": 2}, seed=1)
    with pytest.raises(
        UserError, match=r"another judge named 'fake' \(differs in model, params, s"
    ):
        label(judge)
    assert judge.asked == [] and (run.path / "judgements" / "fake.parquet").read_bytes() == before
    rows = label(judge, replace=True)
    assert len(rows) == ROWS and len(judge.asked) == ALL and run.labels.judges == ["fake"]
    assert run.labels.record("judgements", "fake")["identity"] == judge.identity


# -- ends ---------------------------------------------------------------------------------------


def test_a_judge_that_gives_up_leaves_what_was_paid_for_and_no_file(label, run, cache):
    judge, progress = FakeJudge(fails_after=7), Recorded()
    with pytest.raises(UserError, match="the server is gone; look after it"):
        label(judge, progress=progress)
    assert len(judge.asked) == 7 == kept(judge, cache) == len(progress.notes)
    assert progress.stopped == 1
    assert run.labels.judges == [] and not (run.path / "judgements").exists()
    again, progress = FakeJudge(), Recorded()
    rows = label(again, progress=progress)
    assert progress.began == ("judging", ALL - 7)
    assert progress.lines == ["7 labels from the cache", f"{ALL - 7} to ask"]
    assert not set(again.asked) & set(judge.asked) and len(again.asked) == ALL - 7
    rows = pd.concat([rows, run.labels.decoys("fake")])
    assert rows["cached"].sum() == 7 and rows["cost"].sum() == 0.25 * ALL
    assert progress.notes[1] == "214 tokens, $0.5000"
    third = FakeJudge()
    assert label(third)["cached"].all() and third.asked == []


def test_items_come_in_batches_no_larger_than_a_judge_takes(label):
    sizes = []

    class Batched(FakeJudge):
        batch = 7

        def judge(self, items):
            sizes.append(len(items))
            return super().judge(items)

    judge = Batched(lambda item, _: Verdict("generic", rationale=item.turn))
    rows = label(judge)
    assert sizes == [7] * (ALL // 7) + [ALL % 7] and len(judge.asked) == ALL
    assert rows["rationale"].tolist() == [f"turn {i}" for i in range(ROWS)]


def test_one_call_labels_from_python_and_what_is_no_judge_is_refused(run):
    turns = judge_package.label(run.path)
    assert turns["category"].tolist() == Run.open(run.path).labelled("builtin")["category"].tolist()
    assert turns["text"].tolist() == run.generations["text"].tolist()
    mine = judge_package.label(run, FakeJudge(paid=False), "mine")
    assert len(mine) == len(turns)
    with pytest.raises(UserError, match="'builtin' is no judge; give a function of an item"):
        judge_package.label(run, "builtin", "third")


def test_a_function_is_a_judge_named_after_it_that_judges_again_when_it_changed(run):
    def ends(category):
        def by_ending(item):
            return FOLLOW_UP if item.turn.endswith("7") else category

        return by_ending

    assert (judge_package.label(run, ends("new_topic"))["follow_up"] == 1).sum() == ROWS // 10
    assert set(judge_package.label(run, ends("generic"))["category"]) == {FOLLOW_UP, "generic"}
    assert run.labels.judges == ["by_ending"]
    with pytest.raises(UserError, match=r"the judge named a category 'yes', .* are follow_up,"):
        judge_package.label(run, lambda item: "yes")
    with pytest.raises(UserError, match=r"another judge named 'by_ending' .*\(replace=True, --rep"):
        judge_package.label(run, FakeJudge(), "by_ending")


def test_a_function_may_say_true_or_false(run):
    def seven(item):
        return np.bool_(item.turn.endswith("7")) if item.turn > "turn 3" else "7" in item.turn

    turns = judge_package.label(run, seven)
    assert set(turns["category"]) == {FOLLOW_UP, "no_follow_up"}
    assert turns["follow_up"].tolist() == [float("7" in text) for text in turns["text"]]
    judged = read_runs([run])
    assert judged.rubric == YES_NO and judged.turns["out_of_role"].isna().all()
    with pytest.raises(UserError, match="the judge own-function returned True or False for some"):
        judge_package.label(run, lambda item: "generic" if item.turn > "turn 3" else True, "said")
    with pytest.raises(UserError, match="the judge own-function returned 1; return True"):
        judge_package.label(run, lambda item: 1, "counted")
    judge_package.label(run, lambda item: True)
    assert "own-function" in run.labels.judges


def test_verdicts_of_the_same_built_in_judge_stay_as_they_are(label, run):
    def again(**options) -> list[str]:
        progress = Recorded()
        label(judge_package.builtin_judge(), progress=progress, **options)
        return progress.lines if progress.began is None else ["judged"]

    assert again() == ["judged"]
    assert again()[0].startswith(f"{ROWS + len(run.decoys('fake'))} labels by fake were there al")
    assert again(replace=True) == again(decoys=1) == ["judged"]


def test_a_judge_that_labels_twice_is_loaded_once(label):
    judge, progress = judge_package.builtin_judge(), Recorded()
    for name in ("one", "two"):
        label(judge, name, progress)
    assert sum("loading the judge" in line for line in progress.lines) == 1


def test_a_judge_whose_module_has_no_name_is_the_user_s(label):
    """As of code that was executed with globals of its own."""
    judge = FakeJudge()
    judge.__class__ = type("Own", (FakeJudge,), {"__module__": None})
    label(judge)
    assert len(label(judge)) == ROWS


def test_progress_moves_by_whole_batches(label):
    """After the first turn of a batch that took all the time, the time left would be wrong."""
    seen = []

    class Counting(Recorded):
        def advance(self, steps: int = 1, note: str = "") -> None:
            seen.append(steps)
            super().advance(steps, note)

    judge = FakeJudge()
    judge.batch = ALL
    label(judge, progress=Counting())
    assert len(seen) == 1 and seen[0] > ROWS / 2
