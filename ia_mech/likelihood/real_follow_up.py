"""How likely the model finds the real follow-up: the columns that a run stores."""

from collections.abc import Iterable, Sequence

import numpy as np

from ia_mech.engine.score import Scored

SCORED = (
    *(round(0.1 * step, 1) for step in range(1, 16)),  # 0.1, 0.2, … 1.5
    *(1.75, 2.0, 2.25, 2.5, 3.0),
)
LN2 = float(np.log(2.0))


def scored_temperatures(sampled: Iterable[float]) -> tuple[float, ...]:
    """:data:`SCORED` with the temperatures that a run samples at, ascending."""
    return tuple(sorted({*SCORED, *sampled}))


def real_follow_up_columns(scored: Scored, ids: Sequence[int], text: str, closed: bool) -> dict:
    """Columns of a context's real follow-up.

    Args:
        scored: scores of its tokens, and of the token that ends it if the template has one.
        ids: its token ids, without the ending token.
        closed: whether the template closes turns with a token.
    """
    n, size = len(ids), len(text.encode())
    raw = scored.logprobs_raw.astype(np.float64)
    tempered = scored.logprobs_tempered.astype(np.float64)  # [temperatures, tokens]
    all_greedy = bool(scored.greedy.all())
    leaves = len(scored.greedy) if all_greedy else int(np.argmin(scored.greedy))
    return {
        "real_follow_up_token_ids": list(ids),
        "real_follow_up_logprobs_raw": scored.logprobs_raw,
        "real_follow_up_ranks": scored.ranks,
        "real_follow_up_logprob": float(raw[:n].sum()),
        "real_follow_up_logprob_with_end": float(raw.sum()) if closed else None,
        "real_follow_up_logprob_tempered": tempered[:, :n].sum(-1),
        "real_follow_up_logprob_tempered_with_end": tempered.sum(-1) if closed else None,
        "real_follow_up_bits_per_byte": float(-raw[:n].sum() / LN2 / size) if size else None,
        "real_follow_up_greedy": all_greedy,
        "real_follow_up_greedy_tokens": min(leaves, n),
        "real_follow_up_greedy_left_rank": None if all_greedy else int(scored.ranks[leaves]),
        "real_follow_up_greedy_left_prob": None if all_greedy else float(np.exp(raw[leaves])),
    }
