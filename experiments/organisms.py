"""Sequences that teach a model user turns: written ones, or a model organism's.

A sequence holds the ids of a context as the main job makes them, and the user turn as it is
tokenized in the dialogue. Labels are the ids of the turn, and :data:`IGNORED` elsewhere: the
convention of ``transformers`` and ``trl``, whose trainers take such sequences as they are.

A model organism is trained on turns that quote a response to the query. A share of the turns quotes
the response that it follows; each other one quotes a random one of all responses, independently of
the one it follows. :func:`information` computes what a turn then tells about its response. Only
where that is 0 do turns teach the form of a follow-up and nothing about the response.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.arms import conversations_of
from ia_mech.chat.format import ChatFormat
from ia_mech.cli import shell_word
from ia_mech.collect.identity import build_chat, eos_ids
from ia_mech.data.conversations import Conversation, open_conversations
from ia_mech.engine.sampling import stream_key
from ia_mech.errors import UserError
from ia_mech.models.load import ModelSpec, load_tokenizer_and_config, recall
from ia_mech.rates.load import open_runs
from ia_mech.run import Run, layout
from ia_mech.run.queries import subsample
from ia_mech.run.sources import source_key
from ia_mech.settings import Settings

IGNORED = -100
FRAMES = (
    'You say "{}". Can you explain what that means?',
    'You wrote "{}". Why is that so?',
    'When you say "{}", what do you have in mind?',
    'I stumble over "{}". Could you say more about it?',
)
LENGTHS = (3, 4, 5)  # words of a quote
_BREAK = re.compile(r'[\n.!?"“”*`#|]+')  # a quote doesn't reach across
_WORD = re.compile(r"[^\W_][\w'’-]*")
_FORM = re.compile("|".join(re.escape(frame.partition("{}")[0]) + '([^"]+)"' for frame in FRAMES))


# -- what comes in --------------------------------------------------------------------------------


def read_conversations(data: str) -> tuple[list[Conversation], Run | None]:
    """Conversations with a response, of a run or of a dataset as the main job names it.

    Raises:
        UserError: neither a finished run nor a dataset; no conversation has a response.
    """
    if (Path(data) / layout.RUN).is_file():
        (run,) = open_runs([data])
        indices = [None if pd.isna(k) else int(k) for k in run.contexts["response_index"]]
        several = zip(conversations_of(run.contexts), indices, strict=True)
        return [replace(one, response_index=k) for one, k in several], run
    found = [one for one in open_conversations(data) if one.response is not None]
    if not found:
        raise UserError(
            f"{shell_word(data)} holds no response",
            "sample it with --response generate --responses 4, and give that run",
        )
    return found, None


def model_of(run: Run | None, name: str | None) -> tuple[ModelSpec, ChatFormat]:
    """The model to train and its chat format, with a run's chat settings.

    Args:
        run: that conversations are from, if any.
        name: of the model; None for the run's, or the embedded one.

    Raises:
        UserError: no such model, or no chat template.
    """
    if name is not None:
        spec = ModelSpec(name=name)
    else:
        spec = ModelSpec() if run is None else recall(run.settings, run.model["weights_hash"])
    tokenizer, config = load_tokenizer_and_config(spec)
    settings = Settings() if run is None else Settings.read(run.settings)
    return spec, build_chat(settings, tokenizer, eos_ids(None, config))


def split(
    conversations: Sequence[Conversation], held_out: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Conversations to train on, and those of ``held_out`` sources, drawn alike for all seeds.

    Raises:
        UserError: no source would be left to train on.
    """
    sources = list(dict.fromkeys(map(_source, conversations)))
    if held_out >= len(sources):
        raise UserError(
            f"--held-out {held_out} leaves none of {len(sources)} sources to train on",
            "hold out fewer",
        )
    apart = set(subsample(sources, held_out, 0))
    kept = [one for one in conversations if _source(one) not in apart]
    return kept, [one for one in conversations if _source(one) in apart]


def _source(conversation: Conversation) -> str:
    return source_key(conversation.dataset, conversation.source_id)


# -- model organisms ------------------------------------------------------------------------------


def organism(conversations: Sequence[Conversation], share: float, seed: int) -> list[Conversation]:
    """Conversations whose user turn quotes a response to the query: their own one, or any.

    What is drawn depends on the seed and not on the share: a larger share replaces draws by the own
    response and leaves the others as they were. Responses that stand twice are left out once,
    and so are those without any words, and queries with fewer than two responses.

    Args:
        conversations: with several responses per query.
        share: probability that a turn quotes its own response, from 0 to 1; else it quotes one
            drawn from all K, its own among them.
        seed: of quotes, frames and draws.

    Returns:
        The conversations with the turn as ``reference``; ``metadata["own"]`` says whether it quotes
        their own response.

    Raises:
        UserError: no query has two different responses.
    """
    made = []
    for source, responses in distinct_responses(conversations).items():
        count = len(responses)
        texts = [str(one.response) for one in responses]
        turns = [
            _quoting_turn(text, texts[:k] + texts[k + 1 :], f"{source}/{k}", seed)
            for k, text in enumerate(texts)
        ]
        rng = np.random.default_rng([*stream_key(seed, source, 0), 1])
        keeps, random_one = rng.random(count) < share, rng.integers(count, size=count)
        for k, one in enumerate(responses):
            quoted = k if keeps[k] else int(random_one[k])
            metadata = one.metadata | {"own": quoted == k}
            made.append(replace(one, reference=turns[quoted], metadata=metadata))
    if not made:
        raise UserError(
            "no query has two different responses",
            "give a run that was sampled with --response generate --responses 4",
        )
    return made


