"""Conversations with follow-ups, and plain forward passes that score a turn after a context."""

import json
from pathlib import Path

import numpy as np
import torch
from contract import VECTOR

from ia_mech.data.conversations import Conversation

QUERY = "What is 17 times 24?"
NORM = 50.0  # the L2 norm of a tiny model's logits over a small tokenizer's vocabulary is less
_KEPT: dict[tuple, torch.Tensor] = {}
LONG = "Because the light that passes through glass does not stay in the glass. " * 8
CONVERSATIONS = [
    {"query": QUERY, "response": "408.", "real_follow_up": "Are you sure?"},
    {"query": "Why?", "response": LONG, "real_follow_up": "Could you say that in one sentence?"},
    {"query": "hello", "response": "Hi! How can I help?", "real_follow_up": "hi"},
    {"query": "Who wrote this book?", "response": "Nobody knows.", "real_follow_up": None},
    {
        "query": f"{LONG} Is that so?",
        "response": "Yes, of course.",
        "real_follow_up": "And half of it?",
    },
    {
        "system": "Be brief.",
        "query": "Où est le café ?",
        "response": "Là-bas, près de l'église.",
        "real_follow_up": "Merci 🙂 and how far is that?\n\n1. on foot\n2. by car",
    },
    {"query": "Write me a poem.", "response": "", "real_follow_up": "Well?"},
    {
        "query": "Make it longer.",
        "response": "Sure.",
        "real_follow_up": "Make it funny.",
        "of": "odd",
    },
    {
        "query": "Make it funny.",
        "response": "No.",
        "real_follow_up": "Write me a poem.",
        "of": "odd",
    },
]


def dataset(path: Path, conversations=CONVERSATIONS) -> str:
    """A JSONL file of this project's own shape, ids c0, c1, …"""
    with open(path, "w", encoding="utf-8") as file:
        for number, one in enumerate(conversations):
            messages = [{"role": "system", "content": one["system"]}] if "system" in one else []
            messages.append({"role": "user", "content": one["query"]})
            messages.append({"role": "assistant", "content": one["response"]})
            ids = dict.fromkeys(("id", "source_id"), f"c{number}")
            row = {**ids, "dataset": one.get("of", "plain"), "messages": messages}
            row["real_follow_up"] = one["real_follow_up"]
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return str(path)


def conversation(row) -> Conversation:
    """A row of ``Run.contexts`` as the conversation that it was."""
    messages = tuple(dict(message) for message in row["messages"])
    real_follow_up = row["real_follow_up"] if isinstance(row["real_follow_up"], str) else None
    return Conversation(
        row["context_id"], row["source_id"], row["dataset"], messages, real_follow_up
    )


@torch.inference_mode()
def logits(model, context: list[int], turn: list[int]) -> torch.Tensor:
    """``[tokens, vocab]`` that predict a turn after a context: one pass over both, float64."""
    return model(torch.tensor([[*context, *turn]])).logits[0, len(context) - 1 : -1].double()


def logprobs(model, context: list[int], turn: list[int], temperature: float = 1.0) -> np.ndarray:
    """``[tokens]`` of a turn after a context; the last pass is kept for other temperatures."""
    key = (id(model), *context, -1, *turn)
    if key not in _KEPT:
        _KEPT.clear()
        _KEPT[key] = logits(model, context, turn) if len(turn) else torch.zeros(0, 1)
    chosen = torch.tensor(list(turn), dtype=torch.long)[:, None]
    return (_KEPT[key] / temperature).log_softmax(-1).gather(-1, chosen)[:, 0].numpy()


def nats(tokens: int, temperature: float = 1.0) -> dict:
    """Tolerance of a sum of log-probabilities: each moves by up to twice what a logit does.

    See :mod:`contract`; a single logit moves by at most ``VECTOR * NORM``.
    """
    return {"rtol": 0, "atol": max(1, tokens) * 2 * VECTOR * NORM / temperature}


def bits(tokens: int) -> dict:
    """Tolerance of a contrast in bits, the difference of two such sums."""
    return {"rtol": 0, "atol": 2 * nats(tokens)["atol"] / np.log(2)}
