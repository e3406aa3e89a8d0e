"""The contexts of the two controls: versions of one response, and the assistant's header."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.changes import sentences
from experiments.given_turns import drawn
from experiments.reaction.read import Arm, Query
from ia_mech.data.conversations import Conversation
from ia_mech.engine.sampling import stream_key
from ia_mech.errors import UserError
from ia_mech.run import Run
from ia_mech.untrusted import parse_json

TRIES = 50  # permutations drawn per version that is wanted


def shuffled(text: str, count: int, rng: np.random.Generator) -> list[str]:
    """Up to ``count`` different orders of a text's sentences, its own perhaps among them.

    White space between sentences stays where it is.
    """
    pieces = sentences(text)
    bare = [piece.rstrip() for piece in pieces]
    gaps = [piece[len(kept) :] for piece, kept in zip(pieces, bare, strict=True)]
    found: dict[str, None] = {}
    for _ in range(TRIES * count):
        order = rng.permutation(len(bare))
        made = "".join(bare[i] + gap for i, gap in zip(order, gaps, strict=True)).rstrip()
        found.setdefault(made)
        if len(found) == count:
            break
    return list(found)


def same_content(
    arm: Arm,
    count: int,
    queries: int,
    seed: int,
    paraphrases: Mapping[str, Sequence[str]] | None = None,
) -> tuple[list[Conversation], list[str]]:
    """``count`` versions of one response to each of some queries.

    Args:
        arm: the runs' own responses.
        count: K′.
        queries: most queries; which ones is drawn.
        seed: of all draws.
        paraphrases: texts by context id, in place of shuffled sentences.

    Returns:
        The conversations, and what a reader has to know.

    Raises:
        UserError: no response has so many versions.
    """
    versions: dict[str, list[str]] = {}
    for query in arm.queries:
        rng = np.random.default_rng([*stream_key(seed, query.source, 0), 1])
        for k in rng.permutation(len(query.responses)):
            if paraphrases is not None:
                made = list(dict.fromkeys(paraphrases.get(query.contexts[k], ())))[:count]
            else:
                made = shuffled(query.responses[k], count, rng)
            if len(made) == count:
                versions[query.source] = made
                break
    if not versions:
        kind = "paraphrases" if paraphrases is not None else "orders of sentences"
        raise UserError(
            f"no response has {count} different {kind}",
            "lower --control-responses, or leave the control out with --control-queries 0",
        )
    names = [query.source for query in arm.queries if query.source in versions]
    kept = drawn(names, queries, seed)
    notes = []
    if len(names) < len(arm.queries):
        notes.append(
            f"{len(arm.queries) - len(names)} queries have no response with {count} versions that "
            "say the same; they are left out of that comparison."
        )
    of = {query.source: query for query in arm.queries if query.source in kept}
    conversations = [
        conversation_of(query, k, text, "same_content")
        for source, query in of.items()
        for k, text in enumerate(versions[source])
    ]
    return conversations, notes


def under_assistant(
    arm: Arm, count: int, queries: int, seed: int, run: Run
) -> tuple[list[Conversation], list[str]]:
    """The first ``count`` responses to some queries, with the assistant's header after them.

    Returns:
        The conversations, and what a reader has to know of the chat format of the ``run``.
    """
    kept = drawn([query.source for query in arm.queries], queries, seed)
    chat, notes = run.record["identity"]["chat"], []
    if str(chat["header_ids"][0]) in chat["response_stop_ids"]:
        notes.append(
            "the token that opens a user turn is also one that ends this model's responses: the "
            "user's and the assistant's header differ in more than the role."
        )
    conversations = [
        replace(
            conversation_of(query, k, query.responses[k], "header_assistant"), header="assistant"
        )
        for query in arm.queries
        if query.source in kept
        for k in range(count)
    ]
    return conversations, notes


def conversation_of(query: Query, index: int, response: str, kind: str) -> Conversation:
    """The query with a response, as a conversation of its source that is perturbed in a kind of
    way, so that no estimate pools it with the others."""
    _, _, source = query.source.partition("\x1f")
    messages = (*query.messages, {"role": "assistant", "content": response})
    return Conversation(
        id=f"{source}/{kind}/r{index}",
        source_id=source,
        dataset=query.dataset,
        messages=messages,
        perturbation=kind,
        response_index=index,
    )


def read_paraphrases(file: Path, arm: Arm) -> dict[str, list[str]]:
    """Texts by context id, from JSONL such as ``{"id": "open-03/r0", "versions": ["…", "…"]}``.

    Raises:
        UserError: no such file, not such JSON, or ids that the runs lack.
    """
    remedy = 'write lines such as {"id": "open-03/r0", "versions": ["…", "…"]}'
    if not file.is_file():
        raise UserError(f"no file {file}", "give --paraphrases an existing file")
    known = {id_ for query in arm.queries for id_ in query.contexts}
    found: dict[str, list[str]] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        place = f"{file.name} line {number}"
        if not line.strip():
            continue
        row = parse_json(line, place, remedy)
        texts = row.get("versions") if isinstance(row, dict) else None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"{place} has no list of texts called versions", remedy)
        if row.get("id") not in known:
            raise UserError(
                f"{place}: the runs have no context {row.get('id')!r}",
                f"give ids of their contexts, such as {min(known)}",
            )
        found[row["id"]] = texts
    return found
