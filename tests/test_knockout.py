"""``experiments.knockout``: planted routes, and the command."""

import functools
import json
from argparse import ArgumentTypeError
from dataclasses import replace

import numpy as np
import pandas as pd
import planted_reaction as planted
import pytest
import tiny
import torch
from test_intervention import by_plain_hooks

from experiments.knockout.__main__ import main, window_of
from experiments.knockout.analyse import BEYOND, LOST, OWN, OWN_LOST, estimates, with_bits
from experiments.knockout.block import EDGES, INTACT, RANDOM, Asked, arms_of, blocked, edges_of
from experiments.knockout.matched import MATCHED, attention, blocked_matched, matched
from experiments.knockout.resample import resampled, sampled, windows_of
from experiments.knockout.show import control, verdict
from ia_mech.chat.format import ChatContext
from ia_mech.collect.command import main as sample
from ia_mech.engine.sampling import gumbel, stream_key

QUERIES, WINDOW = 5, 2
HEADER, TURN, BOTH, ONTO_HEADER, ONTO_QUERY = EDGES


def asked(number: int) -> Asked:
    lengths = planted.lengths(number)
    contexts = [
        planted.context(name, lengths[name], 1 + name % 3, query=2 + number)
        for name in range(planted.NAMES)
    ]
    turns = [(planted.turn(name, 3 + name), name) for name in range(planted.NAMES)]
    return Asked(f"q{number}", "d", tuple(contexts), tuple(turns))


@functools.cache
def rows(through_header: bool) -> pd.DataFrame:
    model = planted.model(through_header)
    parts = []
    for number in range(QUERIES):
        one = asked(number)
        made = blocked(model, one, arms_of(planted.DEPTH, WINDOW), 0)
        parts.append(made.assign(source=one.source, dataset=one.dataset))
    return with_bits(pd.concat(parts, ignore_index=True), 0)


@pytest.mark.parametrize(
    ("through_header", "needed"),
    [
        (True, {HEADER: planted.WRITE, ONTO_HEADER: planted.READ, BOTH: planted.WRITE}),
        (False, {TURN: planted.READ, BOTH: planted.READ}),
    ],
)
def test_only_the_planted_edges_carry_the_bits(through_header, needed):
    found = estimates(rows(through_header=through_header), planted.NAMES)
    bits = found[found["quantity"] == "readable bits"].set_index(["of", "first", "last"])["value"]
    assert bits[INTACT, 0, 0] > 1.5, "of 2"
    for (of, first, last), value in bits.items():
        if of in needed and first <= needed[of] <= last:
            assert abs(value) < 0.05, (of, first, last)
        elif not of.startswith(RANDOM):
            assert value == pytest.approx(bits[INTACT, 0, 0], abs=0.05), (of, first, last)
    lost = found[found["quantity"] == LOST].set_index(["of", "first", "last"])
    for of in needed:
        assert lost["p"][of, 1, planted.DEPTH] == pytest.approx(2 / 2**QUERIES), "the smallest"


def test_the_verdict_names_the_route():
    told: dict[bool, str] = {}
    for through_header in (True, False):
        found = estimates(rows(through_header=through_header), planted.NAMES)
        found["p_holm"] = found["p"] / 2  # five queries allow no p below 2 / 2 ** 5
        told[through_header] = verdict(found)
    assert told[True].startswith("The turn reads the response through the header: ")
    assert told[False].startswith("The turn reads the response directly: ")


def test_the_control_tells_what_needed_edges_take_away_from_random_ones():
    found = estimates(rows(through_header=True), planted.NAMES)
    beyond = found[found["quantity"] == BEYOND].set_index("of")["value"]
    assert beyond[HEADER] > 1 and beyond[TURN] < 0.05
    said = control(found)
    assert said.startswith(
        "Readable bits lost less those lost with other edges blocked (below 0: these take more): "
        f"with as many random edges {beyond[HEADER]:.2f} "
    )
    assert f"for {HEADER}, {beyond[TURN]:.2f} " in said and f"for {BOTH}." in said


