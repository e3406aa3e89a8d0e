"""The rubric: what a generated user turn can be. The one source of truth for every judge.

A change of meaning is a new :data:`VERSION`; :func:`rubric_hash` changes with any word, and with it
every cached verdict of a judge that reads the rubric.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

VERSION = "1"
GENUINE = "genuine_follow_up"
CANNOT_ASSESS = "cannot_assess"


@dataclass(frozen=True)
class Example:
    """A worked example: why this turn, after this query and response, is of its category."""

    query: str
    response: str
    turn: str
    why: str


@dataclass(frozen=True)
class Category:
    name: str
    definition: str
    examples: tuple[Example, ...]


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
        GENUINE,
        "Could be what this user writes next: it reacts to the response or takes the exchange "
        "further, and is tied to something concrete in the response. It asks about a point in it, "
        "answers a question it put, objects, reports trying it, asks for a change or for more. "
        "Clumsy or cut-off wording doesn't count against it. What it takes up may stand in the "
        "query too, if the turn goes on from the answer instead of asking for it again.",
        (
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
        "prompt_restatement",
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
        "assistant_restatement",
        "Repeats, paraphrases or continues the text of the response, with no move of the user's "
        "own; most of its words or figures are the response's.",
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
        "identity_leakage",
        "Speaks as the assistant: answers, explains, writes or corrects the solution, gives advice "
        "or offers help, in new words rather than the response's.",
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
        "meta_planning",
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
            Example(
                *_SOURDOUGH,
                "What is the capital of Mongolia?",
                "unrelated to bread",
            ),
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
    "genuine_follow_up": "genuine",
    "prompt_restatement": "repeats query",
    "assistant_restatement": "repeats response",
    "identity_leakage": "speaks as assistant",
    "meta_planning": "plans",
    CANNOT_ASSESS: "can't assess",
}


def heading(category: str) -> str:
    """A category's short name for tables."""
    return _HEADINGS.get(category, category.replace("_", " "))


# Where a turn fits two categories, the first that applies.
ORDER = (
    "degenerate, if it has no meaning as a whole; then meta_planning; then prompt_restatement and "
    "assistant_restatement, whichever text it repeats; then identity_leakage; then generic; then "
    "genuine_follow_up, if something concrete in the response explains it; else new_topic. A turn "
    "of several parts is what dominates it; one that begins with a whole, sensible sentence and "
    "then breaks off or garbles is what that sentence is"
)


def rubric_hash() -> str:
    """16 hex digits over every word of the rubric."""
    content = [VERSION, ORDER, [asdict(category) for category in CATEGORIES]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
