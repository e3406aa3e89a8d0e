"""What a dry run says scoring will cost, against counts by hand."""

from dataclasses import replace

import pytest
import scored
from conftest import Silent

import ia_mech.likelihood.scorer
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.identity import build_chat
from ia_mech.collect.job import collect
from ia_mech.collect.preflight import Plan, make_plan, open_inputs
from ia_mech.engine.plan import CPU, Grid

# Three conversations, one of which has no reference; two rows of at most 5 tokens to each.
CONVERSATIONS = [scored.CONVERSATIONS[at] for at in (0, 1, 3)]
GRID = Grid((1.0,), 1, 5)
ROWS = 2 * 5


@pytest.fixture
def config(tmp_path) -> SampleConfig:
    data = scored.dataset(tmp_path / "chats.jsonl", CONVERSATIONS)
    return SampleConfig(dataset=data, limit=None, grid=GRID, contrasts=True, swaps=2)


@pytest.fixture
def plan(tiny_subject, tmp_path):
    def make(config: SampleConfig) -> Plan:
        chat = build_chat(config, tiny_subject.tokenizer)
        inputs = open_inputs(config, tmp_path / "run")
        return make_plan(config, inputs, chat, tiny_subject.model.config, 4, CPU)

    return make


@pytest.fixture
def counts(config, tiny_subject) -> tuple[list[int], list[int]]:
    """Tokens of every context, and of every reference."""
    chat = build_chat(config, tiny_subject.tokenizer)
    contexts = [
        [{"role": "user", "content": c["query"]}, {"role": "assistant", "content": c["response"]}]
        for c in CONVERSATIONS
    ]
    references = [c["reference"] for c in CONVERSATIONS]
    return (
        [len(chat.context(messages).ids) for messages in contexts],
        [0 if text is None else len(tiny_subject.tokenizer.tokenize(text)) for text in references],
    )


def test_references_are_counted_after_their_context_the_swaps_and_an_empty_response(
    config, plan, counts
):
    (a, b, c), (x, y, _) = counts
    found = plan(config)
    assert found.context_tokens == a + b + c and found.longest_context == b
    assert found.contrast_contexts == 2 * (2 + 1)
    assert found.contrast_tokens == (2 + 1) * (a + b)
    # Query and response are rivals, together about as long as the context; the reference follows
    # its own response, two others and an empty one.
    assert found.scored_tokens == (a + x + 4 * x) + (b + y + 4 * y)


def test_generations_are_counted_at_their_longest_in_every_context(config, plan, counts):
    (a, b, c), (x, y, _) = counts
    found = plan(replace(config, score_generations=True))
    assert found.contrast_contexts == 3 * (2 + 1)
    assert found.contrast_tokens == (2 + 1) * (a + b + c)
    assert found.scored_tokens == (a + x + 4 * (x + ROWS)) + (b + y + 4 * (y + ROWS)) + 4 * ROWS


def test_responses_to_be_written_are_counted_at_their_longest(config, plan, counts, tmp_path):
    longer, shorter = (
        plan(replace(config, response="generate", max_response_tokens=n)) for n in (40, 10)
    )
    assert longer.contrast_contexts == shorter.contrast_contexts == 6
    assert longer.contrast_tokens - shorter.contrast_tokens == 6 * 30
    assert longer.scored_tokens - shorter.scored_tokens == 2 * 30
    few, many = plan(config), plan(replace(config, swaps=1000))  # there are no more to lend
    assert replace(many, unit_rows=few.unit_rows, unit_cost=few.unit_cost) == few
    (a, b, _), (x, y, _) = counts
    found = plan(replace(config, swaps=0))  # the empty response is left
    assert (found.contrast_contexts, found.contrast_tokens) == (2, a + b)
    assert found.scored_tokens == a + b + 3 * (x + y)
    data = scored.dataset(tmp_path / "bare.jsonl", [CONVERSATIONS[2]])  # without a reference
    found = plan(replace(config, dataset=data))
    assert (found.contrast_contexts, found.contrast_tokens, found.scored_tokens) == (0, 0, 0)


def test_own_candidates_are_counted_where_there_is_a_reference(
    config, plan, tiny_subject, tmp_path
):
    file = tmp_path / "own.jsonl"
    file.write_text(
        '{"name": "a", "text": "Why is that so?"}\n{"name": "b", "text": "No", "id": "c1"}'
    )
    found = plan(replace(config, candidates=str(file)))
    everywhere, one = (len(tiny_subject.tokenizer.tokenize(t)) for t in ("Why is that so?", "No"))
    assert found.scored_tokens == plan(config).scored_tokens + 2 * everywhere + one


def test_as_many_contexts_are_prefilled_as_were_foreseen(
    config, plan, tiny_subject, tmp_path, monkeypatch
):
    """Where as many responses can be lent; the bare headers, all alike, are one more."""
    module, prefilled = ia_mech.likelihood.scorer, []
    honest = module.prefill_counterfactuals

    def counting(model, contexts, prefixes, *rest):
        prefilled.extend(contexts)
        return honest(model, contexts, prefixes, *rest)

    monkeypatch.setattr(module, "prefill_counterfactuals", counting)
    config = replace(config, swaps=2)
    run = collect(config, tiny_subject, tmp_path / "run", Silent())
    assert len(run.contexts) == 3
    assert len(set(prefilled)) == len(prefilled) == plan(config).contrast_contexts + 1