def test_a_route_is_named_only_if_other_edges_take_less_away():
    found = estimates(rows(through_header=True), planted.NAMES)
    found["p_holm"] = found["p"] / 2
    beyond = found["quantity"] == BEYOND
    assert (found.loc[beyond, "control"] == RANDOM).all() and beyond.sum()
    found.loc[beyond, ["value", "low", "high"]] *= -1
    said = verdict(found)
    assert said.startswith("The turn isn't shown to need the response's edges more than others: ")


def test_random_edges_are_as_many_and_spare_the_first_token():
    one = asked(1)
    context, (turn, _) = one.contexts[2], one.turns[2]
    start = context.positions["turn_end"]
    for of in EDGES:
        real = edges_of(of, context, start, turn, np.random.default_rng(0))
        drawn = [
            edges_of(RANDOM + of, context, start, turn, np.random.default_rng(seed))
            for seed in (1, 2)
        ]
        for edges in drawn:
            pairs = [tuple(edge) for edge in edges.tolist()]
            assert len(set(pairs)) == len(pairs) == len(real)
            assert all(a >= start and 0 < b < a for a, b in pairs)
        assert drawn[0].tolist() != drawn[1].tolist()


def test_a_turn_that_ends_at_once_is_read():
    """It has no tokens that attend to anything, and no edges of its own to block."""
    one = replace(asked(0), turns=((planted.turn(0, 1)[:1], 0),))
    arms = arms_of(planted.DEPTH, planted.DEPTH)
    found = blocked(planted.model(True), one, arms, 0)
    told = np.stack(found["logprobs"].tolist())
    assert len(told) == len(arms) and np.isfinite(told).all()
    more = blocked_matched(planted.model(True), one, planted.DEPTH, 0)
    assert np.isfinite(np.stack(more["logprobs"].tolist())).all()
    assert set(found["of"][(told == told[0]).all(1)]) >= {INTACT, TURN, ONTO_HEADER, ONTO_QUERY}


def test_matched_edges_carry_as_much_attention():
    model, one = planted.model(True), asked(1)
    context, (turn, _) = one.contexts[2], one.turns[2]
    start = context.positions["turn_end"]
    ids = (*context.ids, *turn[:-1])
    weights = attention(model, ids)
    assert weights.shape == (planted.DEPTH, len(ids), len(ids))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"
    rng = np.random.default_rng(0)
    own = edges_of(ONTO_QUERY, context, start, turn, rng)
    even = torch.ones(2, len(ids), len(ids)).tril()
    even /= even.sum(-1, keepdim=True)
    drawn, share = matched(even, own, start, rng)
    assert share == pytest.approx(1, abs=0.05) and len(drawn) == 2
    for layer, edges in zip(even, drawn, strict=True):
        pairs = set(map(tuple, edges.tolist()))
        assert len(pairs) == len(edges) and not pairs & set(map(tuple, own.tolist()))
        assert all(a >= start and 0 < b < a for a, b in pairs)
        mass = layer[edges[:, 0], edges[:, 1]].sum() / layer[own[:, 0], own[:, 1]].sum()
        assert mass == pytest.approx(share, abs=0.05) and mass <= 1 + 1e-6
    assert drawn[0].tolist() != drawn[1].tolist()
    assert matched(0 * even, own, start, rng)[1] == 1


def test_blocking_matched_edges_leaves_the_planted_route():
    """Beside the route all attention is on the first token, whose edges carry more than is left to
    match where the turn attends to something."""
    one = asked(1)
    found = blocked_matched(planted.model(True), one, planted.DEPTH, 0)
    assert set(found["of"]) == {MATCHED + of for of in EDGES}
    assert len(found) == len(EDGES) * len(one.turns)
    told = np.stack(found["logprobs"].tolist())
    assert told.shape == (len(found), planted.NAMES)
    kept = found["of"].isin([MATCHED + TURN, MATCHED + ONTO_QUERY]).to_numpy()
    assert (told.argmax(1) == found["followed"])[kept].all()


