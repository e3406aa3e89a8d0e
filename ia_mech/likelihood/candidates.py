"""Turns that the genuine one is compared with in the same context."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from ia_mech.data.conversations import Conversation
from ia_mech.errors import UserError
from ia_mech.likelihood.swaps import SwapSource
from ia_mech.untrusted import parse_json

REFERENCE, QUERY, RESPONSE, OTHER, CLOSING = (
    "reference",
    "query",
    "response",
    "other_reference",
    "closing",
)
NAMES = (REFERENCE, QUERY, RESPONSE, OTHER, CLOSING)
CLOSING_TEXT = "Thanks, that is all I needed."


@dataclass(frozen=True)
class Candidate:
    """A user turn that might follow.

    Attributes:
        name: what kind it is: one of :data:`NAMES`, or the user's own.
        text: without white space around it, which the template's header would merge with.
        swap_source: id of the conversation that it was taken from, if that is another one.
    """

    name: str
    text: str
    swap_source: str | None = None


class OwnCandidates:
    """The user's own candidates: some for every context, some for one conversation.

    Attributes:
        sha256: of the file.
    """

    def __init__(
        self, everywhere: list[Candidate], of: dict[str, list[Candidate]], sha256: str
    ) -> None:
        self._everywhere, self._of, self.sha256 = everywhere, of, sha256

    @classmethod
    def read(cls, path: str | Path) -> "OwnCandidates":
        """From a JSONL file: ``text``, a ``name``, and perhaps the ``id`` of a conversation.

        Raises:
            UserError: a file or a line that can't be used, or two of one name for one context.
        """
        try:
            content = Path(path).read_bytes()
            lines = content.decode("utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise UserError(f"{path} can't be read ({reason})", "give a JSONL file") from None
        everywhere: list[Candidate] = []
        of: defaultdict[str, list[Candidate]] = defaultdict(list)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                candidate, conversation = _parse(line, f"{path}, line {number}")
                (everywhere if conversation is None else of[conversation]).append(candidate)
        if not everywhere and not of:
            raise UserError(
                f"{path} holds no candidate", 'give lines such as {"name": "why", "text": "Why?"}'
            )
        for own in [[], *of.values()]:
            names = [c.name for c in (*everywhere, *own)]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise UserError(
                    f"{path} has two candidates {twice!r} for one context",
                    "give each a name of its own",
                )
        return cls(everywhere, dict(of), hashlib.sha256(content).hexdigest())

    def check(self, known: set[str], references: int) -> None:
        """Refuse candidates that a run can't use.

        Args:
            known: ids of its conversations.
            references: how many of these have a reference turn.

        Raises:
            UserError: there is no reference, or some are of conversations that it hasn't.
        """
        if not references:
            raise UserError(
                "--candidates are compared with what users really said next, and the data doesn't "
                "say that",
                "give data with a later user turn (--followup-column), or leave --candidates out",
            )
        unknown = sorted(set(self._of) - known)
        if unknown:
            raise UserError(
                f"--candidates names conversations that the run hasn't: {', '.join(unknown[:3])}"
                + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""),
                "give ids of this dataset (and --limit all)",
            )

    def of(self, conversation: str) -> list[Candidate]:
        """Those for a conversation, by its id."""
        return [*self._everywhere, *self._of.get(conversation, [])]


def _parse(line: str, place: str) -> tuple[Candidate, str | None]:
    remedy = 'write {"name": "why", "text": "Why?"}'
    row = parse_json(line, place, remedy)
    if not isinstance(row, dict):
        raise UserError(f"{place} is not a JSON object", remedy)
    unknown = sorted(set(row) - {"name", "text", "id"})
    if unknown:
        raise UserError(f"{place} has the key {unknown[0]!r}", "use name, text and id")
    if type(row.get("id")) is int:  # and no bool
        row["id"] = str(row["id"])
    for key, needed in (("name", True), ("text", True), ("id", False)):
        value = row.get(key)
        if not (value is None and not needed) and not (isinstance(value, str) and value.strip()):
            raise UserError(f"{place} has no {key} that is text", "give one to each")
    if not row["name"].isprintable():
        raise UserError(f"{place}: {row['name']!r} can't be printed", "name it with plain text")
    if row["name"] in NAMES:
        raise UserError(
            f"{place}: {row['name']!r} is a candidate that every context has",
            f"name yours otherwise than {', '.join(NAMES)}",
        )
    return Candidate(row["name"], row["text"].strip()), row.get("id")


def rivals(
    conversation: Conversation, source: SwapSource | None, own: OwnCandidates | None
) -> list[Candidate]:
    """What a conversation's reference turn is compared with.

    The query repeated, the response repeated, another conversation's reference, a generic closing,
    and the user's own. Empty texts, the reference itself and duplicates are dropped silently.
    """
    found = [
        Candidate(QUERY, conversation.query.strip()),
        Candidate(RESPONSE, (conversation.response or "").strip()),
        Candidate(CLOSING, CLOSING_TEXT),
        *(own.of(conversation.id) if own is not None else []),
    ]
    if source is not None and source.reference is not None:
        found.insert(2, Candidate(OTHER, source.reference.strip(), source.id))
    said, kept = {"", (conversation.reference or "").strip()}, []
    for candidate in found:
        if candidate.text not in said:
            said.add(candidate.text)
            kept.append(candidate)
    return kept
