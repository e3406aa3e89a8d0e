"""Controls: baselines against slow references, and what a probe set gets."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, logsumexp, softmax
from scipy.stats import entropy
from sklearn.feature_extraction.text import TfidfVectorizer

from benchmarks.probe_validation.planted import Plan, plant, write
from ia_mech.lens import Lens
from probes import controls as baselines
from probes.analysis import AnalysisSettings, fold_scores
from probes.controls import controls_of
from probes.dataset import read
from probes.fit.folds import make_folds
from probes.fit.nested_cv import Design, cross_validate

TEXTS = [
    "the cat sat on the mat",
    "the cat sat on 3 dogs",
    "the dogs were 3 and the cat 1",
    "what is 1 and 3",
    "",
    "the cat sat on the mat",
]
FIRST, SECOND = 2, 5  # turn-end tokens


def small_lens(vocab=37, width=8, softcap=None) -> Lens:
    torch.manual_seed(0)
    weight, bias = torch.rand(width) + 0.5, torch.zeros(width)
    return Lens(weight, bias, torch.randn(vocab, width), 1e-6, False, 1.0, softcap)


def residuals(contexts=23, width=8) -> torch.Tensor:
    return torch.randn(contexts, width, generator=torch.Generator().manual_seed(1)) * 3


def standardised(columns):
    return (columns - columns.mean(axis=0)) / columns.std(axis=0)


# -- text -------------------------------------------------------------------------------------


def terms_of(texts, min_df):
    vectorizer = TfidfVectorizer(
        token_pattern=r"\b\w+\b", ngram_range=(1, 2), sublinear_tf=True, min_df=min_df
    )
    return vectorizer.fit_transform(texts).toarray()


def test_text_features_are_a_truncated_svd_of_the_terms_at_length_one(monkeypatch):
    rng = np.random.default_rng(0)
    many = [" ".join(f"w{i}" for i in rng.zipf(1.4, 40) % 200) for _ in range(60)]
    alone = ["alpha beta", "gamma", "delta"]  # terms of single texts count if there are no others
    for texts, min_df, topics in ((TEXTS, 2, 2), (many, 2, 20), (alone, 1, 100)):
        monkeypatch.setattr(baselines, "_TOPICS", topics)
        features = baselines.lsa(texts).features
        left, sizes, _ = np.linalg.svd(terms_of(texts, min_df), full_matrices=False)
        kept = (sizes > 1e-6)[:topics]
        expected = (left * sizes)[:, :topics][:, kept]
        expected = expected / np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1e-9)
        np.testing.assert_allclose(features @ features.T, expected @ expected.T, atol=1e-6)
    assert not baselines.lsa(TEXTS).features[[not text for text in TEXTS]].any()


# -- lengths and datasets ---------------------------------------------------------------------


def test_lengths_are_standardised_logs_with_squares():
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, 300, 40) for _ in range(3)]
    cut = rng.random(40) < 0.3
    features = baselines.lengths(*columns, cut).features
    assert features.shape == (40, 7)
    np.testing.assert_allclose(features.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(features.std(axis=0), 1)
    logs = standardised(np.log1p(np.stack(columns, axis=1)))
    np.testing.assert_allclose(features[:, :3], logs)
    np.testing.assert_allclose(features[:, 3:6], standardised(logs**2))
    assert abs(np.corrcoef(features[:, 6], cut)[0, 1]) == pytest.approx(1)


def test_the_same_dataset_in_two_runs_is_two():
    features = baselines.dataset_id(["a", "b", "a", "a"], [0, 0, 1, 0]).features
    np.testing.assert_array_equal(features, [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]])
    features = baselines.dataset_id(["a", "a"], ["r", "r"]).features
    assert features.shape == (2, 1) and not features.any()


# -- the model's own output -------------------------------------------------------------------


def test_every_logit_is_linear_in_the_output_state():
    lens, residual = small_lens(), residuals()
    state = baselines.output_state(lens, residual).features
    assert state.shape == (23, 8) and state.dtype == np.float64
    logits = state @ lens.unembedding.double().numpy().T
    np.testing.assert_allclose(logits, lens.logits(residual), atol=1e-4)


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_summaries_equal_those_of_scipy(softcap):
    lens, residual = small_lens(softcap=softcap), residuals()
    features = baselines.output_summaries(lens, residual, [FIRST, SECOND], [0.3, 1.0, 0.7])
    logits = lens.logits(residual).double().numpy()
    log_prob = log_softmax(logits, axis=-1)
    expected = [
        entropy(softmax(logits, axis=-1), axis=-1),
        log_prob.max(-1),
        np.sort(np.exp(log_prob))[:, -10:].sum(-1),
        logsumexp(log_prob[:, [FIRST, SECOND]], axis=-1),
        entropy(softmax(logits / 0.3, axis=-1), axis=-1),
        entropy(softmax(logits / 0.7, axis=-1), axis=-1),
    ]
    expected = standardised(np.stack(expected, axis=-1))
    np.testing.assert_allclose(features.features, expected, atol=1e-4)


# -- the controls of a probe set -------------------------------------------------------------------

PLAN = Plan(
    "output-common",
    contexts=120,
    layers=2,
    informative_layer=2,
    d_model=16,
    positions=("header_last",),
    oracle_auroc=0.85,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gather")


@pytest.fixture(scope="module")
def pair(folder):
    """Two planted runs of one model; its lens is in a cache."""
    made = {"a": plant(PLAN), "b": plant(replace(PLAN, draw=1))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IA_MECH_CACHE", str(folder / "cache"))
        for planted in made.values():
            planted.lens.save(planted.weights_hash)
    return {name: write(planted, folder / name).path for name, planted in made.items()}


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    monkeypatch.setenv("IA_MECH_CACHE", str(folder / "cache"))


def test_the_output_is_read_and_keeps_the_order_of_the_contexts(pair):
    both, alone = read([pair["a"], pair["b"]]), [read([pair[name]]) for name in "ab"]
    states, summaries = (one.features for one in controls_of(both).output)
    expected = np.concatenate([controls_of(data).output[0].features for data in alone])
    np.testing.assert_allclose(states, expected, atol=1e-6)
    assert states.shape == (240, PLAN.d_model)
    outcome = both.outcome
    design = Design.from_outcome(outcome, make_folds(outcome))
    for features, least in ((states, 0.68), (summaries, 0.6)):
        scores = cross_validate(features, design).scores
        assert (
            fold_scores(outcome, design.folds, AnalysisSettings(resamples=9)).auroc(scores).value
            > least
        )


# -- what is left out -----------------------------------------------------------------------------


def test_without_a_lens_or_the_header_there_is_no_output_control(pair, monkeypatch, tmp_path):
    data = read([pair["a"], pair["b"]])
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path))
    found = controls_of(data)
    assert found.output == [] and len(found.text) == 3
    assert any("no output control" in note and "no lens for" in note for note in found.missing)


def test_turns_that_go_on_from_given_words_have_no_output_control_at_the_header(pair):
    data = read([pair["a"]])
    data.runs[0].settings["opening"] = "Wait,"
    found = controls_of(data)
    assert found.output == []
    assert "header_last doesn't predict turns that go on from words (a)" in found.missing[0]
