"""Transformers set by hand, in which the turn depends on the response in a known way.

A response holds two marked words among filler: one of four that name its content, and one of four
that name its wording. The turn repeats a word that belongs to one of these names. Switches
(:class:`Kind`) say which ways there are: blocks may write what the response says into a header
token, and the turn's tokens may read it there, or in the response itself.

All but one are Llamas with two heads. With a rotary base of 1e12 the slowest dimensions of a head
stand still, so that attention depends on what tokens are. Where a token looks for nothing, its
attention rests on the begin-of-text token, whose score is some tens below that of a match. Every
weight has noise on it, different in each study. So attention leaves a little of everything
everywhere, as in trained models.

In the one with a *recurrent state* (Qwen3.5) a linear-attention layer writes the content's name
into its state, and the turn's tokens alone read it there: no key, no value and no header token
holds it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from experiments.change import HEADER, OWN, RESPONSE, STATE, Cell, Whole
from experiments.locate import WINDOWS, cells_of
from experiments.outcome import SiblingContexts
from ia_mech.engine.installed import install

NAMES, LENGTH = 4, 4  # contents and wordings; words of a turn after its first
BOS, FILLER, FILLERS, NAME, WORDING = 1, 2, 8, 10, 14
END, SEPARATOR, USER, OPENER, OPENING, ECHO, JUNK = 18, 19, 20, 23, 24, 25, 29
VOCAB, WIDTH, DEPTH, HEADS, DIM = 30, 64, 4, 2, 16
WRITE, READ, DIRECT = 1, 2, 4  # blocks
# What the dimensions of the residual stream hold; from OWN_NAME on, each feature has several.
CONSTANT, IS_BOS, IS_HEADER, IS_NAME, IS_TURN, IS_OPENING, IS_WORDING, IS_WORD = range(8)
OPENED, IS_JUNK, OWN_NAME, OWN_WORDING, COPIED, KNOWN, TOLD, BAG = 8, 9, 10, 14, 18, 22, 26, 30
REST = 63
STILL, SINK = 15, 7  # dimensions of a head that positions don't turn: of what is looked for
GREEDY, SAMPLED = 0.0, 1.0
RECURRENT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * (DEPTH // 2),
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": DIM,
    "linear_value_head_dim": DIM,
}


@dataclass(frozen=True)
class Kind:
    """What is planted.

    Attributes:
        name: as it is shown.
        carries: the sites that carry bits, by their names in ``experiments.change``.
        follows: how often a turn says what its response says; otherwise it says a random word.
        code: a header token gets the content's name.
        bag: header tokens get the mean of the response's words.
        header: how strongly turns read the header.
        direct: how strongly turns read the response.
        gated: turns read the header after an opening word alone, which sampled turns have and
            greedy ones don't; other kinds have no greedy turns.
        joint: turns read the response only where the header names it, too.
        checks: turns are spoiled where header and response name different things.
        wording: turns read which wording a response has in place of its content.
        windows: windows of layers are measured, too.
        state: the model is recurrent, and turns read the response in its state.
    """

    name: str
    carries: frozenset[str] = frozenset()
    follows: float = 0.0
    code: bool = False
    bag: bool = False
    header: float = 0.0
    direct: float = 0.0
    gated: bool = False
    joint: bool = False
    checks: bool = False
    wording: bool = False
    windows: bool = False
    state: bool = False


SAID = frozenset({OWN})
# With 0.35, the bits of 60 queries are 4.2 standard errors: 1.5 times the effect that is shown with
# a power of 80%. A window of layers, with 30 queries and one recipient, needs 0.6.
ROUTES = {
    kind.name: kind
    for kind in (
        Kind("none"),
        Kind("bag of words, unread", bag=True),
        Kind("header", SAID | {HEADER}, 0.35, code=True, header=1.0),
        Kind("one layer and head", SAID | {RESPONSE}, 0.6, direct=1.0, windows=True),
        Kind("redundant", SAID | {HEADER, RESPONSE}, 0.35, code=True, header=1.0, direct=1.0),
        Kind("joint", SAID, 0.35, code=True, direct=1.0, joint=True),
        Kind("generic damage", SAID | {RESPONSE}, 0.35, code=True, direct=1.0, checks=True),
        Kind("latent", SAID | {HEADER}, 0.35, code=True, header=1.0, gated=True),
        Kind("code, unread", code=True, gated=True),
        Kind("wording only", SAID | {RESPONSE}, 0.35, code=True, direct=1.0, wording=True),
        # Beyond the ten of the plan: the header turns logits a fiftieth as much as the response.
        Kind("faint header", SAID | {RESPONSE}, 0.35, code=True, header=0.02, direct=1.0),
        Kind("recurrent state", SAID | {STATE}, 0.35, state=True),
    )
}


# -- the model -------------------------------------------------------------------------------------


def model(kind: Kind, seed: int, noise: float) -> transformers.PreTrainedModel:
    """The model of a kind, installed; ``noise`` is the spread of what is added to every weight."""
    config = (Qwen3_5TextConfig if kind.state else transformers.LlamaConfig)(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        tie_word_embeddings=False,
        **(RECURRENT if kind.state else {}),
    )
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                # Qwen3.5 adds 1 to all norms but those of linear-attention layers.
                parameter.fill_(float(not kind.state or "linear_attn" in name))
            else:
                parameter.normal_(0.0, noise, generator=generator)
        _embed(made.model.embed_tokens.weight)
        each = torch.arange(NAMES)
        if kind.code:
            _attends(made, WRITE, IS_HEADER, IS_NAME, OWN_NAME, COPIED, NAMES, 0.25)
        if kind.bag:
            words = FILLERS + 2 * NAMES
            _attends(made, WRITE, IS_HEADER, IS_WORD, BAG, BAG + words, words, 1.0, head=1)
        if kind.gated:
            _attends(made, WRITE, IS_TURN, IS_OPENING, IS_OPENING, OPENED, 1, 0.25, head=1)
        if kind.header:
            who = OPENED if kind.gated else IS_TURN
            _attends(made, READ, who, IS_HEADER, COPIED, TOLD, NAMES, 0.5 * kind.header)
        if kind.joint or kind.checks:
            _attends(made, READ, IS_TURN, IS_HEADER, COPIED, KNOWN, NAMES, 0.25, head=1)
        if kind.direct and not kind.joint:
            what, read = (IS_WORDING, OWN_WORDING) if kind.wording else (IS_NAME, OWN_NAME)
            _attends(made, DIRECT, IS_TURN, what, read, TOLD, NAMES, 0.5 * kind.direct, head=1)
        if kind.joint:
            _matches(made, DIRECT, OWN_NAME, TOLD, NAMES, 0.5)
        if kind.state:
            _keeps(made.model.layers[WRITE - 1].linear_attn)
        if kind.checks:
            _matches(made, DIRECT, IS_BOS, IS_JUNK, 1, 1.0)
        made.lm_head.weight[ECHO + each, TOLD + each] += 0.35
        made.lm_head.weight[JUNK, IS_JUNK] += 0.7
    install(made.eval().requires_grad_(False))
    return made


def _embed(table: torch.Tensor) -> None:
    """Set the embeddings; all are of length 2."""
    each, words = torch.arange(NAMES), torch.arange(FILLERS + 2 * NAMES)
    table[:, :REST] = 0
    table[:, CONSTANT] = 1
    table[BOS, IS_BOS] = 1
    table[USER + 1, IS_HEADER] = 1
    table[NAME + each, IS_NAME] = 1
    table[NAME + each, OWN_NAME + each] = 1
    table[WORDING + each, IS_WORDING] = 1
    table[WORDING + each, OWN_WORDING + each] = 1
    table[FILLER + words, IS_WORD] = 0.5
    table[FILLER + words, BAG + words] = 0.5
    table[OPENER : ECHO + NAMES, IS_TURN] = 1
    table[OPENING, IS_OPENING] = 1
    table[:, REST] = (4 - (table[:, :REST] ** 2).sum(1)).sqrt()


def _attends(
    made, block: int, who: int, what: int, read: int, write: int, count: int, gain: float, head=0
) -> None:
    """Tokens with the feature ``who`` add to their state what tokens with ``what`` hold."""
    attention, at = made.model.layers[block - 1].self_attn, head * DIM
    attention.q_proj.weight[at + SINK, CONSTANT] += 4.0
    attention.k_proj.weight[at + SINK, IS_BOS] += 4.0
    attention.q_proj.weight[at + STILL, who] += 6.0
    attention.k_proj.weight[at + STILL, what] += 12.0 if what == IS_WORD else 6.0
    each = torch.arange(count)
    attention.v_proj.weight[at + each, read + each] += gain
    attention.o_proj.weight[write + each, at + each] += 1.0


def _matches(made, block: int, read: int, write: int, count: int, gain: float) -> None:
    """Turns that know a name from the header attend to the response with that name, or else to the
    begin-of-text token, and add to their state what they find there."""
    attention, each = made.model.layers[block - 1].self_attn, torch.arange(NAMES)
    attention.q_proj.weight[STILL, CONSTANT] += 4.0
    attention.k_proj.weight[STILL, IS_BOS] += 4.0
    attention.q_proj.weight[4 + each, KNOWN + each] += 6.0
    attention.k_proj.weight[4 + each, OWN_NAME + each] += 6.0
    each = torch.arange(count)
    attention.v_proj.weight[each, read + each] += gain
    attention.o_proj.weight[write + each, each] += 1.0


def _keeps(layer) -> None:
    """A linear-attention layer writes names into its state, which turns' tokens alone read."""
    each, width = torch.arange(NAMES), HEADS * DIM  # of queries, of keys and of values
    layer.A_log.fill_(-12.0)  # nothing decays
    layer.conv1d.weight[:, 0, -1] += 1.0  # of each token its own
    layer.in_proj_qkv.weight[0, IS_TURN] += 4.0
    layer.in_proj_qkv.weight[width, CONSTANT] += 4.0
    layer.in_proj_qkv.weight[2 * width + each, OWN_NAME + each] += 4.0
    # How strongly a token is written, and how much of what it reads a token lets through.
    for gate, feature in ((layer.in_proj_b, IS_NAME), (layer.in_proj_z, IS_TURN)):
        gate.weight[:, CONSTANT] -= 5.0
        gate.weight[:, feature] += 10.0
    layer.out_proj.weight[TOLD + each, each] += 0.025


