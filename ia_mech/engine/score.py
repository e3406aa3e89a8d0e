"""Teacher-forced scores of given user turns, from the prefill that was made anyway."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ia_mech.engine.loop import cpu_slices
from ia_mech.engine.plan import plan_units
from ia_mech.engine.prefill import Prefilled, State, can_join, expand, forward, join

LOGITS = 2**25  # most logits that are held at once, or those of one token
PADDING = 0.25  # most padding of turns that share a pass, as a share of their tokens


@dataclass(frozen=True)
class Turn:
    """A user turn to score: the context it follows (index in the group) and its token ids."""

    context: int
    ids: Sequence[int]


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
    context = torch.tensor([turn.context for turn in turns], device=device)
    longest = max(1, max(len(turn.ids) for turn in turns))
    ids = torch.zeros(len(turns), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, turn in enumerate(turns):
        ids[row, : len(turn.ids)] = torch.tensor(turn.ids, dtype=torch.long)
        mask[row, : max(len(turn.ids) - 1, 0)] = 1  # the last token is only predicted
    ids, mask = ids.to(device), mask.to(device)
    # Without sharing, in one pass, concatenating copies less than preallocated buffers do.
    capacity = longest - 1 if share else 0
    state = _rows(groups, context, capacity, share) if longest > 1 else None
    pieces: list[list[Scored]] = [[] for _ in turns]
    # [turns, 1, vocab], they predict the first token
    logits = torch.cat([group.logits for group in groups])[context][:, None]
    done = 0
    while True:
        for row, turn in enumerate(turns):
            count = min(len(turn.ids) - done, logits.shape[1])
            if count > 0 or done == 0:
                piece = logits[row, : max(count, 0)], ids[row, done : done + max(count, 0)]
                pieces[row].append(_score_tokens(*piece, temperatures))
        done += logits.shape[1]
        if done >= longest:
            return [_joined(parts) for parts in pieces]
        assert state is not None
        fed = slice(done - 1, min(done - 1 + most, longest - 1))
        logits = forward(model, state, ids[:, fed], mask[:, fed], keep=0)


def _joined(parts: list[Scored]) -> Scored:
    return Scored(
        **{
            name: np.concatenate([getattr(part, name) for part in parts], axis=-1)
            for name in vars(parts[0])
        }
    )


def _score_tokens(logits: Tensor, ids: Tensor, temperatures: Sequence[float]) -> Scored:
    # In slices, because on a CPU a temperature takes a fifth of the time if it finds the logits in
    # the cache. Not by log_softmax, which takes half of that, but is off by up to 1e-5, one way.
    logprobs = torch.empty(1 + len(temperatures), len(ids), device=logits.device)
    ranks, greedy = torch.empty_like(ids), torch.empty_like(ids, dtype=torch.bool)
    for part in cpu_slices(len(ids), logits.shape[-1], logits.device):
        one, chosen = logits[part], ids[part, None]
        for at, temperature in enumerate((1.0, *temperatures)):
            scaled = one / temperature
            logprobs[at, part] = scaled.gather(-1, chosen)[:, 0] - scaled.logsumexp(-1)
        ranks[part] = (one > one.gather(-1, chosen)).sum(-1) + 1
        greedy[part] = one.argmax(-1) == ids[part]
    found = logprobs.cpu().numpy()
    return Scored(
        logprobs_raw=found[0],
        logprobs_tempered=found[1:],
        ranks=ranks.cpu().numpy(),
        greedy=greedy.cpu().numpy(),
    )
