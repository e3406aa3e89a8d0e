"""What a temperature sweep computes: closed forms on planted logits, and runs of a tiny model."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scored
import torch
import transformers
from runs import sampled as make_run
from safetensors.torch import load_file
from shell import call

from experiments.temperature_sweep.__main__ import main
from experiments.temperature_sweep.analyse import GARBLED, estimates
from experiments.temperature_sweep.measure import (
    FirstToken,
    Measured,
    against_others,
    compared,
    curves,
    header_logits,
    leaving,
    lens_curves,
    measure,
    overtaking,
)
from experiments.temperature_sweep.read import Sweep, openings_of, read
from ia_mech.display import Quiet
from ia_mech.errors import UserError
from ia_mech.judge.label import items_of
from ia_mech.judge.rubric import ASSESSED, GENUINE
from ia_mech.lens import Lens, lens_file, save_lens
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.settings import Settings
from ia_mech.stats import cluster_mean, holm, paired_difference

NAN, LOG = np.nan, np.log
QUERY, RESPONSE, LOOP = "prompt_restatement", "assistant_restatement", "degenerate"


def turn(source: str, temperature: float, category: str, ids=(5,), **changes) -> dict:
    made = {
        "run": "r",
        "dataset": "d",
        "source": source,
        "context": source,
        "context_id": source,
        "temperature": temperature,
        "category": category,
        "genuine": float(category == GENUINE) if category in ASSESSED else NAN,
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
    entropy, ends, variation, none, opened = curves(
        logits, temperatures, [0, k], [1, k + 1], shares
    )
    for at, t in enumerate(temperatures):
        z = k * np.exp(a / t) + n
        high, low = np.exp(a / t) / z, 1 / z
        assert entropy[:, at] == pytest.approx(-k * high * LOG(high) - n * low * LOG(low), abs=1e-5)
        assert ends[:, at] == pytest.approx(high + low, abs=1e-6)
        one = np.exp(a) / (k * np.exp(a) + n)
        # Mass moves from one level to the other, all of it counted once.
        assert variation[:, at] == pytest.approx(k * abs(high - one), abs=1e-6)
        assert opened[0, at] == pytest.approx(high, abs=1e-6)
        assert opened[1, at] == pytest.approx(high / 4 + low / 2, abs=1e-6)
        assert none[:, at] == pytest.approx(0)


# -- openings -------------------------------------------------------------------------------------

OPENINGS = pd.DataFrame(
    [
        turn("a", 1.0, GENUINE, [5, 1]),
        turn("a", 1.3, GENUINE, [5, 2]),
        turn("a", 1.0, QUERY, [6]),
        turn("b", 1.0, GENUINE, [6]),
        turn("b", 1.0, QUERY, [5]),
        turn("b", 1.0, RESPONSE, [7]),
        turn("c", 1.0, GENUINE, [5]),
        turn("c", 1.0, RESPONSE, [5]),
        turn("c", 1.0, LOOP, [8]),  # neither: no opening
        turn("c", 0.0, GENUINE, [9]),  # greedy: no sample
    ]
)


def test_openings_are_counted_in_sampled_turns_of_other_sources():
    found = openings_of(OPENINGS)
    assert found.ids.tolist() == [5, 6, 7]
    genuine, restated = found.of_others(["a", "b", "c", "a"])
    # a sees b and c: token 5 opened 1 genuine turn (c) and 2 restatements (b, c).
    assert genuine[0] == pytest.approx([1 / 3, 1, 0])
    assert restated[0] == pytest.approx([2 / 3, 0, 1])
    assert genuine[1] == pytest.approx([3 / 4, 0, 0])
    assert restated[1] == pytest.approx([1 / 4, 1, 0])  # token 7 opened nothing in a or c
    assert genuine[2] == pytest.approx([2 / 3, 1 / 2, 0])
    assert restated[2] == pytest.approx([1 / 3, 1 / 2, 1])
    assert (genuine[3] == genuine[0]).all()
    lone = OPENINGS[(OPENINGS["source"] == "a") | (OPENINGS["category"] != GENUINE)]
    genuine, restated = openings_of(lone).of_others(["a", "b"])
    assert np.isnan(genuine[0]).all() and not np.isnan([restated[0], genuine[1]]).any()
    none = openings_of(OPENINGS[OPENINGS["category"] == LOOP])
    assert all(np.isnan(share).all() for share in none.of_others(["c"]))


# -- how hidden -----------------------------------------------------------------------------------


def written(ids, logprobs, ranks) -> SimpleNamespace:
    return SimpleNamespace(token_ids=ids, logprobs_raw=np.log(logprobs), ranks=ranks)


def test_greedy_leaves_at_the_first_token_that_differs_and_the_gap_is_of_one_distribution():
    greedy = written([4, 5, 6, 2], [0.5, 0.4, 0.6, 0.9], [1, 1, 1, 1])
    found = leaving(written([4, 5, 9, 6, 2], [0.5, 0.4, 0.1, 0.7, 0.9], [1, 1, 3, 1, 1]), greedy)
    assert found == pytest.approx(
        {"follows": 1, "leaves": 1, "token": 3, "before": 2 / 5, "rank": 3}
        | {"probability": 0.1, "gap": LOG(0.6 / 0.1)}
    )
    at_once = leaving(written([7, 5], [0.01, 0.2], [12, 1]), greedy)
    assert at_once == pytest.approx(
        {"follows": 0, "leaves": 1, "token": 1, "before": 0, "rank": 12}
        | {"probability": 0.01, "gap": LOG(0.5 / 0.01)}
    )
    never = leaving(greedy, greedy)
    assert (never["follows"], never["leaves"]) == (1, 0) and np.isnan(never["gap"])


def test_genuine_turns_are_compared_within_context_and_temperature():
    rows = [("x", 1.0, 1, 4.0), ("x", 1.0, 0, 1.0), ("x", 1.0, 0, 2.0), ("x", 1.3, 1, 50.0)]
    rows += [("y", 1.0, 0, 9.0), ("z", 1.3, 1, 1.0), ("z", 1.3, 1, 3.0), ("z", 1.3, 0, 7.0)]
    rows += [("z", 1.3, 0, NAN)]
    frame = pd.DataFrame(rows, columns=["context", "temperature", "genuine", "value"])
    values, genuine, kept = against_others(frame, "value")
    assert values.tolist() == [2.5, -0.5, 0.5, -6.0, -4.0, 0.0]  # less 1.5 in x, less 7 in z
    assert genuine.tolist() == [True, False, False, True, True, False]
    assert kept["context"].tolist() == ["x"] * 3 + ["z"] * 3


# -- logit lens -----------------------------------------------------------------------------------

EYE = torch.eye(4)


def planted_lens(**changes) -> Lens:
    """An RMSNorm without weights: logits of a residual r are 10 r / rms(r)."""
    made = Lens(torch.ones(4), torch.zeros(4), 10 * EYE, 0.0, False, 1.0, None)
    return replace(made, **changes)


class PlantedRun:
    """Residual streams of 3 contexts, 3 layers; ``early`` was kept for the first two only."""

    path, layers = "r", range(3)
    positions = ("early", "header_last")

    def __init__(self) -> None:
        self.settings, self.model = {"header_logits": "none"}, {"vocab": 4}
        self.record = {"identity": {"chat": {"stop_ids": {"3": "end"}}}}

    def residuals(self, layer: int, position: str) -> torch.Tensor:
        last = {
            0: [EYE[1], EYE[2], EYE[0]],  # token 1, 2, 0 on top
            1: [EYE[0], EYE[2], EYE[0] + EYE[1]],
            2: [EYE[0], EYE[0], EYE[0]],
        }[layer]
        made = torch.stack(last)
        if position == "early":
            made = made.flip(-1).clone()
            made[2] = torch.nan
        return made


def planted_sweep() -> Sweep:
    """Greedy opens with token 0 in all; others' genuine turns open with 1, and half with 2."""
    turns = [turn(s, 1.0, GENUINE, [1]) for s in "abc"]
    turns += [turn(s, 1.0, c, [2]) for s in "abc" for c in (GENUINE, QUERY)]
    turns += [turn(s, 1.0, QUERY, [0]) for s in "abc"]
    contexts = pd.DataFrame(
        {"context": list("abc"), "dataset": "d", "source": list("abc"), "run": 0}
        | {"at": [0, 1, 2], "greedy": 0}
    )
    return Sweep([PlantedRun()], pd.DataFrame(turns), contexts, "planted", [])


