"""What a temperature sweep computes: closed forms on planted logits, and runs of a tiny model."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scored
import torch
import transformers
from runs import rewritten, with_settings
from runs import sampled as make_run
from safetensors.torch import load_file
from shell import call, refusal

from experiments.outcome import (
    BEST,
    GREEDY,
    first_token_masses,
    openings_of,
)
from experiments.shown import estimates_of
from experiments.temperature_sweep import (
    DEEPER,
    DEEPER_FORMED,
    GAP,
    GARBLED,
    GRID,
    RATE,
    RATE_DIFFERENCE,
    TemperatureSweep,
    against_others,
    leaving_point,
    main,
)
from ia_mech.engine.workers import Team
from ia_mech.judge.judging import items_of
from ia_mech.judge.rubric import ASSESSED, FOLLOW_UP
from ia_mech.lens import lens_file, save_lens
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.settings import Settings
from ia_mech.stats import cluster_mean, paired_difference

NAN, LOG = np.nan, np.log
QUERY, RESPONSE, LOOP = "repeats_query", "repeats_response", "degenerate"


def turn(source: str, temperature: float, category: str, ids=(5,), **changes) -> dict:
    made = {
        "run": "r",
        "dataset": "d",
        "source": source,
        "context": source,
        "context_id": source,
        "temperature": temperature,
        "category": category,
        "follow_up": float(category == FOLLOW_UP) if category in ASSESSED else NAN,
        "token_ids": np.array(ids),
    }
    return made | changes


# -- the first token ------------------------------------------------------------------------------


def test_two_levels_of_logits_have_a_closed_form_at_every_temperature():
    # k tokens a nats above n others: p of one of them is e^(a/T) / Z, Z = k e^(a/T) + n.
    k, n, a = 3, 13, 2.0
    logits = torch.zeros(2, k + n)
    logits[:, :k] = a
    logits[1] += 40.0  # a constant changes nothing
    shares = [np.zeros((2, 2)), np.array([[1.0, 0.0], [0.25, 0.5]])]
    temperatures = [0.25, 1.0, 4.0]
    entropy, ends, none, opened = first_token_masses(
        logits, temperatures, [0, k], np.array([1, k + 1]), shares
    )
    for at, t in enumerate(temperatures):
        z = k * np.exp(a / t) + n
        high, low = np.exp(a / t) / z, 1 / z
        assert entropy[:, at] == pytest.approx(-k * high * LOG(high) - n * low * LOG(low), abs=1e-5)
        assert ends[:, at] == pytest.approx(high + low, abs=1e-6)
        assert opened[0, at] == pytest.approx(high, abs=1e-6)
        assert opened[1, at] == pytest.approx(high / 4 + low / 2, abs=1e-6)
        assert none[:, at] == pytest.approx(0)


# -- openings -------------------------------------------------------------------------------------

OPENINGS = pd.DataFrame(
    [
        turn("a", 1.0, FOLLOW_UP, [5, 1]),
        turn("a", 1.3, FOLLOW_UP, [5, 2]),
        turn("a", 1.0, QUERY, [6]),
        turn("b", 1.0, FOLLOW_UP, [6]),
        turn("b", 1.0, QUERY, [5]),
        turn("b", 1.0, RESPONSE, [7]),
        turn("c", 1.0, FOLLOW_UP, [5]),
        turn("c", 1.0, RESPONSE, [5]),
        turn("c", 1.0, LOOP, [8]),  # neither: no opening
        turn("c", 0.0, FOLLOW_UP, [9]),  # greedy: no sample
    ]
)


def test_openings_are_counted_in_sampled_turns_of_other_sources():
    found = openings_of(OPENINGS)
    assert found.ids.tolist() == [5, 6, 7]
    follow_up, restated = found.of_others(["a", "b", "c", "a"])
    # a sees b and c: token 5 opened 1 follow-up (c) and 2 restatements (b, c).
    assert follow_up[0] == pytest.approx([1 / 3, 1, 0])
    assert restated[0] == pytest.approx([2 / 3, 0, 1])
    assert follow_up[1] == pytest.approx([3 / 4, 0, 0])
    assert restated[1] == pytest.approx([1 / 4, 1, 0])  # token 7 opened nothing in a or c
    assert follow_up[2] == pytest.approx([2 / 3, 1 / 2, 0])
    assert restated[2] == pytest.approx([1 / 3, 1 / 2, 1])
    assert (follow_up[3] == follow_up[0]).all()
    lone = OPENINGS[(OPENINGS["source"] == "a") | (OPENINGS["category"] != FOLLOW_UP)]
    follow_up, restated = openings_of(lone).of_others(["a", "b"])
    assert np.isnan(follow_up[0]).all() and not np.isnan([restated[0], follow_up[1]]).any()
    none = openings_of(OPENINGS[OPENINGS["category"] == LOOP])
    assert all(np.isnan(share).all() for share in none.of_others(["c"]))


# -- how hidden -----------------------------------------------------------------------------------


def written(ids, logprobs, ranks) -> SimpleNamespace:
    return SimpleNamespace(token_ids=ids, logprobs_raw=np.log(logprobs), ranks=ranks)


def test_greedy_leaves_at_the_first_token_that_differs_and_the_gap_is_of_one_distribution():
    greedy = written([4, 5, 6, 2], [0.5, 0.4, 0.6, 0.9], [1, 1, 1, 1])
    found = leaving_point(
        written([4, 5, 9, 6, 2], [0.5, 0.4, 0.1, 0.7, 0.9], [1, 1, 3, 1, 1]), greedy
    )
    assert found == pytest.approx({"token": 3, "rank": 3, "gap": LOG(0.6 / 0.1)})
    at_once = leaving_point(written([7, 5], [0.01, 0.2], [12, 1]), greedy)
    assert at_once == pytest.approx({"token": 1, "rank": 12, "gap": LOG(0.5 / 0.01)})
    assert all(np.isnan(value) for value in leaving_point(greedy, greedy).values())


def test_follow_up_turns_are_compared_within_context_and_temperature():
    rows = [("x", 1.0, 1, 4.0), ("x", 1.0, 0, 1.0), ("x", 1.0, 0, 2.0), ("x", 1.3, 1, 50.0)]
    rows += [("y", 1.0, 0, 9.0), ("z", 1.3, 1, 1.0), ("z", 1.3, 1, 3.0), ("z", 1.3, 0, 7.0)]
    rows += [("z", 1.3, 0, NAN)]
    frame = pd.DataFrame(rows, columns=["context", "temperature", "follow_up", "gap"])
    values, of = against_others(frame.assign(source=frame["context"]))
    assert values.tolist() == [2.5, -6.0, -4.0]  # minus 1.5 in x, minus 7 in z
    assert of.tolist() == ["x", "z", "z"]


# -- runs of a tiny model --------------------------------------------------------------------------

DECODING = {"temperatures": (0.4, 1.2), "samples": 3, "max_new_tokens": 6}
CHATS = [scored.CONVERSATIONS[number] for number in (0, 2, 3, 6, 7, 8)]
KINDS = ("repeats_query", FOLLOW_UP, "degenerate")


@pytest.fixture(scope="module", autouse=True)
def cache(tiny_subject, tmp_path_factory):
    """The lens is written where the command looks for it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("IA_MECH_CACHE", str(folder))
        assert save_lens(Team(tiny_subject), tiny_subject.weights_hash, list(range(3, 30))) is None
        yield folder


