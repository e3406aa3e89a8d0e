"""python -m experiments.decoupling: planted runs with known accuracies, rates and associations."""

import json
import shutil
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from runs import KEPT, SMALL_VOCAB, record_of, shifted
from shell import call, files

from experiments.decoupling.__main__ import main
from experiments.decoupling.analyse import DIFFERENCE, RANK, estimates, remarks
from experiments.decoupling.read import read
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
    perturbation: str | None = None

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
            names |= {"order": order, "perturbation": prompt.perturbation}
            names["response_cut_off"] = prompt.cut_off
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


def one(found: pd.DataFrame, quantity: str, **names) -> pd.Series:
    """The row of a quantity, of all responses unless said otherwise."""
    rows = found[found["quantity"] == quantity]
    for column, value in ({"of": "all responses"} | names).items():
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
    found = estimates(read([run]), resamples=100)
    accuracy = one(found, "accuracy", model="m", dataset="sums")
    assert (accuracy["value"], accuracy["rows"], accuracy["sources"]) == (3 / 8, 8, 8)
    assert 0 < accuracy["low"] < 3 / 8 < accuracy["high"] < 1
    assert one(found, "unverified")["value"] == one(found, "cut off")["value"] == 0
    greedy = one(found, "follow-up rate", temperature=0.0)
    assert (greedy["value"], greedy["rows"]) == (2 / 8, 8)
    warm = one(found, "follow-up rate", temperature=1.0)
    assert warm["value"] == pytest.approx((8 + 1) / 32) and warm["rows"] == 32
    assert warm["low"] < warm["value"] < warm["high"]
    assert set(found["of"]) == {"all responses"}  # none was cut off


def test_the_association_has_its_closed_form(planted):
    run = planted(sums(2, 2, lambda at, right: {0.0: [int(right)], 1.0: [int(right), 1]}))
    found = estimates(read([run]), resamples=2000)
    assert one(found, "follow-up rate, right", temperature=0.0)["value"] == 1
    assert one(found, "follow-up rate, wrong", temperature=0.0)["value"] == 0
    cold, warm = (one(found, DIFFERENCE, temperature=t) for t in (0.0, 1.0))
    assert (cold["value"], warm["value"]) == (1, 0.5)
    assert cold["low"] < 1 == cold["high"] and cold["test"] == "permutation of sources"
    for row in (cold, warm):  # of the 6 ways to choose the right ones, 2 are as far apart
        assert row["p"] == pytest.approx(1 / 3, abs=0.04)
        assert row["p_holm"] == pytest.approx(2 * min(cold["p"], warm["p"]), abs=0.1)
    area = one(found, "AUROC of being right", temperature=0.0)
    assert area["value"] == 1 and np.isnan(area["low"]) and area["method"] == "no spread in a group"


def test_an_auroc_with_spread_in_both_groups_has_an_interval(planted):
    shares = {True: [3, 2, 4, 1, 3, 2, 4, 3], False: [1, 2, 0, 1, 3, 0, 1, 2]}
    prompts = sums(8, 8, lambda at, right: {1.0: [i < shares[right][at % 8] for i in range(4)]})
    found = estimates(read([planted(prompts)]), resamples=200)
    won = [(a > b) + (a == b) / 2 for a in shares[True] for b in shares[False]]
    area = one(found, "AUROC of being right", temperature=1.0)
    assert area["value"] == pytest.approx(np.mean(won))
    assert 0.5 < area["low"] < area["value"] < area["high"] <= 1


@pytest.mark.parametrize(("right", "what"), [(4, "right"), (0, "wrong")])
def test_where_all_are_alike_there_is_no_association_and_a_note(planted, right, what):
    found = estimates(read([planted(sums(right, 4 - right))]), resamples=100)
    row = one(found, DIFFERENCE, temperature=0.0)
    assert row[["value", "low", "high", "p", "p_holm"]].isna().all() and row["test"] is None
    assert row["method"] == "one group is empty"
    assert one(found, "accuracy")["value"] == right / 4
    assert remarks(found)[0] == (
        f"m on sums: all responses are {what}, so whether being right goes with following up "
        "can't be tested."
    )


