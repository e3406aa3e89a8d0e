"""Controls of a probe set: the models' outputs side by side, and what is left out with a note."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.probe_validation.planted import Plan, plant, write
from ia_mech.stats import FoldScores
from probes.controls import controls_of
from probes.dataset import ProbeSet, read
from probes.fit.folds import make_folds
from probes.fit.nested_cv import Cell, Design, examine_once

# The output tells z along one direction, which is another one in a world of another seed.
PLAN = Plan(
    "output-common", contexts=120, layers=2, informative_layer=2, d_model=16, oracle_auroc=0.85
)
COLUMNS = PLAN.d_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gather")


@pytest.fixture(scope="module")
def pair(folder):
    """Two models' planted runs, and one more of the first model; their lenses are in a cache."""
    worlds = {"a": PLAN, "b": replace(PLAN, seed=1), "a again": replace(PLAN, draw=1)}
    made = {name: plant(plan) for name, plan in worlds.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IA_MECH_CACHE", str(folder / "cache"))
        for planted in made.values():
            planted.lens.save(planted.weights_hash)
    runs = {name: write(planted, folder / name) for name, planted in made.items()}
    assert runs["a"].model["weights_hash"] == runs["a again"].model["weights_hash"]
    assert runs["a"].model["weights_hash"] != runs["b"].model["weights_hash"]
    return {name: run.path for name, run in runs.items()}


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    monkeypatch.setenv("IA_MECH_CACHE", str(folder / "cache"))


def gathered(*paths) -> tuple[ProbeSet, list[np.ndarray]]:
    data = read(paths)
    return data, [baseline.features for baseline in controls_of(data).output]


def read_by_run(data: ProbeSet, features: np.ndarray) -> list[float]:
    """Held-out AUROC of a probe on all runs, in each of them."""
    outcome = data.outcome
    design = Design.of(outcome, make_folds(outcome))
    scores = cross_validate(Features.of(features), design.observed()).scores
    found = []
    for run in range(len(data.runs)):
        here = (data.contexts["run"] == run).to_numpy()
        own = outcome.take(here)
        folds = design.folds[here]
        each = FoldScores(own.positives, own.trials, own.sources, folds, resamples=1)
        found.append(each.auroc(scores[here]).value)
    return found


def test_the_output_of_each_model_is_read_along_its_own_direction(pair):
    data, (states, summaries) = gathered(pair["a"], pair["b"])
    alone = [
        read_by_run(*own)[0]
        for own in ((d, f[0]) for d, f in (gathered(pair[name]) for name in ("a", "b")))
    ]
    together = read_by_run(data, states)
    shared = read_by_run(data, states[:, :COLUMNS] + states[:, COLUMNS:])
    assert min(alone) > 0.68 and min(together) > 0.68
    assert np.mean(together) > np.mean(shared) + 0.01  # one set of weights doesn't fit both
    assert min(read_by_run(data, summaries)) > 0.6


def test_columns_of_a_model_are_its_own_and_rows_keep_their_order(pair):
    for names in (["a", "b"], ["a", "b", "a again"]):
        data, found = gathered(*(pair[name] for name in names))
        single = {name: gathered(pair[name])[1] for name in names}
        run = data.contexts["run"].to_numpy()
        first = np.isin(run, [at for at, name in enumerate(names) if name != "b"])
        for features in found:
            used = [features[rows].any(0) for rows in (first, ~first)]
            assert not (used[0] & used[1]).any() and (used[0] | used[1]).all()
            for rows in (first, ~first):
                np.testing.assert_allclose(features[rows].mean(0), 0, atol=1e-9)
        states = found[0]
        assert states.shape == (len(data), 2 * COLUMNS)
        for at, name in enumerate(names):
            columns = slice(COLUMNS, None) if name == "b" else slice(COLUMNS)
            # But for the mean, which is that of all runs of the model.
            moved = states[run == at, columns] - single[name][0]
            np.testing.assert_allclose(moved, np.broadcast_to(moved[0], moved.shape), atol=1e-6)


def test_runs_of_one_model_share_its_columns(pair):
    data, (states, _) = gathered(pair["a"], pair["a again"])
    assert states.shape == (240, COLUMNS)
    assert min(read_by_run(data, states)) > 0.68


def test_all_controls_are_there_where_they_can_be_had(pair):
    data = read([pair["a"]])
    found = controls_of(data)
    assert [b.name for b in found.text] == ["tfidf", "lengths", "dataset", "random"]
    assert [b.name for b in found.output] == ["output", "output summaries"]
    assert all(len(b.features) == 120 for b in found.text + found.output)
    assert found.types.shape == (120,) and found.missing == []


# -- what is left out -----------------------------------------------------------------------------


def changed(data: ProbeSet, **columns) -> ProbeSet:
    return replace(data, contexts=data.contexts.assign(**columns))


def test_without_two_kinds_of_responses_there_is_no_control_task(pair):
    data = changed(read([pair["a"]]), response_tokens=20, opening=8)
    found = controls_of(data)
    assert found.types is None
    assert found.missing == [
        "no control task, so no selectivity: a control task needs two types of contexts in a run; "
        "there is only one"
    ]
    assert len(found.output) == 2


def test_responses_that_differ_between_runs_only_make_no_control_task(pair):
    data = read([pair["a"], pair["b"]])
    found = controls_of(changed(data, response_tokens=20, opening=data.contexts["run"] + 8))
    assert found.types is None and found.missing[0].startswith("no control task")
    some = np.where(data.contexts["run"] == 0, 8 + np.arange(len(data)) % 2, 8)
    assert controls_of(changed(data, response_tokens=20, opening=some)).types is not None


def test_where_no_draw_has_two_rates_there_is_no_control_task(pair, monkeypatch):
    monkeypatch.setattr("probes.controls._TRIES", 1)
    data = read([pair["a"]])
    k = np.zeros(len(data), dtype=int)
    k[0] = 1
    found = controls_of(changed(data, positives=k), seed=1)
    assert found.types is None
    (note,) = found.missing
    assert note.startswith("no control task, so no selectivity: no two types got different rates")
    (note,) = controls_of(changed(data, positives=0)).missing
    assert "contexts with different rates; all have the same" in note


def test_without_a_lens_or_the_header_there_is_no_output_control(pair, monkeypatch, tmp_path):
    data = read([pair["a"], pair["b"]])
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path))
    found = controls_of(data)
    assert found.output == [] and found.types is not None
    (note,) = found.missing
    assert note.startswith("no output control, so nothing can be called latent: no lens for")
