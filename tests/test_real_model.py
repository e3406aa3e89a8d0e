"""The embedded model on real text: what holds for tiny models holds where the margins are real."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from ia_mech.chat.format import ChatFormat
from ia_mech.data.conversations import open_conversations
from ia_mech.engine.capture import find_blocks, find_final_norm
from ia_mech.engine.decode import Row, decode
from ia_mech.engine.state import Prefix, prefill
from ia_mech.models.load import ModelSpec, load

NEW_TOKENS = 16


@pytest.fixture(scope="module")
def subject():
    return load(ModelSpec())


@pytest.fixture(scope="module")
def contexts(subject):
    chat = ChatFormat(subject.tokenizer)
    return [chat.context(c.messages) for c in open_conversations("builtin", limit=3)]


@pytest.fixture(scope="module")
def prefilled(subject, contexts):
    prefixes = [Prefix(c.ids, [c.positions["header_last"]]) for c in contexts]
    return prefill(subject.model, prefixes, find_blocks(subject.model))


def test_greedy_user_turns_equal_generate(subject, contexts, prefilled):
    chat = ChatFormat(subject.tokenizer)
    rows = [Row(i, 0.0, (0, 0)) for i in range(len(contexts))]
    decoded = decode(subject.model, [prefilled], rows, chat.stop_ids, NEW_TOKENS)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=chat.stop_ids, pad_token_id=0
    )
    for context, row in zip(contexts, decoded, strict=True):
        ids = torch.tensor([context.ids])
        written = subject.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )[0, len(context.ids) :].tolist()
        same = row.token_ids.tolist() == written
        if not same:  # only where rounding may decide
            length = min(len(written), len(row.token_ids))
            first = int(np.argmax(row.token_ids[:length] != np.array(written[:length])))
            assert row.margins[first] < 1e-4


def test_residuals_equal_hidden_states(subject, contexts, prefilled):
    for index, context in enumerate(contexts):
        output = subject.model(torch.tensor([context.ids]), output_hidden_states=True)
        states = torch.stack(output.hidden_states)[:, 0, -1]  # [layers + 1, d_model]
        kept = prefilled.residuals[index, :, 0]
        error = (kept[:-1] - states[:-1]).norm(dim=-1) / states[:-1].norm(dim=-1)
        assert error.max() <= 1e-5  # batched and padded against alone
        last = find_final_norm(subject.model)(kept[-1])
        assert (last - states[-1]).norm() / states[-1].norm() <= 1e-5
