"""What every experiment's command does alike: help, checks of runs, the output folder, files."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from runs import rewritten
from shell import call, files, refusal

from experiments.decoupling.__main__ import EXPERIMENT as decoupling
from experiments.likelihood import EXPERIMENT as likelihood
from experiments.perturbations.__main__ import EXPERIMENT as perturbations
from experiments.runner import Experiment, result_of
from experiments.temperature_sweep.__main__ import EXPERIMENT as temperature_sweep
from ia_mech.rates.gate import Gate
from ia_mech.results import Result, Table, read
from ia_mech.run import Run
from ia_mech.stats import Estimate

ALL_OF_THEM = {one.name: one for one in (decoupling, likelihood, perturbations, temperature_sweep)}


NONE = Estimate(float("nan"), float("nan"), float("nan"), 0)
GATE = Gate("me", "genuine", 0, NONE.value, NONE.value, NONE, NONE)


def counted(args, runs: list[Run], folder) -> Result:
    """How many contexts there are."""
    few = {"dataset": "d", "low": [0.5], "p": float("nan"), "sources": [3]}
    found = pd.DataFrame({"quantity": ["contexts"], "value": len(runs[0].contexts)} | few)
    return result_of(
        runs,
        GATE,
        sentence="There are some.",
        estimates=found,
        tables=[Table("a table", ["what"], [["contexts"]])],
        figures={"drawn": Figure()},
        data={"more": found},
        notes=["a [note]\nin a line"],
    )


COUNT = Experiment("count", "Counts contexts.", "drawn (PNG, SVG)", counted)


@pytest.fixture
def count(capfd):
    return lambda *words: call(COUNT.main, [str(word) for word in words], capfd)


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
    made |= {"level": 0.95, "judge": "me", "gate": "no decoys", "labellers": ["me"]}
    made["labels"] = {run.identity_digest: run.labels.digest(["me"])}
    assert found.about == made
    assert (found.question, found.control) == ("Counts contexts.", f"{GATE.sentence}.")
    assert count(run.path).status == 0 and files(run.path) == after  # again, over them


def test_earlier_results_stay_as_they_were_until_all_is_written(
    merged, count, refused, tmp_path, monkeypatch
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
    other = Experiment("other", "", "", counted)
    with pytest.raises(Exception, match="holds results of count; name another folder with --out"):
        other.output_folder(out, merged.path)
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
    folder = perturbations.output_folder(None, merged.path)
    assert folder == merged.path.parent / f"{merged.path.name}-perturbed"
    with pytest.raises(Exception, match="lies inside the run"):
        perturbations.output_folder(merged.path / "experiments" / "perturbations", merged.path)


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
    assert [name for name, one in ALL_OF_THEM.items() if one.several_models] == ["decoupling"]
    declared = [name for name, one in ALL_OF_THEM.items() if one.perturbed]
    assert declared == ["decoupling", "temperature_sweep"]  # both leave them out, with a note


@pytest.mark.parametrize("words", [[], ["--level", "2"], ["--seed", "-1"], ["--resamples", "3"],
                                   ["--what"]])  # fmt: skip
def test_mistyped_commands_are_refused_in_one_line(count, words):
    outcome = count(*(["RUN"] if words else []), *words)
    assert outcome.status == 2 and outcome.out == "" and outcome.err.count("\n") == 1


@pytest.mark.parametrize("name", ALL_OF_THEM)
def test_help_fits_a_screen_and_names_where_the_method_is(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = ALL_OF_THEM[name].build_parser().format_help().splitlines()
    assert len(lines) <= 44 and max(map(len, lines)) <= 100
    page = f"docs/{name.replace('_', '-')}.md"
    assert f"Method: {page}." in "\n".join(lines)
    assert "\n## Method\n" in Path(page).read_text("utf-8")


def test_help_does_not_wait_for_torch():
    """Of all four, in one fresh interpreter."""
    code = "import sys\n" + "".join(
        f"from {one.run.__module__} import build_parser\nbuild_parser().format_help()\n"
        for one in ALL_OF_THEM.values()
    )
    code += "print({'torch', 'matplotlib', 'sklearn'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stdout == "set()\n"
