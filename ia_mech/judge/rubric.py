"""Rubrics: what a generated user turn can be. The built-in one, and those of files.

A change of meaning is a new :data:`VERSION`; a rubric's hash changes with any word, and with it
every cached verdict of a judge that reads it.
"""

import hashlib
import json
import re
import tomllib
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ia_mech.errors import UserError

VERSION = "2"
FOLLOW_UP = "follow_up"
NO_FOLLOW_UP = "no_follow_up"
CANNOT_ASSESS = "cannot_assess"
# Turns that repeat the conversation or speak as the assistant, in a refusal for instance.
OUT_OF_ROLE = ("repeats_query", "repeats_response", "speaks_as_assistant")

INSTRUCTIONS = """\
You annotate messages for a study. A language model was shown a user's query and an assistant's \
response, and then wrote what the user might say next. Say which category of the rubric below that \
user turn belongs to.
"""


_READ = {"strict": True, "extra": "forbid"}  # how files are taken


@dataclass(frozen=True)
class Example:
    """A worked example: why this turn, after this query and response, is of its category."""

    __pydantic_config__ = _READ
    query: str
    response: str
    turn: str
    why: str


@dataclass(frozen=True)
class Category:
    __pydantic_config__ = _READ
    name: str
    definition: str
    examples: tuple[Example, ...] = ()
    follow_up: bool = False  # whether its turns count as follow-ups


@dataclass(frozen=True)
class Rubric:
    """What judges label by.

    Attributes:
        version: its name, for records.
        instructions: what a language model is told that its task is.
        categories: what a turn can be; the last is ``cannot_assess``.
        order: which category is meant where a turn fits two; may be empty.
    """

    __pydantic_config__ = _READ
    version: str
    instructions: str
    categories: tuple[Category, ...]
    order: str = ""

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(category.name for category in self.categories)

    @cached_property
    def assessed(self) -> tuple[str, ...]:
        """The names but ``cannot_assess``."""
        return tuple(name for name in self.names if name != CANNOT_ASSESS)

    @cached_property
    def follow_ups(self) -> tuple[str, ...]:
        """The names of those that count as follow-ups."""
        return tuple(category.name for category in self.categories if category.follow_up)

    @cached_property
    def hash(self) -> str:
        """16 hex digits over every word."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def follow_up(self, category: str | None) -> bool | None:
        """Whether a category counts as a follow-up; None for none and for ``cannot_assess``."""
        return category in self.follow_ups if category in self.assessed else None

    def named(self, text: Any) -> str | None:
        """The category that a text names, in any case and with spaces or dashes; None if none."""
        name = re.sub(r"[\s_-]+", "_", text.strip().lower()) if isinstance(text, str) else None
        return name if name in self.names else None

    def record(self) -> dict[str, Any]:
        """What labels keep of it; a rubric of one's own is kept whole. See :func:`rubric_of`."""
        kept = {"version": self.version, "hash": self.hash}
        return kept if self.hash == BUILT_IN.hash else kept | {"own": asdict(self)}


_SOURDOUGH = (
    "Why does my sourdough loaf come out flat?",
    "Most flat loaves are over-proofed: the dough has used up its strength before it reaches the "
    "oven. Shorten the second rise to about two hours, and press a finger in: the dent should fill "
    "slowly. A cold oven does the rest of the damage, so preheat for 45 minutes.",
)
_TRAIN = (
    "A train covers 180 km in 2 hours and then 90 km in 1.5 hours. What is its average speed?",
    "The whole distance is 180 + 90 = 270 km and the whole time 2 + 1.5 = 3.5 hours. 270 / 3.5 is "
    "about 77.1, so the average speed is 77.1 km/h.",
)
_EMAIL = (
    "Help me write an email to my landlord about the broken heating.",
    "Happy to help. Has the heating failed in every room, and since when? With that I can write "
    "something firm but polite, and mention the legal deadline for repairs.",
)

