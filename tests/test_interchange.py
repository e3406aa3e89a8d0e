"""States put in: planted models, donors and shares against loops, the level, and the command."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from conftest import Silent
from judging import FakeJudge
from runs import sampled as made_run
from shell import call, refusal
from tiny import blank

import ia_mech.engine.state as state
from experiments.control import (
    ARMS,
    BEYOND,
    DONORS,
    EQUAL,
    FIRST,
    MOVED,
    RATIO,
    UNCHANGED,
    UNDER,
    donors_of,
    estimates,
)
from experiments.experiment import Model
from experiments.grid import PutBack
from experiments.interchange import HEADER, exchanged_layers, main
from experiments.outcome import CHOOSING, SCORING, shares_of
from ia_mech.engine.intervene import Replace
from ia_mech.errors import UserError
from ia_mech.estimates import frame_of
from ia_mech.judge.judging import label_run
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.judge.verdict import Verdict
from ia_mech.models.load import ModelSpec, Subject, weights_hash
from ia_mech.run import Run
from ia_mech.run.tokens import ATTN, MLP
from ia_mech.settings import Settings

MOODS = "zq"  # letters of responses; of the first a third of sampled turns are follow-ups
FOLLOWS, OTHER = "?", "!"
SHARES = {"z": 1 / (1 + np.exp(0.5 / 0.7)), "q": 1 / (1 + np.exp(3.0 / 0.7))}
BLOCK = 3  # whose attention tells each token the response's mood
QUERIES, SAMPLES = 16, 32


def planted(small: Subject, odds: tuple[float, float], folder, by: str = ATTN) -> Subject:
    """A model whose turn is a token: a follow-up with these log-odds, by the mood that the last
    token of the header has after block 3. All other tokens have the mood, too; none reads it.

    The block's attention writes it; or its MLP, which reads what attention wrote one block before.
    """
    model = blank(small.model)
    ids = [small.tokenizer.convert_tokens_to_ids(text) for text in (*MOODS, FOLLOWS, OTHER)]
    width = model.config.hidden_size
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        block, written = model.model.layers[BLOCK - 1], 3 if by == ATTN else 5
        attention = model.model.layers[BLOCK - 1 - (by == MLP)].self_attn  # alike to all before
        logits = model.lm_head.weight
        for mood, (token, odd) in enumerate(zip(ids[:2], odds, strict=True)):
            model.model.embed_tokens.weight[token, 1 + mood] = 1.0
            attention.v_proj.weight[mood, 1 + mood] = 1.0
            attention.o_proj.weight[written + mood, mood] = 1e4
            if by == MLP:
                for reads in (block.mlp.gate_proj, block.mlp.up_proj):
                    reads.weight[mood, written + mood] = 1.0
                block.mlp.down_proj.weight[3 + mood, mood] = 1e7
            logits[:, 3 + mood] = -50.0 / width**0.5  # of a state of the mood alone
            logits[ids[2], 3 + mood] = odd / width**0.5
            logits[ids[3], 3 + mood] = 0.0
    model.save_pretrained(folder)
    small.tokenizer.save_pretrained(folder)
    return Subject(ModelSpec(str(folder)), model, small.tokenizer, weights_hash(model))


class Marked(FakeJudge):
    """Accepts what holds the token of follow-ups."""

    def __init__(self) -> None:
        def say(item, repeat) -> Verdict:
            return Verdict(FOLLOW_UP if FOLLOWS in item.turn else "degenerate")

        super().__init__(say, paid=False)


def sampled(
    small: Subject,
    odds: tuple[float, float],
    folder,
    samples: int = SAMPLES,
    by: str = ATTN,
    moody: str = "response",
    responses: int = 1,
) -> Run:
    """A judged run of conversations, half of whose responses, or queries, are of each mood."""
    subject = planted(small, odds, folder / "model", by)
    data = folder / "chats.jsonl"
    names = [(f"c{i}r{j}", f"{i}?") for i in range(QUERIES) for j in range(responses)]
    rows = [{"id": name, "query": query, "response": "x"} for name, query in names]
    for i, row in enumerate(rows):
        row[moody] = MOODS[i % 2] * (3 + i % 5) + (row["query"] if moody == "query" else "")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(
        dataset=str(data),
        limit=None,
        model=subject.spec.name,
        temperatures=(0.7,),
        samples=samples,
        batch_rows=800,
        max_new_tokens=1,
    )
    run = made_run(settings, subject, folder / "run", Silent())
    label_run(run, Marked(), "marked", Silent())
    return run


@pytest.fixture(scope="module")
def used(tiny_subject, tmp_path_factory) -> Run:
    return sampled(tiny_subject, (-0.5, -3.0), tmp_path_factory.mktemp("used"))


@pytest.fixture
def command(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.arms.builtin_judge", Marked)

    def run(path, *words):
        flags = ["--out", str(tmp_path / "out"), "--resamples", "200", *words]
        return call(main, [str(path), *flags], capfd)

    return run


def test_a_share_travels_with_the_state_that_decides_it_and_with_no_other(used, command, tmp_path):
    mood = used.residuals(BLOCK, "turn_end")[:, 3] > used.residuals(BLOCK, "turn_end")[:, 4]
    has = [messages[-1]["content"][0] == MOODS[0] for messages in used.contexts["messages"]]
    assert mood.tolist() == has  # it can be read at the turn's end, and isn't used there
    words = (used.path, "--samples", "8", "--layers", "2", "3", "--full")
    outcome = command(*words)
    assert outcome.status == 0, outcome.err
    found = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    whole = found.set_index("quantity")["value"]
    wanted = SHARES["z"] - SHARES["q"]
    assert whole[DONORS] == pytest.approx(wanted, abs=0.15)
    assert whole[UNCHANGED] == pytest.approx(sum(SHARES.values()) / 2, abs=0.08)
    cells = found.set_index(["quantity", "term", "layer"])
    places = ("turn_end", "turn_separator", HEADER, "header_last")
    for place in places:
        for layer in (2, 3):
            moved, ratio = (cells.loc[(name, place, layer)] for name in (MOVED, RATIO))
            if place in places[2:] and layer >= BLOCK:
                assert moved["value"] == pytest.approx(wanted, abs=0.15), (place, layer)
                assert moved["p_holm"] < 0.05
                assert ratio["value"] == pytest.approx(1, abs=0.4)
            else:
                assert moved["value"] == ratio["value"] == 0, (place, layer)
            assert cells.loc[(EQUAL, place, layer), "p_holm"] > 0.05
    said = outcome.out.splitlines()
    assert said[0].startswith(
        "A state moves the share of sampled turns that are judged 'follow-up' at 2 "
    )
    assert "; header_last after layer 3 " in said[0] and ", in role +0.00" in said[0]
    control = next(line for line in said if line.startswith("Control: "))
    said = said[said.index(control) :]
    notes = " ".join(json.loads((tmp_path / "out" / "result.json").read_text())["notes"])
    assert (
        "recipient with donors. The donors are of 16 queries; a conversation is one at most"
        in notes
    )
    assert "differ at 0 of 9 cells" in said[0] and "in any of 144 cells" in said[1]
    assert said[2].startswith("Under the donors' first tokens alone the share differs by +")
    alone = cells.loc[(MOVED, FIRST, 4), "value"]  # of this model's turns there is no other token
    assert alone == cells.loc[(MOVED, "header_last", 3), "value"]
    for place in places:
        for layer in (2, 3):
            less = cells.loc[(MOVED, place, layer), "value"] - alone
            assert cells.loc[(BEYOND, place, layer), "value"] == pytest.approx(less)
    run = Run.open(tmp_path / "out" / "turns" / "run")
    about = [json.loads(text)["interchange"] for text in run.contexts["metadata"]]
    recipients = run.contexts["source_id"].to_numpy()
    donors = used.contexts.set_index("context_id")["source_id"]
    assert not (recipients == donors[[one["donor"] for one in about]].to_numpy()).any()
    again = command(*words)
    assert (again.status, again.out) == (0, outcome.out)


def test_own_states_that_change_a_turn_are_refused(used, command, monkeypatch, tmp_path):
    whole = Replace.apply
    monkeypatch.setattr(Replace, "apply", lambda self, own: whole(self, own) * (1 + 1e-6))
    outcome = command(used.path, "--queries", "3", "--samples", "2", "--layers", "3", "4")
    line = outcome.err.splitlines()[-1]
    assert outcome.status == 2 and not (tmp_path / "out" / "result.json").exists()
    assert "a context's own states, put where they were, change" in line


def test_what_cannot_be_exchanged_is_refused_and_what_it_takes_is_said(used, command, tmp_path):
    assert "has 32 at T = 0.7, and T = 1 was asked for" in refusal(
        command(used.path, "--temperature", "1")
    )
    line = refusal(command(used.path, "--category", "degenerate"))
    assert line.startswith(
        "0 queries have a finished response whose greedy turn isn't judged 'degenerate'"
    )
    assert "--layers 5: the model has 4" in refusal(command(used.path, "--layers", "5"))
    planned = command(used.path, "--dry-run", "--queries", "5")
    assert planned.status == 0 and not (tmp_path / "out").exists()
    assert "340 conversations to sample 17 user turns after each" in planned.out
    one = ("--tokens", "header_last", "--layers", "3", "3")
    planned = command(used.path, "--dry-run", "--queries", "5", *one)
    assert "40 conversations to sample 17 user turns after each" in planned.out


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_own_states_change_no_bit_in_any_kind_of_model(family, tmp_path, monkeypatch):
    model = tiny.model(family)
    subject = Subject(ModelSpec(family), model, None, "")
    chat = SimpleNamespace(stop_ids=[tiny.EOS])
    ids = tuple(tiny.prompt(30, 0))
    places = ((25,), (26,), (27, 28, 29), (29,))
    cells = [(at, layer) for at in places for layer in exchanged_layers(4)]
    unit = PutBack("s", "d", 1, ids, cells)
    assert unit.rows(Model(subject, chat))["same"].tolist() == [True] * 16
    honest = state.forward

    def disturbed(*arguments, **options):
        """The last context's keys and values in the last layer, where states are put in."""
        made = honest(*arguments, **options)
        if any(options["interventions"]):
            for tensor in state.held_tensors(arguments[1].cache.layers[-1]):
                tensor[-1] += 1e-6
        return made

    monkeypatch.setattr(state, "forward", disturbed)
    with pytest.raises(UserError, match="change what is computed in 1 of 16 cells"):
        unit.rows(Model(subject, chat))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_first_token_alone_leaves_all_that_later_ones_read(family):
    """A foreign state after the last layer changes the logits there, and nothing that is kept."""
    model, ids = tiny.model(family), tuple(tiny.prompt(30, 0))
    foreign = Replace(model.config.num_hidden_layers, (29,), torch.full((1, 32), 0.5))
    with torch.inference_mode():
        plain, other = (
            state.prefill(model, [state.Prefix(ids, (29,), put)]) for put in ((), (foreign,))
        )
    assert not torch.equal(plain.logits, other.logits)
    kept = [
        [x for layer in one.state.cache.layers for x in state.held_tensors(layer)]
        for one in (plain, other)
    ]
    assert kept[0] and all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