def test_cut_off_responses_are_told_apart(planted):
    prompts = [
        Prompt("a", True, {0.0: [1]}),
        Prompt("b", False, {0.0: [0]}),
        Prompt("c", response="9 times 2 makes 18, and 18", cut_off=True, genuine={0.0: [0]}),
        Prompt("d", True, {0.0: [0]}, cut_off=True),
    ]
    measured = read([planted(prompts)])
    assert measured.responses["correct"].tolist() == [1, 0, 0, 1]
    assert measured.responses["why"][2] == "cut off before it states an answer"
    found = estimates(measured, resamples=100)
    assert one(found, "accuracy")["value"] == one(found, "cut off")["value"] == 0.5
    complete = one(found, "accuracy", of="complete responses")
    assert (complete["value"], complete["rows"]) == (0.5, 2)
    assert one(found, "follow-up rate")["value"] == 0.25
    assert one(found, "follow-up rate", of="complete responses")["value"] == 0.5
    assert any(
        note.startswith("2 of 4 responses were cut off by the token") for note in measured.notes
    )


def test_each_kind_of_responses_is_a_family_of_tests(planted):
    prompts = [
        Prompt(f"{right}{n}", right, {0.0: [right], 1.0: [right]}, cut_off=n == 0)
        for right in (True, False)
        for n in range(4)
    ]
    found = estimates(read([planted(prompts)]), resamples=1000)
    rows = found[found["quantity"] == DIFFERENCE]
    assert len(rows) == 4
    for _, family in rows.groupby("of"):
        smallest = family["p"].min()
        assert family["p_holm"].min() == pytest.approx(2 * smallest)  # 2 tests, not 4


def test_unassessed_turns_and_unverified_responses_are_left_out_and_noted(planted):
    open_one = {"instruction_id_list": ["no:such"], "kwargs": [{}]}
    told = {"answer": None, "dataset": "told"}
    prompts = [
        Prompt("a", True, {0.0: [1], 1.0: [None, 1]}),
        Prompt("b", False, {0.0: [0], 1.0: [0, 0]}),
        Prompt("c", genuine={0.0: [1]}, metadata=open_one, **told),
        Prompt("d", genuine={0.0: [1]}, metadata=INSTRUCTED, response='"None"', **told),
    ]
    measured = read([planted(prompts)])
    found = estimates(measured, resamples=100)
    assert one(found, "follow-up rate", temperature=1.0)["rows"] == 3
    assert one(found, "unverified", dataset="told")["value"] == 0.5
    accuracy = one(found, "accuracy", dataset="told")
    assert (accuracy["value"], accuracy["rows"]) == (1, 1)
    assert one(found, "follow-up rate, right", dataset="told")["rows"] == 1
    assert "1 of 8 user turns were not assessed and are left out." in measured.notes
    assert (
        "1 of 2 responses of told could not be verified and count as neither right nor wrong: "
        "no:such: no verifier knows this instruction (1)."
    ) in measured.notes
    assert sum("responses verified by" in note for note in measured.notes) == 2


def test_instructions_are_counted_whole_singly_and_loosely(planted):
    said = ['"Both"', '"One, two"', "None, no", 'Sure:\n"Loose"']
    prompts = [
        Prompt(f"i{n}", answer=None, metadata=INSTRUCTED, response=text)
        for n, text in enumerate(said)
    ]
    found = estimates(read([planted(prompts)]), resamples=100)
    assert one(found, "accuracy")["value"] == 1 / 4
    assert one(found, "accuracy, loose")["value"] == 2 / 4
    single = one(found, "instructions followed")
    assert (single["value"], single["rows"], single["sources"]) == ((2 + 1 + 0 + 1) / 8, 8, 4)
    assert one(found, "instructions followed, loosely")["value"] == (2 + 1 + 0 + 2) / 8


def test_runs_of_one_model_are_pooled_and_a_response_counts_once(planted):
    prompts = sums(1, 2, lambda at, _: {0.0: [at == 0]})
    first = planted(prompts, name="first")
    again = planted(
        [Prompt(p.id, p.right, {0.0: p.genuine[0.0], 1.0: [1, 1]}) for p in prompts[:2]],
        name="again",
    )
    measured = read([first, again])
    assert measured.models == ["m"] and len(measured.responses) == 3
    found = estimates(measured, resamples=100)
    assert one(found, "accuracy")["value"] == pytest.approx(1 / 3)
    assert one(found, "follow-up rate", temperature=0.0)["rows"] == 3  # not 5
    warm = one(found, "follow-up rate, right", temperature=1.0)
    assert (warm["value"], warm["rows"]) == (1, 2)


