"""ia-mech rates --by correct: planted runs with known accuracies, rates and associations."""

import json
from dataclasses import dataclass, field

import pandas as pd
import pyarrow as pa
import pytest
import torch
from runs import KEPT, SMALL_VOCAB, record_of, shifted
from shell import call

from ia_mech.errors import UserError
from ia_mech.judge.judging import items_of
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.rates.__main__ import main
from ia_mech.rates.correct import ACCURACY, DIFFERENCE, result
from ia_mech.rates.load import read_runs
from ia_mech.results import Result, read
from ia_mech.run import Run, RunWriter, layout
from ia_mech.run.labels import KEY

GREEDY = {0.0: [0]}
SMALL_MODEL = {"layers": 1, "d_model": 3, "vocab": SMALL_VOCAB}


@dataclass(frozen=True)
class Prompt:
    """One prompt with its response: right or wrong, and which of its user turns are follow-ups."""

    id: str
    right: bool | None = True
    follow_up: dict[float, list[int | None]] = field(default_factory=lambda: GREEDY)
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
        return [{"role": "user", "content": self.query}, {"role": "assistant", "content": response}]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Write a judged run of these prompts."""

    def make(prompts: list[Prompt], model: str = "m", name: str = "", **changed) -> Run:
        folder = tmp_path_factory.mktemp("correct") / (name or model)
        contexts, turns, follow_up = [], [], []
        for order, prompt in enumerate(prompts):
            names = {"context_id": prompt.id, "source_id": prompt.id, "dataset": prompt.dataset}
            names |= {"order": order, "response_unfinished": prompt.unfinished}
            about = {"answer": prompt.answer, "metadata": json.dumps(prompt.metadata)}
            about |= {"response_policy": prompt.policy, "messages": prompt.messages}
            contexts.append(names | about | {"text": json.dumps(prompt.messages)})
            for temperature, labels in prompt.follow_up.items():
                for sample, label in enumerate(labels):
                    turn = {"temperature": temperature, "sample": sample, "text": "And then?"}
                    turn["sampled_tokens"] = 6 * (temperature > 0)
                    turns.append(names | turn)
                    follow_up.append(label)
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
        judge(Run.open(folder), follow_up)
        return Run.open(folder)

    return make


def judge(run: Run, follow_up: list[int | None]) -> None:
    """Verdicts on the turns, and on each shown after the next conversation, where none is."""
    rows, items = [], items_of(run)
    turns = list(run.generations[list(KEY)].itertuples(index=False, name=None))
    contexts = run.contexts["context_id"].tolist()
    for key, item, label in zip(turns, items, follow_up, strict=True):
        category = "cannot_assess" if label is None else FOLLOW_UP if label else "new_topic"
        row = {"repeat": 0, "category": category, "status": "judged", "rationale": "planted"}
        row |= {"follow_up": None if label is None else bool(label), "item": item.id}
        rows.append(dict(zip(KEY, key, strict=True)) | row)
        shown = contexts[(contexts.index(key[0]) + 1) % len(contexts)]
        decoy = {"decoy": "wrong_conversation", "shown": shown, "item": f"{item.id} {shown}"}
        rows.append(rows[-1] | decoy | {"category": "new_topic", "follow_up": False})
    run.labels.write_judgements("builtin", rows, {"identity": {"kind": "builtin"}, "repeats": 1})


def measured(*runs: Run, responses: str = "all") -> tuple[Result, pd.DataFrame]:
    """The result on runs, and its estimates."""
    found = result(read_runs(runs, responses=responses))
    return found, found.estimates


def one(found: pd.DataFrame, quantity: str, **names) -> pd.Series:
    """The row of a quantity and these names."""
    rows = found[found["quantity"] == quantity]
    for column, value in names.items():
        rows = rows[rows[column] == value]
    assert len(rows) == 1, rows
    return rows.iloc[0]


def rate(found: pd.DataFrame, correct: str, temperature: float = 0.0, **names) -> pd.Series:
    return one(found, "rate", correct=correct, temperature=temperature, **names)


def sums(right: int, wrong: int, follow_up=lambda at, right: GREEDY, **options) -> list[Prompt]:
    """Prompts of which the first ones are solved."""
    flags = [True] * right + [False] * wrong
    return [Prompt(f"s{at}", flag, follow_up(at, flag), **options) for at, flag in enumerate(flags)]


UNKNOWN = {"instruction_id_list": ["no:such"], "kwargs": [{}]}
INSTRUCTED = {
    "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
    "kwargs": [{}, {}],
}


def test_the_command_writes_the_planted_accuracy_and_rates(planted, capfd):
    run = planted(sums(3, 5, lambda at, _: {0.0: [at < 2], 1.0: [1, 0, 0, at == 7]}))
    outcome = call(main, [str(run.path), "--by", "correct"], capfd)
    assert outcome.status == 0, outcome.err
    for text in ("0.38 [", "after right responses minus", "greedy", "would have been shown"):
        assert text in outcome.out
    folder = run.path / "results" / "rates-builtin-by-correct"
    found = read(folder).estimates
    accuracy = one(found, ACCURACY, model="m", dataset="sums")
    assert (accuracy["value"], accuracy["rows"], accuracy["sources"]) == (3 / 8, 8, 8)
    assert 0 < accuracy["low"] < 3 / 8 < accuracy["high"] < 1
    for correct, value, rows in (("right", 2 / 3, 3), ("wrong", 0, 5)):
        at = rate(found, correct)
        assert at["value"] == pytest.approx(value) and at["rows"] == rows
        assert one(found, "floor", correct=correct, temperature=0.0)["value"] == 0
        beyond = one(found, "beyond", correct=correct, temperature=0.0)
        assert beyond["value"] == pytest.approx(value) and beyond["rows"] == rows
    assert rate(found, "right", 1.0)["value"] == pytest.approx(3 / 12)
    assert rate(found, "wrong", 1.0)["value"] == pytest.approx(6 / 20)
    responses = pd.read_parquet(folder / "responses.parquet")
    assert responses["correct"].tolist() == [1] * 3 + [0] * 5
    assert responses["answer"].tolist() == ["18"] * 3 + ["19"] * 5
    assert set(responses["gold"]) == {"18"} and set(responses["query"]) == {"What is 9 times 2?"}


def test_the_association_has_its_closed_form(planted):
    run = planted(sums(2, 2, lambda at, right: {0.0: [int(right)], 1.0: [int(right), 1]}))
    _, found = measured(run)
    assert (rate(found, "right")["value"], rate(found, "wrong")["value"]) == (1, 0)
    cold, warm = (one(found, DIFFERENCE, temperature=t) for t in (0.0, 1.0))
    assert (cold["value"], warm["value"]) == (1, 0.5)
    assert cold["low"] < 1 == cold["high"] and cold["test"] == "permutation of queries"
    for row in (cold, warm):  # of the 6 ways to choose the right ones, 2 are as far apart
        assert row["p"] == pytest.approx(1 / 3, abs=0.06)
        assert row["p_holm"] == pytest.approx(2 * min(cold["p"], warm["p"]), abs=0.1)


@pytest.fixture(scope="module")
def mixed(planted) -> Run:
    """Sums of which some are unfinished, instructions, and responses that the data brought along:
    the gold answer says another thing of each of these than the column does."""
    unknown = {"instruction_id_list": ["no:such", "punctuation:no_comma"], "kwargs": [{}, {}]}
    orders = {"answer": None, "dataset": "orders", "follow_up": {0.0: [1]}}
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
    return planted(prompts, "mixed")


def test_unfinished_responses_can_be_left_out(mixed):
    made, found = measured(mixed)
    responses = made.data["responses"]
    sums = responses[responses["dataset"] == "sums"]
    assert sums["correct"].tolist() == [1, 0, 0, 1]
    assert sums["why"].iloc[2] == "unfinished before it states an answer"
    assert one(found, ACCURACY, dataset="sums")["value"] == 0.5
    assert rate(found, "right", dataset="sums")["value"] == 0.5
    assert any("2 of 11 responses are unfinished" in note for note in made.notes)
    made, found = measured(mixed, responses="complete")
    accuracy = one(found, ACCURACY, dataset="sums")
    assert (accuracy["value"], accuracy["rows"]) == (0.5, 2)
    assert rate(found, "right", dataset="sums")["value"] == 1
    assert made.name == "rates-builtin-by-correct-complete"


def test_unassessed_turns_and_unverified_responses_are_left_out_and_noted(mixed):
    made, found = measured(mixed)
    assert rate(found, "right", 1.0, dataset="sums")["rows"] == 1
    responses = made.data["responses"]
    assert responses[responses["dataset"] == "orders"]["correct"].isna().sum() == 1
    accuracy = one(found, ACCURACY, dataset="orders")
    assert (accuracy["value"], accuracy["rows"]) == (1, 1)
    assert rate(found, "right", dataset="orders")["rows"] == 1
    assert one(found, ACCURACY, dataset="(all)")["rows"] == 9
    assert DIFFERENCE not in set(found.loc[found["dataset"] == "(all)", "quantity"])
    assert any("count as neither right nor wrong: " in note for note in made.notes)


def test_given_responses_are_right_where_the_data_say_so(mixed):
    made, found = measured(mixed)
    responses = made.data["responses"]
    given = responses[responses["dataset"] == "given"]
    assert given["correct"].iloc[:4].tolist() == [1, 0, 1, 0]
    assert one(found, ACCURACY, dataset="given")["value"] == 0.5
    assert any(note.startswith("1 of 5 responses of given left out: ") for note in made.notes)


def test_runs_of_one_model_are_pooled_and_a_response_counts_once(planted):
    prompts = sums(1, 2, lambda at, _: {0.0: [at == 0]})
    first = planted(prompts, name="first")
    again = planted(
        [Prompt(p.id, p.right, {0.0: p.follow_up[0.0], 1.0: [1, 1]}) for p in prompts[:2]],
        name="again",
    )
    made, found = measured(first, again)
    assert len(made.data["responses"]) == 3
    assert one(found, ACCURACY)["value"] == pytest.approx(1 / 3)
    assert rate(found, "wrong")["rows"] == 2  # not 3
    warm = rate(found, "right", 1.0)
    assert (warm["value"], warm["rows"]) == (1, 2)


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        (
            [*sums(1, 1, policy="given"), Prompt("c", answer="It depends on what you like.")],
            "which responses of sums are right can't be told; responses that",
        ),
        (
            [Prompt(f"u{n}", metadata=UNKNOWN, answer=None) for n in (0, 1)],
            "can't be told: no:such: IFEval has no such instruction",
        ),
    ],
)
def test_runs_that_say_nothing_of_accuracy_are_refused(planted, prompts, problem):
    with pytest.raises(UserError, match=problem):
        measured(planted(prompts))
