"""Teacher-forced scores of given user turns, from the prefill that was made anyway."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ia_mech.engine.intervene import Intervention, within
from ia_mech.engine.memory import allowed
from ia_mech.engine.sampling import cpu_slices, log_sum_exp, ranks
from ia_mech.engine.shared import Borrowed
from ia_mech.engine.state import (
    PREFILL_TOKENS,
    Prefilled,
    copied_bytes,
    expand,
    forward,
    similar_lengths,
)
from ia_mech.errors import UserError

# Limits of one pass, besides PREFILL_TOKENS. Every pass reads all weights, so it should be large:
# these are the logits of 500 tokens with a vocabulary of 250,000. A GPU's numbers are estimates.
LOGITS = {"cpu": 2**27, "cuda": 2**28}
STATE_BYTES = {"cpu": 2**30, "cuda": 2**32}  # of the state that rows copy


@dataclass(frozen=True)
class Turn:
    """A user turn to score.

    Attributes:
        context: the number of the context that it follows, counted through all groups.
        ids: its tokens.
        borrowed: keys and values of another context that it attends to.
        interventions: at indices into ``ids``; the last token is only predicted, so it has none.
        whole_at: index of the token whose whole distribution is wanted.
    """

    context: int
    ids: Sequence[int]
    borrowed: Borrowed | None = None
    interventions: tuple[Intervention, ...] = ()
    whole_at: int | None = None


@dataclass(frozen=True)
class Scored:
    """Scores of one turn, one entry per token, in nats.

    ``logprobs_raw`` ``[tokens]`` at T = 1; ``logprobs_tempered`` ``[temperatures, tokens]``;
    ``ranks`` ``[tokens]`` from 1; ``greedy`` ``[tokens]``: whether the token is the argmax that
    greedy decoding would have written after the same prefix; ``whole`` ``[vocab]`` at T = 1, the
    distribution at the turn's ``whole_at``.
    """

    logprobs_raw: np.ndarray
    logprobs_tempered: np.ndarray
    ranks: np.ndarray
    greedy: np.ndarray
    whole: np.ndarray | None = None


def score(
    model: PreTrainedModel,
    groups: Sequence[Prefilled],
    turns: Sequence[Turn],
    temperatures: Sequence[float] = (),
    *,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Scored]:
    """Score turns given their contexts; the prefilled states are left as they were.

    The first token is scored by the prefill's own logits, the others by one more pass over the
    turns alone. Turns of similar length share a pass, as many as logits and copied state allow.

    Args:
        groups: groups of prefilled contexts, in order.
        temperatures: to score at besides T = 1.
        on_tokens: called after each pass with how many tokens were scored.

    Raises:
        UserError: an intervention is at a token that no pass computes.
    """
    results: dict[int, Scored] = {}
    device, vocab = model.device.type, groups[0].logits.shape[-1]
    most = max(1, min(allowed(LOGITS[device]) // vocab, allowed(PREFILL_TOKENS[device])))
    longest = max((len(turn.ids) for turn in turns), default=0)
    rows = max(1, allowed(STATE_BYTES[device]) // max(1, copied_bytes(model, groups, longest)))
    for batch in similar_lengths([len(turn.ids) for turn in turns], most, rows):
        members = sorted(batch, key=lambda i: turns[i].context)
        together = [turns[i] for i in members]
        scored = _score_pass(model, groups, together, temperatures, most)
        results.update(zip(members, scored, strict=True))
        if on_tokens is not None:
            on_tokens(sum(len(turn.ids) for turn in together))
    return [results[index] for index in range(len(turns))]


def differentiable_logits(
    model: PreTrainedModel, groups: Sequence[Prefilled], turns: Sequence[Turn]
) -> Tensor:
    """Logits ``[turns, longest, vocab]`` that predict the turns' tokens, from one pass with
    gradients for the tensors that interventions hold.

    Args:
        model, groups: as for :func:`score`.
        turns: sorted by context; none borrows.

    Raises:
        UserError: the model has recurrent layers, through which no gradient goes.
    """
    layers = groups[0].state.cache.layers
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        raise UserError(
            f"the passes of {type(model).__name__} have no gradient (recurrent layers change "
            "their state in place)",
            "use a model without such layers",
        )
    with torch.inference_mode(False):
        _require_fed(turns)
        ids, mask, _ = _padded(turns)
        contexts = [turn.context for turn in turns]
        first = torch.cat([group.logits for group in groups])[contexts][:, None]
        if ids.shape[1] == 1:
            return first
        state = expand(model, groups, contexts, copies=True)
        logits, _ = forward(
            model,
            state,
            ids[:, :-1],
            mask[:, :-1],
            keep=0,
            interventions=[turn.interventions for turn in turns],
            gradients=True,
        )
        return torch.cat([first, logits], dim=1)


def _require_fed(turns: Sequence[Turn]) -> None:
    """Refuse interventions at tokens that no pass over the turn computes."""
    for turn in turns:
        fed = max(len(turn.ids) - 1, 0)
        for one in turn.interventions:
            for position in one.positions:
                if not 0 <= position < fed:
                    raise UserError(
                        f"position {position} of a turn of {len(turn.ids)} tokens can't be changed",
                        f"name one from 0 to {fed - 1}; the last token is only predicted",
                    )


def _padded(turns: Sequence[Turn]) -> tuple[Tensor, Tensor, list[int]]:
    """``[turns, longest]`` ids with zeros on their right, the mask of the tokens that are fed, and
    the turns' lengths."""
    lengths = [len(turn.ids) for turn in turns]
    ids, mask = torch.zeros(2, len(turns), max(1, *lengths), dtype=torch.long)
    for row, turn in enumerate(turns):
        ids[row, : lengths[row]] = torch.tensor(turn.ids, dtype=torch.long)
        mask[row, : max(lengths[row] - 1, 0)] = 1  # the last token is only predicted
    return ids, mask, lengths