# -- the parts -------------------------------------------------------------------------------------


def test_shares_are_of_halves_of_the_turns_of_a_temperature():
    rows = []
    for context in ("a", "b"):
        for temperature, sample in [(0.0, 0), *((0.7, n) for n in range(6)), (1.0, 0)]:
            category = FOLLOW_UP if (context == "a") == (sample % 2 == 0) else "generic"
            rows.append([context, temperature, sample, category])
    rows[3][3] = "failed"  # the third turn of a, one of the even ones
    turns = pd.DataFrame(rows, columns=["context_id", "temperature", "sample", "category"])
    turns = turns.assign(dataset="d", source="s", unfinished=False)
    turns.loc[(turns["context_id"] == "a") & (turns["sample"] == 5), "category"] = FOLLOW_UP
    found = shares_of(turns, FOLLOW_UP, 0.7).set_index("context_id")
    assert found[CHOOSING].to_dict() == {"a": 1.0, "b": 0.0}
    assert found[SCORING].to_dict() == pytest.approx({"a": 1 / 3, "b": 1.0})
    assert found["share"].to_dict() == pytest.approx({"a": 3 / 5, "b": 0.5})
    assert found["greedy"].to_dict() == {"a": 1.0, "b": 0.0}


def pool(rng: np.random.Generator, queries: int = 40) -> pd.DataFrame:
    """Contexts of two datasets, two per query."""
    source = np.repeat(np.arange(queries), 2)
    return pd.DataFrame(
        {
            "source": source.astype(str),
            "dataset": np.where(source % 2, "odd", "even"),
            CHOOSING: rng.integers(0, 9, 2 * queries) / 8,
        }
    )


