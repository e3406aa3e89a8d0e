"""Teacher-forced scores of given user turns, from the prefill that was made anyway."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ia_mech.engine.intervention import Steered, at_tokens, intervene
from ia_mech.engine.loop import cpu_slices
from ia_mech.engine.plan import plan_units
from ia_mech.engine.prefill import Prefilled, State, can_join, expand, forward, join
from ia_mech.engine.sampling import log_sum_exp, ranks

LOGITS = 2**25  # most logits that are held at once, or those of one token
PADDING = 0.25  # most padding of turns that share a pass, as a share of their tokens


@dataclass(frozen=True)
class Turn:
    """A user turn to score: the context it follows (index in the group) and its token ids.

    ``steered`` takes place at each of its tokens; its own positions aren't looked at.
    """

    context: int
    ids: Sequence[int]
    steered: tuple[Steered, ...] = ()


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
    prefilled: Prefilled,
    turns: Sequence[Turn],
    temperatures: Sequence[float],
    share: bool = True,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Scored]:
    """Score turns given the contexts of one group; see :func:`score_groups`."""
    return score_groups(model, [prefilled], turns, temperatures, share, on_tokens)


def score_groups(
    model: PreTrainedModel,
    groups: Sequence[Prefilled],
    turns: Sequence[Turn],
    temperatures: Sequence[float],
    share: bool = True,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Scored]:
    """Score turns given their contexts; the prefilled states are left as they were.

    The first token is scored by the prefill's own logits, the others by one more pass over the
    turns alone. Turns of similar length share a pass, of whatever group where rows of several can
    share a batch, and within it those of one context are neighbours.

    Args:
        model: the subject model.
        groups: contexts that were prefilled together.
        turns: what to score, in any order; their contexts are counted through all groups.
        temperatures: at which besides T = 1.
        share: as for :func:`ia_mech.engine.decode.decode`.
        on_tokens: called after each pass with how many tokens were scored.
    """
    results: dict[int, Scored] = {}
    most = max(1, LOGITS // groups[0].logits.shape[-1])  # tokens of one pass
    for batch in _batches(groups, [turn.context for turn in turns], share):
        for part in plan_units([len(turns[i].ids) for i in batch], len(batch), most, PADDING):
            members = sorted((batch[i] for i in part), key=lambda i: turns[i].context)
            together = [turns[i] for i in members]
            scored = _score_pass(model, groups, together, temperatures, share, most)
            results.update(zip(members, scored, strict=True))
            if on_tokens is not None:
                on_tokens(sum(len(turn.ids) for turn in together))
    return [results[index] for index in range(len(turns))]


def _batches(groups: Sequence[Prefilled], contexts: Sequence[int], share: bool) -> list[list[int]]:
    """Indices of the turns that may share a pass: all of them, or those of each group."""
    everyone = list(range(len(contexts)))
    if len(groups) == 1 or not contexts:
        return [everyone]
    one = torch.zeros(1, dtype=torch.long, device=groups[0].logits.device)
    if can_join(expand(groups[0].state, one, share=share)):
        return [everyone]
    ends = list(accumulate(len(group.logits) for group in groups))
    return [
        [i for i in everyone if end - len(group.logits) <= contexts[i] < end]
        for group, end in zip(groups, ends, strict=True)
    ]


def _rows(groups: Sequence[Prefilled], context: Tensor, capacity: int, share: bool) -> State:
    """Rows that go on from contexts ``[rows]`` int64, sorted and counted through all groups."""
    state: State | None = None
    first = 0
    for group in groups:
        end = first + len(group.logits)
        mine = context[(context >= first) & (context < end)]
        index, numbers = mine - first, mine.tolist()
        if numbers and state is None:
            state = expand(
                group.state, index, capacity, share=share, max_rows=len(context), numbers=numbers
            )
        elif numbers and state is not None:
            slots = range(state.rows, state.rows + len(mine))
            join(state, slots, group.state, index, numbers)
        first = end
    assert state is not None  # there is at least one turn
    return state


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
    context = torch.tensor([turn.context for turn in turns], device=device)
    # Without sharing, in one pass, concatenating copies less than preallocated buffers do.
    capacity = longest - 1 if share else 0
    state = _rows(groups, context, capacity, share) if longest > 1 else None
    scores = torch.zeros(3 + len(temperatures), len(turns), longest, device=device)
    # [turns, 1, vocab], they predict the first token
    logits = torch.cat([group.logits for group in groups])[context][:, None]
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
        assert state is not None
        fed = slice(done - 1, min(done - 1 + most, longest - 1))
        interventions = [
            at_tokens(turn.steered, range(fed.start, min(fed.stop, len(turn.ids) - 1)))
            for turn in turns
        ]
        with intervene(model, interventions, [fed.start] * len(turns)):
            logits = forward(model, state, ids[:, fed], mask[:, fed], keep=0)
    found = scores.cpu().numpy()
    return [
        Scored(
            logprobs_raw=own[0],
            logprobs_tempered=own[1:-2],
            ranks=own[-2].astype(np.int64),
            greedy=own[-1].astype(bool),
        )
        for row, length in enumerate(lengths)
        for own in [found[:, row, :length]]
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
    found = torch.empty(3 + len(temperatures), len(ids), device=logits.device)
    for part in cpu_slices(len(ids), logits.shape[-1], logits.device):
        (turn, at), token = where[part].unbind(-1), ids[part, None]
        one = logits[turn, at]
        found[-1, part] = (one.argmax(-1, keepdim=True) == token)[:, 0].float()
        below = one.sub_(one.amax(-1, keepdim=True))
        chosen, scratch = below.gather(-1, token), torch.empty_like(below)
        for number, t in enumerate((1.0, *temperatures)):
            found[number, part] = (chosen / t - log_sum_exp(below, t, out=scratch))[:, 0]
        found[-2, part] = ranks(below, chosen, out=scratch).float()
    return found
