"""python -m experiments.decoupling: planted runs with known accuracies, rates and associations."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
import torch
from runs import KEPT, SMALL_VOCAB, record_of, shifted
from shell import call

from experiments.decoupling import ACCURACY, DIFFERENCE, RATE, RIGHT, WRONG, Decoupling, main
from experiments.tables import estimates_of
from ia_mech.errors import UserError
from ia_mech.judge.label import items_of
from ia_mech.judge.rubric import GENUINE
from ia_mech.run import Run, RunWriter, layout
from ia_mech.run.labels import KEY

GREEDY = {0.0: [0]}
SMALL_MODEL = {"layers": 1, "d_model": 3, "vocab": SMALL_VOCAB}


@dataclass(frozen=True)
class Prompt:
    """One prompt with its response: right or wrong, and which of its user turns are genuine."""

    id: str
    right: bool | None = True
    genuine: dict[float, list[int | None]] = field(default_factory=lambda: GREEDY)
    dataset: str = "sums"
    query: str = "What is 9 times 2?"
    answer: str | None = "18"
    metadata: dict = field(default_factory=dict)
    response: str | None = None
    cut_off: bool = False
    policy: str = "generated"

    @property
    def messages(self) -> list[dict]:
        said = self.response or f"The answer is {18 if self.right else 19}."
        return [
            {"role": "user", "content": self.query},
            {"role": "assistant", "content": said},
        ]


@pytest.fixture
def planted(tmp_path):
    """Write a judged run of these prompts."""

    def make(prompts: list[Prompt], model: str = "m", name: str = "", **changed) -> Run:
        folder = tmp_path / (name or model)
        contexts, turns, genuine = [], [], []
        for order, prompt in enumerate(prompts):
            names = {"context_id": prompt.id, "source_id": prompt.id, "dataset": prompt.dataset}
            names |= {"order": order, "response_cut_off": prompt.cut_off}
            asked = {"answer": prompt.answer, "metadata": json.dumps(prompt.metadata)}
            asked |= {"response_policy": prompt.policy, "messages": prompt.messages}
            contexts.append(names | asked | {"text": json.dumps(prompt.messages)})
            for temperature, said in prompt.genuine.items():
                for sample, label in enumerate(said):
                    turn = {"temperature": temperature, "sample": sample, "text": "And then?"}
                    turns.append(names | turn)
                    genuine.append(label)
        described = {"name": model, "weights_hash": f"hash of {model}", **SMALL_MODEL, **changed}
        decoding = {"response": "generate", "max_response_tokens": 64, "temperatures": (1.0,)}
        record = record_of(1, positions=KEPT, model=described, limit=len(prompts), **decoding)
        record["identity"]["of"] = name
        with RunWriter(folder, record) as run:
            run.start_session({"machine": "test"})
            run.add_contexts(
                *layout.part_names(1),
                pa.Table.from_pylist(contexts, schema=layout.contexts_schema(KEPT)),
                pa.Table.from_pylist(turns, schema=layout.GENERATIONS),
                shifted(torch.zeros(len(prompts), SMALL_VOCAB)),
                torch.zeros(len(prompts), 2, len(KEPT), 3),
            )
            run.finish()
        judge(Run.open(folder), genuine)
        return Run.open(folder)

    return make


def judge(run: Run, genuine: list[int | None], name: str = "rules") -> None:
    rows = []
    turns = run.generations[list(KEY)].itertuples(index=False, name=None)
    for key, item, label in zip(turns, items_of(run), genuine, strict=True):
        said = "cannot_assess" if label is None else GENUINE if label else "new_topic"
        row = {"repeat": 0, "category": said, "status": "judged", "rationale": "planted"}
        row |= {"genuine": None if label is None else bool(label), "item": item.key("", 0)[:16]}
        rows.append(dict(zip(KEY, key, strict=True)) | row)
    run.labels.write_judgements(name, rows, {"identity": {"kind": name}, "repeats": 1})


def measured(*runs: Run, judge: str | None = None) -> tuple[Decoupling, pd.DataFrame]:
    """The experiment on runs, and its estimates."""
    words = [*(str(run.path) for run in runs), *(("--judge", judge) if judge else ())]
    args = Decoupling.build_parser().parse_args([*words, "--resamples", "500"])
    made = Decoupling(list(runs), args, Path())
    made.check()
    return made, estimates_of(made.estimate(made.rows()), made.columns, 0.95)


def one(found: pd.DataFrame, quantity: str, **names) -> pd.Series:
    """The row of a quantity, of all responses unless said otherwise."""
    rows = found[found["quantity"] == quantity]
    for column, value in ({"term": "all responses"} | names).items():
        rows = rows[rows[column] == value]
    assert len(rows) == 1, rows
    return rows.iloc[0]


def sums(right: int, wrong: int, genuine=lambda at, right: GREEDY, **options) -> list[Prompt]:
    """Prompts of which the first ones are solved."""
    flags = [True] * right + [False] * wrong
    return [Prompt(f"s{at}", flag, genuine(at, flag), **options) for at, flag in enumerate(flags)]


INSTRUCTED = {
    "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
    "kwargs": [{}, {}],
}

# -- one model ----------------------------------------------------------------------------------


def test_accuracy_and_rates_are_the_planted_ones(planted):
    run = planted(sums(3, 5, lambda at, _: {0.0: [at < 2], 1.0: [1, 0, 0, at == 7]}))
    _, found = measured(run)
    accuracy = one(found, ACCURACY, model="m", dataset="sums")
    assert (accuracy["value"], accuracy["rows"], accuracy["sources"]) == (3 / 8, 8, 8)
    assert 0 < accuracy["low"] < 3 / 8 < accuracy["high"] < 1
    assert one(found, "unverified")["value"] == one(found, "cut off")["value"] == 0
    greedy = one(found, RATE, temperature=0.0)
    assert (greedy["value"], greedy["rows"]) == (2 / 8, 8)
    warm = one(found, RATE, temperature=1.0)
    assert warm["value"] == pytest.approx((8 + 1) / 32) and warm["rows"] == 32
    assert set(found["term"]) == {"all responses"}  # none was cut off


def test_the_association_has_its_closed_form(planted):
    run = planted(sums(2, 2, lambda at, right: {0.0: [int(right)], 1.0: [int(right), 1]}))
    _, found = measured(run)
    assert one(found, RIGHT, temperature=0.0)["value"] == 1
    assert one(found, WRONG, temperature=0.0)["value"] == 0
    cold, warm = (one(found, DIFFERENCE, temperature=t) for t in (0.0, 1.0))
    assert (cold["value"], warm["value"]) == (1, 0.5)
    assert cold["low"] < 1 == cold["high"] and cold["test"] == "permutation of sources"
    for row in (cold, warm):  # of the 6 ways to choose the right ones, 2 are as far apart
        assert row["p"] == pytest.approx(1 / 3, abs=0.06)
        assert row["p_holm"] == pytest.approx(2 * min(cold["p"], warm["p"]), abs=0.1)
        assert row["detectable"] > 0


@pytest.mark.parametrize("right", [4, 0])
def test_where_all_are_alike_there_is_no_association_and_it_is_said(planted, right):
    made, found = measured(planted(sums(right, 4 - right)))
    row = one(found, DIFFERENCE, temperature=0.0)
    assert row[["value", "low", "high", "p", "p_holm"]].isna().all() and row["test"] is None
    assert one(found, ACCURACY)["value"] == right / 4
    sentence, control = made.conclude(found)
    assert "can't be told" in sentence and control


def test_cut_off_responses_are_told_apart(planted):
    prompts = [
        Prompt("a", True, {0.0: [1]}),
        Prompt("b", False, {0.0: [0]}),
        Prompt("c", response="9 times 2 makes 18, and 18", cut_off=True, genuine={0.0: [0]}),
        Prompt("d", True, {0.0: [0]}, cut_off=True),
    ]
    made, found = measured(planted(prompts))
    assert made.responses["correct"].tolist() == [1, 0, 0, 1]
    assert made.responses["why"].iloc[2] == "cut off before it states an answer"
    assert one(found, ACCURACY)["value"] == one(found, "cut off")["value"] == 0.5
    complete = one(found, ACCURACY, term="complete responses")
    assert (complete["value"], complete["rows"]) == (0.5, 2)
    assert one(found, RATE)["value"] == 0.25
    assert one(found, RATE, term="complete responses")["value"] == 0.5
    assert any("2 of 4 responses were cut off by the token" in note for note in made.notes)


def test_unassessed_turns_and_unverified_responses_are_left_out_and_noted(planted):
    open_one = {"instruction_id_list": ["no:such", "punctuation:no_comma"], "kwargs": [{}, {}]}
    told = {"answer": None, "dataset": "told"}
    prompts = [
        Prompt("a", True, {0.0: [1], 1.0: [None, 1]}),
        Prompt("b", False, {0.0: [0], 1.0: [0, 0]}),
        Prompt("c", genuine={0.0: [1]}, metadata=open_one, **told),
        Prompt("d", genuine={0.0: [1]}, metadata=INSTRUCTED, response='"None"', **told),
    ]
    made, found = measured(planted(prompts))
    assert one(found, RATE, temperature=1.0, dataset="sums")["rows"] == 3
    assert one(found, "unverified", dataset="told")["value"] == 0.5
    accuracy = one(found, ACCURACY, dataset="told")
    assert (accuracy["value"], accuracy["rows"]) == (1, 1)
    assert one(found, RIGHT, dataset="told")["rows"] == 1
    assert one(found, ACCURACY, dataset="(all)")["rows"] == 3
    assert DIFFERENCE not in set(found.loc[found["dataset"] == "(all)", "quantity"])
    assert "1 of 8 user turns were not assessed." in made.notes
    assert any("count as neither right nor wrong: " in note for note in made.notes)


def test_given_responses_are_right_where_the_data_say_so(planted):
    """The gold answer says another thing of each: it is the column that counts."""
    said = [True, "false", 1, 0]
    prompts = [
        Prompt(f"g{n}", not bool(n % 2 == 0), metadata={"correct": value}, policy="given")
        for n, value in enumerate(said)
    ]
    made, found = measured(planted([*prompts, Prompt("x", policy="given")]))
    assert made.responses["correct"].tolist() == [1, 0, 1, 0]
    assert one(found, ACCURACY)["value"] == 0.5
    assert any(note.startswith("1 of 5 responses of sums left out: ") for note in made.notes)


def test_runs_of_one_model_are_pooled_and_a_response_counts_once(planted):
    prompts = sums(1, 2, lambda at, _: {0.0: [at == 0]})
    first = planted(prompts, name="first")
    again = planted(
        [Prompt(p.id, p.right, {0.0: p.genuine[0.0], 1.0: [1, 1]}) for p in prompts[:2]],
        name="again",
    )
    made, found = measured(first, again)
    assert len(made.responses) == 3
    assert one(found, ACCURACY)["value"] == pytest.approx(1 / 3)
    assert one(found, RATE, temperature=0.0)["rows"] == 3  # not 5
    warm = one(found, RIGHT, temperature=1.0)
    assert (warm["value"], warm["rows"]) == (1, 2)


# -- several models -----------------------------------------------------------------------------


def test_models_are_compared_on_the_prompts_they_share(planted):
    first = planted(sums(2, 2, lambda at, _: {0.0: [at == 3]}), "one")
    second = planted(sums(0, 3), "two")
    made, found = measured(first, second)
    assert made.responses.groupby("model").size().to_dict() == {"one": 3, "two": 3}
    assert "sums: the 3 of 4 prompts that all models share." in made.notes
    assert one(found, ACCURACY, model="one")["value"] == pytest.approx(2 / 3)
    assert one(found, RATE, model="one")["value"] == 0  # s3's isn't shared
    alone, _ = measured(first)
    assert len(alone.responses) == 4 and not any("share" in note for note in alone.notes)


def test_two_sets_of_weights_with_one_name_are_kept_apart(planted):
    first = planted(sums(1, 1), "m", name="first")
    second = planted(sums(2, 0), "m", name="second", weights_hash="0123456789")
    made, _ = measured(first, second)
    assert set(made.responses["model"]) == {"m 01234567", "m hash of "}


# -- the command ----------------------------------------------------------------------------------


def test_the_command_writes_what_is_estimated(planted, capfd):
    run = planted(sums(2, 3, lambda at, _: {0.0: [at == 0], 1.0: [1, 0]}))
    outcome = call(main, [str(run.path), "--resamples", "500"], capfd)
    assert outcome.status == 0, outcome.err
    folder = run.path / "results" / "decoupling"
    for text in ("0.40 [", "right less wrong", "greedy", "shown if", "math-verify", "rules"):
        assert text in outcome.out
    found = pd.read_parquet(folder / "estimates.parquet")
    pd.testing.assert_frame_equal(found, measured(run)[1], check_dtype=False)
    responses = pd.read_parquet(folder / "responses.parquet")
    assert responses["correct"].tolist() == [1, 1, 0, 0, 0]
    assert responses["answer"].tolist() == ["18", "18", "19", "19", "19"]
    assert set(responses["gold"]) == {"18"} and set(responses["query"]) == {"What is 9 times 2?"}


# -- what is refused, and what is left out --------------------------------------------------------

CHAT = {"dataset": "chat", "answer": "It depends on what you like."}
UNKNOWN = {"metadata": {"instruction_id_list": ["no:such"], "kwargs": [{}]}, "answer": None}


@pytest.mark.parametrize(
    ("prompts", "line"),
    [
        (sums(1, 1, policy="given"), "nothing says which responses of sums are right; verifying"),
        ([Prompt("c", **CHAT)], "nothing says which responses of chat are right; verifying takes"),
        (
            [Prompt("u0", **UNKNOWN), Prompt("u1", **UNKNOWN)],
            "none of the 2 responses could be verified: no:such: IFEval has no such instruction",
        ),
    ],
)
def test_runs_that_say_nothing_of_accuracy_are_refused(planted, prompts, line):
    with pytest.raises(UserError) as refused:
        measured(planted(prompts))
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        ([Prompt("s0", dataset="more")], "no prompts in common (one: sums, two: more)"),
        ([Prompt("t0")], "the models have no prompts in common (one: sums, two: sums)"),
        (
            [Prompt("s0"), Prompt("s1", query="What is 9 times 3?")],
            "'s1' of sums has several texts",
        ),
    ],
)
def test_models_without_common_prompts_are_refused(planted, others, problem):
    with pytest.raises(UserError) as refused:
        measured(planted(sums(1, 1), "one"), planted(others, "two"))
    assert problem in refused.value.problem


def test_a_judge_has_to_be_chosen(planted):
    run = planted(sums(1, 1))
    judge(run, [1, 0], "other")
    with pytest.raises(UserError, match="there are verdicts of other, rules; choose"):
        measured(run)
    _, found = measured(run, judge="other")
    assert one(found, RATE)["value"] == 0.5
    shutil.rmtree(run.path / "judgements")
    with pytest.raises(UserError, match="has not been judged; run: python"):
        measured(Run.open(run.path))
