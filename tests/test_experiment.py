"""What the commands of all experiments share: help, checks of runs, the output folder, files."""

import errno
import importlib
import os
import re
import shlex
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scored
import torch
from runs import rewritten, unfinished, with_settings
from safetensors.torch import load_file, save_file
from shell import Outcome, call, files, refusal, worked

import ia_mech.engine.score as score_module
from experiments.arms import Arm, conversations_of
from experiments.experiment import Conclusion, Experiment, output_folder
from experiments.mass_vector import MassVector
from experiments.shown import Bars
from experiments.units import modules_of
from ia_mech.collect.command import main as sample
from ia_mech.estimates import TidyEstimate
from ia_mech.rates.gate import Gate
from ia_mech.results import Table, read
from ia_mech.run import Run
from ia_mech.stats import Estimate

NONE = Estimate(float("nan"), float("nan"), float("nan"), 0)
GATE = Gate("me", 0, NONE.value, NONE.value, NONE, NONE)


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
            patch.setattr(
                "experiments.experiment.verdicts_of",
                lambda *_: SimpleNamespace(gate=GATE, record={}),
            )
            super().check()

    def rows(self) -> pd.DataFrame:
        run = self.runs[0]
        return pd.DataFrame({"value": [len(run.contexts)], "run": [str(run.path)]})

    def estimate(self, rows):
        self.notes.append("a [note]\nin a line")
        few = Estimate(float(rows["value"].item()), 1.0, 99.0, 3)
        yield TidyEstimate("contexts", {"dataset": "d"}, 1, few)

    def tables(self, found):
        return [Table("a table", ["what"], [["contexts"]])]

    def figures(self, found):
        return {"sampled": Bars("contexts", "contexts", found)}

    def data(self, rows):
        return {"more": rows}

    def conclude(self, found):
        return Conclusion("There are some.", f"{self.gate.short}.")


class Other(Count):
    name = "other"


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
        folder = shutil.copytree(merged.path, tmp_path / f"copy-{len(list(tmp_path.iterdir()))}")
        if change is not None:
            rewritten(folder, name, change)
        return Run.open(folder)

    return make


FIGURE = ["sampled.pdf", "sampled.png", "sampled.svg"]
WRITTEN = ["estimates.parquet", "more.parquet", "result.json", *FIGURE]


def test_everything_is_written_into_the_first_run_and_printed(copied, count):
    run = copied()
    before = files(run.path)
    outcome = count(run.path)
    folder = run.path / "results" / "count"
    assert (outcome.status, outcome.err) == (0, f"numbers went to {folder}\n")
    page = outcome.out.splitlines()[-1]
    assert page.startswith("next: ") and page.endswith(f"ia-mech report {run.path}")
    said = [
        "Too few queries (3) to show anything.\nThere are some.\n",
        "Control: There is no control of judge me: it was shown no turn after a wrong conversation",
        "a table",
        "a [note]⏎in a line",
        "fewer than 24 queries",
    ]
    places = [outcome.out.index(text) for text in said]
    assert places == sorted(places)
    after = files(run.path)
    assert sorted(path.name for path in folder.iterdir()) == WRITTEN
    assert {name: after[name] for name in before} == before and Run.open(run.path).verify() == []
    found = read(folder)
    made = {"kind": "count", "runs": [run.name], "identities": [run.identity_digest]}
    made |= {"ignored_checks": {}, "command": f"python test_experiment.py {run.name}"}
    made |= {"level": 0.95, "judge": "me", "gate": "no decoys", "labellers": ["me"]}
    made["labels"] = {run.identity_digest: run.labels.digest(["me"])}
    assert found.about == made
    assert found.question == "How many contexts are there?"
    assert found.control == f"{GATE.short}."
    assert pd.read_parquet(folder / "more.parquet")["run"].tolist() == [run.name]
    # The same command over its own files, with flags that change no number and with one that does.
    assert count(run.path, "--full", "--threads", 1).status == 0 and files(run.path) == after
    assert count(run.path, "--level", 0.9).status == 0
    assert read(folder).about["command"].endswith(f"{run.name} --level 0.9")


