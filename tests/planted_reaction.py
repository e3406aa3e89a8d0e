"""Transformers set by hand, in which turns depend on the response through one known route.

A response holds one of four tokens that name it, among filler. In both models the turn repeats a
token that belongs to that name. In one model a block *writes* the response's name into a header
token, and a later block of the turn's tokens *reads* it there; in the other model the turn's tokens
read the response themselves.

Both are Llamas. With a rotary base of 1e12 the slowest pair of a head's dimensions stands still, so
that attention depends on what tokens are. A token that looks for nothing attends to the
begin-of-text token, whose score is 40 below that of a match.
"""

import numpy as np
import torch
import transformers

from ia_mech.chat.format import ChatContext
from ia_mech.engine.installed import install

BOS, FILLER, NAME, END, SEPARATOR, HEADER, OPENER, ECHO = 1, 3, 10, 14, 15, 16, 19, 20
NAMES, VOCAB, WIDTH, DEPTH = 4, 24, 32, 6
WRITE, READ = 2, 5  # blocks
WRITTEN = "header_1"
POSITIONS = ("turn_end", "turn_separator", "header_0", WRITTEN, "header_last")
CONSTANT, IS_BOS, IS_HEADER, IS_NAME, IS_TURN = range(5)  # dimensions of a state
OWN, COPIED, READ_OUT, REST = 5, 9, 13, 31


def model(through_header: bool) -> transformers.LlamaForCausalLM:
    """The model with a route through the header, or the one without; installed."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=DEPTH,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        tie_word_embeddings=False,
    )
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        table = made.model.embed_tokens.weight
        table[:, CONSTANT] = 1
        table[BOS, IS_BOS] = 1
        table[HEADER + 1, IS_HEADER] = 1
        each = torch.arange(NAMES)
        table[NAME + each, IS_NAME] = 1
        table[NAME + each, OWN + each] = 1
        table[OPENER:, IS_TURN] = 1
        table[:, REST] = (4 - (table**2).sum(1)).sqrt()  # all of length 2
        if through_header:
            _attends(made, WRITE, IS_HEADER, IS_NAME, OWN, COPIED, 0.35)
            _attends(made, READ, IS_TURN, IS_HEADER, COPIED, READ_OUT, 2.0)
        else:
            _attends(made, READ, IS_TURN, IS_NAME, OWN, READ_OUT, 2.0)
        made.lm_head.weight[ECHO + each, READ_OUT + each] = 1.5
    install(made.eval().requires_grad_(False))
    return made


def _attends(made, block: int, query: int, key: int, read: int, write: int, gain: float) -> None:
    """Tokens with the feature ``query`` add to their state what those with ``key`` hold."""
    attention = made.model.layers[block - 1].self_attn
    attention.q_proj.weight[3, CONSTANT] = attention.k_proj.weight[3, IS_BOS] = 4.0
    attention.q_proj.weight[7, query] = attention.k_proj.weight[7, key] = 6.0
    each = torch.arange(NAMES)
    attention.v_proj.weight[each, read + each] = gain
    attention.o_proj.weight[write + each, each] = 1.0


def context(name: int, length: int, at: int, query: int = 3) -> ChatContext:
    """Query and a response of some length that holds its name at a place, with the open header."""
    response = [FILLER + (query + i) % 6 for i in range(length)]
    response[at] = NAME + name
    before = [BOS, *(FILLER + i % 6 for i in range(query))]
    start = len(before) + length
    tail = [END, SEPARATOR, HEADER, HEADER + 1, HEADER + 2]
    positions = {"query_end": len(before) - 1, "response_end": start - 1}
    positions |= {position: start + i for i, position in enumerate(POSITIONS)}
    ids = [*before, *response, *tail]
    return ChatContext("", ids, positions, range(1, len(before)), range(len(before), start))


def bare() -> tuple[int, ...]:
    """The header alone."""
    return (BOS, HEADER, HEADER + 1, HEADER + 2)


def turn(name: int, length: int) -> tuple[int, ...]:
    """A turn after the response of this name."""
    return (OPENER, *[ECHO + name] * length)


def lengths(seed: int) -> list[int]:
    """A different length for the response of each name."""
    return np.random.default_rng(seed).permutation(np.arange(4, 4 + NAMES)).tolist()