def test_the_lens_reads_every_layer_and_position():
    sweep = planted_sweep()
    found = lens_curves(sweep, openings_of(sweep.turns), planted_lens())
    assert found.positions == ["early", "header_last"] and found.layers == [0, 1, 2]
    assert found.share.tolist() == [0, 0, 0]
    z = LOG(np.exp(20.0) + 3)
    own = found.greedy[..., 1]
    assert own[0] == pytest.approx([-z, 20 - z, 20 - z], abs=1e-4)
    assert own[1] == pytest.approx([-z, -z, 20 - z], abs=1e-4)
    # Together: token 1 whole and half of token 2. At layer 0 context 0 says 1, context 1 says 2.
    both = found.follow_ups[..., 1]
    assert both[0, 0] == pytest.approx(LOG(np.exp(20 - z) + np.exp(-z) / 2), abs=1e-4)
    assert both[1, 0] == pytest.approx(LOG(np.exp(-z) + np.exp(20 - z) / 2), abs=1e-4)
    assert both[0, 2] == pytest.approx(LOG(1.5) - z, abs=1e-4)
    best = found.best[..., 1]
    assert best[:2, 0] == pytest.approx([20 - z] * 2, abs=1e-4)
    assert best[0, 2] == pytest.approx(-z, abs=1e-4)
    early = found.greedy[..., 0]  # e_0 flipped is token 3: token 0 has the lower logit
    assert early[0, 2] == pytest.approx(-z, abs=1e-4) and np.isnan(early[2]).all()
    only = lens_curves(sweep, openings_of(sweep.turns), planted_lens(), ["header_last"])
    np.testing.assert_array_equal(only.greedy[..., 0], own)
    first = overtaking(found.greedy, found.best)
    # Context 2 is ahead at layer 0, level at layer 1 (no lead), and ahead for good at layer 2.
    assert first[:, 1].tolist() == [1, 2, 2]
    assert np.isinf(first[:2, 0]).all() and np.isnan(first[2, 0])


