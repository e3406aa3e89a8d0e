"""The rows of one table's model and perturbation, found by what they are."""

import numpy as np

from ia_mech.judge.rubric import ASSESSED
from ia_mech.rates.rows import ALL, Row


class Figures:
    """Look-ups among the rows of one model and perturbation.

    Attributes:
        lines: (dataset, temperature) of every line of a table, in order.
        curves: likewise, of the reach curves; temperature None is all of them.
        curve: the n that any curve has; [0] without curves.
        categories: those with a turn in any line, in the rubric's order.
        annotated: whether there are labels to correct rates by.
    """

    def __init__(self, rows: list[Row]) -> None:
        self._rows = {
            (r.dataset, r.temperature, r.quantity, r.category, r.n_samples): r for r in rows
        }
        self.lines = self._places("follow_up_rate")
        self.curves = self._places("reach")
        self.curve = sorted({r.n_samples for r in rows if r.quantity == "reach"}) or [0]
        there = {r.category for r in rows if r.quantity == "category_share" and r.events}
        self.categories = [name for name in ASSESSED if name in there]
        self.annotated = self.has("rate_rogan_gladen")

    def _places(self, quantity: str) -> list[tuple[str, float | None]]:
        found = (r for r in self._rows.values() if r.quantity == quantity)
        return list(dict.fromkeys((r.dataset, r.temperature) for r in found))

    def get(
        self,
        dataset: str,
        temperature: float | None,
        quantity: str,
        category: str | None = None,
        n: int | None = None,
    ) -> Row | None:
        return self._rows.get((dataset, temperature, quantity, category, n))

    def overall(self, quantity: str) -> Row:
        """A figure of all datasets and temperatures together."""
        return self._rows[ALL, None, quantity, None, None]

    def has(self, quantity: str, *, above: float | None = None) -> bool:
        return any(
            row.quantity == quantity and (above is None or row.value > above)
            for row in self._rows.values()
        )

    def farthest(self, dataset: str, temperature: float) -> Row | None:
        """Reach at the largest n there is."""
        found = [self.get(dataset, temperature, "reach", n=n) for n in reversed(self.curve)]
        return next((row for row in found if row is not None), None)

    def undefined(self, quantity: str) -> str | None:
        """Why none of a quantity's rows has a value; None if one has."""
        found = [row for row in self._rows.values() if row.quantity == quantity]
        if not found or not all(np.isnan(row.value) for row in found):
            return None
        return found[0].method.split(";")[0]
