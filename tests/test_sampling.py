"""Randomness and the sampling rule, through the engine, against exact probabilities."""

from itertools import product

import numpy as np
import pytest
import torch
import two_level
from scipy.stats import chi2, chi2_contingency
from transformers import LlamaConfig

from ia_mech.engine.decode import Row, decode
from ia_mech.engine.installed import install
from ia_mech.engine.sampling import (
    Draw,
    draw_tokens,
    gumbel,
    log_sum_exp,
    philox,
    stream_key,
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

    def get_decoder(self) -> torch.nn.Module:
        return self

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.blocks[0]

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


@pytest.mark.parametrize("vocab", [40, 150, 256])
@pytest.mark.parametrize("draws", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_tokens_of_several_blocks_follow_the_softmax(vocab, draws):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 1.5
    logits[vocab // 4 : vocab // 2] = -torch.inf  # all of a block, if there are four
    counts = np.zeros(vocab)
    for keys in torch.arange(draws).split(50_000):
        drawn = draw_tokens(
            logits.expand(len(keys), -1).contiguous(),
            torch.full((len(keys),), 0.8),
            torch.stack([keys, torch.full_like(keys, vocab)], 1),
            3,
        )
        counts += np.bincount(drawn.token, minlength=vocab)
    probabilities = (logits.double() / 0.8).softmax(-1).numpy()
    likely = probabilities * draws > 5
    assert counts[probabilities == 0].sum() == 0
    pooled = [np.append(x[likely], x[~likely].sum()) for x in (counts, probabilities)]
    kept = pooled[1] * draws > 5
    assert chi_square_p(pooled[0][kept], pooled[1][kept] / pooled[1][kept].sum()) > 1e-3


def agreement(p: np.ndarray, q: np.ndarray) -> float:
    """How often two draws with the same Gumbel noise for each option are equal:
    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    return float(sum(1 / np.maximum(p / a, q / b).sum() for a, b in zip(p, q, strict=True)))


@pytest.mark.parametrize("pair", [(0.6, 1.0), (1.0, 1.7)])
def test_temperatures_are_coupled_as_gumbel_noise_couples_them(sampled_tokens, pair):
    """In a vocabulary of one block."""
    p, q = (Planted().probabilities(3, t) for t in pair)
    expected = agreement(p, q)
    equal = float((sampled_tokens[pair[0]][:, 0] == sampled_tokens[pair[1]][:, 0]).mean())
    assert abs(equal - expected) < 4 * np.sqrt(expected * (1 - expected) / DRAWS)
    assert equal > float((p * q).sum()) + 0.3  # of independent draws


def rows_of(vocab: int, rows: int = 60) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, temperatures and streams of rows; a fourth of the rows lacks half of the tokens."""
    generator = torch.Generator().manual_seed(vocab)
    spread = torch.tensor([0.3, 3.0, 12.0]).repeat(rows)[:rows, None]
    logits = torch.randn(rows, vocab, generator=generator) * spread
    logits[::4, : vocab // 2] = -torch.inf
    temperature = torch.tensor([0, 0.05, 0.7, 1.0, 1.3, 5.0])[
        torch.randint(6, (rows,), generator=generator)
    ]
    return logits, temperature, torch.randint(2**32, (rows, 2), generator=generator)


VOCABULARIES = pytest.mark.parametrize("vocab", [1, 40, 64, 65, 150, 1003])


@VOCABULARIES
def test_draws_equal_the_rule_written_plainly(vocab):
    """Tokens wherever rounding can't decide, margins within it, log-probabilities and ranks."""
    logits, temperature, stream = rows_of(vocab)
    drawn, equal = draw_tokens(logits, temperature, stream, 5), 0
    for row, one in enumerate(logits.double()):
        t, token = float(temperature[row]), int(drawn.token[row])
        right, margin = two_level.draw(one, t, stream[row].tolist(), 5)
        assert float(drawn.margin[row]) <= margin * (1 + 2**-20) + 2 * two_level.ROUNDING
        # Scores far below the best can't win, and are rounded more coarsely or put higher.
        ours, theirs = (min(lead, 3.0) for lead in (float(drawn.margin[row]), margin))
        if token != right:
            assert max(ours, theirs) < 2 * two_level.ROUNDING
            continue
        equal += 1
        assert abs(ours - theirs) < 2 * two_level.ROUNDING
        bound = (np.log(vocab) + 4) * 2**-23
        for found, warmth in ((drawn.logprob, 1.0), (drawn.logprob_tempered, t)):
            if warmth:
                exact = float((one / warmth).log_softmax(-1)[token])
                assert abs(float(found[row]) - exact) <= bound + abs(exact) * 2**-22
            else:
                assert found[row].isnan()
        assert int(drawn.rank[row]) == int((one > one[token]).sum()) + 1
    assert equal >= len(logits) - 1


@VOCABULARIES
def test_margins_bound_what_changes_a_token(vocab):
    """No change of logits by less than half of the margin changes the token, whatever its
    direction. A larger change against the chosen token, or its block, does."""
    logits, temperature, stream = rows_of(vocab)
    drawn = draw_tokens(logits, temperature, stream, 5)
    # Changes are rounded, too, by as much as 2**-24 of logits up to 100.
    rounding = 2 * two_level.ROUNDING + 2**-23 * 50 / temperature.clamp(min=0.05)
    warmth = torch.where(temperature == 0, 1.0, temperature)[:, None]
    most = drawn.margin.clamp(max=20.0)[:, None] * warmth / 2  # in logits
    numbers, token = torch.arange(vocab), drawn.token[:, None]
    random = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    directions = [
        random,
        random.sign(),
        torch.where(numbers == token, -1.0, 1.0),
        torch.where(numbers // 64 == token // 64, -1.0, 1.0),
    ]
    firm = drawn.margin > 4 * rounding
    less, more = most - rounding[:, None] * warmth, most + rounding[:, None] * warmth
    for direction in directions:
        changed = draw_tokens(logits + direction * less, temperature, stream, 5)
        assert torch.equal(changed.token[firm], drawn.token[firm])
    others = [
        draw_tokens(logits + each * more, temperature, stream, 5).token for each in directions[2:]
    ]
    turned = (others[0] != drawn.token) | (others[1] != drawn.token)
    assert turned[drawn.margin < 20].all()


@VOCABULARIES
def test_a_rows_draw_is_the_same_alone_and_in_any_batch(vocab, monkeypatch):
    """In slices of any size, but for the order in which a sum's terms are added."""
    logits, temperature, stream = rows_of(vocab)
    together = draw_tokens(logits, temperature, stream, 5)
    assert together.margin.min() > 4 * two_level.ROUNDING  # no near-tie
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("ia_mech.engine.sampling.CPU_LOGITS", 7 * vocab)
    steps = torch.full((len(logits), 1), 5)
    assert_same(
        draw_tokens(logits[order], temperature[order], stream[order], steps), together, order
    )
    for row in range(len(logits)):
        one = [row]
        assert_same(draw_tokens(logits[one], temperature[one], stream[one], 5), together, one)


def assert_same(draw: Draw, of: Draw, rows) -> None:
    assert torch.equal(draw.token, of.token[rows]) and torch.equal(draw.rank, of.rank[rows])
    for name in ("logprob", "logprob_tempered", "margin"):
        found, right = getattr(draw, name), getattr(of, name)[rows]
        torch.testing.assert_close(
            found, right, rtol=2**-22, atol=2 * two_level.ROUNDING, equal_nan=True
        )


@pytest.mark.parametrize("vocab", [40, 64, 6401])
def test_greedy_rows_take_the_first_largest_logit(vocab):
    logits = torch.zeros(5, vocab)
    logits[1, vocab - 1] = logits[1, 33] = 2.0
    logits[2, 17] = logits[2, 5] = 2.0
    logits[3, :-1] = -torch.inf
    logits[4] = torch.arange(vocab)
    drawn = draw_tokens(logits, torch.zeros(5), torch.zeros(5, 2).long(), 0)
    assert drawn.token.tolist() == [0, 33, 5, vocab - 1, vocab - 1]
    assert drawn.margin.tolist() == [0, 0, 0, torch.inf, 1]
    assert drawn.rank.tolist() == [1] * 5
    assert drawn.logprob_tempered.isnan().all()
    torch.testing.assert_close(drawn.logprob, logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_numbers_give_a_token_without_a_log_probability(temperature):
    logits = torch.zeros(3, 150)
    logits[0, 149], logits[1], logits[2, 70] = torch.nan, -torch.inf, torch.inf
    drawn = draw_tokens(logits, torch.full((3,), temperature), torch.zeros(3, 2).long(), 0)
    assert ((drawn.token >= 0) & (drawn.token < 150)).all()
    assert drawn.logprob.isnan().all()


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


def test_noise_depends_on_key_and_step_alone():
    """The same numbers alone, in a batch, for a smaller vocabulary and for a part of it."""
    keys = torch.tensor([stream_key(3, s, i) for s in ("a", "b") for i in range(3)])
    tokens = torch.arange(1001)[None]
    together = gumbel(keys, tokens, 5, 0)
    for index in range(len(keys)):
        assert torch.equal(gumbel(keys[index : index + 1], tokens, 5, 0)[0], together[index])
    assert torch.equal(gumbel(keys, tokens[:, 64:500], 5, 0), together[:, 64:500])
    assert not torch.equal(gumbel(keys, tokens, 6, 0), together)
    assert not torch.equal(gumbel(keys, tokens, 5, 1), together)
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
    assert tuple(int(word) for word in words) == expected == two_level.philox(counter, key)