@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in tiny.ARCHITECTURES
            if name not in ("llama", "qwen3_5")  # a recurrent layer has no edges
        ),
    ],
)
def test_turns_of_a_blocked_model_equal_full_passes_with_plain_hooks(architecture):
    """Every token is the one that a naive pass draws with the same noise, and likelihoods after
    each response are those of naive passes."""
    model, layer, stops = tiny.model(architecture), 2, [5]
    contexts = []
    for number, response in enumerate((6, 9)):
        ids = tiny.prompt(8 + response + 3, seed=number)
        at = 8 + response
        positions = {"turn_end": at, "header_0": at + 1, "header_last": at + 2}
        contexts.append(ChatContext("", ids, positions, range(2, 7), range(8, at)))
    asked = Asked("q", "d", tuple(contexts), ())
    arms = windows_of([(layer, layer), (layer, layer)])
    assert len(arms) == 1 + len(EDGES)
    found = resampled(model, asked, arms, 2, stops, 3)

    def logits(of: str, context: ChatContext, turn: list[int]) -> torch.Tensor:
        end = len(context.ids)
        header, after = range(end - 3, end), range(end, end + len(turn) - 1)
        pairs = {
            INTACT: [],
            HEADER: [(a, b) for a in header for b in context.response],
            TURN: [(a, b) for a in after for b in context.response],
            BOTH: [(a, b) for a in (*header, *after) for b in context.response],
            ONTO_HEADER: [(a, b) for a in after for b in header],
            ONTO_QUERY: [(a, b) for a in after for b in context.query],
        }[of]
        masked = (layer, torch.tensor(pairs)) if pairs else None
        return by_plain_hooks(model, [*context.ids, *turn[:-1]], None, masked)[end - 1 :]

    counts = found.groupby(["of", "followed"]).cumcount()
    for (_, row), number in zip(found.iterrows(), counts, strict=True):
        turn, k = row["token_ids"], row["followed"]
        keys = torch.tensor([stream_key(3, f"q\x1f{k}", number)])
        noise = torch.cat([gumbel(keys, step, tiny.VOCAB) for step in range(len(turn))])
        best = (logits(row["of"], contexts[k], turn) + noise).topk(2)
        clear = best.values[:, 0] - best.values[:, 1] > 1e-4
        assert (best.indices[:, 0] == torch.tensor(turn))[clear].all()
        assert turn[-1] in stops or len(turn) == 24
        assert not set(turn[:-1]) & set(stops)
        for context, told in zip(contexts, row["logprobs"], strict=True):
            naive = logits(row["of"], context, turn).double().log_softmax(-1)
            wanted = naive.gather(-1, torch.tensor(turn)[:, None]).sum()
            assert told == pytest.approx(float(wanted), abs=len(turn) * 1e-5)
    texts = found.groupby(["of"])["token_ids"].agg(str)
    assert texts.nunique() == len(arms), "each knockout writes other turns"
    alone = sampled(model, contexts[1], arms[3:4], [stream_key(3, "q\x1f1", 1)], stops)
    mine = found[(found["of"] == arms[3].of) & (found["followed"] == 1)]
    assert list(alone[0][0]) == mine["token_ids"].iloc[1]


@pytest.mark.slow
@pytest.mark.parametrize("through_header", [True, False])
def test_turns_of_a_blocked_model_tell_nothing_without_the_planted_route(through_header):
    model, parts = planted.model(through_header), []
    for number in range(2):
        one = asked(number)
        made = resampled(model, one, windows_of([(1, planted.DEPTH)]), 1, [], 0)
        parts.append(made.assign(source=one.source, dataset=one.dataset))
    found = estimates(rows(through_header=through_header), planted.NAMES, pd.concat(parts))
    told = found[found["quantity"] == OWN].set_index(["of", "first", "last"])["value"]
    needed = {HEADER if through_header else TURN, BOTH}
    for (of, _, _), value in told.items():
        if not (through_header and of == ONTO_HEADER):  # a turn may write a header's token itself
            assert (value < 0.05) if of in needed else (value > 1), of
    lost = found[found["quantity"] == OWN_LOST].set_index("of")
    assert len(lost) == len(EDGES) and lost["p_holm"].notna().all()
    assert lost["value"][BOTH] == told[INTACT, 0, 0] - told[BOTH, 1, planted.DEPTH]


