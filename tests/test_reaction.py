"""Reaction bits of planted language models, against closed forms and plain enumeration."""

from itertools import combinations, product

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import softmax

from ia_mech.likelihood.reaction import (
    bits_by_token,
    by_query,
    evidence,
    fit_beta,
    identified,
    information,
    reaction_bits,
    readable_bits,
)
from ia_mech.stats import cluster_mean


def entropy(p) -> float:
    p = np.asarray(p, dtype=float)
    return float(-sum(x * np.log2(x) for x in p.ravel() if x > 0))


def log(p) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, dtype=float))


class PlantedModel:
    """A language model over all turns of a few tokens, by ``[K, tokens, words]`` probabilities.

    Tokens are independent given the response, so that every quantity can be summed over all turns.
    """

    def __init__(self, p) -> None:
        self.p = np.asarray(p, dtype=float)
        self.count, self.tokens, self.words = self.p.shape
        self.turns = np.array(list(product(range(self.words), repeat=self.tokens)))
        # [turns, K, tokens]
        self.token_logprobs = log(self.p)[:, np.arange(self.tokens), self.turns].swapaxes(0, 1)
        self.logprobs = self.token_logprobs.sum(2)

    def mean(self, values) -> np.ndarray:
        """Expectation of ``[turns, …]`` over turns after each response equally often."""
        return np.tensordot(np.exp(self.logprobs).mean(1), values, axes=(0, 0))

    def information(self, tokens: int) -> float:
        """I(first tokens; response) = H(mean p) − mean H(p), by enumeration."""
        turns = np.array(list(product(range(self.words), repeat=tokens)))
        joint = self.p[:, np.arange(tokens), turns].prod(2)
        return entropy(joint.mean(0)) - np.mean([entropy(p) for p in joint])

    def sample(self, rng, per_response: int) -> tuple[np.ndarray, np.ndarray]:
        """``[turns, K]`` likelihoods and the response followed; samples share their noise."""
        noise = rng.gumbel(size=(per_response, self.tokens, self.words))
        drawn = (log(self.p)[:, None] + noise).argmax(-1)  # [K, per_response, tokens]
        scores = log(self.p)[:, np.arange(self.tokens), drawn.reshape(-1, self.tokens)].sum(2)
        return scores.T, np.repeat(np.arange(self.count), per_response)


def random_model(seed: int, count: int = 4, tokens: int = 3, words: int = 4, sharp: float = 1.0):
    logits = sharp * np.random.default_rng(seed).normal(size=(count, tokens, words))
    return PlantedModel(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))


def noisy_copy(count: int, error: float) -> np.ndarray:
    """``[K, words = K]`` a turn names the response's index, wrongly with probability error."""
    return np.where(np.eye(count) == 1, 1 - error, error / (count - 1))


