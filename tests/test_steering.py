"""``experiments.steering``: a planted direction, controls of equal KL, the choice, the command."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import planted_reaction as planted
import pytest
import torch
from test_temperature_sweep import judged

from experiments.steering import sample as sampling
from experiments.steering.__main__ import main
from experiments.steering.analyse import (
    ADDED,
    BEYOND,
    ODDS,
    RANK,
    by_context,
    chosen_dose,
    estimates,
    of_arm,
)
from experiments.steering.controls import (
    HIGH,
    LOW,
    PROMPT,
    RANDOM,
    SHUFFLED,
    patched_arms,
    random_arms,
    without_known,
)
from experiments.steering.read import CHOOSING, REPORTING, Context, Query, Read, Turn
from experiments.steering.show import verdict
from experiments.steering.steer import (
    UNSTEERED,
    Arm,
    FirstToken,
    biased,
    divergences,
    first_tokens,
    of_equal_kl,
    rates_by_first_token,
    steered,
)
from ia_mech.collect.command import main as sample
from ia_mech.engine.capture import find_blocks
from ia_mech.engine.decode import Row, decode
from ia_mech.engine.state import Prefix, prefill
from ia_mech.judge.rubric import GENUINE, NAMES
from ia_mech.run import Run
from ia_mech.steering import ADD, TURN, SteeringVector
from probes.card import Direction, Probe

LAYER = 3  # between the block that writes and the one that reads
FROM, TO = 0, 2  # names
DOSES = (0.05, 0.1, 0.2, 0.4, 0.8)
NOTHING = FirstToken(None, ())


def planted_vector(dose: float = 1.0, direction: torch.Tensor | None = None) -> SteeringVector:
    if direction is None:
        direction = torch.zeros(planted.WIDTH)
        direction[planted.COPIED + TO], direction[planted.COPIED + FROM] = 1.0, -1.0
    return SteeringVector(ADD, LAYER, (planted.WRITTEN,), direction, dose, "planted", "0" * 16)


def planted_query(number: int) -> Query:
    """The context's own turn isn't accepted; that of the other name is."""
    made = planted.context(FROM, 4 + number, 1, query=2 + number)
    context = Context("c", 0, tuple(made.ids), dict(made.positions), ())
    turns = tuple(Turn(planted.turn(name, 4), 0, float(name == TO)) for name in (FROM, TO))
    half = CHOOSING if number % 2 else REPORTING
    return Query(f"q{number}", "d", half, (context,), turns)


def scored(arms, count: int = 12) -> pd.DataFrame:
    model = planted.model(True)
    parts = []
    for number in range(count):
        one = planted_query(number)
        made = steered(model, one, arms, NOTHING, False)
        parts.append(made.assign(source=one.source, dataset=one.dataset))
    return pd.concat(parts, ignore_index=True)


def test_the_planted_direction_flips_the_turn_and_random_ones_do_not():
    model = planted.model(True)
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(20, planted.WIDTH, generator=rng)
    arms = [Arm(UNSTEERED), *(Arm(ADDED, 0, planted_vector(dose)) for dose in DOSES)]
    arms += [Arm(RANDOM, n, planted_vector(DOSES[-1], one)) for n, one in enumerate(noise)]
    contexts = by_context(scored(arms))
    odds = contexts.groupby(["of", "draw", "dose"])["odds"].mean()
    curve = odds[ADDED].to_numpy()
    assert (np.diff(curve) > 0).all() and curve[0] > 0
    before = scored([Arm(UNSTEERED)], 1)
    gap = before["plain"][0] - before["plain"][1]
    assert gap > 3 and curve[-1] > gap, "the accepted turn becomes the likelier one"
    drawn = odds[RANDOM].to_numpy()
    assert drawn.max() < gap and np.abs(drawn).mean() < curve[-1] / 4
    query = planted_query(1)
    ids, places = query.contexts[0].ids, query.contexts[0].places

    def written(vector: SteeringVector | None) -> list[int]:
        there = vector.at_context(places) if vector else ()
        prefilled = prefill(model, [Prefix([*ids, planted.OPENER], (), there)])
        (row,) = decode(model, [prefilled], [Row(0, 0.0, (0, 0))], [], 3)
        return row.token_ids.tolist()

    assert written(None) == [planted.ECHO + FROM] * 3
    assert written(planted_vector(DOSES[-1])) == [planted.ECHO + TO] * 3
    for one in noise:
        assert written(planted_vector(DOSES[-1], one)) == [planted.ECHO + FROM] * 3
    assert written(replace(planted_vector(DOSES[-1]), layer=planted.READ)) == (
        [planted.ECHO + FROM] * 3
    ), "after the block that reads it is too late"


@torch.inference_mode()
def test_likelihoods_and_first_tokens_equal_full_passes_with_plain_hooks(tiny_subject):
    model = tiny_subject.model
    ids = tuple(range(20, 41))
    context = Context("c", 0, ids, {"turn_end": 17, "header_last": 20}, ())
    turns = (Turn((50, 60, 70, 80), 0, 1.0), Turn((55, 65), 0, 0.0))
    query = Query("q", "d", REPORTING, (context,), turns)
    direction = torch.randn(32, generator=torch.Generator().manual_seed(0))
    unit = direction / direction.norm()
    rates = np.linspace(0, 1, model.config.vocab_size)
    for places in (("header_last",), ("turn_end", TURN)):
        vector = SteeringVector(ADD, 2, places, direction, 0.7, "tiny", "0" * 16)
        states = {(0, "c"): direction}, {(0, "another"): direction}
        arms = [Arm(UNSTEERED), Arm(ADDED, 0, vector)]
        arms += [Arm(HIGH, draw, vector, states=some) for draw, some in enumerate(states)]
        found = steered(model, query, arms, FirstToken(rates, (3, 4)), False)
        assert found["of"].value_counts().to_dict() == {UNSTEERED: 2, ADDED: 2, HIGH: 2}
        for row in found[found["of"] != UNSTEERED].to_dict("records"):
            turn = turns[row["turn"]].ids
            where = [context.places[name] for name in places if name != TURN]
            where += range(len(ids), len(ids) + len(turn) - 1) if TURN in places else []

            def change(_module, _args, output, where=where, of=row["of"]):
                if of == HIGH:
                    output[0, where[0]] = direction
                    return
                for at in where:
                    output[0, at] += 0.7 * output[0, at].norm() * unit

            whole = torch.tensor([[*ids, *turn]])
            plain = model(whole, use_cache=False).logits[0].double().log_softmax(-1)
            handle = find_blocks(model)[1].register_forward_hook(change)
            after = model(whole, use_cache=False).logits[0].double().log_softmax(-1)
            handle.remove()
            at = range(len(ids) - 1, len(ids) + len(turn) - 1)
            for name, logits in (("plain", plain), ("logprob", after)):
                wanted = sum(float(logits[i, t]) for i, t in zip(at, turn, strict=True))
                assert row[name] == pytest.approx(wanted, abs=1e-4)
            first, before = after[len(ids) - 1], plain[len(ids) - 1]
            kl = float((first.exp() * (first - before)).sum())
            assert row["kl"] == pytest.approx(kl, abs=1e-5) and kl > 5e-4
            assert row["expected"] == pytest.approx(float(first.exp().numpy() @ rates), abs=1e-5)
            assert row["ended"] == pytest.approx(float(first[[3, 4]].exp().sum()), abs=1e-6)


def test_controls_reach_the_kl_that_is_wanted():
    model = planted.model(True)
    queries = [planted_query(number) for number in range(4)]
    told = torch.zeros(planted.WIDTH)
    told[planted.TOLD + TO] = 1.0
    arm = Arm(ADDED, 0, replace(planted_vector(0.02, told), positions=("header_last",), layer=5))
    bias = np.zeros(planted.VOCAB)
    bias[7] = 0.1

    def kl_of(arms):
        found = [divergences(model, query, arms) for query in queries]
        return pd.concat(found).groupby("arm")["kl"].mean().to_numpy()

    for kl in (1e-4, 1e-3):
        found = of_equal_kl([arm, Arm("bias", bias=bias)], kl, kl_of)
        assert len(found) == 2
        for one in found:
            values = [
                NOTHING.measured(*first_tokens(model, query.contexts[0], [one]))["kl"][0]
                for query in queries
            ]
            assert np.mean(values) == pytest.approx(kl, rel=0.2)
    idle = Arm("idle", 0, replace(arm.vector, layer=planted.DEPTH, dose=1e-9))
    assert of_equal_kl([idle], 1e-2, kl_of) == []


def test_a_bias_moves_the_first_token_alone():
    model, query = planted.model(True), planted_query(1)
    bias = np.zeros(planted.VOCAB)
    bias[planted.OPENER] = 1.0
    rows = steered(model, query, [Arm(UNSTEERED), Arm("bias", bias=bias)], NOTHING, False)
    first, plain = first_tokens(model, query.contexts[0], [Arm("bias", bias=bias)])
    moved = rows[rows["of"] == "bias"]
    wanted = first[0, planted.OPENER] - plain[planted.OPENER]
    np.testing.assert_allclose(moved["logprob"] - moved["plain"], wanted, atol=1e-5)
    assert wanted > 0.1 and np.exp(first[0]).sum() == pytest.approx(1, abs=1e-5)
    assert biased(np.log([0.5, 0.5]), np.log([3.0, 1.0])) == pytest.approx(np.log([0.75, 0.25]))


def test_states_of_high_scores_are_put_into_contexts_of_low_ones():
    """Contexts of one name score low along the planted direction, a quarter of them high."""
    model, low, sources = planted.model(True), 12, 4
    queries = [planted_query(number) for number in range(low)]
    made = [planted.context(FROM, 4 + i, 1, query=2 + i) for i in range(low)]
    made += [planted.context(TO, 4 + i, 1, query=2 + i) for i in range(low // 3)]
    at = [(one.positions[planted.WRITTEN],) for one in made]
    prefixes = [Prefix(one.ids, place) for one, place in zip(made, at, strict=True)]
    residuals = prefill(model, prefixes, find_blocks(model)).residuals
    x = residuals[:, LAYER, 0].double().numpy()
    x += np.random.default_rng(0).normal(0, 1e-3, x.shape)  # no two scores alike
    frame = pd.DataFrame({"run": 0, "context_id": [f"c{i}" for i in range(len(made))]})
    frame["source"] = [f"s{i % sources}" for i in range(len(made))]
    for number, query in enumerate(queries):
        (context,) = query.contexts
        queries[number] = replace(query, contexts=(replace(context, id=f"c{number}"),))
    read = Read(queries, frame, pd.DataFrame(), "genuine", None, [])
    arms = patched_arms(x, read, Arm(ADDED, 0, planted_vector(0.4)), 0)
    assert [arm.of for arm in arms] == [HIGH] * 5 + [LOW] * 5
    score = x @ planted_vector().direction.double().numpy()
    receivers = {(0, f"c{i}") for i in np.flatnonzero(score < np.median(score))}
    assert len(receivers) == len(made) // 2
    for arm in arms:
        assert set(arm.states) == receivers and arm.dose == 0
        for (_, name), state in arm.states.items():
            (donor,) = np.flatnonzero(np.abs(x - state.double().numpy()).max(1) < 1e-6)
            assert frame["source"][donor] != frame["source"][int(name[1:])]
            assert (donor >= low) if arm.of == HIGH else (score[donor] < np.median(score))
    parts = [
        steered(model, one, [Arm(UNSTEERED), *arms], NOTHING, False).assign(
            source=one.source, dataset="d"
        )
        for one in queries
    ]
    rows = pd.concat(parts, ignore_index=True)
    assert (rows["of"] == HIGH).sum() == len(receivers) * 5 * 2, "turns of receivers alone"
    contexts = by_context(rows)
    moved = contexts.groupby("of")["odds"]
    assert moved.count()[HIGH] == len(receivers), "donors of a context are averaged"
    gap = (
        rows.loc[rows["label"] == 0, "plain"].mean() - rows.loc[rows["label"] == 1, "plain"].mean()
    )
    assert moved.mean()[HIGH] > 1.5 * gap > 0 and abs(moved.mean()[LOW]) < 0.1
    found = estimates(rows, [0.4], {}, "genuine")
    beyond = of_arm(found, BEYOND, HIGH).iloc[0]
    values = of_arm(found, ODDS, HIGH)["value"].iloc[0], of_arm(found, ODDS, LOW)["value"].iloc[0]
    assert beyond["value"] == pytest.approx(values[0] - values[1])


def test_random_directions_have_the_covariance_of_the_states():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 5)) * [5, 2, 1, 1, 0.1]
    x -= x.mean(0)
    arms = random_arms(x, Arm(ADDED, 0, planted_vector()), 4000, 0)
    drawn = np.stack([arm.vector.direction.numpy() for arm in arms if arm.vector])
    np.testing.assert_allclose(drawn.var(0), (x**2).sum(0), rtol=0.15)
    assert len({arm.draw for arm in arms}) == 4000


def test_what_is_known_is_taken_out():
    rng = np.random.default_rng(1)
    length = rng.uniform(2, 6, 300)
    x = rng.standard_normal((300, 40))
    x[:, 0] += 8 * (length - length.mean())
    x -= x.mean(0)
    frame = pd.DataFrame({"prompt_tokens": 5, "response_tokens": np.exp(length)})
    frame["source"] = [f"s{i % 30}" for i in range(300)]
    read = Read([], frame, pd.DataFrame(), "genuine", None, [])
    direction = torch.zeros(40)
    direction[0] = direction[20] = 1.0
    arm = without_known(x, read, Arm(ADDED, 0, planted_vector(1.0, direction)))
    assert arm.vector is not None
    own = arm.vector.direction.numpy()
    assert abs(own[0]) < 0.2 and own[20] > 0.5
    assert abs((x @ own) @ (np.log1p(np.exp(length)) - np.log1p(np.exp(length)).mean())) < 1e-2


def test_the_dose_is_chosen_on_its_half_within_the_kl():
    rows = [
        {"of": ADDED, "dose": dose, "half": half, "odds": odds, "kl": kl}
        for half, factor in ((CHOOSING, 1), (REPORTING, -5))
        for dose, odds, kl in ((-0.1, 9, 0), (0.1, 1 * factor, 0.1), (0.2, 3 * factor, 0.4))
    ]
    rows += [{"of": ADDED, "dose": 0.4, "half": CHOOSING, "odds": 8, "kl": 2.0}]
    contexts = pd.DataFrame(rows)
    assert chosen_dose(contexts, 0.5) == 0.2
    assert chosen_dose(contexts, 5.0) == 0.4
    assert chosen_dose(contexts, 0.2) == 0.1
    assert chosen_dose(contexts, 0.01) == 0.1
    assert chosen_dose(contexts.assign(odds=np.nan), 0.5) == 0.2
    below = contexts.assign(dose=-contexts["dose"], odds=-contexts["odds"])
    for most_kl in (0.01, 0.2, 0.5, 5.0):
        assert chosen_dose(below, most_kl, -1) == -chosen_dose(contexts, most_kl)
    assert chosen_dose(contexts, 0.5, -1) == -0.1
    assert chosen_dose(contexts[contexts["dose"] > 0], 0.5, -1) is None


def test_the_verdict_says_yes_of_a_planted_direction_and_no_of_a_random_one():
    noise = torch.randn(21, planted.WIDTH, generator=torch.Generator().manual_seed(3))
    told = []
    for direction in (None, noise[0]):
        arms = [Arm(UNSTEERED)]
        for dose in (0.4, -0.4):
            arms.append(Arm(ADDED, 0, planted_vector(dose, direction)))
            arms += [Arm(RANDOM, n, planted_vector(dose, one)) for n, one in enumerate(noise[1:])]
        found = estimates(scored(arms, 16), [0.4, -0.4], {}, "genuine")
        told.append(verdict(found, 0.4, "genuine"))
        assert len(of_arm(found, ODDS, RANDOM)) == 40
        ranks = of_arm(found, RANK, ADDED).set_index("dose")
        assert (ranks["rows"] == 20).all() and set(ranks.index) == {0.4, -0.4}
        assert (ranks["p_holm"] == ranks["p"]).all(), "20 directions leave nothing to correct"
        drawn = of_arm(found, ODDS, RANDOM)
        for dose, sign in ((0.4, 1), (-0.4, -1)):
            own = of_arm(found, ODDS, ADDED, dose)["value"].iloc[0]
            mine = drawn[drawn["dose"] == dose]["value"]
            reached = (sign * mine >= sign * own).mean()
            assert ranks["value"][dose] == pytest.approx(reached)
            beyond = of_arm(found, BEYOND, ADDED, dose)["value"].iloc[0]
            assert beyond == pytest.approx(own - mine.mean())
    assert told[0].startswith("Steering makes genuine turns likelier than random directions")
    assert told[1].startswith("It isn't shown that steering makes")


def test_rates_by_first_token_are_shrunk_to_the_mean():
    opened = pd.DataFrame({"token": [1, 1, 1, 2], "label": [1.0, 1.0, 0.0, 0.0]})
    found = rates_by_first_token(opened, 4)
    assert found == pytest.approx([0.5, 2.5 / 4, 0.25, 0.5])
    assert rates_by_first_token(opened[:0], 4) is None


@pytest.mark.parametrize(
    ("text", "is_degenerate"),
    [
        ("", True),
        (" ?! ", True),
        ("Why is that?", False),
        ("a b c " * 6, True),
        ("Could you say how the lens turns, and how often it does that?", False),
    ],
)
def test_degenerate_turns(text, is_degenerate):
    assert sampling.degenerate(text) == is_degenerate


def test_distinct_pairs_of_words():
    assert sampling.distinct_pairs(["a b a b", "A b"]) == pytest.approx(2 / 4)
    assert np.isnan(sampling.distinct_pairs(["one", ""]))


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_model_dir, tmp_path_factory):
    """A judged run of two responses to each of six queries, and a probe."""
    place = tmp_path_factory.mktemp("steering")
    file = place / "several.jsonl"
    with file.open("w") as lines:
        for i in range(6):
            row = {"id": f"q{i}", "question": f"What is {i}?"}
            row["responses"] = [f"It is {i}. That is all.", f"Ask me about {i}."]
            lines.write(json.dumps(row) + "\n")
    out = place / "run"
    words = ["--model", tiny_model_dir, "--dataset", str(file), "--out", str(out)]
    assert sample([*words, "--samples", "3", "--temperatures", "1", "--max-new-tokens", "5"]) == 0
    other = next(name for name in NAMES if name != GENUINE)
    run = Run.open(out)
    judged(run, kinds=(GENUINE, other, other))
    frame = run.labels.judgements("planted").astype(object)
    verdicts = frame.where(frame.notna(), None).to_dict("records")
    for row in verdicts:  # two of three turns after every other response
        if row["sample"] == 1 and row["context_id"].endswith("1"):
            row |= {"category": GENUINE, "genuine": True}
    run.labels.write_judgements("planted", verdicts, run.labels.record("judgements", "planted"))
    weights = np.random.default_rng(0).standard_normal(32)
    unit = (weights / np.linalg.norm(weights)).astype(np.float32)
    along = {"logistic": Direction("logistic", unit, 0.0, 1.0, 0.0)}
    card = {"layer": 2, "position": "header_last", "penalty": 1.0}
    model = {"weights_hash": run.model["weights_hash"], "name": "tiny"}
    card["asked"] = {"target": "rate", "runs": [{"model": model}]}
    Probe(along, card).save(place / "probe")
    card["asked"] = {"target": "rate", "runs": [{"model": {"weights_hash": "00", "name": "x"}}]}
    Probe(along, card).save(place / "other-probe")
    return out


def usual(folder, out) -> list[str]:
    probe = str(folder.parent / "probe")
    words = [str(folder), "--probe", probe, "--doses", "-0.4", "0.4", "--controls", "19"]
    return [*words, "--samples", "1", "--out", str(out), "--resamples", "100"]


@pytest.mark.slow
def test_the_command_steers_samples_shows_and_goes_on(folder, capsys):
    out = folder.parent / "steering"
    words = usual(folder, out)
    assert main([*words, "--dry-run"]) == 0
    assert "6, half of them to choose the dose" in capsys.readouterr().out and not out.exists()
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "random directions of the same KL" in shown and "beyond control" in shown
    found = pd.read_parquet(out / "estimates.parquet")
    assert {ADDED, RANDOM, SHUFFLED, PROMPT, UNSTEERED, HIGH, LOW} <= set(found["of"])
    assert set(np.sign(found.loc[found["of"] == RANDOM, "dose"])) == {-1, 1}
    assert {"rate", "degenerate share", "readable bits", "KL at the header"} <= set(
        found["quantity"]
    )
    chosen = SteeringVector.load(out / sampling.FILE)
    assert chosen.dose == 0.4 and chosen.layer == 2
    turns = pd.read_parquet(out / "sampled.parquet")
    plain = turns[turns["of"] == UNSTEERED]
    written = Run.open(folder).generations
    written = written[(written["temperature"] == 1) & (written["sample"] == 0)]
    assert set(plain["text"]) <= set(written["text"]), "the draws are those of the run"
    kept = {file: file.stat().st_mtime_ns for file in (out / "parts").iterdir()}
    runs = {file: file.stat().st_mtime_ns for file in out.glob("sampled/*/run/manifest.json")}
    assert main(words) == 0
    assert {file: file.stat().st_mtime_ns for file in (out / "parts").iterdir()} == kept
    assert {file: file.stat().st_mtime_ns for file in runs} == runs and len(runs) > 5


def test_a_vector_of_a_run_without_verdicts_is_steered_along(folder, tmp_path, capsys):
    """The dose is chosen by its KL, and nothing is said of accepted turns."""
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "judgements")
    weights_hash = Run.open(folder).model["weights_hash"]
    vector = replace(planted_vector(), layer=2, positions=("header_last", TURN))
    vector = replace(vector, weights_hash=weights_hash)
    vector.save(tmp_path / "v.safetensors")
    out = tmp_path / "out"
    words = [str(tmp_path / "run"), "--vector", str(tmp_path / "v.safetensors"), "--out", str(out)]
    words += ["--doses", "0.1", "0.2", "9", "--samples", "0", "--controls", "19", "--queries", "4"]
    assert main([*words, "--most-kl", "0.05"]) == 0
    assert "without verdicts, what that does to the turns isn't told" in capsys.readouterr().out
    found = pd.read_parquet(out / "estimates.parquet")
    kl = found[(found["quantity"] == "KL at the header") & (found["half"] == CHOOSING)]
    kl = kl[kl["of"] == ADDED].set_index("dose")["value"]
    assert (kl > 0.05).any() and (kl <= 0.05).any()
    assert SteeringVector.load(out / sampling.FILE).dose == kl.index[kl <= 0.05].max()
    assert not found["quantity"].str.contains("accepted").any()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layer", "5"], "there is no layer 5 to change; give layers from 0 to 4"),
        (["--positions", "header_9"], "no position header_9 to steer at; use names among"),
        (["--positions", "turn"], "steering the turn's tokens alone leaves the next token"),
        (["--doses", "-1"], "--doses need one above 0, and no infinite one; give some"),
        (["--doses", "nan", "0.5"], "--doses need one above 0, and no infinite one"),
        (["--most-kl", "nan"], "--most-kl nan: no dose has so little"),
        (["--direction", "mean"], "has no direction 'mean'; give --direction logistic"),
        (["--judge", "nobody"], "nobody"),
    ],
)
def test_what_isnt_there_is_one_line(folder, tmp_path, capsys, words, said):
    assert main([*usual(folder, tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and said in error


def test_a_direction_of_another_model_is_one_line(folder, tmp_path, capsys):
    probe = str(folder.parent / "other-probe")
    assert main([str(folder), "--probe", probe, "--out", str(tmp_path / "out")]) == 2
    assert "is of x, the runs are of" in capsys.readouterr().err
    planted_vector().save(tmp_path / "v.safetensors")
    vector = ["--vector", str(tmp_path / "v.safetensors"), "--positions", "header_last"]
    assert main([str(folder), *vector, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "of planted with the weights 0000000000000000, this model has" in error
