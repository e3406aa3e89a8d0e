"""How the main job counts its work for the progress bar: rows, and tokens read and written."""

import time

from ia_mech.display import Progress


class PhaseProgress:
    """One phase: contexts to prefill and rows to decode, each at its longest.

    A row that ends early counts as its whole allowance then, so the bar never goes back.

    Args:
        progress: where it is shown.
        phase: its name.
        parts: of each part still to be done, its rows and the tokens of its contexts.
        done: the same of all parts that were written before, together.
        allowance: most tokens of a row.
        unit: what a row is called.
    """

    def __init__(
        self,
        progress: Progress,
        phase: str,
        parts: dict[str, tuple[int, int]],
        done: tuple[int, int],
        allowance: int,
        unit: str,
    ) -> None:
        self._progress, self._allowance, self._unit = progress, allowance, unit
        # Of each part its rows, and the tokens of rows and contexts.
        self._parts = {name: (rows, rows * allowance + own) for name, (rows, own) in parts.items()}
        self._rows = done[0] + sum(rows for rows, _ in parts.values())
        self._ended, self._left = done[0], 0
        self._decoded, self._seconds = 0, 0.0
        self._last = time.monotonic()
        before = done[0] * allowance + done[1]
        total = before + sum(tokens for _, tokens in self._parts.values())
        progress.start(phase, total, done=before, unit="")

    def begin(self, name: str) -> None:
        """A part begins."""
        self._left = self._parts[name][1]
        self._last = time.monotonic()

    def pass_over(self, name: str) -> None:
        """Another process has written the part."""
        rows, self._left = self._parts[name]
        self._ended += rows
        self.end()

    def end(self) -> None:
        """The part is written: all of its work is done."""
        self._advance("writing", self._left)

    def prefilled(self, tokens: int) -> None:
        """So many tokens of contexts were prefilled."""
        self._advance("prefilling", tokens)

    def scored(self, tokens: int) -> None:
        """So many tokens of given turns were scored, which the bar doesn't count."""
        self._advance("scoring", 0)

    def decoded(self, step: int, rows: int, ended: int) -> None:
        """All rows of a batch drew their token number ``step``, and with it so many ended."""
        self._decoded += rows
        self._ended += ended
        self._seconds += time.monotonic() - self._last
        self._advance("decoding", rows + ended * (self._allowance - step - 1))

    def _advance(self, doing: str, tokens: int) -> None:
        tokens = min(tokens, self._left)
        self._left -= tokens
        note = f"{min(self._ended, self._rows)}/{self._rows} {self._unit}s, {doing}"
        if self._seconds > 0:
            note += f", {self._decoded / self._seconds:.0f} tokens/s"
        self._progress.advance(tokens, note)
        self._last = time.monotonic()