def test_what_greedy_opens_with_is_not_its_own_rival():
    said = np.log([[0.5, 0.2, 0.3]] * 3)
    weights = np.array([[0.0, 1.0, 0.25], [0.0, 0.0, 0.0], [NAN, NAN, NAN]])
    greedy, together, best = compared(said, np.array([0, 0, 0]), weights)
    assert greedy == pytest.approx(LOG([0.5] * 3))
    assert together[0] == pytest.approx(LOG(0.2 + 0.3 / 4)) and best[0] == pytest.approx(LOG(0.2))
    assert np.isnan([together[1:], best[1:]]).all()
    sweep = planted_sweep()
    sweep.contexts["greedy"] = 1  # the follow-up opening itself
    found = lens_curves(sweep, openings_of(sweep.turns), planted_lens())
    assert found.share.tolist() == [1, 1, 1]
    z = LOG(np.exp(20.0) + 3)
    assert found.best[1, 0, 1] == pytest.approx(20 - z, abs=1e-4)
    assert found.best[0, 0, 1] == pytest.approx(-z, abs=1e-4)  # token 2, not its own token 1


def test_overtaking_is_for_good():
    ahead = np.array([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]])
    greedy = ahead[..., None].astype(float)
    greedy[4, 1] = NAN
    found = overtaking(greedy, np.full(greedy.shape, 0.5))[:, 0]
    np.testing.assert_array_equal(found, [2, np.inf, 0, 3, NAN])


# -- estimates ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated() -> tuple[Measured, pd.DataFrame]:
    rng = np.random.default_rng(0)
    turns = []
    for number in range(24):
        dataset = "even" if number % 2 else "odd"
        for t, samples in ((0.0, 1), (0.7, 3), (1.0, 3)):
            for _ in range(samples):
                weights = np.array([0.2 + t / 3, 0.5 - t / 3, 0.3])
                category = rng.choice([GENUINE, QUERY, LOOP], p=weights / weights.sum())
                turns.append(turn(f"s{number:02d}", t, str(category), dataset=dataset))
    turns[5] |= {"category": "cannot_assess", "genuine": NAN}
    turns = pd.DataFrame(turns)
    contexts = turns[turns["temperature"] == 0][["context", "dataset", "source"]]
    sweep = Sweep([], turns, contexts.reset_index(drop=True), "planted", [])
    parts = {name: rng.random((24, 2)) for name in vars(FirstToken([], *[np.zeros(0)] * 6))}
    first = FirstToken(**parts | {"temperatures": [0.5, 1.0]})
    left = turns[(turns["temperature"] > 0) & turns["genuine"].notna()].reset_index(drop=True)
    left = left[["dataset", "source", "context", "temperature", "genuine", "category"]]
    for name in ("token", "before", "rank", "probability", "gap"):
        left[name] = rng.random(len(left)) + (name == "rank")
    left["token"] = np.ceil(left["token"] * 3)
    left = left.assign(follows=(left["token"] > 1).astype(float), leaves=1.0)
    found = Measured(sweep, first, left, None, None)
    return found, estimates(found, resamples=200)