def test_donors_are_of_other_queries_and_the_far_quarters_and_seldom_used():
    contexts = pool(np.random.default_rng(0))
    recipients = list(range(0, 80, 2))
    found = donors_of(contexts, recipients, 3)
    assert found["recipient"].tolist() == recipients
    for row in found.to_dict("records"):
        own = contexts.iloc[row["recipient"]]
        others = contexts[(contexts["dataset"] == own["dataset"])]
        others = others[others["source"] != own["source"]][CHOOSING]
        high, low, a, b = (row[arm] for arm in ARMS)
        assert {high, low, a, b} <= set(others.index)
        assert len({contexts["source"][i] for i in (high, low)}) == 2
        assert others[high] >= others.quantile(0.75) > others.quantile(0.25) >= others[low]
        assert contexts["source"][a] != contexts["source"][b]
        assert abs(others[a] - others[b]) <= 1 / 8
    assert found["high"].value_counts().max() <= 3
    assert found.equals(donors_of(contexts, recipients, 3))
    assert not found.equals(donors_of(contexts, recipients, 4))
    alone = contexts[contexts["source"].isin(["0", "2"])].reset_index(drop=True)
    assert donors_of(alone, [0], 0).empty


def simulated(rng: np.random.Generator, travels: float, queries: int = 40) -> pd.DataFrame:
    """A cell: each donor's share of 16 turns, of which this part of its difference travels."""
    base = rng.beta(1, 3, queries)
    true = {arm: rng.beta(1, 3, queries) for arm in ARMS}
    true["high"], true["low"] = np.clip(true["high"] + 0.3, 0, 1), true["low"] * 0.5
    rows = pd.DataFrame({"dataset": "d", "source": [f"q{i}" for i in range(queries)]})
    rows = rows.assign(term="header_last", layer=3, unchanged=base)
    for number, arm in enumerate(ARMS):
        rows[f"query {arm}"] = np.roll(rows["source"], number + 1)
        share = base + travels * (true[arm] - base)
        rows[arm] = rng.binomial(16, share) / 16
        rows[f"own {arm}"] = rng.binomial(8, true[arm]) / 8
    return rows


