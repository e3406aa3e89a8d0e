"""The one scorer: log-probabilities of given turns after given contexts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from ia_mech.engine.score import Scored, Turn
from ia_mech.engine.score import score as score_prefilled
from ia_mech.engine.state import Prefix, prefill_all


def scorer_after(
    model: PreTrainedModel,
    contexts: Sequence[Sequence[int]],
    *,
    on_tokens: Callable[[int], None] | None = None,
) -> Callable[..., list[Scored]]:
    """Prefill contexts once, to score turns after them as often as one likes.

    Args:
        contexts: token ids, each with its open header.
        on_tokens: told how many tokens of turns were scored.

    Returns:
        A function of turns (token ids, the number of the context that each follows, and its
        interventions) and temperatures, which gives each turn's scores per token, in nats.
    """
    groups, order = prefill_all(model, [Prefix(tuple(ids)) for ids in contexts])
    place = {number: at for at, number in enumerate(order)}

    def score(turns: Sequence[Turn], temperatures: Sequence[float] = ()) -> list[Scored]:
        placed = [replace(turn, context=place[turn.context]) for turn in turns]
        return score_prefilled(model, groups, placed, temperatures, on_tokens=on_tokens)

    return score


def score_turns(
    model: PreTrainedModel,
    contexts: Sequence[Sequence[int]],
    turns: Sequence[Turn],
    temperatures: Sequence[float] = (),
    *,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Scored]:
    """Score turns after contexts: one prefill per context, one further pass over the turns; see
    :func:`scorer_after`."""
    return scorer_after(model, contexts, on_tokens=on_tokens)(turns, temperatures)


def after_each(
    scorer: Callable[[Sequence[Sequence[int]], list[Turn]], list[Scored]],
    contexts: Sequence[Sequence[int]],
    turns: Sequence[Sequence[int]],
) -> list[list[Scored]]:
    """``[turns][contexts]`` scores of every turn after every context."""
    count = len(contexts)
    scores = scorer(contexts, [Turn(k, ids) for ids in turns for k in range(count)])
    return [scores[at : at + count] for at in range(0, len(scores), count)]