# -- several models -----------------------------------------------------------------------------


def models(planted, accuracies, rates, prompts: int = 10) -> list[Run]:
    """Runs of models that solve so many of their prompts and follow up after so many."""
    return [
        planted(
            sums(right, prompts - right, lambda at, _, n=genuine: {0.0: [at < n]}), f"model-{at}"
        )
        for at, (right, genuine) in enumerate(zip(accuracies, rates, strict=True))
    ]


def test_a_rank_correlation_takes_four_models(planted):
    """One of six pairs is the other way round, all are, or rates are alike and there is none."""
    runs = models(planted, [1, 3, 6, 9], [0, 2, 5, 4])
    measured = read(runs)
    found = estimates(measured, resamples=300)
    row = one(found, RANK, dataset="sums", temperature=0.0)
    assert row["value"] == pytest.approx((5 - 1) / 6)
    assert (row["rows"], row["sources"], row["model"]) == (4, 10, "")
    assert row["p"] == pytest.approx(8 / 24) and row["test"] == "permutation of models"
    assert row["low"] <= row["value"] <= row["high"] and row["low"] < row["high"]
    assert any(note.startswith(f"{RANK}: Kendall's") for note in remarks(found))
    accuracy = found[found["quantity"] == "accuracy"].set_index("model")["value"]
    assert accuracy.tolist() == [0.1, 0.3, 0.6, 0.9]
    order = measured.turns["model"].str[-1].astype(int)
    for genuine, value, p in ((order == 0, -(3**0.5) / 6**0.5, 0.5), (0 * order, None, None)):
        turns = measured.turns.assign(genuine=genuine.astype(float))
        row = one(estimates(replace(measured, turns=turns), resamples=100), RANK)
        if value is None:
            assert row[["value", "low", "high", "p"]].isna().all() and pd.isna(row["test"])
        else:
            assert (row["value"], row["p"]) == (pytest.approx(value), pytest.approx(p))
    three = estimates(read(runs[:3]), resamples=100)
    assert RANK not in set(three["quantity"])
    assert remarks(three)[-1] == (
        "sums: no rank correlation over models, which takes at least 4 on the same prompts; "
        "there are 3."
    )


def test_models_are_compared_on_the_prompts_they_share(planted):
    first = planted(sums(2, 2, lambda at, _: {0.0: [at == 3]}), "one")
    second = planted(sums(0, 3), "two")
    measured = read([first, second])
    assert measured.responses.groupby("model").size().to_dict() == {"one": 3, "two": 3}
    assert "sums: the 3 of 4 prompts that all models share." in measured.notes
    found = estimates(measured, resamples=100)
    assert one(found, "accuracy", model="one")["value"] == pytest.approx(2 / 3)
    assert one(found, "follow-up rate", model="one")["value"] == 0  # s3's isn't shared
    alone = read([first])
    assert len(alone.responses) == 4 and not any("share" in note for note in alone.notes)


def test_names_and_datasets_that_models_do_not_share_are_kept_apart(planted):
    first = planted([*sums(1, 1), Prompt("x", dataset="more")], "m", name="first")
    second = planted(sums(2, 0), "m", name="second", weights_hash="0123456789")
    measured = read([first, second])
    assert measured.models == ["m 01234567", "m hash of "]
    found = estimates(measured, resamples=100)
    assert one(found, "accuracy", dataset="more")["model"] == "m hash of "


# -- the command ----------------------------------------------------------------------------------


