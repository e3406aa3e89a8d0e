"""``experiments.patching``: planted routes, full passes, controls, and the command."""

import functools
import json

import numpy as np
import pandas as pd
import planted_reaction as planted
import pyarrow.parquet as pq
import pytest
import torch

from experiments import given_turns
from experiments.patching import patch
from experiments.patching.__main__ import main
from experiments.patching.analyse import estimates, largest_error, strongest
from experiments.patching.read import Pair
from experiments.patching.show import figures, verdict
from ia_mech.collect.command import main as sample
from ia_mech.engine.capture import find_blocks
from ia_mech.errors import UserError
from ia_mech.run import Run

QUERIES = 6
CELLS = tuple((layer, name) for layer in range(planted.DEPTH + 1) for name in planted.POSITIONS)
DESIGN = patch.Design(CELLS, CELLS[:: patch.EVERY], True, 1.0, 0)
BETWEEN = [(layer, planted.WRITTEN) for layer in range(planted.WRITE, planted.READ)]


def a_pair(number: int) -> Pair:
    lengths = planted.lengths(number)
    a, b = number % 4, (number + 1 + number % 3) % 4
    return Pair(
        f"q{number}",
        "d",
        planted.context(a, lengths[a], 1, query=2 + number),
        planted.context(b, lengths[b], 2, query=2 + number),
        (planted.turn(b, 4), planted.turn(b, 7)),
        planted.context(a, lengths[a], 3, query=2 + number),
        planted.context((b + 1) % 4, lengths[b], 2, query=2 + number),
        planted.bare(),
    )


@functools.cache
def patched(through_header: bool) -> pd.DataFrame:
    model = planted.model(through_header)
    parts = []
    for number in range(QUERIES):
        pair = a_pair(number)
        made = patch.patched(model, pair, DESIGN)
        parts.append(made.assign(source=pair.source, dataset="d"))
    return pd.concat(parts, ignore_index=True)


def tau_of(found: pd.DataFrame) -> pd.Series:
    tau = found[found["quantity"] == "τ"].assign(layer=found["layer"].fillna(-1))
    return tau.set_index(["of", "layer", "position"])["value"]


def test_a_route_through_the_header_is_found_where_it_is():
    rows = patched(through_header=True)
    found = estimates(rows, resamples=100)
    tau = tau_of(found)
    for cell in CELLS:
        value = tau["interchange", *cell]
        assert value >= 0.9 if cell in BETWEEN else abs(value) <= 0.05, cell
    assert strongest(rows) in BETWEEN
    arms = {of: tau[of, -1, ""] for of in patch.ARMS}
    assert min(arms["header"], arms["turn end to header"], arms["header after nothing"]) >= 0.9
    assert max(abs(arms["response alone"]), abs(arms["response and turn end"])) <= 0.05
    assert tau["all layers", -1, planted.WRITTEN] >= 0.9
    assert abs(tau["all layers", -1, "header_0"]) <= 0.05
    for of in ("own states", "same content", "random direction"):
        assert tau[of].abs().max() <= 0.05, of
    other = tau["response to another query"]
    assert other.abs().max() <= 0.5, "a third response's name doesn't lead to B's"
    change = found[(found["quantity"] == "change of identification")].set_index("of")["value"]
    assert change["header"] == -0.5, "B's turns can't be told any more"
    assert verdict(found).startswith("More of the reaction passes through the header")
    p = found[(found["of"] == "interchange") & (found["quantity"] == "τ")].set_index(
        ["layer", "position"]
    )["p"]
    # Of 2 ** 6 sign patterns two are as extreme, and the drawn ones hold each about as often.
    assert all(p[cell] < 0.05 for cell in BETWEEN) and (p.drop(BETWEEN) == 1).all()


def test_a_direct_route_shows_nowhere_in_the_header():
    rows = patched(through_header=False)
    found = estimates(rows, resamples=100)
    tau = tau_of(found)
    assert tau["interchange"].abs().max() <= 0.05
    assert tau["all layers"].abs().max() <= 0.05
    arms = {of: tau[of, -1, ""] for of in patch.ARMS}
    assert min(arms["response alone"], arms["response and turn end"]) >= 0.9
    assert max(abs(arms[of]) for of in ("header", "turn end to header")) <= 0.05
    assert verdict(found).startswith("More of the reaction passes past the header")


@pytest.mark.parametrize("through_header", [True, False])
def test_checks_hold_and_tokens_add_up(through_header):
    rows = patched(through_header)
    assert largest_error(rows, patch.BOTH, "goal") <= 1e-5
    assert largest_error(rows, patch.SELF, "before") <= 1e-5
    assert largest_error(rows, patch.TAIL, "goal") + largest_error(rows, patch.BEFORE_TAIL, "goal")
    found = estimates(rows, resamples=100)
    by_token = found[found["quantity"] == "τ of the first tokens"]
    tau = tau_of(found)
    for of, mine in by_token.groupby("of"):
        assert mine["value"].iloc[-1] == pytest.approx(tau[of, -1, ""], abs=1e-9)
        assert np.isnan(mine["value"].iloc[0]), "the opener tells nothing, so there is no share"


