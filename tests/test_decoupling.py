"""ia-mech decoupling: planted runs with known accuracies, rates and associations."""

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

from experiments.decoupling import (
    ACCURACY,
    DIFFERENCE,
    RATE,
    RIGHT,
    WRONG,
    Decoupling,
    main,
    shared_prompts,
    with_model_names,
)
from experiments.tables import estimates_of
from ia_mech.errors import UserError
from ia_mech.judge.judging import items_of
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
    unfinished: bool = False
    policy: str = "generated"

    @property
    def messages(self) -> list[dict]:
        response = self.response or f"The answer is {18 if self.right else 19}."
        return [
            {"role": "user", "content": self.query},
            {"role": "assistant", "content": response},
        ]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Write a judged run of these prompts."""

    def make(prompts: list[Prompt], model: str = "m", name: str = "", **changed) -> Run:
        folder = tmp_path_factory.mktemp("decoupling") / (name or model)
        contexts, turns, genuine = [], [], []
        for order, prompt in enumerate(prompts):
            names = {"context_id": prompt.id, "source_id": prompt.id, "dataset": prompt.dataset}
            names |= {"order": order, "response_unfinished": prompt.unfinished}
            about = {"answer": prompt.answer, "metadata": json.dumps(prompt.metadata)}
            about |= {"response_policy": prompt.policy, "messages": prompt.messages}
            contexts.append(names | about | {"text": json.dumps(prompt.messages)})
            for temperature, labels in prompt.genuine.items():
                for sample, label in enumerate(labels):
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
        category = "cannot_assess" if label is None else GENUINE if label else "new_topic"
        row = {"repeat": 0, "category": category, "status": "judged", "rationale": "planted"}
        row |= {"genuine": None if label is None else bool(label), "item": item.id}
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


UNKNOWN = {"instruction_id_list": ["no:such"], "kwargs": [{}]}
INSTRUCTED = {
    "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
    "kwargs": [{}, {}],
}

# -- one model ----------------------------------------------------------------------------------


def test_the_command_writes_the_planted_accuracy_and_rates(planted, capfd):
    run = planted(sums(3, 5, lambda at, _: {0.0: [at < 2], 1.0: [1, 0, 0, at == 7]}))
    outcome = call(main, [str(run.path), "--resamples", "500"], capfd)
    assert outcome.status == 0, outcome.err
    for text in ("0.38 [", "right less wrong", "greedy", "shown if", "math-verify", "rules"):
        assert text in outcome.out
    folder = run.path / "results" / "decoupling"
    found = pd.read_parquet(folder / "estimates.parquet")
    accuracy = one(found, ACCURACY, model="m", dataset="sums")
    assert (accuracy["value"], accuracy["rows"], accuracy["sources"]) == (3 / 8, 8, 8)
    assert 0 < accuracy["low"] < 3 / 8 < accuracy["high"] < 1
    assert one(found, "unverified")["value"] == one(found, "unfinished")["value"] == 0
    greedy = one(found, RATE, temperature=0.0)
    assert (greedy["value"], greedy["rows"]) == (2 / 8, 8)
    warm = one(found, RATE, temperature=1.0)
    assert warm["value"] == pytest.approx((8 + 1) / 32) and warm["rows"] == 32
    assert set(found["term"]) == {"all responses"}  # none is unfinished
    responses = pd.read_parquet(folder / "responses.parquet")
    assert responses["correct"].tolist() == [1] * 3 + [0] * 5
    assert responses["answer"].tolist() == ["18"] * 3 + ["19"] * 5
    assert set(responses["gold"]) == {"18"} and set(responses["query"]) == {"What is 9 times 2?"}


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


def test_where_all_are_alike_there_is_no_association_and_it_is_said(planted):
    made, found = measured(planted(sums(0, 4)))
    row = one(found, DIFFERENCE, temperature=0.0)
    assert row[["value", "low", "high", "p", "p_holm"]].isna().all() and row["test"] is None
    assert one(found, ACCURACY)["value"] == 0
    sentence, control = made.conclude(found)
    assert "can't be told" in sentence and control


@pytest.fixture(scope="module")
def mixed(planted):
    """Sums of which some are unfinished, instructions, and responses that the data brought along:
    the gold answer says another thing of each of these than the column does."""
    unknown = {"instruction_id_list": ["no:such", "punctuation:no_comma"], "kwargs": [{}, {}]}
    orders = {"answer": None, "dataset": "orders", "genuine": {0.0: [1]}}
    given = {"dataset": "given", "policy": "given"}
    prompts = [
        Prompt("a", True, {0.0: [1], 1.0: [None, 1]}),
        Prompt("b", False, {0.0: [0], 1.0: [0, 0]}),
        Prompt("c", response="9 times 2 makes 18, and 18", unfinished=True),
        Prompt("d", True, {0.0: [0]}, unfinished=True),
        Prompt("e", metadata=unknown, **orders),
        Prompt("f", metadata=INSTRUCTED, response='"None"', **orders),
        *(
            Prompt(f"g{n}", n % 2 == 1, metadata={"correct": value}, **given)
            for n, value in enumerate((True, "false", 1, 0))
        ),
        Prompt("x", **given),
    ]
    return measured(planted(prompts, "mixed"))


def test_unfinished_responses_are_shown_apart(mixed):
    made, found = mixed
    sums = made.responses[made.responses["dataset"] == "sums"]
    assert sums["correct"].tolist() == [1, 0, 0, 1]
    assert sums["why"].iloc[2] == "unfinished before it states an answer"
    about = {"dataset": "sums"}
    assert (
        one(found, ACCURACY, **about)["value"] == one(found, "unfinished", **about)["value"] == 0.5
    )
    complete = one(found, ACCURACY, term="complete responses", **about)
    assert (complete["value"], complete["rows"]) == (0.5, 2)
    about["temperature"] = 0.0
    assert one(found, RATE, **about)["value"] == 0.25
    assert one(found, RATE, term="complete responses", **about)["value"] == 0.5
    assert any("responses are unfinished" in note for note in made.notes)


def test_unassessed_turns_and_unverified_responses_are_left_out_and_noted(mixed):
    made, found = mixed
    assert one(found, RATE, temperature=1.0, dataset="sums")["rows"] == 3
    assert one(found, "unverified", dataset="orders")["value"] == 0.5
    accuracy = one(found, ACCURACY, dataset="orders")
    assert (accuracy["value"], accuracy["rows"]) == (1, 1)
    assert one(found, RIGHT, dataset="orders")["rows"] == 1
    assert one(found, ACCURACY, dataset="(all)")["rows"] == 9
    assert DIFFERENCE not in set(found.loc[found["dataset"] == "(all)", "quantity"])
    assert any(" user turns were not assessed." in note for note in made.notes)
    assert any("count as neither right nor wrong: " in note for note in made.notes)


def test_given_responses_are_right_where_the_data_say_so(mixed):
    made, found = mixed
    given = made.responses[made.responses["dataset"] == "given"]
    assert given["correct"].tolist() == [1, 0, 1, 0]
    assert one(found, ACCURACY, dataset="given")["value"] == 0.5
    assert any(note.startswith("1 of 5 responses of given left out: ") for note in made.notes)


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


def test_two_sets_of_weights_with_one_name_are_kept_apart():
    weights = ["hash of m", "0123456789", "other"]
    contexts = pd.DataFrame({"name": ["m", "m", "n"], "weights_hash": weights})
    assert with_model_names(contexts)["model"].tolist() == ["m hash of ", "m 01234567", "n"]


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        (
            [*sums(1, 1, policy="given"), Prompt("c", answer="It depends on what you like.")],
            "nothing says which responses of sums are right; verifying takes",
        ),
        (
            [Prompt(f"u{n}", metadata=UNKNOWN, answer=None) for n in (0, 1)],
            "none of the 2 responses could be verified: no:such: IFEval has no such instruction",
        ),
    ],
)
def test_runs_that_say_nothing_of_accuracy_are_refused(planted, prompts, problem):
    with pytest.raises(UserError, match=problem):
        measured(planted(prompts))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["sums/s0", "more/s0"], "no prompts in common .one: sums, two: more"),
        (["sums/s0", "sums/t0"], "no prompts in common .one: sums, two: sums"),
        (["sums/s0", "sums/s0"], "'s0' of sums has several texts"),
    ],
)
def test_models_without_common_prompts_are_refused(names, problem):
    contexts = pd.DataFrame([name.split("/") for name in names], columns=["dataset", "source_id"])
    contexts = contexts.assign(source=names, model=["one", "two"], prompt=["9?", "9 times 2?"])
    with pytest.raises(UserError, match=problem):
        shared_prompts(contexts, [])


def test_a_judge_has_to_be_chosen(planted):
    run = planted(sums(1, 1))
    judge(run, [1, 0], "other")
    with pytest.raises(UserError, match="there are verdicts of other, rules; choose"):
        measured(run)
    _, found = measured(run, judge="other")
    assert one(found, RATE)["value"] == 0.5
    shutil.rmtree(run.path / "judgements")
    with pytest.raises(UserError, match="has not been judged; run: ia-mech judge"):
        measured(Run.open(run.path))
