"""The follow-up mass with a donor's query or response: planted models, slow passes, families."""

import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny
from shell import call, refusal
from test_interchange import SHARES, Marked, sampled
from test_moved_mass import LABELS, TOKENS
from test_splice import ARCHITECTURES, QUERY, RESPONSES, by_one_pass, contexts

from experiments import change, locate, mass
from experiments.control import (
    ARMS,
    CHOOSING,
    COVERED,
    DONORS,
    EQUAL,
    MOVED,
    RATIO,
    UNCHANGED,
    donors_among_siblings,
)
from experiments.experiment import Model
from experiments.moved_by_sites import MassWith, sites_of
from experiments.outcome import IN_ROLE
from ia_mech.engine import splice
from ia_mech.engine.state import Prefix, prefill
from ia_mech.errors import UserError
from ia_mech.models.load import ModelSpec, Subject

AFTER = tuple(tiny.prompt(4, seed=2))
DONORS_OF = [1, 2, 1, 2]  # high, low, and two of equal mass


def recipient(family: str, recurrent: bool = False) -> tuple[MassWith, Model]:
    """Contexts of three lengths that share the query; the first is the recipient."""
    each, sites = [tuple(ids) for ids in contexts(0)], sites_of(recurrent, siblings=False)
    what = each, [QUERY] * 3, DONORS_OF, AFTER, sites
    unit = MassWith("s", "d", 1, TOKENS, LABELS, 1.0, *what)
    subject = Subject(ModelSpec("tiny"), tiny.model(family), None, "")
    return unit, Model(subject, SimpleNamespace(stop_ids=[tiny.EOS]))


def columns(arm: str) -> list[str]:
    return [arm, f"{IN_ROLE} {arm}", f"{COVERED} {arm}"]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_both_make_the_donor_s_own_mass_and_unchanged_is_the_recipient_s(family):
    recurrent = family == "qwen3_5"
    unit, model = recipient(family, recurrent)
    found = unit.rows(model).set_index("term")
    assert list(found.index) == unit.sites and len(found) == (5 if recurrent else 3)
    alone = [
        prefill(model.subject.model, [Prefix([*ids, *AFTER])]).logits[0].softmax(-1)[TOKENS]
        for ids in unit.contexts
    ]
    wanted = [[float(p[0]), float(p[:2].sum()), float(p.sum())] for p in alone]
    for term in unit.sites:
        got = found.loc[term, columns("unchanged")].tolist()
        assert got == pytest.approx(wanted[0], rel=1e-4)
    for arm, donor in zip(ARMS, DONORS_OF, strict=True):
        got = found.loc[change.QUERY_AND_RESPONSE, columns(arm)].tolist()
        assert got == pytest.approx(wanted[donor], rel=1e-4), arm


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_masses_with_a_site_are_those_of_one_pass_with_a_mask_per_token(family):
    unit, model = recipient(family)
    found = unit.rows(model).set_index("term")
    edges = [(0, QUERY, QUERY + length) for length in RESPONSES]
    for arm, donor in zip(ARMS[:2], DONORS_OF[:2], strict=True):
        for site in (change.QUERY, change.RESPONSE):
            made = change.Splice(site).hybrid((0, edges[0]), (donor, edges[donor]))
            p = [
                np.exp(by_one_pass(model.subject.model, made, [*AFTER, token], after=0)[-1])
                for token in TOKENS
            ]
            got = found.loc[site, columns(arm)].tolist()
            assert got == pytest.approx([p[0], p[0] + p[1], sum(p)], rel=1e-4), (arm, site)


def test_own_keys_and_values_that_change_a_bit_are_refused(monkeypatch):
    unit, model = recipient("llama")
    whole = splice.spliced

    def disturbed(group, hybrids):
        made = whole(group, hybrids)
        if len(hybrids[0].pieces) > 1:
            for layer in made.state.cache.layers:
                layer.values = layer.values * (1 + 1e-6)
        return made

    monkeypatch.setattr(splice, "spliced", disturbed)
    with pytest.raises(UserError, match="own states, put where they were, change"):
        unit.rows(model)


