"""python -m experiments.temperature_sweep: which runs it takes, what it reads and writes."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import scored
import torch
import transformers
from runs import sampled as make_run
from safetensors.torch import load_file
from shell import Outcome, call, files, refusal

from experiments.temperature_sweep.__main__ import main
from experiments.temperature_sweep.analyse import analyse, estimates, hidden
from experiments.temperature_sweep.first_token import header_logits
from experiments.temperature_sweep.lens_curves import lens_curves
from experiments.temperature_sweep.read import openings_of, read
from ia_mech.collect.config import SampleConfig
from ia_mech.display import Quiet
from ia_mech.engine.plan import Grid
from ia_mech.errors import UserError
from ia_mech.judge.label import items_of
from ia_mech.judge.rubric import GENUINE
from ia_mech.lens import Lens, lens_file, save_lens
from ia_mech.run import Run
from ia_mech.run.labels import KEY

GRID = Grid((0.4, 1.2), 3, 6, 0)
FEW = ("--temperatures", "1", "2", "--positions", "header_last")  # what isn't looked at takes time
CHATS = [scored.CONVERSATIONS[number] for number in (0, 2, 3, 6, 7, 8)]
KINDS = ("prompt_restatement", GENUINE, "degenerate")


@pytest.fixture(scope="module", autouse=True)
def cache(tiny_subject, tmp_path_factory):
    """The lens is written where the command looks for it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("IA_MECH_CACHE", str(folder))
        assert save_lens(tiny_subject, list(range(3, 30))) is None
        yield folder


@pytest.fixture(scope="module")
def sampled(cache, tiny_subject, tmp_path_factory):
    """Make a judged run in a folder of its own."""

    def make(conversations=CHATS, **options) -> Run:
        folder = tmp_path_factory.mktemp("sweep")
        data = scored.dataset(folder / "chats.jsonl", conversations)
        options = {"grid": GRID, "swaps": 0, "header_logits": "full"} | options
        config = SampleConfig(dataset=data, limit=None, **options)
        return judged(make_run(config, tiny_subject, folder / "run"))

    return make


def judged(run: Run, judge: str = "planted", kinds=KINDS) -> Run:
    """Sample k is of the kind k; greedy turns are the first."""
    verdicts = []
    keys = run.generations[list(KEY)].itertuples(index=False, name=None)
    for key, item in zip(keys, items_of(run), strict=True):
        category = kinds[key[2] % len(kinds)]
        said = {"repeat": 0, "category": category, "genuine": category == GENUINE}
        said |= {"status": "judged", "rationale": "planted", "item": item.key("", 0)[:16]}
        verdicts.append(dict(zip(KEY, key, strict=True)) | said)
    run.labels.write_judgements(judge, verdicts, {"identity": {"kind": judge}, "repeats": 1})
    return run


@pytest.fixture(scope="module")
def plain(sampled) -> Run:
    """With header logits; tests leave it as it is."""
    return sampled()


@pytest.fixture(scope="module")
def bare(sampled) -> Run:
    """The same without header logits."""
    return sampled(header_logits="none")


@pytest.fixture
def copied(plain, tmp_path):
    def make(name: str = "run") -> Run:
        return Run.open(shutil.copytree(plain.path, tmp_path / name))

    return make


@pytest.fixture
def sweep(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments) -> Outcome:
        return call(main, [*map(str, arguments), "--resamples", "100"], capfd)

    return run


def analysed(run: Run, temperatures=(0.5, 1.0)):
    """What the estimates of one run are made of, and its notes."""
    return analyse(read([run.path]), temperatures, ["header_last"], Quiet())


def edited(run: Run, name: str, change) -> Run:
    content = json.loads((run.path / name).read_text())
    change(content)
    (run.path / name).write_text(json.dumps(content))
    return run


# -- what is read -------------------------------------------------------------------------------


def test_turns_and_contexts_are_the_stored_ones(plain):
    found = read([plain.path])
    assert found.temperatures == [0.4, 1.2] and found.judge == "planted"
    assert len(found.turns) == len(plain.generations)
    rows = plain.contexts.iloc[found.contexts["at"]]
    assert found.contexts["context"].str.contains(rows["context_id"].iloc[0]).iloc[0]
    greedy = plain.generations[plain.generations["temperature"] == 0].set_index("context_id")
    first = [int(greedy.loc[name, "token_ids"][0]) for name in rows["context_id"]]
    assert found.contexts["greedy"].tolist() == first
    assert found.turn_ends == sorted(map(int, plain.record["identity"]["chat"]["stop_ids"]))
    stored = plain.generations.set_index(list(KEY))["token_ids"]
    for turn in found.turns.itertuples():
        assert (stored[turn.context_id, turn.temperature, turn.sample] == turn.token_ids).all()


