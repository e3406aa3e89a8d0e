"""How the main job counts its work for the progress bar."""

import time
from collections.abc import Mapping, Set

from ia_mech.display import Progress
from ia_mech.engine.plan import PREFILL_COST, STEP_COST


class Work:
    """The work of one phase in decoded tokens, and the rate of decoding.

    A unit's work is known before it is done: rows count as their whole allowance, also those that
    end early, and decoding steps, prefilled and scored tokens count at their measured cost.

    Args:
        progress: where it is shown.
        phase: its name.
        costs: work of each unit without its decoding steps, in decoded tokens.
        finished: units that were written before; others may be among them.
        rows: how many rows the phase decodes.
        rows_done: how many of them were written before.
        allowance: most tokens of a row.
        unit: what a row is called.
    """

    def __init__(
        self,
        progress: Progress,
        phase: str,
        costs: Mapping[str, float],
        finished: Set[str],
        rows: int,
        rows_done: int,
        allowance: int,
        unit: str = "row",
    ) -> None:
        self._progress, self._allowance, self._unit = progress, allowance, unit
        self._rows, self._finished = rows, rows_done
        self._left = self._reported = 0.0  # work left in this unit; done and not reported yet
        self._decoded, self._seconds = 0, 0.0
        self._last = time.monotonic()
        steps = STEP_COST * allowance
        total = sum(cost + steps for cost in costs.values())
        done = sum(costs[name] + steps for name in costs.keys() & finished)
        self._phase_left = total - done
        progress.start(phase, round(total), done=round(done), unit="")

    def begin(self, cost: float) -> None:
        """A unit of this much work, besides its decoding steps, begins."""
        self._left = cost + STEP_COST * self._allowance

    def end(self) -> None:
        """The unit is written: all of its work is done."""
        self._advance("writing", self._left)

    def prefilled(self, tokens: int) -> None:
        """So many tokens were prefilled."""
        self._advance("prefilling", PREFILL_COST * tokens)

    def scored(self, cost: float) -> None:
        """Turns were scored, which cost as much as decoding so many tokens."""
        self._advance("scoring", cost)

    def decoded(self, tokens: int, lengths: list[int]) -> None:
        """So many tokens were decoded; rows of these lengths finished with them."""
        self._decoded += tokens
        self._finished += len(lengths)
        self._seconds += time.monotonic() - self._last
        unused = sum(self._allowance - length for length in lengths)
        self._advance("decoding", STEP_COST + tokens + unused)

    def _advance(self, doing: str, cost: float) -> None:
        cost = min(cost, self._left, self._phase_left)
        self._left -= cost
        self._phase_left -= cost
        self._reported += cost
        steps = int(self._reported)
        self._reported -= steps
        note = f"{self._finished}/{self._rows} {self._unit}s, {doing}"
        if self._seconds > 0:
            note += f", {self._decoded / self._seconds:.0f} tokens/s"
        self._progress.advance(steps, note)
        self._last = time.monotonic()
