"""How the main job counts its work for the progress bar: tokens read and written, and rows."""

import threading
import time
from collections.abc import Callable, Collection, Iterable

from ia_mech.display import Progress

FIRST = 8  # responses after which it is said that most of them are unfinished


class PhaseProgress:
    """One phase: contexts to prefill and rows to decode, each at its longest.

    A row that ends early counts as its whole allowance then. Where responses may be drawn again,
    the total has room for the most draws from the start, so that the bar never goes back.
    Workers report what they do of their parts, several at once.

    Args:
        sizes: of every part its rows, and the tokens of its contexts.
        todo: the parts that weren't written before.
        allowance: most tokens of a row.
        draws: most draws of each row.
    """

    def __init__(
        self,
        progress: Progress,
        phase: str,
        unit: str,
        sizes: dict[str, tuple[int, int]],
        todo: Collection[str],
        allowance: int,
        draws: int = 1,
    ) -> None:
        self._progress, self._unit = progress, unit
        work = {
            name: (rows, draws * (rows * allowance + own)) for name, (rows, own) in sizes.items()
        }
        self._parts = {name: work[name] for name in todo}
        self._rows, total = (sum(each) for each in zip(*work.values(), strict=True))
        left, tokens = (sum(each) for each in zip(*self._parts.values(), strict=True))
        self._ended, self._again, self._drawn = self._rows - left, 0, 0
        self._allowance, self._draws, self._written, self._unfinished = allowance, draws, 0, 0
        self._warned = draws == 1  # unfinished responses are wanted, too
        self._fewer = False
        self._begun, self._reporting = time.monotonic(), threading.Lock()
        self.devices: Callable[[], str] = str  # says how many compute, where there may be several
        progress.start(phase, total, done=total - tokens, unit="")

    def begin(self, name: str) -> "PartProgress":
        """A worker begins a part."""
        return PartProgress(self, self._parts.pop(name)[1])

    def pass_over(self, names: Iterable[str]) -> None:
        """These parts are written; those that no worker began, by other processes."""
        for name in set(names) & self._parts.keys():
            rows, tokens = self._parts.pop(name)
            self.report("writing", tokens, ended=rows)

    def fewer(self, rows: int) -> None:
        """So many rows turn out not to be there."""
        with self._reporting:
            self._rows, self._fewer = self._rows - rows, True

    def responded(self, written: int, unfinished: int) -> None:
        """So many responses were written, of which some are unfinished. If most are, say so once,
        while there is time to stop."""
        with self._reporting:
            self._written += written
            self._unfinished += unfinished
            few = self._written < min(FIRST, self._rows)
            if self._warned or few or 2 * self._unfinished <= self._written:
                return
            self._warned = True
            self._progress.say(
                f"note: {self._unfinished} of the first {self._written} responses didn't end "
                f"within {self._allowance} tokens. They are sampled again, at most {self._draws} "
                "times each; a query without enough finished responses is left out. You can stop "
                "here and give a larger --max-response-tokens, in another --out"
            )

    def report(
        self, doing: str, tokens: int, drawn: int = 0, ended: int = 0, again: int = 0
    ) -> None:
        """Workers have done so many tokens more, drew so many, so many rows ended, and so many are
        sampled again."""
        with self._reporting:
            self._drawn += drawn
            self._ended += ended
            self._again += again
            of = "" if self._fewer else f"/{self._rows}"  # how many there are isn't known before
            note = f"{min(self._ended, self._rows)}{of} {self._unit}s, "
            note += f"{self._again} sampled again, {doing}" if self._again else doing
            if self._drawn and doing == "decoding":
                note += f", {self._drawn / (time.monotonic() - self._begun):.0f} tokens/s"
            self._progress.advance(tokens, note + self.devices())


class PartProgress:
    """What one worker has done of a part of a ``phase``; ``keep`` takes the batches that it has
    finished, where those of an interrupted part are kept."""

    def __init__(self, phase: PhaseProgress, tokens: int) -> None:
        self.phase, self._left, self._again = phase, tokens, False
        self.keep: Callable[[list], None] = lambda batches: None
        self.responded = phase.responded

    def prefilled(self, tokens: int) -> None:
        """So many tokens of contexts were prefilled."""
        self._report("prefilling", tokens)

    def decoded(self, rows: int, ended: int, spared: int) -> None:
        """So many rows drew a token, and so many ended, with ``spared`` tokens that they might have
        written."""
        self._report("decoding", rows + spared, rows, 0 if self._again else ended)

    def fewer(self, rows: int, tokens: int) -> None:
        """So many rows, with so many tokens, turn out not to be there."""
        self.phase.fewer(rows)
        self._report("decoding", tokens)

    def redraw(self, rows: int) -> None:
        """So many responses are drawn now to take the places of others."""
        self._again = True
        self.phase.report("decoding", 0, again=rows)

    def end(self) -> None:
        """The part is written: all of its work is done."""
        self._report("writing", self._left)

    def _report(self, doing: str, tokens: int, drawn: int = 0, ended: int = 0) -> None:
        tokens = min(tokens, self._left)
        self._left -= tokens
        self.phase.report(doing, tokens, drawn, ended)