def test_header_logits_computed_by_the_lens_are_the_stored_ones(plain, bare):
    """Total variation below 1e-3 at every temperature of the default grid."""
    lens = Lens.load(plain.model["weights_hash"])
    rows = np.arange(len(plain.contexts))
    kept, made = (
        torch.cat([logits for _, logits in header_logits(run, rows, lens)]) for run in (plain, bare)
    )
    for t in (0.3, 1.0, 2.0):
        distance = ((kept / t).softmax(-1) - (made / t).softmax(-1)).abs().sum(-1) / 2
        assert distance.max() < 1e-3
    own = plain.contexts["first_token_entropy_tempered"].tolist()
    for at, t in enumerate(GRID.temperatures):
        p = (made.double() / t).softmax(-1)
        entropy = -(p * p.log()).sum(-1)
        assert entropy.tolist() == pytest.approx([row[at] for row in own], abs=1e-4)


def test_gaps_are_those_of_the_models_own_distribution_at_that_token(plain, tiny_subject):
    """Of a plain forward pass over the context and the turn, wherever greedy leaves it."""
    found = read([plain.path])
    frame = hidden(found)
    sampled = found.turns[found.turns["temperature"] > 0].reset_index(drop=True)
    contexts = plain.contexts.set_index("context_id")["token_ids"]
    tokens = []
    for turn, one in zip(sampled.itertuples(), frame.itertuples(), strict=True):
        if not one.leaves:
            continue
        at = int(one.token) - 1
        ids = contexts[turn.context_id].tolist(), turn.token_ids.tolist()
        said = scored.logits(tiny_subject.model, *ids)[at].log_softmax(-1)
        own = said[ids[1][at]]
        assert one.gap == pytest.approx((said.max() - own).item(), abs=1e-4)
        assert one.rank == (said > own).sum() + 1 > 1
        assert one.probability == pytest.approx(own.exp().item(), abs=1e-5)
        assert one.follows == (at > 0)
        tokens.append(at)
    assert tokens.count(0) > 5 and max(tokens) > 1


def test_the_last_layer_of_the_lens_is_the_model(plain):
    found = read([plain.path])
    lens = Lens.load(plain.model["weights_hash"])
    curves = lens_curves(found, openings_of(found.turns), lens)
    said = [plain.header_logits().log_probs(at) for at in found.contexts["at"]]
    own = [p[token].item() for p, token in zip(said, found.contexts["greedy"], strict=True)]
    last = curves.greedy[:, -1, curves.positions.index("header_last")]
    assert last.tolist() == pytest.approx(own, abs=5e-3)
    assert own == pytest.approx([p.max().item() for p in said], abs=5e-3)
    assert np.isnan(curves.greedy[:, 0, curves.positions.index("response_end")]).any()  # ""


def test_runs_of_other_seeds_share_their_contexts(plain, sampled):
    other = sampled(grid=Grid((0.4, 1.2), 2, 6, 1))
    found = read([plain.path, other.path])
    assert len(found.contexts) == len(plain.contexts)
    assert len(found.turns) == len(plain.generations) + len(other.generations) - len(plain.contexts)
    frame = hidden(found)
    assert len(frame) == (found.turns["temperature"] > 0).sum() and frame["follows"].notna().all()


def test_perturbed_contexts_are_left_out(plain, monkeypatch):
    whole, frame = analysed(plain)[0], Run._frame

    def perturbed(which):
        def read(run, *args):
            found = frame(run, *args)
            found.loc[found["context_id"].isin(which), "perturbation"] = "shuffled"
            return found

        return read

    monkeypatch.setattr(Run, "_frame", perturbed(["c0"]))
    found, notes = analysed(plain)
    assert "7 turns of perturbed contexts are left out." in notes
    assert len(found.sweep.contexts) == len(whole.sweep.contexts) - 1
    assert len(found.references.curve) == len(whole.references.curve) - 1
    assert len(found.hidden) == len(whole.hidden) - 6
    monkeypatch.setattr(Run, "_frame", perturbed(plain.contexts["context_id"].tolist()))
    with pytest.raises(UserError, match="all contexts are perturbed; give runs"):
        read([plain.path])