def _score_pass(
    model: PreTrainedModel,
    groups: Sequence[Prefilled],
    turns: Sequence[Turn],
    temperatures: Sequence[float],
    most: int,
) -> list[Scored]:
    """Scores of turns that share a pass; turns longer than ``most`` tokens are fed in pieces."""
    _require_fed(turns)
    device = groups[0].logits.device
    host_ids, host_mask, lengths = _padded(turns)
    ids, mask = host_ids.to(device), host_mask.to(device)
    longest = ids.shape[1]
    contexts = [turn.context for turn in turns]
    scores = torch.zeros(3 + len(temperatures), len(turns), longest, device=device)
    whole: dict[int, np.ndarray] = {}
    # [turns, 1, vocab]: they predict the first token
    logits = torch.cat([group.logits for group in groups])[contexts][:, None]
    state = None
    done = 0
    while True:
        ahead = torch.arange(done, done + logits.shape[1])
        for row, turn in enumerate(turns):
            if turn.whole_at is not None and done <= turn.whole_at < done + len(ahead):
                whole[row] = logits[row, turn.whole_at - done].log_softmax(-1).cpu().numpy()
        real = (ahead < torch.tensor(lengths)[:, None]).nonzero().to(device)
        which, at = real.unbind(-1)
        chosen = ids[which, done + at]
        scores[:, which, done + at] = _score_tokens(logits, real, chosen, temperatures)
        done += len(ahead)
        if done >= longest:
            break
        if state is None:
            borrowed = [turn.borrowed for turn in turns]
            state = expand(model, groups, contexts, longest - 1, borrowed=borrowed)
        fed = slice(done - 1, min(done - 1 + most, longest - 1))
        logits = forward(
            model,
            state,
            ids[:, fed],
            mask[:, fed],
            keep=0,
            first=[fed.start] * len(turns),
            interventions=[within(turn.interventions, fed.start, fed.stop) for turn in turns],
        ).logits
    host = scores.cpu().numpy()
    return [
        Scored(
            logprobs_raw=own[0],
            logprobs_tempered=own[1:-2],
            ranks=own[-2].astype(np.int64),
            greedy=own[-1].astype(bool),
            whole=whole.get(row),
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
        temperatures: to score at besides T = 1.

    Returns:
        ``[3 + temperatures, tokens]`` float32, so that one transfer to the host is enough:
        log-probabilities in nats at T = 1 and at each temperature, ranks, and 1 where the token is
        the argmax.
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
