"""Progress of probe commands at a terminal."""

import sys

from tqdm import tqdm


class Bar:
    """Steps done, their rate, and the time left; one bar per phase."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def start(self, phase: str, steps: int) -> None:
        self.stop()
        # Redrawn twice a second at a terminal; a log file gets a line every ten seconds.
        self._bar = tqdm(
            total=steps,
            desc=phase,
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 10,
            bar_format="{desc}: {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} "
            "[{elapsed}, {remaining} left, {rate_fmt}]",
        )

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