# -- the command line ---------------------------------------------------------------------------

WRITTEN = ["estimates.parquet", "turns.parquet"] + [
    f"{name}.{kind}"
    for name in ("first_token", "hidden", "lens", "rates")
    for kind in ("png", "svg")
]


def wrote(outcome: Outcome) -> str:
    return outcome.err.splitlines()[-1]


def test_without_the_model_only_its_lens_is_needed(bare, sweep, cache, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    monkeypatch.setattr("ia_mech.models.load.load", refuse)
    lens = lens_file(bare.model["weights_hash"])
    kept = [path for path in (cache / "models").rglob("*") if path.is_file()]
    assert kept == [lens] and set(load_file(lens)) == {"norm_weight", "norm_bias", "unembedding"}
    before = files(bare.path)
    outcome = sweep(bare.path)
    assert outcome.status == 0, outcome.err
    folder = bare.path / "experiments" / "temperature_sweep"
    assert wrote(outcome) == f"wrote {folder}"
    assert sorted(p.name for p in folder.iterdir()) == sorted(WRITTEN)
    turns = pd.read_parquet(folder / "turns.parquet").set_index(list(KEY))
    stored = bare.generations.query("temperature > 0").set_index(list(KEY))
    assert turns.index.sort_values().equals(stored.index.sort_values())
    left = turns[turns["leaves"] == 1]
    ranks = [stored.loc[key, "ranks"][int(at) - 1] for key, at in left["token"].items()]
    assert left["rank"].tolist() == ranks
    assert {name: found for name, found in files(bare.path).items() if name in before} == before
    for said in ("follow-up rate", "effective tokens", "opens as greedy", "best T", "from layer"):
        assert said in outcome.out
    assert "are not stored: they were computed from the last layer with the lens" in outcome.out
    assert Run.open(bare.path).verify() == []


def test_stored_and_computed_logits_give_the_same_estimates(plain, bare):
    temperatures = [0.3, 1.0, 2.0]
    made = [
        estimates(analysed(run, temperatures)[0], resamples=100, seed=1) for run in (plain, bare)
    ]
    columns = ["quantity", "dataset", "temperature", "layer", "position", "of", "at"]
    pd.testing.assert_frame_equal(made[0][columns], made[1][columns])
    first = made[0]["quantity"].str.contains("first token|mass on|variation")
    close = made[0][first]["value"].to_numpy(), made[1][first]["value"].to_numpy()
    np.testing.assert_allclose(*close, atol=2e-3, rtol=2e-3)
    pd.testing.assert_frame_equal(made[0][~first], made[1][~first], atol=1e-4)
    assert {"tempered log p", "best temperature"} <= set(made[0]["quantity"])
    entropy = made[0][(made[0]["quantity"] == "first token's entropy")]
    entropy = entropy[(entropy["dataset"] == "(all)") & (entropy["temperature"] == 1.0)]
    expected = plain.contexts["first_token_entropy"].mean()
    assert entropy["value"].item() == pytest.approx(expected, abs=1e-3)


def test_temperatures_and_positions_are_those_asked_for(plain, sweep, tmp_path):
    words = ["--temperatures", "0.5", "3", "--positions", "turn_end", "--out", tmp_path / "out"]
    assert sweep(plain.path, *words).status == 0
    made = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    first = made[made["quantity"] == "first token's entropy"]
    assert set(first["temperature"]) == {0.5, 3.0}
    assert set(made["position"]) == {"", "turn_end"}
    assert set(made["layer"].dropna()) == set(plain.layers)


def test_turns_without_follow_ups_have_rates_and_no_openings(copied, sweep, tmp_path):
    run = judged(copied(), kinds=("degenerate",))
    outcome = sweep(run.path, "--judge", "planted", "--out", tmp_path / "out", *FEW)
    assert outcome.status == 0, outcome.err
    assert "sampled turns of 0 sources were judged genuine" in outcome.out
    made = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    assert made[made["quantity"] == "mass on openings"]["value"].isna().all()
    lens = made[made["quantity"] == "log p by the lens"].set_index("of")["value"]
    assert lens["greedy opening"].notna().all() and lens["best follow-up opening"].isna().all()


def test_without_a_lens_the_stored_logits_are_enough(copied, bare, sweep, tmp_path, monkeypatch):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "empty"))
    outcome = sweep(copied().path, "--out", tmp_path / "out", *FEW)
    assert outcome.status == 0, outcome.err
    assert "no logit lens: no lens for the model" in outcome.out
    assert not (tmp_path / "out" / "lens.png").exists()
    line = refusal(sweep(bare.path))
    assert "has no header logits, and there is no lens to compute them with" in line