@pytest.mark.parametrize("moody", [change.QUERY, change.RESPONSE])
def test_the_mass_travels_with_the_site_that_decides_the_first_token(
    moody, tiny_subject, capfd, monkeypatch, tmp_path
):
    monkeypatch.setattr("experiments.arms.builtin_judge", Marked)
    run = sampled(tiny_subject, (-0.5, -3.0), tmp_path, samples=1, moody=moody)

    def command(main, *words):
        return call(main, [str(run.path), "--resamples", "200", *words], capfd)

    words = ("--outcome", "mass")
    assert "doesn't hold all first tokens of" in refusal(command(locate.main, *words))
    assert command(mass.main, "--share", "0.99").status == 0
    outcome = command(locate.main, *words)
    assert outcome.status == 0, outcome.err
    found = pd.read_parquet(run.path / "results" / "locate-mass" / "estimates.parquet")
    cells, whole = (found.set_index(by)["value"] for by in (["quantity", "term"], "quantity"))
    wanted = SHARES["z"] - SHARES["q"]
    assert whole[DONORS] == pytest.approx(wanted, abs=0.01)
    assert whole[UNCHANGED] == pytest.approx(sum(SHARES.values()) / 2, abs=0.01)
    for site in sites_of(recurrent=False, siblings=False):
        moves = site in (moody, change.QUERY_AND_RESPONSE)
        assert cells[MOVED, site] == pytest.approx(wanted * moves, abs=0.01), site
        assert cells[RATIO, site] == pytest.approx(float(moves), abs=0.01)
        assert abs(cells[EQUAL, site]) < 0.01
    corrected = found[found["quantity"] == MOVED].set_index("term")
    others = corrected.loc[[change.QUERY, change.RESPONSE]]
    assert others["p_holm"].min() == pytest.approx(min(1, 2 * others["p"].min()))
    assert f"With the {moody}'s keys and values it moves by: {wanted:.2f}" in outcome.out
    line = refusal(command(locate.main, *words, "--maps", "windows"))
    assert line.startswith("--maps is of --outcome bits")


def test_siblings_as_donors_move_the_mass_with_the_response(
    tiny_subject, capfd, monkeypatch, tmp_path
):
    monkeypatch.setattr("experiments.arms.builtin_judge", Marked)
    run = sampled(tiny_subject, (-0.5, -3.0), tmp_path, samples=1, responses=4)
    words = [str(run.path), "--resamples", "200"]
    assert call(mass.main, [*words, "--share", "0.99", "--responses", "3"], capfd).status == 0
    words += ["--outcome", "mass", "--donors", "siblings"]
    line = refusal(call(locate.main, words, capfd))
    assert line.startswith("0 queries have") and "three other responses with a mass" in line
    shutil.rmtree(run.path.with_name(f"{run.path.name}-mass"))
    assert call(mass.main, [*words[:3], "--share", "0.99", "--responses", "4"], capfd).status == 0
    outcome = call(locate.main, words, capfd)
    assert outcome.status == 0, outcome.err
    path = run.path / "results" / "locate-mass-siblings"
    rows, found = (pd.read_parquet(path / f"{name}.parquet") for name in ("rows", "estimates"))
    assert all((rows[f"query {arm}"] == rows["source"]).all() for arm in ARMS)
    assert {*rows["term"]} == {change.RESPONSE, change.QUERY_AND_RESPONSE}
    cells = found.set_index(["quantity", "term"])["value"]
    wanted = SHARES["z"] - SHARES["q"]
    assert cells[MOVED, change.RESPONSE] == pytest.approx(wanted, abs=0.01)
    assert abs(cells[EQUAL, change.RESPONSE]) < 0.01
    assert outcome.out.startswith("The siblings' own first tokens differ in follow-up mass by:")
    line = refusal(call(locate.main, [*words[:3], "--donors", "siblings"], capfd))
    assert line.startswith("--donors is of --outcome mass")


def test_siblings_of_a_recurrent_model_exchange_its_state_too():
    sites = change.RESPONSE, change.STATE, change.RESPONSE_AND_STATE, change.QUERY_AND_RESPONSE
    assert sites_of(recurrent=True, siblings=True) == list(sites)


def test_the_equal_donors_among_siblings_are_not_the_high_and_the_low_one():
    masses = [0.5, 0.1, 0.6, 0.65, 0.9, 0.2, 0.3]
    each = pd.DataFrame({"source": ["a"] * 5 + ["b"] * 2, CHOOSING: masses})
    (made,) = donors_among_siblings(each, [0, 5], seed=0).to_dict("records")
    assert (made["recipient"], made["high"], made["low"]) == (0, 4, 1)
    assert {made["equal a"], made["equal b"]} == {2, 3}