CATEGORIES: tuple[Category, ...] = (
    Category(
        FOLLOW_UP,
        follow_up=True,
        definition="Could be what this user writes next: it reacts to the response or takes the "
        "exchange further, and is tied to something concrete in the response. It asks "
        "about a point in it, answers a question it put, objects, reports trying it, asks for a "
        "change or for more. "
        "Clumsy or cut-off wording doesn't count against it. What it takes up may stand in the "
        "query too, if the turn goes on from the answer instead of asking for it again.",
        examples=(
            Example(
                *_SOURDOUGH,
                "The dent fills up right away. Does that mean two hours is still too short?",
                "reports on the finger test that the response proposed and asks what follows",
            ),
            Example(
                *_TRAIN,
                "But why can't I just take the average of 90 and 60?",
                "questions the response's method; the two speeds follow from its numbers",
            ),
            Example(
                *_EMAIL,
                "only in the bedroom, since last tuesday",
                "answers the two questions that the response asked",
            ),
        ),
    ),
    Category(
        "repeats_query",
        "Says the query again: all of it or a part, word for word, paraphrased or lightly changed, "
        "as though the response had not been given.",
        (
            Example(
                *_SOURDOUGH,
                "Why is my sourdough bread coming out flat?",
                "the query in other words; nothing of the response is taken up",
            ),
            Example(
                *_TRAIN,
                "What is the average speed of the train?",
                "the last sentence of the query, already answered",
            ),
        ),
    ),
    Category(
        "repeats_response",
        "Repeats, paraphrases or continues the text of the response, with no move of the user's "
        "own, and doesn't answer or help as an assistant does; most of its words or figures are "
        "the response's.",
        (
            Example(
                *_SOURDOUGH,
                "Most flat loaves are over-proofed: the dough has used up its strength.",
                "copies the response's first sentence",
            ),
            Example(
                *_TRAIN,
                "So, the average speed of the train is 77.1 km/h.",
                "states the response's conclusion again",
            ),
        ),
    ),
    Category(
        "speaks_as_assistant",
        "Speaks as the assistant: answers, explains, writes or corrects the solution, gives advice "
        "or offers help, also where it takes words of the query or the response for that.",
        (
            Example(
                *_SOURDOUGH,
                "Here are three more tips: weigh your flour, use a hotter oven, and score the loaf "
                "just before baking.",
                "gives advice, which is the assistant's part",
            ),
            Example(
                *_EMAIL,
                "Dear Mr Okafor, I am writing to let you know that the heating in my flat has "
                "stopped working.",
                "writes the email that the user had asked the assistant for",
            ),
            Example(
                *_TRAIN,
                "I'm sorry for any confusion. As an AI language model, I can help you with another "
                "problem. How can I assist you?",
                "apologises and offers help as an assistant does",
            ),
        ),
    ),
    Category(
        "plans",
        "Plans or comments on how to answer instead of speaking: reasoning about what the user "
        "wants, notes to oneself, thinking tags or channel markers. A stray role marker of the "
        "chat template alone doesn't make one.",
        (
            Example(
                *_SOURDOUGH,
                "<think>\nThe user wants to know about proofing. I should first explain",
                "a thinking tag and a plan for an answer",
            ),
            Example(
                *_EMAIL,
                "We need to produce a user message that follows up. Perhaps the user would give "
                "details of the heating.",
                "comments on what should be written instead of writing it",
            ),
        ),
    ),
    Category(
        "new_topic",
        "A well-formed message of a user that nothing in the response explains: another subject, "
        "or another task or problem of the same kind as the query.",
        (
            Example(*_SOURDOUGH, "What is the capital of Mongolia?", "unrelated to bread"),
            Example(
                *_TRAIN,
                "A baker sells 40 rolls in the morning and twice as many in the afternoon. How "
                "many rolls does he sell?",
                "another word problem, with nothing of this one in it",
            ),
        ),
    ),
    Category(
        "generic",
        "An acknowledgement, thanks, closing or vague request that would fit any conversation; "
        "nothing in it belongs to this one.",
        (
            Example(*_SOURDOUGH, "Thanks, that was very helpful!", "fits any response"),
            Example(*_EMAIL, "Ok, great. Can you tell me more?", "fits any response"),
        ),
    ),
    Category(
        "degenerate",
        "Not a message: empty, looping, or without meaning as a whole, even where single phrases "
        "make sense: no reader could say in a sentence what its writer wants.",
        (
            Example(*_SOURDOUGH, "", "empty"),
            Example(*_TRAIN, "the the the the the the the the", "loops"),
            Example(
                *_SOURDOUGH,
                "Loaf the municipal of seventeen, whereby rises Tuesday harvested oven a violin.",
                "words without a sense",
            ),
        ),
    ),
    Category(
        CANNOT_ASSESS,
        "The judge can't tell: a language it doesn't read, a query or response that is missing or "
        "too garbled to relate the turn to. Not for cases that are merely close.",
        (
            Example(
                "",
                "",
                "And the second one?",
                "query and response are missing, so nothing can be related to them",
            ),
        ),
    ),
)