def picked(made: pd.DataFrame, quantity: str, **names) -> pd.DataFrame:
    for name, value in ({"quantity": quantity} | names).items():
        made = made[made[name] == value]
    return made


def test_rates_and_differences_from_greedy_are_those_of_the_library(simulated):
    found, made = simulated
    turns = found.sweep.turns[found.sweep.turns["genuine"].notna()]
    greedy = turns[turns["temperature"] == 0]
    for category, quantity, of in (
        (GENUINE, "follow-up rate", ""),
        (QUERY, "share of turns", QUERY),
    ):
        at = turns[turns["temperature"] == 0.7]
        so, before = ((f["category"] == category).astype(float) for f in (at, greedy))
        rate = cluster_mean(so, at["source"], proportion=True)
        row = picked(made, quantity, of=of, dataset="(all)", temperature=0.7).iloc[0]
        assert row[["value", "low", "high"]].tolist() == [rate.value, rate.low, rate.high]
        paired = paired_difference(so, at["source"], before, greedy["source"])
        row = picked(made, f"{quantity} less greedy's", of=of, dataset="(all)", temperature=0.7)
        ends = paired.difference.value, paired.difference.low, paired.difference.high, paired.p
        assert tuple(row[["value", "low", "high", "p"]].iloc[0]) == ends
        both = at.groupby("source")["category"].agg(lambda c, k=category: (c == k).mean())
        plain = both - (greedy.set_index("source")["category"] == category)
        assert row["value"].item() == pytest.approx(plain.mean())
    shares = made[made["quantity"].isin(("follow-up rate", "share of turns"))]
    total = shares.groupby(["dataset", "temperature"])["value"].sum()
    assert len(total) == 9 and np.allclose(total, 1)


def test_masses_and_depths_are_those_of_their_contexts_and_turns(simulated):
    found, made = simulated
    first = found.first
    less = first.genuine[:, 0] - first.restated[:, 0]
    expected = cluster_mean(less, found.sweep.contexts["source"])
    row = picked(made, "mass on openings", of="genuine less restated", dataset="(all)").iloc[0]
    assert row[["value", "low", "high"]].tolist() == [expected.value, expected.low, expected.high]
    bounded = made[made["quantity"].isin(("mass on turn-end", "total variation from T = 1"))]
    assert len(bounded) == 12 and bounded[["low", "high"]].stack().between(0, 1).all()
    at = found.hidden[found.hidden["temperature"] == 1.0]
    turns = at[at["genuine"] == 1]
    own = made[(made["dataset"] == "(all)") & (made["temperature"] == 1.0)].set_index("quantity")
    kind = own[own["of"] == "genuine"]
    assert kind.loc["rank where greedy leaves", "value"] == pytest.approx(turns["rank"].median())
    by = kind.loc["greedy has left by token"].set_index("at")["value"]
    assert by[2.0] == pytest.approx((turns["token"] <= 2).mean()) and by[32.0] == 1
    apart = own.loc["gap where greedy leaves less other turns'"].set_index("of")["value"]
    formed = at[at["category"] != GARBLED]
    assert 0 < len(formed) < len(at)
    for of, rows in {"all others": at, "others but degenerate ones": formed}.items():
        means = rows.pivot_table(index="context", columns="genuine", values="gap").dropna()
        assert apart[of] == pytest.approx((means[1.0] - means[0.0]).mean())


