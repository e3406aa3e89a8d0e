"""Randomness and the sampling rule, through the engine, against exact probabilities."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chi2_contingency
from transformers import LlamaConfig

from ia_mech.engine.decode import Row, decode
from ia_mech.engine.installed import install
from ia_mech.engine.sampling import (
    draw,
    gumbel,
    largest,
    log_sum_exp,
    philox,
    ranks,
    stream_key,
    uniforms,
)
from ia_mech.engine.state import Prefix, prefill

VOCAB = 8
DRAWS = 20_000
TEMPERATURES = (0.6, 1.0, 1.7)


class Planted(torch.nn.Module):
    """A model whose next-token logits are a table over the last token; nothing else matters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.table = torch.randn(VOCAB, VOCAB, generator=generator)
        self.config = LlamaConfig(num_hidden_layers=1, vocab_size=VOCAB)
        self.device = torch.device("cpu")
        self.blocks = torch.nn.ModuleList([torch.nn.Identity()])
        install(self)

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=True):
        self.blocks[0](self.table[input_ids])
        return type("Output", (), {"logits": self.table[input_ids]})

    def probabilities(self, last: int, temperature: float) -> np.ndarray:
        return (self.table[last].double() / temperature).softmax(-1).numpy()


@pytest.fixture(scope="module")
def sampled_tokens() -> dict[float, np.ndarray]:
    """``[DRAWS, 2]`` tokens per temperature: two steps, all temperatures in one batch."""
    model = Planted()
    rows = [
        Row(0, t, stream_key(11, f"source-{i // 4}", i % 4))
        for i in range(DRAWS)
        for t in TEMPERATURES
    ]
    decoded = decode(model, [prefill(model, [Prefix([3])])], rows, [], 2)
    tokens = np.array([row.token_ids for row in decoded]).reshape(DRAWS, len(TEMPERATURES), 2)
    return {t: tokens[:, i] for i, t in enumerate(TEMPERATURES)}


def chi_square_p(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    assert expected.min() > 5
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_pairs_of_tokens_follow_the_tempered_distributions(sampled_tokens, temperature):
    model = Planted()
    first = model.probabilities(3, temperature)
    joint = np.stack([first[a] * model.probabilities(a, temperature) for a in range(VOCAB)])
    pairs = sampled_tokens[temperature]
    counts = np.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2)
    likely = joint.ravel() * DRAWS > 5  # the rest is pooled, as the test requires
    pooled = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(joint.ravel()[likely], joint.ravel()[~likely].sum())
    kept = expected * DRAWS > 5
    assert kept.sum() > 30
    assert chi_square_p(pooled[kept], expected[kept] / expected[kept].sum()) > 1e-3


@pytest.mark.parametrize("wrong", [0.95, 1.05])
def test_a_slightly_wrong_temperature_fails_the_same_test(sampled_tokens, wrong):
    counts = np.bincount(sampled_tokens[1.0][:, 0], minlength=VOCAB)
    assert chi_square_p(counts, Planted().probabilities(3, wrong)) < 1e-3


def test_rows_are_independent_across_samples_and_sources(sampled_tokens):
    samples = sampled_tokens[1.0][:, 0].reshape(-1, 4)  # [source, sample]

    def p_value(a, b) -> float:
        table = np.zeros((VOCAB, VOCAB))
        np.add.at(table, (a, b), 1)
        kept = table[table.sum(1) > 50][:, table.sum(0) > 50]
        return chi2_contingency(kept).pvalue

    assert p_value(samples[:, 0], samples[:, 1]) > 1e-3  # samples of a source
    assert p_value(samples[:-1, 0], samples[1:, 0]) > 1e-3  # neighbouring sources
    # That a row's second draw ignores its first, given the token, is what the joint test shows.


def test_noise_of_different_steps_is_uncorrelated():
    keys = torch.tensor([stream_key(0, "a", i) for i in range(10)])
    steps = [uniforms(keys, step, 4096).flatten().numpy() for step in range(3)]
    correlations = np.corrcoef(steps)[np.triu_indices(3, 1)]
    assert np.abs(correlations).max() < 4 / np.sqrt(40_960)