def judged(run: Run, kinds=KINDS) -> Run:
    """Sample k is of the kind k by the only judge, or of that which a function gives for its key;
    greedy turns are of the first."""
    verdicts = []
    keys = run.generations[list(KEY)].itertuples(index=False, name=None)
    for key, item in zip(keys, items_of(run), strict=True):
        category = kinds(key) if callable(kinds) else kinds[key[2] % len(kinds)]
        verdict = {"repeat": 0, "category": category, "follow_up": category == FOLLOW_UP}
        verdict |= {"status": "judged", "rationale": "planted", "item": item.id}
        verdicts.append(dict(zip(KEY, key, strict=True)) | verdict)
    run.labels.write_judgements("planted", verdicts, {"identity": {"kind": "p"}, "repeats": 1})
    return run


@pytest.fixture(scope="module")
def plain(cache, tiny_subject, tmp_path_factory) -> Run:
    """A judged run with header logits; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("sweep")
    data = scored.dataset(folder / "chats.jsonl", CHATS)
    settings = Settings(dataset=data, limit=None, **DECODING)
    return judged(make_run(settings, tiny_subject, folder / "run"))


@pytest.fixture
def copied(plain, tmp_path):
    def make(name: str = "run") -> Run:
        return Run.open(shutil.copytree(plain.path, tmp_path / name))

    return make


def sweep_of(run: Run) -> tuple[TemperatureSweep, pd.DataFrame, pd.DataFrame]:
    """The experiment on a run, what it measured, and its estimates."""
    args = TemperatureSweep.build_parser().parse_args([str(run.path), "--resamples", "100"])
    one = TemperatureSweep([run], args, Path())
    one.check()
    rows = one.rows()
    return one, rows, estimates_of(one.estimate(rows), one.columns, 0.95)


@pytest.fixture(scope="module")
def swept(plain):
    return sweep_of(plain)


def picked(made: pd.DataFrame, quantity: str, **names) -> pd.DataFrame:
    for name, value in ({"quantity": quantity} | names).items():
        made = made[made[name] == value]
    return made


def test_rates_masses_and_depths_are_those_of_their_turns(swept):
    one, left, made = swept
    at, before = (one.turns[one.turns["temperature"] == t] for t in (1.2, 0.0))
    of = {"dataset": "(all)", "temperature": 1.2}
    rate = cluster_mean(at["follow_up"], at["source"], proportion=True)
    row = picked(made, RATE, **of).iloc[0]
    assert row[["value", "low", "high"]].tolist() == [rate.value, rate.low, rate.high]
    paired = paired_difference(at["follow_up"], at["source"], before["follow_up"], before["source"])
    row = picked(made, RATE_DIFFERENCE, **of)
    ends = paired.difference.value, paired.difference.low, paired.difference.high, paired.p
    assert tuple(row[["value", "low", "high", "p"]].iloc[0]) == ends
    expected = cluster_mean(one.first["follow_up"][:, 0], one.contexts["source"]).clip(0, 1)
    row = picked(made, "mass on openings", dataset="(all)", term="follow-ups' openings").iloc[0]
    assert row[["value", "low", "high"]].tolist() == [expected.value, expected.low, expected.high]
    bounded = made[made["quantity"] == "mass on turn-end"]
    assert bounded[["low", "high"]].stack().between(0, 1).all()
    at = left[left["temperature"] == 1.2]
    own = made[(made["dataset"] == "(all)") & (made["temperature"] == 1.2)].set_index("quantity")
    kind = own[own["term"] == "follow-ups"]
    median = at.loc[at["follow_up"] == 1, "gap"].median()
    assert kind.loc[GAP, "value"] == pytest.approx(median)
    formed = at[at["category"] != GARBLED]
    assert 0 < len(formed) < len(at)
    for quantity, rows in {DEEPER: at, DEEPER_FORMED: formed}.items():
        means = rows.pivot_table(index="context", columns="follow_up", values="gap").dropna()
        apart = (means[1.0] - means[0.0]).mean()
        assert kind.loc[quantity, "value"] == pytest.approx(apart)


def test_without_the_model_only_its_lens_is_needed(copied, cache, capfd, monkeypatch):
    run = copied()

    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    monkeypatch.setattr("ia_mech.models.load.load", refuse)
    lens = lens_file(run.model["weights_hash"])
    kept = [path for path in (cache / "models").rglob("*") if path.is_file()]
    assert kept == [lens] and set(load_file(lens)) == {"norm_weight", "norm_bias", "unembedding"}
    outcome = call(main, [str(run.path), "--resamples", "100", "--full"], capfd)
    assert outcome.status == 0, outcome.err
    folder = run.path / "results" / "temperature-sweep"
    turns = pd.read_parquet(folder / "turns.parquet").set_index(list(KEY))
    stored = run.generations.query("temperature > 0").set_index(list(KEY))
    assert turns.index.sort_values().equals(stored.index.sort_values())
    left = turns[turns["token"].notna()]
    ranks = [stored.loc[key, "ranks"][int(at) - 1] for key, at in left["token"].items()]
    assert left["rank"].tolist() == ranks
    made = pd.read_parquet(folder / "estimates.parquet")
    first = made[made["quantity"] == "first token's entropy"]
    assert set(first["temperature"]) == {*GRID} and made["detectable"].notna().any()


def test_turns_without_follow_ups_have_rates_and_no_openings(copied):
    *_, made = sweep_of(judged(copied(), kinds=("degenerate",)))
    assert made[made["quantity"] == "mass on openings"]["value"].isna().all()
    lens = made[made["quantity"] == "log p by the lens"].set_index("term")["value"]
    assert lens[GREEDY].notna().all() and lens[BEST].isna().all()


def test_without_a_lens_the_rest_is_there_and_a_note(plain, monkeypatch, tmp_path):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "empty"))
    one, _, found = sweep_of(plain)
    assert one.log_p == {} and any("no logit lens: no lens for the" in note for note in one.notes)
    assert len(found[found["quantity"] == DEEPER])


def test_runs_that_make_no_sweep_are_refused(copied, capfd):
    run = copied()

    def refused(**changed) -> str:
        rewritten(run.path, "run.json", with_settings(**changed))
        return refusal(call(main, [str(run.path)], capfd))

    assert "doesn't keep all header logits; sample with" in refused(header_logits="none")
    assert "begin after --opening: header_last doesn't predict" in refused(opening="Wait,")