def test_numbers_go_into_the_run_and_new_turns_beside_it(copied, tmp_path):
    run, parser = copied(), MassVector.build_parser()
    args = parser.parse_args([str(run.path)])
    folder = output_folder(MassVector, args.out, run.path)
    assert folder == run.path / "results" / "mass-vector"
    one = MassVector([run], args, folder)
    assert one.place("layer 3") == run.path.with_name(f"{run.name}-mass-vector") / "layer_3"
    rule = "Numbers go to RUN/results/mass-vector/, new turns to RUN-mass-vector/ beside RUN."
    assert rule in " ".join(parser.format_help().split())
    args = parser.parse_args([str(run.path), "--out", str(tmp_path / "out")])
    folder = output_folder(MassVector, args.out, run.path)
    one = MassVector([run], args, folder)
    assert (folder, one.beside) == (tmp_path / "out", tmp_path / "out")


def test_earlier_results_stay_as_they_were_until_all_is_written(
    merged, count, refused, tmp_path, monkeypatch
):
    out = tmp_path / "new" / "folder"
    assert count(merged.path, "--out", out).status == 0
    before = files(out)
    with monkeypatch.context() as patch:

        def full(*_) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr("ia_mech.results.save_figure", full)
        assert "No space left" in refused(merged.path, "--level", 0.9, "--out", out)
    assert files(out) == before and sorted(os.listdir(out)) == WRITTEN
    (out / ".new").mkdir()  # a kill leaves it
    (out / ".new" / "half.png").write_text("half")
    assert count(merged.path, "--level", 0.9, "--out", out).status == 0
    assert sorted(os.listdir(out)) == WRITTEN and files(out) != before