def test_the_command_writes_what_is_estimated(planted, capfd):
    run = planted(sums(2, 3, lambda at, _: {0.0: [at == 0], 1.0: [1, 0]}))
    outcome = call(main, [str(run.path), "--resamples", "100"], capfd)
    assert outcome.status == 0, outcome.err
    folder = run.path / "results" / "decoupling"
    assert sorted(files(folder)) == [
        *("association.pdf", "association.png", "association.svg"),
        *("estimates.parquet", "responses.parquet", "result.json"),
        *("scatter.pdf", "scatter.png", "scatter.svg"),
    ]
    for text in ("0.40 [", "right less wrong", "greedy", "no rank correlation", "math-verify"):
        assert text in outcome.out
    found = pd.read_parquet(folder / "estimates.parquet")
    again = estimates(read([run]), resamples=100)
    pd.testing.assert_frame_equal(found, again, check_dtype=False)
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
        (
            sums(1, 1, policy="given"),
            "the 2 responses in {} were given, not written by m: they say nothing of how accurate "
            "it is; sample with --response generate",
        ),
        (
            sums(1, 1, perturbation="typos"),
            "all 2 contexts of {} are perturbed; give a run of plain prompts",
        ),
        (
            [Prompt("c", **CHAT)],
            "nothing says which responses of chat are right; verifying takes a gold answer that is "
            "one number or formula (--answer-column), or IFEval's columns instruction_id_list and "
            "kwargs",
        ),
        (
            [Prompt("u0", **UNKNOWN), Prompt("u1", **UNKNOWN)],
            "none of the 2 responses could be verified: no:such: no verifier knows this "
            "instruction (2); give runs of prompts that can be, or install what is missing",
        ),
        (
            [Prompt("a", genuine={0.0: [None]}), Prompt("b", genuine={0.0: [1]}, policy="given")],
            "'rules' assessed no user turn after these responses; judge again, "
            "or choose another with --judge",
        ),
    ],
)
def test_runs_that_say_nothing_of_accuracy_are_refused(planted, prompts, line):
    run = planted(prompts)
    with pytest.raises(UserError) as refused:
        read([run])
    assert str(refused.value) == line.format(run.path)


@pytest.mark.parametrize(
    ("odd", "note"),
    [
        ({"policy": "given"}, "1 of 4 responses in {} were given, not written by the model, and"),
        ({"perturbation": "typos"}, "1 of 4 contexts in {} are perturbed and are left out."),
        (CHAT, "chat left out: nothing says what is right."),
        ({"answer": None}, "1 of 4 responses of sums left out: their gold answer is missing or is"),
    ],
)
def test_contexts_that_say_nothing_of_accuracy_are_left_out_with_a_note(planted, odd, note):
    run = planted([*sums(1, 1), Prompt("x", **odd), Prompt("s8", perturbation="none")])
    measured = read([run])
    assert measured.responses["source_id"].tolist() == ["s0", "s1", "s8"]
    assert len(measured.turns) == 3
    assert any(one.startswith(note.format(run.path)) for one in measured.notes)


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        (
            [Prompt("s0", dataset="more")],
            "the models have no dataset in common (one: sums, two: more)",
        ),
        ([Prompt("t0")], "the models have no prompt of sums in common"),
        (
            [Prompt("s0"), Prompt("s1", query="What is 9 times 3?")],
            "prompt 's1' of sums has another text in {} than in {}",
        ),
        (
            [Prompt("s0"), Prompt("s1", answer="27")],
            "prompt 's1' of sums has another gold answer in {} than in {}",
        ),
    ],
)
def test_models_without_common_prompts_are_refused(planted, others, problem):
    runs = planted(sums(1, 1), "one"), planted(others, "two")
    with pytest.raises(UserError) as refused:
        read(list(runs))
    assert refused.value.problem == problem.format(runs[1].path, runs[0].path)


def test_the_judge_must_be_there_and_people_s_labels_do_not_matter(planted):
    run = planted(sums(1, 1))
    label = dict(zip(KEY, run.generations[list(KEY)].iloc[0], strict=True))
    label |= {"category": GENUINE, "genuine": True, "inclusion_probability": 1.0}
    for person in ("anna", "ben"):
        run.labels.write_annotations(person, [label], {})
    with pytest.raises(UserError, match="has no verdicts of 'nobody'"):
        read([run], "nobody")
    judge(run, [1, 0], "other")
    with pytest.raises(UserError, match="there are verdicts of other, rules; choose"):
        read([run])
    assert read([run], "other").turns["genuine"].tolist() == [1, 0]
    shutil.rmtree(run.path / "judgements")
    with pytest.raises(UserError, match="has not been judged; run: python"):
        read([run])
