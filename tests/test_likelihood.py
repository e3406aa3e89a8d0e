"""python -m experiments.likelihood: which runs it takes, what it reads off them and writes."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import scored
from conftest import Silent
from shell import Outcome, call, files, refusal

from experiments.likelihood.__main__ import main
from experiments.likelihood.analyse import estimates
from experiments.likelihood.read import read
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.engine.plan import Grid
from ia_mech.judge.label import items_of
from ia_mech.judge.rubric import GENUINE
from ia_mech.likelihood.scorer import SCORED
from ia_mech.run import Run
from ia_mech.run.labels import KEY

GRID = Grid((0.85, 1.0), 3, 5, 0)


@pytest.fixture(scope="module")
def sampled(tiny_subject, tmp_path_factory):
    """Make a run in a folder of its own."""

    def make(conversations=scored.CONVERSATIONS, **options) -> Run:
        folder = tmp_path_factory.mktemp("likelihood")
        data = scored.dataset(folder / "chats.jsonl", conversations)
        options = {"grid": GRID, "swaps": 2} | options
        config = SampleConfig(dataset=data, limit=None, **options)
        return collect(config, tiny_subject, folder / "run", Silent())

    return make


@pytest.fixture(scope="module")
def plain(sampled) -> Run:
    """With scored generations, not judged; tests leave it as it is."""
    return sampled(score_generations=True)


def judged(run: Run, judge: str = "rules") -> Run:
    """Every second sample above greedy is genuine."""
    keys = list(run.generations[list(KEY)].itertuples(index=False, name=None))
    verdicts = []
    for key, item in zip(keys, items_of(run), strict=True):
        genuine = key[1] > 0 and key[2] % 2 == 0
        category = GENUINE if genuine else "new_topic"
        said = {"repeat": 0, "category": category, "genuine": genuine, "status": "judged"}
        said |= {"rationale": "planted", "item": item.key("", 0)[:16]}
        verdicts.append(dict(zip(KEY, key, strict=True)) | said)
    run.labels.write_judgements(judge, verdicts, {"identity": {"kind": judge}, "repeats": 1})
    return run


@pytest.fixture
def copied(plain, tmp_path):
    def make(name: str = "run") -> Run:
        return Run.open(shutil.copytree(plain.path, tmp_path / name))

    return make


@pytest.fixture
def likelihood(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments) -> Outcome:
        return call(main, [*map(str, arguments), "--resamples", "100"], capfd)

    return run


def edited(run: Run, name: str, change) -> Run:
    content = json.loads((run.path / name).read_text())
    change(content)
    (run.path / name).write_text(json.dumps(content))
    return run


# -- what is read -------------------------------------------------------------------------------


def test_references_and_curves_are_the_stored_ones(plain):
    found = read([plain.path])
    stored = plain.contexts[plain.contexts["reference_logprob"].notna()]
    assert found.references["context_id"].tolist() == stored["context_id"].tolist()
    assert found.temperatures.tolist() == sorted({*SCORED, 0.85})
    expected = np.stack(stored["reference_logprob_tempered_with_end"].to_list())
    np.testing.assert_array_equal(found.curve, expected)
    assert len(found.candidates) == sum(map(len, stored["candidates"]))
    assert found.candidates["whole"].tolist() == [
        one["logprob_with_end"] for row in stored["candidates"] for one in row
    ]
    assert len(found.generations) == len(plain.generations)
    assert found.references["source"].nunique() == len(stored)


def test_how_a_turn_stands_among_swapped_responses_is_made_from_what_is_stored(plain):
    found = read([plain.path]).candidates
    own = found[found["name"] == "reference"]
    stored = plain.contexts[plain.contexts["reference_logprob"].notna()]
    several = 0
    for (_, one), (_, row) in zip(own.iterrows(), stored.iterrows(), strict=True):
        first, *rest = swapped = row["reference_logprob_swapped"].tolist()
        bits = (row["reference_logprob"] - sum(swapped) / len(swapped)) / np.log(2)
        assert one["response, mean of logs"] == pytest.approx(bits)
        assert one["likeliest"] == all(row["reference_logprob"] > value for value in swapped)
        assert one["chance"] == 1 / (1 + len(swapped))
        if rest:
            several += 1
            placebo = (first - sum(rest) / len(rest)) / np.log(2)
            assert one["placebo"] == pytest.approx(placebo)
    assert several > 1
    others = found[~found["name"].isin(["reference", "other_reference"])]
    assert others[["response, mean of logs", "placebo", "likeliest", "chance"]].isna().all(None)


def test_the_estimates_of_a_run_are_means_of_what_it_stores(plain):
    found = estimates(read([plain.path]), resamples=100)
    stored = plain.contexts[plain.contexts["reference_logprob"].notna()]
    curve = np.stack(stored["reference_logprob_tempered_with_end"].to_list()).mean(0)
    rows = found[(found["quantity"] == "tempered log p") & (found["dataset"] == "(all)")]
    np.testing.assert_allclose(rows["value"], curve)
    best = found[(found["quantity"] == "best temperature") & (found["dataset"] == "(all)")]
    assert best["value"].item() == rows["temperature"].to_numpy()[np.argmax(curve)]
    at_one = rows[rows["temperature"] == 1.0]["value"].item()
    np.testing.assert_allclose(at_one, stored["reference_logprob_with_end"].mean(), rtol=1e-6)
    everything = found[found["dataset"] == "(all)"].set_index(["quantity", "of"])["value"]
    np.testing.assert_allclose(
        everything["contrast, bits", "header"], stored["reference_header_contrast_bits"].mean()
    )
    shares = [
        row["reference_logprob_with_end"] > one["logprob_with_end"]
        for _, row in stored.iterrows()
        for one in row["candidates"]
        if one["name"] == "query"
    ]
    beats = found[(found["quantity"] == "reference beats") & (found["of"] == "query")]
    beats = beats[(beats["dataset"] == "(all)") & (beats["temperature"] == 1.0)]
    assert beats["value"].item() == pytest.approx(np.mean(shares))
    assert set(found["dataset"]) == {"plain", "odd", "(all)"}


def test_pooled_runs_share_the_temperatures_that_both_scored(plain, sampled):
    other = sampled(scored.CONVERSATIONS[:3], grid=Grid((0.33,), 1, 2, 0))
    found = read([plain.path, other.path])
    assert found.temperatures.tolist() == list(SCORED)
    assert len(found.references) == 8 + 3
    each = [read([run.path]) for run in (plain, other)]
    columns = [[list(one.temperatures).index(t) for t in SCORED] for one in each]
    expected = [one.curve[:, at] for one, at in zip(each, columns, strict=True)]
    np.testing.assert_array_equal(found.curve, np.concatenate(expected))
    names = [one.candidates["name"].tolist() for one in each]
    assert found.candidates["name"].tolist() == names[0] + names[1]


# -- generations and their labels ---------------------------------------------------------------


def test_generations_without_judgements_are_noted(plain):
    found = read([plain.path])
    assert found.notes[-1] == (
        f"{plain.path} is not judged, so generations aren't told apart: python -m ia_mech.judge "
        f"run {plain.path}"
    )
    assert found.judge is None and found.generations["genuine"].isna().all()


def test_generations_that_were_not_scored_are_noted(sampled):
    found = read([sampled(scored.CONVERSATIONS[:3]).path])
    assert found.generations.empty
    assert found.notes[-1] == (
        "generations were not scored after other responses: sample with --score-generations"
    )


def test_what_a_reader_of_contrasts_has_to_know_is_noted(sampled, plain):
    own = sampled(response="generate", max_response_tokens=3, swaps=1)
    found = read([plain.path, own.path]).notes
    rows = own.contexts
    cut = int(rows.loc[rows["reference_logprob"].notna(), "response_cut_off"].sum())
    assert cut > 0
    assert found[:5] == [
        f"{cut} of 16 follow-ups are scored after a response that was cut off, which is another "
        "stimulus (column response_cut_off).",
        f"responses of {own.path} are the model's own: what users really said answered other ones.",
        "2 of 16 contexts have fewer swapped responses than --swaps asked for: their datasets have "
        "no more others.",
        "no control in odd: there is no other follow-up than of those who lend their responses.",
        "runs that were pooled differ in response, max_response_tokens, swaps.",
    ]


def test_verdicts_are_joined_by_run_context_temperature_and_sample(copied):
    run = judged(copied())
    found = read([run.path])
    assert found.judge == "rules" and len(found.generations) == len(run.generations)
    expected = (found.generations["temperature"] > 0) & (found.generations["sample"] % 2 == 0)
    assert found.generations["genuine"].tolist() == expected.astype(float).tolist()
    rows = estimates(found, resamples=100)
    within = rows[(rows["quantity"] == "AUROC of genuine, within contexts")]
    within = within[(within["of"] == "response, bits") & (within["dataset"] == "(all)")]
    warm = found.generations[found.generations["temperature"] == 1.0]
    won = [
        (g > o) + (g == o) / 2
        for _, one in warm.groupby("context_id")
        for g in one.loc[one["genuine"] == 1, "response_contrast_bits"]
        for o in one.loc[one["genuine"] == 0, "response_contrast_bits"]
    ]
    assert len(won) == 2 * len(run.contexts)
    assert within[within["temperature"] == 1.0]["value"].item() == pytest.approx(np.mean(won))


def test_one_of_several_judges_is_chosen(copied, likelihood):
    run = judged(judged(copied()), "other")
    assert "there are verdicts of other, rules; choose one with --judge" in refusal(
        likelihood(run.path)
    )
    assert read([run.path], "other").judge == "other"
    assert "has no judgements of 'nobody'" in refusal(likelihood(run.path, "--judge", "nobody"))


def test_a_judge_that_is_not_there_is_refused_without_scored_generations_too(sampled, likelihood):
    run = sampled(scored.CONVERSATIONS[:3])
    assert "nobody" in refusal(likelihood(run.path, "--judge", "nobody"))


def test_generations_scored_without_swaps_still_have_their_other_contrasts(sampled):
    run = sampled(scored.CONVERSATIONS[:3], swaps=0, score_generations=True)
    found = read([run.path])
    assert len(found.generations) == len(run.generations)
    rows = estimates(found, resamples=100)
    assert "empty" in set(rows[rows["quantity"] == "generations' contrast, bits"]["of"])


# -- the command line ---------------------------------------------------------------------------

WRITTEN = [
    *("contrasts.png", "contrasts.svg", "estimates.parquet"),
    *("temperature_curve.png", "temperature_curve.svg"),
]


def test_tables_and_figures_go_into_the_first_run(copied, likelihood):
    run = judged(copied())
    before = files(run.path)
    outcome = likelihood(run.path)
    assert outcome.status == 0, outcome.err
    folder = run.path / "experiments" / "likelihood"
    assert outcome.err == f"wrote {folder}\n"
    assert sorted(p.name for p in folder.iterdir()) == WRITTEN
    assert {name: found for name, found in files(run.path).items() if name in before} == before
    found = pd.read_parquet(folder / "estimates.parquet")
    again = estimates(read([run.path]), resamples=100)
    pd.testing.assert_frame_equal(found, again, check_dtype=False)
    for said in ("best T", "another's follow-up", "likelier than", "within contexts"):
        assert said in outcome.out
    assert Run.open(run.path).verify() == []


def test_tables_and_figures_go_where_they_are_wanted(plain, likelihood, tmp_path):
    before = files(plain.path)
    folder = tmp_path / "new" / "tables"
    outcome = likelihood(plain.path, "--out", folder)
    assert outcome.status == 0, outcome.err
    assert sorted(p.name for p in folder.iterdir()) == WRITTEN
    assert "is not judged, so generations aren't told apart" in outcome.out
    assert files(plain.path) == before
    kept = (folder / "estimates.parquet").read_bytes()
    assert likelihood(plain.path, "--out", folder).status == 0  # again, over it
    assert (folder / "estimates.parquet").read_bytes() == kept


def test_a_run_of_one_follow_up_has_estimates_without_intervals(sampled, likelihood, tmp_path):
    run = sampled(scored.CONVERSATIONS[:1], swaps=0)
    outcome = likelihood(run.path, "--out", tmp_path / "out")
    assert outcome.status == 0, outcome.err
    found = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    contrasts = found[found["quantity"] == "contrast, bits"]
    assert contrasts["of"].tolist() == ["empty", "header"]  # there was nobody to lend a response
    assert contrasts["low"].isna().all() and set(contrasts["method"]) == {"one source"}
    assert "[–]" in outcome.out


def test_a_run_given_twice_is_refused(plain, likelihood, tmp_path):
    (tmp_path / "link").symlink_to(plain.path)
    for other in (plain.path, tmp_path / "link", f"{plain.path}/."):
        assert "is given twice; give each run once" in refusal(likelihood(plain.path, other))


def test_a_copy_of_a_run_is_refused(plain, copied, likelihood):
    other = copied()
    line = refusal(likelihood(plain.path, other.path))
    assert f"{other.path} is a copy of {plain.path}; give each run once" in line


def test_runs_of_several_models_are_refused(plain, copied, likelihood):
    other = edited(
        copied(), "run.json",
        lambda r: r["identity"]["model"].update(name="other", weights_hash="0"),
    )  # fmt: skip
    line = refusal(likelihood(plain.path, other.path))
    assert "the runs are of several models (tiny-llama, other); give runs of one model" in line


def test_an_unfinished_run_is_refused(copied, likelihood):
    run = edited(copied(), "manifest.json", lambda m: m.update(complete=False))
    assert "is still being written or was interrupted" in refusal(likelihood(run.path))


def test_a_run_without_references_is_refused(sampled, likelihood):
    run = sampled([scored.CONVERSATIONS[3]])
    line = refusal(likelihood(run.path))
    assert line.startswith("no context has a reference turn") and "--followup-column" in line


def test_a_run_of_before_turns_were_scored_is_refused(copied, likelihood):
    run = edited(copied(), "run.json", lambda r: r["identity"].pop("score_temperatures"))
    line = refusal(likelihood(run.path))
    assert "was sampled before turns were scored after other responses; sample again" in line


def test_what_is_not_a_run_is_refused(likelihood, tmp_path):
    assert "is not a run" in refusal(likelihood(tmp_path))
    assert "is not a run" in refusal(likelihood(tmp_path / "nowhere"))


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(plain, likelihood, tmp_path):
    (tmp_path / "file").write_text("mine")
    outcome = likelihood(plain.path, "--out", tmp_path / "file")
    assert outcome.status == 2 and "Traceback" not in outcome.err
    assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_among_a_runs_own_files_is_refused(copied, likelihood):
    run = copied()
    assert "lies inside the run" in refusal(likelihood(run.path, "--out", run.path / "contexts"))


@pytest.mark.parametrize(
    "words", [[], ["--level", "2"], ["--seed", "-1"], ["--resamples", "3"], ["--what"]]
)
def test_mistyped_commands_are_refused_in_one_line(plain, capfd, words):
    outcome = call(main, [*([str(plain.path)] if words else []), *words], capfd)
    assert outcome.status == 2 and outcome.out == "" and outcome.err.count("\n") == 1
