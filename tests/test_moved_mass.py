"""The follow-up mass under states of donors: a planted model, families, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from runs import sampled as made_run
from shell import call, refusal
from test_components import BEHIND, plain
from test_interchange import BLOCK, SHARES, Marked, sampled

from experiments import interchange, mass
from experiments.control import ARMS, DONORS, EQUAL, MOVED, RATIO, UNCHANGED
from experiments.experiment import Model
from experiments.moved_mass import COVERED, HALF, TOGETHER, MassUnder, MovedMass, half_moved
from experiments.outcome import CHOOSING, IN_ROLE, lens_masses
from experiments.shown import spans
from ia_mech.collect import capture
from ia_mech.engine.blocks import find_blocks
from ia_mech.engine.intervene import Replace
from ia_mech.engine.state import Prefix, prefill
from ia_mech.errors import UserError
from ia_mech.lens import read_lens
from ia_mech.models.load import ModelSpec, Subject
from ia_mech.run import Run
from ia_mech.run.tokens import ATTN, MLP, RESID
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
    asked = SimpleNamespace(contexts=contexts, queries=some)
    found = MovedMass.recipients(asked, pd.Series([False, True, True, True, True, True]))
    assert found.tolist() == [1, 2]


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
    assert "from layer 3 on (95% confidence set of layers 1–4: 3)" in outcome.out
    assert "A state is shown to move it at 1 of 3 cells before the last layer" in outcome.out
    again = command(interchange.main, used.path, *words)
    assert (again.status, again.out) == (0, outcome.out)
    more = command(interchange.main, used.path, *words, "--tokens", "turn_end", "--layers", "3")
    assert more.status == 0, more.err
    found = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    moved = found[found["quantity"] == MOVED].set_index(["term", "layer"])["value"]
    assert moved["turn_end", 3] == 0 and moved["header_last", 4] == pytest.approx(wanted, abs=0.01)
    few = command(interchange.main, used.path, *words, "--layers", "2", "4")
    assert "layer 4 on (95% confidence set of layers 2, 4: 4)" in few.out
    alone = command(interchange.main, used.path, *words, "--layers", "4")
    assert "More than half" not in alone.out and "cells" not in alone.out
    line = refusal(command(interchange.main, used.path, *words, "--category", "degenerate"))
    assert line.startswith("--category is of --outcome follow-up")
    line = refusal(command(interchange.main, used.path, "--component", MLP))
    assert line.startswith("--component is of --outcome mass")


@pytest.mark.parametrize(
    ("by", "moving"),
    [(ATTN, {ATTN: {BLOCK}, MLP: set()}), (MLP, {ATTN: {BLOCK - 1}, MLP: {BLOCK}})],
)
def test_the_component_that_writes_the_role_is_told_from_the_other(
    by, moving, tiny_subject, command, tmp_path
):
    run = sampled(tiny_subject, (-0.5, -3.0), tmp_path, samples=1, by=by)
    assert command(mass.main, run.path, "--share", "0.99").status == 0
    wanted = SHARES["z"] - SHARES["q"]
    for component, layers in moving.items():
        out = tmp_path / component
        words = ("--outcome", "mass", "--component", component, "--out", str(out))
        line = refusal(command(interchange.main, run.path, *words))
        assert "--tokens header:-1 --layers 1 2 3 4 --component" in line
        kept = ["--tokens", "header:-1", "--layers", *"1234", "--component", component]
        assert capture.main([str(run.path), *kept]) == 0
        outcome = command(interchange.main, run.path, *words)
        assert outcome.status == 0, outcome.err
        found = pd.read_parquet(out / "estimates.parquet")
        moved = found[found["quantity"] == MOVED].set_index("term")
        term = f"header_last, {component}"
        each = moved.loc[term].set_index("layer")["value"]
        for layer in range(1, 5):
            assert each[layer] == pytest.approx(wanted * (layer in layers), abs=0.01), (
                component,
                layer,
            )
        together = moved.loc[f"{term}, {TOGETHER}", "value"]
        assert together == pytest.approx(wanted * bool(layers), abs=0.01)
        assert moved.loc["header_last", "value"] == pytest.approx(wanted, abs=0.01)
        value = f"{wanted * bool(layers):.2f} "
        trivial = ", which makes the donor's own distribution by construction," * (
            component == ATTN
        )
        said = f"What {component} adds in layers 1–4 together{trivial} moves it by: {value}"
        assert said in outcome.out
        one = f"adds in one layer is shown to move it at {len(layers)} of 4 cells"
        assert one in outcome.out and "More than half" not in outcome.out
    line = refusal(command(interchange.main, run.path, *words, "--tokens", "turn_end"))
    assert line.startswith("what mlp adds is put in at header_last")


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


def masses(logits: torch.Tensor) -> list[float]:
    p = (logits / 0.7).softmax(-1)[TOKENS].tolist()
    return [p[0], p[0] + p[1], sum(p)]


LAST, TOKENS, LABELS = 30, [5, 7, 9], [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]


def under_states(
    model, states: list[np.ndarray], cells: list | None = None
) -> tuple[MassUnder, Model]:
    """A recipient whose last two tokens have states of four donors, after each layer if no other
    cells are given."""
    subject = Subject(ModelSpec("tiny"), model, None, "")
    cells = cells or [("both", layer, [(RESID, layer, (0, 1))]) for layer in range(1, 5)]
    context = tuple(tiny.prompt(LAST, 0))
    unit = MassUnder("s", "d", 1, TOKENS, LABELS, 0.7, context, 2, cells, states)
    return unit, Model(subject, SimpleNamespace(stop_ids=[tiny.EOS]))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_masses_are_those_of_a_whole_pass_with_the_states_and_after_the_last_layer_of_the_donor(
    family,
):
    model, at = tiny.model(family), (LAST - 2, LAST - 1)
    with torch.inference_mode():
        donors = prefill(model, [Prefix(tiny.prompt(LAST, 1 + n), at) for n in range(len(ARMS))])
        states = [donors.residuals[:, layer, None].float().numpy() for layer in range(1, 5)]
        unit, subject = under_states(model, states)
        found = unit.rows(subject).set_index("layer")

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


@pytest.mark.parametrize("family", BEHIND)
@torch.inference_mode()
def test_what_a_component_adds_is_put_in_as_plain_hooks_would_and_all_of_it_makes_the_donor(family):
    """The last tokens are the same in all contexts, as the header's are: so are embeddings."""
    model, layers = tiny.model(family), range(1, 5)
    sequences = [[*tiny.prompt(LAST, n)[:-1], 5] for n in range(1 + len(ARMS))]
    added = [plain(model, ids, BEHIND[family]) for ids in sequences]
    last = {part: torch.stack([one[part][:, -1] for one in added[1:]]) for part in (ATTN, MLP)}
    singles = [[(part, layer)] for part in (ATTN, MLP) for layer in layers]
    sets = [[(part, layer) for layer in layers] for part in (ATTN, MLP)]
    cells = [*singles, *sets, [*sets[0], *sets[1]]]
    places = [("", n, [(*place, (1,)) for place in cell]) for n, cell in enumerate(cells)]
    states = [torch.stack([last[p][:, n - 1] for p, n in cell], 1)[:, :, None] for cell in cells]
    unit, subject = under_states(model, [one.numpy() for one in states], places)
    found = replace(unit, context=tuple(sequences[0])).rows(subject)
    for number, arm in enumerate(ARMS):
        columns = [arm, f"{IN_ROLE} {arm}", f"{COVERED} {arm}"]
        for row, cell in enumerate(cells):
            handles = []
            for part, layer in cell:
                block = find_blocks(model)[layer - 1]
                name = BEHIND[family][part == MLP]
                module = getattr(block, name, None) or block.linear_attn

                def put(_module, _args, output, own=last[part][number, layer - 1]):
                    made = output[0] if isinstance(output, tuple) else output
                    made = made.clone()
                    made[0, -1] = own
                    return (made, *output[1:]) if isinstance(output, tuple) else made

                handles.append(module.register_forward_hook(put))
            logits = model(torch.tensor([sequences[0]]), use_cache=False).logits[0, -1]
            for handle in handles:
                handle.remove()
            got = found.loc[row, columns].tolist()
            assert got == pytest.approx(masses(logits), rel=1e-4, abs=1e-7), (arm, cell)
        donor = model(torch.tensor([sequences[1 + number]]), use_cache=False).logits[0, -1]
        assert got == pytest.approx(masses(donor), rel=1e-4, abs=1e-7)


def test_own_states_that_change_a_bit_are_refused(monkeypatch):
    unit, model = under_states(tiny.model("llama"), [np.zeros((4, 1, 2, 32), np.float32)] * 4)
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