# -- queries ---------------------------------------------------------------------------------------


def siblings(
    kind: Kind, rng: np.random.Generator, name: str, wordings: bool = False
) -> SiblingContexts:
    """A query with four responses, and a turn after each.

    Args:
        kind: what is planted.
        rng: of responses and turns.
        name: of the query.
        wordings: whether the responses are four wordings of one content instead of four contents.
    """
    asked = rng.integers(FILLER, FILLER + FILLERS, size=rng.integers(2, 6)).tolist()
    contents = rng.permutation(NAMES)
    worded = rng.permutation(NAMES)
    if wordings:
        contents[:] = contents[0]
    contexts, starts, stops = [], [], []
    for content, wording in zip(contents, worded, strict=True):
        response = rng.integers(FILLER, FILLER + FILLERS, size=rng.integers(6, 12))
        first, second = rng.choice(len(response), 2, replace=False)
        response[first], response[second] = NAME + content, WORDING + wording
        starts.append(1 + len(asked))
        stops.append(starts[-1] + len(response))
        tail = [END, SEPARATOR, USER, USER + 1, USER + 2]
        contexts.append((BOS, *asked, *response.tolist(), *tail))
    turns = []
    for temperature in (GREEDY, SAMPLED) if kind.gated else (SAMPLED,):
        opened = kind.gated and temperature == SAMPLED
        for k, own in enumerate(worded if kind.wording else contents):
            follows = rng.random() < kind.follows and (opened or not kind.gated)
            said = int(own) if follows else int(rng.integers(NAMES))
            ids = (OPENING if opened else OPENER, *[ECHO + said] * LENGTH)
            turns.append((k, temperature, 0, ids))
    cells = cells_of([WINDOWS] if kind.windows else [], DEPTH, kind.state)
    return SiblingContexts(
        name, "planted", 0, contexts, starts, stops, {"header_0": 2, "header_last": 4},
        [f"{name}-{k}" for k in range(NAMES)], turns, worded.tolist(),
        [Cell(OWN, Whole(), every=True), *cells], SAMPLED,
    )  # fmt: skip
