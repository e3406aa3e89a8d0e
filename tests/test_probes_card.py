"""A probe to keep: what its directions mean, and that it comes back from disk as it was."""

import json
from hashlib import sha256

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from ia_mech.errors import UserError
from ia_mech.run.integrity import write_json
from probes.card import DIRECTIONS, Probe, directions
from probes.targets import Outcome

WIDTH = 24
EACH = pytest.mark.parametrize("name", DIRECTIONS)


def contexts(runs=1, sign=1.0):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, WIDTH)) * np.linspace(1, 4, WIDTH) + 3
    n = rng.integers(1, 9, 200)
    run = np.arange(200) % runs
    k = rng.binomial(n, expit(sign * features[:, 0] - sign * 3 - 1 + run))
    return features, Outcome.from_counts(k, n, np.arange(200) // 2, run)


@pytest.fixture(scope="module")
def fitted():
    features, outcome = contexts()
    return features, outcome, Probe(directions(features, outcome, 0.1), {"layer": 17})


# -- directions -----------------------------------------------------------------------------------


def reference(columns, k, n, penalty):
    """scikit-learn's log-odds: each context once as positive and once as negative."""
    rows, label = np.tile(columns, (2, 1)), np.repeat([1, 0], len(k))
    weight = np.concatenate([k, n - k]) / n.mean()
    found = LogisticRegression(C=1 / penalty, tol=1e-10, solver="newton-cholesky")
    return found.fit(rows[weight > 0], label[weight > 0], weight[weight > 0])


@EACH
def test_a_direction_says_what_a_logistic_regression_says(fitted, name):
    """A regression on the states, or on their projections on the difference of the means."""
    features, outcome, probe = fitted
    k, n = outcome.positives, outcome.trials
    columns, penalty = features - features.mean(0), 0.1
    columns /= np.sqrt((columns**2).sum(1).mean())
    along = probe.directions[name]
    if name == "mass-mean":
        apart = np.average(features, axis=0, weights=k) - np.average(
            features, axis=0, weights=n - k
        )
        np.testing.assert_allclose(along.weights, apart / np.linalg.norm(apart), atol=1e-6)
        columns, penalty = (columns @ apart)[:, None], 1e-3
        columns /= columns.std()
    expected = reference(columns, k, n, penalty).decision_function(columns)
    assert along.weights.dtype == np.float32
    assert np.linalg.norm(along.weights) == pytest.approx(1, abs=1e-6)
    assert along.slope > 0
    states = torch.tensor(features)
    log_odds = along.slope * probe.score(states, name) + along.base_log_odds
    np.testing.assert_allclose(log_odds, expected, atol=1e-3)
    np.testing.assert_allclose(probe.probability(states, name), expit(expected), atol=1e-3)


@EACH
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_larger_means_more_follow_ups(name, sign):
    features, outcome = contexts(3, sign)
    probe = Probe(directions(features, outcome, 0.1), {})
    scores = probe.score(torch.tensor(features), name)
    assert np.corrcoef(scores, outcome.rate)[0, 1] > 0.2
    assert sign * probe.directions[name].weights[0] > 0


# -- scores ---------------------------------------------------------------------------------------


@EACH
def test_residuals_of_any_shape_and_type_score_alike(fitted, name):
    features, _, probe = fitted
    along = probe.directions[name]
    expected = torch.tensor(features @ along.weights - along.threshold, dtype=torch.float32)
    given = torch.tensor(features).reshape(2, 10, 10, WIDTH)
    scores = probe.score(given, name)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected.reshape(2, 10, 10), rtol=0, atol=1e-4)
    log_odds = along.slope * scores + along.base_log_odds
    torch.testing.assert_close(probe.probability(given, name), log_odds.sigmoid())
    half = given.to(torch.bfloat16)
    torch.testing.assert_close(
        probe.score(half, name), probe.score(half.float(), name), rtol=0, atol=0
    )


def test_what_a_probe_cannot_score_is_refused(fitted):
    features, _, probe = fitted
    with pytest.raises(UserError, match="'up'; choose from logistic, mass-mean"):
        probe.score(torch.tensor(features), "up")
    with pytest.raises(ValueError, match=rf"width {WIDTH}.*{WIDTH - 1}"):
        probe.score(torch.tensor(features[:, :-1]))


# -- on disk --------------------------------------------------------------------------------------


@pytest.fixture
def saved(fitted, tmp_path):
    folder = tmp_path / "new" / "probe"
    fitted[2].save(folder)
    return folder


@pytest.mark.parametrize("file", ["", "probe.safetensors", "card.json"])
def test_a_probe_comes_back_as_it_was(fitted, saved, file):
    features, _, probe = fitted
    loaded = Probe.load(saved / file)
    assert list(loaded.directions) == list(probe.directions)
    for name, along in probe.directions.items():
        other = loaded.directions[name]
        np.testing.assert_array_equal(other.weights, along.weights)
        assert other.weights.dtype == np.float32
        for number in ("threshold", "slope", "base_log_odds"):
            assert getattr(other, number) == getattr(along, number)
        states = torch.tensor(features)
        assert torch.equal(loaded.score(states, name), probe.score(states, name))
    assert loaded.card["layer"] == 17


def test_a_stop_between_the_two_files_is_noticed(fitted, saved, monkeypatch):
    features, outcome, _ = fitted
    other = Probe(directions(features, outcome, 10.0), {"layer": 3})

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("probes.card.write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        other.save(saved)
    with pytest.raises(UserError, match="or of another card"):
        Probe.load(saved)


def test_what_is_no_probe_is_refused(saved, tmp_path):
    (saved / "card.json").unlink()
    for path in (saved, tmp_path / "nothing"):
        with pytest.raises(UserError, match="is not a probe"):
            Probe.load(path)


def no_card(card, weights):
    card.clear()


def without_a_number(card, weights):
    del card["directions"]["mass-mean"]["threshold"]


def without_weights(card, weights):
    tensors = load_file(weights)
    del tensors["weights_mass-mean"]
    save_file(tensors, weights)
    card["weights"]["sha256"] = sha256(weights.read_bytes()).hexdigest()


def flipped_bit(card, weights):
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (no_card, "damaged"),
        (without_a_number, "damaged"),
        (without_weights, "weights_mass-mean"),
        (flipped_bit, "damaged"),
    ],
)
def test_a_probe_that_is_not_whole_is_refused(saved, change, words):
    card = json.loads((saved / "card.json").read_text())
    change(card, saved / "probe.safetensors")
    write_json(saved / "card.json", card)
    with pytest.raises(UserError, match=words):
        Probe.load(saved)
