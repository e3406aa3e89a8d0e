"""What every experiment's command does alike: help, checks of runs, the output folder, files."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure
from runs import rewritten
from shell import call, files, refusal

from experiments.decoupling.__main__ import EXPERIMENT as decoupling
from experiments.likelihood.__main__ import EXPERIMENT as likelihood
from experiments.perturbations.__main__ import EXPERIMENT as perturbations
from experiments.runner import Experiment, Results
from experiments.temperature_sweep.__main__ import EXPERIMENT as temperature_sweep
from ia_mech.rates.gate import Gate
from ia_mech.run import Run
from ia_mech.stats import Estimate

ALL_OF_THEM = {one.name: one for one in (decoupling, likelihood, perturbations, temperature_sweep)}


NONE = Estimate(float("nan"), float("nan"), float("nan"), 0)


def counted(args, runs: list[Run], folder) -> Results:
    """How many contexts there are."""
    few = {"dataset": "d", "low": [0.5], "p": float("nan"), "sources": [3]}
    found = pd.DataFrame({"quantity": ["contexts"], "value": len(runs[0].contexts)} | few)
    return Results(
        runs=runs,
        judge=Gate("me", "genuine", 0, NONE.value, NONE.value, NONE, NONE),
        estimates=found,
        show=lambda console: console.print("a table"),
        figures={"drawn": Figure()},
        tables={"more": found},
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


WRITTEN = ["drawn.pdf", "drawn.png", "drawn.svg", "estimates.parquet", "more.parquet"]


def test_everything_is_written_into_the_first_run_and_printed(copied, count):
    run = copied()
    before = files(run.path)
    outcome = count(run.path)
    folder = run.path / "experiments" / "count"
    assert (outcome.status, outcome.err) == (0, f"wrote {folder}\n")
    assert outcome.out.startswith(
        "a table\nthe floor of judge me is unknown: the run has no decoys"
    )
    assert "\na [note]⏎in a line\nfewer than 24 sources" in outcome.out
    after = files(run.path)
    assert sorted(path.name for path in folder.iterdir()) == WRITTEN
    assert {name: after[name] for name in before} == before and Run.open(run.path).verify() == []
    for name in ("estimates", "more"):
        about = json.loads(pq.read_schema(folder / f"{name}.parquet").metadata[b"ia_mech"])
        made = {"experiment": "count", "runs": [run.name], "level": 0.95}
        made["identities"] = [run.identity_digest]
        made |= {"judge": "me", "gate": "no decoys"}
        if name == "estimates":  # what a report needs
            control = Gate("me", "genuine", 0, NONE.value, NONE.value, NONE, NONE).sentence
            made |= {"title": "Counts contexts.", "sentence": "", "control": control}
            made |= {"notes": ["a [note]\nin a line"], "figures": ["drawn"]}
        assert about == made
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
    for inside in ("contexts", "experiments", "experiments/other"):
        assert "lies inside the run" in refused(run.path, "--out", run.path / inside)
    out = tmp_path / "out"
    assert count(merged.path, "--out", out).status == 0
    other = Experiment("other", "", "", counted)
    with pytest.raises(Exception, match="holds results of count; name another folder with --out"):
        other.output_folder(out, merged.path)
    estimates = out / "estimates.parquet"
    table = pq.read_table(estimates)
    for about in (None, {}, {"ia_mech": "{"}, {"ia_mech": "[]"}, {"ia_mech": "{}"}):
        if about is None:
            estimates.write_bytes(b"mine")
        else:
            pq.write_table(table.replace_schema_metadata(about), estimates)
        content = estimates.read_bytes()
        line = refused(merged.path, "--out", out)
        assert line.startswith(f"no experiment wrote {estimates}, or it is damaged; remove it, or ")
        assert estimates.read_bytes() == content


def test_a_folder_in_a_files_place_is_found_before_anything_is_written(merged, refused, tmp_path):
    (tmp_path / "drawn.png").mkdir()
    line = refused(merged.path, "--out", tmp_path)
    assert line.startswith(f"{tmp_path / 'drawn.png'} is a folder; name another one with --out")
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


def test_help_imports_nothing_slow():
    """Of all four, in one fresh interpreter."""
    code = "import sys\n" + "".join(
        f"from experiments.{name}.__main__ import build_parser\nbuild_parser().format_help()\n"
        for name in ALL_OF_THEM
    )
    code += "print({'torch', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=os.environ, check=True)  # fmt: skip
    assert done.stdout == "set()\n"
