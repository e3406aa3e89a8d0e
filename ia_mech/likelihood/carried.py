"""What turns tell about their response, and how much of it one site carries, in the same bits.

Of a query's K siblings one is the *recipient*, and three others are the candidates. A turn that
followed one of the candidates is scored after each of them:

- *expressed*: after the candidates' own contexts;
- *carried by a site*: after three hybrids, in which one site comes from a candidate and everything
  else from the recipient. Every hybrid is equally foreign to the turn, so damage cancels. The two
  wrong candidates are the control, since they also bring a sibling's states.

Both numbers are E log₂ 3 q(k | u) with q ∝ exp(β s), at most log₂ 3 bits. β is fitted on other
queries. With any β this is a lower bound on the information (Barber & Agakov 2003), so the two
numbers can be compared, and divided. The β of a site is at most the β of the candidates' own
contexts. Without that limit, a site that moves likelihoods by only a hundredth of a nat, but always
in the right direction, would be scaled up until it seemed to tell everything.
Everything here is a function of arrays.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ia_mech.likelihood.reaction import by_query, identified, readable_bits

CANDIDATES = 3
CEILING = float(np.log2(CANDIDATES))


@dataclass(frozen=True)
class QueryBits:
    """Bits and hits of queries, each the mean over its turns and recipients.

    Attributes:
        queries: their names, sorted.
        bits: ``[queries]`` held-out bits; their mean is in expectation a lower bound.
        hits: ``[queries]`` how often the candidate that the turn followed is the likeliest; 1/3 by
            chance.
        each: ``[rows]`` held-out bits of each row.
    """

    queries: list
    bits: np.ndarray
    hits: np.ndarray
    each: np.ndarray

    def only(self, queries: Sequence[Hashable]) -> "QueryBits":
        """The bits and hits of some of the queries."""
        wanted = set(queries)
        at = [number for number, name in enumerate(self.queries) if name in wanted]
        return replace(
            self, queries=[self.queries[n] for n in at], bits=self.bits[at], hits=self.hits[at]
        )


def bits_by_query(
    scores: np.ndarray,
    own: np.ndarray,
    queries: Sequence[Hashable],
    whole: np.ndarray | None = None,
    *,
    seed: int = 0,
) -> QueryBits:
    """What the scores of turns tell about the candidates that they followed.

    Args:
        scores: ``[rows, 3]`` log-likelihoods of a turn after each candidate, in nats.
        own: ``[rows]`` which candidate the turn followed, 0 to 2.
        queries: ``[rows]``; each has rows of every candidate.
        whole: ``[rows, 3]`` log-likelihoods of the same turns after the candidates' own contexts,
            where ``scores`` are a site's: β is at most what is fitted to these.
        seed: of the folds in which β is fitted.

    Raises:
        ValueError: shapes don't fit, a score isn't finite, or a query lacks rows of a candidate.
    """
    most = np.inf if whole is None else readable_bits(whole, own, queries, seed=seed).fitted
    found = readable_bits(scores, own, queries, most=most, seed=seed)
    names, bits = by_query(found.bits, own, queries, CANDIDATES)
    _, hits = by_query(identified(scores, own), own, queries, CANDIDATES)
    order = sorted(range(len(names)), key=lambda number: str(names[number]))
    return QueryBits([names[number] for number in order], bits[order], hits[order], found.bits)