def test_windows_cover_every_layer():
    windows = {(arm.first, arm.last) for arm in arms_of(31, 6)}
    assert {(1, 6), (4, 9), (25, 30), (26, 31), (1, 31), (0, 0)} <= windows
    assert all(last <= 31 for _, last in windows)


@pytest.fixture(scope="module")
def folder(tiny_model_dir, tmp_path_factory):
    """A run of three responses to each of four queries."""
    place = tmp_path_factory.mktemp("knockout")
    said = ("Add {0} to it. That is all.", "No idea. Ask me about {0}.", "Twice {0}. Then stop.")
    file = place / "several.jsonl"
    with file.open("w") as lines:
        for i in range(4):
            responses = [one.format(i) for one in said]
            row = {"id": f"q{i}", "question": f"What is {i}?", "responses": responses}
            lines.write(json.dumps(row) + "\n")
    out = place / "run"
    words = ["--model", tiny_model_dir, "--dataset", str(file), "--out", str(out)]
    assert sample([*words, "--samples", "1", "--temperatures", "1", "--max-new-tokens", "6"]) == 0
    return out


def test_the_command_plans_blocks_shows_and_goes_on(folder, capsys):
    out = folder.parent / "knockout"
    words = [str(folder), "--queries", "3", "--responses", "3", "--window", "2", "--out", str(out)]
    assert main([*words, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert "3, 3 responses to each" in planned and "under 26 knockouts" in planned
    assert not out.exists()
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "readable bits intact" in shown and "random edges show the latter" in shown
    assert "Readable bits lost less those lost with other edges blocked" in shown
    assert "; with edges of as much attention " in shown
    found = pd.read_parquet(out / "estimates.parquet")
    bits = found[found["quantity"] == "readable bits"]
    assert len(bits) == 31 and (bits["value"] <= np.log2(3)).all() and (bits["sources"] == 3).all()
    assert found["p_holm"].notna().sum() == 30 + 2 * 5
    kept = {file: file.stat().st_mtime_ns for file in (out / "parts").iterdir()}
    assert main(words) == 0
    assert {file: file.stat().st_mtime_ns for file in (out / "parts").iterdir()} == kept


@pytest.mark.slow
def test_the_command_samples_turns_of_a_blocked_model(folder, capsys):
    out = folder.parent / "resampled"
    words = [str(folder), "--queries", "2", "--responses", "3", "--window", "4", "--out", str(out)]
    words += ["--resample", "2-3", "1-4"]
    assert main([*words, "--dry-run"]) == 0
    assert "6 under each of 11 knockouts" in capsys.readouterr().out
    assert main(words) == 0
    assert "turns that the model writes with edges blocked: their I_3" in capsys.readouterr().out
    found = pd.read_parquet(out / "estimates.parquet")
    own = found[found["quantity"].isin([OWN, OWN_LOST])]
    assert own["quantity"].value_counts().to_dict() == {OWN: 11, OWN_LOST: 10}
    assert own["value"].abs().max() <= np.log2(3) and own["p_holm"].notna().sum() == 10
    turns = pd.read_parquet(out / "own_turns.parquet")
    assert len(turns) == 11 * 6 and turns["token_ids"].map(len).between(1, 24).all()


def test_a_window_is_two_layers():
    assert window_of("2-13") == (2, 13)
    for text in ("2", "3-2", "a-b", "-1-2"):
        with pytest.raises(ArgumentTypeError, match="is no window of layers, such as 1-6"):
            window_of(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--window", "6"], "--window 6: the model has 4 layers; give at most 4"),
        (["--responses", "4"], "--responses 4: there are 3 to each query; give fewer"),
        (["--temperature", "0.7"], "no turns at T = 0.7; give --temperature 1"),
        (["--resample", "2-9"], "there is no layer 9 to change; give layers from 1 to 4"),
    ],
)
def test_what_isnt_there_is_one_line(folder, tmp_path, capsys, words, said):
    usual = ["--responses", "3", "--window", "2"]
    assert main([str(folder), *usual, *words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and said in error