OPTIONS = {"level": 0.95, "resamples": 200, "seed": 0}


def test_the_ratio_is_1_where_all_travels_and_half_where_half_does():
    for travels in (1.0, 0.5):
        rows = simulated(np.random.default_rng(1), travels, queries=2000)
        found = frame_of(
            estimates(rows, OPTIONS), {"dataset": "str", "term": "str", "layer": "Int64"}
        )
        value = found.set_index("quantity")["value"]
        gap = (rows["high"] - rows["low"]).mean() / (rows["own high"] - rows["own low"]).mean()
        assert value[RATIO] == pytest.approx(gap) == pytest.approx(travels, abs=0.05)
        assert value[UNDER["high"]] - value[UNDER["low"]] == pytest.approx(value[MOVED])


def test_the_level_is_held_where_nothing_travels_and_intervals_cover_where_half_does():
    rng = np.random.default_rng(2)
    times, false, covered = 60, 0, 0
    for _ in range(times):
        for travels in (0.0, 0.5):
            found = {row.quantity: row for row in estimates(simulated(rng, travels), OPTIONS)}
            if travels:
                ratio = found[RATIO].estimate
                covered += ratio.low <= travels <= ratio.high
            else:
                false += found[MOVED].p <= 0.05
    assert false <= 8 and covered >= 52  # 3 and 57 of 60; three standard deviations