def test_tests_are_corrected_in_families(simulated):
    _, made = simulated
    families = {
        "follow-up rate less greedy's": ["follow-up rate less greedy's"],
        "share of turns less greedy's": ["share of turns less greedy's"],
        "others": [q for q in set(made["quantity"]) if q.endswith("less other turns'")],
    }
    assert len(families["others"]) == 4
    tested = 0
    for quantities in families.values():
        rows = made[made["quantity"].isin(quantities)]
        for of in (rows["dataset"] == "(all)", rows["dataset"] != "(all)"):
            own = rows[of]
            tested += own["p"].notna().sum()
            np.testing.assert_allclose(own["p_holm"], holm(own["p"].to_numpy()))
    assert tested == made["p"].notna().sum() > 30


# -- runs of a tiny model --------------------------------------------------------------------------

DECODING = {"temperatures": (0.4, 1.2), "samples": 3, "max_new_tokens": 6}
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
        settings = Settings(dataset=data, limit=None, **DECODING | options)
        return judged(make_run(settings, tiny_subject, folder / "run"))

    return make


def judged(run: Run, judge: str = "planted", kinds=KINDS) -> Run:
    """Sample k is of the kind k; greedy turns are the first."""
    verdicts = []
    keys = run.generations[list(KEY)].itertuples(index=False, name=None)
    for key, item in zip(keys, items_of(run), strict=True):
        category = kinds[key[2] % len(kinds)]
        verdict = {"repeat": 0, "category": category, "genuine": category == GENUINE}
        verdict |= {"status": "judged", "rationale": "planted", "item": item.key("", 0)[:16]}
        verdicts.append(dict(zip(KEY, key, strict=True)) | verdict)
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


def measured(run: Run, temperatures=(0.5, 1.0), positions=("header_last",)):
    """What the estimates of one run are made of, and its notes."""
    return measure(read([run]), temperatures, positions, Quiet())


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
    for at, t in enumerate(DECODING["temperatures"]):
        p = (made.double() / t).softmax(-1)
        entropy = -(p * p.log()).sum(-1)
        assert entropy.tolist() == pytest.approx([row[at] for row in own], abs=1e-4)


def test_the_last_layer_of_the_lens_is_the_model(plain):
    found = read([plain])
    lens = Lens.load(plain.model["weights_hash"])
    curves = lens_curves(found, openings_of(found.turns), lens)
    said = [plain.header_logits().log_probs(at) for at in found.contexts["at"]]
    own = [p[token].item() for p, token in zip(said, found.contexts["greedy"], strict=True)]
    last = curves.greedy[:, -1, curves.positions.index("header_last")]
    assert last.tolist() == pytest.approx(own, abs=5e-3)
    assert own == pytest.approx([p.max().item() for p in said], abs=5e-3)
    assert np.isnan(curves.greedy[:, 0, curves.positions.index("response_end")]).any()  # ""


def test_perturbed_contexts_are_left_out(plain, monkeypatch):
    whole, table = measured(plain)[0], Run._table

    def perturbed(which):
        def read(run, *args):
            found = table(run, *args)
            if "perturbation" not in found.column_names:
                return found
            names = found["context_id"].to_pylist()
            said = pa.array(["shuffled" if name in which else "none" for name in names])
            at = found.column_names.index("perturbation")
            return found.set_column(at, "perturbation", said.dictionary_encode())

        return read

    monkeypatch.setattr(Run, "_table", perturbed(["c0"]))
    found, notes = measured(Run.open(plain.path))
    assert "7 turns of perturbed contexts are left out." in notes
    assert len(found.sweep.contexts) == len(whole.sweep.contexts) - 1
    assert len(found.references.curve) == len(whole.references.curve) - 1
    assert len(found.hidden) == len(whole.hidden) - 6
    monkeypatch.setattr(Run, "_table", perturbed(plain.contexts["context_id"].tolist()))
    with pytest.raises(UserError, match="all contexts are perturbed; give runs"):
        read([Run.open(plain.path)])


