"""Scores as the columns that a run stores."""

from collections.abc import Sequence

import numpy as np
from scipy.special import logsumexp

from ia_mech.scoring.scorer import Contrasts, Likelihood, ScoredCandidate

LN2 = float(np.log(2.0))


def contrast_columns(contrasts: Contrasts | None, prefix: str = "") -> dict:
    """What the turn's likelihood owes to the response, in bits, and what that is made of.

    ``response_contrast_bits`` = log₂ p(turn | query, response) − log₂ mean p(turn | query, another
    response); ``empty_contrast_bits`` and ``header_contrast_bits`` the like against an empty
    response and the bare header. Without the turn-end, and (``…_with_end``) with it.
    """
    if contrasts is None:
        return {}
    columns = {}
    for end, of in (("", lambda one: one.content), ("_with_end", lambda one: one.whole)):

        def value(one: Likelihood | None, of=of) -> float | None:
            return None if one is None else of(one)

        given, empty, header = map(value, (contrasts.given, contrasts.empty, contrasts.header))
        swapped = [] if given is None else [of(one) for one in contrasts.swapped]
        mean = float(logsumexp(swapped) - np.log(len(swapped))) if swapped else None
        columns |= {
            f"logprob_empty{end}": empty,
            f"logprob_swapped{end}": swapped or None,
            f"logprob_header{end}": header,
            f"response_contrast_bits{end}": _bits(given, mean),
            f"empty_contrast_bits{end}": _bits(given, empty),
            f"header_contrast_bits{end}": _bits(given, header),
        }
    return {prefix + name: column for name, column in columns.items()}


def _bits(given: float | None, other: float | None) -> float | None:
    return None if given is None or other is None else (given - other) / LN2


def reference_columns(candidates: Sequence[ScoredCandidate], text: str, closed: bool) -> dict:
    """Columns of a context's reference turn and of its rivals; the reference comes first.

    Args:
        candidates: of one context; none if it has no reference.
        text: of the reference.
        closed: whether the template closes turns with a token.
    """
    if not candidates:
        return {}
    genuine, scored = candidates[0], candidates[0].scored
    n, size = len(genuine.ids), len(text.encode())
    raw = scored.logprobs_raw.astype(np.float64)
    all_greedy = bool(scored.greedy.all())
    leaves = len(scored.greedy) if all_greedy else int(np.argmin(scored.greedy))
    tempered, with_end = _tempered(genuine, closed)
    return {
        "reference_token_ids": genuine.ids,
        "reference_logprobs_raw": scored.logprobs_raw,
        "reference_ranks": scored.ranks,
        "reference_logprob": float(raw[:n].sum()),
        "reference_logprob_with_end": float(raw.sum()) if closed else None,
        "reference_logprob_tempered": tempered,
        "reference_logprob_tempered_with_end": with_end,
        "reference_bits_per_byte": float(-raw[:n].sum() / LN2 / size) if size else None,
        "reference_greedy": all_greedy,
        "reference_greedy_tokens": min(leaves, n),
        "reference_greedy_left_rank": None if all_greedy else int(scored.ranks[leaves]),
        "reference_greedy_left_prob": None if all_greedy else float(np.exp(raw[leaves])),
        **contrast_columns(genuine.contrasts, "reference_"),
        "candidates": [_candidate(one, closed) for one in candidates],
        **_log_odds(candidates, closed),
    }


def _tempered(one: ScoredCandidate, closed: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """``[temperatures]`` sums without and with the turn-end."""
    tempered = one.scored.logprobs_tempered.astype(np.float64)
    return tempered[:, : len(one.ids)].sum(-1), tempered.sum(-1) if closed else None


def _candidate(one: ScoredCandidate, closed: bool) -> dict:
    likelihood = Likelihood.of(one.scored.logprobs_raw, len(one.ids))
    tempered, with_end = _tempered(one, closed)
    return {
        "name": one.candidate.name,
        "text": one.candidate.text,
        "lender": one.candidate.lender,
        "tokens": len(one.ids),
        "logprob": likelihood.content,
        "logprob_with_end": likelihood.whole,
        "logprob_tempered": tempered,
        "logprob_tempered_with_end": with_end,
        **contrast_columns(one.contrasts),
    }


def _log_odds(candidates: Sequence[ScoredCandidate], closed: bool) -> dict:
    """Log-odds in nats of the reference among the candidates, each as a whole turn."""
    if len(candidates) < 2:
        return {}
    raw = np.array([one.scored.logprobs_raw.astype(np.float64).sum() for one in candidates])
    tempered = np.array([_tempered(one, closed)[1 if closed else 0] for one in candidates])
    return {
        "candidate_log_odds": float(raw[0] - logsumexp(raw[1:])),
        "candidate_log_odds_tempered": tempered[0] - logsumexp(tempered[1:], axis=0),
    }