@pytest.mark.parametrize("pair", [(0.6, 1.0), (1.0, 1.7)])
def test_temperatures_are_coupled_as_gumbel_noise_couples_them(sampled_tokens, pair):
    """With shared Gumbel noise two distributions p and q agree with probability
    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    p, q = (Planted().probabilities(3, t) for t in pair)
    ratio = np.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
    expected = float((1 / ratio.sum(1)).sum())
    equal = float((sampled_tokens[pair[0]][:, 0] == sampled_tokens[pair[1]][:, 0]).mean())
    independent = float((p * q).sum())
    assert abs(equal - expected) < 4 * np.sqrt(expected * (1 - expected) / DRAWS)
    assert equal > independent + 0.3


def test_greedy_rows_take_the_first_largest_logit():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    sampled_tokens = draw(
        logits, torch.zeros(1), gumbel(torch.tensor([[1, 2]]), 0, 4), torch.zeros(1).long()
    )
    assert sampled_tokens.token.item() == 1
    assert sampled_tokens.margin.item() == 0
    assert sampled_tokens.rank.item() == 1
    assert sampled_tokens.logprob_tempered.isnan().all()
    assert sampled_tokens.logprob.item() == pytest.approx(float(logits.log_softmax(-1)[0, 1]))


@pytest.mark.parametrize("vocab", [64, 6401])
def test_the_largest_is_the_first_of_equal_ones_wherever_it_is(vocab):
    scores = torch.zeros(5, vocab)
    scores[1, vocab - 1] = scores[1, 63] = 2.0
    scores[2, 17] = scores[2, 5] = 2.0
    scores[3] = -torch.inf
    scores[4] = torch.arange(vocab)
    best, token = largest(scores)
    assert token[:, 0].tolist() == [0, 63, 5, 0, vocab - 1]
    assert torch.equal(best, scores.gather(-1, token))


@pytest.mark.parametrize("spread", [1e-3, 50.0])
@pytest.mark.parametrize("temperature", [1e-3, 0.7, 1e3])
def test_log_sums_of_exponentials_keep_their_bound(spread, temperature):
    """(ln(vocab) + 4) * 2**-23 nats, as the docstring derives it, for logits that are given."""
    vocab = 50_257
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1)) * spread
    logits[0, 100:] = -torch.inf  # as of a padded vocabulary
    below = logits - logits.amax(-1, keepdim=True)
    each = torch.full((6, 1), temperature)
    for t in (temperature, each):
        ours = log_sum_exp(below, t, out=torch.empty_like(below))
        divisor = t.double() if t is each else t  # each as float32 holds it
        exact = (below.double() / divisor).logsumexp(-1, keepdim=True)
        assert (ours.double() - exact).abs().max() < (np.log(vocab) + 4) * 2**-23


def test_ranks_count_the_larger_ones():
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.0, -torch.inf]]).repeat(5, 1)
    chosen = logits.gather(-1, torch.arange(5)[:, None])
    assert ranks(logits, chosen, out=torch.empty_like(logits)).tolist() == [1, 4, 1, 3, 5]


def test_noise_depends_on_key_and_step_alone():
    """The same numbers alone, in a batch, and for a smaller vocabulary."""
    keys = torch.tensor([stream_key(3, s, i) for s in ("a", "b") for i in range(3)])
    together = gumbel(keys, 5, 1001)
    for index in range(len(keys)):
        assert torch.equal(gumbel(keys[index : index + 1], 5, 1001)[0], together[index])
    assert torch.equal(gumbel(keys, 5, 500), together[:, :500])
    assert not torch.equal(gumbel(keys, 6, 1001), together)
    assert len({tuple(row.tolist()) for row in together}) == len(keys)
    parts = product(range(5), ("a", "b", "1", "11"), range(20))
    assert len({stream_key(*part) for part in parts}) == 5 * 4 * 20


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    words = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(word) for word in words) == expected


def test_uniforms_are_uniform_and_gumbel_noise_is_gumbel():
    keys = torch.tensor([stream_key(0, "u", i) for i in range(20)])
    flat = uniforms(keys, 0, 10_000).flatten()
    assert flat.min() > 0 and flat.max() < 1
    counts = torch.histc(flat, 50, 0, 1).numpy()
    assert chi_square_p(counts, np.full(50, 1 / 50)) > 1e-3
    noise = gumbel(keys, 0, 10_000).double().flatten()
    assert torch.isfinite(noise).all()
    se = noise.std() / len(noise) ** 0.5
    assert abs(noise.mean() - 0.5772156649) < 4 * se
    assert abs(noise.var() - torch.pi**2 / 6) < 0.03