def test_without_the_model_only_its_lens_is_needed(bare, cache, capfd, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    monkeypatch.setattr("ia_mech.models.load.load", refuse)
    lens = lens_file(bare.model["weights_hash"])
    kept = [path for path in (cache / "models").rglob("*") if path.is_file()]
    assert kept == [lens] and set(load_file(lens)) == {"norm_weight", "norm_bias", "unembedding"}
    words = ["--temperatures", "0.4", "2", "--positions", "header_last", "--resamples", "100"]
    outcome = call(main, [str(bare.path), *words], capfd)
    assert outcome.status == 0, outcome.err
    folder = bare.path / "results" / "temperature_sweep"
    written = ("estimates.parquet", "result.json", "turns.parquet")
    figures = {f"{name}.{kind}" for name in ("first_token", "hidden", "lens", "rates")
               for kind in ("png", "svg", "pdf")}  # fmt: skip
    assert {p.name for p in folder.iterdir()} == {*written, *figures}
    turns = pd.read_parquet(folder / "turns.parquet").set_index(list(KEY))
    stored = bare.generations.query("temperature > 0").set_index(list(KEY))
    assert turns.index.sort_values().equals(stored.index.sort_values())
    left = turns[turns["leaves"] == 1]
    ranks = [stored.loc[key, "ranks"][int(at) - 1] for key, at in left["token"].items()]
    assert left["rank"].tolist() == ranks
    made = pd.read_parquet(folder / "estimates.parquet")
    first = made[made["quantity"] == "first token's entropy"]
    assert set(first["temperature"]) == {0.4, 2.0} and set(made["position"]) == {"", "header_last"}
    rows = [line for line in outcome.out.splitlines() if line.startswith("│")]
    assert len(rows) == 5 and {row.count("│") for row in rows} == {6}
    assert (
        "greedy" in outcome.out
        and "T = 1.2" in outcome.out
        and "estimates.parquet has" in (outcome.out)
    )
    assert "are not stored: they were computed from the last layer with the lens" in outcome.out


def test_turns_without_follow_ups_have_rates_and_no_openings(copied):
    run = judged(copied(), kinds=("degenerate",))
    found, notes = measured(run)
    assert any(note.startswith("sampled turns of no source were judged genuine") for note in notes)
    made = estimates(found, resamples=100)
    assert made[made["quantity"] == "mass on openings"]["value"].isna().all()
    lens = made[made["quantity"] == "log p by the lens"].set_index("of")["value"]
    assert lens["greedy opening"].notna().all() and lens["best follow-up opening"].isna().all()


def test_what_logits_and_lens_give_and_what_they_cannot(
    plain, bare, sampled, monkeypatch, tmp_path
):
    """Stored logits in half precision, the k largest ones, or none; with the lens or without."""
    with pytest.raises(UserError, match=r"too coarse for T = 0.1; give --temperatures from 0.3 up"):
        measured(plain, [0.1])
    cold = measured(bare, [0.1])[0].first
    assert (cold.tokens < 3).all() and cold.temperatures == [0.1]
    with pytest.raises(UserError, match="position 'nowhere' was not kept in any run; give some of"):
        measured(plain, positions=["nowhere"])
    some = sampled(CHATS[:3], header_logits="5", positions=("header_last",))
    found, notes = measured(some)
    assert any("with the lens" in note for note in notes)
    np.testing.assert_allclose(found.first.entropy, measured(plain)[0].first.entropy[:3], atol=5e-3)
    elsewhere = sampled(CHATS[:3], header_logits="5", positions=("turn_end",))
    with pytest.raises(UserError, match="only the 5 largest header logits, and header_last was"):
        measured(elsewhere, positions=None)
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "empty"))
    found, notes = measured(plain)
    assert found.lens is None and any("no logit lens: no lens for the" in note for note in notes)
    for run, has in ((bare, "no header logits"), (some, "only the 5 largest header logits")):
        with pytest.raises(UserError, match=f"has {has}, and there is no lens to compute them"):
            measured(run)


def test_runs_that_make_no_sweep_are_refused(plain, copied, sampled):
    with pytest.raises(UserError, match="at T = 1 only: of one temperature there is no sweep"):
        read([sampled(CHATS[:2], temperatures=(1.0,))])
    other = sampled(CHATS[:2], temperatures=(0.4, 1.0, 1.2), samples=2, seed=3)
    with pytest.raises(UserError, match="the runs don't match: 4 of 6 sources lack a temp") as odd:
        read([plain, other])
    assert "has 0.4, 1.2, all together 0.4, 1, 1.2" in str(odd.value)
    run = copied()
    shutil.rmtree(run.path / "judgements")
    with pytest.raises(UserError, match="has not been judged; run: python"):
        read([Run.open(run.path)])
