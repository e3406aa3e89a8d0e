"""``experiments.patching``: planted routes, full passes, controls, and the command."""

import json

import numpy as np
import pandas as pd
import planted_reaction as planted
import pytest
import torch

from experiments.patching import patch
from experiments.patching.__main__ import main
from experiments.patching.analyse import estimates, largest_error, strongest
from experiments.patching.read import Pair
from experiments.patching.show import verdict
from ia_mech.collect.command import main as sample
from ia_mech.engine.capture import find_blocks
from ia_mech.run import Run

QUERIES = 6
CELLS = tuple((l, name) for l in range(planted.DEPTH + 1) for name in planted.POSITIONS)
DESIGN = patch.Design(CELLS, CELLS[:: patch.EVERY], True, 1.0, 0)
BETWEEN = [(l, planted.WRITTEN) for l in range(planted.WRITE, planted.READ)]


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
    assert verdict(found).startswith("More of the reaction passes through")
    p = found[found["test"].notna()].set_index(["layer", "position"])["p"]
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
    assert verdict(found).startswith("More of the reaction passes by")


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
