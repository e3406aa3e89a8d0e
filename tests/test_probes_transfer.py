"""Whether probes transfer: what is trained on what, what the matrix shows, and its command line."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from runs import rewritten, with_settings
from shell import call, refusal

from benchmarks.probe_validation.planted import Plan, plant, write
from ia_mech.errors import UserError
from ia_mech.results import read
from ia_mech.stats import holm
from probes import cross_evaluate as module
from probes import dataset, train
from probes.analysis import AnalysisSettings, Arrays
from probes.cross_evaluate import cross_evaluate
from probes.targets import Outcome

QUICK = AnalysisSettings(permutations=49, resamples=200)
FEWER = AnalysisSettings(permutations=0, resamples=50, workers=1)
WIDTH, TRIALS = 12, 8
CONTEXTS = 30  # of a planted run


def made(directions, contexts=40, seed=0, strength=2.5, prompts=None):
    """Units with a signal along one axis each, at layer 1 and position ``b`` alone.

    Args:
        directions: the axis of each unit.
        contexts: of each unit, one per source.
        seed: of everything.
        strength: of the signal; 0 is none.
        prompts: the set of sources that each unit has; its own if not given.
    """
    rng = np.random.default_rng(seed)
    number = len(directions)
    states = rng.normal(size=(2, number * contexts, 2, WIDTH))
    hope = rng.normal(size=number * contexts)
    units = {f"u{i}": np.arange(i * contexts, (i + 1) * contexts) for i in range(number)}
    for rows, axis in zip(units.values(), directions, strict=True):
        states[1, rows, 1, axis] += strength * hope[rows]
    k = rng.binomial(TRIALS, 1 / (1 + np.exp(-2.5 * hope)))
    of = np.arange(number) if prompts is None else np.asarray(prompts)
    sources = (of[:, None] * contexts + np.arange(contexts)).ravel()
    runs = np.repeat(np.arange(number), contexts)
    outcome = Outcome.from_counts(k, np.full(len(k), TRIALS), sources, runs)
    return Arrays(states.astype(np.float32), ["a", "b"]), outcome, units


def by_pair(entries):
    return {(entry.trained, entry.tested): entry for entry in entries}


def matrix(hidden, outcome, units, settings=QUICK):
    return by_pair(cross_evaluate(hidden, outcome, units, settings)[0])


# -- what it says ---------------------------------------------------------------------------------


def test_a_shared_direction_carries_over_and_another_does_not():
    hidden, outcome, units = made([0, 0, 5], 60)
    entries, notes = cross_evaluate(hidden, outcome, units, AnalysisSettings(permutations=99))
    found = by_pair(entries)
    assert not notes and len(found) == 9
    alike = [found[pair] for pair in [("u0", "u1"), ("u1", "u0"), ("u0", "u0"), ("u2", "u2")]]
    for entry in alike:
        assert entry.auroc.low > 0.65 and entry.p == 1 / 100
        assert entry.most_chosen == (1, "b")
    for pair in [("u0", "u2"), ("u1", "u2"), ("u2", "u0"), ("u2", "u1")]:
        # A trained probe leans a little on any axis, and these are strong: it need not be 0.5.
        assert found[pair].auroc.value < found[pair[1], pair[1]].auroc.value
        assert found[pair].p > 0.02 and found[pair].p_holm > 0.05
    assert len(found["u0", "u1"].chosen) == 1 and len(found["u0", "u0"].chosen) == 5
    assert (found["u1", "u0"].test_contexts, found["u1", "u0"].auroc.sources) == (60, 60)
    assert [e.p_holm for e in entries] == pytest.approx(holm([e.p for e in entries]))
    # An entry doesn't depend on the others, nor on the number of threads.
    for pair, entry in matrix(hidden, outcome, cut(units, 60, 60), FEWER).items():
        assert found[pair].auroc.value == entry.auroc.value


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [[0, 1], [0, 0]], ids=["apart", "same prompts"])
def test_without_signal_p_values_keep_their_level(prompts):
    settings = AnalysisSettings(permutations=39, resamples=100)
    p = []
    for seed in range(8):
        entries, _ = cross_evaluate(
            *made([0, 0], 40, seed, strength=0.0, prompts=prompts), settings
        )
        p += [entry.p for entry in entries]
    assert np.mean(np.array(p) <= 0.05) <= 0.2 and 0.35 < np.mean(p) < 0.65


def test_a_target_that_is_constant_per_source_is_not_read_from_its_source():
    rng = np.random.default_rng(5)
    sources = np.repeat(np.arange(100), 4)
    label = rng.integers(0, 2, 100)[sources]
    topic = rng.normal(size=(100, WIDTH * 4))[sources]
    states = (topic + 0.1 * rng.normal(size=topic.shape))[None, :, None]
    outcome = Outcome.from_counts(label, np.ones(400), sources)
    units = {"one": np.arange(200), "two": np.arange(200, 400)}
    for entry in cross_evaluate(Arrays(states, ["a"]), outcome, units, QUICK)[0]:
        assert entry.auroc.low < 0.5 < entry.auroc.high and entry.p > 0.05


# -- what is trained on what ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param([0, 0, 1], id="same prompts"),
        pytest.param([0, 1, 2], id="apart", marks=pytest.mark.slow),
    ],
)
def test_no_source_is_on_both_sides(monkeypatch, prompts):
    hidden, outcome, units = made([0, 0, 0], prompts=prompts)
    validate, seen = module.cross_validate, []

    def watched(features, design):
        seen.append(design)
        return validate(features, design)

    monkeypatch.setattr(module, "cross_validate", watched)
    entries, _ = cross_evaluate(hidden, outcome, units, FEWER)
    assert len(seen) == 36
    for design in seen:
        sources = design.outcome.sources
        for fold in design.outer:
            train, test = design.rows_outside(fold), design.tested_rows(fold)
            assert len(test) and not np.isin(sources[train], sources[test]).any()
    crossed = {(e.trained, e.tested) for e in entries if len(e.chosen) > 1}
    apart = {("u0", "u0"), ("u1", "u1"), ("u2", "u2")}
    same = {("u0", "u1"), ("u1", "u0")}
    assert crossed == (apart | same if prompts == [0, 0, 1] else apart)


def test_nothing_is_chosen_with_what_is_tested():
    """Other labels and states among the tested contexts leave the probe as it was."""
    hidden, outcome, units = made([0, 5])
    rows = units["u1"]
    k = outcome.positives.copy()
    k[rows] = TRIALS - k[rows]
    flipped = Outcome.from_counts(k, outcome.trials, outcome.sources, outcome.runs)
    before = matrix(hidden, outcome, units, FEWER)["u0", "u1"]
    after = matrix(hidden, flipped, units, FEWER)["u0", "u1"]
    assert after.auroc.value == pytest.approx(1 - before.auroc.value)
    hidden.states[0, rows, 0, 0] += 5 * flipped.rate[rows]
    assert matrix(hidden, flipped, units, FEWER)["u0", "u1"].chosen == before.chosen


def test_the_same_prompts_may_be_read_differently_by_two_models():
    found = matrix(*made([0, 0], 60, prompts=[0, 0]))
    assert found["u0", "u1"].auroc.low > 0.65 and found["u0", "u1"].p < 0.05
    other = matrix(*made([0, 5], 60, prompts=[0, 0]), FEWER)
    assert other["u0", "u1"].auroc.high < other["u0", "u0"].auroc.value


# -- too little -----------------------------------------------------------------------------------


def cut(units, *sizes):
    """The first contexts of the first units."""
    return {name: rows[:size] for (name, rows), size in zip(units.items(), sizes, strict=False)}


def test_small_units_are_tested_on_only_or_left_out():
    hidden, outcome, units = made([0, 0, 0, 0])
    k = outcome.positives.copy()
    k[units["u3"]] = 4
    level = replace(outcome, positives=k)
    entries, notes = cross_evaluate(hidden, level, cut(units, 40, 15, 5, 40), FEWER)
    assert {(e.trained, e.tested) for e in entries} == {("u0", "u0"), ("u0", "u1")}
    assert [note.split(":")[0] for note in notes] == [
        "u1 isn't trained on",
        "u2 isn't trained or tested on",
        "u3 isn't trained or tested on",
    ]
    assert "all conversations the same rate" in notes[2]


@pytest.mark.parametrize("sizes", [(40, 5), (15, 15)], ids=["only itself", "none to train on"])
def test_without_an_entry_beside_the_diagonal_it_is_refused(sizes):
    hidden, outcome, units = made([0, 0])
    with pytest.raises(UserError, match=r"no unit of u0, u1 can be tested .* another --target"):
        cross_evaluate(hidden, outcome, cut(units, *sizes), QUICK)


# -- the command line -----------------------------------------------------------------------------


@pytest.fixture
def command(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *words: call(train.main, [str(word) for word in words], capfd)


@pytest.fixture(scope="module")
def made_runs(tmp_path_factory):
    """Two runs of the same prompts with two seeds."""
    folder = tmp_path_factory.mktemp("transfer")
    kept = ("response_end", "header_last")
    size = {"contexts": CONTEXTS, "layers": 2, "informative_layer": 2, "d_model": 16}
    plan = Plan("signal", positions=kept, **size)
    first = write(plant(plan), folder / "A[x]").path
    second = shutil.copytree(first, folder / "B")
    rewritten(second, "run.json", with_settings(seed=1))
    return [first, second]


@pytest.fixture
def runs(made_runs, tmp_path):
    return [shutil.copytree(path, tmp_path / path.name) for path in made_runs]


def test_the_command_prints_a_matrix_and_keeps_it(runs, command, monkeypatch):
    monkeypatch.setattr(module, "MIN_SOURCES", 10)
    monkeypatch.setattr(dataset, "MIN_SOURCES", 10)
    words = ["--layers", "1-2", "--permutations", 19, "--resamples", 100]
    said = command(*runs, "--transfer", *words)
    assert said.status == 0, said.err
    result = read(runs[0] / "results" / "probe-rate-planted")
    matrix = result.tables[0]
    assert matrix.columns == ["trained on", "layer, position", "A[x]", "B"]
    rows = result.estimates.query("quantity == 'auroc_transfer'").to_dict("records")
    assert [r["control"] for r in rows] == [
        f"{a} → {b}" for a in ("A[x]", "B") for b in ("A[x]", "B")
    ]
    for row, shown in zip(rows, [cell for r in matrix.rows for cell in r[2:]], strict=True):
        assert row["low"] < row["high"] and 0 < row["p"] <= row["p_holm"] <= 1
        assert row["layer"] in (1, 2) and row["sources"] == row["contexts"] == CONTEXTS
        assert shown.startswith(f"{row['value']:.2f} [") and shown in said.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN"], "only one dataset has an outcome, planted"),
        (["RUN", "--within", "source"], "--transfer doesn't"),
    ],
)
def test_bad_input_is_one_line(runs, command, words, said, monkeypatch):
    monkeypatch.setattr(dataset, "MIN_SOURCES", 10)
    given = [word.replace("RUN", str(runs[0])) for word in words]
    assert said in refusal(command(*given, "--transfer"))
