"""Wordings of one response, for the control of reaction bits.

K′ texts say what one response says, in other words. If turns tell K′ responses apart better than
K′ wordings of one response, they depend on what responses say, not only on how they say it. The
subject model writes the wordings, asked as a user would ask. How close wordings are to their
response is measured, since a weak model drops content and a lazy one keeps the wording.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ia_mech.data.conversations import Conversation
from ia_mech.likelihood.copying import stems
from ia_mech.run.queries import Query, queries_of
from ia_mech.run.sources import split_source

if TYPE_CHECKING:
    from ia_mech.run import Run

REQUESTED = "to_reword"  # the name of contexts that ask for a wording
REQUEST = """\
Write the text below again in other words. Say all that it says, with the same facts, names and \
numbers, in the same order and at about the same length. Add nothing, and answer with the new text \
alone.

{text}"""
SHORTEST, LONGEST = 0.5, 2.0  # times the original's length, in words
LEAST_KEPT, MOST_COPIED = 0.5, 0.8  # shares of the original's content words, and of its trigrams
LONG = 4  # fewest letters of a content word

Wordings = dict[str, tuple[int, list[str]]]  # source → which response, and texts that say the same


def choose_response(query: Query, among: Sequence[int], seed: int) -> int:
    """Draw which response to a query, ``among`` these, is reworded."""
    from ia_mech.engine.sampling import stream_key

    rng = np.random.default_rng([*stream_key(seed, query.source, 0), 1])
    return int(rng.choice(among))


def rewording_requests(reworded: Mapping[str, int], queries: Sequence[Query]) -> list[Conversation]:
    """Conversations in which a user asks for one response to each query in other words.

    Args:
        reworded: source → which response.
        queries: with these sources.
    """
    texts = [REQUEST.format(text=query.responses[reworded[query.source]]) for query in queries]
    return [
        perturbed_conversation(query, None, [{"role": "user", "content": text}], REQUESTED)
        for query, text in zip(queries, texts, strict=True)
    ]


def perturbed_conversation(
    query: Query, index: int | None, messages: Sequence[dict], kind: str
) -> Conversation:
    """Messages as a conversation with a query's source. It is marked as perturbed by ``kind``, so
    that no estimate pools it with unperturbed ones."""
    _, source = split_source(query.source)
    return Conversation(
        id=f"{source}/{kind}" if index is None else f"{source}/{kind}/r{index}",
        source_id=source,
        dataset=query.dataset,
        messages=tuple(messages),
        perturbation=kind,
        response_index=index,
    )


def usable_wordings(
    run: "Run", reworded: Mapping[str, int], queries: Sequence[Query], count: int
) -> Wordings:
    """The first ``count`` usable wordings of each response; responses with fewer are left out.

    A wording isn't usable if it was cut off, equals another, has less than half or more than twice
    as many words as the response, keeps less than half of its content words, or copies most of its
    wording.

    Args:
        run: a run over :func:`rewording_requests`, with several responses to each.
        reworded: source → which response.
        queries: with these sources.
        count: K′.
    """
    answers = {query.source: query for query in queries_of([run], REQUESTED)}
    found: Wordings = {}
    for query in queries:
        k, answer = reworded[query.source], answers[query.source]
        whole = zip(answer.responses, answer.complete, strict=True)
        texts = distinct_texts([text for text, complete in whole if complete], query.responses[k])
        kept = [text for text in texts if is_usable(text, query.responses[k])]
        if len(kept) >= count:
            found[query.source] = k, kept[:count]
    return found


def is_usable(text: str, original: str) -> bool:
    """Whether a text has about the original's length, keeps its content and doesn't copy it."""
    close = closeness(text, original)
    long = SHORTEST <= close["length ratio"] <= LONGEST
    copied = close["trigrams kept"] > MOST_COPIED  # False for NaN: less than three words
    return long and close["words kept"] >= LEAST_KEPT and not copied


def distinct_texts(texts: Sequence[str], original: str) -> list[str]:
    """Texts without repetitions, and without the original."""
    stripped = dict.fromkeys(text.strip() for text in texts)
    return [text for text in stripped if text and text != original.strip()]


def closeness(text: str, original: str) -> dict[str, float]:
    """How close a text is to another.

    Returns:
        ``words kept``, the share of the original's different content words that the text has
        (stems of words of four letters and more, numbers, and words in other scripts), from 0 to 1;
        ``trigrams kept``, the share of its runs of any three words, which show the wording;
        ``length ratio``, the text's number of words over its own. NaN where the original has none.
    """
    words, original_words = stems(text), stems(original)

    def kept(wanted: set, there: set) -> float:
        return len(wanted & there) / len(wanted) if wanted else np.nan

    return {
        "words kept": kept(_content_words(original_words), set(words)),
        "trigrams kept": kept(_trigrams(original_words), _trigrams(words)),
        "length ratio": len(words) / len(original_words) if original_words else np.nan,
    }


def _content_words(words: Sequence[str]) -> set[str]:
    return {one for one in words if len(one) >= LONG or not (one.isascii() and one.isalpha())}


def _trigrams(words: Sequence[str]) -> set[tuple[str, ...]]:
    return set(zip(words, words[1:], words[2:], strict=False))
