"""One row of the rates report, and the turns it is of."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ia_mech.stats import Estimate

ALL = "(all)"  # the datasets of a model together


@dataclass(frozen=True)
class Row:
    """One estimate.

    Attributes:
        model, weights_hash, dataset, perturbation, judge: what it is of; ``dataset`` may be
            ``(all)``.
        responses: after which responses the turns come: ``all``, ``complete`` or ``cut-off`` ones.
        temperature: 0 is greedy; None over all temperatures (of ``reach``: all but greedy).
        quantity: ``follow_up_rate``; ``follow_up_rate_complete``, after responses that weren't cut
            off; ``follow_up_rate_bounds``, if none or all of the turns that weren't assessed were
            genuine; ``cannot_assess``, ``failed`` and ``cut_off``, shares of all turns;
            ``category_share``; ``reach``; ``difference_from_greedy``; ``detectable_difference``;
            ``judge_sensitivity``, ``judge_specificity``; ``rate_annotated``, ``rate_rogan_gladen``,
            ``rate_prediction_powered``.
        category: of ``category_share``.
        n_samples: of ``reach``.
        value, low, high: the estimate and its interval; NaN where there is none.
        p, p_holm: of ``difference_from_greedy``; corrected over all comparisons of the report,
            those of ``(all)`` in a family of their own.
        test: which gave p, as :class:`ia_mech.stats.Paired` names it; None without p.
        events, rows: how many turns count, of how many; of a corrected rate, ``events`` of the
            turns were annotated for the correction.
        sources, contexts: behind the estimate.
        level: of the interval.
        method: of the interval, or why there is none.
    """

    model: str
    weights_hash: str
    dataset: str
    perturbation: str
    judge: str
    responses: str
    temperature: float | None
    quantity: str
    category: str | None
    n_samples: int | None
    value: float
    low: float
    high: float
    p: float
    p_holm: float
    test: str | None
    events: int | None
    rows: int
    sources: int
    contexts: int
    level: float
    method: str

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, self.low, self.high, self.sources, self.method)


@dataclass(frozen=True)
class Group:
    """The turns of one table row, and what names them."""

    names: dict[str, Any]
    dataset: str
    temperature: float | None
    turns: pd.DataFrame

    def row(
        self, quantity: str, estimate: Estimate, turns: pd.DataFrame | None = None, **more
    ) -> Row:
        """A row of the report; ``turns`` are those counted, all of the group if not given."""
        turns = self.turns if turns is None else turns
        counted = {
            "category": None,
            "n_samples": None,
            "p": np.nan,
            "p_holm": np.nan,
            "test": None,
            "events": None,
            "rows": len(turns),
            "contexts": turns["context"].nunique(),
        }
        return Row(
            **self.names,
            dataset=self.dataset,
            temperature=self.temperature,
            quantity=quantity,
            value=float(estimate.value),
            low=float(estimate.low),
            high=float(estimate.high),
            sources=estimate.sources,
            method=estimate.method,
            **counted | more,
        )