def test_folders_that_hold_something_else_are_refused(merged, copied, count, refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "is a file; give another --out" in refused(merged.path, "--out", tmp_path / "file")
    assert "file is not a run (it is a file)" in refused(tmp_path / "file")
    assert "holds files but no result" in refused(merged.path, "--out", tmp_path)
    assert (tmp_path / "file").read_text() == "mine"
    run = copied()
    for inside in ("contexts", "results", "results/other"):
        assert "lies inside the run" in refused(run.path, "--out", run.path / inside)
    out = tmp_path / "out"
    assert count(merged.path, "--out", out).status == 0
    with pytest.raises(Exception, match="holds results of count; name another folder with --out"):
        output_folder(Other, out, merged.path)
    (tmp_path / "taken" / "sampled.png").mkdir(parents=True)
    assert "sampled.png is a folder" in refused(merged.path, "--out", tmp_path / "taken")
    assert os.listdir(tmp_path / "taken") == ["sampled.png"]


def test_runs_that_cannot_be_used_together_are_refused(
    merged, copied, refused, tmp_path, monkeypatch
):
    (tmp_path / "link").symlink_to(merged.path)
    for other in (merged.path, tmp_path / "link", f"{merged.path}/."):
        assert "is given twice; give each run once" in refused(merged.path, other)
    copy = copied()
    line = refused(merged.path, copy.path)
    assert line == f"{copy.path} is a copy of {merged.path}; give each run once"
    begun = unfinished(copied())
    assert "is still being written or was interrupted" in refused(begun.path)
    assert "is not a run" in refused(tmp_path)
    assert refused(tmp_path / "nowhere").startswith(f"no folder {tmp_path / 'nowhere'}; ")
    other = copied("run.json", with_settings(max_new_tokens=99))
    assert "differ in max_new_tokens" in refused(merged.path, other.path)
    model = {"name": "other", "weights_hash": "0"}
    other = copied("run.json", lambda record: record["identity"]["model"].update(model))
    line = refused(merged.path, other.path)
    assert line == "the runs are of several models (planted, other); give runs of one model"
    read = Run.contexts.func
    monkeypatch.setattr(Run, "contexts", property(lambda run: read(run).assign(perturbation="x")))
    assert "holds perturbed conversations" in refused(merged.path)


def test_mistyped_commands_are_refused_in_one_line(count):
    for words in ([], ["RUN", "--level", "2"], ["RUN", "--resamples", "3"], ["RUN", "--what"]):
        outcome = count(*words)
        assert outcome.status == 2 and outcome.out == "" and outcome.err.count("\n") == 1


# -- what is measured: the experiment of docs/ ----------------------------------------------------


@pytest.fixture(scope="module")
def first_words():
    """The class of the worked experiment."""
    return worked("worked_experiment").FirstWords


def test_the_worked_experiment_measures_what_it_says_and_goes_on_where_it_was_stopped(
    first_words, siblings, tiny_subject, tmp_path, capfd, monkeypatch
):
    folder = tmp_path / "out"
    words = [str(siblings.path), "--queries", "3", "--full", "--out", str(folder)]
    words += ["--workers", "1"]  # or a second unit would be begun, and perhaps ended
    plan = call(first_words.main, [*words, "--dry-run"], capfd)
    assert plan.status == 0 and "3 units of 3 queries" in plan.out and not folder.exists()
    opened = sys.modules[first_words.__module__].Opened
    rows, measured = opened.rows, []

    def interrupted(self, model):
        measured.append(self.source)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return rows(self, model)

    monkeypatch.setattr(opened, "rows", interrupted)
    stopped = call(first_words.main, words, capfd)
    assert stopped.status == 130
    *_, said, again = stopped.err.splitlines()
    assert said == "interrupted; finished parts are kept"
    assert again.startswith("next: ") and again.endswith(f"_experiment.py {shlex.join(words)}")
    assert not (folder / "result.json").exists()
    outcome = call(first_words.main, words, capfd)
    assert outcome.status == 0 and len(measured) == 4  # the first unit wasn't measured again
    again = call(first_words.main, words, capfd)
    assert (again.status, again.out, len(measured)) == (0, outcome.out, 4)
    few, sentence, control = outcome.out.splitlines()[:3]
    assert few == "Too few queries (3) to show anything."
    assert sentence.startswith("Bits for the response that a turn followed: ")
    assert control.startswith("Control: Bits for a sibling that it did not follow: ")
    assert "note: 3 queries, " in outcome.out
    means = []
    args = first_words.build_parser().parse_args([str(siblings.path), "--queries", "3"])
    for query in first_words([siblings], args, folder).queries:
        for followed, ids in zip(query.turns["followed"], query.turns["token_ids"], strict=True):
            bits = [
                scored.logprobs(tiny_subject.model, list(one), ids[:3].tolist()).sum() / np.log(2)
                for one in query.token_ids
            ]
            means.append(bits[followed] - np.mean(np.delete(bits, followed)))
    found = pd.read_parquet(folder / "estimates.parquet").set_index(["dataset", "term"])["value"]
    whole = "(all)" if "(all)" in found.index.get_level_values(0) else "plain"
    np.testing.assert_allclose(found[whole, "own response"], np.mean(means), **scored.bits(3))
    # Units are measured again when the code was changed.
    assert "3 are measured already" in call(first_words.main, [*words, "--dry-run"], capfd).out
    for what, value, count in (
        ("torch.__version__", f"{torch.__version__.partition('+')[0]}+cu130", 3),
        ("torch.__version__", "1.0", 0),
        ("experiments.units.engine_of", lambda: ["changed"], 0),
        ("experiments.units.hash_of", lambda paths: "changed", 0),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(what, value)
            said = call(first_words.main, [*words, "--dry-run"], capfd).out
        assert f"{count} are measured already" in said


def test_kept_rows_depend_on_what_the_measuring_module_imports_and_on_no_table():
    importlib.import_module("experiments.mass_vector")
    used = modules_of(frozenset({"experiments.mass_vector"}))
    assert {"experiments.mass_vector", "experiments.steering"} <= used  # this makes steered turns
    assert not {"experiments.experiment", "experiments.shown"} & used


def test_a_unit_that_memory_is_too_small_for_is_measured_in_smaller_passes(
    first_words, siblings, tmp_path, capfd, monkeypatch
):
    words = [str(siblings.path), "--queries", "2", "--full"]
    plan = call(first_words.main, [*words, "--dry-run"], capfd)
    assert re.search(r"time +about \S+ min on an idle", plan.out)
    whole = call(first_words.main, [*words, "--out", str(tmp_path / "whole")], capfd)
    honest, held = score_module.forward, []

    def tight(model, state, *others, **options):
        held.append(state.rows)
        if state.rows > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(model, state, *others, **options)

    monkeypatch.setattr(score_module, "forward", tight)
    monkeypatch.setitem(score_module.LOGITS, "cpu", 64 * siblings.model["vocab"])
    small = call(first_words.main, [*words, "--out", str(tmp_path / "small")], capfd)
    assert small.status == 0 and "out of memory: passes of 'plain" in small.err
    assert max(held) > 4 and held[-1] <= 4
    means = [
        pd.read_parquet(tmp_path / name / "estimates.parquet")["value"]
        for name in ("whole", "small")
    ]
    np.testing.assert_allclose(*means, **scored.bits(3))
    assert whole.status == 0


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


# -- the model ------------------------------------------------------------------------------------


class Again(Count):
    """Samples the same turns again, and scores with the model."""

    name = "again"
    loads = True

    def arms(self):
        return {"same": Arm(conversations_of(self.runs[0].contexts))}

    def rows(self):
        subject = self.model.team.subject
        assert subject.weights_hash == self.runs[0].model["weights_hash"]
        return super().rows()


def test_a_model_that_has_moved_is_found_by_its_flag_and_then_without(
    tiny_model_dir, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    model, run = shutil.copytree(tiny_model_dir, tmp_path / "mine"), tmp_path / "run"
    words = ["--limit", "2", "--samples", "1", "--max-new-tokens", "3", "--out", str(run)]
    assert sample(["--model", str(model), *words]) == 0

    def again(*words) -> Outcome:
        return call(Again.main, [str(run), *map(str, words)], capfd)

    assert again().status == 0
    sampled = files(tmp_path / "run-again")
    other = shutil.copytree(model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file(
        {k: 1.5 * v for k, v in tensors.items()}, other / "model.safetensors", {"format": "pt"}
    )
    moved = model.rename(tmp_path / "moved")
    line = refusal(again())
    assert line.startswith("the run's model is not where it was: model 'mine' could not be loaded")
    assert "give its place now with --model PATH, or " in line
    line = refusal(again("--model", other))
    assert line.startswith(f"{other} has the weights ")
    assert line.endswith(
        "give the place of the same weights with --model PATH, or sample the run again"
    )
    record = files(run)
    assert sample(["--model", str(moved), *words]) == 0 and files(run) == record
    assert sample(["--model", str(other), *words]) == 2 and files(run) == record
    assert "--model is mine there, other here" in capfd.readouterr().err
    assert refusal(again("--model", tmp_path / "no")).startswith(f"no directory {tmp_path / 'no'}")
    for flag in (["--model", moved], []):  # it is remembered
        assert again(*flag).status == 0
        assert files(tmp_path / "run-again") == sampled
    assert str(tmp_path) not in (run / "results" / "again" / "result.json").read_text()


class Replaces(Count):
    """Puts the states of another layer where the header ends."""

    name = "replaces"
    loads, layer = True, 1

    def arms(self):
        from ia_mech.engine.intervene import Replace

        run = self.runs[0]

        def changed(conversation, context):
            states = run.residuals(self.layer, "header_last")[:1]
            return [Replace(1, (len(context.ids) - 1,), states)]

        return {"put": Arm(conversations_of(run.contexts), interventions=changed)}


def test_turns_under_another_change_are_another_run(tiny_model_dir, tmp_path, monkeypatch, capfd):
    run = tmp_path / "run"
    words = ["--limit", "2", "--samples", "1", "--max-new-tokens", "3", "--out", str(run)]
    assert sample(["--model", str(tiny_model_dir), *words]) == 0
    assert call(Replaces.main, [str(run)], capfd).status == 0
    before = files(tmp_path / "run-replaces")
    assert call(Replaces.main, [str(run)], capfd).status == 0
    monkeypatch.setattr(Replaces, "layer", 2)
    assert "holds other conversations" in refusal(call(Replaces.main, [str(run)], capfd))
    assert files(tmp_path / "run-replaces") == before
