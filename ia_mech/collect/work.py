"""How the main job counts its work for the progress bar."""

import time

from ia_mech.display import Progress
from ia_mech.engine.plan import PREFILL_COST, STEP_COST


class Work:
    """The work of one phase in decoded tokens, and the rate of decoding.

    A unit's work is known before it is done: rows count as their whole allowance, also those that
    end early, and decoding steps, prefilled and scored tokens count at their measured cost.

    Args:
        progress: where it is shown.
        phase: its name.
        total: work of the whole phase without its decoding steps, in decoded tokens.
        units: how many units it has.
        rows: how many rows it decodes.
        done: share of the phase that was done before.
        allowance: most tokens of a row.
        unit: what a row is called.
    """

    def __init__(
        self,
        progress: Progress,
        phase: str,
        total: float,
        units: int,
        rows: int,
        done: float,
        allowance: int,
        unit: str = "row",
    ) -> None:
        self._progress, self._allowance, self._unit = progress, allowance, unit
        self._rows, self._finished = rows, round(done * rows)
        self._left = self._reported = 0.0  # work left in this unit; done and not reported yet
        self._decoded, self._seconds = 0, 0.0
        self._last = time.monotonic()
        total += units * STEP_COST * allowance
        progress.start(phase, round(total), done=round(done * total), unit="")

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
        cost = min(cost, self._left)
        self._left -= cost
        self._reported += cost
        steps = int(self._reported)
        self._reported -= steps
        note = f"{self._finished}/{self._rows} {self._unit}s, {doing}"
        if self._seconds > 0:
            note += f", {self._decoded / self._seconds:.0f} tokens/s"
        self._progress.advance(steps, note)
        self._last = time.monotonic()
