"""How the main job counts its work for the progress bar."""

import time

from ia_mech.display import Progress


class Work:
    """Rows of one phase, and the rate at which their tokens are decoded.

    Args:
        progress: where it is shown.
        phase, total, done, unit: as for :meth:`ia_mech.display.Progress.start`.
    """

    def __init__(self, progress: Progress, phase: str, total: int, done: int, unit: str) -> None:
        self._progress, self._tokens, self._begun = progress, 0, time.monotonic()
        progress.start(phase, total, done=done, unit=unit)

    def advance(self, tokens: int, rows: int) -> None:
        """``tokens`` more were decoded and ``rows`` more are finished."""
        self._tokens += tokens
        rate = self._tokens / max(time.monotonic() - self._begun, 1e-9)
        self._progress.advance(rows, f"{rate:.0f} tokens/s")
