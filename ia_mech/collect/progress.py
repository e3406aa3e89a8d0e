"""How the main job counts its work for the progress bar: in tokens, every row at its longest."""

import time

from ia_mech.display import Progress


class Work:
    """One phase: rows to decode, and the rate of decoding.

    A row that ends early counts as its whole allowance then, so that the bar never goes back.

    Args:
        progress: where it is shown.
        phase: its name.
        rows: how many it decodes.
        done: how many of them were written before.
        allowance: most tokens of a row.
        unit: what a row is called.
    """

    def __init__(
        self, progress: Progress, phase: str, rows: int, done: int, allowance: int, unit: str
    ) -> None:
        self._progress, self._allowance, self._unit = progress, allowance, unit
        self._rows, self._ended, self._left = rows, done, 0
        self.tokens, self.seconds = 0, 0.0  # of decoding
        self._last = time.monotonic()
        progress.start(phase, rows * allowance, done=done * allowance, unit="")

    def begin(self, rows: int) -> None:
        """A part of so many rows begins."""
        self._left = rows * self._allowance
        self._last = time.monotonic()

    def end(self) -> None:
        """The part is written: all of its work is done."""
        self._advance("writing", self._left)

    def prefilled(self, tokens: int) -> None:
        """So many tokens were prefilled."""
        self._advance("prefilling", 0)

    def scored(self, tokens: int) -> None:
        """So many tokens were scored."""
        self._advance("scoring", 0)

    def decoded(self, step: int, rows: int, ended: int) -> None:
        """All rows of a batch drew their token number ``step``, and with it so many ended."""
        self.tokens += rows
        self._ended += ended
        self.seconds += time.monotonic() - self._last
        self._advance("decoding", rows + ended * (self._allowance - step - 1))

    def _advance(self, doing: str, tokens: int) -> None:
        tokens = min(tokens, self._left)
        self._left -= tokens
        note = f"{min(self._ended, self._rows)}/{self._rows} {self._unit}s, {doing}"
        if self.seconds > 0:
            note += f", {self.tokens / self.seconds:.0f} tokens/s"
        self._progress.advance(tokens, note)
        self._last = time.monotonic()
