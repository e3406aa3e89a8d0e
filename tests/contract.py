"""The bounds of the numbers contract, and comparisons whose tolerances follow from them.

Two ways of computing the same float32 vector may differ by 1e-5 of its L2 norm. The logit vectors
of the tiny models have norms below 20, which ``test_architectures`` asserts, so one of their logits
moves by at most 2e-4. A log-probability is a logit minus a log-sum-exp, which moves by no more than
the logits do, so it moves by at most 4e-4, and at temperature T by 4e-4 / T.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import tiny
import torch
import transformers

from ia_mech.engine.installed import installed
from ia_mech.engine.state import Prefix, forward, prefill

VECTOR = 1e-5  # relative L2 distance of a vector that is computed in two ways (point 3)
MARGIN = 1e-4  # decisions with a larger margin are the same in all ways (point 6)
NORM = 20.0  # the L2 norm of a tiny model's logits is less
LOGIT = VECTOR * NORM
LOGPROB = 2 * LOGIT  # divided by the temperature


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest L2 distance of two sets of vectors, relative to the second's norm."""
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())


def full_logits(model, prompt: list[int], turn) -> torch.Tensor:
    """``[tokens, vocab]`` that predict a turn after a prompt, by one pass without a cache."""
    ids = torch.tensor([[*prompt, *map(int, turn)]], device=model.device)
    with torch.inference_mode():
        return model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().cpu()


@torch.inference_mode()
def masked_logits(model, ids, at: torch.Tensor, sees, behind=None) -> torch.Tensor:
    """``[tokens, vocab]`` of one pass in which each layer has a mask.

    Args:
        model: a tiny model.
        ids: of all tokens, also of several contexts one behind the other.
        at: ``[tokens]`` their positions.
        sees: takes a layer (from 1), returns ``[tokens, tokens]``: which tokens (columns) a token
            (row) attends to, apart from what a sliding window hides.
        behind: ``[tokens, tokens]`` how far a column is behind a row, as a window counts; by
            default the difference of their positions.
    """
    behind = at[:, None] - at if behind is None else behind

    def attention(module, query, key, value, mask, scaling, sliding_window=None, s_aux=None, **_):
        each, outputs = query.shape[1] // key.shape[1], []
        for head in range(query.shape[1]):
            seen = sees(module.layer_idx + 1)
            if sliding_window is not None:
                seen = seen & (behind < sliding_window)
            scores = query[0, head] @ key[0, head // each].T * scaling
            scores = scores.masked_fill(~seen, -torch.inf)
            if s_aux is not None:
                scores = torch.cat([scores, s_aux[head].expand(len(at), 1)], -1)
            outputs.append(scores.softmax(-1)[:, : len(at)] @ value[0, head // each])
        return torch.stack(outputs, 1)[None], None

    transformers.AttentionInterface.register("test_masked", attention)
    implementation = model.config._attn_implementation
    model.config._attn_implementation = "test_masked"
    try:
        return model(torch.tensor([ids]), position_ids=at[None], use_cache=False).logits[0]
    finally:
        model.config._attn_implementation = implementation


def assert_logprobs(found, logits: torch.Tensor, turn, temperature: float = 1.0) -> None:
    """``found`` ``[tokens]`` are the log-probabilities of a turn that these logits give."""
    chosen = torch.tensor(np.asarray(turn, dtype=np.int64))[:, None]
    wanted = (logits.double() / temperature).log_softmax(-1).gather(-1, chosen)[:, 0]
    np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=LOGPROB / temperature)


def assert_ranks(found, logits: torch.Tensor, turn) -> None:
    """Ranks count the higher logits; only those within rounding of the chosen one may differ."""
    chosen = logits.gather(-1, torch.tensor(np.asarray(turn, dtype=np.int64))[:, None])
    fewest = (logits > chosen + 2 * LOGIT).sum(-1).numpy() + 1
    most = (logits >= chosen - 2 * LOGIT).sum(-1).numpy()
    assert (fewest <= found).all() and (found <= most).all()


@contextlib.contextmanager
def copied_prefixes(model) -> Iterator[None]:
    """While it lasts, each row has a copy of its prefix, which is slow but plain."""
    made = installed(model)
    before, made.engine = made.engine, replace(made.engine, shared=())
    try:
        yield
    finally:
        made.engine = before


def near_ties(model, lengths, rows, ours, theirs) -> int:
    """How many rows differ between two ways of decoding; asserts that each first differs at a
    decision that rounding can turn.

    Args:
        model: a tiny model.
        lengths: of the contexts, each of which is ``tiny.prompt(length, seed=length)``.
        rows: what was decoded.
        ours, theirs: what was recorded of each.
    """
    found = 0
    for row, a, b in zip(rows, ours, theirs, strict=True):
        if a.token_ids.tolist() != b.token_ids.tolist():
            length = min(len(a.token_ids), len(b.token_ids))
            first = int(np.argmax(a.token_ids[:length] != b.token_ids[:length]))
            assert min(a.margins[first], b.margins[first]) < MARGIN
            found += 1
            continue
        assert a.finish_reason == b.finish_reason
        np.testing.assert_allclose(a.logprobs_raw, b.logprobs_raw, rtol=0, atol=LOGPROB)
        if row.temperature:
            tempered = a.logprobs_tempered, b.logprobs_tempered
            np.testing.assert_allclose(*tempered, rtol=0, atol=LOGPROB / row.temperature)
        else:
            assert np.isnan(a.logprobs_tempered).all() and np.isnan(b.logprobs_tempered).all()
        if a.ranks.tolist() != b.ranks.tolist():
            length = lengths[row.context]
            logits = full_logits(model, tiny.prompt(length, seed=length), a.token_ids)
            assert_ranks(a.ranks, logits, a.token_ids)
            assert_ranks(b.ranks, logits, b.token_ids)
    return found


def prefilled(model, lengths):
    """A group of contexts of these lengths, each ``tiny.prompt(length, seed=length)``."""
    return prefill(model, [Prefix(tiny.prompt(n, seed=n)) for n in lengths])


def stepped(model, state, tokens) -> torch.Tensor:
    """Logits ``[rows, vocab]`` after one more token in every row."""
    token = torch.tensor(tokens)[:, None]
    return forward(model, state, token, torch.ones_like(token)).logits[:, -1]