def chosen_donors(queries: int, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """2 contexts of each query, and donors for the first of each, chosen as in experiments."""
    rng, source = np.random.default_rng(seed), np.repeat([f"q{i}" for i in range(queries)], 2)
    contexts = pd.DataFrame({"dataset": "d", "source": source})
    contexts[CHOOSING] = rng.binomial(8, rng.beta(1, 2, 2 * queries)) / 8
    return contexts, donors_of(contexts, range(0, 2 * queries, 2), seed)


def with_donor_effects(
    rng: np.random.Generator, contexts: pd.DataFrame, donors: pd.DataFrame, moved: float
) -> pd.DataFrame:
    """A cell in which what a donor does is its own, whatever its share: with SD 0.1, and a mean of
    ``moved`` for high minus low ones."""
    source = contexts["source"].to_numpy()
    effect, base = rng.normal(0, 0.1, len(contexts)), rng.beta(8, 12, len(donors))
    rows = pd.DataFrame({"source": source[donors["recipient"]], "unchanged": base})
    rows = rows.assign(dataset="d", term="header", layer=3)
    for arm in ARMS:
        at = donors[arm].to_numpy()
        share = base + effect[at] + {"high": moved / 2, "low": -moved / 2}.get(arm, 0)
        rows[arm] = rng.binomial(16, share.clip(0, 1)) / 16
        rows[f"own {arm}"], rows[f"query {arm}"] = contexts[CHOOSING].to_numpy()[at], source[at]
    return rows


def test_effects_of_single_donors_make_no_false_alarms():
    """Donors serve several recipients, so that recipients aren't independent."""
    rng, chosen, called = np.random.default_rng(4), chosen_donors(60, 0), {}
    for moved in (0.0, 0.1):
        drawn = (with_donor_effects(rng, *chosen, moved) for _ in range(100))
        each = [{row.quantity: row for row in estimates(one, OPTIONS)}[MOVED] for one in drawn]
        called[moved] = sum(one.p <= 0.05 for one in each)
        ends = [(one.estimate.low, one.estimate.high) for one in each]
        assert called[moved] == sum(not low <= 0 <= high for low, high in ends)
    assert called[0.0] <= 11 and called[0.1] >= 50  # three standard deviations above 5


def test_a_mean_of_shares_is_not_one_of_events():
    rows = simulated(np.random.default_rng(5), 1.0, queries=60)
    found = {row.quantity: row.estimate for row in estimates(rows, OPTIONS)}
    for quantity, shares in ((UNDER["high"], rows["high"]), (UNCHANGED, rows["unchanged"])):
        wide = found[quantity].high - found[quantity].low
        assert wide == pytest.approx(2 * 2 * shares.std() / np.sqrt(60), rel=0.3)


def test_there_is_no_ratio_where_the_donors_are_alike():
    rows = simulated(np.random.default_rng(3), 0.0)
    rows["own high"] = rows["own low"]
    found = {row.quantity for row in estimates(rows, OPTIONS)}
    assert RATIO not in found and MOVED in found
