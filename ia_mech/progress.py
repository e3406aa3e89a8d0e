"""What the main job tells whoever watches it."""

from typing import Protocol


class Progress(Protocol):
    """What :func:`ia_mech.collect.collect` tells while it works."""

    def start(self, phase: str, rows: int, done: int) -> None:
        """A phase begins: ``responses`` or ``user turns``, so many rows, so many of them done."""

    def advance(self, tokens: int, rows: int) -> None:
        """So many tokens were written and so many rows finished."""

    def say(self, line: str) -> None:
        """Something the user should know."""

    def stop(self) -> None:
        """The phase is over."""