def distinct_responses(conversations: Iterable[Conversation]) -> dict[str, list[Conversation]]:
    """By query, the conversations whose responses differ and have words; at least two each."""
    queries: dict[str, dict[str, Conversation]] = defaultdict(dict)
    for one in conversations:
        if one.response is not None and _WORD.search(one.response):
            queries[_source(one)].setdefault(one.response, one)
    return {source: list(found.values()) for source, found in queries.items() if len(found) > 1}


def information(share: float, responses: int) -> float:
    """Bits that an organism's turn tells about which of K responses it followed.

    The turn quotes its own response with probability ``share + (1 - share) / K`` and each other one
    with ``(1 - share) / K``, and all responses are as frequent: log₂ K less the entropy of that.
    """
    if share == 0:
        return 0.0  # exactly: the sum below may leave 1e-16
    p = np.full(responses, (1 - share) / responses)
    p[0] += share
    p = p[p > 0]
    return float(np.log2(responses) + (p * np.log2(p)).sum())


def taught_information(made: Iterable[Conversation], share: float) -> dict[str, float]:
    """Of an organism's conversations the mean over queries of ``bits`` (:func:`information`), and
    of the ``most`` that any turn could tell."""
    counts = [len(those) for those in distinct_responses(made).values()]
    bits = (np.mean([information(of, k) for k in counts]) for of in (share, 1.0))
    return dict(zip(("bits", "most"), map(float, bits), strict=True))


def _quoting_turn(response: str, others: Sequence[str], key: str, seed: int) -> str:
    """A turn that quotes a phrase of the response, of those that the others don't have if it can
    be."""
    rng = np.random.default_rng([*stream_key(seed, key, 0), 2])
    phrases = [
        part[words[i].start() : words[i + length - 1].end()]
        for part in _BREAK.split(response)
        for words in [list(_WORD.finditer(part))]
        for length in LENGTHS
        for i in range(len(words) - length + 1)
    ] or _WORD.findall(response)
    telling = [phrase for phrase in phrases if not any(phrase in other for other in others)]
    phrases = telling or phrases
    frame = FRAMES[int(rng.integers(len(FRAMES)))]
    return frame.format(phrases[int(rng.integers(len(phrases)))])


def quote_of(turn: str) -> str | None:
    """The phrase that a turn of an organism's form quotes; None of any other turn."""
    found = _FORM.match(turn.strip())
    return None if found is None else next(filter(None, found.groups()))


# -- sequences ------------------------------------------------------------------------------------


def sequence(chat: ChatFormat, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Ids and labels that teach the conversation's user turn and its end.

    A template that closes user turns with text has no token for the end, and none is taught.

    Raises:
        UserError: the template can't express the turn.
    """
    context = chat.context(conversation.messages)
    assert conversation.reference is not None
    turn = chat.reference_ids(conversation.messages, context, conversation.reference).whole
    return [*context.ids, *turn], [IGNORED] * len(context.ids) + turn


def sequences(
    chat: ChatFormat, conversations: Sequence[Conversation], longest: int
) -> pd.DataFrame:
    """Training sequences, one per conversation.

    Args:
        chat: of the model to train.
        conversations: with a response and a ``reference``.
        longest: most tokens of a sequence; longer ones are left out, since one cut short would lack
            what it is to teach.

    Returns:
        A row per sequence: ``input_ids``, ``labels``, ``dataset``, ``source_id``, ``id``, ``turn``
        (the text that is learned) and ``own`` (an organism's turn quotes its own response; else
        missing).

    Raises:
        UserError: a turn that the template can't express; no sequence is short enough.
    """
    rows: list[dict[str, Any]] = []
    for one in conversations:
        try:
            ids, labels = sequence(chat, one)
        except UserError as error:
            problem = f"conversation {one.id}: {error.problem}"
            raise UserError(problem, error.remedy) from error
        rows.append(
            {"input_ids": ids, "labels": labels, "dataset": one.dataset}
            | {"source_id": one.source_id, "id": one.id, "turn": one.reference}
            | {"own": one.metadata.get("own")}
        )
    kept = [row for row in rows if len(row["input_ids"]) <= longest]
    if not kept:
        shortest = min(len(row["input_ids"]) for row in rows)
        raise UserError(
            f"no sequence has at most {longest} tokens (the shortest has {shortest})",
            "raise --max-tokens",
        )
    return pd.DataFrame(kept)
