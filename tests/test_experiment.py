"""What every experiment's command does alike: help, checks of runs, the output folder, files."""

import errno
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scored
from matplotlib.figure import Figure
from runs import rewritten
from shell import call, files, refusal

from experiments.experiment import Conclusion, Experiment, output_folder
from experiments.figures import Bars
from experiments.parts import computed_once
from ia_mech.estimates import TidyEstimate
from ia_mech.rates.gate import Gate
from ia_mech.results import Table, read
from ia_mech.run import Run
from ia_mech.stats import Estimate

NONE = Estimate(float("nan"), float("nan"), float("nan"), 0)
GATE = Gate("me", "genuine", 0, NONE.value, NONE.value, NONE, NONE)


class Count(Experiment):
    """Counts contexts."""

    name = "count"
    loads = False
    judged = True

    @classmethod
    def help(cls) -> str:
        return "How many contexts are there? All are counted."

    def check(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ia_mech.rates.load.read_runs", lambda *_: SimpleNamespace(gate=GATE))
            super().check()

    def rows(self) -> pd.DataFrame:
        return pd.DataFrame(
            {"value": [len(self.runs[0].contexts)], "run": [str(self.runs[0].path)]}
        )

    def estimate(self, rows):
        self.notes.append("a [note]\nin a line")
        few = Estimate(float(rows["value"].item()), 1.0, 99.0, 3)
        yield TidyEstimate("contexts", {"dataset": "d"}, 1, few)

    def tables(self, found):
        return [Table("a table", ["what"], [["contexts"]])]

    def figures(self, found):
        return {"drawn": Bars("contexts", "contexts", found)}

    def data(self, rows):
        return {"more": rows}

    def conclude(self, found):
        return Conclusion("There are some.", f"{self.gate.sentence}.")


class Other(Count):
    name = "other"


class Beside(Count):
    beside = "counted"


@pytest.fixture
def count(capfd):
    return lambda *words: call(Count.main, [str(word) for word in words], capfd)


@pytest.fixture
def refused(count):
    return lambda *words: refusal(count(*words))


@pytest.fixture
def copied(merged, tmp_path):
    """A copy of a run; ``change`` edits the content of one of its JSON files."""

    def make(name: str = "", change=None) -> Run:
        folder = shutil.copytree(merged.path, tmp_path / f"copy-{name}")
        if change is not None:
            rewritten(folder, name, change)
        return Run.open(folder)

    return make


WRITTEN = [
    "drawn.pdf",
    "drawn.png",
    "drawn.svg",
    "estimates.parquet",
    "more.parquet",
    "result.json",
]


def test_everything_is_written_into_the_first_run_and_printed(copied, count):
    run = copied()
    before = files(run.path)
    outcome = count(run.path)
    folder = run.path / "results" / "count"
    assert (outcome.status, outcome.err) == (0, f"wrote {folder}\n")
    said = ["There are some.\nthe floor of judge me is unknown", "a table", "a [note]⏎in a line"]
    places = [outcome.out.index(text) for text in [*said, "fewer than 24 sources"]]
    assert places == sorted(places)
    after = files(run.path)
    assert sorted(path.name for path in folder.iterdir()) == WRITTEN
    assert {name: after[name] for name in before} == before and Run.open(run.path).verify() == []
    found = read(folder)
    made = {"kind": "count", "runs": [run.name], "identities": [run.identity_digest]}
    made |= {"command": f"python -m experiments.count {run.name}"}
    made |= {"level": 0.95, "judge": "me", "gate": "no decoys", "labellers": ["me"]}
    made["labels"] = {run.identity_digest: run.labels.digest(["me"])}
    assert found.about == made
    asked = "How many contexts are there?"
    assert (found.question, found.control) == (asked, f"{GATE.sentence}.")
    assert pd.read_parquet(folder / "more.parquet")["run"].tolist() == [run.name]
    assert count(run.path).status == 0 and files(run.path) == after  # again, over them


def test_earlier_results_stay_as_they_were_until_all_is_written(
    merged, count, refused, pictures, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    assert count(merged.path, "--out", out).status == 0
    before = files(out)
    with monkeypatch.context() as patch:

        def full(*_, **__) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(Figure, "savefig", full)
        assert "No space left" in refused(merged.path, "--level", 0.9, "--out", out)
    assert files(out) == before and sorted(os.listdir(out)) == WRITTEN
    (out / ".new").mkdir()  # a kill leaves it
    (out / ".new" / "half.png").write_text("half")
    assert count(merged.path, "--level", 0.9, "--out", out).status == 0
    assert files(out).keys() == before.keys() and files(out) != before


def test_everything_goes_where_it_is_wanted(merged, count, tmp_path):
    before = files(merged.path)
    assert count(merged.path, "--out", tmp_path / "new" / "folder").status == 0
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == WRITTEN
    assert files(merged.path) == before


def test_folders_that_hold_something_else_are_refused(merged, copied, count, refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "is a file; give another --out" in refused(merged.path, "--out", tmp_path / "file")
    assert "file is not a run (it is a file)" in refused(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    run = copied()
    for inside in ("contexts", "results", "results/other"):
        assert "lies inside the run" in refused(run.path, "--out", run.path / inside)
    out = tmp_path / "out"
    assert count(merged.path, "--out", out).status == 0
    with pytest.raises(Exception, match="holds results of count; name another folder with --out"):
        output_folder(Other, out, merged.path)
    for damage in ("mine", "{}", "[]"):
        (out / "result.json").write_text(damage)
        assert "is damaged" in refused(merged.path, "--out", out)
        assert (out / "result.json").read_text() == damage


def test_a_folder_in_a_files_place_is_found_before_anything_is_written(merged, refused, tmp_path):
    (tmp_path / "drawn.png").mkdir()
    line = refused(merged.path, "--out", tmp_path)
    assert f"{tmp_path / 'drawn.png'} is a folder" in line
    assert [path.name for path in tmp_path.iterdir()] == ["drawn.png"]


def test_a_default_outside_the_runs_may_not_lie_inside_one(merged, monkeypatch):
    monkeypatch.setenv("IA_MECH_CACHE", str(merged.path.parent))
    folder = output_folder(Beside, None, merged.path)
    assert folder == merged.path.parent / f"{merged.path.name}-counted"
    with pytest.raises(Exception, match="lies inside the run"):
        output_folder(Beside, merged.path / "results" / "count", merged.path)


def test_runs_are_finished_and_each_is_given_once(merged, copied, refused, tmp_path):
    (tmp_path / "link").symlink_to(merged.path)
    for other in (merged.path, tmp_path / "link", f"{merged.path}/."):
        assert "is given twice; give each run once" in refused(merged.path, other)
    copy = copied()
    line = refused(merged.path, copy.path)
    assert line == f"{copy.path} is a copy of {merged.path}; give each run once"
    unfinished = copied("manifest.json", lambda manifest: manifest.update(parts=[]))
    assert "is still being written or was interrupted" in refused(unfinished.path)
    assert "is not a run" in refused(tmp_path)
    assert "is not a run" in refused(tmp_path / "nowhere")


def test_several_models_and_perturbed_contexts_are_refused_unless_declared(
    merged, copied, refused, monkeypatch
):
    model = {"name": "other", "weights_hash": "0"}
    other = copied("run.json", lambda record: record["identity"]["model"].update(model))
    line = refused(merged.path, other.path)
    assert line == "the runs are of several models (planted, other); give runs of one model"
    read = Run.contexts.func
    monkeypatch.setattr(Run, "contexts", property(lambda run: read(run).assign(perturbation="x")))
    line = refused(merged.path)
    assert line == f"{merged.path} holds perturbed contexts; give the run that they were made from"


def test_a_result_of_other_flags_is_replaced_with_a_word(copied, count):
    run = copied()
    for words in ([], ["--full", "--threads", 1]):
        assert "replaced" not in count(run.path, *words).err
    line = f"this replaced the result of: python -m experiments.count {run.name}\n"
    assert line in count(run.path, "--level", 0.9).err
    about = read(run.path / "results" / "count").about
    assert about["command"] == f"python -m experiments.count {run.name} --level 0.9"


def test_runs_that_were_decoded_in_different_ways_are_not_pooled(merged, copied, refused):
    def change(record):
        record["identity"]["settings"]["max_new_tokens"] += 1
        record["identity"]["settings"]["seed"] += 1

    other = copied("run.json", change)
    line = refused(merged.path, other.path)
    assert line.startswith(f"{merged.path} and {other.path} differ in max_new_tokens, seed")


@pytest.mark.parametrize("words", [[], ["--level", "2"], ["--seed", "-1"], ["--resamples", "3"],
                                   ["--what"]])  # fmt: skip
def test_mistyped_commands_are_refused_in_one_line(count, words):
    outcome = count(*(["RUN"] if words else []), *words)
    assert outcome.status == 2 and outcome.out == "" and outcome.err.count("\n") == 1


def test_a_conclusion_without_a_control_is_no_result(merged, count, monkeypatch, tmp_path):
    monkeypatch.setattr(Count, "conclude", lambda self, found: Conclusion("There are some.", ""))
    with pytest.raises(ValueError, match="gave no control"):
        Count.command(Count.build_parser().parse_args([str(merged.path), "--out", str(tmp_path)]))
    assert not any(tmp_path.iterdir())


# -- what is measured: the experiment of docs/ ----------------------------------------------------


@pytest.fixture(scope="module")
def first_words():
    """The class of the worked experiment."""
    file = Path(__file__).parent.parent / "docs" / "worked_experiment.py"
    spec = importlib.util.spec_from_file_location("worked_experiment", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.FirstWords


def test_the_worked_experiment_measures_what_it_says(
    first_words, siblings, tiny_subject, tmp_path, capfd
):
    folder = tmp_path / "out"
    words = [str(siblings.path), "--queries", "3", "--full", "--out", str(folder)]
    outcome = call(first_words.main, words, capfd)
    assert outcome.status == 0, outcome.err
    sentence, control = outcome.out.splitlines()[:2]
    assert sentence.startswith("Bits for the response that a turn followed: ")
    assert control.startswith("The same for a sibling that it did not follow: ")
    assert "note: 3 queries, " in outcome.out
    means = []
    kept = first_words.build_parser().parse_args([str(siblings.path), "--queries", "3"])
    for query in first_words([siblings], kept, folder).queries:
        for followed, ids in zip(query.turns["followed"], query.turns["token_ids"], strict=True):
            bits = [
                scored.logprobs(tiny_subject.model, list(one), ids[:3].tolist()).sum() / np.log(2)
                for one in query.token_ids
            ]
            means.append(bits[followed] - np.mean(np.delete(bits, followed)))
    found = pd.read_parquet(folder / "estimates.parquet").set_index(["dataset", "term"])["value"]
    whole = "(all)" if "(all)" in found.index.get_level_values(0) else "plain"
    np.testing.assert_allclose(found[whole, "own response"], np.mean(means), **scored.bits(3))


def test_finished_units_are_kept_and_a_dry_run_computes_nothing(
    first_words, siblings, tmp_path, capfd, monkeypatch
):
    words = [str(siblings.path), "--queries", "3", "--out", str(tmp_path / "out")]
    plan = call(first_words.main, [*words, "--dry-run"], capfd)
    assert (
        plan.status == 0 and "3 units of 3 queries" in plan.out and not (tmp_path / "out").exists()
    )
    measure, calls = first_words.measure, []

    def interrupted(self, model, unit):
        calls.append(unit.source)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, model, unit)

    monkeypatch.setattr(first_words, "measure", interrupted)
    assert call(first_words.main, words, capfd).status == 130
    assert not (tmp_path / "out" / "result.json").exists()
    first = call(first_words.main, words, capfd)
    assert first.status == 0 and len(calls) == 4  # the first unit wasn't measured again
    second = call(first_words.main, words, capfd)
    assert (second.status, second.out, len(calls)) == (0, first.out, 4)


def test_a_unit_is_measured_again_when_the_code_was_changed(
    first_words, siblings, tmp_path, capfd, monkeypatch
):
    words = [str(siblings.path), "--queries", "3", "--out", str(tmp_path / "out")]
    assert call(first_words.main, words, capfd).status == 0
    again = call(first_words.main, words, capfd)
    assert "3 of 3 units were measured before" in again.err
    assert "3 are measured already" in call(first_words.main, [*words, "--dry-run"], capfd).out
    monkeypatch.setattr("experiments.experiment.code_of", lambda module: "changed")
    assert "were measured before" not in call(first_words.main, words, capfd).err


def test_a_measurement_without_rows_is_an_error_that_names_the_query_and_is_not_kept(
    first_words, siblings, tmp_path, monkeypatch
):
    args = first_words.build_parser().parse_args([str(siblings.path), "--queries", "3"])
    one = first_words([siblings], args, tmp_path)
    monkeypatch.setattr(first_words, "measure", lambda *_: pd.DataFrame())
    with pytest.raises(ValueError, match="gave no rows") as raised:
        one.rows()
    assert "This was of 'plain" in raised.value.__notes__[0]
    assert not any(tmp_path.iterdir())


def test_units_may_hold_numpy_numbers_and_nothing_else_that_json_lacks(tmp_path):
    def table() -> pd.DataFrame:
        return pd.DataFrame({"one": [1]})

    for key in ([np.int64(3)], [np.arange(3)]):
        assert computed_once(tmp_path, key, table)["one"].tolist() == [1]
    with pytest.raises(TypeError, match="a unit holds a set"):
        computed_once(tmp_path, [{1}], table)


def test_a_folder_with_files_of_ones_own_is_left_alone(count, merged, refused, tmp_path):
    (tmp_path / "estimates.parquet").write_text("mine")
    assert "holds other files" in refused(merged.path, "--out", tmp_path)
    assert (tmp_path / "estimates.parquet").read_text() == "mine"


def test_fewer_queries_are_among_more(first_words, siblings, tmp_path):
    def used(*words: str) -> list[str]:
        args = first_words.build_parser().parse_args([str(siblings.path), *words])
        return [query.source for query in first_words([siblings], args, tmp_path).queries]

    every, three, two = used(), used("--queries", "3"), used("--queries", "2")
    assert (len(every), len(three), len(two)) == (4, 3, 2)
    assert set(two) < set(three) < set(every) and sorted(three, key=every.index) == three
    assert any(used("--queries", "2", "--seed", str(seed)) != two for seed in range(1, 6))


def test_runs_without_siblings_are_refused(first_words, merged, capfd):
    line = refusal(call(first_words.main, [str(merged.path)], capfd))
    assert "has one response per query" in line


# -- help -----------------------------------------------------------------------------------------

ALL_OF_THEM = (
    "decoupling", "elicit", "likelihood", "locate", "perturbations", "post_training", "reaction",
    "steering", "study", "temperature_sweep",
)  # fmt: skip


@pytest.mark.parametrize("name", ALL_OF_THEM)
def test_every_experiment_has_a_question_and_a_page_with_its_method(name):
    module = importlib.import_module(f"experiments.{name}")
    assert "?" in module.__doc__.splitlines()[0]
    assert "Needs: " in module.__doc__ and "Cost: " in module.__doc__
    page = {"elicit": "study"}.get(name, name.replace("_", "-"))
    assert "\n## Method\n" in Path(f"docs/{page}.md").read_text("utf-8")


def test_help_waits_for_neither_torch_nor_matplotlib():
    """Of all but steering, which is about tensors, in one fresh interpreter."""
    names = [name for name in ALL_OF_THEM if name != "steering"]
    code = "import contextlib, importlib, sys\n" + "".join(
        f"main = importlib.import_module('experiments.{name}').main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        for name in names
    )
    code += "print({'torch', 'matplotlib', 'sklearn'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stdout.endswith("\nset()\n")
    assert done.stdout.count("usage: ") == len(names)
