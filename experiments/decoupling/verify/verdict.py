"""What a verifier says of a response."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Whether a response is right, and what that rests on.

    Attributes:
        verifier: ``maths`` or ``instructions``.
        correct: it is; None if that couldn't be told.
        why: in a few words.
        answer: what was read off the response, for maths.
        gold: what it was compared with, for maths.
        instructions: their ids.
        followed: of each instruction, whether the response follows it; None if that couldn't be
            told.
        followed_loosely: the same of the response without its first line, last line or asterisks,
            whichever does best.
    """

    verifier: str
    correct: bool | None
    why: str
    answer: str | None = None
    gold: str | None = None
    instructions: tuple[str, ...] = ()
    followed: tuple[bool | None, ...] = ()
    followed_loosely: tuple[bool | None, ...] = ()

    @property
    def correct_loosely(self) -> bool | None:
        """All instructions are followed loosely; for maths, the same as ``correct``."""
        if not self.instructions or self.correct is None:
            return self.correct
        return all(self.followed_loosely)