NAMES: tuple[str, ...] = tuple(category.name for category in CATEGORIES)
ASSESSED: tuple[str, ...] = tuple(name for name in NAMES if name != CANNOT_ASSESS)

_HEADINGS = {
    "follow_up": "follow-up",
    NO_FOLLOW_UP: "no follow-up",
    "repeats_query": "repeats query",
    "repeats_response": "repeats response",
    "speaks_as_assistant": "speaks as assistant",
    "plans": "plans",
    CANNOT_ASSESS: "can't assess",
}


def heading(category: str) -> str:
    """A category's short name for tables."""
    return _HEADINGS.get(category, category.replace("_", " "))


# Where a turn fits two categories, the first that applies.
ORDER = (
    "degenerate, if it has no meaning as a whole; then plans; then speaks_as_assistant; then "
    "repeats_query and repeats_response, whichever text it repeats; then generic; then "
    "follow_up, if something concrete in the response explains it; else new_topic. A turn "
    "of several parts is what dominates it; one that begins with a whole, sensible sentence and "
    "then breaks off or garbles is what that sentence is"
)


BUILT_IN = Rubric(VERSION, INSTRUCTIONS, CATEGORIES, ORDER)
# Of a function that says True or False of a turn.
YES_NO = Rubric(
    "yes-no",
    "Say whether the user turn is a follow-up.",
    (
        Category(FOLLOW_UP, "The function said True.", follow_up=True),
        Category(NO_FOLLOW_UP, "The function said False."),
        CATEGORIES[-1],
    ),
)


def rubric_of(record: dict[str, Any]) -> Rubric:
    """The rubric that labels were made by, from their record."""
    own = record.get("rubric", {}).get("own")
    return _built(own, "the labels' record") if own else BUILT_IN


def read_rubric(path: Path) -> Rubric:
    """The rubric of a TOML file.

    It has ``instructions``, optionally ``version`` and ``order``, and tables ``[[categories]]``:
    each a ``name``, a ``definition``, ``follow_up = true`` if its turns count as follow-ups, and
    optionally ``examples``, each with ``query``, ``response``, ``turn`` and ``why``. A category
    ``cannot_assess`` is added if it has none.

    Raises:
        UserError: the file can't be read, or isn't that.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # no UTF-8 and no TOML are ValueErrors
        raise UserError(f"{path} is no rubric ({error})", "see docs/judging.md") from None
    return _built({"version": path.stem} | content, str(path))


def _built(content: dict[str, Any], where: str) -> Rubric:
    from pydantic import TypeAdapter, ValidationError  # it takes a while

    try:  # as JSON, whose lists may become tuples
        rubric = TypeAdapter(Rubric).validate_json(json.dumps(content, default=str))
    except ValidationError as error:
        found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise UserError(f"{where}: {', '.join(found[:3])}", "see docs/judging.md") from None
    if CANNOT_ASSESS not in rubric.names:
        rubric = replace(rubric, categories=(*rubric.categories, CATEGORIES[-1]))
    names, follow_ups = rubric.names, rubric.follow_ups
    said = [rubric.instructions, *(category.definition for category in rubric.categories)]
    if wrong := [name for name in names if not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", name)]:
        problem = f"has a category {wrong[0]!r}: use small letters, digits and underscores"
    elif len({*names}) < len(names):
        problem = "has a category twice"
    elif not 0 < len(follow_ups) < len(rubric.assessed) or CANNOT_ASSESS in follow_ups:
        problem = "needs categories that count as follow-ups and others that don't"
    elif not all(map(str.strip, said)):
        problem = "needs instructions, and a definition of each category"
    elif {*names} & {"all", "failed", "decoy"}:
        problem = "has a category named all, failed or decoy"
    else:
        return rubric
    raise UserError(f"{where} {problem}", "see docs/judging.md")