def test_turns_that_tell_nothing_have_no_shares():
    rows = patched(through_header=True)
    found = estimates(rows.assign(goal=rows["before"]), resamples=100)
    assert found[found["quantity"] == "τ"]["value"].isna().all()
    assert "there is nothing to share out" in verdict(found)
    assert set(figures(found, "planted")) == {"map", "tokens"}


@torch.inference_mode()
def test_a_patched_pass_equals_a_full_one_with_a_plain_hook():
    model, pair = planted.model(True), a_pair(1)
    rows = patch.patched(model, pair, patch.Design(CELLS, (), False, 1.0, 0))
    for row in rows.to_dict("records"):
        turn = list(pair.turns[row["turn"]])
        at = pair.a.positions[row["position"]]
        ids = torch.tensor([pair.b.ids])
        hidden = model(ids, use_cache=False, output_hidden_states=True).hidden_states
        state = hidden[row["layer"]][0, pair.b.positions[row["position"]]]
        if row["layer"] == planted.DEPTH:  # there the model's own are after the final norm
            continue

        def put(_module, args, kwargs, at=at, state=state):
            args[0][0, at] = state

        block = find_blocks(model)[row["layer"]]
        handle = block.register_forward_pre_hook(put, with_kwargs=True)
        logits = model(torch.tensor([[*pair.a.ids, *turn]]), use_cache=False).logits[0]
        handle.remove()
        before = logits[len(pair.a.ids) - 1 : -1].double().log_softmax(-1)
        wanted = before.gather(-1, torch.tensor(turn)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(row["after"], wanted, rtol=0, atol=1e-5)


def written(name: str, rows: list[dict]) -> str:
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return name


@pytest.fixture(scope="module")
def folder(tiny_model_dir, tmp_path_factory):
    """A run of three responses to each of four queries."""
    place = tmp_path_factory.mktemp("patching")
    said = ("Add {0} to it. That is all.", "No idea. Ask me about {0}.", "Twice {0}. Then stop.")
    rows = [
        {"id": f"q{i}", "question": f"What is {i}?", "responses": [one.format(i) for one in said]}
        for i in range(4)
    ]
    data = written(str(place / "several.jsonl"), rows)
    out = place / "run"
    words = ["--model", tiny_model_dir, "--dataset", data, "--out", str(out), "--samples", "2"]
    assert sample([*words, "--temperatures", "0.7", "1", "--max-new-tokens", "6"]) == 0
    return out


def test_the_command_plans_patches_shows_and_goes_on(folder, capsys):
    out = folder.parent / "patching"
    words = [str(folder), "--queries", "3", "--resamples", "100", "--out", str(out)]
    assert main([*words, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert "3, a pair of responses each" in planned and "25 cells, 10 with controls" in planned
    assert not out.exists()
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "passes" in shown and "the turn still attends to the response" in shown
    about = json.loads(pq.read_schema(out / "estimates.parquet").metadata[b"ia_mech"])
    assert "told apart: τ is " in about["sentence"] and about["sentence"] in shown
    assert about["control"].startswith("The largest τ of one state is not shown to exceed that of ")
    assert about["control"] in shown
    found = pd.read_parquet(out / "estimates.parquet")
    cells = found[(found["of"] == "interchange") & (found["quantity"] == "τ")]
    assert (
        len(cells) == 25 and set(cells["layer"]) == set(range(5)) and (cells["sources"] == 3).all()
    )
    assert set(found["of"]) >= {*patch.ARMS, *patch.CONTROLS}
    turns = pd.read_parquet(out / "turns.parquet")
    assert turns["source"].nunique() == 3 and set(turns["turn"]) == {0, 1}
    kept = {file: file.stat().st_mtime_ns for file in (out / "parts").iterdir()}
    assert main(words) == 0
    capsys.readouterr()
    assert {file: file.stat().st_mtime_ns for file in (out / "parts").iterdir()} == kept
    damaged = min(kept)
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert main(words) == 0
    again = pd.read_parquet(out / "estimates.parquet")
    pd.testing.assert_frame_equal(again, found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "2", "9"], "there is no layer 9 to change; give layers from 0 to 4"),
        (["--positions", "header_7"], "no position header_7 between response and turn; give"),
        (["--temperature", "0.5"], "no turns at T = 0.5; give --temperature 0.7 or 1"),
    ],
)
def test_what_isnt_there_is_one_line(folder, tmp_path, capsys, words, said):
    assert main([str(folder), *words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and said in error


def test_a_run_without_alternatives_is_refused(tiny_model_dir, tmp_path, capsys):
    words = ["--model", tiny_model_dir, "--limit", "2", "--max-new-tokens", "2", "--out"]
    assert sample([*words, str(tmp_path / "one"), "--temperatures", "1"]) == 0
    assert main([str(tmp_path / "one")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "one has one response per query; sample" in error


def test_a_run_can_be_read_only_by_its_template(folder, monkeypatch):
    monkeypatch.setattr(given_turns, "context_with", lambda *_: planted.context(0, 5, 1))
    with pytest.raises(UserError, match="has other ids than its template makes now; sample"):
        given_turns.given_turns([Run.open(folder)], 2, None, 0)
