"""Where a context's response begins among its tokens."""

import math
from collections import Counter

import numpy as np

from ia_mech.run import Run


def response_starts(run: Run) -> list[int]:
    """``[contexts]`` index of each response's first token.

    Counting back ``response_tokens`` from its end is right for given responses. A written one has
    as many tokens as were sampled, white space at its ends and marks included, which the context
    doesn't hold; it starts behind the tokens that the template writes after the query. An empty one
    would start where the tail does.
    """
    own, tail = run.contexts, len(run.record["identity"]["chat"]["tail_ids"])
    columns = [own[name].tolist() for name in ("positions", "token_ids", "response_tokens")]
    after = [_after_query(at, ids) for at, ids, _ in zip(*columns, strict=True)]
    opener = _opener(after, [messages[-1]["content"] for messages in own["messages"]])
    starts = []
    for at, ids, response_tokens in zip(*columns, strict=True):
        end, query = index_of(at, "response_end"), index_of(at, "query_end")
        if end is None:
            starts.append(len(ids) - tail)
        elif opener and _after_query(at, ids)[: len(opener)] == opener:
            starts.append(min(query + 1 + len(opener), end))
        else:
            starts.append(min(max(end - response_tokens, -1 if query is None else query) + 1, end))
    return starts


def _after_query(at: dict, ids: np.ndarray) -> list[int]:
    """The tokens behind the query; none if it is empty."""
    query = index_of(at, "query_end")
    return [] if query is None else ids[query + 1 :].tolist()


def _opener(after: list[list[int]], responses: list[str]) -> list[int]:
    """The tokens that a template writes between query and response; none if it can't be told.

    They are the same in every context, and contexts whose responses begin with different characters
    differ from there on. One context per first character: most of them agree just as far.
    """
    said = [text.strip() for text in responses]
    unlike = {text[0]: ids for ids, text in zip(after, said, strict=True) if text}
    found: list[int] = []
    while len(unlike) > 1:
        tokens = Counter(ids[len(found)] for ids in unlike.values() if len(ids) > len(found))
        token, count = tokens.most_common(1)[0] if tokens else (0, 0)
        if 2 * count <= len(unlike):
            break
        found.append(token)
    return found


def index_of(at: dict, name: str) -> int | None:
    """Where a context has a position; None if it lacks it."""
    value = at.get(name)
    return None if value is None or math.isnan(value) else int(value)
