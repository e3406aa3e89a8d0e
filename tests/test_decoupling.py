"""python -m experiments.decoupling: planted runs with known accuracies, rates and associations."""

import json
import shutil
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from runs import KEPT, VOCAB, snapshot_in
from shell import Outcome, call, files, refusal

from experiments.decoupling.__main__ import main
from experiments.decoupling.analyse import DIFFERENCE, RANK, estimates, remarks
from experiments.decoupling.read import read
from experiments.decoupling.show import scatter
from ia_mech.collect.rows import stored_logits
from ia_mech.judge.label import items_of
from ia_mech.judge.rubric import GENUINE
from ia_mech.run import Run, RunWriter, layout
from ia_mech.run.labels import KEY

GREEDY = {0.0: [0]}


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
        identity = {
            "config": {
                "header_logits": "full",
                "grid": {"seed": 0, "max_new_tokens": 8},
                **{"system": None, "thinking": "template", "response": "generate"},
                **{"date": "2026-01-01", "max_response_tokens": 64},
            },
            "model": {"name": model, "weights_hash": f"hash of {model}", "dtype": "float32"},
            "positions": KEPT,
            "conversations": {"count": len(prompts)},
            "of": name,
        }
        identity["model"] |= {"layers": 1, "vocab": VOCAB} | changed
        record = {"format": layout.FORMAT, "identity": identity}
        snapshot = snapshot_in(tmp_path / f"scratch {folder.name}")
        with RunWriter.create(folder, record, snapshot) as run:
            run.start_session({"machine": "test"})
            run.add_contexts(
                "0.0",
                pa.Table.from_pylist(contexts, schema=layout.contexts_schema(KEPT)),
                pa.Table.from_pylist(turns, schema=layout.GENERATIONS),
                stored_logits(torch.zeros(len(prompts), VOCAB), "full"),
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


@pytest.fixture
def decoupling(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments) -> Outcome:
        return call(main, [*map(str, arguments), "--resamples", "100"], capfd)

    return run


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
    found = estimates(read([run.path]), resamples=100)
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
    found = estimates(read([run.path]), resamples=2000)
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
    found = estimates(read([planted(prompts).path]), resamples=200)
    won = [(a > b) + (a == b) / 2 for a in shares[True] for b in shares[False]]
    area = one(found, "AUROC of being right", temperature=1.0)
    assert area["value"] == pytest.approx(np.mean(won))
    assert 0.5 < area["low"] < area["value"] < area["high"] <= 1


@pytest.mark.parametrize(("right", "what"), [(4, "right"), (0, "wrong")])
def test_where_all_are_alike_there_is_no_association_and_a_note(planted, right, what):
    found = estimates(read([planted(sums(right, 4 - right)).path]), resamples=100)
    row = one(found, DIFFERENCE, temperature=0.0)
    assert row[["value", "low", "high", "p", "p_holm"]].isna().all() and row["test"] is None
    assert row["method"] == "one group is empty"
    assert one(found, "accuracy")["value"] == right / 4
    assert remarks(found)[0] == (
        f"m on sums: all responses are {what}, so whether being right goes with following up "
        "can't be asked."
    )


def test_cut_off_responses_are_told_apart(planted):
    prompts = [
        Prompt("a", True, {0.0: [1]}),
        Prompt("b", False, {0.0: [0]}),
        Prompt("c", response="9 times 2 makes 18, and 18", cut_off=True, genuine={0.0: [0]}),
        Prompt("d", True, {0.0: [0]}, cut_off=True),
    ]
    measured = read([planted(prompts).path])
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
    found = estimates(read([planted(prompts).path]), resamples=1000)
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
    measured = read([planted(prompts).path])
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
    found = estimates(read([planted(prompts).path]), resamples=100)
    assert one(found, "accuracy")["value"] == 1 / 4
    assert one(found, "accuracy, loose")["value"] == 2 / 4
    single = one(found, "instructions followed")
    assert (single["value"], single["rows"], single["sources"]) == ((2 + 1 + 0 + 1) / 8, 8, 4)
    assert one(found, "instructions followed, loosely")["value"] == (2 + 1 + 0 + 2) / 8


def test_maths_has_no_instructions_to_count(planted):
    found = estimates(read([planted(sums(1, 1)).path]), resamples=100)
    assert not found["quantity"].str.contains("loose|instructions").any()


def test_runs_of_one_model_are_pooled_and_a_response_counts_once(planted):
    prompts = sums(1, 2, lambda at, _: {0.0: [at == 0]})
    first = planted(prompts, name="first")
    again = planted(
        [Prompt(p.id, p.right, {0.0: p.genuine[0.0], 1.0: [1, 1]}) for p in prompts[:2]],
        name="again",
    )
    measured = read([first.path, again.path])
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


def test_four_models_have_a_rank_correlation(planted):
    runs = models(planted, [1, 3, 6, 9], [0, 2, 5, 4])
    found = estimates(read([run.path for run in runs]), resamples=300)
    row = one(found, RANK, dataset="sums", temperature=0.0)
    assert row["value"] == pytest.approx((5 - 1) / 6)  # one of six pairs is the other way round
    assert (row["rows"], row["sources"], row["model"]) == (4, 10, "")
    assert row["p"] == pytest.approx(8 / 24) and row["test"] == "permutation of models"
    assert row["low"] <= row["value"] <= row["high"] and row["low"] < row["high"]
    assert any(
        note.startswith("rank correlation over models: Kendall's") for note in remarks(found)
    )
    accuracy = found[found["quantity"] == "accuracy"].set_index("model")["value"]
    assert accuracy.tolist() == [0.1, 0.3, 0.6, 0.9]


def test_more_accurate_models_may_follow_up_less(planted):
    runs = models(planted, [1, 3, 6, 9], [8, 6, 4, 1])
    row = one(estimates(read([run.path for run in runs]), resamples=100), RANK)
    assert row["value"] == pytest.approx(-1) and row["p"] == pytest.approx(2 / 24)


def test_models_that_all_follow_up_alike_have_no_rank_correlation(planted):
    runs = models(planted, [1, 3, 6, 9], [0, 0, 0, 0])
    row = one(estimates(read([run.path for run in runs]), resamples=100), RANK)
    assert row[["value", "low", "high", "p"]].isna().all() and pd.isna(row["test"])


def test_three_models_have_none_and_a_note(planted):
    runs = models(planted, [1, 3, 6], [0, 2, 5])
    found = estimates(read([run.path for run in runs]), resamples=100)
    assert RANK not in set(found["quantity"])
    assert remarks(found)[-1] == (
        "sums: no rank correlation over models, which takes at least 4 on the same prompts; "
        "there are 3."
    )


def test_models_are_compared_on_the_prompts_they_share(planted):
    first = planted(sums(2, 2, lambda at, _: {0.0: [at == 3]}), "one")
    second = planted(sums(0, 3), "two")
    measured = read([first.path, second.path])
    assert measured.responses.groupby("model").size().to_dict() == {"one": 3, "two": 3}
    assert "sums: the 3 of 4 prompts that all models share." in measured.notes
    found = estimates(measured, resamples=100)
    assert one(found, "accuracy", model="one")["value"] == pytest.approx(2 / 3)
    assert one(found, "follow-up rate", model="one")["value"] == 0  # s3's isn't shared
    alone = read([first.path])
    assert len(alone.responses) == 4 and not any("share" in note for note in alone.notes)


def test_weights_of_one_name_are_told_apart(planted):
    first = planted(sums(1, 1), "m", name="first")
    second = planted(sums(2, 0), "m", name="second", weights_hash="0123456789")
    assert read([first.path, second.path]).models == ["m 01234567", "m hash of "]


def test_a_dataset_of_one_model_alone_stays(planted):
    first = planted([*sums(1, 1), Prompt("x", dataset="more")], "one")
    second = planted(sums(1, 1), "two")
    found = estimates(read([first.path, second.path]), resamples=100)
    assert one(found, "accuracy", dataset="more")["model"] == "one"


# -- the command line ---------------------------------------------------------------------------

WRITTEN = [
    *("association.png", "association.svg", "estimates.parquet", "responses.parquet"),
    *("scatter.png", "scatter.svg"),
]


def test_tables_and_figures_go_into_the_first_run(planted, decoupling):
    run = planted([*sums(2, 3, lambda at, _: {0.0: [at == 0], 1.0: [1, 0]})])
    before = files(run.path)
    outcome = decoupling(run.path)
    assert outcome.status == 0, outcome.err
    folder = run.path / "experiments" / "decoupling"
    assert outcome.err == f"wrote {folder}\n"
    assert sorted(p.name for p in folder.iterdir()) == WRITTEN
    assert {name: found for name, found in files(run.path).items() if name in before} == before
    for said in ("0.40 [", "right less wrong", "greedy", "no rank correlation", "math-verify"):
        assert said in outcome.out
    measured = read([run.path])
    found = pd.read_parquet(folder / "estimates.parquet")
    pd.testing.assert_frame_equal(found, estimates(measured, resamples=100), check_dtype=False)
    told = pd.read_parquet(folder / "responses.parquet")
    assert told["correct"].tolist() == [1, 1, 0, 0, 0]
    assert told["answer"].tolist() == ["18", "18", "19", "19", "19"]
    assert set(told["gold"]) == {"18"} and set(told["query"]) == {"What is 9 times 2?"}
    kept = files(folder)
    assert decoupling(run.path).status == 0  # again, over them
    assert files(folder) == kept


def test_four_models_are_shown_and_drawn(planted, decoupling, tmp_path):
    runs = models(planted, [1, 3, 6, 9], [0, 2, 5, 7], prompts=10)
    before = [files(run.path) for run in runs]
    outcome = decoupling(*(run.path for run in runs), "--out", tmp_path / "out")
    assert outcome.status == 0, outcome.err
    assert "over models" in outcome.out and "Kendall" in outcome.out
    assert [files(run.path) for run in runs] == before
    drawn = (tmp_path / "out" / "scatter.svg").read_text()
    assert all(f"model-{n}" in drawn for n in range(4))


def test_the_scatter_shows_each_model_and_dataset_where_it_is(planted):
    first = planted(
        [*sums(1, 3), *(replace(p, id=f"m{p.id}") for p in sums(3, 1, dataset="more"))], "one"
    )
    second = planted(sums(2, 2, lambda at, _: {0.0: [at == 0]}), "two")
    found = estimates(read([first.path, second.path]), resamples=100)
    figure = scatter(found, "title")
    (axes,) = figure.axes
    centres = {tuple(bars.lines[0].get_xydata()[0]) for bars in axes.containers}
    assert centres == {(0.25, 0), (0.75, 0), (0.5, 0.25)}
    across, up = one(found, "accuracy", model="two"), one(found, "follow-up rate", model="two")
    spans = [
        path.vertices.ravel().tolist()
        for bars in axes.containers
        for lines in bars.lines[2]
        for path in lines.get_paths()
    ]
    for span in ([across["low"], 0.25, across["high"], 0.25], [0.5, up["low"], 0.5, up["high"]]):
        assert any(np.allclose(span, drawn) for drawn in spans)


def test_given_responses_are_refused_and_left_out(planted, decoupling):
    given = planted(sums(1, 1, policy="given"), name="given")
    assert refusal(decoupling(given.path)) == (
        f"the 2 responses in {given.path} were given, not written by m: they say nothing of how "
        "accurate it is; sample with --response generate"
    )
    mixed = planted([*sums(1, 1), Prompt("x", policy="given")], name="mixed")
    measured = read([mixed.path])
    assert len(measured.responses) == 2 and len(measured.turns) == 2
    assert any(note.startswith("1 of 3 responses in") for note in measured.notes)


def test_perturbed_contexts_are_refused_and_left_out(planted, decoupling):
    perturbed = planted(sums(1, 1, perturbation="typos"), name="perturbed")
    assert refusal(decoupling(perturbed.path)) == (
        f"all 2 contexts of {perturbed.path} are perturbed; give a run of plain prompts"
    )
    mixed = planted(
        [*sums(1, 1), Prompt("s9", perturbation="typos"), Prompt("s8", perturbation="none")],
        name="mixed",
    )
    measured = read([mixed.path])
    assert measured.responses["source_id"].tolist() == ["s0", "s1", "s8"]
    assert any("are perturbed and are left out" in note for note in measured.notes)


def test_what_nothing_says_is_right_is_refused_and_left_out(planted, decoupling):
    chat = {"dataset": "chat", "answer": "It depends on what you like."}
    assert refusal(decoupling(planted([Prompt("c", **chat)], name="chat").path)) == (
        "nothing says which responses of chat are right; verifying takes a gold answer that is one "
        "number or formula (--answer-column), or IFEval's columns instruction_id_list and kwargs"
    )
    measured = read([planted([*sums(1, 1), Prompt("c", **chat)], name="mixed").path])
    assert set(measured.responses["dataset"]) == {"sums"} and len(measured.turns) == 2
    assert any(
        note.startswith("chat left out: nothing says what is right") for note in measured.notes
    )
    measured = read([planted([*sums(1, 1), Prompt("x", answer=None)], name="part").path])
    assert len(measured.responses) == 2
    assert (
        "1 of 3 responses of sums left out: their gold answer is missing or is no number or "
        "formula." in measured.notes
    )


def test_models_without_common_prompts_are_refused(planted, decoupling):
    first, other = planted(sums(1, 1), "one"), planted(sums(1, 1, dataset="more"), "two")
    assert refusal(decoupling(first.path, other.path)) == (
        "the models have no dataset in common (one: sums, two: more); sample them all from the "
        "same file or preset"
    )
    later = planted([Prompt("t0"), Prompt("t1")], "three")
    assert refusal(decoupling(first.path, later.path)) == (
        "the models have no prompt of sums in common; sample them all from the same rows "
        "(--dataset, --limit)"
    )


@pytest.mark.parametrize(
    ("changed", "what"),
    [({"query": "What is 9 times 3?"}, "text"), ({"answer": "27"}, "gold answer")],
)
def test_prompts_that_share_no_more_than_their_name_are_refused(planted, decoupling, changed, what):
    first = planted(sums(1, 1), "one")
    other = planted([Prompt("s0"), Prompt("s1", **changed)], "two")
    assert refusal(decoupling(first.path, other.path)) == (
        f"prompt 's1' of sums has another {what} in {other.path} than in {first.path}; sample all "
        "runs from the same file"
    )


def test_runs_without_the_judge_are_refused(planted, decoupling):
    run = planted(sums(1, 1))
    assert "has no verdicts of 'nobody'" in refusal(decoupling(run.path, "--judge", "nobody"))
    judge(run, [1, 0], "other")
    assert "there are verdicts of other, rules; choose" in refusal(decoupling(run.path))
    assert read([run.path], "other").turns["genuine"].tolist() == [1, 0]
    shutil.rmtree(run.path / "judgements")
    assert "has not been judged; run: python -m ia_mech.judge run" in refusal(decoupling(run.path))


def test_a_run_twice_or_copied_is_refused(planted, decoupling, tmp_path):
    run = planted(sums(1, 1))
    assert "is given twice; give each run once" in refusal(decoupling(run.path, run.path))
    shutil.copytree(run.path, tmp_path / "copy")
    line = refusal(decoupling(run.path, tmp_path / "copy"))
    assert line == f"{tmp_path / 'copy'} is a copy of {run.path}; give each run once"


def test_responses_that_no_verifier_could_tell_are_refused(planted, decoupling):
    asked = {"instruction_id_list": ["no:such"], "kwargs": [{}]}
    prompts = [Prompt(f"u{n}", answer=None, metadata=asked) for n in range(2)]
    assert refusal(decoupling(planted(prompts).path)) == (
        "none of the 2 responses could be verified: no:such: no verifier knows this instruction "
        "(2); give runs of prompts that can be, or install what is missing"
    )


def test_labels_of_several_people_do_not_matter(planted):
    run = planted(sums(1, 1))
    turns = run.generations[list(KEY)].iloc[:1]
    for person in ("anna", "ben"):
        label = dict(zip(KEY, turns.iloc[0], strict=True))
        label |= {"category": GENUINE, "genuine": True, "inclusion_probability": 1.0}
        run.labels.write_annotations(person, [label], {})
    assert len(read([run.path]).turns) == 2


def test_turns_that_nobody_could_assess_are_refused(planted, decoupling):
    prompts = [Prompt("a", genuine={0.0: [None]}), Prompt("b", genuine={0.0: [1]}, policy="given")]
    line = refusal(decoupling(planted(prompts).path))
    assert line.startswith("'rules' assessed no user turn after these responses; judge again")


def test_what_is_not_a_run_or_a_folder_is_refused(planted, decoupling, tmp_path):
    assert "is not a run" in refusal(decoupling(tmp_path))
    run = planted(sums(1, 1))
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refusal(decoupling(run.path, "--out", tmp_path / "file"))
    assert "lies inside the run" in refusal(decoupling(run.path, "--out", run.path / "contexts"))


@pytest.mark.parametrize("words", [[], ["RUN", "--level", "2"], ["RUN", "--resamples", "3"]])
def test_mistyped_commands_are_refused_in_one_line(capfd, words):
    outcome = call(main, words, capfd)
    assert outcome.status == 2 and outcome.out == "" and outcome.err.count("\n") == 1