def test_a_run_of_before_references_were_scored_is_noted(copied):
    run = edited(copied(), "run.json", lambda r: r["identity"].pop("score_temperatures"))
    found, notes = analysed(run)
    assert found.references is None
    assert notes[-1].startswith(f"{run.path}: sampled before references were scored at many")


# -- what is refused ----------------------------------------------------------------------------


def test_runs_without_judgements_are_refused(copied, sweep):
    run = copied()
    shutil.rmtree(run.path / "judgements")
    line = refusal(sweep(run.path))
    assert f"{run.path} has not been judged; run: python -m ia_mech.judge run {run.path}" in line


def test_one_temperature_is_refused(sampled, sweep):
    run = sampled(CHATS[:2], grid=Grid((1.0,), 2, 4, 0))
    line = refusal(sweep(run.path))
    assert "sampled at T = 1 only: of one temperature there is no sweep" in line
    assert "--temperatures" in line


def test_runs_that_do_not_match_are_refused(plain, sampled, sweep):
    other = sampled(CHATS[:2], grid=Grid((0.4, 1.0, 1.2), 2, 6, 3))
    line = refusal(sweep(plain.path, other.path))
    assert "the runs don't match: 4 of 6 sources lack a temperature" in line
    assert "has 0.4, 1.2, all together 0.4, 1, 1.2" in line


def test_copies_and_several_models_are_refused(plain, copied, sweep):
    other = copied()
    line = refusal(sweep(plain.path, other.path))
    assert f"{other.path} is a copy of {plain.path}; give each run once" in line
    assert "is given twice" in refusal(sweep(plain.path, plain.path))
    edited(
        other, "run.json",
        lambda r: r["identity"]["model"].update(name="other", weights_hash="0"),
    )  # fmt: skip
    line = refusal(sweep(plain.path, other.path))
    assert "the runs are of several models (tiny-llama, other); give runs of one model" in line


def test_top_k_logits_need_the_last_layer(plain, sampled, sweep, monkeypatch, tmp_path):
    some = CHATS[:3]
    run = sampled(some, header_logits="5", positions=("header_last",))
    found, notes = analysed(run)
    assert any("with the lens" in note for note in notes)
    whole = analysed(plain)[0].first.entropy[:3]
    np.testing.assert_allclose(found.first.entropy, whole, atol=5e-3)
    elsewhere = sampled(some, header_logits="5", positions=("turn_end",))
    line = refusal(sweep(elsewhere.path))
    assert "has only the 5 largest header logits, and header_last was not kept either" in line
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "empty"))
    assert "only the 5 largest" in refusal(sweep(run.path))


def test_what_the_stored_logits_cannot_give_is_refused(plain, bare, sweep):
    line = refusal(sweep(plain.path, "--temperatures", "0.1"))
    assert "too coarse for T = 0.1; give --temperatures from 0.3 up" in line
    cold = analysed(bare, [0.1])[0].first
    assert (cold.tokens < 3).all() and cold.temperatures == [0.1]


def test_a_position_that_was_not_kept_is_refused(plain, sweep):
    line = refusal(sweep(plain.path, "--positions", "nowhere"))
    assert "position 'nowhere' was not kept in any run; give some of query_end" in line


def test_judges_and_folders_are_checked(copied, sweep, tmp_path):
    run = judged(copied(), "other")
    assert "choose one with --judge" in refusal(sweep(run.path))
    assert "has no verdicts of 'nobody'" in refusal(sweep(run.path, "--judge", "nobody"))
    inside = run.path / "contexts"
    assert "lies inside the run" in refusal(sweep(run.path, "--judge", "other", "--out", inside))
    assert "is not a run" in refusal(sweep(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "words", [[], ["--level", "2"], ["--temperatures", "0"], ["--temperatures", "hot"], ["--what"]]
)
def test_mistyped_commands_are_refused_in_one_line(plain, capfd, words):
    outcome = call(main, [*([str(plain.path)] if words else []), *words], capfd)
    assert outcome.status == 2 and outcome.out == "" and outcome.err.count("\n") == 1
