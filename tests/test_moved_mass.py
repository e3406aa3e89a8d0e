"""The follow-up mass under states of donors: a planted model, families, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from runs import sampled as made_run
from shell import call, refusal
from test_interchange import BLOCK, SHARES, Marked, sampled

from experiments import interchange, mass
from experiments.control import ARMS, DONORS, EQUAL, MOVED, RATIO, UNCHANGED
from experiments.experiment import Model
from experiments.moved_mass import COVERED, HALF, MassUnder, MovedMass, half_moved
from experiments.outcome import CHOOSING, IN_ROLE, lens_masses
from experiments.shown import spans
from ia_mech.engine.intervene import Replace
from ia_mech.engine.state import Prefix, prefill
from ia_mech.errors import UserError
from ia_mech.lens import read_lens
from ia_mech.models.load import ModelSpec, Subject
from ia_mech.run import Run
from ia_mech.settings import Settings


@pytest.fixture(scope="module")
def used(tiny_subject, tmp_path_factory) -> Run:
    """One turn after each conversation is enough."""
    folder = tmp_path_factory.mktemp("moved")
    return sampled(tiny_subject, (-0.5, -3.0), folder, samples=1)


@pytest.fixture
def command(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.arms.builtin_judge", Marked)

    def run(main, path, *words):
        return call(main, [str(path), "--resamples", "200", *words], capfd)

    return run


def test_a_query_has_one_recipient_of_several_responses():
    contexts = pd.DataFrame({"dataset": "d", "source": list("aabbcc"), CHOOSING: np.arange(6.0)})
    some = SimpleNamespace(source="a"), SimpleNamespace(source="b")
    asked = SimpleNamespace(contexts=contexts, queries=some, args=SimpleNamespace(seed=0))
    found = MovedMass.with_donors(asked, pd.Series([False, True, True, True, True, True]))
    assert found["recipient"].tolist() == [1, 2]


def test_the_mass_travels_with_the_state_that_decides_the_first_token(used, command, tmp_path):
    words = ("--outcome", "mass", "--out", str(tmp_path / "out"))
    line = refusal(command(interchange.main, used.path, *words))
    assert "doesn't hold all first tokens of" in line and "ia-mech mass" in line
    outcome = command(mass.main, used.path, "--share", "0.99")
    assert outcome.status == 0, outcome.err
    outcome = command(interchange.main, used.path, *words)
    assert outcome.status == 0, outcome.err
    found = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    cells = found.set_index(["quantity", "term", "layer"])["value"]
    whole, wanted = found.set_index("quantity")["value"], SHARES["z"] - SHARES["q"]
    assert whole[DONORS] == pytest.approx(wanted, abs=0.01)
    assert whole[UNCHANGED] == pytest.approx(sum(SHARES.values()) / 2, abs=0.01)
    for layer in range(1, 5):
        moved = wanted if layer >= BLOCK else 0.0
        assert cells[MOVED, "header_last", layer] == pytest.approx(moved, abs=0.01)
        assert cells[RATIO, "header_last", layer] == pytest.approx(float(layer >= BLOCK), abs=0.01)
        assert abs(cells[EQUAL, "header_last", layer]) < 0.01
        assert (cells[HALF, "header_last", layer] > 0.05) == (layer == BLOCK)
    assert "from layer 3 of 4 on (95% confidence set: 3)" in outcome.out
    assert "A state is shown to move it at 1 of 3 cells before the last layer" in outcome.out
    again = command(interchange.main, used.path, *words)
    assert (again.status, again.out) == (0, outcome.out)
    more = command(interchange.main, used.path, *words, "--tokens", "turn_end", "--layers", "3")
    assert more.status == 0, more.err
    found = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    moved = found[found["quantity"] == MOVED].set_index(["term", "layer"])["value"]
    assert moved["turn_end", 3] == 0 and moved["header_last", 4] == pytest.approx(wanted, abs=0.01)
    line = refusal(command(interchange.main, used.path, *words, "--category", "degenerate"))
    assert line.startswith("--category is of --outcome follow-up")


def test_the_lens_gives_each_layer_its_mass_and_the_last_one_the_model_s(tokenizer, tmp_path):
    subject = tiny.subject("llama", tokenizer)
    how = {"model": subject.spec.name, "limit": 3, "temperatures": 0.7, "max_new_tokens": 2}
    run = made_run(Settings(**how, first_tokens=0.3), subject, tmp_path / "run")
    turns = run.generations[run.generations["temperature"] > 0]
    turns = turns.assign(token=[int(ids[0]) for ids in turns["token_ids"]], covered=1.0)
    turns["third"] = (turns["sample"] % 3 == 0).astype(float)
    openings = turns.astype({"context_id": object}).set_index(["context_id", "token"])
    lens = read_lens(subject, list(range(3, 30)))
    found = lens_masses(run, openings[["third", "covered"]], lens, 0.7)
    assert found.shape == (len(run.layers), 2, len(run.contexts))
    for number, context in enumerate(run.contexts["context_id"]):
        own = turns[turns["context_id"] == context]
        p = np.exp(own["logprob_tempered"].to_numpy(float))
        wanted = [p @ own["third"].to_numpy(), p.sum()]
        assert found[-1, :, number] == pytest.approx(wanted, rel=1e-4)
        states = run.residuals(1, "header_last")[number]
        p = (lens.logits(states) / 0.7).softmax(-1)[own["token"].tolist()].numpy()
        assert found[1, 1, number] == pytest.approx(p.sum(), rel=1e-4)


LAST, TOKENS, LABELS = 30, [5, 7, 9], [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]


def under_states(model, states: list[np.ndarray]) -> tuple[MassUnder, Model]:
    """A recipient whose last two tokens have states of four donors after each layer."""
    subject = Subject(ModelSpec("tiny"), model, None, "")
    cells = [("both", layer, (0, 1)) for layer in range(1, 5)]
    context = tuple(tiny.prompt(LAST, 0))
    unit = MassUnder("s", "d", 1, context, 2, cells, states, TOKENS, LABELS, 0.7)
    return unit, Model(subject, SimpleNamespace(stop_ids=[tiny.EOS]))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_masses_are_those_of_a_whole_pass_with_the_states_and_after_the_last_layer_of_the_donor(
    family,
):
    model, at = tiny.model(family), (LAST - 2, LAST - 1)
    with torch.inference_mode():
        donors = prefill(model, [Prefix(tiny.prompt(LAST, 1 + n), at) for n in range(len(ARMS))])
        states = [donors.residuals[:, layer].float().numpy() for layer in range(1, 5)]
        unit, subject = under_states(model, states)
        found = unit.rows(subject).set_index("layer")

        def masses(logits: torch.Tensor) -> list[float]:
            p = (logits / 0.7).softmax(-1)[TOKENS].tolist()
            return [p[0], p[0] + p[1], sum(p)]

        for number, arm in enumerate(ARMS):
            columns = [arm, f"{IN_ROLE} {arm}", f"{COVERED} {arm}"]
            for layer in range(1, 5):
                put = Replace(layer, at, donors.residuals[number, layer])
                whole = prefill(model, [Prefix(unit.context, (), (put,))])
                got = found.loc[layer, columns].tolist()
                assert got == pytest.approx(masses(whole.logits[0]), rel=1e-4, abs=1e-7)
            assert got == pytest.approx(masses(donors.logits[number]), rel=1e-4, abs=1e-7)
        plain = masses(prefill(model, [Prefix(unit.context)]).logits[0])
    assert found["unchanged"].tolist() == pytest.approx([plain[0]] * 4, rel=1e-4)


def test_own_states_that_change_a_bit_are_refused(monkeypatch):
    unit, model = under_states(tiny.model("llama"), [np.zeros((4, 2, 32), np.float32)] * 4)
    whole = Replace.apply
    monkeypatch.setattr(Replace, "apply", lambda self, own: whole(self, own) * (1 + 1e-6))
    with pytest.raises(UserError, match="own states, put where they were, change"):
        unit.rows(model)


def drawn(rng: np.random.Generator, onset: int, queries: int = 40) -> pd.DataFrame:
    """Of six layers the share of the donors' difference that is moved rises by a fifth a layer and
    is above a half from the onset on, with an effect of each recipient."""
    source = np.array([f"q{i}" for i in range(queries)])
    parts = []
    apart, noise = rng.normal(0.3, 0.1, queries).clip(0, 1), rng.normal(0, 0.1, (7, queries))
    for layer in range(1, 7):
        share = np.clip(0.6 + (layer - onset) * 0.2, 0, 1) if layer < 6 else 1.0
        moved = share * apart + noise[layer] * (layer < 6)
        parts.append(pd.DataFrame({"layer": layer, "source": source, "high": moved, "low": 0.0}))
        parts[-1]["own high"], parts[-1]["own low"] = apart, 0.0
    rows = pd.concat(parts, ignore_index=True)
    for arm, by in (("high", 1), ("low", 2)):
        rows[f"query {arm}"] = np.tile(np.roll(source, by), 6)
    return rows


def test_the_confidence_set_holds_the_layer_from_which_more_than_half_is_moved():
    rng, held, size = np.random.default_rng(0), 0, 0
    for _ in range(60):
        found = {
            row.names["layer"]: row.estimate.value for row in half_moved(drawn(rng, 3), "d", 0.95)
        }
        kept = [layer for layer, p in found.items() if p > 0.05]
        held, size = held + (3 in kept), size + len(kept)
    assert held >= 53 and size / 60 < 3  # 57 expected at least; three standard deviations
    rows = drawn(rng, 3).assign(**{"high": 0.0, "own high": 0.0})
    assert not list(half_moved(rows, "d", 0.95))
    assert spans([7, 3, 4, 5]) == "3–5, 7"
