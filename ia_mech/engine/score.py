"""Teacher-forced scores of given user turns, from the prefill that was made anyway."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ia_mech.engine.intervene import Intervention, TokenwiseIntervention, at_tokens, intervene
from ia_mech.engine.sampling import cpu_slices, log_sum_exp, ranks
from ia_mech.engine.shared import Borrowed
from ia_mech.engine.state import Prefilled, expand, forward, similar_lengths

LOGITS = 2**25  # most logits that are held at once, or those of one token


@dataclass(frozen=True)
class Turn:
    """A user turn to score.

    Attributes:
        context: the number of the context that it follows, counted through all groups.
        ids: its tokens.
        steered: takes place at each of its tokens; its own positions aren't looked at.
        interventions: take place at indices into ``ids``.
        borrowed: keys and values of another context that it attends to.
    """

    context: int
    ids: Sequence[int]
    steered: tuple[TokenwiseIntervention, ...] = ()
    borrowed: Borrowed | None = None
    interventions: tuple[Intervention, ...] = ()


@dataclass(frozen=True)
class Scored:
    """Scores of one turn, one entry per token, in nats.

    ``logprobs_raw`` ``[tokens]`` at T = 1; ``logprobs_tempered`` ``[temperatures, tokens]``;
    ``ranks`` ``[tokens]`` from 1; ``greedy`` ``[tokens]``: whether the token is the argmax that
    greedy decoding would have written after the same prefix.
    """

    logprobs_raw: np.ndarray
    logprobs_tempered: np.ndarray
    ranks: np.ndarray
    greedy: np.ndarray


def score(
    model: PreTrainedModel,
    groups: Sequence[Prefilled],
    turns: Sequence[Turn],
    temperatures: Sequence[float] = (),
    *,
    share: bool = True,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Scored]:
    """Score turns given their contexts; the prefilled states are left as they were.

    The first token is scored by the prefill's own logits, the others by one more pass over the
    turns alone. Turns of similar length share a pass.

    Args:
        model: the subject model.
        groups: contexts that were prefilled together, in order.
        turns: what to score, in any order.
        temperatures: at which besides T = 1.
        share: as for :func:`ia_mech.engine.decode.decode`.
        on_tokens: called after each pass with how many tokens were scored.
    """
    results: dict[int, Scored] = {}
    most = max(1, LOGITS // groups[0].logits.shape[-1])  # tokens of one pass
    for batch in similar_lengths([len(turn.ids) for turn in turns], most):
        members = sorted(batch, key=lambda i: turns[i].context)
        together = [turns[i] for i in members]
        scored = _score_pass(model, groups, together, temperatures, share, most)
        results.update(zip(members, scored, strict=True))
        if on_tokens is not None:
            on_tokens(sum(len(turn.ids) for turn in together))
    return [results[index] for index in range(len(turns))]


def _score_pass(
    model: PreTrainedModel,
    groups: Sequence[Prefilled],
    turns: Sequence[Turn],
    temperatures: Sequence[float],
    share: bool,
    most: int,
) -> list[Scored]:
    """Scores of turns that share a pass; turns longer than ``most`` tokens are fed in pieces."""
    device = groups[0].logits.device
    lengths = [len(turn.ids) for turn in turns]
    longest = max(1, *lengths)
    host_ids, host_mask = torch.zeros(2, len(turns), longest, dtype=torch.long)
    for row, turn in enumerate(turns):
        host_ids[row, : lengths[row]] = torch.tensor(turn.ids, dtype=torch.long)
        host_mask[row, : max(lengths[row] - 1, 0)] = 1  # the last token is only predicted
    ids, mask = host_ids.to(device), host_mask.to(device)
    contexts = [turn.context for turn in turns]
    scores = torch.zeros(3 + len(temperatures), len(turns), longest, device=device)
    # [turns, 1, vocab], they predict the first token
    logits = torch.cat([group.logits for group in groups])[contexts][:, None]
    borrowed = [turn.borrowed for turn in turns]
    state = None
    done = 0
    while True:
        ahead = torch.arange(done, done + logits.shape[1])
        real = (ahead < torch.tensor(lengths)[:, None]).nonzero().to(device)
        which, at = real.unbind(-1)
        chosen = ids[which, done + at]
        scores[:, which, done + at] = _score_tokens(logits, real, chosen, temperatures)
        done += len(ahead)
        if done >= longest:
            break
        if state is None:
            state = expand(groups, contexts, share=share, borrowed=borrowed)
        fed = slice(done - 1, min(done - 1 + most, longest - 1))
        interventions = [
            [
                *at_tokens(turn.steered, range(fed.start, min(fed.stop, len(turn.ids) - 1))),
                *(one for one in turn.interventions if fed.start <= one.positions[0] < fed.stop),
            ]
            for turn in turns
        ]
        with intervene(model, interventions, [fed.start] * len(turns)):
            logits = forward(model, state, ids[:, fed], mask[:, fed], keep=0)
    host = scores.cpu().numpy()
    return [
        Scored(
            logprobs_raw=own[0],
            logprobs_tempered=own[1:-2],
            ranks=own[-2].astype(np.int64),
            greedy=own[-1].astype(bool),
        )
        for row, length in enumerate(lengths)
        for own in [host[:, row, :length]]
    ]


def _score_tokens(
    logits: Tensor, where: Tensor, ids: Tensor, temperatures: Sequence[float]
) -> Tensor:
    """Scores of tokens, in slices whose temporary tensors stay in a CPU's cache.

    Args:
        logits: ``[turns, positions, vocab]`` float32.
        where: ``[tokens, 2]`` int64, the turn and the position that predict each token.
        ids: ``[tokens]`` int64.
        temperatures: at which besides T = 1.

    Returns:
        ``[3 + temperatures, tokens]`` float32, so that one transfer to the host has all:
        log-probabilities in nats at T = 1 and at each temperature, ranks, and 1 for the argmax.
    """
    scores = torch.empty(3 + len(temperatures), len(ids), device=logits.device)
    for part in cpu_slices(len(ids), logits.shape[-1], logits.device):
        (turn, at), token = where[part].unbind(-1), ids[part, None]
        one = logits[turn, at]
        scores[-1, part] = (one.argmax(-1, keepdim=True) == token)[:, 0].float()
        below = one.sub_(one.amax(-1, keepdim=True))
        chosen, scratch = below.gather(-1, token), torch.empty_like(below)
        for number, t in enumerate((1.0, *temperatures)):
            scores[number, part] = (chosen / t - log_sum_exp(below, t, out=scratch))[:, 0]
        scores[-2, part] = ranks(below, chosen, out=scratch).float()
    return scores
