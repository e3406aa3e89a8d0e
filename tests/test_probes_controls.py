"""Baselines for probes: shapes, exactness against slow references, and what they must not see."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import log_softmax, logsumexp, softmax
from scipy.stats import entropy
from sklearn.feature_extraction.text import TfidfVectorizer

from ia_mech.lens import Lens
from probes import controls as baselines

TEXTS = [
    "the cat sat on the mat",
    "the cat sat on 3 dogs",
    "the dogs were 3 and the cat 1",
    "what is 1 and 3",
    "",
    "the cat sat on the mat",
]
FIRST, SECOND = 2, 5  # turn-end tokens


def small_lens(vocab=37, width=8, dtype=torch.float32, softcap=None) -> Lens:
    torch.manual_seed(0)
    weight, bias = torch.rand(width) + 0.5, torch.zeros(width)
    return Lens(weight, bias, torch.randn(vocab, width).to(dtype), 1e-6, False, 1.0, softcap)


def residuals(contexts=23, width=8) -> torch.Tensor:
    return torch.randn(contexts, width, generator=torch.Generator().manual_seed(1)) * 3


def standardised(columns):
    return (columns - columns.mean(axis=0)) / columns.std(axis=0)


# -- text -------------------------------------------------------------------------------------


def gram_of_terms(texts, min_df):
    vectorizer = TfidfVectorizer(
        token_pattern=r"\b\w+\b", ngram_range=(1, 2), sublinear_tf=True, min_df=min_df
    )
    terms = vectorizer.fit_transform(texts).toarray()
    return terms @ terms.T


def test_text_features_have_the_gram_matrix_of_the_terms():
    features = baselines.tfidf(TEXTS).features
    np.testing.assert_allclose(features @ features.T, gram_of_terms(TEXTS, 2), atol=1e-9)
    assert features.shape == (6, 4)  # one text is empty and one is there twice
    assert features.dtype == np.float64


def test_many_texts_have_that_gram_matrix_too():
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in rng.zipf(1.4, 40) % 500) for _ in range(200)]
    features = baselines.tfidf(texts).features
    np.testing.assert_allclose(features @ features.T, gram_of_terms(texts, 2), atol=1e-9)
    assert (np.diff((features**2).sum(axis=0)) <= 1e-9).all()  # the largest first


def test_terms_of_single_texts_count_where_there_are_no_others():
    texts = ["alpha beta", "gamma", "delta"]
    features = baselines.tfidf(texts).features
    np.testing.assert_allclose(features @ features.T, gram_of_terms(texts, 1), atol=1e-9)


def test_texts_without_words_give_a_constant():
    assert not baselines.tfidf(["", "…", "?!"]).features.any()
    assert baselines.tfidf(["", "…", "?!"]).features.shape == (3, 1)


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


def test_constant_lengths_are_dropped():
    prompt, response = np.full(6, 12), [1, 2, 3, 4, 5, 600]
    features = baselines.lengths(prompt, response, prompt, np.zeros(6, bool)).features
    assert features.shape == (6, 2)  # log and square of the one that varies
    nothing = baselines.lengths(prompt, prompt, prompt, np.ones(6, bool)).features
    assert nothing.shape == (6, 1) and not nothing.any()


def test_lengths_refuse_what_is_no_length():
    with pytest.raises(ValueError, match="0 or more"):
        baselines.lengths([1, 2], [3, -1], [4, 4], [False, False])
    with pytest.raises(ValueError, match="0 or more"):
        baselines.lengths([1, 2], [3, np.nan], [4, 4], [False, False])
    with pytest.raises(ValueError, match="one entry per context"):
        baselines.lengths([1, 2], [3, 1], [4, 4], [False])


def test_the_same_dataset_in_two_runs_is_two():
    features = baselines.dataset_id(["a", "b", "a", "a"], [0, 0, 1, 0]).features
    np.testing.assert_array_equal(features, [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]])


def test_one_dataset_tells_nothing():
    features = baselines.dataset_id(["a", "a"], ["r", "r"]).features
    assert features.shape == (2, 1) and not features.any()


# -- untrained encoder ------------------------------------------------------------------------


def test_random_vectors_depend_on_seed_and_token_only(monkeypatch):
    contexts = [np.array([5, 9, 9]), np.array([9]), np.array([700, 5])]
    features = baselines.random_projection(contexts, 16, seed=3).features
    assert features.shape == (3, 16)
    alone = baselines.random_projection([[5], [9], [700]], 16, seed=3).features
    np.testing.assert_allclose(features[0], (alone[0] + 2 * alone[1]) / 3)
    np.testing.assert_allclose(features[1], alone[1])
    np.testing.assert_allclose(features[2], (alone[0] + alone[2]) / 2)
    other = baselines.random_projection(contexts, 16, seed=4).features
    assert np.abs(features - other).max() > 0.1
    monkeypatch.setattr(baselines, "_VALUES", 16)  # one token at a time
    again = baselines.random_projection(contexts, 16, seed=3).features
    np.testing.assert_allclose(again, features)


def test_random_vectors_have_unit_size_and_are_nearly_orthogonal():
    vectors = baselines.random_projection([[i] for i in range(20)], 4096, seed=0).features
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(20), atol=0.1)


def test_a_context_without_tokens_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        baselines.random_projection([[1], []], 4, seed=0)


# -- the model's own output -------------------------------------------------------------------


def test_every_logit_is_linear_in_the_output_state():
    lens, residual = small_lens(), residuals()
    state = baselines.output_state(lens, residual).features
    assert state.shape == (23, 8) and state.dtype == np.float64
    logits = state @ lens.unembedding.double().numpy().T
    np.testing.assert_allclose(logits, lens.logits(residual), atol=1e-4)
    from_array = baselines.output_state(lens, residual.numpy()).features
    np.testing.assert_array_equal(from_array, state)


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


def test_summaries_without_turn_end_tokens_leave_that_column_out():
    lens = small_lens()
    summaries = baselines.output_summaries(lens, residuals(), [], [1.0]).features
    assert summaries.shape == (23, 3)
    few = baselines.output_summaries(small_lens(vocab=6), residuals(), [], [1.0]).features
    assert few.shape == (23, 2)  # ten of six tokens have all the probability: a constant
    same = baselines.output_summaries(lens, residuals()[:1].expand(5, -1), [FIRST], [0.5]).features
    assert same.shape == (5, 1) and not same.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_summaries_do_not_depend_on_the_chunks(monkeypatch, dtype):
    lens, residual = small_lens(dtype=dtype), residuals()
    whole = baselines.output_summaries(lens, residual, [FIRST], [0.5]).features
    monkeypatch.setattr(baselines, "_VALUES", 80)  # 2 contexts of 37 tokens; 10 tokens 8 wide
    chunked = baselines.output_summaries(lens, residual, [FIRST], [0.5]).features
    np.testing.assert_allclose(chunked, whole, atol=1e-4)


def test_a_large_vocabulary_never_lies_in_memory_for_all_contexts(monkeypatch):
    lens, residual, shapes = small_lens(vocab=150_000, width=2), residuals(100, 2), []
    summaries = baselines._summaries

    def seen(logits, *rest):
        shapes.append(tuple(logits.shape))
        return summaries(logits[:1], *rest).expand(len(logits), -1)

    monkeypatch.setattr(baselines, "_summaries", seen)
    baselines.output_summaries(lens, residual, [FIRST], [])
    assert shapes == [(55, 150_000), (45, 150_000)]  # 33 MB


def test_output_baselines_refuse_what_has_no_distribution():
    broken = residuals()
    broken[3, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        baselines.output_state(small_lens(), broken)
    with pytest.raises(ValueError, match="NaN"):
        baselines.output_summaries(small_lens(), broken, [], [])
    with pytest.raises(ValueError, match="above 0"):
        baselines.output_summaries(small_lens(), residuals(), [], [0.0])


def test_columns_of_a_data_frame_will_do_whatever_its_index():
    frame = pd.DataFrame({"text": TEXTS[:4], "n": [1, 2, 3, 4], "cut": [True, False, False, True]})
    frame["ids"] = [np.array([1, 2]), np.array([3]), np.array([1]), np.array([4])]
    frame.index = [7, 5, 3, 1]
    for made, plain in (
        (baselines.tfidf(frame["text"]), baselines.tfidf(TEXTS[:4])),
        (
            baselines.lengths(frame["n"], frame["n"], frame["n"], frame["cut"]),
            baselines.lengths([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 0, 0, 1]),
        ),
        (
            baselines.dataset_id(frame["text"], frame["cut"]),
            baselines.dataset_id(TEXTS[:4], [True, False, False, True]),
        ),
        (
            baselines.random_projection(frame["ids"], 4, seed=0),
            baselines.random_projection([[1, 2], [3], [1], [4]], 4, seed=0),
        ),
    ):
        np.testing.assert_array_equal(made.features, plain.features)


def test_every_baseline_says_in_one_line_what_it_is():
    made = [
        baselines.tfidf(TEXTS),
        baselines.lengths([1, 2], [3, 4], [5, 6], [0, 1]),
        baselines.dataset_id(["a"], ["r"]),
        baselines.random_projection([[1]], 4, seed=0),
        baselines.output_state(small_lens(), residuals()),
        baselines.output_summaries(small_lens(), residuals(), [FIRST], [0.7]),
    ]
    assert len({baseline.name for baseline in made}) == 6
    assert all(baseline.what and "\n" not in baseline.what for baseline in made)