# -- closed forms -------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "error"), [(2, 0.25), (4, 0.0), (4, 0.6), (8, 0.25)])
def test_a_noisy_copy_of_the_index_has_the_bits_of_its_channel(count, error):
    """All turns in their exact frequencies: 20 (K − 1) after each response."""
    p, each = noisy_copy(count, error), 20 * (count - 1)
    repeats = np.rint(p * each).astype(int)
    assert (repeats.sum(1) == each).all()
    turns = np.concatenate([np.repeat(np.arange(count), row) for row in repeats])
    followed = np.repeat(np.arange(count), each)
    logprobs = log(p)[:, turns].T
    closed = np.log2(count) - entropy(p[0])
    assert evidence(logprobs, followed).mean() == pytest.approx(closed, abs=1e-12)
    assert identified(logprobs, followed).mean() == pytest.approx(1 - error, abs=1e-12)
    for size in range(2, count + 1):
        # The turn names one of the subset, and then is a channel of its own, or none of it.
        named = np.r_[1 - error, np.full(size - 1, error / (count - 1))]
        closed = named.sum() * (np.log2(size) - entropy(named / named.sum()))
        found = information(logprobs, followed, np.zeros(len(turns)), size=size)
        assert found[0] == pytest.approx(closed, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_expected_bits_equal_the_mutual_information(seed):
    model = random_model(seed)
    assert model.mean(reaction_bits(model.logprobs)) == pytest.approx(
        model.information(model.tokens), abs=1e-12
    )
    by_token = np.stack([bits_by_token(turn) for turn in model.token_logprobs])
    closed = np.diff([model.information(t) if t else 0.0 for t in range(model.tokens + 1)])
    assert model.mean(by_token) == pytest.approx(closed, abs=1e-12)
    assert by_token.sum(1) == pytest.approx(reaction_bits(model.logprobs), abs=1e-12)


# -- who reacts, and who doesn't ----------------------------------------------------------------


def test_who_repeats_the_query_tells_nothing_and_who_repeats_the_response_all():
    """Nor does a model that changes the topic. Of four responses two are alike."""
    query = np.zeros((6, 3, 4))
    query[..., 2] = 1
    topic = np.random.default_rng(1).dirichlet(np.ones(4), size=3)
    for p, bits, right in (
        (query, 0, 1 / 6),
        (np.stack([topic] * 6), 0, 1 / 6),
        (np.eye(4)[[0, 1, 2, 3]][:, None], 2.0, 1),
        (np.eye(4)[[0, 0, 1, 2]][:, None], 1.5, 3 / 4),
    ):
        scores, followed = PlantedModel(p).sample(np.random.default_rng(2), 5)
        found = information(scores, followed, [0] * len(scores))[0]
        assert found == pytest.approx(bits, abs=1e-9)
        assert identified(scores, followed).mean() == pytest.approx(right)
        assert evidence(scores, followed).mean() == pytest.approx(bits, abs=1e-12)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_identical_contexts_give_exactly_nothing_and_chance(count):
    column = np.random.default_rng(0).normal(-60, 20, size=(200, 1))
    followed = np.arange(200) % count
    same = np.repeat(column, count, axis=1)
    assert (reaction_bits(same) == 0).all() and (evidence(same, followed) == 0).all()
    assert (identified(same, followed) == 1 / count).all()
    for size in range(2, count + 1):
        assert information(same, followed, ["q"] * 200, size=size) == {"q": 0.0}
    rounded = same + np.random.default_rng(1).uniform(-3e-4, 3e-4, size=same.shape)
    assert (identified(rounded, followed) == 1 / count).all()
    assert reaction_bits(rounded).max() < 1e-6


def test_sampled_turns_that_share_noise_have_the_right_mean():
    """300 queries of known information, whose turns of one index share their noise."""
    models = [random_model(seed, sharp=seed % 3) for seed in range(300)]
    rng = np.random.default_rng(0)
    drawn = [model.sample(rng, 4) for model in models]
    scores, followed = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    sources = np.repeat(np.arange(300), 16)
    for values in (reaction_bits(scores), evidence(scores, followed)):
        names, each = by_query(values, followed, sources, 4)
        assert names == list(range(300))
        gap = each - [model.information(3) for model in models]
        assert abs(gap.mean()) < 4 * gap.std() / np.sqrt(300)


# -- averages -----------------------------------------------------------------------------------


def test_a_response_and_a_query_weigh_the_same_whatever_their_numbers_of_turns():
    values = [1.0, 1.0, 1.0, 5.0, 0.0, 0.0]
    followed = [0, 0, 0, 1, 0, 1]
    names, means = by_query(values, followed, ["b", "b", "b", "b", "a", "a"], 2)
    assert names == ["a", "b"] and means.tolist() == [0.0, 3.0]


@pytest.mark.parametrize("size", [2, 3])
def test_information_is_the_mean_over_all_sets_of_so_many_responses(size):
    """Each set is a planted model of its own."""
    repeats = np.random.default_rng(0).multinomial(20, np.full(5, 0.2), size=4)
    p = repeats / 20  # all turns are there in their exact frequencies
    turns = np.concatenate([np.repeat(range(5), row) for row in repeats])
    logprobs, followed = log(p)[:, turns].T, np.repeat(range(4), 20)
    found = information(logprobs, followed, ["a"] * 80, size)
    sets = [p[list(some), None] for some in combinations(range(4), size)]
    closed = np.mean([PlantedModel(one).information(1) for one in sets])
    assert found == {"a": pytest.approx(closed, abs=1e-12)}


# -- readable bits ------------------------------------------------------------------------------


def planted_scores(seed: int = 0, queries: int = 60, sharp: float = 1.0):
    rng, models = np.random.default_rng(seed), range(1000 * seed, 1000 * seed + queries)
    drawn = [random_model(number, sharp=sharp).sample(rng, 4) for number in models]
    scores, followed = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    return scores, followed, np.repeat(np.arange(queries), 16)


def test_beta_is_where_the_likelihood_is_largest():
    scores, followed, _ = planted_scores()

    def loss(beta: float) -> float:
        q = softmax(beta * scores, axis=1)
        one_turn_more = np.log(q).mean() / len(scores)
        return -(np.log(q[np.arange(len(q)), followed]).mean() + one_turn_more)

    brute = minimize_scalar(loss, bounds=(0, 5), method="bounded", options={"xatol": 1e-9}).x
    weight = np.ones(len(scores))
    assert fit_beta(scores, followed, weight) == pytest.approx(brute, abs=1e-5)
    assert fit_beta(100 * scores, followed, weight) == pytest.approx(brute / 100, rel=1e-5)
    assert brute == pytest.approx(1, abs=0.15)  # these are the likelihoods of the turns


def test_beta_is_0_where_scores_tell_nothing_and_finite_where_they_tell_all():
    scores, followed, sources = planted_scores()
    assert fit_beta(-scores, followed, np.ones(len(scores))) == 0
    assert fit_beta(np.full_like(scores, 3.0), followed, np.ones(len(scores))) == 0
    by_rounding = np.where(scores > np.median(scores), -31.7, np.nextafter(-31.7, 0))
    for turns in range(3, 30):
        assert np.isfinite(fit_beta(by_rounding[:turns], followed[:turns], np.ones(turns)))
    perfect = 50.0 * np.eye(4)[followed]
    beta = fit_beta(perfect, followed, np.ones(len(perfect)))
    assert 0 < beta < 1
    found = readable_bits(perfect, followed, sources)
    assert found.bits == pytest.approx(2, abs=0.01)
    against = readable_bits(-scores, followed, sources)
    assert (against.fitted == 0).all() and (against.bits == 0).all()


def test_readable_bits_are_held_out_by_query():
    scores, followed, sources = planted_scores()
    found = readable_bits(scores, followed, sources, seed=3)
    for fold in range(5):
        out = found.fold == fold
        assert set(sources[out]).isdisjoint(sources[~out]) and len(set(sources[out])) == 12
        beta = fit_beta(scores[~out], followed[~out], np.ones((~out).sum()))
        assert found.fitted[fold] == pytest.approx(beta, rel=1e-8)
        expected = evidence(beta * scores[out], followed[out])
        assert found.bits[out] == pytest.approx(expected, abs=1e-7)
    rows = np.random.default_rng(0).permutation(len(scores))
    moved = readable_bits(scores[rows], followed[rows], sources[rows], seed=3)
    assert moved.bits == pytest.approx(found.bits[rows], abs=1e-7)


def test_readable_bits_lie_below_the_information():
    """One reader has noise, another reads the turns at another temperature."""
    scores, followed, sources = planted_scores(seed=1, queries=200)
    whole = np.mean([*information(scores, followed, sources).values()])
    bits = readable_bits(scores, followed, sources).bits
    same = cluster_mean(by_query(bits, followed, sources, 4)[1], range(200))
    assert same.low < whole < same.high
    hot = readable_bits(scores / 3, followed, sources)
    assert hot.fitted == pytest.approx(3, abs=0.4)  # undone by β
    noise = np.random.default_rng(0).normal(size=scores.shape)
    noisy = readable_bits(scores + 2 * noise, followed, sources).bits
    assert 0.02 < noisy.mean() < same.value - 0.1
    assert abs(readable_bits(noise, followed, sources).bits.mean()) < 0.01


# -- the conditional logit ----------------------------------------------------------------------


# -- input that can't be used -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reaction_bits([[0.0, np.nan]]), "NaN"),
        (lambda: reaction_bits([[0.0, -1.0], [-np.inf, -np.inf]]), "turn 1 is impossible"),
        (
            lambda: information(np.zeros((3, 2)), [0, 1, 0], "aab"),
            "'b' has no turn after response 1",
        ),
        (lambda: readable_bits([[0.0, -np.inf], [0.0, 1.0]], [0, 1], "aa"), "finite"),
        (lambda: readable_bits(np.zeros((2, 2)), [0, 1], "aa"), "two"),
    ],
)
def test_what_has_no_posterior_or_no_other_queries_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_impossible_turns_are_allowed_under_some_responses():
    scores = np.array([[-np.inf, -3.0, -3.0], [-1.0, -np.inf, -np.inf]])
    assert reaction_bits(scores) == pytest.approx([np.log2(3) - 1, np.log2(3)])
    assert evidence(scores, [0, 0]) == pytest.approx([-np.inf, np.log2(3)])
