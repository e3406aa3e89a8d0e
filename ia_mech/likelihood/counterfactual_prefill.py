"""Prefill counterfactual contexts, the prefix that several of them share only once.

The contexts of one conversation after other responses begin with the same system message and query.
Where a model's layers can all be shared, that prefix is prefilled once and the contexts go on from
it; elsewhere each is prefilled whole.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from transformers import PreTrainedModel

from ia_mech.engine.plan import batch_defaults, plan_units
from ia_mech.engine.prefill import Prefilled, Prefix, continue_prefill, prefill

PADDING = 0.1  # most padding of contexts that are prefilled together, as a share of their tokens
SHARED_TOKENS = 16  # a shorter shared prefix isn't worth a pass of its own

Ids = tuple[int, ...]


def shared_prefix(contexts: Sequence[Ids]) -> Ids:
    """The ids that all contexts begin with, leaving each at least one token of its own.

    Empty for a single context, and where it would be shorter than :data:`SHARED_TOKENS`.
    """
    if len(contexts) < 2:
        return ()
    alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*contexts, strict=False))
    begun = tuple(token for token, *_ in alike)[: min(map(len, contexts)) - 1]
    return begun if len(begun) >= SHARED_TOKENS else ()


def prefill_counterfactuals(
    model: PreTrainedModel,
    contexts: Sequence[Ids],
    prefixes: Sequence[Ids],
    on_tokens: Callable[[int], None] | None = None,
) -> tuple[list[Prefilled], list[int]]:
    """Prefill contexts in groups of similar length.

    Args:
        model: the subject model; with prefixes, one all of whose layers can be shared.
        contexts: their ids.
        prefixes: the beginning that each shares with others, or ().
        on_tokens: called after each group with how many tokens were prefilled.

    Returns:
        The groups, and indices into ``contexts`` in the order of the groups.
    """
    groups: list[Prefilled] = []
    order: list[int] = []
    for shared in (False, True):
        some = [i for i, prefix in enumerate(prefixes) if bool(prefix) == shared]
        number = {prefix: n for n, prefix in enumerate(dict.fromkeys(prefixes[i] for i in some))}
        begun = prefill(model, [Prefix(prefix) for prefix in number]) if shared and some else None
        rests = [contexts[i][len(prefixes[i]) :] for i in some]
        limits = len(some), batch_defaults(model.device).prefill_tokens, PADDING
        for unit in plan_units([len(rest) for rest in rests], *limits):
            parts = [rests[at] for at in unit]
            if begun is None:
                groups.append(prefill(model, [Prefix(part) for part in parts]))
            else:
                index = [number[prefixes[some[at]]] for at in unit]
                groups.append(continue_prefill(model, begun, index, parts))
            order += [some[at] for at in unit]
            if on_tokens is not None:
                on_tokens(sum(map(len, parts)))
    return groups, order
